"""What a basis is made of: the layers' bases, and the network with its data that graphs and ablations go back to.

Finding a basis is ``basis``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import numpy as np

from strati.core.results import Flag, Result

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import RenderableType

    from strati.core.results import FloatArray
    from strati.landscape.basis.whitening import Moments
    from strati.landscape.jacobians import MatrixEstimate
    from strati.schemas.json_types import BasisFields

Kind = Literal["interaction", "local", "pca", "neuron"]


class BasisBackend(Protocol):
    """A network with its data: what a basis needs to know of it."""

    names: tuple[str, ...]
    widths: tuple[int, ...]
    count: int
    frame: FloatArray | None
    notes: tuple[Flag, ...]

    def moments(self, *, centre: bool) -> tuple[Moments, ...]:
        """Mean and second moment of the activations at every site."""

    def to_next(self, site: int, colour: FloatArray, following: FloatArray) -> MatrixEstimate:
        """``mean_x J^T J`` in white coordinates, to the next site's basis."""

    def to_output(self, colours: Sequence[FloatArray]) -> tuple[MatrixEstimate, ...]:
        """The same to the output, for every site but the last."""

    def edges(self, site: int, following: FloatArray, inverse: FloatArray) -> MatrixEstimate:
        """Squared edges from a site's directions to the next one's."""

    def silent(self, site: int) -> FloatArray:
        """Weights into neurons of the next site that never fire on the data."""

    def activations(self, site: int) -> Iterator[FloatArray]:
        """A site's activations, batch by batch."""

    def outputs(self, site: int, rows: FloatArray, start: int = 0) -> FloatArray:
        """Outputs when a site's activations are ``rows``, those of the data from ``start`` on."""

    def onward(self, site: int, rows: FloatArray, start: int = 0) -> FloatArray:
        """The same, the next site's activations."""


@dataclass(frozen=True)
class BasisLayer:
    """The basis of one layer.

    Attributes:
        name: The layer.
        matrix: ``C`` (directions x width), ``f_hat = C (f - mean)``, strongest direction first.
        inverse: Its right inverse (width x directions): ``f = offset + inverse @ f_hat`` up to what was dropped.
        eigenvalues: ``Lambda``: how much, to first order and in mean square, the output (local basis: the
            next layer's coordinates) changes with the direction. Variances for PCA and neurons.
        mean: What was subtracted; zero without centring.
        offset: What is added coming back: the mean, or without centring its part in the dropped directions.
        activation_rank: Directions the activations span.
        ambiguous: Groups of directions with one repeated eigenvalue: only their span is defined.
        error: Relative standard error of the Jacobian moments; 0 where they are exact.
        round_trip: Share of the outputs' variance lost when the layer goes there and back.
    """

    name: str
    matrix: FloatArray
    inverse: FloatArray
    eigenvalues: FloatArray
    mean: FloatArray
    offset: FloatArray
    activation_rank: int
    ambiguous: tuple[tuple[int, ...], ...] = ()
    error: float = 0.0
    round_trip: float | None = None

    @property
    def directions(self) -> int:
        """Number of basis directions."""
        return len(self.matrix)

    @property
    def width(self) -> int:
        """Number of neurons."""
        return int(self.matrix.shape[1])

    def forward(self, activations: FloatArray) -> FloatArray:
        """Coordinates ``f_hat`` of activations (width last)."""
        result: FloatArray = (activations - self.mean) @ self.matrix.T
        return result

    def backward(self, coordinates: FloatArray) -> FloatArray:
        """Activations with the given coordinates."""
        result: FloatArray = coordinates @ self.inverse.T + self.offset
        return result


