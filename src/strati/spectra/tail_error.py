r"""How far ``alpha`` may be off: chance, the choice of where the tail starts, and a tail that sets in gradually.

The formula :math:`(\alpha - 1)/\sqrt n` takes :math:`x_\min` as given, which it is not. Three parts, of which the first
two come from one bootstrap, all of it vectorised:

* the eigenvalues are resampled, the start is chosen anew by the least Kolmogorov-Smirnov distance (over starts spaced
  evenly in the logarithm of the tail's size), and the exponents' root mean square distance from ``alpha`` is taken;
* never less than the formula's error;
* a power law that is still steepening at :math:`x_\min` follows a generalised Pareto law there, of which the pure power
  law is a case; where that law's index, less its standard error, is smaller than :math:`1/(\alpha - 1)`, the two
  exponents' difference is added in quadrature, as a systematic error (up to one and a half times
  ``alpha - 1``); likewise where the index, and half its standard error, is larger.

How often ``alpha +- 1.96 stderr`` covers the true exponent: ``python tools/calibrate_spectra.py coverage``. Laws that
steepen more slowly than a generalised Pareto law are not covered; where the upper quarter of the values shows one
(:func:`is_gradual`), a warning says so.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from strati.spectra.generalised_pareto import fit as fit_generalised_pareto

if TYPE_CHECKING:
    from strati.spectra.tail import Tail
    from strati.types import FloatArray, IntArray

_SAMPLES, _STARTS, _PROBES = 24, 28, 16
_LEAST_TAIL = 8
_BELOW, _ABOVE = 1.0, 0.5  # standard errors by which the index may be smaller or larger than it was found
_STEEPEST = 2.5  # the systematic error makes alpha - 1 at most this many times larger
_QUARTER, _FEWEST = 4, 20
_STEEPENS = 3.0  # standard errors


def start_stderr(values: FloatArray, tail: Tail) -> float:
    """The standard error of a fitted exponent with the choice of its start in it.

    Args:
        values: The ascending positive eigenvalues that the tail was fitted to.
        tail: Its fit.

    Examples:
        >>> from strati.spectra.tail import fit_tail
        >>> x = np.sort(np.random.default_rng(0).pareto(1.5, 500) + 1)
        >>> tail = fit_tail(x)
        >>> tail.formal_stderr < start_stderr(x, tail) < 5 * tail.formal_stderr
        True
    """
    again = _resampled(values)
    chance = float(np.sqrt(np.mean((again - tail.alpha) ** 2))) if again.size else 0.0
    return float(np.hypot(max(chance, tail.formal_stderr), _gradual(values[tail.start :], tail)))


def is_gradual(values: FloatArray, tail: Tail) -> bool:
    """Whether the values steepen beyond chance from well below the tail's start on, so that it has no clear start.

    Hill's index of the tail, and of the upper quarter of the values where the tail is no more than that, against the
    index of a generalised Pareto law: three standard errors apart.

    Args:
        values: The ascending positive eigenvalues that the tail was fitted to.
        tail: Its fit.

    Examples:
        >>> from strati.spectra.tail import fit_tail
        >>> rng = np.random.default_rng(0)
        >>> sharp, slow = np.sort(rng.pareto(2.0, 1000) + 1), np.sort(rng.pareto(4.0, 1000) ** 2)
        >>> is_gradual(sharp, fit_tail(sharp)), is_gradual(slow, fit_tail(slow))
        (False, True)
    """
    quarter = values.size // _QUARTER
    starts = [tail.start]
    if quarter >= _FEWEST and tail.size < 1.5 * quarter:
        starts.append(values.size - quarter)
    for start in starts:
        upper = values[start:] / values[start]
        if upper.size < _FEWEST or upper[-1] <= 1:
            continue
        further, error = _index(upper)
        if float(np.log(upper[1:]).mean()) - further > _STEEPENS * error:
            return True
    return False


def _resampled(values: FloatArray) -> FloatArray:
    """The exponents of resampled values, each with a start of its own."""
    size = values.size
    logs = np.log(values) - np.log(values[-1])
    weights = _weights(size)
    starts, probes = _grid(size)
    counts = np.cumsum(weights[:, ::-1], axis=1)[:, ::-1]
    sums = np.cumsum((weights * logs)[:, ::-1], axis=1)[:, ::-1]
    tails = counts[:, starts]
    spread = sums[:, starts] - tails * logs[starts]
    usable = (tails >= _LEAST_TAIL) & (spread > 64 * np.finfo(np.float64).eps * size)
    alphas = 1 + tails / np.where(usable, spread, 1.0)
    fitted = -np.expm1((1 - alphas)[:, :, None] * (logs[probes] - logs[starts][:, None]))
    seen = 1 - counts[:, probes] / np.where(usable, tails, 1.0)[:, :, None]
    distances = np.where(usable, np.abs(fitted - seen).max(axis=2), np.inf)
    best = np.argmin(distances, axis=1)
    sample = np.arange(_SAMPLES)
    found: FloatArray = alphas[sample, best][np.isfinite(distances[sample, best])]
    return found


def _gradual(tail_values: FloatArray, tail: Tail) -> float:
    """By how much the exponent may still change beyond the tail that was seen."""
    index = 1 / (tail.alpha - 1)
    further, error = _index(tail_values / tail_values[0])
    least = max(further - _BELOW * error, index / _STEEPEST)
    most = max(further + _ABOVE * error, index)
    return float(max(1 / least - 1 / index, 1 / index - 1 / most, 0.0))


def _index(upper: FloatArray) -> tuple[float, float]:
    """The index of a generalised Pareto law beyond 1, and the error of its difference from Hill's (Hausman 1978)."""
    further, _ = fit_generalised_pareto(upper[1:] - 1)
    return further, float(np.sqrt((1 + 2 * max(further, 0.0)) / upper.size))


@lru_cache(maxsize=8)
def _weights(size: int) -> FloatArray:
    """How often each value is drawn, once for each number of values: the same for whatever values."""
    rng = np.random.default_rng(size)
    drawn = rng.integers(0, size, (_SAMPLES, size)) + size * np.arange(_SAMPLES)[:, None]
    return np.bincount(drawn.ravel(), minlength=_SAMPLES * size).reshape(_SAMPLES, size).astype(np.float64)


@lru_cache(maxsize=8)
def _grid(size: int) -> tuple[IntArray, IntArray]:
    """Starts spaced evenly in the logarithm of the tail's size, and the places where each tail is compared."""
    sizes = np.unique(np.geomspace(min(10, size), size, _STARTS).astype(np.int64))
    starts = size - sizes
    return starts, starts[:, None] + (np.linspace(0, 1, _PROBES) * (sizes - 1)[:, None]).astype(np.int64)
