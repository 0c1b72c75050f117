"""What is sampled and what is kept: the localised posterior, its traces, the settings.

The target at inverse temperature ``nbeta`` is ``exp(-nbeta (L(theta) - L*) - gamma/2 |theta - theta*|^2)``.
:class:`Target` evaluates it for many replicas in one batched pass; :class:`Traces` keeps the draws on
(temperature, chain, draw) axes. The moves are in ``hmc`` and ``sgld``, what is made of the traces in ``llc``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._python_dispatch import TorchDispatchMode

from strati.errors import BadInputError, require
from strati.landscape.behaviour import Objective, Potential, check_finite, exact_hessian, gauss_newton_matrix
from strati.landscape.sampling.preconditioner import Dense, Rotation, kronecker

if TYPE_CHECKING:
    from strati.types import FloatArray

DENSE_LIMIT = 2500
"""Up to so many parameters the curvature is diagonalised to precondition the moves."""

VIRIAL_LIMIT = 8
"""Up to so many parameters each direction has a control variate of its own, and replicas exchange places along
the whole ladder from the localisation down, where that is affordable."""

BUDGET = 8.0
"""Seconds (of the cost model, so the same on every machine) that unset numbers of chains and draws are cut to."""

_LARGE_BUDGET = 4 * BUDGET  # for networks too large to know their curvature exactly
_RUNGS = 3
_EXCHANGED = 40  # temperatures of a whole ladder, about


_PER_MOVE = 4e-4
_PER_CALL = 2e-5
_PER_NUMBER = 2e-9
_PER_PRODUCT = 0.8e-10


class Sampler(StrEnum):
    """How the posterior is sampled."""

    AUTO = "auto"
    HMC = "hmc"
    GIBBS = "gibbs"
    SGLD = "sgld"
    RMSPROP = "rmsprop-sgld"


@dataclass(frozen=True)
class LLCConfig:
    """Settings of the sampler; the defaults suit problems from one to thousands of parameters.

    Attributes:
        nbeta: Inverse temperature; ``None`` means ``n / ln n`` for data and 1e4 for a plain potential.
        gamma: Localisation, ``gamma/2 |theta - theta*|^2``; ``None`` means 1, and for networks of more than 2,500
            parameters ``N / |theta*|^2`` if that is more: each weight then moves about its own size.
        chains: Independent chains; ``None`` means 32 below nine parameters, 64 beyond, or what is affordable.
        draws: Kept draws per chain; ``None`` means 200 below nine parameters, 100 beyond, fewer if costly.
        warmup: Iterations before the first kept draw, in which step sizes are found.
        leapfrog: Longest trajectory in steps; ``None`` means 6 below nine parameters, 10 beyond.
        ladder: Also sample colder temperatures and extrapolate (``asymptotic``); ``None`` means where affordable.
        coldest: The ladder's last inverse temperature; ``None`` means as cold as the problem allows.
        seed: Seed of all chance.
        sampler: ``hmc`` (all data, Metropolis-corrected), ``gibbs`` (all data, where the loss is quadratic in each
            layer given the others), ``sgld`` or ``rmsprop-sgld`` (minibatches); ``auto`` is ``gibbs`` where that
            is possible, else ``hmc``, and ``sgld`` where a full pass is unaffordable.
        batch: Data per minibatch for SGLD.
        step: Step size of SGLD; ``None`` calibrates it.
        max_rhat: Above this R-hat no value is given.
    """

    nbeta: float | None = None
    gamma: float | None = None
    chains: int | None = None
    draws: int | None = None
    warmup: int = 60
    leapfrog: int | None = None
    ladder: bool | None = None
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

    def plan(self, size: int, cost: Cost, *, rungs: int | None = None) -> Plan:
        """What is set, and for the rest the most that the cost model's budget allows.

        Args:
            size: Number of parameters.
            cost: Of a batched gradient.
            rungs: Sample just so many temperatures, without exchange.
        """
        small, large = size <= VIRIAL_LIMIT, size > DENSE_LIMIT
        leapfrog = self.leapfrog or (6 if small else 20 if large else 10)
        wanted = ([False] if large else [True, False]) if self.ladder is None else [self.ladder]
        exchanged = [Plan(c, d, leapfrog, True, wanted[0]) for c, d in ((32, 200), (16, 150))]
        local = [
            Plan(c, d, leapfrog, False, ladder)
            for ladder in wanted
            for c, d in ((64, 100), (32, 100), (16, 100), (8, 100), (8, 80), (4, 80))
            if not (large and c > 8)
            if not (ladder and self.ladder is None and c < 8)
        ]
        candidates = (exchanged if small and rungs is None else []) + local

        def affordable(plan: Plan) -> bool:
            # More chains than the default are the caller's wish; they do not change what is sampled.
            asked = self._own(plan).seconds(self.warmup, cost, rungs)
            allowed = _LARGE_BUDGET if large else BUDGET
            return min(asked, plan.seconds(self.warmup, cost, rungs) if plan.exchange else asked) <= allowed

        return self._own(next((p for p in candidates if affordable(p)), candidates[-1]))

    def _own(self, plan: Plan) -> Plan:
        return plan._replace(
            chains=self.chains or plan.chains,
            draws=self.draws or plan.draws,
            leapfrog=self.leapfrog or plan.leapfrog,
        )


class Cost(NamedTuple):
    """Seconds per batched gradient, and per replica in it, on a machine of 2020: a model, hence reproducible."""

    call: float
    replica: float


class Plan(NamedTuple):
    """How much is sampled.

    ``exchange`` is whether replicas come down the whole ladder and exchange places, or start at the minimum.
    """

    chains: int
    draws: int
    leapfrog: int
    exchange: bool
    ladder: bool

    def seconds(self, warmup: int, cost: Cost, rungs: int | None = None) -> float:
        """What the cost model expects."""
        moves = (1 + self.leapfrog) / 2
        if self.exchange:
            together = _EXCHANGED * self.chains
            alone = _EXCHANGED * 8 * (moves + 1) * (cost.call + self.chains * cost.replica)
            return alone + (warmup + self.draws) * (moves + 2) * (cost.call + together * cost.replica)
        rounds = rungs or (_RUNGS if self.ladder else 1)
        iterations = warmup // 2 + rounds * (self.draws + warmup // 3)
        return iterations * moves * (cost.call + self.chains * cost.replica)


@dataclass(frozen=True)
class Target:
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
        evaluate: Excess loss and slope at offsets ``(..., d)`` from ``theta``.
    """

    potential: Potential
    theta: Tensor
    gamma: float
    baseline: float
    rotation: Rotation
    curvature: Tensor
    blocks: tuple[int, ...]
    cost: Cost
    evaluate: Callable[[Tensor], tuple[Tensor, Tensor]] = field(repr=False)

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

    def only(self, index: int) -> Traces:
        """The draws of one temperature."""
        return self._part(slice(index, index + 1))

    def first(self, count: int) -> Traces:
        """The draws of the hottest temperatures, one at least."""
        return self._part(slice(0, max(1, count)))

    def _part(self, k: slice) -> Traces:
        parts = {n: getattr(self, n)[k] for n in ("nbeta", "excess", "spread", "controls", "acceptance")}
        return replace(self, main=0, **parts)

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
    cost = gradient_cost(potential, theta, turning=rotation.cost)
    return Target(potential, theta, gamma, baseline, rotation, curvature, blocks, cost, evaluate)


