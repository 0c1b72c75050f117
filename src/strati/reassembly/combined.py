"""Several signals of a pairing together: a mixture model of scores whose weights the scores themselves tell.

Every signal gives each input projection a score with each output projection. Of these, ``n`` are of true pairs
and the rest, far more, of strangers. Standardised, strangers are taken as Gaussian around 0 and pairs around a
shift ``mu``, both with one covariance ``S`` between the signals: then the best single score is the linear
discriminant ``mu' S^-1 z``. Which entries are pairs, and so ``mu`` and ``S``, is found by expectation-maximisation
over permutations; a weak prior for ``mu``, one of a few regimes of training, keeps a signal that is only noise from
being believed. The signals themselves are in :mod:`strati.reassembly.pairing`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from strati.reassembly.assignment import used_once

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

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
    own = np.square(reads).sum(axis=2)
    for _ in range(40):
        # the direction that believed pairs share; what an entry itself brought to it is taken out of its score
        template = np.einsum("ij,ijd->d", belief, reads)
        along = standard(reads @ template - belief * own, shared)
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
    return used_once(np.exp(evidence - evidence.max()) + 1e-300, shared, rounds)


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
