"""A study as a job: networks and data opened and checked, and one unit of work per layer of each network.

A unit's key is the hash of all that its rows depend on, so that a finished unit is never computed again.
"""

from __future__ import annotations

import copy
import hashlib
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from strati.core.errors import BadInputError
from strati.core.files import write_atomic
from strati.interventions.blocks import find_blocks
from strati.interventions.edits import Others, source_key, tensors_of
from strati.interventions.evaluator import Evaluate, Evaluator
from strati.interventions.experts import find_experts
from strati.interventions.input_covariance import CalibrationInputs
from strati.interventions.kinds import KINDS, suits, unit_of
from strati.interventions.measure_layer import failed_row, measure_layer
from strati.interventions.metrics import check_plugins
from strati.interventions.study_config import (
    DATA,
    FORMAT,
    DataOrigin,
    NetworkOrigin,
    StudyConfig,
    StudyOrigin,
)
from strati.interventions.targets import (
    Target,
    chosen_names,
    find_targets,
    target_of,
    to_float32,
)
from strati.interventions.tasks import (
    StudyData,
    Task,
    as_modules,
    calibration_data,
    calibration_task,
    check_fits,
    digest_of,
    make_task,
    paths_of,
    study_data,
)
from strati.jobs.engine import Load, Unit
from strati.jobs.store import unit_key

CALIBRATION_ROWS = 4096
"""Most training rows that input covariances and scores are computed from."""
_ALIKE = 0.1
"""Performances this close, as a share of the larger, do not tell which way is better."""


@dataclass(frozen=True)
class StudyBody:
    """What a unit does: change one layer of one network in every way and measure each."""

    evaluators: Mapping[str, Evaluator]
    config: StudyConfig

    def __call__(self, unit: Unit, load: Load) -> list[dict[str, Any]]:
        """The rows of one layer; the activations of all other networks are released first."""
        network = unit.config["network"]
        for name, evaluator in self.evaluators.items():
            if name != network:
                evaluator.forget()
        return measure_layer(self.evaluators[network], target_of(unit.config["target"]), self.config)


@dataclass(frozen=True)
class Job:
    """A study ready to run."""

    name: str
    identity: str
    performance: Mapping[str, Any]
    points: int
    origin: StudyOrigin
    body: StudyBody
    units: tuple[Unit, ...]
    data: bytes = field(repr=False)

    def write_data(self, folder: Path) -> None:
        """Put the data in canonical form beside the store, where plans read them."""
        path = folder / DATA
        if self.data and not (path.is_file() and digest_of(path.read_bytes()) == digest_of(self.data)):
            write_atomic(path, self.data)

    def failed_rows(self, unit: Unit, reason: str) -> list[dict[str, Any]]:
        """The rows of a unit that failed as a whole."""
        evaluator, target = self.body.evaluators[unit.config["network"]], target_of(unit.config["target"])
        points = self.body.config.points(target, evaluator.initial is not None)
        return [failed_row(evaluator.name, target, point, reason) for point in points]


