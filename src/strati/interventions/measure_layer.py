"""One layer of one network, changed in every way the plan asks, measured: the rows of a study.

This is what a unit of work computes. It depends on the network, the data, the plan and the seed, and on nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from strati.core.display import printable
from strati.core.errors import BadInputError, UnsupportedError
from strati.core.rng import stream
from strati.interventions.cached_forward import ChainProbe, Measured, Tapes, measure_module, whole_scores
from strati.interventions.changes import LayerEdits, Others, Values, make_change
from strati.interventions.expert_removal import ExpertScores
from strati.interventions.experts import expert_change, score_change, score_experts
from strati.interventions.initialisers import scheme_of
from strati.interventions.input_covariance import CalibrationInputs
from strati.interventions.kinds import Point, reads_inputs
from strati.interventions.metrics import (
    BlockInfluence,
    LayerBaselines,
    block_metrics,
    degeneracy_metrics,
    distances,
    mean_metrics,
    plugin_metrics,
    spectral_metrics,
    trained_metrics,
)
from strati.interventions.sensitivity import NetworkScores, score_changes
from strati.interventions.study_config import StudyConfig
from strati.interventions.targets import (
    Change,
    Target,
    as_matrices,
    as_matrix,
    changed,
    find_targets,
    values_of,
)
from strati.interventions.tasks import Scores, Task, scores_of
from strati.jobs.engine import reason_of
from strati.landscape.mlp.sequential import as_chain

Evaluate = Callable[[nn.Module], float]
RANDOM_VALUES = ("reinitialise", "rerandomise")
"""Interventions that give a layer values of other origin; all others edit the trained ones."""

_STACKED = 16  # changes of a feed-forward layer that share one pass: more only cost memory


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
    calibration: CalibrationInputs | None = None
    _probe: ChainProbe | None = field(default=None, repr=False)
    _plain: bool = field(default=False, repr=False)
    _intact: Measured | None = field(default=None, repr=False)
    _scores: Scores | None = field(default=None, repr=False)
    tapes: Tapes = field(default_factory=Tapes, repr=False)
    counts: Mapping[str, Mapping[str, float | None]] | None = field(default=None, repr=False)
    inside: dict[str, Mapping[str, float | None]] = field(default_factory=dict, repr=False)
    experts: Mapping[str, ExpertScores] | None = field(default=None, repr=False)
    sensitivity: NetworkScores | None = field(default=None, repr=False)

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
        scores = self.scores()
        if scores is not None:
            return scores.performance
        if self._intact is None:
            self._intact = self.evaluated()
        return self._intact.performance

    def scores(self) -> Scores | None:
        """The intact network's scores by example; ``None`` where the user's function gives one number only."""
        if self.task is None:
            return None if self._intact is None else self._intact.scores
        if self._scores is None:
            probe = self.probe()
            self._scores = probe.scores if probe is not None else whole_scores(self.model, self.task)
        return self._scores

    def evaluated(self) -> Measured:
        """What the user's function says of the network as it is now: one number, or one for every example."""
        assert self.evaluate is not None
        with torch.no_grad():
            evaluation = self.evaluate(self.model)
        values = np.asarray(
            evaluation.detach().cpu() if hasattr(evaluation, "detach") else evaluation, dtype=float
        )
        if values.ndim == 0:
            return Measured(float(values), {})
        if values.ndim != 1 or values.size == 0:
            raise BadInputError(
                "evaluate", f"returned shape {values.shape}; return a number, or one per example"
            )
        scores = scores_of(values)
        return Measured(scores.performance, {}, scores)

    def forget(self) -> None:
        """Let go of recorded activations: the study is over, the network may live on for plans."""
        self.tapes, self._probe, self.sensitivity = Tapes(), None, None

    def expert_change(self, target: Target, point: Point) -> Change:
        """The change of a layer of experts; the scores that it goes by are those of the intact network.

        Raises:
            BadInputError: There are no data, or too few experts would be left.
        """
        if self.task is None:
            raise BadInputError(point.intervention, "needs data: which experts are used is seen on them")
        if self.experts is None:
            self.experts = score_experts(self.model, self.task)
        change = expert_change(self.model, target, point, self.experts)
        return replace(change, scores=self.experts[target.name])

    def run_once(self) -> None:
        """Run the network once: on one input of the task, or as the user's function does."""
        if self.task is not None:
            self.task.output(self.model, self.task.batches[0][0][:1])
        else:
            assert self.evaluate is not None
            self.evaluate(self.model)


@dataclass(frozen=True)
class PointFailure:
    """A point that could not be measured, and why."""

    reason: str


