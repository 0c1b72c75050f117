"""The command line as a whole: help, exit codes, one line for every error, silence where it is asked for."""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from command import run_strati, run_strati_process

from strati import embedded
from strati.cli.main import COMMANDS, CommandGroup, main

MODEL = str(embedded.path("digits-mlp.safetensors"))


def test_version() -> None:
    done = run_strati("--version")
    assert done.returncode == 0
    assert re.fullmatch(r"strati \d+\.\d+\.\d+\n", done.stdout)


def test_help_names_every_verb_and_takes_under_half_a_second_of_processor_time() -> None:
    run_strati_process("--help")  # bytecode is compiled once
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = run_strati_process("--help")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0
    assert all(verb in done.stdout for verb in COMMANDS)
    assert "strati scan model.safetensors" in done.stdout
    assert (after.ru_utime - before.ru_utime) + (after.ru_stime - before.ru_stime) < 0.5


@pytest.mark.parametrize("verb", COMMANDS)
def test_every_verb_has_help_with_an_example(verb: str) -> None:
    done = run_strati(verb, "--help")
    assert done.returncode == 0, done.stderr
    assert "Example:" in done.stdout
    assert f"strati {verb}" in done.stdout
    assert "--json" in done.stdout
    assert "--html" in done.stdout
    assert "--quiet" in done.stdout


