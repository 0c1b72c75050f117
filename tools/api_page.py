"""Write the list of public names into docs/api.md, from strati's own table of them.

    .venv/bin/python tools/api_page.py

What stands before the first name is written by hand and stays.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "api.md"
START = "## Networks\n"


def listing() -> str:
    """A heading per group of names, and a directive per name."""
    source = (ROOT / "src" / "strati" / "__init__.py").read_text()
    table = re.search(r"_HOME = \{(.*?)\n\}", source, re.DOTALL)
    assert table is not None
    lines: list[str] = []
    for line in table[1].splitlines():
        if group := re.match(r"\s+# (.*)", line):
            name = group[1].replace(" (torch)", "").replace("a network", "networks")
            lines += ["", f"## {name[0].upper()}{name[1:]}", ""]
        elif entry := re.match(r'\s+"(\w+)": "([\w.]+)",', line):
            lines.append(f"::: {entry[2]}.{entry[1]}")
    lines += ["", "## Schemas", "", "::: strati.schemas.schema", "::: strati.schemas.names"]
    return "\n".join(lines).lstrip() + "\n"


if __name__ == "__main__":
    text = PAGE.read_text()
    PAGE.write_text(text[: text.index(START)] + listing())
