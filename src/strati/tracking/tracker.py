"""``strati.Tracker``: spectra inside any training loop, off its critical path.

Every ``every`` steps the weights are copied to the CPU and scanned in a thread; if the last scan is not done, the step
is skipped and counted. Nothing raises into the loop: an error becomes a warning, once.
"""

from __future__ import annotations

import json
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.core.errors import BadInputError
from strati.io.in_memory import is_module
from strati.tracking.config import METRICS

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import nn

Log = Callable[[Mapping[str, float], int], object]
"""Takes ``(values, step)``; ``wandb.log`` is one."""


class Tracker:
    """Follows the spectra of a model while it trains.

    Args:
        model: The module; it is only read.
        every: Steps between two scans.
        out: A folder; ``track.jsonl`` in it gets one line per scan.
        log: Called with ``({"layer/metric": value}, step)`` after each scan, from the tracker's thread.
        layers: Patterns that choose layers (as ``layers=`` everywhere).
        metrics: Which numbers of a scan are kept.
        share: The largest share of the loop's time that it may take: copying the weights, which the loop waits for, and
            scanning them, which may hold it up. Beyond it scans are skipped.

    Attributes:
        skipped: Steps whose scan was left out because the last one was not done, or the share was used up.
        done: Number of scans.

    Examples:
        >>> import torch, tempfile
        >>> model = torch.nn.Linear(20, 30)
        >>> with Tracker(model, every=1, out=tempfile.mkdtemp()) as tracker:
        ...     tracker.step(0)
        >>> tracker.done
        1
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int = 100,
        out: str | Path | None = None,
        log: Log | None = None,
        layers: str | tuple[str, ...] | list[str] | None = None,
        metrics: tuple[str, ...] = METRICS,
        share: float = 0.05,
    ) -> None:
        if not is_module(model):
            raise BadInputError("model", f"is a {type(model).__name__}; give the nn.Module that is trained")
        if every < 1:
            raise BadInputError("every", "must be at least 1")
        if out is None and log is None:
            raise BadInputError("Tracker", "writes nowhere; give out= (a folder) or log= (a function)")
        self.model, self.every, self.log, self.layers, self.metrics = model, every, log, layers, metrics
        from strati.spectra.scan import scan  # now: an import in the thread would hold up the loop

        self._look = scan
        self.share = share
        self.skipped = 0
        self.done = 0
        self._path = None if out is None else Path(out) / "track.jsonl"
        self._thread: threading.Thread | None = None
        self._warned = False
        self._began = time.perf_counter()
        self._cost = 0.0
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)

    def step(self, step: int) -> None:
        """Call it once per training step; most calls do nothing."""
        if step % self.every:
            return
        try:
            if self._thread is not None and self._thread.is_alive():
                self.skipped += 1
                return
            now = time.perf_counter()
            if self.done and self._cost > self.share * (now - self._began):
                self.skipped += 1
                return
            weights = _copied(self.model)
            self._cost += time.perf_counter() - now
            self._thread = threading.Thread(target=self._scan, args=(weights, step), daemon=True)
            self._thread.start()
        except Exception as error:  # nothing may stop the training: said once, as a warning
            self._warn(error)

    def close(self) -> None:
        """Wait for the scan that is under way."""
        if self._thread is not None:
            self._thread.join()

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _scan(self, weights: Mapping[str, NDArray[Any]], step: int) -> None:
        began = time.perf_counter()
        try:
            scanned = self._look(weights, layers=self.layers, workers=1)
            rows = {item.layer.name: item.row() for item in scanned}
            values = {
                f"{name}/{metric}": float(row[metric])
                for name, row in rows.items()
                for metric in self.metrics
                if row.get(metric) is not None
            }
            self._cost += time.perf_counter() - began
            if self._path is not None:
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"step": step, "values": values}) + "\n")
            if self.log is not None:
                self.log(values, step)
            self.done += 1
        except Exception as error:  # as above
            self._warn(error)

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            text = f"strati.Tracker: {type(error).__name__}: {error}; further errors are not shown, training goes on"
            warnings.warn(text, RuntimeWarning, stacklevel=3)


def _copied(model: nn.Module) -> dict[str, NDArray[Any]]:
    """The weights on the CPU, as numpy arrays of their own; no tensor of the model is kept."""
    import torch

    arrays: dict[str, NDArray[Any]] = {}
    for name, tensor in model.state_dict().items():
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor.ndim >= 2:
            plain = tensor.detach().to("cpu", torch.float32, copy=True)
            arrays[name] = np.asarray(plain.numpy())
    return arrays
