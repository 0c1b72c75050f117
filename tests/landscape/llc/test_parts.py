"""Coefficients of parts: layers, attention heads, groups of the data."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import strati
from strati.core.errors import BadInputError
from strati.landscape.llc.parts import PartModel, head_entries

LIGHT = {"chains": 4, "draws": 20, "ladder": False}


def mlp() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(80, 3)


def test_each_layer_alone_is_what_layers_gives():
    model, x = mlp()
    parts = strati.llc(model, "behavioural-mse", x, per_layer=True, **LIGHT)
    assert list(parts.parts) == ["0", "2"]
    alone = strati.llc(model, "behavioural-mse", x, layers=["2"], **LIGHT)
    assert parts["2"].estimate == alone.estimate and alone.traces.parameters == 10
    # 16 and 10 parameters, all of them seen by 80 data.
    assert [parts[n].asymptotic for n in ("0", "2")] == [8.0, 5.0]
    assert list(parts.frame()["part"]) == ["0", "2"] and len(parts.to_dict()["parts"]) == 2
    with pytest.raises(BadInputError, match="no such part"):
        parts["1"]


def test_patterns_choose_layers():
    model, x = mlp()
    biases = strati.llc(model, "behavioural-mse", x, layers="*.bias", **LIGHT)
    assert biases.traces.parameters == 6 and biases.asymptotic == 3.0
    rest = strati.llc(model, "behavioural-mse", x, layers=["!0"], **LIGHT)
    assert rest.traces.parameters == 10
    with pytest.raises(BadInputError, match="matches no layer"):
        strati.llc(model, "behavioural-mse", x, layers="fc*")


def test_groups_of_the_data():
    model, x = mlp()
    labels = ["few"] * 2 + ["many"] * 78
    parts = strati.llc(model, "behavioural-mse", x, groups=labels, **LIGHT)
    assert parts["many"].asymptotic == 13.0
    assert parts["few"].asymptotic == 2.0  # two rows, two outputs each: four equations
    with pytest.raises(BadInputError, match="one label per row"):
        strati.llc(model, "behavioural-mse", x, groups=labels[:-1])


@pytest.fixture(scope="module")
def gpt():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2, n_head=4, n_embd=16, vocab_size=20, n_positions=12, attn_implementation="eager"
    )
    return transformers.GPT2LMHeadModel(config).eval()


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_heads_are_rows_of_queries_and_columns_of_outputs(gpt, kind):
    """Zeroing a head's weights is the same as what the model computes with that head's output cut."""
    transformers = pytest.importorskip("transformers")
    if kind == "llama":
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            hidden_size=16,
            intermediate_size=24,
            vocab_size=20,
            attn_implementation="eager",
        )
        model = transformers.LlamaForCausalLM(config).eval()
        wanted = {"q_proj": 4 * 16, "o_proj": 16 * 4}  # keys and values are shared by two heads
    else:
        model, wanted = gpt, {"c_attn.weight": 3 * 4 * 16, "c_attn.bias": 12, "attn.c_proj.weight": 16 * 4}
    entries = head_entries(model, (1, 2))
    assert {w: len(i) for w in wanted for n, i in entries.items() if w in n} == wanted
    assert all("1." in name for name in entries)
    tokens = torch.randint(0, 20, (3, 6))
    part = PartModel(model, head_entries(model, (1, 2)))
    with torch.no_grad():
        assert torch.equal(part(tokens).logits, model(tokens).logits)
        for value in part.held.values():
            value.zero_()
        cut = part(tokens).logits
        out = next(
            m
            for n, m in model.named_modules()
            if n.endswith(("h.1.attn.c_proj", "layers.1.self_attn.o_proj"))
        )
        handle = out.register_forward_pre_hook(lambda _, given: (_without(given[0], 2, 4),))
        expected = model(tokens).logits
        handle.remove()
    assert torch.allclose(cut, expected, atol=1e-5)


def _without(value: torch.Tensor, head: int, count: int) -> torch.Tensor:
    parts = value.clone().reshape(*value.shape[:-1], count, -1)
    parts[..., head, :] = 0
    return parts.reshape(value.shape)


def test_coefficients_of_heads(gpt):
    tokens = torch.randint(0, 20, (4, 6), generator=torch.Generator().manual_seed(0))
    few = {"chains": 2, "draws": 10, "warmup": 10, "leapfrog": 3, "sampler": "hmc", "ladder": False}
    parts = strati.llc(gpt, "behavioural-kl", tokens, heads=[(0, 1), (1, 3)], **few)
    assert list(parts.parts) == ["0.1", "1.3"] and parts["0.1"].traces.parameters == 268
    with pytest.raises(BadInputError, match="no head 4"):
        strati.llc(gpt, "behavioural-kl", tokens, heads=[(0, 4)])
    with pytest.raises(BadInputError, match="block 7"):
        strati.llc(gpt, "behavioural-kl", tokens, heads=[(7, 0)])
