"""A pickle machine that cannot run code: it builds plain containers and the few things given to it.

Every opcode is interpreted here; Python's own unpickler is never called. A name that the pickle asks for
is looked up in a table and nowhere else; what is not in the table is refused and named.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

MAX_STEPS = 6_000_000
MAX_BYTES = 64_000_000  # texts and byte strings together: the weights are not among them
MAX_ITEMS = 1_500_000  # values built and stored: about 200 MB of them at worst; a tensor takes about 25


class RefusedError(Exception):
    """The pickle asks for something that is not in the table; the message is its full name."""


class BrokenError(Exception):
    """The bytes are not a pickle, or a damaged one."""


@dataclass(frozen=True)
class PickledName:
    """A thing that a pickle may ask for: a name, and what calling it does (``None``: it cannot be called)."""

    name: str
    call: Callable[..., Any] | None = None


_MARK = object()


class Machine:
    """Interprets one pickle after another from a buffer.

    Args:
        data: The buffer.
        names: What a pickle may ask for, by ``module.name``.
        persistent: Called with a persistent id (torch's storages).
    """

    def __init__(
        self,
        data: bytes | memoryview,
        names: Mapping[str, PickledName],
        persistent: Callable[[Any], Any] | None = None,
    ) -> None:
        self.data = memoryview(data)
        self.position = 0
        self.names = names
        self.persistent = persistent
        self.steps = 0
        self.items = 0
        self.taken = 0

    def load(self) -> Any:
        """The next object.

        Raises:
            RefusedError: It asks for a name that is not allowed.
            BrokenError: It is damaged, or larger than any honest one.
        """
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        operations = _OPERATIONS
        try:
            while True:
                code = self.data[self.position]
                self.position += 1
                self.steps += 1
                if code == 0x2E:  # STOP
                    return self.stack.pop()
                if self.steps > MAX_STEPS or self.items > MAX_ITEMS:
                    raise BrokenError("it has more steps than any real file would")
                operation = operations.get(code)
                if operation is None:
                    raise BrokenError(f"it has an unknown instruction 0x{code:02x}")
                operation(self)
        except (IndexError, struct.error):
            raise BrokenError("it ends too early or pops an empty stack") from None
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError):
            raise BrokenError("its instructions contradict each other") from None

    def take(self, count: int) -> memoryview:
        """The next ``count`` bytes."""
        if count < 0 or self.position + count > len(self.data):
            raise BrokenError("it ends too early")
        self.taken += count
        if self.taken > MAX_BYTES:
            raise BrokenError("it holds more text than any real file would")
        piece = self.data[self.position : self.position + count]
        self.position += count
        return piece

    def number(self, form: str) -> int:
        """The next number of a struct format."""
        (value,) = struct.unpack(form, self.take(struct.calcsize(form)))
        return int(value)

    def line(self) -> str:
        """The next line of text."""
        window = bytes(self.data[self.position : self.position + 4096])
        end = window.find(b"\n")
        if end < 0:
            raise BrokenError("it has a line without end")
        self.position += end + 1
        return window[:end].decode("utf-8", "replace")

    def push(self, value: Any) -> None:
        """Put a value on the stack."""
        self.items += 1
        self.stack.append(value)

    def to_mark(self) -> list[Any]:
        """Everything above the topmost mark, the mark removed."""
        stack = self.stack
        for index in range(len(stack) - 1, -1, -1):
            if stack[index] is _MARK:
                above = stack[index + 1 :]
                del stack[index:]
                return above
        raise BrokenError("it lacks a mark")

    def find(self, module: str, name: str) -> PickledName:
        """Look a name up in the table."""
        full = f"{module}.{name}"
        if full not in self.names:
            raise RefusedError(full)
        return self.names[full]


def _hashable(key: Any) -> Any:
    """Only keys whose hash is cheap: nested tuples that share parts take exponential time to hash."""
    if isinstance(key, tuple) and all(isinstance(k, str | int | float | bytes) for k in key):
        return key
    if key is None or isinstance(key, str | int | float | bytes | PickledName):
        return key
    raise BrokenError("it has a table whose key is not plain")


def _set_items(m: Machine, pairs: list[Any]) -> None:
    table = m.stack[-1]
    if not isinstance(table, dict) or len(pairs) % 2:
        raise BrokenError("it sets an item of something that is not a table")
    for key, value in zip(pairs[::2], pairs[1::2], strict=True):
        table[_hashable(key)] = value


def _append(m: Machine, values: list[Any]) -> None:
    target = m.stack[-1]
    if not isinstance(target, list):
        raise BrokenError("it appends to something that is not a list")
    target.extend(values)


def _add(m: Machine, values: list[Any]) -> None:
    target = m.stack[-1]
    if not isinstance(target, set):
        raise BrokenError("it adds to something that is not a set")
    target.update(_hashable(v) for v in values)


def _empty_set(m: Machine) -> None:
    m.items += 3  # an empty set takes as much memory as four other values
    m.push(set())


def _dict(m: Machine) -> None:
    pairs = m.to_mark()
    m.push({})
    _set_items(m, pairs)


def _reduce(m: Machine) -> None:
    arguments = m.stack.pop()
    function = m.stack.pop()
    if not isinstance(function, PickledName) or not isinstance(arguments, tuple):
        raise BrokenError("it calls something that cannot be called")
    if function.call is None:
        raise RefusedError(f"a call of {function.name}")
    m.push(function.call(*arguments))


def _build(m: Machine) -> None:
    # The state of an OrderedDict is torch's `_metadata`; nothing else in the table has a state.
    m.stack.pop()
    if not isinstance(m.stack[-1], dict):
        raise BrokenError("it sets the state of something that has none")


def _newobj(m: Machine) -> None:
    _reduce(m)


def _newobj_ex(m: Machine) -> None:
    if m.stack.pop() != {}:
        raise BrokenError("it builds an object by keywords")
    _reduce(m)


def _global(m: Machine) -> None:
    module = m.line()
    m.push(m.find(module, m.line()))


def _stack_global(m: Machine) -> None:
    name, module = m.stack.pop(), m.stack.pop()
    if not isinstance(name, str) or not isinstance(module, str):
        raise BrokenError("it asks for a name that is not text")
    m.push(m.find(module, name))


def _inst(m: Machine) -> None:
    module = m.line()
    raise RefusedError(f"{module}.{m.line()}")


def _obj(m: Machine) -> None:
    above = m.to_mark()
    raise RefusedError(above[0].name if above and isinstance(above[0], PickledName) else "an object")


def _extension(m: Machine) -> None:
    raise RefusedError("an extension code")


def _persistent(m: Machine) -> None:
    if m.persistent is None:
        raise RefusedError("a persistent object")
    m.push(m.persistent(m.stack.pop()))


def _persistent_line(m: Machine) -> None:
    raise RefusedError(f"the persistent object {m.line()}")


def _get(m: Machine, index: int) -> None:
    if index not in m.memo:
        raise BrokenError("it recalls what it never stored")
    m.push(m.memo[index])


def _put(m: Machine, index: int) -> None:
    if index < 0 or m.stack[-1] is _MARK:
        raise BrokenError("it stores what cannot be stored")
    m.items += 1
    m.memo[index] = m.stack[-1]


def _text(raw: memoryview) -> str:
    return bytes(raw).decode("utf-8", "surrogatepass")


def _int_line(m: Machine) -> None:
    text = m.line()
    m.push({"00": False, "01": True}[text] if text in ("00", "01") else int(text))


def _string_line(m: Machine) -> None:
    text = m.line()
    if len(text) < 2 or text[0] != text[-1] or text[0] not in "'\"":
        raise BrokenError("it has an unquoted text")
    m.push(text[1:-1])


def _tuple(m: Machine, count: int) -> None:
    if len(m.stack) < count:
        raise BrokenError("it pops an empty stack")
    values = tuple(m.stack[-count:])
    if _MARK in m.stack[-count:]:
        raise BrokenError("it puts a mark into a tuple")
    del m.stack[-count:]
    m.push(values)


def _pop(m: Machine) -> None:
    m.stack.pop()


def _long(m: Machine, count: int) -> None:
    if count > 4096:
        raise BrokenError("it has a number of thousands of digits")
    m.push(int.from_bytes(m.take(count), "little", signed=True))


_OPERATIONS: dict[int, Callable[[Machine], Any]] = {
    ord("("): lambda m: m.push(_MARK),
    ord("0"): _pop,
    ord("1"): lambda m: m.to_mark(),
    ord("2"): lambda m: m.push(m.stack[-1]),
    0x80: lambda m: m.take(1),  # PROTO
    0x95: lambda m: m.take(8),  # FRAME
    ord("N"): lambda m: m.push(None),
    0x88: lambda m: m.push(True),
    0x89: lambda m: m.push(False),
    ord("I"): _int_line,
    ord("L"): lambda m: m.push(int(m.line().rstrip("L"))),
    ord("J"): lambda m: m.push(m.number("<i")),
    ord("K"): lambda m: m.push(m.take(1)[0]),
    ord("M"): lambda m: m.push(m.number("<H")),
    0x8A: lambda m: _long(m, m.take(1)[0]),
    0x8B: lambda m: _long(m, m.number("<i")),
    ord("F"): lambda m: m.push(float(m.line())),
    ord("G"): lambda m: m.push(struct.unpack(">d", m.take(8))[0]),
    ord("S"): _string_line,
    ord("V"): lambda m: m.push(m.line()),
    ord("T"): lambda m: m.push(bytes(m.take(m.number("<i"))).decode("latin-1")),
    ord("U"): lambda m: m.push(bytes(m.take(m.take(1)[0])).decode("latin-1")),
    ord("X"): lambda m: m.push(_text(m.take(m.number("<I")))),
    0x8C: lambda m: m.push(_text(m.take(m.take(1)[0]))),
    0x8D: lambda m: m.push(_text(m.take(m.number("<Q")))),
    ord("B"): lambda m: m.push(bytes(m.take(m.number("<I")))),
    ord("C"): lambda m: m.push(bytes(m.take(m.take(1)[0]))),
    0x8E: lambda m: m.push(bytes(m.take(m.number("<Q")))),
    0x96: lambda m: m.push(bytes(m.take(m.number("<Q")))),
    ord("}"): lambda m: m.push({}),
    ord("]"): lambda m: m.push([]),
    ord(")"): lambda m: m.push(()),
    0x8F: _empty_set,
    ord("d"): _dict,
    ord("l"): lambda m: m.push(m.to_mark()),
    ord("t"): lambda m: m.push(tuple(m.to_mark())),
    0x85: lambda m: _tuple(m, 1),
    0x86: lambda m: _tuple(m, 2),
    0x87: lambda m: _tuple(m, 3),
    0x91: lambda m: m.push(frozenset(_hashable(v) for v in m.to_mark())),
    ord("a"): lambda m: _append(m, [m.stack.pop()]),
    ord("e"): lambda m: _append(m, m.to_mark()),
    ord("s"): lambda m: _set_items(m, [m.stack.pop(), m.stack.pop()][::-1]),
    ord("u"): lambda m: _set_items(m, m.to_mark()),
    0x90: lambda m: _add(m, m.to_mark()),
    ord("g"): lambda m: _get(m, int(m.line())),
    ord("h"): lambda m: _get(m, m.take(1)[0]),
    ord("j"): lambda m: _get(m, m.number("<I")),
    ord("p"): lambda m: _put(m, int(m.line())),
    ord("q"): lambda m: _put(m, m.take(1)[0]),
    ord("r"): lambda m: _put(m, m.number("<I")),
    0x94: lambda m: _put(m, len(m.memo)),
    ord("c"): _global,
    0x93: _stack_global,
    ord("R"): _reduce,
    ord("b"): _build,
    0x81: _newobj,
    0x92: _newobj_ex,
    ord("i"): _inst,
    ord("o"): _obj,
    0x82: _extension,
    0x83: _extension,
    0x84: _extension,
    ord("Q"): _persistent,
    ord("P"): _persistent_line,
}
