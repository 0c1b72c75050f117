"""What a basis is made of: the layers' bases, and the network with its data that graphs and ablations go back to.

Finding a basis is ``basis``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch

from strati.core.errors import BadInputError
from strati.core.results import Flag, Result

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import RenderableType

    from strati.core.results import FloatArray
    from strati.landscape.basis.basis import BasisBackend
    from strati.schemas.json_types import BasisFields

Kind = Literal["interaction", "local", "pca", "neuron"]


@dataclass(frozen=True)
class BasisConfig:
    """Options of :func:`interaction_basis`.

    Attributes:
        centre: Subtract the mean activation first.
        tolerance: Eigenvalues below this share of the largest count as zero; by default
            :data:`strati.landscape.basis.basis.TOLERANCE` of the precision the network runs in.
        epsilon: Also drop directions whose eigenvalue is below this loss: what they do to the output is,
            in mean square and to first order, less.
        sites: Where to read a network that is not a chain: ``"residual"`` (the stream between blocks), ``"mlp"``
            (each block's MLP hidden layer), or names of modules, ``"NAME"`` for what comes out and ``"NAME:input"``
            for what goes in. ``None`` takes the children of a sequential network, else the residual stream.
        probes: Random probes per datum where the exact Jacobian would take more backward passes.
        batch: Data per forward pass.
        layers: Read only some of these places: patterns as ``--layers`` takes them; input and output stay.
        seed: Seed of the random probes.
        device: Where to compute; where the model is by default.
    """

    centre: bool = True
    tolerance: float | None = None
    epsilon: float = 0.0
    sites: str | Sequence[str] | None = None
    probes: int = 32
    batch: int = 64
    layers: str | Sequence[str] | None = None
    seed: int = 0
    device: str | torch.device | None = None

    def __post_init__(self) -> None:
        """Refuse options that make no sense."""
        if not 0 <= self.epsilon < np.inf:
            raise BadInputError("epsilon", "must be a loss, zero or positive")
        if self.tolerance is not None and not 0 < self.tolerance < 1:
            raise BadInputError("tolerance", "must be between 0 and 1")
        if self.probes < 1 or self.batch < 1:
            raise BadInputError("probes" if self.probes < 1 else "batch", "must be at least 1")


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
        from strati.report.plots.landscape import plot_eigenvalues

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
