"""How many edges between two layers are needed: the others' sources are put at their mean.

Every coordinate of the next layer is computed from those coordinates only whose edge to it is kept, and the network's
outputs are compared with the intact ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from strati.core.errors import BadInputError
from strati.landscape.basis.ablation import (
    AblationPoint,
    collected,
    curve,
    intact_outputs,
    mean_coordinates,
)

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from strati.core.results import BoolArray, FloatArray
    from strati.landscape.basis.graph import InteractionGraph
    from strati.landscape.basis.result import InteractionBasis


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
        >>> import strati, torch
        >>> _ = torch.manual_seed(0)
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 2)).double()
        >>> graph = strati.interaction_graph(strati.interaction_basis(net, torch.randn(50, 4, dtype=torch.float64)))
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
    intact, coordinates = intact_outputs(basis, site)
    name = f"{basis.layers[site].name} -> {basis.layers[site + 1].name}"

    def with_edges(size: int) -> FloatArray:
        mask = np.isin(np.arange(strengths.size), order[:size]).reshape(strengths.shape)
        return _with_edges(basis, site, coordinates, mask)

    return curve(basis, name, strengths.size, intact, with_edges, labels)


def _with_edges(
    basis: InteractionBasis, site: int, coordinates: list[FloatArray], mask: BoolArray
) -> FloatArray:
    """Outputs when every coordinate of the next layer sees only the sources that ``mask`` leaves it."""
    place, after = basis.layers[site], basis.layers[site + 1]
    mean = mean_coordinates(basis, site, coordinates)
    rows_of = {row.tobytes(): np.flatnonzero((mask == row).all(axis=1)) for row in mask}
    batches, start = [], 0
    for part in coordinates:
        accumulated: FloatArray | None = None
        for targets in rows_of.values():
            masked = np.where(mask[targets[0]], part, mean)
            following = after.forward(basis.machine.onward(site, place.backward(masked), start))
            accumulated = np.empty_like(following) if accumulated is None else accumulated
            accumulated[..., targets] = following[..., targets]
        assert accumulated is not None
        batches.append(after.backward(accumulated))
        start += len(part)
    if site + 2 == len(basis.layers):
        return np.concatenate([rows.reshape(-1, rows.shape[-1]) for rows in batches])
    return collected(basis, site + 1, batches)
