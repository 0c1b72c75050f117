"""What must not depend on scale, orientation or order; and matrices that have no spectrum to speak of."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strati.core.errors import BadInputError
from strati.spectra.spectrum import spectrum

SQUARED = {"xmin", "mp_lambda_minus", "mp_lambda_plus"}
LINEAR = {"frobenius_norm", "spectral_norm", "mp_sigma"}
ADDED = {"alpha_weighted", "log_alpha_norm"}
INTEGERS = {"hard_rank", "tail_size", "spikes", "quasi_null", "state", "phase"}


def matrices() -> st.SearchStrategy[np.ndarray]:
    def make(seed: int, rows: int, columns: int, kind: str) -> np.ndarray:
        rng = np.random.default_rng(seed)
        W = rng.normal(size=(rows, columns))
        if kind == "spiked":
            W += 2 * np.outer(rng.normal(size=rows), rng.normal(size=columns))
        elif kind == "heavy":
            W = rng.standard_t(2.5, size=(rows, columns))
        elif kind == "decaying":
            W *= np.arange(1, columns + 1) ** -1.0
        return W

    kinds = st.sampled_from(["noise", "spiked", "heavy", "decaying"])
    return st.builds(make, st.integers(0, 10**6), st.integers(12, 70), st.integers(12, 70), kinds)


def same(a: dict[str, object], b: dict[str, object], rel: float = 1e-7) -> None:
    for name in a.keys() - {"phase_evidence"}:
        if name in INTEGERS or a[name] is None or b[name] is None:
            assert a[name] == b[name], name
        else:
            assert b[name] == pytest.approx(a[name], rel=rel, abs=1e-12), name


@settings(max_examples=40, deadline=None)
@given(matrices(), st.randoms(use_true_random=False))
def test_orientation_and_order_do_not_matter(W: np.ndarray, random: object) -> None:
    rng = np.random.default_rng(random.randrange(10**6))  # type: ignore[attr-defined]
    before = spectrum(W).metrics()
    same(before, spectrum(W.T).metrics())
    same(before, spectrum(W[rng.permutation(W.shape[0])][:, rng.permutation(W.shape[1])]).metrics())
    same(before, spectrum(-W).metrics())


@settings(max_examples=40, deadline=None)
@given(matrices(), st.sampled_from([1e-20, 1e-4, 3.7, 1e20]))
def test_scale_covariance(W: np.ndarray, scale: float) -> None:
    before, after = spectrum(W).metrics(), spectrum(W * scale).metrics()
    for name in before.keys() - {"phase_evidence"}:
        a, b = before[name], after[name]
        if name in INTEGERS or a is None or b is None:
            assert a == b, name
            continue
        factor = scale**2 if name in SQUARED else scale if name in LINEAR else 1.0
        if name in ADDED:
            shift = 2 * np.log10(scale) * before["alpha"]
            assert b == pytest.approx(a + shift, rel=1e-6, abs=1e-6 * abs(shift)), name
        else:
            assert b / factor == pytest.approx(a, rel=1e-7, abs=1e-12), name


def test_definitions() -> None:
    W = np.random.default_rng(2).normal(size=(90, 50)) * np.arange(1, 51) ** -0.5
    s = np.linalg.svd(W, compute_uv=False)
    lam, m = s**2, spectrum(W).metrics()
    p = lam / lam.sum()
    assert m["stable_rank"] == pytest.approx(lam.sum() / lam.max())
    assert m["entropy"] == pytest.approx(-(p * np.log(p)).sum() / np.log(50))
    assert m["frobenius_norm"] == pytest.approx(np.linalg.norm(W))
    assert m["spectral_norm"] == pytest.approx(s[0])
    assert m["alpha_weighted"] == pytest.approx(m["alpha"] * np.log10(lam.max()))
    assert m["log_alpha_norm"] == pytest.approx(np.log10((lam ** m["alpha"]).sum()))
    assert m["alpha_stderr"] >= (m["alpha"] - 1) / np.sqrt(m["tail_size"])
    assert m["mp_soft_rank"] == pytest.approx(m["mp_lambda_plus"] / lam.max())
    edges = [90 * m["mp_sigma"] ** 2 * (1 + sign * np.sqrt(50 / 90)) ** 2 for sign in (-1, 1)]
    assert [m["mp_lambda_minus"], m["mp_lambda_plus"]] == pytest.approx(edges)


@pytest.mark.parametrize(
    ("W", "codes"),
    [
        (np.zeros((20, 30)), {"constant"}),
        (np.full((30, 20), 2.5), {"constant"}),
        (np.ones((1, 1)), {"constant"}),
        (np.random.default_rng(0).normal(size=(1, 40)), {"few-eigenvalues"}),
        (np.random.default_rng(0).normal(size=(9, 40)), {"few-eigenvalues"}),
        (np.outer(np.arange(1, 21.0), np.arange(1, 31.0)), {"few-eigenvalues"}),
        (np.zeros((0, 5)), {"empty"}),
        (np.full((12, 12), np.nan), {"not-finite"}),
        (np.where(np.eye(30) > 0, np.inf, 1.0), {"not-finite"}),
        (np.random.default_rng(0).normal(size=(30, 30)) * 1e200, {"out-of-range"}),
        (np.random.default_rng(0).normal(size=(30, 30)) * 1e-200, {"out-of-range"}),
    ],
)
def test_matrices_without_a_fit_get_a_warning_and_no_number(W: np.ndarray, codes: set[str]) -> None:
    sp = spectrum(W)
    assert {w.code for w in sp.warnings} == codes
    m = sp.metrics()
    assert m["alpha"] is None and m["mp_sigma"] is None and m["mu"] is None
    assert all(v is None or isinstance(v, str | dict) or np.isfinite(v) for v in m.values())
    if codes & {"not-finite", "out-of-range", "empty"}:
        assert m.pop("state") == "broken" and all(v is None for v in m.values())


def test_ranks_of_degenerate_matrices() -> None:
    assert spectrum(np.zeros((20, 30))).metrics()["hard_rank"] == 0
    one = spectrum(np.outer(np.arange(1, 21.0), np.arange(1, 31.0))).metrics()
    assert (one["hard_rank"], one["entropy"], one["stable_rank"]) == (1, 0.0, pytest.approx(1.0))
    assert one["phase"] == "rank-collapse"


def test_float64_ranks_are_not_lost_to_the_gram_matrix() -> None:
    """Singular values down to 1e-12 are real in float64, though their squares vanish beside the largest."""
    rng = np.random.default_rng(1)
    U, V = (np.linalg.qr(rng.normal(size=(40, 40)))[0] for _ in range(2))
    s = np.geomspace(1, 1e-12, 40)
    sp = spectrum((U * s) @ V.T)
    assert sp.metrics()["hard_rank"] == 40
    assert np.sqrt(sp.eigenvalues[0]) == pytest.approx(1e-12, rel=1e-2)
    s[30:] = 0
    assert spectrum((U * s) @ V.T).metrics()["hard_rank"] == 30


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision(dtype: type) -> None:
    """The numbers are those of the rounded weights; the rank's tolerance is the coarse dtype's."""
    W = np.random.default_rng(4).normal(size=(60, 40)).astype(dtype)
    half, double = spectrum(W), spectrum(W.astype(np.float64))
    assert half.metrics()["alpha"] == pytest.approx(double.metrics()["alpha"])
    assert half.metrics()["entropy"] == pytest.approx(double.metrics()["entropy"])
    s = np.linalg.svd(W.astype(np.float64), compute_uv=False)
    expected = int((s > 60 * float(ml_dtypes.finfo(dtype).eps) * s[0]).sum())
    assert half.metrics()["hard_rank"] == expected
    assert "coarse-dtype" in {w.code for w in half.warnings}


def test_pooled_slices() -> None:
    """A convolution's slices: eigenvalues pooled, noise recognised as noise, sigma that of the entries."""
    rng = np.random.default_rng(6)
    kernel = rng.normal(scale=0.3, size=(32, 48, 3, 3)).astype(np.float32)
    slices = [kernel[:, :, i, j] for i in range(3) for j in range(3)]
    sp = spectrum(slices)
    each = np.sort(np.concatenate([np.linalg.svd(s, compute_uv=False) ** 2 for s in slices]))
    np.testing.assert_allclose(sp.eigenvalues, each, rtol=1e-4)
    m = sp.metrics()
    assert m["mp_sigma"] == pytest.approx(0.3, rel=0.02)
    assert "noise-like" in {w.code for w in sp.warnings}
    assert (m["hard_rank"], m["spikes"], m["quasi_null"]) == (9 * 32, 0, 0)


@pytest.mark.parametrize("W", [np.zeros(5), np.zeros((2, 2, 2)), np.ones((3, 3), complex), np.array([["a"]])])
def test_not_a_matrix(W: np.ndarray) -> None:
    with pytest.raises(BadInputError):
        spectrum(W)
    with pytest.raises(BadInputError):
        spectrum([np.eye(3), np.eye(4)])


def test_a_torch_parameter_is_its_matrix():
    torch = pytest.importorskip("torch")
    weights = torch.nn.Linear(40, 60).weight
    expected = spectrum(weights.detach().numpy()).metrics()
    assert spectrum(weights).metrics() == expected
    assert spectrum(weights.detach()).metrics() == expected
    assert spectrum(weights.bfloat16()).pooled.epsilon == 2.0**-7
    whole = torch.arange(-60, 60, dtype=torch.int16).reshape(10, 12)
    assert spectrum(whole).metrics() == spectrum(whole.numpy()).metrics()
