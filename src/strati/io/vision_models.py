"""ResNets and vision transformers rebuilt from the names and shapes of their tensors (torchvision, timm, CIFAR).

ResNet: ``conv1, bn1, layer1 ... layerN, fc`` with basic blocks (two 3x3 convolutions) or bottlenecks (1x1, 3x3, 1x1,
stride on the 3x3 one), grouped or not, as the shapes say. The stem's kernel decides the rest: a 7x7 one has stride 2
and is followed by a max pool (ImageNet), a 3x3 one has neither (CIFAR). A shortcut that changes the shape is a 1x1
convolution (``downsample`` or ``shortcut``), or, if it has no weights, every second pixel and zeros for the missing
channels (option A of He et al. 2016, section 3.3).

ViT: pre-norm blocks with a class token and learned positions (Dosovitskiy et al. 2021), layer norms of epsilon 1e-6,
exact GELU. timm's variants follow from their tensors: layer scale (``ls1.gamma``), norms of queries and keys, register
tokens, mean pooling (``fc_norm``), no biases in qkv. No tensor holds the number of heads: it is known for the usual
widths and must be given for others.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from strati.core.errors import BadInputError, UnsupportedError

Shapes = Mapping[str, tuple[int, ...]]

_CONV = re.compile(r"layer([1-9])\.(\d{1,3})\.conv([123])\.weight")


def is_resnet(shapes: Shapes) -> bool:
    """Whether tensors of these names and shapes are a residual network of this kind."""
    stem = shapes.get("conv1.weight", ())
    return len(stem) == 4 and "bn1.weight" in shapes and "layer1.0.conv1.weight" in shapes


def resnet(shapes: Shapes) -> nn.Module:
    """The network that has tensors of these names and shapes, in evaluation mode, its weights at random.

    Raises:
        UnsupportedError: Some of the tensors belong to another kind of residual network.
    """
    model = ResNet(shapes).eval()
    shapes_built = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    foreign = sorted(
        name for name in shapes if name not in shapes_built and not name.endswith("num_batches_tracked")
    )
    if foreign:
        raise UnsupportedError(foreign[0], "is not of a plain residual network; build the nn.Module yourself")
    return model


class Block(nn.Module):
    """A residual block, basic or bottleneck: ``relu(body(x) + shortcut(x))``."""

    def __init__(self, name: str, shapes: Shapes, stride: int) -> None:
        super().__init__()
        kernels = [shapes[key] for i in (1, 2, 3) if (key := f"{name}.conv{i}.weight") in shapes]
        self.depth = len(kernels)
        strided = 2 if self.depth == 3 else 1
        width = int(kernels[0][1])
        for i, (outputs, inputs, side, _) in enumerate(kernels, 1):
            groups = width // inputs if inputs and width % inputs == 0 else 1
            step = stride if i == strided else 1
            conv = nn.Conv2d(width, outputs, side, step, side // 2, groups=groups, bias=False)
            self.add_module(f"conv{i}", conv)
            self.add_module(f"bn{i}", nn.BatchNorm2d(outputs))
            width = int(outputs)
        self.stride, self.extra = stride, width - int(kernels[0][1])
        self.shortcut_name = next(
            (word for word in ("downsample", "shortcut") if f"{name}.{word}.0.weight" in shapes), None
        )
        if self.shortcut_name is not None:
            outputs, inputs, side, _ = shapes[f"{name}.{self.shortcut_name}.0.weight"]
            projection = nn.Conv2d(inputs, outputs, side, stride, side // 2, bias=False)
            self.add_module(self.shortcut_name, nn.Sequential(projection, nn.BatchNorm2d(outputs)))

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        y = x
        for i in range(1, self.depth + 1):
            y = self.get_submodule(f"bn{i}")(self.get_submodule(f"conv{i}")(y))
            y = functional.relu(y) if i < self.depth else y
        return functional.relu(y + self._shortcut(x))

    def _shortcut(self, x: Tensor) -> Tensor:
        if self.shortcut_name is not None:
            projected: Tensor = self.get_submodule(self.shortcut_name)(x)
            return projected
        if self.stride == 1 and not self.extra:
            return x
        before = self.extra // 2
        return functional.pad(
            x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, before, self.extra - before)
        )


class ResNet(nn.Module):
    """A residual network that has tensors of the given names and shapes."""

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        outputs, inputs, side, _ = shapes["conv1.weight"]
        self.pooled = side >= 7
        self.conv1 = nn.Conv2d(
            inputs, outputs, side, 2 if self.pooled else 1, side // 2, bias="conv1.bias" in shapes
        )
        self.bn1 = nn.BatchNorm2d(outputs)
        blocks = sorted({(int(m[1]), int(m[2])) for name in shapes if (m := _CONV.fullmatch(name))})
        self.stages = [f"layer{stage}" for stage in sorted({stage for stage, _ in blocks})]
        for stage in self.stages:
            numbers = [number for place, number in blocks if f"layer{place}" == stage]
            made = [
                Block(f"{stage}.{n}", shapes, 2 if n == 0 and stage != self.stages[0] else 1) for n in numbers
            ]
            self.add_module(stage, nn.Sequential(*made))
        self.head = next((word for word in ("fc", "linear") if f"{word}.weight" in shapes), None)
        if self.head is not None:
            classes, width = shapes[f"{self.head}.weight"]
            self.add_module(self.head, nn.Linear(width, classes, bias=f"{self.head}.bias" in shapes))

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images (batch, channels, height, width); features where there is no classifier."""
        x = functional.relu(self.bn1(self.conv1(x)))
        x = functional.max_pool2d(x, 3, 2, 1) if self.pooled else x
        for stage in self.stages:
            x = self.get_submodule(stage)(x)
        features = x.mean(dim=(2, 3))
        logits: Tensor = features if self.head is None else self.get_submodule(self.head)(features)
        return logits


