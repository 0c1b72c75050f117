"""Free directions of a chain from its structure: activations, Jacobians, firing, synchrony; nothing twice.

The rank of the Hessian of the behavioural loss is the dimension of the span of all
``J_i^l(x) f_j^l(x)`` as functions of the data. Going from the last layer to the first, each layer can
add to that span at most the smaller of two numbers, both found from small Gram matrices:

* by blocks: ``sum_a t_a (rank [r_a F^l, F^{l+1}] - rank F^{l+1})``, over blocks ``a`` of neurons that share
  their slopes ``r_a`` on all data; ``t_a`` is the rank of the Jacobians on the block. The functions
  ``r_a F^l`` are the inputs the block sees (for a ReLU those on which it fires); whatever of them the next
  layer's inputs also span can be undone by the next layer's weights. The overlap holds at least the block's
  own activations, of rank ``s_a``, so this contains the ``s_a t_a`` free directions of synchrony.
* by layer: ``rG rK`` less the synchrony that is visible there.

Ranks that rounding leaves undecided enter at their upper end where they are used and at their lower end where they are
free. So the count never exceeds ``N - rank(H)``, and ``exact`` computes the latter where that is affordable. The first
bound takes one factorisation per block; a budget limits how many, those first where something is to be found.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from strati.landscape.counts.ranks import EPS, Factor, RankRange, fold, pairs_above, rank_range, upper
from strati.landscape.mlp.sequential import Chain
from strati.landscape.mlp.statistics_pass import (
    MOST_OUTPUTS,
    LayerSurvey,
    Survey,
    approximate_blocks,
    backward,
    batches,
    group,
    output_directions,
)

MOST_PAIRS = 1500
"""Above this many pairs of synchronised neurons only their own scalings are looked at in the layer-wise bound."""

VISIBLE = 1e-9
"""Synchrony must be this visible (relative) to be subtracted from the layer-wise bound: overcounting is worse."""


@dataclass(frozen=True)
class AtEpsilon:
    """A layer at a loss scale (section 3.1): what a unit change of the weights would do to the loss.

    Attributes:
        activation_rank: Principal components of the activations with mean square above epsilon.
        jacobian_rank: The same of the Jacobians.
        synchronised_blocks: Blocks of two or more neurons synchronised up to epsilon.
        free: Directions of the factorised Hessian ``G (x) K`` with a loss below epsilon, or free anyway.
    """

    activation_rank: int
    jacobian_rank: int
    synchronised_blocks: int | None
    free: int


@dataclass(frozen=True)
class LayerCount:
    """Free directions of one layer's weights and bias.

    Attributes:
        name: The layer.
        inputs: Columns of its matrix; ``d_in`` below is one more if there is a bias, for the constant it acts on.
        outputs: Rows of its matrix.
        bias: Whether it has one.
        activation_rank: ``rG``, of the inputs over the data, the constant among them.
        jacobian_rank: ``rK``, of the Jacobians to the output.
        hidden_jacobian_rank: Rank of the Jacobians to the next layer's preactivations; ``None`` for the last.
        dead: Neurons without slope on all the data.
        synchronised_blocks: Number of blocks of two or more neurons (dead ones apart) with the same pattern.
        free_from_activations: ``d_out (d_in - rG)``.
        free_from_jacobians: ``d_in (d_out - rK)``.
        free_from_firing: What neurons that see only part of the data's span leave free beyond ``rG``.
        free_from_synchrony: ``sum_a s_a t_a``, a neuron alone being a block of one (its scaling).
        free: Counted once; cross-layer freedom belongs to the earlier layer.
        structural_free: The same by structure alone, also where ``free`` is from the exact rank.
        blocks: The members of the synchronised blocks.
        at_epsilon: The same at a loss scale, if one was given.
    """

    computed: ClassVar[tuple[str, ...]] = ("parameters",)

    name: str
    inputs: int
    outputs: int
    bias: bool
    activation_rank: int
    jacobian_rank: int
    hidden_jacobian_rank: int | None
    dead: int
    synchronised_blocks: int
    free_from_activations: int
    free_from_jacobians: int
    free_from_firing: int
    free_from_synchrony: int
    free: int
    structural_free: int = 0
    blocks: tuple[tuple[int, ...], ...] = ()
    at_epsilon: AtEpsilon | None = None

    @property
    def parameters(self) -> int:
        """Entries of the matrix and of the bias."""
        return (self.inputs + self.bias) * self.outputs


def count_layers(
    chain: Chain, x: Tensor, found: Survey, places: list[int], *, epsilon: float | None = None
) -> list[LayerCount]:
    """Count the free directions of every layer from a survey.

    Args:
        chain: The network.
        x: The data, for the functions that single neurons produce.
        found: One pass over the data.
        places: Which layers vary; freedom between two needs both.
        epsilon: Also count at this loss scale.
    """
    budget = ProbeBudget()
    counts = []
    for index in reversed(places):
        alone = index + 1 not in places
        counts.append(_count(chain, x, found, index, None if alone else budget, epsilon))
    return counts[::-1]


def undecided_layers(found: Survey) -> list[str]:
    """Layers whose ranks rounding leaves open: the larger one was taken."""
    return [
        layer.stage.name
        for layer in found.layers
        if not (layer.activations.range().decided and layer.jacobians.range().decided)
    ]


def _count(
    chain: Chain, x: Tensor, found: Survey, index: int, budget: ProbeBudget | None, epsilon: float | None
) -> LayerCount:
    layer = found.layers[index]
    last = index + 1 == len(found.layers)
    inputs, outputs = layer.activations.columns, layer.jacobians.columns
    activation_rank = min(layer.activations.range().high, found.data)
    heard = layer.jacobians.range().high
    hidden = any(f.hidden for f in (layer.activations, layer.jacobians))
    blocks = _blocks(layer)
    dead = [b for b in blocks if float(layer.slopes[b[0], b[0]]) == 0.0 and layer.stage.activation.vanishes]
    alive = [b for b in blocks if b not in dead]
    used, firing, synchrony = activation_rank * heard, 0, 0
    if budget is not None and not hidden:
        used, firing, synchrony = _between(chain, x, found, index, alive, activation_rank, heard, budget)
    together = tuple(tuple(b) for b in alive if len(b) > 1)
    return LayerCount(
        name=layer.stage.name,
        inputs=layer.stage.inputs,
        outputs=outputs,
        bias=layer.stage.bias is not None,
        activation_rank=activation_rank,
        jacobian_rank=heard,
        hidden_jacobian_rank=None if last else _hidden_rank(layer, found.layers[index + 1]),
        dead=sum(len(b) for b in dead),
        synchronised_blocks=0 if last else len(together),
        free_from_activations=outputs * (inputs - activation_rank),
        free_from_jacobians=inputs * (outputs - heard),
        free_from_firing=firing,
        free_from_synchrony=synchrony,
        free=inputs * outputs - used,
        blocks=() if last else together,
        at_epsilon=None if epsilon is None else _at(found, layer, used, epsilon),
    )


def _between(
    chain: Chain,
    x: Tensor,
    found: Survey,
    index: int,
    alive: list[list[int]],
    seen: int,
    heard: int,
    budget: ProbeBudget,
) -> tuple[int, int, int]:
    """What a layer uses beside the next one: an upper bound, and what firing and synchrony leave free."""
    layer, following = found.layers[index], found.layers[index + 1]
    thickness = [layer.jacobians.range(b) for b in alive]
    own_ranks = [_own_rank(found, layer, following, b) for b in alive]
    noise = (layer.activations.noise, following.activations.noise)
    fine = produced(chain, x, index, alive, budget, noise=noise)
    by_block = firing = 0
    for place, (block, t, s) in enumerate(zip(alive, thickness, own_ranks, strict=True)):
        mine = fine.get(place, Produced(_fired(found, layer, block), inputs_of(layer)))
        sees = min(seen, mine.seen)
        firing += (seen - sees) * t.low
        by_block += t.high * min(mine.added, max(0, sees - s))
    by_layer = seen * heard - _visible(layer, alive)
    synchrony = sum(s * t.low for s, t in zip(own_ranks, thickness, strict=True))
    return max(0, min(by_block, by_layer)), firing, synchrony


def inputs_of(layer: LayerSurvey) -> int:
    """Width of what a layer reads, the constant of the bias among it."""
    return layer.activations.columns


def _blocks(layer: LayerSurvey) -> list[list[int]]:
    """Neurons that share their slopes on all data: by pattern if piecewise linear, else by equal weights."""
    stage = layer.stage
    if stage.activation.slopes is None:
        bias = stage.weight.new_zeros(stage.outputs) if stage.bias is None else stage.bias
        return group([row.cpu().numpy().tobytes() for row in torch.cat([stage.weight, bias[:, None]], 1)])
    below, above = stage.activation.slopes
    return [list(range(stage.outputs))] if below == above else layer.patterns.blocks()


def _fired(found: Survey, layer: LayerSurvey, block: list[int]) -> int:
    """The rank of the inputs a block sees cannot exceed the number of data on which it fires."""
    slopes = layer.stage.activation.slopes
    return (
        int(layer.patterns.fired[block[0]])
        if slopes is not None and slopes[0] == 0 < slopes[1]
        else found.data
    )


def _own_rank(found: Survey, layer: LayerSurvey, following: LayerSurvey, block: list[int]) -> int:
    """``s_a``: rank of the block's own activations; the constant belongs to a block that always fires."""
    slopes = layer.stage.activation.slopes
    if slopes is None:
        return 0
    constant = layer.stage.bias is not None and following.stage.bias is not None
    always = slopes[0] == slopes[1] or int(layer.patterns.fired[block[0]]) == found.data
    members = [*block, layer.stage.outputs] if constant and always else block
    return following.activations.range(members).low


