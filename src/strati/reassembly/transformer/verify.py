"""With data: does the rebuilt network predict them, and does any single move make it better?

The loss is that of the next token for a decoder; with given outputs it is the mean squared error to them, for
any network.
Moves: the whole order turned round; two blocks' vectors of a role exchanged; a unit or a block exchanged with,
or put behind, a
near one. What comes before the first changed block is not run again. A move is kept if the loss falls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.errors import BadInputError
from strati.reassembly.transformer.layout import slots_of, unit_kinds
from strati.reassembly.transformer.run import Runner, network
from strati.types import Flag, Tick, silent

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.reassembly.config import ReassembleConfig
    from strati.reassembly.transformer.result import TransformerReassembly

_EXACT = 1e-9
"""Mean squared error, as a share of the outputs' variance, below which given outputs agree to rounding (float32)."""


@dataclass(frozen=True)
class _Move:
    """New contents of blocks: slot to the old block of each block; and the first block that changes."""

    order: Mapping[str, tuple[int, ...]]
    start: int


def verified(
    found: TransformerReassembly, data: Any, outputs: Any, config: ReassembleConfig, *, tick: Tick = silent
) -> TransformerReassembly:
    """Check the answer with data, and repair it while single moves lower the loss.

    Raises:
        BadInputError: The data do not fit the network, or say nothing (no outputs, and no decoder's next token).
    """
    inputs, wanted = _inputs(found, data, outputs, config)
    pieces = found.pieces
    model = network(pieces.config, found.tensors(), pieces.where)
    runner = Runner(model, pieces.blueprint, inputs)
    judge = _Judge(runner, found, wanted)
    began = time.monotonic()
    ended = judge.repair(lambda: time.monotonic() - began > config.seconds, tick)
    loss = judge.loss
    exact = None
    if wanted is not None:
        exact = bool(loss < _EXACT * max(float(np.var(wanted)), 1e-30))
    warnings = tuple(flag for flag in found.warnings if flag.code != "direction-uncertain")
    if not ended:
        warnings += (
            Flag("time", "stopped at the time limit: another move may lower the loss; give it more time"),
        )
    elif exact is not True:
        warnings += (
            Flag("local", "no single move lowers the loss; the order is the best found with these data"),
        )
    uncertain = () if exact else tuple(n for n in found.uncertain if n in judge.indifferent)
    blocks, vectors = judge.answer()
    return replace(
        found, blocks=blocks, vectors=vectors, loss=loss, exact=exact, warnings=warnings, uncertain=uncertain
    )


