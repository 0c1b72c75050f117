"""Covariances of the losses of rows over the local posterior: influence, kernel, susceptibilities, WAIC.

The chains are those of ``llc``. An observer evaluates the loss of every row at each kept draw and keeps running sums
(``covariances``), so that memory does not grow with the number of draws.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

import numpy as np
import torch
from torch import Tensor, nn

from strati.core.errors import BadInputError
from strati.core.options import nearest, resolve
from strati.core.results import Flag, Tick, silent
from strati.evaluate.models import on_device
from strati.io.to_module import as_module
from strati.landscape.influence.covariances import (
    FEWEST_BATCHES,
    BatchMoments,
    Covariances,
    correlation_of_batches,
    split_rhat,
)
from strati.landscape.influence.loss_file import LossFile
from strati.landscape.influence.result import Influence
from strati.landscape.influence.row_losses import RowLosses
from strati.landscape.llc.config import FULL_DATA, LLCConfig
from strati.landscape.llc.estimate import unmixed
from strati.landscape.llc.llc import draw, local_objective
from strati.landscape.llc.parts import PartModel, attention_blocks, head_counts, head_entries, layer_names
from strati.landscape.llc.posterior import default_gamma
from strati.landscape.llc.sampling_plan import Clock
from strati.landscape.objective import FlatModel, Loss, Objective, collect

if TYPE_CHECKING:
    from strati.core.option_types import LLCOptions
    from strati.core.results import FloatArray
    from strati.io.network import Openable
    from strati.landscape.llc.traces import Traces

_LENGTH = 20  # draws of a batch
_BATCHES = 4  # of a chain, at least, where the number of draws is set
_MOST_BATCHES = 32  # of a chain, likewise
_MOST_ENTRIES = 25_000_000


class InfluenceKind(StrEnum):
    """What is estimated."""

    INFLUENCE = "influence"
    KERNEL = "kernel"
    SUSCEPTIBILITY = "susceptibility"


Parts = str | Sequence[str] | Mapping[str, Any]
"""``"layers"``, ``"heads"``, patterns, or by name patterns or masks ``{parameter: boolean array}``."""


def influence(
    model: Openable,
    loss: Loss,
    data: Any,
    *,
    kind: str = "influence",
    parts: Parts | None = None,
    queries: Any = None,
    groups: Any = None,
    by: str = "row",
    layers: str | Sequence[str] | None = None,
    losses_file: str | Path | None = None,
    config: LLCConfig | None = None,
    tick: Tick = silent,
    **options: Unpack[LLCOptions],
) -> Influence:
    """Estimate covariances of the losses of rows under ``exp(-nbeta L - gamma/2 |w - w*|^2)``, with errors.

    ``L`` is the mean loss and ``l_i`` that of row ``i``. Entry ``(i, j)`` of ``influence`` is ``Cov(l_i, l_j)``
    (Bayesian influence: if the weight of row ``j`` grows by ``e``, the expected loss of row ``i`` changes by
    ``-e (nbeta/n) Cov(l_i, l_j)``), that of ``kernel`` the correlation ``Cov(l_i, l_j) / sqrt(Var(l_i) Var(l_j))``,
    and that of ``susceptibility`` is ``Cov(L, l_j)`` with only part ``i`` of the weights varying.

    Args:
        model: Whatever names a network; a module is not changed.
        loss: As for :func:`strati.llc`; a function of (output, target) must be a mean over rows.
        data: As for :func:`strati.llc`.
        kind: ``influence``, ``kernel`` or ``susceptibility``.
        parts: For susceptibilities: ``"layers"`` (default), ``"heads"``, ``"heads,layers"``, patterns of parameters, or
            a mapping of names to patterns or to masks (boolean arrays by the name of the parameter).
        queries: Other rows, as ``data``, or a list of row numbers: entries are then queries x rows.
        groups: One label per row: the columns are means over groups of rows.
        by: ``"row"``, or ``"token"`` for one column per prediction of a sequence.
        layers: Vary only these weights.
        losses_file: Write the loss of every column at every observed draw to this Parquet file, draw by draw.
        config: All settings of the sampler.
        tick: Called after each stage.
        **options: Fields of :class:`LLCConfig`, e.g. ``nbeta=100, gamma=1, seed=3``, on top of ``config``.

    Returns:
        Values and errors, and with all weights varying the singular fluctuation ``(nbeta/2) mean_i Var(l_i)`` and
        ``WAIC = -mean_i ln <exp(-l_i)> + (nbeta/n) mean_i Var(l_i)``. Entries of rows whose chains have not mixed are
        not a number (``null`` in JSON), and ``reason`` says why.

    Raises:
        BadInputError: The data do not fit the model, the loss is no mean over rows or has no gradient, a part selects
            nothing.

    References:
        Kreer et al., Bayesian influence functions (2025); Adam et al., The loss kernel (2025); Baker et al., Structural
        inference with susceptibilities (2025); Watanabe, J. Mach. Learn. Res. 11 (2010).

    Examples:
        >>> x = torch.tensor([[1.0], [2.0], [3.0]])
        >>> model = nn.Linear(1, 1, bias=False)
        >>> found = influence(model, "behavioural-mse", x, nbeta=10, gamma=1, seed=0)
        >>> variance = 1 / (10 * 2 * 14 / 3 + 1)  # of the weight: l_i = x_i^2 delta^2, L = 14/3 delta^2
        >>> exact = 2 * variance**2 * (x**2) @ (x**2).T
        >>> bool((abs(torch.tensor(found.values) - exact) < 5 * torch.tensor(found.stderr)).all())
        True
    """
    settings = resolve(LLCConfig, config, options, of=influence)
    clock = Clock(settings.seconds)
    quantity = _checked(kind, parts, queries, by)
    network = on_device(as_module(model), settings.device)
    settings = dataclasses.replace(
        settings, gamma=settings.gamma or default_gamma(FlatModel(network).theta), ladder=False
    )
    if quantity is InfluenceKind.SUSCEPTIBILITY:
        if losses_file is not None:
            raise BadInputError(
                "losses_file", "belongs to influence and kernel, which have one run of chains"
            )
        return _susceptibilities(network, loss, data, parts, layers, settings, (by, groups), tick, clock)
    function = local_objective(network, loss, data, layers)
    losses = RowLosses(function, by=by, groups=groups)
    labels, left = losses.labels, None
    row_numbers: list[int] | None = None
    if _are_numbers(queries):
        row_numbers = [int(number) for number in queries]
        if wrong := [number for number in row_numbers if not 0 <= number < len(labels)]:
            raise BadInputError("queries", f"no row {wrong[0]}; rows are 0 to {len(labels) - 1}")
        labels = tuple(losses.labels[number] for number in row_numbers)
    elif queries is not None:
        left = RowLosses(local_objective(network, loss, queries, layers), by=by)
        labels = left.labels
    if len(labels) * len(losses.labels) > _MOST_ENTRIES:
        raise BadInputError(
            "data",
            f"{len(labels):,} x {len(losses.labels):,} entries are too many; give queries, groups or fewer rows",
        )
    kernel = quantity is InfluenceKind.KERNEL
    with ExitStack() as stack:
        file = None
        if losses_file is not None:
            baseline = losses.columns(losses.baseline[None] * losses.labelled)
            file = stack.enter_context(LossFile(losses_file, losses.labels, baseline))
        recorder = Recorder(losses, settings, kernel=kernel, queries=left, rows=row_numbers, file=file)
        traces = draw(function, function.flat.theta, settings, tick, clock, recorder)
    estimates = recorder.estimates(traces, settings)
    return Influence(
        kind=str(quantity),
        rows=losses.labels,
        labels=labels,
        square=queries is None,
        **estimates._asdict(),
        settings=_settings_of(traces, settings, function),
    )


def _susceptibilities(
    network: nn.Module,
    loss: Loss,
    data: Any,
    parts: Parts | None,
    layers: str | Sequence[str] | None,
    settings: LLCConfig,
    columns: tuple[str, Any],
    tick: Tick,
    clock: Clock,
) -> Influence:
    """One run of chains per part, in which its weights alone vary."""
    x, y = collect(data, network)
    rows = x if y is None else (x, y)
    named = dict(_parts(network, parts, layers))
    values: list[FloatArray] = []
    errors: list[FloatArray] = []
    reasons: dict[str, str] = {}
    flags: dict[str, Flag] = {}
    for name, (module, patterns) in named.items():
        function = local_objective(module, loss, rows, patterns)
        losses = RowLosses(function, by=columns[0], groups=columns[1])
        recorder = Recorder(losses, settings, kernel=False, mean=True)
        share = settings
        if clock.seconds is not None:
            share = dataclasses.replace(settings, seconds=clock.left / (len(named) - len(values)))
        timed = Clock(share.seconds) if share.seconds is None or share.seconds > 0 else clock
        traces = draw(function, function.flat.theta, share, silent, timed, recorder)
        estimates = recorder.estimates(traces, settings)
        values.append(estimates.values[0])
        errors.append(estimates.stderr[0])
        flags |= {flag.code: flag for flag in estimates.warnings}
        if estimates.reason is not None:
            reasons[name] = estimates.reason
        tick(name)
    reason = None
    if reasons:
        first = next(iter(reasons))
        reason = (
            f"{len(reasons)} of {len(named)} parts have entries without a value, {first}: {reasons[first]}"
        )
    return Influence(
        kind=str(InfluenceKind.SUSCEPTIBILITY),
        rows=losses.labels,
        labels=tuple(named),
        square=False,
        values=np.stack(values),
        stderr=np.stack(errors),
        reason=reason,
        waic=None,
        waic_stderr=None,
        fluctuation=None,
        fluctuation_stderr=None,
        warnings=tuple(flags.values()),
        settings=_settings_of(traces, settings, function),
    )


Scalars = tuple[float | None, float | None, float | None, float | None]


class Estimates(NamedTuple):
    """Covariances and what else the losses of the terms say."""

    values: FloatArray
    stderr: FloatArray
    reason: str | None
    waic: float | None
    waic_stderr: float | None
    fluctuation: float | None
    fluctuation_stderr: float | None
    warnings: tuple[Flag, ...]


class Recorder:
    """Observes the chains: evaluates the losses of rows at their positions and keeps running sums.

    Args:
        losses: Of the columns.
        settings: Of the sampler, for the length of batches.
        kernel: Estimate correlations, not covariances.
        queries: Losses of other rows, for the left side; by default the columns themselves.
        rows: Numbers of the columns that are the left side.
        mean: The left side is the mean loss.
        file: Where the losses of the columns are written.
    """

    def __init__(
        self,
        losses: RowLosses,
        settings: LLCConfig,
        *,
        kernel: bool,
        queries: RowLosses | None = None,
        rows: Sequence[int] | None = None,
        mean: bool = False,
        file: LossFile | None = None,
    ) -> None:
        self.file = file
        self.losses, self.queries, self.rows, self.mean, self.kernel = losses, queries, rows, mean, kernel
        self.length = _LENGTH
        if settings.draws is not None:
            stride = 1 if settings.sampler in FULL_DATA else 5
            observed = settings.draws // stride
            self.length = max(1, min(observed // _BATCHES, max(_LENGTH, observed // _MOST_BATCHES)))
        self.restart()

    def restart(self) -> None:
        """Forget all draws so far."""
        if self.file is not None:
            self.file.restart()
        self.sums = Covariances(self.length, kernel=self.kernel)
        self.terms = BatchMoments(self.length, (torch.clone, torch.square, lambda excess: torch.exp(-excess)))

    def observe(self, first: int, offsets: Tensor) -> None:
        """Count the chains' positions of one draw."""
        terms = self.losses.terms(offsets)
        right = left = self.losses.columns(terms)
        if self.mean:
            left = self.losses.mean(terms)
        elif self.queries is not None:
            left = self.queries.columns(self.queries.terms(offsets))
        elif self.rows is not None:
            left = right[:, self.rows]
        if self.file is not None:
            self.file.write(first, right)
        self.sums.add(first, left, right)
        if not self.mean:  # susceptibilities come without WAIC
            self.terms.add(first, terms)

    def estimates(self, traces: Traces, settings: LLCConfig) -> Estimates:
        """Covariances with errors, or why there are none."""
        refusal = unmixed(traces, settings)
        reason = None if refusal is None else refusal.text
        if reason is None and self.sums.batches < FEWEST_BATCHES:
            reason = "too few draws for an error; give more draws"
        flags = () if traces.sampler in FULL_DATA else (_STEP_BIAS,)
        if reason is not None:
            left = 1 if self.mean else len(self.losses.labels if self.rows is None else self.rows)
            left = len(self.queries.labels) if self.queries is not None else left
            empty = np.full((left, len(self.losses.labels)), np.nan)
            return Estimates(empty, empty, reason, None, None, None, None, flags)
        entries = self.sums.covariances()
        slow_left, slow_right = (
            ~(split_rhat(side) <= settings.max_rhat) for side in (self.sums.left, self.sums.right)
        )
        slow = slow_left[:, None] | slow_right[None]
        if slow.any():
            reason = (
                f"{int(slow_right.sum())} of {len(slow_right)} columns have not mixed (R-hat above "
                f"{settings.max_rhat:g}); more draws or seconds, or a larger gamma, would help"
            )
        undefined = slow | ~np.isfinite(entries.values) | ~np.isfinite(entries.stderr)
        if undefined.any() and reason is None:
            reason = "some losses do not vary, or are not finite"
        values, errors = (np.where(undefined, np.nan, part) for part in (entries.values, entries.stderr))
        scalars: Scalars = (None, None, None, None)
        if not self.mean:
            scalars = self._waic(float(traces.nbeta[traces.main]))
        return Estimates(values, errors, reason, *scalars, flags)

    def _waic(self, nbeta: float) -> tuple[float, float, float, float]:
        """WAIC and singular fluctuation with their errors."""
        means, squares, weights = self.terms.stacked()
        correlated = correlation_of_batches(means)
        means, squares, weights = (part.reshape(-1, part.shape[-1]) for part in (means, squares, weights))
        batches, count = len(means), self.losses.count
        centre, weight = means.mean(0), weights.mean(0)
        variances = squares.mean(0) - centre**2 + means.var(0, ddof=1) / batches
        variance = float(variances.sum()) / count
        baseline = float((self.losses.baseline * self.losses.labelled).sum()) / count
        training = baseline - float(np.log(weight).sum()) / count
        of_variance = (squares - 2 * centre * means).sum(1) / count
        of_training = -(weights / weight).sum(1) / count
        share = nbeta / count

        def error(batch: FloatArray) -> float:
            return float(batch.std(ddof=1)) / math.sqrt(batches) * correlated

        return (
            training + share * variance,
            error(of_training + share * of_variance),
            nbeta / 2 * variance,
            nbeta / 2 * error(of_variance),
        )


