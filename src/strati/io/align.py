"""Undo differences in how weights are stored, so that two versions of a layer can be subtracted.

llama.cpp (and Meta's files) order the rows of query and key differently from transformers; Conv1D stores inputs first;
one file fuses matrices that another stores separately; a vocabulary was resized; AWQ moved the scales of channels
between layers. Each conversion is a pure function. It is applied because of the weights, never because of a name: the
two versions must agree far better afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.io.roles import Role, modules
from strati.io.views import View, half_of_rows, part_of_heads, part_of_qkv

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.io.layers import Layer

    Matrix = NDArray[Any]

QKV = (Role.QUERY, Role.KEY, Role.VALUE)
_SAMPLE = 48  # columns on which conversions are tried
_BETTER = 0.5  # a conversion must at least halve the squared distance
_ROUNDS = 10  # alternating fits of rows and columns; scales of real files converge in three or four
_RELATED = 0.2  # correlation from which on two embedding tables are versions of one another


@dataclass(frozen=True)
class Aligned:
    """Two versions of a matrix in one shape and order.

    Attributes:
        first: The first version.
        second: The second, stored as the first is.
        how: The conversion: ``rope-permutation``, ``transposed``, ``qkv-order``, ``shared-rows``, ``channel-scales``;
            ``None`` if there was none.
        extra: Rows that only one version has, as ``(which version, first row, last row)``.
    """

    first: Matrix
    second: Matrix
    how: str | None = None
    extra: tuple[int, int, int] | None = None


def align(first: Matrix, second: Matrix, role: str, widths: Sequence[int] = ()) -> Aligned | None:
    """Convert the second version of a matrix to the shape and order of the first.

    Args:
        first: A matrix, outputs by inputs.
        second: The other version.
        role: The layer's role: rotary order is undone for query and key, tables are cut to their shared rows.
        widths: Widths of an attention head to try; empty for all that divide the rows.

    Returns:
        Both versions, or ``None`` if the shapes do not fit.

    Examples:
        >>> W = np.random.default_rng(0).normal(size=(16, 6))
        >>> aligned = align(W, W[interleaved_rows(16, heads=2)], "attention.q", widths=[8])
        >>> aligned.how, bool((aligned.second == W).all())
        ('rope-permutation', True)
    """
    if first.shape != second.shape:
        return _reshaped(first, second, role)
    plain = _distance(first, second)
    if plain == 0:
        return Aligned(first, second)
    best, how = plain, None
    aligned = second
    for name, rows in _reordered(first.shape, role, widths):
        distance = _distance(first, second, rows)
        if distance < min(best, _BETTER * plain):
            best, how, aligned = distance, name, second[rows]
    if first.shape[0] == first.shape[1] and role not in (Role.EMBEDDING, Role.HEAD):
        distance = _distance(first, second.T)
        if distance < min(best, _BETTER * plain):
            how, aligned = "transposed", second.T
    return Aligned(first, aligned, how)


def rescaled(pair: Aligned) -> Aligned:
    r"""The first version with its rows and columns scaled like those of the second, if the scales explain the change.

    Scales of channels can be moved from a layer into the one before it (SmoothQuant, AWQ) without changing what the
    network computes: :math:`B \approx \mathrm{diag}(r)\, A\, \mathrm{diag}(c)`, fitted by least squares in turn.

    Examples:
        >>> rng = np.random.default_rng(0)
        >>> A, c = rng.normal(size=(40, 30)), rng.uniform(0.5, 2, size=30)
        >>> aligned = rescaled(Aligned(A, A * c + 1e-6 * rng.normal(size=A.shape)))
        >>> aligned.how, bool(np.allclose(aligned.first, A * c, atol=1e-4))
        ('channel-scales', True)
    """
    a, b = pair.first.astype(np.float64), pair.second.astype(np.float64)
    if min(a.shape) < 2 or not (np.isfinite(a).all() and np.isfinite(b).all()):
        return pair
    product, square = a * b, a * a
    rows, columns = np.ones(a.shape[0]), np.ones(a.shape[1])
    for _ in range(_ROUNDS):
        columns = _ratio(rows @ product, (rows * rows) @ square)
        rows = _ratio(product @ columns, square @ (columns * columns))
    scaled = a * rows[:, None] * columns
    if np.square(b - scaled).sum() >= _BETTER * np.square(b - a).sum():
        return pair
    return replace(pair, first=scaled, how="channel-scales")


def _ratio(top: NDArray[np.float64], bottom: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.divide(top, bottom, out=np.ones_like(top), where=bottom > 0)


def interleaved_rows(rows: int, heads: int) -> NDArray[np.int64]:
    """For each row in the order of llama.cpp and Meta (the halves of a head alternate), the row in transformers' order.

    Examples:
        >>> interleaved_rows(8, heads=2).tolist()
        [0, 2, 1, 3, 4, 6, 5, 7]
    """
    return np.arange(rows).reshape(heads, 2, rows // heads // 2).swapaxes(1, 2).reshape(rows)


def by_head_rows(rows: int, heads: int) -> NDArray[np.int64]:
    """For each row of a matrix ordered head by head (GPT-NeoX, BLOOM), the row of a stacked q, k, v."""
    return np.arange(rows).reshape(3, heads, rows // (3 * heads)).swapaxes(0, 1).reshape(rows)


def _reordered(
    shape: tuple[int, ...], role: str, widths: Sequence[int]
) -> Iterator[tuple[str, NDArray[np.int64]]]:
    rows = shape[0]
    if role in (Role.QUERY, Role.KEY):
        for width in widths or range(4, min(rows, 512) + 1, 2):
            if width > 2 and width % 2 == 0 and rows % width == 0:
                order = interleaved_rows(rows, rows // width)
                yield "rope-permutation", np.argsort(order)
                yield "rope-permutation", order
    elif role == Role.QKV and rows % 3 == 0:
        for width in widths:
            if width > 1 and rows % (3 * width) == 0 and rows > 3 * width:
                order = by_head_rows(rows, rows // (3 * width))
                yield "qkv-order", np.argsort(order)
                yield "qkv-order", order


def _reshaped(first: Matrix, second: Matrix, role: str) -> Aligned | None:
    table = role in (Role.EMBEDDING, Role.HEAD)
    if first.shape == second.shape[::-1] and not table:
        return Aligned(first, second.T, "transposed")
    if not table or first.shape[1] != second.shape[1]:
        return None
    shared = min(first.shape[0], second.shape[0])
    a, b = first[:shared], second[:shared]
    if _correlation(a, b) < _RELATED:
        return None
    longer = 0 if first.shape[0] > shared else 1
    last = (first, second)[longer].shape[0] - 1
    return Aligned(a, b, "shared-rows", (longer, shared, last))


def _distance(first: Matrix, second: Matrix, rows: NDArray[np.int64] | None = None) -> float:
    """Squared distance on a sample of the columns."""
    columns = np.unique(np.linspace(0, first.shape[1] - 1, _SAMPLE).astype(np.int64))
    a, b = first[:, columns].astype(np.float64), second[:, columns].astype(np.float64)
    return float(np.square(a - (b if rows is None else b[rows])).sum())


def _correlation(a: Matrix, b: Matrix) -> float:
    rows = np.unique(np.linspace(0, a.shape[0] - 1, 2000).astype(np.int64))
    x, y = a[rows].astype(np.float64), b[rows].astype(np.float64)
    scale = float(np.linalg.norm(x) * np.linalg.norm(y))
    return float((x * y).sum()) / scale if scale > 0 else 0.0


def unfused(layers: Sequence[Layer], others: Sequence[Layer] = ()) -> tuple[Layer, ...]:
    """The layers with fused gate-and-up matrices split into two.

    A matrix is fused if its name says so, or if its block has no gate and the next matrix has half as many inputs as
    this one has outputs. Its rows are those of the gate, then those of the input map, or the two alternate (gpt-oss):
    this follows from the gates of another network if there are some, else from the configuration.

    Args:
        layers: The layers of a network.
        others: Layers of another network that stores its gates separately.
    """
    gated = {(x.block, x.expert) for x in layers if x.role is Role.MLP_GATE}
    inner = {(x.block, x.expert): x.shape[1] for x in layers if x.role is Role.MLP_OUT}
    fused: set[str] = set()
    for layer in layers:
        place = (layer.block, layer.expert)
        halves = layer.role is Role.MLP_IN and layer.count == 1 and layer.shape[0] % 2 == 0
        named = modules(layer.tensor)[-1:] in (["gate_up_proj"], ["w12"], ["gate_up"])
        if halves and (named or (place not in gated and inner.get(place, 0) * 2 == layer.shape[0])):
            fused.add(layer.name)
    turns = _alternating([x for x in layers if x.name in fused], others)
    separate: list[Layer] = []
    for layer in layers:
        if layer.name in fused:
            separate += [_half(layer, i, role, turns) for i, role in ((0, Role.MLP_GATE), (1, Role.MLP_IN))]
        else:
            separate.append(layer)
    return tuple(separate)


def split_like(layers: Sequence[Layer], others: Sequence[Layer], heads: int = 0) -> tuple[Layer, ...]:
    """The layers with fused query-key-value matrices split like those of another network.

    For networks whose configuration does not say how they are fused: the rows of the three follow from the other
    network's shapes, and the better agreement decides whether they are stacked or ordered head by head.

    Args:
        layers: The layers of a network.
        others: Layers of another one.
        heads: Its attention heads; 0 if unknown.
    """
    apart: dict[int | None, dict[Role, Layer]] = {}
    for other in others:
        if other.role in QKV and other.count == 1:
            apart.setdefault(other.block, {}).setdefault(other.role, other)
    separate: list[Layer] = []
    for layer in layers:
        parts = apart.get(layer.block, {})
        shapes = [parts[role].shape for role in QKV if role in parts]
        fused_shape = (sum(rows for rows, _ in shapes), layer.shape[1])
        fits = (
            len(shapes) == 3
            and layer.shape == fused_shape
            and {cols for _, cols in shapes} == {fused_shape[1]}
        )
        if layer.role is not Role.QKV or layer.count != 1 or not fits:
            separate.append(layer)
            continue
        sizes = (shapes[0][0], shapes[1][0], shapes[2][0])
        ways = [[part_of_qkv(layer.cut, i, sizes) for i in range(3)]]
        if heads and len(set(sizes)) == 1 and sizes[0] % heads == 0:
            ways.append([part_of_heads(layer.cut, i, heads) for i in range(3)])
        cuts = (
            min(ways, key=lambda way: _apart_by(layer, way[0], parts[Role.QUERY]))
            if len(ways) > 1
            else ways[0]
        )
        separate += [_part(layer, cut, "qkv"[i], QKV[i]) for i, cut in enumerate(cuts)]
    return tuple(separate)


def _apart_by(layer: Layer, cut: View, other: Layer) -> float:
    return _distance(next(other.matrices()), next(cut.matrices(layer.network.read(layer.tensor))))


def _alternating(fused: Sequence[Layer], others: Sequence[Layer]) -> bool:
    """Whether the rows of gate and input map alternate in a network's fused matrices."""
    gates = {(x.block, x.expert): x for x in others if x.role is Role.MLP_GATE and x.count == 1}
    for layer in fused:
        gate = gates.get((layer.block, layer.expert))
        if gate is not None and gate.shape == (layer.shape[0] // 2, layer.shape[1]):
            fused_weight, part = next(layer.matrices()), next(gate.matrices())
            halves, in_turn = (
                _distance(part, fused_weight[: gate.shape[0]]),
                _distance(part, fused_weight[::2]),
            )
            if min(halves, in_turn) < _BETTER * max(halves, in_turn):
                return in_turn < halves
    config = fused[0].network.config or {} if fused else {}
    return config.get("model_type") == "gpt_oss"


def _half(layer: Layer, which: int, role: Role, alternating: bool) -> Layer:
    """One of the two matrices of a fused layer as a layer."""
    word = "gate" if role is Role.MLP_GATE else "up"
    return _part(layer, half_of_rows(layer.cut, which, word, alternating=alternating), word, role)


def _part(layer: Layer, cut: View, word: str, role: Role) -> Layer:
    """A part of a fused layer as a layer."""
    return replace(layer, name=f"{layer.name}[{word}]", role=role, cut=cut)
