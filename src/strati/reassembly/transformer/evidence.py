"""Several signals of who belongs to whom, joined: the evidence of a pair in nats.

Standardised, a signal's scores of strangers lie around 0 and those of true pairs around a shift. The shifts and the
covariance of the signals are estimated from the network at hand by expectation-maximisation over permutations;
a prior for
the shifts, the mean over other networks (:func:`default_prior`), keeps noise from
being believed
and decides where there are few blocks. The best single score is then the linear discriminant ``mu' S^-1 z``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from strati.core.assignment import assign, balanced

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Matrix = NDArray[np.float64]
    Ints = NDArray[np.intp]

K = TypeVar("K")

_RIDGE = 0.1
_ROUNDS = 25
_SHUFFLES = 10
_CHANCE = 4.0
_LEAST = 2.5
"""Added to variances, as signals are not Gaussian; rounds of estimation; shuffled copies to compare with, and their
standard deviations that count as chance; standard deviations below the mean at most."""


@dataclass(frozen=True)
class Expected:
    """What a signal is worth on other networks: mean and spread of the shift of true pairs.

    In units of ``sqrt(count - 1)`` standard deviations, which is the most that ``count`` pairs can show.
    """

    mean: float
    spread: float


def standard(table: Matrix) -> Matrix:
    """Scores free of what a row or column has with everyone: means taken out, spreads evened, unit variance.

    A piece whose scores are all small stands out in its own row no less than others in theirs. Scores far
    below the mean
    say no more than scores below it: what speaks against a pair is bounded.
    """
    z = table - table.mean(axis=1, keepdims=True) - table.mean(axis=0, keepdims=True) + table.mean()
    if len(z) > 2:
        scale = np.sqrt(z.std(axis=1, keepdims=True) * z.std(axis=0, keepdims=True))
        z = z / np.maximum(scale, np.finfo(np.float64).tiny)
    spread = float(z.std())
    return np.maximum(z / spread, -_LEAST) if spread > 0 else np.zeros_like(z)


def checked(signals: Mapping[K, Matrix], prior: Mapping[K, Expected], rng: np.random.Generator) -> Matrix:
    """The evidence as far as it exceeds what the same scores show when they are shuffled.

    Many signals of few pieces explain themselves by chance: the share of the explanation that shuffled scores
    do not reach
    by four standard deviations scales the evidence.
    """
    nats, explained = _explained(signals, prior)
    if len(nats) == 1:
        return nats
    chance = []
    for _ in range(_SHUFFLES):
        mixed = {
            name: rng.permutation(table.reshape(-1)).reshape(table.shape) for name, table in signals.items()
        }
        chance.append(_explained(mixed, prior)[1])
    middle, spread = float(np.mean(chance)), float(np.std(chance))
    beyond = explained - middle - _CHANCE * spread
    return nats * max(0.0, beyond) / max(explained, 1e-9)


def evidence(signals: Mapping[K, Matrix], prior: Mapping[K, Expected]) -> Matrix:
    """The evidence, in nats up to a constant, that row and column are a pair.

    The estimation starts from the prior and from each signal alone; the start that explains the scores best
    wins, so that
    all signals together are not worse than one that is strong.

    Args:
        signals: Name to scores, rows by columns (square).
        prior: Name to what is expected of the signal.
    """
    return _explained(signals, prior)[0]


def _explained(signals: Mapping[K, Matrix], prior: Mapping[K, Expected]) -> tuple[Matrix, float]:
    """The evidence, and how well it explains the scores."""
    names = list(signals)
    count = len(signals[names[0]])
    if count == 1:
        return np.zeros((1, 1)), 0.0
    z = np.stack([standard(signals[name]).reshape(-1) for name in names])
    most = np.sqrt(count - 1)
    middle = np.array([prior[name].mean if name in prior else 0.0 for name in names]) * most
    spread = np.array([prior[name].spread if name in prior else 1.0 for name in names]) * most
    starts = [middle / (1 + spread)]
    for number, expected in enumerate(middle):
        alone = np.zeros(len(names))
        alone[number] = 2.0 if expected >= 0 else -2.0
        starts.append(alone)
    fits = [_estimate(z, count, weights, middle, spread) for weights in starts]
    return max(fits, key=lambda fit: fit[1])


def _estimate(z: Matrix, count: int, weights: Matrix, middle: Matrix, spread: Matrix) -> tuple[Matrix, float]:
    """Expectation-maximisation from given weights: the evidence, and how well it explains the scores."""
    nats = (weights @ z).reshape(count, count)
    objective = -np.inf
    for _ in range(_ROUNDS):
        scaled = np.exp(np.clip(nats - nats.max(axis=1, keepdims=True), -60, 0)) + 1e-12
        belief = balanced(scaled, 40)
        pair = belief.reshape(-1)
        raw = z @ pair / count
        near, apart = z - raw[:, None], z - (z @ (1 - pair) / (1 - pair).sum())[:, None]
        around = ((apart * (1 - pair)) @ apart.T + (near * pair) @ near.T) / len(pair) + _RIDGE * np.eye(
            len(z)
        )
        pull = np.diagonal(around) / np.square(spread)
        shift = (count * raw + pull * middle) / (count + pull)
        weights = np.linalg.solve(around, shift)
        nats = (weights @ z - 0.5 * float(shift @ weights)).reshape(count, count)
        sure = belief[belief > 1e-12]
        before, objective = objective, float((belief * nats).sum() - (sure * np.log(sure)).sum())
        objective -= 0.5 * float(np.square((shift - middle) / spread).sum())
        if abs(objective - before) < 1e-6:
            break
    return nats, objective


def chain(tables: Mapping[tuple[int, int], Matrix], count: int, parts: int) -> list[Ints]:
    """Groups of one piece from each of several roles, of greatest total evidence.

    Args:
        tables: ``(a, b)`` with ``a < b``: evidence that piece i of role a and piece j of role b belong together.
        count: Pieces of each role.
        parts: Number of roles.

    Returns:
        For each role the piece of each group; groups are numbered by the pieces of role 0.
    """
    best: list[Ints] = []
    most = -np.inf
    for start in range(parts):
        groups = _grown(tables, count, parts, start)
        total = _total(tables, groups)
        if total > most + 1e-9:
            best, most = groups, total
    order = np.argsort(best[0])
    return [pieces[order] for pieces in best]


def _grown(tables: Mapping[tuple[int, int], Matrix], count: int, parts: int, start: int) -> list[Ints]:
    groups: list[Ints | None] = [None] * parts
    groups[start] = np.arange(count)
    order = [start, *(k for k in range(parts) if k != start)]
    total = -np.inf
    for _ in range(10):
        for role in order[1:] if total == -np.inf else order:
            score = np.zeros((count, count))  # group by piece
            for other, pieces in enumerate(groups):
                if other != role and pieces is not None and (min(role, other), max(role, other)) in tables:
                    table = tables[min(role, other), max(role, other)]
                    score += table[pieces] if other < role else table.T[pieces]
            groups[role] = assign(score)
        done = [pieces for pieces in groups if pieces is not None]
        now = _total(tables, done)
        if now <= total + 1e-9:
            break
        total = now
    return [pieces for pieces in groups if pieces is not None]


def _total(tables: Mapping[tuple[int, int], Matrix], groups: Sequence[Ints]) -> float:
    return float(sum(table[groups[a], groups[b]].sum() for (a, b), table in tables.items()))


def margins(table: Matrix, rows: Ints, columns: Ints) -> Matrix:
    """How much evidence each pair would lose by the best exchange of partners with another pair."""
    held = table[rows, columns]
    if len(held) < 2:
        return np.full(len(held), np.inf)
    other = table[np.ix_(rows, columns)]
    loss = held[:, None] + held[None, :] - other - other.T
    np.fill_diagonal(loss, np.inf)
    return np.asarray(loss.min(axis=1))


@dataclass(frozen=True)
class Prior:
    """What other networks showed: the mean and the spread of each signal.

    Attributes:
        shifts: Pair of roles that share units, to signal, to the shift of true pairs.
        same: Signal that units are of one block, to its shift.
        signs: Signs of direction, the right way round.
        coefficients: Pair of roles, or of features of vectors, to its coefficients.
    """

    shifts: Mapping[str, Mapping[str, Expected]]
    same: Mapping[str, Expected]
    signs: Mapping[str, Expected]
    coefficients: Mapping[tuple[str, str], tuple[Expected, ...]]


@cache
def default_prior() -> Prior:
    """The prior over 29 networks whose answer is known, written by ``strati reproduce dropped-transformer``."""
    text = resources.files("strati.reassembly.transformer").joinpath("prior.json").read_text("utf-8")
    tables = json.loads(text)

    def expected(table: Mapping[str, Sequence[float]]) -> dict[str, Expected]:
        return {name: Expected(*numbers) for name, numbers in table.items()}

    return Prior(
        {pair: expected(table) for pair, table in tables["shifts"].items()},
        expected(tables["same"]),
        expected(tables["signs"]),
        {(a, b): tuple(Expected(*c) for c in numbers) for a, b, *numbers in tables["coefficients"]},
    )
