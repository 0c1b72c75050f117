"""Settings of an adapter by patterns of module names, as PEFT's ``rank_pattern`` and ``alpha_pattern``.

The patterns are regular expressions out of an untrusted file. ``regex`` matches them with a limit on the time; sizes
and repetitions are limited before they are compiled, because ``x{4000000000}`` alone takes gigabytes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

ADAPTER_KINDS = ("LORA", "DORA", "ADALORA", "LOHA", "LOKR")
"""Kinds of PEFT adapter that are read."""

_LONGEST = 250  # characters of a pattern, and of a name that is matched
_MOST_REPEATS = 10_000  # product of all numbers in {m,n}
_SECONDS = 0.25
_REPEAT = re.compile(r"\{([0-9]{1,4})(?:,([0-9]{0,4}))?\}")


def matches(pattern: str, name: str) -> bool | None:
    r"""Whether a module's name ends in a match of the pattern, as PEFT asks: ``(.*\.)?(pattern)$``.

    Returns:
        ``None`` where the pattern is too long, takes too long, or is none that PEFT's settings need.

    Examples:
        >>> matches("q_proj", "model.layers.0.q_proj"), matches("proj", "model.layers.0.q_proj")
        (True, False)
        >>> matches(r"layers\.(0|1)\..*_proj", "model.layers.1.self_attn.v_proj")
        True
        >>> matches("x{4000000000}", "x"), matches("(?=x)y", "y")
        (None, None)
    """
    import regex

    repeats = math.prod(max(int(m[1]), int(m[2] or 1), 1) for m in _REPEAT.finditer(pattern))
    plain = _REPEAT.sub("", pattern).replace("(?:", "(").replace(r"\{", "")
    if max(len(pattern), len(name)) > _LONGEST or repeats > _MOST_REPEATS or "(?" in plain or "{" in plain:
        return None
    try:
        return regex.match(rf"(.*\.)?({pattern})$", name, timeout=_SECONDS) is not None
    except (regex.error, TimeoutError):
        return None


class PatternTable:
    """Values by patterns; the first pattern that matches decides.

    Examples:
        >>> table = PatternTable({"k_proj": 2, "q_proj": 7, "(?=x)": 1})
        >>> table.value("layers.0.q_proj"), table.readable, table.value("layers.0.v_proj"), table.readable
        (7, True, None, False)
    """

    def __init__(self, table: object) -> None:
        self._table = table if isinstance(table, Mapping) else {}
        self.readable = True
        """Whether every pattern that was tried could be matched; once one could not, none is tried any more."""

    def value(self, name: str) -> object:
        """What the table gives a module; ``None`` where no pattern matches."""
        for pattern, value in self._table.items() if self.readable else ():
            matched = matches(str(pattern), name)
            if matched is None:
                self.readable = False
                return None
            if matched:
                return value
        return None
