"""What derivatives near the parameters show before anything is sampled: is it a minimum, smooth, regular?

At a minimum of an analytic loss whose Hessian has rank ``r``, the splitting lemma leaves ``r`` squares and a rest of
order four or more in ``N - r`` directions, so ``r/2 <= lambda <= r/2 + (N - r)/4``: certain, whatever a ladder shows.
It is just ``r/2`` where nothing is left over: at full rank, and where the loss stays at its minimum along all of the
other directions (symmetries, dead neurons).

Ranks hold what rounding cannot decide: rows and columns are scaled first, so that a parameter with a small effect is
not taken for one with none. What rounding does to the entries is measured by moving the parameters by a few units in
the last place; singular values above that bound are certainly not zero (Weyl), and those below are taken for zero
only where a wide gap sets them apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.func import grad

from strati.core.rng import derive
from strati.landscape.counts.ranks import upper
from strati.landscape.llc import tuning
from strati.landscape.llc.loss_structure import gradient_cost
from strati.landscape.llc.posterior import curvature_spectrum
from strati.landscape.objective import Objective, Potential, exact_hessian, metric_jacobian


class NumericalRank(NamedTuple):
    """The least and the largest rank that rounding allows; equal where the rank is known."""

    low: int
    high: int

    @property
    def known(self) -> bool:
        """Whether rounding leaves no choice."""
        return self.low == self.high


class HessianRank(NamedTuple):
    """Rank of a Hessian, and whether some eigenvalue is certainly negative."""

    rank: NumericalRank
    negative: bool


def hessian_rank(
    hessian: Callable[[Tensor], Tensor], theta: Tensor, others: Sequence[Tensor] = ()
) -> HessianRank:
    """The rank of a symmetric matrix that depends on parameters, at ``theta``.

    Args:
        hessian: The matrix as a function of the parameters.
        theta: Where.
        others: Points with the loss of ``theta`` up to rounding; an eigenvalue counts only if they have it as well.

    Examples:
        >>> theta = torch.zeros(3, dtype=torch.float64)
        >>> hessian_rank(lambda t: torch.diag(torch.tensor([1.0, 1e-30, 0.0]).double()), theta).rank
        NumericalRank(low=2, high=2)
    """
    matrix, places = hessian(theta), [hessian(place) for place in others]
    rounding = (hessian(_nudged(theta)) - matrix).abs()
    moved = torch.stack([rounding, *((place - matrix).abs() for place in places)]).amax(0)
    scale = _scales(matrix.diagonal().abs().sqrt(), rounding.diagonal().sqrt())

    def scaled(of: Tensor) -> Tensor:
        return of * scale[:, None] * scale  # one after the other: the product of two scales may overflow

    values = torch.linalg.eigvalsh(scaled(matrix))
    bound = _bound(values.abs().max(), scaled(rounding), len(theta))
    # An eigenvalue is a square: gaps are, too.
    rank = _count(values.abs(), bound, gap=tuning.RANK_GAP**1.5)
    # A parameter whose effect is small here may have more of it there: without the scales that changes little.
    plain = torch.linalg.eigvalsh(matrix) if places else values
    alike = [
        max(_alike(values, torch.linalg.eigvalsh(scaled(p))), _alike(plain, torch.linalg.eigvalsh(p)))
        for p in places
    ]
    low = min([rank.low, *alike])
    beyond = -10 * _bound(values.abs().max(), scaled(moved), len(theta))
    certain = low == rank.low
    return HessianRank(rank if certain else NumericalRank(low, len(theta)), bool((values < beyond).any()))


def _alike(here: Tensor, there: Tensor) -> int:
    """How many eigenvalues, from the largest on, keep their size between two places.

    A curvature that is there only because the minimum was missed by a little (``12 w^2`` of ``w^4``) does not.
    """
    first, second = (v.abs().sort(descending=True).values for v in (here, there))
    changed = torch.maximum(first, second) > tuning.SAME_EIGENVALUE * torch.minimum(first, second)
    return int(changed.long().argmax()) if bool(changed.any()) else len(here)


def jacobian_rank(objective: Objective, theta: Tensor) -> NumericalRank | None:
    """The rank of the outputs' Jacobian over all data; ``None`` where it takes too long to compute.

    For losses of probabilities the logits' common shift is left out.

    Examples:
        >>> from strati.landscape.objective import behavioural_loss
        >>> loss = behavioural_loss(torch.nn.Linear(2, 1).double(), torch.ones(5, 2).double())
        >>> jacobian_rank(loss, loss.flat.theta)
        NumericalRank(low=1, high=1)
    """
    outputs = objective.outputs
    if float(outputs) * objective.flat.size**2 > tuning.RANK_WORK:
        return None
    here = _triangular(objective, theta)
    noise = _column_noise(objective, theta)
    norms = torch.linalg.vector_norm(here, dim=0)
    scale = _scales(norms, noise)
    values = torch.linalg.svdvals(here * scale)
    bound = _bound(values.max(), (noise * scale)[None], max(outputs, objective.flat.size))
    rank = _count(values, bound, gap=tuning.RANK_GAP)
    if bool((theta.to(torch.float32) == theta).all()):
        low = min(rank.low, _beyond_single(objective, theta, here))
        rank = rank if low == rank.low else NumericalRank(low, len(theta))
    # Neither the number of outputs nor rounding can be exceeded.
    return NumericalRank(rank.low, min(rank.high, outputs, objective.flat.size))


def _beyond_single(objective: Objective, theta: Tensor, jacobian: Tensor) -> int:
    """The rank without singular values that parameters in single precision have by rounding alone.

    Layers of rank one, say, are so up to 1e-8 only. Such values lie below what one rounding does, and a wide gap sets
    them apart; where singular values fall off gradually they count, as the parameters given are what they are.
    """
    noise = _column_noise(objective, theta, torch.finfo(torch.float32).eps)
    scale = _scales(torch.linalg.vector_norm(jacobian, dim=0), noise)
    values = torch.linalg.svdvals(jacobian * scale)
    bound = _bound(values.max(), (noise * scale)[None], max(jacobian.shape))
    above = int((values > bound).sum())
    apart = 0 < above < len(values) and float(values[above - 1]) > tuning.RANK_GAP_SINGLE * float(
        values[above]
    )
    return above if apart else len(theta)


def _scales(size: Tensor, noise: Tensor) -> Tensor:
    """Inverse sizes; what is not above its noise is left as small as it is."""
    largest = size.max()
    usable = size > 1e3 * noise
    return torch.where(usable & (size > 0), 1 / size.clamp(min=1e-300), 1 / largest.clamp(min=1e-300))


def _bound(largest: Tensor, noise: Tensor, size: int) -> float:
    precision = torch.finfo(noise.dtype).eps
    spread = float(torch.linalg.vector_norm(noise))
    return tuning.RANK_SAFETY * (spread + math.sqrt(size) * precision * float(largest))


def _count(values: Tensor, bound: float, *, gap: float) -> NumericalRank:
    """Singular values above the bound; the others are zero only if the gap before them is like no other."""
    counted = values[values > 10 * bound].sort(descending=True).values
    low = len(counted)
    if low in (0, len(values)):
        return NumericalRank(low, len(values) if float(values.max()) > bound else low)
    steps = counted[:-1] / counted[1:]
    widest = float(steps.max()) if low > 1 else 1.0
    apart = float(counted[-1]) > gap * widest * bound and not bool(
        ((values > bound) & (values <= 10 * bound)).any()
    )
    return NumericalRank(low, low if apart else len(values))


def _pieces(objective: Objective) -> list[Objective]:
    per_row = max(1, objective.outputs // objective.rows) * objective.flat.size
    step = max(1, tuning.RANK_CHUNK // per_row)
    return [objective.part(slice(i, i + step)) for i in range(0, objective.rows, step)]


def _kind(objective: Objective) -> str:
    name = objective.name
    return "kl" if name is not None and not name.squared else "mse"


def _triangular(objective: Objective, theta: Tensor) -> Tensor:
    """The triangular factor of the Jacobian, a few rows of data at a time."""
    factor = theta.new_zeros(0, objective.flat.size)
    for piece in _pieces(objective):
        jacobian, _ = metric_jacobian(objective.flat, theta, piece.x, kind=_kind(objective))
        factor = upper(torch.cat([factor, jacobian]))
    return factor


def _column_noise(objective: Objective, theta: Tensor, precision: float | None = None) -> Tensor:
    nudged = _nudged(theta, precision)
    total = torch.zeros_like(theta)
    for piece in _pieces(objective):
        here, there = (
            metric_jacobian(objective.flat, t, piece.x, kind=_kind(objective))[0] for t in (theta, nudged)
        )
        total += ((there - here) ** 2).sum(0)
    return total.sqrt()


def _nudged(theta: Tensor, precision: float | None = None) -> Tensor:
    generator = torch.Generator().manual_seed(derive(0, "rounding", theta.numel()))
    signs = torch.randint(0, 2, theta.shape, generator=generator).to(theta) * 2 - 1
    return theta * (1 + tuning.ROUNDING_UNITS * (precision or torch.finfo(theta.dtype).eps) * signs)


@dataclass(frozen=True)
class LocalGeometry:
    """What is known about the place where the coefficient is asked for.

    Attributes:
        parameters: How many vary.
        smooth: Whether the loss is three times differentiable there, as far as differences of gradients show.
        minimum: Whether the gradient vanishes there or at a point found nearby, and no curvature is negative.
        rank: Of the Hessian at that point; ``None`` if not computed.
        exact: The coefficient, where the derivatives alone decide it.
        lower: How much lower than at the given parameters the loss is at that point.
        curvature: Eigenvalues of the Hessian there, ``(d,)`` or empty.
        displacement: Squared distance to that point along each eigenvector.
    """

    parameters: int
    smooth: bool
    minimum: bool
    rank: NumericalRank | None
    exact: float | None
    lower: float
    curvature: np.ndarray = field(repr=False)
    displacement: np.ndarray = field(repr=False)

    @property
    def range(self) -> tuple[float | None, float | None]:
        """The least and the largest coefficient that are possible; ``None`` where nothing is known."""
        if self.exact is not None:
            return self.exact, self.exact
        if not self.smooth or not self.minimum or self.rank is None:
            return None, None
        return self.rank.low / 2, (self.parameters + self.rank.high) / 4

    def localisation_bias(self, nbeta: float, gamma: float) -> float:
        """What the localisation adds to ``nbeta (<L> - L_min)`` because it is centred beside the minimum."""
        pull = gamma / (nbeta * self.curvature + gamma)
        return float(nbeta / 2 * (self.curvature * pull**2 * self.displacement).sum())


def local_geometry(potential: Potential, theta: Tensor, seconds: float = math.inf) -> LocalGeometry | None:
    """Look around ``theta``, given in double precision; ``None`` if derivatives of the loss take too long.

    Args:
        potential: The loss.
        theta: Where.
        seconds: That it may take by the cost model, if that is less than usual.

    Examples:
        >>> found = local_geometry(lambda w: w[0] ** 2 + w[1] ** 4, torch.zeros(2, dtype=torch.float64))
        >>> found.rank, found.exact, found.range
        (NumericalRank(low=1, high=1), None, (0.5, 0.75))
        >>> local_geometry(lambda w: (w**2).sum(), torch.zeros(2, dtype=torch.float64)).exact
        1.0
    """
    size = theta.numel()
    look = _LocalDerivatives(potential, theta)
    behavioural = isinstance(potential, Objective) and potential.behavioural
    budget = min(tuning.BUDGET, seconds)
    if not look.differentiable or 8 * look.seconds > budget:
        return None
    smooth = look.smooth()
    if behavioural and isinstance(potential, Objective):
        affordable = _rank_seconds(potential, size) <= seconds
        return _behavioural(potential, theta, smooth) if affordable else _unknown(size, smooth, minimum=True)
    if look.seconds * size > budget or not smooth:
        return _unknown(size, smooth, minimum=not smooth)
    try:
        return _general(potential, look, smooth)
    except RuntimeError:  # twice differentiable is more than a sampler needs
        return _unknown(size, smooth, minimum=False)


def with_rank(around: LocalGeometry, objective: Objective) -> LocalGeometry:
    """The least rank that the Gauss-Newton matrix shows, where a more exact one takes too long."""
    if not (around.smooth and around.minimum and objective.behavioural):
        return around
    spectrum = curvature_spectrum(objective)
    if spectrum is None:
        return around
    precision = torch.finfo(objective.flat.dtype).eps
    low = int((spectrum > 100 * len(spectrum) * precision * spectrum.max()).sum())
    return replace(around, rank=NumericalRank(low, min(around.parameters, objective.outputs)))


def _rank_seconds(objective: Objective, size: int) -> float:
    """Seconds that the rank of a Jacobian takes, by the operations of its singular values."""
    sides = sorted((size, objective.outputs))
    return tuning.SECONDS_PER_RANK * sides[0] ** 2 * sides[1]


def _unknown(size: int, smooth: bool, *, minimum: bool) -> LocalGeometry:
    return LocalGeometry(size, smooth, minimum, None, None, 0.0, np.zeros(0), np.zeros(0))


def _behavioural(objective: Objective, theta: Tensor, smooth: bool) -> LocalGeometry:
    """The network as it is has the least loss there can be; the Hessian's rank is that of the Jacobian."""
    rank = jacobian_rank(objective, theta) if smooth else None
    exact = None
    if rank is not None and rank.known and _constant(objective, theta, rank.low):
        exact = rank.low / 2
    return LocalGeometry(len(theta), smooth, True, rank, exact, 0.0, np.zeros(0), np.zeros(0))


