"""Which input projection belongs to which output projection, judged by the weights alone.

Training leaves traces that tie a block's two matrices together: a negative diagonal of ``W_out W_in``
(dropped-neural-net, section 3), row norms of ``W_in`` that follow column norms of ``W_out`` neuron by neuron,
similar Gram matrices over neurons (both conserved up to a constant by gradient flow), and neurons that matter to the
last layer reading alike (the first steps of training add to ``W_in`` what ``W_last W_out`` asks for). With data the last
of these is far sharper (:func:`aligned`). None is universal, so the separation of matched from unmatched scores
always goes with the answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.reassembly.assignment import assign, match
from strati.reassembly.combined import combine

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.reassembly.passes import Ints, Parts


class Score(StrEnum):
    """How well an input and an output projection fit."""

    DIAGONAL = "diagonal"
    COSINE = "cosine"
    GRAM = "gram"
    NORMS = "norms"
    READOUT = "readout"
    COMBINED = "combined"


@dataclass(frozen=True)
class Pairing:
    """Pairs and how far they can be trusted.

    Attributes:
        score: The score's name.
        matrix: Score of every input projection (rows) with every output projection (columns).
        ins: Input projections, one per block, in no particular order.
        outs: The output projection of each.
        matched_min: The least score of a pair.
        unmatched_max: The greatest score of two pieces that are not a pair.
    """

    score: str
    matrix: NDArray[np.float64]
    ins: Ints
    outs: Ints
    matched_min: float
    unmatched_max: float

    @property
    def separated(self) -> bool:
        """Whether every pair scores higher than everything that is not a pair."""
        return self.matched_min > self.unmatched_max


Rows = tuple["NDArray[Any]", "NDArray[Any]"]
"""Inputs and recorded outputs."""


def pair(parts: Parts, score: Score = Score.DIAGONAL, rows: Rows | None = None) -> Pairing:
    r"""Pair the pieces by one score and the Hungarian algorithm.

    ``diagonal`` is :math:`|tr(W_{out} W_{in})| / \|W_{out} W_{in}\|_F` (paper, equation 4). ``combined`` uses data too,
    if there are ``rows`` of them.

    Examples:
        >>> from strati.reassembly.passes import Parts
        >>> from strati.reassembly.activations import activation
        >>> A = np.random.default_rng(0).standard_normal((3, 8, 4)).astype(np.float32)
        >>> parts = Parts(A, A[..., 0], -A.transpose(0, 2, 1)[[2, 0, 1]], A[:, 0], A[0, :1], A[0, 0, :1],
        ...               activation("relu"), 3)
        >>> found = pair(parts)
        >>> found.outs.tolist(), found.separated
        ([1, 2, 0], True)
    """
    return pairing_of(parts, score, scores(parts, score, rows))


def pairing_of(parts: Parts, name: str, matrix: NDArray[np.float64]) -> Pairing:
    """The best pairs of a score matrix, with their separation."""
    if parts.shared:
        ins, outs = match(matrix)
    else:
        ins, outs = np.arange(parts.blocks), assign(matrix)
    return with_pairs(parts, name, matrix, ins, outs)


def with_pairs(parts: Parts, name: str, matrix: NDArray[np.float64], ins: Ints, outs: Ints) -> Pairing:
    """The separation that given pairs have in a score matrix."""
    matched = matrix[ins, outs]
    rest = np.ones(matrix.shape, dtype=bool)
    rest[ins, outs] = False
    for same_in, same_out in twins(parts, ins, outs):  # a block used twice: either copy is the right one
        rest[same_in, same_out] = False
    if parts.shared:  # a piece with itself is no pair, and a pair the other way round is the same two pieces
        np.fill_diagonal(rest, False)
        rest[outs, ins] = False
    return Pairing(
        str(name),
        matrix,
        ins,
        outs,
        float(matched.min()),
        float(matrix[rest].max()) if rest.any() else float("-inf"),
    )


def twins(parts: Parts, ins: Ints, outs: Ints) -> list[tuple[int, int]]:
    """Pairs that are as good as the given ones, because a piece of theirs is there more than once."""
    first = _copies(parts.A, parts.a)
    second = first if parts.shared else _copies(parts.B, parts.b)
    if len(np.unique(first)) == len(first) and len(np.unique(second)) == len(second):
        return []
    kinds = {(int(first[i]), int(second[j])) for i, j in zip(ins, outs, strict=True)}
    return [
        (i, j) for i, j in np.ndindex(len(first), len(second)) if (int(first[i]), int(second[j])) in kinds
    ]


def _copies(weights: NDArray[Any], biases: NDArray[Any]) -> NDArray[np.intp]:
    """For each piece, the first one that equals it."""
    seen: dict[bytes, int] = {}
    keys = (w.tobytes() + b.tobytes() for w, b in zip(weights, biases, strict=True))
    return np.array([seen.setdefault(key, number) for number, key in enumerate(keys)])


def scores(parts: Parts, score: Score, rows: Rows | None = None) -> NDArray[np.float64]:
    """The score of every input projection with every output projection."""
    if score is Score.DIAGONAL:
        return np.abs(_dominance(parts))
    if score is Score.COSINE:
        return np.abs(_cosines(parts))
    if score is Score.GRAM:
        return _gram(parts)
    if score is Score.NORMS:
        return _norms(parts)
    if score is Score.READOUT:
        return np.asarray(np.square(_reads(parts)).sum(axis=2))
    signals = [-_dominance(parts), _gram(parts), scores(parts, Score.READOUT), _norms(parts)]
    if rows is None:
        return combine(signals, _reads(parts), shared=parts.shared)
    evidence = combine([*signals, aligned(parts, *rows)], _reads(parts), shared=parts.shared)
    if parts.shared:
        role = _reads_more_than_writes(parts, *rows)
        evidence = evidence + _ROLE * (role[:, None] - role[None, :])
    return evidence


_ROLE = 1.0
"""Nats for each standard deviation by which a piece looks more like an input than like an output projection."""


def aligned(parts: Parts, x: NDArray[Any], y: NDArray[Any]) -> NDArray[np.float64]:
    r"""How far what a pair would add to the outputs goes along with the recorded outputs.

    Training makes every block add something of what was asked for: with the hidden units :math:`H_i` of input projection
    ``i`` on the raw inputs, :math:`M_i = H_i^T Y` is how each unit goes with the outputs and :math:`N_j = (W_{last}
    W_{out}^j)^T` what each unit would add to them; the score is the cosine of the two.
    """
    moved, added = unit_responses(parts, x, y)
    m = len(moved)
    moved, added = moved.reshape(m, -1), added.reshape(len(added), -1)
    moved = moved / _safe(np.linalg.norm(moved, axis=1, keepdims=True))
    added = added / _safe(np.linalg.norm(added, axis=1, keepdims=True))
    return np.asarray(moved @ added.T)


def unit_responses(
    parts: Parts, x: NDArray[Any], y: NDArray[Any]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """How each hidden unit goes with the outputs (pieces, units, outputs), and what it would add to them."""
    wanted = (y - y.mean(axis=0)).astype(np.float64)
    wanted /= _safe(np.linalg.norm(wanted, axis=0))
    read = parts.enter(x)
    moved = np.stack(
        [
            parts.act.value(read @ A.T + a).astype(np.float64).T @ wanted
            for A, a in zip(parts.A, parts.a, strict=True)
        ]
    )
    return moved, np.einsum("od,mdh->mho", parts.L, parts.B).astype(np.float64)


def _reads_more_than_writes(parts: Parts, x: NDArray[Any], y: NDArray[Any]) -> NDArray[np.float64]:
    """For pieces of unknown role: what goes with the outputs as an input projection against what it would add to them."""
    moved, added = unit_responses(parts, x, y)
    sizes = [np.linalg.norm(pieces.reshape(len(pieces), -1), axis=1) for pieces in (parts.A, parts.B)]
    ratio = np.log(_safe(np.linalg.norm(moved, axis=(1, 2)) / _safe(sizes[0])))
    ratio = (ratio - ratio.mean()) / _safe(ratio.std())
    other = np.log(_safe(np.linalg.norm(added, axis=(1, 2)) / _safe(sizes[1])))
    both = ratio - (other - other.mean()) / _safe(other.std())
    return np.asarray(both / _safe(both.std()))


def _dominance(parts: Parts) -> NDArray[np.float64]:
    """Signed trace of each product over its Frobenius norm, without forming a product.

    ``||B A||_F^2 = <A A^T, B^T B>``, so all norms are one product of Gram matrices laid flat.
    """
    m = len(parts.A)
    trace = parts.A.reshape(m, -1).astype(np.float64) @ _flat(parts.B.transpose(0, 2, 1)).T
    grams = parts.A @ parts.A.transpose(0, 2, 1), parts.B.transpose(0, 2, 1) @ parts.B
    squared = (grams[0].reshape(m, -1) @ grams[1].reshape(m, -1).T).astype(np.float64)
    return np.asarray(trace / np.sqrt(np.maximum(squared, np.finfo(np.float64).tiny)))


def _cosines(parts: Parts) -> NDArray[np.float64]:
    """Mean cosine of a neuron's input weights with its output weights."""
    A = parts.A / _safe(np.linalg.norm(parts.A, axis=2, keepdims=True))
    B = parts.B / _safe(np.linalg.norm(parts.B, axis=1, keepdims=True))
    return np.asarray(_flat(A) @ _flat(B.transpose(0, 2, 1)).T / A.shape[1])