_STEP_BIAS = Flag(
    "step-bias",
    "SGLD's finite step and the noise of minibatches widen the posterior, so these values are too large; repeat with "
    "half the step, or use the sampler hmc, to see by how much",
)


def _settings_of(traces: Traces, settings: LLCConfig, function: Objective) -> dict[str, Any]:
    return {
        "sampler": str(traces.sampler),
        "nbeta": float(traces.nbeta[traces.main]),
        "gamma": traces.gamma,
        "chains": traces.chains,
        "draws": traces.draws,
        "seconds": settings.seconds,
        "loss": None if function.name is None else str(function.name),
    }


def _checked(kind: str, parts: Parts | None, queries: Any, by: str) -> InfluenceKind:
    if kind not in set(InfluenceKind):
        raise BadInputError("kind", f"no kind {kind!r}; {nearest(str(kind), list(InfluenceKind))}")
    if by not in ("row", "token"):
        raise BadInputError("by", f"must be 'row' or 'token', not {by!r}")
    if kind == InfluenceKind.SUSCEPTIBILITY and queries is not None:
        raise BadInputError("queries", "belong to influence and kernel; give the rows as data")
    if kind != InfluenceKind.SUSCEPTIBILITY and parts is not None:
        raise BadInputError("parts", "belong to kind='susceptibility'")
    return InfluenceKind(kind)


