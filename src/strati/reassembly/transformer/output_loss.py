"""The loss of an arrangement on data, and the exchanges of pieces that may lower it. Needs torch.

A socket is a place for one piece: a slot of one block. A move gives sockets the pieces of others of the same role,
and is kept only if the loss falls. What comes before the first changed block is not run again.
"""

from __future__ import annotations

import difflib
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.core.errors import BadInputError, UnsupportedError
from strati.core.plugins import require
from strati.core.results import Tick
from strati.core.rng import stream
from strati.io.to_module import quiet_transformers
from strati.reassembly.transformer.blueprint import slots_of, unit_kinds

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.reassembly.transformer.blueprint import Blueprint
    from strati.reassembly.transformer.result import TransformerReassembly

Socket = tuple[str, int]
"""The slot's role and the number of the block."""

_FAR = 12
"""Vectors are exchanged up to so many blocks apart."""


Move = Mapping[Socket, Socket]
"""Sockets, each with the one whose piece it gets; all others keep theirs."""


def permuted(roles: Sequence[str], order: Sequence[int]) -> Move:
    """The move that gives each block the pieces of some roles of the block that ``order`` names for it."""
    return {(role, k): (role, int(old)) for role in roles for k, old in enumerate(order) if old != k}


def swap(roles: Sequence[str], i: int, j: int) -> Move:
    """Two blocks exchange their pieces of some roles."""
    return {(role, a): (role, b) for role in roles for a, b in ((i, j), (j, i))}


def all_moves(blueprint: Blueprint, *, matrices: bool) -> Iterator[tuple[bool, list[Move]]]:
    """Kinds of moves, each with whether a move must gain clearly: chains, vectors, blocks, units.

    Matrices were placed by their weights; while vectors are wrong, many a wrong exchange of matrices gains a little.

    Args:
        blueprint: The architecture.
        matrices: Also of matrices.
    """
    n = blueprint.blocks
    if matrices:
        for group in _groups(blueprint):
            yield True, [permuted(group, order) for order in _turned(n)]
    for slot in blueprint.block:
        if not slot.matrix:
            yield (
                False,
                [swap([slot.role], i, j) for i in range(n) for j in range(i + 1, min(n, i + _FAR))],
            )
    if not matrices:
        return
    every = [slot.role for slot in blueprint.block]
    yield True, reversal(blueprint)
    yield True, [swap(every, i, j) for i in range(n) for j in range(i + 1, min(n, i + 3))]
    moves = []
    for i in range(n):
        for j in (*range(max(0, i - 4), i - 1), *range(i + 2, min(n, i + 5))):
            order = list(range(n))
            order.insert(j, order.pop(i))
            moves.append(permuted(every, order))
    yield True, moves
    for group in _groups(blueprint):
        yield True, [swap(group, i, j) for i in range(n) for j in range(i + 1, min(n, i + 5))]


def reversal(blueprint: Blueprint) -> list[Move]:
    """All blocks in the reverse order, if there are several."""
    every = [slot.role for slot in blueprint.block]
    back = range(blueprint.blocks)[::-1]
    return [permuted(every, back)] if blueprint.blocks > 1 else []


def _groups(blueprint: Blueprint) -> list[list[str]]:
    """Roles that move as one: those of each kind of units, with and without the biases of their matrices."""
    groups = []
    for roles in unit_kinds(blueprint).values():
        group = list(slots_of(roles, blueprint))
        biases = [s.role for s in blueprint.block if not s.matrix and s.role.partition(".")[0] in group]
        groups += [group, group + biases] if biases else [group]
    return groups


def _turned(n: int) -> list[list[int]]:
    """A chain turned round, and a place on or back: a chain knows its own order, not where it lies beside others."""
    order = list(range(n))
    return [order[::-1], order[1:] + order[:1], order[-1:] + order[:-1]] if n > 1 else []


EXACT = 1e-9
"""Mean squared error, as a share of the outputs' variance, below which given outputs agree to rounding (float32)."""

_SURE = 3.0
_LOWER = 5.0
"""Standard errors by which a loss must rise for a place to be sure, and fall for a move to be kept: hundreds of moves
are tried, so that three would be reached by chance."""

_CLEAR = 0.5
"""Share of the error of given outputs that a move which must gain clearly may leave."""


