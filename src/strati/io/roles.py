"""Roles and blocks of layers, from their names.

:func:`role_of` and :func:`blocks` read single names: those of GPT-2, BERT and MiniLM, Llama (Hugging Face, Meta, GGUF),
T5, ViT (Hugging Face, timm, torchvision), Whisper, ResNet and MobileNet (timm, torchvision), TransformerLens, mixtures
of experts, and torch's own transformer layers. :class:`Names` adds what the names and shapes of a whole network say
together: roles that depend on neighbours, attention heads, inputs stored first. A name that says nothing has the role
``linear``; shapes are never used to guess a role.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from strati.io.checkpoint_file import Tensor

if TYPE_CHECKING:
    from strati.io.network import Network


class Role(StrEnum):
    """What a weight matrix does in the network."""

    QUERY = "attention.q"
    KEY = "attention.k"
    VALUE = "attention.v"
    QKV = "attention.qkv"
    ATTENTION_OUT = "attention.out"
    MLP_IN = "mlp.in"
    MLP_GATE = "mlp.gate"
    MLP_OUT = "mlp.out"
    EMBEDDING = "embedding"
    HEAD = "head"
    ROUTER = "router"
    CONV = "conv"
    LINEAR = "linear"


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Names that always have this meaning.
_ANYWHERE: dict[Role, frozenset[str]] = {
    Role.QUERY: _words(
        "q_proj query q_lin wq to_q attn_q query_proj linear_q q_a_proj q_b_proj q_attn queries w_q _w_q"
    ),
    Role.KEY: _words("k_proj k_lin wk to_k attn_k key_proj linear_k w_k _w_k"),
    Role.VALUE: _words("v_proj v_lin wv to_v attn_v value_proj linear_v w_v _w_v"),
    Role.QKV: _words(
        "qkv qkv_proj c_attn query_key_value wqkv attn_qkv to_qkv to_kv w_pack in_proj_qkv"
        " kv_a_proj_with_mqa kv_b_proj kv_proj"
    ),
    Role.ATTENTION_OUT: _words("o_proj to_out attn_output out_lin attn_out w_o"),
    Role.EMBEDDING: _words(
        "wte wpe shared embed emb embed_in token_types relative_attention_bias relative_position_bias_table"
        " w_e w_pos w_e_pos w_token_type"
    ),
    Role.ROUTER: _words("router ffn_gate_inp shared_expert_gate ffn_gate_inp_shexp"),
    Role.HEAD: _words("lm_head classifier score logits embed_out vocab_projector qa_outputs head w_u"),
}
# Names too common to mean this outside of an attention or a block.
_SHORT = {"q": Role.QUERY, "k": Role.KEY, "v": Role.VALUE, "kv": Role.QKV}
_SHORT |= {"key": Role.KEY, "keys": Role.KEY, "value": Role.VALUE, "values": Role.VALUE}
# Names that mean this inside an attention.
_IN_ATTENTION = _words("out_proj c_proj proj dense out o wo projection output linear_out")
# Names that mean this inside a block or an MLP.
_IN_BLOCK: dict[Role, frozenset[str]] = {
    Role.MLP_IN: _words(
        "fc1 c_fc up_proj w3 v1 lin1 linear1 linear_1 dense_h_to_4h fc_in ffn_up wi wi_1 gate_up_proj w12"
        " ffn_up_exps ffn_up_shexp w_in input_linear"
    ),
    Role.MLP_GATE: _words("gate_proj w1 ffn_gate wi_0 ffn_gate_exps ffn_gate_shexp fc1_g w_gate"),
    Role.MLP_OUT: _words(
        "fc2 c_proj down_proj w2 lin2 linear2 linear_2 dense_4h_to_h fc_out ffn_down wo"
        " ffn_down_exps ffn_down_shexp w_out output_linear"
    ),
}
_SUFFIXES = _words("weight kernel w recurrent_kernel depthwise_kernel pointwise_kernel matmul gemm")
_MLP = re.compile(r"mlp|ffn|feed_?forward|densereludense|intermediate|experts?")
_EXPERT = re.compile(r"(shared_)?experts?(_[0-9]{1,8})?")
_EXPERT_NUMBER = re.compile(r"experts?_([0-9]{1,8})")
_ATTENTION = re.compile(r"attn|attention")
_STAGED = re.compile(
    r"(?:^|[./])(?:(?:layer|stages?[._/]?)([0-9]{1,8})[./](?:[a-z]+[./])?|blocks[./]([0-9]{1,8})[./])([0-9]{1,8})[./]"
)
_NUMBERED = re.compile(r"(?:layer|block|blk|h|resblock)s?_([0-9]{1,8})$")


def role_of(name: str, block: int | None = None, siblings: Iterable[str] = ()) -> Role:
    """The role that a tensor's name gives it.

    Args:
        name: The tensor's name.
        block: The block it belongs to, if any: ``fc1`` means an MLP's input only inside a block.
        siblings: Last words of the names in the same module: Meta's ``w1`` is a gate only if there is a ``w3``.

    Examples:
        >>> role_of("h.0.attn.c_proj.weight", 0), role_of("h.0.mlp.c_proj.weight", 0), role_of("fc1.weight")
        (<Role.ATTENTION_OUT: 'attention.out'>, <Role.MLP_OUT: 'mlp.out'>, <Role.LINEAR: 'linear'>)
    """
    words = modules(name)
    if not words:
        return Role.LINEAR
    index = None
    if _counts(words[-1]) and len(words) > 1:
        index = int(words[-1])
        words = words[:-1]
    last, parents = words[-1], words[:-1]
    if _routes(last, parents, siblings):
        return Role.ROUTER
    attention = any(_ATTENTION.search(word) for word in parents)
    if attention and last in _IN_ATTENTION:
        return Role.ATTENTION_OUT
    if attention and last == "in_proj":
        return Role.QKV
    if (attention or block is not None) and last in _SHORT:
        return _SHORT[last]
    for role, words_of_role in _ANYWHERE.items():
        if last in words_of_role:
            return role
    if last.endswith(
        ("embedding", "embeddings", "_emb", "_embed", "embd", "embed_tokens", "embed_positions")
    ):
        return Role.EMBEDDING
    if last == "decoder" and parents and parents[-1] in ("predictions", "lm_head"):
        return Role.HEAD
    if last == "output" and block is None:
        return Role.HEAD
    return _mlp(last, parents, index, block, siblings)


def _routes(last: str, parents: list[str], siblings: Iterable[str]) -> bool:
    """Whether this is the gate that chooses between experts, and not the gate inside one of them."""
    if parents and parents[-1] == "router" and last in ("classifier", "layer", "gate", "linear", "proj"):
        return True
    if last == "wg" and parents and parents[-1] == "gate":
        return True
    if last != "gate" or any(_EXPERT.fullmatch(word) for word in parents):
        return False
    return any(_EXPERT.fullmatch(word) for word in siblings) or any("moe" in word for word in parents)


def _mlp(
    last: str, parents: list[str], index: int | None, block: int | None, siblings: Iterable[str]
) -> Role:
    if last == "dense" and parents and block is not None:
        if parents[-1] == "intermediate":
            return Role.MLP_IN
        if parents[-1] == "output":
            return Role.MLP_OUT
    if block is None and not any(_MLP.search(word) for word in parents):
        return Role.LINEAR
    if (
        last == "mlp" and index is not None and block is not None
    ):  # nn.Sequential(Linear, activation, [dropout,] Linear)
        return Role.MLP_IN if index == 0 else Role.MLP_OUT
    if last == "w1" and not {"w3", "v1"} & set(siblings):
        return Role.MLP_IN
    for role, words_of_role in _IN_BLOCK.items():
        if last in words_of_role:
            return role
    return Role.LINEAR


def modules(name: str) -> list[str]:
    """The words of a name, its last one being the module's.

    Examples:
        >>> modules("encoder.layers.0.self_attn.in_proj_weight"), modules("dense_1/dense_1/kernel:0")
        (['encoder', 'layers', '0', 'self_attn', 'in_proj'], ['dense_1', 'dense_1'])
    """
    return list(_modules(name) if len(name) < 512 else _modules.__wrapped__(name))


@lru_cache(maxsize=32_768)
def _modules(name: str) -> tuple[str, ...]:
    words = [word for word in re.split(r"[./]", name.lower().split(":")[0]) if word]
    if len(words) > 1 and words[-1] in _SUFFIXES:
        words.pop()
    if words and words[-1].endswith("_weight"):
        words[-1] = words[-1].removesuffix("_weight")
    return tuple(words)


def blocks(names: Iterable[str]) -> dict[str, int | None]:
    """The block number of each tensor: the number in its name in front of a module.

    Blocks that are numbered within stages (ResNet's ``layer2.0.conv1``) are numbered consecutively.

    Examples:
        >>> blocks(["h.3.attn.c_attn.weight", "layer1.1.conv1.weight", "layer2.0.conv1.weight", "fc.weight"])
        {'h.3.attn.c_attn.weight': 3, 'layer1.1.conv1.weight': 0, 'layer2.0.conv1.weight': 1, 'fc.weight': None}
    """
    staged: dict[str, tuple[int, int]] = {}
    numbers: dict[str, int | None] = {}
    for name in names:
        match = _STAGED.search(name.lower())
        if match:
            staged[name] = (int(match[1] or match[2]), int(match[3]))
        numbers[name] = None if match else _number(name)
    order = {place: position for position, place in enumerate(sorted(set(staged.values())))}
    for name, place in staged.items():
        numbers[name] = order[place]
    return numbers


def places(names: Iterable[str]) -> list[dict[str, str | int | None]]:
    """Role and block of each layer by its name alone: ``name``, ``role`` and ``block``, each name once.

    Examples:
        >>> places(["h.0.mlp.c_fc", "h.0.mlp.c_fc"])
        [{'name': 'h.0.mlp.c_fc', 'role': 'mlp.in', 'block': 0}]
    """
    tensors = {name: name if name.endswith(".weight") else f"{name}.weight" for name in names}
    number = blocks(tensors.values())
    beside: dict[str, set[str]] = {}
    for tensor in tensors.values():
        words = modules(tensor)
        beside.setdefault(".".join(words[:-1]), set()).update(words[-1:])
    return [
        {
            "name": name,
            "role": str(role_of(tensor, number[tensor], beside[".".join(modules(tensor)[:-1])])),
            "block": number[tensor],
        }
        for name, tensor in tensors.items()
    ]


@dataclass(frozen=True)
class Place:
    """The position of a layer by its name.

    Attributes:
        tower: The words before the block's number (``encoder.layer``); empty outside of blocks.
        stage: The stage in which blocks are numbered, if there is one (ResNet's ``layer2``).
        number: The block's number in its tower and stage; ``None`` outside of blocks.
        within: The words after the block's number; all of them outside of blocks.
    """

    tower: str
    stage: int | None
    number: int | None
    within: str


def place_of(name: str) -> Place:
    """Split a name into tower, stage, block and the words inside the block.

    Examples:
        >>> place_of("model.layers.7.self_attn.q_proj.weight")
        Place(tower='model.layers', stage=None, number=7, within='self_attn.q_proj')
        >>> place_of("layer2.1.conv1.weight"), place_of("fc.weight").within
        (Place(tower='', stage=2, number=1, within='conv1'), 'fc')
    """
    words = modules(name)
    joined = ".".join(words)
    staged = _STAGED.search(f"{joined}.")
    if staged:
        inside = joined[staged.end() :]
        return Place(joined[: staged.start()], int(staged[1] or staged[2]), int(staged[3]), inside)
    for position, (word, following) in enumerate(pairwise(words)):
        match = _NUMBERED.search(word)
        if _counts(word) or (match and not _counts(following)):
            tower = [*words[:position], word[: match.start(1)].rstrip("_")] if match else words[:position]
            inside = ".".join(words[position + 1 :])
            return Place(".".join(tower), None, int(match[1] if match else word), inside)
    return Place("", None, None, joined)


def expert_of(name: str) -> int | None:
    """The number of the expert in a name of a mixture of experts.

    Examples:
        >>> expert_of("model.layers.3.mlp.experts.5.w1.weight"), expert_of("model.layers.3.mlp.up_proj.weight")
        (5, None)
        >>> expert_of("encoder.block.1.layer.1.mlp.experts.expert_2.wi.weight"), expert_of("blk.3.ffn_up.1.weight")
        (2, 1)
    """
    for word, following in pairwise(["", *modules(name)]):
        numbered = _EXPERT_NUMBER.fullmatch(following)
        if numbered:
            return int(numbered[1])
        if word in _EXPERT_LISTS and _counts(following):
            return int(following)
    return None


_EXPERT_LISTS = _words("experts expert ffn_gate ffn_up ffn_down")
"""Modules that an expert's number follows; older GGUF files number each expert's matrices separately."""


def _number(name: str) -> int | None:
    words = modules(name)
    for word, following in pairwise(words):
        match = _NUMBERED.search(word)
        if _counts(word) or (match and not _counts(following)):
            return int(match[1] if match else word)
    return None


def _counts(word: str) -> bool:
    return word.isascii() and word.isdigit() and len(word) < 9


_FIRST_NUMBER = re.compile(r"(?<=[./])[0-9]+(?=[./])")
"""In the name of a tensor of a block: the number of the block, or of the stage that it is in."""


@lru_cache(maxsize=4096)
def _role_in_block(name: str, outside: bool, siblings: frozenset[str]) -> Role:
    return role_of(name, None if outside else 0, siblings)


class Names:
    """Roles, blocks and heads of a network that follow from all its names and shapes together."""

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
        """The name that shows the role: the format's label if there is one, else the tensor's name."""
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
            outside = self.blocks[name] is None
            template = label if outside else _FIRST_NUMBER.sub("0", label, 1)
            role = _role_in_block(template, outside, frozenset(siblings))
            if role in (Role.LINEAR, Role.HEAD) and _place(words) in self._classifiers.values():
                # The last matrix of a convolutional network's classifier is its head, those before it are not.
                role = Role.HEAD if name in self._classifiers else Role.LINEAR
            if hint is not None and hint.kind == "embedding":
                role = Role.EMBEDDING
            self._roles[name] = role
        return self._roles[name]

    def conv1d(self, name: str) -> bool:
        """Whether this is a Conv1D of GPT-2, which stores inputs first; its ``c_attn`` (d by 3d) shows it."""
        return self._conv1d and modules(name)[-1:] in (["c_attn"], ["c_proj"], ["c_fc"], ["q_attn"])

    def inputs_first(self, name: str) -> bool:
        """Whether a matrix is stored ``(inputs, outputs)``: GPT-2's Conv1D, and TransformerLens' ``W_in``, ``W_U``."""
        return self.conv1d(name) or (is_raw(name) and self._raw_turned(name))

    def stack_inputs_first(self, name: str) -> bool:
        """Whether experts fused in one tensor are stored ``(experts, inputs, outputs)``, as gpt-oss and Llama 4 do.

        The fused gate-and-up matrix has twice as many outputs as ``down_proj`` has inputs, which shows the order.
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
        is_fused = words[-3:-1] == ["experts", "mlp"] and words[-1] in ("w1", "v1", "w2")
        return many if is_fused and type(many) is int and many > 1 and rows % many == 0 else 0

    def head_by_head(self, name: str) -> tuple[bool, bool] | None:
        """Of a projection stored as ``(heads, a, b)``: whether inputs come first, whether it leads out of the heads."""
        role, shape = self.by_role(name), self.shapes[name]
        projections = (Role.QUERY, Role.KEY, Role.VALUE, Role.ATTENTION_OUT)
        if not is_raw(name) or len(shape) != 3 or role not in projections:
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
                setting = config.get(key)
                if type(setting) is int and 0 < setting < 2**20:
                    return setting
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
    """The parent of a module: its name without the last word."""
    return words[:-1]
