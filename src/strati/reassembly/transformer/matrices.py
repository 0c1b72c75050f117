"""Every matrix in its place: units by what they share, then all units on one time line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from strati.reassembly.assignment import assign
from strati.reassembly.transformer import units
from strati.reassembly.transformer.arrange import arrange, joined, merged
from strati.reassembly.transformer.calibration import Prior, likeness, unit_signals
from strati.reassembly.transformer.certainty import climb, place_margins
from strati.reassembly.transformer.evidence import chain, evidence, margins, standard
from strati.reassembly.transformer.fold import same_norm
from strati.reassembly.transformer.layout import slots_of, stacks, unit_kinds
from strati.reassembly.transformer.timeline import Similarity, Timeline, reordered
from strati.types import Tick, silent

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.reassembly.transformer.fold import Folded
    from strati.reassembly.transformer.pieces import TransformerPieces

    Floats = NDArray[np.float32]
    Ints = NDArray[np.intp]


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
        given: Similarities in the same order.
        pairs: Which pieces were put together, and why.
        order_margin: Log-likelihood that the least costly exchange of two neighbouring blocks would cost.
        swap_margins: The same for each two neighbours.
        margins: Slot to what the cheapest other place of each block's piece would cost its unit.
    """

    numbers: Mapping[str, tuple[int, ...]]
    stacked: Mapping[str, Floats]
    given: Similarity
    pairs: tuple[MatrixPairing, ...]
    order_margin: float | None
    swap_margins: tuple[float, ...]
    margins: Mapping[str, tuple[float, ...]]


def place_matrices(
    bare: Folded,
    candidates: Mapping[str, Sequence[int]],
    prior: Prior,
    rng: np.random.Generator,
    tick: Tick = silent,
) -> Placed:
    """Put the matrices of all blocks together and in order.

    Args:
        bare: All pieces.
        candidates: Slot role to its pieces, one per block, in any order.
        prior: What signals are worth.
        rng: For the search.
        tick: Called after each stage.
    """
    pieces = bare.pieces
    blueprint = pieces.blueprint
    stacked = stacks(pieces, candidates)
    kinds = unit_kinds(blueprint)
    numbers = {role: list(candidates[role]) for role in candidates}
    pairs: list[MatrixPairing] = []
    heads = units.head_signals(stacked, heads=blueprint.heads, groups=blueprint.groups)
    orders = {role: np.arange(blueprint.blocks) for role in stacked}
    for roles in kinds.values():
        orders |= _form_units(bare, roles, numbers, stacked, heads, prior, pairs)
    tick("units")
    heads = {
        name: table[np.ix_(orders[name.split("-")[0]], orders[name.split("-")[1]])]
        for name, table in heads.items()
    }
    alike, more = likeness(stacked, blueprint, heads)
    given = joined(alike, prior.same, more, rng)
    given = replace(given, together={**given.together, **_of_one_norm(bare, kinds, numbers, given)})
    places = _arranged(given, prior, rng)
    tick("arranged")
    for kind, roles in kinds.items():
        order = np.argsort(places[kind])
        for role in roles:
            stacked[role] = stacked[role][order]
        for slot in slots_of(roles, blueprint):
            numbers[slot] = [numbers[slot][k] for k in order]
    given = reordered(given, {kind: np.argsort(places[kind]) for kind in kinds})
    line = Timeline(given, prior.coefficients)
    pairs += _between_units(line, numbers, pieces)
    swaps = _swap_margins(line)
    return Placed(
        numbers={slot: tuple(found) for slot, found in numbers.items()},
        stacked=stacked,
        given=given,
        pairs=tuple(pairs),
        order_margin=min(swaps, default=None),
        swap_margins=tuple(swaps),
        margins={
            slot: found
            for kind, found in place_margins(line).items()
            for slot in slots_of(kinds[kind], blueprint)
        },
    )


def _arranged(given: Similarity, prior: Prior, rng: np.random.Generator) -> dict[str, Ints]:
    """Places of all units: those that are surely of one block are arranged as one, then each is tried alone."""
    one = merged(given)
    found = arrange(Timeline(one.given, prior.coefficients), rng)[0].places
    return climb(Timeline(given, prior.coefficients), one.apart(found))


