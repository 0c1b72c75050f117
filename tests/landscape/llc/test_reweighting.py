"""Where a ladder's chains lose their way, hotter draws and the distance show it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from strati.landscape.llc.config import LLCConfig
from strati.landscape.llc.extrapolate import consistent_rungs
from strati.landscape.llc.llc import draw


@pytest.fixture(scope="module")
def traces():
    settings = LLCConfig(chains=16, draws=100, coldest=1e7, ladder=True)
    return draw(lambda w: w[0] ** 2 + w[1] ** 4, torch.zeros(2, dtype=torch.float64), settings)


def test_a_ladder_that_mixed_agrees_throughout(traces):
    assert consistent_rungs(traces) == len(traces.nbeta)


def test_cold_chains_that_are_caught_are_found_by_the_hotter_ones(traces):
    """Losses twice too high from one temperature on: no chain tells, as all are caught alike."""
    broken = len(traces.nbeta) // 2
    excess = traces.excess.copy()
    excess[broken:] *= 2.0
    assert consistent_rungs(dataclasses.replace(traces, excess=excess)) <= broken + 1


def test_distances_that_do_not_move_end_the_ladder(traces):
    """Chains a decade apart from one another, each where its way down left it."""
    apart = traces.spread.copy()
    apart[5:] *= 10.0 ** (np.arange(traces.chains) % 4)[None, :, None]
    assert consistent_rungs(dataclasses.replace(traces, spread=apart)) <= 5
