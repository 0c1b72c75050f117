"""top-down-eigenspectra on real networks: quasi-null shares, roles, fine-tuning, seeds, kinds of network.

Nothing is trained here; ``spectra_experiments`` does that. Which networks are measured: ``survey``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from strati.comparison.compare import compare
from strati.comparison.layer_statistics import Difference, differences
from strati.core.results import Tick
from strati.core.rng import stream
from strati_reproductions import zoo
from strati_reproductions.eigenspectra.figures import as_shown, bars, points_by_group, spectra_grid
from strati_reproductions.eigenspectra.survey import GPT2, GPT2_SCOPE, LANGUAGE, VISION, gpt2_survey, survey
from strati_reproductions.pictures import drawn
from strati_reproductions.registry import Reproduction, Row
from strati_reproductions.rows import Fact

if TYPE_CHECKING:
    import pandas as pd

    from strati.comparison.results import ComparedLayer
    from strati.core.results import FloatArray

METRICS = (
    "alpha",
    "stable_rank",
    "entropy",
    "mp_soft_rank",
    "spectral_norm",
    "frobenius_norm",
    "log_alpha_norm",
)
PAPER_ALPHA, PAPER_ALPHA_ERROR = 3.865, 0.136  # all layers of GPT-2; robust-and-critical-layers, table 3
KINDS = {"attention": "attention", "MLP": "mlp"}


def quasi_null(*, quick: bool, seed: int, folder: Path, tick: Tick) -> Reproduction:
    """Section 3.1: 1 to 6 % of a language model's eigenvalues lie significantly below the bulk."""
    gpt2, warnings = gpt2_survey(tick)
    rows = [] if gpt2 is None else _gpt2_quasi_null(gpt2)
    for name in LANGUAGE[: 2 if quick else 3]:
        table = survey(zoo.path(name), tick)
        inner = table[table["role"].str.startswith(tuple(KINDS.values()))]
        by_layer = inner["quasi_null_share"]
        note = (
            f"{len(inner)} attention and MLP matrices; per layer {by_layer.min():.1%} to {by_layer.max():.1%}"
            f"{_caution(table)}"
        )
        what = f"{name}: quasi-null eigenvalues, % of all"
        facts: dict[str, Fact] = {"network": name, "most": 100 * float(by_layer.max())}
        rows.append(Row(what, "1 to 6 (GPT-2)", _share(inner), note, key="quasi-null-share", facts=facts))
        rows += [
            Row(f"{name}: {role}", None, _share(layers), f"{len(layers)} layers")
            for role, layers in inner.groupby("role")
        ]
    title = "Quasi-null eigenvalues in real transformers (section 3.1)"
    figures = drawn(_draw_shares, rows, folder, "quasi-null", title, (1, 6))
    captions = {"quasi-null": "share of eigenvalues far below the bulk, by network and kind of layer; the band is what "
                "the paper finds in GPT-2."}  # fmt: skip
    return Reproduction("quasi-null", title, tuple(rows), figures, warnings, captions=captions)


def _gpt2_quasi_null(table: pd.DataFrame) -> list[Row]:
    by_layer = 100 * table["quasi_null_share"]
    within = int(((by_layer >= 1) & (by_layer <= 6)).sum())
    counts = " ".join(str(count) for count in table["quasi_null"].astype(int))
    note = (
        f"{GPT2_SCOPE}; per layer {by_layer.min():.1f} to {by_layer.max():.1f} %, {within} of {len(table)} between 1 "
        f"and 6 %; of {table['eigenvalue_count'].iloc[0]} eigenvalues each, in order of blocks: {counts}"
    )
    what = f"{GPT2}: attention.out: quasi-null eigenvalues, % of all"
    facts: dict[str, Fact] = {"network": GPT2, "most": float(by_layer.max()), "within": within}
    share = _share(table)
    return [Row(what, "1 to 6", None, note, paper_network=share, key="quasi-null-share", facts=facts)]


