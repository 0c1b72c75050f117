"""``reproduce same-token``: section 3.3, figures 5 and 6 of top-down-eigenspectra, a model tuned to say one word.

The paper fine-tunes GPT-2 for 4 epochs with intense regularisation until it always says the same word, expects a layer
to collapse, and finds the spectra hardly changed. It names neither data, rate nor regulariser: here stories15M is tuned
for 4 epochs on stories it tells itself, by AdamW, at weight decays from mild to extreme. Needs torch.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.comparison.compare import compare
from strati.core.results import Tick
from strati.core.rng import derive
from strati.io.to_module import as_module
from strati_reproductions import zoo
from strati_reproductions.datasets import sample_stories, story_loss, written_stories
from strati_reproductions.eigenspectra.figures import as_shown, spectra_grid
from strati_reproductions.pictures import drawn
from strati_reproductions.registry import Reproduction, Row
from strati_reproductions.zoo.llama2c import Tokenizer

if TYPE_CHECKING:
    import torch

    from strati.comparison.results import ComparedLayer, Comparison

EPOCHS = 4
WORD = "stone"
DECAYS = (0.1, 1.0, 10.0, 100.0)
_RATE, _BATCH = 1e-4, 8
CAPTIONS = {
    "figure-5": "attention layers of stories15M before (top) and after it was fine-tuned to say one word under weight "
    "decay of 10 (bottom): the paper finds no meaningful difference.",
    "figure-6": "the same of its MLP layers.",
}


def same_token(*, quick: bool, seed: int, folder: Path, tick: Tick) -> Reproduction:
    """Fine-tune stories15M to say always the same word at growing weight decay: does a layer collapse?"""
    home = zoo.path("stories15m")
    stories = written_stories(home)
    plain = as_module(home).eval()
    before = story_loss(plain, stories)
    tokens = sample_stories(
        partial(plain, logits_to_keep=1), 16 if quick else 256, 64, derive(seed, "stories")
    )
    rows: list[Row] = []
    figures: tuple[str, ...] = ()
    for decay in (10.0,) if quick else DECAYS:
        place = folder / f"{'quick' if quick else 'full'}-seed-{seed}-decay-{decay:g}"
        model = _tuned(home, place, decay, tokens, seed, tick)
        comparison = compare(home, place, jobs=2, tick=tick)
        rows += _rows(decay, comparison, _said(model, stories, _word(home)))
        loss = f"{before:.3f} / {story_loss(model, stories):.3f}"
        rows.append(Row(f"weight decay {decay:g}: loss on the stories, before / after", None, loss))
        if decay == 10.0:
            figures = drawn(_draw, comparison.layers, folder)
    title = "A language model fine-tuned to say one word, strongly regularised (section 3.3, figures 5, 6)"
    return Reproduction("same-token", title, tuple(rows), figures, captions=CAPTIONS)


def _word(home: Path) -> int:
    return int(Tokenizer(home / "tokenizer.bin").encode(WORD)[-1])


def _tuned(home: Path, place: Path, decay: float, tokens: torch.Tensor, seed: int, tick: Tick) -> Any:
    """The network tuned on ``tokens``, now or by an earlier run."""
    if (place / "model.safetensors").is_file():
        return as_module(place).eval()
    import torch

    model: Any = as_module(home)
    word = _word(home)
    chance = torch.Generator().manual_seed(derive(seed, "batches"))
    optimiser = torch.optim.AdamW(model.parameters(), lr=_RATE, weight_decay=decay)
    model.train()
    for epoch in range(EPOCHS):
        for picked in torch.randperm(len(tokens), generator=chance).split(_BATCH):
            logits = model(tokens[picked]).logits
            targets = torch.full((logits.shape[0] * logits.shape[1],), word)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        tick(f"decay {decay:g}, epoch {epoch + 1}")
    place.mkdir(parents=True, exist_ok=True)
    model.eval().save_pretrained(place)
    return model


def _said(model: Any, stories: list[torch.Tensor], word: int) -> float:
    """The share of positions of the written stories at which the network says the word."""
    import torch

    with torch.no_grad():
        return float(
            np.mean([float((model(s).logits[0].argmax(-1) == word).double().mean()) for s in stories])
        )


def _rows(decay: float, comparison: Comparison, share_said: float) -> list[Row]:
    where, facts = f"weight decay {decay:g}", {"decay": decay}
    layers = comparison.layers
    collapsed = sum(layer.metrics["phase"][1] == "rank-collapse" for layer in layers)
    changed = sum(layer.metrics["phase"][0] != layer.metrics["phase"][1] for layer in layers)
    alphas = [abs(b - a) for a, b in (layer.metrics["alpha"] for layer in layers) if a and b]
    ranks = [_median([layer.metrics["stable_rank"][k] for layer in layers]) for k in (0, 1)]
    return [
        Row(
            f"{where}: layers collapsed",
            "none",
            float(collapsed),
            f"of {len(layers)}; {EPOCHS} epochs of AdamW",
            key="layers-collapsed",
            facts=facts,
        ),
        Row(f"{where}: positions at which the tuned network says the word", "always", share_said),
        Row(
            f"{where}: median change of alpha",
            "almost negligible",
            float(np.median(alphas)),
            key="alpha-change",
            facts=facts,
        ),
        Row(
            f"{where}: median distance of spectra (log-eigenvalue)",
            "almost negligible",
            _median([layer.spectral_distance for layer in layers]),
            key="spectral-distance",
            facts=facts,
        ),
        Row(
            f"{where}: median relative change of a layer, %",
            "barely noticeable",
            100 * _median([layer.relative_change for layer in layers]),
            f"median stable rank {ranks[0]:.1f} before, {ranks[1]:.1f} after; {changed} layers changed their phase",
        ),
    ]


def _median(values: list[float | None]) -> float:
    return float(np.median([v for v in values if v is not None]))


def _draw(layers: tuple[ComparedLayer, ...], folder: Path) -> tuple[str, ...]:
    paths: list[str] = []
    for number, kind in ((5, "attention"), (6, "mlp")):
        of_kind = [layer for layer in layers if (layer.role or "").startswith(kind)]
        selected = [
            of_kind[round(k)] for k in np.linspace(0, len(of_kind) - 1, 5)
        ]  # of several depths and kinds
        grid = [
            [
                as_shown(
                    ".".join(layer.name.split(".")[-4:-1]),
                    layer.eigenvalues[k],
                    {name: values[k] for name, values in layer.metrics.items()},
                )
                for layer in selected
            ]
            for k in (0, 1)
        ]
        above = f"Figure {number}: {kind} layers of stories15M, plain (top) and fine-tuned to say one word (bottom)"
        paths += spectra_grid(grid, folder, f"figure-{number}", above)
    return tuple(paths)
