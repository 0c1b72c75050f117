r"""What is recorded of a changed layer beside performance: data-free metrics, distances, and what the data say.

Data-free: every number of :meth:`strati.Spectrum.metrics`. With data: activation disagreement and Jensen-Shannon
divergence between the outputs of the intact and the changed layer (robust-and-critical-layers, section 4.3).

Scores that need the loss, with :math:`D = W' - W` the change of a layer and :math:`L` the mean loss per target:

* ``fisher_gradient`` :math:`= \frac12 \sum_{ij} F_{ij} D_{ij}^2` with :math:`F` the diagonal of the empirical Fisher
  matrix: the squared gradients of the examples' losses over the number of targets. One backward pass.
* ``aumann_shapley`` :math:`= \int_0^1 \langle \nabla_l L(W + s D), D_l \rangle\, ds`, where all layers move together by
  the same setting: the layers' shares of the joint loss change, which they add up to.
* ``higgs`` :math:`= a_l t_l^2` with :math:`t_l = \|D\|/\|W\|` and :math:`a_l` the loss that small Gaussian noise adds,
  over its squared relative size (Malinovskii et al., arXiv:2411.17525).
* ``kl_direct``: the mean divergence :math:`KL(p \| p')` between the outputs of the intact and the changed network.
* ``hessian_trace``: trace of the layer's block of the Hessian of :math:`L`, by Hutchinson's estimator (HAWQ).

All of them see a few rows of data only (:data:`ROWS`), the same for every layer.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from strati.core.errors import BadInputError, StratiError, UnsupportedError
from strati.core.rng import stream
from strati.interventions.kinds import run_length, unit_of
from strati.interventions.targets import Change, Target, as_matrices, changed, find_targets, values_of
from strati.interventions.tasks import IGNORED, Task

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.interventions.evaluator import Evaluator
    from strati.interventions.study_config import StudyConfig

Plugin = Callable[..., float]
"""``matrix -> number`` or ``(intact matrix, changed matrix) -> number``."""


ROWS = 64
"""Rows of data that scores see; fewer where rows are long texts."""
_TOKENS = 8192
_CHUNK = 8
_NOISE = 0.05
"""Relative size of the noise that the coefficients of ``higgs`` come from."""
_PAIRS = 2
_PROBES = 8
_NODES = 4

Matrices = dict[str, Tensor]


def spectral_metrics(
    matrix: NDArray[Any] | Sequence[NDArray[Any]], *, htsr: bool = False, seed: int = 0
) -> dict[str, float | None]:
    """All numbers of the spectrum of a matrix, or of several whose eigenvalues are pooled, by the names of ``scan``.

    With ``htsr`` also those of ``scan --htsr``; ``seed`` is that of their permutations.

    Examples:
        >>> found = spectral_metrics(np.diag([3.0, 4.0]))
        >>> found["frobenius_norm"], found["spectral_norm"]
        (5.0, 4.0)
    """
    from strati.spectra.spectrum import spectrum

    numbers = spectrum(matrix, htsr=htsr, seed=seed).metrics()
    return {name: value for name, value in numbers.items() if _is_number(value)}


def distances(
    intact: tuple[NDArray[Any], NDArray[Any] | None], changed: tuple[NDArray[Any], NDArray[Any] | None]
) -> dict[str, float | None]:
    """How far the weight was moved: ``||W' - W||_F``, and the same relative to ``||W||_F``.

    Examples:
        >>> distances((np.eye(2), None), (np.zeros((2, 2)), None))["relative_distance"]
        1.0
    """
    before, after = intact[0].astype(float), changed[0].astype(float)
    moved, size = float(np.linalg.norm(after - before)), float(np.linalg.norm(before))
    return {"distance": moved, "relative_distance": moved / size if size > 0 else None}


class Disagreement:
    """Activation disagreement and Jensen-Shannon divergence of two layers' outputs, added up over batches.

    Disagreement is the mean over data and neurons of ``[O > 0] != [M > 0]`` in percent; divergence the mean over
    data of ``JS(softmax(O), softmax(M))`` in nats.

    Examples:
        >>> import torch
        >>> both = Disagreement(1)
        >>> both.add(torch.tensor([[1.0, -1.0]]), torch.tensor([[[1.0, 1.0]]]))
        >>> both.result(0)["activation_disagreement"]
        50.0
    """

    def __init__(self, changes: int) -> None:
        self._differ, self._divergence = np.zeros(changes), np.zeros(changes)
        self._neurons, self._rows = np.zeros(changes), np.zeros(changes)

    def add(self, intact: Tensor, changed: Tensor) -> None:
        """A batch: the intact outputs (rows, neurons) and those of every change (changes, rows, neurons)."""
        for i, outputs in enumerate(changed):
            self.add_one(i, intact, outputs)

    def add_one(self, change: int, intact: Tensor, outputs: Tensor) -> None:
        """A batch of one change."""
        self._differ[change] += int(((intact > 0) != (outputs > 0)).sum())
        p, q = torch.softmax(intact.float(), -1), torch.softmax(outputs.float(), -1)
        both = (p + q).clamp_(min=torch.finfo(p.dtype).tiny)
        # With d = (p - q)/(p + q) the terms are p ln(1 + d) + q ln(1 - d): differences of logarithms lose the digits of
        # small divergences. At d = 1 the second is 0 ln 0; the largest float32 below 1 makes it zero.
        d = ((p - q) / both).clamp_(-1 + 2.0**-23, 1 - 2.0**-23)
        each = p * torch.log1p(d) + q * torch.log1p(-d)
        self._divergence[change] += 0.5 * float(each.sum(dtype=torch.float64))
        self._neurons[change] += intact.numel()
        self._rows[change] += intact.shape[0]

    def result(self, change: int) -> dict[str, float | None]:
        """The two numbers of one change; not defined when an output was not finite."""
        if self._rows[change] == 0:
            return {"activation_disagreement": None, "js_divergence": None}
        divergence = float(self._divergence[change] / self._rows[change])
        return {
            "activation_disagreement": 100.0 * float(self._differ[change] / self._neurons[change]),
            "js_divergence": max(0.0, divergence) if math.isfinite(divergence) else None,
        }


def as_rows(output: Tensor, kind: str) -> Tensor:
    """A layer's output as (data, neurons): pixels of a convolution are neurons, tokens are data."""
    if kind == "conv":
        return output.reshape(output.shape[0], -1)
    return output.reshape(-1, output.shape[-1])


