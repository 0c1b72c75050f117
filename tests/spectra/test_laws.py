"""The two laws of random matrices against closed forms, published quantiles and simulation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import quad

from strati.core.errors import BadInputError
from strati.spectra import marchenko_pastur


@pytest.mark.parametrize("q", [1.0, 1.3, 4.0, 65.4])
def test_marchenko_pastur_distribution_is_the_integral_of_its_density(q: float) -> None:
    low, high = marchenko_pastur.edges(q, 0.7)
    for share in (0.05, 0.4, 0.8, 1.0):
        x = low + share * (high - low)
        integral = quad(lambda t: float(marchenko_pastur.pdf(t, q, 0.7)), low, x, limit=400)[0]
        assert float(marchenko_pastur.cdf(x, q, 0.7)) == pytest.approx(integral, abs=1e-7)


@given(st.floats(1, 500), st.floats(1e-3, 1e3), st.floats(0, 1))
def test_marchenko_pastur_quantiles_invert_the_distribution(q: float, sigma: float, p: float) -> None:
    x = marchenko_pastur.ppf(p, q, sigma)
    assert float(marchenko_pastur.cdf(x, q, sigma)) == pytest.approx(
        p, abs=1e-8
    )  # at the edges the density vanishes


def test_marchenko_pastur_moments() -> None:
    """Mean sigma^2 and second moment sigma^4 (1 + 1/Q)."""
    quantiles = marchenko_pastur.ppf((np.arange(200_000) + 0.5) / 200_000, 2.5, 1.5)
    assert quantiles.mean() == pytest.approx(1.5**2, rel=1e-5)
    assert (quantiles**2).mean() == pytest.approx(1.5**4 * 1.4, rel=1e-5)


@pytest.mark.parametrize(("p", "value"), [(0.90, 0.4501), (0.95, 0.9793), (0.99, 2.0234)])
def test_tracy_widom_published_quantiles(p: float, value: float) -> None:
    assert marchenko_pastur.tracy_widom_quantile(p) == pytest.approx(value, abs=1e-4)
    assert marchenko_pastur.tracy_widom_cdf(value) == pytest.approx(p, abs=1e-4)


def test_tracy_widom_mean_and_variance() -> None:
    s = np.linspace(-9, 9, 1201)
    mass = np.diff([marchenko_pastur.tracy_widom_cdf(float(x)) for x in s])
    middle = (s[1:] + s[:-1]) / 2
    mean = float(np.sum(mass * middle))
    assert mean == pytest.approx(-1.2065, abs=1e-3)
    assert float(np.sum(mass * (middle - mean) ** 2)) == pytest.approx(1.6078, abs=1e-3)


def test_largest_eigenvalue_of_noise_exceeds_the_edge_at_its_level() -> None:
    """2,000 draws at level 0.05: within four standard errors."""
    rng = np.random.default_rng(0)
    edge = marchenko_pastur.upper_edge(60, 40, level=0.05)
    beyond = sum(np.linalg.norm(rng.normal(size=(60, 40)), 2) ** 2 > edge for _ in range(2000)) / 2000
    assert abs(beyond - 0.05) < 4 * np.sqrt(0.05 * 0.95 / 2000)


@pytest.mark.parametrize("p", [0.0, 1.0, -1.0, float("nan")])
def test_a_level_is_a_probability(p: float) -> None:
    with pytest.raises(BadInputError):
        marchenko_pastur.tracy_widom_quantile(p)
