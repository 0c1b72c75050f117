"""``reproduce compressibility``: does the learning coefficient say how far a network can be compressed?

Urdshals et al. (2510.12077) find that the learning coefficient and the compressibility of Pythia checkpoints are
"closely, in some cases linearly" correlated. Both halves are measured here on networks trained here. The loss is the
mean Kullback-Leibler divergence from the network's own outputs, so that every checkpoint is a minimum of it. For a
tolerance ``eps`` in this loss:

- bits: all weights are rounded to the same number of bits; the least number that keeps the loss below ``eps``,
  interpolated, times the number of weights;
- rank: all matrices keep the same share of their singular directions; the parameters of the least share that does;
- both by the data-aware edits, which use the layers' inputs on the same rows: GPTQ, and truncation in the metric of the
  inputs;
- the learning coefficient ``lambda(eps)`` at the temperature that sees ``eps``, with one gamma for all networks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from strati import interventions as iv
from strati.core.files import write_atomic
from strati.core.results import Tick
from strati.interventions.audit.audit import audit
from strati.interventions.study import Study, study
from strati.landscape.llc.scales import effective_parameters
from strati_reproductions.compressibility.edited_losses import rounding_losses, size_at, truncation_losses
from strati_reproductions.compressibility.networks import (
    ADDITION,
    DIGITS,
    FULL,
    SMALL,
    Checkpoint,
    checkpoints,
)
from strati_reproductions.pictures import COLOURS, drawn, legend_below, panels, save
from strati_reproductions.registry import Reproduction, Row
from strati_reproductions.rows import Fact

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

GAMMA = 30.0
"""Localisation of every learning coefficient: weights move by 0.18 at most, about the size of a trained weight."""
TOLERANCES = (0.1, 0.3)
"""Nats of the mean Kullback-Leibler divergence."""
EDITS = {
    "bits": "bits",
    "bits_gptq": "bits by GPTQ",
    "rank": "rank",
    "rank_inputs": "rank in the metric of the inputs",
}
"""The edits, as attributes of :class:`Measured`, and their names in tables."""
_STRONG = 0.8
"""A rank correlation from which on two quantities are called closely correlated."""
_LAYER_BITS, _LAYER_SHARES = (1, 2, 3, 4, 5, 6), (0.2, 0.35, 0.5, 0.7, 0.85)
_AUDITED_SETTINGS = ("bits=2", "parameters=0.5")
_AUDITED_METRICS = (
    "learning_coefficient",
    "weights",
    "alpha",
    "stable_rank",
    "frobenius_norm",
    "relative_distance",
)
_LAYER_TOLERANCE = 0.1


@dataclass(frozen=True)
class Measured:
    """One network at one tolerance.

    Attributes:
        family: ``digits`` or ``addition``.
        run: The training it comes from.
        step: The step of the training.
        tolerance: In nats.
        weights: Entries of its matrices.
        norm: Root mean square of its weights.
        coefficient: ``lambda(eps)``; ``None`` where the chains allow no value.
        stderr: Its standard error.
        bits: Bits of all weights together at the tolerance.
        rank: Parameters at the tolerance when matrices are truncated.
        bits_gptq: ``bits`` when the rounding error of a column is compensated in the following ones.
        rank_inputs: ``rank`` when directions are chosen by what they contribute to the layer's outputs.
    """

    family: str
    run: str
    step: int
    tolerance: float
    weights: int
    norm: float
    coefficient: float | None
    stderr: float | None
    bits: float
    rank: float
    bits_gptq: float = 0.0
    rank_inputs: float = 0.0


def compressibility(*, quick: bool, seed: int, folder: Path, tick: Tick) -> Reproduction:
    """Measure both halves of the law on every network, fit it, predict held-out networks, and audit it per layer."""
    trainings = SMALL if quick else FULL
    tolerances = TOLERANCES[:1] if quick else TOLERANCES
    points: list[Measured] = []
    layer_rows: list[dict[str, Any]] = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the networks are small
    try:
        for checkpoint in checkpoints(trainings, seed, folder, tick):
            points += _stored(
                folder / "measured" / f"{checkpoint.name}.json",
                lambda c=checkpoint: [asdict(p) for p in measure(c, tolerances, seed)],  # type: ignore[misc]
                Measured,
            )
            if checkpoint.family == DIGITS and checkpoint.step == max(trainings.steps):
                layer_rows += _stored(
                    folder / "layers" / f"{checkpoint.name}.json",
                    lambda c=checkpoint: layer_study(c, seed),  # type: ignore[misc]
                    dict,
                )
            tick(checkpoint.name)
    finally:
        torch.set_num_threads(threads)
    refused = sum(p.coefficient is None for p in points)
    estimated = [p for p in points if p.coefficient is not None and p.coefficient > 0]
    rows = [
        _networks_row(points, refused),
        *(row for e in EDITS for t in tolerances for row in _law_rows(estimated, e, t)),
        *(row for e in EDITS for t in tolerances for row in _prediction_rows(estimated, e, t)),
        *_layer_rows(layer_rows),
    ]
    title = "Does the learning coefficient say how far a network can be compressed?"
    figures = drawn(_draw, estimated, tolerances[len(tolerances) // 2], folder)
    captions = {
        "law": "bits of all weights (top) and parameters after truncation (bottom) at the tolerance, by plain edits "
        "(left) and data-aware ones (right), against the learning coefficient at the same scale, a point for every "
        "checkpoint, a colour for every size. One law would put all of them on one line."
    }
    return Reproduction("compressibility", title, tuple(rows), figures, captions=captions)


def _stored(file: Path, compute: Callable[[], list[dict[str, Any]]], kind: Callable[..., Any]) -> list[Any]:
    """The records of a file, computed where it is absent."""
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, json.dumps(compute()) + "\n")
    return [kind(**record) for record in json.loads(file.read_text())]


def measure(checkpoint: Checkpoint, tolerances: Sequence[float], seed: int) -> list[Measured]:
    """Learning coefficients, bits and rank of one network at every tolerance."""
    model, x = checkpoint.model, checkpoint.x
    matrices = {n: p for n, p in model.named_parameters() if p.ndim == 2}
    weights = sum(p.numel() for p in matrices.values())
    norm = math.sqrt(sum(float(p.detach().square().sum()) for p in matrices.values()) / weights)
    curve = effective_parameters(model, x, scales=tolerances, loss="behavioural-kl", gamma=GAMMA, seed=seed)
    by_bits, by_rank = rounding_losses(checkpoint), truncation_losses(checkpoint)
    by_bits_gptq = rounding_losses(checkpoint, data_aware=True)
    by_rank_inputs = truncation_losses(checkpoint, data_aware=True)
    return [
        Measured(
            checkpoint.family,
            checkpoint.run,
            checkpoint.step,
            scale.epsilon,
            weights,
            norm,
            scale.coefficient,
            scale.stderr,
            weights * size_at(by_bits, scale.epsilon),
            size_at(by_rank, scale.epsilon),
            weights * size_at(by_bits_gptq, scale.epsilon),
            size_at(by_rank_inputs, scale.epsilon),
        )
        for scale in curve.rows
    ]


def layer_study(checkpoint: Checkpoint, seed: int) -> list[dict[str, Any]]:
    """Rows of a study of one network: every layer rounded and truncated, with its own learning coefficient."""
    measured = study(
        checkpoint.model,
        data=(checkpoint.x, checkpoint.y),
        performance="loss",
        interventions=[iv.quantise(bits=list(_LAYER_BITS)), iv.truncate(parameters=list(_LAYER_SHARES))],
        learning_coefficient=True,
        samples=len(checkpoint.x),
        seed=seed,
        workers=1,
    )
    sizes = {n: p.numel() for n, p in checkpoint.model.named_parameters()}
    return [
        dict(row) | {"network": checkpoint.run, "weights": sizes[f"{row['layer']}.weight"]}
        for row in json.loads(json.dumps(measured.rows))
    ]


def _networks_row(points: Sequence[Measured], refused: int) -> Row:
    runs = sorted({p.run for p in points})
    tolerances = ", ".join(f"{t:g}" for t in sorted({p.tolerance for p in points}))
    note = (
        f"{len(runs)} trainings; tolerances {tolerances} nats; gamma {GAMMA:g} everywhere; {refused} of {len(points)} "
        "coefficients were refused because chains did not mix. The first step was chosen after looking at step 20, "
        "where zeros in place of all weights keep the tolerance"
    )
    return Row("networks measured", None, float(len({(p.run, p.step) for p in points})), note)


def _law_rows(known: Sequence[Measured], edit: str, tolerance: float) -> list[Row]:
    """The correlation and the slope of size against coefficient, for each family, with intervals over trainings."""
    rows = []
    for family in dict.fromkeys(p.family for p in known):
        points = [
            p for p in known if p.family == family and p.tolerance == tolerance and getattr(p, edit) > 0
        ]
        if len(points) < 4:
            continue
        intervals = law(points, edit)
        rho, low, high = intervals["rank correlation"]
        where = f"{family}, {EDITS[edit]} at {tolerance:g} nats"
        facts: dict[str, Fact] = {"family": family, "edit": edit, "rho": rho, "low": low, "high": high}
        runs = len({p.run for p in points})
        note = f"95 % interval {low:.2f} to {high:.2f} over {runs} trainings; {len(points)} networks"
        rows.append(
            Row(f"{where}: rank correlation with lambda", "closely correlated", _rounded(rho), note, seeds=runs,
                key="law", facts=facts)
        )  # fmt: skip
        for what in ("exponent", "slope", "within a training"):
            middle, low, high = intervals[what]
            note = f"95 % interval {low:.3g} to {high:.3g}; {_MEANING[what]}"
            rows.append(Row(f"{where}: {what}", _PAPER.get(what), _rounded(middle), note, seeds=runs))
    return rows


_MEANING = {
    "exponent": "of a power law, fitted to the logarithms; 1 is proportional",
    "slope": "bits, or parameters, for every unit of lambda; least squares",
    "within a training": "mean rank correlation over the checkpoints of one training",
}
_PAPER = {"exponent": "1 where linear"}


def _rounded(value: float) -> float | None:
    return None if math.isnan(value) else float(f"{value:.4g}")


def law(points: Sequence[Measured], edit: str) -> dict[str, tuple[float, float, float]]:
    """Rank correlation, exponent, slope and the correlation within trainings: value and 95 % interval.

    The standard errors are those of a jackknife that leaves out one training at a time, since checkpoints of one
    training are not independent; correlations are transformed by atanh. The intervals use Student's t.
    """
    from scipy.stats import t

    runs = list(dict.fromkeys(p.run for p in points))
    values = _statistics(points, edit)
    left_out = [_statistics([p for p in points if p.run != run], edit) for run in runs]
    count = len(runs)
    quantile = float(t.ppf(0.975, max(count - 1, 1)))
    intervals = {}
    for name, statistic in values.items():
        correlation = name not in ("exponent", "slope")
        transformed = np.array([statistic, *(statistics[name] for statistics in left_out)])
        if correlation:
            transformed = np.arctanh(np.clip(transformed, -1 + 1e-9, 1 - 1e-9))
        spread = math.sqrt(
            (count - 1) / count * float(((transformed[1:] - transformed[1:].mean()) ** 2).sum())
        )
        ends = transformed[0] + quantile * spread * np.array([-1.0, 1.0])
        low, high = (np.tanh(ends) if correlation else ends).tolist()
        intervals[name] = (statistic, low, high)
    return intervals


def _statistics(points: Sequence[Measured], edit: str) -> dict[str, float]:
    from scipy.stats import spearmanr

    x = np.array([p.coefficient for p in points], float)
    y = np.array([getattr(p, edit) for p in points], float)
    if len(set(x)) < 3 or len(set(y)) < 3:
        return dict.fromkeys(("rank correlation", "exponent", "slope", "within a training"), float("nan"))
    by_run = [np.array([p.run == run for p in points]) for run in dict.fromkeys(p.run for p in points)]
    inside = [
        float(spearmanr(x[m], y[m]).statistic) for m in by_run if len(set(x[m])) > 2 and len(set(y[m])) > 1
    ]
    return {
        "rank correlation": float(spearmanr(x, y).statistic),
        "exponent": float(np.polyfit(np.log(x), np.log(y), 1)[0]),
        "slope": float(np.polyfit(x, y, 1)[0]),
        "within a training": float(np.mean(inside)) if inside else float("nan"),
    }


_PREDICTORS: dict[str, tuple[Callable[[Measured], float], ...]] = {
    "lambda": (lambda p: math.log(p.coefficient or 1.0),),
    "the number of weights": (lambda p: math.log(p.weights),),
    "the size of the weights": (lambda p: math.log(p.norm),),
    "number and size of the weights": (lambda p: math.log(p.weights), lambda p: math.log(p.norm)),
    "number of weights and lambda": (
        lambda p: math.log(p.weights),
        lambda p: math.log(p.coefficient or 1.0),
    ),
}


def _prediction_rows(known: Sequence[Measured], edit: str, tolerance: float) -> list[Row]:
    """The share of the variance that each predictor explains in trainings that were left out of the fit."""
    rows = []
    points = [p for p in known if p.tolerance == tolerance and getattr(p, edit) > 0]
    digits = [p for p in points if p.family == DIGITS]
    additions = [p for p in points if p.family == ADDITION]
    scores: dict[str, float] = {}
    for name, features in _PREDICTORS.items():
        if len({p.run for p in digits}) < 2 or len(digits) < 2 + len(features):
            continue
        scores[name] = held_out_share(digits, edit, features)
        note = (
            "each digits training predicted from the others, in logarithms; below 0 is worse than their mean"
        )
        facts: dict[str, Fact] = {
            "predictor": name,
            "edit": edit,
            "tolerance": tolerance,
            "share": scores[name],
        }
        rows.append(
            Row(f"{EDITS[edit]} at {tolerance:g} nats predicted from {name}: share explained", None,
                round(scores[name], 3), note, seeds=len({p.run for p in digits}), key="prediction", facts=facts)
        )  # fmt: skip
    if additions and len(digits) > 2:
        error = transfer_error(digits, additions, edit)
        note = "the power law fitted to the digits networks, applied to modular addition; 0 would be one law for both"
        rows.append(
            Row(f"{EDITS[edit]} at {tolerance:g} nats: median error of the digits' law on modular addition, decades",
                None, round(error, 3), note, seeds=len({p.run for p in additions}))
        )  # fmt: skip
    return rows


def held_out_share(
    points: Sequence[Measured], edit: str, features: Sequence[Callable[[Measured], float]]
) -> float:
    """One minus the squared error of predicting left-out trainings over that of predicting the others' mean."""
    errors, spreads = [], []
    for run in dict.fromkeys(p.run for p in points):
        others = [p for p in points if p.run != run]
        left_out = [p for p in points if p.run == run]
        target = _logarithms(others, edit)
        fit = np.linalg.lstsq(_design(others, features), target, rcond=None)[0]
        errors += ((_design(left_out, features) @ fit - _logarithms(left_out, edit)) ** 2).tolist()
        spreads += ((target.mean() - _logarithms(left_out, edit)) ** 2).tolist()
    return 1 - sum(errors) / sum(spreads)


