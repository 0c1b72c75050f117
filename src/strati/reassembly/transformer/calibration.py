"""What signals are worth on other networks: the priors of units and arrangements, and how they are measured.

:func:`measure` looks at a network whose answer is known: how far the scores of true pairs lie above those of strangers
(in standard deviations, signal by signal), and by how much similarity on the stream follows its template (pair of roles by
pair of roles). :data:`PRIOR` is the mean over the networks named in docs/dropped-transformer.md; a test leaves each of them
out in turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.reassembly.combined import standard
from strati.reassembly.transformer import stream, units
from strati.reassembly.transformer.arrange import Similarity, coefficients
from strati.reassembly.transformer.evidence import Expected
from strati.reassembly.transformer.layout import stacks, unit_kinds

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.reassembly.transformer.blueprint import Blueprint
    from strati.reassembly.transformer.pieces import TransformerPieces


@dataclass(frozen=True)
class Measured:
    """What one network shows.

    Attributes:
        shifts: Pair of roles that share units, to signal, to the shift of true pairs.
        same: Signal that units are of one block, to its shift.
        coefficients: Pair of roles to its coefficients on the stream.
        blocks: Number of blocks.
    """

    shifts: Mapping[str, Mapping[str, float]]
    same: Mapping[str, float]
    coefficients: Mapping[tuple[str, str], tuple[float, ...]]
    blocks: int


@dataclass(frozen=True)
class Prior:
    """What is to be expected, as :class:`Measured` has it."""

    shifts: Mapping[str, Mapping[str, Expected]]
    same: Mapping[str, Expected]
    coefficients: Mapping[tuple[str, str], tuple[float, float, float, float]]


def measure(pieces: TransformerPieces, answer: Mapping[str, Any]) -> Measured:
    """What each signal is worth on a network whose answer is known."""
    blueprint = pieces.blueprint
    numbers = {
        slot.role: [block[slot.role] for block in answer["blocks"]] for slot in blueprint.block if slot.matrix
    }
    stacked = stacks(pieces, numbers)
    shifts: dict[str, dict[str, float]] = {}
    for a, b in units.PAIRS:
        if a in stacked and b in stacked and blueprint.blocks > 1:
            found = units.signals(
                stacked, a, b, heads=blueprint.heads, groups=blueprint.groups, rotary=blueprint.rotary
            )
            shifts[f"{a}-{b}"] = {name: _shift(table) for name, table in found.items()}
    given, more = likeness(stacked, blueprint)
    same = {"-".join(pair): _shift(table) for pair, table in given.between.items() if pair[0] < pair[1]}
    same |= {name: _shift(table) for signals in more.values() for name, table in signals.items()}
    places = {kind: np.arange(blueprint.blocks) for kind in given.units}
    return Measured(shifts, same, coefficients(given, places), blueprint.blocks)


def likeness(
    stacked: Mapping[str, NDArray[np.float32]],
    blueprint: Blueprint,
    norms: Mapping[str, NDArray[np.float32]] | None = None,
) -> tuple[Similarity, dict[tuple[str, str], dict[str, NDArray[np.float64]]]]:
    """All similarities on the stream, and the signals between q-k and v-out units by their heads.

    Args:
        stacked: Role to pieces; units in one order in all roles of their kind.
        blueprint: The architecture.
        norms: Role to the weights of the norm before each piece, where known.
    """
    flat = {role: stream.features(role, stack, (norms or {}).get(role)) for role, stack in stacked.items()}
    kinds = unit_kinds(blueprint)
    given = Similarity(kinds, stream.similarities(flat), blueprint.blocks)
    more = {}
    if "qk" in kinds:
        heads = units.head_signals(stacked, heads=blueprint.heads, groups=blueprint.groups)
        more["qk", "vo"] = {f"heads {a}-{b}": table for (a, b), table in heads.items()}
    return given, more


def _shift(table: NDArray[np.float64]) -> float:
    return float(np.diagonal(standard(table, shared=False)).mean()) / float(np.sqrt(max(len(table) - 1, 1)))


def prior_of(found: Iterable[Measured]) -> Prior:
    """Mean and spread over several networks; networks of fewer than four blocks show too little to count."""
    every = [one for one in found if one.blocks >= 4]
    pairs = sorted({pair for one in every for pair in one.shifts})
    shifts = {pair: _expected([one.shifts[pair] for one in every if pair in one.shifts]) for pair in pairs}
    known: dict[tuple[str, str], list[tuple[float, ...]]] = {}
    for one in every:
        for roles, values in one.coefficients.items():
            known.setdefault(roles, []).append(values)
    means = {}
    for roles, rows in known.items():
        same, later, earlier, far = np.mean(rows, axis=0).tolist()
        means[roles] = (same, later, earlier, far)
    return Prior(shifts, _expected([one.same for one in every]), means)


def _expected(rows: Sequence[Mapping[str, float]]) -> dict[str, Expected]:
    found = {}
    for name in sorted({name for row in rows for name in row}):
        values = [row[name] for row in rows if name in row]
        found[name] = Expected(float(np.mean(values)), max(0.1, float(np.std(values))))
    return found
