"""A comparison told in words: what changed, where, and what a terminal shows of it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.text import printable

if TYPE_CHECKING:
    from rich.console import RenderableType

    from strati.spectra.comparing.compare import ComparedLayer, Comparison


def sentences(result: Comparison) -> str:
    """A paragraph that answers "what changed, and where"."""
    if result.series is not None:
        return _series_text(result)
    parts = [_movement_text(result)]
    moved = [layer for layer in result.layers if layer.relative_change]
    if moved:
        parts += [_where_text(moved), _update_text(moved)]
    parts.append(_spectra_text(result))
    return " ".join(part for part in parts if part)


def renderable(result: Comparison) -> RenderableType:
    """Sentences, then the layers in a table, then the roles that differ."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for title in (
        "layer",
        "role",
        "phase",
        "alpha",
        "stable rank",
        "moved",
        "update rank",
        "overlap",
        "distance",
    ):
        table.add_column(title, justify="left" if title in ("layer", "role", "phase") else "right")
    for layer in result.layers:
        m = layer.metrics
        table.add_row(
            Text(printable(layer.name, 48)),
            layer.role,
            _arrow(m.get("phase", ()), str),
            _arrow(m.get("alpha", ()), "{:.2f}".format),
            _arrow(m.get("stable_rank", ()), "{:.1f}".format),
            _number(layer.relative_change, "{:.2%}"),
            _number(layer.update_stable_rank, "{:.1f}"),
            _number(layer.subspace_overlap, "{:.3f}"),
            _number(layer.spectral_distance, "{:.3f}"),
        )
    lines: list[Any] = [Text(result.text()), Text(""), table]
    for number, found in enumerate(result.role_differences):
        lines += [
            Text(
                f"network {number}: {d.comparison}: {d.metric} {d.medians[0]:.3g} / {d.medians[1]:.3g} "
                f"(Cliff's delta {d.effect:+.2f}, p {d.pvalue:.2g})"
            )
            for d in found
            if d.pvalue < 0.05
        ]
    lines += [Text(f"{flag.code}: {flag.text}") for flag in result.warnings]
    return Group(*lines)


def _movement_text(result: Comparison) -> str:
    m = result.movement
    if m is None or m.shared == 0:
        return f"The networks share no tensor of the same name and shape; layers are matched by {result.matched_by}."
    if m.moved == 0:
        return f"Nothing moved: all {m.shared} shared tensors are identical."
    size = (
        f" (median relative change {m.median_relative_change:.2%})"
        if m.median_relative_change is not None
        else ""
    )
    stayed = (
        f"; untouched: {', '.join(m.untouched[:3])}{' ...' if len(m.untouched) > 3 else ''}"
        if m.untouched
        else ""
    )
    return f"{m.moved} of {m.shared} shared tensors moved{size}{stayed}."


def _where_text(moved: list[ComparedLayer]) -> str:
    by_size = sorted(moved, key=lambda layer: -(layer.relative_change or 0.0))
    most, least = by_size[0], by_size[-1]
    names = printable(most.name, 60), printable(least.name, 60)
    text = f"Most moved: {names[0]} ({most.relative_change:.2%}); least: {names[1]} ({least.relative_change:.2%})."
    roles: dict[str, list[float]] = {}
    for layer in moved:
        roles.setdefault(layer.role, []).append(layer.relative_change or 0.0)
    if len(roles) > 1:
        ranked = sorted(((float(np.median(v)), r) for r, v in roles.items()), reverse=True)
        text += f" By role: {', '.join(f'{role} {value:.2%}' for value, role in ranked)}."
    return text


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
        if len(phases) > 1 and phases[0] != phases[-1]:
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
        if layer.leaves_random_like is None:
            parts.append(f"{printable(layer.name, 60)} ends random-like.")
        elif layer.leaves_random_like == 0:
            parts.append(f"{printable(layer.name, 60)} never is random-like.")
        else:
            parts.append(
                f"{printable(layer.name, 60)} leaves random-like at {series.labels[layer.leaves_random_like]}."
            )
    shown = parts[:9]
    return " ".join(shown) + (f" ({len(parts) - 9} more layers in the table.)" if len(parts) > 9 else "")


def _arrow(values: tuple[Any, ...], form: Any) -> str:
    if not values:
        return ""
    ends = ["-" if v is None else form(v) for v in (values[0], values[-1])]
    return ends[0] if ends[0] == ends[1] else f"{ends[0]} → {ends[1]}"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
