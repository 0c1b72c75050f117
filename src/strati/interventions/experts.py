r"""Experts of a mixture as units of compression: their scores on data, and networks with fewer of them.

A layer of experts is a module with a router, whose weight has one row per expert, and a module that stores all experts
in tensors of a common first dimension (transformers 5: Mixtral, Qwen-MoE, OLMoE and their kin). The score of expert
:math:`j` is REAP's saliency (Lasby et al., arXiv:2510.13999), the mean over the tokens routed to it of the router's
weight times the norm of its output, :math:`S_j = \mathrm{E}_{x \to j}\, g_j(x) \|f_j(x)\|_2`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from strati.core.errors import BadInputError
from strati.interventions.expert_removal import ExpertScores, expert_parts
from strati.interventions.targets import Change, Target, chosen_names, find_targets
from strati.interventions.tasks import forward

if TYPE_CHECKING:
    from strati.interventions.kinds import Point


def find_experts(
    model: nn.Module, patterns: Sequence[str] = ("*",), *, required: bool = True
) -> tuple[Target, ...]:
    """The layers of experts of a network, in its own order; ``shape`` is (experts, parameters of one).

    Raises:
        BadInputError: There is none, or none matches the patterns.
    """
    targets = []
    for name, module in model.named_modules():
        parts = expert_parts(module)
        if parts is not None:
            count = len(parts[0].weight)
            size = sum(p.numel() // count for p in parts[1].parameters(recurse=False))
            targets.append(Target(name, "experts", "experts", (count, size), False))
    if not targets and required:
        raise BadInputError("experts", "the network has no layer of experts that strati knows how to change")
    if not targets:
        return ()
    inner = [t.name for t in find_targets(model)]
    names = chosen_names(inner, patterns, whole=[t.name for t in targets])
    return tuple(t for t in targets if t.name in names)


@torch.inference_mode()
def score_experts(model: nn.Module, batches: Iterable[Tensor]) -> dict[str, ExpertScores]:
    """The scores of every layer of experts, from one pass over the data."""
    sums: dict[str, list[Any]] = {}
    hooks = []
    for target in find_experts(model):
        parts = expert_parts(model.get_submodule(target.name))
        assert parts is not None
        router, experts = parts

        def add(
            module: Any, args: tuple[Any, ...], options: dict[str, Any], _out: Any,
            name: str = target.name, router: Any = router,
        ) -> None:  # fmt: skip
            hidden, routed, weights = (*args, *options.values())[:3]
            count = len(router.weight)
            total = sums.setdefault(name, [np.zeros(count), np.zeros(count), 0, []])
            forward = type(module).forward
            for j in range(count):
                tokens, place = torch.where(routed == j)
                if len(tokens):
                    index = torch.full((len(tokens), 1), j)
                    output = forward(module, hidden[tokens], index, torch.ones(len(tokens), 1).to(weights))
                    saliency = weights[tokens, place].float() * output.float().norm(dim=-1)
                    total[0][j] += float(saliency.sum(dtype=torch.float64))
                    total[1][j] += len(tokens)
            total[2] += len(hidden)
            total[3].append((hidden.float() @ router.weight.float().T).cpu())

        hooks.append(experts.register_forward_hook(add, with_kwargs=True))
    try:
        for inputs in batches:
            forward(model, inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return {
        name: ExpertScores(
            saliency / np.maximum(routed, 1),
            routed / tokens,
            np.corrcoef(torch.cat(logits).T.double().numpy()),
        )
        for name, (saliency, routed, tokens, logits) in sums.items()
    }


def expert_change(
    model: nn.Module, target: Target, point: Point, scores: Mapping[str, ExpertScores]
) -> Change:
    """The change that drops or merges experts: those of least saliency, or the one named.

    Raises:
        BadInputError: Fewer experts would be left than the router chooses for a token, or there is no such expert.
    """
    parts = expert_parts(model.get_submodule(target.name))
    assert parts is not None
    setting, count = dict(point.setting), target.shape[0]
    needed = int(getattr(parts[0], "top_k", 1))
    saliency = scores[target.name].reap
    if "expert" in setting:
        dropped: tuple[int, ...] = (int(setting["expert"]),)
    else:
        dropping = setting["count"] if "count" in setting else round(setting["share"] * count)
        dropped = tuple(sorted(int(j) for j in np.argsort(saliency, kind="stable")[:dropping]))
    if dropped and max(dropped) >= count:
        raise BadInputError(target.name, f"has {count} experts; there is no expert {max(dropped)}")
    if count - len(dropped) < needed:
        why = f"has {count} experts, of which a token uses {needed}; {len(dropped)} cannot be removed"
        raise BadInputError(target.name, why)
    what = f"{point.intervention}: {', '.join(map(str, dropped))}"
    return Change(point.intervention, point.draw, None, None, what, point.text, experts=dropped)


def score_change(change: Change, scores: ExpertScores) -> dict[str, float | None]:
    """Summed saliency of the experts that a change removes, and the share of tokens routed to them."""
    dropped = list(change.experts)
    return {
        "reap": float(scores.reap[dropped].sum()),
        "routing_frequency": float(scores.frequency[dropped].sum()),
    }
