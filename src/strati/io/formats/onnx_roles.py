"""Roles of weights from the structure of an ONNX graph, for files with meaningless names (``node_MatMul_26``).

Attention is a softmax between two products of activations: query and key feed the first product, the value feeds the
second, and the next linear map is the output. Two linear maps with a nonlinearity between them, whose result is added
to the residual stream, are an MLP. Blocks are counted by their attentions. The roles are returned as names that
:mod:`strati.io.roles` understands (``blocks.3.attn.q_proj``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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


@dataclass
class _Linear:
    weight: str
    position: int
    source: str


@dataclass
class _Labels:
    """Labels by weight; ``blocks`` holds the position at which each attention ends."""

    labels: dict[str, str] = field(default_factory=dict)
    blocks: list[int] = field(default_factory=list)


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
    labelled = _Labels()
    for position, node in enumerate(nodes):
        if node.operator == "Softmax":
            _attention(flow, position, node, labelled)
        elif node.operator in _FUSED_ATTENTION and len(node.inputs) >= 3:
            projections = [flow.behind(value) for value in node.inputs[:3]]
            _name_attention(flow, position, node.outputs, projections, labelled)
    if not labelled.blocks:
        return {}
    for linear in flow.linears.values():
        _mlp(flow, linear, labelled)
    _ends(flow, labelled)
    return labelled.labels


class _Flow:
    """The graph as who makes and who uses each value."""

    def __init__(
        self, nodes: Sequence[GraphNode], weights: Mapping[str, str], dimensions: Mapping[str, int]
    ) -> None:
        self.nodes, self.weights, self.dimensions = nodes, weights, dimensions
        self.made_by = {name: i for i, node in enumerate(nodes) for name in node.outputs}
        self.used_by: dict[str, list[int]] = {}
        for i, node in enumerate(nodes):
            for name in node.inputs:
                self.used_by.setdefault(name, []).append(i)
        self.linears: dict[int, _Linear] = {}
        for i, node in enumerate(nodes):
            if node.operator in _LINEAR and len(node.inputs) > 1:
                weight_inputs = [name for name in node.inputs[:2] if name in weights]
                if len(weight_inputs) == 1 and dimensions.get(weights[weight_inputs[0]], 0) >= 2:
                    source = node.inputs[1] if node.inputs[0] == weight_inputs[0] else node.inputs[0]
                    self.linears[i] = _Linear(weights[weight_inputs[0]], i, source)

    def activations(self, position: int) -> list[str]:
        """A node's inputs that are neither weights nor constants."""
        return [v for v in self.nodes[position].inputs if v not in self.weights and v in self.made_by]

    def product(self, position: int) -> bool:
        """Whether a node multiplies two activations as matrices."""
        node = self.nodes[position]
        return (
            node.operator in _LINEAR and position not in self.linears and len(self.activations(position)) > 1
        )

    def back(self, nodes: Iterable[int], passes: Callable[[int], bool]) -> Iterator[int]:
        """Nodes from which others get their activations, themselves first; the walk goes on behind those that pass."""
        visited, waiting = set[int](), list(nodes)
        while waiting:
            node = waiting.pop()
            if node not in visited:
                visited.add(node)
                yield node
                if passes(node):
                    waiting += [self.made_by[value] for value in self.activations(node)]

    def behind(self, value: str, allowed: frozenset[str] | None = None) -> list[_Linear]:
        """The linear maps that a value comes from, through allowed operators or anything that is no matrix product."""

        def passes(node: int) -> bool:
            through = allowed is None or self.nodes[node].operator in allowed
            return through and node not in self.linears and not self.product(node)

        return [self.linears[node] for node in self.back(self.makers(value), passes) if node in self.linears]

    def makers(self, value: str) -> list[int]:
        """The node that makes a value, if there is one."""
        return [self.made_by[value]] if value in self.made_by else []

    def in_scores(self, node: int) -> bool:
        """Whether a node only changes scores between their product and the softmax."""
        return self.nodes[node].operator in _SCORES

    def masks(self, softmax: int) -> Iterator[str]:
        """Weights of two axes or more that join the scores between product and softmax."""
        for node in self.back([softmax], lambda n: n == softmax or self.in_scores(n)):
            for value in self.nodes[node].inputs if node == softmax or self.in_scores(node) else ():
                if value in self.weights and self.dimensions.get(self.weights[value], 0) >= 2:
                    yield self.weights[value]

    def ahead(self, values: Sequence[str], allowed: frozenset[str]) -> Iterator[int]:
        """Nodes reached from values through allowed operators; the first others are included."""
        visited, waiting = set[int](), [n for v in values for n in self.used_by.get(v, ())]
        while waiting:
            node = waiting.pop(0)
            if node in visited:
                continue
            visited.add(node)
            yield node
            if self.nodes[node].operator in allowed and node not in self.linears:
                waiting += [n for v in self.nodes[node].outputs for n in self.used_by.get(v, ())]

    def joins_residual(self, linear: _Linear) -> bool:
        """Whether a linear map's result is added to another activation before anything else happens to it."""
        for node in self.ahead(self.nodes[linear.position].outputs, _CARRIED):
            if self.nodes[node].operator == "Add" and len(self.activations(node)) > 1:
                return True
        return False


