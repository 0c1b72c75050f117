"""``strati check``: one line per finding, exit code 3, and a registry that knows every code there is."""

from __future__ import annotations

import ast
import json
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from command import run_strati
from safetensors.numpy import load_file, save_file

import strati
from strati import embedded
from strati.comparison.check import CODES
from strati.core.errors import BadInputError

INITIAL, TRAINED = embedded.path("digits-mlp-init.safetensors"), embedded.path("digits-mlp.safetensors")
SOURCE = Path(strati.__file__).parent


def run(*words: object) -> subprocess.CompletedProcess[str]:
    return run_strati("check", *words)


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tensors = load_file(TRAINED)
    tensors["2.weight"] = np.where(np.eye(64, 96) > 0, np.nan, tensors["2.weight"]).astype(np.float32)
    path = tmp_path_factory.mktemp("check") / "broken.safetensors"
    save_file(tensors, path)
    return path


def test_a_finding_is_a_line_and_exit_code_3(broken: Path, tmp_path: Path) -> None:
    done = run(broken, "--json", tmp_path / "c.json")
    assert done.returncode == 3, done.stderr
    answer, _, finding, *_, following = done.stdout.splitlines()
    assert answer.startswith("FAIL: not-finite in 2.weight. 5 of 6 tensors finite")
    assert finding.startswith("2.weight: not-finite: ")
    assert following.startswith("next: strati ")
    result = json.loads((tmp_path / "c.json").read_text())
    assert result["schema"] == "strati.check/1"
    assert result["passed"] is False
    assert [(x["layer"], x["code"]) for x in result["found"]] == [("2.weight", "not-finite")]
    assert set(result["found"][0]) == {"layer", "code", "text"}


def test_nothing_found_is_exit_code_0() -> None:
    done = run(TRAINED, "--fail-on", "not-finite,constant", "--json", "-")
    assert done.returncode == 0
    result = json.loads(done.stdout)
    assert (result["passed"], result["found"]) == (True, [])


