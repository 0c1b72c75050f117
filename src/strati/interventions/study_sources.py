"""Where the networks of a study come from, turned into a job: a spec, or modules in memory."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from strati.core.errors import BadInputError
from strati.core.files import write_atomic
from strati.interventions.changes import tensors_of
from strati.interventions.checkpoints import in_single, open_checkpoint, trained_networks
from strati.interventions.input_covariance import CalibrationInputs
from strati.interventions.job import Job
from strati.interventions.measure_layer import Evaluate, Subject, failed_row
from strati.interventions.metrics import check_plugins
from strati.interventions.spec_data import Find, prepare, task_of
from strati.interventions.study_config import StudyConfig, config_of
from strati.interventions.study_spec import Spec
from strati.interventions.study_units import (
    ModelBody,
    SpecBody,
    check_direction,
    check_fits,
    digest_of,
    digests,
    layer_units,
    network_name,
    other_networks,
    state_digest,
    target_of,
    targets_of,
    training_units,
)
from strati.interventions.targets import Target, weights_digest
from strati.interventions.tasks import StudyData, Task, calibration_data, make_task, study_data
from strati.jobs.engine import Unit
from strati.jobs.store import Store, unit_key


def spec_job(spec: Spec, config: StudyConfig, find: Find) -> Job:
    """The job of a spec: data read and checked against the network, layers found, units planned.

    Raises:
        BadInputError: The data or the checkpoint are not there or do not fit.
    """
    check_plugins(config.plugins)
    plan = config_of(spec, config)
    opened = open_spec(spec, find)
    model, data, names = opened.model, opened.data, opened.names
    if plan.data_aware and not spec.trained_here:
        data = data.with_calibration(None, spec.seed)
    weights = "trained here" if spec.trained_here else state_digest(model)
    task = task_of(data, spec)
    check_fits(model, task)
    targets = targets_of(model, plan, lambda: task.output(model, task.batches[0][0][:1]))
    if spec.network.initial is not None:
        first = open_checkpoint(spec.network.initial, spec.network)
        _check_initial(targets, _tensors(first), spec.network.initial)
        weights += state_digest(first)
    raw = data.to_bytes()
    digest = digest_of(raw)
    initial = spec.trained_here or spec.network.initial is not None
    _check_points(plan, initial)
    others = other_networks(plan, targets)
    identity = {"data": digest, "weights": weights, "plugins": sorted(plan.plugins), "spec": spec.plain()}
    identity |= {"others": digests(others)}
    points = sum(len(plan.points(target, initial)) for target in targets)
    planner = _SpecPlanner(spec, plan, raw, digest, names, targets, weights, initial, digests(others))
    return Job(
        name=spec.name,
        identity=unit_key(identity),
        about=_about(spec.name, task, len(names) * points, spec.plain())
        | {"origin": origin_of(spec, digest, weights, model) | {"layers": shapes_of(targets)}},
        body=SpecBody(spec, plan, others),
        prepare=planner.prepare,
        train=planner.train,
        layers=planner.layers,
        fail=planner.fail,
    )


@dataclass(frozen=True)
class Opened:
    """The network of a spec (one of those to train, untrained), its data, and the names of all its networks."""

    model: nn.Module
    data: StudyData
    names: tuple[str, ...]


def open_spec(spec: Spec, find: Find) -> Opened:
    """Read the data of a spec, and open or build its network.

    Raises:
        BadInputError: They are not there.
    """
    if spec.trained_here:
        data = prepare(spec, find)
        source = trained_networks(spec.network.source)
        model = source.build(spec.network, data.shape, data.outputs, spec.data.context)
        return Opened(model, data, tuple(network_name(n) for n in range(spec.network.count)))
    model = open_checkpoint(str(spec.network.path), spec.network)
    data = prepare(spec, find, *_tokeniser(spec, model))
    return Opened(model, data, (Path(str(spec.network.path)).name,))


@dataclass(frozen=True)
class _SpecPlanner:
    """The stages of a spec's job."""

    spec: Spec
    plan: StudyConfig
    raw: bytes
    digest: str
    names: tuple[str, ...]
    targets: tuple[Target, ...]
    weights: str
    initial: bool
    others: Mapping[str, str]

    def prepare(self, folder: Path) -> None:
        """Put the data in canonical form beside the store, where units find them."""
        _write_data(folder, self.raw)
        if self.spec.trained_here:
            (folder / "networks").mkdir(exist_ok=True)

    def train(self, folder: Path) -> list[Unit]:
        """The trainings."""
        if not self.spec.trained_here:
            return []
        return training_units(self.spec, self.digest, {"data": str(folder / "data.npz")})

    def layers(self, folder: Path, store: Store) -> list[Unit]:
        """One unit per layer, with the files it reads; those of a failed training know that it failed."""
        trainings = {n: unit for unit in self.train(folder) for n in unit.config["networks"]}
        reasons = {record.key: record.reason for record in store.units() if record.reason is not None}
        common = {"data": self.digest, "plan": self.plan.settings(), "others": self.others}
        units: list[Unit] = []
        for number, name in enumerate(self.names):
            files = {"data": str(folder / "data.npz")}
            network_config: dict[str, Any] = {"weights": self.weights}
            if self.spec.trained_here:
                training = trainings[number].key
                files["network"] = str(folder / "networks" / f"{name}.npz")
                network_config = {"weights": training, "number": number}
                if training in reasons:
                    network_config["untrained"] = reasons[training]
            units += layer_units(common | network_config, name, self.targets, files)
        return units

    def fail(self, unit: Unit, reason: str) -> list[dict[str, Any]]:
        """The rows of a unit that failed as a whole."""
        target = target_of(unit)
        points = self.plan.points(target, self.initial)
        return [failed_row(unit.config["network"], target, point, reason) for point in points]


