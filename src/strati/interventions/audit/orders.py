"""Which score orders layers, blocks or settings like the measured cost, intervention by intervention.

Across layers: Spearman's correlation of the score with the cost over the layers of one network at one setting, averaged
over settings, draws and networks. Across settings: the same over the settings of one layer, averaged over layers.
Positive means that a larger score goes with a larger cost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.core.rng import stream
from strati.interventions.audit.correlations import rank_correlations, resamples, spearman

if TYPE_CHECKING:
    import pandas as pd

    from strati.core.results import FloatArray
    from strati.interventions.audit.audit import AuditConfig

_RESAMPLES = 200
_LEAST_LAYERS, _LEAST_SETTINGS, _FEW = 5, 3, 10


@dataclass(frozen=True)
class OrderRow:
    """How a score orders layers, blocks or settings under one intervention.

    Attributes:
        intervention: What was done to the layers.
        across: ``layers``, ``blocks`` or ``settings``.
        metric: The score.
        spearman: Mean rank correlation with the measured cost.
        spearman_ci: Its interval.
        significant: Whether it differs from zero after a correction for the number of scores.
        as_good_as_best: Whether its strength cannot be told from that of the strongest score.
        n: Layers, blocks or, across settings, the layers that were averaged over.
    """

    intervention: str
    across: str
    metric: str
    spearman: float
    spearman_ci: tuple[float, float]
    significant: bool
    as_good_as_best: bool
    n: int


def order_rows(
    points: pd.DataFrame, names: Sequence[str], performance: Mapping[str, Any], config: AuditConfig
) -> list[OrderRow]:
    """One row per intervention, kind of order and score, the strongest first.

    Examples:
        >>> import pandas as pd
        >>> from strati.interventions.audit.audit import AuditConfig
        >>> rows = [{"network": "n", "layer": f"fc{i}", "type": "linear", "intervention": "zero", "setting": None,
        ...          "draw": 0, "performance": 1.0 + i, "size": i**2, "odd": (-1) ** i} for i in range(12)]
        >>> found = order_rows(pd.DataFrame(rows), ["size", "odd"], {"higher_is_better": False}, AuditConfig())
        >>> [(row.metric, round(row.spearman, 2), row.significant) for row in found]
        [('size', 1.0, True), ('odd', -0.14, False)]
    """
    sign = -1.0 if performance["higher_is_better"] else 1.0
    points = points.assign(
        cost=sign * points["performance"],
        text=points["setting"].astype(object).where(points["setting"].notna(), ""),
    )
    rows: list[OrderRow] = []
    for kind, part in points.groupby("intervention", sort=True):
        unit = "blocks" if set(part["type"]) == {"block"} else "layers"
        strengths = _across_layers(part, names, config, str(kind))
        rows += _rows(str(kind), unit, names, strengths, part["layer"].nunique(), config.confidence)
        strengths = _across_settings(part, names, config, str(kind))
        rows += _rows(str(kind), "settings", names, strengths, part["layer"].nunique(), config.confidence)
    return rows


def _across_layers(
    part: pd.DataFrame, names: Sequence[str], config: AuditConfig, kind: str
) -> FloatArray | None:
    """Mean correlation over the groups, in the first row as measured, below over resampled layers; (1 + R, scores)."""
    layers = list(dict.fromkeys(part["layer"]))
    if len(layers) < _LEAST_LAYERS:
        return None
    drawn = resamples(layers, _RESAMPLES, stream(config.seed, "audit", "orders", kind))
    place = {layer: i for i, layer in enumerate(layers)}
    total, count = np.zeros((_RESAMPLES + 1, len(names))), np.zeros((_RESAMPLES + 1, len(names)))
    for _, group in part.groupby(["network", "text", "draw"], sort=False):
        cost = group["cost"].to_numpy(float)
        counts = np.vstack([np.ones(len(group)), drawn[:, [place[layer] for layer in group["layer"]]]])
        for i, name in enumerate(names):
            score = group[name].to_numpy(float)
            defined = np.isfinite(score)
            if defined.sum() < _LEAST_LAYERS:
                continue
            rho = spearman(score[defined], cost[defined], counts[:, defined])
            total[:, i] += np.nan_to_num(rho)
            count[:, i] += np.isfinite(rho)
    with np.errstate(invalid="ignore"):
        return np.where(count > 0, total / count, np.nan)


def _across_settings(
    part: pd.DataFrame, names: Sequence[str], config: AuditConfig, kind: str
) -> FloatArray | None:
    by_layer = [
        rank_correlations(group[list(names)].to_numpy(float), group["cost"].to_numpy(float))[0]
        for _, group in part.groupby(["network", "layer", "draw"], sort=False)
        if group["text"].nunique() >= _LEAST_SETTINGS
    ]
    if len(by_layer) < _LEAST_LAYERS:
        return None
    values = np.array(by_layer)
    drawn = resamples(range(len(values)), _RESAMPLES, stream(config.seed, "audit", "settings", kind))
    weights, defined = np.vstack([np.ones(len(values)), drawn]), np.isfinite(values)
    with np.errstate(invalid="ignore"):
        means: FloatArray = (weights @ np.nan_to_num(values)) / (weights @ defined.astype(float))
    return means


def _rows(
    kind: str, across: str, names: Sequence[str], strengths: FloatArray | None, n: int, confidence: float
) -> list[OrderRow]:
    from scipy import stats

    if strengths is None:
        return []
    defined = [i for i in range(len(names)) if np.isfinite(strengths[0, i])]
    if not defined:
        return []
    # atanh(1) is infinite: a perfect order counts as halfway to the next best one, in which two neighbours are swapped.
    most = 1.0 - 6.0 / (n * (n * n - 1)) if across != "settings" else 0.9999
    z = np.arctanh(np.clip(strengths, -most, most))
    # Few layers that happen to be ordered alike resample to the same order: the error of one correlation is the least.
    floor = 0.0 if across == "settings" else 1.06 / np.sqrt(max(n - 3, 1))
    errors = np.maximum(np.nanstd(z[1:, :][:, defined], axis=0), floor)
    if across != "settings" and n < _FEW:  # resamples of few layers are mostly ties
        errors = np.full(len(defined), floor)
    defined.sort(key=lambda i: -abs(float(strengths[0, i])))
    error = dict(zip(sorted(defined), errors, strict=True))
    usual = float(stats.norm.ppf(0.5 + confidence / 2))
    strict = float(stats.norm.ppf(1 - (1 - confidence) / (2 * len(defined))))
    best = defined[0]
    rows = []
    for i in defined:
        low, high = np.tanh(z[0, i] + usual * error[i] * np.array([-1.0, 1.0]))
        gap = np.abs(z[1:, best]) - np.abs(z[1:, i])
        behind = abs(z[0, best]) - abs(z[0, i]) - usual * float(np.nanstd(gap)) > 0
        rows.append(
            OrderRow(
                *(kind, across, names[i], float(strengths[0, i]), (float(low), float(high))),
                *(bool(abs(z[0, i]) > strict * error[i]), not behind, n),
            )
        )
    return rows
