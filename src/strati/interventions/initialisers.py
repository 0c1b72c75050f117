"""From what distribution a layer's initial values come, and drawing from it.

Schemes by name (PyTorch's defaults, GPT-2's, ViT's, timm's, He's), the one a network's class implies, or, when
nothing is known, a normal distribution with the layer's own moments. The result says which was used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from strati.core.errors import UnsupportedError
from strati.interventions.targets import Target

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

_RESIDUAL_OUTPUTS = ("c_proj", "o_proj", "out_proj", "down_proj", "wo", "w2")


CUT = 2.0
"""Where PyTorch's truncated normal ends: values, not deviations, so that one of deviation 0.02 is hardly cut."""


@dataclass(frozen=True)
class Distribution:
    """Where values are drawn from. ``scale`` is the half-width (uniform) or the standard deviation."""

    kind: Literal["uniform", "normal", "truncated"]
    scale: float
    mean: float = 0.0

    def sample(self, shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[np.float32]:
        """Independent values, as float32.

        Examples:
            >>> float(np.abs(Distribution("uniform", 0.5).sample((100,), np.random.default_rng(0))).max()) <= 0.5
            True
        """
        if self.kind == "uniform":
            drawn = rng.uniform(self.mean - self.scale, self.mean + self.scale, shape)
        else:
            drawn = self.mean + self.scale * rng.standard_normal(shape)
            if self.kind == "truncated":
                while (wide := np.abs(drawn) > CUT).any():
                    drawn[wide] = self.mean + self.scale * rng.standard_normal(int(wide.sum()))
        return drawn.astype(np.float32)

    def __str__(self) -> str:
        if self.kind == "uniform":
            return f"U({self.mean - self.scale:.4g}, {self.mean + self.scale:.4g})"
        ends = "" if self.kind == "normal" else f" within +-{CUT:g}"
        return f"N({self.mean:.4g}, sd {self.scale:.4g}){ends}"


@dataclass(frozen=True)
class Scheme:
    """An initialisation scheme: its name and what of the network it needs to know."""

    name: str
    deviation: float = 0.02
    blocks: int = 1

    def of(
        self, target: Target, weight: NDArray[Any], bias: NDArray[Any] | None
    ) -> tuple[Distribution, Distribution]:
        """The distributions of a layer's weight and bias; the trained values are looked at by ``moments`` only.

        Raises:
            UnsupportedError: No scheme of that name.
        """
        zero = Distribution("normal", 0.0)
        if self.name == "moments":
            moments = Distribution("normal", float(weight.std(dtype=float)), float(weight.mean(dtype=float)))
            if bias is None:
                return moments, zero
            return moments, Distribution(
                "normal", float(bias.std(dtype=float)), float(bias.mean(dtype=float))
            )
        if self.name == "pytorch":
            if target.kind == "embedding":
                return Distribution("normal", 1.0), zero
            bound = Distribution("uniform", 1.0 / math.sqrt(target.fan_in))
            return bound, bound
        if self.name == "kaiming":
            return Distribution("normal", math.sqrt(2.0 / target.fan_in)), zero
        if self.name == "kaiming_fan_out":
            if target.kind != "conv":
                return Scheme("pytorch").of(target, weight, bias)
            return Distribution("normal", math.sqrt(2.0 / target.fan_out)), zero
        if self.name == "gpt2":
            last = target.name.rsplit(".", 1)[-1]
            shrink = math.sqrt(2.0 * self.blocks) if last in _RESIDUAL_OUTPUTS else 1.0
            return Distribution("normal", self.deviation / shrink), zero
        if self.name == "normal":
            return Distribution("normal", self.deviation), zero
        if self.name == "vit":
            return Distribution("truncated", self.deviation), zero
        if self.name == "timm":
            if target.kind == "conv":  # a patch embedding keeps PyTorch's default, other kernels are He's
                scheme = "pytorch" if "patch" in target.name else "kaiming_fan_out"
                return Scheme(scheme).of(target, weight, bias)
            return Distribution("truncated", self.deviation), zero
        raise UnsupportedError(self.name, "no such initialisation scheme")

    def draw(
        self, target: Target, values: tuple[NDArray[Any], NDArray[Any] | None], rng: np.random.Generator
    ) -> tuple[NDArray[np.float32], NDArray[np.float32] | None, str]:
        """New weight and bias of a layer, and a line saying where they come from."""
        weight, bias = values
        of_weight, of_bias = self.of(target, weight, bias)
        text = f"{self.name}: {of_weight}"
        new_weight = of_weight.sample(weight.shape, rng)
        if bias is None:
            return new_weight, None, text
        return new_weight, of_bias.sample(bias.shape, rng), f"{text}, bias {of_bias}"


def scheme_of(model: torch.nn.Module, name: str = "auto") -> Scheme:
    """The scheme to use: the one asked for, else the one the network's class implies, else its own moments.

    Examples:
        >>> import torch
        >>> scheme_of(torch.nn.Linear(2, 2)).name
        'moments'
        >>> scheme_of(torch.nn.Linear(2, 2), "pytorch").name
        'pytorch'
    """
    config = getattr(model, "config", None)
    deviation = float(getattr(config, "initializer_range", None) or 0.02)
    blocks = int(getattr(config, "num_hidden_layers", None) or getattr(config, "n_layer", None) or 1)
    if name == "auto":
        model_scheme = getattr(model, "scheme", None)
        if isinstance(model_scheme, Scheme):
            return model_scheme
        kind = str(getattr(config, "model_type", "")) if config is not None else ""
        name = _BY_CLASS.get(kind, "normal" if hasattr(config, "initializer_range") else "moments")
    return Scheme(name, deviation, blocks)


_BY_CLASS = {
    "gpt2": "gpt2",
    "vit": "vit",
    "deit": "vit",
    "resnet": "kaiming_fan_out",
    "llama": "normal",
    "bert": "normal",
}
