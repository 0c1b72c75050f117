"""Measure what each signal of a transformer shows where the answer is known: the entries of ``measured.json``.

The prior over all of them is ``prior.json`` of the product.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.reassembly.transformer import evidence, vectors
from strati.reassembly.transformer.evidence import (
    Prior,
    end_tables,
    likeness,
    stacks,
    standard,
    unit_signals,
)
from strati.reassembly.transformer.solve import signs
from strati.reassembly.transformer.timeline import Expected, coefficients

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.reassembly.transformer.pieces import TransformerPieces


@dataclass(frozen=True)
class MeasuredSignals:
    """What one network shows.

    Attributes:
        shifts: Pair of roles that share units, to signal, to the shift of true pairs.
        same: Signal that units are of one block, to its shift.
        coefficients: Pair of roles, or of features of vectors, to its coefficients.
        signs: Signs of direction, the right way round.
        blocks: Number of blocks.
    """

    shifts: Mapping[str, Mapping[str, float]]
    same: Mapping[str, float]
    signs: Mapping[str, float]
    coefficients: Mapping[tuple[str, str], tuple[float, ...]]
    blocks: int


def measure(pieces: TransformerPieces, answer: Mapping[str, Any]) -> MeasuredSignals:
    """What each signal is worth on a network whose answer is known."""
    blueprint = pieces.blueprint
    numbers = {
        slot.role: [block[slot.role] for block in answer["blocks"]] for slot in blueprint.block if slot.matrix
    }
    stacked = stacks(pieces, numbers)
    shifts: dict[str, dict[str, float]] = {}
    heads = evidence.head_signals(stacked, heads=blueprint.heads, groups=blueprint.groups)
    for a, b in evidence.PAIRS:
        if a in stacked and b in stacked and blueprint.blocks > 1:
            pair_signals = unit_signals(stacked, a, b, blueprint, heads)
            shifts[f"{a}-{b}"] = {name: _shift(table) for name, table in pair_signals.items()}
    similar, more = likeness(stacked, blueprint, heads)
    same = {"-".join(pair): _shift(table) for pair, table in similar.between.items() if pair[0] < pair[1]}
    same |= {name: _shift(table) for signals in more.values() for name, table in signals.items()}
    places = {kind: np.arange(blueprint.blocks) for kind in similar.units}
    global_numbers = {**answer["others"], "embedding": answer["embedding"], "head": answer["head"]}
    tables = end_tables(
        pieces, {name: number for name, number in global_numbers.items() if number is not None}
    )
    ways = signs(stacked, similar, tables, blueprint)
    bodies = _alongside(pieces, answer, stacked) if blueprint.blocks > 1 else {}
    return MeasuredSignals(shifts, same, ways, coefficients(similar, places) | bodies, blueprint.blocks)


def _alongside(
    pieces: TransformerPieces, answer: Mapping[str, Any], stacked: Mapping[str, NDArray[np.float32]]
) -> dict[tuple[str, str], tuple[float, float, float, float]]:
    """The coefficients of vectors beside the matrices."""
    slots = [slot for slot in pieces.blueprint.block if not slot.matrix]
    if not slots:
        return {}
    rows = {s.role: vectors.read(pieces, s, [block[s.role] for block in answer["vectors"]]) for s in slots}
    similar = vectors.alongside(rows, stacked, pieces.blueprint)
    return coefficients(similar, {kind: np.arange(similar.count) for kind in similar.units})


def _shift(table: NDArray[np.float64]) -> float:
    return float(np.diagonal(standard(table)).mean()) / float(np.sqrt(max(len(table) - 1, 1)))


def to_json(signals: MeasuredSignals) -> dict[str, Any]:
    """Plain values, rounded to four digits."""
    plain = asdict(signals) | {
        "coefficients": {"-".join(pair): c for pair, c in signals.coefficients.items()}
    }

    def rounded(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: rounded(entry) for key, entry in value.items()}
        if isinstance(value, list | tuple):
            return [rounded(entry) for entry in value]
        return float(f"{value:.4g}") if isinstance(value, float) else value

    short: dict[str, Any] = rounded(plain)
    return short


_FEW, _APART = 2, 0.2
"""Networks that the spread of a coefficient is known from before any is measured, and that spread."""


@cache
def measured() -> dict[str, MeasuredSignals]:
    """What was measured, by name of the network; written by ``strati reproduce dropped-transformer``."""
    text = (
        resources.files("strati_reproductions.dropped_transformer")
        .joinpath("measured.json")
        .read_text("utf-8")
    )
    return {name: from_json(signals) for name, signals in json.loads(text).items()}


def from_json(fields: Mapping[str, Any]) -> MeasuredSignals:
    """The reverse of :func:`to_json`."""
    pairs = {}
    for name, values in fields["coefficients"].items():
        a, _, b = name.partition("-")
        pairs[a, b] = tuple(values)
    return MeasuredSignals(**{**fields, "coefficients": pairs})


def prior_of(measurements: Iterable[MeasuredSignals]) -> Prior:
    """Mean and spread over several networks; networks of fewer than four blocks show too little to count."""
    every = [network for network in measurements if network.blocks >= 4]
    pairs = sorted({pair for network in every for pair in network.shifts})
    shifts = {
        pair: _expected([network.shifts[pair] for network in every if pair in network.shifts])
        for pair in pairs
    }
    by_pair: dict[tuple[str, str], list[tuple[float, ...]]] = {}
    for network in every:
        for roles, values in network.coefficients.items():
            by_pair.setdefault(roles, []).append(values)
    means = {pair: _coefficients(rows) for pair, rows in by_pair.items()}
    same, ways = (
        _expected([network.same for network in every]),
        _expected([network.signs for network in every]),
    )
    return Prior(shifts, same, ways, means)


def _expected(rows: Sequence[Mapping[str, float]]) -> dict[str, Expected]:
    expected = {}
    for name in sorted({name for row in rows for name in row}):
        values = [row[name] for row in rows if name in row]
        expected[name] = Expected(float(np.mean(values)), max(0.1, float(np.std(values))))
    return expected


def _coefficients(rows: Sequence[Sequence[float]]) -> tuple[Expected, ...]:
    """Mean and spread of coefficients; few networks do not show how far the next one may lie off."""
    table = np.asarray(rows, dtype=np.float64)
    spread = np.sqrt((table.var(axis=0) * len(table) + _FEW * _APART**2) / (len(table) + _FEW))
    return tuple(Expected(float(m), float(s)) for m, s in zip(table.mean(axis=0), spread, strict=True))


def prior_to_json(prior: Prior) -> dict[str, Any]:
    """The content of the product's ``prior.json``."""

    def plain(table: Mapping[str, Expected]) -> dict[str, tuple[float, float]]:
        return {name: (expected.mean, expected.spread) for name, expected in sorted(table.items())}

    return {
        "shifts": {pair: plain(table) for pair, table in sorted(prior.shifts.items())},
        "same": plain(prior.same),
        "signs": plain(prior.signs),
        "coefficients": [
            [*pair, *((c.mean, c.spread) for c in coefficients)]
            for pair, coefficients in sorted(prior.coefficients.items())
        ],
    }
