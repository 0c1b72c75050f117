"""Changes of two layers that may undo each other: scales of neurons, units of channels, gains of norms, offsets.

Only proposed here, from shapes and the order of calls, with the number of directions that each adds beyond what is
free inside a layer; ``symmetries`` tries them and proposes those of attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from strati.landscape.counts.layer_statistics import Convolution, LayerStatistics
from strati.landscape.counts.ranks import rank_range
from strati.landscape.mlp.structure import visible_rank

BEFORE = 3
"""How many calls back the partner of a layer may lie."""

Weights = dict[str, Tensor]
Change = Callable[[Weights, torch.Generator], Weights]
"""Parameters that a member of the family changes, drawn at random."""


@dataclass(frozen=True)
class LocalSymmetry:
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
    model: nn.Module, layers: dict[str, LayerStatistics], calls: list[str], reads: dict[str, list[str]]
) -> Iterator[LocalSymmetry]:
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


def _offsets(first: LayerStatistics, later: list[LayerStatistics]) -> Iterator[LocalSymmetry]:
    """The bias of a layer against the biases of those that read what it is added to."""
    if not first.bias or isinstance(first.module, Convolution):
        return
    reads = [
        w for w in later if w.bias and w.inputs - 1 == first.outputs and not isinstance(w.module, Convolution)
    ]
    names = (key_of(first, "bias"),)
    for readers in ([reads] if len(reads) == 1 else [reads, reads[:1]]) if reads else []:

        def shift(
            weights: Weights, generator: torch.Generator, readers: list[LayerStatistics] = readers
        ) -> Weights:
            drawn = torch.randn(first.outputs, generator=generator, dtype=torch.float64)
            step = drawn.to(weights[names[0]].device) * (STEP + weights[names[0]].abs().mean())
            changed = {names[0]: weights[names[0]] + step}
            for reader in readers:
                key, weight = key_of(reader, "bias"), weight_of(reader, weights)[1]
                changed[key] = weights[key] - weight @ step
            return changed

        yield LocalSymmetry("offsets", first.name, names, shift, lambda: offset_size(first))


def _neurons(first: LayerStatistics, second: LayerStatistics) -> Iterator[LocalSymmetry]:
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
        yield LocalSymmetry("changes of basis", first.name, first_parameters, mix, lambda: basis_size(first))
    yield LocalSymmetry("neuron scales", first.name, first_parameters, scale, lambda: scale_size(first))


def _into_norm(first: LayerStatistics, name: str, norm: nn.Module) -> Iterator[LocalSymmetry]:
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
    yield LocalSymmetry(
        "channel units", first.name, first_parameters, scale, lambda: scale_size(first, shift=first.bias)
    )


def _out_of_norm(name: str, norm: nn.Module, readers: list[LayerStatistics]) -> Iterator[LocalSymmetry]:
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
        yield LocalSymmetry("norm gains and offsets", name, names, change(True), lambda: live + width)
    yield LocalSymmetry("norm gains", name, names, change(False), lambda: live)


STEP = 0.2
"""Typical relative size of a trial change: large, so that invariance is not mistaken for flatness."""


def key_of(layer: LayerStatistics, kind: str) -> str:
    """The name of a layer's weight or bias in the network."""
    return f"{layer.name}.{kind}" if layer.name else kind


def parameters_of(layer: LayerStatistics) -> tuple[str, ...]:
    """Names of a layer's parameters in the network."""
    return tuple(key_of(layer, kind) for kind in (("weight", "bias") if layer.bias else ("weight",)))


def weight_of(layer: LayerStatistics, weights: Weights) -> tuple[str, Tensor]:
    """The name of a layer's weight and the weight as a matrix, outputs first."""
    key = key_of(layer, "weight")
    stored = weights[key]
    return key, stored.T if type(layer.module).__name__ == "Conv1D" else stored.flatten(1)


def as_stored(layer: LayerStatistics, matrix: Tensor) -> Tensor:
    """A matrix in the form the layer keeps it in."""
    if type(layer.module).__name__ == "Conv1D":
        return matrix.T
    return matrix.reshape(next(layer.module.parameters(recurse=False)).shape)


def rows_times(layer: LayerStatistics, weights: Weights, factor: Tensor) -> Weights:
    """Every output of a layer in another unit."""
    key, weight = weight_of(layer, weights)
    changed = {key: as_stored(layer, weight * factor[:, None])}
    return changed | ({key_of(layer, "bias"): weights[key_of(layer, "bias")] * factor} if layer.bias else {})


def rows_mixed(layer: LayerStatistics, weights: Weights, there: Tensor) -> Weights:
    """The outputs of a layer in another basis."""
    key, weight = weight_of(layer, weights)
    changed = {key: as_stored(layer, there @ weight)}
    return changed | ({key_of(layer, "bias"): there @ weights[key_of(layer, "bias")]} if layer.bias else {})


