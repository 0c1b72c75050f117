r"""What is measured of one checkpoint, and of the straight line between two networks.

Each quantity of a checkpoint is one unit of work whose value is a list of :class:`SeriesPoint`. It depends on the
checkpoint, the data and the settings alone, so that it can be done anywhere and once.

On the line :math:`L(t) = L((1-t)\,\theta_A + t\,\theta_B)` the barrier is the largest
:math:`L(t) - (1-t) L(0) - t L(1)` (Frankle, Dziugaite, Roy and Carbin 2020); between networks that differ only by the
order of their units it vanishes once they are aligned (Ainsworth, Hayase and Srinivasa 2023).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from strati.comparison.results import LossLine, LossPath
from strati.core.errors import BadInputError, NotFiniteError
from strati.core.plugins import require
from strati.landscape.llc.config import LLCConfig
from strati.tracking.coefficients import Level, estimate, shared_config
from strati.tracking.config import METRICS, TrackConfig

if TYPE_CHECKING:
    from torch import Tensor, nn

    from strati.core.results import FloatArray
    from strati.io.network import Openable
    from strati.jobs.engine import Load, Unit
    from strati.landscape.objective import Objective
    from strati.tracking.checkpoints import Checkpoint

SPECTRUM = "spectrum"
"""The name of points that hold a spectrum to be drawn, and are no series."""

LAYERS, HEADS, GROUPS = "llc of layers", "llc of heads", "llc of groups"
"""Learning coefficients of parts: units of their own, so that each can be asked for later."""

RANKS = tuple(k / 23 for k in range(24))
UNIT = 100
_SHARED = ("sampler", "nbeta", "gamma", "step", "chains", "draws", "batch", "seed")


class SeriesPoint(NamedTuple):
    """One number of one checkpoint.

    Attributes:
        what: The series it belongs to.
        layer: Of which layer; ``None`` for the network.
        value: The number.
        stderr: Its standard error.
        details: What differences between checkpoints are judged by, why there is no value, or a spectrum to draw.
    """

    what: str
    layer: str | None
    value: float | None
    stderr: float | None = None
    details: Mapping[str, Any] = {}


@dataclass(frozen=True)
class Measurer:
    """The body of a unit.

    Attributes:
        checkpoints: All checkpoints of the run.
        data: Whatever names the data; ``None`` where only spectra are followed.
        model: A module that a checkpoint's weights are loaded into, where they cannot be rebuilt from a file.
        config: The options.
        labels: The group of every row, where groups were asked for.
        settings: What was chosen once for all checkpoints.
    """

    checkpoints: tuple[Checkpoint, ...]
    data: Any
    model: nn.Module | None
    config: TrackConfig
    labels: tuple[str, ...] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, unit: Unit, load: Load) -> list[SeriesPoint]:
        """One quantity of one checkpoint."""
        checkpoint = self.checkpoints[unit.config["place"]]
        if unit.config["quantity"] == "spectra":
            return _spectra(checkpoint, self.config)
        return list(_QUANTITIES[unit.config["quantity"]](self.module(checkpoint), self))

    def module(self, checkpoint: Checkpoint) -> nn.Module:
        """The checkpoint as a module: rebuilt from its file, or its weights in the module that was given."""
        if self.model is None:
            from strati.io.to_module import as_module

            return as_module(checkpoint.source, activation=self.config.activation)
        import torch

        from strati.io.network import open as open_network

        network = open_network(checkpoint.source)
        holder = copy.deepcopy(self.model).eval()
        state = holder.state_dict()
        missing = sorted(set(state) - {tensor.name for tensor in network.tensors})
        if missing:
            why = f"lacks {missing[0]}, which the model has; give the model it was saved from"
            raise BadInputError(checkpoint.name, why)
        other = next((name for name in state if network[name].shape != tuple(state[name].shape)), None)
        if other is not None:
            shapes = f"{other} as {network[other].shape}, the model as {tuple(state[other].shape)}"
            raise BadInputError(checkpoint.name, f"has {shapes}; give the right model")
        holder.load_state_dict({name: torch.as_tensor(network.read(name).copy()) for name in state})
        return holder

    def loss_name(self, model: nn.Module) -> str:
        """The loss that was asked for, or the one that fits the targets; of token ids alone, that of the next token."""
        if self.config.loss:
            return self.config.loss
        from strati.evaluate.batches import as_batches
        from strati.evaluate.models import predicts_next

        first = as_batches(self.data, model).first()
        if first.y is None:
            return "cross_entropy" if predicts_next(model) else "behavioural-mse"
        return "mse" if first.y.is_floating_point() else "cross_entropy"

    def rows(self, model: nn.Module) -> Any:
        """All rows as ``x`` or ``(x, y)``, or as many as are used."""
        from strati.evaluate.batches import as_batches

        batches = as_batches(self.data, model)
        head = batches.head(self.config.rows) if self.config.rows else batches.whole("this quantity")
        return head.x if head.y is None else (head.x, head.y)

    def inputs(self, model: nn.Module) -> Any:
        """The inputs alone; all data as they are where no number of rows was asked for."""
        rows = self.rows(model) if self.config.rows else self.data
        return rows[0] if isinstance(rows, tuple) else rows

    def shared_settings(self) -> dict[str, Any]:
        """The sampler's settings for all checkpoints, with the step that the stiffest of them needs."""
        losses: list[str] = []
        refused: list[BadInputError] = []

        def objectives() -> Iterator[tuple[str, Objective]]:
            for checkpoint in self.checkpoints:
                try:
                    model = self.module(checkpoint)
                except BadInputError as error:
                    refused.append(error)  # its own unit names it
                    continue
                if not losses:
                    losses.append(self.loss_name(model))
                try:
                    yield checkpoint.name, _objective(model, losses[0], self.rows(model))
                except NotFiniteError:
                    continue  # its own unit names it
            if len(refused) == len(self.checkpoints):
                raise refused[0]

        shared, name = shared_config(objectives(), self.config.sampler_config())
        settings = {key: value for key, value in asdict(shared).items() if key in _SHARED}
        return settings | {"loss": losses[0], "calibrated_on": name, "rows": self.config.rows}


