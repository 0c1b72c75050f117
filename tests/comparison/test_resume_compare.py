"""A comparison kept in a folder: killed anywhere it goes on, on any engine, and the result is the same bytes."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import strati
from strati.comparison.pair_update import STORE


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    rng = np.random.default_rng(0)
    folder = tmp_path_factory.mktemp("pair")
    base = {f"layers.{i}.weight": rng.normal(size=(120, 100)).astype(np.float32) for i in range(10)}
    tuned = {
        name: W + (0.01 * rng.normal(size=(120, 2)) @ rng.normal(size=(2, 100))).astype(np.float32)
        for name, W in base.items()
    }
    save_file(base, folder / "base.safetensors")
    save_file(tuned, folder / "tuned.safetensors")
    return folder / "base.safetensors", folder / "tuned.safetensors"


@pytest.fixture(scope="module")
def calm(pair: tuple[Path, Path]) -> str:
    return strati.compare(*pair, workers=1).to_json()


def command(pair: tuple[Path, Path], out: Path, *words: object) -> list[str]:
    start = [sys.executable, "-m", "strati.cli.main", "compare", *map(str, pair), "--out", str(out)]
    return [*start, "--quiet", "--json", f"{out}.json", *map(str, words)]


def done(store: Path) -> int:
    if not store.exists():
        return 0
    with sqlite3.connect(store) as db:
        return int(db.execute("SELECT count(*) FROM units").fetchone()[0])


@pytest.mark.parametrize(
    ("how", "workers", "store", "enough"),
    [
        pytest.param("SIGKILL", 1, "spectra.sqlite", 4, marks=pytest.mark.slow),
        pytest.param("SIGKILL", 2, STORE, 2, marks=pytest.mark.slow),
        ("SIGINT", 1, STORE, 2),
    ],
)
def test_a_stopped_comparison_goes_on(
    pair: tuple[Path, Path], calm: str, tmp_path: Path, how: str, workers: int, store: str, enough: int
) -> None:
    """Stopped among the spectra, and among the updates."""
    out = tmp_path / "run"
    words = command(pair, out, "--workers", workers)
    process = subprocess.Popen(words, stderr=subprocess.PIPE, start_new_session=True)
    until = time.monotonic() + 90
    while done(out / store) < enough and process.poll() is None and time.monotonic() < until:
        time.sleep(0.005)
    os.killpg(process.pid, getattr(signal, how))
    stderr = process.communicate(timeout=60)[1].decode()
    if how == "SIGINT" and process.returncode != 0:
        assert process.returncode == 130 and stderr.count("\n") == 1
        assert "resume with strati compare" in stderr
    assert done(out / store) >= enough
    assert subprocess.run(words, check=False, timeout=120).returncode == 0
    assert Path(f"{out}.json").read_text().strip() == calm
    assert (done(out / "spectra.sqlite"), done(out / STORE)) == (20, 10)


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore")  # Ray leaves sockets to the garbage collector
def test_ray_gives_the_same_bytes(pair: tuple[Path, Path], calm: str, tmp_path: Path) -> None:
    found = strati.compare(*pair, out=tmp_path / "run", engine="ray", workers=2)
    assert found.to_json() == calm


@pytest.mark.slow
def test_two_comparisons_share_a_folder(pair: tuple[Path, Path], calm: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    both = [
        subprocess.Popen([*command(pair, out, "--workers", 1), "--json", str(tmp_path / f"{i}.json")])
        for i in range(2)
    ]
    assert [process.wait(timeout=120) for process in both] == [0, 0]
    assert [(tmp_path / f"{i}.json").read_text().strip() for i in range(2)] == [calm, calm]
    assert (done(out / "spectra.sqlite"), done(out / STORE)) == (20, 10)
