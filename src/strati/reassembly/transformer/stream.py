r"""How alike two pieces are on the residual stream: Gram matrices over its directions.

What reads the stream (``q k v gate up``) has :math:`G = W^T W`, what writes it (``out down``) :math:`G = W W^T`, both
width by width. The diagonal is left out, each Gram is divided by its norm, and the mean over a role's pieces
is taken off:
what remains tells the depth. ``<G_i, G_j>`` then falls with the distance of the two blocks, and a reader is
like a writer
only if it comes after it: one reads what the other has written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float32]
    Matrix = NDArray[np.float64]

READERS = ("q", "k", "v", "gate", "up")
WRITERS = ("out", "down")

_MOST = 640
"""So many directions of the stream at most: the Gram of a part of them tells the same."""


def directions(width: int) -> NDArray[np.intp]:
    """The directions of the stream that are looked at: all, or an even part of a wide one."""
    return np.arange(width) if width <= _MOST else np.linspace(0, width - 1, _MOST).astype(np.intp)


def features(role: str, stack: Floats, norms: NDArray[Any] | None = None) -> Floats:
    """The Gram matrices of a role's pieces as unit vectors, without their mean.

    Args:
        role: ``q k v out gate up down``.
        stack: Pieces, outputs by inputs: (pieces, rows, columns).
        norms: The weights of the norm before each piece (pieces, width), where known: folded into what reads.
    """
    reads = role in READERS
    some = directions(stack.shape[2 if reads else 1])
    sides = stack[:, :, some] if reads else stack[:, some].transpose(0, 2, 1)
    if norms is not None and reads:
        sides = sides * norms[:, None, some].astype(np.float32)
    flat = flat_grams(sides)
    if len(flat) > 1:
        flat = flat - flat.mean(axis=0)
        flat /= _safe(np.linalg.norm(flat, axis=1, keepdims=True))
    return flat


def flat_grams(sides: Floats) -> Floats:
    """Upper triangles of ``X^T X`` for each matrix X (rows by directions), as unit vectors."""
    upper = np.triu_indices(sides.shape[2], 1)
    flat = np.empty((len(sides), len(upper[0])), np.float32)
    for number, side in enumerate(sides):
        flat[number] = (side.T @ side)[upper]
    flat /= _safe(np.linalg.norm(flat, axis=1, keepdims=True))
    return flat


def similarities(found: Mapping[str, Floats]) -> dict[tuple[str, str], Matrix]:
    """Similarity of every piece of one role with every piece of another, for all pairs of roles."""
    roles = list(found)
    made: dict[tuple[str, str], Matrix] = {}
    for k, a in enumerate(roles):
        for b in roles[k:]:
            both = np.asarray(found[a] @ found[b].T, dtype=np.float64)
            made[a, b], made[b, a] = both, both.T
    return made


def sizes(role: str, stack: Floats) -> Matrix:
    """Logarithms of each piece's norms along the directions of the stream, without the mean over the pieces."""
    norms = np.linalg.norm(stack, axis=1 if role in READERS else 2)
    logs = np.log(np.maximum(norms, np.finfo(np.float32).tiny)).astype(np.float64)
    return np.asarray(logs - logs.mean(axis=0)) if len(logs) > 2 else logs


def ends(found: Mapping[str, Floats], table: NDArray[Any]) -> dict[str, Matrix]:
    """Similarity of every piece with an embedding or a head (rows by width), role by role."""
    some = directions(table.shape[1])
    rows = np.asarray(table[:: max(1, len(table) // 4096), :][:, some], dtype=np.float32)
    reference = flat_grams((rows - rows.mean(axis=0))[None])[0]
    return {role: np.asarray(flat @ reference, dtype=np.float64) for role, flat in found.items()}


def _safe(norm: Floats) -> Floats:
    return np.maximum(norm, np.finfo(np.float32).tiny)
