"""One layer of one network, changed in every way the plan asks, measured: the rows of a study.

This is what a unit of work computes. It depends on the network, the data, the plan and the seed, and on nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from strati.errors import BadInputError, UnsupportedError
from strati.intervene.measuring.functional import ChainProbe, Measured, measure_module, whole_performance
from strati.intervene.measuring.interventions import Change, Target, as_matrix, changed, values_of
from strati.intervene.measuring.metrics import (
    degeneracy_metrics,
    distances,
    plugin_metrics,
    spectral_metrics,
)
from strati.intervene.planning.config import StudyConfig
from strati.intervene.planning.initialisers import scheme_of
from strati.intervene.planning.tasks import Task
from strati.landscape.chain import as_chain
from strati.rng import stream
from strati.text import printable

Values = tuple[NDArray[Any], NDArray[Any] | None]
Evaluate = Callable[[nn.Module], float]


@dataclass
class Subject:
    """A network under study: the module, its initial tensors where known, and how its performance is measured.

    Either a ``task`` (data and a score) or a function ``evaluate`` of the user's.
    """

    name: str
    model: nn.Module
    initial: Mapping[str, NDArray[Any]] | None = None
    task: Task | None = None
    evaluate: Evaluate | None = None
    _probe: ChainProbe | None = field(default=None, repr=False)
    _plain: bool = field(default=False, repr=False)
    _intact: float | None = field(default=None, repr=False)
    counts: Mapping[str, Mapping[str, float | None]] | None = field(default=None, repr=False)

    def probe(self) -> ChainProbe | None:
        """The kept activations of a feed-forward network; ``None`` for any other."""
        if self._probe is None and not self._plain and self.task is not None:
            try:
                self._probe = ChainProbe(as_chain(self.model), self.task)
            except UnsupportedError:
                self._plain = True
        return self._probe

    def intact(self) -> float:
        """The performance of the network as it is, by the task or by the user's function."""
        if self._intact is None:
            if self.task is not None:
                self._intact = whole_performance(self.model, self.task)
            else:
                assert self.evaluate is not None
                self._intact = float(self.evaluate(self.model))
        return self._intact


def measure_layer(subject: Subject, target: Target, plan: StudyConfig) -> list[dict[str, Any]]:
    """All rows of one layer: intact, re-initialised, re-randomised; a failed one has its reason."""
    values = values_of(subject.model, target)
    changes = _changes(subject, target, plan, values)
    intact, outcomes = _outcomes(subject, target, plan, changes)
    before = _metrics_of(values, values, target, plan)
    whole = (
        {"activation_disagreement": 0.0, "js_divergence": 0.0} if plan.activations and subject.task else {}
    )
    found = [_row(subject, target, ("intact", 0, "trained values"), intact, intact, (before, whole))]
    if plan.degeneracy and subject.task is not None:
        found[0] |= _degeneracy(subject, target, plan, None)
    for change, outcome in zip(changes, outcomes, strict=True):
        what = (change.intervention, change.draw, change.initialiser)
        if isinstance(outcome, str):
            found.append(failed_row(subject.name, target, what[:2], outcome) | {"initialiser": what[2]})
            continue
        after = _metrics_of(values, (change.weight, change.bias), target, plan)
        row = _row(subject, target, what, outcome.performance, intact, (after, outcome.activations))
        if plan.degeneracy and subject.task is not None:
            row |= _degeneracy(subject, target, plan, change)
        found.append(row)
    return found


def failed_row(network: str, target: Target, what: tuple[str, int], reason: str) -> dict[str, Any]:
    """The row of a point that could not be measured."""
    return {
        "network": network,
        "layer": target.name,
        "type": target.type,
        "intervention": what[0],
        "draw": what[1],
        "status": "failed",
        "reason": printable(reason, 400),
    }


def _row(
    subject: Subject,
    target: Target,
    what: tuple[str, int, str],
    performance: float,
    intact: float,
    metrics: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    if not math.isfinite(performance):
        return failed_row(subject.name, target, what[:2], f"performance is {performance}")
    row = failed_row(subject.name, target, what[:2], "") | {
        "status": "done",
        "reason": None,
        "initialiser": what[2],
    }
    row |= {"performance": performance, "intact_performance": intact}
    for group in metrics:
        row |= {name: _finite(value) for name, value in group.items()}
    return row


def _changes(subject: Subject, target: Target, plan: StudyConfig, values: Values) -> list[Change]:
    scheme = scheme_of(subject.model, plan.init)
    found = []
    for intervention, draw in plan.points(subject.initial is not None):
        if intervention == "reinitialise":
            weight, bias = _initial_values(subject, target, values)
            found.append(Change(intervention, draw, weight, bias, "its own initial values"))
        elif intervention == "rerandomise":
            rng = stream(plan.seed, "rerandomise", subject.name, target.name, draw)
            weight, bias, text = scheme.draw(target, values, rng)
            found.append(Change(intervention, draw, weight, bias, text))
    return found


def _initial_values(subject: Subject, target: Target, values: Values) -> Values:
    assert subject.initial is not None
    found: list[Any] = []
    for part, now in zip(("weight", "bias"), values, strict=True):
        name = f"{target.name}.{part}"
        if now is None:
            found.append(None)
            continue
        first = subject.initial.get(name)
        if first is None or first.shape != now.shape:
            raise BadInputError(name, "the initial checkpoint does not have it in this shape")
        found.append(np.asarray(first, np.float32))
    return found[0], found[1]


def _outcomes(
    subject: Subject, target: Target, plan: StudyConfig, changes: Sequence[Change]
) -> tuple[float, list[Measured | str]]:
    """Performance intact and of each change, or the reason why there is none."""
    if subject.task is None:
        intact = subject.intact()
        return intact, [_evaluated(subject, target, change) for change in changes]
    probe = subject.probe()
    activations = plan.activations
    if probe is not None:
        return probe.performance, list(
            probe.measure(target, changes, activations=activations)
        ) if changes else []
    found = measure_module(subject.model, subject.task, target, changes, activations=activations)
    return subject.intact(), list(found)


def _evaluated(subject: Subject, target: Target, change: Change) -> Measured | str:
    assert subject.evaluate is not None
    try:
        with changed(subject.model, target, change), torch.no_grad():
            return Measured(float(subject.evaluate(subject.model)), {})
    except Exception as error:  # the user's function: whatever it raises is this point's reason
        return f"evaluate raised {type(error).__name__}: {error}"


def _metrics_of(intact: Values, now: Values, target: Target, plan: StudyConfig) -> dict[str, Any]:
    found: dict[str, Any] = {}
    before, after = as_matrix(intact[0], target.kind), as_matrix(now[0], target.kind)
    if plan.spectral:
        found |= spectral_metrics(after)
    found |= distances(intact, now)
    extra, notes = plugin_metrics(plan.plugins, before, after)
    return found | extra | ({"reason": printable("; ".join(notes), 400)} if notes else {})


def _degeneracy(subject: Subject, target: Target, plan: StudyConfig, change: Change | None) -> dict[str, Any]:
    assert subject.task is not None
    x = subject.task.batches[0][0][: plan.samples]
    if change is None:
        if subject.counts is None:
            subject.counts = degeneracy_metrics(subject.model, x)
        return dict(subject.counts.get(target.name, {}))
    with changed(subject.model, target, change):
        return dict(degeneracy_metrics(subject.model, x).get(target.name, {}))


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
