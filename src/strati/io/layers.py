"""Layers: the weight matrices of a network with their roles, blocks and views, and patterns that select among them.

Every tensor is one or more layers, or it is listed as skipped with the reason. ``roles.py`` decides what a name means,
``views.py`` which matrices a tensor holds.

A pattern (``layers=``, ``--layers``) is one of

- a shell pattern (``*``, ``?``, ``[...]``), matched against the layer's, the tensor's and the module's name:
  ``fc1`` is ``fc1.weight``, ``h.*.mlp.c_fc`` is that layer of every block;
- ``role:PATTERN``, matched against the role: ``role:mlp.*``;
- ``block:3``, ``block:3-7`` or ``block:0,3-7``: the blocks of these numbers;
- any of these with a leading ``!``, which excludes what it matches.

The layers that match any pattern are selected, without the excluded ones; if every pattern has a ``!``, all other
layers are selected. A pattern that matches nothing is an error, so that a misspelt one is not silently ignored.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import groupby
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from strati.core.errors import BadInputError
from strati.io.checkpoint_file import Quantisation, Skipped, Tensor
from strati.io.quantised.rounding_error import Rounding, rounding_of
from strati.io.roles import Role, blocks, expert_of, role_of
from strati.io.views import EXPERTS, View, views_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.io.adapters.lora import AdapterUpdate
    from strati.io.network import Network


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One weight matrix, or the slices of one kernel, of a network. Its values are read on demand.

    Attributes:
        name: The tensor's name, with ``[q]`` or ``[3]`` appended if the layer is a part of the tensor.
        role: What the layer does.
        block: The block it belongs to, if its name says so.
        kind: ``linear``, ``conv``, ``depthwise``, ``embedding``, ``lstm``, ``gru``, ``rnn`` or ``stack``.
        tensor: The name of the tensor that it is part of.
        cut: The matrices of the tensor that it consists of.
        expert: The expert of a mixture that it belongs to, if any.
        network: The network.
    """

    name: str
    role: Role
    block: int | None
    kind: str
    tensor: str
    cut: View = field(repr=False)
    expert: int | None = None
    network: Network = field(repr=False, compare=False)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of one matrix."""
        return self.cut.rows, self.cut.cols

    @property
    def count(self) -> int:
        """How many matrices :meth:`matrices` yields."""
        return self.cut.count

    @property
    def view(self) -> str:
        """Which matrix of the tensor this is, in words."""
        return self.cut.text

    @property
    def dtype(self) -> str:
        """The dtype it is stored in."""
        return self.network[self.tensor].dtype

    @property
    def quantised(self) -> bool:
        """Whether it is stored as a lossy code."""
        return self.network[self.tensor].quantised

    @property
    def quantisation(self) -> Quantisation | None:
        """How it was rounded before it was stored; ``None`` if it was not."""
        return self.network.contents.quantisation.get(self.tensor)

    @property
    def adapter(self) -> AdapterUpdate | None:
        """The low-rank update that it is; ``None`` if it is a weight."""
        return self.network.contents.adapters.get(self.tensor)

    @property
    def has_token_rows(self) -> bool:
        """Whether it has one row per token: an embedding, or a head with as many rows as one."""
        if self.role not in (Role.EMBEDDING, Role.HEAD) or self.adapter is not None or self.count != 1:
            return False
        embeddings = (layer for layer in self.network.layers() if layer.role is Role.EMBEDDING)
        return self.role is Role.EMBEDDING or any(x.shape[0] == self.shape[0] for x in embeddings)

    @property
    def parameters(self) -> int:
        """Number of its entries; of a low-rank update, those of its two factors."""
        update = self.adapter
        rows, cols = self.shape
        return rows * cols * self.count if update is None else update.rank * (update.rows + update.cols)

    def identity_fields(self) -> dict[str, Any]:
        """What a layer's JSON begins with: name, role, block, kind and sizes."""
        rows, cols = self.shape
        return {
            "name": self.name,
            "role": str(self.role),
            "block": self.block,
            "kind": self.kind,
            "rows": rows,
            "cols": cols,
            "aspect": max(rows, cols) / min(rows, cols) if rows and cols else None,
            "parameters": self.parameters,
        }

    def storage_fields(self) -> dict[str, Any]:
        """``expert``, ``quantisation`` and ``adapter`` of a layer's JSON, where they apply.

        An adapter that was never trained (``B = 0``) uses no direction.
        """
        fields: dict[str, Any] = {}
        if self.expert is not None:
            fields["expert"] = self.expert
        if self.quantisation is not None:
            fields["quantisation"] = dict(vars(self.quantisation))
        if (update := self.adapter) is not None:
            fields["adapter"] = {"rank": update.rank, "used_rank": update.used_rank(), "scale": update.scale}
        return fields

    def matrices(self) -> Iterator[NDArray[Any]]:
        """The matrices one at a time, in their own dtype; views of the file if it stores them plainly."""
        if self.cut.index is not None:
            return self.cut.of_part(self.network.contents.matrix(self.tensor, self.cut.index))
        return self.cut.matrices(self.network.read(self.tensor))

    def noise_floor(self) -> float | None:
        """The eigenvalue below which rounding hides the original weights; ``None`` if they were not rounded."""
        rounding = self.rounding()
        return None if rounding is None else rounding.floor

    def rounding(self) -> Rounding | None:
        """The error that rounding left, computed once; ``None`` if the weights were not rounded or it is unknown."""
        read = self.network.contents.rounding
        if self.quantisation is None or read is None:
            return None
        cache, key = self.network.roundings, (self.name, self.view)
        if key not in cache:
            variance = read(self.tensor, self.cut.index)
            parts = self.cut.matrices if self.cut.index is None else self.cut.of_part
            cache[key] = None if variance is None else rounding_of(parts(variance))
        return cache[key]

    def set_rounding(self, rounding: Rounding | None) -> None:
        """Take the rounding error from an earlier run, so that the weights need not be decoded again."""
        self.network.roundings[self.name, self.view] = rounding


