"""One rule for the options of counts and bases: config or keywords, keywords winning, unknown ones named."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import strati
from strati.core.errors import BadInputError
from strati.landscape.basis.basis import BasisConfig
from strati.landscape.basis.modules import ModulesConfig
from strati.landscape.basis.sparsify import SparsifyConfig, sparsify
from strati.landscape.counts.result import DegeneracyConfig

X = np.random.default_rng(0).normal(size=(60, 4))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2)).double()


def test_keywords_win_over_the_config() -> None:
    config = DegeneracyConfig(epsilon=1e-3, exact=False)
    assert strati.degeneracy(network(), X, config=config).epsilon == 1e-3
    both = strati.degeneracy(network(), X, config=config, exact=True)
    assert (both.epsilon, both.method) == (1e-3, "exact")
    basis = strati.interaction_basis(network(), X, config=BasisConfig(centre=False), seed=3)
    assert (basis.centred, basis.seed) == (False, 3)
    graph = strati.interaction_graph(basis)
    found = strati.modules(graph, config=ModulesConfig(number=3), number=2)
    assert len(found.modules) == 2
    assert strati.modules(graph, epsilon=0.5, config=ModulesConfig(epsilon=0.1, number=1)).epsilon == 0.5
    assert sparsify(network(), X, config=SparsifyConfig(1e-10)).change < 1e-6


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: strati.degeneracy(network(), X, epsilom=1.0), "did you mean 'epsilon'"),
        (lambda: strati.interaction_basis(network(), X, center=False), "did you mean 'centre'"),
        (lambda: sparsify(network(), X, tolerence=1e-9), "did you mean 'tolerance'"),
        (lambda: strati.degeneracy(network(), X, config=BasisConfig()), "config must be a DegeneracyConfig"),
        (lambda: strati.degeneracy(network(), X, layers="fc1"), "matches no layer"),
        (lambda: strati.interaction_basis(network(), X, probes=0), "at least 1"),
    ],
)
def test_what_is_no_option_is_refused_with_the_nearest(call, words) -> None:
    with pytest.raises(BadInputError, match=words):
        call()


def test_some_layers_alone() -> None:
    """Only the chosen layers vary: freedom between layers is gone where one of the two is fixed."""
    model = network()
    whole = strati.degeneracy(model, X)
    for chosen in ("0", ["2", "4"], "!4"):
        some = strati.degeneracy(model, X, layers=chosen)
        names = [layer.name for layer in some.layers]
        sizes = [layer.parameters for layer in some.layers]
        columns = [p for n, p in model.named_parameters() if n.split(".")[0] in names]
        assert some.parameters == sum(sizes) == sum(p.numel() for p in columns)
        assert some.method == "exact" and some.free == free_of(model, names)
        assert some.structural_free <= some.free <= whole.free
    residual = nn.Sequential(model, nn.LayerNorm(2), nn.Linear(2, 2)).double()  # no chain
    some = strati.degeneracy(residual, X, layers="0.0")
    assert [layer.name for layer in some.layers] == ["0.0"] and some.structural_free <= some.free


def free_of(model: nn.Module, names: list[str]) -> int:
    own = {n: p.detach() for n, p in model.named_parameters() if n.split(".")[0] in names}
    rest = {n: p.detach() for n, p in model.named_parameters() if n not in own}
    x = torch.from_numpy(X)
    blocks = torch.func.jacrev(lambda v: torch.func.functional_call(model, rest | v, (x,)).flatten())(own)
    jacobian = torch.cat([b.flatten(1) for b in blocks.values()], 1)
    return jacobian.shape[1] - int(torch.linalg.matrix_rank(jacobian, rtol=1e-11))


def test_some_places_of_a_basis() -> None:
    names = [layer.name for layer in strati.interaction_basis(network(), X, layers="1").layers]
    assert names == ["input", "1", "output"]
    basis = strati.interaction_basis(network(), X, layers="!1")
    assert [layer.name for layer in basis.layers] == ["input", "3", "output"]
    assert "read-at" in [flag.code for flag in basis.warnings]


def test_the_same_on_the_named_device() -> None:
    one, two = (strati.degeneracy(network(), X, device=device) for device in (None, "cpu"))
    assert one.to_json() == two.to_json()
    basis = [strati.interaction_basis(network(), X, device=device) for device in (None, torch.device("cpu"))]
    assert np.array_equal(basis[0].layers[0].matrix, basis[1].layers[0].matrix)


def test_only_some_layers_are_made_sparse_on_a_device() -> None:
    """Three of six inputs depend on the others, and so do neurons behind them; only the layers asked for change."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 2)).double()
    x = np.random.default_rng(0).normal(size=(40, 3)) @ np.random.default_rng(1).normal(size=(3, 6))
    seen: list[str] = []
    some = sparsify(net, x, layers="0", device="cpu", tick=seen.append)
    assert seen == [layer.name for layer in some.layers] == ["0"]
    assert some.layers[0].zeros_after >= 3 * 8
    assert some.change < 1e-10
    for name in ("2.weight", "4.weight"):
        np.testing.assert_array_equal(some.tensors[name], net.state_dict()[name].numpy())
    np.testing.assert_array_equal(
        sparsify(net, x).tensors["0.weight"], sparsify(net, x, device="cpu").tensors["0.weight"]
    )
    with pytest.raises(BadInputError, match="matches no layer"):
        sparsify(net, x, layers="fc9")