def degeneracy_metrics(model: torch.nn.Module, x: Tensor) -> dict[str, dict[str, float | None]]:
    """What ``degeneracy`` counts on the data, by layer: its ranks and free directions.

    ``activation_rank`` is of what goes into the layer, which no change of the layer itself can alter; ``output_rank``
    is of what the next layer gets, ``jacobian_rank`` of how the network's output depends on the layer's.

    Examples:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
        >>> found = degeneracy_metrics(net, torch.eye(3))
        >>> sorted(found), found["0"]["output_rank"] == found["2"]["activation_rank"]
        (['0', '2'], True)
    """
    from strati.landscape.counts.degeneracy import degeneracy

    try:
        layers = degeneracy(model, x, exact=False).layers
    except UnsupportedError:  # networks that cannot be counted have no such columns
        return {}
    by_layer: dict[str, dict[str, float | None]] = {}
    for layer, after in zip(layers, (*layers[1:], None), strict=True):
        follows = after is not None and after.inputs == layer.outputs
        by_layer[layer.name] = {
            "activation_rank": float(layer.activation_rank),
            "output_rank": float(after.activation_rank) if after is not None and follows else None,
            "jacobian_rank": float(layer.jacobian_rank),
            "free_directions": float(layer.free),
        }
    return by_layer


