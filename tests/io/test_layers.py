"""Views, ties, and that every tensor is either a layer or skipped with a reason."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from makers import is_mapped, safetensors_bytes

import strati


def network(tmp_path, tensors: dict[str, np.ndarray], config: dict | None = None):
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
        return strati.open(tmp_path)
    return strati.open(tmp_path / "model.safetensors")


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def test_kernels_pooled_and_flattened(tmp_path):
    kernel = draw(5, 3, 2, 4)
    net = network(tmp_path, {"conv.weight": kernel})
    (pooled,) = net.layers()
    assert (pooled.shape, pooled.count, pooled.parameters, pooled.role.value) == (
        (5, 3),
        8,
        kernel.size,
        "conv",
    )
    slices = list(pooled.matrices())
    for position, matrix in zip(np.ndindex(2, 4), slices, strict=True):
        np.testing.assert_array_equal(matrix, kernel[:, :, *position])
        assert np.shares_memory(matrix, net.read("conv.weight")) or is_mapped(matrix)
    (flat,) = net.layers(conv="flatten")
    assert flat.shape == (5, 24)
    np.testing.assert_array_equal(next(flat.matrices()), kernel.reshape(5, 24))


@pytest.mark.parametrize(
    ("name", "shape", "kind", "shapes"),
    [
        ("conv1.weight", (8, 4, 3), "conv", [(8, 4)]),
        ("conv3d.weight", (8, 4, 3, 3, 3), "conv", [(8, 4)]),
        ("pointwise.weight", (8, 4, 1, 1), "conv", [(8, 4)]),
        ("depthwise.weight", (8, 1, 3, 3), "conv", [(8, 9)]),
        ("mlp.experts.gate_up_proj", (4, 6, 5), "stack", [(6, 5)] * 4),
        ("blk.0.ffn_up_exps.weight", (2, 6, 5), "stack", [(6, 5)] * 2),
        ("w1", (6, 30, 20), "stack", [(30, 20)] * 6),
        ("something.weight", (12, 10, 3), "conv", [(12, 10)]),
        ("vit.pos_embed", (1, 17, 8), "embedding", [(17, 8)]),
        ("linear.weight", (7, 5), "linear", [(7, 5)]),
        ("row.weight", (1, 5), "linear", [(1, 5)]),
        ("one.weight", (1, 1), "linear", [(1, 1)]),
        ("anonymous", (1, 30, 20), "linear", [(30, 20)]),
        ("per_head", (2, 3, 80, 70), "stack", [(80, 70)] * 6),
        ("patch_embed.proj.weight", (8, 3, 16, 16), "conv", [(8, 3)]),
        ("blocks.0.experts.w", (2, 3, 5, 4), "stack", [(5, 4)] * 6),
    ],
)
def test_shapes(tmp_path, name, shape, kind, shapes):
    net = network(tmp_path, {name: draw(*shape)})
    layers = net.layers()
    assert [layer.shape for layer in layers] == shapes
    assert {layer.kind for layer in layers} == {kind}
    assert sum(layer.parameters for layer in layers) == np.prod(shape)
    for layer in layers:
        got = list(layer.matrices())
        assert len(got) == layer.count
        assert {m.shape for m in got} == {layer.shape}
        assert layer.view


def test_experts_one_by_one(tmp_path):
    stack = draw(3, 4, 5)
    net = network(tmp_path, {"layers.1.experts.down_proj": stack})
    for index, layer in enumerate(net.layers()):
        assert layer.name == f"layers.1.experts.down_proj[{index}]"
        assert layer.view == f"expert {index} of 3, stacked in one tensor"
        np.testing.assert_array_equal(next(layer.matrices()), stack[index])


@pytest.mark.parametrize(("gates", "kind"), [(4, "lstm"), (3, "gru"), (1, "rnn")])
def test_recurrent(tmp_path, gates, kind):
    net = network(tmp_path, {"r.weight_ih_l0": draw(gates * 6, 5), "r.weight_hh_l0": draw(gates * 6, 6)})
    assert {layer.kind for layer in net.layers()} == {kind}


def test_skipped_with_reasons(tmp_path):
    tensors = {
        "bias": draw(4),
        "scalar": np.float32(3).reshape(()),
        "empty": np.zeros((0, 4), np.float32),
        "mask": np.ones((3, 3), bool),
        "ids": np.arange(9).reshape(3, 3),
        "cls_token": draw(1, 1, 8),
        "w.weight": draw(3, 3),
    }
    net = network(tmp_path, tensors)
    reasons = {s.name: s.reason for s in net.skipped()}
    assert set(reasons) == set(tensors) - {"w.weight"}
    assert "int64" in reasons["ids"]
    assert "one dimension" in reasons["cls_token"]


@settings(max_examples=40, deadline=None)
@given(
    st.dictionaries(
        st.text(min_size=1, max_size=20),
        st.lists(st.integers(0, 4), max_size=6).map(tuple),
        min_size=1,
        max_size=5,
    ),
    st.booleans(),
    st.sampled_from(["pool", "flatten"]),
)
def test_nothing_is_left_out(tmp_path_factory, shapes, split, conv):
    tensors = {n: np.zeros(s, np.float32) for n, s in shapes.items() if n != "__metadata__"}
    if not tensors:
        return
    net = network(
        tmp_path_factory.mktemp("n"), {n.encode("utf-8", "replace").decode(): a for n, a in tensors.items()}
    )
    layers = net.layers(split_qkv=split, conv=conv)
    skipped = net.skipped(split_qkv=split, conv=conv)
    assert {x.tensor for x in layers} | {s.name for s in skipped} == {t.name for t in net.tensors}
    assert not {x.tensor for x in layers} & {s.name for s in skipped}
    names = [layer.name for layer in layers]
    assert len(set(names)) == len(names)
    for layer in layers:
        assert all(m.shape == layer.shape for m in layer.matrices())


def test_tied_embeddings_stored_twice_count_once(tmp_path):
    table = draw(20, 6)
    other = table.copy()
    other[19, 5] += 1
    net = network(
        tmp_path, {"lm_head.weight": table, "model.embed_tokens.weight": table, "emb.weight": other}
    )
    assert net.ties == {"lm_head.weight": "model.embed_tokens.weight"}
    assert net.parameters == 2 * table.size
    assert "tied to model.embed_tokens.weight" in {s.name: s.reason for s in net.skipped()}["lm_head.weight"]
    zeros = np.zeros((5, 4), np.float32)
    assert network(tmp_path, {"a_emb.weight": zeros, "b_emb.weight": zeros}).ties == {}


def test_tied_storages_of_torch_prefer_the_embedding(tmp_path):
    import torch

    table = torch.ones(9, 4)
    torch.save({"lm_head.weight": table, "wte.weight": table, "copy.weight": table}, tmp_path / "a.pt")
    net = strati.open(tmp_path / "a.pt")
    assert net.ties == {"lm_head.weight": "wte.weight", "copy.weight": "wte.weight"}
    assert net.parameters == 36


def test_gpt2_is_turned_and_nanogpt_is_not(tmp_path):
    stored = {
        "h.0.attn.c_attn.weight": draw(8, 24),
        "h.0.attn.c_proj.weight": draw(8, 8),
        "h.0.mlp.c_fc.weight": draw(8, 32),
    }
    net = network(tmp_path, stored)
    assert {layer.name: layer.shape for layer in net.layers()} == {
        "h.0.attn.c_attn.weight": (24, 8),
        "h.0.attn.c_proj.weight": (8, 8),
        "h.0.mlp.c_fc.weight": (32, 8),
    }
    assert all("transposed" in layer.view for layer in net.layers())
    net = network(tmp_path, {name: array.T.copy() for name, array in stored.items()})
    assert {layer.view for layer in net.layers()} == {"as stored"}


def test_grouped_query_attention_is_split_by_the_config(tmp_path):
    fused = draw(8 + 4 + 4, 8)
    config = {"num_attention_heads": 4, "num_key_value_heads": 2}
    net = network(tmp_path, {"model.layers.0.self_attn.qkv_proj.weight": fused}, config)
    q, k, v = net.layers(split_qkv=True)
    assert [layer.shape for layer in (q, k, v)] == [(8, 8), (4, 8), (4, 8)]
    np.testing.assert_array_equal(next(v.matrices()), fused[12:])
    assert sum(layer.parameters for layer in (q, k, v)) == fused.size


def test_in_proj_of_torch_is_split_by_rows(tmp_path):
    fused = draw(12, 4)
    net = network(tmp_path, {"enc.layers.0.self_attn.in_proj_weight": fused})
    assert [layer.role.value for layer in net.layers()] == ["attention.qkv"]
    parts = net.layers(split_qkv=True)
    for index, layer in enumerate(parts):
        np.testing.assert_array_equal(next(layer.matrices()), fused[4 * index : 4 * index + 4])


def test_what_cannot_be_split_stays_whole(tmp_path):
    """Without settings, 24 rows of 16 columns may be 16 queries and 4 keys and values: thirds would be a guess."""
    tensors = {
        "h.0.attn.query_key_value.weight": draw(12, 4),
        "h.1.attn.qkv.weight": draw(13, 4),
        "h.2.attn.qkv_proj.weight": draw(24, 16),
    }
    layers = network(tmp_path, tensors).layers(split_qkv=True)
    assert ["not split" in layer.view for layer in layers] == [True, True, True]


def test_multi_query_attention(tmp_path):
    fused = draw(8 + 2 + 2, 8)  # four heads of two, one key and one value; a third of its rows would be wrong
    config = {"n_head": 4, "multi_query": True}
    net = network(tmp_path, {"transformer.h.0.attn.c_attn.weight": fused}, config)
    assert [layer.shape for layer in net.layers(split_qkv=True)] == [(8, 8), (2, 8), (2, 8)]


def test_the_classifier_of_a_convolutional_network_is_its_head(tmp_path):
    base = {"features.0.weight": draw(4, 3, 3, 3)}
    net = network(tmp_path, base | {"classifier.1.weight": draw(10, 8), "classifier.4.weight": draw(5, 10)})
    assert [layer.role.value for layer in net.layers()] == ["conv", "linear", "head"]
    assert [
        x.role.value for x in network(tmp_path, {"fc1.weight": draw(4, 4), "fc2.weight": draw(2, 4)}).layers()
    ] == [
        "linear",
        "linear",
    ]


def test_gpt2s_causal_masks_are_no_weights(tmp_path):
    """The hub's own GPT-2 file carries them as float32: ``h.0.attn.bias`` of shape (1, 1, 1024, 1024)."""
    tensors = {
        "h.0.attn.bias": np.tril(np.ones((1, 1, 16, 16), np.float32)),
        "h.0.attn.c_attn.weight": draw(8, 24),
    }
    net = network(tmp_path, tensors)
    assert [layer.name for layer in net.layers()] == ["h.0.attn.c_attn.weight"]
    assert {s.name: s.reason for s in net.skipped()} == {"h.0.attn.bias": "a mask, not a weight"}
    assert net.parameters == 8 * 24


