"""Known learning coefficients against the printed examples and independent derivations."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strati.core.errors import BadInputError
from strati_reproductions.llc_cases.known import deep_linear, independent, monomial, regular, sum_of_powers

EXAMPLES = [
    ([5, 3, 5], 0, "13/2"),
    ([5, 3, 5], 1, "8"),
    ([6, 2, 6], 0, "11/2"),
    ([3, 8, 4], 2, "6"),
    ([4, 4, 4, 4], 1, "13/2"),
    ([10] * 5, 3, "41"),
    ([50] * 4, 10, "1967/2"),
    ([784, 128, 128, 10], 10, "3920"),
]


@pytest.mark.parametrize(("widths", "rank", "value"), EXAMPLES)
def test_published_examples(widths, rank, value):
    assert deep_linear(widths, rank).value == Fraction(value)


def reduced_rank(a: int, h: int, b: int, r: int) -> tuple[Fraction, int]:
    """Reduced-rank regression, two layers: Aoyagi and Watanabe (2005), by its own case distinction."""
    if a + r <= b + h and b + r <= a + h and h + r <= a + b:
        even = (a + h + b + r) % 2 == 0
        square = -((h + r) ** 2) - a**2 - b**2 + 2 * (h + r) * a + 2 * (h + r) * b + 2 * a * b
        return (Fraction(square, 8), 1) if even else (Fraction(square + 1, 8), 2)
    if b + h < a + r:
        return Fraction(h * b - h * r + a * r, 2), 1
    if a + h < b + r:
        return Fraction(h * a - h * r + b * r, 2), 1
    return Fraction(a * b, 2), 1


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.data())
def test_two_layers_agree_with_reduced_rank_regression(a, h, b, data):
    r = data.draw(st.integers(0, min(a, h, b)))
    assert deep_linear([a, h, b], r) == reduced_rank(a, h, b, r)


@given(st.lists(st.integers(1, 12), min_size=3, max_size=6), st.data())
def test_bounds_and_symmetry(widths, data):
    r = data.draw(st.integers(0, min(widths)))
    value, m = deep_linear(widths, r)
    assert deep_linear(widths[::-1], r) == (value, m)
    assert Fraction(r * (widths[0] + widths[-1]) - r * r, 2) <= value
    assert 2 * value <= widths[0] * widths[-1]  # no more than the entries of the matrix itself
    assert m >= 1


def test_all_widths_one_is_a_monomial():
    for layers in (2, 3, 5):
        assert deep_linear([1] * (layers + 1), 0) == monomial([2] * layers)


def test_sums():
    assert independent(regular(2), sum_of_powers([4])) == sum_of_powers([2, 2, 4])
    assert independent(monomial([2, 2]), monomial([2, 2])).multiplicity == 3


@pytest.mark.parametrize(
    "call",
    [
        lambda: deep_linear([3, 3], 1),
        lambda: deep_linear([3, 2, 3], 3),
        lambda: monomial([]),
        lambda: sum_of_powers([0]),
        lambda: regular(-1),
    ],
)
def test_bad_shapes_are_refused(call):
    with pytest.raises(BadInputError):
        call()
