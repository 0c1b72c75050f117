"""Packages that add to strati by entry points: the example of docs/guides/extend.md, installed and used."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import plugin
import pytest
from command import run_strati

import strati
from strati import embedded
from strati.core import plugins
from strati.core.errors import BadInputError

PAGE = (plugin.HOME / "docs" / "guides" / "extend.md").read_text()
MODEL = str(embedded.path("digits-mlp.safetensors"))


def block(start: str) -> str:
    found = re.search(rf"^```{re.escape(start)}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    assert found is not None
    return found[1]


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the installed example."""
    project = tomllib.loads(block("toml"))["project"]
    (tmp_path / "strati_example.py").write_text(block('python title="strati_example.py"'))
    plugin.describe(tmp_path, project["name"], project["entry-points"])
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("strati_example", None)


def test_the_page_shows_one_of_each() -> None:
    shown = set(tomllib.loads(block("toml"))["project"]["entry-points"])
    assert shown == {plugins.COMMANDS, plugins.SPECS, plugins.FORMATS, plugins.INTERVENTIONS, plugins.METRICS}


def test_a_command(example: Path) -> None:
    assert run_strati("count-layers", MODEL, expect=0).stdout == "3\n"
    assert "count-layers" in run_strati("--help", expect=0).stdout


def test_a_study_by_name_with_an_intervention_and_a_metric(example: Path) -> None:
    run_strati("study", "example-digits", "--out", example / "study", "--workers", "1", "--quiet", expect=0)
    rows = strati.load_study(example / "study").frame()
    assert set(rows["intervention"]) == {"intact", "halve"}
    largest = rows.pivot(index="layer", columns="intervention", values="largest-entry")
    assert np.allclose(largest["halve"], largest["intact"] / 2)


def test_an_intervention_by_name_in_python(example: Path) -> None:
    import torch

    net = torch.nn.Sequential(torch.nn.Linear(4, 2))
    x = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    rows = strati.study(net, data=(x, net(x).argmax(1)), interventions=["halve"]).frame()
    assert set(rows["intervention"]) == {"intact", "halve"} and "largest-entry" in rows
    with pytest.raises(BadInputError, match="'halve'"):
        strati.study(net, data=(x, net(x).argmax(1)), interventions=["halv"])


def test_a_format(example: Path) -> None:
    weight = np.random.default_rng(0).normal(size=(8, 5))
    file = example / "net.matrices"
    lines = "\n".join(" ".join(map(repr, row)) for row in weight.tolist())
    file.write_text(f"# matrices\n# fc1.weight\n{lines}\n")
    network = strati.open(file)
    assert network.format == "text-matrices"
    assert np.array_equal(network.read("fc1.weight"), weight)
    scanned = json.loads(run_strati("scan", file, "--json", "-", expect=0).stdout)
    assert [layer["name"] for layer in scanned["layers"]] == ["fc1.weight"]
    other = example / "other.matrices"
    other.write_text("something else")
    assert "unsupported format" in run_strati("scan", other, expect=2).stderr
    file.write_text("# matrices\n# fc1.weight\n1 2\nx y\n")
    error = run_strati("scan", file, expect=2).stderr
    assert "the format text-matrices cannot read it: ValueError" in error and error.count("\n") == 1


def test_a_package_that_cannot_be_imported_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin.describe(tmp_path, "broken-package", {plugins.COMMANDS: {"broken": "no_such_module:command"}})
    monkeypatch.syspath_prepend(str(tmp_path))
    done = run_strati("broken", expect=2)
    assert done.stderr.startswith(
        "strati: error: strati.commands broken: the package broken-package cannot be loaded"
    )
    run_strati("inspect", MODEL, expect=0)


def test_names_that_nobody_adds_are_refused() -> None:
    assert plugins.load(plugins.METRICS, "no-such-metric") is None
    run_strati("no-such-command", expect=2)


def test_looking_for_plug_ins_does_not_import_torch() -> None:
    code = "import sys; from strati.core import plugins; import strati.cli.main; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
