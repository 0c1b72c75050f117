"""A small attention-only language model followed (Hoogland et al. 2024): which stages of in-context learning appear.

Two layers of attention, no MLP, trained here on the words of Shakespeare. Their stages, each with a measure of ours
on text that was held out: bigrams (the loss comes down to that of a bigram model), in-context learning (late tokens
of a window are predicted better than early ones), previous-token heads (attention of the first layer to the token
before) and induction heads (attention of the second layer, on a repeated random sequence, to what followed the token
the first time).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from strati.core.results import Tick
from strati.core.rng import derive, stream
from strati_reproductions.checkpointed_training import Training, load, spaced, step_of, trained
from strati_reproductions.pictures import over_steps
from strati_reproductions.registry import Reproduction, Row

_WORDS = re.compile(r"[a-z']+|[.,;:!?]|\n")
_HELD = 0.05  # of the text, at its end, is for measuring
_APPEARS = 0.3  # attention to the right place, beyond which a head is one of that kind
_SECONDS = 5400.0

SEE = (
    "From the top: loss on held-out text; how much better late tokens of a window are predicted than early ones; "
    "attention of the best previous-token head and the best induction head; the learning coefficient with two errors."
)


@dataclass(frozen=True)
class Size:
    """A size of the experiment.

    ``coefficients`` are checkpoints whose learning coefficient is estimated, from ``draws`` of 4 chains on minibatches
    of ``windows``, at the temperature ``n / ln n`` of as many tokens (at that of all no affordable chain mixes).
    """

    vocabulary: int
    width: int
    heads: int
    context: int
    batch: int
    steps: int
    checkpoints: int
    coefficients: int
    rows: int
    draws: int
    windows: int
    seconds: float = _SECONDS


FULL = Size(5000, 256, 8, 256, 8, 3000, 30, 12, 64, 100, 2)
QUICK = Size(300, 48, 4, 48, 16, 800, 12, 9, 16, 150, 16)


class AttentionOnly(nn.Module):
    """Token and position embeddings, two layers of causal attention with layer norm, an unembedding."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(size.vocabulary, size.width)
        self.embed_positions = nn.Embedding(size.context, size.width)
        self.layers = nn.ModuleList([CausalAttention(size.width, size.heads) for _ in range(2)])
        self.norm = nn.LayerNorm(size.width)
        self.lm_head = nn.Linear(size.width, size.vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02 if len(parameter) > 4 * size.width else size.width**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the next token at every place."""
        return self.read(x)[0]

    def read(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Logits, and what each layer attends to: (rows, heads, to, from)."""
        stream = self.embed_tokens(x) + self.embed_positions.weight[: x.shape[1]]
        attention = []
        for layer in self.layers:
            added, weights = layer(stream)
            stream = stream + added
            attention.append(weights)
        return self.lm_head(self.norm(stream)), attention


class CausalAttention(nn.Module):
    """One layer of causal attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )

    def forward(self, stream: Tensor) -> tuple[Tensor, Tensor]:
        """What is added to the stream, and the attention."""
        x = self.norm(stream)
        q, k, v = (
            p(x).unflatten(-1, (self.heads, -1)).transpose(-3, -2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        length = x.shape[-2]
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return self.o_proj((weights @ v).transpose(-3, -2).flatten(-2)), weights


@dataclass(frozen=True)
class TrainingStage:
    """Measures of one checkpoint on held-out text."""

    step: int
    loss: float
    in_context: float
    previous_token: float
    induction: float


def in_context(*, quick: bool, seed: int, folder: Path, tick: Tick) -> Reproduction:
    """Which stages of in-context learning a two-layer attention-only transformer goes through."""
    return followed(QUICK if quick else FULL, seed=seed, folder=folder, tick=tick)


def followed(size: Size, *, seed: int, folder: Path, tick: Tick) -> Reproduction:
    """The same at any size; ``size.seconds`` is a limit over all runs of an interrupted training."""
    text, bigram = corpus(size.vocabulary)
    torch.manual_seed(derive(seed, "in-context"))
    model = AttentionOnly(size)
    cut = int(len(text) * (1 - _HELD))

    def loss(network: nn.Module, step: int) -> Tensor:
        begin = stream(seed, "batch", step).integers(0, cut - size.context - 1, size.batch)
        rows = torch.from_numpy(text[begin[:, None] + np.arange(size.context + 1)])
        logits = network(rows[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())

    plan = Training(
        size.steps,
        spaced(size.steps, size.checkpoints),
        rate=2e-3,
        decay=0.05,
        warmup=50,
        clip=1.0,
        seconds=size.seconds,
    )
    name = f"{size.vocabulary}-{size.width}-{size.steps}-seed-{seed}"
    paths = trained(folder / name, model, loss, plan, tick=tick)
    held = text[cut : cut + size.rows * (size.context + 1)].reshape(-1, size.context + 1)
    stages = [_stage(load(model, path), held, size, step_of(path)) for path in paths]  # type: ignore[arg-type]
    tracked = _tracked(model, paths, held, size, folder / f"followed-{name}-{size.draws}", seed, tick)
    level = next((s for s in tracked.curves if s.what == "llc"), None)
    parameters = sum(p.numel() for p in model.parameters())
    rows = _rows(stages, _bigram_loss(bigram, held), tracked, parameters, size)
    lines: list[dict[str, Any]] = [
        {"title": "loss", "lines": [("held out", [s.step for s in stages], [s.loss for s in stages])]},
        {
            "title": "late - early",
            "lines": [("nats", [s.step for s in stages], [s.in_context for s in stages])],
        },
        {
            "title": "attention",
            "lines": [
                ("previous token, layer 0", [s.step for s in stages], [s.previous_token for s in stages]),
                ("induction, layer 1", [s.step for s in stages], [s.induction for s in stages]),
            ],
        },
    ]
    if level is not None:
        lines.append(
            {
                "title": "learning coefficient",
                "lines": [("lambda", tracked.steps, level.values, level.stderr)],
            }
        )
    picture = over_steps(folder, f"in-context-{name}", lines, title="a two-layer attention-only transformer")
    title = "In-context learning in a two-layer attention-only transformer (Hoogland et al. 2024)"
    return Reproduction("in-context", title, tuple(rows), picture, captions={"in-context": SEE})


@cache
def corpus(
    vocabulary: int,
) -> tuple[np.ndarray[Any, np.dtype[np.int64]], np.ndarray[Any, np.dtype[np.float64]]]:
    """The words as numbers, 0 for rare ones, and the smoothed logarithms of bigrams."""
    from strati_reproductions.zoo.fetch import path

    files = sorted(p for p in path("shakespeare").rglob("*") if p.is_file())
    words = _WORDS.findall("".join(p.read_text("utf-8", "replace") for p in files)[:4_000_000].lower())
    common = [w for w, _ in Counter(words).most_common(vocabulary - 1)]
    number = {w: i + 1 for i, w in enumerate(common)}
    ids = np.array([number.get(w, 0) for w in words], np.int64)
    table = np.full((vocabulary, vocabulary), 0.02)
    train = ids[: int(len(ids) * (1 - _HELD))]
    np.add.at(table, (train[:-1], train[1:]), 1.0)
    return ids, np.log(table / table.sum(1, keepdims=True))


def _bigram_loss(bigram: np.ndarray[Any, Any], held: np.ndarray[Any, Any]) -> float:
    return float(-bigram[held[:, :-1], held[:, 1:]].mean())


def _stage(model: AttentionOnly, held: np.ndarray[Any, Any], size: Size, step: int) -> TrainingStage:
    rows = torch.from_numpy(held)
    with torch.no_grad():
        logits, _ = model.read(rows[:, :-1])
        each = functional.cross_entropy(logits.transpose(1, 2), rows[:, 1:], reduction="none").mean(0)
        early, late = size.context // 10, size.context * 9 // 10
        score = float(each[late:].mean() - each[early : 2 * early + 1].mean())
        half = size.context // 2
        once = torch.from_numpy(stream(0, "repeated").integers(1, size.vocabulary, (16, half)))
        _, (first, second) = model.read(torch.cat([once, once], 1))
        places = torch.arange(half, 2 * half)
        induction = second[:, :, places, places - half + 1].mean((0, 2)).max()
        places = torch.arange(1, 2 * half)
        previous = first[:, :, places, places - 1].mean((0, 2)).max()
    return TrainingStage(step, float(each.mean()), score, float(previous), float(induction))


def _tracked(
    model: nn.Module,
    paths: tuple[Path, ...],
    held: np.ndarray[Any, Any],
    size: Size,
    out: Path,
    seed: int,
    tick: Tick,
) -> Any:
    from strati.tracking.track import track

    measured_paths = [
        paths[i] for i in np.unique(np.linspace(0, len(paths) - 1, size.coefficients).round().astype(int))
    ]
    rows = torch.from_numpy(held)
    tokens = size.windows * size.context
    return track(
        measured_paths,
        data=(rows[:, :-1], rows[:, 1:]),
        model=model,
        out=out,
        what="spectra,llc",
        loss="cross_entropy",
        chains=4,
        draws=size.draws,
        batch=size.windows,
        nbeta=tokens / math.log(tokens),
        seed=seed,
        tick=tick,
    )


def _rows(stages: list[TrainingStage], bigram: float, tracked: Any, parameters: int, size: Size) -> list[Row]:
    last = stages[-1]
    size_note = (
        f"{parameters} parameters, {size.vocabulary} words, windows of {size.context}, "
        f"{last.step} of {size.steps} steps of {size.batch} windows"
    )

    def stage(number: int, what: str, test: Callable[[Any], bool], note: str) -> Row:
        step = next((s.step for s in stages if test(s)), None)
        text = "does not appear" if step is None else f"step {step}"
        facts = {"stage": number, "step": step}
        return Row(f"stage {number}, {what}", "appears", text, note, key="stage", facts=facts)

    score = min(s.in_context for s in stages)
    rows = [
        Row("held-out loss, first and last", None, f"{stages[0].loss:.3f} / {last.loss:.3f}", size_note),
        stage(
            1,
            "bigrams: the loss reaches that of a bigram model",
            lambda s: s.loss <= bigram,
            f"bigram loss {bigram:.3f}",
        ),
        stage(
            2,
            "in-context learning: late tokens better by 0.1 nats",
            lambda s: s.in_context <= -0.1,
            f"largest gain {-score:.3f} nats",
        ),
        stage(
            3,
            "a previous-token head",
            lambda s: s.previous_token >= _APPEARS,
            f"attention at the end {last.previous_token:.2f}",
        ),
        stage(
            4,
            "an induction head",
            lambda s: s.induction >= _APPEARS,
            f"attention at the end {last.induction:.2f}",
        ),
    ]
    level = next((s for s in tracked.curves if s.what == "llc"), None)
    if level is not None:
        estimates = [
            (t, v, e)
            for t, v, e in zip(tracked.steps, level.values, level.stderr, strict=True)
            if v is not None
        ]
        text = ", ".join(f"{t:.0f}: {v:.1f} +- {e:.1f}" for t, v, e in estimates)
        rows.append(Row("learning coefficient by step", "rises through the stages", text))
    changes = [
        f"{c['what']} {c['step']:.0f} [{c['low']:.0f}, {c['high']:.0f}]"
        for c in tracked.breaks
        if not c["layer"]
    ]
    rows.append(Row("changes of network-wide series", None, "; ".join(changes) or "none found"))
    rows.append(Row("checkpoints refused", None, str(len(tracked.failed)), _why(tracked.failed)))
    return rows


def _why(failed: Any) -> str:
    return failed[0]["reason"] if failed else ""
