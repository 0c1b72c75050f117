"""With data: does the rebuilt network predict them, and does any move make it better?

The loss is that of the next token for a decoder; with given outputs it is the mean squared error to them, for any
network. Given outputs are first regressed on all moves at once (:mod:`~strati.reassembly.transformer.refine`), then
single moves are tried (:mod:`~strati.reassembly.transformer.output_loss`): on as few rows and tokens as fix the
moves, where a run takes a fraction of the time, then on all of them. Where the outputs are not reached in the end,
matrices are left where the weights put them unless the data explain the change nearly in full.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.core.assignment import assign
from strati.core.errors import BadInputError
from strati.core.results import Flag, Tick, silent
from strati.reassembly.residual.search import centred, posterior_means
from strati.reassembly.transformer.blueprint import slots_of, unit_kinds
from strati.reassembly.transformer.output_loss import Move, OutputLoss, Runner, Socket, network, reversal

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.reassembly.reassemble import ReassembleConfig
    from strati.reassembly.transformer.result import TransformerReassembly

    Matrix = NDArray[np.float64]

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
    from strati.io.data_files import read_data, read_text

    if path.suffix.lower() == ".txt":
        return read_text(path, answer.pieces.folder)[: config.tokens], outputs
    data = read_data(path, inputs=config.inputs, target=config.target)
    return data.x, data.y if outputs is None else outputs


_ON_STREAM = ("out.bias", "down.bias")
"""Biases that are added to the stream, not to neurons."""

_NOISES = (1.0, 30.0, 1e3)
"""The likeliest noise of the regression times these: the linear picture's own errors are many times larger at first."""

_COORDINATES = 4096
_ROUNDS = 18
_SURE, _DOUBTFUL = 0.97, 0.3
"""Numbers of the outputs used; rounds at most; belief that a piece is in its place, where its margin is sure or not."""


Entity = list[tuple[Socket, ...]]
"""What may change places: each member is one socket, or several whose pieces move together."""


def refine_with_outputs(output_loss: OutputLoss, doubtful: set[int], late: Callable[[], bool]) -> None:
    """Rounds of regressions while they lower the error; the output_loss keeps what was gained.

    Args:
        output_loss: The network with its recorded outputs.
        doubtful: Pieces whose place the weights do not tell surely.
        late: Whether the time is over.
    """
    if output_loss.blueprint.blocks < 2 or output_loss.targets is None:
        return
    sets = _entity_sets(output_loss)
    idle = 0
    for number in range(_ROUNDS):
        before = output_loss.loss
        entities = sets[number % len(sets)]
        if late():
            return
        if _affordable(output_loss, entities):
            for move in _proposals(output_loss, entities, doubtful):
                output_loss.consider(move)
        idle = 0 if output_loss.loss < (1 - 1e-3) * before else idle + 1
        if output_loss.exact or idle == len(sets):
            return


def _entity_sets(output_loss: OutputLoss) -> list[list[Entity]]:
    """What moves as one: matrices by unit, with and without the biases of its neurons, or alone; vectors alone."""
    slots = output_loss.blueprint.block
    vectors = [slot.role for slot in slots if not slot.matrix]
    units = [
        list(slots_of(roles, output_loss.blueprint)) for roles in unit_kinds(output_loss.blueprint).values()
    ]
    inner = [[v for v in vectors if v.partition(".")[0] in unit and v not in _ON_STREAM] for unit in units]
    taken = {v for biases in inner for v in biases}
    alone = [[v] for v in vectors]
    groups = [
        alone,
        units + alone,
        [unit + biases for unit, biases in zip(units, inner, strict=True)]
        + [[v] for v in vectors if v not in taken],
        [[slot.role] for slot in slots if slot.matrix] + alone,
    ]
    blocks = range(output_loss.blueprint.blocks)
    sets: list[list[Entity]] = [
        [[tuple((r, k) for r in roles) for k in blocks] for roles in group] for group in groups
    ]
    return [entities for k, entities in enumerate(sets) if entities and entities not in sets[:k]]


def _affordable(output_loss: OutputLoss, entities: Sequence[Entity]) -> bool:
    """Whether a round fits into the time: one run is measured, half as long on the mean."""
    began = time.monotonic()
    output_loss.runner.output(0)
    taken = (time.monotonic() - began) / 2 * sum(len(entity) ** 2 for entity in entities)
    return taken < output_loss.seconds / 3


def _proposals(output_loss: OutputLoss, entities: Sequence[Entity], doubtful: set[int]) -> list[Move]:
    """Permutations of all entities together, of matrices or vectors alone, and of each entity alone."""
    coordinates, target = output_loss.errors(_COORDINATES)
    beliefs, effects = [], []
    for entity in entities:
        belief = _belief(output_loss, entity, doubtful)
        beliefs.append(belief)
        effects.append(centred(_effects(output_loss, entity, coordinates, len(target)), belief, False))
    columns, roots = [], []
    for belief, effect in zip(beliefs, effects, strict=True):
        target = target + effect.reshape(len(target), -1) @ (np.eye(len(belief)) - belief).reshape(-1)
        root = np.sqrt(belief).reshape(-1)
        columns.append(effect.reshape(len(target), -1) * root)
        roots.append(root)
    solutions, _ = posterior_means(np.concatenate(columns, axis=1), target, None, _NOISES)
    ends = np.cumsum([root.size for root in roots])
    matrix = [output_loss.is_matrix(entity[0][0][0]) for entity in entities]
    moves: dict[str, Move] = {}
    for solution in solutions:
        for reach in (1.0, 2.0, 4.0):
            parts: list[dict[Socket, Socket]] = []
            for entity, belief, root, end in zip(entities, beliefs, roots, ends, strict=True):
                here = np.eye(len(entity))
                target_belief = belief + (root * solution[end - root.size : end]).reshape(here.shape)
                order = assign(here + reach * (target_belief - here))
                parts.append(
                    {
                        new: old
                        for k, j in enumerate(order.tolist())
                        if j != k
                        for new, old in zip(entity[k], entity[j], strict=True)
                    }
                )
            every = [_joined(parts)]
            every += [
                _joined([p for p, m in zip(parts, matrix, strict=True) if m is kind])
                for kind in (True, False)
            ]
            every += parts
            moves |= {str(sorted(move.items())): move for move in every if move}
    return list(moves.values())


def _joined(parts: Sequence[Mapping[Socket, Socket]]) -> Move:
    return {new: old for part in parts for new, old in part.items()}


def _belief(output_loss: OutputLoss, entity: Entity, doubtful: set[int]) -> Matrix:
    """Each member's own pieces, the rest evenly over the others."""
    n = len(entity)
    confidence = np.array(
        [
            _DOUBTFUL if any(output_loss.numbers[s] in doubtful for s in sockets) else _SURE
            for sockets in entity
        ]
    )
    belief = np.repeat(((1 - confidence) / max(n - 1, 1))[:, None], n, axis=1)
    belief[np.diag_indices(n)] = confidence
    return belief


def _effects(output_loss: OutputLoss, entity: Entity, coordinates: Any, size: int) -> Matrix:
    """What the outputs change by when member ``k`` gets the pieces of member ``j``: (numbers, k, j)."""
    n = len(entity)
    effects = np.zeros((size, n, n))
    base = output_loss.some(output_loss.runner.output(0), coordinates)
    for k in range(n):
        for j in range(n):
            if j != k:
                effects[:, k, j] = (
                    output_loss.some(output_loss.replaced(entity[k], entity[j]), coordinates) - base
                )
    np.nan_to_num(effects, copy=False, posinf=0.0, neginf=0.0)
    return effects