def measure_layer(
    subject: Subject, target: Target, plan: StudyConfig, others: Others | None = None
) -> list[dict[str, Any]]:
    """All rows of one layer or block: intact and under every change; a failed one has its reason."""
    block = target.kind == "block"
    values = (np.empty((0, 0)), None) if target.composite else values_of(subject.model, target)
    points = plan.points(target, subject.initial is not None)[1:]
    changes = layer_changes(subject, target, plan, values, points, others or {})
    good = [change for change in changes if not isinstance(change, PointFailure)]
    baselines = _baselines(subject, target, plan, good)
    measured = iter(_outcomes(subject, target, plan, good, baselines))
    outcomes = [change if isinstance(change, PointFailure) else next(measured) for change in changes]
    intact = Measured(subject.intact(), {}, subject.scores())
    scores = iter(_sensitivity(subject, target, plan, values[0], good, others or {}))
    inside = block_metrics(subject, target, plan) if block else {}
    before = dict(inside.get(target.name, {}))
    if not target.composite:
        before = _metrics_of(values, values, target, plan)
    trained = trained_metrics(subject, target, plan)
    no_difference = {"activation_disagreement": 0.0, "js_divergence": 0.0}
    extra = no_difference if plan.activations and subject.task else {}
    rows = [_row(subject, target, Point("intact"), "trained values", intact, (before, extra, trained))]
    for point, change, outcome in zip(points, changes, outcomes, strict=True):
        if isinstance(change, PointFailure):
            rows.append(failed_row(subject.name, target, point, change.reason))
            continue
        sensitivity = next(scores)
        if isinstance(outcome, PointFailure):
            row = failed_row(subject.name, target, point, outcome.reason)
            rows.append(row | {"initialiser": change.initialiser})
            continue
        if block:
            after = mean_metrics([inside[name] for name in change.blocks])
        elif change.scores is not None:
            after = score_change(change, change.scores)
        else:
            after = _metrics_after(values, change, target, plan, before)
        groups = [after, outcome.activations, {} if baselines is None else baselines.of(change)]
        if change.intervention not in RANDOM_VALUES:
            groups += [sensitivity, trained]
        row = _row(subject, target, point, change.initialiser, outcome, groups)
        if reads_inputs(point.setting) and subject.calibration is not None:
            covariance = subject.calibration.of(target.name)
            row |= {"calibration_tokens": covariance.tokens, "warning": next(iter(covariance.warnings), None)}
        if plan.degeneracy and change.intervention in RANDOM_VALUES and row["status"] == "done":
            row |= _degeneracy(subject, target, plan, change)
        rows.append(row)
    return rows


def failed_row(network: str, target: Target, point: Point, reason: str) -> dict[str, Any]:
    """The row of a point that could not be measured."""
    return {
        "network": network,
        "layer": target.name,
        "type": target.type,
        "intervention": point.intervention,
        "setting": point.text,
        "draw": point.draw,
        "status": "failed",
        "reason": printable(reason, 400),
    }


