"""``reproduce in-context``: which stages of in-context learning appear in a small attention-only transformer.

Two layers of attention without MLPs (Hoogland et al. 2024), trained here on Shakespeare. Each of the paper's stages has
a measure: bigrams (the loss on held-out text reaches that of a bigram model), n-grams (it falls below), previous-token
heads (a head of the first layer attends to the token before) and induction heads (a head of the second layer attends,
on a repeated random sequence, to the token after the first occurrence). In-context learning (late tokens of a window
are predicted better than early ones) is measured as well.

Half of the windows of every batch are random tokens that repeat: on text alone an induction head needs some hundred
million tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional

from strati.core.results import Tick
from strati.core.rng import derive, stream
from strati_reproductions.checkpointed_training import Training, load, spaced, step_of, trained
from strati_reproductions.in_context.model import AttentionOnly, bigram_loss, shakespeare
from strati_reproductions.pictures import over_steps
from strati_reproductions.registry import Reproduction, Row

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor, nn

    from strati.tracking.result import Track

GAMMA = 300.0
"""Localisation of every coefficient: weights move by 0.06 at most, about half of the size of a trained weight. An
earlier run of ``in-context`` had the value of strati's rule, 34, at which the chains of 8 of 12 checkpoints did not
mix."""
_HELD_OUT = 0.05  # of the text, at its end
_APPEARS = 0.3  # mean attention to the right place from which on a head counts as one of that kind
_GAIN = (
    0.1  # nats by which the loss must be lower: than that of bigrams, and of late tokens than of early ones
)
_SHORTEST = 8  # tokens of a random sequence that repeats; the longest has half of a window

SEE = (
    "From the top: loss on held-out text; loss of late less that of early tokens of a window; attention of the best "
    "previous-token head and of the best induction head; learning coefficient with two errors."
)


@dataclass(frozen=True)
class Size:
    """A size of the experiment.

    Attributes:
        vocabulary: Tokens of the byte-pair encoding.
        width: Width of the residual stream.
        heads: Heads of each layer.
        context: Tokens of a window.
        batch: Windows of a step.
        steps: The last step.
        checkpoints: Checkpoints, evenly spaced in the logarithm of the step.
        coefficients: Checkpoints whose learning coefficient is estimated.
        rows: Held-out windows on which everything is measured.
        draws: Draws of each of 4 chains.
        windows: Windows of a minibatch of the sampler. The temperature is ``n / ln n`` of their tokens: at that of all
            tokens no affordable chain mixes.
        repeats: Share of the windows of a batch that are repeated random tokens.
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
    repeats: float = 0.5

    @property
    def name(self) -> str:
        """The name of the training's folder, without the seed."""
        return f"{self.vocabulary}-{self.width}-{self.heads}-{self.context}-{self.steps}-{self.repeats:g}"

    @property
    def nbeta(self) -> float:
        """The inverse temperature of every learning coefficient."""
        count = self.windows * self.context
        return count / math.log(count)


FULL = Size(128, 128, 4, 64, 32, 6_000, 40, 12, 64, 100, 8)
QUICK = Size(200, 48, 4, 48, 16, 400, 12, 9, 16, 150, 16)


@dataclass(frozen=True)
class Measurement:
    """Measures of one checkpoint on held-out text; attention is that of every head, (heads of one layer,)."""

    step: int
    loss: float
    in_context: float
    previous_token: tuple[float, ...]
    induction: tuple[float, ...]


def in_context(*, quick: bool, seed: int, folder: Path, tick: Tick) -> Reproduction:
    """Train the transformer, measure the stages at every checkpoint and learning coefficients at some."""
    size = QUICK if quick else FULL
    text, held_out = split_text(size, folder)
    model, paths = train(size, seed, folder, tick)
    points = [measure(load_into(model, path), held_out, size, step_of(path)) for path in paths]
    tracked = _track(
        model, paths, held_out, size, folder / f"tracked-{size.name}-{GAMMA:g}-seed-{seed}", seed, tick
    )
    reference = bigram_loss(text, held_out, size.vocabulary)
    rows = [*_stage_rows(points, reference, model, size), *_coefficient_rows(tracked)]
    picture = over_steps(
        folder,
        "in-context",
        _curves(points, tracked),
        title="a two-layer attention-only transformer on Shakespeare",
    )
    title = "In-context learning in a two-layer attention-only transformer (Hoogland et al. 2024)"
    return Reproduction("in-context", title, tuple(rows), picture, captions={"in-context": SEE})


