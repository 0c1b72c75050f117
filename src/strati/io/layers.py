"""From tensors to layers: each weight matrix with its role, its block and the view of the tensor it is.

Every tensor is either one or more layers, with the view named, or listed as skipped with its reason.
What a name means is decided in ``roles.py``; how a tensor is cut, in ``views.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from dataclasses import fields as dataclass_fields
from itertools import groupby
from math import prod
from typing import TYPE_CHECKING, Any

from strati.io import views
from strati.io.name_context import Names, is_raw
from strati.io.quantised.auxiliary_tensors import auxiliary_reason
from strati.io.quantised.rounding_error import Rounding, rounding_of
from strati.io.raw_checkpoint import Hint, Quantisation, Skipped, Tensor
from strati.io.roles import Role, expert_of, modules
from strati.io.views import View

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.io.adapters.lora import AdapterUpdate
    from strati.io.load import Network


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
        expert: Which expert of a mixture it belongs to, if any.
        quantisation: How it was rounded before it was stored; ``None`` where it was not.
        adapter: The low-rank update it is; ``None`` where it is a weight.
        known: What rounding did to it, where that is known already; ``None`` to decode it and see.
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
    expert: int | None = None
    quantisation: Quantisation | None = None
    adapter: AdapterUpdate | None = None
    known: Rounding | None = field(default=None, compare=False)

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        """Between processes an update travels as its network: how its factors are read does not."""
        fields = {
            item.name: getattr(self, item.name) for item in dataclass_fields(self) if item.name != "adapter"
        }
        return _restored, (fields, self.adapter is not None)

    def matrices(self) -> Iterator[NDArray[Any]]:
        """The matrices one at a time, in their own dtype; views of the file where it stores them plainly."""
        part = self.network.contents.read_part
        if part is not None and self.cut.index is not None:
            return self.cut.of_part(part(self.tensor, self.cut.index))
        return self.cut.matrices(self.network.read(self.tensor))

    def noise_floor(self) -> float | None:
        """The eigenvalue below which rounding hides what the weights were; ``None`` where they were not rounded."""
        found = self.rounding()
        return None if found is None else found.floor

    def rounding(self) -> Rounding | None:
        """What rounding did to the weights, found once; ``None`` where they were not rounded, or that is not known."""
        read = self.network.contents.rounding
        if self.known is not None or self.quantisation is None or read is None:
            return self.known
        found = self.network.roundings
        if (self.name, self.view) not in found:
            variance = read(self.tensor, self.cut.index)
            parts = self.cut.matrices if self.cut.index is None else self.cut.of_part
            found[self.name, self.view] = None if variance is None else rounding_of(parts(variance))
        return found[self.name, self.view]


def _restored(fields: dict[str, Any], update: bool) -> Layer:
    network = fields["network"]
    return Layer(**fields, adapter=network.contents.adapters[fields["tensor"]] if update else None)


def build_layers(
    network: Network, *, split_qkv: bool, flatten: bool
) -> tuple[tuple[Layer, ...], tuple[Skipped, ...]]:
    """Every tensor as layers or as skipped, in the network's order."""
    names = network.names
    layers: list[Layer] = []
    skipped = list(network.contents.unread)
    for tensor in network.tensors:
        if tensor.name in network.ties:
            skipped.append(Skipped(tensor.name, f"tied to {network.ties[tensor.name]}, counted there"))
            continue
        reason = _skip_reason(tensor, names.label(tensor.name))
        if network.format == "peft" and ".base_layer." in tensor.name:
            reason = "the base's own weight, kept beside its update"
        if reason is not None:
            skipped.append(Skipped(tensor.name, reason))
            continue
        hint = network.contents.hints.get(tensor.name, Hint())
        kind, whole = _base_view(names, tensor, hint, flatten)
        role = names.role(tensor, kind)
        used_by = f", used by {hint.label}" if hint.label is not None else ""
        for suffix, view, part in _parts(names, tensor, role, kind, whole, split_qkv):
            layers.append(
                Layer(
                    tensor.name + suffix,
                    part,
                    names.blocks[tensor.name],
                    kind,
                    (view.rows, view.cols),
                    tensor.dtype,
                    view.text + used_by,
                    _size(view, network.contents.adapters.get(tensor.name)),
                    tensor.quantised,
                    tensor.name,
                    view.count,
                    network,
                    view,
                    _expert(names.label(tensor.name), suffix),
                    network.contents.quantisation.get(tensor.name),
                    network.contents.adapters.get(tensor.name),
                )
            )
    # A safetensors file keeps no order, so its tensors come sorted by name; other formats keep their own.
    ordered = _in_flow(layers) if network.format == "safetensors" else layers
    return tuple(ordered), tuple(skipped)


