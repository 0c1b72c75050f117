"""What a terminal shows of a scan: the answer, the layers with their states, what is wrong, the next command."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.text import Text

from strati.core.display import (
    MOST_ROWS,
    Column,
    NextCommand,
    Paragraph,
    Table,
    TableOptions,
    command_path,
    printable,
    table,
)
from strati.core.errors import BadInputError
from strati.core.options import nearest
from strati.spectra.htsr import FIELDS
from strati.spectra.verdicts import LayerState, faults

if TYPE_CHECKING:
    from rich.console import RenderableType

    from strati.spectra.scan import Scan

    Row = dict[str, Any]

_STATES = {
    LayerState.LEARNED: ("learned", ""),
    LayerState.RANDOM_LIKE: ("random-like", "yellow"),
    LayerState.TOO_SMALL: ("too small to tell", "dim"),
    LayerState.BROKEN: ("broken", "bold red"),
}
_STATE_TEXT = {
    LayerState.RANDOM_LIKE: "like random weights",
    LayerState.TOO_SMALL: "too small to tell",
    LayerState.BROKEN: "broken",
}
_MARKED = (LayerState.BROKEN, LayerState.RANDOM_LIKE)
_MOST_NAMED = 5
_MOST_PAIRS = 20
_LINE = 100  # characters of the first line
_UNTRAINED = 0.95  # of random matrices up to 3 % are called learned by chance


@dataclass(frozen=True)
class _ColumnSpec:
    """A column of the table: its heading, what it shows, and when it gives way on a narrow terminal."""

    title: str
    cell: Callable[[Row], str]
    gives: int = 0
    right: bool = True
    field: str = ""


def _number(name: str, form: str) -> Callable[[Row], str]:
    return lambda row: "-" if row.get(name) is None else format(row[name], form)


def _alpha(row: Row) -> str:
    return "-" if row["alpha"] is None else f"{row['alpha']:.2f}±{row['alpha_stderr']:.2f}"


def _learned_directions(row: Row) -> str:
    if row["spikes"] is None or row["state"] == LayerState.TOO_SMALL:
        return "-"
    more = ">=" if any(flag.code == "spikes-capped" for flag in row["warnings"]) else ""
    return f"{more}{row['spikes']} of {_directions(row)}"


def _directions(row: Row) -> int:
    return int(row["width"] if "width" in row else row["matrices"] * min(row["rows"], row["cols"]))


def _shape(row: Row) -> str:
    times = f"{row['matrices']} x " if row["matrices"] > 1 else ""
    return f"{times}{row['rows']} x {row['cols']}"


COLUMNS = {
    "role": _ColumnSpec("role", lambda row: row["role"], 9, right=False),
    "shape": _ColumnSpec("shape", _shape, 6, field="parameters"),
    "state": _ColumnSpec("state", lambda row: _STATES[LayerState(row["state"])][0], right=False),
    "directions": _ColumnSpec("learned\ndirections", _learned_directions, 1, field="spikes"),
    "stable_rank": _ColumnSpec("stable\nrank", _number("stable_rank", ".1f"), 5),
    "hard_rank": _ColumnSpec("rank", _number("hard_rank", "d"), 7),
    "alpha": _ColumnSpec("alpha ±\nat most", _alpha, 2),
    "ks_distance": _ColumnSpec("KS", _number("ks_distance", ".3f"), 10),
    "tail_pvalue": _ColumnSpec("p", _number("tail_pvalue", ".2f"), 8),
    "alpha_hill": _ColumnSpec("alpha\nHill", _number("alpha_hill", ".2f"), 17),
    "alpha_farms": _ColumnSpec("alpha\nFARMS", _number("alpha_farms", ".2f"), 16),
    "tpl_alpha": _ColumnSpec("alpha\ntruncated", _number("tpl_alpha", ".2f"), 18),
    "erg_gap": _ColumnSpec("ERG\ngap", _number("erg_gap", "d"), 14),
    "traps": _ColumnSpec("traps", _number("traps", ".2g"), 13),
    "localisation": _ColumnSpec("locali-\nsation", _number("localisation", ".2f"), 15),
    "level_spacing": _ColumnSpec("level\nspacing", _number("level_spacing", ".2f"), 19),
    "quasi_null": _ColumnSpec("quasi-\nnull", _number("quasi_null", "d"), 4),
    "phase": _ColumnSpec("phase", lambda row: row["phase"] or "-", 3, right=False),
    "warnings": _ColumnSpec(
        "warnings", lambda row: " ".join(flag.code for flag in row["warnings"]), 11, right=False
    ),
}
"""The columns of the table, by the name that ``--columns`` takes; the largest ``gives`` gives way first."""

_FIRST = ("shape", "state", "directions", "stable_rank")


def summarise(scan: Scan, options: TableOptions) -> RenderableType:
    """The answer, the table, what stands out and what was left out, and the next command."""
    rows = [scanned.row() | {"matrices": scanned.layer.count} for scanned in scan.layers]
    tables = [_table(scan, rows, options)] if rows else []
    tokens = [] if scan.tokens is None else _token_list(scan)
    pairs = [] if scan.composition is None else _composition_list(scan)
    return Group(*_head(scan, rows), *tables, *pairs, *tokens, *_foot(scan, rows, options))


def _composition_list(scan: Scan) -> list[RenderableType]:
    """The pairs of heads whose composition is significant after correction for the number of pairs."""
    pairs = sorted(scan.composition or (), key=lambda pair: pair.pvalue)
    if not pairs:
        return [Paragraph("no compositions: they need heads of two blocks, and --layers leaves only one")]
    significant = [pair for pair in pairs if pair.pvalue * len(pairs) <= scan.config.level]
    level = f"family-wise level {scan.config.level:.2g}"
    title = (
        f"{len(significant)} of {len(pairs):,} compositions of heads are beyond random rotations ({level})"
    )
    if not significant:
        return [Paragraph(title)]
    columns = [
        Column("reads\nthrough", keep=True),
        Column("earlier head", keep=True),
        Column("later head", keep=True),
        Column("score", right=True),
        Column("under\nrotations", right=True),
        Column("p", right=True),
    ]
    cells = (
        (
            pair.kind,
            pair.source,
            pair.target,
            f"{pair.score:.3f}",
            f"{pair.expected:.3f}",
            f"{pair.pvalue:.1g}",
        )
        for pair in significant[:_MOST_PAIRS]
    )
    more = len(significant) - _MOST_PAIRS
    return [table(columns, cells, title=title, notes=[f"{more:,} more pairs in --json"] if more > 0 else [])]


def _token_list(scan: Scan) -> list[RenderableType]:
    """The under-trained tokens of each matrix, with how far their rows are from each other and from the others."""
    level = f"{scan.config.level:.2g}"
    tokens = scan.tokens or ()
    if not tokens:
        return [
            Paragraph(f"no under-trained tokens (such a token is missed with a chance of {level} a matrix)")
        ]
    count = len({token.id for token in tokens})
    title = f"{count} under-trained token{'s' if count > 1 else ''}: rows that differ by no more than noise"
    return [
        table(
            [
                Column("layer", keep=True),
                Column("id", right=True, keep=True),
                Column("token", keep=True),
                Column("norm", right=True),
                Column("radius of\nthe group", right=True),
                Column("distance of\nother rows", right=True),
            ],
            (
                (
                    printable(token.layer.removesuffix(".weight"), 40),
                    token.id,
                    "-" if token.token is None else printable(repr(token.token), 24),
                    f"{token.norm:.3g}",
                    f"{token.radius:.2g}",
                    f"{token.others:.2g}",
                )
                for token in tokens
            ),
            title=title,
            notes=[f"a token that training left alone is missing with a chance of {level} a matrix"],
        )
    ]


def is_embedding(row: Row) -> bool:
    """Whether a row is that of an embedding, in which empty rows and a low rank are usual."""
    return bool(row["role"] == "embedding")


def _name(row: Row) -> str:
    return printable(row["name"].removesuffix(".weight"), 60)


def _head(scan: Scan, rows: list[Row]) -> list[Paragraph]:
    """The answer on one line of at most 100 characters, then the numbers."""
    states = Counter(LayerState(row["state"]) for row in rows)
    answer, others = _answer(states)
    title = model_title(scan.path, max(_LINE - len(answer) - 2, 12))
    counted = [row for row in rows if row["spikes"] is not None and row["state"] != LayerState.TOO_SMALL]
    size = f"{scan.parameters:,} parameters, {_count(len(rows))}."
    if counted:
        spikes, directions = sum(row["spikes"] for row in counted), sum(map(_directions, counted))
        level = f"{scan.config.level:.2g}"
        size += f" {spikes:,} of {directions:,} directions lie beyond noise (false-positive rate {level} a matrix)."
    return [Paragraph(f"{title}: {answer}", "bold"), Paragraph(f"{others} {size}".lstrip())]


def _answer(states: Counter[LayerState]) -> tuple[str, str]:
    """The verdict on the network, and the states that it does not mention."""
    total, random = states.total(), states[LayerState.RANDOM_LIKE]
    marked = random + states[LayerState.BROKEN]
    if not total:
        return "there is no weight matrix to scan.", ""
    if not marked:
        return f"nothing wrong. {_sentence(states, LayerState)}", ""
    judged = random + states[LayerState.LEARNED]
    if not states[LayerState.BROKEN] and random >= _UNTRAINED * judged:
        text = f"no trace of training. {random} of {judged} matrices large enough to tell look random."
        return text, _sentence(states, [LayerState.LEARNED, LayerState.TOO_SMALL])
    others = [LayerState.LEARNED, LayerState.TOO_SMALL]
    return f"check {marked} of {_count(total)}. {_sentence(states, _MARKED)}", _sentence(states, others)


def model_title(path: str, width: int = 40) -> str:
    """The name of a model: of a Hugging Face cache its repository, otherwise the last part of its path.

    Examples:
        >>> model_title("/cache/hub/models--openai--gpt2/snapshots/607a30d783dfa663caf39e06633721c8d4cfcd7e")
        'openai/gpt2'
        >>> model_title("runs/mlp.pt")
        'mlp.pt'
    """
    place = Path(path)
    if place.parent.name == "snapshots" and place.parents[1].name.startswith("models--"):
        return printable(place.parents[1].name.removeprefix("models--").replace("--", "/"), width)
    return printable(place.name or path, width)


def _count(number: int) -> str:
    return "1 matrix" if number == 1 else f"{number:,} matrices"


def _sentence(states: Counter[LayerState], named: Iterable[LayerState]) -> str:
    """How many matrices have each of the states that are named; empty if none has."""
    if states[LayerState.LEARNED] == states.total():
        return "Every matrix shows learned structure."
    parts = []
    for state in named:
        count, total = states[state], states.total()
        if not count:
            continue
        if state == LayerState.LEARNED:
            parts.append(f"{count} of {total} show{'s' if count == 1 else ''} learned structure")
        else:
            parts.append(f"{count} {'is' if count == 1 else 'are'} {_STATE_TEXT[state]}")
    return "; ".join(parts) + "." if parts else ""


def _table(scan: Scan, rows: list[Row], options: TableOptions) -> Table:
    """One row per layer; of too many those that are marked first, still in the network's order."""
    names = _column_names(options.columns, rows, bootstrap=scan.config.bootstrap > 0, htsr=scan.config.htsr)
    ordered = _sorted(rows, options.sort)
    marked_first = sorted(range(len(rows)), key=lambda place: ordered[place]["state"] not in _MARKED)
    displayed = [ordered[place] for place in sorted(marked_first[:MOST_ROWS])]
    more = len(rows) - len(displayed)
    return table(
        [Column("", keep=True), Column("layer", keep=True, least=12), *map(_column, names)],
        ([_mark(row), Text(_name(row)), *(_cell(name, row) for name in names)] for row in displayed),
        notes=[f"{more} more layers in --json and --export"] if more else [],
    )


