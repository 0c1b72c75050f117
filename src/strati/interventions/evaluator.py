"""Evaluates a network, as it is or with interventions on some of its layers; the weights are restored afterwards.

``study`` measures one layer at a time, ``plan`` and ``apply`` whole combinations; all of them score a network here. The
context managers change networks through it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from strati.core.errors import BadInputError, UnsupportedError
from strati.core.rng import stream
from strati.interventions.cached_forward import ActivationCache, whole_scores
from strati.interventions.edits import LayerEdits, Others, make_change, source_key, tensors_of
from strati.interventions.experts import expert_change, score_experts
from strati.interventions.input_covariance import CalibrationInputs
from strati.interventions.kinds import Point, make, read_setting
from strati.interventions.metrics import Disagreement
from strati.interventions.study_config import DATA
from strati.interventions.study_spec import trained_networks
from strati.interventions.targets import (
    Change,
    Target,
    changed,
    find_targets,
    to_float32,
    values_of,
    weights_digest,
)
from strati.interventions.tasks import (
    Measurement,
    ScoreAccumulator,
    StudyData,
    Task,
    as_modules,
    check_fits,
    digest_of,
    make_task,
    measured,
    scores_of,
    study_data,
)
from strati.jobs.store import Run
from strati.landscape.mlp.sequential import Chain, as_chain

if TYPE_CHECKING:
    from strati.interventions.expert_removal import ExpertScores
    from strati.interventions.metrics import NetworkScores
    from strati.interventions.study import Study

Evaluate = Callable[[nn.Module], float]
KEEP = "keep"
"""The choice that leaves a layer as it is."""
_MOST_BYTES = 600_000_000
"""Singular directions kept between measurements; beyond, they are computed again."""


class ChainProbe:
    """A feed-forward network whose intact activations on the test set are kept, layer by layer."""

    def __init__(self, chain: Chain, task: Task) -> None:
        self.chain, self.task = chain, task
        self._inputs: list[list[Tensor]] = []
        self._buffers: dict[tuple[int, int, int], Tensor] = {}
        tally = ScoreAccumulator(task)
        for x, targets in task.batches:
            with torch.inference_mode():
                activations, _ = chain.forward(x)
                tally.add(activations[-1], targets)
            self._inputs.append(activations[:-1])
        self.scores = tally.result()
        self.performance = self.scores.performance

    @property
    def names(self) -> frozenset[str]:
        """The layers it can measure; a checkpoint's own name may not be the module's."""
        return frozenset(stage.name for stage in self.chain.stages)

    @torch.inference_mode()
    def measure(
        self, target: Target, changes: Sequence[Change], *, activations: bool = True
    ) -> list[Measurement]:
        """Measure the changes of one layer, all in one pass over the test set."""
        stages = self.chain.stages
        place = next(i for i, stage in enumerate(stages) if stage.name == target.name)
        weights = torch.stack([torch.from_numpy(c.values) for c in changes])
        biases = [stages[place].bias if c.bias is None else torch.from_numpy(c.bias) for c in changes]
        bias = None if biases[0] is None else torch.stack(biases)  # type: ignore[arg-type]
        both = Disagreement(len(changes))
        tallies = [ScoreAccumulator(self.task) for _ in changes]
        for (_, targets), inputs in zip(self.task.batches, self._inputs, strict=True):
            outputs = stacked_linear(inputs[place], weights, bias)
            if activations:
                both.add(stages[place].preactivations(inputs[place]), outputs)
            logits = self._rest(outputs, place)
            for tally, answer in zip(tallies, logits, strict=True):
                tally.add(answer, targets)
        return measured(tallies, both if activations else None)

    def _rest(self, outputs: Tensor, place: int) -> Tensor:
        """From the changed layer's outputs (changes, rows, neurons) to the logits, as single matrix products."""
        changes, rows, _ = outputs.shape
        stages = self.chain.stages
        f = _activate(stages[place].activation, outputs.view(changes * rows, -1))
        for i, stage in enumerate(stages[place + 1 :]):
            out = self._scratch(f.shape[0], stage.outputs, i % 2, f)
            if stage.bias is None:
                torch.mm(f, stage.weight.T, out=out)
            else:
                torch.addmm(stage.bias, f, stage.weight.T, out=out)
            f = _activate(stage.activation, out)
        return f.view(changes, rows, -1)

    def _scratch(self, rows: int, width: int, turn: int, like: Tensor) -> Tensor:
        """Memory that is used again: fresh pages cost as much as the activation function."""
        key = (rows, width, turn)
        if key not in self._buffers:
            self._buffers[key] = like.new_empty(rows, width)
        return self._buffers[key]


