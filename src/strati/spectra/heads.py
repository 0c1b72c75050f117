r"""Attention heads: the spectra of the products QK and OV of every head, their change, and their composition.

A head acts on the residual stream only through two products of its weights (Elhage et al. 2021): which positions attend
to which, :math:`W_Q^\top W_K`, and what is moved between them, :math:`W_O W_V`. Any invertible change of basis inside
the head changes the factors and leaves the products, so the products are what can be compared and what carries meaning
("Using degeneracy in the loss landscape for mechanistic interpretability", arXiv:2405.10927, opens with it). Both have
the rank of the head's width at most, and their singular values are computed from QR decompositions of the factors; the
``d x d`` product is never formed.

The null hypothesis of a spike is a product of two matrices of independent Gaussian entries. Its law depends on the
shapes alone, up to one scale, so it is simulated: the triangular factor of such a matrix has independent normal and chi
distributed entries (Bartlett's decomposition). The statistic is the largest singular value over the median.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
from threadpoolctl import threadpool_limits

from strati.core.errors import BadInputError
from strati.core.results import Flag
from strati.core.rng import stream
from strati.io.roles import Role, place_of
from strati.spectra.eigenvalues import Eigenvalues, Gap, spacing
from strati.spectra.spectrum import EQUAL, Spectrum
from strati.spectra.tails import FEWEST, EntryTail, fit_tail
from strati.spectra.verdicts import Cause, LayerState, Phase, PhaseVerdict, decide_state

if TYPE_CHECKING:
    from strati.core.results import FloatArray
    from strati.io.layers import Layer
    from strati.io.network import Network

Product = Literal["QK", "OV"]
PRODUCTS: tuple[Product, ...] = ("QK", "OV")

_DRAWS = 1000  # of the null, at least; ten times the inverse of the level if that is more
_POSITIONS = 256  # of an embedding of positions that are looked at
_OFFSETS = 8  # distances between two positions that are looked at
_CROSS = re.compile("cross|encoder_attn|EncDec", re.IGNORECASE)
_ROTARY = re.compile("rope|rotary", re.IGNORECASE)
_ROTARY_MODELS = frozenset(
    {"llama", "mistral", "mixtral", "qwen2", "qwen3", "gemma", "gpt_neox", "gptj", "phi"}
)


@dataclass(frozen=True)
class AttentionBlock:
    """The attention of one block: four projections, each ``(outputs, inputs)``, and how they split into heads.

    Attributes:
        prefix: What the names of its heads begin with.
        block: The block's number.
        query: The query projection; ``key``, ``values`` and ``output`` likewise.
        heads: Number of query heads.
        groups: Number of key-value heads, which query heads share evenly.
        tower: The stack of blocks that it belongs to.
        cross: Its keys and values read another tower.
    """

    prefix: str
    block: int
    query: Layer = field(repr=False)
    key: Layer = field(repr=False)
    values: Layer = field(repr=False)
    output: Layer = field(repr=False)
    heads: int
    groups: int
    tower: str = ""
    cross: bool = False

    def factors(self, product: Product) -> tuple[FloatArray, FloatArray]:
        """The left and the right factor of every head: ``left[h].T @ right[h]`` is the product."""
        first, second = (self.query, self.key) if product == "QK" else (self.output, self.values)
        left, right = (np.asarray(next(layer.matrices()), dtype=np.float64) for layer in (first, second))
        left = left if product == "QK" else left.T
        shared = right.reshape(self.groups, -1, right.shape[1])
        return left.reshape(self.heads, -1, left.shape[1]), np.repeat(
            shared, self.heads // self.groups, axis=0
        )


@dataclass(frozen=True)
class HeadMatrix:
    """One product of one head, with what a row of ``scan`` says of a layer."""

    attention: AttentionBlock
    head: int
    product: Product

    name = property(lambda self: f"{self.attention.prefix}[{self.head}].{self.product}")
    role = property(lambda self: Role.QKV if self.product == "QK" else Role.ATTENTION_OUT)
    block = property(lambda self: self.attention.block)
    kind = property(lambda self: f"head.{self.product.lower()}")
    tensor = property(lambda self: self.name)
    count = 1

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the product."""
        block = self.attention
        if self.product == "QK":
            return block.query.shape[1], block.key.shape[1]
        return block.output.shape[0], block.values.shape[1]

    @property
    def width(self) -> int:
        """The head's width, the largest rank that the product can have."""
        return self.attention.query.shape[0] // self.attention.heads

    @property
    def view(self) -> str:
        """Which matrix this is, in words."""
        return (
            "queries times keys of one head" if self.product == "QK" else "outputs times values of one head"
        )


