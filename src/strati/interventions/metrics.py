"""What is recorded of a changed layer beside performance: data-free metrics, distances, and what the data say.

Data-free: every number of :meth:`strati.Spectrum.metrics`. With data: activation disagreement and Jensen-Shannon
divergence between the outputs of the intact and the changed layer (robust-and-critical-layers, section 4.3).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.core.errors import BadInputError, UnsupportedError

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

Plugin = Callable[..., float]
"""``matrix -> number`` or ``(intact matrix, changed matrix) -> number``."""


def spectral_metrics(matrix: NDArray[Any] | Sequence[NDArray[Any]]) -> dict[str, float | None]:
    """All numbers of the spectrum of a matrix, or of several whose eigenvalues are pooled, by the names of ``scan``.

    Examples:
        >>> found = spectral_metrics(np.diag([3.0, 4.0]))
        >>> found["frobenius_norm"], found["spectral_norm"]
        (5.0, 4.0)
    """
    from strati.spectra.spectrum import spectrum

    return {name: value for name, value in spectrum(matrix).metrics().items() if _is_number(value)}


def distances(
    intact: tuple[NDArray[Any], NDArray[Any] | None], changed: tuple[NDArray[Any], NDArray[Any] | None]
) -> dict[str, float | None]:
    """How far the weight was moved: ``||W' - W||_F``, and the same relative to ``||W||_F``.

    Examples:
        >>> distances((np.eye(2), None), (np.zeros((2, 2)), None))["relative_distance"]
        1.0
    """
    before, after = intact[0].astype(float), changed[0].astype(float)
    moved, size = float(np.linalg.norm(after - before)), float(np.linalg.norm(before))
    return {"distance": moved, "relative_distance": moved / size if size > 0 else None}


class Disagreement:
    """Activation disagreement and Jensen-Shannon divergence of two layers' outputs, added up over batches.

    Disagreement is the mean over data and neurons of ``[O > 0] != [M > 0]`` in percent; divergence the mean over
    data of ``JS(softmax(O), softmax(M))`` in nats.

    Examples:
        >>> import torch
        >>> both = Disagreement(1)
        >>> both.add(torch.tensor([[1.0, -1.0]]), torch.tensor([[[1.0, 1.0]]]))
        >>> both.result(0)["activation_disagreement"]
        50.0
    """

    def __init__(self, changes: int) -> None:
        self._differ, self._divergence = np.zeros(changes), np.zeros(changes)
        self._neurons, self._rows = np.zeros(changes), np.zeros(changes)

    def add(self, intact: Tensor, changed: Tensor) -> None:
        """A batch: the intact outputs (rows, neurons) and those of every change (changes, rows, neurons)."""
        for i, outputs in enumerate(changed):
            self.add_one(i, intact, outputs)

    def add_one(self, change: int, intact: Tensor, outputs: Tensor) -> None:
        """A batch of one change."""
        import torch

        self._differ[change] += int(((intact > 0) != (outputs > 0)).sum())
        p, q = torch.softmax(intact.float(), -1), torch.softmax(outputs.float(), -1)
        both = (p + q).clamp_(min=torch.finfo(p.dtype).tiny)
        # With d = (p - q)/(p + q) the terms are p ln(1 + d) + q ln(1 - d): differences of logarithms lose the digits of
        # small divergences. At d = 1 the second is 0 ln 0; the largest float32 below 1 makes it zero.
        d = ((p - q) / both).clamp_(-1 + 2.0**-23, 1 - 2.0**-23)
        each = p * torch.log1p(d) + q * torch.log1p(-d)
        self._divergence[change] += 0.5 * float(each.sum(dtype=torch.float64))
        self._neurons[change] += intact.numel()
        self._rows[change] += intact.shape[0]

    def result(self, change: int) -> dict[str, float | None]:
        """The two numbers of one change; not defined when an output was not finite."""
        if self._rows[change] == 0:
            return {"activation_disagreement": None, "js_divergence": None}
        divergence = float(self._divergence[change] / self._rows[change])
        return {
            "activation_disagreement": 100.0 * float(self._differ[change] / self._neurons[change]),
            "js_divergence": max(0.0, divergence) if math.isfinite(divergence) else None,
        }


def as_rows(output: Tensor, kind: str) -> Tensor:
    """A layer's output as (data, neurons): pixels of a convolution are neurons, tokens are data."""
    if kind == "conv":
        return output.reshape(output.shape[0], -1)
    return output.reshape(-1, output.shape[-1])


def degeneracy_metrics(model: torch.nn.Module, x: Tensor) -> dict[str, dict[str, float | None]]:
    """What ``degeneracy`` counts on the data, by layer: its ranks and free directions.

    ``activation_rank`` is of what goes into the layer, which no change of the layer itself can alter; ``output_rank``
    is of what the next layer gets, ``jacobian_rank`` of how the network's output depends on the layer's.

    Examples:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
        >>> found = degeneracy_metrics(net, torch.eye(3))
        >>> sorted(found), found["0"]["output_rank"] == found["2"]["activation_rank"]
        (['0', '2'], True)
    """
    from strati.landscape.counts.degeneracy import degeneracy

    try:
        layers = degeneracy(model, x, exact=False).layers
    except UnsupportedError:  # networks that cannot be counted have no such columns
        return {}
    by_layer: dict[str, dict[str, float | None]] = {}
    for layer, after in zip(layers, (*layers[1:], None), strict=True):
        follows = after is not None and after.inputs == layer.outputs
        by_layer[layer.name] = {
            "activation_rank": float(layer.activation_rank),
            "output_rank": float(after.activation_rank) if after is not None and follows else None,
            "jacobian_rank": float(layer.jacobian_rank),
            "free_directions": float(layer.free),
        }
    return by_layer


def check_plugins(plugins: Mapping[str, Plugin]) -> dict[str, int]:
    """How many matrices each metric of the user's takes, one or two.

    Raises:
        BadInputError: A metric takes another number of arguments, or is not a function.
    """
    arguments = {}
    for name, function in plugins.items():
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):
            raise BadInputError(f"metric {name}", "is not a function with a readable signature") from None
        needed = [
            p
            for p in parameters
            if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        if len(needed) not in (1, 2):
            raise BadInputError(f"metric {name}", "takes one matrix, or the intact and the changed one")
        arguments[name] = len(needed)
    return arguments


def plugin_metrics(
    plugins: Mapping[str, Plugin], intact: NDArray[Any], changed: NDArray[Any]
) -> tuple[dict[str, float | None], list[str]]:
    """The user's metrics of one changed matrix; one that raises is not defined there, with a note saying why."""
    takes = check_plugins(plugins)
    numbers: dict[str, float | None] = {}
    notes = []
    for name, function in plugins.items():
        try:
            numbers[name] = float(function(changed) if takes[name] == 1 else function(intact, changed))
        except Exception as error:  # the user's function: the row keeps its other numbers
            numbers[name] = None
            notes.append(f"metric {name} raised {type(error).__name__}: {error}")
    return numbers, notes


def _is_number(entry: Any) -> bool:
    return entry is None or (isinstance(entry, int | float | np.number) and not isinstance(entry, bool))
