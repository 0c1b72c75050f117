"""Which tensors of a torch file are the network: state dicts nested in checkpoints, wrappers' prefixes.

The file's object is a tree of plain containers with tensors at its leaves. A training checkpoint keeps the network
in one branch (``state_dict``, ``model``, ...) beside optimizer state, schedulers, averages of the weights and losses.
What is beside the network is told by name and by structure (an optimizer's ``state`` and ``param_groups``), left
aside, and listed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
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

_BESIDE = {
    "optimizer state": re.compile(
        r".*optim.*|opt|opt_states?|opt_[gd]|(?:adam|sgd|lamb|lion|muon)w?(?:_state)?"
    ),
    "scheduler state": re.compile(r".*sched.*|(?:.*_)?lr(?:_.*)?|warmup"),
    "gradient scaler": re.compile(r".*scaler.*|amp"),
    "an average of the weights": re.compile(
        r"(?:.*_)?(?:ema|swa|moving_average|averaged|avg_model)(?:_.*)?|shadow.*"
    ),
    "random number state": re.compile(
        r".*rng.*|random(?:_states?)?|generator_states?|sampler(?:_states?)?|seed"
    ),
    "losses and metrics": re.compile(
        r"(?:.*_)?(?:loss|losses|metrics?|best|perplexity|criterion|history)(?:_.*)?"
    ),
    "gradients": re.compile(r"grads?|gradients?"),
    "training bookkeeping": re.compile(
        r"epochs?|steps?|global_step|iter(?:ation|_num)?s?|args?|config|cfg|hparams|hyper_parameters|callbacks?"
        r"|loops?|trainer(?:_state)?|extra_state|meta(?:data)?|datamodule|dataloaders?|loggers?|timestamp|_extra_state"
    ),
}
_TENSOR_NAME = re.compile(r".*[./].*|weight|bias|kernel")


def state_dict(
    source: MappedFile, tree: Any, leaf: type[T]
) -> tuple[dict[str, T], tuple[Skipped, ...], tuple[Flag, ...]]:
    """The network's tensors by name, the branches left aside with the reason, and what must be said of it.

    Raises:
        BadInputError: There is no tensor, or the containers contain themselves or are nested without end.
    """
    everything = sum(1 for _ in leaves(source, tree, leaf))
    if everything == 0:
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
        told = ", ".join(f"{s.name} ({s.reason})" for s in beside[:4]) + (", ..." if len(beside) > 4 else "")
        flags.append(Flag("left-aside", f"read {len(named)} tensors{where}; left aside: {told}"))
    return _unwrapped(named), tuple(beside), tuple(flags)


def leaves(source: MappedFile, tree: Any, leaf: type[T]) -> Iterator[T]:
    """Every tensor in the tree, in order."""
    for _, tensor in _walk(source, tree, leaf):
        yield tensor


def is_optimizer(branch: Any) -> bool:
    """Whether a container is an optimizer's state dict, or a list or table of such.

    Examples:
        >>> is_optimizer({"state": {0: {}}, "param_groups": [{}]}), is_optimizer({"fc.weight": 1})
        (True, False)
    """
    if isinstance(branch, dict):
        if "param_groups" in branch and ("state" in branch or "base_optimizer_state" in branch):
            return True
        inner = list(branch.values())
    elif isinstance(branch, list | tuple):
        inner = list(branch)
    else:
        return False
    return bool(inner) and all(
        isinstance(item, dict) and "param_groups" in item and "state" in item for item in inner
    )


def _find(source: MappedFile, tree: Any, leaf: type[T]) -> tuple[Any, str, list[Skipped]]:
    """The branch that is the network, its path, and what lies beside the way there."""
    branch, path = tree, ""
    beside: list[Skipped] = []
    if isinstance(tree, list | tuple):  # (model.state_dict(), optimizer.state_dict())
        kept = [(str(i), item) for i, item in enumerate(tree) if not is_optimizer(item)]
        if len(kept) < len(tree):
            for i, item in enumerate(tree):
                if is_optimizer(item):
                    beside.append(_skip("", i, sum(1 for _ in leaves(source, item, leaf)), "optimizer state"))
            branch = kept[0][1] if len(kept) == 1 else dict(kept)
    while isinstance(branch, dict):
        count = {
            key: sum(1 for _ in leaves(source, value, leaf))
            for key, value in branch.items()
            if isinstance(key, str | int)
        }
        reasons = {key: _reason(key, branch[key], leaf) for key, n in count.items() if n}
        boxes = [key for key in reasons if isinstance(branch[key], dict)]
        key = _network_key(branch, boxes, reasons, leaf, first=not path)
        if key is not None:
            for other, why in reasons.items():
                if other != key:
                    beside.append(_skip(path, other, count[other], why or "beside the network"))
            path = f"{path}.{key}" if path else str(key)
            branch = branch[key]
            continue
        rest = {k: v for k, v in branch.items() if reasons.get(k) is None}
        if len(rest) < len(branch) and any(reasons.get(k, "") is None for k in reasons):
            beside += [_skip(path, k, count[k], why) for k, why in reasons.items() if why is not None]
            branch = rest
        elif is_optimizer(branch) or (reasons and all(reasons.values())):
            # Nothing here is a network: an optimizer's or scheduler's own file. All is listed, nothing is a layer.
            why = "optimizer state" if is_optimizer(branch) else next(w for w in reasons.values() if w)
            beside.append(Skipped(path or "all tensors", f"{why}, {sum(count.values())} tensors"))
            branch = {}
        break
    return branch, path, beside


def _network_key(
    branch: dict[Any, Any], boxes: list[Any], reasons: dict[Any, str | None], leaf: type[T], *, first: bool
) -> Any:
    """The entry that holds the network, or ``None`` where the table itself is it."""
    if any(isinstance(v, leaf) and _TENSOR_NAME.fullmatch(str(k).lower()) for k, v in branch.items()):
        return None  # tensors under their own names: a state dict, whatever else it holds
    lower = {str(key).lower(): key for key in boxes}
    unexplained = [key for key, why in reasons.items() if why is None]
    for known in NETWORK_KEYS:
        if known in lower and not is_optimizer(branch[lower[known]]):
            # Deeper down a part called "net" may stand beside other parts of the same network.
            return lower[known] if first or unexplained in ([lower[known]], []) else None
    for known in CONTAINERS:
        if known in lower and unexplained in ([lower[known]], []) and not is_optimizer(branch):
            return lower[known]
    if not unexplained:  # only averaged weights: then those are the network
        averaged = [key for key in boxes if reasons[key] == "an average of the weights"]
        if averaged:
            return averaged[0]
    return None


def _reason(key: Any, value: Any, leaf: type[T]) -> str | None:
    """Why an entry of a checkpoint is not the network; ``None`` if it may be."""
    if is_optimizer(value):
        return "optimizer state"
    name = str(key).lower()
    if isinstance(value, leaf) and (_TENSOR_NAME.fullmatch(name) or len(getattr(value, "shape", ())) > 1):
        return None
    if name in NETWORK_KEYS:
        return None
    return next((why for why, pattern in _BESIDE.items() if pattern.fullmatch(name)), None)


def _skip(path: str, key: Any, count: int, why: str) -> Skipped:
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
        return ((str(key), value) for key, value in node.items() if isinstance(key, str | int))
    if isinstance(node, list | tuple):
        return ((str(index), value) for index, value in enumerate(node))
    return iter(())
