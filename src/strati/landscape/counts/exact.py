"""The exact count: rank of the Hessian of the behavioural loss, layer by layer, where that is affordable.

At its minimum the Hessian is ``2/n J^T J`` with ``J`` the Jacobian of all outputs on all data with
respect to all parameters (eq. 10 with its factor 2). Its rank is that of ``J``, found from singular values of ``J``
itself, rows and columns brought to one size first: the square would lose all that is below 1e-8 of the largest.
What rounding can do is measured by a second Jacobian, of a network a few units in the last place away (``ranks``).
What it leaves open in small chains, many digits decide: weights and data are taken as the numbers they are, the
Jacobian is computed with mpmath, brought to rows and columns of one size, and eliminated with complete pivoting in
fixed-point integers. Pivots end at some size or go on down to the last digits; only the first is a rank. Slopes of
saturated neurons can be smaller than any number of digits shows beside others (the slope of tanh at 1e5 has 86,858
zeros after the point); nothing is decided then.
Freedom shared by several layers is told apart by adding layers one at a time, the last one first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import jacrev, vmap

from strati.landscape.counts.ranks import (
    LEAST_NOISE,
    TWIN,
    Factor,
    RankRange,
    balanced,
    decide,
    fold,
    gram_of,
    has_hidden_entries,
    independent,
    perturb,
    rank_range,
)
from strati.landscape.mlp.sequential import Chain
from strati.landscape.mlp.statistics_pass import backward, batches, gated_forward, perturbed_copy
from strati.landscape.objective import FlatModel, run

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from strati.landscape.mlp.sequential import Chain, ChainStage, Nonlinearity

    Exact = NDArray[np.object_]

MOST_EXACT = 20_000
"""Dimensions up to which the exact rank can be asked for."""
MOST_DIMENSIONS = 2000
MOST_FLOPS = 1.5e11
"""Largest matrix whose singular values are taken, and most multiplications to factorise the Jacobian: some seconds."""

MOST_ENTRIES = 50_000_000
"""Entries of the Jacobian, which is kept whole where it has fewer rows than columns."""

WEAK = 1e-6
"""Below this share of the largest singular value a direction moves the outputs by less than float32 rounding."""
SPREAD = 1e15
"""Parameters whose effects differ by more than this are remarked on."""
MOST_KEPT = 8_000_000
"""Entries of the Jacobian and its twin that are kept, not computed again for the second pass."""
CANCELLED, BESIDE, SURE = 0.1, 1e-10, 1e-9
"""A column that differs from its twin by more than this share is what rounding left of terms that cancel (the gradient
of a bias of keys), if it is smaller than so much beside the usual column and the usual column is known so well."""

Rows = Callable[[], Iterator[tuple[Tensor, Tensor]]]
"""Batches of rows of the Jacobian, ``(values, parameters)``, the last layer's parameters first, each with its twin."""


@dataclass(frozen=True)
class ExactRanks:
    """Rank of the Hessian restricted to the last layer, the last two, and so on.

    Attributes:
        ranges: One per layer, in the order of the layers: ``ranges[l]`` is of layers ``l`` and later.
        above: Eigenvalues of ``J^T J / n`` over all layers above a loss scale, if one was given.
        weak: Directions that are used, but move the outputs by less than :data:`WEAK` of the strongest.
        spread: Largest over smallest size of a parameter's effect, among those that have one.
        hidden: Entries of the Jacobian are real but too small to be seen beside others, so that no singular value
            that is not found can be called zero.
        most: Number of parameters or of values, whichever is smaller.
    """

    ranges: tuple[RankRange, ...]
    above: int | None
    weak: int = 0
    spread: float = 1.0
    hidden: bool = False
    most: int = 0

    @property
    def ranks(self) -> tuple[int, ...]:
        """What is certain of each range, never more than adding layers allows."""
        cumulative = [r.low for r in self.ranges]
        for k in range(len(cumulative) - 2, -1, -1):
            cumulative[k] = max(cumulative[k], cumulative[k + 1])
        return tuple(cumulative)

    @property
    def total(self) -> RankRange:
        """Rank over all layers; where something is hidden, at most what there are parameters."""
        low = self.ranks[0]
        return RankRange(low, self.most if self.hidden else max(self.ranges[0].high, low))

    def free(self, sizes: list[int]) -> list[int]:
        """Free directions per layer, each counted once: what the layer's parameters do not add to the rank."""
        after = [*self.ranks[1:], 0]
        return [n - (r - a) for n, r, a in zip(sizes, self.ranks, after, strict=True)]


