"""Data as a study uses them, and performance: accuracy, loss, perplexity.

Reads the data a spec names, once, into one canonical form that travels to wherever units run. A task is that data
cut into batches of a fixed size, with a score that adds up over batches.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn

from strati.core.errors import BadInputError
from strati.core.rng import stream
from strati.evaluate.batches import NO_LABEL, as_batches
from strati.evaluate.models import output_tensor
from strati.io.data_files import read_data, read_path
from strati.io.in_memory import as_array
from strati.io.network import Network
from strati.io.to_module import as_module

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

    from strati.core.results import FloatArray
    from strati.interventions.metrics import Disagreement


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
        length = self.x.shape[-1] if self.kind == "tokens" else _ROWS_AS_TOKENS
        size = max(_CALIBRATION_TOKENS // max(length, 1), 1)
        return tuple(self.inputs(self.x[i : i + size]) for i in range(0, len(self.x), size))

    def with_calibration(self, rows: StudyData | None, seed: int) -> StudyData:
        """The same data with calibration rows as ``x`` and ``y``; by default a random quarter of the test data.

        Raises:
            BadInputError: There are fewer than four rows to take a quarter of.
        """
        if rows is not None:
            return replace(self, x=rows.x, y=rows.y)
        count = len(self.x_test) // 4
        if count == 0:
            why = f"has {len(self.x_test)} rows, too few to take a quarter for calibration; give calibration data"
            raise BadInputError("data", why)
        picked = np.zeros(len(self.x_test), dtype=bool)
        picked[stream(seed, "calibration").permutation(len(picked))[:count]] = True
        y, y_test = (None, None) if self.y_test is None else (self.y_test[picked], self.y_test[~picked])
        return replace(self, x=self.x_test[picked], y=y, x_test=self.x_test[~picked], y_test=y_test)

    def take(self, rows: int | None) -> StudyData:
        """The same data with only the first test rows."""
        return replace(
            self, x_test=self.x_test[:rows], y_test=None if self.y_test is None else self.y_test[:rows]
        )

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


def check_fits(model: nn.Module, task: Task) -> None:
    """Run one input through the network before any work is planned.

    Raises:
        BadInputError: The data do not fit the network.
    """
    import torch

    inputs, targets = task.batches[0]
    try:
        with torch.inference_mode():
            logits = task.output(model, inputs[:1])
    except Exception as error:  # whatever the module raises on these inputs, the data do not fit it
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise BadInputError(
            "data", f"do not fit the network: inputs {tuple(inputs.shape[1:])}: {text}"
        ) from None
    if not isinstance(logits, torch.Tensor) or logits.ndim != targets.ndim + 1:
        raise BadInputError("data", "do not fit the network: its output is not one row of scores per target")
    if int(targets.max()) >= logits.shape[-1]:
        why = f"do not fit the network: label {int(targets.max())}, but only {logits.shape[-1]} outputs"
        raise BadInputError("data", why)


def calibration_task(data: StudyData, batch: int) -> Task | None:
    """The loss on the calibration rows, for scores; ``None`` where there are none, or none with labels."""
    if (
        not len(data.x)
        or (data.y is None and not data.language)
        or (data.y is None and data.y_test is not None)
    ):
        return None
    return make_task(replace(data, x_test=data.x, y_test=data.y), "loss", batch)


def digest_of(raw: bytes) -> str:
    """A short hash of bytes."""
    return hashlib.sha256(raw).hexdigest()[:32]


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


MOST_GROUPS = 64
"""Neighbouring examples are put together until so many groups are left; rows keep one number for each."""


@dataclass(frozen=True)
class Scores:
    """The mean score, and the same by groups of examples.

    Attributes:
        performance: As the task reports it.
        mean: The mean score per target: a share of right answers, or a loss in nats (for perplexity too).
        groups: One pseudo-value per group: their mean is ``mean``, their scatter gives its error.
        stderr: Standard error of ``mean`` over all examples; not defined for fewer than two.
        examples: How many examples were scored.
    """

    performance: float
    mean: float
    groups: FloatArray
    stderr: float | None
    examples: int


def standard_error(groups: Any) -> float | None:
    """Standard error of the mean of independent values; not defined for fewer than two.

    Examples:
        >>> standard_error([1.0, 3.0]), standard_error([1.0])
        (1.0, None)
    """
    values = np.asarray(groups, dtype=float)
    if values.size < 2 or not np.isfinite(values).all():
        return None
    return float(values.std(ddof=1) / math.sqrt(values.size))


class ScoreAccumulator:
    """Adds up the scores of one network on the batches of a task."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self._sums: list[FloatArray] = []
        self._counts: list[FloatArray] = []

    def add(self, logits: Tensor, targets: Tensor) -> None:
        """A batch."""
        self._sums.append(self.task.each(logits, targets).cpu().numpy())
        scored = (targets != IGNORED).reshape(len(targets), -1).sum(1)
        self._counts.append(scored.cpu().numpy().astype(float))

    def result(self) -> Scores:
        """The scores of all batches so far."""
        sums = np.concatenate(self._sums) if self._sums else np.zeros(0)
        counts = np.concatenate(self._counts) if self._counts else np.zeros(0)
        total = sum(float(batch.sum()) for batch in self._sums)
        count = int(counts.sum())
        mean = total / max(count, 1)
        return _scores(self.task.finish(total, count), mean, sums, counts)


@dataclass(frozen=True)
class Measurement:
    """A changed network's performance, how its layer's outputs differ from the intact one's, scores by example."""

    performance: float
    activations: dict[str, float | None]
    scores: Scores | None = None

    @property
    def groups(self) -> FloatArray | None:
        """Scores by groups of examples, where there are data."""
        return None if self.scores is None else self.scores.groups

    @property
    def stderr(self) -> float | None:
        """Standard error of the mean score."""
        return None if self.scores is None else self.scores.stderr

    @property
    def examples(self) -> int | None:
        """How many examples were scored."""
        return None if self.scores is None else self.scores.examples


