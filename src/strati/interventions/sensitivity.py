r"""Sensitivity scores that need the loss: gradients, small noise, divergence of outputs.

With :math:`D = W' - W` the change of a layer and :math:`L` the mean loss per target:

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

from strati.core.rng import stream
from strati.interventions.targets import Change, Target, changed, find_targets
from strati.interventions.tasks import IGNORED, Task

if TYPE_CHECKING:
    from numpy.typing import NDArray

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
