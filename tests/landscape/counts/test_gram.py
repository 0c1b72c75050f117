"""Ranks of Gram matrices: exact cases, scale invariance, thresholds well above rounding."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strati.landscape.counts.gram import Balanced, added_rank, fold, pairs_above, rank


def gram_of(rank_: int, size: int, seed: int, scales: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((3 * size + 5, rank_)) @ rng.standard_normal((rank_, size))
    if scales:
        rows = rows * 10.0 ** rng.uniform(-5, 5, size)
    tensor = torch.tensor(rows)
    return tensor.T @ tensor, tensor


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 40), part=st.floats(0, 1), seed=st.integers(0, 10**6), scales=st.booleans())
def test_rank_is_that_of_the_construction_whatever_the_units(
    size: int, part: float, seed: int, scales: bool
) -> None:
    true = round(part * size)
    gram, rows = gram_of(true, size, seed, scales)
    balanced = Balanced(gram)
    assert balanced.rank == true
    members = list(range(0, size, 2))
    assert balanced.rank_of(members) == min(true, len(members))
    half = rows[: rows.shape[0] // 2]
    assert balanced.rank_on(half.T @ half) <= balanced.rank


def test_zero_empty_and_tiny_matrices() -> None:
    assert rank(torch.zeros(3, 3, dtype=torch.float64)) == 0
    assert rank(torch.zeros(0, 0, dtype=torch.float64)) == 0
    assert rank(1e-200 * torch.eye(2, dtype=torch.float64)) == 2


def test_rounding_of_float32_is_not_rank() -> None:
    _, rows = gram_of(5, 12, 0)
    rounded = rows.float().double()
    assert rank(rounded.T @ rounded) == 5


@settings(max_examples=40, deadline=None)
@given(own=st.integers(1, 8), shared=st.integers(0, 5), other=st.integers(1, 8), seed=st.integers(0, 10**6))
def test_added_rank_is_the_difference_of_ranks(own: int, shared: int, other: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    functions = rng.standard_normal((60, own + shared + other))
    a = functions[:, : own + shared] @ rng.standard_normal((own + shared, own + shared))
    b = functions[:, own:] @ rng.standard_normal((shared + other, shared + other))
    joint = torch.tensor(np.c_[a, b])
    assert added_rank(joint.T @ joint, own + shared) == own


def test_pairs_above_counts_products() -> None:
    rng = np.random.default_rng(0)
    g, k = rng.random(30), rng.random(20)
    for threshold in (1e-3, 0.1, 0.5, 2.0):
        assert pairs_above(torch.tensor(g), torch.tensor(k), threshold) == int(
            (np.outer(g, k) > threshold).sum()
        )
    assert pairs_above(torch.tensor([0.0]), torch.tensor([1.0]), 0.1) == 0


def test_fold_puts_the_constant_last() -> None:
    assert fold(torch.zeros(2, 1), True).tolist() == [[0.0, 1.0], [0.0, 1.0]]
    assert fold(torch.zeros(2, 1), False).shape == (2, 1)
