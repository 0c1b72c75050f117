"""top-down-eigenspectra on real networks as they are: quasi-null shares, roles, fine-tuning, seeds, kinds of network.

Nothing is trained here; ``spectra_experiments`` does that. GPT-2 is not to be had without a model hub, so the paper's
claims are put to MiniLM, stories15M and SmolLM2, whose weights the zoo fetches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from strati import zoo
from strati.network.open import open as open_network
from strati.papers.eigenspectra.figures import as_shown, bars, points_by_group, spectra_grid
from strati.papers.pictures import drawn
from strati.papers.registry import Reproduction, Row
from strati.rng import stream
from strati.spectra.comparing.compare import compare
from strati.spectra.comparing.role_differences import Difference, differences
from strati.spectra.scan import scan
from strati.types import Tick

if TYPE_CHECKING:
    import pandas as pd

    from strati.spectra.comparing.results import ComparedLayer
    from strati.types import FloatArray

LANGUAGE = ("minilm", "stories15m", "smollm2")
VISION = ("mobilenetv2", "efficientnet", "cifar-cnn", "mnist-cnn")
METRICS = (
    "alpha",
    "stable_rank",
    "entropy",
    "mp_soft_rank",
    "spectral_norm",
    "frobenius_norm",
    "log_alpha_norm",
)


_WIDEST = 4096


def survey(path: Path, tick: Tick) -> pd.DataFrame:
    """The scan of a network as a table, with shares of spikes and of quasi-null eigenvalues per layer."""
    result = scan(open_network(path), jobs=2, tick=tick)
    table = result.table.copy()
    count = np.array([result[name].eigenvalues.size for name in table["name"]])
    table["eigenvalue_count"] = count
    for name in ("spikes", "quasi_null"):
        table[f"{name}_share"] = table[name].astype(float) / count
    table["width"] = [_width(result[name].eigenvalues) for name in table["name"]]
    chance = {
        shape: _width(np.linalg.svd(stream(0, "width", *shape).normal(size=shape), compute_uv=False) ** 2)  # type: ignore[arg-type]
        for shape in {(int(r), int(c)) for r, c in zip(table["rows"], table["cols"], strict=True)}
        if max(shape) <= _WIDEST
    }
    shapes = zip(table["rows"], table["cols"], strict=True)
    table["random_width"] = [chance.get((int(r), int(c)), float("nan")) for r, c in shapes]
    return table


def _width(eigenvalues: FloatArray) -> float:
    """How wide a spectrum is: decades between its 5th and 95th percentile."""
    low, high = np.quantile(eigenvalues, [0.05, 0.95])
    return float(np.log10(high / low)) if low > 0 else float("nan")


def quasi_null(*, quick: bool, seed: int, folder: Path, tick: Tick) -> Reproduction:
    """Section 3.1: 1 to 6 % of a language model's eigenvalues lie significantly below the bulk. Do they?"""
    rows = []
    for name in LANGUAGE[: 2 if quick else 3]:
        table = survey(zoo.path(name), tick)
        inner = table[table["role"].str.startswith(("attention", "mlp"))]
        share = inner["quasi_null"].astype(float).sum() / inner["eigenvalue_count"].sum()
        least, most = inner["quasi_null_share"].min(), inner["quasi_null_share"].max()
        note = (
            f"{len(inner)} attention and MLP matrices; per layer {least:.1%} to {most:.1%}{_caution(table)}"
        )
        rows.append(
            Row(f"{name}: quasi-null eigenvalues, % of all", "1 to 6 (GPT-2)", 100 * float(share), note)
        )
        for role, part in inner.groupby("role"):
            mean = part["quasi_null"].astype(float).sum() / part["eigenvalue_count"].sum()
            rows.append(Row(f"{name}: {role}", None, 100 * float(mean), f"{len(part)} layers"))
    title = "Quasi-null eigenvalues in real transformers (section 3.1)"
    figures = drawn(_draw_shares, rows, folder, "quasi-null", title, (1, 6))
    captions = {"quasi-null": "share of eigenvalues far below the bulk, by network and kind of layer; the band is what "
                "the paper finds in GPT-2."}  # fmt: skip
    return Reproduction("quasi-null", title, tuple(rows), figures, captions=captions)


