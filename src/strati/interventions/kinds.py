"""Interventions as data: which change, with which settings, how many draws.

An :class:`Intervention` is a name and a list of settings, each a few named values: ``truncate(rank=[1, 4])`` has the
settings ``rank=1`` and ``rank=4``. The constructors below make them in Python, :func:`from_table` from a TOML table.
What a change does to a weight is in ``measuring.edits``.
"""

from __future__ import annotations

import difflib
import hashlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from strati.core import plugins
from strati.core.errors import BadInputError
from strati.core.options import Rule, nearest

HIDDEN = "_checkpoint"
"""The one checkpoint of ``swap`` or ``adapt``: where it lies is no part of a setting's text."""

Pairs = tuple[tuple[str, Any], ...]
"""One setting: names and values in a fixed order."""


@dataclass(frozen=True)
class Kind:
    """What is known of an intervention: its options, which of them make a setting, whether chance is involved.

    ``main``: alternatives, of which a setting has exactly one (none: there is nothing to set).
    """

    options: Mapping[str, Rule] = field(default_factory=dict)
    main: tuple[str, ...] = ()
    random: bool = False
    source: bool = False  # needs another checkpoint


_SHARE = Rule(float, 0.0, 1.0)

KINDS: dict[str, Kind] = {
    "reinitialise": Kind(),
    "rerandomise": Kind(random=True),
    "truncate": Kind(
        {
            "rank": Rule(int, 0),
            "energy": Rule(float, 0.0, 1.0, above=True),
            "parameters": Rule(float, 0.0, 1.0, above=True),
            "metric": Rule(str, choices=("inputs",)),
        },
        ("rank", "energy", "parameters"),
    ),
    "signal-only": Kind(),
    "noise-only": Kind(),
    "remove-quasi-null": Kind(),
    "remove-small": Kind({"k": Rule(int, 1)}, ("k",)),
    "remove-large": Kind({"k": Rule(int, 1)}, ("k",)),
    "quantise": Kind(
        {
            "bits": Rule(int, 1, 16),
            "group": Rule(int, 1),
            "symmetric": Rule(bool),
            "method": Rule(str, choices=("gptq", "awq", "hqq")),
        },
        ("bits",),
    ),
    "prune": Kind(
        {
            "share": _SHARE,
            "pattern": Rule(str, pattern=(r"\d{1,4}:\d{1,4}", "2:4")),
            "method": Rule(str, choices=("wanda", "sparsegpt")),
            "unit": Rule(str, choices=("head", "neuron")),
        },
        ("share", "pattern"),
    ),
    "zero": Kind(),
    "permute-entries": Kind(random=True),
    "drop": Kind({"run": Rule(int, 1)}),
    "reorder": Kind({"run": Rule(int, 2)}),
    "repeat": Kind({"times": Rule(int, 2)}),
    "parallel": Kind({"run": Rule(int, 2)}),
    "drop-experts": Kind(
        {"count": Rule(int, 1), "share": _SHARE, "expert": Rule(int, 0)}, ("count", "share", "expert")
    ),
    "merge-experts": Kind({"count": Rule(int, 1), "share": _SHARE}, ("count", "share")),
    "swap": Kind({"checkpoint": Rule(str)}, source=True),
    "adapt": Kind({"checkpoint": Rule(str), "rank": Rule(int, 0)}, ("rank",), source=True),
    "damp-intruders": Kind({"checkpoint": Rule(str), "factor": Rule(float, 0.0)}, ("factor",), source=True),
    "scale": Kind({"factor": Rule(float)}, ("factor",)),
    "noise": Kind({"size": Rule(float, 0.0)}, ("size",), random=True),
}
"""Every intervention strati knows by name."""

_DATA_AWARE = {
    "metric": ("inputs",),
    "method": ("gptq", "awq", "wanda", "sparsegpt"),
    "unit": ("head", "neuron"),
}
UNIT_READERS = {"head": "attention.out", "neuron": "mlp.out"}
"""Role of the layer that reads the units: removing a unit removes columns of its weight."""

