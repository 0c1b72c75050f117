"""What a comparison is: networks, layers side by side, what moved, and how it shows itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from strati.comparison import summary as comparison_text
from strati.core.results import Flag, Result

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import RenderableType

    from strati.comparison.matching import Unmatched
    from strati.comparison.merge_weights import Mixture
    from strati.comparison.outliers import StandsOut
    from strati.comparison.role_differences import Difference, RoleDistribution
    from strati.comparison.series import CheckpointSeries
    from strati.comparison.unit_alignment import UnitOrder
    from strati.core.results import FloatArray
    from strati.schemas.json_types import CompareFields


@dataclass(frozen=True)
class ComparedNetwork:
    """One of the networks."""

    path: str
    format: str
    parameters: int
    tensors: int


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
class Interference:
    """Two adapters of one layer: do they write the same directions?

    Attributes:
        cosine: Between the two updates as vectors: 1 the same, 0 unrelated, -1 opposite.
        written_overlap: Mean squared cosine of the principal angles between what the two can write (column spaces).
        by_chance: What two random subspaces of these dimensions would give.
    """

    cosine: float
    written_overlap: float
    by_chance: float


@dataclass(frozen=True)
class ComparedLayer:
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
        interference: Of two adapters: whether they write the same directions.
        mixture: Weights of the parents, where a merge was asked for.
        agreement: z-score of whether the layer's units are where the first network has them; by chance below 5.
        warnings: What a reader must know, of any of the networks.
        new_warnings: Codes that the last network has and the first has not, and those of the comparison itself.
        update_eigenvalues: Of ``(B - A)^T (B - A)``.
        eigenvalues: Of the layer in every network.
    """

    name: str
    partner: tuple[str, ...]
    role: str
    block: int | None
    metrics: dict[str, tuple[Any, ...]]
    spectral_distance: float | None
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
    warnings: tuple[Flag, ...] = ()
    new_warnings: tuple[str, ...] = ()
    update_eigenvalues: FloatArray | None = field(default=None, metadata={"optional": True})
    eigenvalues: tuple[FloatArray, ...] = field(default=(), metadata={"optional": True})


@dataclass(frozen=True)
class Movement:
    """All tensors that two networks share, of whatever dimension: how many moved, and how far.

    ``median_relative_change`` is over all that moved, biases and norms included; ``vectors_moved`` counts tensors
    that are no layer (biases, norms) and changed by more than rounding, ``moved_vectors`` names them.
    """

    shared: int
    moved: int
    median_relative_change: float | None
    untouched: tuple[str, ...]
    vectors_moved: int = 0
    moved_vectors: tuple[str, ...] = ()


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
    path: LossPath | None = None
    unit_order: UnitOrder | None = field(default=None, repr=False)
    keep_eigenvalues: bool = field(default=False, repr=False)

    def payload(self) -> CompareFields:
        """Networks, layers, roles, series, and what could not be compared."""
        layers: list[Any] = []
        for layer in self.layers:
            fields = dict(vars(layer))
            if not self.keep_eigenvalues:
                del fields["eigenvalues"], fields["update_eigenvalues"]
            layers.append(fields)
        return {
            "networks": self.networks,
            "related": self.related,
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

        keep = ["name", "role", "block", "spectral_distance", "relative_change", "update_stable_rank"]
        keep += ["update_rank", "update_rank_pvalue", "update_kind", "subspace_overlap", "aligned"]
        rows = []
        for layer in self.layers:
            row = {key: getattr(layer, key) for key in keep}
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
        from strati.report.plots.compare import plot_comparison

        return plot_comparison(self, **options)
