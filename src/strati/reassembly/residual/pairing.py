"""Which input projection belongs to which output projection, judged by the weights alone.

Training leaves traces that tie a block's two matrices together: a negative diagonal of ``W_out W_in``
(dropped-neural-net, section 3), row norms of ``W_in`` that follow column norms of ``W_out`` neuron by neuron, similar
Gram matrices over neurons, and neurons that matter to the last layer reading alike. With data the last of these is
far sharper (:func:`aligned`). None is universal, so the separation of matched from unmatched scores always goes with
the answer.

:func:`combine` joins the signals: standardised scores of strangers are Gaussian around 0, those of pairs around a
shift ``mu``, with one covariance ``S``; the best score is the linear discriminant ``mu' S^-1 z``, estimated by
expectation-maximisation over permutations with a weak prior for ``mu``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from strati.core.assignment import assign, match, sinkhorn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from strati.reassembly.residual.network import Ints, ResidualWeights

    Matrix = NDArray[np.float64]

REGIMES = ((1.3, 1.0, 2.2, 0.4, 2.2), (1.3, 1.8, 1.8, 1.8, 2.2), (-1.3, 1.8, 1.6, 2.0, 2.2))
"""Shifts to be expected of dominance (negative diagonal), Gram, read-out, norms and, with data, alignment: trained
briefly, trained long, and long with the diagonal turned positive. Rough means over trained networks other than those of
the study and tests."""

_ENOUGH = 8
"""Fewer rows than this fit any shift: the prior's is taken then, so that chance does not look like separation."""

_TEMPLATE = 1.5
_PSEUDO = 8.0
_RIDGE = 0.2
_ALONE = 3.0
"""The expected shift of the template; the prior's weight in pairs; added to variances, as signals are not Gaussian;
nats for each standard deviation of a signal that is believed alone at first."""


@dataclass(frozen=True)
class _Fit:
    """A believed assignment with what it implies."""

    belief: Matrix
    evidence: Matrix
    objective: float


def combine(signals: Sequence[Matrix], reads: Matrix, *, shared: bool) -> Matrix:
    """The evidence, in nats, that row and column are a pair.

    Args:
        signals: Dominance (of a negative diagonal), Gram, read-out, norms and, with data, alignment: each rows x
            columns.
        reads: What each pair reads out of its inputs, rows x columns x numbers; true pairs share a direction.
        shared: Rows and columns are one pool, of which each member belongs to one pair.
    """
    z = np.stack([standard(signal, shared).reshape(-1) for signal in signals])
    n = len(signals[0])
    regimes = [np.array(regime[: len(z)]) for regime in REGIMES]
    if n < _ENOUGH:
        return (_weights(z, regimes[0]) @ z).reshape(n, n)
    centred = _centred(reads, shared)
    best = max(
        (_fit(z, centred, regime, _weights(z, regime) @ z, shared) for regime in regimes),
        key=lambda fit: fit.objective,
    )
    # one signal may tell all where a mixture that believes the others from the start goes astray
    for signal in z:
        single = _fit(z, centred, regimes[1], _ALONE * signal, shared)
        best = single if single.objective > best.objective else best
    return best.evidence


def standard(matrix: Matrix, shared: bool) -> Matrix:
    """Row and column means taken out (a large piece scores high with everyone), then unit variance."""
    centred = _centred(matrix[:, :, None], shared)[:, :, 0]
    deviation = float(centred.std())
    return np.asarray(centred / deviation) if deviation > 0 else np.zeros_like(centred)


