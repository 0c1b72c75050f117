"""Blocks and experts as units: changes against networks changed by hand, and folders that transformers loads."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import strati
from strati import interventions as iv
from strati.core.errors import BadInputError, UnsupportedError
from strati.interventions.experts import find_experts, score_experts
from strati.interventions.tasks import StudyData, make_task

TOKENS = np.random.default_rng(0).integers(3, 60, (12, 16))
DATA = StudyData("tokens", 60, np.empty(0), None, TOKENS, None)


def model_of(kind: str) -> Any:
    import transformers

    torch.manual_seed(0)
    common = {"vocab_size": 60, "bos_token_id": 1, "eos_token_id": 2}
    if kind == "gpt2":
        config: Any = transformers.GPT2Config(n_embd=32, n_layer=4, n_head=2, n_positions=32, **common)
        return transformers.GPT2LMHeadModel(config).eval()
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 2, "max_position_embeddings": 32, **common}
    if kind == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval()
    config = transformers.MixtralConfig(**sizes, num_local_experts=6, num_experts_per_tok=2)
    config.initializer_range = 0.3
    return transformers.MixtralForCausalLM(config).eval()


def blocks_of(model: Any) -> nn.ModuleList:
    stack: nn.ModuleList = model.transformer.h if hasattr(model, "transformer") else model.model.layers
    return stack


def loss_of(model: nn.Module) -> float:
    task = make_task(DATA, "loss", 100)
    with torch.no_grad():
        total = sum(task.add_up(task.output(model, x), y) for x, y in task.batches)
    return total / sum(task.count(y) for _, y in task.batches)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral"])
def test_blocks_reordered_and_repeated_are_the_network_rebuilt_so(kind: str) -> None:
    model = model_of(kind)
    changes = [iv.reorder(run=[2, 3]), iv.repeat(times=[2, 3]), iv.drop(run=2), iv.parallel()]
    found = strati.study(model, data=DATA, performance="loss", interventions=changes)
    assert found.failed == 0
    rows = {(r["intervention"], r["setting"], r["layer"]): r for r in found.rows}
    name = next(row["layer"] for row in found.rows if row["layer"].endswith(".1"))
    orders = {
        ("reorder", "run=2"): [0, 2, 1, 3],
        ("reorder", "run=3"): [0, 3, 2, 1],
        ("repeat", "times=2"): [0, 1, 1, 2, 3],
        ("repeat", "times=3"): [0, 1, 1, 1, 2, 3],
        ("drop", "run=2"): [0, 3],
    }
    for (intervention, setting), order in orders.items():
        rebuilt = copy.deepcopy(model)
        stack = blocks_of(rebuilt)
        blocks = [copy.deepcopy(stack[i]) for i in order]
        del stack[:]
        stack.extend(blocks)
        rebuilt.config.num_hidden_layers = len(order)
        if hasattr(rebuilt.config, "layer_types") and rebuilt.config.layer_types:
            rebuilt.config.layer_types = [rebuilt.config.layer_types[0]] * len(order)
        row = rows[intervention, setting, name]
        assert row["performance"] == pytest.approx(loss_of(rebuilt), rel=1e-5), (intervention, setting)
    assert rows["drop", "run=2", name]["angular_distance"] > 0
    assert ("reorder", "run=3", name.replace(".1", ".2")) not in rows  # only two blocks are left there


def test_parallel_blocks_average_their_outputs() -> None:
    model = model_of("llama")
    row = next(
        r
        for r in strati.study(model, data=DATA, performance="loss", interventions=iv.parallel(run=2)).rows
        if r["intervention"] == "parallel" and r["layer"].endswith(".1")
    )

    class Mean(nn.Module):
        def __init__(self, first: nn.Module, second: nn.Module) -> None:
            super().__init__()
            self.first, self.second = first, second

        def forward(self, *args: Any, **options: Any) -> Any:
            return (self.first(*args, **options) + self.second(*args, **options)) / 2

    stack = blocks_of(model)
    stack[1] = Mean(stack[1], stack[2])
    del stack[2]
    model.config.num_hidden_layers = 3
    assert row["performance"] == pytest.approx(loss_of(model), rel=1e-5)


def test_saliency_by_its_definition() -> None:
    model = model_of("mixtral")
    task = make_task(DATA, "loss", 5)
    scores = score_experts(model, [inputs for inputs, _ in task.batches])
    name = find_experts(model)[2].name
    assert len(scores) == 4
    block = model.get_submodule(name)
    hidden: list[torch.Tensor] = []
    hook = block.register_forward_pre_hook(lambda _m, args: hidden.append(args[0].reshape(-1, 32)))
    loss_of(model)
    hook.remove()
    x = torch.cat(hidden)
    with torch.no_grad():
        probabilities = torch.softmax(x @ block.gate.weight.T, -1)
        top, index = probabilities.topk(2, -1)
        top = top / top.sum(-1, keepdim=True)
        for j in range(6):
            used = (index == j).any(-1)
            gate_up = x[used] @ block.experts.gate_up_proj[j].T
            gate, up = gate_up.chunk(2, -1)
            output = (nn.functional.silu(gate) * up) @ block.experts.down_proj[j].T
            weight = top[index == j]
            expected = float((weight * output.norm(dim=-1)).mean()) if used.any() else 0.0
            assert scores[name].reap[j] == pytest.approx(expected, rel=1e-3)
            assert scores[name].frequency[j] == pytest.approx(float(used.float().mean()))


def test_dropping_experts_one_by_one_and_by_saliency() -> None:
    model = model_of("mixtral")
    changes = [iv.drop_experts(expert=range(6)), iv.drop_experts(count=[2, 5]), iv.merge_experts(count=2)]
    before = loss_of(model)
    found = strati.study(model, data=DATA, performance="loss", interventions=changes)
    assert loss_of(model) == before
    rows = [r for r in found.rows if r["layer"].endswith("0.mlp")]
    failed = [r for r in rows if r["status"] == "failed"]
    assert [r["setting"] for r in failed] == ["count=5"]  # one expert is left, a token uses two
    single = {r["setting"]: r for r in rows if "expert=" in str(r["setting"])}
    two = next(r for r in rows if r["intervention"] == "drop-experts" and r["setting"] == "count=2")
    lowest = sorted(r["reap"] for r in single.values())[:2]
    assert two["reap"] == pytest.approx(sum(lowest))
    merged = next(r for r in rows if r["intervention"] == "merge-experts")
    assert merged["performance"] != two["performance"] and merged["reap"] == two["reap"]


@pytest.mark.parametrize("action", ["drop-experts", "merge_experts"])
def test_written_folders_have_fewer_experts_and_load(tmp_path: Path, action: str) -> None:
    import transformers

    model = model_of("mixtral")
    model.to(torch.bfloat16).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "tokenizer_config.json").write_text("{}")
    np.save(tmp_path / "tokens.npy", TOKENS)
    plan = strati.plan(
        tmp_path / "model", data=tmp_path / "tokens.npy", budget="parameters=0.7", action=action,
        out=tmp_path / "study", performance="loss",
    )  # fmt: skip
    assert {layer.choice for layer in plan.layers} == {"share=0.25"}  # two of six, rounded
    applied = strati.apply(plan, tmp_path / "model", out=tmp_path / "small")
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "small", local_files_only=True)
    assert loaded.config.num_local_experts == 4 and loaded.dtype == torch.bfloat16
    assert loss_of(loaded.float()) == pytest.approx(applied.measured["performance"], rel=1e-4)
    assert applied.measured["performance"] == pytest.approx(plan.predicted["measured"], rel=1e-2)
    per_expert = find_experts(loaded)[0].shape[1]
    assert applied.parameters_before - applied.parameters_after == 4 * 2 * per_expert
    assert (tmp_path / "small" / "tokenizer_config.json").exists()
    uneven = plan.to_dict()
    uneven["layers"][0]["choice"] = "keep"
    with pytest.raises(UnsupportedError, match="one number"):
        strati.apply(uneven, tmp_path / "model", out=tmp_path / "uneven")


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_contiguous_run_by_angular_distance_is_among_the_plans(kind: str, tmp_path: Path) -> None:
    import transformers

    model = model_of(kind)
    model.save_pretrained(tmp_path / "model")
    np.save(tmp_path / "tokens.npy", TOKENS)
    plan = strati.plan(
        tmp_path / "model", data=tmp_path / "tokens.npy", budget="parameters=0.5", action="drop",
        out=tmp_path / "study", performance="loss", combinations=0,
    )  # fmt: skip
    assert plan.size["planned"] <= 0.5 * plan.size["full"]
    applied = strati.apply(plan, tmp_path / "model", out=tmp_path / "small")
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "small", local_files_only=True)
    assert loaded.config.num_hidden_layers == 2
    assert loss_of(loaded) == pytest.approx(applied.measured["performance"], rel=1e-5)


def test_networks_without_experts_are_refused() -> None:
    with pytest.raises(BadInputError, match="no layer of experts"):
        strati.study(model_of("llama"), data=DATA, interventions=iv.drop_experts(count=1))


class Switch(nn.Module):
    """A tiny encoder of Switch Transformers, whose experts are modules of their own, with a head for tokens."""

    def __init__(self) -> None:
        super().__init__()
        transformers = pytest.importorskip("transformers")
        sizes = {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_heads": 2, "num_layers": 2}
        sizes |= {"num_sparse_encoder_layers": 1, "num_experts": 4, "expert_capacity": 10_000}
        config = transformers.SwitchTransformersConfig(**sizes)
        self.encoder = transformers.SwitchTransformersEncoderModel(config)
        self.head = nn.Linear(16, 32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(input_ids=tokens).last_hidden_state)


def test_experts_that_saw_few_tokens_are_reported_and_left_alone(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Switch().eval()
    with torch.no_grad():  # almost all tokens go to the first two experts
        router = next(m for n, m in model.named_modules() if n.endswith("router.classifier"))
        router.weight[2:] *= 1e-3
        router.weight[1] = -router.weight[0]
    rng = np.random.default_rng(0)
    tokens = torch.from_numpy(rng.integers(0, 32, (40, 12)))
    action = strati.quantise(bits=[3], method="gptq")
    measured = strati.study(
        model, data=(tokens, tokens), calibration=tokens[:6], performance="loss", interventions=action,
        layers="*experts*", spectral=False, activations=False,
    )  # fmt: skip
    left = {r["layer"] for r in measured.rows if r.get("warning") == "few-expert-tokens"}
    done = {r["layer"] for r in measured.rows if r["status"] == "done" and r["intervention"] == "quantise"}
    assert left and done and not left & done
    assert all(f"expert_{j}" in name for name, j in [(n, n.partition("expert_")[2][0]) for n in left | done])
    assert [w["code"] for w in measured.warnings] == ["few-expert-tokens"]
    plan = strati.plan(measured, budget="bits=3.5", action="quantise")
    assert plan.to_dict()["warnings"][0]["code"] == "few-expert-tokens"
    assert not left & set(plan.choices) and set(plan.choices) <= done
    chosen = next(iter(plan.choices))
    payload = plan.to_dict()
    payload["layers"].append(payload["layers"][0] | {"name": sorted(left)[0], "choice": plan.choices[chosen]})
    applied = strati.apply(
        payload, model, out=tmp_path / "small", calibration=tokens[:6], data=(tokens, tokens)
    )
    assert [w["code"] for w in applied.to_dict()["warnings"]] == ["few-expert-tokens"]
    written = strati.open(tmp_path / "small")
    for name in (chosen, sorted(left)[0]):
        same = np.array_equal(
            written.read(f"{name}.weight"), model.get_submodule(name).weight.detach().numpy()
        )
        assert same == (name in left)


def test_experts_in_one_tensor_are_reported() -> None:
    edits = strati.quantise(bits=4)
    measured = strati.study(
        model_of("mixtral"), data=DATA, performance="loss", interventions=edits, spectral=False
    )
    assert [w["code"] for w in measured.warnings] == ["stacked-experts"]
