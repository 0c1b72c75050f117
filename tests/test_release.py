"""What a release needs is there and of one version."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

import strati

ROOT = Path(__file__).resolve().parents[1]


def parsed(name: str) -> Any:
    return pytest.importorskip("yaml").safe_load((ROOT / name).read_text())


def test_one_version_everywhere() -> None:
    citation = parsed("CITATION.cff")
    assert citation["version"] == strati.__version__
    versions = re.findall(r"^## (\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[0] == strati.__version__
    assert versions == sorted(versions, reverse=True)


def test_the_repository_stays_small() -> None:
    """Below 15 MB of tracked files: `python tools/pictures.py` re-encodes pictures that grew."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = [ROOT / name for name in names.stdout.split("\0") if name]
    assert sum(path.stat().st_size for path in files if path.is_file()) < 15e6


def test_the_citation_names_the_four_papers() -> None:
    citation = parsed("CITATION.cff")
    assert citation["cff-version"] == "1.2.0"
    assert len(citation["references"]) == 4
    assert all(paper["title"] and paper["authors"] and paper["type"] for paper in citation["references"])


@pytest.mark.parametrize("name", ["SECURITY.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "LICENSE"])
def test_the_usual_files_are_there(name: str) -> None:
    assert len((ROOT / name).read_text()) > 200


def test_hosted_checks_run_what_the_makefile_has() -> None:
    jobs = parsed(".github/workflows/ci.yml")["jobs"]
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = [step.get("run", "") for job in jobs.values() for step in job["steps"]]
    hooks = [hook["entry"] for hook in parsed(".pre-commit-config.yaml")["repos"][0]["hooks"]]
    called = re.findall(r"^make ([\w-]+)", "\n".join(commands + hooks), re.MULTILINE)
    assert {"test", "test-all", "types"} <= set(called) <= targets
    assert set(jobs["publish"]["needs"]) == set(jobs) - {"publish"}
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert parsed(".pre-commit-config.yaml")["repos"][0]["repo"] == "local"


def test_the_wheel_has_no_reproduction_code() -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert build == {"packages": ["src/strati"]}
    modules = {path.relative_to(ROOT / "src" / "strati").as_posix() for path in (ROOT / "src").rglob("*.py")}
    assert not {name for name in modules if name.startswith(("papers/", "zoo/"))}
    companion = tomllib.loads((ROOT / "reproductions" / "pyproject.toml").read_text())
    assert companion["project"]["name"] == "strati-reproductions"
    assert companion["tool"]["hatch"]["build"]["targets"]["wheel"] == {
        "packages": ["src/strati_reproductions"]
    }
    specifications = [path.name for path in (ROOT / "src" / "strati").rglob("*.toml")]
    assert specifications == ["study_template.toml"]  # what `study --template` prints


def test_the_makefile_installs_the_companion_for_tests_and_not_for_the_demo() -> None:
    text = (ROOT / "Makefile").read_text()
    demo, test = (text[text.index(f"$(VENV)/{name}.stamp: ") :].split("\n\n")[0] for name in ("demo", "test"))
    assert "-e '.[torch,plot,transformers]'" in demo and "reproductions" not in demo
    assert "-e ./reproductions" in test


def test_the_matrix_tries_every_extra() -> None:
    from tooling import tool

    matrix = tool("matrix")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {extra for extra, _, _ in matrix.CELLS.values()} == {"", *extras} - {"dev"}
    assert {versions for _, versions, _ in matrix.CELLS.values()} == {"oldest", "newest", "pinned"}
    assert matrix.found("no-such-python") is None
