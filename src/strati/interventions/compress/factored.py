"""Truncated layers as two smaller ones: making them, their module map, and loading them again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from strati.core.errors import BadInputError
from strati.core.plugins import require
from strati.interventions.targets import Target, find_targets

MAP = "strati-factored.json"
"""The module map that lies beside the weights."""


class FactoredEmbedding(nn.Sequential):
    """An embedding of few dimensions and the map to many."""


def factored_module(module: Any, kind: str, rank: int) -> nn.Module:
    """Two layers of rank ``rank`` in place of one; their weights are still to be filled in.

    The first has no bias, the second the layer's own.

    Examples:
        >>> two = factored_module(nn.Linear(6, 5), "linear", 2)
        >>> [tuple(p.shape) for p in two.parameters()]
        [(2, 6), (5, 2), (5,)]
    """
    bias = getattr(module, "bias", None) is not None
    made = nn.Sequential()
    first: nn.Module
    second: nn.Module
    if kind == "conv":
        options = {"stride": module.stride, "padding": module.padding, "dilation": module.dilation}
        first = type(module)(module.in_channels, rank, module.kernel_size, bias=False, **options)
        second = type(module)(rank, module.out_channels, 1, bias=bias)
    else:
        rows, cols = module.weight.shape if kind != "conv1d" else reversed(module.weight.shape)
        first, second = nn.Linear(cols, rank, bias=False), nn.Linear(rank, rows, bias=bias)
    made.add_module("first", first)
    made.add_module("second", second)
    return made.to(module.weight.dtype).eval()


def can_factor(module: Any, target: Target, rank: int) -> bool:
    """Whether two factors are smaller, and the layer is one that can be taken apart."""
    shape = target.shape if target.kind != "conv1d" else target.shape[::-1]
    rows, cols = shape[0], int(np.prod(shape[1:]))
    plain = target.kind in ("linear", "conv1d") or (target.kind == "conv" and module.groups == 1)
    return plain and rank > 0 and rank * (rows + cols) < rows * cols


def factor_tensors(
    layer: str, first: NDArray[Any], second: NDArray[Any], target: Target
) -> dict[str, NDArray[Any]]:
    """The two factors under the names and in the shapes that :func:`factored_module` has."""
    if target.kind == "conv":
        taps = target.shape[2:]
        first = first.reshape(first.shape[0], target.shape[1], *taps)
        second = second.reshape(*second.shape, *[1] * len(taps))
    return {f"{layer}.first.weight": first, f"{layer}.second.weight": second}


def put_in(model: nn.Module, layer: str, module: nn.Module) -> None:
    """Replace a part of a network by name."""
    parent, _, name = layer.rpartition(".")
    setattr(model.get_submodule(parent), name, module)


def write_map(folder: Path, modules: Mapping[str, Any]) -> None:
    """Write the module map."""
    about = {"format": "strati.factored/1", "modules": dict(modules)}
    (folder / MAP).write_text(json.dumps(about, indent=2) + "\n", "utf-8")


def load_factored(path: str | Path, model: nn.Module | None = None) -> nn.Module:
    """Load a network that ``strati apply --factored`` wrote.

    Args:
        path: The folder it was written to.
        model: The network it was made from, in memory; not needed for Hugging Face directories and perceptrons.

    Returns:
        The network, its truncated layers as pairs ``first`` and ``second``.

    Raises:
        BadInputError: The folder has no module map, or its tensors do not match it.
    """
    require("torch", "torch", "loading a network")
    folder = Path(path)
    try:
        modules = json.loads((folder / MAP).read_text("utf-8"))["modules"]
    except (OSError, ValueError, KeyError, TypeError):
        raise BadInputError(folder, f"has no readable {MAP}; was it written factored?") from None
    tensors = _tensors(folder)
    made = _empty(folder, modules, tensors) if model is None else model
    if model is not None:
        import copy

        made = copy.deepcopy(model)
    targets = {t.name: t for t in find_targets(made)}
    for layer, about in modules.items():
        if layer not in targets:
            raise BadInputError(layer, "the module map names a layer that the network does not have")
        module = made.get_submodule(layer)
        put_in(made, layer, factored_module(module, targets[layer].kind, int(about["rank"])))
    state = {_module_name(name, modules): value for name, value in tensors.items()}
    parameters = made.state_dict()
    for name, value in state.items():
        if name in parameters and tuple(parameters[name].shape) == tuple(value.shape):
            parameters[name].copy_(value)
    needed = [n for m in modules for n in (f"{m}.first.weight", f"{m}.second.weight") if n not in state]
    if needed:
        raise BadInputError(folder, f"lacks the tensor {needed[0]}; the files do not fit {MAP}")
    tie: Any = getattr(made, "tie_weights", None)
    if tie is not None:
        tie()
    return made.eval()


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    from strati.io.network import open as open_network

    files = [p for p in sorted(folder.iterdir()) if p.name != MAP and p.suffix in _WEIGHTS]
    tensors = {}
    for file in files:
        network = open_network(file)
        for tensor in network.tensors:
            values = np.array(network.read(tensor.name))
            tensors[tensor.name] = torch.from_numpy(
                values.astype(np.float32) if values.dtype.kind not in "iub" else values
            )
    return tensors


_WEIGHTS = (".safetensors", ".npz", ".pt", ".pth", ".bin", ".th")


def _module_name(name: str, modules: Mapping[str, Any]) -> str:
    """A tensor's name in the factored module: a factored layer's bias belongs to its second part."""
    layer, _, part = name.rpartition(".")
    return f"{layer}.second.bias" if part == "bias" and layer in modules else name


def _empty(folder: Path, modules: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> nn.Module:
    """The network before its layers are taken apart: a transformers class, or a perceptron of the dense products."""
    if (folder / "config.json").is_file():
        transformers = require("transformers", "transformers", "loading a Hugging Face model")
        config = transformers.AutoConfig.from_pretrained(str(folder), local_files_only=True)
        kind = getattr(transformers, (config.architectures or ["AutoModel"])[0])
        made: nn.Module = kind(config) if kind.__name__ != "AutoModel" else kind.from_config(config)
        return made
    import tempfile

    from strati.interventions.compress.rewrite_checkpoint import write_safetensors
    from strati.io.to_module import as_module

    dense = {n: v.numpy() for n, v in tensors.items() if not n.endswith((".first.weight", ".second.weight"))}
    for layer, about in modules.items():
        product = tensors[f"{layer}.second.weight"] @ tensors[f"{layer}.first.weight"]
        dense[str(about.get("tensor", f"{layer}.weight"))] = product.numpy()
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "dense.safetensors"
        write_safetensors(file, dense)
        return as_module(file)