def _caution(table: pd.DataFrame) -> str:
    rounded = any("quantised" in str(codes).split() for codes in table["warnings"])
    return "; 4-bit weights: rounding lifts the smallest eigenvalues" if rounded else ""


def _draw_shares(
    rows: list[Row], folder: Path, stem: str, title: str, band: tuple[float, float] | None
) -> tuple[str, ...]:
    values = {
        row.what.removesuffix(", % of all"): float(row.ours) for row in rows if isinstance(row.ours, float)
    }
    return bars(values, folder, stem, title=title, label="% of all eigenvalues", band=band)


def roles(*, quick: bool, seed: int, folder: Path, tick: Tick) -> Reproduction:
    """Section 3.2, figure 4: attention and MLP layers have different spectra. A test, with the size of the effect."""
    rows = []
    groups: dict[str, dict[str, dict[str, list[float]]]] = {"alpha": {}, "width": {}}
    chance: dict[str, str] = {}
    for name in LANGUAGE[: 2 if quick else 3]:
        table = survey(zoo.path(name), tick)
        for metric, networks in groups.items():
            networks[name] = {
                kind: table[table["role"].str.startswith(start)][metric].dropna().astype(float).tolist()
                for kind, start in (("attention", "attention"), ("MLP", "mlp"))
            }
        random = [
            float(table[table["role"].str.startswith(start)]["random_width"].median())
            for start in ("attention", "mlp")
        ]
        chance[name] = f"; random matrices of the same shapes have {random[0]:.2f} and {random[1]:.2f}"
        found = differences([{str(k): v for k, v in row.items()} for row in table.to_dict("records")])
        rows += [_difference_row(name, d) for d in found if d.comparison == "attention against MLP"]
        counts = Counter(zip(table["role"], table["phase"].fillna("none"), strict=True))
        phases = ", ".join(f"{role} {phase} {n}" for (role, phase), n in sorted(counts.items()))
        rows.append(Row(f"{name}: phases by role", None, phases))
        rows.append(_verdict(name, "do MLP layers have the heavier tail?", "alpha", groups["alpha"][name]))
        tight = _verdict(name, "do MLP layers have the tighter spectrum?", "width", groups["width"][name])
        rows.append(replace(tight, note=tight.note + chance[name]))
    title = "Attention against MLP (section 3.2, figure 4)"
    figures = drawn(_draw_roles, groups, folder, title)
    captions = {
        "figure-4-alpha": "alpha of every layer, lines at the medians. A smaller alpha is a heavier tail: where the "
        "MLP points lie lower, the paper's statement holds.",
        "figure-4-width": "decades between the 5th and the 95th percentile of a layer's eigenvalues. The paper finds "
        "MLP layers tighter: their points do lie lower, but so do those of random matrices as far from square.",
    }
    return Reproduction("roles", title, tuple(rows), figures, captions=captions)


def _verdict(name: str, question: str, metric: str, values: dict[str, list[float]]) -> Row:
    """Whether MLP layers have the smaller value (a smaller alpha is a heavier tail), beyond chance."""
    from scipy.stats import mannwhitneyu

    attention, mlp = values["attention"], values["MLP"]
    medians = float(np.median(attention)), float(np.median(mlp))
    chance = float(mannwhitneyu(mlp, attention).pvalue)
    smaller = "yes" if medians[1] < medians[0] else "no"
    note = (
        f"median {metric} {medians[0]:.2f} of {len(attention)} attention, {medians[1]:.2f} of {len(mlp)} MLP layers; "
        f"Mann-Whitney p = {chance:.2g}"
    )
    return Row(
        f"{name}: {question}", "yes", smaller if chance < 0.05 else "no difference beyond chance", note
    )


