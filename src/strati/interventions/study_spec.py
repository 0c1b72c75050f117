"""Parse and validate the TOML specification of a study; the result is a call of :func:`strati.study`.

Nothing here measures anything: a spec names the network, the data and the options, and :class:`StudyCall` holds them as
the arguments that a caller in Python would give.
"""

from __future__ import annotations

import tomllib
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from strati.core import plugins
from strati.core.errors import BadInputError, MissingExtraError
from strati.core.options import Rule, nearest
from strati.interventions.kinds import KINDS, Intervention, as_interventions, from_table
from strati.interventions.study_config import OPTION_RULES, SECTIONS, StudyCall, StudyConfig, builtin_names

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import nn

    from strati.interventions.tasks import StudyData
    from strati.jobs.store import Run

Rules = Mapping[str, Rule]

SOURCES = ("mlp", "fcn", "resnet", "transformer", "transformers")
_DEFAULT_KINDS = ("reinitialise", "rerandomise")
_CHECKPOINT: Rules = {
    "source": Rule(str, choices=SOURCES),
    "path": Rule(str),
    "initial": Rule(str),
    "activation": Rule(str, choices=("relu", "gelu", "tanh", "sigmoid")),
}
_DATA: Rules = {
    "name": Rule(str),
    "path": Rule(str),
    "test": Rule(int, low=1),
    "context": OPTION_RULES["context"],
    "mean": Rule(float, each=True),
    "std": Rule(float, each=True, low=1e-12),
}
_OPTIONS = {
    "measure": ("performance", "batch", "chance"),
    "interventions": ("draws", "init", "layers"),
    "metrics": (
        *("spectral", "htsr", "activations", "degeneracy"),
        *("learning_coefficient", "metrics", "samples"),
    ),
}
"""The options of :class:`StudyConfig` that a section holds."""


class TrainedNetworks(Protocol):
    """Networks that an installed package trains for a study (entry point ``strati.networks``, by ``network.source``).

    The entry point is a module with a function ``read_training(document, what) -> TrainedNetworks`` of the sections
    ``network``, ``data`` and ``train`` and the seed.
    """

    names: tuple[str, ...]
    document: Mapping[str, Any]

    @property
    def data(self) -> StudyData:
        """The test data, with training data as calibration rows."""

    def untrained(self) -> nn.Module:
        """One of the networks before training, for estimates of the cost."""

    def seconds(self) -> float:
        """About how long the trainings take in one process."""

    def train(
        self, folder: Path, run: Run
    ) -> tuple[dict[str, nn.Module], dict[str, dict[str, NDArray[Any]]]]:
        """The trained networks and their initial tensors by name; trainings found in the folder are not repeated."""


def read_spec(source: str | Path | Mapping[str, Any]) -> StudyCall:
    """The call that a TOML file, the name of a built-in spec, or a mapping of the same form stands for.

    Raises:
        BadInputError: No such file, not TOML, an unknown key or a value out of place.

    Examples:
        >>> call = read_spec({"network": {"path": "model.npz"}, "data": {"path": "x.npz"}, "seed": 3})
        >>> call.model, call.config.seed
        ({'model.npz': 'model.npz'}, 3)
        >>> read_spec({"trian": {"epochs": 3}})
        Traceback (most recent call last):
        ...
        strati.core.errors.BadInputError: spec: unknown key 'trian'; did you mean 'train'?
    """
    if isinstance(source, Mapping):
        return _call(source, "spec", Path())
    named = plugins.load(plugins.SPECS, str(source))
    if named is not None:
        named = named() if callable(named) else named
        if isinstance(named, Mapping):
            return _call(named, str(source), Path())
    path = Path(source if named is None else named)
    if not path.is_file():
        available = ", ".join(builtin_names()) or f"none: fcn-digits {plugins.REPRODUCTIONS}"
        raise BadInputError(
            source, f"no such file, and no built-in study of that name; built in are: {available}"
        )
    try:
        if path.stat().st_size > 1_000_000:
            raise BadInputError(path, "over 1 MB: too large for a study spec")
        document = tomllib.loads(path.read_text("utf-8"))
    except RecursionError:
        raise BadInputError(path, "not a spec of a study: its lists are nested too deep") from None
    except ValueError as error:  # not TOML, not UTF-8, or a number of thousands of digits
        raise BadInputError(path, f"not TOML ({error})") from None
    except OSError as error:
        raise BadInputError(path, f"cannot be read ({error.strerror or error})") from None
    return _call(document, str(path), path.parent)


