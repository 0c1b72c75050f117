"""Write the list of public names into docs/api.md and docs/stability.md, from strati's own table of them.

    .venv/bin/python tools/api_page.py

What stands before the first name is written by hand and stays.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "api.md"
STABLE = ROOT / "docs" / "stability.md"
START = "## Networks\n"


def listing(line_of: str = "::: {home}.{name}") -> str:
    """A heading per group of names, and a line per name."""
    source = (ROOT / "src" / "strati" / "__init__.py").read_text()
    table = re.search(r"_HOME = \{(.*?)\n\}", source, re.DOTALL)
    assert table is not None
    lines: list[str] = []
    for line in table[1].splitlines():
        if group := re.match(r"\s+# (.*)", line):
            name = group[1].replace(" (torch)", "").replace("a network", "networks")
            lines += ["", f"## {name[0].upper()}{name[1:]}", ""]
        elif entry := re.match(r'\s+"(\w+)": "([\w.]+)",', line):
            lines.append(line_of.format(home=entry[2], name=entry[1]))
    return "\n".join(lines).lstrip() + "\n"


SCHEMAS = "\n## Schemas\n\n::: strati.schemas.schema\n::: strati.schemas.names\n"


if __name__ == "__main__":
    text = PAGE.read_text()
    PAGE.write_text(text[: text.index(START)] + listing() + SCHEMAS)
    text = STABLE.read_text()
    STABLE.write_text(text[: text.index(START)] + listing("- `strati.{name}`"))
