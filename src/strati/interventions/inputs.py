"""What a caller gives a study in memory: networks, whatever names them, and data, whatever they come as."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from strati.core.errors import BadInputError
from strati.evaluate.batches import NO_LABEL, as_batches, read_path
from strati.interventions.study_spec import Spec, builtin_names, spec_keys
from strati.interventions.tasks import IGNORED, StudyData, windows
from strati.io.in_memory import as_array
from strati.io.network import Network
from strati.io.to_module import as_module


def is_spec(source: Any, *, given: bool) -> bool:
    """Whether a study's source is a spec; a path is one unless there is something to evaluate it by.

    Args:
        source: What the study was asked for.
        given: Whether ``evaluate`` or ``data`` came with it.
    """
    if isinstance(source, Mapping):
        held = any(isinstance(v, Tensor | np.ndarray | nn.Module | Network) for v in source.values())
        return not held and (not given or (bool(source) and set(source) <= set(spec_keys())))
    if isinstance(source, str | os.PathLike):
        return not given or Path(source).suffix.lower() == ".toml" or str(source) in builtin_names()
    return isinstance(source, Spec)


def as_modules(source: Any, activation: str = "relu") -> nn.Module | dict[str, nn.Module]:
    """A network, or networks by name, as modules; ``activation`` is that of a bare MLP.

    Raises:
        BadInputError: They are none.
    """
    if isinstance(source, Mapping) and source:
        named = all(isinstance(v, nn.Module | Network | str | os.PathLike) for v in source.values())
        if named:
            return {str(name): _module(network, activation) for name, network in source.items()}
    return _module(source, activation)


def paths_of(source: Any) -> dict[str, str]:
    """Where the networks of a study are, by name, of those that are files or folders."""
    named = source if isinstance(source, Mapping) else {"model": source}
    paths = {str(name): path for name, path in named.items() if isinstance(path, str | os.PathLike)}
    return {
        name: str(Path(path).resolve()) if Path(path).exists() else str(path) for name, path in paths.items()
    }


def _module(source: Any, activation: str) -> nn.Module:
    return as_module(source, activation=activation)  # type: ignore[arg-type]


def study_data(
    data: Any, model: nn.Module, context: int, *, inputs: str | None = None, targets: str | None = None
) -> StudyData:
    """Data as a study scores them: inputs with labels, or token ids whose next token is predicted.

    Of a dict as tokenizers return it ``input_ids`` are the inputs, and padding goes by ``attention_mask``.

    Args:
        data: Whatever names data.
        model: The network they are for.
        context: Tokens in a window, where ids come in one dimension.
        inputs: The array or columns of a file that hold the inputs.
        targets: The array or column of a file that holds the labels.

    Raises:
        BadInputError: They are no data, or neither labelled nor tokens.
    """
    if isinstance(data, StudyData):
        return data
    if inputs is not None or targets is not None:
        data = _named_arrays(data, inputs, targets)
    x, y = _arrays(data, model)
    _check_inputs("data", x)
    tokens = np.issubdtype(x.dtype, np.integer) and x.dtype != np.uint8
    if tokens and (y is None or (x.ndim == 2 and y.shape == x.shape)):
        ids = windows(np.where(x == IGNORED, 0, x), context, "data")
        ids = np.where(x == IGNORED, IGNORED, ids) if ids.shape == x.shape else ids
        labels = None if y is None else np.where(y == NO_LABEL, IGNORED, y)
        return StudyData("tokens", int(ids.max()) + 1, ids[:0], None, ids, labels)
    if y is None:
        raise BadInputError(
            "data", "has no labels y, by which a network is scored; give (x, y), or token ids"
        )
    if len(x) != len(y) or y.ndim != 1 or y.dtype.kind not in "iub":
        raise BadInputError(
            "data", "x and y need as many rows as each other, y one label (a whole number) a row"
        )
    if tokens and x.ndim == 1:
        why = "token ids in one dimension have no labels of their own; give x as rows of tokens, or the tokens alone"
        raise BadInputError("data", why)
    return StudyData("tokens" if tokens else "rows", int(y.max()) + 1, x[:0], None, x, y)


def calibration_data(data: Any, model: nn.Module, context: int, inputs: str | None = None) -> StudyData:
    """Data for the input covariances of layers, whatever names them, as the rows ``x``; labels are not needed.

    Raises:
        BadInputError: They are no data.
    """
    x, _ = _arrays(data if inputs is None else _named_arrays(data, inputs, None), model)
    _check_inputs("calibration", x)
    if not np.issubdtype(x.dtype, np.integer) or x.dtype == np.uint8:
        return StudyData("rows", 0, x, None, x[:0], None)
    ids = windows(x, context, "calibration") if x.ndim == 1 else x
    return StudyData("tokens", 0, ids, None, ids[:0], None)


def _check_inputs(what: str, x: np.ndarray[Any, Any]) -> None:
    if len(x) == 0:
        raise BadInputError(what, "is empty; give at least one row")
    if x.dtype.kind == "f" and not np.isfinite(x).all():
        raise BadInputError(what, "holds values that are not finite; remove those rows first")
    if x.dtype.kind not in "fiub":
        raise BadInputError(what, f"holds {x.dtype}, not numbers; give arrays of numbers")


def _named_arrays(data: Any, inputs: str | None, targets: str | None) -> Any:
    from strati.io.data_files import read_data

    if not isinstance(data, str | os.PathLike) or Path(data).suffix.lower() not in (".npz", ".csv"):
        raise BadInputError("inputs", "names an array of an .npz file or columns of a CSV file")
    table = read_data(Path(data), inputs=inputs, target=targets)
    return table.x, table.y


def _arrays(data: Any, model: nn.Module) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any] | None]:
    """Inputs and labels; arrays as they are, so that bytes stay bytes, everything else by way of batches."""
    if isinstance(data, str | os.PathLike):
        data = read_path(Path(data), model)
    if isinstance(data, Mapping) and set(data) in ({"x"}, {"x", "y"}):
        data = (data["x"], data.get("y"))
    if _is_array(data):
        return as_array(data), None
    if isinstance(data, tuple) and len(data) == 2 and _is_array(data[0]) and _is_labels(data[1]):
        return as_array(data[0]), None if data[1] is None else as_array(data[1])
    batch = as_batches(data, model, context=2**31).whole("a study")
    labels = None if batch.y is None else as_array(batch.y)
    if not isinstance(batch.x, Mapping):
        return as_array(batch.x), labels
    if "input_ids" not in batch.x and len(batch.x) != 1:
        raise BadInputError("data", f"has the inputs {', '.join(batch.x)}; a study takes one tensor")
    if "input_ids" not in batch.x:
        return as_array(next(iter(batch.x.values()))), labels
    ids = as_array(batch.x["input_ids"])
    mask = batch.x.get("attention_mask")
    return (ids if mask is None else np.where(as_array(mask) == 0, IGNORED, ids)), labels


def _is_array(value: Any) -> bool:
    return isinstance(value, Tensor | np.ndarray) and value.ndim > 0


def _is_labels(value: Any) -> bool:
    return value is None or _is_array(value) or isinstance(value, list)
