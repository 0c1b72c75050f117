"""``strati study`` as a user meets it: stopped, killed, resumed, run twice at once, on a full disk."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from command import run_strati
from command import strati_command as command

from strati import embedded
from strati.cli.main import strati

SPEC = """
name = "cli"
[network]
source = "fcn"
count = 4
together = 2
hidden = [24, 24, 24]
[data]
name = "digits"
[train]
epochs = 12
[interventions]
draws = 2
"""


def run(*words: str | Path, expect: int = 0) -> subprocess.CompletedProcess[str]:
    return run_strati(*words, expect=expect)


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("spec") / "cli.toml"
    path.write_text(SPEC)
    return path


@pytest.fixture(scope="module")
def calm(spec: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The rows of an undisturbed run in one process."""
    folder = tmp_path_factory.mktemp("calm")
    done = run(
        "study", spec, "--out", folder, "--workers", "1", "--export", folder / "rows.csv", "--json", "-"
    )
    found = json.loads(done.stdout)
    assert found["schema"] == "strati.study/1"
    assert (found["units"], found["done"], found["failed"]) == (64, 64, 0)
    assert Path(found["store"]).is_file()
    return (folder / "rows.csv").read_bytes()


def exported(spec: Path, folder: Path, *words: str) -> bytes:
    run("study", spec, "--out", folder, "--export", folder / "rows.csv", "--quiet", *words)
    return (folder / "rows.csv").read_bytes()


