"""``reproduce degeneracy-toys``: the losses that degeneracy-in-the-loss-landscape explains itself with, sampled.

Section 2.2.2's ``c^2 w^2 + w^4``, whose learning coefficient depends on the loss scale; section 5.1's plane and figure
1's cross, whose free directions do not and do interact; and section 2.1's remark that the Bayesian information
criterion needs ``2 lambda`` in the place of the number of parameters. All have exact values.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from strati.core.results import Tick, silent
from strati.core.rng import derive, stream
from strati.landscape.llc.llc import LLCConfig, learning_coefficient
from strati.landscape.llc.scales import EffectiveParameters, effective_parameters
from strati_reproductions.checkpointed_training import Training, spaced, step_of, trained
from strati_reproductions.datasets import embedded_digits
from strati_reproductions.pictures import OURS, PAPER, THEORY, drawn, over_steps, panels, save
from strati_reproductions.registry import Reproduction, Row

if TYPE_CHECKING:
    from strati.core.results import FloatArray

SMALL = 0.1
"""``c`` of the first toy; the quadratic term is as large as the quartic one at a loss of ``2 c^4``."""
CAPTIONS = {
    "scales": "the learning coefficient of c^2 w^2 + w^4 against the loss scale. Below c^4 the small quadratic term is "
    "seen (1/2), above it only the quartic one (1/4); the points are sampled, the line is exact.",
    "figure-1": "the paper's figure 1: the loss w1^2 w2^2. Along either axis it does not change, off both it does: the "
    "set of zero loss is a cross, and two free directions are worth one degree of freedom.",
    "information-criterion": "what the data cost beyond their likelihood, for y = a b x with two parameters: exact, by "
    "the criterion with the number of parameters, and with 2 lambda (and its log log term).",
}


def degeneracy_toys(*, quick: bool, seed: int, folder: Path, tick: Tick = silent) -> Reproduction:
    """The three toys, sampled and exact."""
    scales = (10.0 ** np.arange(-8, 0.01, 2 if quick else 1)).tolist()
    curve = effective_parameters(
        Quartic(SMALL), torch.ones(2, 1, dtype=torch.float64), scales=scales, seed=seed
    )
    tick("scales")
    rows = [*_scales(curve), *_cross(seed)]
    tick("cross")
    energies = information(seeds=20 if quick else 200, seed=seed)
    rows += _criterion(energies)
    tick("information criterion")
    figures = drawn(_draw, curve, energies, folder)
    title = "Losses of sections 2.1, 2.2.2 and 5.1: scales, the cross, the information criterion"
    return Reproduction("degeneracy-toys", title, tuple(rows), figures, captions=CAPTIONS)


class Quartic(nn.Module):
    """A network of one parameter whose behavioural loss at 0 is ``c^2 w^2 + w^4``."""

    def __init__(self, c: float) -> None:
        super().__init__()
        self.c, self.w = c, nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        """``(c w, w^2)`` for an input of one."""
        return torch.cat([self.c * self.w * x, self.w**2 * x], dim=-1)


def exact_coefficient(epsilon: FloatArray, c: float) -> FloatArray:
    """``eps d ln V / d eps`` of ``c^2 w^2 + w^4``: ``L / (w L'(w))`` at the ``w`` with this loss.

    Examples:
        >>> exact_coefficient(np.array([1e-12, 1e4]), 0.1).round(3).tolist()
        [0.5, 0.25]
    """
    square = (np.sqrt(c**4 + 4 * epsilon) - c**2) / 2
    coefficient: FloatArray = (c**2 + square) / (2 * c**2 + 4 * square)
    return coefficient


def _scales(curve: EffectiveParameters) -> list[Row]:
    rows = []
    for row in curve.rows:
        exact = float(exact_coefficient(np.array([row.epsilon]), SMALL)[0])
        limit: dict[str, Any] = {}
        if row.epsilon <= 1e-4 * SMALL**4:
            limit = {"paper": 0.5}
        elif row.epsilon >= 0.99e4 * SMALL**4:
            limit = {"paper": 0.25}
        note = (
            "the paper's crossover c^(1/4) is c^4"
            if not limit and abs(np.log10(row.epsilon) + 4) < 0.5
            else ""
        )
        what = f"2.2.2 lambda({row.epsilon:.0e}) of c^2 w^2 + w^4, c = {SMALL:g}"
        rows.append(
            Row(
                what,
                limit.get("paper"),
                row.coefficient,
                note,
                theory=exact,
                error=row.stderr,
                key="lambda-at-scale",
            )
        )
    return rows


def _cross(seed: int) -> list[Row]:
    plane = learning_coefficient(
        lambda w: w[0] ** 2 + 0 * w.sum(), torch.zeros(3, dtype=torch.float64), seed=seed
    )
    cross = learning_coefficient(lambda w: (w[0] * w[1]) ** 2, torch.zeros(2, dtype=torch.float64), seed=seed)
    rows = []
    for key, name, estimate, size, paper in (
        ("plane-freedom", "5.1 degrees of freedom of w1^2 in three parameters", plane, 3, 2),
        ("cross-freedom", "figure 1: degrees of freedom of w1^2 w2^2 in two parameters", cross, 2, 1),
    ):
        freedom = None if estimate.asymptotic is None else size - 2 * estimate.asymptotic
        error = None if estimate.asymptotic_stderr is None else 2 * estimate.asymptotic_stderr
        note = f"N - 2 lambda, lambda = {estimate.asymptotic:.4f}, multiplicity {estimate.multiplicity}"
        rows.append(Row(name, float(paper), freedom, note, theory=float(paper), error=error, key=key))
    return rows


def information(
    *, seeds: int, seed: int, counts: Sequence[int] = (10, 100, 1_000, 10_000, 100_000)
) -> FloatArray:
    """Exact free energies of ``y = a b x + noise`` beyond the likelihood of the best fit, ``(counts, seeds)``.

    The truth is ``a b = 0``; ``a`` and ``b`` have a uniform prior on ``[-1, 1]``, noise of deviation 1. With ``s`` the
    product, ``-ln int exp(-n (L(a b) - L_min))`` is one integral over ``s`` of density ``-ln|s| / 2``.
    """
    t = np.linspace(-18, 0, 20_001)
    s = np.exp(t)  # |s| on a logarithmic grid; the density of s is -ln|s| / 2 on either side
    values = np.empty((len(counts), seeds))
    for i, n in enumerate(counts):
        rng = stream(seed, "information", n)
        fits = rng.normal(size=seeds) / np.sqrt(n)  # the best product, for x^2 = 1
        for j, fit in enumerate(fits):
            fall = sum(np.exp(-n * (sign * s - fit) ** 2 / 2) for sign in (-1, 1))
            best = np.exp(-n * (np.clip(fit, -1, 1) - fit) ** 2 / 2)
            values[i, j] = -np.log(np.trapezoid(fall * -t / 2 * s, t) / best)
    return values


def _criterion(energies: FloatArray) -> list[Row]:
    """What the data cost at most, by counting parameters and by ``2 lambda``."""
    estimate = learning_coefficient(lambda w: (w[0] * w[1]) ** 2 / 2, torch.zeros(2, dtype=torch.float64),
                                 config=LLCConfig())  # fmt: skip
    assert estimate.asymptotic is not None
    n = 100_000
    mean, seeds = float(energies[-1].mean()), energies.shape[1]
    error = float(energies[-1].std(ddof=1) / np.sqrt(seeds))
    plain, ours = np.log(n), (estimate.bic(0.0, n) or 0.0) / 2
    growth = float((energies[-1].mean() - energies[-2].mean()) / np.log(10))
    spread = float(np.sqrt(energies[-2:].var(axis=1, ddof=1).sum() / seeds) / np.log(10))
    return [
        Row(f"2.1 exact free energy of y = a b x beyond the likelihood, n = {n:,}", None, mean,
            "two parameters, lambda = 1/2, multiplicity 2", error=error, seeds=seeds),
        Row("2.1 the criterion with the number of parameters, N/2 ln n", None, float(plain),
            f"too much by {plain - mean:.2f} nats"),
        Row("2.1 the criterion with 2 lambda, lambda ln n", None, float(ours),
            f"off by {ours - mean:.2f} nats; with - (m - 1) ln ln n by {ours - np.log(np.log(n)) - mean:.2f}"),
        Row("2.1 growth of the exact one per ln n, from 10,000 to 100,000", None, growth,
            "N/2 = 1 is the usual criterion's; ln ln n keeps it a little below 1/2",
            theory=float(0.5 - np.log(np.log(1e5) / np.log(1e4)) / np.log(10)), error=spread, seeds=seeds,
            key="criterion-growth"),
    ]  # fmt: skip


def _draw(curve: EffectiveParameters, energies: FloatArray, folder: Path) -> tuple[str, ...]:
    paths: list[str] = []
    figure, (axis,) = panels(1, title="Learning coefficient of c^2 w^2 + w^4, c = 0.1", size=(5.0, 3.4))
    fine = 10.0 ** np.linspace(-9, 1, 200)
    axis.semilogx(fine, exact_coefficient(fine, SMALL), color=THEORY, label="exact")
    sampled = [row for row in curve.rows if row.coefficient is not None]
    bars = [2 * (r.stderr or 0.0) for r in sampled]
    axis.errorbar([r.epsilon for r in sampled], [r.coefficient for r in sampled], yerr=bars, fmt="o", ms=4, color=OURS,
                  label="sampled, +- 2 errors")  # fmt: skip
    axis.axvline(SMALL**4, color=PAPER, ls="--", lw=1, label="c^4")
    axis.set(xlabel="loss scale", ylabel="lambda")
    axis.legend(frameon=False)
    paths += save(figure, folder, "scales")
    figure, (axis,) = panels(1, title="Figure 1: w1^2 w2^2", size=(4.2, 3.8))
    grid = np.linspace(-1, 1, 201)
    loss = np.outer(grid, grid) ** 2
    contours = axis.contourf(grid, grid, loss, levels=12, cmap="cividis")
    axis.plot([-1, 1], [0, 0], color="white", lw=2, label="zero loss")
    axis.plot([0, 0], [-1, 1], color="white", lw=2)
    axis.set(xlabel="w1", ylabel="w2")
    figure.colorbar(contours, ax=axis, label="loss")
    paths += save(figure, folder, "figure-1")
    figure, (axis,) = panels(1, title="The information criterion of y = a b x", size=(5.0, 3.4))
    counts = np.array([10, 100, 1_000, 10_000, 100_000], dtype=float)
    axis.semilogx(counts, energies.mean(axis=1), "o", color=OURS, label="exact")
    axis.semilogx(counts, np.log(counts), color=PAPER, label="N/2 ln n")
    axis.semilogx(counts, np.log(counts) / 2, color=THEORY, label="lambda ln n")
    axis.semilogx(counts, np.log(counts) / 2 - np.log(np.log(counts)), color=THEORY, ls="--",
                  label="lambda ln n - ln ln n")  # fmt: skip
    axis.set(xlabel="n", ylabel="nats beyond the likelihood")
    axis.legend(frameon=False)
    return (*paths, *save(figure, folder, "information-criterion"))


def effective_parameters_over_training(*, quick: bool, seed: int, folder: Path, tick: Tick) -> Reproduction:
    """``N_eff(eps)`` of a small network on three of the digits, at several checkpoints and scales."""
    from strati.tracking.track import track

    x, y = _few_components(3)  # a larger network has valleys too narrow to be sampled at most scales
    torch.manual_seed(derive(seed, "scales"))
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))

    def loss(network: nn.Module, step: int) -> Tensor:
        return nn.functional.cross_entropy(network(x), y)

    steps, count = (300, 3) if quick else (3000, 10)
    paths = trained(
        folder / f"3-4-3-steps-{steps}",
        model,
        loss,
        Training(steps, spaced(steps, count), rate=1e-2),
        tick=tick,
    )
    scales = (1e-4, 1e-2, 1.0) if quick else (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
    tracked = track(
        paths,
        data=x[:60],
        model=model,
        out=folder / f"followed-3-4-3-{steps}",
        what="scales",
        scales=scales,
        seed=seed,
        tick=tick,
    )
    table = {s.what: s for s in tracked.curves}
    rows = []
    total = sum(p.numel() for p in model.parameters())
    for place, path in enumerate(paths):
        values = [table[f"effective_parameters[{scale:g}]"].values[place] for scale in scales]
        sampled = [v for v in values if v is not None]
        numbers = ", ".join("-" if v is None else f"{v:.1f}" for v in values)
        note = f"of {total} parameters; {_with_scale(sampled, len(values))}"
        names = ", ".join(f"{scale:g}" for scale in scales)
        rows.append(Row(f"step {step_of(path)}: N_eff at eps {names}", "falls with eps", numbers, note))
    lines = [
        (f"{scale:g}", tracked.steps, table[f"effective_parameters[{scale:g}]"].values) for scale in scales
    ]
    picture = over_steps(
        folder,
        f"effective-parameters-{steps}",
        [{"title": "N_eff(eps)", "lines": lines}],
        title="effective parameters over training, by loss scale",
    )
    title = "Effective parameters over training: N_eff(eps)"
    see = "Effective parameters at each checkpoint, one line per loss scale; a line further down is a larger scale."
    return Reproduction(
        "effective-parameters-over-training",
        title,
        tuple(rows),
        picture,
        captions={"effective-parameters": see},
    )


def _with_scale(known: list[float], scales: int) -> str:
    """Whether the effective parameters fall with the scale, as far as they are known."""
    refused = f"refused at {scales - len(known)} of {scales} scales, where chains do not mix"
    if len(known) < 2:
        return refused
    course = "falls" if known[-1] < known[0] else "rises"
    return f"{course} with the scale" + (f"; {refused}" if len(known) < scales else "")


def _few_components(count: int) -> tuple[Tensor, Tensor]:
    """Three of the digits, as their first principal components scaled to variance 1."""
    digits = embedded_digits()
    below_three = digits.y < 3
    x = digits.x[below_three].float()
    x = x - x.mean(0)
    u, _, _ = torch.linalg.svd(x, full_matrices=False)
    return u[:, :count] * len(x) ** 0.5, digits.y[below_three].long()
