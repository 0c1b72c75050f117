"""A comparison told in words: what changed, where, and what a terminal shows of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.spectra.comparing.verdict import mixture_text, verdict_of
from strati.text import printable

if TYPE_CHECKING:
    from rich.console import RenderableType

    from strati.spectra.comparing.results import ComparedLayer, Comparison


def sentences(result: Comparison) -> str:
    """A paragraph that answers "what changed, and where"."""
    if result.series is not None:
        return _series_text(result)
    parts = [_movement_text(result)]
    moved = [layer for layer in result.layers if layer.relative_change]
    if any(layer.mixture is not None for layer in result.layers):
        parts.append(mixture_text(result))
    parts += [verdict_of(result), _aligned_text(result)]
    if moved:
        parts += [_where_text(moved), _update_text(moved)]
    parts += [_rounding_text(result), _spectra_text(result), _stand_out_text(result)]
    return " ".join(part for part in parts if part)


def renderable(result: Comparison) -> RenderableType:
    """Sentences, then the layers in a table, then the roles that differ."""
    from rich.console import Group
    from rich.text import Text

    from strati.tables import Column, table

    renamed = any(set(layer.partner) != {layer.name} for layer in result.layers)
    cells = _columns(result)
    columns = [Column("layer", keep=True), *([Column("partner", keep=True)] if renamed else [])]
    words = ("role", "phase", "update", "aligned", "warnings")
    kept = ("update", "warnings")
    columns += [Column(name, right=name not in words, keep=name in kept) for name in cells]
    rows = [
        [x.name, *([x.partner[-1]] if renamed else []), *(cell(x) for cell in cells.values())]
        for x in result.layers
    ]
    notes = []
    for number, found in enumerate(result.role_differences):
        notes += [
            f"network {number}: {d.comparison}: {d.metric} {d.medians[0]:.3g} / {d.medians[1]:.3g} "
            f"(Cliff's delta {d.effect:+.2f}, p {d.pvalue:.2g})"
            for d in found
            if d.pvalue < 0.05
        ]
    if result.unmatched:
        names = [f"{printable(u.name, 60)} (network {u.network})" for u in result.unmatched[:6]]
        more = f", and {len(result.unmatched) - 6} more" if len(result.unmatched) > 6 else ""
        notes.append(f"without a partner: {', '.join(names)}{more}")
    notes += [f"{flag.code}: {flag.text}" for flag in result.warnings]
    return Group(Text(result.text()), table(columns, rows, notes=notes))


def _columns(result: Comparison) -> dict[str, Callable[[ComparedLayer], str]]:
    """What the table shows of a layer; columns that would be empty are left out."""
    columns: dict[str, Callable[[ComparedLayer], str]] = {
        "role": lambda x: x.role,
        "phase": lambda x: _arrow(x.metrics.get("phase", ()), str),
        "alpha": _alpha,
        "moved": lambda x: _number(x.relative_change, "{:.2%}"),
        "update": lambda x: f"{x.update_kind} {x.update_rank}" if x.update_rank else x.update_kind or "-",
        "overlap": lambda x: _number(x.subspace_overlap, "{:.3f}"),
        "distance": lambda x: _number(x.spectral_distance, "{:.3f}"),
    }
    if any(layer.aligned for layer in result.layers):
        columns["aligned"] = lambda x: x.aligned or ""
    if any(layer.rounding for layer in result.layers):
        columns["rounding"] = lambda x: _number(x.rounding.ratio if x.rounding else None, "{:.2f}")
    if any(layer.mixture for layer in result.layers):
        columns["mixture"] = _mixture_cell
    if any(layer.warnings for layer in result.layers):
        columns["warnings"] = lambda x: " ".join(dict.fromkeys(flag.code for flag in x.warnings))
    return columns


def _alpha(layer: ComparedLayer) -> str:
    """Tail exponents with their standard errors."""
    values, errors = layer.metrics.get("alpha", ()), layer.metrics.get("alpha_stderr", ())
    cells = [
        "-" if value is None else f"{value:.2f}" + ("" if error is None else f"±{error:.2f}")
        for value, error in zip(values, errors, strict=False)
    ]
    return "" if not cells else cells[0] if cells[0] == cells[-1] else f"{cells[0]} → {cells[-1]}"


def _mixture_cell(layer: ComparedLayer) -> str:
    if layer.mixture is None or layer.mixture.weights[0] is None:
        return "-"
    pairs = zip(layer.mixture.weights, layer.mixture.stderr, strict=True)
    return " ".join(f"{w:.3f}±{e:.3f}" for w, e in pairs if w is not None and e is not None)


def _movement_text(result: Comparison) -> str:
    m = result.movement
    if m is None or m.shared == 0:
        return f"The networks share no tensor of the same name and shape; layers are matched by {result.matched_by}."
    if m.moved == 0:
        return f"Nothing moved: all {m.shared} shared tensors are identical."
    stayed = (
        f"; untouched: {', '.join(printable(n, 60) for n in m.untouched[:3])}{' ...' if len(m.untouched) > 3 else ''}"
        if m.untouched
        else ""
    )
    return f"{m.moved} of {m.shared} shared tensors moved{stayed}."


def _aligned_text(result: Comparison) -> str:
    """What the two networks store differently, and what was undone before the weights were subtracted."""
    found = Counter(word for x in result.layers if x.aligned for word in x.aligned.split(", "))
    if not found:
        return ""
    told = ", ".join(f"{word} in {n} layer{'s' if n > 1 else ''}" for word, n in found.most_common())
    extra = [f.text for x in result.layers for f in x.warnings if f.code == "vocabulary-resized"]
    return " ".join(
        [f"Undone before comparing: {told}.", *(f"{text[:1].upper()}{text[1:]}." for text in extra[:1])]
    )


def _where_text(moved: list[ComparedLayer]) -> str:
    """Median, most and least over one and the same list of layers."""
    by_size = sorted(moved, key=lambda layer: -(layer.relative_change or 0.0))
    most, least = by_size[0], by_size[-1]
    names = printable(most.name, 60), printable(least.name, 60)
    if len(moved) == 1:
        text = f"One layer moved: {names[0]} ({most.relative_change:.2%})."
    else:
        median = float(np.median([layer.relative_change or 0.0 for layer in moved]))
        text = (
            f"Relative change of the {len(moved)} layers that moved: median {median:.2%}; "
            f"most: {names[0]} ({most.relative_change:.2%}); least: {names[1]} ({least.relative_change:.2%})."
        )
    roles: dict[str, list[float]] = {}
    for layer in moved:
        roles.setdefault(layer.role, []).append(layer.relative_change or 0.0)
    if len(roles) > 1:
        ranked = sorted(((float(np.median(v)), r) for r, v in roles.items()), reverse=True)
        text += f" Median by role: {', '.join(f'{role} {value:.2%}' for value, role in ranked)}."
    return text


def _rounding_text(result: Comparison) -> str:
    """Quantised layers: how their error compares with what the step predicts, and which are worse."""
    known = [(x.rounding.ratio, x.name) for x in result.layers if x.rounding is not None]
    if not known:
        return ""
    worse = sorted(
        ((x.rounding.ratio, x.name) for x in result.layers if x.rounding and _flagged(x)), reverse=True
    )
    text = (
        f"Rounding error against what the step predicts: median {np.median([r for r, _ in known]):.2f} times."
    )
    if worse:
        told = ", ".join(f"{printable(name, 60)} ({ratio:.2f})" for ratio, name in worse[:3])
        more = f" and {len(worse) - 3} more" if len(worse) > 3 else ""
        text += f" Rounded worse than predicted: {told}{more}."
    return text


def _flagged(layer: ComparedLayer) -> bool:
    return any(flag.code == "rounded-worse" for flag in layer.warnings)


def _stand_out_text(result: Comparison) -> str:
    found = [x for x in result.stand_out if x.pvalue < 0.05]
    if not found:
        return ""
    told = "; ".join(
        f"{printable(x.layer, 60)} ({x.relative_change:.2%}, expected {x.expected:.2%}, p {x.pvalue:.1g})"
        for x in found[:3]
    )
    return f"Layers that moved unlike the others of their role: {told}."


def _update_text(moved: list[ComparedLayer]) -> str:
    ranks = [layer.update_stable_rank for layer in moved if layer.update_stable_rank is not None]
    overlaps = [layer.subspace_overlap for layer in moved if layer.subspace_overlap is not None]
    text = f"The updates have a median stable rank of {np.median(ranks):.1f}. " if ranks else ""
    if overlaps:
        kept = "kept" if np.median(overlaps) > 0.9 else "turned"
        text += f"Leading subspaces are {kept}: median overlap {np.median(overlaps):.3f}, least {min(overlaps):.3f}."
    return text


def _spectra_text(result: Comparison) -> str:
    distances = [layer.spectral_distance for layer in result.layers if layer.spectral_distance is not None]
    changed: Counter[str] = Counter()
    for layer in result.layers:
        phases = layer.metrics.get("phase", ())
        if len(phases) > 1 and phases[0] != phases[-1] and None not in (phases[0], phases[-1]):
            changed[f"{phases[0]} to {phases[-1]}"] += 1
    text = f"Spectra moved by {np.median(distances):.3f} in log-eigenvalue (median)" if distances else ""
    if changed:
        text += "; phases changed in " + ", ".join(
            f"{n} layers ({what})" for what, n in changed.most_common(3)
        )
    elif text:
        text += "; no layer changed its phase"
    return text + "." if text else ""


def _series_text(result: Comparison) -> str:
    series = result.series
    assert series is not None
    parts = [f"{len(series.labels)} checkpoints, {len(series.layers)} layers."]
    for layer in series.layers:
        name, last = printable(layer.name, 60), layer.phase[-1]
        known = [phase for phase in layer.phase if phase is not None]
        if last is None:
            state = f"was last {known[-1]}; its last phase is not known" if known else "has no known phase"
        elif layer.leaves_random_like is None:
            state = "ends random-like"
        elif "random-like" not in known:
            state = "never is random-like"
        else:
            state = f"leaves random-like at {printable(series.labels[layer.leaves_random_like], 60)}"
        parts.append(f"{name} {state}.")
    shown = parts[:9]
    return " ".join(shown) + (f" ({len(parts) - 9} more layers in the table.)" if len(parts) > 9 else "")


def _arrow(values: tuple[Any, ...], form: Any) -> str:
    if not values:
        return ""
    ends = ["-" if v is None else form(v) for v in (values[0], values[-1])]
    return ends[0] if ends[0] == ends[1] else f"{ends[0]} → {ends[1]}"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
