"""The localised posterior ``exp(-nbeta (L(theta) - L*) - gamma/2 |theta - theta*|^2)`` and coordinates for its moves.

:class:`LocalPosterior` evaluates many replicas in one pass; the moves are in ``hmc``, ``gibbs`` and ``sgld``.
Coordinates are, up to some thousands of parameters, the eigenvectors of the curvature itself. Beyond, each linear
layer's curvature is taken for the Kronecker product of the Gram matrix of its inputs and that of the output's
Jacobians with respect to its preactivations (eq. 37 of degeneracy-in-the-loss-landscape), whose eigenvectors cost two
small decompositions. It only has to be near the truth: HMC is exact in any coordinates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from strati.core.errors import BadInputError
from strati.evaluate.models import output_tensor
from strati.landscape.llc import tuning
from strati.landscape.llc.loss_structure import (
    GradientCost,
    batchable,
    collapsed_gradients,
    gradient_cost,
    largest_quadratic,
)
from strati.landscape.llc.traces import Observer, Traces
from strati.landscape.objective import (
    Objective,
    Potential,
    check_finite,
    exact_hessian,
    gauss_newton_matrix,
    metric_jacobian,
)

if TYPE_CHECKING:
    from strati.core.results import FloatArray
    from strati.landscape.llc.sampling_plan import SamplingPlan


class Rotation(Protocol):
    """An orthogonal change of coordinates of flat parameter vectors ``(..., d)``."""

    def rotate(self, offset: Tensor) -> Tensor:
        """Into the new coordinates."""

    def unrotate(self, coordinates: Tensor) -> Tensor:
        """Back."""

    @property
    def cost(self) -> int:
        """Multiply-adds there and back."""


@dataclass(frozen=True)
class Dense:
    """Eigenvectors as columns of one matrix; ``None`` keeps the coordinates."""

    basis: Tensor | None

    def rotate(self, offset: Tensor) -> Tensor:
        """Coordinates in the eigenbasis."""
        return offset if self.basis is None else offset @ self.basis

    def unrotate(self, coordinates: Tensor) -> Tensor:
        """Back from the eigenbasis."""
        return coordinates if self.basis is None else coordinates @ self.basis.T

    @property
    def cost(self) -> int:
        """Multiply-adds there and back."""
        return 0 if self.basis is None else 2 * self.basis.numel()


@dataclass(frozen=True)
class KroneckerLayer:
    """Where a linear layer's parameters lie in the flat vector, and its two bases.

    Attributes:
        weight: Its place.
        bias: Its place, if it has one that varies.
        left: Eigenvectors of the Jacobians' Gram matrix, ``(out, out)``.
        right: Those of the inputs' (with a one for the bias), ``(in [+ 1], in [+ 1])``.
    """

    weight: slice
    bias: slice | None
    left: Tensor
    right: Tensor

    def gather(self, flat: Tensor) -> Tensor:
        """Weight and bias as one matrix ``(..., out, in [+ 1])``."""
        rows = self.left.shape[0]
        matrix = flat[..., self.weight].reshape(*flat.shape[:-1], rows, -1)
        return matrix if self.bias is None else torch.cat([matrix, flat[..., self.bias, None]], dim=-1)

    def scatter(self, matrix: Tensor, flat: Tensor) -> None:
        """Write such a matrix back into a flat vector."""
        weight = matrix if self.bias is None else matrix[..., :-1]
        flat[..., self.weight] = weight.reshape(*flat.shape[:-1], -1)
        if self.bias is not None:
            flat[..., self.bias] = matrix[..., -1]


@dataclass(frozen=True)
class Kronecker:
    """One product of two small rotations per linear layer; other parameters keep their coordinates."""

    layers: tuple[KroneckerLayer, ...]

    def rotate(self, offset: Tensor) -> Tensor:
        """``L^T W R`` in every layer."""
        out = offset.clone()
        for layer in self.layers:
            layer.scatter(layer.left.T @ layer.gather(offset) @ layer.right, out)
        return out

    def unrotate(self, coordinates: Tensor) -> Tensor:
        """``L W R^T`` in every layer."""
        out = coordinates.clone()
        for layer in self.layers:
            layer.scatter(layer.left @ layer.gather(coordinates) @ layer.right.T, out)
        return out

    @property
    def cost(self) -> int:
        """Multiply-adds there and back."""
        sides = [(len(layer.left), len(layer.right)) for layer in self.layers]
        return sum(2 * m * n * (m + n) for m, n in sides)


def kronecker(objective: Objective, points: Tensor | None = None) -> tuple[Kronecker, Tensor] | None:
    """Bases and curvatures of the linear layers of a network; ``None`` where they hold too few of its parameters.

    Args:
        objective: A network, loss and data.
        points: Parameters ``(P, d)`` over which the curvature is averaged; those of the network by default.

    Returns:
        The rotation, and the curvature ``c k_i g_j`` of every new coordinate (``c`` is 2 for squared errors, 1 for
        divergences; other parameters get the mean).

    Examples:
        >>> from strati.landscape.objective import behavioural_loss
        >>> rotation, curvature = kronecker(behavioural_loss(nn.Linear(1, 1, bias=False), torch.tensor([[2.0]])))
        >>> curvature.tolist()  # 2 x^2
        [8.0]
    """
    flat = objective.flat
    places: dict[str, slice] = {}
    start = 0
    for name, size in zip(flat.names, flat.sizes, strict=True):
        places[name] = slice(start, start + size)
        start += size
    modules = {
        name: module
        for name, module in flat.module.named_modules()
        if isinstance(module, nn.Linear) and _of(name, "weight") in places
    }
    inside = sum(p.numel() for m in modules.values() for p in m.parameters(recurse=False))
    if inside < tuning.KRONECKER_SHARE * flat.size:
        return None
    squared = objective.name is not None and objective.name.squared
    places_seen = flat.theta.detach()[None] if points is None else points
    every = [_grams(objective, modules, squared, theta) for theta in places_seen]
    grams = {
        name: tuple(torch.stack([factors_at[name][k] for factors_at in every]).mean(0) for k in (0, 1))
        for name in every[0]
    }
    curvature = torch.full_like(flat.theta, torch.nan)
    layers = []
    for name, (inputs, jacobians) in grams.items():
        bias = places.get(_of(name, "bias"))
        if bias is None:
            inputs = inputs[:-1, :-1]
        (k, left), (g, right) = (torch.linalg.eigh(m) for m in (jacobians, inputs))
        layer = KroneckerLayer(places[_of(name, "weight")], bias, left, right)
        layer.scatter((2.0 if squared else 1.0) * k.clamp(min=0)[:, None] * g.clamp(min=0), curvature)
        layers.append(layer)
    return Kronecker(tuple(layers)), torch.where(curvature.isnan(), curvature.nanmean(), curvature)


def _grams(
    objective: Objective, modules: dict[str, nn.Linear], squared: bool, theta: Tensor
) -> dict[str, tuple[Tensor, Tensor]]:
    """For each layer the mean Gram matrices of its inputs (a one appended) and of the output's Jacobians."""
    flat = objective.flat
    x: Any = objective.x
    few = slice(0, tuning.KRONECKER_ROWS)
    x = x[few] if isinstance(x, Tensor) else {k: v[few] for k, v in x.items()}
    weights = {k: v.detach() for k, v in flat.fixed.items()} | flat.split(theta)
    with _caught(modules) as (inputs, before), torch.enable_grad():
        output = output_tensor(
            functional_call(flat.module, weights, (x,))
            if isinstance(x, Tensor)
            else functional_call(flat.module, weights, (), x)
        )
        rows = output.reshape(-1, output.shape[-1])
        captured = {}
        total = {n: p.new_zeros(p.shape[-1], p.shape[-1]) for n, p in before.items()}
        for cotangent in _cotangents(rows.detach(), squared):
            slopes = torch.autograd.grad(rows, list(before.values()), cotangent, retain_graph=True)
            for name, slope in zip(before, slopes, strict=True):
                flattened = slope.reshape(-1, slope.shape[-1])
                total[name] += flattened.T @ flattened / len(rows)
        for name, value in inputs.items():
            a = value.detach().reshape(-1, value.shape[-1])
            folded = torch.cat([a, a.new_ones(len(a), 1)], dim=1)
            captured[name] = (folded.T @ folded / len(a), total[name])
    return captured


