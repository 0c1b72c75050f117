"""What ``reproduce pretrained`` shows of each network: tables 2 and 3 and figures 5, 6, 8-11 of the paper, in its form.

Running the studies is ``pretrained``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.intervene.judging.audit import Audit, MetricRow, audit
from strati.intervene.planning.config import StudyConfig
from strati.intervene.study import Study
from strati.papers.registry import Row
from strati.spectra.scan import scan

if TYPE_CHECKING:
    from torch import nn

FIGURE_METRICS = (
    *("alpha", "alpha_weighted", "log_alpha_norm", "mp_soft_rank"),
    *("spectral_norm", "stable_rank", "entropy", "frobenius_norm"),
)
MEASURED = {"accuracy": 91.73, "loss": 1.136, "perplexity": 17.6}
STORIES_W1 = (7.70, 4.40, 3.07, 2.21, 1.95, 3.66)
STANDS_FOR = {"resnet20": "ResNet34", "stories15m": "GPT-2", "smollm2": "GPT-2-Large"}
"""Networks that can be had here, and those of the paper that they stand in for."""
PAPER = {
    "ResNet34": {
        "network": "ResNet34",
        "parameters": "21.8M",
        "loss": "1.071",
        "accuracy": "73.302",
        "alpha": "3.380 +- 0.195",
        "mean": "0.006/0.005",
    },
    "ViT": {
        "network": "ViT",
        "parameters": "86.6M",
        "loss": "0.825",
        "accuracy": "78.852",
        "alpha": "4.711 +- 0.271",
        "mean": "-0.051/-0.035",
    },
    "GPT-2": {
        "network": "GPT-2",
        "parameters": "127M",
        "loss": "3.399",
        "perplexity": "29.941",
        "alpha": "3.865 +- 0.136",
        "mean": "0.028/0.018",
    },
    "GPT-2-Large": {
        "network": "GPT-2-Large",
        "parameters": "774M",
        "loss": "2.967",
        "perplexity": "19.436",
        "alpha": "4.013 +- 0.091",
        "mean": "0.116/0.078",
    },
}


@dataclass(frozen=True)
class PretrainedCase:
    """A network, what it is measured on, and where the paper has one like it.

    ``beside`` names the network of the paper that this one is; without it, the one that it stands in for, if any.
    """

    name: str
    models: Mapping[str, nn.Module]
    config: StudyConfig
    size: str
    table: str
    figures: tuple[str, str]
    data: Any = None
    evaluate: Callable[[nn.Module], float] | None = None
    beside: str | None = None

    @property
    def paper(self) -> Mapping[str, str]:
        """The paper's line that belongs beside this network's, empty where it has none."""
        return PAPER.get(self.beside or STANDS_FOR.get(self.name, ""), {})


def case_rows(case: PretrainedCase, found: Study) -> list[Row]:
    """The network's line of its table, the correlations of its figures, and what becomes of its layers."""
    verdict = audit(found)
    rows = [*_table(case, found), *_correlations(case, verdict)]
    classes = [row.layer_class for row in verdict.layers]
    share = ", ".join(f"{classes.count(k)} {k}" for k in ("robust", "mixed", "critical"))
    rows.append(Row(f"{case.name}: layers by class", None, share, f"{found.failed} points failed"))
    rows += [
        Row(f"{case.name}: verdict on {v.metric}", None, None, v.text)
        for v in verdict.verdicts
        if v.metric in ("alpha", "activation_disagreement") and v.intervention is None
    ]
    if case.name == "stories15m":
        rows += _first_matrices(found)
    return rows


def _table(case: PretrainedCase, found: Study) -> list[Row]:
    """Parameters, loss, accuracy or perplexity, mean layer alpha with its standard error, as in tables 2 and 3."""
    paper = case.paper
    table = found.frame()
    intact = table[(table["status"] == "done") & (table["intervention"] == "intact")]
    alphas = intact["alpha"].dropna().to_numpy(float)
    where = f"{case.table}, {case.name}"
    parameters = sum(p.numel() for p in next(iter(case.models.values())).parameters())
    rows = [
        Row(
            f"{where}: parameters",
            _theirs(paper, "parameters"),
            f"{parameters / 1e6:.1f}M",
            case.size + _stand_in(case),
        )
    ]
    for name, value in _performances(case, float(intact["intact_performance"].mean())).items():
        own = case.name in STANDS_FOR and name == found.performance["name"]
        known = MEASURED.get(name) if own else None
        note = "" if known is None else "before: measured on all data when it was chosen"
        rows.append(Row(f"{where}: {name}", _theirs(paper, name), round(value, 3), note, before=known))
    error = float(alphas.std(ddof=1) / len(alphas) ** 0.5)
    mean = f"{alphas.mean():.3f} +- {error:.3f}"
    rows.append(
        Row(f"{where}: mean layer alpha", _theirs(paper, "alpha"), mean, f"SEM over {len(alphas)} layers")
    )
    return rows + _both_ways(where, case)


