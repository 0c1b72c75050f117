"""What is measured of one checkpoint: spectra, loss, learning coefficient, scales, curvature, counts, interventions.

Each quantity is one unit of work whose value is a list of ``(what, layer, value, stderr, more)``; ``more`` is what
differences between checkpoints are judged by, where they are. A unit depends on the checkpoint, the data and the
settings alone, so that it can be done anywhere and once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.core.errors import BadInputError, require
from strati.tracking.config import METRICS, TrackConfig

if TYPE_CHECKING:
    from torch import nn

    from strati.jobs.engine import Load, Unit
    from strati.tracking.checkpoints import Checkpoint
    from strati.tracking.coefficient import Level

Point = tuple[Any, ...]
"""``(what, layer, value, stderr)``, and for learning coefficients a mapping with their blocks and what to know."""


SPECTRUM = "spectrum"
"""The name of points that hold a spectrum to be drawn, and are no series."""

LAYERS, HEADS, GROUPS = "llc of layers", "llc of heads", "llc of groups"
"""Learning coefficients of parts: units of their own, so that each can be asked for later."""

RANKS = tuple(k / 23 for k in range(24))
UNIT = 100


@dataclass(frozen=True)
class Measurer:
    """The body of a unit.

    Attributes:
        checkpoints: All checkpoints of the run.
        data: Whatever names the data; ``None`` where only spectra are followed.
        model: A module that a checkpoint's weights are loaded into, where they cannot be rebuilt from a file.
        config: The options.
        settings: What was chosen once for all checkpoints.
        labels: The group of every row, where groups were asked for.
    """

    checkpoints: tuple[Checkpoint, ...]
    data: Any
    model: nn.Module | None
    config: TrackConfig
    settings: Mapping[str, Any]
    labels: tuple[str, ...] | None = None

    def __call__(self, unit: Unit, load: Load) -> list[Point]:
        """One quantity of one checkpoint."""
        checkpoint = self.checkpoints[unit.config["place"]]
        quantity: str = unit.config["quantity"]
        if quantity == "spectra":
            return spectra(checkpoint, self.config)
        module = as_network(checkpoint, self.model, self.config)
        if quantity == "loss":
            return loss_of(module, self.data, self.config)
        if quantity in ("llc", LAYERS, HEADS, GROUPS):
            return coefficients(quantity, module, self.data, self.config, self.settings, self.labels)
        if quantity == "scales":
            return scales_of(module, self.data, self.config)
        if quantity == "curvature":
            return curvature_of(module, self.data, self.config)
        if quantity == "counts":
            return counts_of(module, self.data, self.config)
        return interventions_of(module, self.data, self.config)


def spectra(checkpoint: Checkpoint, config: TrackConfig) -> list[Point]:
    """The metrics of every layer, as ``scan`` has them."""
    from strati.spectra.scan import scan

    scanned = scan(checkpoint.source, layers=config.layers, workers=1, seed=config.seed)
    points: list[Point] = []
    for item in scanned:
        row = item.row()
        for name in METRICS:
            value = row.get(name)
            error = row.get("alpha_stderr") if name == "alpha" else None
            points.append((name, item.layer.name, None if value is None else float(value), error))
        points.append(
            (
                SPECTRUM,
                item.layer.name,
                None,
                None,
                {"spectrum": quantiles(item.spectrum.eigenvalues), "state": row["state"]},
            )
        )
    return points


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


def as_network(checkpoint: Checkpoint, model: nn.Module | None, config: TrackConfig) -> nn.Module:
    """The checkpoint as a module: rebuilt from its file, or its weights in the module that was given."""
    import copy

    import torch

    if model is None:
        from strati.io.to_module import as_module

        return as_module(checkpoint.source, activation=config.activation)
    from strati.io.network import open as open_network

    network = open_network(checkpoint.source)
    holder = copy.deepcopy(model).eval()
    state = holder.state_dict()
    names = {tensor.name for tensor in network.tensors}
    missing = sorted(set(state) - names)
    if missing:
        why = f"lacks {missing[0]}, which the model has; give the model it was saved from"
        raise BadInputError(checkpoint.name, why)
    other = next((name for name in state if network[name].shape != tuple(state[name].shape)), None)
    if other is not None:
        why = f"has {other} as {network[other].shape}, the model as {tuple(state[other].shape)}; give the right model"
        raise BadInputError(checkpoint.name, why)
    holder.load_state_dict({name: torch.as_tensor(network.read(name).copy()) for name in state})
    return holder


def loss_name(data: Any, model: nn.Module, config: TrackConfig) -> str:
    """The loss that was asked for, or the one that fits the targets; of token ids alone, that of the next token."""
    if config.loss:
        return config.loss
    from strati.evaluate.batches import as_batches
    from strati.evaluate.models import predicts_next

    first = as_batches(data, model).first()
    if first.y is None:
        return "cross_entropy" if predicts_next(model) else "behavioural-mse"
    return "mse" if first.y.is_floating_point() else "cross_entropy"


def loss_of(model: nn.Module, data: Any, config: TrackConfig) -> list[Point]:
    """The mean loss over the data with its standard error over rows; nothing for a behavioural loss, which is zero."""
    import torch

    from strati.evaluate.batches import as_batches, call
    from strati.landscape.objective import LossName, next_tokens

    name = loss_name(data, model, config)
    if name.startswith("behavioural"):
        return []
    values = []
    with torch.no_grad():
        for batch in as_batches(data, model):
            output = call(model, batch.x)
            targets = next_tokens(LossName(name), batch.x, output) if batch.y is None else batch.y
            if targets is None:
                raise BadInputError("data", f"has no targets y, which the loss {name} needs; give (x, y)")
            values.append(per_row(output, targets, name))
    each = torch.cat(values).double()
    each = each[: config.rows] if config.rows else each
    error = float(each.std() / math.sqrt(each.numel())) if each.numel() > 1 else None
    return [("loss", None, float(each.mean()), error)]


def per_row(out: Any, y: Any, name: str) -> Any:
    """The loss of every row: squared error, or cross-entropy, of sequences the mean over their tokens."""
    from torch.nn import functional

    from strati.evaluate.batches import NO_LABEL

    if name == "mse":
        return ((out - y.reshape(out.shape)) ** 2).flatten(1).sum(1)  # the squared norm, as everywhere
    if out.ndim == 3:  # tokens: the mean over a sequence
        each = functional.cross_entropy(out.transpose(1, 2), y, reduction="none")
        return each.sum(1) / (y != NO_LABEL).sum(1).clamp(min=1)
    return functional.cross_entropy(out, y.long(), reduction="none")


def coefficients(
    quantity: str,
    model: nn.Module,
    data: Any,
    config: TrackConfig,
    settings: Mapping[str, Any],
    labels: tuple[str, ...] | None = None,
) -> list[Point]:
    """Learning coefficients at the settings shared by all checkpoints: the network's, or those of parts."""
    from strati.tracking.coefficient import Shared, measured, objective_of

    shared = Shared(**{field: settings[field] for field in Shared.__dataclass_fields__ if field in settings})
    cut = whole_data(data, model, config)
    if quantity == "llc":
        level = measured(objective_of(model, shared.loss, cut), shared)
        if level.value is None:
            raise BadInputError("llc", level.reason or "the chains did not mix")
        return [_level("llc", None, level)]
    if quantity == LAYERS:
        return [
            _level("llc", layer, measured(objective_of(model, shared.loss, cut, [layer]), shared))
            for layer in matrix_names(model, config.layers)
        ]
    if quantity == HEADS:
        return [
            _level("llc", f"head {head}", measured(objective_of(part, shared.loss, cut), shared))
            for head, part in _heads(model, tuple(config.heads or ()))
        ]
    return [
        _level(f"llc[{label}]", None, measured(objective_of(model, shared.loss, part), shared))
        for label, part in _groups(cut, labels or (), config)
    ]


