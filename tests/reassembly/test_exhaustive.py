"""Few blocks: all arrangements, against enumeration in double precision that shares no code with strati."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import strati
from strati.reassembly.residual.network import stack
from strati.reassembly.residual.pairing import Score, pair, scores
from strati.reassembly.residual.pieces import as_pieces, assign_roles_by_shape
from strati.reassembly.residual.search import arrangement_count, search_all


def strong(seed, blocks, width, hidden):
    """Layers of a network whose blocks change the stream as much as they find in it; tanh."""
    rng = np.random.default_rng(seed)
    shapes = [(hidden, width), (width, hidden)] * blocks + [(1, width)]
    layers = [
        (
            (rng.normal(size=s) / np.sqrt(s[1])).astype(np.float32),
            (0.3 * rng.normal(size=s[0])).astype(np.float32),
        )
        for s in shapes
    ]
    x = rng.normal(size=(200, width)).astype(np.float32)
    y = answer(layers, range(2 * blocks), x)
    shuffle = rng.permutation(len(layers))
    return [layers[k] for k in shuffle], x, y, tuple(int(k) for k in np.argsort(shuffle))


def answer(layers, order, x):
    z = x.astype(np.float64)
    for k, m in zip(order[::2], order[1::2], strict=True):
        z = z + np.tanh(z @ layers[k][0].T + layers[k][1]) @ layers[m][0].T + layers[m][1]
    return z @ layers[-1][0].T + layers[-1][1]


def test_a_network_on_which_the_searches_stall():
    pieces, x, y, truth = strong(10, 4, 3, 6)
    found = strati.reassemble(pieces, x, y, activation="tanh")
    assert found.exact and found.permutation == truth


@pytest.mark.parametrize(("width", "hidden"), [(3, 5), (3, 3)])
def test_the_least_error_of_all_arrangements(width, hidden):
    """Data of another network: nothing is exact, the best is still the best."""
    pieces, x, *_ = strong(1, 2, width, hidden)
    y = np.sin(x @ np.ones(width))[:, None].astype(np.float32)
    parts = stack(assign_roles_by_shape(as_pieces(pieces)), "tanh")
    ins, outs, mse = search_all(parts, x, y)
    last = next(k for k, (W, _) in enumerate(pieces) if len(W) == 1)
    rest = [k for k in range(5) if k != last]
    layers = [pieces[k] for k in rest] + [pieces[last]]
    fits = [
        order
        for order in itertools.permutations(range(4))
        if all(layers[k][0].shape == (hidden, width) for k in order[::2])
    ]
    assert len(fits) == arrangement_count(parts)
    errors = [np.mean((answer(layers, order, x) - y) ** 2) for order in fits]
    assert mse == pytest.approx(min(errors), rel=1e-5)
    assert parts.mse(ins, outs, x, y) == mse


def test_scores_and_pairs_are_those_of_the_definition():
    """``|tr(W_out W_in)| / ||W_out W_in||_F``, and the assignment of the largest sum."""
    pieces, *_ = strong(3, 5, 4, 7)
    sorted_out = assign_roles_by_shape(as_pieces(pieces))
    parts = stack(sorted_out, "tanh")
    expected = np.zeros((5, 5))
    for a, inner in enumerate(sorted_out.inner):
        for b, outer in enumerate(sorted_out.outer):
            product = outer.weight.astype(np.float64) @ inner.weight.astype(np.float64)
            expected[a, b] = abs(np.trace(product)) / np.linalg.norm(product)
    assert np.allclose(scores(parts, Score.DIAGONAL), expected, atol=1e-6)
    best = max(itertools.permutations(range(5)), key=lambda p: expected[range(5), p].sum())
    assert tuple(pair(parts).outs) == best


def test_the_seed_is_taken_over_all_rows(dropped_net):
    """Measured on the public puzzle: ascending mean residual norm on all its inputs has an error of 0.052399."""
    from strati.io.data_files import read_data

    data = read_data(dropped_net / "historical_data.csv", target="pred")
    found = strati.reassemble(dropped_net / "pieces", data.x, data.y, seed_order="delta-norm")
    assert found.seed_mse == pytest.approx(0.052399, abs=1e-6)
