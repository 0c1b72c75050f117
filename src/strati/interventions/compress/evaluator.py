"""Measures a network with a setting for every layer, and restores it afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from strati.core.errors import BadInputError
from strati.interventions.cached_forward import whole_scores
from strati.interventions.changes import LayerEdits, Others, make_change, source_key, tensors_of
from strati.interventions.checkpoints import in_single
from strati.interventions.compress.costs import KEEP
from strati.interventions.input_covariance import CalibrationInputs
from strati.interventions.kinds import Point, make, read_setting
from strati.interventions.measure_layer import Subject
from strati.interventions.study_config import StudyConfig
from strati.interventions.study_units import check_fits
from strati.interventions.targets import (
    Change,
    Target,
    changed,
    find_targets,
    values_of,
    weights_digest,
)
from strati.interventions.tasks import StudyData, Task, make_task, study_data

if TYPE_CHECKING:
    from strati.core.results import FloatArray
    from strati.interventions.study import Study

_MOST_BYTES = 600_000_000
"""Singular directions kept between measurements; beyond, they are computed again."""


@dataclass(frozen=True)
class Measurement:
    """The performance of a changed network, and its scores by groups of examples where there are data."""

    performance: float
    groups: FloatArray | None = None
    stderr: float | None = None
    examples: int | None = None


class InterventionEvaluator:
    """One network, its data and everything needed to change it."""

    def __init__(self, subject: Subject, layers: Mapping[str, Any], others: Others) -> None:
        self.subject = subject
        self.others = others
        self._targets = {t.name: t for t in find_targets(subject.model)}
        for name, about in layers.items():
            if about["kind"] in ("block", "experts"):
                kind, shape = str(about["kind"]), tuple(int(n) for n in about["shape"])
                members = tuple(str(m) for m in about["members"])
                self._targets[name] = Target(name, kind, kind, shape, False, members, int(about["outputs"]))
        self._kept: dict[str, LayerEdits] = {}
        self._bytes = 0

    def measure(self, action: str, choices: Mapping[str, str]) -> Measurement:
        """The network with a setting for every layer; ``keep`` leaves one as it is.

        Raises:
            BadInputError: A layer that the network does not have, or a setting that cannot be applied.
        """
        with ExitStack() as stack, torch.no_grad():
            for layer, choice in choices.items():
                if choice != KEEP:
                    stack.enter_context(
                        changed(self.subject.model, self.target(layer), self.change(action, layer, choice))
                    )
            return self.now()

    def now(self) -> Measurement:
        """The network as it is at this moment."""
        if self.subject.task is not None:
            scores = whole_scores(self.subject.model, self.subject.task)
        else:
            scored = self.subject.evaluated()
            if scored.scores is None:
                return Measurement(scored.performance)
            scores = scored.scores
        return Measurement(scores.performance, scores.groups, scores.stderr, scores.examples)

    def target(self, layer: str) -> Target:
        """A layer or block by name."""
        if layer not in self._targets:
            raise BadInputError(layer, "the network has no such layer: the plan is for another network")
        return self._targets[layer]

    def change(self, action: str, layer: str, choice: str) -> Change:
        """The change that a choice makes to a layer."""
        target = self.target(layer)
        setting = {} if action == "drop" else read_setting(choice)
        intervention = make(
            action, setting, source="the study's" if action in ("swap", "adapt", "damp-intruders") else None
        )
        point = Point(intervention.name, intervention.settings[0])
        if target.kind == "experts":
            return self.subject.expert_change(target, point)
        others = (
            {source_key(intervention, point.setting): next(iter(self.others.values()))} if self.others else {}
        )
        return make_change(self.edits(target), intervention, point, np.random.default_rng(0), others)

    def energy_rank(self, layer: str, choice: str) -> int:
        """The rank of a layer under a setting such as ``energy=0.9``."""
        return self.edits(self.target(layer)).truncation(read_setting(choice))[1]

    def digest(self) -> str:
        """A short hash of the network's weights."""
        return weights_digest(self.subject.model)

    def edits(self, target: Target) -> LayerEdits:
        """A layer's edits, its singular directions kept while memory allows."""
        if target.name in self._kept:
            return self._kept[target.name]
        block = target.composite
        values = (np.empty((0, 0)), None) if block else values_of(self.subject.model, target)
        calibration = self.subject.calibration
        edits = LayerEdits(target, values, None if calibration is None else calibration.of)
        side = 0 if block else min(edits.matrix.shape)
        size = 8 * side * side + 8 * edits.matrix.size
        size += 0 if calibration is None or block else 8 * edits.matrix.shape[1] ** 2
        if self._bytes + size <= _MOST_BYTES:
            self._kept[target.name] = edits
            self._bytes += size
        return edits


def open_evaluators(study: Study, *, model: Any = None, data: Any = None) -> list[InterventionEvaluator]:
    """Evaluators for the networks of a study: those in memory, given, or where the study recorded them.

    Returns an empty list where they cannot be had, such as a study of modules read from its folder.

    Raises:
        BadInputError: A network or data file has changed since the study.
    """
    layers = study.origin.get("layers", {})
    body = study.body
    if model is not None:
        subject = _given(study, model, data)
        if subject is not None:
            _check_same(study, subject.model, model)
        return (
            [InterventionEvaluator(subject, layers, getattr(body, "others", {}))]
            if subject is not None
            else []
        )
    if body is not None and hasattr(body, "subjects"):
        return [InterventionEvaluator(subject, layers, body.others) for subject in body.subjects.values()]
    if study.store is None:
        return []
    folder, spec = Path(study.store).parent, study.origin.get("spec")
    return _from_files(study, folder) if spec is None else _reopened(study, spec, folder)


