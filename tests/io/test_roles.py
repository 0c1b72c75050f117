"""Roles and blocks by the names of the architectures people use."""

from __future__ import annotations

import pytest

import strati
from strati.io.roles import Role, blocks, role_of

LISTED = """
h.0.attn.c_attn.weight attention.qkv 0
transformer.h.11.attn.c_proj.weight attention.out 11
h.0.mlp.c_fc.weight mlp.in 0
h.0.mlp.c_proj.weight mlp.out 0
h.0.crossattention.q_attn.weight attention.q 0
wte.weight embedding None
transformer.wpe.weight embedding None
lm_head.weight head None
bert.encoder.layer.3.attention.self.query.weight attention.q 3
encoder.layer.3.attention.self.key.weight attention.k 3
encoder.layer.3.attention.self.value.weight attention.v 3
encoder.layer.3.attention.output.dense.weight attention.out 3
encoder.layer.3.intermediate.dense.weight mlp.in 3
encoder.layer.3.output.dense.weight mlp.out 3
embeddings.word_embeddings.weight embedding None
embeddings.token_type_embeddings.weight embedding None
pooler.dense.weight linear None
cls.predictions.decoder.weight head None
model.layers.7.self_attn.q_proj.weight attention.q 7
model.layers.7.self_attn.o_proj.weight attention.out 7
model.layers.7.mlp.gate_proj.weight mlp.gate 7
model.layers.7.mlp.up_proj.weight mlp.in 7
model.layers.7.mlp.down_proj.weight mlp.out 7
model.embed_tokens.weight embedding None
layers.2.attention.wq.weight attention.q 2
layers.2.attention.wo.weight attention.out 2
layers.2.feed_forward.w2.weight mlp.out 2
tok_embeddings.weight embedding None
output.weight head None
blk.5.attn_q.weight attention.q 5
blk.5.attn_output.weight attention.out 5
blk.5.attn_qkv.weight attention.qkv 5
blk.5.ffn_gate.weight mlp.gate 5
blk.5.ffn_up.weight mlp.in 5
blk.5.ffn_down.weight mlp.out 5
token_embd.weight embedding None
vit.encoder.layer.1.attention.attention.query.weight attention.q 1
vit.encoder.layer.1.attention.output.dense.weight attention.out 1
blocks.4.attn.qkv.weight attention.qkv 4
blocks.4.attn.proj.weight attention.out 4
blocks.4.mlp.fc1.weight mlp.in 4
blocks.4.mlp.fc2.weight mlp.out 4
head.weight head None
encoder.layers.encoder_layer_9.self_attention.in_proj_weight attention.qkv 9
encoder.layers.encoder_layer_9.self_attention.out_proj.weight attention.out 9
encoder.layers.encoder_layer_9.mlp.0.weight mlp.in 9
encoder.layers.encoder_layer_9.mlp.3.weight mlp.out 9
heads.head.weight head None
decoder.blocks.2.cross_attn.query.weight attention.q 2
decoder.blocks.2.cross_attn.out.weight attention.out 2
decoder.blocks.2.mlp.0.weight mlp.in 2
decoder.blocks.2.mlp.2.weight mlp.out 2
model.decoder.layers.1.encoder_attn.v_proj.weight attention.v 1
model.decoder.layers.1.fc1.weight mlp.in 1
model.decoder.layers.1.fc2.weight mlp.out 1
decoder.token_embedding.weight embedding None
encoder.block.3.layer.0.SelfAttention.q.weight attention.q 3
encoder.block.3.layer.0.SelfAttention.o.weight attention.out 3
encoder.block.3.layer.1.DenseReluDense.wi_0.weight mlp.gate 3
encoder.block.3.layer.1.DenseReluDense.wi_1.weight mlp.in 3
encoder.block.3.layer.1.DenseReluDense.wo.weight mlp.out 3
encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight embedding 0
shared.weight embedding None
transformer.encoder.layers.0.self_attn.in_proj_weight attention.qkv 0
transformer.encoder.layers.0.linear1.weight mlp.in 0
transformer.encoder.layers.0.linear2.weight mlp.out 0
gpt_neox.layers.0.attention.query_key_value.weight attention.qkv 0
gpt_neox.layers.0.attention.dense.weight attention.out 0
gpt_neox.layers.0.mlp.dense_h_to_4h.weight mlp.in 0
gpt_neox.embed_in.weight embedding None
embed_out.weight head None
unet.down.attn.to_q.weight attention.q None
unet.down.attn.to_out.0.weight attention.out None
fc1.weight linear None
fc2.weight linear None
0.weight linear None
net.4.weight linear None
mlp.0.weight linear None
mlp.2.weight linear None
hidden.weight linear None
k.weight linear None
value.weight linear None
"""


@pytest.mark.parametrize("line", LISTED.strip().split("\n"))
def test_names(line):
    name, role, block = line.split()
    number = blocks([name])[name]
    assert str(number) == block
    assert role_of(name, number) == role


def test_w1_is_a_gate_only_beside_w3():
    assert role_of("layers.0.feed_forward.w1.weight", 0, {"w1", "w2", "w3"}) is Role.MLP_GATE
    assert role_of("layers.0.ffn.w1.weight", 0, {"w1", "w2"}) is Role.MLP_IN


