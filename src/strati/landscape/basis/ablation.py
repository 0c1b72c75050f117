"""How many directions of a layer are needed, and whether one basis does better than another.

A layer's activations are rebuilt from their first ``kept`` coordinates, the rest put at its mean, and the
network's outputs are compared with the intact ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

import numpy as np

from strati.core.errors import BadInputError
from strati.landscape.basis.basis import BasisConfig, interaction_basis
from strati.landscape.basis.graph import InteractionGraph, interaction_graph
from strati.landscape.basis.result import InteractionBasis, Kind

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd
    from numpy.typing import ArrayLike
    from torch import Tensor, nn

    from strati.core.results import FloatArray


@dataclass(frozen=True)
class AblationPoint:
    """What is left of the outputs with the ``kept`` first directions of one layer.

    ``loss`` is the share of the outputs' variance lost, ``accuracy`` that of the largest output against labels.
    """

    kind: str
    layer: str
    kept: int
    loss: float
    accuracy: float | None = None


@dataclass(frozen=True)
class BasisComparison:
    """The same network in several bases: their graphs and their ablation curves at one layer."""

    graphs: tuple[InteractionGraph, ...]
    ablation: tuple[AblationPoint, ...]

    def sparsity(self) -> pd.DataFrame:
        """How concentrated the normalised edges are, per basis and pair of layers."""
        import pandas as pd

        return pd.concat([graph.sparsity() for graph in self.graphs], ignore_index=True)

    def needed(self, share: float = 0.95) -> dict[str, int | None]:
        """Per basis, the fewest directions of the layer that keep ``share`` of the outputs' variance."""
        directions: dict[str, int | None] = {}
        for graph in self.graphs:
            points = [p for p in self.ablation if p.kind == graph.basis.kind]
            sizes = [p.kept for p in points if p.loss <= 1 - share]
            directions[graph.basis.kind] = min(sizes, default=None)
        return directions


def ablation_curve(
    basis: InteractionBasis, layer: int, *, labels: ArrayLike | None = None
) -> tuple[AblationPoint, ...]:
    """Outputs rebuilt from ever fewer directions of one layer, strongest first.

    Args:
        basis: Which directions, in which order (by eigenvalue; neurons by variance).
        layer: Index of the layer, not the last.
        labels: Class numbers; with them the accuracy of the largest output is given too.

    Examples:
        >>> import torch
        >>> _ = torch.manual_seed(0)
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 2)).double()
        >>> basis = interaction_basis(net, torch.randn(50, 4, dtype=torch.float64))
        >>> [(p.kept, round(p.loss, 6)) for p in ablation_curve(basis, 1)][-1]
        (2, 0.0)
    """
    if not 0 <= layer < len(basis.layers) - 1:
        raise BadInputError(str(layer), f"no such layer to ablate; there are 0 to {len(basis.layers) - 2}")
    place = basis.layers[layer]
    order = np.argsort(-place.eigenvalues, kind="stable")
    intact, coordinates = intact_outputs(basis, layer)
    mean = mean_coordinates(basis, layer, coordinates)

    def with_directions(size: int) -> FloatArray:
        keep = np.isin(np.arange(place.directions), order[:size])
        return collected(basis, layer, [place.backward(np.where(keep, part, mean)) for part in coordinates])

    return curve(basis, place.name, place.directions, intact, with_directions, labels)


def curve(
    basis: InteractionBasis,
    name: str,
    most: int,
    intact: FloatArray,
    changed: Callable[[int], FloatArray],
    labels: ArrayLike | None,
) -> tuple[AblationPoint, ...]:
    """Points for 0, 1, 2, 3, 4, 6, 8, 12, ... and all: the same for every basis, so that curves can be compared."""
    classes = None if labels is None else np.asarray(labels)
    if classes is not None and (classes.shape != (basis.data,) or classes.dtype.kind not in "iu"):
        classes = None  # targets of a regression: accuracy means nothing
    total = float(((intact - intact.mean(axis=0)) ** 2).sum())
    steps = [0, 1] + [k for power in range(1, 20) for k in (2**power, 3 * 2 ** (power - 1))]
    points = []
    for size in [*(k for k in steps if k < most), most]:
        outputs = changed(size)
        loss = float(((outputs - intact) ** 2).sum()) / total if total > 0 else 0.0
        accuracy = None if classes is None else float((outputs.argmax(axis=-1) == classes).mean())
        points.append(AblationPoint(basis.kind, name, size, loss, accuracy))
    return tuple(points)


def compare_bases(
    model: nn.Module | str | Path,
    x: ArrayLike | Tensor,
    *,
    labels: ArrayLike | None = None,
    layer: int | None = None,
    kinds: Sequence[Kind] = get_args(Kind),
    config: BasisConfig | None = None,
) -> BasisComparison:
    """Graphs and ablation curves of one network in several bases.

    Args:
        model: As for :func:`strati.interaction_basis`.
        x: Inputs.
        labels: Class numbers, for accuracies.
        layer: The layer to ablate; by default the one with most directions between input and output.
        kinds: The bases.
        config: Options of :func:`strati.interaction_basis`.
    """
    bases = [interaction_basis(model, x, kind, config=config) for kind in kinds]
    if layer is None:
        inner = bases[0].layers[1:-1] or bases[0].layers[:1]
        widest = int(np.argmax([place.width for place in inner]))
        layer = widest + (1 if len(bases[0].layers) > 2 else 0)
    curves = [ablation_curve(basis, layer, labels=labels) for basis in bases]
    return BasisComparison(tuple(interaction_graph(b) for b in bases), tuple(p for c in curves for p in c))


def intact_outputs(basis: InteractionBasis, layer: int) -> tuple[FloatArray, list[FloatArray]]:
    """The network's outputs on the data, and the coordinates of a layer, batch by batch."""
    batches = list(basis.machine.activations(layer))
    return collected(basis, layer, batches), [basis.layers[layer].forward(rows) for rows in batches]


def collected(basis: InteractionBasis, layer: int, batches: Sequence[FloatArray]) -> FloatArray:
    """Outputs, one row each, when the activations of a layer are these."""
    outputs, start = [], 0
    for rows in batches:
        output = basis.machine.outputs(layer, rows, start)
        outputs.append(output.reshape(-1, output.shape[-1]))
        start += len(rows)
    return np.concatenate(outputs)


def mean_coordinates(basis: InteractionBasis, layer: int, coordinates: list[FloatArray]) -> FloatArray:
    """What a dropped coordinate is put at."""
    if basis.centred:
        return np.zeros(basis.layers[layer].directions)
    mean: FloatArray = np.concatenate([c.reshape(-1, c.shape[-1]) for c in coordinates]).mean(axis=0)
    return mean
