r"""Costs corrected for layers that harm each other: weights per layer, learned from combinations that were measured.

Changing two layers together may cost more or less than both costs added. With :math:`c_{lj}` the cost that layer
:math:`l` was measured to have alone under its setting in combination :math:`j`, and :math:`m_j` what the combination
really cost, the weights :math:`w` are those of ridge regression around one common ratio :math:`r`:

.. math:: \min_w \sum_j \Big(\frac{m_j - \sum_l w_l c_{lj}}{s\, m_j}\Big)^2 + \sum_l \Big(\frac{w_l - r}{r}\Big)^2 .

A handful of combinations cannot tell all layers apart; where they say nothing, a weight stays at the ratio.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from strati.core.results import FloatArray
    from strati.interventions.compress.curves import Curve
    from strati.interventions.compress.predict import Combination

_SCATTER = 0.1
"""Relative error that a sum of weighted costs is allowed to have."""
_LEAST = 0.1
"""No layer's weight falls below this share of the common ratio: a harm seen alone is not explained away."""


def layer_weights(curves: Sequence[Curve], combinations: Sequence[Combination]) -> FloatArray | None:
    """What each layer's costs have to be multiplied by; ``None`` where the combinations cannot tell.

    Examples:
        >>> from strati.interventions.compress.budget import Shape
        >>> from strati.interventions.compress.curves import Curve, CurveOption
        >>> from strati.interventions.compress.predict import Combination
        >>> options = (CurveOption("bits=2", 2.0, 1.0, 0.0), CurveOption("keep", 16.0, 0.0, 0.0))
        >>> curves = [Curve(name, "linear", Shape(1, 1, 1), options) for name in "ab"]
        >>> seen = [Combination((0, 1), 1.0, 3.0), Combination((1, 0), 1.0, 1.0), Combination((0, 0), 2.0, 4.0)]
        >>> [round(float(w), 1) for w in layer_weights(curves, seen)]
        [3.0, 1.0]
    """
    measured_combinations = [
        c for c in combinations if c.measured is not None and math.isfinite(c.measured) and c.measured > 0
    ]
    measured_combinations = list(
        {
            c.options: c for c in measured_combinations if c.predicted > 2.0 * c.error and c.predicted > 0
        }.values()
    )
    if len(measured_combinations) < 2 or len(curves) < 2:
        return None
    alone = np.array(
        [[c.options[o].cost for c, o in zip(curves, k.options, strict=True)] for k in measured_combinations]
    )
    measured = np.array([float(k.measured or 0.0) for k in measured_combinations])
    ratio = math.exp(float(np.mean(np.log(measured / alone.sum(1)))))
    scaled = alone * ratio / (_SCATTER * measured[:, None])
    off = (measured - ratio * alone.sum(1)) / (_SCATTER * measured)
    # w = r (1 + d), d by ridge regression; as many equations as combinations, which are fewer than layers.
    d = scaled.T @ np.linalg.solve(scaled @ scaled.T + np.eye(len(measured_combinations)), off)
    weights: FloatArray = ratio * np.maximum(1.0 + d, _LEAST)
    return weights
