"""A Hugging Face directory: ``config.json``, and weights in one file or in shards with an index; the local cache.

Every shard must be a plain file name inside the folder; links that lead out of it are refused.
``[ORG/]NAME[@REVISION]`` is looked up in the local Hugging Face cache and never downloaded.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strati.core.display import natural
from strati.core.errors import BadInputError, IncompleteError, UnsupportedError
from strati.core.results import Flag
from strati.io.adapters.recognise import ADAPTER_KINDS
from strati.io.checkpoint_file import MappedFile, RawCheckpoint
from strati.io.file_formats import DISTRIBUTED
from strati.io.file_formats import ENDINGS as FILE_FORMATS
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
"""Folders of formats that are not read, recognised by the names of their files, and what to do about each."""

_SHARD = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})(\.[a-z]+)")


def contents(folder: Path) -> RawCheckpoint:
    """Check a directory's weights, shard by shard; nothing but headers is read.

    Raises:
        BadInputError: A shard is missing, lies outside the folder, or is listed twice; there are no weights, or
            several that do not belong together.
    """
    adapter = _table(folder, ADAPTER)
    if adapter is not None:
        return _adapter(folder, adapter)
    pipeline = _table(folder, PIPELINE)
    if pipeline is not None:
        return _pipeline(folder, pipeline)
    return _merge(folder, _first_of(folder, PREFERRED), _config(folder))


def indexed_contents(index: Path) -> RawCheckpoint:
    """The weights that an index (``model.safetensors.index.json``) lists, in the folder where it lies.

    Raises:
        BadInputError: As for the folder itself.
    """
    folder = index.parent
    leads_to(folder, index)
    return _merge(folder, _indexed(folder, index), _config(folder))


def _pipeline(folder: Path, table: Mapping[str, Any]) -> RawCheckpoint:
    """A diffusers pipeline: every component that has weights, its name before theirs.

    Raises:
        BadInputError: A component leads out of the folder, or none has weights.
    """
    parts: dict[str, RawCheckpoint] = {}
    for name, kind in table.items():
        place = folder / name
        if name.startswith("_") or not isinstance(kind, list) or not _plain_name(name) or not place.is_dir():
            continue
        leads_to(folder, place)
        if any(entry.name.lower().endswith(ENDINGS) for entry in place.iterdir()):
            # Each component has its own configuration of the quantisation.
            parts[name] = decoded(_merge(place, _first_of(place, _COMPONENT), _config(place)))
    if not parts:
        raise BadInputError(folder, "is a diffusers pipeline without weights; download its components")
    return _joined(parts, "diffusers", ".")


_COMPONENT = tuple(
    f"{stem}{ending}"
    for stem in ("diffusion_pytorch_model", "model", "pytorch_model")
    for ending in (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json")
)
"""Names of a component's weights; of several variants those in full precision."""


def _plain_name(name: str) -> bool:
    return len(Path(name).parts) == 1 and not Path(name).is_absolute() and name != ".." and "\0" not in name


def _adapter(folder: Path, config: Mapping[str, Any]) -> RawCheckpoint:
    """A PEFT adapter: its factors, and its configuration under ``adapter_config``.

    Raises:
        BadInputError: There are no weights beside it.
        UnsupportedError: It is an adapter of a kind that is not read.
    """
    kind = str(config.get("peft_type", "LORA")).upper()
    if kind not in ADAPTER_KINDS:
        raise UnsupportedError(
            folder,
            f"holds an adapter of the kind {kind}; strati reads LoRA, DoRA, AdaLoRA, LoHa and LoKr: merge it first",
        )
    for name in ("adapter_model.safetensors", "adapter_model.bin"):
        if os.path.lexists(folder / name):
            leads_to(folder, folder / name)
            return replace(_merge(folder, {name: None}, {"adapter_config": config}), format="peft")
    raise BadInputError(
        folder, "has an adapter_config.json but no adapter_model.safetensors; download it again"
    )


def _first_of(folder: Path, names: Sequence[str]) -> Mapping[str, set[str] | None]:
    """The files that hold the weights: the first of some names that is there, else the only model of the folder."""
    for name in names:
        if os.path.lexists(folder / name):
            leads_to(folder, folder / name)
            return _indexed(folder, folder / name) if name.endswith(".json") else {name: None}
    return _single_model(folder)