def _visible(layer: LayerSurvey, blocks: list[list[int]]) -> int:
    """Directions of synchrony that the layer-wise bound ``rG rK`` holds and that are free."""
    stage = layer.stage
    if stage.activation.slopes is None:
        return 0
    weight = stage.weight if stage.bias is None else torch.cat([stage.weight, stage.bias[:, None]], 1)
    pairs = [(i, j) for b in blocks for i in b for j in b]
    if len(pairs) > MOST_PAIRS:
        pairs = [(i, i) for b in blocks for i in b]
    return visible_rank(layer.activations, layer.jacobians, weight, pairs)


def visible_rank(activations: Factor, jacobians: Factor, weight: Tensor, pairs: list[tuple[int, int]]) -> int:
    """How many of the changes ``E_ii' W`` of a layer its own freedom does not hold already; a lower bound.

    Their inner products under the factorised Hessian are ``K_ij (W G W^T)_i'j'``; the rank of that matrix counts them.

    Args:
        activations: Factor of the layer's inputs.
        jacobians: Factor of the Jacobians with respect to its outputs.
        weight: Its matrix, the bias as last column.
        pairs: The changes ``(i, i')``: output ``i`` takes on output ``i'``.
    """
    if not pairs:
        return 0
    out = torch.tensor([p[0] for p in pairs], device=weight.device)
    into = torch.tensor([p[1] for p in pairs], device=weight.device)
    projected = activations.matrix @ weight.T
    size = torch.linalg.vector_norm(activations.matrix) * torch.linalg.vector_norm(weight, dim=1)
    k = _unit(
        jacobians.matrix, torch.linalg.vector_norm(jacobians.matrix, dim=0) * jacobians.noise / (4 * EPS)
    )
    m = _unit(projected, size)
    products = (k.T @ k)[out][:, out] * (m.T @ m)[into][:, into]
    values = torch.linalg.eigvalsh(products)
    return int((values > VISIBLE * values[-1].clamp(min=0)).sum()) if float(values[-1]) > 0 else 0


