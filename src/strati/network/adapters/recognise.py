"""The low-rank updates among a checkpoint's tensors, as tensors of their own.

PEFT names them ``X.lora_A.weight`` and ``X.lora_B.weight`` in files, with the adapter's name before ``weight`` in
memory, ``lora_embedding_A`` and ``B`` for embeddings, ``lora_magnitude_vector`` for DoRA. The scale follows from
``adapter_config.json``: ``lora_alpha``, ``alpha_pattern``, ``use_rslora``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from strati.network.adapters.lora import AdapterUpdate
from strati.network.contents import Contents, Hint, Skipped, Tensor
from strati.types import Flag

if TYPE_CHECKING:
    from numpy.typing import NDArray

_PART = re.compile(
    r"(?P<module>.+)\.(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)"
    r"(?:\.(?P<adapter>(?!weight$)[^.]+))?(?:\.weight)?$"
)
_PREFIX = "base_model.model."


def updates(contents: Contents) -> Contents:
    """The same checkpoint with every pair of factors as one tensor, their product; others come back as they are."""
    parts: dict[tuple[str, str | None], dict[str, Tensor]] = {}
    for tensor in contents.tensors:
        found = _PART.fullmatch(tensor.name)
        if found is not None:
            key = (found["module"], found["adapter"])
            parts.setdefault(key, {})[found["part"].removeprefix("lora_").removeprefix("embedding_")] = tensor
    config = (contents.config or {}).get("adapter_config")
    options: Mapping[str, Any] = config if isinstance(config, Mapping) else {}
    made: dict[str, tuple[AdapterUpdate, tuple[str, ...]]] = {}
    several = len({adapter for _, adapter in parts}) > 1
    for (module, adapter), tensors in parts.items():
        update = _update(contents, module, tensors, options)
        if update is not None:
            name = f"{update.name}[{adapter}]" if several else update.name
            made[name] = (replace(update, name=update.name), tuple(t.name for t in tensors.values()))
    if not made:
        return contents
    return _replaced(contents, made)


def _update(
    contents: Contents, module: str, parts: Mapping[str, Tensor], options: Mapping[str, Any]
) -> AdapterUpdate | None:
    if not {"A", "B"} <= set(parts):
        return None
    a, b = parts["A"], parts["B"]
    name = module.removeprefix(_PREFIX)
    embedding = "lora_embedding_A" in a.name
    if len(a.shape) < 2 or len(b.shape) < 2 or a.shape[0] != b.shape[1] or 0 in a.shape or 0 in b.shape:
        return None
    rank = a.shape[0]
    wide, tall = a.size // rank, b.size // rank
    if any(side != 1 for side in b.shape[2:]):
        return None

    def factors() -> tuple[NDArray[Any], NDArray[Any]]:
        right, left = contents.read(a.name).reshape(rank, wide), contents.read(b.name).reshape(tall, rank)
        return (right.T, left.T) if embedding else (left, right)

    rows, cols = (wide, tall) if embedding else (tall, wide)
    magnitude = parts.get("magnitude_vector")
    return AdapterUpdate(
        f"{name}.weight",
        rows,
        cols,
        rank,
        _scale(name, rank, options),
        factors,
        (b.shape[0], *a.shape[1:]) if len(a.shape) > 2 else None,
        None if magnitude is None else lambda: contents.read(magnitude.name).reshape(-1),
        bool(options.get("fan_in_fan_out")) and not embedding,
    )


def _scale(module: str, rank: int, options: Mapping[str, Any]) -> float | None:
    patterns = options.get("alpha_pattern")
    alpha = options.get("lora_alpha")
    for key, value in patterns.items() if isinstance(patterns, Mapping) else ():
        try:
            matches = re.match(rf"(.*\.)?({key})$", module) is not None
        except re.error:
            matches = module == key or module.endswith(f".{key}")
        if matches:
            alpha = value
            break
    if not isinstance(alpha, int | float) or isinstance(alpha, bool):
        return None
    return alpha / math.sqrt(rank) if options.get("use_rslora") else alpha / rank


def _hint(update: AdapterUpdate) -> Hint:
    """An update is outputs first whatever the network's layout; its label is the weight it belongs to."""
    return Hint(kind="linear", label=update.name)


def _replaced(contents: Contents, made: Mapping[str, tuple[AdapterUpdate, tuple[str, ...]]]) -> Contents:
    owner = {member: name for name, (_, members) in made.items() for member in members}
    taken = {tensor.name for tensor in contents.tensors if tensor.name not in owner}
    renamed = {name: name if name not in taken else f"{name}[update]" for name in made}
    tensors: list[Tensor] = []
    skipped = list(contents.unread)
    placed: set[str] = set()
    for tensor in contents.tensors:
        name = owner.get(tensor.name)
        if name is None:
            tensors.append(tensor)
            continue
        update = made[name][0]
        if name not in placed:
            placed.add(name)
            tensors.append(Tensor(renamed[name], (update.rows, update.cols), tensor.dtype, tensor.nbytes))
        skipped.append(Skipped(tensor.name, f"a factor of the update of {update.name}"))
    by_name = {renamed[name]: update for name, (update, _) in made.items()}

    def read(name: str) -> NDArray[Any]:
        update = by_name.get(name)
        return contents.read(name) if update is None else update.product()

    warnings = list(contents.warnings)
    if any(update.scale is None for update in by_name.values()):
        text = "no adapter_config.json says how the updates are scaled; they are shown as B A, unscaled"
        warnings.append(Flag("adapter-scale-unknown", text))
    if any(update.magnitude is not None for update in by_name.values()):
        text = "DoRA rescales the merged weight, which needs the base: the updates shown are s B A alone"
        warnings.append(Flag("dora-without-base", text))
    return replace(
        contents,
        tensors=tuple(tensors),
        read=read,
        unread=tuple(skipped),
        adapters=by_name,
        hints={**contents.hints, **{name: _hint(update) for name, update in by_name.items()}},
        warnings=tuple(warnings),
    )
