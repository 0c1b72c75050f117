r"""Costs of settings: the curve of every layer from the rows of a study.

A cost is what is lost (:class:`~strati.interventions.study_config.CostScale`). Where the study kept scores by groups of
examples, costs are compared example by example. Where nothing was fine-tuned, the curves of adapter ranks are a guess
from the gradient of the loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.core.errors import BadInputError
from strati.interventions.compress.budget import Shape, full_size, monotone, option_size
from strati.interventions.kinds import read_setting
from strati.interventions.study_config import UNIT, CostScale
from strati.interventions.targets import as_matrix, chosen_names, find_targets
from strati.interventions.tasks import standard_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from strati.core.results import FloatArray
    from strati.interventions.evaluator import Evaluator
    from strati.interventions.study import Study
    from strati.interventions.targets import Target


def scale_of(study: Study) -> CostScale:
    """The scale of a study's performances, its networks taken together.

    Raises:
        BadInputError: No row was measured.
    """
    rows = [row for row in study.rows if row["status"] == "done"]
    intact = {row["network"]: float(row["intact_performance"]) for row in rows}
    if not intact:
        raise BadInputError(study.name, "no point of the study was measured; nothing to plan from")
    mean = float(np.mean(list(intact.values())))
    about = study.performance
    scale = CostScale(str(about["name"]), bool(about["higher_is_better"]), mean, chance=about.get("chance"))
    return replace(scale, bounded=_within(scale, (float(row["performance"]) for row in rows)))


def _within(scale: CostScale, performances: Iterable[float]) -> bool:
    """Whether every performance measured is one that the measure's name allows."""
    least = 1.0 if scale.name == "perplexity" else 0.0
    most = 1.0 if scale.name in UNIT else math.inf
    return all(least <= p <= most for p in (*performances, scale.intact) if math.isfinite(p))


KEEP = "keep"
"""The choice of a layer that is left as it is."""


class Quantity(StrEnum):
    """What the costs of a plan are."""

    MEASURED = "measured"
    UPDATE = "measured-update"
    """What truncating the update since the base network loses, measured."""
    GRADIENT = "guess-gradient"
    """The share of the gradient's energy beyond a rank; no fine-tuned network was measured."""


@dataclass(frozen=True)
class CurveOption:
    """One setting of one layer: its size, its cost, and the cost's standard error where that is defined."""

    choice: str
    size: float
    cost: float
    error: float | None
    groups: FloatArray | None = None
    measured: float = 0.0  # before monotone regression

    @property
    def cost_upper(self) -> float:
        """The cost plus its standard error: choosing the least of many noisy costs would pick the luckiest."""
        return self.cost + (self.error or 0.0)


@dataclass(frozen=True)
class Curve:
    """A layer's options, from the smallest to the largest, which is to keep it."""

    layer: str
    kind: str
    shape: Shape
    options: tuple[CurveOption, ...]


def read_curves(
    study: Study,
    action: str,
    kind: str,
    *,
    layers: Sequence[str] = ("*",),
    energy_rank: Callable[[str, str], int] | None = None,
    unit: str | None = None,
) -> list[Curve]:
    """The curve of every layer that the study put the action on.

    Args:
        study: The measurements.
        action: ``truncate``, ``quantise``, ...
        kind: The unit of sizes: ``parameters``, ``bits`` or ``rank``.
        layers: Patterns of the layers to plan.
        energy_rank: Gives the rank of a layer under a setting that depends on its weights.
        unit: Of ``prune``: only the rows that removed these units; ``None``: those that zeroed entries.

    Raises:
        BadInputError: The study has no such intervention, a pattern matches nothing, or a layer's shape is not known.
    """
    rows = [r for r in study.rows if r["intervention"] == action and r["status"] == "done"]
    if action == "drop":
        rows = [r for r in rows if r.get("setting") in (None, "run=1")]
    if action == "prune":
        rows = [r for r in rows if read_setting(r.get("setting")).get("unit") == unit]
    if not rows:
        there = sorted({r["intervention"] for r in study.rows} - {"intact"})
        what = action if unit is None else f"{action} of {unit}s"
        why = f"the study has no measured {what!r}; it has {', '.join(there) or 'none'}: study it first"
        raise BadInputError(study.name, why)
    intact = {
        (r["network"], r["layer"]): r for r in study.rows if r["intervention"] == "intact" and "groups" in r
    }
    names = list(dict.fromkeys(r["layer"] for r in rows))
    meant = chosen_names((), layers, whole=names) if action == "drop" else chosen_names(names, layers)
    names = [name for name in names if name in meant]
    scale = scale_of(study)
    curves = []
    for name in _in_order(names, study.origin.layers):
        mine = [r for r in rows if r["layer"] == name]
        shape, what = _shape(study.origin.layers, name, mine[0])
        options = []
        for setting in dict.fromkeys(r.get("setting") for r in mine):
            setting_rows = [r for r in mine if r.get("setting") == setting]
            rank = None
            if energy_rank is not None and "energy=" in str(setting):
                rank = energy_rank(name, str(setting))
            size = option_size(action, kind, setting, shape, rank)
            options.append(_option(setting, size, setting_rows, intact, scale))
        full = full_size(kind, shape)
        count = next((len(o.groups) for o in options if o.groups is not None), 0)
        keep_option = CurveOption(KEEP, full, 0.0, 0.0, np.zeros(count) if count else None)
        curves.append(
            Curve(name, what, shape, _monotone([*(o for o in options if o.size <= full), keep_option]))
        )
    return curves


