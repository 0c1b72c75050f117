"""Pictures of spectra and of comparisons: densities with bulk and tail, metrics over depth, phases over training."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.core.display import printable
from strati.core.errors import BadInputError
from strati.report.plots import new_figure
from strati.spectra import marchenko_pastur as law
from strati.spectra.tails import exponents

if TYPE_CHECKING:
    from strati.comparison.layer_statistics import CheckpointSeries
    from strati.comparison.results import Comparison
    from strati.core.results import FloatArray
    from strati.spectra.scan import Scan
    from strati.spectra.spectrum import Spectrum

ROLE_COLOURS = {
    "attention.q": "#0072B2",
    "attention.k": "#56B4E9",
    "attention.v": "#009E73",
    "attention.qkv": "#0072B2",
    "attention.out": "#332288",
    "mlp.in": "#E69F00",
    "mlp.gate": "#F0E442",
    "mlp.out": "#D55E00",
    "embedding": "#CC79A7",
    "head": "#882255",
    "conv": "#999999",
    "linear": "#000000",
}
"""Okabe-Ito and similar colours, which colour-blind readers can distinguish; one colour per role everywhere."""

PHASES = ("random-like", "bleeding-out", "bulk+spikes", "bulk-decay", "heavy-tailed", "rank-collapse")
_BULK, _TAIL, _SPIKE, _DATA = "#D55E00", "#0072B2", "#CC79A7", "#BBBBBB"


def plot_spectrum(sp: Spectrum, *, title: str | None = None) -> Any:
    """Draw one spectrum: density on linear and logarithmic axes, and the scree plot.

    Args:
        sp: The spectrum.
        title: What to write above it.

    Returns:
        A matplotlib figure; ``figure.savefig("esd.pdf")`` writes vectors.

    Raises:
        BadInputError: There are no eigenvalues to draw.
    """
    values = sp.eigenvalues[sp.eigenvalues > 0]
    if values.size == 0:
        raise BadInputError("spectrum", "has no positive eigenvalues; there is nothing to draw")
    figure = new_figure(11, 3.4)
    linear, logarithmic, scree = figure.subplots(1, 3)
    _density(linear, sp, values, logarithmic=False)
    _density(logarithmic, sp, values, logarithmic=True)
    _scree(scree, sp, values)
    figure.suptitle(
        printable(title or f"{sp.pooled.rows} x {sp.pooled.columns}, {sp.phase or 'phase undecided'}")
    )
    return figure


def plot_alpha(sp: Spectrum, *, title: str | None = None) -> Any:
    """Draw the exponent alpha, with its error at a fixed start, over every start of the tail that the data allow.

    The chosen start is marked with ``alpha_stderr``, which includes the choice of the start. An exponent that keeps
    rising to the right is that of a spectrum without a power-law tail.

    Args:
        sp: The spectrum.
        title: What to write above it.

    Raises:
        BadInputError: No tail was fitted.
    """
    if sp.tail is None:
        raise BadInputError("spectrum", "has no fitted tail; there is no alpha to draw")
    starts, alphas, errors = alpha_over_xmin(sp.eigenvalues)
    figure = new_figure(5.5, 3.6)
    axes = figure.subplots()
    axes.fill_between(
        starts, alphas - errors, alphas + errors, color=_TAIL, alpha=0.2, lw=0, label="error, start fixed"
    )
    axes.plot(starts, alphas, color=_TAIL, lw=1.2)
    axes.errorbar(
        [sp.tail.xmin],
        [sp.tail.alpha],
        yerr=[sp.tail.stderr],
        fmt="o",
        color=_BULK,
        ms=4,
        label="chosen start",
    )
    axes.set_xscale("log")
    axes.set_ylim(1, max(min(float(alphas.max()), 3 * sp.tail.alpha), sp.tail.alpha + sp.tail.stderr) * 1.05)
    axes.set(xlabel="xmin", ylabel="alpha")
    axes.legend(fontsize="small")
    axes.set_title(printable(title or f"{sp.pooled.rows} x {sp.pooled.columns}"))
    return figure


def alpha_over_xmin(eigenvalues: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Every start of a tail of eight eigenvalues or more, the exponent there, and ``(alpha - 1)/sqrt(n)``.

    Examples:
        >>> starts, alphas, errors = alpha_over_xmin(np.arange(1.0, 21.0))
        >>> starts.size, float(starts[0])
        (13, 1.0)
    """
    values = eigenvalues[eigenvalues > 0]
    count = max(values.size - 7, 0)
    alphas = exponents(np.log(values))[:count]
    sizes = values.size - np.arange(count)
    return values[:count], alphas, (alphas - 1) / np.sqrt(sizes)