def _config(folder: Path) -> Mapping[str, Any] | None:
    """``config.json``, with the quantisation that older packages write into a separate file."""
    config = _table(folder, "config.json")
    if config is not None and ("quantization_config" in config or "compression_config" in config):
        return config
    for name, method in QUANTISED.items():
        settings = _table(folder, name)
        if settings is not None:
            return {**(config or {}), "quantization_config": {"quant_method": method, **settings}}
    return config


def _table(folder: Path, name: str) -> dict[str, Any] | None:
    path = folder / name
    if not os.path.lexists(path):
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
    if not _plain_name(shard):
        raise BadInputError(
            index, f"lists the shard {shard}, which is not a plain file name in this folder; refused"
        )
    path = folder / shard
    if not os.path.lexists(path):
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


def _single_model(folder: Path) -> dict[str, set[str] | None]:
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
    stems = {(m[1], m[4]) for m in map(_SHARD.fullmatch, files) if m}
    if stems and all(expected is None for expected in files.values()):
        return []
    stems |= {
        (Path(name).stem, Path(name).suffix) for name in files
    }  # shards beside the one file with all weights
    matches = (_SHARD.fullmatch(entry.name) for entry in folder.iterdir())
    left = sorted({m[0] for m in matches if m and (m[1], m[4]) in stems} - set(files))
    text = f"{len(left)} shards belong to no index and are not read: {', '.join(left[:3])}"
    return [Flag("stale-shard", text)] if left else []


def _merge(
    folder: Path, files: Mapping[str, set[str] | None], config: Mapping[str, Any] | None
) -> RawCheckpoint:
    """The checkpoint that some files of a folder hold together; each may have a set of tensors that it must hold."""
    from strati.io.file_formats import file_contents

    parts: dict[str, RawCheckpoint] = {}
    owner: dict[str, str] = {}
    flags = _stale(folder, files)
    for name, expected in files.items():
        part = file_contents(folder / name)
        names = {tensor.name for tensor in part.tensors}
        if expected is not None:
            flags += _check_listed(folder / name, names, {s.name for s in part.unread}, expected)
        for tensor in names:
            if tensor in owner:
                raise BadInputError(folder, f"has {tensor} in both {owner[tensor]} and {name}; remove one")
            owner[tensor] = name
        parts[name] = part
    first = next(iter(parts.values()))
    if len(parts) == 1:
        return replace(
            first, config=first.config if config is None else config, warnings=(*first.warnings, *flags)
        )
    joined = _joined(parts, first.format, "")
    tensors = tuple(sorted(joined.tensors, key=lambda tensor: natural(tensor.name)))
    return replace(joined, tensors=tensors, config=config, warnings=(*joined.warnings, *flags))


def _check_listed(file: Path, names: set[str], unread: set[str], expected: set[str]) -> list[Flag]:
    """Compare the tensors of a shard with those that the index lists for it.

    Raises:
        IncompleteError: The shard lacks some of them.
    """
    missing = sorted(expected - names - unread)
    if missing:
        error = IncompleteError(file, f"lacks {missing[0]}, which the index says it holds; download it again")
        error.names = tuple(missing)
        raise error
    unlisted = sorted(names - expected)
    if not unlisted:
        return []
    text = f"{file.name} holds {len(unlisted)} tensors that the index does not list ({unlisted[0]}, ...); read too"
    return [Flag("unlisted-tensors", text)]


