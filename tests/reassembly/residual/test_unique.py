"""Orders and pairs that the data do not fix are said to be one choice of several; those that they fix are not."""

import numpy as np
import pytest
from dropped import drop

import strati
from strati.reassembly.residual.network import activation


def run(layers, x):
    z = x
    for (W, w), (V, v) in zip(layers[:-1:2], layers[1:-1:2], strict=True):
        z = z + activation("relu").value(z @ W.T + w) @ V.T + v
    return z @ layers[-1][0].T + layers[-1][1]


def network(blocks, width, hidden, scale=1.0, seed=0):
    rng = np.random.default_rng(seed)
    layers = []
    for _ in range(blocks):
        layers.append((rng.normal(size=(hidden, width)) / np.sqrt(width), rng.normal(size=hidden) / 3))
        layers.append((scale * rng.normal(size=(width, hidden)) / np.sqrt(hidden), np.zeros(width)))
    layers.append((rng.normal(size=(1, width)), np.zeros(1)))
    return [(W.astype("f4").astype("f8"), b.astype("f4").astype("f8")) for W, b in layers], rng


def shuffled(layers, rng):
    order = rng.permutation(len(layers))
    return [layers[k] for k in order], tuple(int(k) for k in np.argsort(order))


def commuting(count, rest, seed=0):
    """``count`` blocks that read one half of the stream and write the other, then ``rest`` ordinary ones."""
    layers, rng = network(count + rest, 12, 24, seed=seed)
    for k in range(count):
        layers[2 * k][0][:, 6:] = 0
        layers[2 * k + 1][0][:6] = 0
    return layers, rng


@pytest.mark.parametrize("rest", [0, 2])
def test_commuting_blocks_are_named(rest):
    layers, rng = commuting(6, rest)
    pieces, truth = shuffled(layers, rng)
    x = rng.normal(size=(600, 12))
    found = strati.reassemble(pieces, x, run(layers, x), seconds=20)
    assert found.exact and found.to_dict()["unique"] is False
    assert [w for w in found.warnings if w.code == "order-not-unique"]
    first = {truth[2 * k] for k in range(6)}
    group = max(found.unique.groups, key=len)
    assert {found.permutation[2 * k] for k in group} == first
    assert {frozenset(p) for p in zip(found.permutation[:-1:2], found.permutation[1::2], strict=False)} == {
        frozenset(p) for p in zip(truth[:-1:2], truth[1::2], strict=False)
    }


@pytest.mark.parametrize("scale", [1e-4, 1e-6])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_small_blocks_are_right_or_said_to_be_open(scale, dtype):
    layers, rng = network(6, 12, 24, scale=scale, seed=3)
    pieces, truth = shuffled(layers, rng)
    x = rng.normal(size=(800, 12))
    found = strati.reassemble(pieces, x, run(layers, x).astype(dtype), seconds=20)
    assert found.exact
    codes = {w.code for w in found.warnings}
    pairs = dict(zip(found.permutation[:-1:2], found.permutation[1::2], strict=False))
    right = dict(zip(truth[:-1:2], truth[1::2], strict=False))
    assert pairs == right or "pairs-not-unique" in codes
    assert found.permutation == truth or "order-not-unique" in codes
    if dtype == "f8" and scale == 1e-4:  # sixteen digits are enough to tell effects of 1e-8
        assert found.permutation == truth and found.to_dict()["unique"] is True


@pytest.mark.parametrize("seed", range(4))
def test_ordinary_networks_have_one_order(seed):
    pieces, x, y, truth = drop(6, 10, 20, seed=seed)
    found = strati.reassemble(pieces, x, y)
    assert found.permutation == truth and found.to_dict()["unique"] is True
    assert found.unique.least_margin > 1 and found.to_dict()["interchangeable"] == []


@pytest.mark.parametrize("hidden", [20, 10])
def test_a_block_used_twice(hidden):
    layers, rng = network(5, 10, hidden, scale=0.5, seed=1)
    layers[6], layers[7] = layers[0], layers[1]
    x = rng.normal(size=(600, 10))
    pieces, _ = shuffled(layers, rng)
    found = strati.reassemble(pieces, x, run(layers, x), seconds=30)
    assert found.exact
    back = [pieces[k] for k in found.permutation]
    assert all(np.array_equal(a[0], b[0]) for a, b in zip(back, layers, strict=True))
    assert found.to_dict()["unique"] is True  # the two copies may change places, but that changes nothing


def run_with(act, layers, x):
    z = x
    for (W, w), (V, v) in zip(layers[:-1:2], layers[1:-1:2], strict=True):
        z = z + activation(act).value(z @ W.T + w) @ V.T + v
    return z @ layers[-1][0].T + layers[-1][1]


def same_function(block, act, rng):
    """A block of other weights that computes the same: permuted neurons, and what scales the activation allows."""
    (W, w), (V, v) = block
    order = rng.permutation(len(w))
    scale = np.ones(len(w))
    if act == "relu":
        scale = rng.uniform(0.5, 2, len(w))
    elif act == "tanh":
        scale = rng.choice([-1.0, 1.0], len(w))
    return ((W * scale[:, None])[order], (w * scale)[order]), ((V / scale)[:, order], v)


