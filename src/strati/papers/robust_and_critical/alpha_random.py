"""``reproduce alpha-of-random-layers``: the alphas of untrained layers (robust-and-critical-layers, figure 2, left).

10,000 draws of a 512 x 512 layer as PyTorch initialises it; how many look "well trained" by their alpha. Draws are
streamed: each matrix is made, measured and dropped, and each has a random stream of its own, so the result
does not depend on the number of threads.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from strati.papers.registry import Reproduction, Row
from strati.rng import stream
from strati.spectra.spectrum import Spectrum, spectrum
from strati.types import Tick

_SIDE = 512
_BATCH = 250


def alphas(draws: int, seed: int, side: int = _SIDE) -> Iterator[Spectrum]:
    """Spectra of layers as PyTorch initialises ``Linear``: uniform within ``1/sqrt(side)``.

    Examples:
        >>> [round(s.tail.alpha, 2) > 1 for s in alphas(2, 0, side=64)]
        [True, True]
    """
    from threadpoolctl import threadpool_limits

    def one(number: int) -> Spectrum:
        rng = stream(seed, "alpha-of-random-layers", number)
        return spectrum((rng.random((side, side), dtype=np.float32) - 0.5) * np.float32(2 / np.sqrt(side)))

    with threadpool_limits(limits=1, user_api="blas"), ThreadPoolExecutor(os.cpu_count()) as pool:
        for start in range(0, draws, _BATCH):
            yield from pool.map(one, range(start, min(start + _BATCH, draws)))


def alpha_of_random_layers(*, quick: bool, seed: int, folder: Path, tick: Tick) -> Reproduction:
    """The distribution of alpha over untrained layers."""
    draws = 500 if quick else 10_000
    found, warned = np.empty(draws), 0
    for number, sp in enumerate(alphas(draws, seed)):
        found[number] = sp.tail.alpha if sp.tail is not None else np.nan
        warned += any(flag.code == "noise-like" for flag in sp.warnings)
        if (number + 1) % _BATCH == 0:
            tick(f"{number + 1} draws")
    inside = (found >= 2) & (found <= 6)
    share = float(inside.mean())
    low, middle, high = np.quantile(found, [0.05, 0.5, 0.95])
    error = float(np.sqrt(share * (1 - share) / draws))
    rows = (
        Row("draws of a 512 x 512 layer", 10_000, draws),
        Row("share with alpha in [2, 6]", "small but non-negligible", share, f"standard error {error:.4f}"),
        Row("median alpha", None, float(middle), f"5 % to 95 %: {low:.2f} to {high:.2f}"),
        Row("smallest alpha", None, float(found.min())),
        Row("largest alpha", None, float(found.max())),
        Row(
            "share that strati calls noise-like",
            None,
            warned / draws,
            "the warning that belongs beside such an alpha",
        ),
    )
    figures = _draw(found, folder)
    title = "Alpha of untrained 512 x 512 layers (robust-and-critical-layers, figure 2, left)"
    return Reproduction("alpha-of-random-layers", title, rows, figures)


def _draw(found: np.ndarray, folder: Path) -> tuple[str, ...]:
    try:
        from matplotlib.figure import Figure
    except ImportError:  # the numbers do not need the picture
        return ()
    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.add_subplot()
    axes.hist(found[np.isfinite(found)], bins=80, color="#0072B2")
    axes.axvspan(2, 6, color="#E69F00", alpha=0.2, label='"well trained"')
    axes.set_xlabel("alpha of an untrained 512 x 512 layer")
    axes.set_ylabel("draws")
    axes.legend()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "alpha-of-random-layers.svg"
    figure.savefig(path)
    return (str(path),)
