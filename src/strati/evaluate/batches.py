"""Data of any form as batches.

Data may be arrays or tensors, ``(x, y)``, a dict of tensors as tokenizers return it, a ``DataLoader`` or any other
re-iterable of such batches, a ``Dataset`` of single rows, or the path of a data file. :func:`as_batches` turns any of
them into :class:`Batches`, which can be iterated over repeatedly with one :class:`Batch` in memory at a time. Methods
that need all data at once call :meth:`Batches.whole`, which warns before it takes much memory.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from strati.core.errors import BadInputError
from strati.evaluate.models import Inputs as Inputs
from strati.evaluate.models import call as call
from strati.evaluate.models import device_of as device_of
from strati.evaluate.models import longest_input, predicts_next
from strati.evaluate.models import on_device as on_device
from strati.evaluate.models import output_tensor as output_tensor
from strati.evaluate.models import takes_tokens as takes_tokens
from strati.io.data_files import LARGEST, as_windows, read_path

ROWS = 256
"""Rows in a batch, unless the data come in batches."""

CONTEXT = 128
"""Tokens in a window, if token ids come in one dimension."""

NO_LABEL = -100
"""The label of positions without a target, as in torch and transformers."""

_LABELS = ("labels", "label", "y")
_NAMED = {"x", "y"}
_WORTH_SAYING = 100 * 2**20


@dataclass(frozen=True)
class Batch:
    """Some rows of data: inputs ``x`` (a tensor, or keyword arguments by name) and targets ``y``, if there are any."""

    x: Inputs
    y: Tensor | None = None

    @property
    def rows(self) -> int:
        """Number of inputs."""
        return int(_first(self.x).shape[0])

    @property
    def nbytes(self) -> int:
        """Bytes it takes."""
        held = [*self.x.values()] if isinstance(self.x, Mapping) else [self.x]
        return sum(t.nbytes for t in (*held, *([] if self.y is None else [self.y])))

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Batch:
        """The batch on another device, with floats in another type; integers (tokens, labels) keep theirs."""

        def cast(t: Tensor) -> Tensor:
            return t.to(device=device, dtype=dtype if t.is_floating_point() else None)

        x = {k: cast(v) for k, v in self.x.items()} if isinstance(self.x, Mapping) else cast(self.x)
        return Batch(x, None if self.y is None else cast(self.y))

    def take(self, rows: slice | Tensor) -> Batch:
        """Some of its rows."""
        x = {k: v[rows] for k, v in self.x.items()} if isinstance(self.x, Mapping) else self.x[rows]
        return Batch(x, None if self.y is None else self.y[rows])


@dataclass(frozen=True)
class Batches:
    """Data as a re-iterable of :class:`Batch`; one batch in memory at a time unless it was given as arrays.

    Attributes:
        make: Starts a pass over the batches.
        rows: Number of rows; ``None`` if it is known only after reading.
        streamed: Comes from a loader or data set, so that reading all of it may take much memory.
        device: Where batches are put; ``None`` leaves them where they are.
        dtype: The type of real numbers; ``None`` leaves it.
    """

    make: Callable[[], Iterator[Batch]]
    rows: int | None
    streamed: bool = False
    device: torch.device | None = None
    dtype: torch.dtype | None = None

    def __iter__(self) -> Iterator[Batch]:
        """One pass.

        Raises:
            BadInputError: There is no batch, or one holds values that are not finite.
        """
        count = 0
        for batch in self.make():
            if batch.rows:
                count += batch.rows
                yield batch.to(self.device, self.dtype)
        if count == 0:
            raise BadInputError("data", "is empty; give at least one row")

    def first(self) -> Batch:
        """The first batch."""
        return next(iter(self))

    def head(self, rows: int) -> Batch:
        """The first rows (all if there are fewer); no more batches are read than necessary."""
        parts, count = [], 0
        for batch in self:
            parts.append(batch)
            count += batch.rows
            if count >= rows:
                break
        return _joined(parts).take(slice(0, rows))

    def whole(self, of: str = "this method") -> Batch:
        """All rows as one batch, for methods that need them at once.

        A ``UserWarning`` is issued before a stream takes more than 100 MB; data that do not fit into free memory are
        refused.

        Args:
            of: What needs them, for messages.

        Raises:
            BadInputError: They do not fit into memory.
        """
        parts: list[Batch] = []
        taken, warned = 0, not self.streamed
        for batch in self:
            expected = batch.nbytes // batch.rows * self.rows if self.rows else taken + batch.nbytes
            if not warned and expected > _WORTH_SAYING:
                warned = True
                size = f"{expected / 2**30:.1f} GB" if self.rows else f"over {expected / 2**20:.0f} MB"
                warnings.warn(f"{of} needs all data at once: reading the stream whole, {size}", stacklevel=3)
            if self.streamed and not parts and self.rows and 2 * expected > _free_memory():
                raise BadInputError(
                    "data", f"{of} needs all data at once, {expected / 2**30:.1f} GB; give fewer rows"
                )
            if self.streamed and 2 * batch.nbytes > _free_memory():
                raise BadInputError("data", f"{of} needs all data at once, which do not fit; give fewer rows")
            taken += batch.nbytes
            parts.append(batch)
        return _joined(parts)


def as_batches(
    data: Any,
    model: nn.Module | None = None,
    *,
    rows: int = ROWS,
    context: int = CONTEXT,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Batches:
    """Data of any form as batches.

    Args:
        data: Arrays or tensors (rows first), ``(x, y)``, a dict of tensors (``labels`` in it are the targets; a model
            of transformers that predicts the next token shifts them, so they are shifted here), a
            ``DataLoader`` or any other re-iterable of such batches, a ``Dataset`` of rows, or a path: ``.npz``
            (arrays ``x``, optional ``y``), ``.npy``, CSV, ``.txt`` (through the model's tokenizer), a folder of
            images by class. A list of two arrays of the same kind of rows is two batches; write ``(x, y)`` as a tuple.
        model: The network that they are for: integers are tokens if it takes tokens, else they become floats, and
            batches are put on its device.
        rows: Rows in a batch, unless the data come in batches.
        context: Tokens in a window, if token ids come in one dimension; fewer tokens are one window, and no window is
            longer than the model's context.
        device: Put batches on this device instead.
        dtype: The type of floats; by default they keep theirs.

    Raises:
        BadInputError: They are not data, are empty, hold values that are not finite, or can be read only once.

    Examples:
        >>> batches = as_batches((np.ones((5, 3)), np.arange(5)), rows=2)
        >>> [(tuple(b.x.shape), b.y.tolist()) for b in batches]
        [((2, 3), [0, 1]), ((2, 3), [2, 3]), ((1, 3), [4])]
        >>> [sorted(b.x) for b in as_batches([{"input_ids": torch.ones(2, 4).long(), "labels": torch.zeros(2)}])]
        [['input_ids']]
    """
    if isinstance(data, Batches):
        return data
    tokens = takes_tokens(model) if model is not None else None
    shifts = predicts_next(model)
    context = min(context, longest_input(model) or context)
    place = device_of(model, device) if model is not None or device is not None else None
    if isinstance(data, str | os.PathLike):
        data = read_path(Path(data), model)
    pair = None if _two_batches(data) else _arrays(data, shifts=shifts)
    if pair is not None:
        batch = _batch(*pair, tokens=tokens, context=context)
        return Batches(lambda: _cut(batch, rows), batch.rows, device=place, dtype=dtype)
    source, count = _stream(data, rows)

    def make() -> Iterator[Batch]:
        for raw in source:
            pair = _arrays(raw, shifts=shifts)
            if pair is None:
                raise BadInputError(
                    "data", f"yields a {type(raw).__name__}; a batch is x, (x, y) or a dict of tensors"
                )
            yield _batch(*pair, tokens=tokens, context=context)

    return Batches(make, count, streamed=True, device=place, dtype=dtype)


def whole_inputs(data: Any, model: nn.Module | None = None, *, of: str = "this method") -> Tensor:
    """All inputs as one tensor, for methods that need them at once.

    Of a dict of tensors it is the token ids (``input_ids``), or the only tensor.

    Raises:
        BadInputError: They are not data, do not fit into memory, or are several tensors.

    Examples:
        >>> whole_inputs({"input_ids": torch.ones(2, 3).long(), "attention_mask": torch.ones(2, 3)}).shape
        torch.Size([2, 3])
    """
    x = as_batches(data, model).whole(of).x
    if not isinstance(x, Mapping):
        return x
    if "input_ids" in x or len(x) == 1:
        return x["input_ids"] if "input_ids" in x else next(iter(x.values()))
    raise BadInputError("data", f"has the inputs {', '.join(x)}; {of} takes one tensor")


# -- what data are --------------------------------------------------------------------------------------


def _arrays(data: Any, *, shifts: bool = False) -> tuple[Any, Any] | None:
    """Inputs and targets where data are arrays; ``None`` where they are to be iterated over.

    ``labels`` of a model that predicts the next token are those of the tokens themselves: the target at a place is the
    label of the next.
    """
    if isinstance(data, Tensor | np.ndarray) or hasattr(data, "__array__"):
        return data, None
    if isinstance(data, Mapping):
        if "x" in data and set(data) <= _NAMED:
            return data["x"], data.get("y")
        label = next((name for name in _LABELS if name in data), None)
        inputs = {k: v for k, v in data.items() if k != label and v is not None}
        target = data[label] if label else None
        tokens = np.shape(inputs.get("input_ids", ()))
        if shifts and label == "labels" and target is not None and len(tokens) == 2 == np.ndim(target):
            target = torch.nn.functional.pad(as_tensor(target, "labels")[:, 1:], (0, 1), value=NO_LABEL)
        return inputs, target
    if isinstance(data, Batch):
        return data.x, data.y
    if isinstance(data, tuple | list) and data:
        if len(data) == 1 and _is_input(data[0]):
            return _arrays(data[0], shifts=shifts)
        if len(data) == 2 and _is_input(data[0]) and _is_target(data[1]):
            return data[0], data[1]
        if isinstance(data, tuple) and len(data) == 2 and _numbers(data[0]) and _numbers(data[1]):
            return data[0], data[1]
        if _numbers(data):
            return data, None
    return None


def _two_batches(data: Any) -> bool:
    """Whether a list of two arrays is two batches of inputs: rows of one shape and type. ``(x, y)`` is a tuple."""
    if not isinstance(data, list) or len(data) != 2:
        return False
    first, second = data
    arrays = all(isinstance(v, Tensor | np.ndarray) and v.ndim > 1 for v in data)
    return bool(arrays and first.shape[1:] == second.shape[1:] and first.dtype == second.dtype)


def _is_input(value: Any) -> bool:
    return isinstance(value, Tensor | np.ndarray | Mapping) or hasattr(value, "__array__")


def _is_target(value: Any) -> bool:
    return value is None or (_is_input(value) and not isinstance(value, Mapping)) or _numbers(value)


def _numbers(value: Any) -> bool:
    """Whether nested lists hold numbers."""
    while isinstance(value, tuple | list) and value:
        value = value[0]
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)


def _stream(data: Any, rows: int) -> tuple[Iterable[Any], int | None]:
    """Something to iterate over for batches, and how many rows it has if that is known."""
    from torch.utils.data import DataLoader, Dataset, IterableDataset

    if isinstance(data, DataLoader):
        dataset = data.dataset if data.batch_sampler is not None and not data.drop_last else None
        return data, len(dataset) if hasattr(dataset, "__len__") else None  # type: ignore[arg-type]
    if isinstance(data, IterableDataset):
        return DataLoader(data, batch_size=rows, collate_fn=_collate), None
    indexed = hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, tuple | list)
    if isinstance(data, Dataset) or indexed:
        if len(data) == 0:
            raise BadInputError("data", "is empty; give at least one row")
        return DataLoader(data, batch_size=rows, collate_fn=_collate), len(data)
    if not isinstance(data, Iterable) or isinstance(data, bytes):
        raise BadInputError(
            "data",
            f"is a {type(data).__name__}; give arrays, (x, y), a dict of tensors, batches, a Dataset or a path",
        )
    if iter(data) is data:
        raise BadInputError(
            "data", "is an iterator, which can be read only once; give a list or a DataLoader"
        )
    return data, None


def _collate(items: list[Any]) -> Any:
    """Single rows as one batch; columns of a dict that hold no numbers are left out."""
    first = items[0]
    if isinstance(first, Mapping):
        return {k: _stack([item[k] for item in items]) for k, v in first.items() if _is_number_like(v)}
    if isinstance(first, tuple | list) and len(first) in (1, 2) and not _numbers(first):
        parts = [_stack([item[i] for item in items]) for i in range(len(first))]
        return tuple(parts)
    return _stack(items)


def _is_number_like(value: Any) -> bool:
    return isinstance(value, Tensor | np.ndarray | int | float | np.number) or _numbers(value)


def _stack(values: list[Any]) -> Tensor:
    try:
        return torch.stack([v if isinstance(v, Tensor) else torch.as_tensor(np.asarray(v)) for v in values])
    except (RuntimeError, TypeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise BadInputError(
            "data", f"has rows that do not stack into one batch ({reason}); pad them"
        ) from None


def _batch(x: Any, y: Any, *, tokens: bool | None, context: int) -> Batch:
    if isinstance(x, Mapping):
        inputs: Inputs = {
            str(k): as_tensor(v, str(k))
            for k, v in x.items()
            if isinstance(v, Tensor | np.ndarray) or _numbers(v)
        }
        if not inputs:
            raise BadInputError("data", "is a dict without tensors; give a dict of tensors")
    else:
        inputs = as_tensor(x, "x")
        if not inputs.is_floating_point():
            inputs = _whole_numbers(inputs, tokens=tokens, context=context)
        elif tokens and bool((inputs == inputs.round()).all()):  # CSV has token numbers as real ones
            inputs = _whole_numbers(inputs.long(), tokens=True, context=context)
    target = None if y is None else as_tensor(y, "y")
    batch = Batch(inputs, target)
    sizes = {int(t.shape[0]) for t in (inputs.values() if isinstance(inputs, Mapping) else [inputs])}
    if len(sizes) > 1 or (target is not None and target.shape[0] not in sizes):
        targets = target is not None and len(sizes) == 1
        other = f"{len(target):,} targets" if target is not None and targets else "other numbers of rows"
        raise BadInputError("data", f"has {batch.rows:,} inputs and {other}; give one target for each input")
    return batch


def _whole_numbers(x: Tensor, *, tokens: bool | None, context: int) -> Tensor:
    """Tokens cut into windows; pixels and counts as floats; unchanged if the model is unknown."""
    if tokens is None:
        return x
    if not tokens:
        return x.to(torch.get_default_dtype())
    if x.ndim > 1:
        return x.long()
    window = min(context, max(len(x), 2))  # a short text is one window
    return torch.as_tensor(as_windows(x.numpy(force=True), window))


def as_tensor(value: Any, what: str) -> Tensor:
    """An array as a tensor, rows first.

    Raises:
        BadInputError: It is not numbers, is empty, or holds values that are not finite or whose squares are not.
    """
    try:
        tensor = value.detach() if isinstance(value, Tensor) else torch.as_tensor(np.asarray(value))
    except (TypeError, ValueError) as error:
        raise BadInputError(what, f"is not an array of numbers ({str(error).splitlines()[0]})") from None
    if tensor.ndim == 0 or tensor.numel() == 0:
        raise BadInputError(what, f"has shape {tuple(tensor.shape)}; give at least one row of data")
    if tensor.is_complex():
        raise BadInputError(what, "holds complex numbers; give real ones")
    if tensor.dtype == torch.bool:
        return tensor.long()
    if tensor.is_floating_point():
        if not bool(torch.isfinite(tensor).all()):
            raise BadInputError(what, "holds values that are not finite; remove those rows first")
        if float(tensor.abs().max()) > LARGEST:
            raise BadInputError(
                what, f"holds values beyond {LARGEST:g}, whose squares overflow; rescale them first"
            )
    return tensor


def _cut(batch: Batch, rows: int) -> Iterator[Batch]:
    for start in range(0, batch.rows, rows):
        yield batch.take(slice(start, start + rows))


def _joined(parts: list[Batch]) -> Batch:
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0].x, Mapping):
        x: Inputs = {k: _cat([_named(p.x, k) for p in parts]) for k in parts[0].x}
    else:
        x = _cat([_first(p.x) for p in parts])
    targets = [p.y for p in parts if p.y is not None]
    if targets and len(targets) != len(parts):
        raise BadInputError("data", "has targets in some batches only; give them in all or none")
    return Batch(x, _cat(targets) if targets else None)


def _cat(parts: list[Tensor]) -> Tensor:
    try:
        return torch.cat(parts)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise BadInputError(
            "data", f"has batches that do not fit together ({reason}); pad them alike"
        ) from None


def _named(x: Inputs, name: str) -> Tensor:
    if not isinstance(x, Mapping) or name not in x:
        raise BadInputError("data", f"has batches without {name}; give all of them the same names")
    return x[name]


def _first(x: Inputs) -> Tensor:
    return next(iter(x.values())) if isinstance(x, Mapping) else x


def _free_memory() -> int:
    """Bytes of free memory; very many if the system does not say."""
    try:
        text = Path("/proc/meminfo").read_text()
        return int(text.split("MemAvailable:")[1].split()[0]) * 1024
    except (OSError, IndexError, ValueError):
        return 1 << 62
