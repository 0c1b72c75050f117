"""Put a shuffled transformer back together from its weights and, where there are data, with their help."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from threadpoolctl import threadpool_limits

from strati.core.errors import BadInputError
from strati.core.results import Flag, Tick, silent
from strati.core.rng import stream
from strati.reassembly.transformer.evidence import (
    Prior,
    default_prior,
    end_tables,
    ends_likeness,
    features,
)
from strati.reassembly.transformer.matrices import (
    NormalisedPieces,
    Placed,
    normalise_pieces,
    place_matrices,
    reversed_order,
)
from strati.reassembly.transformer.result import TransformerReassembly
from strati.reassembly.transformer.timeline import SURE_PLACE, Expected, Similarity, Timeline, coefficients
from strati.reassembly.transformer.vectors import PlacedVector, place_vectors

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.reassembly.reassemble import ReassembleConfig
    from strati.reassembly.transformer.blueprint import Blueprint
    from strati.reassembly.transformer.pieces import TransformerPieces

    Floats = NDArray[np.float32]

SURE = 3.0
"""Nats by which a place must be better than the next best one to be called sure: odds of 20 to 1."""

SURE_VECTOR = 20.0
"""The same for a bias or a norm, whose evidence is of few signals that go together: below it, too many were wrong."""

_FIT, _VECTORS = 0.5, 0.25
"""Weight of what the similarities of matrices, and of vectors, prefer, beside the signs: they are not independent."""
_MOST = 4.0
"""Nats that vectors may add at most: where they are placed badly either way, one way may look much better by chance (in
one of 29 networks by 62 nats, the wrong way)."""


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
    prior_used = prior or default_prior()
    rng = stream(config.seed, "reassembly", "transformer")
    # thousands of small products: threads that wait for each other cost five times the work on a busy machine
    with threadpool_limits(limits=1, user_api="blas"):
        normalised = normalise_pieces(pieces)
        matrices = {s.role: pieces.candidates[s.role] for s in pieces.blueprint.block if s.matrix}
        laid = order_blocks(
            normalised, place_matrices(normalised, matrices, prior_used, rng, tick), prior_used
        )
        tick("vectors")
    answer = _result(pieces, laid)
    solved = time.perf_counter() - began
    seconds = {"load": load_seconds, "solve": solved}
    if data is None:
        return replace(answer, seconds=seconds)
    from strati.reassembly.transformer.verify import verified

    began = time.perf_counter()
    better = verified(answer, data, outputs, config, tick=tick)
    return replace(better, seconds=seconds | {"verify": time.perf_counter() - began})


def _result(pieces: TransformerPieces, laid: OrderedBlocks) -> TransformerReassembly:
    placed, bodies, global_pieces, way = laid.placed, laid.bodies, laid.global_pieces, laid.way
    blueprint = pieces.blueprint
    count = blueprint.blocks
    blocks = tuple(
        {s.role: placed.numbers[s.role][k] for s in blueprint.block if s.matrix} for k in range(count)
    )
    vectors = tuple({role: vector.numbers[k] for role, vector in bodies.items()} for k in range(count))
    uncertain: set[int] = set()
    for pair in placed.pairs:
        if pair.margin < SURE:
            uncertain |= {pair.a, pair.b}
    for slot, held in placed.margins.items():
        uncertain |= {blocks[k][slot] for k, margin in enumerate(held) if margin < SURE_PLACE}
    for vector in bodies.values():
        uncertain |= {
            n for n, margin in zip(vector.numbers, vector.margins, strict=True) if margin < SURE_VECTOR
        }
    for k, margin in enumerate(placed.swap_margins):
        if margin < SURE:
            uncertain |= {*blocks[k].values(), *blocks[k + 1].values()}
    warnings = []
    sure = way.log_odds
    if count > 1 and sure < SURE:
        uncertain |= {n for part in (blocks, vectors) for block in part for n in block.values()}
        text = f"the direction is not sure ({sure:.1f} nats): the blocks may be in reverse order"
        warnings.append(Flag("direction-uncertain", text))
    others = {name: number for name, number in global_pieces.items() if name not in ("embedding", "head")}
    embedding = global_pieces.get("embedding")
    return TransformerReassembly(
        pieces=pieces,
        blocks=blocks,
        vectors=vectors,
        embedding=embedding,
        head=global_pieces.get("head", embedding if blueprint.tied else None),
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


@dataclass(frozen=True)
class OrderedBlocks:
    """Everything in its place.

    Attributes:
        placed: The matrices, first block first.
        bodies: Vector role to its pieces.
        global_pieces: Name to the piece that is there once.
        way: How sure the direction is, and what told it.
    """

    placed: Placed
    bodies: Mapping[str, PlacedVector]
    global_pieces: Mapping[str, int]
    way: Direction


def order_blocks(normalised: NormalisedPieces, placed: Placed, prior: Prior) -> OrderedBlocks:
    """Decide the direction, and place the vectors."""
    pieces = normalised.pieces
    ways = [placed, reversed_order(placed)]
    sides = [_vectors(normalised, order, prior) for order in ways]
    global_pieces = {slot.role: pieces.candidates[slot.role][0] for slot in pieces.blueprint.whole}
    way = _directed(pieces, placed, global_pieces, prior, sides[0][1] - sides[1][1])
    side = 0 if way.log_odds >= 0 else 1
    return OrderedBlocks(ways[side], sides[side][0], global_pieces, replace(way, log_odds=abs(way.log_odds)))


def _vectors(
    normalised: NormalisedPieces, placed: Placed, prior: Prior
) -> tuple[dict[str, PlacedVector], float]:
    """The vectors beside the matrices, and how well they fit."""
    pieces = normalised.pieces
    candidates = {s.role: pieces.candidates[s.role] for s in pieces.blueprint.block if not s.matrix}
    return place_vectors(
        pieces, candidates, placed.stacked, prior.coefficients, _norms_by_scale(normalised, placed)
    )


def _norms_by_scale(normalised: NormalisedPieces, placed: Placed) -> dict[str, list[int]]:
    """Norm weights in network order, where moved scales told each reader's."""
    norms: dict[str, list[int]] = {}
    for norm, readers in (
        ("norm1.weight", ("q", "k", "v", "qkv")),
        ("norm2.weight", ("gate", "up", "gate_up")),
    ):
        slots = [placed.numbers[role] for role in readers if role in placed.numbers]
        if normalised.norm_of and slots and normalised.pieces.blueprint.slot(norm) is not None:
            votes = [
                [normalised.norm_of.get(slot[k], -1) for slot in slots]
                for k in range(placed.similarity.count)
            ]
            majority = [max(set(ballots), key=ballots.count) for ballots in votes]
            if -1 not in majority and len(set(majority)) == len(majority):
                norms[norm] = majority
    if len({n for numbers in norms.values() for n in numbers}) < sum(map(len, norms.values())):
        return {}
    return norms