def _fit(z: Matrix, reads: Matrix, prior: Matrix, first: Matrix, shared: bool) -> _Fit:
    """Expectation-maximisation from a first idea of the evidence."""
    belief = _believe(first.reshape(len(reads), -1), shared)
    for _ in range(15):
        belief = _step(z, belief, prior, shared).belief
    longer = np.append(prior, _TEMPLATE)
    squares = np.square(reads).sum(axis=2)
    for _ in range(40):
        # the direction that believed pairs share; what an entry itself brought to it is taken out of its score
        template = np.einsum("ij,ijd->d", belief, reads)
        along = standard(reads @ template - belief * squares, shared)
        fit = _step(np.vstack([z, along.reshape(1, -1)]), belief, longer, shared)
        moved = float(np.abs(fit.belief - belief).max())
        belief = fit.belief
        if moved < 1e-3:
            break
    return fit


def _weights(z: Matrix, shift: Matrix) -> Matrix:
    """The discriminant before anything is known of the pairs."""
    return np.asarray(np.linalg.solve(np.cov(z) + _RIDGE * np.eye(len(z)), shift))


def _step(z: Matrix, belief: Matrix, prior: Matrix, shared: bool) -> _Fit:
    """Shift and covariance from the belief, the evidence from them, and the belief from it."""
    n = len(belief)
    pair = belief.reshape(-1)
    stranger = 1 - pair
    if shared:
        stranger[:: n + 1] = 0
    shift = (z @ pair + _PSEUDO * prior) / (pair.sum() + _PSEUDO)
    apart = z - (z @ stranger / stranger.sum())[:, None]
    near = z - shift[:, None]
    spread = ((apart * stranger) @ apart.T + (near * pair) @ near.T) / (stranger.sum() + pair.sum())
    spread += _RIDGE * np.eye(len(z))
    weights = np.linalg.solve(spread, shift)
    evidence = (weights @ z - 0.5 * float(shift @ weights)).reshape(n, n)
    belief = _believe(evidence, shared)
    sure = belief[belief > 0]
    away = shift - prior
    objective = float((belief * evidence).sum() - (sure * np.log(sure)).sum())
    objective -= 0.5 * _PSEUDO * float(away @ np.linalg.solve(spread, away))
    return _Fit(belief, evidence, objective)


def _believe(evidence: Matrix, shared: bool, rounds: int = 60) -> Matrix:
    """How likely each entry is a pair, each piece being in one: the exponential, rescaled in turn (Sinkhorn)."""
    return sinkhorn(np.exp(evidence - evidence.max()) + 1e-300, shared, rounds)


def _centred(values: Matrix, shared: bool) -> Matrix:
    """Row and column means taken out of (rows, columns, numbers); the diagonal of a pool counts for nothing."""
    if shared:
        diagonal = np.arange(len(values))
        values = values.copy()
        values[diagonal, diagonal] = 0
        count = max(values.shape[0] * (values.shape[1] - 1), 1)
        values[diagonal, diagonal] = values.sum(axis=(0, 1)) / count
    rows, columns = values.mean(axis=1, keepdims=True), values.mean(axis=0, keepdims=True)
    return np.asarray(values - rows - columns + values.mean(axis=(0, 1), keepdims=True))


class Score(StrEnum):
    """How well an input and an output projection fit."""

    DIAGONAL = "diagonal"
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

    omitted: ClassVar[tuple[str, ...]] = ("matrix", "ins", "outs")
    computed: ClassVar[tuple[str, ...]] = ("separated",)

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


def pair(parts: ResidualWeights, score: Score = Score.DIAGONAL, rows: Rows | None = None) -> Pairing:
    r"""Pair the pieces by one score and the Hungarian algorithm.

    ``diagonal`` is :math:`|tr(W_{out} W_{in})| / \|W_{out} W_{in}\|_F` (paper, equation 4). ``combined`` uses data too,
    if there are ``rows`` of them.

    Examples:
        >>> from strati.reassembly.residual.network import ResidualWeights
        >>> from strati.reassembly.residual.network import activation
        >>> A = np.random.default_rng(0).standard_normal((3, 8, 4)).astype(np.float32)
        >>> parts = ResidualWeights(A, A[..., 0], -A.transpose(0, 2, 1)[[2, 0, 1]], A[:, 0], A[0, :1], A[0, 0, :1],
        ...               activation("relu"), 3)
        >>> found = pair(parts)
        >>> found.outs.tolist(), found.separated
        ([1, 2, 0], True)
    """
    return pairing_of(parts, score, scores(parts, score, rows))


