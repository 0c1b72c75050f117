"""Hessians of curvlinops beside strati's; run by ``make oracles-test``."""

from __future__ import annotations

import numpy as np
import pytest

pytestmark = pytest.mark.oracle


def test_the_exact_hessian_is_that_of_curvlinops() -> None:
    curvlinops = pytest.importorskip("curvlinops")
    torch = pytest.importorskip("torch")
    from strati.landscape.objective import behavioural_loss, exact_hessian

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2)).double()
    x = torch.randn(40, 3, dtype=torch.float64)
    y = model(x).detach()
    parameters = list(model.parameters())

    mean_over_outputs = torch.nn.MSELoss()  # strati takes the sum over the two outputs
    operator = curvlinops.HessianLinearOperator(model, mean_over_outputs, parameters, [(x, y)])
    theirs = 2 * (operator @ torch.eye(operator.shape[1], dtype=torch.float64))
    loss = behavioural_loss(model, x)
    ours = exact_hessian(loss, loss.flat.theta)
    np.testing.assert_allclose(np.asarray(ours), theirs.detach().numpy(), atol=1e-10)
