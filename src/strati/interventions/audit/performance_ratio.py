"""How much of its performance a changed network keeps, and what that makes of the layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

    from strati.core.results import FloatArray


def retained_share(table: pd.DataFrame, performance: Mapping[str, Any]) -> FloatArray:
    """``(performance - chance) / (intact - chance)`` of every row.

    Perplexities are compared by their logarithms: on their own scale 5,000 would be closer to a good 20 than to
    the chance of 50,000. Without a known chance the share is performance over intact performance; where less is
    better, or a good value is below zero (a log-likelihood), the inverse of that, and ``2 - ratio`` where the change
    improved it, so that no row counts for more than two.

    Examples:
        >>> import pandas as pd
        >>> rows = pd.DataFrame({"performance": [0.9, 0.1], "intact_performance": [0.9, 0.9]})
        >>> retained_share(rows, {"name": "accuracy", "chance": 0.1, "higher_is_better": True}).tolist()
        [1.0, 0.0]
        >>> rows = pd.DataFrame({"performance": [-2.0, -8.0], "intact_performance": [-2.0, -2.0]})
        >>> retained_share(rows, {"name": "log-likelihood", "chance": None, "higher_is_better": True}).tolist()
        [1.0, 0.25]
    """
    now, intact = table["performance"].to_numpy(float), table["intact_performance"].to_numpy(float)
    chance = performance.get("chance")
    with np.errstate(divide="ignore", invalid="ignore"):
        if chance is None:
            share = _of_ratio(now, intact) if performance["higher_is_better"] else _of_ratio(-now, -intact)
        else:
            if performance["name"] == "perplexity":
                now, intact, chance = np.log(now), np.log(intact), np.log(chance)
            share = (now - chance) / (intact - chance)
    return np.where(np.isfinite(share), share, np.nan)


def _of_ratio(now: FloatArray, intact: FloatArray) -> FloatArray:
    """The share of values of which more is better; below zero their ratio counts what is lost."""
    ratio = now / intact
    below = np.where(ratio >= 1, 1 / ratio, 2 - ratio)
    return np.where(intact > 0, ratio, np.where(intact < 0, below, 1 + np.sign(now)))


def classify(share: float | None, robust: float, critical: float) -> str:
    """``robust``, ``critical`` or ``mixed`` by the share of performance retained.

    Examples:
        >>> [classify(share, 0.9, 0.5) for share in (0.95, 0.7, 0.1)]
        ['robust', 'mixed', 'critical']
    """
    if share is None:
        return "mixed"
    if share >= robust:
        return "robust"
    return "critical" if share <= critical else "mixed"