def section(rules: Rules, entries: Any, what: str, name: str) -> dict[str, Any]:
    """The values of a section, checked against the rules of its keys.

    Raises:
        BadInputError: It is not a section, a key is unknown, or a value is out of place.
    """
    if not isinstance(entries, Mapping):
        raise BadInputError(what, f"{name!r} is a section: write [{name}] and its keys below")
    _check_keys(entries, rules, what, f" in [{name}]")
    for key, entry in entries.items():
        why = rules[key].wrong(entry)
        if why is not None:
            raise BadInputError(what, f"{name}.{key} {why}")
    return {key: rules[key].plain(entry) for key, entry in entries.items()}


def trained_networks(document: Mapping[str, Any], what: str) -> TrainedNetworks:
    """The networks that an installed package trains by the sections ``network``, ``data`` and ``train`` and the seed.

    Raises:
        MissingExtraError: No installed package knows the source.
    """
    source = document["network"].get("source", "mlp")
    package = plugins.load(plugins.NETWORKS, source)
    if package is None:
        raise MissingExtraError(
            f"network.source {source!r}", f"training networks for a study {plugins.REPRODUCTIONS}"
        )
    networks: TrainedNetworks = package.read_training(document, what)
    return networks


def data_file(data: Mapping[str, Any]) -> Path:
    """The file of the data that a spec names: by path, or by the name of a data set.

    Raises:
        BadInputError: There is no such data set.
    """
    if "path" in data:
        return Path(data["path"])
    if data["name"] == "digits":
        from strati import embedded

        return embedded.path("digits.npz")
    return find_data(data["name"])


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


def array_names(path: Path) -> set[str]:
    """The names of the arrays in an ``.npz`` file; none of any other file."""
    if not zipfile.is_zipfile(path):
        return set()
    with zipfile.ZipFile(path) as file:
        return {name.removesuffix(".npy") for name in file.namelist()}


def _call(document: Mapping[str, Any], what: str, folder: Path) -> StudyCall:
    top = {"name": Rule(str), "seed": OPTION_RULES["seed"]}
    _check_keys(document, {**top, **dict.fromkeys(SECTIONS, top["name"])}, what, "")
    options = section(top, {key: entry for key, entry in document.items() if key in top}, what, "spec")
    name = options.pop("name", "study")
    for part, keys in _OPTIONS.items():
        entries = document.get(part, {})
        if part == "interventions" and isinstance(entries, Mapping):
            entries, options["interventions"] = _interventions(entries, what, folder)
        options |= section({key: OPTION_RULES[key] for key in keys}, entries, what, part)
    tables = {part: document.get(part, {}) for part in ("network", "data", "train")}
    for part, table in tables.items():
        if not isinstance(table, Mapping):
            raise BadInputError(what, f"{part!r} is a section: write [{part}] and its keys below")
    _check_data(tables["data"], what)
    if "path" in tables["network"]:
        return _checkpoint_call(name, tables, options, what, folder)
    source = tables["network"].get("source", "mlp")
    why = _CHECKPOINT["source"].wrong(source)
    if why is not None:
        raise BadInputError(what, f"network.source {why}")
    if source == "transformers":
        raise BadInputError(
            what, "network.path is missing: the local Hugging Face directory of the checkpoint"
        )
    data = {**tables["data"]}
    if isinstance(data.get("path"), str):
        data["path"] = str(folder / data["path"])
    networks = trained_networks({**tables, "data": data, "seed": options.get("seed", 0)}, what)
    return StudyCall(name, networks, None, StudyConfig(**options))


def _check_data(data: Mapping[str, Any], what: str) -> None:
    if "name" in data and "path" in data:
        raise BadInputError(what, "[data] has both a name and a path; keep one")
    if "name" not in data and "path" not in data:
        raise BadInputError(what, "[data] needs a name (such as 'digits') or a path")


