"""Every matrix in its place: units by what they share, then all units on one time line.

Only the product of a norm's weight and the columns of its readers means anything. Where scales were moved between
them block by block, a reader's column norms run against its own norm's weights: that pairs norms and readers, and the
weights are folded into the readers (:func:`normalise_pieces`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.core.assignment import assign
from strati.core.results import Tick, silent
from strati.reassembly.transformer.arrange import arrange, joined, merged
from strati.reassembly.transformer.blueprint import slots_of, unit_kinds
from strati.reassembly.transformer.evidence import (
    PAIRS,
    Prior,
    chain,
    correlation,
    evidence,
    head_signals,
    likeness,
    margins,
    stacks,
    standard,
    unit_signals,
)
from strati.reassembly.transformer.timeline import Similarity, Timeline, climb, place_margins, reordered

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.reassembly.transformer.blueprint import Slot
    from strati.reassembly.transformer.pieces import TransformerPieces

    Matrix = NDArray[np.float64]
    Floats = NDArray[np.float32]
    Ints = NDArray[np.intp]

_READERS = ("q", "k", "v", "qkv", "gate", "up", "gate_up")
_LEVEL = ("q", "k", "v", "up")
"""What reads through a norm, and what of it has rows whose scales are not fixed by the function."""

_AGAINST = -0.6
_MOST = 0.6
"""Correlation of log column norms with the log weights of a norm below which scales were moved between the two, and the
share of the readers that must show it."""


_CERTAIN = 40.0
"""Nats for or against two pieces of one block whose norms are known."""


@dataclass(frozen=True)
class NormalisedPieces:
    """Pieces without scales that mean nothing, and each reader's norm where such scales told it."""

    pieces: TransformerPieces
    norm_of: Mapping[int, int] = field(default_factory=dict)


def normalise_pieces(pieces: TransformerPieces) -> NormalisedPieces:
    """The pieces with norm weights taken into their readers where scales were moved; otherwise as they are."""
    blueprint = pieces.blueprint
    if not blueprint.before or blueprint.blocks < 2:
        return NormalisedPieces(pieces)
    vectors = {
        n: np.asarray(v, np.float64)
        for n, v in sorted(pieces.arrays.items())
        if v.shape == (blueprint.width,) and pieces.roles[n].endswith("weight")
    }
    readers = _readers(pieces)
    if len(vectors) < 2 or not readers:
        return NormalisedPieces(pieces)
    numbers = list(vectors)
    logs = np.log(np.abs(np.stack(list(vectors.values()))) + 1e-12)
    logs = logs - logs.mean(axis=1, keepdims=True)
    logs = logs - np.median(logs, axis=0)
    norm_of: dict[int, int] = {}
    expected = 0
    for slot, pool, share in readers:
        sizes = np.stack([np.log(np.linalg.norm(_plain(pieces, n, slot), axis=0) + 1e-12) for n in pool])
        sizes = sizes - sizes.mean(axis=1, keepdims=True)
        table = correlation(sizes - np.median(sizes, axis=0) if len(pool) > 2 else sizes, logs)
        expected += share
        for k, number in enumerate(pool):
            if float(table[k].min()) < _AGAINST:
                norm_of[number] = numbers[int(table[k].argmin())]
    if len(norm_of) < _MOST * expected:
        return NormalisedPieces(pieces)
    arrays = dict(pieces.arrays)
    for slot, pool, _ in readers:
        for number in pool:
            if number in norm_of:
                scale = vectors[norm_of[number]]
                values = np.asarray(arrays[number], np.float64)
                arrays[number] = _like(
                    values * (scale[:, None] if slot.transposed else scale), arrays[number]
                )
    _level_units(pieces, arrays)
    return NormalisedPieces(replace(pieces, arrays=arrays), norm_of)


