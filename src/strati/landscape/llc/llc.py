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
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import numpy as np
import torch
from torch import Tensor, nn

from strati.core.errors import BadInputError
from strati.core.options import resolve
from strati.core.results import Tick, silent
from strati.evaluate.models import on_device
from strati.io.to_module import as_module
from strati.landscape.llc.config import DENSE_LIMIT, FULL_DATA, LLCConfig, Sampler
from strati.landscape.llc.estimate import LearningCoefficient, estimate
from strati.landscape.llc.geometry import surroundings, with_rank
from strati.landscape.llc.gibbs import affordable, ladder, sample_gibbs
from strati.landscape.llc.hmc import sample_hmc
from strati.landscape.llc.moment_points import condensed
from strati.landscape.llc.parts import (
    Head,
    PartCoefficients,
    PartModel,
    data_groups,
    each,
    head_entries,
    layer_names,
    number_of_rows,
    rows_of,
)
from strati.landscape.llc.posterior import (
    LocalPosterior,
    check_point,
    default_gamma,
    local_posterior,
    localised,
)
from strati.landscape.llc.quadratic import quadratic_blocks
from strati.landscape.llc.sampling_plan import Clock, gradient_cost, sampling_plan
from strati.landscape.llc.sgld import sample_sgld
from strati.landscape.llc.traces import KeptPositions, Observer, Traces
from strati.landscape.objective import FlatModel, Loss, Objective, Potential, collect, objective

if TYPE_CHECKING:
    from strati.core.option_types import LLCOptions
    from strati.io.network import Openable

__all__ = ["LLCConfig", "LearningCoefficient", "estimate", "learning_coefficient", "llc", "sample"]

_DOUBLE_LIMIT = DENSE_LIMIT  # beyond, no ladder is cold enough to need the digits
# Seconds of the cost model for the least number of gradients, above which "auto" samples by SGLD.
_FULL_PASS_LIMIT = 60.0
_LEAST_GRADIENTS = 1200
_LOOK_SHARE = 0.25  # of the time, for derivatives at the given parameters


@overload
def llc(
    model: Openable,
    loss: Loss,
    data: Any,
    *,
    config: LLCConfig | None = None,
    layers: str | Sequence[str] | None = None,
    per_layer: Literal[False] = False,
    heads: None = None,
    groups: None = None,
    keep: bool = False,
    tick: Tick = silent,
    **options: Unpack[LLCOptions],
) -> LearningCoefficient: ...


@overload
def llc(
    model: Openable,
    loss: Loss,
    data: Any,
    *,
    config: LLCConfig | None = None,
    layers: str | Sequence[str] | None = None,
    per_layer: bool = False,
    heads: Sequence[Head] | None = None,
    groups: Any = None,
    keep: bool = False,
    tick: Tick = silent,
    **options: Unpack[LLCOptions],
) -> PartCoefficients: ...


