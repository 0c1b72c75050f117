"""Random changes of a block's weights that leave its function as it is.

Permutations: neurons of the MLP, rows of v with columns of out, whole heads within their groups, rows of q and k
within a head (under a rotary embedding: rotations within a frequency pair). Scales and signs: rows of v against
columns of out, of q against k, of up against down where the activation allows it, norm weights against the columns
that read them.

Which changes an architecture allows depends on its positions and norms, so that only the model types of
:data:`_KNOWN_TYPES` are changed; tests run each of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.reassembly.transformer.blueprint import Blueprint

    Block = dict[str, NDArray[np.float64]]

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
