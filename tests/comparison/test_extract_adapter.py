"""Adapters extracted from a difference: PEFT loads them, and base + adapter is the fine-tune."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
import transformers
from command import run_strati
from safetensors.numpy import save_file

import strati
from strati.comparison.extract_adapter import extract_adapter
from strati.io.adapters.merge import merged

pytestmark = pytest.mark.filterwarnings("ignore")


def llama() -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attention_bias=True,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def gpt2() -> transformers.GPT2LMHeadModel:
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=4, n_positions=16)
    return transformers.GPT2LMHeadModel(config).eval()


def tuned(model: torch.nn.Module, words: tuple[str, ...], rank: int) -> torch.nn.Module:
    """Low-rank updates of some layers; the norms, biases and embeddings that ``words`` name change too."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in other.named_parameters():
            if not any(word in name for word in words):
                continue
            if weight.ndim == 2 and "embed" not in name:
                factors = [torch.randn(n, rank, generator=generator) for n in weight.shape]
                weight += 0.1 * factors[0] @ factors[1].T
            else:
                weight += 0.1 * torch.randn(weight.shape, generator=generator)
    return other


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (llama, ("q_proj.weight", "down_proj")),
        (llama, ("q_proj", "model.norm", "layers.1.input_layernorm", "embed_tokens")),
        (gpt2, ("c_attn.weight", "mlp.c_proj.weight", "ln_f")),
    ],
    ids=["llama", "norms, biases and embeddings", "gpt2"],
)
def test_peft_loads_it_and_computes_the_fine_tune(
    make: object, words: tuple[str, ...], tmp_path: Path
) -> None:
    base = make()  # type: ignore[operator]
    goal = tuned(base, words, rank=3)
    adapter = extract_adapter(base.state_dict(), goal.state_dict(), tmp_path / "adapter")
    assert {layer.rank for layer in adapter.layers} == {3}
    assert min(layer.explained for layer in adapter.layers) == pytest.approx(1, abs=1e-9)
    model = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "adapter").eval()
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        expected, before = goal(tokens).logits, base(tokens).logits
        torch.testing.assert_close(model(tokens).logits, expected, atol=2e-4, rtol=1e-4)
    assert (expected - before).abs().max() > 1e-2
    both = merged(strati.open(base.state_dict()), strati.open(tmp_path / "adapter"))
    assert max(layer.relative_change for layer in strati.compare(goal.state_dict(), both).layers) < 1e-5


def test_ranks_follow_the_noise_edge_of_a_dense_update(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    base = {"layers.0.fc.weight": rng.normal(size=(120, 100)).astype(np.float32)}
    signal = rng.normal(size=(120, 4)) @ rng.normal(size=(4, 100))
    noise = 0.3 * rng.normal(size=(120, 100))
    goal = {"layers.0.fc.weight": (base["layers.0.fc.weight"] + 0.1 * (signal + noise)).astype(np.float32)}
    (layer,) = extract_adapter(base, goal, tmp_path / "a").layers
    assert layer.rank == 4
    step = goal["layers.0.fc.weight"].astype(float) - base["layers.0.fc.weight"]
    energy = np.linalg.svd(step, compute_uv=False) ** 2
    assert layer.explained == pytest.approx(energy[:4].sum() / energy.sum(), rel=1e-9)
    assert layer.residual == pytest.approx(
        np.sqrt(energy[4:].sum()) / np.linalg.norm(base["layers.0.fc.weight"]), rel=1e-5
    )
    chosen = extract_adapter(base, goal, tmp_path / "b", rank={"layers.0.fc": 7}).layers
    assert [layer.rank for layer in chosen] == [7]


def test_a_convolution(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    base = {"conv.weight": rng.normal(size=(12, 8, 3, 3)).astype(np.float32)}
    step = (rng.normal(size=(12, 2)) @ rng.normal(size=(2, 72))).reshape(12, 8, 3, 3)
    goal = {"conv.weight": base["conv.weight"] + step.astype(np.float32)}
    extract_adapter(base, goal, tmp_path / "a", rank=2)
    (layer,) = strati.compare(goal, merged(strati.open(base), strati.open(tmp_path / "a"))).layers
    assert layer.relative_change < 1e-6


def test_the_command(tmp_path: Path) -> None:
    base, goal = llama(), tuned(llama(), ("q_proj.weight",), rank=2)
    for name, model in (("a", base), ("b", goal)):
        save_file({k: v.numpy() for k, v in model.state_dict().items()}, tmp_path / f"{name}.safetensors")
    files = (tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    run = run_strati("compare", *files, "--extract", tmp_path / "adapter", expect=0)
    assert "rank 2 on 2 layers" in " ".join(run.stdout.split())
    assert strati.open(tmp_path / "adapter").format == "peft"
    assert run_strati("compare", *files, "--extract", tmp_path / "adapter").returncode == 2


def test_bad_input(tmp_path: Path) -> None:
    with pytest.raises(strati.StratiError, match="no tensor in common"):
        extract_adapter({"a.weight": np.eye(4)}, {"b.weight": np.eye(4)}, tmp_path / "x")
    with pytest.raises(strati.StratiError, match="must be 0 or more"):
        extract_adapter({"a.weight": np.eye(4)}, {"a.weight": np.eye(4)}, tmp_path / "x", rank=-1)
    assert not (tmp_path / "x").exists()
