"""From tensors to layers: each weight matrix with its role, its block and the view of the tensor it is.

Every tensor is either one or more layers, with the view named, or listed as skipped with its reason.
What a name means is decided in ``roles.py``; how a tensor is cut, in ``views.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.network import views
from strati.network.contents import Hint, Skipped, Tensor
from strati.network.roles import Role, blocks, modules, role_of
from strati.network.views import View

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.network.open import Network


@dataclass(frozen=True)
class Layer:
    """One weight matrix, or the slices of one kernel, of a network. Its values are read when asked for.

    Attributes:
        name: The tensor's name, with ``[q]`` or ``[3]`` behind it where it is a part of the tensor.
        role: What it does.
        block: The block it belongs to, if its name says so.
        kind: ``linear``, ``conv``, ``depthwise``, ``embedding``, ``lstm``, ``gru``, ``rnn`` or ``stack``.
        shape: Rows and columns of one matrix.
        dtype: The dtype it is stored in.
        view: Which matrix of the tensor this is.
        parameters: Number of its entries.
        quantised: Stored as a lossy code.
        tensor: The name of the tensor it is part of.
        count: How many matrices :meth:`matrices` yields.
    """

    name: str
    role: Role
    block: int | None
    kind: str
    shape: tuple[int, int]
    dtype: str
    view: str
    parameters: int
    quantised: bool
    tensor: str
    count: int
    network: Network = field(repr=False, compare=False)
    cut: View = field(repr=False)

    def matrices(self) -> Iterator[NDArray[Any]]:
        """The matrices one at a time, in their own dtype; views of the file where it stores them plainly."""
        return self.cut.matrices(self.network.read(self.tensor))


def plan(
    network: Network, *, split_qkv: bool, flatten: bool
) -> tuple[tuple[Layer, ...], tuple[Skipped, ...]]:
    """Every tensor as layers or as skipped, in the network's order."""
    names = _Names(network)
    layers: list[Layer] = []
    skipped = list(network.contents.unread)
    for tensor in network.tensors:
        if tensor.name in network.ties:
            skipped.append(Skipped(tensor.name, f"tied to {network.ties[tensor.name]}, counted there"))
            continue
        reason = _unfit(tensor)
        if reason is not None:
            skipped.append(Skipped(tensor.name, reason))
            continue
        hint = network.contents.hints.get(tensor.name, Hint())
        kind, whole = _whole(names, tensor, hint, flatten)
        role = names.role(tensor, kind)
        for suffix, view, part in _parts(names, tensor, role, kind, whole, split_qkv):
            layers.append(
                Layer(
                    tensor.name + suffix,
                    part,
                    names.blocks[tensor.name],
                    kind,
                    (view.rows, view.cols),
                    tensor.dtype,
                    view.text,
                    view.rows * view.cols * view.count,
                    tensor.quantised,
                    tensor.name,
                    view.count,
                    network,
                    view,
                )
            )
    return tuple(layers), tuple(skipped)


def ties(network: Network) -> Mapping[str, str]:
    """Tensors that are another one again: by shared storage, or embeddings and heads equal byte for byte."""
    names = _Names(network)
    tied = dict(network.contents.ties)
    _prefer_embeddings(names, tied)
    alike: dict[tuple[tuple[int, ...], str], list[Tensor]] = {}
    for tensor in network.tensors:
        # GGUF leaves a tied head out by itself, and dequantising both to compare them would cost memory.
        plain = tensor.floating and not tensor.quantised
        if tensor.name not in tied and len(tensor.shape) == 2 and tensor.size > 1 and plain:
            role = names.role(tensor, "linear")
            if role in (Role.EMBEDDING, Role.HEAD):
                alike.setdefault((tensor.shape, tensor.dtype), []).append(tensor)
    for group in alike.values():
        group.sort(key=lambda t: names.role(t, "linear") is Role.HEAD)  # an embedding counts before a head
        for position, tensor in enumerate(group):
            for earlier in group[:position]:
                if earlier.name not in tied and _equal(network, earlier.name, tensor.name):
                    tied[tensor.name] = earlier.name
                    break
    return tied


def _prefer_embeddings(names: _Names, tied: dict[str, str]) -> None:
    """Where a head comes before the embedding it shares its weights with, let the embedding count."""
    groups: dict[str, list[str]] = {}
    for name, first in tied.items():
        groups.setdefault(first, []).append(name)
    for first, others in groups.items():
        if names.by_role(first) is Role.EMBEDDING:
            continue
        better = next((name for name in others if names.by_role(name) is Role.EMBEDDING), None)
        if better is not None:
            del tied[better]
            for name in [first, *(other for other in others if other != better)]:
                tied[name] = better


