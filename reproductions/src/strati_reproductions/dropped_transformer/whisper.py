"""The encoder of OpenAI's Whisper file under transformers' names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strati.io.network import open as open_network

if TYPE_CHECKING:
    from numpy.typing import NDArray

_NAMES = {
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


def whisper_encoder(path: Path) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """Tensors and configuration of the encoder; a head is always 64 wide."""
    network = open_network(path)
    tensors: dict[str, NDArray[Any]] = {}
    for tensor in network.tensors:
        if tensor.name.startswith("encoder.") and tensor.floating:
            name = tensor.name
            for pattern, replacement in _NAMES.items():
                name = re.sub(pattern, replacement, name)
            tensors[name] = network.read(tensor.name)
    width = len(tensors["encoder.layer_norm.weight"])
    layers = 1 + max(int(name.split(".")[2]) for name in tensors if name.startswith("encoder.layers."))
    return tensors, {
        "architectures": ["WhisperModel"],
        "model_type": "whisper",
        "d_model": width,
        "encoder_layers": layers,
        "encoder_attention_heads": width // 64,
        "num_attention_heads": width // 64,
        "encoder_ffn_dim": len(tensors["encoder.layers.0.fc1.weight"]),
        "num_mel_bins": tensors["encoder.conv1.weight"].shape[1],
        "max_source_positions": len(tensors["encoder.embed_positions.weight"]),
        "activation_function": "gelu",
    }