def _cotangents(output: Tensor, squared: bool) -> Iterator[Tensor]:
    """Vectors whose outer products add up to the output's metric: the identity, or ``diag p - p p^T``."""
    outputs = output.shape[-1]
    p = None if squared else torch.softmax(output, dim=-1)
    if outputs <= tuning.KRONECKER_OUTPUTS:
        directions = torch.eye(outputs, dtype=output.dtype, device=output.device)
    else:
        generator = torch.Generator().manual_seed(0)
        signs = torch.randint(0, 2, (tuning.KRONECKER_OUTPUTS, outputs), generator=generator).to(output)
        directions = (2 * signs - 1) / tuning.KRONECKER_OUTPUTS**0.5
    for direction in directions:
        vector = direction.expand_as(output)
        if p is not None:
            root = p.sqrt() * vector
            vector = root - p * root.sum(-1, keepdim=True)  # (diag sqrt p - p sqrt p^T) e
        yield vector


@contextmanager
def _caught(modules: dict[str, nn.Linear]) -> Iterator[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Each layer's input and output of the next forward pass, the output as a leaf of its own gradient."""
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}

    def hook(name: str) -> Any:
        def keep(_: nn.Module, given: tuple[Tensor, ...], out: Tensor) -> Tensor:
            inputs[name] = given[0]
            outputs[name] = out if out.requires_grad else out.requires_grad_(True)
            return outputs[name]

        return keep

    handles = [module.register_forward_hook(hook(name)) for name, module in modules.items()]
    try:
        yield inputs, outputs
    finally:
        for handle in handles:
            handle.remove()


