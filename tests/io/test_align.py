"""Conversions between orders of storage: exact inverses, llama.cpp's order, and no conversion without need."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import strati
from strati.io.align import align, by_head_rows, interleaved_rows


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows in llama.cpp's order."""
    return weight[interleaved_rows(len(weight), heads)]


def separated(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows in transformers' order."""
    return weight[np.argsort(interleaved_rows(len(weight), heads))]


@settings(max_examples=40, deadline=None)
@given(heads=st.integers(1, 6), half=st.integers(1, 8), columns=st.integers(1, 5))
def test_rope_orders_are_inverse(heads: int, half: int, columns: int) -> None:
    weight = draw(heads * half * 2, columns)
    np.testing.assert_array_equal(separated(interleaved(weight, heads), heads), weight)
    np.testing.assert_array_equal(interleaved(separated(weight, heads), heads), weight)


def test_rope_order_is_transformers_own() -> None:
    """The oracle is the reverse permutation of transformers' GGUF loader."""
    loader = pytest.importorskip("transformers.modeling_gguf_pytorch_utils")
    heads, weight = 4, draw(32, 6)
    stored = interleaved(weight, heads)
    processor = loader.LlamaTensorProcessor(
        config={"num_attention_heads": heads, "num_key_value_heads": heads}
    )
    np.testing.assert_array_equal(processor._reverse_permute_weights(stored, heads, heads), weight)


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("role", ["attention.q", "attention.k"])
@pytest.mark.parametrize("known", [True, False])
def test_rope_is_undone_where_the_permuted_version_agrees(noise: float, role: str, known: bool) -> None:
    heads, weight = 4, draw(64, 48)
    changed = interleaved(weight + noise * draw(64, 48, seed=1), heads)
    found = align(weight, changed, role, [16] if known else [])
    assert found is not None
    assert found.how == "rope-permutation"
    np.testing.assert_array_equal(found.second, separated(changed, heads))
    back = align(changed, weight, role, [16] if known else [])
    assert back is not None
    assert back.how == "rope-permutation"


@pytest.mark.parametrize("role", ["attention.q", "attention.v", "mlp.in"])
def test_nothing_is_undone_without_need(role: str) -> None:
    weight = draw(64, 64)
    for other in (weight, weight + np.float32(0.3) * draw(64, 64, seed=1), draw(64, 64, seed=2)):
        found = align(weight, other, role)
        assert found is not None
        assert found.how is None
        assert found.second is other
    found = align(weight, interleaved(weight, 4), "attention.v")
    assert found is not None
    assert found.how is None  # values are never permuted


def test_transposed_by_shape_and_by_agreement() -> None:
    wide, square = draw(12, 30), draw(20, 20)
    for weight in (wide, square):
        found = align(weight, weight.T.copy(), "mlp.in")
        assert found is not None
        assert found.how == "transposed"
        np.testing.assert_array_equal(found.second, weight)


def test_fused_rows_head_by_head() -> None:
    stacked = draw(3 * 4 * 8, 10)
    found = align(stacked, stacked[by_head_rows(96, 4)], "attention.qkv", [8])
    assert found is not None
    assert found.how == "qkv-order"
    np.testing.assert_array_equal(found.second, stacked)


def test_resized_vocabularies_share_rows() -> None:
    table = draw(40, 8)
    longer = np.concatenate([table + np.float32(0.01), draw(3, 8, seed=1)])
    for first, second, which in ((table, longer, 1), (longer, table, 0)):
        found = align(first, second, "embedding")
        assert found is not None
        assert (found.how, found.extra) == ("shared-rows", (which, 40, 42))
        assert found.first.shape == found.second.shape == (40, 8)
    assert align(table, draw(43, 8, seed=2), "embedding") is None  # another tokenizer: rows do not correspond
    assert align(table, longer, "mlp.in") is None
    assert align(table, draw(40, 9), "embedding") is None


WIDTH, HEADS, GROUPS, HIDDEN, WORDS, BLOCKS = 32, 4, 2, 64, 60, 2


def llama(path: Path, *, dtype: str = "float32", tied: bool = False, seed: int = 0) -> Path:
    """A random Llama as transformers saves it."""
    import torch
    import transformers

    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=HIDDEN,
        num_hidden_layers=BLOCKS,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        vocab_size=WORDS,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
    )
    transformers.LlamaForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(path)
    return path


