"""``strati report``: one page from JSON results and study folders."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import click

from strati.cli.common import Output, check_page, emit
from strati.errors import BadInputError
from strati.run.files import write_atomic
from strati.types import Result

if TYPE_CHECKING:
    import pandas as pd

_LARGEST = 512 * 2**20
_UNCHECKED = 32 * 2**20
_HEAD = b'{"schema": "strati.'


@dataclass(frozen=True)
class Page(Result):
    """The page that was written."""

    verb: ClassVar[str] = "report"

    file: str
    size: int
    results: tuple[str, ...]

    def payload(self) -> dict[str, Any]:
        """Where it is, its bytes, and the schemas of what is on it."""
        return dict(vars(self))

    def frame(self) -> pd.DataFrame:
        """One row per result on the page."""
        import pandas as pd

        return pd.DataFrame({"schema": self.results})

    def summary(self) -> str:
        """Where it is and how large."""
        return f"wrote {self.file} ({len(self.results)} results, {self.size / 1e6:.2f} MB)"


@click.command("report")
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option(
    "--output", "-o", "--html", "target", required=True, metavar="FILE.html", help="The page to write."
)
@click.option("--json", "json_", metavar="FILE", help="Write what is on the page as JSON ('-' for stdout).")
@click.option("--quiet", "-q", is_flag=True, help="Say nothing.")
@click.option("--debug", is_flag=True, expose_value=False, help="Show the traceback of an error.")
def command(runs: tuple[str, ...], target: str, json_: str | None, quiet: bool) -> None:
    """Draw RUN... as one self-contained interactive page.

    RUN is a JSON result of any verb (written with --json) or the folder of a study, which is audited first.
    The page opens from disk, asks the network for nothing, and can be mailed.

    \b
    Example:
      strati scan model.safetensors --eigenvalues --json scan.json
      strati report scan.json -o report.html
    """
    from strati.report.page import build_page

    output = Output(json_, None, quiet)
    output.check()
    check_page(target)
    results = [result for run in runs for result in read_run(run)]
    page = build_page(results)
    write_atomic(target, page)
    emit(Page(target, len(page.encode()), tuple(result["schema"] for result in results)), output)


def read_run(run: str) -> list[dict[str, Any]]:
    """The results behind one argument: a JSON file, or a study folder (its audit).

    Raises:
        BadInputError: Neither of the two, or a damaged one.
    """
    from strati.report.schemas import check_result

    path = Path(run)
    if path.is_dir():
        from strati.intervene.judging.audit import audit

        return [audit(path).to_dict()]
    result = _read_json(path)
    check_result(result, path)
    return [result]


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
                path, f"is larger than {_LARGEST >> 20} MB; write the result without --eigenvalues"
            )
        # A parsed document takes ten times its size: a large file must at least begin like one of ours.
        if status.st_size > _UNCHECKED and not file.read(len(_HEAD)).startswith(_HEAD):
            raise BadInputError(
                path, "does not begin like a result of strati; give a file written with --json"
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
        raise BadInputError(path, f"is not valid JSON ({error}); write it again with --json") from None


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")
