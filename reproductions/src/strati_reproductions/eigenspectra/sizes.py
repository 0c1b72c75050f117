"""``reproduce small-and-large``: section 3.4 and figures 3, 4, 7, 8 of top-down-eigenspectra, with tests.

The paper compares a 12-layer GPT-2 with a 36-layer one and finds the larger one's spectra more stable across layers and
its eigenvalues somewhat smaller. Of the smaller one the attention output projections are available, of the larger one
nothing: the statements are tested on stories15M (6 blocks) and SmolLM2-135M (30), or on two networks of the user
(:func:`compare_sizes`, ``strati reproduce small-and-large --model A --model B``).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from strati.core.errors import BadInputError
from strati.core.results import Flag, Tick, silent
from strati.io.network import open as open_network
from strati.spectra.scan import scan
from strati_reproductions import zoo
from strati_reproductions.eigenspectra.figures import Shown, as_shown, linear_and_log, spectra_grid
from strati_reproductions.eigenspectra.survey import GPT2, GPT2_ROLE, GPT2_SCOPE, gpt2_file
from strati_reproductions.pictures import drawn
from strati_reproductions.registry import ENTRIES, Reproduction, Row

if TYPE_CHECKING:
    from strati.core.results import FloatArray
    from strati.spectra.scan import Scan
    from strati.spectra.spectrum import Spectrum

KINDS = {"attention": "attention.", "MLP": "mlp."}
_SHOWN = 5


def small_and_large(*, quick: bool, seed: int, folder: Path, tick: Tick) -> Reproduction:
    """stories15M against SmolLM2: figures 3, 4, 7, 8, and the two statements of section 3.4 as tests."""
    pair = zoo.path("stories15m"), zoo.path("smollm2")
    compared = compare_sizes(*pair, names=("stories15M", "SmolLM2"), folder=folder, tick=tick)
    gpt2 = gpt2_file()
    if isinstance(gpt2, Flag):
        return replace(compared, warnings=(*compared.warnings, gpt2))
    scanned = scan(open_network(gpt2), jobs=2, tick=tick)
    other = scan(open_network(pair[1]), layers=[f"role:{GPT2_ROLE}"], jobs=2, tick=tick)
    rows = _gpt2_rows(scanned, other)
    figures = drawn(_draw_gpt2, scanned, other, folder)
    return replace(compared, rows=(*rows, *compared.rows), figures=(*figures, *compared.figures))


def _gpt2_rows(gpt2: Scan, other: Scan) -> list[Row]:
    """The two quantities of section 3.4 on the one kind of matrix of GPT-2 that is available."""
    rows = []
    for what, values in (
        ("distance between neighbouring blocks' spectra", [_steps(s, GPT2_ROLE) for s in (gpt2, other)]),
        ("median eigenvalue of W^T W / N, log10", [_sizes(s, GPT2_ROLE, True) for s in (gpt2, other)]),
    ):
        of_gpt2, of_other = (float(np.median(v)) for v in values)
        note = f"{GPT2_SCOPE}, and neither is GPT-2 Large; ours is of SmolLM2's attention output projections"
        rows.append(Row(f"attention.out: {what}, median", None, of_other, note, paper_network=of_gpt2))
    return rows


def _draw_gpt2(gpt2: Scan, other: Scan, folder: Path) -> tuple[str, ...]:
    blocks = _layers(gpt2, GPT2_ROLE)
    grid = [
        [
            as_shown(f"{GPT2}, block {block}", sp.eigenvalues, sp.metrics())
            for _, block, sp in blocks[half : half + 6]
        ]
        for half in (0, 6)
    ]
    above = "Attention output projections of GPT-2, all 12 blocks (figures 4, 5 and 7: their upper rows)"
    paths = [*spectra_grid(grid, folder, "figure-7-gpt2", above)]
    above = "Attention output projections of GPT-2 and SmolLM2 (figure 7)"
    pair = [_spread(_layers(s, GPT2_ROLE), name) for s, name in ((gpt2, GPT2), (other, "SmolLM2"))]
    paths += spectra_grid(pair, folder, "figure-7-gpt2-and-smollm2", above)
    three = _spread(blocks, GPT2)[:3]
    above = "Attention output projections of GPT-2, linear and logarithmic (figure 3 shows MLP layers)"
    paths += linear_and_log(three, folder, "figure-3-gpt2", above)
    return tuple(paths)


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
        large: The other; the one with more parameters counts as the larger, in any order.
        names: What to call them; default: their file names.
        folder: Where the figures go.
        tick: Called after each scanned layer.

    Raises:
        BadInputError: A network has no attention or MLP layers in two blocks or more.
    """
    called = names or _names(Path(str(small)), Path(str(large)))
    scans = [scan(open_network(path), jobs=2, tick=tick) for path in (small, large)]
    by_size = sorted(zip(scans, called, (small, large), strict=True), key=lambda entry: entry[0].parameters)
    scans, labels = [entry[0] for entry in by_size], (by_size[0][1], by_size[1][1])
    rows: list[Row] = []
    for kind, start in KINDS.items():
        steps = [_steps(scanned, start) for scanned in scans]
        for values, (_, _, path) in zip(steps, by_size, strict=True):
            if not values:
                raise BadInputError(path, f"has no {kind} layers in two blocks or more: nothing to compare")
        rows.append(
            _test(
                "neighbour-distance",
                f"{kind}: distance between neighbouring blocks' spectra",
                "smaller in the larger",
                steps,
            )
        )
        for what, scaled in (("W^T W / N", True), ("W^T W", False)):
            sizes = [_sizes(scanned, start, scaled) for scanned in scans]
            rows.append(
                _test(
                    "median-eigenvalue",
                    f"{kind}: median eigenvalue of {what}, log10",
                    "somewhat smaller in the larger",
                    sizes,
                )
            )
    rounded = [label for scanned, label in zip(scans, labels, strict=True) if _quantised(scanned)]
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
    made = compare_sizes(first, second, folder=folder / "own", tick=tick)
    return replace(made, mode="full", seed=seed, revision=ENTRIES["small-and-large"].revision)


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
    "figure-7-gpt2": "GPT-2's own attention output projections. The paper's figures 4, 5 and 7 show attention layers "
    "of this network in their upper rows; it does not say which of the matrices.",
    "figure-7-gpt2-and-smollm2": "attention output projections of GPT-2 (12 blocks, top) and SmolLM2 (30, bottom): not "
    "the paper's pair, whose larger network is missing.",
    "figure-3-gpt2": "attention output projections of GPT-2 on a linear and a logarithmic axis: the few eigenvalues "
    "far left of the bulk are the quasi-null ones. The paper's figure 3 shows MLP layers, which are not available.",
    "figure-8": "MLP layers of the smaller network (top) and of the larger (bottom): the same question.",
}