def measured(tallies: Sequence[ScoreAccumulator], both: Disagreement | None) -> list[Measurement]:
    """What was added up of each change."""
    measurements = []
    for i, tally in enumerate(tallies):
        scores = tally.result()
        measurements.append(Measurement(scores.performance, both.result(i) if both else {}, scores))
    return measurements


def scores_of(values: FloatArray) -> Scores:
    """Scores that come one per example, as a user's function may give them.

    Examples:
        >>> scores_of(np.array([1.0, 3.0])).stderr
        1.0
    """
    mean = float(values.mean())
    return _scores(mean, mean, values, np.ones(len(values)))


def _scores(performance: float, mean: float, sums: FloatArray, counts: FloatArray) -> Scores:
    """Groups for comparisons that rows can hold; the error over single examples, with nothing put together."""
    error = standard_error(_groups(sums, counts, mean, max(len(sums), 1)))
    return Scores(performance, mean, _groups(sums, counts, mean, MOST_GROUPS), error, len(sums))


def _groups(sums: FloatArray, counts: FloatArray, mean: float, most: int) -> FloatArray:
    """Pseudo-values of the ratio ``sum / count``: ``R + (s_g - R n_g) G / n``, exact in the mean."""
    if not len(sums) or not counts.sum():
        return np.zeros(0)
    size = -(-len(sums) // most)
    starts = np.arange(0, len(sums), size)
    s, n = np.add.reduceat(sums, starts), np.add.reduceat(counts, starts)
    pseudo_values: FloatArray = mean + (s - mean * n) * (len(starts) / n.sum())
    return pseudo_values


def as_modules(source: Any, activation: str = "relu") -> dict[str, nn.Module]:
    """Networks by name as modules, a single one under the name ``model``; ``activation`` is that of a bare MLP.

    Raises:
        BadInputError: They are none.
    """
    kinds = (nn.Module, Network, str, os.PathLike)
    if isinstance(source, Mapping) and source and all(isinstance(v, kinds) for v in source.values()):
        return {str(name): _module(network, activation) for name, network in source.items()}
    return {"model": _module(source, activation)}


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
    data: Any,
    model: nn.Module | None,
    context: int,
    *,
    inputs: str | None = None,
    targets: str | None = None,
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
        vocabulary = int(getattr(getattr(model, "config", None), "vocab_size", 0) or 0)
        return StudyData("tokens", max(int(ids.max()) + 1, vocabulary), ids[:0], None, ids, labels)
    if y is None:
        raise BadInputError(
            "data", "has no labels y, by which a network is scored; give (x, y), or token ids"
        )
    y = _labels(y)
    if y is None or len(x) != len(y):
        raise BadInputError(
            "data", "x and y need as many rows as each other, y one label (a whole number from 0) a row"
        )
    if tokens and x.ndim == 1:
        why = "token ids in one dimension have no labels of their own; give x as rows of tokens, or the tokens alone"
        raise BadInputError("data", why)
    if x.dtype == np.uint8 and x.ndim == 4 and x.shape[-1] in (1, 3, 4) and x.shape[1] not in (1, 3, 4):
        x = np.ascontiguousarray(np.moveaxis(x, -1, 1))  # channels first, as convolutions read images
    kind = "tokens" if tokens else "images" if x.ndim == 4 else "rows"
    return StudyData(kind, int(y.max()) + 1, x[:0], None, x, y)


def calibration_data(
    data: Any, model: nn.Module, context: int, *, inputs: str | None = None, targets: str | None = None
) -> StudyData:
    """Calibration data, whatever names them, as the rows ``x``; labels ``y`` where there are any.

    Raises:
        BadInputError: They are no data.
    """
    x, y = _arrays(data if inputs is None else _named_arrays(data, inputs, targets), model)
    _check_inputs("calibration", x)
    if np.issubdtype(x.dtype, np.integer) and x.dtype != np.uint8:
        ids = windows(x, context, "calibration") if x.ndim == 1 else x
        return StudyData("tokens", 0, ids, None, ids[:0], None)
    y = None if y is None else _labels(y)
    return StudyData("rows", 0, x, y if y is not None and len(y) == len(x) else None, x[:0], None)


def _labels(y: np.ndarray[Any, Any]) -> np.ndarray[Any, Any] | None:
    """One class a row, as whole numbers from 0; ``None`` where they are something else."""
    whole = y.dtype.kind in "iub" or (y.dtype.kind == "f" and bool((y == np.round(y)).all()))
    if y.ndim != 1 or not whole or y.min(initial=0) < 0:
        return None
    return y if y.dtype.kind in "iub" else y.astype(np.int64)


def _check_inputs(what: str, x: np.ndarray[Any, Any]) -> None:
    if len(x) == 0:
        raise BadInputError(what, "is empty; give at least one row")
    if x.dtype.kind == "f" and not np.isfinite(x).all():
        raise BadInputError(what, "holds values that are not finite; remove those rows first")
    if x.dtype.kind not in "fiub":
        raise BadInputError(what, f"holds {x.dtype}, not numbers; give arrays of numbers")


def _named_arrays(data: Any, inputs: str | None, targets: str | None) -> Any:

    if not isinstance(data, str | os.PathLike) or Path(data).suffix.lower() not in (".npz", ".csv"):
        raise BadInputError("inputs", "names an array of an .npz file or columns of a CSV file")
    table = read_data(Path(data), inputs=inputs, target=targets)
    return table.x, table.y


def _arrays(data: Any, model: nn.Module | None) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any] | None]:
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