def _general(potential: Potential, look: _LocalDerivatives, smooth: bool) -> LocalGeometry:
    theta, size = look.theta, look.theta.numel()
    reached = look.descend(theta)
    hessian = hessian_rank(look.hessian, reached.point, look.equivalent_minima(reached))
    if hessian.negative:
        values, vectors = torch.linalg.eigh(look.hessian(reached.point))
        aside = reached.point + 1e-3 * look.size * vectors[:, 0]
        reached = look.descend(aside, reached.value)
        return LocalGeometry(
            size, smooth, False, None, None, look.start - reached.value, np.zeros(0), np.zeros(0)
        )
    rank, exact = hessian.rank, None
    if isinstance(potential, Objective) and rank.low < size and _constant(potential, reached.point, rank.low):
        # The loss depends on no more coordinates than the outputs do.
        rank = NumericalRank(rank.low, rank.low)
        exact = rank.low / 2 if reached.converged else None
    elif isinstance(potential, Objective) and _hidden(potential, reached.point, rank):
        rank = NumericalRank(rank.low, size)
    elif (
        rank.known
        and reached.converged
        and (
            rank.low == size
            or (not isinstance(potential, Objective) and look.flat_valley(reached.point, rank.low))
        )
    ):
        exact = rank.low / 2
    values, vectors = torch.linalg.eigh(look.hessian(reached.point))
    return LocalGeometry(
        parameters=size,
        smooth=smooth,
        minimum=reached.converged,
        rank=rank,
        exact=exact,
        lower=look.start - reached.value,
        curvature=values.clamp(min=0).cpu().numpy(),
        displacement=(((reached.point - theta) @ vectors) ** 2).cpu().numpy(),
    )


