"""Recorded outputs regressed on what every piece would do in every other block's place. Needs torch.

Around the present arrangement the effect on the outputs of putting piece ``j`` of a role into block ``k`` is measured
by running the blocks from ``k`` on. The error of the outputs is then linear in the permutations of all roles at once,
with a prior that believes what the weights place surely; the posterior mean
(:mod:`strati.reassembly.residual.posterior`), rounded to whole permutations, is a proposal that moves many pieces
together where no single exchange gains. Proposals are judged by the true error only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.core.assignment import assign
from strati.reassembly.residual.posterior import centred, posterior_means
from strati.reassembly.transformer.output_loss import Move, Socket
from strati.reassembly.transformer.similarity import slots_of, unit_kinds

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.reassembly.transformer.output_loss import OutputLoss

    Matrix = NDArray[np.float64]

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
            every += [Move(part) for part in parts]
            moves |= {str(sorted(move.source.items())): move for move in every if move.source}
    return list(moves.values())


def _joined(parts: Sequence[Mapping[Socket, Socket]]) -> Move:
    return Move({new: old for part in parts for new, old in part.items()})


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
