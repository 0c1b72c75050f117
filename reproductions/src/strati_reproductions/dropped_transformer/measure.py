"""Measure what each signal of a transformer shows where the answer is known: the entries of ``measured.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.reassembly.transformer import similarity, vectors
from strati.reassembly.transformer.evidence import MeasuredSignals, standard
from strati.reassembly.transformer.similarity import end_tables, likeness, stacks, unit_signals
from strati.reassembly.transformer.solve import signs
from strati.reassembly.transformer.timeline import coefficients

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.reassembly.transformer.pieces import TransformerPieces


def measure(pieces: TransformerPieces, answer: Mapping[str, Any]) -> MeasuredSignals:
    """What each signal is worth on a network whose answer is known."""
    blueprint = pieces.blueprint
    numbers = {
        slot.role: [block[slot.role] for block in answer["blocks"]] for slot in blueprint.block if slot.matrix
    }
    stacked = stacks(pieces, numbers)
    shifts: dict[str, dict[str, float]] = {}
    heads = similarity.head_signals(stacked, heads=blueprint.heads, groups=blueprint.groups)
    for a, b in similarity.PAIRS:
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
