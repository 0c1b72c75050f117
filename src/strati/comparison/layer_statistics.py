"""Statistics over the layers of a comparison: roles, unusual layers, and layers over the checkpoints of a run.

Do layers of different roles differ? top-down-eigenspectra (section 3.2, figure 4) holds that attention and MLP layers
have different spectra; here that is a rank test (Mann-Whitney) with an effect size (Cliff's delta), corrected for
testing many metrics (Holm).

Which layers changed unlike the others of their role? The logarithm of the relative change is fitted by a line over
depth, and every layer is tested against the fit to the others: its externally studentised residual follows Student's t
with n - 3 degrees of freedom if the layer is one of them (n - 2 without a slope).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from strati.comparison.results import ComparedLayer
    from strati.core.results import FloatArray

METRICS = (
    *("alpha", "stable_rank", "entropy", "mp_sigma", "mp_soft_rank", "spectral_norm"),
    *("spikes_share", "quasi_null_share"),
)
"""The metrics compared between roles; shares are per eigenvalue."""

GROUPS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "attention against MLP": (("attention",), ("mlp",)),
    "attention q, k against v, out": (("attention.q", "attention.k"), ("attention.v", "attention.out")),
    "MLP in and gate against out": (("mlp.in", "mlp.gate"), ("mlp.out",)),
}
"""The comparisons made: two sets of role prefixes each."""

SERIES_METRICS = (
    *("phase", "alpha", "stable_rank", "hard_rank", "entropy", "mp_sigma", "spikes", "quasi_null"),
)
"""The metrics of a series of checkpoints."""

FEWEST = 5
"""Layers that a role must have for its layers to be tested."""


@dataclass(frozen=True)
class RoleDistribution:
    """One metric over the layers of one role."""

    role: str
    metric: str
    n: int
    median: float | None
    lower: float | None
    upper: float | None


@dataclass(frozen=True)
class Difference:
    """One metric, two groups of layers.

    Attributes:
        comparison: Which two groups.
        metric: The metric compared.
        n: Layers in the first and in the second group.
        medians: Of the two groups.
        effect: Cliff's delta, -1 to 1: the chance that a layer of the first group has the larger value, minus
            the chance that it has the smaller.
        pvalue: Mann-Whitney, two-sided, Holm-corrected over all metrics of the comparison.
    """

    comparison: str
    metric: str
    n: tuple[int, int]
    medians: tuple[float, float]
    effect: float
    pvalue: float


def distributions(rows: Sequence[Mapping[str, object]]) -> tuple[RoleDistribution, ...]:
    """Median and quartiles of every metric for every role.

    Args:
        rows: A mapping per layer with ``role`` and the metrics; values that are ``None`` are left out.
    """
    table = []
    for role in sorted({str(row["role"]) for row in rows}):
        for metric in METRICS:
            values = _values(rows, metric, (role,))
            quartiles = np.quantile(values, (0.25, 0.5, 0.75)).tolist() if values.size else [None] * 3
            low, median, high = quartiles
            table.append(RoleDistribution(role, metric, int(values.size), median, low, high))
    return tuple(table)


def differences(rows: Sequence[Mapping[str, object]], least: int = 4) -> tuple[Difference, ...]:
    """Test every metric between the groups of :data:`GROUPS` that have ``least`` layers or more each.

    Args:
        rows: A mapping per layer with ``role`` and the metrics.
        least: Smaller groups are not tested: no p-value below 0.05 could come out.

    Returns:
        The differences, p-values Holm-corrected within each comparison.

    Examples:
        >>> rows = [{"role": r, "alpha": v} for r, v in zip(["attention.q"] * 5 + ["mlp.in"] * 5, range(10))]
        >>> d = differences(rows)[0]
        >>> d.metric, d.effect, round(d.pvalue, 4)
        ('alpha', -1.0, 0.0079)
    """
    corrected: list[Difference] = []
    for comparison, groups in GROUPS.items():
        tests = []
        for metric in METRICS:
            first, second = (_values(rows, metric, group) for group in groups)
            if min(first.size, second.size) >= least:
                tests.append(_mann_whitney(comparison, metric, first, second))
        pvalues = holm([test.pvalue for test in tests])
        corrected += [replace(test, pvalue=p) for test, p in zip(tests, pvalues, strict=True)]
    return tuple(corrected)


def _mann_whitney(comparison: str, metric: str, a: FloatArray, b: FloatArray) -> Difference:
    from scipy.stats import mannwhitneyu

    statistic, pvalue = mannwhitneyu(a, b, alternative="two-sided", method="auto")
    effect = 2 * float(statistic) / (a.size * b.size) - 1
    medians = float(np.median(a)), float(np.median(b))
    return Difference(comparison, metric, (int(a.size), int(b.size)), medians, effect, float(pvalue))


def holm(pvalues: Sequence[float]) -> list[float]:
    """P-values corrected for their number (Holm 1979).

    Examples:
        >>> holm([0.01, 0.04, 0.03])
        [0.03, 0.06, 0.06]
    """
    order = np.argsort(pvalues, kind="stable")
    factors = np.arange(len(order), 0, -1)
    corrected = np.empty(len(order))
    corrected[order] = np.maximum.accumulate(
        np.minimum(factors * np.asarray(pvalues, np.float64)[order], 1.0)
    )
    return corrected.tolist()


def _values(rows: Sequence[Mapping[str, object]], metric: str, prefixes: tuple[str, ...]) -> FloatArray:
    numbers = [row.get(metric) for row in rows if str(row["role"]).startswith(prefixes)]
    return np.array([float(v) for v in numbers if isinstance(v, int | float)], dtype=np.float64)


@dataclass(frozen=True)
class StandsOut:
    """A layer beside the others of its role.

    Attributes:
        layer: Its name.
        role: Its role.
        relative_change: Its relative change.
        expected: The change that the others of its role predict.
        pvalue: Two-sided, Holm-corrected for the number of layers tested.
    """

    layer: str
    role: str
    relative_change: float
    expected: float
    pvalue: float


def stand_out(layers: Sequence[ComparedLayer]) -> tuple[StandsOut, ...]:
    """Test every layer of a role with enough layers; the most unusual come first.

    Args:
        layers: Compared layers; those that did not change are left out.

    Examples:
        >>> from types import SimpleNamespace as Layer
        >>> layers = [Layer(name=f"{i}", role="mlp.in", block=i, relative_change=0.01 + i % 3 / 1e4) for i in range(9)]
        >>> layers[4].relative_change = 0.05
        >>> first = stand_out(layers)[0]
        >>> first.layer, first.pvalue < 0.001
        ('4', True)
    """
    tests: list[StandsOut] = []
    for role in dict.fromkeys(layer.role for layer in layers):
        members = [layer for layer in layers if layer.role == role and layer.relative_change]
        if len(members) >= FEWEST:
            changes = np.array([layer.relative_change for layer in members], np.float64)
            depth = np.array([float(i if x.block is None else x.block) for i, x in enumerate(members)])
            pvalues, expected = _studentised(np.log(changes), depth)
            tests += [
                StandsOut(layer.name, role, float(change), float(np.exp(fit)), float(p))
                for layer, change, fit, p in zip(members, changes, expected, pvalues, strict=True)
            ]
    corrected = holm([test.pvalue for test in tests])
    order = sorted(range(len(tests)), key=lambda i: (corrected[i], tests[i].pvalue))
    return tuple(replace(tests[i], pvalue=corrected[i]) for i in order)


def _studentised(values: FloatArray, depth: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Two-sided p-value of each value against the others, and what they predict for it."""
    from scipy.stats import t

    count = values.size
    slope = count >= 8 and float(np.ptp(depth)) > 0
    design = np.stack([np.ones(count), depth - depth.mean()] if slope else [np.ones(count)], axis=1)
    freedom = count - 1 - design.shape[1]
    hat = design @ np.linalg.pinv(design)
    leverage = 1 - np.diag(hat)
    residuals = values - hat @ values
    without = residuals / leverage  # the distance from what the others predict
    # Values equal to rounding have no spread to measure against.
    squares = float(residuals @ residuals) - residuals * without
    spread = np.maximum(np.sqrt(np.maximum(squares, 0.0) / freedom), 1e-9)
    scores = np.abs(without) * np.sqrt(leverage) / spread
    return np.asarray(2 * t.sf(scores, freedom)), values - without


