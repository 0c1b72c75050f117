"""A transformer as a transformers module, run on data from any block on. Needs torch and transformers."""

from __future__ import annotations

import difflib
import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.core.errors import BadInputError, UnsupportedError, require

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.reassembly.transformer.blueprint import Blueprint

_AUTO = ("AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForImageClassification", "AutoModel")


def empty_network(config: Mapping[str, Any], where: object) -> Any:
    """The module that ``config.json`` describes, without memory for its weights.

    Raises:
        UnsupportedError: transformers does not know it.
    """
    torch = require("torch", "torch", "running a transformer")
    with torch.device("meta"):
        return _build(config, where)


def network(config: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]], where: object) -> Any:
    """The module with its weights, in float32 and evaluation mode, loaded as a Hugging Face directory would be.

    Raises:
        UnsupportedError: transformers does not know the architecture.
        BadInputError: A tensor is missing.
    """
    from safetensors.numpy import save_file

    empty = empty_network(config, where)
    if config.get("model_type") == "whisper":
        return _encoder(config, tensors, where)
    plain = {name: np.ascontiguousarray(values, dtype=np.float32) for name, values in tensors.items()}
    with tempfile.TemporaryDirectory() as folder:
        save_file(plain, Path(folder) / "model.safetensors", metadata={"format": "pt"})
        (Path(folder) / "config.json").write_text(json.dumps({**config, "torch_dtype": "float32"}))
        with _quiet():
            model, info = type(empty).from_pretrained(folder, output_loading_info=True, local_files_only=True)
    missing = [k for k in sorted(info["missing_keys"]) if "pooler" not in k]
    if missing:
        raise BadInputError(where, f"the pieces lack {missing[0]}, which this network needs to run")
    return model.float().eval()


@contextmanager
def _quiet() -> Iterator[None]:
    """Loading reports by bars and warnings; the caller speaks for itself."""
    logging: Any = require("transformers.utils.logging", "transformers", "running a transformer")

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        logging.enable_progress_bar()


def _encoder(config: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]], where: object) -> Any:
    import torch

    model = _build(config, where).float()
    state = {name.removeprefix("model.").removeprefix("encoder."): values for name, values in tensors.items()}
    ready = {name: torch.from_numpy(np.array(values, np.float32)) for name, values in state.items()}
    missing = model.load_state_dict(ready, strict=False).missing_keys
    if missing:
        raise BadInputError(where, f"the pieces lack {missing[0]}, which this network needs to run")
    return model.eval()


def _build(config: Mapping[str, Any], where: object) -> Any:
    transformers = require("transformers", "transformers", "running a transformer")
    kind = config.get("model_type")
    if kind == "whisper":
        from transformers.models.whisper.modeling_whisper import WhisperEncoder

        return WhisperEncoder(transformers.WhisperConfig(**config))
    try:
        made = transformers.AutoConfig.for_model(**config)
    except (ValueError, KeyError, TypeError):
        raise UnsupportedError(where, f"transformers does not know the model type {kind!r}") from None
    for name in config.get("architectures") or []:
        if isinstance(name, str) and hasattr(transformers, name):
            return getattr(transformers, name)(made)
    for auto in _AUTO:
        try:
            return getattr(transformers, auto).from_config(made)
        except ValueError:  # this kind of network has no such head
            continue
    raise UnsupportedError(where, f"transformers cannot build a {kind!r} from its config.json")


class Runner:
    """A module whose blocks can be exchanged, run from any block on with what came before kept.

    Args:
        model: A transformers module.
        blueprint: Where its blocks are.
        inputs: What it is called with.
    """

    def __init__(self, model: Any, blueprint: Blueprint, inputs: Mapping[str, Any]) -> None:
        self.model = model
        self.inputs = dict(inputs)
        self.owner, self.attribute = _stack(model, blueprint.blocks)
        self.layers = list(getattr(self.owner, self.attribute))
        self.kept: list[Any] = []

    def parameters(self, block: int, values: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
        """The parameters of a block that hold given values: name to parameter; equal ones by the nearest name."""
        left = dict(self.layers[block].named_parameters())
        by_name = {}
        for name, array in values.items():
            equal = [k for k, p in left.items() if np.array_equal(p.detach().numpy(), array)]
            if not equal:
                raise BadInputError(name, "is not in the network that transformers builds from config.json")
            best = max(equal, key=lambda k: difflib.SequenceMatcher(None, k, name).ratio())
            by_name[name] = left.pop(best)
        return by_name

    def output(self, start: int = 0) -> Any:
        """The network's output; blocks before ``start`` are not run again."""
        import torch

        stack = torch.nn.ModuleList(self.layers)
        if start and self.kept:
            stack = torch.nn.ModuleList([_Kept(self.kept[start]), *self.layers[start:]])
        setattr(self.owner, self.attribute, stack)
        try:
            with torch.no_grad():
                output = self.model(**self.inputs)
        finally:
            setattr(self.owner, self.attribute, torch.nn.ModuleList(self.layers))
        return _tensor(output)

    def keep(self) -> Any:
        """Run all of it and keep what enters each block."""
        streams: list[Any] = []
        hooks = [
            layer.register_forward_pre_hook(
                lambda _, args, kwargs: streams.append(_first(args, kwargs)), with_kwargs=True
            )
            for layer in self.layers
        ]
        returned: list[Any] = []
        hooks.append(self.layers[0].register_forward_hook(lambda _m, _a, out: returned.append(out)))
        self.kept = []
        output = self.output()
        for hook in hooks:
            hook.remove()
        tuples = isinstance(returned[0], tuple)
        self.kept = [(stream,) if tuples else stream for stream in streams]
        return output


def _stack(model: Any, blocks: int) -> tuple[Any, str]:
    """The module that holds the list of blocks, and the list's name."""
    import torch

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == blocks and list(module.parameters()):
            owner, _, attribute = name.rpartition(".")
            return model.get_submodule(owner), attribute
    raise BadInputError("network", f"has no list of {blocks} blocks")


def _first(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return args[0] if args else kwargs["hidden_states"]


def _tensor(output: Any) -> Any:
    for name in ("logits", "last_hidden_state"):
        value = getattr(output, name, None)
        if value is not None:
            return value
    return output[0] if isinstance(output, tuple) else output


def _Kept(value: Any) -> Any:  # noqa: N802 - makes a module, and torch is not imported before it is needed
    import torch

    class Kept(torch.nn.Module):
        """Stands for the blocks before: whatever it is given, it returns what they returned."""

        attention_type = "full_attention"

        def forward(self, *_: Any, **__: Any) -> Any:
            return value

    return Kept()
