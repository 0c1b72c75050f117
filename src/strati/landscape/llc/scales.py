"""How many parameters a network uses at a loss scale: ``N_eff(eps) = 2 lambda_B(eps)`` (eq. 9).

For a few parameters ``lambda(eps) = d ln V / d ln eps`` is the slope of the density of states (eq. 8): samples of all
temperatures are reweighted into one (multistate Bennett acceptance ratio, Shirts and Chodera 2008), and the share of
weight below ``eps`` is the volume ``V``. Beyond, it is the tempered value at the temperature that sees ``eps``.
Beside it stands the closed form for a quadratic loss, ``1/2 sum_i nbeta h_i / (nbeta h_i + gamma)``: their gap shows
where the landscape stops being quadratic. :func:`seed_scale` chooses a scale from the spread between seeds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Unpack, cast

import numpy as np
import torch
from scipy.optimize import brentq
from scipy.special import digamma, logsumexp

from strati.core.errors import BadInputError
from strati.core.options import resolve
from strati.core.results import Result, Tick, silent
from strati.evaluate.models import on_device
from strati.io.to_module import as_module
from strati.landscape.llc import tuning
from strati.landscape.llc.config import FULL_DATA, LLCConfig, Sampler
from strati.landscape.llc.estimate import estimate, impossible, mixed
from strati.landscape.llc.llc import draw, run
from strati.landscape.llc.loss_structure import moment_matched_data
from strati.landscape.llc.posterior import curvature_spectrum, default_gamma, kronecker, local_posterior
from strati.landscape.llc.sampling_plan import Clock, choose_sampler, hmc_amount, sampling_plan
from strati.landscape.objective import (
    Loss,
    LossName,
    Objective,
    as_tensor,
    objective,
)

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import RenderableType

    from strati.core.option_types import LLCOptions
    from strati.core.results import FloatArray
    from strati.io.network import Openable
    from strati.landscape.llc.traces import Traces
    from strati.schemas.json_types import ScaleFields, ScalesFields


@dataclass(frozen=True)
class DensityOfStates:
    """Weighted samples of parameter space.

    Attributes:
        log_loss: ``ln(L - L*)`` of every sample, ascending.
        log_weight: Logarithm of the volume each stands for, up to a constant.
        left_out: The same without one group of chains each, ``(groups, samples)``, for errors: the free energies that
            make the weights are found anew without the group, whose samples weigh nothing.
        localised: Whether volumes are still weighed by the localisation: so where free directions run far, and the
            plain volume is not defined.
    """

    log_loss: FloatArray
    log_weight: FloatArray
    left_out: FloatArray
    localised: bool

    def coefficient(self, epsilon: float) -> tuple[float, float] | None:
        """``lambda(eps)`` and its standard error; ``None`` where there are too few samples.

        Examples:
            >>> import torch
            >>> from strati.landscape.llc.llc import LLCConfig, sample
            >>> traces = sample(lambda w: (w**2).sum(), torch.zeros(2), LLCConfig(chains=16, draws=200, coldest=1e4))
            >>> abs(density_of_states(traces).coefficient(1e-2)[0] - 1) < 0.05
            True
        """
        low, high = np.searchsorted(
            self.log_loss, [math.log(epsilon / tuning.DENSITY_STEP), math.log(epsilon * tuning.DENSITY_STEP)]
        )
        if low < 50 or high - low < 50 or high >= len(self.log_loss):
            return None

        def slope(weight: FloatArray) -> float:
            return float(
                (logsumexp(weight[:high]) - logsumexp(weight[:low])) / (2 * math.log(tuning.DENSITY_STEP))
            )

        slopes = np.array([slope(w) for w in self.left_out])
        if not np.isfinite(slopes).all():
            return None
        groups = len(slopes)
        error = math.sqrt((groups - 1) / groups * float(((slopes - slopes.mean()) ** 2).sum()))
        return slope(self.log_weight), error


def density_of_states(traces: Traces) -> DensityOfStates:
    """Reweight the traces of a ladder of temperatures into one set of samples of parameter space."""
    step = max(1, traces.excess.size // tuning.DENSITY_SAMPLES)
    excess, spread = traces.excess[:, :, ::step], traces.spread[:, :, ::step]
    chains = excess.shape[1]
    losses = excess.reshape(-1)
    free = _free_energies(traces.nbeta, excess)
    log_weight = _log_weight(traces.nbeta, free, losses)
    pull = 0.5 * traces.gamma * spread.reshape(-1)
    localised = not _few_dominate(log_weight, pull)
    groups = min(tuning.DENSITY_GROUPS, chains)
    member = np.arange(chains) * groups // chains
    left_out = []
    for group in range(groups):
        others = excess[:, member != group]
        without = _log_weight(traces.nbeta, _free_energies(traces.nbeta, others, free), losses)
        gone = np.broadcast_to((member == group)[None, :, None], excess.shape).reshape(-1)
        left_out.append(np.where(gone, -np.inf, without))
    weights = np.stack([log_weight, *left_out]) + (0.0 if localised else pull)
    positive = losses > 0
    log_loss = np.log(np.where(positive, losses, 1.0))[positive]
    order = np.argsort(log_loss, kind="stable")
    sorted_weights = weights[:, positive][:, order]
    return DensityOfStates(log_loss[order], sorted_weights[0], sorted_weights[1:], localised)


def _log_weight(nbeta: FloatArray, free: FloatArray, losses: FloatArray) -> FloatArray:
    """``-ln sum_k exp(f_k - nbeta_k L)``: the volume that a sample of the mixture of temperatures stands for."""
    return -_log_mixture(free, -nbeta[:, None] * losses[None, :])


def _log_mixture(free: FloatArray, reduced: FloatArray) -> FloatArray:
    terms = free[:, None] + reduced
    top = terms.max(axis=0)
    mixture: FloatArray = top + np.log(np.exp(terms - top).sum(axis=0))
    return mixture


def _free_energies(nbeta: FloatArray, excess: FloatArray, start: FloatArray | None = None) -> FloatArray:
    """``-ln Z`` per temperature out of ``(K, chain, draw)``: thermodynamic integration, then the exact equations."""
    if start is None:
        means = excess.mean(axis=(1, 2)) * nbeta
        steps = 0.5 * (means[1:] + means[:-1]) * np.diff(np.log(nbeta))
        free = np.concatenate([[0.0], np.cumsum(steps)])
    else:
        free = start
    thin = max(1, excess.size // tuning.DENSITY_SOLVED)
    losses = excess[:, :, ::thin].reshape(-1)
    reduced = -nbeta[:, None] * losses[None, :]
    each = len(losses) / len(nbeta)
    for _ in range(tuning.DENSITY_ROUNDS):
        share = np.exp(free[:, None] + reduced - _log_mixture(free, reduced))
        held = share.sum(axis=1)
        # Newton on a convex function; far from its minimum the fixed point is the safer step.
        hessian = np.diag(held) - share @ share.T
        step = np.linalg.lstsq(hessian[1:, 1:], each - held[1:], rcond=1e-12)[0]
        step = np.concatenate([[0.0], step])
        if np.abs(step).max() > 1.0:
            step = np.log(each / np.maximum(held, 1e-300))
            step -= step[0]
        free = free + step
        if np.abs(step).max() < 1e-6:
            break
    return free


def _few_dominate(log_weight: FloatArray, pull: FloatArray) -> bool:
    """Whether undoing the localisation keeps enough effective samples at every scale of weight."""
    # A localisation that was hardly felt has pulls well below one; free directions have pulls of their number / 2.
    share = np.exp(log_weight - log_weight.max())
    return bool((share * pull).sum() / share.sum() < 1.0) and float(np.quantile(pull, 0.9)) < 3.0


def closed_form(curvature: FloatArray, nbeta: float, gamma: float) -> float:
    """``1/2 sum_i nbeta h_i / (nbeta h_i + gamma)``.

    Args:
        curvature: Eigenvalues ``h_i`` of the Hessian of the loss.
        nbeta: Inverse temperature.
        gamma: Localisation.

    Examples:
        >>> closed_form(np.array([1.0, 0.0]), 1e4, 1.0)
        0.49995...
    """
    stiff = nbeta * np.maximum(curvature, 0.0)
    return float(0.5 * (stiff / (stiff + gamma)).sum())


def matching_scale(coefficient: float, nbeta: float) -> float:
    """The loss scale that a temperature sees: ``exp(digamma(lambda + 1)) / nbeta``.

    ``nbeta <L>`` is the average of ``lambda(eps)`` under the weight ``V(eps) exp(-nbeta eps)``, for ``V ~ eps^lambda``
    a Gamma distribution of shape ``lambda + 1``, whose geometric mean this is: near ``1/nbeta`` for
    ``lambda = 1/2``, near ``lambda/nbeta`` for a large ``lambda``.

    Examples:
        >>> round(matching_scale(0.5, 1.0), 3), round(matching_scale(100.0, 1.0), 1)
        (1.037, 100.5)
    """
    return float(np.exp(digamma(coefficient + 1.0)) / nbeta)


def temperature_for(epsilon: float, curvature: FloatArray, gamma: float) -> float:
    """The inverse temperature that sees the loss scale ``epsilon``, were the loss quadratic."""

    def gap(log_nbeta: float) -> float:
        nbeta = float(np.exp(log_nbeta))
        return float(np.log(matching_scale(closed_form(curvature, nbeta, gamma), nbeta) / epsilon))

    centre = -np.log(epsilon)
    return float(np.exp(brentq(gap, centre - 2, centre + np.log(len(curvature) + 10.0) + 2)))


_COLUMNS = ("epsilon", "lambda", "stderr", "effective", "nbeta", "gauss_newton", "gap", "reason")
_TOO_STIFF = (
    "not sampled: already at the hotter temperatures the valleys were too narrow for affordable trajectories; "
    "a larger gamma or larger scales would help"
)


@dataclass(frozen=True)
class Scale:
    """One loss scale.

    Attributes:
        epsilon: The scale.
        coefficient: ``lambda(eps)``, ``None`` with a ``reason`` where the chains do not allow one.
        stderr: Its standard error.
        nbeta: The temperature that sees this scale.
        gauss_newton: The closed form at that temperature.
        reason: Why a value is ``None``.
    """

    epsilon: float
    coefficient: float | None
    stderr: float | None
    nbeta: float
    gauss_newton: float | None
    reason: str | None = None

    @property
    def effective(self) -> float | None:
        """``N_eff = 2 lambda``."""
        return None if self.coefficient is None else 2 * self.coefficient

    @property
    def gap(self) -> float | None:
        """Sampled value less the closed form."""
        if self.coefficient is None or self.gauss_newton is None:
            return None
        return self.coefficient - self.gauss_newton

    def as_dict(self) -> ScaleFields:
        """The row of the JSON form."""
        values = (
            self.epsilon,
            self.coefficient,
            self.stderr,
            self.effective,
            self.nbeta,
            self.gauss_newton,
            self.gap,
            self.reason,
        )
        return cast("ScaleFields", dict(zip(_COLUMNS, values, strict=True)))


@dataclass(frozen=True)
class EffectiveParameters(Result):
    """The curve ``N_eff(eps)``.

    Attributes:
        rows: One per scale, ascending in ``eps``.
        parameters: Number of parameters varied.
        gamma: Localisation.
        density: The density of states, for small problems.
    """

    verb: ClassVar[str] = "scales"

    rows: tuple[Scale, ...]
    parameters: int
    gamma: float
    density: DensityOfStates | None = dataclasses.field(default=None, repr=False)

    def payload(self) -> ScalesFields:
        """The rows under ``scales``."""
        return {
            "parameters": self.parameters,
            "gamma": self.gamma,
            "scales": [r.as_dict() for r in self.rows],
        }

    def frame(self) -> pd.DataFrame:
        """One line per scale."""
        import pandas as pd

        return pd.DataFrame([r.as_dict() for r in self.rows], columns=list(_COLUMNS))

    def summary(self) -> RenderableType:
        """The rows as a table."""
        from strati.core.display import Column, table

        names = ("epsilon", "lambda", "+-", "effective", "Gauss-Newton", "gap")
        rows = [
            (f"{row.epsilon:.3g}", row.coefficient, row.stderr, row.effective, row.gauss_newton, row.gap)
            for row in self.rows
        ]
        title = f"effective parameters of {self.parameters:,}"
        return table([Column(name, right=True) for name in names], rows, title=title)

    def plot(self, **options: Any) -> Any:
        """``N_eff`` over ``eps`` with error bars and the closed form."""
        from strati.report.plots.landscape import plot_scales

        return plot_scales(self, **options)


def effective_parameters(
    model: Openable,
    data: Any,
    *,
    scales: Sequence[float] | None = None,
    loss: Loss = LossName.BEHAVIOURAL_MSE,
    config: LLCConfig | None = None,
    tick: Tick = silent,
    **options: Unpack[LLCOptions],
) -> EffectiveParameters:
    """``N_eff(eps) = 2 lambda_B(eps)`` of the behavioural loss, over loss scales.

    Args:
        model: Whatever names a network; a module is not changed.
        data: Inputs; ``(x, y)`` for a training loss.
        scales: The ``eps``; five decades below the variance of the outputs by default.
        loss: ``"behavioural-mse"`` (eq. 6) or ``"behavioural-kl"``; a training loss (``"mse"``, ``"cross_entropy"``, a
            function) counts what that loss depends on instead.
        config: Settings of the sampler; ``seconds`` is for all scales together.
        tick: Called after each stage.
        **options: Fields of :class:`LLCConfig` on top of ``config``; ``layers`` is not one of them.

    Raises:
        BadInputError: A scale is not positive, or the data do not fit the model.

    References:
        degeneracy-in-the-loss-landscape, section 2.2.2.

    Examples:
        >>> from torch import nn
        >>> x = torch.linspace(-1, 1, 20)[:, None]
        >>> curve = effective_parameters(nn.Linear(1, 1), x, scales=[1e-3], chains=16, draws=100)
        >>> abs(curve.rows[0].effective - 2) < 0.2
        True
    """
    settings = resolve(LLCConfig, config, options, of=effective_parameters)
    clock = Clock(settings.seconds)
    model = on_device(as_module(model), settings.device)
    dtype = torch.float64 if sum(p.numel() for p in model.parameters()) <= tuning.DENSE_LIMIT else None
    mean_loss = objective(model, loss, data, dtype=dtype)
    epsilons = _scales(scales, mean_loss)
    function = moment_matched_data(mean_loss)
    curvature = curvature_spectrum(function)
    theta = function.flat.theta
    settings = dataclasses.replace(settings, gamma=settings.gamma or default_gamma(theta))
    if len(theta) <= tuning.VIRIAL_LIMIT:
        cost = local_posterior(function, theta, settings.gamma or 1.0).cost
        if hmc_amount(dataclasses.replace(settings, ladder=True), len(theta), cost).exchange:
            return _by_density(function, epsilons, curvature, settings, tick, clock)
    return _by_temperature(function, epsilons, curvature, settings, tick, clock)


def seed_scale(outputs: Sequence[Any]) -> float:
    """A loss scale from several trainings of one task: the mean squared distance of their outputs to the mean.

    ``mean_x 1/(S - 1) sum_s ||f_s(x) - fbar(x)||^2``, the variance between seeds (section 2.2.2).

    Args:
        outputs: The networks' outputs on the same inputs, one array per seed.

    Raises:
        BadInputError: Fewer than two seeds, or shapes that differ.

    Examples:
        >>> seed_scale([np.zeros((5, 1)), 2 * np.ones((5, 1))])
        2.0
    """
    arrays = [as_tensor(o, "outputs").double() for o in outputs]
    if len(arrays) < 2 or len({tuple(a.shape) for a in arrays}) != 1:
        raise BadInputError("outputs", "give the outputs of at least two networks on the same inputs")
    stacked = torch.stack(arrays).reshape(len(arrays), arrays[0].shape[0], -1)
    return float(stacked.var(dim=0, correction=1).sum(-1).mean())


def _by_density(
    function: Objective,
    scales: FloatArray,
    curvature: FloatArray | None,
    settings: LLCConfig,
    tick: Tick,
    clock: Clock,
) -> EffectiveParameters:
    coldest = settings.coldest or 20 * max(1.0, function.flat.size / 2) / float(scales.min())
    nbeta = settings.nbeta or 1 / float(np.median(scales))
    sampling = dataclasses.replace(
        settings, nbeta=nbeta, coldest=coldest, ladder=True, sampler=Sampler.TEMPERED
    )
    traces = draw(function, function.flat.theta, sampling, tick, clock)
    # Colder than the first temperature whose chains disagree, samples are not those of the landscape.
    good = [mixed(traces, k, settings) for k in range(len(traces.nbeta))]
    density = density_of_states(traces.first(good.index(False) if False in good else len(good)))
    rows = []
    for epsilon in scales:
        coefficient = density.coefficient(float(epsilon))
        value, error = coefficient if coefficient is not None else (None, None)
        reason = None
        if value is None or error is None:
            reason = "too few samples at this scale: it lies outside the localisation, or the chains do not mix there"
        elif (reason := impossible(value, error, function.flat.size)) is not None:
            value = error = None
        nbeta = matching_scale(value, 1.0) / float(epsilon) if value is not None else 1 / float(epsilon)
        second = None if curvature is None else closed_form(curvature, nbeta, settings.gamma or 1.0)
        rows.append(Scale(float(epsilon), value, error, nbeta, second, reason))
    return EffectiveParameters(tuple(rows), function.flat.size, settings.gamma or 1.0, density)


def _by_temperature(
    function: Objective,
    scales: FloatArray,
    curvature: FloatArray | None,
    settings: LLCConfig,
    tick: Tick,
    clock: Clock,
) -> EffectiveParameters:
    quadratic = curvature if curvature is not None else _approximate(function)
    nbetas = [temperature_for(float(e), quadratic, settings.gamma or 1.0) for e in scales]
    theta, rungs = function.flat.theta, sorted(nbetas)
    traces_at: dict[float, Traces] = {}
    if not clock.timed and choose_sampler(function, theta, settings) in FULL_DATA:
        planned = sampling_plan(function, theta, settings, clock, temperatures=rungs)
        traces = run(function, theta, planned, tick)
        # By place: single precision rounds the temperatures that it keeps.
        traces_at = {n: traces.only(k) for k, n in enumerate(rungs[: len(traces.nbeta)])}
    else:
        for place, nbeta in enumerate(rungs):
            share = Clock(max(clock.left, 0.01) / (len(rungs) - place)) if clock.timed else clock
            sampling = dataclasses.replace(settings, nbeta=nbeta, ladder=False)
            traces_at[nbeta] = draw(function, theta, sampling, tick, share)
    rows = []
    for epsilon, nbeta in zip(scales, nbetas, strict=True):
        second = None if curvature is None else closed_form(curvature, nbeta, settings.gamma or 1.0)
        if nbeta not in traces_at:
            rows.append(Scale(float(epsilon), None, None, nbeta, second, _TOO_STIFF))
            continue
        result = estimate(traces_at[nbeta], settings)
        reason = None if result.estimate is not None else result.reason
        rows.append(Scale(float(epsilon), result.estimate, result.stderr, nbeta, second, reason))
    return EffectiveParameters(_at_scales(rows), function.flat.size, settings.gamma or 1.0)


def _approximate(function: Objective) -> FloatArray:
    """A spectrum to place the temperatures by, where the true one is too large to have."""
    factors = kronecker(function)
    return np.ones(function.flat.size) if factors is None else factors[1].double().cpu().numpy()


def _at_scales(rows: list[Scale]) -> tuple[Scale, ...]:
    """Carry each value from the scale its temperature really saw to the scale that was asked for."""
    estimated = [r for r in rows if r.coefficient is not None]
    if len(estimated) < 2:
        return tuple(rows)
    log_scales = np.log([matching_scale(float(r.coefficient or 0), r.nbeta) for r in estimated])
    values = np.array([r.coefficient for r in estimated], dtype=float)
    order = np.argsort(log_scales)
    moved = np.interp(np.log([r.epsilon for r in estimated]), log_scales[order], values[order])
    shifted = {
        id(r): dataclasses.replace(r, coefficient=float(v)) for r, v in zip(estimated, moved, strict=True)
    }
    return tuple(shifted.get(id(r), r) for r in rows)


def _scales(scales: Sequence[float] | None, function: Objective) -> FloatArray:
    if scales is None:
        squared = function.name is None or function.name.squared
        size = 0.0 if squared and function.target.is_floating_point() else 1.0
        target = function.target.reshape(function.rows, -1).to(function.flat.dtype)
        size = size or float(target.var(dim=0, correction=0).sum()) or 1.0
        return size * np.geomspace(1e-5, 1e-1, 5)
    try:
        epsilons = np.atleast_1d(np.asarray(scales, dtype=float))
    except (TypeError, ValueError):
        raise BadInputError("scales", "must be positive numbers") from None
    if epsilons.size == 0 or not np.isfinite(epsilons).all() or (epsilons <= 0).any():
        raise BadInputError("scales", "must be positive numbers")
    return np.sort(epsilons)
