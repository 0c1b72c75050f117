"""Which side of a matrix lies on the residual stream, and which on the heads.

Attention cuts its hidden units into heads: rows of q, k and v, columns of out. Units of one head are more alike, or
less, than units of different heads, while the directions of the stream know nothing of heads. How far the likeness
between and within heads exceeds what random cuts of the same units show tells the two sides apart; neither the order
of heads, nor of the units in them, nor their signs and scales change it. The stream's side also has a Gram matrix like
that of other matrices on the stream.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from strati.reassembly.transformer import stream
from strati.rng import stream as random_stream

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float32]
    Matrix = NDArray[np.float64]

_CUTS = 12
_LEAST = 0.1
"""Random cuts that the true one is compared with; the least variance ratio that is told from none."""

_HEADS, _STREAM = 4.0, 0.1
"""Typical differences, on networks whose roles are known, of the two sides' head structure and likeness to the stream:
what a difference is divided by before both are added."""


def head_structure(stack: Floats, heads: int) -> Matrix:
    """How much the rows of each matrix know of heads: about 0 or less where they do not.

    ``log`` of the mean squared deviation of ``mean cos^2`` within each head, and between each two, from that of random
    cuts, in standard deviations of these; the two added.

    Args:
        stack: Pieces x units x directions.
        heads: Heads that the units make, all of one size.

    Examples:
        >>> rng = np.random.default_rng(0)
        >>> shared = np.repeat(rng.normal(size=(4, 1, 32)), 8, axis=1)  # a direction that each head's rows share
        >>> rows = (shared + rng.normal(size=(4, 8, 32))).reshape(1, 32, 32).astype("f4")
        >>> mixed = rows[:, rng.permutation(32)]
        >>> bool(head_structure(rows, 4)[0] > 4 > head_structure(mixed, 4)[0])
        True
    """
    count, rows, _ = stack.shape
    if heads < 2 or rows % heads or rows // heads < 2:
        return np.zeros(count)
    wide = rows // heads
    own = np.repeat(np.arange(heads), wide)
    rng = random_stream(0, "reassembly", "cuts")
    cuts = np.stack([own, *(rng.permutation(own) for _ in range(_CUTS))])
    which = (cuts[:, None, :] == np.arange(heads)[None, :, None]).astype(np.float32)
    apart = ~np.eye(heads, dtype=bool)
    found = np.zeros(count)
    for number, piece in enumerate(stack):
        unit = piece / np.maximum(np.linalg.norm(piece, axis=1, keepdims=True), np.finfo(np.float32).tiny)
        alike = np.square(unit @ unit.T)
        np.fill_diagonal(alike, 0)
        table = np.matmul(which @ alike, which.transpose(0, 2, 1)).astype(np.float64)  # cut, head, head
        within = np.diagonal(table, axis1=1, axis2=2) / (wide * (wide - 1))
        for values in (within, table[:, apart] / wide**2):
            spread = max(float(values[1:].std()), np.finfo(np.float64).tiny)
            square = float(np.square((values[0] - values[1:].mean()) / spread).mean())
            found[number] += np.log(max(square, _LEAST))
    return found


def writing(stack: Floats, heads: int, reference: Floats | None) -> Matrix:
    """How much more each matrix (outputs by inputs) looks like one that writes the stream than one that reads it.

    Args:
        stack: Square matrices, pieces x outputs x inputs.
        heads: Attention heads; one or none: only the stream tells.
        reference: The Gram matrix (:func:`~strati.reassembly.transformer.stream.flat_grams`) of what is known to be on
            the stream; ``None`` where nothing is.
    """
    turned = np.ascontiguousarray(stack.transpose(0, 2, 1))
    score = (head_structure(turned, heads) - head_structure(stack, heads)) / _HEADS
    if reference is not None:
        some = stream.directions(stack.shape[2])
        sides = [stream.flat_grams(side[:, :, some]) @ reference for side in (turned, stack)]
        score = score + (sides[0] - sides[1]) / _STREAM
    return np.asarray(score, dtype=np.float64)


def attending(stack: Floats, heads: int) -> Matrix:
    """How much either side of each matrix knows of heads: little in an MLP, a pooler or a head of the network."""
    turned = np.ascontiguousarray(stack.transpose(0, 2, 1))
    return np.maximum(head_structure(stack, heads), head_structure(turned, heads))
