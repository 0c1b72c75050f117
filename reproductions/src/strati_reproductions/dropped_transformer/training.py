"""Twenty-four small transformers trained here from scratch, resumably. Needs torch and transformers.

Llama (pre-norm, gated, rotary; one with grouped queries), GPT-2 (pre-norm, fused and biased) and BERT (post-norm) on
the characters of Shakespeare, ViT on MNIST's digits; 2 to 12 layers, widths 64 to 256, with and without weight decay,
one shape with three seeds. A network's folder appears whole when its training ends, so that an interrupted run goes
on with the next network.
"""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.core.plugins import require
from strati.core.results import Tick, silent
from strati.core.rng import stream

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    Batches = Iterator[dict[str, torch.Tensor]]

CONTEXT = 64
"""Characters in a row of a batch."""

_BATCH = 12
_STEPS = 2000
"""Rows of a batch, and steps of every training: all 24 together take less than two hours of one core."""

_SHORT, _HIDDEN = 16, 0.3
"""Characters in a row where some are hidden, and the share of these: with longer rows and fewer hidden characters 2000
steps teach a small network no more than how frequent each character is."""

_LAST = 50
"""Steps whose mean loss is recorded as the last loss."""


@dataclass(frozen=True)
class Trainee:
    """One network to train; ``groups`` are key-value heads."""

    kind: str
    layers: int
    width: int
    decay: float
    seed: int = 0
    groups: int | None = None

    @property
    def name(self) -> str:
        """A name that says all of it."""
        grouped = "" if self.groups is None else f"-gqa{self.groups}"
        return f"{self.kind}-{self.layers}x{self.width}{grouped}-decay{self.decay:g}-seed{self.seed}"


TRAINEES = (
    *(Trainee("llama", 6, 64, 0.1, seed) for seed in range(3)),
    Trainee("gpt2", 6, 64, 0.1),
    Trainee("bert", 6, 64, 0.1),
    Trainee("vit", 6, 64, 0.1),
    Trainee("llama", 2, 128, 0.1),
    Trainee("llama", 4, 128, 0.0),
    Trainee("llama", 8, 64, 0.0),
    Trainee("llama", 12, 64, 0.1),
    Trainee("llama", 12, 64, 0.0),
    Trainee("llama", 4, 256, 0.1),
    Trainee("llama", 6, 128, 0.1, groups=2),
    Trainee("gpt2", 2, 256, 0.0),
    Trainee("gpt2", 4, 128, 0.0),
    Trainee("gpt2", 8, 96, 0.1),
    Trainee("gpt2", 12, 64, 0.1),
    Trainee("bert", 3, 192, 0.1),
    Trainee("bert", 4, 128, 0.0),
    Trainee("bert", 8, 64, 0.0),
    Trainee("bert", 12, 64, 0.1),
    Trainee("vit", 4, 128, 0.0),
    Trainee("vit", 8, 64, 0.0),
    Trainee("vit", 10, 96, 0.1),
)
"""The battery of the table."""

FOLLOWED = TRAINEES[0]
"""The network whose checkpoints are kept, and the steps at which they are."""
STEPS_KEPT = (0, 5, 10, 20, 40, 80, 160, 320, 640, 1280)


def trained(folder: Path, trainee: Trainee, *, tick: Tick = silent) -> Path:
    """The Hugging Face directory of a trained network below ``folder``, trained on the first call."""
    home = folder / trainee.name
    if not home.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".training-") as scratch:
            made = Path(scratch) / "network"
            _train(trainee, made)
            made.replace(home)
    tick(trainee.name)
    return home


