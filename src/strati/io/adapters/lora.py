r"""One low-rank update, :math:`\Delta W = s\,B A`, and what can be said of it without ever forming the product.

``B`` is ``rows x r`` and ``A`` is ``r x cols``. With the triangular factors of :math:`B = Q_B R_B` and
:math:`A^T = Q_A R_A` the ``r x r`` core :math:`s\,R_B R_A^T` has the update's singular values, all of them that are not
zero by construction (Hu et al. 2021; the rule for ``s``: ``alpha / r``, or ``alpha / sqrt(r)`` for rank-stabilised
LoRA, Kalajdzievski 2023).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.core.results import FloatArray

_GAP = 4.0  # a direction this many times stronger than the next is set apart from it
_SLACK = 2.0  # noise's singular values may spread this many times more than the law of large matrices says


@dataclass(frozen=True)
class AdapterUpdate:
    """A low-rank update of one weight, not yet read.

    Attributes:
        name: The weight it is added to.
        rows: Rows of the update, outputs first.
        cols: Its columns; of a kernel, inputs times positions.
        rank: The rank it was given.
        scale: What the product is multiplied by; ``None`` where no file says, and 1 is used.
        factors: Reads ``B`` (rows x rank) and ``A`` (rank x cols).
        shape: The shape of the weight as the network stores it; ``None`` where only the base knows.
        magnitude: Reads DoRA's length of every output row of the merged weight; ``None`` for plain LoRA.
        turned: The network stores the weight inputs first.
        adapter: The adapter's name, where a model holds several.
        table: It updates a table of embeddings, whose outputs are its columns.
        expert: Which expert of a fused tensor it belongs to; ``None`` for a weight of its own.
    """

    name: str
    rows: int
    cols: int
    rank: int
    scale: float | None
    factors: Callable[[], tuple[NDArray[Any], NDArray[Any]]] = field(repr=False)
    shape: tuple[int, ...] | None = None
    magnitude: Callable[[], NDArray[Any]] | None = field(default=None, repr=False)
    turned: bool = False
    adapter: str | None = None
    table: bool = False
    expert: int | None = None

    def product(self) -> NDArray[np.float32]:
        """``s B A``, rows x cols."""
        left, right = self.factors()
        with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is said of the layer
            product: NDArray[np.float32] = np.float32(1.0 if self.scale is None else self.scale) * (
                left.astype(np.float32) @ right.astype(np.float32)
            )
        return product

    def core(self) -> FloatArray:
        """The ``r x r`` matrix with the singular values of ``s B A``."""
        left, right = self.factors()
        return core(left, right, 1.0 if self.scale is None else self.scale)

    def used_rank(self) -> int | None:
        """How many of its directions were used; 0 for one never trained, ``None`` where entries are not finite."""
        left, right = self.factors()
        small = core(left, right, 1.0)
        if not np.isfinite(small).all():
            return None
        singular: FloatArray = np.linalg.svd(small, compute_uv=False).astype(np.float64)
        return used_rank(singular, self.rows, self.cols, resolution(left, right))


def core(left: NDArray[Any], right: NDArray[Any], scale: float) -> FloatArray:
    """The small matrix with the singular values of ``scale left right``.

    Examples:
        >>> rng = np.random.default_rng(0)
        >>> B, A = rng.normal(size=(30, 3)), rng.normal(size=(3, 20))
        >>> small = np.linalg.svd(core(B, A, 2.0), compute_uv=False)
        >>> bool(np.allclose(small, np.linalg.svd(2 * B @ A, compute_uv=False)[:3]))
        True
    """
    tall: Any = np.linalg.qr(left.astype(np.float64), mode="r")
    wide: Any = np.linalg.qr(right.astype(np.float64).T, mode="r")
    small: FloatArray = scale * (tall @ wide.T)
    return small


def resolution(left: NDArray[Any], right: NDArray[Any]) -> float:
    """The relative size below which a direction is rounding of the stored factors."""
    import ml_dtypes

    return max(float(ml_dtypes.finfo(array.dtype).eps) for array in (left, right))


def used_rank(singular: FloatArray, rows: int, cols: int, eps: float) -> int:
    r"""Directions beyond what is left of the initial noise.

    ``B`` starts at zero, so that whatever it adds was trained: directions count unless they are rounding, or the rest
    that follows a gap is no more than noise in ``B`` would give (singular values of noise in ``r`` columns of ``n``
    entries lie within :math:`(1 + \sqrt{r/n}) / (1 - \sqrt{r/n})` of each other).

    Args:
        singular: Singular values of the update, falling.
        rows: Its rows.
        cols: Its columns.
        eps: Relative resolution of the stored factors.

    Examples:
        >>> used_rank(np.zeros(8), 64, 64, 1e-7), used_rank(np.array([5.0, 3.0, 0.01, 0.009]), 640, 640, 1e-7)
        (0, 2)
    """
    if singular.size == 0 or not singular[0] > 0:
        return 0
    above_rounding = singular[singular > singular[0] * eps * math.sqrt(max(rows, cols))]
    count = above_rounding.size
    ratio = math.sqrt(count / max(rows, count + 1))
    spread = _SLACK * (1 + ratio) / (1 - ratio) if ratio < 1 else math.inf
    for k in range(1, count):
        if (
            above_rounding[k - 1] > _GAP * above_rounding[k]
            and above_rounding[k] <= spread * above_rounding[-1]
        ):
            return k
    return int(count)