def _checkpoint_call(
    name: str, tables: Mapping[str, Any], options: dict[str, Any], what: str, folder: Path
) -> StudyCall:
    """The call for a checkpoint: paths in a file are relative to the file."""
    if tables["train"]:
        raise BadInputError(what, "[train] is for networks trained here; a checkpoint is trained already")
    network = section(_CHECKPOINT, tables["network"], what, "network")
    data = section(_DATA, tables["data"], what, "data")
    if network.get("source") == "resnet":  # what such networks are drawn from
        options.setdefault("init", "kaiming")
    if "initial" in network:
        options["initial"] = _network(folder, network["initial"])
    if "activation" in network:
        options["activation"] = network["activation"]
    options |= {key: data[name] for key, name in (("rows", "test"), ("context", "context")) if name in data}
    if "path" in data:
        data["path"] = str(folder / data["path"])
    path = data_file(data)
    if "x_test" in array_names(path):
        options["inputs"] = "x_test"
        options["targets"] = "y_test" if "y_test" in array_names(path) else None
    measured: Any = str(path)
    config = StudyConfig(**options)
    if "mean" in data or "std" in data:
        measured = _scaled(measured, data, config)
    location = _network(folder, network["path"])
    return StudyCall(name, {Path(location).name: location}, measured, config)


def _scaled(path: str, data: Mapping[str, Any], config: StudyConfig) -> StudyData:
    from strati.interventions.tasks import study_data

    arrays = study_data(path, None, config.context, inputs=config.inputs, targets=config.targets)
    scale: dict[str, Any] = {key: tuple(map(float, data[key])) for key in ("mean", "std") if key in data}
    for key, numbers in scale.items():
        channels = arrays.x_test.shape[1] if arrays.x_test.ndim > 1 else 1
        if len(numbers) not in (1, channels):
            raise BadInputError(
                f"data.{key}", f"has {len(numbers)} numbers for {channels} channels or columns"
            )
    return replace(arrays, **scale)


def _interventions(
    entries: Mapping[str, Any], what: str, folder: Path
) -> tuple[dict[str, Any], tuple[Intervention, ...]]:
    """The options of ``[interventions]``, and the interventions of ``kinds`` and of its tables."""
    tables: dict[str, Intervention] = {}
    for name, table in entries.items():
        if isinstance(table, Mapping):
            place = table.get("checkpoint")
            moved = {"checkpoint": _network(folder, place)} if isinstance(place, str) else {}
            tables[name] = from_table(name, {**table, **moved}, what)
    kinds = entries.get("kinds", list(tables) or list(_DEFAULT_KINDS))
    why = Rule(str, each=True).wrong(kinds)
    if why is not None:
        raise BadInputError(what, f"interventions.kinds {why}")
    names = (*KINDS, *plugins.names(plugins.INTERVENTIONS))
    for kind in kinds:
        if kind not in names:
            why = (
                f"interventions.kinds must be one of {', '.join(names)}, not {kind!r}; {nearest(kind, names)}"
            )
            raise BadInputError(what, why)
        known = KINDS.get(kind)
        if known is not None and (known.main or known.source) and kind not in tables:
            needed = " or ".join(known.main) or "checkpoint"
            raise BadInputError(
                what, f"interventions.kinds: {kind!r} needs settings: [interventions.{kind}] {needed}"
            )
    options = {key: entry for key, entry in entries.items() if key != "kinds" and key not in tables}
    named: list[Any] = [tables.get(kind, kind) for kind in kinds]
    return options, as_interventions([*named, *(t for name, t in tables.items() if name not in kinds)])


def _network(folder: Path, name: str) -> str:
    """Where a network is: beside the spec, or that of its name in the local Hugging Face cache."""
    from strati.io.formats.hf_directory import cached_model, is_cache_id

    beside = folder / name
    return str(beside if beside.exists() or not is_cache_id(name) else cached_model(name))


def _check_keys(entries: Mapping[str, Any], names: Mapping[str, Any], what: str, where: str) -> None:
    for name in entries:
        if name not in names:
            raise BadInputError(what, f"unknown key {name!r}{where}; {nearest(str(name), names)}")
