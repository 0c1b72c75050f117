"""A scan kept in a folder: stopped anywhere it goes on, and the result is the same to the last byte."""

from __future__ import annotations

import json
import os
import resource
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

import strati
from strati.spectra.layerwise import STORE, from_record, to_record
from strati.spectra.spectrum import spectrum


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(0)
    tensors = {f"layers.{i}.weight": rng.normal(size=(360, 320)) for i in range(14)}
    tensors |= {"conv.weight": rng.normal(size=(24, 16, 3, 3)), "heavy.weight": rng.standard_t(2, (90, 60))}
    broken = rng.normal(size=(20, 30))
    broken[2, 3] = np.nan
    tensors |= {"broken.weight": broken, "eye.weight": np.eye(40), "one.weight": np.ones((12, 12))}
    path = tmp_path_factory.mktemp("resume") / "model.safetensors"
    save_file({name: W.astype(np.float32) for name, W in tensors.items()}, path)
    return path


@pytest.fixture(scope="module")
def calm(model: Path) -> str:
    return strati.scan(model, eigenvalues=True).to_json()


def command(model: Path, out: Path, *words: object) -> list[str]:
    start = [sys.executable, "-m", "strati.cli.main", "scan", str(model), "--out", str(out), "--eigenvalues"]
    return [*start, "--quiet", "--json", str(out) + ".json", *map(str, words)]


def rows(out: Path) -> int:
    if not (out / STORE).exists():
        return 0
    with sqlite3.connect(out / STORE) as db:
        return int(db.execute("SELECT count(*) FROM units").fetchone()[0])


def started(words: list[str], out: Path, enough: int) -> subprocess.Popen[bytes]:
    """The command, once it has finished so many layers."""
    process = subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    until = time.monotonic() + 90
    while rows(out) < enough and process.poll() is None and time.monotonic() < until:
        time.sleep(0.01)
    return process


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(1, 60),
    st.integers(1, 60),
    st.sampled_from(
        ["noise", "spiked", "heavy", "zero rows", "rank one", "orthogonal", "nan", "zero", "slices"]
    ),
    st.sampled_from([0, 8]),
)
def test_records_are_exact(seed: int, rows: int, columns: int, kind: str, bootstrap: int) -> None:
    rng = np.random.default_rng(seed)
    W: object = rng.normal(size=(rows, columns))
    if kind == "spiked":
        W = W + 2 * np.outer(rng.normal(size=rows), rng.normal(size=columns))
    elif kind == "heavy":
        W = rng.standard_t(1.5, size=(rows, columns))
    elif kind == "zero rows":
        W = W * (rng.random(rows) > 0.3)[:, None]
    elif kind == "rank one":
        W = np.outer(rng.normal(size=rows), rng.normal(size=columns)).astype(np.float32)
    elif kind == "orthogonal":
        W = np.linalg.qr(rng.normal(size=(max(rows, columns), min(rows, columns))))[0]
    elif kind == "nan":
        W = np.full((rows, columns), np.nan)
    elif kind == "zero":
        W = np.zeros((rows, columns))
    elif kind == "slices":
        W = list(rng.normal(size=(4, rows, columns)))
    one = spectrum(W, bootstrap=bootstrap)  # type: ignore[arg-type]
    other = from_record(json.loads(json.dumps(to_record(one), allow_nan=False)))
    assert other.to_json() == one.to_json()
    assert to_record(other) == to_record(one)
    assert (other.tail, other.bulk, other.verdict, other.gap) == (one.tail, one.bulk, one.verdict, one.gap)


@pytest.mark.filterwarnings("ignore")  # Ray leaves sockets to the garbage collector
@pytest.mark.parametrize(
    ("workers", "engine"), [(1, "local"), (2, "local"), pytest.param(2, "ray", marks=pytest.mark.ray)]
)
def test_any_engine_gives_the_same_bytes_once(
    model: Path, calm: str, tmp_path: Path, workers: int, engine: str
) -> None:
    done: list[str] = []
    options = {"out": tmp_path / "run", "engine": engine, "workers": workers, "eigenvalues": True}
    assert strati.scan(model, tick=done.append, **options).to_json() == calm
    assert len(done) == 19
    assert strati.scan(model, tick=done.append, **options).to_json() == calm
    assert len(done) == 19, "what the folder has is not computed again"