def train(size: Size, seed: int, folder: Path, tick: Tick) -> tuple[AttentionOnly, tuple[Path, ...]]:
    """Train (or continue); the model and the paths of its checkpoints."""
    torch.manual_seed(derive(seed, "in-context"))
    model = AttentionOnly(size.vocabulary, size.width, size.heads)
    text, _ = split_text(size, folder)

    def loss(network: nn.Module, step: int) -> Tensor:
        rows = torch.from_numpy(batch_rows(text, size, stream(seed, "batch", step)))
        logits = network(rows[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())

    plan = Training(
        size.steps,
        spaced(size.steps, size.checkpoints),
        rate=3e-3,
        decay=0.05,
        betas=(0.9, 0.98),
        warmup=100,
        clip=1.0,
    )
    return model, trained(folder / f"{size.name}-seed-{seed}", model, loss, plan, tick=tick)


def batch_rows(text: NDArray[np.int64], size: Size, rng: np.random.Generator) -> NDArray[np.int64]:
    """Windows of one step: random tokens that repeat, then text; each one token longer than the context."""
    starts = rng.integers(0, len(text) - size.context - 1, size.batch)
    rows: NDArray[np.int64] = text[starts[:, None] + np.arange(size.context + 1)]
    for row in range(round(size.repeats * size.batch)):
        period = rng.integers(_SHORTEST, size.context // 2 + 1)
        rows[row] = np.resize(rng.integers(0, size.vocabulary, period), size.context + 1)
    return rows


def split_text(size: Size, folder: Path) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The tokens to train on, and held-out windows, each one token longer than the context."""
    text = shakespeare(size.vocabulary, folder)
    cut = int(len(text) * (1 - _HELD_OUT))
    end = cut + size.rows * (size.context + 1)
    return text[:cut], text[cut:end].reshape(-1, size.context + 1)


def load_into(model: AttentionOnly, path: Path) -> AttentionOnly:
    """The model with the weights of a checkpoint."""
    load(model, path)
    return model


@torch.no_grad()
def measure(model: AttentionOnly, held_out: NDArray[np.int64], size: Size, step: int) -> Measurement:
    """Loss, in-context gain and attention scores of one checkpoint."""
    rows = torch.from_numpy(held_out)
    logits = model(rows[:, :-1])
    losses = functional.cross_entropy(logits.transpose(1, 2), rows[:, 1:], reduction="none").mean(0)
    early, late = size.context // 10, size.context * 9 // 10
    gain = float(losses[late:].mean() - losses[early : 2 * early + 1].mean())
    half = size.context // 2
    once = torch.from_numpy(stream(0, "repeated").integers(0, size.vocabulary, (16, half)))
    first, second = model.attention(torch.cat([once, once], 1))
    places = torch.arange(half, 2 * half - 1)
    induction = second[:, :, places, places - half + 1].mean((0, 2))
    places = torch.arange(1, 2 * half)
    previous = first[:, :, places, places - 1].mean((0, 2))
    return Measurement(step, float(losses.mean()), gain, tuple(previous.tolist()), tuple(induction.tolist()))


def _track(
    model: AttentionOnly,
    paths: tuple[Path, ...],
    held_out: NDArray[np.int64],
    size: Size,
    out: Path,
    seed: int,
    tick: Tick,
) -> Track:
    from strati.tracking.track import track

    places = np.unique(np.linspace(0, len(paths) - 1, size.coefficients).round().astype(int))
    rows = torch.from_numpy(held_out)
    return track(
        [paths[place] for place in places],
        data=(rows[:, :-1], rows[:, 1:]),
        model=model,
        out=out,
        what="spectra,llc",
        loss="cross_entropy",
        chains=4,
        draws=size.draws,
        batch=size.windows,
        nbeta=size.nbeta,
        gamma=GAMMA,
        seed=seed,
        tick=tick,
    )


def _stage_rows(points: list[Measurement], reference: float, model: AttentionOnly, size: Size) -> list[Row]:
    last = points[-1]
    parameters = sum(p.numel() for p in model.parameters())
    trained_tokens = last.step * size.batch * size.context
    setup = (
        f"{parameters:,} parameters, {size.vocabulary} byte-pair tokens, windows of {size.context}, rotary positions; "
        f"{last.step:,} steps of {size.batch} windows, {trained_tokens / 1e6:.0f} million tokens; {size.repeats:.0%} "
        "of the windows are random tokens that repeat, the paper's data are text alone"
    )

    def stage(number: int, what: str, appears: Callable[[Measurement], bool], note: str) -> Row:
        step = next((point.step for point in points if appears(point)), None)
        ours = "does not appear" if step is None else f"step {step:,}"
        facts = {"stage": number, "step": step}
        return Row(f"stage {number}, {what}", "appears", ours, note, key="stage", facts=facts)

    gain = -min(point.in_context for point in points)
    before = [place for place, point in enumerate(points) if point.in_context > -_GAIN]
    after = points[before[-1] + 1 :] if before else points
    learned = after[0].step if after else None
    return [
        Row("held-out loss, first and last", None, f"{points[0].loss:.3f} / {last.loss:.3f}", setup),
        stage(1, "bigrams: the loss reaches that of a bigram model", lambda p: p.loss <= reference,
              f"bigram loss {reference:.3f}"),
        stage(2, f"n-grams: the loss is {_GAIN} nats below that of a bigram model",
              lambda p: p.loss <= reference - _GAIN, f"at the end {reference - last.loss:.3f} nats below"),
        stage(3, "a previous-token head", lambda p: max(p.previous_token) >= _APPEARS,
              f"attention at the end {max(last.previous_token):.2f}; at least {_APPEARS} counts"),
        stage(4, "an induction head", lambda p: max(p.induction) >= _APPEARS,
              f"attention at the end {max(last.induction):.2f}; at least {_APPEARS} counts"),
        Row(f"in-context learning on held-out text: late tokens stay better by {_GAIN} nats", None,
            "does not appear" if learned is None else f"step {learned:,}", f"largest gain {gain:.3f} nats"),
    ]  # fmt: skip


def _coefficient_rows(tracked: Track) -> list[Row]:
    estimates = [
        f"{step:.0f}: {value:.1f} +- {error:.1f}"
        for curve in tracked.curves
        if curve.what == "llc"
        for step, value, error in zip(tracked.steps, curve.values, curve.stderr, strict=True)
        if value is not None
    ]
    changes = [
        f"{c['what']} {c['step']:.0f} [{c['low']:.0f}, {c['high']:.0f}]"
        for c in tracked.breaks
        if not c["layer"]
    ]
    why = tracked.failed[0]["reason"] if tracked.failed else ""
    return [
        Row(
            "learning coefficient by step",
            "rises through the stages",
            ", ".join(estimates) or "none",
            f"gamma {GAMMA:g}, chosen after a run with strati's rule whose chains did not mix at 8 of 12 checkpoints",
        ),
        Row("change points of network-wide series", None, "; ".join(changes) or "none"),
        Row("checkpoints whose coefficient was refused", None, str(len(tracked.failed)), why),
    ]


def _curves(points: list[Measurement], tracked: Track) -> list[dict[str, Any]]:
    steps = [point.step for point in points]
    curves: list[dict[str, Any]] = [
        {"title": "loss", "lines": [("held-out", steps, [p.loss for p in points])]},
        {"title": "late - early", "lines": [("nats", steps, [p.in_context for p in points])]},
        {
            "title": "attention",
            "lines": [
                ("previous token, layer 0", steps, [max(p.previous_token) for p in points]),
                ("induction, layer 1", steps, [max(p.induction) for p in points]),
            ],
        },
    ]
    for curve in tracked.curves:
        if curve.what == "llc":
            line = ("lambda", tracked.steps, curve.values, curve.stderr)
            curves.append({"title": "learning coefficient", "lines": [line]})
    return curves
