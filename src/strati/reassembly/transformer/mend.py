r"""Recorded outputs regressed on what every piece would do in every other block's place. Needs torch.

Around the present arrangement the effect on the outputs of putting piece ``j`` of a role into block ``k`` is measured by
running the blocks from ``k`` on. The error of the outputs is then linear in the permutations of all roles at once, with
a prior that believes what the weights place surely; the posterior mean (:mod:`strati.reassembly.posterior`), rounded to whole
permutations, is a proposal that moves many pieces together where no single exchange gains. Proposals are judged by the
true error only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.reassembly.assignment import assign
from strati.reassembly.posterior import centred, posterior_means
from strati.reassembly.transformer.layout import slots_of, unit_kinds

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.reassembly.transformer.judge import Judge

    Matrix = NDArray[np.float64]

_ON_STREAM = ("out.bias", "down.bias")
"""Biases that are added to the stream, not to neurons."""

_NOISES = (1.0, 30.0, 1e3)
"""The likeliest noise of the regression times these: the linear picture's own errors are many times larger at first."""

_COORDINATES = 4096
_ROUNDS = 18
_SURE, _DOUBTFUL = 0.97, 0.3
"""Numbers of the outputs used; rounds at most; belief that a piece is in its place, where its margin is sure or not."""


@dataclass(frozen=True)
class Proposal:
    """Roles to the present block of each block's new piece."""

    orders: Mapping[str, tuple[int, ...]]


def mend(judge: Judge, doubtful: set[int], late: Callable[[], bool]) -> None:
    """Rounds of regressions while they lower the error; the judge keeps what was gained.

    Args:
        judge: The network with its recorded outputs.
        doubtful: Pieces whose place the weights do not tell surely.
        late: Whether the time is over.
    """
    if judge.blueprint.blocks < 2 or judge.wanted is None:
        return
    sets = _entity_sets(judge)
    idle = 0
    for number in range(_ROUNDS):
        before = judge.loss
        entities = sets[number % len(sets)]
        if late() or not _affordable(judge, entities, late):
            return
        for proposal in _proposals(judge, entities, doubtful):
            judge.consider(proposal.orders)
        idle = 0 if judge.loss < (1 - 1e-3) * before else idle + 1
        if judge.exact or idle == len(sets):
            return


def _entity_sets(judge: Judge) -> list[list[list[str]]]:
    """What moves as one: matrices by unit, with and without the biases of its neurons, or alone; vectors alone."""
    slots = judge.blueprint.block
    vectors = [slot.role for slot in slots if not slot.matrix]
    units = [list(slots_of(roles, judge.blueprint)) for roles in unit_kinds(judge.blueprint).values()]
    inner = [[v for v in vectors if v.partition(".")[0] in unit and v not in _ON_STREAM] for unit in units]
    taken = {v for some in inner for v in some}
    alone = [[v] for v in vectors]
    sets = [
        alone,
        units + alone,
        [unit + some for unit, some in zip(units, inner, strict=True)] + [[v] for v in vectors if v not in taken],
        [[slot.role] for slot in slots if slot.matrix] + alone,
    ]
    return [one for k, one in enumerate(sets) if one and one not in sets[:k]]


def _affordable(judge: Judge, entities: Sequence[Sequence[str]], late: Callable[[], bool]) -> bool:
    """Whether a round fits into the time: one run is measured, half as long on the mean."""
    began = time.monotonic()
    judge.runner.output(0)
    taken = (time.monotonic() - began) / 2 * len(entities) * judge.blueprint.blocks**2
    return not late() and taken < judge.seconds / 3


def _proposals(judge: Judge, entities: Sequence[Sequence[str]], doubtful: set[int]) -> list[Proposal]:
    """Permutations of all roles together, of matrices or vectors alone, and of each role alone."""
    n = judge.blueprint.blocks
    chosen, target = judge.errors(_COORDINATES)
    beliefs, effects = [], []
    for roles in entities:
        belief = _belief(judge, roles, doubtful)
        beliefs.append(belief)
        effects.append(centred(_effects(judge, roles, chosen, len(target)), belief, False))
    here = np.eye(n)
    columns, roots = [], []
    for belief, effect in zip(beliefs, effects, strict=True):
        target = target + effect.reshape(len(target), -1) @ (here - belief).reshape(-1)
        root = np.sqrt(belief).reshape(-1)
        columns.append(effect.reshape(len(target), -1) * root)
        roots.append(root)
    solutions, _ = posterior_means(np.concatenate(columns, axis=1), target, None, _NOISES)
    matrix = [judge.is_matrix(roles[0]) for roles in entities]
    found: dict[str, Proposal] = {}
    for solution in solutions:
        for reach in (1.0, 2.0, 4.0):
            orders: list[dict[str, tuple[int, ...]]] = []
            for number, (roles, belief) in enumerate(zip(entities, beliefs, strict=True)):
                part = solution[number * n * n : (number + 1) * n * n]
                wanted = belief + (roots[number] * part).reshape(n, n)
                order = tuple(int(k) for k in assign(here + reach * (wanted - here)))
                orders.append(dict.fromkeys(roles, order) if order != tuple(range(n)) else {})
            every = [_joined(orders)]
            every += [
                _joined([o for o, m in zip(orders, matrix, strict=True) if m is kind]) for kind in (True, False)
            ]
            every += [Proposal(o) for o in orders]
            found |= {str(p.orders): p for p in every if p.orders}
    return list(found.values())


def _joined(orders: Sequence[Mapping[str, tuple[int, ...]]]) -> Proposal:
    return Proposal({role: order for part in orders for role, order in part.items()})


def _belief(judge: Judge, roles: Sequence[str], doubtful: set[int]) -> Matrix:
    """Each block's own piece, the rest evenly over the others."""
    n = judge.blueprint.blocks
    own = np.array(
        [_DOUBTFUL if any(judge.numbers[r][k] in doubtful for r in roles) else _SURE for k in range(n)]
    )
    belief = np.repeat(((1 - own) / max(n - 1, 1))[:, None], n, axis=1)
    belief[np.diag_indices(n)] = own
    return belief


def _effects(judge: Judge, roles: Sequence[str], chosen: Any, size: int) -> Matrix:
    """What the outputs change by when block ``k`` gets the pieces of block ``j``: (numbers, k, j)."""
    n = judge.blueprint.blocks
    found = np.zeros((size, n, n))
    base = judge.some(judge.runner.output(0), chosen)
    for k in range(n):
        for j in range(n):
            if j != k:
                found[:, k, j] = judge.some(judge.replaced(roles, k, j), chosen) - base
    np.nan_to_num(found, copy=False, posinf=0.0, neginf=0.0)
    return found
