"""The network with its pieces as the answer has them, judged by data. Needs torch.

What comes before the first changed block is not run again. A move (:mod:`~strati.reassembly.transformer.moves`) is
kept only if the loss falls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.reassembly.transformer.moves import ONCE, Move, Socket, all_moves
from strati.rng import stream
from strati.types import Tick

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.reassembly.transformer.result import TransformerReassembly
    from strati.reassembly.transformer.run import Runner

EXACT = 1e-9
"""Mean squared error, as a share of the outputs' variance, below which given outputs agree to rounding (float32)."""

_SURE = 3.0
_LOWER = 5.0
"""Standard errors by which a loss must rise for a place to be sure, and fall for a move to be kept: hundreds of moves
are tried, so that three would be reached by chance."""

_CLEAR = 0.5
"""Share of the error of given outputs that a move which must gain clearly may leave."""


class Judge:
    """The network with its pieces as the answer has them, and the loss."""

    def __init__(
        self, runner: Runner, found: TransformerReassembly, wanted: NDArray[Any] | None, seconds: float
    ) -> None:
        self.runner = runner
        self.seconds = seconds
        self.blueprint = found.pieces.blueprint
        self.told = not any(n not in found.pieces.told for n in found.pieces.arrays)
        self.wanted = wanted
        self.numbers: dict[Socket, int] = {}
        self.parameters: dict[Socket, Any] = {}
        tensors = {name: np.asarray(v, np.float32) for name, v in found.tensors().items()}
        for block in range(self.blueprint.blocks):
            names = {slot.role: slot.name.format(block) for slot in self.blueprint.block}
            by_name = runner.parameters(block, {name: tensors[name] for name in names.values()})
            for slot in self.blueprint.block:
                held = found.blocks[block] if slot.matrix else found.vectors[block]
                self.numbers[slot.role, block] = held[slot.role]
                self.parameters[slot.role, block] = by_name[names[slot.role]]
        if not self.told:
            self._take_whole(found, tensors)
        self.least: dict[int, float] = {}
        self.held: set[int] = set()
        self.losses = self._losses(runner.keep())

    def _take_whole(self, found: TransformerReassembly, tensors: Mapping[str, NDArray[Any]]) -> None:
        """Sockets of the slots that are there once, as far as the module has them."""
        places = found.place_of()
        values = {s.name: tensors[s.name] for s in self.blueprint.whole if s.name in tensors}
        by_name = self.runner.outside(values)
        for slot in self.blueprint.whole:
            if slot.name in by_name:
                self.numbers[slot.role, ONCE] = places[slot.name]
                self.parameters[slot.role, ONCE] = by_name[slot.name]

    def look_at(self, inputs: Mapping[str, Any], wanted: NDArray[Any] | None) -> None:
        """Judge by these data from now on."""
        self.runner.inputs = dict(inputs)
        self.wanted = wanted
        self.losses = self._losses(self.runner.keep())

    @property
    def loss(self) -> float:
        """The mean loss."""
        return float(self.losses.mean())

    @property
    def exact(self) -> bool | None:
        """Whether recorded outputs agree to rounding; ``None`` where there are none."""
        if self.wanted is None:
            return None
        return bool(self.loss < EXACT * max(float(np.var(self.wanted)), 1e-30))

    def is_matrix(self, role: str) -> bool:
        """Whether the pieces of a slot are matrices."""
        slot = self.blueprint.slot(role)
        return slot is not None and slot.matrix

    def errors(self, count: int) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
        """Some of the numbers of the outputs, drawn evenly, and by how much they should change."""
        assert self.wanted is not None  # recorded outputs are what this is about
        size = self.wanted.size
        chosen = np.sort(stream(0, "reassembly", "outputs").permutation(size)[:count])
        now = self.some(self.runner.output(0), chosen)
        return chosen, self.wanted.reshape(-1)[chosen].astype(np.float64) - now

    def some(self, output: Any, chosen: NDArray[np.intp]) -> NDArray[np.float64]:
        """Those numbers of an output."""
        return np.asarray(output.double().numpy().reshape(-1)[chosen])

    def replaced(self, sockets: Sequence[Socket], others: Sequence[Socket]) -> Any:
        """The output with the pieces of other sockets in these."""
        kept = [self.parameters[socket].data for socket in sockets]
        new = [self.parameters[socket].data for socket in others]
        for socket, values in zip(sockets, new, strict=True):
            self.parameters[socket].data = values
        try:
            return self.runner.output(min(max(block, 0) for _, block in sockets))
        finally:
            for socket, values in zip(sockets, kept, strict=True):
                self.parameters[socket].data = values

    def consider(self, move: Move) -> bool:
        """Make a move if the true error falls."""
        if not move.source:
            return False
        self._apply(move)
        new = self._losses(self.runner.output(move.start))
        if bool(np.isfinite(new).all()) and float(new.mean()) < self.loss * (1 - 1e-6):
            self.losses = self._losses(self.runner.keep())
            return True
        self._apply(move.inverse())
        return False

    def restore(self, numbers: Mapping[Socket, int]) -> None:
        """Put pieces back where they were at an earlier time: socket to piece number."""
        at = {number: socket for socket, number in self.numbers.items()}
        self._apply(Move({socket: at[n] for socket, n in numbers.items() if at[n] != socket}))
        self.losses = self._losses(self.runner.keep())

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

    def _apply(self, move: Move) -> None:
        values = {old: self.parameters[old].data for old in move.source.values()}
        numbers = {old: self.numbers[old] for old in move.source.values()}
        for new, old in move.source.items():
            self.parameters[new].data = values[old]
            self.numbers[new] = numbers[old]

    def repair(self, late: Callable[[], bool], tick: Tick, *, matrices: bool = True) -> bool:
        """The best move of each kind while it gains; ``False`` if the time was over first."""
        gained = True
        while gained and self.exact is not True:
            gained = False
            self.least = {}
            for clear, moves in all_moves(self.blueprint, matrices=matrices, told=self.told):
                taken = self.take_best(moves, clear, late)
                if taken is None:
                    return False
                if taken:
                    gained = True
                    tick(f"loss {self.loss:.4f}")
        return True

    def take_best(self, moves: Iterable[Move], clear: bool, late: Callable[[], bool]) -> bool | None:
        """The best of some moves, if it gains: whether one was made; ``None`` if the time was over first."""
        best: tuple[float, Move] | None = None
        for move in moves:
            if late():
                return None
            if self._cannot(move):
                continue
            self._apply(move)
            new = self._losses(self.runner.output(move.start))
            self._apply(move.inverse())
            self._note(move, new)
            if self._better(new, clear) and (best is None or float(new.mean()) < best[0]):
                best = (float(new.mean()), move)
        if best is None:
            return False
        self._apply(best[1])
        self.losses = self._losses(self.runner.keep())
        return True

    def _better(self, new: NDArray[np.float64], clear: bool) -> bool:
        """Outputs: any gain, or half of the error. A loss: lower by five standard errors over the tokens."""
        if not bool(np.isfinite(new).all()):
            return False
        if self.wanted is not None:
            return float(new.mean()) < self.loss * (_CLEAR if clear else 1 - 1e-6)
        return self._errors_apart(new) < -_LOWER

    def _errors_apart(self, new: NDArray[np.float64]) -> float:
        """By how many standard errors over tokens, or rows, a loss is higher than the present one."""
        change = new - self.losses
        if np.allclose(new, self.losses, rtol=1e-5, atol=1e-12):
            return 0.0
        spread = float(change.std()) / float(np.sqrt(len(change)))
        return float(change.mean()) / max(spread, 1e-30) if bool(np.isfinite(new).all()) else float("inf")

    def _cannot(self, move: Move) -> bool:
        """Whether a move touches a piece that must stay where the weights put it, or a socket that the module lacks."""
        return any(s not in self.numbers or self.numbers[s] in self.held for s in move.source)

    def _note(self, move: Move, new: NDArray[np.float64]) -> None:
        """Remember, for each piece, how much the data mind the move of it that they mind least."""
        apart = self._errors_apart(new)
        for socket in move.source:
            number = self.numbers[socket]
            self.least[number] = min(apart, self.least.get(number, float("inf")))

    def settled(self) -> set[int]:
        """Pieces of which every move that was tried makes the loss clearly worse."""
        return {number for number, apart in self.least.items() if apart > _SURE}

    def answer(self) -> tuple[tuple[dict[str, int], ...], tuple[dict[str, int], ...], dict[str, int]]:
        """Blocks, vectors, and what is there once, as they stand now."""
        parts = [
            tuple(
                {s.role: self.numbers[s.role, k] for s in self.blueprint.block if s.matrix is matrix}
                for k in range(self.blueprint.blocks)
            )
            for matrix in (True, False)
        ]
        whole = {role: number for (role, block), number in self.numbers.items() if block == ONCE}
        return parts[0], parts[1], whole
