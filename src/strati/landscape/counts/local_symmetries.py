"""Changes of two layers that may undo each other: scales of neurons, units of channels, gains of norms, offsets.

Only proposed here, from shapes and the order of calls; ``symmetries`` tries them. Those of attention are in
``attention_bases``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from strati.landscape.counts.layer_statistics import Convolution, Watched
from strati.landscape.counts.symmetry_generators import (
    STEP,
    Weights,
    as_stored,
    basis_size,
    columns_of,
    columns_times,
    key_of,
    mixing,
    offset_size,
    parameters_of,
    rows_mixed,
    rows_times,
    scale_size,
    scales,
    weight_of,
)

BEFORE = 3
"""How many calls back the partner of a layer may lie."""

Change = Callable[[Weights, torch.Generator], Weights]
"""Parameters that a member of the family changes, drawn at random."""


@dataclass(frozen=True)
class Family:
    """Changes of the parameters that may leave the outputs as they are.

    Attributes:
        kind: Its name in words.
        carrier: The layer (or norm) it is counted on.
        own: Parameters of the carrier, which alone would move the outputs.
        change: Draws a member.
        size: How many directions it adds, once believed.
    """

    kind: str
    carrier: str
    own: tuple[str, ...]
    change: Change
    size: Callable[[], int]


def layer_families(
    model: nn.Module, layers: dict[str, Watched], calls: list[str], reads: dict[str, list[str]]
) -> Iterator[Family]:
    """Proposals for layers and norms that follow each other.

    Args:
        model: The network.
        layers: Its layers by name, those that are used once.
        calls: Layers and norms that are used once, in the order of their calls.
        reads: For each norm the layers that read its output itself.
    """
    modules = dict(model.named_modules())
    for place, name in enumerate(calls):
        nearby = [layers[n] for n in calls[max(0, place - BEFORE) : place] if n in layers]
        if name in layers:
            for before in nearby:
                yield from _neurons(before, layers[name])
            yield from _offsets(layers[name], [layers[n] for n in calls[place + 1 :] if n in layers])
        elif is_norm(modules[name]):
            for before in nearby:
                yield from _into_norm(before, name, modules[name])
            after = [n for n in calls[place + 1 : place + 2] if n in layers]
            readers = [layers[n] for n in (reads.get(name) or after) if n in layers]
            yield from _out_of_norm(name, modules[name], readers)


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a normalisation with a gain of its own."""
    parameters = dict(module.named_parameters(recurse=False))
    named = "Norm" in type(module).__name__ and isinstance(parameters.get("weight"), nn.Parameter)
    return (
        named and all(p.ndim == 1 for p in parameters.values()) and not any(True for _ in module.children())
    )


def _offsets(first: Watched, later: list[Watched]) -> Iterator[Family]:
    """The bias of a layer against the biases of those that read what it is added to."""
    if not first.bias or isinstance(first.module, Convolution):
        return
    reads = [
        w for w in later if w.bias and w.inputs - 1 == first.outputs and not isinstance(w.module, Convolution)
    ]
    names = (key_of(first, "bias"),)
    for readers in ([reads] if len(reads) == 1 else [reads, reads[:1]]) if reads else []:

        def shift(weights: Weights, generator: torch.Generator, readers: list[Watched] = readers) -> Weights:
            drawn = torch.randn(first.outputs, generator=generator, dtype=torch.float64)
            step = drawn.to(weights[names[0]].device) * (STEP + weights[names[0]].abs().mean())
            changed = {names[0]: weights[names[0]] + step}
            for reader in readers:
                key, weight = key_of(reader, "bias"), weight_of(reader, weights)[1]
                changed[key] = weights[key] - weight @ step
            return changed

        yield Family("offsets", first.name, names, shift, lambda: offset_size(first))


def _neurons(first: Watched, second: Watched) -> Iterator[Family]:
    """Scales of neurons or channels, and whole changes of basis where nothing lies between two layers."""
    columns = columns_of(first.outputs, second)
    if columns is None:
        return

    def scale(weights: Weights, generator: torch.Generator) -> Weights:
        factor = scales(first.outputs, generator, first)
        return rows_times(first, weights, factor) | columns_times(second, weights, 1 / factor, columns)

    def mix(weights: Weights, generator: torch.Generator) -> Weights:
        there = mixing(first.outputs, generator, first)
        rows = rows_mixed(first, weights, there)
        key, weight = weight_of(second, weights)
        return rows | {key: as_stored(second, weight @ torch.linalg.inv(there))}

    first_parameters = parameters_of(first)
    if columns == 1 and first.groups == second.groups == 1 and not isinstance(second.module, Convolution):
        yield Family("changes of basis", first.name, first_parameters, mix, lambda: basis_size(first))
    yield Family("neuron scales", first.name, first_parameters, scale, lambda: scale_size(first))


def _into_norm(first: Watched, name: str, norm: nn.Module) -> Iterator[Family]:
    """Channels before a batch normalisation in evaluation mode, whose gain and offset can undo any unit."""
    mean, variance = getattr(norm, "running_mean", None), getattr(norm, "running_var", None)
    if (
        mean is None
        or variance is None
        or mean.numel() != first.outputs
        or getattr(norm, "bias", None) is None
    ):
        return

    def scale(weights: Weights, generator: torch.Generator) -> Weights:
        factor = scales(first.outputs, generator, first)
        gain, offset = weights[f"{name}.weight"], weights[f"{name}.bias"]
        deviation = (variance.double() + float(cast(float, norm.eps))).sqrt()
        new = gain / factor
        moved = offset + (new - gain) * mean.double() / deviation
        return rows_times(first, weights, factor) | {f"{name}.weight": new, f"{name}.bias": moved}

    first_parameters = parameters_of(first)
    yield Family(
        "channel units", first.name, first_parameters, scale, lambda: scale_size(first, shift=first.bias)
    )


def _out_of_norm(name: str, norm: nn.Module, readers: list[Watched]) -> Iterator[Family]:
    """Gains (and offsets) of a norm against the columns (and biases) of the layers that read it."""
    gain: Tensor = norm.weight  # type: ignore[assignment]
    width = gain.numel()
    parts = [columns_of(width, reader) for reader in readers]
    if not readers or any(p is None for p in parts):
        return
    has_offset = getattr(norm, "bias", None) is not None
    offset = f"{name}.bias"
    names = (f"{name}.weight", offset) if has_offset else (f"{name}.weight",)
    live = int((gain != 0).sum())

    def change(shift: bool) -> Change:
        def draw(weights: Weights, generator: torch.Generator) -> Weights:
            factor = scales(width, generator, readers[0])
            changed = {key: weights[key] * factor for key in names}
            step = STEP * torch.randn(width, generator=generator, dtype=torch.float64).to(factor.device)
            if shift:
                changed[offset] = changed[offset] + step
            for reader, per in zip(readers, parts, strict=True):
                assert per is not None
                columns = columns_times(reader, weights, 1 / factor, per)
                changed |= columns
                if shift:
                    key = key_of(reader, "bias")
                    _, weight = weight_of(reader, weights | columns)
                    changed[key] = weights[key] - weight @ step.repeat_interleave(per)
            return changed

        return draw

    if has_offset and all(r.bias for r in readers):
        yield Family("norm gains and offsets", name, names, change(True), lambda: live + width)
    yield Family("norm gains", name, names, change(False), lambda: live)
