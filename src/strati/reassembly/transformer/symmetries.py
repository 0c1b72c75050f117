"""Changes of a block's weights that leave its function as it is: applied at random, and recognised.

Permutations: neurons of the MLP, rows of v with columns of out, whole heads within their groups, rows of q and k
within a head (under a rotary embedding: rotations within a frequency pair). Scales and signs: rows of v against
columns of out, of q against k, of up against down where the activation allows it, norm weights against the columns
that read them.

Two blocks that differ by such changes alone compute one function and can change places. Each half of a block is
compared at random probe vectors by quantities that no such change alters: sums over heads of scores and outputs, and
the output of the MLP. Which changes an architecture allows depends on its positions and norms, so that only the model
types of :data:`_KNOWN_TYPES` are changed; tests run each of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from strati.core.rng import stream
from strati.reassembly.transformer.pieces import canonical

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.reassembly.transformer.blueprint import Blueprint
    from strati.reassembly.transformer.pieces import TransformerPieces

    Block = dict[str, NDArray[np.float64]]
    Floats = NDArray[np.float64]
    Half = Literal["attention", "mlp"]
    Numbers = Sequence[Mapping[str, int]]

_SPREAD = 0.5
"""Standard deviation of the logarithm of a random scale."""

_KNOWN_TYPES = frozenset(
    {"bert", "distilbert", "gpt2", "llama", "mistral", "opt", "phi3", "qwen2", "qwen3", "roberta", "starcoder2", "vit",
     "whisper"}
)  # fmt: skip


def has_known_symmetries(config: Mapping[str, Any]) -> bool:
    """Whether the changes of this module leave the function of the network of a ``config.json`` as it is.

    Examples:
        >>> has_known_symmetries({"model_type": "llama"}), has_known_symmetries({"model_type": "bloom"})
        (True, False)
    """
    rotary = {**config, **(config.get("rope_parameters") or {})}
    return config.get("model_type") in _KNOWN_TYPES and rotary.get("partial_rotary_factor") in (None, 1)


def apply_random_symmetry(
    block: Block, blueprint: Blueprint, rng: np.random.Generator, *, permute: bool, rescale: bool
) -> Block:
    """The same block with other weights.

    Args:
        block: Role to tensor; matrices outputs by inputs, fused ones split into ``q k v``, ``gate up``.
        blueprint: Heads, rotary embedding, activation, where the norms stand.
        rng: The random stream.
        permute: Change the order of hidden units.
        rescale: Change their scales and signs, and those of the norms.
    """
    new = dict(block)
    if permute:
        _permute_mlp(new, rng)
        _permute_heads(new, blueprint, rng)
        _permute_values(new, blueprint, rng)
        _turn_queries(new, blueprint, rng)
    if rescale:
        _rescale_units(new, blueprint, rng)
        if blueprint.before:
            _rescale_norm(new, "norm1", ("q", "k", "v"), rng)
            _rescale_norm(new, "norm2", ("gate", "up"), rng)
    return new


def _permute_mlp(block: Block, rng: np.random.Generator) -> None:
    order = rng.permutation(block["up"].shape[0])
    for role in ("up", "gate", "up.bias", "gate.bias"):
        if role in block:
            block[role] = block[role][order]
    block["down"] = block["down"][:, order]


def _permute_heads(block: Block, blueprint: Blueprint, rng: np.random.Generator) -> None:
    """Groups among themselves, and query heads within their group."""
    heads, groups = blueprint.heads, blueprint.groups
    each = heads // groups
    group_order = rng.permutation(groups)
    head_order = np.concatenate([g * each + rng.permutation(each) for g in group_order])
    for role, order, count in (
        ("q", head_order, heads),
        ("k", group_order, groups),
        ("v", group_order, groups),
    ):
        for part in (role, f"{role}.bias"):
            if part in block:
                block[part] = _by_heads(block[part], count)[order].reshape(block[part].shape)
    columns = _by_heads(block["out"].T, heads)[head_order]
    block["out"] = columns.reshape(block["out"].T.shape).T


def _permute_values(block: Block, blueprint: Blueprint, rng: np.random.Generator) -> None:
    heads, groups = blueprint.heads, blueprint.groups
    wide = block["v"].shape[0] // groups
    orders = [rng.permutation(wide) for _ in range(groups)]
    rows = np.concatenate([g * wide + order for g, order in enumerate(orders)])
    for part in ("v", "v.bias"):
        if part in block:
            block[part] = block[part][rows]
    each = heads // groups
    columns = np.concatenate([h * wide + orders[h // each] for h in range(heads)])
    block["out"] = block["out"][:, columns]


def _turn_queries(block: Block, blueprint: Blueprint, rng: np.random.Generator) -> None:
    """Rows within a head permuted or, where a rotary embedding fixes their places, rotated in pairs."""
    if _normed(block):
        return
    heads, groups = blueprint.heads, blueprint.groups
    wide = block["k"].shape[0] // groups
    turns = []
    for _ in range(groups):
        turn = np.eye(wide)[rng.permutation(wide)]
        if blueprint.rotary:
            half = wide // 2
            angle = rng.uniform(0, 2 * np.pi, half)
            turn = np.eye(wide)
            low, high = np.arange(half), np.arange(half) + half
            turn[low, low] = turn[high, high] = np.cos(angle)
            turn[low, high], turn[high, low] = -np.sin(angle), np.sin(angle)
        turns.append(turn)
    for role, count in (("q", heads), ("k", groups)):
        for part in (role, f"{role}.bias"):
            if part in block:
                cut = _by_heads(block[part], count)
                which = [turns[h * groups // count] for h in range(count)]
                block[part] = np.stack([t @ c for t, c in zip(which, cut, strict=True)]).reshape(
                    block[part].shape
                )


def _rescale_units(block: Block, blueprint: Blueprint, rng: np.random.Generator) -> None:
    heads, groups = blueprint.heads, blueprint.groups
    each = heads // groups
    value = _scales(rng, block["v"].shape[0])
    _scale_rows(block, "v", value)
    wide = len(value) // groups
    block["out"] = block["out"] / np.repeat(value.reshape(groups, wide), each, axis=0).reshape(-1)
    if not _normed(block):
        wide = block["k"].shape[0] // groups
        key = _scales(rng, groups * wide).reshape(groups, wide)
        if blueprint.rotary:  # one scale for both rows of a pair
            key = np.concatenate([key[:, : wide // 2]] * 2, axis=1)
        _scale_rows(block, "k", key.reshape(-1))
        _scale_rows(block, "q", 1 / np.repeat(key, each, axis=0).reshape(-1))
    if "gate" in block:
        up = _scales(rng, block["up"].shape[0])
    elif blueprint.activation == "relu":
        up = np.abs(_scales(rng, block["up"].shape[0]))
    else:
        return
    _scale_rows(block, "up", up)
    block["down"] = block["down"] / up


def _rescale_norm(block: Block, norm: str, readers: tuple[str, ...], rng: np.random.Generator) -> None:
    if f"{norm}.weight" not in block:
        return
    scale = np.abs(_scales(rng, len(block[f"{norm}.weight"])))
    for part in ("weight", "bias"):
        if f"{norm}.{part}" in block:
            block[f"{norm}.{part}"] = block[f"{norm}.{part}"] * scale
    for role in readers:
        if role in block:
            block[role] = block[role] / scale


def _normed(block: Block) -> bool:
    """Whether q and k pass a norm of their own (Qwen3), which fixes their rows."""
    return any("q_norm" in role or "k_norm" in role for role in block)


def _scale_rows(block: Block, role: str, scale: NDArray[Any]) -> None:
    block[role] = block[role] * scale[:, None]
    if f"{role}.bias" in block:
        block[f"{role}.bias"] = block[f"{role}.bias"] * scale


def _scales(rng: np.random.Generator, count: int) -> NDArray[np.float64]:
    return np.asarray(np.exp(_SPREAD * rng.standard_normal(count)) * rng.choice([-1.0, 1.0], count))


def _by_heads(values: NDArray[np.float64], heads: int) -> NDArray[np.float64]:
    return values.reshape(heads, len(values) // heads, *values.shape[1:])


_HALVES: dict[Half, tuple[str, ...]] = {
    "attention": ("q", "k", "v", "qkv", "out", "norm1"),
    "mlp": ("gate", "up", "gate_up", "down", "norm2"),
}
_PROBES = 6
_MIXED = 16
_ROUNDINGS = 2.0
"""Probe vectors; mixtures of the outputs of a head; relative difference, in roundings of the stored dtype, below which
two functions are one."""


@dataclass(frozen=True)
class EqualHalves:
    """Two blocks whose attention or MLP computes the same function from different weights."""

    part: Half
    a: int
    b: int


def equal_halves(pieces: TransformerPieces, blocks: Numbers, vectors: Numbers) -> tuple[EqualHalves, ...]:
    """Which blocks could exchange their attention or their MLP without changing the network.

    Halves of equal bytes are left out: they are the same pieces. In architectures whose symmetries are not known, only
    permuted neurons of the MLP are recognised.

    Args:
        pieces: The pieces.
        blocks: Role to piece of every block's matrices.
        vectors: The same of its biases and norm weights.
    """
    blueprint, known = pieces.blueprint, has_known_symmetries(pieces.config)
    probes = stream(0, "reassembly", "probes").standard_normal((_PROBES, blueprint.width))
    tolerance = _ROUNDINGS * max(_rounding(pieces.arrays[n].dtype) for n in blocks[0].values())
    numbers = [{**m, **v} for m, v in zip(blocks, vectors, strict=True)]
    signatures = [_signatures(_block(pieces, held), blueprint, probes) for held in numbers]
    layer_types = pieces.config.get("layer_types") or [None] * len(blocks)
    equal = []
    for a, b in combinations(range(len(blocks)), 2):
        pair = numbers[a], numbers[b]
        comparable = {
            "attention": known and layer_types[a] == layer_types[b],
            "mlp": known or _same(pieces, pair, [r for r in pair[0] if "norm" in r]),
        }
        for half, roles in _HALVES.items():
            same_function = _agree(signatures[a][half], signatures[b][half], tolerance)
            if comparable[half] and same_function and not _same(pieces, pair, roles):
                equal.append(EqualHalves(half, a, b))
    return tuple(sorted(equal, key=lambda half: half.part))


def pieces_of(half: EqualHalves, blocks: Numbers, vectors: Numbers) -> set[int]:
    """The pieces of both blocks that could change places."""
    return {
        number
        for k in (half.a, half.b)
        for role, number in (*blocks[k].items(), *vectors[k].items())
        if role.partition(".")[0] in _HALVES[half.part]
    }


def _agree(a: list[Floats], b: list[Floats], tolerance: float) -> bool:
    """Whether two signatures are those of one function to rounding."""
    return all(_rms(x - y) <= 2 * tolerance * max(_rms(x), _rms(y)) for x, y in zip(a, b, strict=True))


def _block(pieces: TransformerPieces, numbers: Mapping[str, int]) -> Block:
    """Role to float64 tensor of one block, fused matrices cut."""
    block: Block = {}
    for slot in pieces.blueprint.block:
        for role, values in canonical(pieces.arrays[numbers[slot.role]], slot, pieces.blueprint).items():
            block[role] = np.asarray(values, np.float64)
    return block


def _read(block: Block, role: str, norm: str, blueprint: Blueprint, probes: Floats) -> Floats:
    """What a matrix makes of normalised streams, probes x rows, its bias and that of its norm added."""
    weight, bias = block[role], block.get(f"{role}.bias", np.zeros(len(block[role])))
    if blueprint.before:
        probes = probes * block.get(f"{norm}.weight", np.ones(weight.shape[1]))
        probes = probes + block.get(f"{norm}.bias", np.zeros(weight.shape[1]))
    return np.asarray(probes @ weight.T + bias)


def _signatures(block: Block, blueprint: Blueprint, probes: Floats) -> dict[Half, list[Floats]]:
    """Arrays that no change of this module alters: of attention from its scores and outputs, of the MLP its output."""
    activation = _activation(blueprint.activation)
    hidden = _read(block, "up", "norm2", blueprint, probes)
    if "gate" in block:
        hidden = hidden * activation(_read(block, "gate", "norm2", blueprint, probes))
    else:
        hidden = activation(hidden)
    return {
        "attention": _attention(block, blueprint, probes)
        + _plain_vectors(block, blueprint, "out", "norm1", ("q", "k")),
        "mlp": [hidden @ block["down"].T, *_plain_vectors(block, blueprint, "down", "norm2", ())],
    }


def _attention(block: Block, blueprint: Blueprint, probes: Floats) -> list[Floats]:
    """Sums over heads, which do not depend on their order: of scores, of outputs, and of products of both."""
    heads, groups = blueprint.heads, blueprint.groups
    q, k, v = (_read(block, role, "norm1", blueprint, probes) for role in "qkv")
    q = q.reshape(len(probes), heads, -1)
    k, v = (np.repeat(side.reshape(len(probes), groups, -1), heads // groups, axis=1) for side in (k, v))
    if blueprint.rotary and q.shape[2] % 2 == 0:
        # rows half a head apart turn together, each pair at its own speed: no sum over pairs
        half = q.shape[2] // 2
        complex_q, complex_k = (side[..., :half] + 1j * side[..., half:] for side in (q, k))
        products = np.einsum("ahj,bhj->habj", complex_q.conj(), complex_k)
        scores = np.concatenate([products.real, products.imag], axis=-1).reshape(heads, -1)
    else:  # what a key adds at all positions alike falls out of the softmax
        scores = np.einsum("ahj,bhj->hab", q, k - k.mean(axis=0)).reshape(heads, -1)
    columns = block["out"].reshape(len(block["out"]), heads, -1)
    outputs = np.einsum("bhj,dhj->hbd", v, columns).reshape(heads, -1)
    mix = stream(0, "reassembly", "mixtures").standard_normal((outputs.shape[1], _MIXED))
    return [scores.sum(axis=0), outputs.sum(axis=0), scores.T @ (outputs @ mix)]


def _plain_vectors(
    block: Block, blueprint: Blueprint, writer: str, norm: str, normed: tuple[str, ...]
) -> list[Floats]:
    """Vectors that act as they are: the writer's bias, a norm after the half, norms of queries and keys."""
    names = [f"{writer}.bias"]
    if not blueprint.before:
        names += [f"{norm}.weight", f"{norm}.bias"]
    names += [r for r in sorted(block) if any(f"{side}_norm" in r or f"{side}.norm" in r for side in normed)]
    return [block[name] for name in names if name in block]