def _are_numbers(queries: Any) -> bool:
    return isinstance(queries, list | range) and all(isinstance(number, int) for number in queries)


def _parts(
    network: nn.Module, parts: Parts | None, layers: str | Sequence[str] | None
) -> Iterator[tuple[str, tuple[nn.Module, str | Sequence[str] | None]]]:
    """Each part's name, the module to vary and the patterns of its weights."""
    if isinstance(parts, Mapping):
        if not parts:
            raise BadInputError("parts", "is empty; name at least one part")
        for name, part in parts.items():
            if isinstance(part, Mapping):
                yield str(name), (PartModel(network, _masked(network, str(name), part)), None)
            else:
                yield str(name), (network, part)
        return
    words = parts.split(",") if isinstance(parts, str) else list(parts or ["layers"])
    words = [word.strip() for word in words if word.strip()]
    if not words:
        raise BadInputError("parts", "is empty; give heads, layers or patterns of parameters")
    for word in words:
        if word == "layers":
            for name in layer_names(network, layers):
                yield name, (network, [name])
        elif word == "heads":
            for head in _heads(network):
                yield f"head {head[0]}.{head[1]}", (PartModel(network, head_entries(network, head)), None)
        else:
            yield word, (network, [word])


def _heads(network: nn.Module) -> Iterator[tuple[int, int]]:
    count, _ = head_counts(network)
    for block in attention_blocks(network):
        for head in range(count):
            yield block, head


def _masked(network: nn.Module, name: str, masks: Mapping[str, Any]) -> dict[str, Tensor]:
    parameters = dict(network.named_parameters())
    entries: dict[str, Tensor] = {}
    for parameter, mask in masks.items():
        if parameter not in parameters:
            raise BadInputError(
                "parts", f"{name}: no parameter {parameter!r}; {nearest(parameter, parameters)}"
            )
        selected = torch.as_tensor(mask).bool()
        if selected.shape != parameters[parameter].shape:
            raise BadInputError(
                "parts",
                f"{name}: the mask of {parameter} has shape {tuple(selected.shape)}, "
                f"the parameter {tuple(parameters[parameter].shape)}",
            )
        entries[parameter] = selected.reshape(-1).nonzero()[:, 0]
    entries = {parameter: places for parameter, places in entries.items() if len(places)}
    if not entries:
        raise BadInputError("parts", f"{name}: the mask selects nothing")
    return entries
