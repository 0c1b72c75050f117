"""The study that a plan from a model needs: every setting of one action on every layer, or those a score cannot decide.

The Fisher score of every setting needs one backward pass. A few settings are measured to scale it to the cost. Then
plans are chosen with the scores multiplied by random factors as wide as the scatter of cost over score: a layer whose
choice never changes is decided, of any other layer the settings that were chosen are measured.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.core.errors import BadInputError
from strati.core.rng import stream
from strati.interventions.compress.budget import ACTIONS, Budget, choose
from strati.interventions.compress.costs import Curve, read_curves, scale_of
from strati.interventions.evaluator import Evaluator
from strati.interventions.kinds import Intervention, make, setting_text, unit_of
from strati.interventions.measure_layer import PointFailure, layer_changes, measure_layer
from strati.interventions.metrics import NetworkScores
from strati.interventions.study import Study, study_in_cache
from strati.interventions.study_config import StudyConfig
from strati.interventions.study_job import Job, make_job, targets_of
from strati.interventions.targets import values_of
from strati.interventions.tasks import standard_error

if TYPE_CHECKING:
    from strati.core.results import Tick
    from strati.interventions.compress.budget import Budget
    from strati.interventions.compress.plan import PlanConfig
    from strati.interventions.study_config import StudyConfig
    from strati.interventions.targets import Target


def study_of_model(
    model: Any, data: Any, budget_kind: str, config: PlanConfig, out: str | Path | None, tick: Tick
) -> Study:
    """The study that a plan needs: the settings of its action on every layer, and no metrics."""
    return study_in_cache(model, data, _settings_of(model, data, budget_kind, config), out, tick)


def screened_study_of_model(
    model: Any, data: Any, budget: Budget, config: PlanConfig, tick: Tick
) -> tuple[Study, dict[str, Any]]:
    """The same where a score decides most settings: a study in memory, and how many settings were measured."""
    settings = _settings_of(model, data, budget.kind, config)
    kind = budget.kind if budget.kind != "loss" else ACTIONS[str(config.action)][0]
    return screened_study(model, data, settings, budget, kind, tick)


def _settings_of(model: Any, data: Any, budget_kind: str, config: PlanConfig) -> StudyConfig:
    if data is None:
        named = isinstance(model, str | os.PathLike)
        why = "is not the folder of a study; to plan from a model, give data to measure it on"
        raise BadInputError(str(model) if named else "model", why)
    action = str(config.action)
    if action == "adapt":
        raise BadInputError(
            "adapt", "needs the base network: make a study with adapt(base, rank=[...]) first"
        )
    return StudyConfig(
        interventions=(_planned_settings(action, budget_kind, config.unit),),
        layers=config.layers,
        spectral=False,
        activations=False,
        metrics=(),
        seed=config.seed,
        performance=config.performance,
        inputs=config.inputs,
        targets=config.targets,
        activation=config.activation,
        rows=config.rows,
        calibration=config.calibration,
    )


_SHARES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
_UNIT_SHARES = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75)
_PLAN_SETTINGS: dict[str, dict[str, tuple[float, ...]]] = {
    "truncate": {"rank": tuple(2**k for k in range(13))},
    "quantise": {"bits": (2, 3, 4, 5, 6, 8)},
    "prune": {"share": _SHARES[1:]},
    "drop": {},
    "drop-experts": {"share": _UNIT_SHARES},
    "merge-experts": {"share": _UNIT_SHARES},
}
"""The settings that a plan from a model measures."""


_DATA_AWARE = {
    "truncate": {"metric": "inputs"},
    "quantise": {"method": "gptq"},
    "prune": {"method": "sparsegpt"},
}
"""The edits that lose least: a plan from a model has data, so it measures these."""


def _planned_settings(action: str, kind: str, unit: str | None) -> Intervention:
    if unit is not None:
        return make(action, {"share": _UNIT_SHARES, "unit": unit})
    by_share = action == "truncate" and kind == "parameters"
    settings = {"parameters": _SHARES} if by_share else _PLAN_SETTINGS[action]
    return make(action, settings | _DATA_AWARE.get(action, {}))


_PILOT = 12
_LOWEST = 0.3
"""The pilot leaves out this share of the settings, those of lowest score, whose costs are lost in noise."""
_DRAWS = 40
_OFTEN = 0.15
"""Share of the draws from which on a setting may be the right one; a layer with one such setting is decided."""
_ROUNDS = 2
_SCATTERS = (0.3, 1.0)

Scores = dict[str, dict[str, float]]


class Screening:
    """The scores of all settings of one network, and the rows of those that were measured."""

    def __init__(
        self, evaluator: Evaluator, targets: tuple[Target, ...], config: StudyConfig, tick: Tick
    ) -> None:
        self.evaluator, self.config, self.tick = evaluator, config, tick
        self.targets = {target.name: target for target in targets}
        self.rows: dict[tuple[str, str | None], dict[str, Any]] = {}
        self.factor, self.scatter = 1.0, 1.0
        self.scores = self._fisher()

    @property
    def settings(self) -> int:
        """How many settings there are, over all layers."""
        return sum(map(len, self.scores.values()))

    @property
    def measured(self) -> int:
        """How many of them were measured."""
        return sum(setting is not None for _, setting in self.rows)

    def pilot(self) -> None:
        """Measure a few settings, from the lowest to the highest score, of different layers where possible."""
        ordered = sorted(
            (score, name, text) for name, by in self.scores.items() for text, score in by.items()
        )
        count = max(3, min(_PILOT, len(ordered) // 8))
        places = np.linspace(_LOWEST * (len(ordered) - 1), len(ordered) - 1, count).round().astype(int)
        self.measure({(ordered[i][1], ordered[i][2]) for i in places})

    def measure(self, points: set[tuple[str, str]]) -> None:
        """Measure settings that have not been measured, layer by layer, and scale the scores anew."""
        for name, target in self.targets.items():
            texts = {text for layer, text in points if layer == name and (name, text) not in self.rows}
            if not texts:
                continue
            intervention = self.config.interventions[0]
            part = tuple(setting for setting in intervention.settings if setting_text(setting) in texts)
            config = replace(self.config, interventions=(Intervention(intervention.name, part),))
            for row in measure_layer(self.evaluator, target, config):
                self.rows[name, row["setting"]] = row
            self.tick(name)
        self._scale()

    def study(self, job: Job) -> Study:
        """A study with the measured rows, and rows that the scores predict (``screened``) for all other settings."""
        rows = [row for row in self.rows.values() if row["status"] == "done"]
        bare = Study("screened", job.performance, tuple(rows), self.settings, None, job.origin, job.body)
        scale = scale_of(bare)
        first = rows[0]
        for name, by_setting in self.scores.items():
            if (name, None) not in self.rows:
                rows.append(
                    first | {"layer": name, "intervention": "intact", "setting": None, "screened": True}
                )
            for text, score in by_setting.items():
                if (name, text) not in self.rows:
                    performance = scale.performance(self.factor * score)
                    row = {"layer": name, "intervention": self.config.names[0], "setting": text, "draw": 0}
                    row |= {"network": first["network"], "status": "done", "screened": True}
                    row |= {"performance": performance, "intact_performance": first["intact_performance"]}
                    rows.append(row)
        return replace(bare, rows=tuple(rows))

    def undecided(self, curves: list[Curve], budget: Budget, size: float, seed: int) -> set[tuple[str, str]]:
        """The settings that are chosen under some scores within the scatter, of layers whose choice changes."""
        rng = stream(seed, "plan", "screen")
        choices: list[tuple[int, ...]] = []
        for draw in range(_DRAWS):
            costs, sizes = [], []
            for curve in curves:
                is_measured = np.array(
                    [(curve.layer, o.choice) in self.rows or o.cost == 0 for o in curve.options]
                )
                factors = np.where(
                    is_measured, 1.0, np.exp(self.scatter * rng.standard_normal() * (draw > 0))
                )
                costs.append(factors * np.array([o.cost_upper for o in curve.options]))
                sizes.append(np.array([o.size for o in curve.options]))
            first, second = (sizes, costs) if budget.kind == "loss" else (costs, sizes)
            choices.append(choose(first, second, size).options)
        points: set[tuple[str, str]] = set()
        for place, curve in enumerate(curves):
            counts = np.bincount([options[place] for options in choices], minlength=len(curve.options))
            likely = np.flatnonzero(counts >= _OFTEN * _DRAWS)
            if len(likely) > 1:
                points |= {
                    (curve.layer, curve.options[i].choice) for i in likely if i < len(curve.options) - 1
                }
        return points

    def _fisher(self) -> Scores:
        assert self.evaluator.task is not None
        network = NetworkScores(
            self.evaluator.model, self.evaluator.score_task or self.evaluator.task, name=self.evaluator.name
        )
        scores: Scores = {}
        for name, target in self.targets.items():
            values = values_of(self.evaluator.model, target)
            points = self.config.points(target, False)[1:]
            changes = layer_changes(self.evaluator, target, self.config, values, points)
            steps = {c.setting: c.values - values[0] for c in changes if not isinstance(c, PointFailure)}
            by_setting = {str(text): network.fisher_gradient(name, step) for text, step in steps.items()}
            scores[name] = {text: score for text, score in by_setting.items() if score is not None}
        return scores

    def _scale(self) -> None:
        """The mean and the scatter of the logarithm of cost over score, where the cost is twice its error."""
        task, intact = self.evaluator.task, self.evaluator.intact().scores
        assert task is not None and intact is not None
        about = {"name": task.performance, "chance": task.chance, "higher_is_better": task.higher_is_better}
        rows = [row for row in self.rows.values() if row["status"] == "done"]
        scale = scale_of(Study("screened", about, tuple(rows), len(rows)))
        ratios = []
        for (name, text), row in self.rows.items():
            score = 0.0 if text is None else self.scores[name].get(text, 0.0)
            if row["status"] == "done" and score > 0:
                cost = scale.cost(float(row["performance"]))
                error = standard_error(np.asarray(row["groups"]) - intact.groups) or 0.0
                if cost > 2 * error:
                    ratios.append(np.log(cost / score))
        if ratios:
            self.factor = float(np.exp(np.mean(ratios)))
            self.scatter = float(np.clip(np.std(ratios), *_SCATTERS))


def screened_study(
    model: Any,
    data: Any,
    config: StudyConfig,
    budget: Budget,
    kind: str,
    tick: Tick,
) -> tuple[Study, dict[str, Any]]:
    """A study of one network in which most settings have predicted costs, and how much was measured.

    Raises:
        BadInputError: The action is not one on weights, or there are several networks.
    """
    from strati.interventions.compress.budget import target_size

    if unit_of(config.names[0]) != "layer":
        raise BadInputError("screen", f"is for changes of weights; {config.names[0]} is measured in full")
    job = make_job(model, None, data, config)
    evaluators = list(job.body.evaluators.values())
    if len(evaluators) != 1:
        raise BadInputError("screen", "takes one network")
    targets = targets_of(evaluators[0].model, config, evaluators[0].run_once)
    screening = Screening(evaluators[0], targets, config, tick)
    screening.pilot()
    for _ in range(_ROUNDS):
        study = screening.study(job)
        curves = read_curves(study, config.names[0], kind, layers=config.patterns)
        scale = scale_of(study)
        size = target_size(budget, [c.shape for c in curves])
        if budget.kind == "loss":
            size = scale.allowed(budget.value, budget.relative)
        points = screening.undecided(curves, budget, size, config.seed)
        if all(point in screening.rows for point in points):
            break
        screening.measure(points)
    study = screening.study(job)
    share = screening.measured / max(screening.settings, 1)
    about = {"score": "fisher_gradient", "settings": screening.settings, "measured": screening.measured}
    return study, about | {"fraction": share}