def test_layers_of_a_file_without_order_come_as_the_data_flow(tmp_path):
    parts = ("attn.out_proj", "attn.q_proj", "mlp.down_proj", "mlp.up_proj", "attn.v_proj", "attn.k_proj")
    tensors = {f"layers.{i}.{part}.weight": draw(6, 6) for i in (10, 2) for part in parts}
    net = network(tmp_path, tensors | {"wte.weight": draw(9, 6), "lm_head.weight": draw(12, 6)})
    roles = [layer.role.value for layer in net.layers()]
    block = ["attention.q", "attention.k", "attention.v", "attention.out", "mlp.in", "mlp.out"]
    assert roles == ["embedding", *block, *block, "head"]
    assert [layer.block for layer in net.layers()][1:13] == [2] * 6 + [10] * 6


HEADS, WIDTH, HEAD, HIDDEN, WORDS = 3, 12, 5, 40, 50


def transformer_lens(gated: bool = False, groups: int = HEADS) -> dict[str, np.ndarray]:
    """One block as TransformerLens saves it; key and value heads may be fewer."""
    few = "" if groups == HEADS else "_"
    tensors = {
        "embed.W_E": draw(WORDS, WIDTH),
        "pos_embed.W_pos": draw(
            WIDTH, WIDTH
        ),  # as many positions as the width: the shape alone tells nothing
        "blocks.0.attn.W_Q": draw(HEADS, WIDTH, HEAD),
        f"blocks.0.attn.{few}W_K": draw(groups, WIDTH, HEAD),
        f"blocks.0.attn.{few}W_V": draw(groups, WIDTH, HEAD),
        "blocks.0.attn.W_O": draw(HEADS, HEAD, WIDTH),
        "blocks.0.attn.b_Q": draw(HEADS, HEAD),
        f"blocks.0.attn.{few}b_K": draw(groups, HEAD),
        f"blocks.0.attn.{few}b_V": draw(groups, HEAD),
        "blocks.0.attn.b_O": draw(WIDTH),
        "blocks.0.attn.mask": np.tril(np.ones((16, 16), np.float32)),
        "blocks.0.attn.IGNORE": np.float32(-1e5).reshape(()),
        "blocks.0.attn.rotary_sin": draw(16, 4),
        "blocks.0.mlp.W_in": draw(WIDTH, HIDDEN),
        "blocks.0.mlp.W_out": draw(HIDDEN, WIDTH),
        "unembed.W_U": draw(WIDTH, WORDS),
    }
    return tensors | ({"blocks.0.mlp.W_gate": draw(WIDTH, HIDDEN)} if gated else {})


