"""Noise of many kinds: how often spikes, tails or structure are named in it, and that signal in it is still found.

Rates are over fixed seeds. The level of spikes is 0.01; a rate over ``n`` draws is held to the level plus four standard
errors. ``tools/calibrate_spectra.py noise`` prints the same rates over more draws and shapes.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from tooling import tool

from strati.core.rng import stream
from strati.spectra.noise_structure import Violation
from strati.spectra.spectrum import Spectrum, spectrum
from strati.spectra.tails import entry_tail

kinds = tool("calibrate_spectra")


def codes(sp: Spectrum) -> set[str]:
    return {flag.code for flag in sp.warnings}


def limit(draws: int, level: float = 0.01) -> float:
    return float(level + 4 * np.sqrt(level * (1 - level) / draws))


LATTICES = {
    "fp8 e4m3": lambda W: W.astype(ml_dtypes.float8_e4m3fn).astype(np.float32),
    "fp8 e5m2": lambda W: W.astype(ml_dtypes.float8_e5m2),
    "int4": lambda W: kinds.lattice(W, 7).astype(np.float32),
    "int4 by column": lambda W: np.stack([kinds.lattice(w, 7) for w in W.T], axis=1).astype(np.float32),
    "int3": lambda W: kinds.lattice(W, 3),
    "int8": lambda W: kinds.lattice(W, 127).astype(np.float32),
    "ternary": lambda W: np.sign(np.where(np.abs(W) < 0.6, 0.0, W)),
}


@pytest.mark.parametrize("name", LATTICES)
@pytest.mark.parametrize("shape", [(128, 128), (200, 60)])
def test_rounded_gaussians_have_no_power_law(name: str, shape: tuple[int, int]) -> None:
    """12 draws: none heavy-tailed, no mu; at least 10 are noise-like."""
    noise = 0
    for number in range(12):
        sp = spectrum(LATTICES[name](stream(1, name, *shape, number).normal(size=shape)))
        assert not sp.entries.heavy and sp.metrics()["mu"] is None, number
        noise += "noise-like" in codes(sp)
    assert noise >= 10


@pytest.mark.parametrize("mu", [1.5, 3.0])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, ml_dtypes.float8_e5m2])
def test_power_laws_survive_rounding(mu: float, dtype: type) -> None:
    """Symmetric Pareto entries rounded to two or seven bits of mantissa: still heavy, mu within 20 %."""
    for number in range(5):
        rng = stream(2, mu, number)
        sizes = (rng.pareto(mu, (100, 100)) + 1) * rng.choice([-1, 1], (100, 100))
        found = entry_tail(np.clip(sizes, -5e4, 5e4).astype(dtype))
        assert found.heavy and found.mu == pytest.approx(mu, rel=0.2)


@pytest.mark.parametrize("scale", [0.02, 0.1, 0.5])
@pytest.mark.parametrize("kind", ["identity", "tall identity", "band", "permutation"])
def test_a_diagonal_is_no_heavy_tail(kind: str, scale: float) -> None:
    for number in range(4):
        rng = stream(3, kind, number)
        n, m = (240, 120) if kind == "tall identity" else (120, 120)
        W = scale * rng.normal(size=(n, m)) / np.sqrt(m)
        if kind == "band":
            W += np.abs(np.subtract.outer(np.arange(n), np.arange(m))) < 3
        else:
            W += np.eye(n, m)[rng.permutation(n)] if kind == "permutation" else np.eye(n, m)
        sp = spectrum(W.astype(np.float32))
        assert not sp.entries.heavy and sp.phase != "heavy-tailed", sp.verdict
        if scale <= 0.1:
            assert codes(sp) & {"structured-noise", "orthogonal"}, sp.verdict


@pytest.mark.parametrize("name", ["Gaussian", "Laplace", "90 % zeros", "Gaussian in fp8 (e4m3)"])
@pytest.mark.parametrize("shape", [(100, 100), (300, 80)])
def test_spikes_at_their_level_whatever_the_fourth_moment(name: str, shape: tuple[int, int]) -> None:
    """100 draws: the share with a spike is at most 0.01 plus four standard errors (0.05).

    With the edge of Gaussian entries it is 0.18 and 0.10 for Laplace, 1 for 90 % zeros.
    """
    found = [
        spectrum(kinds.NOISE[name](stream(4, name, *shape, k), shape)).metrics()["spikes"] for k in range(100)
    ]
    assert np.mean(np.array(found) > 0) <= limit(100)


def test_entries_with_a_power_law_say_that_the_level_does_not_hold() -> None:
    """t with five degrees of freedom, 80 draws: spikes in at most 5 of them, untold in at most 3."""
    spiked = untold = 0
    for number in range(80):
        sp = spectrum(stream(5, number).standard_t(5, (128, 128)))
        assert sp.bulk is not None
        spiked += sp.bulk.spikes > 0
        untold += sp.bulk.spikes > 0 and not codes(sp) & kinds.TOLD
    assert spiked <= 5 and untold <= 3


STRUCTURED = [
    ("20 % of rows zero", Violation.ROW_SIZES),
    ("rows of lognormal size", Violation.ROW_SIZES),
    ("columns of lognormal size", Violation.COLUMN_SIZES),
    ("90 % zeros", Violation.SPARSE),
    ("AR(0.2) along rows", Violation.COLUMN_CORRELATION),
    ("AR(0.2) along columns", Violation.ROW_CORRELATION),
    ("AR(0.7) along columns", Violation.ROW_CORRELATION),
    ("identity + 0.05 entries", Violation.REGULAR),
]


@pytest.mark.parametrize(("name", "violation"), STRUCTURED)
@pytest.mark.parametrize(
    "shape", [(300, 100), *(pytest.param(s, marks=pytest.mark.slow) for s in ((300, 150), (100, 240)))]
)
def test_structured_noise_names_the_assumption_and_no_signal(
    name: str, violation: Violation, shape: tuple[int, int]
) -> None:
    """20 draws: all say which assumption fails; none is noise-like; spikes in at most two (0.01 plus four errors)."""
    if name.startswith("20 %") and shape[0] < shape[1]:
        shape = shape[::-1]  # zero rows of the shorter side are null directions: the next test
    spiked = 0
    for number in range(20):
        sp = spectrum(kinds.NOISE[name](stream(6, name, *shape, number), shape).astype(np.float32))
        assert sp.noise is not None and sp.noise.shows(violation), number
        assert "structured-noise" in codes(sp) and "noise-like" not in codes(sp)
        assert sp.phase in ("random-like", "bleeding-out"), sp.verdict
        spiked += sp.metrics()["spikes"] > 0
    assert spiked <= 2


@pytest.mark.parametrize("name", ["AR(0.2) along rows", "AR(0.2) along columns", "AR(0.2) along both"])
def test_correlated_noise_keeps_the_level_and_is_always_told(name: str) -> None:
    """60 draws of 128 x 128: every one warned of; spikes in at most 0.01 plus three standard errors of them (3).

    With the correlation measured on what the candidate spikes leave over, 0.04 to 0.05 had one.
    """
    spiked = 0
    for number in range(60):
        sp = spectrum(kinds.NOISE[name](stream(13, name, number), (128, 128)).astype(np.float32))
        assert "structured-noise" in codes(sp), number
        spiked += sp.metrics()["spikes"] > 0
    assert spiked <= 3


@pytest.mark.parametrize(
    ("name", "violation", "lag"),
    [
        ("rows 2 apart correlated", Violation.ROW_CORRELATION, 2),
        ("columns 8 apart correlated", Violation.COLUMN_CORRELATION, 8),
    ],
)
@pytest.mark.parametrize("shape", [(128, 128), (100, 400), pytest.param((600, 500), marks=pytest.mark.slow)])
def test_correlation_over_some_places_is_no_signal(
    name: str, violation: Violation, lag: int, shape: tuple[int, int]
) -> None:
    """20 draws: spikes in at most two (0.01 plus four errors); what is not plain noise says which rows are correlated.

    With the correlation of neighbours alone, 0.3 to 1.0 of the draws had spikes, and nothing was said.
    """
    spiked = 0
    for number in range(20):
        sp = spectrum(kinds.NOISE[name](stream(18, name, *shape, number), shape).astype(np.float32))
        assert sp.noise is not None
        shown = [(item.violation, item.lag) for item in sp.noise.violations]
        assert (violation, lag) in shown or "noise-like" in codes(sp) or sp.quasi_null, number
        spiked += sp.metrics()["spikes"] > 0
    assert spiked <= 2


@pytest.mark.parametrize("shape", [(128, 128), (400, 100), pytest.param((900, 600), marks=pytest.mark.slow)])
def test_rows_in_groups_are_always_told(shape: tuple[int, int]) -> None:
    """10 draws: every spike comes with the warning; the order of rows that is seen is not all there is to groups."""
    for number in range(10):
        sp = spectrum(kinds.NOISE["rows in groups of 4"](stream(14, *shape, number), shape))
        assert "structured-noise" in codes(sp) and "noise-like" not in codes(sp), number


def test_a_sketch_sees_the_lags_that_all_products_show() -> None:
    """Of a large matrix random signs are looked at first; the correlations found are those of every product."""
    from strati.spectra.noise_structure import Autocorrelation

    W = kinds.apart(stream(15).normal(size=(803, 700)), 3, 0.2)
    values = np.linalg.svd(W, compute_uv=False) ** 2
    none = np.zeros((800, 0)), np.zeros((700, 0))
    found = Autocorrelation(W, 0).correlation(*none, np.sum(W**2, axis=1), float(np.sum(values**2)))
    assert found.lags == (3,) and not found.first_order
    want = np.sum(W[3:] * W[:-3]) / np.sum(W**2) * 800 / 797
    assert found.values[0] == pytest.approx(want, rel=1e-12)
    assert found.spectrum(800).mean() == pytest.approx(1, abs=1e-9)
    turned = Autocorrelation(W.T, 1).correlation(*none, np.sum(W**2, axis=1), float(np.sum(values**2)))
    assert turned == found
    across = Autocorrelation(W, 1).correlation(*none[::-1], np.sum(W**2, axis=0), float(np.sum(values**2)))
    assert across.lags == ()


def test_directions_taken_out_are_out_of_the_lags() -> None:
    """A strong direction along a slow wave makes neighbours alike; without it nothing is left."""
    from strati.spectra.noise_structure import Autocorrelation

    for shape in ((120, 90), (900, 600)):
        rng = stream(16, *shape)
        wave = np.cos(np.linspace(0, 6, shape[0]))
        W = rng.normal(size=shape) + np.outer(wave, rng.normal(size=shape[1]))
        left, sizes, right = np.linalg.svd(W, full_matrices=False)
        rest = W - sizes[0] * np.outer(left[:, 0], right[0])
        spread = float(np.sum(sizes[1:] ** 4))
        vectors, partners = sizes[0] * left[:, :1], right[:1].T
        out = Autocorrelation(W, 0).correlation(vectors, partners, np.sum(rest**2, axis=1), spread)
        assert out.lags == ()
        whole = (np.zeros((shape[0], 0)), np.zeros((shape[1], 0)), np.sum(W**2, axis=1))
        assert 1 in Autocorrelation(W, 0).correlation(*whole, float(np.sum(sizes**4))).lags


def test_spikes_of_a_matrix_of_zeros_are_told() -> None:
    """98 % zeros lose directions; what is beyond the rest's edge is not called signal without a word."""
    for number in range(10):
        rng = stream(17, number)
        sp = spectrum(rng.normal(size=(128, 128)) * (rng.random((128, 128)) < 0.02))
        assert not sp.metrics()["spikes"] or "structured-noise" in codes(sp), number


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5])
def test_zero_rows_and_columns_are_counted(share: float) -> None:
    rng = np.random.default_rng(7)
    W = rng.normal(size=(120, 200))
    W[: int(share * 120)] = 0
    sp = spectrum(W)
    assert sp.phase == "rank-collapse" and sp.quasi_null == int(share * 120)
    assert sp.metrics()["spikes"] == 0 and "zero-rows" in codes(sp)
    W[:, : int(share * 200)] = 0
    sp = spectrum(W)
    assert sp.phase == "rank-collapse" and sp.metrics()["spikes"] == 0


