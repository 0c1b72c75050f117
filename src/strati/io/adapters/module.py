"""An adapter as a network that runs: its base, rebuilt, with the updates in its weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strati.core.errors import BadInputError, UnsupportedError
from strati.io.adapters.merge import bare_name, merged

if TYPE_CHECKING:
    from torch import nn

    from strati.io.network import Network

_INSTEAD = "or load both with PEFT and pass the model"


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
    import numpy as np

    return np.asarray(values, dtype=np.float64 if values.dtype == np.float64 else np.float32)
