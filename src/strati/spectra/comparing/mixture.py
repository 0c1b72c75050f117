r"""A merged network as a mixture of its parents: least squares, layer by layer.

:math:`\min_w \| M - \sum_i w_i P_i \|_F^2` over free weights. Parents that are fine-tunes of one base are almost
parallel, so the sum of the weights is sure long before each of them is: the standard errors say how sure. They are
those of White (1980), which hold where errors differ in size from entry to entry, as those of rounding do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Mixture:
    """How a merged layer is made of its parents.

    Attributes:
        weights: One per parent.
        stderr: Their standard errors; ``None`` where the parents cannot be told apart.
        residual: What the mixture does not explain, ``||M - sum w P|| / ||M||``.
    """

    weights: tuple[float | None, ...]
    stderr: tuple[float | None, ...]
    residual: float | None


def mixture(parents: Sequence[NDArray[Any]], merged: NDArray[Any]) -> Mixture:
    """Weights of the parents in a merged matrix.

    The Gram matrix is taken of the parents' differences from their mean beside the mean itself, which keeps the
    digits that near-parallel parents would lose.

    Args:
        parents: Matrices of one shape.
        merged: The matrix that was made of them.

    Examples:
        >>> rng = np.random.default_rng(0)
        >>> A, B = rng.normal(size=(2, 30, 20))
        >>> found = mixture([A, B], 0.7 * A + 0.3 * B)
        >>> [round(w, 6) for w in found.weights], round(found.residual, 6)
        ([0.7, 0.3], 0.0)
    """
    many = len(parents)
    target = np.asarray(merged, np.float64).reshape(-1)
    # Coordinates: the mean of all parents, and each parent but the last against the mean.
    columns = [np.asarray(p, np.float64).reshape(-1) for p in parents]
    mean = sum(columns[1:], columns[0].copy()) / many
    basis = [mean, *(column - mean for column in columns[:-1])]
    scales = np.array([float(np.linalg.norm(b)) for b in basis])
    total = float(np.linalg.norm(target))
    if total == 0 or np.any(scales <= 1e-12 * scales.max(initial=0.0)):
        return Mixture((None,) * many, (None,) * many, None)
    design = np.array([[float(a @ b) for b in basis] for a in basis]) / np.outer(scales, scales)
    answer = np.array([float(b @ target) for b in basis]) / scales
    if np.linalg.cond(design) > 1e12:
        return Mixture((None,) * many, (None,) * many, None)
    inverse = np.linalg.inv(design)
    inner = inverse @ answer
    rest = target - sum(c / s * b for c, s, b in zip(inner, scales, basis, strict=True))
    # Rounding leaves larger errors in larger entries, which also weigh most: White's covariance counts them so.
    squared = np.square(rest) * (target.size / max(target.size - many, 1))
    spread = np.array([[float((a * squared) @ b) for b in basis] for a in basis]) / np.outer(scales, scales)
    covariance = inverse @ spread @ inverse / np.outer(scales, scales)
    # Back to weights of the parents: w_i = (c_0 - sum c) / n + c_i, the last parent without a c of its own.
    back = np.zeros((many, many))
    back[:, 0] = 1 / many
    back[:, 1:] = -1 / many
    back[: many - 1, 1:] += np.eye(many - 1)
    weights = back @ (inner / scales)
    errors = np.sqrt(np.diag(back @ covariance @ back.T).clip(min=0.0))
    return Mixture(
        tuple(float(w) for w in weights),
        tuple(float(e) for e in errors),
        float(np.linalg.norm(rest)) / total,
    )
