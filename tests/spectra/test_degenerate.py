"""Matrices that are no noise and no network: orthogonal ones, low ranks in coarse dtypes, tails that are none."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strati.spectra.spectrum import Spectrum, spectrum

DTYPES = [np.float64, np.float32, np.float16, ml_dtypes.bfloat16]


def codes(sp: Spectrum) -> set[str]:
    return {flag.code for flag in sp.warnings}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(20, 20), (128, 128), (300, 64), (64, 300)])
def test_orthogonal_matrices_are_named(dtype: type, shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    Q = np.linalg.qr(rng.normal(size=(max(shape), min(shape))))[0]
    for scale in (1.0, 0.02):
        sp = spectrum(((Q if shape[0] >= shape[1] else Q.T) * scale).astype(dtype))
        assert "orthogonal" in codes(sp), sp.warnings
        m = sp.metrics()
        assert m["alpha"] is None and m["phase"] is None and m["spikes"] is None
        assert m["stable_rank"] == pytest.approx(min(shape), rel=0.02)


def test_identity_projection_and_nearly_orthogonal() -> None:
    rng = np.random.default_rng(1)
    Q = np.linalg.qr(rng.normal(size=(80, 80)))[0]
    assert "orthogonal" in codes(spectrum(np.eye(40)))
    half = spectrum((Q[:, :40] @ Q[:, :40].T).astype(np.float32))  # a projection: rank 40, all of it equal
    assert "orthogonal" in codes(half) and half.phase == "rank-collapse" and half.metrics()["alpha"] is None
    far = spectrum(Q + 0.02 * rng.normal(size=(80, 80)))
    assert "orthogonal" not in codes(far) and far.metrics()["alpha"] is not None


def test_no_exponent_in_the_thousands() -> None:
    """A top of nearly equal eigenvalues above a spread body: the 'tail' is a point, and has no exponent."""
    rng = np.random.default_rng(2)
    U, V = (np.linalg.qr(rng.normal(size=(100, 100)))[0] for _ in range(2))
    s = np.concatenate([np.linspace(0.1, 0.7, 50), 1 + 1e-5 * rng.random(50)])
    sp = spectrum((U * s) @ V.T)
    alpha = sp.metrics()["alpha"]
    assert alpha is None or alpha < 1000
    assert (alpha is None) == ("no-tail" in codes(sp))
    assert (
        spectrum(rng.normal(size=(20000, 60))).metrics()["alpha"] is not None
    )  # noise of a long matrix has one


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(3, 90),
    st.integers(3, 90),
    st.sampled_from(DTYPES),
    st.sampled_from(["normal", "cauchy", "lognormal", "ones"]),
)
def test_rank_one_is_one_phase(seed: int, rows: int, columns: int, dtype: type, kind: str) -> None:
    rng = np.random.default_rng(seed)
    u, v = (
        {
            "normal": rng.normal(size=n),
            "cauchy": np.clip(rng.standard_cauchy(n), -50, 50),
            "lognormal": rng.lognormal(0, 1, n),
            "ones": np.ones(n) * rng.normal(),
        }[kind]
        for n in (rows, columns)
    )
    sp = spectrum(np.outer(u, v).astype(dtype))
    assert sp.phase == "rank-collapse", (sp.verdict, sp.eigenvalues[-3:])
    assert sp.quasi_null == min(rows, columns) - 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", [2, 4, 30])
@pytest.mark.parametrize("spread", [1.0, 10.0])
def test_no_bulk_is_fitted_to_rounding(dtype: type, rank: int, spread: float) -> None:
    """Low rank, singular values equal or over one decade: the rest of the directions are null, not a bulk."""
    for seed in range(5):
        rng = np.random.default_rng([seed, rank])
        U, V = (np.linalg.qr(rng.normal(size=(side, rank)))[0] for side in (150, 90))
        W = ((U * np.geomspace(1, spread, rank)) @ V.T).astype(dtype)
        sp = spectrum(W)
        assert sp.phase == "rank-collapse" and sp.quasi_null == 90 - rank, sp.verdict
        assert (sp.metrics()["spikes"] or 0) <= rank / 2
        if sp.bulk is not None:
            assert sp.metrics()["mp_lambda_plus"] > 1e-3 * sp.eigenvalues[-1]


def test_rank_four_with_a_steep_spectrum_in_float32() -> None:
    """No single gap is wide enough for a collapse; that 96 % of the directions are rounding is."""
    rng = np.random.default_rng(3)
    U, V = (np.linalg.qr(rng.normal(size=(side, 4)))[0] for side in (128, 100))
    sp = spectrum(((U * [1.0, 3e-2, 1e-3, 1e-4]) @ V.T).astype(np.float32))
    assert sp.phase == "rank-collapse" and sp.quasi_null == 96
    assert sp.gap.rounding
    assert sp.metrics()["spikes"] is None


def test_a_product_computed_in_float32_has_its_rank() -> None:
    rng = np.random.default_rng(4)
    for rank in (1, 8, 64):
        W = rng.normal(size=(256, rank)).astype(np.float32) @ rng.normal(size=(rank, 128)).astype(np.float32)
        sp = spectrum(W)
        assert sp.phase == "rank-collapse" and sp.quasi_null == 128 - rank


@pytest.mark.parametrize("dtype", DTYPES)
def test_square_noise_in_coarse_dtypes_is_not_collapsed(dtype: type) -> None:
    for seed in range(5):
        sp = spectrum(np.random.default_rng(seed).normal(size=(120, 120)).astype(dtype))
        assert sp.phase == "random-like" and "noise-like" in codes(sp)


def test_spikes_that_stop_at_half_say_so() -> None:
    rng = np.random.default_rng(5)
    W = 10 * rng.normal(size=(128, 80)) @ rng.normal(size=(80, 100)) + rng.normal(size=(128, 100))
    sp = spectrum(W)
    assert sp.metrics()["spikes"] == 50 and "spikes-capped" in codes(sp)
    assert "spikes-capped" not in codes(spectrum(rng.normal(size=(128, 100))))
