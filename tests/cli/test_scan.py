"""``strati scan`` as a user runs it."""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from command import run_strati
from safetensors.numpy import save_file

FIELDS = """
name role block kind rows cols aspect parameters hard_rank stable_rank entropy frobenius_norm spectral_norm alpha
alpha_stderr xmin ks_distance tail_size alpha_weighted log_alpha_norm mu mp_sigma mp_lambda_minus mp_lambda_plus
mp_soft_rank mp_ks_distance spikes quasi_null state phase phase_evidence view warnings
""".split()  # noqa: SIM905


def run(*words: object) -> subprocess.CompletedProcess[str]:
    return run_strati("scan", *words)


def strict(text: str) -> dict:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} in JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(0)
    broken = rng.normal(size=(30, 40))
    broken[3, 4] = np.nan
    tensors = {
        "h.0.attn.c_attn.weight": rng.normal(size=(32, 96)),
        "h.0.attn.c_attn.bias": np.zeros(96),
        "h.0.mlp.c_fc.weight": rng.standard_t(1.5, size=(32, 128)),
        "broken.weight": broken,
        "zero.weight": np.zeros((20, 20)),
        "tiny.weight": rng.normal(size=(3, 7)),
        "conv.weight": rng.normal(size=(24, 16, 3, 3)),
        "[bold]\x1b[31m\u202eevil.weight": rng.normal(size=(40, 30)),
    }
    path = tmp_path_factory.mktemp("scan") / "model.safetensors"
    save_file({name: W.astype(np.float32) for name, W in tensors.items()}, path)
    return path


@pytest.fixture(scope="module")
def result(model: Path) -> dict:
    done = run(model, "--json", "-", "--eigenvalues")
    assert (done.returncode, done.stderr) == (0, "")
    return strict(done.stdout)


def test_json_has_every_field(result: dict) -> None:
    assert result["schema"] == "strati.scan/1"
    assert set(result["network"]) == {"path", "format", "parameters", "tensors"}
    for layer in result["layers"]:
        assert list(layer) == [*FIELDS, "eigenvalues"]
        assert layer["eigenvalues"] == sorted(layer["eigenvalues"])
    assert {item["name"] for item in result["skipped"]} == {"h.0.attn.c_attn.bias"}
    assert len(result["layers"]) == 7


def test_bad_layers_do_not_stop_the_rest(result: dict) -> None:
    layers = {layer["name"]: layer for layer in result["layers"]}
    codes = {name: {w["code"] for w in layer["warnings"]} for name, layer in layers.items()}
    assert codes["broken.weight"] == {"not-finite"}
    assert layers["broken.weight"]["alpha"] is None and layers["broken.weight"]["phase"] is None
    assert codes["zero.weight"] == {"constant"} and layers["zero.weight"]["hard_rank"] == 0
    assert codes["tiny.weight"] == {"few-eigenvalues"} and layers["tiny.weight"]["hard_rank"] == 3
    assert layers["h.0.mlp.c_fc.weight"]["phase"] == "heavy-tailed"
    assert "noise-like" in codes["conv.weight"]
    conv = layers["conv.weight"]
    assert (conv["rows"], conv["cols"], conv["aspect"], len(conv["eigenvalues"])) == (24, 16, 1.5, 9 * 16)


def test_table_is_safe_and_names_the_worst(model: Path) -> None:
    done = run(model)
    assert done.returncode == 0 and done.stderr == ""
    assert "\x1b" not in done.stdout and "\u202e" not in done.stdout
    assert "check broken: " in done.stdout and "(not-finite)" in done.stdout
    assert "[bold]\\x1b[31m\\u202eevil" in done.stdout


def test_a_model_in_the_cache_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "hub" / "models--org--tiny" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0" * 40)
    save_file({"fc.weight": np.random.default_rng(0).normal(size=(20, 30))}, snapshot / "model.safetensors")
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    assert run("org/tiny").stdout.startswith("org/tiny: ")
    assert run(f"org/tiny@{'0' * 40}").stdout.startswith("org/tiny: ")


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("count", [1, 2, 30])
def test_the_answer_is_one_line_of_100_characters(tmp_path: Path, trained: bool, count: int) -> None:
    """Layers of noise, of which most get a direction; one is too small to tell, one broken."""
    rng = np.random.default_rng([7, count])
    tensors = {f"layers.{i}.weight": rng.normal(size=(64, 60)) for i in range(count)}
    if trained:
        for number in range(count):
            tensors[f"layers.{number}.weight"][:, 0] += 5
        tensors |= {"broken.weight": np.full((3, 3), np.nan), "noise.weight": rng.normal(size=(60, 60))}
    tensors["small.weight"] = rng.normal(size=(9, 9))
    path = tmp_path / f"{'long-name-' * 9}.safetensors"
    save_file(tensors, path)
    first, second = run(path, "--wide").stdout.splitlines()[:2]
    assert len(first) <= 100 and ("check 2 of" if trained else "no trace of training") in first
    assert f"{count + 1 + 2 * trained} matrices" in second and "1 is too small to tell." in second


