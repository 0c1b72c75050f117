"""The table of layers of a comparison: change, kind of the update, leading directions, state, partner and notes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.comparison.matching import bare_names
from strati.core.errors import BadInputError
from strati.core.options import nearest
from strati.io.roles import place_of

if TYPE_CHECKING:
    from rich.console import RenderableType

    from strati.comparison.results import ComparedLayer, Comparison
    from strati.core.display import Column, TableOptions


def percent(share: float | None, digits: int = 3) -> str:
    """A share in percent, to some significant digits.

    Examples:
        >>> [percent(x) for x in (1.88254, 0.0123456, 1.5e-7, 0.0, None)]
        ['188%', '1.23%', '0.000015%', '0%', '-']
    """
    if share is None:
        return "-"
    return f"{np.format_float_positional(100 * share, precision=digits, fractional=False, trim='-')}%"


def short_names(names: Sequence[str]) -> list[str]:
    """Names from the block number on, without wrappers and ``.weight``, where they stay different.

    Examples:
        >>> short_names(["bert.encoder.layer.0.output.dense.weight", "bert.pooler.dense.weight"])
        ['0.output.dense', 'pooler.dense']
    """
    bare = [name.removesuffix(".weight") for name in bare_names(names)]
    short = []
    for name in bare:
        number = place_of(name).number
        _, block, tail = name.partition(f".{number}.") if number is not None else ("", "", name)
        short.append(f"{block}{tail}".lstrip("."))
    return short if len(set(short)) == len(set(names)) else bare


def layer_table(result: Comparison, options: TableOptions) -> RenderableType:
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
    from strati.core.display import Column

    cells: dict[Column, Callable[[ComparedLayer], str]] = {}
    if result.related is not False:
        cells = {
            Column("changed", right=True, keep=True): lambda x: percent(x.relative_change),
            Column("update", keep=True): _update_cell,
            Column("same leading\ndirections\n(by chance)", keep=True): _directions_cell,
        }
    cells[Column("state", gives=0, words=True)] = _state_cell
    names, partners = (short_names([pick(x) for x in result.layers]) for pick in (_name, _partner))
    if names != partners:
        by_name = dict(zip((x.name for x in result.layers), partners, strict=True))
        cells[Column("partner", gives=2)] = lambda x: by_name[x.name]
    if any(_note(x) for x in result.layers):
        cells[Column("note", gives=3, words=True)] = _note
    return cells


def _name(layer: ComparedLayer) -> str:
    return layer.name


def _partner(layer: ComparedLayer) -> str:
    return layer.partner[-1]


def _update_cell(layer: ComparedLayer) -> str:
    if layer.update_kind == "low-rank":
        return f"low-rank {layer.update_rank}"
    return layer.update_kind or "-"


def _directions_cell(layer: ComparedLayer) -> str:
    if layer.subspace_overlap is None or layer.overlap_by_chance is None:
        return "-"
    return f"{layer.subspace_overlap:.0%} ({layer.overlap_by_chance:.0%})"


def state_name(state: Any) -> str:
    """A layer's state in words."""
    return "too small" if state == "too-small" else "-" if state is None else str(state)


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
