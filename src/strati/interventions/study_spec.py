"""What a study is, as a TOML file says it: every key known, typed and bounded, or one line saying which is not.

Only reads and checks; nothing here opens data or networks.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from strati.core import plugins
from strati.core.errors import BadInputError
from strati.core.options import Rule, nearest
from strati.interventions.kinds import KINDS as INTERVENTIONS
from strati.interventions.kinds import Intervention, as_interventions, from_table, identity, merge

STORE = "study.sqlite"
FORMAT = 3
"""Raised when the meaning of a row changes or a column is added, so that old rows are not mixed with new ones."""

Number = float | int


def _key(default: Any, kind: type, **rule: Any) -> Any:
    return field(default=default, metadata={"rule": Rule(kind, **rule)})


SOURCES = ("mlp", "fcn", "resnet", "transformer", "transformers")
SCHEMES = ("auto", "pytorch", "gpt2", "vit", "timm", "kaiming", "normal", "moments")
KINDS = ("reinitialise", "rerandomise")
LOSS_SCORES = ("fisher_gradient", "kl_direct", "aumann_shapley", "higgs", "hessian_trace")
"""Sensitivity scores that need passes of their own."""
FREE_SCORES = ("snr", "sqnr", "kurtosis", "outlier_ratio", "angular_distance", "block_influence", "reap")
"""Sensitivity scores that come with the measurements and are recorded always."""
_MOST_POINTS = 10_000_000
_MOST_WEIGHTS = 500_000_000


@dataclass(frozen=True)
class NetworkSpec:
    """Which networks: strati's own, trained on the spot, or a local checkpoint."""

    source: str = _key("mlp", str, choices=SOURCES)
    count: int = _key(1, int, low=1, high=100_000)
    together: int | None = _key(None, int, low=1, high=1000)
    hidden: tuple[int, ...] = _key((64, 64), int, each=True, low=1, high=65_536)
    activation: str = _key("relu", str, choices=("relu", "gelu", "tanh", "sigmoid"))
    depth: int = _key(2, int, low=1, high=1000)
    width: int = _key(32, int, low=1, high=65_536)
    heads: int = _key(4, int, low=1, high=1024)
    path: str | None = _key(None, str)
    initial: str | None = _key(None, str)


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
    """How strati's own networks are trained."""

    epochs: int = _key(10, int, low=0, high=100_000)
    batch: int = _key(64, int, low=1, high=1_000_000)
    optimiser: str = _key("adam", str, choices=("adam", "sgd"))
    rate: float = _key(1e-3, float, low=0.0, high=1e6)
    momentum: float = _key(0.9, float, low=0.0, high=1.0)
    weight_decay: float = _key(0.0, float, low=0.0, high=1e6)


@dataclass(frozen=True)
class MeasureSpec:
    """What performance is."""

    performance: str = _key("accuracy", str, choices=("accuracy", "loss", "perplexity"))
    batch: int = _key(1000, int, low=1, high=1_000_000)
    chance: float | None = _key(None, float)


@dataclass(frozen=True)
class InterventionSpec:
    """What is done to which layers, how often."""

    kinds: tuple[str, ...] = _key(KINDS, str, each=True)
    draws: int = _key(1, int, low=1, high=1_000_000)
    init: str = _key("auto", str, choices=SCHEMES)
    layers: tuple[str, ...] = _key(("*",), str, each=True)
    settings: tuple[Intervention, ...] = ()

    def all(self) -> tuple[Intervention, ...]:
        """Every intervention: those named in ``kinds`` and those with a table of settings."""
        tables = {intervention.name: intervention for intervention in self.settings}
        named: list[Any] = [tables.get(kind, kind) for kind in self.kinds]
        return as_interventions([*named, *(t for t in self.settings if t.name not in self.kinds)])


@dataclass(frozen=True)
class MetricSpec:
    """What is recorded beside performance."""

    spectral: bool = _key(True, bool)
    activations: bool = _key(True, bool)
    degeneracy: bool = _key(False, bool)
    learning_coefficient: bool = _key(False, bool)
    metrics: tuple[str, ...] = _key(("fisher_gradient",), str, each=True)
    samples: int = _key(256, int, low=2, high=1_000_000)


