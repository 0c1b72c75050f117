"""Options: a frozen dataclass holds the defaults, and keywords of its fields' names win over it.

Every public function takes ``config=None`` and the config's fields as keywords; :func:`resolve` makes one config of
both and checks the types (:class:`Rule`). The command line reads its defaults from the same dataclass
(:func:`default`), so that every default is written once.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping
from types import NoneType
from typing import Any, TypeVar

import numpy as np

from strati.core.errors import BadInputError

C = TypeVar("C")
_ALIASES = {"jobs": "workers"}


def resolve(
    kind: type[C], config: C | None, keywords: Mapping[str, Any], *, of: str | Callable[..., Any]
) -> C:
    """Combine a config (or the defaults) and keywords; the keywords win.

    Args:
        kind: The frozen dataclass that holds the options and their defaults.
        config: The argument ``config=`` of the caller.
        keywords: The options that the caller passed by name.
        of: The public function, or its name, for messages. If it is a function, a misspelt keyword is also compared
            with the other keywords of its signature (``layers=``, ``out=``).

    Raises:
        BadInputError: An unknown keyword (the nearest known name is given), a value of another type, or a config of
            another class.

    Examples:
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class Options:
        ...     draws: int = 100
        ...     chains: int = 4
        >>> resolve(Options, Options(chains=2), {"draws": 50}, of="llc")
        Options(draws=50, chains=2)
        >>> resolve(Options, None, {"draw": 50}, of="llc")
        Traceback (most recent call last):
        strati.core.errors.BadInputError: llc: no option 'draw'; did you mean 'draws'?
        >>> resolve(Options, None, {"draws": "many"}, of="llc")
        Traceback (most recent call last):
        strati.core.errors.BadInputError: llc: option 'draws' must be a whole number, not 'many'
    """
    called = of if isinstance(of, str) else of.__name__
    if config is not None and not isinstance(config, kind):
        raise BadInputError(called, f"config must be a {kind.__name__}, not a {type(config).__name__}")
    names = [field.name for field in dataclasses.fields(kind) if field.init]  # type: ignore[arg-type]
    if "workers" in names:  # ``jobs`` is another name for it
        keywords = {_ALIASES.get(name, name): value for name, value in keywords.items()}
    for name in keywords:
        if name not in names:
            raise BadInputError(called, f"no option {name!r}; {nearest(name, [*names, *_own(of)])}")
    base = kind() if config is None else config
    if not keywords:
        return base
    types = {field.name: str(field.type) for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    fitting = {name: _fitting(called, name, value, types[name]) for name, value in keywords.items()}
    return dataclasses.replace(base, **fitting)  # type: ignore[type-var]


def _fitting(called: str, name: str, value: Any, annotation: str) -> Any:
    """A value that an option's annotation allows; other types than those of :class:`Rule` are left to the function.

    Raises:
        BadInputError: The value is of another type.
    """
    kinds = [part.strip().partition("[")[0] for part in re.split(r"\|(?![^\[]*\])", annotation)]
    if "Any" in annotation or not all(kind in _KINDS for kind in kinds):
        return value
    rules = [Rule(_KINDS[kind], infinite=True) for kind in kinds]
    for rule in rules:
        if rule.wrong(value) is None:
            return rule.plain(value)
    if isinstance(value, str) and re.search(r"(tuple|Sequence)\[str", annotation):
        return value  # one name in place of a list of names
    allowed = " or ".join(dict.fromkeys(_NAMES[rule.kind] for rule in rules))
    raise BadInputError(called, f"option {name!r} must be {allowed}, not {value!r}")


@dataclasses.dataclass(frozen=True)
class Rule:
    """What the value of an option may be.

    Attributes:
        kind: ``bool``, ``int``, ``float`` (any number), ``str``, ``list`` (any iterable but text), ``Mapping`` or
            ``NoneType``. A whole number may be written ``1e3``.
        low: The smallest number.
        high: The largest number.
        above: The number must be larger than ``low``.
        choices: The words that are allowed.
        pattern: A regular expression that text must match, and an example of it.
        each: The value is a list, and this holds for each of its entries.
        infinite: The number may be infinite.

    Examples:
        >>> Rule(int, low=1).wrong(0), Rule(int, low=1).wrong("three"), Rule(int, low=1).wrong(3)
        ('must be at least 1, not 0', "must be a whole number, not 'three'", None)
    """

    kind: type
    low: float | None = None
    high: float | None = None
    above: bool = False
    choices: tuple[str, ...] = ()
    pattern: tuple[str, str] | None = None
    each: bool = False
    infinite: bool = False

    def wrong(self, value: Any) -> str | None:
        """Why a value is not allowed; ``None`` if it is."""
        if self.each:
            if not isinstance(value, list | tuple) or not value:
                return f"must be a list, each {_NAMES[self.kind]}"
            single = dataclasses.replace(self, each=False)
            return next((why for why in map(single.wrong, value) if why is not None), None)
        if not self._is_of_kind(value):
            return f"must be {_NAMES[self.kind]}, not {value!r}"
        if self.choices and value not in self.choices:
            return f"must be one of {', '.join(self.choices)}, not {value!r}; {nearest(value, self.choices)}"
        if self.pattern is not None and not re.fullmatch(self.pattern[0], value):
            return f"must look like {self.pattern[1]}, not {value!r}"
        if self.low is not None and (value < self.low or (self.above and value == self.low)):
            return f"must be {'above' if self.above else 'at least'} {self.low:g}, not {value!r}"
        if self.high is not None and value > self.high:
            return f"must be at most {self.high:g}, not {value!r}"
        return None

    def plain(self, value: Any) -> Any:
        """An allowed value as Python's own ``bool`` or ``int`` if it is of that kind."""
        if self.each:
            return tuple(map(dataclasses.replace(self, each=False).plain, value))
        return self.kind(value) if self.kind in (bool, int) else value

    def _is_of_kind(self, value: Any) -> bool:
        if self.kind is bool:
            return isinstance(value, bool | np.bool_)
        if self.kind in (int, float):
            if isinstance(value, bool) or not isinstance(value, int | float | np.number) or math.isnan(value):
                return False
            if math.isinf(value):
                return self.infinite and self.kind is float
            return self.kind is float or float(value).is_integer()
        if self.kind is list:
            return isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)
        return isinstance(value, self.kind)


_NAMES: dict[type, str] = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "text",
    list: "a list",
    Mapping: "a mapping",
    NoneType: "None",
}
_KINDS = {kind.__name__: kind for kind in _NAMES} | {"tuple": list, "Sequence": list, "None": NoneType}


def _own(of: str | Callable[..., Any]) -> list[str]:
    """The keyword-only parameters of a function."""
    if isinstance(of, str):
        return []
    parameters = inspect.signature(of).parameters.values()
    return [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and not p.name.startswith("_")]


def nearest(name: str, choices: Iterable[str]) -> str:
    """The hint for an unknown name: the nearest existing one, or all of them.

    Examples:
        >>> nearest("seeed", ["seed", "chains"])
        "did you mean 'seed'?"
    """
    names = list(choices)
    if not names:
        return "there are none"
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6 if len(name) < 5 else 0.7)
    return f"did you mean {close[0]!r}?" if close else f"there are {', '.join(names)}"


def default(kind: type[Any], name: str) -> Any:
    """The default of a config's field, for the command line's option of the same name.

    Examples:
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class Options:
        ...     draws: int = 100
        >>> default(Options, "draws")
        100
    """
    for field in dataclasses.fields(kind):
        if field.name == name:
            made = field.default_factory
            return made() if made is not dataclasses.MISSING else field.default
    raise KeyError(name)
