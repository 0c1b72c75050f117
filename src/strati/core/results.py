"""Types that all packages share: arrays, warnings (:class:`Flag`) and results.

A result is a frozen dataclass derived from :class:`Result` with a JSON form, a table, a summary for terminals, a
rendering for notebooks and a plot. Numbers that are not defined are ``None``.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from strati._version import __version__

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from numpy.typing import NDArray
    from rich.console import RenderableType

    FloatArray = NDArray[np.float64]
    IntArray = NDArray[np.int64]
    BoolArray = NDArray[np.bool_]

SHORT = 40
"""Lines of a result's repr at most."""

Tick = Callable[[str], None]
"""Called once after each unit of work with its name, for progress bars."""


def silent(_: str) -> None:
    """A :data:`Tick` that shows nothing."""


@dataclass(frozen=True)
class Flag:
    """A warning about a number or a file: a stable code and a sentence.

    Examples:
        >>> Flag("short-tail", "only 12 eigenvalues are in the tail").code
        'short-tail'
    """

    code: str
    text: str


class Result:
    """What every command returns. Subclasses are frozen dataclasses.

    A subclass sets ``verb`` (the command, which names the JSON Schema) and implements ``frame`` (its main table) and
    ``summary`` (the text for a terminal, the answer first). Its JSON form has the fields of the dataclass but those
    ``omitted``, and the ``computed`` ones: names, or names with the attributes that have their values.
    """

    verb: ClassVar[str]
    omitted: ClassVar[tuple[str, ...]] = ()
    computed: ClassVar[tuple[str, ...] | Mapping[str, str]] = ()
    optional: ClassVar[tuple[str, ...]] = ()
    """Fields of the JSON form that are absent where they are ``None``."""
    key_columns: ClassVar[tuple[str, ...]] = ()
    """The columns of :attr:`table`; empty means all."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Keep the summary as the repr: a dataclass would otherwise list its fields."""
        super().__init_subclass__(**options)
        cls.__repr__ = Result.__repr__  # type: ignore[method-assign]

    def __repr__(self) -> str:
        """The summary as a terminal shows it, long ones shortened."""
        from strati.core.display import as_text

        return as_text(self.summary(), lines=SHORT)

    def payload(self) -> Mapping[str, Any]:
        """The fields of the JSON form after ``schema``, ``strati`` and ``summary``; any nesting of plain values."""
        fields = {name: getattr(self, attribute) for name, attribute in json_attributes(type(self)).items()}
        absent = [name for name in self.optional if fields[name] is None]
        return {name: value for name, value in fields.items() if name not in absent}

    @abstractmethod
    def frame(self) -> pd.DataFrame:
        """The main table, one row per layer (or whatever the result is about)."""

    @property
    def table(self) -> pd.DataFrame:
        """The key columns of :meth:`frame`."""
        frame = self.frame()
        return frame[[name for name in self.key_columns if name in frame]] if self.key_columns else frame

    @abstractmethod
    def summary(self) -> RenderableType:
        """What a terminal shows: a rich renderable."""

    def plot(self, **options: Any) -> Any:
        """Draw the result with matplotlib and return the figure; by default its table as bars."""
        from strati.report.plots import plot_table

        return plot_table(self.frame(), **{"title": self.verb} | options)

    def headline(self) -> tuple[str, ...]:
        """The first two lines of the summary: the answer in words, and the most important number with its interval."""
        from strati.core.display import leading_lines

        return leading_lines(self.summary(), 2)

    def to_dict(self) -> dict[str, Any]:
        """The JSON form as plain Python values; nothing in it is NaN or infinite."""
        head = {"schema": f"strati.{self.verb}/1", "strati": __version__, "summary": self.headline()}
        plain: dict[str, Any] = jsonable(head | dict(self.payload()))
        return plain

    def to_json(self, path: str | Path | None = None) -> str:
        """The JSON text; also written to ``path`` (whole or not at all) if one is given."""
        text = json.dumps(self.to_dict(), allow_nan=False, ensure_ascii=True)
        if path is not None:
            from strati.core.files import write_atomic

            write_atomic(path, text + "\n")
        return text

    def _repr_html_(self) -> str:
        """The main table, for notebooks; text from files is escaped."""
        from strati.core.display import printable

        def safe(value: Any) -> Any:
            return printable(value, limit=400) if isinstance(value, str) else value

        return self.frame().map(safe).rename(columns=safe).to_html(escape=True, index=False, max_rows=60)


def json_attributes(kind: type) -> dict[str, str]:
    """The names of a dataclass's fields in its JSON form, with the attributes that have their values."""
    fields = (field.name for field in dataclasses.fields(kind))
    names = {name: name for name in fields if name not in getattr(kind, "omitted", ())}
    computed = getattr(kind, "computed", ())
    return names | (dict(computed) if isinstance(computed, Mapping) else {name: name for name in computed})


def jsonable(value: Any) -> Any:
    """Turn a nesting of dataclasses, arrays, enums and numpy scalars into JSON's plain values.

    NaN and infinities become ``None``: a number that is not defined is ``null``.

    Examples:
        >>> import numpy as np
        >>> jsonable({"a": np.array([1.0, np.nan]), "b": (np.int64(2), Flag("c", "t"))})
        {'a': [1.0, None], 'b': [2, {'code': 'c', 'text': 't'}]}
    """
    if value is None or (isinstance(value, bool | str) and not isinstance(value, enum.Enum)):
        return value
    if isinstance(value, enum.Enum):
        return jsonable(value.value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Result):
        return jsonable(value.payload())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        attributes = json_attributes(type(value))
        return {name: jsonable(getattr(value, attribute)) for name, attribute in attributes.items()}
    if isinstance(value, Mapping):
        return {str(k): jsonable(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [jsonable(v) for v in value]
    if hasattr(value, "tolist"):  # numpy and torch arrays and scalars
        return jsonable(value.tolist())
    raise TypeError(f"cannot write a {type(value).__name__} as JSON")