def test_options_and_weights_are_part_of_the_key(model: Path, tmp_path: Path) -> None:
    done: list[str] = []
    one = tmp_path / "one.npz"
    rng = np.random.default_rng(1)
    np.savez(one, **{"a.weight": rng.normal(size=(30, 30)), "b.weight": rng.normal(size=(30, 20))})
    out = tmp_path / "run"
    strati.scan(one, out=out, tick=done.append, workers=1)
    strati.scan(one, out=out, tick=done.append, workers=1, level=0.1)
    assert len(done) == 4
    strati.scan(one, out=out, tick=done.append, workers=1, layers="a")
    assert len(done) == 4
    np.savez(one, **{"a.weight": rng.normal(size=(30, 30)), "b.weight": rng.normal(size=(30, 20))})
    new = strati.scan(one, out=out, tick=done.append, workers=1)
    assert len(done) == 6 and new.to_json() == strati.scan(one).to_json()
    both = strati.scan(model, out=out, workers=1, layers="conv")  # another network in the same folder
    assert both["conv"].to_json() == strati.scan(model, layers="conv")["conv"].to_json()


def test_data_beside_an_onnx_file_are_part_of_the_key(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    weight = np.random.default_rng(0).normal(size=(40, 30)).astype(np.float32)
    values = [onnx.helper.make_tensor_value_info(n, 1, [1, s]) for n, s in (("x", 40), ("y", 30))]
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("MatMul", ["x", "w"], ["y"])],
        "g",
        values[:1],
        values[1:],
        [onnx.numpy_helper.from_array(weight, "w")],
    )
    path, data = tmp_path / "m.onnx", tmp_path / "m.data"
    onnx.save(
        onnx.helper.make_model(graph), path, save_as_external_data=True, location=data.name, size_threshold=0
    )
    before = strati.scan(path, out=tmp_path / "run", workers=1)["w"].metrics()["frobenius_norm"]
    data.write_bytes((2 * np.frombuffer(data.read_bytes(), np.float32)).tobytes())
    after = strati.scan(path, out=tmp_path / "run", workers=1)["w"].metrics()["frobenius_norm"]
    assert after == pytest.approx(2 * before)