def same_norm(normalised: NormalisedPieces, rows: Sequence[int], columns: Sequence[int]) -> Matrix:
    """Nats for or against two pieces of one block by the norms they read through; nought where one is not known."""
    norms = [
        np.array([normalised.norm_of.get(n, -1 - side) for n in numbers])
        for side, numbers in enumerate((rows, columns))
    ]
    both = (norms[0] >= 0)[:, None] & (norms[1] >= 0)[None, :]
    return np.where(both, np.where(norms[0][:, None] == norms[1][None, :], _CERTAIN, -_CERTAIN), 0.0)


def _readers(pieces: TransformerPieces) -> list[tuple[Slot, list[int], int]]:
    """For each shape that readers have: a slot of it, the pieces that may be readers, and how many of them are."""
    blueprint = pieces.blueprint
    readers: dict[tuple[int, ...], tuple[Slot, list[int], int]] = {}
    for slot in blueprint.block:
        if not slot.matrix or slot.role not in _READERS:
            continue
        shape = tuple(slot.shape)
        pool = [n for n, v in sorted(pieces.arrays.items()) if tuple(v.shape) == shape]
        pool = [n for n in pool if pieces.roles[n] in _READERS]
        previous = readers.get(shape)
        readers[shape] = (slot, pool, blueprint.blocks + (previous[2] if previous else 0))
    return list(readers.values())


def _plain(pieces: TransformerPieces, number: int, slot: Slot) -> Matrix:
    values = np.asarray(pieces.arrays[number], np.float64)
    return values.T if slot.transposed else values


def _level_units(pieces: TransformerPieces, arrays: dict[int, NDArray[Any]]) -> None:
    """Rows of q, k, v and up, and columns of out and down, all of one length in a matrix."""
    for number, held in pieces.arrays.items():
        slot = pieces.blueprint.slot(pieces.roles[number])
        if slot is None or slot.role not in (*_LEVEL, "out", "down"):
            continue
        axis = 1 if slot.role in _LEVEL else 0
        values = np.asarray(arrays[number], np.float64)
        sizes = np.linalg.norm(values, axis=1 - axis if slot.transposed else axis, keepdims=True)
        level = float(np.sqrt(np.square(sizes).mean()))
        arrays[number] = _like(values / np.maximum(sizes, 1e-30) * level, held)


def _like(values: Matrix, held: NDArray[Any]) -> NDArray[Any]:
    return values.astype(held.dtype)


@dataclass(frozen=True)
class MatrixPairing:
    """Two pieces found to be of one block: what said so most clearly, and by how many nats."""

    a: int
    b: int
    right_by: str
    margin: float


@dataclass(frozen=True)
class Placed:
    """The matrices in an order whose direction is still open.

    Attributes:
        numbers: Slot to piece numbers, block by block.
        stacked: Role (fused slots cut) to matrices in the same order.
        similarity: Similarities in the same order.
        pairs: Which pieces were put together, and why.
        order_margin: Log-likelihood that the least costly exchange of two neighbouring blocks would cost.
        swap_margins: The same for each two neighbours.
        margins: Slot to what the cheapest other place of each block's piece would cost its unit.
    """

    numbers: Mapping[str, tuple[int, ...]]
    stacked: Mapping[str, Floats]
    similarity: Similarity
    pairs: tuple[MatrixPairing, ...]
    order_margin: float | None
    swap_margins: tuple[float, ...]
    margins: Mapping[str, tuple[float, ...]]