HEADS = {192: 3, 384: 6, 512: 8, 768: 12, 1024: 16, 1280: 16, 1408: 16, 1664: 16}
"""Heads of the published vision transformers by their width."""

_TIMM = re.compile(r"blocks\.(\d{1,3})\.attn\.qkv\.weight")
_TORCHVISION = re.compile(r"encoder\.layers\.encoder_layer_(\d{1,3})\.self_attention\.in_proj_weight")


def is_vit(shapes: Shapes) -> bool:
    """Whether tensors of these names and shapes are a vision transformer of this kind."""
    timm = len(shapes.get("patch_embed.proj.weight", ())) == 4 and "pos_embed" in shapes
    torchvision = len(shapes.get("conv_proj.weight", ())) == 4 and "encoder.pos_embedding" in shapes
    return (timm and any(map(_TIMM.fullmatch, shapes))) or (
        torchvision and any(map(_TORCHVISION.fullmatch, shapes))
    )


def vit(shapes: Shapes, heads: int | None = None) -> nn.Module:
    """The network that has tensors of these names and shapes, in evaluation mode, its weights at random.

    Args:
        shapes: Of the checkpoint's tensors, by name.
        heads: Attention heads, where the width is not one of the published networks'.

    Raises:
        BadInputError: The number of heads is not known, or does not divide the width.
        UnsupportedError: Some of the tensors belong to another kind of transformer.
    """
    timm = "pos_embed" in shapes
    width = shapes["patch_embed.proj.weight" if timm else "conv_proj.weight"][0]
    count = heads or HEADS.get(width)
    if count is None:
        raise BadInputError(
            "heads", f"no tensor holds the number of heads of a ViT of width {width}; give heads="
        )
    if width % count:
        raise BadInputError("heads", f"{count} heads do not divide the width {width}")
    model = (Timm(shapes, count) if timm else TorchVision(shapes, count)).eval()
    built = model.state_dict()
    foreign = sorted(name for name in shapes if name not in built)
    if foreign:
        raise UnsupportedError(
            foreign[0], "is not of a plain vision transformer; build the nn.Module yourself"
        )
    return model


