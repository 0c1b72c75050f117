"""Studies and audits on a terminal: tables of what their rows say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from strati.tables import Column, table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from strati.intervene.judging.audit import Audit
    from strati.intervene.study import Study

_ORDER = ("use", "use-with-care", "distinguish-only", "unknown", "do-not-use")


def study_summary(study: Study) -> RenderableType:
    """Mean performance of each layer, intact and under each intervention."""
    from rich.console import Group
    from rich.text import Text

    rows = study.frame()
    good = rows[rows["status"] == "done"]
    there = set(rows["intervention"])
    first = [k for k in ("intact", "reinitialise", "rerandomise") if k in there]
    kinds = [*first, *sorted(there - set(first))]
    cells = [
        (
            layer,
            *(
                _cell(good[(good["layer"] == layer) & (good["intervention"] == k)]["performance"])
                for k in kinds
            ),
        )
        for layer in dict.fromkeys(rows["layer"])
    ]
    shown = table(["layer", *kinds], cells, title=f"{study.performance['name']} by layer")
    networks = rows["network"].nunique()
    line = f"{study.name}: {networks} network(s), {study.done} of {study.units} points done, {study.failed} failed"
    lines: list[Any] = [shown, Text(line)]
    if study.failed:
        reasons = rows[rows["status"] == "failed"]["reason"].value_counts()
        lines += [Text(f"  failed {count}x: {reason}") for reason, count in reasons.head(5).items()]
    if study.store is not None:
        lines.append(Text(f"store {study.store}"))
    return Group(*lines)


def audit_summary(audit: Audit) -> RenderableType:
    """Classes of the layers, correlations of the metrics, verdicts with the useful metrics first."""
    from rich.console import Group
    from rich.text import Text

    name = audit.study.performance["name"]
    columns = ["layer", "intervention", name, "retained", Column("n", right=True), Column("class", keep=True)]
    layers = [
        (one.layer, one.intervention, _mean(one), _number(one.retained), one.n, one.layer_class)
        for one in audit.layers
    ]
    means = {one.metric: one.spearman for one in audit.means}
    pooled = [one for one in audit.metrics if one.layer is None and one.intervention is None]
    heads = (
        "rho pooled",
        "95 % interval",
        "rho within layers",
        "95 % interval",
        "tau pooled",
        "rho mean of layers",
    )
    numbers = [
        (
            one.spearman,
            one.spearman_ci,
            one.spearman_within,
            one.spearman_within_ci,
            one.kendall,
            means[one.metric],
        )
        for one in pooled
    ]
    metrics = [(one.metric, *map(_number, cells)) for one, cells in zip(pooled, numbers, strict=True)]
    own = [verdict for verdict in audit.verdicts if verdict.intervention is None]
    said = sorted(own, key=lambda verdict: _ORDER.index(verdict.recommendation))
    left = f"{audit.failed} of {audit.study.units} points failed and are left out"
    return Group(
        table(columns, layers, title="layers"),
        table(["metric", *heads], metrics, title=f"metrics against {name}"),
        *(Text(f"- {verdict.text}") for verdict in said),
        Text(left),
    )


def _cell(values: Any) -> str:
    if len(values) == 0:
        return "-"
    mean = f"{values.mean():.4g}"
    return mean if len(values) == 1 else f"{mean} +- {values.sem():.2g} ({len(values)})"


def _mean(row: Any) -> str:
    sem = "" if row.performance_sem is None else f" +- {row.performance_sem:.2g}"
    return f"{row.performance_mean:.4g}{sem}"


def _number(value: Any) -> str:
    if value is None:
        return "-"
    return f"[{value[0]:.2f}, {value[1]:.2f}]" if isinstance(value, tuple) else f"{value:.3f}"
