"""What chance alone does to a study: performance shuffled over layers, networks and points.

A metric that has nothing to do with performance may still differ between layers, between networks and between the
layers of one network. Shuffles keep all of that: whole layers change places within their type, whole networks change
places, and the points of one layer of one network change places among themselves. With fewer than eight networks the
networks change places in each layer separately: three networks alone have six orders.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

    from strati.core.results import FloatArray, IntArray

MANY_NETWORKS = 8
"""From so many networks on they are shuffled as wholes."""

_SLOT = ("intervention", "setting", "draw")
_AT_ONCE = 2_000_000  # places of points in memory at a time


@dataclass(frozen=True)
class Design:
    """Where the points of a study stand: which network, layer and slot each is.

    A slot is one intervention, setting and draw. ``place[a, b, c]`` is the point of network ``a``, layer ``b`` and
    slot ``c``, -1 where there is none; ``kinds`` the type of each layer.
    """

    network: IntArray
    layer: IntArray
    slot: IntArray
    kinds: IntArray
    place: IntArray

    @property
    def size(self) -> int:
        """The number of points."""
        return len(self.network)


def design_of(points: pd.DataFrame) -> Design:
    """The design of a table of points.

    Examples:
        >>> import pandas as pd
        >>> rows = [("n", "fc1", "a", "rerandomise", None, 0), ("n", "fc2", "a", "rerandomise", None, 0)]
        >>> names = ["network", "layer", "type", "intervention", "setting", "draw"]
        >>> design_of(pd.DataFrame(rows, columns=names)).place.shape
        (1, 2, 1)
    """
    network, layer = _codes(points["network"]), _codes(points["layer"])
    slot = _codes(["\x1f".join(map(str, key)) for key in zip(*(points[n] for n in _SLOT), strict=True)])
    kinds = np.zeros(layer.max(initial=-1) + 1, int)
    kinds[layer] = _codes(points["type"])
    place = np.full((network.max(initial=-1) + 1, len(kinds), slot.max(initial=-1) + 1), -1, np.int32)
    place[network, layer, slot] = np.arange(len(points))
    return Design(network, layer, slot, kinds, place)


def shuffled(design: Design, count: int, rng: np.random.Generator, *, layers: bool) -> Iterator[IntArray]:
    """For each point, whose performance it gets; arrays (some shuffles, points), -1 for nobody's.

    Args:
        design: Where the points stand.
        count: How many shuffles in all.
        rng: The random stream.
        layers: Whether layers change places too; otherwise points stay in their layer.

    Examples:
        >>> import pandas as pd
        >>> names = ["network", "layer", "type", "intervention", "setting", "draw"]
        >>> rows = pd.DataFrame([(n, k, "a", "rerandomise", None, 0) for n in "xyz" for k in "pq"], columns=names)
        >>> (drawn,) = shuffled(design_of(rows), 5, np.random.default_rng(0), layers=False)
        >>> bool((drawn % 2 == np.arange(6) % 2).all())  # everyone stays in its layer
        True
    """
    networks, depth, slots = design.place.shape
    step = max(1, _AT_ONCE // max(1, networks * depth * slots))
    for start in range(0, count, step):
        size = min(step, count - start)
        if networks >= MANY_NETWORKS:
            net = np.repeat(_orders(rng, (size, 1, networks)), depth, axis=1)
        else:
            net = _orders(rng, (size, depth, networks))
        lay = _within_kinds(design.kinds, size, rng) if layers else np.tile(np.arange(depth), (size, 1))
        cell = _orders(rng, (size, networks, depth, slots))
        a, b, c = design.network, design.layer, design.slot
        every = np.arange(size)[:, None]
        yield design.place[net[every, b, a], lay[every, b], cell[every, a, b, c]]


def relabelled(design: Design, count: int, rng: np.random.Generator) -> Iterator[IntArray]:
    """Shuffles in which the points of one layer of one network change places and nothing else does."""
    networks, depth, slots = design.place.shape
    step = max(1, _AT_ONCE // max(1, networks * depth * slots))
    for start in range(0, count, step):
        cell = _orders(rng, (min(step, count - start), networks, depth, slots))
        a, b, c = design.network, design.layer, design.slot
        yield design.place[a, b, cell[:, a, b, c]]


def shuffled_layers(kinds: IntArray, count: int, rng: np.random.Generator) -> IntArray:
    """Orders of the layers, each layer staying within its type; (count, layers)."""
    return _within_kinds(kinds, count, rng)


def _codes(values: Any) -> IntArray:
    """Whole numbers for names, in the order of the names."""
    return np.unique([str(name) for name in values], return_inverse=True)[1].astype(int)


def _orders(rng: np.random.Generator, shape: tuple[int, ...]) -> IntArray:
    """Random orders along the last axis."""
    if shape[-1] == 1:
        return np.zeros(shape, int)
    return np.argsort(rng.random(shape, dtype=np.float32), axis=-1)


def _within_kinds(kinds: IntArray, count: int, rng: np.random.Generator) -> IntArray:
    orders = np.tile(np.arange(len(kinds)), (count, 1))
    for kind in np.unique(kinds):
        alike = np.flatnonzero(kinds == kind)
        orders[:, alike] = alike[_orders(rng, (count, len(alike)))]
    return orders


def null_products(
    metrics: FloatArray, values: FloatArray, drawn: Iterable[IntArray]
) -> tuple[FloatArray, FloatArray]:
    """Sums of products of every metric's scores with shuffled values, and their correlations; (metrics, shuffles).

    Args:
        metrics: Centred scores, (points, metrics), NaN where a metric is not defined.
        values: Centred scores of what is shuffled, (points,).
        drawn: Shuffles.
    """
    here = np.isfinite(metrics)
    m = np.where(here, metrics, 0.0)
    complete = bool(here.all())
    sums, sizes = [], []
    for places in drawn:
        defined = (places >= 0).T
        y = np.where(defined, values[places].T, 0.0)
        sums.append(m.T @ y)
        if complete and defined.all():
            sizes.append(np.outer((m**2).sum(0), np.full(y.shape[1], (values**2).sum())))
        else:
            sizes.append(((m**2).T @ defined.astype(float)) * (here.T.astype(float) @ y**2))
    total, size = np.concatenate(sums, axis=1), np.sqrt(np.concatenate(sizes, axis=1))
    with np.errstate(invalid="ignore", divide="ignore"):
        return total, np.where(size > 0, total / size, 0.0)
