"""What the blocks of a transformer are made of: slots with a role and a shape, the same in every block.

A blueprint is the architecture and says nothing about which piece goes where. It is read off a network when that is
dropped and kept beside the pieces; where it is missing, transformers builds the empty network of ``config.json``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from strati.core.errors import BadInputError, UnsupportedError
from strati.io.roles import Role, blocks, modules, role_of

if TYPE_CHECKING:
    from collections.abc import Sequence

MATRICES = {
    Role.QUERY: "q",
    Role.KEY: "k",
    Role.VALUE: "v",
    Role.QKV: "qkv",
    Role.ATTENTION_OUT: "out",
    Role.MLP_GATE: "gate",
    Role.MLP_IN: "up",
    Role.MLP_OUT: "down",
}
"""The short names of the roles that matrices of a block have."""

_NORM_1 = re.compile(
    r"ln_?1\b|norm_?1\b|input_layernorm|attn_norm|attn_ln|self_attn_layer_norm|layernorm_before"
    r"|attention_norm|attention\.output\.layernorm|sa_layer_norm"
)
_NORM_2 = re.compile(
    r"ln_?2\b|norm_?2\b|post_attention_layernorm|ffn_norm|mlp_ln|final_layer_norm|layernorm_after|output\.layernorm"
    r"|output_layer_norm"
)
_BY_HEAD = frozenset({"gpt_neox", "gpt_neox_japanese", "bloom", "persimmon", "falcon"})


@dataclass(frozen=True)
class Slot:
    """A place for one tensor.

    Attributes:
        name: The tensor's name, ``{}`` standing for the number of the block.
        role: ``q k v out gate up down``, fused ``qkv`` and ``gate_up``, ``q.bias``, ``norm1.weight``, ``embedding``,
            ``head``; other tensors that are there once have their own name.
        shape: The tensor's shape as stored.
        transposed: Stored inputs first (GPT-2's Conv1D).
    """

    name: str
    role: str
    shape: tuple[int, ...]
    transposed: bool = False

    @property
    def matrix(self) -> bool:
        """Whether it is a matrix of a block."""
        return len(self.shape) == 2


@dataclass(frozen=True)
class Blueprint:
    """The architecture as far as reassembly needs it.

    Attributes:
        blocks: Number of blocks.
        block: The slots of every block.
        whole: The slots that are there once.
        heads: Attention heads.
        groups: Key-value heads.
        rotary: Positions enter by rotating pairs of q and k rows (half a head apart).
        before: Norms stand before what they feed (pre-norm).
        by_head: The fused ``qkv`` is ordered head by head.
        activation: Of the MLP; decides which rescalings leave the network as it is.
        tied: The head is the embedding again.
    """

    blocks: int
    block: tuple[Slot, ...]
    whole: tuple[Slot, ...]
    heads: int
    groups: int
    rotary: bool = False
    before: bool = True
    by_head: bool = False
    activation: str = "gelu"
    tied: bool = False

    @property
    def width(self) -> int:
        """Width of the residual stream."""
        down = next((s for s in self.block if s.role in ("down", "out")), None)
        assert down is not None  # blueprint_of has seen to it
        return down.shape[1] if down.transposed else down.shape[0]

    def slot(self, role: str) -> Slot | None:
        """The block's slot of a role."""
        return next((s for s in self.block if s.role == role), None)

    @property
    def unfixed(self) -> frozenset[str]:
        """Roles of vectors that the network's function does not fix, so that their pieces are interchangeable.

        A key's bias adds the same to all scores of a query, and softmax takes it off; not so where positions rotate
        keys, or where more than rows and columns of matrices goes into a key (a norm of its own).
        """
        roles = {"k.bias"} if self.slot("k.bias") is not None and not self.rotary else set[str]()
        has_key_norm = any(s.role.startswith(("k_norm", "k.norm")) or ".k_norm" in s.name for s in self.block)
        return frozenset() if has_key_norm else frozenset(roles)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a JSON file."""
        return asdict(self)


def blueprint_of(
    shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any], *, where: object = "network"
) -> Blueprint:
    """Read the architecture off the names and shapes of a network's tensors.

    Args:
        shapes: Every tensor's name and shape.
        config: ``config.json``; its number of heads decides how matrices are cut into heads.
        where: What errors are about.

    Raises:
        UnsupportedError: No transformer that strati knows, or blocks that are not all alike.

    Examples:
        >>> shapes = {f"h.{k}.{m}.weight": s for k in (0, 1) for m, s in {"attn.c_attn": (8, 24), "attn.c_proj": (8, 8),
        ...           "mlp.c_fc": (8, 32), "mlp.c_proj": (32, 8)}.items()}
        >>> found = blueprint_of(shapes, {"model_type": "gpt2", "n_head": 2})
        >>> found.blocks, [slot.role for slot in found.block], found.block[0].transposed
        (2, ['qkv', 'out', 'up', 'down'], True)
    """
    numbers = blocks(shapes)
    templates: dict[int, dict[str, tuple[int, ...]]] = {}
    global_shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        number = numbers[name]
        if number is None:
            global_shapes[name] = shape
        else:
            templates.setdefault(number, {})[_template(name, number)] = shape
    if sorted(templates) != list(range(len(templates))) or not templates:
        raise UnsupportedError(where, "has no numbered blocks; only transformers can be shuffled")
    first = templates[0]
    for number, slots in templates.items():
        if slots != first:
            odd = sorted(set(slots.items()) ^ set(first.items()))[0][0]
            raise UnsupportedError(
                where, f"its blocks are not all alike: {odd} of block {number} differs from block 0"
            )
    conv1d = any(modules(n)[-1:] == ["c_attn"] and len(s) == 2 and s[1] == 3 * s[0] for n, s in first.items())
    block = _block_slots(first, conv1d, where)
    heads, groups = _heads(config, block, where)
    return Blueprint(
        blocks=len(templates),
        block=block,
        whole=tuple(Slot(name, _whole_role(name, shape), shape) for name, shape in global_shapes.items()),
        heads=heads,
        groups=groups,
        rotary=_rotary(config, global_shapes),
        before=not _norms_after(block),
        by_head=config.get("model_type") in _BY_HEAD and not config.get("multi_query"),
        activation=str(_first(config, "hidden_act", "activation_function", "hidden_activation") or "gelu"),
        tied=bool(config.get("tie_word_embeddings", False)),
    )


def from_dict(fields: Mapping[str, Any], where: object) -> Blueprint:
    """A blueprint from its JSON form.

    Raises:
        BadInputError: It is none.
    """
    try:
        arguments = dict(fields)
        for part in ("block", "whole"):
            arguments[part] = tuple(
                Slot(str(s["name"]), str(s["role"]), tuple(int(n) for n in s["shape"]), bool(s["transposed"]))
                for s in arguments[part]
            )
        made = Blueprint(**arguments)
    except (KeyError, TypeError, ValueError):
        raise BadInputError(
            where, "is not a blueprint that strati wrote; shuffle the network again"
        ) from None
    if not made.block or made.blocks < 1 or made.heads < 1 or made.groups < 1:
        raise BadInputError(where, "is not a blueprint that strati wrote; shuffle the network again")
    return made


def _template(name: str, number: int) -> str:
    words = name.split(".")
    place = next((k for k, word in enumerate(words) if word == str(number)), None)
    if place is None:
        raise UnsupportedError(name, "its block number is not a word of its own; reassemble cannot take it")
    words[place] = "{}"
    return ".".join(words)


def _block_slots(first: Mapping[str, tuple[int, ...]], conv1d: bool, where: object) -> tuple[Slot, ...]:
    slots: list[Slot] = []
    siblings = {modules(name)[-1] for name in first}
    by_module: dict[str, str] = {}
    for name, shape in first.items():
        if len(shape) == 2:
            role = role_of(name.replace("{}", "0"), 0, siblings)
            short = "gate_up" if modules(name)[-1] in ("gate_up_proj", "w12") else MATRICES.get(role)
            if short is None:
                raise UnsupportedError(where, f"{name}: a matrix whose role in the block is not known")
            turned = conv1d and modules(name)[-1] in ("c_attn", "c_proj", "c_fc")
            slots.append(Slot(name, short, shape, turned))
            by_module[_module(name)] = short
    for name, shape in first.items():
        if len(shape) == 1:
            slots.append(Slot(name, _vector_role(name, by_module), shape))
        elif len(shape) != 2:
            raise UnsupportedError(
                where, f"{name} has {len(shape)} dimensions; reassemble takes matrices and vectors"
            )
    names = [slot.role for slot in slots]
    twice = next((role for role in names if names.count(role) > 1), None)
    if twice is not None:
        raise UnsupportedError(
            where, f"has several {twice} in a block (experts or cross-attention); not supported"
        )
    missing = [r for r in ("down", "up") if r not in names and "gate_up" not in names]
    if missing or "out" not in names or not ({"qkv", "q"} & set(names)):
        raise UnsupportedError(where, "its blocks are not attention and MLP with names that strati knows")
    order = ("q", "k", "v", "qkv", "out", "gate", "up", "gate_up", "down")
    return tuple(
        sorted(slots, key=lambda s: (order.index(s.role) if s.role in order else len(order), s.role))
    )


def _module(name: str) -> str:
    """A tensor's module: its name without ``weight`` or ``bias``; torch's ``in_proj_bias`` goes with its weight."""
    return re.sub(r"[._](weight|bias)$", "", name)


def _vector_role(name: str, by_module: Mapping[str, str]) -> str:
    module, kind = _module(name), "bias" if name.endswith("bias") else "weight"
    if module in by_module:
        return f"{by_module[module]}.{kind}"
    lower = module.lower()
    if _NORM_1.search(lower):
        return f"norm1.{kind}"
    if _NORM_2.search(lower):
        return f"norm2.{kind}"
    return ".".join(name.split("{}.")[-1].split(".")[-2:])


def _norms_after(block: Sequence[Slot]) -> bool:
    """Whether the first norm takes the attention's output, as in BERT (``attention.output``) and DistilBERT."""
    names = [s.name.lower() for s in block if s.role == "norm1.weight"]
    return any(".output." in name or "sa_layer_norm" in name for name in names)


def _whole_role(name: str, shape: tuple[int, ...]) -> str:
    role = role_of(name, None)
    if len(shape) == 2 and role is Role.EMBEDDING:
        words = name.lower()
        return name if re.search(r"pos|wpe|type", words) else "embedding"
    if len(shape) == 2 and role is Role.HEAD:
        return "head"
    return name


def _heads(config: Mapping[str, Any], block: Iterable[Slot], where: object) -> tuple[int, int]:
    heads = _first(config, "num_attention_heads", "n_head", "num_heads", "encoder_attention_heads", "n_heads")
    if type(heads) is not int or heads < 1:
        raise UnsupportedError(where, "its config.json does not give the number of attention heads")
    if config.get("new_decoder_architecture"):
        raise UnsupportedError(
            where, "its fused matrix holds groups of queries, keys and values; not supported"
        )
    if config.get("multi_query") is True:
        return heads, 1
    groups = _first(config, "num_key_value_heads", "num_kv_heads", "n_kv_heads")
    return heads, groups if type(groups) is int and groups > 0 else heads


def _rotary(config: Mapping[str, Any], global_shapes: Mapping[str, Any]) -> bool:
    if any(
        key in config for key in ("rope_theta", "rope_scaling", "rope_parameters", "rotary_pct", "rotary_dim")
    ):
        return True
    return config.get("model_type") in (
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "gemma",
        "phi3",
        "olmo",
        "gpt_neox",
    )


def _first(config: Mapping[str, Any], *keys: str) -> Any:
    return next((config[key] for key in keys if config.get(key) is not None), None)


UNITS = {"qk": ("q", "k"), "vo": ("v", "out"), "mlp": ("gate", "up", "down")}
"""Roles that share hidden units, by the unit's name; a fused qkv makes one unit of all attention."""


def unit_kinds(blueprint: Blueprint) -> dict[str, tuple[str, ...]]:
    """The units of this architecture: each with the (cut) roles it is made of."""
    roles = {slot.role for slot in blueprint.block if slot.matrix}
    if "qkv" in roles:
        kinds: dict[str, tuple[str, ...]] = {"attention": ("q", "k", "v", "out")}
    else:
        kinds = {"qk": UNITS["qk"], "vo": UNITS["vo"]}
    kinds["mlp"] = tuple(r for r in UNITS["mlp"] if r in roles or "gate_up" in roles)
    return kinds


def slots_of(kind_roles: Sequence[str], blueprint: Blueprint) -> tuple[str, ...]:
    """The slots (pieces) that hold a unit's roles."""
    fused = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "gate_up", "up": "gate_up"}
    slots: list[str] = []
    for role in kind_roles:
        slot = role if blueprint.slot(role) is not None else fused[role]
        if slot not in slots:
            slots.append(slot)
    return tuple(slots)
