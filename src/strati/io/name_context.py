"""What the names and shapes of a network say together: roles that depend on their neighbours, heads, Conv1D."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from strati.io.raw_checkpoint import Tensor
from strati.io.roles import Role, blocks, modules, role_of

if TYPE_CHECKING:
    from strati.io.load import Network


class Names:
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
            for depth, word in enumerate(words):
                self._siblings.setdefault(".".join(words[:depth]), set()).add(word)
        self._roles: dict[str, Role] = {}
        self._classifiers = self._last_of_classifiers()
        self._conv1d = any(
            modules(name)[-1:] == ["c_attn"] and len(shape) == 2 and shape[1] == 3 * shape[0] > 0
            for name, shape in self.shapes.items()
        )

    def label(self, name: str) -> str:
        """A better name than the tensor's own, where the format knows one."""
        hint = self.hints.get(name)
        return hint.label if hint is not None and hint.label is not None else name

    def shape(self, name: str) -> tuple[int, ...] | None:
        """A tensor's shape, ``None`` if there is none of that name."""
        return self.shapes.get(name)

    def role(self, tensor: Tensor, kind: str) -> Role:
        """A tensor's role: kernels and recurrent layers by their kind, others by their name."""
        if kind in ("conv", "depthwise"):
            return Role.CONV
        if kind in ("lstm", "gru", "rnn"):
            return Role.LINEAR
        return self.by_role(tensor.name)

    def by_role(self, name: str) -> Role:
        """The role that a tensor's name gives it among the others."""
        if name not in self._roles:
            hint = self.hints.get(name)
            label = self.label(name)
            words = modules(label)
            siblings = self._siblings.get(".".join(words[:-1]), set())
            role = role_of(label, self.blocks[name], siblings)
            if role in (Role.LINEAR, Role.HEAD) and _place(words) in self._classifiers.values():
                # The last matrix of a convolutional network's classifier is its head, those before it are not.
                role = Role.HEAD if name in self._classifiers else Role.LINEAR
            if hint is not None and hint.kind == "embedding":
                role = Role.EMBEDDING
            self._roles[name] = role
        return self._roles[name]

    def conv1d(self, name: str) -> bool:
        """GPT-2 stores its linear maps inputs first; its ``c_attn`` (d by 3d) gives it away."""
        return self._conv1d and modules(name)[-1:] in (["c_attn"], ["c_proj"], ["c_fc"], ["q_attn"])

    def inputs_first(self, name: str) -> bool:
        """Whether a matrix is stored ``(inputs, outputs)``: GPT-2's Conv1D, and TransformerLens' ``W_in``, ``W_U``."""
        return self.conv1d(name) or (is_raw(name) and self._raw_turned(name))

    def stack_inputs_first(self, name: str) -> bool:
        """Whether experts fused in one tensor are stored ``(experts, inputs, outputs)``, as gpt-oss and Llama 4 do.

        The fused gate-and-up map beside the map behind it tells: it has twice as many outputs as that has inputs.
        """
        words = name.split(".")
        places = [i for i, word in enumerate(words) if word in ("gate_up_proj", "down_proj")]
        if not places:
            return False
        pair = []
        for word in ("gate_up_proj", "down_proj"):
            words[places[-1]] = word
            shape = self.shapes.get(".".join(words), ())
            if len(shape) < 3:
                return False
            pair.append(shape[-2:])
        (a, b), (c, d) = pair
        return b == 2 * c and a == d

    def experts_in_rows(self, name: str) -> int:
        """How many experts a matrix holds below each other, as DBRX stores them; 0 where it holds none."""
        words = modules(name)
        settings = (self.network.config or {}).get("ffn_config")
        many = settings.get("moe_num_experts") if isinstance(settings, Mapping) else None
        rows = self.shapes[name][0] if self.shapes[name] else 0
        known = words[-3:-1] == ["experts", "mlp"] and words[-1] in ("w1", "v1", "w2")
        return many if known and type(many) is int and many > 1 and rows % many == 0 else 0

    def head_by_head(self, name: str) -> tuple[bool, bool] | None:
        """Of a projection stored as ``(heads, a, b)``: whether inputs come first, whether it leads out of the heads."""
        role, shape = self.by_role(name), self.shapes[name]
        known = (Role.QUERY, Role.KEY, Role.VALUE, Role.ATTENTION_OUT)
        if not is_raw(name) or len(shape) != 3 or role not in known:
            return None
        return self._raw_turned(name), role is Role.ATTENTION_OUT

    def _raw_turned(self, name: str) -> bool:
        """Whether a raw parameter ``W_*`` has its inputs first; TransformerLens' order where the shapes do not tell."""
        a, b = self.shapes[name][-2:]
        role = self.by_role(name)
        if a == b or self._width not in (a, b):
            return role is not Role.EMBEDDING and (len(self.shapes[name]) == 3 or self._width > 0)
        # Stored for x @ W: what leads back into the stream ends in its width, everything else begins with it; a table
        # of embeddings has a row per token, so that it is turned if it begins with the width.
        return (b if role in (Role.ATTENTION_OUT, Role.MLP_OUT) else a) == self._width

    @cached_property
    def _width(self) -> int:
        """The residual stream's width: the one side that all raw ``W_*`` parameters share; 0 where there is none."""
        sides = [set(s[-2:]) for n, s in self.shapes.items() if is_raw(n) and len(s) in (2, 3)]
        shared = set.intersection(*sides) if len(sides) > 2 else set()
        return shared.pop() if len(shared) == 1 else 0

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
        if config.get("multi_query") is True:
            return heads, 1, number("head_dim")
        return heads, number("num_key_value_heads", "num_kv_heads") or heads, number("head_dim")

    def _last_of_classifiers(self) -> dict[str, list[str]]:
        """The classifier of a convolutional network: its last matrix, if named like one or the only one.

        Empty where this rule does not apply, so that the name alone decides.
        """
        if not any(len(shape) == 4 for shape in self.shapes.values()):
            return {}
        flat = [
            name
            for name, shape in self.shapes.items()
            if len(shape) == 2
            and min(shape) > 0
            and role_of(self.label(name), self.blocks[name]) in (Role.LINEAR, Role.HEAD)
        ]
        if not flat:
            return {}
        last = flat[-1]
        words = modules(self.label(last))
        named = any(
            re.fullmatch(r"classifiers?|heads?|fc[0-9]*|linear|logits|predictions?|output", w) for w in words
        )
        return {last: _place(words)} if named or len(flat) == 1 else {}


_RAW = re.compile(r"(?:^|[./])_?W_(?:Q|K|V|O|in|out|gate|E|U|pos|E_pos|token_type)$")


def is_raw(name: str) -> bool:
    """Whether a name is that of a bare parameter in TransformerLens' style, and not of a module's ``weight``."""
    return bool(_RAW.search(name))


def _place(words: list[str]) -> list[str]:
    """Where a module stands: its name without its own last word."""
    return words[:-1]