def _row(
    subject: Subject,
    target: Target,
    point: Point,
    initialiser: str,
    outcome: Measured,
    metrics: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    if not math.isfinite(outcome.performance):
        return failed_row(subject.name, target, point, f"performance is {outcome.performance}")
    row = failed_row(subject.name, target, point, "")
    row |= {"status": "done", "reason": None, "initialiser": initialiser}
    row |= {"performance": outcome.performance, "intact_performance": subject.intact()}
    if outcome.scores is not None:
        error = outcome.scores.stderr
        if error is not None and subject.task is not None and subject.task.performance == "perplexity":
            error *= outcome.performance  # of an exponential
        row |= {"performance_stderr": error, "groups": outcome.scores.groups.tolist()}
    for group in metrics:
        row |= {name: _finite(value) for name, value in group.items()}
    return row


def layer_changes(
    subject: Subject,
    target: Target,
    plan: StudyConfig,
    values: Values,
    points: Sequence[Point],
    others: Others,
) -> list[Change | PointFailure]:
    """The change of each point, or the reason why it cannot be made."""
    scheme = scheme_of(subject.model, plan.init)
    interventions = {intervention.name: intervention for intervention in plan.interventions}
    layer = LayerEdits(target, values, None if subject.calibration is None else subject.calibration.of)
    changes: list[Change | PointFailure] = []
    for point in points:
        kind, draw = point.intervention, point.draw
        try:
            if kind == "reinitialise":
                weight, bias = _initial_values(subject, target, values)
                changes.append(Change(kind, draw, weight, bias, "its own initial values"))
            elif kind == "rerandomise":
                rng = stream(plan.seed, "rerandomise", subject.name, target.name, draw)
                weight, bias, text = scheme.draw(target, values, rng)
                changes.append(Change(kind, draw, weight, bias, text))
            elif target.kind == "experts":
                changes.append(subject.expert_change(target, point))
            else:
                rng = stream(plan.seed, kind, point.text or "", subject.name, target.name, draw)
                changes.append(make_change(layer, interventions[kind], point, rng, others))
        except (BadInputError, np.linalg.LinAlgError) as error:
            changes.append(PointFailure(str(error)))
    return changes


def _initial_values(subject: Subject, target: Target, values: Values) -> Values:
    assert subject.initial is not None
    initial_values: list[Any] = []
    for part, now in zip(("weight", "bias"), values, strict=True):
        name = f"{target.name}.{part}"
        if now is None:
            initial_values.append(None)
            continue
        first = subject.initial.get(name)
        if first is None or first.shape != now.shape:
            raise BadInputError(name, "the initial checkpoint does not have it in this shape")
        initial_values.append(np.asarray(first, np.float32))
    return initial_values[0], initial_values[1]


def _baselines(
    subject: Subject, target: Target, plan: StudyConfig, changes: Sequence[Change]
) -> LayerBaselines | BlockInfluence | None:
    """The data-based scores people use, for the interventions they are meant for."""
    meant = any(change.intervention not in RANDOM_VALUES for change in changes)
    if subject.task is None or not plan.activations or not meant:
        return None
    if target.kind == "experts":
        return None
    if target.kind == "block":
        return BlockInfluence(subject.model, subject.task, target)
    return LayerBaselines(subject.model, target)


def _sensitivity(
    subject: Subject,
    target: Target,
    plan: StudyConfig,
    weight: NDArray[Any],
    changes: Sequence[Change],
    others: Others,
) -> list[dict[str, float | None]]:
    """The scores of each change that need the loss; empty for new random values, which no score is meant for."""
    edited = [change for change in changes if change.intervention not in RANDOM_VALUES]
    if subject.task is None or not plan.metrics or target.composite or not edited:
        return [{} for _ in changes]
    if subject.sensitivity is None:
        subject.sensitivity = NetworkScores(subject.model, subject.task, name=subject.name, seed=plan.seed)

    def steps_of(change: Change) -> dict[str, NDArray[Any]]:
        """What all layers do under the setting of one change; layers that cannot be changed so stay as they are."""
        setting = (change.intervention, change.setting, change.draw)
        steps: dict[str, NDArray[Any]] = {}
        for layer in find_targets(subject.model, plan.patterns):
            values = values_of(subject.model, layer)
            points = [p for p in plan.points(layer, False) if (p.intervention, p.text, p.draw) == setting]
            for moved in layer_changes(subject, layer, plan, values, points, others):
                if not isinstance(moved, PointFailure):
                    steps[layer.name] = moved.values - values[0]
        return steps

    rows = iter(score_changes(subject.sensitivity, target, weight, edited, plan.metrics, steps_of))
    return [{} if change.intervention in RANDOM_VALUES else next(rows) for change in changes]


def _outcomes(
    subject: Subject,
    target: Target,
    plan: StudyConfig,
    changes: Sequence[Change],
    baselines: LayerBaselines | BlockInfluence | None,
) -> list[Measured | PointFailure]:
    """Performance of each change, or the reason why there is none."""
    if not changes:
        return []
    if subject.task is None:
        subject.intact()
        return [_evaluated(subject, target, change) for change in changes]
    watch = baselines.add if isinstance(baselines, LayerBaselines) else None
    probe = subject.probe()
    if probe is None or target.name not in probe.names:
        return list(
            measure_module(
                subject.model,
                subject.task,
                target,
                changes,
                activations=plan.activations,
                watch=watch,
                tapes=subject.tapes,
            )
        )
    if watch is not None:
        for inputs in probe.inputs(target.name):
            watch(inputs)
    outcomes: list[Measured | PointFailure] = []
    for start in range(0, len(changes), _STACKED):
        part = changes[start : start + _STACKED]
        outcomes += probe.measure(target, part, activations=plan.activations)
    return outcomes


def _evaluated(subject: Subject, target: Target, change: Change) -> Measured | PointFailure:
    try:
        with changed(subject.model, target, change):
            return subject.evaluated()
    except Exception as error:  # the user's function: whatever it raises is this point's reason
        return PointFailure(f"evaluate raised {reason_of(error)}")


def _metrics_of(intact: Values, now: Values, target: Target, plan: StudyConfig) -> dict[str, Any]:
    metrics: dict[str, Any] = {}
    before, after = as_matrix(intact[0], target.kind), as_matrix(now[0], target.kind)
    if plan.spectral:
        metrics |= spectral_metrics(as_matrices(now[0], target.kind))
    metrics |= distances(intact, now)
    extra, notes = plugin_metrics(plan.plugins, before, after)
    return metrics | extra | ({"reason": printable("; ".join(notes), 400)} if notes else {})


def _metrics_after(
    values: Values, change: Change, target: Target, plan: StudyConfig, before: dict[str, Any]
) -> dict[str, Any]:
    """Metrics of a changed layer: spectra of new random values are their own, those of edited ones the trained ones."""
    now = (change.values, change.bias)
    if change.intervention in RANDOM_VALUES:
        return _metrics_of(values, now, target, plan)
    return before | _metrics_of(values, now, target, replace(plan, spectral=False))


def _degeneracy(subject: Subject, target: Target, plan: StudyConfig, change: Change) -> dict[str, Any]:
    """Counts of a layer with values of other origin; those of an edited one are the trained layer's."""
    if subject.task is None:
        return {}
    with changed(subject.model, target, change):
        x = subject.task.batches[0][0][: plan.samples]
        return dict(degeneracy_metrics(subject.model, x).get(target.name, {}))


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