def columns_times(layer: LayerStatistics, weights: Weights, factor: Tensor, per: int) -> Weights:
    """Columns scaled by what they read; ``per`` columns (positions of a flattened map, a kernel) per input."""
    key, weight = weight_of(layer, weights)
    if layer.groups > 1:
        each = factor.reshape(layer.groups, -1).repeat_interleave(layer.outputs // layer.groups, dim=0)
        return {key: as_stored(layer, weight * each.repeat_interleave(per, dim=1))}
    return {key: as_stored(layer, weight * factor.repeat_interleave(per)[None, :])}


def columns_of(width: int, reader: LayerStatistics) -> int | None:
    """How many columns of a layer belong to each of ``width`` inputs; ``None`` where it cannot read them."""
    if isinstance(reader.module, Convolution):
        fits = reader.module.in_channels == width
        return reader.module.weight[0, 0].numel() if fits else None
    columns = reader.inputs - reader.bias
    return columns // width if width and columns % width == 0 else None


def weight_device(layer: LayerStatistics) -> torch.device:
    """Where a layer's weights are."""
    return next(layer.module.parameters(recurse=False)).device


def scales(size: int, generator: torch.Generator, layer: LayerStatistics) -> Tensor:
    """Random positive factors around one."""
    drawn = torch.randn(size, generator=generator, dtype=torch.float64)
    return (STEP * drawn).exp().to(weight_device(layer))


def mixing(size: int, generator: torch.Generator, layer: LayerStatistics) -> Tensor:
    """A random invertible matrix near the identity."""
    drawn = torch.randn(size, size, generator=generator, dtype=torch.float64)
    step = STEP * drawn / max(1.0, size**0.5)
    rotation: Tensor = torch.linalg.matrix_exp(step).to(weight_device(layer))
    return rotation


def scale_size(layer: LayerStatistics, *, shift: bool = False) -> int:
    """Rows scaled one by one (and shifted), beyond the layer's own freedom."""
    each = layer.outputs // layer.groups
    matrix, total = layer.matrix(), 0
    for group in range(layer.groups):
        part = matrix[group * each : (group + 1) * each]
        pairs = [(i, i) for i in range(each)]
        if shift:  # the offset alone as one more vector per row
            constant = torch.zeros_like(part)
            constant[:, -1] = 1.0
            part = torch.cat([part, constant])
            pairs += [(i, each + i) for i in range(each)]
        total += visible_rank(layer.activations[group], layer.jacobians[group], part, pairs)
    return total


def basis_size(layer: LayerStatistics) -> int:
    """All changes of basis of the outputs."""
    return seen_rank(layer, range(layer.outputs)) * layer.jacobians[0].range().low


def head_size(layer: LayerStatistics, heads: int, *, constant: bool = False) -> int:
    """Changes of basis inside each head."""
    width = layer.outputs // heads
    blocks = [range(h * width, (h + 1) * width) for h in range(heads)]
    return beyond(layer, blocks, head_sizes(layer, blocks, constant=constant))


def head_sizes(layer: LayerStatistics, blocks: list[range], *, constant: bool) -> list[int]:
    """The same for given blocks of rows, each by itself."""
    return [seen_rank(layer, b, constant=constant) * layer.jacobians[0].range(b).low for b in blocks]


def beyond(
    layer: LayerStatistics, blocks: list[range], own: list[int], heard: int | None = None, rest: int = 0
) -> int:
    """What changes inside blocks of rows leave free beyond the layer's own freedom, where blocks may overlap.

    The rows of a block use at most ``rG t_a`` less its own changes, so the layer uses at most the sum of these.
    """
    ((activation_rank, all_),) = layer.ranks()
    used = activation_rank * rest + sum(
        activation_rank * layer.jacobians[0].range(b).high - mine for b, mine in zip(blocks, own, strict=True)
    )
    return max(0, activation_rank * (all_ if heard is None else heard) - used)


def offset_size(layer: LayerStatistics) -> int:
    """Offsets of all outputs."""
    return layer.jacobians[0].range().low


def _added(terms: Iterable[Tensor]) -> Tensor:
    first, *others = terms
    for term in others:
        first = first + term
    return first


def rotary_size(layer: LayerStatistics, heads: int, pairs: list[tuple[int, int]]) -> int:
    """Scalings and turns of pairs of coordinates: two directions a pair, counted by their own inner products."""
    width = layer.outputs // heads
    projected = layer.activations[0].matrix @ layer.matrix().T
    heard = layer.jacobians[0].matrix
    m, k = projected.T @ projected, heard.T @ heard
    sizes, blocks = [], []
    for head in range(heads):
        a = torch.tensor([head * width + p for p, _ in pairs], device=m.device)
        b = torch.tensor([head * width + q for _, q in pairs], device=m.device)
        # scalings E_aa + E_bb, turns E_ba - E_ab; inner products of E_ij W are K_ii' (W G W^T)_jj'
        terms = [((a, a, 1.0), (b, b, 1.0)), ((b, a, 1.0), (a, b, -1.0))]
        gram = torch.cat(
            [
                torch.cat(
                    [
                        _added(c * d * k[i][:, i2] * m[j][:, j2] for i, j, c in term for i2, j2, d in two)
                        for two in terms
                    ],
                    dim=1,
                )
                for term in terms
            ]
        )
        size = gram.diagonal().clamp(min=0).sqrt()
        live = size > 0
        unit = gram[live][:, live] / size[live] / size[live][:, None]
        sizes.append(int((torch.linalg.eigvalsh(unit) > 1e-9).sum()) if bool(live.any()) else 0)
        blocks.append(range(head * width, (head + 1) * width))
    return beyond(layer, blocks, sizes)


def seen_rank(layer: LayerStatistics, block: range, *, constant: bool = False) -> int:
    """Rank of what some outputs of a layer are on the data (with the constant); a lower bound."""
    factor = layer.activations[0]
    weight = layer.matrix()[list(block)]
    if constant:
        unit = torch.zeros_like(weight[:1])
        unit[0, -1] = 1.0
        weight = torch.cat([weight, unit])
    product = factor.matrix @ weight.T
    size = torch.linalg.vector_norm(product, dim=0)
    most = torch.linalg.vector_norm(factor.matrix) * torch.linalg.vector_norm(weight, dim=1)
    noise = 1e-15 * most / size.clamp(min=1e-300) + float(factor.noise.max())
    return rank_range(product, noise).low
