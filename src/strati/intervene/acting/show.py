"""Plans and what became of them on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from strati.intervene.acting.curves import KEEP
from strati.tables import Column, table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from strati.intervene.apply import Applied
    from strati.intervene.plan import Plan


def plan_summary(plan: Plan) -> RenderableType:
    """A table of the layers that are changed, and the prediction beside the even spread."""
    from rich.console import Group
    from rich.text import Text

    unit = plan.size["unit"]
    columns = (
        Column("layer", keep=True),
        Column("choice", keep=True),
        Column(f"saves ({unit})", right=True),
        Column("cost", right=True),
        Column("95 %", right=True, gives=1),
    )
    rows = [
        (
            layer.name,
            layer.choice,
            f"{layer.saves:,.0f}",
            f"{layer.cost:.3g}",
            f"{layer.cost_ci[0]:.3g} to {layer.cost_ci[1]:.3g}",
        )
        for layer in plan.layers
    ]
    kept = sum(layer.choice == KEEP for layer in plan.layers)
    name = plan.performance["name"]
    size = plan.size
    lines: list[Any] = [
        table(columns, rows, title=f"plan: {plan.action}, {plan.budget}"),
        Text(f"{len(plan.layers) - kept} of {len(plan.layers)} layers changed; {unit}: {_size(size)}"),
        Text(f"{name}: intact {plan.performance['intact']:.4g}, predicted {estimate(plan.predicted)}"),
        Text(f"the same budget spread evenly: {name} {estimate(plan.uniform)}"),
    ]
    how = plan.additivity
    if how["n"]:
        lines.append(
            Text(
                f"adding up: {how['n']} combinations measured, {name} {how['measured']:.4g} on average, "
                f"{how['predicted']:.4g} by adding"
            )
        )
    elif plan.predicted["performance"] is not None:
        lines.append(
            Text("adding up was not checked: the network or its data are not at hand (give the model)")
        )
    if plan.quantity != "measured":
        lines.append(Text(plan.quantity))
    lines.append(Text(plan.verdict))
    return Group(*lines)


def applied_summary(found: Applied) -> RenderableType:
    """What was written, and predicted beside measured."""
    from rich.console import Group
    from rich.text import Text

    lines = [Text(f"written to {found.written}")]
    before, after = found.parameters_before, found.parameters_after
    lines.append(Text(f"parameters {before:,} -> {after:,} ({after / max(before, 1):.1%})"))
    lines.append(Text(f"bytes {found.bytes_before:,} -> {found.bytes_after:,}"))
    lines.append(Text(f"predicted {estimate(found.predicted)}"))
    lines.append(Text(f"measured  {estimate(found.measured)}"))
    if found.seconds_before is not None and found.seconds_after is not None:
        text = f"forward pass {found.seconds_before:.4f} s -> {found.seconds_after:.4f} s"
        lines.append(Text(text))
    return Group(*lines)


def estimate(found: Any) -> str:
    """A performance with its interval."""
    if found is None or found.get("performance") is None:
        return "not known"
    if found.get("low") is None:
        return f"{found['performance']:.4g}"
    return f"{found['performance']:.4g} ({found['low']:.4g} to {found['high']:.4g})"


def _size(size: Any) -> str:
    if size["unit"] == "parameters":
        return f"{size['planned']:,.0f} of {size['full']:,.0f}"
    return f"{size['planned'] / size['full']:.4g} on average"
