"""Freedom between layers of any network: changes of two layers that undo each other.

A neuron's scale before a ReLU, the unit of a channel between a convolution and its batch normalisation, the gain of a
norm and the columns after it, the basis of queries and keys: such a change moves the parameters without moving the
outputs. Candidates are guessed from shapes, names and the order of calls; none is believed before the network itself
has been run with the changed parameters and given the same outputs on the data. What a believed family adds is
counted on its first layer (the *carrier*), beyond what is free inside that layer. Carriers come before what undoes
them, so families on different carriers are independent; of several on one carrier the largest counts. Changes of basis
inside attention heads are proposed here, from names; the others in ``symmetry_families``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from strati.evaluate.hooks import Site, capture
from strati.evaluate.models import output_tensor
from strati.landscape.counts.layer_statistics import LayerStatistics
from strati.landscape.counts.ranks import rank_range
from strati.landscape.counts.symmetry_families import (
    STEP,
    Change,
    LocalSymmetry,
    Weights,
    as_stored,
    beyond,
    head_size,
    head_sizes,
    is_norm,
    key_of,
    layer_families,
    mixing,
    offset_size,
    parameters_of,
    rotary_size,
    rows_mixed,
    weight_device,
    weight_of,
)
from strati.landscape.objective import FlatModel

SAME, SLACK = 1e-2, 1e5
"""Outputs count as unchanged if they move by less than this share of what the carrier's change alone does to them, and
by no more than so many units of rounding."""
ROWS_TIMES_PARAMETERS = 3e8
"""Data on which a candidate is tried: as many as this allows."""


@dataclass(frozen=True)
class Symmetries:
    """What is free between layers: per carrier among the watched layers, elsewhere in total, and by what."""

    between: dict[str, int] = field(default_factory=dict)
    elsewhere: int = 0
    kinds: tuple[str, ...] = ()


def find_symmetries(flat: FlatModel, x: Tensor, layers: list[LayerStatistics], rounding: float) -> Symmetries:
    """The families that hold for a network on its data, and what they add.

    Args:
        flat: The network, in float64.
        x: Data.
        layers: Its layers after the data have passed through.
        rounding: Relative rounding error of the network's operations.
    """
    trial = _Trial(flat, x, rounding)
    calls, reads = _calls(flat, x[:1], layers)
    best: dict[str, tuple[int, str]] = {}
    for family in _candidates(flat, layers, calls, reads):
        size = family.size()
        if size > best.get(family.carrier, (0, ""))[0] and trial.holds(family):
            best[family.carrier] = (size, family.kind)
    watched = {w.name for w in layers}
    return Symmetries(
        {name: size for name, (size, _) in best.items() if name in watched},
        sum(size for name, (size, _) in best.items() if name not in watched),
        tuple(dict.fromkeys(kind for _, kind in best.values())),
    )


class _Trial:
    """Runs the network with changed parameters and compares."""

    def __init__(self, flat: FlatModel, x: Tensor, rounding: float) -> None:
        self._flat, self._slack = flat, SLACK * rounding
        rows = max(1, int(ROWS_TIMES_PARAMETERS / max(1, flat.size)))
        self._x = x[:rows]
        self._weights = flat.split(flat.theta)
        with torch.no_grad():
            self._before = self._run({})

    def holds(self, family: LocalSymmetry) -> bool:
        """Whether the outputs stay, although the carrier's change alone would move them."""
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            changed = family.change(self._weights, generator)
            moved = float((self._run(changed) - self._before).abs().max())
            alone = {k: v for k, v in changed.items() if k in family.own}
            would = float((self._run(alone) - self._before).abs().max())
        scale = float(self._before.abs().max())
        if set(changed) <= set(family.own):  # one layer undoes itself
            return moved <= self._slack * scale
        return moved <= SAME * would and moved <= self._slack * scale

    def _run(self, changed: Weights) -> Tensor:
        weights = self._flat.fixed | self._weights | changed
        return output_tensor(functional_call(self._flat.module, weights, (self._x,)))