def _quantised(scanned: Scan) -> bool:
    return any("quantised" in str(codes).split() for codes in scanned.frame()["warnings"])


def _layers(scanned: Scan, start: str) -> list[tuple[str, int, Spectrum]]:
    """Role, block and spectrum of the layers of a kind, in order of blocks."""
    rows = [
        (str(row["role"]), int(row["block"]), scanned[str(row["name"])])
        for row in scanned.frame().to_dict("records")
        if str(row["role"]).startswith(start) and row["block"] is not None and row["block"] == row["block"]
    ]
    return sorted(rows, key=lambda row: row[:2])


def _logs(sp: Spectrum) -> FloatArray:
    values = sp.eigenvalues[sp.eigenvalues > sp.eigenvalues.max() * 1e-12]
    return np.asarray(np.quantile(np.log10(values), np.linspace(0.02, 0.98, 49)))


def _steps(scanned: Scan, start: str) -> list[float]:
    steps = []
    for (role, _, a), (other, _, b) in pairwise(_layers(scanned, start)):
        if role == other:
            x, y = _logs(a), _logs(b)
            steps.append(float(np.abs((x - x[24]) - (y - y[24])).mean()))
    return steps


def _sizes(scanned: Scan, start: str, scaled: bool) -> list[float]:
    return [
        float(_logs(sp)[24] - (np.log10(sp.pooled.rows) if scaled else 0.0))
        for _, _, sp in _layers(scanned, start)
    ]


def _test(key: str, what: str, claim: str, values: list[list[float]]) -> Row:
    from scipy.stats import mannwhitneyu

    small, large = values
    test = mannwhitneyu(large, small)
    effect = 2 * float(test.statistic) / (len(small) * len(large)) - 1
    ours = f"{np.median(small):.3g} / {np.median(large):.3g}"
    side = "smaller" if effect < 0 else "larger"
    size = f"n = {len(small)} and {len(large)}"
    note = f"{side} in the larger network: Cliff's delta {effect:+.2f}, p = {test.pvalue:.2g}, {size}"
    facts = {"effect": effect, "pvalue": float(test.pvalue)}
    return Row(what, claim, ours, note, key=key, facts=facts)


def _draw(scans: list[Scan], names: tuple[str, str], folder: Path) -> tuple[str, ...]:
    paths: list[str] = []
    for number, (kind, start) in zip((7, 8), KINDS.items(), strict=True):
        grid = [_some(scanned, name, start) for scanned, name in zip(scans, names, strict=True)]
        above = f"Figure {number}: {kind} layers of {names[0]} (top) and {names[1]} (bottom)"
        paths += spectra_grid(grid, folder, f"figure-{number}", above)
    both = [_some(scans[1], kind, start) for kind, start in KINDS.items()]
    paths += spectra_grid(
        both, folder, "figure-4", f"Figure 4: attention (top) and MLP layers (bottom) of {names[1]}"
    )
    above = f"Figure 3: MLP layers of {names[1]}, linear and logarithmic"
    paths += linear_and_log(_some(scans[1], names[1], KINDS["MLP"])[:3], folder, "figure-3", above)
    return tuple(paths)


def _some(scanned: Scan, name: str, start: str) -> list[Shown]:
    """A few layers of one role, spread over the depth."""
    role = "attention.q" if start == KINDS["attention"] else "mlp.in"
    return _spread(
        [row for row in _layers(scanned, start) if row[0] == role] or _layers(scanned, start), name
    )


def _spread(layers: list[tuple[str, int, Spectrum]], name: str) -> list[Shown]:
    places = np.unique(np.linspace(0, len(layers) - 1, min(_SHOWN, len(layers))).round().astype(int))
    return [
        as_shown(f"{name}, block {block}", sp.eigenvalues, sp.metrics())
        for _, block, sp in (layers[place] for place in places)
    ]
