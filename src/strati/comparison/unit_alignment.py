r"""Hidden units of two networks brought into one order before their weights are subtracted.

Permuting the hidden units of a network (neurons, channels, attention heads, key-value groups) changes every weight
and not the function. Units are matched by the cosines of their incoming and outgoing weights, an assignment problem
(weight matching; Ainsworth, Hayase and Srinivasa 2023, 2209.04836). In a chain of layers the matchings depend on each
other and are repeated until none changes. Where the activation allows, units may also differ in sign (tanh) or scale
(ReLU; the linear half of a gated unit), which moves from a unit's incoming to its outgoing weights.

An order is used only where it at least halves the squared distance of the weights it concerns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.comparison.independence import CHAIN, CHANNELS_LAST, follows
from strati.core.assignment import assign
from strati.io.roles import Role

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.io.layers import Layer
    from strati.io.network import Network

    Array = NDArray[np.float64]
    Ints = NDArray[np.int64]

BETTER = 0.5
"""An order must at least halve the squared distance."""

_SWEEPS = 30  # over a chain of layers; a handful is usual
_PROMISING = 0.75  # of the squared distance, after the first sweep; chance alone leaves nearly all of it
_MANY = 4096  # units above which a sample decides whether there is anything to do
_SAMPLE = 128
_ALIKE = 0.3
_CONSISTENT = 0.1  # share of the norms' squared log-ratios that scales may leave unexplained
_NARROW = 8  # the width of a head is a multiple of it
_SCALES = frozenset({"relu", "leaky_relu", "linear", "identity"})
_SIGNS = frozenset({"tanh", "linear", "identity"})


@dataclass(frozen=True)
class Renumbering:
    """Which row and column of the second network stands at each place of the first, and what it is multiplied by."""

    rows: tuple[int, ...] | None = None
    columns: tuple[int, ...] | None = None
    row_scales: tuple[float, ...] | None = None
    column_scales: tuple[float, ...] | None = None

    def apply(self, matrix: NDArray[Any]) -> NDArray[Any]:
        """The second network's matrix (or vector of rows) in the first one's numbering, in its own dtype."""
        if self.rows is not None:
            matrix = matrix[list(self.rows)]
        if self.columns is not None:
            matrix = matrix[:, list(self.columns)]
        dtype = matrix.dtype
        if self.row_scales is not None:
            scales = np.asarray(self.row_scales)
            matrix = (matrix * (scales[:, None] if matrix.ndim == 2 else scales)).astype(dtype)
        if self.column_scales is not None:
            matrix = (matrix * np.asarray(self.column_scales)).astype(dtype)
        return matrix


@dataclass(frozen=True)
class UnitOrder:
    """Renumberings of the second network: of its layers by name, and of its vectors (biases, norms) by tensor."""

    layers: Mapping[str, Renumbering] = field(default_factory=dict)
    vectors: Mapping[str, Renumbering] = field(default_factory=dict)


@dataclass
class _Pair:
    """A layer in both networks, read when asked for, and how the second is renumbered so far."""

    first: Layer
    second: Layer
    index: list[Ints] = field(default_factory=list)
    scale: list[Array] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.index = [np.arange(n) for n in self.second.shape]
        self.scale = [np.ones(n) for n in self.second.shape]

    def a(self) -> Array:
        """The first version: matrices by rows by columns."""
        return np.stack([m.astype(np.float64) for m in self.first.matrices()])

    def b(self) -> Array:
        """The second version, renumbered."""
        rows, columns = self.index
        scales = self.scale[0][:, None] * self.scale[1]
        return np.stack(
            [m.astype(np.float64)[np.ix_(rows, columns)] * scales for m in self.second.matrices()]
        )

    def distance(self) -> float:
        return float(np.square(self.a() - self.b()).sum())

    def take(self, axis: int, order: Ints, scales: Array) -> None:
        self.index[axis] = self.index[axis][order]
        self.scale[axis] = self.scale[axis][order] * scales

    def renumbering(self) -> Renumbering | None:
        """``None`` where nothing is moved."""
        orders = [None if (x == np.arange(x.size)).all() else tuple(x.tolist()) for x in self.index]
        scales = [None if (x == 1).all() else tuple(x.tolist()) for x in self.scale]
        if orders == [None, None] and scales == [None, None]:
            return None
        return Renumbering(orders[0], orders[1], scales[0], scales[1])


@dataclass(frozen=True)
class _Member:
    """A side of a layer whose rows (axis 0) or columns (axis 1) are units, ``width`` of them to a unit.

    Several ``parts`` hold the units one after another, as a stacked q, k and v does.
    """

    pair: _Pair
    axis: int
    width: int = 1
    parts: int = 1
    compared: bool = True
    scaled: bool = False

    def features(self, which: str) -> Array:
        """One row of unit length for each unit."""
        flat = self._by_unit(which)
        norms = np.linalg.norm(flat, axis=1, keepdims=True)
        return np.asarray(flat / np.where(norms > 0, norms, 1.0), np.float64)

    def norms(self, which: str) -> Array:
        return np.asarray(np.linalg.norm(self._by_unit(which), axis=1), np.float64)

    def _by_unit(self, which: str) -> Array:
        moved = np.moveaxis(self.pair.a() if which == "a" else self.pair.b(), 1 + self.axis, 0)
        units = moved.shape[0] // (self.width * self.parts)
        return moved.reshape(self.parts, units, -1).swapaxes(0, 1).reshape(units, -1)

    def take(self, order: Ints, scales: Array) -> None:
        wide = (order[:, None] * self.width + np.arange(self.width)).reshape(-1)
        every = (np.arange(self.parts)[:, None] * wide.size + wide).reshape(-1)
        self.pair.take(self.axis, every, np.tile(np.repeat(scales, self.width), self.parts))


@dataclass(frozen=True)
class _Interface:
    """Units between layers: what writes them, what reads them, and what their activation allows."""

    members: tuple[_Member, ...]
    units: int
    block: int = 0
    signs: bool = False
    scales: bool = False

    def distance(self) -> float:
        return sum(pair.distance() for pair in {id(m.pair): m.pair for m in self.members}.values())

    def sample(self) -> tuple[bool, float]:
        """Whether units of a sample are each most like the one in their own place, and how like (median)."""
        picked = np.linspace(0, self.units - 1, min(self.units, _SAMPLE)).astype(np.int64)
        member = next(m for m in self.members if m.compared)
        cosines = np.abs(member.features("a")[picked] @ member.features("b").T)
        return bool((cosines.argmax(axis=1) == picked).all()), float(np.median(cosines.max(axis=1)))

    def best(self) -> tuple[Ints, Array]:
        """The order of the second network's units, and their signs."""
        plain, turned = np.zeros((2, self.units, self.units))
        for member in self.members:
            if member.compared:
                cosines = member.features("a") @ member.features("b").T
                if member.scaled and self.signs:
                    turned += cosines
                else:
                    plain += cosines
        score = plain + np.abs(turned)
        if self.block:
            inside = np.arange(self.units) // self.block
            score = np.where(inside[:, None] == inside, score, score.min() - 1e3 * self.units)
        order = assign(score)
        signs = np.where(turned[np.arange(self.units), order] < 0, -1.0, 1.0)
        return order, signs

    def take(self, order: Ints, scales: Array) -> None:
        for member in self.members:
            member_scales = scales if member.scaled else np.ones(self.units)
            member.take(order, member_scales if member.axis == 0 else 1 / member_scales)

    def signs_only(self) -> None:
        """Drop the rounding that scales and their inverses leave."""
        for member in self.members:
            member.pair.scale[member.axis] = np.sign(member.pair.scale[member.axis])

    def scale_factors(self) -> Array | None:
        """What makes the scaled members' norms agree: incoming weights times it, outgoing over it.

        ``None`` where no such factor does: the product of both norms, which scales leave alone, differs too.
        """
        logs = np.zeros((2, self.units))
        for member in self.members:
            if member.scaled:
                a, b = member.norms("a"), member.norms("b")
                usable = (a > 0) & (b > 0)
                logs[member.axis] += np.where(
                    usable, np.log(np.where(usable, a / np.where(b > 0, b, 1), 1)), 0
                )
        if np.square(logs[0] + logs[1]).sum() > _CONSISTENT * np.square(logs[0] - logs[1]).sum():
            return None
        return np.asarray(np.exp((logs[0] - logs[1]) / 2), np.float64)


