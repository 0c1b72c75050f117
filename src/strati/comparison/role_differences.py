"""Do layers of different roles differ? Distributions per role and a test of the difference.

top-down-eigenspectra (section 3.2, figure 4) holds that attention and MLP layers have different spectra; here the
claim is a rank test (Mann-Whitney) with an effect size (Cliff's delta), corrected for testing many metrics (Holm).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from strati.core.results import FloatArray

METRICS = (
    "alpha",
    "stable_rank",
    "entropy",
    "mp_sigma",
    "mp_soft_rank",
    "spectral_norm",
    "spikes_share",
    "quasi_null_share",
)
"""What is compared between roles; the shares are per eigenvalue."""

GROUPS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "attention against MLP": (("attention",), ("mlp",)),
    "attention q, k against v, out": (("attention.q", "attention.k"), ("attention.v", "attention.out")),
    "MLP in and gate against out": (("mlp.in", "mlp.gate"), ("mlp.out",)),
}
"""The comparisons made: two sets of role prefixes each."""


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
    roles = sorted({str(row["role"]) for row in rows})
    found = []
    for role in roles:
        for metric in METRICS:
            values = _values(rows, metric, (role,))
            cuts = np.quantile(values, (0.25, 0.5, 0.75)).tolist() if values.size else [None] * 3
            found.append(RoleDistribution(role, metric, int(values.size), cuts[1], cuts[0], cuts[2]))
    return tuple(found)


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
    found: list[Difference] = []
    for comparison, (first, second) in GROUPS.items():
        tested = []
        for metric in METRICS:
            a, b = (_values(rows, metric, group) for group in (first, second))
            if min(a.size, b.size) >= least:
                tested.append(_test(comparison, metric, a, b))
        corrected = holm([d.pvalue for d in tested])
        found += [replace(d, pvalue=p) for d, p in zip(tested, corrected, strict=True)]
    return tuple(found)


def _test(comparison: str, metric: str, a: FloatArray, b: FloatArray) -> Difference:
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
    corrected = [1.0] * len(pvalues)
    running = 0.0
    for rank, i in enumerate(sorted(range(len(pvalues)), key=lambda i: pvalues[i])):
        running = max(running, min(1.0, (len(pvalues) - rank) * pvalues[i]))
        corrected[i] = running
    return corrected


def _values(rows: Sequence[Mapping[str, object]], metric: str, prefixes: tuple[str, ...]) -> FloatArray:
    picked = [r.get(metric) for r in rows if str(r["role"]).startswith(prefixes)]
    return np.array([float(v) for v in picked if isinstance(v, int | float)], dtype=np.float64)
