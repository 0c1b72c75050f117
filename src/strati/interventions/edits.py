r"""What the interventions do to one matrix, in numpy: outputs first, a kernel's taps with its inputs.

Spectral ones share one decomposition (:class:`Directions`), so that twenty ranks cost little more than one. All take
the matrix in float32 or float64 and compute in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.core.errors import BadInputError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.core.results import FloatArray


class Directions:
    r"""The singular directions of a matrix, strongest first, computed once.

    From the eigenvectors of the smaller Gram matrix in double precision: with :math:`P_k` the projection on some of
    them, :math:`W P_k` (or :math:`P_k W`) is what those directions carry.

    Examples:
        >>> directions = Directions(np.diag([3.0, 2.0, 1.0]))
        >>> directions.keep(slice(0, 1)).round(6).tolist()
        [[3.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    """

    def __init__(self, matrix: NDArray[Any]) -> None:
        self.matrix = np.asarray(matrix, dtype=np.float64)
        if not np.isfinite(self.matrix).all():
            raise BadInputError("weight", "holds values that are not finite; no singular directions")

    @cached_property
    def _decomposed(self) -> tuple[FloatArray, FloatArray]:
        w = self.matrix
        gram = w.T @ w if w.shape[0] >= w.shape[1] else w @ w.T
        values, vectors = np.linalg.eigh(gram)
        return np.maximum(values[::-1], 0.0), vectors[:, ::-1]

    @property
    def count(self) -> int:
        """How many there are: the smaller side."""
        return int(min(self.matrix.shape))

    @property
    def energies(self) -> FloatArray:
        """Squared singular values, descending."""
        return self._decomposed[0]

    def keep(self, which: slice) -> FloatArray:
        """The part of the matrix that some directions carry."""
        first, second = self.factors(which)
        product: FloatArray = first @ second
        return product

    def factors(self, which: slice) -> tuple[FloatArray, FloatArray]:
        """That part as a product of two matrices, (rows, k) and (k, cols)."""
        directions = self._decomposed[1][:, which]
        if self.matrix.shape[0] >= self.matrix.shape[1]:
            return self.matrix @ directions, directions.T
        return directions, directions.T @ self.matrix


def truncate_rank(
    directions: Directions,
    *,
    rank: int | None = None,
    energy: float | None = None,
    parameters: float | None = None,
) -> int:
    """How many directions a setting of ``truncate`` keeps.

    Examples:
        >>> directions = Directions(np.diag([2.0, 1.0, 1.0]))
        >>> [truncate_rank(directions, rank=9), truncate_rank(directions, energy=0.6)]
        [3, 1]
        >>> truncate_rank(Directions(np.ones((30, 60))), parameters=0.5)
        10
    """
    if rank is not None:
        return min(rank, directions.count)
    if parameters is not None:
        rows, cols = directions.matrix.shape
        return rank_of_share(rows, cols, parameters)
    assert energy is not None
    total = np.cumsum(directions.energies)
    if total[-1] <= 0:
        return 0
    # Sums of squares carry rounding: a share reached to 12 digits is reached.
    return int(min(np.searchsorted(total, energy * total[-1] * (1 - 1e-12)) + 1, directions.count))


def rank_of_share(rows: int, cols: int, share: float) -> int:
    """The largest rank whose two factors have at most ``share`` of the parameters; full rank at a share of 1."""
    if share >= 1.0:
        return min(rows, cols)
    return min(int(share * rows * cols / (rows + cols) + 1e-9), rows, cols)


def truncated_parameters(rows: int, cols: int, rank: int) -> int:
    """What a layer of rank ``rank`` counts: ``min(k (rows + cols), rows cols)`` parameters.

    Examples:
        >>> truncated_parameters(100, 50, 10), truncated_parameters(100, 50, 40)
        (1500, 5000)
    """
    return min(rank * (rows + cols), rows * cols)


def truncate(directions: Directions, **setting: Any) -> FloatArray:
    """The leading directions a setting keeps; the matrix itself where it keeps all."""
    return keep_rank(directions, truncate_rank(directions, **setting))


def keep_rank(directions: Directions, rank: int) -> FloatArray:
    """The leading directions; the matrix itself where all of them are kept."""
    return directions.matrix.copy() if rank >= directions.count else directions.keep(slice(0, rank))


def remove_small(directions: Directions, k: int) -> FloatArray:
    """The matrix without its ``k`` weakest directions."""
    return directions.keep(slice(0, max(directions.count - k, 0)))


def remove_large(directions: Directions, k: int) -> FloatArray:
    """The matrix without its ``k`` strongest directions."""
    return directions.matrix - directions.keep(slice(0, min(k, directions.count)))


def signal_part(matrix: NDArray[Any]) -> FloatArray:
    """What lies above the Tracy-Widom edge of the random bulk (:mod:`strati.spectra.noise_model`)."""
    from strati.spectra.noise_model import split

    return split(matrix).signal


def noise_part(matrix: NDArray[Any]) -> FloatArray:
    """What lies below it."""
    from strati.spectra.noise_model import split

    return split(matrix).noise


def remove_quasi_null(directions: Directions) -> FloatArray:
    """The matrix without the directions that ``scan`` counts as quasi-null."""
    from strati.spectra.spectrum import spectrum

    count = int(spectrum(directions.matrix).metrics()["quasi_null"] or 0)
    return remove_small(directions, count) if count else directions.matrix.copy()


@dataclass(frozen=True)
class Grid:
    r"""The levels that weights are rounded to, one scale per row.

    With levels from the smallest to the largest weight (zero among them):
    :math:`s = (\max - \min)/(2^b - 1)`, :math:`z = \mathrm{round}(-\min/s)`,
    :math:`q = \mathrm{clip}(\mathrm{round}(w/s) + z, 0, 2^b - 1)`, :math:`w' = s (q - z)`. Symmetric:
    :math:`s = \max|w|/(2^{b-1} - 1)`, :math:`w' = s\,\mathrm{clip}(\mathrm{round}(w/s), -2^{b-1}, 2^{b-1} - 1)`.
    """

    step: FloatArray
    zero: FloatArray
    least: int
    most: int

    @classmethod
    def of(cls, weights: FloatArray, bits: int, symmetric: bool = False) -> Grid:
        """The grid of the weights along the last axis."""
        if symmetric:
            top = 2 ** (bits - 1) - 1
            step = np.abs(weights).max(axis=-1, keepdims=True) / top
            step[step == 0] = 1.0
            return cls(step, np.zeros_like(step), -top - 1, top)
        low = np.minimum(weights.min(axis=-1, keepdims=True), 0.0)
        high = np.maximum(weights.max(axis=-1, keepdims=True), 0.0)
        step = (high - low) / (2**bits - 1)
        step[step == 0] = 1.0
        return cls(step, np.round(-low / step), 0, 2**bits - 1)

    def with_zero(self, zero: FloatArray) -> Grid:
        """The same scales with other zero points."""
        return replace(self, zero=zero)

    def codes(self, weights: FloatArray) -> FloatArray:
        """The integers that weights are stored as."""
        # Rounded before the zero point is added where that is rounded_zero, as every published implementation does.
        rounded_zero = np.round(self.zero)
        return np.clip(
            np.round(weights / self.step + (self.zero - rounded_zero)) + rounded_zero, self.least, self.most
        )

    def values(self, codes: FloatArray) -> FloatArray:
        """The weights that integers stand for."""
        return self.step * (codes - self.zero)

    def nearest(self, weights: FloatArray) -> FloatArray:
        """The nearest levels."""
        return self.values(self.codes(weights))


def grouped(matrix: FloatArray, group: int | None, change: Callable[[FloatArray], FloatArray]) -> FloatArray:
    """Change a matrix group by group of neighbouring inputs; ``change`` is given (rows, groups, size)."""
    rows, cols = matrix.shape
    size = min(group or cols, cols)
    padded = -(-cols // size) * size
    # A short last group is filled up with its own last value, which moves neither its smallest nor its largest.
    filler = np.repeat(matrix[:, -1:], padded - cols, axis=1)
    wide = np.concatenate([matrix, filler], axis=1) if padded > cols else matrix
    changed = change(wide.reshape(rows, -1, size))
    return np.ascontiguousarray(changed.reshape(rows, padded)[:, :cols])


def quantise(
    matrix: NDArray[Any], bits: int, group: int | None = None, symmetric: bool = False
) -> FloatArray:
    """Round to nearest on ``2^bits`` levels, one scale per output and group of inputs.

    Examples:
        >>> quantise(np.array([[0.0, 0.4, 1.0, 3.0]]), bits=2).tolist()
        [[0.0, 0.0, 1.0, 3.0]]
    """
    w = np.asarray(matrix, dtype=np.float64)
    return grouped(w, group, lambda block: Grid.of(block, bits, symmetric).nearest(block))


def prune(matrix: NDArray[Any], share: float | None = None, pattern: str | None = None) -> FloatArray:
    """Zero the smallest entries: ``round(share size)`` of all, or all but n of every m neighbouring inputs.

    Examples:
        >>> prune(np.array([[1.0, -2.0, 3.0, 0.5]]), share=0.5).tolist()
        [[0.0, -2.0, 3.0, 0.0]]
        >>> prune(np.array([[1.0, -2.0, 3.0, 4.0]]), pattern="1:2").tolist()
        [[0.0, -2.0, 0.0, 4.0]]
    """
    w = np.asarray(matrix, dtype=np.float64)
    return np.where(pruned_places(np.abs(w), share, pattern), 0.0, w)


def pruned_places(scores: FloatArray, share: float | None, pattern: str | None) -> NDArray[np.bool_]:
    """Where entries are zeroed: those of least score, or all but the n highest of every m neighbouring inputs."""
    gone = np.zeros(scores.shape, dtype=bool)
    if pattern is None:
        assert share is not None
        least = np.argsort(scores, axis=None, kind="stable")[: round(share * scores.size)]
        gone.reshape(-1)[least] = True
        return gone
    keep, size = (int(n) for n in pattern.split(":"))
    for start in range(0, scores.shape[1], size):
        block = scores[:, start : start + size]
        least = np.argsort(block, axis=1, kind="stable")[:, : max(block.shape[1] - keep, 0)]
        np.put_along_axis(gone[:, start : start + size], least, True, axis=1)
    return gone


def permute_entries(matrix: NDArray[Any], rng: np.random.Generator) -> FloatArray:
    """The same entries in random places."""
    w = np.asarray(matrix, dtype=np.float64)
    return rng.permutation(w.reshape(-1)).reshape(w.shape)


def add_noise(matrix: NDArray[Any], size: float, rng: np.random.Generator) -> FloatArray:
    """Gaussian noise added, scaled so that its Frobenius norm is ``size`` times the matrix's."""
    w = np.asarray(matrix, dtype=np.float64)
    drawn = rng.standard_normal(w.shape)
    noisy: FloatArray = w + drawn * (size * np.linalg.norm(w) / np.linalg.norm(drawn))
    return noisy


def adapt(matrix: NDArray[Any], base: NDArray[Any], rank: int) -> FloatArray:
    """The base with only rank ``rank`` of the update: ``base + truncate(matrix - base)``."""
    start = np.asarray(base, dtype=np.float64)
    return start + truncate(Directions(np.asarray(matrix, dtype=np.float64) - start), rank=rank)
