"""What a comparison is: networks, layers side by side, what moved, and how it shows itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from strati.comparison import summary as comparison_text
from strati.core.display import TableOptions
from strati.core.results import Flag, Result

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import RenderableType

    from strati.comparison.layer_statistics import CheckpointSeries, Difference, RoleDistribution, StandsOut
    from strati.comparison.matching import Unmatched
    from strati.comparison.merging import Interference, Mixture
    from strati.comparison.unit_alignment import UnitOrder
    from strati.comparison.update import Intruder
    from strati.core.results import FloatArray
    from strati.schemas.json_types import CompareFields


@dataclass(frozen=True)
class ComparedNetwork:
    """One of the networks.

    Attributes:
        path: The network.
        format: Its file format.
        parameters: Number of its parameters.
        tensors: Number of its tensors.
        adapter: The adapter that was merged into its base to make this network; ``None`` for other networks.
    """

    path: str
    format: str
    parameters: int
    tensors: int
    adapter: str | None = None


@dataclass(frozen=True)
class RoundingError:
    """What quantisation did to a layer, against what its step predicts.

    Attributes:
        error: Root mean square of the entries of ``B - A``.
        predicted: What rounding to the nearest code of the stored step leaves.
        ratio: Of the two; above 1 the layer is rounded worse than its step allows.
    """

    error: float
    predicted: float
    ratio: float


@dataclass(frozen=True)
class LayerUpdate:
    """The update from the first version of a layer to the last; ``None`` where they cannot be subtracted.

    Attributes:
        relative_change: ``||B - A|| / ||A||``.
        update_stable_rank: Of ``B - A``.
        update_rank: Singular values of ``B - A`` beyond rounding.
        update_rank_pvalue: The chance that rounding gives one as large as the weakest counted.
        update_kind: ``untouched``, ``rounding``, ``low-rank``, ``dense`` or ``undecided``.
        subspace_overlap: Of the leading singular subspaces of ``A`` and ``B``.
        overlap_by_chance: What two random subspaces would give.
        subspace_directions: How many directions were compared.
        aligned: What was undone before subtracting (``rope-permutation``, ``transposed``, ...), ``None`` if nothing.
        rounding: The error of quantisation against what its step predicts, where one of the two is quantised.
        interference: Of two adapters, or of several networks after their base: whether their updates oppose each other.
        mixture: Weights of the parents, where a merge was asked for.
        agreement: z-score of whether the layer's units are where the first network has them; by chance below 5.
        intruders: Leading directions of the last network's layer without a partner in the first's.
        pattern: A change with a name: ``zeros``, ``grid``, ``projection`` or ``sparse``; ``None`` for any other.
        pattern_share: Of the entries that became zero or changed.
        warnings: What a reader must know, of any of the networks.
        update_eigenvalues: Of ``(B - A)^T (B - A)``.
    """

    relative_change: float | None = None
    update_stable_rank: float | None = None
    update_rank: int | None = None
    update_rank_pvalue: float | None = None
    update_kind: str | None = None
    subspace_overlap: float | None = None
    overlap_by_chance: float | None = None
    subspace_directions: int | None = None
    aligned: str | None = None
    rounding: RoundingError | None = None
    interference: Interference | None = None
    mixture: Mixture | None = None
    agreement: float | None = None
    intruders: tuple[Intruder, ...] = ()
    pattern: str | None = None
    pattern_share: float | None = None
    warnings: tuple[Flag, ...] = ()
    update_eigenvalues: FloatArray | None = field(default=None, metadata={"optional": True})


@dataclass(frozen=True, kw_only=True)
class ComparedLayer(LayerUpdate):
    """One layer in every network.

    ``metrics`` has a value per network; the other numbers lead from the first network to the last. They are ``None``
    where the shapes differ (all but ``spectral_distance``) or a value is not defined.

    Attributes:
        name: Its name in the first network.
        partner: Its names in the others.
        role: What it does.
        block: The block it belongs to in the first network.
        metrics: Every number of a scan, a value per network.
        spectral_distance: Between the spectra, on a logarithmic scale.
        new_warnings: Codes that the last network has and the first has not, and those of the comparison itself.
        eigenvalues: Of the layer in every network.
    """

    name: str
    partner: tuple[str, ...]
    role: str
    block: int | None
    metrics: dict[str, tuple[Any, ...]]
    spectral_distance: float | None
    new_warnings: tuple[str, ...] = ()
    eigenvalues: tuple[FloatArray, ...] = field(default=(), metadata={"optional": True})


@dataclass(frozen=True)
class ComparedVector:
    """A bias, norm weight or other tensor that is no layer, in two networks.

    Attributes:
        name: Its name in the first network.
        partner: Its name in the last one.
        relative_change: ``||B - A|| / ||A||``; ``None`` where only ``A`` is zero or the sizes differ.
        kind: ``untouched``, ``rounding`` (a conversion between two dtypes) or ``changed``.
        aligned: What was undone before subtracting (``norm-plus-one``, ``folded-norm``, ``units``, ...).
    """

    name: str
    partner: str
    relative_change: float | None
    kind: str
    aligned: str | None = None


@dataclass(frozen=True)
class Movement:
    """All tensors that two networks share.

    Attributes:
        shared: How many there are.
        moved: How many differ.
        median_relative_change: Over all that differ, biases and norms included.
        untouched: Names of those that do not differ.
        vectors_moved: Number of vectors (biases, norms) that changed by more than rounding.
        moved_vectors: Their names in the last network.
        vectors: All vectors that were compared.
        only_first: Vectors that only the first network has.
        only_last: Vectors that only the last network has.
    """

    shared: int
    moved: int
    median_relative_change: float | None
    untouched: tuple[str, ...]
    vectors_moved: int = 0
    moved_vectors: tuple[str, ...] = ()
    vectors: tuple[ComparedVector, ...] = ()
    only_first: tuple[str, ...] = ()
    only_last: tuple[str, ...] = ()


@dataclass(frozen=True)
class LossLine:
    """The loss along one line.

    Attributes:
        loss: Mean over the rows at every position.
        stderr: Its standard errors.
        barrier: The largest excess over the straight line between the two ends' losses.
        barrier_stderr: Its standard error, from the rows' own excesses at that position.
        barrier_at: That position.
    """

    loss: tuple[float, ...]
    stderr: tuple[float, ...]
    barrier: float
    barrier_stderr: float
    barrier_at: float


@dataclass(frozen=True)
class LossPath:
    """The loss between two networks.

    Attributes:
        loss_name: ``mse`` or ``cross_entropy``.
        rows: Rows of data.
        positions: From the first network (0) to the last (1).
        stored: Along the line between the weights as stored.
        aligned: The same with the last network in the first one's numbering; ``None`` where they agree already.
    """

    loss_name: str
    rows: int
    positions: tuple[float, ...]
    stored: LossLine
    aligned: LossLine | None


@dataclass(frozen=True)
class Comparison(Result):
    """Networks side by side.

    ``related`` says whether the last network's weights come from the first's, or both from a third's: true where a
    layer resembles its partner more than chance allows, false where none does, null where it cannot be decided.
    ``removed_direction`` is the number of layers that one and the same direction was projected out of (abliteration).
    """

    verb: ClassVar[str] = "compare"
    key_columns: ClassVar[tuple[str, ...]] = (
        "name",
        "relative_change",
        "update_kind",
        "update_rank",
        "subspace_overlap",
        "aligned",
    )

    networks: tuple[ComparedNetwork, ...]
    matched_by: str
    layers: tuple[ComparedLayer, ...]
    roles: tuple[tuple[RoleDistribution, ...], ...]
    role_differences: tuple[tuple[Difference, ...], ...]
    movement: Movement | None
    series: CheckpointSeries | None
    unmatched: tuple[Unmatched, ...]
    warnings: tuple[Flag, ...]
    stand_out: tuple[StandsOut, ...] = ()
    related: bool | None = None
    removed_direction: int = 0
    path: LossPath | None = None
    unit_order: UnitOrder | None = field(default=None, repr=False)
    keep_eigenvalues: bool = field(default=False, repr=False)
    view: TableOptions = field(default_factory=TableOptions, repr=False)

    def payload(self) -> CompareFields:
        """Networks, layers, roles, series, and what could not be compared."""
        omitted = () if self.keep_eigenvalues else ("eigenvalues", "update_eigenvalues")
        names = [*ComparedLayer.__annotations__, *LayerUpdate.__annotations__]
        layers: list[Any] = [
            {name: getattr(layer, name) for name in names if name not in omitted} for layer in self.layers
        ]
        return {
            "networks": self.networks,
            "related": self.related,
            "removed_direction": self.removed_direction,
            "matched_by": self.matched_by,
            "layers": layers,
            "roles": self.roles,
            "role_differences": self.role_differences,
            "movement": self.movement,
            "series": self.series,
            "stand_out": self.stand_out,
            "path": self.path,
            "unmatched": self.unmatched,
            "warnings": self.warnings,
            "summary_text": self.text(),
        }

    def text(self) -> str:
        """What changed and where: the answer, then a line for each kind of number."""
        return "\n".join(self.lines())

    def lines(self) -> list[str]:
        """The lines of :meth:`text`."""
        return comparison_text.lines(self)

    def frame(self) -> pd.DataFrame:
        """One row per layer: the changes, then each metric once per network (``alpha_0``, ``alpha_1``, ...)."""
        import pandas as pd

        fields = (
            *("name", "role", "block", "spectral_distance", "relative_change", "update_stable_rank"),
            *("update_rank", "update_rank_pvalue", "update_kind", "subspace_overlap", "aligned", "pattern"),
        )
        rows = []
        for layer in self.layers:
            row = {key: getattr(layer, key) for key in fields} | {"intruders": len(layer.intruders)}
            row["partner"] = " ".join(layer.partner)
            row["warnings"] = " ".join(dict.fromkeys(flag.code for flag in layer.warnings))
            if layer.mixture is not None:
                row |= {f"weight_{i}": w for i, w in enumerate(layer.mixture.weights)}
            for name, values in layer.metrics.items():
                row |= {f"{name}_{i}": value for i, value in enumerate(values)}
            rows.append(row)
        return pd.DataFrame(rows)

    def summary(self) -> RenderableType:
        """The sentences, the layers, and the roles' differences."""
        return comparison_text.renderable(self)

    def plot(self, **options: Any) -> Any:
        """Alpha and change over depth for two networks; phases over training for a series."""
        from strati.report.plots.spectra import plot_comparison

        return plot_comparison(self, **options)
