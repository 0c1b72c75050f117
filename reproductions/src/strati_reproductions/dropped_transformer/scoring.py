"""How right an answer is: pieces in place, pairs, order and direction, beside the truth that a drop wrote."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class SignalScore:
    """Counts of what is right.

    Attributes:
        matrices: Matrices in their place.
        of_matrices: Matrices in all.
        vectors: Biases and norm weights in their place.
        of_vectors: Of them in all.
        pairs: Matrices that are in one block with the matrix of the first slot that belongs to them.
        tau: Kendall's tau of the order of blocks, by the median true block of each block's matrices.
        forward: Whether the direction is right.
    """

    matrices: int
    of_matrices: int
    vectors: int
    of_vectors: int
    pairs: int
    tau: float
    forward: bool

    @property
    def all_matrices(self) -> bool:
        """Whether every matrix is in its place."""
        return self.matrices == self.of_matrices


def score(
    blocks: Sequence[Mapping[str, int]],
    vectors: Sequence[Mapping[str, int]],
    answer: Mapping[str, Any],
    arrays: Mapping[int, NDArray[Any]],
    *,
    unfixed: Collection[str] = (),
) -> SignalScore:
    """Compare with the answer; byte-identical pieces are interchangeable.

    Args:
        blocks: Role to piece of every block's matrices.
        vectors: The same of its biases and norm weights.
        answer: What the drop wrote.
        arrays: The pieces.
        unfixed: Roles whose pieces are interchangeable, as the function does not fix them
            (:attr:`~strati.reassembly.transformer.pieces.Blueprint.unfixed`).

    Examples:
        >>> arrays = {n: np.full((2, 2), n) for n in range(4)}
        >>> truth = {"blocks": [{"up": 0, "down": 1}, {"up": 2, "down": 3}], "vectors": [{}, {}]}
        >>> found = score([{"up": 2, "down": 3}, {"up": 0, "down": 1}], [{}, {}], truth, arrays)
        >>> found.matrices, found.pairs, found.tau, found.forward
        (0, 4, -1.0, False)
    """
    same = _kinds(arrays)
    parts = ((blocks, "blocks"), (vectors, "vectors"))
    right = [_right(placed, answer[part], same, unfixed) for placed, part in parts]
    place = {same[n]: k for k, block in enumerate(answer["blocks"]) for n in block.values()}
    of_block = [[place.get(same[n], -1) for n in block.values()] for block in blocks]
    pairs = sum(sum(p == row[0] for p in row) for row in of_block)
    order = [float(np.median(row)) for row in of_block]
    tau = _kendall(order)
    return SignalScore(*right[0], *right[1], pairs, tau, tau > 0 or len(order) < 2)


def _right(
    placed: Sequence[Mapping[str, int]],
    truth: Sequence[Mapping[str, int]],
    same: Mapping[int, int],
    unfixed: Collection[str],
) -> tuple[int, int]:
    pools = {role: {same[block[role]] for block in truth if role in block} for role in unfixed}
    right = [
        same[mine[role]] in pools[role] if role in unfixed else same[mine[role]] == same[theirs[role]]
        for mine, theirs in zip(placed, truth, strict=True)
        for role in theirs
    ]
    return sum(right), len(right)


def _kinds(arrays: Mapping[int, NDArray[Any]]) -> dict[int, int]:
    """Each piece's number, or that of the first piece that equals it."""
    first_number: dict[tuple[Any, ...], int] = {}
    kinds = {}
    for number, values in sorted(arrays.items()):
        # matrices never coincide by chance; hashing vectors alone keeps this cheap
        key = (values.shape, values.tobytes()) if values.size <= 1 << 16 else (number,)
        kinds[number] = first_number.setdefault(key, number)
    return kinds


def _kendall(order: Sequence[float]) -> float:
    n = len(order)
    if n < 2:
        return 1.0
    signs = [np.sign(order[j] - order[i]) for i in range(n) for j in range(i + 1, n)]
    return float(np.mean(signs))
