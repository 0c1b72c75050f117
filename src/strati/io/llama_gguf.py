"""A Llama in a GGUF file as a transformers module: names translated, the rotary order of llama.cpp undone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.core.errors import BadInputError, UnsupportedError
from strati.core.plugins import require
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


@dataclass(frozen=True)
class Llama:
    """A Llama as transformers stores it.

    Attributes:
        config: The settings of ``config.json``.
        names: Name in transformers to name in the file.
        read: The values of a tensor by its name in transformers, in float32.
    """

    config: Mapping[str, Any]
    names: Mapping[str, str]
    read: Callable[[str], NDArray[np.float32]]


def as_transformers(file: Network) -> Llama:
    """The settings, names and tensors of a GGUF file under the names of transformers.

    Raises:
        UnsupportedError: The file holds another architecture.
        BadInputError: The file lacks a setting or the embedding.
    """
    settings = file.config or {}
    if settings.get("general.architecture") != "llama":
        kind = settings.get("general.architecture", "unknown")
        raise UnsupportedError(file.path, f"a GGUF of architecture {kind}; only llama is read as a network")

    def fact(name: str) -> float:
        number = settings.get(f"llama.{name}")
        if not isinstance(number, int | float):
            raise BadInputError(file.path, f"has no setting llama.{name}; convert it again")
        return number

    heads = int(fact("attention.head_count"))
    groups = int(settings.get("llama.attention.head_count_kv") or heads)
    names: dict[str, str] = {}
    for tensor in file.tensors:
        kind = tensor.name.split(".")[-2]
        if tensor.name.startswith("blk.") and kind in _NAMES:
            names[f"model.layers.{tensor.name.split('.')[1]}.{_NAMES[kind]}.weight"] = tensor.name
        elif kind in _WHOLE:
            names[f"{_WHOLE[kind]}.weight"] = tensor.name
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": int(fact("embedding_length")),
        "intermediate_size": int(fact("feed_forward_length")),
        "num_hidden_layers": int(fact("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "max_position_embeddings": int(fact("context_length")),
        "rms_norm_eps": float(fact("attention.layer_norm_rms_epsilon")),
        "rope_theta": float(settings.get("llama.rope.freq_base") or 10_000.0),
        "vocab_size": file["token_embd.weight"].shape[0],
        "hidden_act": "silu",
        "tie_word_embeddings": "lm_head.weight" not in names,
        "torch_dtype": "float32",
    }

    def read(name: str) -> NDArray[np.float32]:
        values = np.asarray(file.read(names[name]), np.float32)
        kind = names[name].split(".")[-2]
        if kind in ("attn_q", "attn_k"):
            return _halves(values, heads if kind == "attn_q" else groups)
        return values

    return Llama(config, names, read)


def llama_from_gguf(source: Network | Path) -> nn.Module:
    """Build the network and fill it with the file's (dequantised) weights; in evaluation mode.

    Raises:
        MissingExtraError: transformers or gguf is not installed.
        BadInputError: The file is broken or lacks a tensor or a setting.
    """
    from strati.io.in_memory import load_arrays

    transformers = require("transformers", "transformers", "running a Llama")
    file = open_network(source)
    llama = as_transformers(file)
    model: nn.Module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**llama.config)).float()
    arrays = {name: llama.read(name) for name in llama.names}
    arrays.setdefault("lm_head.weight", arrays["model.embed_tokens.weight"])
    load_arrays(model, arrays, file.path)
    return model.eval()


def _halves(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """llama.cpp interleaves the two halves of each head's rows; transformers keeps them apart."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
