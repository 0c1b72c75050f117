"""Correlations with bootstrap confidence intervals, all resamples at once.

A resample is a vector of counts, how often each point was drawn; Spearman, Kendall (tau-b), the RMSE of the linear
fit and the area under the ROC curve are written for points with such weights, so that a thousand resamples are a
few matrix products. With all counts one they are the usual statistics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.core.rng import stream

if TYPE_CHECKING:
    import pandas as pd

    from strati.core.results import FloatArray
    from strati.interventions.audit.audit import AuditConfig

_SMALL = 300  # points up to which all pairs are cheaper than sorting
_ROWS = 512  # of the matrix of pairs at a time, so that memory does not grow with the square of n


@dataclass(frozen=True)
class Estimate:
    """A statistic and its percentile bootstrap interval; ``None`` where it is not defined."""

    value: float | None
    interval: tuple[float, float] | None


def resamples(clusters: Sequence[Any], count: int, rng: np.random.Generator) -> FloatArray:
    """How often each point is drawn in ``count`` resamples of whole clusters; (count, n).

    Points of one cluster (all points of one network, say) are not independent and are drawn together.

    Examples:
        >>> drawn = resamples(["a", "a", "b"], 4, np.random.default_rng(0))
        >>> bool((drawn[:, 0] == drawn[:, 1]).all())
        True
    """
    _, which = np.unique(np.asarray(clusters, object).astype(str), return_inverse=True)
    size = int(which.max()) + 1 if len(which) else 0
    drawn = rng.multinomial(size, np.full(size, 1.0 / size), size=count)
    return drawn[:, which].astype(float)


def rank_correlations(values: FloatArray, y: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Spearman's rho and Kendall's tau-b of every column with ``y``; NaN where one of them is constant.

    Points where a column is NaN are left out of it.

    Examples:
        >>> rho, tau = rank_correlations(np.array([[1.0], [2.0], [3.0]]), np.array([1.0, 3.0, 2.0]))
        >>> round(float(rho[0]), 4), round(float(tau[0]), 4)
        (0.5, 0.3333)
    """
    rho, tau = np.full(values.shape[1], np.nan), np.full(values.shape[1], np.nan)
    for i, column in enumerate(values.T):
        here = np.isfinite(column)
        if here.sum() > 1:
            x, z = column[here], y[here]
            rho[i] = float(spearman(x, z, np.ones((1, len(x))))[0])
            tau[i] = _tau(x, z) if np.isfinite(rho[i]) else np.nan
    return rho, tau


def _tau(x: FloatArray, y: FloatArray) -> float:
    if len(x) > _SMALL:
        from scipy.stats import kendalltau

        return float(kendalltau(x, y).statistic)
    dx, dy = np.sign(x[:, None] - x), np.sign(y[:, None] - y)
    return float((dx * dy).sum() / np.sqrt((dx * dx).sum() * (dy * dy).sum()))


def rmse_intervals(
    points: pd.DataFrame, values: FloatArray, y: FloatArray, config: AuditConfig, *what: object
) -> list[Estimate]:
    """RMSE of the line through metric and performance, for every column; layers and networks are resampled.

    A resample draws layers and networks independently, with replacement; a point counts as often as its layer was
    drawn times its network (Owen's pigeonhole bootstrap), so few layers or few networks both widen the interval.
    """
    rng = stream(config.seed, "audit", *what, "rmse")
    weights = np.ones((config.resamples + 1, len(points)))
    names = [name for name in ("layer", "network") if points[name].nunique() > 1]
    for name in names:
        weights[1:] *= resamples(list(points[name]), config.resamples, rng)
    if not names:
        weights[1:] = resamples(range(len(points)), config.resamples, rng)
    rmse = _rmse(values, y, weights)
    few = np.isfinite(values).sum(0) < 3  # two points always lie on a line
    return [
        Estimate(None, None) if few[i] else estimate(rmse[:, i], config.confidence) for i in range(len(few))
    ]


def _rmse(values: FloatArray, y: FloatArray, weights: FloatArray) -> FloatArray:
    """:func:`linear_rmse` of every column in every resample; standardised first, so that nothing cancels."""
    here = np.isfinite(values).astype(float)
    count = np.maximum(here.sum(0), 1.0)
    x = np.where(here > 0, values, 0.0)
    x = (x - x.sum(0) / count) * here
    x /= np.maximum(np.sqrt((x * x).sum(0) / count), 1e-300)
    scale = max(float(y.std()), 1e-300)
    z = ((y - y.mean()) / scale)[:, None] * here
    with np.errstate(invalid="ignore", divide="ignore"):
        n, sx, sy, sxx, syy, sxy = (weights @ part for part in (here, x, z, x * x, z * z, x * z))
        xx, yy, xy = sxx / n - (sx / n) ** 2, syy / n - (sy / n) ** 2, sxy / n - sx * sy / n**2
        explained = np.where(xx > 1e-12, xy**2 / xx, 0.0)
        return np.where(n > 0, scale * np.sqrt(np.maximum(yy - explained, 0.0)), np.nan)


def spearman(x: FloatArray, y: FloatArray, weights: FloatArray) -> FloatArray:
    """Spearman's rank correlation of every resample; NaN where x or y is constant.

    Examples:
        >>> spearman(np.array([1.0, 2.0, 3.0]), np.array([1.0, 3.0, 2.0]), np.ones((1, 3))).tolist()
        [0.5]
    """
    return _pearson(_ranks(x, weights), _ranks(y, weights), weights)


