"""Attention heads and MLP neurons as units: how many there are, and networks without some of them.

A unit lies between the layers that compute it (rows of their weights) and the one that reads it (columns). Removing it
from all of them gives a smaller dense network that computes what the network with these columns set to zero computes.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.core.errors import UnsupportedError

if TYPE_CHECKING:
    from torch import nn

    from strati.interventions.targets import Target

_PRODUCERS = {"head": ("attention.q", "attention.k", "attention.v"), "neuron": ("mlp.in", "mlp.gate")}
_CONFIG_WIDTHS = ("intermediate_size", "n_inner", "ffn_dim", "d_ff", "ffn_hidden_size")


def head_count(model: nn.Module) -> int | None:
    """How many attention heads can be removed one by one: with grouped queries the key/value heads."""
    config = getattr(model, "config", None)
    names = ("num_key_value_heads", "num_attention_heads", "n_head")
    return next((int(n) for n in (getattr(config, name, None) for name in names) if n), None)


def removed_units(count: int, share: float) -> int:
    """How many of some units a share removes; one is always left.

    Examples:
        >>> removed_units(8, 0.25), removed_units(2, 1.0)
        (2, 1)
    """
    return min(round(share * count), count - 1)


def zero_units(weight: Any, count: int, removed: int) -> tuple[int, ...]:
    """The numbers of ``removed`` units whose columns are zero in a matrix that reads ``count`` units."""
    zero = np.flatnonzero(~np.asarray(weight).reshape(len(weight), count, -1).any(axis=(0, 2)))
    return tuple(int(unit) for unit in zero[:removed])


def producers(reader: Target, unit: str, targets: Sequence[Target]) -> list[Target]:
    """The layers that compute the units which a layer reads: those of their roles nearest to it by name.

    Raises:
        UnsupportedError: There is none, or they are fused into one tensor.
    """
    words = reader.name.split(".")

    def shared(target: Target) -> int:
        pairs = zip(words, target.name.split("."), strict=False)
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

    candidates = [t for t in targets if t.type in _PRODUCERS[unit]]
    closest = max(map(shared, candidates), default=0)
    nearest = [t for t in candidates if shared(t) == closest]
    if not closest or (unit == "head" and len(nearest) != 3):
        why = f"the layers that compute its {unit}s are not separate; fused tensors are not supported"
        raise UnsupportedError(reader.name, why)
    return nearest


def remove_units(
    model: Any, removed: Mapping[str, Sequence[int]], unit: str, targets: Sequence[Target]
) -> int:
    """Take units out of a network, in place, with its config; returns how many parameters that saves.

    Args:
        model: The network; the columns of the units are zero in the layers that read them.
        removed: Numbers of the units, by the name of the layer that reads them.
        unit: ``head`` or ``neuron``.
        targets: All layers of the network.

    Raises:
        UnsupportedError: Layers would have different numbers of units, or the config cannot say how many are left.
    """
    by_name = {t.name: t for t in targets}
    role = by_name[next(iter(removed))].type
    counts = {t.name: _count(model, t, unit) for t in targets if t.type == role}
    left = {count - len(removed.get(name, ())) for name, count in counts.items()}
    config = getattr(model, "config", None)
    if config is not None and (len(left) > 1 or len(set(counts.values())) > 1):
        raise UnsupportedError("prune", f"layers would have {sorted(left)} {unit}s; a config has one number")
    before = int(sum(p.numel() for p in model.parameters()))
    for name, units in removed.items():
        for target in producers(by_name[name], unit, targets):
            _keep(model.get_submodule(target.name), target, counts[name], units, rows=True)
        _keep(model.get_submodule(name), by_name[name], counts[name], units, rows=False)
    if config is not None:
        _shrink_config(model, config, unit, counts[next(iter(removed))], next(iter(left)))
    return before - int(sum(p.numel() for p in model.parameters()))


def _count(model: Any, reader: Target, unit: str) -> int:
    cols = reader.shape[0] if reader.kind == "conv1d" else reader.shape[1]
    return int(head_count(model) or 1) if unit == "head" else cols


def _keep(module: Any, target: Target, count: int, units: Sequence[int], *, rows: bool) -> None:
    """Keep the rows (or columns) of the units that are left; several stacked layers have the units several times."""
    from torch import nn

    axis = int(rows == (target.kind == "conv1d"))  # Conv1D stores inputs first
    size = module.weight.shape[axis]
    if size % count:
        raise UnsupportedError(target.name, f"has {size} rows for {count} units; its layout is not known")
    place = np.arange(size).reshape(count, -1)
    if rows and target.type.startswith("mlp") and size > count:  # gate and up in one tensor
        place = np.arange(size).reshape(-1, count).T
    index = np.sort(np.delete(place, list(units), axis=0).reshape(-1))
    for name, parameter in list(module.named_parameters(recurse=False)):
        if name == "weight" or rows:
            values = parameter.detach().index_select(
                axis if name == "weight" else 0, _tensor(index, parameter)
            )
            setattr(module, name, nn.Parameter(values.clone(), requires_grad=parameter.requires_grad))
    names = ("out_features", "nf") if rows else ("in_features", "nx")
    for name in names:
        if hasattr(module, name):
            setattr(module, name, len(index))


def _tensor(index: Any, like: Any) -> Any:
    import torch

    return torch.from_numpy(index).to(like.device)


def _shrink_config(model: Any, config: Any, unit: str, before: int, left: int) -> None:
    if unit == "neuron":
        key = next((k for k in _CONFIG_WIDTHS if getattr(config, k, None) == before), None)
        if key is None and hasattr(config, "n_inner"):  # GPT-2: none means four times the width
            key = "n_inner"
        if key is None:
            raise UnsupportedError(
                "config", "does not say how many neurons there are; they cannot be removed"
            )
        setattr(config, key, left)
        return
    if getattr(config, "head_dim", None) is None:
        why = "computes the size of a head from their number, so that heads cannot be removed"
        raise UnsupportedError("config", why)
    groups = config.num_attention_heads // before
    changes = {"num_attention_heads": groups * left, "num_key_value_heads": left}
    for owner in (config, *model.modules()):
        for key, number in changes.items():
            if isinstance(getattr(owner, key, None), int) and key in vars(owner):
                setattr(owner, key, number)
