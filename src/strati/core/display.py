"""Text for users: tables, paragraphs, the next command, and names from untrusted files escaped for terminals and HTML.

A :class:`Table` decides when it is drawn how many of its columns fit. Columns that identify a row or warn about it
(``keep``) are never dropped but folded; dropped columns are named below the table. Cells are plain text, never markup,
whatever a file's names contain.
"""

from __future__ import annotations

import html
import io
import math
import re
import shlex
import shutil
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.text import Text


MOST_ROWS = 400
_NARROWEST = 12
_LONGEST = 120


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        name: Its heading.
        right: Align to the right, as for numbers.
        keep: Fold the column on a narrow terminal instead of dropping it (names, verdicts, warnings).
        gives: Columns with the largest number are dropped first, then from the right.
        words: Break between words before any column is dropped.
        least: The smallest width.
    """

    name: str
    right: bool = False
    keep: bool = False
    gives: int = 0
    words: bool = False
    least: int = 0


@dataclass(frozen=True)
class TableOptions:
    """How the table of a result is shown.

    Attributes:
        columns: Names of columns or of fields of the JSON; ``("all",)`` for every column.
        sort: A column or field to sort by; a leading ``-`` for the largest first. By default the network's order.
    """

    columns: tuple[str, ...] = ()
    sort: str | None = None


@dataclass(frozen=True)
class Table:
    """Columns, rows of cells (text, numbers, rich ``Text``, or ``None``), a title, and lines below it."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[Any, ...], ...]
    title: str = ""
    notes: tuple[str, ...] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw what fits into the width there is."""
        from rich.text import Text

        listed = self.rows[:MOST_ROWS]
        cells = [[as_cell(cell) for cell in row] for row in listed]
        fitting, dropped = self._fitting(cells, options.max_width)
        if self.title:
            yield Paragraph(printable(self.title, 300), "bold")
        yield self._drawn(cells, fitting, options.max_width)
        notes = list(self.notes)
        if len(self.rows) > len(listed):
            notes.insert(0, f"{len(self.rows) - len(listed):,} more rows")
        if dropped:
            names = ", ".join(" ".join(self.columns[i].name.split()) for i in dropped)
            notes.insert(0, f"not shown, the terminal is too narrow: {names}")
        yield from (Text(printable(note, 400), "dim") for note in notes)

    def _fitting(self, cells: list[list[Text]], width: int) -> tuple[list[int], list[int]]:
        """The columns that fit, the most important ones first, and those that are dropped."""
        widths = self._least(cells)
        columns = range(len(self.columns))
        fitting = [i for i in columns if self.columns[i].keep]
        optional = [i for i in columns if not self.columns[i].keep]
        for index in sorted(optional, key=lambda i: (self.columns[i].gives, i)):
            if self._total([widths[i] for i in [*fitting, index]]) <= width:
                fitting.append(index)
        return sorted(fitting), [i for i in columns if i not in fitting]

    def _widths(self, cells: list[list[Text]]) -> list[int]:
        return [
            max(
                [
                    column.least,
                    max(map(len, column.name.split("\n"))),
                    *(row[i].cell_len for row in cells),
                ],
                default=0,
            )
            for i, column in enumerate(self.columns)
        ]

    def _least(self, cells: list[list[Text]]) -> list[int]:
        """Widths with the words of columns that allow it on separate lines."""
        widths = self._widths(cells)
        for i, column in enumerate(self.columns):
            if column.words:
                words = [cell_width(word) for row in cells for word in row[i].plain.split()]
                widths[i] = max([*map(len, column.name.split("\n")), *words])
        return widths

    @staticmethod
    def _total(widths: Sequence[int]) -> int:
        return sum(widths) + 2 * len(widths) + 1

    def _drawn(self, cells: list[list[Text]], fitting: list[int], width: int) -> RenderableType:
        from rich.box import SIMPLE_HEAD
        from rich.table import Table as Rich
        from rich.text import Text

        widths = self._widths(cells)
        available = width - 2 * len(fitting) - 1
        limits = {i: widths[i] for i in fitting}
        for i, least in enumerate(self._least(cells)):
            if i in limits and sum(limits.values()) > available:
                limits[i] = max(least, limits[i] - (sum(limits.values()) - available))
        limits = _folded(limits, available)
        table = Rich(
            header_style="bold",
            box=SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
        )
        for i in fitting:
            column = self.columns[i]
            table.add_column(
                Text(column.name),
                justify="right" if column.right else "left",
                overflow="fold",
                no_wrap=limits[i] >= widths[i],
                width=limits[i],
            )
        for row in cells:
            table.add_row(*(row[i] for i in fitting))
        return table


def table(
    columns: Iterable[str | Column],
    rows: Iterable[Iterable[Any]],
    *,
    title: str = "",
    notes: Iterable[str] = (),
) -> Table:
    """A table of rows; on narrow terminals the first column is kept and others are dropped from the right.

    Args:
        columns: Headings, or :class:`Column` for those that are kept, aligned to the right or dropped earlier.
        rows: Cells: text, numbers, rich ``Text`` for coloured ones, ``None`` for what is not defined.
        title: Above the table.
        notes: Lines below it.

    Examples:
        >>> print(as_text(table(["layer", Column("alpha", right=True)], [["fc1", 2.5], ["fc2", None]]), width=40))
         layer  alpha
         ─────────────
         fc1      2.5
         fc2        -
    """
    made = [column if isinstance(column, Column) else Column(column) for column in columns]
    if made and not any(column.keep for column in made):
        made[0] = Column(made[0].name, made[0].right, keep=True)
    return Table(tuple(made), tuple(tuple(row) for row in rows), title, tuple(notes))


def cell_width(text: str) -> int:
    """Columns of a terminal that a text takes."""
    from rich.cells import cell_len

    return cell_len(text)


def as_cell(value: Any) -> Text:
    """A value as a table shows it: numbers with four digits, ``-`` for undefined ones, text unchanged.

    Examples:
        >>> [as_cell(v).plain for v in (3, 1234567, 0.123456, None, float("nan"), True, "[red]")]
        ['3', '1,234,567', '0.1235', '-', '-', 'yes', '[red]']
    """
    from rich.text import Text

    if isinstance(value, Text):
        return value
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return Text("-")
    if isinstance(value, bool):
        return Text("yes" if value else "no")
    if isinstance(value, int):
        return Text(f"{value:,}")
    if isinstance(value, float):
        return Text(f"{value:.4g}")
    return Text(printable(str(value), _LONGEST))


def as_text(renderable: RenderableType, *, width: int | None = None, lines: int | None = None) -> str:
    """The plain text that a terminal would show; beyond ``lines`` lines the middle is left out.

    Examples:
        >>> as_text("one line")
        'one line'
    """
    from rich.console import Console

    wide = width or shutil.get_terminal_size((100, 24)).columns
    sink = io.StringIO()
    console = Console(
        file=sink, width=max(wide, 40), highlight=False, markup=False, emoji=False, color_system=None
    )
    console.print(renderable)
    written = [line.rstrip() for line in visible(sink.getvalue()).rstrip("\n").split("\n")]
    while written and not written[0]:
        written.pop(0)
    while written and not written[-1]:
        written.pop()
    if lines is not None and len(written) > lines:
        tail = lines // 3
        left = len(written) - lines
        written = [*written[: lines - tail], f"... {left} more lines; .summary() has all", *written[-tail:]]
    return "\n".join(written)


def leading_lines(renderable: RenderableType, count: int) -> tuple[str, ...]:
    r"""The first lines of text of a summary, before its first table; those of a table alone are its title's.

    Examples:
        >>> leading_lines("the answer\nits number\nmore", 2)
        ('the answer', 'its number')
        >>> leading_lines(table(["layer"], [["fc1"]], title="one layer"), 2)
        ('one layer',)
    """
    from rich.console import Group
    from rich.text import Text

    lines: list[str] = []
    waiting: list[Any] = [renderable]
    while waiting and len(lines) < count:
        part = waiting.pop(0)
        if isinstance(part, Group):
            waiting = [*part.renderables, *waiting]
        elif isinstance(part, str | Text | Paragraph):
            text = part.text if isinstance(part, Paragraph) else str(part)
            lines += [line.strip() for line in text.splitlines() if line.strip()]
        else:
            lines += [part.title] if isinstance(part, Table) and part.title and not lines else []
            break
    return tuple(printable(line, 600) for line in lines[:count])


def _folded(widths: dict[int, int], available: int) -> dict[int, int]:
    """Widths that fit: the widest columns are narrowed first, down to a minimum."""
    limits = dict(widths)
    while sum(limits.values()) > available:
        widest = max(limits, key=lambda i: limits[i])
        if limits[widest] <= _NARROWEST:
            break
        limits[widest] -= 1
    return limits


def rows_of(frame: Any) -> Iterator[tuple[Any, ...]]:
    """The rows of a data frame as cells; counts that pandas made floats because of missing values are integers again.

    Examples:
        >>> import pandas as pd
        >>> list(rows_of(pd.DataFrame({"n": [1.0, None]})))
        [(1,), (None,)]
    """
    for row in frame.itertuples(index=False):
        yield tuple(_plain(entry) for entry in row)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        if math.isnan(value):
            return None
        return int(value) if value.is_integer() and abs(value) < 1e7 else float(value)
    return value


@dataclass(frozen=True)
class Paragraph:
    """Text that is wrapped at the console's width, even if the console does not wrap."""

    text: str
    style: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """One line after another."""
        import textwrap

        from rich.text import Text

        for line in textwrap.wrap(self.text, max(options.max_width, 20), break_on_hyphens=False):
            yield Text(line, self.style)