def stacked_linear(inputs: Tensor, weights: Tensor, bias: Tensor | None) -> Tensor:
    """``inputs @ W_k^T + b_k`` for every ``k``: (rows, in) and (k, out, in) to (k, rows, out).

    Examples:
        >>> stacked_linear(torch.ones(2, 3), torch.ones(4, 5, 3), torch.zeros(4, 5)).shape
        torch.Size([4, 2, 5])
    """
    changes, outputs, _ = weights.shape
    products = inputs.new_empty(changes, inputs.shape[0], outputs)
    for k in range(changes):
        if bias is None:
            torch.mm(inputs, weights[k].T, out=products[k])
        else:
            torch.addmm(bias[k], inputs, weights[k].T, out=products[k])
    return products


@dataclass
class Evaluator:
    """A network, how its performance is measured, and everything needed to change its layers.

    Attributes:
        name: The network's name in rows.
        model: The module; changes are undone after each measurement.
        initial: Its initial tensors, where they are known.
        task: Data and a score; or else
        evaluate: a function of the user's.
        calibration: The input covariances of its layers, for data-aware edits.
        score_task: The loss on calibration rows, for sensitivity scores; the measured data where there are none.
        others: Tensors of other networks, for ``swap``, ``adapt`` and ``damp-intruders``.
        composites: Blocks and layers of experts, which are found by running the network.
    """

    name: str
    model: nn.Module
    initial: Mapping[str, NDArray[Any]] | None = None
    task: Task | None = None
    evaluate: Evaluate | None = None
    calibration: CalibrationInputs | None = None
    score_task: Task | None = None
    others: Others = field(default_factory=dict)
    composites: Mapping[str, Target] = field(default_factory=dict)
    counts: Mapping[str, Mapping[str, float | None]] | None = field(default=None, repr=False)
    inside: dict[str, Mapping[str, float | None]] = field(default_factory=dict, repr=False)
    sensitivity: NetworkScores | None = field(default=None, repr=False)
    _experts: Mapping[str, ExpertScores] | None = field(default=None, repr=False)
    _probe: ChainProbe | None = field(default=None, repr=False)
    _plain: bool = field(default=False, repr=False)
    _intact: Measurement | None = field(default=None, repr=False)
    _edits: dict[str, LayerEdits] = field(default_factory=dict, repr=False)
    _bytes: int = field(default=0, repr=False)

    @cached_property
    def score_inputs(self) -> CalibrationInputs | None:
        """The rows that scores are computed from: calibration rows, or the measured ones where there are none."""
        if self.calibration is not None or self.task is None:
            return self.calibration
        return CalibrationInputs(self.model, tuple(inputs for inputs, _ in self.task.batches))

    @cached_property
    def tapes(self) -> ActivationCache:
        """The recorded activations of the layer that was measured last."""
        return ActivationCache()

    def score_rows(self, count: int) -> torch.Tensor | None:
        """The first of these rows in one tensor, for counts and learning coefficients."""
        return None if self.score_inputs is None else torch.cat(list(self.score_inputs.batches))[:count]

    def probe(self) -> ChainProbe | None:
        """The kept activations of a feed-forward network; ``None`` for any other."""
        if self._probe is None and not self._plain and self.task is not None:
            try:
                self._probe = ChainProbe(as_chain(self.model), self.task)
            except UnsupportedError:
                self._plain = True
        return self._probe

    def intact(self) -> Measurement:
        """The performance of the network as it is, computed once."""
        if self._intact is None:
            probe = self.probe()
            scores = None if probe is None else probe.scores
            self._intact = self.now() if scores is None else Measurement(scores.performance, {}, scores)
        return self._intact

    def now(self) -> Measurement:
        """The performance of the network as it is at this moment.

        Raises:
            BadInputError: The user's function returned neither a number nor one per example.
        """
        if self.task is not None:
            scores = whole_scores(self.model, self.task)
            return Measurement(scores.performance, {}, scores)
        assert self.evaluate is not None
        with torch.no_grad():
            evaluation = self.evaluate(self.model)
        values = np.asarray(
            evaluation.detach().cpu() if hasattr(evaluation, "detach") else evaluation, dtype=float
        )
        if values.ndim == 0:
            return Measurement(float(values), {})
        if values.ndim != 1 or values.size == 0:
            raise BadInputError(
                "evaluate", f"returned shape {values.shape}; return a number, or one per example"
            )
        scores = scores_of(values)
        return Measurement(scores.performance, {}, scores)

    def measure(self, action: str, choices: Mapping[str, str]) -> Measurement:
        """The performance with a setting for every layer; ``keep`` leaves one as it is.

        Raises:
            BadInputError: A layer that the network does not have, or a setting that cannot be applied.
        """
        with self.changed(action, choices):
            return self.now()

    @contextmanager
    def changed(
        self, action: str, choices: Mapping[str, str | Mapping[str, Any]], seed: int = 0
    ) -> Iterator[None]:
        """The network with a setting for every layer; afterwards its weights are back."""
        with ExitStack() as stack:
            for layer, choice in choices.items():
                if choice != KEEP:
                    change = self.change(action, layer, choice, seed)
                    stack.enter_context(changed(self.model, self.target(layer), change))
            yield

    def target(self, layer: str) -> Target:
        """A layer, block or layer of experts by name.

        Raises:
            BadInputError: There is none of that name.
        """
        if layer not in self._targets:
            raise BadInputError(layer, "the network has no such layer: the plan is for another network")
        return self._targets[layer]

    @cached_property
    def _targets(self) -> dict[str, Target]:
        return {target.name: target for target in find_targets(self.model)} | dict(self.composites)

    def change(self, action: str, layer: str, choice: str | Mapping[str, Any], seed: int = 0) -> Change:
        """The change that a choice makes to a layer; ``seed`` is of interventions with chance in them."""
        target = self.target(layer)
        setting = {} if action == "drop" else read_setting(choice) if isinstance(choice, str) else choice
        source = "the study's" if action in ("swap", "adapt", "damp-intruders") else None
        intervention = make(action, setting, source=source)
        point = Point(intervention.name, intervention.settings[0])
        if target.kind == "experts":
            return self.expert_change(target, point)
        tensors = next(iter(self.others.values()), None)
        others = {} if tensors is None else {source_key(intervention, point.setting): tensors}
        rng = stream(seed, action, layer)
        return make_change(self.edits(target), intervention, point, rng, others)

    def expert_change(self, target: Target, point: Point) -> Change:
        """The change of a layer of experts; the scores that it goes by are those of the intact network.

        Raises:
            BadInputError: There are no data, or too few experts would be left.
        """
        if self.score_inputs is None:
            raise BadInputError(point.intervention, "needs data: which experts are used is seen on them")
        if self._experts is None:
            self._experts = score_experts(self.model, self.score_inputs.batches)
        change = expert_change(self.model, target, point, self._experts)
        return replace(change, scores=self._experts[target.name])

    def energy_rank(self, layer: str, choice: str) -> int:
        """The rank of a layer under a setting such as ``energy=0.9``."""
        return self.edits(self.target(layer)).truncation(read_setting(choice))[1]

    def digest(self) -> str:
        """A short hash of the network's weights."""
        return weights_digest(self.model)

    def edits(self, target: Target) -> LayerEdits:
        """A layer's edits, its singular directions kept while memory allows."""
        if target.name in self._edits:
            return self._edits[target.name]
        values = (np.empty((0, 0)), None) if target.composite else values_of(self.model, target)
        edits = LayerEdits(target, values, None if self.calibration is None else self.calibration.of)
        size = 0
        if not target.composite:
            side = min(edits.matrix.shape)
            size = 8 * side * side + 8 * edits.matrix.size
            size += 0 if self.calibration is None else 8 * edits.matrix.shape[1] ** 2
        if self._bytes + size <= _MOST_BYTES:
            self._edits[target.name] = edits
            self._bytes += size
        return edits

    def forget(self) -> None:
        """Release recorded activations and edits; the network may still be used by plans."""
        self.__dict__.pop("tapes", None)
        self._probe, self.sensitivity = None, None
        self._edits, self._bytes = {}, 0

    def run_once(self) -> None:
        """Run the network once: on one input of the task, or as the user's function does."""
        if self.task is not None:
            self.task.output(self.model, self.task.batches[0][0][:1])
        else:
            assert self.evaluate is not None
            self.evaluate(self.model)


