"""``[ORG/]NAME[@REVISION]``: a model in the local Hugging Face cache. Looked up, never downloaded."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from strati.core.errors import BadInputError
from strati.io.file_formats import ENDINGS as FILE_ENDINGS
from strati.io.formats.hf_directory import ENDINGS

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
        and Path(match[1]).suffix.lower() not in (*FILE_ENDINGS, ".json", ".keras", ".msgpack")
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