@dataclass(frozen=True)
class NextCommand:
    """The last line of a summary: the first of these commands that fits, or the help of the last of them."""

    commands: tuple[str, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The command, whole."""
        from rich.segment import Segment

        # Not as text, which would be wrapped: a command must stay on one line to be copied.
        yield from (Segment(self.line(options.max_width)), Segment.line())

    def line(self, width: int) -> str:
        """The line that fits into ``width`` characters.

        Examples:
            >>> NextCommand(("strati scan model.pt",)).line(40)
            'next: strati scan model.pt'
            >>> NextCommand(("strati scan /a/very/long/path/model.pt",)).line(40)
            'next: strati scan --help'
        """
        lines = [f"next: {printable(command, 400)}" for command in self.commands]
        shortest = " ".join([*self.commands[-1].split()[:2], "--help"])
        return next((line for line in lines if cell_width(line) <= width), f"next: {shortest}")


def command_path(path: str | Path) -> str:
    """A path as a shell takes it: quoted if necessary, and relative to the current folder if it is inside it.

    Examples:
        >>> command_path("my model.pt")
        "'my model.pt'"
    """
    place = Path(path)
    if place.is_absolute() and place.is_relative_to(Path.cwd()):
        place = place.relative_to(Path.cwd())
    return shlex.quote(str(place))


_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


def printable(text: str, limit: int = 160) -> str:
    r"""Escape characters that a terminal would interpret or hide; the text is one line of bounded length.

    Control characters, bidirectional marks, zero-width characters and surrogates become ``\x..``,
    ``\u....`` or ``\U........`` escapes; what is longer than ``limit`` is cut in the middle.

    Examples:
        >>> printable("layer\x1b[31m\u202eevil")
        'layer\\x1b[31m\\u202eevil'
    """
    if len(text) > 4 * limit:
        text = text[: 2 * limit] + text[-2 * limit :]
    safe = "".join(_escape(c) if unicodedata.category(c) in _HIDDEN else c for c in text)
    if len(safe) > limit:
        keep = (limit - 3) // 2
        safe = f"{safe[:keep]}...{safe[-keep:]}"
    return safe


def visible(text: str) -> str:
    r"""Escape characters that a terminal would interpret or hide; line ends stay, and the length is not bounded.

    Examples:
        >>> visible("one\x1b[31m\ntwo")
        'one\\x1b[31m\ntwo'
    """
    if text.isascii() and text.replace("\n", "").isprintable():
        return text
    return "".join(c if c == "\n" or unicodedata.category(c) not in _HIDDEN else _escape(c) for c in text)


def as_html(text: object) -> str:
    """Escape text for HTML, elements and attributes alike.

    Examples:
        >>> as_html("<b onclick='x'>")
        '&lt;b onclick=&#x27;x&#x27;&gt;'
    """
    return html.escape(printable(str(text), limit=2000), quote=True)


def _escape(character: str) -> str:
    code = ord(character)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def natural(text: str) -> str:
    """A sort key that orders the numbers in names by their size: ``h.2`` before ``h.10``.

    Examples:
        >>> sorted(["h.10.w", "h.2.w", "h", "b"], key=natural)
        ['b', 'h', 'h.2.w', 'h.10.w']
    """
    return _NUMBER.sub(_by_size, text)


_NUMBER = re.compile(r"[0-9]+")


def _by_size(match: re.Match[str]) -> str:
    """A number as text that sorts before other text, shorter numbers first."""
    digits = match[0].lstrip("0")
    return f"\0{chr(len(digits))}{digits}"


def without_shared_prefix(names: Sequence[str]) -> list[str]:
    """Names without the prefix that all of a network's layers share.

    Examples:
        >>> without_shared_prefix(["model.layers.0.q.weight", "model.embed.weight"])
        ['layers.0.q.weight', 'embed.weight']
    """
    split = [name.split(".") for name in names]
    shared = 0
    while split and all(len(s) > shared + 1 and s[shared] == split[0][shared] for s in split):
        shared += 1
    # A number is a block, not a wrapper: "layers.0" of a one-block network stays.
    while shared and split[0][shared - 1].isdigit():
        shared -= 1
    return [".".join(s[shared:]) for s in split]


def byte_size(size: int) -> str:
    """A number of bytes in the unit that suits it.

    Examples:
        >>> byte_size(120), byte_size(52_392), byte_size(90_852_864), byte_size(13_500_000_000)
        ('120 B', '52 kB', '91 MB', '13.5 GB')
    """
    if size < 1000:
        return f"{size} B"
    for unit, name in ((1e3, "kB"), (1e6, "MB"), (1e9, "GB")):
        if size < 999.5 * unit:
            return (
                f"{size / unit:.1f} {name}"
                if size < 9.95 * unit or name == "GB"
                else f"{size / unit:.0f} {name}"
            )
    return f"{size / 1e9:,.0f} GB"