def make_job(
    source: Any,
    evaluate: Evaluate | None,
    data: Any,
    config: StudyConfig,
    *,
    name: str = "study",
    training: Mapping[str, Any] | None = None,
) -> Job:
    """Open the networks and the data of a study, check that they fit, and plan its units.

    Raises:
        BadInputError: Neither or both of ``evaluate`` and ``data``, or they do not fit.
    """
    modules, paths = as_modules(source, config.activation), paths_of(source)
    if (evaluate is None) == (data is None):
        raise BadInputError(
            "study", "of a network needs one of evaluate (a function of it) and data, e.g. (x, y)"
        )
    check_plugins(config.plugins)
    first_module = next(iter(modules.values()))
    stored = _stored_data(data, first_module, config)
    task = data if isinstance(data, Task) else None
    if stored is not None:
        task = make_task(stored, config.performance or stored.usual, config.batch, config.chance)
    calibration, score_task = _calibration(stored, first_module, config)
    evaluators: dict[str, Evaluator] = {}
    targets: dict[str, tuple[Target, ...]] = {}
    for network, module in modules.items():
        model = copy.deepcopy(module).eval()  # the caller's module stays unchanged, whatever happens
        if task is not None:
            model = to_float32(model)
            check_fits(model, task)
        first = config.initial
        if first is not None and isinstance(source, Mapping) and isinstance(first, Mapping):
            first = first.get(network)
        initial = None if first is None else _initial_tensors(first, config.activation)
        evaluator = Evaluator(network, model, initial, task, evaluate, score_task=score_task)
        evaluators[network] = evaluator
        targets[network] = targets_of(model, config, evaluator.run_once)
        evaluator.composites = {t.name: t for t in targets[network] if t.composite}
        if calibration:
            evaluator.calibration = CalibrationInputs(model, calibration, targets[network])
        if evaluate is not None:
            check_direction(evaluator, *config.direction(evaluate))
        _check_initial(targets[network], initial)
    _check_points(config, any(e.initial is not None for e in evaluators.values()))
    others = other_networks(config, next(iter(targets.values())))
    for evaluator in evaluators.values():
        evaluator.others = others
    raw = b"" if stored is None else stored.to_bytes()
    common: dict[str, Any] = {
        "config": config.settings(),
        "data": None if task is None else _task_digest(task),
    }
    common["others"] = {key: _digest(tensors) for key, tensors in others.items()}
    if calibration:
        common["calibration"] = digest_of(b"".join(batch.numpy().tobytes() for batch in calibration))
    weights = {network: _digest(_state(evaluator.model)) for network, evaluator in evaluators.items()}
    units = tuple(
        _unit(common | {"weights": weights[network]}, network, target)
        for network in evaluators
        for target in targets[network]
    )
    measured, higher = config.direction(evaluate) if evaluate is not None else ("", True)
    measure = task or Task(measured, higher, config.chance, ())
    everything = [target for network in targets.values() for target in network]
    origin = StudyOrigin(
        layers={target.name: target for target in everything},
        networks={
            network: NetworkOrigin(evaluator.digest(), paths.get(network), config.activation)
            for network, evaluator in evaluators.items()
        },
        data=DataOrigin(
            str(data) if isinstance(data, str | os.PathLike) else None,
            digest_of(raw) if raw else None,
            None if stored is None else len(stored.x_test),
        ),
        batch=config.batch,
        context=config.context,
        calibration=sum(map(len, calibration)) or None,
        without_blocks="drop" in config.names and not any(target.kind == "block" for target in everything),
        stacked_experts=_stacked_experts(first_module, config),
        others=_paths_of_others(config),
        training=training,
    )
    return Job(
        name=name,
        identity=unit_key(common | {"weights": weights}),
        performance={
            "name": measure.performance,
            "chance": measure.chance,
            "higher_is_better": measure.higher_is_better,
        },
        points=sum(
            len(config.points(target, evaluators[network].initial is not None))
            for network in targets
            for target in targets[network]
        ),
        origin=origin,
        body=StudyBody(evaluators, config),
        units=units,
        data=raw,
    )


def targets_of(model: nn.Module, config: StudyConfig, run: Callable[[], object]) -> tuple[Target, ...]:
    """The layers of a network that a study changes, and its blocks and experts; ``run`` runs it once.

    Raises:
        BadInputError: A pattern matches nothing, or only blocks where layers are changed too.
    """
    units = {unit_of(name) for name in config.names}
    experts = (
        find_experts(model, config.patterns, required=units == {"experts"}) if "experts" in units else ()
    )
    if units == {"experts"}:
        return experts
    if "block" not in units:
        return (*_suitable(find_targets(model, config.patterns), config), *experts)
    blocks = find_blocks(model, run, config.patterns, required="layer" not in units)
    if not blocks:
        return (*find_targets(model, config.patterns), *experts)
    if "layer" not in units:
        return (*blocks, *experts)
    every = find_targets(model)  # a pattern may name a block and no layer
    whole = [target.name for target in find_blocks(model, run)]
    names = chosen_names([target.name for target in every], config.patterns, whole=whole)
    layers = tuple(target for target in every if target.name in names)
    if not layers:
        raise BadInputError(
            "layers", f"{', '.join(config.patterns)} matches blocks, but no layer inside them"
        )
    return (*layers, *blocks, *experts)