def _size(view: View, update: AdapterUpdate | None) -> int:
    """Number of parameters: of an update, those of its two factors."""
    return view.rows * view.cols * view.count if update is None else update.rank * (update.rows + update.cols)


def _in_flow(layers: list[Layer]) -> list[Layer]:
    """Layers sorted by name in the order in which data meet them: embeddings, blocks from q to MLP out, heads.

    Within a block only layers of a transformer's roles are moved; everything else keeps its place.
    """
    flow = {role: place for place, role in enumerate(Role) if role.startswith(("attention", "mlp"))}
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


_EXPERTS = r"expert|exps|moe[._]"


def _expert(name: str, suffix: str) -> int | None:
    """The expert's number: in the name, or the place in a stack of experts."""
    if suffix[1:-1].isdigit() and re.search(_EXPERTS, name):
        return int(suffix[1:-1])
    return expert_of(name)


_STATISTICS = re.compile(
    r"(?:running_mean|running_var|moving_mean|moving_variance|inv_freq|rotary_(?:sin|cos)|(?:sin|cos)_cached"
    r"|freqs_(?:cis|sin|cos))(:0)?$"
)
_MASK = re.compile(r"(?:^|[._/])(?:masks?|tril|triu|masked_bias|IGNORE)$")
_MASKING_BIAS = re.compile(r"(attn|attention)\.bias$")
_BIAS = re.compile(r"(?:^|[._/])(?:bias(?:es)?(?::0)?|b_(?:q|k|v|o|in|out|gate|u))$", re.IGNORECASE)
_OPTIMISER = re.compile(
    r"^(?:optimi[sz]ers?|optim|opt_state|lr_schedulers?)(?:_states?|_state_dict)?[./].|[./](?:(?:max_)?exp_avg(?:_sq)?"
    r"|momentum_buffer|square_avg|acc_delta|exp_inf)$"
)


def is_buffer(tensor: Tensor) -> bool:
    """Whether a tensor is known to hold no parameters: running statistics, rotary tables, masks, optimiser state."""
    return bool(_STATISTICS.search(tensor.name) or _OPTIMISER.search(tensor.name)) or _masks(
        tensor, tensor.name
    )


def _masks(tensor: Tensor, label: str) -> bool:
    if len(tensor.shape) < 2:
        return False
    if _MASK.search(tensor.name) or _MASK.search(label):
        return True
    *leading, rows, cols = tensor.shape  # GPT-2 keeps its causal mask as attn.bias of (1, 1, n, n)
    return bool(_MASKING_BIAS.search(tensor.name)) and rows == cols and all(side == 1 for side in leading)


def _skip_reason(tensor: Tensor, label: str) -> str | None:
    """Why a tensor is no weight matrix, or ``None``."""
    if 0 in tensor.shape:
        return "empty: one of its sides is 0"
    if len(tensor.shape) == 0:
        return "a single number"
    companion = auxiliary_reason(tensor.name)
    if companion is not None and len(tensor.shape) > 1 and not is_buffer(tensor):
        return companion
    if not tensor.floating:
        return f"dtype {tensor.dtype} is not analysed"
    if len(tensor.shape) == 1:
        return "one dimension (a bias, norm or scale)"
    if _masks(tensor, label):
        return "a mask, not a weight"
    if _OPTIMISER.search(tensor.name):
        return "optimizer state, not part of the network"
    if is_buffer(tensor):
        return "a table of statistics or rotary angles, not a weight"
    if _BIAS.search(tensor.name):
        return f"a bias of shape {tensor.shape[:8]} (per head or expert), not a weight matrix"
    if len(tensor.shape) > 2 and tensor.size == max(tensor.shape):
        return f"one dimension in the shape {tensor.shape[:8]}"
    return None


