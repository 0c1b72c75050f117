"""Exported plans are loaded by the tools they are for; a tool that is not installed is skipped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import strati
from strati import interventions as iv

pytestmark = pytest.mark.oracle

torch = pytest.importorskip("torch")


class Net(torch.nn.Module):
    """Three linear layers with names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q_proj, self.up_proj = torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)
        self.head = torch.nn.Linear(32, 4)

    def forward(self, x: Any) -> Any:
        return self.head(torch.relu(self.up_proj(torch.relu(self.q_proj(x)))))


def _plan(action: str, **settings: Any) -> Any:
    net = Net()
    x = torch.randn(160, 32)
    budget = {"quantise": "bits=4.6", "prune": "parameters=0.6", "truncate": "rank=12"}[action]
    measured = strati.study(
        net,
        data=(x.numpy(), net(x).argmax(1).numpy()),
        performance="loss",
        spectral=False,
        activations=False,
        interventions=getattr(iv, action)(**settings),
    )
    return strati.plan(measured, budget=budget, action=action, combinations=1)


@pytest.fixture(scope="module")
def quantised() -> Any:
    plan = _plan("quantise", bits=[2, 3, 4], group=16, symmetric=True, method="gptq")
    assert len(set(plan.choices.values())) > 1
    return plan


def _bits(plan: Any, name: str) -> int:
    return int(plan.choices[name][5])


def test_compressed_tensors(quantised: Any, tmp_path: Path) -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    quantised.export(tmp_path / "q.json", format="compressed-tensors")
    config = quantization.QuantizationConfig.model_validate(json.loads((tmp_path / "q.json").read_text()))
    net = Net()
    config.quantization_status = quantization.QuantizationStatus.INITIALIZED
    quantization.apply_quantization_config(net, config)
    for name, module in net.named_children():
        scheme = getattr(module, "quantization_scheme", None)
        if name in quantised.choices:
            assert (scheme.weights.num_bits, scheme.weights.group_size) == (_bits(quantised, name), 16)
        else:
            assert scheme is None


def test_llm_compressor(quantised: Any, tmp_path: Path) -> None:
    recipes = pytest.importorskip("llmcompressor.recipe")
    from llmcompressor.modifiers.factory import ModifierFactory

    ModifierFactory.refresh()
    quantised.export(tmp_path / "recipe.yaml", format="llm-compressor")
    (modifier,) = recipes.Recipe.create_instance(str(tmp_path / "recipe.yaml")).modifiers
    assert type(modifier).__name__ == "GPTQModifier"
    found = {name: g.weights.num_bits for g in modifier.config_groups.values() for name in g.targets}
    assert found == {name: _bits(quantised, name) for name in quantised.choices}
    pruned = _plan("prune", share=[0.3, 0.5, 0.7], method="sparsegpt")
    pruned.export(tmp_path / "prune.yaml", format="llm-compressor")
    modifiers = recipes.Recipe.create_instance(str(tmp_path / "prune.yaml")).modifiers
    shares = {name: m.sparsity for m in modifiers for name in m.targets}
    assert shares == {n: float(c.partition(",")[0].partition("=")[2]) for n, c in pruned.choices.items()}


def test_gptqmodel(quantised: Any, tmp_path: Path) -> None:
    gptqmodel = pytest.importorskip("gptqmodel")
    quantised.export(tmp_path / "g.json", format="gptqmodel")
    config = gptqmodel.QuantizeConfig(**json.loads((tmp_path / "g.json").read_text()))
    for name in ("q_proj", "up_proj", "head"):
        if name in quantised.choices:
            assert config.dynamic_get(name, "bits", config.bits) == _bits(quantised, name)
        else:
            assert config.dynamic_get(name) is False


def test_auto_round(tmp_path: Path) -> None:
    """AutoRound itself, on a Llama: its layers have the bits of the plan before anything is tuned."""
    auto_round = pytest.importorskip("auto_round")
    import numpy as np
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, **sizes))
    tokens = np.random.default_rng(0).integers(0, 64, (24, 16))
    measured = strati.study(
        model,
        data=tokens,
        spectral=False,
        layers="model.layers.*",
        interventions=iv.quantise(bits=[2, 3, 4], group=32, symmetric=True, method="gptq"),
    )
    plan = strati.plan(measured, budget="bits=4", action="quantise", combinations=1)
    plan.export(tmp_path / "a.json", format="auto-round")
    arguments = json.loads((tmp_path / "a.json").read_text())
    loaded = auto_round.AutoRound(
        model, tokenizer=_tokenizer(tmp_path), iters=0, nsamples=1, seqlen=16, device_map="cpu", **arguments
    )
    bits = {name: about["bits"] for name, about in loaded.layer_config.items()}
    for layer in plan.layers:
        asked = _bits(plan, layer.name) if layer.name in plan.choices else 16
        assert bits[layer.name] == asked


def _tokenizer(folder: Path) -> Any:
    import transformers
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({str(i): i for i in range(64)}, unk_token="0"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words)


