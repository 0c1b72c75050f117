"""A verdict on each metric: four questions of the paper answered, and one line a person can act on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.intervene.judging.statistics import Estimate, cluster, estimate, roc_area, weights_of

if TYPE_CHECKING:
    import pandas as pd

    from strati.intervene.judging.audit import AuditConfig, MetricRow


_FEWEST = 5
"""Points of each kind that it takes to say whether a metric tells the kinds apart."""


@dataclass(frozen=True)
class Verdict:
    """Answers about one metric; ``None`` where the study cannot say."""

    metric: str
    invariant: bool | None
    separates_robust_from_critical: bool | None
    predicts_performance: bool | None
    tells_reinitialised_from_rerandomised: bool | None
    text: str
    typical_change: float | None
    robust_critical_auc: float | None
    robust_critical_auc_ci: tuple[float, float] | None
    reinitialised_rerandomised_auc: float | None
    reinitialised_rerandomised_auc_ci: tuple[float, float] | None
    spearman_within_types: float | None


def verdict_of(
    table: pd.DataFrame,
    name: str,
    rows: Sequence[MetricRow],
    performance: Mapping[str, Any],
    options: AuditConfig,
) -> Verdict | None:
    """The verdict on one metric; ``None`` for one that has no value on any changed layer."""
    points = table[(table["intervention"] != "intact") & table[name].notna()]
    if len(points) == 0:
        return None
    own = [row for row in rows if row.metric == name]
    pooled = next(row for row in own if row.layer is None)
    within = _within_types(own)
    change = _typical_change(table, points, name, options)
    robust = _tells(points, name, _robust_or_critical(points, options), options, "robust")
    kinds = points["intervention"].map({"reinitialise": 0.0, "rerandomise": 1.0})
    told = _tells(points, name, kinds, options, "intervention", by_layer=True)
    invariant = None if change is None else change <= options.invariant
    separates, tells = _enough(robust, options), _enough(told, options)
    predicts = _predicts(pooled, within, options)
    text = _sentence(
        name, pooled, within, (invariant, separates, predicts, tells), (change, robust, told), performance
    )
    return Verdict(
        *(name, invariant, separates, predicts, tells, text, change),
        *(robust.value, robust.interval, told.value, told.interval, within),
    )


def _typical_change(
    table: pd.DataFrame, points: pd.DataFrame, name: str, options: AuditConfig
) -> float | None:
    """Median move of the metric on robust points, relative to its size on intact layers.

    A metric that is zero on every intact layer (a distance, a disagreement) is compared with its median on
    critical points instead.
    """
    robust = points[points["retained"] >= options.robust]
    if len(robust) == 0:
        return None
    place = ["network", "layer"]
    intact = table[table["intervention"] == "intact"].set_index(place)[name]
    intact = intact[~intact.index.duplicated()]
    before = intact.reindex(robust.set_index(place).index).to_numpy(float)
    moved = np.abs(robust[name].to_numpy(float) - before)
    moved, before = moved[np.isfinite(moved)], np.abs(before[np.isfinite(moved)])
    if len(moved) == 0:
        return None
    if (before > 0).any():
        return float(np.median(moved[before > 0] / before[before > 0]))
    critical = points[points["retained"] <= options.critical][name].abs().median()
    return float(np.median(moved) / critical) if critical > 0 else None


def _robust_or_critical(points: pd.DataFrame, options: AuditConfig) -> pd.Series[float]:
    """One for robust points, zero for critical ones, NaN between."""
    share = points["retained"]
    return (
        share.where(share.isna(), np.nan)
        .mask(share >= options.robust, 1.0)
        .mask(share <= options.critical, 0.0)
    )


def _tells(
    points: pd.DataFrame, name: str, label: Any, options: AuditConfig, what: str, *, by_layer: bool = False
) -> Estimate:
    """Area under the ROC curve of the metric as a test of ``label``; by layer, its mean over the layers."""
    kept = points.assign(label=label)
    kept = kept[kept["label"].notna()]
    counts = kept["label"].value_counts()
    if len(counts) < 2 or counts.min() < _FEWEST:
        return Estimate(None, None)
    weights = weights_of(cluster(kept)[1], options.resamples, options.seed, name, what)
    x, positive = kept[name].to_numpy(float), kept["label"].to_numpy(float)
    if not by_layer:
        return estimate(roc_area(x, positive, weights), options.level)
    layers = kept["layer"].to_numpy()
    areas = np.stack(
        [roc_area(x[layers == k], positive[layers == k], weights[:, layers == k]) for k in np.unique(layers)]
    )
    there = np.isfinite(areas)
    with np.errstate(invalid="ignore"):
        return estimate(np.where(there, areas, 0.0).sum(0) / there.sum(0), options.level)


def _enough(area: Estimate, options: AuditConfig) -> bool | None:
    if area.value is None:
        return None
    clear = area.interval is not None and not area.interval[0] <= 0.5 <= area.interval[1]
    return clear and max(area.value, 1.0 - area.value) >= options.separates


def _within_types(rows: Sequence[MetricRow]) -> float | None:
    """Mean correlation within layer types, weighted by their points; ``None`` when there is one type only."""
    types = [r for r in rows if r.layer is not None and r.layer.startswith("type:")]
    kept = [(r.spearman, r.n) for r in types if r.spearman is not None]
    if len(types) < 2 or not kept:
        return None
    return float(np.average([rho for rho, _ in kept], weights=[n for _, n in kept]))


def _predicts(pooled: MetricRow, within: float | None, options: AuditConfig) -> bool | None:
    """A strong pooled correlation, sure of its sign, that does not vanish within layer types."""
    if pooled.spearman is None:
        return None
    sure = pooled.spearman_ci is not None and not pooled.spearman_ci[0] <= 0.0 <= pooled.spearman_ci[1]
    kept = within is None or within * np.sign(pooled.spearman) >= options.strong / 2
    return bool(sure and abs(pooled.spearman) >= options.strong and kept)


def _sentence(
    name: str,
    pooled: MetricRow,
    within: float | None,
    answers: tuple[bool | None, ...],
    numbers: tuple[float | None, Estimate, Estimate],
    performance: Mapping[str, Any],
) -> str:
    invariant, separates, predicts, tells = answers
    change, robust, told = numbers
    what = performance["name"]
    good = [
        word for word, yes in (("performance", predicts), ("robust from critical layers", separates)) if yes
    ]
    if predicts and separates:
        head = f"Use {name}: it goes with {what} and tells robust from critical layers"
    elif good:
        head = f"Use {name} with care: it says something about {good[0]} but not about all that was asked"
    elif tells:
        head = f"Use {name} only to tell re-initialised from re-randomised layers; it does not predict {what}"
    elif predicts is None and separates is None:
        head = f"Nothing can be said of {name} from this study: more points are needed"
    else:
        head = f"Do not judge layers by {name}"
    facts = []
    if pooled.spearman is not None:
        interval = (
            ""
            if pooled.spearman_ci is None
            else f" [{pooled.spearman_ci[0]:.2f}, {pooled.spearman_ci[1]:.2f}]"
        )
        facts.append(f"rho {pooled.spearman:.2f}{interval}, n {pooled.n}")
    if within is not None and pooled.spearman is not None and abs(pooled.spearman) >= 0.3:
        made = not predicts and abs(within) < abs(pooled.spearman) / 2
        facts.append(
            f"{within:.2f} within layer types" + (", so the types make the correlation" if made else "")
        )
    if robust.value is not None:
        facts.append(f"robust/critical AUC {max(robust.value, 1.0 - robust.value):.2f}")
    if told.value is not None:
        facts.append(f"re-init/re-rand AUC {max(told.value, 1.0 - told.value):.2f}")
    if change is not None:
        facts.append(
            f"moves {100 * change:.0f} % where performance stays" + (" (invariant)" if invariant else "")
        )
    return f"{head} ({'; '.join(facts)})." if facts else f"{head}."
