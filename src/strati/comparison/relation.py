"""How two related networks differ: the kind of relation, its direction where the weights show one, their distance."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.comparison.compare import matched_layers
from strati.comparison.pair_update import whole
from strati.comparison.unit_alignment import UnitOrder, unit_order
from strati.comparison.update import agreement, grid_step
from strati.comparison.update_rank import UpdateKind, effective_dtype, is_conversion, rank_test
from strati.core.rng import stream
from strati.io.roles import Role

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.io.layers import Layer
    from strati.io.network import Network

    Matrix = NDArray[Any]

_NOT_BY_CHANCE = 5.0  # standard deviations
_UNLIKE = 0.5  # cosine below which a layer may be a new one
_DTYPE = 0.01  # relative change above which no conversion of a dtype lies between two layers
_ZEROS = 0.02  # share of new zeros that is no accident
_UNCHANGED = 0.01  # relative change of the weights that pruning left
_STEPS = 0.75  # root mean square error of rounding to a grid, in steps; 0.29 to the nearest
_FAR = 0.25  # squared distance, relative to the norms, beyond which units may be scaled
_RANKED = 4  # layers whose update's rank is tested
_PRECISE = ("bfloat16", "float16", "float32", "float64")


class RelationKind(StrEnum):
    """What lies between two networks."""

    IDENTICAL = "identical"
    CONVERTED = "converted"
    QUANTISED = "quantised"
    LORA = "lora"
    FINE_TUNED = "fine-tuned"
    MERGED = "merged"
    PRUNED = "pruned"
    PARTLY_RETRAINED = "partly-retrained"
    UNRELATED = "unrelated"
    UNDECIDED = "undecided"


class LineageDirection(StrEnum):
    """Which of two networks came first."""

    A_TO_B = "a-to-b"
    B_TO_A = "b-to-a"


class _Change(StrEnum):
    SAME = "same"
    CONVERTED = "converted"
    QUANTISED = "quantised"
    PRUNED = "pruned"
    NEW = "new"
    RESHAPED = "reshaped"
    MOVED = "moved"


@dataclass(frozen=True)
class Relation:
    """What became of the weights.

    Attributes:
        kind: Of relation.
        direction: ``None`` where the weights do not show one.
        distance: Root of the squared distance of all layers over the product of their norms.
        separation: Root of the squared distance itself, which compares pairs of one family.
        new_layers: B's layers that resemble A's no more than chance allows.
        rank: Of a LoRA, the largest rank among the layers tested.
        renumbered: B numbers its units otherwise than A.
    """

    kind: RelationKind
    direction: LineageDirection | None
    distance: float
    separation: float
    new_layers: tuple[str, ...] = ()
    rank: int | None = None
    renumbered: bool = False


@dataclass(frozen=True)
class _LayerChange:
    name: str
    role: Role
    change: _Change
    direction: LineageDirection | None
    squared: float
    norms: float


def paired_by_blocks(first: Network, second: Network, blocks: Mapping[str, str]) -> list[tuple[Layer, Layer]]:
    """Layers of networks of different depth.

    Args:
        first: A.
        second: B.
        blocks: The block of A that each block of B resembles.
    """
    ours = {layer.name: layer for layer in first.layers()}
    pairs = []
    for layer in second.layers():
        name = layer.name
        if layer.block is not None:
            head, number, tail = name.partition(f".{layer.block}.")
            block = blocks.get(head + number.rstrip("."))
            name = name if block is None else f"{block}.{tail}"
        if name in ours:
            pairs.append((ours[name], layer))
    return pairs


def relation(
    first: Network,
    second: Network,
    *,
    in_order: bool,
    blocks: Mapping[str, str] | None = None,
    seed: int = 0,
) -> Relation:
    """Name what lies between two networks that are related.

    Args:
        first: A.
        second: B.
        blocks: Where depths differ, the block of A that each block of B resembles.
        in_order: Whether B numbers its units as A does.
        seed: Of the simulated rounding noise.
    """
    pairs = matched_layers(first, second) if blocks is None else paired_by_blocks(first, second, blocks)
    order = UnitOrder() if in_order else unit_order(first, second, pairs)
    changes = [_layer_change(a, b, order) for a, b in pairs]
    for activation in ("relu", "tanh"):  # units in place may still differ in scale or sign
        if (
            in_order
            and not order.layers
            and sum(x.squared for x in changes) > _FAR * sum(x.norms for x in changes)
        ):
            order = unit_order(first, second, pairs, activation)
            if order.layers:
                changes = [_layer_change(a, b, order) for a, b in pairs]
    renumbered = bool(order.layers) and not in_order
    squared = sum(change.squared for change in changes)
    norms = sum(change.norms for change in changes)
    distance = float(np.sqrt(squared / norms)) if norms > 0 else 1.0
    states = {change.change for change in changes}
    new = tuple(change.name for change in changes if change.change is _Change.NEW)
    if len(new) == len(changes):  # the units say otherwise
        new = ()
    vectors_moved = blocks is None and _vectors_moved(first, second, order)

    def settled(
        kind: RelationKind, direction: LineageDirection | None = None, rank: int | None = None
    ) -> Relation:
        return Relation(kind, direction, distance, float(np.sqrt(squared)), new, rank, renumbered)

    if new:
        return settled(RelationKind.PARTLY_RETRAINED)
    if blocks is not None:
        shallower = len(second.layers()) < len(first.layers())
        single = len(set(blocks.values())) == len(blocks)
        exact = states <= {_Change.SAME} and not vectors_moved
        dropped = LineageDirection.A_TO_B if shallower and single and exact else None
        return settled(RelationKind.PRUNED if shallower and single else RelationKind.FINE_TUNED, dropped)
    if _Change.RESHAPED in states:
        narrower = {np.sign(a.parameters - b.parameters) for a, b in pairs if a.shape != b.shape}
        if states <= {_Change.SAME, _Change.RESHAPED} and narrower in ({1}, {-1}):
            return settled(
                RelationKind.PRUNED, LineageDirection.A_TO_B if narrower == {1} else LineageDirection.B_TO_A
            )
        return settled(RelationKind.PRUNED)
    if _Change.PRUNED in states:
        return settled(RelationKind.PRUNED, _one_direction(changes, _Change.PRUNED))
    if _Change.QUANTISED in states and _Change.MOVED not in states:
        return settled(RelationKind.QUANTISED, _one_direction(changes, _Change.QUANTISED))
    if states <= {_Change.SAME} and not vectors_moved:
        return settled(RelationKind.IDENTICAL)
    if states <= {_Change.SAME, _Change.CONVERTED} and not vectors_moved:
        return settled(RelationKind.CONVERTED, _one_direction(changes, _Change.CONVERTED))
    moved = [pair for pair, change in zip(pairs, changes, strict=True) if change.change is _Change.MOVED]
    rank, direction = _low_rank(moved, order, seed)
    if rank is not None:
        return settled(RelationKind.LORA, direction, rank)
    return settled(RelationKind.FINE_TUNED)


def _one_direction(changes: Sequence[_LayerChange], which: _Change) -> LineageDirection | None:
    directions = {change.direction for change in changes if change.change is which}
    if which is _Change.CONVERTED:  # weights that both dtypes hold exactly show nothing
        directions -= {None}
    return directions.pop() if len(directions) == 1 else None


def _versions(a: Layer, b: Layer, order: UnitOrder) -> tuple[Matrix, Matrix]:
    renumbering = order.layers.get(b.name)
    second = list(b.matrices())
    if renumbering is not None:
        second = [renumbering.apply(matrix) for matrix in second]
    return whole(list(a.matrices())), whole(second)


def _layer_change(a: Layer, b: Layer, order: UnitOrder) -> _LayerChange:
    def change(which: _Change, direction: LineageDirection | None = None) -> _LayerChange:
        return _LayerChange(b.name, b.role, which, direction, squared, norms)

    if a.shape != b.shape or a.count != b.count:
        squared = norms = 0.0
        return change(_Change.RESHAPED)
    before, after = _versions(a, b, order)
    x, y = (np.asarray(matrix, np.float32) for matrix in (before, after))
    top = float(max(np.abs(x).max(initial=0.0), np.abs(y).max(initial=0.0)))
    if not np.isfinite(top):
        squared = norms = 0.0
        return change(_Change.MOVED)
    if top > 0:  # squares of huge or tiny weights leave float32's range
        x, y = x / np.float32(top), y / np.float32(top)
    step = y - x
    squared = float(np.vdot(step, step)) * top**2
    sizes = float(np.vdot(x, x)), float(np.vdot(y, y))
    norms = float(np.sqrt(sizes[0] * sizes[1])) * top**2
    if squared == 0:
        return change(_Change.SAME if a.dtype == b.dtype else _Change.CONVERTED)
    if norms == 0:
        return change(_Change.MOVED)
    if squared < _DTYPE**2 * norms and is_conversion(before, after):
        places = [_PRECISE.index(effective_dtype(matrix)) for matrix in (before, after)]
        finer = LineageDirection.A_TO_B if places[0] > places[1] else LineageDirection.B_TO_A
        return change(_Change.CONVERTED, finer)
    grids = _step_of(a, before), _step_of(b, whole(list(b.matrices())))
    coarse = [grid for grid in grids if grid is not None]
    if len(coarse) == 1 and squared / step.size <= (_STEPS * coarse[0]) ** 2:
        return change(
            _Change.QUANTISED, LineageDirection.A_TO_B if grids[0] is None else LineageDirection.B_TO_A
        )
    cosine = float(np.vdot(x, y)) * top**2 / norms
    if cosine < _UNLIKE:
        score = agreement(before, after)
        if score is not None and score < _NOT_BY_CHANCE:
            return change(_Change.NEW)
    pruned = _pruned(x, y)
    return change(_Change.MOVED) if pruned is None else change(_Change.PRUNED, pruned[0])


def _pruned(x: Matrix, y: Matrix) -> tuple[LineageDirection | None] | None:
    """Whether one matrix has zeros that the other has not; the direction where all else is unchanged."""
    shares = float((x == 0).mean()), float((y == 0).mean())
    if abs(shares[0] - shares[1]) < _ZEROS:
        return None
    dense, sparse = (x, y) if shares[0] < shares[1] else (y, x)
    left = sparse != 0
    change = float(np.linalg.norm((sparse - dense)[left]))
    if change > _UNCHANGED * float(np.linalg.norm(dense[left])):
        return (None,)
    return (LineageDirection.A_TO_B if shares[0] < shares[1] else LineageDirection.B_TO_A,)


def _step_of(layer: Layer, matrix: Matrix) -> float | None:
    """The step of the grid that a matrix's rows, or groups of their entries, lie on; ``None`` for no grid."""
    rounding = layer.rounding()
    if rounding is not None and rounding.error > 0:
        return float(np.sqrt(12 * rounding.error))
    return grid_step(matrix)


