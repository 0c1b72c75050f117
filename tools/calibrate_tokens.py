"""Under-trained tokens of models trained here: how many unused tokens are missed, how many used ones are listed.

    python tools/calibrate_tokens.py [--seeds 10 14] [--folder DIR]

A feed-forward language model reads three tokens of Shakespeare and predicts the next; 30 of its 500 tokens never occur.
The limits of ``strati.spectra.tokens`` were chosen on seeds 0 to 2.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from strati.spectra.tokens import unused_rows
from strati_reproductions.in_context.model import shakespeare

TOKENS, UNUSED, WIDTH, CONTEXT = 500, 30, 64, 3
CASES = {
    "AdamW, decay 0.1": {"decay": 0.1},
    "AdamW, no decay": {"decay": 0.0},
    "AdamW, decay 0.5, tied": {"decay": 0.5, "tied": True},
    "SGD": {"decay": 0.0, "sgd": True},
}


def train(
    words: np.ndarray, seed: int, *, decay: float, tied: bool = False, sgd: bool = False, steps: int = 900
) -> tuple[set[int], dict[str, np.ndarray]]:
    """The tokens that never occur, and the trained embedding and head."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    unused = rng.choice(TOKENS, UNUSED, replace=False)
    counts = np.bincount(words)
    place = np.full(len(counts), -1)
    place[np.argsort(-counts)[: TOKENS - UNUSED]] = rng.permutation(np.setdiff1d(np.arange(TOKENS), unused))
    text = torch.from_numpy(place[words][place[words] >= 0])
    embedding, head = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS, bias=False)
    for layer in (embedding, head):
        nn.init.normal_(layer.weight, std=0.02)
    body = nn.Sequential(nn.Linear(CONTEXT * WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
    if tied:
        head.weight = embedding.weight
    parameters = list(nn.ModuleList([embedding, body, head]).parameters())
    optimiser = (
        torch.optim.SGD(parameters, 0.5, momentum=0.9)
        if sgd
        else torch.optim.AdamW(parameters, 3e-3, weight_decay=decay)
    )
    for _ in range(steps):
        starts = torch.randint(0, len(text) - CONTEXT, (256,))
        inputs = text[starts[:, None] + torch.arange(CONTEXT)]
        loss = functional.cross_entropy(head(body(embedding(inputs).flatten(1))), text[starts + CONTEXT])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    layers = {"embedding": embedding} if tied else {"embedding": embedding, "head": head}
    return set(unused.tolist()), {name: layer.weight.detach().numpy() for name, layer in layers.items()}


def main() -> None:
    """Print misses and false finds of every case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs=2, default=(10, 14))
    parser.add_argument("--folder", type=Path, default=Path())
    options = parser.parse_args()
    torch.set_num_threads(1)
    words = shakespeare(512, options.folder)
    for name, case in CASES.items():
        matrices = missed = listed = 0
        for seed in range(*options.seeds):
            unused, tables = train(words, seed, **case)
            for table in tables.values():
                rows = {row for group in unused_rows(table) for row in group.rows}
                matrices, missed, listed = (
                    matrices + 1,
                    missed + len(unused - rows),
                    listed + len(rows - unused),
                )
        misses = f"{missed} of {UNUSED * matrices} unused tokens missed"
        print(f"{name}: {matrices} matrices, {misses}, {listed} used ones listed", flush=True)


if __name__ == "__main__":
    main()