def _linear(shapes: Shapes, name: str) -> nn.Linear:
    outputs, inputs = shapes[f"{name}.weight"]
    return nn.Linear(inputs, outputs, bias=f"{name}.bias" in shapes)


def _norm(width: int) -> nn.LayerNorm:
    return nn.LayerNorm(width, eps=1e-6)


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of (batch, heads, places, width); the heads side by side again."""
    mixed = functional.scaled_dot_product_attention(q, k, v)
    return mixed.transpose(1, 2).flatten(2)


class LayerScale(nn.Module):
    """Layer scale: a factor per channel."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Scaled."""
        return x * self.gamma


class Attention(nn.Module):
    """timm's attention: ``qkv`` and ``proj``, optionally norms of queries and keys."""

    def __init__(self, shapes: Shapes, name: str, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = _linear(shapes, f"{name}.qkv"), _linear(shapes, f"{name}.proj")
        each = self.qkv.out_features // 3 // heads
        for part in ("q_norm", "k_norm"):
            self.add_module(part, _norm(each) if f"{name}.{part}.weight" in shapes else nn.Identity())

    def forward(self, x: Tensor) -> Tensor:
        """The attention's output."""
        batch, places, _ = x.shape
        q, k, v = self.qkv(x).view(batch, places, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        output: Tensor = self.proj(
            _attend(self.get_submodule("q_norm")(q), self.get_submodule("k_norm")(k), v)
        )
        return output


class Mlp(nn.Module):
    """``fc2(gelu(fc1(x)))``."""

    def __init__(self, shapes: Shapes, name: str) -> None:
        super().__init__()
        self.fc1, self.fc2 = _linear(shapes, f"{name}.fc1"), _linear(shapes, f"{name}.fc2")

    def forward(self, x: Tensor) -> Tensor:
        """The MLP's output."""
        output: Tensor = self.fc2(functional.gelu(self.fc1(x)))
        return output


class TimmBlock(nn.Module):
    """A pre-norm block with timm's names."""

    def __init__(self, shapes: Shapes, name: str, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = _norm(width), _norm(width)
        self.attn, self.mlp = Attention(shapes, f"{name}.attn", heads), Mlp(shapes, f"{name}.mlp")
        scaled = f"{name}.ls1.gamma" in shapes
        self.ls1 = LayerScale(width) if scaled else nn.Identity()
        self.ls2 = LayerScale(width) if scaled else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        x = x + self.ls1(self.attn(self.norm1(x)))
        output: Tensor = x + self.ls2(self.mlp(self.norm2(x)))
        return output


class Patches(nn.Module):
    """timm's ``patch_embed``."""

    def __init__(self, shapes: Shapes, name: str) -> None:
        super().__init__()
        width, channels, side, _ = shapes[f"{name}.weight"]
        self.proj = nn.Conv2d(channels, width, side, side, bias=f"{name}.bias" in shapes)

    def forward(self, x: Tensor) -> Tensor:
        """Patches as a sequence."""
        output: Tensor = self.proj(x).flatten(2).transpose(1, 2)
        return output


class Timm(nn.Module):
    """A vision transformer with timm's names."""

    def __init__(self, shapes: Shapes, heads: int) -> None:
        super().__init__()
        self.patch_embed = Patches(shapes, "patch_embed.proj")
        width = self.patch_embed.proj.out_channels
        self.tokens = [name for name in ("cls_token", "reg_token") if name in shapes]
        for name in (*self.tokens, "pos_embed"):
            self.register_parameter(name, nn.Parameter(torch.zeros(shapes[name])))
        depth = 1 + max(int(m[1]) for name in shapes if (m := _TIMM.fullmatch(name)))
        self.norm_pre = _norm(width) if "norm_pre.weight" in shapes else nn.Identity()
        self.blocks = nn.Sequential(*(TimmBlock(shapes, f"blocks.{i}", width, heads) for i in range(depth)))
        self.norm = _norm(width) if "norm.weight" in shapes else nn.Identity()
        self.fc_norm = _norm(width) if "fc_norm.weight" in shapes else nn.Identity()
        self.head = _linear(shapes, "head") if "head.weight" in shapes else nn.Identity()
        self.mean = "fc_norm.weight" in shapes or "cls_token" not in shapes

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images; features where there is no classifier."""
        x = self.patch_embed(x)
        extra = [self.get_parameter(name).expand(len(x), -1, -1) for name in self.tokens]
        positions = self.get_parameter("pos_embed")
        if positions.shape[1] == x.shape[1]:  # positions of the patches alone
            x = torch.cat([*extra, x + positions], dim=1)
        elif "cls_token" in self.tokens and positions.shape[1] == x.shape[1] + 1:
            x = torch.cat([extra[0], x], dim=1) + positions
            x = torch.cat([x[:, :1], *extra[1:], x[:, 1:]], dim=1)
        else:
            x = torch.cat([*extra, x], dim=1) + positions
        x = self.norm(self.blocks(self.norm_pre(x)))
        start = sum(self.get_parameter(name).shape[1] for name in self.tokens)
        pooled = x[:, start:].mean(dim=1) if self.mean else x[:, 0]
        output: Tensor = self.head(self.fc_norm(pooled))
        return output


class TorchVisionBlock(nn.Module):
    """A pre-norm block with torchvision's names."""

    def __init__(self, shapes: Shapes, name: str, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = _norm(width), _norm(width)
        self.self_attention = nn.MultiheadAttention(width, heads, batch_first=True)
        first, second = ("linear_1", "linear_2") if f"{name}.mlp.linear_1.weight" in shapes else ("0", "3")
        self.mlp = nn.Sequential()
        self.mlp.add_module(first, _linear(shapes, f"{name}.mlp.{first}"))
        self.mlp.add_module("1", nn.GELU())
        self.mlp.add_module(second, _linear(shapes, f"{name}.mlp.{second}"))

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        normed = self.ln_1(x)
        x = x + self.self_attention(normed, normed, normed, need_weights=False)[0]
        output: Tensor = x + self.mlp(self.ln_2(x))
        return output


class Encoder(nn.Module):
    """torchvision's ``encoder``."""

    def __init__(self, shapes: Shapes, width: int, heads: int) -> None:
        super().__init__()
        self.pos_embedding = nn.Parameter(torch.zeros(shapes["encoder.pos_embedding"]))
        depth = 1 + max(int(m[1]) for name in shapes if (m := _TORCHVISION.fullmatch(name)))
        self.layers = nn.Sequential()
        for i in range(depth):
            word = f"encoder_layer_{i}"
            self.layers.add_module(word, TorchVisionBlock(shapes, f"encoder.layers.{word}", width, heads))
        self.ln = _norm(width)

    def forward(self, x: Tensor) -> Tensor:
        """The encoded sequence."""
        output: Tensor = self.ln(self.layers(x + self.pos_embedding))
        return output


class TorchVision(nn.Module):
    """A vision transformer with torchvision's names."""

    def __init__(self, shapes: Shapes, heads: int) -> None:
        super().__init__()
        width, channels, side, _ = shapes["conv_proj.weight"]
        self.class_token = nn.Parameter(torch.zeros(shapes["class_token"]))
        self.conv_proj = nn.Conv2d(channels, width, side, side)
        self.encoder = Encoder(shapes, width, heads)
        self.heads = nn.Sequential()
        for name in ("pre_logits", "head"):
            if f"heads.{name}.weight" in shapes:
                self.heads.add_module(name, _linear(shapes, f"heads.{name}"))
                if name == "pre_logits":
                    self.heads.add_module("act", nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images; features where there is no classifier."""
        x = self.conv_proj(x).flatten(2).transpose(1, 2)
        x = self.encoder(torch.cat([self.class_token.expand(len(x), -1, -1), x], dim=1))
        output: Tensor = self.heads(x[:, 0])
        return output
