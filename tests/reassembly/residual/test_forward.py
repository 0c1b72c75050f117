"""The passes, and what is predicted from them, against autograd and brute force."""

import numpy as np
import pytest
from dropped import drop, forward

from strati.reassembly.residual.network import run, stack
from strati.reassembly.residual.order import (
    flip_effects,
    regress_order,
    ridge,
    sorted_by_flips,
    sweep,
)
from strati.reassembly.residual.pieces import as_pieces, assign_roles_by_shape
from strati.reassembly.residual.search import mixed_pass, piece_effects, to_polytope, uniform
from strati_reproductions.dropped_net.ranking import _insertion_gains, insert, swap_repair


def chain(pieces, permutation, act="relu"):
    found = assign_roles_by_shape(as_pieces(pieces))
    parts = stack(found, act)
    inner = {p.number: k for k, p in enumerate(found.inner)}
    outer = {p.number: k for k, p in enumerate(found.outer)}
    ins = np.array([inner[k] for k in permutation[:-1:2]])
    outs = np.array([outer[k] for k in permutation[1:-1:2]])
    return parts, ins, outs


@pytest.mark.parametrize("act", ["relu", "gelu", "tanh"])
def test_adjoint_is_the_gradient(act):
    torch = pytest.importorskip("torch")
    pieces, x, y, truth = drop(4, 6, 10, outputs=2, act=act, rows=5)
    parts, ins, outs = chain(pieces, truth, act)
    passed = run(parts, ins, outs, x)
    np.testing.assert_allclose(passed.output, y, atol=1e-5)
    layers = [(torch.tensor(w), torch.tensor(b)) for w, b in (pieces[k] for k in truth)]
    activation = {"relu": torch.relu, "gelu": torch.nn.functional.gelu, "tanh": torch.tanh}[act]
    for k in range(5):
        z = stream = torch.tensor(passed.streams[k], requires_grad=True)
        for block in range(k, 4):
            (W, w), (V, v) = layers[2 * block], layers[2 * block + 1]
            z = z + activation(z @ W.T + w) @ V.T + v
        out = z @ layers[-1][0].T + layers[-1][1]
        for q in range(2):
            (gradient,) = torch.autograd.grad(out[:, q].sum(), stream, retain_graph=True)
            np.testing.assert_allclose(passed.adjoint[k][q], gradient.numpy(), atol=1e-5)


def test_output_is_the_same_in_chunks_and_leaves_the_input_alone():
    pieces, x, y, truth = drop(3, 5, 7, rows=700)
    parts, ins, outs = chain(pieces, truth)
    kept = x.copy()
    np.testing.assert_allclose(parts.output(ins, outs, x), y, atol=1e-5)
    np.testing.assert_allclose(parts.output(ins, outs, x[:1]), y[:1], atol=1e-5)
    assert np.array_equal(x, kept)


def test_flip_effects_are_true_to_second_order():
    pieces, x, _, truth = drop(5, 8, 16, act="tanh", rows=200)
    parts, ins, outs = chain(pieces, truth, "tanh")
    small = parts.__class__(**(vars(parts) | {"w_out": 0.05 * parts.w_out, "b_out": 0.05 * parts.b_out}))
    passed = run(small, ins, outs, x)
    effects, upper = flip_effects(passed)
    for pair in range(len(upper[0])):
        a, b = upper[0][pair], upper[1][pair]
        if b != a + 1:
            continue
        order = np.arange(5)
        order[[a, b]] = b, a
        change = (small.output(ins[order], outs[order], x) - passed.output)[:, 0]
        assert np.corrcoef(change, effects[:, pair])[0, 1] > 0.98
        assert 0.9 < np.linalg.norm(effects[:, pair]) / np.linalg.norm(change) < 1.1


def test_piece_effects_are_derivatives():
    pieces, x, _, truth = drop(4, 6, 10, act="tanh", rows=50)
    parts, _, _ = chain(pieces, truth, "tanh")
    order = np.arange(4)
    mixture = uniform(parts)
    base = mixed_pass(parts, x, mixture, order)
    effects = piece_effects(parts, base, order)
    step = np.zeros((4, 4))
    step[1, 2] = step[3, 0] = 1e-2
    step[1, 0] = step[3, 2] = -1e-2  # keeps all sums, as every true change does
    moved = mixed_pass(parts, x, mixture + step, order).output - base.output
    np.testing.assert_allclose((effects * step).sum(axis=(1, 2)), moved[:, 0], rtol=0.05, atol=2e-5)


