"""A Llama in a GGUF file as a transformers module: names translated, the rotary order of llama.cpp undone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.core.errors import BadInputError, require
from strati.io.network import open as open_network

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import nn

    from strati.io.network import Network

_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def llama_from_gguf(source: Network | Path) -> nn.Module:
    """Build the network and fill it with the file's (dequantised) weights; in evaluation mode.

    Raises:
        MissingExtraError: transformers or gguf is not installed.
        BadInputError: The file is broken or lacks a tensor or a setting.
    """
    from strati.io.in_memory import load_arrays

    transformers = require("transformers", "transformers", "running a Llama")
    file = open_network(source)
    settings = file.config or {}

    def fact(name: str) -> float:
        number = settings.get(f"llama.{name}")
        if not isinstance(number, int | float):
            raise BadInputError(file.path, f"has no setting llama.{name}; convert it again")
        return number

    heads = int(fact("attention.head_count"))
    groups = int(settings.get("llama.attention.head_count_kv") or heads)
    names = {tensor.name for tensor in file.tensors}
    embedding = np.asarray(file.read("token_embd.weight"), np.float32)
    config = transformers.LlamaConfig(
        hidden_size=int(fact("embedding_length")),
        intermediate_size=int(fact("feed_forward_length")),
        num_hidden_layers=int(fact("block_count")),
        num_attention_heads=heads,
        num_key_value_heads=groups,
        max_position_embeddings=int(fact("context_length")),
        rms_norm_eps=float(fact("attention.layer_norm_rms_epsilon")),
        rope_parameters={
            "rope_type": "default",
            "rope_theta": float(settings.get("llama.rope.freq_base") or 10_000.0),
        },
        vocab_size=embedding.shape[0],
        tie_word_embeddings="output.weight" not in names,
    )
    model: nn.Module = transformers.LlamaForCausalLM(config).float()
    arrays: dict[str, Any] = {}
    for name in sorted(names):
        kind = name.split(".")[-2]
        values = np.asarray(file.read(name), np.float32)
        if kind in ("attn_q", "attn_k"):
            values = _halves(values, heads if kind == "attn_q" else groups)
        if name.startswith("blk.") and kind in _NAMES:
            arrays[f"model.layers.{name.split('.')[1]}.{_NAMES[kind]}.weight"] = values
        elif kind in _WHOLE:
            arrays[f"{_WHOLE[kind]}.weight"] = values
    arrays.setdefault("lm_head.weight", embedding)
    load_arrays(model, arrays, file.path)
    return model.eval()


def _halves(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """llama.cpp interleaves the two halves of each head's rows; transformers keeps them apart."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
