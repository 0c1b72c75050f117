"""Small trained networks with their initial weights and data; ``strati demo`` and the documentation use them.

``shakespeare`` is a character-level language model: a Llama of 5 blocks and 526,560 parameters in bfloat16, as a
Hugging Face directory (``tools/make_embedded_transformer.py``). ``shakespeare-init`` holds its initial weights.
``shakespeare-lora`` is a PEFT adapter of rank 4 that was trained on the spelling of the First Folio. The beginning of
*The Tempest*, which no training saw, is in ``tempest.txt`` (modern spelling) and ``tempest-folio.txt`` (First Folio).
Cross-entropy per character on these two texts, from ``shakespeare-losses.json``: initial weights 4.63 and 4.63,
trained 1.54 and 2.02, with the adapter 1.76 and 1.58.

``digits-mlp.safetensors`` is an MLP 64-96-64-10 with ReLU on the 8x8 digits of scikit-learn (UCI optical recognition
of handwritten digits), with its initial weights and ``digits.npz`` (``tools/make_embedded.py``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

Name = Literal[
    "shakespeare",
    "shakespeare-init",
    "shakespeare-lora",
    "tempest.txt",
    "tempest-folio.txt",
    "digits-mlp.safetensors",
    "digits-mlp-init.safetensors",
    "digits.npz",
]


def path(name: Name) -> Path:
    """Return the path of an embedded file or directory.

    Examples:
        >>> path("digits.npz").is_file(), path("shakespeare").is_dir()
        (True, True)
    """
    return Path(__file__).resolve().parent / name
