"""What a study would cost, before it is run: one layer is measured here and scaled to all of them.

The layer measured is the smallest, with everything the study records of it; larger layers cost as much and the
operations of their larger spectra. Nothing is written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING

from strati.interventions.measure_layer import measure_layer
from strati.interventions.study_config import StudyCall
from strati.interventions.study_job import make_job
from strati.jobs.engine import cores, one_thread
from strati.spectra.layerwise import ScanEstimate, rates

if TYPE_CHECKING:
    from strati.interventions.targets import Target


def estimate_study(call: StudyCall, *, workers: int = 0) -> ScanEstimate:
    """What the study of a call would cost.

    Args:
        call: The study.
        workers: Processes at once; 0 for one per processor.

    Examples:
        >>> from strati.interventions.study_spec import read_spec
        >>> from strati import embedded
        >>> network = {"path": str(embedded.path("digits-mlp.safetensors"))}
        >>> call = read_spec({"network": network, "data": {"name": "digits"}})
        >>> estimate = estimate_study(call, workers=1)
        >>> estimate.matrices, estimate.seconds < 120
        (6, True)
    """
    networks = len(call.model.names) if call.trains else 1
    model, data = (call.model.untrained(), call.model.data) if call.trains else (call.model, call.data)
    job = make_job(model, None, data, call.config)
    evaluator, config = next(iter(job.body.evaluators.values())), call.config
    targets = list(job.origin.layers.values())
    if call.trains:  # an untrained network has its initial values
        evaluator.initial = {k: v.detach().numpy() for k, v in evaluator.model.state_dict().items()}
    points = {target: len(config.points(target, evaluator.initial is not None)) for target in targets}
    count = max(1, min(workers or cores(), len(targets) * networks))
    with one_thread():
        smallest = min(targets, key=lambda target: prod(target.shape))
        measure_layer(evaluator, smallest, config)  # activations are recorded once and kept
        each = _seconds(lambda: measure_layer(evaluator, smallest, config)) / points[smallest]
        training = call.model.seconds() if call.trains else 0.0
    spectra = {target: _solve(target) if config.spectral else (0.0, 0.0) for target in targets}
    more = sum(points[target] * max(0.0, spectra[target][1] - spectra[smallest][1]) for target in targets)
    total = networks * (each * sum(points.values()) + more)
    weights = sum(parameter.numel() for parameter in evaluator.model.parameters())
    matrix = max((8 * prod(target.shape) for target in targets), default=0)
    worst = max(targets, key=lambda target: spectra[target])
    return ScanEstimate(
        path=call.name,
        matrices=networks * sum(points.values()),
        bytes=4 * weights * networks + len(job.data),
        flops=networks * sum(points[target] * spectra[target][0] for target in targets),
        seconds=(total + training) / count,
        workers=count,
        memory=count * (8 * weights + 2 * len(job.data) + 3 * matrix),
        largest=(worst.name, worst.shape[0], prod(worst.shape[1:])),
    )


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _solve(target: Target) -> tuple[float, float]:
    """Operations and seconds of a layer's eigenvalues."""
    sides: Sequence[int] = target.shape if len(target.shape) > 1 else (1, 1)
    many, long, short = prod(sides[2:]), max(sides[:2]), min(sides[:2])
    gram, solve = float(many * long * short**2), many * 4 / 3 * short**3
    rate = rates()
    return gram + solve, gram / rate[0] + solve / rate[1]
