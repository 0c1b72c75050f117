r"""Versions of a layer that are all low-rank updates, compared without ever forming one of them.

With :math:`\Delta_i = B_i A_i`, orthonormal :math:`Q` for the columns of all ``B`` side by side and :math:`P` for the
rows of all ``A``, every :math:`Q^T \Delta_i P` is a square matrix of the ranks' sum. Norms, angles, singular values and
mixtures of the updates are those of these small matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.comparison.dtypes import is_conversion
from strati.comparison.results import Interference
from strati.comparison.update import Update, update_between
from strati.comparison.update_rank import RankTest, UpdateKind
from strati.io.adapters.lora import resolution

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.core.results import FloatArray
    from strati.io.adapters.lora import AdapterUpdate

    Matrix = NDArray[Any]
    Factors = Sequence[Matrix]


def scaled_factors(update: AdapterUpdate) -> list[Matrix]:
    """The factors of an update, ``s B`` and ``A``; their dtypes say how finely they were stored."""
    left, right = update.factors()
    scale = np.asarray(1.0 if update.scale is None else update.scale)
    return [left, right, scale]


def reduced(versions: Sequence[Factors]) -> list[FloatArray]:
    """The updates in the space that they span together.

    Examples:
        >>> rng = np.random.default_rng(0)
        >>> updates = [[rng.normal(size=(50, 3)), rng.normal(size=(3, 40)), np.asarray(s)] for s in (2.0, 0.5)]
        >>> a, b = reduced(updates)
        >>> whole = 0.5 * updates[1][0] @ updates[1][1] - 2 * updates[0][0] @ updates[0][1]
        >>> a.shape, bool(np.isclose(np.linalg.norm(b - a), np.linalg.norm(whole)))
        ((6, 6), True)
    """
    lefts = [left.astype(np.float64) for left, _, _ in versions]
    rights = [right.astype(np.float64) for _, right, _ in versions]
    outputs = np.linalg.qr(np.concatenate(lefts, axis=1))[0]
    inputs = np.linalg.qr(np.concatenate(rights, axis=0).T)[0]
    return [
        float(scale) * (outputs.T @ left) @ (right @ inputs)
        for left, right, (_, _, scale) in zip(lefts, rights, versions, strict=True)
    ]


@dataclass(frozen=True)
class AdapterStep:
    """What lies between the updates of two adapters."""

    update: Update
    interference: Interference | None


def step_between(versions: Sequence[Factors], small: Sequence[FloatArray]) -> AdapterStep:
    """The step from the first to the last of several updates.

    Args:
        versions: Their factors; all of one shape and finite.
        small: What :func:`reduced` makes of them.
    """
    rows, cols = versions[0][0].shape[0], versions[0][1].shape[1]
    first, last = small[0], small[-1]
    found = update_between(first, last)
    eps = max(resolution(left, right) for left, right, _ in (versions[0], versions[-1]))
    least = eps * sqrt(max(rows, cols)) * max(float(np.linalg.norm(m, 2)) for m in (first, last))
    chance = None
    if found.overlap_by_chance is not None:
        chance = found.directions * (1 / rows + 1 / cols) / 2
    kept = found.eigenvalues[np.sqrt(found.eigenvalues) > least]
    return AdapterStep(
        Update(
            relative_change=found.relative_change,
            stable_rank=float(found.eigenvalues.sum() / found.eigenvalues[-1]) if kept.size else None,
            rank=_kind(versions, int(kept.size), min(rows, cols)),
            subspace_overlap=found.subspace_overlap,
            directions=found.directions,
            overlap_by_chance=chance,
            eigenvalues=found.eigenvalues,
        ),
        _interference(first, last, rows, eps * sqrt(max(rows, cols))),
    )


def _kind(versions: Sequence[Factors], rank: int, size: int) -> RankTest:
    """Everything beyond rounding of the stored factors was trained; equal factors are the same update."""
    if rank:
        low = rank <= max(1, size // 2) and rank < size
        return RankTest(rank, 0.0, UpdateKind.LOW_RANK if low else UpdateKind.DENSE)
    pairs = list(zip(versions[0], versions[-1], strict=True))
    if all(np.array_equal(a, b) for a, b in pairs):
        return RankTest(0, None, UpdateKind.UNTOUCHED)
    converted = all(a.shape == b.shape and is_conversion(a, b) for a, b in pairs)
    return RankTest(0, 1.0, UpdateKind.ROUNDING if converted else UpdateKind.UNDECIDED)


def _interference(a: FloatArray, b: FloatArray, rows: int, least: float) -> Interference | None:
    """Whether two adapters write the same directions; ``None`` where one was never trained."""
    size = float(np.linalg.norm(a) * np.linalg.norm(b))
    if size == 0:
        return None
    written = []
    for matrix in (a, b):
        left, singular, _ = np.linalg.svd(matrix)
        written.append(left[:, singular > least * singular[0]])
    many = sorted(basis.shape[1] for basis in written)
    overlap = float(np.square(written[0].T @ written[1]).sum()) / many[0]
    return Interference(float((a * b).sum()) / size, min(overlap, 1.0), many[1] / rows)
