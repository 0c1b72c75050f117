"""Plans and applied plans as text: the answer first, then the numbers it comes from."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from strati.core.display import Column, byte_size, table
from strati.interventions.compress.costs import KEEP, Quantity
from strati.interventions.compress.predict import PlanOutcome
from strati.interventions.kinds import EXPERT_KINDS, read_setting
from strati.interventions.study_config import UNIT, CostScale, performance_text

if TYPE_CHECKING:
    from rich.console import RenderableType

    from strati.interventions.compress.apply import Applied
    from strati.interventions.compress.plan import Plan, PlannedLayer

_NAMED = 3
"""Layers that the first line names before it counts them."""
_SAME_SIZE = 0.99
_VERBS = {
    "truncate": "Truncate",
    "quantise": "Quantise",
    "prune": "Prune",
    "drop": "Drop",
    "adapt": "Adapt",
    "drop-experts": "Drop experts of",
    "merge-experts": "Merge experts of",
}
_QUANTITIES = {
    Quantity.UPDATE: "Costs are what truncating the update since the base network loses, measured.",
    Quantity.GRADIENT: "Costs are a guess from the gradient's spectrum; no fine-tuned network was measured.",
}


def plan_summary(plan: Plan) -> RenderableType:
    """What to do, its predicted performance beside uniform allocation, and a table of the layers."""
    from rich.console import Group
    from rich.text import Text

    lines: list[Any] = [Text(headline(plan)), *map(Text, _performance_lines(plan))]
    if plan.screen is not None:
        measured, settings = plan.screen["measured"], plan.screen["settings"]
        share = f"{measured} of {settings} settings ({100 * plan.screen['fraction']:.0f} %)"
        lines.append(Text(f"The Fisher score decided the rest: only {share} were measured."))
    if plan.quantity is not Quantity.MEASURED:
        lines.append(Text(_QUANTITIES[plan.quantity]))
    changed = [layer for layer in plan.layers if layer.choice != KEEP]
    uniform = plan.uniform.get("layers") or {}
    listed = [layer for layer in plan.layers if {layer.choice, uniform.get(layer.name, KEEP)} != {KEEP}]
    if changed:
        lines.append(_layer_table(plan, listed))
    unlisted = [layer for layer in plan.layers if layer not in listed]
    if unlisted:
        lines.append(Text(f"unchanged: {_names(unlisted)}"))
    if plan.predicted["performance"] is not None and plan.predicted["low"] is None:
        lines.append(Text("The error is not known: evaluate returned one number, not one per example."))
    if not plan.additivity["n"] and plan.predicted["performance"] is not None:
        lines.append(
            Text("The prediction adds up costs of single layers; give the model and data to measure it.")
        )
    elif plan.predicted["contradicted"]:
        lines.append(
            Text("The costs of single layers do not add up here; the prediction is the plan's measurement.")
        )
    lines += [Text(f"{warning['code']}: {warning['text']}") for warning in plan.warnings]
    return Group(*lines)


def headline(plan: Plan) -> str:
    """What is done to which layers, and the size that it leaves."""
    changed = [layer for layer in plan.layers if layer.choice != KEEP]
    if not changed:
        return "Change nothing: no setting that was measured stays within the budget."
    size = f"{_size(plan)}."
    words = [_choice(layer.choice) for layer in changed]
    how = words[0] if len(set(words)) == 1 else _range(changed)
    verb = f"{_VERBS[plan.action]} {_names(changed, of=len(plan.layers))}"
    return f"{verb}{'' if plan.action == 'drop' else f' {how}'}: {size}"


def verdict_of(plan: Plan) -> str:
    """How a plan compares with uniform allocation, in words."""
    intact = plan.size["intact"]
    planned, uniform = plan.size["planned"] / intact, plan.uniform["size"] / intact
    if plan.outcome is PlanOutcome.BETTER:
        return f"Mixed beats uniform by {_gain(plan)}: use it."
    if plan.outcome is PlanOutcome.SMALLER:
        shares = f"{100 * uniform:.0f} % of the size, the plan {100 * planned:.0f} %"
        return f"Uniform allocation within the same loss needs {shares}."
    if plan.outcome is PlanOutcome.NOT_SMALLER:
        return f"The plan is NOT smaller than uniform allocation ({100 * planned:.0f} % against {100 * uniform:.0f} %)."
    if plan.outcome is PlanOutcome.UNIFORM:
        if plan.action in EXPERT_KINDS:
            return "All layers keep the same number of experts: a config has one number."
        if any("unit=" in layer.choice for layer in plan.layers):
            return "All layers keep the same number of units: a config has one number."
        return "Mixed does not beat uniform beyond its error: use uniform, which is the plan."
    if plan.outcome is PlanOutcome.NO_ERROR:
        word = "better" if plan.uniform["gain"]["gain"] > 0 else "not better"
        return f"The plan is {word} than uniform allocation, but the error of the difference is not defined."
    return _FIXED[plan.outcome]


_FIXED = {
    PlanOutcome.NOT_BETTER: "Mixed does not beat uniform beyond its error: use uniform.",
    PlanOutcome.NOT_MEASURED: "Uniform allocation was not measured: the network or its data are not available.",
    PlanOutcome.GUESS: "Nothing was measured: the ranks are a guess from the gradient's spectrum.",
}


def _performance_lines(plan: Plan) -> list[str]:
    name, expected = str(plan.performance["name"]), plan.predicted
    if expected["performance"] is None:
        return [plan.verdict]
    intact = performance_text(name, plan.performance["intact"])
    lines = [f"{name.capitalize()} {estimate(name, expected)}, intact {intact}."]
    uniform = performance_text(name, plan.uniform["performance"])
    if plan.outcome is PlanOutcome.UNIFORM:
        lines.append(plan.verdict)
    elif plan.outcome in (PlanOutcome.SMALLER, PlanOutcome.NOT_SMALLER):
        lines.append(f"{plan.verdict} There its {name} is {uniform}.")
    else:
        lines.append(f"Uniform allocation at the same size: {uniform}. {plan.verdict}")
    return lines


def _layer_table(plan: Plan, changed: list[PlannedLayer]) -> Any:
    uniform = plan.uniform.get("layers") or {}
    columns = (
        Column("layer", keep=True),
        Column("choice", keep=True),
        Column("uniform"),
        Column(str(plan.size["unit"]), right=True),
        Column("costs alone", right=True, keep=True),
        Column("interval", right=True),
    )
    scale = _scale(plan)
    rows = [
        (
            layer.name,
            layer.choice,
            uniform.get(layer.name, "-"),
            _layer_size(plan, layer),
            _difference(scale, 0.0, layer.cost),
            "-" if layer.cost_ci is None else " to ".join(_difference(scale, 0.0, c) for c in layer.cost_ci),
        )
        for layer in changed
    ]
    unit = " (points)" if scale.name in UNIT else ""
    return table(columns, rows, title=f"{plan.action} within {plan.budget}; costs in {scale.name}{unit}")


def _scale(plan: Plan) -> CostScale:
    about = plan.performance
    return CostScale(
        str(about["name"]), bool(about["higher_is_better"]), float(about["intact"]), bounded=False
    )


def _difference(scale: CostScale, start: float, cost: float) -> str:
    """What is lost between two costs, in units of the performance: points of a percentage where it is a share.

    Other measures have as many decimals as four digits of the intact performance have.
    """
    lost = scale.performance(start + cost) - scale.performance(start)
    lost = -lost if scale.higher_is_better else lost
    size = math.floor(math.log10(abs(scale.intact))) if scale.intact else 0
    text = f"{100 * lost:.1f}" if scale.name in UNIT else f"{lost:.{min(max(3 - size, 0), 12)}f}"
    return text.removeprefix("-") if float(text) == 0 else text


def _gain(plan: Plan) -> str:
    """The gain over uniform allocation and half the width of its interval, in units of the performance."""
    scale, gain = _scale(plan), plan.uniform["gain"]
    start = scale.cost(plan.predicted["measured"])
    low, middle, high = (_difference(scale, start, gain[key]) for key in ("low", "gain", "high"))
    half = abs(float(high) - float(low)) / 2
    unit = " points" if scale.name in UNIT else ""
    return f"{middle} +- {half:.{len(middle.partition('.')[2])}f}{unit}"


def _names(layers: list[PlannedLayer], of: int | None = None) -> str:
    names = [layer.name for layer in layers]
    if len(names) <= _NAMED and sum(map(len, names)) <= 45:
        return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
    return f"{len(names)} layers" if of is None else f"{len(names)} of {of} layers"


def _choice(choice: str) -> str:
    """A choice in words.

    Examples:
        >>> _choice("rank=16"), _choice("bits=4,group=64"), _choice("share=0.5"), _choice("parameters=0.25")
        ('to rank 16', 'to 4 bits', 'by 50 %', 'to 25 % of their parameters')
    """
    values = {} if choice == "drop" else read_setting(choice)
    if "rank" in values:
        return f"to rank {values['rank']}"
    if "bits" in values:
        return f"to {values['bits']} bits"
    if "share" in values:
        return f"by {100 * values['share']:.0f} %"
    if "pattern" in values:
        return f"to {values['pattern']}"
    if "parameters" in values:
        return f"to {100 * values['parameters']:.0f} % of their parameters"
    return f"to {choice}"


def _range(layers: list[PlannedLayer]) -> str:
    """The settings of several layers that differ, as a range of their first value where they have one name."""
    settings = [read_setting(layer.choice) for layer in layers if layer.choice != "drop"]
    names = {next(iter(values)) for values in settings if values}
    if len(names) != 1 or names == {"pattern"}:
        return "to settings of their own"
    (name,) = names
    numbers = sorted(float(values[name]) for values in settings)
    low, high = numbers[0], numbers[-1]
    if name in ("share", "parameters"):
        text = f"{100 * low:.0f} to {100 * high:.0f} %"
        return f"by {text}" if name == "share" else f"to {text} of their parameters"
    return f"to rank {low:g} to {high:g}" if name == "rank" else f"to {low:g} to {high:g} {name}"


def _size(plan: Plan) -> str:
    unit, planned, full = plan.size["unit"], plan.size["planned"], plan.size["full"]
    if unit == "parameters":
        return f"{100 * planned / full:.0f} % of the parameters"
    return f"{planned / full:.2g} bits per weight" if unit == "bits" else f"mean rank {planned / full:.3g}"


def _layer_size(plan: Plan, layer: PlannedLayer) -> str:
    unit, weights = plan.size["unit"], layer.rows * layer.cols
    before = next(
        (max(p["size"] for p in curve["points"]) for curve in plan.curves if curve["layer"] == layer.name),
        float(weights),
    )
    if unit == "bits":
        return f"{before / weights:.0f} -> {(before - layer.saves) / weights:.3g}"
    return f"{before:,.0f} -> {before - layer.saves:,.0f}"


def applied_summary(applied: Applied) -> RenderableType:
    """Where the network is, measured beside predicted, and its size."""
    from rich.console import Group
    from rich.text import Text

    name = str(applied.performance.get("name", "performance"))
    lines = [f"Wrote {applied.written}."]
    if applied.measured["performance"] is None:
        lines.append(f"It was not measured: {applied.measured.get('reason', 'give data')}.")
    else:
        intact = performance_text(name, applied.performance.get("intact"))
        expected = performance_text(name, applied.predicted.get("performance"))
        measured = estimate(name, applied.measured)
        lines.append(f"{name.capitalize()} {measured}, intact {intact}, predicted {expected}.")
    before, after = applied.parameters_before, applied.parameters_after
    lines.append(f"Effective parameters {before:,} -> {after:,} ({100 * after / max(before, 1):.0f} %).")
    lines.append(_file_size(applied))
    if applied.healed is not None:
        healed = applied.healed
        losses = f"loss {healed['loss_before']:.4g} -> {healed['loss_after']:.4g}"
        lines.append(f"Healed in {healed['steps']} steps: {losses} on {healed['held_out']} held-out rows.")
        lines.append(f"The LoRA is in {applied.written}/adapter.")
    if applied.seconds_before is not None and applied.seconds_after is not None:
        times = 1e3 * applied.seconds_before, 1e3 * applied.seconds_after
        lines.append(f"Forward pass {times[0]:.3g} ms -> {times[1]:.3g} ms.")
    lines += [f"{warning['code']}: {warning['text']}" for warning in applied.warnings]
    return Group(*map(Text, lines))


def _file_size(applied: Applied) -> str:
    before, after = byte_size(applied.bytes_before), byte_size(applied.bytes_after)
    if applied.bytes_after < _SAME_SIZE * applied.bytes_before:
        return f"File {before} -> {after}."
    if applied.action == "truncate" and applied.parameters_after < applied.parameters_before:
        share = applied.parameters_after / applied.parameters_before
        factored = byte_size(round(share * applied.bytes_before))
        return f"The file is as large as before ({after}): matrices are stored whole; --factored writes {factored}."
    if applied.action in ("quantise", "prune"):
        how = "pruned weights are stored in full."
        if applied.action == "quantise":
            how = "weights keep their precision; --packed writes integers."
        return f"The file is as large as before ({after}): {how}"
    return f"File {before} -> {after}."


def estimate(name: str, performance: Any) -> str:
    """A performance with its interval."""
    value = performance_text(name, performance["performance"])
    if performance.get("low") is None:
        return value
    low, high = (performance_text(name, performance[end]).removesuffix(" %") for end in ("low", "high"))
    return f"{value} ({low} to {high})"
