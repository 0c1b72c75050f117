"""``reproduce small-and-large``: section 3.4 and figures 3, 4, 7, 8 of top-down-eigenspectra, with tests.

The paper lays a 12-layer GPT-2 beside a 36-layer one and finds the larger one's spectra more stable across layers and
its eigenvalues somewhat smaller. GPT-2 cannot be had here: stories15M (6 blocks) stands beside SmolLM2-135M (30), and a
user's own two through :func:`compare_sizes`.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from strati import zoo
from strati.network.open import open as open_network
from strati.papers.eigenspectra.figures import Shown, linear_and_log, spectra_grid
from strati.papers.pictures import drawn
from strati.papers.registry import Reproduction, Row
from strati.spectra.scan import scan
from strati.types import Tick, silent

if TYPE_CHECKING:
    from strati.spectra.scan import Scan
    from strati.spectra.spectrum import Spectrum
    from strati.types import FloatArray

KINDS = {"attention": "attention.", "MLP": "mlp."}
_SHOWN = 5


def small_and_large(*, quick: bool, seed: int, folder: Path, tick: Tick) -> Reproduction:
    """stories15M against SmolLM2: figures 3, 4, 7, 8, and the two statements of section 3.4 as tests."""
    return compare_sizes(zoo.path("stories15m"), zoo.path("smollm2"), names=("stories15M", "SmolLM2"),
                         folder=folder, tick=tick)  # fmt: skip


def compare_sizes(
    small: str | Path, large: str | Path, *, names: tuple[str, str], folder: Path, tick: Tick = silent
) -> Reproduction:
    """Is the larger network's spectrum more stable across layers, and are its eigenvalues smaller?

    Stability: between neighbouring blocks, the mean absolute difference of the quantiles of log-eigenvalues, each
    spectrum taken relative to its median. Size: of each layer the median eigenvalue of ``W^T W / N``. Both are compared
    by a two-sided Mann-Whitney test over layers, with Cliff's delta.

    Args:
        small: The smaller network, as ``strati.open`` takes it.
        large: The larger one.
        names: What to call them.
        folder: Where the figures go.
        tick: Called as the scans go on.
    """
    scans = [scan(open_network(path), jobs=2, tick=tick) for path in (small, large)]
    rows: list[Row] = []
    for kind, start in KINDS.items():
        steps = [_steps(found, start) for found in scans]
        rows.append(
            _test(f"{kind}: distance between neighbouring blocks' spectra", "smaller in the larger", steps)
        )
        sizes = [_sizes(found, start) for found in scans]
        rows.append(
            _test(f"{kind}: median eigenvalue of W^T W / N, log10", "somewhat smaller in the larger", sizes)
        )
    rows = [Row(f"{names[0]} / {names[1]}, {r.what}", r.paper, r.ours, r.note) for r in rows]
    figures = drawn(_draw, scans, names, folder)
    title = f"Small against large: {names[0]} and {names[1]} (section 3.4, figures 3, 4, 7, 8)"
    return Reproduction("small-and-large", title, tuple(rows), figures)


def _layers(found: Scan, start: str) -> list[tuple[str, int, Spectrum]]:
    """Role, block and spectrum of the layers of a kind, in order of blocks."""
    rows = [
        (str(row["role"]), int(row["block"]), found[str(row["name"])])
        for row in found.table.to_dict("records")
        if str(row["role"]).startswith(start) and row["block"] is not None and row["block"] == row["block"]
    ]
    return sorted(rows, key=lambda row: row[:2])


def _logs(sp: Spectrum) -> FloatArray:
    values = sp.eigenvalues[sp.eigenvalues > sp.eigenvalues.max() * 1e-12]
    return np.asarray(np.quantile(np.log10(values), np.linspace(0.02, 0.98, 49)))


def _steps(found: Scan, start: str) -> list[float]:
    steps = []
    for (role, _, a), (other, _, b) in pairwise(_layers(found, start)):
        if role == other:
            x, y = _logs(a), _logs(b)
            steps.append(float(np.abs((x - x[24]) - (y - y[24])).mean()))
    return steps


def _sizes(found: Scan, start: str) -> list[float]:
    return [float(_logs(sp)[24] - np.log10(sp.found.rows)) for _, _, sp in _layers(found, start)]


def _test(what: str, claim: str, values: list[list[float]]) -> Row:
    from scipy.stats import mannwhitneyu

    small, large = values
    result = mannwhitneyu(large, small)
    effect = 2 * float(result.statistic) / (len(small) * len(large)) - 1
    ours = f"{np.median(small):.3g} / {np.median(large):.3g}"
    side = "smaller" if effect < 0 else "larger"
    size = f"n = {len(small)} and {len(large)}"
    note = f"{side} in the larger network: Cliff's delta {effect:+.2f}, p = {result.pvalue:.2g}, {size}"
    return Row(what, claim, ours, note)


def _draw(scans: list[Scan], names: tuple[str, str], folder: Path) -> tuple[str, ...]:
    paths: list[str] = []
    for number, (kind, start) in zip((7, 8), KINDS.items(), strict=True):
        grid = [_some(found, name, start) for found, name in zip(scans, names, strict=True)]
        above = f"Figure {number}: {kind} layers of {names[0]} (top) and {names[1]} (bottom)"
        paths += spectra_grid(grid, folder, f"figure-{number}", above)
    both = [_some(scans[1], kind, start) for kind, start in KINDS.items()]
    paths += spectra_grid(
        both, folder, "figure-4", f"Figure 4: attention (top) and MLP layers (bottom) of {names[1]}"
    )
    above = f"Figure 3: MLP layers of {names[1]}, linear and logarithmic"
    paths += linear_and_log(_some(scans[1], names[1], KINDS["MLP"])[:3], folder, "figure-3", above)
    return tuple(paths)


def _some(found: Scan, name: str, start: str) -> list[Shown]:
    """A few layers of one role, spread over the depth."""
    role = "attention.q" if start == KINDS["attention"] else "mlp.in"
    layers = [row for row in _layers(found, start) if row[0] == role] or _layers(found, start)
    places = np.unique(np.linspace(0, len(layers) - 1, min(_SHOWN, len(layers))).round().astype(int))
    shown = []
    for place in places:
        _, block, sp = layers[place]
        metrics = sp.metrics()
        edges = (metrics["mp_lambda_minus"], metrics["mp_lambda_plus"])
        bulk = None if None in edges else (float(edges[0]), float(edges[1]))
        shown.append(Shown(f"{name}, block {block}", sp.eigenvalues, bulk, metrics["xmin"]))
    return shown
