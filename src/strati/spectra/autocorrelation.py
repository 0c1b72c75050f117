"""Correlation of rows, or of columns, that stand some places apart: which lags show it beyond chance, and how strongly.

In random order the product of two rows is any off-diagonal entry of the Gram matrix, so the mean of those entries'
squares, which the eigenvalues and the sizes know, gives the standard error of a lag's sum of products. Of large
matrices a sketch (the rows times random signs) is looked at first, and only lags that stand out there are summed in
full.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.core.results import FloatArray

BEYOND = 5.0
"""Standard errors from which a correlation is beyond chance."""

_MOST = 48  # lags looked at
_SIGNS = 48  # columns of a sketch
_WHOLE = 1 << 15  # entries up to which no sketch is needed
_STRIP = 1 << 21  # entries looked at in one go
_IN_FULL = 16  # lags summed in full at most
_SAME = 0.1  # share of the first correlation by which later ones may stray from a first-order autoregression
_LEAST = 0.05  # of the mean: the least population eigenvalue


@dataclass(frozen=True)
class Correlation:
    """How rows depend on those before them.

    Attributes:
        lags: Distances at which rows are correlated beyond chance, the strongest first; empty if there are none.
        values: The correlations at these distances.
        first_order: Together they are those of a first-order autoregression.
    """

    lags: tuple[int, ...] = ()
    values: tuple[float, ...] = ()
    first_order: bool = False

    @property
    def longer(self) -> float:
        """By how much correlation increases the variance of a sum of squares."""
        if self.first_order:
            r = self.values[self.lags.index(1)]
            return (1 + r**2) / (1 - r**2)
        return 1 + 2 * sum(r**2 for r in self.values)

    def spectrum(self, count: int) -> FloatArray:
        """Population eigenvalues of ``count`` rows that depend on each other so, in no order of size; their mean is 1.

        Examples:
            >>> Correlation().spectrum(3).tolist()
            [1.0, 1.0, 1.0]
            >>> round(float(Correlation((2,), (0.25,)).spectrum(1000).max()), 3)
            1.5
        """
        if not self.lags:
            return np.ones(count)
        frequencies = np.pi * np.random.default_rng(0).permutation((np.arange(count) + 0.5) / count)
        density: FloatArray
        if self.first_order:
            r = self.values[self.lags.index(1)]
            density = (1 - r**2) / (1 - 2 * r * np.cos(frequencies) + r**2)
            return density
        density = np.ones(count)
        for k, r in zip(self.lags, self.values, strict=True):
            density += 2 * r * np.cos(k * frequencies)
        density = np.maximum(density, _LEAST)
        return density / float(density.mean())


class Lags:
    """The rows of one matrix (``axis`` 0) or its columns (1) in their order, with or without directions taken out."""

    def __init__(self, matrix: NDArray[Any], axis: int) -> None:
        self._matrix, self._axis = matrix, axis
        self._count, self._other = matrix.shape[axis], matrix.shape[1 - axis]
        self._most = min(_MOST, self._count // 4)
        self._sums: dict[int, float] = {}
        whole = matrix.size <= _WHOLE
        self._signs = None if whole else np.random.default_rng(0).choice([-1.0, 1.0], (self._other, _SIGNS))
        self._sketch: FloatArray | None = None

    def correlation(
        self, vectors: FloatArray, partners: FloatArray, sizes: FloatArray, spread: float
    ) -> Correlation:
        """What shows beyond chance in the rows ``W - vectors partners^T``.

        Args:
            vectors: One column per direction that is taken out: its parts of the rows.
            partners: Its parts of the columns.
            sizes: Squared norms of the rows that are left.
            spread: The sum of squared eigenvalues that are left.
        """
        total = float(sizes.sum())
        if self._count < 3 or total <= 0:
            return Correlation()
        strengths = np.sum(partners**2, axis=0)
        own = float(np.sum(sizes**2))
        # Squared cosine of two rows by chance: a product is as large as the two rows are.
        cosine = max(spread - own, 0.0) / max(total**2 - own, np.finfo(np.float64).tiny)
        if cosine <= 1e-24:
            return Correlation()

        def standing(k: int) -> tuple[float, float]:
            """The correlation at a lag, and how many standard errors it lies from zero."""
            products = self._sum(k) - float(np.sum(vectors[k:] * vectors[:-k] * strengths))
            r = products / (total * (self._count - k) / self._count)
            return float(np.clip(r, -0.999, 0.999)), products / float(np.sqrt(cosine * _weight(sizes, k)))

        seen = {k: standing(k) for k in self._worth_a_look(vectors, partners, sizes, cosine)}
        beyond = {k: r for k, (r, z) in seen.items() if abs(z) > BEYOND}
        if not beyond:
            return Correlation()
        lags = tuple(sorted(beyond, key=lambda k: -abs(beyond[k])))
        r = beyond.get(1, 0.0)
        error = float(np.sqrt(cosine * _weight(sizes, 0))) / total
        first = 1 in beyond and all(
            abs(found - r**k) <= BEYOND * error + _SAME * abs(r) for k, (found, _) in seen.items()
        )
        return Correlation(lags, tuple(beyond[k] for k in lags), first)

    def _worth_a_look(
        self, vectors: FloatArray, partners: FloatArray, sizes: FloatArray, cosine: float
    ) -> list[int]:
        """The first lag, and those that stand out of the sketch, the strongest first."""
        rows = self._of_signs()
        if vectors.shape[1]:
            rows = rows - vectors @ (partners.T if self._signs is None else partners.T @ self._signs)
        rows = np.ascontiguousarray(rows)
        flat, width = rows.ravel(), rows.shape[1]
        extra, scale = (0.0, 1.0) if self._signs is None else (1 / width, float(width))
        error = np.sqrt(cosine + extra) * scale
        found = {}
        for k in range(2, self._most + 1):
            product = float(np.dot(flat[k * width :], flat[: -k * width]))
            product /= max(float(np.sqrt(_weight(sizes, k))), np.finfo(np.float64).tiny)
            if abs(product) > BEYOND * error:
                found[k] = abs(product)
        return [1, *sorted(found, key=lambda k: -found[k])[:_IN_FULL]]

    def _of_signs(self) -> FloatArray:
        if self._sketch is None:
            turned = self._matrix if self._axis == 0 else self._matrix.T
            if self._signs is None:
                self._sketch = np.asarray(turned, dtype=np.float64)
            elif turned.dtype in (np.float32, np.float64):
                self._sketch = (turned @ self._signs.astype(turned.dtype)).astype(np.float64)
            else:
                step = max(_STRIP // self._other, 1)
                strips = range(0, self._count, step)
                self._sketch = np.concatenate(
                    [np.asarray(turned[k : k + step], dtype=np.float64) @ self._signs for k in strips]
                )
        return self._sketch

    def _sum(self, k: int) -> float:
        """The products of all rows with those ``k`` places on."""
        if k not in self._sums:
            matrix, total = self._matrix, 0.0
            step = max(_STRIP // matrix.shape[1], 1)
            for start in range(0, matrix.shape[0], step):
                if self._axis == 0:
                    part = np.asarray(matrix[start : start + step + k], dtype=np.float64)
                    count = max(min(len(part) - k, step), 0)
                    total += float(np.einsum("ij,ij->", part[k : k + count], part[:count]))
                else:
                    part = np.asarray(matrix[start : start + step], dtype=np.float64)
                    total += float(np.einsum("ij,ij->", part[:, k:], part[:, :-k]))
            self._sums[k] = total
        return self._sums[k]


def _weight(sizes: FloatArray, k: int) -> float:
    """Sum over rows of their squared norm times that of the row ``k`` places on."""
    weight = float(np.dot(sizes[k:], sizes[: sizes.size - k]))
    return max(weight, np.finfo(np.float64).tiny)
