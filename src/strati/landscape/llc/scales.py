"""How many parameters a network uses at a loss scale: ``N_eff(eps) = 2 lambda_B(eps)`` (eq. 9).

For a few parameters ``lambda(eps)`` is the slope of the density of states; beyond, the tempered value at the
temperature that sees ``eps``. Beside it the closed form of the curvature: their gap shows where the landscape stops
being quadratic. How a scale is chosen from the spread between seeds is in ``seed_scale``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Unpack, cast

import numpy as np
import torch

from strati.core.errors import BadInputError
from strati.core.options import resolve
from strati.core.results import Result, Tick, silent
from strati.evaluate.models import on_device
from strati.io.to_module import as_module
from strati.landscape.llc.config import DENSE_LIMIT, FULL_DATA, VIRIAL_LIMIT, LLCConfig, Sampler
from strati.landscape.llc.density import DensityOfStates, density_of_states
from strati.landscape.llc.estimate import estimate, impossible, mixed
from strati.landscape.llc.gauss_newton import (
    closed_form,
    curvature_spectrum,
    matching_scale,
    temperature_for,
)
from strati.landscape.llc.hmc import sample_rungs
from strati.landscape.llc.llc import chosen_sampler, conditional_traces, draw
from strati.landscape.llc.moment_points import condensed
from strati.landscape.llc.posterior import local_posterior, localised
from strati.landscape.llc.preconditioner import kronecker
from strati.landscape.llc.sampling_plan import sampling_plan
from strati.landscape.objective import Loss, LossName, Objective, as_tensor, objective

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import RenderableType

    from strati.core.option_types import LLCOptions
    from strati.core.results import FloatArray
    from strati.io.network import Openable
    from strati.schemas.json_types import ScaleFields, ScalesFields

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
        config: Settings of the sampler.
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
    model = on_device(as_module(model), settings.device)
    dtype = torch.float64 if sum(p.numel() for p in model.parameters()) <= DENSE_LIMIT else None
    mean_loss = objective(model, loss, data, dtype=dtype)
    epsilons = _scales(scales, mean_loss)
    function = condensed(mean_loss)
    curvature = curvature_spectrum(function)
    theta = function.flat.theta
    settings = localised(settings, function, theta)
    if len(theta) <= VIRIAL_LIMIT:
        target = local_posterior(function, theta, settings.gamma or 1.0)
        if sampling_plan(dataclasses.replace(settings, ladder=True), len(theta), target.cost).exchange:
            return _by_density(function, epsilons, curvature, settings, tick)
    return _by_temperature(function, epsilons, curvature, settings, tick)


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
    function: Objective, scales: FloatArray, curvature: FloatArray | None, settings: LLCConfig, tick: Tick
) -> EffectiveParameters:
    coldest = settings.coldest or 20 * max(1.0, function.flat.size / 2) / float(scales.min())
    nbeta = settings.nbeta or 1 / float(np.median(scales))
    sampling = dataclasses.replace(
        settings, nbeta=nbeta, coldest=coldest, ladder=True, sampler=Sampler.TEMPERED
    )
    traces = draw(function, function.flat.theta, sampling, tick)
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
    function: Objective, scales: FloatArray, curvature: FloatArray | None, settings: LLCConfig, tick: Tick
) -> EffectiveParameters:
    quadratic = curvature if curvature is not None else _approximate(function)
    nbetas = [temperature_for(float(e), quadratic, settings.gamma or 1.0) for e in scales]
    theta, rungs = function.flat.theta, sorted(nbetas)
    if chosen_sampler(function, theta, settings) in FULL_DATA:
        target = local_posterior(function, theta, settings.gamma or 1.0)
        # Both samplers get, and give back, the temperatures ascending.
        traces = conditional_traces(target, settings, rungs, tick) or sample_rungs(
            target, settings, rungs, tick
        )
        # By place: single precision rounds the temperatures that it keeps.
        traces_at = {n: traces.only(k) for k, n in enumerate(rungs[: len(traces.nbeta)])}
    else:
        each = [dataclasses.replace(settings, nbeta=n) for n in nbetas]
        traces_at = {
            float(n): draw(function, theta, sampling, tick) for n, sampling in zip(nbetas, each, strict=True)
        }
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
