"""One pass over the data: everything the counts of a chain need, in memory that does not grow with them.

Per layer: triangular factors of activations and Jacobians, co-firing, and hashed firing patterns. What follows
from them is in ``structure``. Neurons that fire on the same data (section 3.2) are found by hashing: every neuron keeps
the sum of 128 random bits over the data on which it fires, so equal sums mean equal patterns (two different patterns
collide with probability ``2^-128``). Near synchrony uses ``(r_i - r_i') p_i'`` (eq. 20 as printed is not zero for
synchronised neurons). With few outputs all Jacobians are taken; with many, random combinations of outputs (probes),
whose rank ``ranks.certified`` checks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from strati.core.errors import BadInputError
from strati.core.results import Tick, silent
from strati.core.rng import stream
from strati.landscape.counts.ranks import Factor, certified, fold, perturb
from strati.landscape.mlp.sequential import Chain, ChainStage

BATCH_BYTES = 64_000_000
NOISE_ROWS = 256
"""Data on which rounding errors are measured, by a twin of the network."""
SATURATED, LOST = 1e-12, 1e-100
"""A smooth activation's slope below the first is not seen beside others, below the second products of slopes underflow;
either way it is not zero."""


@dataclass
class LayerSurvey:
    """What one layer showed on the data. Sums over data, not means.

    Attributes:
        stage: The layer.
        activations: Factor of its inputs, the constant of the bias last.
        jacobians: Factor of the Jacobians to the output with respect to its preactivations.
        slopes: Gram matrix of its nonlinearity's derivatives (co-firing of ReLU neurons).
        patterns: Hashed firing patterns of its outputs.
        asynchrony: Price of mixing pairs of neurons; only where a loss scale is asked for.
        last_probe: What one of the random probes per datum added to ``jacobians``, while the data stream by.
        least_slope: The smallest slope of a smooth nonlinearity met; 1 for others.
    """

    stage: ChainStage
    activations: Factor
    jacobians: Factor
    slopes: Tensor
    patterns: FiringHash
    asynchrony: Asynchrony | None = None
    last_probe: Factor | None = None
    least_slope: float = 1.0


@dataclass
class Survey:
    """What all layers showed, the number of data, whether Jacobians were exact, and where probes did not suffice."""

    layers: list[LayerSurvey]
    data: int = 0
    exact_jacobians: bool = True
    uncertain: list[str] = field(default_factory=list)


def survey(chain: Chain, x: Tensor, *, seed: int = 0, epsilon: bool = False, tick: Tick = silent) -> Survey:
    """Stream data through a chain of float64 weights.

    Args:
        chain: The network.
        x: Data, rows first.
        seed: Of the probes used where there are many outputs.
        epsilon: Also what a count at a loss scale needs: all data's share in the factors, and the approximate
            synchrony of all pairs of ReLU neurons.
        tick: Called after each batch.

    Raises:
        BadInputError: The network's outputs are not finite on the data.
    """
    outputs = chain.widths[-1]
    result = Survey(_empty(chain, epsilon, seed), exact_jacobians=outputs <= MOST_OUTPUTS)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        _measure_noise(chain, chain.rows(x[:NOISE_ROWS]), result.layers, seed)
        for batch in batches(chain, x):
            _take_in(chain, batch, result, generator)
            tick(f"{result.data} data")
    _mark_saturated(result.layers)
    for layer in result.layers:
        if layer.last_probe is not None:
            layer.jacobians, certain = certified(layer.jacobians, layer.last_probe)
            if not certain:
                result.uncertain.append(layer.stage.name)
    return result


def batches(chain: Chain, x: Tensor) -> Iterator[Tensor]:
    """The data in pieces small enough for all Jacobians of a batch at once."""
    widest = max(chain.widths) + 1
    per_row = 8 * widest * (min(chain.widths[-1], MOST_OUTPUTS) + 4 * len(chain.stages))
    step = max(1, min(x.shape[0], BATCH_BYTES // per_row))
    for start in range(0, x.shape[0], step):
        yield x[start : start + step]


def perturbed_copy(chain: Chain, seed: int) -> Chain:
    """The chain with every weight moved by a few units in the last place."""
    generator = torch.Generator().manual_seed(seed)
    return Chain(
        tuple(
            replace(
                s,
                weight=perturb(s.weight, generator),
                bias=None if s.bias is None else perturb(s.bias, generator),
            )
            for s in chain.stages
        )
    )


def gated_forward(chain: Chain, x: Tensor, slopes: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Activations and slopes of a twin, with the firing patterns of the network itself: a pattern is no rounding."""
    activations, inclines = [x], []
    for stage, slope in zip(chain.stages, slopes, strict=True):
        p = stage.preactivations(activations[-1])
        if stage.activation.slopes is None:
            activations.append(stage.activation(p))
            inclines.append(stage.activation.derivative(p))
        else:
            activations.append(slope * p)
            inclines.append(slope)
    return activations, inclines