@pytest.mark.parametrize("act", ["relu", "tanh", "gelu"])
@pytest.mark.parametrize(("copies", "hidden"), [((1,), 20), ((2, 4), 14), ((3,), 10)])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_blocks_that_compute_one_function_can_change_places(act, copies, hidden, dtype):
    """Exchanging a block with its copy changes outputs by rounding: the order is one of several, near or far."""
    layers, rng = network(5, 10, hidden, scale=0.5, seed=1)
    for place in copies:
        layers[2 * place], layers[2 * place + 1] = same_function(layers[:2], act, rng)
    x = rng.normal(size=(500, 10))
    pieces, _ = shuffled(layers, rng)
    answer = strati.reassemble(pieces, x, run_with(act, layers, x).astype(dtype), activation=act, seconds=20)
    assert answer.exact and answer.to_dict()["unique"] is False
    assert answer.unique.groups == ((0, *copies),)
    assert "order-not-unique" in {w.code for w in answer.warnings}


def test_nearly_equal_blocks_have_one_order_where_the_data_are_precise():
    """A copy that differs by 1e-4 in one weight is another function; sixteen digits tell where it stands."""
    layers, rng = network(5, 10, 20, scale=0.5, seed=2)
    layers[6], layers[7] = same_function(layers[:2], "gelu", rng)
    layers[7][0][0, 0] += 1e-4
    layers = [(W.astype("f4").astype("f8"), b.astype("f4").astype("f8")) for W, b in layers]
    x = rng.normal(size=(500, 10))
    pieces, truth = shuffled(layers, rng)
    answer = strati.reassemble(pieces, x, run_with("gelu", layers, x), activation="gelu", seconds=20)
    assert answer.permutation == truth and answer.to_dict()["unique"] is True


def test_a_copy_behind_another_norm_can_change_places():
    """LayerNorm weights halved and input weights doubled: the same function, of three other pieces."""
    layers, rng = network(4, 8, 16, scale=0.5, seed=4)
    norms = [(1 + 0.2 * rng.normal(size=8), 0.1 * rng.normal(size=8)) for _ in range(4)]
    (W, w), (V, v) = layers[:2]
    order = rng.permutation(16)
    layers[4], layers[5], norms[2] = (
        (2 * W[order], w[order]),
        (V[:, order], v),
        (norms[0][0] / 2, norms[0][1] / 2),
    )
    norms = [(g.astype("f4").astype("f8"), c.astype("f4").astype("f8")) for g, c in norms]
    z = x = rng.normal(size=(500, 8))
    for k in range(4):
        (W, w), (V, v), (g, c) = layers[2 * k], layers[2 * k + 1], norms[k]
        centred = z - z.mean(axis=1, keepdims=True)
        unit = centred / np.sqrt(np.square(centred).mean(axis=1, keepdims=True) + 1e-5)
        z = z + np.maximum((unit * g + c) @ W.T + w, 0) @ V.T + v
    y = z @ layers[-1][0].T + layers[-1][1]
    ordered = [p for k in range(4) for p in (norms[k], layers[2 * k], layers[2 * k + 1])] + [layers[-1]]
    pieces, _ = shuffled(ordered, rng)
    answer = strati.reassemble(pieces, x, y, seconds=30)
    assert answer.exact and answer.to_dict()["unique"] is False and (0, 2) in answer.unique.groups


def test_a_clear_effect_on_few_rows_is_no_doubt():
    """One row in fifty shows the order: the spread over rows is large, the change is far beyond the precision."""
    layers, rng = network(4, 6, 12, scale=0.3, seed=5)
    x = rng.normal(size=(400, 6)) * np.where(np.arange(400) % 50 == 0, 30.0, 0.01)[:, None]
    pieces, truth = shuffled(layers, rng)
    answer = strati.reassemble(pieces, x, run(layers, x), seconds=20)
    assert answer.permutation == truth and answer.to_dict()["unique"] is True


@pytest.mark.parametrize("act", ["relu", "gelu"])
@pytest.mark.parametrize("case", ["inputs", "outputs", "inactive"])
def test_pieces_that_differ_only_where_nothing_passes_can_change_places(act, case):
    """Two blocks whose pieces differ in neurons that are not read, or in which nothing is ever active."""
    layers, rng = network(5, 8, 16, scale=0.5, seed=3)
    if case == "inputs":  # the output projections do not read the last neurons
        first, bias = layers[2][0].copy(), layers[2][1]
        first[10:] = rng.normal(size=(6, 8))
        layers[6] = first, bias
        layers[3][0][:, 10:] = layers[7][0][:, 10:] = 0
    elif case == "outputs":  # the last neurons are always zero
        for k in (2, 6):
            layers[k][0][10:] = 0
            layers[k][1][10:] = -1 if act == "relu" else 0
        second = layers[3][0].copy()
        second[:, 10:] = rng.normal(size=(8, 6))
        layers[7] = second, layers[3][1]
    else:  # what remains of both blocks are the constants that they add
        layers[2][1][:] = layers[6][1][:] = -100
        layers[3][1][:], layers[7][1][:] = rng.normal(size=(2, 8))
    layers = [(W.astype("f4").astype("f8"), b.astype("f4").astype("f8")) for W, b in layers]
    x = rng.normal(size=(500, 8))
    pieces, _ = shuffled(layers, rng)
    answer = strati.reassemble(pieces, x, run_with(act, layers, x), activation=act, seconds=20)
    assert answer.exact and answer.to_dict()["unique"] is False
    assert {(e.kind, e.a, e.b) for e in answer.unique.exchanges} == {("pair", 1, 3)}
    assert "pairs-not-unique" in {w.code for w in answer.warnings}
