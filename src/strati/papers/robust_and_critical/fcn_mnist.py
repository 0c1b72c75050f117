"""The small-scale experiment of robust-and-critical-layers: fully connected networks on MNIST.

Table 1, figures 2 (right), 3, 4 and 7: 100 networks 784-5x512-10, each layer re-initialised and re-randomised, the
paper's numbers beside ours. The paper names no optimiser, epochs or batch: ours are in the built-in specs ``fcn-mnist``
(Adam) and ``fcn-mnist-sgd``.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from strati import zoo
from strati.errors import StratiError
from strati.intervene.judging.audit import Audit, audit
from strati.intervene.planning.spec import Spec, read_spec
from strati.intervene.study import Study, study
from strati.papers.registry import Reproduction, Row
from strati.run.engine import cores
from strati.types import Flag, Tick

PAPER_ALPHA = (4.82, 4.205, 4.126, 4.135, 4.193, 3.793)
PAPER_ACCURACY = 96.822
PAPER_MEANS = {"alpha": (-0.053, -0.035), "activation_disagreement": (-0.776, -0.5375)}
FIGURES = {
    "alpha": "figure 2, right",
    **dict.fromkeys(
        ("alpha_weighted", "log_alpha_norm", "mp_soft_rank", "spectral_norm", "stable_rank", "entropy"),
        "figure 3",
    ),
    **dict.fromkeys(("activation_disagreement", "js_divergence"), "figure 4"),
    "frobenius_norm": "figure 7",
}


def fcn_mnist(*, quick: bool, seed: int, folder: Path, tick: Tick) -> Reproduction:
    """Run (or resume) the study and put its numbers beside the paper's.

    The alphas of table 1 depend on how the networks were trained, which the paper does not say: a second, smaller
    study trains to about the same accuracy by SGD instead of Adam.
    """
    run: dict[str, Any] = {"workers": cores(), "tick": tick, "resume": "the same command"}
    spec, warnings = _spec("fcn-mnist", 10 if quick else 100, seed)
    found = study(spec, out=folder / f"{spec.network.count}-networks", **run)
    verdict = audit(found)
    rows = [*_table_one(found), *_layers(verdict), *_correlations(verdict), *_beyond(verdict)]
    other, _ = _spec("fcn-mnist-sgd", 2 if quick else 10, seed)
    second = study(other, out=folder / f"{other.network.count}-networks-sgd", **run)
    rows += [replace(row, what=f"trained by SGD, {row.what}") for row in _table_one(second)]
    rows += [replace(row, what=f"trained by SGD, {row.what}") for row in _layers(audit(second))]
    figures = _draw(found, folder)
    title = f"{spec.network.count} networks 784-5x512-10 on {spec.data.name}: robust-and-critical-layers, section 4"
    return Reproduction("fcn-mnist", title, tuple(rows), figures, tuple(warnings))


def _spec(name: str, count: int, seed: int) -> tuple[Spec, list[Flag]]:
    spec = read_spec(name)
    spec = replace(spec, seed=seed, network=replace(spec.network, count=count))
    try:
        zoo.path("mnist")
    except StratiError as error:
        told = Flag("fashion-mnist", f"MNIST cannot be had here ({error.why}); Fashion-MNIST instead")
        return replace(spec, data=replace(spec.data, name="fashion-mnist")), [told]
    return spec, []


def _table_one(found: Study) -> list[Row]:
    table = found.frame()
    intact = table[(table["intervention"] == "intact") & (table["status"] == "done")]
    accuracy = 100 * intact.groupby("network")["performance"].first()
    count = intact["network"].nunique()
    rows = []
    for number, paper in enumerate(PAPER_ALPHA, 1):
        alpha = intact[intact["layer"] == f"fc{number}"]["alpha"].to_numpy(float)
        rows.append(
            Row(f"table 1: alpha of FC{number}", paper, _rounded(alpha.mean()), f"+- {_sem(alpha):.3f} SEM")
        )
    error = _sem(accuracy.to_numpy(float))
    note = f"+- {error:.3f} SEM, {count} networks"
    rows.append(Row("table 1: test accuracy, %", PAPER_ACCURACY, _rounded(accuracy.mean()), note))
    return rows


def _layers(verdict: Audit) -> list[Row]:
    """What figure 2 shows of each layer; the paper gives these in words only."""
    told = {"reinitialise": "robust but for FC1", "rerandomise": "near chance for every layer"}
    rows = []
    for row in verdict.layers:
        what = f"figure 2: accuracy after {row.intervention} of {row.layer.upper()}, %"
        mean = None if row.performance_mean is None else _rounded(100 * row.performance_mean)
        rows.append(Row(what, None, mean, f"{row.layer_class}; paper: {told[row.intervention]}"))
    return rows


def _correlations(verdict: Audit) -> list[Row]:
    rows = []
    for mean in verdict.means:
        if mean.metric not in FIGURES:
            continue
        rho, tau = PAPER_MEANS.get(mean.metric, (None, None))
        where = f"{FIGURES[mean.metric]}: {mean.metric}"
        rows.append(
            Row(f"{where}, mean Spearman", rho, _rounded(mean.spearman), f"over {mean.layers} layers")
        )
        rows.append(Row(f"{where}, mean Kendall", tau, _rounded(mean.kendall)))
    return rows


def _beyond(verdict: Audit) -> list[Row]:
    own = [v for v in verdict.verdicts if v.metric in FIGURES and v.intervention is None]
    return [Row(f"verdict: {v.metric}", None, None, v.text) for v in own]


def _draw(found: Study, folder: Path) -> tuple[str, ...]:
    from strati.report.plots.study import scatter

    drawn = []
    for metric, figure in FIGURES.items():
        path = folder / f"{figure.replace(',', '').replace(' ', '-')}-{metric}.png"
        scatter(found, metric).savefig(path, dpi=110)
        drawn.append(str(path))
    return tuple(drawn)


def _sem(values: np.ndarray[Any, Any]) -> float:
    return float(values.std(ddof=1) / len(values) ** 0.5)


def _rounded(value: float | None) -> float | None:
    return None if value is None or value != value else round(float(value), 4)
