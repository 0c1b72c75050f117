r"""Is ``B`` the rounding of ``A`` plus a matrix of rank k? The smallest such k.

``B = round(A + L)`` puts every entry of ``L`` into an interval, :math:`|L_{ij} - (B - A)_{ij}| \le u_{ij}/2` with the
spacing ``u`` of the dtype. Whether a matrix of rank k lies in all intervals is asked by alternating projections: clip
into the intervals, project onto rank k, repeat. This sees directions far below the noise that one would fear from
rounding, for the rounding of a sum is no noise: it is known. A full fine-tune is not explained by any small k.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import scipy.linalg

if TYPE_CHECKING:
    from strati.types import FloatArray

_EXPLAINED = 2e-4  # share of rounding's energy by which entries may still miss their intervals
_ROUNDS = 24
_OVER = 0.8  # over-relaxation of the projection


@dataclass(frozen=True)
class Fit:
    """How well a rank explains a difference.

    Attributes:
        explained: Whether all intervals are met but for a rest that shrinks to nothing.
        missed: What is missing to the intervals, entry by entry.
    """

    explained: bool
    missed: FloatArray


@dataclass(frozen=True)
class Smallest:
    """The smallest rank that explains a difference, and what one less leaves unexplained."""

    rank: int
    missed: FloatArray


def smallest_rank(step: FloatArray, half: FloatArray, start: int) -> Smallest | None:
    """The smallest rank, up to a sixth of the shorter side, whose rounding gives the difference.

    Beyond that a matrix has so many parameters that noise of a second rounding is fitted too.

    Args:
        step: ``B - A``.
        half: Half the spacing at each entry of ``B``.
        start: Where to begin looking.

    Returns:
        ``None`` where no such rank explains it.

    Examples:
        >>> rng = np.random.default_rng(0)
        >>> A = np.round(rng.normal(size=(90, 60)) * 8) / 8
        >>> L = 0.1 * rng.normal(size=(90, 2)) @ rng.normal(size=(2, 60))
        >>> smallest_rank(np.round((A + L) * 8) / 8 - A, np.full(A.shape, 1 / 16), start=1).rank
        2
    """
    tall, width = (step, half) if step.shape[0] >= step.shape[1] else (step.T, half.T)
    size = tall.shape[1]
    limit = max(size // 6, min(start, size // 2))
    if limit < 1:
        return None
    _, vectors = scipy.linalg.eigh(tall.T @ tall, subset_by_index=(size - limit, size - 1))
    leading: FloatArray = vectors[:, ::-1]
    fits = {0: Fit(bool((np.abs(tall) <= width).all()), tall)}

    def explained(rank: int) -> bool:
        if rank not in fits:
            fits[rank] = _fit(tall, width, leading[:, :rank])
        return fits[rank].explained

    high = min(max(start, 1), limit)
    while not explained(high):
        if high == limit:
            return None
        high = min(2 * high, limit)
    low = -1  # explains nothing, by definition
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if explained(middle) else (middle, high)
    if high > 0:
        explained(high - 1)
    return Smallest(high, fits[max(high - 1, 0)].missed)


def _fit(step: FloatArray, half: FloatArray, vectors: FloatArray) -> Fit:
    low, high = step - half, step + half
    energy = float(np.square(half).sum()) / 3
    part = (step @ vectors) @ vectors.T
    history: list[float] = []
    for _ in range(_ROUNDS):
        missed = np.clip(part, low, high) - part
        history.append(float(np.square(missed).sum()) / energy)
        if history[-1] < _EXPLAINED:
            return Fit(True, missed)
        if len(history) > 6 and history[-1] > 0.8 * history[-4]:  # no longer shrinking: the rank does not do
            break
        target = part + (1 + _OVER) * missed
        vectors = np.linalg.qr(target.T @ (target @ vectors))[0]
        part = (target @ vectors) @ vectors.T
    return Fit(False, missed)
