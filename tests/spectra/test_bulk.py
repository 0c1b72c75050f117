"""Bulk, spikes, noise, quasi-null directions, phases, signal and noise, on matrices of known making."""

from __future__ import annotations

import numpy as np
import pytest

from strati.spectra.marchenko_pastur import fit_bulk, quasi_null
from strati.spectra.noise_model import split
from strati.spectra.spectrum import spectrum
from strati.spectra.verdicts import Phase, universality_exponent
from strati_reproductions.eigenspectra.phases import draw


def eigenvalues(W: np.ndarray) -> np.ndarray:
    return np.linalg.svd(W, compute_uv=False)[::-1] ** 2


@pytest.mark.parametrize("shape", [(100, 100), (300, 100), (80, 400), (250, 240)])
def test_sigma_is_the_entries_and_ignores_spikes(shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    noise = rng.normal(scale=0.05, size=shape)
    signal = sum(k * np.outer(rng.normal(size=shape[0]), rng.normal(size=shape[1])) for k in (0.2, 0.5, 20.0))
    long, short = max(shape), min(shape)
    clean, spiked = (fit_bulk(eigenvalues(W), long, short) for W in (noise, noise + signal))
    assert clean is not None and spiked is not None
    assert clean.sigma == pytest.approx(0.05, rel=0.02) and clean.spikes == 0
    assert spiked.sigma == pytest.approx(0.05, rel=0.02) and spiked.spikes == 3


def test_spikes_at_their_level() -> None:
    """300 noise matrices: the share with a spike is the level, within four standard errors and the fit's own error."""
    rng = np.random.default_rng(1)
    values = [eigenvalues(rng.normal(size=(80, 40))) for _ in range(300)]
    for level in (0.01, 0.2):
        found = np.mean([fit_bulk(v, 80, 40, level=level).spikes > 0 for v in values])  # type: ignore[union-attr]
        assert abs(found - level) < 4 * np.sqrt(level * (1 - level) / 300) + 0.01


def test_noise_is_called_noise_and_heavy_tails_are_not() -> None:
    """200 noise matrices of several sizes: at least 95 % warned; 100 heavy-tailed ones: at most 5 %."""
    rng = np.random.default_rng(2)
    shapes = [(60, 60), (64, 50), (100, 100), (300, 60), (50, 200), (160, 128)]
    warned = []
    for number in range(200):
        shape = shapes[number % len(shapes)]
        W = rng.normal(size=shape) if number % 2 else rng.uniform(-1, 1, size=shape)
        warned.append("noise-like" in {w.code for w in spectrum(W.astype(np.float32)).warnings})
    assert np.mean(warned) >= 0.95
    heavy = []
    for number in range(100):
        shape = shapes[number % len(shapes)]
        W = rng.pareto(rng.uniform(0.8, 3.5), size=shape) + 1
        W *= rng.choice([-1, 1], size=shape)
        heavy.append("noise-like" in {w.code for w in spectrum(W.astype(np.float32)).warnings})
    assert np.mean(heavy) <= 0.05


@pytest.mark.parametrize("shape", [(20, 20), (60, 60), (65, 60), (80, 60), (95, 60), (200, 60)])
def test_no_quasi_null_eigenvalue_in_noise(shape: tuple[int, int]) -> None:
    """1,000 draws of each aspect: fewer than one eigenvalue in a thousand."""
    rng = np.random.default_rng(3)
    found = 0
    for _ in range(1000):
        W = rng.normal(size=shape)
        values = np.linalg.eigvalsh(W.T @ W)
        bulk = fit_bulk(values, *shape)
        assert bulk is not None
        found += quasi_null(values, *shape, bulk.sigma)
    assert found < 0.001 * 1000 * shape[1]


@pytest.mark.parametrize("shape", [(60, 60), (62, 60), (80, 60), (60, 150)])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_planted_quasi_null_eigenvalues_are_all_found(shape: tuple[int, int], count: int) -> None:
    for seed in range(20):
        rng = np.random.default_rng(seed)
        U, s, V = np.linalg.svd(rng.normal(size=shape), full_matrices=False)
        s[-count:] = s[0] * 1e-6 * rng.uniform(0.1, 1, size=count)
        sp = spectrum((U * s) @ V)
        assert sp.quasi_null == count, seed


def test_split_gives_both_parts() -> None:
    rng = np.random.default_rng(4)
    noise, signal = rng.normal(size=(90, 150)), 3 * np.outer(rng.normal(size=90), rng.normal(size=150))
    parts = split(noise + signal)
    assert parts.rank == 1
    np.testing.assert_allclose(parts.noise + parts.signal, noise + signal, atol=1e-12)
    assert np.linalg.matrix_rank(parts.signal) == 1
    assert np.linalg.norm(parts.signal - signal) < 0.1 * np.linalg.norm(signal)
    assert split(noise).rank == 0


@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("shape", [(100, 100), (260, 120)])
def test_phases_of_matrices_of_known_making(phase: Phase, shape: tuple[int, int]) -> None:
    """Twelve draws each of seeds that no threshold was chosen on: at most one wrong, or two next door."""
    order = list(Phase)
    wrong = 0.0
    for number in range(12):
        found = spectrum(draw(phase, shape, np.random.default_rng([99, number, *shape]))).phase
        assert found is not None
        near = phase != Phase.RANK_COLLAPSE != found and abs(order.index(found) - order.index(phase)) == 1
        wrong += 0.0 if found == phase else 0.5 if near else 1.0
    assert wrong <= 1.0


@pytest.mark.slow
def test_phases_over_all_shapes() -> None:
    from strati_reproductions.eigenspectra.phases import confusion, score

    assert score(confusion(12, seed=31_337)) >= 0.95


def test_a_strong_spike_is_no_heavy_tail() -> None:
    rng = np.random.default_rng(5)
    for strength in (3.0, 300.0):
        W = rng.normal(size=(150, 100)) + strength * np.outer(rng.normal(size=150), rng.normal(size=100))
        assert spectrum(W).phase == Phase.BULK_SPIKES
    W = rng.normal(size=(150, 100))
    W[3, 4] += 200
    assert spectrum(W).phase == Phase.BULK_SPIKES


@pytest.mark.parametrize("mu", [1.0, 1.7, 3.0, 4.3])
def test_mu_of_pareto_entries(mu: float) -> None:
    rng = np.random.default_rng(6)
    W = (rng.pareto(mu, size=(200, 150)) + 1) * rng.choice([-1, 1], size=(200, 150))
    assert spectrum(W).metrics()["mu"] == pytest.approx(mu, rel=0.05)


def test_mu_from_alpha() -> None:
    assert universality_exponent(1.75) == pytest.approx(1.5)
    assert [universality_exponent(a) for a in (2.0, 50.0)] == [2.0, 4.0]