def test_kinds_of_update_against_a_base(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tuned = load_file(TRAINED)
    tuned["0.weight"] = (
        tuned["0.weight"] + 0.1 * rng.standard_normal((96, 2)) @ rng.standard_normal((2, 64))
    ).astype(np.float32)
    save_file(tuned, tmp_path / "tuned.safetensors")
    path = tmp_path / "tuned.safetensors"
    assert strati.check(path, TRAINED, fail_on="dense").passed
    found = strati.check(path, TRAINED, fail_on=["low-rank", "untouched"]).found
    assert [(x.layer, x.code) for x in found] == [
        ("0.weight", "low-rank"),
        ("2.weight", "untouched"),
        ("4.weight", "untouched"),
    ]
    assert "2 directions" in found[0].text
    assert strati.check(path, TRAINED, fail_on="low-rank", layers="!0").passed
    page = tmp_path / "page.html"
    assert run(path, "--base", TRAINED, "--fail-on", "low-rank", "--html", page).returncode == 3
    assert "<!doctype html>" in page.read_text()[:100].lower()


def test_a_bias_that_changed_is_found_beside_layers_that_did_not(tmp_path: Path) -> None:
    changed = load_file(TRAINED)
    changed["2.bias"] = changed["2.bias"] * np.float32(3)
    save_file(changed, tmp_path / "changed.safetensors")
    codes = "dense,low-rank,moved-vectors"
    found = strati.check(tmp_path / "changed.safetensors", TRAINED, fail_on=codes).found
    assert [(x.layer, x.code) for x in found] == [("2.bias", "moved-vectors")]
    half = {k: w.astype(np.float16) for k, w in load_file(TRAINED).items()}
    assert strati.check(half, TRAINED, fail_on=codes).passed


def test_a_base_of_other_shape_and_layers(tmp_path: Path) -> None:
    tensors = load_file(TRAINED)
    tensors["4.weight"] = tensors["4.weight"][:7].copy()
    tensors["6.weight"] = np.ones((3, 7), np.float32)
    save_file(tensors, tmp_path / "other.safetensors")
    found = strati.check(
        tmp_path / "other.safetensors", TRAINED, fail_on="shapes-differ,unmatched-layers"
    ).found
    assert {x.code for x in found} == {"shapes-differ", "unmatched-layers"}


def test_warnings_of_the_file_count_too(tmp_path: Path) -> None:
    import torch

    model = torch.nn.Linear(4, 3)
    torch.save({"model": model.state_dict(), "loss": torch.tensor(1.0)}, tmp_path / "a.pt")
    (finding,) = strati.check(tmp_path / "a.pt", fail_on="left-aside").found
    assert (finding.layer, finding.code) == (None, "left-aside")


def test_what_cannot_be_asked() -> None:
    done = run(TRAINED, "--fail-on", "denze")
    assert done.returncode == 2
    assert "did you mean 'dense'" in done.stderr
    assert "\n" not in done.stderr.strip()
    with pytest.raises(BadInputError, match="against a base"):
        strati.check(TRAINED, fail_on="dense")
    with pytest.raises(BadInputError, match="names no code"):
        strati.check(TRAINED, fail_on=",")
    with pytest.raises(BadInputError, match="did you mean 'fail_on'"):
        strati.check(TRAINED, fail_one="dense")


def test_limits_on_numbers_replace_the_failure_on_every_change(tmp_path: Path) -> None:
    tuned = load_file(TRAINED)
    rng = np.random.default_rng(0)
    tuned["0.weight"] = (tuned["0.weight"] * 1.3).astype(np.float32)
    tuned["2.weight"] = (tuned["2.weight"] + 1e-3 * rng.standard_normal((64, 96))).astype(np.float32)
    save_file(tuned, tmp_path / "tuned.safetensors")
    path = tmp_path / "tuned.safetensors"
    assert not strati.check(path, TRAINED).passed
    checked = strati.check(path, TRAINED, fail_if="changed > 20%")
    assert [(x.layer, x.code) for x in checked.found] == [("0.weight", "over-limit")]
    assert not checked.passed and checked.fail_if == ("changed > 20%",)
    assert "30%" in checked.found[0].text
    assert strati.check(path, TRAINED, fail_if="relative_change > 0.4").passed
    both = strati.check(
        path, TRAINED, fail_if=["changed >= 30%", "update rank > 5"], fail_on="untouched"
    ).found
    assert {(x.layer, x.code) for x in both} >= {("2.weight", "over-limit"), ("4.weight", "untouched")}
    done = run(path, "--base", TRAINED, "--fail-if", "changed > 20%")
    assert done.returncode == 3 and done.stdout.startswith("FAIL: over-limit in 0.weight.")


def test_limits_on_numbers_of_a_scan() -> None:
    ranks = {row["name"]: row["stable_rank"] for row in strati.scan(TRAINED).to_dict()["layers"]}
    limit = sorted(ranks.values())[1]
    found = strati.check(TRAINED, fail_if=f"stable_rank > {limit}").found
    assert [x.layer for x in found] == [name for name, rank in ranks.items() if rank > limit]
    assert strati.check(TRAINED, fail_if="stable_rank < 0").passed


@pytest.mark.parametrize(
    ("limit", "reason"),
    [
        ("changed", "cannot read"),
        ("changed > much", "cannot read"),
        ("changed > 1.2.3", "cannot read"),
        ("chnged > 20%", "did you mean 'changed'"),
        ("changed > 20%", "against a base"),
        ("", "cannot read"),
    ],
)
def test_limits_that_cannot_be_asked(limit: str, reason: str) -> None:
    done = run(TRAINED, "--fail-if", limit)
    assert done.returncode == 2 and done.stdout == ""
    assert reason in done.stderr and done.stderr.count("\n") == 1


def test_annotations_of_github_actions(broken: Path) -> None:
    done = run(broken, "--format", "github")
    assert done.returncode == 3
    answer, annotation = done.stdout.splitlines()
    assert answer.startswith("FAIL: not-finite in 2.weight.")
    assert annotation.startswith(f"::error file={broken},title=not-finite::2.weight: 64 of 6,144 entries")
    assert run(TRAINED, "--format", "github").stdout.splitlines()[1:] == []
    assert run(broken, "--format", "github", "--quiet").stdout == ""


def test_annotations_escape_what_the_runner_would_read() -> None:
    from strati.comparison.check import Check
    from strati.comparison.damage import Finding

    found = (Finding("a%\nb", "hole", "50% zeros"), Finding(None, "quantised", "a note"))
    lines = Check("x:y,z.npz", None, ("hole",), 1, 1, 1, 1, 1, found).annotations()
    assert lines[0].startswith("::error file=x%3Ay%2Cz.npz,title=hole::a%25") and "\n" not in lines[0]
    assert lines[0].endswith("b: 50%25 zeros")
    assert lines[1] == "::notice file=x%3Ay%2Cz.npz,title=quantised::a note"


def test_defaults_stand_in_pyproject(broken: Path, tmp_path: Path) -> None:
    inner = tmp_path / "project" / "weights"
    inner.mkdir(parents=True)
    table = tmp_path / "project" / "pyproject.toml"
    table.write_text('[tool.strati.check]\nfail-on = "hole"\nformat = "github"\n')
    assert run_strati("check", broken, cwd=inner).returncode == 0
    assert run_strati("check", broken, "--fail-on", "not-finite", cwd=inner).stdout.count("::error") == 1
    save_file(load_file(TRAINED), tmp_path / "project" / "base.safetensors")
    table.write_text('[tool.strati.check]\nbase = "base.safetensors"\nfail-if = ["changed > 150%"]\n')
    done = run_strati("check", INITIAL, "--json", tmp_path / "c.json", cwd=inner)
    fields = json.loads((tmp_path / "c.json").read_text())
    assert fields["fail_if"] == ["changed > 150%"] and fields["base"].endswith("base.safetensors")
    assert done.returncode == (0 if fields["passed"] else 3)
    for text, reason in (
        ("[tool.strati.check]\nfail-one = 'hole'\n", "did you mean 'fail-on'"),
        ("[tool.strati.check]\nfail-on = 'hole\n", "cannot be read"),
        ("[tool.strati]\ncheck = 3\n", "cannot be read"),
        ("[tool.strati.check]\nfail-on = 'holes'\n", "did you mean 'hole'"),
    ):
        table.write_text(text)
        done = run_strati("check", TRAINED, cwd=inner)
        assert done.returncode == 2 and reason in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_several_networks_fail_if_one_does(broken: Path) -> None:
    done = run(TRAINED, broken)
    assert done.returncode == 3
    assert done.stdout.splitlines()[0].startswith(str(TRAINED)[:40]) and "FAIL: not-finite" in done.stdout
    assert run(TRAINED, INITIAL).returncode == 0
    assert run(TRAINED, broken, "--json", "-").returncode == 2


def test_the_codes_are_listed() -> None:
    done = run("--list")
    assert done.returncode == 0
    assert all(f"{code}: " in done.stdout for code in CODES)


def test_a_check_without_a_model_says_what_to_give() -> None:
    done = run()
    assert done.returncode == 2
    assert "--list" in done.stderr


def recipes() -> list[str]:
    """The commands that the docs recommend for a network of one's own, without a base."""
    docs = Path(__file__).resolve().parents[2] / "docs"
    text = "".join((docs / page).read_text() for page in ("check.md", "guides/ci.md"))
    return sorted(
        set(re.findall(r"strati check (?:model\.safetensors|out/|\"\$f\")((?: --fail-on [a-z,-]+)?)", text))
    )


def test_the_recommended_recipes_pass_the_embedded_network() -> None:
    assert "" in recipes()
    for recipe in recipes():
        done = run(TRAINED, *recipe.split())
        assert done.returncode == 0, (recipe, done.stdout)


def test_the_documented_workflow_and_hook_run(tmp_path: Path, broken: Path) -> None:
    """The `run:` step and the hook's entry of docs/check.md, as the runner and pre-commit would call them."""
    import shlex
    import shutil

    page = (Path(__file__).resolve().parents[2] / "docs" / "check.md").read_text()
    (step,) = re.findall(r"- run: strati (check .+)", page)
    (entry,) = re.findall(r"entry: strati (check)\n", page)
    shutil.copy(TRAINED, tmp_path / "model.safetensors")
    done = run_strati(*shlex.split(step), cwd=tmp_path)
    assert done.returncode == 0 and (tmp_path / "check.json").is_file()
    assert run_strati(entry, "model.safetensors", broken, cwd=tmp_path).returncode == 3
    (tmp_path / "model.safetensors").write_bytes(broken.read_bytes())
    failed = run_strati(*shlex.split(step), cwd=tmp_path)
    assert failed.returncode == 3 and "\n::error file=model.safetensors,title=not-finite::" in failed.stdout


def test_every_code_of_networks_and_spectra_can_be_asked_for() -> None:
    """The codes are read from the source: a new one must be registered."""
    missing = set()
    for path in [*(SOURCE / "io").rglob("*.py"), *(SOURCE / "spectra").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Flag":
                code = node.args[0] if node.args else None
                if isinstance(code, ast.Constant) and code.value not in CODES:
                    missing.add(code.value)
    # about the order of a series' checkpoints, and about the products of attention heads, which check does not look at
    assert missing <= {"out-of-order", "ambiguous", "rotary", "shared-heads"}