def rounding_limit(target: Target) -> float:
    """The inverse temperature at which ``nbeta (L - L*)`` drowns in the rounding of ``L*``.

    Examples:
        >>> 1e15 < rounding_limit(target(lambda w: (w**2).sum(), torch.zeros(1, dtype=torch.float64), 1.0)) < 1e18
        True
    """
    precision = torch.finfo(target.theta.dtype).eps
    return 1e-2 / (precision * max(abs(target.baseline), 1e-3))


def gradient_cost(potential: Potential, theta: Tensor, *, turning: int | None = None) -> Cost:
    """What a gradient costs, from the operations, numbers and products of one evaluation.

    Args:
        potential: The loss.
        theta: Where.
        turning: Multiply-adds of a rotation there and back; that of a dense one by default.

    Examples:
        >>> cheap = gradient_cost(lambda w: (w**2).sum(), torch.zeros(2))
        >>> dear = gradient_cost(lambda w: (w[:, None] * torch.ones(1, 10**6)).sum(), torch.zeros(2))
        >>> cheap.replica < 1e-6 < 1e-3 < dear.replica
        True
    """
    with torch.no_grad(), _Work() as work:
        potential(theta)
    size = theta.numel()
    turning = (2 * size * size if size <= DENSE_LIMIT else 0) if turning is None else turning
    replica = 3 * (work.numbers * _PER_NUMBER + work.products * _PER_PRODUCT)
    return Cost(
        _PER_MOVE + 3 * work.calls * _PER_CALL, replica + 2 * turning * _PER_PRODUCT + size * 20 * _PER_NUMBER
    )


