"""What is known of a trained layer or block before anything is done to it: spectrum, counts, learning coefficient.

The metrics an audit puts to the test for edits. Those of a block are the means over the layers in it, those of a run of
blocks the means over the blocks, but for the learning coefficient, which is of all weights of the block together.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.core.errors import StratiError
from strati.interventions.kinds import run_length, unit_of
from strati.interventions.metrics import degeneracy_metrics, spectral_metrics
from strati.interventions.targets import Target, as_matrices, find_targets, values_of

if TYPE_CHECKING:
    from torch import Tensor, nn

    from strati.interventions.measure_layer import Subject
    from strati.interventions.study_config import StudyConfig

Metrics = Mapping[str, float | None]
_LOSS = "behavioural-kl"
_CHAINS, _DRAWS = 8, 50  # errors of a few percent: layers differ by far more


def trained_metrics(subject: Subject, target: Target, plan: StudyConfig) -> dict[str, float | None]:
    """Counts and learning coefficient of a trained layer, where the study asks for them and there are data."""
    counts = dict(_counts(subject, plan).get(target.name, {}))
    return counts | (_coefficient(subject, target.name, plan) if not target.composite else {})


def block_metrics(subject: Subject, target: Target, plan: StudyConfig) -> dict[str, Metrics]:
    """The metrics of every block of a stack that a run of blocks from ``target`` on may hold, by name."""
    longest = max(
        run_length(intervention.name, dict(s))
        for intervention in plan.interventions
        if unit_of(intervention.name) == "block"
        for s in intervention.settings
    )
    for name in target.members[:longest]:
        if name not in subject.inside:
            subject.inside[name] = _of_block(subject, name, plan)
    return {name: subject.inside[name] for name in target.members[:longest]}


def mean_metrics(parts: Sequence[Metrics]) -> dict[str, float | None]:
    """The mean of each metric over the parts that have it; ``None`` where none has.

    Examples:
        >>> mean_metrics([{"alpha": 2.0, "mu": None}, {"alpha": 4.0, "mu": None}])
        {'alpha': 3.0, 'mu': None}
    """
    means: dict[str, float | None] = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        defined = [value for part in parts if (value := part.get(name)) is not None and np.isfinite(value)]
        means[name] = float(np.mean(defined)) if defined else None
    return means


def learning_coefficient(
    model: nn.Module, inputs: Tensor, weights: str, *, seed: int = 0, **options: Any
) -> tuple[float | None, float | None]:
    """The local learning coefficient of the network's behaviour when only some weights vary, and its standard error.

    The loss is the mean Kullback-Leibler divergence from the trained network's own answers: the trained weights are
    a minimum of it, whatever they were trained on. All layers of a network are localised alike. Not defined where the
    chains do not mix; nor where the network cannot be sampled, and then a warning says why.

    Examples:
        >>> import torch
        >>> _ = torch.manual_seed(0)
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3))
        >>> value, error = learning_coefficient(net, torch.randn(60, 2), "0", chains=4, draws=100)
        >>> 0 < value < 4.5  # below half of its nine weights
        True
    """
    from strati.landscape.llc.config import LLCConfig
    from strati.landscape.llc.llc import llc
    from strati.landscape.llc.parts import one_localisation
    from strati.landscape.objective import objective

    x = inputs if inputs.is_floating_point() else inputs.clamp(min=0)
    config = LLCConfig(ladder=False, seed=seed, **options)
    try:
        config = one_localisation(config, objective(model, _LOSS, x))
        estimate = llc(model, _LOSS, x, layers=[weights], config=config)
    except StratiError as error:  # the study goes on without this number
        warnings.warn(f"no learning coefficient of {weights}: {error}", RuntimeWarning, stacklevel=2)
        return None, None
    return estimate.estimate, estimate.stderr


def _of_block(subject: Subject, name: str, plan: StudyConfig) -> Metrics:
    layers = [t for t in find_targets(subject.model) if t.name.startswith(f"{name}.")]
    counts = _counts(subject, plan)
    parts: list[dict[str, float | None]] = []
    for layer in layers:
        weight = values_of(subject.model, layer)[0]
        spectral = spectral_metrics(as_matrices(weight, layer.kind)) if plan.spectral else {}
        parts.append(spectral | dict(counts.get(layer.name, {})))
    return mean_metrics(parts) | _coefficient(subject, f"{name}.*", plan)


def _counts(subject: Subject, plan: StudyConfig) -> Mapping[str, Metrics]:
    if not plan.degeneracy or subject.task is None:
        return {}
    if subject.counts is None:
        subject.counts = degeneracy_metrics(subject.model, subject.task.batches[0][0][: plan.samples])
    return subject.counts


def _coefficient(subject: Subject, weights: str, plan: StudyConfig) -> dict[str, float | None]:
    if not plan.learning_coefficient or subject.task is None:
        return {}
    inputs = subject.task.batches[0][0][: plan.samples]
    estimate, error = learning_coefficient(
        subject.model, inputs, weights, seed=plan.seed, chains=_CHAINS, draws=_DRAWS
    )
    return {"learning_coefficient": estimate, "learning_coefficient_stderr": error}
