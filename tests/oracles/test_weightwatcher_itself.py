"""weightwatcher itself beside its stored numbers and beside strati; run by ``make oracles-test``."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from strati.spectra import htsr
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


def analysed(name: str, **options: Any) -> Any:
    """The columns of weightwatcher for one case, with further options, and the matrix as it was stored."""
    torch, weightwatcher = pytest.importorskip("torch"), pytest.importorskip("weightwatcher")
    matrix = load("cases").make(name).astype(np.float32)
    layer = torch.nn.Linear(matrix.shape[1], matrix.shape[0], bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(matrix))
    np.random.seed(0)  # noqa: NPY002 - the seed of its shuffle
    details = weightwatcher.WeightWatcher(model=torch.nn.Sequential(layer)).analyze(**options)
    return details.iloc[0], matrix.astype(np.float64)


@pytest.mark.parametrize("name", list(RECORD["cases"]))
def test_the_trace_log_condition(name: str) -> None:
    theirs, matrix = analysed(name, detX=True)
    ours = spectrum(matrix, htsr=True).metrics()
    assert ours["erg_size"] == theirs["detX_num"]
    assert ours["erg_gap"] == theirs["ERG_gap"]


@pytest.mark.parametrize("name", list(RECORD["cases"]))
def test_eigenvalues_of_its_shuffled_matrix(name: str) -> None:
    """``max_rand_eval``: the largest eigenvalue over the shuffles that its seed makes, one or five of them."""
    theirs, matrix = analysed(name, randomize=True)
    np.random.seed(0)  # noqa: NPY002
    largest = []
    for _ in range(5 if min(matrix.shape) < 100 else 1):
        order = np.arange(matrix.size)
        np.random.shuffle(order)  # noqa: NPY002
        largest.append(htsr.permuted_eigenvalues(matrix, order)[0])
    assert max(largest) == pytest.approx(theirs["max_rand_eval"], rel=1e-6)
