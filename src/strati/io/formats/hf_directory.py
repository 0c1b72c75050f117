"""A Hugging Face directory: ``config.json``, and weights in one file or in shards with an index.

Every shard must be a plain file name inside the folder; links that lead out of it are refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strati.core.errors import BadInputError, IncompleteError, UnsupportedError
from strati.core.results import Flag
from strati.io.checkpoint_file import MappedFile, RawCheckpoint, natural
from strati.io.file_formats import DISTRIBUTED
from strati.io.formats.safetensors_file import strict_json
from strati.io.quantised.recognise import decoded

if TYPE_CHECKING:
    from numpy.typing import NDArray

ADAPTER = "adapter_config.json"
PIPELINE = "model_index.json"
MAX_JSON = 25_000_000
MAX_SHARDS = 10_000

PREFERRED = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "flax_model.msgpack",
    "flax_model.msgpack.index.json",
    "tf_model.h5",
)
QUANTISED = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}
"""Files in which auto-gptq, llm-awq and modelopt say how they quantised, where ``config.json`` does not."""
NO_WEIGHTS = frozenset({"training_args.bin", "optimizer.pt", "optimizer.bin", "scheduler.pt", "scaler.pt"})
ENDINGS = (".safetensors", ".gguf", ".bin", ".pt", ".pth", ".onnx", ".npz", ".h5", ".keras", ".msgpack")

_REFUSED: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"saved_model\.pb"), "is a TensorFlow SavedModel; save its weights as .h5 or .safetensors"),
    (
        re.compile(r".+\.data-[0-9]{5}-of-[0-9]{5}"),
        "is a TensorFlow checkpoint; load it with TensorFlow and save its weights as .h5 or .safetensors",
    ),
    (re.compile(r"\.metadata|.*\.distcp"), DISTRIBUTED),
    (
        re.compile(r"_METADATA|_CHECKPOINT_METADATA|manifest\.ocdbt|ocdbt\.process_[0-9]+|checkpoint"),
        "is an Orbax checkpoint; restore it with orbax and save the parameters with flax.serialization.to_bytes",
    ),
)
"""Folders of formats that are not read, told by the names of their files, and what to do about each."""

_SHARD = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})(\.[a-z]+)")


def contents(folder: Path) -> RawCheckpoint:
    """Check a directory's weights, shard by shard; nothing but headers is read.

    Raises:
        BadInputError: A shard is missing, lies outside the folder, or is listed twice; there are no weights, or
            several that do not belong together.
    """
    if (folder / ADAPTER).exists() or (folder / ADAPTER).is_symlink():
        return _adapter(folder)
    if (folder / PIPELINE).exists() or (folder / PIPELINE).is_symlink():
        return _pipeline(folder)
    config = _config(folder)
    return _merge(folder, _files(folder), config)


def indexed_contents(index: Path) -> RawCheckpoint:
    """The weights that an index (``model.safetensors.index.json``) lists, in the folder where it lies.

    Raises:
        BadInputError: As for the folder itself.
    """
    folder = index.parent
    leads_to(folder, index)
    return _merge(folder, _indexed(folder, index), _config(folder))


def _pipeline(folder: Path) -> RawCheckpoint:
    """A diffusers pipeline: every component that has weights, its name before theirs.

    Raises:
        BadInputError: The list of components is none, leads out of the folder, or no component has weights.
    """
    leads_to(folder, folder / PIPELINE)
    table = _json(folder / PIPELINE)
    if not isinstance(table, dict):
        raise BadInputError(folder / PIPELINE, "is not a JSON table; download it again")
    parts: dict[str, RawCheckpoint] = {}
    for name, kind in table.items():
        place = folder / name
        if name.startswith("_") or not isinstance(kind, list) or not _plain_name(name) or not place.is_dir():
            continue
        leads_to(folder, place)
        if any(entry.name.lower().endswith(ENDINGS) for entry in place.iterdir()):
            # A component says for itself how it is quantised.
            parts[name] = decoded(_merge(place, _component(place), _config(place)))
    if not parts:
        raise BadInputError(folder, "is a diffusers pipeline without weights; download its components")
    return _joined(parts)


def _component(folder: Path) -> Mapping[str, set[str] | None]:
    """A component's weights: the full-precision ones where there are variants beside them."""
    for stem in ("diffusion_pytorch_model", "model", "pytorch_model"):
        for ending in (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json"):
            place = folder / f"{stem}{ending}"
            if place.exists() or place.is_symlink():
                leads_to(folder, place)
                return _indexed(folder, place) if ending.endswith(".json") else {place.name: None}
    return _found(folder)


def _joined(parts: Mapping[str, RawCheckpoint]) -> RawCheckpoint:
    """Components side by side, each tensor's name behind its component's."""
    owner = {f"{part}.{t.name}": (part, t.name) for part, found in parts.items() for t in found.tensors}

    def read(name: str) -> NDArray[Any]:
        part, own = owner[name]
        return parts[part].read(own)

    def read_part(name: str, index: int) -> NDArray[Any]:
        part, own = owner[name]
        alone = parts[part].read_part
        if alone is not None:
            return alone(own, index)
        whole = parts[part].read(own)
        chosen: NDArray[Any] = whole.reshape(-1, *whole.shape[-2:])[index]
        return chosen

    def rounding(name: str, index: int | None) -> NDArray[Any] | None:
        part, own = owner[name]
        known = parts[part].rounding
        return None if known is None else known(own, index)

    def named(field: str) -> dict[str, Any]:
        return {f"{part}.{k}": v for part, found in parts.items() for k, v in getattr(found, field).items()}

    return RawCheckpoint(
        format="diffusers",
        tensors=tuple(
            replace(t, name=f"{part}.{t.name}") for part, found in parts.items() for t in found.tensors
        ),
        read=read,
        unread=tuple(
            replace(s, name=f"{part}.{s.name}") for part, found in parts.items() for s in found.unread
        ),
        ties={f"{part}.{k}": f"{part}.{v}" for part, found in parts.items() for k, v in found.ties.items()},
        hints=named("hints"),
        warnings=tuple(w for found in parts.values() for w in found.warnings),
        quantisation=named("quantisation"),
        rounding=rounding,
        read_part=read_part,
        files=tuple(file for found in parts.values() for file in found.files),
    )


def _plain_name(name: str) -> bool:
    return len(Path(name).parts) == 1 and name not in ("", ".", "..") and "\0" not in name


def _adapter(folder: Path) -> RawCheckpoint:
    """A PEFT adapter: its factors, and its configuration under ``adapter_config``.

    Raises:
        BadInputError: The configuration is no table, or there are no weights beside it.
        UnsupportedError: It is an adapter of another kind than LoRA.
    """
    leads_to(folder, folder / ADAPTER)
    config = _json(folder / ADAPTER)
    if not isinstance(config, dict):
        raise BadInputError(folder / ADAPTER, "is not a JSON table; download it again")
    kind = str(config.get("peft_type", "LORA")).upper()
    if kind not in ("LORA", "DORA"):
        raise UnsupportedError(
            folder,
            f"holds an adapter of the kind {kind}; strati reads LoRA and DoRA: merge it into its base first",
        )
    for name in ("adapter_model.safetensors", "adapter_model.bin"):
        if (folder / name).exists() or (folder / name).is_symlink():
            leads_to(folder, folder / name)
            found = _merge(folder, {name: None}, {"adapter_config": config})
            return RawCheckpoint(**(vars(found) | {"format": "peft"}))
    raise BadInputError(
        folder, "has an adapter_config.json but no adapter_model.safetensors; download it again"
    )


def _files(folder: Path) -> Mapping[str, set[str] | None]:
    """The files that hold the weights, in the order of preference that transformers has."""
    for name in PREFERRED:
        if (folder / name).exists() or (folder / name).is_symlink():
            leads_to(folder, folder / name)
            return _indexed(folder, folder / name) if name.endswith(".json") else {name: None}
    return _found(folder)


def _config(folder: Path) -> Mapping[str, Any] | None:
    """``config.json``, with how the weights are quantised where an older package wrote that in a file of its own."""
    config = _table(folder, "config.json")
    if config is not None and ("quantization_config" in config or "compression_config" in config):
        return config
    for name, method in QUANTISED.items():
        told = _table(folder, name)
        if told is not None:
            return {**(config or {}), "quantization_config": {"quant_method": method, **told}}
    return config


def _table(folder: Path, name: str) -> dict[str, Any] | None:
    path = folder / name
    if not path.exists() and not path.is_symlink():
        return None
    leads_to(folder, path)
    table = _json(path)
    if not isinstance(table, dict):
        raise BadInputError(path, "is not a JSON table; download it again")
    return table


def _json(path: Path) -> Any:
    source = MappedFile(path)
    if source.size > MAX_JSON:
        raise BadInputError(
            path, f"has {source.size:,} bytes, more than the limit of {MAX_JSON:,}; it is probably corrupt"
        )
    return strict_json(source, source.head(source.size), "it")


def _indexed(folder: Path, index: Path) -> dict[str, set[str]]:
    """The shards of an index, each with the tensors it should hold."""
    table = _json(index)
    weights = table.get("weight_map") if isinstance(table, dict) else None
    if not isinstance(weights, dict) or not weights:
        raise BadInputError(index, "has no weight_map; download it again")
    files: dict[str, set[str]] = {}
    for tensor, shard in weights.items():
        if not isinstance(shard, str):
            raise BadInputError(index, f"gives {tensor} no file name; download it again")
        flax = shard.endswith(".msgpack")  # its index writes paths
        files.setdefault(shard, set()).add(
            tensor.replace("/", ".").removeprefix("params.") if flax else tensor
        )
    if len(files) > MAX_SHARDS:
        raise BadInputError(
            index, f"lists {len(files):,} shards, more than the limit; it is probably corrupt"
        )
    for shard in files:
        _inside(folder, shard, index)
    return dict(sorted(files.items()))


def _inside(folder: Path, shard: str, index: Path) -> None:
    if Path(shard).is_absolute() or len(Path(shard).parts) != 1 or "\0" in shard or shard in ("", ".", ".."):
        raise BadInputError(
            index, f"lists the shard {shard}, which is not a plain file name in this folder; refused"
        )
    path = folder / shard
    if not path.is_symlink() and not path.exists():
        raise BadInputError(index, f"lists the shard {shard}, which is missing; download it again")
    leads_to(folder, path)


def leads_to(folder: Path, path: Path) -> Path:
    """The real file behind a path, which must lie inside the folder (or in the cache that a hub snapshot links to).

    Raises:
        BadInputError: Links loop, or lead out of the folder.
    """
    try:
        real = path.resolve(strict=True)
        root = folder.resolve(strict=True)
    except (OSError, RuntimeError):
        raise BadInputError(path, "is a link that leads nowhere or in a circle; download it again") from None
    if real.is_relative_to(root):
        return real
    # A hub cache: <model>/snapshots/<revision>/file -> <model>/blobs/<hash>.
    if root.parent.name == "snapshots" and real.parent == root.parent.parent / "blobs":
        return real
    raise BadInputError(path, "is a link that leads out of the folder; refused")


def _found(folder: Path) -> dict[str, set[str] | None]:
    """The weights of a directory without index."""
    names = _listed(folder)
    weights = [n for n in names if n.lower().endswith(ENDINGS) and n not in NO_WEIGHTS]
    shards = [n for n in weights if _SHARD.fullmatch(n)]
    if shards:
        return _counted(folder, shards)
    if len(weights) == 1:
        leads_to(folder, folder / weights[0])
        return {weights[0]: None}
    if not weights:
        _refuse(folder, names)
        for name in names[:100]:  # a Trainer or a checkpoint manager keeps such folders in its own
            if (folder / name).is_dir() and not (folder / name).is_symlink():
                _refuse(folder / name, _listed(folder / name))
        raise BadInputError(
            folder, "is a directory without weights; give a model file or a Hugging Face directory"
        )
    listed = ", ".join(weights[:5]) + (", ..." if len(weights) > 5 else "")
    raise BadInputError(folder, f"holds several models ({listed}); give the path of one")


def _listed(folder: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in folder.iterdir())
    except OSError as error:
        raise BadInputError(folder, f"cannot be listed ({error.strerror}); check its permissions") from None


def _refuse(folder: Path, names: list[str]) -> None:
    """Name a folder of a format that is not read.

    Raises:
        UnsupportedError: It is one.
    """
    for pattern, why in _REFUSED:
        if any(pattern.fullmatch(name) for name in names):
            raise UnsupportedError(folder, why)


def _counted(folder: Path, shards: list[str]) -> dict[str, set[str] | None]:
    """Shards named ``x-00001-of-00003`` without an index: all of them, of one set."""
    parts = [_SHARD.fullmatch(name) for name in shards]
    sets = {(m[1], m[3], m[4]) for m in parts if m}
    if len(sets) > 1:
        raise BadInputError(folder, f"holds shards of {len(sets)} models; give a folder with one")
    _, total, _ = next(iter(sets))
    if len(shards) != int(total):
        raise BadInputError(folder, f"holds {len(shards)} of {int(total)} shards; download the missing ones")
    for name in shards:
        leads_to(folder, folder / name)
    return dict.fromkeys(shards)


def _stale(folder: Path, files: Mapping[str, set[str] | None]) -> list[Flag]:
    """Shards in the folder that are not read: left over from another download, perhaps."""
    known = {(m[1], m[4]) for m in map(_SHARD.fullmatch, files) if m}
    if known and all(expected is None for expected in files.values()):
        return []
    known |= {
        (Path(name).stem, Path(name).suffix) for name in files
    }  # shards beside the one file with all weights
    found = [
        m[0]
        for m in (_SHARD.fullmatch(entry.name) for entry in folder.iterdir())
        if m and (m[1], m[4]) in known
    ]
    left = sorted(set(found) - set(files))
    text = f"{len(left)} shards belong to no index and are not read: {', '.join(left[:3])}"
    return [Flag("stale-shard", text)] if left else []


def _merge(
    folder: Path, files: Mapping[str, set[str] | None], config: Mapping[str, Any] | None
) -> RawCheckpoint:
    from strati.io.file_formats import file_contents

    parts: dict[str, RawCheckpoint] = {}
    owner: dict[str, str] = {}
    extra = _stale(folder, files)
    for name, expected in files.items():
        part = file_contents(folder / name)
        here = {tensor.name for tensor in part.tensors}
        missing = sorted(expected - here - {s.name for s in part.unread}) if expected is not None else []
        if missing:
            error = IncompleteError(
                folder / name, f"lacks {missing[0]}, which the index says it holds; download it again"
            )
            error.names = tuple(missing)
            raise error
        unlisted = sorted(here - expected) if expected is not None else []
        if unlisted:
            text = f"{name} holds {len(unlisted)} tensors that the index does not list ({unlisted[0]}, ...); read too"
            extra.append(Flag("unlisted-tensors", text))
        for tensor in here:
            if tensor in owner:
                raise BadInputError(folder, f"has {tensor} in both {owner[tensor]} and {name}; remove one")
            owner[tensor] = name
        parts[name] = part
    if len(parts) == 1:
        only = next(iter(parts.values()))
        known = config if config is not None else only.config
        return replace(only, config=known, warnings=(*only.warnings, *extra))

    def read(name: str) -> NDArray[Any]:
        return parts[owner[name]].read(name)

    def rounding(name: str, index: int | None) -> NDArray[Any] | None:
        part = parts[owner[name]]
        return part.rounding(name, index) if part.rounding is not None else None

    tensors = sorted((t for part in parts.values() for t in part.tensors), key=lambda t: natural(t.name))
    return RawCheckpoint(
        format=next(iter(parts.values())).format,
        tensors=tuple(tensors),
        read=read,
        unread=tuple(s for part in parts.values() for s in part.unread),
        ties={k: v for part in parts.values() for k, v in part.ties.items()},
        hints={k: v for part in parts.values() for k, v in part.hints.items()},
        shared={k: ((name, v[0]), v[1]) for name, part in parts.items() for k, v in part.shared.items()},
        config=config,
        warnings=(*(w for part in parts.values() for w in part.warnings), *extra),
        quantisation={k: v for part in parts.values() for k, v in part.quantisation.items()},
        rounding=rounding,
        files=tuple(file for part in parts.values() for file in part.files),
    )