@dataclass(frozen=True)
class SeriesLayer:
    """One layer over training.

    ``leaves_random_like`` is the index of the first checkpoint after which the layer is known not to be random-like
    again; ``None`` where it ends random-like, and where its last phase is not known.
    """

    name: str
    role: str
    phase: tuple[str | None, ...]
    alpha: tuple[float | None, ...]
    stable_rank: tuple[float | None, ...]
    hard_rank: tuple[int | None, ...]
    entropy: tuple[float | None, ...]
    mp_sigma: tuple[float | None, ...]
    spikes: tuple[int | None, ...]
    quasi_null: tuple[int | None, ...]
    relative_change: tuple[float | None, ...]
    leaves_random_like: int | None


@dataclass(frozen=True)
class CheckpointSeries:
    """A training run: its checkpoints in order and every layer over them."""

    labels: tuple[str, ...]
    layers: tuple[SeriesLayer, ...]


def series_of(
    checkpoints: Sequence[Path], layers: Sequence[ComparedLayer], changes: Sequence[tuple[float | None, ...]]
) -> CheckpointSeries:
    """Put the layers of a training run in order of time.

    Args:
        checkpoints: Their paths, in order; the shortest endings that differ become the labels.
        layers: Each layer with its metrics in every checkpoint.
        changes: For each layer its relative change from the first checkpoint.
    """
    over_time = [
        SeriesLayer(
            name=layer.name,
            role=layer.role,
            relative_change=change,
            leaves_random_like=leaves_random_like(layer.metrics["phase"]),
            **{metric: layer.metrics[metric] for metric in SERIES_METRICS},
        )
        for layer, change in zip(layers, changes, strict=True)
    ]
    return CheckpointSeries(_labels(checkpoints), tuple(over_time))


