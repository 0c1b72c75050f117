"""A two-layer attention-only transformer with rotary positions, and Shakespeare in byte-pair tokens. Needs torch.

Queries and keys have biases, which are not small at the start. Without them the preference of a head for a distance is
a product of two means near 0, and previous-token heads form slowly.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from strati.core.files import write_atomic
from strati.core.plugins import require

if TYPE_CHECKING:
    from numpy.typing import NDArray

ROTARY_BASE = 10.0
"""Of the rotary frequencies; windows are short."""
_SMOOTHING = 0.02  # added to every count of a bigram


class AttentionOnly(nn.Module):
    """Token embeddings, two layers of causal attention with layer norm, an unembedding."""

    def __init__(self, vocabulary: int, width: int, heads: int) -> None:
        super().__init__()
        self.num_attention_heads = heads
        self.embed_tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList([CausalAttention(width, heads) for _ in range(2)])
        self.norm = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.embed_tokens.weight, std=width**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the next token at every place."""
        residual = self.embed_tokens(x)
        for layer in self.layers:
            residual = residual + layer(residual)
        logits: Tensor = self.lm_head(self.norm(residual))
        return logits

    def _layers(self) -> list[CausalAttention]:
        return [layer for layer in self.layers if isinstance(layer, CausalAttention)]

    def attention(self, x: Tensor) -> list[Tensor]:
        """The attention of each layer: (rows, heads, to, from)."""
        residual, weights = self.embed_tokens(x), []
        for layer in self._layers():
            weights.append(layer.attention(residual))
            residual = residual + layer(residual)
        return weights


class CausalAttention(nn.Module):
    """One layer of causal attention with rotary positions."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.q_proj, self.k_proj = (nn.Linear(width, width) for _ in range(2))
        self.v_proj, self.o_proj = (nn.Linear(width, width, bias=False) for _ in range(2))
        for projection in (self.q_proj, self.k_proj):
            nn.init.normal_(projection.bias)

    def forward(self, residual: Tensor) -> Tensor:
        """What the layer adds to the residual stream."""
        query, key, value = self._heads(residual)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.o_proj(mixed.transpose(-3, -2).flatten(-2))  # type: ignore[no-any-return]

    def attention(self, residual: Tensor) -> Tensor:
        """The attention of every head."""
        query, key, _ = self._heads(residual)
        scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        weights: Tensor = scores.masked_fill(future, -torch.inf).softmax(-1)
        return weights

    def _heads(self, residual: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.norm(residual)
        query, key, value = (
            projection(x).unflatten(-1, (self.heads, -1)).transpose(-3, -2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        return rotate(query), rotate(key), value


def rotate(x: Tensor) -> Tensor:
    """Rotary positions (Su et al. 2021) along the second last axis.

    Examples:
        >>> x = torch.randn(1, 1, 6, 8, generator=torch.Generator().manual_seed(0)).expand(1, 1, 6, 8)
        >>> same = x[..., :1, :].expand(1, 1, 6, 8)
        >>> scores = rotate(same)[0, 0] @ rotate(same)[0, 0].T
        >>> bool(torch.allclose(scores.diagonal(1), scores[0, 1]))  # depends on the distance alone
        True
    """
    half = x.shape[-1] // 2
    places = torch.arange(x.shape[-2], dtype=x.dtype)[:, None]
    angles = places * ROTARY_BASE ** (-torch.arange(half, dtype=x.dtype) / half)
    left, right = x[..., :half], x[..., half:]
    cosine, sine = angles.cos(), angles.sin()
    return torch.cat([left * cosine - right * sine, left * sine + right * cosine], -1)


def shakespeare(vocabulary: int, folder: Path) -> NDArray[np.int64]:
    """The plays in modern spelling as ids of a byte-pair encoding trained on them; stored in ``folder``."""
    from strati_reproductions.zoo.fetch import path

    file = folder / f"shakespeare-{vocabulary}.npy"
    if not file.is_file():
        tokenizers = require("tokenizers", "transformers", "byte-pair tokens")
        plays = [f.read_text("utf-8", "replace") for f in sorted(path("shakespeare").rglob("*_gut.txt"))]
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        trainer = tokenizers.trainers.BpeTrainer(vocab_size=vocabulary, show_progress=False)
        tokenizer.train_from_iterator(plays, trainer)
        ids = np.concatenate([np.array(tokenizer.encode(play).ids, np.int64) for play in plays])
        folder.mkdir(parents=True, exist_ok=True)
        buffer = io.BytesIO()
        np.save(buffer, ids)
        write_atomic(file, buffer.getvalue())
    return np.asarray(np.load(file))


def bigram_loss(text: NDArray[np.int64], held_out: NDArray[np.int64], vocabulary: int) -> float:
    """The mean loss on held-out windows of a bigram model counted on the text."""
    counts = np.full((vocabulary, vocabulary), _SMOOTHING)
    np.add.at(counts, (text[:-1], text[1:]), 1.0)
    logarithms = np.log(counts / counts.sum(1, keepdims=True))
    return float(-logarithms[held_out[:, :-1], held_out[:, 1:]].mean())
