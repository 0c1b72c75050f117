"""What the docs build does beyond MkDocs: roles of other documentation tools in docstrings are shown as plain code."""

from __future__ import annotations

import re
from typing import Any

_ROLE = re.compile(r":(?:func|class|data|mod|meth|attr|exc):(?=<code)")


def on_page_content(html: str, **_: Any) -> str:
    """Drop ``:func:`` and its like before the code they mark."""
    return _ROLE.sub("", html)
