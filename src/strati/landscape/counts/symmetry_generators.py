"""Parameters of watched layers as matrices, changes of their rows and columns, and how many of those are independent.

The arithmetic behind ``symmetries``: a family of changes is counted on one layer, beyond what is free inside it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from strati.landscape.counts.layer_statistics import Convolution, Watched
from strati.landscape.counts.ranks import rank_range
from strati.landscape.mlp.structure import visible_rank

STEP = 0.2
"""Typical relative size of a trial change: large, so that invariance is not mistaken for flatness."""

Weights = dict[str, Tensor]


def key_of(layer: Watched, kind: str) -> str:
    """The name of a layer's weight or bias in the network."""
    return f"{layer.name}.{kind}" if layer.name else kind


def parameters_of(layer: Watched) -> tuple[str, ...]:
    """Names of a layer's parameters in the network."""
    return tuple(key_of(layer, kind) for kind in (("weight", "bias") if layer.bias else ("weight",)))


def weight_of(layer: Watched, weights: Weights) -> tuple[str, Tensor]:
    """The name of a layer's weight and the weight as a matrix, outputs first."""
    key = key_of(layer, "weight")
    stored = weights[key]
    return key, stored.T if type(layer.module).__name__ == "Conv1D" else stored.flatten(1)


def as_stored(layer: Watched, matrix: Tensor) -> Tensor:
    """A matrix in the form the layer keeps it in."""
    if type(layer.module).__name__ == "Conv1D":
        return matrix.T
    return matrix.reshape(next(layer.module.parameters(recurse=False)).shape)


def rows_times(layer: Watched, weights: Weights, factor: Tensor) -> Weights:
    """Every output of a layer in another unit."""
    key, weight = weight_of(layer, weights)
    changed = {key: as_stored(layer, weight * factor[:, None])}
    return changed | ({key_of(layer, "bias"): weights[key_of(layer, "bias")] * factor} if layer.bias else {})


def rows_mixed(layer: Watched, weights: Weights, there: Tensor) -> Weights:
    """The outputs of a layer in another basis."""
    key, weight = weight_of(layer, weights)
    changed = {key: as_stored(layer, there @ weight)}
    return changed | ({key_of(layer, "bias"): there @ weights[key_of(layer, "bias")]} if layer.bias else {})


def columns_times(layer: Watched, weights: Weights, factor: Tensor, per: int) -> Weights:
    """Columns scaled by what they read; ``per`` columns (positions of a flattened map, a kernel) per input."""
    key, weight = weight_of(layer, weights)
    if layer.groups > 1:
        each = factor.reshape(layer.groups, -1).repeat_interleave(layer.outputs // layer.groups, dim=0)
        return {key: as_stored(layer, weight * each.repeat_interleave(per, dim=1))}
    return {key: as_stored(layer, weight * factor.repeat_interleave(per)[None, :])}


def columns_of(width: int, reader: Watched) -> int | None:
    """How many columns of a layer belong to each of ``width`` inputs; ``None`` where it cannot read them."""
    if isinstance(reader.module, Convolution):
        fits = reader.module.in_channels == width
        return reader.module.weight[0, 0].numel() if fits else None
    columns = reader.inputs - reader.bias
    return columns // width if width and columns % width == 0 else None


def weight_device(layer: Watched) -> torch.device:
    """Where a layer's weights are."""
    return next(layer.module.parameters(recurse=False)).device


def scales(size: int, generator: torch.Generator, layer: Watched) -> Tensor:
    """Random positive factors around one."""
    drawn = torch.randn(size, generator=generator, dtype=torch.float64)
    return (STEP * drawn).exp().to(weight_device(layer))


def mixing(size: int, generator: torch.Generator, layer: Watched) -> Tensor:
    """A random invertible matrix near the identity."""
    drawn = torch.randn(size, size, generator=generator, dtype=torch.float64)
    step = STEP * drawn / max(1.0, size**0.5)
    rotation: Tensor = torch.linalg.matrix_exp(step).to(weight_device(layer))
    return rotation


def scale_size(layer: Watched, *, shift: bool = False) -> int:
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


def basis_size(layer: Watched) -> int:
    """All changes of basis of the outputs."""
    return seen_rank(layer, range(layer.outputs)) * layer.jacobians[0].range().low


def head_size(layer: Watched, heads: int, *, constant: bool = False) -> int:
    """Changes of basis inside each head."""
    width = layer.outputs // heads
    blocks = [range(h * width, (h + 1) * width) for h in range(heads)]
    return beyond(layer, blocks, head_sizes(layer, blocks, constant=constant))


def head_sizes(layer: Watched, blocks: list[range], *, constant: bool) -> list[int]:
    """The same for given blocks of rows, each by itself."""
    return [seen_rank(layer, b, constant=constant) * layer.jacobians[0].range(b).low for b in blocks]


def beyond(
    layer: Watched, blocks: list[range], own: list[int], heard: int | None = None, rest: int = 0
) -> int:
    """What changes inside blocks of rows leave free beyond the layer's own freedom, where blocks may overlap.

    The rows of a block use at most ``rG t_a`` less its own changes, so the layer uses at most the sum of these.
    """
    ((activation_rank, all_),) = layer.ranks()
    used = activation_rank * rest + sum(
        activation_rank * layer.jacobians[0].range(b).high - mine for b, mine in zip(blocks, own, strict=True)
    )
    return max(0, activation_rank * (all_ if heard is None else heard) - used)


def offset_size(layer: Watched) -> int:
    """Offsets of all outputs."""
    return layer.jacobians[0].range().low


def _added(terms: Iterable[Tensor]) -> Tensor:
    first, *others = terms
    for term in others:
        first = first + term
    return first


def rotary_size(layer: Watched, heads: int, pairs: list[tuple[int, int]]) -> int:
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


def seen_rank(layer: Watched, block: range, *, constant: bool = False) -> int:
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