@dataclass(frozen=True)
class HeadNumbers:
    r"""What is measured of a head's product beyond a layer's numbers.

    Attributes:
        spikes: Singular values beyond those of a product of two random factors.
        spikes_pvalue: Chance that such a product has so large a singular value over the median.
        ambiguous: Runs of equal singular values, first and last of each counted from 0: their vectors are not defined
            one by one.
        copying: Of OV, :math:`\sum\lambda_i / \sum|\lambda_i|` of the eigenvalues of the path from embedding to
            head: 1 for a head that raises the tokens it reads. ``None`` without embedding and head.
        copying_pvalue: Two-sided, against a random orientation of the head's outputs.
        positional: Of QK with an embedding of positions, the mean share of attention that positions alone give to the
            position ``positional_offset`` before; ``None`` without such an embedding.
        positional_offset: The distance that gets most.
    """

    spikes: int
    spikes_pvalue: float
    ambiguous: tuple[tuple[int, int], ...]
    copying: float | None = None
    copying_pvalue: float | None = None
    positional: float | None = None
    positional_offset: int | None = None


@dataclass(frozen=True)
class ScannedHead:
    """One product of a head and its spectrum."""

    layer: HeadMatrix
    spectrum: Spectrum
    numbers: HeadNumbers | None = None
    level: float = 0.01

    @property
    def state(self) -> LayerState:
        """The head's state, by the null of a product."""
        sp = self.spectrum
        return decide_state((flag.code for flag in sp.warnings), sp.verdict, sp.eigenvalues.size)

    def row(self) -> dict[str, Any]:
        """The fields of the JSON form: those of a layer, and those of :class:`HeadNumbers`."""
        matrix, metrics, numbers = self.layer, self.spectrum.metrics(), self.numbers
        metrics |= {"state": str(self.state), "spikes": None if numbers is None else numbers.spikes}
        if metrics["phase_evidence"] is not None:
            metrics["phase_evidence"] |= {"level": self.level}
        rows, cols = matrix.shape
        head = {
            "name": matrix.name,
            "role": str(matrix.role),
            "block": matrix.block,
            "kind": matrix.kind,
            "rows": rows,
            "cols": cols,
            "aspect": max(rows, cols) / min(rows, cols),
            "parameters": matrix.width * (rows + cols),
        }
        scores = {} if numbers is None else {k: v for k, v in vars(numbers).items() if k != "spikes"}
        return (
            head
            | metrics
            | {"view": matrix.view, "head": matrix.head, "width": matrix.width}
            | scores
            | {"warnings": self.spectrum.warnings}
        )


def head_matrices(network: Network) -> tuple[HeadMatrix, ...]:
    """QK and OV of every head of a network, in its order.

    Raises:
        BadInputError: There is no attention, or nothing says how many heads it has.
    """
    attentions = list(_attentions(network))
    if not attentions:
        raise BadInputError("heads", "found no block with query, key, value and output projections")
    return tuple(
        HeadMatrix(attention, head, product)
        for attention in attentions
        for head in range(attention.heads)
        for product in PRODUCTS
    )


Function = TypeVar("Function", bound=Callable[..., Any])


def _one_thread(function: Function) -> Function:
    """Run a function with one thread of BLAS: the matrices of a head are too small for several."""
    limited: Function = threadpool_limits.wrap(limits=1, user_api="blas")(function)
    return limited


_PROJECTIONS = (Role.QUERY, Role.KEY, Role.VALUE, Role.ATTENTION_OUT)


