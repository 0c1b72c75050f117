"""Modules of a network: the partition of its interaction graph that cuts the least interaction.

The cost, the search and the number of modules are ``partition``; here a graph and a cutoff become modules with their
members.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Unpack, cast

import numpy as np

from strati.core.errors import BadInputError
from strati.core.options import resolve
from strati.core.results import Flag, Result, Tick, silent
from strati.landscape.basis.graph import InteractionGraph
from strati.landscape.basis.partition import LayeredGraph, by_chance, components, partition, quality, separate
from strati.landscape.basis.result import as_table

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import RenderableType

    from strati.core.option_types import ModulesOptions
    from strati.core.results import FloatArray
    from strati.landscape.basis.ablation import BasisComparison
    from strati.schemas.json_types import ModulesFields

RELATIVE_EPSILON = 1e-3
"""The default cutoff is this share of the strongest edge."""
NOTHING = 1e-3
"""Parts are apart without further evidence if no edge between them exceeds this share of the cutoff."""
LIKE_CHANCE = 1.4
"""A partition that was asked for is called chance if its quality is below this many times that of shuffled edges."""


@dataclass(frozen=True)
class FoundModule:
    """A set of directions, each ``(layer index, direction)``."""

    id: int
    members: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Modules(Result):
    """The partition of an interaction graph into modules.

    Attributes:
        graph: What was partitioned.
        modules: Largest first.
        unattached: Directions without an edge above the cutoff; they belong to no module.
        epsilon: The cutoff on squared edges.
        between: Sum of ``max(0, log(E/eps))`` between modules (section 5.2.3).
        total: The same over all edges.
        balance: Weight of the balance term.
        number: The number of modules asked for, ``None`` if free.
        how: ``"evidence"``, ``"number"`` or ``"balance"``: what decided how many modules there are.
        quality: 1 - cost / cost of one single module; 0 means nothing comes apart.
        shuffled: The same for as many modules of the same weights put on edges at random: what chance gives.
        seen_below: The power of the search: two equal halves of the largest module would have been told apart if
            less than this share of its interaction lay between them; 0: not even without any; ``None``: not known
            (a number or balance was asked for, or the module is too large to test).
        comparison: Other bases of the same network, if they were asked for.
    """

    verb: ClassVar[str] = "basis"

    graph: InteractionGraph
    modules: tuple[FoundModule, ...]
    unattached: tuple[tuple[int, int], ...]
    epsilon: float
    between: float
    total: float
    balance: float
    number: int | None
    quality: float
    shuffled: float | None
    seed: int = 0
    how: str = "evidence"
    seen_below: float | None = None
    comparison: BasisComparison | None = None

    @property
    def labels(self) -> tuple[tuple[int, ...], ...]:
        """Per layer, the module of each direction; -1 for those unattached."""
        labels = [[-1] * layer.directions for layer in self.graph.basis.layers]
        for module in self.modules:
            for layer, direction in module.members:
                labels[layer][direction] = module.id
        return tuple(tuple(row) for row in labels)

    @property
    def objective(self) -> str:
        """The cost that was minimised, in words."""
        number = {
            "evidence": "parts that nothing joins, each split as long as that beats shuffled edges",
            "number": f"{self.number} modules asked for",
            "balance": "as many modules as make the cost least",
        }
        cost = "sum of max(0, log(E/epsilon)) between modules + balance * what modules of that size share by chance"
        return f"{cost}; {number[self.how]}"

    def payload(self) -> ModulesFields:
        """The graph with its modules."""
        fields: dict[str, Any] = dict(self.graph.payload())
        fields["modules"] = self.modules
        fields["unattached"] = self.unattached
        fields["modularity"] = {
            "epsilon": self.epsilon,
            "objective": self.objective,
            "balance": self.balance,
            "number": self.number,
            "how": self.how,
            "between": self.between,
            "total": self.total,
            "quality": self.quality,
            "shuffled": self.shuffled,
            "seen_below": self.seen_below,
        }
        fields["warnings"] = (*fields["warnings"], *self._warnings())
        if self.comparison is not None:
            fields["sparsity"] = self.comparison.sparsity().to_dict("records")
            fields["ablation"] = self.comparison.ablation
        return cast("ModulesFields", fields)

    def frame(self) -> pd.DataFrame:
        """One line per module."""
        import pandas as pd

        layers = self.graph.basis.layers
        rows = []
        for module in self.modules:
            counts = np.bincount([layer for layer, _ in module.members], minlength=len(layers))
            rows.append({"module": module.id, "directions": len(module.members)} | {
                layer.name: int(count) for layer, count in zip(layers, counts, strict=True)
            })  # fmt: skip
        return pd.DataFrame(rows, columns=["module", "directions", *(layer.name for layer in layers)])

    def summary(self) -> RenderableType:
        """How many directions matter, whether they form modules, the layers, then the modules if there are several."""
        from rich.console import Group
        from rich.text import Text

        basis = self.graph.basis
        parts: list[RenderableType] = [Text(basis.sentence), Text(self.sentence), basis.table_of_layers()]
        if len(self.modules) > 1:
            parts.append(as_table("", self.frame().head(20), self._warnings()))
        else:
            parts += [Text(f"{flag.code}: {flag.text}") for flag in self._warnings()]
        return Group(*parts, *self._compared())

    @property
    def sentence(self) -> str:
        """Whether the network splits into modules, in plain words."""
        share = self.between / self.total if self.total > 0 else 0.0
        if len(self.modules) > 1:
            chance = "" if self.shuffled is None else f" (shuffled edges {self.shuffled:.2f})"
            return (
                f"{len(self.modules)} modules; {share:.1%} of the interaction lies between them "
                f"(quality {self.quality:.2f}{chance}, {len(self.unattached)} directions unattached)."
            )
        if not self.modules:
            return "No modules: no edge exceeds the cutoff."
        if self.seen_below is None:
            return "One module: the network does not split into parts."
        if self.seen_below <= 0:
            return "One module, too small to show any split."
        return f"One module (a split with less than {self.seen_below:.0%} crossing would have been seen)."

    def plot(self, **options: Any) -> Any:
        """The layered graph with modules coloured."""
        from strati.report.plots.landscape import plot_graph

        return plot_graph(self.graph, modules=self, **options)

    def _compared(self) -> list[RenderableType]:
        if self.comparison is None:
            return []
        import pandas as pd

        points = pd.DataFrame([vars(point) for point in self.comparison.ablation])
        key = "loss" if points["accuracy"].isna().all() else "accuracy"
        wide = (
            points.pivot(index="kind", columns="kept", values=key).dropna(axis=1).reset_index(names="basis")
        )
        layer = self.comparison.ablation[0].layer
        what = "share of the outputs' variance lost" if key == "loss" else "accuracy"
        return [
            as_table("edges needed, as a share of all", self.comparison.sparsity(), ()),
            as_table(f"{what} with so many directions of {layer} kept", wide.rename(columns=str), ()),
        ]

    def _warnings(self) -> tuple[Flag, ...]:
        if not self.modules:
            return (Flag("no-edges", "no edge is above the cutoff; lower epsilon"),)
        apart = self.between == 0  # nothing above the cutoff joins them: no question of chance
        number_was_set = self.how != "evidence"  # otherwise the search itself has compared them with chance
        if number_was_set and len(self.modules) > 1 and not apart and self._like_chance():
            text = f"quality {self.quality:.3f} is near what shuffled edges give ({self.shuffled:.3f})"
            return (Flag("chance-modules", f"{text}: do not read meaning into these modules"),)
        return ()

    def _like_chance(self) -> bool:
        return self.shuffled is not None and self.quality <= LIKE_CHANCE * self.shuffled


@dataclass(frozen=True)
class ModulesConfig:
    """Options of :func:`modules`.

    Attributes:
        epsilon: Cutoff: squared edges below it count as none. Default :data:`RELATIVE_EPSILON` times the strongest.
        number: Force exactly this many modules.
        balance: Ask for the partition that makes the cost least with this weight of the balance term, however many
            modules that gives; larger gives more and smaller ones.
        seed: Seed of Leiden and of the shuffles.
    """

    epsilon: float | None = None
    number: int | None = None
    balance: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse options that make no sense."""
        if self.epsilon is not None and not 0 < self.epsilon < np.inf:
            raise BadInputError("epsilon", "must be a positive cutoff on squared edges")
        if self.balance is not None and not 0 < self.balance < np.inf:
            raise BadInputError("balance", "must be positive; without balance one single module always wins")
        if self.number is not None and self.number < 1:
            raise BadInputError("number", "ask for at least one module")


