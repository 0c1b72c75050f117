"""Adapters made by PEFT itself: opened, measured by their cores, merged as PEFT merges them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import strati
from strati.io.adapters.lora import core, used_rank
from strati.io.adapters.merge import is_adapter, merged

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=4))


class Kernels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Conv2d(3, 8, (3, 5))
        self.line = nn.Conv1d(4, 6, 3)
        self.fc = nn.Linear(12, 5)

    def save_pretrained(self, folder: Path) -> None:
        folder.mkdir()
        torch.save(self.state_dict(), folder / "pytorch_model.bin")


def kernels() -> nn.Module:
    torch.manual_seed(0)
    return Kernels()


def trained(model: nn.Module, seed: int = 1, **options: Any) -> Any:
    """The model with an adapter whose factors are as after training: B is no longer zero."""
    wrapped = peft.get_peft_model(model, peft.LoraConfig(**options))
    torch.manual_seed(seed)
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name or "lora_embedding" in name or "trainable_tokens_delta" in name:
            nn.init.normal_(parameter, std=0.05)
        elif "lora_magnitude" in name:
            parameter.data *= 1.1
    return wrapped


CASES = {
    "lora": (llama, {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}),
    "rslora": (llama, {"r": 4, "lora_alpha": 8, "use_rslora": True, "target_modules": ["q_proj"]}),
    "patterns": (
        llama,
        {
            "r": 4,
            "lora_alpha": 8,
            "target_modules": ["q_proj", "down_proj"],
            "rank_pattern": {"down_proj": 2},
            "alpha_pattern": {"layers.1.self_attn.q_proj": 32},
        },
    ),
    "dora": (llama, {"r": 4, "lora_alpha": 8, "use_dora": True, "target_modules": ["q_proj", "up_proj"]}),
    "conv1d": (gpt2, {"r": 4, "lora_alpha": 4, "fan_in_fan_out": True, "target_modules": ["c_attn"]}),
    "embedding": (gpt2, {"r": 4, "lora_alpha": 4, "target_modules": ["wte"]}),
    "embedding and head": (
        llama,
        {"r": 4, "lora_alpha": 8, "target_modules": ["embed_tokens", "lm_head", "q_proj"]},
    ),
    "embedding dora": (llama, {"r": 4, "use_dora": True, "target_modules": ["embed_tokens", "q_proj"]}),
    "conv1d dora": (
        gpt2,
        {"r": 4, "use_dora": True, "fan_in_fan_out": True, "target_modules": ["c_attn", "c_proj"]},
    ),
    "kernels": (kernels, {"r": 3, "lora_alpha": 8, "target_modules": ["wide", "line", "fc"]}),
    "kernels dora": (kernels, {"r": 3, "use_dora": True, "target_modules": ["wide", "line", "fc"]}),
    "regular expressions": (
        llama,
        {
            "r": 4,
            "lora_alpha": 8,
            "use_rslora": True,
            "target_modules": ["q_proj", "v_proj", "up_proj"],
            "rank_pattern": {"layers.1.self_attn.q_proj": 7, r".*\.0\..*v_proj": 3},
            "alpha_pattern": {"^model.layers.0.self_attn.q_proj": 32, r"layers\.[01]\..*(v|up)_proj": 5},
        },
    ),
    "tokens": (llama, {"r": 2, "target_modules": ["q_proj"], "trainable_token_indices": [3, 7, 50]}),
    "saved": (llama, {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
}


@pytest.mark.parametrize("case", CASES)
def test_merging_is_what_peft_does(tmp_path: Path, case: str) -> None:
    make, options = CASES[case]
    make().save_pretrained(tmp_path / "base")
    wrapped = trained(make(), **options)
    wrapped.save_pretrained(tmp_path / "adapter")
    base, adapter = strati.open(tmp_path / "base"), strati.open(tmp_path / "adapter")
    assert is_adapter(adapter) and not is_adapter(base)
    assert adapter.format == "peft"
    ours = merged(base, adapter)
    theirs = wrapped.merge_and_unload().state_dict()
    changed = 0
    for tensor in ours.tensors:
        expected = theirs[tensor.name].numpy()
        np.testing.assert_allclose(ours.read(tensor.name), expected, rtol=1e-4, atol=1e-6)
        changed += not np.array_equal(base.read(tensor.name), ours.read(tensor.name))
    assert changed > 0


def test_layers_are_the_updates(tmp_path: Path) -> None:
    make, options = CASES["patterns"]
    wrapped = trained(make(), **options)
    wrapped.save_pretrained(tmp_path)
    net = strati.open(tmp_path)
    found = {layer.name: layer for layer in net.layers()}
    assert set(found) == {
        f"model.layers.{i}.{module}.weight"
        for i in (0, 1)
        for module in ("self_attn.q_proj", "mlp.down_proj")
    }
    down, q = found["model.layers.0.mlp.down_proj.weight"], found["model.layers.1.self_attn.q_proj.weight"]
    assert (down.shape, down.adapter.rank, down.adapter.scale) == ((32, 48), 2, 4.0)
    assert (q.adapter.rank, q.adapter.scale, str(q.role), q.block) == (4, 8.0, "attention.q", 1)
    assert q.parameters == 4 * (32 + 32)
    module = wrapped.base_model.model.model.layers[1].self_attn.q_proj
    expected = module.get_delta_weight("default").detach().numpy()
    np.testing.assert_allclose(next(q.matrices()), expected, rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(
        np.linalg.svd(q.adapter.core(), compute_uv=False),
        np.linalg.svd(expected.astype(float), compute_uv=False)[:4],
        rtol=1e-5,
    )


def test_updates_of_kernels_are_of_convolutions(tmp_path: Path) -> None:
    make, options = CASES["kernels"]
    trained(make(), **options).save_pretrained(tmp_path)
    found = {layer.name: (str(layer.role), layer.shape) for layer in strati.open(tmp_path).layers()}
    shapes = {
        n: p.shape
        for n, p in make().named_parameters()
        if n.startswith(("wide", "line", "fc")) and p.ndim > 1
    }
    assert found == {
        n: ("conv" if len(s) > 2 else "linear", (s[0], s[1:].numel())) for n, s in shapes.items()
    }


def test_a_peft_model_in_memory_shows_its_updates() -> None:
    make, options = CASES["lora"]
    net = strati.open(trained(make(), **options))
    updates = [layer for layer in net.layers() if layer.adapter is not None]
    assert len(updates) == 4
    assert {layer.adapter.scale for layer in updates} == {2.0}
    assert any("base_layer" in layer.name for layer in net.layers())


def test_a_fresh_adapter_uses_nothing_and_a_trained_one_what_it_was_given(tmp_path: Path) -> None:
    make, options = CASES["lora"]
    peft.get_peft_model(make(), peft.LoraConfig(**options)).save_pretrained(tmp_path / "fresh")
    trained(make(), **options).save_pretrained(tmp_path / "trained")
    assert {layer.adapter.used_rank() for layer in strati.open(tmp_path / "fresh").layers()} == {0}
    assert {layer.adapter.used_rank() for layer in strati.open(tmp_path / "trained").layers()} == {4}


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), st.integers(0, 2**31), st.sampled_from([np.float32, np.float16]))
def test_used_rank_finds_the_directions_above_the_noise(used: int, seed: int, dtype: Any) -> None:
    """``used`` of 16 directions carry the update, the rest noise a thirtieth of the weakest."""
    rng = np.random.default_rng(seed)
    B = rng.normal(size=(256, 16)) @ np.diag(np.where(np.arange(16) < used, rng.uniform(0.5, 1, 16), 0.01))
    A = np.linalg.qr(rng.normal(size=(200, 16)))[0].T
    found = np.linalg.svd(core(B.astype(dtype), A.astype(dtype), 1.0), compute_uv=False)
    assert used_rank(found, 256, 200, float(np.finfo(dtype).eps)) == used


def test_dora_and_unknown_scales_say_so(tmp_path: Path) -> None:
    make, options = CASES["dora"]
    wrapped = trained(make(), **options)
    wrapped.save_pretrained(tmp_path)
    assert "dora-without-base" in {flag.code for flag in strati.open(tmp_path).warnings}
    state = {k: v for k, v in wrapped.state_dict().items() if "lora_A" in k or "lora_B" in k}
    assert "adapter-scale-unknown" in {flag.code for flag in strati.open(state).warnings}


@pytest.mark.parametrize(
    ("config", "weights", "why"),
    [
        ({"peft_type": "OFT"}, True, "adapter of the kind OFT"),
        ({"peft_type": "IA3"}, True, "adapter of the kind IA3"),
        ([], True, "is not a JSON table"),
        ({"peft_type": "LORA"}, False, "no adapter_model.safetensors"),
    ],
)
def test_bad_adapters(tmp_path: Path, config: Any, weights: bool, why: str) -> None:
    make, options = CASES["lora"]
    trained(make(), **options).save_pretrained(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    if not weights:
        (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(strati.StratiError, match=why):
        strati.open(tmp_path)


def test_an_adapter_of_another_network_is_refused(tmp_path: Path) -> None:
    make, options = CASES["lora"]
    trained(make(), **options).save_pretrained(tmp_path)
    with pytest.raises(strati.StratiError, match="belongs to another network"):
        merged(strati.open(gpt2()), strati.open(tmp_path))


@pytest.mark.parametrize("case", ["lora", "rslora", "dora", "saved", "conv1d", "embedding"])
def test_a_peft_model_in_memory_beside_its_base(tmp_path: Path, case: str) -> None:
    """The same comparison, number for number, as of the base's folder and the adapter's."""
    make, options = CASES[case]
    base, model = make(), trained(make(), **options)
    model.save_pretrained(tmp_path / "adapter")
    base.save_pretrained(tmp_path / "base")
    if case == "saved":
        with torch.no_grad():
            model.base_model.model.lm_head.modules_to_save["default"].weight.mul_(1.5)
        model.save_pretrained(tmp_path / "adapter")
    stored = strati.compare(tmp_path / "base", tmp_path / "adapter")
    found = strati.compare(base, model, seed=0)
    # A head tied to an embedding with an adapter is the embedding without it: no longer tied.
    assert [x.name for x in found.unmatched] == (["lm_head.weight"] if case == "embedding" else [])
    moved = {x.name: (x.update_kind, x.update_rank) for x in found.layers if x.update_kind != "untouched"}
    assert moved == {
        x.name: (x.update_kind, x.update_rank) for x in stored.layers if x.update_kind != "untouched"
    }
    rank = options["r"]
    assert moved
    if case not in ("dora", "saved"):
        assert set(moved.values()) == {("low-rank", rank)}
    if case == "saved":
        assert moved["lm_head.weight"][0] == "dense"
