"""Freedom between layers of any network: changes of two layers that undo each other.

A neuron's scale before a ReLU, the unit of a channel between a convolution and its batch normalisation, the gain of a
norm and the columns after it, the basis of queries and keys: such a change moves the parameters without moving the
outputs. Candidates are guessed from shapes, names and the order of calls; none is believed before the network itself
has been run with the changed parameters and given the same outputs on the data. What a believed family adds is
counted on its first layer (the *carrier*), beyond what is free inside that layer. Carriers come before what undoes
them, so families on different carriers are independent; of several on one carrier the largest counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.func import functional_call

from strati.evaluate.hooks import Site, capture
from strati.evaluate.models import output_tensor
from strati.landscape.counts.attention_bases import attention_families
from strati.landscape.counts.layer_statistics import Watched
from strati.landscape.counts.local_symmetries import Family, is_norm, layer_families
from strati.landscape.counts.symmetry_generators import Weights
from strati.landscape.objective import FlatModel

SAME, SLACK = 1e-2, 1e5
"""Outputs count as unchanged if they move by less than this share of what the carrier's change alone does to them, and
by no more than so many units of rounding."""
ROWS_TIMES_PARAMETERS = 3e8
"""Data on which a candidate is tried: as many as this allows."""


@dataclass(frozen=True)
class Symmetries:
    """What is free between layers: per carrier among the watched layers, elsewhere in total, and by what."""

    between: dict[str, int] = field(default_factory=dict)
    elsewhere: int = 0
    kinds: tuple[str, ...] = ()


def find_symmetries(flat: FlatModel, x: Tensor, layers: list[Watched], rounding: float) -> Symmetries:
    """The families that hold for a network on its data, and what they add.

    Args:
        flat: The network, in float64.
        x: Data.
        layers: Its layers after the data have passed through.
        rounding: Relative rounding error of the network's operations.
    """
    trial = _Trial(flat, x, rounding)
    calls, reads = _calls(flat, x[:1], layers)
    best: dict[str, tuple[int, str]] = {}
    for family in _candidates(flat, layers, calls, reads):
        size = family.size()
        if size > best.get(family.carrier, (0, ""))[0] and trial.holds(family):
            best[family.carrier] = (size, family.kind)
    watched = {w.name for w in layers}
    return Symmetries(
        {name: size for name, (size, _) in best.items() if name in watched},
        sum(size for name, (size, _) in best.items() if name not in watched),
        tuple(dict.fromkeys(kind for _, kind in best.values())),
    )


class _Trial:
    """Runs the network with changed parameters and compares."""

    def __init__(self, flat: FlatModel, x: Tensor, rounding: float) -> None:
        self._flat, self._slack = flat, SLACK * rounding
        rows = max(1, int(ROWS_TIMES_PARAMETERS / max(1, flat.size)))
        self._x = x[:rows]
        self._weights = flat.split(flat.theta)
        with torch.no_grad():
            self._before = self._run({})

    def holds(self, family: Family) -> bool:
        """Whether the outputs stay, although the carrier's change alone would move them."""
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            changed = family.change(self._weights, generator)
            moved = float((self._run(changed) - self._before).abs().max())
            alone = {k: v for k, v in changed.items() if k in family.own}
            would = float((self._run(alone) - self._before).abs().max())
        scale = float(self._before.abs().max())
        if set(changed) <= set(family.own):  # one layer undoes itself
            return moved <= self._slack * scale
        return moved <= SAME * would and moved <= self._slack * scale

    def _run(self, changed: Weights) -> Tensor:
        weights = self._flat.fixed | self._weights | changed
        return output_tensor(functional_call(self._flat.module, weights, (self._x,)))


def _calls(flat: FlatModel, x: Tensor, layers: list[Watched]) -> tuple[list[str], dict[str, list[str]]]:
    """Names of layers and norms in the order of their calls, and which layers read each norm's output itself."""
    norms = [name for name, module in flat.module.named_modules() if is_norm(module)]
    order: list[str] = []
    source: dict[int, str] = {}
    outputs: list[Tensor] = []
    reads: dict[str, list[str]] = {name: [] for name in norms}

    def visit(place: Site, tensor: Tensor) -> Tensor:
        outputs.append(tensor)  # so that no other tensor takes its address
        if place.side == "output":
            order.append(place.module)
            if place.module in reads:
                source[id(tensor)] = place.module
        elif id(tensor) in source:
            reads[source[id(tensor)]].append(place.module)
        return tensor

    places = [Site(w.name, "input") for w in layers] + [Site(n) for n in [*(w.name for w in layers), *norms]]
    with torch.no_grad(), capture(flat.module, places, visit):
        flat(flat.theta, x)
    return order, reads


def _candidates(
    flat: FlatModel, layers: list[Watched], calls: list[str], reads: dict[str, list[str]]
) -> Iterator[Family]:
    """All proposals, attention's first: of several on one carrier the largest is kept."""
    once = {name for name in calls if calls.count(name) == 1}
    usable = {
        w.name: w for w in layers if w.name in once and w.tokens is None and w.activations and w.jacobians
    }
    yield from attention_families(flat.module, usable)
    yield from layer_families(flat.module, usable, [name for name in calls if name in once], reads)
