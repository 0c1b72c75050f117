"""The local learning coefficient of a network, or of any differentiable function.

``lambda(nbeta) = nbeta (<L> - L*)`` under the posterior localised at the given parameters (WBIC form, Watanabe 2013,
Lau et al. 2023), with its Monte Carlo error, and its limit for large ``nbeta``. Sampling (``sample``) and
estimating (``estimate``) are two steps: traces are kept, and an estimate from them takes milliseconds.
The samplers are in ``hmc`` and ``sgld``, the extrapolation in ``extrapolate``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from strati.errors import BadInputError
from strati.landscape.behaviour import Loss, Objective, Potential, objective
from strati.landscape.sampling.budget import gradient_cost, sampling_plan
from strati.landscape.sampling.config import DENSE_LIMIT, LLCConfig, Sampler
from strati.landscape.sampling.controlled import controlled_mean, honest_error
from strati.landscape.sampling.diagnostics import ess, rhat, standard_error
from strati.landscape.sampling.extrapolate import Limit, extrapolate
from strati.landscape.sampling.gibbs import affordable, ladder, quadratic_blocks, sample_gibbs
from strati.landscape.sampling.hmc import sample_hmc
from strati.landscape.sampling.moment_points import condensed
from strati.landscape.sampling.posterior import LocalPosterior, local_posterior, localised
from strati.landscape.sampling.sgld import sample_sgld
from strati.landscape.sampling.traces import Traces
from strati.types import Result, Tick, silent

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import RenderableType


__all__ = ["LLCConfig", "LearningCoefficient", "estimate", "learning_coefficient", "llc", "sample"]

_DOUBLE_LIMIT = DENSE_LIMIT  # beyond, no ladder is cold enough to need the digits
_FULL_PASS_LIMIT = (
    60.0  # seconds of the cost model for the least number of gradients, above which "auto" samples by SGLD
)
_LEAST_GRADIENTS = 1200
_LEAST_ESS = 30.0
_ABOVE_HALF = (
    1.05  # a quartic wall can lift a value at a finite temperature a little above half the parameters
)
_TRACE_POINTS = 500
_HOT_SHARE = 1e-8  # of the coldest temperature: hotter ones say nothing about the limit


@dataclass(frozen=True)
class LearningCoefficient(Result):
    """A learning coefficient with its error, its limit and what the chains say about themselves.

    Attributes:
        estimate: ``nbeta (<L> - L*)`` at the stated temperature; ``None`` with a ``reason`` if the chains do not
            allow one.
        stderr: Monte Carlo standard error of ``estimate``.
        nbeta: Inverse temperature.
        gamma: Localisation.
        asymptotic: The limit for large ``nbeta``, over the ladder of temperatures.
        asymptotic_stderr: Its error, with what is not known about the form of the approach.
        multiplicity: The likeliest multiplicity ``m``.
        rhat: Rank-normalised split R-hat of the loss.
        ess: Bulk effective sample size of the loss.
        chains: Number of chains.
        draws: Draws per chain.
        reason: Why a value is ``None``.
        ladder: ``(nbeta, lambda, stderr)`` for every temperature sampled.
        traces: All draws.
    """

    verb: ClassVar[str] = "llc"

    estimate: float | None
    stderr: float | None
    nbeta: float
    gamma: float
    asymptotic: float | None
    asymptotic_stderr: float | None
    multiplicity: int | None
    rhat: float | None
    ess: float | None
    chains: int
    draws: int
    reason: str | None
    ladder: tuple[tuple[float, float, float], ...]
    traces: Traces = dataclasses.field(repr=False)

    def payload(self) -> dict[str, Any]:
        """The interface's fields, the multiplicity, and thinned traces of ``nbeta (L - L*)``."""
        step = -(-self.draws // _TRACE_POINTS)
        return {
            "estimate": self.estimate,
            "stderr": self.stderr,
            "nbeta": self.nbeta,
            "gamma": self.gamma,
            "asymptotic": self.asymptotic,
            "asymptotic_stderr": self.asymptotic_stderr,
            "rhat": self.rhat,
            "ess": self.ess,
            "chains": self.chains,
            "draws": self.draws,
            "reason": self.reason,
            "multiplicity": self.multiplicity,
            "ladder": [{"nbeta": n, "lambda": v, "stderr": e} for n, v, e in self.ladder],
            "traces": np.round(self.traces.lambda_trace()[:, ::step], 6),
        }

    def frame(self) -> pd.DataFrame:
        """One line per temperature."""
        import pandas as pd

        return pd.DataFrame(list(self.ladder), columns=["nbeta", "lambda", "stderr"])

    def summary(self) -> RenderableType:
        """Two lines: the value at the stated temperature, and the limit."""
        from rich.text import Text

        head = f"learning coefficient at nbeta {self.nbeta:.6g}, gamma {self.gamma:g}: "
        lines = [head + _with_error(self.estimate, self.stderr)]
        lines.append("limit for large nbeta: " + _with_error(self.asymptotic, self.asymptotic_stderr))
        r_hat, size = (_number(v, f) for v, f in ((self.rhat, ".3f"), (self.ess, ".0f")))
        lines.append(
            f"{self.chains} chains x {self.draws} draws, R-hat {r_hat}, effective sample size {size}"
        )
        if self.reason:
            lines.append(self.reason)
        return Text("\n".join(lines))

    def plot(self, **options: Any) -> Any:
        """Traces, and the values over temperature with their limit."""
        from strati.report.plots.llc import plot_llc

        return plot_llc(self, **options)


def llc(
    model: nn.Module,
    loss: Loss,
    data: Any,
    *,
    config: LLCConfig | None = None,
    layers: Sequence[str] | None = None,
    tick: Tick = silent,
    **options: Any,
) -> LearningCoefficient:
    """The local learning coefficient of a module's loss at its present parameters.

    Args:
        model: Any module; it is not changed.
        loss: ``"behavioural-mse"``, ``"behavioural-kl"``, ``"mse"``, ``"cross_entropy"``, or a function of
            (output, target) giving the mean over the data.
        data: ``(x, y)``, ``x`` alone for a behavioural loss, or an iterable of batches.
        config: All settings.
        layers: Vary only the parameters of these modules.
        tick: Called after each stage.
        **options: Fields of :class:`LLCConfig`, e.g. ``nbeta=100, gamma=1, seed=3``, on top of ``config``.

    Returns:
        The estimate at ``nbeta`` (default ``n / ln n``) and its limit.

    Raises:
        BadInputError: The data do not fit the model, or the loss is not finite at its parameters.

    Examples:
        >>> x = torch.linspace(-1, 1, 50)[:, None]
        >>> result = llc(nn.Linear(1, 1), "behavioural-mse", x, chains=8, draws=100)  # two parameters
        >>> abs(result.asymptotic - 1.0) < 0.02
        True
    """
    settings = _settings(config, options)
    if not isinstance(model, nn.Module):
        raise BadInputError("model", f"is of type {type(model).__name__}; give a torch module")
    size = sum(p.numel() for p in model.parameters())
    dtype = torch.float64 if size <= _DOUBLE_LIMIT else None
    function = objective(model, loss, data, layers=layers, dtype=dtype)
    return estimate(sample(function, function.flat.theta, settings, tick), settings)


def learning_coefficient(
    potential: Potential,
    theta: Any,
    *,
    config: LLCConfig | None = None,
    tick: Tick = silent,
    **options: Any,
) -> LearningCoefficient:
    """The local learning coefficient of a differentiable function at a point.

    Args:
        potential: Takes a flat tensor, gives a scalar tensor.
        theta: Where: a flat tensor or array, a minimum of ``potential``.
        config: All settings.
        tick: Called after each stage.
        **options: Fields of :class:`LLCConfig` (``nbeta`` defaults to 1e4, ``gamma`` to 1).

    Raises:
        BadInputError: The potential is not finite at ``theta``.

    Examples:
        >>> result = learning_coefficient(lambda w: (w**4).sum(), torch.zeros(1), chains=8, draws=100)
        >>> abs(result.asymptotic - 0.25) < 0.01
        True
    """
    settings = _settings(config, options)
    point = (
        theta.detach() if isinstance(theta, Tensor) else torch.as_tensor(np.asarray(theta, dtype=np.float64))
    )
    if point.ndim == 0:
        point = point.reshape(1)
    if not point.is_floating_point() or not bool(torch.isfinite(point).all()):
        raise BadInputError("theta", "must hold finite floating-point numbers")
    point = _doubled(potential, point)
    return estimate(sample(potential, point, settings, tick), settings)


def sample(potential: Potential, theta: Tensor, config: LLCConfig, tick: Tick = silent) -> Traces:
    """The expensive step: draws of the localised posterior, kept for any number of estimates.

    Examples:
        >>> settings = LLCConfig(chains=4, draws=20, ladder=False)
        >>> sample(lambda w: (w**2).sum(), torch.zeros(2), settings).excess.shape[1:]
        (4, 20)
    """
    nbeta = config.nbeta
    if nbeta is None:
        nbeta = _wbic(potential.count) if isinstance(potential, Objective) else 1e4
    config = localised(config, potential, theta)
    few = condensed(potential) if isinstance(potential, Objective) else potential
    kind = chosen_sampler(few, theta, config)
    if kind in (Sampler.HMC, Sampler.GIBBS):
        return _sample_all_data(local_posterior(few, theta, config.gamma or 1.0), config, float(nbeta), tick)
    if not isinstance(potential, Objective):
        raise BadInputError(kind, "needs data to draw minibatches from; a plain potential is sampled by hmc")
    return sample_sgld(potential, dataclasses.replace(config, sampler=kind), float(nbeta), tick)


def _sample_all_data(seen: LocalPosterior, config: LLCConfig, nbeta: float, tick: Tick) -> Traces:
    """By conditional draws where the loss allows them, else by HMC.

    Where a whole ladder of exchanges is affordable it is as good, and goes colder; but one block is drawn outright.
    """
    most = (
        1 if config.sampler == Sampler.AUTO and sampling_plan(config, seen.size, seen.cost).exchange else None
    )
    traces = conditional_traces(seen, config, nbeta, tick, most=most)
    return traces if traces is not None else sample_hmc(seen, config, nbeta, tick)


def conditional_traces(
    seen: LocalPosterior,
    config: LLCConfig,
    nbeta: float | Sequence[float],
    tick: Tick,
    *,
    most: int | None = None,
) -> Traces | None:
    """Draws by conditionals of at most so many blocks; ``None`` where there are no such and they are not insisted on.

    Args:
        seen: What to sample.
        config: How.
        nbeta: A temperature, with the ladder that belongs to it, or just these.
        tick: Called now and then.
        most: Blocks.

    Raises:
        BadInputError: ``gibbs`` was asked for and is not possible.
    """
    if config.sampler == Sampler.HMC:
        return None
    sizes = seen.potential.flat.sizes if isinstance(seen.potential, Objective) else None
    blocks = quadratic_blocks(seen.potential, seen.theta, sizes)
    traces = None
    few = blocks is not None and (most is None or len(blocks) <= most)
    if (
        blocks is not None
        and few
        and (config.sampler == Sampler.GIBBS or affordable(config, blocks, seen.cost))
    ):
        rungs = ladder(seen, config, nbeta, blocks) if isinstance(nbeta, float) else nbeta
        traces = sample_gibbs(seen, blocks, config, rungs, tick)
    if traces is None and config.sampler == Sampler.GIBBS:
        raise BadInputError("gibbs", "the loss is not quadratic in each layer given the others; use hmc")
    return traces


def chosen_sampler(potential: Potential, theta: Tensor, config: LLCConfig) -> Sampler:
    """The sampler asked for; ``auto`` is HMC unless so many passes over all data are unaffordable."""
    kind = Sampler(config.sampler)
    if kind is not Sampler.AUTO:
        return kind
    if not isinstance(potential, Objective):
        return Sampler.HMC
    seconds = _LEAST_GRADIENTS * gradient_cost(potential, theta, turning=0).replica
    return Sampler.SGLD if seconds > _FULL_PASS_LIMIT else Sampler.HMC


def estimate(traces: Traces, config: LLCConfig | None = None) -> LearningCoefficient:
    """The cheap step: the coefficient, its error and its limit out of traces.

    Examples:
        >>> settings = LLCConfig(chains=8, draws=100)
        >>> traces = sample(lambda w: (w**2).sum(), torch.zeros(1), settings)
        >>> estimate(traces).asymptotic == estimate(traces).asymptotic
        True
    """
    settings = config or LLCConfig()
    main = traces.lambda_trace()
    ladder = tuple((float(traces.nbeta[k]), *_rung(traces, k, settings)) for k in range(len(traces.nbeta)))
    value, error = controlled_mean(traces, traces.main)
    refusal = _refusal(traces, value, error, settings)
    limit, no_limit = None, "no colder temperatures were sampled: no limit for large nbeta"
    if refusal is None and traces.main < len(ladder) - 1:
        usable = [row for row in ladder if math.isfinite(row[1]) and row[0] >= _hottest(traces)]
        hottest = float(traces.nbeta[0]) if traces.global_start else None
        limit = extrapolate(*np.array(usable, dtype=float).reshape(-1, 3).T, hottest=hottest)
        no_limit = "too few colder temperatures mixed to extrapolate; more draws would help"
        if limit is not None and _unsettled(limit, traces.parameters):
            limit, no_limit = None, "the values over the ladder do not settle: no limit for large nbeta"
    return LearningCoefficient(
        estimate=value if refusal is None else None,
        stderr=honest_error(traces, traces.main, error) if refusal is None else None,
        nbeta=float(traces.nbeta[traces.main]),
        gamma=traces.gamma,
        asymptotic=float(np.clip(limit.value, 0.0, traces.parameters / 2))
        if limit
        else None,  # of any minimum
        asymptotic_stderr=limit.stderr if limit else None,
        multiplicity=limit.multiplicity if limit else None,
        rhat=rhat(main),
        ess=ess(main),
        chains=traces.chains,
        draws=traces.draws,
        reason=refusal or (None if limit else no_limit),
        ladder=tuple((nbeta, mean, honest_error(traces, k, e)) for k, (nbeta, mean, e) in enumerate(ladder)),
        traces=traces,
    )


def _refusal(traces: Traces, value: float, error: float, settings: LLCConfig) -> str | None:
    """Why no value is given, or ``None``."""
    main = traces.lambda_trace()
    if not np.isfinite(main).all():
        return "the chains diverged: the loss became infinite; a smaller step or a larger gamma would help"
    r_hat, size = rhat(main), ess(main)
    if r_hat is None or size is None:
        return "too few draws to tell whether the chains mixed"
    if traces.acceptance[traces.main] < 0.1:
        share = 100 * float(traces.acceptance[traces.main])
        return f"the sampler is stuck ({share:.1f} % of its moves accepted); a larger gamma or lower nbeta would help"
    if r_hat > settings.max_rhat:
        return (
            f"the chains have not mixed (R-hat {r_hat:.3g} above {settings.max_rhat:g}); "
            "more draws, a longer warm-up or a larger gamma would help"
        )
    if drifting(traces, traces.main):
        return "the chains are still on their way from where they started; more draws or a larger gamma would help"
    if size < _LEAST_ESS:
        return f"the chains hold only {size:.0f} independent draws; more draws would help"
    return impossible(value, error, traces.parameters)


def impossible(value: float, error: float, parameters: int) -> str | None:
    """Why a sampled coefficient cannot be one, or ``None``: at a minimum it lies between 0 and half the parameters."""
    if value < -3 * error:
        return (
            f"lower losses lie nearby (nbeta (<L> - L*) = {value:.4g}): the parameters are not at a minimum; "
            "train further, or use a behavioural loss"
        )
    if value - 3 * error > _ABOVE_HALF * parameters / 2 or error > 0.25 * parameters:
        return (
            f"the average {value:.4g} +- {error:.2g} cannot be that of {parameters} parameters (half of them at most): "
            "the chains left the minimum for places of higher loss; a larger gamma or more draws would help"
        )
    return None


def _rung(traces: Traces, index: int, settings: LLCConfig) -> tuple[float, float]:
    """Value and error at one temperature, not a number where the chains do not allow one."""
    value, error = controlled_mean(traces, index)
    good = mixed(traces, index, settings) and impossible(value, error, traces.parameters) is None
    return (value, error) if good else (math.nan, math.nan)


def mixed(traces: Traces, index: int, settings: LLCConfig) -> bool:
    """Whether the chains of one temperature move and agree."""
    r_hat = rhat(traces.lambda_trace(index))
    moving = float(traces.acceptance[index]) >= 0.1 and not drifting(traces, index)
    return moving and r_hat is not None and r_hat <= settings.max_rhat


def drifting(traces: Traces, index: int) -> bool:
    """Whether loss or distance differ between the first and second half of the draws, beyond chance.

    Chains that start in one place agree with one another long before they have arrived: R-hat alone is blind to it.
    """
    half = traces.draws // 2
    if not np.isfinite(traces.excess[index]).all():
        return True
    for trace, share in ((traces.excess[index], 0.05), (traces.spread[index], 0.2)):
        first, second = trace[:, :half].mean(1), trace[:, half:].mean(1)
        change, size = second - first, abs(float(trace.mean()))
        error = float(change.std(ddof=1)) / math.sqrt(len(change))
        if (
            traces.chains < 8
        ):  # too few tell the error of their change badly; that of the mean, twice, stands in
            error = max(error, 2 * (standard_error(trace) or math.inf))
        if abs(float(change.mean())) > 4 * error + share * size:
            return True
    return False


def _hottest(traces: Traces) -> float:
    """The hottest temperature that may enter the extrapolation."""
    return float(min(traces.nbeta[traces.main], _HOT_SHARE * traces.nbeta[-1]))


def _unsettled(limit: Limit, parameters: int) -> bool:
    above = limit.value - parameters / 2
    return above > min(3 * limit.stderr, 0.05 * parameters) + 0.01 * parameters or limit.stderr > max(
        0.3 * limit.value, 0.05
    )


def _settings(config: LLCConfig | None, options: dict[str, Any]) -> LLCConfig:
    known = {f.name for f in dataclasses.fields(LLCConfig)}
    for name in options:
        if name not in known:
            raise BadInputError(name, f"no such option; there are: {', '.join(sorted(known))}")
    return dataclasses.replace(config or LLCConfig(), **options)


def _wbic(count: int) -> float:
    """``n / ln n``, the temperature of the widely applicable Bayesian information criterion."""
    return count / math.log(count) if count > 2 else float(count)


def _doubled(potential: Potential, theta: Tensor) -> Tensor:
    """Double precision where the function takes it: the ladder's cold end needs the digits."""
    if theta.dtype == torch.float64 or theta.numel() > _DOUBLE_LIMIT:
        return theta
    try:
        with torch.no_grad():
            potential(theta.double())
    except (RuntimeError, TypeError):  # it holds tensors of its own in single precision
        return theta
    return theta.double()


def _with_error(value: float | None, error: float | None) -> str:
    return "none" if value is None else f"{value:.4g} +- {error:.2g}"


def _number(value: float | None, form: str) -> str:
    return "undefined" if value is None else format(value, form)