def build_layers(
    network: Network, *, split_qkv: bool, flatten: bool
) -> tuple[tuple[Layer, ...], tuple[Skipped, ...]]:
    """Every tensor as layers or as skipped, in the network's order."""
    names = network.names
    layers: list[Layer] = []
    skipped = list(network.contents.unread)
    for tensor in network.tensors:
        reason = _skip_reason(network, tensor)
        if reason is not None:
            skipped.append(Skipped(tensor.name, reason))
            continue
        kind, parts = views_of(names, tensor, split_qkv=split_qkv, flatten=flatten)
        for suffix, view, role in parts:
            layers.append(
                Layer(
                    name=tensor.name + suffix,
                    role=role,
                    block=names.blocks[tensor.name],
                    kind=kind,
                    tensor=tensor.name,
                    cut=view,
                    expert=_expert(names.label(tensor.name), suffix),
                    network=network,
                )
            )
    # A safetensors file keeps no order, so its tensors come sorted by name; other formats keep their own.
    ordered = _in_forward_order(layers) if network.format == "safetensors" else layers
    return tuple(ordered), tuple(skipped)


def _in_forward_order(layers: list[Layer]) -> list[Layer]:
    """Layers sorted by name in the order of the forward pass: embeddings, blocks from q to MLP out, heads.

    Within a block only layers of a transformer's roles are moved; everything else keeps its position.
    """
    flow = {role: position for position, role in enumerate(Role) if role.startswith(("attention", "mlp"))}
    heads = {_top(x.name) for x in layers if x.role is Role.HEAD} - {
        _top(x.name) for x in layers if x.role not in (Role.HEAD, Role.LINEAR)
    }

    def section(layer: Layer) -> int:
        if layer.role is Role.EMBEDDING:
            return 0
        return 2 if layer.role is Role.HEAD or _top(layer.name) in heads else 1

    sections = sorted(layers, key=section)
    ordered: list[Layer] = []
    for _, group in groupby(
        sections, key=lambda layer: (layer.block, layer.name.split(f".{layer.block}.")[0])
    ):
        run = list(group)
        moved = iter(sorted((x for x in run if x.role in flow), key=lambda x: (_branch(x), flow[x.role])))
        ordered += [next(moved) if x.role in flow else x for x in run]
    return ordered


def _top(name: str) -> str:
    return name.split(".")[0]


def _branch(layer: Layer) -> int:
    """Self-attention before cross-attention before the MLP."""
    if layer.role.startswith("mlp"):
        return 2
    return 1 if re.search("cross|encoder_attn|EncDec", layer.name) else 0


def _expert(name: str, suffix: str) -> int | None:
    """The expert's number: in the name, or the position in a stack of experts."""
    if suffix[1:-1].isdigit() and EXPERTS.search(name):
        return int(suffix[1:-1])
    return expert_of(name)


