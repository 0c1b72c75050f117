"""Networks in memory: a state dict or an ``nn.Module`` as a :class:`RawCheckpoint`, like a file of the same tensors.

Nothing is copied before a tensor is read, on whatever device it is. Tensors that share their memory are tied, as in a
torch file. The types of a module's layers give hints: a transformers ``Conv1D`` stores its inputs first whatever its
name. torch is imported only in functions that get a module or a tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import numpy as np

from strati.core.errors import BadInputError
from strati.core.results import Flag
from strati.io.adapters.recognise import ADAPTER_KINDS
from strati.io.checkpoint_file import Hint, Kind, RawCheckpoint, Skipped, numpy_dtype
from strati.io.checkpoint_file import Tensor as Record
from strati.io.formats import state_dict as state

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import nn

    from strati.io.adapters.lora import AdapterUpdate


def is_module(x: object) -> TypeGuard[nn.Module]:
    """Whether ``x`` is an ``nn.Module``; torch is not imported to find out."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.nn.Module)


def check_values(module: nn.Module) -> None:
    """Refuse a module that cannot run: without parameters, or with some that have no values.

    Raises:
        BadInputError: A parameter is on the meta device, or lazy and not yet initialised; there is none at all.
    """
    import itertools

    held = itertools.chain(module.named_parameters(), module.named_buffers())
    first = True
    for name, tensor in held:
        first = False
        _check_there(name, tensor)
    if first:
        raise BadInputError(type(module).__name__, "has no parameters; give a module with weights")


def module_contents(module: nn.Module) -> RawCheckpoint:
    """What ``torch.save(module.state_dict())`` would hold, with the modules' types as hints.

    Raises:
        BadInputError: A parameter is on the meta device, or lazy and not yet initialised; there is none at all.
    """
    from torch import Tensor

    tensors = {
        name: tensor
        for name, tensor in module.state_dict(keep_vars=True).items()
        if isinstance(tensor, Tensor)
    }
    kind = type(module).__name__
    if not tensors:
        raise BadInputError(kind, "has no parameters; give a module with weights")
    named, _, warnings = state.state_dict(_Name(kind), tensors, Tensor)  # type: ignore[arg-type]
    hints = _hints(module)
    typed = {new: hints[old] for old, new in zip(tensors, named, strict=True) if old in hints}
    config = _config(module)
    return _contents("module", named, typed, config, (*warnings, *_not_read(config)))


def mapping_contents(mapping: Mapping[Any, Any]) -> RawCheckpoint:
    """The tensors of a state dict: torch tensors or numpy arrays by name, or a checkpoint's dict that holds one.

    Raises:
        BadInputError: It holds no tensors, or one without values.
    """
    torch = sys.modules.get("torch")
    leaf: Any = (np.ndarray, torch.Tensor) if torch is not None else np.ndarray
    named, beside, warnings = state.state_dict(_Name("state dict"), _plain(mapping), leaf)  # type: ignore[arg-type]
    contents = _contents("state dict", named, {}, None, warnings)
    return replace(contents, unread=(*contents.unread, *beside))


def frozen(contents: RawCheckpoint) -> RawCheckpoint:
    """The same with every tensor read, so that it can be pickled."""
    arrays = {tensor.name: np.ascontiguousarray(contents.read(tensor.name)) for tensor in contents.tensors}
    errors: dict[tuple[str, int | None], NDArray[Any] | None] = {}
    for tensor in contents.tensors:
        if contents.rounding is not None and tensor.name in contents.quantisation:
            places: Iterable[int | None] = (
                range(prod(tensor.shape[:-2])) if len(tensor.shape) > 2 else (None,)
            )
            errors |= {(tensor.name, index): contents.rounding(tensor.name, index) for index in places}
    return replace(
        contents,
        read=arrays.__getitem__,
        read_part=None,
        rounding=partial(_error_of, errors),
        adapters={name: _held(update) for name, update in contents.adapters.items()},
    )


def _held(update: AdapterUpdate) -> AdapterUpdate:
    """An update with its factors read."""
    return replace(
        update,
        factors=partial(_same, update.factors()),
        magnitude=None if update.magnitude is None else partial(_same, update.magnitude()),
    )


def _same(value: Any) -> Any:
    return value


def _error_of(
    errors: Mapping[tuple[str, int | None], NDArray[Any] | None], name: str, index: int | None
) -> NDArray[Any] | None:
    return errors.get((name, index))


class _Name:
    """Takes the place of a file in messages about a network in memory."""

    def __init__(self, path: str) -> None:
        self.path = path

    def error(self, why: str) -> BadInputError:
        return BadInputError(self.path, why)


def _is_tensor(value: object) -> bool:
    torch = sys.modules.get("torch")
    return isinstance(value, np.ndarray) or (torch is not None and isinstance(value, torch.Tensor))