def plot_scan(scan: Scan) -> Any:
    """Draw alpha, stable rank and phase of every layer over depth, coloured by role."""
    table = scan.table
    if table.empty:
        raise BadInputError(scan.path, "has no weight matrices; there is nothing to draw")
    figure = new_figure(9, 7.5)
    axes = figure.subplots(3, 1, sharex=True)
    places = np.arange(len(table))
    colours = [ROLE_COLOURS.get(role, "#000000") for role in table["role"]]
    noise = table["warnings"].str.contains("noise-like").to_numpy()
    alpha, error = (table[name].to_numpy(dtype=float) for name in ("alpha", "alpha_stderr"))
    axes[0].errorbar(places, alpha, yerr=error, fmt="none", ecolor="#BBBBBB", lw=0.8)
    axes[0].scatter(places, alpha, c=colours, s=18, zorder=3)
    axes[0].scatter(
        places[noise], alpha[noise], facecolors="none", edgecolors="#999999", s=60, label="noise-like"
    )
    axes[0].axhspan(2, 6, color="#009E73", alpha=0.08, label='2 to 6: "well trained", a claim')
    axes[0].set_ylabel("alpha")
    axes[0].legend(fontsize="small")
    axes[1].scatter(places, table["stable_rank"].to_numpy(dtype=float), c=colours, s=18)
    axes[1].set(ylabel="stable rank", yscale="log")
    measured = [
        (x, PHASES.index(p), c)
        for x, p, c in zip(places, table["phase"], colours, strict=True)
        if p in PHASES
    ]
    if measured:
        axes[2].scatter(*zip(*[k[:2] for k in measured], strict=True), c=[k[2] for k in measured], s=18)
    axes[2].set_yticks(range(len(PHASES)), PHASES)
    axes[2].set_ylim(-0.5, len(PHASES) - 0.5)
    axes[2].xaxis.get_major_locator().set_params(integer=True)
    axes[2].set_xlabel("layer, in network order")
    handles = _role_handles(set(table["role"]))
    figure.legend(handles=handles, loc="outside lower center", ncols=6, fontsize="small")
    figure.suptitle(printable(Path(scan.path).name))
    return figure


def _density(axes: Any, sp: Spectrum, values: FloatArray, *, logarithmic: bool) -> None:
    if logarithmic:
        low = float(np.quantile(values, 0.005)) / 2
        edges = np.geomspace(max(low, values[-1] * 1e-12), values[-1] * 1.05, 60)
    else:
        edges = np.linspace(0, values[-1] * 1.02, 80)
    axes.hist(values, bins=edges, density=True, color=_DATA)
    if sp.bulk is not None:
        share = sp.bulk.size / sp.eigenvalues.size
        x = np.linspace(sp.bulk.lambda_minus, sp.bulk.lambda_plus, 600)[1:]
        density = law.pdf(x / sp.pooled.rows, sp.pooled.aspect, sp.bulk.sigma) / sp.pooled.rows
        axes.plot(x, share * density, color=_BULK, lw=1.2, label="Marchenko-Pastur")
        axes.axvline(sp.bulk.edge, color=_BULK, lw=0.8, ls="--", label="Tracy-Widom edge")
        spikes = values[values > sp.bulk.edge]
        if spikes.size:
            marks = axes.get_xaxis_transform()
            axes.plot(
                spikes, np.full(spikes.size, 0.02), "v", color=_SPIKE, ms=4, transform=marks, label="spikes"
            )
    if sp.tail is not None:
        x = np.geomspace(sp.tail.xmin, values[-1], 200)
        share = sp.tail.size / sp.eigenvalues.size
        density = share * (sp.tail.alpha - 1) / sp.tail.xmin * (x / sp.tail.xmin) ** -sp.tail.alpha
        axes.plot(x, density, color=_TAIL, lw=1.2, label=f"alpha = {sp.tail.alpha:.2f}")
        axes.axvline(sp.tail.xmin, color=_TAIL, lw=0.8, ls=":")
    axes.set(xlabel="eigenvalue", ylabel="density")
    if logarithmic:
        axes.set(xscale="log", yscale="log")
    elif sp.bulk is not None or sp.tail is not None:
        axes.legend(fontsize="x-small")