RANDOM_VALUES = ("reinitialise", "rerandomise")
"""Interventions that give a layer values of other origin; all others edit the trained ones."""
BLOCK_KINDS = ("drop", "reorder", "repeat", "parallel")
EXPERT_KINDS = ("drop-experts", "merge-experts")


def unit_of(name: str) -> str:
    """What an intervention changes: a ``layer``, a ``block``, or the ``experts`` of a layer.

    Examples:
        >>> unit_of("truncate"), unit_of("reorder"), unit_of("drop-experts")
        ('layer', 'block', 'experts')
    """
    return "block" if name in BLOCK_KINDS else "experts" if name in EXPERT_KINDS else "layer"


def suits(setting: Pairs, role: str) -> bool:
    """Whether a layer of a role takes a setting: heads and neurons are removed in the layer that reads them.

    Examples:
        >>> suits((("share", 0.5), ("unit", "head")), "attention.out"), suits((("unit", "head"),), "mlp.out")
        (True, False)
    """
    unit = dict(setting).get("unit")
    return unit is None or UNIT_READERS[unit] == role


def run_length(name: str, setting: Mapping[str, Any]) -> int:
    """How many neighbouring blocks a setting changes together; reordering one block alone is nothing."""
    return int(setting.get("run", 2 if name in ("reorder", "parallel") else 1))


@dataclass(frozen=True)
class Intervention:
    """One kind of change and the settings to try.

    Attributes:
        name: As rows have it: ``truncate``, ``signal-only``, or the name of the user's function.
        settings: One tuple of (name, value) pairs each; one empty tuple where there is nothing to set.
        draws: How often, where chance is involved; ``None``: as often as the study says.
        source: The user's function, or the other network of ``swap`` and ``adapt``.

    Examples:
        >>> [setting_text(s) for s in truncate(rank=[1, 4]).settings]
        ['rank=1', 'rank=4']
    """

    name: str
    settings: tuple[Pairs, ...] = ((),)
    draws: int | None = None
    source: Any = field(default=None, repr=False, compare=False)

    @property
    def random(self) -> bool:
        """Whether draws differ; a deterministic intervention has one draw."""
        kind = KINDS.get(self.name)
        return kind is None or kind.random

    def times(self, draws: int) -> int:
        """How many draws there are when the study asks for ``draws``."""
        return (self.draws or draws) if self.random else 1


@dataclass(frozen=True)
class Point:
    """One change to be made: which intervention, with which setting, which draw."""

    intervention: str
    setting: Pairs = ()
    draw: int = 0

    @property
    def text(self) -> str | None:
        """The setting as rows have it."""
        return setting_text(self.setting)


def reads_inputs(setting: Pairs) -> bool:
    """Whether a setting needs the input covariance of the layer, and so calibration data.

    Examples:
        >>> reads_inputs((("bits", 4), ("method", "gptq"))), reads_inputs((("bits", 4), ("method", "hqq")))
        (True, False)
    """
    return any(value in _DATA_AWARE.get(name, ()) for name, value in setting)


def setting_text(setting: Pairs) -> str | None:
    """A setting as rows carry it; ``None`` where there is nothing to set.

    Examples:
        >>> setting_text((("bits", 4), ("group", 128))), setting_text((("energy", 0.5),)), setting_text(())
        ('bits=4,group=128', 'energy=0.5', None)
    """
    visible = [(name, value) for name, value in setting if name != HIDDEN]
    return ",".join(f"{name}={_text(value)}" for name, value in visible) or None


def read_setting(text: str | None) -> dict[str, Any]:
    """The values of a setting's text.

    Raises:
        BadInputError: It is not of the form ``name=value,...``.

    Examples:
        >>> read_setting("bits=4,symmetric=true"), read_setting("pattern=2:4"), read_setting(None)
        ({'bits': 4, 'symmetric': True}, {'pattern': '2:4'}, {})
    """
    values: dict[str, Any] = {}
    for part in text.split(",") if text else ():
        name, equals, value = part.partition("=")
        if not equals:
            raise BadInputError(text or "setting", "is not of the form name=value,name=value")
        values[name] = parse_value(value)
    return values


