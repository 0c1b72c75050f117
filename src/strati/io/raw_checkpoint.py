"""What every format yields: tensors by name, how to read one, and what must be said about the file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from strati.core.errors import BadInputError
from strati.core.results import Flag

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.io.adapters.lora import AdapterUpdate

ANALYSED = frozenset({"float16", "bfloat16", "float32", "float64"})
"""The dtypes that are analysed; tensors of others are listed as skipped."""

MAX_DIMENSIONS = 32
MAX_TENSORS = 200_000


@dataclass(frozen=True)
class Tensor:
    """One array of a checkpoint, not yet read.

    Attributes:
        name: Its name in the file.
        shape: Its shape as stored.
        dtype: numpy's name of its type (``bfloat16`` and ``float8_*`` as in ml_dtypes), or the
            quantisation's name (``q4_1``).
        nbytes: Bytes it occupies in the file.
        quantised: Stored as a lossy code; reading it gives float32.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    quantised: bool = False

    @property
    def size(self) -> int:
        """Number of entries."""
        return prod(self.shape)

    @property
    def floating(self) -> bool:
        """Whether its entries are real numbers that can be analysed."""
        return self.quantised or self.dtype in ANALYSED


@dataclass(frozen=True)
class Skipped:
    """A tensor that is not analysed, and why."""

    name: str
    reason: str


Kind = Literal["linear", "conv", "depthwise", "embedding", "lstm", "gru", "rnn", "stack"]


@dataclass(frozen=True)
class Hint:
    """What a format knows about a tensor beyond its name and shape.

    Attributes:
        kind: What it does, ``None`` if the format does not say.
        transposed: Stored inputs first: ``(in, out)``, or height, width, in, out for kernels.
        label: A better name than its own for telling the role, such as the graph node's.
        merge: Inputs and outputs of the matrix that the axes come to when merged (Keras' attention kernels).
    """

    kind: Kind | None = None
    transposed: bool = False
    label: str | None = None
    merge: tuple[int, int] | None = None


@dataclass(frozen=True)
class Quantisation:
    """How a weight was rounded before it was stored.

    Attributes:
        scheme: Who stored it so: ``gptq``, ``bitsandbytes-nf4``, ``q4_k``, ...
        bits: Bits per entry, scales left out (GGUF: with them).
        group: Entries that share a scale; ``None`` where a whole row or tensor does.
    """

    scheme: str
    bits: float
    group: int | None


@dataclass(frozen=True)
class RawCheckpoint:
    """The checked header of a checkpoint.

    Attributes:
        format: The format's name.
        tensors: What can be read, in the network's order as far as the format keeps it.
        read: Reads one tensor by name.
        unread: Tensors that the file names but that cannot be read, with the reason.
        ties: Tensors that share their bytes with an earlier one: name -> the earlier name.
        hints: What the format knows about a tensor.
        shared: Tensors that are parts of one storage: name -> (storage, its number of entries).
        config: ``config.json`` of a Hugging Face directory, or the format's own hyperparameters.
        warnings: What a user must know about the file.
        quantisation: How the tensors stored as lossy codes were rounded.
        rounding: Mean square of the error that rounding left in each entry of a tensor (of a stack: of one of its
            matrices); ``None`` where that is not known.
        read_part: Reads one matrix of a stack, where that is cheaper than reading all of it.
        adapters: Tensors that are low-rank updates of another network's weights.
        files: The files that the values come from; empty for a network in memory.
    """

    format: str
    tensors: tuple[Tensor, ...]
    read: Callable[[str], NDArray[Any]]
    unread: tuple[Skipped, ...] = ()
    ties: Mapping[str, str] = field(default_factory=dict)
    hints: Mapping[str, Hint] = field(default_factory=dict)
    shared: Mapping[str, tuple[object, int]] = field(default_factory=dict)
    config: Mapping[str, Any] | None = None
    warnings: tuple[Flag, ...] = ()
    quantisation: Mapping[str, Quantisation] = field(default_factory=dict)
    rounding: Callable[[str, int | None], NDArray[Any] | None] | None = None
    read_part: Callable[[str, int], NDArray[Any]] | None = None
    adapters: Mapping[str, AdapterUpdate] = field(default_factory=dict)
    files: tuple[Path, ...] = ()

    def stamp(self) -> tuple[tuple[str, int, int], ...]:
        """Name, size and time of change of each file: what tells these values from others without reading them.

        Raises:
            BadInputError: A file is gone.
        """
        found = []
        for file in self.files:
            try:
                state = file.stat()
            except OSError as error:
                raise BadInputError(file, f"cannot be read ({error.strerror or error})") from None
            found.append((file.name, state.st_size, state.st_mtime_ns))
        return tuple(found)


@cache
def numpy_dtype(name: str) -> np.dtype[Any]:
    """The numpy dtype of a name, ml_dtypes' included.

    Examples:
        >>> numpy_dtype("bfloat16").itemsize, numpy_dtype("float32").itemsize
        (2, 4)
    """
    if name.startswith(("bfloat", "float8_", "float4_", "float6_")):
        import ml_dtypes

        small: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return small
    return np.dtype(name)


def natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """A sort key that puts ``h.2`` before ``h.10``.

    Examples:
        >>> sorted(["h.10.w", "h.2.w", "b"], key=natural)
        ['b', 'h.2.w', 'h.10.w']
    """
    key: list[tuple[int, int, str]] = []
    digits, text = "", ""
    for character in name:
        if character in "0123456789":
            if text:
                key.append((1, 0, text))
                text = ""
            digits += character
        else:
            if digits:
                key.append((0, len(digits.lstrip("0")), digits.lstrip("0")))
                digits = ""
            text += character
    if digits:
        key.append((0, len(digits.lstrip("0")), digits.lstrip("0")))
    if text:
        key.append((1, 0, text))
    return tuple(key)