def model_job(
    source: Any,
    evaluate: Evaluate | None,
    data: Any,
    plan: StudyConfig,
    paths: Mapping[str, str] = MappingProxyType({}),
) -> Job:
    """The job of networks as modules; ``paths`` says where those are that were read from files.

    Raises:
        BadInputError: Neither or both of ``evaluate`` and ``data``, or they do not fit.
    """
    modules = dict(source) if isinstance(source, Mapping) else {"model": source}
    if (evaluate is None) == (data is None):
        raise BadInputError(
            "study", "of a network needs one of evaluate (a function of it) and data, e.g. (x, y)"
        )
    check_plugins(plan.plugins)
    stored = None if data is None else _study_data(data, next(iter(modules.values())), plan)
    calibration: tuple[Tensor, ...] = ()
    if plan.data_aware:
        stored, calibration = _calibrated(stored, next(iter(modules.values())), plan)
    task = _task(data, stored, plan)
    raw = b"" if stored is None else stored.to_bytes()
    measured, higher = plan.direction(evaluate) if evaluate is not None else ("", True)
    subjects: dict[str, Subject] = {}
    targets: dict[str, tuple[Target, ...]] = {}
    for name, module in modules.items():
        model = copy.deepcopy(module).eval()  # the caller's own stays as it is, whatever happens
        if task is not None:
            model = in_single(model)
            check_fits(model, task)
        first = (
            plan.initial.get(name)
            if plan.initial is not None and isinstance(source, Mapping)
            else plan.initial
        )
        subject = subjects[str(name)] = Subject(str(name), model, _tensors(first), task, evaluate)
        targets[str(name)] = targets_of(model, plan, subject.run_once)
        if calibration:
            subject.calibration = CalibrationInputs(model, calibration, targets[str(name)])
        if evaluate is not None:
            check_direction(subjects[str(name)], measured, higher)
        _check_initial(targets[str(name)], _tensors(first), "initial")
    _check_points(plan, any(s.initial is not None for s in subjects.values()))
    others = other_networks(plan, next(iter(targets.values())))
    common = {"plan": plan.settings(), "data": None if task is None else _digest(task)}
    common |= {"others": digests(others)}
    if calibration:
        common |= {"calibration": digest_of(b"".join(batch.numpy().tobytes() for batch in calibration))}
    weights = {name: state_digest(s.model) for name, s in subjects.items()}

    def layers(folder: Path, store: Store) -> list[Unit]:
        return [
            unit
            for name in subjects
            for unit in layer_units(common | {"weights": weights[name]}, name, targets[name], {})
        ]

    def fail(unit: Unit, reason: str) -> list[dict[str, Any]]:
        subject, target = subjects[unit.config["network"]], target_of(unit)
        points = plan.points(target, subject.initial is not None)
        return [failed_row(subject.name, target, point, reason) for point in points]

    units = sum(len(plan.points(t, s.initial is not None)) for n, s in subjects.items() for t in targets[n])
    measure = task or Task(measured, higher, plan.chance, ())
    return Job(
        name="study",
        identity=unit_key(common | {"weights": weights}),
        about=_about("study", measure, units, None)
        | {
            "origin": {
                "layers": shapes_of(t for network_targets in targets.values() for t in network_targets),
                "networks": {
                    name: {"hash": weights_digest(s.model)}
                    | ({"path": paths[name], "activation": plan.activation} if name in paths else {})
                    for name, s in subjects.items()
                },
                "data": {
                    "source": str(data) if isinstance(data, str | os.PathLike) else None,
                    "hash": digest_of(raw) if raw else None,
                    "rows": None if stored is None else len(stored.x_test),
                },
                "measure": {"batch": plan.batch, "context": plan.context},
                "calibration": {"rows": sum(map(len, calibration))} if calibration else None,
                "without_blocks": "drop" in plan.names
                and not any(
                    t.kind == "block" for network_targets in targets.values() for t in network_targets
                ),
            }
        },
        body=ModelBody(subjects, plan, others),
        prepare=lambda folder: _write_data(folder, raw) if raw else None,
        train=lambda _: [],
        layers=layers,
        fail=fail,
    )


