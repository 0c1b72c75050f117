"""Rows that compare a paper's number with the one measured here, and the result that holds them.

A row keeps apart what is easily mixed up: what the paper prints, what theory gives, what others measured before, what
was measured here on the paper's own network, and what was measured here on the networks that stand in for it. From
these it computes whether the numbers agree (:attr:`Row.agrees`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NotRequired, TypedDict, cast

from strati.core.results import Flag, Result

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import RenderableType

Value = float | str | None
Fact = float | str | bool | None

COLUMNS = (
    *("what", "paper", "paper_network", "ours", "error", "agrees"),
    *("theory", "before", "mode", "seeds", "note"),
)
"""The columns of a table of rows, in the order in which they are shown."""
HEADINGS = {"paper_network": "ours, on the paper's network"}
"""What stands above a column whose name is no plain word."""


class RowFields(TypedDict):
    """The JSON of one number."""

    what: str
    paper: Value
    paper_network: Value
    ours: Value
    error: float | None
    agrees: Literal["yes", "no", "open"] | None
    theory: Value
    before: Value
    mode: Literal["quick", "full"] | None
    seeds: int | None
    note: str
    key: NotRequired[str]
    facts: NotRequired[Mapping[str, Fact]]


class ReproductionFields(TypedDict):
    """The JSON of a table or figure."""

    name: str | None
    title: str
    mode: Literal["quick", "full"] | None
    seed: int
    revision: int | None
    rows: Sequence[RowFields]
    figures: Sequence[str]
    captions: Mapping[str, str]
    warnings: Sequence[Flag]


@dataclass(frozen=True)
class Row:
    """One number of a paper and the one measured here.

    Attributes:
        what: The quantity, with the table or figure it stands in.
        paper: What the paper prints; ``None`` where it gives no number.
        ours: What was measured here.
        note: What a reader must know; it explains a difference.
        theory: What a theorem or a closed form gives, where there is one.
        before: What others measured before on the same network; the note says who.
        error: Standard error of the number measured here.
        seeds: How many independent networks, draws or seeds it is computed from.
        unexplained: The difference is known and its cause is not.
        key: What the row is about, for programs: the rules of :mod:`strati_reproductions.claims` choose rows by it.
        facts: Counts, p-values, names of layers and networks that the rules read.
        paper_network: What was measured here on the network that the paper studied, where that network, or the part
            of it that the row is about, is available; ``ours`` is then of other networks.

    Examples:
        >>> Row("alpha", 4.82, 4.826, error=0.01).agrees
        'yes'
        >>> Row("alpha", 4.82, 2.2, "trained by Adam", error=0.01).agrees
        'no'
        >>> Row("greatest", 3.28, 3.232).agrees
        'open'
        >>> Row("iterations", "about 280", 239).agrees is None
        True
        >>> Row("alpha of GPT-2", 3.9, None, paper_network=4.2, error=0.2).agrees
        'yes'
    """

    what: str
    paper: Value
    ours: Value
    note: str = ""
    theory: Value = None
    before: Value = None
    error: float | None = None
    seeds: int | None = None
    unexplained: bool = False
    key: str | None = None
    facts: Mapping[str, Fact] = field(default_factory=dict)
    paper_network: Value = None

    @property
    def agrees(self) -> Literal["yes", "no", "open"] | None:
        """``yes`` within two errors or the digits printed, ``no`` with a note that explains it, ``open`` without.

        ``None`` where there is nothing to compare with. Theory is used where the paper prints nothing, and the number
        measured on the paper's own network comes before the one of other networks. Texts agree when they are equal.
        """
        measured = self.ours if self.paper_network is None else self.paper_network
        if isinstance(self.paper, str) and self.paper == measured:
            return "yes"
        reference = self.paper if _is_number(self.paper) else self.theory
        if not _is_number(reference) or not _is_number(measured):
            return None
        difference = abs(float(measured) - float(reference))  # type: ignore[arg-type]
        if difference <= 2 * (self.error or 0.0) + printed(reference):  # type: ignore[arg-type]
            return "yes"
        return "no" if self.note and not self.unexplained else "open"

    def cells(self, mode: str | None = None) -> dict[str, Any]:
        """The row with whether it agrees and how it was run (``quick`` or ``full``), by column."""
        cells = asdict(self) | {"agrees": self.agrees, "mode": mode}
        return {name: cells[name] for name in COLUMNS}

    def record(self, mode: str | None = None) -> RowFields:
        """The row as it is stored: its cells, and key and facts where a rule reads them."""
        typed = {"key": self.key, "facts": dict(self.facts)} if self.key is not None else {}
        return cast(RowFields, self.cells(mode) | typed)


@dataclass(frozen=True)
class Reproduction(Result):
    """A paper's table or figure with its numbers and those measured here.

    ``mode`` is ``"quick"`` or ``"full"``; all randomness came from ``seed``. ``revision`` is that of the experiment
    (:class:`strati_reproductions.registry.Entry`). ``captions`` say of each figure in a sentence what to see in it; a
    key stands for all files whose names begin so (:func:`caption`).
    """

    verb: ClassVar[str] = "reproduce"

    name: str | None
    title: str
    rows: tuple[Row, ...]
    figures: tuple[str, ...] = ()
    warnings: tuple[Flag, ...] = ()
    mode: Literal["quick", "full"] | None = None
    seed: int = 0
    revision: int | None = None
    captions: Mapping[str, str] = field(default_factory=dict)

    def payload(self) -> ReproductionFields:
        """Name, title, how it was run, rows, and the files of the figures drawn."""
        return {
            "name": self.name,
            "title": self.title,
            "mode": self.mode,
            "seed": self.seed,
            "revision": self.revision,
            "rows": [row.record(self.mode) for row in self.rows],
            "figures": self.figures,
            "captions": dict(self.captions),
            "warnings": self.warnings,
        }

    def frame(self) -> pd.DataFrame:
        """One line per number."""
        import pandas as pd

        return pd.DataFrame([row.cells(self.mode) for row in self.rows], columns=list(COLUMNS))

    def plot(self, **options: Any) -> Any:
        """The first figure that was drawn; the rows as bars where there is none."""
        drawn = next((path for path in self.figures if path.endswith(".png")), None)
        if drawn is None:
            return super().plot(**options)
        import matplotlib.pyplot as plt

        figure, axes = plt.subplots()
        axes.imshow(plt.imread(drawn))
        axes.set_axis_off()
        return figure

    def summary(self) -> RenderableType:
        """A table of the paper's numbers and those measured here, without empty columns."""
        from strati.core.display import Column, table

        cells = [row.cells(self.mode) for row in self.rows]
        used = columns_used(cells)
        columns = [
            Column(
                HEADINGS.get(n, n),
                right=n not in ("what", "agrees", "mode", "note"),
                keep=n in _KEPT,
                gives=n == "mode",
            )
            for n in used
        ]
        rows = [[cell(row[name]) for name in used] for row in cells]
        how = f" ({self.mode}, seed {self.seed})" if self.mode else ""
        return table(columns, rows, title=self.title + how)


