"""The localised posterior ``exp(-nbeta (L(theta) - L*) - gamma/2 |theta - theta*|^2)``, evaluated in batches.

:class:`LocalPosterior` evaluates it for many replicas in one pass. The moves are in ``hmc``, ``gibbs`` and ``sgld``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.func import vmap

from strati.core.errors import BadInputError
from strati.landscape.llc.config import DENSE_LIMIT, LOCALISED_FROM, VIRIAL_LIMIT, LLCConfig
from strati.landscape.llc.preconditioner import Dense, Rotation, kronecker
from strati.landscape.llc.quadratic import batchable, largest_quadratic
from strati.landscape.llc.sampling_plan import GradientCost, collapsed_gradients, gradient_cost
from strati.landscape.llc.traces import Observer
from strati.landscape.objective import Objective, Potential, check_finite, exact_hessian, gauss_newton_matrix

_PLACES = 8  # over which the curvature is averaged
_WORK = 5e9  # multiply-adds that this may take
_PER_EIGENVECTORS = 20  # multiply-adds per cubed size of a matrix, for its eigenvectors


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
        if self.size <= VIRIAL_LIMIT:
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
    largest = largest_quadratic(potential, theta) if theta.numel() <= VIRIAL_LIMIT else ()
    quadratic = largest if len(largest) < theta.numel() else ()
    cost = gradient_cost(potential, theta, turning=rotation.cost)
    cost = cost._replace(leap=collapsed_gradients(len(quadratic))) if quadratic else cost
    return LocalPosterior(
        potential, theta, gamma, baseline, rotation, curvature, blocks, cost, quadratic, evaluate
    )


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
    if not isinstance(potential, Objective) or potential.name is None or target.size <= VIRIAL_LIMIT:
        return None
    if target.size > DENSE_LIMIT:
        factors = kronecker(potential, target.theta + offsets[:_PLACES])
        return None if factors is None else replace(target, rotation=factors[0], curvature=factors[1])
    work = target.size**2 * (potential.outputs + _PER_EIGENVECTORS * target.size)
    places = offsets[: max(1, min(_PLACES, int(_WORK / (target.size**2 * potential.outputs))))]
    if work > _WORK:
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
    if size > DENSE_LIMIT:
        factors = kronecker(potential) if isinstance(potential, Objective) and named else None
        return plain if factors is None else factors
    if isinstance(potential, Objective) and potential.name is not None and size > VIRIAL_LIMIT:
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


def localised(config: LLCConfig, potential: Potential, theta: Tensor) -> LLCConfig:
    """Return the settings with the localisation decided: :func:`default_gamma` for a network, 1 for a function.

    Examples:
        >>> localised(LLCConfig(), lambda w: (w**2).sum(), torch.zeros(2)).gamma
        1.0
    """
    if config.gamma is not None:
        return config
    return replace(config, gamma=default_gamma(theta) if isinstance(potential, Objective) else 1.0)


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
    share = min(1.0, size / LOCALISED_FROM)
    return max(1.0, float(f"{share * size / norm:.6g}")) if norm > 0 else 1.0