def _empty(chain: Chain, epsilon: bool, seed: int) -> list[LayerSurvey]:
    layers = []
    for index, stage in enumerate(chain.stages):
        like = stage.weight
        layer = LayerSurvey(
            stage,
            Factor(stage.inputs + (stage.bias is not None), whole=epsilon, like=like),
            Factor(stage.outputs, whole=epsilon, like=like),
            torch.zeros(stage.outputs, stage.outputs, dtype=torch.float64, device=like.device),
            FiringHash(stage.outputs, seed),
        )
        if chain.widths[-1] > MOST_OUTPUTS:
            layer.last_probe = Factor(stage.outputs, whole=epsilon, like=like)
        if index + 1 < len(chain.stages) and epsilon and stage.activation.name == "relu":
            layer.asynchrony = Asynchrony(stage.outputs)
        layers.append(layer)
    return layers


def _measure_noise(chain: Chain, rows: Tensor, layers: list[LayerSurvey], seed: int) -> None:
    """Columns of activations and Jacobians against those of a twin, which shows how far rounding is amplified."""
    twin = perturbed_copy(chain, seed)
    activations, preactivations = chain.forward(rows)
    slopes = chain.slopes(preactivations)
    near, inclines = gated_forward(twin, perturb(rows, torch.Generator().manual_seed(seed)), slopes)
    for index, layer in enumerate(layers):
        bias = layer.stage.bias is not None
        layer.activations.compare(fold(activations[index], bias), fold(near[index], bias))
    first = output_directions(slopes[-1], torch.Generator().manual_seed(seed), MOST_OUTPUTS)
    second = output_directions(inclines[-1], torch.Generator().manual_seed(seed), MOST_OUTPUTS)
    pairs = zip(backward(chain, slopes, first), backward(twin, inclines, second), strict=True)
    for (index, original), (_, nudged_rows) in pairs:
        width = original.shape[-1]
        layers[index].jacobians.compare(original.reshape(-1, width), nudged_rows.reshape(-1, width))


def _least(slopes: Tensor, preactivations: Tensor) -> float:
    """The smallest slope far from zero: one that is small because the function turns there is no saturation."""
    far = slopes[preactivations.abs() > 5].abs()
    return float(far.min()) if far.numel() else 1.0


def _mark_saturated(layers: list[LayerSurvey]) -> None:
    """Tell the factors behind a saturated layer's slopes that they may hold more than is seen."""
    for index, layer in enumerate(layers):
        hidden, lost = layer.least_slope < SATURATED, layer.least_slope < LOST
        jacobians = [f for each in layers[: index + 1] for f in (each.jacobians, each.last_probe) if f]
        for factor in [*jacobians, *(each.activations for each in layers[index + 1 :])]:
            factor.hidden |= hidden
            factor.lost |= lost


def _take_in(chain: Chain, batch: Tensor, result: Survey, generator: torch.Generator) -> None:
    activations, preactivations = chain.forward(batch)
    if not bool(torch.isfinite(activations[-1]).all()):
        raise BadInputError(
            "model", "its outputs are not finite on these data; check the weights and the data's scale"
        )
    slopes = chain.slopes(preactivations)
    result.data += batch.shape[0]
    for index, layer in enumerate(result.layers):
        r, activation = slopes[index], layer.stage.activation
        layer.activations.add(fold(activations[index], layer.stage.bias is not None))
        layer.slopes += r.T @ r
        layer.patterns.add(preactivations[index] > 0)
        if not activation.vanishes:
            layer.least_slope = min(layer.least_slope, _least(r, preactivations[index]))
        if layer.asynchrony is not None:
            layer.asynchrony.add(preactivations[index])
    for index, jacobian in backward(chain, slopes, output_directions(slopes[-1], generator, MOST_OUTPUTS)):
        layer = result.layers[index]
        last = 0 if layer.last_probe is None else 1
        layer.jacobians.add(jacobian[:, last:].reshape(-1, jacobian.shape[-1]))
        if layer.last_probe is not None:
            layer.last_probe.add(jacobian[:, 0])


class FiringHash:
    """The firing pattern of every neuron of a layer, hashed while the data stream by.

    Args:
        neurons: Width of the layer.
        seed: Seed of the random words; the blocks do not depend on it.

    Examples:
        >>> patterns = FiringHash(3)
        >>> patterns.add(torch.tensor([[True, False, True], [False, True, False]]))
        >>> patterns.blocks()
        [[0, 2], [1]]
    """

    def __init__(self, neurons: int, seed: int = 0) -> None:
        self._words = stream(seed, "firing")
        self._sums = np.zeros((neurons, 2), dtype=np.uint64)
        self.fired = torch.zeros(neurons, dtype=torch.long)

    def add(self, firing: Tensor) -> None:
        """Take in a batch, ``(data, neurons)`` of truth values."""
        firing = firing.cpu()
        pattern = firing.numpy()
        words = self._words.integers(0, 2**64, size=(pattern.shape[0], 2), dtype=np.uint64)
        self._sums += (
            np.ascontiguousarray(pattern.T).astype(np.uint64) @ words
        )  # sums wrap around, as they should
        self.fired += firing.sum(dim=0)

    def blocks(self) -> list[list[int]]:
        """Neurons grouped by pattern, in order of their first member."""
        return group([(int(a), int(b)) for a, b in self._sums])


