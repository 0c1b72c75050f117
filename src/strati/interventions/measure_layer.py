"""The rows of a study: one layer of one network, changed in every way the study asks, and measured.

This is what a unit of work computes. It depends only on the network, the data, the config and the seed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strati.core.display import printable
from strati.core.errors import BadInputError
from strati.core.rng import stream
from strati.interventions.blocks import BlockInfluence
from strati.interventions.cached_forward import measure_module
from strati.interventions.edits import LayerEdits, Values, make_change
from strati.interventions.evaluator import Evaluator
from strati.interventions.experts import score_change
from strati.interventions.initialisers import scheme_of
from strati.interventions.input_covariance import ExpertTokensError, InputScores
from strati.interventions.kinds import RANDOM_VALUES, Point, reads_inputs
from strati.interventions.metrics import (
    NetworkScores,
    block_metrics,
    degeneracy_metrics,
    distances,
    mean_metrics,
    plugin_metrics,
    score_changes,
    spectral_metrics,
    trained_metrics,
)
from strati.interventions.study_config import EXPERT_TOKENS, StudyConfig
from strati.interventions.targets import (
    Change,
    Target,
    as_matrices,
    as_matrix,
    changed,
    find_targets,
    values_of,
)
from strati.interventions.tasks import Measurement
from strati.jobs.engine import reason_of

_STACKED = 16  # changes of a feed-forward layer that share one pass: more only cost memory


@dataclass(frozen=True)
class PointFailure:
    """A point that could not be measured, and why; ``warning`` is a code where that is expected of the data."""

    reason: str
    warning: str | None = None


def measure_layer(evaluator: Evaluator, target: Target, config: StudyConfig) -> list[dict[str, Any]]:
    """All rows of one layer or block: intact and under every change; a failed one has its reason."""
    block = target.kind == "block"
    values = (np.empty((0, 0)), None) if target.composite else values_of(evaluator.model, target)
    points = config.points(target, evaluator.initial is not None)[1:]
    changes = layer_changes(evaluator, target, config, values, points)
    good = [change for change in changes if not isinstance(change, PointFailure)]
    baselines = _baselines(evaluator, target, config, values[0], good)
    measured = iter(_outcomes(evaluator, target, config, good))
    outcomes = [change if isinstance(change, PointFailure) else next(measured) for change in changes]
    intact = evaluator.intact()
    scores = iter(_sensitivity(evaluator, target, config, values[0], good))
    inside = block_metrics(evaluator, target, config) if block else {}
    before = dict(inside.get(target.name, {}))
    if not target.composite:
        before = _metrics_of(values, values, target, config)
    trained = trained_metrics(evaluator, target, config)
    no_difference = {"activation_disagreement": 0.0, "js_divergence": 0.0}
    extra = no_difference if config.activations and evaluator.task else {}
    rows = [_row(evaluator, target, Point("intact"), "trained values", intact, (before, extra, trained))]
    for point, change, outcome in zip(points, changes, outcomes, strict=True):
        if isinstance(change, PointFailure):
            row = failed_row(evaluator.name, target, point, change.reason)
            rows.append(row if change.warning is None else row | {"warning": change.warning})
            continue
        sensitivity = next(scores)
        if isinstance(outcome, PointFailure):
            row = failed_row(evaluator.name, target, point, outcome.reason)
            rows.append(row | {"initialiser": change.initialiser})
            continue
        if block:
            after = mean_metrics([inside[name] for name in change.blocks])
        elif change.scores is not None:
            after = score_change(change, change.scores)
        else:
            after = _metrics_after(values, change, target, config, before)
        groups = [after, outcome.activations, {}]
        if isinstance(baselines, InputScores):
            groups[2] = baselines.of(as_matrix(change.values, target.kind))
        elif baselines is not None:
            groups[2] = baselines.of(change)
        if change.intervention not in RANDOM_VALUES:
            groups += [sensitivity, trained]
        row = _row(evaluator, target, point, change.initialiser, outcome, groups)
        if reads_inputs(point.setting) and evaluator.calibration is not None:
            covariance = evaluator.calibration.of(target.name)
            row |= {"calibration_tokens": covariance.tokens, "warning": next(iter(covariance.warnings), None)}
        if config.degeneracy and change.intervention in RANDOM_VALUES and row["status"] == "done":
            row |= _degeneracy(evaluator, target, config, change)
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
    evaluator: Evaluator,
    target: Target,
    point: Point,
    initialiser: str,
    outcome: Measurement,
    metrics: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    if not math.isfinite(outcome.performance):
        return failed_row(evaluator.name, target, point, f"performance is {outcome.performance}")
    row = failed_row(evaluator.name, target, point, "")
    row |= {"status": "done", "reason": None, "initialiser": initialiser}
    row |= {"performance": outcome.performance, "intact_performance": evaluator.intact().performance}
    if outcome.scores is not None:
        error = outcome.scores.stderr
        if error is not None and evaluator.task is not None and evaluator.task.performance == "perplexity":
            error *= outcome.performance  # of an exponential
        row |= {"performance_stderr": error, "groups": outcome.scores.groups.tolist()}
    for group in metrics:
        row |= {name: _finite(value) for name, value in group.items()}
    return row


def layer_changes(
    evaluator: Evaluator,
    target: Target,
    config: StudyConfig,
    values: Values,
    points: Sequence[Point],
) -> list[Change | PointFailure]:
    """The change of each point, or the reason why it cannot be made."""
    interventions = {intervention.name: intervention for intervention in config.interventions}
    layer = LayerEdits(target, values, None if evaluator.calibration is None else evaluator.calibration.of)
    changes: list[Change | PointFailure] = []
    for point in points:
        kind, draw = point.intervention, point.draw
        try:
            if kind == "reinitialise":
                weight, bias = _initial_values(evaluator, target, values)
                changes.append(Change(kind, draw, weight, bias, "its own initial values"))
            elif kind == "rerandomise":
                rng = stream(config.seed, "rerandomise", evaluator.name, target.name, draw)
                weight, bias, text = scheme_of(evaluator.model, config.init).draw(target, values, rng)
                changes.append(Change(kind, draw, weight, bias, text))
            elif target.kind == "experts":
                changes.append(evaluator.expert_change(target, point))
            else:
                names = (kind, point.text or "", evaluator.name, target.name, draw)
                draws = stream(config.seed, *names) if interventions[kind].random else None
                changes.append(make_change(layer, interventions[kind], point, draws, evaluator.others))
        except (BadInputError, np.linalg.LinAlgError) as error:
            code = EXPERT_TOKENS if isinstance(error, ExpertTokensError) else None
            changes.append(PointFailure(str(error), code))
    return changes


def _initial_values(evaluator: Evaluator, target: Target, values: Values) -> Values:
    assert evaluator.initial is not None
    initial_values: list[Any] = []
    for part, now in zip(("weight", "bias"), values, strict=True):
        name = f"{target.name}.{part}"
        if now is None:
            initial_values.append(None)
            continue
        first = evaluator.initial.get(name)
        if first is None or first.shape != now.shape:
            raise BadInputError(name, "the initial checkpoint does not have it in this shape")
        initial_values.append(np.asarray(first, np.float32))
    return initial_values[0], initial_values[1]


def _baselines(
    evaluator: Evaluator,
    target: Target,
    config: StudyConfig,
    weight: NDArray[Any],
    changes: Sequence[Change],
) -> InputScores | BlockInfluence | None:
    """The data-based scores people use, for the interventions they are meant for."""
    meant = any(change.intervention not in RANDOM_VALUES for change in changes)
    inputs = evaluator.score_inputs
    if inputs is None or not config.activations or not meant or target.kind == "experts":
        return None
    if target.kind == "block":
        return BlockInfluence(evaluator.model, inputs.batches, target)
    try:
        covariance = inputs.of(target.name)
    except BadInputError:  # no data reach the layer: scores by its inputs are not defined
        covariance = None
    return InputScores(as_matrix(weight, target.kind), covariance)


def _sensitivity(
    evaluator: Evaluator,
    target: Target,
    config: StudyConfig,
    weight: NDArray[Any],
    changes: Sequence[Change],
) -> list[dict[str, float | None]]:
    """The scores of each change that need the loss; empty for new random values, which no score is meant for."""
    edited = [change for change in changes if change.intervention not in RANDOM_VALUES]
    if evaluator.task is None or not config.metrics or target.composite or not edited:
        return [{} for _ in changes]
    if evaluator.sensitivity is None:
        task = evaluator.score_task or evaluator.task
        evaluator.sensitivity = NetworkScores(evaluator.model, task, name=evaluator.name, seed=config.seed)

    def steps_of(change: Change) -> dict[str, NDArray[Any]]:
        """What all layers do under the setting of one change; layers that cannot be changed so stay as they are."""
        setting = (change.intervention, change.setting, change.draw)
        steps: dict[str, NDArray[Any]] = {}
        for layer in find_targets(evaluator.model, config.patterns):
            values = values_of(evaluator.model, layer)
            points = [p for p in config.points(layer, False) if (p.intervention, p.text, p.draw) == setting]
            for moved in layer_changes(evaluator, layer, config, values, points):
                if not isinstance(moved, PointFailure):
                    steps[layer.name] = moved.values - values[0]
        return steps

    rows = iter(score_changes(evaluator.sensitivity, target, weight, edited, config.metrics, steps_of))
    return [{} if change.intervention in RANDOM_VALUES else next(rows) for change in changes]


def _outcomes(
    evaluator: Evaluator,
    target: Target,
    config: StudyConfig,
    changes: Sequence[Change],
) -> list[Measurement | PointFailure]:
    """Performance of each change, or the reason why there is none."""
    if not changes:
        return []
    if evaluator.task is None:
        evaluator.intact()
        return [_evaluated(evaluator, target, change) for change in changes]
    probe = evaluator.probe()
    if probe is None or target.name not in probe.names:
        return list(
            measure_module(
                evaluator.model,
                evaluator.task,
                target,
                changes,
                activations=config.activations,
                tapes=evaluator.tapes,
            )
        )
    outcomes: list[Measurement | PointFailure] = []
    for start in range(0, len(changes), _STACKED):
        part = changes[start : start + _STACKED]
        outcomes += probe.measure(target, part, activations=config.activations)
    return outcomes


def _evaluated(evaluator: Evaluator, target: Target, change: Change) -> Measurement | PointFailure:
    try:
        with changed(evaluator.model, target, change):
            return evaluator.now()
    except Exception as error:  # the user's function: whatever it raises is this point's reason
        return PointFailure(f"evaluate raised {reason_of(error)}")


def _metrics_of(intact: Values, now: Values, target: Target, config: StudyConfig) -> dict[str, Any]:
    metrics: dict[str, Any] = {}
    before, after = as_matrix(intact[0], target.kind), as_matrix(now[0], target.kind)
    if config.spectral:
        matrices = as_matrices(now[0], target.kind)
        metrics |= spectral_metrics(matrices, htsr=config.htsr, seed=config.seed)
    metrics |= distances(intact, now)
    extra, notes = plugin_metrics(config.plugins, before, after)
    return metrics | extra | ({"reason": printable("; ".join(notes), 400)} if notes else {})


def _metrics_after(
    values: Values, change: Change, target: Target, config: StudyConfig, before: dict[str, Any]
) -> dict[str, Any]:
    """Metrics of a changed layer: spectra of new random values are their own, those of edited ones the trained ones."""
    now = (change.values, change.bias)
    if change.intervention in RANDOM_VALUES:
        return _metrics_of(values, now, target, config)
    return before | _metrics_of(values, now, target, replace(config, spectral=False))


def _degeneracy(evaluator: Evaluator, target: Target, config: StudyConfig, change: Change) -> dict[str, Any]:
    """Counts of a layer with values of other origin; those of an edited one are the trained layer's."""
    x = evaluator.score_rows(config.samples)
    if x is None:
        return {}
    with changed(evaluator.model, target, change):
        return dict(degeneracy_metrics(evaluator.model, x).get(target.name, {}))


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
