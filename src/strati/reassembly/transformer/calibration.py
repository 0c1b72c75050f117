"""What signals are worth on other networks: the priors of units and arrangements, and how they are measured.

:func:`measure` looks at a network whose answer is known: how far the scores of true pairs lie above those of
strangers (in standard deviations, signal by signal), and by how much similarity on the stream follows its template
(pair of roles by pair of roles). :func:`default_prior` is mean and spread over the networks of ``measured.json``;
a test solves networks with a prior from which they were left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.reassembly.transformer import similarity
from strati.reassembly.transformer.evidence import Expected
from strati.reassembly.transformer.similarity import unit_kinds
from strati.reassembly.transformer.timeline import Similarity

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.reassembly.transformer.blueprint import Blueprint


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
    """

    shifts: Mapping[str, Mapping[str, float]]
    same: Mapping[str, float]
    signs: Mapping[str, float]
    coefficients: Mapping[tuple[str, str], tuple[float, ...]]
    blocks: int


@dataclass(frozen=True)
class Prior:
    """What is to be expected, as :class:`MeasuredSignals` has it."""

    shifts: Mapping[str, Mapping[str, Expected]]
    same: Mapping[str, Expected]
    signs: Mapping[str, Expected]
    coefficients: Mapping[tuple[str, str], tuple[Expected, ...]]


@cache
def default_prior() -> Prior:
    """The prior over all networks that were measured (``measured.json``)."""
    return prior_of(measured().values())


@cache
def measured() -> dict[str, MeasuredSignals]:
    """What was measured, by name of the network; written by ``strati reproduce dropped-transformer``."""
    text = resources.files("strati.reassembly.transformer").joinpath("measured.json").read_text("utf-8")
    return {name: from_json(signals) for name, signals in json.loads(text).items()}


def from_json(fields: Mapping[str, Any]) -> MeasuredSignals:
    """The reverse of :func:`to_json`."""
    pairs = {}
    for name, values in fields["coefficients"].items():
        a, _, b = name.partition("-")
        pairs[a, b] = tuple(values)
    return MeasuredSignals(**{**fields, "coefficients": pairs})


def unit_signals(
    stacked: Mapping[str, NDArray[np.float32]],
    a: str,
    b: str,
    blueprint: Blueprint,
    heads: Mapping[str, NDArray[np.float64]],
) -> dict[str, NDArray[np.float64]]:
    """All that speaks for two roles' pieces sharing units, in the orders of their stacks."""
    signals = similarity.signals(
        stacked, a, b, heads=blueprint.heads, groups=blueprint.groups, rotary=blueprint.rotary
    )
    if f"{a}-{b}" in heads:
        signals["heads"] = heads[f"{a}-{b}"]
    return signals


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
        heads: As :func:`~strati.reassembly.transformer.similarity.head_signals` gives them.
        norms: Role to the weights of the norm before each piece, where known.
    """
    flat = {
        role: similarity.features(role, stack, (norms or {}).get(role)) for role, stack in stacked.items()
    }
    kinds = unit_kinds(blueprint)
    similar = Similarity(kinds, similarity.similarities(flat), blueprint.blocks)
    sizes = {role: similarity.sizes(role, stack) for role, stack in stacked.items()}
    more: dict[tuple[str, str], dict[str, NDArray[np.float64]]] = {}
    names = list(kinds)
    for i, kind_a in enumerate(names):
        for kind_b in names[i + 1 :]:
            signals = {
                f"norms {'-'.join(sorted((a, b)))}": similarity.correlation(sizes[a], sizes[b])
                for a in kinds[kind_a]
                for b in kinds[kind_b]
            }
            for a in kinds[kind_a]:
                signals |= {f"heads {a}-{b}": heads[f"{a}-{b}"] for b in kinds[kind_b] if f"{a}-{b}" in heads}
            more[kind_a, kind_b] = signals
    return similar, more


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