class _Judge:
    """The network with its blocks' contents as the answer has them, and the loss."""

    def __init__(self, runner: Runner, found: TransformerReassembly, wanted: NDArray[Any] | None) -> None:
        self.runner = runner
        self.blueprint = found.pieces.blueprint
        self.wanted = wanted
        self.numbers = {
            slot.role: [
                (b if slot.matrix else v)[slot.role] for b, v in zip(found.blocks, found.vectors, strict=True)
            ]
            for slot in self.blueprint.block
        }
        tensors = found.tensors()
        self.parameters: dict[str, list[Any]] = {slot.role: [] for slot in self.blueprint.block}
        for block in range(self.blueprint.blocks):
            names = {slot.role: slot.name.format(block) for slot in self.blueprint.block}
            held = {name: np.asarray(tensors[name], np.float32) for name in names.values()}
            by_name = runner.parameters(block, held)
            for role, name in names.items():
                self.parameters[role].append(by_name[name])
        self.indifferent: set[int] = set()
        self.losses = self._losses(runner.keep())

    @property
    def loss(self) -> float:
        """The mean loss."""
        return float(self.losses.mean())

    def _losses(self, output: Any) -> NDArray[np.float64]:
        """Token by token, or row by row of the given outputs."""
        import torch

        if self.wanted is not None:
            square = np.square(output.double().numpy() - self.wanted)
            return np.asarray(square.reshape(len(self.wanted), -1).mean(axis=1))
        ids = self.runner.inputs["input_ids"]
        logits = output[:, :-1].reshape(-1, output.shape[-1])
        found = torch.nn.functional.cross_entropy(logits.double(), ids[:, 1:].reshape(-1), reduction="none")
        return np.asarray(found.numpy())

    def _apply(self, move: _Move) -> None:
        for role, order in move.order.items():
            values = [p.data for p in self.parameters[role]]
            for parameter, k in zip(self.parameters[role], order, strict=True):
                parameter.data = values[k]
            self.numbers[role] = [self.numbers[role][k] for k in order]

    def repair(self, late: Callable[[], bool], tick: Tick) -> bool:
        """The best move of each kind while it gains; ``False`` if the time was over first."""
        gained = True
        while gained:
            gained = False
            for share, moves in self._moves():
                best: tuple[float, _Move] | None = None
                for move in moves:
                    if late():
                        return False
                    self._apply(move)
                    new = self._losses(self.runner.output(move.start))
                    self._apply(_inverse(move))
                    self._note(move, new)
                    if self._better(new, share) and (best is None or float(new.mean()) < best[0]):
                        best = (float(new.mean()), move)
                if best is not None:
                    self._apply(best[1])
                    self.losses = self._losses(self.runner.keep())
                    gained = True
                    tick(f"loss {self.loss:.4f}")
        return True

    def _better(self, new: NDArray[np.float64], share: float) -> bool:
        """Outputs: at most that share of the error. A loss: lower by three standard errors over the tokens."""
        if not bool(np.isfinite(new).all()):
            return False
        if self.wanted is not None:
            return float(new.mean()) < self.loss * share
        change = new - self.losses
        return float(change.mean()) < -3 * float(change.std()) / float(np.sqrt(len(change))) - 1e-9

    def _note(self, move: _Move, new: NDArray[np.float64]) -> None:
        """Remember pieces whose exchange the data do not notice."""
        if np.allclose(new, self.losses, rtol=1e-5, atol=1e-12):
            for role, order in move.order.items():
                self.indifferent |= {self.numbers[role][k] for k, old in enumerate(order) if old != k}

    def _moves(self) -> Iterator[tuple[float, list[_Move]]]:
        """Kinds of moves, each with the share of the error that it may leave: vectors, the whole, blocks, units.

        Matrices were placed by their weights; while vectors are wrong, many a wrong exchange of matrices gains
        a little.
        """
        n = self.blueprint.blocks
        any_gain, clear = 1 - 1e-6, 0.5
        for slot in self.blueprint.block:
            if not slot.matrix:
                yield (
                    any_gain,
                    [_swap([slot.role], i, j, n) for i in range(n) for j in range(i + 1, min(n, i + 12))],
                )
        every = [slot.role for slot in self.blueprint.block]
        yield clear, [_Move(dict.fromkeys(every, tuple(range(n))[::-1]), 0)]
        yield clear, [_swap(every, i, j, n) for i in range(n) for j in range(i + 1, min(n, i + 3))]
        moves = []
        for i in range(n):
            for j in (*range(max(0, i - 4), i - 1), *range(i + 2, min(n, i + 5))):
                order = list(range(n))
                order.insert(j, order.pop(i))
                moves.append(_Move(dict.fromkeys(every, tuple(order)), min(i, j)))
        yield clear, moves
        for roles in unit_kinds(self.blueprint).values():
            group = list(slots_of(roles, self.blueprint))
            biases = [
                s.role for s in self.blueprint.block if not s.matrix and s.role.partition(".")[0] in group
            ]
            for some in (group, group + biases) if biases else (group,):
                yield clear, [_swap(some, i, j, n) for i in range(n) for j in range(i + 1, min(n, i + 5))]

    def answer(self) -> tuple[tuple[dict[str, int], ...], tuple[dict[str, int], ...]]:
        """Blocks and vectors as they stand now."""
        count = range(self.blueprint.blocks)
        return tuple(
            tuple(
                {s.role: self.numbers[s.role][k] for s in self.blueprint.block if s.matrix is matrix}
                for k in count
            )
            for matrix in (True, False)
        )  # type: ignore[return-value]


