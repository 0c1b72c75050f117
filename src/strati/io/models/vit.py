"""Vision transformers rebuilt from their tensors, named as torchvision or timm name them.

Pre-norm blocks with a class token and learned positions (Dosovitskiy et al. 2021): layer norms of epsilon 1e-6, exact
GELU. timm's variants are told from their tensors: layer scale (``ls1.gamma``), norms of queries and keys, register
tokens, mean pooling (``fc_norm``), no biases in qkv. The number of heads is in no tensor: it is known for the usual
widths, and has to be given for others.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from strati.core.errors import BadInputError, UnsupportedError

Shapes = Mapping[str, tuple[int, ...]]

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
            "heads", f"no tensor tells the number of heads of a ViT of width {width}; give heads="
        )
    if width % count:
        raise BadInputError("heads", f"{count} heads do not divide the width {width}")
    model = (Timm(shapes, count) if timm else TorchVision(shapes, count)).eval()
    own = model.state_dict()
    foreign = sorted(name for name in shapes if name not in own)
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
        out: Tensor = self.proj(_attend(self.get_submodule("q_norm")(q), self.get_submodule("k_norm")(k), v))
        return out


class Mlp(nn.Module):
    """``fc2(gelu(fc1(x)))``."""

    def __init__(self, shapes: Shapes, name: str) -> None:
        super().__init__()
        self.fc1, self.fc2 = _linear(shapes, f"{name}.fc1"), _linear(shapes, f"{name}.fc2")

    def forward(self, x: Tensor) -> Tensor:
        """The MLP's output."""
        out: Tensor = self.fc2(functional.gelu(self.fc1(x)))
        return out


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
        out: Tensor = x + self.ls2(self.mlp(self.norm2(x)))
        return out


class Patches(nn.Module):
    """timm's ``patch_embed``."""

    def __init__(self, shapes: Shapes, name: str) -> None:
        super().__init__()
        width, channels, side, _ = shapes[f"{name}.weight"]
        self.proj = nn.Conv2d(channels, width, side, side, bias=f"{name}.bias" in shapes)

    def forward(self, x: Tensor) -> Tensor:
        """Patches as a sequence."""
        out: Tensor = self.proj(x).flatten(2).transpose(1, 2)
        return out


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
        out: Tensor = self.head(self.fc_norm(pooled))
        return out


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
        seen = self.ln_1(x)
        x = x + self.self_attention(seen, seen, seen, need_weights=False)[0]
        out: Tensor = x + self.mlp(self.ln_2(x))
        return out


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
        out: Tensor = self.ln(self.layers(x + self.pos_embedding))
        return out


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
        out: Tensor = self.heads(x[:, 0])
        return out
