"""Blocks of a transformer that compute one function from other weights are said to be interchangeable."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

import strati
from strati.core.errors import UnsupportedError
from strati.reassembly.transformer.blueprint import blueprint_of
from strati.reassembly.transformer.pieces import canonical, stored
from strati.reassembly.transformer.shuffle import shuffle_transformer
from strati.reassembly.transformer.solve import _with_equal_blocks
from strati.reassembly.transformer.symmetries import _KNOWN_TYPES, apply_random_symmetry, equal_halves

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


def with_copy(
    kind, *, blocks=5, original=1, copy=3, seed=0, dtype="f4", more=(), permute=True, rescale=False
):
    """Random blocks of which one is another with other weights of the same function."""
    prefix, shapes, config = NETWORKS[kind]
    config = config | dict(more)
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
    parts = apply_random_symmetry(parts, blueprint, rng, permute=permute, rescale=rescale)
    for slot in blueprint.block:
        state[slot.name.format(copy)] = stored(parts, slot, blueprint).astype(dtype)
    return shuffle_transformer(state, network=config, seed=seed)


def equal_in(dropped, pieces=None):
    blocks, vectors = (tuple(dropped.answer[part]) for part in ("blocks", "vectors"))
    return {(h.part, h.a, h.b) for h in equal_halves(pieces or dropped.pieces, blocks, vectors)}


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
@pytest.mark.parametrize("rescale", [False, True])
@pytest.mark.parametrize("dtype", ["f4", "f2", ml_dtypes.bfloat16])
def test_a_block_with_permuted_heads_and_neurons(kind, rescale, dtype):
    dropped = with_copy(kind, permute=True, rescale=rescale, dtype=dtype)
    assert equal_in(dropped) == {("attention", 1, 3), ("mlp", 1, 3)}


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
def test_only_the_unchanged_half_is_the_same_function(kind):
    dropped = with_copy(kind, permute=True, rescale=False, seed=2)
    down = dropped.answer["blocks"][3]["down"]
    arrays = {**dropped.pieces.arrays, down: dropped.pieces.arrays[down] * np.float32(1.001)}
    assert equal_in(dropped, replace(dropped.pieces, arrays=arrays)) == {("attention", 1, 3)}


@pytest.mark.parametrize("dtype", ["f2", ml_dtypes.bfloat16])
def test_many_heads_are_matched_in_few_digits(dtype):
    """Sixteen heads of which some are nearly alike: their order by any one number is not safe in half precision."""
    dropped = with_copy("gpt2", more={"n_head": 16}, seed=3, permute=True, rescale=True, dtype=dtype)
    assert equal_in(dropped) == {("attention", 1, 3), ("mlp", 1, 3)}


@pytest.mark.parametrize("change", [0.01, 0.03])
def test_a_small_change_is_another_function_in_bfloat16_too(change):
    dropped = with_copy("llama", seed=2, dtype=ml_dtypes.bfloat16)
    rng = np.random.default_rng(0)
    arrays = dict(dropped.pieces.arrays)
    for number in dropped.answer["blocks"][3].values():
        values = arrays[number].astype("f8")
        arrays[number] = (values * (1 + change * rng.normal(size=values.shape))).astype(ml_dtypes.bfloat16)
    assert equal_in(dropped, replace(dropped.pieces, arrays=arrays)) == set()


def test_blocks_that_look_at_other_windows_are_not_one_function():
    kinds = ["full_attention", "sliding_attention"] * 2 + ["full_attention"]
    assert ("attention", 1, 3) in equal_in(with_copy("llama", more={"layer_types": kinds}))
    found = equal_in(with_copy("llama", copy=4, more={"layer_types": kinds}))
    assert found == {("mlp", 1, 4)}


def test_of_other_architectures_only_permuted_neurons_are_recognised():
    """ALiBi gives each head its own slope: exchanged heads are another function there."""
    dropped = with_copy("gpt2", more={"model_type": "bloom"})
    assert equal_in(dropped) == {("mlp", 1, 3)}
    moved = with_copy("gpt2", more={"model_type": "bloom"}, rescale=True)
    assert equal_in(moved) == set()  # whether a norm's weight is added to one is not known either


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


SMALL = {
    "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 50,
    "max_position_embeddings": 64,
}  # fmt: skip
OTHER_SIZES = {
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 50},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "distilbert": {"dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 48, "vocab_size": 50},
    "vit": {"image_size": 8, "patch_size": 4, "num_channels": 1},
    "whisper": {"d_model": 32, "encoder_layers": 3, "encoder_attention_heads": 4, "encoder_ffn_dim": 48,
                "num_mel_bins": 8, "max_source_positions": 10, "pad_token_id": 0, "vocab_size": 50},
    "phi3": {"pad_token_id": 0}, "qwen3": {"num_key_value_heads": 2, "head_dim": 8},
    **{kind: {"num_key_value_heads": 2} for kind in ("llama", "mistral", "qwen2", "starcoder2")},
}  # fmt: skip


def small_module(kind):
    """A random network of a model type, and what to call it with."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = OTHER_SIZES.get(kind, {})
    own_names = kind in ("gpt2", "distilbert", "whisper")
    config = transformers.AutoConfig.for_model(kind, **(sizes if own_names else SMALL | sizes))
    if kind == "whisper":
        module, inputs = (
            transformers.models.whisper.modeling_whisper.WhisperEncoder(config),
            torch.randn(2, 8, 20),
        )
    elif kind == "vit":
        module, inputs = transformers.ViTModel(config), torch.randn(2, 1, 8, 8)
    else:
        module, inputs = transformers.AutoModel.from_config(config), torch.randint(2, 50, (2, 9))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(parameter + 0.2 * torch.randn_like(parameter))
    return module.eval(), inputs


@pytest.mark.parametrize("kind", sorted(_KNOWN_TYPES))
def test_harder_settings_leave_the_network_as_it_is(kind):
    torch = pytest.importorskip("torch")
    module, inputs = small_module(kind)
    want = module(inputs)[0]
    for symmetry in ({"permute": True}, {"rescale": True}):
        dropped = shuffle_transformer(module, seed=3, **symmetry)
        state = {name: values.clone() for name, values in module.state_dict().items()}
        moved = 0
        for k, numbers in enumerate(zip(dropped.answer["blocks"], dropped.answer["vectors"], strict=True)):
            for slot in dropped.blueprint.block:
                values = torch.from_numpy(
                    np.array(dropped.pieces.arrays[numbers[not slot.matrix][slot.role]])
                )
                moved += not torch.allclose(state[slot.name.format(k)], values)
                state[slot.name.format(k)] = values
        other = small_module(kind)[0]
        other.load_state_dict(state)
        assert moved > 10
        torch.testing.assert_close(other(inputs)[0], want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", ["bloom", "gemma", "gpt_neox", "phi"])
def test_architectures_of_other_symmetries_are_refused(kind):
    """Slopes by head, norms that add one, rows that do not rotate: each of them was changed before."""
    module, _ = small_module(kind)
    assert shuffle_transformer(module).count > 10
    with pytest.raises(UnsupportedError, match=kind):
        shuffle_transformer(module, rescale=True)
