"""The llama2.c file format: one header, then each kind of weight stacked over the layers, in float32.

Converted to a Hugging Face Llama directory. llama2.c rotates adjacent pairs of a head's coordinates, Hugging Face
its halves, so the rows of ``wq`` and ``wk`` are reordered; that permutes rows and changes no spectrum.
The tokenizer follows the weights: scores and byte strings, merged greedily by score.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

STORIES15M_BYTES = 60_816_028
"""Where the weights of stories15M end and its tokenizer begins in the published bundle."""


def split_and_convert(bundle: Path, folder: Path) -> None:
    """Write ``config.json``, ``model.safetensors`` and ``tokenizer.bin`` into ``folder``."""
    from safetensors.numpy import save_file

    raw = bundle.read_bytes()
    (folder / "tokenizer.bin").write_bytes(raw[STORIES15M_BYTES:])
    header = np.frombuffer(raw, dtype="<i4", count=7)
    dim, hidden, layers, heads, kv_heads, vocabulary, length = (int(v) for v in header)
    stream = _Stream(np.frombuffer(raw, dtype="<f4", offset=28, count=(STORIES15M_BYTES - 28) // 4))
    kv_dim = dim // heads * kv_heads
    tensors = {"model.embed_tokens.weight": stream.take(abs(vocabulary), dim)}
    stacks = {
        "input_layernorm": stream.take(layers, dim),
        "self_attn.q_proj": stream.take(layers, dim, dim),
        "self_attn.k_proj": stream.take(layers, kv_dim, dim),
        "self_attn.v_proj": stream.take(layers, kv_dim, dim),
        "self_attn.o_proj": stream.take(layers, dim, dim),
        "post_attention_layernorm": stream.take(layers, dim),
        "mlp.gate_proj": stream.take(layers, hidden, dim),
        "mlp.down_proj": stream.take(layers, dim, hidden),
        "mlp.up_proj": stream.take(layers, hidden, dim),
    }
    for part, stack in stacks.items():
        for i, weight in enumerate(stack):
            if part in ("self_attn.q_proj", "self_attn.k_proj"):
                weight = _halves(weight, heads if part.endswith("q_proj") else kv_heads)
            tensors[f"model.layers.{i}.{part}.weight"] = weight
    tensors["model.norm.weight"] = stream.take(dim)
    save_file(
        {k: np.ascontiguousarray(v) for k, v in tensors.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": dim,
        "intermediate_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": abs(vocabulary),
        "max_position_embeddings": length,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": vocabulary > 0,
        "rope_theta": 10000.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


@dataclass
class _Stream:
    """The weights in file order."""

    values: np.ndarray[tuple[int], np.dtype[np.float32]]
    position: int = 0

    def take(self, *shape: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        """The next block of that shape."""
        size = int(np.prod(shape))
        self.position += size
        return self.values[self.position - size : self.position].reshape(shape)


def _halves(
    weight: np.ndarray[tuple[int, ...], np.dtype[np.float32]], heads: int
) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


class Tokenizer:
    """llama2.c's tokenizer: pieces with scores, the best-scored neighbouring pair merged first."""

    def __init__(self, path: Path) -> None:
        raw = path.read_bytes()
        self.pieces: list[bytes] = []
        self.scores: list[float] = []
        position = 4
        while position < len(raw):
            self.scores.append(float(np.frombuffer(raw, "<f4", 1, position)[0]))
            length = int.from_bytes(raw[position + 4 : position + 8], "little")
            self.pieces.append(raw[position + 8 : position + 8 + length])
            position += 8 + length
        # a character may stand twice, as a raw byte (numbers 3 to 258) and as a piece: the piece, later, is meant
        self.number = {piece: i for i, piece in enumerate(self.pieces)}

    def encode(self, text: str) -> list[int]:
        """Token numbers of a text, the beginning-of-sequence token first."""
        tokens = [self.number[b" "]] if text else []
        for character in text:
            raw = character.encode()
            tokens += [self.number[raw]] if raw in self.number else [byte + 3 for byte in raw]
        while True:
            best, where, merged = -1e10, -1, -1
            for i in range(len(tokens) - 1):
                number = self.number.get(self.pieces[tokens[i]] + self.pieces[tokens[i + 1]])
                if number is not None and self.scores[number] > best:
                    best, where, merged = self.scores[number], i, number
            if where < 0:
                return [1, *tokens]
            tokens[where : where + 2] = [merged]