@dataclass(frozen=True)
class Spec:
    """A study. Two equal specs are the same study, row for row."""

    name: str = _key("study", str)
    seed: int = _key(0, int, low=0)
    network: NetworkSpec = field(default_factory=NetworkSpec)
    data: DataSpec = field(default_factory=DataSpec)
    train: TrainSpec = field(default_factory=TrainSpec)
    measure: MeasureSpec = field(default_factory=MeasureSpec)
    interventions: InterventionSpec = field(default_factory=InterventionSpec)
    metrics: MetricSpec = field(default_factory=MetricSpec)

    def plain(self) -> dict[str, Any]:
        """All it says as plain values."""
        bare = dataclasses.replace(self, interventions=dataclasses.replace(self.interventions, settings=()))
        plain_values = dataclasses.asdict(bare)
        plain_values["interventions"]["settings"] = identity(self.interventions.settings)
        if not self.metrics.learning_coefficient:  # specs from before this metric stay the same study
            del plain_values["metrics"]["learning_coefficient"]
        return plain_values

    @property
    def trained_here(self) -> bool:
        """Whether strati trains the networks itself (a ``path`` means a checkpoint instead)."""
        return self.network.path is None


def sensitivity_scores(names: str | Sequence[str] | None) -> tuple[str, ...]:
    """The scores that a study is asked to compute: those named, or ``"all"``.

    Raises:
        BadInputError: There is no score of that name.

    Examples:
        >>> sensitivity_scores(["higgs", "snr"]), len(sensitivity_scores("all"))
        (('higgs',), 5)
    """
    listed = (names,) if isinstance(names, str) else tuple(names or ())
    for name in listed:
        if name not in (*LOSS_SCORES, *FREE_SCORES, "all"):
            raise BadInputError(
                "metrics", f"no score {name!r}; {nearest(str(name), (*LOSS_SCORES, *FREE_SCORES, 'all'))}"
            )
    return LOSS_SCORES if "all" in listed else tuple(name for name in LOSS_SCORES if name in listed)


_SECTIONS = {
    "network": NetworkSpec,
    "data": DataSpec,
    "train": TrainSpec,
    "measure": MeasureSpec,
    "interventions": InterventionSpec,
    "metrics": MetricSpec,
}


def spec_keys() -> tuple[str, ...]:
    """The keys that a spec may have at its top."""
    return (*(f.name for f in dataclasses.fields(Spec) if f.name not in _SECTIONS), *_SECTIONS)


def builtin_names() -> tuple[str, ...]:
    """The studies that installed packages know by name."""
    return plugins.names(plugins.SPECS)


def read_spec(source: str | Path | Mapping[str, Any]) -> Spec:
    """A spec from a TOML file, the name of a built-in one, or a mapping of the same form.

    Raises:
        BadInputError: No such file, not TOML, an unknown key or a value out of place.

    Examples:
        >>> read_spec({"network": {"count": 3}, "data": {"name": "digits"}}).network.count
        3
        >>> read_spec({"trian": {"epochs": 3}})
        Traceback (most recent call last):
        ...
        strati.core.errors.BadInputError: spec: unknown key 'trian'; did you mean 'train'?
    """
    if isinstance(source, Mapping):
        return _spec(source, "spec", Path())
    named = plugins.load(plugins.SPECS, str(source))
    if named is not None:
        named = named() if callable(named) else named
        if isinstance(named, Mapping):
            return _spec(named, str(source), Path())
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
    return _spec(document, str(path), path.parent)


def _spec(document: Mapping[str, Any], what: str, folder: Path) -> Spec:
    plain = {f.name: f for f in dataclasses.fields(Spec) if f.name not in _SECTIONS}
    _known(document, spec_keys(), what, "")
    values: dict[str, Any] = {}
    for name, value in document.items():
        if name in _SECTIONS:
            if not isinstance(value, Mapping):
                raise BadInputError(what, f"{name!r} is a section: write [{name}] and its keys below")
            plain_keys, tables = _tables(value, what, folder) if name == "interventions" else (value, ())
            made = _section(_SECTIONS[name], plain_keys, what, name, folder)
            values[name] = dataclasses.replace(made, settings=tables) if tables else made
        else:
            values[name] = _check(plain[name], value, what, name)
    spec = Spec(**values)
    _check_whole(spec, what)
    return spec


