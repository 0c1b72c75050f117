"""Networks that learn ``a + b mod p`` from a part of the table, as Nanda et al. (2023) set them up. Needs torch.

One layer of attention and one of ReLU without layer norm, read at the ``=`` sign. Only that position is ever read, so
keys and values are computed once per symbol and place, which changes no number and makes a step several times
cheaper. The quick network has no attention: the two embeddings are added.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from strati.core.rng import derive
from strati_reproductions.checkpointed_training import Loss


class Adder(nn.Module):
    """The one-layer transformer on ``a b =``; its input holds ``a`` and ``b`` in two columns."""

    def __init__(self, modulus: int, *, width: int = 128, heads: int = 4, hidden: int = 512) -> None:
        super().__init__()
        self.modulus, self.heads = modulus, heads
        self.embed = nn.Embedding(modulus + 1, width)
        self.position = nn.Embedding(3, width)
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)
        self.head = nn.Linear(width, modulus, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                fan = modulus if "head" in name else width
                nn.init.normal_(parameter, std=fan**-0.5)
            else:
                nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the sum."""
        symbols = self.embed.weight[:-1]
        last = self.embed.weight[-1] + self.position.weight[2]
        places = torch.stack([symbols + self.position.weight[0], symbols + self.position.weight[1]])
        size = last.numel() // self.heads
        query = self.q_proj(last).reshape(self.heads, size)

        def scores(rows: Tensor) -> Tensor:
            keys = self.k_proj(rows).unflatten(-1, (self.heads, size))
            products: Tensor = (keys * query).sum(-1) / size**0.5
            return products

        table, last_score = scores(places), scores(last)
        a, b = x.long().unbind(1)
        each = torch.stack([table[0][a], table[1][b], last_score.expand(len(a), -1)], -1).softmax(-1)
        values, mine = self.v_proj(places), self.v_proj(last)
        weights = each.repeat_interleave(size, dim=1)
        mixed = weights[..., 0] * values[0][a] + weights[..., 1] * values[1][b] + weights[..., 2] * mine
        stream = last + self.o_proj(mixed)
        stream = stream + self.fc2(functional.relu(self.fc1(stream)))
        logits: Tensor = self.head(stream)
        return logits


class SmallAdder(nn.Module):
    """Two embeddings added, one layer of ReLU."""

    def __init__(self, modulus: int, *, width: int = 64, hidden: int = 256) -> None:
        super().__init__()
        self.modulus = modulus
        self.embed = nn.Embedding(modulus, width)
        self.fc1 = nn.Linear(width, hidden, bias=False)
        self.head = nn.Linear(hidden, modulus, bias=False)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the sum."""
        symbols = self.fc1(self.embed.weight)
        a, b = x.long().unbind(1)
        logits: Tensor = self.head(functional.relu(symbols[a] + symbols[b]))
        return logits


def table(modulus: int, share: float, seed: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The pairs to learn from and those held out, with their sums.

    Examples:
        >>> (x, y), (x_test, y_test) = table(5, 0.4, 0)
        >>> len(y), len(y_test), bool((x.sum(1) % 5 == y).all())
        (10, 15, True)
    """
    pairs = torch.cartesian_prod(torch.arange(modulus), torch.arange(modulus))
    generator = torch.Generator().manual_seed(derive(seed, "modular addition"))
    pairs = pairs[torch.randperm(len(pairs), generator=generator)]
    sums = pairs.sum(1) % modulus
    cut = int(share * len(pairs))
    return (pairs[:cut], sums[:cut]), (pairs[cut:], sums[cut:])


def whole_table_loss(x: Tensor, y: Tensor) -> Loss:
    """The same full batch at every step; in double precision, without which small losses throw the weights about."""

    def loss(model: nn.Module, step: int) -> Tensor:
        return functional.cross_entropy(model(x).double(), y)

    return loss
