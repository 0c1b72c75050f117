"""Layers of experts with some experts removed or merged into others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from strati.core.errors import BadInputError

if TYPE_CHECKING:
    from strati.core.results import FloatArray


@dataclass(frozen=True)
class ExpertScores:
    """What the data say of the experts of one layer.

    Attributes:
        reap: Saliency of each expert; 0 for one that no token was routed to.
        frequency: Share of the tokens that are routed to each expert.
        affinity: Correlation of the router's logits over the tokens, expert by expert.
    """

    reap: FloatArray
    frequency: FloatArray
    affinity: FloatArray


def remove_experts(
    module: nn.Module, removed: Sequence[int], scores: ExpertScores | None = None, *, merge: bool = False
) -> Callable[[], None]:
    """Take experts out of a layer, with ``merge`` averaged into others first; returns what undoes it.

    A merged expert is added to the kept one whose router logits correlate most with its own (Li et al.,
    arXiv:2310.01334), weights averaged by the number of tokens; the router's row of the kept one stays.
    """
    parts = expert_parts(module)
    assert parts is not None
    router, experts = parts
    count = len(router.weight)
    remaining = [j for j in range(count) if j not in removed]
    mixing = torch.eye(count)
    if merge:
        if scores is None:
            raise BadInputError(
                "merge-experts", "needs data: the routing of tokens says what to merge with what"
            )
        into = {j: remaining[int(np.argmax(scores.affinity[j][remaining]))] for j in removed}
        weight = np.maximum(scores.frequency, 1e-12)
        for j, partner in into.items():
            mixing[partner, j] = float(weight[j] / weight[partner])
        mixing /= mixing.sum(1, keepdim=True)
    undo: list[tuple[Any, str, Any]] = []
    for part, mix in ((router, torch.eye(count)), (experts, mixing)):
        for name, parameter in list(part.named_parameters(recurse=False)):
            if parameter.shape[0] == count:
                values = torch.tensordot(mix[remaining].to(parameter), parameter.detach(), 1)
                undo.append((part, name, parameter))
                setattr(part, name, nn.Parameter(values, requires_grad=parameter.requires_grad))
    for part in (module, router, experts):
        for name, number in list(vars(part).items()):
            if name in ("num_experts", "num_local_experts", "n_routed_experts") and number == count:
                undo.append((part, name, number))
                setattr(part, name, len(remaining))

    def restore() -> None:
        for part, name, original in undo:
            setattr(part, name, original)

    return restore


def expert_parts(module: nn.Module) -> tuple[Any, Any] | None:
    """The router and the stacked experts of a layer of experts."""
    children = list(module.children())
    for experts in children:
        stacked = [p for p in experts.parameters(recurse=False) if p.ndim == 3]
        if not stacked or len({p.shape[0] for p in stacked}) != 1:
            continue
        for router in children:
            weight = getattr(router, "weight", None)
            if isinstance(weight, Tensor) and weight.ndim == 2 and weight.shape[0] == stacked[0].shape[0]:
                return router, experts
    return None
