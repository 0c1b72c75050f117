"""The variants of table 1: sweeps against the repair of the other tables, gaps and orders against their definitions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strati.reassembly.residual.network import ResidualWeights, stack
from strati.reassembly.residual.pairing import pair
from strati.reassembly.residual.pieces import as_pieces, assign_roles_by_shape
from strati_reproductions.dropped_net import table_one
from strati_reproductions.dropped_net.open_questions import planted_network
from strati_reproductions.dropped_net.puzzle import TABLE_1
from strati_reproductions.dropped_net.ranking import bradley_terry, gaps, swap_repair


@pytest.fixture(scope="module")
def planted() -> tuple[ResidualWeights, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    pieces, x, y = planted_network(8, rows=200)
    parts = stack(assign_roles_by_shape(as_pieces(pieces)), "relu")
    pairs = pair(parts)
    return parts, pairs.ins, pairs.outs, x, y


def _blocks(ins: np.ndarray, outs: np.ndarray) -> list[tuple[int, int]]:
    return [(int(i), int(j)) for i, j in zip(ins, outs, strict=True)]


def test_a_sweep_from_left_to_right_is_that_of_the_other_tables(planted) -> None:
    parts, ins, outs, x, y = planted
    order, rounds = swap_repair(parts, ins, outs, x, y)
    chain = table_one.Chain(parts, _blocks(ins, outs), x, y)
    assert chain.error() == pytest.approx(parts.mse(ins, outs, x, y), rel=1e-4)
    (sweep,) = table_one.sweeps(len(ins))["left to right"]
    for expected in rounds:
        assert sweep(chain) == expected.swaps
        assert chain.error() == pytest.approx(expected.mse, rel=1e-3, abs=1e-9)
    assert sweep(chain) == 0
    assert chain.blocks == _blocks(ins[order], outs[order])


@pytest.mark.parametrize("kind", table_one.sweeps(8))
def test_every_count_of_exchanges_has_the_parity_of_the_change_of_order(planted, kind: str) -> None:
    parts, ins, outs, x, y = planted
    start = _blocks(ins, outs)
    chain = table_one.Chain(parts, start, x, y)
    exchanges = table_one.sweeps(len(ins))[kind][0](chain)
    places = np.array([start.index(block) for block in chain.blocks])
    inversions = int(np.triu(places[:, None] > places[None, :]).sum())
    assert inversions > 0
    assert exchanges >= inversions
    assert (exchanges - inversions) % 2 == 0
    assert chain.error() == pytest.approx(table_one.Chain(parts, chain.blocks, x, y).error(), rel=1e-5)


def test_gaps_are_those_of_equation_7_for_every_target(planted) -> None:
    parts, ins, outs, x, y = planted
    other = y + np.float32(0.1) * x[:, :1]
    tables = table_one.gaps_of(parts, _blocks(ins, outs), x, [y, other], lambda *_: None)
    for table, target in zip(tables, (y, other), strict=True):
        np.testing.assert_allclose(table, gaps(parts, ins, outs, x, target), rtol=1e-2, atol=1e-6)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000))
def test_strengths_stand_in_the_order_of_the_summed_wins(seed: int) -> None:
    gap = np.triu(np.random.default_rng(seed).normal(size=(7, 7)), 1)
    gap = gap - gap.T
    wins = 1 / (1 + np.exp(-gap))
    np.fill_diagonal(wins, 0)
    fit = bradley_terry(wins)
    assert np.array_equal(np.argsort(fit.strengths), np.argsort(wins.sum(axis=1)))
    start = np.random.default_rng(seed + 1).uniform(0.1, 1, 7)
    np.testing.assert_allclose(table_one.strengths(wins, start, 2000), fit.strengths, rtol=1e-4)


def test_the_table_itself_is_recognised_and_nothing_else() -> None:
    assert table_one.gives_table_1(TABLE_1)
    assert not table_one.gives_table_1(TABLE_1[:-1])
    assert not table_one.gives_table_1([(21, 0.001027), *TABLE_1[1:]])
    assert table_one.table_distance(TABLE_1) == 0
    assert table_one.table_distance([*TABLE_1, (2, 0.0)]) == 2


def test_no_variant_is_tried_twice() -> None:
    rows, kinds = list(table_one.row_sets(10_000)), list(table_one.sweeps(48))
    tried = [v.name for v in table_one.variants(["a", "b"], rows, kinds)]
    assert len(set(tried)) == len(tried) > 100
