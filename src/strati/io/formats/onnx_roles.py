"""Roles of weights from the structure of an ONNX graph, for files with meaningless names (``node_MatMul_26``).

Attention is a softmax between two products of activations: query and key feed the first product, the value feeds the
second, and the next linear map is the output. Two linear maps with a nonlinearity between them, whose result is added
to the residual stream, are an MLP. Blocks are counted by their attentions. The roles are returned as names that
:mod:`strati.io.roles` understands (``blocks.3.attn.q_proj``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


def _operators(text: str) -> frozenset[str]:
    return frozenset(text.split())


_LINEAR = _operators("MatMul Gemm FusedMatMul")
_FUSED_ATTENTION = _operators("Attention MultiHeadAttention GroupQueryAttention")
_SHAPING = _operators("Transpose Reshape Cast Identity Squeeze Unsqueeze Dropout")
_SCORES = _SHAPING | _operators("Add Sub Mul Div Where Slice Clip Tanh Expand")
_NONLINEAR = _operators(
    "Pow Erf Tanh Sigmoid Relu Gelu LeakyRelu Elu Selu HardSigmoid HardSwish Softplus Mish Swish FastGelu QuickGelu"
    " BiasGelu PRelu Celu"
)
_ELEMENTWISE = _NONLINEAR | _operators("Add Sub Mul Div Sqrt Cast Clip Identity Dropout Split Slice")
_CARRIED = _operators("Add Mul Cast Identity Dropout Reshape Squeeze Unsqueeze")
_AFTER_SOFTMAX = _operators("Dropout Cast Identity Where Mul")


class GraphNode(Protocol):
    """What is needed of a node."""

    inputs: list[str]
    outputs: list[str]
    operator: str


@dataclass(frozen=True)
class _Linear:
    weight: str
    position: int
    source: str


def labels(
    nodes: Sequence[GraphNode], weights: Mapping[str, str], dimensions: Mapping[str, int]
) -> dict[str, str]:
    """A label for each weight whose position in the graph shows its role.

    Args:
        nodes: The graph's nodes, in order.
        weights: Values of the graph that are a weight (also through casts and transposes) -> the weight's name.
        dimensions: Number of axes of each weight.

    Returns:
        Weight -> label; empty where the graph has no attention.
    """
    flow = _Flow(nodes, weights, dimensions)
    for position, node in enumerate(nodes):
        if node.operator == "Softmax" and node.inputs:
            flow.label_softmax(position)
        elif node.operator in _FUSED_ATTENTION and len(node.inputs) >= 3:
            flow.label_attention(position, node.inputs[:3])
    if flow.blocks:
        for linear in flow.linears.values():
            flow.label_mlp(linear)
        flow.label_ends()
    return flow.labels


class _Flow:
    """The graph by producers and consumers of each value, and the labels found so far.

    ``blocks`` holds the position at which each block's attention ends.
    """

    def __init__(
        self, nodes: Sequence[GraphNode], weights: Mapping[str, str], dimensions: Mapping[str, int]
    ) -> None:
        self.nodes, self.weights, self.dimensions = nodes, weights, dimensions
        self.labels: dict[str, str] = {}
        self.blocks: list[int] = []
        self.linears: dict[int, _Linear] = {}
        self._made_by = {name: i for i, node in enumerate(nodes) for name in node.outputs}
        self._used_by: dict[str, list[int]] = {}
        for i, node in enumerate(nodes):
            for name in node.inputs:
                self._used_by.setdefault(name, []).append(i)
            matrices = [name for name in node.inputs[:2] if self._is_matrix(name)]
            if node.operator in _LINEAR and len(node.inputs) > 1 and len(matrices) == 1:
                source = node.inputs[1] if node.inputs[0] == matrices[0] else node.inputs[0]
                if source not in weights:
                    self.linears[i] = _Linear(weights[matrices[0]], i, source)

    def _is_matrix(self, value: str) -> bool:
        return value in self.weights and self.dimensions.get(self.weights[value], 0) >= 2

    def _operands(self, position: int) -> list[str]:
        """A node's inputs that are neither weights nor constants."""
        return [v for v in self.nodes[position].inputs if v not in self.weights and v in self._made_by]

    def _is_product(self, position: int) -> bool:
        """Whether a node multiplies two activations as matrices."""
        linear = self.nodes[position].operator in _LINEAR
        return linear and position not in self.linears and len(self._operands(position)) > 1

    def _back(self, values: Iterable[str], passes: Callable[[int], bool]) -> Iterator[int]:
        """The nodes that values come from; the walk goes on behind those that pass."""
        visited, waiting = set[int](), [self._made_by[value] for value in values if value in self._made_by]
        while waiting:
            node = waiting.pop()
            if node not in visited:
                visited.add(node)
                yield node
                if passes(node):
                    waiting += [self._made_by[value] for value in self._operands(node)]

    def _ahead(self, values: Iterable[str], allowed: frozenset[str]) -> Iterator[int]:
        """Nodes reached from values through allowed operators; the first others are included."""
        visited, waiting = set[int](), [n for v in values for n in self._used_by.get(v, ())]
        while waiting:
            node = waiting.pop(0)
            if node not in visited:
                visited.add(node)
                yield node
                if self.nodes[node].operator in allowed and node not in self.linears:
                    waiting += [n for v in self.nodes[node].outputs for n in self._used_by.get(v, ())]

    def _behind(self, values: Iterable[str], allowed: frozenset[str] | None = None) -> list[_Linear]:
        """The linear maps that values come from, through allowed operators or anything that is no matrix product."""

        def passes(node: int) -> bool:
            through = allowed is None or self.nodes[node].operator in allowed
            return through and node not in self.linears and not self._is_product(node)

        return [self.linears[node] for node in self._back(values, passes) if node in self.linears]

    def label_softmax(self, softmax: int) -> None:
        """Label an attention by its softmax: the product before it is of query and key, the one after it mixes."""
        node = self.nodes[softmax]
        joining = list(self._back(node.inputs[:1], lambda n: self.nodes[n].operator in _SCORES))
        scores = next((n for n in joining if self._is_product(n)), None)
        after = self._ahead(node.outputs, _AFTER_SOFTMAX | {"IsNaN"})
        mixed = next((n for n in after if self._is_product(n)), None)
        if scores is None or mixed is None:
            return
        values = [v for v in self._operands(mixed) if not self._is_softmax(v, softmax)]
        operands = [*self._operands(scores)[:2], *values[:1]]
        if len(operands) == 3:
            self.label_attention(mixed, operands)
            for n in (softmax, *(n for n in joining if self.nodes[n].operator in _SCORES)):
                for mask in (self.weights[v] for v in self.nodes[n].inputs if self._is_matrix(v)):
                    self.labels.setdefault(mask, f"blocks.{len(self.blocks) - 1}.attn.mask")

    def _is_softmax(self, value: str, softmax: int) -> bool:
        """Whether a value is the softmax's result, through dropout and the like."""
        return softmax in self._back([value], lambda n: self.nodes[n].operator in _AFTER_SOFTMAX)

    def label_attention(self, end: int, operands: Sequence[str]) -> None:
        """Label the nearest linear maps behind query, key and value, and the next one after the node ``end``."""
        projections = [max(self._behind([v]), key=lambda x: x.position, default=None) for v in operands]
        query, key, value = projections
        if query is None or key is None or value is None:
            return
        crossed = query.source != key.source and query.weight != key.weight
        if not (crossed and self.blocks):  # cross-attention is in the block of the self-attention before it
            self.blocks.append(end)
        self.blocks[-1] = max(self.blocks[-1], end)
        place = f"blocks.{len(self.blocks) - 1}.{'cross_attn' if crossed else 'attn'}"
        fused = query.weight == key.weight == value.weight
        self.labels.setdefault(query.weight, f"{place}.{'qkv' if fused else 'q_proj'}")
        self.labels.setdefault(key.weight, f"{place}.{'kv_proj' if key.weight == value.weight else 'k_proj'}")
        self.labels.setdefault(value.weight, f"{place}.v_proj")
        after = self._ahead(self.nodes[end].outputs, _SHAPING | {"Concat"})
        output = next((n for n in after if n in self.linears), None)
        if output is not None:
            self.labels.setdefault(self.linears[output].weight, f"{place}.out_proj")

    def label_mlp(self, last: _Linear) -> None:
        """Label the two or three maps of an MLP by the last of them, which is added to the residual stream."""
        before = sum(end < last.position for end in self.blocks)
        carried = self._ahead(self.nodes[last.position].outputs, _CARRIED)
        added = any(self.nodes[n].operator == "Add" and len(self._operands(n)) > 1 for n in carried)
        maker = self._made_by.get(last.source)
        elementwise = maker is not None and self.nodes[maker].operator in _ELEMENTWISE
        if not before or last.weight in self.labels or not added or not elementwise:
            return
        first = self._behind([last.source], _ELEMENTWISE)
        new = {linear.weight for linear in first} - self.labels.keys()
        gates = [linear.weight for linear in first if self._bends(linear, last)]
        words: dict[str, str] = {}
        if len(new) == len(first) == len(gates) == 1:
            words = {gates[0]: "fc1", last.weight: "fc2"}
        elif len(new) == len(first) == 2 and len(gates) == 1:
            (other,) = new - set(gates)
            words = {gates[0]: "gate_proj", other: "up_proj", last.weight: "down_proj"}
        self.labels |= {weight: f"blocks.{before - 1}.mlp.{word}" for weight, word in words.items()}

    def _bends(self, first: _Linear, last: _Linear) -> bool:
        """Whether a nonlinearity acts on the result of a linear map alone, before the last one."""
        for node in self._ahead(self.nodes[first.position].outputs, _ELEMENTWISE):
            if node < last.position and self.nodes[node].operator in _NONLINEAR:
                sources = self._behind(self._operands(node), _ELEMENTWISE)
                if {linear.weight for linear in sources} == {first.weight}:
                    return True
        return False

    def label_ends(self) -> None:
        """Label the head after the last block, and positions added to the stream before the first."""
        last = self.linears[max(self.linears)]
        if last.position > self.blocks[-1]:
            self.labels.setdefault(last.weight, "head")
        for position, node in enumerate(self.nodes[: self.blocks[0]]):
            if node.operator == "Add" and self._operands(position):
                for value in node.inputs:
                    if self._is_matrix(value):
                        self.labels.setdefault(self.weights[value], "pos_embed")
