"""Which tensors of a torch file are the network: state dicts nested in checkpoints, prefixes of wrappers.

The file's object is a tree of plain containers with tensors at its leaves. A training checkpoint keeps the network
in one branch (``state_dict``, ``model``, ...) beside optimizer state, schedulers, averages of the weights and losses.
These are recognised by name and by structure (an optimizer's ``state`` and ``param_groups``), left aside and listed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeVar

from strati.core.results import Flag
from strati.io.checkpoint_file import Skipped

if TYPE_CHECKING:
    from strati.io.checkpoint_file import MappedFile

T = TypeVar("T")

MAX_DEPTH = 64
MAX_NODES = 1_000_000
MAX_NAME = 4096

NETWORK_KEYS = (
    *("state_dict", "model_state_dict", "model_state", "model_states", "model"),
    *("module", "net", "network", "net_state_dict", "weights", "params"),
)
"""Where training scripts keep the network, the likeliest first; letter case does not matter."""

CONTAINERS = ("state", "checkpoint", "ckpt", "training_state", "train_state", "app")
"""Boxes around a whole checkpoint."""

WRAPPERS = ("module.", "_orig_mod.")
"""Prefixes that data parallelism and compilation put before every name."""


class NotNetwork(StrEnum):
    """Parts of a training checkpoint that are not the network."""

    OPTIMIZER = "optimizer state"
    SCHEDULER = "scheduler state"
    SCALER = "gradient scaler"
    AVERAGE = "an average of the weights"
    RANDOM = "random number state"
    METRICS = "losses and metrics"
    GRADIENTS = "gradients"
    BOOKKEEPING = "training bookkeeping"
    OTHER = "beside the network"


_KEYS_OF = {
    NotNetwork.OPTIMIZER: re.compile(
        r".*optim.*|opt|opt_states?|opt_[gd]|(?:adam|sgd|lamb|lion|muon)w?(?:_state)?"
    ),
    NotNetwork.SCHEDULER: re.compile(r".*sched.*|(?:.*_)?lr(?:_.*)?|warmup"),
    NotNetwork.SCALER: re.compile(r".*scaler.*|amp"),
    NotNetwork.AVERAGE: re.compile(r"(?:.*_)?(?:ema|swa|moving_average|averaged|avg_model)(?:_.*)?|shadow.*"),
    NotNetwork.RANDOM: re.compile(r".*rng.*|random(?:_states?)?|generator_states?|sampler(?:_states?)?|seed"),
    NotNetwork.METRICS: re.compile(
        r"(?:.*_)?(?:loss|losses|metrics?|best|perplexity|criterion|history)(?:_.*)?"
    ),
    NotNetwork.GRADIENTS: re.compile(r"grads?|gradients?"),
    NotNetwork.BOOKKEEPING: re.compile(
        r"epochs?|steps?|global_step|iter(?:ation|_num)?s?|args?|config|cfg|hparams|hyper_parameters|callbacks?"
        r"|loops?|trainer(?:_state)?|extra_state|meta(?:data)?|datamodule|dataloaders?|loggers?|timestamp|_extra_state"
    ),
}
_TENSOR_NAME = re.compile(r".*[./].*|weight|bias|kernel")


def state_dict(
    source: MappedFile, tree: Any, leaf: type[T]
) -> tuple[dict[str, T], tuple[Skipped, ...], tuple[Flag, ...]]:
    """The network's tensors by name, the branches left aside with the reason, and warnings.

    Raises:
        BadInputError: There is no tensor, or the containers contain themselves or are nested without end.
    """
    if _count(source, tree, leaf) == 0:
        raise source.error("holds no tensors; save the network's state_dict() with torch.save")
    branch, path, beside = _find(source, tree, leaf)
    named: dict[str, T] = {}
    for name, tensor in _walk(source, branch, leaf):
        if name in named:
            raise source.error(f"has two tensors named {name}; save them under different names")
        named[name] = tensor
    flags = []
    if beside:
        where = f" from '{path}'" if path else ""
        listed = ", ".join(f"{s.name} ({s.reason})" for s in beside[:4]) + (
            ", ..." if len(beside) > 4 else ""
        )
        flags.append(Flag("left-aside", f"read {len(named)} tensors{where}; left aside: {listed}"))
    return _unwrapped(named), tuple(beside), tuple(flags)


def _count(source: MappedFile, tree: Any, leaf: type[T]) -> int:
    """The number of tensors in a tree."""
    return sum(1 for _ in _walk(source, tree, leaf))


def is_optimizer(branch: Any) -> bool:
    """Whether a container is an optimizer's state dict, or a list or table of such.

    Examples:
        >>> is_optimizer({"state": {0: {}}, "param_groups": [{}]}), is_optimizer({"fc.weight": 1})
        (True, False)
    """
    if not isinstance(branch, dict | list | tuple):
        return False
    children = branch
    if isinstance(branch, dict):
        if "param_groups" in branch and ("state" in branch or "base_optimizer_state" in branch):
            return True
        children = tuple(branch.values())
    return bool(children) and all(
        isinstance(child, dict) and "param_groups" in child and "state" in child for child in children
    )


def _find(source: MappedFile, tree: Any, leaf: type[T]) -> tuple[Any, str, list[Skipped]]:
    """Find the state dict in a nested checkpoint; return it, its key path and the siblings left aside."""
    branch, path = tree, ""
    beside: list[Skipped] = []
    if isinstance(tree, list | tuple):  # (model.state_dict(), optimizer.state_dict())
        optimizers = {i: entry for i, entry in enumerate(tree) if is_optimizer(entry)}
        if optimizers:
            beside += [
                _skip("", i, _count(source, o, leaf), NotNetwork.OPTIMIZER) for i, o in optimizers.items()
            ]
            others = {str(i): entry for i, entry in enumerate(tree) if i not in optimizers}
            branch = next(iter(others.values())) if len(others) == 1 else others
    while isinstance(branch, dict):
        count = {k: _count(source, entry, leaf) for k, entry in branch.items() if isinstance(k, str | int)}
        reasons = {key: _reason(key, branch[key], leaf) for key, n in count.items() if n}
        boxes = [key for key in reasons if isinstance(branch[key], dict)]
        key = _network_key(branch, boxes, reasons, leaf, first=not path)
        if key is not None:
            for other, why in reasons.items():
                if other != key:
                    beside.append(_skip(path, other, count[other], why or NotNetwork.OTHER))
            path = f"{path}.{key}" if path else str(key)
            branch = branch[key]
            continue
        explained = {k: why for k, why in reasons.items() if why is not None}
        if explained and len(explained) < len(reasons):
            beside += [_skip(path, k, count[k], why) for k, why in explained.items()]
            branch = {k: entry for k, entry in branch.items() if k not in explained}
        elif is_optimizer(branch) or (reasons and len(explained) == len(reasons)):
            # Nothing here is a network: an optimizer's or scheduler's own file. All is listed, nothing is a layer.
            why = NotNetwork.OPTIMIZER if is_optimizer(branch) else next(iter(explained.values()))
            beside.append(Skipped(path or "all tensors", f"{why}, {sum(count.values())} tensors"))
            branch = {}
        break
    return branch, path, beside


def _network_key(
    branch: dict[Any, Any],
    boxes: list[Any],
    reasons: dict[Any, NotNetwork | None],
    leaf: type[T],
    *,
    first: bool,
) -> Any:
    """The entry that holds the network, or ``None`` if the table itself is the network."""
    if any(isinstance(v, leaf) and _TENSOR_NAME.fullmatch(str(k).lower()) for k, v in branch.items()):
        return None  # tensors under their own names: a state dict, whatever else it holds
    lower = {str(key).lower(): key for key in boxes}
    unexplained = [key for key, why in reasons.items() if why is None]
    for name in NETWORK_KEYS:
        if name in lower and not is_optimizer(branch[lower[name]]):
            # Deeper down a part called "net" may stand beside other parts of the same network.
            return lower[name] if first or unexplained in ([lower[name]], []) else None
    for name in CONTAINERS:
        if name in lower and unexplained in ([lower[name]], []) and not is_optimizer(branch):
            return lower[name]
    if not unexplained:  # only averaged weights: then those are the network
        averaged = [key for key in boxes if reasons[key] is NotNetwork.AVERAGE]
        if averaged:
            return averaged[0]
    return None


def _reason(key: Any, entry: Any, leaf: type[T]) -> NotNetwork | None:
    """Why an entry of a checkpoint is not the network; ``None`` if it may be."""
    if is_optimizer(entry):
        return NotNetwork.OPTIMIZER
    name = str(key).lower()
    if isinstance(entry, leaf) and (_TENSOR_NAME.fullmatch(name) or len(getattr(entry, "shape", ())) > 1):
        return None
    if name in NETWORK_KEYS:
        return None
    return next((why for why, pattern in _KEYS_OF.items() if pattern.fullmatch(name)), None)


def _skip(path: str, key: Any, count: int, why: NotNetwork) -> Skipped:
    name = f"{path}.{key}" if path else str(key)
    return Skipped(name, f"{why}, {count} tensor{'s' if count > 1 else ''}")


def _unwrapped(named: dict[str, T]) -> dict[str, T]:
    while named:
        for prefix in WRAPPERS:
            if all(name.startswith(prefix) and name != prefix for name in named):
                named = {name.removeprefix(prefix): tensor for name, tensor in named.items()}
                break
        else:
            return named
    return named


def _walk(source: MappedFile, root: Any, leaf: type[T]) -> Iterator[tuple[str, T]]:
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
                raise source.error(
                    "its containers are nested too deep or repeat without end; save the state_dict() alone"
                )
            if isinstance(child, leaf):
                yield name, child
            elif isinstance(child, dict | list | tuple) and child:
                if id(child) in above:
                    raise source.error("has a container that contains itself; save the state_dict() alone")
                above.add(id(child))
                path.append((id(child), name, _children(child)))
                break
        else:
            path.pop()
            above.discard(here)


def _children(node: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict):
        return ((str(key), child) for key, child in node.items() if isinstance(key, str | int))
    if isinstance(node, list | tuple):
        return ((str(index), child) for index, child in enumerate(node))
    return iter(())