def _calls(
    flat: FlatModel, x: Tensor, layers: list[LayerStatistics]
) -> tuple[list[str], dict[str, list[str]]]:
    """Names of layers and norms in the order of their calls, and which layers read each norm's output itself."""
    norms = [name for name, module in flat.module.named_modules() if is_norm(module)]
    order: list[str] = []
    source: dict[int, str] = {}
    outputs: list[Tensor] = []
    reads: dict[str, list[str]] = {name: [] for name in norms}

    def visit(place: Site, tensor: Tensor) -> Tensor:
        outputs.append(tensor)  # so that no other tensor takes its address
        if place.side == "output":
            order.append(place.module)
            if place.module in reads:
                source[id(tensor)] = place.module
        elif id(tensor) in source:
            reads[source[id(tensor)]].append(place.module)
        return tensor

    places = [Site(w.name, "input") for w in layers] + [Site(n) for n in [*(w.name for w in layers), *norms]]
    with torch.no_grad(), capture(flat.module, places, visit):
        flat(flat.theta, x)
    return order, reads


def _candidates(
    flat: FlatModel, layers: list[LayerStatistics], calls: list[str], reads: dict[str, list[str]]
) -> Iterator[LocalSymmetry]:
    """All proposals, attention's first: of several on one carrier the largest is kept."""
    once = {name for name in calls if calls.count(name) == 1}
    usable = {
        w.name: w for w in layers if w.name in once and w.tokens is None and w.activations and w.jacobians
    }
    yield from attention_families(flat.module, usable)
    yield from layer_families(flat.module, usable, [name for name in calls if name in once], reads)


_KEYS = {
    "k_proj": "q_proj",
    "key": "query",
    "k": "q",
    "wk": "wq",
    "k_lin": "q_lin",
    "to_k": "to_q",
    "W_k": "W_q",
}
_VALUES = {
    "v_proj": ("o_proj", "out_proj", "dense"), "value": ("out", "proj", "o", "output"), "v": ("o", "out", "proj"),
    "wv": ("wo",), "v_lin": ("out_lin",), "to_v": ("to_out", "to_out.0"), "W_v": ("W_o",),
}  # fmt: skip


