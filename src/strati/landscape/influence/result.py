"""The result of ``strati influence``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from strati.core.results import Flag, Result

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import RenderableType

    from strati.core.results import FloatArray

_SHOWN = 8  # rows of the summary's table


@dataclass(frozen=True)
class Influence(Result):
    """Covariances of the losses of rows over the local posterior.

    Attributes:
        kind: ``influence``, ``kernel`` or ``susceptibility``.
        rows: Names of the columns of ``values``: numbers of the rows of data, tokens as ``row.position``, or groups.
        labels: Names of the lines of ``values``: the same rows, the queries, or the parts.
        square: Whether lines and columns are the same rows.
        values: One line per label, one column per row; not a number where the chains do not allow a value.
        stderr: Standard errors, same shape.
        reason: Why a value is missing.
        waic: ``-mean_i ln <exp(-l_i)> + (nbeta/n) mean_i Var(l_i)``; ``None`` for susceptibilities.
        waic_stderr: Its standard error.
        fluctuation: The singular fluctuation ``(nbeta/2) mean_i Var(l_i)``; ``None`` for susceptibilities.
        fluctuation_stderr: Its standard error.
        warnings: What a reader must know: ``step-bias``.
        settings: What was sampled.
    """

    verb: ClassVar[str] = "influence"
    omitted: ClassVar[tuple[str, ...]] = ("square",)

    kind: str
    rows: tuple[int | str, ...]
    labels: tuple[int | str, ...]
    square: bool
    values: FloatArray
    stderr: FloatArray
    reason: str | None
    waic: float | None
    waic_stderr: float | None
    fluctuation: float | None
    fluctuation_stderr: float | None
    warnings: tuple[Flag, ...]
    settings: Mapping[str, Any]

    @property
    def label_name(self) -> str:
        """What a line of ``values`` is: ``row``, ``query`` or ``part``."""
        return "row" if self.square else "part" if self.kind == "susceptibility" else "query"

    def frame(self) -> pd.DataFrame:
        """One line per label: its own value (of square matrices), the mean, and the column of the largest value."""
        import pandas as pd

        lines = []
        for k, label in enumerate(self.labels):
            values, errors = self.values[k].copy(), self.stderr[k]
            line: dict[str, Any] = {self.label_name: label}
            if self.square:
                line |= {"own": values[k], "own_stderr": errors[k]}
                values[k] = np.nan  # the table names another row
            else:
                line["mean"] = float(values.mean())
            place = None if np.isnan(values).all() else int(np.nanargmax(np.abs(values)))
            line |= {
                "strongest": None if place is None else self.rows[place],
                "value": None if place is None else values[place],
                "stderr": None if place is None else errors[place],
            }
            lines.append(line)
        middle = ["own", "own_stderr"] if self.square else ["mean"]
        columns = [self.label_name, *middle, "strongest", "value", "stderr"]
        return pd.DataFrame(lines, columns=columns).astype({"strongest": object})

    def summary(self) -> RenderableType:
        """The strongest entry, WAIC and fluctuation, and the lines with the strongest entries."""
        from rich.console import Group
        from rich.text import Text

        from strati.core.display import Column, rows_of, table

        frame = self.frame()
        kernel = self.square and self.kind == "kernel"  # whose own values are all 1
        key = "own" if self.square and not kernel else "value"
        order = frame[key].astype(float).abs().sort_values(ascending=False, na_position="last").index
        lines = [self._sentence(frame, int(order[0]), key), self._numbers()]
        frame = frame.drop(columns=["own", "own_stderr"] if kernel else [])
        headings = {"own": "own influence", "own_stderr": "+-", "strongest": "strongest row", "stderr": "+-"}
        columns = [
            Column(headings.get(name, name), right=name not in ("strongest", self.label_name))
            for name in frame.columns
        ]
        strongest = frame.loc[order[:_SHOWN]]
        drawn = table(columns, ([_cell(cell) for cell in line] for line in rows_of(strongest)))
        more = len(frame) - len(strongest)
        notes = [f"{more:,} more lines are in the JSON"] if more else []
        notes += [self.reason] if self.reason else []
        notes += [flag.text for flag in self.warnings]
        return Group(*(Text(line) for line in lines), drawn, *(Text(note) for note in notes))

    def _sentence(self, frame: pd.DataFrame, place: int, key: str) -> str:
        label, value, row = self.labels[place], frame[key][place], frame["strongest"][place]
        if value is None or np.isnan(value):
            return f"No {self.kind} has a value: the chains do not represent the posterior."
        number = f"{value:.3g} +- {frame['own_stderr' if key == 'own' else 'stderr'][place]:.2g}"
        if key == "own":
            return f"Row {label} has the largest self-influence, {number} ({len(self.rows):,} rows)."
        if self.kind == "kernel":
            return f"{self.label_name.title()} {label} and row {row} vary together most: {number}."
        if self.kind == "susceptibility":
            return f"Part {label} responds most to row {row}: {number}."
        return f"Row {row} influences query {label} most: {number}."

    def _numbers(self) -> str:
        where = f"nbeta {self.settings['nbeta']:.4g}, gamma {self.settings['gamma']:.4g}, {self.settings['sampler']}"
        if self.waic is None or self.fluctuation is None:
            defined = int(np.isfinite(self.values).sum())
            return f"{defined:,} of {self.values.size:,} entries have a value ({where})."
        low, high = (self.fluctuation + sign * 1.96 * (self.fluctuation_stderr or 0.0) for sign in (-1, 1))
        return (
            f"Singular fluctuation {self.fluctuation:.3g} (95 % interval {low:.3g} to {high:.3g}), "
            f"WAIC {self.waic:.4g} +- {self.waic_stderr:.2g} ({where})."
        )

    def plot(self, **options: Any) -> Any:
        """The matrix, an embedding of the rows, and the strongest rows."""
        from strati.report.plots.landscape import plot_influence

        return plot_influence(self, **options)


def _cell(value: Any) -> Any:
    if isinstance(value, float):
        return None if np.isnan(value) else f"{value:.3g}"
    return value