def test_any_number_of_jobs_gives_the_same_json(model: Path, tmp_path: Path) -> None:
    files = []
    for jobs in (1, 2, 5):
        path = tmp_path / f"{jobs}.json"
        assert run(model, "--jobs", jobs, "--bootstrap", 5, "--json", path, "--quiet").returncode == 0
        files.append(path.read_bytes())
    assert files[0] == files[1] == files[2]
    layer = strict(files[0].decode())["layers"][0]
    assert 0 <= layer["tail_pvalue"] <= 1
    assert {"truncated_power_law", "lognormal", "exponential"} <= set(layer["tail_alternatives"])


def test_options(model: Path, tmp_path: Path) -> None:
    done = run(model, "--split-qkv", "--conv", "flatten", "--json", "-")
    names = {layer["name"]: layer for layer in strict(done.stdout)["layers"]}
    assert sum(name.startswith("h.0.attn") for name in names) == 3
    assert (names["conv.weight"]["rows"], names["conv.weight"]["cols"]) == (24, 144)
    for ending in (".csv", ".parquet"):
        path = tmp_path / f"table{ending}"
        assert run(model, "--export", path, "--quiet").returncode == 0
    with (tmp_path / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["name"] for row in rows][-1].endswith("evil.weight") or len(rows) == 7
    import pandas as pd

    assert len(pd.read_parquet(tmp_path / "table.parquet")) == 7


def test_a_stricter_level_finds_fewer_spikes(model: Path) -> None:
    loose, strict_level = (
        sum(
            layer["spikes"] or 0
            for layer in strict(run(model, "--level", level, "--json", "-").stdout)["layers"]
        )
        for level in (0.9, 0.001)
    )
    assert strict_level < loose


@pytest.mark.parametrize(
    "words",
    [
        ("--level", "0"),
        ("--level", "1.5"),
        ("--bootstrap", "-1"),
        ("--export", "x.xlsx"),
        ("--export", "/no/x.csv"),
    ],
)
def test_bad_options_are_one_line(model: Path, tmp_path: Path, words: tuple[str, str]) -> None:
    done = run(model, *words)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("strati: error: ") and done.stderr.count("\n") == 1


def test_missing_file_is_one_line(tmp_path: Path) -> None:
    done = run(tmp_path / "absent.safetensors", "--json", tmp_path / "out.json")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert not (tmp_path / "out.json").exists()


def test_torch_is_not_imported(model: Path) -> None:
    code = (
        "import sys; from strati.cli.main import strati as s\n"
        f"s.main(['scan', {str(model)!r}, '--quiet'], standalone_mode=False)\n"
        "assert 'torch' not in sys.modules and 'matplotlib' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_every_width_keeps_names_and_states(tmp_path: Path, width: int) -> None:
    """No line is wider than the terminal, the first sentence is short, the last line is a command."""
    import strati
    from strati.core.display import as_text

    rng = np.random.default_rng(0)
    names = [f"encoder.layer.{i}.attention.output.dense.weight" for i in (2, 10)] + ["pooler.dense.weight"]
    file = tmp_path / "model.safetensors"
    save_file({name: rng.normal(size=(60, 60)).astype(np.float32) for name in names}, file)
    lines = as_text(strati.scan(file).summary(), width=width).splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines[0].split(". ")[0]) <= 100 and "no trace of training" in lines[0]
    assert sum("random-like" in line for line in lines) >= 3
    assert lines[-1].startswith("next: strati ")
    if width >= 80:
        assert all(any(name.removesuffix(".weight") in line for line in lines) for name in names)


def test_a_healthy_network_gets_no_mark() -> None:
    """The embedded network has 98 % accuracy: two layers have learned, one is too small to tell."""
    import strati
    from strati.core.display import as_text

    scan = strati.scan(strati.embedded.path("digits-mlp.safetensors"))
    assert [str(item.state) for item in scan] == ["learned", "learned", "too-small"]
    text = as_text(scan.summary(), width=80)
    assert "nothing wrong" in text.splitlines()[0] and "!" not in text and "±" not in text
    start = strati.scan(strati.embedded.path("digits-mlp-init.safetensors"))
    assert [str(item.state) for item in start] == ["random-like", "random-like", "too-small"]
    assert as_text(start.summary(), width=80).count("!") == 2


def test_columns_and_order_are_the_users(model: Path) -> None:
    import strati
    from strati.core.display import TableOptions, as_text

    scan = strati.scan(model)

    def shown(*columns: str, sort: str | None = None) -> list[str]:
        view = TableOptions(columns, sort)
        return as_text(dataclasses.replace(scan, view=view).summary(), width=400).splitlines()

    assert any("KS" in line and "phase" in line and "warnings" in line for line in shown("all"))
    rows = [
        line for line in shown("frobenius_norm", sort="-frobenius_norm") if line.startswith(("   ", " !"))
    ]
    norms = [float(line.split()[-1].replace(",", "")) for line in rows if line.split()[-1][0].isdigit()]
    assert len(norms) >= 5 and norms == sorted(norms, reverse=True)
    done = run(model, "--columns", "alfa")
    assert done.returncode == 2 and "alpha" in done.stderr and done.stderr.count("\n") == 1
    done = run(model, "--sort", "stable-rank")
    assert done.returncode == 2 and "stable_rank" in done.stderr
    narrow = os.environ | {"COLUMNS": "80"}
    done = run_strati("scan", model, "--columns", "all", "--sort=-alpha", "--wide", env=narrow)
    assert done.returncode == 0 and any(
        "quasi-" in line and "alpha" in line for line in done.stdout.splitlines()
    )
    done = run_strati("scan", model, "--columns", "all", env=narrow)
    assert max(map(len, done.stdout.splitlines())) <= 80 and "too narrow: " in done.stdout