_AUXILIARY = {
    "scales of a quantised weight": r"(?i)(?:^|[._])(?:scales?|scale_inv|scales_inv|qscales?|q_scale"
    r"|q_scale_max|scb|absmax|nested_absmax|quant_map|nested_quant_map|global_scale|scale_2|scale_packed"
    r"|weight_format|codebooks?|s_channel|s_group|scb_stats)$",
    "zero points of a quantised weight": r"(?:^|[._])(?:qzeros|zeros?|zero_points?|scaled_zeros)$",
    "an index that a quantised weight is ordered by": r"(?:^|[._])(?:g_idx|perm|q_perm|q_invperm|q_groups"
    r"|q_group_map|workspace)$",
    "a quantised weight's description of itself": r"quant_state\.bitsandbytes__"
    r"|(?:^|[._])(?:weight_shape|quant_state)$",
    "a bias": r"(?:^|[._])(?:bias(?:es)?|e_score_correction_bias)$",
    "rows that an adapter puts in place of an embedding's": r"trainable_tokens_(?:delta|original)(?:\.[^.]+)?$",
    "a state-space model's decay rates": r"(?:^|\.)(?:A_logs?|A_b_log|A_re|A_im|A_real|A_imag|log_A_real"
    r"|dt_bias|ssm_a)$",
    "a linear attention's decay rates": r"(?:^|\.)(?:time_(?:decay|faaaa|first)|(?:query|key|diagonal)_decay"
    r"|slope_rate)$",
}
"""What tensors are that accompany weights and are none, whatever their shape, and patterns of their names."""

_NO_WEIGHT = {
    "statistics": r"(?:running_mean|running_var|moving_mean|moving_variance|inv_freq|rotary_(?:sin|cos)"
    r"|(?:sin|cos)_cached|freqs_(?:cis|sin|cos))(:0)?$",
    "optimiser": r"^(?:optimi[sz]ers?|optim|opt_state|lr_schedulers?)(?:_states?|_state_dict)?[./]."
    r"|[./](?:(?:max_)?exp_avg(?:_sq)?|momentum_buffer|square_avg|acc_delta|exp_inf)$",
    "mask": r"(?:^|[._/])(?:masks?|tril|triu|masked_bias|IGNORE)$",
    "masking-bias": r"(attn|attention)\.bias$",
    "bias": r"(?i)(?:^|[._/])(?:bias(?:es)?(?::0)?|b_(?:q|k|v|o|in|out|gate|u))$",
}
"""Patterns of names of tensors that are no weights, depending on their shapes."""


def auxiliary_reason(name: str) -> str | None:
    """Why a tensor of that name is no weight, however many dimensions it has; ``None`` if it may be one.

    Examples:
        >>> auxiliary_reason("model.layers.0.mlp.up_proj.scales")
        'scales of a quantised weight'
        >>> auxiliary_reason("backbone.layers.3.mixer.A_log"), auxiliary_reason("fc1.weight")
        ("a state-space model's decay rates", None)
    """
    return next((reason for reason, pattern in _AUXILIARY.items() if re.search(pattern, name)), None)


def is_buffer(tensor: Tensor) -> bool:
    """Whether a tensor is known to hold no parameters: running statistics, rotary tables, masks, optimiser state."""
    meaning = _meaning(_DIGITS.sub("0", tensor.name))
    return "statistics" in meaning or "optimiser" in meaning or _is_mask(tensor, meaning)


_DIGITS = re.compile(r"[0-9]+")


@lru_cache(maxsize=4096)
def _meaning(name: str) -> Mapping[str, str | None]:
    """What a name says whose numbers are all 0: kinds of :data:`_NO_WEIGHT`, and what accompanies weights."""
    kinds: dict[str, str | None] = {
        kind: kind for kind, pattern in _NO_WEIGHT.items() if re.search(pattern, name)
    }
    return kinds | {"auxiliary": auxiliary_reason(name)}


def _is_mask(tensor: Tensor, meaning: Mapping[str, str | None]) -> bool:
    if len(tensor.shape) < 2:
        return False
    *leading, rows, cols = tensor.shape  # GPT-2 keeps its causal mask as attn.bias of (1, 1, n, n)
    square = rows == cols and all(side == 1 for side in leading)
    return "mask" in meaning or ("masking-bias" in meaning and square)


