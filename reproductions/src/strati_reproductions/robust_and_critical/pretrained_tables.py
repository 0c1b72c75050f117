"""What ``reproduce pretrained`` shows of each network: tables 2 and 3 and figures 5, 6, 8-11 of the paper, in its form.

Running the studies is ``pretrained``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.interventions.audit.audit import Audit, MetricRow, audit
from strati.interventions.study import Study
from strati.interventions.study_config import StudyConfig
from strati.spectra.scan import scan
from strati_reproductions.pictures import save
from strati_reproductions.registry import Row
from strati_reproductions.rows import Value

if TYPE_CHECKING:
    from torch import nn

FIGURE_METRICS = (
    *("alpha", "alpha_weighted", "log_alpha_norm", "mp_soft_rank"),
    *("spectral_norm", "stable_rank", "entropy", "frobenius_norm"),
)
MEASURED = {
    "resnet20": {"accuracy": 91.73, "alpha pool": 4.177, "alpha flatten": 4.635},
    "stories15m": {"loss": 1.136},
    "smollm2": {"perplexity": 17.6},
}
"""Measured before, when these networks were chosen."""
STORIES_W1 = (7.70, 4.40, 3.07, 2.21, 1.95, 3.66)
STANDS_FOR = {
    "resnet20": "ResNet34",
    "vit-cifar10": "ViT",
    "stories15m": "GPT-2",
    "stories15m-initial": "GPT-2",
    "smollm2": "GPT-2-Large",
}
"""Networks that are available, and the networks of the paper that they stand in for."""


@dataclass(frozen=True)
class Line:
    """A network's line of table 2 or 3, and of its figure: the correlations of alpha, mean over layers."""

    parameters: str
    alpha: float
    alpha_error: float
    spearman: float
    kendall: float
    measures: Mapping[str, float]


PAPER = {
    "ResNet34": Line("21.8M", 3.380, 0.195, 0.006, 0.005, {"loss": 1.071, "accuracy": 73.302}),
    "ViT": Line("86.6M", 4.711, 0.271, -0.051, -0.035, {"loss": 0.825, "accuracy": 78.852}),
    "GPT-2": Line("127M", 3.865, 0.136, 0.028, 0.018, {"loss": 3.399, "perplexity": 29.941}),
    "GPT-2-Large": Line("774M", 4.013, 0.091, 0.116, 0.078, {"loss": 2.967, "perplexity": 19.436}),
}


@dataclass(frozen=True)
class PretrainedCase:
    """A network, what it is measured on, and where the paper has one like it.

    ``same_as`` names the network of the paper that this one is.
    ``whole`` are the data for the network's line of the table where its changed layers are measured on a part.
    """

    name: str
    models: Mapping[str, nn.Module]
    config: StudyConfig
    size: str
    table: str
    figures: tuple[str, str]
    data: Any = None
    whole: Any = None
    evaluate: Callable[[nn.Module], float] | None = None
    same_as: str | None = None

    @property
    def paper(self) -> Line | None:
        """The paper's line to compare with."""
        return PAPER.get(self.same_as or STANDS_FOR.get(self.name, ""))

    @property
    def label(self) -> str:
        """The network, and the one of the paper that it stands in for."""
        other = None if self.same_as else STANDS_FOR.get(self.name)
        return f"{self.name} (for {other})" if other else self.name

    def theirs(self, value: float | str | None) -> Value:
        """The paper's number; for a stand-in, with the name of the paper's network."""
        if value is None or self.same_as:
            return value
        return f"{value} ({STANDS_FOR.get(self.name)})"


def case_rows(case: PretrainedCase, measured: Study) -> list[Row]:
    """The network's line of its table, the correlations of its figures, and the classes of its layers."""
    verdict = audit(measured)
    rows = [*_table(case, measured), *_correlations(case, verdict)]
    classes = [row.layer_class for row in verdict.layers]
    share = ", ".join(f"{classes.count(k)} {k}" for k in ("robust", "mixed", "critical"))
    rows.append(Row(f"{case.label}: layers by class", None, share, f"{measured.failed} points failed"))
    rows += [
        Row(f"{case.label}: verdict on {v.metric}", None, None, v.text)
        for v in verdict.verdicts
        if v.metric in ("alpha", "activation_disagreement") and v.intervention is None
    ]
    if case.name == "stories15m":
        rows += _first_matrices(measured)
    return rows