def modules(
    graph: InteractionGraph,
    *,
    config: ModulesConfig | None = None,
    tick: Tick = silent,
    **options: Unpack[ModulesOptions],
) -> Modules:
    """The modules of a network: the partition with the least interaction between its parts.

    Minimises ``sum_between max(0, log(E/eps)) + balance * sum_l sum_a out_a,l in_a,l / m_l`` over partitions of
    the directions: section 5.2.3 of degeneracy-in-the-loss-landscape plus the balance term without which one
    single module would win. How many modules there are is decided by evidence: directions that nothing joins (no edge
    above :data:`NOTHING` of the cutoff) are apart; what is joined is split by this cost, into two to six parts, as
    long as the split stands out from the best splits of shuffled edges. ``seen_below`` of the result says what
    separation would have been seen. Leiden and the leading eigenvector give starts, moves of single directions and
    joins of modules refine them on this very cost.

    Args:
        graph: From :func:`strati.interaction_graph`.
        config: Options; keywords of the same names win.
        tick: Called after each stage with its name: the partition, the random baseline.
        options: Fields of :class:`ModulesConfig`.

    Raises:
        BadInputError: A cutoff, balance or number that makes no sense, or no such option.

    Examples:
        >>> import torch
        >>> from strati import interaction_basis, interaction_graph
        >>> _ = torch.manual_seed(0)
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)).double()
        >>> basis = interaction_basis(net, torch.randn(50, 3, dtype=torch.float64))
        >>> [m.members for m in modules(interaction_graph(basis), epsilon=1e-6).modules]
        [((0, 0), (1, 0), (2, 0)), ((0, 1), (1, 1), (2, 1))]
    """
    if not isinstance(graph, InteractionGraph):
        raise BadInputError(
            "graph", f"is a {type(graph).__name__}; compute it with strati.interaction_graph first"
        )
    settings = resolve(ModulesConfig, config, options, of=modules)
    epsilon, number, balance, seed = settings.epsilon, settings.number, settings.balance, settings.seed
    strongest = max((float(e.max()) for e in graph.edges if e.size), default=0.0)
    cutoff = epsilon if epsilon is not None else RELATIVE_EPSILON * strongest
    weight = 1.0 if balance is None else balance
    layered = LayeredGraph([_log_weights(e, cutoff) for e in graph.edges], weight)
    free = number is None and balance is None
    number_was_set = number is not None
    power = None
    if free:
        apart = components(LayeredGraph([_log_weights(e, NOTHING * cutoff) for e in graph.edges]))
        separated = separate(layered, apart=apart, seed=seed)
        labels, power = separated.labels, separated.seen_below
    else:
        labels = partition(layered, number=number, seed=seed, thorough=number_was_set)
    count = int(labels.max(initial=-1)) + 1
    tick("partition")
    baseline = by_chance(layered, count, seed=seed, thorough=number_was_set) if count > 1 else None
    tick("random baseline")
    return Modules(
        graph,
        tuple(FoundModule(k, _places(layered, np.flatnonzero(labels == k))) for k in range(count)),
        _places(layered, np.flatnonzero(labels < 0)),
        cutoff,
        layered.between(labels),
        float(layered.totals.sum()),
        weight,
        number,
        quality(layered, labels),
        baseline,
        seed,
        "evidence" if free else "balance" if number is None else "number",
        power,
    )


def _log_weights(edges: FloatArray, epsilon: float) -> FloatArray:
    above = edges > max(epsilon, 0.0)
    return np.where(above, np.log(np.where(above, edges, 1.0) / (epsilon if epsilon > 0 else 1.0)), 0.0)


def _places(layered: LayeredGraph, nodes: Any) -> tuple[tuple[int, int], ...]:
    layers = np.searchsorted(layered.starts, nodes, side="right") - 1
    return tuple((int(k), int(n - layered.starts[k])) for k, n in zip(layers, nodes, strict=True))