def _of(module: str, parameter: str) -> str:
    return f"{module}.{parameter}" if module else parameter


@dataclass(frozen=True)
class LocalPosterior:
    """The localised posterior as seen from the minimum.

    Attributes:
        potential: The loss as a function of the flat parameters.
        theta: The parameters given.
        gamma: Localisation.
        baseline: ``L* = L(theta)``.
        rotation: To coordinates in which the curvature at ``theta`` is about diagonal.
        curvature: That diagonal, nothing negative.
        blocks: Sizes of the parameter tensors in ``theta``.
        cost: Of a batched gradient, by the cost model.
        quadratic: Of a few parameters, those in which together the loss is quadratic, the others held fixed.
        evaluate: Excess loss and slope at offsets ``(..., d)`` from ``theta``.
        observer: Sees the kept draws.
    """

    potential: Potential
    theta: Tensor
    gamma: float
    baseline: float
    rotation: Rotation
    curvature: Tensor
    blocks: tuple[int, ...]
    cost: GradientCost
    quadratic: tuple[int, ...]
    evaluate: Callable[[Tensor], tuple[Tensor, Tensor]] = field(repr=False)
    observer: Observer | None = field(default=None, repr=False)

    @property
    def size(self) -> int:
        """Number of parameters."""
        return int(self.theta.numel())

    def rotate(self, offset: Tensor) -> Tensor:
        """Coordinates in the eigenbasis."""
        return self.rotation.rotate(offset)

    def unrotate(self, coordinates: Tensor) -> Tensor:
        """Back from the eigenbasis."""
        return self.rotation.unrotate(coordinates)

    def controls(self, offset: Tensor, slope: Tensor, nbeta: Tensor) -> Tensor:
        """Functions whose mean is zero under the posterior, for taking noise out of averages.

        Integration by parts gives ``<delta_i d_i E> = 1`` in every direction for ``E = nbeta L + gamma/2 |delta|^2``;
        summed over blocks of directions when there are many.
        """
        force = nbeta[:, None, None] * slope + self.gamma * offset
        if self.size <= tuning.VIRIAL_LIMIT:
            # Also with the fields delta_i^3 and delta_i ln delta_i^2: they follow the length of valleys that meet.
            virial = torch.cat([self.rotate(force) * self.rotate(offset), force * offset], dim=-1)
            square = torch.cat([self.rotate(offset) ** 2, offset**2], dim=-1)
            logarithm = square.clamp(min=1e-300).log()
            return torch.cat([virial - 1, square * (virial - 3), logarithm * (virial - 1) - 2], dim=-1)
        pieces = torch.split(force * offset, list(self.blocks), dim=-1)
        return torch.stack([p.sum(-1) - p.shape[-1] for p in pieces], dim=-1)


