"""Random changes of the weights leave the function of a transformer as it is."""

import numpy as np
import pytest

from strati.core.errors import UnsupportedError
from strati.reassembly.transformer.shuffle import shuffle_transformer
from strati.reassembly.transformer.symmetries import _KNOWN_TYPES

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