def _unit(matrix: Tensor, least: Tensor) -> Tensor:
    """Columns of unit size, those below 1e-8 of what went into them left as zeros: cancellation makes them unsure."""
    size = torch.linalg.vector_norm(matrix, dim=0)
    sure = size > 1e-8 * least
    return torch.where(
        sure, matrix / torch.where(sure, size, torch.ones_like(size)), torch.zeros_like(matrix)
    )


def _hidden_rank(layer: LayerSurvey, following: LayerSurvey) -> int:
    """Rank of the Jacobians between adjacent layers' preactivations: ``(W'^T W') o sum r r^T``."""
    weight = following.stage.weight
    product = (weight.T @ weight) * layer.slopes
    power = product.diagonal().clamp(min=0)
    live = power > 0
    unit = power[live].rsqrt()
    if not bool(live.any()):
        return 0
    values = torch.linalg.eigvalsh(product[live][:, live] * unit[:, None] * unit[None, :])
    return int((values > 1e-12 * values[-1]).sum())


def _at(found: Survey, layer: LayerSurvey, used: int, epsilon: float) -> AtEpsilon:
    g = torch.linalg.eigvalsh(layer.activations.gram() / found.data)
    k = torch.linalg.eigvalsh(layer.jacobians.gram() / found.data)
    blocks = None
    if layer.asynchrony is not None:
        near = approximate_blocks(layer.asynchrony.matrix(), epsilon)
        blocks = sum(1 for b in near if len(b) > 1)
    size = layer.activations.columns * layer.jacobians.columns
    return AtEpsilon(
        _above(g, epsilon), _above(k, epsilon), blocks, size - min(used, pairs_above(g, k, epsilon))
    )


def _above(eigenvalues: Tensor, epsilon: float) -> int:
    return int((eigenvalues > epsilon).sum())


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