def _level(what: str, layer: str | None, found: Level) -> Point:
    more = {"blocks": found.blocks, "reason": found.reason, "off_minimum": found.off_minimum}
    return (what, layer, found.value, found.error, more)


def _heads(model: nn.Module, heads: tuple[str, ...]) -> Iterator[tuple[str, nn.Module]]:
    from strati.landscape.llc.parts import PartModel, head_entries

    for head in heads:
        block, number = (int(n) for n in head.split("."))
        yield head, PartModel(model, head_entries(model, (block, number)))


def _groups(cut: Any, labels: tuple[str, ...], config: TrackConfig) -> Iterator[tuple[str, Any]]:
    from strati.landscape.llc.parts import data_groups, rows_of

    inputs = cut[0] if isinstance(cut, tuple) else cut
    count = len(next(iter(inputs.values()))) if isinstance(inputs, Mapping) else len(inputs)
    for label, rows in data_groups(labels[:count] if config.rows else labels, count):
        yield label, rows_of(cut, rows)


def matrix_names(model: nn.Module, layers: str | Sequence[str] | None = None) -> list[str]:
    """The weights that spectra have, by the same names: those of two dimensions and more."""
    from strati.landscape.objective import FlatModel

    parameters = dict(model.named_parameters())
    return [name for name in FlatModel(model, layers=layers).names if parameters[name].ndim >= 2]


