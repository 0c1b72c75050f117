"""Which piece is the last layer, where its shape is that of an input projection: by the data.

The stream that enters the last layer is the input with what the blocks added. So the outputs, less the bias, lie in the
range of the last layer's weight (which decides it where there are more outputs than the width), and what they
say about the stream is near the input. The likeliest are tried first; only an exact network ends the search.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from strati.reassembly.passes import Floats
    from strati.reassembly.pieces import Piece, PieceSet


def by_likelihood(readings: Sequence[PieceSet], x: Floats, y: Floats, rows: int = 500) -> list[PieceSet]:
    """The readings, likeliest last layer first.

    Examples:
        >>> from strati.reassembly.pieces import as_pieces, sort_all
        >>> rng = np.random.default_rng(0)
        >>> pieces = as_pieces([(rng.normal(size=s), np.zeros(s[0])) for s in [(5, 3), (3, 5), (5, 3)]])
        >>> x = rng.normal(size=(50, 3))
        >>> found = by_likelihood(sort_all(pieces, width=3, outputs=5), x, x @ pieces[2].weight.T)
        >>> found[0].last.name
        'piece 2'
    """
    step = max(1, len(x) // rows)
    some, wanted = x[::step].astype(np.float64), y[::step].astype(np.float64)
    return sorted(readings, key=lambda reading: _misfit(reading.last, some, wanted))


def _misfit(last: Piece, x: NDArray[np.float64], y: NDArray[np.float64]) -> tuple[bool, float]:
    weight, target = last.weight.astype(np.float64), y - last.bias.astype(np.float64)
    back = np.linalg.pinv(weight)
    size = float(np.square(target).mean()) or 1.0
    outside = float(np.square(target - target @ back.T @ weight.T).mean()) / size
    # the part of the input that the last layer sees, against the part of the stream that the outputs show
    seen, shown = x @ weight.T @ back.T, target @ back.T
    alike = float((seen * shown).sum()) / (float(np.linalg.norm(seen) * np.linalg.norm(shown)) + 1e-300)
    return outside > 1e-8, -alike