class _Work(TorchDispatchMode):
    """Counts operations, the numbers they write, and multiply-adds of matrix products."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = self.numbers = self.products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        written = out.numel() if isinstance(out, Tensor) else 0
        self.calls += 1
        if any(product in func.__name__ for product in ("mm", "conv")):
            inner = [a for a in args if isinstance(a, Tensor) and a.ndim > 1][-1]
            self.products += written * (inner.shape[-2] if "mm" in func.__name__ else inner[0].numel())
        if not func.is_view:
            self.numbers += written
        return out


def _batched(potential: Potential, theta: Tensor) -> Callable[[Tensor], Tensor]:
    """Many parameter vectors in one pass; one after the other where the function cannot be batched."""

    def scalar(t: Tensor) -> Tensor:
        return potential(t).reshape(())

    if batchable(potential, theta):
        return vmap(scalar, randomness="error")
    return lambda points: torch.stack([scalar(p) for p in points])


def batchable(potential: Potential, theta: Tensor) -> bool:
    """Whether ``torch.func.vmap`` can trace the potential: no branches on values, no writes in place.

    Examples:
        >>> batchable(lambda w: (w**2).sum(), torch.zeros(2))
        True
        >>> batchable(lambda w: w.sum() if float(w.sum()) > 0 else -w.sum(), torch.zeros(2))
        False
    """
    try:
        with torch.no_grad():
            vmap(lambda t: potential(t).reshape(()), randomness="error")(torch.stack([theta, theta]))
    except Exception:  # whatever it is that vmap cannot trace: the answer is no
        return False
    return True


def replicas_per_pass(potential: Potential) -> int:
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


def _curvature(potential: Potential, theta: Tensor) -> tuple[Rotation, Tensor]:
    """Eigenbasis and eigenvalues of the Hessian, of the Gauss-Newton matrix, or of its Kronecker factors."""
    size = theta.numel()
    plain = Dense(None), torch.zeros_like(theta)
    named = isinstance(potential, Objective) and potential.name is not None
    if size > DENSE_LIMIT:
        factors = kronecker(potential) if isinstance(potential, Objective) and named else None
        return plain if factors is None else factors
    if isinstance(potential, Objective) and potential.name is not None and size > VIRIAL_LIMIT:
        kind = "mse" if potential.name.value.endswith("mse") else "kl"
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
    """The settings with the localisation decided.

    Examples:
        >>> localised(LLCConfig(), lambda w: (w**2).sum(), torch.zeros(2)).gamma
        1.0
    """
    if config.gamma is not None:
        return config
    size = theta.numel()
    large = isinstance(potential, Objective) and size > DENSE_LIMIT
    norm = float(torch.linalg.vector_norm(theta)) ** 2
    return replace(config, gamma=max(1.0, size / norm) if large and norm > 0 else 1.0)
