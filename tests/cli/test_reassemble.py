"""``strati reassemble`` as a user meets it: real processes, real files."""

import json
import subprocess
import sys

import numpy as np
import pytest
from command import run_strati

from strati.cli.reassemble import PAIRINGS, SEEDS
from strati.reassembly.residual.network import activation
from strati.reassembly.residual.order import Seed
from strati.reassembly.residual.pairing import Score


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small random network dropped into pieces and a CSV."""
    place = tmp_path_factory.mktemp("net")
    (place / "pieces").mkdir()
    rng = np.random.default_rng(0)
    layers = []
    for _ in range(4):
        for rows, columns in ((12, 6), (6, 12)):
            k = 1 / np.sqrt(columns)
            layers.append(
                (rng.uniform(-k, k, (rows, columns)).astype("f4"), rng.uniform(-k, k, rows).astype("f4"))
            )
    layers.append((rng.standard_normal((1, 6)).astype("f4"), np.zeros(1, "f4")))
    x = z = rng.standard_normal((400, 6)).astype("f4")
    for (W, w), (V, v) in zip(layers[:-1:2], layers[1:-1:2], strict=True):
        z = z + activation("relu").value(z @ W.T + w) @ V.T + v
    pred = z @ layers[-1][0].T + layers[-1][1]
    shuffle = rng.permutation(9)
    for number, k in enumerate(shuffle):
        np.savez(place / "pieces" / f"piece_{number}.npz", weight=layers[k][0], bias=layers[k][1])
    names = [f"measurement_{c}" for c in range(6)] + ["pred"]
    rows = [",".join(f"{v:.9g}" for v in row) for row in np.hstack([x, pred]).tolist()]
    (place / "data.csv").write_text("\n".join([",".join(names), *rows]) + "\n")
    (place / "truth.json").write_text(json.dumps([int(k) for k in np.argsort(shuffle)]))
    return place


def test_json_on_stdout_is_all_there_is(folder):
    done = run_strati("reassemble", folder / "pieces", folder / "data.csv", "--json", "-")
    assert done.returncode == 0 and done.stderr == ""
    found = json.loads(done.stdout)
    assert found["exact"] is True and found["permutation"] == json.loads((folder / "truth.json").read_text())


def test_rebuilt_network_goes_on_to_scan(folder, tmp_path):
    out = tmp_path / "model.safetensors"
    done = run_strati("reassemble", folder / "pieces", folder / "data.csv", "--out", out)
    assert done.returncode == 0 and "exact" in done.stdout and f"wrote{out}" in "".join(done.stdout.split())
    scanned = run_strati("inspect", out, "--json", "-")
    assert scanned.returncode == 0
    layers = json.loads(scanned.stdout)["layers"]
    assert [layer["block"] for layer in layers if layer["block"] is not None] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_not_exact_writes_nothing_unless_forced(folder, tmp_path):
    lines = (folder / "data.csv").read_text().splitlines()
    wrong = tmp_path / "wrong.csv"
    noise = np.random.default_rng(1).standard_normal(len(lines) - 1)
    wrong.write_text(
        "\n".join(
            [lines[0], *(f"{row.rsplit(',', 1)[0]},{v:.6f}" for row, v in zip(lines[1:], noise, strict=True))]
        )
    )
    out = tmp_path / "model.safetensors"
    done = run_strati("reassemble", folder / "pieces", wrong, "--seconds", 1, "--out", out)
    assert done.returncode == 0 and not out.exists()
    assert "Not exact" in done.stdout and "do not look like this network's" in done.stdout
    done = run_strati("reassemble", folder / "pieces", wrong, "--seconds", 1, "--out", out, "--force", "-q")
    assert done.returncode == 0 and out.exists() and done.stdout == ""


def test_options_that_choose(folder):
    done = run_strati(
        "reassemble",
        folder / "pieces",
        folder / "data.csv",
        "--pairing",
        "gram",
        "--seed-order",
        "frobenius",
        "--inputs",
        "measurement_*",
        "--target",
        "pred",
        "--json",
        "-",
    )
    found = json.loads(done.stdout)
    assert found["pairing"]["score"] == "gram" and found["seed_order"]["method"] == "frobenius"


def edit(folder, tmp_path, change):
    text = (folder / "data.csv").read_text()
    path = tmp_path / "bad.csv"
    path.write_text(change(text))
    return path


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda t: t.replace("pred", "guess"), "no target column"),
        (lambda t: t.replace("measurement_5", "other"), "5 input columns"),
        (lambda t: "\n".join(line.split(",", 1)[1] for line in t.splitlines()), "5 input columns"),
        (lambda t: t.replace("\n", "\nword", 1), "is not a number"),
        (lambda t: t.splitlines()[0] + "\nnan,1,1,1,1,1,1\n", "not a finite number"),
        (lambda t: t + "1,2,3\n", "ragged"),
        (lambda _: "", "is empty"),
    ],
)
def test_bad_data_is_one_line(folder, tmp_path, change, why):
    bad = edit(folder, tmp_path, change)
    out, report = tmp_path / "m.safetensors", tmp_path / "r.json"
    done = run_strati("reassemble", folder / "pieces", bad, "--out", out, "--json", report)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("strati: error: ") and done.stderr.count("\n") == 1 and why in done.stderr
    assert not out.exists() and not report.exists()


def test_missing_piece_is_one_line(folder, tmp_path):
    import shutil

    shutil.copytree(folder / "pieces", tmp_path / "pieces")
    (tmp_path / "pieces" / "piece_4.npz").unlink()
    done = run_strati("reassemble", tmp_path / "pieces", folder / "data.csv")
    assert done.returncode == 2 and "missing piece 4" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "words", [(), ("only-pieces",), ("a", "b", "--activation", "swish"), ("a", "b", "--out", "/no/m")]
)
def test_bad_usage(words):
    done = run_strati("reassemble", *words)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and done.stdout == ""


def test_make_and_put_back(tmp_path):
    pytest.importorskip("torch")
    made = run_strati(
        "reassemble",
        "--make",
        tmp_path / "d",
        "--blocks",
        4,
        "--width",
        8,
        "--hidden",
        16,
        "--epochs",
        2,
        "--rows",
        600,
        "--outputs",
        2,
        "--activation",
        "tanh",
    )
    assert made.returncode == 0, made.stderr
    truth = json.loads((tmp_path / "d" / "answer.json").read_text())["permutation"]
    done = run_strati(
        "reassemble", tmp_path / "d", tmp_path / "d" / "data.csv", "--activation", "tanh", "--json", "-"
    )
    assert json.loads(done.stdout)["permutation"] == truth
    again = run_strati("reassemble", "--make", tmp_path / "d")
    assert again.returncode == 2 and "not an empty folder" in again.stderr


def test_the_choices_are_those_of_the_solver():
    assert set(PAIRINGS) == {"auto", "joint", *Score} and set(SEEDS) == {"auto", *Seed}


@pytest.mark.parametrize("puzzle", ["small", "public"])
def test_reading_and_solving_needs_few_imports(folder, puzzle, request):
    """Neither torch nor pandas, and scipy only where the scores do not separate the pairs."""
    words = [str(folder / "pieces"), str(folder / "data.csv")]
    if puzzle == "public":
        place = request.getfixturevalue("dropped_net")
        words = [str(place / "pieces"), str(place / "historical_data.csv")]
    code = (
        "import sys; from strati.cli.main import strati\n"
        f"strati.main(['reassemble', *{words!r}, '-q'], standalone_mode=False)\n"
        "print([m for m in ('torch', 'pandas', 'scipy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() in (["[]"] if puzzle == "public" else ["[]", "['scipy']"])
