"""With data: does the rebuilt network predict them, and does any move make it better?

The loss is that of the next token for a decoder; with given outputs it is the mean squared error to them, for any
network. Given outputs are first regressed on all moves at once (:mod:`~strati.reassembly.transformer.refine`), then
single moves are tried (:mod:`~strati.reassembly.transformer.output_loss`): on as few rows and tokens as fix the
moves, where a run takes a fraction of the time, then on all of them. Where the outputs are not reached in the end,
matrices are left where the weights put them unless the data explain the change nearly in full.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.core.errors import BadInputError
from strati.core.results import Flag, Tick, silent
from strati.reassembly.transformer.output_loss import OutputLoss, reversal
from strati.reassembly.transformer.refine import refine_with_outputs
from strati.reassembly.transformer.run import Runner, network

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.reassembly.residual.config import ReassembleConfig
    from strati.reassembly.transformer.result import TransformerReassembly

_NOT_CAUSAL = ("bert", "roberta", "distilbert")
"""Networks of tokens that do not predict the next one."""

_EXPLAINED = 1e-3
"""Share of the error that moves of matrices may leave to be believed where the outputs are not reached."""

_ENOUGH = 16384
"""Numbers of the outputs that tell one arrangement from another: several times as many as are regressed at once."""
_ROWS, _TOKENS = 2, 12
"""Rows and tokens that a decoder is tried on first, where their outputs have so many numbers."""


def verified(
    answer: TransformerReassembly, data: Any, outputs: Any, config: ReassembleConfig, *, tick: Tick = silent
) -> TransformerReassembly:
    """Check the answer with data, and repair it while single moves lower the loss.

    Raises:
        BadInputError: The data do not fit the network, or say nothing (no outputs, and no decoder's next token).
    """
    inputs, targets = _inputs(answer, data, outputs, config)
    pieces = answer.pieces
    model = network(pieces.config, answer.tensors(), pieces.where)
    runner = Runner(model, pieces.blueprint, inputs)
    output_loss = OutputLoss(runner, answer, targets, config.seconds)
    if targets is None and not any(flag.code == "direction-uncertain" for flag in answer.warnings):
        # some hundred tokens do not outweigh what the weights place surely
        output_loss.held = {n for block in answer.blocks for n in block.values()} - set(answer.uncertain)
    began = time.monotonic()

    def late(share: float = 1.0) -> bool:
        return time.monotonic() - began > share * config.seconds

    causal = pieces.config.get("model_type") not in _NOT_CAUSAL
    ended = _repaired(output_loss, set(answer.uncertain), late, causal, tick)
    warnings = tuple(flag for flag in answer.warnings if flag.code != "direction-uncertain")
    if not ended:
        warnings += (
            Flag("time", "stopped at the time limit: another move may lower the loss; give it more time"),
        )
    elif output_loss.exact is not True:
        warnings += (
            Flag("local", "no single move lowers the loss; the order is the best found with these data"),
        )
    blocks, vectors = output_loss.answer()
    uncertain: tuple[int, ...] = ()
    if output_loss.exact is not True:
        held = {
            n
            for old, new in zip(answer.blocks, blocks, strict=True)
            for role, n in old.items()
            if n == new[role]
        }
        moved = {n for block in answer.blocks for n in block.values()} - held
        doubted = set(answer.uncertain) | moved
        uncertain = tuple(sorted(doubted - output_loss.settled() if output_loss.targets is None else doubted))
    return replace(
        answer,
        blocks=blocks,
        vectors=vectors,
        loss=output_loss.loss,
        exact=output_loss.exact,
        warnings=warnings,
        uncertain=uncertain,
    )


def answers(answer: TransformerReassembly, data: Any, config: ReassembleConfig) -> NDArray[np.float64]:
    """What the network answers with its pieces where ``found`` has them: outputs to record, or to compare.

    Raises:
        BadInputError: The data do not fit the network.
    """
    inputs = _module_inputs(answer, np.asarray(data), config)
    pieces = answer.pieces
    model = network(pieces.config, answer.tensors(), pieces.where)
    return np.asarray(Runner(model, pieces.blueprint, inputs).output().double().numpy())


def _repaired(
    output_loss: OutputLoss, doubtful: set[int], late: Callable[..., bool], causal: bool, tick: Tick
) -> bool:
    """Repair; ``False`` if the time was over first."""
    first = dict(output_loss.numbers)
    before = output_loss.loss
    if output_loss.targets is None:
        return output_loss.repair(late, tick)
    inputs, targets = output_loss.runner.inputs, output_loss.targets
    output_loss.take_best(reversal(output_loss.blueprint), False, late)
    few = _fewer(inputs, targets, causal)
    if few is not None:
        output_loss.look_at(*few)
        half = partial(late, 0.5)
        refine_with_outputs(output_loss, doubtful, half)
        output_loss.repair(half, tick)
        output_loss.look_at(inputs, targets)
        tick(f"on {few[1].shape[0]} rows, loss {output_loss.loss:.4g}")
        if output_loss.exact:
            return True
    refine_with_outputs(output_loss, doubtful, late)
    tick(f"regressed, loss {output_loss.loss:.4g}")
    ended = output_loss.repair(late, tick)
    if output_loss.exact is not True and output_loss.loss > _EXPLAINED * before:
        output_loss.restore(first)
        ended = output_loss.repair(late, tick, matrices=False) and ended
    return ended


def _fewer(
    inputs: dict[str, Any], targets: NDArray[Any], causal: bool
) -> tuple[dict[str, Any], NDArray[Any]] | None:
    """The first rows, and of a decoder their first tokens, that have numbers enough; ``None`` if that is most of them.

    What a decoder answers to the first tokens does not depend on those that follow.
    """
    if targets.size < 2 * _ENOUGH:
        return None
    rows, tokens = len(targets), None
    per_row = targets.size // rows
    ids = inputs.get("input_ids")
    if causal and ids is not None and targets.ndim == 3 and targets.shape[:2] == tuple(ids.shape):
        tokens = min(targets.shape[1], max(_TOKENS, -(-_ENOUGH // (_ROWS * targets.shape[2]))))
        per_row = tokens * targets.shape[2]
    rows = min(rows, max(_ROWS if tokens else 1, -(-_ENOUGH // per_row)))
    if 2 * rows * per_row > targets.size:
        return None
    cut = (slice(rows), slice(tokens)) if tokens else (slice(rows),)
    return {k: v if isinstance(v, bool) else v[cut] for k, v in inputs.items()}, targets[cut]


def _inputs(
    answer: TransformerReassembly, data: Any, outputs: Any, config: ReassembleConfig
) -> tuple[dict[str, Any], NDArray[Any] | None]:
    """What the module is called with, and the outputs to agree with."""
    where = answer.pieces.where
    if isinstance(data, str | Path):
        data, outputs = _read(answer, Path(data), outputs, config)
    array = np.asarray(data.detach().cpu().numpy() if hasattr(data, "detach") else data)
    targets = (
        None
        if outputs is None
        else np.asarray(outputs.detach().cpu() if hasattr(outputs, "detach") else outputs)
    )
    kind = answer.pieces.config.get("model_type")
    inputs = _module_inputs(answer, array, config)
    if "pixel_values" in inputs and targets is not None:
        targets = targets[: config.tokens]
    causal = array.dtype.kind in "iu" and kind not in _NOT_CAUSAL
    if targets is None and not causal:
        raise BadInputError(
            where, "this network predicts no next token: give the outputs it recorded with the data"
        )
    rows = len(next(iter(inputs.values())))
    if targets is not None and len(targets) != rows:
        raise BadInputError("data", f"{rows} rows of inputs and {len(targets)} of outputs")
    return inputs, targets


def _module_inputs(
    answer: TransformerReassembly, array: NDArray[Any], config: ReassembleConfig
) -> dict[str, Any]:
    """Token ids, features or images as the module takes them."""
    import torch

    settings = answer.pieces.config
    kind = settings.get("model_type")
    if array.dtype.kind not in "iu":
        if kind == "whisper":
            return {"input_features": torch.from_numpy(array.astype(np.float32))}
        return {"pixel_values": torch.from_numpy(array[: config.tokens].astype(np.float32))}
    vocabulary = settings.get("vocab_size")
    if type(vocabulary) is int and array.size and (array.min() < 0 or array.max() >= vocabulary):
        raise BadInputError(
            "data", f"token ids must lie in 0 to {vocabulary - 1}; are they of another tokenizer?"
        )
    if array.ndim == 1:
        longest = int(settings.get("max_position_embeddings") or settings.get("n_positions") or 256)
        wide = min(longest, config.tokens, len(array))
        rows = max(1, min(len(array), config.tokens) // wide)
        array = array[: rows * wide].reshape(rows, wide)
    inputs: dict[str, Any] = {"input_ids": torch.from_numpy(array.astype(np.int64))}
    if kind not in ("bert", "vit", "whisper"):
        inputs["use_cache"] = False
    return inputs


def _read(
    answer: TransformerReassembly, path: Path, outputs: Any, config: ReassembleConfig
) -> tuple[Any, Any]:
    """Token ids of a text through the tokenizer beside the pieces, or arrays of ``.npz``, ``.npy``."""
    if path.suffix.lower() == ".txt":
        from strati.core.errors import require

        transformers = require("transformers", "transformers", "reading text")
        folder = answer.pieces.folder
        if folder is None or not any(
            (folder / name).is_file() for name in ("tokenizer.json", "vocab.txt", "tokenizer.model")
        ):
            raise BadInputError(
                path, "no tokenizer lies beside the pieces; give token ids (.npy or .npz) instead"
            )
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        ids = tokenizer(path.read_text("utf-8"))["input_ids"][: config.tokens]
        return np.asarray(ids, dtype=np.int64), outputs
    from strati.io.data_files import read_data

    data = read_data(path, inputs=config.inputs, target=config.target)
    return data.x, data.y if outputs is None else outputs
