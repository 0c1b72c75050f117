"""What a study by spec would cost, before it is run: a few points and training steps are measured here and scaled.

The point measured is that of the smallest layer, with everything the study records of it; larger layers cost as much
and the operations of their larger spectra. Training is measured by a few steps. Nothing is written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from strati.interventions.checkpoints import trained_networks
from strati.interventions.measure_layer import Subject, measure_layer
from strati.interventions.spec_data import find_data, task_of
from strati.interventions.study_config import StudyConfig, config_of
from strati.interventions.study_sources import open_spec
from strati.interventions.study_spec import Spec
from strati.interventions.study_units import other_networks, targets_of
from strati.interventions.tasks import StudyData
from strati.jobs.engine import cores, one_thread
from strati.spectra.estimate import ScanEstimate, rates

if TYPE_CHECKING:
    from strati.interventions.targets import Target

_STEPS = 4  # training steps that are measured


def estimate_study(spec: Spec, *, workers: int = 0) -> ScanEstimate:
    """What the study of a spec would cost.

    Args:
        spec: The study.
        workers: Processes at once; 0 for one per processor.

    Examples:
        >>> from strati.interventions.study_spec import read_spec
        >>> from strati import embedded
        >>> network = {"path": str(embedded.path("digits-mlp.safetensors"))}
        >>> spec = read_spec({"network": network, "data": {"name": "digits"}})
        >>> estimate = estimate_study(spec, workers=1)
        >>> estimate.matrices, estimate.seconds < 120
        (6, True)
    """
    plan = config_of(spec, StudyConfig())
    opened = open_spec(spec, find_data)
    model, data = opened.model.eval(), opened.data
    task = task_of(data, spec)
    targets = targets_of(model, plan, lambda: task.output(model, task.batches[0][0][:1]))
    initial = spec.trained_here or spec.network.initial is not None
    points = {target: len(plan.points(target, initial)) for target in targets}
    count = max(1, min(workers or cores(), len(targets) * len(opened.names)))
    with one_thread():
        first = {name: value.detach().numpy() for name, value in model.state_dict().items()}
        subject = Subject(spec.name, model, first if initial else None, task)
        smallest = min(targets, key=lambda target: prod(target.shape))
        others = other_networks(plan, targets)
        measure_layer(subject, smallest, plan, others)  # activations are recorded once and kept
        each = _seconds(lambda: measure_layer(subject, smallest, plan, others)) / points[smallest]
        training = _training(spec, data, len(opened.names)) if spec.trained_here else 0.0
    spectra = {target: _solve(target) if plan.spectral else (0.0, 0.0) for target in targets}
    more = sum(points[target] * max(0.0, spectra[target][1] - spectra[smallest][1]) for target in targets)
    networks = len(opened.names)
    total = networks * (each * sum(points.values()) + more)
    weights = sum(parameter.numel() for parameter in model.parameters())
    matrix = max((8 * prod(target.shape) for target in targets), default=0)
    worst = max(targets, key=lambda target: spectra[target])
    stored = sum(value.nbytes for value in (data.x, data.y) if value is not None)
    return ScanEstimate(
        path=spec.name,
        matrices=networks * sum(points.values()),
        bytes=4 * weights * networks + stored,
        flops=networks * sum(points[target] * spectra[target][0] for target in targets),
        seconds=(total + training) / count,
        workers=count,
        memory=count * (8 * weights + 2 * stored + 3 * matrix),
        largest=(worst.name, worst.shape[0], prod(worst.shape[1:])),
    )


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _training(spec: Spec, data: StudyData, networks: int) -> float:
    """Seconds of all trainings, from a few steps of one batch of networks."""
    rows = min(len(data.x), _STEPS * spec.train.batch)
    part = replace(data, x=data.x[:rows], y=None if data.y is None else data.y[:rows])
    short = replace(spec, train=replace(spec.train, epochs=1))
    train = trained_networks(spec.network.source).train
    train(short, part, [0])
    each = _seconds(lambda: train(short, part, [0])) / max(1, -(-rows // spec.train.batch))
    return networks * spec.train.epochs * -(-len(data.x) // spec.train.batch) * each


def _solve(target: Target) -> tuple[float, float]:
    """Operations and seconds of a layer's eigenvalues."""
    sides: Sequence[int] = target.shape if len(target.shape) > 1 else (1, 1)
    many, long, short = prod(sides[2:]), max(sides[:2]), min(sides[:2])
    gram, solve = float(many * long * short**2), many * 4 / 3 * short**3
    rate = rates()
    return gram + solve, gram / rate[0] + solve / rate[1]
