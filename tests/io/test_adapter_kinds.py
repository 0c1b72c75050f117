"""Adapters beyond the plain folder: of parameters, several in one model, of other kinds, resized, hostile, resumed."""

from __future__ import annotations

import copy
import json
import pickle
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from tests.io.test_adapters import CASES, llama, trained
from torch import nn

import strati
from strati.io.adapters.merge import merged, unwrapped
from strati.io.adapters.recognise import PatternTable, matches

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")


def values(model: nn.Module) -> dict[str, np.ndarray]:
    return {name: value.detach().numpy() for name, value in model.state_dict().items()}


def assert_same(network: strati.Network, expected: dict[str, np.ndarray]) -> None:
    for tensor in network.tensors:
        np.testing.assert_allclose(network.read(tensor.name), expected[tensor.name], rtol=1e-4, atol=1e-6)


# LoRA of parameters: experts fused in one tensor


def qwen() -> nn.Module:
    """Experts stored outputs first in memory, one by one on disk."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=48,
            hidden_size=32,
            intermediate_size=48,
            moe_intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            num_experts=4,
            num_experts_per_tok=2,
        )
    )


def gpt_oss() -> nn.Module:
    """Experts stored inputs first; the map out of them is square, as in the real network."""
    from transformers import GptOssConfig, GptOssForCausalLM

    torch.manual_seed(0)
    return GptOssForCausalLM(
        GptOssConfig(
            vocab_size=48,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            num_local_experts=4,
            num_experts_per_tok=2,
        )
    )


BOTH = {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}


@pytest.mark.parametrize("make", [qwen, gpt_oss])
@pytest.mark.parametrize(
    "options",
    [
        {"r": 2, "lora_alpha": 6} | BOTH,
        {"r": 2, "rank_pattern": {"experts.down_proj": 3}, "alpha_pattern": {"experts.gate_up_proj": 9}}
        | BOTH,
        {"r": 3, "target_modules": [], "target_parameters": ["mlp.experts.down_proj"]},
    ],
)
def test_updates_of_fused_experts(tmp_path: Path, make: Any, options: dict[str, Any]) -> None:
    make().save_pretrained(tmp_path / "base")
    wrapped = trained(make(), **options)
    wrapped.save_pretrained(tmp_path / "adapter")
    adapter = strati.open(tmp_path / "adapter")
    stem = "model.layers.0.mlp.experts.down_proj"
    experts = [layer for layer in adapter.layers() if layer.tensor.startswith(stem)]
    assert [(x.name, x.expert, str(x.role)) for x in experts] == [
        (f"{stem}[{i}]", i, "mlp.out") for i in range(4)
    ]
    whole = merged(strati.open(make()), adapter)
    assert_same(unwrapped(strati.open(wrapped)), after := values(copy.deepcopy(wrapped).merge_and_unload()))
    assert_same(whole, after)
    together = make()
    together.load_state_dict({name: torch.from_numpy(value) for name, value in after.items()})
    together.save_pretrained(tmp_path / "merged")
    # On disk the experts of one network are apart: the file that PEFT's merge would give is the same.
    found = strati.compare(tmp_path / "merged", merged(strati.open(tmp_path / "base"), adapter))
    assert not found.unmatched
    assert max(layer.relative_change for layer in found.layers) < 1e-6
    moved = strati.compare(tmp_path / "base", tmp_path / "adapter")
    rank = options.get("rank_pattern", {}).get("experts.down_proj", options["r"])
    outs = [layer for layer in moved.layers if layer.role == "mlp.out"]
    assert {(layer.update_kind, layer.update_rank) for layer in outs} == {("low-rank", rank)}


# several adapters, other kinds


def two(active: str | list[str]) -> Any:
    model = trained(llama(), r=3, lora_alpha=6, target_modules=["q_proj", "v_proj"])
    model.add_adapter(
        "other", peft.LoraConfig(r=2, lora_alpha=20, use_rslora=True, target_modules=["q_proj"])
    )
    torch.manual_seed(5)
    for name, parameter in model.named_parameters():
        if "lora_B.other" in name:
            nn.init.normal_(parameter, std=0.05)
    model.base_model.set_adapter(active)
    return model


@pytest.mark.parametrize("active", ["default", "other", ["default", "other"]])
def test_a_model_computes_with_its_active_adapters(active: Any) -> None:
    model = two(active)
    scales = {x.name: x.adapter.scale for x in strati.open(model).layers() if x.adapter is not None}
    stem = "model.layers.0.self_attn.q_proj.weight"
    assert scales[f"{stem}[default]"] == 2.0
    assert scales[f"{stem}[other]"] == pytest.approx(20 / 2**0.5)
    names = [active] if isinstance(active, str) else active
    expected = copy.deepcopy(model).merge_and_unload(adapter_names=names)
    assert_same(unwrapped(strati.open(model)), values(expected))


def test_what_is_merged_or_disabled_is_not_added_again() -> None:
    model = two("other")
    expected = values(copy.deepcopy(model).merge_and_unload())
    model.merge_adapter()
    assert_same(unwrapped(strati.open(model)), expected)
    model.unmerge_adapter()
    model.base_model.disable_adapter_layers()
    assert_same(unwrapped(strati.open(model)), values(llama()))


def test_which_of_several_adapters_counts_must_be_known() -> None:
    with pytest.raises(strati.StratiError, match="holds 2 adapters, and which are active is not known"):
        strati.compare(llama(), two("other").state_dict())


def test_adapters_of_other_kinds_in_memory_are_said() -> None:
    model = peft.get_peft_model(llama(), peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[]))
    (flag,) = strati.open(model).warnings
    assert flag.code == "adapter-not-read"
    assert "IA3" in flag.text


def test_an_initialisation_that_changes_the_base_is_said(tmp_path: Path) -> None:
    options = {"r": 2, "target_modules": ["q_proj"], "init_lora_weights": "pissa"}
    peft.get_peft_model(llama(), peft.LoraConfig(**options)).save_pretrained(tmp_path / "adapter")
    assert [flag.code for flag in strati.open(tmp_path / "adapter").warnings] == ["adapter-changed-base"]
    found = strati.compare(llama(), tmp_path / "adapter")
    assert "adapter-changed-base" in [flag.code for flag in found.warnings]


def test_a_saved_embedding_of_another_size(tmp_path: Path) -> None:
    base = llama()
    model = llama()
    model.resize_token_embeddings(70, mean_resizing=False)
    wrapped = trained(model, r=2, target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"])
    wrapped.save_pretrained(tmp_path)
    both = merged(strati.open(base), strati.open(tmp_path))
    assert both["model.embed_tokens.weight"].shape == (70, 32)
    assert_same(both, values(wrapped.merge_and_unload()))
    found = strati.compare(base, tmp_path)
    table = next(layer for layer in found.layers if layer.role == "embedding")
    assert (table.aligned, table.update_kind) == ("shared-rows", "untouched")
    assert "only network 1 has rows 64 to 69 (6 tokens)" in table.warnings[-1].text


def test_the_order_of_base_and_adapter_does_not_matter(tmp_path: Path) -> None:
    trained(llama(), r=2, target_modules=["q_proj"]).save_pretrained(tmp_path)
    found = strati.compare(tmp_path, llama())
    kinds = {layer.role: (layer.update_kind, layer.update_rank) for layer in found.layers}
    assert kinds["attention.q"] == ("low-rank", 2)
    assert kinds["attention.k"] == ("untouched", 0)


# two adapters are compared by their factors


@pytest.mark.parametrize("ranks", [(3, 5), (4, 4), (1, 12)])
def test_updates_are_compared_by_their_factors_as_by_their_products(
    tmp_path: Path, ranks: tuple[int, int]
) -> None:
    networks = []
    for n, rank in enumerate(ranks):
        options = {"r": rank, "lora_alpha": 7, "use_rslora": bool(n), "target_modules": ["q_proj"]}
        networks.append(trained(llama(), seed=n, **options))
        networks[n].save_pretrained(tmp_path / str(n))
    found = strati.compare(tmp_path / "0", tmp_path / "1", eigenvalues=True)
    for layer in found.layers:
        module = layer.name.removesuffix(".weight")
        a, b = (
            net.base_model.model.get_submodule(module).get_delta_weight("default").detach().double().numpy()
            for net in networks
        )
        assert layer.relative_change == pytest.approx(np.linalg.norm(b - a) / np.linalg.norm(a), rel=1e-5)
        singular = np.linalg.svd(b - a, compute_uv=False)
        assert layer.update_stable_rank == pytest.approx(
            np.square(singular).sum() / singular[0] ** 2, rel=1e-5
        )
        rank = int((singular > 1e-5 * singular[0]).sum())  # fewer than both have where they share their A
        assert (layer.update_rank, layer.update_kind) == (rank, "low-rank")
        cosine = (a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b)
        assert layer.interference.cosine == pytest.approx(cosine, abs=1e-5)
        bases = [np.linalg.svd(m)[0][:, :rank] for m, rank in zip((a, b), ranks, strict=True)]
        overlap = np.square(bases[0].T @ bases[1]).sum() / min(ranks)
        assert layer.interference.written_overlap == pytest.approx(overlap, abs=1e-5)
        assert layer.interference.by_chance == pytest.approx(max(ranks) / 32)


def test_huge_updates_out_of_small_files_are_never_formed(tmp_path: Path) -> None:
    """A product of 3.6 TiB out of 8 MB."""
    for n in range(2):
        (tmp_path / str(n)).mkdir()
        factors = {
            "fc.lora_A.weight": torch.ones(1, 1_000_000),
            "fc.lora_B.weight": torch.full((1_000_000, 1), n + 1.0),
        }
        save_file(factors, tmp_path / str(n) / "adapter_model.safetensors")
        (tmp_path / str(n) / "adapter_config.json").write_text('{"peft_type": "LORA", "lora_alpha": 1}')
    (layer,) = strati.compare(tmp_path / "0", tmp_path / "1").layers
    assert layer.relative_change == pytest.approx(1)
    assert layer.interference.cosine == pytest.approx(1)


# hostile settings and factors


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            ["a", "b", ".", r"\.", "(a|b)", "[ab]", "a*", "b+", "(ab)?", ".*", r"\d", "a{2}", "b{1,3}"]
        )
        | st.sampled_from(["(a*b)*", "^", "$", "[^a]", "(?:a|bb)+"]),
        max_size=5,
    ),
    st.text("ab.1", max_size=9),
)
def test_patterns_match_what_peft_matches(parts: list[str], name: str) -> None:
    pattern = "".join(parts)
    try:
        expected = re.match(rf"(.*\.)?({pattern})$", name) is not None
    except re.error:
        return
    assert matches(pattern, name) == expected


@pytest.mark.parametrize(
    "pattern",
    [
        *("(a+)+[bx]", "((a*)*)*[bx]", "(.*)*(.*)*[bx]", "(((a|aa)*b?)*)*[cx]", ".*" * 100 + "[bx]"),
        *("(?:(?:a|.)+)+" * 10 + "[bx]", "(?:(?:a{1,20}){1,20}){1,20}[bx]"),
        *(
            "x{4000000000}",
            "(?:x{999}){999}",
            "x{99}" * 40,
            "(?:x){e<=5}",
            r"\p{L}",
            "(?R)",
            "a" * 300,
            "(",
            "*",
        ),
    ],
)
def test_patterns_that_take_re_forever_do_not(pattern: str) -> None:
    """No match, or not understood, after a quarter of a second at most."""
    start = time.process_time()
    assert not matches(pattern, "bx" + "a" * 238)
    assert time.process_time() - start < 5


def test_a_table_with_a_slow_pattern_is_given_up_once() -> None:
    """Not once per module: an adapter may have thousands."""
    table = PatternTable({"(?:(?:a|.)+)+" * 10 + "[bx]": 3, "q_proj": 7})
    start = time.process_time()
    assert {table.value(f"bx{'a' * 200}{i}") for i in range(200)} == {None}
    assert time.process_time() - start < 20  # 50 s if each were tried
    assert not table.readable and table.value("q_proj") is None


@pytest.mark.parametrize(
    "settings",
    [
        '{"lora_alpha": NaN}',
        '{"lora_alpha": 1' + "0" * 400 + "}",
        '{"lora_alpha": "8"}',
        '{"lora_alpha": true}',
        '{"lora_alpha": 8, "alpha_pattern": {"(((": 3}}',
        '{"lora_alpha": 8, "alpha_pattern": {"q_proj": "x"}}',
        '{"lora_alpha": 8, "alpha_pattern": {"(?P<a>.*)*": 3}}',
    ],
)
def test_scales_that_make_no_sense_are_unknown(tmp_path: Path, settings: str) -> None:
    trained(llama(), r=2, target_modules=["q_proj"]).save_pretrained(tmp_path)
    (tmp_path / "adapter_config.json").write_text(settings)
    try:
        net = strati.open(tmp_path)
    except strati.BadInputError:
        return  # JSON has no NaN
    assert [flag.code for flag in net.warnings] == ["adapter-scale-unknown"]
    assert net.layers()[0].adapter.scale is None


@pytest.mark.parametrize(
    ("a", "b", "layers"),
    [
        (torch.full((2, 16), torch.nan), torch.ones(16, 2), 1),
        (torch.ones(2, 16, dtype=torch.int32), torch.ones(16, 2, dtype=torch.int32), 0),
        (torch.ones(2, 16), torch.ones(16, 3), 2),
        (torch.ones(0, 16), torch.ones(16, 0), 0),
        (torch.ones(40, 16), torch.ones(16, 40), 1),
    ],
)
def test_factors_that_make_no_update(tmp_path: Path, a: torch.Tensor, b: torch.Tensor, layers: int) -> None:
    save_file({"fc.lora_A.weight": a, "fc.lora_B.weight": b}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "lora_alpha": 4}')
    found = strati.scan(tmp_path).to_dict()["layers"]
    assert len(found) == layers
    if torch.isnan(a).any():
        assert found[0]["adapter"]["used_rank"] is None
        assert "not-finite" in [flag["code"] for flag in found[0]["warnings"]]


def test_dora_of_another_length_is_refused(tmp_path: Path) -> None:
    make, options = CASES["dora"]
    wrapped = trained(make(), **options)
    wrapped.save_pretrained(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    from safetensors.torch import load_file

    state = {k: v[:-1].clone() if "magnitude" in k else v for k, v in load_file(file).items()}
    save_file(state, file)
    with pytest.raises(strati.StratiError, match="a magnitude vector \\(DoRA\\) of another length"):
        strati.compare(make(), tmp_path)


def test_rows_of_tokens_must_fit_the_settings(tmp_path: Path) -> None:
    trained(llama(), r=2, target_modules=["q_proj"], trainable_token_indices=[3, 7]).save_pretrained(tmp_path)
    file = tmp_path / "adapter_config.json"
    for rows in ([3], [3, 64], [3, -1], "x", None):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"trainable_token_indices": rows}))
        with pytest.raises(strati.StratiError, match="does not fit trainable_token_indices"):
            strati.compare(llama(), tmp_path)


# resumed, and in other processes


def test_updates_travel_between_processes(tmp_path: Path) -> None:
    wrapped = trained(llama(), r=2, use_dora=True, target_modules=["q_proj"])
    wrapped.save_pretrained(tmp_path)
    for layer in strati.open(tmp_path).layers():
        again = pickle.loads(pickle.dumps(layer))
        np.testing.assert_array_equal(again.adapter.core(), layer.adapter.core())
    network = pickle.loads(pickle.dumps(strati.open(wrapped)))
    assert_same(unwrapped(network), values(wrapped.merge_and_unload()))


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_adapters_through_a_store(tmp_path: Path, workers: int) -> None:
    """The same results as without one; a scale that changed is another update, though no weight did."""
    llama().save_pretrained(tmp_path / "base")
    for n in (1, 2):
        trained(llama(), seed=n, r=2, target_modules=["q_proj"]).save_pretrained(tmp_path / str(n))
    pairs = [(tmp_path / "base", tmp_path / "1"), (tmp_path / "1", tmp_path / "2")]
    for changed in (False, True):
        if changed:
            file = tmp_path / "1" / "adapter_config.json"
            file.write_text(json.dumps(json.loads(file.read_text()) | {"lora_alpha": 80}))
        kept = strati.scan(tmp_path / "1", out=tmp_path / "scan", workers=workers)
        assert kept.to_json() == strati.scan(tmp_path / "1").to_json()
        for n, pair in enumerate(pairs):
            kept = strati.compare(*pair, out=tmp_path / f"compare{n}", workers=workers)
            assert kept.to_json() == strati.compare(*pair).to_json()
