"""``strati report`` from a shell's point of view: what it writes, what it refuses and how."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command import run_strati

SCAN = {
    "schema": "strati.scan/1",
    "strati": "1",
    "network": {"path": "m", "parameters": 4, "tensors": 1},
    "layers": [],
}


def report(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return run_strati("report", *words)


def test_a_page_from_several_results(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(SCAN))
    (tmp_path / "b.json").write_text("\ufeff" + json.dumps(SCAN | {"schema": "strati.inspect/1"}))
    page = tmp_path / "page.html"
    done = report(tmp_path / "a.json", tmp_path / "b.json", "-o", page)
    assert done.returncode == 0, done.stderr
    assert "2 results" in " ".join(done.stdout.split())
    assert page.read_text().startswith("<!doctype html>")
    assert report(tmp_path / "a.json", "-o", page, "--quiet").stdout == ""


def test_a_scan_does_not_need_torch_to_be_drawn(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(SCAN))
    program = (
        "import sys; from strati.cli.main import _run;"
        f"code = _run(['report', {str(tmp_path / 'a.json')!r}, '-o', {str(tmp_path / 'p.html')!r}, '-q'], False);"
        "sys.exit(code or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


BAD = {
    "empty": b"",
    "not-json": b"hello",
    "binary": bytes(range(256)),
    "cut": b'{"schema": "strati.scan/1", "layers": [',
    "nan": b'{"schema": "strati.scan/1", "layers": [{"alpha": NaN}]}',
    "list": b"[1, 2]",
    "foreign": b'{"schema": "other/1"}',
    "future": b'{"schema": "strati.scan/9", "layers": []}',
    "unknown-verb": b'{"schema": "strati.sing/1"}',
    "no-layers": b'{"schema": "strati.scan/1"}',
    "wrong-layers": b'{"schema": "strati.scan/1", "layers": 3}',
    "deep": b'{"schema": "strati.scan/1", "layers": ' + b"[" * 100_000,
    "huge-number": b'{"schema": "strati.scan/1", "layers": [{"alpha": 1' + b"0" * 5000 + b"}]}",
    "model": b"\x80\x02}q\x00.",
    "\x1b[31mname": b"x",
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_one_line_and_leave_nothing(tmp_path: Path, name: str) -> None:
    bad, page = tmp_path / f"{name}.json", tmp_path / "page.html"
    bad.write_bytes(BAD[name])
    done = report(bad, "-o", page)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("strati: error: ")
    assert done.stderr.count("\n") == 1
    assert "\x1b" not in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == [bad]


def test_a_pipe_and_a_missing_file_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    start = time.monotonic()
    for name, why in (("pipe", "not a regular file"), ("absent", "no such file")):
        done = report(tmp_path / name, "-o", tmp_path / "page.html")
        assert done.returncode == 2
        assert why in done.stderr
    assert time.monotonic() - start < 30


def test_large_files_that_are_not_ours_are_not_parsed(tmp_path: Path) -> None:
    with (tmp_path / "big.json").open("wb") as file:
        file.write(b"[1")
        file.truncate(40 * 2**20)
    done = report(tmp_path / "big.json", "-o", tmp_path / "page.html")
    assert done.returncode == 2
    assert "does not begin like a result" in done.stderr


def test_outputs_that_cannot_be_written_are_refused_before_work(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(SCAN))
    for target in (tmp_path, tmp_path / "absent" / "page.html"):
        done = report(tmp_path / "a.json", "-o", target)
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1


def test_usage_is_one_line(tmp_path: Path) -> None:
    for words in ((), ("x.json",), ("-o", tmp_path / "p.html")):
        done = report(*words)
        assert done.returncode == 2
        assert done.stderr.startswith("strati: error: report: ")
        assert done.stderr.count("\n") == 1


def test_a_folder_that_is_no_study_is_refused(tmp_path: Path) -> None:
    done = report(tmp_path, "-o", tmp_path / "page.html")
    assert done.returncode == 2
    assert done.stderr.startswith("strati: error: ")
    assert not (tmp_path / "page.html").exists()


def test_help_shows_a_runnable_example() -> None:
    done = report("--help")
    assert done.returncode == 0
    assert "strati report scan.json -o report.html" in done.stdout
