"""A study cut into units of work: trainings first, then one unit per layer of each network.

A unit's key is the hash of all that its rows depend on. The bodies here run wherever an engine puts them and keep,
per process, the last network and data they used.
"""

from __future__ import annotations

import hashlib
import io
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from strati.core.errors import BadInputError
from strati.interventions import study_spec as specs
from strati.interventions.blocks import find_blocks
from strati.interventions.changes import Others, source_key, tensors_of
from strati.interventions.checkpoints import open_checkpoint, trained_networks
from strati.interventions.experts import find_experts
from strati.interventions.input_covariance import CalibrationInputs
from strati.interventions.kinds import KINDS, suits, unit_of
from strati.interventions.measure_layer import Subject, measure_layer
from strati.interventions.spec_data import task_of
from strati.interventions.study_config import StudyConfig
from strati.interventions.study_spec import Spec
from strati.interventions.targets import Target, chosen_names, find_targets
from strati.interventions.tasks import StudyData, Task
from strati.io.in_memory import load_arrays
from strati.jobs.engine import Load, Unit
from strati.jobs.store import unit_key

_kept: dict[str, tuple[str, Any]] = {}

CALIBRATION_ROWS = 4096
"""Rows of training data that input covariances are computed from."""

_ALIKE = 0.1
"""Performances this close, as a share of the larger, do not tell which way is better."""


@dataclass(frozen=True)
class SpecBody:
    """What a unit of a study by spec does: train networks, or change one layer of one of them."""

    spec: Spec
    plan: StudyConfig
    others: Others

    def __call__(self, unit: Unit, load: Load) -> Any:
        """Run one unit: the trained networks as ``.npz`` bytes by name, or a list of rows."""
        if unit.config.get("untrained"):
            raise BadInputError(unit.config["network"], f"its training failed: {unit.config['untrained']}")
        data: StudyData = _keep("data", unit.config["data"], lambda: StudyData.from_bytes(load("data")))
        if unit.config["work"] == "train":
            numbers = unit.config["networks"]
            trained = trained_networks(self.spec.network.source).train(self.spec, data, numbers)
            return {network_name(n): pack(arrays) for n, arrays in zip(numbers, trained, strict=True)}
        task: Task = _keep(
            "task", f"{unit.config['data']} {self.spec.measure}", lambda: task_of(data, self.spec)
        )
        identity = f"{unit.config['data']} {unit.config['network']} {unit.config['weights']}"
        subject: Subject = _keep("subject", identity, lambda: self._subject(unit, load, data, task))
        return measure_layer(subject, target_of(unit), self.plan, self.others)

    def _subject(self, unit: Unit, load: Load, data: StudyData, task: Task) -> Subject:
        network = self.spec.network
        if not self.spec.trained_here:
            model = open_checkpoint(str(network.path), network)
            initial = None if network.initial is None else open_checkpoint(network.initial, network)
            first = None if initial is None else _state(initial)
            return Subject(unit.config["network"], model, first, task, None, self._calibration(model, data))
        source = trained_networks(network.source)
        model = source.build(network, data.shape, data.outputs, self.spec.data.context)
        source.initialise(model, self.spec.seed, unit.config["number"])
        first = _state(model)
        load_arrays(model, unpack(load("network")), unit.config["network"])
        calibration = self._calibration(model.eval(), data)
        return Subject(unit.config["network"], model, first, task, None, calibration)

    def _calibration(self, model: nn.Module, data: StudyData) -> CalibrationInputs | None:
        """The input covariances, from the calibration rows, or from training data of a network trained here."""
        if not self.plan.data_aware:
            return None
        rows = replace(data, x=data.x[:CALIBRATION_ROWS], y=None)
        return CalibrationInputs(model, rows.calibration_batches())


@dataclass(frozen=True)
class ModelBody:
    """What a unit of a study of modules in memory does."""

    subjects: Mapping[str, Subject]
    plan: StudyConfig
    others: Others

    def __call__(self, unit: Unit, load: Load) -> Any:
        """The rows of one layer."""
        return measure_layer(self.subjects[unit.config["network"]], target_of(unit), self.plan, self.others)


