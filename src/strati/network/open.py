"""``strati.open``: a path becomes a :class:`Network`. The header is checked, the weights are not read."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from strati.errors import BadInputError
from strati.network import layers as _layers
from strati.network import ties as _ties
from strati.network.contents import MAX_TENSORS, Contents, Skipped, Tensor
from strati.network.names import Names
from strati.network.quantised.recognise import decoded
from strati.network.sniff import sniff, wrong_ending
from strati.network.source import Source
from strati.types import Flag

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.network.layers import Layer

Conv = Literal["pool", "flatten"]


def open(path: str | Path) -> Network:
    """Open a network: its header is checked, nothing else is read before it is asked for.

    The format is told by content: safetensors, a Hugging Face directory (sharded or not), torch
    (zip or the older stream), npz, ONNX, GGUF, Keras HDF5. No code from the file is ever run.

    Args:
        path: A file, or a Hugging Face directory.

    Returns:
        The network.

    Raises:
        StratiError: The file is missing, damaged, lies about itself, or is nothing that strati reads.

    Examples:
        >>> import tempfile, numpy as np, strati
        >>> file = Path(tempfile.mkdtemp()) / "small.npz"
        >>> np.savez(file, **{"fc.weight": np.ones((3, 2), np.float32), "fc.bias": np.zeros(3, np.float32)})
        >>> net = strati.open(file)
        >>> net.parameters, [layer.name for layer in net.layers()], net.skipped()[0].name
        (9, ['fc.weight'], 'fc.bias')
    """
    given: object = path
    if not isinstance(given, str | os.PathLike):
        kind = type(given).__name__
        raise BadInputError(kind, "is not a path; save the weights to a file first, or use strati.spectrum")
    if path == "":  # as a path it would be the present folder, which nobody named
        raise BadInputError("MODEL", "is an empty name; give the path of a model")
    place = Path(path)
    try:
        directory = place.is_dir()
    except (OSError, ValueError):
        directory = False
    if directory:
        from strati.network.formats.directory import contents as directory_contents

        return Network(place, directory_contents(place))
    return Network(place, file_contents(place))


def file_contents(path: Path) -> Contents:
    """The checked header of one file, whatever its format."""
    source = Source(path)
    kind = sniff(source)
    read = importlib.import_module(f"strati.network.formats.{kind}").contents
    found: Contents = read(source)
    if len(found.tensors) > MAX_TENSORS:
        raise BadInputError(
            path, f"lists {len(found.tensors):,} tensors; more than {MAX_TENSORS:,} is not believed"
        )
    for name in [tensor.name for tensor in found.tensors] + [skipped.name for skipped in found.unread]:
        if not name.isascii() and name.encode("utf-8", "ignore").decode() != name:
            # Half a surrogate pair: tables and other programs take no such text, and no framework writes it.
            raise BadInputError(path, f"the name {name} is not Unicode text; write the file anew")
    warnings = found.warnings + wrong_ending(source, kind)
    return Contents(**(vars(found) | {"warnings": warnings}))


class Network:
    """A checkpoint: tensors by name, and the layers they make up.

    Attributes:
        path: Where it came from.
        format: ``safetensors``, ``torch``, ``npz``, ``onnx``, ``gguf``, ``keras``, or ``directory``'s parts.
        tensors: Its tensors, unread.
        config: ``config.json`` of a Hugging Face directory, the hyperparameters of a GGUF file, or ``None``.
        warnings: What a user must know about the file.
    """

    def __init__(self, path: Path, contents: Contents) -> None:
        contents = decoded(contents)
        self.path = path
        self.format = contents.format
        self.tensors = contents.tensors
        self.config: Mapping[str, Any] | None = contents.config
        self.warnings: tuple[Flag, ...] = contents.warnings
        self.contents = contents
        self._plans: dict[tuple[bool, str], tuple[tuple[Layer, ...], tuple[Skipped, ...]]] = {}

    def __reduce__(self) -> tuple[Any, tuple[Path]]:
        """Between processes a network travels as its path."""
        return open, (self.path,)

    def __repr__(self) -> str:
        return f"<Network {self.path.name}: {self.format}, {len(self.tensors)} tensors>"

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
        """What the tensors' names and shapes say together."""
        return Names(self)

    @cached_property
    def ties(self) -> Mapping[str, str]:
        """Tensors that are another one again: name -> the one that counts."""
        return _ties.ties(self)

    @cached_property
    def parameters(self) -> int:
        """Number of floating-point entries; ties count once, running statistics and masks not at all."""
        total: dict[object, int] = {}
        limits: dict[object, int] = {}
        for tensor in self.tensors:
            if tensor.floating and tensor.name not in self.ties and not _layers.is_buffer(tensor):
                storage, limit = self.contents.shared.get(tensor.name, (("alone", tensor.name), tensor.size))
                total[storage] = total.get(storage, 0) + tensor.size
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
            self._plans[key] = _layers.plan(self, split_qkv=key[0], flatten=conv == "flatten")
        return self._plans[key]
