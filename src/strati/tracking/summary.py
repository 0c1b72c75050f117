"""The summary of a tracked run: what happened, change points, the trajectory, the next command."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING

from strati.core.display import Column, NextCommand, Paragraph, Table, command_path, without_shared_prefix
from strati.landscape.llc.estimate import with_error
from strati.spectra.verdicts import LayerState
from strati.tracking.change_points import LEAST

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from strati.tracking.track import Series, Track

_STEPS = 5  # columns of the trajectory
_LAYERS = 8  # rows of it, per metric
_CHANGES = 8
_TITLES = {"llc": "learning coefficient", "stable_rank": "stable rank"}
_LAYER_METRIC = "stable_rank"


def summarise(result: Track) -> RenderableType:
    """What happened, then the change points, the trajectory, the states of the layers and the next command."""
    from rich.console import Group

    parts: list[RenderableType] = [
        Paragraph(_headline(result)),
        *(Paragraph(line) for line in _coefficient(result)),
        Paragraph(_verdict(result)),
        _trajectory(result),
    ]
    if result.breaks:
        parts.append(_changes(result))
    parts += [Paragraph(line) for line in _states(result)]
    parts += [Paragraph(f"warning: {flag.text}") for flag in result.warnings]
    if result.ends is not None:
        first, last = (command_path(path) for path in result.ends)
        parts.append(NextCommand((f"strati compare {first} {last}",)))
    return Group(*parts)


def _headline(result: Track) -> str:
    count = len(result.steps)
    span = f"steps {result.steps[0]:,.0f} to {result.steps[-1]:,.0f}" if count else "no step"
    head = f"{count} checkpoint{'s' if count != 1 else ''}, {span}"
    loss = next((s for s in result.curves if s.what == "loss" and s.layer is None), None)
    if loss is not None and (trend := _trend(loss)):
        return f"{head}: the loss {trend}."
    if result.states:
        last = [at[-1] for at in result.states.values()]
        learned = sum(state == LayerState.LEARNED for state in last)
        return f"{head}: {learned} of {len(last)} layers are learned at the end."
    return f"{head}."


def _trend(series: Series) -> str:
    """Whether a series falls, rises or stays between its first and last value."""
    points = [(v, e) for v, e in zip(series.values, series.stderr, strict=True) if v is not None]
    if len(points) < 2:
        return ""
    (first, first_error), (last, last_error) = points[0], points[-1]
    noise = max(2 * math.hypot(first_error or 0.0, last_error or 0.0), 0.01 * max(abs(first), abs(last)))
    if abs(last - first) <= noise:
        return f"stays near {_digits(last)}"
    return f"{'falls' if last < first else 'rises'} from {_digits(first)} to {_digits(last)}"


def _coefficient(result: Track) -> list[str]:
    if "nbeta" not in result.settings:
        return []
    series = next((s for s in result.curves if s.what == "llc" and s.layer is None), None)
    points = (
        [
            (step, value, error)
            for step, value, error in zip(result.steps, series.values, series.stderr, strict=True)
            if value is not None
        ]
        if series is not None
        else []
    )
    settings = ", ".join(
        f"{name} {_digits(result.settings[name])}" for name in ("nbeta", "gamma") if name in result.settings
    )
    if not points:
        return [f"no learning coefficient could be estimated ({settings})"]
    step, value, error = points[-1]
    return [f"learning coefficient {with_error(value, error)} at step {step:,.0f} ({settings})"]


def _verdict(result: Track) -> str:
    points = max((sum(v is not None for v in s.values) for s in result.curves), default=0)
    if points < LEAST:
        return f"too few checkpoints ({points}) to test for change points; {LEAST} are needed"
    count = len(result.breaks)
    if count:
        return f"{count} change point{'s' if count > 1 else ''} that no smooth curve explains"
    return "no change points: smooth trends explain every series"


def _trajectory(result: Track) -> Table:
    count = len(result.steps)
    places = sorted({round(k * (count - 1) / max(_STEPS - 1, 1)) for k in range(_STEPS)}) if count else []
    columns = (Column("step", keep=True), *(Column(f"{result.steps[i]:,.0f}", True) for i in places))
    network_curves = [s for s in result.curves if s.layer is None and not s.what.startswith("llc_change")]
    layers = [s for s in result.curves if s.layer is not None and s.what == _LAYER_METRIC]
    names = without_shared_prefix([str(s.layer) for s in layers])
    labels = [_TITLES.get(s.what, s.what) for s in network_curves]
    labels += [f"{_TITLES[_LAYER_METRIC]} {name.removesuffix('.weight')}" for name in names[:_LAYERS]]
    series = [*network_curves, *layers[:_LAYERS]]
    rows = tuple(
        (label, *(_digits(s.values[i]) for i in places)) for label, s in zip(labels, series, strict=True)
    )
    hidden = len(layers) - _LAYERS
    notes = (f"{hidden} more layers: --json or --html has every series",) if hidden > 0 else ()
    return Table(columns, rows, notes=notes)


def _states(result: Track) -> list[str]:
    """Since when each layer has its last state."""
    names = dict(zip(result.states, without_shared_prefix(list(result.states)), strict=True))
    since: dict[tuple[str, float], list[str]] = {}
    for layer, states in result.states.items():
        present = [
            (step, state) for step, state in zip(result.steps, states, strict=True) if state is not None
        ]
        if not present:
            continue
        last = present[-1][1]
        begin = present[0][0]
        for (_, before), (step, after) in pairwise(present):
            if before != last and after == last:
                begin = step
        begin = begin if last == LayerState.LEARNED else result.steps[-1]
        since.setdefault((last, begin), []).append(names[layer].removesuffix(".weight"))
    lines = []
    for (state, step), layers in sorted(since.items(), key=lambda pair: (pair[0][0], pair[0][1])):
        text = "too small to tell" if state == LayerState.TOO_SMALL else state
        when = f"from step {step:,.0f}" if state == LayerState.LEARNED else "at the end"
        lines.append(f"{text} {when}: {_listed(layers)}")
    return lines


def _listed(names: Sequence[str]) -> str:
    more = f", {len(names) - 6} more" if len(names) > 6 else ""
    return ", ".join(names[:6]) + more


def _digits(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _changes(result: Track) -> Table:
    columns = (
        Column("change of", keep=True),
        Column("layer", keep=True),
        Column("at step", True),
        Column("95 % interval", True),
        Column("p", True),
    )
    rows = tuple(
        (
            _TITLES.get(row["what"], row["what"]),
            (row["layer"] or "(network)").removesuffix(".weight"),
            f"{row['step']:,.0f}",
            f"{row['low']:,.0f} to {row['high']:,.0f}",
            f"{row['pvalue']:.1g}",
        )
        for row in result.breaks[:_CHANGES]
    )
    left = len(result.breaks) - len(rows)
    return Table(columns, rows, notes=(f"{left} more: --json has them",) if left > 0 else ())