def _attention(flow: _Flow, position: int, softmax: GraphNode, labelled: _Labels) -> None:
    makers = flow.makers(softmax.inputs[0]) if softmax.inputs else []
    scores = next((n for n in flow.back(makers, flow.in_scores) if flow.product(n)), None)
    carried = _AFTER_SOFTMAX | {"IsNaN"}
    mixed = next((n for n in flow.ahead(softmax.outputs, carried) if flow.product(n)), None)
    if scores is None or mixed is None:
        return
    values = [v for v in flow.activations(mixed) if not _comes_from(flow, v, position)]
    operands = flow.activations(scores)
    projections = [flow.behind(v) for v in (*operands[:2], *values[:1])]
    if len(projections) == 3:
        _name_attention(flow, mixed, flow.nodes[mixed].outputs, projections, labelled)
        for mask in flow.masks(position):
            labelled.labels.setdefault(mask, f"blocks.{len(labelled.blocks) - 1}.attn.mask")


def _comes_from(flow: _Flow, value: str, softmax: int) -> bool:
    """Whether a value is the softmax's result, through dropout and the like."""
    return softmax in flow.back(flow.makers(value), lambda n: flow.nodes[n].operator in _AFTER_SOFTMAX)


def _name_attention(
    flow: _Flow, end: int, results: Sequence[str], projections: list[list[_Linear]], labelled: _Labels
) -> None:
    nearest = [max(linears, key=lambda x: x.position) if linears else None for linears in projections]
    query, key, value = nearest
    if query is None or key is None or value is None:
        return
    crossed = query.source != key.source and query.weight != key.weight
    if not (
        crossed and labelled.blocks
    ):  # cross-attention belongs to the block of the self-attention before it
        labelled.blocks.append(end)
    labelled.blocks[-1] = max(labelled.blocks[-1], end)
    place = f"blocks.{len(labelled.blocks) - 1}.{'cross_attn' if crossed else 'attn'}"
    if query.weight == key.weight == value.weight:
        labelled.labels.setdefault(query.weight, f"{place}.qkv")
    else:
        labelled.labels.setdefault(query.weight, f"{place}.q_proj")
        labelled.labels.setdefault(
            key.weight, f"{place}.{'kv_proj' if key.weight == value.weight else 'k_proj'}"
        )
        labelled.labels.setdefault(value.weight, f"{place}.v_proj")
    after = next((n for n in flow.ahead(results, _SHAPING | {"Concat"}) if n in flow.linears), None)
    if after is not None:
        labelled.labels.setdefault(flow.linears[after].weight, f"{place}.out_proj")


def _mlp(flow: _Flow, last: _Linear, labelled: _Labels) -> None:
    """Name the two or three maps of an MLP by the last of them."""
    before = [end for end in labelled.blocks if end < last.position]
    if not before or last.weight in labelled.labels or not flow.joins_residual(last):
        return
    maker = flow.made_by.get(last.source)
    if maker is None or flow.nodes[maker].operator not in _ELEMENTWISE:
        return
    first = flow.behind(last.source, _ELEMENTWISE)
    weights = {linear.weight for linear in first} - labelled.labels.keys()
    place = f"blocks.{len(before) - 1}.mlp"
    if len(weights) == 1 and len(first) == 1 and _bends(flow, first[0], last):
        labelled.labels[first[0].weight] = f"{place}.fc1"
        labelled.labels[last.weight] = f"{place}.fc2"
    elif len(weights) == 2 and len(first) == 2:
        gates = [linear for linear in first if _bends(flow, linear, last, through_products=False)]
        if len(gates) == 1:
            labelled.labels[gates[0].weight] = f"{place}.gate_proj"
            other = first[1] if first[0] is gates[0] else first[0]
            labelled.labels[other.weight] = f"{place}.up_proj"
            labelled.labels[last.weight] = f"{place}.down_proj"


def _bends(flow: _Flow, first: _Linear, last: _Linear, *, through_products: bool = True) -> bool:
    """Whether there is a nonlinearity on the way from one map to the other."""
    for node in flow.ahead(flow.nodes[first.position].outputs, _ELEMENTWISE):
        operator = flow.nodes[node].operator
        if operator in _NONLINEAR and node < last.position:
            return True
        if operator == "Mul" and not through_products and len(flow.activations(node)) > 1:
            makers = {x.weight for v in flow.activations(node) for x in flow.behind(v, _ELEMENTWISE)}
            if len(makers) > 1 and not _nonlinear_before(flow, node, first):
                return False
    return False


def _nonlinear_before(flow: _Flow, product: int, first: _Linear) -> bool:
    """Whether the branch of ``first`` into a product of two branches holds a nonlinearity."""
    for value in flow.activations(product):
        branch = flow.behind(value, _ELEMENTWISE)
        maker = flow.made_by.get(value)
        if first in branch and maker is not None and flow.nodes[maker].operator in (_NONLINEAR | {"Mul"}):
            return True
    return False


def _ends(flow: _Flow, labelled: _Labels) -> None:
    """The head after the last block, and positions added to the stream before the first."""
    unlabelled = [x for x in flow.linears.values() if x.weight not in labelled.labels]
    if unlabelled:
        last = max(unlabelled, key=lambda x: x.position)
        if last.position > labelled.blocks[-1] and last.position == max(flow.linears):
            labelled.labels[last.weight] = "head"
    for position, node in enumerate(flow.nodes[: labelled.blocks[0]]):
        if node.operator == "Add" and flow.activations(position):
            for value in node.inputs:
                weight = flow.weights.get(value)
                if weight is not None and flow.dimensions.get(weight, 0) >= 2:
                    labelled.labels.setdefault(weight, "pos_embed")
