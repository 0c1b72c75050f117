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


def network_of_5_000(loss: str):
    """A network of 4,973 parameters in double precision, with data, and the loss in strati's and in torch's words."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        *(torch.nn.Linear(20, 60), torch.nn.Tanh(), torch.nn.Linear(60, 50), torch.nn.Tanh()),
        torch.nn.Linear(50, 13),
    ).double()
    x = torch.randn(120, 20, dtype=torch.float64)
    if loss == "cross_entropy":
        return model, x, torch.arange(120) % 13, torch.nn.CrossEntropyLoss(), 1.0
    return model, x, torch.randn(120, 13, dtype=torch.float64), torch.nn.MSELoss(), 13.0  # per output there


@pytest.mark.parametrize("matrix", ["hessian", "gauss-newton"])
@pytest.mark.parametrize("loss", ["mse", "cross_entropy"])
def test_products_top_eigenvalues_and_trace_beside_curvlinops(loss: str, matrix: str) -> None:
    """The trace within five standard errors: one false alarm in two million each."""
    curvlinops = pytest.importorskip("curvlinops")
    torch = pytest.importorskip("torch")
    import strati
    from strati.landscape.curvature_products import CurvatureMatrix, Products
    from strati.landscape.objective import objective

    model, x, y, function, scale = network_of_5_000(loss)
    kind = curvlinops.HessianLinearOperator if matrix == "hessian" else curvlinops.GGNLinearOperator
    operator = kind(model, function, list(model.parameters()), [(x, y)])
    products = Products(objective(model, loss, (x, y)), CurvatureMatrix(matrix))
    vectors = torch.randn(products.size, 3, dtype=torch.float64)
    theirs = scale * (operator @ vectors).detach()
    np.testing.assert_allclose(products.block(vectors).numpy(), theirs.numpy(), rtol=1e-7, atol=1e-9)

    dense = scale * (operator @ torch.eye(products.size, dtype=torch.float64)).detach()
    values = torch.linalg.eigvalsh((dense + dense.T) / 2).flip(0).numpy()
    spectrum = strati.curvature(model, loss, (x, y), matrix=matrix, top=5)
    np.testing.assert_allclose(spectrum.top, values[:5], rtol=1e-5)
    assert abs(spectrum.trace - values.sum()) <= 5 * spectrum.trace_stderr
    for epsilon, effective, error in spectrum.effective:
        positive = values.clip(0)
        assert abs(effective - (positive / (positive + epsilon)).sum()) <= 5 * error + 1e-6


def test_top_eigenvalues_and_trace_beside_pyhessian() -> None:
    """PyHessian's power iteration stops at a relative change of 1e-4, its trace is a mean of 200 probes."""
    pyhessian = pytest.importorskip("pyhessian")
    import strati

    model, x, y, function, _ = network_of_5_000("cross_entropy")
    theirs = pyhessian.hessian(model, function, data=(x, y), cuda=False)
    values, _ = theirs.eigenvalues(maxIter=1000, tol=1e-4, top_n=3)
    samples = np.asarray(theirs.trace(maxIter=200, tol=0.0))
    spectrum = strati.curvature(model, "cross_entropy", (x, y), top=3)
    np.testing.assert_allclose(spectrum.top, values, rtol=1e-2)
    error = float(samples.std(ddof=1)) / len(samples) ** 0.5
    assert abs(spectrum.trace - samples.mean()) <= 5 * (error**2 + spectrum.trace_stderr**2) ** 0.5
