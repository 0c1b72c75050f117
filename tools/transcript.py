"""Run every command on the embedded networks and write what it prints into ``docs/transcript.md``.

    python tools/transcript.py

``tests/cli/test_answers.py`` runs the same commands at 80 and 120 columns and checks the rules of the output.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from strati import embedded

PAGE = Path(__file__).parents[1] / "docs" / "transcript.md"


@dataclass(frozen=True)
class Line:
    """A command line and a word of its output that a reader needs most."""

    words: str
    key: str


LINES = (
    Line("inspect model.safetensors", "shape"),
    Line("scan model.safetensors", "state"),
    Line("compare initial.safetensors model.safetensors", "changed"),
    Line("lineage initial.safetensors model.safetensors", "is a fine-tune of"),
    Line("check model.safetensors", "no damage found"),
    Line(
        "study model.safetensors --data digits.npz --truncate rank=2,8,32 --out measured -j 1",
        "Intact accuracy",
    ),
    Line("audit measured --resamples 50", "metric"),
    Line("plan measured --budget parameters=0.6 --json plan.json", "choice"),
    Line("apply plan.json model.safetensors --out small", "parameters"),
    Line("llc model.safetensors --data digits.npz --seconds 2", "learning coefficient"),
    Line("influence model.safetensors --data digits.npz --rows 30 --chains 8 --draws 60", "influence"),
    Line("degeneracy model.safetensors --data digits.npz", "parameters"),
    Line("curvature model.safetensors --data digits.npz", "eigenvalue"),
    Line("basis model.safetensors --data digits.npz", "directions"),
    Line("track initial.safetensors model.safetensors --steps 0,1000 --out run", "stable rank"),
    Line("shuffle llama --out pieces", "pieces"),
    Line("reassemble pieces", "block"),
    Line("identify llama llama", "block"),
    Line("explain noise-like", "noise-like"),
    Line("report plan.json -o page.html", "page.html"),
)


def prepare(folder: Path) -> None:
    """Copy the embedded networks and data, and make a small Llama with random weights."""
    import json

    import numpy as np
    from safetensors.numpy import save_file

    for source, name in (
        ("digits-mlp.safetensors", "model.safetensors"),
        ("digits-mlp-init.safetensors", "initial.safetensors"),
        ("digits.npz", "digits.npz"),
    ):
        shutil.copy(embedded.path(source), folder / name)
    rng = np.random.default_rng(0)
    shapes = {
        "self_attn.q_proj": (16, 16), "self_attn.k_proj": (8, 16), "self_attn.v_proj": (8, 16),
        "self_attn.o_proj": (16, 16), "mlp.gate_proj": (24, 16), "mlp.up_proj": (24, 16), "mlp.down_proj": (16, 24),
        "input_layernorm": (16,), "post_attention_layernorm": (16,),
    }  # fmt: skip
    tensors = {
        f"model.layers.{block}.{name}.weight": (0.1 * rng.normal(size=shape) + (len(shape) == 1)).astype("f4")
        for block in range(2)
        for name, shape in shapes.items()
    }
    tensors["model.embed_tokens.weight"] = rng.normal(size=(30, 16)).astype("f4")
    tensors["model.norm.weight"] = np.ones(16, "f4")
    (folder / "llama").mkdir()
    save_file(tensors, folder / "llama" / "model.safetensors")
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_attention_heads": 4,
        "num_key_value_heads": 2, "hidden_size": 16, "num_hidden_layers": 2, "rope_theta": 1e4,
        "tie_word_embeddings": True, "vocab_size": 30,
    }  # fmt: skip
    (folder / "llama" / "config.json").write_text(json.dumps(config))


def transcript() -> str:
    """The page: every command with its output at 80 columns."""
    parts = ["# Example output of every command", "", "The embedded networks, in a terminal of 80 columns"]
    parts[-1] += " (`python tools/transcript.py`)."
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        for line in LINES:
            done = subprocess.run(
                [sys.executable, "-m", "strati.cli.main", *shlex.split(line.words)],
                cwd=folder, env=os.environ | {"COLUMNS": "80"}, capture_output=True, text=True, check=False,
            )  # fmt: skip
            text = re.sub(r"[ ]+$", "", done.stdout + done.stderr, flags=re.MULTILINE).replace(name, ".")
            parts += ["", "```text", f"$ strati {line.words}", text.rstrip("\n"), "```"]
    return "\n".join(parts) + "\n"


def main() -> None:
    """Write the page."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    PAGE.write_text(transcript(), encoding="utf-8")


if __name__ == "__main__":
    main()