def _draw_roles(
    groups: dict[str, dict[str, dict[str, list[float]]]], folder: Path, title: str
) -> tuple[str, ...]:
    label = {"alpha": "alpha", "width": "width of the spectrum, decades"}
    return tuple(
        path
        for metric, networks in groups.items()
        for path in points_by_group(networks, folder, f"figure-4-{metric}", title=title, label=label[metric])
    )


def fine_tuning(*, quick: bool, seed: int, folder: Path, tick: Tick) -> Reproduction:
    """Section 3.3 asks what fine-tuning does to spectra: MiniLM against a real fine-tuned descendant."""
    result = compare(zoo.path("minilm"), zoo.path("minilm-tuned"), jobs=2, tick=tick)
    assert result.movement is not None
    moved = result.movement
    overlaps = [v for v in (layer.subspace_overlap for layer in result.layers) if v is not None]
    ranks = [v for v in (layer.update_stable_rank for layer in result.layers) if v is not None]
    distances = [v for v in (layer.spectral_distance for layer in result.layers) if v is not None]
    changed = sum(layer.metrics["phase"][0] != layer.metrics["phase"][1] for layer in result.layers)
    alphas = [abs(b - a) for a, b in (layer.metrics["alpha"] for layer in result.layers) if a and b]
    rows = (
        Row(
            "tensors moved",
            None,
            f"{moved.moved} of {moved.shared}",
            f"untouched: {', '.join(moved.untouched)}",
        ),
        Row("median relative change of a tensor, %", None, 100 * (moved.median_relative_change or 0.0)),
        Row("median stable rank of the updates", None, float(np.median(ranks)), "of at most 384"),
        Row("median overlap of leading subspaces", None, float(np.median(overlaps)), "1 = the same subspace"),
        Row(
            "median distance of spectra (log-eigenvalue)",
            "no meaningful difference",
            float(np.median(distances)),
        ),
        Row("median change of alpha", "no meaningful difference", float(np.median(alphas))),
        Row("layers whose phase changed", "none (GPT-2)", f"{changed} of {len(result.layers)}"),
    )
    title = "What fine-tuning changed: MiniLM and its descendant (section 3.3)"
    captions = {
        f"fine-tuned-{kind}": f"{kind} layers of MiniLM before (top) and after (bottom) an ordinary fine-tuning, in "
        "the form of the paper's figures 5 and 6 (those with one word are with same-token): the rows look the same."
        for kind in ("attention", "mlp")
    }
    figures = drawn(_draw_tuning, result.layers, folder)
    return Reproduction("fine-tuning", title, rows, figures, captions=captions)


