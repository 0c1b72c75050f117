"""Hidden units of a network with their incoming and outgoing weights, in chains of layers.

A chain is a run of layers whose hidden units may be numbered freely: the two halves of a transformer's MLP, the heads
of its attention, the layers of a plain network. Both ends of a chain keep their order: pixels, classes, the residual
stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from strati.io.roles import Role

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.io.layers import Layer
    from strati.io.network import Network

    Weights = NDArray[np.float32]

_CHAIN = (Role.LINEAR, Role.HEAD, Role.CONV)
_CHANNELS_LAST = frozenset({"keras", "h5", "flax"})


@dataclass(frozen=True)
class UnitChain:
    """Layers one after another.

    Attributes:
        names: One for the units between each layer and the next.
        kind: ``mlp``, ``attention`` or ``chain``.
        layers: The layers that are read; ``mlp``: in, out, gate; ``attention``: q, k, v (or the fused one), out.
        heads: Of attention, the number of units.
    """

    names: tuple[str, ...]
    kind: str
    layers: tuple[Layer, ...]
    heads: int = 0

    @cached_property
    def ends(self) -> tuple[int, int]:
        """Width of what the chain reads and of what it writes."""
        weights = self.weights
        return weights[0][0].shape[2], weights[-1][0].shape[1]

    @cached_property
    def weights(self) -> tuple[tuple[Weights, ...], ...]:
        """Of every layer its parts: positions by rows by columns, units one row (or column) each."""
        if self.kind == "mlp":
            first, last, *gate = (_read(layer) for layer in self.layers)
            return ((first, *gate), (last,))
        if self.kind == "attention":
            *ins, out = (_read(layer)[0] for layer in self.layers)
            rows = [part for matrix in ins for part in _by_head_rows(matrix, self.heads, fused=len(ins) == 1)]
            return (tuple(rows), (_by_head_columns(out, self.heads),))
        return tuple((part,) for part in self._of_chain())

    def _of_chain(self) -> Iterator[Weights]:
        units = 0
        for layer in self.layers:
            matrix = _read(layer)
            places = matrix.shape[2] // units if units else 1
            if places > 1:  # a flattened map: the places of a channel together, or all channels of a place
                rows = matrix.shape[1]
                last = layer.network.format in _CHANNELS_LAST
                cut = matrix[0].reshape((rows, places, units) if last else (rows, units, places))
                matrix = np.ascontiguousarray(cut.transpose((1, 0, 2) if last else (2, 0, 1)))
            units = matrix.shape[1]
            yield matrix


def _read(layer: Layer) -> Weights:
    stacked = np.stack([np.asarray(m, np.float32) for m in layer.matrices()])
    return stacked if np.isfinite(stacked).all() else np.where(np.isfinite(stacked), stacked, np.float32(0))


def _by_head_rows(matrix: Weights, heads: int, *, fused: bool) -> list[Weights]:
    parts = np.split(matrix, 3) if fused else [matrix]
    return [part.reshape(heads, -1, part.shape[1]).transpose(1, 0, 2) for part in parts]


def _by_head_columns(matrix: Weights, heads: int) -> Weights:
    return matrix.reshape(matrix.shape[0], heads, -1).transpose(2, 0, 1)


def chains(network: Network) -> list[UnitChain]:
    """The chains of a network, in its order; attention only where a network has no other units."""
    blocks: dict[str, dict[Role, list[Layer]]] = {}
    usable = [layer for layer in network.layers() if layer.adapter is None]
    for layer in usable:
        if layer.block is not None and layer.count == 1:
            label = network.names.label(layer.name)
            head, _, _ = label.partition(f".{layer.block}.")
            expert = "" if layer.expert is None else f"[{layer.expert}]"
            blocks.setdefault(f"{head}.{layer.block}{expert}", {}).setdefault(layer.role, []).append(layer)
    units_of_network = [chain for name, roles in blocks.items() for chain in _mlp(name, roles)]
    if not units_of_network:
        units_of_network = list(_plain(usable))
    if not units_of_network:
        heads = network.names.heads()[0]
        units_of_network = [
            chain for name, roles in blocks.items() for chain in _attention(name, roles, heads)
        ]
    return units_of_network


def _mlp(name: str, roles: dict[Role, list[Layer]]) -> Iterator[UnitChain]:
    outs, ins, gates = (roles.get(role, []) for role in (Role.MLP_OUT, Role.MLP_IN, Role.MLP_GATE))
    if len(outs) != 1 or len(ins) != 1 or len(gates) > 1:
        return
    if ins[0].shape[0] == outs[0].shape[1] and all(gate.shape == ins[0].shape for gate in gates):
        yield UnitChain((name,), "mlp", (ins[0], outs[0], *gates))


def _attention(name: str, roles: dict[Role, list[Layer]], heads: int) -> Iterator[UnitChain]:
    fused, outs = roles.get(Role.QKV, []), roles.get(Role.ATTENTION_OUT, [])
    apart = [roles.get(role, []) for role in (Role.QUERY, Role.KEY, Role.VALUE)]
    if heads < 2 or len(outs) != 1 or outs[0].shape[1] % heads:
        return
    if len(fused) == 1 and fused[0].shape[0] % (3 * heads) == 0:
        yield UnitChain((name,), "attention", (fused[0], outs[0]), heads)
    elif all(len(part) == 1 for part in apart):
        # Key and value heads that several query heads share are no units of their own: queries alone are read.
        ins = [part[0] for part in apart if part[0].shape[0] == outs[0].shape[1]]
        if len(ins) > 1 or (ins and ins[0].role is Role.QUERY):
            yield UnitChain((name,), "attention", (*(ins if len(ins) == 3 else ins[:1]), outs[0]), heads)


def _plain(layers: Sequence[Layer]) -> Iterator[UnitChain]:
    run: list[Layer] = []
    for layer in layers:
        fits = layer.role in _CHAIN and layer.kind in ("linear", "conv")
        if run and not (fits and _follows(run[-1], layer)):
            yield from _closed(run)
            run = []
        if fits:
            run.append(layer)
    yield from _closed(run)


def _closed(run: Sequence[Layer]) -> Iterator[UnitChain]:
    if len(run) > 1:
        yield UnitChain(tuple(layer.name for layer in run[:-1]), "chain", tuple(run))


def _follows(before: Layer, layer: Layer) -> bool:
    units, columns = before.shape[0], layer.shape[1]
    return columns == units or (before.kind == "conv" and layer.kind == "linear" and columns % units == 0)