_KEPT = ("what", "paper", "ours")


def columns_used(rows: list[dict[str, Any]]) -> list[str]:
    """The columns in which any row has something; what, paper and ours always."""
    return [n for n in COLUMNS if n in _KEPT or any(row.get(n) not in (None, "") for row in rows)]


def caption(name: str, captions: Mapping[str, str]) -> str:
    """The sentence that belongs to a figure: of the keys that its name begins with, the longest one's.

    Examples:
        >>> caption("figure-5-resnet20.png", {"figure-5": "a", "figure-5-resnet20": "b"})
        'b'
        >>> caption("figure-6.png", {"figure-5": "a"})
        ''
    """
    return captions.get(max((key for key in captions if name.startswith(key)), key=len, default=""), "")


def cell(value: Value) -> str:
    """A value as a table shows it.

    Examples:
        >>> cell(None), cell(0.1234567), cell("about 280")
        ('-', '0.123457', 'about 280')
    """
    if value is None:
        return "-"
    return value if isinstance(value, str) else f"{value:.6g}"


def printed(value: float) -> float:
    """Half a unit of the last digit that a number was printed with.

    Examples:
        >>> printed(4.82), printed(66), printed(0.0006)
        (0.005, 0.5, 5e-05)
    """
    text = repr(float(value))
    mantissa, _, exponent = text.partition("e")
    places = 0 if isinstance(value, int) else len(mantissa.partition(".")[2])
    return float(f"5e{int(exponent or 0) - places - 1}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value
