"""Learning coefficients whose value is known exactly: what samplers are held against.

Sums of even powers, monomials, regular models, and deep linear networks (Aoyagi 2024). All values are
rational and are computed as fractions. How they are estimated is in ``llc``.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import combinations
from typing import NamedTuple

from strati.core.errors import BadInputError


class Known(NamedTuple):
    """A learning coefficient and its multiplicity: ``V(eps) ~ eps^value (-ln eps)^(multiplicity - 1)``."""

    value: Fraction
    multiplicity: int


def monomial(powers: Sequence[int]) -> Known:
    """``prod_i |w_i|^(p_i)``: the least ``1/p_i``, as often as it occurs.

    Examples:
        >>> monomial([2, 4]), monomial([2, 2])
        (Known(value=Fraction(1, 4), multiplicity=1), Known(value=Fraction(1, 2), multiplicity=2))
    """
    used = [p for p in powers if p != 0]
    if not used or min(used) < 0:
        raise BadInputError(
            str(list(powers)), "a monomial needs at least one positive power and no negative ones"
        )
    value = min(Fraction(1, p) for p in used)
    return Known(value, sum(Fraction(1, p) == value for p in used))


def sum_of_powers(powers: Sequence[int]) -> Known:
    """``sum_i c_i |w_i|^(p_i)`` with any positive ``c_i``: ``sum_i 1/p_i``, multiplicity 1.

    Examples:
        >>> sum_of_powers([4, 4, 6])
        Known(value=Fraction(2, 3), multiplicity=1)
    """
    if not powers or min(powers) <= 0:
        raise BadInputError(str(list(powers)), "powers must be positive")
    return Known(sum((Fraction(1, p) for p in powers), Fraction(0)), 1)


def regular(rank: int) -> Known:
    """A quadratic of this rank in any number of dimensions, a regular model with that many parameters.

    Examples:
        >>> regular(5)
        Known(value=Fraction(5, 2), multiplicity=1)
    """
    if rank < 0:
        raise BadInputError(str(rank), "a rank is not negative")
    return Known(Fraction(rank, 2), 1)


def independent(*parts: Known) -> Known:
    """A sum of losses of separate parameters: the values add up, ``m = 1 + sum (m_i - 1)``.

    Examples:
        >>> independent(monomial([2, 2]), regular(1))
        Known(value=Fraction(1, 1), multiplicity=2)
    """
    return Known(sum((p.value for p in parts), Fraction(0)), 1 + sum(p.multiplicity - 1 for p in parts))


def deep_linear(widths: Sequence[int], rank: int) -> Known:
    """A deep linear network fitting a matrix of the given rank, where every layer has just that rank.

    With ``M_s = H_s - r`` ascending, the ``k`` smallest (``l = k - 1``, ``S`` their sum) for the first ``k`` with
    ``S >= l M_(k)`` and (``k = L + 1`` or ``S < l M_(k+1)``), ``M = ceil(S/l)``, ``a = S - (M - 1) l``:
    ``lambda = [r (H_0 + H_L) - r^2]/2 + a (l - a)/(4 l) - l (l - 1)/4 (S/l)^2 + 1/2 sum_{i<j<=k} M_i M_j``,
    ``m = a (l - a) + 1``.

    Args:
        widths: ``H_0 .. H_L``, inputs first.
        rank: Of the matrix the network computes.

    References:
        M. Aoyagi, Consideration on the learning efficiency of multiple-layered neural networks with linear
        units, Neural Networks 172 (2024).

    Examples:
        >>> deep_linear([5, 3, 5], 0), deep_linear([10] * 5, 3).value
        (Known(value=Fraction(13, 2), multiplicity=2), Fraction(41, 1))
    """
    if len(widths) < 3:
        raise BadInputError(str(list(widths)), "a deep linear network has at least two layers")
    if not 0 <= rank <= min(widths):
        raise BadInputError(str(rank), f"the rank must lie between 0 and the least width {min(widths)}")
    spare = sorted(h - rank for h in widths)
    total = len(spare)
    for k in range(2, total + 1):
        smallest = spare[:k]
        steps, amount = k - 1, sum(smallest)
        if amount >= steps * smallest[-1] and (k == total or amount < steps * spare[k]):
            break
    ceiling = -(-amount // steps)
    rest = amount - (ceiling - 1) * steps
    value = (
        Fraction(rank * (widths[0] + widths[-1]) - rank * rank, 2)
        + Fraction(rest * (steps - rest), 4 * steps)
        - Fraction(steps * (steps - 1), 4) * Fraction(amount, steps) ** 2
        + Fraction(sum(a * b for a, b in combinations(smallest, 2)), 2)
    )
    return Known(value, rest * (steps - rest) + 1)
