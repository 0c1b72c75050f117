"""The Python of the guides runs as it stands, on small networks and data."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import strati

HOME = Path(__file__).resolve().parents[1] / "docs" / "guides"
torch = pytest.importorskip("torch")


def blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (HOME / f"{page}.md").read_text(), re.DOTALL | re.MULTILINE)


def run(page: str, names: dict[str, Any], number: int | None = None) -> dict[str, Any]:
    """Execute a page's blocks one after the other, or only the first ``number`` of them."""
    found = blocks(page)[:number]
    assert found, page
    for text in found:
        exec(compile(text, f"{page}.md", "exec"), names)
    return names


@pytest.fixture(autouse=True)
def aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)


def network() -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(6, 24), torch.nn.ReLU(), torch.nn.Linear(24, 3))
    x = torch.randn(60, 6)
    return {"model": model, "x": x, "y": model(x).argmax(1)}


def test_extension_points(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    shapes = {"fc1.weight": [40, 30], "fc2.weight": [30, 40]}
    for name, shape in shapes.items():
        rng.standard_normal(shape).astype("<f4").tofile(tmp_path / f"{name}.raw")
    (tmp_path / "index.json").write_text(json.dumps(shapes))
    names = run("extend", {**network(), "folder": tmp_path})
    table = names["table"]
    changed = table[table["intervention"] != "intact"]
    weight = names["model"][0].weight.detach().numpy()
    intact = table[(table["intervention"] == "intact") & table["layer"].isin(["0", "0.weight"])]
    assert intact["largest"].iloc[0] == pytest.approx(np.abs(weight).max(), rel=1e-6)
    assert (changed["moved"] > 0).all()
    assert names["verdicts"]["largest"] in (
        "use",
        "use-with-care",
        "distinguish-only",
        "do-not-use",
        "unknown",
    )
    values = np.linalg.svd(weight, compute_uv=False) ** 2
    assert names["gaps"]["0.weight"] == pytest.approx(values[0] - values[1], rel=1e-4)
    flipped = names["flips"].frame()
    assert set(flipped["intervention"]) == {"intact", "sign-flip"}
    assert (flipped[flipped["intervention"] == "sign-flip"].groupby("layer").size() == 2).all()
    assert list(names["strati"].scan(names["Raw"](tmp_path)).table["name"]) == list(shapes)


def test_a_model_in_memory(tmp_path: Path) -> None:
    def block() -> Any:
        attention = {name: torch.nn.Linear(32, 32) for name in ("query", "key", "value")}
        return torch.nn.ModuleDict(
            {"attention": torch.nn.ModuleDict({"self": torch.nn.ModuleDict(attention)})}
        )

    blocks = torch.nn.ModuleList([block(), block()])
    run("in-memory", {"model": torch.nn.ModuleDict({"encoder": torch.nn.ModuleDict({"layer": blocks})})})
    assert json.loads((tmp_path / "scan.json").read_text())["schema"] == "strati.scan/1"


class Block(torch.nn.Module):
    """Passes its input on, so that it can be dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(12, 12)

    def forward(self, x: Any) -> Any:
        return x + self.linear(x).relu()


def test_a_measure_of_ones_own(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(6, 12), Block(), Block(), Block(), torch.nn.Linear(12, 3))
    x = torch.randn(60, 6)
    names: dict[str, Any] = {"model": model, "pairs": (x, model(x).argmax(1))}
    names["score"] = lambda model, pairs: float((model(pairs[0]).argmax(1) == pairs[1]).float().mean())
    found = run("own-metric", names)["study"].frame()
    assert {"truncate", "quantise", "drop"} <= set(found["intervention"])
    assert (tmp_path / "study").is_dir()


def test_ranks_for_lora(tmp_path: Path) -> None:
    made = network()
    base = torch.nn.Sequential(torch.nn.Linear(6, 24), torch.nn.ReLU(), torch.nn.Linear(24, 3))
    run("lora-rank", {"tuned": made["model"], "base": base, "data": (made["x"], made["y"])})
    assert "rank_pattern" in json.loads((tmp_path / "rank.json").read_text())


def test_a_plain_loop(tmp_path: Path) -> None:
    made = network()
    names = run("training-run", {"model": made["model"], "loader": range(201)}, number=1)
    assert names["tracker"].skipped in (0, 1, 2)
    assert any((tmp_path / "run").iterdir())


def test_callbacks_are_where_the_page_says() -> None:
    text = (HOME / "training-run.md").read_text()
    assert "from strati.integrations.transformers import StratiCallback" in text
    assert "from strati.integrations.lightning import StratiCallback" in text
    for name in ("transformers", "lightning"):
        tree = ast.parse((Path(strati.__file__).parent / "integrations" / f"{name}.py").read_text())
        assert any(isinstance(node, ast.ClassDef) and node.name == "StratiCallback" for node in tree.body)


@pytest.mark.slow
def test_a_learning_coefficient() -> None:
    found = run("learning-coefficient", network())["llc"]
    assert found.estimate is not None or found.reason


def test_every_task_has_a_page_that_is_in_the_navigation() -> None:
    navigation = (HOME.parents[1] / "mkdocs.yml").read_text()
    pages = sorted(HOME.glob("*.md"))
    assert len(pages) >= 10
    assert [p.name for p in pages if f"guides/{p.name}" not in navigation] == []
