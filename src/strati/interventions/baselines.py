r"""The data-based scores by which people choose layers, for the audit to judge.

With :math:`X` what goes into the layer and :math:`D = W' - W`: the activation-weighted error
:math:`\|D X\|_F / \|W X\|_F`; the Wanda score of what is lost, :math:`\sum |D_{ij}| \|X_j\|` over
:math:`\sum |W_{ij}| \|X_j\|` (Sun et al. 2024); GPTQ's error :math:`\sum D_{ij}^2 / [H^{-1}]_{jj}` with
:math:`H = 2 X X^T / n`, damped by 1 % of its mean diagonal (Frantar et al. 2023); the signal-to-noise ratio of the
outputs, ``snr`` :math:`= 10 \log_{10} \|W X\|_F^2 / \|D X\|_F^2`, and of the weights, ``sqnr``; the excess ``kurtosis``
of the weights; OWL's ``outlier_ratio``, the percentage of :math:`|W_{ij}| \|X_j\|` above five times their mean (Yin et
al. 2024). For blocks ShortGPT's influence :math:`1 - \mathrm{E} \cos(x_\mathrm{in}, x_\mathrm{out})` (Men et al. 2024)
and the angular distance :math:`\mathrm{E} \arccos(\cos) / \pi` (Gromov et al., arXiv:2403.17887).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from strati.interventions.targets import Change, Target, as_matrix, values_of
from strati.interventions.tasks import IGNORED

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.interventions.tasks import Task

_MOST_ROWS = 16_384
"""Rows of a batch that count, evenly spread: a convolution has one for every pixel."""
_DAMPING = 0.01
_OUTLIER = 5.0
"""OWL's M: an outlier is that many times the layer's mean."""


class LayerBaselines:
    """Second moments of a layer's inputs, and the scores of its changes by them.

    Examples:
        >>> net = nn.Sequential(nn.Linear(2, 1, bias=False))
        >>> target = Target("0", "linear", "linear", (1, 2), False)
        >>> scores = LayerBaselines(net, target)
        >>> scores.add(torch.tensor([[1.0, 0.0], [1.0, 0.0]]))  # the second input is never used
        >>> w = net[0].weight.detach().numpy().copy()
        >>> w[0, 1] = 0.0
        >>> scores.of(Change("zero", 0, w, None, ""))["activation_error"]
        0.0
    """

    def __init__(self, model: nn.Module, target: Target) -> None:
        self.target = target
        self._module: Any = model.get_submodule(target.name)
        self._weight = as_matrix(values_of(model, target)[0], target.kind).astype(np.float64)
        side = self._weight.shape[0 if target.kind == "embedding" else 1]
        diagonal = target.kind == "embedding"
        self._moments: NDArray[np.float64] = np.zeros(side if diagonal else (side, side))
        self._rows = 0
        self._inverse: NDArray[np.float64] | None = None

    def add(self, inputs: Tensor, _output: Tensor | None = None) -> None:
        """A batch of what goes into the layer."""
        if self.target.kind == "embedding":
            tokens = inputs.reshape(-1)
            self._moments += np.bincount(tokens.numpy(), minlength=len(self._moments))
            self._rows += len(tokens)
            return
        rows = self._as_rows(inputs)
        if rows is None:
            return
        rows = rows[:: max(1, -(-len(rows) // _MOST_ROWS))].double()
        self._moments += (rows.T @ rows).numpy()
        self._rows += len(rows)

    def of(self, change: Change) -> dict[str, float | None]:
        """The scores of a change; those of the inputs are not defined where none were seen."""
        d = as_matrix(change.values, self.target.kind).astype(np.float64) - self._weight
        if self._rows == 0 or not np.isfinite(self._moments).all():
            unknown = ("activation_error", "wanda_score", "gptq_error", "snr", "outlier_ratio")
            return self._of_weights(d) | dict.fromkeys(unknown)
        w, h = self._weight, self._moments / self._rows
        if self.target.kind == "embedding":
            error, size = _weighted_rows(d, h), _weighted_rows(w, h)
            norms = np.sqrt(h)[:, None]
            curvature = 2 * h[:, None] + 2 * _DAMPING * h.mean()
        else:
            error, size = (float(np.einsum("ij,ij->", m @ h, m)) for m in (d, w))
            norms = np.sqrt(np.diag(h))[None]
            curvature = 1.0 / self._inverse_diagonal(h)[None]
        importance = np.abs(w) * norms
        lost, total = float((np.abs(d) * norms).sum()), float(importance.sum())
        outliers = importance > _OUTLIER * importance.mean()
        return self._of_weights(d) | {
            "snr": 10 * math.log10(size / error) if error > 0 and size > 0 else None,
            "outlier_ratio": 100.0 * float(outliers.mean()),
            "activation_error": math.sqrt(max(error, 0.0) / size) if size > 0 else None,
            "wanda_score": lost / total if total > 0 else None,
            "gptq_error": float((d**2 * curvature).sum()),
        }

    def _of_weights(self, d: NDArray[np.float64]) -> dict[str, float | None]:
        w = self._weight
        centred = w - w.mean()
        variance, lost, size = float((centred**2).mean()), float((d**2).sum()), float((w**2).sum())
        return {
            "sqnr": 10 * math.log10(size / lost) if lost > 0 and size > 0 else None,
            "kurtosis": float((centred**4).mean()) / variance**2 - 3 if variance > 0 else None,
        }

    def _inverse_diagonal(self, h: NDArray[np.float64]) -> NDArray[np.float64]:
        if self._inverse is None:
            mean = float(np.diag(h).mean()) or 1.0
            damped = 2 * h + 2 * _DAMPING * mean * np.eye(len(h))
            self._inverse = np.diag(np.linalg.inv(damped)).copy()
        return self._inverse

    def _as_rows(self, inputs: Tensor) -> Tensor | None:
        if self.target.kind != "conv":
            return inputs.reshape(-1, inputs.shape[-1])
        module = self._module
        if inputs.ndim != 4 or module.groups != 1 or isinstance(module.padding, str):
            return None
        # Every pixel is a row: few images are enough, and unfolding all would cost many times their memory.
        per_image = max(1, inputs.shape[2] * inputs.shape[3] // (module.stride[0] * module.stride[1]))
        few = inputs[: max(1, 4 * _MOST_ROWS // per_image)]
        patches = functional.unfold(few, module.kernel_size, module.dilation, module.padding, module.stride)
        return patches.transpose(1, 2).reshape(-1, patches.shape[1])


class BlockInfluence:
    """How far each run of blocks turns its input, measured in one pass of the intact network."""

    def __init__(self, model: nn.Module, task: Task, target: Target) -> None:
        self.target = target
        self._sums = dict.fromkeys(target.members, 0.0)
        self._angles = dict.fromkeys(target.members, 0.0)
        self._count = 0
        self._measure(model, task)

    def of(self, change: Change) -> dict[str, float | None]:
        """The influence and the angular distance of the blocks changed together."""
        if not self._count:
            return {"block_influence": None, "angular_distance": None}
        last = change.blocks[-1]
        return {
            "block_influence": 1.0 - self._sums[last] / self._count,
            "angular_distance": self.angular_distance(last),
        }

    def angular_distance(self, last: str) -> float:
        """The angle between what enters the first block and what leaves ``last``, over pi, averaged over tokens."""
        return self._angles[last] / self._count

    @torch.inference_mode()
    def _measure(self, model: nn.Module, task: Task) -> None:
        first: list[Tensor] = []
        turned: dict[str, Tensor] = {}

        def start(_module: Any, args: Any, options: Any) -> None:
            first[:] = [args[0] if args else next(iter(options.values()))]

        hooks: list[Any] = [
            model.get_submodule(self.target.name).register_forward_pre_hook(start, with_kwargs=True)
        ]
        for name in self.target.members:

            def end(_module: Any, _args: Any, output: Any, name: str = name) -> None:
                first_output = output[0] if isinstance(output, tuple) else output
                turned[name] = _cosines(first[0], first_output)

            hooks.append(model.get_submodule(name).register_forward_hook(end))
        try:
            for inputs, _ in task.batches:
                turned.clear()
                task.output(model, inputs)
                real = inputs != IGNORED if not inputs.is_floating_point() else None
                for name, cosines in turned.items():
                    counted = cosines[real] if real is not None and real.shape == cosines.shape else cosines
                    self._sums[name] += float(counted.sum(dtype=torch.float64))
                    angles = torch.arccos(counted.double().clamp(-1.0, 1.0)) / math.pi
                    self._angles[name] += float(angles.sum())
                self._count += counted.numel() if turned else 0
        finally:
            for hook in hooks:
                hook.remove()


def _cosines(before: Tensor, after: Tensor) -> Tensor:
    """One cosine per token, or per image."""
    if before.ndim == 4:
        before, after = before.flatten(1), after.flatten(1)
    return functional.cosine_similarity(before.float(), after.float(), dim=-1)


def _weighted_rows(matrix: NDArray[np.float64], weights: NDArray[np.float64]) -> float:
    return float((matrix**2).sum(1) @ weights)
