"""What a low-rank update could hold of the loss's gradient: a guess at adapter ranks where nothing was fine-tuned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional

from strati.core.errors import BadInputError
from strati.interventions.compress.budget import Shape
from strati.interventions.compress.curves import KEEP, Curve, CurveOption
from strati.interventions.edits import Directions
from strati.interventions.targets import as_matrix, find_targets
from strati.interventions.tasks import IGNORED

if TYPE_CHECKING:
    from strati.interventions.compress.evaluator import InterventionEvaluator

RANKS = (0, 1, 2, 4, 8, 16, 32, 64, 128)


def gradient_curves(
    evaluators: Sequence[InterventionEvaluator], layers: Sequence[str] = ("*",)
) -> list[Curve]:
    """For every layer and rank: the share of the gradient's energy that an update of that rank cannot hold.

    One gradient of the mean loss over the study's data. It says what the first step of training would want, not what
    training would reach; a plan from it is marked as a guess.

    Raises:
        BadInputError: There is no network or no data to take a gradient of.
    """
    if not evaluators or evaluators[0].subject.task is None:
        why = "needs measured 'adapt' rows (strati.adapt(base, rank=[...])), or the network and data for its gradient"
        raise BadInputError("adapt", why)
    subject = evaluators[0].subject
    model: Any = subject.model
    assert subject.task is not None
    targets = [t for t in find_targets(model, layers) if t.kind != "embedding"]
    if not targets:
        raise BadInputError("layers", f"no layer matches {', '.join(layers)}")
    weights = [model.get_submodule(t.name).weight for t in targets]
    flags = [w.requires_grad for w in weights]
    total = [torch.zeros_like(w) for w in weights]
    try:
        for weight in weights:
            weight.requires_grad_(True)
        for inputs, answers in subject.task.batches:
            with torch.enable_grad():
                logits = subject.task.output(model, inputs)
                loss = functional.cross_entropy(
                    logits.reshape(-1, logits.shape[-1]).float(),
                    answers.reshape(-1),
                    ignore_index=IGNORED,
                    reduction="sum",
                )
                for sum_, gradient in zip(total, torch.autograd.grad(loss, weights), strict=True):
                    sum_ += gradient
    finally:
        for weight, flag in zip(weights, flags, strict=True):
            weight.requires_grad_(flag)
    energies = [
        Directions(as_matrix(g.numpy(), t.kind)).energies for g, t in zip(total, targets, strict=True)
    ]
    everything = sum(float(e.sum()) for e in energies) or 1.0
    curves = []
    for target, energy, weight in zip(targets, energies, weights, strict=True):
        rows, cols = as_matrix(np.empty(tuple(weight.shape), np.float32), target.kind).shape
        options = [
            CurveOption(f"rank={r}", float(r), float(energy[r:].sum()) / everything, 0.0)
            for r in RANKS
            if r < len(energy)
        ]
        keep_option = CurveOption(KEEP, float(min(rows, cols)), 0.0, 0.0)
        curves.append(
            Curve(target.name, target.kind, Shape(rows, cols, rows * cols), (*options, keep_option))
        )
    return curves