def _scree(axes: Any, sp: Spectrum, values: FloatArray) -> None:
    places = np.arange(1, values.size + 1)
    axes.plot(places, values[::-1], ".", ms=3, color="#444444")
    if sp.bulk is not None:
        axes.axhline(sp.bulk.edge, color=_BULK, lw=0.8, ls="--")
        if sp.bulk.lambda_minus > 0:
            axes.axhline(sp.bulk.lambda_minus, color=_BULK, lw=0.8, ls=":")
    axes.set(xscale="log", yscale="log", xlabel="rank of the eigenvalue", ylabel="eigenvalue")


def plot_comparison(result: Comparison) -> Any:
    """Draw a series as phases over training, anything else as metrics over depth."""
    if result.series is not None:
        return _plot_series(result.series)
    return _plot_depth(result)


def _plot_depth(result: Comparison) -> Any:
    figure = new_figure(8, 8)
    axes = figure.subplots(3, 1, sharex=True)
    places = np.arange(len(result.layers))
    colours = [ROLE_COLOURS.get(layer.role, "#000000") for layer in result.layers]
    for ax, name in ((axes[0], "alpha"), (axes[1], "stable_rank")):
        for n, marker in zip(range(len(result.networks)), "osD^v<>" * 9, strict=False):
            values = [_nan(layer.metrics[name][n]) for layer in result.layers]
            ax.scatter(places, values, c=colours, marker=marker, s=18, label=f"network {n}")
        ax.set_ylabel(name.replace("_", " "))
    axes[0].legend(fontsize="small")
    axes[2].bar(places, [_nan(layer.relative_change) for layer in result.layers], color=colours)
    axes[2].set(ylabel="relative change", xlabel="layer, in network order")
    roles = {layer.role for layer in result.layers}
    axes[2].legend(handles=_role_handles(roles), fontsize="small", ncols=4)
    return figure


def _plot_series(series: CheckpointSeries) -> Any:
    from matplotlib import colormaps

    figure = new_figure(8, 6)
    axes = figure.subplots(2, 1, height_ratios=(2, 1))
    grid = np.array(
        [[PHASES.index(p) if p in PHASES else np.nan for p in layer.phase] for layer in series.layers]
    )
    colours = colormaps["viridis"].resampled(len(PHASES))
    picture = axes[0].imshow(
        grid, aspect="auto", cmap=colours, vmin=-0.5, vmax=len(PHASES) - 0.5, interpolation="none"
    )
    axes[0].set_yticks(range(len(series.layers)), [layer.name for layer in series.layers], fontsize="small")
    bar = figure.colorbar(picture, ax=axes[0], ticks=range(len(PHASES)))
    bar.ax.set_yticklabels(PHASES, fontsize="small")
    for layer in series.layers:
        axes[1].plot(
            [_nan(v) for v in layer.alpha], color=ROLE_COLOURS.get(layer.role, "#000000"), label=layer.name
        )
    axes[1].set(ylabel="alpha", xlabel="checkpoint")
    if len(series.layers) <= 8:
        axes[1].legend(fontsize="small")
    return figure


def _role_handles(roles: Collection[str]) -> list[Any]:
    """Entries of a legend, one per role that occurs."""
    from matplotlib.lines import Line2D

    present = {role: colour for role, colour in ROLE_COLOURS.items() if role in roles}
    return [Line2D([], [], marker="o", ls="", color=colour, label=role) for role, colour in present.items()]


def _nan(value: float | None) -> float:
    return float("nan") if value is None else float(value)
