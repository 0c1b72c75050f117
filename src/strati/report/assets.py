"""The page's own files put into one: ES modules joined without a build step, a policy that allows only them.

The modules in ``static/`` are plain ES modules that a browser or Node runs as they are. To live in one
``<script>`` each becomes a function that returns its exports; an import becomes a look into what an earlier
one returned.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from pathlib import Path

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
