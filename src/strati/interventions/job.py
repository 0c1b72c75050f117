"""A study ready to run, as the sources make it and the study runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strati.jobs.engine import Unit
from strati.jobs.store import Store


@dataclass(frozen=True)
class Job:
    """What a study is, its units in stages, and what to do with each."""

    name: str
    identity: str
    about: Mapping[str, Any]
    body: Callable[..., Any]
    prepare: Callable[[Path], None]
    train: Callable[[Path], list[Unit]]
    layers: Callable[[Path, Store], list[Unit]]
    fail: Callable[[Unit, str], list[dict[str, Any]]]
