"""One self-contained page from any results of strati.

The page is a pure function of the JSON results: it computes nothing that they do not hold, except for the
refits that a reader asks for with its sliders. What comes from a file travels as packed data and is set as
text by the page's scripts, never as markup.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from strati._version import __version__
from strati.core.errors import BadInputError
from strati.core.files import write_atomic
from strati.core.results import Result
from strati.explain import texts
from strati.report.pack import pack
from strati.report.runs import check_result, read_run


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
        >>> scanned = strati.scan({"fc.weight": np.random.default_rng(0).normal(size=(30, 20))})
        >>> file = f"{tempfile.mkdtemp()}/page.html"
        >>> [result["schema"] for result in write_report(scanned, file)]
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
        "@CSP@": policy(),
        "@VERSION@": __version__,
        "@CSS@": style(),
        "@DATA@": pack({"strati": __version__, "results": list(results), "explanations": texts()}),
        "@JS@": script(),
    }
    # Split once, so that a part that happens to contain another part's mark is left alone.
    page = template()
    pieces: list[str] = []
    for mark, text in parts.items():
        before, _, page = page.partition(mark)
        pieces += [before, text]
    return "".join([*pieces, page])


STATIC = Path(__file__).resolve().parent / "static"

_IMPORT = re.compile(r'^import \{([^}]*)\} from "\./(\w+)\.js";$', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async )?(?:function|const|class)) (\w+)", re.MULTILINE)


@cache
def script() -> str:
    """All modules as one script, each after the ones it imports."""
    placed: dict[str, str] = {}
    _place("main", placed)
    return "\n".join(["'use strict';", *placed.values()])


@cache
def style() -> str:
    """The style sheet."""
    return (STATIC / "report.css").read_text(encoding="utf-8")


@cache
def template() -> str:
    """The page without its style, scripts and data."""
    return (STATIC / "report.html").read_text(encoding="utf-8")


def policy() -> str:
    """The content-security policy: these scripts and this style by their hash, and no request at all.

    Pictures may come from the page itself (``data:`` and ``blob:``), which is how they are exported.
    """
    return "; ".join(
        [
            "default-src 'none'",
            f"script-src {_hash(script())}",
            f"style-src {_hash(style())}",
            "img-src data: blob:",
            "connect-src 'none'",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )


def _place(name: str, placed: dict[str, str]) -> None:
    if name in placed:
        return
    source = (STATIC / f"{name}.js").read_text(encoding="utf-8")
    for _, needed in _IMPORT.findall(source):
        _place(needed, placed)
    exports = [name for _, name in _EXPORT.findall(source)]
    body = _IMPORT.sub(lambda m: f"const {{{m[1]}}} = module_{m[2]};", source)
    body = _EXPORT.sub(r"\1 \2", body)
    placed[name] = f"const module_{name} = (() => {{\n{body}\nreturn {{ {', '.join(exports)} }};\n}})();"


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode()
    return f"'sha256-{digest}'"
