"""Whatever names a transformer, as arrays under the names transformers uses, with its ``config.json``.

GGUF files of Llamas get transformers' names and order of rotary rows, OpenAI's Whisper files the names of its
encoder; everything else keeps the names it has. Of a network with two stacks the encoder is taken.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.errors import BadInputError, UnsupportedError
from strati.network import llama_gguf
from strati.network.layers import is_buffer
from strati.network.open import Network
from strati.network.open import open as open_network

if TYPE_CHECKING:
    from numpy.typing import NDArray

_WHISPER = {
    r"^encoder\.blocks\.(\d+)\.attn\.query\.": r"encoder.layers.\1.self_attn.q_proj.",
    r"^encoder\.blocks\.(\d+)\.attn\.key\.": r"encoder.layers.\1.self_attn.k_proj.",
    r"^encoder\.blocks\.(\d+)\.attn\.value\.": r"encoder.layers.\1.self_attn.v_proj.",
    r"^encoder\.blocks\.(\d+)\.attn\.out\.": r"encoder.layers.\1.self_attn.out_proj.",
    r"^encoder\.blocks\.(\d+)\.attn_ln\.": r"encoder.layers.\1.self_attn_layer_norm.",
    r"^encoder\.blocks\.(\d+)\.mlp\.0\.": r"encoder.layers.\1.fc1.",
    r"^encoder\.blocks\.(\d+)\.mlp\.2\.": r"encoder.layers.\1.fc2.",
    r"^encoder\.blocks\.(\d+)\.mlp_ln\.": r"encoder.layers.\1.final_layer_norm.",
    r"^encoder\.positional_embedding$": r"encoder.embed_positions.weight",
    r"^encoder\.ln_post\.": r"encoder.layer_norm.",
}


@dataclass(frozen=True)
class PieceSource:
    """A network's tensors, read when asked for, and its configuration.

    Attributes:
        name: What messages call it.
        shapes: Names and shapes of the tensors.
        read: Reads one.
        config: ``config.json``, or one made from what the file says.
        left_out: Tensors that are not taken, for the record.
        folder: The Hugging Face directory it came from, whose tokenizer goes with it.
    """

    name: str
    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], NDArray[Any]]
    config: Mapping[str, Any]
    left_out: tuple[str, ...] = field(default=())
    folder: Path | None = None


def source_of(model: object) -> PieceSource:
    """The tensors of a path, a :class:`~strati.network.open.Network`, a module in memory or a state dict.

    Raises:
        BadInputError: It is none of these, or cannot be read.
        UnsupportedError: It has no ``config.json`` and strati cannot make one.
    """
    if isinstance(model, str | Path):
        model = open_network(model)
    if isinstance(model, Network):
        return _from_network(model)
    config: Mapping[str, Any] = {}
    if hasattr(model, "state_dict"):
        found: Any = getattr(model, "config", None)
        config = found.to_dict() if hasattr(found, "to_dict") else {}
        state = model.state_dict()
    elif isinstance(model, Mapping):
        state = model
    else:
        raise BadInputError(type(model).__name__, "is not a network: give a path, a module or a state dict")
    arrays = {str(name): _array(values) for name, values in state.items()}
    if config.get("tie_word_embeddings") and "lm_head.weight" in arrays:
        arrays.pop("lm_head.weight")
    shapes = {
        name: values.shape for name, values in arrays.items() if values.dtype.kind in "fV" and values.ndim
    }
    return _one_stack(PieceSource("network", shapes, arrays.__getitem__, config))


def _from_network(network: Network) -> PieceSource:
    if network.format == "gguf":
        return _from_gguf(network)
    kept = {
        t.name: t.shape
        for t in network.tensors
        if t.floating and t.shape and 0 not in t.shape and t.name not in network.ties and not is_buffer(t)
    }
    folder = network.path if network.path.is_dir() else None
    config = network.config
    if any(name.startswith("encoder.blocks.") for name in kept) and not config:
        return _from_whisper(network, kept)
    if not config:
        raise UnsupportedError(network.path, "has no config.json beside it; give the Hugging Face directory")
    if network.ties and not config.get("tie_word_embeddings"):
        config = {**config, "tie_word_embeddings": True}
    return _one_stack(PieceSource(str(network.path), kept, network.read, config, folder=folder))


def _from_gguf(network: Network) -> PieceSource:
    facts = {key.removeprefix("llama."): value for key, value in (network.config or {}).items()}
    if "block_count" not in facts:
        kind = facts.get("general.architecture", "unknown")
        raise UnsupportedError(network.path, f"a GGUF of architecture {kind}; only llama is put back")
    heads, groups = int(facts["attention.head_count"]), int(facts["attention.head_count_kv"])
    names: dict[str, str] = {}
    for tensor in network.tensors:
        kind = tensor.name.split(".")[-2]
        if tensor.name.startswith("blk.") and kind in llama_gguf._NAMES:
            names[f"model.layers.{tensor.name.split('.')[1]}.{llama_gguf._NAMES[kind]}.weight"] = tensor.name
        elif kind in llama_gguf._WHOLE:
            names[f"{llama_gguf._WHOLE[kind]}.weight"] = tensor.name

    def read(name: str) -> NDArray[Any]:
        values = np.asarray(network.read(names[name]), np.float32)
        kind = names[name].split(".")[-2]
        if kind in ("attn_q", "attn_k"):
            return llama_gguf._halves(values, heads if kind == "attn_q" else groups)
        return values

    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": int(facts["embedding_length"]),
        "intermediate_size": int(facts["feed_forward_length"]),
        "num_hidden_layers": int(facts["block_count"]),
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "max_position_embeddings": int(facts["context_length"]),
        "rms_norm_eps": float(facts["attention.layer_norm_rms_epsilon"]),
        "rope_theta": float(facts["rope.freq_base"]),
        "vocab_size": int(network[names["model.embed_tokens.weight"]].shape[0]),
        "hidden_act": "silu",
        "tie_word_embeddings": "lm_head.weight" not in names,
        "torch_dtype": "float32",
    }
    shapes = {name: network[theirs].shape for name, theirs in names.items()}
    return PieceSource(str(network.path), shapes, read, config)


def _from_whisper(network: Network, kept: Mapping[str, tuple[int, ...]]) -> PieceSource:
    """OpenAI's file: the encoder under transformers' names. A head is always 64 wide."""
    names = {}
    for name in kept:
        if name.startswith("encoder."):
            new = name
            for pattern, better in _WHISPER.items():
                new = re.sub(pattern, better, new)
            names[new] = name
    shapes = {new: tuple(kept[old]) for new, old in names.items()}
    width = shapes["encoder.layer_norm.weight"][0]
    layers = 1 + max(int(name.split(".")[2]) for name in names if name.startswith("encoder.layers."))
    config = {
        "architectures": ["WhisperModel"],
        "model_type": "whisper",
        "d_model": width,
        "encoder_layers": layers,
        "encoder_attention_heads": width // 64,
        "num_attention_heads": width // 64,
        "encoder_ffn_dim": shapes["encoder.layers.0.fc1.weight"][0],
        "num_mel_bins": shapes["encoder.conv1.weight"][1],
        "max_source_positions": shapes["encoder.embed_positions.weight"][0],
        "activation_function": "gelu",
    }
    left = tuple(name for name in kept if name not in set(names.values()))
    return PieceSource(str(network.path), shapes, lambda name: network.read(names[name]), config, left)


def _one_stack(source: PieceSource) -> PieceSource:
    """Of an encoder-decoder the encoder alone: cross-attention is no part of a block that strati puts back."""
    encoder = [n for n in source.shapes if re.search(r"(^|\.)encoder\.", n)]
    decoder = [n for n in source.shapes if re.search(r"(^|\.)decoder\.", n)]
    if not encoder or not any(re.search(r"\.\d+\.", n) for n in decoder):
        return source
    kept = {n: source.shapes[n] for n in encoder}
    left = tuple(n for n in source.shapes if n not in kept)
    return PieceSource(source.name, kept, source.read, source.config, left, source.folder)


def _array(values: Any) -> NDArray[Any]:
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        values = values.float().numpy() if str(values.dtype) == "torch.bfloat16" else values.numpy()
    return np.asarray(values)