def _plain(node: Any, depth: int = 0) -> Any:
    """Mappings of any class as plain dicts, which the search in a checkpoint expects."""
    if isinstance(node, Mapping) and depth <= state.MAX_DEPTH:
        return {key: _plain(value, depth + 1) for key, value in node.items()}
    return node


def _contents(
    format: str,
    named: Mapping[str, Any],
    hints: Mapping[str, Hint],
    config: Mapping[str, Any] | None,
    warnings: tuple[Flag, ...],
) -> RawCheckpoint:
    tensors: list[Record] = []
    unread: list[Skipped] = []
    ties: dict[str, str] = {}
    shared: dict[str, tuple[object, int]] = {}
    first: dict[object, str] = {}
    for name, tensor in named.items():
        reason = _unreadable(name, tensor)
        if reason is not None:
            unread.append(Skipped(name, reason))
            continue
        shape = tuple(int(side) for side in tensor.shape)
        dtype = str(tensor.dtype).removeprefix("torch.")
        tensors.append(Record(name, shape, dtype, prod(shape) * int(tensor.dtype.itemsize)))
        if prod(shape) == 0:
            continue
        storage, entries, place = _place(tensor)
        shared[name] = (storage, entries)
        tied = first.setdefault((storage, dtype, place), name)
        if tied != name:
            ties[name] = tied

    def read(name: str) -> NDArray[Any]:
        return _array(named[name])

    return RawCheckpoint(format, tuple(tensors), read, tuple(unread), ties, hints, shared, config, warnings)


def _unreadable(name: str, value: Any) -> str | None:
    """Why a tensor cannot be read; one that has no values at all is refused."""
    if isinstance(value, np.ndarray):
        return None if value.dtype.kind in "fiucbV" and not value.dtype.fields else f"dtype {value.dtype}"
    import torch
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    _check_there(name, value)
    if value.is_quantized:
        return "quantised by torch; dequantise it first"
    if value.is_nested:
        return "a nested tensor; pass its parts"
    if value.layout is not torch.strided:
        return "a sparse tensor; make it dense first"
    if is_traceable_wrapper_subclass(value):
        return f"a {type(value).__name__}; convert it to a plain tensor first"
    dtype = str(value.dtype).removeprefix("torch.")
    try:
        numpy_dtype(dtype)
    except (TypeError, AttributeError):
        return f"dtype {dtype} is not analysed"
    return None


def _check_there(name: str, value: Any) -> None:
    from torch.nn.parameter import is_lazy

    if is_lazy(value):
        raise BadInputError(name, "is a lazy parameter without a shape yet; run one forward pass first")
    if value.is_meta:
        raise BadInputError(
            name, "is on the meta device, so it has a shape but no values; load the weights first"
        )


