"""A training run's checkpoints in order: each layer's phase, tail and ranks over training."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class SeriesLayer:
    """One layer over training.

    ``leaves_random_like`` is the index of the first checkpoint after which the layer is known not to be random-like
    again; ``None`` where it ends random-like, and where its last phase is not known.
    """

    name: str
    role: str
    phase: tuple[str | None, ...]
    alpha: tuple[float | None, ...]
    stable_rank: tuple[float | None, ...]
    hard_rank: tuple[int | None, ...]
    entropy: tuple[float | None, ...]
    mp_sigma: tuple[float | None, ...]
    spikes: tuple[int | None, ...]
    quasi_null: tuple[int | None, ...]
    relative_change: tuple[float | None, ...]
    leaves_random_like: int | None


@dataclass(frozen=True)
class CheckpointSeries:
    """A training run: its checkpoints in order and every layer over them."""

    labels: tuple[str, ...]
    layers: tuple[SeriesLayer, ...]


class Compared(Protocol):
    """What a series needs of a layer in every checkpoint."""

    @property
    def name(self) -> str:
        """The layer's name."""

    @property
    def role(self) -> str:
        """Its role."""

    @property
    def metrics(self) -> Mapping[str, tuple[Any, ...]]:
        """A value per checkpoint for each metric."""


FOLLOWED = ("phase", "alpha", "stable_rank", "hard_rank", "entropy", "mp_sigma", "spikes", "quasi_null")
"""The metrics that a series follows."""


def series_of(
    checkpoints: Sequence[Path], layers: Sequence[Compared], changes: Sequence[tuple[float | None, ...]]
) -> CheckpointSeries:
    """Put the layers of a training run in order of time.

    Args:
        checkpoints: Their paths, in order; the shortest endings that differ become the labels.
        layers: Each layer with its metrics in every checkpoint.
        changes: For each layer how far it has moved from the first checkpoint.
    """
    found = [
        SeriesLayer(
            name=layer.name,
            role=layer.role,
            relative_change=change,
            leaves_random_like=leaves_random_like(layer.metrics["phase"]),
            **{k: layer.metrics[k] for k in FOLLOWED},
        )
        for layer, change in zip(layers, changes, strict=True)
    ]
    return CheckpointSeries(_labels(checkpoints), tuple(found))


def leaves_random_like(phases: Sequence[str | None]) -> int | None:
    """The first checkpoint with a known phase from which on a layer never is random-like again.

    A phase that is not known says nothing: a layer whose last phase is ``None`` neither ends random-like nor has left
    it.

    Returns:
        The index; ``None`` if the layer ends random-like, or its last phase is not known.

    Examples:
        >>> leaves_random_like(["random-like", "bleeding-out", "random-like", "bulk+spikes"])
        3
        >>> leaves_random_like(["random-like", None, "bulk+spikes"]), leaves_random_like(["random-like", None])
        (2, None)
    """
    if not phases or phases[-1] in ("random-like", None):
        return None
    after = max((i + 1 for i, phase in enumerate(phases) if phase == "random-like"), default=0)
    return next(i for i in range(after, len(phases)) if phases[i] is not None)


def out_of_order(checkpoints: Sequence[Path]) -> bool:
    """Whether the step numbers in the checkpoints' names fail to ascend.

    Examples:
        >>> out_of_order([Path("step-200.pt"), Path("step-100.pt")])
        True
    """
    steps = [_step(path) for path in checkpoints]
    return any(a is not None and b is not None and b < a for a, b in pairwise(steps))


def _step(path: Path) -> int | None:
    """The last number in a checkpoint's name, or in its folder's."""
    for text in (path.stem, path.parent.name):
        numbers = re.findall(r"\d+", text)
        if numbers:
            return int(numbers[-1])
    return None


def _labels(paths: Sequence[Path]) -> tuple[str, ...]:
    for names in ([p.stem for p in paths], [p.name for p in paths], ["/".join(p.parts[-2:]) for p in paths]):
        if len(set(names)) == len(names):
            return tuple(names)
    return tuple(str(p) for p in paths)
