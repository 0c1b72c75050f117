"""Signals of which matrices belong together, and the evidence of all signals joined, in nats.

Row ``u`` of one matrix and row (or column) ``u`` of another belong to one unit of the block, and training leaves
traces of that: their directions on the stream, their norms and the angles between units follow each other
(:func:`signals`). What reads the stream has the Gram matrix ``W^T W``, what writes it ``W W^T`` (:func:`features`);
those of blocks near each other are alike.

Standardised, a signal's scores of strangers lie around 0 and those of true pairs around a shift. The shifts and the
covariance of the signals are estimated from the network at hand by expectation-maximisation over permutations; a prior
for the shifts, the mean over other networks (:func:`default_prior`), keeps noise from being believed and decides where
there are few blocks. The best single score is then the linear discriminant ``mu' S^-1 z`` (:func:`evidence`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from strati.core.assignment import assign, balanced
from strati.reassembly.transformer.blueprint import unit_kinds
from strati.reassembly.transformer.pieces import canonical
from strati.reassembly.transformer.timeline import Expected, Similarity

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.reassembly.transformer.blueprint import Blueprint
    from strati.reassembly.transformer.pieces import TransformerPieces

    Floats = NDArray[np.float32]
    Matrix = NDArray[np.float64]
    Ints = NDArray[np.intp]


def stacks(pieces: TransformerPieces, numbers: Mapping[str, Sequence[int]]) -> dict[str, Floats]:
    """Matrices outputs by inputs, (pieces, rows, columns), by role; fused pieces cut into their roles.

    Args:
        pieces: All of them.
        numbers: Slot role to piece numbers, in the order of the stack.
    """
    by_role: dict[str, list[Floats]] = {}
    for slot in pieces.blueprint.block:
        if slot.matrix:
            for number in numbers[slot.role]:
                for role, part in canonical(pieces.arrays[number], slot, pieces.blueprint).items():
                    by_role.setdefault(role, []).append(np.asarray(part, dtype=np.float32))
    return {role: np.stack(parts) for role, parts in by_role.items()}


def end_tables(pieces: TransformerPieces, global_numbers: Mapping[str, int]) -> dict[str, NDArray[Any]]:
    """What writes the stream first and reads it last, as rows by width, where the network has such pieces."""
    width = pieces.blueprint.width
    tables: dict[str, NDArray[Any]] = {}
    for name, number in global_numbers.items():
        values = pieces.arrays[number]
        lower = name.lower()
        if name == "embedding":
            tables["embedding"] = values
        elif name == "head":
            tables["head"] = values
        elif "patch" in lower and values.ndim == 4:
            tables.setdefault("embedding", values.reshape(len(values), -1).T)
        elif "pos" in lower and values.ndim >= 2 and values.shape[-1] == width:
            tables.setdefault("embedding", values.reshape(-1, width))
    if pieces.blueprint.tied and "embedding" in tables:
        tables.setdefault("head", tables["embedding"])
    return {
        end: np.asarray(t, np.float32)
        for end, t in tables.items()
        if t.ndim == 2 and t.shape[1] == width and len(t) > 1
    }


PAIRS = (("q", "k"), ("v", "out"), ("gate", "up"), ("up", "down"), ("gate", "down"))
"""Roles that share hidden units."""

SIGNALS = ("cosine", "squared-cosine", "norms", "angles")

_EVEN = 1e-3
"""Spread of the logarithms of sizes below which these are all one."""

_UNITS = 256
"""So many units at most for the angles between them."""


def signals(
    stacks: Mapping[str, Floats], a: str, b: str, *, heads: int, groups: int, rotary: bool
) -> dict[str, Matrix]:
    """Scores of every piece of role ``a`` with every piece of role ``b``, by signal (one more: :func:`head_signals`).

    Args:
        stacks: Role to pieces, outputs by inputs: (pieces, rows, columns).
        a: A role of :data:`PAIRS`.
        b: The other.
        heads: Attention heads.
        groups: Key-value heads.
        rotary: Rows of q and k may be turned within frequency pairs: compare these, not single rows.
    """
    first, second = aligned(stacks[a], a, heads, groups), aligned(stacks[b], b, heads, groups)
    paired = rotary and a == "q" and second.shape[1] // heads % 2 == 0
    sizes = [_sizes(side, heads if paired else 0) for side in (first, second)]
    unit = [side / size[:, :, None] for side, size in zip((first, second), sizes, strict=True)]
    cosine, squared = _cosines(unit[0], unit[1], heads if paired else 0)
    logs = [levelled(np.log(size.astype(np.float64))) for size in sizes]
    return {
        "cosine": cosine,
        "squared-cosine": squared,
        "norms": correlation(*(log - log.mean(axis=0) if len(log) > 2 else log for log in logs)),
        "angles": correlation(*(_angles(side) for side in unit)),
    }


def levelled(logs: Matrix) -> Matrix:
    """Logarithms of sizes, or nought where all sizes of a piece are one: rounding is no signal."""
    return np.where(logs.std(axis=-1, keepdims=True) > _EVEN, logs, 0.0)


HEAD_PAIRS = (("q", "k"), ("v", "out"), ("q", "v"), ("k", "v"), ("q", "out"), ("k", "out"))
"""Roles of one attention, which share its heads."""

_DIRECTIONS = 384
"""So many directions of the stream at most where heads are compared."""


def head_signals(stacks: Mapping[str, Floats], *, heads: int, groups: int) -> dict[str, Matrix]:
    """How much more the heads of one piece overlap with the same heads of another than with all of them.

    The share of ``sum_h tr(G_h G'_h)`` in ``tr(G G')``, with ``G_h`` the Gram matrix on the stream of head h's
    rows as unit
    vectors. A head reads with k what it reads with v, and so on: q with k, v and out of one attention fit head by head.
    """
    if heads < 2 or not {"q", "k", "v", "out"} <= set(stacks):
        return {}
    grams = {role: _head_grams(stacks[role], role, heads, groups) for role in ("q", "k", "v", "out")}
    return {f"{a}-{b}": _overlap(grams[a], grams[b]) for a, b in HEAD_PAIRS}


def _head_grams(stack: Floats, role: str, heads: int, groups: int) -> list[Floats]:
    """For each head the Gram matrices on the stream of its rows as unit vectors, pieces by entries."""
    rows = aligned(stack, role, heads, groups)
    step = np.linspace(0, rows.shape[2] - 1, min(_DIRECTIONS, rows.shape[2])).astype(np.intp)
    rows = rows[:, :, step]
    unit = rows / np.maximum(np.linalg.norm(rows, axis=2, keepdims=True), np.finfo(np.float32).tiny)
    cut = unit.reshape(len(unit), heads, -1, unit.shape[2])
    return [np.matmul(cut[:, h].transpose(0, 2, 1), cut[:, h]).reshape(len(cut), -1) for h in range(heads)]


def _overlap(a: list[Floats], b: list[Floats]) -> Matrix:
    same = sum((np.asarray(x @ y.T, dtype=np.float64) for x, y in zip(a, b, strict=True)))
    total = np.sum(a, axis=0) @ np.sum(b, axis=0).T
    return np.asarray(same / np.maximum(total, np.finfo(np.float32).tiny), dtype=np.float64)


def aligned(stack: Floats, role: str, heads: int, groups: int) -> Floats:
    """Pieces as (pieces, units, width): a row per hidden unit, keys and values repeated for each query head."""
    rows = stack.transpose(0, 2, 1) if role in ("out", "down") else stack
    if role in ("k", "v") and heads != groups:
        cut = rows.reshape(len(rows), groups, -1, rows.shape[2])
        rows = np.repeat(cut, heads // groups, axis=1).reshape(len(rows), -1, rows.shape[2])
    return np.ascontiguousarray(rows)


def _sizes(side: Floats, heads: int) -> Floats:
    """Norms of rows, or of frequency pairs (rows half a head apart) given to both rows."""
    size = np.linalg.norm(side, axis=2)
    if heads:
        cut = size.reshape(len(size), heads, 2, -1)
        both = np.sqrt(np.square(cut).mean(axis=2, keepdims=True))
        size = np.broadcast_to(both, cut.shape).reshape(size.shape)
    return np.asarray(np.maximum(size, np.finfo(np.float32).tiny))


def _cosines(a: Floats, b: Floats, heads: int) -> tuple[Matrix, Matrix]:
    """Mean cosine and mean squared cosine over units; over both rows of a frequency pair with both of the other."""
    by_unit = [np.ascontiguousarray(side.transpose(1, 0, 2)) for side in (a, b)]
    every = np.matmul(by_unit[0], by_unit[1].transpose(0, 2, 1)).astype(np.float64)
    cosine, squared = every.mean(axis=0), np.square(every).mean(axis=0)
    if heads:
        units, wide = len(every), len(every) // heads
        partner = np.arange(units).reshape(heads, 2, wide // 2)[:, ::-1].reshape(-1)
        across = np.matmul(by_unit[0], by_unit[1][partner].transpose(0, 2, 1)).astype(np.float64)
        squared = squared + np.square(across).mean(axis=0)
    return cosine, squared


def _angles(unit: Floats) -> Floats:
    sample = np.linspace(0, unit.shape[1] - 1, min(_UNITS, unit.shape[1])).astype(np.intp)
    part = unit[:, sample]
    upper = np.triu_indices(len(sample), 1)
    return np.stack([(side @ side.T)[upper] for side in part])


def correlation(a: NDArray[np.floating], b: NDArray[np.floating]) -> Matrix:
    """Of every row of one with every row of the other."""
    a = a - a.mean(axis=1, keepdims=True)
    b = b - b.mean(axis=1, keepdims=True)
    tiny = np.finfo(np.float32).tiny
    a = a / np.maximum(np.linalg.norm(a, axis=1, keepdims=True), tiny)
    b = b / np.maximum(np.linalg.norm(b, axis=1, keepdims=True), tiny)
    return np.asarray(a @ b.T, dtype=np.float64)


READERS = ("q", "k", "v", "gate", "up")
WRITERS = ("out", "down")

_MOST = 640
"""So many directions of the stream at most: the Gram of a part of them tells the same."""


def directions(width: int) -> NDArray[np.intp]:
    """The directions of the stream that are looked at: all, or an even part of a wide one."""
    return np.arange(width) if width <= _MOST else np.linspace(0, width - 1, _MOST).astype(np.intp)


def features(role: str, stack: Floats, norms: NDArray[Any] | None = None) -> Floats:
    """The Gram matrices of a role's pieces as unit vectors, without their mean.

    Args:
        role: ``q k v out gate up down``.
        stack: Pieces, outputs by inputs: (pieces, rows, columns).
        norms: The weights of the norm before each piece (pieces, width), where known: normalise_pieces into what reads.
    """
    reads = role in READERS
    axes = directions(stack.shape[2 if reads else 1])
    sides = stack[:, :, axes] if reads else stack[:, axes].transpose(0, 2, 1)
    if norms is not None and reads:
        sides = sides * norms[:, None, axes].astype(np.float32)
    flat = flat_grams(sides)
    if len(flat) > 1:
        flat = flat - flat.mean(axis=0)
        flat /= _safe(np.linalg.norm(flat, axis=1, keepdims=True))
    return flat


def flat_grams(sides: Floats) -> Floats:
    """Upper triangles of ``X^T X`` for each matrix X (rows by directions), as unit vectors."""
    upper = np.triu_indices(sides.shape[2], 1)
    flat = np.empty((len(sides), len(upper[0])), np.float32)
    for number, side in enumerate(sides):
        flat[number] = (side.T @ side)[upper]
    flat /= _safe(np.linalg.norm(flat, axis=1, keepdims=True))
    return flat


def similarities(by_role: Mapping[str, Floats]) -> dict[tuple[str, str], Matrix]:
    """Similarity of every piece of one role with every piece of another, for all pairs of roles."""
    roles = list(by_role)
    made: dict[tuple[str, str], Matrix] = {}
    for k, a in enumerate(roles):
        for b in roles[k:]:
            both = np.asarray(by_role[a] @ by_role[b].T, dtype=np.float64)
            made[a, b], made[b, a] = both, both.T
    return made


def stream_sizes(role: str, stack: Floats) -> Matrix:
    """Logarithms of each piece's norms along the directions of the stream, without the mean over the pieces."""
    norms = np.linalg.norm(stack, axis=1 if role in READERS else 2)
    logs = np.log(np.maximum(norms, np.finfo(np.float32).tiny)).astype(np.float64)
    return np.asarray(logs - logs.mean(axis=0)) if len(logs) > 2 else logs