def place_matrices(
    normalised: NormalisedPieces,
    candidates: Mapping[str, Sequence[int]],
    prior: Prior,
    rng: np.random.Generator,
    tick: Tick = silent,
) -> Placed:
    """Put the matrices of all blocks together and in order.

    Args:
        normalised: All pieces.
        candidates: Slot role to its pieces, one per block, in any order.
        prior: What signals are worth.
        rng: For the search.
        tick: Called after each stage.
    """
    pieces = normalised.pieces
    blueprint = pieces.blueprint
    stacked = stacks(pieces, candidates)
    kinds = unit_kinds(blueprint)
    numbers = {role: list(candidates[role]) for role in candidates}
    pairs: list[MatrixPairing] = []
    heads = head_signals(stacked, heads=blueprint.heads, groups=blueprint.groups)
    orders = {role: np.arange(blueprint.blocks) for role in stacked}
    for roles in kinds.values():
        orders |= _form_units(normalised, roles, numbers, stacked, heads, prior, pairs)
    tick("units")
    heads = {
        name: table[np.ix_(orders[name.split("-")[0]], orders[name.split("-")[1]])]
        for name, table in heads.items()
    }
    alike, more = likeness(stacked, blueprint, heads)
    similar = joined(alike, prior.same, more, rng)
    similar = replace(
        similar, together={**similar.together, **_of_one_norm(normalised, kinds, numbers, similar)}
    )
    places = _arranged(similar, prior, rng)
    tick("arranged")
    for kind, roles in kinds.items():
        order = np.argsort(places[kind])
        for role in roles:
            stacked[role] = stacked[role][order]
        for slot in slots_of(roles, blueprint):
            numbers[slot] = [numbers[slot][k] for k in order]
    similar = reordered(similar, {kind: np.argsort(places[kind]) for kind in kinds})
    line = Timeline(similar, prior.coefficients)
    pairs += _between_units(line, numbers, pieces)
    swaps = _swap_margins(line)
    return Placed(
        numbers={slot: tuple(entries) for slot, entries in numbers.items()},
        stacked=stacked,
        similarity=similar,
        pairs=tuple(pairs),
        order_margin=min(swaps, default=None),
        swap_margins=tuple(swaps),
        margins={
            slot: entries
            for kind, entries in place_margins(line).items()
            for slot in slots_of(kinds[kind], blueprint)
        },
    )


def _arranged(similar: Similarity, prior: Prior, rng: np.random.Generator) -> dict[str, Ints]:
    """Places of all units: those that are surely of one block are arranged as one, then each is tried alone."""
    joint = merged(similar)
    places = arrange(Timeline(joint.similarity, prior.coefficients), rng)[0].places
    return climb(Timeline(similar, prior.coefficients), joint.apart(places))


def reversed_order(placed: Placed) -> Placed:
    """The same in the other direction."""
    back = np.arange(placed.similarity.count)[::-1]
    return Placed(
        numbers={slot: entries[::-1] for slot, entries in placed.numbers.items()},
        stacked={role: stack[::-1] for role, stack in placed.stacked.items()},
        similarity=reordered(placed.similarity, dict.fromkeys(placed.similarity.units, back)),
        pairs=placed.pairs,
        order_margin=placed.order_margin,
        swap_margins=placed.swap_margins[::-1],
        margins={slot: entries[::-1] for slot, entries in placed.margins.items()},
    )


