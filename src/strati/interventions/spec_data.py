"""The data that the spec of a study names."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn

from strati.core import plugins
from strati.core.errors import BadInputError
from strati.interventions.study_spec import Spec, builtin_names, spec_keys
from strati.interventions.tasks import StudyData, Task, make_task, windows
from strati.io.data_files import read_data
from strati.io.network import Network

if TYPE_CHECKING:
    from numpy.typing import NDArray

Find = Callable[[str], Path]
"""Gives the local file of a data set known by name."""


def prepare(
    spec: Spec, find: Find, tokenise: Callable[[str], list[int]] | None = None, vocabulary: int = 0
) -> StudyData:
    """Read the data a spec names and bring them into canonical form.

    Args:
        spec: The study.
        find: Gives the file of a data set known by name.
        tokenise: A checkpoint's own tokeniser, for text; without it the text's bytes are the tokens.
        vocabulary: The size of that tokeniser's vocabulary.

    Raises:
        BadInputError: The data are not there, broken, or lack what the study needs.
    """
    from strati import embedded

    data_spec = spec.data
    if data_spec.path is not None:
        path = Path(data_spec.path)
    else:
        path = embedded.path("digits.npz") if data_spec.name == "digits" else Path(find(str(data_spec.name)))
    if not path.is_file():
        raise BadInputError(path, "no such data file")
    data = (
        _text(path, spec, tokenise, vocabulary)
        if path.suffix == ".txt"
        else _spec_arrays(path, spec, vocabulary)
    )
    data = replace(
        data,
        x=data.x[: data_spec.train],
        y=None if data.y is None else data.y[: data_spec.train],
        x_test=data.x_test[: data_spec.test],
        y_test=None if data.y_test is None else data.y_test[: data_spec.test],
    )
    if data_spec.mean is not None:
        data = replace(data, mean=tuple(map(float, data_spec.mean)))
    if data_spec.std is not None:
        data = replace(data, std=tuple(map(float, data_spec.std)))
    channels = data.shape[0] if data.shape else 1
    for name, values in (("mean", data.mean), ("std", data.std)):
        if len(values) not in (1, channels):
            raise BadInputError(
                f"data.{name}", f"has {len(values)} numbers for {channels} channels or columns"
            )
    if len(data.x_test) == 0 or (spec.trained_here and len(data.x) == 0):
        raise BadInputError(path, "too few rows for a training and a test set")
    return data


def _spec_arrays(path: Path, spec: Spec, vocabulary: int) -> StudyData:
    names: set[str] = set()
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as file:
            names = {n.removesuffix(".npy") for n in file.namelist()}
    first = "x_train" if "x_train" in names else None
    labels = "y_train" if "y_train" in names else None
    train = read_data(path, inputs=first, target=labels)
    x, y = _layout(train.x), train.y
    if "x_test" in names:
        test = read_data(path, inputs="x_test", target="y_test" if "y_test" in names else None)
        x_test, y_test = _layout(test.x), test.y if "y_test" in names else None
    elif spec.trained_here:
        held = max(1, len(x) // 5)  # no test set: the last fifth is held out
        x, x_test = x[:-held], x[-held:]
        y, y_test = (None, None) if y is None else (y[:-held], y[-held:])
    else:
        x_test, y_test = x, y
    if spec.network.source in ("transformer", "transformers") and np.issubdtype(x_test.dtype, np.integer):
        if x_test.ndim == 1 and y_test is not None:
            why = "x holds token ids in one dimension, which have no labels of their own; give rows of tokens"
            raise BadInputError(path, why)
        x, x_test = (
            windows(a, spec.data.context, path) if a.ndim == 1 and len(a) else a for a in (x, x_test)
        )
    if _rows_of_tokens(spec, x_test):
        largest = int(max(x.max(initial=0), x_test.max(initial=0))) + 1
        classes = 0 if y_test is None else _classes(path, y_test, y)
        return StudyData("tokens", classes or vocabulary or largest, x, y, x_test, y_test)
    if y_test is None:
        raise BadInputError(path, "has no labels: an array y (or y_test) is needed to measure performance")
    outputs = max(_classes(path, y_test, y), vocabulary)
    if len(y_test) != len(x_test) or (y is not None and len(y) != len(x)):
        raise BadInputError(path, "x and y have different numbers of rows")
    return StudyData("images" if x_test.ndim == 4 else "rows", outputs, x, y, x_test, y_test)


def _layout(x: NDArray[Any]) -> NDArray[Any]:
    """Images with channels first; rows and tokens as they are."""
    if x.ndim == 3:
        return x[:, None]
    if x.ndim == 4 and x.shape[-1] in (1, 3, 4) and x.shape[1] not in (1, 3, 4):
        return np.ascontiguousarray(np.moveaxis(x, -1, 1))
    return x


def _rows_of_tokens(spec: Spec, x: NDArray[Any]) -> bool:
    language = spec.network.source in ("transformer", "transformers")
    return language and np.issubdtype(x.dtype, np.integer) and x.ndim == 2


def _classes(path: Path, *labels: NDArray[Any] | None) -> int:
    count = 0
    for y in labels:
        if y is None:
            continue
        if y.ndim != 1 or not np.all(np.equal(np.mod(y, 1), 0)) or y.min(initial=0) < 0:
            raise BadInputError(path, "the labels y have to be whole numbers from 0, one per row")
        count = max(count, int(y.max(initial=0)) + 1)
    return count


def _text(path: Path, spec: Spec, tokenise: Callable[[str], list[int]] | None, vocabulary: int) -> StudyData:
    try:
        text = path.read_text("utf-8")
    except (UnicodeDecodeError, OSError) as error:
        raise BadInputError(path, f"not a text in UTF-8 ({error})") from None
    length = spec.data.context
    if tokenise is not None:
        tokens = np.asarray(tokenise(text), np.int32)
    else:
        alphabet, places = np.unique(np.frombuffer(text.encode(), np.uint8), return_inverse=True)
        tokens, vocabulary = places.astype(np.int32), len(alphabet)
    windows = tokens[: len(tokens) // length * length].reshape(-1, length)
    if len(windows) < 2:
        raise BadInputError(path, f"too short: fewer than two windows of {length} tokens")
    if not spec.trained_here:
        return StudyData("tokens", vocabulary, windows[:0], None, windows, None)
    held = max(1, len(windows) // 10)
    return StudyData("tokens", vocabulary, windows[:-held], None, windows[-held:], None)


def find_data(name: str) -> Path:
    """The file of a data set that an installed package knows by name.

    Raises:
        BadInputError: There is no data set of that name, or it cannot be had.
    """
    find = plugins.load(plugins.DATASETS, name)
    if find is None:
        names = plugins.names(plugins.DATASETS)
        others = ", ".join(("digits", *names)) if names else f"digits; any other {plugins.REPRODUCTIONS}"
        raise BadInputError(name, f"no such data set; there are {others}; or give data.path")
    return Path(find())


def task_of(data: StudyData, spec: Spec) -> Task:
    """The test data in batches, scored as the spec asks.

    Raises:
        BadInputError: The measure needs labels or text that the data do not have.
    """
    name, size = spec.measure.performance, spec.measure.batch
    language = data.language
    if not language and data.y_test is None:
        raise BadInputError("data", f"have no labels y, but measure.performance {name!r} needs them")
    if language and name == "accuracy":
        raise BadInputError("data", "are text without labels: measure.performance is 'loss' or 'perplexity'")
    if not language and name == "perplexity":
        raise BadInputError("data", "measure.performance 'perplexity' needs text")
    return make_task(data, name, size, spec.measure.chance)


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
