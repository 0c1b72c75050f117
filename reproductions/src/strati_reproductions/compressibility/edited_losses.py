"""The loss of a network with all matrices rounded or truncated alike, and the least size that keeps a tolerance.

The loss is the mean Kullback-Leibler divergence from the outputs of the intact network.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from strati import interventions as iv
from strati.interventions.edits import truncated_parameters
from strati_reproductions.compressibility.networks import Checkpoint

_DATA_AWARE = ("method", "metric")
_BITS = range(1, 11)
_SHARES = np.arange(1, 17) / 16


def rounding_losses(checkpoint: Checkpoint, *, data_aware: bool = False) -> list[tuple[float, float]]:
    """Bits per weight and the loss with all matrices rounded to them; 0 bits are matrices of zeros."""
    reference = _log_outputs(checkpoint)
    method = {"method": "gptq"} if data_aware else {}
    losses = [(0.0, _divergence(checkpoint, reference, "zero", None))]
    return losses + [
        (float(b), _divergence(checkpoint, reference, "quantise", {"bits": b} | method)) for b in _BITS
    ]


def truncation_losses(checkpoint: Checkpoint, *, data_aware: bool = False) -> list[tuple[float, float]]:
    """Parameters and the loss with all matrices truncated to the same share of their singular directions."""
    reference = _log_outputs(checkpoint)
    metric = {"metric": "inputs"} if data_aware else {}
    shapes = [(p.shape[0], p.shape[1]) for p in checkpoint.model.parameters() if p.ndim == 2]
    losses = [(0.0, _divergence(checkpoint, reference, "zero", None))]
    for share in _SHARES:
        ranks = [max(1, round(share * min(shape))) for shape in shapes]
        size = sum(truncated_parameters(a, b, k) for (a, b), k in zip(shapes, ranks, strict=True))
        settings = [{"rank": rank} | metric for rank in ranks]
        losses.append((float(size), _divergence(checkpoint, reference, "truncate", settings)))
    return losses


def size_at(losses: Sequence[tuple[float, float]], tolerance: float) -> float:
    """The least size from which on the loss stays below the tolerance, interpolated in the logarithm of the loss.

    Examples:
        >>> round(size_at([(0, 1.0), (1, 0.1), (2, 0.01)], 0.1), 6)
        1.0
        >>> round(size_at([(0, 1.0), (2, 0.01)], 0.1), 6)
        1.0
        >>> size_at([(0, 0.01), (1, 0.001)], 0.1)
        0.0
    """
    above = [place for place, (_, loss) in enumerate(losses) if loss > tolerance]
    if not above:
        return float(losses[0][0])
    if above[-1] + 1 == len(losses):
        return float(losses[-1][0])
    (small, high), (large, low) = losses[above[-1]], losses[above[-1] + 1]
    share = math.log(high / tolerance) / math.log(high / max(low, 1e-12))
    return float(small + share * (large - small))


@torch.no_grad()
def _log_outputs(checkpoint: Checkpoint) -> torch.Tensor:
    return checkpoint.model(checkpoint.x).log_softmax(-1)  # type: ignore[no-any-return]


def _divergence(checkpoint: Checkpoint, reference: torch.Tensor, kind: str, setting: Any) -> float:
    """The mean divergence from the intact outputs with every matrix changed; embeddings have no inputs to use."""
    names = [n.removesuffix(".weight") for n, p in checkpoint.model.named_parameters() if p.ndim == 2]
    settings = dict(zip(names, setting if isinstance(setting, list) else [setting] * len(names), strict=True))
    for name in names:
        if settings[name] and isinstance(checkpoint.model.get_submodule(name), torch.nn.Embedding):
            settings[name] = {k: v for k, v in settings[name].items() if k not in _DATA_AWARE}
    with iv.intervened(checkpoint.model, kind, settings, calibration=checkpoint.x):
        outputs = _log_outputs(checkpoint)
    return float((reference.exp() * (reference - outputs)).sum(-1).mean())