def quantiles(eigenvalues: Any) -> list[int]:
    """Hundredths of the decimal logarithm of eigenvalues at :data:`RANKS`: enough to draw a spectrum by.

    Examples:
        >>> quantiles([1.0, 10.0, 100.0])[:: len(RANKS) - 1]
        [0, 200]
    """
    values = np.sort(np.asarray(eigenvalues, float))
    if values.size == 0 or not values[-1] > 0:
        return []
    logarithms = np.log10(np.maximum(values, values[-1] * 1e-12))
    hundredths: list[int] = (UNIT * np.quantile(logarithms, RANKS)).round().astype(int).tolist()
    return hundredths


def loss_path(
    first: Openable, last: Openable, data: Any, *, points: int = 11, activation: str | None = None
) -> LossPath:
    """Measure the loss at equal steps between two networks, as stored and with their units in one order.

    Args:
        first: A network that can be run (:func:`strati.as_module`).
        last: Another one, with the same parameters.
        data: Inputs and targets.
        points: Positions, both ends included.
        activation: Of bare multilayer perceptrons; by default ReLU.

    Raises:
        BadInputError: The parameters differ in name or shape, or the data have no targets.

    Examples:
        >>> from strati import embedded
        >>> nets = [embedded.path(f"digits-mlp{kind}.safetensors") for kind in ("-init", "")]
        >>> line = loss_path(*nets, embedded.path("digits.npz"), points=3)
        >>> line.loss_name, line.stored.loss[0] > line.stored.loss[2], line.aligned
        ('cross_entropy', True, None)
    """
    import torch

    from strati.evaluate.batches import as_batches
    from strati.io.network import open as open_network
    from strati.io.to_module import as_module

    if points < 3:
        raise BadInputError("points", "needs 3 or more: both ends and something between them")
    module_options: dict[str, Any] = {} if activation is None else {"activation": activation}
    model, other = (as_module(network, **module_options) for network in (first, last))
    start, end = ({name: value.clone() for name, value in m.state_dict().items()} for m in (model, other))
    odd = [n for n in start | end if n not in start or n not in end or start[n].shape != end[n].shape]
    if odd:
        raise BadInputError(
            "path", f"{odd[0]} differs in shape or is in one network only; give one architecture"
        )
    targets = as_batches(data, model).first().y
    if targets is None:
        raise BadInputError("data", "has no targets, which the loss along the path needs")
    name = "mse" if targets.is_floating_point() else "cross_entropy"
    positions = np.linspace(0.0, 1.0, points)

    def losses(end: Mapping[str, Tensor]) -> FloatArray:
        rows = []
        for t in positions:
            state = {
                key: torch.lerp(value, end[key].to(value.dtype), float(t))
                if value.is_floating_point()
                else value
                for key, value in start.items()
            }
            model.load_state_dict(state)
            rows.append(row_losses(model, data, name).numpy())
        return np.stack(rows)

    renumbered = _renumbered_state(open_network(model), open_network(other), end, activation)
    try:
        stored, aligned = losses(end), None if renumbered is None else losses(renumbered)
    finally:
        model.load_state_dict(start)
    return LossPath(
        name,
        stored.shape[1],
        tuple(positions.tolist()),
        _line(stored, positions),
        None if aligned is None else _line(aligned, positions),
    )