def _attentions(network: Network) -> Iterator[AttentionBlock]:
    blocks: dict[tuple[str, int, bool], dict[Role, list[Layer]]] = {}
    for layer in network.layers(split_qkv=True):
        if (
            layer.role in _PROJECTIONS
            and layer.block is not None
            and layer.adapter is None
            and layer.count == 1
        ):
            tower = place_of(network.names.label(layer.tensor)).tower
            roles = blocks.setdefault((tower, layer.block, bool(_CROSS.search(layer.name))), {})
            roles.setdefault(layer.role, []).append(layer)
    complete = {
        place: [roles[role][0] for role in _PROJECTIONS]
        for place, roles in blocks.items()
        if all(len(roles.get(role, ())) == 1 for role in _PROJECTIONS)
    }
    plain = len({(tower, cross) for tower, _, cross in complete}) == 1
    for (tower, block, cross), (query, key, values, output) in complete.items():
        heads, groups = _head_counts(network, query, key)
        name = f"h.{block}.attn" if plain else f"{tower or 'h'}.{block}.{'cross_attn' if cross else 'attn'}"
        yield AttentionBlock(name, block, query, key, values, output, heads, groups, tower, cross)


def _head_counts(network: Network, query: Layer, key: Layer) -> tuple[int, int]:
    heads, _, width = network.names.heads()
    shape = network[query.tensor].shape
    if network.names.head_by_head(query.tensor) is not None:
        heads, width = shape[0], query.shape[0] // shape[0]
    elif width and query.shape[0] % width == 0:
        heads = query.shape[0] // width
    if not heads or query.shape[0] % heads:
        text = (
            f"the number of heads of {query.name} is not known; open the model's folder with its config.json"
        )
        raise BadInputError("heads", text)
    width = query.shape[0] // heads
    groups = key.shape[0] // width
    if groups == 0 or key.shape[0] % width or heads % groups:
        raise BadInputError("heads", f"{key.name} has {key.shape[0]} rows, which do not fit {heads} heads")
    return heads, groups


@_one_thread
def scan_heads(
    network: Network, matrices: Sequence[HeadMatrix], *, level: float, seed: int
) -> list[ScannedHead]:
    """Measure products of heads, block by block.

    Args:
        network: The network, for embedding and head.
        matrices: What to measure; see :func:`head_matrices`.
        level: Chance that a product of two random factors has a spike.
        seed: Seed of the simulated null.
    """
    paths = _Paths(network)
    cached: dict[tuple[str, Product], tuple[FloatArray, FloatArray]] = {}
    scanned = []
    for matrix in matrices:
        key = (matrix.attention.prefix, matrix.product)
        if key not in cached:
            cached = {place: factors for place, factors in cached.items() if place[0] == key[0]}
            cached[key] = matrix.attention.factors(matrix.product)
        left, right = (factors[matrix.head] for factors in cached[key])
        scanned.append(_measure_head(matrix, left, right, paths, level, seed))
    return scanned


def product_singular_values(left: FloatArray, right: FloatArray) -> FloatArray:
    """Singular values of ``left.T @ right``, descending, from the triangular factors of both.

    Examples:
        >>> rng = np.random.default_rng(0)
        >>> left, right = rng.normal(size=(2, 3, 8))
        >>> exact = np.linalg.svd(left.T @ right, compute_uv=False)[:3]
        >>> bool(np.allclose(product_singular_values(left, right), exact))
        True
    """
    core = _upper_triangle(left) @ _upper_triangle(right).T
    return np.asarray(np.linalg.svd(core, compute_uv=False))


def _upper_triangle(factor: FloatArray) -> FloatArray:
    return np.asarray(np.linalg.qr(factor.T, mode="r"))