def _gram(parts: Parts) -> NDArray[np.float64]:
    """Correlation of the Gram matrices over neurons, ``W_in W_in^T`` and ``W_out^T W_out``, off the diagonal."""
    off = ~np.eye(parts.A.shape[1], dtype=bool)
    if off.sum() < 2:
        return np.zeros((len(parts.A), len(parts.B)))
    return _correlation(
        (parts.A @ parts.A.transpose(0, 2, 1))[:, off], (parts.B.transpose(0, 2, 1) @ parts.B)[:, off]
    )


def _norms(parts: Parts) -> NDArray[np.float64]:
    """Correlation over neurons of squared norms of input weights (bias included) and of output weights."""
    inner = np.square(parts.A).sum(axis=2) + np.square(parts.a)
    return _correlation(inner, np.square(parts.B).sum(axis=1))


def _reads(parts: Parts) -> NDArray[np.float64]:
    """``W_last W_out W_in`` over the norms of ``W_last W_out`` and of ``W_in``: (inputs, outputs, outputs * width).

    What the network would read from its inputs through two pieces, were the activation the identity.
    """
    seen = np.einsum("od,mdh->moh", parts.L, parts.B).astype(np.float64)
    seen /= _safe(np.linalg.norm(seen, axis=(1, 2), keepdims=True))
    inner = parts.A.astype(np.float64)
    inner /= _safe(np.linalg.norm(inner, axis=(1, 2), keepdims=True))
    m, h, d = inner.shape
    reads = seen.reshape(-1, h) @ inner.transpose(1, 0, 2).reshape(h, m * d)
    return np.asarray(reads.reshape(m, -1, m, d).transpose(2, 0, 1, 3).reshape(m, m, -1))


def _correlation(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.float64]:
    a = a - a.mean(axis=1, keepdims=True)
    b = b - b.mean(axis=1, keepdims=True)
    a = a / _safe(np.linalg.norm(a, axis=1, keepdims=True))
    b = b / _safe(np.linalg.norm(b, axis=1, keepdims=True))
    return np.asarray(a.astype(np.float64) @ b.T.astype(np.float64))


def _flat(stacked: NDArray[Any]) -> NDArray[np.float64]:
    return np.ascontiguousarray(stacked).reshape(len(stacked), -1).astype(np.float64)


def _safe(norm: NDArray[Any]) -> NDArray[Any]:
    return np.asarray(np.maximum(norm, np.finfo(norm.dtype).tiny))
