"""Convolutions: each slice of a kernel has a variance of its own, so unequal taps are neither spikes nor null.

The level of spikes is 0.01 for the whole kernel; slices of 16 columns have 0.03 to 0.05, whether the taps are equal or
not (``tools/calibrate_spectra.py kernels``). Rates over fixed seeds are held to 0.05 plus three standard errors.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from tooling import tool

import strati
from strati.core.rng import stream
from strati.spectra.noise_model import slice_variances
from strati.spectra.noise_structure import Violation
from strati.spectra.spectrum import Spectrum, spectrum

kinds = tool("calibrate_spectra")


def scanned(weights: np.ndarray) -> Spectrum:
    return strati.scan({"conv.weight": weights})["conv"]


@pytest.mark.parametrize("factor", [1.1, 1.5, 2.0, 3.0])
@pytest.mark.parametrize("shape", [(64, 64, 3, 3), (24, 40, 5, 5), (96, 40, 5), (20, 12, 3, 3, 3)])
def test_a_larger_centre_tap_is_no_spike(factor: float, shape: tuple[int, ...]) -> None:
    """12 draws each: a spike in at most 2 (0.05 plus three errors); 8 to 12 of 12 had one with a common variance."""
    spiked = 0
    for number in range(12):
        rng = stream(20, "centre", *shape, number)
        sizes = kinds.centre(int(np.prod(shape[2:])), factor).reshape(shape[2:])
        sp = scanned(rng.normal(size=shape) * sizes)
        assert sp.bulk is not None
        spiked += sp.bulk.spikes > 0
        assert sp.quasi_null is not None and sp.quasi_null <= 2
    assert spiked <= 2


@pytest.mark.parametrize("factor", [1.5, 3.0])
def test_slices_of_unequal_size_are_named(factor: float) -> None:
    sp = scanned(stream(21).normal(size=(64, 48, 3, 3)) * kinds.centre(9, factor).reshape(3, 3))
    assert sp.noise is not None and sp.noise.shows(Violation.SLICE_SIZES)
    assert "structured-noise" in {flag.code for flag in sp.warnings}
    assert sp.state == "random-like"
    variances = np.array(sp.noise.slice_variances)
    assert variances[4] / np.median(variances) == pytest.approx(factor**2, rel=0.1)
    assert variances.mean() == pytest.approx(1)


@pytest.mark.parametrize("noise", [1e-3, 0.01, 0.1])
@pytest.mark.parametrize("shape", [(64, 64, 3, 3), (40, 40, 5, 5), (64, 64, 7), (48, 24, 3, 3)])
def test_an_identity_kernel_with_noise_has_no_null_directions(shape: tuple[int, ...], noise: float) -> None:
    """As many quasi-null directions as the slices alone have: at most one in a hundred slices."""
    weights = kinds.identity_kernel(stream(22, *shape), shape, noise).astype(np.float32)
    sp = scanned(weights)
    alone = [
        spectrum(weights[(slice(None), slice(None), *place)]).quasi_null for place in np.ndindex(*shape[2:])
    ]
    assert sp.quasi_null is not None
    assert abs(sp.quasi_null - sum(count or 0 for count in alone)) <= 1
    assert sp.phase != "rank-collapse"


def test_a_spike_in_one_slice_is_counted_whatever_the_sizes() -> None:
    """A direction at twice the edge of a small tap lies far inside the spectrum of the large ones."""
    for number in range(10):
        rng = stream(23, number)
        weights = rng.normal(size=(64, 64, 3, 3)) * kinds.centre(9, 3.0).reshape(3, 3)
        direction = np.outer(rng.normal(size=64), rng.normal(size=64))
        weights[:, :, 0, 0] += 2 * 16 * direction / np.linalg.norm(direction)
        sp = scanned(weights)
        assert sp.bulk is not None and 1 <= sp.bulk.spikes <= 2


def test_null_directions_of_one_slice_are_counted() -> None:
    rng = stream(24)
    weights = rng.normal(size=(80, 40, 3, 3)) * kinds.centre(9, 2.0).reshape(3, 3)
    weights[:, :5, 1, 2] *= 1e-3
    assert scanned(weights).quasi_null == 5


@pytest.mark.parametrize("shape", [(64, 1, 3, 3), (128, 64, 1, 1), (64, 3, 7, 7), (32, 1, 9)])
def test_depthwise_pointwise_and_first_layers(shape: tuple[int, ...]) -> None:
    """Kernels with one slice, or with slices of few columns: 10 draws of noise, at most one with a spike."""
    spiked = 0
    for number in range(10):
        sp = scanned(stream(25, *shape, number).normal(size=shape))
        spiked += (sp.metrics()["spikes"] or 0) > 0
    assert spiked <= 1


def test_an_empty_tap_keeps_its_size() -> None:
    weights = stream(26).normal(size=(40, 30, 3, 3))
    weights[:, :, 0, 0] = 0
    sp = scanned(weights)
    assert sp.phase == "rank-collapse" and sp.quasi_null == 30


def test_variances_are_those_of_the_slices() -> None:
    from strati.spectra.eigenvalues import eigenvalues

    rng = stream(27)
    sizes = [1.0, 2.0, 0.5]
    for columns in (6, 50):
        variances = slice_variances(eigenvalues([size * rng.normal(size=(200, columns)) for size in sizes]))
        expected = np.square(sizes) / np.square(sizes).mean()
        assert variances == pytest.approx(expected, rel=0.15)


@pytest.mark.parametrize("shape", [(64, 64, 3, 3), (48, 24, 5, 5), (100, 60, 3), (12, 8, 3, 3)])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_taps_that_are_masked_are_null_and_leave_the_noise_of_the_others(
    shape: tuple[int, ...], dtype: type
) -> None:
    """12 draws of noise with half of the taps zero: the zero taps are counted as null, and nothing is a spike.

    With zero taps among the pooled slices, 12 of 12 draws had spikes, 40 in a kernel of 64 x 64 x 3 x 3.
    """
    spiked = 0
    for number in range(12):
        weights = stream(28, *shape, number).normal(size=shape).reshape(*shape[:2], -1)
        taps = weights.shape[2]
        weights[:, :, taps // 2 + 1 :] = 0
        metrics = scanned(weights.reshape(shape).astype(dtype)).metrics()
        zeros = (taps - taps // 2 - 1) * min(shape[:2])
        assert zeros <= metrics["quasi_null"] <= zeros + 2
        spiked += metrics["spikes"] > 0
    assert spiked <= 2


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("shape", [(64, 64, 3, 3), (16, 16, 3, 3), (64, 20, 3, 3), (24, 24, 3, 3, 3)])
@pytest.mark.parametrize("noise", [1e-4, 1e-3])
def test_small_taps_are_resolved_by_their_own_rounding(
    shape: tuple[int, ...], noise: float, dtype: type
) -> None:
    """Weights are rounded in proportion to themselves: small taps beside an identity in bfloat16 are not null.

    With the resolution of the largest tap, 512 of 576 directions were called rounding, and the layer broken.
    """
    weights = kinds.identity_kernel(stream(29, *shape), shape, noise).astype(dtype)
    row = strati.scan({"conv.weight": weights}).layers[0].row()
    assert row["quasi_null"] <= 1 and row["state"] != "broken" and row["phase"] != "rank-collapse"


def test_the_level_of_null_directions_is_that_of_the_kernel() -> None:
    """120 kernels of noise with 9 or 25 square slices: at most 0.02 plus four standard errors have a null direction.

    With the level of one slice it was one kernel in ten or in four.
    """
    counts = [
        (scanned(stream(30, size, number).normal(size=(side, side, size, size))).quasi_null or 0) > 0
        for size, side in ((3, 64), (5, 20))
        for number in range(60)
    ]
    assert np.mean(counts) <= 0.02 + 4 * np.sqrt(0.02 * 0.98 / 120)


def test_a_collapsed_slice_is_counted_beside_whole_ones() -> None:
    """Half of the directions of one slice in nine are six decades smaller: fewer than 7 % of all directions."""
    rng = stream(31)
    weights = 1e-3 * rng.normal(size=(64, 20, 3, 3))
    weights[:, :10, 1, 1] += np.eye(64, 10)
    assert scanned(weights).quasi_null == 10