def pairing_of(parts: ResidualWeights, name: str, matrix: NDArray[np.float64]) -> Pairing:
    """The best pairs of a score matrix, with their separation."""
    if parts.shared:
        ins, outs = match(matrix)
    else:
        ins, outs = np.arange(parts.blocks), assign(matrix)
    return with_pairs(parts, name, matrix, ins, outs)


def with_pairs(
    parts: ResidualWeights, name: str, matrix: NDArray[np.float64], ins: Ints, outs: Ints
) -> Pairing:
    """The separation that given pairs have in a score matrix."""
    matched = matrix[ins, outs]
    unmatched = np.ones(matrix.shape, dtype=bool)
    unmatched[ins, outs] = False
    for same_in, same_out in twins(parts, ins, outs):  # a block used twice: either copy is the right one
        unmatched[same_in, same_out] = False
    if parts.shared:  # a piece with itself is no pair, and a pair the other way round is the same two pieces
        np.fill_diagonal(unmatched, False)
        unmatched[outs, ins] = False
    return Pairing(
        str(name),
        matrix,
        ins,
        outs,
        float(matched.min()),
        float(matrix[unmatched].max()) if unmatched.any() else float("-inf"),
    )


def twins(parts: ResidualWeights, ins: Ints, outs: Ints) -> list[tuple[int, int]]:
    """Pairs that are as good as the given ones, because a piece of theirs is there more than once."""
    first = _copies(parts.w_in, parts.b_in)
    second = first if parts.shared else _copies(parts.w_out, parts.b_out)
    if len(set(first.tolist())) == len(first) and len(set(second.tolist())) == len(second):
        return []
    kinds = {(int(first[i]), int(second[j])) for i, j in zip(ins, outs, strict=True)}
    return [
        (i, j) for i, j in np.ndindex(len(first), len(second)) if (int(first[i]), int(second[j])) in kinds
    ]


def _copies(weights: NDArray[Any], biases: NDArray[Any]) -> NDArray[np.intp]:
    """For each piece, the first one that equals it."""
    first_number: dict[bytes, int] = {}
    keys = (w.tobytes() + b.tobytes() for w, b in zip(weights, biases, strict=True))
    return np.array([first_number.setdefault(key, number) for number, key in enumerate(keys)])


def scores(parts: ResidualWeights, score: Score, rows: Rows | None = None) -> NDArray[np.float64]:
    """The score of every input projection with every output projection."""
    if score is Score.DIAGONAL:
        return np.abs(_dominance(parts))
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


def aligned(parts: ResidualWeights, x: NDArray[Any], y: NDArray[Any]) -> NDArray[np.float64]:
    r"""How far what a pair would add to the outputs goes along with the recorded outputs.

    Training makes every block add something of what was asked for: with the hidden units :math:`H_i` of input
    projection ``i`` on the raw inputs, :math:`M_i = H_i^T Y` is how each unit goes with the outputs and
    :math:`N_j = (W_{last} W_{out}^j)^T` what each unit would add to them; the score is the cosine of the two.
    """
    moved, added = unit_responses(parts, x, y)
    m = len(moved)
    moved, added = moved.reshape(m, -1), added.reshape(len(added), -1)
    moved = moved / _safe(np.linalg.norm(moved, axis=1, keepdims=True))
    added = added / _safe(np.linalg.norm(added, axis=1, keepdims=True))
    return np.asarray(moved @ added.T)


