"""The networks that a study trains itself, as a TOML spec describes them: architecture, data and training.

Trainings are units of work of their own: they run where the study runs, are stored below ``networks`` in its folder,
and are not repeated when the study is resumed.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from strati.core.errors import BadInputError
from strati.core.files import write_atomic
from strati.core.options import Rule
from strati.interventions.study_spec import array_names, data_file, section
from strati.interventions.tasks import StudyData, windows
from strati.io.data_files import read_data
from strati.io.in_memory import load_arrays
from strati.jobs.engine import Load, Outcome, Unit
from strati.jobs.store import Finished, Run, Store, drive, open_store, shared_folder, unit_key
from strati_reproductions.trained.networks import build, initialise
from strati_reproductions.trained.training import train

STORE = "training.sqlite"
_FORMAT = 1
_MOST_WEIGHTS = 500_000_000
_STEPS = 4  # training steps that an estimate measures


def _key(default: Any, kind: type, **rule: Any) -> Any:
    return field(default=default, metadata={"rule": Rule(kind, **rule)})


@dataclass(frozen=True)
class NetworkSpec:
    """Which networks to train."""

    source: str = _key("mlp", str)
    count: int = _key(1, int, low=1, high=100_000)
    together: int | None = _key(None, int, low=1, high=1000)
    hidden: tuple[int, ...] = _key((64, 64), int, each=True, low=1, high=65_536)
    activation: str = _key("relu", str, choices=("relu", "gelu", "tanh", "sigmoid"))
    depth: int = _key(2, int, low=1, high=1000)
    width: int = _key(32, int, low=1, high=65_536)
    heads: int = _key(4, int, low=1, high=1024)


@dataclass(frozen=True)
class DataSpec:
    """Which data: a data set by name, or a file."""

    name: str | None = _key(None, str)
    path: str | None = _key(None, str)
    train: int | None = _key(None, int, low=1)
    test: int | None = _key(None, int, low=1)
    context: int = _key(128, int, low=2, high=1_000_000)
    mean: tuple[float, ...] | None = _key(None, float, each=True)
    std: tuple[float, ...] | None = _key(None, float, each=True, low=1e-12)


@dataclass(frozen=True)
class TrainSpec:
    """How the networks are trained."""

    epochs: int = _key(10, int, low=0, high=100_000)
    batch: int = _key(64, int, low=1, high=1_000_000)
    optimiser: str = _key("adam", str, choices=("adam", "sgd"))
    rate: float = _key(1e-3, float, low=0.0, high=1e6)
    momentum: float = _key(0.9, float, low=0.0, high=1.0)
    weight_decay: float = _key(0.0, float, low=0.0, high=1e6)


@dataclass(frozen=True)
class TrainingSpec:
    """Networks to train for a study: the ``model`` of the call that a spec stands for."""

    network: NetworkSpec = field(default_factory=NetworkSpec)
    source: DataSpec = field(default_factory=DataSpec)
    training: TrainSpec = field(default_factory=TrainSpec)
    seed: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the networks."""
        return tuple(map(network_name, range(self.network.count)))

    @property
    def document(self) -> dict[str, Any]:
        """The sections that describe the networks, as :func:`read_training` reads them."""
        tables = {
            "network": asdict(self.network),
            "data": asdict(self.source),
            "train": asdict(self.training),
        }
        defined = {name: {k: v for k, v in table.items() if v is not None} for name, table in tables.items()}
        return {**defined, "seed": self.seed}

    @cached_property
    def data(self) -> StudyData:
        """Training and test data.

        Raises:
            BadInputError: They are not there, broken, or lack what training needs.
        """
        return prepare(self)

    def untrained(self) -> nn.Module:
        """A network without training."""
        return build(self.network, self.data.shape, self.data.outputs, self.source.context)

    def initial(self, number: int) -> nn.Module:
        """The n-th network with its initial values."""
        model = self.untrained()
        initialise(model, self.seed, number)
        return model

    def seconds(self) -> float:
        """Seconds of all trainings in one process, from a few steps of one network."""
        data, training = self.data, self.training
        rows = min(len(data.x), _STEPS * training.batch)
        part = replace(data, x=data.x[:rows], y=None if data.y is None else data.y[:rows])
        short = replace(self, training=replace(training, epochs=1))
        train(short, part, [0])
        start = time.perf_counter()
        train(short, part, [0])
        each = (time.perf_counter() - start) / max(1, -(-rows // training.batch))
        return self.network.count * training.epochs * -(-len(data.x) // training.batch) * each

    def train(
        self, folder: Path, run: Run
    ) -> tuple[dict[str, nn.Module], dict[str, dict[str, NDArray[Any]]]]:
        """The trained networks and their initial tensors by name.

        Raises:
            BadInputError: A training failed, or the folder holds other networks.
        """
        self.untrained()  # data that do not suit the network are refused before anything is written
        place = folder / "networks"
        identity = unit_key(self._identity())
        with ExitStack() as stack:
            stack.enter_context(shared_folder(place))
            store = stack.enter_context(
                open_store(place / STORE, identity=identity, layout=_FORMAT, about={"name": "networks"})
            )
            units = _missing(place, store, self._units())
            run.expect(len(units))
            drive(store, TrainingBody(self), units, lambda outcome: _keep(place, outcome), run)
            reasons = [record.reason for record in store.units() if record.reason is not None]
            if reasons:
                raise BadInputError("training", reasons[0])
        networks, initial = {}, {}
        for number, name in enumerate(self.names):
            model = self.initial(number)
            initial[name] = {key: value.numpy().copy() for key, value in model.state_dict().items()}
            path = place / f"{name}.npz"
            load_arrays(model, unpack(path.read_bytes()), path)
            networks[name] = model.eval()
        return networks, initial

    def _identity(self) -> dict[str, Any]:
        data = hashlib.sha256(self.data.to_bytes()).hexdigest()[:32]
        about = {"format": _FORMAT, "data": data, "seed": self.seed, "train": asdict(self.training)}
        return about | {"network": asdict(self.network) | {"count": 0}}

    def _units(self) -> list[Unit]:
        """One unit per batch of networks trained together."""
        size = self.network.together or (10 if self.network.source in ("mlp", "fcn") else 1)
        identity, units = self._identity(), []
        for start in range(0, self.network.count, size):
            numbers = list(range(start, min(start + size, self.network.count)))
            config = identity | {"networks": numbers}
            name = f"train {network_name(numbers[0])}" + (f"..{numbers[-1]:03d}" if len(numbers) > 1 else "")
            units.append(Unit(unit_key(config), name, name, config, {}))
        return units


@dataclass(frozen=True)
class TrainingBody:
    """Trains the networks of a unit."""

    spec: TrainingSpec

    def __call__(self, unit: Unit, load: Load) -> dict[str, bytes]:
        """The trained networks as ``.npz`` bytes by name."""
        numbers = unit.config["networks"]
        trained = train(self.spec, self.spec.data, numbers)
        return {network_name(n): pack(arrays) for n, arrays in zip(numbers, trained, strict=True)}


def read_training(document: Mapping[str, Any], what: str) -> TrainingSpec:
    """The networks that the sections ``network``, ``data`` and ``train`` of a spec describe.

    Raises:
        BadInputError: An unknown key or a value out of place.
    """
    parts: dict[str, Any] = {}
    for name, key, kind in (
        ("network", "network", NetworkSpec),
        ("data", "source", DataSpec),
        ("train", "training", TrainSpec),
    ):
        rules = {f.name: f.metadata["rule"] for f in fields(kind)}
        parts[key] = kind(**section(rules, document[name], what, name))
    spec = TrainingSpec(**parts, seed=document["seed"])
    network = spec.network
    if network.source == "transformer" and network.width % network.heads:
        raise BadInputError(what, "network.width has to be a multiple of network.heads")
    if _weights(network, spec.source.context) > _MOST_WEIGHTS:
        raise BadInputError(
            what,
            f"the network would have over {_MOST_WEIGHTS:,} weights, too many to train here; make it smaller",
        )
    return spec


def network_name(number: int) -> str:
    """The name of the n-th network of a study."""
    return f"network-{number:03d}"


def pack(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """Arrays by name as the bytes of an ``.npz``."""
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()


def unpack(raw: bytes) -> dict[str, NDArray[Any]]:
    """Read :func:`pack` again."""
    with np.load(io.BytesIO(raw), allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def prepare(spec: TrainingSpec) -> StudyData:
    """Read the data of a spec, with a training and a test part.

    Raises:
        BadInputError: The data are not there, broken, or lack what training needs.
    """
    about = spec.source
    path = data_file({key: value for key, value in asdict(about).items() if value is not None})
    data = _text(path, about.context) if path.suffix == ".txt" else _arrays(path, spec)
    data = replace(
        data,
        x=data.x[: about.train],
        y=None if data.y is None else data.y[: about.train],
        x_test=data.x_test[: about.test],
        y_test=None if data.y_test is None else data.y_test[: about.test],
    )
    if about.mean is not None:
        data = replace(data, mean=tuple(map(float, about.mean)))
    if about.std is not None:
        data = replace(data, std=tuple(map(float, about.std)))
    channels = data.shape[0] if data.shape else 1
    for name, values in (("mean", data.mean), ("std", data.std)):
        if len(values) not in (1, channels):
            raise BadInputError(
                f"data.{name}", f"has {len(values)} numbers for {channels} channels or columns"
            )
    if len(data.x_test) == 0 or len(data.x) == 0:
        raise BadInputError(path, "too few rows for a training and a test set")
    return data


def _arrays(path: Path, spec: TrainingSpec) -> StudyData:
    names = array_names(path)
    train_part = read_data(
        path,
        inputs="x_train" if "x_train" in names else None,
        target="y_train" if "y_train" in names else None,
    )
    x, y = _layout(train_part.x), train_part.y
    if "x_test" in names:
        test_part = read_data(path, inputs="x_test", target="y_test" if "y_test" in names else None)
        x_test, y_test = _layout(test_part.x), test_part.y if "y_test" in names else None
    else:
        held = max(1, len(x) // 5)  # no test set: the last fifth is held out
        x, x_test = x[:-held], x[-held:]
        y, y_test = (None, None) if y is None else (y[:-held], y[-held:])
    language = spec.network.source == "transformer" and np.issubdtype(x_test.dtype, np.integer)
    if language and x_test.ndim == 1:
        if y_test is not None:
            why = "x holds token ids in one dimension, which have no labels of their own; give rows of tokens"
            raise BadInputError(path, why)
        x, x_test = (windows(a, spec.source.context, path) if len(a) else a for a in (x, x_test))
    if language and x_test.ndim == 2:
        largest = int(max(x.max(initial=0), x_test.max(initial=0))) + 1
        classes = 0 if y_test is None else _classes(path, y_test, y)
        return StudyData("tokens", classes or largest, x, y, x_test, y_test)
    if y_test is None:
        raise BadInputError(path, "has no labels: an array y (or y_test) is needed to measure performance")
    if len(y_test) != len(x_test) or (y is not None and len(y) != len(x)):
        raise BadInputError(path, "x and y have different numbers of rows")
    kind = "images" if x_test.ndim == 4 else "rows"
    return StudyData(kind, _classes(path, y_test, y), x, y, x_test, y_test)


def _layout(x: NDArray[Any]) -> NDArray[Any]:
    """Images with channels first; rows and tokens as they are."""
    if x.ndim == 3:
        return x[:, None]
    if x.ndim == 4 and x.shape[-1] in (1, 3, 4) and x.shape[1] not in (1, 3, 4):
        return np.ascontiguousarray(np.moveaxis(x, -1, 1))
    return x


def _classes(path: Path, *labels: NDArray[Any] | None) -> int:
    count = 0
    for y in labels:
        if y is None:
            continue
        if y.ndim != 1 or not np.all(np.equal(np.mod(y, 1), 0)) or y.min(initial=0) < 0:
            raise BadInputError(path, "the labels y have to be whole numbers from 0, one per row")
        count = max(count, int(y.max(initial=0)) + 1)
    return count


def _text(path: Path, length: int) -> StudyData:
    """A text as windows of its bytes, the last tenth held out."""
    try:
        text = path.read_text("utf-8")
    except (UnicodeDecodeError, OSError) as error:
        raise BadInputError(path, f"not a text in UTF-8 ({error})") from None
    alphabet, places = np.unique(np.frombuffer(text.encode(), np.uint8), return_inverse=True)
    rows = places.astype(np.int32)[: len(places) // length * length].reshape(-1, length)
    if len(rows) < 2:
        raise BadInputError(path, f"too short: fewer than two windows of {length} tokens")
    held = max(1, len(rows) // 10)
    return StudyData("tokens", len(alphabet), rows[:-held], None, rows[-held:], None)


def _keep(place: Path, outcome: Outcome) -> Finished:
    """Write the networks of a training beside its store, which keeps their hashes."""
    unit = outcome.unit
    if outcome.reason is not None:
        return Finished(unit.key, unit.name, {"networks": {}}, outcome.reason)
    for name, raw in outcome.value.items():
        write_atomic(place / f"{name}.npz", raw)
    return Finished(unit.key, unit.name, {"networks": {n: _digest(raw) for n, raw in outcome.value.items()}})


def _missing(place: Path, store: Store, units: list[Unit]) -> list[Unit]:
    """The trainings that are not done, or whose networks are no longer on disk as they were written."""
    hashes = {record.key: record.value["networks"] for record in store.units() if record.reason is None}

    def on_disk(name: str, digest: str) -> bool:
        path = place / f"{name}.npz"
        return path.is_file() and _digest(path.read_bytes()) == digest

    return [
        unit
        for unit in units
        if unit.key not in hashes or not all(itertools.starmap(on_disk, hashes[unit.key].items()))
    ]


def _digest(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()[:32]


def _weights(network: NetworkSpec, context: int) -> int:
    """About how many weights a network would have, before any of them is made."""
    if network.source in ("mlp", "fcn"):
        return sum(a * b for a, b in itertools.pairwise(network.hidden))
    if network.source == "transformer":
        return 12 * network.depth * network.width**2 + context * network.width
    return 63 * network.depth * network.width**2
