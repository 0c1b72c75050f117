"""Small networks; the initial values of each come from its own random stream.

A fully connected network, a residual network of the CIFAR kind, a small decoder language model. Training them is
``training``.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from strati.core.errors import BadInputError
from strati.core.rng import stream
from strati.interventions.initialisers import Scheme
from strati.interventions.targets import find_targets, to_float32, values_of
from strati.io.to_module import as_module

if TYPE_CHECKING:
    from strati_reproductions.trained.spec import NetworkSpec

_ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
}


class MLP(nn.Sequential):
    """A fully connected network, layers named ``fc1``, ``fc2``, ... as in the paper's figures.

    Examples:
        >>> [name for name, _ in MLP([784, 512, 10]).named_children()]
        ['flatten', 'fc1', 'act1', 'fc2']
    """

    def __init__(self, widths: list[int], activation: str = "relu") -> None:
        super().__init__()
        last = len(widths) - 1
        self.add_module("flatten", nn.Flatten())
        for i in range(1, last + 1):
            self.add_module(f"fc{i}", nn.Linear(widths[i - 1], widths[i]))
            if i < last:
                self.add_module(f"act{i}", _ACTIVATIONS[activation]())
        self.scheme = Scheme("pytorch")


class _Block(nn.Module):
    """Two 3x3 convolutions and a shortcut without parameters: every second pixel, missing channels zero."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.stride, self.extra = stride, outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        residual = self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x)))))
        if self.stride != 1 or self.extra:
            before = self.extra // 2
            x = functional.pad(
                x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, before, self.extra - before)
            )
        return functional.relu(residual + x)


class CifarResNet(nn.Module):
    """The residual network of He et al. (2016) for small images: ``6 n + 2`` layers, option-A shortcuts.

    Examples:
        >>> sum(p.numel() for p in CifarResNet(20, 16).parameters())
        269722
    """

    def __init__(self, layers: int = 20, width: int = 16, classes: int = 10, channels: int = 3) -> None:
        super().__init__()
        if layers < 8 or (layers - 2) % 6:
            raise BadInputError(
                "network.depth", f"a residual network has 6 n + 2 layers (8, 14, 20, ...), not {layers}"
            )
        each = (layers - 2) // 6
        self.conv1 = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        inputs = width
        for stage, outputs in enumerate((width, 2 * width, 4 * width), 1):
            blocks = [
                _Block(inputs if i == 0 else outputs, outputs, 2 if i == 0 and stage > 1 else 1)
                for i in range(each)
            ]
            self.add_module(f"layer{stage}", nn.Sequential(*blocks))
            inputs = outputs
        self.linear = nn.Linear(inputs, classes)
        self.scheme = Scheme("kaiming")

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images (batch, channels, height, width)."""
        x = functional.relu(self.bn1(self.conv1(x)))
        for stage in ("layer1", "layer2", "layer3"):
            x = self.get_submodule(stage)(x)
        logits: Tensor = self.linear(x.mean(dim=(2, 3)))
        return logits


class _Decoder(nn.Module):
    """One pre-norm decoder block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q_proj, self.k_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.v_proj, self.o_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.up_proj, self.down_proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        batch, length, width = x.shape
        seen = self.norm1(x)
        q, k, v = (
            p(seen).view(batch, length, self.heads, -1).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o_proj(mixed.transpose(1, 2).reshape(batch, length, width))
        out: Tensor = x + self.down_proj(functional.gelu(self.up_proj(self.norm2(x))))
        return out


class Transformer(nn.Module):
    """A small decoder language model with learned positions; logits are (batch, length, vocabulary)."""

    def __init__(self, vocabulary: int, width: int, depth: int, heads: int, context: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList([_Decoder(width, heads) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.scheme = Scheme("gpt2", 0.02, depth)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token at each place."""
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def build(spec: NetworkSpec, shape: tuple[int, ...], outputs: int, context: int) -> nn.Module:
    """A network of the given kind for inputs of one ``shape`` with ``outputs`` outputs.

    Raises:
        BadInputError: The data do not suit the kind of network.
    """
    if spec.source == "transformer":
        if shape != ():
            raise BadInputError(
                "data", "source 'transformer' is a language model and needs text, not images or rows"
            )
        return Transformer(outputs, spec.width, spec.depth, spec.heads, context)
    if shape == ():
        raise BadInputError("data", f"source {spec.source!r} needs images or rows of numbers, not text")
    if spec.source == "resnet":
        if len(shape) != 3:
            why = f"source 'resnet' needs images (height, width[, channels]), not inputs of shape {shape}"
            raise BadInputError("data", why)
        return CifarResNet(spec.depth, spec.width, outputs, shape[0])
    return MLP([int(np.prod(shape)), *spec.hidden, outputs], spec.activation)


def open_resnet(path: Path) -> nn.Module:
    """A residual network of the CIFAR kind from its state dict, with the distribution that such networks start from."""
    model = to_float32(as_module(path)).eval()
    model.scheme = Scheme("kaiming")  # type: ignore[assignment]
    return model


def initialise(model: nn.Module, seed: int, network: int) -> None:
    """Draw all layers' initial values from the streams of (seed, network, layer); norms keep theirs."""
    scheme: Any = model.scheme
    for target in find_targets(model):
        rng = stream(seed, "initial", network, target.name)
        weight, bias, _ = scheme.draw(target, values_of(model, target), rng)
        module: Any = model.get_submodule(target.name)
        with torch.no_grad():
            module.weight.copy_(torch.from_numpy(weight))
            if bias is not None:
                module.bias.copy_(torch.from_numpy(bias))