def unit_order(
    first: Network,
    last: Network,
    pairs: Sequence[tuple[Layer, Layer]],
    activation: str | None = None,
    *,
    least: float = BETTER,
) -> UnitOrder:
    """How the last network numbers its hidden units, where that is not as the first does.

    Args:
        first: A network.
        last: Another one.
        pairs: Their matched layers, in the network's order.
        activation: Between plain linear layers; by default the settings' or ReLU.
        least: Share of the squared distance that an order must at most leave. With 1, any order that brings the
            networks closer counts, as for networks that were trained independently.
    """
    layers: dict[str, Renumbering] = {}
    vectors: dict[str, Renumbering] = {}
    for interfaces in _interface_groups(first, last, pairs, activation):
        for interface in _settled(interfaces, least):
            for tensor, renumbering in _vectors(first, last, interface):
                vectors.setdefault(tensor, renumbering)
        for member in (m for interface in interfaces for m in interface.members):
            layer_renumbering = member.pair.renumbering()
            if layer_renumbering is not None:
                layers[member.pair.second.name] = layer_renumbering
    return UnitOrder(layers, vectors)


def _settled(interfaces: Sequence[_Interface], least: float) -> list[_Interface]:
    """Renumber until no order changes, then undo what leaves more than a share of the distance; those that are left."""
    apart = sum(interface.distance() for interface in interfaces)
    if apart == 0 or not np.isfinite(apart):
        return []
    samples = [interface.sample() for interface in interfaces]
    # To halve the distance, units need a cosine of about a half. In a chain the first layer shows it.
    if least == BETTER and max(likeness for _, likeness in samples) < _ALIKE:
        return []
    if any(i.units > _MANY for i in interfaces) and all(in_order for in_order, _ in samples):
        return []
    total = [(np.arange(i.units), np.ones(i.units)) for i in interfaces]
    for sweep in range(_SWEEPS):
        moved = False
        for n, interface in enumerate(interfaces):
            order, signs = interface.best()
            if (order == np.arange(order.size)).all() and (signs == 1).all():
                continue
            moved = True
            interface.take(order, signs)
            total[n] = (total[n][0][order], total[n][1][order] * signs)
        if not moved:
            break
        left = sum(interface.distance() for interface in interfaces) if sweep == 0 else 0.0
        if left > _PROMISING * apart * least / BETTER:
            for member in (m for interface in interfaces for m in interface.members):
                member.pair.reset()
            return []
    for n, interface in enumerate(interfaces):
        if interface.scales:
            before, factors = interface.distance(), interface.scale_factors()
            if factors is None:
                continue
            unmoved = np.arange(interface.units)
            interface.take(unmoved, factors)
            if interface.distance() > BETTER * before:
                interface.take(unmoved, 1 / factors)
                interface.signs_only()
            else:
                total[n] = (total[n][0], total[n][1] * factors)
    renumbered = []
    for (order, scales), interface in zip(total, interfaces, strict=True):
        if (order == np.arange(order.size)).all() and (scales == 1).all():
            continue
        after = interface.distance()
        back = np.argsort(order)
        interface.take(back, 1 / scales[back])
        if after <= least * interface.distance():
            interface.take(order, scales)
            renumbered.append(interface)
        else:
            interface.signs_only()
    return renumbered


