"""Pickles of tensors and plain containers, loaded by ``pickle.Unpickler`` without running code from the file.

Only names of an allow-list are found, and they are inert stand-ins; any other name is refused and reported. The
opcodes are walked first, because a short pickle can make the plain Unpickler take gigabytes (it allocates its memo up
to the largest index) or run for ever (it hashes nested tuples that share their parts).
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

MAX_WORK = 2_000_000  # opcodes; a tensor takes about 33, an opcode makes an object of at most about 64 bytes
MAX_UNUSUAL_KEYS = 1_000  # tuples and huge integers as keys: their hashes can be made to collide
MAX_BITS = 8192  # of an integer: longer ones cannot be printed
MAX_KEY_SIZE = 64  # entries of a tuple that is a key, inner ones included

_WORK = {"EMPTY_SET": 4, "FROZENSET": 4}  # an empty set takes 216 bytes
_PUT = frozenset({"PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"})
_GET = frozenset({"GET", "BINGET", "LONG_BINGET"})
_TUPLES = frozenset({"TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"})
_KEYS = {
    "SETITEM": slice(1, 2),
    "SETITEMS": slice(1, None, 2),
    "DICT": slice(0, None, 2),
    "ADDITEMS": slice(1, None),
    "FROZENSET": slice(0, None),
}
"""Which of the objects that an opcode takes from the stack are hashed."""


class RefusedError(Exception):
    """The pickle asks for something that is not in the allow-list; the message is its full name."""


class BrokenError(Exception):
    """The bytes are not a pickle, or a damaged one, or would take excessive memory or time."""


class Inert:
    """A stand-in whose state a pickle cannot change."""

    def __setstate__(self, state: object) -> None:
        raise BrokenError("it sets the state of something that has none")


@dataclass(frozen=True)
class PickledName(Inert):
    """A name that a pickle may ask for, and what calling it does (``None``: it cannot be called)."""

    name: str
    function: Callable[..., Any] | None = None

    def __call__(self, *arguments: Any) -> Any:
        """Call the stand-in."""
        if self.function is None:
            raise RefusedError(f"a call of {self.name}")
        return self.function(*arguments)


class PickleStream:
    """Pickles one after another from a buffer.

    Args:
        data: The buffer.
        names: What a pickle may ask for, by ``module.name``.
        persistent: Called with a persistent id (torch's storages).
    """

    def __init__(
        self, data: bytes | memoryview, names: Mapping[str, PickledName], persistent: Callable[[Any], Any]
    ) -> None:
        self._stream = io.BytesIO(data)
        self._names = names
        self._persistent = persistent

    @property
    def position(self) -> int:
        """The number of bytes read."""
        return self._stream.tell()

    def load(self) -> Any:
        """The next object.

        Raises:
            RefusedError: It asks for a name that is not allowed.
            BrokenError: It is damaged, or larger than any honest one.
        """
        start = self.position
        try:
            _check_opcodes(self._stream)
            self._stream.seek(start)
            return _Unpickler(self._stream, self._names, self._persistent).load()
        except (RefusedError, BrokenError):
            raise
        except Exception:  # the Unpickler raises a dozen kinds, none with a message for users
            raise BrokenError("it ends too early, or its instructions contradict each other") from None


class _Unpickler(pickle.Unpickler):
    def __init__(
        self, stream: io.BytesIO, names: Mapping[str, PickledName], persistent: Callable[[Any], Any]
    ) -> None:
        super().__init__(stream, encoding="latin-1")  # text of Python 2
        self._names = names
        self._persistent = persistent

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full not in self._names:
            raise RefusedError(full)
        return self._names[full]

    def persistent_load(self, pid: Any) -> Any:
        return self._persistent(pid)


def _check_opcodes(stream: io.BytesIO) -> None:
    """Follow the stack of one pickle without building anything; of each object only the size as a key is known.

    Raises:
        BrokenError: It has too many opcodes, a memo index beyond their number, or keys that are costly to hash.
    """
    stack: list[int] = []
    marks: list[int] = []
    memo: dict[int, int] = {}
    work = unusual = 0
    for opcode, argument, _ in pickletools.genops(stream):
        name = opcode.name
        work += _WORK.get(name, 1)
        if work > MAX_WORK:
            raise BrokenError("it has more steps than any real file would")
        if name in _PUT:
            index = len(memo) if name == "MEMOIZE" else int(argument or 0)
            if not 0 <= index < work:
                raise BrokenError("its memo has an index beyond the number of its steps")
            memo[index] = stack[-1]
            continue
        if name in _GET:
            stack.append(memo[int(argument or 0)])
            continue
        if name == "MARK":
            marks.append(len(stack))
            continue
        count, marked, pushes = _EFFECTS[name]
        if name == "POP" and marks and marks[-1] == len(stack):
            marks.pop()  # the Unpickler pops a mark that is on top
            continue
        start = (marks.pop() if marked else len(stack)) - count
        if start < (marks[-1] if marks else 0):
            raise BrokenError("it pops an empty stack")
        taken = stack[start:]
        del stack[start:]
        if name in _KEYS:
            sizes = [size for size in taken[_KEYS[name]] if size > 1]
            unusual += len(sizes)
            if unusual > MAX_UNUSUAL_KEYS or any(size > MAX_KEY_SIZE for size in sizes):
                raise BrokenError("it has a table whose keys are not plain")
        if name in _TUPLES:
            stack.append(min(1 + sum(taken), MAX_KEY_SIZE + 1))
        elif name in ("DUP", "BUILD"):
            stack += [taken[0]] * pushes
        elif pushes:
            bits = argument.bit_length() if isinstance(argument, int) else 0
            if bits > MAX_BITS:
                raise BrokenError("it has a number of thousands of digits")
            stack.append(2 if bits > 60 or name == "REDUCE" else 1)


def _effect(opcode: Any) -> tuple[int, bool, int]:
    names = [operand.name for operand in opcode.stack_before]
    marked = "mark" in names
    return names.index("mark") if marked else len(names), marked, len(opcode.stack_after)


_EFFECTS = {opcode.name: _effect(opcode) for opcode in pickletools.opcodes}
"""Of each opcode: how many objects it takes (below the mark), whether it takes all above a mark, how many it pushes."""
