"""Moves with a quadratic block integrated out, and trajectories that follow a Gaussian exactly."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from strati.landscape.llc.config import Sampler
from strati.landscape.llc.gibbs import CollapsedMoves, Conditional
from strati.landscape.llc.hmc import Adaptation, HMCKernel
from strati.landscape.llc.loss_structure import largest_quadratic
from strati.landscape.llc.posterior import adapted, local_posterior
from strati.landscape.llc.sampling_plan import SamplingPlan
from strati.landscape.objective import behavioural_loss

GRID = np.linspace(-8, 8, 4001)


def product(w: torch.Tensor) -> torch.Tensor:
    """Quadratic in the first parameter alone."""
    return (w[0] * w[1] - w[1] ** 2) ** 2


def on_grid(nbeta: float) -> np.ndarray:
    """``exp(-nbeta product - |w|^2 / 2)``, rows by the second parameter."""
    first, second = GRID[None, :], GRID[:, None]
    weight: np.ndarray = np.exp(-nbeta * (first * second - second**2) ** 2 - first**2 / 2 - second**2 / 2)
    return weight


@pytest.mark.parametrize(
    ("potential", "size", "block"),
    [
        (product, 2, (0,)),
        (lambda w: w[0] ** 4 + w[1] ** 6, 2, ()),
        (lambda w: (w**2).sum(), 3, (0, 1, 2)),
        (lambda w: (w[0] * torch.tanh(w[1]) + w[2] * torch.tanh(w[3])) ** 2, 4, (0, 2)),
        (lambda w: w[0] ** 2 if float(w[0]) > 0 else w[0] ** 4, 1, ()),  # cannot be batched
    ],
)
def test_the_parameters_in_which_a_loss_is_quadratic_are_found(potential, size, block):
    assert largest_quadratic(potential, torch.zeros(size, dtype=torch.float64)) == block


def test_the_block_is_integrated_out_exactly():
    target = local_posterior(product, torch.zeros(2, dtype=torch.float64), 1.0)
    conditional = Conditional(target, target.quadratic)
    nbeta = torch.tensor([3.0, 40.0], dtype=torch.float64)
    rest = GRID[2000:3000:97]
    offset = torch.zeros(2, len(rest), 2, dtype=torch.float64)
    offset[..., 1] = torch.as_tensor(rest)
    found = conditional.log_marginal(conditional.look(offset, nbeta), offset, nbeta).numpy()
    for row, temperature in zip(found, nbeta.tolist(), strict=True):
        exact = np.log(on_grid(temperature).sum(1))[2000:3000:97]
        assert np.allclose(row - row[0], exact - exact[0], atol=1e-8)


def test_collapsed_moves_alone_sample_the_posterior():
    """400 chains of these moves and nothing else against a sum over a grid: five standard errors, 1 in 10^6."""
    target = local_posterior(product, torch.zeros(2, dtype=torch.float64), 1.0)
    moves = CollapsedMoves(target, torch.Generator().manual_seed(0))
    nbeta = torch.tensor([50.0], dtype=torch.float64)
    offset = torch.zeros(1, 400, 2, dtype=torch.float64)
    state = (offset, *target.evaluate(offset))
    kept = []
    for i in range(400):
        state = moves.move(*state, nbeta)
        if i >= 100:
            kept.append(torch.stack([50 * state[1][0], (state[0][0] ** 2).sum(-1), state[0][0].prod(-1)]))
    weight = on_grid(50.0)
    first, second = GRID[None, :], GRID[:, None]
    means = torch.stack(kept).mean(0).numpy()  # per chain
    loss = 50 * (first * second - second**2) ** 2
    for chain_means, value in zip(means, (loss, first**2 + second**2, first * second), strict=True):
        exact = (value * weight).sum() / weight.sum()
        error = chain_means.std(ddof=1) / math.sqrt(len(chain_means))
        assert abs(chain_means.mean() - exact) < 5 * error < 0.3 * abs(exact)


def test_a_block_that_is_not_quadratic_is_never_moved():
    """Taken for quadratic without being so: every draw differs from what it was taken for, and is refused."""
    target = local_posterior(lambda w: torch.exp(w).sum(), torch.zeros(2, dtype=torch.float64), 1.0)
    conditional = Conditional(target, (0,))
    nbeta = torch.tensor([100.0], dtype=torch.float64)
    offset = torch.ones(1, 50, 2, dtype=torch.float64)
    drawn = conditional.draw(conditional.look(offset, nbeta), offset, nbeta, torch.Generator().manual_seed(0))
    assert not drawn.good.any()


@pytest.mark.parametrize("step", [0.1, 1.0, math.pi / 2])
def test_trajectories_through_a_quadratic_lose_nothing(step):
    """A trajectory follows the quadratic's own Gaussian exactly: every one is accepted, however long its steps."""
    scales = torch.logspace(-3, 3, 12, dtype=torch.float64)
    target = local_posterior(lambda w: (scales * w**2).sum(), torch.zeros(12, dtype=torch.float64), 1.0)
    walk = HMCKernel(
        target, SamplingPlan(Sampler.HMC, 100.0, 1.0, chains=20, draws=10, leapfrog=10, fixed=("leapfrog",))
    )
    nbeta = torch.tensor([100.0], dtype=torch.float64)
    tuning = Adaptation(torch.tensor([math.log(step)], dtype=torch.float64), walk.quadratic_scales(nbeta))
    state = walk.at(walk.normal(1, 20, 12) * 0.1)
    moved, chance = walk.trajectory(state, nbeta, tuning, wide=False)
    assert float(chance[0]) == pytest.approx(1.0, abs=1e-9)
    assert not torch.equal(moved.offset, state.offset)


def test_the_curvature_is_averaged_over_the_places_that_chains_have_come_to():
    """Half of the places have the outer weight 2, half 0: the input weight's curvature is the mean of both."""
    model = nn.Sequential(nn.Linear(1, 9, bias=False), nn.Linear(9, 1, bias=False)).double()
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    loss = behavioural_loss(model, torch.ones(4, 1, dtype=torch.float64))
    target = local_posterior(loss, loss.flat.theta, 1.0)
    apart = torch.zeros(2, 18, dtype=torch.float64)
    apart[0, 9:], apart[1, 9:] = 1.0, -1.0
    moved = adapted(target, apart)
    jacobians = [torch.cat([torch.full((9,), out), torch.ones(9)]).double() for out in (2.0, 0.0)]
    exact = torch.linalg.eigvalsh(sum(2 * torch.outer(j, j) for j in jacobians) / 2)
    assert moved is not None and torch.allclose(moved.curvature, exact, atol=1e-9)
    small = local_posterior(lambda w: (w**2).sum(), torch.zeros(2, dtype=torch.float64), 1.0)
    assert adapted(small, torch.zeros(2, 2)) is None