def test_the_floor_of_a_quantised_layer_is_kept_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that nothing is decoded again once it is done; settings that decode otherwise are another network."""
    from strati.io.quantised import scaled

    folder = tmp_path / "net"
    folder.mkdir()
    rng = np.random.default_rng(0)
    codes = rng.integers(-127, 128, size=(64, 48)).astype(np.int8)
    scale = rng.uniform(0.01, 0.02, size=(2, 2)).astype(np.float32)
    save_file({"fc.weight": codes, "fc.weight_scale": scale}, folder / "model.safetensors")
    found = {}
    for rows in (32, 40):
        told = {"quant_method": "compressed-tensors", "weight_block_size": [rows, 24]}
        (folder / "config.json").write_text(json.dumps({"quantization_config": told}))
        expected = strati.scan(folder).to_json()
        assert strati.scan(folder, out=tmp_path / "run", workers=2).to_json() == expected
        with monkeypatch.context() as patched:
            patched.setattr(scaled, "broadcast", None)  # decoding would fail
            assert strati.scan(folder, out=tmp_path / "run", workers=1).to_json() == expected
        found[rows] = json.loads(expected)["layers"][0]["quantisation"]["noise_floor"]
    assert found[32] != found[40]


def test_other_checkpoints_in_the_folder_are_not_part_of_the_key(tmp_path: Path) -> None:
    """A training run puts its next checkpoint into a folder below: nothing is computed again."""
    done: list[str] = []
    weights = {"a.weight": np.random.default_rng(0).normal(size=(30, 20)).astype(np.float32)}
    (tmp_path / "net" / "checkpoint-2").mkdir(parents=True)
    save_file(weights, tmp_path / "net" / "model.safetensors")
    for _ in range(2):
        strati.scan(tmp_path / "net", out=tmp_path / "run", tick=done.append, workers=1)
        save_file(weights, tmp_path / "net" / "checkpoint-2" / "model.safetensors")
    assert done == ["a.weight"]


def test_a_network_travels_as_its_path_and_is_opened_once_there(model: Path, tmp_path: Path) -> None:
    import pickle

    copy = tmp_path / "copy.safetensors"
    copy.write_bytes(model.read_bytes())
    first, second = (pickle.loads(pickle.dumps(strati.open(copy))) for _ in range(2))
    assert first is second
    save_file({"other.weight": np.eye(3, 4, dtype=np.float32)}, copy)
    assert [t.name for t in pickle.loads(pickle.dumps(strati.open(copy))).tensors] == ["other.weight"]


def test_networks_in_memory(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    weights = {f"{i}.weight": rng.normal(size=(40, 30)).astype(np.float32) for i in range(3)}
    done: list[str] = []
    for _ in range(2):
        found = strati.scan(weights, out=tmp_path / "run", workers=2, tick=done.append)
        assert found.to_json() == strati.scan(weights).to_json()
    assert len(done) == 3
    weights["1.weight"] = weights["1.weight"] + 1
    strati.scan(weights, out=tmp_path / "run", workers=1, tick=done.append)
    assert len(done) == 4, "only the layer that changed"


@pytest.mark.parametrize(
    ("how", "workers"),
    [("SIGKILL", 1), *(pytest.param(how, 2, marks=pytest.mark.slow) for how in ("SIGKILL", "SIGINT"))],
)
def test_a_stopped_scan_goes_on(model: Path, calm: str, tmp_path: Path, how: str, workers: int) -> None:
    out = tmp_path / "run"
    words = command(model, out, "--workers", workers)
    process = started(words, out, 3)
    os.killpg(process.pid, getattr(signal, how))
    stderr = process.communicate(timeout=60)[1].decode()
    kept = rows(out)
    if how == "SIGINT" and process.returncode != 0:
        assert process.returncode == 130 and stderr.count("\n") == 1
        assert "resume with strati scan" in stderr and "--out" in stderr
    assert kept >= 3
    before = {key for (key,) in sqlite3.connect(out / STORE).execute("SELECT key FROM units")}
    assert subprocess.run(words, check=False, timeout=120).returncode == 0
    assert json.loads(Path(f"{out}.json").read_text()) == json.loads(calm)
    assert Path(f"{out}.json").read_text().strip() == calm
    assert before <= {key for (key,) in sqlite3.connect(out / STORE).execute("SELECT key FROM units")}


@pytest.mark.slow
def test_two_runs_share_a_folder(model: Path, calm: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    both = [
        subprocess.Popen([*command(model, out, "--workers", 1), "--json", str(tmp_path / f"{i}.json")])
        for i in range(2)
    ]
    assert [process.wait(timeout=120) for process in both] == [0, 0]
    assert [(tmp_path / f"{i}.json").read_text().strip() for i in range(2)] == [calm, calm]
    assert rows(out) == 19


def test_a_full_disk_is_one_line_and_loses_nothing(model: Path, calm: str, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=60k", "tmpfs", str(small)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small tmpfs is not allowed here")
    try:
        words = command(model, small / "run", "--workers", 1)
        words[words.index("--json") + 1] = str(tmp_path / "out.json")
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
        assert "full" in done.stderr and not (tmp_path / "out.json").exists()
        subprocess.run(["mount", "-o", "remount,size=20m", str(small)], check=True)
        assert subprocess.run(words, check=False, timeout=120).returncode == 0
        assert (tmp_path / "out.json").read_text().strip() == calm
    finally:
        subprocess.run(["umount", str(small)], check=False)


def test_bad_folders_and_engines_are_refused(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(strati.StratiError, match="cannot be written"):
        strati.scan(model, out=file)
    with pytest.raises(strati.StratiError, match="give out="):
        strati.scan(model, engine="ray")
    with pytest.raises(strati.StratiError, match="is the address of a Ray cluster"):
        strati.scan(model, out=tmp_path / "a", address="here:1")
    with pytest.raises(strati.StratiError, match="did you mean 'workers'"):
        strati.scan(model, worker=2)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / STORE).write_bytes(b"")
    with pytest.raises(strati.StratiError, match="empty file"):
        strati.scan(model, out=tmp_path / "b")


@pytest.mark.parametrize("kept", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_ctrl_c_in_the_middle_of_a_large_solve_is_heeded_at_once(tmp_path: Path, kept: bool) -> None:
    """One matrix whose eigenvalues take many seconds: the process leaves long before, with its line and code 130."""
    import psutil

    model = tmp_path / "large.safetensors"
    save_file({"w.weight": np.random.default_rng(0).normal(size=(5000, 5000)).astype(np.float32)}, model)
    out = ["--out", str(tmp_path / "run")] if kept else []
    words = [sys.executable, "-m", "strati.cli.main", "scan", str(model), *out, "--workers", "1", "--quiet"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    earlier = before.ru_utime + before.ru_stime
    process = subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # Tests run in the background inherit an ignored SIGINT, and so would the command.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    watched = psutil.Process(process.pid)
    while watched.cpu_times().user < 2 and process.poll() is None:
        time.sleep(0.02)
    used = sum(watched.cpu_times()[:2])
    process.send_signal(signal.SIGINT)
    stderr = process.communicate(timeout=60)[1].decode()
    assert process.returncode == 130
    assert stderr.count("\n") == 1
    # Its own time on the processor, not the clock's: a busy machine lets everybody wait.
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert now.ru_utime + now.ru_stime - earlier - used < 3