def _low_rank(
    moved: Sequence[tuple[Layer, Layer]], order: UnitOrder, seed: int
) -> tuple[int | None, LineageDirection | None]:
    """The largest rank of the layers' updates where all tested have low rank, and which side holds the update."""
    candidates = [pair for pair in moved if min(pair[0].shape) >= 8 and pair[0].role is not Role.EMBEDDING]
    if not candidates:
        return None, None
    places = np.unique(np.linspace(0, len(candidates) - 1, _RANKED).astype(int))
    ranks, presence = [], []
    for place in places:
        a, b = candidates[int(place)]
        before, after = _versions(a, b, order)
        step = np.asarray(after, np.float64) - np.asarray(before, np.float64)
        if not np.isfinite(step).all():
            return None, None
        left, singular, right = np.linalg.svd(step, full_matrices=False)
        test = rank_test(before, after, singular[::-1].copy(), rng=stream(seed, "lineage", a.name))
        if test.kind is not UpdateKind.LOW_RANK:
            return None, None
        ranks.append(test.rank)
        presence += list(_presence(before, after, left[:, : test.rank], right[: test.rank]))
    in_first, in_second = np.mean(presence, axis=0)
    # The update's directions mean nothing to the network that it was added to, and are large in the other.
    if in_first < 4 and in_second > 4 * in_first:
        return max(ranks), LineageDirection.A_TO_B
    if in_second < 4 and in_first > 4 * in_second:
        return max(ranks), LineageDirection.B_TO_A
    return max(ranks), None


