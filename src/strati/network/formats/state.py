"""Which tensors of a torch file are the network: state dicts nested in checkpoints, wrappers' prefixes.

The file's object is a tree of plain containers with tensors at its leaves. A training checkpoint keeps the
network in one branch (``state_dict``, ``model``, ...) beside the optimiser's; the walk goes there and says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from strati.types import Flag

if TYPE_CHECKING:
    from strati.network.source import Source

T = TypeVar("T")

MAX_DEPTH = 64
MAX_NODES = 2_000_000
MAX_NAME = 4096

NETWORK_KEYS = ("state_dict", "model_state_dict", "model", "module", "net", "network", "weights", "params")
WRAPPERS = ("module.", "_orig_mod.")
"""Prefixes that data parallelism and compilation put before every name."""


def state_dict(source: Source, tree: Any, leaf: type[T]) -> tuple[dict[str, T], tuple[Flag, ...]]:
    """The network's tensors by name, and what was left aside.

    Raises:
        BadInputError: There is no tensor, or the containers contain themselves or are nested without end.
    """
    branch, path = tree, ""
    everything = sum(1 for _ in leaves(source, tree, leaf))
    if everything == 0:
        raise source.bad("holds no tensors; save the network's state_dict() with torch.save")
    while isinstance(branch, dict) and not any(isinstance(v, leaf) for v in branch.values()):
        inside = [
            key
            for key in NETWORK_KEYS
            if isinstance(branch.get(key), dict) and next(leaves(source, branch[key], leaf), None) is not None
        ]
        if not inside:
            break
        path += f"{inside[0]}."
        branch = branch[inside[0]]
    named: dict[str, T] = {}
    for name, tensor in _walk(source, branch, leaf, "", 0, set(), [0]):
        if name in named:
            raise source.bad(f"has two tensors named {name}; save them under different names")
        named[name] = tensor
    flags = []
    if len(named) < everything:
        flags.append(
            Flag(
                "left-aside",
                f"read {len(named)} tensors from '{path.rstrip('.')}'; {everything - len(named)} others left aside",
            )
        )
    return _unwrapped(named), tuple(flags)


def leaves(source: Source, tree: Any, leaf: type[T]) -> Iterator[T]:
    """Every tensor in the tree, in order."""
    for _, tensor in _walk(source, tree, leaf, "", 0, set(), [0]):
        yield tensor


def _unwrapped(named: dict[str, T]) -> dict[str, T]:
    while True:
        for prefix in WRAPPERS:
            if all(name.startswith(prefix) and name != prefix for name in named):
                named = {name.removeprefix(prefix): tensor for name, tensor in named.items()}
                break
        else:
            return named


def _walk(
    source: Source, node: Any, leaf: type[T], name: str, depth: int, path: set[int], count: list[int]
) -> Iterator[tuple[str, T]]:
    count[0] += 1
    if depth > MAX_DEPTH or count[0] > MAX_NODES or len(name) > MAX_NAME:
        raise source.bad(
            "its containers are nested too deep or repeat without end; save the state_dict() alone"
        )
    if isinstance(node, leaf):
        yield name or "tensor", node
        return
    if isinstance(node, dict):
        children = ((str(key), value) for key, value in node.items() if isinstance(key, str | int))
    elif isinstance(node, list | tuple):
        children = ((str(index), value) for index, value in enumerate(node))
    else:
        return
    if id(node) in path:
        raise source.bad("has a container that contains itself; save the state_dict() alone")
    path.add(id(node))
    for key, value in children:
        if isinstance(value, leaf | dict | list | tuple):
            yield from _walk(source, value, leaf, f"{name}.{key}" if name else key, depth + 1, path, count)
    path.discard(id(node))