def ends_likeness(by_role: Mapping[str, Floats], table: NDArray[Any]) -> dict[str, Matrix]:
    """Similarity of every piece with an embedding or a head (rows by width), role by role."""
    axes = directions(table.shape[1])
    rows = np.asarray(table[:: max(1, len(table) // 4096), :][:, axes], dtype=np.float32)
    reference = flat_grams((rows - rows.mean(axis=0))[None])[0]
    return {role: np.asarray(flat @ reference, dtype=np.float64) for role, flat in by_role.items()}


def _safe(norm: Floats) -> Floats:
    return np.maximum(norm, np.finfo(np.float32).tiny)


def unit_signals(
    stacked: Mapping[str, NDArray[np.float32]],
    a: str,
    b: str,
    blueprint: Blueprint,
    heads: Mapping[str, NDArray[np.float64]],
) -> dict[str, NDArray[np.float64]]:
    """All that speaks for two roles' pieces sharing units, in the orders of their stacks."""
    by_name = signals(stacked, a, b, heads=blueprint.heads, groups=blueprint.groups, rotary=blueprint.rotary)
    if f"{a}-{b}" in heads:
        by_name["heads"] = heads[f"{a}-{b}"]
    return by_name


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
        heads: As :func:`~strati.reassembly.transformer.evidence.head_signals` gives them.
        norms: Role to the weights of the norm before each piece, where known.
    """
    flat = {role: features(role, stack, (norms or {}).get(role)) for role, stack in stacked.items()}
    kinds = unit_kinds(blueprint)
    similar = Similarity(kinds, similarities(flat), blueprint.blocks)
    sizes = {role: stream_sizes(role, stack) for role, stack in stacked.items()}
    more: dict[tuple[str, str], dict[str, NDArray[np.float64]]] = {}
    names = list(kinds)
    for i, kind_a in enumerate(names):
        for kind_b in names[i + 1 :]:
            signals = {
                f"norms {'-'.join(sorted((a, b)))}": correlation(sizes[a], sizes[b])
                for a in kinds[kind_a]
                for b in kinds[kind_b]
            }
            for a in kinds[kind_a]:
                signals |= {f"heads {a}-{b}": heads[f"{a}-{b}"] for b in kinds[kind_b] if f"{a}-{b}" in heads}
            more[kind_a, kind_b] = signals
    return similar, more


K = TypeVar("K")

_RIDGE = 0.1
_ROUNDS = 25
_SHUFFLES = 10
_CHANCE = 4.0
_LEAST = 2.5
"""Added to variances, as signals are not Gaussian; rounds of estimation; shuffled copies to compare with, and their
standard deviations that count as chance; standard deviations below the mean at most."""


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
