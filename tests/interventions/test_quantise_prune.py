"""Data-aware edits against brute force, closed forms and direct implementations of the published algorithms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strati.interventions import edits, quantise_prune
from strati.interventions.edits import InputDirections
from strati.interventions.input_covariance import InputCovariance
from strati.interventions.quantise_prune import awq, gptq, hqq, output_error, sparsegpt, wanda


def _case(rows: int, cols: int, tokens: int, seed: int) -> tuple[Any, Any, Any]:
    """A weight, correlated inputs of unequal power, and their second moments."""
    rng = np.random.default_rng(seed)
    mixing = rng.standard_normal((cols, cols)) * np.exp(rng.standard_normal(cols))
    x = mixing @ rng.standard_normal((cols, tokens))
    return rng.standard_normal((rows, cols)), x, x @ x.T / tokens


def _truncated(w: Any, c: Any, rank: int) -> Any:
    return edits.truncate(InputDirections(w, InputCovariance("fc", c, 99)), rank=rank)


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 9), st.integers(2, 9), st.integers(1, 12), st.integers(1, 9), st.integers(0, 99))
def test_truncation_is_optimal_for_the_outputs(
    rows: int, cols: int, tokens: int, rank: int, seed: int
) -> None:
    """Eckart and Young: the least ||(W - W')X||^2 of rank k is the sum of the discarded squares of W X."""
    w, x, c = _case(rows, cols, tokens, seed)
    smaller = _truncated(w, c, rank)
    assert np.linalg.matrix_rank(smaller, tol=1e-8) <= rank
    singular = np.linalg.svd(w @ x, compute_uv=False)
    least = float((singular[rank:] ** 2).sum())
    assert np.linalg.norm((w - smaller) @ x) ** 2 <= least + 1e-6 * (singular**2).sum()


def test_no_random_or_locally_improved_matrix_of_that_rank_is_better() -> None:
    w, x, c = _case(4, 5, 40, 0)
    rng = np.random.default_rng(1)
    best = np.linalg.norm((w - _truncated(w, c, 2)) @ x)
    for _ in range(200):
        left = rng.standard_normal((4, 2))
        for _ in range(20):  # alternating least squares from a random start
            right = np.linalg.lstsq(left, w @ x, rcond=None)[0] @ np.linalg.pinv(x)
            left = np.linalg.lstsq((right @ x).T, (w @ x).T, rcond=None)[0].T
        assert np.linalg.norm((w - left @ right) @ x) >= best * (1 - 1e-9)


def test_directions_outside_a_singular_covariance_are_kept_while_there_is_rank() -> None:
    w, _, _ = _case(6, 6, 1, 3)
    x = np.eye(6)[:, :2]  # only two inputs are ever used
    c = x @ x.T / 2
    np.testing.assert_allclose(_truncated(w, c, 3) @ x, w @ x, atol=1e-8)
    # The other directions are truncated as without data: the best rank-1 part of what is left.
    left = w - (q := np.linalg.qr(w[:, :2])[0]) @ q.T @ w
    rest = np.linalg.norm(w - _truncated(w, c, 3)) ** 2
    assert rest == pytest.approx((np.linalg.svd(left, compute_uv=False)[1:] ** 2).sum(), rel=1e-5)


def test_rows_of_an_embedding_count_by_how_often_they_occur() -> None:
    rng = np.random.default_rng(0)
    w, weights = rng.standard_normal((7, 3)), rng.random(7)
    smaller = edits.truncate(InputDirections(w, InputCovariance("e", np.eye(3), 9, weights)), rank=2)
    root = np.sqrt(weights)[:, None]
    least = np.linalg.svd(root * w, compute_uv=False)[2]
    assert np.linalg.norm(root * (w - smaller)) == pytest.approx(least, rel=1e-8)


def _direct_gptq(w: Any, c: Any, bits: int, group: int, symmetric: bool) -> Any:
    """The update of optimal brain quantisation, column by column, with explicit inverses of what is left."""
    w = w.copy()
    h = c + 0.01 * np.diag(c).mean() * np.eye(len(c))
    levels = 2**bits - 1
    for j in range(w.shape[1]):
        if j % group == 0:
            part = w[:, j : j + group]
            if symmetric:
                step, zero = np.abs(part).max(1) / (2 ** (bits - 1) - 1), np.zeros(len(w))
            else:
                low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
                step = (high - low) / levels
                zero = np.round(-low / step)
        low_code, high_code = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if symmetric else (0, levels)
        code = np.clip(np.round(w[:, j] / step) + zero, low_code, high_code)
        error = w[:, j] - step * (code - zero)
        inverse = np.linalg.inv(h[j:, j:])
        w[:, j:] -= np.outer(error / inverse[0, 0], inverse[0])
        w[:, j] = step * (code - zero)
    return w


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(("cols", "group"), [(40, 40), (40, 8), (300, 64), (150, 150), (37, 10)])
def test_gptq_equals_explicit_column_by_column_updates(cols: int, group: int, symmetric: bool) -> None:
    w, _, c = _case(6, cols, 2 * cols, cols)
    direct = _direct_gptq(w, c, 3, group, symmetric)
    np.testing.assert_allclose(gptq(w, c, 3, group, symmetric), direct, atol=1e-7)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_data_aware_rounding_is_better_than_to_nearest(bits: int) -> None:
    w, _, c = _case(32, 48, 500, bits)
    plain = output_error(w, quantise_prune.quantise(w, bits, 16), c)
    assert output_error(w, gptq(w, c, bits, 16), c) < 0.7 * plain
    assert output_error(w, awq(w, c, bits, 16), c) < plain
    half = hqq(w, bits, 16)
    # The half-quadratic fit lowers the norm it is made for, group by group.
    norms = [
        (np.abs(w - v) ** 0.7).reshape(32, 3, 16).sum(2) for v in (half, quantise_prune.quantise(w, bits, 16))
    ]
    assert (norms[0] <= norms[1] * (1 + 1e-12)).all()
    assert norms[0].sum() < 0.97 * norms[1].sum()
    assert max(len(np.unique(row)) for row in half.reshape(-1, 16).round(9)) <= 2**bits


@pytest.mark.parametrize("pattern", [None, "2:4", "4:8"])
def test_wanda_masks_are_those_of_the_published_rule(pattern: str | None) -> None:
    w, x, c = _case(5, 16, 30, 1)
    scores = np.abs(w) * np.linalg.norm(x, axis=1)
    masked = wanda(w, c, 0.5 if pattern is None else None, pattern)
    size = 16 if pattern is None else int(pattern[-1])
    for row in range(5):
        for start in range(0, 16, size):
            part = slice(start, start + size)
            kept = set(np.argsort(scores[row, part])[size // 2 :])
            assert {j for j in range(size) if masked[row, start + j] != 0} == kept
            assert all(masked[row, start + j] == w[row, start + j] for j in kept)


@pytest.mark.parametrize("pattern", [None, "2:4"])
@pytest.mark.parametrize("seed", range(10))
def test_sparsegpt_is_better_than_masks_without_compensation(pattern: str | None, seed: int) -> None:
    w, x, c = _case(8, 160, 400, seed)
    share = 0.5 if pattern is None else None
    sparse = sparsegpt(w, c, share, pattern)
    assert (sparse == 0).mean() == 0.5
    error = output_error(w, sparse, c)
    others = [
        output_error(w, v, c) for v in (quantise_prune.prune(w, share, pattern), wanda(w, c, share, pattern))
    ]
    assert error < 0.5 * min(others)
    # Its own mask cannot do better than least squares on what it keeps.
    bound = 0.0
    for row, values in zip(w, sparse, strict=True):
        kept = values != 0
        fit = np.linalg.lstsq(x[kept].T, row @ x, rcond=None)[0]
        bound += float(((row @ x - fit @ x[kept]) ** 2).sum()) / x.shape[1]
    assert bound <= error * (1 + 1e-9)


@pytest.mark.parametrize("edit", [gptq, awq])
def test_inputs_without_power_are_rounded_and_not_destroyed(edit: Any) -> None:
    w = np.random.default_rng(0).standard_normal((3, 8))
    for c in (np.zeros((8, 8)), np.diag([1.0] * 4 + [0.0] * 4)):
        rounded = edit(w, c, 8)
        assert np.abs(rounded - w).max() < 0.02
