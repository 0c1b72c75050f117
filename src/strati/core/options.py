"""One rule for options: a frozen dataclass holds the defaults, keywords of its fields' names win over it.

Every public function takes ``config=None`` and the config's fields as keywords; :func:`resolve` makes one config of
both. The command line reads its defaults from the same dataclass (:func:`default`), so that there is one place where
a default stands.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import numpy as np

from strati.core.errors import BadInputError

C = TypeVar("C")
_ALIASES = {"jobs": "workers"}


def resolve(
    kind: type[C], config: C | None, keywords: Mapping[str, Any], *, of: str | Callable[..., Any]
) -> C:
    """One config out of a given one (or the defaults) and keywords, the keywords winning.

    Args:
        kind: The frozen dataclass that holds the options and their defaults.
        config: What the caller gave as ``config=``.
        keywords: What the caller gave by name.
        of: The public function, or its name, for messages. Of a function the keywords that it takes beside the
            config's (``layers=``, ``out=``) are known as well, when a misspelt name is looked up.

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


def _fitting(called: str, name: str, value: Any, kind: str) -> Any:
    """A value that an option's type allows; a whole number may come as ``1e3``, and as numpy's own.

    Types that are not plain numbers, words or lists of them are left to the function.

    Raises:
        BadInputError: It is of another type, or not a number.
    """
    parts = [part.strip() for part in re.split(r"\|(?![^\[]*\])", kind)]
    if not all(part.split("[")[0] in _WORDS for part in parts) or "Any" in kind:
        return value
    for part in parts:
        word, _, inner = part.partition("[")
        if word == "None" and value is None:
            return value
        if word == "bool" and isinstance(value, bool | np.bool_):
            return bool(value)
        if word == "int" and _is_number(value) and float(value).is_integer():
            return int(value)
        if word == "float" and _is_number(value):
            return value
        if word == "str" and isinstance(value, str):
            return value
        if word == "Mapping" and isinstance(value, Mapping):
            return value
        if word in ("tuple", "Sequence"):
            if isinstance(value, str) and inner.startswith("str"):
                return value
            if isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping):
                return value
    expected = " or ".join(dict.fromkeys(_WORDS[part.split("[")[0]] for part in parts))
    raise BadInputError(called, f"option {name!r} must be {expected}, not {value!r}")


_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "True or False",
    "str": "a word",
    "None": "None",
    "tuple": "a list",
    "Sequence": "a list",
    "Mapping": "a mapping",
}


def _is_number(value: Any) -> bool:
    """A real number that is one: no truth value, not NaN."""
    return (
        isinstance(value, int | float | np.number) and not isinstance(value, bool) and not math.isnan(value)
    )


def _own(of: str | Callable[..., Any]) -> list[str]:
    """The keywords that a function takes beside its config's fields."""
    if isinstance(of, str):
        return []
    parameters = inspect.signature(of).parameters.values()
    return [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and not p.name.startswith("_")]


def nearest(name: str, choices: Iterable[str]) -> str:
    """What to say of an unknown name: the nearest known one, or all of them.

    Examples:
        >>> nearest("seeed", ["seed", "chains"])
        "did you mean 'seed'?"
    """
    names = list(choices)
    if not names:
        return "there are none"
    close = difflib.get_close_matches(name, names, n=1)
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