def _suitable(targets: tuple[Target, ...], config: StudyConfig) -> tuple[Target, ...]:
    """The layers that take one of the settings: heads and neurons are removed in the layer that reads them."""
    settings = [setting for intervention in config.interventions for setting in intervention.settings]
    suitable = tuple(t for t in targets if any(suits(setting, t.type) for setting in settings))
    if not suitable:
        raise BadInputError("prune.unit", "no layer that reads attention heads or MLP neurons was found")
    return suitable


def _stacked_experts(model: nn.Module, config: StudyConfig) -> tuple[str, ...]:
    """The layers of experts that interventions on layers do not reach, because one tensor holds all experts."""
    if config.patterns != ("*",) or "layer" not in {unit_of(name) for name in config.names}:
        return ()
    if not any(parameter.ndim == 3 for parameter in model.parameters()):
        return ()
    return tuple(target.name for target in find_experts(model, required=False))


def other_networks(config: StudyConfig, targets: Iterable[Target]) -> Others:
    """The tensors of the other networks that ``swap`` and ``adapt`` take values from.

    Raises:
        BadInputError: One is not there, or has other layers.
    """
    networks: dict[str, dict[str, NDArray[Any]]] = {}
    layers = [target for target in targets if not target.composite]
    names = {f"{target.name}.{part}" for target in layers for part in ("weight", "bias")}
    for intervention in config.interventions:
        if intervention.name not in KINDS or not KINDS[intervention.name].source:
            continue
        for key in {source_key(intervention, setting) for setting in intervention.settings} - set(networks):
            source = intervention.source if intervention.source is not None else key
            if isinstance(source, str) and source == f"{intervention.name}:source":
                raise BadInputError(
                    intervention.name, "needs the other network: a path, a module or tensors by name"
                )
            tensors = {n.removeprefix("module."): v for n, v in tensors_of(source).items()}
            networks[key] = {n: v for n, v in tensors.items() if n in names}
            for target in layers:
                why = _shape_difference(networks[key], target)
                if why:
                    raise BadInputError(intervention.name, f"the other network does not match: {why} there")
    return networks


def check_direction(evaluator: Evaluator, measure: str, higher_is_better: bool) -> None:
    """A network without weights must not be better than the trained one: then the direction is wrong.

    Where the two score nearly alike, the network is hardly trained and the study goes on with a warning. Where the
    function cannot score such a network, a warning says why and that the direction was not checked.

    Raises:
        BadInputError: It is clearly better.
    """
    intact = evaluator.intact().performance
    trained_state = {k: v.clone() for k, v in evaluator.model.state_dict().items()}
    try:
        with torch.no_grad():
            for parameter in evaluator.model.parameters():
                parameter.zero_()
            zeroed = evaluator.now().performance
    except Exception as error:  # the user's function may fail in any way; that alone is no reason to stop
        reason = next(iter(str(error).splitlines()), "")
        why = f"{type(error).__name__}: {reason}" if reason else type(error).__name__
        warnings.warn(
            f"evaluate fails on the network with all its weights zero ({why}): whether "
            f"{'higher' if higher_is_better else 'lower'} is better could not be checked",
            RuntimeWarning,
            stacklevel=2,
        )
        return
    finally:
        evaluator.model.load_state_dict(trained_state)
    if zeroed > intact if higher_is_better else zeroed < intact:
        word = "more" if higher_is_better else "less"
        why = (
            f"{measure} is {intact:.4g} for the network and {zeroed:.4g} with all its weights zero, which would be "
            f"better if {word} is better; check higher_is_better, or whether the network is trained at all"
        )
        if abs(zeroed - intact) > _ALIKE * max(abs(zeroed), abs(intact)):
            raise BadInputError("evaluate", why)
        warnings.warn(f"evaluate: {why}", RuntimeWarning, stacklevel=2)


