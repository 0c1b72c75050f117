"""The interaction graph: directions of a basis as nodes, how strongly they act on the next layer's as edges.

``E_ji = mean_x (d fhat^{l+1}_j / d fhat^l_i)^2``. How sparse the graph is, is measured here; what it falls apart
into is ``modules``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np

from strati.core.errors import BadInputError
from strati.core.results import Flag, Result, Tick, silent
from strati.landscape.basis.result import InteractionBasis, as_table, needed

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import RenderableType

    from strati.core.results import FloatArray
    from strati.schemas.json_types import GraphFields

EDGES_SHOWN = 20_000
"""The JSON form lists at most this many edges, the strongest."""


@dataclass(frozen=True)
class InteractionGraph(Result):
    """Directions and the squared strengths between those of adjacent layers.

    Attributes:
        basis: The basis whose directions are the nodes.
        edges: Per pair of adjacent layers ``E`` (directions of the later x of the earlier).
        errors: Relative error of each; 0 where exact up to rounding.
    """

    verb: ClassVar[str] = "interaction-graph"

    basis: InteractionBasis
    edges: tuple[FloatArray, ...]
    errors: tuple[float, ...]

    def normalised(self, site: int) -> FloatArray:
        """Edges with the scale of the coordinates taken out: ``E_ji var_i / var_j``.

        What a standard deviation of the source does to the target, in the target's own standard deviations.
        The same for any rescaling of directions, hence comparable between bases.
        """
        source = self.basis.layers[site].eigenvalues
        target = self.basis.layers[site + 1].eigenvalues
        safe = np.where(target > 0, target, np.inf)
        result: FloatArray = self.edges[site] * source[None, :] / safe[:, None]
        return result

    def sparsity(self) -> pd.DataFrame:
        """How many edges carry the normalised strength, one line per pair of layers.

        ``for_90%``, ``for_99%``: share of all edges that carry so much of the strength; ``participation``: the
        number of equally strong edges with the same spread, ``(sum E)^2 / sum E^2``, as a share.
        """
        import pandas as pd

        rows = []
        for site in range(len(self.edges)):
            strengths = self.normalised(site).ravel()
            count, squares = strengths.size, float((strengths**2).sum())
            spread = strengths.sum() ** 2 / squares / count if squares > 0 else None
            rows.append(
                {
                    "basis": self.basis.kind,
                    "from": self.basis.layers[site].name,
                    "to": self.basis.layers[site + 1].name,
                    "edges": count,
                    "for_90%": needed(strengths, 0.9) / count if count else None,
                    "for_99%": needed(strengths, 0.99) / count if count else None,
                    "participation": spread,
                    "error": self.errors[site],
                }
            )
        return pd.DataFrame(rows)

    def payload(self) -> GraphFields:
        """The basis with its edges, strongest first."""
        fields: dict[str, Any] = dict(self.basis.payload())
        total = sum(edges.size for edges in self.edges)
        fields["edges"] = self._strongest()
        fields["edges_total"] = total
        fields["sparsity"] = self.sparsity().to_dict("records")
        if total > EDGES_SHOWN:
            flag = Flag("edges-cut", f"the strongest {EDGES_SHOWN} of {total} edges are listed")
            fields["warnings"] = (*self.basis.warnings, flag)
        return cast("GraphFields", fields)

    def frame(self) -> pd.DataFrame:
        """The layers, with what leaves each."""
        import pandas as pd

        measures = self.sparsity().drop(columns=["basis", "from", "to"])
        measures = measures.rename(columns={"for_90%": "edges_90%", "for_99%": "edges_99%"})
        return pd.concat([self.basis.frame(), measures], axis=1)

    def summary(self) -> RenderableType:
        """A table of the layers and how sparse what leaves them is."""
        title = f"{self.basis.kind} basis and its interaction graph, {self.basis.data} data"
        return as_table(title, self.frame(), self.basis.warnings)

    def plot(self, **options: Any) -> Any:
        """The layered graph."""
        from strati.report.plots.landscape import plot_graph

        return plot_graph(self, **options)

    def _strongest(self) -> list[dict[str, Any]]:
        strengths = np.concatenate([edges.ravel() for edges in self.edges]) if self.edges else np.zeros(0)
        sizes = [edges.size for edges in self.edges]
        starts = np.concatenate([[0], np.cumsum(sizes)]).astype(int)
        order = np.argsort(-strengths, kind="stable")[:EDGES_SHOWN]
        strongest = []
        for flat in order[strengths[order] > 0]:
            site = int(np.searchsorted(starts, flat, side="right") - 1)
            target, source = divmod(int(flat - starts[site]), self.edges[site].shape[1])
            strongest.append({"layer": site, "source": source, "target": target, "strength": strengths[flat]})
        return strongest


def interaction_graph(basis: InteractionBasis, *, tick: Tick = silent) -> InteractionGraph:
    """Interaction strengths between the directions of adjacent layers.

    ``E_ji = mean_x (d fhat^{l+1}_j / d fhat^l_i)^2``, positions of a sequence summed. For chains of linear layers
    a closed form without Jacobians; otherwise one backward pass per direction.
    Reference: degeneracy-in-the-loss-landscape, sections 4 and 6.

    Args:
        basis: From :func:`strati.interaction_basis`.
        tick: Called after each pair of layers.

    Raises:
        BadInputError: The basis was loaded or built without its network.

    Examples:
        >>> import torch
        >>> from strati import interaction_basis
        >>> _ = torch.manual_seed(0)
        >>> linear = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)).double()
        >>> graph = interaction_graph(interaction_basis(linear, torch.randn(50, 3, dtype=torch.float64)))
        >>> graph.edges[0].round(6).tolist()       # a linear network is diagonal in its interaction basis
        [[1.0, 0.0], [0.0, 1.0]]
    """
    machine = getattr(basis, "machine", None)
    if machine is None:
        raise BadInputError(
            "basis", "does not hold its network; compute it with strati.interaction_basis first"
        )
    edges, errors = [], []
    for site in range(len(basis.layers) - 1):
        following = basis.layers[site + 1].matrix
        if site + 2 == len(basis.layers) and machine.frame is not None:
            following = following @ machine.frame
        strengths = machine.edges(site, following, basis.layers[site].inverse)
        edges.append(strengths.value)
        errors.append(strengths.error)
        tick(basis.layers[site].name)
    return InteractionGraph(basis, tuple(edges), tuple(errors))
