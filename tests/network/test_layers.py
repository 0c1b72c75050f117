"""Views, ties, and that every tensor is either a layer or skipped with a reason."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from makers import safetensors_bytes

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
        assert np.shares_memory(matrix, net.read("conv.weight")) or isinstance(matrix, np.memmap)
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
    tensors = {"h.0.attn.query_key_value.weight": draw(12, 4), "h.1.attn.qkv.weight": draw(13, 4)}
    layers = network(tmp_path, tensors).layers(split_qkv=True)
    assert ["not split" in layer.view for layer in layers] == [True, True]


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
    assert {s.name: s.reason for s in net.skipped()} == {"h.0.attn.bias": "a causal mask, not a weight"}
    assert net.parameters == 8 * 24


def test_layers_of_a_file_without_order_come_as_the_data_flow(tmp_path):
    parts = ("attn.out_proj", "attn.q_proj", "mlp.down_proj", "mlp.up_proj", "attn.v_proj", "attn.k_proj")
    tensors = {f"layers.{i}.{part}.weight": draw(6, 6) for i in (10, 2) for part in parts}
    net = network(tmp_path, tensors | {"wte.weight": draw(9, 6), "lm_head.weight": draw(12, 6)})
    roles = [layer.role.value for layer in net.layers()]
    block = ["attention.q", "attention.k", "attention.v", "attention.out", "mlp.in", "mlp.out"]
    assert roles == ["embedding", *block, *block, "head"]
    assert [layer.block for layer in net.layers()][1:13] == [2] * 6 + [10] * 6