@dataclass(frozen=True)
class InteractionBasis(Result):
    """The bases of all layers; index 0 is the input, then each hidden layer, last the output."""

    verb: ClassVar[str] = "interaction-basis"
    key_columns: ClassVar[tuple[str, ...]] = (
        "layer",
        "width",
        "activation_rank",
        "directions",
        "for_90%",
        "for_99%",
    )

    kind: Kind
    layers: tuple[BasisLayer, ...]
    centred: bool
    tolerance: float
    epsilon: float
    data: int
    seed: int
    warnings: tuple[Flag, ...] = ()
    machine: BasisBackend = field(repr=False, compare=False, default=None)  # type: ignore[assignment]

    def payload(self) -> BasisFields:
        """Kind and, per layer, the directions and eigenvalues."""
        return {
            "kind": self.kind,
            "centred": self.centred,
            "tolerance": self.tolerance,
            "epsilon": self.epsilon,
            "data": self.data,
            "seed": self.seed,
            "layers": [
                {
                    "name": layer.name,
                    "width": layer.width,
                    "activation_rank": layer.activation_rank,
                    "directions": layer.directions,
                    "eigenvalues": layer.eigenvalues,
                    "ambiguous": layer.ambiguous,
                    "error": layer.error,
                    "round_trip": layer.round_trip,
                }
                for layer in self.layers
            ],
            "edges": [],
            "modules": [],
            "warnings": self.warnings,
        }

    def frame(self) -> pd.DataFrame:
        """One line per layer."""
        import pandas as pd

        rows = [
            {
                "layer": layer.name,
                "width": layer.width,
                "activation_rank": layer.activation_rank,
                "directions": layer.directions,
                "largest": layer.eigenvalues[0] if layer.directions else None,
                "for_90%": needed(layer.eigenvalues, 0.9),
                "for_99%": needed(layer.eigenvalues, 0.99),
                "ambiguous": sum(map(len, layer.ambiguous)),
                "round_trip": layer.round_trip,
            }
            for layer in self.layers
        ]
        return pd.DataFrame(rows)

    def summary(self) -> RenderableType:
        """How many directions carry the effect on the output, a table of the layers, what a reader must know."""
        from rich.console import Group
        from rich.text import Text

        return Group(Text(self.sentence), Text(self._widths()), self.table_of_layers())

    @property
    def sentence(self) -> str:
        """The answer in plain words."""
        counts = [needed(layer.eigenvalues, 0.99) for layer in self.layers[1:-1]]
        what = (
            "of the effect on the output" if self.kind == "interaction" else f"of the {self.kind} eigenvalues"
        )
        if not counts:
            return f"No hidden layers; the input's {self.layers[0].directions} directions are listed."
        low, high = min(counts), max(counts)
        span = f"{low}" if low == high else f"{low} or {high}" if high == low + 1 else f"{low} to {high}"
        return f"{span} directions per layer carry 99 % {what}."

    def _widths(self) -> str:
        from strati.core.display import printable

        parts = [
            f"{printable(c.name, 32)} {needed(c.eigenvalues, 0.99)} of {c.width}"
            for c in self.layers[1:-1][:6]
        ]
        more = ", ..." if len(self.layers) > 8 else ""
        centred = "centred" if self.centred else "not centred"
        return (
            f"{', '.join(parts)}{more} ({self.data:,} rows, {centred})"
            if parts
            else f"{self.data:,} rows, {centred}"
        )

    def table_of_layers(self) -> RenderableType:
        """Six columns per layer."""
        names = {
            "layer": "layer",
            "width": "neurons",
            "activation_rank": "active",
            "directions": "matter",
            "for_90%": "for 90 %",
            "for_99%": "for 99 %",
        }
        return as_table("", self.frame()[list(names)].rename(columns=names), self.warnings)

    def plot(self, **options: Any) -> Any:
        """Eigenvalues of every layer."""
        from strati.report.plots.basis import plot_eigenvalues

        return plot_eigenvalues(self, **options)


def needed(values: FloatArray, share: float) -> int:
    """How many of the largest values make up a share of their sum.

    Examples:
        >>> needed(np.array([6.0, 3.0, 1.0]), 0.9)
        2
    """
    total = values.sum()
    if values.size == 0 or total <= 0:
        return 0
    cumulated = np.cumsum(np.sort(values)[::-1]) / total
    return int(np.searchsorted(cumulated, share * (1 - 1e-12)) + 1)


def as_table(title: str, frame: pd.DataFrame, warnings: Sequence[Flag]) -> RenderableType:
    """A table with its warnings below, for terminals."""
    from strati.core.display import Column, rows_of, table

    columns = [Column(str(name), right=name not in ("layer", "basis")) for name in frame.columns]
    notes = [f"{flag.code}: {flag.text}" for flag in warnings]
    return table(columns, rows_of(frame), title=title, notes=notes)