def work_done(process: psutil.Process) -> float:
    """Processor seconds of a process and its workers so far: a measure of how far it got on a busy machine too."""
    total = 0.0
    for one in (process, *process.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            total += one.cpu_times().user
    return total


def killed(spec: Path, folder: Path, workers: int, moment: float) -> bool:
    """Run the study, kill it after so much work; whether that was before its end."""
    words = command("study", spec, "--out", folder, "--workers", str(workers), "--quiet")
    process = subprocess.Popen(words, start_new_session=True)
    watched = psutil.Process(process.pid)
    with suppress(psutil.NoSuchProcess):
        while process.poll() is None and work_done(watched) < moment:
            time.sleep(0.02)
    hit = process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait(60)
    return hit


@pytest.mark.slow
def test_killed_twice_it_ends_with_the_same_rows(spec: Path, calm: bytes, tmp_path: Path) -> None:
    for moment in (3.0, 5.0):
        killed(spec, tmp_path, 2, moment)
    assert exported(spec, tmp_path, "--workers", "1") == calm


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("workers", [1, 2])
def test_killed_at_twenty_moments_it_ends_with_the_same_rows(
    spec: Path, calm: bytes, tmp_path: Path, workers: int
) -> None:
    rng = random.Random(workers)
    hits, folder = 0, tmp_path / "0"
    while hits < 20:
        if killed(spec, folder, workers, rng.uniform(1.0, 4.0 + 2.0 * workers)):
            hits += 1
        else:  # it got to its end in spite of all kills: check it and begin anew
            assert exported(spec, folder, "--workers", "1") == calm
            folder = tmp_path / str(hits)
    assert exported(spec, folder) == calm


@pytest.mark.slow
def test_two_runs_at_once_on_one_store(spec: Path, calm: bytes, tmp_path: Path) -> None:
    words = command("study", spec, "--out", tmp_path, "--workers", "1", "--quiet")
    both = [subprocess.Popen(words) for _ in range(2)]
    assert [process.wait(240) for process in both] == [0, 0]
    assert exported(spec, tmp_path, "--workers", "1") == calm


@pytest.mark.parametrize("workers", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_ctrl_c_is_quick_says_how_to_resume_and_leaves_nobody(
    spec: Path, tmp_path: Path, workers: int
) -> None:
    words = command("study", spec, "--out", tmp_path, "--workers", str(workers), "--quiet")
    process = subprocess.Popen(
        words,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # Tests run in the background inherit an ignored SIGINT, and so would the command.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    end = time.monotonic() + 60
    while not (tmp_path / "networks").is_dir() and time.monotonic() < end:
        time.sleep(0.05)
    time.sleep(0.5)
    children = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the whole group
    start = time.monotonic()
    _, told = process.communicate(timeout=30)
    assert time.monotonic() - start < 10  # with other jobs on the machine
    assert process.returncode == 130
    # Where an import outlasts the patience, on a busy machine, how many are done cannot be told.
    assert re.match(r"strati: stopped(, \d+ done( in this run)?)?; resume with strati study ", told), told
    assert told.count("\n") == 1 and "Traceback" not in told
    _, alive = psutil.wait_procs(children, timeout=5)
    assert alive == []


def test_ctrl_c_inside_code_from_a_string_is_130_too(tmp_path: Path) -> None:
    """Python itself would die of SIGINT at its end, though the exception was caught."""
    (tmp_path / "probe.py").write_text(
        "import sys\n"
        "from strati.cli import interrupts\n"
        "interrupts.leave_at_once()\n"
        "interrupts.raise_once()\n"
        "try:\n"
        "    exec('import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(5)')\n"
        "except KeyboardInterrupt:\n"
        "    print('caught')\n"
        "if sys.argv[1] == 'explained':\n"
        "    interrupts.leave(130)\n"
        "sys.exit(130)\n"
    )
    for how, code in (("explained", 130), ("as Python does", -signal.SIGINT)):
        done = subprocess.run(
            [sys.executable, "-m", "probe", how],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            timeout=60,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        assert (done.returncode, done.stdout) == (code, "caught\n"), done.stderr


@pytest.mark.parametrize(
    ("verb", "moment"),
    [
        ("study", 0.12),
        ("scan", 0.2),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("study", 0.4), ("study", 0.7), ("scan", 1.0))
        ),
    ],
)
def test_ctrl_c_at_any_moment_is_130_and_one_line(
    spec: Path, tmp_path: Path, verb: str, moment: float
) -> None:
    """From the first imports on (an interpreter needs about 0.05 s of processor time to begin with them)."""
    words = {
        "study": command("study", spec, "--out", tmp_path / "out", "--workers", "2", "--quiet"),
        "scan": command("scan", embedded.path("digits-mlp.safetensors"), "--bootstrap", "100000", "--quiet"),
    }[verb]
    process = subprocess.Popen(
        words,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    watched = psutil.Process(process.pid)
    with suppress(psutil.NoSuchProcess):
        while process.poll() is None and sum(watched.cpu_times()[:2]) < moment:
            time.sleep(0.005)
    os.killpg(process.pid, signal.SIGINT)
    try:
        _, told = process.communicate(timeout=60)
    finally:
        if process.poll() is None:  # it did not heed: the test fails, and leaves nothing behind
            process.kill()
            process.communicate()
    assert process.returncode == 130, told
    assert told.startswith("strati: stopped") and told.count("\n") == 1, told


def test_bad_specs_are_one_line_and_leave_nothing(tmp_path: Path) -> None:
    cases = {
        "[train]\nepoks = 3\n[data]\nname = 'digits'": "unknown key 'epoks' in [train]; did you mean 'epochs'?",
        "[train": "not TOML",
        "[data]\npath = 'gone.npz'": "no such file",
    }
    for text, word in cases.items():
        path = tmp_path / "bad.toml"
        path.write_text(text)
        done = run("study", path, "--out", tmp_path / "out", expect=2)
        assert (
            word in done.stderr and done.stderr.count("\n") == 1 and done.stderr.startswith("strati: error: ")
        )
        assert not (tmp_path / "out").exists()


def test_bad_calls_are_one_line(spec: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "study.sqlite").touch()
    for words, word in (
        (("nosuch", "--out", tmp_path / "o"), "no built-in study of that name"),
        ((spec, "--out", tmp_path / "file"), "cannot be written to"),
        ((spec, "--out", tmp_path / "empty"), "an empty file, not a store"),
        ((spec, "--out", tmp_path / "o", "--export", "rows.txt"), ".csv or .parquet"),
        ((spec, "--out", tmp_path / "o", "--init", "guess"), "no such distribution"),
        ((spec, "--out", tmp_path / "o", "--address", "h:1"), "add --engine ray"),
    ):
        done = run("study", *words, expect=2)
        assert word in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_a_full_disk_is_one_line_and_can_be_resumed(spec: Path, calm: bytes, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(small)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small tmpfs is not allowed here")
    try:
        done = run("study", spec, "--out", small, "--workers", "1", expect=2)
        assert done.stderr.count("\n") == 1 and ("full" in done.stderr or "No space" in done.stderr)
        subprocess.run(["mount", "-o", "remount,size=50m", str(small)], check=True)
        assert exported(spec, small, "--workers", "1") == calm
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


def test_what_a_study_would_cost_is_said_before_anything_is_written(tmp_path: Path) -> None:
    out, told = tmp_path / "run", tmp_path / "estimate.json"
    words = [
        "study",
        "fcn-digits",
        "--out",
        str(out),
        "--estimate",
        "-j",
        "1",
        "--json",
        str(told),
        "--quiet",
    ]
    strati.main(words, standalone_mode=False)
    found = json.loads(told.read_text())
    assert found["schema"] == "strati.estimate/1"
    assert (found["path"], found["matrices"], found["workers"]) == ("fcn-digits", 48, 1)
    assert 0 < found["seconds"] < 600
    assert not out.exists()