def initial(trainee: Trainee) -> Any:
    """The network before training, as a transformers module."""
    torch = require("torch", "torch", "training transformers")
    transformers = require("transformers", "transformers", "training transformers")
    torch.manual_seed(trainee.seed)
    wide, layers = trainee.width, trainee.layers
    heads = max(2, wide // 32)
    vocabulary = len(_characters()[1]) + 1
    if trainee.kind == "llama":
        config = transformers.LlamaConfig(
            hidden_size=wide, intermediate_size=wide * 5 // 2, num_hidden_layers=layers, num_attention_heads=heads,
            num_key_value_heads=trainee.groups or heads, vocab_size=vocabulary, max_position_embeddings=CONTEXT * 4,
            tie_word_embeddings=False,
        )  # fmt: skip
        return transformers.LlamaForCausalLM(config)
    if trainee.kind == "gpt2":
        config = transformers.GPT2Config(
            n_embd=wide, n_layer=layers, n_head=heads, vocab_size=vocabulary, n_positions=CONTEXT * 4,
            bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(config)
    if trainee.kind == "bert":
        config = transformers.BertConfig(
            hidden_size=wide, intermediate_size=4 * wide, num_hidden_layers=layers, num_attention_heads=heads,
            vocab_size=vocabulary, max_position_embeddings=CONTEXT * 4, type_vocab_size=1,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        return transformers.BertForMaskedLM(config)
    config = transformers.ViTConfig(
        hidden_size=wide, intermediate_size=4 * wide, num_hidden_layers=layers, num_attention_heads=heads,
        image_size=28, patch_size=4, num_channels=1, num_labels=10,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


def _train(trainee: Trainee, made: Path) -> None:
    torch = require("torch", "torch", "training transformers")
    model = initial(trainee)
    began = time.process_time()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=trainee.decay)
    warm = _STEPS // 10
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda k: min((k + 1) / warm, 0.5 * (1 + math.cos(math.pi * k / _STEPS)) + 0.02)
    )
    batches = _SOURCES[trainee.kind](trainee.seed)
    model.train()
    losses = []
    for step in range(_STEPS):
        if trainee == FOLLOWED and step in STEPS_KEPT:
            model.save_pretrained(made / f"step-{step}")
        loss = model(**next(batches)).loss
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        losses.append(float(loss.detach()))
    model.eval()
    model.save_pretrained(made)
    told = {
        "steps": _STEPS,
        "first_loss": losses[0],
        "last_loss": float(np.mean(losses[-_LAST:])),
        "seconds": time.process_time() - began,
    }
    (made / "training.json").write_text(json.dumps(told) + "\n", encoding="utf-8")


def sample(kind: str, tokens: int) -> NDArray[Any]:
    """Data that no training batch has seen: ids of the end of the text, in rows as in training; images of the test set.

    Args:
        kind: Of the network, as in :class:`Trainee`.
        tokens: In all rows together; of images, 49 patches count.
    """
    if kind == "vit":
        x = _digits("test")[0][: max(1, tokens // 49)]
        return _scaled(x)
    text, _ = _characters()
    wide = _SHORT if kind == "bert" else CONTEXT
    return text[-tokens:].reshape(-1, wide)


@cache
def _characters() -> tuple[NDArray[np.int64], str]:
    """A million characters of Shakespeare as ids, and the alphabet."""
    from strati_reproductions.zoo.fetch import path

    files = sorted(p for p in path("shakespeare").rglob("*") if p.is_file())
    text = "".join(p.read_text("utf-8", "replace") for p in files)[:1_000_000]
    alphabet = "".join(sorted(set(text)))
    return _ids(text, alphabet), alphabet


def _ids(text: str, alphabet: str) -> NDArray[np.int64]:
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    known = np.frombuffer(alphabet.encode("utf-32-le"), np.uint32)
    return np.searchsorted(known, codes).astype(np.int64)


def _rows(seed: int) -> Iterator[NDArray[np.int64]]:
    text = _characters()[0][: -64 * CONTEXT]
    rng = stream(seed, "dropped-transformer", "batches")
    while True:
        starts = rng.integers(0, len(text) - CONTEXT, _BATCH)
        yield text[starts[:, None] + np.arange(CONTEXT)]


def causal_batches(seed: int) -> Batches:
    """Windows of the text, to be predicted from left to right."""
    import torch

    for rows in _rows(seed):
        ids = torch.from_numpy(rows)
        yield {"input_ids": ids, "labels": ids}


def _masked(seed: int) -> Batches:
    """Part of the characters hidden behind the last id, which is no character's; short windows, which teach faster."""
    import torch

    rng = stream(seed, "dropped-transformer", "masks")
    hidden_id = len(_characters()[1])
    for long in _rows(seed):
        rows = long.reshape(-1, _SHORT)
        hidden = rng.random(rows.shape) < _HIDDEN
        shown = np.where(hidden, hidden_id, rows)
        labels = np.where(hidden, rows, -100)
        yield {"input_ids": torch.from_numpy(shown), "labels": torch.from_numpy(labels)}


def _images(seed: int) -> Batches:
    import torch

    x, y = _digits("train")
    rng = stream(seed, "dropped-transformer", "images")
    while True:
        chosen = rng.integers(0, len(x), _BATCH)
        yield {
            "pixel_values": torch.from_numpy(_scaled(x[chosen])),
            "labels": torch.from_numpy(y[chosen].astype(np.int64)),
        }


def _digits(part: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """Images and labels of MNIST, ``train`` or ``test``."""
    from strati_reproductions.zoo.fetch import path

    data = np.load(path("mnist"))
    return data[f"x_{part}"], data[f"y_{part}"]


def _scaled(x: NDArray[Any]) -> NDArray[np.float32]:
    pixels = x.reshape(-1, 1, 28, 28).astype(np.float32)
    return pixels / np.float32(max(1.0, float(pixels.max())))


_SOURCES: dict[str, Callable[[int], Batches]] = {
    "llama": causal_batches,
    "gpt2": causal_batches,
    "bert": _masked,
    "vit": _images,
}
