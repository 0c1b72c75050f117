"""Training strati's own networks: fully connected ones of a batch together, the others one at a time.

Stacked, the matrices of ``k`` networks are one tensor and a step of all of them is a few batched products. Each
network has its own initial values and its own order of the data, each from its own random stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from strati.core.errors import BadInputError
from strati.core.rng import stream
from strati.interventions.tasks import IGNORED, StudyData
from strati_reproductions.trained.networks import MLP, build, initialise

if TYPE_CHECKING:
    from strati_reproductions.trained.spec import TrainingSpec, TrainSpec

Arrays = dict[str, NDArray[Any]]
AfterEpoch = Callable[[int, list[Arrays]], None]
"""Called with the number of epochs done and the tensors of every network."""


def train(
    spec: TrainingSpec, data: StudyData, numbers: Sequence[int], *, after_epoch: AfterEpoch | None = None
) -> list[Arrays]:
    """Train networks and return the trained tensors of each by name (initial ones: :func:`~networks.initialise`).

    Args:
        spec: The study: architecture, training, seed.
        data: The training data.
        numbers: Which of the study's networks.
        after_epoch: Called after every epoch; fully connected networks only.

    Raises:
        BadInputError: The data do not suit the network, or training diverged.
    """
    models = [build(spec.network, data.shape, data.outputs, spec.source.context) for _ in numbers]
    for model, number in zip(models, numbers, strict=True):
        initialise(model, spec.seed, number)
    if data.y is None and data.kind != "tokens":
        raise BadInputError("data", "have no labels y to train on")
    orders = [stream(spec.seed, "order", number) for number in numbers]
    if isinstance(models[0], MLP):
        _train_stacked(models, spec, data, orders, after_epoch)  # type: ignore[arg-type]
    else:
        for model, order in zip(models, orders, strict=True):
            _train_one(model, spec, data, order)
    trained = [_arrays(model) for model in models]
    for number, arrays in zip(numbers, trained, strict=True):
        if not all(np.isfinite(a).all() for a in arrays.values()):
            raise BadInputError(f"network {number}", "training diverged; lower train.rate")
    return trained


def _train_stacked(
    models: list[MLP],
    spec: TrainingSpec,
    data: StudyData,
    orders: list[np.random.Generator],
    after_epoch: AfterEpoch | None = None,
) -> None:
    linears = [[m for m in model if isinstance(m, nn.Linear)] for model in models]
    activation = next((m for m in models[0] if not isinstance(m, nn.Linear | nn.Flatten)), nn.Identity())
    weights, biases = [], []
    for layer in zip(*linears, strict=True):
        # (k, in, out): the products of a step then need no transposed copies
        weights.append(torch.stack([m.weight.detach().T for m in layer]).contiguous().requires_grad_())
        biases.append(torch.stack([m.bias.detach() for m in layer])[:, None, :].contiguous().requires_grad_())
    x = data.inputs(data.x).flatten(1)
    y = torch.from_numpy(np.asarray(data.y).astype(np.int64))
    step = _stacked_step(weights, biases, activation, spec.training)
    for epoch in range(1, spec.training.epochs + 1):
        order = torch.from_numpy(np.stack([rng.permutation(len(x)) for rng in orders]))
        for start in range(0, len(x), spec.training.batch):
            rows = order[:, start : start + spec.training.batch]
            step(x[rows], y[rows])
        if after_epoch is not None:
            _unstack(linears, weights, biases)
            after_epoch(epoch, [_arrays(model) for model in models])
    _unstack(linears, weights, biases)


@torch.no_grad()
def _unstack(linears: list[list[nn.Linear]], weights: list[Tensor], biases: list[Tensor]) -> None:
    """Copy the stacked tensors into the layers of each network."""
    for i, layer in enumerate(zip(*linears, strict=True)):
        for k, module in enumerate(layer):
            module.weight.copy_(weights[i][k].T)
            module.bias.copy_(biases[i][k, 0])


def _stacked_step(
    weights: list[Tensor], biases: list[Tensor], activation: nn.Module, train: TrainSpec
) -> Callable[[Tensor, Tensor], None]:
    """One step of training on a batch (k, rows, inputs) and its labels."""
    plain = train.optimiser == "sgd" and train.momentum == 0 and train.weight_decay == 0
    if plain and type(activation) is nn.ReLU:
        return lambda x, y: plain_step(weights, biases, x, y, train.rate)
    optimiser = _optimiser([*weights, *biases], train)

    def step(x: Tensor, y: Tensor) -> None:
        loss = stacked_loss(weights, biases, activation, x, y)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()

    return step


@torch.no_grad()
def plain_step(weights: list[Tensor], biases: list[Tensor], x: Tensor, y: Tensor, rate: float) -> None:
    """A step of plain gradient descent on :func:`stacked_loss` of ReLU networks, in half the time.

    Small batches leave a step bound by memory: the gradient of a weight matrix is added to it as it is formed, by the
    product itself, and never stored.
    """
    values = [x]
    for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        value = torch.baddbmm(bias, values[-1], weight)
        values.append(value.relu_() if i < len(weights) - 1 else value)
    slope = torch.softmax(values[-1], dim=-1)
    slope.scatter_add_(2, y[..., None], -torch.ones_like(slope[..., :1]))
    slope /= x.shape[1]
    for i in range(len(weights) - 1, -1, -1):
        below = torch.bmm(slope, weights[i].transpose(1, 2)).mul_(values[i] > 0) if i else slope
        weights[i].baddbmm_(values[i].transpose(1, 2), slope, alpha=-rate)
        biases[i].sub_(slope.sum(dim=1, keepdim=True), alpha=rate)
        slope = below


def stacked_loss(
    weights: list[Tensor], biases: list[Tensor], activation: nn.Module, x: Tensor, y: Tensor
) -> Tensor:
    """Summed over ``k`` networks, the mean cross-entropy of each on its own batch (k, rows, inputs)."""
    f = x
    for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        f = torch.baddbmm(bias, f, weight)
        if i < len(weights) - 1:
            f = activation(f)
    rows = x.shape[1]
    return functional.cross_entropy(f.flatten(0, 1), y.flatten(), reduction="sum") / rows


def _train_one(model: nn.Module, spec: TrainingSpec, data: StudyData, rng: np.random.Generator) -> None:
    model.train()
    optimiser = _optimiser(list(model.parameters()), spec.training)
    for _ in range(spec.training.epochs):
        order = rng.permutation(len(data.x))
        for start in range(0, len(order), spec.training.batch):
            rows = order[start : start + spec.training.batch]
            x = data.inputs(data.x[rows])
            if data.y is None:
                logits = model(x[:, :-1])
                loss = functional.cross_entropy(
                    logits.flatten(0, 1), x[:, 1:].flatten(), ignore_index=IGNORED
                )
            else:
                loss = functional.cross_entropy(model(x), torch.from_numpy(data.y[rows].astype(np.int64)))
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    model.eval()


def _optimiser(parameters: list[Any], train: TrainSpec) -> torch.optim.Optimizer:
    if train.optimiser == "sgd":
        return torch.optim.SGD(
            parameters, lr=train.rate, momentum=train.momentum, weight_decay=train.weight_decay, fused=True
        )
    return torch.optim.Adam(parameters, lr=train.rate, weight_decay=train.weight_decay, fused=True)


def _arrays(model: nn.Module) -> Arrays:
    return {name: value.detach().numpy().copy() for name, value in model.state_dict().items()}
