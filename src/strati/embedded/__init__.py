"""A small network really trained, its initial weights and its data: what ``strati demo`` runs on.

An MLP 64-96-64-10 with ReLU on the 8x8 digits of scikit-learn (UCI optical recognition of handwritten
digits); ``tools/make_embedded.py`` made the files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

Name = Literal["digits-mlp.safetensors", "digits-mlp-init.safetensors", "digits.npz"]


def path(name: Name) -> Path:
    """Where an embedded file lies.

    Examples:
        >>> path("digits.npz").is_file()
        True
    """
    return Path(__file__).resolve().parent / name
