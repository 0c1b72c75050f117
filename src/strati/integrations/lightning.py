"""A callback for Lightning's ``Trainer``."""

from __future__ import annotations

from typing import Any

from strati.core.errors import MissingExtraError
from strati.tracking.track import Tracker

try:
    from lightning.pytorch.callbacks import Callback
except ImportError:
    try:
        from pytorch_lightning.callbacks import Callback  # type: ignore[assignment]
    except ImportError:
        raise MissingExtraError(
            "the callback for Lightning", "needs lightning; install it with: pip install lightning"
        ) from None


class StratiCallback(Callback):
    """Follow the spectra of the module that a Lightning ``Trainer`` trains.

    Args:
        **options: Those of :class:`strati.Tracker`: ``every``, ``out``, ``log``, ``layers``, ``metrics``.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options
        self.tracker: Tracker | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start following the module."""
        self.tracker = Tracker(pl_module, **self.options)
        self.tracker.step(0)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any, **__: Any) -> None:
        """One training step."""
        if self.tracker is not None:
            self.tracker.step(trainer.global_step)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Wait for the last scan."""
        if self.tracker is not None:
            self.tracker.close()