def open_evaluators(study: Study, *, model: Any = None, data: Any = None) -> list[Evaluator]:
    """Evaluators for the networks of a study: those in memory, given, or where the study recorded them.

    Returns an empty list where they cannot be had, such as a study of modules read from its folder.

    Raises:
        BadInputError: A network or data file has changed since the study.
    """
    if model is not None:
        return _of_model(study, model, data)
    if study.body is not None:
        return list(study.body.evaluators.values())
    networks = study.origin.networks
    if not _has_data(study):
        return []
    if study.origin.training is not None:
        folder = Path(str(study.store)).parent
        trained, _ = trained_networks(study.origin.training, str(folder)).train(folder, Run())
        return [_with_stored_data(name, module, study) for name, module in trained.items()]
    evaluators = []
    for name, origin in networks.items():
        if origin.path is None:
            return []
        if not Path(origin.path).exists():
            raise BadInputError(origin.path, "the study's network is no longer there; give the model as well")
        network = to_float32(as_modules(origin.path, origin.activation)["model"]).eval()
        if weights_digest(network) != origin.hash:
            raise BadInputError(origin.path, "has changed since the study; run the study again")
        evaluators.append(_with_stored_data(name, network, study))
    return evaluators


def as_task(data: Any, study: Study, model: nn.Module) -> Task:
    """Data given by the user for a network, scored as the study did.

    Raises:
        BadInputError: They are no data that a study takes.
    """
    if isinstance(data, Task):
        return data
    task = _scored(study_data(data, model, study.origin.context), study)
    check_fits(model, task)
    return task