def local_posterior(potential: Potential, theta: Tensor, gamma: float) -> LocalPosterior:
    """Prepare a potential around a point for sampling: baseline, curvature, batched evaluation.

    Raises:
        BadInputError: The potential is not finite at ``theta`` or does not depend on it differentiably.

    Examples:
        >>> t = local_posterior(lambda w: (w**2).sum(), torch.zeros(2), 1.0)
        >>> excess, slope = t.evaluate(torch.ones(3, 2))
        >>> excess.tolist(), t.curvature.tolist()
        ([2.0, 2.0, 2.0], [2.0, 2.0])
    """
    baseline = check_point(potential, theta)
    chunk = replicas_per_pass(potential)
    batched = _batched(potential, theta)

    def evaluate(offset: Tensor) -> tuple[Tensor, Tensor]:
        points = (theta + offset.reshape(-1, theta.numel())).detach()
        values, slopes = [], []
        for part in torch.split(points, chunk):
            leaf = part.requires_grad_(True)
            value = batched(leaf)
            (slope,) = torch.autograd.grad(value.sum(), leaf)
            values.append(value.detach() - baseline)
            slopes.append(slope)
        return torch.cat(values).reshape(offset.shape[:-1]), torch.cat(slopes).reshape(offset.shape)

    _check_slope(evaluate, theta)
    rotation, curvature = _curvature(potential, theta)
    blocks = potential.flat.sizes if isinstance(potential, Objective) else (int(theta.numel()),)
    if len(blocks) > 16:
        blocks = (int(theta.numel()),)
    largest = largest_quadratic(potential, theta) if theta.numel() <= tuning.VIRIAL_LIMIT else ()
    quadratic = largest if len(largest) < theta.numel() else ()
    cost = gradient_cost(potential, theta, turning=rotation.cost)
    cost = cost._replace(mode_jump=collapsed_gradients(len(quadratic))) if quadratic else cost
    return LocalPosterior(
        potential, theta, gamma, baseline, rotation, curvature, blocks, cost, quadratic, evaluate
    )


class TraceRecorder:
    """The kept draws of a sampler on all data.

    Args:
        target: What is sampled.
        plan: How.
        nbeta: The temperatures ``(K,)``.
        main: Index of the one asked for.
    """

    def __init__(self, target: LocalPosterior, plan: SamplingPlan, nbeta: Tensor, main: int) -> None:
        self.target, self.plan, self.nbeta, self.main = target, plan, nbeta, main
        self._excess: list[Tensor] = []
        self._spread: list[Tensor] = []
        self._controls: list[Tensor] = []
        self._total: Tensor | None = None

    def __len__(self) -> int:
        return len(self._excess)

    def add(self, offset: Tensor, excess: Tensor, slope: Tensor) -> None:
        """Keep replicas ``(K, C, d)``."""
        self._excess.append(excess)
        if self.target.observer is not None:
            self.target.observer.observe(0, offset[self.main])
        self._total = (
            offset[self.main].clone() if self._total is None else self._total.add_(offset[self.main])
        )
        self._spread.append((offset**2).sum(-1))
        self._controls.append(self.target.controls(offset, slope, self.nbeta).to(torch.float32))

    @property
    def mean_offset(self) -> Tensor:
        """Mean position at the temperature asked for, ``(1, d)``."""
        assert self._total is not None
        return self._total.mean(0)[None] / len(self)

    def traces(
        self,
        gradients: int,
        warmup: int,
        *,
        acceptance: FloatArray | None = None,
        centre: float | None = None,
    ) -> Traces:
        """The draws so far."""
        return Traces(
            nbeta=array(self.nbeta),
            main=self.main,
            gamma=self.target.gamma,
            baseline=self.target.baseline,
            excess=array(torch.stack(self._excess).permute(1, 2, 0)),
            spread=array(torch.stack(self._spread).permute(1, 2, 0)),
            controls=array(torch.stack(self._controls).permute(1, 2, 0, 3)),
            parameters=self.target.size,
            sampler=self.plan.sampler,
            acceptance=np.ones(len(self.nbeta)) if acceptance is None else acceptance,
            gradients=gradients,
            global_start=self.plan.exchange,
            centre=centre,
            warmup=warmup,
            plan=self.plan,
        )


