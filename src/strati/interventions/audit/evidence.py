"""How strong the evidence on each metric is: correlations within and between layers, held against shuffled studies.

Three questions are put to every metric: does it go with performance, does it tell robust from critical points, does it
tell re-initialised from re-randomised layers. Each answer is a standardised statistic; the largest of all metrics and
questions in shuffled studies (:mod:`.shuffles`) gives the level from which one counts (Westfall and Young's maxT), so
that the number of metrics tried is paid for.

For performance there are two independent sources: within layers (ranks of one layer's points) and between layers (the
layers' means, with the layers as units). Either alone or both together may be enough.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.stats import rankdata

from strati.core.rng import stream
from strati.interventions.audit.correlations import (
    MANY_NETWORKS,
    Design,
    design_of,
    null_products,
    relabelled,
    shuffled,
    shuffled_layers,
)

if TYPE_CHECKING:
    import pandas as pd

    from strati.core.results import FloatArray, IntArray
    from strati.interventions.audit.audit import AuditConfig

Interval = tuple[float, float] | None

FEWEST = 5
"""Points of each kind that it takes to say whether a metric tells the kinds apart."""

LEAST = 6
"""Points below which nothing is said about a metric."""


@dataclass(frozen=True)
class Evidence:
    """What the points say of one metric; ``None`` where a number is not defined.

    ``within`` is the rank correlation within layers, ``slope`` the slope of the metric's overall ranks on those of
    performance within layers (1 for a metric that moves as much with performance inside a layer as the ranks do),
    ``apart`` the rank correlation within each intervention of each layer, ``between_ci`` the interval of the rank
    correlation of the layers' means,
    ``*_counts`` whether the statistic exceeds what shuffled studies reach with any metric.
    """

    metric: str
    n: int
    within: float | None = None
    within_ci: Interval = None
    slope: float | None = None
    slope_ci: Interval = None
    apart: float | None = None
    between_ci: Interval = None
    counts: bool = False
    robust_auc: float | None = None
    robust_auc_ci: Interval = None
    robust_auc_within: float | None = None
    robust_counts: bool = False
    kinds_auc: float | None = None
    kinds_auc_ci: Interval = None
    kinds_count: bool = False


@dataclass(frozen=True)
class PartEvidence:
    """The evidence on every metric from one part of a study, and the test of correlation it comes from.

    ``statistic`` and ``null`` (metrics x shuffles) are those of the correlation with performance, for the metrics in
    ``tested``; the other metrics are constant or have too few points.
    """

    by_metric: Mapping[str, Evidence]
    tested: tuple[str, ...] = ()
    statistic: FloatArray = field(default_factory=lambda: np.zeros(0))
    null: FloatArray = field(default_factory=lambda: np.zeros((0, 0)))


def significant_interventions(
    parts: Mapping[str, PartEvidence], metrics: Collection[str], rate: float
) -> dict[str, tuple[str, ...]]:
    """The interventions within which each metric correlates with performance, corrected for testing many.

    The largest statistic over ``metrics`` and interventions in shuffled studies gives the level (maxT), so that among
    metrics that correlate with performance within no intervention, any is listed with probability at most ``rate``.

    Args:
        parts: Evidence from the points of each intervention.
        metrics: The metrics to test: those that correlate with performance over all interventions.
        rate: Chance of one false entry.
    """
    rows = {
        kind: [i for i, name in enumerate(part.tested) if name in metrics] for kind, part in parts.items()
    }
    nulls = [part.null[rows[kind]].max(0) for kind, part in parts.items() if rows[kind]]
    if not nulls:
        return {}
    level = float(np.quantile(np.max(nulls, axis=0), 1.0 - rate, method="higher"))
    significant: dict[str, list[str]] = {}
    for kind, part in parts.items():
        for i in rows[kind]:
            if part.statistic[i] > level:
                significant.setdefault(part.tested[i], []).append(kind)
    return {metric: tuple(kinds) for metric, kinds in significant.items()}


def evidence_of(
    points: pd.DataFrame, names: Sequence[str], config: AuditConfig, rate: float, *what: object
) -> PartEvidence:
    """The evidence on every metric from the changed points of a study, or of one of its interventions.

    Args:
        points: Rows with ``retained``, the metrics and performance.
        names: The metrics.
        config: Thresholds, shuffles, level and seed.
        rate: Chance that anything counts in a study of worthless metrics.
        what: Names of this part of the audit, for its random stream.
    """
    values = points[list(names)].to_numpy(float)
    varying = [i for i, name in enumerate(names) if _varies(values[:, i])]
    by_metric = {name: Evidence(name, int(np.isfinite(values[:, i]).sum())) for i, name in enumerate(names)}
    if len(points) < LEAST or not varying:
        return PartEvidence(by_metric)
    judge = _Judge(points, values[:, varying], config, what)
    performance, robust, kinds = judge.performance(), judge.robust(), judge.kinds()
    tests = [t for t in (performance, robust, kinds) if t is not None]
    most = np.max(
        [t.null.max(0) for t in tests], axis=0
    )  # the best of all metrics and questions, shuffle by shuffle
    level = float(np.quantile(most, 1.0 - rate, method="higher"))
    for row, i in enumerate(varying):
        enough = by_metric[names[i]].n >= LEAST
        by_metric[names[i]] = Evidence(
            names[i],
            by_metric[names[i]].n,
            **performance.numbers(row, config.confidence),
            apart=performance.of_one_intervention(row),
            between_ci=performance.between_interval(row, config.confidence),
            counts=bool(enough and performance.statistic[row] > level),
            **(robust.areas(row, config.confidence, "robust_auc") if robust is not None else {}),
            robust_auc_within=robust.within(row) if robust is not None else None,
            robust_counts=bool(robust is not None and enough and robust.statistic[row] > level),
            **(kinds.areas(row, config.confidence, "kinds_auc") if kinds is not None else {}),
            kinds_count=bool(kinds is not None and enough and kinds.statistic[row] > level),
        )
    tested = tuple(names[i] for i in varying)
    return PartEvidence(by_metric, tested, performance.statistic, performance.null)


def half_widths(null: FloatArray, level: float) -> FloatArray:
    """How far each statistic strays in shuffled studies, on Fisher's scale: ``level`` quantiles of ``|atanh|``."""
    with np.errstate(divide="ignore"):
        widths: FloatArray = np.quantile(
            np.abs(np.arctanh(np.clip(null, -1.0, 1.0))), level, axis=-1, method="higher"
        )
    return widths