def affordable(parameters: int, values: int) -> bool:
    """Whether the exact rank can be had in some seconds.

    Args:
        parameters: Number of parameters.
        values: Number of data times number of outputs.
    """
    smaller, larger = min(parameters, values), max(parameters, values)
    fits = parameters <= values or smaller * larger <= MOST_ENTRIES
    return fits and smaller <= MOST_DIMENSIONS and 2.0 * larger * smaller**2 <= MOST_FLOPS


def exact_ranks(
    rows: Rows, sizes: list[int], values: int, data: int, *, epsilon: float | None = None
) -> ExactRanks:
    """Ranks of the Hessian by layers.

    Args:
        rows: Gives the Jacobian in batches, columns ordered from the last layer to the first, and its twin.
        sizes: Number of parameters of each layer, first layer first.
        values: Number of data times number of outputs.
        data: Number of data.
        epsilon: Also count the eigenvalues of ``J^T J / n`` above this.
    """
    edges = torch.tensor([0, *sizes[::-1]]).cumsum(0).tolist()
    if 2 * edges[-1] * values <= MOST_KEPT:
        kept_rows = list(rows())
        rows = lambda: iter(kept_rows)  # noqa: E731
    columns, size = _columns(rows, edges[-1])
    even = _EqualisedRows(rows, columns)
    ranges, singular = (_tall if edges[-1] <= values else _wide)(even, edges)
    used = singular[: ranges[-1].low]
    weak = int((used < WEAK * singular[0]).sum()) if used.numel() else 0
    live = size[columns <= 2 * size]  # not those that are little more than rounding
    spread = float(live.max() / live.min()) if live.numel() else 1.0
    above = None if epsilon is None else _above(rows, edges[-1] <= values, epsilon * data)
    return ExactRanks(tuple(ranges[::-1]), above, weak, spread, even.hidden, min(edges[-1], values))


