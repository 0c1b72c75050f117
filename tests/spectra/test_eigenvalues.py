"""Gram matrices, the torch route and the estimate of what a scan costs."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import strati
from strati.spectra.eigenvalues import gram
from strati.spectra.layerwise import estimate_scan, work


@pytest.mark.parametrize("order", ["C", "F", "strided"])
@pytest.mark.parametrize("dtype", [np.float64, np.float32, ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("shape", [(5000, 7), (7, 5000), (40, 40)])
def test_grams_by_strips_in_any_layout(order: str, dtype: type, shape: tuple[int, int]) -> None:
    W = np.random.default_rng(2).normal(size=shape).astype(dtype)
    W = (
        np.asarray(W, order="F")
        if order == "F"
        else np.repeat(W, 2, axis=1)[:, ::2]
        if order == "strided"
        else W
    )
    double = W.astype(np.float64)
    expected = double.T @ double if shape[0] >= shape[1] else double @ double.T
    np.testing.assert_allclose(gram(W), expected, rtol=1e-12, atol=1e-9)


@pytest.mark.parametrize("kind", ["noise", "conv", "low rank", "bfloat16"])
def test_solving_through_torch_gives_the_same_spectrum(kind: str) -> None:
    """The code path of ``--device cuda`` on torch's cpu: every number to 1e-9, every count and warning alike."""
    pytest.importorskip("torch")
    rng = np.random.default_rng(3)
    W: object = rng.normal(size=(90, 70))
    if kind == "conv":
        W = list(rng.normal(size=(9, 24, 16)).astype(np.float32))
    elif kind == "low rank":
        W = rng.normal(size=(90, 5)) @ rng.normal(size=(5, 70))
    elif kind == "bfloat16":
        W = np.asarray(W).astype(ml_dtypes.bfloat16)
    one, other = strati.spectrum(W), strati.spectrum(W, device="cpu")
    assert [w.code for w in one.warnings] == [w.code for w in other.warnings]
    for name, value in one.metrics().items():
        if isinstance(value, float):
            assert other.metrics()[name] == pytest.approx(value, rel=1e-6, abs=1e-12), name
        elif not isinstance(value, dict):
            assert other.metrics()[name] == value, name


def test_a_device_that_is_not_there_is_refused() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(strati.StratiError, match="cannot compute in float64 here"):
        strati.scan({"a.weight": np.eye(20)}, device="nonsense")
    if not torch.cuda.is_available():
        with pytest.raises(strati.StratiError, match="device cuda"):
            strati.scan({"a.weight": np.eye(20)}, device="cuda")
    weights = {"a.weight": np.random.default_rng(0).normal(size=(40, 30))}
    assert strati.scan(weights, device="cpu")["a"].phase == strati.scan(weights)["a"].phase


def test_estimates(tmp_path: Path) -> None:
    """Operations and memory by their formulas; seconds of the right size: within a factor of ten of the truth."""
    import time

    rng = np.random.default_rng(4)
    net = strati.open({f"{i}.weight": rng.normal(size=(700, 500)).astype(np.float32) for i in range(4)})
    found = estimate_scan("net", net.layers(), workers=1)
    assert found.matrices == 4 and found.bytes == 4 * 700 * 500 * 4
    assert found.flops == pytest.approx(4 * (700 * 500**2 + 4 / 3 * 500**3))
    assert found.memory == 8 * 500 * (700 + 500)
    assert work(net.layers()[0]) == (700 * 500**2, pytest.approx(4 / 3 * 500**3))
    start = time.perf_counter()
    strati.scan(net, workers=1)
    assert found.seconds / 10 < time.perf_counter() - start < found.seconds * 10 + 1
    assert found.to_dict()["schema"] == "strati.estimate/1"
    assert estimate_scan("net", net.layers(), workers=2).seconds < found.seconds