def array(tensor: Tensor) -> FloatArray:
    """A tensor as an array of doubles."""
    doubles: FloatArray = tensor.detach().double().cpu().numpy()
    return doubles


def adapted(target: LocalPosterior, offsets: Tensor) -> LocalPosterior | None:
    """The same posterior in coordinates of the curvature averaged over some places, ``(C, d)`` offsets.

    Far from the minimum, where the chains are, a network is curved in other directions than at it, and more so.
    ``None`` where that is not known in closed form, or takes too long.

    Examples:
        >>> from strati.landscape.objective import behavioural_loss
        >>> loss = behavioural_loss(torch.nn.Linear(9, 1, bias=False), torch.eye(9))
        >>> target = local_posterior(loss, loss.flat.theta, 1.0)
        >>> moved = adapted(target, torch.ones(2, 9))
        >>> torch.allclose(moved.curvature, target.curvature)  # a linear network is curved alike everywhere
        True
    """
    potential = target.potential
    if not isinstance(potential, Objective) or potential.name is None or target.size <= tuning.VIRIAL_LIMIT:
        return None
    if target.size > tuning.DENSE_LIMIT:
        factors = kronecker(potential, target.theta + offsets[: tuning.CURVATURE_PLACES])
        return None if factors is None else replace(target, rotation=factors[0], curvature=factors[1])
    work = target.size**2 * (potential.outputs + tuning.PER_EIGENVECTORS * target.size)
    places = offsets[
        : max(
            1, min(tuning.CURVATURE_PLACES, int(tuning.CURVATURE_WORK / (target.size**2 * potential.outputs)))
        )
    ]
    if work > tuning.CURVATURE_WORK:
        return None
    kind = "mse" if potential.name.squared else "kl"
    matrices = [
        gauss_newton_matrix(potential.flat, potential.x, kind=kind, theta=target.theta + place)
        for place in places
    ]
    matrix = torch.stack(matrices).mean(0)
    if not bool(torch.isfinite(matrix).all()):
        return None
    values, vectors = torch.linalg.eigh(matrix)
    return replace(target, rotation=Dense(vectors), curvature=values.clamp(min=0))


def check_point(potential: Potential, theta: Tensor) -> float:
    """The loss at the given parameters.

    Raises:
        BadInputError: They are no flat tensor, or the loss is not a finite scalar there.
    """
    if theta.ndim != 1 or theta.numel() == 0:
        raise BadInputError("theta", f"must be a flat tensor, not one of shape {tuple(theta.shape)}")
    return check_finite(potential, theta, "loss" if isinstance(potential, Objective) else "potential")


def rounding_limit(target: LocalPosterior) -> float:
    """The inverse temperature at which ``nbeta (L - L*)`` drowns in the rounding of ``L*``.

    Examples:
        >>> square = local_posterior(lambda w: (w**2).sum(), torch.zeros(1, dtype=torch.float64), 1.0)
        >>> 1e15 < rounding_limit(square) < 1e18
        True
    """
    precision = torch.finfo(target.theta.dtype).eps
    return 1e-2 / (precision * max(abs(target.baseline), 1e-3))


def _batched(potential: Potential, theta: Tensor) -> Callable[[Tensor], Tensor]:
    """Many parameter vectors in one pass; one after the other where the function cannot be batched."""

    def scalar(t: Tensor) -> Tensor:
        return potential(t).reshape(())

    if batchable(potential, theta):
        return vmap(scalar, randomness="error")
    return lambda points: torch.stack([scalar(p) for p in points])


