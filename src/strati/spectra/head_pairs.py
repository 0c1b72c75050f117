r"""Pairs of attention heads: the same head in two networks, and heads of one network that read each other.

Both compare products of a head's weights, QK and OV (:mod:`strati.spectra.heads`), through their factors, and both have
p-values under random rotations, which keep all spectra.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from strati.core.errors import BadInputError
from strati.spectra.eigenvalues import spacing
from strati.spectra.heads import (
    PRODUCTS,
    AttentionBlock,
    HeadMatrix,
    Product,
    attentions,
    one_thread,
    product_singular_values,
)

if TYPE_CHECKING:
    from strati.core.results import FloatArray
    from strati.io.network import Network


@dataclass(frozen=True)
class ComparedHead:
    """One product of a head in two networks.

    Attributes:
        name: The product in the first network.
        partner: The product in the last network that it was compared with; another number where heads were reordered.
        block: The block of the first network.
        relative_change: Frobenius norm of the difference of the products over that of the first.
        rounding: What the rounding of the stored factors alone makes of it, at most, in the root mean square.
        factor_change: The same of the stored factors, side by side. A change of basis inside the head changes these
            and leaves the product.
        update_stable_rank: Stable rank of the difference; ``None`` where there is none.
        similarity: Inner product of both over the product of their norms.
        pvalue: Chance of so large a similarity if the last network's product is turned at random, corrected for the
            choice among the heads of the block.
    """

    name: str
    partner: str
    block: int
    relative_change: float | None
    rounding: float | None
    factor_change: float | None
    update_stable_rank: float | None
    similarity: float | None
    pvalue: float | None


@one_thread
def compare_heads(
    first: Network, last: Network, blocks: Collection[int | None] | None = None
) -> tuple[ComparedHead, ...]:
    r"""Compare QK and OV of every head of two networks, whatever basis and order of heads they are stored in.

    The heads of a block are matched by the sum of the similarities of both products (Hungarian algorithm). The
    difference of two products is itself a product, of the factors stacked: :math:`B - A = (L_B, L_A)^\top (R_B, -R_A)`,
    so it is never formed.

    Args:
        first: A network.
        last: Another one, with attention of the same width in blocks of the same place.
        blocks: Numbers of the blocks to compare; ``None`` for all.

    Raises:
        BadInputError: No block of both has attention of one shape.
    """
    from scipy.optimize import linear_sum_assignment

    pairs = []
    others = {(other.tower, other.block, other.cross): other for other in attentions(last)}
    for block in attentions(first):
        other = others.get((block.tower, block.block, block.cross))
        factors = {} if other is None else {p: (block.factors(p), other.factors(p)) for p in PRODUCTS}
        if other is None or any(
            a.shape != b.shape for f in factors.values() for a, b in zip(*f, strict=True)
        ):
            continue
        alike = {p: _similarities(*factors[p]) for p in PRODUCTS}
        # Of heads that are equal, the one of the same number.
        total = np.nan_to_num(alike["QK"][0] + alike["OV"][0]) + 1e-9 * np.eye(block.heads)
        _, partners = linear_sum_assignment(total, maximize=True)
        epsilon = max(
            spacing("float32" if layer.quantised else layer.dtype)
            for attention in (block, other)
            for layer in (attention.query, attention.key, attention.values, attention.output)
        )
        for (head, partner), product in itertools.product(enumerate(map(int, partners)), PRODUCTS):
            before, after = (
                (f[0][k], f[1][k]) for f, k in zip(factors[product], (head, partner), strict=True)
            )
            similarity, pvalue = (float(table[head, partner]) for table in alike[product])
            numbers = _product_change(before, after, epsilon)
            pairs.append(
                ComparedHead(
                    HeadMatrix(block, head, product).name,
                    HeadMatrix(other, partner, product).name,
                    block.block,
                    *numbers,
                    similarity if np.isfinite(similarity) else None,
                    min(1.0, pvalue * block.heads) if np.isfinite(pvalue) else None,
                )
            )
    if not pairs:
        raise BadInputError("heads", "the networks have no attention of one shape in common")
    return tuple(pair for pair in pairs if blocks is None or pair.block in blocks)


def _similarities(
    first: tuple[FloatArray, FloatArray], last: tuple[FloatArray, FloatArray]
) -> tuple[FloatArray, FloatArray]:
    """Similarity of every head's product with that of every other, and its two-sided p-value under rotations."""
    from scipy.stats import norm

    left, right = (a[:, None] @ np.swapaxes(b, 1, 2)[None] for a, b in zip(first, last, strict=True))
    inner = np.sum(left * right, axis=(2, 3))
    # Triangular factors have the norms of what they are factors of.
    upper, first_right, other, last_right = (
        np.asarray(np.linalg.qr(np.swapaxes(factor, 1, 2), mode="r")) for factor in (*first, *last)
    )
    sizes = [
        np.linalg.norm(a @ np.swapaxes(b, 1, 2), axis=(1, 2))
        for a, b in ((upper, first_right), (other, last_right))
    ]
    spread = np.linalg.norm(upper[:, None] @ right @ np.swapaxes(other, 1, 2)[None], axis=(2, 3))
    with np.errstate(divide="ignore", invalid="ignore"):
        deviates = np.sqrt(first[0].shape[2]) * inner / spread
        return inner / np.outer(*sizes), 2 * norm.sf(np.abs(deviates))