class OutputLoss:
    """The network with its pieces as the answer has them, and the loss."""

    def __init__(
        self, runner: Runner, answer: TransformerReassembly, targets: NDArray[Any] | None, seconds: float
    ) -> None:
        self.runner = runner
        self.seconds = seconds
        self.blueprint = answer.pieces.blueprint
        self.targets = targets
        self.numbers: dict[Socket, int] = {}
        self.parameters: dict[Socket, Any] = {}
        tensors = {name: np.asarray(v, np.float32) for name, v in answer.tensors().items()}
        for block in range(self.blueprint.blocks):
            names = {slot.role: slot.name.format(block) for slot in self.blueprint.block}
            by_name = runner.parameters(block, {name: tensors[name] for name in names.values()})
            for slot in self.blueprint.block:
                held = answer.blocks[block] if slot.matrix else answer.vectors[block]
                self.numbers[slot.role, block] = held[slot.role]
                self.parameters[slot.role, block] = by_name[names[slot.role]]
        self.least: dict[int, float] = {}
        self.held: set[int] = set()
        self.losses = self._losses(runner.keep())

    def look_at(self, inputs: Mapping[str, Any], targets: NDArray[Any] | None) -> None:
        """OutputLoss by these data from now on."""
        self.runner.inputs = dict(inputs)
        self.targets = targets
        self.losses = self._losses(self.runner.keep())

    @property
    def loss(self) -> float:
        """The mean loss."""
        return float(self.losses.mean())

    @property
    def exact(self) -> bool | None:
        """Whether recorded outputs agree to rounding; ``None`` where there are none."""
        if self.targets is None:
            return None
        return bool(self.loss < EXACT * max(float(np.var(self.targets)), 1e-30))

    def is_matrix(self, role: str) -> bool:
        """Whether the pieces of a slot are matrices."""
        slot = self.blueprint.slot(role)
        return slot is not None and slot.matrix

    def errors(self, count: int) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
        """Some of the numbers of the outputs, drawn evenly, and by how much they should change."""
        assert self.targets is not None  # recorded outputs are what this is about
        size = self.targets.size
        coordinates = np.sort(stream(0, "reassembly", "outputs").permutation(size)[:count])
        now = self.some(self.runner.output(0), coordinates)
        return coordinates, self.targets.reshape(-1)[coordinates].astype(np.float64) - now

    def some(self, output: Any, coordinates: NDArray[np.intp]) -> NDArray[np.float64]:
        """Those numbers of an output."""
        return np.asarray(output.double().numpy().reshape(-1)[coordinates])

    def replaced(self, sockets: Sequence[Socket], others: Sequence[Socket]) -> Any:
        """The output with the pieces of other sockets in these."""
        previous = [self.parameters[socket].data for socket in sockets]
        new = [self.parameters[socket].data for socket in others]
        for socket, values in zip(sockets, new, strict=True):
            self.parameters[socket].data = values
        try:
            return self.runner.output(min(block for _, block in sockets))
        finally:
            for socket, values in zip(sockets, previous, strict=True):
                self.parameters[socket].data = values

    def consider(self, move: Move) -> None:
        """Make a move if the true error falls."""
        new = self._trial(move) if move else self.losses
        if bool(np.isfinite(new).all()) and float(new.mean()) < self.loss * (1 - 1e-6):
            self._make(move)

    def restore(self, numbers: Mapping[Socket, int]) -> None:
        """Put pieces back where they were at an earlier time: socket to piece number."""
        at = {number: socket for socket, number in self.numbers.items()}
        self._make({socket: at[n] for socket, n in numbers.items() if at[n] != socket})

    def _trial(self, move: Move) -> NDArray[np.float64]:
        """The losses after a move, which is undone."""
        self._apply(move)
        try:
            return self._losses(self.runner.output(min(block for _, block in move)))
        finally:
            self._apply({old: new for new, old in move.items()})

    def _make(self, move: Move) -> None:
        self._apply(move)
        self.losses = self._losses(self.runner.keep())

    def _losses(self, output: Any) -> NDArray[np.float64]:
        """Token by token, or row by row of the given outputs."""
        import torch

        if self.targets is not None:
            square = np.square(output.double().numpy() - self.targets)
            return np.asarray(square.reshape(len(self.targets), -1).mean(axis=1))
        ids = self.runner.inputs["input_ids"]
        logits = output[:, :-1].reshape(-1, output.shape[-1])
        losses = torch.nn.functional.cross_entropy(logits.double(), ids[:, 1:].reshape(-1), reduction="none")
        return np.asarray(losses.numpy())

    def _apply(self, move: Move) -> None:
        pieces = {old: (self.parameters[old].data, self.numbers[old]) for old in move.values()}
        for new, old in move.items():
            self.parameters[new].data, self.numbers[new] = pieces[old]

    def repair(self, late: Callable[[], bool], tick: Tick, *, matrices: bool = True) -> bool:
        """The best move of each kind while it gains; ``False`` if the time was over first."""
        gained = True
        while gained and self.exact is not True:
            gained = False
            self.least = {}
            for clear, moves in all_moves(self.blueprint, matrices=matrices):
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
            if any(self.numbers[socket] in self.held for socket in move):
                continue  # it touches a piece that must stay where the weights put it
            new = self._trial(move)
            self._note(move, new)
            if self._better(new, clear) and (best is None or float(new.mean()) < best[0]):
                best = (float(new.mean()), move)
        if best is None:
            return False
        self._make(best[1])
        return True

    def _better(self, new: NDArray[np.float64], clear: bool) -> bool:
        """Outputs: any gain, or half of the error. A loss: lower by five standard errors over the tokens."""
        if not bool(np.isfinite(new).all()):
            return False
        if self.targets is not None:
            return float(new.mean()) < self.loss * (_CLEAR if clear else 1 - 1e-6)
        return self._errors_apart(new) < -_LOWER

    def _errors_apart(self, new: NDArray[np.float64]) -> float:
        """By how many standard errors over tokens, or rows, a loss is higher than the present one."""
        change = new - self.losses
        if np.allclose(new, self.losses, rtol=1e-5, atol=1e-12):
            return 0.0
        spread = float(change.std()) / float(np.sqrt(len(change)))
        return float(change.mean()) / max(spread, 1e-30) if bool(np.isfinite(new).all()) else float("inf")

    def _note(self, move: Move, new: NDArray[np.float64]) -> None:
        """Remember, for each piece, how much the data mind the move of it that they mind least."""
        apart = self._errors_apart(new)
        for socket in move:
            number = self.numbers[socket]
            self.least[number] = min(apart, self.least.get(number, float("inf")))

    def settled(self) -> set[int]:
        """Pieces of which every move that was tried makes the loss clearly worse."""
        return {number for number, apart in self.least.items() if apart > _SURE}

    def answer(self) -> tuple[tuple[dict[str, int], ...], tuple[dict[str, int], ...]]:
        """Blocks and vectors as they stand now."""
        blocks, vectors = (
            tuple(
                {s.role: self.numbers[s.role, k] for s in self.blueprint.block if s.matrix is matrix}
                for k in range(self.blueprint.blocks)
            )
            for matrix in (True, False)
        )
        return blocks, vectors


