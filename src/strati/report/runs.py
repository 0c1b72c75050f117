"""What ``strati report`` takes: JSON files of results, study folders, and results in memory, as plain dictionaries."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from strati.errors import BadInputError
from strati.report.schemas import check_result
from strati.types import Result

_LARGEST = 512 * 2**20
_UNCHECKED = 32 * 2**20
_HEAD = b'{"schema": "strati.'


def read_run(run: Result | Mapping[str, Any] | str | os.PathLike[str]) -> dict[str, Any]:
    """One result as its JSON form: a result in memory, a JSON file, or a study folder (its audit).

    Raises:
        BadInputError: None of these, or a damaged one.
    """
    if isinstance(run, Result):
        return run.to_dict()
    if isinstance(run, Mapping):
        check_result(run, "result")
        return dict(run)
    path = Path(run)
    if path.is_dir():
        from strati.intervene.judging.audit import audit

        return audit(path).to_dict()
    result = _read_json(path)
    check_result(result, path)
    return dict(result)


def _read_json(path: Path) -> Any:
    try:
        # Non-blocking, so that a pipe nobody writes to is refused instead of waited for.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise BadInputError(path, f"cannot be read ({error.strerror}); check the path") from None
    with os.fdopen(handle, "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise BadInputError(path, "is not a regular file; give a JSON result or a study folder")
        if status.st_size > _LARGEST:
            raise BadInputError(
                path, f"is larger than {_LARGEST >> 20} MB; write the result without its eigenvalues"
            )
        # A parsed document takes ten times its size: a large file must at least begin like one of ours.
        if status.st_size > _UNCHECKED and not file.read(len(_HEAD)).startswith(_HEAD):
            raise BadInputError(
                path, "does not begin like a result of strati; give a JSON result that strati wrote"
            )
        file.seek(0)
        raw = file.read()
    try:
        return json.loads(raw.decode("utf-8-sig"), parse_constant=_refuse)
    except UnicodeDecodeError:
        raise BadInputError(
            path, "is not text; give a JSON result, or the model to `strati scan` first"
        ) from None
    except RecursionError:
        raise BadInputError(path, "is nested deeper than any result of strati") from None
    except ValueError as error:
        raise BadInputError(path, f"is not valid JSON ({error}); write it again") from None


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")
