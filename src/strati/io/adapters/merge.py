r"""An adapter put onto the network it was made for: ``W + s B A``, and DoRA's rescaling of it.

DoRA (Liu et al. 2024) gives every output row of the merged weight a length of its own:
:math:`m_i (W + s B A)_i / \lVert (W + s B A)_i \rVert`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.core.errors import BadInputError, UnsupportedError
from strati.io.adapters.experts import split_by_expert
from strati.io.adapters.recognise import settings

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import nn

    from strati.io.adapters.lora import AdapterUpdate
    from strati.io.network import Network

_INSTEAD = "or load both with PEFT and pass the model"
_PREFIXES = ("base_model.model.", "model.", "module.", "transformer.")


def is_adapter(network: Network) -> bool:
    """Whether a network is an adapter alone: updates, and no base they belong to.

    PEFT keeps the base's own embedding beside an update of it, in a folder that is an adapter all the same.
    """
    if not network.contents.adapters:
        return False
    return network.format == "peft" or not any(".base_layer." in tensor.name for tensor in network.tensors)


def merged(base: Network, adapter: Network) -> Network:
    """The base with the adapter's updates added, tensor by tensor as they are read.

    Weights that the adapter holds whole (``modules_to_save``, embeddings) replace the base's before anything is added,
    rows that it holds (``trainable_token_indices``) the base's rows.

    Raises:
        BadInputError: An update has no weight to be added to, or does not fit it.
    """
    from strati.io.network import Network as Opened

    names = _lookup(base)
    saved = _saved(names, adapter)
    shapes = {name: (adapter[saved[name]] if name in saved else base[name]).shape for name in names.values()}
    plan = _plan(base, adapter, names, shapes)
    rows = token_rows(names, shapes, adapter)
    plain = base.contents

    def finish(name: str, weight: NDArray[Any], index: int | None) -> NDArray[Any]:
        for update in plan.get(name, ()):
            if index is None and update.expert is not None:  # one expert of a stack
                weight = np.array(weight, np.float32)
                flat = weight.reshape(-1, *weight.shape[-2:])
                flat[update.expert] = apply(flat[update.expert], update)
            elif index is None or update.expert == index:
                weight = apply(weight, update)
        return weight if name not in rows else _with_rows(weight, *rows[name], adapter)

    def read(name: str) -> NDArray[Any]:
        weight = adapter.contents.read(saved[name]) if name in saved else plain.read(name)
        return finish(name, weight, None)

    def part(name: str, index: int) -> NDArray[Any]:
        experts = all(update.expert is not None for update in plan.get(name, ()))
        if name in saved or name in rows or not experts or plain.read_part is None:
            stack = read(name)
            expert_weight: NDArray[Any] = stack.reshape(-1, *stack.shape[-2:])[index]
            return expert_weight
        return finish(name, plain.read_part(name, index), index)

    changed = {*plan, *rows}
    tensors = tuple(
        replace(
            t,
            shape=shapes.get(t.name, t.shape),
            dtype="float32"
            if t.name in changed
            else adapter[saved[t.name]].dtype
            if t.name in saved
            else t.dtype,
            quantised=t.quantised and t.name not in changed and t.name not in saved,
        )
        for t in base.tensors
    )
    path = Path(f"{base.path} + {adapter.path.name}")
    quantisation = {n: kind for n, kind in plain.quantisation.items() if n not in changed and n not in saved}
    contents = replace(
        plain,
        tensors=tensors,
        read=read,
        read_part=part,
        quantisation=quantisation,
        ties={},
        adapters={},
        warnings=(
            *plain.warnings,
            *(w for w in adapter.contents.warnings if w.code == "adapter-changed-base"),
        ),
    )
    made = Opened(path, contents, parts=(base, adapter))
    made._recipe = (merged, (base, adapter))
    return made


def _plan(
    base: Network, adapter: Network, names: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, list[AdapterUpdate]]:
    """Which updates are added to which weight of the base."""
    plan: dict[str, list[AdapterUpdate]] = {}
    underscored = _underscored(names)
    for update in adapter.contents.adapters.values():
        target = _target(names, update.name) or underscored.get(_joined(update.name))
        placed_updates = [] if target is None else [(target, update)]
        if target is None and update.expert is not None:
            placed_updates = split_by_expert(replace(update, name=bare_name(update.name)), names)
        if not placed_updates:
            why = f"is not in {base.path.name}; the adapter {adapter.path.name} belongs to another network"
            raise BadInputError(update.name, why)
        for place, part in placed_updates:
            _check(shapes[place], part)
            # Of a square expert the shape does not tell; of other weights PEFT's own setting does.
            turned = part.turned or (part.expert is not None and base.names.stack_inputs_first(place))
            plan.setdefault(place, []).append(replace(part, turned=turned))
    return plan


def carries_adapter(network: Network) -> bool:
    """Whether a network holds a base and updates of it: a PEFT model in memory."""
    return bool(network.contents.adapters) and not is_adapter(network)


def unwrapped(network: Network) -> Network:
    """A PEFT model in memory as the network that it computes: every weight with its updates, under its own name.

    Of several adapters those count that are active and not merged already.

    Raises:
        BadInputError: There are several adapters, and nothing says which are active.
    """
    from strati.io.network import Network as Opened

    contents = network.contents
    updates = _in_use(network)
    base, saved = {}, []
    for tensor in contents.tensors:
        if tensor.name in contents.adapters or "trainable_tokens_original" in tensor.name:
            if tensor.name in updates:
                saved.append(tensor)
        elif ".modules_to_save." in tensor.name or "trainable_tokens_delta" in tensor.name:
            saved.append(tensor)
        else:
            plain = tensor.name.removeprefix("base_model.model.").replace(".token_adapter.", ".")
            while ".base_layer." in plain:
                plain = plain.replace(".base_layer.", ".")
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
    adapter_contents = replace(contents, tensors=tuple(saved), adapters=updates)
    both = merged(Opened(network.path, held), Opened(network.path, adapter_contents))
    names = {tensor.name: name for name, tensor in base.items()}
    changed = {bare_name(update.name) for update in updates.values()}
    ties = {
        names[later]: names[first]
        for later, first in contents.ties.items()
        if later in names
        and first in names
        and not {bare_name(names[later]), bare_name(names[first])} & changed
    }
    made = Opened(network.path, replace(both.contents, ties=ties))
    made._recipe = (unwrapped, (network,))
    return made


def _in_use(network: Network) -> dict[str, AdapterUpdate]:
    """The updates that a model in memory computes with."""
    updates = network.contents.adapters
    named = list(dict.fromkeys(update.adapter for update in updates.values()))
    active = (network.config or {}).get("active_adapters")
    if active is None:
        if len(named) > 1:
            raise BadInputError(
                network.path,
                f"holds {len(named)} adapters, and which are active is not known; give the model itself",
            )
        active = named
    return {name: update for name, update in updates.items() if update.adapter in active}


def apply(weight: NDArray[Any], update: AdapterUpdate) -> NDArray[np.float32]:
    """A weight, in the layout the network stores it in, with its update added."""
    weight_float32 = weight.astype(np.float32)
    change = update.product()
    turned = update.turned or (weight.ndim == 2 and weight.shape != change.shape == weight.shape[::-1])
    flat = weight_float32.T if turned else weight_float32.reshape(change.shape)
    added = flat + change
    if update.magnitude is not None:
        magnitudes = update.magnitude().astype(np.float32)
        axis = 0 if update.table else 1  # a table of embeddings has its outputs in columns
        lengths = np.linalg.norm(added, axis=axis)
        added *= np.expand_dims(magnitudes / np.where(lengths > 0, lengths, 1), axis)
    back: NDArray[np.float32] = np.ascontiguousarray(added.T if turned else added).reshape(weight.shape)
    return back


def _lookup(base: Network) -> dict[str, str]:
    """Names without the prefixes that wrappers and heads put before them -> the name in the base."""
    return {bare_name(tensor.name): tensor.name for tensor in reversed(base.tensors)}


def bare_name(name: str) -> str:
    """A tensor's name without what PEFT, heads and wrappers put around it.

    Examples:
        >>> bare_name("base_model.model.transformer.h.0.attn.c_attn.base_layer.weight")
        'h.0.attn.c_attn.weight'
    """
    while ".base_layer." in name:
        name = name.replace(".base_layer.", ".")
    while True:
        for prefix in _PREFIXES:
            if name.startswith(prefix):
                name = name.removeprefix(prefix)
                break
        else:
            return name


_COMPONENTS = ("unet", "text_encoder", "text_encoder_2", "transformer", "prior")


def _underscored(names: Mapping[str, str]) -> dict[str, str]:
    """The base's names as kohya writes them; a name that two tensors share is left out."""
    joined: dict[str, str] = {}
    ambiguous = set()
    for bare, name in names.items():
        component, _, inner = bare.partition(".")
        for key in {
            _joined(bare),
            _joined(inner) if component in _COMPONENTS else _joined(bare),
            _joined(name),
        }:
            if joined.setdefault(key, name) != name:
                ambiguous.add(key)
    return {key: name for key, name in joined.items() if key not in ambiguous}


