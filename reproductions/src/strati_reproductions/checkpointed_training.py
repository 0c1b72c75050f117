"""A training that can be stopped at any time and continues, with checkpoints at given steps. Needs torch.

Weights are stored as ``step-000100.safetensors``; ``resume.pt`` holds the optimiser and the next step and is
replaced atomically. Batches depend on the seed and the step alone, so that a training that was interrupted gives
the same checkpoints as one that was not.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.core.files import write_atomic
from strati.core.results import Tick, silent

if TYPE_CHECKING:
    import torch
    from torch import nn

Loss = Callable[["nn.Module", int], "torch.Tensor"]
"""The loss of the batch of one step; it draws its batch from a stream of that step."""

_KEEP = 20.0  # seconds of the processor between two saves of the optimiser


@dataclass(frozen=True)
class Training:
    """What is trained and how.

    Attributes:
        steps: The last step.
        marks: Steps whose weights are kept.
        rate: Learning rate of AdamW.
        decay: Its weight decay.
        betas: Its momenta.
        warmup: Steps over which the rate rises.
        clip: Largest norm of a gradient; 0 means any.
        sgd: Plain gradient descent instead.
        seconds: Processor seconds after which the training stops, over all runs; 0 means no limit.
    """

    steps: int
    marks: tuple[int, ...]
    rate: float = 1e-3
    decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    warmup: int = 0
    clip: float = 0.0
    sgd: bool = False
    seconds: float = 0.0


def spaced(last: int, count: int, *, log: bool = True) -> tuple[int, ...]:
    """About ``count`` steps from 0 to ``last``, even in their logarithm or in themselves.

    Examples:
        >>> spaced(100, 5)
        (0, 1, 5, 22, 100)
        >>> spaced(100, 5, log=False)
        (0, 25, 50, 75, 100)
    """
    steps = np.geomspace(1, last, count - 1) if log else np.linspace(0, last, count)
    return tuple(sorted({0, *steps.round().astype(int).tolist()}))


def trained(
    folder: Path,
    model: nn.Module,
    loss: Loss,
    plan: Training,
    *,
    done: Callable[[nn.Module], bool] | None = None,
    tick: Tick = silent,
) -> tuple[Path, ...]:
    """Train to the end, or continue; the paths of the checkpoints in order. ``model`` holds the last weights.

    Args:
        folder: Where the checkpoints are kept.
        model: The untrained network.
        loss: Takes the model and the step.
        plan: The rest.
        done: Asked at every checkpoint whether the training has reached its end.
        tick: Called at every checkpoint.
    """
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    optimiser = _optimiser(model, plan)
    step, spent = _resumed(folder / "resume.pt", model, optimiser)
    began = saved = time.process_time()  # on a busy machine, what training costs and not how long it waits
    marks, checked = set(plan.marks), step
    while step <= plan.steps:
        now = time.process_time()
        if step == checked and done is not None and done(model):  # it had ended before
            break
        if plan.seconds and spent + now - began > plan.seconds:
            marks.add(step)  # the last weights are kept
            if not checkpoint(folder, step).exists():
                save(model, checkpoint(folder, step))
            break
        if step in marks and not checkpoint(folder, step).exists():
            save(model, checkpoint(folder, step))
            tick(f"{folder.name}: step {step}")
            if done is not None and done(model):
                break
        if now - saved > _KEEP:
            _save_state(folder / "resume.pt", model, optimiser, step, spent + now - began)
            saved = now
        if step == plan.steps:
            break
        for group in optimiser.param_groups:
            group["lr"] = plan.rate * min(1.0, (step + 1) / max(1, plan.warmup))
        optimiser.zero_grad()
        loss(model, step).backward()
        if plan.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), plan.clip)
        optimiser.step()
        step += 1
    _save_state(folder / "resume.pt", model, optimiser, step, spent + time.process_time() - began)
    return tuple(checkpoint(folder, m) for m in sorted(marks) if checkpoint(folder, m).exists())


def checkpoint(folder: Path, step: int) -> Path:
    """Where the weights of a step are."""
    return folder / f"step-{step:06d}.safetensors"


def step_of(path: Path) -> int:
    """The step of a checkpoint."""
    return int(path.stem.rpartition("-")[2])


def save(model: nn.Module, path: Path) -> None:
    """Write the weights, whole or not at all."""
    from safetensors.numpy import save as packed

    write_atomic(path, packed({k: v.detach().cpu().numpy().copy() for k, v in model.state_dict().items()}))


def load(model: nn.Module, path: Path) -> nn.Module:
    """Put a checkpoint's weights into the model."""
    import torch
    from safetensors.numpy import load_file

    model.load_state_dict({k: torch.from_numpy(v) for k, v in load_file(path).items()})
    return model


def _optimiser(model: nn.Module, plan: Training) -> torch.optim.Optimizer:
    import torch

    if plan.sgd:
        return torch.optim.SGD(model.parameters(), lr=plan.rate, weight_decay=plan.decay)
    return torch.optim.AdamW(
        model.parameters(), lr=plan.rate, weight_decay=plan.decay, betas=plan.betas, fused=True
    )


def _resumed(path: Path, model: nn.Module, optimiser: Any) -> tuple[int, float]:
    import torch

    if not path.is_file():
        return 0, 0.0
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimiser.load_state_dict(state["optimiser"])
    return int(state["step"]), float(state["spent"])


def _save_state(path: Path, model: nn.Module, optimiser: Any, step: int, spent: float) -> None:
    import torch

    part = path.with_suffix(".part")
    state = {
        "model": model.state_dict(),
        "optimiser": optimiser.state_dict(),
        "step": step,
        "spent": spent,
    }
    torch.save(state, part)
    part.replace(path)
