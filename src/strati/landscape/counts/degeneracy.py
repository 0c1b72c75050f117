"""How many parameters a network really uses on given data: ``strati.degeneracy``.

The choice of method lives here. Plain chains are surveyed in one pass and counted by their structure (package ``mlp``);
other modules are watched at their layers (``module_counts``); networks small enough are also counted exactly
(``exact``). The result is in ``result``.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import Tensor, nn

from strati.core.errors import UnsupportedError
from strati.core.options import resolve
from strati.core.results import Tick, silent
from strati.evaluate.batches import device_of, whole_inputs
from strati.io.layers import select_names
from strati.io.to_module import as_module
from strati.landscape.counts import exact as exactly
from strati.landscape.counts.module_counts import count_module
from strati.landscape.counts.result import Degeneracy as Degeneracy
from strati.landscape.counts.result import DegeneracyConfig as DegeneracyConfig
from strati.landscape.counts.result import (
    ProblemSize,
    assemble,
    probe_warning,
    should_compute_exact,
    undecided,
)
from strati.landscape.mlp.sequential import Chain, as_chain
from strati.landscape.mlp.statistics_pass import SATURATED, survey
from strati.landscape.mlp.structure import count_layers, undecided_layers

if TYPE_CHECKING:
    from strati.core.option_types import DegeneracyOptions
    from strati.io.network import Openable

NARROW = 160
"""Up to this width one thread is as fast as two."""


def degeneracy(
    model: Openable,
    data: Any,
    *,
    config: DegeneracyConfig | None = None,
    tick: Tick = silent,
    **options: Unpack[DegeneracyOptions],
) -> Degeneracy:
    """Count the free directions in a network's parameters on given data.

    A direction is free if the outputs on the data do not change along it to first order, that is, if
    it is in the null space of the Hessian of the behavioural loss (eq. 6 and 10 of
    degeneracy-in-the-loss-landscape). Per layer with ``d_in`` inputs (the constant of the bias among
    them) and ``d_out`` outputs, activations of rank ``rG`` and Jacobians of rank ``rK`` leave
    ``d_in d_out - rG rK`` free, and neurons that fire together ``sum_a s_a t_a`` more.

    Args:
        model: Whatever names a network with linear layers or convolutions; plain feed-forward networks are understood
            best.
        data: Rows of inputs, rows first; token ids for a language model.
        config: Options; keywords of the same names win.
        tick: Called after each batch.
        options: Fields of :class:`DegeneracyConfig`.

    Raises:
        BadInputError: The data do not fit, there is no linear layer, outputs are not finite, or no such option.
        UnsupportedError: The network holds trained layers of a kind that is not understood.

    Examples:
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> result = degeneracy(model, torch.randn(100, 3))
        >>> result.free, result.method, result.sentence  # each neuron's scale is free
        (4, 'exact', 'The network uses 22 of 26 parameters on these data')
    """
    settings = resolve(DegeneracyConfig, config, options, of=degeneracy)
    model = as_module(model)
    inputs = whole_inputs(data, model, of="counting")
    device = device_of(model, settings.device) or inputs.device
    inputs = inputs.to(device)
    try:
        chain = as_chain(model).to(torch.float64, device)
    except UnsupportedError as refusal:
        return count_module(_on(model, device), inputs, refusal, settings, tick=tick)
    chain.rows(inputs[:1])  # refuse a wrong width before any work; the rest is cast batch by batch
    with _threads_for(chain):
        unused = sum(p.numel() for p in model.parameters()) - chain.parameters
        return _count_chain(chain, inputs, unused, settings, tick)


def _on(model: nn.Module, device: str | torch.device) -> nn.Module:
    """The model on a device; a copy where it is on another."""
    parameter = next(model.parameters(), None)
    return (
        model
        if parameter is None or parameter.device == torch.device(device)
        else copy.deepcopy(model).to(device)
    )


@contextmanager
def _threads_for(chain: Chain) -> Iterator[None]:
    """One thread for narrow networks: hundreds of small matrices gain nothing from two, and wait on a busy machine."""
    before = torch.get_num_threads()
    if max(chain.widths) <= NARROW:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _count_chain(chain: Chain, x: Tensor, unused: int, config: DegeneracyConfig, tick: Tick) -> Degeneracy:
    epsilon = config.epsilon
    values = x.shape[0] * chain.widths[-1]
    places = list(range(len(chain.stages)))
    if config.layers is not None:
        selected = set(select_names([s.name for s in chain.stages], config.layers))
        places = [k for k in places if chain.stages[k].name in selected]
    if len(places) < len(chain.stages):
        unused = 0
    exactly_too = should_compute_exact(config.exact, sum(chain.stages[k].parameters for k in places), values)
    statistics = survey(chain, x, seed=config.seed, epsilon=epsilon is not None, tick=tick)
    layers = count_layers(chain, x, statistics, places, epsilon=epsilon)
    sizes = [layer.parameters for layer in layers]
    warnings = []
    if not statistics.exact_jacobians:
        warnings.append(probe_warning(statistics.uncertain))
    if open_ones := undecided_layers(statistics):
        warnings.append(undecided(open_ones))
    ranks = None
    if exactly_too:
        ranks = exactly.exact_ranks(
            exactly.chain_rows(chain, x, places), sizes, values, statistics.data, epsilon=epsilon
        )
        ranks = replace(
            ranks, hidden=ranks.hidden or any(c.least_slope < SATURATED for c in statistics.layers)
        )
        if not ranks.total.decided and exactly.digits_affordable(sum(sizes), values):
            ranks = exactly.settled(ranks, exactly.chain_ranks(chain, x, places))
    least = None
    if config.exact is None and ranks is None:
        least = exactly.least_rank(
            sum(sizes),
            chain.widths[-1],
            statistics.data,
            lambda count: exactly.chain_rows(chain, x[:count], places),
        )
    size = ProblemSize(sum(sizes) + unused, unused, statistics.data, values, least)
    skipped = [("(unused)", f"{unused:,} parameters that no output depends on")] if unused else []
    return assemble(layers, size, ranks, epsilon=epsilon, warnings=warnings, skipped=skipped)