def training_units(spec: Spec, digest: str, files: Mapping[str, str]) -> list[Unit]:
    """One unit per batch of networks trained together."""
    size = spec.network.together or (10 if spec.network.source in ("mlp", "fcn") else 1)
    units = []
    for start in range(0, spec.network.count, size):
        numbers = list(range(start, min(start + size, spec.network.count)))
        config = {
            "work": "train",
            "format": specs.FORMAT,
            "networks": numbers,
            "data": digest,
            "seed": spec.seed,
        }
        config |= {"network": asdict(spec.network) | {"count": 0}, "train": asdict(spec.train)}
        name = f"train {network_name(numbers[0])}" + (f"..{numbers[-1]:03d}" if len(numbers) > 1 else "")
        units.append(Unit(unit_key(config), name, name, config, files))
    return units


def layer_units(
    identity: Mapping[str, Any], network: str, targets: tuple[Target, ...], files: Mapping[str, str]
) -> list[Unit]:
    """One unit per layer of a network; ``identity`` is everything else its rows depend on."""
    units = []
    for target in targets:
        config = {
            "work": "layer",
            "format": specs.FORMAT,
            "network": network,
            **identity,
            "target": asdict(target),
        }
        units.append(Unit(unit_key(config), f"{network} {target.name}", network, config, files))
    return units


def target_of(unit: Unit) -> Target:
    """The layer a unit is about."""
    fields = dict(unit.config["target"])
    return Target(**fields | {"shape": tuple(fields["shape"]), "members": tuple(fields["members"])})


def network_name(number: int) -> str:
    """The name of the n-th network trained here."""
    return f"network-{number:03d}"


def check_fits(model: nn.Module, task: Task) -> None:
    """Run one input through the network before any work is planned.

    Raises:
        BadInputError: The data do not fit the network.
    """
    import torch

    inputs, targets = task.batches[0]
    try:
        with torch.inference_mode():
            logits = task.output(model, inputs[:1])
    except Exception as error:  # whatever the module raises on these inputs, the data do not fit it
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise BadInputError(
            "data", f"do not fit the network: inputs {tuple(inputs.shape[1:])}: {text}"
        ) from None
    if not isinstance(logits, torch.Tensor) or logits.ndim != targets.ndim + 1:
        raise BadInputError("data", "do not fit the network: its output is not one row of scores per target")
    if int(targets.max()) >= logits.shape[-1]:
        why = f"do not fit the network: label {int(targets.max())}, but only {logits.shape[-1]} outputs"
        raise BadInputError("data", why)


def check_direction(subject: Subject, measure: str, higher_is_better: bool) -> None:
    """A network without weights must not be better than the trained one: then the direction is wrong.

    Where the two score nearly alike, the network is hardly trained and the study goes on with a warning. Where the
    function cannot score such a network, a warning says why and that the direction was not checked.

    Raises:
        BadInputError: It is clearly better.
    """
    import torch

    assert subject.evaluate is not None
    intact, trained_state = subject.intact(), {k: v.clone() for k, v in subject.model.state_dict().items()}
    try:
        with torch.no_grad():
            for parameter in subject.model.parameters():
                parameter.zero_()
            zeroed = subject.evaluated().performance
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
        subject.model.load_state_dict(trained_state)
    if zeroed > intact if higher_is_better else zeroed < intact:
        word = "more" if higher_is_better else "less"
        why = (
            f"{measure} is {intact:.4g} for the network and {zeroed:.4g} with all its weights zero, which would be "
            f"better if {word} is better; check higher_is_better, or whether the network is trained at all"
        )
        if abs(zeroed - intact) > _ALIKE * max(abs(zeroed), abs(intact)):
            raise BadInputError("evaluate", why)
        warnings.warn(f"evaluate: {why}", RuntimeWarning, stacklevel=2)


