"""The result of ``lineage``: pairs of networks, the tree they make, and the words for both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from strati.comparison.independence import SMALLEST
from strati.comparison.relation import LineageDirection, RelationKind
from strati.core.display import printable
from strati.core.results import Result

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import RenderableType


BLOCK_LEVEL = 1e-3
"""P-value below which a block counts as shared."""

_MANY = 24  # rows of a table
_NAME = 26


@dataclass(frozen=True)
class LineageBlock:
    """Units of a block of A and of a block of B.

    Attributes:
        a: The block in A.
        b: In B.
        agreement: Share of the units on which both matchings agree.
        pvalue: Of the block alone.
        units: How many units were matched.
    """

    a: str
    b: str
    agreement: float
    pvalue: float
    units: int


@dataclass(frozen=True)
class LineagePair:
    """Two networks.

    Attributes:
        a: The first.
        b: The second.
        pvalue: Of "trained independently"; ``None`` where they have no units in common.
        related: Whether they share training; ``None`` where it cannot be decided.
        kind: What lies between them.
        direction: ``a-to-b``, ``b-to-a`` or ``None`` where the weights show none.
        blocks: Evidence, block by block; of networks that a first look at sketches set apart, a few blocks.
        direction_by: What shows the direction: ``finer-dtype``, ``grid``, ``zeros-or-units``, ``absent-update``,
            ``mixture`` or ``adapter-file``; ``None`` where there is none.
        scheme: Of a quantised network, the scheme that its file names; ``grid`` where only the weights show it.
        distance: Of all layers, relative to their norms; ``None`` where they are not related.
        separation: The same distance, not relative, which compares pairs of one family.
        new_layers: Layers of B that resemble A's no more than chance allows, where others do.
        rank: Of a LoRA.
        renumbered: B numbers its units otherwise than A.
        parents: Of a merge, the networks it was made from.
        weights: Of a merge, their weights.
        weights_stderr: Their standard errors.
    """

    a: str
    b: str
    pvalue: float | None
    related: bool | None
    kind: RelationKind
    direction: LineageDirection | None
    blocks: tuple[LineageBlock, ...]
    distance: float | None = None
    separation: float | None = None
    new_layers: tuple[str, ...] = ()
    rank: int | None = None
    renumbered: bool = False
    parents: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()
    weights_stderr: tuple[float | None, ...] = ()
    direction_by: str | None = None
    scheme: str | None = None

    @property
    def shared_blocks(self) -> int:
        """Blocks that are shared beyond chance."""
        return sum(block.pvalue <= BLOCK_LEVEL for block in self.blocks)


@dataclass(frozen=True)
class TreeEdge:
    """An edge of the tree; parent and child in either order where ``directed`` is false."""

    parent: str
    child: str
    kind: RelationKind
    directed: bool


@dataclass(frozen=True)
class Lineage(Result):
    """Whether networks are related, how, and as a tree.

    Attributes:
        networks: Their names, in the order given.
        pairs: Every two of them.
        tree: Edges that join each family; the second parent of a merge has an edge of its own.
    """

    verb: ClassVar[str] = "lineage"
    key_columns: ClassVar[tuple[str, ...]] = ("a", "b", "kind", "direction", "pvalue", "distance")
    computed: ClassVar[tuple[str, ...]] = ("summary_text",)

    networks: tuple[str, ...]
    pairs: tuple[LineagePair, ...]
    tree: tuple[TreeEdge, ...]

    @property
    def summary_text(self) -> str:
        """The summary as one text."""
        return "\n".join(self.lines())

    def frame(self) -> pd.DataFrame:
        """One row per pair."""
        import pandas as pd

        columns = ["a", "b", "pvalue", "related", "kind", "direction", "distance", "rank", "renumbered"]
        rows = [
            {name: getattr(pair, name) for name in columns} | {"shared_blocks": pair.shared_blocks}
            for pair in self.pairs
        ]
        return pd.DataFrame(rows)

    def families(self) -> list[list[str]]:
        """Networks joined by the tree, largest family first."""
        members = {name: [name] for name in self.networks}
        for edge in self.tree:
            ours, theirs = members[edge.parent], members[edge.child]
            if ours is not theirs:
                ours += theirs
                members |= dict.fromkeys(theirs, ours)
        unique = {id(family): family for family in members.values()}
        return sorted(unique.values(), key=len, reverse=True)

    def lines(self) -> list[str]:
        """The answer, and what it rests on."""
        if len(self.networks) == 2:
            return _pair_lines(self.pairs[0])
        families = self.families()
        alone = sum(len(family) == 1 for family in families)
        related = sum(pair.related is True for pair in self.pairs)
        unclear = sum(pair.related is None for pair in self.pairs)
        grown = len(families) - alone
        answer = f"{len(self.networks)} networks: {_counted(grown, 'family', 'families')}, {alone} without relatives."
        counts = f"{related} of {len(self.pairs)} pairs are related"
        return [answer, f"{counts}, {unclear} undecided." if unclear else f"{counts}.", *self._drawn()]

    def _drawn(self) -> Iterator[str]:
        """The tree as indented text: under each network those that hang on it."""
        short = _short_names(self.networks)
        neighbours: dict[str, list[TreeEdge]] = {name: [] for name in self.networks}
        for edge in self.tree:
            neighbours[edge.parent].append(edge)
            neighbours[edge.child].append(edge)
        children = {edge.child for edge in self.tree if edge.directed}
        drawn_names: set[str] = set()
        for family in self.families():
            roots = [name for name in family if name not in children] or family
            root = max(roots, key=lambda name: len(neighbours[name]))
            stack = [(root, 0, "")]
            while stack:
                name, depth, how = stack.pop()
                if name in drawn_names:
                    continue
                drawn_names.add(name)
                yield "  " * depth + short[name] + how
                for edge in reversed(neighbours[name]):
                    other = edge.child if edge.parent == name else edge.parent
                    if not edge.directed:
                        arrow = "--"
                    else:
                        arrow = "->" if edge.parent == name else "<-"
                    stack.append((other, depth + 1, f"  ({arrow} {edge.kind})"))

    def summary(self) -> RenderableType:
        """The answer, the table of blocks or edges, the next command."""
        from rich.console import Group
        from rich.text import Text

        from strati.core.display import Column, NextCommand, Paragraph, command_path, table

        two = len(self.networks) == 2
        parts: list[RenderableType] = [Paragraph(line) if two else Text(line) for line in self.lines()]
        columns, rows = self._block_rows() if two else self._edge_rows()
        if rows:
            right = ("agreement", "units", "blocks", "p")
            parts.append(table([Column(name, right=name in right) for name in columns], rows))
        pair_names: tuple[str, str] | None = (self.pairs[0].a, self.pairs[0].b) if two else None
        kind = self.pairs[0].kind if two else RelationKind.UNRELATED
        if not two and self.tree:
            pair_names, kind = (self.tree[0].parent, self.tree[0].child), self.tree[0].kind
        commands = [f"strati explain {kind}"]
        if pair_names is not None and all(Path(name).exists() for name in pair_names):
            first, second = (command_path(name) for name in pair_names)
            commands = [f"strati compare {first} {second}", f"strati scan {second}", *commands]
        parts.append(NextCommand(tuple(commands)))
        return Group(*parts)

    def _block_rows(self) -> tuple[tuple[str, ...], list[tuple[object, ...]]]:
        rows: list[tuple[object, ...]] = [
            (printable(x.a, 24), printable(x.b, 24), f"{x.agreement:.0%}", x.units, _p(x.pvalue))
            for x in self.pairs[0].blocks[:_MANY]
        ]
        return ("block of A", "block of B", "agreement", "units", "p"), rows

    def _edge_rows(self) -> tuple[tuple[str, ...], list[tuple[object, ...]]]:
        short = _short_names(self.networks)
        by_names = {frozenset((pair.a, pair.b)): pair for pair in self.pairs}
        rows: list[tuple[object, ...]] = []
        for edge in self.tree[:_MANY]:
            pair = by_names[frozenset((edge.parent, edge.child))]
            blocks, directed = f"{pair.shared_blocks}/{len(pair.blocks)}", "yes" if edge.directed else "no"
            rows.append(
                (short[edge.parent], short[edge.child], str(edge.kind), blocks, _p(pair.pvalue), directed)
            )
        return ("parent", "child", "kind", "blocks", "p", "directed"), rows


def _counted(count: int, noun: str, plural: str) -> str:
    return f"{count} {noun if count == 1 else plural}"


def _p(pvalue: float | None) -> str:
    if pvalue is None:
        return "-"
    return "< 1e-300" if pvalue <= SMALLEST else f"{pvalue:.2g}"


def _equals(pvalue: float | None) -> str:
    return (
        "no units to test"
        if pvalue is None
        else "p " + (_p(pvalue) if pvalue <= SMALLEST else f"= {_p(pvalue)}")
    )


def _short_names(names: Sequence[str]) -> dict[str, str]:
    """File names without the folders, where they differ."""
    short = {}
    for name in names:
        place = Path(name)
        generic = place.stem in ("model", "pytorch_model", "weights")
        file_name = place.name if place.is_dir() else place.stem
        short[name] = (place.parent.name or file_name) if generic else file_name
    if len(set(short.values())) < len(names):
        short = {name: "/".join(Path(name).parts[-2:]) for name in names}
    if len(set(short.values())) < len(names):
        short = {name: f"{place} [{n + 1}]" for n, (name, place) in enumerate(short.items())}
    return {name: printable(text, _NAME) for name, text in short.items()}


_EVIDENCE = {
    "finer-dtype": "its dtype is finer",
    "grid": "the other's weights lie on a grid",
    "zeros-or-units": "the other lacks weights that it has",
    "absent-update": "the directions of the update are absent in it",
    "mixture": "the other is a mixture of it and a third network",
    "adapter-file": "the other is an adapter of it",
    "": "the weights of the other derive from it",
}


def _pair_lines(pair: LineagePair) -> list[str]:
    short = _short_names((pair.a, pair.b))
    earlier, later = short[pair.a], short[pair.b]
    if pair.direction is LineageDirection.B_TO_A:
        earlier, later = later, earlier
    blocks = f"{pair.shared_blocks} of {len(pair.blocks)} blocks, {_equals(pair.pvalue)}"
    if pair.kind is RelationKind.UNRELATED:
        return [f"nothing in common, {_equals(pair.pvalue)}.", _tested(pair)]
    if pair.kind is RelationKind.UNDECIDED:
        return [f"cannot tell whether {later} comes from {earlier}: {_equals(pair.pvalue)}.", _tested(pair)]
    sentence = {
        RelationKind.IDENTICAL: f"{later} is identical to {earlier}",
        RelationKind.CONVERTED: f"{later} is a conversion of {earlier}",
        RelationKind.QUANTISED: f"{later} is a quantisation{_scheme(pair)} of {earlier}",
        RelationKind.LORA: f"{later} is {earlier} with a LoRA of rank {pair.rank}",
        RelationKind.FINE_TUNED: f"{later} is a fine-tune of {earlier}",
        RelationKind.MERGED: f"{later} is a merge of {earlier} and others",
        RelationKind.PRUNED: f"{later} is a pruning of {earlier}",
        RelationKind.PARTLY_RETRAINED: f"{later} is {earlier} with new layers",
    }[pair.kind]
    if pair.direction is None and pair.kind is RelationKind.FINE_TUNED:
        sentence = f"{earlier} and {later} share training; one is a fine-tune of the other"
    if pair.direction is None and pair.kind is RelationKind.LORA:
        sentence = f"{earlier} and {later} differ by a LoRA of rank {pair.rank}"
    percent = 100 * (pair.distance or 0)
    moved = (
        f"The weights differ by {percent:.0f} %"
        if percent >= 10
        else f"The weights differ by {percent:.2g} %"
    )
    if pair.direction is not None:
        moved += f" and show that {earlier} came first ({_EVIDENCE[pair.direction_by or '']})."
    elif pair.kind is not RelationKind.IDENTICAL:
        moved += " and do not show which came first."
    else:
        moved += "."
    lines = [f"{sentence}: {blocks}.", moved]
    if pair.new_layers:
        names = ", ".join(printable(name, 40) for name in pair.new_layers[:6])
        more = f" and {len(pair.new_layers) - 6} more" if len(pair.new_layers) > 6 else ""
        lines.append(f"New layers: {names}{more}.")
    if pair.renumbered:
        lines.append("The hidden units are numbered in another order.")
    return lines


def _scheme(pair: LineagePair) -> str:
    return "" if pair.scheme in (None, "grid") else f" ({pair.scheme})"


def _tested(pair: LineagePair) -> str:
    units = sum(block.units for block in pair.blocks)
    if not units:
        return "The networks have no units in common."
    share = sum(block.agreement * block.units for block in pair.blocks) / units
    line = f"{100 * share:.2g} % of {units} units agree in {len(pair.blocks)} blocks."
    if pair.kind is RelationKind.UNDECIDED:
        line += " A hidden relation cannot be excluded."
    return line
