"""One pass over the data: everything the counts of a chain need, in memory that does not grow with them.

Per layer: Gram matrices of activations and Jacobians, co-firing, hashed firing patterns and, where it is
affordable, one Gram matrix per neuron of the inputs it sees (a ReLU neuron sees only the data on which it
fires). What follows from them is in ``structure``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from strati.errors import BadInputError
from strati.landscape.chain import Chain, Stage
from strati.landscape.counts.gram import SILENT, certified, fold
from strati.landscape.counts.jacobians import MOST_OUTPUTS, backward, output_directions
from strati.landscape.counts.synchrony import Asynchrony, FiringHash
from strati.types import Tick, silent

FINE_BYTES = 300_000_000
FINE_FLOPS = 1.0e11
"""Per layer, what the Gram matrices of single neurons may cost before cheaper bounds are used."""

BATCH_BYTES = 64_000_000


@dataclass
class LayerSurvey:
    """What one layer showed on the data. Sums over data, not means.

    Attributes:
        stage: The layer.
        activations: Gram matrix of its inputs, the constant of the bias last.
        jacobians: Gram matrix of the Jacobians to the output with respect to its preactivations.
        slopes: Gram matrix of its nonlinearity's derivatives (co-firing of ReLU neurons).
        patterns: Hashed firing patterns of its outputs.
        asynchrony: Price of mixing pairs of neurons; only where a loss scale is asked for.
        joint: Per neuron ``i`` the Gram matrix of ``[r_i f, f']``, ``f'`` the inputs of the next layer, over the
            data on which the output depends on ``f'_i`` at all; ``None`` where that is too dear or there is no
            next layer.
        last_probe: What one of the random probes per datum added to ``jacobians``, while the data stream by.
    """

    stage: Stage
    activations: Tensor
    jacobians: Tensor
    slopes: Tensor
    patterns: FiringHash
    asynchrony: Asynchrony | None = None
    joint: Tensor | None = None
    last_probe: Tensor | None = None


@dataclass
class Survey:
    """What all layers showed, the number of data, whether Jacobians were exact, and where probes did not suffice."""

    layers: list[LayerSurvey]
    data: int = 0
    exact_jacobians: bool = True
    uncertain: list[str] = field(default_factory=list)
    output_power: float = 0.0
    notes: list[str] = field(default_factory=list)


def survey(
    chain: Chain, x: Tensor, *, seed: int = 0, asynchrony: bool = False, tick: Tick = silent
) -> Survey:
    """Stream data through a chain of float64 weights.

    Args:
        chain: The network.
        x: Data, rows first.
        seed: Of the probes used where there are many outputs.
        asynchrony: Also measure the approximate synchrony of all pairs of ReLU neurons.
        tick: Called after each batch.

    Raises:
        BadInputError: The network's outputs are not finite on the data.
    """
    outputs = chain.widths[-1]
    result = Survey(_empty(chain, x.shape[0], asynchrony, seed), exact_jacobians=outputs <= MOST_OUTPUTS)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for batch in batches(chain, x, result.layers):
            _take_in(chain, batch, result, generator)
            tick(f"{result.data} data")
    for layer in result.layers:
        if layer.last_probe is not None:
            layer.jacobians, certain = certified(layer.jacobians, layer.last_probe)
            if not certain:
                result.uncertain.append(layer.stage.name)
    return result


def batches(chain: Chain, x: Tensor, layers: list[LayerSurvey] | None = None) -> Iterator[Tensor]:
    """The data in pieces small enough for all Jacobians of a batch at once."""
    widest = max(chain.widths) + 1
    per_row = 8 * widest * (min(chain.widths[-1], MOST_OUTPUTS) + 4 * len(chain.stages))
    for layer in layers or []:
        if layer.joint is not None:
            per_row = max(per_row, 8 * layer.joint.shape[1] ** 2)
    step = max(1, min(x.shape[0], BATCH_BYTES // per_row))
    for start in range(0, x.shape[0], step):
        yield x[start : start + step]


def _empty(chain: Chain, data: int, asynchrony: bool, seed: int) -> list[LayerSurvey]:
    layers = []
    for index, stage in enumerate(chain.stages):
        inside = stage.inputs + (stage.bias is not None)
        layer = LayerSurvey(
            stage,
            torch.zeros(inside, inside, dtype=torch.float64),
            torch.zeros(stage.outputs, stage.outputs, dtype=torch.float64),
            torch.zeros(stage.outputs, stage.outputs, dtype=torch.float64),
            FiringHash(stage.outputs, seed),
        )
        if chain.widths[-1] > MOST_OUTPUTS:
            layer.last_probe = torch.zeros_like(layer.jacobians)
        if index + 1 < len(chain.stages):
            layer.asynchrony = (
                Asynchrony(stage.outputs) if asynchrony and stage.activation.name == "relu" else None
            )
            following = chain.stages[index + 1]
            both = inside + following.inputs + (following.bias is not None)
            entries = stage.outputs * both**2
            if 8 * entries <= FINE_BYTES and 2.0 * data * entries <= FINE_FLOPS:
                layer.joint = torch.zeros(stage.outputs, both, both, dtype=torch.float64)
        layers.append(layer)
    return layers


def _take_in(chain: Chain, batch: Tensor, result: Survey, generator: torch.Generator) -> None:
    activations, preactivations = chain.forward(batch)
    if not bool(torch.isfinite(activations[-1]).all()):
        raise BadInputError(
            "model", "its outputs are not finite on these data; check the weights and the data's scale"
        )
    slopes = [s.activation.derivative(p) for s, p in zip(chain.stages, preactivations, strict=True)]
    folded = [fold(f, s.bias is not None) for f, s in zip(activations, chain.stages, strict=False)]
    result.data += batch.shape[0]
    result.output_power += float(activations[-1].square().sum())
    for index, layer in enumerate(result.layers):
        f, r = folded[index], slopes[index]
        layer.activations += f.T @ f
        layer.slopes += r.T @ r
        layer.patterns.add(preactivations[index] > 0)
        if layer.asynchrony is not None:
            layer.asynchrony.add(preactivations[index])
    for index, jacobian in backward(chain, slopes, output_directions(slopes[-1], generator, MOST_OUTPUTS)):
        layer = result.layers[index]
        last = 0 if layer.last_probe is None else 1
        rows = jacobian[:, last:].reshape(-1, jacobian.shape[-1])
        layer.jacobians += rows.T @ rows
        if layer.last_probe is not None:
            layer.last_probe += jacobian[:, 0].T @ jacobian[:, 0]
        before = result.layers[index - 1].joint if index > 0 else None
        if before is not None:
            heard = (jacobian @ chain.stages[index].weight).square().sum(dim=1)  # (data, neurons below)
            mask = heard > SILENT * heard.max()
            before += _joint(mask, slopes[index - 1], folded[index - 1], folded[index])


def _joint(mask: Tensor, slopes: Tensor, inputs: Tensor, following: Tensor) -> Tensor:
    """Gram matrices of ``[r_i f, f']`` over the data of each neuron's mask, as three matrix products."""
    m = mask.to(slopes.dtype)
    own = _per_neuron(m * slopes.square(), inputs, inputs)
    cross = _per_neuron(m * slopes, inputs, following)
    ahead = _per_neuron(m, following, following)
    return torch.cat([torch.cat([own, cross], 2), torch.cat([cross.transpose(1, 2), ahead], 2)], 1)


def _per_neuron(weights: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """``sum_x w_i(x) left(x) right(x)^T`` for every neuron ``i``, as one matrix product."""
    outer = (left[:, :, None] * right[:, None, :]).reshape(left.shape[0], -1)
    return (weights.T @ outer).reshape(weights.shape[1], left.shape[1], right.shape[1])