def check_plugins(plugins: Mapping[str, Plugin]) -> dict[str, int]:
    """How many matrices each metric of the user's takes, one or two.

    Raises:
        BadInputError: A metric takes another number of arguments, or is not a function.
    """
    arguments = {}
    for name, function in plugins.items():
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):
            raise BadInputError(f"metric {name}", "is not a function with a readable signature") from None
        needed = [
            p
            for p in parameters
            if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        if len(needed) not in (1, 2):
            raise BadInputError(f"metric {name}", "takes one matrix, or the intact and the changed one")
        arguments[name] = len(needed)
    return arguments


def plugin_metrics(
    plugins: Mapping[str, Plugin], intact: NDArray[Any], changed: NDArray[Any]
) -> tuple[dict[str, float | None], list[str]]:
    """The user's metrics of one changed matrix; one that raises is not defined there, with a note saying why."""
    takes = check_plugins(plugins)
    numbers: dict[str, float | None] = {}
    notes = []
    for name, function in plugins.items():
        try:
            numbers[name] = float(function(changed) if takes[name] == 1 else function(intact, changed))
        except Exception as error:  # the user's function: the row keeps its other numbers
            numbers[name] = None
            notes.append(f"metric {name} raised {type(error).__name__}: {error}")
    return numbers, notes


def _is_number(entry: Any) -> bool:
    return entry is None or (isinstance(entry, int | float | np.number) and not isinstance(entry, bool))


Metrics = Mapping[str, float | None]
_LOSS = "behavioural-kl"
_CHAINS, _DRAWS = 8, 50  # errors of a few percent: layers differ by far more


def trained_metrics(evaluator: Evaluator, target: Target, config: StudyConfig) -> dict[str, float | None]:
    """Counts and learning coefficient of a trained layer, where the study asks for them and there are data."""
    counts = dict(_counts(evaluator, config).get(target.name, {}))
    return counts | (_coefficient(evaluator, target.name, config) if not target.composite else {})


def block_metrics(evaluator: Evaluator, target: Target, config: StudyConfig) -> dict[str, Metrics]:
    """The metrics of every block of a stack that a run of blocks from ``target`` on may hold, by name."""
    longest = max(
        run_length(intervention.name, dict(s))
        for intervention in config.interventions
        if unit_of(intervention.name) == "block"
        for s in intervention.settings
    )
    for name in target.members[:longest]:
        if name not in evaluator.inside:
            evaluator.inside[name] = _of_block(evaluator, name, config)
    return {name: evaluator.inside[name] for name in target.members[:longest]}


def mean_metrics(parts: Sequence[Metrics]) -> dict[str, float | None]:
    """The mean of each metric over the parts that have it; ``None`` where none has.

    Examples:
        >>> mean_metrics([{"alpha": 2.0, "mu": None}, {"alpha": 4.0, "mu": None}])
        {'alpha': 3.0, 'mu': None}
    """
    means: dict[str, float | None] = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        defined = [value for part in parts if (value := part.get(name)) is not None and np.isfinite(value)]
        means[name] = float(np.mean(defined)) if defined else None
    return means


def learning_coefficient(
    model: nn.Module, inputs: Tensor, weights: str, *, seed: int = 0, **options: Any
) -> tuple[float | None, float | None]:
    """The local learning coefficient of the network's behaviour when only some weights vary, and its standard error.

    The loss is the mean Kullback-Leibler divergence from the trained network's own answers: the trained weights are
    a minimum of it, whatever they were trained on. All layers of a network are localised alike. Not defined where the
    chains do not mix; nor where the network cannot be sampled, and then a warning says why.

    Examples:
        >>> import torch
        >>> _ = torch.manual_seed(0)
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3))
        >>> value, error = learning_coefficient(net, torch.randn(60, 2), "0", chains=4, draws=100)
        >>> 0 < value < 4.5  # below half of its nine weights
        True
    """
    from strati.landscape.llc.config import LLCConfig
    from strati.landscape.llc.llc import llc
    from strati.landscape.llc.posterior import default_gamma
    from strati.landscape.objective import FlatModel

    x = inputs if inputs.is_floating_point() else inputs.clamp(min=0)
    try:
        options.setdefault("gamma", default_gamma(FlatModel(model).theta))
        config = LLCConfig(ladder=False, seed=seed, **options)
        estimate = llc(model, _LOSS, x, layers=[weights], config=config)
    except StratiError as error:  # the study goes on without this number
        warnings.warn(f"no learning coefficient of {weights}: {error}", RuntimeWarning, stacklevel=2)
        return None, None
    return estimate.estimate, estimate.stderr


def _of_block(evaluator: Evaluator, name: str, config: StudyConfig) -> Metrics:
    layers = [t for t in find_targets(evaluator.model) if t.name.startswith(f"{name}.")]
    counts = _counts(evaluator, config)
    parts: list[dict[str, float | None]] = []
    for layer in layers:
        weight = values_of(evaluator.model, layer)[0]
        matrices = as_matrices(weight, layer.kind)
        spectral = spectral_metrics(matrices, htsr=config.htsr, seed=config.seed) if config.spectral else {}
        parts.append(spectral | dict(counts.get(layer.name, {})))
    return mean_metrics(parts) | _coefficient(evaluator, f"{name}.*", config)


def _counts(evaluator: Evaluator, config: StudyConfig) -> Mapping[str, Metrics]:
    rows = evaluator.score_rows(config.samples) if config.degeneracy else None
    if rows is None:
        return {}
    if evaluator.counts is None:
        evaluator.counts = degeneracy_metrics(evaluator.model, rows)
    return evaluator.counts


def _coefficient(evaluator: Evaluator, weights: str, config: StudyConfig) -> dict[str, float | None]:
    inputs = evaluator.score_rows(config.samples) if config.learning_coefficient else None
    if inputs is None:
        return {}
    estimate, error = learning_coefficient(
        evaluator.model, inputs, weights, seed=config.seed, chains=_CHAINS, draws=_DRAWS
    )
    return {"learning_coefficient": estimate, "learning_coefficient_stderr": error}


class NetworkScores:
    """Scores of the changes of one network's layers; what belongs to the network is computed once.

    Examples:
        >>> from strati.interventions.tasks import Task
        >>> net = nn.Sequential(nn.Linear(1, 2, bias=False))
        >>> nn.init.zeros_(net[0].weight).shape
        torch.Size([2, 1])
        >>> task = Task("loss", False, None, ((torch.ones(4, 1), torch.tensor([0, 1, 0, 1])),))
        >>> NetworkScores(net, task).fisher["0"].tolist()  # the gradients are +-1/2
        [[0.25], [0.25]]
    """

    def __init__(self, model: nn.Module, task: Task, *, name: str = "", seed: int = 0) -> None:
        self.model, self.name, self.seed = model, name, seed
        self.task = replace(task, performance="loss", higher_is_better=False)
        self.chunks = tuple(_first_rows(task))
        self.count = sum(self.task.count(y) for _, y in self.chunks)
        self.attributions: dict[tuple[Any, ...], dict[str, float]] = {}

    @cached_property
    def weights(self) -> Matrices:
        """The weight of every layer that gradients can be taken of."""
        modules = {t.name: self.model.get_submodule(t.name).weight for t in find_targets(self.model)}
        return {name: w for name, w in modules.items() if isinstance(w, Tensor) and not w.is_inference()}

    @cached_property
    def fisher(self) -> Matrices:
        """The diagonal of the empirical Fisher matrix, per target, by layer; an example is a row, image or text."""
        sums = {name: torch.zeros_like(w, dtype=torch.float32) for name, w in self.weights.items()}
        for inputs, targets in self.chunks:
            for row in range(len(inputs)):
                for name, gradient in self._gradients(inputs[row : row + 1], targets[row : row + 1]).items():
                    sums[name] += gradient.float() ** 2
        return {name: total / self.count for name, total in sums.items()}

    @cached_property
    def traces(self) -> dict[str, tuple[float, float]]:
        """Trace of each layer's block of the Hessian of the mean loss, and its standard error over the probes."""
        rng = stream(self.seed, "hessian-trace", self.name)
        probes = {name: np.zeros(_PROBES) for name in self.weights}
        for k in range(_PROBES):
            signs = {
                name: torch.from_numpy(rng.choice([-1.0, 1.0], tuple(w.shape))).to(w)
                for name, w in self.weights.items()
            }
            for inputs, targets in self.chunks:
                with sdpa_kernel(SDPBackend.MATH):  # the only one with second derivatives
                    for name, product in self._hessian_products(inputs, targets, signs).items():
                        probes[name][k] += float((product * signs[name]).sum()) / self.count
        return {n: (float(x.mean()), float(x.std(ddof=1) / np.sqrt(_PROBES))) for n, x in probes.items()}

    def loss(self) -> float:
        """The mean loss per target of the network as it is now."""
        with torch.inference_mode():
            total = sum(self.task.add_up(self.task.output(self.model, x), y) for x, y in self.chunks)
        return total / self.count

    def fisher_gradient(self, layer: str, step: NDArray[Any]) -> float | None:
        """Half the Fisher-weighted squared step, in nats per target."""
        diagonal = self.fisher.get(layer)
        return None if diagonal is None else 0.5 * float((diagonal.cpu().numpy() * step**2).sum())

    def noise_coefficient(self, target: Target, weight: NDArray[Any]) -> float:
        """The loss that Gaussian noise adds over its squared relative size; its negative cancels the slope."""
        rng = stream(self.seed, "higgs", self.name, target.name)
        intact, losses = self.loss(), []
        for _ in range(_PAIRS):
            noise = rng.standard_normal(weight.shape)
            noise *= _NOISE * np.linalg.norm(weight) / np.linalg.norm(noise)
            for sign in (1.0, -1.0):
                moved = Change("noise", 0, (weight + sign * noise).astype(np.float32), None, "")
                with changed(self.model, target, moved):
                    losses.append(self.loss())
        return (float(np.mean(losses)) - intact) / _NOISE**2

    def divergences(self, target: Target, changes: Sequence[Change]) -> list[float]:
        """Mean divergence from the intact network's outputs to those of each changed one, in nats per target."""
        sums = np.zeros(len(changes))
        with torch.inference_mode():
            for inputs, targets in self.chunks:
                counted = (targets != IGNORED).reshape(-1)
                intact = self._log_probabilities(inputs)[counted]
                for i, change in enumerate(changes):
                    with changed(self.model, target, change):
                        moved = self._log_probabilities(inputs)[counted]
                    sums[i] += float(functional.kl_div(moved, intact, reduction="sum", log_target=True))
        return [float(total) / self.count for total in sums]

    def attribute(self, steps: Mapping[str, NDArray[Any]]) -> dict[str, float]:
        """Each layer's share of the loss change when all layers take their steps together (Aumann-Shapley)."""
        nodes, node_weights = np.polynomial.legendre.leggauss(_NODES)
        moves = {n: torch.from_numpy(np.asarray(d)).to(self.weights[n]) for n, d in steps.items()}
        shares = dict.fromkeys(moves, 0.0)
        for node, node_weight in zip(0.5 * (nodes + 1), 0.5 * node_weights, strict=True):
            with _moved(self.weights, moves, float(node)):
                for inputs, targets in self.chunks:
                    gradients = self._gradients(inputs, targets, tuple(moves))
                    for name, gradient in gradients.items():
                        shares[name] += (
                            float(node_weight) * float((gradient * moves[name]).sum()) / self.count
                        )
        return shares

    def _log_probabilities(self, inputs: Tensor) -> Tensor:
        logits = self.task.output(self.model, inputs)
        return torch.log_softmax(logits.reshape(-1, logits.shape[-1]).float(), -1)

    def _gradients(self, inputs: Tensor, targets: Tensor, names: Sequence[str] = ()) -> Matrices:
        """Gradients of the summed loss of some rows; zero where a layer was not used."""
        weights = {name: self.weights[name] for name in names or self.weights}
        with _differentiable(self.model, weights):
            loss = self.task.each(self.task.output(self.model, inputs), targets).sum()
            gradients = torch.autograd.grad(loss, list(weights.values()), materialize_grads=True)
        return dict(zip(weights, gradients, strict=True))

    def _hessian_products(self, inputs: Tensor, targets: Tensor, vectors: Matrices) -> Matrices:
        weights = list(self.weights.values())
        with _differentiable(self.model, self.weights):
            loss = self.task.each(self.task.output(self.model, inputs), targets).sum()
            gradients = torch.autograd.grad(loss, weights, create_graph=True, materialize_grads=True)
            slope = sum((g * vectors[n]).sum() for g, n in zip(gradients, self.weights, strict=True))
            products = torch.autograd.grad(slope, weights, materialize_grads=True)  # type: ignore[arg-type]
        return dict(zip(self.weights, products, strict=True))


def score_changes(
    scores: NetworkScores,
    target: Target,
    weight: NDArray[Any],
    changes: Sequence[Change],
    names: Sequence[str],
    steps_of: Callable[[Change], Mapping[str, NDArray[Any]]],
) -> list[dict[str, float | None]]:
    """The wanted scores of every change of one layer.

    Args:
        scores: The network's scores.
        target: The layer.
        weight: Its intact weight.
        changes: Its changes.
        names: Names of the scores to compute.
        steps_of: Gives the steps of all layers under the setting of a change, for ``aumann_shapley``.
    """
    rows: list[dict[str, float | None]] = [{} for _ in changes]
    if not changes:
        return rows
    if "kl_direct" in names:
        for row, divergence in zip(rows, scores.divergences(target, changes), strict=True):
            row["kl_direct"] = divergence
    coefficient = scores.noise_coefficient(target, weight) if "higgs" in names else None
    size = float((weight.astype(float) ** 2).sum())
    for row, change in zip(rows, changes, strict=True):
        step = change.values - weight
        if "fisher_gradient" in names:
            row["fisher_gradient"] = scores.fisher_gradient(target.name, step)
        if coefficient is not None:
            row["higgs"] = coefficient * float((step.astype(float) ** 2).sum()) / size if size else None
        if "hessian_trace" in names:
            trace, stderr = scores.traces.get(target.name, (None, None))
            row |= {"hessian_trace": trace, "hessian_trace_stderr": stderr}
        if "aumann_shapley" in names:
            setting = (change.intervention, change.setting, change.draw)
            if setting not in scores.attributions:
                scores.attributions[setting] = scores.attribute(steps_of(change))
            row["aumann_shapley"] = scores.attributions[setting].get(target.name)
    return rows


def _first_rows(task: Task) -> Iterator[tuple[Tensor, Tensor]]:
    """The first rows of the data in small chunks, whose outputs and graphs fit into memory."""
    inputs, targets = task.batches[0]
    rows = max(_CHUNK, min(ROWS, _TOKENS // max(1, targets[0].numel())))
    for start in range(0, min(rows, len(inputs)), _CHUNK):
        part = slice(start, min(start + _CHUNK, rows))
        yield inputs[part], targets[part]


@contextmanager
def _differentiable(model: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Only these weights take gradients; afterwards all parameters are as they were."""
    flags = [(p, p.requires_grad) for p in model.parameters()]
    with ExitStack() as stack:
        for parameter, flag in flags:
            if not parameter.is_inference():
                stack.callback(parameter.requires_grad_, flag)
                parameter.requires_grad_(False)
        for weight in weights.values():
            weight.requires_grad_(True)
        stack.enter_context(torch.enable_grad())
        yield


@contextmanager
def _moved(weights: Mapping[str, Tensor], moves: Mapping[str, Tensor], share: float) -> Iterator[None]:
    """Weights moved by a share of their steps; afterwards exactly as they were."""
    intact = {name: weights[name].detach().clone() for name in moves}
    try:
        with torch.no_grad():
            for name, move in moves.items():
                weights[name].add_(share * move)
        yield
    finally:
        with torch.no_grad():
            for name, values in intact.items():
                weights[name].copy_(values)
