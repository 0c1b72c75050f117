"""Data sets that a study knows by name, fetched on the first call."""

from __future__ import annotations

from pathlib import Path

from strati_reproductions import zoo


def mnist() -> Path:
    """Handwritten digits, 28 x 28."""
    return zoo.path("mnist")


def fashion_mnist() -> Path:
    """Pictures of clothes, 28 x 28."""
    return zoo.path("fashion-mnist")


def cifar10() -> Path:
    """Colour photographs of ten classes, 32 x 32."""
    return zoo.path("cifar10")