def _column_names(columns: tuple[str, ...], rows: list[Row], *, bootstrap: bool, htsr: bool) -> list[str]:
    if not columns:
        return [*_FIRST, *(["tail_pvalue"] if bootstrap else [])]
    if columns == ("all",):
        optional = {"tail_pvalue"} if not bootstrap else set()
        return [name for name in COLUMNS if name not in (optional if htsr else optional | set(FIELDS))]
    for name in columns:
        _check_field(name, rows, "column", ", or all")
    return [name for name in columns if name != "name"]


def _check_field(name: str, rows: list[Row], what: str, also: str = "") -> None:
    """Refuse a name that is neither a column nor a plain field of the rows."""
    fields = (
        [name for name, cell in rows[0].items() if not isinstance(cell, dict | tuple | list)] if rows else []
    )
    names = list(dict.fromkeys([*COLUMNS, *fields]))
    if name not in names:
        raise BadInputError(
            f"{what} {name}", f"there is no column of that name; {nearest(name, names)}{also}"
        )


def _sorted(rows: list[Row], sort: str | None) -> list[Row]:
    if sort is None:
        return rows
    name = sort.removeprefix("-")
    _check_field(name, rows, "sort")
    field = (COLUMNS[name].field or name) if name in COLUMNS else name
    key = (lambda row: len(row["warnings"])) if field == "warnings" else (lambda row: row[field])
    defined = [row for row in rows if row.get(field) is not None]
    undefined = [row for row in rows if row.get(field) is None]
    return sorted(defined, key=key, reverse=sort.startswith("-")) + undefined


