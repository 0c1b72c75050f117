"""``strati basis`` as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from strati.cli.main import _run

WIDTHS = (6, 8, 7, 3)


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    rng = np.random.default_rng(0)
    tensors = {}
    for k in range(3):
        tensors[f"{2 * k}.weight"] = rng.normal(size=(WIDTHS[k + 1], WIDTHS[k])).astype(np.float32)
        tensors[f"{2 * k}.bias"] = rng.normal(size=WIDTHS[k + 1]).astype(np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    x = (rng.normal(size=(200, 4)) @ rng.normal(size=(4, 6))).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=x, y=rng.integers(0, 3, 200))
    return str(tmp_path / "model.safetensors"), str(tmp_path / "data.npz")


def test_json(files, tmp_path, capsys):
    out = tmp_path / "b.json"
    assert _run(["basis", files[0], "--data", files[1], "--json", str(out)], False) == 0
    result = json.loads(out.read_text())
    assert result["schema"] == "strati.basis/1"
    assert result["kind"] == "interaction"
    assert [layer["name"] for layer in result["layers"]] == ["input", "0", "2", "output"]
    assert result["layers"][0]["directions"] == 4
    assert all(len(layer["eigenvalues"]) == layer["directions"] for layer in result["layers"])
    assert {"layer", "source", "target", "strength"} == set(result["edges"][0])
    members = [tuple(m) for module in result["modules"] for m in module["members"]]
    counts = [layer["directions"] for layer in result["layers"]]
    assert all(0 <= direction < counts[layer] for layer, direction in members)
    assert {"epsilon", "objective", "balance"} <= set(result["modularity"])
    assert "of the effect on the output." in capsys.readouterr().out.splitlines()[0]


def test_the_same_seed_gives_the_same_result(files, capsys):
    texts = []
    for _ in range(2):
        assert _run(["basis", files[0], "--data", files[1], "--json", "-", "--seed", "3"], False) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    json.loads(texts[0])


def test_compare_and_page(files, tmp_path, capsys):
    out, page = tmp_path / "b.json", tmp_path / "b.html"
    words = ["basis", files[0], "--data", files[1], "--compare", "--json", str(out), "--html", str(page)]
    assert _run(words, False) == 0
    result = json.loads(out.read_text())
    kinds = {"interaction", "local", "pca", "neuron"}
    assert {row["kind"] for row in result["ablation"]} == kinds
    assert {row["basis"] for row in result["sparsity"]} == kinds
    full = {row["kind"]: row for row in result["ablation"]}  # the last row of each: everything kept
    assert all(row["loss"] < 1e-9 and 0 <= row["accuracy"] <= 1 for row in full.values())
    assert page.stat().st_size > 10_000
    assert "accuracy" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["local", "pca", "neuron"])
def test_kinds_and_number_of_modules(files, kind, capsys):
    words = ["basis", files[0], "--data", files[1], "--kind", kind, "--modules", "2", "--json", "-"]
    assert _run(words, False) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["kind"] == kind
    assert len(result["modules"]) == 2


def test_sparsify_writes_an_ordinary_checkpoint(files, tmp_path, capsys):
    out, report = tmp_path / "sparse.safetensors", tmp_path / "s.json"
    words = ["basis", files[0], "--data", files[1], "--sparsify", str(out), "--json", str(report)]
    assert _run(words, False) == 0
    result = json.loads(report.read_text())
    assert result["zeros_after"] >= 2 * 8 > result["zeros_before"] == 0  # two dependent inputs, eight readers
    from strati.io.to_module import as_module

    x = torch.from_numpy(np.load(files[1])["x"])
    with torch.no_grad():
        old, new = as_module(files[0])(x), as_module(out)(x)
    assert (old - new).abs().max() < 1e-4 * old.abs().max()
    assert "wrote" in capsys.readouterr().out


def test_bad_input_is_one_line(files, tmp_path, capsys):
    model, data = files
    narrow, empty = tmp_path / "narrow.npz", tmp_path / "empty.npz"
    np.savez(narrow, x=np.ones((10, 5)))
    np.savez(empty, x=np.ones((0, 6)))
    for words, part in [
        ([model, "--data", str(narrow)], "5 inputs a row"),
        ([model, "--data", str(empty)], ""),
        ([model, "--data", str(tmp_path / "none.npz")], "none.npz"),
        ([model, "--data", data, "--kind", "svd"], "svd"),
        ([model, "--data", data, "--epsilon", "-1"], "epsilon"),
        ([model, "--data", data, "--sites", "nothing"], "no module"),
        ([model, "--data", data, "--sparsify", str(tmp_path)], "directory"),
        ([data, "--data", data], ""),
        ([model], "--data"),
    ]:
        assert _run(["basis", *words], False) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert said.err.startswith("strati: error: ") and said.err.count("\n") == 1 and part in said.err


def test_transformer_directory(tmp_path, capsys):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=20, n_positions=8)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt")
    np.save(tmp_path / "tokens.npy", np.random.default_rng(0).integers(0, 20, (70, 5)))
    capsys.readouterr()
    for sites in ("residual", "mlp"):
        words = ["basis", str(tmp_path / "gpt"), "--data", str(tmp_path / "tokens.npy"), "--sites", sites]
        assert _run([*words, "--json", "-"], False) == 0
        result = json.loads(capsys.readouterr().out)
        assert len(result["layers"]) == 4
        assert any(flag["code"] == "probes" for flag in result["warnings"])
