"""What a scan would cost: matrices, floating-point operations, seconds on this machine, memory. Nothing is read.

The seconds come from one Gram matrix and one solve of 1,024 columns, measured here and now on one thread (about a
fifth of a second), scaled by the number of operations: ``N M^2`` for the Gram matrix of an ``N x M`` matrix and
``4/3 M^3`` for its eigenvalues. Larger solves run at a somewhat higher rate than the one measured, so the estimate is
on the safe side; reading the file is not in it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from strati.core.results import Result
from strati.spectra.layerwise import default_workers, memory, stored_bytes, work

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import RenderableType

    from strati.io.layers import Layer

_COLUMNS = 1024


@dataclass(frozen=True)
class ScanEstimate(Result):
    """What a scan would cost.

    Attributes:
        path: The network.
        matrices: Matrices to solve (the slices of a convolution one by one).
        bytes: Bytes of weights to read, as they are stored.
        flops: Floating-point operations.
        seconds: On this machine with ``workers`` at once.
        workers: Layers worked on at once.
        memory: Bytes needed at most, besides the interpreter's own.
        largest: Name, rows and columns of the layer that costs most.
    """

    verb: ClassVar[str] = "estimate"

    path: str
    matrices: int
    bytes: int
    flops: float
    seconds: float
    workers: int
    memory: int
    largest: tuple[str, int, int] | None

    def payload(self) -> dict[str, Any]:
        """The fields of the JSON form."""
        fields = ("path", "matrices", "bytes", "flops", "seconds", "workers", "memory", "largest")
        return {name: getattr(self, name) for name in fields}

    def frame(self) -> pd.DataFrame:
        """One row."""
        import pandas as pd

        return pd.DataFrame([self.payload()])

    def summary(self) -> RenderableType:
        """The time first, then what has to be read and kept in memory."""
        from rich.console import Group
        from rich.text import Text

        from strati.core.display import byte_size, printable

        workers = f"{self.workers} worker{'s' if self.workers != 1 else ''}"
        lines = [
            f"About {duration(self.seconds)} on this machine with {workers}, estimated from one small run.",
            f"{printable(self.path)}: {self.matrices:,} matrices, {byte_size(self.bytes)} of weights to read",
            f"memory: at most {byte_size(self.memory)} besides the interpreter",
            f"{self.flops:.2g} floating-point operations",
        ]
        if self.largest is not None:
            name, rows, columns = self.largest
            lines.append(f"largest: {printable(name, 60)}, {rows} x {columns}")
        return Group(*(Text(line) for line in lines))


def estimate_scan(
    path: str, layers: Sequence[Layer], *, workers: int | None = None, resumable: bool = False
) -> ScanEstimate:
    """What the scan of these layers would cost.

    Args:
        path: The network's name, for the summary.
        layers: The layers.
        workers: As in the scan; ``None`` for one per processor.
        resumable: Whether it would run through a store, each worker a process of its own.

    Examples:
        >>> import strati
        >>> net = strati.open({"fc.weight": np.zeros((300, 200))})
        >>> found = estimate_scan("small", net.layers(), workers=1)
        >>> found.matrices, round(found.flops), found.memory
        (1, 22666667, 800000)
    """
    count = default_workers(layers, workers)
    needs = sorted((memory(layer) for layer in layers), reverse=True)
    together = sum(needs[:count])
    if not resumable and workers is None:  # threads share one budget, see layerwise.spectra
        largest = max((8 * layer.shape[0] * layer.shape[1] for layer in layers), default=0)
        together = min(together, max(round(2.7 * largest), needs[0] if needs else 0))
    rate = rates()
    costs = [work(layer) for layer in layers]
    seconds = [gram / rate[0] + solve / rate[1] for gram, solve in costs]
    total = sum(seconds)
    worst = max(zip(seconds, layers, strict=True), key=lambda pair: pair[0])[1] if layers else None
    return ScanEstimate(
        path=path,
        matrices=sum(layer.count for layer in layers),
        bytes=sum(stored_bytes(layer) for layer in layers),
        flops=float(sum(gram + solve for gram, solve in costs)),
        seconds=max(total / count, max(seconds, default=0.0)),
        workers=count,
        memory=together,
        largest=None if worst is None else (worst.name, *worst.shape),
    )


@lru_cache(maxsize=1)
def rates() -> tuple[float, float]:
    """Operations per second of a Gram matrix and of a solve, one thread, measured once."""
    from threadpoolctl import threadpool_limits

    from strati.spectra.eigenvalues import gram
    from strati.spectra.solvers import symmetric_eigenvalues

    sample = np.random.default_rng(0).normal(size=(_COLUMNS, _COLUMNS))
    with threadpool_limits(limits=1, user_api="blas"):
        symmetric_eigenvalues(np.eye(_COLUMNS))  # libraries loaded and looked up
        start = time.perf_counter()
        square = gram(sample)
        middle = time.perf_counter()
        symmetric_eigenvalues(square)
        end = time.perf_counter()
    return _COLUMNS**3 / (middle - start), 4 / 3 * _COLUMNS**3 / (end - middle)


def duration(seconds: float) -> str:
    """A time in the unit that suits it.

    Examples:
        >>> duration(0.2), duration(90), duration(7300), duration(200_000)
        ('0.2 s', '1.5 minutes', '2.0 hours', '2.3 days')
    """
    for limit, unit, name in ((60, 1, "s"), (3600, 60, "minutes"), (86400, 3600, "hours")):
        if seconds < limit:
            return f"{seconds / unit:.1f} {name}"
    return f"{seconds / 86400:.1f} days"