def _share(table: pd.DataFrame) -> float:
    """Quasi-null eigenvalues of some layers, in percent of all their eigenvalues."""
    return 100 * float(table["quasi_null"].astype(float).sum() / table["eigenvalue_count"].sum())


def _caution(table: pd.DataFrame) -> str:
    rounded = any("quantised" in str(codes).split() for codes in table["warnings"])
    return "; 4-bit weights: rounding lifts the smallest eigenvalues" if rounded else ""


def _draw_shares(
    rows: list[Row], folder: Path, stem: str, title: str, band: tuple[float, float] | None
) -> tuple[str, ...]:
    shares = {row.what.removesuffix(", % of all"): row.ours or row.paper_network for row in rows}
    heights = {name: float(share) for name, share in shares.items() if isinstance(share, float)}
    return bars(heights, folder, stem, title=title, label="% of all eigenvalues", band=band)


def roles(*, quick: bool, seed: int, folder: Path, tick: Tick) -> Reproduction:
    """Section 3.2, figure 4: whether attention and MLP layers have different spectra, with the size of the effect."""
    gpt2, warnings = gpt2_survey(tick)
    rows = [] if gpt2 is None else _gpt2_depth(gpt2)
    groups: dict[str, dict[str, dict[str, list[float]]]] = {"alpha": {}, "width": {}}
    if gpt2 is not None:
        for metric, networks in groups.items():
            networks[GPT2] = {"attention": gpt2[metric].astype(float).tolist()}
    for name in LANGUAGE[: 2 if quick else 3]:
        table = survey(zoo.path(name), tick)
        by_kind = {kind: table[table["role"].str.startswith(start)] for kind, start in KINDS.items()}
        for metric, networks in groups.items():
            networks[name] = {
                kind: layers[metric].dropna().astype(float).tolist() for kind, layers in by_kind.items()
            }
        tested = differences([{str(k): v for k, v in row.items()} for row in table.to_dict("records")])
        rows += [_difference_row(name, d) for d in tested if d.comparison == "attention against MLP"]
        counts = Counter(zip(table["role"], table["phase"].fillna("none"), strict=True))
        phases = ", ".join(f"{role} {phase} {n}" for (role, phase), n in sorted(counts.items()))
        rows.append(Row(f"{name}: phases by role", None, phases))
        rows.append(_verdict(name, "do MLP layers have the heavier tail?", "alpha", groups["alpha"][name]))
        tighter = _verdict(name, "do MLP layers have the tighter spectrum?", "width", groups["width"][name])
        random = [float(layers["random_width"].median()) for layers in by_kind.values()]
        by_chance = f"; random matrices of the same shapes have {random[0]:.2f} and {random[1]:.2f}"
        rows.append(replace(tighter, note=tighter.note + by_chance))
    title = "Attention against MLP (section 3.2, figure 4)"
    figures = drawn(_draw_roles, groups, folder, title)
    captions = {
        "figure-4-alpha": "alpha of every layer, lines at the medians. A smaller alpha is a heavier tail: where the "
        "MLP points lie lower, the paper's statement holds. Of GPT-2 only attention output projections are available.",
        "figure-4-width": "decades between the 5th and the 95th percentile of a layer's eigenvalues. The paper finds "
        "MLP layers tighter: their points do lie lower, but so do those of random matrices as far from square.",
    }
    return Reproduction("roles", title, tuple(rows), figures, warnings, captions=captions)


