"""The study that a plan from a model needs: every setting of one action on every layer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strati.core.errors import BadInputError
from strati.interventions.compress.budget import ACTIONS, Budget
from strati.interventions.kinds import Intervention, make
from strati.interventions.study import Study, study_in_cache
from strati.interventions.study_config import StudyConfig
from strati.interventions.study_spec import STORE

if TYPE_CHECKING:
    from strati.core.results import Tick
    from strati.interventions.compress.plan import PlanConfig


def is_study_folder(source: Any) -> bool:
    """Whether something is the folder of a study."""
    return isinstance(source, str | os.PathLike) and (Path(source) / STORE).is_file()


def study_of_model(
    model: Any, data: Any, budget_kind: str, config: PlanConfig, out: str | Path | None, tick: Tick
) -> Study:
    """The study that a plan needs: the settings of its action on every layer, and no metrics."""
    return study_in_cache(model, data, _settings_of(model, data, budget_kind, config), out, tick)


def screened_study_of_model(
    model: Any, data: Any, budget: Budget, config: PlanConfig, tick: Tick
) -> tuple[Study, dict[str, Any]]:
    """The same where a score decides most settings: a study in memory, and how many settings were measured."""
    from strati.interventions.compress.screen import screened_study
    from strati.interventions.inputs import as_modules, paths_of

    settings = _settings_of(model, data, budget.kind, config)
    kind = budget.kind if budget.kind != "loss" else ACTIONS[str(config.action)][0]
    modules = as_modules(model, config.activation)
    return screened_study(modules, data, settings, budget, kind, paths_of(model), tick)


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
        interventions=(_planned_settings(action, budget_kind),),
        layers=config.layers,
        spectral=False,
        activations=False,
        metrics=(),
        seed=config.seed,
        performance=config.performance,
        inputs=config.inputs,
        targets=config.targets,
        activation=config.activation,
        calibration=config.calibration,
    )


_SHARES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
_PLAN_SETTINGS: dict[str, dict[str, tuple[float, ...]]] = {
    "truncate": {"rank": tuple(2**k for k in range(13))},
    "quantise": {"bits": (2, 3, 4, 5, 6, 8)},
    "prune": {"share": _SHARES[1:]},
    "drop": {},
    "drop-experts": {"share": (0.125, 0.25, 0.375, 0.5, 0.625, 0.75)},
    "merge-experts": {"share": (0.125, 0.25, 0.375, 0.5, 0.625, 0.75)},
}
"""The settings that a plan from a model measures."""


_DATA_AWARE = {
    "truncate": {"metric": "inputs"},
    "quantise": {"method": "gptq"},
    "prune": {"method": "sparsegpt"},
}
"""The edits that lose least: a plan from a model has data, so it measures these."""


def _planned_settings(action: str, kind: str) -> Intervention:
    by_share = action == "truncate" and kind == "parameters"
    settings = {"parameters": _SHARES} if by_share else _PLAN_SETTINGS[action]
    return make(action, settings | _DATA_AWARE.get(action, {}))
