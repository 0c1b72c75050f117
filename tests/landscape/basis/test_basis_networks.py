"""The interaction basis of residual networks and transformers, against exact Jacobians and within its stated error."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

import strati
from strati.landscape.basis.probe_moments import find_sites

KINDS = ("interaction", "local")


def normal(n, d, *, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(n, d)))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.fc2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.fc2(torch.relu(self.up(x)))


def residual(depth=3, width=5, *, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(*(Block(width) for _ in range(depth)), nn.Linear(width, 2)).double()


@pytest.mark.parametrize("kind", KINDS)
def test_residual_network_against_exact_jacobians(kind):
    net, x = residual(), normal(30, 5)
    basis = strati.interaction_basis(net, x, kind)
    assert [layer.name for layer in basis.layers] == ["input", "0", "1", "2", "output"]
    f = x
    for site in range(4):
        function = net[site:] if kind == "interaction" else net[site : site + 1]
        J = torch.func.vmap(torch.func.jacrev(function))(f).detach().numpy()
        if kind == "local":
            J = basis.layers[site + 1].matrix @ J
        M = np.einsum("nki,nkj->ij", J, J) / len(x)
        layer = basis.layers[site]
        assert layer.error == 0
        assert np.allclose(layer.inverse.T @ M @ layer.inverse, np.eye(layer.directions), atol=1e-8)
        f = net[site](f).detach()


def test_probes_agree_with_exact_within_their_error():
    net, x = residual(), normal(600, 5)
    exact = strati.interaction_basis(net, x, probes=8)
    probe_warning = strati.interaction_basis(net, x, probes=1, batch=20)
    for a, b in zip(exact.layers[:-1], probe_warning.layers[:-1], strict=True):
        assert a.error == 0 < b.error < 0.2
        assert b.eigenvalues.sum() == pytest.approx(a.eigenvalues.sum(), rel=4 * b.error)


def test_the_error_of_probes_is_known_for_few_data():
    basis = strati.interaction_basis(residual(), normal(6, 5), probes=1)
    assert all(0 < layer.error < 3 for layer in basis.layers[:-1])


def test_mlp_hidden_layers_and_named_sites():
    net, x = residual(), normal(50, 5)
    hidden = strati.interaction_basis(net, x, sites="mlp")
    assert [layer.name for layer in hidden.layers] == [
        "input", "0.fc2:input", "1.fc2:input", "2.fc2:input", "output",
    ]  # fmt: skip
    assert hidden.layers[1].width == 10
    named = strati.interaction_basis(net, x, "local", sites=["0.up", "2"])
    assert [layer.name for layer in named.layers] == ["input", "0.up", "2", "output"]


@pytest.fixture(scope="module")
def tiny_transformer():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        attn_implementation="eager", n_layer=2, n_head=2, n_embd=16, vocab_size=40, n_positions=12
    )
    return GPT2LMHeadModel(config).eval()


@pytest.mark.parametrize("where", ["residual", "mlp"])
def test_transformer(tiny_transformer, where):
    tokens = torch.randint(0, 40, (60, 6), generator=torch.Generator().manual_seed(0))
    for kind in KINDS:
        basis = strati.interaction_basis(tiny_transformer, tokens, kind, sites=where, probes=8, batch=10)
        widths = [layer.width for layer in basis.layers]
        assert widths == ([16, 16, 16, 40] if where == "residual" else [16, 64, 64, 40])
        assert all(layer.round_trip < 1e-6 for layer in basis.layers)
        assert all(0 < layer.error < 0.3 for layer in basis.layers[:-1])
    graph = strati.interaction_graph(basis)
    assert [e.shape for e in graph.edges] == [(b.directions, a.directions) for a, b in pairwise(basis.layers)]


def test_tokens_in_one_line_are_cut_into_windows_the_network_takes(tiny_transformer):
    line = torch.randint(0, 40, (100,), generator=torch.Generator().manual_seed(2))
    options = {"kind": "local", "probes": 8, "batch": 10}
    cut = strati.interaction_basis(tiny_transformer, line.numpy(), **options)
    by_hand = strati.interaction_basis(tiny_transformer, line[:96].reshape(8, 12), **options)
    assert cut.data == by_hand.data == 8
    for a, b in zip(cut.layers, by_hand.layers, strict=True):
        np.testing.assert_array_equal(a.eigenvalues, b.eigenvalues)
    with pytest.raises(strati.StratiError, match="fewer than two windows of tokens"):
        strati.interaction_basis(tiny_transformer, line[:8])
    with pytest.raises(strati.StratiError, match="has 1 tokens, not one window"):
        strati.interaction_basis(tiny_transformer, line[:1])


def test_blocks_are_chosen_by_their_numbers(tiny_transformer):
    tokens = torch.randint(0, 40, (20, 6), generator=torch.Generator().manual_seed(3))
    basis = strati.interaction_basis(tiny_transformer, tokens, "pca", layers="block:1", probes=8)
    assert [layer.name for layer in basis.layers] == ["transformer.h.1", "output"]
    with pytest.raises(strati.StratiError, match="the blocks here are 0 to 1"):
        strati.interaction_basis(tiny_transformer, tokens, "pca", layers="block:5", probes=8)


def test_transformer_moments_against_exact_jacobians(tiny_transformer):
    tokens = torch.randint(0, 40, (40, 4), generator=torch.Generator().manual_seed(1))
    basis = strati.interaction_basis(tiny_transformer, tokens, probes=64, batch=10)
    model = __import__("copy").deepcopy(tiny_transformer).double()
    stream = model(tokens, output_hidden_states=True).hidden_states[1].detach()

    def rest(h):
        return model.lm_head(model.transformer.ln_f(model.transformer.h[1](h[None])))[0]

    M = np.zeros((16, 16))
    for h in stream:
        J = torch.func.jacrev(rest)(h).detach().numpy()  # (position, logit, position, width)
        M += np.einsum("akti,aktj->ij", J, J)
    M /= stream.shape[0] * stream.shape[1]
    layer = basis.layers[1]
    found = layer.inverse.T @ M @ layer.inverse
    assert np.allclose(np.diag(found)[:4], 1.0, atol=0.15)


def test_wide_output_is_read_in_the_range_of_the_head(monkeypatch):
    from strati.landscape.basis import probe_moments as basis_probes

    net, x = residual(), normal(200, 5)
    wide = nn.Sequential(*list(net)[:-1], nn.Linear(5, 50)).double()
    exact = strati.interaction_basis(wide, x, probes=64)
    monkeypatch.setattr(basis_probes, "WIDEST_OUTPUT", 20)
    framed = strati.interaction_basis(wide, x, probes=64)
    for a, b in zip(exact.layers, framed.layers, strict=True):
        assert np.allclose(a.eigenvalues, b.eigenvalues, rtol=1e-8)
        assert a.matrix.shape == b.matrix.shape
    outputs = wide(x).detach().numpy()
    assert np.allclose(framed.layers[-1].backward(framed.layers[-1].forward(outputs)), outputs, atol=1e-9)
    for a, b in zip(
        strati.interaction_graph(exact).edges, strati.interaction_graph(framed).edges, strict=True
    ):
        assert np.allclose(a, b, rtol=1e-6, atol=1e-9)


def test_the_model_is_left_alone():
    net, x = residual().float().train(), normal(30, 5).float()
    before = {k: v.clone() for k, v in net.state_dict().items()}
    strati.interaction_basis(net, x)
    assert net.training
    assert all(torch.equal(v, before[k]) and v.dtype == torch.float32 for k, v in net.state_dict().items())
    assert all(p.requires_grad and p.grad is None for p in net.parameters())


class ConvBlock(nn.Module):
    def __init__(self, inside, outside):
        super().__init__()
        self.one = nn.Conv2d(inside, outside, 3, padding=1)
        self.two = nn.Conv2d(outside, outside, 3, padding=1)
        self.shortcut = nn.Sequential(nn.Conv2d(inside, outside, 1)) if inside != outside else nn.Identity()

    def forward(self, x):
        return torch.relu(self.two(torch.relu(self.one(x))) + self.shortcut(x))


class Stages(nn.Module):
    """A residual network in stages of different width and length, as the usual ResNets are written."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.layer1 = nn.Sequential(ConvBlock(4, 4), ConvBlock(4, 4), ConvBlock(4, 4))
        self.layer2 = nn.Sequential(ConvBlock(4, 6))
        self.layer3 = nn.Sequential(ConvBlock(6, 5), ConvBlock(5, 5))
        self.fc = nn.Linear(5, 3)

    def forward(self, x):
        x = self.layer3(self.layer2(self.layer1(torch.relu(self.stem(x)))))
        return self.fc(x.mean((2, 3)))


def test_all_stages_of_a_residual_network_are_read():
    torch.manual_seed(0)
    basis = strati.interaction_basis(Stages(), torch.randn(12, 3, 5, 5))
    wanted = ["input", *(f"layer1.{k}" for k in range(3)), "layer2.0", "layer3.0", "layer3.1", "output"]
    assert [layer.name for layer in basis.layers] == wanted


def test_stages_that_only_hold_blocks_are_looked_into():
    transformers = pytest.importorskip("transformers")
    config = transformers.ResNetConfig(
        embedding_size=4, hidden_sizes=[4, 6], depths=[2, 1], num_labels=3, layer_type="basic"
    )
    names = [
        site.name
        for site in find_sites(transformers.ResNetForImageClassification(config), None, tokens=False)
    ]
    stem = "resnet.encoder.stages"
    assert names == ["input", f"{stem}.0.layers.0", f"{stem}.0.layers.1", f"{stem}.1.layers.0", "output"]
