"""The result of a followed run: series, change points and spectra assembled from the points, and its summary."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from strati.core.display import Column, NextCommand, Paragraph, Table, command_path, without_shared_prefix
from strati.core.errors import BadInputError
from strati.core.results import Flag, Result
from strati.io.roles import places
from strati.spectra.verdicts import LayerState
from strati.tracking.change_points import LEAST, find_changes
from strati.tracking.coefficients import difference_error
from strati.tracking.measure import RANKS, SPECTRUM, UNIT, SeriesPoint

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import RenderableType

    from strati.tracking.checkpoints import Checkpoint
    from strati.tracking.config import TrackConfig

CHANGE = "llc_change"
"""The series of differences between neighbouring checkpoints, whose errors are smaller than those of ``llc``."""

_STEPS = 5  # columns of the trajectory
_LAYERS = 8  # rows of it, per metric
_CHANGES = 8
_TITLES = {"llc": "learning coefficient", "stable_rank": "stable rank"}
_LAYER_METRIC = "stable_rank"
_NO_POINT = SeriesPoint("", None, None)


@dataclass(frozen=True)
class Series:
    """One number over the run: a metric of a layer, or of the whole network (``layer`` is ``None``)."""

    what: str
    layer: str | None
    values: tuple[float | None, ...]
    stderr: tuple[float | None, ...]


@dataclass(frozen=True)
class Track(Result):
    """A run over time: ``series`` and ``changes`` are data frames.

    Attributes:
        steps: Of the checkpoints, in order.
        curves: The series.
        breaks: Where they change.
        settings: What is the same for the learning coefficient of every checkpoint.
        failed: What could not be measured, and why.
        store: The file that keeps it.
        warnings: What a reader must know.
        spectra: To draw them by: ``layers`` with ``values`` per checkpoint, decimal logarithms of eigenvalues in units
            of ``1 / unit``, at the shares ``ranks`` of all eigenvalues; ``None`` where there is none.
        states: The state of every layer at every checkpoint.
        ends: Paths of the first and the last checkpoint, if they are files.
    """

    verb: ClassVar[str] = "track"
    omitted: ClassVar[tuple[str, ...]] = ("curves", "breaks", "ends")
    computed: ClassVar[Mapping[str, str]] = {
        "series": "curves",
        "changes": "breaks",
        "layers": "layer_places",
    }

    steps: tuple[float, ...]
    curves: tuple[Series, ...]
    breaks: tuple[dict[str, Any], ...]
    settings: Mapping[str, Any]
    failed: tuple[dict[str, Any], ...] = ()
    store: str | None = None
    warnings: tuple[Flag, ...] = ()
    spectra: Mapping[str, Any] = field(default_factory=dict)
    states: Mapping[str, tuple[str | None, ...]] = field(default_factory=dict)
    ends: tuple[str, str] | None = None

    @property
    def layer_places(self) -> list[dict[str, str | int | None]]:
        """Name, role and block of each layer, as in the JSON form."""
        return places(s.layer for s in self.curves if s.layer is not None)

    @property
    def series(self) -> pd.DataFrame:
        """One row per step and series: ``step``, ``what``, ``layer``, ``value``, ``stderr``."""
        import pandas as pd

        rows = [
            (step, s.what, s.layer, value, error)
            for s in self.curves
            for step, value, error in zip(self.steps, s.values, s.stderr, strict=True)
        ]
        return pd.DataFrame(rows, columns=["step", "what", "layer", "value", "stderr"])

    @property
    def changes(self) -> pd.DataFrame:
        """One row per change: ``what``, ``layer``, ``step``, ``low``, ``high``, ``pvalue``, slopes before and after."""
        import pandas as pd

        columns = ["what", "layer", "step", "low", "high", "pvalue", "before", "after"]
        return pd.DataFrame(list(self.breaks), columns=columns)

    def frame(self) -> pd.DataFrame:
        """The series, one row per step and series."""
        return self.series

    def summary(self) -> RenderableType:
        """What happened, then the trajectory, the change points, the states of the layers and the next command."""
        from rich.console import Group

        lines = [_headline(self), *_coefficient(self), _verdict(self)]
        parts: list[RenderableType] = [*map(Paragraph, lines), _trajectory(self)]
        if self.breaks:
            parts.append(_changes(self))
        parts += map(Paragraph, [*_states(self), *(f"warning: {flag.text}" for flag in self.warnings)])
        if self.ends is not None:
            parts.append(NextCommand((f"strati compare {' '.join(map(command_path, self.ends))}",)))
        return Group(*parts)

    def plot(self, **options: Any) -> Any:
        """Draw the series over the steps, changes marked with their intervals."""
        from strati.report.plots.track import plot_track

        return plot_track(self, **options)


class MeasuredUnit(NamedTuple):
    """A measured unit: the number of its checkpoint, the quantity, its points, and why there are none."""

    place: int
    quantity: str
    points: Sequence[SeriesPoint]
    reason: str | None


def assemble(
    readings: Iterable[MeasuredUnit],
    checkpoints: tuple[Checkpoint, ...],
    settings: Mapping[str, Any],
    config: TrackConfig,
    *,
    store: str | None = None,
    left_out: Sequence[str] = (),
) -> Track:
    """Make the result of the points that were measured.

    Raises:
        BadInputError: Nothing could be measured.
    """
    by_place: dict[tuple[str, str | None], dict[int, SeriesPoint]] = {}
    failed: list[dict[str, Any]] = []
    readings = list(readings)
    for reading in readings:
        name = checkpoints[reading.place].name
        reasons = [(reading.quantity, reading.reason)]
        for point in reading.points:
            by_place.setdefault((point.what, point.layer), {})[reading.place] = point
            part = f"{point.what} of {point.layer}" if point.layer else point.what
            reasons.append((part, point.details.get("reason")))
        failed += [{"checkpoint": name, "quantity": q, "reason": r} for q, r in reasons if r is not None]
    if failed and len(failed) == len(readings):
        raise BadInputError(failed[0]["checkpoint"], f"nothing could be measured: {failed[0]['reason']}")
    count = len(checkpoints)
    table = {key: [at.get(i, _NO_POINT) for i in range(count)] for key, at in by_place.items()}
    drawn = {str(layer): points for (what, layer), points in table.items() if what == SPECTRUM}
    curves = [
        Series(what, layer, tuple(p.value for p in points), tuple(p.stderr for p in points))
        for (what, layer), points in table.items()
        if what != SPECTRUM
    ]
    curves += [
        _differences(*key, points)
        for key, points in table.items()
        if any(p.details.get("blocks") for p in points)
    ]
    steps = tuple(checkpoint.step for checkpoint in checkpoints)
    lower = {i for points in table.values() for i, p in enumerate(points) if p.details.get("off_minimum")}
    return Track(
        steps,
        tuple(curves),
        _breaks(steps, curves, config),
        settings,
        tuple(failed),
        store,
        tuple(_warnings(len(lower), failed, left_out, count)),
        {
            "unit": UNIT,
            "ranks": [round(rank, 4) for rank in RANKS],
            "layers": [
                {"layer": layer, "values": [p.details.get("spectrum") or None for p in points]}
                for layer, points in drawn.items()
            ],
        }
        if drawn
        else {},
        {layer: tuple(p.details.get("state") for p in points) for layer, points in drawn.items()},
        _ends(checkpoints),
    )


def _warnings(
    lower: int, failed: Sequence[Mapping[str, str]], left_out: Sequence[str], checkpoints: int
) -> Iterable[Flag]:
    if lower:
        text = (
            f"at {lower} of {checkpoints} checkpoints the chains found lower losses than the checkpoint's own: "
            "in the middle of training the values are lower than a minimum's would be, and may be negative"
        )
        yield Flag("off-minimum", text)
    by_quantity: dict[str, list[str]] = {}
    for row in failed:
        by_quantity.setdefault(row["quantity"], []).append(row["reason"])
    if by_quantity:
        texts = [
            f"no {quantity} at {len(reasons)} of {checkpoints} checkpoints ({reasons[-1]})"
            for quantity, reasons in by_quantity.items()
        ]
        more = [f"and {len(texts) - 2} more quantities"] if len(texts) > 2 else []
        yield Flag("incomplete", "; ".join(texts[:2] + more))
    if left_out:
        yield Flag("left-out", f"not followed, as their names have no step: {', '.join(left_out[:5])}")


def _ends(checkpoints: tuple[Checkpoint, ...]) -> tuple[str, str] | None:
    first, last = checkpoints[0].source, checkpoints[-1].source
    are_files = all(isinstance(source, str | Path) for source in (first, last))
    return (str(first), str(last)) if are_files and len(checkpoints) > 1 else None


def _differences(what: str, layer: str | None, points: Sequence[SeriesPoint]) -> Series:
    """What a learning coefficient changed by since the checkpoint before, with the error that shared noise leaves."""
    values: list[float | None] = []
    errors: list[float | None] = []
    before = _NO_POINT
    for point in points:
        comparable = point.value is not None and before.value is not None
        values.append((point.value or 0.0) - (before.value or 0.0) if comparable else None)
        blocks = (before.details.get("blocks"), point.details.get("blocks"))
        errors.append(difference_error(*blocks) if comparable else None)
        before = point if point.value is not None else before
    return Series(what.replace("llc", CHANGE, 1), layer, tuple(values), tuple(errors))


def _breaks(
    steps: tuple[float, ...], curves: Sequence[Series], config: TrackConfig
) -> tuple[dict[str, Any], ...]:
    followed = [s for s in curves if not s.what.startswith(CHANGE)]
    long = [s for s in followed if sum(v is not None for v in s.values) >= LEAST]
    breaks = [
        {"what": s.what, "layer": s.layer, **vars(change)}
        for s in long
        for change in find_changes(steps, s.values, level=config.level, series=len(long), seed=config.seed)
    ]
    return tuple(sorted(breaks, key=lambda row: (row["step"], row["what"], row["layer"] or "")))


def _headline(track: Track) -> str:
    count = len(track.steps)
    span = f"steps {track.steps[0]:,.0f} to {track.steps[-1]:,.0f}" if count else "no step"
    head = f"{count} checkpoint{'s' if count != 1 else ''}, {span}"
    loss = next((s for s in track.curves if s.what == "loss" and s.layer is None), None)
    if loss is not None and (trend := _trend(loss)):
        return f"{head}: the loss {trend}."
    if track.states:
        last = [at[-1] for at in track.states.values()]
        learned = sum(state == LayerState.LEARNED for state in last)
        return f"{head}: {learned} of {len(last)} layers are learned at the end."
    return f"{head}."


def _trend(series: Series) -> str:
    """Whether a series falls, rises or stays between its first and last value."""
    points = [(v, e or 0.0) for v, e in zip(series.values, series.stderr, strict=True) if v is not None]
    if len(points) < 2:
        return ""
    (first, first_error), (last, last_error) = points[0], points[-1]
    noise = max(2 * math.hypot(first_error, last_error), 0.01 * max(abs(first), abs(last)))
    if abs(last - first) <= noise:
        return f"stays near {_digits(last)}"
    return f"{'falls' if last < first else 'rises'} from {_digits(first)} to {_digits(last)}"


def _coefficient(track: Track) -> list[str]:
    from strati.landscape.llc.estimate import with_error

    if "nbeta" not in track.settings:
        return []
    settings = ", ".join(f"{name} {_digits(track.settings[name])}" for name in ("nbeta", "gamma"))
    for series in track.curves:
        points = [*zip(track.steps, series.values, series.stderr, strict=True)]
        defined = [point for point in points if point[1] is not None]
        if series.what == "llc" and series.layer is None and defined:
            step, value, error = defined[-1]
            return [f"learning coefficient {with_error(value, error)} at step {step:,.0f} ({settings})"]
    return [f"no learning coefficient could be estimated ({settings})"]


def _verdict(track: Track) -> str:
    points = max((sum(v is not None for v in s.values) for s in track.curves), default=0)
    if points < LEAST:
        return f"too few checkpoints ({points}) to test for change points; {LEAST} are needed"
    count = len(track.breaks)
    if count:
        return f"{count} change point{'s' if count > 1 else ''} that no smooth curve explains"
    return "no change points: smooth trends explain every series"


def _trajectory(track: Track) -> Table:
    count = len(track.steps)
    columns = sorted({round(k * (count - 1) / (_STEPS - 1)) for k in range(_STEPS)}) if count else []
    network_curves = [s for s in track.curves if s.layer is None and not s.what.startswith(CHANGE)]
    layers = [s for s in track.curves if s.layer is not None and s.what == _LAYER_METRIC]
    names = without_shared_prefix([str(s.layer) for s in layers])
    labels = [_TITLES.get(s.what, s.what) for s in network_curves]
    labels += [f"{_TITLES[_LAYER_METRIC]} {name.removesuffix('.weight')}" for name in names[:_LAYERS]]
    rows = tuple(
        (label, *(_digits(s.values[i]) for i in columns))
        for label, s in zip(labels, [*network_curves, *layers[:_LAYERS]], strict=True)
    )
    hidden = len(layers) - _LAYERS
    notes = (f"{hidden} more layers: --json or --html has every series",) if hidden > 0 else ()
    titles = (Column(f"{track.steps[i]:,.0f}", True) for i in columns)
    return Table((Column("step", keep=True), *titles), rows, notes=notes)


def _states(track: Track) -> list[str]:
    """Since when each layer has its last state."""
    names = dict(zip(track.states, without_shared_prefix(list(track.states)), strict=True))
    since: dict[tuple[str, float], list[str]] = {}
    for layer, states in track.states.items():
        present = [(step, state) for step, state in zip(track.steps, states, strict=True) if state]
        if not present:
            continue
        last, begin = present[-1][1], present[0][0]
        for (_, before), (step, after) in pairwise(present):
            begin = step if before != last and after == last else begin
        begin = begin if last == LayerState.LEARNED else track.steps[-1]
        since.setdefault((last, begin), []).append(names[layer].removesuffix(".weight"))
    lines = []
    for (state, step), layers in sorted(since.items()):
        text = "too small to tell" if state == LayerState.TOO_SMALL else state
        when = f"from step {step:,.0f}" if state == LayerState.LEARNED else "at the end"
        more = f", {len(layers) - 6} more" if len(layers) > 6 else ""
        lines.append(f"{text} {when}: {', '.join(layers[:6])}{more}")
    return lines


def _digits(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _changes(track: Track) -> Table:
    titles = ("at step", "95 % interval", "p")
    columns = (
        Column("change of", keep=True),
        Column("layer", keep=True),
        *(Column(name, True) for name in titles),
    )
    rows = tuple(
        (
            _TITLES.get(row["what"], row["what"]),
            (row["layer"] or "(network)").removesuffix(".weight"),
            f"{row['step']:,.0f}",
            f"{row['low']:,.0f} to {row['high']:,.0f}",
            f"{row['pvalue']:.1g}",
        )
        for row in track.breaks[:_CHANGES]
    )
    left = len(track.breaks) - len(rows)
    return Table(columns, rows, notes=(f"{left} more: --json has them",) if left > 0 else ())