def _skip_reason(network: Network, tensor: Tensor) -> str | None:
    """Why a tensor is no weight matrix, or ``None``."""
    meaning = _meaning(_DIGITS.sub("0", tensor.name))
    label = network.names.label(tensor.name)
    mask = _is_mask(tensor, meaning) or (label != tensor.name and "mask" in _meaning(label))
    if tensor.name in network.ties:
        return f"tied to {network.ties[tensor.name]}, counted there"
    if network.format == "peft" and ".base_layer." in tensor.name:
        return "the base's own weight, kept beside its update"
    if 0 in tensor.shape:
        return "empty: one of its sides is 0"
    if len(tensor.shape) == 0:
        return "a single number"
    if meaning["auxiliary"] is not None and len(tensor.shape) > 1 and not is_buffer(tensor):
        return meaning["auxiliary"]
    if not tensor.floating:
        return f"dtype {tensor.dtype} is not analysed"
    if len(tensor.shape) == 1:
        return "one dimension (a bias, norm or scale)"
    if mask:
        return "a mask, not a weight"
    if "optimiser" in meaning:
        return "optimizer state, not part of the network"
    if "statistics" in meaning:
        return "a table of statistics or rotary angles, not a weight"
    if "bias" in meaning:
        return f"a bias of shape {tensor.shape[:8]} (per head or expert), not a weight matrix"
    if len(tensor.shape) > 2 and tensor.size == max(tensor.shape):
        return f"one dimension in the shape {tensor.shape[:8]}"
    return None


class Selectable(Protocol):
    """Anything with a name, the name of its tensor, a role and a block, such as :class:`Layer`."""

    @property
    def name(self) -> str:
        """The layer's name."""

    @property
    def tensor(self) -> str:
        """The tensor that it is, or is part of."""

    @property
    def role(self) -> Role:
        """What it does."""

    @property
    def block(self) -> int | None:
        """The block it belongs to."""


L = TypeVar("L", bound=Selectable)


def select(layers: Sequence[L], patterns: str | Iterable[str] | None) -> tuple[L, ...]:
    """The layers that match the patterns, in their own order; all of them if there is no pattern.

    Args:
        layers: The layers to select from.
        patterns: One pattern or several, as the module's docstring describes them.

    Raises:
        BadInputError: A pattern matches nothing (the nearest layers are named), or nothing is left.

    Examples:
        >>> import numpy as np, strati
        >>> net = strati.open({f"h.{i}.{n}.weight": np.eye(2) for i in range(3) for n in ("attn.q_proj", "mlp.fc1")})
        >>> [layer.name for layer in select(net.layers(), ["role:mlp.*", "!block:1-2"])]
        ['h.0.mlp.fc1.weight']
        >>> select(net.layers(), "h.0.mlp.fc2")
        Traceback (most recent call last):
        strati.core.errors.BadInputError: h.0.mlp.fc2: matches no layer; nearest: h.0.mlp.fc1, ...
    """
    listed = as_patterns(patterns)
    if not listed:
        return tuple(layers)
    included: set[int] = set()
    excluded: set[int] = set()
    for pattern in listed:
        matches = _matching(layers, pattern.removeprefix("!"), pattern)
        (excluded if pattern.startswith("!") else included).update(matches)
    if all(pattern.startswith("!") for pattern in listed):
        included = set(range(len(layers)))
    selected = included - excluded
    if not selected:
        raise BadInputError(", ".join(listed), f"leaves none of the {len(layers)} layers; drop a '!' pattern")
    return tuple(layer for index, layer in enumerate(layers) if index in selected)


def select_names(
    names: Iterable[str], patterns: str | Iterable[str] | None, *, whole_blocks: bool = False
) -> tuple[str, ...]:
    """Like :func:`select` for bare names of tensors or modules; roles and blocks follow from the names.

    Args:
        names: The names to select from.
        patterns: As in :func:`select`.
        whole_blocks: Names may be those of blocks themselves (``h.3``), not only of tensors inside them.

    Examples:
        >>> select_names(["fc1", "fc2", "fc3"], "!fc2")
        ('fc1', 'fc3')
        >>> select_names(["h.0", "h.1", "h.2"], "block:1-2", whole_blocks=True)
        ('h.1', 'h.2')
    """
    tensors = {name: f"{name.partition(':')[0]}.any.weight" if whole_blocks else name for name in names}
    block_of = blocks(tensors.values())
    layers = [
        _NamedLayer(name, name, role_of(name, block_of[tensor]), block_of[tensor])
        for name, tensor in tensors.items()
    ]
    return tuple(layer.name for layer in select(layers, patterns))


