"""What signals are worth on other networks: the priors of units and arrangements, and how they are measured.

:func:`measure` looks at a network whose answer is known: how far the scores of true pairs lie above those of
strangers (in standard deviations, signal by signal), and by how much similarity on the stream follows its template
(pair of roles by pair of roles). :func:`default_prior` is mean and spread over the networks of ``measured.json``;
a test solves networks with a prior from which they were left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.reassembly.transformer import stream, units, vectors
from strati.reassembly.transformer.asymmetry import differences, ends_of, signs_of
from strati.reassembly.transformer.direction import signs
from strati.reassembly.transformer.evidence import Expected, standard
from strati.reassembly.transformer.layout import end_tables, stacks, unit_kinds
from strati.reassembly.transformer.timeline import Similarity, coefficients

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.reassembly.transformer.blueprint import Blueprint
    from strati.reassembly.transformer.pieces import TransformerPieces


_FEW, _APART = 2, 0.2
"""Networks that the spread of a coefficient is known from before any is measured, and that spread."""


@dataclass(frozen=True)
class MeasuredSignals:
    """What one network shows.

    Attributes:
        shifts: Pair of roles that share units, to signal, to the shift of true pairs.
        same: Signal that units are of one block, to its shift.
        coefficients: Pair of roles, or of features of vectors, to its coefficients.
        signs: Signs of direction, the right way round.
        blocks: Number of blocks.
        twins: Signs of which of two matrices of one shape is which, the right way round.
    """

    shifts: Mapping[str, Mapping[str, float]]
    same: Mapping[str, float]
    signs: Mapping[str, float]
    coefficients: Mapping[tuple[str, str], tuple[float, ...]]
    blocks: int
    twins: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Prior:
    """What is to be expected, as :class:`MeasuredSignals` has it."""

    shifts: Mapping[str, Mapping[str, Expected]]
    same: Mapping[str, Expected]
    signs: Mapping[str, Expected]
    coefficients: Mapping[tuple[str, str], tuple[Expected, ...]]
    twins: Mapping[str, Expected]


@cache
def default_prior() -> Prior:
    """The prior over all networks that were measured (``measured.json``)."""
    return prior_of(measured().values())


@cache
def measured() -> dict[str, MeasuredSignals]:
    """What was measured, by name of the network; written by ``strati reproduce dropped-transformer``."""
    text = resources.files("strati.reassembly.transformer").joinpath("measured.json").read_text("utf-8")
    return {name: from_json(found) for name, found in json.loads(text).items()}


def to_json(found: MeasuredSignals) -> dict[str, Any]:
    """Plain values, rounded to four digits."""
    plain = asdict(found) | {"coefficients": {"-".join(pair): c for pair, c in found.coefficients.items()}}

    def rounded(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: rounded(one) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [rounded(one) for one in value]
        return float(f"{value:.4g}") if isinstance(value, float) else value

    short: dict[str, Any] = rounded(plain)
    return short


def from_json(found: Mapping[str, Any]) -> MeasuredSignals:
    """The reverse of :func:`to_json`."""
    pairs = {}
    for name, values in found["coefficients"].items():
        a, _, b = name.partition("-")
        pairs[a, b] = tuple(values)
    return MeasuredSignals(**{**found, "coefficients": pairs})


def measure(pieces: TransformerPieces, answer: Mapping[str, Any]) -> MeasuredSignals:
    """What each signal is worth on a network whose answer is known."""
    blueprint = pieces.blueprint
    numbers = {
        slot.role: [block[slot.role] for block in answer["blocks"]] for slot in blueprint.block if slot.matrix
    }
    stacked = stacks(pieces, numbers)
    shifts: dict[str, dict[str, float]] = {}
    heads = units.head_signals(stacked, heads=blueprint.heads, groups=blueprint.groups)
    for a, b in units.PAIRS:
        if a in stacked and b in stacked and blueprint.blocks > 1:
            found = unit_signals(stacked, a, b, blueprint, heads)
            shifts[f"{a}-{b}"] = {name: _shift(table) for name, table in found.items()}
    given, more = likeness(stacked, blueprint, heads)
    same = {"-".join(pair): _shift(table) for pair, table in given.between.items() if pair[0] < pair[1]}
    same |= {name: _shift(table) for signals in more.values() for name, table in signals.items()}
    places = {kind: np.arange(blueprint.blocks) for kind in given.units}
    whole = {**answer["others"], "embedding": answer["embedding"], "head": answer["head"]}
    tables = end_tables(pieces, {name: number for name, number in whole.items() if number is not None})
    ways = signs(stacked, given, tables, blueprint)
    bodies = _alongside(pieces, answer, stacked) if blueprint.blocks > 1 else {}
    twins = signs_of(differences(stacked, blueprint))
    if not blueprint.tied and {"embedding", "head"} <= set(tables):
        twins |= ends_of(tables["embedding"], tables["head"], stacked)
    return MeasuredSignals(shifts, same, ways, coefficients(given, places) | bodies, blueprint.blocks, twins)


def unit_signals(
    stacked: Mapping[str, NDArray[np.float32]],
    a: str,
    b: str,
    blueprint: Blueprint,
    heads: Mapping[str, NDArray[np.float64]],
) -> dict[str, NDArray[np.float64]]:
    """All that speaks for two roles' pieces sharing units, in the orders of their stacks."""
    found = units.signals(
        stacked, a, b, heads=blueprint.heads, groups=blueprint.groups, rotary=blueprint.rotary
    )
    if f"{a}-{b}" in heads:
        found["heads"] = heads[f"{a}-{b}"]
    return found


