"""Kronecker factors against exact curvatures, and a network too large for a dense matrix."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import jacrev

import strati
from strati.landscape.llc.config import LLCConfig
from strati.landscape.llc.posterior import default_gamma, kronecker
from strati.landscape.llc.sampling_plan import sampling_plan
from strati.landscape.llc.scales import closed_form
from strati.landscape.llc.tuning import DENSE_LIMIT
from strati.landscape.objective import behavioural_loss, gauss_newton_matrix


@pytest.mark.parametrize(("kind", "rows"), [("mse", 30), ("kl", 1)])
@pytest.mark.parametrize("bias", [True, False])
def test_one_layer_is_a_product_exactly(kind, rows, bias):
    """One linear layer's Gauss-Newton matrix is a Kronecker product for squared errors, and for a single datum."""
    torch.manual_seed(1)
    loss = behavioural_loss(nn.Linear(4, 3, bias=bias).double(), torch.randn(rows, 4).double(), kind=kind)
    rotation, curvature = kronecker(loss)
    exact = gauss_newton_matrix(loss.flat, loss.x, kind=kind)
    eye = torch.eye(loss.flat.size, dtype=torch.float64)
    turned = rotation.rotate(rotation.rotate(exact).T)
    assert torch.allclose(rotation.unrotate(rotation.rotate(eye)), eye, atol=1e-12)
    assert torch.allclose(turned, torch.diag(curvature), atol=1e-10)


def test_deep_network_diagonal_blocks_are_near():
    """Traces of the layers' blocks: right to the correlation of inputs and Jacobians that a product leaves out."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    loss = behavioural_loss(model, torch.randn(400, 5).double())
    _, curvature = kronecker(loss)
    exact = torch.diag(gauss_newton_matrix(loss.flat, loss.x))
    first = 5 * 8 + 8
    assert float(curvature[first:].sum()) == pytest.approx(
        float(exact[first:].sum()), rel=1e-9
    )  # the last is exact
    assert float(curvature[:first].sum()) == pytest.approx(float(exact[:first].sum()), rel=0.3)


def test_networks_without_enough_linear_layers_have_none():
    model = nn.Sequential(nn.Conv1d(1, 4, 3), nn.Flatten(), nn.Linear(8, 1)).double()
    assert kronecker(behavioural_loss(model, torch.randn(5, 1, 4).double())) is None


def test_localisation_of_large_networks_follows_their_weights():
    large = behavioural_loss(nn.Linear(60, 60), torch.randn(4, 60))
    theta = large.flat.theta
    assert large.flat.size > DENSE_LIMIT
    assert default_gamma(theta) == pytest.approx(theta.numel() / float(theta.square().sum()))
    assert sampling_plan(large, theta, LLCConfig(sampler="sgld", gamma=3.0)).plan.gamma == 3.0
    small = behavioural_loss(nn.Linear(2, 1), torch.randn(4, 2))
    assert sampling_plan(small, small.flat.theta, LLCConfig(sampler="sgld")).plan.gamma == 1.0


@pytest.mark.slow
def test_large_network_is_sampled():
    """3,292 parameters, held so near that the loss is quadratic: the closed form, here from the data's Gram matrix."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 58), nn.ReLU(), nn.Linear(58, 1))
    x = torch.randn(60, 20)
    loss = behavioural_loss(model, x)
    jacobian = jacrev(lambda t: loss.flat(t, x)[:, 0])(loss.flat.theta)
    curvature = torch.linalg.eigvalsh(2 / 60 * jacobian @ jacobian.T).numpy()
    result = strati.llc(model, "behavioural-mse", x, chains=4, draws=320, nbeta=200.0, gamma=2000.0)
    assert result.estimate is not None, result.reason
    exact = closed_form(curvature, 200.0, 2000.0)
    assert abs(result.estimate - exact) < 4 * result.stderr < 0.8 * exact


def test_single_precision_reaches_its_temperature():
    """A temperature that single precision rounds down once made the walk down to it endless."""
    weights = torch.ones(9, 9)  # a product with it keeps the potential in single precision
    result = strati.learning_coefficient(
        lambda w: ((weights @ w) ** 4).sum() + (w**4).sum(),
        torch.zeros(9),
        nbeta=46.16624130844683,
        chains=4,
        draws=20,
        ladder=False,
    )
    assert result.nbeta == pytest.approx(46.16624, rel=1e-6)