@pytest.mark.parametrize("groups", [HEADS, 1])
def test_transformer_lens_matrices_map_as_the_model_does(tmp_path, groups):
    stored = transformer_lens(gated=True, groups=groups)
    layers = {layer.role.value: layer for layer in network(tmp_path, stored).layers()}
    few = "" if groups == HEADS else "_"
    x, z = draw(WIDTH), draw(HEADS * HEAD)
    into = {"q": "W_Q", "k": f"{few}W_K", "v": f"{few}W_V"}
    for role, name in into.items():
        expected = np.einsum("d,hde->he", x, stored[f"blocks.0.attn.{name}"]).reshape(-1)
        np.testing.assert_allclose(next(layers[f"attention.{role}"].matrices()) @ x, expected, rtol=1e-4)
    out = np.einsum("he,hed->d", z.reshape(HEADS, HEAD), stored["blocks.0.attn.W_O"])
    np.testing.assert_allclose(next(layers["attention.out"].matrices()) @ z, out, rtol=1e-3, atol=1e-5)
    for role, name in {"mlp.in": "mlp.W_in", "mlp.gate": "mlp.W_gate"}.items():
        np.testing.assert_array_equal(next(layers[role].matrices()), stored[f"blocks.0.{name}"].T)
    np.testing.assert_array_equal(next(layers["mlp.out"].matrices()), stored["blocks.0.mlp.W_out"].T)
    np.testing.assert_array_equal(next(layers["head"].matrices()), stored["unembed.W_U"].T)