def _measure_head(
    matrix: HeadMatrix, left: FloatArray, right: FloatArray, paths: _Paths, level: float, seed: int
) -> ScannedHead:
    layer = matrix.attention.query if matrix.product == "QK" else matrix.attention.output
    epsilon = spacing("float32" if layer.quantised else layer.dtype)
    finite = bool(np.isfinite(left).all() and np.isfinite(right).all())
    values = product_singular_values(left, right) if finite else np.empty(0)
    problem = "" if finite and values.size and values[0] > 0 else "constant" if finite else "not-finite"
    squares = values[::-1] ** 2
    sides = (max(matrix.shape), min(matrix.width, *matrix.shape))
    eigenvalues = Eigenvalues(
        squares, *sides, 1, epsilon, problem, (squares,), (2 * float(values[:1].sum()),)
    )
    warnings = [*_notes(matrix, paths), *([Flag(problem, _PROBLEMS[problem])] if problem else [])]
    nothing = Spectrum(
        eigenvalues, None, None, None, Gap(0.0, 0, 0), EntryTail(False, float("nan"), 0), None, ()
    )
    if problem:
        return ScannedHead(matrix, replace(nothing, warnings=tuple(warnings)), None, level)
    spikes, pvalue = count_spikes(values, left.shape, right.shape, level=level, seed=seed)
    verdict = (
        PhaseVerdict(Phase.BULK_SPIKES, Cause.PRODUCT)
        if spikes
        else PhaseVerdict(Phase.RANDOM_LIKE, Cause.PRODUCT, noise=True)
    )
    if not spikes and values.size >= 50:
        warnings.append(Flag("noise-like", "a product of two random factors explains the singular values"))
    if spikes == values.size // 2:
        warnings.append(
            Flag("spikes-capped", "half of the singular values or more are spikes; counting stops at half")
        )
    if sides[0] * epsilon > 0.01:
        text = f"the weights' dtype resolves singular values down to {sides[0] * epsilon:.2g} of the largest at worst"
        warnings.append(Flag("coarse-dtype", f"{text}: hard_rank counts only those above"))
    ambiguous = equal_runs(values)
    if ambiguous:
        runs = ", ".join(f"{first}-{last}" for first, last in ambiguous)
        warnings.append(
            Flag("ambiguous", f"singular values {runs} are equal: only the span of their vectors is defined")
        )
    tail = fit_tail(squares[squares > 0]) if np.count_nonzero(squares) >= FEWEST else None
    copying, copying_pvalue = paths.copying(left, right) if matrix.product == "OV" else (None, None)
    share, offset = paths.positional(left, right) if matrix.product == "QK" else (None, None)
    numbers = HeadNumbers(spikes, pvalue, ambiguous, copying, copying_pvalue, share, offset)
    sp = replace(nothing, tail=tail, verdict=verdict, warnings=tuple(warnings))
    return ScannedHead(matrix, sp, numbers, level)


_PROBLEMS = {
    "constant": "the product is zero: the head does nothing",
    "not-finite": "some weights are NaN or infinite; nothing is computed",
}


def _notes(matrix: HeadMatrix, paths: _Paths) -> Iterator[Flag]:
    if matrix.product == "QK" and paths.rotary:
        yield Flag(
            "rotary",
            "rotary positions turn keys against queries: this is QK at distance 0, each distance has its own",
        )
    if matrix.attention.groups < matrix.attention.heads:
        shared = matrix.attention.heads // matrix.attention.groups
        part = "keys" if matrix.product == "QK" else "values"
        yield Flag(
            "shared-heads", f"{shared} query heads share these {part}, so their products are not independent"
        )


def count_spikes(
    values: FloatArray, left: Sequence[int], right: Sequence[int], *, level: float = 0.01, seed: int = 0
) -> tuple[int, float]:
    """Singular values of a product beyond those of two random factors, and the p-value of the largest.

    The statistic is a singular value over the median of it and all smaller ones. It is compared with the same
    statistic of the largest singular value under the null, one singular value after the other; at most half count.

    Args:
        values: Singular values, descending.
        left: Shape of the left factor, width of the head first.
        right: Shape of the right factor.
        level: Chance that the null has any spike.
        seed: Seed of the simulation.

    Examples:
        >>> rng = np.random.default_rng(0)
        >>> left, right = rng.normal(size=(2, 16, 64))
        >>> count_spikes(product_singular_values(left, right), left.shape, right.shape)[0]
        0
    """
    null = _null_ratios(int(left[0]), int(left[1]), int(right[1]), max(_DRAWS, int(10 / level)), seed)
    limit = float(np.quantile(null, 1 - level, method="higher"))
    spikes = 0
    while spikes < values.size // 2 and values[spikes] > limit * float(np.median(values[spikes:])):
        spikes += 1
    beyond = int(np.count_nonzero(null >= values[0] / float(np.median(values))))
    return spikes, (beyond + 1) / (null.size + 1)


@cache
def _null_ratios(width: int, first: int, second: int, draws: int, seed: int) -> FloatArray:
    """Largest singular value over the median, of products of two Gaussian factors with ``width`` rows each."""
    rng = stream(seed, "heads", width, first, second)
    ratios = []
    for start in range(0, draws, 100):
        count = min(100, draws - start)
        product = _triangular(rng, count, width, first) @ _triangular(rng, count, width, second).transpose(
            0, 2, 1
        )
        values = np.linalg.svd(product, compute_uv=False)
        ratios.append(values[:, 0] / np.median(values, axis=1))
    return np.concatenate(ratios)