def _stored_data(data: Any, model: nn.Module, config: StudyConfig) -> StudyData | None:
    """The data in canonical form, with calibration rows if such rows were given or an edit reads inputs.

    Data that come with training rows are calibrated on those.
    """
    if data is None or isinstance(data, Task):
        return None
    stored = study_data(data, model, config.context, inputs=config.inputs, targets=config.targets)
    stored = stored.take(config.rows)
    if config.calibration is None:
        if len(stored.x):
            rows = slice(0, CALIBRATION_ROWS)
            return replace(stored, x=stored.x[rows], y=None if stored.y is None else stored.y[rows])
        return stored.with_calibration(None, config.seed) if config.data_aware else stored
    given = calibration_data(
        config.calibration, model, config.context, inputs=config.inputs, targets=config.targets
    )
    if given.kind != "tokens" and given.x.shape[1:] != stored.x_test.shape[1:]:
        why = f"does not fit the data: rows of shape {given.x.shape[1:]} instead of {stored.x_test.shape[1:]}"
        raise BadInputError("calibration", why)
    return stored.with_calibration(given, config.seed)


def _calibration(
    stored: StudyData | None, model: nn.Module, config: StudyConfig
) -> tuple[tuple[torch.Tensor, ...], Task | None]:
    """The calibration inputs in batches, and the loss on them for scores, where there are calibration rows.

    Raises:
        BadInputError: An edit needs calibration data and there are none.
    """
    if stored is not None:
        return stored.calibration_batches(), calibration_task(stored, config.batch)
    if config.calibration is None and not config.data_aware:
        return (), None
    if config.calibration is None:
        why = "data-aware edits need data for the input covariances; give calibration="
        raise BadInputError("calibration", why)
    return calibration_data(config.calibration, model, config.context).calibration_batches(), None


def _unit(identity: Mapping[str, Any], network: str, target: Target) -> Unit:
    config = {"format": FORMAT, "network": network, **identity, "target": asdict(target)}
    return Unit(unit_key(config), f"{network} {target.name}", network, config, {})


def _check_points(config: StudyConfig, initial: bool) -> None:
    if config.names == ("reinitialise",) and not initial:
        why = "re-initialising needs the network's initial values: give network.initial, or re-randomise"
        raise BadInputError("interventions.kinds", why)


def _initial_tensors(source: Any, activation: str) -> dict[str, NDArray[Any]]:
    """The initial tensors by the names of the module's, also where a file names them differently."""
    if isinstance(source, str | os.PathLike):
        return _state(as_modules(source, activation)["model"])
    return tensors_of(source)


def _check_initial(targets: tuple[Target, ...], initial: Mapping[str, Any] | None) -> None:
    """Before any work: the initial values have to be those of the same network."""
    if initial is None:
        return
    for target in targets:
        why = "" if target.composite else _shape_difference(initial, target)
        if why:
            raise BadInputError("initial", f"not the initial values of this network: {why} there")


def _shape_difference(tensors: Mapping[str, NDArray[Any]], target: Target) -> str:
    """How the weight of a layer differs in another network; empty where it has the same shape."""
    there = tensors.get(f"{target.name}.weight")
    if there is not None and tuple(there.shape) == target.shape:
        return ""
    shape = "is not" if there is None else f"is {tuple(there.shape)}"
    return f"{target.name}.weight {target.shape} {shape}"


def _paths_of_others(config: StudyConfig) -> tuple[str, ...]:
    sources = [
        intervention.source or source_key(intervention, setting)
        for intervention in config.interventions
        if intervention.name in KINDS and KINDS[intervention.name].source
        for setting in intervention.settings
    ]
    return tuple(dict.fromkeys(str(source) for source in sources if isinstance(source, str | os.PathLike)))


def _task_digest(task: Task) -> str:
    return digest_of(b"".join(t.numpy().tobytes() for batch in task.batches for t in batch))


def _digest(tensors: Mapping[str, NDArray[Any]]) -> str:
    total = hashlib.sha256()
    for name, tensor in tensors.items():
        total.update(name.encode() + str(tensor.dtype).encode() + np.ascontiguousarray(tensor).tobytes())
    return total.hexdigest()[:32]


def _state(model: nn.Module) -> dict[str, NDArray[Any]]:
    return {
        name: (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).detach().numpy().copy()
        for name, tensor in model.state_dict().items()
    }
