"""The audit of a study: which layers are robust or critical, and what each metric is worth.

Follows robust-and-critical-layers: over the changed networks of a layer, how a metric goes with performance; whether
it stays put when performance does; whether it tells robust from critical layers and re-initialised from
re-randomised ones. Pooled, per layer and per layer type, each number with its interval.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from strati.errors import BadInputError
from strati.intervene.judging.retained import classify, retained_share
from strati.intervene.judging.statistics import cluster, estimate, kendall, linear_rmse, spearman, weights_of
from strati.intervene.judging.verdicts import Verdict, verdict_of
from strati.intervene.study import Study, load_study
from strati.types import Result

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import RenderableType

Interval = tuple[float, float] | None


@dataclass(frozen=True)
class AuditConfig:
    """Thresholds and resampling.

    Args:
        robust: At least this share of performance retained is robust.
        critical: At most this share is critical.
        resamples: Bootstrap resamples.
        level: Level of the confidence intervals.
        seed: Seed of the bootstrap.
        invariant: A metric that moves less than this share of itself on robust points is invariant.
        strong: |Spearman| from which a metric is said to predict performance.
        separates: Area under the ROC curve from which it is said to tell two kinds apart.
    """

    robust: float = 0.9
    critical: float = 0.5
    resamples: int = 1000
    level: float = 0.95
    seed: int = 0
    invariant: float = 0.1
    strong: float = 0.5
    separates: float = 0.8

    def check(self) -> None:
        """Refuse thresholds that contradict each other.

        Raises:
            BadInputError: They do.
        """
        if not self.critical < self.robust:
            raise BadInputError(
                "audit", f"critical ({self.critical:g}) has to be below robust ({self.robust:g})"
            )
        if not (self.resamples >= 1 and 0 < self.level < 1):
            raise BadInputError("audit", "needs at least one resample and a level between 0 and 1")


@dataclass(frozen=True)
class MetricRow:
    """How a metric goes with performance, over one layer's points, one type's, or all (``layer`` is ``None``)."""

    metric: str
    layer: str | None
    spearman: float | None
    spearman_ci: Interval
    kendall: float | None
    kendall_ci: Interval
    rmse: float | None
    rmse_ci: Interval
    n: int
    resampled: str


@dataclass(frozen=True)
class MeanRow:
    """The paper's figure of merit: a metric's correlations averaged over the layers."""

    metric: str
    spearman: float | None
    kendall: float | None
    rmse: float | None
    layers: int


@dataclass(frozen=True)
class LayerRow:
    """What an intervention does to a layer's network, over networks and draws."""

    layer: str
    intervention: str
    performance_mean: float | None
    performance_sem: float | None
    retained: float | None
    n: int
    layer_class: str = field(metadata={"json": "class"})

    def as_dict(self) -> dict[str, Any]:
        """The JSON form: ``class`` is no name for a field."""
        found = dict(vars(self))
        found["class"] = found.pop("layer_class")
        return found


@dataclass(frozen=True)
class Audit(Result):
    """What a study says of its metrics."""

    verb: ClassVar[str] = "audit"

    study: Study
    metrics: tuple[MetricRow, ...]
    means: tuple[MeanRow, ...]
    layers: tuple[LayerRow, ...]
    verdicts: tuple[Verdict, ...]
    options: AuditConfig

    @property
    def failed(self) -> int:
        """Points that failed and are left out."""
        return self.study.failed

    def payload(self) -> dict[str, Any]:
        """Metrics, layers, verdicts, and the points they come from."""
        return {
            "study": {"name": self.study.name, "store": self.study.store, "units": self.study.units},
            "metrics": self.metrics,
            "means": self.means,
            "failed": self.failed,
            "layers": [row.as_dict() for row in self.layers],
            "verdicts": self.verdicts,
            "performance": dict(self.study.performance) | {"intact": intact_performance(self.study)},
            "thresholds": self.options,
            "points": [_point(row, self.study.metrics) for row in self.study.rows if row["status"] == "done"],
        }

    def frame(self) -> pd.DataFrame:
        """One line per metric and layer, type or pool."""
        import pandas as pd

        return pd.DataFrame([vars(row) for row in self.metrics], columns=list(MetricRow.__dataclass_fields__))

    def summary(self) -> RenderableType:
        """Layers and verdicts."""
        from strati.intervene.show import audit_summary

        return audit_summary(self)

    def plot(self, *, metric: str = "alpha", **options: Any) -> Any:
        """Performance against a metric, one panel per layer, with the numbers of the audit."""
        return self.study.plot(metric=metric, **options)


