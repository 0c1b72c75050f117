"""The two-stage solver, the torch route and the estimate of what a scan costs."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import strati
from strati.spectra import solvers
from strati.spectra.eigenvalues import _gram_eigenvalues, eigenvalues, gram
from strati.spectra.estimate import estimate_scan
from strati.spectra.layerwise import work


def solver() -> solvers.Solve:
    found = solvers.two_stage_solver()
    if found is None:
        pytest.skip("no OpenBLAS with dsyevd_2stage here")
    return found


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 200), st.sampled_from(["noise", "graded", "repeated", "zero"]))
def test_the_two_stage_solver_agrees_with_lapack(seed: int, size: int, kind: str) -> None:
    rng = np.random.default_rng(seed)
    half = rng.normal(size=(size, size))
    if kind == "graded":
        half *= np.geomspace(1, 1e-6, size)
    elif kind == "repeated":
        half = np.linalg.qr(half)[0]
    elif kind == "zero":
        half *= 0
    matrix = half @ half.T
    found = solver()(np.tril(matrix))
    expected = np.linalg.eigvalsh(matrix)
    assert np.all(np.diff(found) >= 0)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-13 * max(expected[-1], 1e-300))


def test_large_matrices_go_the_fast_way_and_agree_to_1e_14(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the two ways on a matrix above the size where it pays, and that the switch is really taken."""
    W = np.random.default_rng(0).normal(size=(400, 300)).astype(np.float32)
    calls = []
    fast = solver()
    monkeypatch.setattr(solvers, "TWO_STAGE_COLUMNS", 300)
    monkeypatch.setattr(solvers, "two_stage_solver", lambda: lambda m: calls.append(m.shape) or fast(m))
    one = eigenvalues(W).values
    eigenvalues(W[:, 1:])
    assert calls == [(300, 300)]
    monkeypatch.setattr(solvers, "two_stage_solver", lambda: None)
    other = eigenvalues(W).values
    np.testing.assert_allclose(one, other, rtol=0, atol=2e-14 * other[-1])


def test_the_choice_of_solver_depends_on_the_size_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """From 3,072 columns on, on every machine: smaller ones are slower with it on processors with large caches."""
    sizes: list[int] = []

    def solve(matrix: np.ndarray) -> np.ndarray:
        sizes.append(matrix.shape[0])
        return np.diagonal(matrix)

    monkeypatch.setattr(solvers, "two_stage_solver", lambda: solve)
    for size in (1024, 1536, 3071, 3072):
        monkeypatch.setattr(np.linalg, "eigvalsh", np.diagonal)
        _gram_eigenvalues(np.eye(2), np.eye(size), None)
    assert sizes == [3072]


def test_a_routine_that_is_wrong_or_fails_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    good = solvers._lapack_routines()
    solvers.two_stage_solver.cache_clear()

    def wrong(*_: object) -> None:
        """Changes nothing: the values stay what was in memory."""

    monkeypatch.setattr(solvers, "_lapack_routines", lambda: [wrong])
    try:
        assert solvers.two_stage_solver() is None
        solvers.two_stage_solver.cache_clear()
        monkeypatch.setattr(solvers, "_lapack_routines", lambda: [wrong, *good])
        assert (solvers.two_stage_solver() is not None) == bool(good)
    finally:
        solvers.two_stage_solver.cache_clear()


def test_a_solve_that_does_not_converge_is_done_the_other_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(matrix: np.ndarray) -> np.ndarray:
        matrix[:] = np.nan
        raise np.linalg.LinAlgError("no convergence")

    monkeypatch.setattr(solvers, "TWO_STAGE_COLUMNS", 200)
    W = np.random.default_rng(1).normal(size=(204, 200)).astype(np.float32)
    expected = eigenvalues(W).values
    monkeypatch.setattr(solvers, "two_stage_solver", lambda: fails)
    np.testing.assert_allclose(eigenvalues(W).values, expected, rtol=0, atol=2e-14 * expected[-1])


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