def least_rank(parameters: int, outputs: int, data: int, first_rows: Callable[[int], Rows]) -> int | None:
    """A rank that is certain, where the exact one takes too long: that on the first data, as many as seconds allow.

    Args:
        parameters: Number of parameters.
        outputs: Values per datum.
        data: Number of data.
        first_rows: The Jacobian on so many of the first data.

    Returns:
        ``None`` where already one datum takes too long: nothing can be told. Also up to :data:`MOST_EXACT` parameters,
        whose exact rank can be asked for.
    """
    if parameters <= MOST_EXACT:
        return None
    values = min(MOST_DIMENSIONS / 2, MOST_ENTRIES / 2 / parameters, (MOST_FLOPS / 20 / parameters) ** 0.5)
    count = min(int(values) // outputs, data)
    if count < 1:
        return None
    return exact_ranks(first_rows(count), [parameters], count * outputs, count).total.low


def settled(ranks: ExactRanks, ranges: tuple[RankRange, ...] | None) -> ExactRanks:
    """The ranks with what more digits decided, where they did; what doubles took for certain stands.

    Args:
        ranks: In double precision, undecided.
        ranges: In many digits; ``None`` if they do not decide, either.
    """
    if ranges is None or any(new.low < old for new, old in zip(ranges, ranks.ranks, strict=True)):
        return ranks
    # What doubles cannot tell from zero is far below WEAK.
    weak = ranks.weak + ranges[0].low - ranks.ranks[0]
    return replace(ranks, ranges=ranges, hidden=False, weak=weak)


def _columns(rows: Rows, number: int) -> tuple[Tensor, Tensor]:
    """What every column is divided by, and its size."""
    power = error = torch.zeros(number, dtype=torch.float64)
    for part, twin in rows():
        power = power.to(part.device) + part.square().sum(0)
        error = error.to(part.device) + (part - twin).square().sum(0)
    size, error = power.sqrt(), error.sqrt()
    live = size > 0
    rho = torch.where(live, error / size.clamp(min=1e-300), torch.zeros_like(size))
    usual = max(LEAST_NOISE, 4 * float(rho[live].median())) if bool(live.any()) else LEAST_NOISE
    live &= ~_cancelled(size, rho)
    scale = torch.where(live, size * (rho / usual).clamp(min=1.0), torch.full_like(size, torch.inf))
    return scale, size


def _above(rows: Rows, tall: bool, threshold: float) -> int:
    """How many eigenvalues of ``J^T J`` exceed a threshold."""
    parts = [part for part, _ in rows()]
    gram = sum(part.T @ part for part in parts) if tall else gram_of(torch.cat(parts))
    assert isinstance(gram, Tensor)
    return int((torch.linalg.eigvalsh(gram) > threshold).sum())


def _cancelled(size: Tensor, rho: Tensor) -> Tensor:
    """Columns that are zero but for rounding: all noise, and tiny beside columns that are known well.

    Args:
        size: Of every column.
        rho: Its relative difference from the twin's.
    """
    good = (size > 0) & (rho < SURE)
    if 2 * int(good.sum()) <= int((size > 0).sum()):
        return torch.zeros_like(good)
    return (rho > CANCELLED) & (size < BESIDE * float(size[good].median()))


class _EqualisedRows:
    """The Jacobian and its twin with columns and rows brought to one size; rows of zeros are left out."""

    def __init__(self, rows: Rows, columns: Tensor) -> None:
        self._rows, self.columns, self.hidden = rows, columns, False

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for part, twin in self._rows():
            part, twin = part / self.columns, twin / self.columns
            size = torch.linalg.vector_norm(part, dim=1)
            error = torch.linalg.vector_norm(part - twin, dim=1)
            live = size > 0
            rho = (error[live] / size[live]).clamp(min=LEAST_NOISE)
            usual = 4 * float(rho.median()) if rho.numel() else 1.0
            scale = (size[live] * (rho / usual).clamp(min=1.0))[:, None]
            part, twin = part[live] / scale, twin[live] / scale
            self.hidden |= has_hidden_entries(part, part, twin)
            yield part, twin


def _tall(even: _EqualisedRows, edges: list[int]) -> tuple[list[RankRange], Tensor]:
    """At least as many values as parameters: one factor, whose leading columns are the last layers'."""
    factor = Factor(edges[-1], whole=True, like=even.columns)
    for part, twin in even:
        factor.add(part)
        factor.compare(part, twin)
    upper, noise = factor.matrix, factor.noise
    ranges = [rank_range(upper[:end, :end], noise[:end], factor.count) for end in edges[1:-1]]
    scaled, floor = balanced(upper, noise)
    singular = torch.linalg.svdvals(scaled)
    whole_range = decide(singular, floor, factor.count) if scaled.numel() else RankRange(0, 0)
    return [*ranges, whole_range], singular


def _wide(even: _EqualisedRows, edges: list[int]) -> tuple[list[RankRange], Tensor]:
    """Fewer values than parameters: the factor of the transposed matrix, layer after layer.

    Where the rows are independent beyond doubt, their Gram matrix shows it for a fraction of a factorisation, and more
    layers cannot raise the rank.
    """
    pairs = list(even)
    rows, twins = (torch.cat([pair[k] for pair in pairs]) for k in range(2))
    factor = Factor(len(rows), whole=True, like=even.columns)
    ranges: list[RankRange] = []
    gram, noise = rows.new_zeros(len(rows), len(rows)), rows.new_zeros(len(rows))
    for start, end in pairwise(edges):
        block = rows[:, start:end]
        gram += gram_of(block)
        noise += (block - twins[:, start:end]).square().sum(1)
        if end >= len(rows) and independent(gram, noise):
            full = RankRange(len(rows), len(rows))
            ranges += [full] * (len(edges) - 1 - len(ranges))
            remaining = rows[:, end:]
            eigenvalues = torch.linalg.eigvalsh(gram + gram_of(remaining))
            return ranges, eigenvalues.clamp(min=0).sqrt().flip(0)
        factor.add(block.T)
        factor.compare(block.T, twins[:, start:end].T)
        ranges.append(rank_range(factor.matrix, factor.noise, factor.count))
    return ranges, torch.linalg.svdvals(factor.matrix)


def chain_rows(chain: Chain, x: Tensor, places: list[int] | None = None, seed: int = 0) -> Rows:
    """The Jacobian of a chain from its layers' activations and Jacobians (eq. 11).

    Args:
        chain: The network.
        x: Data.
        places: Which layers vary; all by default.
        seed: Of the twin.
    """
    chain = chain.to(torch.float64)
    other = perturbed_copy(chain, seed)

    def rows() -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        most = max(1, 20_000_000 // (chain.parameters * chain.widths[-1] + 1))
        with torch.no_grad():
            for batch in batches(chain, x):
                for small in torch.split(chain.rows(batch), most):
                    activations, preactivations = chain.forward(small)
                    slopes = chain.slopes(preactivations)
                    near, inclines = gated_forward(other, perturb(small, generator), slopes)
                    yield (
                        _chain_jacobian(chain, activations, slopes, places),
                        _chain_jacobian(other, near, inclines, places),
                    )

    return rows


def module_rows(
    model: nn.Module, x: Any, parts: list[list[str]], *, step: float = TWIN, seed: int = 0
) -> tuple[Rows, int, int]:
    """The Jacobian of any module by automatic differentiation.

    Args:
        model: The network.
        x: Data, rows first.
        parts: Names of the parameters of each layer that varies, first layer first.
        step: Relative distance of the twin.
        seed: Of the twin.

    Returns:
        Its batches, the number of values (data times outputs) and the number of data.
    """
    flat = FlatModel(model, layers=[name for part in parts for name in part], dtype=torch.float64)
    inputs = flat.inputs(x)
    if not isinstance(inputs, Tensor):
        raise TypeError("one tensor of data is needed")
    with torch.no_grad():
        outputs = run(flat, flat.theta, inputs[:1])[0].numel()
    where = dict(zip(flat.names, torch.split(torch.arange(flat.size), list(flat.sizes)), strict=True))
    columns = torch.cat([where[name] for part in parts[::-1] for name in part]).to(flat.theta.device)
    near = perturb(flat.theta, torch.Generator().manual_seed(seed), step)

    def single(theta: Tensor, row: Tensor) -> Tensor:
        return flat(theta, row[None])[0].reshape(-1)

    def rows() -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        for batch in torch.split(inputs, max(1, 10_000_000 // (flat.size * outputs + 1))):
            pairs = ((flat.theta, batch), (near, perturb(batch, generator, step)))
            jacobians = [vmap(jacrev(single), in_dims=(None, 0))(t, b).detach() for t, b in pairs]
            jacobian_rows, twin_rows = (jacobian.reshape(-1, flat.size)[:, columns] for jacobian in jacobians)
            yield jacobian_rows, twin_rows

    return rows, outputs * int(inputs.shape[0]), int(inputs.shape[0])


def _chain_jacobian(
    chain: Chain, activations: list[Tensor], slopes: list[Tensor], places: list[int] | None
) -> Tensor:
    blocks = []
    for index, jacobian in backward(chain, slopes, torch.diag_embed(slopes[-1])):
        if places is not None and index not in places:
            continue
        stage = chain.stages[index]
        f = fold(activations[index], stage.bias is not None)
        product = jacobian[:, :, :, None] * f[:, None, None, :]
        blocks.append(product.reshape(product.shape[0] * product.shape[1], -1))
    return torch.cat(blocks, dim=1)


BITS = 512
"""Bits after the point."""
LEAST_PIVOT, LARGEST_REST = 150, 300
"""A rank is decided if all its pivots are above ``2^-LEAST_PIVOT`` and nothing above ``2^-LARGEST_REST`` is left.
Rounding leaves at most about ``2^-(BITS - LEAST_PIVOT)``."""
MOST_PRODUCTS = 3_000_000
"""Multiplications of integers that are affordable: some seconds."""


def digits_affordable(parameters: int, values: int) -> bool:
    """Whether an elimination in many digits takes seconds.

    Args:
        parameters: Number of parameters.
        values: Number of data times number of outputs.
    """
    return parameters * values * min(parameters, values) <= MOST_PRODUCTS


def chain_ranks(chain: Chain, x: Tensor, places: list[int]) -> tuple[RankRange, ...] | None:
    """Ranks of a chain's Jacobian restricted to the last chosen layer, the last two, and so on.

    Args:
        chain: The network, in double precision.
        x: Data.
        places: Which layers vary, ascending.

    Returns:
        One rank per chosen layer, in the order of the layers; ``None`` where many digits do not decide, either, or
        the network has an activation that is not computed here.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from strati.landscape.mlp.sequential import as_chain
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Sequential(nn.Linear(1, 5), nn.Sigmoid(), nn.Linear(5, 1))
        >>> [r.low for r in chain_ranks(as_chain(model).to(torch.float64), torch.randn(30, 1), [0, 1])]
        [16, 6]
    """
    import mpmath

    if any(_activation(stage.activation) is None for stage in chain.stages):
        return None
    with mpmath.workprec(BITS + 128):
        rows = [row for datum in _exact(chain.rows(x)) for row in _jacobian(chain, datum, places)]
        scaled = _even(np.array(rows, dtype=object))
        if scaled is None:
            return None
    sizes = [chain.stages[k].parameters for k in reversed(places)]
    edges = np.cumsum([0, *sizes]).tolist()
    ranks = _eliminated(scaled, edges)
    return None if ranks is None else tuple(RankRange(rank, rank) for rank in reversed(ranks))


def _jacobian(chain: Chain, datum: Exact, places: list[int]) -> list[Exact]:
    """The outputs' derivatives by the chosen layers' parameters on one datum, last layer first."""
    import mpmath

    inputs, slopes = [datum], []
    weights = [_exact(stage.weight) for stage in chain.stages]
    for stage, weight in zip(chain.stages, weights, strict=True):
        p = weight.dot(inputs[-1]) + (0 if stage.bias is None else _exact(stage.bias))
        functions = _activation(stage.activation)
        assert functions is not None
        function, slope = functions
        inputs.append(np.array([function(v) for v in p], dtype=object))
        slopes.append(np.array([slope(v) for v in p], dtype=object))
    rows = []
    for output in range(chain.widths[-1]):
        back = np.array([mpmath.mpf(k == output) for k in range(chain.widths[-1])], dtype=object)
        row: list[Exact] = []
        for k in range(len(chain.stages) - 1, -1, -1):
            back = back * slopes[k]
            if k in places:
                row.append(np.outer(back, _with_constant(inputs[k], chain.stages[k])).ravel())
            back = back.dot(weights[k])
        rows.append(np.concatenate(row))
    return rows


def _with_constant(inputs: Exact, stage: ChainStage) -> Exact:
    import mpmath

    return inputs if stage.bias is None else np.append(inputs, mpmath.mpf(1))


def _exact(tensor: Tensor) -> Exact:
    """Doubles as numbers of many digits, without rounding."""
    import mpmath

    exact: Exact = np.vectorize(mpmath.mpf, otypes=[object])(tensor.detach().double().cpu().numpy())
    return exact


def _activation(kind: Nonlinearity) -> tuple[Callable[[Any], Any], Callable[[Any], Any]] | None:
    """An activation and its derivative for numbers of many digits; ``None`` where there is none."""
    import mpmath as mp

    if kind.slopes is not None:
        below, above = (mp.mpf(slope) for slope in kind.slopes)
        return (lambda p: p * (above if p > 0 else below)), (lambda p: above if p > 0 else below)
    if kind.slope is None:  # options that are not the usual ones
        return None
    functions = {
        "tanh": (mp.tanh, lambda p: mp.sech(p) ** 2),
        "sigmoid": (lambda p: 1 / (1 + mp.exp(-p)), lambda p: 1 / (2 + mp.exp(-p) + mp.exp(p))),
        "silu": (
            lambda p: p / (1 + mp.exp(-p)),
            lambda p: (1 + p / (1 + mp.exp(p))) / (1 + mp.exp(-p)),
        ),
        "gelu": (lambda p: p * mp.ncdf(p), lambda p: mp.ncdf(p) + p * mp.npdf(p)),
    }
    return functions.get(kind.name)


def _even(matrix: Exact) -> Exact | None:
    """Rows and columns brought to one size, as integers of :data:`BITS` bits after the point.

    ``None`` if an entry is not zero but too small to be seen beside the largest of its column or row.
    """
    import mpmath

    for axis in (0, 1):
        size = np.abs(matrix).max(axis=axis, keepdims=True)
        matrix = matrix / np.where(size == 0, mpmath.mpf(1), size)
    sizes = np.abs(matrix)
    if np.any((sizes != 0) & (sizes < mpmath.ldexp(1, -LEAST_PIVOT))):
        return None
    fixed: Exact = np.vectorize(lambda v: int(mpmath.nint(mpmath.ldexp(v, BITS))), otypes=[object])(matrix)
    return fixed


def _eliminated(matrix: Exact, edges: list[int]) -> list[int] | None:
    """Ranks of the columns up to each edge, by elimination group after group; ``None`` if a pivot is neither."""
    ranks, rank = [], 0
    remaining = matrix
    for start, end in pairwise(edges):
        group_columns = end - start  # the first columns of what is left belong to this group
        while group_columns and remaining.shape[0]:
            sizes = np.abs(remaining[:, :group_columns])
            row, column = divmod(int(sizes.argmax()), group_columns)
            size = sizes[row, column]
            if size < 1 << (BITS - LARGEST_REST):
                break
            if size < 1 << (BITS - LEAST_PIVOT):
                return None
            rank += 1
            pivot = remaining[row, column]
            factors = (np.delete(remaining[:, column], row) << BITS) // pivot
            top = np.delete(remaining[row], column)
            remaining = np.delete(np.delete(remaining, row, 0), column, 1)
            remaining = remaining - ((factors[:, None] * top) >> BITS)
            group_columns -= 1
        remaining = remaining[:, group_columns:]
        ranks.append(rank)
    return ranks
