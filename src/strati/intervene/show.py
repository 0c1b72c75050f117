"""Studies and audits on a terminal: rich tables of what their rows say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType

    from strati.intervene.judging.audit import Audit
    from strati.intervene.study import Study


def study_summary(study: Study) -> RenderableType:
    """Mean performance of each layer, intact and under each intervention."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = study.frame()
    good = table[table["status"] == "done"]
    first = [k for k in ("intact", "reinitialise", "rerandomise") if k in set(table["intervention"])]
    kinds = [*first, *sorted(set(table["intervention"]) - set(first))]
    shown = Table("layer", *kinds, title=f"{study.performance['name']} by layer", title_justify="left")
    for layer in dict.fromkeys(table["layer"]):
        cells = [
            _cell(good[(good["layer"] == layer) & (good["intervention"] == kind)]["performance"])
            for kind in kinds
        ]
        shown.add_row(Text(str(layer)), *cells)
    networks = table["network"].nunique()
    line = f"{study.name}: {networks} network(s), {study.done} of {study.units} points done, {study.failed} failed"
    lines: list[Any] = [shown, Text(line)]
    if study.failed:
        reasons = table[table["status"] == "failed"]["reason"].value_counts()
        lines += [Text(f"  failed {count}x: {reason}") for reason, count in reasons.head(5).items()]
    if study.store is not None:
        lines.append(Text(f"store {study.store}"))
    return Group(*lines)


def _cell(values: Any) -> str:
    if len(values) == 0:
        return "-"
    mean = f"{values.mean():.4g}"
    return mean if len(values) == 1 else f"{mean} +- {values.sem():.2g} ({len(values)})"


def audit_summary(audit: Audit) -> RenderableType:
    """Classes of the layers, correlations of the metrics, verdicts."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    name = audit.study.performance["name"]
    layers = Table(
        "layer", "intervention", name, "retained", "n", "class", title="layers", title_justify="left"
    )
    for row in audit.layers:
        sem = "" if row.performance_sem is None else f" +- {row.performance_sem:.2g}"
        share = "-" if row.retained is None else f"{row.retained:.3f}"
        mean = f"{row.performance_mean:.4g}{sem}"
        cells = (row.layer, row.intervention, mean, share, str(row.n), row.layer_class)
        layers.add_row(*(Text(cell) for cell in cells))
    columns = (
        "metric",
        "rho pooled",
        "95 %",
        "rho within layers",
        "95 %",
        "tau pooled",
        "rho mean of layers",
    )
    metrics = Table(*columns, title=f"metrics against {name}", title_justify="left")
    means = {row.metric: row for row in audit.means}
    for row in audit.metrics:
        if row.layer is None and row.intervention is None:
            numbers = (
                row.spearman,
                row.spearman_ci,
                row.spearman_within,
                row.spearman_within_ci,
                row.kendall,
            )
            cells = (*numbers, means[row.metric].spearman)
            metrics.add_row(Text(row.metric), *(Text(_number(value)) for value in cells))
    own = [verdict for verdict in audit.verdicts if verdict.intervention is None]
    order = ("use", "use-with-care", "distinguish-only", "unknown", "do-not-use")
    said = sorted(own, key=lambda verdict: order.index(verdict.recommendation))
    lines: list[Any] = [layers, metrics, *(Text(f"- {verdict.text}") for verdict in said)]
    lines.append(Text(f"{audit.failed} of {audit.study.units} points failed and are left out"))
    return Group(*lines)


def _number(value: Any) -> str:
    if value is None:
        return "-"
    return f"[{value[0]:.2f}, {value[1]:.2f}]" if isinstance(value, tuple) else f"{value:.3f}"
