"""Audits as text: the answer first, then the numbers it comes from."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from strati.core.display import Column, table
from strati.interventions.audit.evidence import LEAST

if TYPE_CHECKING:
    from rich.console import RenderableType

    from strati.interventions.audit.audit import Audit
    from strati.interventions.audit.verdicts import Verdict

_ORDER = ("use", "use-with-care", "distinguish-only", "do-not-use", "unknown")
_NAMED = 4
"""Metrics that a line names before it counts the rest."""
_LONGEST = 80
"""Characters of metrics in the first sentence."""


def audit_summary(audit: Audit) -> RenderableType:
    """Which metrics to use, grouped by verdict; where points are too few, one line and how many are needed."""
    from rich.console import Group
    from rich.text import Text

    pooled = [verdict for verdict in audit.verdicts if verdict.intervention is None]
    points = [r for r in audit.study.rows if r["status"] == "done" and r["intervention"] != "intact"]
    lines: list[Any] = [Text(line) for line in (*_order_lines(audit), *_answer(audit, pooled, points))]
    if audit.orders:
        lines.append(_order_table(audit))
    judged = [verdict for verdict in pooled if verdict.recommendation != "unknown"]
    if judged:
        lines.append(_metric_table(audit, judged))
    if len({(row.intervention, row.setting) for row in audit.layers}) <= _NAMED:
        lines.append(_layer_table(audit))
    if audit.failed:
        lines.append(Text(f"{audit.failed} of {audit.study.units} points failed and are left out"))
    return Group(*lines)


def _order_lines(audit: Audit) -> list[str]:
    """For each intervention the score that orders its layers or blocks best, or that none does."""
    lines = []
    for kind in dict.fromkeys(row.intervention for row in audit.orders):
        rows = [row for row in audit.orders if row.intervention == kind and row.across != "settings"]
        if not rows:
            continue
        best = rows[0]
        if best.significant:
            low, high = best.spearman_ci
            rho = f"rho {best.spearman:.2f}, {low:.2f} to {high:.2f}"
            lines.append(f"{kind}: choose {best.across} by {best.metric} ({rho}).")
        else:
            name = audit.study.performance["name"]
            lines.append(f"{kind}: no score is shown to order the {best.n} {best.across} like the {name}.")
    return lines


def _order_table(audit: Audit) -> Any:
    """The strongest scores of each intervention."""
    columns = (
        *(Column("intervention", keep=True), Column("orders"), Column("score", keep=True)),
        *(Column("rho", right=True, keep=True), Column("interval", right=True), Column("best", right=True)),
    )
    cells = []
    for kind, across in dict.fromkeys((row.intervention, row.across) for row in audit.orders):
        rows = [row for row in audit.orders if (row.intervention, row.across) == (kind, across)]
        for row in rows[:_NAMED]:
            best = "yes" if row.as_good_as_best else "no"
            cells.append((kind, across, row.metric, _number(row.spearman), _number(row.spearman_ci), best))
    title = f"rank correlation of scores with the loss of {audit.study.performance['name']}"
    return table(columns, cells, title=f"{title}; best: as good as the strongest")


def audit_sentences(audit: Audit) -> list[str]:
    """One sentence per metric, the useful ones first."""
    pooled = [verdict for verdict in audit.verdicts if verdict.intervention is None]
    return [v.text for v in sorted(pooled, key=lambda v: _ORDER.index(v.recommendation))]


def points_needed(metrics: int, strong: float, rate: float) -> int:
    """Points within layers from which a correlation of ``strong`` counts beside that many metrics.

    Fisher's ``atanh(rho)`` has standard error ``1 / sqrt(n - 3)``; three questions are put to each metric.

    Examples:
        >>> points_needed(24, 0.5, 0.02)
        47
    """
    from scipy import stats

    quantile = float(stats.norm.ppf(1.0 - rate / (6.0 * max(metrics, 1))))
    return math.ceil((quantile / math.atanh(strong)) ** 2 + 3.0)


def _answer(audit: Audit, verdicts: list[Verdict], points: list[Any]) -> list[str]:
    """The metrics by verdict, or that there are too few points."""
    groups = {advice: [v for v in verdicts if v.recommendation == advice] for advice in _ORDER}
    networks, layers = len({p["network"] for p in points}), len({p["layer"] for p in points})
    if len(groups["unknown"]) == len(verdicts):
        needed = points_needed(len(verdicts), audit.config.strong, audit.config.false_recommendation_rate)
        size = f"{len(points)} points, {networks} network{_s(networks)}, {layers} layer{_s(layers)}"
        more = f"About {max(needed, len(points) + LEAST)} points are needed: raise draws, or study several networks."
        return [f"Too few measurements to judge any metric ({size}).", more]
    parts = [f"Use: {_with_rho(groups['use'])}." if groups["use"] else "No metric can be recommended."]
    if groups["use-with-care"]:
        parts.append(f"Use with care: {_names(groups['use-with-care'])}.")
    if groups["distinguish-only"]:
        parts.append(f"Only distinguishes the interventions: {_names(groups['distinguish-only'])}.")
    if groups["do-not-use"]:
        parts.append(f"Do not use: {_names(groups['do-not-use'])}.")
    if groups["unknown"]:
        parts.append(f"Cannot tell: {len(groups['unknown'])}.")
    return parts


def _s(count: int) -> str:
    return "" if count == 1 else "s"


def _with_rho(verdicts: list[Verdict]) -> str:
    named = sorted(verdicts, key=lambda v: -abs(v.spearman_within_interventions or 0.0))
    words: list[str] = []
    for verdict in named:
        word = f"{verdict.metric} (rho {_number(verdict.spearman_within_interventions)})"
        if words and len(", ".join([*words, word])) > _LONGEST:
            break
        words.append(word)
    return ", ".join(words) + (f", {len(named) - len(words)} more" if len(named) > len(words) else "")


def _names(verdicts: list[Verdict]) -> str:
    words = ", ".join(v.metric for v in verdicts[:_NAMED])
    return words + (f", {len(verdicts) - _NAMED} more" if len(verdicts) > _NAMED else "")


def _metric_table(audit: Audit, verdicts: list[Verdict]) -> Any:
    rhos = {r.metric: r for r in audit.metrics if r.layer is None and r.intervention is None}
    columns = (
        Column("metric", keep=True),
        Column("verdict", keep=True),
        Column("rho", right=True, keep=True),
        Column("all points", right=True),
        Column("interval", right=True),
        Column("within layers", right=True),
    )
    ordered = sorted(
        verdicts,
        key=lambda v: (
            _ORDER.index(v.recommendation),
            -abs(v.spearman_within_interventions or 0.0),
            -abs(rhos[v.metric].spearman or 0.0),
        ),
    )
    cells = []
    for v in ordered:
        row = rhos[v.metric]
        numbers = (v.spearman_within_interventions, row.spearman, row.spearman_ci, row.spearman_within)
        cells.append((v.metric, v.recommendation, *map(_number, numbers)))
    name, coverage = audit.study.performance["name"], f"{100 * audit.config.confidence:g} %"
    title = f"rank correlation with {name}; the verdict rests on rho, the strongest within one intervention"
    return table(columns, cells, title=f"{title} (-: on all points, interval of {coverage} coverage)")


def _layer_table(audit: Audit) -> Any:
    """What each layer retains of its performance, one column per intervention and setting."""
    kinds = list(dict.fromkeys((row.intervention, row.setting) for row in audit.layers))
    heads = [kind if setting is None else f"{kind} {setting}" for kind, setting in kinds]
    by_place = {(row.layer, row.intervention, row.setting): row for row in audit.layers}
    cells = [
        (layer, *(_retained(by_place.get((layer, *kind))) for kind in kinds))
        for layer in dict.fromkeys(row.layer for row in audit.layers)
    ]
    columns = [Column("layer", keep=True), *(Column(head, right=True) for head in heads)]
    return table(columns, cells, title="performance retained by layer")


def _retained(row: Any) -> str:
    if row is None or row.retained is None:
        return "-"
    return f"{100 * row.retained:.0f} % {row.layer_class or ''}".rstrip()


def _number(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value[0]:.2f} to {value[1]:.2f}" if isinstance(value, tuple) else f"{value:.2f}"