def llc(
    model: Openable,
    loss: Loss,
    data: Any,
    *,
    config: LLCConfig | None = None,
    layers: str | Sequence[str] | None = None,
    per_layer: bool = False,
    heads: Sequence[Head] | None = None,
    groups: Any = None,
    keep: bool = False,
    tick: Tick = silent,
    **options: Unpack[LLCOptions],
) -> LearningCoefficient | PartCoefficients:
    """The local learning coefficient of a module's loss at its present parameters.

    Args:
        model: Whatever names a network; a module is not changed.
        loss: ``"behavioural-mse"``, ``"behavioural-kl"``, ``"mse"``, ``"cross_entropy"``, or a function of
            (output, target) giving the mean over the data.
        data: ``(x, y)``, ``x`` alone for a behavioural loss or for token ids of a language model, or an iterable of
            batches.
        config: All settings.
        layers: Vary only these weights (patterns over parameters' and modules' names, as ``--layers``); the rest stays
            fixed.
        per_layer: Vary each layer in turn (those of ``layers``, or all): one coefficient per layer.
        heads: Vary each of these attention heads in turn, given as (block, head), both from 0.
        groups: One label per row: one coefficient per group of the data.
        keep: Keep the weights of every draw in ``traces.positions``; ``save_draws(PATH)`` writes a netCDF file that
            ArviZ reads and from which estimates can be made again.
        tick: Called after each stage.
        **options: Fields of :class:`LLCConfig`, e.g. ``nbeta=100, gamma=1, seed=3``, on top of ``config``.

    Returns:
        The estimate at ``nbeta`` (default ``n / ln n``) and its limit; with ``per_layer``, ``heads`` or ``groups``
        those of every part, by name.

    Warns:
        NoEstimateWarning: The chains allow no value; ``reason`` says why.

    Raises:
        BadInputError: The data do not fit the model, or the loss is not finite at its parameters.

    Examples:
        >>> x = torch.linspace(-1, 1, 50)[:, None]
        >>> result = llc(nn.Linear(1, 1), "behavioural-mse", x, chains=8, draws=100)  # two parameters
        >>> result.asymptotic, result.asymptotic_stderr
        (1.0, 0.0)
        >>> model = nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1))
        >>> list(llc(model, "behavioural-mse", x, per_layer=True, chains=4, draws=20).parts)
        ['0', '2']
    """
    settings = resolve(LLCConfig, config, options, of=llc)
    clock = Clock(settings.seconds)
    model = on_device(as_module(model), settings.device)
    if not isinstance(per_layer, bool):
        raise BadInputError("llc", f"option 'per_layer' must be True or False, not {per_layer!r}")
    if heads is not None and not _are_heads(heads):
        raise BadInputError("llc", "option 'heads' must be a list of pairs (block, head)")
    if sum((per_layer, heads is not None, groups is not None)) > 1:
        raise BadInputError("llc", "give one of per_layer, heads and groups at a time")
    if settings.gamma is None:  # that of the whole network, whichever part varies
        settings = dataclasses.replace(settings, gamma=default_gamma(FlatModel(model).theta))
    if not per_layer and heads is None and groups is None:
        function = local_objective(model, loss, data, layers)
        observer = KeptPositions(function.flat.theta) if keep else None
        traces = sample(function, function.flat.theta, settings, tick, clock, observer)
        if observer is not None:
            traces = dataclasses.replace(traces, positions=observer.by_name(function.flat.split))
        return estimate(traces, settings).with_loss(function.name).warn()
    if keep:
        raise BadInputError(
            "llc", "keep=True belongs to one coefficient; leave out per_layer, heads and groups"
        )
    data = collect(data, model)
    data = data[0] if data[1] is None else data

    def of(part: nn.Module, rows: Any, chosen: str | Sequence[str] | None) -> LearningCoefficient:
        function = local_objective(part, loss, rows, chosen)
        coefficient = estimate(sample(function, function.flat.theta, settings, silent), settings)
        return coefficient.with_loss(function.name)

    if per_layer:
        return each(layer_names(model, layers), lambda name: of(model, data, [name]), tick)
    if heads is not None:
        named = {
            f"{block}.{number}": PartModel(model, head_entries(model, (block, number)))
            for block, number in heads
        }
        return each(tuple(named), lambda name: of(named[name], data, None), tick)
    x = data[0] if isinstance(data, tuple) else data
    by_label = dict(data_groups(groups, number_of_rows(x)))
    return each(tuple(by_label), lambda name: of(model, rows_of(data, by_label[name]), layers), tick)


def _are_heads(heads: Any) -> bool:
    if not isinstance(heads, Sequence) or isinstance(heads, str):
        return False
    return all(isinstance(head, Sequence) and len(head) == 2 and not isinstance(head, str) for head in heads)


def local_objective(
    model: nn.Module, loss: Loss, data: Any, layers: str | Sequence[str] | None = None
) -> Objective:
    """The loss as a function of the flat parameters, in double precision where the problem is small.

    The ladder's cold end needs the digits.
    """
    size = FlatModel(model, layers=layers).size
    return objective(model, loss, data, layers=layers, dtype=torch.float64 if size <= _DOUBLE_LIMIT else None)


