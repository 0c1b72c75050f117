"""A callback for transformers' ``Trainer``."""

from __future__ import annotations

from typing import Any

from strati.core.errors import MissingExtraError
from strati.tracking.track import Tracker

try:
    from transformers import TrainerCallback
except ImportError:
    raise MissingExtraError(
        "the callback for transformers' Trainer",
        "needs transformers; install it with: pip install 'strati[transformers]'",
    ) from None


class StratiCallback(TrainerCallback):
    """Follow the spectra of the model that a ``Trainer`` trains.

    Args:
        **options: Those of :class:`strati.Tracker`: ``every``, ``out``, ``log``, ``layers``, ``metrics``.

    Examples:
        >>> StratiCallback(every=100, out="run")  # doctest: +ELLIPSIS
        <strati.integrations.transformers.StratiCallback object at ...>
    """

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.tracker: Tracker | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Start following the model."""
        self.tracker = Tracker(model, **self.options)
        self.tracker.step(0)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """One training step."""
        if self.tracker is not None:
            self.tracker.step(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Wait for the last scan."""
        if self.tracker is not None:
            self.tracker.close()