def targets_of(model: nn.Module, plan: StudyConfig, run: Callable[[], object]) -> tuple[Target, ...]:
    """The layers of a network that the plan is about, and its blocks where they are dropped; ``run`` runs it once."""
    units = {unit_of(name) for name in plan.names}
    if "experts" in units:
        experts = find_experts(model, plan.patterns, required=units == {"experts"})
        others = tuple(
            intervention for intervention in plan.interventions if unit_of(intervention.name) != "experts"
        )
        if not others:
            return experts
        return (*targets_of(model, replace(plan, interventions=others), run), *experts)
    if "block" not in units:
        targets = find_targets(model, plan.patterns)
        settings = [setting for intervention in plan.interventions for setting in intervention.settings]
        if any(any(suits(setting, t.type) for t in targets) for setting in settings):
            return tuple(t for t in targets if any(suits(setting, t.type) for setting in settings))
        raise BadInputError("prune.unit", "no layer that reads attention heads or MLP neurons was found")
    alone = units == {"block"}
    blocks = find_blocks(model, run, plan.patterns, required=alone)
    if not blocks:
        return find_targets(model, plan.patterns)
    if alone:
        return blocks
    every = find_targets(model)  # a pattern may name a block and no layer
    names = chosen_names(
        [t.name for t in every], plan.patterns, whole=[t.name for t in find_blocks(model, run)]
    )
    layers = tuple(t for t in every if t.name in names)
    if not layers:
        raise BadInputError("layers", f"{', '.join(plan.patterns)} matches blocks, but no layer inside them")
    return (*layers, *blocks)


def other_networks(plan: StudyConfig, targets: tuple[Target, ...]) -> Others:
    """The tensors of the other networks that ``swap`` and ``adapt`` take values from.

    Raises:
        BadInputError: One is not there, or has other layers.
    """
    networks: dict[str, dict[str, NDArray[Any]]] = {}
    names = {f"{t.name}.{part}" for t in targets for part in ("weight", "bias")}
    for intervention in plan.interventions:
        if intervention.name not in KINDS or not KINDS[intervention.name].source:
            continue
        for setting in intervention.settings:
            key = source_key(intervention, setting)
            source = intervention.source if intervention.source is not None else key
            if isinstance(source, str) and source == f"{intervention.name}:source":
                raise BadInputError(
                    intervention.name, "needs the other network: a path, a module or tensors by name"
                )
            if key not in networks:
                tensors = tensors_of(source)
                networks[key] = {n.removeprefix("module."): v for n, v in tensors.items()}
                networks[key] = {n: v for n, v in networks[key].items() if n in names}
                for target in targets:
                    there = networks[key].get(f"{target.name}.weight")
                    if not target.composite and (there is None or tuple(there.shape) != target.shape):
                        shape = "is not there" if there is None else f"is {tuple(there.shape)} there"
                        why = f"the other network does not match: {target.name}.weight {target.shape} {shape}"
                        raise BadInputError(intervention.name, why)
    return networks


def digests(others: Others) -> dict[str, str]:
    """A short hash of each other network."""
    return {key: _tensors_digest(tensors) for key, tensors in others.items()}


def pack(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """Arrays by name as the bytes of an ``.npz``."""
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()


def unpack(raw: bytes) -> dict[str, NDArray[Any]]:
    """Read :func:`pack` again."""
    with np.load(io.BytesIO(raw), allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def digest_of(raw: bytes) -> str:
    """A short hash of bytes."""
    return hashlib.sha256(raw).hexdigest()[:32]


def state_digest(model: nn.Module) -> str:
    """A short hash of all tensors of a module."""
    return _tensors_digest(_state(model))


def _tensors_digest(tensors: Mapping[str, NDArray[Any]]) -> str:
    total = hashlib.sha256()
    for name, value in tensors.items():
        total.update(name.encode() + str(value.dtype).encode() + np.ascontiguousarray(value).tobytes())
    return total.hexdigest()[:32]


def _state(model: nn.Module) -> dict[str, NDArray[Any]]:
    import torch

    return {
        name: (value.float() if value.dtype == torch.bfloat16 else value).detach().numpy().copy()
        for name, value in model.state_dict().items()
    }


def _keep(slot: str, identity: str, make: Callable[[], Any]) -> Any:
    """The value of a slot if it is still the one asked for, else a new one."""
    if slot not in _kept or _kept[slot][0] != identity:
        _kept.pop(slot, None)  # free the old one first: both together may not fit
        _kept[slot] = (identity, make())
    return _kept[slot][1]