def turned(placed: Placed) -> Placed:
    """The same in the other direction."""
    back = np.arange(placed.given.count)[::-1]
    return Placed(
        numbers={slot: found[::-1] for slot, found in placed.numbers.items()},
        stacked={role: stack[::-1] for role, stack in placed.stacked.items()},
        given=reordered(placed.given, dict.fromkeys(placed.given.units, back)),
        pairs=placed.pairs,
        order_margin=placed.order_margin,
        swap_margins=placed.swap_margins[::-1],
        margins={slot: found[::-1] for slot, found in placed.margins.items()},
    )


def _form_units(
    bare: Folded,
    roles: Sequence[str],
    numbers: dict[str, list[int]],
    stacked: dict[str, Floats],
    heads: Mapping[str, NDArray[np.float64]],
    prior: Prior,
    pairs: list[MatrixPairing],
) -> dict[str, Ints]:
    """Bring the pieces of a unit's slots into one order, whatever that is; the order of each role's stack."""
    blueprint = bare.pieces.blueprint
    slots = slots_of(roles, blueprint)
    if len(slots) < 2:
        return {}
    tables: dict[tuple[int, int], NDArray[np.float64]] = {}
    best_by: dict[tuple[int, int], str] = {}
    for a, b in units.PAIRS:
        if a not in roles or b not in roles:
            continue
        one, two = (slots.index(slots_of([role], blueprint)[0]) for role in (a, b))
        if one == two:
            continue
        signals = unit_signals(stacked, a, b, blueprint, heads)
        table = evidence(signals, prior.shifts.get(f"{a}-{b}", {}))
        table = table + same_norm(bare, numbers[slots[one]], numbers[slots[two]])
        key, table = ((one, two), table) if one < two else ((two, one), table.T)
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
    for (one, two), table in tables.items():
        held = margins(table, groups[one], groups[two])
        for k, margin in enumerate(held.tolist()):
            pairs.append(
                MatrixPairing(numbers[slots[one]][k], numbers[slots[two]][k], best_by[one, two], margin)
            )
    return orders


def _of_one_norm(
    bare: Folded, kinds: Mapping[str, Sequence[str]], numbers: Mapping[str, Sequence[int]], given: Similarity
) -> dict[tuple[str, str], NDArray[np.float64]]:
    """The evidence that units are of one block, and that of the norms which their readers share."""
    found = {}
    for one, two in given.together:
        table = given.together[one, two]
        for a in slots_of(kinds[one], bare.pieces.blueprint):
            for b in slots_of(kinds[two], bare.pieces.blueprint):
                shared = same_norm(bare, numbers[a], numbers[b])
                if (shared > 0).any():  # attention and MLP have norms of their own
                    table = table + shared
        found[one, two] = table
    return found


def _clarity(table: NDArray[np.float64]) -> float:
    """How far a signal's best pairs stand out: their mean score in standard deviations."""
    z = standard(table)
    return float(z[np.arange(len(z)), assign(z)].mean())


def _between_units(
    line: Timeline, numbers: Mapping[str, Sequence[int]], pieces: TransformerPieces
) -> list[MatrixPairing]:
    """The link of each block's units with the next kind's: what exchanging one with a neighbour's would cost."""
    given = line.given
    kinds = list(given.units)
    places = {kind: np.arange(given.count) for kind in kinds}
    base = line.log_likelihood(places)
    found = []
    for one, two in pairwise(kinds):
        a = slots_of(given.units[one], pieces.blueprint)[0]
        b = slots_of(given.units[two], pieces.blueprint)[0]
        least = np.full(given.count, np.inf)
        for i in range(given.count):
            for j in range(i + 1, min(given.count, i + 3)):
                order = np.arange(given.count)
                order[[i, j]] = j, i
                kept = {k: order if kinds.index(k) > kinds.index(one) else p for k, p in places.items()}
                cost = base - line.log_likelihood(kept)
                least[[i, j]] = np.minimum(least[[i, j]], cost)
        for k in range(given.count):
            found.append(MatrixPairing(numbers[a][k], numbers[b][k], "stream", float(least[k])))
    return found


def _swap_margins(line: Timeline) -> list[float]:
    given = line.given
    places = {kind: np.arange(given.count) for kind in given.units}
    base = line.log_likelihood(places)
    found = []
    for k in range(given.count - 1):
        order = np.arange(given.count)
        order[[k, k + 1]] = k + 1, k
        found.append(base - line.log_likelihood(dict.fromkeys(places, order)))
    return found