def _interface_groups(
    first: Network, last: Network, pairs: Sequence[tuple[Layer, Layer]], activation: str | None
) -> Iterator[list[_Interface]]:
    """Interfaces that depend on each other: those of one block, those of a chain."""
    usable = [
        (a, b)
        for a, b in pairs
        if a.shape == b.shape and a.count == b.count and a.adapter is None and b.adapter is None
    ]
    blocks: dict[tuple[str, int | None], dict[Role, list[tuple[Layer, Layer]]]] = {}
    for a, b in usable:
        if a.block is not None and a.count == 1:
            head, _, _ = a.name.partition(f".{a.block}.")
            blocks.setdefault((f"{head}.{a.block}", a.expert), {}).setdefault(a.role, []).append((a, b))
    settings = first.config or last.config or {}
    act = str(settings.get("hidden_act") or settings.get("activation_function") or activation or "")
    heads = first.names.heads()
    for roles in blocks.values():
        yield from _mlp(roles, act)
        yield from _attention(roles, heads)
    run: list[tuple[Layer, Layer]] = []
    for a, b in usable:
        if a.role not in CHAIN or a.kind not in ("linear", "conv") or (run and not follows(run[-1][0], a)):
            yield from _chain(run, act or "relu")
            run = []
        if a.role in CHAIN and a.kind in ("linear", "conv"):
            run.append((a, b))
    yield from _chain(run, act or "relu")


def _mlp(roles: Mapping[Role, list[tuple[Layer, Layer]]], act: str) -> Iterator[list[_Interface]]:
    outs, ins, gates = (roles.get(r, []) for r in (Role.MLP_OUT, Role.MLP_IN, Role.MLP_GATE))
    if len(outs) != 1 or len(ins) != 1 or len(gates) > 1 or ins[0][0].shape[0] != outs[0][0].shape[1]:
        return
    gated = bool(gates)
    members = [
        _Member(_Pair(*ins[0]), 0, scaled=True),
        _Member(_Pair(*outs[0]), 1, scaled=True),
        *(_Member(_Pair(*g), 0) for g in gates),
    ]
    free = gated or act in _SCALES
    yield [_Interface(tuple(members), ins[0][0].shape[0], signs=gated or act in _SIGNS, scales=free)]