def _tables(
    section: Mapping[str, Any], what: str, folder: Path
) -> tuple[Mapping[str, Any], tuple[Intervention, ...]]:
    """The plain keys of ``[interventions]``, and the interventions of its tables; without ``kinds`` only these."""
    plain_keys = {name: value for name, value in section.items() if not isinstance(value, Mapping)}
    interventions = []
    for name, table in section.items():
        if not isinstance(table, Mapping):
            continue
        place = table.get("checkpoint")
        moved = {"checkpoint": _network(folder, place)} if isinstance(place, str) else {}
        interventions.append(from_table(name, {**table, **moved}, what))
    named = plain_keys.get("kinds", KINDS if not interventions else ())
    for kind in named if isinstance(named, list | tuple) else ():
        wants = INTERVENTIONS.get(kind) if isinstance(kind, str) else None
        if isinstance(kind, str) and wants is None:
            _check_added(kind, what)
        if wants is not None and (wants.main or wants.source) and kind not in section:
            needed = " or ".join(wants.main) or "checkpoint"
            raise BadInputError(
                what, f"interventions.kinds: {kind!r} needs settings: [interventions.{kind}] {needed}"
            )
    if interventions and "kinds" not in plain_keys:
        plain_keys["kinds"] = [intervention.name for intervention in interventions]
    return plain_keys, merge(interventions)


def _check_added(kind: str, what: str) -> None:
    """Refuse the name of an intervention that neither strati nor an installed package has."""
    names = (*INTERVENTIONS, *plugins.names(plugins.INTERVENTIONS))
    if kind not in names:
        why = f"interventions.kinds is one of {', '.join(names)}, not {kind!r}{_near(kind, names)}"
        raise BadInputError(what, why)


def _section(kind: type, entries: Mapping[str, Any], what: str, section: str, folder: Path) -> Any:
    fields = {f.name: f for f in dataclasses.fields(kind) if "rule" in f.metadata}
    _known(entries, tuple(fields), what, f" in [{section}]")
    values = {name: _check(fields[name], value, what, f"{section}.{name}") for name, value in entries.items()}
    for name in ("path", "initial"):  # paths in a file are relative to the file
        path = values.get(name)
        if isinstance(path, str):
            values[name] = _network(folder, path) if section == "network" else str(folder / path)
    return kind(**values)


def _network(folder: Path, name: str) -> str:
    """Where a network is: beside the spec, or that of its name in the local Hugging Face cache."""
    from strati.io.formats.hf_directory import cached_model, is_cache_id

    beside = folder / name
    return str(beside if beside.exists() or not is_cache_id(name) else cached_model(name))


def _known(entries: Mapping[str, Any], names: tuple[str, ...], what: str, where: str) -> None:
    for name in entries:
        if name not in names:
            raise BadInputError(what, f"unknown key {name!r}{where}{_near(name, names)}")


def _near(name: object, names: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(str(name), names, n=1, cutoff=0.0)
    return f"; did you mean {close[0]!r}?" if close else ""


def _check(field: Any, value: Any, what: str, name: str) -> Any:
    rule: Rule = field.metadata["rule"]
    why = rule.wrong(value)
    if why is not None:
        raise BadInputError(what, f"{name} {why}")
    return rule.plain(value)


def _check_whole(spec: Spec, what: str) -> None:
    if spec.data.name is not None and spec.data.path is not None:
        raise BadInputError(what, "[data] has both a name and a path; keep one")
    if spec.data.name is None and spec.data.path is None:
        raise BadInputError(what, "[data] needs a name (such as 'digits') or a path")
    if spec.network.source == "transformers" and spec.network.path is None:
        raise BadInputError(
            what, "network.path is missing: the local Hugging Face directory of the checkpoint"
        )
    if not spec.trained_here and spec.network.count != 1:
        raise BadInputError(what, "network.count is for networks trained here; a checkpoint is one network")
    if spec.network.count * spec.interventions.draws > _MOST_POINTS:
        raise BadInputError(
            what,
            f"network.count times interventions.draws is over {_MOST_POINTS:,}: years of work; ask for fewer",
        )
    if spec.trained_here and _weights(spec.network, spec.data.context) > _MOST_WEIGHTS:
        raise BadInputError(
            what,
            f"the network would have over {_MOST_WEIGHTS:,} weights, too many to train here; make it smaller",
        )
    text = spec.measure.performance == "perplexity"
    if text and spec.network.source in ("mlp", "fcn", "resnet"):
        raise BadInputError(what, "measure.performance 'perplexity' is for language models")
    if spec.network.source == "transformer" and spec.network.width % spec.network.heads:
        raise BadInputError(what, "network.width has to be a multiple of network.heads")


def _weights(network: NetworkSpec, context: int) -> int:
    """About how many weights a network trained here would have, before any of them is made."""
    if network.source in ("mlp", "fcn"):
        return sum(a * b for a, b in itertools.pairwise(network.hidden))
    if network.source == "transformer":
        return 12 * network.depth * network.width**2 + context * network.width
    return 63 * network.depth * network.width**2