@pytest.mark.parametrize("shared", [False, True])
def test_polytope_uses_every_piece_once(shared):
    P = to_polytope(np.random.default_rng(0).standard_normal((6, 6)), shared, rounds=500)
    assert (P >= 0).all()
    if shared:
        np.testing.assert_allclose(P.sum(axis=0) + P.sum(axis=1), 1, atol=5e-3)
        assert (np.diag(P) == 0).all()
    else:
        np.testing.assert_allclose(P.sum(axis=0), 1, atol=5e-3)
        np.testing.assert_allclose(P.sum(axis=1), 1, atol=5e-3)


def test_ridge_has_one_answer_in_both_forms():
    rng = np.random.default_rng(0)
    tall = rng.standard_normal((40, 12)).astype(np.float32)
    target = rng.standard_normal(40).astype(np.float32)
    for columns, y in ((tall, target), (np.ascontiguousarray(tall.T), target[:12])):
        penalty = 0.1 * np.square(columns).sum() / columns.shape[1]
        direct = np.linalg.solve(columns.T @ columns + penalty * np.eye(columns.shape[1]), columns.T @ y)
        np.testing.assert_allclose(ridge(columns, y, (0.1,))[0], direct, rtol=1e-3, atol=1e-5)


def test_sorting_by_flips_undoes_a_permutation():
    order = np.random.default_rng(2).permutation(9)
    upper = np.triu_indices(9, 1)
    flips = (order[upper[0]] > order[upper[1]]).astype(float)
    assert (order[sorted_by_flips(flips, upper, 9)] == np.arange(9)).all()


def test_bubble_is_the_papers_repair_and_sweep_agrees_with_it():
    pieces, x, y, truth = drop(8, 12, 24, rows=600, seed=3)
    parts, ins, outs = chain(pieces, truth)
    order = np.array([1, 0, 2, 4, 3, 5, 6, 7])
    fixed, rounds = swap_repair(parts, ins[order], outs[order], x, y)
    assert (order[fixed] == np.arange(8)).all()
    assert sum(r.swaps for r in rounds) == 2 and rounds[-1].mse < 1e-10
    swept = sweep(parts, ins[order], outs[order], x, y)
    assert (order[swept.order] == np.arange(8)).all()
    assert len(swept.moves) == 2
    assert swept.before == pytest.approx(parts.mse(ins[order], outs[order], x, y), rel=1e-4)


def test_regression_orders_blocks_from_nothing():
    pieces, x, y, truth = drop(10, 16, 32, rows=1000, seed=4)
    parts, ins, outs = chain(pieces, truth)
    shuffle = np.random.default_rng(0).permutation(10)
    order, mse = regress_order(parts, ins[shuffle], outs[shuffle], x, y, floor=1e-12)
    assert (shuffle[order] == np.arange(10)).all()
    assert mse < 1e-10


def test_forward_of_the_tests_is_the_forward_of_the_paper():
    pieces, x, y, truth = drop(2, 3, 4, rows=10)
    assert np.allclose(forward([pieces[k] for k in truth], x), y)


def test_insertion_brings_a_block_home_where_neighbours_are_in_order():
    pieces, x, y, truth = drop(10, 12, 24, rows=600, seed=6)
    parts, ins, outs = chain(pieces, truth)
    order = np.insert(np.delete(np.arange(10), 1), 7, 1)  # one block six places from home
    found, mse, moves = insert(parts, ins[order], outs[order], x, y)
    assert (order[found] == np.arange(10)).all() and mse < 1e-10
    assert moves[0][:2] == (7, 1) and moves[-1][2] == mse


def test_predicted_gain_of_a_neighbours_insertion_is_that_of_their_exchange():
    pieces, x, y, truth = drop(6, 8, 16, outputs=2, act="tanh", rows=200)
    parts, ins, outs = chain(pieces, truth, "tanh")
    small = parts.__class__(**(vars(parts) | {"w_out": 0.05 * parts.w_out, "b_out": 0.05 * parts.b_out}))
    passed = run(small, ins, outs, x)
    gains = _insertion_gains(passed, passed.output - y)
    before = small.mse(ins, outs, x, y)
    for a in range(5):
        order = np.arange(6)
        order[[a, a + 1]] = a + 1, a
        true = before - small.mse(ins[order], outs[order], x, y)
        assert gains[a, a + 1] == pytest.approx(gains[a + 1, a], abs=1e-9)
        assert gains[a, a + 1] == pytest.approx(true, rel=0.1, abs=1e-6)
