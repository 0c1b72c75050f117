r"""An adapter put onto the network it was made for: ``W + s B A``, and DoRA's rescaling of it.

DoRA (Liu et al. 2024) gives every output row of the merged weight a length of its own:
:math:`m_i (W + s B A)_i / \lVert (W + s B A)_i \rVert`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.errors import BadInputError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.network.adapters.lora import AdapterUpdate
    from strati.network.open import Network

_PREFIXES = ("base_model.model.", "model.", "module.", "transformer.")


def is_adapter(network: Network) -> bool:
    """Whether a network is an adapter alone: updates, and no base they belong to."""
    updates = network.contents.adapters
    return bool(updates) and not any(".base_layer." in tensor.name for tensor in network.tensors)


def merged(base: Network, adapter: Network) -> Network:
    """The base with the adapter's updates added, tensor by tensor as they are read.

    Weights that the adapter holds whole (``modules_to_save``) replace the base's.

    Raises:
        BadInputError: An update has no weight to be added to, or does not fit it.
    """
    from strati.network.open import Network as Opened

    names = _lookup(base)
    plan: dict[str, AdapterUpdate] = {}
    for update in adapter.contents.adapters.values():
        target = _target(names, update.name)
        if target is None:
            why = f"is not in {base.path.name}; the adapter {adapter.path.name} belongs to another network"
            raise BadInputError(update.name, why)
        _check(base[target].shape, update)
        plan[target] = update
    saved = _saved(names, adapter)
    plain = base.contents

    def read(name: str) -> NDArray[Any]:
        if name in saved:
            return adapter.contents.read(saved[name])
        weight = plain.read(name)
        return weight if name not in plan else apply(weight, plan[name])

    dtypes = dict.fromkeys(plan, "float32")
    tensors = tuple(
        replace(t, dtype=dtypes.get(t.name, t.dtype), quantised=t.quantised and t.name not in plan)
        for t in base.tensors
    )
    path = Path(f"{base.path} + {adapter.path.name}")
    quantisation = {name: kind for name, kind in plain.quantisation.items() if name not in plan}
    contents = replace(
        plain, tensors=tensors, read=read, read_part=None, quantisation=quantisation, ties={}, adapters={}
    )
    made = Opened(path, contents)
    made._recipe = (merged, (base, adapter))
    return made


def carries_adapter(network: Network) -> bool:
    """Whether a network holds a base and updates of it: a PEFT model in memory."""
    return bool(network.contents.adapters) and not is_adapter(network)


def unwrapped(network: Network) -> Network:
    """A PEFT model in memory as the network that it computes: every weight with its update, under its own name."""
    from strati.network.open import Network as Opened

    contents = network.contents
    updates = contents.adapters
    base, saved = {}, []
    for tensor in contents.tensors:
        if ".modules_to_save." in tensor.name or tensor.name in updates:
            saved.append(tensor)
        else:
            plain = tensor.name.removeprefix("base_model.model.").replace(".base_layer.", ".")
            base[plain.replace(".original_module.", ".")] = tensor
    held = replace(
        contents,
        tensors=tuple(replace(tensor, name=name) for name, tensor in base.items()),
        read=lambda name: contents.read(base[name].name),
        read_part=None,
        unread=(),
        ties={},
        shared={},
        adapters={},
        hints={n: contents.hints[t.name] for n, t in base.items() if t.name in contents.hints},
        quantisation={
            n: contents.quantisation[t.name] for n, t in base.items() if t.name in contents.quantisation
        },
    )
    own = replace(contents, tensors=tuple(saved))
    both = merged(Opened(network.path, held), Opened(network.path, own))
    names = {tensor.name: name for name, tensor in base.items()}
    changed = {_bare(name) for name in updates}
    ties = {
        names[later]: names[first]
        for later, first in contents.ties.items()
        if later in names and first in names and not {_bare(names[later]), _bare(names[first])} & changed
    }
    made = Opened(network.path, replace(both.contents, ties=ties))
    made._recipe = (unwrapped, (network,))
    return made


def apply(weight: NDArray[Any], update: AdapterUpdate) -> NDArray[np.float32]:
    """A weight, in the layout the network stores it in, with its update added."""
    whole = weight.astype(np.float32)
    change = update.product()
    turned = update.turned or (weight.ndim == 2 and weight.shape != change.shape == weight.shape[::-1])
    flat = whole.T if turned else whole.reshape(change.shape)
    added = flat + change
    if update.magnitude is not None:
        lengths = np.linalg.norm(added, axis=1, keepdims=True)
        added *= update.magnitude().astype(np.float32)[:, None] / np.where(lengths > 0, lengths, 1)
    back: NDArray[np.float32] = np.ascontiguousarray(added.T if turned else added).reshape(weight.shape)
    return back


def _lookup(base: Network) -> dict[str, str]:
    """Names without the prefixes that wrappers and heads put before them -> the name in the base."""
    found: dict[str, str] = {}
    for tensor in base.tensors:
        found.setdefault(_bare(tensor.name), tensor.name)
    return found


def _bare(name: str) -> str:
    name = name.replace(".base_layer.", ".")
    while True:
        for prefix in _PREFIXES:
            if name.startswith(prefix):
                name = name.removeprefix(prefix)
                break
        else:
            return name


def _target(names: Mapping[str, str], name: str) -> str | None:
    return names.get(_bare(name))


def _check(shape: tuple[int, ...], update: AdapterUpdate) -> None:
    rows, cols = update.rows, update.cols
    size = rows * cols
    flat = (shape[0], size // shape[0]) if shape and shape[0] else (0, 0)
    fits = (
        (rows, cols) in (shape, shape[::-1])
        if len(shape) == 2
        else flat == (rows, cols) and np.prod(shape) == size
    )
    if not fits:
        raise BadInputError(
            update.name,
            f"has an update of {rows}x{cols} for a weight of shape {shape}; wrong base or adapter",
        )


def _saved(names: Mapping[str, str], adapter: Network) -> dict[str, str]:
    """Weights that the adapter holds whole: name in the base -> name in the adapter."""
    found = {}
    for tensor in adapter.tensors:
        if tensor.name not in adapter.contents.adapters:
            bare = tensor.name.replace(".modules_to_save.default.", ".").replace(".modules_to_save.", ".")
            target = _target(names, bare)
            if target is not None:
                found[target] = tensor.name
    return found
