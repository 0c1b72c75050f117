"""Several changes of one linear layer in one pass: the batch is repeated, each copy goes through its own weight.

With few rows a pass is mostly overhead, and several share it; with many (measured: from some 500 on) nothing is gained.
Not every network takes a larger batch, so the first time a kind of layer is met, one change is measured both ways;
where the two differ, or the network refuses, its layers are measured one change at a time.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from strati.interventions.targets import Change, Target, replaced_forward

if TYPE_CHECKING:
    from strati.interventions.cached_forward import Recording
    from strati.interventions.tasks import Task

_ROWS = 512
"""Rows of a layer's input that a pass may have: beyond, memory costs what larger products save."""
_MOST = 16
_COMPARED = 50_000
"""Answers of a trial that are compared, evenly spread."""
_MOST_BYTES = 200_000_000
"""Of one pass's answers."""


class Stacking:
    """How many changes of a layer may share a pass, learned once for every kind of layer of one network."""

    def __init__(self) -> None:
        self._holds: dict[str, bool] = {}
        self._most = _MOST

    def size(self, model: nn.Module, target: Target, tape: Recording) -> int:
        """Changes per pass by the size of the layer's input; one where they cannot share it."""
        key = _kind_of_place(target.name)
        if type(model.get_submodule(target.name)) is not nn.Linear or not self._holds.get(key, True):
            return 1
        if tape.input is None or tape.input.ndim < 2:
            return 1
        rows = tape.input.numel() // max(tape.input.shape[-1], 1)
        return max(1, min(self._most, _ROWS // max(rows, 1)))

    def known(self, target: Target) -> bool:
        """Whether this kind of layer was tried."""
        return _kind_of_place(target.name) in self._holds

    def learn(self, target: Target, holds: bool, answers: Tensor) -> None:
        """Keep what a trial said, and how many passes' answers memory should hold."""
        self._holds[_kind_of_place(target.name)] = holds
        size = max(answers.numel() * answers.element_size(), 1)
        self._most = min(self._most, max(1, _MOST_BYTES // size))


def stacked_outputs(
    model: nn.Module, task: Task, target: Target, changes: Sequence[Change], tape: Recording, inputs: Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    """The network's answers and the layer's outputs under each change, in one pass."""
    module: Any = model.get_submodule(target.name)
    count = len(changes)
    weights = [torch.from_numpy(c.values).to(module.weight) for c in changes]
    biases = [
        module.bias if c.bias is None or module.bias is None else torch.from_numpy(c.bias).to(module.bias)
        for c in changes
    ]
    heard: list[Tensor] = []

    def forward(x: Tensor) -> Tensor:
        parts = x.chunk(count)
        out = torch.cat(
            [functional.linear(*operands) for operands in zip(parts, weights, biases, strict=True)]
        )
        heard.append(out)
        return out

    with tape.replayed(times=count, batch=len(inputs)), replaced_forward(module, forward):
        answers = task.output(model, repeated(inputs, count, len(inputs)))
    if len(answers) != count * len(inputs) or not heard:
        raise ValueError("the network does not answer row by row")
    return list(answers.chunk(count)), list(heard[0].chunk(count))


def agrees(one: Tensor, other: Tensor) -> bool:
    """Whether answers are the same up to the rounding of larger products."""
    if one.shape != other.shape:
        return False
    step = max(1, one.numel() // _COMPARED)
    sample, other = one.reshape(-1)[::step], other.reshape(-1)[::step]
    scale = float(sample.abs().max()) if sample.numel() else 0.0
    return torch.allclose(
        sample.float(), other.float(), rtol=1e-3, atol=1e-5 * max(scale, 1e-30), equal_nan=True
    )


def repeated(value: Tensor, times: int, batch: int) -> Tensor:
    """A tensor of a batch, the batch repeated; one that does not start with the batch as it is (a copy)."""
    if times == 1 or value.ndim == 0 or value.shape[0] != batch:
        return value.clone()
    return value.repeat(times, *[1] * (value.ndim - 1))


def _kind_of_place(name: str) -> str:
    """Layers of the same place in repeated blocks share it: ``blocks.*.q_proj``; a bare number stands for itself."""
    if name.rpartition(".")[2].isdigit():
        return name
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