def transfer_error(points: Sequence[Measured], others: Sequence[Measured], edit: str) -> float:
    """The median error, in decades, of the first networks' power law on the others."""
    features = _PREDICTORS["lambda"]
    fit = np.linalg.lstsq(_design(points, features), _logarithms(points, edit), rcond=None)[0]
    error = _logarithms(others, edit) - _design(others, features) @ fit
    return float(np.median(error) / math.log(10))


def _logarithms(points: Sequence[Measured], edit: str) -> Floats:
    return np.log([getattr(p, edit) for p in points])


def _design(points: Sequence[Measured], features: Sequence[Callable[[Measured], float]]) -> Floats:
    return np.array([[1.0, *(feature(p) for feature in features)] for p in points])


def _layer_rows(rows: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Each layer's own coefficient against its own tolerance, and the audit's verdicts at one setting of each edit."""
    if not rows:
        return []
    return [*_layer_tolerances(rows), *(row for s in _AUDITED_SETTINGS for row in _audited(rows, s))]


def layer_points(rows: Sequence[Mapping[str, Any]], kind: str, *, per_weight: bool) -> list[Measured]:
    """Layers as points: the coefficient, and the size at which changing only this layer costs the tolerance."""
    points = []
    for network, layer in dict.fromkeys((row["network"], row["layer"]) for row in rows):
        of_layer = [
            r for r in rows if (r["network"], r["layer"]) == (network, layer) and r["status"] == "done"
        ]
        coefficient = next(
            (r["learning_coefficient"] for r in of_layer if r.get("learning_coefficient")), None
        )
        edits = [r for r in of_layer if r["intervention"] == kind]
        if coefficient is None or not edits:
            continue
        weights = int(edits[0]["weights"])
        sizes = [float(r["setting"].partition("=")[2]) for r in edits]
        rises = [max(r["performance"] - r["intact_performance"], 1e-9) for r in edits]
        size = size_at(sorted(zip(sizes, rises, strict=True)), _LAYER_TOLERANCE)
        scale = 1 if per_weight else weights
        share = coefficient / weights if per_weight else coefficient
        points.append(
            Measured(
                layer, network, 0, _LAYER_TOLERANCE, weights, 0.0, share, None, size * scale, size * scale
            )
        )
    return points


def _layer_tolerances(rows: Sequence[Mapping[str, Any]]) -> list[Row]:
    table = []
    for kind, edit in (("quantise", "bits"), ("truncate", "rank")):
        for per_weight in (False, True):
            points = layer_points(rows, kind, per_weight=per_weight)
            if len(points) < 4:
                continue
            rho, low, high = law(points, edit)["rank correlation"]
            unit = "per weight" if per_weight else "of the layer"
            networks = len({p.run for p in points})
            note = f"95 % interval {low:.2f} to {high:.2f} over {networks} networks; {len(points)} layers"
            facts: dict[str, Fact] = {"edit": edit, "per_weight": per_weight, "rho": rho, "low": low}
            table.append(
                Row(f"per layer, {edit} at {_LAYER_TOLERANCE:g} nats: rank correlation with lambda, both {unit}", None,
                    _rounded(rho), note, seeds=networks, key="layer-law", facts=facts)
            )  # fmt: skip
    return table


def _audited(rows: Sequence[Mapping[str, Any]], setting: str) -> list[Row]:
    at_setting = tuple(r for r in rows if r["setting"] == setting or r["intervention"] == "intact")
    performance = {"name": "loss", "chance": math.log(10), "higher_is_better": False}
    verdicts = audit(Study("compressibility", performance, at_setting, len(at_setting))).verdicts
    table = []
    for verdict in (v for v in verdicts if v.metric in _AUDITED_METRICS and v.intervention is None):
        facts: dict[str, Fact] = {
            "metric": verdict.metric,
            "setting": setting,
            "recommendation": verdict.recommendation,
        }
        what = f"per layer, {setting}: audit of {verdict.metric}"
        table.append(Row(what, None, verdict.recommendation, verdict.text, key="layer-audit", facts=facts))
    return table


def _draw(known: Sequence[Measured], tolerance: float, folder: Path) -> tuple[str, ...]:
    figure, axes = panels(4, columns=2, title=f"Compressed to {tolerance:g} nats", size=(4.2, 3.0))
    groups = list(dict.fromkeys((p.family, p.weights) for p in known))
    for axis, (edit, label) in zip(axes, EDITS.items(), strict=True):
        for (family, weights), colour in zip(groups, COLOURS, strict=False):
            points = [p for p in known if (p.family, p.weights, p.tolerance) == (family, weights, tolerance)]
            axis.loglog(
                [p.coefficient for p in points],
                [getattr(p, edit) for p in points],
                "o",
                ms=4,
                color=colour,
                label=f"{family}, {weights:,} weights",
            )
        axis.set(xlabel="lambda at this scale", ylabel=label)
    legend_below(figure, axes)
    return save(figure, folder, "law")
