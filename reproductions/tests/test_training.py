"""Networks trained together: the step that is written out is that of automatic derivatives."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from strati.interventions.study_spec import read_spec
from strati_reproductions.trained.training import plain_step, stacked_loss


def stack(k: int, sizes: list[int]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    pairs = list(pairwise(sizes))
    weights = [torch.randn(k, a, b, generator=generator, dtype=torch.float64) / a**0.5 for a, b in pairs]
    return weights, [torch.randn(k, 1, b, generator=generator, dtype=torch.float64) for b in sizes[1:]]


@pytest.mark.parametrize("sizes", [[5, 4], [7, 6, 5, 4]])
def test_the_plain_step_is_gradient_descent(sizes: list[int]) -> None:
    generator = torch.Generator().manual_seed(1)
    weights, biases = stack(3, sizes)
    x = torch.randn(3, 8, sizes[0], generator=generator, dtype=torch.float64)
    y = torch.randint(0, sizes[-1], (3, 8), generator=generator)
    tensors = [t.clone().requires_grad_() for t in (*weights, *biases)]
    stacked_loss(tensors[: len(weights)], tensors[len(weights) :], nn.ReLU(), x, y).backward()
    plain_step(weights, biases, x, y, 0.1)
    for moved, start in zip((*weights, *biases), tensors, strict=True):
        assert start.grad is not None
        torch.testing.assert_close(moved, start.detach() - 0.1 * start.grad)


def test_the_papers_networks_are_trained_by_plain_gradients() -> None:
    spec = read_spec("fcn-mnist").model
    train = spec.training
    assert (train.optimiser, train.rate, train.momentum, train.batch, train.epochs) == (
        "sgd",
        0.01,
        0.0,
        32,
        5,
    )
    assert (spec.network.count, spec.source.mean, spec.source.std) == (100, (0.1307,), (0.3081,))
    assert read_spec("fcn-mnist-adam").model.training.optimiser == "adam"
