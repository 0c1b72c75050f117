"""Every result has a JSON Schema, and real results keep to it."""

from __future__ import annotations

import copy
import importlib
import json
import pkgutil
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tooling import tool

import strati
from strati.core.results import Result
from strati.report.runs import read_run
from strati.schemas import names, schema


def strict(node: Any) -> Any:
    """A schema that allows no field it does not list."""
    if isinstance(node, list):
        return [strict(entry) for entry in node]
    if not isinstance(node, dict):
        return node
    closed = {"additionalProperties": False} if "properties" in node and "required" in node else {}
    return {key: strict(entry) for key, entry in node.items()} | closed


def problems(result: Any) -> list[str]:
    validator = jsonschema.Draft202012Validator(strict(schema(result["schema"])))
    return [
        f"{'/'.join(map(str, e.absolute_path))}: {e.message[:200]}" for e in validator.iter_errors(result)
    ]


def kinds(of: type = Result) -> set[type]:
    for module in pkgutil.walk_packages(strati.__path__, "strati."):
        if not module.name.endswith("__main__") and ".integrations." not in module.name:
            importlib.import_module(module.name)
    found, new = set(), {of}
    while new:
        new = {kind for parent in new for kind in parent.__subclasses__()}
        found |= new
    return {kind for kind in found if kind.__module__.startswith("strati.")}


def test_schemas_are_generated_from_the_types_of_the_results() -> None:
    for path, text in tool("write_schemas").texts().items():
        assert path.read_text() == text, f"{path.name}: run tools/write_schemas.py"


@pytest.mark.parametrize("name", names())
def test_schemas_are_schemas(name: str) -> None:
    jsonschema.Draft202012Validator.check_schema(schema(name))
    assert schema(name)["$id"] == name


def test_every_result_has_one() -> None:
    assert {f"strati.{kind.verb}/1" for kind in kinds()} <= set(names())


def test_real_results_keep_to_theirs(real: dict[str, Path]) -> None:
    seen = set()
    for path in real.values():
        result = json.loads(path.read_text()) if path.is_file() else read_run(path)
        assert problems(result) == []
        seen.add(result["schema"])
    elsewhere = {"demo", "explain", "track", "check", "interaction-basis", "interaction-graph"}
    elsewhere |= {
        "shuffle",
        "lineage",
        "shuffle-transformer",
        "reassemble-transformer",
        "identify",
        "correspond",
        "curvature",
        "influence",
    }
    assert seen >= set(names()) - {f"strati.{verb}/1" for verb in elsewhere}


def test_results_in_memory_keep_to_theirs() -> None:
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)).double()
    x = torch.randn(30, 3, dtype=torch.float64)
    basis = strati.interaction_basis(net, x)
    tracked = strati.track([net, net], steps=[0, 1], data=(x, net(x).argmax(1)), what="spectra,loss")
    curved = strati.curvature(net, "behavioural-mse", x)
    for result in (
        basis,
        strati.interaction_graph(basis),
        strati.check(net),
        tracked,
        curved,
        strati.lineage(net, net),
        strati.influence(net, "behavioural-mse", x[:6], chains=2, draws=20, warmup=20, gamma=10.0),
    ):
        assert problems(result.to_dict()) == []


def test_a_schema_notices(real: dict[str, Path]) -> None:
    """Every required field of every real result, taken away; and a number where text belongs."""
    for path in real.values():
        result = json.loads(path.read_text()) if path.is_file() else read_run(path)
        for field in schema(result["schema"])["required"]:
            lacking = copy.deepcopy(result)
            del lacking[field]
            assert jsonschema.Draft202012Validator(schema(result["schema"])).is_valid(lacking) is False
        assert problems(result | {"strati": 3})
    scan = json.loads(real["scan"].read_text())
    scan["layers"][0]["role"] = "attention"
    scan["layers"][0]["alpha"] = "two"
    assert len(problems(scan)) == 2


def test_what_is_not_there_is_named() -> None:
    with pytest.raises(strati.StratiError, match=r"no such schema; there are: .*strati\.scan/1"):
        schema("strati.sing/1")
