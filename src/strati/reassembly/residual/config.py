"""The options of :func:`strati.reassemble`, in one place; the command line reads its defaults from here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ReassembleConfig:
    """How to put pieces back together.

    Attributes:
        activation: Of a residual network's blocks: ``relu``, ``gelu`` (erf), ``gelu-tanh``, ``tanh`` or ``silu``.
            A transformer's is in its ``config.json``.
        pairing: A score of :class:`~strati.reassembly.residual.pairing.Score`, ``"auto"`` (the paper's, then the
            combined one, then the data) or ``"joint"`` (the data at once). Residual networks only.
        seed_order: A seed of :class:`~strati.reassembly.residual.order.Seed`, or ``"auto"``. Residual networks only.
        seconds: Time limit of the search with data; a step that has begun is finished.
        tokens: Use only the first N tokens (rows of images) to verify a transformer.
        inputs: Input columns (names or patterns, comma-separated) or array of a data file.
        target: Columns or array with the network's recorded outputs.
        seed: Random seed.
    """

    activation: str = "relu"
    pairing: str = "auto"
    seed_order: str = "auto"
    seconds: float = 120.0
    tokens: int = 256
    inputs: str | None = None
    target: str | None = None
    seed: int = 0