def _product_change(
    first: tuple[FloatArray, FloatArray], last: tuple[FloatArray, FloatArray], epsilon: float
) -> tuple[float | None, float | None, float | None, float | None]:
    """Change of the product, what rounding makes of it, change of the factors, stable rank of the update."""
    values = product_singular_values(*first)
    size, stored = float(np.linalg.norm(values)), float(np.linalg.norm(np.hstack(first)))
    if not size or not all(np.isfinite(factor).all() for factor in last):
        return None, None, None, None
    update = product_singular_values(np.vstack([last[0], first[0]]), np.vstack([last[1], -first[1]]))
    total = float(np.linalg.norm(update))
    # An entry is off by up to half its spacing, evenly: by 1 / sqrt(12) of it in the root mean square.
    rounding = sum(
        (np.linalg.norm(left) * np.linalg.norm(right, 2)) ** 2
        + (np.linalg.norm(left, 2) * np.linalg.norm(right)) ** 2
        for left, right in (first, last)
    )
    return (
        total / size,
        epsilon * float(np.sqrt(rounding / 12)) / size,
        float(np.linalg.norm(np.hstack(last) - np.hstack(first))) / stored,
        (total / float(update[0])) ** 2 if total else None,
    )


@dataclass(frozen=True)
class Composition:
    """How strongly a head reads what an earlier head wrote.

    Attributes:
        kind: ``Q``, ``K`` or ``V``: through the queries, keys or values of the later head.
        source: OV of the earlier head.
        target: QK or OV of the later one.
        score: Frobenius norm of the product of both over the product of their norms (Elhage et al. 2021).
        expected: Root mean square of the score when one of the two is rotated at random.
        pvalue: Chance of so large a score under such rotations, which keep both spectra.
    """

    kind: Literal["Q", "K", "V"]
    source: str
    target: str
    score: float
    expected: float
    pvalue: float


@one_thread
def composition(matrices: Iterable[HeadMatrix]) -> tuple[Composition, ...]:
    r"""Q-, K- and V-composition of every head with every head of an earlier block.

    With :math:`M_1 = U_1 S_1 V_1^\top` and :math:`M_2 = U_2 S_2 V_2^\top`, the score of :math:`M_2 M_1` is
    :math:`\|S_2 V_2^\top U_1 S_1\| / (\|S_2\| \|S_1\|)`. Under a random rotation between them its square is a sum of
    squared normal variables with weights :math:`s_{2i}^2 s_{1j}^2 / d`; the p-value is that of the chi-squared
    distribution with the same mean and variance.
    """
    decomposed: dict[tuple[str, int], dict[Product, _Decomposed]] = {}
    for matrix in matrices:
        key = (matrix.attention.prefix, matrix.head)
        if key not in decomposed:
            for head in range(matrix.attention.heads):
                decomposed[matrix.attention.prefix, head] = {}
            for product in PRODUCTS:
                left, right = matrix.attention.factors(product)
                for head in range(matrix.attention.heads):
                    name = HeadMatrix(matrix.attention, head, product).name
                    entry = _decompose(name, matrix.attention, left[head], right[head])
                    decomposed[matrix.attention.prefix, head][product] = entry
    pairs = []
    for earlier in decomposed.values():
        for later in decomposed.values():
            source, scores, moves = earlier["OV"], later["QK"], later["OV"]
            if source.block.tower != scores.block.tower or source.block.block >= scores.block.block:
                continue
            # QK is queries times keys: its left side reads through the queries, its right side through the keys.
            pairs.append(_compose("Q", source, scores, scores.outer))
            if not scores.block.cross:
                pairs.append(_compose("K", source, scores, scores.inner))
                pairs.append(_compose("V", source, moves, moves.inner))
    return tuple(pairs)


@dataclass(frozen=True)
class _Decomposed:
    """A product ``outer @ diag(values) @ inner.T``."""

    name: str
    block: AttentionBlock
    outer: FloatArray
    values: FloatArray
    inner: FloatArray


def _decompose(name: str, block: AttentionBlock, left: FloatArray, right: FloatArray) -> _Decomposed:
    (first, upper), (second, lower) = np.linalg.qr(left.T), np.linalg.qr(right.T)
    outer, values, inner = np.linalg.svd(upper @ lower.T)
    return _Decomposed(name, block, first @ outer, values, second @ inner.T)


def _compose(
    kind: Literal["Q", "K", "V"], source: _Decomposed, target: _Decomposed, reads: FloatArray
) -> Composition:
    from scipy.stats import chi2

    overlaps = (reads.T @ source.outer) * target.values[:, None] * source.values[None, :]
    both = float(np.sum(target.values**2) * np.sum(source.values**2))
    square = float(np.sum(overlaps**2)) / both if both else 0.0
    expected = 1 / len(source.outer)
    freedom = both**2 / float(np.sum(target.values**4) * np.sum(source.values**4)) if both else 1.0
    pvalue = float(chi2.sf(freedom * square / expected, freedom)) if both else 1.0
    return Composition(
        kind, source.name, target.name, float(np.sqrt(square)), float(np.sqrt(expected)), pvalue
    )
