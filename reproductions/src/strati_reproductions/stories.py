"""Stories as token numbers: the five of TinyStories that lie beside the project, and those a model tells itself."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from strati_reproductions.external_data import external_data
from strati_reproductions.zoo.llama2c import Tokenizer

if TYPE_CHECKING:
    import torch


def written_stories(home: Path) -> list[torch.Tensor]:
    """The five stories through stories15M's own tokenizer, at most 256 tokens each, one row each.

    Args:
        home: The folder of stories15M.
    """
    import torch

    tokenizer = Tokenizer(home / "tokenizer.bin")
    text = external_data("tinystories", "tinystories_sample.txt").read_text("utf-8")
    parts = [story.strip() for story in text.split("<|endoftext|>") if story.strip()]
    return [torch.tensor([tokenizer.encode(story)[:256]]) for story in parts]


def tell_stories(model: Any, stories: int, length: int, seed: int) -> torch.Tensor:
    """Token numbers of stories that a language model tells itself: data of its own kind, without a data set."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    tokens = torch.ones(stories, 1, dtype=torch.long)
    with torch.no_grad():
        while tokens.shape[1] < length:
            chances = torch.softmax(model(tokens).logits[:, -1], dim=-1)
            tokens = torch.cat([tokens, torch.multinomial(chances, 1, generator=generator)], dim=1)
    return tokens


def story_loss(model: Any, stories: list[torch.Tensor]) -> float:
    """Mean loss per token over all stories."""
    import torch

    with torch.no_grad():
        losses = [float(model(s, labels=s).loss) * (s.shape[1] - 1) for s in stories]
    return sum(losses) / sum(s.shape[1] - 1 for s in stories)