def _hidden(objective: Objective, theta: Tensor, rank: NumericalRank) -> bool:
    """Whether the outputs feel directions that the Hessian does not show.

    Squared, the slopes of units that have become steps are below the rounding of the loss: such directions are not
    free, and not seen either.
    """
    if rank.high == theta.numel():
        return False
    of_jacobian = jacobian_rank(objective, theta)
    return of_jacobian is not None and of_jacobian.high > rank.high


def _constant(objective: Objective, theta: Tensor, rank: int) -> bool:
    """Whether the Jacobian has this rank at almost every point nearby.

    It is then this rank in a whole neighbourhood (it cannot fall near a point), the outputs depend on that many
    coordinates, and the loss is a function of those alone.
    """
    if rank == theta.numel():
        return True
    # Each parameter moves by a share of its own size: large ones do not decide how far small ones go.
    present = theta[theta != 0].abs()
    typical = max(float(present.median()), 1e-3) if len(present) else 1e-3
    size = theta.abs().clamp(min=min(typical, 1.0))
    for trial in range(2):
        generator = torch.Generator().manual_seed(derive(0, "nearby", trial))
        step = torch.randn(theta.shape, generator=generator, dtype=theta.dtype).to(theta.device)
        if jacobian_rank(objective, theta + tuning.NEARBY_DISTANCE * size * step) != NumericalRank(
            rank, rank
        ):
            return False
    return True


