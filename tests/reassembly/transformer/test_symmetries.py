"""Blocks of a transformer that compute one function from other weights are said to be interchangeable."""

from dataclasses import replace

import numpy as np
import pytest

import strati
from strati.reassembly.transformer.blueprint import blueprint_of
from strati.reassembly.transformer.pieces import canonical, stored
from strati.reassembly.transformer.shuffle import shuffle_transformer
from strati.reassembly.transformer.solve import _with_equal_blocks
from strati.reassembly.transformer.symmetries import apply_random_symmetry, equal_halves

LLAMA = {
    "self_attn.q_proj.weight": (32, 32), "self_attn.k_proj.weight": (16, 32), "self_attn.v_proj.weight": (16, 32),
    "self_attn.o_proj.weight": (32, 32), "mlp.gate_proj.weight": (40, 32), "mlp.up_proj.weight": (40, 32),
    "mlp.down_proj.weight": (32, 40), "input_layernorm.weight": (32,), "post_attention_layernorm.weight": (32,),
}  # fmt: skip
GPT2 = {
    "attn.c_attn.weight": (32, 96), "attn.c_attn.bias": (96,), "attn.c_proj.weight": (32, 32),
    "attn.c_proj.bias": (32,),
    "mlp.c_fc.weight": (32, 64), "mlp.c_fc.bias": (64,), "mlp.c_proj.weight": (64, 32), "mlp.c_proj.bias": (32,),
    "ln_1.weight": (32,), "ln_1.bias": (32,), "ln_2.weight": (32,), "ln_2.bias": (32,),
}  # fmt: skip
BERT = {
    **{f"attention.self.{n}.{k}": (32, 32) if k == "weight" else (32,)
       for n in ("query", "key", "value") for k in ("weight", "bias")},
    "attention.output.dense.weight": (32, 32), "attention.output.dense.bias": (32,),
    "attention.output.LayerNorm.weight": (32,), "attention.output.LayerNorm.bias": (32,),
    "intermediate.dense.weight": (48, 32), "intermediate.dense.bias": (48,), "output.dense.weight": (32, 48),
    "output.dense.bias": (32,), "output.LayerNorm.weight": (32,), "output.LayerNorm.bias": (32,),
}  # fmt: skip
NETWORKS = {
    "llama": ("model.layers.{}.", LLAMA, {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2,
              "rope_theta": 1e4, "hidden_act": "silu"}),
    "gpt2": ("h.{}.", GPT2, {"model_type": "gpt2", "n_head": 4, "activation_function": "gelu_new"}),
    "bert": ("encoder.layer.{}.", BERT, {"model_type": "bert", "num_attention_heads": 4, "hidden_act": "gelu"}),
}  # fmt: skip


def with_copy(kind, *, blocks=5, original=1, copy=3, seed=0, dtype="f4", **symmetry):
    """Random blocks of which one is another with other weights of the same function."""
    prefix, shapes, config = NETWORKS[kind]
    rng = np.random.default_rng(seed)
    state = {
        prefix.format(k) + name: (0.3 * rng.normal(size=shape) + (len(shape) == 1)).astype(dtype)
        for k in range(blocks)
        for name, shape in shapes.items()
    }
    blueprint = blueprint_of({n: v.shape for n, v in state.items()}, config)
    parts = {}
    for slot in blueprint.block:
        parts |= canonical(np.asarray(state[slot.name.format(original)], float), slot, blueprint)
    parts = apply_random_symmetry(parts, blueprint, rng, **symmetry)
    for slot in blueprint.block:
        state[slot.name.format(copy)] = stored(parts, slot, blueprint).astype(dtype)
    return shuffle_transformer(state, network=config, seed=seed)


def equal_in(dropped, pieces=None):
    blocks, vectors = (tuple(dropped.answer[part]) for part in ("blocks", "vectors"))
    return {(h.part, h.a, h.b) for h in equal_halves(pieces or dropped.pieces, blocks, vectors)}


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
@pytest.mark.parametrize("rescale", [False, True])
@pytest.mark.parametrize("dtype", ["f4", "f2"])
def test_a_block_with_permuted_heads_and_neurons(kind, rescale, dtype):
    dropped = with_copy(kind, permute=True, rescale=rescale, dtype=dtype)
    assert equal_in(dropped) == {("attention", 1, 3), ("mlp", 1, 3)}


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
def test_only_the_unchanged_half_is_the_same_function(kind):
    dropped = with_copy(kind, permute=True, rescale=False, seed=2)
    down = dropped.answer["blocks"][3]["down"]
    arrays = {**dropped.pieces.arrays, down: dropped.pieces.arrays[down] * np.float32(1.001)}
    assert equal_in(dropped, replace(dropped.pieces, arrays=arrays)) == {("attention", 1, 3)}


def test_byte_identical_blocks_are_not_named():
    assert equal_in(with_copy("llama", permute=False, rescale=False)) == set()


def test_the_result_names_them_and_their_pieces_are_uncertain():
    dropped = with_copy("llama", blocks=2, copy=1, original=0, permute=True, rescale=False)
    blocks, vectors = (tuple(dropped.answer[part]) for part in ("blocks", "vectors"))
    sure = replace(strati.reassemble(dropped), blocks=blocks, vectors=vectors, uncertain=(), warnings=())
    answer = _with_equal_blocks(sure)
    assert {w.code for w in answer.warnings} == {"order-not-unique"}
    assert answer.to_dict()["interchangeable"][0] == {"part": "attention", "a": 0, "b": 1}
    pieces = {n for block in (*blocks, *vectors) for n in block.values()}
    assert set(answer.uncertain) == pieces