def _joined(name: str) -> str:
    return name.replace(".", "_").replace("/", "_")


def _target(names: Mapping[str, str], name: str) -> str | None:
    return names.get(bare_name(name))


def _check(shape: tuple[int, ...], update: AdapterUpdate) -> None:
    rows, cols = update.rows, update.cols
    if update.magnitude is not None and update.magnitude().size != (cols if update.table else rows):
        raise BadInputError(update.name, "has a magnitude vector (DoRA) of another length than its outputs")
    if update.expert is not None:
        fits = len(shape) == 3 and update.expert < shape[0] and (rows, cols) in (shape[1:], shape[:0:-1])
    elif len(shape) == 2:
        fits = (rows, cols) in (shape, shape[::-1])
    else:
        fits = shape[:1] == (rows,) and math.prod(shape) == rows * cols
    if not fits:
        text = f"has an update of {rows}x{cols} for a weight of shape {shape}; wrong base or adapter"
        raise BadInputError(update.name, text)


def _saved(names: Mapping[str, str], adapter: Network) -> dict[str, str]:
    """Weights that the adapter holds whole: name in the base -> name in the adapter."""
    saved_names = {}
    for tensor in adapter.tensors:
        if tensor.name not in adapter.contents.adapters:
            bare = tensor.name.replace(".modules_to_save.default.", ".").replace(".modules_to_save.", ".")
            target = _target(names, bare)
            if target is not None:
                saved_names[target] = tensor.name
    return saved_names