def vector_log_odds(difference: float) -> float:
    """Nats for the direction from how much better vectors fit one way than the other: a weight of it, and limited.

    Examples:
        >>> vector_log_odds(2.0), vector_log_odds(-248.0)
        (0.5, -4.0)
    """
    return min(_MOST, max(-_MOST, _VECTORS * difference))


def _directed(
    pieces: TransformerPieces,
    placed: Placed,
    global_pieces: Mapping[str, int],
    prior: Prior,
    by_vectors: float,
) -> Direction:
    """The log-odds that the block order is forward."""
    ahead = {kind: np.arange(placed.similarity.count) for kind in placed.similarity.units}
    behind = {kind: at[::-1] for kind, at in ahead.items()}
    line = Timeline(placed.similarity, prior.coefficients)
    more = {
        "what reads the stream after what writes it": _FIT
        * (line.log_likelihood(ahead) - line.log_likelihood(behind)),
        "sizes of norms and biases": vector_log_odds(by_vectors),
    }
    tables = end_tables(pieces, global_pieces)
    return direction(signs(placed.stacked, placed.similarity, tables, pieces.blueprint), prior.signs, more)


_NOISE = 0.15
_SHARE = 0.25
"""Added to the spread of every sign; signs are correlated, so each counts for a part of what it would alone."""


@dataclass(frozen=True)
class Direction:
    """Log-odds that the chain lies as it should (negative: turn it), and the signs that say so most."""

    log_odds: float
    by: tuple[str, ...]


def signs(
    stacked: Mapping[str, Floats],
    similar: Similarity,
    ends: Mapping[str, NDArray[np.float32]],
    blueprint: Blueprint,
) -> dict[str, float]:
    """Numbers that would change sign if the chain were turned round, each between -1 and 1.

    Args:
        stacked: Role to matrices in the order of the chain.
        similar: Similarities in the same order.
        ends: ``embedding`` and ``head`` as rows by width, where there are any.
        blueprint: The architecture; signs of networks whose norms stand after the blocks are others.
    """
    sign_values: dict[str, float] = {}
    count = similar.count
    if count < 2:
        return sign_values
    place = np.arange(count) - (count - 1) / 2
    places = {kind: np.arange(count) for kind in similar.units}
    for (a, b), (_, later, earlier, _) in coefficients(similar, places).items():
        if a != b and count > 2:
            sign_values[f"{a} before {b}"] = (later - earlier) / (abs(later) + abs(earlier) + 0.02)
    flat = {role: features(role, stack) for role, stack in stacked.items()}
    for end, table in ends.items():
        if blueprint.tied and end == "embedding":
            continue
        for role, values in ends_likeness(flat, table).items():
            sign_values[f"{'tied' if blueprint.tied else end} {role}"] = _trend(place, values)
    for role, stack in stacked.items():
        size = np.log(np.linalg.norm(stack.reshape(count, -1), axis=1) + 1e-30)
        sign_values[f"size {role}"] = _trend(place, size)
    return (
        sign_values
        if blueprint.before
        else {f"post-norm {name}": value for name, value in sign_values.items()}
    )


def direction(
    sign_values: Mapping[str, float], expected: Mapping[str, Expected], more: Mapping[str, float]
) -> Direction:
    """Combine the statistics, weighted by their log-odds on other networks.

    Args:
        sign_values: Signs.
        expected: Log-odds of each statistic, measured on other networks.
        more: Other evidence, in nats.
    """
    odds = {
        name: 2 * value * expected[name].mean / (expected[name].spread ** 2 + _NOISE)
        for name, value in sign_values.items()
        if name in expected
    }
    odds = {name: _SHARE * value for name, value in odds.items()} | dict(more)
    total = sum(odds.values())
    order = sorted(odds, key=lambda name: -odds[name] * (1 if total >= 0 else -1))
    return Direction(float(total), tuple(order[:3]))


def _trend(place: NDArray[Any], values: NDArray[Any]) -> float:
    around = values - values.mean()
    size = float(np.linalg.norm(place) * np.linalg.norm(around))
    return float(place @ around) / size if size > 0 else 0.0