_AUTO = ("AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForImageClassification", "AutoModel")


def empty_network(config: Mapping[str, Any], where: object) -> Any:
    """The module that ``config.json`` describes, without memory for its weights.

    Raises:
        UnsupportedError: transformers does not know it.
    """
    torch = require("torch", "torch", "running a transformer")
    with torch.device("meta"):
        return _build(config, where)


def network(config: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]], where: object) -> Any:
    """The module with its weights, in float32 and evaluation mode, loaded as a Hugging Face directory would be.

    Raises:
        UnsupportedError: transformers does not know the architecture.
        BadInputError: A tensor is missing.
    """
    from safetensors.numpy import save_file

    empty = empty_network(config, where)
    if config.get("model_type") == "whisper":
        return _encoder(config, tensors, where)
    plain = {name: np.ascontiguousarray(values, dtype=np.float32) for name, values in tensors.items()}
    with tempfile.TemporaryDirectory() as folder:
        save_file(plain, Path(folder) / "model.safetensors", metadata={"format": "pt"})
        (Path(folder) / "config.json").write_text(json.dumps({**config, "torch_dtype": "float32"}))
        with quiet_transformers(require("transformers", "transformers", "running a transformer")):
            model, info = type(empty).from_pretrained(folder, output_loading_info=True, local_files_only=True)
    missing = [k for k in sorted(info["missing_keys"]) if "pooler" not in k]
    if missing:
        raise BadInputError(where, f"the pieces lack {missing[0]}, which this network needs to run")
    return model.float().eval()