def _presence(before: Matrix, after: Matrix, left: Matrix, right: Matrix) -> Iterator[tuple[float, float]]:
    """For every direction of an update, its squared size in A and in B, of an entry's mean square."""
    for u, v in zip(left.T, right, strict=True):
        sizes = [float(u @ np.asarray(m, np.float64) @ v) ** 2 for m in (before, after)]
        scale = float(np.square(np.asarray(before, np.float64)).mean())
        yield sizes[0] / scale, sizes[1] / scale


def _vectors_moved(first: Network, second: Network, order: UnitOrder) -> bool:
    """Whether a bias or norm that both networks have differs by more than a conversion."""
    here = {tensor.name: tensor for tensor in first.tensors}
    for tensor in second.tensors:
        other = here.get(tensor.name)
        if other is None or other.shape != tensor.shape or len(tensor.shape) != 1 or not tensor.floating:
            continue
        a, b = first.read(tensor.name), second.read(tensor.name)
        renumbering = order.vectors.get(tensor.name)
        if renumbering is not None:
            b = renumbering.apply(b)
        if np.array_equal(a, b):
            continue
        scale = float(np.abs(np.asarray(a, np.float64)).max(initial=0.0))
        step = float(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)).max(initial=0.0))
        if step > 1e-2 * scale or (a.dtype == b.dtype and step > 1e-6 * scale):
            return True
    return False
