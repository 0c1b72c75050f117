"""``strati.track``: a training run followed checkpoint by checkpoint, and where it changes.

One store holds one row per checkpoint and quantity: stop it, add later checkpoints, add a quantity, and only what is
missing is computed. Learning coefficients have the same data, temperature, localisation, step and random numbers at
every checkpoint, chosen once and kept in the store, so that they can be compared.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

from strati.core.errors import BadInputError, NotFiniteError
from strati.core.options import resolve
from strati.core.results import Flag, Result, Tick, silent
from strati.io.roles import places
from strati.io.to_module import as_module
from strati.jobs.driver import Run, drive, interruptible, open_store, shared_folder
from strati.jobs.engine import Outcome, Unit
from strati.jobs.store import Finished, Store, unit_key
from strati.tracking.change_points import LEAST, find_changes
from strati.tracking.checkpoints import Checkpoint, in_order, left_out
from strati.tracking.coefficient import difference_error
from strati.tracking.config import TrackConfig
from strati.tracking.data_groups import digest, grouped
from strati.tracking.measure import (
    GROUPS,
    HEADS,
    LAYERS,
    RANKS,
    SPECTRUM,
    UNIT,
    Measurer,
    as_network,
    loss_name,
    whole_data,
)

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import RenderableType
    from torch import nn

    from strati.core.option_types import TrackOptions
    from strati.io.network import Openable
    from strati.schemas.json_types import TrackFields

STORE = "track.sqlite"
LAYOUT = 4
CHANGE = "llc_change"
"""The series of differences between neighbouring checkpoints, whose errors are smaller than those of ``llc``."""


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
        steps: Of the checkpoints, in order. curves: The series. breaks: Where they change. settings: What is the same
        for the learning coefficient of every checkpoint. failed: What could not be measured, and why. store: The file
        that keeps it. warnings: What a reader must know. spectra: To draw them by: ``layers`` with ``values`` per
        checkpoint, decimal logarithms of eigenvalues in units of
            ``1 / unit``, at the shares ``ranks`` of all eigenvalues; ``None`` where there is none. states: The state
            of every layer at every checkpoint. ends: Paths of the first and the last checkpoint, if they are files.
    """

    verb: ClassVar[str] = "track"

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
    def series(self) -> pd.DataFrame:
        """One row per step and series: ``step``, ``what``, ``layer``, ``value``, ``stderr``."""
        import pandas as pd

        rows = [
            {"step": step, "what": s.what, "layer": s.layer, "value": value, "stderr": error}
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

    def payload(self) -> TrackFields:
        """Steps, series, changes, settings; what failed and why."""
        return {
            "steps": self.steps,
            "series": self.curves,
            "changes": self.breaks,
            "settings": dict(self.settings),
            "failed": self.failed,
            "store": self.store,
            "warnings": self.warnings,
            "spectra": dict(self.spectra),
            "states": dict(self.states),
            "layers": places(s.layer for s in self.curves if s.layer is not None),
        }

    def frame(self) -> pd.DataFrame:
        """The series, one row per step and series."""
        return self.series

    def summary(self) -> RenderableType:
        """The whole network's series from first to last, and the changes in order of their steps."""
        from strati.tracking.summary import summarise

        return summarise(self)

    def plot(self, **options: Any) -> Any:
        """Draw the series over the steps, changes marked with their intervals."""
        from strati.report.plots.track import plot_track

        return plot_track(self, **options)


def track(
    checkpoints: Any,
    *,
    data: Any = None,
    out: str | Path | None = None,
    engine: str = "local",
    address: str | None = None,
    steps: Sequence[float] | None = None,
    model: Openable | None = None,
    config: TrackConfig | None = None,
    tick: Tick = silent,
    **options: Unpack[TrackOptions],
) -> Track:
    """Follow a training run over its checkpoints.

    Args:
        checkpoints: Paths, cache ids, state dicts or modules; a mapping of steps to them; or the folder that holds
            them. The step of each is the last number in its name.
        data: Whatever names data; needed for everything but spectra.
        out: A folder whose store keeps what is done; the same call resumes from there.
        engine: Where the work is done: ``local`` (processes) or ``ray``.
        address: With ``engine="ray"``, an existing cluster.
        steps: The steps, where names do not tell.
        model: A network to load the weights into, where a file alone does not tell the architecture.
        config: Options; or give them by name.
        tick: Called after each unit of work.
        **options: Fields of :class:`TrackConfig`, on top of ``config``.

    Raises:
        BadInputError: No checkpoint can be read, an option makes no sense, or the folder holds another run.
        StoppedError: Ctrl-C.

    Examples:
        >>> import numpy as np
        >>> rng = np.random.default_rng(0)
        >>> run = [{"fc.weight": rng.normal(size=(30, 20)) * (1 + t)} for t in range(3)]
        >>> followed = track(run, what="spectra")
        >>> followed.steps, [s.what for s in followed.curves if s.what == "spectral_norm"]
        ((0.0, 1.0, 2.0), ['spectral_norm'])
    """
    settled = resolve(TrackConfig, config, options, of=track)
    holder = None if model is None else as_module(model, activation=settled.activation)
    ordered = in_order(checkpoints, steps)
    default = ("spectra", "loss", "llc") if data is not None else ("spectra",)
    what = default if settled.what is None else tuple(settled.what)
    if data is None and set(what) - {"spectra"}:
        raise BadInputError("data", f"is needed for {', '.join(sorted(set(what) - {'spectra'}))}")
    with ExitStack() as stack:
        folder = Path(out) if out is not None else Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(shared_folder(folder))
        identity = unit_key({"work": "track", "seed": settled.seed})
        store = stack.enter_context(
            open_store(folder / STORE, identity=identity, layout=LAYOUT, about={"name": "track"}, kind="run")
        )
        run = Run(
            engine=engine,
            workers=1 if settled.workers is None else settled.workers,
            address=address,
            retry=settled.retry,
            tick=tick,
        )
        stack.enter_context(interruptible(lambda: len(store.keys()), run))
        used, labels = grouped(data, settled.data_groups)
        data_digest = digest(used) if set(what) - {"spectra"} else ""
        settings = _settings(store, ordered, used, data_digest, holder, settled) if "llc" in what else {}
        body = Measurer(ordered, used, holder, settled, settings, labels)
        units = _units(
            ordered, [part for q in what for part in _parts(q, settled, data_digest, settings, labels)]
        )
        done = store.keys(failed=not settled.retry)
        todo = [unit for unit in units if unit.key not in done]
        run.expect(len(todo))
        drive(store, body, todo, _keep, run)
        tracked = _result(
            store, ordered, units, settings, settled, None if out is None else str(folder / STORE)
        )
    skipped = left_out(checkpoints)
    if not skipped:
        return tracked
    text = f"not followed, as their names have no step: {', '.join(skipped[:5])}"
    return replace(tracked, warnings=(*tracked.warnings, Flag("left-out", text)))


def _units(ordered: tuple[Checkpoint, ...], parts: Sequence[tuple[str, Mapping[str, Any]]]) -> list[Unit]:
    units = []
    for place, checkpoint in enumerate(ordered):
        identity = checkpoint.identity()
        for quantity, depends in parts:
            identifying = {
                "checkpoint": identity,
                "step": checkpoint.step,
                "quantity": quantity,
                "layout": LAYOUT,
            }
            name = f"{checkpoint.name}: {quantity}"
            where = {"place": place, "quantity": quantity}
            units.append(Unit(unit_key(identifying | dict(depends)), name, identity, where))
    return units


_DEPENDS = {
    "spectra": ("layers",),
    "loss": ("loss", "rows", "activation"),
    "scales": ("rows", "activation", "scales"),
    "curvature": ("loss", "rows", "activation"),
    "counts": ("rows", "activation"),
    "interventions": ("rows", "activation", "layers"),
    "llc": ("activation",),
    LAYERS: ("activation", "layers"),
    HEADS: ("activation", "heads"),
    GROUPS: ("activation",),
}
"""The options that each quantity's numbers depend on, besides the seed; those of the sampler are in the settings."""


def _parts(
    quantity: str, config: TrackConfig, data: str, settings: Mapping[str, Any], labels: tuple[str, ...] | None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The units that a quantity comes to at a checkpoint, each with all that its numbers depend on."""
    quantities = [quantity]
    if quantity == "llc":
        requested = {LAYERS: config.per_layer, HEADS: bool(config.heads), GROUPS: labels is not None}
        quantities += [part for part, is_requested in requested.items() if is_requested]
    for part in quantities:
        depends: dict[str, Any] = {name: getattr(config, name) for name in _DEPENDS[part]}
        if quantity != "spectra":
            depends["data"] = data
        if quantity == "llc":
            depends["settings"] = dict(settings)
        if part == GROUPS:
            depends["labels"] = labels
        yield part, depends


def _keep(outcome: Outcome) -> Finished:
    unit = outcome.unit
    value = {"points": [list(point) for point in outcome.value] if outcome.reason is None else []}
    return Finished(unit.key, unit.name, value, outcome.reason)


def _settings(
    store: Store,
    ordered: tuple[Checkpoint, ...],
    data: Any,
    shown: str,
    model: nn.Module | None,
    config: TrackConfig,
) -> dict[str, Any]:
    """Temperature, localisation, step, chains and draws for every checkpoint, chosen once and kept in the store."""
    names = ("loss", "rows", "nbeta", "gamma", "chains", "draws", "batch", "seconds", "activation")
    options = {name: getattr(config, name) for name in names}
    key = unit_key({"work": "track settings", "layout": LAYOUT, "data": shown, "options": options})
    for unit in store.units():
        if unit.key == key:
            return dict(unit.value["settings"])
    calibrated = _calibrated(ordered, data, model, config) | {"data": shown}
    store.put(Finished(key, "settings", {"settings": calibrated, "points": []}))
    return calibrated


def _calibrated(
    ordered: tuple[Checkpoint, ...], data: Any, model: nn.Module | None, config: TrackConfig
) -> dict[str, Any]:
    """The step that the stiffest checkpoint needs, for all of them."""
    from strati.landscape.objective import Objective
    from strati.tracking.coefficient import calibrated, objective_of

    loss = config.loss
    refused: list[BadInputError] = []

    def objectives() -> Iterator[tuple[str, Objective]]:
        nonlocal loss
        for checkpoint in ordered:
            try:
                network = as_network(checkpoint, model, config)
            except BadInputError as error:
                refused.append(error)  # its own unit names it
                continue
            loss = loss or loss_name(data, network, config)
            try:
                yield checkpoint.name, objective_of(network, loss, whole_data(data, network, config))
            except NotFiniteError:
                continue  # its own unit names it
        if len(refused) == len(ordered):
            raise refused[0]

    shared, name = calibrated(
        objectives(),
        loss=loss or "",
        nbeta=config.nbeta,
        gamma=config.gamma,
        chains=config.chains,
        draws=config.draws,
        batch=config.batch,
        seconds=config.seconds,
        seed=config.seed,
    )
    settings = asdict(shared) | {"loss": loss, "sampler": "sgld", "calibrated_on": name}
    return settings | {"rows": config.rows}


def _result(
    store: Store,
    ordered: tuple[Checkpoint, ...],
    units: Sequence[Unit],
    settings: Mapping[str, Any],
    config: TrackConfig,
    path: str | None,
) -> Track:
    stored = {unit.key: unit for unit in store.units()}
    table: dict[tuple[str, str | None], dict[int, tuple[float | None, float | None]]] = {}
    blocks: dict[tuple[str, str | None], dict[int, Any]] = {}
    spectra: dict[str, dict[int, list[int]]] = {}
    states: dict[str, dict[int, str]] = {}
    lower = set()
    failed = []
    for unit in units:
        row = stored.get(unit.key)
        if row is None:
            continue
        place = unit.config["place"]
        if row.reason is not None:
            failed.append(
                {"checkpoint": ordered[place].name, "quantity": unit.config["quantity"], "reason": row.reason}
            )
        for what, layer, value, error, *more in row.value.get("points", ()):
            details, name = more[0] if more else {}, ordered[place].name
            if what == SPECTRUM:
                spectra.setdefault(layer, {})[place] = details["spectrum"]
                states.setdefault(layer, {})[place] = details["state"]
                continue
            table.setdefault((what, layer), {})[place] = (value, error)
            if details.get("blocks"):
                blocks.setdefault((what, layer), {})[place] = details["blocks"]
            if details.get("off_minimum"):
                lower.add(name)
            if details.get("reason") is not None:
                part = f"{what} of {layer}" if layer else what
                failed.append({"checkpoint": name, "quantity": part, "reason": details["reason"]})
    if failed and len(failed) == len(units):
        raise BadInputError(failed[0]["checkpoint"], f"nothing could be measured: {failed[0]['reason']}")
    curves = tuple(
        Series(
            what,
            layer,
            tuple(points.get(i, (None, None))[0] for i in range(len(ordered))),
            tuple(points.get(i, (None, None))[1] for i in range(len(ordered))),
        )
        for (what, layer), points in table.items()
    )
    curves += tuple(
        _changed(series, blocks[series.what, series.layer])
        for series in curves
        if (series.what, series.layer) in blocks
    )
    steps = tuple(checkpoint.step for checkpoint in ordered)
    warnings = []
    if lower:
        text = (
            f"at {len(lower)} of {len(ordered)} checkpoints the chains found lower losses than the checkpoint's own: "
            "in the middle of training the values are lower than a minimum's would be, and may be negative"
        )
        warnings.append(Flag("off-minimum", text))
    if failed:
        warnings.append(Flag("incomplete", _failures(failed, len(ordered))))
    return Track(
        steps,
        curves,
        _breaks(steps, curves, config),
        settings,
        tuple(failed),
        path,
        tuple(warnings),
        _drawn(spectra, len(ordered)),
        {name: tuple(at.get(i) for i in range(len(ordered))) for name, at in states.items()},
        _ends(ordered),
    )


def _failures(failed: Sequence[Mapping[str, str]], checkpoints: int) -> str:
    """What could not be measured, at how many checkpoints, with the reason of the last of them."""
    by_quantity: dict[str, list[str]] = {}
    for row in failed:
        by_quantity.setdefault(row["quantity"], []).append(row["reason"])
    texts = [
        f"no {quantity} at {len(reasons)} of {checkpoints} checkpoints ({reasons[-1]})"
        for quantity, reasons in by_quantity.items()
    ]
    more = f"; and {len(texts) - 2} more quantities" if len(texts) > 2 else ""
    return "; ".join(texts[:2]) + more


def _ends(ordered: tuple[Checkpoint, ...]) -> tuple[str, str] | None:
    first, last = ordered[0].source, ordered[-1].source
    if len(ordered) < 2 or not all(isinstance(source, str | Path) for source in (first, last)):
        return None
    return str(first), str(last)


def _drawn(spectra: Mapping[str, Mapping[int, list[int]]], count: int) -> dict[str, Any]:
    """The spectra as the page takes them."""
    if not spectra:
        return {}
    layers = [
        {"layer": name, "values": [places.get(i) or None for i in range(count)]}
        for name, places in spectra.items()
    ]
    return {"unit": UNIT, "ranks": [round(rank, 4) for rank in RANKS], "layers": layers}


def _changed(series: Series, blocks: Mapping[int, Any]) -> Series:
    """What a learning coefficient changed by since the checkpoint before, with the error that shared noise leaves."""
    values: list[float | None] = []
    errors: list[float | None] = []
    before: int | None = None
    for place, value in enumerate(series.values):
        last = None if before is None else series.values[before]
        comparable = value is not None and last is not None and before is not None
        values.append(value - last if value is not None and last is not None else None)
        errors.append(
            difference_error(blocks.get(before), blocks.get(place))
            if comparable and before is not None
            else None
        )
        before = place if value is not None else before
    return Series(series.what.replace("llc", CHANGE, 1), series.layer, tuple(values), tuple(errors))


def _breaks(
    steps: tuple[float, ...], curves: tuple[Series, ...], config: TrackConfig
) -> tuple[dict[str, Any], ...]:
    followed = [s for s in curves if not s.what.startswith(CHANGE)]
    long = [s for s in followed if sum(v is not None for v in s.values) >= LEAST]
    breaks = []
    for series in long:
        for change in find_changes(
            steps, series.values, level=config.level, series=len(long), seed=config.seed
        ):
            breaks.append({"what": series.what, "layer": series.layer, **vars(change)})
    return tuple(sorted(breaks, key=lambda row: (row["step"], row["what"], row["layer"] or "")))