def _both_ways(where: str, case: PretrainedCase) -> list[Row]:
    """The mean alpha of a convolutional network with its kernels pooled and flattened: the paper says not which."""
    model = next(iter(case.models.values()))
    if not any(p.ndim == 4 for p in model.parameters()):
        return []
    rows = []
    for conv in ("pool", "flatten"):
        found = scan(model, conv=conv).table["alpha"].dropna().to_numpy(float)
        error = round(float(found.std(ddof=1) / len(found) ** 0.5), 3)
        what = f"{where}: mean layer alpha, kernels {'pooled' if conv == 'pool' else 'flattened'}"
        rows.append(Row(what, None, round(float(found.mean()), 3), f"{len(found)} layers", error=error))
    return rows


def _performances(case: PretrainedCase, intact: float) -> dict[str, float]:
    """Every measure the paper's table has of such a network, from the one that was recorded or by one pass."""
    measure = str(case.config.performance)
    if measure == "accuracy":
        from strati.intervene.measuring.functional import whole_performance
        from strati.intervene.planning.tasks import make_task

        task = make_task(case.data, "loss", case.config.batch)
        return {
            "loss": whole_performance(next(iter(case.models.values())), task),
            "accuracy": 100 * intact,
        }
    if measure == "loss":
        return {"loss": intact, "perplexity": math.exp(intact)}
    if measure == "perplexity":
        return {"loss": math.log(intact), "perplexity": intact}
    return {measure: intact}


def _correlations(case: PretrainedCase, verdict: Audit) -> list[Row]:
    """Of each figure's metric: mean over layers (the paper's number for alpha), pooled, and within layer types."""
    paper = case.paper
    means = {row.metric: row for row in verdict.means}
    within = {v.metric: v.spearman_within_types for v in verdict.verdicts if v.intervention is None}
    rows = []
    for metric in FIGURE_METRICS:
        figure = case.figures[0] if metric == "alpha" else case.figures[1]
        pooled = next(m for m in verdict.metrics if m.metric == metric and m.layer is None)
        mean = means[metric]
        theirs = _theirs(paper, "mean") if metric == "alpha" else None
        rows.append(
            Row(
                f"{figure}, {case.name}: {metric}, mean rho/tau over layers",
                theirs,
                _pair(mean.spearman, mean.kendall),
                f"over {mean.layers} layers" if mean.layers else "needs three draws of a layer at least",
            )
        )
        rows.append(
            Row(
                f"{figure}, {case.name}: {metric}, all points rho/tau",
                None,
                _pair(pooled.spearman, pooled.kendall),
                _note(pooled, within.get(metric)),
            )
        )
    return rows


def _note(pooled: MetricRow, within: float | None) -> str:
    parts = [f"n {pooled.n}"]
    if pooled.spearman_ci is not None:
        parts.append(f"95 % of rho [{pooled.spearman_ci[0]:.2f}, {pooled.spearman_ci[1]:.2f}]")
    if pooled.rmse is not None:
        parts.append(f"RMSE {pooled.rmse:.3g}")
    if within is not None:
        parts.append(f"rho within layer types {within:.2f}")
    return ", ".join(parts)


def _first_matrices(found: Study) -> list[Row]:
    table = found.frame()
    changed = table[(table["status"] == "done") & (table["intervention"] == "rerandomise")]
    rows = []
    for block, loss in enumerate(STORIES_W1):
        own = changed[changed["layer"] == f"model.layers.{block}.mlp.gate_proj"]["performance"].to_numpy(
            float
        )
        if len(own) == 0:
            continue
        note = f"draws from {own.min():.2f} to {own.max():.2f}; before: measured once, with another draw"
        what = f"stories15m: loss with w1 of layer {block} re-randomised"
        error = round(float(own.std(ddof=1) / len(own) ** 0.5), 3) if len(own) > 1 else None
        rows.append(
            Row(what, None, round(float(np.mean(own)), 2), note, before=loss, error=error, seeds=len(own))
        )
    return rows


def case_figures(case: PretrainedCase, found: Study, folder: Path) -> list[str]:
    """Figures 5 and 6: performance against alpha; figures 8 to 11: against the other metrics, one panel each."""
    from strati.report.plots.study import by_metric, scatter

    drawn = []
    alone, rest = (f"{name.replace(' ', '-')}-{case.name}.png" for name in case.figures)
    for name, figure in (
        (alone, scatter(found, "alpha", pooled=True)),
        (rest, by_metric(found, FIGURE_METRICS[1:])),
    ):
        figure.savefig(folder / name, dpi=110)
        drawn.append(str(folder / name))
    return drawn


def _stand_in(case: PretrainedCase) -> str:
    return f"; stands in for {STANDS_FOR[case.name]}" if case.name in STANDS_FOR and not case.beside else ""


def _theirs(paper: Mapping[str, str], name: str) -> str | None:
    return f"{paper['network']}: {paper[name]}" if name in paper else None


def _pair(rho: float | None, tau: float | None) -> str | None:
    return None if rho is None or tau is None else f"{rho:.3f}/{tau:.3f}"
