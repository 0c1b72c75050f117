"""Options of ``strati.track``. torch is not imported here: the command line reads its defaults from this module."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from strati.core.errors import BadInputError
from strati.core.options import nearest
from strati.landscape.llc.config import LLCConfig

if TYPE_CHECKING:
    from strati.io.to_module import ActivationName

QUANTITIES = ("spectra", "loss", "llc", "scales", "curvature", "counts", "interventions")
METRICS = ("alpha", "stable_rank", "entropy", "spectral_norm", "frobenius_norm", "spikes", "quasi_null")
"""The numbers of a scan that become series."""

_SAMPLER_OPTIONS = ("nbeta", "gamma", "chains", "draws", "batch", "seconds", "seed")


@dataclass(frozen=True)
class TrackConfig:
    """Options of :func:`strati.track`. ``None`` lets strati choose.

    Attributes:
        what: Quantities: ``spectra``, ``loss``, ``llc``, ``scales``, ``curvature``, ``counts``, ``interventions``.
            Default: spectra, and with data also the loss and the learning coefficient.
        layers: Patterns of the layers to measure (:mod:`strati.io.layers`). Default: all.
        loss: ``mse``, ``cross_entropy``, ``behavioural-mse`` or ``behavioural-kl``. Default: what fits the targets, and
            ``behavioural-mse`` without targets.
        rows: Use only the first so many rows of the data. Default: all.
        nbeta: Inverse temperature of the learning coefficient. Default: ``n / ln n``.
        gamma: Strength of its localisation. Default: that of ``strati.llc`` at the last checkpoint.
        chains: Chains of every estimate. Default: 4.
        draws: Draws of every chain. Default: 400, or what ``seconds`` allows.
        batch: Rows of a minibatch of the sampler. Default: 256, or all rows if there are fewer. A row of tokens is a
            whole window, and 8 of them are often enough.
        seconds: Spend about this many seconds (of a cost model, so the same on every machine) on the estimate of a
            checkpoint. ``stderr`` falls with its square root. Default: no budget.
        scales: Loss scales of ``scales``.
        per_layer: Also estimate the learning coefficient of each layer (those of ``layers``), the others fixed.
        heads: Also estimate that of these attention heads, as ``block.head``, both from 0.
        data_groups: Also estimate that of groups of the data: a column's name, or one label per row.
        activation: Activation function of a multilayer perceptron that is rebuilt from a file.
        level: Probability of a false alarm among the change points of all series together.
        seed: Random seed; the same random numbers are used for every checkpoint.
        workers: Processes; 0 for one per processor. Default: work in this process.
        retry: Try again what failed in an earlier run.
    """

    what: str | Sequence[str] | None = None
    layers: str | Sequence[str] | None = None
    loss: str | None = None
    rows: int | None = None
    nbeta: float | None = None
    gamma: float | None = None
    chains: int | None = None
    draws: int | None = None
    batch: int | None = None
    seconds: float | None = None
    scales: Sequence[float] = (1e-4, 1e-3, 1e-2, 1e-1)
    per_layer: bool = False
    heads: str | Sequence[str] | None = None
    data_groups: str | Sequence[str] | None = None
    activation: ActivationName = "relu"
    level: float = 0.05
    seed: int = 0
    workers: int | None = None
    retry: bool = False

    def __post_init__(self) -> None:
        for name in ("what", "layers", "scales", "heads"):
            object.__setattr__(self, name, _listed(getattr(self, name)))
        if self.data_groups is not None and not isinstance(self.data_groups, str):
            labels: Any = self.data_groups
            labels = labels.tolist() if hasattr(labels, "tolist") else labels
            object.__setattr__(self, "data_groups", tuple(str(label) for label in labels))
        for quantity in self.what or ():
            if quantity not in QUANTITIES:
                raise BadInputError("what", f"no quantity {quantity!r}; {nearest(quantity, QUANTITIES)}")
        for head in self.heads or ():
            if not re.fullmatch(r"\d+\.\d+", head):
                raise BadInputError("heads", f"{head!r} is not block.head, such as 0.3; both count from 0")
        if self.rows is not None and not self.rows > 0:
            raise BadInputError("rows", f"must be positive, not {self.rows}; leave it out for the default")
        self.sampler_config()
        if not 0 < self.level < 1:
            raise BadInputError("level", "a probability lies strictly between 0 and 1; 0.05 is usual")

    def sampler_config(self) -> LLCConfig:
        """The options of the learning coefficient's sampler, checked."""
        return LLCConfig(sampler="sgld", **{name: getattr(self, name) for name in _SAMPLER_OPTIONS})


def _listed(words: Any) -> tuple[Any, ...] | None:
    """Several values, given as a sequence or as text with commas; a head given as (block, head) is ``block.head``."""
    if isinstance(words, str):
        words = [word.strip() for word in words.split(",") if word.strip()]
    if words is None or len(words) == 0:
        return None
    return tuple(".".join(map(str, word)) if isinstance(word, tuple | list) else word for word in words)
