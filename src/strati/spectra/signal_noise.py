r"""Signal and noise of one matrix: :math:`W = W_\mathrm{rand} + \Delta_\mathrm{sig}`.

The singular triplets above the Tracy-Widom edge are the signal, the rest is noise. The signal comes from
the leading eigenvectors of the smaller Gram matrix, so that only they are computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.spectra.eigenvalues import eigenvalues, gram
from strati.spectra.marchenko_pastur import fit_random_part

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.core.results import FloatArray


@dataclass(frozen=True)
class Split:
    """The two parts of a matrix; they add up to it.

    Attributes:
        noise: ``W_rand``.
        signal: ``Delta_sig``, of rank ``rank``.
        rank: Number of singular triplets in the signal.
        edge: The eigenvalue above which they lie.
    """

    noise: FloatArray
    signal: FloatArray
    rank: int
    edge: float


def split(W: NDArray[Any], *, edge: float | None = None, level: float = 0.01) -> Split:
    """Split a matrix at the edge of its random bulk.

    Args:
        W: The matrix.
        edge: Eigenvalues of ``W.T @ W`` above this are signal; by default the Tracy-Widom edge of the
            Marchenko-Pastur bulk fitted to ``W``.
        level: Chance that the largest eigenvalue of pure noise passes for signal.

    Returns:
        Noise and signal in float64.

    Examples:
        >>> rng = np.random.default_rng(0)
        >>> W = rng.normal(size=(200, 100)) + 3 * np.outer(np.ones(200), np.ones(100)) / 10
        >>> parts = split(W)
        >>> parts.rank, bool(np.allclose(parts.noise + parts.signal, W))
        (1, True)
    """
    double = np.asarray(W, dtype=np.float64)
    if edge is None:
        bulk = fit_random_part(eigenvalues(W), level=level)
        edge = bulk.edge if bulk is not None else float("inf")
    values, vectors = np.linalg.eigh(gram(double))
    leading = vectors[:, values > edge]
    tall = double.shape[0] >= double.shape[1]
    signal = (double @ leading) @ leading.T if tall else leading @ (leading.T @ double)
    return Split(double - signal, signal, leading.shape[1], float(edge))