class _Reached(NamedTuple):
    point: Tensor
    value: float
    converged: bool


class _LocalDerivatives:
    """A loss near a point: slopes, Hessians, the way down."""

    def __init__(self, potential: Potential, theta: Tensor) -> None:
        self.theta = theta

        def value(t: Tensor) -> Tensor:
            return potential(t).reshape(())

        self._value, self._slope = value, grad(value)
        self.size = max(float(theta.abs().mean()), 1.0 if not bool(theta.any()) else 1e-3)
        self.seconds = gradient_cost(potential, theta, turning=0).replica
        with torch.no_grad():
            self.start = float(value(theta))
        self.potential = potential
        try:
            self.slope(theta)
            self.differentiable = True
        except RuntimeError:
            self.differentiable = False

    def slope(self, theta: Tensor) -> Tensor:
        gradient: Tensor = self._slope(theta.detach()).detach()
        return gradient

    def value(self, theta: Tensor) -> float:
        with torch.no_grad():
            return float(self._value(theta))

    def hessian(self, theta: Tensor) -> Tensor:
        return exact_hessian(self.potential, theta)

    def smooth(self) -> bool:
        """Whether gradients on both sides of the point agree on the second derivatives, and these on the third.

        Along a line, ``g(h) - 2 g(0) + g(-h)`` is of order ``h^2``, and ``g(h) - g(-h) - 2 h H v`` of order ``h^3``
        where three derivatives exist; a kink makes the first of order one or ``h``, and ``|w|^3`` the second ``h^2``.
        No line through the point sees the kink of ``|w1 w2|``, but two do: ``g(u + v) - g(u) - g(v) + g(0)`` is of
        order ``h^2`` where two derivatives exist, and there of order ``h``.
        """
        generator = torch.Generator().manual_seed(derive(0, "kinks", len(self.theta)))
        lines = torch.randn(
            tuning.GEOMETRY_TRIALS + 1, len(self.theta), generator=generator, dtype=self.theta.dtype
        )
        lines = self.size * lines.to(self.theta)
        for line, other in pairwise(lines):
            # A kink at the point shows at every distance, one beside it only at some.
            if all(
                self._kinked(line, reach) or self._folded(line, other, reach)
                for reach in tuning.KINK_DISTANCES
            ):
                return False
        return True

    def _kinked(self, line: Tensor, farthest: float) -> bool:
        here = self.slope(self.theta)
        bends, slants, noises = [], [], []
        for reach in (farthest, farthest / 8, farthest / 64):
            ahead, back = self.slope(self.theta + reach * line), self.slope(self.theta - reach * line)
            size = float(ahead.norm() + back.norm() + here.norm()) + float(self.theta.norm())
            noises.append(1e3 * torch.finfo(self.theta.dtype).eps * size)
            bends.append(float((ahead - 2 * here + back).norm()))
            slants.append((ahead - back) / reach)
        # Each factor 8 in the reach takes 64 off a smooth bend; 8 or less off a kink's.
        if bends[2] > 10 * noises[2] and bends[2] > bends[1] / 24:
            return True
        first, second = (float((slants[k] - slants[k + 1]).norm()) for k in (0, 1))
        return second > 10 * noises[2] / (farthest / 64) and second > first / 24

    def _folded(self, line: Tensor, other: Tensor, farthest: float) -> bool:
        """Whether the gradient is not additive in the offset, by a share that does not fall with the distance."""
        here = self.slope(self.theta)
        rests, noises = [], []
        for reach in (farthest / 8, farthest / 64):
            ways = [self.slope(self.theta + reach * way) for way in (line + other, line, other)]
            size = float(sum(way.norm() for way in ways) + here.norm()) + float(self.theta.norm())
            noises.append(1e3 * torch.finfo(self.theta.dtype).eps * size)
            rests.append(float((ways[0] - ways[1] - ways[2] + here).norm()))
        return rests[1] > 10 * noises[1] and rests[1] > rests[0] / 24

    def descend(self, start: Tensor, known: float = math.inf) -> _Reached:
        """Newton's way to the minimum, damped; it never goes up."""
        point, value = start, min(known, self.value(start))
        damping, hessian = 0.0, self.hessian(start)
        precision = torch.finfo(start.dtype).eps
        converged = False
        for i in range(tuning.MOST_DESCENTS):
            slope = self.slope(point)
            smallest = precision * max(abs(value), 1e-300)
            if not bool(slope.any()):
                converged = True
                break
            if i and len(point) <= tuning.CHEAP_HESSIAN:
                hessian = self.hessian(point)
            values, vectors = torch.linalg.eigh(hessian)
            floor = 1e-12 * float(values.abs().max()) + torch.finfo(start.dtype).tiny
            step = -(vectors @ ((vectors.T @ slope) / (values.abs().clamp(min=floor) + damping)))
            gain = -float(step @ slope) / 2
            if gain <= 4 * smallest:
                converged = True
                break
            if float(step.norm()) > 10 * self.size * len(point) ** 0.5:
                step = step * (10 * self.size * len(point) ** 0.5 / float(step.norm()))
            ahead = self.value(point + step)
            if math.isfinite(ahead) and ahead < value:
                converged = value - ahead <= 64 * smallest
                point, value, damping = point + step, ahead, damping / 10
                if converged:
                    break
            elif math.isfinite(ahead) and ahead <= value + 64 * smallest:
                converged = True  # rounding hides what is left to gain
                break
            else:
                damping = max(10 * damping, 1e-6 * float(values.abs().max()))
        return _Reached(point, min(value, known), converged)

    def equivalent_minima(self, reached: _Reached) -> list[Tensor]:
        """Points whose loss equals the minimum up to rounding: one Newton step away, and as far as rounding allows."""
        if not bool(self.slope(self.theta).any()) and bool((reached.point == self.theta).all()):
            return []  # the slope vanishes exactly where it should
        values, vectors = torch.linalg.eigh(self.hessian(reached.point))
        size = values.abs().clamp(min=1e-14 * float(values.abs().max()) + torch.finfo(values.dtype).tiny)
        slope = vectors.T @ self.slope(reached.point)
        # Along a valley of minima there is no end of such places: a short way is enough.
        most = tuning.ASIDE_DISTANCE * self.size
        hidden = torch.sqrt(4 * torch.finfo(values.dtype).eps * abs(reached.value) / size).clamp(max=most)
        places = [
            reached.point - vectors @ (slope / size).clamp(-self.size, self.size),
            reached.point + vectors @ hidden,
        ]
        moved = reached.point - self.theta
        if bool(moved.any()) and self.start - reached.value <= tuning.SAME_MINIMUM * self.rise():
            # Data in single precision put the minimum beside the parameters that made them: curvature that comes from
            # the way between the two is rounding.
            places += [self.theta, reached.point + moved]
        return places

    def rise(self) -> float:
        """How much larger the loss is one size of the parameters away."""
        generator = torch.Generator().manual_seed(derive(0, "rise", len(self.theta)))
        ways = torch.randn(
            tuning.GEOMETRY_TRIALS, len(self.theta), generator=generator, dtype=self.theta.dtype
        ).to(self.theta)
        ahead = [self.value(self.theta + self.size * way) - self.start for way in ways]
        return max((v for v in ahead if math.isfinite(v)), default=0.0)

    def flat_valley(self, point: Tensor, rank: int) -> bool:
        """Whether the loss, least over the stiff directions, stays at its minimum along all others."""
        hessian = self.hessian(point)
        values, vectors = torch.linalg.eigh(hessian)
        stiff = vectors[:, len(values) - rank :]
        loose = vectors[:, : len(values) - rank]
        inverse = 1 / values[len(values) - rank :]
        generator = torch.Generator().manual_seed(derive(0, "valley", len(point)))
        precision = torch.finfo(point.dtype).eps
        for _ in range(tuning.GEOMETRY_TRIALS):
            way = loose @ torch.randn(loose.shape[1], generator=generator, dtype=point.dtype).to(point.device)
            for share in tuning.VALLEY_DISTANCES:
                place = point + share * self.size * way
                for _ in range(tuning.MOST_DESCENTS):
                    slope = self.slope(place)
                    step = stiff @ (inverse * (stiff.T @ slope))
                    place = place - step
                    if float(step.norm()) <= 100 * precision * self.size:
                        break
                else:  # the valley bends too much for this distance; a shorter one will do
                    if share == tuning.VALLEY_DISTANCES[0]:
                        return False
                    break
                left = self.slope(place)
                size = float(values[-1].abs()) * float((place - point).norm()) if rank else 0.0
                if not float(left.norm()) <= 1e3 * precision * size + 1e-300:
                    return False
        return True