def learning_coefficient(
    potential: Potential,
    theta: Any,
    *,
    config: LLCConfig | None = None,
    tick: Tick = silent,
    **options: Unpack[LLCOptions],
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
    settings = resolve(LLCConfig, config, options, of=learning_coefficient)
    point = (
        theta.detach() if isinstance(theta, Tensor) else torch.as_tensor(np.asarray(theta, dtype=np.float64))
    )
    if point.ndim == 0:
        point = point.reshape(1)
    if not point.is_floating_point() or not bool(torch.isfinite(point).all()):
        raise BadInputError("theta", "must hold finite floating-point numbers")
    point = _doubled(potential, point)
    return estimate(sample(potential, point, settings, tick), settings).warn()


def sample(
    potential: Potential,
    theta: Tensor,
    config: LLCConfig,
    tick: Tick = silent,
    clock: Clock | None = None,
    observer: Observer | None = None,
) -> Traces:
    """The expensive step: draws of the localised posterior, kept for any number of estimates.

    Examples:
        >>> settings = LLCConfig(chains=4, draws=20, ladder=False)
        >>> sample(lambda w: (w**2).sum(), torch.zeros(2), settings).excess.shape[1:]
        (4, 20)
    """
    clock = clock or Clock(config.seconds)
    few = condensed(potential) if isinstance(potential, Objective) else potential
    check_point(few, theta)
    around = surroundings(few, theta, _LOOK_SHARE * clock.left)
    if config.ladder is None and around is not None and around.exact is not None:
        config = dataclasses.replace(config, ladder=False)  # nothing is left to extrapolate
    traces = draw(potential, theta, config, tick, clock, observer)
    if around is not None and around.rank is None and isinstance(few, Objective) and not clock.timed:
        around = with_rank(around, few)
    return dataclasses.replace(traces, around=around)


def draw(
    potential: Potential,
    theta: Tensor,
    config: LLCConfig,
    tick: Tick = silent,
    clock: Clock | None = None,
    observer: Observer | None = None,
) -> Traces:
    """The draws alone, without a look at the surroundings."""
    clock = clock or Clock(config.seconds)
    nbeta = config.nbeta
    if nbeta is None:
        nbeta = _wbic(potential.count) if isinstance(potential, Objective) else 1e4
    settings = localised(config, potential, theta)
    few = condensed(potential) if isinstance(potential, Objective) else potential
    kind = chosen_sampler(few, theta, settings)
    if kind in FULL_DATA:
        target = dataclasses.replace(local_posterior(few, theta, settings.gamma or 1.0), observer=observer)
        traces = _sample_all_data(target, settings, float(nbeta), tick, clock)
    elif isinstance(potential, Objective):
        minibatches = dataclasses.replace(settings, sampler=kind)
        traces = sample_sgld(potential, minibatches, float(nbeta), tick, clock=clock, observer=observer)
    else:
        raise BadInputError(kind, "needs data to draw minibatches from; a plain potential is sampled by hmc")
    return dataclasses.replace(traces, on_data=isinstance(potential, Objective))


def _sample_all_data(
    seen: LocalPosterior, config: LLCConfig, nbeta: float, tick: Tick, clock: Clock
) -> Traces:
    """By conditional draws where the loss allows them, else by HMC.

    Where a whole ladder of exchanges is affordable it is as good, and goes colder; but one block is drawn outright.
    """
    most = (
        1 if config.sampler == Sampler.AUTO and sampling_plan(config, seen.size, seen.cost).exchange else None
    )
    traces = conditional_traces(seen, config, nbeta, tick, most=most, clock=clock)
    if traces is not None:
        return traces
    if seen.observer is not None:
        seen.observer.restart()
    return sample_hmc(seen, config, nbeta, tick, clock)


def conditional_traces(
    seen: LocalPosterior,
    config: LLCConfig,
    nbeta: float | Sequence[float],
    tick: Tick,
    *,
    most: int | None = None,
    clock: Clock | None = None,
) -> Traces | None:
    """Draws by conditionals of at most so many blocks; ``None`` where there are no such and they are not insisted on.

    Args:
        seen: What to sample.
        config: How.
        nbeta: A temperature, with the ladder that belongs to it, or just these.
        tick: Called now and then.
        most: Blocks.
        clock: The time that may be used.

    Raises:
        BadInputError: ``gibbs`` was asked for and is not possible.
    """
    if config.sampler in (Sampler.HMC, Sampler.TEMPERED):
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
        single = isinstance(nbeta, float)
        rungs = ladder(seen, config, nbeta, blocks) if isinstance(nbeta, float) else nbeta
        extrapolated = single and len(rungs) > 1
        traces = sample_gibbs(seen, blocks, config, rungs, tick, clock, extrapolated=extrapolated)
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