def whole_data(data: Any, model: nn.Module, config: TrackConfig) -> Any:
    """All rows as ``x`` or ``(x, y)``, or as many as are used."""
    from strati.evaluate.batches import as_batches

    batches = as_batches(data, model)
    head = batches.head(config.rows) if config.rows else batches.whole("a learning coefficient")
    return head.x if head.y is None else (head.x, head.y)


def _cut(data: Any, model: nn.Module, config: TrackConfig) -> Any:
    if not config.rows:
        return data
    from strati.evaluate.batches import as_batches

    head = as_batches(data, model).head(config.rows)
    return head.x if head.y is None else (head.x, head.y)


def scales_of(model: nn.Module, data: Any, config: TrackConfig) -> list[Point]:
    """``N_eff`` at every loss scale."""
    from strati.landscape.llc.scales import effective_parameters

    cut = _cut(data, model, config)
    x = cut[0] if isinstance(cut, tuple) else cut
    effective = effective_parameters(model, x, scales=list(config.scales), seed=config.seed)
    points: list[Point] = []
    for row in effective.to_dict()["scales"]:
        error = row.get("stderr")
        name = f"effective_parameters[{row['epsilon']:g}]"
        more = {"reason": row.get("reason") if row["effective"] is None else None}
        points.append((name, None, row["effective"], None if error is None else 2 * error, more))
    return points


def curvature_of(model: nn.Module, data: Any, config: TrackConfig) -> list[Point]:
    """Largest eigenvalue and trace of the Hessian of the mean loss, and the share of negative eigenvalues."""
    from strati.landscape.curvature import curvature

    name = loss_name(data, model, config)
    spectrum = curvature(model, name, whole_data(data, model, config), top=1, seed=config.seed)
    return [
        ("curvature_top", None, spectrum.top[0], spectrum.top_residuals[0]),
        ("curvature_trace", None, spectrum.trace, spectrum.trace_stderr),
        ("curvature_negative", None, spectrum.negative, spectrum.negative_stderr),
    ]


def counts_of(model: nn.Module, data: Any, config: TrackConfig) -> list[Point]:
    """Free directions and effective parameters."""
    from strati.landscape.counts.degeneracy import degeneracy

    cut = _cut(data, model, config)
    counts = degeneracy(model, cut[0] if isinstance(cut, tuple) else cut).to_dict()
    points: list[Point] = [
        ("free", None, counts["free"], None),
        ("effective", None, counts["effective"], None),
    ]
    return points + [("free", layer["name"], layer["free"], None) for layer in counts["layers"]]


def interventions_of(model: nn.Module, data: Any, config: TrackConfig) -> list[Point]:
    """Performance with each layer set to zero in turn, and intact."""
    require("torch", "torch", "interventions")
    from strati.interventions.kinds import zero
    from strati.interventions.study import study

    study_options: dict[str, Any] = {"layers": config.layers}
    studied = study(model, data=whole_data(data, model, config), interventions=[zero()], **study_options)
    points: list[Point] = []
    for row in studied.rows:
        if row["status"] == "done" and row["intervention"] == "zero":
            points.append(("zeroed", row["layer"], row["performance"], None))
    intact = next((row["intact_performance"] for row in studied.rows if row["status"] == "done"), None)
    return [("intact", None, intact, None), *points]