def fisher(correlation: float | None, half: float) -> Interval:
    """A confidence interval on Fisher's scale whose width is that of the statistic in shuffled studies.

    ``tanh(atanh(r) +- h)`` with ``h`` of :func:`half_widths`: it excludes zero exactly when the permutation test does.

    Examples:
        >>> low, high = fisher(0.5, 0.2)
        >>> round(low, 2), round(high, 2)
        (0.34, 0.63)
    """
    if correlation is None or not np.isfinite(correlation) or half == 0.0:
        return None
    if not np.isfinite(half):
        return (-1.0, 1.0)
    centre = float(
        np.arctanh(np.clip(correlation, -0.99, 0.99))
    )  # a perfect sample is no perfect correlation
    return min(float(np.tanh(centre - half)), correlation), max(float(np.tanh(centre + half)), correlation)


@dataclass(frozen=True)
class _Performance:
    within_value: FloatArray
    within_null: FloatArray
    slope_value: FloatArray
    slope_null: FloatArray
    apart: FloatArray
    between_value: FloatArray
    between_null: FloatArray
    statistic: FloatArray
    null: FloatArray

    def between_interval(self, row: int, level: float) -> Interval:
        return fisher(float(self.between_value[row]), float(half_widths(self.between_null[row], level)))

    def of_one_intervention(self, row: int) -> float | None:
        return float(self.apart[row]) if np.isfinite(self.apart[row]) else None

    def numbers(self, row: int, level: float) -> dict[str, Any]:
        possible = bool(np.ptp(self.within_null[row]) > 0)
        if not possible:  # one point in every layer: nothing can be said within layers
            return {"within": None, "within_ci": None, "slope": None, "slope_ci": None}
        within, slope = float(self.within_value[row]), float(self.slope_value[row])
        half = float(np.quantile(np.abs(self.slope_null[row]), level, method="higher"))
        return {
            "within": within,
            "within_ci": fisher(within, float(half_widths(self.within_null[row], level))),
            "slope": slope,
            "slope_ci": (slope - half, slope + half),
        }