def _place(value: Any) -> tuple[object, int, object]:
    """Where a tensor's entries lie: its storage, how many entries that holds, and which of them these are."""
    if isinstance(value, np.ndarray):
        base = value
        while isinstance(base.base, np.ndarray):
            base = base.base
        steps, start = value.strides, value.__array_interface__["data"][0]
        storage: object = ("numpy", base.__array_interface__["data"][0])
        entries = max(base.nbytes // value.itemsize, 1)
    else:
        steps, start = value.stride(), value.storage_offset()
        bytes_ = value.untyped_storage()
        storage, entries = (str(value.device), bytes_.data_ptr()), bytes_.nbytes() // value.dtype.itemsize
    used = tuple(sorted((step, side) for step, side in zip(steps, value.shape, strict=True) if side > 1))
    return storage, entries, (start, used)


def _array(value: Any) -> NDArray[Any]:
    """A tensor's values, read-only; a view of the same memory where it is on this machine's processor."""
    array = as_array(value).view()
    array.flags.writeable = False
    return array


def as_array(value: Any) -> NDArray[Any]:
    """Numbers as an array: a tensor of any dtype and device, or whatever numpy takes; no copy where none is needed.

    Examples:
        >>> as_array([1, 2]).tolist()
        [1, 2]
        >>> import torch
        >>> as_array(torch.ones(2, dtype=torch.bfloat16, requires_grad=True)).dtype.name
        'bfloat16'
    """
    if not hasattr(value, "detach"):
        return np.asarray(value)
    import torch

    tensor = value.detach().cpu().resolve_conj().resolve_neg()
    name = str(tensor.dtype).removeprefix("torch.")
    if numpy_dtype(name).kind == "V" or name.startswith(("bfloat", "float8")):  # numpy has no such type
        raw = {1: torch.uint8, 2: torch.int16}[tensor.dtype.itemsize]
        return cast("NDArray[Any]", tensor.contiguous().view(raw).numpy().view(numpy_dtype(name)))
    return cast("NDArray[Any]", tensor.numpy())


def _config(module: nn.Module) -> Mapping[str, Any] | None:
    """The hyperparameters of a transformers model, as its ``config.json`` would have them."""
    to_dict = getattr(getattr(module, "config", None), "to_dict", None)
    config = to_dict() if callable(to_dict) else None
    merged: dict[str, Any] | None = config if isinstance(config, dict) else None
    adapters = getattr(module, "peft_config", None)
    if isinstance(adapters, Mapping) and adapters:
        settings = {str(name): adapter.to_dict() for name, adapter in adapters.items()}
        merged = (merged or {}) | {
            "adapter_config": next(iter(settings.values())),
            "adapter_configs": settings,
            "active_adapters": _active(module),
        }
    return merged


def _active(module: nn.Module) -> list[str]:
    """The adapters that a PEFT model computes with, besides those that are merged into its weights already."""
    for layer in module.modules():
        if hasattr(layer, "merged_adapters") and hasattr(layer, "active_adapters"):
            if getattr(layer, "disable_adapters", False):
                return []
            active, merged = (
                cast("list[str]", layer.active_adapters),
                cast("list[str]", layer.merged_adapters),
            )
            return [str(name) for name in active if name not in merged]
    return []


def _not_read(config: Mapping[str, Any] | None) -> tuple[Flag, ...]:
    """The warning about adapters of kinds that are not read."""
    settings = (config or {}).get("adapter_configs", {})
    kinds = {
        str(getattr(kind, "value", kind))
        for kind in (adapter.get("peft_type") for adapter in settings.values())
    }
    others = sorted(kinds - set(ADAPTER_KINDS))
    if not others:
        return ()
    text = f"adapters of the kind {', '.join(others)} are not read: the weights are those without them"
    return (Flag("adapter-not-read", text),)


def _hints(module: nn.Module) -> dict[str, Hint]:
    """Hints about tensors from the types of their modules."""
    hints: dict[str, Hint] = {}
    for path, submodule in module.named_modules(remove_duplicate=False):
        for name, parameter in submodule.named_parameters(recurse=False, remove_duplicate=False):
            hint = _hint(submodule, name, parameter)
            full = f"{path}.{name}" if path else name
            label = full.replace(".base_layer.", ".").removeprefix("base_model.model.")
            if ".base_layer." in full:  # wrapped by PEFT: the role is that of the layer inside
                hint = Hint(hint.kind, hint.transposed, label)
            if hint != Hint():
                hints[full] = hint
    return hints


def _hint(module: nn.Module, name: str, parameter: Any) -> Hint:
    from torch import nn

    kinds: tuple[tuple[Any, Kind], ...] = (
        ((nn.Embedding, nn.EmbeddingBag), "embedding"),
        ((nn.Conv1d, nn.Conv2d, nn.Conv3d), "conv"),
        ((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), "conv"),
        ((nn.LSTM, nn.LSTMCell), "lstm"),
        ((nn.GRU, nn.GRUCell), "gru"),
        ((nn.RNN, nn.RNNCell), "rnn"),
        ((nn.Linear, nn.MultiheadAttention), "linear"),
        ((nn.Bilinear,), "stack"),
    )
    utils = sys.modules.get("transformers.pytorch_utils")
    if utils is not None and isinstance(module, utils.Conv1D) and name == "weight":
        return Hint("linear", transposed=True)
    if getattr(parameter, "ndim", 0) < 2:
        return Hint()
    for types, kind in kinds:
        if isinstance(module, types):
            recurrent = kind in ("lstm", "gru", "rnn")
            return Hint("linear" if recurrent and name.startswith("weight_hr") else kind)
    return Hint()


def unsupported_input(x: object) -> BadInputError:
    """The error for an object that is not a network."""
    kind = type(x).__name__
    if _is_tensor(x):
        return BadInputError(kind, "is one array, not a network; use strati.spectrum for a single matrix")
    return BadInputError(
        kind, "is not a network; pass a path, a model name in the cache, a state dict or an nn.Module"
    )


def load_arrays(model: nn.Module, arrays: Mapping[str, Any], what: str | Path) -> None:
    """Fill a module with arrays by name.

    Args:
        model: The module; it is changed.
        arrays: Values by the names of its ``state_dict()``. Others are ignored.
        what: Where they come from, for messages.

    Raises:
        BadInputError: A tensor is missing or of another shape.

    Examples:
        >>> import torch
        >>> layer = torch.nn.Linear(2, 1)
        >>> load_arrays(layer, {"weight": np.ones((1, 2)), "bias": np.zeros(1)}, "example")
        >>> layer(torch.ones(1, 2)).tolist()
        [[2.0]]
    """
    import torch

    with torch.no_grad():
        for name, old in model.state_dict().items():
            if name not in arrays:
                if name.endswith("num_batches_tracked"):
                    continue
                raise BadInputError(what, f"the tensor {name} is missing")
            if tuple(arrays[name].shape) != tuple(old.shape):
                raise BadInputError(
                    what, f"{name} has shape {tuple(arrays[name].shape)}, not {tuple(old.shape)}"
                )
            old.copy_(torch.from_numpy(np.array(arrays[name])))
