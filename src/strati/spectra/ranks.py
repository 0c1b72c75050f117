"""How many directions a matrix uses: hard rank, stable rank, entropy, and the gap of a collapsed rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from strati.spectra.eigenvalues import Eigenvalues
    from strati.types import FloatArray

_COARSE = 1e-4  # dtypes with a larger spacing (half precision) make max(N, M) eps a share of order one
_COLLAPSED_SHARE = 0.07  # language models carry 1 to 6 % of quasi-null directions without being collapsed
_COLLAPSED_DECADES = 4.0


@dataclass(frozen=True)
class Gap:
    """The widest gap of a spectrum that has a sizeable share of the directions below it.

    Attributes:
        decades: Its width in powers of ten of the eigenvalue.
        below: Number of eigenvalues below it.
        above: Number of eigenvalues above it.
    """

    decades: float
    below: int
    above: int

    @property
    def collapsed(self) -> bool:
        """Whether the rank has collapsed: many decades, and not one or two lone eigenvalues far out.

        The largest eigenvalues of heavy-tailed entries, or strong spikes, can lie decades above the rest; the
        chance of it falls with the power of their number. So the fewer lie above a gap, the wider it must be.
        """
        few = self.above < 0.1 * (self.above + self.below)
        needed = _COLLAPSED_DECADES * (2.0 if self.above < 3 else 1.5 if few else 1.0)
        return self.decades >= needed


def hard_rank(eigenvalues: Eigenvalues) -> int:
    r"""Number of singular values above :math:`\max(N, M)\,\epsilon\,s_\max` of the dtype the weights came in.

    Examples:
        >>> from strati.spectra.eigenvalues import eigenvalues
        >>> hard_rank(eigenvalues(np.outer([1.0, 2.0], [3.0, 4.0, 5.0])))
        1
    """
    return int(np.count_nonzero(np.sqrt(eigenvalues.values) > eigenvalues.tolerance))


def stable_rank(values: FloatArray) -> float:
    """``sum(lambda) / lambda_max``.

    Examples:
        >>> stable_rank(np.array([1.0, 1.0, 2.0]))
        2.0
    """
    return float(np.sum(values / values[-1]))


def entropy(eigenvalues: Eigenvalues) -> float:
    r"""Spectral entropy :math:`-\sum p_i \ln p_i / \ln R` with :math:`p_i = \lambda_i / \sum \lambda`; 0 if ``R = 1``.

    ``R`` is the hard rank. For half-precision weights its tolerance may exceed every singular value, so there
    ``R`` is the rank to working precision.

    Examples:
        >>> from strati.spectra.eigenvalues import eigenvalues
        >>> round(entropy(eigenvalues(np.eye(5))), 12)
        1.0
    """
    values = eigenvalues.values
    if eigenvalues.epsilon < _COARSE:
        rank = hard_rank(eigenvalues)
    else:
        rank = int(np.count_nonzero(values > eigenvalues.rows * np.finfo(np.float64).eps * values[-1]))
    if rank <= 1:
        return 0.0
    shares = values[values > 0] / values.sum()
    shares = shares[shares > 0]
    return float(-np.sum(shares * np.log(shares)) / np.log(rank))


def widest_gap(eigenvalues: Eigenvalues) -> Gap:
    """The widest gap with at least seven per cent of the directions, and two of them, below it.

    What is zero to working precision counts as one rounding error of the largest eigenvalue.

    Examples:
        >>> from strati.spectra.eigenvalues import eigenvalues
        >>> gap = widest_gap(eigenvalues(np.diag([1.0] * 5 + [1e-6] * 5)))
        >>> round(gap.decades), gap.below, gap.collapsed
        (12, 5, True)
    """
    values = eigenvalues.values
    total = values.size
    least = max(int(np.ceil(_COLLAPSED_SHARE * total)), 2)
    if total <= least or values[-1] <= 0:
        return Gap(0.0, 0, total)
    logs = np.log10(np.maximum(values / values[-1], np.finfo(np.float64).eps))
    steps = np.diff(logs)[least - 1 :]
    widest = int(np.argmax(steps))
    below = widest + least
    return Gap(float(steps[widest]), below, total - below)
