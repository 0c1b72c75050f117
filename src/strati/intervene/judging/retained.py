"""How much of its performance a changed network keeps, and what that makes of the layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

    from strati.types import FloatArray


def retained_share(table: pd.DataFrame, performance: Mapping[str, Any]) -> FloatArray:
    """``(performance - chance) / (intact - chance)`` of every row.

    Perplexities are compared by their logarithms: on their own scale 5,000 would be closer to a good 20 than to
    the chance of 50,000. Without a known chance the share is performance over intact performance, or the inverse
    where less is better.

    Examples:
        >>> import pandas as pd
        >>> rows = pd.DataFrame({"performance": [0.9, 0.1], "intact_performance": [0.9, 0.9]})
        >>> retained_share(rows, {"name": "accuracy", "chance": 0.1, "higher_is_better": True}).tolist()
        [1.0, 0.0]
    """
    now, intact = table["performance"].to_numpy(float), table["intact_performance"].to_numpy(float)
    chance = performance.get("chance")
    with np.errstate(divide="ignore", invalid="ignore"):
        if chance is None:
            share = now / intact if performance["higher_is_better"] else intact / now
        else:
            if performance["name"] == "perplexity":
                now, intact, chance = np.log(now), np.log(intact), np.log(chance)
            share = (now - chance) / (intact - chance)
    return np.where(np.isfinite(share), share, np.nan)


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