def _triangular(rng: np.random.Generator, count: int, width: int, inputs: int) -> FloatArray:
    """Triangular factors of Gaussian matrices ``(inputs, width)``: Bartlett's decomposition."""
    rank = min(width, inputs)
    upper = np.triu(rng.normal(size=(count, rank, width)), 1)
    places = np.arange(rank)
    upper[:, places, places] = np.sqrt(rng.chisquare(inputs - places, size=(count, rank)))
    return np.asarray(upper)


def equal_runs(values: FloatArray) -> tuple[tuple[int, int], ...]:
    """Runs of singular values, descending, of which neighbours differ by less than one part in a thousand.

    Examples:
        >>> equal_runs(np.array([3.0, 2.0, 2.0, 2.0, 1.0]))
        ((1, 3),)
    """
    close = np.r_[False, values[:-1] - values[1:] <= EQUAL * values[:-1], False]
    edges = np.flatnonzero(close[1:] != close[:-1])
    return tuple((int(first), int(last)) for first, last in edges.reshape(-1, 2))


class _Paths:
    """What leads into and out of the residual stream: embedding, head and positions of a network."""

    def __init__(self, network: Network) -> None:
        layers = network.layers()
        tables = [layer for layer in layers if layer.role is Role.EMBEDDING and layer.count == 1]
        positions = [layer for layer in tables if re.search("pos|wpe", layer.name, re.IGNORECASE)]
        tokens = [layer for layer in tables if layer not in positions and "type" not in layer.name]
        heads = [layer for layer in layers if layer.role is Role.HEAD and layer.count == 1]
        self._embedding = max(tokens, key=lambda layer: layer.shape[0], default=None)
        same = [x for x in heads if self._embedding is not None and x.shape == self._embedding.shape]
        self._head = same[0] if same else self._embedding
        self._positions = positions[0] if positions else None
        self._through: FloatArray | None = None
        config = network.config or {}
        named = any(_ROTARY.search(key) for key in config) or any("rotary" in t.name for t in network.tensors)
        self.rotary = self._positions is None and (named or config.get("model_type") in _ROTARY_MODELS)

    def copying(self, output: FloatArray, values: FloatArray) -> tuple[float | None, float | None]:
        """The copying score of ``output.T @ values`` and its p-values under random orientations of the outputs."""
        embedding, head = self._embedding, self._head
        if (
            embedding is None
            or head is None
            or embedding.shape[1] != values.shape[1]
            or head.shape[1] != output.shape[1]
        ):
            return None, None
        if self._through is None:
            table, rows = (np.asarray(next(x.matrices()), dtype=np.float32) for x in (embedding, head))
            self._through = np.asarray(table.T @ rows, dtype=np.float64)
        path = values @ self._through
        eigenvalues = np.linalg.eigvals(path @ output.T)
        size = float(np.abs(eigenvalues).sum())
        if size == 0:
            return None, None
        spread = float(np.linalg.norm(_upper_triangle(output) @ path)) / np.sqrt(output.shape[1])
        return float(eigenvalues.real.sum()) / size, _two_sided(float(np.sum(path * output)) / spread)

    def positional(self, query: FloatArray, key: FloatArray) -> tuple[float | None, int | None]:
        """The distance to which positions alone send most attention, and its mean share."""
        if self._positions is None or {self._positions.shape[1], query.shape[1]} != {key.shape[1]}:
            return None, None
        table = np.asarray(next(self._positions.matrices())[:_POSITIONS], dtype=np.float64)
        table = table - table.mean(axis=1, keepdims=True)
        table = table / np.maximum(table.std(axis=1, keepdims=True), np.finfo(float).tiny)
        logits = (table @ query.T) @ (table @ key.T).T / np.sqrt(query.shape[0])
        logits[np.triu_indices(len(table), 1)] = -np.inf
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        offsets = range(min(_OFFSETS, len(table) - 1))
        shares = [float(np.diagonal(weights, -offset)[_OFFSETS:].mean()) for offset in offsets]
        return (max(shares), int(np.argmax(shares))) if shares else (None, None)


def _two_sided(deviate: float) -> float:
    from scipy.stats import norm

    return float(2 * norm.sf(abs(deviate)))


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


@_one_thread
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
    others = {(other.tower, other.block, other.cross): other for other in _attentions(last)}
    for block in _attentions(first):
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


@_one_thread
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
