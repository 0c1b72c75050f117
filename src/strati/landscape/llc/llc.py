"""The local learning coefficient of a network, or of any differentiable function.

``lambda(nbeta) = nbeta (<L> - L*)`` under the posterior localised at the given parameters (WBIC form, Watanabe 2013,
Lau et al. 2023), with its Monte Carlo error, and its limit for large ``nbeta``. Sampling (``sample``) and
estimating (``estimate``) are two steps: traces are kept, and an estimate from them takes milliseconds.
The samplers are in ``hmc`` and ``sgld``, the extrapolation in ``extrapolate``.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import numpy as np
import torch
from torch import Tensor, nn

from strati.core.errors import BadInputError
from strati.core.options import resolve
from strati.core.plugins import require
from strati.core.results import Tick, silent
from strati.evaluate.models import on_device
from strati.io.to_module import as_module
from strati.landscape.llc import tuning
from strati.landscape.llc.config import LLCConfig, Sampler
from strati.landscape.llc.estimate import LearningCoefficient, estimate
from strati.landscape.llc.geometry import LocalGeometry, NumericalRank, local_geometry, with_rank
from strati.landscape.llc.gibbs import sample_gibbs
from strati.landscape.llc.hmc import sample_hmc
from strati.landscape.llc.loss_structure import moment_matched_data
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
from strati.landscape.llc.posterior import check_point, default_gamma
from strati.landscape.llc.sampling_plan import NOT_QUADRATIC, Clock, Planned, SamplingPlan, sampling_plan
from strati.landscape.llc.sgld import sample_sgld
from strati.landscape.llc.traces import TRACE_ARRAYS, KeptPositions, Observer, Traces
from strati.landscape.objective import FlatModel, Loss, Objective, Potential, collect, objective

if TYPE_CHECKING:
    from strati.core.option_types import LLCOptions
    from strati.io.network import Openable

__all__ = ["LLCConfig", "LearningCoefficient", "estimate", "learning_coefficient", "llc", "sample"]


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
    return objective(
        model, loss, data, layers=layers, dtype=torch.float64 if size <= tuning.DENSE_LIMIT else None
    )


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
    reduced = moment_matched_data(potential)
    check_point(reduced, theta)
    around = None
    if theta.dtype == torch.float64 and theta.numel() <= tuning.DENSE_LIMIT:
        around = local_geometry(reduced, theta, tuning.GEOMETRY_SHARE * clock.left)
    known = around is not None and around.exact is not None
    planned = sampling_plan(potential, theta, config, clock, reduced=reduced, limit_known=known)
    traces = run(potential, theta, planned, tick, clock, observer)
    if around is not None and around.rank is None and isinstance(reduced, Objective) and not clock.timed:
        around = with_rank(around, reduced)
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
    planned = sampling_plan(potential, theta, config, clock, reduced=moment_matched_data(potential))
    return run(potential, theta, planned, tick, clock, observer)


def run(
    potential: Potential,
    theta: Tensor,
    planned: Planned,
    tick: Tick = silent,
    clock: Clock | None = None,
    observer: Observer | None = None,
) -> Traces:
    """Execute a plan.

    Raises:
        BadInputError: ``gibbs`` was asked for, and the loss is not quadratic in the blocks that were found.
    """
    clock = clock or Clock()
    plan, target, otherwise = planned
    traces: Traces | None
    if target is None:
        assert isinstance(potential, Objective)
        traces = sample_sgld(potential, plan, tick, clock=clock, observer=observer)
    else:
        target = dataclasses.replace(target, observer=observer)
        traces = None
        if plan.sampler == Sampler.GIBBS:
            traces = sample_gibbs(target, plan, tick, clock)
            if traces is None and otherwise is None:
                raise BadInputError("gibbs", NOT_QUADRATIC)
        if traces is None:
            if observer is not None:
                observer.restart()
            traces = sample_hmc(target, otherwise or plan, tick, clock)
    return dataclasses.replace(traces, on_data=isinstance(potential, Objective))


def _doubled(potential: Potential, theta: Tensor) -> Tensor:
    """Double precision where the function takes it: the ladder's cold end needs the digits."""
    if theta.dtype == torch.float64 or theta.numel() > tuning.DENSE_LIMIT:
        return theta
    try:
        with torch.no_grad():
            potential(theta.double())
    except (RuntimeError, TypeError):  # it holds tensors of its own in single precision
        return theta
    return theta.double()


def load_traces(path: str | Path) -> Traces:
    """Read what :func:`save_traces` wrote; :func:`~strati.landscape.llc.estimate.estimate` takes it.

    Raises:
        BadInputError: The file does not hold traces.
        MissingExtraError: arviz is not installed.
    """
    arviz = require("arviz", "arviz", "reading draws")
    try:
        stored = arviz.from_netcdf(str(path), engine="h5netcdf")
        scalars: dict[str, Any] = json.loads(stored.attrs["strati"])
        arrays: dict[str, Any] = {name: np.asarray(stored.constant_data[name]) for name in TRACE_ARRAYS}
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise BadInputError(
            path, "holds no draws; write them with llc(..., keep=True).save_draws(PATH)"
        ) from error
    around = scalars.pop("around")
    if around is not None:
        rank = None if around["rank"] is None else NumericalRank(*around["rank"])
        places = {name: np.array(around.pop(name), dtype=float) for name in ("curvature", "displacement")}
        around = LocalGeometry(**{**around, "rank": rank, **places})
    if scalars.get("plan") is not None:
        scalars["plan"] = SamplingPlan(**scalars["plan"])
    names = [name for name in stored.posterior.data_vars if name not in ("llc", "loss", "distance")]
    positions = {name: np.asarray(stored.posterior[name]) for name in names}
    return Traces(**arrays, **scalars, around=around, positions=positions or None)