def row_losses(model: nn.Module, data: Any, name: str) -> Tensor:
    """The loss of every row: squared norm of the error, or cross-entropy, of sequences the mean over their tokens.

    Raises:
        BadInputError: There are no targets.
    """
    import torch
    from torch.nn import functional

    from strati.evaluate.batches import NO_LABEL, as_batches
    from strati.evaluate.models import call
    from strati.landscape.objective import LossName, next_tokens

    losses = []
    with torch.no_grad():
        for batch in as_batches(data, model):
            output = call(model, batch.x)
            y = next_tokens(LossName(name), batch.x, output) if batch.y is None else batch.y
            if y is None:
                raise BadInputError("data", f"has no targets y, which the loss {name} needs; give (x, y)")
            if name == "mse":
                losses.append(((output - y.reshape(output.shape)) ** 2).flatten(1).sum(1))
            elif output.ndim == 3:
                each = functional.cross_entropy(output.transpose(1, 2), y, reduction="none")
                losses.append(each.sum(1) / (y != NO_LABEL).sum(1).clamp(min=1))
            else:
                losses.append(functional.cross_entropy(output, y.long(), reduction="none"))
    return torch.cat(losses).double().cpu()


def _line(losses: FloatArray, positions: FloatArray) -> LossLine:
    """Losses by position and row."""
    many = losses.shape[1]
    root = np.sqrt(max(many, 1))
    excess = losses - (1 - positions)[:, None] * losses[0] - positions[:, None] * losses[-1]
    place = int(excess.mean(axis=1).argmax())
    spread = excess[place].std(ddof=1) / root if many > 1 else 0.0
    errors = losses.std(axis=1, ddof=1) / root if many > 1 else np.zeros(len(losses))
    return LossLine(
        tuple(losses.mean(axis=1).tolist()),
        tuple(errors.tolist()),
        float(excess[place].mean()),
        float(spread),
        float(positions[place]),
    )


def _renumbered_state(
    first: Any, last: Any, state: Mapping[str, Tensor], activation: str | None
) -> dict[str, Tensor] | None:
    """The last network's parameters in the first one's numbering; ``None`` where no other order brings them closer."""
    import torch

    from strati.comparison.compare import matched_layers
    from strati.comparison.unit_alignment import unit_order
    from strati.interventions.compress.rewrite_checkpoint import renumbered_tensors

    order = unit_order(first, last, matched_layers(first, last), activation, least=1.0)
    changed = renumbered_tensors(last, order)
    new = {name: torch.as_tensor(np.ascontiguousarray(array)) for name, array in changed.items()}
    return {**state, **new} if new else None


def _spectra(checkpoint: Checkpoint, config: TrackConfig) -> list[SeriesPoint]:
    """The metrics of every layer, as ``scan`` has them."""
    from strati.spectra.scan import scan

    points = []
    for item in scan(checkpoint.source, layers=config.layers, workers=1, seed=config.seed):
        row, layer = item.row(), item.layer.name
        for name in METRICS:
            value = None if row.get(name) is None else float(row[name])
            points.append(
                SeriesPoint(name, layer, value, row.get("alpha_stderr") if name == "alpha" else None)
            )
        drawn = {"spectrum": quantiles(item.spectrum.eigenvalues), "state": row["state"]}
        points.append(SeriesPoint(SPECTRUM, layer, None, None, drawn))
    return points


def _loss(model: nn.Module, job: Measurer) -> Iterator[SeriesPoint]:
    """The mean loss over the data with its standard error over rows; nothing for a behavioural loss, which is zero."""
    name = job.loss_name(model)
    if not name.startswith("behavioural"):
        losses = row_losses(model, job.data, name)[: job.config.rows]
        error = float(losses.std() / math.sqrt(losses.numel())) if losses.numel() > 1 else None
        yield SeriesPoint("loss", None, float(losses.mean()), error)


def _objective(model: nn.Module, loss: str, data: Any, **options: Any) -> Objective:
    from strati.landscape.objective import objective

    return objective(model, loss, data, **options)


def _level(model: nn.Module, job: Measurer, data: Any = None, **options: Any) -> Level:
    """The learning coefficient at the settings shared by all checkpoints."""
    config = LLCConfig(**{name: job.settings[name] for name in _SHARED})
    rows = job.rows(model) if data is None else data
    return estimate(_objective(model, job.settings["loss"], rows, **options), config)


