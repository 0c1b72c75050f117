"""How many directions a matrix uses: hard rank, stable rank, entropy, and the gap of a collapsed rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from strati.spectra.eigenvalues import COARSE

if TYPE_CHECKING:
    from strati.core.results import FloatArray
    from strati.spectra.eigenvalues import Eigenvalues

_COLLAPSED_SHARE = 0.07  # language models carry 1 to 6 % of quasi-null directions without being collapsed
_COLLAPSED_DECADES = 4.0


@dataclass(frozen=True)
class Gap:
    """The widest gap of a spectrum that has a sizeable share of the directions below it.

    Attributes:
        decades: Its width in powers of ten of the eigenvalue.
        below: Number of eigenvalues below it.
        above: Number of eigenvalues above it.
        rounding: What lies below is no more than rounding of the dtype.
    """

    decades: float
    below: int
    above: int
    rounding: bool = False

    @property
    def collapsed(self) -> bool:
        """Whether the rank has collapsed: many decades, and not one or two lone eigenvalues far out.

        The largest eigenvalues of heavy-tailed entries, or strong spikes, can lie decades above the rest; the
        chance of it falls with the power of their number. So the fewer lie above a gap, the wider it must be.
        Directions that are rounding are none, however wide the gap.
        """
        if self.rounding:
            return True
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


def unresolved(eigenvalues: Eigenvalues) -> int:
    """Number of eigenvalues that are no more than rounding: of the weights' dtype, or of the computation.

    Examples:
        >>> from strati.spectra.eigenvalues import eigenvalues
        >>> W = np.outer(np.arange(1, 9.0), np.arange(1, 7.0) / 7).astype(np.float32)
        >>> unresolved(eigenvalues(W))
        5
    """
    exact = float(np.finfo(np.float64).eps)
    # Eigenvalues of a Gram matrix are known to 1e-16 of the largest; float64 weights get singular values instead.
    working = (16 * exact) ** 2 if eigenvalues.epsilon < 1e-12 else 4 * exact
    return sum(
        int(np.searchsorted(part, max(resolution**2, working * float(part[-1])), side="right"))
        for part, resolution in zip(eigenvalues.parts, eigenvalues.resolutions, strict=True)
        if part.size
    )


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
    if eigenvalues.epsilon < COARSE:
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

    What is zero to working precision counts as one rounding error of the largest eigenvalue. If that many
    directions are no more than rounding of the weights' dtype, the gap is the one above them.

    Examples:
        >>> from strati.spectra.eigenvalues import eigenvalues
        >>> gap = widest_gap(eigenvalues(np.diag([1.0] * 5 + [1e-6] * 5)))
        >>> round(gap.decades), gap.below, gap.collapsed
        (12, 5, True)
    """
    values = eigenvalues.values
    total = values.size
    least = max(int(np.ceil(_COLLAPSED_SHARE * total)), 2)
    if total < 2 or values[-1] <= 0:
        return Gap(0.0, 0, total)
    logs = np.log10(np.maximum(values / values[-1], np.finfo(np.float64).eps))
    lost = unresolved(eigenvalues)
    # Small eigenvalues belong to noise too: of square noise about 4/pi times the relative resolution.
    usual = 4 / np.pi * eigenvalues.relative_resolution
    if total > lost >= max(_COLLAPSED_SHARE, 3 * usual) * total and (lost > 1 or 2 * lost >= total):
        return Gap(float(logs[lost] - logs[lost - 1]), lost, total - lost, rounding=True)
    if total <= least:
        return Gap(0.0, 0, total)
    steps = np.diff(logs)[least - 1 :]
    widest = int(np.argmax(steps))
    below = widest + least
    return Gap(float(steps[widest]), below, total - below)