@dataclass(frozen=True)
class _Areas:
    """Areas under the ROC curve, as ``2 A - 1``."""

    value: FloatArray
    value_null: FloatArray
    inner: FloatArray
    statistic: FloatArray
    null: FloatArray

    def areas(self, row: int, level: float, name: str) -> dict[str, Any]:
        area = float(self.value[row])
        if not np.isfinite(area):
            return {name: None, f"{name}_ci": None}
        ends = fisher(area, float(half_widths(self.value_null[row], level)))
        interval = None if ends is None else ((1.0 + ends[0]) / 2.0, (1.0 + ends[1]) / 2.0)
        return {name: (1.0 + area) / 2.0, f"{name}_ci": interval}

    def within(self, row: int) -> float | None:
        area = float(self.inner[row])
        return (1.0 + area) / 2.0 if np.isfinite(area) else None


class _Judge:
    """The points of one part of a study, ranked once, and the tests on them."""

    def __init__(
        self, points: pd.DataFrame, values: FloatArray, config: AuditConfig, what: tuple[object, ...]
    ) -> None:
        self.design, self.config, self.what = design_of(points), config, what
        self.values, self.y = values, points["performance"].to_numpy(float)
        share = points["retained"].to_numpy(float)
        self.labels = np.where(share >= config.robust, 1.0, np.where(share <= config.critical, -1.0, 0.0))
        kind = points["intervention"].map({"reinitialise": -1.0, "rerandomise": 1.0})
        self.interventions: FloatArray = np.asarray(kind.fillna(0.0), np.float64)
        self.kind_codes = np.unique([str(k) for k in points["intervention"]], return_inverse=True)[1]
        self.global_ranks = _ranks(values)
        self.inner_ranks = self._inner(values)

    def performance(self) -> _Performance:
        """Does the metric go with performance, within layers and between them?"""
        inner_y = self._inner(self.y[:, None], sweep=False)[:, 0]
        _, within_null = null_products(self.inner_ranks, inner_y, self._stay)
        within = _correlations(self.inner_ranks, inner_y)
        by_layer = self._centre(self.global_ranks)
        of_y = self._centre(_ranks(self.y[:, None]))[:, 0]
        size = float((of_y**2).sum())
        slope_null, _ = null_products(by_layer, of_y, self._stay)
        slope = np.where(np.isfinite(by_layer), by_layer, 0.0).T @ of_y
        scale = 1.0 / size if size > 0 else 0.0
        between = self._between(_ranks(self.y[:, None])[:, 0])
        statistic, null = _combined((within, within_null), between)
        return _Performance(
            *(within, within_null, slope * scale, slope_null * scale, self._apart(), *between),
            *(statistic, null),
        )

    def _apart(self) -> FloatArray:
        """The correlation within each intervention of each layer; NaN with one intervention, or one point in each."""
        kinds = self.kind_codes
        x, y = np.full(self.values.shape, np.nan), np.zeros(len(self.y))
        largest = 0
        for part in self._layers():
            for kind in np.unique(kinds[part]):
                members = part[kinds[part] == kind]
                largest = max(largest, len(members))
                x[members], y[members] = _ranks(self.values[members]), _ranks(self.y[members, None])[:, 0]
        if len(np.unique(kinds)) < 2 or largest < 2:
            return np.full(self.values.shape[1], np.nan)
        return _correlations(x, y)

    def robust(self) -> _Areas | None:
        """Does the metric tell robust from critical points?"""
        ups, downs = (self.labels == 1).sum(), (self.labels == -1).sum()
        if min(ups, downs) < FEWEST:
            return None
        inner = self._centre(self.labels[:, None])[:, 0]
        _, within_null = null_products(self.inner_ranks, inner, self._stay)
        within = _correlations(self.inner_ranks, inner)
        statistic, null = _combined((within, within_null), self._between(self.labels))
        weights = np.where(self.labels == 1, 1.0 / ups, np.where(self.labels == -1, -1.0 / downs, 0.0))
        sums, _ = null_products(self.global_ranks, weights, self._move())
        pooled = _area(self.values, self.labels)
        layers = np.stack([_area(self.values[p], self.labels[p]) for p in self._layers()])
        return _Areas(pooled, np.clip(2.0 * sums, -1.0, 1.0), _mean(layers), statistic, null)

    def kinds(self) -> _Areas | None:
        """Does the metric tell re-initialised from re-randomised layers, within each layer?"""
        which = self.interventions
        if min((which == 1).sum(), (which == -1).sum()) < FEWEST:
            return None
        weights = np.zeros(len(which))
        areas = []
        for part in self._layers():
            ups, downs = (which[part] == 1).sum(), (which[part] == -1).sum()
            if ups and downs:
                weights[part] = np.where(which[part] == 1, 1.0 / ups, 0.0)
                weights[part] -= np.where(which[part] == -1, 1.0 / downs, 0.0)
                areas.append(_area(self.values[part], which[part]))
        value = _mean(np.stack(areas)) if areas else np.full(self.values.shape[1], np.nan)
        if not areas:
            return None
        ranks = self._inner(self.values, sweep=False)
        sums, null = null_products(ranks, weights / len(areas), self._relabel())
        correlations = _correlations(ranks, weights)
        size = null.std(1, keepdims=True)
        with np.errstate(invalid="ignore", divide="ignore"):
            statistic = np.where(size[:, 0] > 0, np.abs(correlations) / size[:, 0], 0.0)
            null = np.where(size > 0, np.abs(null) / size, 0.0)
        return _Areas(value, np.clip(2.0 * sums, -1.0, 1.0), value, statistic, null)

    def _between(self, y: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Rank correlation of the layers' means, layers of one type against each other."""
        parts, kinds = self._layers(), self.design.kinds
        x = np.stack([_mean(self.global_ranks[p]) for p in parts])
        mean = np.array([y[p].mean() for p in parts])
        scores, target = np.full(x.shape, np.nan), np.zeros(len(mean))
        for kind in np.unique(kinds):
            alike = np.flatnonzero(kinds == kind)
            scores[alike] = _ranks(x[alike])
            target[alike] = _ranks(mean[alike, None])[:, 0]
        orders = shuffled_layers(kinds, self.config.resamples, self._stream("between"))
        _, null = null_products(scores, target, [orders])
        return _correlations(scores, target), null

    def _inner(self, values: FloatArray, *, sweep: bool = True) -> FloatArray:
        """Ranks within each layer, centred; with few networks the metrics' means by network are taken out too.

        Of the metrics alone: the products with performance are the same, and shuffled performance stays comparable.
        """
        ranks = np.full(values.shape, np.nan)
        for part in self._layers():
            ranks[part] = _ranks(values[part])
        if sweep and 1 < self.design.place.shape[0] < MANY_NETWORKS:
            for network in range(self.design.place.shape[0]):
                rows = self.design.network == network
                ranks[rows] -= _mean(ranks[rows])
            ranks = self._centre(ranks)
        return ranks

    def _centre(self, values: FloatArray) -> FloatArray:
        centred = np.array(values, float)
        for part in self._layers():
            centred[part] -= _mean(centred[part])
        return centred

    def _layers(self) -> list[IntArray]:
        return [np.flatnonzero(self.design.layer == b) for b in range(len(self.design.kinds))]

    def _stream(self, what: str) -> np.random.Generator:
        return stream(self.config.seed, "audit", *self.what, what)

    @cached_property
    def _stay(self) -> list[IntArray]:
        return list(shuffled(self.design, self.config.resamples, self._stream("stay"), layers=False))

    def _move(self) -> Iterator[IntArray]:
        return shuffled(self.design, self.config.resamples, self._stream("move"), layers=True)

    def _relabel(self) -> Iterator[IntArray]:
        return relabelled(self.design, self.config.resamples, self._stream("relabel"))


def _combined(*parts: tuple[FloatArray, FloatArray]) -> tuple[FloatArray, FloatArray]:
    """The larger of within, between and both together, each in units of its spread over shuffles."""
    scaled = []
    for statistic, null in parts:
        size = null.std(1, keepdims=True)
        with np.errstate(invalid="ignore", divide="ignore"):
            scaled.append(np.where(size > 1e-9, np.column_stack([statistic, null]) / size, 0.0))
    within, between = scaled
    both = np.max([np.abs(within), np.abs(between), np.abs(within + between) / np.sqrt(2.0)], axis=0)
    return both[:, 0], both[:, 1:]


def correlation_nulls(
    points: pd.DataFrame, values: FloatArray, config: AuditConfig, *what: object
) -> FloatArray:
    """Rank correlations of every metric with performance in shuffled studies; (metrics, shuffles)."""
    design: Design = design_of(points)
    rng = stream(config.seed, "audit", *what, "pooled")
    ranks, y = _ranks(values), _ranks(points["performance"].to_numpy(float)[:, None])[:, 0]
    return null_products(ranks, y, shuffled(design, config.resamples, rng, layers=True))[1]


def _varies(values: FloatArray) -> bool:
    there = values[np.isfinite(values)]
    return len(there) > 1 and bool(np.ptp(there) > 1e-13 * np.abs(there).max())


def _ranks(values: FloatArray) -> FloatArray:
    """Mid-ranks of each column between -1/2 and 1/2, mean zero; NaN stays NaN."""
    ranks = rankdata(values, axis=0, nan_policy="omit")
    count = np.isfinite(values).sum(0)
    centred: FloatArray = (ranks - (count + 1.0) / 2.0) / np.maximum(count, 1)
    return centred


def _correlations(metrics: FloatArray, values: FloatArray) -> FloatArray:
    here = np.isfinite(metrics)
    m = np.where(here, metrics, 0.0)
    size = np.sqrt((m**2).sum(0) * (here * values[:, None] ** 2).sum(0))
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.clip(np.where(size > 0, (m.T @ values) / size, 0.0), -1.0, 1.0)


def _area(values: FloatArray, labels: FloatArray) -> FloatArray:
    """``2 A - 1`` of each column: how often a positive point lies above a negative one, less how often below."""
    labelled = values[labels != 0]
    up = np.where(np.isfinite(labelled), (labels[labels != 0] == 1)[:, None], False)
    down = np.where(np.isfinite(labelled), (labels[labels != 0] == -1)[:, None], False)
    ranks = rankdata(labelled, axis=0, nan_policy="omit") if len(labelled) else labelled
    ups, downs = up.sum(0), down.sum(0)
    with np.errstate(invalid="ignore", divide="ignore"):
        area = (np.where(up, ranks, 0.0).sum(0) - ups * (ups + 1) / 2) / (ups * downs)
    signed: FloatArray = np.where((ups > 0) & (downs > 0), 2.0 * area - 1.0, np.nan)
    return signed


def _mean(values: FloatArray) -> FloatArray:
    """Mean of each column over what is defined; NaN where nothing is."""
    here = np.isfinite(values)
    with np.errstate(invalid="ignore", divide="ignore"):
        means: FloatArray = np.where(here, values, 0.0).sum(0) / here.sum(0)
    return means
