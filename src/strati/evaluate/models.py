"""How to call a model: its inputs, the tensor in its output, whether it takes tokens, and its device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from strati.core.errors import BadInputError, UnsupportedError

Inputs: TypeAlias = Tensor | Mapping[str, Tensor]
"""What a model is called with: one tensor, or keyword arguments by name."""


def output_tensor(output: Any) -> Tensor:
    """The tensor in a module's output: the output itself, the logits, the last hidden state, or the first tensor.

    Raises:
        UnsupportedError: There is none.

    Examples:
        >>> output_tensor((torch.ones(2), "state")).tolist()
        [1.0, 1.0]
        >>> output_tensor({"loss": torch.zeros(()), "logits": torch.ones(1)}).tolist()
        [1.0]
    """
    if isinstance(output, Tensor):
        return output
    for name in ("logits", "last_hidden_state", "out"):
        tensor = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        if isinstance(tensor, Tensor):
            return tensor
    parts = list(output.values()) if isinstance(output, Mapping) else output
    if isinstance(parts, tuple | list):
        for part in parts:
            if isinstance(part, Tensor) and part.ndim == 0 and len(parts) > 1:
                continue  # a loss beside the output
            if isinstance(part, Tensor | tuple | list | Mapping):
                return output_tensor(part)
    raise UnsupportedError(
        "model", f"returns a {type(output).__name__} without a tensor; wrap it in a module that returns one"
    )


def call(model: Callable[..., Any], x: Inputs) -> Tensor:
    """Call a model with one tensor or with keyword arguments, and return the tensor in its output."""
    return output_tensor(model(**x) if isinstance(x, Mapping) else model(x))


def takes_tokens(model: nn.Module) -> bool:
    """Whether integers given to a model are tokens: transformers say so; others have an embedding and no convolution.

    Examples:
        >>> takes_tokens(nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9))), takes_tokens(nn.Linear(3, 2))
        (True, False)
    """
    named = getattr(model, "main_input_name", None)
    if isinstance(named, str):  # transformers' models say what they are called with
        return named in ("input_ids", "decoder_input_ids")
    kinds = [type(module) for module in model.modules()]
    convolves = any(issubclass(kind, nn.Conv2d | nn.Conv3d) for kind in kinds)
    return any(issubclass(kind, nn.Embedding | nn.EmbeddingBag) for kind in kinds) and not convolves


def longest_input(model: nn.Module | None) -> int | None:
    """The context length of a model, if its configuration has it.

    Examples:
        >>> longest_input(nn.Linear(2, 2)) is None
        True
    """
    positions = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    return int(positions) if isinstance(positions, int) and positions > 0 else None


def predicts_next(model: nn.Module | None) -> bool:
    """Whether a model of transformers, alone or inside PEFT, predicts the next token and shifts ``labels`` itself.

    Examples:
        >>> predicts_next(nn.Linear(3, 2))
        False
    """
    inside = getattr(model, "get_base_model", None)
    name = type(inside() if callable(inside) else model).__name__
    return hasattr(model, "config") and name.endswith(("ForCausalLM", "LMHeadModel", "DoubleHeadsModel"))


def attention_in_batches() -> AbstractContextManager[None]:
    """Use attention without the fused kernel inside ``torch.func.vmap``, and leave it unchanged elsewhere.

    The fused kernel has no batching rule: it would process the parameters one at a time, and warn.
    """
    if torch._C._functorch.maybe_current_level() is None:
        return nullcontext()
    context: AbstractContextManager[None] = sdpa_kernel(SDPBackend.MATH)
    return context


def device_of(model: nn.Module | None, device: torch.device | str | None = None) -> torch.device | None:
    """The given device, or that of the model.

    Raises:
        BadInputError: torch does not have the device.
    """
    if device is None:
        held = next((t for t in (*model.parameters(), *model.buffers())), None) if model is not None else None
        return held.device if held is not None else None
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError, TypeError) as error:
        reason = (str(error).splitlines() or ["unknown"])[0]
        raise BadInputError("device", f"{device} cannot be used here ({reason})") from None
    return place


def on_device(model: nn.Module, device: torch.device | str | None) -> nn.Module:
    """The model itself, or a copy on another device; the caller's model is not moved."""
    place = device_of(model, device)
    if device is None or place == device_of(model):
        return model
    return copy.deepcopy(model).to(place)
