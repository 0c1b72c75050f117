"""Curvature without dense matrices against dense ones: both matrices, all losses, repeated eigenvalues, bad input."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file
from torch import nn

import strati
from strati.cli.main import strati as program
from strati.core.errors import BadInputError
from strati.landscape import curvature as module
from strati.landscape.curvature_products import Products
from strati.landscape.objective import exact_hessian, gauss_newton_matrix, objective


def case(loss: str) -> tuple[nn.Module, object]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    x = torch.randn(30, 6)
    y = torch.arange(30) % 3 if loss == "cross_entropy" else torch.randn(30, 3)
    return model, x if loss.startswith("behavioural") else (x, y)


def dense(model: nn.Module, loss: str, data: object, matrix: str) -> np.ndarray:
    whole = objective(model, loss, data, dtype=torch.float64)
    if matrix == "hessian":
        found = exact_hessian(whole, whole.flat.theta)
    else:
        kind = "kl" if loss in ("cross_entropy", "behavioural-kl") else "mse"
        found = gauss_newton_matrix(whole.flat, whole.x, kind=kind)
    return np.linalg.eigvalsh(found.numpy())[::-1]


@pytest.mark.parametrize("iterative", [False, True])
@pytest.mark.parametrize("matrix", ["hessian", "gauss-newton", "fisher"])
@pytest.mark.parametrize("loss", ["mse", "cross_entropy", "behavioural-kl"])
def test_eigenvalues_and_trace_against_the_dense_matrix(loss, matrix, iterative, monkeypatch):
    """Trace and effective parameters within five standard errors: one false alarm in two million each."""
    if iterative:
        monkeypatch.setattr(module, "EXACT_UP_TO", 0)
    model, data = case(loss)
    values = dense(model, loss, data, matrix)
    found = strati.curvature(model, loss, data, matrix=matrix, top=4, seed=1)
    np.testing.assert_allclose(found.top, values[:4], rtol=1e-6, atol=1e-8)
    assert max(found.top_residuals) <= 1e-4 * found.top[0]
    assert abs(found.trace - values.sum()) <= 5 * found.trace_stderr + 1e-8 * abs(values).sum()
    assert (found.trace_stderr == 0.0) == (not iterative)
    assert sum(weight for _, weight in found.density) == pytest.approx(1)
    for epsilon, value, error in found.effective:
        positive = values.clip(0)
        assert abs(value - (positive / (positive + epsilon)).sum()) <= 5 * error + 1e-6


def test_a_repeated_eigenvalue_is_found_as_often_as_it_is_there(monkeypatch):
    """Four outputs of a linear map share one matrix of inputs: every eigenvalue is there four times."""
    monkeypatch.setattr(module, "EXACT_UP_TO", 0)
    torch.manual_seed(0)
    x = torch.randn(50, 6, dtype=torch.float64)
    found = strati.curvature(nn.Linear(6, 4, bias=False).double(), "behavioural-mse", x, top=6)
    each = np.linalg.eigvalsh((2 * x.T @ x / 50).numpy())[::-1]
    np.testing.assert_allclose(found.top, np.repeat(each, 4)[:6], rtol=1e-6)


def test_a_loss_of_ones_own(monkeypatch):
    monkeypatch.setattr(module, "EXACT_UP_TO", 0)
    model, (x, y) = case("mse")
    own = strati.curvature(
        model, lambda out, y: ((out - y) ** 2).sum() / len(out), (x, y), top=2, matrix="gauss-newton"
    )
    named = strati.curvature(model, "mse", (x, y), top=2, matrix="gauss-newton")
    np.testing.assert_allclose(own.top, named.top, rtol=1e-6)


@pytest.mark.parametrize("matrix", ["hessian", "gauss-newton"])
@pytest.mark.parametrize("loss", ["mse", "cross_entropy", "behavioural-kl"])
def test_products_in_pieces_are_those_of_one_pass(loss, matrix):
    """Rows without a label count in no piece."""
    model, data = case(loss)
    if loss == "cross_entropy":
        x, y = data
        data = x, torch.where(torch.arange(30) % 4 == 0, -100, y)
    mean = objective(model, loss, data, dtype=torch.float64)
    kind = module.CurvatureMatrix(matrix)
    vector = torch.randn(mean.flat.size, dtype=torch.float64)
    expected = exact_hessian(mean, mean.flat.theta) @ vector
    one, pieces = Products(mean, kind), Products(mean, kind, graph_bytes=10_000)
    assert len(one._pieces) == 1 and len(pieces._pieces) > 3
    if matrix == "hessian":
        torch.testing.assert_close(one(vector), expected)
    torch.testing.assert_close(one(vector), pieces(vector))


def test_a_language_model_with_fused_attention(monkeypatch):
    """The Hessian of cross-entropies at next tokens against automatic differentiation of the whole matrix."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=5, n_positions=6, n_embd=4, n_layer=1, n_head=2)
    model, ids = transformers.GPT2LMHeadModel(config).eval(), torch.randint(0, 5, (4, 6))
    mean = objective(model, "cross_entropy", ids, dtype=torch.float64)
    vector = torch.randn(mean.flat.size, dtype=torch.float64)
    product = Products(mean, module.CurvatureMatrix.HESSIAN)(vector)
    torch.testing.assert_close(product, exact_hessian(mean, mean.flat.theta) @ vector)