def test_transformer_lens_roles_and_what_is_no_layer(tmp_path):
    net = network(tmp_path, transformer_lens())
    roles = {layer.name: (layer.role.value, layer.block) for layer in net.layers()}
    assert roles == {
        "embed.W_E": ("embedding", None),
        "pos_embed.W_pos": ("embedding", None),
        "blocks.0.attn.W_Q": ("attention.q", 0),
        "blocks.0.attn.W_K": ("attention.k", 0),
        "blocks.0.attn.W_V": ("attention.v", 0),
        "blocks.0.attn.W_O": ("attention.out", 0),
        "blocks.0.mlp.W_in": ("mlp.in", 0),
        "blocks.0.mlp.W_out": ("mlp.out", 0),
        "unembed.W_U": ("head", None),
    }
    assert {layer.view for layer in net.layers() if layer.role == "embedding"} == {"as stored"}
    reasons = {s.name.split(".")[-1]: s.reason for s in net.skipped()}
    assert "mask" in reasons["mask"]
    assert all("bias" in reasons[f"b_{letter}"] for letter in "QKVO")
    assert set(reasons) == {"mask", "IGNORE", "rotary_sin", "b_Q", "b_K", "b_V", "b_O"}


def test_weights_of_the_same_letters_stored_outputs_first_stay_so(tmp_path):
    stored = {
        "embed.W_E": draw(WIDTH, WORDS),
        "blocks.0.attn.W_Q": draw(HEADS, HEAD, WIDTH),
        "blocks.0.attn.W_O": draw(HEADS, WIDTH, HEAD),
        "blocks.0.mlp.W_in": draw(HIDDEN, WIDTH),
        "blocks.0.mlp.W_out": draw(WIDTH, HIDDEN),
        "unembed.W_U": draw(WORDS, WIDTH),
    }
    layers = {layer.role.value: layer for layer in network(tmp_path, stored).layers()}
    x, z = draw(WIDTH), draw(HEADS * HEAD)
    expected = np.einsum("hed,d->he", stored["blocks.0.attn.W_Q"], x).reshape(-1)
    np.testing.assert_allclose(next(layers["attention.q"].matrices()) @ x, expected, rtol=1e-4, atol=1e-6)
    expected = np.einsum("hde,he->d", stored["blocks.0.attn.W_O"], z.reshape(HEADS, HEAD))
    np.testing.assert_allclose(next(layers["attention.out"].matrices()) @ z, expected, rtol=1e-3, atol=1e-5)
    assert layers["mlp.in"].shape == (HIDDEN, WIDTH)
    assert layers["mlp.in"].view == layers["mlp.out"].view == layers["head"].view == "as stored"
    assert layers["embedding"].shape == (WORDS, WIDTH)
    modules = network(
        tmp_path, {"blocks.0.attn.W_Q.weight": draw(6, 4), "blocks.0.mlp.W_in.weight": draw(8, 4)}
    )
    assert {layer.view for layer in modules.layers()} == {"as stored"}


