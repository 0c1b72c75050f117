"""One self-contained page from any results of strati.

The page is a pure function of the JSON results: it computes nothing that they do not hold, except for the
refits that a reader asks for with its sliders. What comes from a file travels as packed data and is set as
text by the page's scripts, never as markup.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from strati._version import __version__
from strati.core.errors import BadInputError
from strati.core.files import write_atomic
from strati.core.results import Result
from strati.report import assets
from strati.report.pack import pack
from strati.report.runs import read_run
from strati.report.schemas import check_result


def write_report(
    runs: Result | Mapping[str, Any] | str | os.PathLike[str] | Iterable[Any], path: str | os.PathLike[str]
) -> list[dict[str, Any]]:
    """Write one self-contained interactive page of results.

    Args:
        runs: One result or several: results in memory, JSON files that strati wrote, folders of studies (which are
            audited first).
        path: The HTML file to write, whole or not at all.

    Returns:
        The results that are on the page, in their JSON form.

    Raises:
        BadInputError: Something is not a result of strati, or the file cannot be written.

    Examples:
        >>> import numpy as np, strati, tempfile
        >>> found = strati.scan({"fc.weight": np.random.default_rng(0).normal(size=(30, 20))})
        >>> file = f"{tempfile.mkdtemp()}/page.html"
        >>> [result["schema"] for result in write_report(found, file)]
        ['strati.scan/1']
    """
    listed = [runs] if isinstance(runs, Result | Mapping | str | os.PathLike) else list(runs)
    results = [read_run(run) for run in listed]
    write_atomic(os.fspath(path), build_page(results))
    return results


def build_page(results: Sequence[Mapping[str, Any]]) -> str:
    """Draw results as one HTML file that needs no server and no network.

    Args:
        results: JSON results (``Result.to_dict()``, or parsed from files) of any verbs, in any order. An audit
            among them lends its verdicts to the numbers of the scans.

    Returns:
        The HTML text.

    Raises:
        BadInputError: No result, or one that is not strati's.

    Examples:
        >>> page = build_page([{"schema": "strati.scan/1", "strati": "1", "network": {}, "layers": []}])
        >>> page.startswith("<!doctype html>") and "Content-Security-Policy" in page
        True
    """
    if not results:
        raise BadInputError("report", "no result given; name at least one JSON file or study folder")
    for number, result in enumerate(results, 1):
        check_result(result, f"result {number}")
    parts = {
        "@CSP@": assets.policy(),
        "@VERSION@": __version__,
        "@CSS@": assets.style(),
        "@DATA@": pack({"strati": __version__, "results": list(results)}),
        "@JS@": assets.script(),
    }
    # Split once, so that a part that happens to contain another part's mark is left alone.
    page = assets.template()
    pieces: list[str] = []
    for mark, text in parts.items():
        before, _, page = page.partition(mark)
        pieces += [before, text]
    return "".join([*pieces, page])