def _equal(network: Network, a: str, b: str) -> bool:
    """Whether two tensors hold the same bytes and are not one constant; stops at the first difference."""
    first, second = network.read(a), network.read(b)
    rows = max(1, 1_000_000 // max(1, first.shape[1]))
    varied = False
    for start in range(0, first.shape[0], rows):
        x, y = first[start : start + rows], second[start : start + rows]
        if x.tobytes() != y.tobytes():
            return False
        varied = varied or bool(np.any(x != first[0, 0]))
    return varied


def _unfit(tensor: Tensor) -> str | None:
    """Why a tensor is no weight matrix, or ``None``."""
    if 0 in tensor.shape:
        return "empty: one of its sides is 0"
    if len(tensor.shape) == 0:
        return "a single number"
    if not tensor.floating:
        return f"dtype {tensor.dtype} is not analysed"
    if len(tensor.shape) == 1:
        return "one dimension (a bias, norm or scale)"
    if len(tensor.shape) > 2 and tensor.size == max(tensor.shape):
        return f"one dimension in the shape {tensor.shape[:8]}"
    return None


def _whole(names: _Names, tensor: Tensor, hint: Hint, flatten: bool) -> tuple[str, View]:
    """The kind of a tensor and the view of all of it (of a stack: of its first matrix)."""
    shape = tensor.shape
    kind = hint.kind
    gates = _gates(names, tensor) if kind is None else {"lstm": 4, "gru": 3, "rnn": 1}.get(kind, 0)
    if gates and len(shape) == 2:
        return {4: "lstm", 3: "gru", 1: "rnn"}[gates], views.gates(shape, gates, inputs_first=hint.transposed)
    if gates:
        return {4: "lstm", 3: "gru", 1: "rnn"}[gates], views.part_of_stack(shape, 0, "direction")
    if hint.merge is not None:
        return "linear", views.merged(shape, *hint.merge)
    if kind == "depthwise":
        return kind, views.depthwise(shape, inputs_first=hint.transposed)
    if len(shape) == 2:
        embedding = names.role(tensor, "linear") is Role.EMBEDDING or kind == "embedding"
        turned = hint.transposed or names.conv1d(tensor.name)
        view = views.transposed(shape) if turned and not embedding else views.as_stored(shape)
        return "embedding" if embedding else "linear", view
    if (
        all(side == 1 for side in shape[:-2])
        and kind != "conv"
        and names.role(tensor, "linear") is Role.EMBEDDING
    ):
        return "embedding", views.as_stored(shape)
    if kind == "stack" or (kind is None and len(shape) == 3 and not _is_kernel(names, tensor)):
        return "stack", views.part_of_stack(shape, 0, "matrix")
    if kind is None and len(shape) > 5:
        return "stack", views.part_of_stack(shape, 0, "matrix")
    return "conv", views.kernel(shape, inputs_first=hint.transposed, flatten=flatten)


def _is_kernel(names: _Names, tensor: Tensor) -> bool:
    """Whether three axes are a 1-D convolution ``(out, in, k)`` rather than a stack of matrices ``(n, out, in)``."""
    words = " ".join(modules(names.label(tensor.name)))
    if re.search(r"expert|moe|stack|exps", words):
        return False
    if re.search(r"conv|downsample", words):
        return True
    bias = names.shape(_bias_name(tensor.name))
    if bias is not None:
        return bias == tensor.shape[:1]
    return tensor.shape[2] <= 16 and tensor.shape[2] < min(tensor.shape[:2])


def _gates(names: _Names, tensor: Tensor) -> int:
    """Gates of a torch recurrent layer: the recurrent matrix is gates x hidden by hidden."""
    found = re.search(r"weight_(ih|hh)(_l[0-9]+(?:_reverse)?)?$", tensor.name)
    if not found or len(tensor.shape) != 2:
        return 0
    recurrent = names.shape(tensor.name[: found.start()] + f"weight_hh{found[2] or ''}") or tensor.shape
    if len(recurrent) != 2 or recurrent[1] == 0 or recurrent[0] != tensor.shape[0]:
        return 0
    ratio, rest = divmod(recurrent[0], recurrent[1])
    return ratio if rest == 0 and ratio in (1, 3, 4) else 0


def _bias_name(name: str) -> str:
    return re.sub(r"(weight|kernel)(:0)?$", r"bias\2", name)


_QKV = (Role.QUERY, Role.KEY, Role.VALUE)


def _parts(
    names: _Names, tensor: Tensor, role: Role, kind: str, whole: View, split_qkv: bool
) -> list[tuple[str, View, Role]]:
    """The layers that a tensor makes up: suffix of the name, view, role."""
    stacked = whole.text.endswith("stacked in one tensor")
    if stacked:
        what = (
            "direction"
            if kind in ("lstm", "gru", "rnn")
            else "expert"
            if "expert" in tensor.name
            else "matrix"
        )
        many = prod(tensor.shape[:-2])
        return [(f"[{i}]", views.part_of_stack(tensor.shape, i, what), role) for i in range(many)]
    if role is Role.QKV and split_qkv and kind == "linear":
        parts = _split(names, tensor, whole)
        if parts:
            return [(f"[{'qkv'[i]}]", view, _QKV[i]) for i, view in enumerate(parts)]
    return [("", whole, role)]


def _split(names: _Names, tensor: Tensor, whole: View) -> list[View]:
    """The three views of a fused matrix; none where the file does not say how it is fused."""
    word = modules(tensor.name)[-1]
    heads, groups, width = names.heads()
    if word == "query_key_value":  # ordered head by head: needs the number of heads
        if heads and groups == heads and whole.rows % (3 * heads) == 0:
            return [views.part_of_heads(whole, i, heads) for i in range(3)]
        return []
    if heads and groups and groups != heads:
        width = width or whole.rows // (heads + 2 * groups)
        sizes = (heads * width, groups * width, groups * width)
    elif whole.rows % 3 == 0:
        sizes = (whole.rows // 3,) * 3
    else:
        return []
    if sum(sizes) != whole.rows or word in ("to_kv", "kv", "kv_proj", "kv_a_proj_with_mqa", "kv_b_proj"):
        return []
    return [views.part_of_qkv(whole, i, sizes) for i in range(3)]


class _Names:
    """What the names and shapes of a network say together."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.hints = network.contents.hints
        self.shapes = {tensor.name: tensor.shape for tensor in network.tensors}
        labels = {name: self.label(name) for name in self.shapes}
        by_label = blocks(labels.values())
        self.blocks = {name: by_label[label] for name, label in labels.items()}
        self._siblings: dict[str, set[str]] = {}
        for label in labels.values():
            words = modules(label)
            self._siblings.setdefault(".".join(words[:-1]), set()).add(words[-1] if words else "")
        self._roles: dict[str, Role] = {}
        self._classifiers = self._last_of_classifiers()
        self._conv1d = any(
            modules(name)[-1:] == ["c_attn"] and len(shape) == 2 and shape[1] == 3 * shape[0] > 0
            for name, shape in self.shapes.items()
        )

    def label(self, name: str) -> str:
        hint = self.hints.get(name)
        return hint.label if hint is not None and hint.label is not None else name

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self.shapes.get(name)

    def role(self, tensor: Tensor, kind: str) -> Role:
        if kind in ("conv", "depthwise"):
            return Role.CONV
        if kind in ("lstm", "gru", "rnn"):
            return Role.LINEAR
        return self.by_role(tensor.name)

    def by_role(self, name: str) -> Role:
        if name not in self._roles:
            hint = self.hints.get(name)
            label = self.label(name)
            words = modules(label)
            siblings = self._siblings.get(".".join(words[:-1]), set())
            role = role_of(label, self.blocks[name], siblings)
            if role in (Role.LINEAR, Role.HEAD) and self._classifiers:
                role = Role.HEAD if name in self._classifiers else Role.LINEAR
            if hint is not None and hint.kind == "embedding":
                role = Role.EMBEDDING
            self._roles[name] = role
        return self._roles[name]

    def conv1d(self, name: str) -> bool:
        """GPT-2 stores its linear maps inputs first; its ``c_attn`` (d by 3d) gives it away."""
        return self._conv1d and modules(name)[-1:] in (["c_attn"], ["c_proj"], ["c_fc"], ["q_attn"])

    def heads(self) -> tuple[int, int, int]:
        """Heads, key-value heads and width of a head by ``config.json``; 0 where it does not say."""
        config: Mapping[str, Any] = self.network.config or {}

        def number(*keys: str) -> int:
            for key in keys:
                value = config.get(key)
                if type(value) is int and 0 < value < 2**20:
                    return value
            return 0

        heads = number("num_attention_heads", "n_head", "num_heads")
        return heads, number("num_key_value_heads", "num_kv_heads") or heads, number("head_dim")

    def _last_of_classifiers(self) -> set[str]:
        """The classifier of a convolutional network: its last matrix, if named like one or the only one.

        Empty where this rule does not apply, so that the name alone decides.
        """
        convs = any(len(shape) == 4 for shape in self.shapes.values())
        flat = [
            name
            for name, shape in self.shapes.items()
            if len(shape) == 2
            and min(shape) > 0
            and role_of(self.label(name), self.blocks[name]) in (Role.LINEAR, Role.HEAD)
        ]
        if not convs or not flat:
            return set()
        last = flat[-1]
        words = modules(self.label(last))
        named = any(
            re.fullmatch(r"classifiers?|heads?|fc[0-9]*|linear|logits|predictions?|output", w) for w in words
        )
        return {last} if named or len(flat) == 1 else set()
