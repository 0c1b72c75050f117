"""``strati inspect`` as a user runs it."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from command import run_strati as run


@pytest.fixture
def model(tmp_path):
    from safetensors.numpy import save_file

    path = tmp_path / "gpt2.safetensors"
    tensors = {
        "wte.weight": np.ones((20, 8)),
        "h.0.attn.c_attn.weight": np.eye(8, 24),
        "h.0.attn.c_attn.bias": np.zeros(24),
        "conv.weight": np.ones((4, 3, 2, 2)),
        "ids": np.arange(4).reshape(2, 2),
        "[red]w\x1b[31m\u202e.weight": np.ones((3, 3)),
    }
    save_file({k: v.astype(np.float32) if v.dtype == float else v for k, v in tensors.items()}, path)
    return path


def test_table(model):
    done = run("inspect", model, env=os.environ | {"COLUMNS": "200"})
    assert done.returncode == 0
    assert done.stderr == ""
    assert "attention.qkv" in done.stdout
    assert "transposed" in done.stdout
    assert "skipped 1: dtype int64 is not analysed: ids" in done.stdout
    assert "[red]w" in done.stdout  # markup is shown, not obeyed
    assert "\x1b" not in done.stdout
    assert "\u202e" not in done.stdout
    lines = done.stdout.splitlines()
    assert lines[0].startswith("gpt2.safetensors: safetensors, 433 parameters (")
    assert lines[-1] == f"next: strati scan {model}"
    assert "c_attn.bias" not in "".join(line for line in lines if not line.startswith("skipped"))
    listed = run("inspect", model, "--all").stdout
    assert any("h.0.attn.c_attn.bias" in line and "96" in line for line in listed.splitlines())


@pytest.mark.parametrize("width", [60, 80, 120])
def test_every_width(model, width):
    import strati
    from strati.core.display import as_text

    lines = as_text(strati.inspect(strati.embedded.path("digits-mlp.safetensors")).summary(), width=width)
    assert max(map(len, lines.splitlines())) <= width
    assert len(lines.split(". ")[0].splitlines()[0]) <= 100


def test_totals_by_role_and_block(tmp_path):
    """Every byte is counted once: in a role, in a block, and in the whole."""
    import strati

    tensors = {
        f"h.{i}.{name}": np.ones(shape, dtype)
        for i in range(3)
        for name, shape, dtype in (
            ("mlp.c_fc.weight", (8, 32), np.float32),
            ("mlp.c_proj.weight", (32, 8), np.float16),
            ("mlp.c_fc.bias", (32,), np.float32),
        )
    }
    found = strati.inspect(tensors | {"wte.weight": np.ones((20, 8), np.float32)}).to_dict()
    totals = found["totals"]
    sizes = {row["role"]: (row["matrices"], row["parameters"], row["bytes"]) for row in totals["roles"]}
    assert sizes == {"mlp.in": (3, 768, 3072), "mlp.out": (3, 768, 1536), "embedding": (1, 160, 640)}
    blocks = {row["block"]: row["bytes"] for row in totals["blocks"]}
    assert blocks == {0: 1536, 1: 1536, 2: 1536, None: 640}
    assert totals["bytes"] == sum(tensor.nbytes for tensor in tensors.values()) + 640
    assert [row["bytes"] for row in found["others"]] == [128] * 3


def test_json(model, tmp_path):
    done = run("inspect", model, "--json", "-")
    assert done.returncode == 0
    result = json.loads(done.stdout)
    assert result["schema"] == "strati.inspect/1"
    assert result["network"] == {"path": str(model), "format": "safetensors", "parameters": 433, "tensors": 6}
    rows = {row["name"]: row for row in result["layers"]}
    row = rows["h.0.attn.c_attn.weight"]
    wanted = {"role": "attention.qkv", "block": 0, "kind": "linear", "rows": 24, "cols": 8, "aspect": 3.0}
    assert {key: row[key] for key in wanted} == wanted
    assert {"parameters", "view", "dtype", "warnings"} <= set(row)
    assert row["dtype"] == "float32"
    assert rows["conv.weight"]["rows"] == 4
    assert {s["name"] for s in result["skipped"]} == {"ids", "h.0.attn.c_attn.bias"}
    file = tmp_path / "out.json"
    assert run("inspect", model, "--json", file, "--quiet").stdout == ""
    assert json.loads(file.read_text()) == result


def test_options(model):
    split = json.loads(run("inspect", model, "--split-qkv", "--conv", "flatten", "--json", "-").stdout)
    names = [row["name"] for row in split["layers"]]
    assert "h.0.attn.c_attn.weight[k]" in names
    assert next(r for r in split["layers"] if r["name"] == "conv.weight")["cols"] == 12


@pytest.mark.parametrize("case", ["missing", "empty", "lying", "pipe", "directory", "usage"])
def test_bad_input_is_one_line_and_exit_2(tmp_path, case):
    path = tmp_path / "a.safetensors"
    if case == "empty":
        path.touch()
    elif case == "lying":
        path.write_bytes(struct.pack("<Q", 2**50) + b"{}")
    elif case == "pipe":
        import os

        os.mkfifo(path)
    elif case == "directory":
        path.mkdir()
    words = ["inspect"] if case == "usage" else ["inspect", path]
    done = run(*words)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("strati: error: ")
    assert done.stderr.count("\n") == 1


def test_a_wrong_ending_is_said(tmp_path, model):
    path = tmp_path / "a.pt"
    path.write_bytes(model.read_bytes())
    done = run("inspect", path)
    assert done.returncode == 0
    assert "its ending says torch, its content is safetensors" in done.stdout


def test_help_shows_a_runnable_example():
    done = run("inspect", "--help")
    assert done.returncode == 0
    assert "strati inspect model.safetensors" in done.stdout


def test_a_closed_pipe_is_no_error(model):
    done = subprocess.run(
        f"{sys.executable} -m strati.cli.main inspect {model} | head -1",
        shell=True,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""


def test_the_page_shows_what_the_command_prints():
    """The first example of docs/inspect.md, run."""
    root = Path(__file__).resolve().parents[2]
    block = (root / "docs" / "inspect.md").read_text().split("```console\n$ ")[1].split("```")[0]
    words, _, expected = block.partition("\n")
    done = run(*words.split()[1:], cwd=root, expect=0)
    assert done.stdout == expected
