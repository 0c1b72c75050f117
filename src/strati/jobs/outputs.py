"""Places for files checked before the work, and tables written by their endings."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from strati.core.errors import BadInputError, require
from strati.core.files import write_atomic as write_atomic

if TYPE_CHECKING:
    import pandas as pd


def check_writable(path: str | Path) -> None:
    """Refuse an output path that cannot be written before any work is done.

    Raises:
        BadInputError: It is a directory, or its folder is missing or read-only.
    """
    target = Path(path)
    if target.is_dir():
        raise BadInputError(target, "is a directory; give the name of a file to write")
    if not target.parent.is_dir():
        raise BadInputError(target, f"its folder {target.parent} does not exist; create it first")
    if not os.access(target.parent, os.W_OK):
        raise BadInputError(target, f"its folder {target.parent} cannot be written to; choose another place")


def check_table(path: str | Path) -> None:
    """Refuse a table's path that cannot be written or has no ending we know, before any work is done.

    Raises:
        BadInputError: Another ending than ``.csv`` or ``.parquet``, or nothing can be written there.
    """
    check_writable(path)
    ending = Path(path).suffix.lower()
    if ending not in (".csv", ".parquet"):
        raise BadInputError(path, "a table is written as .csv or .parquet; give one of these endings")
    if ending == ".parquet":
        require("pyarrow", "parquet", "writing Parquet")


def export_table(table: pd.DataFrame, path: str | Path) -> None:
    """Write a table as ``.csv`` or ``.parquet``, by the ending of the name.

    Raises:
        BadInputError: Another ending, or the file cannot be written.
    """
    check_table(path)
    target = Path(path)
    if target.suffix.lower() == ".csv":
        write_atomic(target, table.to_csv(index=False, lineterminator="\n"))
    else:
        write_atomic(target, table.to_parquet(index=False))
