"""``reproduce phases``: how often the phase of a matrix is right whose phase is known.

Generative models of the six phases as the literature on heavy-tailed self-regularisation describes them, drawn
over shapes from 100 x 100 to 3000 x 1000 with Gaussian and uniform noise; each draw is labelled by
:func:`strati.spectrum` and counted in a confusion matrix. A draw near the border between two phases that gets the
neighbour's name counts as half right.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from strati.core.results import Tick, silent
from strati.core.rng import stream
from strati.spectra.spectrum import spectrum
from strati.spectra.verdicts import Phase
from strati_reproductions.eigenspectra.figures import confusion_map
from strati_reproductions.pictures import drawn
from strati_reproductions.registry import Reproduction, Row

if TYPE_CHECKING:
    from strati.core.results import FloatArray

SHAPES = (
    (100, 100),
    (200, 100),
    (400, 100),
    (300, 300),
    (600, 300),
    (512, 512),
    (1000, 300),
    (1000, 1000),
    (3000, 1000),
)
_NEIGHBOURS = tuple(zip(list(Phase)[:4], list(Phase)[1:5], strict=True))


def draw(phase: Phase, shape: tuple[int, int], rng: np.random.Generator) -> FloatArray:
    """A matrix made to be in a phase.

    Args:
        phase: The phase.
        shape: Rows and columns.
        rng: The random stream.

    Examples:
        >>> draw(Phase.HEAVY_TAILED, (100, 100), np.random.default_rng(0)).shape
        (100, 100)
    """
    return _MAKERS[phase](shape, rng)


def confusion(draws: int, seed: int, tick: Tick = silent) -> dict[tuple[Phase, Phase], int]:
    """Count (true, named) pairs over ``draws`` matrices of each phase and shape.

    Examples:
        >>> counts = confusion(0, 0)
        >>> sum(counts.values())
        0
    """
    counts = {(true, named): 0 for true in Phase for named in Phase}
    for shape in SHAPES:
        # The large shapes cost most and vary least.
        for phase in Phase:
            for number in range(draws if shape[1] < 1000 else -(-draws // 4)):
                W = draw(phase, shape, stream(seed, "phases", str(phase), *shape, number))
                named = spectrum(W.astype(np.float32)).phase
                counts[phase, named if named is not None else Phase.RANDOM_LIKE] += 1
            tick(f"{phase} {shape[0]}x{shape[1]}")
    return counts


def score(counts: dict[tuple[Phase, Phase], int]) -> float:
    """The share of right phases; a neighbouring phase counts half."""
    total = sum(counts.values())
    near = sum(counts[a, b] + counts[b, a] for a, b in _NEIGHBOURS)
    return (sum(counts[p, p] for p in Phase) + near / 2) / total if total else float("nan")


def phases(*, quick: bool, seed: int, folder: Path, tick: Tick) -> Reproduction:
    """The confusion matrix on draws that no threshold was chosen on (their seeds differ)."""
    counts = confusion(4 if quick else 40, seed + 20_000, tick)
    rows = []
    for true in Phase:
        total = sum(counts[true, named] for named in Phase)
        named = ", ".join(f"{counts[true, n]} {n}" for n in Phase if counts[true, n] and n != true)
        rows.append(_share(str(true), counts[true, true] / total, total, f"otherwise {named or 'nothing'}"))
    every = sum(counts.values())
    rows.append(
        _share("all six; a neighbouring phase counts half", score(counts), every, "goal: 0.95 or more")
    )
    figures = drawn(confusion_map, counts, list(Phase), folder)
    title = "How often the phase is right, on matrices whose phase is known"
    captions = {
        "phases": "rows are the phase that a matrix was built to have, columns the phase that strati gives. Right "
        "answers lie on the diagonal."
    }
    return Reproduction("phases", title, tuple(rows), figures, captions=captions)


def _share(what: str, share: float, draws: int, note: str) -> Row:
    error = (share * (1 - share) / draws) ** 0.5 if draws else None
    return Row(what, None, share, note, error=error, seeds=draws)


def _noise(shape: tuple[int, int], rng: np.random.Generator) -> FloatArray:
    scale = 10 ** rng.uniform(-2, 1)
    if rng.random() < 0.5:
        return rng.normal(scale=scale, size=shape)
    return rng.uniform(-scale, scale, size=shape)


def _spiked(shape: tuple[int, int], rng: np.random.Generator, reach: FloatArray) -> FloatArray:
    """Noise plus a signal whose eigenvalues come out near ``reach`` times the bulk's edge.

    A signal of singular value ``t sigma (N M)^(1/4)``, ``t > 1``, gives the eigenvalue
    ``sigma^2 (t^2 sqrt(N) + sqrt(M)) (t^2 sqrt(M) + sqrt(N)) / t^2`` (Benaych-Georges and Nadakuditi 2012);
    solved for ``t``.
    """
    n, m = shape
    W = _noise(shape, rng)
    root_n, root_m = np.sqrt(n), np.sqrt(m)
    # (t^2 root_n + root_m)(t^2 root_m + root_n) = reach (root_n + root_m)^2 t^2, a quadratic in t^2.
    a, b = root_n * root_m, n + m - reach * (root_n + root_m) ** 2
    square = (-b + np.sqrt(b**2 - 4 * a**2)) / (2 * a)
    strength = np.sqrt(square * root_n * root_m) * W.std()
    left, _ = np.linalg.qr(rng.normal(size=(n, reach.size)))
    right, _ = np.linalg.qr(rng.normal(size=(m, reach.size)))
    spiked: FloatArray = W + (left * strength) @ right.T
    return spiked


def _bleeding(shape: tuple[int, int], rng: np.random.Generator) -> FloatArray:
    n, m = shape
    width = float((np.sqrt(n) + np.sqrt(m)) * (1 / np.sqrt(n) + 1 / np.sqrt(m)) ** (1 / 3))
    edge = (np.sqrt(n) + np.sqrt(m)) ** 2
    # From what stands out of the edge's own fluctuation up to a third beyond it.
    low = 1 + 5 * width / edge
    return _spiked(shape, rng, rng.uniform(low, max(1.3, low + 0.02), size=rng.integers(1, 4)))


def _pareto(shape: tuple[int, int], rng: np.random.Generator, mu: float) -> FloatArray:
    size = (1 - rng.random(shape)) ** (-1 / mu)
    return np.where(rng.random(shape) < 0.5, size, -size)


def _heavy(shape: tuple[int, int], rng: np.random.Generator) -> FloatArray:
    return _pareto(shape, rng, rng.uniform(2, 4) if rng.random() < 0.5 else rng.uniform(0.8, 2))


def _collapsed(shape: tuple[int, int], rng: np.random.Generator) -> FloatArray:
    n, m = shape
    rank = max(int(m * rng.uniform(0.05, 0.9)), 1)
    W: FloatArray = rng.normal(size=(n, rank)) @ rng.normal(size=(rank, m)) / np.sqrt(rank)
    kind = rng.integers(3)
    if kind == 0:
        return W
    W += rng.normal(scale=1e-6 if kind == 1 else 1e-4, size=shape)
    return W


_MAKERS: dict[Phase, Callable[[tuple[int, int], np.random.Generator], FloatArray]] = {
    Phase.RANDOM_LIKE: _noise,
    Phase.BLEEDING_OUT: _bleeding,
    Phase.BULK_SPIKES: lambda s, r: _spiked(s, r, 10 ** r.uniform(np.log10(1.7), 2, size=r.integers(1, 9))),
    Phase.BULK_DECAY: lambda s, r: _pareto(s, r, r.uniform(4, 4.5)),
    Phase.HEAVY_TAILED: _heavy,
    Phase.RANK_COLLAPSE: _collapsed,
}
