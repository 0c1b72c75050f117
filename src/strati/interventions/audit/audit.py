"""The audit of a study: which layers are robust or critical, and what each metric is worth.

Follows robust-and-critical-layers: over the changed networks of a layer, how a metric goes with performance; whether
it stays put when performance does; whether it tells robust from critical layers and re-initialised from
re-randomised ones. Pooled, per layer, per layer type and per intervention, each number with its interval.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

import numpy as np

from strati.core.display import natural
from strati.core.errors import BadInputError
from strati.core.options import resolve
from strati.core.results import Result, Tick, silent
from strati.interventions.audit.correlations import (
    classify,
    rank_correlations,
    retained_share,
    rmse_intervals,
)
from strati.interventions.audit.evidence import (
    LEAST,
    Evidence,
    PartEvidence,
    correlation_nulls,
    evidence_of,
    fisher,
    half_widths,
    significant_interventions,
)
from strati.interventions.audit.orders import OrderRow, order_rows
from strati.interventions.audit.verdicts import MetricCase, Verdict, typical_changes, verdict_of
from strati.interventions.kinds import RANDOM_VALUES
from strati.interventions.study import Study, load_study

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import RenderableType

    from strati.core.option_types import AuditOptions
    from strati.schemas.json_types import AuditFields

Interval = tuple[float, float] | None


@dataclass(frozen=True)
class AuditConfig:
    """Thresholds and shuffles.

    Args:
        robust: At least this share of performance retained is robust.
        critical: At most this share is critical.
        resamples: Shuffled studies that intervals and recommendations are held against.
        confidence: Coverage of the intervals.
        seed: Random seed.
        invariant: A metric that changes by less than this share of itself on robust points is invariant.
        strong: |Spearman| from which a metric is said to predict performance.
        separates: Area under the ROC curve from which it is said to tell two kinds apart.
        false_recommendation_rate: Probability that a study recommends any metric if none has to do with performance.
    """

    robust: float = 0.9
    critical: float = 0.5
    resamples: int = 1000
    confidence: float = 0.95
    seed: int = 0
    invariant: float = 0.1
    strong: float = 0.5
    separates: float = 0.8
    false_recommendation_rate: float = 0.02

    def check(self) -> None:
        """Refuse thresholds that contradict each other.

        Raises:
            BadInputError: They do.
        """
        if not self.critical < self.robust:
            raise BadInputError(
                "audit", f"critical ({self.critical:g}) has to be below robust ({self.robust:g})"
            )
        if not (self.resamples >= 1 and 0 < self.confidence < 1 and 0 < self.false_recommendation_rate < 1):
            why = "needs at least one resample, and a confidence and a rate of false praise between 0 and 1"
            raise BadInputError("audit", why)


@dataclass(frozen=True)
class MetricRow:
    """How a metric goes with performance, over one layer's points, one type's, or all (``layer`` is ``None``).

    ``intervention`` is the one whose points these are, ``None`` for all; ``resampled`` says what is shuffled for the
    intervals. ``spearman_within`` is the correlation within layers, of rows that hold several.
    """

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
    intervention: str | None = None
    spearman_within: float | None = None
    spearman_within_ci: Interval = None


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
    setting: str | None
    performance_mean: float | None
    performance_sem: float | None
    retained: float | None
    n: int
    layer_class: str = field(metadata={"json": "class"})

    def as_dict(self) -> dict[str, Any]:
        """The JSON form: ``class`` is no name for a field."""
        fields = dict(vars(self))
        fields["class"] = fields.pop("layer_class")
        return fields


@dataclass(frozen=True)
class Audit(Result):
    """What a study says of its metrics."""

    verb: ClassVar[str] = "audit"
    key_columns: ClassVar[tuple[str, ...]] = (
        "metric",
        "layer",
        "intervention",
        "spearman",
        "spearman_ci",
        "n",
    )

    study: Study
    metrics: tuple[MetricRow, ...]
    means: tuple[MeanRow, ...]
    layers: tuple[LayerRow, ...]
    verdicts: tuple[Verdict, ...]
    config: AuditConfig
    orders: tuple[OrderRow, ...] = ()

    @property
    def failed(self) -> int:
        """Points that failed and are left out."""
        return self.study.failed

    def payload(self) -> AuditFields:
        """Metrics, layers, verdicts, and the points they come from."""
        return {
            "study": {"name": self.study.name, "store": self.study.store, "units": self.study.units},
            "metrics": self.metrics,
            "means": self.means,
            "orders": self.orders,
            "failed": self.failed,
            "layers": [row.as_dict() for row in self.layers],
            "verdicts": self.verdicts,
            "performance": dict(self.study.performance) | {"intact": intact_performance(self.study)},
            "thresholds": self.config,
            "points": [_point(row, self.study.metrics) for row in self.study.rows if row["status"] == "done"],
        }

    def frame(self) -> pd.DataFrame:
        """One line per metric and layer, type or pool."""
        import pandas as pd

        return pd.DataFrame([vars(row) for row in self.metrics], columns=list(MetricRow.__dataclass_fields__))

    def summary(self) -> RenderableType:
        """Layers and verdicts."""
        from strati.interventions.audit.summary import audit_summary

        return audit_summary(self)

    def plot(self, *, metric: str | None = None, **options: Any) -> Any:
        """Performance against a metric, one panel per layer, with the numbers of the audit."""
        return self.study.plot(metric=metric, **options)


def audit(
    study: str | Path | Study,
    *,
    config: AuditConfig | None = None,
    tick: Tick = silent,
    **options: Unpack[AuditOptions],
) -> Audit:
    """Say what the metrics of a study are worth.

    Args:
        study: The study, or the folder it is kept in; an unfinished one is audited as far as it got.
        config: Thresholds, shuffles, seed.
        tick: Called after each intervention with its name, and after all of them pooled (``"pooled"``).
        **options: Fields of :class:`AuditConfig` by name; they win over ``config``.

    Raises:
        BadInputError: No study there, or no point of it succeeded.

    Examples:
        >>> rows = [
        ...     {"network": f"n{i}", "layer": "fc1", "type": "linear", "intervention": kind, "setting": None, "draw": 0,
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
    config = resolve(AuditConfig, config, options, of=audit)
    config.check()
    study = study if isinstance(study, Study) else load_study(study)
    table = study.frame()
    table = table[table["status"] == "done"].reset_index(drop=True)
    points = table[table["intervention"] != "intact"].reset_index(drop=True)
    if len(points) == 0:
        why = f"no changed layer has been measured ({study.failed} of {study.units} points failed); run the study first"
        raise BadInputError(study.store or study.name, why)
    table["retained"] = retained_share(table, study.performance)
    points = table[table["intervention"] != "intact"].reset_index(drop=True)
    parts: list[tuple[str | None, pd.DataFrame]] = [(None, points)]
    kinds = sorted(set(points["intervention"]))
    if len(kinds) > 1:
        parts += [(kind, points[points["intervention"] == kind].reset_index(drop=True)) for kind in kinds]
    names = study.metrics
    rows: list[MetricRow] = []
    verdicts: list[Verdict] = []
    evidence: dict[str | None, PartEvidence] = {}
    for kind, part in parts:
        rate = _share(kind, len(kinds)) * config.false_recommendation_rate
        evidence[kind] = evidence_of(part, names, config, rate, kind)
    by_kind = {kind: evidence[kind] for kind in kinds if kind in evidence}
    counting = [m for m, e in evidence[None].by_metric.items() if e.counts or e.robust_counts]
    significant = significant_interventions(by_kind, counting, config.false_recommendation_rate)
    for kind, part in parts:
        by_metric = evidence[kind].by_metric
        part_rows = [
            row for group in _groups(part) for row in _metric_rows(*group, kind, names, config, by_metric)
        ]
        rows += part_rows
        verdicts += _verdicts(table, part, kind, part_rows, by_metric, study.performance, config, significant)
        tick(kind or "pooled")
    means = [_mean_row(name, rows) for name in names]
    order = {name: i for i, name in enumerate(names)}
    rows.sort(key=lambda row: order[row.metric])
    verdicts.sort(key=lambda verdict: order[verdict.metric])
    edited = points[~points["intervention"].isin(RANDOM_VALUES)]
    orders = order_rows(edited, names, study.performance, config)
    layers = tuple(_layer_rows(table, config))
    return Audit(study, tuple(rows), tuple(means), layers, tuple(verdicts), config, tuple(orders))


def _share(intervention: str | None, count: int) -> float:
    """The part of the rate of false praise that the pooled verdicts may use up; the rest is the interventions'."""
    if count == 1:
        return 1.0
    return 0.8 if intervention is None else 0.2 / count


def intact_performance(study: Study) -> float | None:
    """Mean performance of the networks as trained."""
    by_network = {row["network"]: row["intact_performance"] for row in study.rows if row["status"] == "done"}
    return float(np.mean(list(by_network.values()))) if by_network else None


def _groups(points: pd.DataFrame) -> list[tuple[str | None, pd.DataFrame]]:
    groups: list[tuple[str | None, pd.DataFrame]] = [(None, points)]
    groups += [(f"type:{kind}", part) for kind, part in points.groupby("type", sort=True)]
    layers = {str(layer): part for layer, part in points.groupby("layer", sort=False)}
    return groups + [(layer, layers[layer]) for layer in sorted(layers, key=natural)]


def _metric_rows(
    where: str | None,
    points: pd.DataFrame,
    intervention: str | None,
    names: tuple[str, ...],
    config: AuditConfig,
    evidence: Mapping[str, Evidence],
) -> list[MetricRow]:
    values, y = points[list(names)].to_numpy(float), points["performance"].to_numpy(float)
    nulls = correlation_nulls(points, values, config, intervention, where)
    # to first order tau is 2/3 of rho in shuffled studies
    wide, narrow = half_widths(nulls, config.confidence), half_widths(2.0 / 3.0 * nulls, config.confidence)
    errors = rmse_intervals(points, values, y, config, intervention, where)
    rhos, taus = rank_correlations(values, y)
    resampled = _resampled(points)
    rows = []
    for i, name in enumerate(names):
        count = int(np.isfinite(values[:, i]).sum())
        if count < 3:  # two points always lie on a line
            rows.append(MetricRow(name, where, *(None,) * 6, count, resampled, intervention))
            continue
        rho = float(rhos[i]) if np.isfinite(rhos[i]) else None
        tau = None if rho is None else float(taus[i])
        inside = evidence[name] if where is None else None
        rows.append(
            MetricRow(
                *(name, where, rho, fisher(rho, wide[i]), tau, fisher(tau, narrow[i])),
                *(errors[i].value, errors[i].interval, count, resampled, intervention),
                *(None if inside is None else inside.within, None if inside is None else inside.within_ci),
            )
        )
    return rows


def _resampled(points: pd.DataFrame) -> str:
    """What differs between the shuffled studies that the intervals come from."""
    kinds = [("layers", points.groupby("type")["layer"].nunique().max() > 1)]
    kinds += [("networks", points["network"].nunique() > 1)]
    kinds += [("points", points.groupby(["network", "layer"]).size().max() > 1)]
    return ", ".join(name for name, there in kinds if there) or "nothing"


def _verdicts(
    table: pd.DataFrame,
    points: pd.DataFrame,
    intervention: str | None,
    rows: list[MetricRow],
    evidence_by_metric: Mapping[str, Evidence],
    performance: Mapping[str, Any],
    config: AuditConfig,
    significant: Mapping[str, tuple[str, ...]],
) -> list[Verdict]:
    pooled = {row.metric: row for row in rows if row.layer is None}
    size = points["layer"].nunique(), points["network"].nunique()
    changes = typical_changes(table, points, list(evidence_by_metric), config)
    by_kind = {str(kind): part for kind, part in points.groupby("intervention")}
    made = []
    for name, evidence in evidence_by_metric.items():
        if evidence.n == 0:
            continue
        types = [r for r in rows if r.metric == name and r.layer is not None and r.layer.startswith("type:")]
        parts = _parts(name, points, [r for r in rows if r.metric == name and r.layer is not None])
        case = MetricCase(
            evidence,
            pooled[name],
            _within_types(types),
            changes[name],
            *size,
            performance,
            config,
            parts,
            {kind: rhos for kind, part in by_kind.items() if (rhos := _strengths(name, part))},
            significant.get(name, ()),
            len(by_kind),
        )
        made.append(verdict_of(case, intervention))
    return made


def _parts(name: str, points: pd.DataFrame, rows: list[MetricRow]) -> list[tuple[str, float]]:
    """The correlation in every layer, layer type and intervention that has enough points to show one."""
    parts = [(str(r.layer), r.spearman) for r in rows if r.spearman is not None and r.n >= LEAST]
    if points["intervention"].nunique() > 1:
        parts += _by_intervention(name, points).items()
    return parts


def _by_intervention(name: str, points: pd.DataFrame) -> dict[str, float]:
    """The correlation over the points of each intervention that has enough of them; zero for a constant metric."""
    correlations = {}
    for kind, part in points.groupby("intervention"):
        defined = part[part[name].notna()]
        if len(defined) >= LEAST:
            columns = defined[[name]].to_numpy(float), defined["performance"].to_numpy(float)
            rho = float(rank_correlations(*columns)[0][0])
            correlations[str(kind)] = rho if np.isfinite(rho) else 0.0
    return correlations


def _strengths(name: str, points: pd.DataFrame) -> list[float]:
    """The correlation over the points of one intervention, and the same within its layers; none for few points."""
    defined = points[points[name].notna()]
    if len(defined) < LEAST:
        return []
    ranks = defined.groupby("layer")[[name, "performance"]].rank(pct=True)
    centred = (ranks - ranks.groupby(defined["layer"]).transform("mean")).to_numpy(float)
    size = float(np.sqrt((centred**2).sum(0).prod()))
    within = float(centred.prod(1).sum()) / size if size > 0 else 0.0
    return [*_by_intervention(name, defined).values(), within]


def _within_types(types: list[MetricRow]) -> float | None:
    """Mean correlation within layer types, weighted by their points; ``None`` when there is one type only."""
    pairs = [(r.spearman, r.n) for r in types if r.spearman is not None]
    if len(types) < 2 or not pairs:
        return None
    return float(np.average([rho for rho, _ in pairs], weights=[n for _, n in pairs]))


def _mean_row(name: str, rows: list[MetricRow]) -> MeanRow:
    layer_rows = [r for r in rows if r.metric == name and r.intervention is None]
    layer_rows = [r for r in layer_rows if r.layer is not None and not r.layer.startswith("type:")]
    defined = [r for r in layer_rows if r.spearman is not None]

    def mean(values: list[float | None]) -> float | None:
        there = [v for v in values if v is not None]
        return float(np.mean(there)) if there else None

    return MeanRow(
        name,
        mean([r.spearman for r in defined]),
        mean([r.kendall for r in defined]),
        mean([r.rmse for r in defined]),
        len(defined),
    )


def _layer_rows(table: pd.DataFrame, config: AuditConfig) -> list[LayerRow]:
    layer_rows = []
    changed = table[table["intervention"] != "intact"]
    settings = [text if isinstance(text, str) else "" for text in changed["setting"]]
    places = changed.assign(setting=settings).groupby(["layer", "intervention", "setting"])
    groups = {(str(layer), str(kind), str(setting)): part for (layer, kind, setting), part in places}
    for layer, kind, setting in sorted(groups, key=lambda key: (natural(key[0]), key[1], natural(key[2]))):
        part = groups[layer, kind, setting]
        share = float(part["retained"].mean()) if part["retained"].notna().any() else None
        sem = (
            float(part["performance"].to_numpy(float).std(ddof=1) / len(part) ** 0.5)
            if len(part) > 1
            else None
        )
        mean = float(part["performance"].mean())
        layer_rows.append(
            LayerRow(
                layer,
                kind,
                setting or None,
                mean,
                sem,
                share,
                len(part),
                classify(share, config.robust, config.critical),
            )
        )
    return layer_rows


def _point(row: Mapping[str, Any], metrics: tuple[str, ...]) -> dict[str, Any]:
    names = ("network", "layer", "type", "intervention", "setting", "draw", "performance")
    place = {k: row.get(k) for k in names}
    return place | {"metrics": {name: row.get(name) for name in metrics}}