def replicas_per_pass(potential: Potential) -> int:
    """Replicas per pass, so that activations stay within some hundred megabytes."""
    if not isinstance(potential, Objective):
        return 1 << 20
    widest = max(max(s) if s else 1 for s in potential.flat.shapes)
    return max(1, 16_000_000 // max(1, potential.rows * widest))


def _check_slope(evaluate: Callable[[Tensor], tuple[Tensor, Tensor]], theta: Tensor) -> None:
    try:
        _, slope = evaluate(theta.new_zeros(1, theta.numel()))
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise BadInputError(
            "potential", f"cannot be differentiated at the given parameters ({reason})"
        ) from error
    if not bool(torch.isfinite(slope).all()):
        raise BadInputError("loss", "its gradient is not finite at the given parameters")


def _curvature(potential: Potential, theta: Tensor) -> tuple[Rotation, Tensor]:
    """Eigenbasis and eigenvalues of the Hessian, of the Gauss-Newton matrix, or of its Kronecker factors."""
    size = theta.numel()
    plain = Dense(None), torch.zeros_like(theta)
    named = isinstance(potential, Objective) and potential.name is not None
    if size > tuning.DENSE_LIMIT:
        factors = kronecker(potential) if isinstance(potential, Objective) and named else None
        return plain if factors is None else factors
    if isinstance(potential, Objective) and potential.name is not None and size > tuning.VIRIAL_LIMIT:
        kind = "mse" if potential.name.squared else "kl"
        matrix = gauss_newton_matrix(potential.flat, potential.x, kind=kind)
    else:
        try:
            matrix = exact_hessian(potential, theta)
        except RuntimeError:  # twice differentiable is more than a sampler needs
            return plain
    if not bool(torch.isfinite(matrix).all()):
        return plain
    values, vectors = torch.linalg.eigh(matrix)
    return Dense(vectors), values.clamp(min=0)


def default_gamma(theta: Tensor) -> float:
    """Return ``max(1, w N / |theta*|^2)`` with ``w = min(1, N / 2500)``, the localisation of a network of any size.

    Data hold most weights of a small network, and ``gamma`` 1 only keeps them from running away. Most directions of a
    large one are flat: under ``exp(-gamma/2 |theta - theta*|^2)`` each weight then moves by about the root mean square
    of the weights. The rule is continuous in between.

    Examples:
        >>> [default_gamma(torch.full((size,), 0.1)) for size in (5000, 250, 9)]
        [100.0, 10.0, 1.0]
    """
    norm, size = float(theta.double().square().sum()), theta.numel()
    share = min(1.0, size / tuning.LOCALISED_FROM)
    return max(1.0, float(f"{share * size / norm:.6g}")) if norm > 0 else 1.0


def curvature_spectrum(objective: Objective) -> FloatArray | None:
    """Eigenvalues of the Gauss-Newton matrix of a named loss, ascending; ``None`` if there are too many.

    Examples:
        >>> from strati.landscape.objective import behavioural_loss
        >>> loss = behavioural_loss(nn.Linear(1, 1, bias=False), torch.tensor([[1.0], [2.0]]))
        >>> curvature_spectrum(loss)
        array([5.])
    """
    flat = objective.flat
    if objective.name is None:
        return None
    kind = "mse" if objective.name.squared else "kl"
    if flat.size <= tuning.DENSE_LIMIT:
        values = torch.linalg.eigvalsh(gauss_newton_matrix(flat, objective.x, kind=kind))
        spectrum: FloatArray = np.maximum(values.double().cpu().numpy(), 0.0)
        return spectrum
    # Many parameters but few data: the same eigenvalues, but for zeros, from products between the data.
    if (
        objective.target.numel() > tuning.DENSE_LIMIT
        or objective.target.numel() * flat.size > tuning.JACOBIAN_NUMBERS
    ):
        return None
    jacobian, samples = metric_jacobian(flat, flat.theta, objective.x, kind=kind)
    scale = 2.0 / objective.rows if kind == "mse" else 1.0 / samples
    few = np.maximum(torch.linalg.eigvalsh(scale * (jacobian @ jacobian.T)).double().cpu().numpy(), 0.0)
    return np.concatenate([np.zeros(max(0, flat.size - len(few))), few])
