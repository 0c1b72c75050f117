"""ONNX files: initializers and constants, read without the onnx package, with their roles from the graph.

Exporters name weights ``onnx::MatMul_123``. The node that uses such a tensor determines what it is: the operator its
orientation, the node's name its role, the node's position its order. External data are read only from inside the
model's folder. The protobuf messages are parsed here: the onnx package would copy all weights into memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from strati.core.errors import BadInputError
from strati.io.checkpoint_file import (
    MAX_DIMENSIONS,
    MAX_TENSORS,
    Hint,
    MappedFile,
    RawCheckpoint,
    Skipped,
    Tensor,
    numpy_dtype,
)
from strati.io.formats.onnx_roles import labels
from strati.io.roles import Role, blocks, role_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_DEPTH = 12
MAX_FIELDS = 4_000_000

_DTYPES = dict(enumerate((
    "float32", "uint8", "int8", "uint16", "int16", "int32", "int64", "string", "bool", "float16", "float64", "uint32",
    "uint64", "complex64", "complex128", "bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2",
    "float8_e5m2fnuz",
), start=1))  # fmt: skip
_TYPED_FIELDS = {4: "float32", 10: "float64", 7: "varint", 5: "varint", 11: "varint", 6: "string"}
_ANONYMOUS = re.compile(r"(onnx::\w+|[0-9]+|\w*constant\w*|val_[0-9]+|initializer_[0-9]+)", re.IGNORECASE)
_OPERATOR = re.compile(r"[./](matmul|gemm|gather|conv|transpose|identity)[^./]*$", re.IGNORECASE)


@dataclass
class Weight:
    """A tensor of the file: its header, and where its bytes are."""

    name: str = ""
    shape: tuple[int, ...] = ()
    type: int = 0
    span: tuple[int, int] | None = None
    stored_as: str = "raw"
    external: dict[str, str] = field(default_factory=dict)
    outside: bool = False


@dataclass
class Node:
    """A node of the graph, as far as weights are concerned."""

    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    name: str = ""
    operator: str = ""
    switches: dict[str, int] = field(default_factory=dict)
    constant: Weight | None = None
    graphs: list[tuple[int, int]] = field(default_factory=list)


@dataclass
class Graph:
    """The weights of a graph by name, in the order of their use, with hints from the graph."""

    weights: dict[str, Weight] = field(default_factory=dict)
    hints: dict[str, Hint] = field(default_factory=dict)


def contents(source: MappedFile) -> RawCheckpoint:
    """Check an ONNX file; the weights stay in the file.

    Raises:
        BadInputError: The file is damaged, lies about a tensor, or keeps data outside its folder.
    """
    wire = Wire(source)
    spans = [
        (start, stop) for number, kind, start, stop in wire.fields(0, source.size) if (number, kind) == (7, 2)
    ]
    if len(spans) != 1:
        raise source.error("holds no graph; no ONNX file, or a damaged one")
    graph = Graph()
    _collect(wire, spans[0], graph, "", {})
    tensors: list[Tensor] = []
    unread: list[Skipped] = []
    places: dict[str, tuple[MappedFile, int, Tensor]] = {}
    for name, weight in graph.weights.items():
        located = _locate(source, name, weight)
        if isinstance(located, str):
            unread.append(Skipped(name, located))
            continue
        home, offset, dtype = located
        tensor = Tensor(name, weight.shape, dtype, prod(weight.shape) * numpy_dtype(dtype).itemsize)
        tensors.append(tensor)
        places[name] = (home, offset, tensor)
    if not tensors and not unread:
        raise source.error("holds no weights; its graph has no initializers or constants")

    def read(name: str) -> NDArray[Any]:
        home, offset, tensor = places[name]
        return home.array(offset, tensor.shape, numpy_dtype(tensor.dtype))

    beside = tuple(dict.fromkeys(home.path for home, _, _ in places.values() if home is not source))
    return RawCheckpoint("onnx", tuple(tensors), read, tuple(unread), hints=graph.hints, files=beside)


def _collect(
    wire: Wire, span: tuple[int, int], graph: Graph, prefix: str, outer: Mapping[str, tuple[str, bool]]
) -> None:
    """Gather the weights of a graph and of the graphs inside its nodes, which see the outer values."""
    if prefix.count("]/") > MAX_DEPTH:
        raise wire.source.error("has graphs nested too deep; not read")
    weights: dict[str, Weight] = {}
    nodes: list[Node] = []
    for number, kind, a, b in wire.fields(*span):
        if (number, kind) == (5, 2):
            weight = _weight(wire, a, b)
            if weight.name in weights:
                raise wire.source.error(f"has two weights named {weight.name}; re-save the file")
            weights[weight.name] = weight
        elif (number, kind) == (1, 2):
            nodes.append(_node(wire, a, b))
        if len(weights) + len(nodes) + len(graph.weights) > MAX_TENSORS:
            raise wire.source.error(
                f"has more than {MAX_TENSORS:,} nodes and weights, the limit; the file is probably corrupt"
            )
    for node in nodes:
        # Constants of fewer than two axes are shapes, indices and switches of the graph, no weights.
        if node.constant is not None and node.outputs and len(node.constant.shape) > 1:
            node.constant.name = node.outputs[0]
            weights.setdefault(node.outputs[0], node.constant)
    sources = _place(nodes, weights, graph, prefix, outer)
    for node in nodes:
        for position, inner in enumerate(node.graphs):
            _collect(wire, inner, graph, f"{prefix}{node.name or node.operator}[{position}]/", sources)


def _place(
    nodes: list[Node],
    weights: dict[str, Weight],
    graph: Graph,
    prefix: str,
    outer: Mapping[str, tuple[str, bool]],
) -> dict[str, tuple[str, bool]]:
    """Order the weights by their first use, and add hints from the nodes that use them.

    Returns:
        For each value of the graph that is a weight: the weight's name, and whether it is turned.
    """
    unique_names = {name: name if name not in graph.weights else f"{prefix}{name}" for name in weights}
    sources = dict(outer) | {name: (unique, False) for name, unique in unique_names.items()}
    shapes = {unique: len(weights[name].shape) for name, unique in unique_names.items()}
    used: dict[str, None] = {}
    for node in nodes:
        for position, input_name in enumerate(node.inputs):
            if input_name not in sources:
                continue
            weight, turned = sources[input_name]
            if node.operator in ("Identity", "Cast", "Transpose", "DequantizeLinear") and position == 0:
                turns = node.operator == "Transpose" and shapes.get(weight) == 2
                for output in node.outputs[:1]:
                    sources.setdefault(output, (weight, turned != turns))
                continue
            hint = _hint(node, position, weight, turned)
            if weight not in graph.hints or (graph.hints[weight].kind is None and hint.kind is not None):
                graph.hints[weight] = hint
            used[weight] = None
    _label_by_flow(nodes, sources, shapes, graph)
    by_unique = {unique: weights[name] for name, unique in unique_names.items()}
    for unique in dict.fromkeys([*(u for u in used if u in by_unique), *by_unique]):
        graph.weights[unique] = by_unique[unique]
    return sources


def _label_by_flow(
    nodes: list[Node], sources: Mapping[str, tuple[str, bool]], shapes: Mapping[str, int], graph: Graph
) -> None:
    """Label the weights of attention and MLPs from the structure of the graph if their names say nothing."""
    flow_labels = labels(nodes, {output_name: weight for output_name, (weight, _) in sources.items()}, shapes)
    names = {weight: graph.hints.get(weight, Hint()).label or weight for weight in flow_labels}
    by_name = blocks(names.values())
    unclear = {w for w, n in names.items() if role_of(n, by_name[n]) is Role.LINEAR}
    if not any(flow_labels[weight].startswith("blocks.") for weight in unclear):
        flow_labels = {weight: label for weight, label in flow_labels.items() if weight in unclear}
    for weight, label in flow_labels.items():
        graph.hints[weight] = replace(graph.hints.get(weight, Hint()), label=label)


def _hint(node: Node, position: int, weight: str, turned: bool) -> Hint:
    label = None
    if _ANONYMOUS.fullmatch(weight) and node.name:
        label = _OPERATOR.sub("", node.name.lstrip("/")) or None
    if node.operator == "MatMul":
        return Hint("linear", transposed=(position == 1) != turned, label=label)
    if node.operator == "Gemm":
        inputs_first = (position == 1) != bool(node.switches.get("transB" if position == 1 else "transA", 0))
        return Hint("linear", transposed=inputs_first != turned, label=label)
    if node.operator in ("Conv", "ConvTranspose", "ConvInteger") and position == 1:
        return Hint("conv", label=label)
    if node.operator == "Gather" and position == 0:
        return Hint("embedding", label=label)
    if node.operator in ("LSTM", "GRU", "RNN") and position in (1, 2):
        kinds = {"LSTM": "lstm", "GRU": "gru", "RNN": "rnn"}
        return Hint(kinds[node.operator], label=label)  # type: ignore[arg-type]
    return Hint(label=label)


def _node(wire: Wire, start: int, stop: int) -> Node:
    node = Node()
    for number, kind, a, b in wire.fields(start, stop):
        if kind != 2:
            continue
        if number == 1:
            node.inputs.append(wire.text(a, b))
        elif number == 2:
            node.outputs.append(wire.text(a, b))
        elif number == 3:
            node.name = wire.text(a, b)
        elif number == 4:
            node.operator = wire.text(a, b)
        elif number == 5:
            _attribute(wire, a, b, node)
    return node


def _attribute(wire: Wire, start: int, stop: int, node: Node) -> None:
    name, switch = "", 0
    for number, kind, a, b in wire.fields(start, stop):
        if (number, kind) == (1, 2):
            name = wire.text(a, b)
        elif (number, kind) == (3, 0):
            switch = a
        elif (number, kind) == (5, 2):
            node.constant = _weight(wire, a, b)
        elif number in (6, 11) and kind == 2:
            node.graphs.append((a, b))
    node.switches[name] = switch


def _weight(wire: Wire, start: int, stop: int) -> Weight:
    """A tensor's header; its bytes stay in the file."""
    weight = Weight()
    shape: list[int] = []
    for number, kind, a, b in wire.fields(start, stop):
        if number == 1:
            shape += wire.numbers(kind, a, b)
        elif (number, kind) == (2, 0):
            weight.type = a
        elif (number, kind) == (8, 2):
            weight.name = wire.text(a, b)
        elif (number, kind) == (9, 2) or number in _TYPED_FIELDS:
            if kind != 2 or (weight.span is not None and b > a):
                weight.stored_as = "pieces"
            else:
                weight.stored_as = "raw" if number == 9 else _TYPED_FIELDS[number]
            weight.span = (a, b)
        elif (number, kind) == (13, 2):
            pair = {n: wire.text(x, y) for n, k, x, y in wire.fields(a, b) if k == 2}
            weight.external[pair.get(1, "")] = pair.get(2, "")
        elif (number, kind) == (14, 0):
            weight.outside = a == 1
    if len(shape) > MAX_DIMENSIONS or any(side >= 2**62 for side in shape):
        raise wire.source.error(
            f"the shape of {weight.name} is absurd; corrupt: the header does not match the data"
        )
    weight.shape = tuple(shape)
    return weight


