"""Ranks of streams of rows: exact cases, scale invariance, what rounding leaves open, and no mix of devices."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strati.landscape.counts.ranks import (
    Factor,
    RankRange,
    certified,
    fold,
    pairs_above,
    perturb,
    rank_range,
    upper,
)


def rows_of(rank: int, size: int, seed: int, scales: bool = False) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((3 * size + 5, rank)) @ rng.standard_normal((rank, size))
    return torch.tensor(rows * 10.0 ** rng.uniform(-9, 9, size) if scales else rows)


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 40), part=st.floats(0, 1), seed=st.integers(0, 10**6), scales=st.booleans())
def test_rank_is_that_of_the_construction_whatever_the_units(
    size: int, part: float, seed: int, scales: bool
) -> None:
    true = round(part * size)
    rows = rows_of(true, size, seed, scales)
    factor = Factor(size)
    for piece in rows.split(7):
        factor.add(piece)
    factor.compare(rows, perturb(rows, torch.Generator().manual_seed(seed)))
    assert factor.range() == RankRange(true, true)
    members = list(range(0, size, 2))
    assert factor.range(members) == RankRange(min(true, len(members)), min(true, len(members)))
    assert factor.count == len(rows)


@settings(max_examples=40, deadline=None)
@given(size=st.integers(2, 12), power=st.floats(-20, -2), seed=st.integers(0, 10**6))
def test_what_is_small_is_used_or_open_but_never_zero(size: int, power: float, seed: int) -> None:
    """One column is the sum of the others but for a share 10^power: the rank is full, and never said to be less."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((60, size))
    rows[:, -1] = rows[:, :-1].sum(1) + 10.0**power * rng.standard_normal(60)
    found = rank_range(torch.tensor(rows))
    assert found.high == size or power < -13
    assert found.low == size or power < -11


def test_rows_after_the_columns_are_known_to_be_independent_are_passed_over() -> None:
    rows = torch.randn(20_000, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rows[:, 4] = 0
    factor = Factor(6)
    for piece in rows.split(5_000):
        factor.add(piece)
    assert factor.range() == RankRange(5, 5) and factor.range([3, 4]) == RankRange(1, 1)
    rows[-1, 4] = 1.0  # a column comes to life
    factor.add(rows[-1:])
    assert factor.range() == RankRange(6, 6)
    whole = Factor(6, whole=True)
    for piece in rows.split(5_000):
        whole.add(piece)
    assert torch.allclose(whole.gram(), rows.T @ rows)


def test_zero_empty_and_tiny_matrices() -> None:
    assert rank_range(torch.zeros(3, 3, dtype=torch.float64)) == RankRange(0, 0)
    assert rank_range(torch.zeros(0, 0, dtype=torch.float64)) == RankRange(0, 0)
    assert rank_range(1e-100 * torch.eye(2, dtype=torch.float64)) == RankRange(2, 2)


def test_a_column_of_noise_does_not_spoil_the_others() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(50, 3, dtype=torch.float64, generator=generator)
    rows = torch.cat([rows, 1e-17 * torch.randn(50, 1, dtype=torch.float64, generator=generator)], 1)
    noise = torch.tensor([1e-15, 1e-15, 1e-15, 1.0], dtype=torch.float64)
    assert rank_range(rows, noise).low == 3


def test_probes_that_are_too_few_are_not_believed() -> None:
    eye = torch.eye(4, dtype=torch.float64)
    few, last = Factor(4), Factor(4)
    few.add(eye[:2])
    last.add(eye[1:3])
    factor, certain = certified(few, last)
    assert not certain and factor.range() == RankRange(3, 3)  # the fourth is silent
    enough = Factor(4)
    enough.add(eye[:3])
    assert certified(enough, last)[1]


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


@pytest.mark.parametrize("columns", [4, 16, 64, 150])
@pytest.mark.parametrize("distinct", [1, 2, 3])
def test_rows_that_repeat_each_other_have_the_rank_of_one_copy(columns: int, distinct: int) -> None:
    """A linear head's Jacobian is the same on every datum: errors of one factorisation would add up with one sign."""
    few = torch.randn(
        distinct, columns, dtype=torch.float64, generator=torch.Generator().manual_seed(columns)
    )
    for many in (few.repeat(30_000 // distinct, 1), few.repeat_interleave(20_000 // distinct, 0)):
        factor = Factor(columns, whole=True)
        for part in torch.split(many, 1111):
            factor.add(part)
        found = factor.range()
        assert found.low == distinct
        assert found.high == distinct or columns > 64  # so wide, it may be left open, but never put too high


def test_the_factor_has_the_gram_matrix_of_the_rows() -> None:
    generator = torch.Generator().manual_seed(3)
    for rows, columns in ((5, 7), (7, 7), (40, 7), (1000, 7), (999, 33)):
        matrix = torch.randn(rows, columns, dtype=torch.float64, generator=generator)
        factor = upper(matrix)
        assert len(factor) <= columns
        torch.testing.assert_close(factor.T @ factor, matrix.T @ matrix, rtol=1e-12, atol=1e-10)