def _in_order(names: list[str], layers: Mapping[str, Target]) -> list[str]:
    """Layers in the network's order, where the study knows it."""
    place = {name: i for i, name in enumerate(layers)}
    return sorted(names, key=lambda name: place.get(name, len(place)))


def _shape(layers: Mapping[str, Target], name: str, row: Mapping[str, Any]) -> tuple[Shape, str]:
    record = layers.get(name)
    if record is None:
        rows, cols = row.get("rows"), row.get("cols")
        if rows and cols:
            return Shape(int(rows), int(cols), int(rows) * int(cols)), "linear"
        if row.get("parameters"):
            side = int(row["parameters"])
            return Shape(1, side, side), "linear"
        raise BadInputError(name, "the study does not say how large this layer is; give the model")
    shape = list(record.shape)
    if record.kind == "block":
        return Shape(1, shape[0], shape[0]), "block"
    if record.kind == "conv1d":
        shape = shape[::-1]
    cols = math.prod(shape[1:])
    return Shape(shape[0], cols, shape[0] * cols), record.kind


def _option(
    setting: str | None,
    size: float,
    rows: list[Mapping[str, Any]],
    intact: Mapping[tuple[str, str], Mapping[str, Any]],
    scale: CostScale,
) -> CurveOption:
    """One setting out of its rows: networks and draws averaged, examples paired with the intact ones."""
    costs, groups = [], []
    for row in rows:
        row_scale = replace(scale, intact=float(row["intact_performance"]))
        costs.append(row_scale.cost(float(row["performance"])))
        base = intact.get((row["network"], row["layer"]), {}).get("groups")
        if base is not None and row.get("groups") is not None and len(base) == len(row["groups"]):
            groups.append(scale.sign() * (np.asarray(row["groups"]) - np.asarray(base)))
    paired = None
    if len(groups) == len(rows) and len({len(g) for g in groups}) == 1:
        paired = np.mean(groups, axis=0)
    error = standard_error(paired) if paired is not None else None
    between = standard_error(costs)  # draws and networks differ as well
    errors = [e for e in (error, between) if e is not None]
    cost = float(np.mean(costs))
    return CurveOption(setting or "drop", size, cost, math.hypot(*errors) if errors else None, paired, cost)


def _monotone(options: list[CurveOption]) -> tuple[CurveOption, ...]:
    """Ordered by size, costs not rising with it beyond what noise explains."""
    best: dict[float, CurveOption] = {}
    for option in sorted(options, key=lambda o: (o.choice != KEEP, o.cost)):
        best.setdefault(option.size, option)  # of one size only the cheapest is ever chosen
    ordered = sorted(best.values(), key=lambda o: o.size)
    costs = np.array([o.cost for o in ordered])
    smooth = monotone(costs, np.array([o.error or 0.0 for o in ordered]))
    smooth = smooth - (smooth[-1] if ordered[-1].choice == KEEP else 0.0)  # keeping a layer costs nothing
    return tuple(replace(o, cost=float(c)) for o, c in zip(ordered, smooth, strict=True))


RANKS = (0, 1, 2, 4, 8, 16, 32, 64, 128)


def gradient_curves(evaluators: Sequence[Evaluator], layers: Sequence[str] = ("*",)) -> list[Curve]:
    """For every layer and rank: the share of the gradient's energy that an update of that rank cannot hold.

    One gradient of the mean loss over the study's data. It says what the first step of training would want, not what
    training would reach; a plan from it is marked as a guess.

    Raises:
        BadInputError: There is no network or no data to take a gradient of.
    """
    import torch
    from torch.nn import functional

    from strati.interventions.edits import Directions
    from strati.interventions.tasks import IGNORED

    if not evaluators or evaluators[0].task is None:
        why = "needs measured 'adapt' rows (strati.adapt(base, rank=[...])), or the network and data for its gradient"
        raise BadInputError("adapt", why)
    task = evaluators[0].task
    model: Any = evaluators[0].model
    targets = [t for t in find_targets(model, layers) if t.kind != "embedding"]
    if not targets:
        raise BadInputError("layers", f"no layer matches {', '.join(layers)}")
    weights = [model.get_submodule(t.name).weight for t in targets]
    flags = [w.requires_grad for w in weights]
    total = [torch.zeros_like(w) for w in weights]
    try:
        for weight in weights:
            weight.requires_grad_(True)
        for inputs, answers in task.batches:
            with torch.enable_grad():
                logits = task.output(model, inputs)
                loss = functional.cross_entropy(
                    logits.reshape(-1, logits.shape[-1]).float(),
                    answers.reshape(-1),
                    ignore_index=IGNORED,
                    reduction="sum",
                )
                for sum_, gradient in zip(total, torch.autograd.grad(loss, weights), strict=True):
                    sum_ += gradient
    finally:
        for weight, flag in zip(weights, flags, strict=True):
            weight.requires_grad_(flag)
    energies = [
        Directions(as_matrix(g.numpy(), t.kind)).energies for g, t in zip(total, targets, strict=True)
    ]
    everything = sum(float(e.sum()) for e in energies) or 1.0
    curves = []
    for target, energy, weight in zip(targets, energies, weights, strict=True):
        rows, cols = as_matrix(np.empty(tuple(weight.shape), np.float32), target.kind).shape
        options = [
            CurveOption(f"rank={r}", float(r), float(energy[r:].sum()) / everything, 0.0)
            for r in RANKS
            if r < len(energy)
        ]
        keep_option = CurveOption(KEEP, float(min(rows, cols)), 0.0, 0.0)
        curves.append(
            Curve(target.name, target.kind, Shape(rows, cols, rows * cols), (*options, keep_option))
        )
    return curves
