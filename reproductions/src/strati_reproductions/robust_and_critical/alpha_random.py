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
from typing import Any

import numpy as np

from strati.core.results import Tick
from strati.core.rng import stream
from strati.spectra.spectrum import Spectrum, spectrum
from strati_reproductions.pictures import COLOURS, OURS, drawn, panels, save
from strati_reproductions.registry import Reproduction, Row

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
    fitted, warned = np.empty(draws), 0
    for number, sp in enumerate(alphas(draws, seed)):
        fitted[number] = sp.tail.alpha if sp.tail is not None else np.nan
        warned += any(flag.code == "noise-like" for flag in sp.warnings)
        if (number + 1) % _BATCH == 0:
            tick(f"{number + 1} draws")
    inside = (fitted >= 2) & (fitted <= 6)
    share = float(inside.mean())
    low, middle, high = np.quantile(fitted, [0.05, 0.5, 0.95])
    error = float(np.sqrt(share * (1 - share) / draws))
    rows = (
        Row("draws of a 512 x 512 layer", 10_000, draws),
        Row(
            "share with alpha in [2, 6]",
            "small but non-negligible",
            share,
            error=error,
            seeds=draws,
            key="share-well-trained",
        ),
        Row("median alpha", None, float(middle), f"5 % to 95 %: {low:.2f} to {high:.2f}", seeds=draws),
        Row("smallest alpha", None, float(fitted.min()), seeds=draws),
        Row("largest alpha", None, float(fitted.max()), seeds=draws),
        Row(
            "share that strati calls noise-like",
            None,
            warned / draws,
            "the warning that such an alpha carries",
            error=float(np.sqrt(warned / draws * (1 - warned / draws) / draws)),
            seeds=draws,
        ),
    )
    title = "Alpha of untrained 512 x 512 layers (robust-and-critical-layers, figure 2, left)"
    captions = {
        "figure-2-left": "alphas of untrained layers; the band from 2 to 6 is what heavy-tailed self-regularisation "
        "calls well trained. A share of layers that never saw a datum lies in it."
    }
    figures = drawn(_draw, fitted, folder)
    return Reproduction("alpha-of-random-layers", title, rows, figures, captions=captions)


def _draw(found: np.ndarray[Any, Any], folder: Path) -> tuple[str, ...]:
    figure, (axis,) = panels(
        1, title="Figure 2, left: alpha of an untrained 512 x 512 layer", size=(6.0, 3.4)
    )
    axis.hist(found[np.isfinite(found)], bins=80, color=OURS, label="untrained layers")
    axis.axvspan(2, 6, color=COLOURS[4], alpha=0.25, label='"well trained"')
    axis.set(xlabel="alpha", ylabel="draws")
    axis.legend(frameon=False)
    return save(figure, folder, "figure-2-left")
