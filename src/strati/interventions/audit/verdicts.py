"""A verdict on each metric: four questions of the paper answered, a recommendation, one line a person can act on.

An answer is ``True`` when the evidence counts after paying for the number of metrics, ``False`` when the interval rules
it out, and ``None`` when the study cannot tell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from strati.interventions.audit.evidence import LEAST, Evidence

if TYPE_CHECKING:
    import pandas as pd

    from strati.core.results import FloatArray
    from strati.interventions.audit.audit import AuditConfig, MetricRow

Recommendation = Literal["use", "use-with-care", "distinguish-only", "do-not-use", "unknown"]

_NAMED = 4
"""Parts of a study that a sentence names."""

WORSENS = (
    *("distance", "relative_distance", "activation_disagreement", "js_divergence"),
    *("fisher_gradient", "kl_direct"),
)
"""Metrics that measure damage: more of them should go with worse performance."""


@dataclass(frozen=True)
class Verdict:
    """Answers about one metric; ``None`` where the study cannot tell.

    ``intervention`` is the one whose points were judged, ``None`` for all of them together. The recommendation rests on
    ``spearman_within_interventions``, the strongest rank correlation among layers that were changed in the same way;
    where that is ``None`` (no correlation over all points, or too few within one intervention) on all points.
    """

    metric: str
    invariant: bool | None
    separates_robust_from_critical: bool | None
    predicts_performance: bool | None
    tells_reinitialised_from_rerandomised: bool | None
    text: str
    recommendation: Recommendation
    intervention: str | None
    n: int
    typical_change: float | None
    robust_critical_auc: float | None
    robust_critical_auc_ci: tuple[float, float] | None
    reinitialised_rerandomised_auc: float | None
    reinitialised_rerandomised_auc_ci: tuple[float, float] | None
    spearman_within_layers: float | None
    spearman_within_layers_ci: tuple[float, float] | None
    spearman_within_types: float | None
    unexpected_sign: bool
    spearman_within_interventions: float | None
    correlates_within_interventions: bool | None
    failed_in: tuple[str, ...] = ()


@dataclass(frozen=True)
class MetricCase:
    """What a verdict is made of.

    ``parts`` are the correlations in each layer, layer type and intervention, ``by_intervention`` those over all and
    within layers of each intervention that has enough points, ``significant_in`` the interventions within which the
    correlation is significant; ``interventions`` is how many the points come from.
    """

    evidence: Evidence
    pooled: MetricRow
    within_types: float | None
    change: float | None
    layers: int
    networks: int
    performance: Mapping[str, Any]
    config: AuditConfig
    parts: Sequence[tuple[str, float]] = ()
    by_intervention: Mapping[str, Sequence[float]] = field(default_factory=dict)
    significant_in: Sequence[str] = ()
    interventions: int = 1


def verdict_of(case: MetricCase, intervention: str | None) -> Verdict:
    """The verdict on one metric."""
    evidence, config = case.evidence, case.config
    predicts = _predicts(case)
    separates = _tells(
        evidence.robust_auc,
        evidence.robust_auc_ci,
        evidence.robust_auc_within,
        evidence.robust_counts,
        config,
    )
    tells = _tells(evidence.kinds_auc, evidence.kinds_auc_ci, None, evidence.kinds_count, config)
    invariant = None if case.change is None or evidence.n < LEAST else case.change <= config.invariant
    odd = _unexpected(case)
    inside = _correlates_within(case)
    advice = _advice(case, predicts, separates, tells, odd, inside)
    return Verdict(
        *(evidence.metric, invariant, separates, predicts, tells),
        _sentence(case, (predicts, separates, tells, invariant), advice, odd),
        *(advice, intervention, evidence.n, case.change),
        *(evidence.robust_auc, evidence.robust_auc_ci, evidence.kinds_auc, evidence.kinds_auc_ci),
        *(evidence.within, evidence.within_ci, case.within_types, odd),
        *(_within_interventions(case, inside), inside),
        tuple(name for name, _ in _failures(case)) if advice in ("use", "use-with-care") else (),
    )


def typical_changes(
    table: pd.DataFrame, points: pd.DataFrame, names: Sequence[str], config: AuditConfig
) -> dict[str, float | None]:
    """Median move of each metric on robust points, relative to its size on intact layers.

    A metric that is zero on every intact layer (a distance, a disagreement) is compared with its median on
    critical points instead. ``None`` where there is no robust point to look at.
    """
    place = ["network", "layer"]
    intact = table[table["intervention"] == "intact"].drop_duplicates(place).set_index(place)[list(names)]
    robust = points[points["retained"] >= config.robust]
    keys = robust.set_index(place).index
    before = np.abs(intact.reindex(keys).to_numpy(float))
    moved = np.abs(robust[list(names)].to_numpy(float) - intact.reindex(keys).to_numpy(float))
    critical = points[points["retained"] <= config.critical][list(names)].to_numpy(float)
    return {name: _change(moved[:, i], before[:, i], critical[:, i]) for i, name in enumerate(names)}


def _change(moved: FloatArray, before: FloatArray, critical: FloatArray) -> float | None:
    there = np.isfinite(moved)
    moved, before = moved[there], before[there]
    if len(moved) == 0:
        return None
    if (before > 0).any():
        return float(np.median(moved[before > 0] / before[before > 0]))
    sizes = np.abs(critical[np.isfinite(critical)])
    return float(np.median(moved) / np.median(sizes)) if len(sizes) and np.median(sizes) > 0 else None


def _predicts(case: MetricCase) -> bool | None:
    """A correlation that counts, is strong, and is there within layers too."""
    evidence, pooled, strong = case.evidence, case.pooled, case.config.strong
    if evidence.n < LEAST or pooled.spearman is None:
        return None
    inside = evidence.within is not None and evidence.within_ci is not None and evidence.slope_ci is not None
    if evidence.counts and _strength(case) >= strong:
        if not inside:
            return True
        assert evidence.slope is not None and evidence.slope_ci is not None
        sign = np.sign(_effect(case))
        most = max(evidence.slope_ci[0] * sign, evidence.slope_ci[1] * sign)
        return bool(evidence.slope * sign > 0 and most >= strong / 2)
    weak = pooled.spearman_ci is not None and max(map(abs, pooled.spearman_ci)) < strong
    if inside:
        assert evidence.within_ci is not None and evidence.slope_ci is not None
        nothing = max(map(abs, evidence.within_ci)) < strong and max(map(abs, evidence.slope_ci)) < strong / 2
        return False if nothing and (weak or case.networks > 1) else None
    # One value for each layer: what counts is the number of layers, not of points.
    ruled_out = evidence.between_ci is not None and max(map(abs, evidence.between_ci)) < strong
    return False if weak and ruled_out else None


def _effect(case: MetricCase) -> float:
    """The correlation that is judged: the pooled one, or the one within layers where that is stronger."""
    pooled, within = case.pooled.spearman or 0.0, case.evidence.within or 0.0
    return within if abs(within) > abs(pooled) else pooled


def _strength(case: MetricCase) -> float:
    return abs(_effect(case))


def _tells(
    area: float | None,
    interval: tuple[float, float] | None,
    within: float | None,
    counts: bool,
    config: AuditConfig,
) -> bool | None:
    """Whether two kinds of points are told apart."""
    if area is None:
        return None
    sides = [area] if within is None or (within - 0.5) * (area - 0.5) < 0 else [area, within]
    clear = max(max(a, 1.0 - a) for a in sides) >= config.separates
    if counts and clear:
        return True
    ruled_out = (
        interval is not None and 1.0 - config.separates < interval[0] <= interval[1] < config.separates
    )
    return False if ruled_out and not clear else None


def _unexpected(case: MetricCase) -> bool:
    """A measure of damage that is larger where performance is better."""
    if case.evidence.metric not in WORSENS or not case.evidence.counts:
        return False
    better = 1.0 if case.performance["higher_is_better"] else -1.0
    return _effect(case) * better > 0


def _within_interventions(case: MetricCase, inside: bool | None) -> float | None:
    """The strongest correlation among layers changed in the same way; ``None`` where the verdict does not rest on it.

    It does not where there is no correlation over all points, or where the points of one intervention are too few.
    """
    if inside is None or not (case.evidence.counts or case.evidence.robust_counts):
        return None
    if case.interventions < 2:
        return _effect(case)
    sign = float(np.sign(_effect(case)))
    kinds = case.significant_in if inside else case.by_intervention
    rhos = [rho for kind in kinds for rho in case.by_intervention.get(kind, ())]
    return max(rhos, key=lambda rho: sign * rho, default=None)


def _correlates_within(case: MetricCase) -> bool | None:
    """Whether the correlation holds among layers changed in the same way; ``None`` where the points cannot tell.

    Within at least one intervention it has to be strong and significant: otherwise the metric may only recognise the
    intervention. Where it is strong but not significant, and something of it is left within layers, more points are
    needed.
    """
    if case.interventions < 2:
        return True
    if not case.by_intervention:
        return None
    sign, threshold = float(np.sign(_effect(case))), case.config.strong
    strong = [k for k, rhos in case.by_intervention.items() if max(sign * rho for rho in rhos) >= threshold]
    if any(kind in case.significant_in for kind in strong):
        return True
    apart = case.evidence.apart
    return None if strong and (apart is None or sign * apart >= threshold / 2) else False


def _advice(
    case: MetricCase,
    predicts: bool | None,
    separates: bool | None,
    tells: bool | None,
    odd: bool,
    inside: bool | None,
) -> Recommendation:
    correlates = case.evidence.counts and _strength(case) >= case.config.strong
    if (correlates or separates) and inside is False:
        return "distinguish-only"
    if predicts and inside and separates is not False and not odd:
        return "use"
    if correlates or separates:
        return "use-with-care"
    if tells:
        return "distinguish-only"
    if case.pooled.spearman is None and case.evidence.n >= LEAST:  # the same everywhere
        return "do-not-use"
    return "do-not-use" if predicts is False else "unknown"


def _sentence(case: MetricCase, answers: tuple[bool | None, ...], advice: Recommendation, odd: bool) -> str:
    predicts, separates, _, invariant = answers
    name, what, evidence = case.evidence.metric, case.performance["name"], case.evidence
    if advice == "use":
        more = "and separates robust from critical layers" if separates else "within layers too"
        head = f"Use {name}: correlates with {what} {more}"
    elif advice == "use-with-care":
        head = f"Use {name} with care: {_care(case, predicts, separates, odd)}"
    elif advice == "distinguish-only":
        why = _none(predicts, what)
        if evidence.counts or evidence.robust_counts:
            why = f"among layers changed in the same way it does not correlate with {what}"
        head = f"Use {name} only to distinguish interventions: {why}"
    elif advice == "do-not-use":
        same = "it has the same value everywhere"
        head = f"Do not use {name}: {same if case.pooled.spearman is None else _none(predicts, what)}"
    else:
        head = f"Cannot tell from n = {evidence.n} whether {name} says anything about {what}"
        if (
            case.pooled.spearman is not None
            and abs(case.pooled.spearman) >= case.config.strong
            and evidence.n >= LEAST
        ):
            head += f" ({case.layers} layer(s) and {case.networks} network(s) are too few)"
    facts = _facts(case, invariant)
    lost = _failures(case) if advice in ("use", "use-with-care") else []
    if lost:
        more = f" and {len(lost) - _NAMED} more" if len(lost) > _NAMED else ""
        failures = ", ".join(f"{name} ({rho:.2f})" for name, rho in lost[:_NAMED])
        facts.append(f"fails in {failures}{more}")
    return f"{head} ({'; '.join(facts)})." if facts else f"{head}."


def _failures(case: MetricCase) -> list[tuple[str, float]]:
    """Where the correlation is not: parts in which it is less than half as strong as asked for, or turned round."""
    sign = float(np.sign(_effect(case)))
    weak = [(name, rho) for name, rho in case.parts if sign * rho < case.config.strong / 2]
    return sorted(weak, key=lambda pair: sign * pair[1])


def _care(case: MetricCase, predicts: bool | None, separates: bool | None, odd: bool) -> str:
    what = case.performance["name"]
    if odd:
        return f"the sign is unexpected: it measures damage, yet more of it goes with better {what}"
    if predicts and separates is False:
        return f"correlates with {what}, but does not separate robust from critical layers"
    if predicts:
        return f"correlates with {what}, but too few points show that within one intervention"
    if case.evidence.counts and _strength(case) >= case.config.strong:
        return f"correlates with {what} between layers, but not within them"
    return f"separates robust from critical layers, but no strong correlation with {what} was shown"


def _none(predicts: bool | None, what: str) -> str:
    return (
        f"does not correlate strongly with {what}"
        if predicts is False
        else f"no correlation with {what} was shown"
    )


def _facts(case: MetricCase, invariant: bool | None) -> list[str]:
    evidence, pooled = case.evidence, case.pooled
    facts = []
    if pooled.spearman is not None:
        facts.append(f"rho {pooled.spearman:.2f}{_ends(pooled.spearman_ci)}, n = {pooled.n}")
    if evidence.within is not None:
        facts.append(f"within layers {evidence.within:.2f}{_ends(evidence.within_ci)}")
    if (
        evidence.apart is not None
        and evidence.within is not None
        and abs(evidence.within) >= case.config.strong
    ):
        mostly = (
            ", so mostly the interventions' difference"
            if abs(evidence.apart) < abs(evidence.within) / 2
            else ""
        )
        facts.append(f"within one intervention {evidence.apart:.2f}{mostly}")
    if case.within_types is not None:
        rho = pooled.spearman or 0.0
        made = abs(rho) >= 0.3 and abs(case.within_types) < abs(rho) / 2
        facts.append(
            f"within layer types {case.within_types:.2f}"
            + (", so the types make the correlation" if made else "")
        )
    if evidence.robust_auc is not None:
        facts.append(f"robust/critical AUC {max(evidence.robust_auc, 1.0 - evidence.robust_auc):.2f}")
    if evidence.kinds_auc is not None:
        facts.append(f"re-init/re-rand AUC {max(evidence.kinds_auc, 1.0 - evidence.kinds_auc):.2f}")
    if case.change is not None:
        facts.append(
            f"changes by {100 * case.change:.0f} % where performance does not"
            + (" (invariant)" if invariant else "")
        )
    return facts


def _ends(interval: tuple[float, float] | None) -> str:
    return "" if interval is None else f" [{interval[0]:.2f}, {interval[1]:.2f}]"