def _gpt2_depth(table: pd.DataFrame) -> list[Row]:
    """GPT-2's attention output projections over the depth: alpha, width and phases."""
    alpha, width = table["alpha"].to_numpy(float), table["width"].to_numpy(float)
    phases = Counter(table["phase"].astype(str))
    by_block = ", ".join(str(phase) for phase in table["phase"])
    blocks = ", ".join(f"{a:.2f}" for a in alpha)
    heavy = phases["heavy-tailed"] + phases["bulk-decay"]
    return [
        Row(
            f"{GPT2}: mean alpha of the attention output projections",
            PAPER_ALPHA,
            None,
            f"for orientation: the paper's (robust-and-critical-layers, table 3, +- {PAPER_ALPHA_ERROR}) is the mean "
            f"of all layers; {GPT2_SCOPE}; by block {blocks}",
            paper_network=float(alpha.mean()),
            error=float(alpha.std(ddof=1) / len(alpha) ** 0.5),
        ),
        Row(
            f"{GPT2}: attention output projections without a clean bulk edge",
            "heavy-tailed, no clean separation between bulk and signal",
            None,
            f"bulk-decay or heavy-tailed; by block: {by_block}",
            paper_network=f"{heavy} of {len(table)}",
            key="gpt2-heavy-tailed",
            facts={"count": heavy, "of": len(table)},
        ),
        Row(
            f"{GPT2}: width of the attention output spectra, decades, median",
            "MLP tighter",
            None,
            f"a random matrix of this shape has {table['random_width'].iloc[0]:.2f}; MLP matrices are not available",
            paper_network=float(np.median(width)),
        ),
    ]


def _verdict(name: str, question: str, metric: str, values: dict[str, list[float]]) -> Row:
    """Whether MLP layers have the smaller value (a smaller alpha is a heavier tail), beyond chance."""
    from scipy.stats import mannwhitneyu

    attention, mlp = values["attention"], values["MLP"]
    medians = float(np.median(attention)), float(np.median(mlp))
    pvalue = float(mannwhitneyu(mlp, attention).pvalue)
    smaller = medians[1] < medians[0]
    answer = "no difference beyond chance" if pvalue >= 0.05 else "yes" if smaller else "no"
    note = (
        f"median {metric} {medians[0]:.2f} of {len(attention)} attention, {medians[1]:.2f} of {len(mlp)} MLP layers; "
        f"Mann-Whitney p = {pvalue:.2g}"
    )
    facts: dict[str, Fact] = {"network": name, "metric": metric, "smaller": smaller, "pvalue": pvalue}
    return Row(f"{name}: {question}", "yes", answer, note, key="mlp-against-attention", facts=facts)


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
    """Section 3.3 asks what fine-tuning does to spectra: MiniLM against a real fine-tune."""
    comparison = compare(zoo.path("minilm"), zoo.path("minilm-tuned"), jobs=2, tick=tick)
    assert comparison.movement is not None
    moved = comparison.movement
    overlaps = [v for v in (layer.subspace_overlap for layer in comparison.layers) if v is not None]
    ranks = [v for v in (layer.update_stable_rank for layer in comparison.layers) if v is not None]
    distances = [v for v in (layer.spectral_distance for layer in comparison.layers) if v is not None]
    changed = sum(layer.metrics["phase"][0] != layer.metrics["phase"][1] for layer in comparison.layers)
    alphas = [abs(b - a) for a, b in (layer.metrics["alpha"] for layer in comparison.layers) if a and b]
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
        Row(
            "median change of alpha", "no meaningful difference", float(np.median(alphas)), key="alpha-change"
        ),
        Row("layers whose phase changed", "none (GPT-2)", f"{changed} of {len(comparison.layers)}"),
    )
    title = "What fine-tuning changed: MiniLM and its fine-tune (section 3.3)"
    captions = {
        f"fine-tuned-{kind}": f"{kind} layers of MiniLM before (top) and after (bottom) an ordinary fine-tuning, in "
        "the form of the paper's figures 5 and 6 (those with one word are with same-token): the rows look the same."
        for kind in ("attention", "mlp")
    }
    figures = drawn(_draw_tuning, comparison.layers, folder)
    return Reproduction("fine-tuning", title, rows, figures, captions=captions)


