r"""A few steps of training after compression: a LoRA on every linear layer, judged on rows it was not trained on.

The compressed weights stay as they are; what is trained is :math:`W + \frac{\alpha}{r} B A` with :math:`A` of :math:`r`
rows and :math:`B = 0` at the start (Hu et al. 2021). A quarter of the rows is held out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from scipy import stats
from torch import Tensor, nn

from strati.core.errors import BadInputError
from strati.interventions.targets import find_targets
from strati.interventions.tasks import IGNORED, standard_error

if TYPE_CHECKING:
    from strati.core.results import Tick
    from strati.interventions.tasks import Task

RANK, ALPHA = 8, 16
_RATE = 3e-4
_BATCH = 8
_FEWEST = 8
_HELD_OUT = 4
"""One row of so many is held out."""


class Lora:
    """Factors of a low-rank update of every linear layer of a network."""

    def __init__(self, model: nn.Module, generator: torch.Generator) -> None:
        self.model = model
        self.targets = [t for t in find_targets(model) if t.kind in ("linear", "conv1d")]
        self.factors: dict[str, tuple[nn.Parameter, nn.Parameter]] = {}
        for target in self.targets:
            a = torch.randn(RANK, target.fan_in, generator=generator) / math.sqrt(target.fan_in)
            self.factors[target.name] = nn.Parameter(a), nn.Parameter(torch.zeros(target.fan_out, RANK))

    @contextmanager
    def added(self) -> Iterator[None]:
        """The network with the updates added to the outputs of its layers."""

        def hook(name: str) -> Any:
            a, b = self.factors[name]
            return lambda _module, args, output: output + (ALPHA / RANK) * (args[0] @ a.T) @ b.T

        with ExitStack() as stack:
            for name in self.factors:
                handle = self.model.get_submodule(name).register_forward_hook(hook(name))
                stack.callback(handle.remove)
            yield

    @torch.no_grad()
    def merge(self) -> None:
        """Put the updates into the weights for good."""
        for target in self.targets:
            a, b = self.factors[target.name]
            module: Any = self.model.get_submodule(target.name)
            update = (ALPHA / RANK) * b @ a
            module.weight += update.T if target.kind == "conv1d" else update

    def write(self, folder: Path, base: str) -> None:
        """The updates as a PEFT adapter of the compressed network."""
        from strati.interventions.compress.rewrite_checkpoint import write_safetensors

        folder.mkdir()
        tensors = {}
        for name, (a, b) in self.factors.items():
            tensors[f"base_model.model.{name}.lora_A.weight"] = a.detach().numpy()
            tensors[f"base_model.model.{name}.lora_B.weight"] = b.detach().numpy()
        write_safetensors(folder / "adapter_model.safetensors", tensors)
        config = {
            "peft_type": "LORA",
            "base_model_name_or_path": base,
            "r": RANK,
            "lora_alpha": ALPHA,
            "target_modules": list(self.factors),
            "fan_in_fan_out": any(t.kind == "conv1d" for t in self.targets),
            "bias": "none",
        }
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")


def heal(model: nn.Module, task: Task | None, steps: int, tick: Tick) -> tuple[Lora, dict[str, Any]]:
    """Train a LoRA of a compressed network on a task's rows, and say what it gains on rows that were held out.

    Returns:
        The LoRA, and the mean loss on the held-out rows before and after with the interval of the difference.

    Raises:
        BadInputError: There are no data, too few rows, or no linear layer.
    """
    if task is None:
        raise BadInputError("heal", "needs data to train on; give data")
    if steps < 1:
        raise BadInputError("heal", f"is a number of training steps from 1, not {steps}")
    generator = torch.Generator().manual_seed(0)
    inputs, answers = (torch.cat([batch[i] for batch in task.batches]) for i in (0, 1))
    if len(inputs) < _FEWEST:
        raise BadInputError("heal", f"needs at least {_FEWEST} rows of data, not {len(inputs)}")
    order = torch.randperm(len(inputs), generator=generator)
    held_out, rows = order[: len(order) // _HELD_OUT], order[len(order) // _HELD_OUT :]
    lora = Lora(model, generator)
    if not lora.factors:
        raise BadInputError("heal", "the network has no linear layer to train a LoRA of")
    scored = replace(task, performance="loss")
    flags = {p: p.requires_grad for p in model.parameters()}
    parameters = [p for pair in lora.factors.values() for p in pair]
    optimiser = torch.optim.AdamW(parameters, lr=_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: 1.0 - step / steps)
    before = _losses(model, scored, inputs[held_out], answers[held_out])
    try:
        for parameter in flags:
            parameter.requires_grad_(False)
        with lora.added(), torch.enable_grad():
            for _ in range(steps):
                batch = rows[torch.randint(len(rows), (min(_BATCH, len(rows)),), generator=generator)]
                logits = scored.output(model, inputs[batch])
                loss = nn.functional.cross_entropy(
                    logits.reshape(-1, logits.shape[-1]).float(),
                    answers[batch].reshape(-1),
                    ignore_index=IGNORED,
                )
                optimiser.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(parameters, 1.0)
                optimiser.step()
                schedule.step()
                tick("heal")
    finally:
        for parameter, flag in flags.items():
            parameter.requires_grad_(flag)
    with lora.added():
        after = _losses(model, scored, inputs[held_out], answers[held_out])
    gain = (before - after).numpy()
    half = float(stats.t.ppf(0.975, len(gain) - 1)) * (standard_error(gain) or math.nan)
    about = {"steps": steps, "rank": RANK, "rows": len(rows), "held_out": len(held_out)}
    losses = {"loss_before": float(before.mean()), "loss_after": float(after.mean())}
    ends = {"gain": float(gain.mean()), "low": float(gain.mean()) - half, "high": float(gain.mean()) + half}
    return lora, about | losses | ends


@torch.no_grad()
def _losses(model: nn.Module, task: Task, inputs: Tensor, answers: Tensor) -> Tensor:
    """The mean loss of every row."""
    losses = []
    for x, y in zip(inputs.split(_BATCH), answers.split(_BATCH), strict=True):
        counts = torch.tensor([max(task.count(row), 1) for row in y])
        losses.append(task.each(task.output(model, x), y) / counts)
    return torch.cat(losses)
