"""Regular expressions out of an adapter's settings, matched without backtracking.

A pattern comes from a stranger's file, and Python's ``re`` takes exponential time on some (``(a+)+b``). Here every part
of a pattern takes the set of places where it may begin to the set of places where it may end, so that the work is
bounded by the lengths. Understood are letters, ``.``, classes, escapes, groups, ``|``, ``*``, ``+``, ``?``, ``{m,n}``,
``^`` and ``$``: what PEFT's ``rank_pattern`` and ``alpha_pattern`` are written in.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import lru_cache

_LONGEST = 250  # characters of a pattern, and of a name that is matched
_DEEPEST = 4  # repetitions inside of repetitions
_MOST = 64  # times that the parts of a pattern may be repeated by {m,n}, together

Places = frozenset[int]
Part = Callable[[str, Places], Places]


def matches(pattern: str, name: str) -> bool | None:
    r"""Whether a module's name ends in a match of the pattern, as PEFT asks: ``(.*\.)?(pattern)$``.

    Returns:
        ``None`` where the pattern uses more than is understood here, or is too long.

    Examples:
        >>> matches("q_proj", "model.layers.0.q_proj"), matches("proj", "model.layers.0.q_proj")
        (True, False)
        >>> matches(r"layers\.(0|1)\..*_proj", "model.layers.1.self_attn.v_proj")
        True
        >>> matches("(a+)+b", "a" * 200), matches("(?=x)y", "y")
        (False, None)
    """
    if len(name) > _LONGEST:
        return None
    part = _compiled(pattern)
    if part is None:
        return None
    starts = {0} | {place + 1 for place, character in enumerate(name) if character == "."}
    return len(name) in part(name, frozenset(starts))


def value_for(patterns: object, name: str) -> tuple[bool, object]:
    """What the first matching pattern of a table gives a module.

    Returns:
        Whether the table could be read that far, and the value; ``None`` where no pattern matches.

    Examples:
        >>> value_for({"k_proj": 2, "q_proj": 7}, "layers.0.q_proj"), value_for({"(?=x)": 1}, "layers.0.q_proj")
        ((True, 7), (False, None))
    """
    for pattern, value in patterns.items() if isinstance(patterns, Mapping) else ():
        found = matches(pattern, name)
        if found is None:
            return False, None
        if found:
            return True, value
    return True, None


@lru_cache(maxsize=256)
def _compiled(pattern: str) -> Part | None:
    if len(pattern) > _LONGEST:
        return None
    try:
        reader = _Reader(pattern)
        whole = reader.alternatives(0)
    except _TooMuchError:
        return None
    return whole if reader.place == len(pattern) else None


class _TooMuchError(Exception):
    """A pattern that is not understood."""


class _Reader:
    """Reads a pattern from left to right."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.place = 0
        self.repeats = 0

    def next(self) -> str:
        return self.pattern[self.place] if self.place < len(self.pattern) else ""

    def take(self) -> str:
        character = self.next()
        if not character:
            raise _TooMuchError
        self.place += 1
        return character

    def alternatives(self, depth: int) -> Part:
        parts = [self.sequence(depth)]
        while self.next() == "|":
            self.take()
            parts.append(self.sequence(depth))
        return parts[0] if len(parts) == 1 else _any_of(parts)

    def sequence(self, depth: int) -> Part:
        parts: list[Part] = []
        while self.next() not in ("", "|", ")"):
            parts.append(self.repeated(depth))
        return _one_after_another(parts)

    def repeated(self, depth: int) -> Part:
        if depth > _DEEPEST:
            raise _TooMuchError
        start = self.place
        part = self.single(depth + 1)
        again = self.next()
        if again in ("*", "+", "?"):
            self.take()
            least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}[again]
        elif again == "{":
            found = re.compile(r"\{([0-9]{1,3})(,?)([0-9]{0,3})\}").match(self.pattern, self.place)
            if found is None or "{" in self.pattern[start : self.place]:  # one inside of another multiplies
                raise _TooMuchError
            self.place = found.end()
            least = int(found[1])
            most = int(found[3]) if found[3] else None if found[2] else least
            self.repeats += max(least, most or 0)
            if self.repeats > _MOST:
                raise _TooMuchError
        else:
            return part
        if self.next() == "?":  # as few as possible: the same matches
            self.take()
        if self.next() in ("*", "+", "{"):
            raise _TooMuchError
        return _times(part, least, most)

    def single(self, depth: int) -> Part:
        character = self.take()
        if character == "(":
            if self.next() == "?":
                if self.pattern[self.place : self.place + 2] != "?:":
                    raise _TooMuchError
                self.place += 2
            inside = self.alternatives(depth)
            if self.take() != ")":
                raise _TooMuchError
            return inside
        if character == ".":
            return _letter(lambda letter: letter != "\n")
        if character == "[":
            return self.group_of_letters()
        if character == "\\":
            return _letter(_escaped(self.take()))
        if character == "^":
            return lambda _, places: places & {0}
        if character == "$":
            return lambda text, places: places & {len(text)}
        if character in "*+?{":
            raise _TooMuchError
        return _letter(lambda letter: letter == character)

    def group_of_letters(self) -> Part:
        end = self.pattern.find("]", self.place + (2 if self.next() == "^" else 1))
        inside = self.pattern[self.place : end]
        if end < 0 or "[" in inside:
            raise _TooMuchError
        self.place = end + 1
        try:  # one class of letters alone cannot take long
            known = re.compile(f"[{inside}]")
        except re.error:
            raise _TooMuchError from None
        return _letter(lambda letter: known.fullmatch(letter) is not None)


def _escaped(character: str) -> Callable[[str], bool]:
    if character in "dwsDWS":
        known = re.compile(f"\\{character}")
        return lambda letter: known.fullmatch(letter) is not None
    if character.isalnum():
        raise _TooMuchError
    return lambda letter: letter == character


def _letter(fits: Callable[[str], bool]) -> Part:
    def part(text: str, places: Places) -> Places:
        return frozenset(place + 1 for place in places if place < len(text) and fits(text[place]))

    return part


def _one_after_another(parts: list[Part]) -> Part:
    def part(text: str, places: Places) -> Places:
        for one in parts:
            if not places:
                break
            places = one(text, places)
        return places

    return part


def _any_of(parts: list[Part]) -> Part:
    def part(text: str, places: Places) -> Places:
        return frozenset().union(*(one(text, places) for one in parts))

    return part


def _times(inner: Part, least: int, most: int | None) -> Part:
    def part(text: str, places: Places) -> Places:
        for _ in range(least):
            places = inner(text, places) if places else places
        found, fresh, count = places, places, least
        while fresh and (most is None or count < most):
            fresh = inner(text, fresh) - found
            found, count = found | fresh, count + 1
        return found

    return part