def _encoder(config: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]], where: object) -> Any:
    import torch

    model = _build(config, where).float()
    state = {name.removeprefix("model.").removeprefix("encoder."): values for name, values in tensors.items()}
    ready = {name: torch.from_numpy(np.array(values, np.float32)) for name, values in state.items()}
    missing = model.load_state_dict(ready, strict=False).missing_keys
    if missing:
        raise BadInputError(where, f"the pieces lack {missing[0]}, which this network needs to run")
    return model.eval()


def _build(config: Mapping[str, Any], where: object) -> Any:
    transformers = require("transformers", "transformers", "running a transformer")
    kind = config.get("model_type")
    if kind == "whisper":
        from transformers.models.whisper.modeling_whisper import WhisperEncoder

        return WhisperEncoder(transformers.WhisperConfig(**config))
    try:
        made = transformers.AutoConfig.for_model(**config)
    except (ValueError, KeyError, TypeError):
        raise UnsupportedError(where, f"transformers does not know the model type {kind!r}") from None
    for name in config.get("architectures") or []:
        if isinstance(name, str) and hasattr(transformers, name):
            return getattr(transformers, name)(made)
    for auto in _AUTO:
        try:
            return getattr(transformers, auto).from_config(made)
        except ValueError:  # this kind of network has no such head
            continue
    raise UnsupportedError(where, f"transformers cannot build a {kind!r} from its config.json")


class Runner:
    """A module whose blocks can be exchanged, run from any block on with what came before kept.

    Args:
        model: A transformers module.
        blueprint: Where its blocks are.
        inputs: What it is called with.
    """

    def __init__(self, model: Any, blueprint: Blueprint, inputs: Mapping[str, Any]) -> None:
        self.model = model
        self.inputs = dict(inputs)
        self.owner, self.attribute = _stack(model, blueprint.blocks)
        self.layers = list(getattr(self.owner, self.attribute))
        self.kept: list[Any] = []

    def parameters(self, block: int, values: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
        """The parameters of a block that hold given values: name to parameter; equal ones by the nearest name."""
        left = dict(self.layers[block].named_parameters())
        by_name = {}
        for name, array in values.items():
            equal = [k for k, p in left.items() if np.array_equal(p.detach().numpy(), array)]
            if not equal:
                raise BadInputError(name, "is not in the network that transformers builds from config.json")
            best = max(equal, key=lambda k: difflib.SequenceMatcher(None, k, name).ratio())
            by_name[name] = left.pop(best)
        return by_name

    def output(self, start: int = 0) -> Any:
        """The network's output; blocks before ``start`` are not run again."""
        import torch

        from strati.evaluate.models import output_tensor

        stack = torch.nn.ModuleList(self.layers)
        if start and self.kept:
            stack = torch.nn.ModuleList([_Kept(self.kept[start]), *self.layers[start:]])
        setattr(self.owner, self.attribute, stack)
        try:
            with torch.no_grad():
                output = self.model(**self.inputs)
        finally:
            setattr(self.owner, self.attribute, torch.nn.ModuleList(self.layers))
        return output_tensor(output)

    def keep(self) -> Any:
        """Run all of it and keep what enters each block."""
        streams: list[Any] = []
        hooks = [
            layer.register_forward_pre_hook(
                lambda _, args, kwargs: streams.append(_first(args, kwargs)), with_kwargs=True
            )
            for layer in self.layers
        ]
        returned: list[Any] = []
        hooks.append(self.layers[0].register_forward_hook(lambda _m, _a, out: returned.append(out)))
        self.kept = []
        output = self.output()
        for hook in hooks:
            hook.remove()
        tuples = isinstance(returned[0], tuple)
        self.kept = [(stream,) if tuples else stream for stream in streams]
        return output


def _stack(model: Any, blocks: int) -> tuple[Any, str]:
    """The module that holds the list of blocks, and the list's name."""
    import torch

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == blocks and list(module.parameters()):
            owner, _, attribute = name.rpartition(".")
            return model.get_submodule(owner), attribute
    raise BadInputError("network", f"has no list of {blocks} blocks")


def _first(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return args[0] if args else kwargs["hidden_states"]


def _Kept(value: Any) -> Any:  # noqa: N802 - makes a module, and torch is not imported before it is needed
    import torch

    class Kept(torch.nn.Module):
        """Stands for the blocks before: whatever it is given, it returns what they returned."""

        attention_type = "full_attention"

        def forward(self, *_: Any, **__: Any) -> Any:
            return value

    return Kept()
