"""Studies and audits on a terminal: rich tables of what their rows say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType

    from strati.intervene.study import Study


def study_summary(study: Study) -> RenderableType:
    """Mean performance of each layer, intact and under each intervention."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = study.frame()
    good = table[table["status"] == "done"]
    kinds = [k for k in ("intact", "reinitialise", "rerandomise") if k in set(table["intervention"])]
    shown = Table("layer", *kinds, title=f"{study.performance['name']} by layer", title_justify="left")
    for layer in dict.fromkeys(table["layer"]):
        cells = [_cell(good[(good["layer"] == layer) & (good["intervention"] == kind)]["performance"]) for kind in kinds]
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