def _swap(roles: list[str], i: int, j: int, count: int) -> _Move:
    order = list(range(count))
    order[i], order[j] = j, i
    return _Move(dict.fromkeys(roles, tuple(order)), min(i, j))


def _inverse(move: _Move) -> _Move:
    back = {role: tuple(int(k) for k in np.argsort(order)) for role, order in move.order.items()}
    return _Move(back, move.start)


def _inputs(
    found: TransformerReassembly, data: Any, outputs: Any, config: ReassembleConfig
) -> tuple[dict[str, Any], NDArray[Any] | None]:
    """What the module is called with, and the outputs to agree with."""
    import torch

    where = found.pieces.where
    if isinstance(data, str | Path):
        data, outputs = _read(found, Path(data), outputs, config)
    array = np.asarray(data.detach().cpu().numpy() if hasattr(data, "detach") else data)
    wanted = (
        None
        if outputs is None
        else np.asarray(outputs.detach().cpu() if hasattr(outputs, "detach") else outputs)
    )
    kind = found.pieces.config.get("model_type")
    if array.dtype.kind in "iu":
        vocabulary = found.pieces.config.get("vocab_size")
        if type(vocabulary) is int and array.size and (array.min() < 0 or array.max() >= vocabulary):
            raise BadInputError(
                "data", f"token ids must lie in 0 to {vocabulary - 1}; are they of another tokenizer?"
            )
        if array.ndim == 1:
            longest = int(
                found.pieces.config.get("max_position_embeddings")
                or found.pieces.config.get("n_positions")
                or 256
            )
            wide = min(longest, config.tokens, len(array))
            rows = max(1, min(len(array), config.tokens) // wide)
            array = array[: rows * wide].reshape(rows, wide)
        inputs: dict[str, Any] = {"input_ids": torch.from_numpy(array.astype(np.int64))}
        if kind not in ("bert", "vit", "whisper"):
            inputs["use_cache"] = False
    elif kind == "whisper":
        inputs = {"input_features": torch.from_numpy(array.astype(np.float32))}
    else:
        inputs = {"pixel_values": torch.from_numpy(array[: config.tokens].astype(np.float32))}
        wanted = None if wanted is None else wanted[: config.tokens]
    causal = array.dtype.kind in "iu" and kind not in ("bert", "roberta", "distilbert")
    if wanted is None and not causal:
        raise BadInputError(
            where, "this network predicts no next token: give the outputs it recorded with the data"
        )
    if wanted is not None and len(wanted) != len(array):
        raise BadInputError("data", f"{len(array)} rows of inputs and {len(wanted)} of outputs")
    return inputs, wanted


def _read(
    found: TransformerReassembly, path: Path, outputs: Any, config: ReassembleConfig
) -> tuple[Any, Any]:
    """Token ids of a text through the tokenizer beside the pieces, or arrays of ``.npz``, ``.npy``."""
    if path.suffix.lower() == ".txt":
        from strati.errors import require

        transformers = require("transformers", "transformers", "reading text")
        folder = found.pieces.folder
        if folder is None or not any(
            (folder / name).is_file() for name in ("tokenizer.json", "vocab.txt", "tokenizer.model")
        ):
            raise BadInputError(
                path, "no tokenizer lies beside the pieces; give token ids (.npy or .npz) instead"
            )
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        ids = tokenizer(path.read_text("utf-8"))["input_ids"][: config.tokens]
        return np.asarray(ids, dtype=np.int64), outputs
    from strati.network.data import read_data

    data = read_data(path, inputs=config.inputs, target=config.target)
    return data.x, data.y if outputs is None else outputs