def _column(name: str) -> Column:
    if name not in COLUMNS:
        return Column(name, right=True)
    spec = COLUMNS[name]
    return Column(
        spec.title, right=spec.right, keep=name == "state", gives=spec.gives, words=name == "warnings"
    )


def _cell(name: str, row: Row) -> Any:
    if name not in COLUMNS:
        return row.get(name)
    style = _STATES[LayerState(row["state"])][1] if name == "state" else "dim" if name == "warnings" else ""
    return Text(COLUMNS[name].cell(row), style)


def _mark(row: Row) -> Text:
    return Text("!", _STATES[LayerState(row["state"])][1]) if row["state"] in _MARKED else Text("")


def why_marked(row: Row) -> tuple[str, str]:
    """The code that marks a row, and what it says."""
    texts = {flag.code: flag.text for flag in row["warnings"]}
    if row["state"] == LayerState.BROKEN:
        code = faults(texts, row["phase"], embedding=is_embedding(row))[0]
        return code, texts.get(code) or row["phase_evidence"]["reason"]
    code = "noise-like" if "noise-like" in texts else "orthogonal"
    return code, texts[code]


def _foot(scan: Scan, rows: list[Row], options: TableOptions) -> list[RenderableType]:
    lines: list[RenderableType] = []
    marked = sorted(
        (row for row in rows if row["state"] in _MARKED), key=lambda row: row["state"] != LayerState.BROKEN
    )
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in marked:
        reasons.setdefault(why_marked(row), []).append(_name(row))
    for (code, text), names in list(reasons.items())[:_MOST_NAMED]:
        more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
        lines.append(Paragraph(f"check {', '.join(names[:_MOST_NAMED])}{more}: {text} ({code})", "yellow"))
    if len(reasons) > _MOST_NAMED:
        lines.append(Paragraph("the other marked layers: --columns state,warnings", "yellow"))
    lines.extend(Paragraph(f"note: {printable(flag.text, 200)}", "yellow") for flag in scan.warnings)
    if scan.skipped:
        lines.append(
            Paragraph(f"{len(scan.skipped)} other tensors are not analysed; --json lists them", "dim")
        )
    meaning = why_marked(marked[0])[0] if marked else "learned"
    if rows and not options.columns:
        lines.append(Paragraph("alpha, ranks, phases and warnings: --columns all", "dim"))
        lines.append(Paragraph(f"what {meaning} means: strati explain {meaning}", "dim"))
    path = Path(scan.path)
    commands = [f"strati explain {meaning}"]
    if path.exists():
        page = shlex.quote(f"{path.name if path.is_dir() else path.stem}.html")
        commands.insert(0, f"strati scan {command_path(scan.path)} --html {page}")
    return [*lines, NextCommand(tuple(commands))]