def _draw_tuning(layers: Sequence[ComparedLayer], folder: Path) -> tuple[str, ...]:
    """Attention and MLP layers before (top) and after fine-tuning (bottom), as in figures 5 and 6."""
    paths: list[str] = []
    for kind in ("attention", "mlp"):
        of_kind = [
            layer for layer in layers if (layer.role or "").startswith(kind) and len(layer.eigenvalues) == 2
        ]
        selected = of_kind[:: max(1, len(of_kind) // 5)][:5]
        grid = [
            [
                as_shown(
                    layer.name.rsplit("layer.", 1)[-1],
                    layer.eigenvalues[k],
                    {name: values[k] for name, values in layer.metrics.items()},
                )
                for layer in selected
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
    title = "Five trainings of SpliceAI: how much each metric varies"
    figures = drawn(_draw_chance, rows, folder, title)
    captions = {"chance": "of each metric, the share of its variance over layers that differs between trainings of the "
                "same layer. A metric with a short bar is reproducible."}  # fmt: skip
    return Reproduction("five-trainings", title, tuple(rows), figures, captions=captions)


def _chance_share(grid: FloatArray) -> float:
    """Of values by training and layer, the variance within layers over all of it."""
    return float(grid.var(axis=0, ddof=1).mean() / grid.var(ddof=1))


def _draw_chance(rows: list[Row], folder: Path, title: str) -> tuple[str, ...]:
    values = {row.what.partition(":")[0]: float(row.ours) for row in rows[:-1] if isinstance(row.ours, float)}
    return bars(values, folder, "chance", title=title, label="share of the variance that is chance")


def vision_and_language(*, quick: bool, seed: int, folder: Path, tick: Tick) -> Reproduction:
    """The paper finds quasi-null eigenvalues in language models and none in vision models."""
    gpt2, warnings = gpt2_survey(tick)
    rows = [] if gpt2 is None else [_kind_row("language", GPT2, gpt2)]
    for kind, names in (("vision", VISION[: 2 if quick else 4]), ("language", LANGUAGE[: 2 if quick else 3])):
        rows += [_kind_row(kind, name, survey(zoo.path(name), tick)) for name in names]
    title = "Vision against language networks"
    figures = drawn(_draw_shares, rows, folder, "vision-and-language", title, None)
    captions = {"vision-and-language": "share of quasi-null eigenvalues by network: the paper finds none in vision "
                "models and 1 to 6 % in language models."}  # fmt: skip
    return Reproduction("vision-and-language", title, tuple(rows), figures, warnings, captions=captions)


def _kind_row(kind: str, name: str, table: pd.DataFrame) -> Row:
    table = table[table["eigenvalue_count"] >= 20]
    phases = ", ".join(f"{p} {n}" for p, n in Counter(table["phase"].astype(str)).most_common())
    note = f"alpha median {table['alpha'].astype(float).median():.2f}; {phases}{_caution(table)}"
    expected = "none" if kind == "vision" else "1 to 6"
    facts: dict[str, Fact] = {"kind": kind, "network": name}
    what = f"{kind}, {name}: quasi-null, % of all"
    if name == GPT2:
        note = f"{GPT2_SCOPE}; {note}"
        return Row(
            what, expected, None, note, paper_network=_share(table), key="quasi-null-share", facts=facts
        )
    return Row(what, expected, _share(table), note, key="quasi-null-share", facts=facts)


def _difference_row(name: str, d: Difference) -> Row:
    claim = "MLP tighter, heavier tail" if d.metric in ("alpha", "mp_sigma") else None
    both_medians = f"{d.medians[0]:.3g} / {d.medians[1]:.3g}"
    note = f"Cliff's delta {d.effect:+.2f}, p = {d.pvalue:.2g}, n = {d.n[0]} and {d.n[1]}"
    return Row(f"{name}: {d.metric}, attention / MLP", claim, both_medians, note)