def test_rows_sort_by_number(tmp_path: Path) -> None:
    import strati

    file = tmp_path / "model.safetensors"
    save_file({f"layers.{i}.weight": np.eye(4, dtype=np.float32) for i in (10, 2, 1)}, file)
    assert [item.layer.name for item in strati.scan(file)] == [f"layers.{i}.weight" for i in (1, 2, 10)]


def test_a_layer_by_its_module_or_with_the_nearest_name(model: Path) -> None:
    import strati

    s = strati.scan(model)
    assert s["conv"] is s["conv.weight"] and "conv" in s and "con" not in s
    with pytest.raises(strati.StratiError, match=r"did you mean 'conv\.weight'"):
        s["conv.wieght"]


def test_python_objects(model: Path) -> None:
    import strati

    s = strati.scan(strati.open(model))
    assert s["conv.weight"].pooled.matrices == 9
    assert s.table["name"].iloc[0] in s and len(s) == 7
    assert s.table.columns[0] == s.frame().columns[0] == "name" and "state" in s.table
    assert set(s.table) < set(s.frame()) and set(FIELDS) <= set(s.frame())
    assert "evil" in s._repr_html_() and "\u202e" not in s._repr_html_()
    with pytest.raises(strati.StratiError, match="no such layer"):
        s["absent"]
    with pytest.raises(strati.StratiError, match="level"):
        strati.scan(model, level=0.0)


def test_pictures(model: Path, tmp_path: Path) -> None:
    import strati

    s = strati.scan(model)
    for number, figure in enumerate((s.plot(), s["conv.weight"].plot(), s["tiny.weight"].plot())):
        path = tmp_path / f"{number}.svg"
        figure.savefig(path)
        assert path.stat().st_size > 5000
    with pytest.raises(strati.StratiError, match="nothing to draw"):
        s["broken.weight"].plot()


def test_estimate_reads_nothing_and_says_what_it_costs(model: Path, tmp_path: Path) -> None:
    done = run(model, "--estimate", "--json", tmp_path / "e.json")
    assert done.returncode == 0 and done.stderr == ""
    assert "floating-point operations" in done.stdout and "memory: at most" in done.stdout
    found = strict((tmp_path / "e.json").read_text())
    assert found["schema"] == "strati.estimate/1" and found["matrices"] == 6 + 9
    from strati.schemas import schema

    jsonschema.Draft202012Validator(schema("strati.estimate/1")).validate(found)
    assert found["flops"] > 0 and found["seconds"] > 0 and found["memory"] > 0
    assert "alpha" not in done.stdout


@pytest.mark.parametrize("option", ["--workers", "--jobs", "-j"])
def test_workers_and_its_aliases(model: Path, option: str) -> None:
    assert run(model, option, 1, "--layers", "conv", "--quiet").returncode == 0


def test_layers_are_selected(model: Path) -> None:
    found = strict(run(model, "--layers", "conv", "--layers", "h.*", "--json", "-").stdout)
    names = {layer["name"] for layer in found["layers"]}
    assert names == {"h.0.attn.c_attn.weight", "h.0.mlp.c_fc.weight", "conv.weight"}
    done = run(model, "--layers", "conf")
    assert done.returncode == 2 and "conv" in done.stderr and done.stderr.count("\n") == 1


def test_progress_shows_layers_bytes_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal: layers done of all, gigabytes done of all, time left by the work of the layers."""
    import io
    import time

    from strati.jobs.progress import Sizes, _Count, progress

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    sizes = Sizes(work={"a": 1e9, "b": 9e9}, bytes={"a": 10**9, "b": 3 * 10**9})
    with progress("scan", 2, sizes=sizes) as tick:
        tick("a")
    assert terminal.getvalue() == ""  # short work shows no bar
    monkeypatch.setattr("strati.jobs.progress.PATIENCE", 0.0)
    with progress("scan", 2, sizes=sizes, resume="strati scan again") as tick:
        tick.expect(2)
        time.sleep(0.05)
        tick("a")
        tick("b")
        assert tick.resume == "strati scan again"
    assert "layers" in terminal.getvalue() and "GB" in terminal.getvalue()
    count = _Count(2, sizes)
    count.add("b")
    assert count.text() == "1/2 layers, 3.00/4.00 GB" and count.work_done / count.work_total == 0.9
    beyond = _Count(2, None)
    for name in "abc":
        beyond.add(name)
    assert beyond.text() == "3/3"  # never more than its total
