"""What a code, state, phase, metric, score or column means, what to do about it, and how reliable it is.

The texts are those of docs/codes.md (``tools/explanations.py``).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from strati.core.errors import BadInputError
from strati.core.options import nearest
from strati.core.results import Result

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import RenderableType

_KIND = {
    "code": "warning code",
    "state": "state of a layer",
    "phase": "phase of a spectrum",
    "metric": "metric of a layer",
    "score": "sensitivity score of a changed layer, block or expert",
    "column": "column of a table",
    "result": "result",
}


@dataclass(frozen=True)
class Entry:
    """One meaning of a name.

    Attributes:
        name: The name.
        kind: ``code``, ``state``, ``phase``, ``metric``, ``score``, ``column`` or ``result``.
        meaning: What it is.
        action: What to do about it; empty where nothing is to be done.
        reliability: How reliable it is; empty where that was not measured.
        page: The page of the documentation, with its section.
    """

    name: str
    kind: str
    meaning: str
    action: str = ""
    reliability: str = ""
    page: str = ""


@dataclass(frozen=True)
class Explanation(Result):
    """The meanings of a name, or a list of all names."""

    verb: ClassVar[str] = "explain"

    name: str | None
    entries: tuple[Entry, ...]

    def frame(self) -> pd.DataFrame:
        """One row per meaning."""
        import pandas as pd

        return pd.DataFrame([vars(entry) for entry in self.entries])

    def summary(self) -> RenderableType:
        """The meanings as paragraphs; of all names a list by kind."""
        from rich.console import Group

        from strati.core.display import NextCommand, Paragraph

        if self.name is None:
            lines = [Paragraph(f"{len(self.entries)} names can be explained.")]
            for kind in _KIND:
                names = sorted({entry.name for entry in self.entries if entry.kind == kind})
                lines.append(Paragraph(f"{kind}: {', '.join(names)}"))
            return Group(*lines, NextCommand(("strati explain noise-like",)))
        lines = []
        for entry in self.entries:
            lines.append(Paragraph(f"{entry.name} is a {_KIND[entry.kind]}.", "bold"))
            lines.append(Paragraph(f"what it says: {_plain(entry.meaning)}"))
            if entry.action:
                lines.append(Paragraph(f"what to do: {_plain(entry.action)}"))
            if entry.reliability:
                lines.append(Paragraph(f"how reliable: {_plain(entry.reliability)}"))
            lines.append(Paragraph(f"documented in: docs/{entry.page}", "dim"))
        return Group(*lines, NextCommand(("strati explain",)))


def explain(name: str | None = None) -> Explanation:
    """Explain a code, state, phase, metric, column or result; without a name list them all.

    Args:
        name: The name, as tables, warnings and JSON have it.

    Raises:
        BadInputError: Nothing has that name; the nearest one is named.

    Examples:
        >>> [(entry.kind, entry.page) for entry in explain("random-like").entries]
        [('state', 'scan.md#states'), ('phase', 'phases.md')]
        >>> explain("KS").name, explain("stable rank").name
        ('ks_distance', 'stable_rank')
    """
    if name is None:
        return Explanation(None, entries())
    term = name.strip().strip("`").lower()
    matches = tuple(entry for entry, row in zip(entries(), texts(), strict=True) if term in _spellings(row))
    if not matches:
        names = sorted({entry.name for entry in entries()})
        raise BadInputError(name, f"no code, state, phase, metric, column or result; {nearest(term, names)}")
    return Explanation(matches[0].name, matches)


@lru_cache(maxsize=1)
def entries() -> tuple[Entry, ...]:
    """Everything that can be explained."""
    fields = Entry.__dataclass_fields__
    return tuple(Entry(**{name: text for name, text in row.items() if name in fields}) for row in texts())


@lru_cache(maxsize=1)
def texts() -> tuple[dict[str, str], ...]:
    """The rows of ``explanations.json``; the report shows them beside codes, columns and sections."""
    return tuple(json.loads(Path(__file__).with_name("explanations.json").read_text(encoding="utf-8")))


def _spellings(row: dict[str, str]) -> tuple[str, ...]:
    """A name as JSON has it, with dashes or blanks, and as the heading of a table."""
    name = row["name"]
    return name, name.replace("_", "-"), name.replace("_", " "), row.get("label", "").lower()


def _plain(text: str) -> str:
    """Text without the marks of Markdown."""
    import re

    return re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text).replace("`", "")
