"""What the weights of one neuron can produce that the next layer's weights cannot undo.

A block of neurons with slopes ``r_a`` produces the functions ``r_a F`` of the data; those that the next layer's inputs
``F'`` span already can be undone there. The difference ``rank [r_a F, F'] - rank F'``, over the data on which the
output depends on the block, bounds what the block adds to the rank of the Hessian. One factorisation per block, so it
is done for as many blocks as a budget allows, those first where something is to be found.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from strati.landscape.counts.gram import fold
from strati.landscape.counts.ranks import RankRange, rank_range
from strati.landscape.mlp.jacobians import MOST_OUTPUTS, backward, output_directions
from strati.landscape.mlp.sequential import Chain
from strati.landscape.mlp.statistics_pass import batches
from strati.landscape.triangular import upper

BYTES = 300_000_000
"""Most memory for the activations of two layers on all data; where they need more, this is left out."""
WORK = 2.0e11
"""Multiplications for all blocks of the network: some seconds."""


@dataclass
class ProbeBudget:
    """Multiplications that are left."""

    left: float = WORK

    def take(self, work: float) -> bool:
        """Whether there is enough left, which is then gone."""
        if work > self.left:
            return False
        self.left -= work
        return True


@dataclass(frozen=True)
class Produced:
    """Of one block: rank of its functions, and of what they add to the next layer's inputs; upper bounds."""

    seen: int
    added: int


def produced(
    chain: Chain,
    x: Tensor,
    index: int,
    blocks: list[list[int]],
    budget: ProbeBudget,
    *,
    noise: tuple[Tensor, Tensor],
) -> dict[int, Produced]:
    """For the blocks of a layer that the budget allows, by their place in ``blocks``.

    Args:
        chain: The network.
        x: Data.
        index: Which layer; not the last.
        blocks: Neurons that share their slopes.
        budget: What may be spent, on this layer and others.
        noise: Relative errors of the columns of this layer's inputs and the next one's.
    """
    stage, following = chain.stages[index], chain.stages[index + 1]
    inside = stage.inputs + (stage.bias is not None)
    both = inside + following.inputs + (following.bias is not None)
    data = int(x.shape[0])
    if 8 * data * (both + 2 * stage.outputs) > BYTES or not blocks:
        return {}
    f, after, slopes, heard = _functions(chain, x, index)
    shared: dict[bytes, RankRange] = {}
    ranks = {}
    for place in _promising(blocks, slopes, inside, both - inside):
        block = blocks[place]
        mask = heard[:, block].any(dim=1)
        rows = int(mask.sum())
        if not budget.take(2.0 * rows * both**2 + 20.0 * min(rows, both) * both**2):
            break
        block_rows = slopes[:, block[0], None] * f
        joint = upper(torch.cat([block_rows[mask], after[mask]], dim=1))
        key = mask.cpu().numpy().tobytes()
        if key not in shared:
            shared[key] = rank_range(joint[:, inside:], noise[1])
        joint_range = rank_range(joint, torch.cat(noise))
        ranks[place] = Produced(
            rank_range(joint[:, :inside], noise[0]).high, max(0, joint_range.high - shared[key].low)
        )
    return ranks


def _promising(blocks: list[list[int]], slopes: Tensor, own: int, after: int) -> list[int]:
    """Blocks in order of promise: those that fire on few data, or on nearly all, before those in between.

    With enough data on either side of its threshold a neuron's functions are independent of the next layer's inputs,
    but for its own activation, which is counted anyway.
    """
    data = slopes.shape[0]
    fires = (slopes[:, [b[0] for b in blocks]] != 0).sum(dim=0).tolist()
    plain = {k for k, n in enumerate(fires) if own + after <= n <= data - after}
    return [k for k in range(len(blocks)) if k not in plain] + sorted(plain)


def _functions(chain: Chain, x: Tensor, index: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Inputs of a layer and of the next, the layer's slopes, and on which data each neuron is heard, on all data."""
    stage, following = chain.stages[index], chain.stages[index + 1]
    parts: list[tuple[Tensor, ...]] = []
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for batch in batches(chain, x):
            activations, preactivations = chain.forward(batch)
            slopes = chain.slopes(preactivations)
            first = output_directions(slopes[-1], generator, MOST_OUTPUTS)
            for place, jacobian in backward(chain, slopes, first):
                if place == index + 1:
                    heard = (jacobian @ following.weight != 0).any(dim=1)
                    break
            parts.append(
                (
                    fold(activations[index], stage.bias is not None),
                    fold(activations[index + 1], following.bias is not None),
                    slopes[index],
                    heard,
                )
            )
    f, after, slope, ears = (torch.cat([part[k] for part in parts]) for k in range(4))
    return f, after, slope, ears
