"""Norms as pieces: the passes through them against autograd, and networks that have them put back."""

import numpy as np
import pytest

import strati
from strati.core.errors import BadInputError
from strati.reassembly.residual.network import Normaliser, run, stack
from strati.reassembly.residual.pieces import as_pieces, assign_roles_by_shape
from strati.reassembly.residual.search import norm_effects, posterior_means


def network(blocks, width, hidden, *, per_block=True, final=False, centred=True, seed=0, rows=1500):
    """Shuffled pieces of a pre-norm network of random weights, data, and the permutation."""
    rng = np.random.default_rng(seed)
    norm = Normaliser(centred)

    def draw(*shape):
        return (rng.uniform(-1, 1, shape) / np.sqrt(shape[-1])).astype("f4")

    def norm_piece():
        weight = (1 + 0.2 * rng.standard_normal(width)).astype("f4")
        return (weight, (0.2 * rng.standard_normal(width)).astype("f4")) if centred else {"weight": weight}

    def through(piece, z):
        g, c = piece if centred else (piece["weight"], 0)
        return norm.value(z) * g + c

    x = z = rng.standard_normal((rows, width)).astype("f4")
    layers = []
    for _ in range(blocks):
        read = z
        if per_block:
            layers.append(norm_piece())
            read = through(layers[-1], z)
        inner, outer = (draw(hidden, width), draw(hidden)), (draw(width, hidden), draw(width))
        layers += [inner, outer]
        z = z + np.maximum(read @ inner[0].T + inner[1], 0) @ outer[0].T + outer[1]
    if final:
        layers.append(norm_piece())
        z = through(layers[-1], z)
    layers.append((draw(1, width), draw(1)))
    y = z @ layers[-1][0].T + layers[-1][1]
    shuffle = rng.permutation(len(layers))
    return [layers[k] for k in shuffle], x, y, tuple(int(k) for k in np.argsort(shuffle))


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("axis", [-1, -2])
def test_the_derivative_of_a_norm_is_its_difference_quotient(centred, axis):
    rng = np.random.default_rng(0)
    norm = Normaliser(centred)
    z, g, step = (rng.standard_normal((4, 5)) for _ in range(3))
    change = norm.value(z + 1e-6 * step, axis) - norm.value(z - 1e-6 * step, axis)
    assert (norm.back(z, g, axis) * step).sum() == pytest.approx((g * change).sum() / 2e-6, rel=1e-6)


def test_a_norm_is_torchs():
    torch = pytest.importorskip("torch")
    z = np.random.default_rng(1).standard_normal((3, 7)).astype("f4")
    np.testing.assert_allclose(
        Normaliser().value(z), torch.nn.functional.layer_norm(torch.tensor(z), (7,)).numpy(), atol=1e-6
    )


def test_the_adjoint_goes_through_norms():
    """Against difference quotients in the stream before the first block."""
    pieces, x, _, _ = network(3, 6, 10, final=True, rows=4)
    found = assign_roles_by_shape(as_pieces(pieces))
    parts = stack(found, "tanh")
    order = np.arange(3)
    passed = run(parts, order, order, x)
    np.testing.assert_allclose(passed.output, parts.output(order, order, x), atol=1e-5)
    step = np.random.default_rng(2).standard_normal(x.shape).astype("f4")
    change = parts.output(order, order, x + 1e-2 * step) - parts.output(order, order, x - 1e-2 * step)
    predicted = (passed.adjoint[0][0] * step).sum(axis=1)
    np.testing.assert_allclose(predicted, change[:, 0] / 2e-2, rtol=2e-2, atol=2e-3)


def test_the_effect_of_a_norm_is_first_order_true():
    pieces, x, _, _ = network(3, 6, 10, rows=50)
    parts = stack(assign_roles_by_shape(as_pieces(pieces)), "tanh")
    order = np.arange(3)
    output, effects = norm_effects(parts, parts.norm_assignment, order, order, x)
    mean = parts.norm_assignment.norm(-1)
    for place, norm in ((0, 1), (2, 0)):
        moved = parts.w_in.copy(), parts.b_in.copy()
        share = 1e-2
        g, c = (
            share * (own - all_) for own, all_ in zip(parts.norm_assignment.norm(norm), mean, strict=True)
        )
        moved[0][place] += parts.norm_assignment.w_in[place] * g
        moved[1][place] += parts.norm_assignment.w_in[place] @ c
        changed = parts.__class__(**(vars(parts) | {"w_in": moved[0], "b_in": moved[1]}))
        true = (changed.output(order, order, x) - output)[:, 0] / share
        centred = effects - effects.mean(axis=2, keepdims=True)
        np.testing.assert_allclose(centred[:, place, norm], true, atol=0.02 * np.abs(true).max() + 1e-4)


@pytest.mark.parametrize(
    ("blocks", "width", "hidden", "options"),
    [
        (6, 12, 24, {}),
        (6, 12, 24, {"final": True}),
        (6, 12, 24, {"per_block": False, "final": True}),
        (6, 12, 24, {"centred": False}),
    ],
)
def test_networks_with_norms_are_put_back_exactly(blocks, width, hidden, options):
    pieces, x, y, truth = network(blocks, width, hidden, **options)
    found = strati.reassemble(pieces, x, y, seconds=20)
    assert found.exact and found.permutation == truth
    names = found.tensors()
    if options.get("per_block", True):
        assert np.array_equal(
            names["blocks.2.norm.weight"], next(p for p in found.pieces.norms if p.number == truth[6]).weight
        )


def test_norms_that_fit_no_network():
    pieces, x, y, _ = network(4, 6, 10, rows=50)
    norms = [k for k, p in enumerate(pieces) if p[0].ndim == 1]
    with pytest.raises(BadInputError, match="3 norms for 4 blocks"):
        strati.reassemble([p for k, p in enumerate(pieces) if k != norms[0]], x, y)
    wrong = [(p[0][:5], p[1][:5]) if k == norms[0] else p for k, p in enumerate(pieces)]
    with pytest.raises(BadInputError, match="a vector of 5, the network is 6 wide"):
        strati.reassemble(wrong, x, y)


def test_the_posterior_mean_is_that_of_the_likeliest_noise():
    """Against the textbook formula in both of its forms, and against other noises."""
    rng = np.random.default_rng(3)
    for rows, count in ((60, 20), (20, 60)):
        columns = rng.standard_normal((rows, count)).astype("f4")
        target = columns @ rng.standard_normal(count) + 0.5 * rng.standard_normal(rows)
        (found,), noise = posterior_means(columns, target)
        wide = columns.astype(float)
        covariance = wide @ wide.T + noise * np.eye(rows)
        np.testing.assert_allclose(found, wide.T @ np.linalg.solve(covariance, target), rtol=1e-3, atol=1e-5)

        def likelihood(variance, wide=wide, target=target, rows=rows):
            full = wide @ wide.T + variance * np.eye(rows)
            return -0.5 * (target @ np.linalg.solve(full, target) + np.linalg.slogdet(full)[1])

        least = 1e-6 * np.trace(wide @ wide.T)
        others = [likelihood(max(noise * 2.0**k, least)) for k in (-1, 1)]
        assert likelihood(noise) >= max(others) - 1e-6