def attention_families(model: nn.Module, by_name: dict[str, LayerStatistics]) -> Iterator[LocalSymmetry]:
    """Bases of queries and keys, of values and outputs, and the keys' offset, head by head."""
    config = getattr(model, "config", None)
    for name, keys in by_name.items():
        parent, _, leaf = name.rpartition(".")
        if leaf == "c_attn" and keys.outputs == 3 * (keys.inputs - keys.bias):
            for heads in _head_counts(config, model.get_submodule(parent), keys.outputs // 3):
                yield _fused(keys, heads)
        if leaf in _KEYS and f"{parent}.{_KEYS[leaf]}".lstrip(".") in by_name:
            queries = by_name[f"{parent}.{_KEYS[leaf]}".lstrip(".")]
            for heads in _head_counts(config, model.get_submodule(parent), keys.outputs):
                yield from _queries_keys(queries, keys, heads)
        if leaf in _VALUES:
            partners = [f"{parent}.{other}".lstrip(".") for other in _VALUES[leaf]]
            for other in partners:
                if other in by_name and by_name[other].inputs - by_name[other].bias == keys.outputs:
                    for heads in _head_counts(config, model.get_submodule(parent), keys.outputs):
                        yield from _values_outputs(keys, by_name[other], heads)
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            yield from _multihead(name, module)


def _head_counts(config: Any, module: nn.Module, width: int) -> list[int]:
    """Possible numbers of heads, most likely first: what the network says of itself, else any that divides."""
    names = ("num_key_value_heads", "num_attention_heads", "n_head", "n_heads", "num_heads", "heads", "nhead")
    numbers = [getattr(place, n, None) for place in (module, config) for n in names]
    divisors = list(dict.fromkeys(n for n in numbers if isinstance(n, int) and n > 0 and width % n == 0))
    return divisors or [h for h in (1, 2, 4, 8, 16) if width % h == 0]


def _queries_keys(queries: LayerStatistics, keys: LayerStatistics, heads: int) -> Iterator[LocalSymmetry]:
    width = keys.outputs // heads
    shared = queries.outputs // keys.outputs
    if queries.outputs % keys.outputs or width == 0:
        return
    key_parameters = parameters_of(keys)

    def with_basis(draw: Callable[[torch.Generator], Tensor]) -> Change:
        def change(weights: Weights, generator: torch.Generator) -> Weights:
            there = torch.stack([draw(generator) for _ in range(heads)]).to(weight_device(keys))
            back = torch.linalg.inv(there).transpose(1, 2).repeat_interleave(shared, dim=0)
            return rows_mixed(keys, weights, torch.block_diag(*there)) | rows_mixed(
                queries, weights, torch.block_diag(*back)
            )

        return change

    def offset(weights: Weights, generator: torch.Generator) -> Weights:
        key = key_of(keys, "bias")
        step = torch.randn(keys.outputs, generator=generator, dtype=torch.float64)
        return {key: weights[key] + step.to(weights[key])}

    if keys.bias:
        yield LocalSymmetry(
            "key offsets", keys.name, (key_of(keys, "bias"),), offset, lambda: offset_size(keys)
        )
    full = with_basis(lambda g: mixing(width, g, keys))

    def with_offset(weights: Weights, generator: torch.Generator) -> Weights:
        return full(weights | offset(weights, generator), generator)

    if keys.bias:
        yield LocalSymmetry(
            "query and key bases, key offsets", keys.name, key_parameters, with_offset,
            lambda: head_size(keys, heads, constant=True),
        )  # fmt: skip
    yield LocalSymmetry(
        "query and key bases", keys.name, key_parameters, full, lambda: head_size(keys, heads)
    )
    for pairs in (_halves(width), _neighbours(width)) if width % 2 == 0 else ():
        turned = with_basis(partial(_rotations, width, pairs))
        size = partial(rotary_size, keys, heads, pairs)
        yield LocalSymmetry("query and key bases (rotary)", keys.name, key_parameters, turned, size)


def _fused(layer: LayerStatistics, heads: int) -> LocalSymmetry:
    """Queries and keys that are rows of one layer, queries first."""
    size = layer.outputs // 3
    width = size // heads

    def change(weights: Weights, generator: torch.Generator) -> Weights:
        there = torch.block_diag(*(mixing(width, generator, layer) for _ in range(heads)))
        identity = torch.eye(size, dtype=there.dtype, device=there.device)
        return rows_mixed(layer, weights, torch.block_diag(torch.linalg.inv(there).T, there, identity))

    def number() -> int:
        blocks = [range(size + h * width, size + (h + 1) * width) for h in range(heads)]
        sizes = head_sizes(layer, blocks, constant=False)
        queries = layer.jacobians[0].range(range(size)).high
        both = layer.jacobians[0].range(range(2 * size)).high
        return beyond(layer, blocks, sizes, both, queries)

    layer_parameters = parameters_of(layer)
    return LocalSymmetry("query and key bases", layer.name, layer_parameters, change, number)


def _values_outputs(values: LayerStatistics, outputs: LayerStatistics, heads: int) -> Iterator[LocalSymmetry]:
    width = values.outputs // heads

    def change(weights: Weights, generator: torch.Generator) -> Weights:
        there = torch.block_diag(*(mixing(width, generator, values) for _ in range(heads)))
        key, weight = weight_of(outputs, weights)
        return rows_mixed(values, weights, there) | {
            key: as_stored(outputs, weight @ torch.linalg.inv(there))
        }

    def with_offset(weights: Weights, generator: torch.Generator) -> Weights:
        mine, theirs = key_of(values, "bias"), key_of(outputs, "bias")
        step = torch.randn(values.outputs, generator=generator, dtype=torch.float64).to(weights[mine].device)
        moved = weights[theirs] - weight_of(outputs, weights)[1] @ step
        shifted = weights | {mine: weights[mine] + step}
        return change(shifted, generator) | {theirs: moved}

    value_parameters = parameters_of(values)
    if values.bias and outputs.bias:
        yield LocalSymmetry(
            "value and output bases, offsets", values.name, value_parameters, with_offset,
            lambda: head_size(values, heads, constant=True),
        )  # fmt: skip
    yield LocalSymmetry(
        "value and output bases", values.name, value_parameters, change, lambda: head_size(values, heads)
    )


def _multihead(name: str, module: nn.MultiheadAttention) -> Iterator[LocalSymmetry]:
    """Torch's own attention, whose projections are no layers: counted on the projections' rows themselves."""
    if not module._qkv_same_embed_dim:
        return
    size, heads = module.embed_dim, module.num_heads
    stem = f"{name}." if name else ""
    weight, bias = f"{stem}in_proj_weight", f"{stem}in_proj_bias"
    out, last = f"{stem}out_proj.weight", f"{stem}out_proj.bias"
    has_bias = module.in_proj_bias is not None
    matrix = module.in_proj_weight.detach().double()
    if has_bias:
        matrix = torch.cat([matrix, module.in_proj_bias.detach().double()[:, None]], 1)

    def number(part: int) -> int:
        rows = matrix[part * size : (part + 1) * size].reshape(heads, size // heads, -1)
        constant = torch.zeros_like(rows[:, :1])
        constant[..., -1] = float(has_bias)
        wide = torch.cat([rows, constant], 1)  # an offset alone is free, too
        return sum((size // heads) * rank_range(each.T).low for each in wide)

    def change(part: int) -> Change:
        def draw(weights: Weights, generator: torch.Generator) -> Weights:
            drawn = torch.randn(heads, size // heads, size // heads, generator=generator, dtype=torch.float64)
            there = torch.block_diag(*torch.linalg.matrix_exp(STEP * drawn)).to(weights[weight].device)
            eye = torch.eye(size, dtype=there.dtype, device=there.device)
            blocks = [eye, eye, there] if part == 2 else [torch.linalg.inv(there).T, there, eye]
            changed = {weight: torch.block_diag(*blocks) @ weights[weight]}
            step = torch.randn(size, generator=generator, dtype=torch.float64).to(there.device)
            if has_bias:
                moved = torch.zeros(3 * size, dtype=there.dtype, device=there.device)
                moved[part * size : (part + 1) * size] = step
                changed[bias] = torch.block_diag(*blocks) @ (weights[bias] + moved)
            if part == 2:
                changed[out] = weights[out] @ torch.linalg.inv(there)
                if has_bias:
                    changed[last] = weights[last] - weights[out] @ step
            return changed

        return draw

    names = (weight, bias) if has_bias else (weight,)
    yield LocalSymmetry("query and key bases", f"{stem}keys", names, change(1), lambda: number(1))
    yield LocalSymmetry("value and output bases", f"{stem}values", names, change(2), lambda: number(2))


def _halves(width: int) -> list[tuple[int, int]]:
    return [(k, k + width // 2) for k in range(width // 2)]


def _neighbours(width: int) -> list[tuple[int, int]]:
    return [(2 * k, 2 * k + 1) for k in range(width // 2)]


def _rotations(width: int, pairs: list[tuple[int, int]], generator: torch.Generator) -> Tensor:
    """Each pair of coordinates scaled and turned by an amount of its own."""
    generator_matrix = torch.zeros(width, width, dtype=torch.float64)
    for a, b in pairs:
        scale, turn = torch.randn(2, generator=generator, dtype=torch.float64) * STEP
        c, s = scale.exp() * turn.cos(), scale.exp() * turn.sin()
        generator_matrix[a, a], generator_matrix[a, b], generator_matrix[b, a], generator_matrix[b, b] = (
            c,
            -s,
            s,
            c,
        )
    return generator_matrix
