"""``strati.open`` and the :class:`Network` that it returns. Headers are checked; weights are read on demand."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from strati.core.display import as_html
from strati.core.errors import BadInputError
from strati.core.results import Flag
from strati.io import in_memory
from strati.io import layers as _layers
from strati.io.adapters.recognise import updates
from strati.io.checkpoint_file import RawCheckpoint, Skipped, Tensor
from strati.io.file_formats import file_contents
from strati.io.quantised.recognise import decoded
from strati.io.roles import Names, Role

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import nn

    from strati.io.layers import Layer
    from strati.io.quantised.rounding_error import Rounding


Openable: TypeAlias = "Network | str | os.PathLike[str] | Mapping[str, Any] | nn.Module"
"""Whatever names a network; every function that takes one takes all of these."""

Conv = Literal["pool", "flatten"]

_IN_MEMORY = frozenset({"module", "state dict"})
"""Formats of networks without a file."""


def open(model: Openable) -> Network:
    """Open a network. Its header is checked; tensors are read on demand.

    The format of a file is detected from its content: safetensors, a Hugging Face directory (sharded or not), torch
    (zip or the older stream), npz, ONNX, GGUF, Keras, Flax. No code from the file is ever run.

    Args:
        model: A file; a Hugging Face directory; ``ORG/NAME[@REVISION]`` in the local Hugging Face cache (a path of that
            name comes first, and nothing is downloaded); a state dict of torch tensors or numpy arrays; an
            ``nn.Module``, transformers and PEFT models among them, on any device; or a :class:`Network`, which is
            returned as it is.

    Returns:
        The network. For a module or state dict it reads the tensors in memory.

    Raises:
        StratiError: The file is missing, damaged, inconsistent, or of a format that strati does not read; a parameter
            in memory has no values.

    Examples:
        >>> import numpy as np, strati
        >>> net = strati.open({"fc.weight": np.ones((3, 2), np.float32), "fc.bias": np.zeros(3, np.float32)})
        >>> net.parameters, [layer.name for layer in net.layers()], net.skipped()[0].name
        (9, ['fc.weight'], 'fc.bias')
    """
    if isinstance(model, Network):
        return model
    if isinstance(model, str | os.PathLike):
        return _open_path(Path(_resolve_path(os.fspath(model))))
    if in_memory.is_module(model):
        return Network(Path(type(model).__name__), in_memory.module_contents(model), module=model)
    if isinstance(model, Mapping):
        return Network(Path("state dict"), in_memory.mapping_contents(model))
    raise in_memory.unsupported_input(model)


@lru_cache(maxsize=4)
def _reopened(place: Path, stamp: object) -> Network:
    """The network in another process, opened once for all its layers."""
    return _open_path(place)


def _resolve_path(path: str) -> str | Path:
    """The path itself, or the folder in the Hugging Face cache that it names."""
    if not path:  # as a path it would be the current folder
        raise BadInputError("MODEL", "is an empty name; give the path of a model")
    if not isinstance(path, str):
        raise BadInputError("MODEL", "is a path of bytes; give it as text")
    try:
        there = os.path.lexists(path)
    except ValueError:  # a NUL in the path: the reader says so
        there = True
    if there:
        return path
    from strati.io.formats.hf_directory import cached_model, is_cache_id

    return cached_model(path) if is_cache_id(path) else path


def _open_path(place: Path) -> Network:
    try:
        directory = place.is_dir()
    except (OSError, ValueError):
        directory = False
    if directory:
        from strati.io.formats.hf_directory import contents as directory_contents

        return Network(place, directory_contents(place))
    if place.name.endswith(".index.json"):
        from strati.io.formats.hf_directory import indexed_contents

        return Network(place, indexed_contents(place))
    contents = file_contents(place)
    if contents.format == "npz":
        from strati.io.data_files import refuse_as_model

        refuse_as_model(place, contents.tensors)
    return Network(place, contents)


class Network:
    """A checkpoint: tensors by name, and the layers they make up.

    Attributes:
        path: Where it came from; the class's name for a module in memory.
        format: ``safetensors``, ``torch``, ``npz``, ``onnx``, ``gguf``, ``keras``; ``module`` or ``state dict`` for a
            network in memory.
        module: The ``nn.Module`` it was opened from, or ``None``.
        tensors: Its tensors, unread.
        config: ``config.json`` of a Hugging Face directory, the hyperparameters of a GGUF file, or ``None``.
        parts: The networks it was put together from, a base and an adapter; empty for one that was opened.
    """

    def __init__(
        self,
        path: Path,
        contents: RawCheckpoint,
        *,
        module: nn.Module | None = None,
        parts: tuple[Network, ...] = (),
    ) -> None:
        contents = updates(decoded(contents))
        self.path = path
        self.module = module
        self.parts = parts
        self.format = contents.format
        self.tensors = contents.tensors
        self.config: Mapping[str, Any] | None = contents.config
        self.contents = contents
        self.roundings: dict[tuple[str, str], Rounding | None] = {}
        self._recipe: tuple[Any, tuple[Any, ...]] | None = None
        self._plans: dict[tuple[bool, str], tuple[tuple[Layer, ...], tuple[Skipped, ...]]] = {}

    @cached_property
    def warnings(self) -> tuple[Flag, ...]:
        """Warnings about the file."""
        if self.layers():
            return self.contents.warnings
        text = "holds no weight matrix: nothing to analyse (strati inspect lists its tensors)"
        return (*self.contents.warnings, Flag("no-matrices", text))

    @property
    def in_memory(self) -> bool:
        """Whether it, or a part of it, is a module or a state dict: then ``path`` is a name, not a place."""
        return self.format in _IN_MEMORY or any(part.in_memory for part in self.parts)

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        """Pickle the path of a network, or the values of one in memory."""
        if self._recipe is not None:
            return self._recipe
        if self.in_memory:
            return Network, (self.path, in_memory.frozen(self.contents))
        return _reopened, (self.path, self.contents.stamp())

    def __repr__(self) -> str:
        return f"<Network {self.path.name}: {self.format}, {len(self.tensors)} tensors>"

    def _repr_html_(self) -> str:
        listed = self.tensors[:60]
        cells = "".join(
            f"<tr><td>{as_html(t.name)}</td><td>{as_html(t.dtype)}</td><td>{as_html(t.shape)}</td></tr>"
            for t in listed
        )
        more = (
            f"<p>... and {len(self.tensors) - len(listed)} more</p>"
            if len(self.tensors) > len(listed)
            else ""
        )
        head = "<tr><th>tensor</th><th>dtype</th><th>shape</th></tr>"
        return f"<p>{as_html(repr(self))}</p><table>{head}{cells}</table>{more}"

    @cached_property
    def _by_name(self) -> dict[str, Tensor]:
        return {tensor.name: tensor for tensor in self.tensors}

    def __getitem__(self, name: str) -> Tensor:
        """A tensor's record.

        Raises:
            BadInputError: There is no tensor of that name.
        """
        if name not in self._by_name:
            raise BadInputError(name, f"no such tensor in {self.path}; see: strati inspect")
        return self._by_name[name]

    def read(self, name: str) -> NDArray[Any]:
        """A tensor's values in their own dtype (bfloat16 as in ml_dtypes); dequantised ones as float32.

        Where the file stores them plainly this is a read-only view of the file's pages.

        Raises:
            StratiError: There is no such tensor, or its bytes are damaged.
        """
        return self.contents.read(self[name].name)

    @cached_property
    def names(self) -> Names:
        """Roles, blocks and heads that follow from all names and shapes together."""
        return Names(self)

    @cached_property
    def ties(self) -> Mapping[str, str]:
        """Tensors that repeat another one: name -> the tensor that counts."""
        return find_ties(self)

    @cached_property
    def parameters(self) -> int:
        """Number of floating-point entries; ties count once, running statistics and masks not at all."""
        total: dict[object, int] = {}
        limits: dict[object, int] = {}
        for tensor in self.tensors:
            if tensor.floating and tensor.name not in self.ties and not _layers.is_buffer(tensor):
                storage, limit = self.contents.shared.get(tensor.name, (("alone", tensor.name), tensor.size))
                update = self.contents.adapters.get(tensor.name)
                size = tensor.size if update is None else update.rank * (update.rows + update.cols)
                total[storage] = total.get(storage, 0) + size
                limits[storage] = limit
        return sum(min(count, limits[storage]) for storage, count in total.items())

    def layers(self, *, split_qkv: bool = False, conv: Conv = "pool") -> tuple[Layer, ...]:
        """The weight matrices, in the network's order.

        Args:
            split_qkv: Fused query-key-value matrices as three layers.
            conv: ``"pool"``: a kernel's k*k slices are the layer's matrices; ``"flatten"``: one matrix,
                outputs by (inputs x k*k).
        """
        return self._plan(split_qkv, conv)[0]

    def skipped(self, *, split_qkv: bool = False, conv: Conv = "pool") -> tuple[Skipped, ...]:
        """The tensors that are no layer, each with its reason."""
        return self._plan(split_qkv, conv)[1]

    def _plan(self, split_qkv: bool, conv: str) -> tuple[tuple[Layer, ...], tuple[Skipped, ...]]:
        if conv not in ("pool", "flatten"):
            raise BadInputError("conv", f"is {conv!r}; use 'pool' or 'flatten'")
        key = (bool(split_qkv), conv)
        if key not in self._plans:
            self._plans[key] = _layers.build_layers(self, split_qkv=key[0], flatten=conv == "flatten")
        return self._plans[key]


def find_ties(network: Network) -> Mapping[str, str]:
    """Tensors that repeat another one: by shared storage, or embeddings and heads with equal bytes."""
    names = network.names
    tied = dict(network.contents.ties)
    _prefer_embeddings(names, tied)
    alike: dict[tuple[tuple[int, ...], str], list[Tensor]] = {}
    for tensor in network.tensors:
        # GGUF leaves a tied head out by itself, and dequantising both to compare them would cost memory.
        plain = tensor.floating and not tensor.quantised
        if tensor.name not in tied and len(tensor.shape) == 2 and tensor.size > 1 and plain:
            role = names.role(tensor, "linear")
            if role in (Role.EMBEDDING, Role.HEAD):
                alike.setdefault((tensor.shape, tensor.dtype), []).append(tensor)
    for group in alike.values():
        group.sort(key=lambda t: names.role(t, "linear") is Role.HEAD)  # an embedding counts before a head
        for position, tensor in enumerate(group):
            for earlier in group[:position]:
                if earlier.name not in tied and _equal(network, earlier.name, tensor.name):
                    tied[tensor.name] = earlier.name
                    break
    return tied


def _prefer_embeddings(names: Names, tied: dict[str, str]) -> None:
    """Where a head comes before the embedding it shares its weights with, let the embedding count."""
    groups: dict[str, list[str]] = {}
    for name, first in tied.items():
        groups.setdefault(first, []).append(name)
    for first, others in groups.items():
        if names.by_role(first) is Role.EMBEDDING:
            continue
        better = next((name for name in others if names.by_role(name) is Role.EMBEDDING), None)
        if better is not None:
            del tied[better]
            for name in [first, *(other for other in others if other != better)]:
                tied[name] = better


def _equal(network: Network, a: str, b: str) -> bool:
    """Whether two tensors hold the same bytes and are not one constant; stops at the first difference."""
    first, second = network.read(a), network.read(b)
    rows = max(1, 1_000_000 // max(1, first.shape[1]))
    varied = False
    for start in range(0, first.shape[0], rows):
        x, y = first[start : start + rows], second[start : start + rows]
        if x.tobytes() != y.tobytes():
            return False
        varied = varied or bool(np.any(x != first[0, 0]))
    return varied
