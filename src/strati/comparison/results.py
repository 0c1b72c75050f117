"""What a comparison is: networks, layers side by side, what moved, and how it shows itself."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from strati.comparison.summary import headline, is_merge, lines, listed, percent, short_names, state_name
from strati.core.display import Column, Table, TableOptions, command_path, printable, table
from strati.core.errors import BadInputError
from strati.core.options import nearest
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
    from strati.spectra.head_pairs import ComparedHead

_MOST_HEADS = 12  # rows of the table of heads


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
    omitted: ClassVar[tuple[str, ...]] = ("unit_order", "keep_eigenvalues", "view")
    computed: ClassVar[tuple[str, ...]] = ("summary_text",)

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
    heads: tuple[ComparedHead, ...] | None = None
    unit_order: UnitOrder | None = field(default=None, repr=False)
    keep_eigenvalues: bool = field(default=False, repr=False)
    view: TableOptions = field(default_factory=TableOptions, repr=False)

    @property
    def summary_text(self) -> str:
        """The summary as one text."""
        return self.text()

    def payload(self) -> Mapping[str, Any]:
        """The fields of the JSON form; eigenvalues are left out unless they are kept."""
        omitted = () if self.keep_eigenvalues else ("eigenvalues", "update_eigenvalues")
        names = [*ComparedLayer.__annotations__, *LayerUpdate.__annotations__]
        layers = [
            {name: getattr(layer, name) for name in names if name not in omitted} for layer in self.layers
        ]
        return {**super().payload(), "layers": layers}

    def text(self) -> str:
        """What changed and where: the answer, then a line for each kind of number."""
        return "\n".join(self.lines())

    def lines(self) -> list[str]:
        """The lines of :meth:`text`."""
        return lines(self)

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
        return _renderable(self)

    def plot(self, **options: Any) -> Any:
        """Alpha and change over depth for two networks; phases over training for a series."""
        from strati.report.plots.spectra import plot_comparison

        return plot_comparison(self, **options)


def _renderable(result: Comparison) -> RenderableType:
    """The lines above the table, the layers, notes, and the next command."""
    from rich.console import Group

    from strati.core.display import NextCommand, Paragraph

    notes = []
    if result.unmatched:
        short = short_names([layer.name for layer in result.unmatched])
        pairs = zip(short, result.unmatched, strict=True)
        names = [f"{name} (network {layer.network})" for name, layer in pairs]
        notes.append(f"{len(names)} layers have no partner: {listed(names)}")
    notes += [f"{flag.code}: {flag.text}" for flag in result.warnings if flag.code != "unmatched-layers"]
    return Group(
        *(Paragraph(line, "bold" if n == 0 else "") for n, line in enumerate(headline(result))),
        _layer_table(result, result.view),
        *([] if result.heads is None else [_head_table(result.heads)]),
        *(Paragraph(printable(note, 400), "dim") for note in notes),
        NextCommand(_next_commands(result)),
    )


def _next_commands(result: Comparison) -> tuple[str, ...]:
    """Useful commands after this one, the best first; the last one needs no path, so that it always fits."""
    kinds = Counter(
        layer.update_kind for layer in result.layers if layer.update_kind not in (None, "untouched")
    )
    explain = f"strati explain {kinds.most_common(1)[0][0] if kinds else 'update_kind'}"
    sources = [network.adapter or network.path for network in result.networks]
    if not all(Path(source).exists() for source in sources):
        return (explain,)
    paths = [command_path(source) for source in sources]
    if result.series is not None:
        return f"strati track {' '.join(paths)} --out track", explain
    if is_merge(result) or result.related is not True:
        return f"strati lineage {' '.join(paths)}", explain
    if not kinds:
        return f"strati check {paths[-1]}", explain
    if result.networks[-1].adapter is not None:
        return f"strati scan {paths[-1]}", explain
    if set(kinds) <= {"rounding"}:
        return f"strati check {paths[-1]} --base {paths[0]}", f"strati scan {paths[-1]}", explain
    most = max(result.layers, key=lambda layer: layer.relative_change or 0.0)
    pattern = shlex.quote(most.partner[-1].partition("[")[0].removesuffix(".weight"))
    lineage = f"strati lineage {' '.join(paths)}"
    return f"strati scan {paths[-1]} --layers {pattern}", lineage, explain


def _head_table(heads: Sequence[ComparedHead]) -> Table:
    """The products of heads that changed most."""
    changed = [head for head in heads if (head.relative_change or 0.0) > 3 * (head.rounding or 0.0)]
    shown = sorted(changed, key=lambda head: -(head.relative_change or 0.0))[:_MOST_HEADS]
    moved = len({head.name.rpartition(".")[0] for head in heads if head.name != head.partner})
    note = f"{moved} heads have another number" if moved else "no head has another number"
    if len(changed) > len(shown):
        note += f"; {len(changed) - len(shown)} more products in --json"
    numbers = ("product\nchanged", "factors\nchanged", "similarity", "p")
    return table(
        [Column("head", keep=True), "partner", *(Column(name, right=True) for name in numbers)],
        (
            (
                head.name,
                head.partner if head.partner != head.name else "same",
                percent(head.relative_change),
                percent(head.factor_change),
                None if head.similarity is None else f"{head.similarity:.3f}",
                None if head.pvalue is None else f"{head.pvalue:.1g}",
            )
            for head in shown
        ),
        title=f"{len(changed)} of {len(heads)} products of heads changed beyond rounding",
        notes=[note],
    )


def _layer_table(result: Comparison, options: TableOptions) -> RenderableType:
    """The table of layers: by default change, kind, leading directions, state and notes; else the columns asked for."""
    from strati.core.display import Column, rows_of, table

    names = dict(
        zip((x.name for x in result.layers), short_names([x.name for x in result.layers]), strict=True)
    )
    frame = result.frame()
    if options.sort is not None or options.columns:
        for name in (*options.columns, *([options.sort.removeprefix("-")] if options.sort else [])):
            if name != "all" and name not in frame:
                raise BadInputError(
                    f"column {name}", f"there is none of that name; {nearest(name, [str(c) for c in frame])}"
                )
    layers = list(result.layers)
    if options.sort is not None:
        frame = frame.sort_values(options.sort.removeprefix("-"), ascending=not options.sort.startswith("-"))
        by_name = {layer.name: layer for layer in layers}
        layers = [by_name[name] for name in frame["name"]]
    if options.columns:
        fields = [str(c) for c in frame] if options.columns == ("all",) else list(options.columns)
        cells = rows_of(frame[[c for c in fields if c != "name"]])
        columns = [Column(c, right=True) for c in fields if c != "name"]
        rows = [(names[layer.name], *row) for layer, row in zip(layers, cells, strict=True)]
        return table([Column("layer", keep=True), *columns], rows)
    cell_by_column = _columns(result)
    return table(
        [Column("layer", keep=True), *cell_by_column],
        [[names[layer.name], *(cell(layer) for cell in cell_by_column.values())] for layer in layers],
    )


def _columns(result: Comparison) -> dict[Column, Callable[[ComparedLayer], str]]:

    cells: dict[Column, Callable[[ComparedLayer], str]] = {}
    if result.related is not False:
        cells = {
            Column("changed", right=True, keep=True): lambda x: percent(x.relative_change),
            Column("update", keep=True): _update_cell,
            Column("same leading\ndirections\n(by chance)", keep=True): _directions_cell,
        }
    cells[Column("state", gives=0, words=True)] = _state_cell
    partners = short_names([layer.partner[-1] for layer in result.layers])
    if partners != short_names([layer.name for layer in result.layers]):
        by_name = dict(zip((x.name for x in result.layers), partners, strict=True))
        cells[Column("partner", gives=2)] = lambda x: by_name[x.name]
    if any(_note(x) for x in result.layers):
        cells[Column("note", gives=3, words=True)] = _note
    return cells


def _update_cell(layer: ComparedLayer) -> str:
    if layer.update_kind == "low-rank":
        return f"low-rank {layer.update_rank}"
    return layer.update_kind or "-"


def _directions_cell(layer: ComparedLayer) -> str:
    if layer.subspace_overlap is None or layer.overlap_by_chance is None:
        return "-"
    return f"{layer.subspace_overlap:.0%} ({layer.overlap_by_chance:.0%})"


def _state_cell(layer: ComparedLayer) -> str:
    states = [state_name(state) for state in layer.metrics.get("state", ())]
    if not states:
        return "-"
    return states[0] if states[0] == states[-1] else f"{states[0]} → {states[-1]}"


def _note(layer: ComparedLayer) -> str:
    """Patterns, intruders, what was undone, weights of a merge, rounding, and warnings that only the last has."""
    parts = [layer.pattern] if layer.pattern else []
    if layer.intruders:
        parts.append(f"{len(layer.intruders)} intruder{'s' if len(layer.intruders) > 1 else ''}")
    if layer.interference is not None and layer.interference.opposed:
        parts.append(f"opposed {layer.interference.cosine:.2f}")
    parts += [layer.aligned] if layer.aligned else []
    if layer.mixture is not None and layer.mixture.weights[0] is not None:
        pairs = zip(layer.mixture.weights, layer.mixture.stderr, strict=True)
        parts.append(" ".join(f"{w:.3f}±{e:.2g}" for w, e in pairs if w is not None and e is not None))
    if layer.rounding is not None:
        parts.append(f"rounding {layer.rounding.ratio:.2f}")
    return " ".join([*parts, *layer.new_warnings])
