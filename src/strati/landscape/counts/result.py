"""What ``strati.degeneracy`` gives, its options, and how structural counts and exact ranks become one result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch

from strati.core.display import Column, printable, table, without_shared_prefix
from strati.core.errors import BadInputError
from strati.core.results import Flag, Result
from strati.landscape.counts import exact as exactly
from strati.landscape.mlp.structure import LayerCount

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import RenderableType

    from strati.landscape.llc.estimate import LearningCoefficient
    from strati.schemas.json_types import ScaleFields


Method = Literal["exact", "structural"]
BOUNDED = 0.9
"""Where more than this share of the output values is used, their number limits the count."""


@dataclass(frozen=True)
class DegeneracyConfig:
    """Options of :func:`degeneracy`.

    Attributes:
        epsilon: Also count at this loss scale: activations and Jacobians whose mean square is below it, and
            directions whose unit change costs less.
        exact: Also compute ``N - rank(H)``. ``None``: where it takes seconds. ``True``: up to 20,000 parameters
            or values, minutes and gigabytes. ``False``: never.
        layers: Count only the parameters of these layers, the others fixed; patterns as ``--layers`` takes them.
        seed: Seed of random probes, which networks with many outputs need.
        device: Where to compute; where the model is by default.
    """

    epsilon: float | None = None
    exact: bool | None = None
    layers: str | Sequence[str] | None = None
    seed: int = 0
    device: str | torch.device | None = None

    def __post_init__(self) -> None:
        """Refuse a loss scale that is none."""
        if self.epsilon is not None and not (0 < self.epsilon < float("inf")):
            raise BadInputError("epsilon", f"is {self.epsilon}; a loss scale is a positive number")


@dataclass(frozen=True)
class Degeneracy(Result):
    """Ranks, synchrony and free directions of every layer, and what they leave of the parameters.

    Attributes:
        layers: One count per linear layer, in the network's order.
        parameters: Number of parameters of the network.
        free: Directions in which the behaviour on the data does not change to first order, each counted once.
        method: ``exact``: ``free`` is ``N - rank(H)``, ``H`` the Hessian of the behavioural loss.
            ``structural``: it is what activations, Jacobians, firing and synchrony account for, a lower bound.
        structural_free: The structural count, also where the exact one is known.
        free_elsewhere: Free directions of parameters outside the listed layers (unused parameters, normalisations).
        free_from_few_data: What is free beyond that because there are fewer output values on the data than
            parameters; 0 where the count is exact. Layers, ``free_elsewhere`` and this add up to ``free``.
        free_by_structure: What activations, Jacobians, firing, synchrony and unused parameters leave free, whatever
            the number of data.
        free_at_most: No more can be free; ``None`` where no upper bound is known. Where the rank was computed but
            rounding leaves it open, ``free`` is the structural lower bound and this the other end. Where it takes too
            long, it is computed on as many of the data as seconds allow, and this is what they rule out.
        weakly_used: Directions that are used but move the outputs by less than 1e-6 of the strongest, which float32
            rounding would hide; ``None`` where the rank was not computed.
        data: Number of data.
        epsilon: The loss scale asked for, if any.
        effective_at_epsilon: Parameters used at that loss scale.
        values: Output values on the data: rows times outputs.
        skipped: Parameters that belong to no linear layer, with the reason they are not analysed.
        warnings: What a reader must know.
        llc: Local learning coefficient, if asked for.
        scales: The effective number of parameters over loss scales, if asked for.
    """

    verb: ClassVar[str] = "degeneracy"
    key_columns: ClassVar[tuple[str, ...]] = (
        "name",
        "inputs",
        "outputs",
        "activation_rank",
        "jacobian_rank",
        "free",
    )
    computed: ClassVar[Mapping[str, str]] = {
        "effective": "effective",
        "sentence": "sentence",
        "skipped": "skipped_rows",
    } | {"llc": "llc", "scales": "scale_rows"}
    optional: ClassVar[tuple[str, ...]] = ("llc", "scales")

    layers: tuple[LayerCount, ...]
    parameters: int
    free: int
    method: Method
    structural_free: int
    free_from_few_data: int
    data: int
    free_by_structure: int
    free_elsewhere: int = 0
    free_at_most: int | None = None
    weakly_used: int | None = None
    epsilon: float | None = None
    effective_at_epsilon: int | None = None
    values: int | None = None
    skipped: tuple[tuple[str, str], ...] = ()
    warnings: tuple[Flag, ...] = ()
    llc: LearningCoefficient | None = None
    scales: Any = None

    @property
    def skipped_rows(self) -> list[dict[str, str]]:
        """``skipped`` as in the JSON form."""
        return [{"name": name, "reason": reason} for name, reason in self.skipped]

    @property
    def scale_rows(self) -> list[ScaleFields] | None:
        """``scales`` as in the JSON form."""
        return None if self.scales is None else self.scales.payload()["scales"]

    @property
    def effective(self) -> int:
        """Parameters that are used: all less the free ones."""
        return self.parameters - self.free

    @property
    def bounded_by_data(self) -> bool:
        """Whether the number of output values on the data, not the network, limits what is used."""
        if self.values is None or self.values >= self.parameters:
            return False
        return self.free_from_few_data > 0 or self.effective > BOUNDED * self.values

    @property
    def sentence(self) -> str:
        """The answer in plain words, at most 100 characters."""
        if self.bounded_by_data and self.values is not None:
            outputs = self.values // max(1, self.data)
            return (
                f"Too few data to count: {self.data:,} rows x {outputs:,} outputs can use at most {self.values:,} of "
                f"{self.parameters:,} parameters"
            )
        bound = "" if self.method == "exact" else "at most "
        return f"The network uses {bound}{self.effective:,} of {self.parameters:,} parameters on these data"

    def frame(self) -> pd.DataFrame:
        """One row per layer."""
        import pandas as pd

        rows = [
            {k: v for k, v in asdict(c).items() if k not in ("blocks", "at_epsilon")} for c in self.layers
        ]
        for row, layer in zip(rows, self.layers, strict=True):
            if layer.at_epsilon is not None:
                row |= {f"{k}_at_epsilon": v for k, v in asdict(layer.at_epsilon).items()}
        return pd.DataFrame(rows)

    def summary(self) -> RenderableType:
        """The table per layer, totals, and the sentence."""
        return degeneracy_summary(self)

    def plot(self, **options: Any) -> Any:
        """Bars per layer: what is used, and what each kind of degeneracy leaves free."""
        from strati.report.plots.landscape import plot_degeneracy

        return plot_degeneracy(self, **options)


def probe_warning(uncertain: Sequence[str]) -> Flag:
    """What a reader must know where random probes stood for many outputs."""
    text = "Jacobian ranks are from random probes of the many outputs"
    if uncertain:
        return Flag(
            "probes", f"{text}; they do not settle those of {len(uncertain)} layers, taken as full there"
        )
    return Flag("probes", f"{text}; one probe more added nothing, so they are exact")


def undecided(layers: Sequence[str]) -> Flag:
    """What a reader must know where ranks of single layers cannot be told."""
    text = "ranks cannot be told from rounding in double precision in"
    return Flag("ambiguous-rank", f"{text} {', '.join(layers)}; the larger one was taken")


def should_compute_exact(exact: bool | None, parameters: int, values: int) -> bool:
    """Whether to compute the exact rank.

    Raises:
        BadInputError: It is asked for and cannot be had.
    """
    if exact is None:
        return exactly.affordable(parameters, values)
    if exact and min(parameters, values) > exactly.MOST_EXACT:
        raise BadInputError(
            "exact",
            f"{min(parameters, values):,} dimensions are too many for the exact rank (limit {exactly.MOST_EXACT:,})",
        )
    return exact


@dataclass(frozen=True)
class ProblemSize:
    """How large the problem is: parameters (of them unused by the network), data, and values (data times outputs).

    ``least_rank`` is what the rank is at least, where the exact one was not computed and that much can be told.
    """

    parameters: int
    unused: int
    data: int
    values: int
    least_rank: int | None = None


def assemble(
    layers: Sequence[LayerCount],
    size: ProblemSize,
    ranks: exactly.ExactRanks | None,
    *,
    epsilon: float | None,
    warnings: Sequence[Flag] = (),
    skipped: Sequence[tuple[str, str]] = (),
    elsewhere: int = 0,
) -> Degeneracy:
    """The result from structural counts and, where known, exact ranks (with one entry more for other parameters).

    Args:
        layers: One count per layer.
        size: How large the problem is.
        ranks: Of the Hessian, layer by layer.
        epsilon: The loss scale asked for.
        warnings: What a reader must know.
        skipped: What was not analysed.
        elsewhere: Free directions of parameters outside the layers, by structure.
    """
    by_layers = sum(layer.free for layer in layers) + size.unused + elsewhere
    structural = max(by_layers, size.parameters - size.values)
    if ranks is not None:  # never above what the rank leaves
        structural = min(structural, size.parameters - ranks.total.low)
    few = size.parameters - size.unused > size.values
    text = f"{size.data:,} data give {size.values:,} values for {size.parameters:,} parameters: more may use more"
    effective = None
    if epsilon is not None:
        there = sum(c.at_epsilon.free for c in layers if c.at_epsilon is not None) + size.unused
        effective = size.parameters - max(there, structural)
    result = Degeneracy(
        layers=tuple(replace(layer, structural_free=layer.free) for layer in layers),
        parameters=size.parameters,
        free=structural,
        method="structural",
        structural_free=structural,
        free_from_few_data=structural - by_layers,
        free_by_structure=min(by_layers, structural),
        free_elsewhere=size.unused + elsewhere,
        free_at_most=None if size.least_rank is None else size.parameters - size.least_rank,
        data=size.data,
        epsilon=epsilon,
        effective_at_epsilon=effective,
        values=size.values,
        skipped=tuple(skipped),
        warnings=(*warnings, Flag("few-data", text)) if few else tuple(warnings),
    )
    return result if ranks is None else _with_ranks(result, size, ranks)


def _with_ranks(result: Degeneracy, size: ProblemSize, ranks: exactly.ExactRanks) -> Degeneracy:
    """The exact count in place of the structural one, or both ends where rounding leaves the rank open."""
    low, most = ranks.total.low, size.parameters - ranks.total.low
    high = min(ranks.total.high, size.parameters - result.structural_free)
    flags = list(result.warnings)
    if ranks.spread > exactly.SPREAD:
        flags.append(
            Flag(
                "wide-scales",
                f"some parameters act {ranks.spread:.0e} times more weakly than others; they count as used",
            )
        )
    result = replace(
        result,
        free_at_most=most,
        weakly_used=ranks.weak,
        effective_at_epsilon=ranks.above,
    )
    if low < high:
        text = (
            f"between {result.structural_free:,} and {most:,} directions are free: "
            f"{high - low:,} singular values of the Jacobian are too small to be told from zero in double precision"
        )
        return replace(result, warnings=(*flags, Flag("undecided-rank", text)))
    if ranks.weak:
        text = f"{ranks.weak:,} used directions move the outputs by less than 1e-6 of the strongest one"
        flags.append(Flag("weak-directions", f"{text}; rounding the weights to float32 can hide them"))
    sizes = [layer.parameters for layer in result.layers]
    remaining = [size.parameters - size.unused - sum(sizes)] if len(ranks.ranges) > len(sizes) else []
    free = ranks.free(sizes + remaining)
    return replace(
        result,
        layers=tuple(replace(c, free=f) for c, f in zip(result.layers, free, strict=False)),
        free=sum(free) + size.unused,
        method="exact",
        free_from_few_data=0,
        free_elsewhere=size.unused + sum(free[len(sizes) :]),
        warnings=tuple(flags),
    )


TOTAL = "free"
"""Heading of the column that counts every free direction once."""


def degeneracy_summary(result: Degeneracy) -> RenderableType:
    """The answer in words, what structure alone leaves free, a table per layer, then what a reader must know."""
    from rich.console import Group
    from rich.text import Text

    columns = _columns(result)
    rows = [
        [name, *(values[index] for values in columns.values())] for index, name in enumerate(_names(result))
    ]
    drawn = table(
        [Column("layer", keep=True), *(Column(name, right=True, keep=name == TOTAL) for name in columns)],
        [*rows, *_totals(result, list(columns))],
    )
    lines = [result.sentence + ".", *_details(result)]
    notes = [f"not analysed: {printable(name)}: {reason}" for name, reason in result.skipped[:1]]
    if len(result.skipped) > 1:
        notes = [
            f"{len(result.skipped)} layers are not analysed (tied or elementwise weights); --json lists them"
        ]
    notes += [f"note: {flag.text}" for flag in result.warnings if flag.code not in ("few-data", "probes")]
    parts: list[RenderableType] = [*(Text(line) for line in lines), drawn, *(Text(note) for note in notes)]
    for more in (result.llc, result.scales):
        if more is not None:
            parts.append(more.summary())
    return Group(*parts)


def _details(result: Degeneracy) -> list[str]:
    """What is free and how it was counted; where most of it lies; dead neurons."""
    lines = []
    if result.values is not None and result.bounded_by_data:
        lines.append(f"Give at least {-(-result.parameters * result.data // result.values):,} rows.")
        structural = result.free_by_structure
        share = f"{structural / result.parameters:.0%}"
        lines.append(f"By structure alone {structural:,} parameters ({share}) are free{_where(result)}.")
    else:
        share = f"{result.free / result.parameters:.0%}"
        lines.append(
            f"{result.free:,} ({share}) are free on {result.data:,} rows ({_how(result)}){_where(result)}."
        )
    if result.effective_at_epsilon is not None:
        lines.append(f"At a loss scale of {result.epsilon:g} about {result.effective_at_epsilon:,} are used.")
    dead = {name: layer.dead for name, layer in zip(_names(result), result.layers, strict=True) if layer.dead}
    if dead:
        places = ", ".join(f"{count} in {name}" for name, count in list(dead.items())[:4])
        lines.append(f"{sum(dead.values()):,} dead neurons: {places}{', ...' if len(dead) > 4 else ''}.")
    return lines


def _where(result: Degeneracy) -> str:
    counts = [(free, name) for free, name in zip(_free(result), _names(result), strict=True) if free]
    if len(counts) < 2:
        return ""
    largest = sorted(counts, key=lambda pair: -pair[0])[:4]
    return ": " + ", ".join(f"{name} {free:,}" for free, name in largest)


def _names(result: Degeneracy) -> list[str]:
    return [printable(name, 48) for name in without_shared_prefix([layer.name for layer in result.layers])]


def _free(result: Degeneracy) -> list[int]:
    """What each layer leaves free; by structure where the number of data limits the exact rank."""
    return [c.structural_free if result.bounded_by_data else c.free for c in result.layers]


def _columns(result: Degeneracy) -> dict[str, list[str]]:
    """Headings and cells: at most six columns with the layer's; JSON and Python have the rest."""
    layers = result.layers
    columns = {
        "matrix": [f"{c.outputs}x{c.inputs}{'+b' if c.bias else ''}" for c in layers],
        "input rank": [f"{c.activation_rank:,}" for c in layers],
        "output rank": [f"{c.jacobian_rank:,}" for c in layers],
    }
    if any(c.dead for c in layers):
        columns["dead"] = [f"{c.dead:,}" for c in layers]
    if result.epsilon is not None:
        there = [c.at_epsilon.free for c in layers if c.at_epsilon is not None]
        columns.pop("dead", None)
        columns[f"free at {result.epsilon:g}"] = [f"{v:,}" for v in there]
    columns[TOTAL] = [f"{free:,}" for free in _free(result)]
    return columns


def _totals(result: Degeneracy, columns: list[str]) -> list[list[str]]:
    """What is free beside the layers, and the sum of the column."""
    few, elsewhere = result.free_from_few_data, result.free_elsewhere
    if result.bounded_by_data:
        few = result.free - result.free_by_structure
        elsewhere = result.free_by_structure - sum(_free(result))
    beside = {"(other parameters)": elsewhere, "(too few data)": few}
    rows = [(name, free) for name, free in beside.items() if free]
    if len(result.layers) + len(rows) < 2:
        return []
    return [
        [name, *(f"{free:,}" if heading == TOTAL else "" for heading in columns)]
        for name, free in (*rows, ("total", result.free))
    ]


def _how(result: Degeneracy) -> str:
    if result.method == "exact":
        return "exact: N - rank of the Hessian"
    if result.free_at_most is not None:
        return f"a lower bound; at most {result.free_at_most:,}"
    more = "; how many more cannot be told" if result.parameters > exactly.MOST_EXACT else ""
    return f"by structure, a lower bound{more}"