def test_layers_are_diagonal_blocks():
    model, data = case("mse")
    found = strati.curvature(model, "mse", data, per_layer=True)
    mean = objective(model, "mse", data, dtype=torch.float64)
    matrix = exact_hessian(mean, mean.flat.theta).numpy()
    for layer, place in zip(found.layers, (slice(0, 35), slice(35, None)), strict=True):
        values = np.linalg.eigvalsh(matrix[place, place])
        assert (layer.top, layer.trace) == pytest.approx((values[-1], values.sum()), rel=1e-6)
        assert layer.negative == pytest.approx((values < -1e-6 * abs(values).max()).mean())
    assert [layer.name for layer in found.layers] == ["0", "2"] == list(found.table["name"])


@pytest.mark.parametrize("iterative", [False, True])
def test_negative_part_and_condition(iterative, monkeypatch):
    """The share of negative eigenvalues within five standard errors, the lowest Ritz value at the lowest eigenvalue."""
    if iterative:
        monkeypatch.setattr(module, "EXACT_UP_TO", 0)
    model, data = case("mse")
    values = dense(model, "mse", data, "hessian")
    found = strati.curvature(model, "mse", data, seed=2)
    share = (values < -1e-6 * abs(values).max()).mean()
    assert abs(found.negative - share) <= 5 * found.negative_stderr + 1e-12
    assert found.lowest == pytest.approx(values[-1], rel=1e-3)
    assert (found.condition is None) == iterative
    if not iterative:
        assert found.condition == pytest.approx(abs(values).max() / abs(values).min(), rel=1e-6)


def test_the_same_seed_gives_the_same_numbers(monkeypatch):
    monkeypatch.setattr(module, "EXACT_UP_TO", 0)
    model, data = case("mse")
    one, again, other = (strati.curvature(model, "mse", data, seed=seed).trace for seed in (3, 3, 4))
    assert one == again != other


def test_rows_are_drawn_where_all_would_take_long(monkeypatch):
    """The number of rows follows from counted operations, and the rows from the seed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 3))
    x = torch.randn(500, 20)
    every = strati.curvature(model, "behavioural-mse", x, top=2)
    assert every.warnings == ()
    monkeypatch.setattr(module, "_MOST_FLOPS", 1e8)
    first, again, other = (
        strati.curvature(model, "behavioural-mse", x, top=2, seed=seed) for seed in (0, 0, 1)
    )
    passes = 2 * (20 * 40 + 40 * 3)  # floating-point operations of one row
    products = 12 * 6 + 30 + 4 * 24
    (flag,) = first.warnings
    assert flag.code == "sampled-rows"
    assert f"on {int(1e8 / (products * 6.3 * passes))} of 500 rows" in flag.text
    assert first.top == again.top != other.top
    assert first.products <= products + 2
    assert strati.curvature(model, "behavioural-mse", x, top=2, rows=500).warnings == ()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"rows": 0}, "at least 1"),
        ({"matrix": "jacobian"}, "no such matrix"),
        ({"top": 0}, "at least 1"),
        ({"epsilons": [-1.0]}, "positive"),
    ],
)
def test_bad_options(options, match):
    model, data = case("mse")
    with pytest.raises(BadInputError, match=match):
        strati.curvature(model, "mse", data, **options)


def test_fisher_needs_a_named_loss():
    model, data = case("mse")
    with pytest.raises(BadInputError, match="gauss-newton"):
        strati.curvature(model, lambda out, y: (out - y).abs().mean(), data, matrix="fisher")


def test_the_command(tmp_path):
    model, (x, y) = case("cross_entropy")
    save_file(model.state_dict(), tmp_path / "m.safetensors")
    np.savez(tmp_path / "d.npz", x=x.numpy(), y=y.numpy())
    words = [
        "curvature",
        str(tmp_path / "m.safetensors"),
        "--data",
        str(tmp_path / "d.npz"),
        "--activation",
        "tanh",
    ]
    done = CliRunner().invoke(program, [*words, "--top", "3", "--json", str(tmp_path / "c.json")])
    assert done.exit_code == 0
    assert done.output.startswith("The largest eigenvalue of the hessian is ")
    form = json.loads((tmp_path / "c.json").read_text())
    np.testing.assert_allclose(form["top"], dense(model, "cross_entropy", (x, y), "hessian")[:3], rtol=1e-4)
    assert form["schema"] == "strati.curvature/1" and form["parameters"] == 53
