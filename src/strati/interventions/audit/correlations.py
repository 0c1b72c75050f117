"""Correlations with bootstrap confidence intervals, all resamples at once.

A resample is a vector of counts, how often each point was drawn; Spearman, Kendall (tau-b), the RMSE of the linear
fit and the area under the ROC curve are written for points with such weights, so that a thousand resamples are a
few matrix products. With all counts one they are the usual statistics.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.core.rng import stream

if TYPE_CHECKING:
    import pandas as pd

    from strati.core.results import FloatArray, IntArray
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


def retained_share(table: pd.DataFrame, performance: Mapping[str, Any]) -> FloatArray:
    """``(performance - chance) / (intact - chance)`` of every row.

    Perplexities are compared by their logarithms: on their own scale 5,000 would be closer to a good 20 than to
    the chance of 50,000. Without a known chance the share is performance over intact performance; where less is
    better, or a good value is below zero (a log-likelihood), the inverse of that, and ``2 - ratio`` where the change
    improved it, so that no row counts for more than two.

    Examples:
        >>> import pandas as pd
        >>> rows = pd.DataFrame({"performance": [0.9, 0.1], "intact_performance": [0.9, 0.9]})
        >>> retained_share(rows, {"name": "accuracy", "chance": 0.1, "higher_is_better": True}).tolist()
        [1.0, 0.0]
        >>> rows = pd.DataFrame({"performance": [-2.0, -8.0], "intact_performance": [-2.0, -2.0]})
        >>> retained_share(rows, {"name": "log-likelihood", "chance": None, "higher_is_better": True}).tolist()
        [1.0, 0.25]
    """
    now, intact = table["performance"].to_numpy(float), table["intact_performance"].to_numpy(float)
    chance = performance.get("chance")
    with np.errstate(divide="ignore", invalid="ignore"):
        if chance is None:
            share = _of_ratio(now, intact) if performance["higher_is_better"] else _of_ratio(-now, -intact)
        else:
            if performance["name"] == "perplexity":
                now, intact, chance = np.log(now), np.log(intact), np.log(chance)
            share = (now - chance) / (intact - chance)
    return np.where(np.isfinite(share), share, np.nan)


def _of_ratio(now: FloatArray, intact: FloatArray) -> FloatArray:
    """The share of values of which more is better; below zero their ratio counts what is lost."""
    ratio = now / intact
    below = np.where(ratio >= 1, 1 / ratio, 2 - ratio)
    return np.where(intact > 0, ratio, np.where(intact < 0, below, 1 + np.sign(now)))


def classify(share: float | None, robust: float, critical: float) -> str:
    """``robust``, ``critical`` or ``mixed`` by the share of performance retained.

    Examples:
        >>> [classify(share, 0.9, 0.5) for share in (0.95, 0.7, 0.1)]
        ['robust', 'mixed', 'critical']
    """
    if share is None:
        return "mixed"
    if share >= robust:
        return "robust"
    return "critical" if share <= critical else "mixed"


MANY_NETWORKS = 8
"""From so many networks on they are shuffled as wholes."""

_SLOT = ("intervention", "setting", "draw")
_AT_ONCE = 2_000_000  # places of points in memory at a time


@dataclass(frozen=True)
class Design:
    """Where the points of a study stand: which network, layer and slot each is.

    A slot is one intervention, setting and draw. ``place[a, b, c]`` is the point of network ``a``, layer ``b`` and
    slot ``c``, -1 where there is none; ``kinds`` the type of each layer.
    """

    network: IntArray
    layer: IntArray
    slot: IntArray
    kinds: IntArray
    place: IntArray

    @property
    def size(self) -> int:
        """The number of points."""
        return len(self.network)


def design_of(points: pd.DataFrame) -> Design:
    """The design of a table of points.

    Examples:
        >>> import pandas as pd
        >>> rows = [("n", "fc1", "a", "rerandomise", None, 0), ("n", "fc2", "a", "rerandomise", None, 0)]
        >>> names = ["network", "layer", "type", "intervention", "setting", "draw"]
        >>> design_of(pd.DataFrame(rows, columns=names)).place.shape
        (1, 2, 1)
    """
    network, layer = _codes(points["network"]), _codes(points["layer"])
    slot = _codes(["\x1f".join(map(str, key)) for key in zip(*(points[n] for n in _SLOT), strict=True)])
    kinds = np.zeros(layer.max(initial=-1) + 1, int)
    kinds[layer] = _codes(points["type"])
    place = np.full((network.max(initial=-1) + 1, len(kinds), slot.max(initial=-1) + 1), -1, np.int32)
    place[network, layer, slot] = np.arange(len(points))
    return Design(network, layer, slot, kinds, place)


def shuffled(design: Design, count: int, rng: np.random.Generator, *, layers: bool) -> Iterator[IntArray]:
    """For each point, whose performance it gets; arrays (some shuffles, points), -1 for nobody's.

    Args:
        design: Where the points stand.
        count: How many shuffles in all.
        rng: The random stream.
        layers: Whether layers change places too; otherwise points stay in their layer.

    Examples:
        >>> import pandas as pd
        >>> names = ["network", "layer", "type", "intervention", "setting", "draw"]
        >>> rows = pd.DataFrame([(n, k, "a", "rerandomise", None, 0) for n in "xyz" for k in "pq"], columns=names)
        >>> (drawn,) = shuffled(design_of(rows), 5, np.random.default_rng(0), layers=False)
        >>> bool((drawn % 2 == np.arange(6) % 2).all())  # everyone stays in its layer
        True
    """
    networks, depth, slots = design.place.shape
    step = max(1, _AT_ONCE // max(1, networks * depth * slots))
    for start in range(0, count, step):
        size = min(step, count - start)
        if networks >= MANY_NETWORKS:
            net = np.repeat(_orders(rng, (size, 1, networks)), depth, axis=1)
        else:
            net = _orders(rng, (size, depth, networks))
        lay = _within_kinds(design.kinds, size, rng) if layers else np.tile(np.arange(depth), (size, 1))
        cell = _orders(rng, (size, networks, depth, slots))
        a, b, c = design.network, design.layer, design.slot
        every = np.arange(size)[:, None]
        yield design.place[net[every, b, a], lay[every, b], cell[every, a, b, c]]


def relabelled(design: Design, count: int, rng: np.random.Generator) -> Iterator[IntArray]:
    """Shuffles in which the points of one layer of one network change places and nothing else does."""
    networks, depth, slots = design.place.shape
    step = max(1, _AT_ONCE // max(1, networks * depth * slots))
    for start in range(0, count, step):
        cell = _orders(rng, (min(step, count - start), networks, depth, slots))
        a, b, c = design.network, design.layer, design.slot
        yield design.place[a, b, cell[:, a, b, c]]


def shuffled_layers(kinds: IntArray, count: int, rng: np.random.Generator) -> IntArray:
    """Orders of the layers, each layer staying within its type; (count, layers)."""
    return _within_kinds(kinds, count, rng)


def _codes(values: Any) -> IntArray:
    """Whole numbers for names, in the order of the names."""
    return np.unique([str(name) for name in values], return_inverse=True)[1].astype(int)


def _orders(rng: np.random.Generator, shape: tuple[int, ...]) -> IntArray:
    """Random orders along the last axis."""
    if shape[-1] == 1:
        return np.zeros(shape, int)
    return np.argsort(rng.random(shape, dtype=np.float32), axis=-1)


def _within_kinds(kinds: IntArray, count: int, rng: np.random.Generator) -> IntArray:
    orders = np.tile(np.arange(len(kinds)), (count, 1))
    for kind in np.unique(kinds):
        alike = np.flatnonzero(kinds == kind)
        orders[:, alike] = alike[_orders(rng, (count, len(alike)))]
    return orders


def null_products(
    metrics: FloatArray, values: FloatArray, drawn: Iterable[IntArray]
) -> tuple[FloatArray, FloatArray]:
    """Sums of products of every metric's scores with shuffled values, and their correlations; (metrics, shuffles).

    Args:
        metrics: Centred scores, (points, metrics), NaN where a metric is not defined.
        values: Centred scores of what is shuffled, (points,).
        drawn: Shuffles.
    """
    here = np.isfinite(metrics)
    m = np.where(here, metrics, 0.0)
    complete = bool(here.all())
    sums, sizes = [], []
    for places in drawn:
        defined = (places >= 0).T
        y = np.where(defined, values[places].T, 0.0)
        sums.append(m.T @ y)
        if complete and defined.all():
            sizes.append(np.outer((m**2).sum(0), np.full(y.shape[1], (values**2).sum())))
        else:
            sizes.append(((m**2).T @ defined.astype(float)) * (here.T.astype(float) @ y**2))
    total, size = np.concatenate(sums, axis=1), np.sqrt(np.concatenate(sizes, axis=1))
    with np.errstate(invalid="ignore", divide="ignore"):
        return total, np.where(size > 0, total / size, 0.0)
