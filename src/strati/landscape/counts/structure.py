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

So the count never exceeds ``N - rank(H)``, and ``exact`` computes the latter where that is affordable.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from strati.landscape.counts.gram import Balanced, added_rank, pairs_above, rank
from strati.landscape.counts.survey import LayerSurvey, Survey
from strati.landscape.counts.synchrony import approximate_blocks, group

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
        blocks: The members of the synchronised blocks.
        at_epsilon: The same at a loss scale, if one was given.
    """

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
    blocks: tuple[tuple[int, ...], ...] = ()
    at_epsilon: AtEpsilon | None = None

    @property
    def parameters(self) -> int:
        """Entries of the matrix and of the bias."""
        return (self.inputs + self.bias) * self.outputs


def count_layers(found: Survey, *, epsilon: float | None = None) -> list[LayerCount]:
    """Count the free directions of every layer from a survey.

    Args:
        found: One pass over the data.
        epsilon: Also count at this loss scale.
    """
    following = [*found.layers[1:], None]
    return [_count(found, one, after, epsilon) for one, after in zip(found.layers, following, strict=True)]


def _count(
    found: Survey, layer: LayerSurvey, following: LayerSurvey | None, epsilon: float | None
) -> LayerCount:
    inputs, outputs = layer.activations.shape[0], layer.jacobians.shape[0]
    activations, jacobians = Balanced(layer.activations), Balanced(layer.jacobians)
    blocks = _blocks(layer)
    dead = [b for b in blocks if float(layer.slopes[b[0], b[0]]) == 0.0]
    alive = [b for b in blocks if b not in dead]
    thickness = [jacobians.rank_of(b) for b in alive]
    if following is None:
        used, firing, synchrony = activations.rank * jacobians.rank, 0, 0
    else:
        ahead = Balanced(following.activations)
        seen = [_seen(found, layer, b, activations) for b in alive]
        own = [_own_rank(found, layer, following, ahead, b) for b in alive]
        synchrony = sum(s * t for s, t in zip(own, thickness, strict=True))
        firing = sum((activations.rank - g) * t for g, t in zip(seen, thickness, strict=True))
        added = [_added(layer, b, g - s) for b, g, s in zip(alive, seen, own, strict=True)]
        by_block = sum(t * max(0, a) for t, a in zip(thickness, added, strict=True))
        by_layer = activations.rank * jacobians.rank - _visible(layer, alive)
        used = min(by_block, by_layer)
    used = max(0, used)
    together = tuple(tuple(b) for b in alive if len(b) > 1)
    return LayerCount(
        name=layer.stage.name,
        inputs=layer.stage.inputs,
        outputs=outputs,
        bias=layer.stage.bias is not None,
        activation_rank=activations.rank,
        jacobian_rank=jacobians.rank,
        hidden_jacobian_rank=None if following is None else _hidden_rank(layer, following),
        dead=sum(len(b) for b in dead),
        synchronised_blocks=len(together) if following is not None else 0,
        free_from_activations=outputs * (inputs - activations.rank),
        free_from_jacobians=inputs * (outputs - jacobians.rank),
        free_from_firing=firing,
        free_from_synchrony=synchrony,
        free=inputs * outputs - used,
        blocks=together if following is not None else (),
        at_epsilon=None if epsilon is None else _at(found, layer, used, epsilon),
    )


def _blocks(layer: LayerSurvey) -> list[list[int]]:
    """Neurons that share their slopes on all data: by pattern if piecewise linear, else by equal weights."""
    stage = layer.stage
    if stage.activation.slopes is None:
        bias = torch.zeros(stage.outputs, dtype=stage.weight.dtype) if stage.bias is None else stage.bias
        return group([row.numpy().tobytes() for row in torch.cat([stage.weight, bias[:, None]], 1)])
    below, above = stage.activation.slopes
    return [list(range(stage.outputs))] if below == above else layer.patterns.blocks()


def _seen(found: Survey, layer: LayerSurvey, block: list[int], activations: Balanced) -> int:
    """Rank of the inputs on the data the block sees; where too dear to know, what cannot be exceeded."""
    if layer.joint is not None:
        size = layer.activations.shape[0]
        return min(activations.rank, rank(layer.joint[block].sum(dim=0)[:size, :size]))
    slopes = layer.stage.activation.slopes
    data = (
        int(layer.patterns.fired[block[0]])
        if slopes is not None and slopes[0] == 0 < slopes[1]
        else found.data
    )
    return min(activations.rank, data)


def _own_rank(
    found: Survey, layer: LayerSurvey, following: LayerSurvey, ahead: Balanced, block: list[int]
) -> int:
    """``s_a``: rank of the block's own activations; the constant belongs to a block that always fires."""
    slopes = layer.stage.activation.slopes
    if slopes is None:
        return 0
    constant = layer.stage.bias is not None and following.stage.bias is not None
    always = slopes[0] == slopes[1] or int(layer.patterns.fired[block[0]]) == found.data
    members = [*block, layer.stage.outputs] if constant and always else block
    return ahead.rank_of(members)


def _added(layer: LayerSurvey, block: list[int], otherwise: int) -> int:
    """Dimensions the block's inputs add to the span of the next layer's inputs."""
    if layer.joint is None:
        return otherwise
    joint = layer.joint[block].sum(dim=0)  # over the data heard from any of the block
    return min(max(0, otherwise), added_rank(joint, layer.activations.shape[0]))


def _visible(layer: LayerSurvey, blocks: list[list[int]]) -> int:
    """Directions of synchrony that the layer-wise bound ``rG rK`` holds and that are free.

    The changes ``E_ii' W`` of a layer, ``i, i'`` in one block, have inner products
    ``K_ij (W G W^T)_i'j'`` under the factorised Hessian; the rank of that matrix counts them.
    """
    stage = layer.stage
    if stage.activation.slopes is None:
        return 0
    weight = stage.weight if stage.bias is None else torch.cat([stage.weight, stage.bias[:, None]], 1)
    moment = weight @ layer.activations @ weight.T
    pairs = [(i, j) for b in blocks for i in b for j in b]
    if len(pairs) > MOST_PAIRS:
        pairs = [(i, i) for b in blocks for i in b]
    if not pairs:
        return 0
    out = torch.tensor([p[0] for p in pairs])
    into = torch.tensor([p[1] for p in pairs])
    products = Balanced(layer.jacobians).matrix[out][:, out] * Balanced(moment).matrix[into][:, into]
    return rank(products, VISIBLE)


def _hidden_rank(layer: LayerSurvey, following: LayerSurvey) -> int:
    """Rank of the Jacobians between adjacent layers' preactivations: ``(W'^T W') o sum r r^T``."""
    weight = following.stage.weight
    return rank((weight.T @ weight) * layer.slopes)


def _at(found: Survey, layer: LayerSurvey, used: int, epsilon: float) -> AtEpsilon:
    g = torch.linalg.eigvalsh(layer.activations / found.data)
    k = torch.linalg.eigvalsh(layer.jacobians / found.data)
    blocks = None
    if layer.asynchrony is not None:
        near = approximate_blocks(layer.asynchrony.matrix(), epsilon)
        blocks = sum(1 for b in near if len(b) > 1)
    size = layer.activations.shape[0] * layer.jacobians.shape[0]
    return AtEpsilon(
        _above(g, epsilon), _above(k, epsilon), blocks, size - min(used, pairs_above(g, k, epsilon))
    )


def _above(eigenvalues: Tensor, epsilon: float) -> int:
    return int((eigenvalues > epsilon).sum())
