r"""Quantising and pruning one matrix, in numpy: to nearest and by magnitude, or by the second moments of its inputs.

The data-aware ones reduce :math:`\|(W - W') X\|_F^2 = n\,\mathrm{tr}\,(W - W')\, C\, (W - W')^T`, where :math:`C`
is the input covariance (:mod:`strati.interventions.input_covariance`), instead of the distance of the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import linalg

from strati.core.errors import BadInputError
from strati.interventions.unit_removal import removed_units

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.core.results import FloatArray
    from strati.interventions.input_covariance import InputCovariance

_DAMPING = 0.01
"""Of the mean input's power, added to the diagonal by GPTQ and SparseGPT, as in the published code."""
_BLOCK = 128
_UNIT_ROUNDS = 32
_AWQ_POWERS = np.linspace(0.0, 1.0, 21)
_HQQ_STEPS, _HQQ_NORM, _HQQ_BETA, _HQQ_GROWTH = 20, 0.7, 10.0, 1.01


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


def output_error(before: NDArray[Any], after: NDArray[Any], covariance: FloatArray) -> float:
    """Mean squared change of the layer's output per token, ``tr (W - W') C (W - W')^T``."""
    difference = np.asarray(before, np.float64) - after
    return float(np.einsum("ij,ij->", difference @ covariance, difference))


def gptq(
    matrix: NDArray[Any],
    covariance: FloatArray,
    bits: int,
    group: int | None = None,
    symmetric: bool = False,
) -> FloatArray:
    """Quantise column by column; each column's rounding error is compensated in the columns that follow.

    References:
        Frantar et al. 2023, GPTQ: accurate post-training quantization for generative pre-trained transformers.
    """
    return gptq_grids(matrix, covariance, bits, group, symmetric)[0]


def gptq_grids(
    matrix: NDArray[Any], covariance: FloatArray, bits: int, group: int | None, symmetric: bool
) -> tuple[FloatArray, list[Grid]]:
    """The weights that :func:`gptq` gives, and the grid of every group of columns."""
    w = np.asarray(matrix, dtype=np.float64)
    size = min(group or w.shape[1], w.shape[1])
    grids: list[Grid] = []

    def rounded(column: int, current: FloatArray) -> FloatArray:
        if column % size == 0:  # a scale of the weights as they are now
            grids.append(Grid.of(current[:, column : column + size], bits, symmetric))
        return grids[-1].nearest(current[:, column, None])[:, 0]

    return _compensated(w, covariance, rounded, size), grids


def awq(
    matrix: NDArray[Any],
    covariance: FloatArray,
    bits: int,
    group: int | None = None,
    symmetric: bool = False,
) -> FloatArray:
    """Round to nearest after scaling up the inputs that carry more power, and scale back.

    The scales are the root mean square of each input to a power between 0 and 1; of 21 powers the one with the least
    output error is taken. Power 0 is plain rounding.

    References:
        Lin et al. 2024, AWQ: activation-aware weight quantization.
    """
    w = np.asarray(matrix, dtype=np.float64)
    power = np.sqrt(np.maximum(np.diag(covariance), 0.0))
    power = np.maximum(power, 1e-4 * (power.max() or 1.0))
    candidates: list[tuple[float, float, FloatArray]] = []
    for exponent in _AWQ_POWERS:
        scale = power**exponent
        scale /= np.sqrt(scale.max() * scale.min())
        rounded = grouped(w * scale, group, lambda b: Grid.of(b, bits, symmetric).nearest(b)) / scale
        candidates.append((output_error(w, rounded, covariance), float(exponent), rounded))
    return min(candidates, key=lambda c: c[:2])[2]


def hqq(matrix: NDArray[Any], bits: int, group: int | None = None) -> FloatArray:
    r"""Round to nearest with the zero points that minimise :math:`\sum |W - W'|^{0.7}`; it needs no data.

    References:
        Badri and Shaji 2023, Half-quadratic quantization of large machine learning models.
    """

    def fitted(block: FloatArray) -> FloatArray:
        grid = Grid.of(block, bits)
        best = grid.nearest(block)
        least = (np.abs(block - best) ** _HQQ_NORM).sum(-1, keepdims=True)
        beta = _HQQ_BETA
        for _ in range(_HQQ_STEPS):
            codes = grid.codes(block)
            error = block - grid.values(codes)
            shrunk = np.maximum(
                np.abs(error) - (np.abs(error) + 1e-12) ** (_HQQ_NORM - 1) / beta, 0.0
            ) * np.sign(error)
            zero = (codes - (block - shrunk) / grid.step).mean(-1, keepdims=True)
            grid = grid.with_zero(zero)
            now = grid.nearest(block)
            size = (np.abs(block - now) ** _HQQ_NORM).sum(-1, keepdims=True)
            best, least = np.where(size < least, now, best), np.minimum(size, least)
            beta *= _HQQ_GROWTH
        return best

    return grouped(np.asarray(matrix, dtype=np.float64), group, fitted)