_TOKENS = re.compile(r"(?P<module>.+)\.token_adapter\.trainable_tokens_delta(?:\..+)?$")


def token_rows(
    names: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]], adapter: Network
) -> dict[str, tuple[list[int], str]]:
    """Rows of embeddings that an adapter replaces: name in the base -> which rows, and the tensor that holds them.

    Raises:
        BadInputError: The settings do not name as many rows as the adapter holds, or rows that are not there.
    """
    rows_by_target = {}
    for tensor in adapter.tensors:
        match = _TOKENS.fullmatch(tensor.name)
        target = None if match is None else _target(names, f"{match['module']}.weight")
        if match is None or target is None:
            continue
        token_indices = settings(adapter.contents, None).get("trainable_token_indices")
        if isinstance(token_indices, Mapping):
            token_indices = next(
                (v for k, v in token_indices.items() if match["module"].endswith(str(k))), None
            )
        shape = (len(token_indices), *shapes[target][1:]) if isinstance(token_indices, list) else ()
        in_range = isinstance(token_indices, list) and all(
            type(i) is int and 0 <= i < shapes[target][0] for i in token_indices
        )
        if not isinstance(token_indices, list) or not in_range or tensor.shape != shape:
            raise BadInputError(tensor.name, "does not fit trainable_token_indices in adapter_config.json")
        rows_by_target[target] = (token_indices, tensor.name)
    return rows_by_target


def _with_rows(weight: NDArray[Any], rows: list[int], tensor: str, adapter: Network) -> NDArray[np.float32]:
    changed = np.array(weight, np.float32)
    changed[rows] = adapter.contents.read(tensor)
    return changed


def adapted_module(network: Network, rebuilt: Callable[[Network], nn.Module]) -> nn.Module:
    """The base of an adapter with its updates added.

    Args:
        network: An adapter, or a base and an adapter put together.
        rebuilt: Makes a module of the base.

    Raises:
        BadInputError: The base is not said or not there, or the adapter belongs to another network.
        UnsupportedError: The module has other names than the base's files.
    """
    import torch

    both = network if network.parts else merge_with_base(network)
    base, adapter = both.parts
    model = rebuilt(base)
    parameters = {bare_name(name): value for name, value in model.state_dict().items()}
    for update in adapter.contents.adapters.values():
        if bare_name(update.name) not in parameters:
            why = (
                f"has no place of its own in {type(model).__name__}; merge the adapter with PEFT, {_INSTEAD}"
            )
            raise UnsupportedError(update.name, why)
    with torch.no_grad():
        for tensor in both.tensors:
            place = parameters.get(bare_name(tensor.name))
            if place is not None and tuple(place.shape) == tensor.shape:
                place.copy_(torch.tensor(_real(both.read(tensor.name))))
    return model


def merge_with_base(adapter: Network) -> Network:
    """The network that an adapter makes of its base.

    Raises:
        BadInputError: The base is not said or not there, or the adapter belongs to another network.
    """
    return merged(_base(adapter), adapter)


def _base(adapter: Network) -> Network:
    """The network that an adapter names as its base: a folder, beside the adapter or not, or a name in the cache."""
    from strati.io.network import open as open_network

    config = adapter.config or {}
    named = (config.get("adapter_config") or config).get("base_model_name_or_path")
    if not isinstance(named, str) or not named:
        why = f"is an adapter that does not say which network it belongs to; merge them first, {_INSTEAD}"
        raise BadInputError(adapter.path, why)
    beside = Path(adapter.path).parent / named
    try:
        return open_network(named if Path(named).exists() or not beside.exists() else beside)
    except BadInputError as error:
        why = f"its base cannot be opened ({error}); put it there, {_INSTEAD}"
        raise BadInputError(adapter.path, why) from None


def _real(values: Any) -> Any:
    return np.asarray(values, dtype=np.float64 if values.dtype == np.float64 else np.float32)