def as_gguf(source: Path, target: Path, *, kind: str = "F32") -> Path:
    """The checkpoint as llama.cpp's converter writes it: its names, and the rows of q and k interleaved."""
    import gguf

    network = strati.open(source)
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_block_count(BLOCKS)
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(GROUPS)
    names = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for tensor in network.tensors:
        values = np.asarray(network.read(tensor.name), np.float32)
        module = tensor.name.removesuffix(".weight")
        if module in whole:
            name = whole[module]
        else:
            _, _, block, rest = module.split(".", 3)
            name = f"blk.{block}.{names[rest]}"
            if rest.endswith(("q_proj", "k_proj")):
                values = interleaved(values, HEADS if rest.endswith("q_proj") else GROUPS)
        if kind != "F32" and values.ndim == 2:
            coded = getattr(gguf.GGMLQuantizationType, kind)
            writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, coded), raw_dtype=coded)
        else:
            writer.add_tensor(f"{name}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_and_its_gguf_are_the_same(tmp_path: Path) -> None:
    base = llama(tmp_path / "hf")
    result = strati.compare(base, as_gguf(base, tmp_path / "a.gguf"))
    assert len(result.layers) == 7 * BLOCKS + 2
    assert not result.unmatched
    for layer in result.layers:
        assert layer.update_kind == "untouched", layer.name
        turned = layer.role in ("attention.q", "attention.k")
        assert layer.aligned == ("rope-permutation" if turned else None)
    by_name = {layer.name: layer.partner[0] for layer in result.layers}
    assert by_name["model.layers.1.self_attn.k_proj.weight"] == "blk.1.attn_k.weight"


@pytest.mark.filterwarnings("ignore")
def test_a_quantised_gguf_is_its_checkpoint_up_to_rounding(tmp_path: Path) -> None:
    base = llama(tmp_path / "hf")
    result = strati.compare(base, as_gguf(base, tmp_path / "a.gguf", kind="Q8_0"))
    for layer in result.layers:
        assert layer.relative_change < 0.01
        assert layer.update_kind == "rounding", (layer.name, layer.update_rank)


@pytest.mark.filterwarnings("ignore")
def test_a_tied_head_stands_for_a_stored_one(tmp_path: Path) -> None:
    stored, tied = llama(tmp_path / "stored"), llama(tmp_path / "tied", tied=True)
    result = strati.compare(stored, tied)
    head = next(layer for layer in result.layers if layer.role == "head")
    assert head.partner == ("model.embed_tokens.weight",)
    assert head.aligned == "tied-head"
    assert not result.unmatched


def split_and_fused(tmp_path: Path) -> tuple[Path, Path]:
    import json

    from safetensors.numpy import save_file

    rng = np.random.default_rng(0)
    split, fused = {}, {}
    for block in range(2):
        place = f"model.layers.{block}"
        q, k, v = (rng.standard_normal(s).astype(np.float32) for s in ((32, 32), (16, 32), (16, 32)))
        gate, up = (rng.standard_normal((48, 32)).astype(np.float32) for _ in range(2))
        down = rng.standard_normal((32, 48)).astype(np.float32)
        split |= {f"{place}.self_attn.{n}_proj.weight": w for n, w in (("q", q), ("k", k), ("v", v))}
        split |= {f"{place}.mlp.gate_proj.weight": gate, f"{place}.mlp.up_proj.weight": up}
        fused[f"{place}.self_attn.qkv_proj.weight"] = np.concatenate([q, k, v])
        fused[f"{place}.mlp.gate_up_proj.weight"] = np.concatenate([gate, up])
        for tensors in (split, fused):
            tensors[f"{place}.mlp.down_proj.weight"] = down
    folders = []
    for name, tensors in (("split", split), ("fused", fused)):
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
        (tmp_path / name / "config.json").write_text(
            json.dumps({"num_attention_heads": 4, "num_key_value_heads": 2})
        )
        folders.append(tmp_path / name)
    return folders[0], folders[1]


@pytest.mark.parametrize("turned", [False, True])
def test_fused_matrices_are_compared_part_by_part(tmp_path: Path, turned: bool) -> None:
    split, fused = split_and_fused(tmp_path)
    result = strati.compare(fused, split) if turned else strati.compare(split, fused)
    assert len(result.layers) == 12
    assert {layer.update_kind for layer in result.layers} == {"untouched"}
    names = {(x.partner[0], x.name) if turned else (x.name, x.partner[0]) for x in result.layers}
    assert ("model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.gate_up_proj.weight[up]") in names
    assert ("model.layers.0.self_attn.k_proj.weight", "model.layers.0.self_attn.qkv_proj.weight[k]") in names


@pytest.mark.parametrize("turned", [False, True])
def test_fused_matrices_without_settings_are_cut_as_the_other_network_is(
    tmp_path: Path, turned: bool
) -> None:
    folders = split_and_fused(tmp_path)
    for folder in folders:
        (folder / "config.json").unlink()
    result = strati.compare(*(folders[::-1] if turned else folders))
    assert len(result.layers) == 12 and not result.unmatched
    assert {layer.update_kind for layer in result.layers} == {"untouched"}


@pytest.mark.parametrize("known", [True, False])
def test_fused_head_by_head_against_split(known: bool) -> None:
    """GPT-NeoX's order, told by the weights; without the number of heads the parts do not agree, and that shows."""
    rng = np.random.default_rng(1)
    parts = rng.standard_normal((3, 24, 24)).astype(np.float32)
    fused = np.concatenate(parts)[by_head_rows(72, heads=4)]
    names = ("q_proj", "k_proj", "v_proj")
    split = {f"layers.0.attention.{n}.weight": part for n, part in zip(names, parts, strict=True)}
    network = strati.open(split)
    if known:
        network.config = {"num_attention_heads": 4}
    result = strati.compare(network, {"layers.0.attention.query_key_value.weight": fused})
    kinds = {layer.role: layer.update_kind for layer in result.layers}
    assert set(kinds) == {"attention.q", "attention.k", "attention.v"}
    assert set(kinds.values()) == {"untouched" if known else "dense"}


def test_experts_stacked_and_apart() -> None:
    rng = np.random.default_rng(0)
    stacked = {
        "model.layers.0.mlp.experts.gate_up_proj": rng.standard_normal((3, 24, 8)).astype(np.float32),
        "model.layers.0.mlp.experts.down_proj": rng.standard_normal((3, 8, 12)).astype(np.float32),
        "model.layers.0.mlp.gate.weight": rng.standard_normal((3, 8)).astype(np.float32),
    }
    apart = {"model.layers.0.mlp.gate.weight": stacked["model.layers.0.mlp.gate.weight"]}
    for i in range(3):
        both = stacked["model.layers.0.mlp.experts.gate_up_proj"][i]
        apart[f"model.layers.0.mlp.experts.{i}.gate_proj.weight"] = both[:12]
        apart[f"model.layers.0.mlp.experts.{i}.up_proj.weight"] = both[12:]
        apart[f"model.layers.0.mlp.experts.{i}.down_proj.weight"] = stacked[
            "model.layers.0.mlp.experts.down_proj"
        ][i]
    result = strati.compare(apart, stacked)
    assert len(result.layers) == 10
    assert {layer.update_kind for layer in result.layers} == {"untouched"}
    partner = {layer.name: layer.partner[0] for layer in result.layers}
    assert (
        partner["model.layers.0.mlp.experts.2.up_proj.weight"]
        == "model.layers.0.mlp.experts.gate_up_proj[2][up]"
    )


def test_conv1d_prefixes_and_dtypes() -> None:
    import ml_dtypes

    rng = np.random.default_rng(0)
    conv1d = {
        "transformer.h.0.attn.c_attn.weight": rng.standard_normal((16, 48)).astype(np.float32),
        "transformer.h.0.attn.c_proj.weight": rng.standard_normal((16, 16)).astype(np.float32),
        "transformer.h.0.mlp.c_fc.weight": rng.standard_normal((16, 64)).astype(np.float32),
    }
    linear = {f"module.{n}": w.T.astype(ml_dtypes.bfloat16) for n, w in conv1d.items()}
    result = strati.compare(conv1d, linear)
    assert len(result.layers) == 3
    for layer in result.layers:
        assert layer.update_kind == "rounding"
        assert layer.relative_change < 0.004
    assert "same up to rounding" in result.text()


def test_new_rows_of_a_vocabulary_are_named() -> None:
    table, body = draw(50, 8), draw(8, 8)
    old = {"model.embed_tokens.weight": table, "model.layers.0.mlp.up_proj.weight": body}
    new = old | {"model.embed_tokens.weight": np.concatenate([table, draw(4, 8, seed=1)])}
    result = strati.compare(old, new)
    layer = next(x for x in result.layers if x.role == "embedding")
    assert (layer.aligned, layer.update_kind) == ("shared-rows", "untouched")
    assert any("rows 50 to 53" in flag.text for flag in layer.warnings if flag.code == "vocabulary-resized")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_rounding_errors_are_as_large_as_the_step_predicts(tmp_path: Path, kind: str) -> None:
    base = llama(tmp_path / "hf")
    result = strati.compare(base, as_gguf(base, tmp_path / "a.gguf", kind=kind))
    ratios = [layer.rounding.ratio for layer in result.layers]
    assert 0.75 < np.median(ratios) < 1.1, ratios
    assert not any(flag.code == "rounded-worse" for layer in result.layers for flag in layer.warnings)


@pytest.mark.filterwarnings("ignore")
def test_a_layer_rounded_worse_than_its_step_allows_is_named(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    base = llama(tmp_path / "hf")
    coded = as_gguf(base, tmp_path / "a.gguf", kind="Q8_0")
    tensors = load_file(base / "model.safetensors")
    bad = "model.layers.1.mlp.up_proj.weight"
    tensors[bad] = tensors[bad] * np.float32(1.1)  # the code was made for other weights
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    result = strati.compare(base, coded)
    worse = [x.name for x in result.layers if any(flag.code == "rounded-worse" for flag in x.warnings)]
    assert worse == [bad]
    assert f"Rounded worse than predicted: {bad}" in result.text()


def gpt_oss(folder: Path, *, packed: bool) -> Path:
    """A random gpt-oss as transformers saves it, its experts plain or, with the values they then have, in MXFP4."""
    import json

    import torch
    import transformers
    from safetensors.torch import load_file, save_file

    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=3,
        num_experts_per_tok=2,
        vocab_size=60,
    )
    model = transformers.GptOssForCausalLM(config)
    mxfp4 = transformers.integrations.mxfp4
    coded = {}
    with torch.no_grad():
        for number, layer in enumerate(model.model.layers):
            for name in ("gate_up_proj", "down_proj"):
                weight = getattr(layer.mlp.experts, name)
                blocks = torch.randint(
                    0, 256, (3, weight.shape[2], weight.shape[1] // 32, 16), dtype=torch.uint8
                )
                scales = torch.randint(118, 124, blocks.shape[:3], dtype=torch.uint8)
                weight.copy_(mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
                place = f"model.layers.{number}.mlp.experts.{name}"
                coded |= {f"{place}_blocks": blocks, f"{place}_scales": scales}
    model.save_pretrained(folder)
    if packed:
        kept = load_file(folder / "model.safetensors")
        plain = {n: w for n, w in kept.items() if not n.endswith(("gate_up_proj", "experts.down_proj"))}
        save_file(plain | coded, folder / "model.safetensors", metadata={"format": "pt"})
        told = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(
            json.dumps(told | {"quantization_config": {"quant_method": "mxfp4"}})
        )
    return folder


def gates_of_gpt_oss(model: Path) -> dict[str, np.ndarray]:
    """Gate, input and output map of every expert, told apart by what transformers' module computes of them.

    It returns ``(up + 1) glu(gate)``: a unit vector gives something else than 0 exactly where it meets the gate.
    """
    import torch
    import transformers

    found = {}
    network = transformers.GptOssForCausalLM.from_pretrained(model)
    for number, layer in enumerate(network.model.layers):
        experts = layer.mlp.experts
        gate = (experts._apply_gate(torch.eye(64)) != 0).any(dim=1).numpy()
        for expert in range(3):
            place = f"model.layers.{number}.mlp.experts.{expert}"
            both = experts.gate_up_proj[expert].detach().numpy().T
            found[f"{place}.gate_proj.weight"] = both[gate]
            found[f"{place}.up_proj.weight"] = both[~gate]
            found[f"{place}.down_proj.weight"] = experts.down_proj[expert].detach().numpy().T
    return {name: np.ascontiguousarray(weight) for name, weight in found.items()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("configured", [True, False])
def test_gates_of_gpt_oss_stand_in_turn(tmp_path: Path, packed: bool, configured: bool) -> None:
    """Even rows are the gate, odd rows the input map, in plain experts (stored inputs first) and in MXFP4."""
    apart = gates_of_gpt_oss(gpt_oss(tmp_path / "plain", packed=False))
    folder = gpt_oss(tmp_path / "packed", packed=True) if packed else tmp_path / "plain"
    if not configured and not packed:
        (folder / "config.json").unlink()
    result = strati.compare(apart, folder)
    found = {layer.name: layer for layer in result.layers}
    assert set(apart) <= set(found)
    for name in apart:
        assert found[name].relative_change == 0, name
        assert found[name].aligned is None, name
    place = "model.layers.1.mlp.experts"
    assert found[f"{place}.2.up_proj.weight"].partner == (f"{place}.gate_up_proj[2][up]",)


@pytest.mark.filterwarnings("ignore")
def test_fused_experts_stored_inputs_first_are_seen_outputs_first(tmp_path: Path) -> None:
    layers = {layer.name: layer for layer in strati.open(gpt_oss(tmp_path, packed=False)).layers()}
    place = "model.layers.0.mlp.experts"
    assert layers[f"{place}.gate_up_proj[1]"].shape == (64, 64)
    assert layers[f"{place}.down_proj[1]"].shape == (64, 32)
    assert "transposed" in layers[f"{place}.gate_up_proj[1]"].view
