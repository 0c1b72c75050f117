"""The computation of an ONNX file: nodes with all their attributes, constants as arrays, what goes in and comes out.

Read without the onnx package. What the nodes mean is for whoever runs them (``architectures/onnx.py``); the tensors
as weights to look at are ``onnx.py``'s.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.errors import UnsupportedError
from strati.network.contents import numpy_dtype
from strati.network.formats.onnx import Weight, locate, node_words, read_weight
from strati.network.formats.wire import Wire
from strati.network.source import Source

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MOST_NUMBERS = 100_000


@dataclass
class Operation:
    """One node: its operator, the values it takes and gives, and its attributes."""

    operator: str = ""
    name: str = ""
    domain: str = ""
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    attributes: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """What messages call it."""
        return f"{self.operator} {self.name or self.outputs[0]}" if self.outputs else self.operator


@dataclass
class Program:
    """A graph: operations in the order they run, constants by name, names of inputs and outputs."""

    operations: list[Operation] = field(default_factory=list)
    constants: dict[str, NDArray[Any]] = field(default_factory=dict)
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)


def read_program(path: str | Path) -> Program:
    """The graph of an ONNX file.

    Raises:
        UnsupportedError: A constant is of a kind that is not read.
        BadInputError: The file is damaged.
    """
    source = Source(path)
    wire = Wire(source)
    spans = [(a, b) for number, kind, a, b in wire.fields(0, source.size) if (number, kind) == (7, 2)]
    if len(spans) != 1:
        raise source.bad("holds no graph; no ONNX file, or a damaged one")
    found = Program()
    for number, kind, a, b in wire.fields(*spans[0]):
        if kind != 2:
            continue
        if number == 1:
            found.operations.append(_operation(wire, a, b))
        elif number == 5:
            weight = read_weight(wire, a, b)
            found.constants[weight.name] = _values(wire, weight)
        elif number in (11, 12):
            names = found.inputs if number == 11 else found.outputs
            names += [wire.text(x, y) for n, k, x, y in wire.fields(a, b) if (n, k) == (1, 2)]
    found.inputs = [name for name in found.inputs if name not in found.constants]
    return found


def _operation(wire: Wire, start: int, stop: int) -> Operation:
    node = Operation()
    for number, a, b in node_words(wire, start, stop, node):
        if number == 7:
            node.domain = wire.text(a, b)
        elif number == 5:
            name, value = _attribute(wire, a, b)
            node.attributes[name] = value
    return node


def _attribute(wire: Wire, start: int, stop: int) -> tuple[str, Any]:
    """Name and value: a number, text, array, or a list of numbers; ``None`` for what is none of these."""
    name, value, kind_of_value = "", None, 0
    whole: list[int] = []
    real: list[float] = []
    for number, kind, a, b in wire.fields(start, stop):
        if (number, kind) == (1, 2):
            name = wire.text(a, b)
        elif (number, kind) == (2, 5):
            value = struct.unpack("<f", bytes(wire.data[a:b]))[0]
        elif (number, kind) == (3, 0):
            value = _signed(a)
        elif (number, kind) == (4, 2):
            value = wire.text(a, b)
        elif (number, kind) == (5, 2):
            value = _values(wire, read_weight(wire, a, b))
        elif number == 7:
            real += list(np.frombuffer(bytes(wire.data[a:b]), "<f4")) if kind in (2, 5) else []
        elif number == 8:
            whole += [_signed(n) for n in wire.numbers(kind, a, b)]
        elif (number, kind) == (20, 0):
            kind_of_value = a
    if kind_of_value == 7 or (whole and value is None):
        return name, whole
    if kind_of_value == 6 or (real and value is None):
        return name, [float(n) for n in real]
    return name, value


def _values(wire: Wire, weight: Weight) -> NDArray[Any]:
    """The array of a tensor; small lists of whole numbers are read number by number."""
    if weight.stored_as == "varint" and not weight.outside and weight.span is not None:
        numbers: list[int] = []
        position = weight.span[0]
        while position < weight.span[1] and len(numbers) < _MOST_NUMBERS:
            number, position = wire.varint(position, weight.span[1])
            numbers.append(_signed(number))
        return np.array(numbers, np.int64).reshape(weight.shape)
    located = locate(wire.source, weight.name or "a constant", weight)
    if isinstance(located, str):
        raise UnsupportedError(weight.name or "a constant", located)
    home, offset, dtype = located
    return home.array(offset, weight.shape, numpy_dtype(dtype))


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number