def unit_responses(
    parts: ResidualWeights, x: NDArray[Any], y: NDArray[Any]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """How each hidden unit goes with the outputs (pieces, units, outputs), and what it would add to them."""
    centred_outputs = (y - y.mean(axis=0)).astype(np.float64)
    centred_outputs /= _safe(np.linalg.norm(centred_outputs, axis=0))
    read = parts.enter(x)
    moved = np.stack(
        [
            parts.act.value(read @ A.T + a).astype(np.float64).T @ centred_outputs
            for A, a in zip(parts.w_in, parts.b_in, strict=True)
        ]
    )
    return moved, np.einsum("od,mdh->mho", parts.w_last, parts.w_out).astype(np.float64)


def _reads_more_than_writes(parts: ResidualWeights, x: NDArray[Any], y: NDArray[Any]) -> NDArray[np.float64]:
    """Of pieces whose role is open: how far each reads what goes with the outputs, less what it would add to them."""
    moved, added = unit_responses(parts, x, y)
    sizes = [np.linalg.norm(pieces.reshape(len(pieces), -1), axis=1) for pieces in (parts.w_in, parts.w_out)]
    ratio = np.log(_safe(np.linalg.norm(moved, axis=(1, 2)) / _safe(sizes[0])))
    ratio = (ratio - ratio.mean()) / _safe(ratio.std())
    other = np.log(_safe(np.linalg.norm(added, axis=(1, 2)) / _safe(sizes[1])))
    both = ratio - (other - other.mean()) / _safe(other.std())
    return np.asarray(both / _safe(both.std()))


def _dominance(parts: ResidualWeights) -> NDArray[np.float64]:
    """Signed trace of each product over its Frobenius norm, without forming a product.

    ``||B A||_F^2 = <A A^T, B^T B>``, so all norms are one product of Gram matrices laid flat.
    """
    m = len(parts.w_in)
    trace = parts.w_in.reshape(m, -1).astype(np.float64) @ _flat(parts.w_out.transpose(0, 2, 1)).T
    grams = parts.w_in @ parts.w_in.transpose(0, 2, 1), parts.w_out.transpose(0, 2, 1) @ parts.w_out
    squared = (grams[0].reshape(m, -1) @ grams[1].reshape(m, -1).T).astype(np.float64)
    return np.asarray(trace / np.sqrt(np.maximum(squared, np.finfo(np.float64).tiny)))


def _gram(parts: ResidualWeights) -> NDArray[np.float64]:
    """Correlation of the Gram matrices over neurons, ``W_in W_in^T`` and ``W_out^T W_out``, off the diagonal."""
    off = ~np.eye(parts.w_in.shape[1], dtype=bool)
    if off.sum() < 2:
        return np.zeros((len(parts.w_in), len(parts.w_out)))
    return _correlation(
        (parts.w_in @ parts.w_in.transpose(0, 2, 1))[:, off],
        (parts.w_out.transpose(0, 2, 1) @ parts.w_out)[:, off],
    )


def _norms(parts: ResidualWeights) -> NDArray[np.float64]:
    """Correlation over neurons of squared norms of input weights (bias included) and of output weights."""
    inner = np.square(parts.w_in).sum(axis=2) + np.square(parts.b_in)
    return _correlation(inner, np.square(parts.w_out).sum(axis=1))


def _reads(parts: ResidualWeights) -> NDArray[np.float64]:
    """``W_last W_out W_in`` over the norms of ``W_last W_out`` and of ``W_in``: (inputs, outputs, outputs * width).

    What the network would read from its inputs through two pieces, were the activation the identity.
    """
    readout = np.einsum("od,mdh->moh", parts.w_last, parts.w_out).astype(np.float64)
    readout /= _safe(np.linalg.norm(readout, axis=(1, 2), keepdims=True))
    inner = parts.w_in.astype(np.float64)
    inner /= _safe(np.linalg.norm(inner, axis=(1, 2), keepdims=True))
    m, h, d = inner.shape
    reads = readout.reshape(-1, h) @ inner.transpose(1, 0, 2).reshape(h, m * d)
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