@pytest.mark.parametrize(
    ("name", "shape", "word"),
    [
        ("sa.heads.0.tril", (8, 8), "mask"),
        ("attn.causal_mask", (8, 8), "mask"),
        ("attn.bias", (8, 8), "mask"),
        ("conv1.weight_mask", (4, 3, 3, 3), "mask"),
        ("experts.gate_up_proj_bias", (4, 6), "bias"),
        ("attn.r_w_bias", (4, 6), "bias"),
        ("attention/query/bias:0", (4, 6), "bias"),
        ("attn.rotary_emb.cos_cached", (8, 6), "table"),
        ("optimizer.state.0.exp_avg", (4, 3), "optimizer"),
        ("fc.weight.momentum_buffer", (4, 3), "optimizer"),
    ],
)
def test_matrices_that_are_no_weights(tmp_path, name, shape, word):
    net = network(tmp_path, {"fc.weight": draw(4, 3), name: draw(*shape)})
    assert [layer.name for layer in net.layers()] == ["fc.weight"]
    assert word in {s.name: s.reason for s in net.skipped()}[name]


def test_mask_and_bias_inside_a_longer_name_are_layers(tmp_path):
    names = (
        "mask_head.weight",
        "relative_attention_bias.weight",
        "mask_decoder.fc.weight",
        "embeddings.mask_embed",
    )
    assert len(network(tmp_path, {name: draw(4, 3 + i) for i, name in enumerate(names)}).layers()) == 4