def _joined(parts: Mapping[str, RawCheckpoint], format: str, separator: str) -> RawCheckpoint:
    """Several checkpoints as one; with a separator, names get their part's name and the separator in front."""
    prefix = {part: f"{part}{separator}" if separator else "" for part in parts}
    owner = {
        prefix[part] + tensor.name: (contents, tensor.name)
        for part, contents in parts.items()
        for tensor in contents.tensors
    }

    def read(name: str) -> NDArray[Any]:
        contents, stored = owner[name]
        return contents.read(stored)

    def read_part(name: str, index: int) -> NDArray[Any]:
        contents, stored = owner[name]
        return contents.matrix(stored, index)

    def rounding(name: str, index: int | None) -> NDArray[Any] | None:
        contents, stored = owner[name]
        return None if contents.rounding is None else contents.rounding(stored, index)

    def by_name(field: str) -> dict[str, Any]:
        return {
            prefix[part] + key: entry for part, c in parts.items() for key, entry in getattr(c, field).items()
        }

    def renamed(field: str) -> tuple[Any, ...]:
        return tuple(
            replace(entry, name=prefix[part] + entry.name)
            for part, c in parts.items()
            for entry in getattr(c, field)
        )

    return RawCheckpoint(
        format=format,
        tensors=renamed("tensors"),
        read=read,
        unread=renamed("unread"),
        ties={prefix[part] + a: prefix[part] + b for part, c in parts.items() for a, b in c.ties.items()},
        hints=by_name("hints"),
        shared={
            prefix[p] + k: ((p, storage), n) for p, c in parts.items() for k, (storage, n) in c.shared.items()
        },
        warnings=tuple(flag for contents in parts.values() for flag in contents.warnings),
        quantisation=by_name("quantisation"),
        rounding=rounding,
        read_part=read_part,
        files=tuple(file for contents in parts.values() for file in contents.files),
    )


_ID = re.compile(r"((?:[A-Za-z0-9][\w.-]{0,95}/)?[A-Za-z0-9][\w.-]{0,95})(?:@([\w][\w./+-]{0,255}))?")


def is_cache_id(text: str) -> bool:
    """Whether a text that is no path reads like ``[ORG/]NAME[@REVISION]``; a name with a model file's ending does not.

    Examples:
        >>> [is_cache_id(name) for name in ("gpt2", "openai-community/gpt2", "org/name@v1.0", "model.safetensors")]
        [True, True, True, False]
    """
    match = _ID.fullmatch(text)
    return (
        match is not None
        and ".." not in text
        and Path(match[1]).suffix.lower() not in (*FILE_FORMATS, ".json", ".keras", ".msgpack")
    )


def cached_model(text: str) -> Path:
    """The folder in the local cache that holds ``[ORG/]NAME[@REVISION]``.

    A name without its organisation is also looked for among all organisations.

    Raises:
        BadInputError: It is not there, or without weights; the message gives the command that would fetch it.
    """
    match = _ID.fullmatch(text)
    assert match is not None, "not a cache id"
    revision = match[2]
    if importlib.util.find_spec("huggingface_hub") is None:
        raise BadInputError(
            text, "no such file; to look it up in the Hugging Face cache: pip install 'strati[transformers]'"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    name = match[1] if "/" in match[1] else _with_organisation(text, match[1])
    command = f"hf download {name}" + (f" --revision {revision}" if revision else "")
    try:
        folder = Path(snapshot_download(name, revision=revision, local_files_only=True))
    except HFValidationError:
        raise BadInputError(text, "no such file, and not a valid model name; check the spelling") from None
    except (LocalEntryNotFoundError, FileNotFoundError):
        raise BadInputError(
            text, f"no such file, and not in the local Hugging Face cache; fetch it with: {command}"
        ) from None
    if not any(entry.name.lower().endswith((*ENDINGS, ".index.json")) for entry in folder.iterdir()):
        raise BadInputError(text, f"is in the local cache without its weights; fetch them with: {command}")
    return folder


def _with_organisation(text: str, name: str) -> str:
    """The full name of a cached model of that name; the name itself if none or the model without an organisation is."""
    from huggingface_hub.constants import HF_HUB_CACHE

    cache = Path(HF_HUB_CACHE)
    if (cache / f"models--{name}").is_dir():
        return name
    owners = sorted(
        folder.name.split("--")[1] for folder in cache.glob(f"models--*--{name}") if folder.is_dir()
    )
    if len(owners) > 1:
        listed = ", ".join(f"{owner}/{name}" for owner in owners[:5])
        raise BadInputError(
            text, f"several models in the local cache have that name: {listed}; give the whole name"
        )
    return f"{owners[0]}/{name}" if owners else name
