r"""Attention heads: the spectra of the products QK and OV of every head.

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

import re
from collections.abc import Callable, Iterator, Sequence
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
from strati.spectra.head_paths import Paths, upper_triangle
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
_CROSS = re.compile("cross|encoder_attn|EncDec", re.IGNORECASE)


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
        positional: Of QK, the mean share of attention that positions alone give to the position
            ``positional_offset`` before: from the embedding of positions, or from rotary positions and the mean
            content of all tokens. ``None`` where the network has neither.
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
    blocks = list(attentions(network))
    if not blocks:
        raise BadInputError("heads", "found no block with query, key, value and output projections")
    return tuple(
        HeadMatrix(attention, head, product)
        for attention in blocks
        for head in range(attention.heads)
        for product in PRODUCTS
    )


Function = TypeVar("Function", bound=Callable[..., Any])


def one_thread(function: Function) -> Function:
    """Run a function with one thread of BLAS: the matrices of a head are too small for several."""
    limited: Function = threadpool_limits.wrap(limits=1, user_api="blas")(function)
    return limited


_PROJECTIONS = (Role.QUERY, Role.KEY, Role.VALUE, Role.ATTENTION_OUT)


def attentions(network: Network) -> Iterator[AttentionBlock]:
    """The attention of every block that has all four projections.

    Raises:
        BadInputError: Nothing says how many heads it has.
    """
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


@one_thread
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
    paths = Paths(network)
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
    core = upper_triangle(left) @ upper_triangle(right).T
    return np.asarray(np.linalg.svd(core, compute_uv=False))


def _measure_head(
    matrix: HeadMatrix, left: FloatArray, right: FloatArray, paths: Paths, level: float, seed: int
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
    share, offset = paths.positional(matrix, left, right) if matrix.product == "QK" else (None, None)
    numbers = HeadNumbers(spikes, pvalue, ambiguous, copying, copying_pvalue, share, offset)
    sp = replace(nothing, tail=tail, verdict=verdict, warnings=tuple(warnings))
    return ScannedHead(matrix, sp, numbers, level)


_PROBLEMS = {
    "constant": "the product is zero: the head does nothing",
    "not-finite": "some weights are NaN or infinite; nothing is computed",
}


def _notes(matrix: HeadMatrix, paths: Paths) -> Iterator[Flag]:
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