def _table(case: PretrainedCase, measured: Study) -> list[Row]:
    """Parameters, loss, accuracy or perplexity, mean layer alpha with its standard error, as in tables 2 and 3."""
    paper = case.paper
    table = measured.frame()
    intact = table[(table["status"] == "done") & (table["intervention"] == "intact")]
    alphas = intact["alpha"].dropna().to_numpy(float)
    where = f"{case.table}, {case.label}"
    parameters = f"{sum(p.numel() for p in next(iter(case.models.values())).parameters()) / 1e6:.1f}M"
    rows = [
        Row(f"{where}: parameters", case.theirs(paper.parameters if paper else None), parameters, case.size)
    ]
    for name, performance in _performances(case, float(intact["intact_performance"].mean())).items():
        earlier = MEASURED.get(case.name, {}).get(name)
        note = "" if earlier is None else "before: measured on all data when it was chosen"
        theirs = case.theirs(paper.measures.get(name) if paper else None)
        rows.append(Row(f"{where}: {name}", theirs, round(performance, 3), note, before=earlier))
    error = round(float(alphas.std(ddof=1) / len(alphas) ** 0.5), 3) if len(alphas) > 1 else None
    paper_alpha = (
        None if paper is None else paper.alpha if case.same_as else f"{paper.alpha} +- {paper.alpha_error}"
    )
    note = f"error over {len(alphas)} layers" + (f"; the paper's is {paper.alpha_error}" if paper else "")
    rows.append(
        Row(
            f"{where}: mean layer alpha",
            case.theirs(paper_alpha),
            round(float(alphas.mean()), 3),
            note,
            error=error,
        )
    )
    return rows + _both_ways(where, case)


def _both_ways(where: str, case: PretrainedCase) -> list[Row]:
    """The mean alpha of a convolutional network with its kernels pooled and flattened: the paper says not which."""
    model = next(iter(case.models.values()))
    if not any(p.ndim == 4 for p in model.parameters()):
        return []
    rows = []
    for conv in ("pool", "flatten"):
        alphas = scan(model, conv=conv).table["alpha"].dropna().to_numpy(float)
        error = round(float(alphas.std(ddof=1) / len(alphas) ** 0.5), 3)
        what = f"{where}: mean layer alpha, kernels {'pooled' if conv == 'pool' else 'flattened'}"
        earlier = MEASURED.get(case.name, {}).get(f"alpha {conv}")
        mean = round(float(alphas.mean()), 3)
        rows.append(Row(what, None, mean, f"{len(alphas)} layers", error=error, before=earlier))
    return rows


def _performances(case: PretrainedCase, intact: float) -> dict[str, float]:
    """Every measure the paper's table has of such a network, from the one that was recorded or by one pass."""
    measure = str(case.config.performance)
    inputs = case.data if case.whole is None else case.whole
    passed = partial(_passed, next(iter(case.models.values())), inputs, case.config.batch)
    if case.whole is not None:
        intact = passed(measure)
    if measure == "accuracy":
        return {"loss": passed("loss"), "accuracy": 100 * intact}
    if measure == "loss":
        return {"loss": intact, "perplexity": math.exp(intact)}
    if measure == "perplexity":
        return {"loss": math.log(intact), "perplexity": intact}
    return {measure: intact}


def _passed(model: nn.Module, inputs: Any, batch: int, measure: str) -> float:
    """A measure of the intact network, by one pass over the data."""
    from strati.interventions.cached_forward import whole_performance
    from strati.interventions.tasks import make_task

    return whole_performance(model, make_task(inputs, measure, batch))


