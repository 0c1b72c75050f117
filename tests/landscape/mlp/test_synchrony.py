"""Synchronised neurons: hashing against direct comparison, streaming, and the corrected eq. 20."""

from __future__ import annotations

import time

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strati.landscape.mlp.statistics_pass import Asynchrony, FiringHash, approximate_blocks


def direct(pattern: np.ndarray) -> list[list[int]]:
    blocks: dict[bytes, list[int]] = {}
    for neuron in range(pattern.shape[1]):
        blocks.setdefault(pattern[:, neuron].tobytes(), []).append(neuron)
    return list(blocks.values())


@settings(max_examples=80, deadline=None)
@given(
    n=st.integers(1, 30), neurons=st.integers(1, 12), kinds=st.integers(1, 5),
    step=st.integers(1, 30), seed=st.integers(0, 10**6),
)  # fmt: skip
def test_blocks_are_those_of_direct_comparison_in_any_batches(
    n: int, neurons: int, kinds: int, step: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    pattern = (rng.random((n, kinds)) < 0.5)[:, rng.integers(0, kinds, neurons)]
    hashed = FiringHash(neurons, seed)
    for start in range(0, n, step):
        hashed.add(torch.tensor(pattern[start : start + step]))
    assert hashed.blocks() == direct(pattern)
    assert hashed.fired.tolist() == pattern.sum(axis=0).tolist()


def test_patterns_that_differ_in_one_datum_are_told_apart() -> None:
    pattern = torch.ones(5000, 3, dtype=torch.bool)
    pattern[4321, 1] = False
    hashed = FiringHash(3)
    for part in torch.split(pattern, 777):
        hashed.add(part)
    assert hashed.blocks() == [[0, 2], [1]]


def test_time_grows_linearly_with_the_neurons() -> None:
    def spent(neurons: int) -> float:
        pattern = torch.rand(200, neurons) < 0.5
        best = float("inf")
        for _ in range(3):
            start = time.process_time()
            hashed = FiringHash(neurons)
            hashed.add(pattern)
            hashed.blocks()
            best = min(best, time.process_time() - start)
        return best

    spent(500)
    assert spent(32_000) < 40 * max(
        spent(4_000), 1e-3
    )  # 8 times the neurons; a quadratic method takes 64 times


@settings(max_examples=30, deadline=None)
@given(n=st.integers(1, 20), neurons=st.integers(1, 6), seed=st.integers(0, 10**6))
def test_asynchrony_is_the_mean_of_the_corrected_formula(n: int, neurons: int, seed: int) -> None:
    p = torch.tensor(np.random.default_rng(seed).standard_normal((n, neurons)))
    r = (p > 0).double()
    truth = ((r[:, :, None] - r[:, None, :]) * p[:, None, :]).square().mean(dim=0)
    measured = Asynchrony(neurons)
    for part in torch.split(p, 3):
        measured.add(part)
    assert torch.allclose(measured.matrix(), truth, atol=1e-12)


def test_synchronised_neurons_cost_nothing() -> None:
    p = torch.randn(100, 1, dtype=torch.float64) * torch.tensor([[1.0, 3.0]], dtype=torch.float64)
    measured = Asynchrony(2)
    measured.add(p)
    assert float(measured.matrix().max()) < 1e-14
    assert approximate_blocks(measured.matrix(), 1e-12) == [[0, 1]]


def test_approximate_blocks_keep_within_the_scale() -> None:
    rng = np.random.default_rng(0)
    matrix = torch.tensor(rng.random((15, 15)))
    matrix.fill_diagonal_(0)
    for epsilon in (0.1, 1.0, 5.0):
        blocks = approximate_blocks(matrix, epsilon)
        assert sorted(i for b in blocks for i in b) == list(range(15))
        assert all(float(matrix[b][:, b].sum()) <= epsilon for b in blocks if len(b) > 1)
    assert len(approximate_blocks(matrix, 1e9)) == 1
