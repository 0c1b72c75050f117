"""``strati degeneracy`` as a user calls it, and what it says to bad input."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from command import run_strati
from safetensors.numpy import save_file

from strati import embedded
from strati.cli.main import main


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(["degeneracy", *words])
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, err


@pytest.fixture
def small(tmp_path: Path) -> tuple[str, str]:
    """A network 5-6-3 with a dead neuron, and data of rank 3."""
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((6, 5)).astype(np.float32)
    bias = rng.standard_normal(6).astype(np.float32)
    weight[0], bias[0] = 0, -1
    state = {"fc1.weight": weight, "fc1.bias": bias}
    state |= {
        "fc2.weight": rng.standard_normal((3, 6)).astype(np.float32),
        "fc2.bias": np.zeros(3, np.float32),
    }
    save_file(state, tmp_path / "net.safetensors")
    np.savez(tmp_path / "data.npz", x=rng.standard_normal((200, 3)) @ rng.standard_normal((3, 5)))
    return str(tmp_path / "net.safetensors"), str(tmp_path / "data.npz")


def test_json_on_stdout_and_nothing_else(capsys: pytest.CaptureFixture[str], small: tuple[str, str]) -> None:
    code, out, err = run(capsys, small[0], "--data", small[1], "--json", "-")
    form = json.loads(out)
    assert (code, err, form["schema"], form["method"]) == (0, "", "strati.degeneracy/1", "exact")
    assert form["parameters"] == 36 + 21
    # by hand: 5 living neurons see 4 dimensions each less their scale, the output 3 x (5 + 1)
    assert form["effective"] == 5 * 3 + 3 * 6
    assert [layer["name"] for layer in form["layers"]] == ["fc1", "fc2"]
    assert form["layers"][0]["activation_rank"] == 4


def test_the_table_and_the_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(embedded.path("digits-mlp.safetensors")), "--data", str(embedded.path("digits.npz"))]
    code, out, _ = run(capsys, *words, "--structural")
    assert code == 0
    assert out.splitlines()[0] == "The network uses at most 11,203 of 13,098 parameters on these data."


def test_output_files(capsys: pytest.CaptureFixture[str], small: tuple[str, str], tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    code, out, _ = run(
        capsys, small[0], "--data", small[1], "--epsilon", "0.001", "--json", str(target), "--quiet"
    )
    assert (code, out) == (0, "")
    form = json.loads(target.read_text())
    assert form["epsilon"] == 0.001
    assert form["effective_at_epsilon"] <= form["effective"]


def test_csv_data(capsys: pytest.CaptureFixture[str], small: tuple[str, str], tmp_path: Path) -> None:
    x = np.load(small[1])["x"]
    np.savetxt(tmp_path / "d.csv", x, delimiter=",", header="a,b,c,d,e", comments="", fmt="%.17g")
    results = [
        run(capsys, small[0], "--data", d, "--json", "-")[1] for d in (small[1], str(tmp_path / "d.csv"))
    ]
    assert json.loads(results[0]) == json.loads(results[1])


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"x": np.zeros((4, 9))}, "9 inputs a row"),
        ({"x": np.full((4, 5), np.inf)}, "finite"),
        ({"x": np.zeros((0, 5))}, "empty"),
    ],
)
def test_bad_data_is_one_line(
    capsys: pytest.CaptureFixture[str],
    small: tuple[str, str],
    tmp_path: Path,
    arrays: dict[str, np.ndarray],
    words: str,
) -> None:
    np.savez(tmp_path / "bad.npz", **arrays)
    target = tmp_path / "never.json"
    code, out, err = run(capsys, small[0], "--data", str(tmp_path / "bad.npz"), "--json", str(target))
    assert (code, out) == (2, "")
    assert err.startswith("strati: error: ")
    assert words in err
    assert err.count("\n") == 1
    assert not target.exists()


def test_other_bad_input_is_one_line(
    capsys: pytest.CaptureFixture[str], small: tuple[str, str], tmp_path: Path
) -> None:
    save_file({"conv.weight": np.zeros((2, 2, 3, 3), np.float32)}, tmp_path / "conv.safetensors")
    for words in (
        [str(tmp_path / "conv.safetensors"), "--data", small[1]],
        [str(tmp_path / "missing.safetensors"), "--data", small[1]],
        [small[0], "--data", str(tmp_path / "missing.npz")],
        [small[0]],
        [small[0], "--data", small[1], "--activation", "swish"],
        [small[0], "--data", small[1], "--epsilon", "-1"],
        [small[0], "--data", small[1], "--epsilon", "nan"],
    ):
        code, out, err = run(capsys, *words)
        assert (code, out) == (2, ""), words
        assert err.startswith("strati: error: "), words
        assert err.count("\n") == 1, words


def test_help_has_an_example() -> None:
    done = run_strati("degeneracy", "--help", expect=0)
    assert "strati degeneracy model.safetensors --data data.npz" in done.stdout