def truncate(
    *,
    rank: int | Sequence[int] = (),
    energy: float | Sequence[float] = (),
    parameters: float | Sequence[float] = (),
    metric: str | Sequence[str] = (),
) -> Intervention:
    """Keep the leading singular directions of a layer.

    Args:
        rank: How many to keep.
        energy: Share of the squared Frobenius norm to keep; the fewest directions that hold it.
        parameters: Share of the layer's parameters that two factors may have, ``k (rows + cols) <= share rows cols``.
        metric: ``"inputs"`` keeps the directions that matter most for the layer's outputs on the calibration data; by
            default those of the weight itself.

    Examples:
        >>> truncate(rank=4).settings
        ((('rank', 4),),)
    """
    return make("truncate", {"rank": rank, "energy": energy, "parameters": parameters, "metric": metric})


def signal_only() -> Intervention:
    """Keep the singular directions above the Tracy-Widom edge of the layer's random bulk."""
    return make("signal-only", {})


def noise_only() -> Intervention:
    """Keep what is left below that edge."""
    return make("noise-only", {})


def remove_quasi_null() -> Intervention:
    """Remove the quasi-null directions: those weaker than noise would leave them."""
    return make("remove-quasi-null", {})


def remove_small(k: int | Sequence[int]) -> Intervention:
    """Remove the ``k`` weakest singular directions."""
    return make("remove-small", {"k": k})


def remove_large(k: int | Sequence[int]) -> Intervention:
    """Remove the ``k`` strongest singular directions."""
    return make("remove-large", {"k": k})


def quantise(
    *,
    bits: int | Sequence[int],
    group: int | Sequence[int] = (),
    symmetric: bool | Sequence[bool] = (),
    method: str | Sequence[str] = (),
) -> Intervention:
    """Round every weight to one of ``2^bits`` levels, by default to the nearest.

    Args:
        bits: Bits per weight.
        group: Neighbouring inputs of an output that share a scale; all of them by default.
        symmetric: Levels symmetric around zero; by default they span smallest to largest weight.
        method: ``"gptq"`` compensates the error of each column in the following ones, ``"awq"`` scales inputs by their
            power before rounding (both need calibration data), ``"hqq"`` fits the zero points without data.

    Examples:
        >>> [setting_text(s) for s in quantise(bits=[4, 2], group=64).settings]
        ['bits=4,group=64', 'bits=2,group=64']
    """
    return make("quantise", {"bits": bits, "group": group, "symmetric": symmetric, "method": method})


def prune(
    *,
    share: float | Sequence[float] = (),
    pattern: str | Sequence[str] = (),
    method: str | Sequence[str] = (),
    unit: str | Sequence[str] = (),
) -> Intervention:
    """Set entries of the weight to zero, by default the smallest, or remove whole units.

    Args:
        share: The share of entries to zero.
        pattern: ``"2:4"`` keeps 2 of every 4 neighbouring inputs.
        method: ``"wanda"`` ranks entries by their size times the power of their input, ``"sparsegpt"`` also adjusts the
            entries that stay. Both need calibration data.
        unit: ``"neuron"`` removes hidden neurons of MLPs, ``"head"`` attention heads (with grouped queries: a key/value
            head and its queries). A share of those that the layer behind them can best do without is removed, and its
            other columns are adjusted; ``apply`` writes a smaller dense network. Needs calibration data.

    Examples:
        >>> [setting_text(s) for s in prune(share=[0.5, 0.7], method="wanda").settings]
        ['share=0.5,method=wanda', 'share=0.7,method=wanda']
    """
    return make("prune", {"share": share, "pattern": pattern, "method": method, "unit": unit})


def zero() -> Intervention:
    """Set the weight to zero; the bias stays."""
    return make("zero", {})


def permute_entries(*, draws: int | None = None) -> Intervention:
    """Permute the entries of the weight at random."""
    return make("permute-entries", {}, draws=draws)


def drop(*, run: int | Sequence[int] = ()) -> Intervention:
    """Replace residual blocks by the identity: each in turn, or each ``run`` of neighbouring ones."""
    return make("drop", {"run": run})


