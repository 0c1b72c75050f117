"""weightwatcher itself beside its stored numbers and beside strati; run by ``make oracles-test``."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from strati.spectra.spectrum import spectrum

pytestmark = pytest.mark.oracle
ORACLE = Path(__file__).resolve().parents[1] / "spectra" / "oracle"
RECORD = json.loads((ORACLE / "weightwatcher.json").read_text())


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"oracle_{name}", ORACLE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    weightwatcher = pytest.importorskip("weightwatcher")
    assert weightwatcher.__version__ == RECORD["weightwatcher"]
    return load("make_weightwatcher")


@pytest.mark.parametrize("name", list(RECORD["cases"]))
def test_stored_numbers_are_those_of_the_package(maker: ModuleType, name: str) -> None:
    assert maker.analysed(name) == pytest.approx(RECORD["cases"][name], rel=1e-6)


@pytest.mark.parametrize("name", list(RECORD["cases"]))
def test_strati_agrees_with_the_package(maker: ModuleType, name: str) -> None:
    theirs, ours = maker.analysed(name), spectrum(load("cases").make(name)).metrics()
    assert ours["alpha"] == pytest.approx(theirs["alpha"], rel=1e-6)
    assert ours["stable_rank"] == pytest.approx(theirs["stable_rank"], rel=1e-6)
