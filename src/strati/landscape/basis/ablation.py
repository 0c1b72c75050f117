"""How many directions of a layer, or edges between two, are needed, and whether one basis does better than another.

A layer's activations are rebuilt from their first ``kept`` coordinates, the rest put at its mean, and the
network's outputs are compared with the intact ones. For edges every coordinate of the next layer is computed from
those coordinates only whose edge to it is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from strati.core.errors import BadInputError
from strati.landscape.basis.basis import BasisConfig, interaction_basis
from strati.landscape.basis.graph import InteractionGraph, interaction_graph
from strati.landscape.basis.probe_moments import Reading
from strati.landscape.basis.result import InteractionBasis, Kind

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd
    from numpy.typing import ArrayLike
    from torch import Tensor, nn

    from strati.core.results import BoolArray, FloatArray


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
    label_array = _labels(labels, basis.data)
    intact, coordinates = _intact(basis, layer)
    total = float(((intact - intact.mean(axis=0)) ** 2).sum())
    points = []
    for size in _sizes(place.directions):
        dropped = order[size:]
        changed = _rebuilt(basis, layer, coordinates, dropped)
        loss = float(((changed - intact) ** 2).sum()) / total if total > 0 else 0.0
        accuracy = None if label_array is None else float((changed.argmax(axis=-1) == label_array).mean())
        points.append(AblationPoint(basis.kind, place.name, size, loss, accuracy))
    return tuple(points)


def edge_ablation_curve(
    graph: InteractionGraph, site: int, *, labels: ArrayLike | None = None
) -> tuple[AblationPoint, ...]:
    """Outputs with ever fewer edges between a layer and the next one, strongest (normalised) first.

    A coordinate of the next layer is computed from the coordinates whose edge to it is kept, the others at their mean.

    Args:
        graph: Whose edges.
        site: Index of the earlier layer.
        labels: Class numbers; with them the accuracy of the largest output is given too.

    Examples:
        >>> import torch
        >>> _ = torch.manual_seed(0)
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 2)).double()
        >>> graph = interaction_graph(interaction_basis(net, torch.randn(50, 4, dtype=torch.float64)))
        >>> [(p.kept, round(p.loss, 6)) for p in edge_ablation_curve(graph, 0)][2:]  # the diagonal is all there is
        [(2, 0.0), (3, 0.0), (4, 0.0)]
    """
    basis = graph.basis
    if not 0 <= site < len(graph.edges):
        raise BadInputError(str(site), f"no such pair of layers; there are 0 to {len(graph.edges) - 1}")
    if basis.machine.frame is not None and site + 2 == len(basis.layers):
        raise BadInputError(str(site), "edges to an output this wide cannot be ablated; take an earlier pair")
    strengths = graph.normalised(site)
    order = np.argsort(-strengths, axis=None, kind="stable")
    intact, coordinates = _intact(basis, site)
    label_array = _labels(labels, basis.data)
    total = float(((intact - intact.mean(axis=0)) ** 2).sum())
    name = f"{basis.layers[site].name} -> {basis.layers[site + 1].name}"
    points = []
    for size in _sizes(strengths.size):
        mask = np.zeros(strengths.size, dtype=bool)
        mask[order[:size]] = True
        changed = _with_edges(basis, site, coordinates, mask.reshape(strengths.shape))
        loss = float(((changed - intact) ** 2).sum()) / total if total > 0 else 0.0
        accuracy = None if label_array is None else float((changed.argmax(axis=-1) == label_array).mean())
        points.append(AblationPoint(basis.kind, name, size, loss, accuracy))
    return tuple(points)


def compare_bases(
    model: nn.Module | str | Path,
    x: ArrayLike | Tensor,
    *,
    labels: ArrayLike | None = None,
    layer: int | None = None,
    kinds: Sequence[Kind] = get_args(Kind),
    reading: Reading | None = None,
) -> BasisComparison:
    """Graphs and ablation curves of one network in several bases.

    Args:
        model: As for :func:`strati.interaction_basis`.
        x: Inputs.
        labels: Class numbers, for accuracies.
        layer: The layer to ablate; by default the one with most directions between input and output.
        kinds: The bases.
        reading: Where to read a network that is not a chain, how many probes and data per pass.
    """
    settings = BasisConfig() if reading is None else BasisConfig(**vars(reading))
    bases = [interaction_basis(model, x, kind, config=settings) for kind in kinds]
    if layer is None:
        inner = bases[0].layers[1:-1] or bases[0].layers[:1]
        widest = int(np.argmax([place.width for place in inner]))
        layer = widest + (1 if len(bases[0].layers) > 2 else 0)
    curves = [ablation_curve(basis, layer, labels=labels) for basis in bases]
    return BasisComparison(tuple(interaction_graph(b) for b in bases), tuple(p for c in curves for p in c))


def _labels(labels: ArrayLike | None, count: int) -> Any:
    if labels is None:
        return None
    array = np.asarray(labels)
    if array.shape != (count,) or not np.issubdtype(array.dtype, np.integer):
        return None  # targets of a regression: accuracy means nothing
    return array


def _sizes(directions: int) -> list[int]:
    """0, 1, 2, 3, 4, 6, 8, 12, ... and all: the same for every basis, so that curves can be set side by side."""
    steps = [0, 1] + [k for power in range(1, 20) for k in (2**power, 3 * 2 ** (power - 1))]
    return [*(k for k in steps if k < directions), directions]


def _intact(basis: InteractionBasis, layer: int) -> tuple[FloatArray, list[FloatArray]]:
    outputs, coordinates, start = [], [], 0
    for rows in basis.machine.activations(layer):
        network_outputs = basis.machine.outputs(layer, rows, start)
        outputs.append(network_outputs.reshape(-1, network_outputs.shape[-1]))
        coordinates.append(basis.layers[layer].forward(rows))
        start += len(rows)
    return np.concatenate(outputs), coordinates


def _mean(basis: InteractionBasis, layer: int, coordinates: list[FloatArray]) -> FloatArray:
    if basis.centred:
        return np.zeros(basis.layers[layer].directions)
    rows = np.concatenate([c.reshape(-1, c.shape[-1]) for c in coordinates])
    mean: FloatArray = rows.mean(axis=0)
    return mean


def _with_edges(
    basis: InteractionBasis, site: int, coordinates: list[FloatArray], mask: BoolArray
) -> FloatArray:
    """Outputs when every coordinate of the next layer sees only the sources that ``mask`` leaves it."""
    place, after = basis.layers[site], basis.layers[site + 1]
    mean = _mean(basis, site, coordinates)
    rows_of = {row.tobytes(): np.flatnonzero((mask == row).all(axis=1)) for row in mask}
    outputs, start = [], 0
    for part in coordinates:
        accumulated: FloatArray | None = None
        for targets in rows_of.values():
            masked = np.where(mask[targets[0]], part, mean)
            following = after.forward(basis.machine.onward(site, place.backward(masked), start))
            accumulated = np.empty_like(following) if accumulated is None else accumulated
            accumulated[..., targets] = following[..., targets]
        assert accumulated is not None
        rows = after.backward(accumulated)
        last = site + 2 == len(basis.layers)
        network_outputs = rows if last else basis.machine.outputs(site + 1, rows, start)
        outputs.append(network_outputs.reshape(-1, network_outputs.shape[-1]))
        start += len(part)
    return np.concatenate(outputs)


def _rebuilt(basis: InteractionBasis, layer: int, coordinates: list[FloatArray], dropped: Any) -> FloatArray:
    place = basis.layers[layer]
    mean = _mean(basis, layer, coordinates)
    outputs, start = [], 0
    for part in coordinates:
        reduced = part.copy()
        reduced[..., dropped] = mean[dropped]
        network_outputs = basis.machine.outputs(layer, place.backward(reduced), start)
        outputs.append(network_outputs.reshape(-1, network_outputs.shape[-1]))
        start += len(part)
    return np.concatenate(outputs)
