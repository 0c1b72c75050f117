"""Which layer of one network corresponds to which of another.

By name where the names agree; otherwise by role and relative depth, so that a 12-layer network can be laid beside a
36-layer one. A layer without a partner is said aloud with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

_WRAPPERS = frozenset(
    {"model", "module", "base_model", "transformer", "bert", "roberta", "vit", "resnet", "net"}
)


class Named(Protocol):
    """What matching needs to know of a layer."""

    @property
    def name(self) -> str:
        """The layer's name."""

    @property
    def role(self) -> str:
        """Its role."""

    @property
    def block(self) -> int | None:
        """Its block number."""


@dataclass(frozen=True)
class Unmatched:
    """A layer that no other network has."""

    network: int
    name: str
    reason: str


@dataclass(frozen=True)
class Matching:
    """Rows of corresponding layers.

    Attributes:
        by: ``"name"``, or ``"role and depth"`` where names do not match.
        rows: For each layer of the first network the index of its partner in every network.
        unmatched: Layers left out, with the reason.
    """

    by: Literal["name", "role and depth"]
    rows: tuple[tuple[int, ...], ...]
    unmatched: tuple[Unmatched, ...]


def match(networks: Sequence[Sequence[Named]]) -> Matching:
    """Find corresponding layers.

    Names decide when at least half of the layers of the smaller network have a namesake in every other one; prefixes
    that one network has and another has not (``model.``, ``module.``, ``bert.``) are looked through. Networks of
    different numbers of blocks are matched by depth even where names agree: block 11 of 12 is not block 11 of 36.

    Args:
        networks: The layers of each network, in network order.
    """
    depths = {len({layer.block for layer in layers}) for layers in networks}
    if len(depths) > 1:
        return _by_depth(networks)
    smallest = min(len(layers) for layers in networks)
    for shorten in (_as_they_are, _without_shared_prefix, _without_wrappers):
        keys = [shorten(layers) for layers in networks]
        common = set(keys[0]).intersection(*keys[1:])
        if 2 * len(common) >= max(1, smallest):
            return _by_name(networks, keys, common)
    return _by_depth(networks)


def _by_name(networks: Sequence[Sequence[Named]], keys: list[dict[str, int]], common: set[str]) -> Matching:
    rows = tuple(tuple(k[key] for k in keys) for key in keys[0] if key in common)
    lost = [
        Unmatched(n, layers[i].name, "no layer of this name in every network")
        for n, (layers, k) in enumerate(zip(networks, keys, strict=True))
        for key, i in k.items()
        if key not in common
    ]
    return Matching("name", rows, tuple(lost))


def _by_depth(networks: Sequence[Sequence[Named]]) -> Matching:
    depth = [_relative_depths(layers) for layers in networks]
    rows, lost, used = [], [], [set[int]() for _ in networks]
    for i, layer in enumerate(networks[0]):
        partners = [i]
        for n in range(1, len(networks)):
            same = [j for j, other in enumerate(networks[n]) if other.role == layer.role]
            if same:
                partners.append(min(same, key=lambda j: (abs(depth[n][j] - depth[0][i]), j)))
        if len(partners) < len(networks):
            lost.append(Unmatched(0, layer.name, f"no layer of role {layer.role} in every network"))
            continue
        rows.append(tuple(partners))
        for n, j in enumerate(partners):
            used[n].add(j)
    for n in range(1, len(networks)):
        lost += [
            Unmatched(n, other.name, "no layer of its role at this depth in the first network")
            for j, other in enumerate(networks[n])
            if j not in used[n]
        ]
    return Matching("role and depth", tuple(rows), tuple(lost))


def _relative_depths(layers: Sequence[Named]) -> list[float]:
    """Depth from 0 to 1: by block number where a layer has one, else by its place among the layers of its role."""
    blocks = [layer.block for layer in layers if layer.block is not None]
    last = max(blocks, default=0)
    depths = []
    for layer in layers:
        if layer.block is not None:
            depths.append(layer.block / last if last else 0.5)
        else:
            peers = [other for other in layers if other.role == layer.role and other.block is None]
            place = next(k for k, other in enumerate(peers) if other is layer)
            depths.append(place / (len(peers) - 1) if len(peers) > 1 else 0.5)
    return depths


def _as_they_are(layers: Sequence[Named]) -> dict[str, int]:
    return {layer.name: i for i, layer in enumerate(layers)}


def _without_shared_prefix(layers: Sequence[Named]) -> dict[str, int]:
    """Names without the prefix that all of a network's layers share."""
    split = [layer.name.split(".") for layer in layers]
    shared = 0
    while split and all(len(s) > shared + 1 and s[shared] == split[0][shared] for s in split):
        shared += 1
    # A number is a block, not a wrapper: "layers.0" of a one-block network stays.
    while shared and split[0][shared - 1].isdigit():
        shared -= 1
    return {".".join(s[shared:]): i for i, s in enumerate(split)}


def _without_wrappers(layers: Sequence[Named]) -> dict[str, int]:
    """Names without the words that libraries put in front of a network inside another one."""
    short = {}
    for i, layer in enumerate(layers):
        parts = layer.name.split(".")
        while len(parts) > 1 and parts[0] in _WRAPPERS:
            parts = parts[1:]
        short[".".join(parts)] = i
    return short