def _check_same(study: Study, module: nn.Module, model: Any) -> None:
    """Refuse another network than those the study measured, where it knows them."""
    networks = study.origin.get("networks", {}).values()
    hashes = [n["hash"] for n in networks if isinstance(n, Mapping) and "hash" in n]
    if hashes and weights_digest(module) not in hashes:
        what = "model" if isinstance(model, nn.Module) else model
        raise BadInputError(what, "is another network than the study measured (its weights differ)")


def _given(study: Study, model: Any, data: Any) -> Subject | None:
    from strati.io.to_module import as_module

    module = as_module(model)
    task = None
    body = study.body
    if data is not None:
        task = as_task(data, study, in_single(module))
    elif body is not None and hasattr(body, "subjects"):
        first = next(iter(body.subjects.values()))
        network = module if first.task is None else in_single(module)
        calibration = None
        if first.calibration is not None:
            calibration = CalibrationInputs(network.eval(), first.calibration.batches)
        return Subject(first.name, network.eval(), None, first.task, first.evaluate, calibration)
    elif study.store is not None and (Path(study.store).parent / "data.npz").is_file():
        return _stored_subject("model", in_single(module).eval(), study, Path(study.store).parent)
    return None if task is None else Subject("model", in_single(module).eval(), None, task)


def as_task(data: Any, study: Study, model: nn.Module) -> Task:
    """Data given by the user for a network, scored as the study did.

    Raises:
        BadInputError: They are no data that a study takes.
    """
    if isinstance(data, Task):
        return data
    spec = study.origin.get("spec") or {}
    context = (spec.get("data") or study.origin.get("measure") or {}).get("context", StudyConfig().context)
    arrays = study_data(data, model, int(context))
    if arrays.x_test.ndim == 4:
        arrays = replace(arrays, kind="images")
    task = _scored(arrays, study)
    check_fits(model, task)
    return task


def _scored(data: StudyData, study: Study) -> Task:
    measure = (study.origin.get("spec") or study.origin).get("measure") or {}
    batch = int(measure.get("batch", 250))
    name = str(study.performance["name"])
    return make_task(data, name, batch, study.performance.get("chance"))


def _stored_subject(name: str, model: nn.Module, study: Study, folder: Path) -> Subject:
    """A network with the data that its study stored."""
    data = _stored_data(study, folder)
    calibration = CalibrationInputs(model, data.calibration_batches()) if len(data.x) else None
    return Subject(name, model, None, _scored(data, study), None, calibration)


def _stored_data(study: Study, folder: Path) -> StudyData:
    from strati.interventions.study_units import CALIBRATION_ROWS, digest_of

    raw = (folder / "data.npz").read_bytes()
    digest = study.origin.get("data", {}).get("hash")
    if digest is not None and digest_of(raw) != digest:
        raise BadInputError(folder / "data.npz", "has changed since the study; run the study again")
    data = StudyData.from_bytes(raw)
    return replace(data, x=data.x[:CALIBRATION_ROWS], y=None) if study.origin.get("spec") else data


def _reopened(study: Study, spec: Mapping[str, Any], folder: Path) -> list[InterventionEvaluator]:
    from strati.interventions.checkpoints import open_checkpoint, trained_networks
    from strati.interventions.study_spec import NetworkSpec
    from strati.interventions.study_units import state_digest, unpack
    from strati.io.in_memory import load_arrays

    if not (folder / "data.npz").is_file():
        return []
    about: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in spec["network"].items()}
    network = NetworkSpec(**about)
    layers, others = study.origin.get("layers", {}), _others(spec)
    if network.path is not None:
        if not Path(network.path).exists():
            raise BadInputError(
                network.path, "the study's network is no longer there; give the model as well"
            )
        model = open_checkpoint(network.path, network)
        first: Mapping[str, Any] = next(iter(study.origin.get("networks", {}).values()), {})
        digest = first.get("weights")
        if digest is not None and state_digest(model) != digest:
            raise BadInputError(network.path, "has changed since the study; run the study again")
        subject = _stored_subject(Path(network.path).name, model, study, folder)
        return [InterventionEvaluator(subject, layers, others)]
    data = _stored_data(study, folder)
    evaluators = []
    for path in sorted((folder / "networks").glob("*.npz")):
        source = trained_networks(network.source)
        model = source.build(network, data.shape, data.outputs, spec["data"]["context"])
        load_arrays(model, unpack(path.read_bytes()), path)
        subject = _stored_subject(path.stem, model.eval(), study, folder)
        evaluators.append(InterventionEvaluator(subject, layers, others))
    return evaluators


def _from_files(study: Study, folder: Path) -> list[InterventionEvaluator]:
    """The networks of a study that were read from files, and its data; none where one of them was in memory."""
    from strati.interventions.tasks import as_modules

    networks = study.origin.get("networks", {})
    if not (folder / "data.npz").is_file() or not all("path" in about for about in networks.values()):
        return []
    evaluators = []
    for name, about in networks.items():
        model: Any = as_modules(about["path"], about["activation"])
        model = in_single(model).eval()
        if weights_digest(model) != about["hash"]:
            raise BadInputError(about["path"], "has changed since the study; run the study again")
        subject = _stored_subject(name, model, study, folder)
        evaluators.append(InterventionEvaluator(subject, study.origin.get("layers", {}), {}))
    return evaluators


def _others(spec: Mapping[str, Any]) -> dict[str, Any]:
    tensors = {}
    for table in spec["interventions"].get("settings", ()):
        for setting in table["settings"]:
            path = next((v for k, v in setting if k in ("checkpoint", "_checkpoint")), None)
            if path is not None and str(path) not in tensors:
                tensors[str(path)] = tensors_of(path)
    return tensors
