"""Distributions of initial values: against torch's own, and said aloud."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from strati.core.errors import BadInputError
from strati.interventions.initialisers import Distribution, Scheme, scheme_of
from strati.interventions.targets import Target, find_targets, values_of
from strati_reproductions.trained.networks import MLP, CifarResNet, initialise


@pytest.mark.parametrize("module", [nn.Linear(300, 200), nn.Conv2d(20, 30, 3), nn.Embedding(200, 100)])
def test_pytorch_defaults_are_pytorchs(module: nn.Module) -> None:
    torch.manual_seed(0)
    module.reset_parameters()  # type: ignore[operator]
    net = nn.Sequential(module)
    (target,) = find_targets(net)
    weight, bias = values_of(net, target)
    new, new_bias, _ = Scheme("pytorch").draw(target, (weight, bias), np.random.default_rng(0))
    # one comparison each at level 1e-3, fixed seed
    assert stats.ks_2samp(weight.ravel()[:5000], new.ravel()[:5000]).pvalue > 1e-3
    assert new.shape == weight.shape and new.dtype == np.float32
    if bias is not None and new_bias is not None:
        assert stats.ks_2samp(bias, new_bias).pvalue > 1e-3


@pytest.mark.parametrize(("kind", "deviation"), [("uniform", 3**-0.5), ("normal", 1.0)])
def test_moments_of_the_distributions(kind: str, deviation: float) -> None:
    drawn = Distribution(kind, 2.0, 5.0).sample((200_000,), np.random.default_rng(0))  # type: ignore[arg-type]
    assert drawn.mean() == pytest.approx(5.0, abs=0.03)
    assert drawn.std() == pytest.approx(2.0 * deviation, rel=0.01)


@pytest.mark.parametrize("deviation", [0.02, 1.0, 3.0])
def test_the_truncated_normal_is_pytorchs(deviation: float) -> None:
    torch.manual_seed(0)
    theirs = nn.init.trunc_normal_(torch.empty(20_000), std=deviation).numpy()
    ours = Distribution("truncated", deviation).sample((20_000,), np.random.default_rng(0))
    assert stats.ks_2samp(theirs, ours).pvalue > 1e-3
    assert np.abs(ours).max() <= 2.0


def small(name: str) -> nn.Module:
    """A network of transformers as its own code initialises it, wide enough to see deviations."""
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    options = {
        "GPT2LMHeadModel": {"n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 90},
        "LlamaForCausalLM": sizes | {"vocab_size": 90},
        "BertForSequenceClassification": sizes | {"vocab_size": 90, "num_labels": 40},
        "ViTForImageClassification": sizes | {"image_size": 32, "patch_size": 8, "num_labels": 40},
        "ResNetForImageClassification": {
            "embedding_size": 16,
            "hidden_sizes": [16, 32],
            "depths": [1, 1],
            "layer_type": "basic",
            "num_labels": 40,
        },
    }
    kind = getattr(transformers, name)
    model: nn.Module = kind(kind.config_class(**options[name]))
    return model


@pytest.mark.parametrize(
    "name",
    [
        "GPT2LMHeadModel",
        "LlamaForCausalLM",
        "BertForSequenceClassification",
        "ViTForImageClassification",
        "ResNetForImageClassification",
    ],
)
def test_every_layer_of_a_known_class_is_drawn_as_its_own_code_draws_it(name: str) -> None:
    model = small(name)
    scheme = scheme_of(model)
    targets = find_targets(model)
    for target in targets:
        weight, bias = values_of(model, target)
        new, new_bias, _ = scheme.draw(target, (weight, bias), np.random.default_rng(1))
        # some 60 comparisons in all at level 1e-4 each, fixed seeds
        assert stats.ks_2samp(weight.ravel(), new.ravel()).pvalue > 1e-4, target.name
        if bias is not None and new_bias is not None:
            assert stats.ks_2samp(bias, new_bias).pvalue > 1e-4, target.name


def test_gpt2_shrinks_residual_outputs() -> None:
    import transformers

    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=16, n_layer=8, n_head=2, vocab_size=40)
    )
    scheme = scheme_of(model)
    assert scheme.name == "gpt2"
    by_name = {t.name: scheme.of(t, *values_of(model, t))[0].scale for t in find_targets(model)}
    assert by_name["transformer.h.0.attn.c_attn"] == pytest.approx(0.02)
    assert by_name["transformer.h.0.mlp.c_proj"] == pytest.approx(0.02 / 4)


@pytest.mark.parametrize(
    ("name", "scheme"),
    [("ViT", "vit"), ("Llama", "normal"), ("Bert", "normal"), ("ResNet", "kaiming_fan_out")],
)
def test_the_class_implies_the_scheme(name: str, scheme: str) -> None:
    import transformers

    class Shell(nn.Module):
        config = getattr(transformers, f"{name}Config")()

    assert scheme_of(Shell()).name == scheme
    assert scheme_of(Shell(), "moments").name == "moments"


def test_unknown_networks_get_their_own_moments_and_say_so() -> None:
    net = nn.Sequential(nn.Linear(50, 60))
    (target,) = find_targets(net)
    values = values_of(net, target)
    weight, _, text = scheme_of(net).draw(target, values, np.random.default_rng(0))
    assert text.startswith("moments: N(")
    assert weight.std() == pytest.approx(values[0].std(), rel=0.05)


def test_networks_have_streams_of_their_own() -> None:
    nets = [MLP([8, 6, 3]) for _ in range(3)]
    for net, number in zip(nets, (0, 1, 0), strict=True):
        initialise(net, 7, number)
    states = [net.state_dict() for net in nets]
    assert all(torch.equal(states[0][k], states[2][k]) for k in states[0])
    assert not torch.equal(states[0]["fc1.weight"], states[1]["fc1.weight"])


def test_fans() -> None:
    assert Target("c", "conv", "conv", (30, 20, 3, 3), False).fan_in == 180
    assert Target("c", "conv", "conv", (30, 20, 3, 3), False).fan_out == 270
    assert Target("c", "conv1d", "x", (20, 30), True).fan_in == 20


def test_a_tied_weight_counts_once_and_patterns_choose() -> None:
    import transformers

    config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=40)
    names = [t.name for t in find_targets(transformers.GPT2LMHeadModel(config))]
    assert "transformer.wte" in names and "lm_head" not in names
    assert [t.name for t in find_targets(CifarResNet(8, 4), ["layer2.*"])] == [
        "layer2.0.conv1",
        "layer2.0.conv2",
    ]
    with pytest.raises(BadInputError, match="nothing: matches no layer; nearest"):
        find_targets(CifarResNet(8, 4), ["nothing"])


def test_types_are_roles_and_kernel_sizes() -> None:
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=40
    )
    types = {t.name: t.type for t in find_targets(transformers.LlamaForCausalLM(config))}
    assert types["model.layers.1.self_attn.q_proj"] == "attention.q"
    assert types["model.layers.1.mlp.gate_proj"] == "mlp.gate"
    assert types["model.embed_tokens"] == "embedding"
    assert {t.type for t in find_targets(MLP([8, 6, 3]))} == {"linear"}
    assert {t.type for t in find_targets(CifarResNet(8, 4))} == {"conv3x3", "linear"}
