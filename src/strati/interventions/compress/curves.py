"""Measured curves: what each setting of each layer costs, out of the rows of a study.

Where the study kept scores by groups of examples, costs are compared example by example.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.core.errors import BadInputError
from strati.interventions.compress.budget import Shape, full_size, option_size
from strati.interventions.compress.choose import monotone
from strati.interventions.compress.cost_scale import CostScale, scale_of
from strati.interventions.scores import standard_error
from strati.interventions.targets import chosen_names

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from strati.core.results import FloatArray
    from strati.interventions.study import Study

KEEP = "keep"
"""The choice of a layer that is left as it is."""


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
    def careful(self) -> float:
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
) -> list[Curve]:
    """The curve of every layer that the study put the action on.

    Args:
        study: The measurements.
        action: ``truncate``, ``quantise``, ...
        kind: The unit of sizes: ``parameters``, ``bits`` or ``rank``.
        layers: Patterns of the layers to plan.
        energy_rank: Gives the rank of a layer under a setting that depends on its weights.

    Raises:
        BadInputError: The study has no such intervention, a pattern matches nothing, or a layer's shape is not known.
    """
    rows = [r for r in study.rows if r["intervention"] == action and r["status"] == "done"]
    if action == "drop":
        rows = [r for r in rows if r.get("setting") in (None, "run=1")]
    if not rows:
        there = sorted({r["intervention"] for r in study.rows} - {"intact"})
        why = f"the study has no measured {action!r}; it has {', '.join(there) or 'none'}: study it first"
        raise BadInputError(study.name, why)
    intact = {
        (r["network"], r["layer"]): r for r in study.rows if r["intervention"] == "intact" and "groups" in r
    }
    names = list(dict.fromkeys(r["layer"] for r in rows))
    meant = chosen_names((), layers, whole=names) if action == "drop" else chosen_names(names, layers)
    names = [name for name in names if name in meant]
    scale = scale_of(study)
    curves = []
    for name in _in_order(names, study.origin.get("layers", {})):
        mine = [r for r in rows if r["layer"] == name]
        shape, what = _shape(study.origin.get("layers", {}), name, mine[0])
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


def _in_order(names: list[str], layers: Mapping[str, Any]) -> list[str]:
    """Layers in the network's order, where the study knows it."""
    place = {name: i for i, name in enumerate(layers)}
    return sorted(names, key=lambda name: place.get(name, len(place)))


def _shape(layers: Mapping[str, Any], name: str, row: Mapping[str, Any]) -> tuple[Shape, str]:
    record = layers.get(name)
    if record is None:
        rows, cols = row.get("rows"), row.get("cols")
        if rows and cols:
            return Shape(int(rows), int(cols), int(rows) * int(cols)), "linear"
        if row.get("parameters"):
            side = int(row["parameters"])
            return Shape(1, side, side), "linear"
        raise BadInputError(name, "the study does not say how large this layer is; give the model")
    shape = [int(n) for n in record["shape"]]
    if record["kind"] == "block":
        return Shape(1, shape[0], shape[0]), "block"
    if record["kind"] == "conv1d":
        shape = shape[::-1]
    cols = math.prod(shape[1:])
    return Shape(shape[0], cols, shape[0] * cols), str(record["kind"])


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
