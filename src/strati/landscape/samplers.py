"""What is sampled and what is kept: the localised posterior, its traces, the settings.

The target at inverse temperature ``nbeta`` is ``exp(-nbeta (L(theta) - L*) - gamma/2 |theta - theta*|^2)``.
:class:`Target` evaluates it for many replicas in one batched pass; :class:`Traces` keeps the draws on
(temperature, chain, draw) axes. The moves are in ``hmc`` and ``sgld``, what is made of the traces in ``llc``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from strati.errors import BadInputError, require
from strati.landscape.behaviour import Objective, Potential, check_finite, exact_hessian, gauss_newton_matrix

if TYPE_CHECKING:
    from strati.types import FloatArray

EXCHANGE_LIMIT = 64
"""Up to so many parameters the whole ladder from the localisation down is sampled, with exchange."""

DENSE_LIMIT = 2500
"""Up to so many parameters the curvature is diagonalised to precondition the moves."""

VIRIAL_LIMIT = 8
"""Up to so many parameters each direction has a control variate of its own."""


class Sampler(StrEnum):
    """How the posterior is sampled."""

    AUTO = "auto"
    HMC = "hmc"
    SGLD = "sgld"
    RMSPROP = "rmsprop-sgld"


@dataclass(frozen=True)
class LLCConfig:
    """Settings of the sampler; the defaults suit problems from one to thousands of parameters.

    Attributes:
        nbeta: Inverse temperature; ``None`` means ``n / ln n`` for data and 1e4 for a plain potential.
        gamma: Localisation, ``gamma/2 |theta - theta*|^2``.
        chains: Independent chains; ``None`` means 64 below nine parameters, 16 to 64, 8 beyond.
        draws: Kept draws per chain; ``None`` means 400 below nine parameters, 200 beyond.
        warmup: Iterations before the first kept draw, in which step sizes are found.
        leapfrog: Longest trajectory in steps; ``None`` means 6 below nine parameters, 10 beyond.
        ladder: Also sample colder temperatures and extrapolate (``asymptotic``).
        coldest: The ladder's last inverse temperature; ``None`` means as cold as the problem allows.
        seed: Seed of all chance.
        sampler: ``hmc`` (all data, Metropolis-corrected), ``sgld`` or ``rmsprop-sgld`` (minibatches);
            ``auto`` is ``hmc`` unless a full pass is unaffordable.
        batch: Data per minibatch for SGLD.
        step: Step size of SGLD; ``None`` calibrates it.
        max_rhat: Above this R-hat no value is given.
    """

    nbeta: float | None = None
    gamma: float = 1.0
    chains: int | None = None
    draws: int | None = None
    warmup: int = 60
    leapfrog: int | None = None
    ladder: bool = True
    coldest: float | None = None
    seed: int = 0
    sampler: str = "auto"
    batch: int = 256
    step: float | None = None
    max_rhat: float = 1.1

    def __post_init__(self) -> None:
        for name in ("nbeta", "gamma", "coldest", "step"):
            value = getattr(self, name)
            if value is not None and not (np.isfinite(value) and value > 0):
                raise BadInputError(name, f"must be a positive number, not {value}")
        for name, least in (("chains", 2), ("draws", 10), ("warmup", 10), ("leapfrog", 1), ("batch", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise BadInputError(name, f"must be at least {least}, not {value}")
        if self.sampler not in set(Sampler):
            raise BadInputError(self.sampler, f"no such sampler; there are: {', '.join(Sampler)}")

    def chains_for(self, size: int) -> int:
        """How many chains a problem of this size gets."""
        return self.chains or (64 if size <= VIRIAL_LIMIT else 16 if size <= EXCHANGE_LIMIT else 8)

    def draws_for(self, size: int) -> int:
        """How many draws a problem of this size keeps per chain."""
        return self.draws or (400 if size <= VIRIAL_LIMIT else 200)

    def leapfrog_for(self, size: int) -> int:
        """The longest trajectory for a problem of this size."""
        return self.leapfrog or (6 if size <= VIRIAL_LIMIT else 10)


@dataclass(frozen=True)
class Target:
    """The localised posterior as seen from the minimum.

    Attributes:
        potential: The loss as a function of the flat parameters.
        theta: The parameters given.
        gamma: Localisation.
        baseline: ``L* = L(theta)``.
        basis: Eigenvectors (columns) of the curvature at ``theta``; ``None`` keeps the coordinates.
        curvature: The eigenvalues, none negative.
        blocks: Sizes of the parameter tensors in ``theta``.
        evaluate: Excess loss and slope at offsets ``(..., d)`` from ``theta``.
    """

    potential: Potential
    theta: Tensor
    gamma: float
    baseline: float
    basis: Tensor | None
    curvature: Tensor
    blocks: tuple[int, ...]
    evaluate: Callable[[Tensor], tuple[Tensor, Tensor]] = field(repr=False)

    @property
    def size(self) -> int:
        """Number of parameters."""
        return int(self.theta.numel())

    def rotate(self, offset: Tensor) -> Tensor:
        """Coordinates in the eigenbasis."""
        return offset if self.basis is None else offset @ self.basis

    def unrotate(self, coordinates: Tensor) -> Tensor:
        """Back from the eigenbasis."""
        return coordinates if self.basis is None else coordinates @ self.basis.T

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


@dataclass(frozen=True)
class Traces:
    """Draws of the sampler, kept: every estimate is recomputed from them at once.

    Attributes:
        nbeta: The temperatures, ascending, ``(K,)``.
        main: Index of the temperature that was asked for.
        gamma: Localisation.
        baseline: ``L*``.
        excess: ``L - L*``, ``(K, chain, draw)``.
        spread: ``|theta - theta*|^2``, same shape.
        controls: Zero-mean functions of the draws, ``(K, chain, draw, m)``.
        parameters: Number of parameters that were varied.
        sampler: Which sampler drew them.
        acceptance: Mean acceptance per temperature, ``(K,)``.
        gradients: Gradients of one replica that were computed in all.
        global_start: Whether the chains came down from the localisation alone, or started at the minimum.
    """

    nbeta: FloatArray
    main: int
    gamma: float
    baseline: float
    excess: FloatArray
    spread: FloatArray
    controls: FloatArray
    parameters: int
    sampler: str
    acceptance: FloatArray
    gradients: int
    global_start: bool

    @property
    def chains(self) -> int:
        """Number of chains."""
        return int(self.excess.shape[1])

    @property
    def draws(self) -> int:
        """Kept draws per chain."""
        return int(self.excess.shape[2])

    def lambda_trace(self, index: int | None = None) -> FloatArray:
        """``nbeta (L - L*)`` on (chain, draw) axes, at the main temperature or another."""
        k = self.main if index is None else index
        trace: FloatArray = self.nbeta[k] * self.excess[k]
        return trace

    def to_arviz(self) -> Any:
        """The main temperature's draws as an ``arviz.InferenceData``.

        Raises:
            MissingExtraError: arviz is not installed.
        """
        arviz = require("arviz", "arviz", "converting traces")
        return arviz.from_dict(
            posterior={
                "llc": self.lambda_trace(),
                "loss": self.baseline + self.excess[self.main],
                "distance": np.sqrt(self.spread[self.main]),
            }
        )


def target(potential: Potential, theta: Tensor, gamma: float) -> Target:
    """Prepare a potential around a point for sampling: baseline, curvature, batched evaluation.

    Raises:
        BadInputError: The potential is not finite at ``theta`` or does not depend on it differentiably.

    Examples:
        >>> t = target(lambda w: (w**2).sum(), torch.zeros(2), 1.0)
        >>> excess, slope = t.evaluate(torch.ones(3, 2))
        >>> excess.tolist(), t.curvature.tolist()
        ([2.0, 2.0, 2.0], [2.0, 2.0])
    """
    if theta.ndim != 1 or theta.numel() == 0:
        raise BadInputError("theta", f"must be a flat tensor, not one of shape {tuple(theta.shape)}")
    baseline = check_finite(potential, theta, "loss" if isinstance(potential, Objective) else "potential")
    chunk = _chunk(potential)
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
    basis, curvature = _curvature(potential, theta)
    blocks = potential.flat.sizes if isinstance(potential, Objective) else (int(theta.numel()),)
    if len(blocks) > 16:
        blocks = (int(theta.numel()),)
    return Target(potential, theta, gamma, baseline, basis, curvature, blocks, evaluate)


def _batched(potential: Potential, theta: Tensor) -> Callable[[Tensor], Tensor]:
    """Many parameter vectors in one pass; one after the other where the function cannot be batched."""

    def scalar(t: Tensor) -> Tensor:
        return potential(t).reshape(())

    together = vmap(scalar, randomness="error")
    try:
        with torch.no_grad():
            together(torch.stack([theta, theta]))
    except (
        Exception
    ):  # whatever vmap cannot trace (branches on values, in-place writes) still runs one by one
        return lambda points: torch.stack([scalar(p) for p in points])
    return together


def _chunk(potential: Potential) -> int:
    """Replicas per pass, so that activations stay within some hundred megabytes."""
    if not isinstance(potential, Objective):
        return 1 << 20
    widest = max(max(s) if s else 1 for s in potential.flat.shapes)
    return max(1, 16_000_000 // max(1, potential.rows * widest))


def _check_slope(evaluate: Callable[[Tensor], tuple[Tensor, Tensor]], theta: Tensor) -> None:
    try:
        _, slope = evaluate(torch.zeros(1, theta.numel(), dtype=theta.dtype))
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise BadInputError(
            "potential", f"cannot be differentiated at the given parameters ({reason})"
        ) from error
    if not bool(torch.isfinite(slope).all()):
        raise BadInputError("loss", "its gradient is not finite at the given parameters")


def _curvature(potential: Potential, theta: Tensor) -> tuple[Tensor | None, Tensor]:
    """Eigenbasis and eigenvalues of the Hessian, or the Gauss-Newton matrix of a behavioural loss."""
    size = theta.numel()
    if size > DENSE_LIMIT:
        return None, torch.zeros_like(theta)
    if isinstance(potential, Objective) and potential.name is not None and size > EXCHANGE_LIMIT:
        kind = "mse" if potential.name.value.endswith("mse") else "kl"
        matrix = gauss_newton_matrix(potential.flat, potential.x, kind=kind)
    else:
        try:
            matrix = exact_hessian(potential, theta)
        except (
            RuntimeError
        ):  # twice differentiable is more than a sampler needs: go on without a preconditioner
            return None, torch.zeros_like(theta)
    if not bool(torch.isfinite(matrix).all()):
        return None, torch.zeros_like(theta)
    values, vectors = torch.linalg.eigh(matrix)
    return vectors, values.clamp(min=0)