def _activation(name: str) -> Any:
    """The activation of a transformer's MLP; GELU where the name is not one of these."""
    from strati.reassembly.residual.network import ACTIVATIONS

    name = name.lower()
    if "silu" in name or "swish" in name:
        return ACTIVATIONS["silu"].value
    if name in ("relu", "tanh"):
        return ACTIVATIONS[name].value
    if name == "relu2" or "squared" in name:
        return lambda u: np.square(np.maximum(u, 0))
    if name == "quick_gelu":
        return lambda u: u * 0.5 * (1 + np.tanh(0.851 * u))
    tanh_form = "new" in name or "tanh" in name or "fast" in name
    return ACTIVATIONS["gelu-tanh" if tanh_form else "gelu"].value


def _rms(values: Floats) -> float:
    return float(np.sqrt(np.square(values).mean())) if values.size else 0.0


def _same(
    pieces: TransformerPieces, pair: tuple[Mapping[str, int], Mapping[str, int]], roles: Sequence[str]
) -> bool:
    """Whether two blocks have the same pieces, byte by byte, in some roles."""
    return all(
        np.array_equal(pieces.arrays[pair[0][r]], pieces.arrays[pair[1][r]])
        for r in pair[0]
        if r in roles or r.partition(".")[0] in roles
    )


def _rounding(dtype: np.dtype[Any]) -> float:
    """The relative rounding of a stored dtype; weights of more digits went through float32."""
    if dtype.kind == "V" or dtype.name == "bfloat16":
        return 2.0**-8
    return max(float(np.finfo(dtype).eps), float(np.finfo(np.float32).eps)) / 2