def _draw_tuning(layers: Sequence[ComparedLayer], folder: Path) -> tuple[str, ...]:
    """Attention and MLP layers before (top) and after fine-tuning (bottom), as in figures 5 and 6."""
    paths: list[str] = []
    for kind in ("attention", "mlp"):
        own = [
            layer for layer in layers if (layer.role or "").startswith(kind) and len(layer.eigenvalues) == 2
        ]
        some = own[:: max(1, len(own) // 5)][:5]
        grid = [
            [
                as_shown(
                    layer.name.rsplit("layer.", 1)[-1],
                    layer.eigenvalues[k],
                    {name: values[k] for name, values in layer.metrics.items()},
                )
                for layer in some
            ]
            for k in (0, 1)
        ]
        above = f"{kind} layers of MiniLM, plain (top) and fine-tuned (bottom)"
        paths += spectra_grid(grid, folder, f"fine-tuned-{kind}", above)
    return tuple(paths)


def five_trainings(*, quick: bool, seed: int, folder: Path, tick: Tick) -> Reproduction:
    """Five independent trainings of one network: how much of each metric is chance?

    For each metric the variance over layers is split into what differs between layers and what differs between
    trainings of the same layer; their ratio is the share of noise.
    """
    tables = [survey(path, tick) for path in sorted(zoo.path("spliceai").glob("*.h5"))]
    rows = []
    for metric in METRICS:
        grid = np.array([table[metric].astype(float).to_numpy() for table in tables])
        grid = grid[:, np.isfinite(grid).all(axis=0)]
        share = _chance_share(grid)
        rng = stream(seed, "five trainings", metric)
        again = [_chance_share(grid[:, rng.integers(0, grid.shape[1], grid.shape[1])]) for _ in range(500)]
        spread = float((grid.std(axis=0, ddof=1) / np.abs(grid.mean(axis=0))).mean())
        note = f"spread between trainings of one layer {spread:.1%} of its mean; {grid.shape[1]} layers x 5"
        what = f"{metric}: share of variance that is chance"
        rows.append(Row(what, None, share, note, error=float(np.std(again, ddof=1)), seeds=len(grid)))
    phases = np.array([table["phase"].astype(str) for table in tables])
    same = float(np.mean([len(set(column)) == 1 for column in phases.T]))
    rows.append(Row("layers with the same phase in all five", None, same, seeds=len(tables)))
    title = "Five trainings of SpliceAI: what is chance?"
    figures = drawn(_draw_chance, rows, folder, title)
    captions = {"chance": "of each metric, the share of its variance over layers that differs between trainings of the "
                "same layer: a short bar is a metric that another training would give again."}  # fmt: skip
    return Reproduction("five-trainings", title, tuple(rows), figures, captions=captions)


def _chance_share(grid: FloatArray) -> float:
    """Of values by training and layer, the variance within layers over all of it."""
    return float(grid.var(axis=0, ddof=1).mean() / grid.var(ddof=1))


def _draw_chance(rows: list[Row], folder: Path, title: str) -> tuple[str, ...]:
    values = {row.what.partition(":")[0]: float(row.ours) for row in rows[:-1] if isinstance(row.ours, float)}
    return bars(values, folder, "chance", title=title, label="share of the variance that is chance")


def vision_and_language(*, quick: bool, seed: int, folder: Path, tick: Tick) -> Reproduction:
    """The paper finds quasi-null eigenvalues in language models and none in vision models: is it so?"""
    rows = []
    for kind, names in (("vision", VISION[: 2 if quick else 4]), ("language", LANGUAGE[: 2 if quick else 3])):
        for name in names:
            table = survey(zoo.path(name), tick)
            table = table[table["eigenvalue_count"] >= 20]
            alpha = table["alpha"].astype(float)
            share = table["quasi_null"].astype(float).sum() / table["eigenvalue_count"].sum()
            phases = ", ".join(f"{p} {n}" for p, n in Counter(table["phase"].astype(str)).most_common())
            note = f"alpha median {alpha.median():.2f}; {phases}{_caution(table)}"
            expected = "none" if kind == "vision" else "1 to 6"
            rows.append(Row(f"{kind}, {name}: quasi-null, % of all", expected, 100 * float(share), note))
    title = "Vision against language networks"
    figures = drawn(_draw_shares, rows, folder, "vision-and-language", title, None)
    captions = {"vision-and-language": "share of quasi-null eigenvalues by network: the paper finds none in vision "
                "models and 1 to 6 % in language models."}  # fmt: skip
    return Reproduction("vision-and-language", title, tuple(rows), figures, captions=captions)


def _difference_row(name: str, d: Difference) -> Row:
    claim = "MLP tighter, heavier tail" if d.metric in ("alpha", "mp_sigma") else None
    value = f"{d.medians[0]:.3g} / {d.medians[1]:.3g}"
    note = f"Cliff's delta {d.effect:+.2f}, p = {d.pvalue:.2g}, n = {d.n[0]} and {d.n[1]}"
    return Row(f"{name}: {d.metric}, attention / MLP", claim, value, note)