@pytest.mark.parametrize(
    "name",
    [
        "20 % of rows zero",
        "Laplace",
        "AR(0.2) along columns",
        "columns of lognormal size",
        "rows 2 apart correlated",
        "rows in groups of 4",
    ],
)
def test_signal_in_structured_noise_is_found(name: str) -> None:
    """Two planted directions at about three times the edge: exactly two spikes in at least 18 of 20 draws."""
    right = 0
    for number in range(20):
        rng = stream(8, name, number)
        W = kinds.NOISE[name](rng, (300, 120))
        U, V = (np.linalg.qr(rng.normal(size=(side, 2)))[0] for side in (300, 120))
        top = np.linalg.norm(W, 2)
        sp = spectrum(W + (U * top * np.array([1.6, 1.9])) @ V.T)
        right += sp.metrics()["spikes"] == 2
    assert right >= 18


def test_planted_spikes_are_no_structure() -> None:
    """Gaussian noise with one to four dense directions, weak to strong: all found, and no structure is claimed."""
    for number in range(24):
        rng = stream(9, number)
        count = 1 + number % 4
        U, V = (np.linalg.qr(rng.normal(size=(side, count)))[0] for side in (150, 100))
        W = rng.normal(size=(150, 100))
        sp = spectrum(W + (U * np.linalg.norm(W, 2) * rng.uniform(1.5, 20, count)) @ V.T)
        assert sp.metrics()["spikes"] == count and "structured-noise" not in codes(sp), number
        assert sp.phase == "bulk+spikes"