def _locate(source: MappedFile, name: str, weight: Weight) -> tuple[MappedFile, int, str] | str:
    """The file, offset and dtype of a weight; or the reason why it is not read."""
    dtype = _DTYPES.get(weight.type)
    if dtype is None or dtype == "string":
        return f"dtype {dtype or weight.type} is not analysed"
    needed = prod(weight.shape) * numpy_dtype(dtype).itemsize
    if weight.outside:
        return (*_external(source, name, weight, needed), dtype)
    start, stop = weight.span or (0, 0)
    if weight.stored_as in ("pieces", "varint", "string") or (
        weight.stored_as != "raw" and weight.stored_as != dtype
    ):
        return f"{dtype} kept as a list of numbers; save the model with raw_data"
    if stop - start != needed:
        raise source.error(
            f"{name} of shape {weight.shape[:8]} and dtype {dtype} cannot fill its {stop - start:,} bytes;"
            " corrupt: the header does not match the data"
        )
    return source, start, dtype


def _external(source: MappedFile, name: str, weight: Weight, needed: int) -> tuple[MappedFile, int]:
    """Data in another file: it must be a plain path below the model's folder, and no link."""
    location = weight.external.get("location", "")
    path = PurePosixPath(location)
    if not location or path.is_absolute() or ".." in path.parts or "\0" in location or "\\" in location:
        raise source.error(f"keeps {name} at {location or 'no place'}, outside the model's folder; refused")
    folder = source.path.parent
    place = folder
    for part in path.parts:
        place = place / part
        if place.is_symlink():
            raise source.error(
                f"keeps {name} at {location}, which is a link; refused, put the file itself there"
            )
    if not place.exists():
        raise source.error(f"keeps {name} at {location}, which is missing; download it beside the model")
    home = _home(source, place)
    numbers = {key: weight.external.get(key, "") for key in ("offset", "length")}
    for key, text in numbers.items():
        if text and not (text.isascii() and text.isdigit() and len(text) < 19):
            raise source.error(f"gives {name} the {key} {text}, which is not a number; damaged")
    offset = int(numbers["offset"] or 0)
    length = int(numbers["length"] or needed)
    if length != needed:
        raise source.error(
            f"{name} needs {needed:,} bytes of {location}, the file gives it {length:,};"
            " corrupt: the header does not match the data"
        )
    try:
        home.check(offset, needed)
    except BadInputError:
        raise source.error(f"{name} ends beyond the end of {location}; download it again") from None
    return home, offset


