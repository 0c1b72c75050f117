r"""Merges: the weights of the parents in a merged layer, and whether updates that are to be merged oppose each other.

:math:`\min_w \| M - \sum_i w_i P_i \|_F^2` over free weights. Parents that are fine-tunes of one base are almost
parallel, so the sum of the weights is known long before each of them is: the standard errors say how well.

The merged matrix was rounded to its dtype. This rounding is no noise: a parent on the same grid attracts it, which
biases least squares towards that parent. The weights are therefore chosen such that the *rounded* mixture has the
least-squares weights of ``M`` (indirect inference). Merging tools round the sum once, or every product, or the running
sum after every parent: the way that reproduces most entries counts. Where the rounded mixture reproduces ``M``, the
weights are known to the few entries that decide; otherwise the errors are those of White (1980), which hold where
errors differ in size from entry to entry, with the bias that rounded parents can cause.

Whether several updates of one base interfere is asked before a merge. Between updates in independent random
orientations the cosine has the variance ``1 / (m n)`` whatever their singular values are, since
:math:`\\mathbb{E} \\langle A, U B V \\rangle^2 = \\|A\\|_F^2 \\|B\\|_F^2 / (m n)` over random rotations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.comparison.update_rank import effective_dtype, rounded, rounding_variance, spacing

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.core.results import FloatArray, IntArray

    _Way = Callable[[FloatArray, Sequence[FloatArray], str], FloatArray]

_FLOAT32 = 2.0**-24  # relative rounding of weights and sums in float32, which merging tools compute in
_SAMPLE = 1 << 15  # entries that decide how far the weights of a reproduced merge may be off
_ROUNDS = 12  # of indirect inference; two to four are typical
_REPRODUCED = 0.01  # share of entries that may differ where the rounded mixture reproduces the merge


OPPOSED = -5.0
"""Standard deviations of a cosine by chance below which two updates oppose each other."""

_SIGN_SHARE = 0.2  # of the entries, the largest ones, whose signs are compared


@dataclass(frozen=True)
class Interference:
    """Two updates of one layer, of several the pair with the smallest cosine.

    Attributes:
        networks: Numbers of the two networks that hold the updates.
        cosine: Between the updates as vectors: 1 the same, 0 unrelated, -1 opposite.
        zscore: The cosine in standard deviations of what random orientations give.
        sign_conflicts: Share of the entries with opposite signs among those that are large in either update; one half
            by chance. ``None`` for adapters.
        written_overlap: Mean squared cosine of the principal angles between what the two write (leading left singular
            vectors; of adapters all).
        by_chance: What two random subspaces of these dimensions give.
    """

    networks: tuple[int, int]
    cosine: float
    zscore: float
    sign_conflicts: float | None
    written_overlap: float
    by_chance: float

    @property
    def opposed(self) -> bool:
        """Whether a merge would cancel a part of both updates."""
        return self.zscore < OPPOSED


def interference(
    updates: Sequence[NDArray[Any]], shape: tuple[int, int], *, least: float = 0.0, signs: bool = True
) -> Interference | None:
    """Compare every two updates of a layer; ``None`` where fewer than two have any entry.

    Args:
        updates: Matrices of one shape; of adapters in the space that they span together.
        shape: Rows and columns of the layer.
        least: Directions below this share of the largest are rounding.
        signs: Whether the entries are those of the layer, so that their signs can be compared.

    Examples:
        >>> rng = np.random.default_rng(0)
        >>> a, b = rng.normal(size=(2, 40, 30))
        >>> interference([a, b - a], (40, 30)).opposed, interference([a, b], (40, 30)).opposed
        (True, False)
    """
    moved = [(n, np.asarray(u, np.float64)) for n, u in enumerate(updates) if np.any(u)]
    pairs = [(x, y) for i, x in enumerate(moved) for y in moved[:i]]
    if not pairs:
        return None
    cosines = [float((a * b).sum() / (np.linalg.norm(a) * np.linalg.norm(b))) for (_, b), (_, a) in pairs]
    worst = int(np.argmin(cosines))
    (later, b), (earlier, a) = pairs[worst]
    written = []
    for matrix in (a, b):
        left, singular, _ = np.linalg.svd(matrix, full_matrices=False)
        above = singular > least * singular[0]
        if signs:  # of a dense update as many directions as carry its weight
            above &= np.arange(singular.size) < np.ceil(np.square(singular / singular[0]).sum() - 1e-9)
        written.append(left[:, above])
    ranks = sorted(basis.shape[1] for basis in written)
    return Interference(
        networks=(earlier, later),
        cosine=cosines[worst],
        zscore=cosines[worst] * float(np.sqrt(shape[0] * shape[1])),
        sign_conflicts=_sign_conflicts(a, b) if signs else None,
        written_overlap=min(float(np.square(written[0].T @ written[1]).sum()) / ranks[0], 1.0),
        by_chance=ranks[1] / shape[0],
    )


def _sign_conflicts(a: FloatArray, b: FloatArray) -> float:
    large = np.zeros(a.shape, bool)
    for update in (a, b):
        sizes = np.abs(update)
        large |= sizes >= np.quantile(sizes, 1 - _SIGN_SHARE)
    both = large & (a != 0) & (b != 0)
    return float(np.mean(np.sign(a[both]) != np.sign(b[both]))) if both.any() else 0.0


@dataclass(frozen=True)
class Mixture:
    """How a merged layer is made of its parents.

    Attributes:
        weights: One per parent.
        stderr: Their standard errors; ``None`` where the parents cannot be distinguished.
        residual: What neither the mixture nor rounding explains, relative to what the parents differ by: the root
            mean square of their distances. 0 where rounding explains all that is left.
        hidden: What rounding could hide, on the same scale: a further parent whose share is smaller does not show. 0
            where the rounded mixture reproduces the merge.
    """

    weights: tuple[float | None, ...]
    stderr: tuple[float | None, ...]
    residual: float | None
    hidden: float | None = None


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

    def white_errors(self, residuals: FloatArray) -> FloatArray:
        """Standard errors of the weights: larger entries have larger rounding errors and weigh most."""
        many = len(self.basis)
        squared = np.square(residuals) * (residuals.size / max(residuals.size - many, 1))
        spread = np.array([[float((a * squared) @ b) for b in self.basis] for a in self.basis])
        scale = np.outer(self.scales, self.scales)
        covariance = self.inverse @ (spread / scale) @ self.inverse / scale
        return np.asarray(np.sqrt(np.diag(self.back @ covariance @ self.back.T).clip(min=0.0)), np.float64)


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
    fits = []
    for way in _WAYS:
        fits.append(_indirect(fit, target, plain, way, columns, dtype))
        if fits[-1].wrong <= _REPRODUCED * target.size:
            break
    best = min(fits, key=lambda candidate: candidate.wrong)
    weights = fit.back @ best.coordinates
    reproduced = best.wrong <= _REPRODUCED * target.size
    products = [w * column for w, column in zip(weights, columns, strict=True)]
    parents_noise = [rounding_variance(p).reshape(-1) for p in parents]
    if reproduced:
        errors = _reproducing_range(
            fit, weights, target, lambda w, picked: best.way(w, [column[picked] for column in columns], dtype)
        )
    else:
        white = fit.white_errors(target - fit.mixed(plain))
        shifts = [fit.back @ (other.coordinates - best.coordinates) for other in fits]
        shifts.append(fit.back @ (best.coordinates - plain))
        errors = np.sqrt(white**2 + np.square(shifts).sum(axis=0) + _bias(fit, parents_noise, plain) ** 2)
    errors = np.hypot(errors, _FLOAT32 * np.abs(weights))
    apart = float(np.mean([np.square(a - b).sum() for i, a in enumerate(columns) for b in columns[:i]]))
    noise = (many - 1) * spacing(target, dtype) ** 2 + sum(spacing(term, dtype) ** 2 for term in products)
    noise = noise / 12 + sum(w**2 * v for w, v in zip(weights, parents_noise, strict=True))
    noise = noise + np.reshape(variance, -1)
    residual = 0.0 if reproduced else _beyond(target - fit.mixed(best.coordinates), noise)
    return Mixture(
        tuple(float(w) for w in weights),
        tuple(float(e) for e in errors),
        float(np.sqrt(residual / apart)),
        0.0 if reproduced else float(np.sqrt(noise.sum() / apart)),
    )


def _round_sum(weights: FloatArray, columns: Sequence[FloatArray], dtype: str) -> FloatArray:
    return rounded(np.sum([w * column for w, column in zip(weights, columns, strict=True)], axis=0), dtype)


def _round_products(weights: FloatArray, columns: Sequence[FloatArray], dtype: str) -> FloatArray:
    products = [rounded(w * column, dtype) for w, column in zip(weights, columns, strict=True)]
    return rounded(np.sum(products, axis=0), dtype)


def _round_running_sum(weights: FloatArray, columns: Sequence[FloatArray], dtype: str) -> FloatArray:
    total = np.zeros_like(columns[0])
    for w, column in zip(weights, columns, strict=True):
        total = rounded(total + rounded(w * column, dtype), dtype)
    return total


_WAYS: tuple[_Way, ...] = (_round_sum, _round_products, _round_running_sum)


@dataclass(frozen=True)
class _IndirectFit:
    """Coordinates whose rounded mixture has the least-squares coordinates of the target, and entries that differ."""

    coordinates: FloatArray
    wrong: int
    way: _Way


def _indirect(
    fit: _LeastSquares,
    target: FloatArray,
    plain: FloatArray,
    way: _Way,
    columns: Sequence[FloatArray],
    dtype: str,
) -> _IndirectFit:
    best = _IndirectFit(plain, target.size + 1, way)
    current = plain
    for _ in range(_ROUNDS):
        difference = target - way(fit.back @ current, columns, dtype)
        wrong = int(np.count_nonzero(difference))
        if wrong <= best.wrong:
            best = _IndirectFit(current, wrong, way)
        if wrong == 0:
            break
        current = current + fit.coordinates(difference)
    return best


def _reproducing_range(
    fit: _LeastSquares,
    weights: FloatArray,
    target: FloatArray,
    merge: Callable[[FloatArray, IntArray], FloatArray],
) -> FloatArray:
    """How far each weight can move, alone or followed by the others, before more entries are rounded wrongly."""
    picked = np.linspace(0, target.size - 1, min(target.size, _SAMPLE)).astype(np.int64)

    def wrong(moved: FloatArray) -> int:
        return int(np.count_nonzero(merge(moved, picked) != target[picked]))

    covariance = fit.back @ (fit.inverse / np.outer(fit.scales, fit.scales)) @ fit.back.T
    allowed = 2 * wrong(weights) + 2
    start = _FLOAT32 * np.maximum(np.abs(weights), 1e-6)
    ranges = start.copy()
    for parent in range(weights.size):
        for direction in (covariance[:, parent] / covariance[parent, parent], np.eye(weights.size)[parent]):
            distance = start[parent]
            while distance < 1 and allowed >= min(
                wrong(weights + side * distance * direction) for side in (-1, 1)
            ):
                distance *= 2
            ranges[parent] = max(ranges[parent], distance)
    return ranges


def _beyond(residuals: FloatArray, noise: FloatArray) -> float:
    """Energy beyond rounding by more than four standard deviations.

    The square of a uniform error has a variance of 0.8 times its mean squared.
    """
    beyond = float(np.square(residuals).sum() - noise.sum())
    return beyond if beyond > 4 * float(np.sqrt(0.8 * np.square(noise).sum())) else 0.0


def _bias(fit: _LeastSquares, noise: Sequence[FloatArray], plain: FloatArray) -> FloatArray:
    """How far rounding of the parents, after the merge was made, pulls the weights together."""
    totals = np.array([float(v.sum()) for v in noise])
    gram = np.array([[float((totals * a * b).sum()) for b in fit.back.T] for a in fit.back.T])
    scale = np.outer(fit.scales, fit.scales)
    return np.asarray(np.abs(fit.back @ (fit.inverse / scale) @ gram @ plain), np.float64)