def leaves_random_like(phases: Sequence[str | None]) -> int | None:
    """The first checkpoint with a known phase from which on a layer never is random-like again.

    Returns:
        The index; ``None`` if the layer ends random-like, or its last phase is not known.

    Examples:
        >>> leaves_random_like(["random-like", "bleeding-out", "random-like", "bulk+spikes"])
        3
        >>> leaves_random_like(["random-like", None, "bulk+spikes"]), leaves_random_like(["random-like", None])
        (2, None)
    """
    if not phases or phases[-1] in ("random-like", None):
        return None
    after = max((i + 1 for i, phase in enumerate(phases) if phase == "random-like"), default=0)
    return next(i for i in range(after, len(phases)) if phases[i] is not None)


def out_of_order(checkpoints: Sequence[Path]) -> bool:
    """Whether the step numbers in the checkpoints' names fail to ascend.

    Examples:
        >>> out_of_order([Path("step-200.pt"), Path("step-100.pt")])
        True
    """
    steps = [_step(path) for path in checkpoints]
    return any(a is not None and b is not None and b < a for a, b in pairwise(steps))


def _step(path: Path) -> int | None:
    """The last number in a checkpoint's name, or in its folder's."""
    for text in (path.stem, path.parent.name):
        numbers = re.findall(r"\d+", text)
        if numbers:
            return int(numbers[-1])
    return None


def _labels(paths: Sequence[Path]) -> tuple[str, ...]:
    for names in ([p.stem for p in paths], [p.name for p in paths], ["/".join(p.parts[-2:]) for p in paths]):
        if len(set(names)) == len(names):
            return tuple(names)
    return tuple(str(p) for p in paths)