def _base_view(names: Names, tensor: Tensor, hint: Hint, flatten: bool) -> tuple[str, View]:
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
    if kind == "conv" and len(shape) == 2:  # an update of a kernel
        flat = replace(views.as_stored(shape), text="kernel flattened: outputs x (inputs x positions)")
        return "conv", flat
    if len(shape) == 2:
        embedding = names.role(tensor, "linear") is Role.EMBEDDING or kind == "embedding"
        # Where the format or the module says what the tensor is, it also says how it is stored; a name only hints.
        turned = hint.transposed or (kind is None and names.inputs_first(tensor.name))
        table = embedding and not is_raw(tensor.name)
        view = views.transposed(shape) if turned and not table else views.as_stored(shape)
        return "embedding" if embedding else "linear", view
    split_by_head = names.head_by_head(tensor.name)
    if split_by_head is not None:
        return "linear", views.per_head(shape, turned=split_by_head[0], out=split_by_head[1])
    if kind == "conv" or (kind is None and _is_kernel(names, tensor)):
        return "conv", views.kernel(shape, inputs_first=hint.transposed, flatten=flatten)
    if all(side == 1 for side in shape[:-2]):
        embedding = names.role(tensor, "linear") is Role.EMBEDDING
        return "embedding" if embedding else "linear", views.as_stored(shape)
    return "stack", views.part_of_stack(shape, 0, "matrix")


def _is_kernel(names: Names, tensor: Tensor) -> bool:
    """Whether a tensor is a convolution ``(out, in, k, ...)`` rather than a stack of matrices ``(n, ..., out, in)``."""
    words = " ".join(modules(names.label(tensor.name)))
    axes = len(tensor.shape)
    if axes > 5 or re.search(r"expert|moe|stack|exps", words):
        return False
    if re.search(r"conv|downsample", words):
        return True
    if names.role(tensor, "linear") is Role.EMBEDDING and all(side == 1 for side in tensor.shape[:-2]):
        return False
    if axes > 3:
        return max(tensor.shape[2:]) <= 64  # no kernel is 65 wide
    bias = names.shape(_bias_name(tensor.name))
    if bias is not None:
        return bias == tensor.shape[:1]
    return tensor.shape[2] <= 16 and tensor.shape[2] < min(tensor.shape[:2])


def _gates(names: Names, tensor: Tensor) -> int:
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
    names: Names, tensor: Tensor, role: Role, kind: str, whole: View, split_qkv: bool
) -> list[tuple[str, View, Role]]:
    """The layers that a tensor makes up: suffix of the name, view, role."""
    if whole.index is not None:
        what = (
            "direction"
            if kind in ("lstm", "gru", "rnn")
            else "expert"
            if re.search(_EXPERTS, names.label(tensor.name))
            else "matrix"
        )
        turned = names.stack_inputs_first(tensor.name)
        return [
            (f"[{i}]", views.part_of_stack(tensor.shape, i, what, turned=turned), role)
            for i in range(prod(tensor.shape[:-2]))
        ]
    many = names.experts_in_rows(tensor.name) if kind == "linear" else 0
    if many:
        turned = role is Role.MLP_OUT
        return [(f"[{i}]", views.part_of_rows(whole, i, many, turned=turned), role) for i in range(many)]
    if role is Role.QKV and split_qkv and kind == "linear":
        parts = _split(names, tensor, whole)
        if parts:
            return [(f"[{'qkv'[i]}]", view, _QKV[i]) for i, view in enumerate(parts)]
        return [("", replace(whole, text=f"{whole.text}, not split: how it is fused is not known"), role)]
    return [("", whole, role)]


_BY_HEAD = frozenset({"gpt_neox", "gpt_neox_japanese", "bloom", "persimmon", "falcon"})
"""Model types whose ``query_key_value`` is ordered head by head, each head holding its q, k and v."""


def _split(names: Names, tensor: Tensor, whole: View) -> list[View]:
    """The three views of a fused matrix; none where the file does not say how it is fused."""
    word = modules(tensor.name)[-1]
    heads, groups, width = names.heads()
    if word == "query_key_value":  # ordered head by head: needs the number of heads
        by_head = (names.network.config or {}).get("model_type") in _BY_HEAD
        if by_head and heads and groups == heads and whole.rows % (3 * heads) == 0:
            return [views.part_of_heads(whole, i, heads) for i in range(3)]
        return []
    if heads and groups and groups != heads:
        width = width or whole.rows // (heads + 2 * groups)
        sizes = (heads * width, groups * width, groups * width)
    elif whole.rows % 3 == 0 and (heads or whole.rows == 3 * whole.cols):
        sizes = (whole.rows // 3,) * 3  # else keys and values may have fewer heads than queries
    else:
        return []
    if sum(sizes) != whole.rows or word in ("to_kv", "kv", "kv_proj", "kv_a_proj_with_mqa", "kv_b_proj"):
        return []
    return [views.part_of_qkv(whole, i, sizes) for i in range(3)]