def _form_units(
    normalised: NormalisedPieces,
    roles: Sequence[str],
    numbers: dict[str, list[int]],
    stacked: dict[str, Floats],
    heads: Mapping[str, NDArray[np.float64]],
    prior: Prior,
    pairs: list[MatrixPairing],
) -> dict[str, Ints]:
    """Bring the pieces of a unit's slots into one order, whatever that is; the order of each role's stack."""
    blueprint = normalised.pieces.blueprint
    slots = slots_of(roles, blueprint)
    if len(slots) < 2:
        return {}
    tables: dict[tuple[int, int], NDArray[np.float64]] = {}
    best_by: dict[tuple[int, int], str] = {}
    for a, b in PAIRS:
        if a not in roles or b not in roles:
            continue
        slot_a, slot_b = (slots.index(slots_of([role], blueprint)[0]) for role in (a, b))
        if slot_a == slot_b:
            continue
        signals = unit_signals(stacked, a, b, blueprint, heads)
        table = evidence(signals, prior.shifts.get(f"{a}-{b}", {}))
        table = table + same_norm(normalised, numbers[slots[slot_a]], numbers[slots[slot_b]])
        key, table = ((slot_a, slot_b), table) if slot_a < slot_b else ((slot_b, slot_a), table.T)
        tables[key] = tables[key] + table if key in tables else table
        best_by[key] = max(signals, key=lambda name: _clarity(signals[name]))
    groups = chain(tables, blueprint.blocks, len(slots))
    orders: dict[str, Ints] = {}
    for number, slot in enumerate(slots):
        order = groups[number]
        numbers[slot] = [numbers[slot][k] for k in order]
        for role in roles:
            if slots_of([role], blueprint)[0] == slot:
                stacked[role] = stacked[role][order]
                orders[role] = order
    for (slot_a, slot_b), table in tables.items():
        held = margins(table, groups[slot_a], groups[slot_b])
        for k, margin in enumerate(held.tolist()):
            pairs.append(
                MatrixPairing(
                    numbers[slots[slot_a]][k], numbers[slots[slot_b]][k], best_by[slot_a, slot_b], margin
                )
            )
    return orders


def _of_one_norm(
    normalised: NormalisedPieces,
    kinds: Mapping[str, Sequence[str]],
    numbers: Mapping[str, Sequence[int]],
    similar: Similarity,
) -> dict[tuple[str, str], NDArray[np.float64]]:
    """The evidence that units are of one block, and that of the norms which their readers share."""
    tables = {}
    for kind_a, kind_b in similar.together:
        table = similar.together[kind_a, kind_b]
        for a in slots_of(kinds[kind_a], normalised.pieces.blueprint):
            for b in slots_of(kinds[kind_b], normalised.pieces.blueprint):
                shared = same_norm(normalised, numbers[a], numbers[b])
                if (shared > 0).any():  # attention and MLP have norms of their own
                    table = table + shared
        tables[kind_a, kind_b] = table
    return tables


def _clarity(table: NDArray[np.float64]) -> float:
    """How far a signal's best pairs stand out: their mean score in standard deviations."""
    z = standard(table)
    return float(z[np.arange(len(z)), assign(z)].mean())


def _between_units(
    line: Timeline, numbers: Mapping[str, Sequence[int]], pieces: TransformerPieces
) -> list[MatrixPairing]:
    """The link of each block's units with the next kind's: what exchanging one with a neighbour's would cost."""
    similar = line.similarity
    kinds = list(similar.units)
    places = {kind: np.arange(similar.count) for kind in kinds}
    base = line.log_likelihood(places)
    pairings = []
    for kind_a, kind_b in pairwise(kinds):
        a = slots_of(similar.units[kind_a], pieces.blueprint)[0]
        b = slots_of(similar.units[kind_b], pieces.blueprint)[0]
        least = np.full(similar.count, np.inf)
        for i in range(similar.count):
            for j in range(i + 1, min(similar.count, i + 3)):
                order = np.arange(similar.count)
                order[[i, j]] = j, i
                exchanged = {
                    k: order if kinds.index(k) > kinds.index(kind_a) else p for k, p in places.items()
                }
                cost = base - line.log_likelihood(exchanged)
                least[[i, j]] = np.minimum(least[[i, j]], cost)
        for k in range(similar.count):
            pairings.append(MatrixPairing(numbers[a][k], numbers[b][k], "stream", float(least[k])))
    return pairings


def _swap_margins(line: Timeline) -> list[float]:
    similar = line.similarity
    places = {kind: np.arange(similar.count) for kind in similar.units}
    base = line.log_likelihood(places)
    margins_by_pair = []
    for k in range(similar.count - 1):
        order = np.arange(similar.count)
        order[[k, k + 1]] = k + 1, k
        margins_by_pair.append(base - line.log_likelihood(dict.fromkeys(places, order)))
    return margins_by_pair