def _attention(
    roles: Mapping[Role, list[tuple[Layer, Layer]]], heads: tuple[int, int, int]
) -> Iterator[list[_Interface]]:
    """Heads by key-value groups, then the query heads inside each group."""
    many, groups, _ = heads
    fused, outs = (roles.get(r, []) for r in (Role.QKV, Role.ATTENTION_OUT))
    if many > 1 and len(fused) == len(outs) == 1 and fused[0][0].shape[0] % (3 * many) == 0:
        width = fused[0][0].shape[0] // (3 * many)
        if outs[0][0].shape[1] == many * width:
            for wide, many_parts in ((width, 3), (3 * width, 1)):  # stacked, or head by head
                qkv = _Member(_Pair(*fused[0]), 0, wide, many_parts)
                yield [_Interface((qkv, _Member(_Pair(*outs[0]), 1, width)), many)]
        return
    parts = [roles.get(r, []) for r in (Role.QUERY, Role.KEY, Role.VALUE, Role.ATTENTION_OUT)]
    if any(len(part) != 1 for part in parts):
        return
    q, k, v, out = (_Pair(*part[0]) for part in parts)
    rows = [*(pair.first.shape[0] for pair in (q, k, v)), out.first.shape[1]]
    if not many and len(set(rows)) == 1 and rows[0] % _NARROW == 0:
        many = groups = rows[0] // _NARROW  # no settings: parts of heads, which are in order where heads are
    if not many or many % max(groups, 1):
        return
    if rows[0] % many or rows[1] % groups or rows[2] % groups or rows[3] % many or many == 1:
        return
    alone = many == groups
    widths = [rows[0] // groups, rows[1] // groups, rows[2] // groups, rows[3] // groups]
    by_group = _Interface(
        (
            _Member(q, 0, widths[0], compared=alone),
            _Member(k, 0, widths[1]),
            _Member(v, 0, widths[2]),
            _Member(out, 1, widths[3], compared=alone),
        ),
        groups,
    )
    if alone:
        yield [by_group]
        return
    inside = _Interface(
        (_Member(q, 0, rows[0] // many), _Member(out, 1, rows[3] // many)), many, block=many // groups
    )
    yield [by_group, inside] if groups > 1 else [inside]


def _chain(run: Sequence[tuple[Layer, Layer]], act: str) -> Iterator[list[_Interface]]:
    """Layers one after another: the rows of each are the columns of the next, of a flattened map several."""
    if len(run) < 2:
        return
    pairs = [_Pair(a, b) for a, b in run]
    interfaces = []
    for here, after in pairwise(pairs):
        units = here.first.shape[0]
        plain = here.first.kind == after.first.kind == "linear"
        # A flattened map keeps the places of a channel together, or, with channels last, all channels of a place.
        places = after.first.shape[1] // units
        width, parts = (1, places) if here.second.network.format in CHANNELS_LAST else (places, 1)
        members = (_Member(here, 0, scaled=True), _Member(after, 1, width, parts, scaled=True))
        interfaces.append(
            _Interface(members, units, signs=plain and act in _SIGNS, scales=plain and act in _SCALES)
        )
    yield interfaces


def _vectors(first: Network, last: Network, interface: _Interface) -> Iterator[tuple[str, Renumbering]]:
    """Biases of what writes the units, by name, and other vectors of their number that the order brings closer."""
    here, there = ({t.name: t for t in network.tensors} for network in (first, last))
    for member in interface.members:
        if member.axis == 1:
            continue
        rows = member.pair.index[0]
        scales = member.pair.scale[0]
        renumbering = Renumbering(
            tuple(rows.tolist()), None, None if (scales == 1).all() else tuple(scales.tolist())
        )
        bias = member.pair.second.tensor.removesuffix("weight") + "bias"
        for name, tensor in there.items():
            if tensor.shape != (rows.size,) or not tensor.floating:
                continue
            if name == bias:
                yield name, renumbering
            elif name in here and here[name].shape == tensor.shape:
                a, b = (np.asarray(net.read(name), np.float64) for net in (first, last))
                if np.square(a - b[rows]).sum() <= BETTER * np.square(a - b).sum() and not np.array_equal(
                    a, b
                ):
                    yield name, Renumbering(tuple(rows.tolist()))
