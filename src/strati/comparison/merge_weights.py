r"""A merged network as a mixture of its parents: least squares, layer by layer.

:math:`\min_w \| M - \sum_i w_i P_i \|_F^2` over free weights. Parents that are fine-tunes of one base are almost
parallel, so the sum of the weights is known long before each of them is: the standard errors say how well.

The merged matrix was rounded to its dtype. This rounding is no noise: a parent on the same grid attracts it, which
biases least squares towards that parent. The weights are therefore chosen such that the *rounded* mixture has the
least-squares weights of ``M`` (indirect inference). Where the rounded mixture reproduces ``M``, the weights are known
to the few entries that decide; otherwise the errors are those of White (1980), which hold where errors differ in size
from entry to entry, with the bias that rounded parents can cause.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.comparison.dtypes import effective_dtype, rounded, rounding_variance

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.core.results import FloatArray

_ROUNDS = 12  # of indirect inference; two to four are typical
_REPRODUCED = 0.01  # share of entries that may differ where the rounded mixture reproduces the merge


@dataclass(frozen=True)
class Mixture:
    """How a merged layer is made of its parents.

    Attributes:
        weights: One per parent.
        stderr: Their standard errors; ``None`` where the parents cannot be distinguished.
        residual: What neither the mixture nor rounding explains, relative to what the parents differ by: the root
            mean square of their distances. 0 where rounding explains all that is left.
    """

    weights: tuple[float | None, ...]
    stderr: tuple[float | None, ...]
    residual: float | None


@dataclass(frozen=True)
class _LeastSquares:
    """Least squares over the parents' mean and each parent's difference from it.

    These coordinates keep the digits that near-parallel parents would lose.
    """

    basis: list[FloatArray]
    scales: FloatArray
    inverse: FloatArray
    back: FloatArray

    @classmethod
    def of(cls, columns: Sequence[FloatArray]) -> _LeastSquares | None:
        """``None`` where the parents cannot be distinguished."""
        many = len(columns)
        mean = sum(columns[1:], columns[0].copy()) / many
        basis = [mean, *(column - mean for column in columns[:-1])]
        scales = np.array([float(np.linalg.norm(b)) for b in basis])
        if np.any(scales <= 1e-12 * scales.max(initial=0.0)):
            return None
        design = np.array([[float(a @ b) for b in basis] for a in basis]) / np.outer(scales, scales)
        if np.linalg.cond(design) > 1e12:
            return None
        # Back to weights of the parents: w_i = (c_0 - sum c) / n + c_i, the last parent without a c of its own.
        back = np.zeros((many, many))
        back[:, 0] = 1 / many
        back[:, 1:] = -1 / many
        back[: many - 1, 1:] += np.eye(many - 1)
        return cls(basis, scales, np.asarray(np.linalg.inv(design), np.float64), back)

    def coordinates(self, target: FloatArray) -> FloatArray:
        answer = np.array([float(b @ target) for b in self.basis]) / self.scales
        return np.asarray(self.inverse @ answer / self.scales, np.float64)

    def mixed(self, coordinates: FloatArray) -> FloatArray:
        return np.asarray(sum(c * b for c, b in zip(coordinates, self.basis, strict=True)), np.float64)

    def white_errors(self, rest: FloatArray) -> FloatArray:
        """Standard errors of the weights: larger entries have larger rounding errors and weigh most."""
        many = len(self.basis)
        squared = np.square(rest) * (rest.size / max(rest.size - many, 1))
        spread = np.array([[float((a * squared) @ b) for b in self.basis] for a in self.basis])
        scale = np.outer(self.scales, self.scales)
        covariance = self.inverse @ (spread / scale) @ self.inverse / scale
        return np.asarray(np.sqrt(np.diag(self.back @ covariance @ self.back.T).clip(min=0.0)), np.float64)

    def only(self, parent: int) -> FloatArray:
        """A parent's difference from what the others can explain, times its weight's leverage."""
        row = self.back[parent] / self.scales @ self.inverse / self.scales
        direction = self.mixed(row)
        return np.asarray(direction / float(direction @ direction), np.float64)


def mixture(
    parents: Sequence[NDArray[Any]], merged: NDArray[Any], *, variance: FloatArray | float = 0.0
) -> Mixture:
    """Weights of the parents in a merged matrix.

    Args:
        parents: Matrices of one shape.
        merged: The matrix that was made of them, in the dtype it is stored in.
        variance: Variance per entry of rounding that the dtypes do not show (quantised networks).

    Examples:
        >>> rng = np.random.default_rng(0)
        >>> A, B = rng.normal(size=(2, 30, 20))
        >>> merge = mixture([A, B], 0.7 * A + 0.3 * B)
        >>> [round(w, 6) for w in merge.weights], round(merge.residual, 6)
        ([0.7, 0.3], 0.0)
    """
    many = len(parents)
    target = np.asarray(merged, np.float64).reshape(-1)
    columns = [np.asarray(p, np.float64).reshape(-1) for p in parents]
    fit = _LeastSquares.of(columns)
    if fit is None or not target.any():
        return Mixture((None,) * many, (None,) * many, None)
    dtype = effective_dtype(merged)
    plain = fit.coordinates(target)
    inner, wrong = _indirect(fit, target, plain, dtype)
    weights = fit.back @ inner
    spacing = np.sqrt(12 * rounding_variance(merged).reshape(-1))
    parents_noise = [rounding_variance(p).reshape(-1) for p in parents]
    if np.count_nonzero(wrong) <= _REPRODUCED * target.size:
        # A weight off by d rounds d |P| / u of the entries differently: so far off may it be.
        undecided = np.count_nonzero(wrong) + 1
        errors = np.array([undecided / float((np.abs(fit.only(i)) / spacing).sum()) for i in range(many)])
    else:
        white = fit.white_errors(target - fit.mixed(plain))
        # How the merge was rounded is not known here: how much the weights depend on it, the sum or each product.
        products = [rounded(w * column, dtype) for w, column in zip(weights, columns, strict=True)]
        by_product = fit.coordinates(rounded(np.sum(products, axis=0), dtype))
        shifts = [fit.back @ (inner - plain), fit.back @ (by_product - inner)]
        errors = np.sqrt(white**2 + np.square(shifts).sum(axis=0) + _bias(fit, parents_noise, plain) ** 2)
    residual = _residual(target - fit.mixed(inner), spacing**2 / 12, weights, parents_noise, variance)
    apart = np.mean([float(np.square(a - b).sum()) for i, a in enumerate(columns) for b in columns[:i]])
    residual = float(np.sqrt(residual / apart))
    return Mixture(tuple(float(w) for w in weights), tuple(float(e) for e in errors), residual)


def _indirect(
    fit: _LeastSquares, target: FloatArray, plain: FloatArray, dtype: str
) -> tuple[FloatArray, FloatArray]:
    """Coordinates whose rounded mixture has the least-squares coordinates of the target, and what is left."""
    best, fewest = plain, target - rounded(fit.mixed(plain), dtype)
    current = plain
    for _ in range(_ROUNDS):
        wrong = target - rounded(fit.mixed(current), dtype)
        if np.count_nonzero(wrong) <= np.count_nonzero(fewest):
            best, fewest = current, wrong
        if not wrong.any():
            break
        current = current + fit.coordinates(wrong)
    return best, fewest


def _residual(
    rest: FloatArray,
    own: FloatArray,
    weights: FloatArray,
    parents: Sequence[FloatArray],
    variance: FloatArray | float,
) -> float:
    """Energy beyond rounding: of the sum, of the parents or their multiples, and of quantised networks."""
    noise = own + sum(w**2 * v for w, v in zip(weights, parents, strict=True)) + np.reshape(variance, -1)
    if not np.any(variance):
        half_widths = [
            np.sqrt(3 * own),
            *(abs(w) * np.sqrt(3 * v) for w, v in zip(weights, parents, strict=True)),
        ]
        if np.count_nonzero(np.abs(rest) > sum(half_widths) * (1 + 1e-6)) <= _REPRODUCED * rest.size:
            return 0.0
    # Four standard deviations of the energy of uniform errors, whose squares vary by 0.8 of their mean squared.
    beyond = float(np.square(rest).sum() - noise.sum())
    return beyond if beyond > 4 * float(np.sqrt(0.8 * np.square(noise).sum())) else 0.0


def _bias(fit: _LeastSquares, noise: Sequence[FloatArray], plain: FloatArray) -> FloatArray:
    """How far rounding of the parents, after the merge was made, pulls the weights together."""
    totals = np.array([float(v.sum()) for v in noise])
    gram = np.array([[float((totals * a * b).sum()) for b in fit.back.T] for a in fit.back.T])
    scale = np.outer(fit.scales, fit.scales)
    return np.asarray(np.abs(fit.back @ (fit.inverse / scale) @ gram @ plain), np.float64)