def as_patterns(patterns: str | Iterable[str] | None) -> tuple[str, ...]:
    """The patterns that users pass as ``layers=``: none, one or several.

    Raises:
        BadInputError: Something else, or an empty pattern.

    Examples:
        >>> as_patterns(None), as_patterns("fc*"), as_patterns(["fc1", "!fc2"])
        ((), ('fc*',), ('fc1', '!fc2'))
    """
    if patterns is None:
        return ()
    try:
        listed = (patterns,) if isinstance(patterns, str) else tuple(patterns)
    except TypeError:
        raise BadInputError("layers", f"must be patterns, not a {type(patterns).__name__}") from None
    for pattern in listed:
        if not isinstance(pattern, str):
            raise BadInputError("layers", f"must be patterns (text), not a {type(pattern).__name__}")
        if not pattern.removeprefix("!").strip():
            raise BadInputError("layers", "has an empty pattern; give a layer's name, or '*' for all")
    return listed


def module_name(tensor: str) -> str:
    """The module that a tensor belongs to: its name without the last word, or the name itself if it is one word.

    Examples:
        >>> module_name("h.0.mlp.c_fc.weight"), module_name("dense/dense_1/kernel:0"), module_name("W1")
        ('h.0.mlp.c_fc', 'dense/dense_1', 'W1')
    """
    return re.sub(r"[./][^./]*$", "", tensor) or tensor


@dataclass(frozen=True)
class _NamedLayer:
    name: str
    tensor: str
    role: Role
    block: int | None


def _matching(layers: Sequence[Selectable], pattern: str, written: str) -> set[int]:
    kind, colon, argument = pattern.partition(":")
    if colon and kind == "block":
        return _in_blocks(layers, argument, written)
    if colon and kind == "role":
        matches = {i for i, layer in enumerate(layers) if fnmatchcase(str(layer.role), argument)}
        roles = ", ".join(sorted({str(layer.role) for layer in layers})) or "none"
        reason = f"no layer has this role; the roles here are: {roles}"
    else:
        matches = {i for i, layer in enumerate(layers) if _has_name(layer, pattern)}
        reason = "matches no layer" if matches else f"matches no layer; {_nearest(layers, pattern)}"
    if not matches:
        raise BadInputError(written, reason)
    return matches


def _has_name(layer: Selectable, pattern: str) -> bool:
    # A name may itself hold brackets ("c_attn.weight[q]"), which a shell pattern would read as a set of letters.
    names = (layer.name, layer.tensor, module_name(layer.tensor))
    return any(name == pattern or fnmatchcase(name, pattern) for name in names)


def _in_blocks(layers: Sequence[Selectable], ranges: str, written: str) -> set[int]:
    selected: set[int] = set()
    numbers = {layer.block for layer in layers if layer.block is not None}
    for part in ranges.split(","):
        ends = re.fullmatch(r"\s*([0-9]{1,8})\s*(?:-\s*([0-9]{1,8})\s*)?", part)
        if ends is None:
            raise BadInputError(written, "is not a range of blocks; write block:3, block:3-7 or block:0,3-7")
        first, last = int(ends[1]), int(ends[2] or ends[1])
        if first > last:
            raise BadInputError(written, f"runs backwards; write block:{last}-{first}")
        selected |= {number for number in numbers if first <= number <= last}
    if not selected:
        span = (
            f"the blocks here are {min(numbers)} to {max(numbers)}"
            if numbers
            else "no layer here has a block"
        )
        raise BadInputError(written, f"matches no layer; {span}")
    return {i for i, layer in enumerate(layers) if layer.block in selected}


def _nearest(layers: Sequence[Selectable], pattern: str) -> str:
    """The layers whose names are nearest: those that contain its letters first, then by similarity."""
    names = list(dict.fromkeys(module_name(layer.tensor) for layer in layers))
    if not names:
        return "there are no layers"
    plain = re.sub(r"[*?\[\]!]", "", pattern)
    inside = [name for name in names if plain and plain.lower() in name.lower()]
    close = difflib.get_close_matches(plain, names, n=3, cutoff=0.3)
    listed = list(dict.fromkeys([*inside, *close]))[:3] or names[:3]
    hint = f"; write '*{plain}*' to match part of a name" if inside and "*" not in pattern else ""
    return f"nearest: {', '.join(listed)}{hint}"