def _home(source: MappedFile, place: Path) -> MappedFile:
    """The same file is opened once."""
    if place not in source.opened:
        source.opened[place] = MappedFile(place)
    home: MappedFile = source.opened[place]
    return home


class Wire:
    """A file of protocol-buffer messages: fields by number, and where their bytes are. Nothing is copied."""

    def __init__(self, source: MappedFile) -> None:
        self.source = source
        self.data = source.view
        self.fields_seen = 0

    def fields(self, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        """The fields of a message: number, wire type, and value and 0 (a number) or the range of its bytes.

        Raises:
            BadInputError: The bytes are no message.
        """
        position = start
        while position < stop:
            self.fields_seen += 1
            if self.fields_seen > MAX_FIELDS:
                raise self.source.error("has more parts than any real file would; not read")
            key, position = self.varint(position, stop)
            number, kind = key >> 3, key & 7
            if number == 0 or number > 1 << 20:
                raise self._damaged()
            if kind == 0:
                argument, position = self.varint(position, stop)
                yield number, kind, argument, 0
            elif kind in (1, 5):
                size = 8 if kind == 1 else 4
                if position + size > stop:
                    raise self._damaged()
                yield number, kind, position, position + size
                position += size
            elif kind == 2:
                length, position = self.varint(position, stop)
                if length > stop - position:
                    raise self.source.error(
                        f"truncated or damaged: a part claims {length:,} bytes, {stop - position:,} are there"
                    )
                yield number, kind, position, position + length
                position += length
            else:
                raise self._damaged()

    def varint(self, position: int, stop: int) -> tuple[int, int]:
        """A number of variable length, and where it ends."""
        number = shift = 0
        while True:
            if position >= stop or shift > 63:
                raise self._damaged()
            byte = self.data[position]
            position += 1
            number |= (byte & 0x7F) << shift
            if byte < 0x80:
                return number, position
            shift += 7

    def text(self, start: int, stop: int, limit: int = 65_536) -> str:
        """A string field."""
        if stop - start > limit:
            raise self.source.error(
                f"has a name of {stop - start:,} bytes; corrupt: the header does not match the data"
            )
        return str(self.data[start:stop], "utf-8", "replace")

    def numbers(self, kind: int, start: int, stop: int) -> list[int]:
        """A repeated number, packed or single."""
        if kind == 0:
            return [start]
        values: list[int] = []
        position = start
        while position < stop:
            if len(values) > 1_000:
                raise self._damaged()
            number, position = self.varint(position, stop)
            values.append(number)
        return values

    def _damaged(self) -> Exception:
        return self.source.error("its parts do not fit together; no ONNX file, or a damaged one")
