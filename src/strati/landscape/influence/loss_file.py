"""The losses of rows at every draw, streamed to a Parquet file: one record per chain and draw."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from strati.core.errors import BadInputError
from strati.core.files import check_writable
from strati.core.plugins import require

if TYPE_CHECKING:
    from torch import Tensor


class LossFile:
    """A Parquet file with the columns ``chain``, ``draw`` and ``losses``, the last a list with one loss per row.

    It is written draw by draw beside its place and gets its name when all is done, so that nothing is left
    half-written. The metadata of the file hold the names of the entries of ``losses`` under ``rows``, one per line.

    Args:
        path: Where, ending in ``.parquet``.
        labels: Names of the entries.
        baseline: Their losses at the given parameters, to which the observed changes are added.

    Raises:
        BadInputError: Nothing can be written there, or the ending is another.
    """

    def __init__(self, path: str | Path, labels: tuple[int | str, ...], baseline: Tensor) -> None:
        check_writable(path)
        if Path(path).suffix.lower() != ".parquet":
            raise BadInputError(path, "losses are written as .parquet; give this ending")
        self._arrow = require("pyarrow", "parquet", "writing losses")
        self._parquet = require("pyarrow.parquet", "parquet", "writing losses")
        self._path, self._baseline = Path(path), baseline
        fields = {"chain": "int32", "draw": "int32", "losses": self._arrow.list_(self._arrow.float64())}
        self._schema = self._arrow.schema(fields.items(), metadata={"rows": "\n".join(map(str, labels))})
        self._folder = tempfile.TemporaryDirectory(prefix=f".{self._path.name[:40]}.", dir=self._path.parent)
        self._writer: Any = None
        self.restart()

    def restart(self) -> None:
        """Forget all draws so far."""
        if self._writer is not None:
            self._writer.close()
        self._writer = self._parquet.ParquetWriter(Path(self._folder.name, "losses"), self._schema)
        self._draws: dict[int, int] = {}

    def write(self, first: int, changes: Tensor) -> None:
        """Add a draw: the changes of the losses ``(chains, rows)`` of the chains from number ``first`` on."""
        draw = self._draws.get(first, 0)
        self._draws[first] = draw + 1
        losses = (changes + self._baseline).double().cpu().numpy()
        chains = range(first, first + len(losses))
        arrays = [list(chains), [draw] * len(losses), list(losses)]
        batch = self._arrow.record_batch(
            [self._arrow.array(part, field.type) for part, field in zip(arrays, self._schema, strict=True)],
            schema=self._schema,
        )
        self._writer.write_batch(batch)

    def __enter__(self) -> Self:
        """The file itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Put the file in its place, or remove it after an error."""
        self._writer.close()
        if kind is None:
            Path(self._folder.name, "losses").replace(self._path)
        self._folder.cleanup()