@pytest.mark.parametrize(
    "words",
    [
        ["no-such-verb"],
        ["scan"],
        ["scan", "no-such-file"],
        ["scan", MODEL, "--no-such-option"],
        ["scan", MODEL, "--json", "no/such/folder/a.json"],
        ["inspect", "no-such-file\x1b[31m"],
        ["compare", MODEL],
        ["compare", MODEL, "no-such-file"],
        ["audit", "no-such-folder"],
        ["study", "no-such-spec", "--out", "x"],
        ["degeneracy", MODEL, "--data", "no-such-file"],
        ["basis", MODEL, "--data", "no-such-file"],
        ["reassemble", "no-such-folder", "no-such-file"],
        ["report", "no-such.json", "-o", "x.html"],
    ],
)
def test_bad_usage_and_bad_input_give_one_line_and_exit_2(words: list[str], tmp_path: Path) -> None:
    done = run_strati(*words, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("strati: error: ")
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr
    assert "\x1b" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_json_on_stdout_is_alone_there() -> None:
    import json

    done = run_strati("inspect", MODEL, "--json", "-")
    assert done.returncode == 0
    assert json.loads(done.stdout)["schema"] == "strati.inspect/1"


def test_quiet_says_nothing() -> None:
    done = run_strati("inspect", MODEL, "--quiet")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_reader_that_goes_away_is_no_error() -> None:
    done = subprocess.run(
        f'"{sys.executable}" -m strati.cli.main inspect "{MODEL}" | head -1; echo "${{PIPESTATUS[0]}}"',
        shell=True,
        executable="/bin/bash",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr == ""
    assert done.stdout.splitlines()[-1] == "0"


@pytest.mark.parametrize("words", [["scan", MODEL], ["inspect", MODEL], ["compare", MODEL, MODEL]])
def test_spectra_never_import_torch(words: list[str]) -> None:
    code = (
        "import sys; from strati.cli.main import strati\n"
        f"strati.main({words!r} + ['--quiet'], standalone_mode=False)\n"
        "assert 'torch' not in sys.modules and 'matplotlib' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def test_import_is_light() -> None:
    code = "import sys, strati; print([m for m in ('numpy', 'torch', 'pandas') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.strip() == "[]"


def test_a_fault_of_strati_is_exit_1_and_says_how_to_see_more(monkeypatch, capsys) -> None:
    import strati.io.inspection as home

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("something\nunforeseen")

    monkeypatch.setattr(home, "inspect", broken)
    monkeypatch.delenv("STRATI_DEBUG", raising=False)
    with pytest.raises(SystemExit) as stopped:
        main(["inspect", MODEL])
    assert stopped.value.code == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "--debug" in said
    with pytest.raises(RuntimeError):
        main(["inspect", MODEL, "--debug"])


@pytest.mark.parametrize("where", ["make_context", "parse_args", "get_command", "invoke"])
def test_ctrl_c_while_the_words_are_read_is_the_same_one_line(where: str, monkeypatch, capsys) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(CommandGroup, where, interrupted)
    with pytest.raises(SystemExit) as ended:
        main(["inspect", MODEL])
    assert ended.value.code == 130
    assert capsys.readouterr() == ("", "strati: stopped\n")


def test_the_shell_can_ask_for_completion() -> None:
    asked = {"_STRATI_COMPLETE": "bash_complete", "COMP_WORDS": "strati rea", "COMP_CWORD": "1"}
    done = run_strati_process(env=os.environ | asked)
    assert done.returncode == 0 and done.stdout == "plain,reassemble\n", done


@pytest.mark.parametrize(
    ("shell", "says"), [("bash", "complete -o"), ("zsh", "#compdef strati"), ("fish", "complete")]
)
def test_completion_of_three_shells(shell: str, says: str) -> None:
    """The script of each shell, and what it asks strati for: verbs by their beginning, with fish and zsh their help."""
    done = run_strati(env=os.environ | {"_STRATI_COMPLETE": f"{shell}_source"})
    assert (
        done.returncode == 0 and says in done.stdout and "_STRATI_COMPLETE" in done.stdout and not done.stderr
    )
    if shutil.which(shell):
        checked = subprocess.run(
            [shell, "-n"], input=done.stdout, capture_output=True, text=True, check=False
        )
        assert checked.returncode == 0, checked.stderr
    words = {"COMP_WORDS": "strati reas", "COMP_CWORD": "reas" if shell == "fish" else "1"}
    done = run_strati(env=os.environ | words | {"_STRATI_COMPLETE": f"{shell}_complete"})
    assert done.returncode == 0 and "reassemble" in done.stdout and not done.stderr


WITHOUT_LOCKS = """
import sys

class Absent:  # as on Windows
    def find_spec(self, name, path=None, target=None):
        if name == "fcntl":
            raise ModuleNotFoundError(name, name=name)

sys.modules.pop("fcntl", None)
sys.meta_path.insert(0, Absent())
from strati.cli.main import main
main(sys.argv[1:])
"""


def test_without_posix_locks_one_line_and_no_traceback(tmp_path: Path) -> None:
    """A scan that writes nothing works without fcntl; one that keeps a store says why it cannot."""
    for words, code, said in (
        (["scan", MODEL, "--quiet"], 0, ""),
        (
            ["scan", MODEL, "--quiet", "--out", str(tmp_path / "kept")],
            2,
            "strati: error: Windows: is not supported",
        ),
    ):
        command = [sys.executable, "-c", WITHOUT_LOCKS, *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr
        assert said in done.stderr and "Traceback" not in done.stderr


def test_every_public_name_can_be_imported() -> None:
    import strati as package

    for name in package.__all__:
        assert getattr(package, name) is not None
    assert set(package.__all__) <= set(dir(package))
    with pytest.raises(AttributeError):
        _ = package.no_such_name


WITHOUT_TORCH = """
import sys

class Absent:  # as if not installed
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "graspologic_native"):
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Absent())
import strati
from builtins import open as own
assert all(hasattr(strati, name) for name in strati.__all__), "names"
assert "llc" in dir(strati) and "open" in dir(strati)
from strati import *
assert open is own, "open"
for call in (strati.llc, strati.effective_parameters, strati.degeneracy, strati.interaction_basis):
    try:
        call(1, 2, 3)
    except strati.StratiError as error:
        assert "strati[torch]" in str(error), error
    else:
        raise AssertionError(call)
print(strati.scan({"fc.weight": __import__("numpy").eye(9)}).table["name"][0])
"""


def test_without_torch_everything_is_there_and_says_which_extra() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "fc.weight\n"), done.stderr


def test_alone_it_prints_help() -> None:
    done = run_strati()
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == run_strati("--help").stdout
    assert "\\x0a" not in done.stdout + run_strati("scan").stderr


def test_environment_is_not_needed(tmp_path: Path) -> None:
    done = run_strati_process("inspect", MODEL, cwd=tmp_path, env={"PATH": os.environ["PATH"]})
    assert done.returncode == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words",
    [
        ["inspect", MODEL, "--html", "-"],
        ["report", "any.json", "-o", "-"],
        ["compare", MODEL, MODEL, "--export", "table.txt"],
        ["study", "fcn-digits", "--out", "folder", "--export", "table.txt"],
        ["inspect", ""],
    ],
)
def test_outputs_that_cannot_be_are_refused_before_any_work(words: list[str], tmp_path: Path) -> None:
    done = run_strati(*words, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("strati: error: ")
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words",
    [
        ["inspect", "x" * 5000],
        ["inspect", MODEL, "--json", "x" * 5000],
        ["study", "x" * 5000, "--out", "folder"],
        ["audit", "x" * 5000],
        ["report", "x" * 5000, "-o", "page.html"],
        ["reassemble", "x" * 5000, "data.csv"],
    ],
)
def test_what_the_system_refuses_is_one_line_and_exit_2(words: list[str], tmp_path: Path) -> None:
    done = run_strati(*words, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.startswith("strati: error: ")
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_behind_standard_output_is_no_fault_of_strati() -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "strati.cli.main", "inspect", MODEL]
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120, check=False
        )
    assert done.returncode == 2
    assert done.stderr.startswith("strati: error: ")
    assert done.stderr.count("\n") == 1


def test_names_from_files_are_text_and_nothing_else(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    folder = tmp_path / "["
    folder.mkdir()
    weights = load_file(MODEL)
    for name, scale in (("b]x", 1), ("y", 2)):
        odd = {
            ("[/red]" if k[0] == "2" else "[bold]:smile:\x1b[31m\n") + k: v * scale
            for k, v in weights.items()
        }
        save_file(odd, folder / f"{name}.safetensors")
    data = ["--data", str(embedded.path("digits.npz")), "--rows", "40"]
    for words in (
        ["inspect", "[/b]x.safetensors"],
        ["scan", "[/b]x.safetensors", "--html", "[/page].html"],
        ["compare", "[/b]x.safetensors", "[/y.safetensors", "--series"],
        ["basis", "[/b]x.safetensors", *data],
    ):
        done = run_strati(*words, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, ""), words
        assert "\x1b" not in done.stdout
        assert "[/red]2" in done.stdout
        assert ":smile:" in done.stdout.replace("\n", "")


@pytest.mark.parametrize("words", [["inspect", MODEL], ["scan", MODEL], ["inspect", MODEL, "--json", "-"]])
def test_output_that_nobody_wants_or_can_spell(words: list[str]) -> None:
    command = f'"{sys.executable}" -m strati.cli.main ' + " ".join(f'"{word}"' for word in words)
    closed = subprocess.run(f"{command} >&-", shell=True, capture_output=True, timeout=120, check=False)
    assert (closed.returncode, closed.stderr) == (0, b"")
    plain = run_strati_process(*words, env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert (plain.returncode, plain.stderr) == (0, "")


def test_threads_that_wait_sleep_unless_the_caller_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    for given, kept in ((None, "PASSIVE"), ("ACTIVE", "ACTIVE")):
        with monkeypatch.context() as changed:
            changed.setenv("OMP_WAIT_POLICY", given or "")  # so that what main sets is undone
            if given is None:
                del os.environ["OMP_WAIT_POLICY"]
            with pytest.raises(SystemExit):
                main(["--version"])
            assert os.environ["OMP_WAIT_POLICY"] == kept
