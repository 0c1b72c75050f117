"""``reproduce small-and-large``: section 3.4 and figures 3, 4, 7, 8 of top-down-eigenspectra, with tests.

The paper lays a 12-layer GPT-2 beside a 36-layer one and finds the larger one's spectra more stable across layers and
its eigenvalues somewhat smaller. GPT-2 cannot be had here: stories15M (6 blocks) stands beside SmolLM2-135M (30), and a
user's own two through :func:`compare_sizes` (``strati reproduce small-and-large --model A --model B``).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from strati import zoo
from strati.errors import BadInputError
from strati.network.open import open as open_network
from strati.papers.eigenspectra.figures import Shown, as_shown, linear_and_log, spectra_grid
from strati.papers.pictures import drawn
from strati.papers.registry import Reproduction, Row, sources
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
    pair = zoo.path("stories15m"), zoo.path("smollm2")
    return compare_sizes(*pair, names=("stories15M", "SmolLM2"), folder=folder, tick=tick)


def compare_sizes(
    small: str | Path,
    large: str | Path,
    *,
    names: tuple[str, str] | None = None,
    folder: Path,
    tick: Tick = silent,
) -> Reproduction:
    """Is the larger network's spectrum more stable across layers, and are its eigenvalues smaller?

    Stability: between neighbouring blocks, the mean absolute difference of the quantiles of log-eigenvalues, each
    spectrum taken relative to its median. Size: of each layer the median eigenvalue of ``W^T W / N`` (the scale of the
    paper's eq. 5) and of ``W^T W``. All are compared by a two-sided Mann-Whitney test over layers, with Cliff's delta.

    Args:
        small: One network, as ``strati.open`` takes it.
        large: The other; the one with more parameters counts as the larger, in whatever order they are given.
        names: What to call them; default: their file names.
        folder: Where the figures go.
        tick: Called as the scans go on.

    Raises:
        BadInputError: A network has no attention or MLP layers in two blocks or more.
    """
    called = names or _names(Path(str(small)), Path(str(large)))
    scans = [scan(open_network(path), jobs=2, tick=tick) for path in (small, large)]
    by_size = sorted(zip(scans, called, (small, large), strict=True), key=lambda one: one[0].parameters)
    scans, labels = [one[0] for one in by_size], (by_size[0][1], by_size[1][1])
    rows: list[Row] = []
    for kind, start in KINDS.items():
        steps = [_steps(found, start) for found in scans]
        for values, (_, _, path) in zip(steps, by_size, strict=True):
            if not values:
                raise BadInputError(path, f"has no {kind} layers in two blocks or more: nothing to compare")
        rows.append(
            _test(f"{kind}: distance between neighbouring blocks' spectra", "smaller in the larger", steps)
        )
        for what, scaled in (("W^T W / N", True), ("W^T W", False)):
            sizes = [_sizes(found, start, scaled) for found in scans]
            rows.append(
                _test(f"{kind}: median eigenvalue of {what}, log10", "somewhat smaller in the larger", sizes)
            )
    rounded = [label for found, label in zip(scans, labels, strict=True) if _quantised(found)]
    caution = (
        f"; the weights of {' and '.join(rounded)} are quantised: rounding fills the lower end"
        if rounded
        else ""
    )
    rows = [
        replace(row, what=f"{labels[0]} / {labels[1]}, {row.what}", note=row.note + caution) for row in rows
    ]
    figures = drawn(_draw, scans, labels, folder)
    title = f"Small against large: {labels[0]} and {labels[1]} (section 3.4, figures 3, 4, 7, 8)"
    return Reproduction("small-and-large", title, tuple(rows), figures, captions=CAPTIONS)


def own_sizes(
    first: str | Path, second: str | Path, *, seed: int = 0, folder: Path = Path("out"), tick: Tick = silent
) -> Reproduction:
    """The same of two networks of the user's, whichever is the larger."""
    code = sources("small-and-large")
    made = compare_sizes(first, second, folder=folder / "own", tick=tick)
    return replace(made, mode="full", seed=seed, sources=code)


def _names(a: Path, b: Path) -> tuple[str, str]:
    return (
        (a.name, b.name) if a.name != b.name else (f"{a.parent.name}/{a.name}", f"{b.parent.name}/{b.name}")
    )


CAPTIONS = {
    "figure-3": "eigenvalues of MLP layers on a linear (top) and a logarithmic axis (bottom). On the linear axis only "
    "the heavy tail shows; the few eigenvalues far below the bulk, the quasi-null ones, show on the logarithmic one.",
    "figure-4": "attention (top) against MLP layers (bottom) of the larger network. The paper finds the bulk of MLP "
    "layers tighter: compare the widths.",
    "figure-7": "attention layers of the smaller network (top) and of the larger (bottom): is the bottom row more "
    "alike from block to block, and further left?",
    "figure-8": "MLP layers of the smaller network (top) and of the larger (bottom): the same question.",
}


def _quantised(found: Scan) -> bool:
    return any("quantised" in str(codes).split() for codes in found.table["warnings"])


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


def _sizes(found: Scan, start: str, scaled: bool) -> list[float]:
    scale = [np.log10(sp.found.rows) if scaled else 0.0 for _, _, sp in _layers(found, start)]
    return [float(_logs(sp)[24] - by) for (_, _, sp), by in zip(_layers(found, start), scale, strict=True)]


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
        shown.append(as_shown(f"{name}, block {block}", sp.eigenvalues, sp.metrics()))
    return shown
