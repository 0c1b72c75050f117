"""Error rates of change points on made series, as ``docs/track.md`` states them.

    python tools/calibrate_changes.py [--draws 400] [--seed 0]

Without a break: how often a run of several series raises an alarm at level 0.05 (all series together). With breaks: how
many are found, how many of the 95 % intervals hold the true step, and how often an extra one is reported.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import numpy as np

from strati.rng import stream
from strati.tracking.changes import find_changes

Array = np.ndarray


@dataclass(frozen=True)
class Quiet:
    """Alarms of runs without a break."""

    runs: int
    alarms: int


@dataclass(frozen=True)
class Broken:
    """What was found of known breaks."""

    breaks: int
    found: int
    covered: int
    extra: int


def noise_of(rng: np.random.Generator, size: int, memory: float, kind: str) -> Array:
    """Errors with standard deviation 1 and the given correlation of neighbours; a walk adds them up."""
    if kind == "walk":
        return np.cumsum(rng.normal(size=size))
    raw = rng.standard_t(5, size) / np.sqrt(5 / 3) if kind == "heavy" else rng.normal(size=size)
    for i in range(1, size):
        raw[i] = memory * raw[i - 1] + np.sqrt(1 - memory**2) * raw[i]
    return raw


def quiet(draws: int, *, points: int, series: int, memory: float, kind: str, seed: int, log: bool) -> Quiet:
    """Runs of several straight series each, looked at together; steps even, or even in their logarithm."""
    steps = np.append(0.0, np.geomspace(1, 10_000, points - 1).round()) if log else np.arange(points) * 50.0
    x = np.log(steps + steps[1])
    alarms = 0
    for draw in range(draws):
        rng = stream(seed, "quiet", points, series, f"{memory}", kind, draw)
        lines = (2 - 0.3 * x + 0.1 * noise_of(rng, points, memory, kind) for _ in range(series))
        alarms += any(bool(find_changes(steps, y, series=series)) for y in lines)
    return Quiet(draws, alarms)


def broken(draws: int, *, points: int, breaks: int, memory: float, size: float, seed: int) -> Broken:
    """Series with one or two breaks at known steps; ``size`` is the change of slope over the noise."""
    steps = np.arange(points) * 100.0
    x = np.log(steps + 100)
    found = covered = extra = 0
    for draw in range(draws):
        rng = stream(seed, "broken", points, breaks, f"{memory}", f"{size}", draw)
        cuts = np.linspace(np.log(500), x[-4], breaks + 1)
        places = np.array([rng.uniform(*cuts[k : k + 2]) for k in range(breaks)])
        if breaks > 1 and np.diff(places).min() < 0.4:
            places = (cuts[1:] + cuts[:-1]) / 2
        signs = np.array([-1.0, 1.0, -1.0])[:breaks]
        y = 1 + 0.2 * x + size * np.maximum(0, x[:, None] - places) @ signs
        y = y + noise_of(rng, points, memory, "normal")
        changes = list(find_changes(steps, y))
        for place in np.exp(places) - 100:
            if not changes:
                continue
            nearest = min(changes, key=lambda c: abs(np.log(c.step + 100) - np.log(place + 100)))
            changes.remove(nearest)
            found += 1
            covered += nearest.low <= place <= nearest.high
        extra += len(changes)
    return Broken(draws * breaks, found, covered, extra)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--draws", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(f"runs without a break, level 0.05 over all series, {options.draws} runs a row")
    print("points  series  correlation  errors   steps   alarms")
    for points, series, memory, kind, log in (
        (12, 1, 0.0, "normal", False), (30, 1, 0.0, "normal", False), (30, 1, 0.0, "normal", True),
        (30, 1, 0.5, "normal", False), (30, 1, 0.5, "normal", True), (30, 1, 0.8, "normal", False),
        (30, 1, 0.0, "heavy", False), (30, 20, 0.0, "normal", False), (30, 20, 0.5, "normal", True),
        (100, 1, 0.5, "normal", False), (30, 1, 1.0, "walk", False), (30, 1, 1.0, "walk", True),
    ):  # fmt: skip
        seen = quiet(
            options.draws, points=points, series=series, memory=memory, kind=kind, seed=options.seed, log=log
        )
        spaced = "log" if log else "even"
        print(
            f"{points:6d}  {series:6d}  {memory:11.1f}  {kind:7s}  {spaced:6s}  {seen.alarms / seen.runs:.1%}",
            flush=True,
        )
    print(f"series with known breaks, {options.draws} series a row")
    print("points  breaks  correlation  slope change / noise  found   interval holds it  extra per series")
    for points, breaks, memory, size in (
        (40, 1, 0.0, 40.0), (40, 1, 0.0, 8.0), (40, 1, 0.4, 40.0), (40, 1, 0.4, 8.0),
        (60, 2, 0.0, 40.0), (60, 2, 0.4, 40.0), (15, 1, 0.0, 40.0),
    ):  # fmt: skip
        hit = broken(options.draws, points=points, breaks=breaks, memory=memory, size=size, seed=options.seed)
        held = hit.covered / hit.found if hit.found else float("nan")
        print(
            f"{points:6d}  {breaks:6d}  {memory:11.1f}  {size:20.0f}  {hit.found / hit.breaks:6.1%}  {held:17.1%}  "
            f"{hit.extra / options.draws:.3f}"
        )


if __name__ == "__main__":
    main()