def reorder(*, run: int | Sequence[int] = ()) -> Intervention:
    """Reverse the order of a run of neighbouring residual blocks: two by default (Sun et al., arXiv:2407.09298)."""
    return make("reorder", {"run": run})


def repeat(*, times: int | Sequence[int] = ()) -> Intervention:
    """Run a residual block several times in a row: twice by default."""
    return make("repeat", {"times": times})


def parallel(*, run: int | Sequence[int] = ()) -> Intervention:
    """Give a run of neighbouring residual blocks the same input and average their outputs: two by default."""
    return make("parallel", {"run": run})


def drop_experts(
    *, count: int | Sequence[int] = (), share: float | Sequence[float] = (), expert: int | Sequence[int] = ()
) -> Intervention:
    """Remove experts from a mixture: the ``count`` or ``share`` of least saliency (REAP), or one ``expert`` by number.

    Examples:
        >>> drop_experts(count=[1, 2]).settings
        ((('count', 1),), (('count', 2),))
    """
    return make("drop-experts", {"count": count, "share": share, "expert": expert})


def merge_experts(*, count: int | Sequence[int] = (), share: float | Sequence[float] = ()) -> Intervention:
    """Average the experts of least saliency into those that the router treats most alike, weighted by their tokens."""
    return make("merge-experts", {"count": count, "share": share})


def swap(source: Any) -> Intervention:
    """Give the layer the values it has in another network of the same shape (a path, a module, tensors by name)."""
    return make("swap", {}, source=source)


def damp_intruders(base: Any, *, factor: float | Sequence[float] = 0.0) -> Intervention:
    """Scale the leading directions that the base network does not have (intruder dimensions, 2410.21228)."""
    return make("damp-intruders", {"factor": factor}, source=base)


def adapt(source: Any, *, rank: int | Sequence[int]) -> Intervention:
    """Keep only rank ``rank`` of the update since ``source``, the base: ``W_base + truncate(W - W_base)``."""
    return make("adapt", {"rank": rank}, source=source)


def scale(factor: float | Sequence[float]) -> Intervention:
    """Multiply the weight by a number."""
    return make("scale", {"factor": factor})


def noise(size: float | Sequence[float], *, draws: int | None = None) -> Intervention:
    """Add Gaussian noise whose Frobenius norm is ``size`` times the weight's."""
    return make("noise", {"size": size}, draws=draws)


def reinitialise() -> Intervention:
    """Put the layer's initial values back."""
    return make("reinitialise", {})


def rerandomise(*, draws: int | None = None) -> Intervention:
    """Draw new values from the distribution the layer was initialised from."""
    return make("rerandomise", {}, draws=draws)


def intervention(name: str, function: Callable[[Any, Any], Any], *, draws: int | None = None) -> Intervention:
    """A function ``(weight, rng) -> weight`` of your own as an intervention.

    Examples:
        >>> intervention("sign", lambda weight, rng: abs(weight)).name
        'sign'
    """
    if name in KINDS or name == "intact":
        raise BadInputError(name, "is the name of one of strati's own interventions; choose another")
    if not callable(function):
        raise BadInputError(name, "an intervention is a function (weight, rng) -> weight")
    return Intervention(name, ((),), draws, function)


def make(
    name: str, values: Mapping[str, Any], *, draws: int | None = None, source: Any = None
) -> Intervention:
    """An intervention by name, its values checked; a list of values is a list of settings.

    Raises:
        BadInputError: An unknown name or option, a value out of range, or nothing where something is needed.
    """
    if name not in KINDS:
        name = name.replace("_", "-")
    if name not in KINDS:
        raise BadInputError(name, f"no such intervention{_near(name, KINDS)}")
    kind = KINDS[name]
    lists: dict[str, tuple[Any, ...]] = {}
    for option, argument in values.items():
        if option not in kind.options:
            option_names = ", ".join(kind.options) or "no options"
            raise BadInputError(
                f"{name}.{option}", f"no such option; {name} has {option_names}{_near(option, kind.options)}"
            )
        rule = kind.options[option]
        listed = tuple(map(_plain, argument)) if _is_list(argument) else (_plain(argument),)
        for why in filter(None, map(rule.wrong, listed)):
            raise BadInputError(f"{name}.{option}", why)
        if listed:
            lists[option] = tuple(map(rule.plain, listed))
    if draws is not None and (isinstance(draws, bool) or not isinstance(draws, int) or draws < 1):
        raise BadInputError(f"{name}.draws", f"is a whole number from 1, not {draws!r}")
    return Intervention(name, _settings(name, kind, lists), draws, source)


