"""The tables of docs/compression.md are those of the stored numbers, and the tool measures what it says."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

torch = pytest.importorskip("torch")

import compression_table as tool  # noqa: E402
from strati.interventions.tasks import StudyData  # noqa: E402


@pytest.fixture(scope="module")
def stored() -> dict[str, dict[str, dict[str, dict[str, float]]]]:
    return json.loads(tool.STORED.read_text())


@pytest.fixture(scope="module")
def small() -> tool.Network:
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    mixing = rng.normal(size=(4, 16))
    x = (rng.normal(size=(300, 4)) @ mixing + 0.1 * rng.normal(size=(300, 16))).astype(np.float32)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 5))
    y = model(torch.from_numpy(x)).argmax(1).numpy()
    planning, test = (StudyData("rows", 5, x[:0], None, x[i:j], y[i:j]) for i, j in ((100, 200), (200, 300)))
    return tool.Network(
        "small", model.eval(), ("*",), x[:100], planning, test, 50, (x[:50], x[50:100]), (20, 50)
    )


def test_the_page_and_the_csv_have_the_stored_numbers(stored) -> None:
    page = tool.PAGE.read_text()
    assert {m["name"] for m in tool.TABLE.finditer(page)} == {
        *tool.METHODS,
        "advice",
        "data",
        "order",
        "plans",
        "tokens",
    }
    assert tool.filled(page, stored, json.loads(tool.ACTING.read_text())) == page
    assert tool.FIGURE.with_suffix(".csv").read_text() == tool.points_as_csv(tool.curves(stored))
    assert f"images/{tool.FIGURE.name}" in page and tool.FIGURE.stat().st_size < 60_000


def test_every_network_has_every_edit(stored) -> None:
    assert set(stored["edits"]) == set(tool.NETWORKS)
    every = {
        f"{action} {','.join(filter(None, (setting, extra)))}"
        for action, methods in tool.METHODS.items()
        for setting in tool.SETTINGS[action]
        for extra in methods.values()
    }
    for name, cells in stored["edits"].items():
        measured = {key for key in cells if " " in key}
        assert measured == every if name != "smollm2" else measured < every
        for key in measured:
            assert cells[key]["loss"] - cells["none"]["loss"] == pytest.approx(cells[key]["rise"])
    drawn = {p["network"] for p in tool.curves(stored)}
    assert drawn <= {stored["edits"][name]["about"]["title"] for name in tool.TOKENS}


def test_an_edit_is_measured_on_the_test_rows_only(small: tool.Network) -> None:
    cells = dict(tool.edits(small, Path()))
    number = cells["quantise bits=2,group=32"]()
    with torch.no_grad():
        x, y = torch.from_numpy(small.test.x_test), torch.from_numpy(small.test.y_test)
        intact = float(torch.nn.functional.cross_entropy(small.model(x), y))
        import strati

        with strati.quantised(small.model, {"*": "bits=2,group=32"}):
            edited = float(torch.nn.functional.cross_entropy(small.model(x), y))
    assert cells["none"]()["loss"] == pytest.approx(intact, rel=1e-5)
    assert number["loss"] == pytest.approx(edited, rel=1e-5)
    assert number["rise"] == pytest.approx(edited - intact, rel=1e-4)
    aware, plain = (cells[f"truncate parameters=0.8{extra}"]() for extra in (",metric=inputs", ""))
    assert aware["loss"] < plain["loss"]


def test_stored_numbers_are_not_measured_again(
    small: tool.Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(tool.NETWORKS, "small", lambda folder: small)
    monkeypatch.setattr(tool, "CURVES", {"GPTQ": ("quantise", "bits=3,group=32", "method=gptq")})
    stored = {"tokens": {"small": {"GPTQ: 20: 0": 7.0}}}
    keys = list(tool.measure(tmp_path, "tokens", ["small"], stored))
    assert len(keys) == len(stored["tokens"]["small"]) - 1 == 4  # the plain edit, two draws of two counts
    assert stored["tokens"]["small"]["GPTQ: 20: 0"] == 7.0
    assert list(tool.measure(tmp_path, "tokens", ["small"], stored)) == []