def _about(name: str, task: Task, units: int, spec: Any) -> dict[str, Any]:
    measure = {"name": task.performance, "chance": task.chance, "higher_is_better": task.higher_is_better}
    return {"name": name, "performance": measure, "units": units, "spec": spec}


def origin_of(spec: Spec, data: str, weights: str, model: nn.Module) -> dict[str, Any]:
    """Where the networks and data of a study by spec are, and their hashes."""
    where = spec.data.path or spec.data.name
    origin: dict[str, Any] = {"data": {"source": where, "hash": data}}
    if not spec.trained_here:
        path = Path(str(spec.network.path)).resolve()
        about = {"path": str(path), "weights": weights[:32], "hash": weights_digest(model)}
        origin["networks"] = {path.name: about}
    return origin


def shapes_of(targets: Iterable[Target]) -> dict[str, Any]:
    """What a plan needs to know of each layer: its kind and shape, and what a run of blocks consists of."""
    return {
        t.name: {"kind": t.kind, "shape": list(t.shape), "members": list(t.members), "outputs": t.outputs}
        for t in targets
    }


def _check_points(plan: StudyConfig, initial: bool) -> None:
    if plan.names == ("reinitialise",) and not initial:
        why = "re-initialising needs the network's initial values: give network.initial, or re-randomise"
        raise BadInputError("interventions.kinds", why)


def _check_initial(targets: tuple[Target, ...], initial: Mapping[str, Any] | None, what: str) -> None:
    """Before any work: the initial values have to be those of the same network."""
    for target in targets if initial is not None else ():
        first = initial.get(f"{target.name}.weight") if initial is not None else None
        if first is None or tuple(first.shape) != target.shape:
            shape = "it is not there" if first is None else f"there it is {tuple(first.shape)}"
            why = f"not the initial values of this network: {target.name}.weight is {target.shape} here, {shape}"
            raise BadInputError(what, why)


def _tokeniser(spec: Spec, model: nn.Module) -> tuple[Callable[[str], list[int]] | None, int]:
    config: Any = getattr(model, "config", None)
    vocabulary = int(getattr(config, "vocab_size", 0) or 0)
    if config is None or not str(spec.data.path or "").endswith(".txt"):
        return None, vocabulary
    from strati.core.errors import require

    transformers = require("transformers", "transformers", "reading text for a transformers checkpoint")
    try:
        tokeniser = transformers.AutoTokenizer.from_pretrained(spec.network.path, local_files_only=True)
    except (OSError, ValueError, ImportError) as error:
        why = f"no tokeniser for the text ({str(error).splitlines()[0]}); give tokens as .npy instead"
        raise BadInputError(str(spec.network.path), why) from None
    return lambda text: list(tokeniser(text, verbose=False)["input_ids"]), vocabulary


def _study_data(data: Any, model: nn.Module, plan: StudyConfig) -> StudyData | None:
    if isinstance(data, Task):
        return None
    return study_data(data, model, plan.context, inputs=plan.inputs, targets=plan.targets)


def _calibrated(
    stored: StudyData | None, model: nn.Module, plan: StudyConfig
) -> tuple[StudyData | None, tuple[Tensor, ...]]:
    """The data with their calibration rows, and those rows in batches.

    Raises:
        BadInputError: There are no data to take them from, or they do not fit the network.
    """
    calibration = None
    if plan.calibration is not None:
        calibration = calibration_data(plan.calibration, model, plan.context, plan.inputs)
    if stored is None:
        if calibration is None:
            why = "data-aware edits need data for the input covariances; give calibration="
            raise BadInputError("calibration", why)
        return None, calibration.calibration_batches()
    if (
        calibration is not None
        and calibration.kind != "tokens"
        and calibration.x.shape[1:] != stored.x_test.shape[1:]
    ):
        why = f"does not fit the data: rows of shape {calibration.x.shape[1:]} instead of {stored.x_test.shape[1:]}"
        raise BadInputError("calibration", why)
    stored = stored.with_calibration(None if calibration is None else calibration.x, plan.seed)
    return stored, stored.calibration_batches()


def _task(data: Any, stored: StudyData | None, plan: StudyConfig) -> Task | None:
    if stored is None:
        return data if isinstance(data, Task) else None
    return make_task(stored, plan.performance or stored.usual, plan.batch, plan.chance)


def _write_data(folder: Path, raw: bytes) -> None:
    """Put the data in canonical form beside the store, where units and plans read them."""
    path = folder / "data.npz"
    if not (path.is_file() and digest_of(path.read_bytes()) == digest_of(raw)):
        write_atomic(path, raw)


def _tensors(source: Any) -> dict[str, Any] | None:
    if source is None:
        return None
    return dict(tensors_of(source))


def _digest(task: Task) -> str:
    return digest_of(b"".join(t.numpy().tobytes() for batch in task.batches for t in batch))