def _is_list(argument: Any) -> bool:
    """Lists, ranges and arrays of values; an array without dimensions is one value."""
    return isinstance(argument, list | tuple | range) or getattr(argument, "ndim", 0) == 1


def _plain(value: Any) -> Any:
    """A number of numpy or torch as Python's own."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", None) == 0 else value


def _settings(name: str, kind: Kind, lists: Mapping[str, tuple[Any, ...]]) -> tuple[Pairs, ...]:
    main_options = [option for option in kind.main if option in lists]
    if kind.main and not main_options:
        raise BadInputError(name, f"needs settings: {' or '.join(kind.main)} (a value or a list of values)")
    side = [option for option in kind.options if option in lists and option not in kind.main]
    settings: list[Pairs] = []
    for main in [[option] for option in main_options] or [[]]:
        names = [*main, *side]
        for combination in itertools.product(*(lists[n] for n in names)):
            alone = len(lists.get("checkpoint", ())) == 1
            labels = [HIDDEN if n == "checkpoint" and alone else n for n in names]
            pairs = tuple(zip(labels, combination, strict=True))
            if pairs not in settings:
                settings.append(pairs)
    for pairs in settings:
        chosen_values = dict(pairs)
        if name == "quantise" and chosen_values.get("symmetric") and chosen_values["bits"] < 2:
            raise BadInputError("quantise.bits", "symmetric levels need at least 2 bits")
        if chosen_values.get("symmetric") and chosen_values.get("method") == "hqq":
            raise BadInputError("quantise.symmetric", "hqq fits zero points; leave symmetric out")
        if "unit" in chosen_values and {"pattern", "method"} & set(chosen_values):
            raise BadInputError("prune.unit", "takes a share of whole units; leave pattern and method out")
        count, _, of = str(chosen_values.get("pattern", "1:2")).partition(":")
        if not 0 < int(count) < int(of):
            raise BadInputError("prune.pattern", f"must be n:m with 0 < n < m, such as 2:4, not {count}:{of}")
    return tuple(settings)


def from_table(name: str, table: Mapping[str, Any], where: str) -> Intervention:
    """An intervention as a TOML table ``[interventions.NAME]`` says it.

    Raises:
        BadInputError: As :func:`make`, naming the file.
    """
    try:
        values = dict(table)
        draws = values.pop("draws", None)
        if name not in KINDS:
            raise BadInputError(name, f"no such intervention{_near(name, KINDS)}")
        if KINDS[name].source and "checkpoint" not in values:
            raise BadInputError(name, "needs checkpoint: the path of the other network")
        return make(name, values, draws=draws)
    except BadInputError as error:
        raise BadInputError(where, f"interventions.{error.what}: {error.why}") from None


def as_interventions(given: Any) -> tuple[Intervention, ...]:
    """What a user gives as ``interventions=``: constructors' results, names, functions, alone or in a list.

    Raises:
        BadInputError: Something else, or one (name, setting) twice.

    Examples:
        >>> [i.name for i in as_interventions(["zero", truncate(rank=2)])]
        ['zero', 'truncate']
    """
    listed: Iterable[Any]
    if isinstance(given, Mapping):
        listed = [intervention(str(name), function) for name, function in given.items()]
    elif isinstance(given, list | tuple):
        listed = given
    else:
        listed = [given]
    interventions: list[Intervention] = []
    for entry in listed:
        if isinstance(entry, str):
            interventions.append(
                make(entry, {}) if entry.replace("_", "-") in KINDS else _of_other_package(entry)
            )
        elif isinstance(entry, Intervention):
            interventions.append(entry)
        elif callable(entry):
            interventions.append(intervention(str(getattr(entry, "__name__", type(entry).__name__)), entry))
        else:
            raise BadInputError(
                "interventions", f"{entry!r} is not an intervention; use strati.truncate(...) and the like"
            )
    merged = merge(interventions)
    if not merged:
        raise BadInputError("interventions", "none given; use strati.truncate(rank=[1, 4]) and the like")
    return merged


def _of_other_package(name: str) -> Intervention:
    function = plugins.load(plugins.INTERVENTIONS, name)
    if function is None:
        names = (*KINDS, *plugins.names(plugins.INTERVENTIONS))
        raise BadInputError("interventions", f"no intervention {name!r}; {nearest(name, names)}")
    return intervention(name, function)


def merge(found: Sequence[Intervention]) -> tuple[Intervention, ...]:
    """Interventions of one name put together.

    Raises:
        BadInputError: One name with two functions, networks or numbers of draws.
    """
    merged: dict[str, Intervention] = {}
    for intervention in found:
        before = merged.get(intervention.name)
        if before is None:
            merged[intervention.name] = intervention
            continue
        if before.source is not intervention.source or before.draws != intervention.draws:
            raise BadInputError(
                intervention.name, "is given twice with different sources or draws; give it another name"
            )
        settings = dict.fromkeys((*before.settings, *intervention.settings))
        merged[intervention.name] = Intervention(
            intervention.name, tuple(settings), intervention.draws, intervention.source
        )
    return tuple(merged.values())


def identity(found: Sequence[Intervention]) -> list[dict[str, Any]]:
    """Interventions as plain values on which rows depend, functions by their name and code."""
    return [
        {
            "name": intervention.name,
            "settings": [list(map(list, s)) for s in intervention.settings],
            "draws": intervention.draws,
            "function": _code(intervention.source)
            if callable(intervention.source) and intervention.name not in KINDS
            else None,
        }
        for intervention in found
    ]


def _code(function: Any) -> str:
    code = getattr(function, "__code__", None)
    raw = code.co_code + repr(code.co_consts).encode() if code is not None else b""
    return (
        f"{getattr(function, '__qualname__', type(function).__name__)} {hashlib.sha256(raw).hexdigest()[:16]}"
    )


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:g}" if isinstance(value, float) else str(value)


def parse_value(text: str) -> Any:
    """A value of a setting from its text: true, false, a number, or the text itself."""
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _near(name: object, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(str(name), list(names), n=1, cutoff=0.4)
    return f"; did you mean {close[0]!r}?" if close else ""


STANDARD_SETTINGS: dict[str, dict[str, tuple[Any, ...]]] = {
    "truncate": {"parameters": (0.1, 0.25, 0.5, 0.75, 0.9)},
    "quantise": {"bits": (8, 6, 4, 3, 2)},
    "prune": {"share": (0.3, 0.5, 0.7, 0.9)},
    "drop": {},
}
"""What users do to networks: the settings that a study tries where none are given."""


def parse_intervention(name: str, text: str = "") -> Intervention:
    """An intervention from its settings as text; several values of one option stand behind each other.

    Raises:
        BadInputError: A word is no ``option=value``, or an option or value is not one of the intervention's.

    Examples:
        >>> from strati.interventions.kinds import setting_text
        >>> [setting_text(s) for s in parse_intervention("quantise", "bits=4,3,group=64").settings]
        ['bits=4,group=64', 'bits=3,group=64']
        >>> parse_intervention("prune", "pattern=2:4").settings
        ((('pattern', '2:4'),),)
    """
    values: dict[str, list[Any]] = {}
    option = ""
    for word in filter(None, (part.strip() for part in text.split(","))):
        first, equals, value_text = word.partition("=")
        option = first.strip() if equals else option
        if not option:
            example = next(iter(KINDS[name].main), "option")
            raise BadInputError(f"{name} {text}", f"is not a list of settings; write {example}=2,4,8")
        values.setdefault(option, []).append(parse_value(value_text if equals else word))
    return make(name, values)


STANDARD = tuple(make(name, values) for name, values in STANDARD_SETTINGS.items())
"""What users do to networks, as the interventions of a study."""