def kendall(x: FloatArray, y: FloatArray, weights: FloatArray) -> FloatArray:
    """Kendall's tau-b of every resample; copies of one point are ties.

    Examples:
        >>> kendall(np.array([1.0, 2.0, 3.0]), np.array([1.0, 3.0, 2.0]), np.ones((1, 3))).round(4).tolist()
        [0.3333]
    """
    w = weights.astype(np.float32)
    agree, varied_x, varied_y = np.zeros(len(w)), np.zeros(len(w)), np.zeros(len(w))
    for start in range(0, len(x), _ROWS):
        part = slice(start, start + _ROWS)
        dx, dy = np.sign(x[part, None] - x), np.sign(y[part, None] - y)
        # sum_ij w_i w_j s_ij, and the numbers of pairs not tied in x, in y
        agree += _form(w, dx * dy, part)
        varied_x += _form(w, dx * dx, part)
        varied_y += _form(w, dy * dy, part)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where((varied_x > 0) & (varied_y > 0), agree / np.sqrt(varied_x * varied_y), np.nan)


def linear_rmse(x: FloatArray, y: FloatArray, weights: FloatArray) -> FloatArray:
    """Root mean square error of the least-squares line ``y ~ a + b x`` of every resample.

    Examples:
        >>> linear_rmse(np.array([0.0, 1.0, 2.0]), np.array([1.0, 3.0, 5.0]), np.ones((1, 3))).round(6).tolist()
        [0.0]
    """
    total, mx, _, sxx, syy, sxy = _moments(_broad(x, weights), _broad(y, weights), weights)
    with np.errstate(invalid="ignore", divide="ignore"):
        explained = np.where(sxx > _tiny(sxx, mx, total), sxy**2 / sxx, 0.0)
    return np.sqrt(np.maximum(syy - explained, 0.0) / total)


def roc_area(x: FloatArray, positive: FloatArray, weights: FloatArray) -> FloatArray:
    """Chance that a positive point has the larger ``x`` (ties count half); NaN without both kinds.

    Examples:
        >>> roc_area(np.array([1.0, 2.0, 3.0]), np.array([0.0, 1.0, 1.0]), np.ones((1, 3))).tolist()
        [1.0]
    """
    ranks = _ranks(x, weights)
    up = (weights * positive).sum(1)
    down = (weights * (1.0 - positive)).sum(1)
    with np.errstate(invalid="ignore", divide="ignore"):
        area = ((weights * positive * ranks).sum(1) - up * (up + 1.0) / 2.0) / (up * down)
    return np.where((up > 0) & (down > 0), area, np.nan)


def estimate(values: FloatArray, level: float = 0.95) -> Estimate:
    """First entry the estimate, the others its resamples."""
    measured, drawn = float(values[0]), values[1:][np.isfinite(values[1:])]
    if not np.isfinite(measured):
        return Estimate(None, None)
    # when most resamples have no value (all points alike), an interval from the rest would mislead
    if len(drawn) < max(1, (len(values) - 1) // 2):
        return Estimate(measured, None)
    low, high = np.quantile(drawn, [(1.0 - level) / 2.0, (1.0 + level) / 2.0])
    return Estimate(measured, (float(low), float(high)))


def _ranks(x: FloatArray, weights: FloatArray) -> FloatArray:
    """Mid-ranks of each point in each resample, as if every point stood there as often as it was drawn."""
    _, group = np.unique(x, return_inverse=True)
    order = np.argsort(group, kind="stable")
    starts = np.flatnonzero(np.r_[True, np.diff(group[order]) > 0])
    in_group = np.add.reduceat(weights[:, order], starts, axis=1)
    upto = np.cumsum(in_group, axis=1)
    middle = upto - in_group + (in_group + 1.0) / 2.0
    ranks: FloatArray = middle[:, group]
    return ranks


def _pearson(x: FloatArray, y: FloatArray, weights: FloatArray) -> FloatArray:
    total, mx, my, sxx, syy, sxy = _moments(x, y, weights)
    good = (sxx > _tiny(sxx, mx, total)) & (syy > _tiny(syy, my, total))
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(good, np.clip(sxy / np.sqrt(sxx * syy), -1.0, 1.0), np.nan)


def _moments(x: FloatArray, y: FloatArray, w: FloatArray) -> tuple[FloatArray, ...]:
    total = w.sum(1)
    mx, my = (w * x).sum(1) / total, (w * y).sum(1) / total
    dx, dy = x - mx[:, None], y - my[:, None]
    return total, mx, my, (w * dx * dx).sum(1), (w * dy * dy).sum(1), (w * dx * dy).sum(1)


def _tiny(squares: FloatArray, mean: FloatArray, total: FloatArray) -> FloatArray:
    """A sum of squares below this is rounding error: the values are all alike."""
    return total * (1e-13 * np.maximum(np.abs(mean), 1e-300)) ** 2


def _broad(x: FloatArray, weights: FloatArray) -> FloatArray:
    return np.broadcast_to(x, weights.shape)


def _form(weights: Any, pairs: FloatArray, part: slice) -> FloatArray:
    form: FloatArray = np.einsum(
        "bi,bi->b", weights[:, part], weights @ pairs.astype(np.float32).T, dtype=float
    )
    return form
