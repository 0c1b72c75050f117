"""Data as a study uses them, and performance: accuracy, loss, perplexity.

Reads the data a spec names, once, into one canonical form that travels to wherever units run. A task is that data
cut into batches of a fixed size, with a score that adds up over batches.
"""

from __future__ import annotations

import io
import json
import math
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.core import plugins
from strati.core.errors import BadInputError
from strati.core.rng import stream
from strati.evaluate.models import output_tensor
from strati.interventions.study_spec import Spec
from strati.io.data_files import read_data

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

Find = Callable[[str], Path]
"""Gives the local file of a data set known by name."""

_CALIBRATION_TOKENS, _ROWS_AS_TOKENS = 4096, 16

IGNORED = -1
"""A token that is no token: padding after the end of a short text."""


@dataclass(frozen=True)
class StudyData:
    """Training and test data. The target of a token is the next one, unless there are labels ``y``."""

    kind: str  # rows, images, tokens
    outputs: int
    x: NDArray[Any]
    y: NDArray[Any] | None
    x_test: NDArray[Any]
    y_test: NDArray[Any] | None
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one input; ``()`` for text."""
        return () if self.kind == "tokens" else tuple(self.x_test.shape[1:])

    def inputs(self, raw: NDArray[Any]) -> Tensor:
        """What the network is given: pixels and rows scaled, tokens as they are."""
        import torch

        if self.kind == "tokens":
            return torch.from_numpy(raw.astype(np.int64))
        x = torch.from_numpy(raw.astype(np.float32))
        if raw.dtype == np.uint8:
            x /= 255.0
        if self.mean != (0.0,) or self.std != (1.0,):
            shape = (-1, 1, 1) if self.kind == "images" else (-1,)
            x = (x - torch.tensor(self.mean).view(shape)) / torch.tensor(self.std).view(shape)
        if self.kind == "images":  # the order in which convolutions on processors are fastest, by a third
            x = x.contiguous(memory_format=torch.channels_last)
        return x

    @property
    def language(self) -> bool:
        """Whether a token is predicted at every place of a text."""
        return self.kind == "tokens" and (self.y_test is None or self.y_test.ndim == 2)

    @property
    def usual(self) -> str:
        """The measure where none is asked for."""
        return "perplexity" if self.language else "accuracy"

    def calibration_batches(self) -> tuple[Tensor, ...]:
        """The inputs that covariances are computed from (``x``), in batches of a few thousand tokens."""
        size = _CALIBRATION_TOKENS // (self.x.shape[-1] if self.kind == "tokens" else _ROWS_AS_TOKENS)
        size = max(size, 1)
        return tuple(self.inputs(self.x[i : i + size]) for i in range(0, len(self.x), size))

    def with_calibration(self, rows: NDArray[Any] | None, seed: int) -> StudyData:
        """The same data with rows for the input covariances as ``x``; by default a random quarter of the test data.

        Raises:
            BadInputError: There are fewer than four rows to take a quarter of.
        """
        if rows is not None:
            return replace(self, x=rows, y=None)
        count = len(self.x_test) // 4
        if count == 0:
            why = f"has {len(self.x_test)} rows, too few to take a quarter for calibration; give calibration data"
            raise BadInputError("data", why)
        picked = np.zeros(len(self.x_test), dtype=bool)
        picked[stream(seed, "calibration").permutation(len(picked))[:count]] = True
        y_test = None if self.y_test is None else self.y_test[~picked]
        return replace(self, x=self.x_test[picked], y=None, x_test=self.x_test[~picked], y_test=y_test)

    def to_bytes(self) -> bytes:
        """The canonical form, as one ``.npz``."""
        about = {"kind": self.kind, "outputs": self.outputs, "mean": self.mean, "std": self.std}
        arrays = {"x": self.x, "y": self.y, "x_test": self.x_test, "y_test": self.y_test}
        buffer = io.BytesIO()
        text = np.frombuffer(json.dumps(about).encode(), np.uint8)
        np.savez(buffer, about=text, **{k: v for k, v in arrays.items() if v is not None})  # type: ignore[arg-type]
        return buffer.getvalue()

    @classmethod
    def from_bytes(cls, raw: bytes) -> StudyData:
        """Read :meth:`to_bytes` again."""
        with np.load(io.BytesIO(raw), allow_pickle=False) as file:
            arrays = {k: file[k] for k in file.files}
        about = json.loads(arrays.pop("about").tobytes())
        pairs: dict[str, Any] = {k: arrays.get(k) for k in ("x", "y", "x_test", "y_test")}
        return cls(
            about["kind"], about["outputs"], **pairs, mean=tuple(about["mean"]), std=tuple(about["std"])
        )


@dataclass(frozen=True)
class Task:
    """Test batches and how outputs on them are scored."""

    performance: str
    higher_is_better: bool
    chance: float | None
    batches: tuple[tuple[Tensor, Tensor], ...]

    def output(self, model: torch.nn.Module, inputs: Tensor) -> Tensor:
        """The network's logits on a batch."""
        return forward(model, inputs)

    def each(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The score summed over the targets of each example (a row, an image, a sequence), in double precision."""
        import torch
        from torch.nn import functional

        if self.performance == "accuracy":
            scores = logits.argmax(-1) == targets
        else:
            flat = logits.reshape(-1, logits.shape[-1]).float()
            scores = functional.cross_entropy(
                flat, targets.reshape(-1), ignore_index=IGNORED, reduction="none"
            )
        summed: Tensor = scores.reshape(len(targets), -1).sum(1, dtype=torch.float64)
        return summed

    def add_up(self, logits: Tensor, targets: Tensor) -> float:
        """Sum of the score over a batch."""
        return float(self.each(logits, targets).sum())

    def count(self, targets: Tensor) -> int:
        """How many targets of a batch are scored."""
        return int((targets != IGNORED).sum())

    def finish(self, total: float, count: int) -> float:
        """The performance out of the summed score."""
        mean = total / max(count, 1)
        if self.performance == "perplexity":
            return math.exp(min(mean, 700.0))  # beyond, a float ends
        return mean


def forward(model: torch.nn.Module, inputs: Tensor) -> Tensor:
    """The network's logits on a batch; of token ids, :data:`IGNORED` ones are masked as padding."""
    if hasattr(model, "config") and not inputs.is_floating_point():
        options: dict[str, Any] = {"use_cache": False} if hasattr(model.config, "use_cache") else {}
        if bool((inputs == IGNORED).any()):
            options["attention_mask"] = (inputs != IGNORED).long()
        return output_tensor(model(inputs.clamp(min=0), **options))
    return output_tensor(model(inputs if inputs.is_floating_point() else inputs.clamp(min=0)))


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


def check_measure(data: StudyData, performance: str) -> None:
    """Refuse a measure that the data cannot be scored by.

    Raises:
        BadInputError: There is no such measure, or it needs labels or text that the data do not have.
    """
    if performance not in ("accuracy", "loss", "perplexity"):
        raise BadInputError(
            "performance", f"no measure {performance!r} of data; there are accuracy, loss and perplexity"
        )
    if data.language and performance == "accuracy":
        raise BadInputError("data", "are text without labels, which loss or perplexity measure, not accuracy")
    if not data.language and performance == "perplexity":
        raise BadInputError("data", "have labels of their own; perplexity needs text (token ids alone)")


def make_task(data: StudyData, performance: str, batch: int, chance: float | None = None) -> Task:
    """Cut the test data into batches of a fixed size: the numbers must not depend on anything else."""
    import torch

    check_measure(data, performance)
    if chance is None:
        uniform = {
            "accuracy": 1.0 / data.outputs,
            "loss": math.log(data.outputs),
            "perplexity": float(data.outputs),
        }
        chance = uniform[performance]
    if data.y_test is None and data.x_test.shape[-1] < 2:
        raise BadInputError("data", "rows of one token have no next token to predict; give longer rows")
    batches = []
    for start in range(0, len(data.x_test), batch):
        inputs = data.inputs(data.x_test[start : start + batch])
        if data.y_test is None:
            targets = torch.full_like(inputs, IGNORED)
            targets[:, :-1] = inputs[:, 1:]
        else:
            targets = torch.from_numpy(data.y_test[start : start + batch].astype(np.int64))
        batches.append((inputs, targets))
    return Task(performance, performance == "accuracy", chance, tuple(batches))


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
        _text(path, spec, tokenise, vocabulary) if path.suffix == ".txt" else _arrays(path, spec, vocabulary)
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


def _arrays(path: Path, spec: Spec, vocabulary: int) -> StudyData:
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


def windows(tokens: NDArray[Any], length: int, what: str | Path) -> NDArray[Any]:
    """Token ids in one dimension as windows of one length, what is left over dropped; rows of them as they are.

    Raises:
        BadInputError: There is not one whole window, or an id is negative.

    Examples:
        >>> windows(np.arange(7), 3, "tokens").tolist()
        [[0, 1, 2], [3, 4, 5]]
    """
    if tokens.min(initial=0) < 0:
        raise BadInputError(what, "holds negative token ids")
    if tokens.ndim != 1:
        return tokens
    if len(tokens) < length:
        raise BadInputError(
            what, f"too short: {len(tokens)} tokens are less than one window of {length}; lower context"
        )
    return tokens[: len(tokens) // length * length].reshape(-1, length)


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
