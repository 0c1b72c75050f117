"""Error rates of change points, as ``docs/track.md`` states them.

    python tools/calibrate_changes.py [--draws 40] [--seed 0] [--only smooth noise losses kinks]

Without a kink: how often a series raises an alarm at level 0.05, for smooth curves, correlated and unequal noise, and
loss curves of networks trained on digits. With a kink: how often it is found, how often the 95 % interval covers it,
how many further changes are reported, and the power that the best test of this kink against the nearest sigmoid or
monotone curve could have (Neyman and Pearson, with the noise known).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator

import numpy as np

from strati.core.rng import stream
from strati.tracking.change_points import _Basis, _models, _sigmoids, find_changes

Array = np.ndarray

SMOOTH: dict[str, Callable[[Array], Array]] = {
    "constant rate": lambda v: v,
    "square root": np.sqrt,
    "power law, offset": lambda v: (v + 0.02) ** -0.5,
    "1 / (t + c)": lambda v: 1 / (v + 0.05),
    "exponential": lambda v: np.exp(-v / 0.1),
    "slow exponential": lambda v: np.exp(-v / 0.4),
    "two exponentials": lambda v: 0.6 * np.exp(-v / 0.03) + 0.4 * np.exp(-v / 0.5),
    "stretched exponential": lambda v: np.exp(-np.sqrt(v / 0.1)),
    "logarithm": lambda v: np.log1p(50 * v),
    "logistic": lambda v: 1 / (1 + np.exp(-(v - 0.4) / 0.1)),
    "arctangent": lambda v: np.arctan(8 * (v - 0.3)),
    "cosine": lambda v: np.cos(np.pi * v),
}
NOISES = ("random walk", "AR(0.9)", "AR(0.5)", "grows tenfold", "falls tenfold", "heavy tails")


def steps_of(points: int, *, even: bool) -> Array:
    """Steps at equal distances, or at equal ratios after the first."""
    return np.arange(points) * 50.0 if even else np.append(0.0, np.geomspace(1, 10_000, points - 1))


def errors_of(rng: np.random.Generator, size: int, kind: str) -> Array:
    """Errors of one kind, about 1 in size."""
    normal = rng.normal(size=size)
    if kind == "random walk":
        return np.cumsum(normal)
    if kind == "heavy tails":
        return rng.standard_t(5, size) / math.sqrt(5 / 3)
    if kind.endswith("tenfold"):
        return normal * np.geomspace(1, 10, size)[:: 1 if kind.startswith("grows") else -1]
    memory = float(kind[3:-1])
    for i in range(1, size):
        normal[i] = memory * normal[i - 1] + math.sqrt(1 - memory**2) * normal[i]
    return normal


def loss_curves(steps: int = 400) -> Iterator[tuple[str, Array]]:
    """Losses on all data before every step of twenty networks on digits: five optimisers, two widths, two seeds."""
    import torch
    from sklearn.datasets import load_digits
    from torch import nn

    data = load_digits()
    x = torch.tensor(data.data[:600] / 16, dtype=torch.float32)
    y = torch.tensor(data.target[:600])
    settings = (("SGD", 0.05), ("SGD", 0.3), ("Adam", 1e-3), ("Adam", 5e-3), ("RMSprop", 1e-3))
    for (name, rate), width, seed in ((s, w, k) for s in settings for w in (16, 64) for k in (0, 1)):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
        optimiser = getattr(torch.optim, name)(model.parameters(), lr=rate)
        losses = []
        for _ in range(steps):
            with torch.no_grad():
                losses.append(float(nn.functional.cross_entropy(model(x), y)))
            rows = torch.randperm(len(x))[:64]
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimiser.step()
        yield f"{name} {rate} width {width} seed {seed}", np.array(losses)


def attainable_power(steps: Array, curve: Array, deviation: float) -> float:
    """Power at level 0.05 of the best test of this curve against the nearest smooth one, with known white noise."""
    models = _models(steps.tobytes())
    white = next(noise for noise in models.noises if noise.parameters == 0)
    basis = _Basis(white, models.ones, np.hstack([models.curves, _sigmoids(models.clocks)]), pairs=False)
    rest = float(basis.total(curve[:, None])[0] - basis.gains(curve[:, None]).max())
    distance = math.sqrt(max(0.0, rest)) / deviation
    return 0.5 * math.erfc((1.645 - distance) / math.sqrt(2))


def print_smooth(draws: int, seed: int) -> None:
    """Alarms on smooth curves with independent noise."""
    print(f"smooth curves, level 0.05: alarms in {draws} series, even steps")
    print(
        "curve                  20 points, 2 %  20 points, 5 %  60 points, 1 %  60 points, 2 %  200 points, 2 %"
    )
    cases = ((20, 0.02), (20, 0.05), (60, 0.01), (60, 0.02), (200, 0.02))
    for name, curve in SMOOTH.items():
        rates = []
        for points, noise in cases:
            steps = steps_of(points, even=True)
            y = curve(steps / steps[-1])
            noises = (stream(seed, name, points, f"{noise}", k).normal(size=points) for k in range(draws))
            rates.append(np.mean([bool(find_changes(steps, y + noise * np.ptp(y) * e)) for e in noises]))
        print(f"{name:21s}" + "".join(f"  {rate:14.1%}" for rate in rates), flush=True)


def print_noise(draws: int, seed: int) -> None:
    """Alarms with correlated and unequal noise, about a constant and about an exponential."""
    print(f"noise, level 0.05: alarms in {draws} series, even steps")
    print("noise          20 points  60 points  200 points  60 points, exponential")
    for kind in NOISES:
        rates = []
        for points, height in ((20, 0.0), (60, 0.0), (200, 0.0), (60, 10.0)):
            steps = steps_of(points, even=True)
            curve = height * np.exp(-steps / steps[-1] / 0.1)
            noises = (
                errors_of(stream(seed, kind, points, f"{height}", k), points, kind) for k in range(draws)
            )
            rates.append(np.mean([bool(find_changes(steps, curve + e)) for e in noises]))
        print(f"{kind:13s}" + "".join(f"  {rate:9.1%}" for rate in rates), flush=True)


def print_losses() -> None:
    """Alarms on loss curves of real trainings."""
    curves = dict(loss_curves())
    for points, even in ((20, True), (60, True), (200, True), (20, False), (60, False)):
        alarms = []
        for name, losses in curves.items():
            last = len(losses) - 1
            steps = np.linspace(0, last, points) if even else np.append(0, np.geomspace(1, last, points - 1))
            steps = np.unique(steps.round())
            alarms += [name] if find_changes(steps, losses[steps.astype(int)]) else []
        spacing = "even" if even else "logarithmic"
        print(
            f"losses of 20 networks, {points} {spacing} steps: {len(alarms)} alarms {alarms or ''}",
            flush=True,
        )


def print_kinks(draws: int, seed: int) -> None:
    """Kinks of slope change 1 per unit of ln(step), noise 0.1, in the middle of ln(step)."""
    print(f"kinks, slope change 1 per ln(step), noise 0.1: {draws} series a row")
    print("points  steps  slopes         found  attainable  interval covers  further changes")
    for points, even, before in (
        (20, True, 0.0), (20, False, 0.0), (20, False, -0.5), (40, False, 0.0), (60, True, 0.0), (60, False, 0.0),
    ):  # fmt: skip
        steps = steps_of(points, even=even)
        x = np.log(steps + steps[1])
        place = (x[0] + x[-1]) / 2
        curve = before * x + np.maximum(0, x - place)
        detected = covered = further = 0
        for k in range(draws):
            noise = stream(seed, "kink", points, str(even), f"{before}", k).normal(size=points)
            changes = find_changes(steps, curve + 0.1 * noise)
            detected += bool(changes)
            covered += any(c.low <= math.exp(place) - steps[1] <= c.high for c in changes)
            further += max(0, len(changes) - 1)
        print(
            f"{points:6d}  {'even' if even else 'log':5s}  {f'{before:g} to {before + 1:g}':12s}  "
            f"{detected / draws:6.1%}  {attainable_power(steps, curve, 0.1):10.1%}  "
            f"{covered / max(detected, 1):15.1%}  {further / draws:15.3f}",
            flush=True,
        )


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--draws", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=["smooth", "noise", "losses", "kinks"])
    options = parser.parse_args()
    if "smooth" in options.only:
        print_smooth(options.draws, options.seed)
    if "noise" in options.only:
        print_noise(options.draws, options.seed)
    if "losses" in options.only:
        print_losses()
    if "kinks" in options.only:
        print_kinks(options.draws, options.seed)


if __name__ == "__main__":
    main()
