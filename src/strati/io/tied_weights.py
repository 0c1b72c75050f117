"""Weights that a file holds twice: each counts once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from strati.io.name_context import Names
from strati.io.raw_checkpoint import Tensor
from strati.io.roles import Role

if TYPE_CHECKING:
    from strati.io.load import Network


def ties(network: Network) -> Mapping[str, str]:
    """Tensors that are another one again: by shared storage, or embeddings and heads equal byte for byte."""
    names = network.names
    tied = dict(network.contents.ties)
    _prefer_embeddings(names, tied)
    alike: dict[tuple[tuple[int, ...], str], list[Tensor]] = {}
    for tensor in network.tensors:
        # GGUF leaves a tied head out by itself, and dequantising both to compare them would cost memory.
        plain = tensor.floating and not tensor.quantised
        if tensor.name not in tied and len(tensor.shape) == 2 and tensor.size > 1 and plain:
            role = names.role(tensor, "linear")
            if role in (Role.EMBEDDING, Role.HEAD):
                alike.setdefault((tensor.shape, tensor.dtype), []).append(tensor)
    for group in alike.values():
        group.sort(key=lambda t: names.role(t, "linear") is Role.HEAD)  # an embedding counts before a head
        for position, tensor in enumerate(group):
            for earlier in group[:position]:
                if earlier.name not in tied and _equal(network, earlier.name, tensor.name):
                    tied[tensor.name] = earlier.name
                    break
    return tied


def _prefer_embeddings(names: Names, tied: dict[str, str]) -> None:
    """Where a head comes before the embedding it shares its weights with, let the embedding count."""
    groups: dict[str, list[str]] = {}
    for name, first in tied.items():
        groups.setdefault(first, []).append(name)
    for first, others in groups.items():
        if names.by_role(first) is Role.EMBEDDING:
            continue
        better = next((name for name in others if names.by_role(name) is Role.EMBEDDING), None)
        if better is not None:
            del tied[better]
            for name in [first, *(other for other in others if other != better)]:
                tied[name] = better


def _equal(network: Network, a: str, b: str) -> bool:
    """Whether two tensors hold the same bytes and are not one constant; stops at the first difference."""
    first, second = network.read(a), network.read(b)
    rows = max(1, 1_000_000 // max(1, first.shape[1]))
    varied = False
    for start in range(0, first.shape[0], rows):
        x, y = first[start : start + rows], second[start : start + rows]
        if x.tobytes() != y.tobytes():
            return False
        varied = varied or bool(np.any(x != first[0, 0]))
    return varied
