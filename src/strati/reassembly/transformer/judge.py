"""The network with its blocks' contents as the answer has them, judged by data. Needs torch.

Moves: the whole order turned round; two blocks' vectors of a role exchanged; a unit or a block exchanged with, or put
behind, a near one. What comes before the first changed block is not run again. A move is kept only if the loss falls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.reassembly.transformer.layout import slots_of, unit_kinds
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


@dataclass(frozen=True)
class Move:
    """New contents of blocks: slot to the old block of each block; and the first block that changes."""

    order: Mapping[str, tuple[int, ...]]
    start: int


class Judge:
    """The network with its blocks' contents as the answer has them, and the loss."""

    def __init__(
        self, runner: Runner, found: TransformerReassembly, wanted: NDArray[Any] | None, seconds: float
    ) -> None:
        self.runner = runner
        self.seconds = seconds
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
        self.least: dict[int, float] = {}
        self.held: set[int] = set()
        self.losses = self._losses(runner.keep())

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

    def replaced(self, roles: Sequence[str], block: int, other: int) -> Any:
        """The output with the pieces of another block's in a block."""
        kept = {role: self.parameters[role][block].data for role in roles}
        for role in roles:
            self.parameters[role][block].data = self.parameters[role][other].data
        try:
            return self.runner.output(block)
        finally:
            for role, values in kept.items():
                self.parameters[role][block].data = values

    def consider(self, orders: Mapping[str, tuple[int, ...]]) -> bool:
        """Take new orders of some roles if the true error falls."""
        changed = [k for order in orders.values() for k, old in enumerate(order) if old != k]
        move = Move(orders, min(changed, default=0))
        self._apply(move)
        new = self._losses(self.runner.output(move.start))
        if bool(np.isfinite(new).all()) and float(new.mean()) < self.loss * (1 - 1e-6):
            self.losses = self._losses(self.runner.keep())
            return True
        self._apply(_inverse(move))
        return False

    def restore(self, numbers: Mapping[str, Sequence[int]]) -> None:
        """Put pieces back where they were at an earlier time: role to piece numbers, block by block."""
        orders = {}
        for role, wanted in numbers.items():
            at = {number: k for k, number in enumerate(self.numbers[role])}
            orders[role] = tuple(at[number] for number in wanted)
        self._apply(Move(orders, 0))
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
        for role, order in move.order.items():
            values = [p.data for p in self.parameters[role]]
            for parameter, k in zip(self.parameters[role], order, strict=True):
                parameter.data = values[k]
            self.numbers[role] = [self.numbers[role][k] for k in order]

    def repair(self, late: Callable[[], bool], tick: Tick, *, matrices: bool = True) -> bool:
        """The best move of each kind while it gains; ``False`` if the time was over first."""
        gained = True
        while gained and self.exact is not True:
            gained = False
            self.least = {}
            for share, moves in self._moves(matrices):
                best: tuple[float, Move] | None = None
                for move in moves:
                    if late():
                        return False
                    if self._moves_held(move):
                        continue
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
        return self._errors_apart(new) < -_LOWER

    def _errors_apart(self, new: NDArray[np.float64]) -> float:
        """By how many standard errors over tokens, or rows, a loss is higher than the present one."""
        change = new - self.losses
        if np.allclose(new, self.losses, rtol=1e-5, atol=1e-12):
            return 0.0
        spread = float(change.std()) / float(np.sqrt(len(change)))
        return float(change.mean()) / max(spread, 1e-30) if bool(np.isfinite(new).all()) else float("inf")

    def _moves_held(self, move: Move) -> bool:
        """Whether a move touches a piece that must stay where the weights put it."""
        return any(
            self.numbers[role][k] in self.held
            for role, order in move.order.items()
            for k, old in enumerate(order)
            if old != k
        )

    def _note(self, move: Move, new: NDArray[np.float64]) -> None:
        """Remember, for each piece, how much the data mind the move of it that they mind least."""
        apart = self._errors_apart(new)
        for role, order in move.order.items():
            for k, old in enumerate(order):
                if old != k:
                    number = self.numbers[role][k]
                    self.least[number] = min(apart, self.least.get(number, float("inf")))

    def settled(self) -> set[int]:
        """Pieces of which every move that was tried makes the loss clearly worse."""
        return {number for number, apart in self.least.items() if apart > _SURE}

    def _moves(self, matrices: bool) -> Iterator[tuple[float, list[Move]]]:
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
        if not matrices:
            return
        every = [slot.role for slot in self.blueprint.block]
        yield clear, [Move(dict.fromkeys(every, tuple(range(n))[::-1]), 0)]
        yield clear, [_swap(every, i, j, n) for i in range(n) for j in range(i + 1, min(n, i + 3))]
        moves = []
        for i in range(n):
            for j in (*range(max(0, i - 4), i - 1), *range(i + 2, min(n, i + 5))):
                order = list(range(n))
                order.insert(j, order.pop(i))
                moves.append(Move(dict.fromkeys(every, tuple(order)), min(i, j)))
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


def _swap(roles: list[str], i: int, j: int, count: int) -> Move:
    order = list(range(count))
    order[i], order[j] = j, i
    return Move(dict.fromkeys(roles, tuple(order)), min(i, j))


def _inverse(move: Move) -> Move:
    back = {role: tuple(int(k) for k in np.argsort(order)) for role, order in move.order.items()}
    return Move(back, move.start)