def _coefficient(what: str, layer: str | None, level: Level) -> SeriesPoint:
    details = {"blocks": level.blocks, "reason": level.reason, "off_minimum": level.off_minimum}
    return SeriesPoint(what, layer, level.value, level.error, details)


def _llc(model: nn.Module, job: Measurer) -> Iterator[SeriesPoint]:
    level = _level(model, job)
    if level.value is None:
        raise BadInputError("llc", level.reason or "the chains did not mix")
    yield _coefficient("llc", None, level)


def _llc_of_layers(model: nn.Module, job: Measurer) -> Iterator[SeriesPoint]:
    """Of the weights that spectra have, by the same names: those of two dimensions and more."""
    from strati.landscape.objective import FlatModel

    parameters = dict(model.named_parameters())
    for name in FlatModel(model, layers=job.config.layers).names:
        if parameters[name].ndim >= 2:
            yield _coefficient("llc", name, _level(model, job, layers=[name]))


def _llc_of_heads(model: nn.Module, job: Measurer) -> Iterator[SeriesPoint]:
    from strati.landscape.llc.parts import PartModel, head_entries

    for head in job.config.heads or ():
        block, number = (int(n) for n in head.split("."))
        part = PartModel(model, head_entries(model, (block, number)))
        yield _coefficient("llc", f"head {head}", _level(part, job, job.rows(model)))


def _llc_of_groups(model: nn.Module, job: Measurer) -> Iterator[SeriesPoint]:
    from strati.landscape.llc.parts import data_groups, number_of_rows, rows_of

    rows = job.rows(model)
    count = number_of_rows(rows[0] if isinstance(rows, tuple) else rows)
    labels = (job.labels or ())[: count if job.config.rows else None]
    for label, index in data_groups(labels, count):
        yield _coefficient(f"llc[{label}]", None, _level(model, job, rows_of(rows, index)))


def _scales(model: nn.Module, job: Measurer) -> Iterator[SeriesPoint]:
    """``N_eff`` at every loss scale."""
    from strati.landscape.llc.scales import effective_parameters

    scales = list(job.config.scales)
    effective = effective_parameters(model, job.inputs(model), scales=scales, seed=job.config.seed)
    for row in effective.to_dict()["scales"]:
        error, value = row.get("stderr"), row["effective"]
        details = {"reason": row.get("reason") if value is None else None}
        name = f"effective_parameters[{row['epsilon']:g}]"
        yield SeriesPoint(name, None, value, None if error is None else 2 * error, details)


def _curvature(model: nn.Module, job: Measurer) -> Iterator[SeriesPoint]:
    """Largest eigenvalue and trace of the Hessian of the mean loss, and the share of negative eigenvalues."""
    from strati.landscape.curvature import curvature

    spectrum = curvature(model, job.loss_name(model), job.rows(model), top=1, seed=job.config.seed)
    yield SeriesPoint("curvature_top", None, spectrum.top[0], spectrum.top_residuals[0])
    yield SeriesPoint("curvature_trace", None, spectrum.trace, spectrum.trace_stderr)
    yield SeriesPoint("curvature_negative", None, spectrum.negative, spectrum.negative_stderr)


def _counts(model: nn.Module, job: Measurer) -> Iterator[SeriesPoint]:
    """Free directions and effective parameters."""
    from strati.landscape.counts.degeneracy import degeneracy

    counts = degeneracy(model, job.inputs(model)).to_dict()
    yield SeriesPoint("free", None, counts["free"])
    yield SeriesPoint("effective", None, counts["effective"])
    for layer in counts["layers"]:
        yield SeriesPoint("free", layer["name"], layer["free"])


def _interventions(model: nn.Module, job: Measurer) -> Iterator[SeriesPoint]:
    """Performance with each layer set to zero in turn, and intact."""
    require("torch", "torch", "interventions")
    from strati.interventions.kinds import zero
    from strati.interventions.study import study

    study_options: dict[str, Any] = {"layers": job.config.layers}
    studied = study(model, data=job.rows(model), interventions=[zero()], **study_options)
    done = [row for row in studied.rows if row["status"] == "done"]
    yield SeriesPoint("intact", None, done[0]["intact_performance"] if done else None)
    for row in done:
        if row["intervention"] == "zero":
            yield SeriesPoint("zeroed", row["layer"], row["performance"])


_QUANTITIES: Mapping[str, Callable[[nn.Module, Measurer], Iterator[SeriesPoint]]] = {
    "loss": _loss,
    "llc": _llc,
    LAYERS: _llc_of_layers,
    HEADS: _llc_of_heads,
    GROUPS: _llc_of_groups,
    "scales": _scales,
    "curvature": _curvature,
    "counts": _counts,
    "interventions": _interventions,
}