def wanda(
    matrix: NDArray[Any], covariance: FloatArray, share: float | None = None, pattern: str | None = None
) -> FloatArray:
    r"""Zero the entries of least :math:`|W_{ij}| \|X_j\|`, output by output.

    References:
        Sun et al. 2024, A simple and effective pruning approach for large language models.
    """
    w = np.array(matrix, dtype=np.float64)
    scores = np.abs(w) * np.sqrt(np.maximum(np.diag(covariance), 0.0))
    if pattern is None:
        assert share is not None
        gone = np.argsort(scores, axis=1, kind="stable")[:, : round(share * w.shape[1])]
        np.put_along_axis(w, gone, 0.0, axis=1)
        return w
    return np.where(pruned_places(scores, None, pattern), 0.0, w)


def sparsegpt(
    matrix: NDArray[Any], covariance: FloatArray, share: float | None = None, pattern: str | None = None
) -> FloatArray:
    """Zero entries column by column; what each column loses is compensated in the columns that follow.

    References:
        Frantar and Alistarh 2023, SparseGPT: massive language models can be accurately pruned in one-shot.
    """
    w = np.asarray(matrix, dtype=np.float64)
    size = _BLOCK if pattern is None else int(pattern.partition(":")[2])
    importance = np.diag(_inverse_factor(covariance)) ** 2
    gone = np.zeros(w.shape, dtype=bool)

    def masked(column: int, current: FloatArray) -> FloatArray:
        if column % size == 0:
            part = slice(column, column + size)
            gone[:, part] = pruned_places(current[:, part] ** 2 / importance[part], share, pattern)
        return np.where(gone[:, column], 0.0, current[:, column])

    return _compensated(w, covariance, masked, size)


def prune_units(
    matrix: NDArray[Any], covariance: InputCovariance, share: float, unit: str = "neuron"
) -> FloatArray:
    r"""Zero the columns of whole neurons or heads, and adjust the other columns to make up for them.

    Without the columns :math:`S` the least output error is
    :math:`\mathrm{tr}\, W_S [(C^{-1})_{SS}]^{-1} W_S^T`, reached by
    :math:`W - W_S [(C^{-1})_{SS}]^{-1} (C^{-1})_{S:}`. The units of least error are removed in several
    rounds, each on the weights and covariance that the round before left.

    References:
        Kurtic et al. 2023, ZipLM: inference-aware structured pruning of language models.

    Examples:
        >>> from strati.interventions.input_covariance import InputCovariance
        >>> inputs = InputCovariance("fc", np.diag([1.0, 0.01, 1.0]), 100)
        >>> prune_units(np.array([[1.0, 2.0, 3.0]]), inputs, 0.3).round(6).tolist()
        [[1.0, 0.0, 3.0]]
    """
    w = np.array(matrix, dtype=np.float64)
    if unit == "head" and not covariance.heads:
        raise BadInputError(
            covariance.layer, "the number of attention heads is not known; its config has none"
        )
    count = covariance.heads if unit == "head" and covariance.heads else w.shape[1]
    size = w.shape[1] // count
    factor = _inverse_factor(covariance.matrix)
    inverse = factor.T @ factor
    remaining = np.arange(count)
    for part in np.array_split(np.arange(removed_units(count, share)), _UNIT_ROUNDS):
        if not len(part):
            continue
        blocks = inverse.reshape(count, size, count, size)[remaining, :, remaining]
        columns = w.reshape(len(w), count, size)[:, remaining].transpose(1, 2, 0)
        errors = np.einsum("usr,usr->u", columns, np.linalg.solve(blocks, columns))
        worst = np.argsort(errors, kind="stable")[: len(part)]
        gone = (remaining[worst, None] * size + np.arange(size)).reshape(-1)
        update = np.linalg.solve(inverse[np.ix_(gone, gone)], inverse[gone])
        w -= w[:, gone] @ update
        inverse = inverse - inverse[:, gone] @ update
        w[:, gone] = inverse[:, gone] = 0.0  # exactly: later rounds leave them as they are
        remaining = np.delete(remaining, worst)
    return w


def _inverse_factor(covariance: FloatArray) -> FloatArray:
    """The upper Cholesky factor of the inverse of the damped covariance."""
    mean = float(np.trace(covariance)) / len(covariance) or 1.0
    damped = covariance + _DAMPING * mean * np.eye(len(covariance))
    factor = linalg.cho_factor(damped, lower=True)
    inverse = linalg.cho_solve(factor, np.eye(len(damped)))
    return np.asarray(linalg.cholesky(0.5 * (inverse + inverse.T)))


def _compensated(
    weight: FloatArray, covariance: FloatArray, change: Callable[[int, FloatArray], FloatArray], group: int
) -> FloatArray:
    """Change one column after another; the least-squares optimal update of the later columns follows each change.

    Updates of columns beyond the current block of columns are applied block by block; a group of columns that share a
    scale or a mask never crosses a block.
    """
    factor = _inverse_factor(covariance)
    w, changed = weight.copy(), np.empty_like(weight)
    cols = w.shape[1]
    block = group * max(1, _BLOCK // group)
    for start in range(0, cols, block):
        stop = min(start + block, cols)
        errors = np.empty((len(w), stop - start))
        for j in range(start, stop):
            changed[:, j] = change(j, w)
            errors[:, j - start] = (w[:, j] - changed[:, j]) / factor[j, j]
            w[:, j:stop] -= errors[:, j - start, None] * factor[j, j:stop]
        w[:, stop:] -= errors @ factor[start:stop, stop:]
    return changed
