"""What is followed over a run, and how. No torch here: the command line reads its defaults from this module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from strati.core.errors import BadInputError
from strati.core.options import nearest

if TYPE_CHECKING:
    from strati.io.to_module import ActivationName

QUANTITIES = ("spectra", "loss", "llc", "scales", "counts", "interventions")
METRICS = ("alpha", "stable_rank", "entropy", "spectral_norm", "frobenius_norm", "spikes", "quasi_null")
"""The numbers of a scan that become series."""


@dataclass(frozen=True)
class TrackConfig:
    """Options of a followed run.

    Attributes:
        what: Quantities: ``spectra``, ``loss``, ``llc``, ``scales``, ``counts``, ``interventions``; empty means
            spectra, and with data the loss and the learning coefficient.
        layers: Patterns that choose layers; empty takes all.
        loss: ``mse``, ``cross_entropy``, ``behavioural-mse`` or ``behavioural-kl``; empty means what fits the targets,
            and ``behavioural-mse`` where there are none.
        rows: Use only the first so many rows of the data; 0 takes all.
        nbeta: Inverse temperature of the learning coefficient; 0 means ``n / ln n``.
        gamma: Its localisation; 0 means that of ``strati.llc`` at the last checkpoint.
        chains: Chains of every estimate; 0 means 4.
        draws: Draws of every chain; 0 means 400, or what ``seconds`` allow.
        batch: Rows of a minibatch of its sampler; 0 means 256, or all rows where there are fewer. A row of tokens is a
            whole window, and 8 of them are often enough.
        seconds: Spend roughly this many seconds (of a cost model, so the same on every machine) on the estimate of a
            checkpoint; 0 means no budget. ``stderr`` falls with its square root.
        scales: Loss scales of ``scales``.
        per_layer: Learning coefficients of each layer too (those of ``layers``), the others held fixed.
        heads: Learning coefficients of these attention heads too, as ``block.head``, both from 0.
        data_groups: Learning coefficients of groups of the data too: a column's name, or one label per row.
        activation: Nonlinearity of a multilayer perceptron that is rebuilt from a file.
        level: Chance of a false alarm among the changes of all series together.
        seed: Random seed; the same random numbers are used for every checkpoint.
        engine: ``local`` or ``ray``.
        workers: Processes; 0 for one per processor.
        address: The Ray cluster.
        retry: Try again what failed in an earlier run.
    """

    what: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()
    loss: str = ""
    rows: int = 0
    nbeta: float = 0.0
    gamma: float = 0.0
    chains: int = 0
    draws: int = 0
    batch: int = 0
    seconds: float = 0.0
    scales: tuple[float, ...] = (1e-4, 1e-3, 1e-2, 1e-1)
    per_layer: bool = False
    heads: tuple[str, ...] = ()
    data_groups: str | tuple[str, ...] = ""
    activation: ActivationName = "relu"
    level: float = 0.05
    seed: int = 0
    engine: str = "local"
    workers: int = 1
    address: str | None = None
    retry: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.data_groups, str):
            labels = self.data_groups
            held = labels.tolist() if hasattr(labels, "tolist") else list(labels)
            object.__setattr__(self, "data_groups", tuple(str(label) for label in held))
        for name in ("what", "layers", "scales", "heads"):
            given = getattr(self, name)
            if isinstance(given, str):
                object.__setattr__(
                    self, name, tuple(word.strip() for word in given.split(",") if word.strip())
                )
            elif given is None:
                object.__setattr__(self, name, ())
            else:
                object.__setattr__(self, name, tuple(_head(h) if name == "heads" else h for h in given))
        for quantity in self.what:
            if quantity not in QUANTITIES:
                raise BadInputError("what", f"no quantity {quantity!r}; {nearest(quantity, QUANTITIES)}")
        for head in self.heads:
            numbers = head.split(".")
            if len(numbers) != 2 or not all(n.isdigit() for n in numbers):
                raise BadInputError("heads", f"{head!r} is not block.head, such as 0.3; both count from 0")
        for name in ("rows", "chains", "draws", "batch", "nbeta", "gamma", "seconds"):
            if not getattr(self, name) >= 0:
                raise BadInputError(name, f"must not be negative: {getattr(self, name)}; 0 means the default")
        if not 0 < self.level < 1:
            raise BadInputError("level", "a probability lies strictly between 0 and 1; 0.05 is usual")


def _head(given: Any) -> str:
    return given if isinstance(given, str) else ".".join(str(number) for number in given)
