"""The same networks with 256 tokens: by the loss of the next one, and by the outputs that the network recorded.

Characters of Shakespeare that no training saw, and images of MNIST's test set, for the networks trained here; what
stories15M and SmolLM2 tell themselves; random ids for MiniLM and noise for Whisper's encoder, of which only outputs
are asked.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.core.rng import derive, stream
from strati.reassembly.reassemble import ReassembleConfig
from strati.reassembly.transformer.verify import answers, network, verified
from strati_reproductions.datasets import sample_stories
from strati_reproductions.dropped_transformer.scoring import score
from strati_reproductions.dropped_transformer.training import sample

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.reassembly.transformer.result import TransformerReassembly
    from strati.reassembly.transformer.shuffle import ShuffledCheckpoint

TOKENS = 256
SECONDS = {"smollm2": 120.0}
"""Of the repair, by the loss and by outputs each, where it is not the usual time: one run of SmolLM2 takes a second and
more, and the 1,800 runs that place its 60 norms would take half an hour."""
USUAL = 240.0


def with_data(name: str, dropped: ShuffledCheckpoint, found: TransformerReassembly, seed: int) -> list[str]:
    """A line for the loss of the next token, where there is one, and a line for recorded outputs.

    Args:
        name: Of the network.
        dropped: Its pieces and the answer.
        found: Where the weights alone put them.
        seed: Of the data that are drawn.
    """
    truth = _true(found, dropped)
    data = _data(name, truth, seed)
    config = ReassembleConfig(seed=seed, seconds=SECONDS.get(name, USUAL), tokens=TOKENS)
    lines = []
    if data.dtype.kind == "i" and truth.pieces.config.get("model_type") != "bert":
        better = verified(found, data, None, config)
        lines.append(f"by the loss of {TOKENS} tokens {_counts(better, dropped)}, loss {better.loss:.3f}")
    recorded = answers(truth, data, config)
    began = time.perf_counter()
    better = verified(found, data, recorded, config)
    taken = time.perf_counter() - began
    exact = "exact" if better.exact else "NOT exact"
    lines.append(f"by recorded outputs {_counts(better, dropped)}, {exact}, {taken:.1f} s")
    return lines


def _counts(found: TransformerReassembly, dropped: ShuffledCheckpoint) -> str:
    pieces = found.pieces
    right = score(
        found.blocks, found.vectors, dropped.answer, pieces.arrays, unfixed=pieces.blueprint.unfixed
    )
    return (
        f"{right.matrices} of {right.of_matrices} matrices and {right.vectors} of {right.of_vectors} vectors"
    )


def _true(found: TransformerReassembly, dropped: ShuffledCheckpoint) -> TransformerReassembly:
    """Every piece in its true place."""
    answer = dropped.answer
    return replace(
        found,
        blocks=tuple(answer["blocks"]),
        vectors=tuple(answer["vectors"]),
        embedding=answer["embedding"],
        head=answer["head"],
        others=answer["others"],
    )


def _data(name: str, truth: TransformerReassembly, seed: int) -> NDArray[Any]:
    """Rows that the network takes, of 256 tokens together where they are tokens."""
    kind = str(truth.pieces.config.get("model_type"))
    rng = stream(seed, "dropped-transformer", "data", name)
    if kind == "whisper":
        bands = int(truth.pieces.config.get("num_mel_bins", 80))
        return rng.standard_normal((1, bands, 3000)).astype(np.float32)
    if name.startswith("minilm"):
        return rng.integers(1000, int(truth.pieces.config["vocab_size"]), (TOKENS // 32, 32))
    if name in ("stories15m", "smollm2"):
        model = network(truth.pieces.config, truth.tensors(), truth.pieces.where)
        told = sample_stories(model, 4, TOKENS // 4, derive(seed, "dropped-transformer", name))
        return np.asarray(told.numpy())
    return sample(kind, TOKENS)