def _of_model(study: Study, model: Any, data: Any) -> list[Evaluator]:
    """An evaluator for the network given, with the data given or the study's.

    Raises:
        BadInputError: It is another network than those the study measured.
    """
    module = as_modules(model)["model"]
    hashes = {origin.hash for origin in study.origin.networks.values()}
    if hashes and weights_digest(module) not in hashes:
        what = "model" if isinstance(model, nn.Module) else model
        raise BadInputError(what, "is another network than the study measured (its weights differ)")
    single, body = to_float32(module).eval(), study.body
    if data is not None:
        return [_composed(Evaluator("model", single, task=as_task(data, study, single)), study)]
    if body is not None:
        first = next(iter(body.evaluators.values()))
        network = module.eval() if first.task is None else single
        calibration = first.calibration and CalibrationInputs(network, first.calibration.batches)
        evaluator = Evaluator(first.name, network, None, first.task, first.evaluate, calibration)
        evaluator.others = first.others
        return [_composed(evaluator, study)]
    return [_with_stored_data("model", single, study)] if _has_data(study) else []


def _composed(evaluator: Evaluator, study: Study) -> Evaluator:
    evaluator.composites = {name: t for name, t in study.origin.layers.items() if t.composite}
    return evaluator


def _has_data(study: Study) -> bool:
    return study.store is not None and (Path(study.store).parent / DATA).is_file()


def _with_stored_data(name: str, model: nn.Module, study: Study) -> Evaluator:
    """A network with the data that its study stored.

    Raises:
        BadInputError: The data have changed.
    """
    path = Path(str(study.store)).parent / DATA
    raw = path.read_bytes()
    if study.origin.data.hash not in (None, digest_of(raw)):
        raise BadInputError(path, "has changed since the study; run the study again")
    data = StudyData.from_bytes(raw)
    calibration = CalibrationInputs(model, data.calibration_batches()) if len(data.x) else None
    others = {path: tensors_of(path) for path in study.origin.others}
    task = _scored(data, study)
    return _composed(Evaluator(name, model, task=task, calibration=calibration, others=others), study)


def _scored(data: StudyData, study: Study) -> Task:
    name, chance = str(study.performance["name"]), study.performance.get("chance")
    return make_task(data, name, study.origin.batch, chance)


def _activate(activation: Any, p: Tensor) -> Tensor:
    """An activation, in place where that saves a pass over memory."""
    return p.relu_() if activation.name == "relu" else activation(p)
