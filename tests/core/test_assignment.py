import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.optimize import linear_sum_assignment

from strati.core.assignment import assign, match

SQUARES = st.integers(1, 9).flatmap(
    lambda n: arrays(np.float64, (n, n), elements=st.floats(-1e3, 1e3, allow_subnormal=False, width=32))
)


@settings(max_examples=200, deadline=None)
@given(SQUARES)
def test_assignment_is_as_good_as_scipys(score):
    columns = assign(score)
    assert sorted(columns) == list(range(len(score)))
    best = score[linear_sum_assignment(score, maximize=True)].sum()
    assert np.isclose(score[np.arange(len(score)), columns].sum(), best, rtol=1e-9, atol=1e-6)


def test_assignment_of_many():
    score = np.random.default_rng(0).standard_normal((150, 150))
    best = linear_sum_assignment(score, maximize=True)[1]
    assert np.array_equal(assign(score), best)


def _best_couples(score):
    """All ways to split six into ordered couples."""
    best = -np.inf
    for order in itertools.permutations(range(6)):
        best = max(best, sum(score[order[k], order[k + 1]] for k in (0, 2, 4)))
    return best


def test_couples_against_all_splits():
    hits = 0
    for seed in range(30):
        score = np.random.default_rng(seed).standard_normal((6, 6))
        first, second = match(score)
        assert sorted([*first, *second]) == list(range(6))
        total = score[first, second].sum()
        best = _best_couples(score)
        assert total <= best + 1e-12
        hits += total > best - 1e-12
    assert hits >= 24  # exchanges of two couples find the best of six almost always


def test_couples_are_exact_where_separated():
    rng = np.random.default_rng(1)
    order = rng.permutation(20)
    score = rng.uniform(0, 1, (20, 20))
    score[order[::2], order[1::2]] += 2
    first, second = match(score)
    assert dict(zip(first, second, strict=True)) == dict(zip(order[::2], order[1::2], strict=True))
