"""Sparsified networks: the same outputs on the data, zeros where freedom is, ordinary checkpoints."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from halves import two_halves
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import strati
from strati.core.errors import BadInputError, UnsupportedError
from strati.landscape.basis.linear_maps import DataStatistics


def mlp(*widths, seed=0, activation=nn.ReLU, bias=True):
    torch.manual_seed(seed)
    layers = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b, bias=bias), activation()]
    return nn.Sequential(*layers[:-1]).double()


def normal(n, d, *, seed=0):
    return np.random.default_rng(seed).normal(size=(n, d))


def outputs(net, result, x):
    other = __import__("copy").deepcopy(net)
    other.load_state_dict({k: torch.from_numpy(v) for k, v in result.tensors.items()})
    with torch.no_grad():
        return other(torch.from_numpy(x)).numpy(), net(torch.from_numpy(x)).numpy()


@pytest.mark.parametrize("bias", [True, False])
def test_rank_four_inputs_zero_their_columns(bias):
    net, x = mlp(10, 8, 6, 3, bias=bias), normal(200, 4) @ normal(4, 10, seed=1)
    result = strati.sparsify(net, x)
    assert result.layers[0].dependent == 6
    # d_{l+1} zeros for each dependent input
    assert (result.tensors["0.weight"] == 0).sum() >= 6 * 8
    found, wanted = outputs(net, result, x)
    assert np.abs(found - wanted).max() < 1e-10 * np.abs(wanted).max()


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), rank=st.integers(1, 6))
def test_outputs_never_change_and_zeros_never_get_fewer(seed, rank):
    rng = np.random.default_rng(seed)
    widths = [int(k) for k in rng.integers(2, 9, size=4)]
    net = mlp(*widths, seed=seed, activation=nn.LeakyReLU if seed % 3 == 0 else nn.ReLU)
    x = normal(80, rank, seed=seed) @ normal(rank, widths[0], seed=seed + 1) + rng.normal()
    result = strati.sparsify(net, x)
    found, wanted = outputs(net, result, x)
    assert np.abs(found - wanted).max() <= 1e-7 * max(np.abs(wanted).max(), 1e-12)
    assert result.change <= 1e-7
    assert result.zeros_after >= result.zeros_before
    for layer, width in zip(result.layers, widths[1:], strict=True):
        assert layer.zeros_after >= layer.dependent * width  # at least one zero per free direction used


def test_dead_parallel_and_affine_neurons_lose_their_columns():
    net, x = mlp(5, 8, 4), normal(300, 5)
    with torch.no_grad():
        net[0].weight[1], net[0].bias[1] = 3 * net[0].weight[0], 3 * net[0].bias[0]
        net[0].bias[2] = -100.0
    result = strati.sparsify(net, x)
    assert result.layers[1].dependent == 2
    assert result.layers[0].unread == 2
    found, wanted = outputs(net, result, x)
    assert np.allclose(found, wanted, atol=1e-10)


def test_synchronised_block_is_recombined_where_gates_stay():
    """Neurons that fire always are a block; a large bias leaves room for recombination."""
    net, x = mlp(6, 5, 3), normal(200, 6)
    with torch.no_grad():
        net[0].bias[:4] = torch.tensor([40.0, 60.0, 90.0, 140.0], dtype=torch.float64)
        net[0].weight[:4] = net[0].weight[:4].abs() + 0.1
    result = strati.sparsify(net, x)
    assert result.layers[0].blocks_written == (4,)
    assert result.layers[0].block_zeros > 0
    found, wanted = outputs(net, result, x)
    assert np.allclose(found, wanted, atol=1e-9 * np.abs(wanted).max())


def test_synchronised_block_that_would_move_a_gate_is_reported():
    net, x = mlp(2, 2, 1), normal(400, 2)
    with torch.no_grad():
        net[0].weight[:] = torch.tensor([[1.0, 0.02], [1.0, 0.04]])
        net[0].bias[:] = 0.0
    x = np.concatenate([x, [[-0.01, 1.0], [0.01, -1.0]]])
    x = x[(x @ net[0].weight.detach().numpy().T > 0).sum(axis=1) != 1]  # they fire together on these data
    result = strati.sparsify(net, x)
    assert result.layers[0].blocks_reported == (2,)
    assert result.layers[0].blocks_written == ()
    assert any(flag.code == "blocks-reported" for flag in result.warnings)
    found, wanted = outputs(net, result, x)
    assert np.allclose(found, wanted)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), constant=st.booleans())
def test_dependencies(seed, constant):
    rng = np.random.default_rng(seed)
    rank, width = int(rng.integers(0, 5)), int(rng.integers(1, 8))
    rows = rng.normal(size=(50, rank)) @ rng.normal(size=(rank, width)) + (
        rng.normal(size=width) if constant else 0
    )
    keep, coefficients, shift = DataStatistics(rows).dependencies(1e-12, with_constant=constant)
    assert keep.size == min(rank, width)
    others = np.setdiff1d(np.arange(width), keep)
    assert np.allclose(rows[:, keep] @ coefficients.T + shift, rows[:, others], atol=1e-8)


def test_single_precision_and_saving(tmp_path):
    net = mlp(10, 8, 3).float()
    x = (normal(200, 4) @ normal(4, 10, seed=1)).astype(np.float32)
    result = strati.sparsify(net, x)
    assert result.layers[0].dependent == 6
    assert result.change < 1e-4
    result.save(tmp_path / "s.safetensors")
    opened = strati.open(tmp_path / "s.safetensors")
    assert {t.name for t in opened.tensors} == set(net.state_dict())
    assert (opened.read("0.weight") == 0).sum() == (result.tensors["0.weight"] == 0).sum() >= 48
    assert strati.sparsify(tmp_path / "s.safetensors", x).zeros_after >= result.zeros_after


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_two_hidden_halves_and_the_embedded_network(dtype):
    """A zero for every free direction used, and outputs the same up to the rounding of the checkpoint."""
    from strati import embedded
    from strati.io.to_module import as_module

    net, x, _ = two_halves(2, (3, 8, 6, 2), draws=12)
    digits = np.load(embedded.path("digits.npz"))["x"][:400]
    for model, rows in ((net, x), (as_module(embedded.path("digits-mlp.safetensors")), digits)):
        result = strati.sparsify(model.to(dtype), rows)
        readers = [part.out_features for part in model if isinstance(part, nn.Linear)]
        used = sum(layer.dependent * width for layer, width in zip(result.layers, readers, strict=True))
        won = sum(layer.block_zeros for layer in result.layers)
        assert result.zeros_after >= used + won > 0
        assert result.change < (1e-6 if dtype == torch.float32 else 1e-8)
        assert all(
            v.dtype == (np.float32 if dtype == torch.float32 else np.float64) for v in result.tensors.values()
        )


def test_deep_linear_network():
    net = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 4)).double()
    x = normal(100, 5)
    result = strati.sparsify(net, x)
    assert result.layers[1].dependent == 1  # six affine functions of five inputs
    found, wanted = outputs(net, result, x)
    assert np.allclose(found, wanted, atol=1e-9)


def test_bad_calls():
    with pytest.raises(UnsupportedError):
        strati.sparsify(nn.Bilinear(2, 2, 2), normal(5, 2))
    for x in (normal(5, 3), np.full((5, 2), np.nan), normal(1, 2), np.ones((5, 2), dtype=complex)):
        with pytest.raises(BadInputError):
            strati.sparsify(mlp(2, 3, 1), x)
