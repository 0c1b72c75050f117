"""One self-contained page from any results of strati.

The page is a pure function of the JSON results: it computes nothing that they do not hold, except for the
refits that a reader asks for with its sliders. What comes from a file travels as packed data and is set as
text by the page's scripts, never as markup.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from strati._version import __version__
from strati.errors import BadInputError
from strati.report import assets
from strati.report.pack import pack
from strati.report.schemas import check_result


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