def test_routers_and_experts(tmp_path):
    tensors = {
        "model.layers.2.mlp.gate.weight": draw(4, 6),
        **{f"model.layers.2.mlp.experts.{i}.gate_proj.weight": draw(5, 6) for i in range(2)},
        "model.layers.2.mlp.shared_expert.gate_proj.weight": draw(5, 6),
        "model.layers.3.block_sparse_moe.gate.weight": draw(4, 6),
        "model.layers.3.block_sparse_moe.experts.1.w2.weight": draw(6, 5),
        "blk.4.ffn_gate_inp.weight": draw(4, 6),
        "blk.4.ffn_down_exps.weight": draw(2, 6, 5),
        "blk.6.ffn_down.1.weight": draw(6, 5),
        "model.layers.7.mlp.gate.wg.weight": draw(4, 6),
        "model.layers.8.block_sparse_moe.input_linear.weight": draw(2, 6, 5),
        "encoder.block.9.layer.1.mlp.experts.expert_1.wo.weight": draw(6, 5),
        "model.layers.5.mlp.gate.weight": draw(
            5, 6
        ),  # no experts beside it: a gate of an MLP without a known name
    }
    found = {layer.name: (layer.role.value, layer.expert) for layer in network(tmp_path, tensors).layers()}
    assert found == {
        "model.layers.2.mlp.gate.weight": ("router", None),
        "model.layers.2.mlp.experts.0.gate_proj.weight": ("mlp.gate", 0),
        "model.layers.2.mlp.experts.1.gate_proj.weight": ("mlp.gate", 1),
        "model.layers.2.mlp.shared_expert.gate_proj.weight": ("mlp.gate", None),
        "model.layers.3.block_sparse_moe.gate.weight": ("router", None),
        "model.layers.3.block_sparse_moe.experts.1.w2.weight": ("mlp.out", 1),
        "blk.4.ffn_gate_inp.weight": ("router", None),
        "blk.4.ffn_down_exps.weight[0]": ("mlp.out", 0),
        "blk.4.ffn_down_exps.weight[1]": ("mlp.out", 1),
        "blk.6.ffn_down.1.weight": ("mlp.out", 1),
        "model.layers.7.mlp.gate.wg.weight": ("router", None),
        "model.layers.8.block_sparse_moe.input_linear.weight[0]": ("mlp.in", 0),
        "model.layers.8.block_sparse_moe.input_linear.weight[1]": ("mlp.in", 1),
        "encoder.block.9.layer.1.mlp.experts.expert_1.wo.weight": ("mlp.out", 1),
        "model.layers.5.mlp.gate.weight": ("linear", None),
    }


def test_experts_below_each_other_in_one_matrix(tmp_path):
    """DBRX: ``y = (silu(x w1^T) * (x v1^T)) w2`` for each expert's rows."""
    tensors = {f"blocks.0.ffn.experts.mlp.{word}": draw(3 * 7, 5) for word in ("w1", "v1", "w2")}
    net = network(tmp_path, tensors, {"ffn_config": {"moe_num_experts": 3}})
    layers = {layer.name: layer for layer in net.layers()}
    assert len(layers) == 9
    for word, role in (("w1", "mlp.gate"), ("v1", "mlp.in"), ("w2", "mlp.out")):
        for index in range(3):
            layer = layers[f"blocks.0.ffn.experts.mlp.{word}[{index}]"]
            part = tensors[layer.tensor][7 * index : 7 * index + 7]
            expected = part.T if word == "w2" else part
            assert (layer.role.value, layer.expert, layer.shape) == (role, index, expected.shape)
            np.testing.assert_array_equal(next(layer.matrices()), expected)
    plain = network(tmp_path, tensors, {"ffn_config": {"moe_num_experts": 4}})  # does not divide the rows
    assert [layer.expert for layer in plain.layers()] == [None] * 3
