"""Put a dropped transformer back together, from its weights and, where there are data, with their help."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
from threadpoolctl import threadpool_limits

from strati.errors import BadInputError
from strati.reassembly.transformer.asymmetry import turned as turned_twins
from strati.reassembly.transformer.calibration import Prior, default_prior
from strati.reassembly.transformer.certainty import SURE_PLACE
from strati.reassembly.transformer.fold import Folded, folded
from strati.reassembly.transformer.layout import slots_of, unit_kinds
from strati.reassembly.transformer.matrices import Placed, place_matrices
from strati.reassembly.transformer.orientation import Oriented, oriented
from strati.reassembly.transformer.result import TransformerReassembly
from strati.reassembly.transformer.roles import find_roles
from strati.rng import stream
from strati.types import Flag, Tick, silent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from strati.reassembly.config import ReassembleConfig
    from strati.reassembly.transformer.pieces import TransformerPieces

SURE = 3.0
"""Nats by which a place must be better than the next best one to be called sure: odds of 20 to 1."""

SURE_VECTOR = 20.0
"""The same for a bias or a norm, whose evidence is of few signals that go together: below it, too many were wrong."""

SURE_TWIN = 6.0
"""The same for which of two twins is which."""

_TURNS = 3
"""Times that twins are told and everything is placed again."""


def solve_transformer(
    pieces: TransformerPieces,
    data: Any,
    outputs: Any,
    config: ReassembleConfig,
    *,
    prior: Prior | None = None,
    load_seconds: float = 0.0,
    tick: Tick = silent,
) -> TransformerReassembly:
    """Every piece in its place.

    Args:
        pieces: The pieces.
        data: Token ids, images, or text files to verify with; ``None`` for the weights alone.
        outputs: What the network answered to the data, if that was recorded.
        config: How.
        prior: What signals are worth; that of all networks measured by default.
        load_seconds: Time spent on reading.
        tick: Called after each stage.
    """
    began = time.perf_counter()
    known = prior or default_prior()
    rng = stream(config.seed, "reassembly", "transformer")
    # thousands of small products: threads that wait for each other cost five times the work on a busy machine
    with threadpool_limits(limits=1, user_api="blas"):
        bare = folded(pieces)
        roles = find_roles(bare, known)
        tick("roles")
        block_slots = [slot for slot in pieces.blueprint.block if slot.matrix]
        placed = place_matrices(bare, {s.role: roles.block[s.role] for s in block_slots}, known, rng, tick)
        placed, doubtful = _twins_told(bare, placed, roles.twins, known, rng, tick)
        laid = oriented(bare, placed, roles, known)
        tick("vectors")
    found = _result(pieces, laid, (*roles.uncertain, *doubtful))
    solved = time.perf_counter() - began
    seconds = {"load": load_seconds, "solve": solved}
    if data is None:
        return replace(found, seconds=seconds)
    from strati.reassembly.transformer.verify import verified

    began = time.perf_counter()
    better = verified(found, data, outputs, config, tick=tick)
    return replace(better, seconds=seconds | {"verify": time.perf_counter() - began})


def _twins_told(
    bare: Folded,
    placed: Placed,
    twins: Sequence[tuple[str, str]],
    prior: Prior,
    rng: np.random.Generator,
    tick: Tick,
) -> tuple[Placed, list[int]]:
    """Twins the right way round, all placed again where that changed; and the pieces of which it is not sure."""
    twins = [pair for pair in twins if pair[0] in placed.numbers]
    for _ in range(_TURNS if twins else 0):
        numbers = {slot: list(found) for slot, found in placed.numbers.items()}
        changed = False
        doubtful: list[int] = []
        for one, two in twins:
            found = turned_twins(placed.stacked, bare.pieces.blueprint, prior.twins, (one, two))
            for k, swap in enumerate(found.swap):
                if swap:
                    numbers[one][k], numbers[two][k] = numbers[two][k], numbers[one][k]
                if found.margins[k] < SURE_TWIN or found.whole < SURE_TWIN:
                    doubtful += [numbers[one][k], numbers[two][k]]
            changed = changed or bool(found.swap.any())
        if not changed:
            return placed, doubtful
        placed = place_matrices(bare, numbers, prior, rng, tick)
    return placed, doubtful if twins else []


def _result(pieces: TransformerPieces, laid: Oriented, doubtful: Sequence[int]) -> TransformerReassembly:
    placed, bodies, whole, way = laid.placed, laid.bodies, laid.whole, laid.way
    blueprint = pieces.blueprint
    count = blueprint.blocks
    blocks = tuple(
        {s.role: placed.numbers[s.role][k] for s in blueprint.block if s.matrix} for k in range(count)
    )
    vectors = tuple({role: found.numbers[k] for role, found in bodies.items()} for k in range(count))
    uncertain = set(doubtful)
    for pair in placed.pairs:
        if pair.margin < SURE:
            uncertain |= {pair.a, pair.b}
    for slot, held in placed.margins.items():
        uncertain |= {blocks[k][slot] for k, margin in enumerate(held) if margin < SURE_PLACE}
    for found in bodies.values():
        uncertain |= {
            n for n, margin in zip(found.numbers, found.margins, strict=True) if margin < SURE_VECTOR
        }
    for k, margin in enumerate(placed.swap_margins):
        if margin < SURE:
            uncertain |= {*blocks[k].values(), *blocks[k + 1].values()}
    if any(n not in pieces.told for n in pieces.arrays):  # what makes a unit is a guess too
        for block, roles in product(blocks, unit_kinds(blueprint).values()):
            unit = {block[slot] for slot in slots_of(roles, blueprint)}
            uncertain |= unit if unit & uncertain else set()
    warnings = []
    if way.lead < SURE:
        uncertain |= {whole["embedding"], whole["head"]}
    sure = min(way.log_odds, way.lead)
    if count > 1 and sure < SURE:
        uncertain |= {n for part in (blocks, vectors) for block in part for n in block.values()}
        text = f"the direction is not sure ({sure:.1f} nats): the blocks may be in reverse order"
        warnings.append(Flag("direction-uncertain", text))
    others = {name: number for name, number in whole.items() if name not in ("embedding", "head")}
    embedding = whole.get("embedding")
    return TransformerReassembly(
        pieces=pieces,
        blocks=blocks,
        vectors=vectors,
        embedding=embedding,
        head=whole.get("head", embedding if blueprint.tied else None),
        others=others,
        pairs=placed.pairs,
        order={
            "method": "likeness on the residual stream",
            "margin": placed.order_margin
            if placed.order_margin is not None and math.isfinite(placed.order_margin)
            else None,
            "direction_by": ", ".join(way.by) or "nothing",
            "direction_margin": way.log_odds,
        },
        exact=None,
        loss=None,
        uncertain=tuple(sorted(uncertain)),
        seconds={},
        warnings=tuple(warnings),
    )


def check_data(data: Any) -> None:
    """Refuse what cannot be data before any work is done.

    Raises:
        BadInputError: There is nothing in it.
    """
    if data is not None and hasattr(data, "__len__") and len(data) == 0:
        raise BadInputError("data", "is empty; leave it out to use the weights alone")