def test_trained_layers_are_not_explained_away() -> None:
    """Rows of unequal size because of a strong low-rank part with decaying weights: not noise with structure."""
    for number in range(10):
        rng = stream(10, number)
        U, V = rng.normal(size=(200, 40)), rng.normal(size=(120, 40))
        W = (U * np.arange(1, 41) ** -0.7) @ V.T + 0.5 * rng.normal(size=(200, 120))
        sp = spectrum(W)
        assert sp.phase not in ("random-like", None) and sp.metrics()["spikes"] >= 10


@pytest.mark.parametrize("rows", [10, 60, 100])
def test_a_null_direction_in_noise_is_no_noise(rows: int) -> None:
    """Columns that sum to zero (a head trained with a softmax): one null direction, and the verdict says so.

    Of ten draws at most one may have a spike by chance (level 0.01).
    """
    said = 0
    for number in range(10):
        W = stream(11, rows, number).normal(size=(rows, 300))
        W -= W.mean(axis=0)
        sp = spectrum(W.astype(np.float32))
        assert sp.quasi_null == 1 and "noise-like" not in codes(sp)
        assert sp.verdict is not None and not sp.verdict.noise
        if sp.phase == "random-like":
            assert "null-in-noise" in codes(sp)
        said += sp.phase in ("random-like", "rank-collapse")
    assert said >= 9


def test_noise_like_never_stands_beside_null_directions() -> None:
    for number in range(30):
        rng = stream(12, number)
        U, s, V = np.linalg.svd(rng.normal(size=(90, 60)), full_matrices=False)
        s[-(number % 3) - 1 :] *= 10.0 ** rng.uniform(-6, -0.3)
        sp = spectrum((U * s) @ V)
        assert not (sp.quasi_null and "noise-like" in codes(sp))
        assert bool(sp.quasi_null) == ("null-in-noise" in codes(sp))


def test_sizes_in_order_are_no_correlation() -> None:
    """Neighbours that are both large have large products by chance: of 200 matrices none is called correlated."""
    told = []
    for seed in range(200):
        rng = np.random.default_rng([5, seed])
        n, m = rng.integers(12, 70, 2)
        W = rng.normal(size=(n, m)) * np.arange(1, m + 1) ** -rng.uniform(0.3, 1.5)
        before = spectrum(W)
        mixed = spectrum(W[:, rng.permutation(m)])
        told += [flag.text for flag in before.warnings if "correlated" in flag.text]
        assert before.metrics()["spikes"] == mixed.metrics()["spikes"]
    assert not told
