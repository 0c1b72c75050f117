r"""Find change points of a series over training steps, tested against smooth curves.

A change point is a kink: the series follows straight lines that join, :math:`y = a + b u + \sum_k c_k \max(0, u -
\tau_k)`, in one of the clocks :math:`u \in \{\ln(t + s), \sqrt{t + s}, t\}` (:math:`t` the step, :math:`s` the first
spacing). The null hypothesis is a smooth monotone curve: a power law with offset, one or two exponentials of the same
sign, accelerating growth, or a constant rate. Under both the noise may be autocorrelated (AR(1), up to almost a random
walk) and its standard deviation may grow or fall exponentially along the series. Models are compared by

.. math:: \mathrm{BIC} = -2 \ln L + p \ln n, \qquad T = \mathrm{BIC}_{smooth} - \mathrm{BIC}_{kinks},

each minimised over its curves and noise models. The p-value of :math:`T` comes from a parametric bootstrap of the best
smooth models, each noise model drawn with the probability that its restricted likelihood gives it, with an exponential
tail beyond the simulated range. Kinks are reported only if no smooth curve with a turn of its own (a sigmoid, a
polynomial up to degree four, a natural spline of up to eight knots) has a lower BIC.

Reference: Davison and Hinkley, Bootstrap Methods and their Application (1997), section 4.2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from strati.core.rng import stream

if TYPE_CHECKING:
    from strati.core.results import FloatArray

LEAST = 12
"""Series of fewer points are not tested: two lines and their joint leave too few degrees of freedom."""

SIMULATIONS = 199
_FIRST_SIMULATIONS = 40  # if a fifth of these exceed the statistic, no more are drawn
_MAX_POINTS = 120  # longer series are averaged over neighbouring points
_MAX_KINKS = 3
_POINTS_FOR_TWO = 30  # shorter series have at most one kink
_FURTHER = 0.2  # of the level, for each kink after the first
_EDGE = 2  # points on either side of a kink
_PLACES = 40  # kink positions per clock
_TAIL = 0.2  # share of the simulated statistics that the exponential tail is fitted to
_CORRELATIONS = (0.0, 0.3, 0.6, 0.85, 0.97)
_GROWTHS = (-2.3, -1.15, 0.0, 1.15, 2.3)  # logarithm of the noise's standard deviation, last minus first
_SPLINES = (4, 5, 6, 8)  # knots
# Factor of p-values, for the choice of the smooth model from the same data: at least this, and one per so many points,
# since longer series show finer differences between the chosen model and the true curve.
_CHOICE, _POINTS_PER_CHOICE = 1.5, 30
_MARGIN = 1.0  # by which the BIC of kinks must be below that of smooth curves with a turn
_SHORT_MARGIN = (
    -2.0
)  # the same in short series of white noise, which some of the thousand curves with a turn fit
_QUANTILE = 3.841  # chi-squared, one degree of freedom, 95 %


@dataclass(frozen=True)
class ChangePoint:
    """A kink of a series.

    Attributes:
        step: Where the lines join.
        low: Begin of the 95 % interval for it.
        high: Its end.
        pvalue: Probability that a smooth curve with noise shows a kink as strong, corrected for the number of series.
        before: Slope before, per unit of ``ln(step + first spacing)``.
        after: Slope after.
    """

    step: float
    low: float
    high: float
    pvalue: float
    before: float
    after: float


def find_changes(
    steps: Sequence[float] | FloatArray,
    values: Sequence[float | None] | FloatArray,
    *,
    level: float = 0.05,
    series: int = 1,
    seed: int = 0,
) -> tuple[ChangePoint, ...]:
    """Find the kinks of one series that no smooth curve explains, in order of their steps.

    Args:
        steps: Training steps, rising; repeated ones (a restarted run) are averaged.
        values: The series; ``None`` and NaN are left out.
        level: False-alarm rate over all series.
        series: How many series are tested together; p-values are multiplied by it (Bonferroni).
        seed: Random seed of the bootstrap.

    Examples:
        >>> rng = np.random.default_rng(0)
        >>> steps = np.arange(0, 4000, 100.0)
        >>> y = np.where(steps < 1500, 1.0, 1.0 - (steps - 1500) / 1000) + rng.normal(0, 0.02, steps.size)
        >>> (change,) = find_changes(steps, y)
        >>> change.low <= 1500 <= change.high, change.pvalue < 0.05
        (True, True)
        >>> find_changes(steps, np.exp(-steps / 800) + rng.normal(0, 0.02, steps.size))
        ()
    """
    t, y = _usable(steps, values)
    if t.size < LEAST or np.ptp(y) == 0:
        return ()
    scale = float(np.abs(y).max())
    spread = float((y / scale).std()) * scale
    y = (y / scale - float((y / scale).mean())) * (scale / spread)
    models = _models(t.tobytes())
    smooth, kinked = models.smooth(y), models.kinked(y)
    statistic = smooth.bic - kinked.bic
    # The tail falls at most like exp(-T / 2), so a smaller statistic cannot become significant.
    if statistic < 2 * math.log(series / level) - 2 * math.log(t.size):
        return ()
    short = t.size < _POINTS_FOR_TWO
    white = not any(models.noises[k].correlated for k in (smooth.noise, kinked.noise))
    margin = _SHORT_MARGIN if short and white else _MARGIN
    if models.turning(y, (smooth.noise, kinked.noise)) - kinked.bic < margin:
        return ()
    choice = max(_CHOICE, t.size / _POINTS_PER_CHOICE)
    pvalue = min(1.0, choice * series * _bootstrap_pvalue(models, smooth, statistic, level / series, seed))
    if pvalue > level:
        return ()
    changes = _described(models, y, kinked, pvalue, level, series)
    return tuple(replace(c, before=c.before * spread, after=c.after * spread) for c in changes)


def _usable(
    steps: Sequence[float] | FloatArray, values: Sequence[float | None] | FloatArray
) -> tuple[FloatArray, FloatArray]:
    t = np.asarray(steps, float)
    y = np.asarray([np.nan if v is None else v for v in values], float)
    finite = np.isfinite(t) & np.isfinite(y)
    unique, place = np.unique(t[finite], return_inverse=True)
    if unique.size < LEAST:
        return unique, np.zeros(unique.size)
    mean = np.bincount(place, weights=y[finite]) / np.bincount(place)
    width = math.ceil(unique.size / _MAX_POINTS)
    if width > 1:
        starts = np.arange(0, unique.size, width)
        counts = np.diff(np.append(starts, unique.size))
        unique, mean = np.add.reduceat(unique, starts) / counts, np.add.reduceat(mean, starts) / counts
    return unique, mean


class _Noise(NamedTuple):
    whiten: FloatArray  # turns the noise into independent errors of equal variance
    log_determinant: float
    parameters: int
    correlated: bool


class _Smooth(NamedTuple):
    bic: float
    noise: int
    curves: FloatArray  # one row per noise model
    sigmas: FloatArray
    weights: FloatArray


class _Kinked(NamedTuple):
    bic: float
    noise: int
    clock: int
    places: tuple[float, ...]


class _Models:
    """Smooth and kinked models of series at the same steps, whitened for each noise model."""

    def __init__(self, t: FloatArray) -> None:
        self.n = t.size
        first = float(t[1] - t[0])
        self.elapsed = t - min(float(t[0]), 0.0)
        self.first = first
        self.steps = t
        self.clocks = [_scaled(clock(self.elapsed + first)) for clock in (np.log, np.sqrt, np.asarray)]
        self.grids = [_grid(clock) for clock in self.clocks]
        self.noises = [_noise(self.n, *pair) for pair in product(_CORRELATIONS, _GROWTHS)]
        ones = np.ones((self.n, 1))
        curves, self.shape_parameters = _monotone_curves(t - t[0], first)
        exponentials = _exponentials(t - t[0], first)
        self.ones, self.curves, self.exponentials = ones, curves, exponentials
        self._null = [_Basis(noise, ones, curves, pairs=False) for noise in self.noises]
        self._pairs = [_Basis(noise, ones, exponentials) for noise in self.noises]
        self._kinks = [
            [
                _Basis(noise, _line(u), _hinges(u, grid))
                for u, grid in zip(self.clocks, self.grids, strict=True)
            ]
            for noise in self.noises
        ]

    def bic(self, rss: FloatArray, parameters: FloatArray | int, noise: _Noise) -> FloatArray:
        floor = 1e-20 * self.n
        count = parameters + noise.parameters
        total: FloatArray = (
            self.n * np.log(np.maximum(rss, floor) / self.n)
            - 2 * noise.log_determinant
            + count * math.log(self.n)
        )
        return total

    def smooth_bic(self, y: FloatArray, noise: int) -> tuple[FloatArray, FloatArray, FloatArray]:
        """BIC of the best constant or single curve with its index (-1: constant), and of the best pair."""
        model, total = self.noises[noise], self._null[noise].total(y)
        each = self.bic(total - self._null[noise].gains(y), 2 + self.shape_parameters[:, None], model)
        index = np.argmin(each, axis=0)
        single, constant = np.min(each, axis=0), self.bic(total, 1, model)
        pair = self.bic(total - self._pairs[noise].pair_gains(y, same_sign=True).max(axis=0), 4, model)
        return np.minimum(single, constant), np.where(constant < single, -1, index), pair

    def best_smooth(self, y: FloatArray) -> FloatArray:
        """Lowest BIC of the monotone smooth curves, for every column of ``y``."""
        fits = [self.smooth_bic(y, noise) for noise in range(len(self.noises))]
        best: FloatArray = np.min([np.minimum(single, pair) for single, _, pair in fits], axis=0)
        return best

    def smooth(self, y: FloatArray) -> _Smooth:
        """The best smooth model for each noise model, with the probability of that noise model."""
        column = y[:, None]
        curves, sigmas, scores, bics = [], [], [], []
        for k, noise in enumerate(self.noises):
            single, index, pair = self.smooth_bic(column, k)
            shapes = 0.0
            if pair[0] < single[0]:
                basis = self._pairs[k]
                best = int(np.argmax(basis.pair_gains(column, same_sign=True)[:, 0]))
                design = np.hstack([self.ones, self.exponentials[:, [basis.rows[best], basis.columns[best]]]])
                shapes = 2.0
            elif index[0] >= 0:
                design = np.hstack([self.ones, self.curves[:, [index[0]]]])
                shapes = float(self.shape_parameters[index[0]])
            else:
                design = self.ones
            curve, rss = _least_squares(noise, design, y)
            free = max(1.0, self.n - design.shape[1] - shapes)
            information = np.linalg.slogdet(np.linalg.qr(noise.whiten @ _orthonormal(design))[1].T)[1]
            # Restricted likelihood: the curve absorbs correlation, which the plain likelihood would underestimate.
            scores.append(free * math.log(max(rss, 1e-20)) - 2 * noise.log_determinant + 2 * information)
            curves.append(curve)
            sigmas.append(math.sqrt(rss / free))
            bics.append(float(min(single[0], pair[0])))
        weights = np.exp(-0.5 * (np.array(scores) - min(scores)))
        return _Smooth(
            min(bics), int(np.argmin(bics)), np.array(curves), np.array(sigmas), weights / weights.sum()
        )

    def turning(self, y: FloatArray, noises: Sequence[int]) -> float:
        """Lowest BIC of the smooth curves with a turn: sigmoids, polynomials and splines."""
        best = math.inf
        for noise in (self.noises[k] for k in noises):
            best = min(
                best, float(self.bic(_least_rss(noise, self.ones, _sigmoids(self.clocks), y), 4, noise))
            )
            for clock in self.clocks:
                designs = [np.vander(2 * clock - 1, degree + 1) for degree in (2, 3, 4)]
                designs += [_spline(clock, count) for count in _SPLINES if count < self.n / 2]
                for design in designs:
                    _, rss = _least_squares(noise, design, y)
                    best = min(best, float(self.bic(np.asarray(rss), design.shape[1], noise)))
        return best

    def kinked_bic(self, y: FloatArray, noise: int, clock: int) -> tuple[FloatArray, FloatArray]:
        """BIC of the best single kink and of the best pair of kinks."""
        basis, model = self._kinks[noise][clock], self.noises[noise]
        total = basis.total(y)
        single_bic = self.bic(total - basis.gains(y).max(axis=0), 4, model)
        if self.n < _POINTS_FOR_TWO:  # two kinks pass for correlated noise in a short series
            return single_bic, np.full_like(single_bic, math.inf)
        two = self.bic(total - basis.pair_gains(y).max(axis=0), 6, model)
        return single_bic, two

    def best_kinked(self, y: FloatArray) -> FloatArray:
        """Lowest BIC of one or two kinks, for every column of ``y``."""
        bics = [
            np.minimum(*self.kinked_bic(y, noise, clock))
            for noise, clock in product(range(len(self.noises)), range(len(self.clocks)))
        ]
        best: FloatArray = np.min(bics, axis=0)
        return best

    def kinked(self, y: FloatArray) -> _Kinked:
        column, best = y[:, None], _Kinked(math.inf, 0, 0, ())
        for noise, clock in product(range(len(self.noises)), range(len(self.clocks))):
            single, two = (float(bic[0]) for bic in self.kinked_bic(column, noise, clock))
            if min(single, two) < best.bic:
                basis, grid = self._kinks[noise][clock], self.grids[clock]
                if single <= two:
                    places = [int(np.argmax(basis.gains(column)[:, 0]))]
                else:
                    pair = int(np.argmax(basis.pair_gains(column)[:, 0]))
                    places = [int(basis.rows[pair]), int(basis.columns[pair])]
                best = _Kinked(min(single, two), noise, clock, tuple(float(grid[k]) for k in sorted(places)))
        return best


class _Basis:
    """Columns whitened, orthogonal to a base and of unit length, so that gains are squared projections."""

    def __init__(self, noise: _Noise, base: FloatArray, columns: FloatArray, *, pairs: bool = True) -> None:
        self.whiten = noise.whiten
        self.q = np.linalg.qr(noise.whiten @ base)[0]
        residual = self._left(columns)
        length = np.linalg.norm(residual, axis=0)
        size = np.linalg.norm(noise.whiten @ columns, axis=0)
        self.units = np.where(length > 1e-7 * size, residual / np.maximum(length, 1e-300), 0.0)
        if not pairs:
            return
        self.rows, self.columns = np.triu_indices(columns.shape[1], 1)
        self.correlation = np.clip((self.units.T @ self.units)[self.rows, self.columns], -1, 1)

    def _left(self, y: FloatArray) -> FloatArray:
        white = self.whiten @ y
        residual: FloatArray = white - self.q @ (self.q.T @ white)
        return residual

    def total(self, y: FloatArray) -> FloatArray:
        squares: FloatArray = np.sum(self._left(y) ** 2, axis=0)
        return squares

    def gains(self, y: FloatArray) -> FloatArray:
        squares: FloatArray = (self.units.T @ self._left(y)) ** 2
        return squares

    def pair_gains(self, y: FloatArray, *, same_sign: bool = False) -> FloatArray:
        """Reduction of the sum of squares by every pair of columns."""
        projection = self.units.T @ self._left(y)
        first, second = projection[self.rows], projection[self.columns]
        r = self.correlation[:, None]
        distance = 1 - r**2
        distinct = distance > 1e-6
        reduction = (first**2 + second**2 - 2 * r * first * second) / np.where(distinct, distance, 1)
        allowed = distinct & ((first - r * second) * (second - r * first) > 0) if same_sign else distinct
        gains: FloatArray = np.where(allowed, reduction, 0.0)
        return gains


@lru_cache(maxsize=4)
def _models(steps: bytes) -> _Models:
    return _Models(np.frombuffer(steps))


def _orthonormal(design: FloatArray) -> FloatArray:
    q: FloatArray = np.linalg.qr(design)[0]
    return q


def _scaled(clock: FloatArray) -> FloatArray:
    scaled: FloatArray = (clock - clock[0]) / (clock[-1] - clock[0])
    return scaled


def _grid(clock: FloatArray) -> FloatArray:
    inner = clock[_EDGE:-_EDGE]
    fine = np.sort(np.concatenate([inner, (inner[1:] + inner[:-1]) / 2]))
    return fine if fine.size <= _PLACES else fine[np.linspace(0, fine.size - 1, _PLACES).astype(int)]


def _line(clock: FloatArray) -> FloatArray:
    return np.column_stack([np.ones_like(clock), clock])


def _hinges(clock: FloatArray, places: Sequence[float] | FloatArray) -> FloatArray:
    hinges: FloatArray = np.maximum(0.0, clock[:, None] - np.asarray(places, float)[None, :])
    return hinges


def _noise(n: int, correlation: float, growth: float) -> _Noise:
    deviation = np.exp(growth * np.linspace(-0.5, 0.5, n))
    lower = np.eye(n) - correlation * np.eye(n, k=-1)
    lower[0, 0] = math.sqrt(1 - correlation**2)
    parameters = int(correlation > 0) + int(growth != 0)
    log_determinant = math.log(lower[0, 0]) - float(np.log(deviation).sum())
    return _Noise(lower / deviation, log_determinant, parameters, correlation > 0)


def _least_squares(noise: _Noise, design: FloatArray, y: FloatArray) -> tuple[FloatArray, float]:
    white = noise.whiten @ design
    coefficients = np.linalg.lstsq(white, noise.whiten @ y, rcond=None)[0]
    left = noise.whiten @ y - white @ coefficients
    curve: FloatArray = design @ coefficients
    return curve, float(left @ left)


def _monotone_curves(u: FloatArray, first: float) -> tuple[FloatArray, FloatArray]:
    """Monotone curves without a turn, as columns, with the number of shape parameters of each."""
    last = float(u[-1])
    curves = [(u / last, 0), (np.log(u + first), 0), (np.sqrt(u), 0)]
    for power, offset in product(
        (-3, -2, -1.5, -1, -0.75, -0.5, -0.25, 0, 0.25, 0.5, 0.75, 1.5, 2, 3),
        np.geomspace(0.3 * first, 3 * last, 12),
    ):
        curves.append((((u + offset) / last) ** power if power else np.log(u + offset), 2))
    curves += [(np.exp((u - last) / scale), 1) for scale in np.geomspace(0.05 * last, 5 * last, 12)]
    curves += [(column, 1) for column in _exponentials(u, first).T]
    return np.column_stack([curve for curve, _ in curves]), np.array([count for _, count in curves], float)


def _exponentials(u: FloatArray, first: float) -> FloatArray:
    scales = np.geomspace(first / 2, 8 * u[-1], 44)
    return np.column_stack([*(np.exp(-u / scale) for scale in scales), -u / u[-1]])


def _sigmoids(clocks: Sequence[FloatArray]) -> FloatArray:
    """Logistic, Gompertz, arctangent and softplus curves in ln(step) and in step."""
    curves = []
    for clock in (clocks[0], clocks[2]):
        middle, width = (
            grid.ravel() for grid in np.meshgrid(np.linspace(-0.3, 1.3, 41), np.geomspace(0.02, 1.0, 14))
        )
        z = np.clip((clock[:, None] - middle) / width, -50, 50)
        curves += [np.tanh(z / 2), np.arctan(z), np.exp(-np.exp(z)), np.exp(-np.exp(-z))]
        curves.append(np.logaddexp(0, z[:, width > 0.1]))
    return np.hstack(curves)


def _spline(clock: FloatArray, count: int) -> FloatArray:
    """Natural cubic spline with ``count`` evenly spaced knots (Hastie, Tibshirani and Friedman, eq. 5.4)."""
    knots = np.linspace(0, 1, count)
    cubes = np.maximum(0, clock[:, None] - knots) ** 3
    slopes = (cubes[:, :-1] - cubes[:, -1:]) / (knots[-1] - knots[:-1])
    return np.column_stack([_line(clock), slopes[:, :-1] - slopes[:, -1:]])


def _least_rss(noise: _Noise, base: FloatArray, columns: FloatArray, y: FloatArray) -> FloatArray:
    """Smallest residual sum of squares of the base and any one column."""
    basis = _Basis(noise, base, columns, pairs=False)
    rss: FloatArray = basis.total(y[:, None])[0] - basis.gains(y[:, None]).max()
    return rss


def _bootstrap_pvalue(models: _Models, smooth: _Smooth, statistic: float, level: float, seed: int) -> float:
    """Probability that the best smooth model, with its noise, gives a statistic as large."""
    rng = stream(seed, "changes", str(models.n))

    def simulate(count: int) -> FloatArray:
        y = rng.normal(size=(models.n, count))
        for column, k in enumerate(rng.choice(len(smooth.weights), size=count, p=smooth.weights)):
            errors = np.linalg.solve(models.noises[k].whiten, y[:, column])
            y[:, column] = smooth.curves[k] + smooth.sigmas[k] * errors
        gains: FloatArray = models.best_smooth(y) - models.best_kinked(y)
        return gains

    simulated = simulate(_FIRST_SIMULATIONS)
    if np.sum(simulated >= statistic) > 0.2 * _FIRST_SIMULATIONS > level:
        return float(np.mean(simulated >= statistic))
    simulated = np.sort(np.append(simulated, simulate(SIMULATIONS - _FIRST_SIMULATIONS)))
    exceeding = int(np.sum(simulated >= statistic))
    top = simulated[-int(_TAIL * SIMULATIONS) :]
    if exceeding >= 20:
        return (exceeding + 1) / (SIMULATIONS + 1)
    scale = max(2.0, float(np.mean(top - top[0])))  # a chi-squared tail has the scale 2
    return min(1.0, _TAIL * math.exp(-max(0.0, statistic - float(top[0])) / scale))


def _described(
    models: _Models, y: FloatArray, kinked: _Kinked, pvalue: float, level: float, series: int
) -> tuple[ChangePoint, ...]:
    clock, noise = models.clocks[kinked.clock], models.noises[kinked.noise]
    others = [column for k, column in enumerate(models.clocks) if k != kinked.clock]
    fine = np.linspace(clock[1], clock[-2], 400)

    def bic(positions: Sequence[float], *extra: FloatArray) -> float:
        design = np.column_stack([_line(clock), _hinges(clock, positions), *extra])
        parameters = 2 + 2 * len(positions) + len(extra)
        return float(models.bic(np.asarray(_least_squares(noise, design, y)[1]), parameters, noise))

    def gains(fixed: Sequence[float]) -> FloatArray:
        base = np.column_stack([_line(clock), _hinges(clock, fixed)])
        reduction: FloatArray = _Basis(noise, base, _hinges(clock, fine), pairs=False).gains(y[:, None])[:, 0]
        return reduction

    def refined(positions: Sequence[float]) -> list[float]:
        moved = list(positions)
        for k in [*range(len(moved))] * 2:
            moved[k] = float(fine[np.argmax(gains(moved[:k] + moved[k + 1 :]))])
        return sorted(moved)

    def pvalue_of(place: float, *, refit: bool) -> float:
        remaining = [p for p in places if p != place]
        remaining = refined(remaining) if refit else remaining
        reduced = min(bic(remaining), *(bic(remaining, column) for column in others), bic(remaining, *others))
        return min(1.0, series * math.exp(min(0.0, bic(places) - reduced) / 2))

    places = refined(kinked.places)
    while len(places) < _MAX_KINKS and models.n >= _POINTS_FOR_TWO:
        more = refined([*places, float(fine[np.argmax(gains(places))])])
        if series * math.exp((bic(more) - bic(places)) / 2) > _FURTHER * level:
            break
        places = more
    pvalues = dict.fromkeys(places, pvalue)
    while len(places) > 1:
        each = {place: pvalue_of(place, refit=False) for place in places}
        weakest = max(places, key=lambda place: each[place])
        each[weakest] = pvalue_of(weakest, refit=True)
        if each[weakest] <= _FURTHER * level:
            pvalues = {place: max(pvalue, each[place]) for place in places}
            break
        places = refined([place for place in places if place != weakest])
        pvalues = dict.fromkeys(places, pvalue)
    x = np.log(models.elapsed + models.first)
    kinks = _hinges(x, np.interp(places, clock, x))
    slopes = np.cumsum(np.linalg.lstsq(np.column_stack([_line(x), kinks]), y, rcond=None)[0][1:])
    changes = []
    for k, place in enumerate(places):
        remaining = [p for p in places if p != place]
        rss = _least_squares(noise, np.column_stack([_line(clock), _hinges(clock, remaining)]), y)[1] - gains(
            remaining
        )
        inside = fine[models.n * np.log(np.maximum(rss, 1e-300) / max(rss.min(), 1e-300)) <= _QUANTILE]
        # No checkpoint lies between two neighbours: the interval ends at checkpoints.
        low = max(int(np.searchsorted(clock, min(place, inside[0]), "right")) - 1, 0)
        high = min(int(np.searchsorted(clock, max(place, inside[-1]), "left")), models.n - 1)
        changes.append(
            ChangePoint(
                float(round(np.interp(place, clock, models.steps), 6)),
                float(models.steps[low]),
                float(models.steps[high]),
                pvalues[place],
                float(slopes[k]),
                float(slopes[k + 1]),
            )
        )
    return tuple(changes)