def group(keys: list[tuple[int, int]] | list[bytes]) -> list[list[int]]:
    """Indices with equal keys together, in order of first appearance.

    Examples:
        >>> group([b"a", b"b", b"a"])
        [[0, 2], [1]]
    """
    blocks: dict[object, list[int]] = {}
    for index, key in enumerate(keys):
        blocks.setdefault(key, []).append(index)
    return list(blocks.values())


class Asynchrony:
    """Mean of ``((r_i - r_i') p_i')^2`` over the data, for all pairs of ReLU neurons of a layer.

    It is what the loss pays, to leading order, for mixing two neurons that do not quite fire together.

    Examples:
        >>> pairs = Asynchrony(2)
        >>> pairs.add(torch.tensor([[1.0, 2.0], [1.0, -0.2]]))
        >>> [round(v, 6) for v in pairs.matrix().flatten().tolist()]
        [0.0, 0.02, 0.5, 0.0]
    """

    def __init__(self, neurons: int) -> None:
        self._total = torch.zeros(neurons, neurons, dtype=torch.float64)
        self._count = 0

    def add(self, preactivations: Tensor) -> None:
        """Take in a batch of preactivations."""
        p = preactivations.double().cpu()
        r = (p > 0).double()
        square = p.square()
        # (r_i - r_j)^2 = r_i (1 - 2 r_j) + r_j for 0/1 patterns; summed over data against p_j^2
        self._total += r.T @ (square * (1 - 2 * r)) + (r * square).sum(dim=0)[None, :]
        self._count += p.shape[0]

    def matrix(self) -> Tensor:
        """Entry (i, j): the price of replacing the pattern of j by that of i."""
        return self._total.clamp(min=0) / max(1, self._count)


def approximate_blocks(asynchrony: Tensor, epsilon: float) -> list[list[int]]:
    """Group neurons so that each block's total asynchrony stays within a loss scale.

    Neurons are taken in order; each joins the first block in which the sum over ordered pairs of
    ``mean ((r_i - r_i') p_i')^2`` (eq. 20, corrected) stays at most ``epsilon``.

    Args:
        asynchrony: From :meth:`Asynchrony.matrix`.
        epsilon: Loss scale.

    Examples:
        >>> approximate_blocks(torch.tensor([[0.0, 0.1, 9.0], [0.1, 0.0, 9.0], [9.0, 9.0, 0.0]]), 0.5)
        [[0, 1], [2]]
    """
    price = (asynchrony + asynchrony.T).double().numpy()
    size = price.shape[0]
    blocks: list[list[int]] = []
    spent = np.zeros(size)
    joining = np.zeros((size, size))  # entry (block, neuron): what the neuron would add to the block
    for neuron in range(size):
        fits = np.flatnonzero(spent[: len(blocks)] + joining[: len(blocks), neuron] <= epsilon)
        place = int(fits[0]) if fits.size else len(blocks)
        if place == len(blocks):
            blocks.append([])
        blocks[place].append(neuron)
        spent[place] += joining[place, neuron]
        joining[place] += price[neuron]
    return blocks


MOST_OUTPUTS = 64
"""Up to this many outputs Jacobians are exact; above, this many random probes per datum are taken."""


def output_directions(slopes: Tensor, generator: torch.Generator, most: int) -> Tensor:
    """Rows ``v`` of ``v^T df/dp`` at the last layer, ``(batch, directions, outputs)``.

    The unit vectors where there are at most ``most`` outputs, else Gaussian probes with
    ``E[v v^T] = 1``.
    """
    batch, outputs = slopes.shape
    if outputs <= most:
        units: Tensor = torch.diag_embed(slopes)
        return units
    probes = torch.randn(batch, most, outputs, generator=generator, dtype=torch.float64) / most**0.5
    directions: Tensor = probes.to(slopes) * slopes.unsqueeze(1)
    return directions


def backward(chain: Chain, slopes: list[Tensor], last: Tensor) -> Iterator[tuple[int, Tensor]]:
    """The Jacobians ``d out / d p`` from the last layer to the first, eq. 16 read from right to left.

    Args:
        chain: The network.
        slopes: Derivative of each stage's nonlinearity at its preactivations.
        last: What :func:`output_directions` gives for the last stage.

    Yields:
        Index of the stage and ``(batch, directions, outputs of the stage)``.

    Examples:
        >>> from torch import nn
        >>> from strati.landscape.mlp.sequential import as_chain
        >>> chain = as_chain(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)))
        >>> slopes = [torch.ones(5, 3), torch.ones(5, 1)]
        >>> [tuple(j.shape) for _, j in backward(chain, slopes, torch.ones(5, 1, 1))]
        [(5, 1, 1), (5, 1, 3)]
    """
    jacobian = last
    for index in range(len(chain.stages) - 1, -1, -1):
        yield index, jacobian
        if index > 0:
            jacobian = (jacobian @ chain.stages[index].weight) * slopes[index - 1].unsqueeze(1)
