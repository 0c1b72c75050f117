"""All tensors that two networks share, of whatever dimension: how many moved, and how far.

Layers were measured already, after what stores them differently was undone; only the rest is read here, in strips.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.comparison.dtypes import is_conversion
from strati.comparison.matching import bare_names
from strati.comparison.results import Movement

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from strati.comparison.results import ComparedLayer
    from strati.comparison.unit_alignment import Renumbering
    from strati.io.checkpoint_file import Tensor
    from strati.io.layers import Layer
    from strati.io.network import Network

_STRIP = 4_000_000  # entries that are turned into float64 at once


def movement(
    first: Network,
    last: Network,
    measured: Iterable[tuple[Layer, Layer, ComparedLayer]],
    renumbered: Mapping[str, Renumbering] | None = None,
) -> Movement | None:
    """How many of the tensors that two networks share moved, and how far.

    Args:
        first: A network.
        last: Another one.
        measured: The layers that were compared: in the first, in the last, and what was found.
        renumbered: How the last network numbers the units of its vectors, where that is not as the first does.

    Returns:
        ``None`` where no tensor is in both.
    """
    known = _measured(first, measured)
    layers = {layer.tensor for layer in first.layers()}
    changes: dict[str, float | None] = {}
    vectors: list[str] = []
    for tensor, other in _shared(first, last):
        if (tensor.name, other.name) in known:
            changes[tensor.name] = known[tensor.name, other.name]
        elif tensor.name not in first.contents.adapters and other.name not in last.contents.adapters:
            a, b = first.read(tensor.name), last.read(other.name)
            if renumbered and other.name in renumbered:
                b = renumbered[other.name].apply(b)
            if all(v.dtype.kind in "fV" for v in (a, b)):
                changes[tensor.name] = change = _change(a, b)
                if tensor.name not in layers and change != 0 and not is_conversion(a, b):
                    vectors.append(other.name)
    if not changes:
        return None
    moved = [c for c in changes.values() if c is None or c > 0]
    sizes = [c for c in moved if c is not None]
    return Movement(
        shared=len(changes),
        moved=len(moved),
        median_relative_change=float(np.median(sizes)) if sizes else None,
        untouched=tuple(name for name, c in changes.items() if c == 0),
        vectors_moved=len(vectors),
        moved_vectors=tuple(vectors),
    )


def _shared(first: Network, last: Network) -> Iterator[tuple[Tensor, Tensor]]:
    """Tensors of one name (wrappers' prefixes aside) and shape."""
    here = dict(zip(bare_names([t.name for t in first.tensors]), first.tensors, strict=True))
    there = dict(zip(bare_names([t.name for t in last.tensors]), last.tensors, strict=True))
    for key, tensor in here.items():
        other = there.get(key)
        if other is not None and other.shape == tensor.shape:
            yield tensor, other


def _measured(
    first: Network, measured: Iterable[tuple[Layer, Layer, ComparedLayer]]
) -> dict[tuple[str, str], float]:
    """Changes of the tensors all of whose entries are in layers that were compared."""
    parts: dict[tuple[str, str], list[tuple[int, float | None, float | None]]] = {}
    for layer, other, found in measured:
        norm = found.metrics.get("frobenius_norm", (None,))[0]
        part = (layer.cut.rows * layer.cut.cols * layer.count, found.relative_change, norm)
        parts.setdefault((layer.tensor, other.tensor), []).append(part)
    changes = {}
    for names, own in parts.items():
        numbers = np.array([(change, norm) for _, change, norm in own], np.float64)
        if sum(size for size, _, _ in own) == first[names[0]].size and np.isfinite(numbers).all():
            weights = numbers[:, 1] / max(float(numbers[:, 1].max()), np.finfo(np.float64).tiny)
            total = float(np.square(weights).sum())
            if total > 0:
                changes[names] = float(np.sqrt(np.square(numbers[:, 0] * weights).sum() / total))
    return changes


def _change(a: NDArray[Any], b: NDArray[Any]) -> float | None:
    """``||B - A|| / ||A||``; ``None`` where only ``A`` is zero."""
    x, y = a.reshape(-1), b.reshape(-1)
    size = step = 0.0
    for start in range(0, x.size, _STRIP):
        here = x[start : start + _STRIP].astype(np.float64)
        size += float(here @ here)
        here -= y[start : start + _STRIP].astype(np.float64)
        step += float(here @ here)
    if size > 0:
        return float(np.sqrt(step) / np.sqrt(size))
    return 0.0 if step == 0 else None
