"""Data of the reproductions: sets that a study knows by name, digits, stories, and files next to the project.

The functions :func:`mnist`, :func:`fashion_mnist` and :func:`cifar10` are entry points: a study names them. Data sets
are fetched on the first call.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from strati import embedded
from strati.core.errors import BadInputError
from strati.core.plugins import require
from strati_reproductions import zoo
from strati_reproductions.zoo.llama2c import Tokenizer

if TYPE_CHECKING:
    import torch


def mnist() -> Path:
    """Handwritten digits, 28 x 28."""
    return zoo.path("mnist")


def fashion_mnist() -> Path:
    """Pictures of clothes, 28 x 28."""
    return zoo.path("fashion-mnist")


def cifar10() -> Path:
    """Colour photographs of ten classes, 32 x 32."""
    return zoo.path("cifar10")


@dataclass(frozen=True)
class Digits:
    """Images as rows of pixels with their labels, to train on and to test on."""

    x: torch.Tensor
    y: torch.Tensor
    x_test: torch.Tensor
    y_test: torch.Tensor


def embedded_digits() -> Digits:
    """The 8 x 8 digits that come with strati."""
    import torch

    with np.load(embedded.path("digits.npz")) as file:
        return Digits(*(torch.from_numpy(file[k]) for k in ("x", "y", "x_test", "y_test")))


def mnist_digits() -> Digits:
    """MNIST, pixels between 0 and 1."""
    import torch

    with np.load(mnist()) as file:
        x, x_test = (
            torch.from_numpy(file[k].reshape(len(file[k]), -1) / np.float32(255))
            for k in ("x_train", "x_test")
        )
        return Digits(x, torch.from_numpy(file["y_train"]), x_test, torch.from_numpy(file["y_test"]))


def external_data(*parts: str) -> Path:
    """A file or folder next to the project (``../shared/data``, or ``STRATI_DATA``).

    Raises:
        BadInputError: It is absent.
    """
    home = os.environ.get("STRATI_DATA")
    folder = Path(home) if home else Path(__file__).resolve().parents[4] / "shared" / "data"
    path = folder.joinpath(*parts)
    if not path.exists():
        raise BadInputError(
            "/".join(parts),
            "these data are not part of the project and are absent; set STRATI_DATA to their folder",
        )
    return path


def written_stories(home: Path) -> list[torch.Tensor]:
    """Five stories of TinyStories as token ids of stories15M, at most 256 tokens each, one row each.

    Args:
        home: The folder of stories15M.
    """
    import torch

    tokenizer = Tokenizer(home / "tokenizer.bin")
    text = external_data("tinystories", "tinystories_sample.txt").read_text("utf-8")
    parts = [story.strip() for story in text.split("<|endoftext|>") if story.strip()]
    return [torch.tensor([tokenizer.encode(story)[:256]]) for story in parts]


def sample_stories(model: Any, stories: int, length: int, seed: int) -> torch.Tensor:
    """Token ids that a language model samples from itself, for models whose training data are not available."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    tokens = torch.ones(stories, 1, dtype=torch.long)
    with torch.no_grad():
        while tokens.shape[1] < length:
            probabilities = torch.softmax(model(tokens).logits[:, -1], dim=-1)
            tokens = torch.cat([tokens, torch.multinomial(probabilities, 1, generator=generator)], dim=1)
    return tokens


def wikitext_tokens(model: Path, count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The first tokens of WikiText's test articles, by the tokenizer of a GGUF file.

    Args:
        model: The GGUF file.
        count: Number of tokens.
    """
    text = external_data("wikitext", "test.txt").read_text("utf-8")
    transformers = require("transformers", "transformers", "a tokenizer")
    require("gguf", "gguf", "a tokenizer")
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        model.parent, gguf_file=model.name, local_files_only=True
    )
    return np.asarray(tokenizer(text[: 20 * count], verbose=False)["input_ids"][:count], np.int64)


def story_loss(model: Any, stories: list[torch.Tensor]) -> float:
    """Mean loss per token over all stories."""
    import torch

    with torch.no_grad():
        losses = [float(model(s, labels=s).loss) * (s.shape[1] - 1) for s in stories]
    return sum(losses) / sum(s.shape[1] - 1 for s in stories)