def test_blocks_within_stages_are_counted_through():
    names = [f"layer{s}.{b}.conv1.weight" for s in (1, 2, 3) for b in (0, 1)]
    assert list(blocks(names).values()) == [0, 1, 2, 3, 4, 5]
    names = [
        f"resnet.encoder.stages.{s}.layers.{b}.layer.0.convolution.weight" for s in (0, 1) for b in (0, 1, 2)
    ]
    assert list(blocks(names).values()) == [0, 1, 2, 3, 4, 5]
    assert list(blocks([f"blocks.{s}.{b}.conv_pw.weight" for s in (0, 1) for b in (0, 1)]).values()) == [
        0,
        1,
        2,
        3,
    ]


@pytest.mark.parametrize(
    "name", ["", ".", "...", "weight", ".weight", "\u00b2.weight", "9" * 500 + ".x.weight", "a" * 10_000]
)
def test_odd_names_are_linear(name):
    assert role_of(name, blocks([name])[name]) is Role.LINEAR


def transformers_model(kind: str):
    import transformers as t

    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    if kind == "gpt2":
        return t.GPT2LMHeadModel(t.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=50, n_positions=16))
    if kind == "bert":
        return t.BertModel(t.BertConfig(vocab_size=50, **small))
    if kind == "llama":
        return t.LlamaForCausalLM(t.LlamaConfig(vocab_size=50, num_key_value_heads=2, **small))
    if kind == "vit":
        return t.ViTForImageClassification(t.ViTConfig(image_size=32, patch_size=16, **small))
    if kind == "t5":
        return t.T5ForConditionalGeneration(
            t.T5Config(vocab_size=50, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
        )
    if kind == "neox":
        return t.GPTNeoXForCausalLM(t.GPTNeoXConfig(vocab_size=50, **small))
    if kind == "resnet":
        config = t.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], layer_type="basic")
        return t.ResNetForImageClassification(config)
    raise AssertionError(kind)


THREE = {"attention.q": 2, "attention.k": 2, "attention.v": 2, "attention.out": 2, "mlp.in": 2, "mlp.out": 2}
FUSED = {"attention.qkv": 2, "attention.out": 2, "mlp.in": 2, "mlp.out": 2}
EXPECTED = {
    "gpt2": FUSED | {"embedding": 2},
    "bert": THREE | {"embedding": 3, "linear": 1},
    "llama": THREE | {"mlp.gate": 2, "embedding": 1, "head": 1},
    "vit": THREE | {"embedding": 1, "conv": 1, "head": 1},
    "t5": {role: 3 * count if "attention" in role else 2 * count for role, count in THREE.items()}
    | {"embedding": 3},
    "neox": FUSED | {"embedding": 1, "head": 1},
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    import torch

    folders = {}

    def save(kind: str):
        if kind not in folders:
            torch.manual_seed(0)
            folders[kind] = tmp_path_factory.mktemp(kind)
            transformers_model(kind).save_pretrained(folders[kind])
        return folders[kind]

    return save


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", EXPECTED)
def test_directories_that_transformers_saves(saved, kind):
    net = strati.open(saved(kind))
    counts: dict[str, int] = {}
    for layer in net.layers():
        counts[layer.role.value] = counts.get(layer.role.value, 0) + 1
    assert counts == EXPECTED[kind]
    assert net.parameters == sum(p.numel() for p in transformers_model(kind).parameters())
    named = {layer.tensor for layer in net.layers()} | {s.name for s in net.skipped()}
    assert named == {t.name for t in net.tensors}


@pytest.mark.filterwarnings("ignore")
def test_resnet_of_transformers(saved):
    net = strati.open(saved("resnet"))
    assert [layer.role.value for layer in net.layers()].count("head") == 1
    assert {layer.block for layer in net.layers()} == {None, 0, 1, 2}


@pytest.mark.filterwarnings("ignore")
def test_fused_attention_is_split_as_the_model_splits_it(saved):
    """The split matrices give the query, key and value that the model itself computes."""
    import numpy as np
    import torch

    folder = saved("neox")
    net = strati.open(folder)
    parts = {layer.name: layer for layer in net.layers(split_qkv=True)}
    name = "gpt_neox.layers.0.attention.query_key_value.weight"
    x = np.random.default_rng(0).standard_normal(32).astype(np.float32)
    whole = torch.from_numpy(np.array(net.read(name)) @ x)
    query, key, value = whole.view(4, 24).chunk(3, dim=-1)  # heads x (q, k, v), as GPT-NeoX does it
    for letter, expected in zip("qkv", (query, key, value), strict=True):
        got = next(parts[f"{name}[{letter}]"].matrices()) @ x
        np.testing.assert_allclose(got, expected.reshape(-1).numpy(), rtol=1e-4, atol=1e-6)

    folder = saved("gpt2")
    net = strati.open(folder)
    name = next(layer.name for layer in net.layers() if layer.role is Role.QKV)
    stored = np.array(net.read(name))  # inputs x (q, k, v)
    parts = {layer.name: layer for layer in net.layers(split_qkv=True)}
    for index, letter in enumerate("qkv"):
        layer = parts[f"{name}[{letter}]"]
        assert layer.role.value == f"attention.{letter}"
        np.testing.assert_array_equal(next(layer.matrices()), stored[:, 32 * index : 32 * (index + 1)].T)