def _correlations(case: PretrainedCase, verdict: Audit) -> list[Row]:
    """Of each metric rho, tau and RMSE: mean over layers (as the paper has it for alpha), and of all points."""
    paper = case.paper
    means = {row.metric: row for row in verdict.means}
    within = {v.metric: v.spearman_within_types for v in verdict.verdicts if v.intervention is None}
    rows = []
    for metric in FIGURE_METRICS:
        where = f"{case.figures[0] if metric == 'alpha' else case.figures[1]}, {case.label}: {metric}"
        pooled = next(m for m in verdict.metrics if m.metric == metric and m.layer is None)
        mean = means[metric]
        over = f"over {mean.layers} layers" if mean.layers else "needs three draws of a layer at least"
        draws = case.config.draws
        if metric == "alpha":
            error = (mean.layers * max(1, draws - 1)) ** -0.5 if mean.layers else None
            for name, theirs, ours, standard_error in (
                ("Spearman", paper.spearman if paper else None, mean.spearman, error),
                ("Kendall", paper.kendall if paper else None, mean.kendall, error and 2 * error / 3),
                ("RMSE of the line", None, mean.rmse, None),
            ):
                what = f"{where}, mean {name} over layers"
                note = (
                    over
                    if case.same_as or paper is None or theirs is None
                    else f"{over}; the paper's is of {_whose(case)}: another network and other data"
                )
                facts = {"network": case.name, "metric": metric, "statistic": name}
                rows.append(
                    Row(
                        what,
                        theirs,
                        _three(ours),
                        note,
                        error=_three(standard_error),
                        seeds=draws,
                        key="mean-correlation",
                        facts=facts,
                    )
                )
        else:
            numbers = _triple(mean.spearman, mean.kendall, mean.rmse)
            rows.append(Row(f"{where}, mean rho / tau / RMSE over layers", None, numbers, over, seeds=draws))
        numbers = _triple(pooled.spearman, pooled.kendall, pooled.rmse)
        rows.append(
            Row(f"{where}, all points rho / tau / RMSE", None, numbers, _note(pooled, within.get(metric)))
        )
    return rows


def _whose(case: PretrainedCase) -> str:
    return STANDS_FOR.get(case.name, "")


def _three(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _note(pooled: MetricRow, within: float | None) -> str:
    parts = [f"n {pooled.n}"]
    if pooled.spearman_ci is not None:
        parts.append(f"95 % of rho [{pooled.spearman_ci[0]:.2f}, {pooled.spearman_ci[1]:.2f}]")
    if within is not None:
        parts.append(f"rho within layer types {within:.2f}")
    return ", ".join(parts)


def _first_matrices(measured: Study) -> list[Row]:
    table = measured.frame()
    changed = table[(table["status"] == "done") & (table["intervention"] == "rerandomise")]
    rows = []
    for block, loss in enumerate(STORIES_W1):
        losses = changed[changed["layer"] == f"model.layers.{block}.mlp.gate_proj"]["performance"].to_numpy(
            float
        )
        if len(losses) == 0:
            continue
        note = (
            f"draws from {losses.min():.2f} to {losses.max():.2f}; before: measured once, with another draw"
        )
        what = f"stories15m (for GPT-2): loss with w1 of layer {block} re-randomised"
        error = round(float(losses.std(ddof=1) / len(losses) ** 0.5), 3) if len(losses) > 1 else None
        rows.append(
            Row(
                what,
                None,
                round(float(np.mean(losses)), 2),
                note,
                before=loss,
                error=error,
                seeds=len(losses),
            )
        )
    return rows


def case_figures(case: PretrainedCase, measured: Study, folder: Path) -> tuple[str, ...]:
    """Figures 5 and 6: performance against alpha; figures 8 to 11: against the other metrics, one panel each."""
    from strati.report.plots.study import scatter

    alone, others = (f"{name.replace(',', '').replace(' ', '-')}-{case.name}" for name in case.figures)
    return (
        *save(scatter(measured, "alpha", pooled=True), folder, alone),
        *save(scatter(measured, FIGURE_METRICS[1:]), folder, others),
    )


def case_captions(case: PretrainedCase) -> dict[str, str]:
    """What to see in a network's two figures."""
    alone, others = (f"{name.replace(',', '').replace(' ', '-')}-{case.name}" for name in case.figures)
    what = case.config.performance
    return {
        alone: f"{what} of {case.label} with one layer re-randomised, a point per layer and draw, against alpha: no "
        "line through the cloud says more than a flat one.",
        others: "the same against the other metrics. What correlation there is comes from the kinds of layers (see rho "
        "within layer types in the notes), not from a layer's own draws.",
    }


def _triple(rho: float | None, tau: float | None, rmse: float | None) -> str | None:
    if rho is None or tau is None:
        return None
    return f"{rho:.3f} / {tau:.3f} / {'-' if rmse is None else f'{rmse:.3g}'}"
