"""The interaction basis against exact Jacobians, its invariances, and what it must say about bad input."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import strati
from strati.core.errors import BadInputError, UnsupportedError

KINDS = ("interaction", "local")


def mlp(widths, *, seed=0, bias=True, activation=nn.ReLU):
    torch.manual_seed(seed)
    layers = []
    for k in range(len(widths) - 1):
        layers.append(nn.Linear(widths[k], widths[k + 1], bias=bias))
        if k + 2 < len(widths) and activation is not None:
            layers.append(activation())
    return nn.Sequential(*layers).double()


def normal(n, d, *, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(n, d)))


def conditioned(d, condition, *, seed):
    rng = np.random.default_rng(seed)
    left, right = (np.linalg.qr(rng.normal(size=(d, d)))[0] for _ in range(2))
    return torch.from_numpy(left * np.geomspace(1, 1 / condition, d) @ right)


def activations(net, x):
    """Input, each hidden layer after its nonlinearity, output."""
    found, f = [x], x
    children = list(net)
    for k, layer in enumerate(children):
        f = layer(f)
        if k + 1 == len(children) or isinstance(children[k + 1], nn.Linear):
            found.append(f)
    return [f.detach().numpy() for f in found]


def tails(net):
    """The map from each site (but the last) to the output, and to the next site."""
    children = list(net)
    starts = [k for k, c in enumerate(children) if isinstance(c, nn.Linear)]
    ends = [*starts[1:], len(children)]
    return [
        (nn.Sequential(*children[s:]), nn.Sequential(*children[s:e]))
        for s, e in zip(starts, ends, strict=True)
    ]


def same_up_to_signs(a, b):
    signs = np.sign((a * b).sum(axis=0))
    return float(np.abs(a - b * signs).max() / np.abs(a).max())


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh, nn.GELU])
@pytest.mark.parametrize("kind", KINDS)
def test_definition_by_exact_jacobians(kind, activation):
    net, x = mlp([5, 7, 6, 3], activation=activation), normal(40, 5)
    basis = strati.interaction_basis(net, x, kind)
    F = activations(net, x)
    for site, (to_output, to_next) in enumerate(tails(net)):
        layer, following = basis.layers[site], basis.layers[site + 1]
        function = to_output if kind == "interaction" else to_next
        J = torch.func.vmap(torch.func.jacrev(function))(torch.from_numpy(F[site])).detach().numpy()
        if kind == "local":
            J = following.matrix @ J
        M = np.einsum("nki,nkj->ij", J, J) / len(x)
        G = np.cov(F[site].T, bias=True)
        assert np.allclose(layer.inverse.T @ M @ layer.inverse, np.eye(layer.directions), atol=1e-9)
        assert np.allclose(layer.matrix @ G @ layer.matrix.T, np.diag(layer.eigenvalues), atol=1e-9)
        values = np.sort(np.linalg.eigvals(G @ M).real)[::-1][: layer.directions]
        assert np.allclose(layer.eigenvalues, values, rtol=1e-6, atol=1e-10 * values[0])


def test_last_layer_is_pca_and_eigenvalues_descend():
    net, x = mlp([6, 8, 4]), normal(100, 6)
    for kind in (*KINDS, "pca"):
        last = strati.interaction_basis(net, x, kind).layers[-1]
        assert np.allclose(last.matrix @ last.matrix.T, np.eye(4), atol=1e-12)
        cov = np.cov(net(x).detach().numpy().T, bias=True)
        assert np.allclose(last.eigenvalues, np.sort(np.linalg.eigvalsh(cov))[::-1])
    for layer in strati.interaction_basis(net, x).layers:
        assert (np.diff(layer.eigenvalues) <= 0).all()


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), log_condition=st.floats(0, 3))
def test_invariance_at_the_input(kind, seed, log_condition):
    net, x = mlp([6, 9, 7, 4], seed=seed), normal(400, 6, seed=seed)
    R = conditioned(6, 10**log_condition, seed=seed)
    other = mlp([6, 9, 7, 4], seed=seed)
    other[0].weight.data = net[0].weight.data @ torch.linalg.inv(R)
    one, two = strati.interaction_basis(net, x, kind), strati.interaction_basis(other, x @ R.T, kind)
    assert [a.directions for a in one.layers] == [b.directions for b in two.layers]
    plain, mixed = one.layers[0].forward(x.numpy()), two.layers[0].forward((x @ R.T).numpy())
    assert same_up_to_signs(plain, mixed) < 1e-6
    assert np.allclose(one.layers[1].eigenvalues, two.layers[1].eigenvalues, rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_invariance_in_a_hidden_layer(kind):
    net, x = mlp([6, 9, 7, 4], seed=3), normal(500, 6)
    R = conditioned(9, 1e3, seed=1)
    change = nn.Linear(9, 9, bias=False).double()
    change.weight.data = R
    third = nn.Linear(9, 7).double()
    third.weight.data, third.bias.data = net[2].weight.data @ torch.linalg.inv(R), net[2].bias.data
    other = nn.Sequential(net[0], net[1], change, third, net[3], net[4])
    one, two = strati.interaction_basis(net, x, kind), strati.interaction_basis(other, x, kind)
    F = activations(net, x)
    plain, mixed = one.layers[1].forward(F[1]), two.layers[2].forward(F[1] @ R.numpy().T)
    assert plain.shape == mixed.shape
    assert same_up_to_signs(plain, mixed) < 1e-6
    assert same_up_to_signs(one.layers[0].forward(F[0]), two.layers[0].forward(F[0])) < 1e-6


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    widths=st.lists(st.integers(2, 9), min_size=2, max_size=4),
    outputs=st.sampled_from([1, 2, 5]),
    activation=st.sampled_from([nn.ReLU, nn.Tanh, nn.GELU, nn.LeakyReLU, nn.Identity]),
    bias=st.booleans(),
    spoilt=st.sampled_from(["", "duplicate", "dead", "flat data"]),
)
def test_invariance_of_all_kinds_of_networks(seed, widths, outputs, activation, bias, spoilt):
    """``f -> R f, W -> W R^-1`` in any layer, condition number up to 1e3: the same coordinates up to signs."""
    rng = np.random.default_rng(seed)
    net, x = (
        mlp([*widths, outputs], seed=seed, bias=bias, activation=activation),
        normal(250, widths[0], seed=seed),
    )
    with torch.no_grad():
        if spoilt == "duplicate":
            net[0].weight[1] = 2 * net[0].weight[0]
        if spoilt == "dead":
            net[0].weight[0] = 0.0
        if spoilt == "flat data":
            x = x[:, :2] @ normal(2, widths[0], seed=seed)
    place = int(rng.integers(0, len(widths)))
    at = [k for k, module in enumerate(net) if isinstance(module, nn.Linear)][place]
    R = conditioned(widths[place], 10 ** rng.uniform(0, 3), seed=seed)
    reader = nn.Linear(widths[place], net[at].out_features, bias=bias).double()
    reader.weight.data = net[at].weight.data @ torch.linalg.inv(R)
    if bias:
        reader.bias.data = net[at].bias.data
    change = nn.Linear(widths[place], widths[place], bias=False).double()
    change.weight.data = R
    front = [] if place == 0 else [*list(net)[:at], change]
    other = nn.Sequential(*front, reader, *list(net)[at + 1 :])
    F = activations(net, x)[place]
    for kind in KINDS:
        one = strati.interaction_basis(net, x, kind).layers[place]
        two = strati.interaction_basis(other, x @ R.T if place == 0 else x, kind).layers[place + (place > 0)]
        assert one.directions == two.directions
        plain, mixed = one.forward(F), two.forward(F @ R.numpy().T)
        apart = [k for k in range(one.directions) if not any(k in group for group in one.ambiguous)]
        # directions that hardly vary (tanh of a line, say) are seen through their rounding errors
        sure = one.eigenvalues.size == 0 or one.eigenvalues[-1] > 1e-9 * one.eigenvalues[0]
        if apart and sure:
            assert same_up_to_signs(plain[:, apart], mixed[:, apart]) < 1e-6


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    widths=st.lists(st.integers(1, 9), min_size=2, max_size=5),
    bias=st.booleans(),
)
def test_deep_linear_networks_of_any_shape_are_diagonal(seed, widths, bias):
    net, x = mlp(widths, seed=seed, activation=None, bias=bias), normal(200, widths[0], seed=seed) + 1.0
    for kind in KINDS:
        basis = strati.interaction_basis(net, x, kind)
        count = basis.layers[-1].directions
        assert [layer.directions for layer in basis.layers] == [count] * len(widths) and count <= min(widths)
        if any(layer.ambiguous for layer in basis.layers) or basis.layers[-1].eigenvalues[-1] < 1e-9:
            continue
        for edges in strati.interaction_graph(basis).edges:
            assert np.abs(edges - np.eye(count)).max() < 1e-6
        for layer in basis.layers:
            assert np.allclose(layer.eigenvalues, basis.layers[-1].eigenvalues, rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_single_precision_gives_the_same_basis(kind):
    net, x = mlp([5, 7, 6, 3], seed=2), normal(300, 5)
    with torch.no_grad():
        net[0].weight[1], net[0].bias[1] = 2 * net[0].weight[0], 2 * net[0].bias[0]
        net[0].bias[2] = -100.0
    double = strati.interaction_basis(net, x, kind)
    single = strati.interaction_basis(net.float(), x.float(), kind)
    for a, b in zip(double.layers, single.layers, strict=True):
        assert a.directions == b.directions
        assert np.allclose(a.eigenvalues, b.eigenvalues, rtol=1e-4, atol=1e-5 * a.eigenvalues[0])


def convolutional(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Conv2d(3, 4, 2), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2)
    ).double()


def test_feature_maps_have_channels_as_directions_and_pixels_as_data():
    net, x = convolutional(), torch.from_numpy(np.random.default_rng(0).normal(size=(60, 2, 5, 5)))
    basis = strati.interaction_basis(net, x)
    assert [layer.width for layer in basis.layers] == [2, 3, 16, 2]
    f = net[:2](x).detach()
    rest = torch.func.jacrev(lambda h: net[2:](h[None])[0])
    J = torch.func.vmap(rest)(f).detach().numpy()  # (data, output, channel, row, column)
    pixels = f.shape[2] * f.shape[3]
    M = np.einsum("nkcij,nkdij->cd", J, J) / (len(x) * pixels)
    rows = f.movedim(1, -1).reshape(-1, 3).numpy()
    layer = basis.layers[1]
    assert layer.error == 0
    assert np.allclose(layer.inverse.T @ M @ layer.inverse, np.eye(layer.directions), atol=1e-9)
    assert np.allclose(
        layer.matrix @ np.cov(rows.T, bias=True) @ layer.matrix.T, np.diag(layer.eigenvalues), atol=1e-9
    )
    assert all(layer.round_trip < 1e-12 for layer in basis.layers)
    graph = strati.interaction_graph(basis)
    assert [e.shape for e in graph.edges] == [(b.directions, a.directions) for a, b in pairwise(basis.layers)]


@pytest.mark.parametrize("kind", KINDS)
def test_mixing_the_channels_of_a_feature_map_changes_nothing(kind):
    net, x = convolutional(1), torch.from_numpy(np.random.default_rng(1).normal(size=(60, 2, 5, 5)))
    R = conditioned(3, 1e3, seed=1)
    mix = nn.Conv2d(3, 3, 1, bias=False).double()
    mix.weight.data = R[:, :, None, None].clone()
    reader = nn.Conv2d(3, 4, 2).double()
    reader.weight.data = torch.einsum("ocij,cd->odij", net[2].weight.data, torch.linalg.inv(R))
    reader.bias.data = net[2].bias.data
    other = nn.Sequential(*list(net)[:2], mix, reader, *list(net)[3:])
    f = net[:2](x).detach().movedim(1, -1).reshape(-1, 3).numpy()
    # the local basis of three channels needs its next layer's 16 directions only
    one = strati.interaction_basis(net, x, kind, probes=64)
    two = strati.interaction_basis(other, x, kind, probes=64)
    assert same_up_to_signs(one.layers[1].forward(f), two.layers[2].forward(f @ R.numpy().T)) < 1e-6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bias", [False, True])
def test_deep_linear_networks_are_diagonal(kind, bias):
    net, x = mlp([8, 10, 9, 5], activation=None, bias=bias), normal(300, 8) + 2.0
    basis = strati.interaction_basis(net, x, kind)
    coordinates = [layer.forward(f) for layer, f in zip(basis.layers, activations(net, x), strict=True)]
    for here, there in pairwise(coordinates):
        assert same_up_to_signs(here, there) < 1e-9
    whole = net[2].weight @ net[1].weight @ net[0].weight
    whole = whole.detach().numpy()
    G = np.cov(x.numpy().T, bias=True)
    singular = np.linalg.svd(whole @ np.linalg.cholesky(G), compute_uv=False)
    for layer in basis.layers:
        assert np.allclose(layer.eigenvalues, singular**2, rtol=1e-9)
    for edges in strati.interaction_graph(basis).edges:
        assert np.abs(edges - np.eye(5)).max() < 1e-9


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_of_rank_four(kind):
    x = normal(300, 4) @ normal(4, 12, seed=1)
    free = mlp([12, 10, 11, 8], activation=None, bias=False)
    biased = mlp([12, 10, 11, 8], activation=None, bias=True)
    counts = lambda net, **o: [a.directions for a in strati.interaction_basis(net, x, kind, **o).layers]  # noqa: E731
    assert counts(free) == counts(biased) == [4] * 4
    assert counts(free, centre=False) == [4] * 4
    assert counts(biased, centre=False)[1:] == [5] * 3
    single = [a.directions for a in strati.interaction_basis(biased.float(), x.float(), kind).layers]
    assert single == [4] * 4


@pytest.mark.parametrize("kind", KINDS)
def test_null_directions_are_gone_and_outputs_stay(kind):
    net, x = mlp([6, 10, 8, 3], seed=5), normal(300, 6)
    with torch.no_grad():
        net[0].weight[1], net[0].bias[1] = 2 * net[0].weight[0], 2 * net[0].bias[0]  # parallel neurons
        net[0].bias[2] = -100.0  # a dead neuron
        net[2].weight[:, 3] = 0.0  # a neuron nobody reads
        net[0].weight[:, 5] = 0.0  # an input nobody reads
    basis = strati.interaction_basis(net, x, kind)
    assert basis.layers[0].directions == 5
    assert basis.layers[1].directions <= 7
    assert basis.layers[2].directions == 3
    F = activations(net, x)
    for site, (to_output, _) in enumerate(tails(net)):
        layer = basis.layers[site]
        assert layer.matrix.shape == (layer.directions, F[site].shape[1]) == layer.inverse.T.shape
        assert np.allclose(layer.matrix @ layer.inverse, np.eye(layer.directions), atol=1e-8)
        back = torch.from_numpy(layer.backward(layer.forward(F[site])))
        assert np.allclose(to_output(back).detach().numpy(), F[-1], atol=1e-8)
        assert layer.round_trip < 1e-15


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000), scale=st.sampled_from([1e-3, 1.0, 1e3]), centre=st.booleans())
def test_there_and_back_for_any_kind(seed, scale, centre):
    rng = np.random.default_rng(seed)
    widths = [int(k) for k in rng.integers(8, 14, size=4)]
    net, x = mlp(widths, seed=seed), normal(300, widths[0], seed=seed) * scale + scale
    F = activations(net, x)
    for kind in ("interaction", "local", "pca", "neuron"):
        basis = strati.interaction_basis(net, x, kind, centre=centre)
        for site, (to_output, _) in enumerate(tails(net)):
            rows = basis.layers[site].backward(basis.layers[site].forward(F[site]))
            close = np.allclose(
                to_output(torch.from_numpy(rows)).detach().numpy(), F[-1], atol=1e-6 * np.abs(F[-1]).max()
            )
            # A dropped direction is free at every datum, not for every finite step: where a step wakes a
            # silent neuron, that must be said.
            assert close or any(
                f.code == "round-trip" and basis.layers[site].name in f.text for f in basis.warnings
            )


def test_there_and_back_rarely_fails_in_tiny_networks_full_of_silent_neurons():
    lost = 0
    for seed in range(60):
        widths = [int(k) for k in np.random.default_rng(seed).integers(2, 7, size=4)]
        basis = strati.interaction_basis(mlp(widths, seed=seed), normal(60, widths[0], seed=seed) + 1)
        lost += any(layer.round_trip > 1e-12 for layer in basis.layers)
    assert lost <= 1


def test_epsilon_cuts_what_matters_less():
    net, x = mlp([10, 20, 20, 5]), normal(400, 10)
    full = strati.interaction_basis(net, x)
    epsilon = float(np.median(full.layers[1].eigenvalues))
    cut = strati.interaction_basis(net, x, epsilon=epsilon)
    for a, b in zip(full.layers, cut.layers, strict=True):
        assert b.directions == int((a.eigenvalues > epsilon).sum())
    assert any(flag.code == "round-trip" for flag in cut.warnings)


def test_repeated_eigenvalues_are_an_ambiguous_subspace():
    net = nn.Sequential(nn.Linear(3, 3, bias=False)).double()
    net[0].weight.data = torch.eye(3, dtype=torch.float64)
    corners = torch.tensor(
        [[a, b, 3 * c] for a in (-1, 1) for b in (-1, 1) for c in (-1, 1)], dtype=torch.float64
    )
    basis = strati.interaction_basis(net, corners)
    assert basis.layers[0].ambiguous == ((1, 2),)
    assert any(flag.code == "ambiguous" for flag in basis.warnings)


def test_many_outputs_by_probes_state_their_error(monkeypatch):
    from strati.landscape.mlp import basis_moments as basis_chain

    net, x = mlp([6, 12, 12, 12, 30]), normal(400, 6)
    exact = strati.interaction_basis(net, x)
    monkeypatch.setattr(basis_chain, "EXACT_OUTPUTS", 4)
    probe_warning = strati.interaction_basis(net, x)
    assert 0 < probe_warning.layers[0].error < 0.2
    assert probe_warning.layers[0].eigenvalues[0] == pytest.approx(
        exact.layers[0].eigenvalues[0], rel=5 * probe_warning.layers[0].error
    )


def test_too_much_work_takes_fewer_probes(monkeypatch):
    from strati.landscape.mlp import basis_moments as basis_chain

    net, x = mlp([6, 12, 12, 12, 8]), normal(2000, 6)
    exact = strati.interaction_basis(net, x)
    monkeypatch.setattr(basis_chain, "MOST_WORK", 1.0)  # one probe per datum
    probe_warning = strati.interaction_basis(net, x)
    assert exact.layers[0].error == 0 < probe_warning.layers[0].error < 0.2
    assert probe_warning.layers[0].eigenvalues.sum() == pytest.approx(
        exact.layers[0].eigenvalues.sum(), rel=0.1
    )


def test_chunks_do_not_matter(monkeypatch):
    from strati.landscape.mlp import basis_moments as basis_chain

    net, x = mlp([5, 8, 8, 3]), normal(300, 5)
    whole = strati.interaction_basis(net, x)
    monkeypatch.setattr(basis_chain, "ROWS", 37)
    monkeypatch.setattr(basis_chain, "_ELEMENTS", 500)
    parts = strati.interaction_basis(net, x)
    for a, b in zip(whole.layers, parts.layers, strict=True):
        assert np.allclose(a.eigenvalues, b.eigenvalues, rtol=1e-10)
        assert np.allclose(a.matrix, b.matrix, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (np.zeros((0, 5)), "at least one row"),
        (np.zeros((1, 5)), "fewer than two rows"),
        (np.ones((3, 4)), "4 inputs a row"),
        (np.array([[np.nan] * 5] * 3), "not finite"),
        (np.full((3, 5), 1e300), "whose squares overflow; rescale"),
        (np.array([["a"] * 5] * 3), "not an array of numbers"),
        (np.ones((3, 5), dtype=complex), "complex"),
        ([[1.0], [1.0, 2.0]], "not an array of numbers"),
    ],
)
def test_bad_data(x, words):
    with pytest.raises(BadInputError, match=words):
        strati.interaction_basis(mlp([5, 4, 2]), x)


def test_bad_calls():
    net, x = mlp([5, 4, 2]), normal(20, 5)
    for options in ({"kind": "svd"}, {"epsilon": -1.0}, {"tolerance": 0.0}, {"tolerance": float("nan")}):
        with pytest.raises(BadInputError):
            strati.interaction_basis(net, x, **options)
    with pytest.raises(BadInputError, match="no module"):
        strati.interaction_basis(net, x, sites=["nothing"])
    with pytest.raises(UnsupportedError):
        strati.interaction_basis(nn.Bilinear(5, 5, 2), x)
    with pytest.raises(BadInputError):
        strati.interaction_basis([1, 2], x)
    net[0].weight.data[0, 0] = float("inf")
    with pytest.raises(BadInputError, match="not finite"):
        strati.interaction_basis(net, x)


def test_whole_numbers_are_data_for_a_network_without_embedding():
    net, x = mlp([5, 4, 2]), np.random.default_rng(0).integers(0, 255, (50, 5), dtype=np.uint8)
    whole, real = (strati.interaction_basis(net, values) for values in (x, x.astype(float)))
    assert whole.to_json() == real.to_json()


def test_constant_data_have_no_directions():
    basis = strati.interaction_basis(mlp([5, 4, 2]), np.ones((10, 5)) * 0.3)
    assert [layer.directions for layer in basis.layers] == [0, 0, 0]
    assert {flag.code for flag in basis.warnings} == {"no-directions"}
    graph = strati.interaction_graph(basis)
    assert strati.modules(graph).modules == ()