def test_llama_cpp_names_and_types() -> None:
    """Tensor names and types are those of llama.cpp's own tables, in its package gguf."""
    gguf = pytest.importorskip("gguf")
    from strati.interventions.compress.exports import LLAMA_TYPES, gguf_name

    kinds = {kind.name.lower() for kind in gguf.GGMLQuantizationType}
    assert set(LLAMA_TYPES.values()) <= kinds
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 4)
    parts = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
    names = [f"model.layers.3.{part}" for part in (*parts, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")]
    for name in (*names, "model.embed_tokens", "lm_head"):
        assert gguf_name(name) == table.get_name(name)


def test_modelopt(quantised: Any, tmp_path: Path) -> None:
    mtq = pytest.importorskip("modelopt.torch.quantization")
    yaml = pytest.importorskip("yaml")
    quantised.export(tmp_path / "m.yaml", format="modelopt")
    net = Net()
    mtq.quantize(
        net, yaml.safe_load((tmp_path / "m.yaml").read_text()), lambda model: model(torch.randn(4, 32))
    )
    for name, module in net.named_children():
        assert module.weight_quantizer.is_enabled == (name in quantised.choices)
        if name in quantised.choices:
            assert module.weight_quantizer.num_bits == _bits(quantised, name)
            assert module.weight_quantizer.block_sizes[-1] == 16


def test_torchao(quantised: Any, tmp_path: Path) -> None:
    core = pytest.importorskip("torchao.core.config")
    from torchao.quantization import quantize_

    quantised.export(tmp_path / "t.json", format="torchao")
    config = core.config_from_dict(json.loads((tmp_path / "t.json").read_text()))
    net = Net()
    quantize_(net, config, filter_fn=None)
    for name, module in net.named_children():
        changed = type(module.weight.data) is not torch.Tensor
        assert changed == (name in quantised.choices)
        if changed:
            assert module.weight.target_dtype == getattr(torch, f"int{_bits(quantised, name)}")


def test_peft(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    plan = _plan("truncate", rank=[2, 4, 8, 16], metric="inputs")
    plan.export(tmp_path / "p.json", format="peft")
    arguments = json.loads((tmp_path / "p.json").read_text())
    arguments.pop("strati")
    model = peft.get_peft_model(Net(), peft.LoraConfig(**arguments))
    for name, choice in plan.choices.items():
        rank = int(choice.partition(",")[0].partition("=")[2])
        assert model.base_model.model.get_submodule(name).r["default"] == min(rank, 64)


def test_gptq_gives_the_codes_of_llm_compressor() -> None:
    """One layer of 24 x 160, symmetric, one scale per output; single against double precision may flip single codes."""
    reference = pytest.importorskip("llmcompressor.modifiers.gptq.gptq_quantize")
    import numpy as np
    from compressed_tensors.quantization import QuantizationArgs

    from strati.interventions.quantise_prune import Grid, gptq

    rng = np.random.default_rng(0)
    w = rng.standard_normal((24, 160))
    x = rng.standard_normal((160, 160)) @ rng.standard_normal((160, 600))
    c = x @ x.T / 600
    step = Grid.of(w, 4, symmetric=True).step
    theirs, _, _ = reference.quantize_weight(
        torch.tensor(w, dtype=torch.float32)[None],
        torch.tensor(c, dtype=torch.float32)[None],
        torch.tensor(step, dtype=torch.float32)[None],
        torch.zeros(1, 24, 1),
        None,
        QuantizationArgs(num_bits=4, symmetric=True, strategy="channel"),
    )
    codes = np.round(theirs[0].numpy() / step)
    ours = np.round(gptq(w, c, 4, symmetric=True) / step)
    assert np.mean(codes == ours) > 0.995


@pytest.mark.parametrize("group", [128, 32])
def test_gptq_gives_the_codes_of_gptqmodel(group: int) -> None:
    """One layer of 192 x 256 to 4 bits, with the options matched in which the defaults of the two differ.

    The defaults of gptqmodel are a symmetric grid of another scale, a damping of 5 %, an order of the groups by the
    inputs' power, and blocks of 128 columns inside which the scales of smaller groups do not see the compensation.
    """
    gptqmodel = pytest.importorskip("gptqmodel")
    import numpy as np
    from gptqmodel.quantization.gptq import GPTQ

    from strati.interventions.quantise_prune import gptq

    torch.manual_seed(0)
    layer = torch.nn.Linear(256, 192, bias=False)
    inputs = torch.randn(1, 2048, 256) @ (torch.randn(256, 256) / 16)
    matched = {"sym": False, "damp_percent": 0.01, "act_group_aware": False, "desc_act": False}
    reference = GPTQ(layer, gptqmodel.QuantizeConfig(bits=4, group_size=group, **matched))
    reference.quantizer.configure(perchannel=True)
    reference.add_batch(inputs, layer(inputs))
    theirs, scales, _, groups = reference.quantize(blocksize=group)[:4]
    rows = inputs[0].double().numpy()
    ours = gptq(layer.weight.detach().numpy(), rows.T @ rows / len(rows), 4, group)
    step = scales.double().numpy()[:, groups.numpy()]
    equal = np.mean(np.round(theirs.double().numpy() / step) == np.round(ours / step))
    assert equal >= 0.999, equal