def audit(source: str | Path | Study, *, options: AuditConfig | None = None) -> Audit:
    """Say what the metrics of a study are worth.

    Args:
        source: The study, or the folder it is kept in; an unfinished one is audited as far as it got.
        options: Thresholds, resamples, seed.

    Raises:
        BadInputError: No study there, or no point of it succeeded.

    Examples:
        >>> rows = [
        ...     {"network": f"n{i}", "layer": "fc1", "type": "linear", "intervention": kind, "draw": 0,
        ...      "status": "done", "performance": 0.9 - 0.8 * (kind == "rerandomise") - 0.01 * i,
        ...      "intact_performance": 0.95, "moved": i + 9.0 * (kind == "rerandomise")}
        ...     for i in range(8) for kind in ("reinitialise", "rerandomise")]
        >>> measure = {"name": "accuracy", "chance": 0.1, "higher_is_better": True}
        >>> found = audit(Study("example", measure, tuple(rows), 16))
        >>> [(row.layer, row.intervention, row.layer_class) for row in found.layers]
        [('fc1', 'reinitialise', 'robust'), ('fc1', 'rerandomise', 'critical')]
        >>> found.metrics[0].metric, found.metrics[0].spearman
        ('moved', -1.0)
    """
    options = options or AuditConfig()
    options.check()
    study = source if isinstance(source, Study) else load_study(source)
    table = study.frame()
    table = table[table["status"] == "done"].reset_index(drop=True)
    if not (table["intervention"] != "intact").any():
        why = f"no changed layer has been measured ({study.failed} of {study.units} points failed); run the study first"
        raise BadInputError(study.store or study.name, why)
    table["retained"] = retained_share(table, study.performance)
    rows = [row for name in study.metrics for row in _metric_rows(table, name, options)]
    layers = _layer_rows(table, options)
    verdicts = [verdict_of(table, name, rows, study.performance, options) for name in study.metrics]
    means = [_mean_row(name, rows) for name in study.metrics]
    return Audit(
        study, tuple(rows), tuple(means), tuple(layers), tuple(v for v in verdicts if v is not None), options
    )


def intact_performance(study: Study) -> float | None:
    """Mean performance of the networks as trained."""
    by_network = {row["network"]: row["intact_performance"] for row in study.rows if row["status"] == "done"}
    return float(np.mean(list(by_network.values()))) if by_network else None


def _metric_rows(table: pd.DataFrame, name: str, options: AuditConfig) -> list[MetricRow]:
    points = table[(table["intervention"] != "intact") & table[name].notna()]
    groups: list[tuple[str | None, pd.DataFrame]] = [(None, points)]
    groups += [(f"type:{kind}", part) for kind, part in points.groupby("type", sort=True)]
    groups += [(str(layer), part) for layer, part in points.groupby("layer", sort=True)]
    return [_metric_row(name, where, part, options) for where, part in groups]


def _metric_row(name: str, where: str | None, points: pd.DataFrame, options: AuditConfig) -> MetricRow:
    x, y = points[name].to_numpy(float), points["performance"].to_numpy(float)
    if len(x) < 3:  # two points always lie on a line
        return MetricRow(name, where, None, None, None, None, None, None, len(x), "points")
    unit, clusters = cluster(points)
    weights = weights_of(clusters, options.resamples, options.seed, name, where)
    found = [estimate(f(x, y, weights), options.level) for f in (spearman, kendall, linear_rmse)]
    rho, tau, rmse = found
    return MetricRow(
        *(name, where, rho.value, rho.interval, tau.value, tau.interval, rmse.value, rmse.interval),
        len(x),
        unit,
    )


def _mean_row(name: str, rows: list[MetricRow]) -> MeanRow:
    own = [r for r in rows if r.metric == name and r.layer is not None and not r.layer.startswith("type:")]
    kept = [r for r in own if r.spearman is not None]

    def mean(values: list[float | None]) -> float | None:
        there = [v for v in values if v is not None]
        return float(np.mean(there)) if there else None

    return MeanRow(
        name,
        mean([r.spearman for r in kept]),
        mean([r.kendall for r in kept]),
        mean([r.rmse for r in kept]),
        len(kept),
    )


def _layer_rows(table: pd.DataFrame, options: AuditConfig) -> list[LayerRow]:
    found = []
    changed = table[table["intervention"] != "intact"]
    for (layer, kind), part in changed.groupby(["layer", "intervention"], sort=True):
        share = float(part["retained"].mean()) if part["retained"].notna().any() else None
        sem = (
            float(part["performance"].to_numpy(float).std(ddof=1) / len(part) ** 0.5)
            if len(part) > 1
            else None
        )
        mean = float(part["performance"].mean())
        found.append(
            LayerRow(
                str(layer),
                str(kind),
                mean,
                sem,
                share,
                len(part),
                classify(share, options.robust, options.critical),
            )
        )
    return found


def _point(row: Mapping[str, Any], metrics: tuple[str, ...]) -> dict[str, Any]:
    place = {k: row[k] for k in ("network", "layer", "type", "intervention", "draw", "performance")}
    return place | {"metrics": {name: row.get(name) for name in metrics}}