def likeness(
    stacked: Mapping[str, NDArray[np.float32]],
    blueprint: Blueprint,
    heads: Mapping[str, NDArray[np.float64]],
    norms: Mapping[str, NDArray[np.float32]] | None = None,
) -> tuple[Similarity, dict[tuple[str, str], dict[str, NDArray[np.float64]]]]:
    """All similarities on the stream, and more signals that units are of one block: heads, norms along the stream.

    Args:
        stacked: Role to pieces; units in one order in all roles of their kind.
        blueprint: The architecture.
        heads: As :func:`~strati.reassembly.transformer.units.head_signals` gives them.
        norms: Role to the weights of the norm before each piece, where known.
    """
    flat = {role: stream.features(role, stack, (norms or {}).get(role)) for role, stack in stacked.items()}
    kinds = unit_kinds(blueprint)
    given = Similarity(kinds, stream.similarities(flat), blueprint.blocks)
    sizes = {role: stream.sizes(role, stack) for role, stack in stacked.items()}
    more: dict[tuple[str, str], dict[str, NDArray[np.float64]]] = {}
    names = list(kinds)
    for i, one in enumerate(names):
        for two in names[i + 1 :]:
            found = {
                f"norms {'-'.join(sorted((a, b)))}": units.correlation(sizes[a], sizes[b])
                for a in kinds[one]
                for b in kinds[two]
            }
            for a in kinds[one]:
                found |= {f"heads {a}-{b}": heads[f"{a}-{b}"] for b in kinds[two] if f"{a}-{b}" in heads}
            more[one, two] = found
    return given, more


def _alongside(
    pieces: TransformerPieces, answer: Mapping[str, Any], stacked: Mapping[str, NDArray[np.float32]]
) -> dict[tuple[str, str], tuple[float, float, float, float]]:
    """The coefficients of vectors beside the matrices."""
    slots = [slot for slot in pieces.blueprint.block if not slot.matrix]
    if not slots:
        return {}
    rows = {s.role: vectors.read(pieces, s, [block[s.role] for block in answer["vectors"]]) for s in slots}
    given = vectors.alongside(rows, stacked, pieces.blueprint)
    return coefficients(given, {kind: np.arange(given.count) for kind in given.units})


def _shift(table: NDArray[np.float64]) -> float:
    return float(np.diagonal(standard(table)).mean()) / float(np.sqrt(max(len(table) - 1, 1)))


def prior_of(found: Iterable[MeasuredSignals]) -> Prior:
    """Mean and spread over several networks; networks of fewer than four blocks show too little to count."""
    every = [one for one in found if one.blocks >= 4]
    pairs = sorted({pair for one in every for pair in one.shifts})
    shifts = {pair: _expected([one.shifts[pair] for one in every if pair in one.shifts]) for pair in pairs}
    known: dict[tuple[str, str], list[tuple[float, ...]]] = {}
    for one in every:
        for roles, values in one.coefficients.items():
            known.setdefault(roles, []).append(values)
    means = {pair: _coefficients(rows) for pair, rows in known.items()}
    same, ways = _expected([one.same for one in every]), _expected([one.signs for one in every])
    return Prior(shifts, same, ways, means, _expected([one.twins for one in every]))


def _expected(rows: Sequence[Mapping[str, float]]) -> dict[str, Expected]:
    found = {}
    for name in sorted({name for row in rows for name in row}):
        values = [row[name] for row in rows if name in row]
        found[name] = Expected(float(np.mean(values)), max(0.1, float(np.std(values))))
    return found


def _coefficients(rows: Sequence[Sequence[float]]) -> tuple[Expected, ...]:
    """Mean and spread of coefficients; few networks do not show how far the next one may lie off."""
    table = np.asarray(rows, dtype=np.float64)
    spread = np.sqrt((table.var(axis=0) * len(table) + _FEW * _APART**2) / (len(table) + _FEW))
    return tuple(Expected(float(m), float(s)) for m, s in zip(table.mean(axis=0), spread, strict=True))
