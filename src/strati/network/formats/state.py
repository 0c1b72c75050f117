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
MAX_NODES = 1_000_000
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
    for name, tensor in _walk(source, branch, leaf):
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
    for _, tensor in _walk(source, tree, leaf):
        yield tensor


def _unwrapped(named: dict[str, T]) -> dict[str, T]:
    while True:
        for prefix in WRAPPERS:
            if all(name.startswith(prefix) and name != prefix for name in named):
                named = {name.removeprefix(prefix): tensor for name, tensor in named.items()}
                break
        else:
            return named


def _walk(source: Source, root: Any, leaf: type[T]) -> Iterator[tuple[str, T]]:
    """Every tensor below ``root`` with its dotted name, in order; without recursion, so that depth costs nothing."""
    if isinstance(root, leaf):
        yield "tensor", root
        return
    path: list[tuple[int, str, Iterator[tuple[str, Any]]]] = [(id(root), "", _children(root))]
    above = {id(root)}
    nodes = 0
    while path:
        here, prefix, children = path[-1]
        for key, child in children:
            nodes += 1
            name = f"{prefix}.{key}" if prefix else key
            if nodes > MAX_NODES or len(path) > MAX_DEPTH or len(name) > MAX_NAME:
                raise source.bad(
                    "its containers are nested too deep or repeat without end; save the state_dict() alone"
                )
            if isinstance(child, leaf):
                yield name, child
            elif isinstance(child, dict | list | tuple) and child:
                if id(child) in above:
                    raise source.bad("has a container that contains itself; save the state_dict() alone")
                above.add(id(child))
                path.append((id(child), name, _children(child)))
                break
        else:
            path.pop()
            above.discard(here)


def _children(node: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict):
        return ((str(key), value) for key, value in node.items() if isinstance(key, str | int))
    if isinstance(node, list | tuple):
        return ((str(index), value) for index, value in enumerate(node))
    return iter(())
