"""Make the texts of ``strati explain`` and of the report from docs/codes.md.

    python tools/explanations.py            # writes src/strati/explanations.json
    python tools/explanations.py --check    # fails if it is not what docs/codes.md says

Every table of docs/codes.md is one kind of entry: its first heading is ``code``, ``state``, ``phase``, ``metric``,
``score``, ``column`` or ``result``, the others are the fields below. A line ``Documented in [NAME](PAGE)`` names
the page of a section.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "codes.md"
TEXTS = ROOT / "src" / "strati" / "explanations.json"
FIELDS = {
    "it says": "meaning",
    "it is": "meaning",
    "what to do": "action",
    "how reliable": "reliability",
    "short": "label",
    "name": "title",
    "kind": "family",
    "documented in": "page",
}
PAGES = {"Of layers and files": "scan.md", "Of learning coefficients": "llc.md", "Of counts": "degeneracy.md"}


def entries(page: str) -> list[dict[str, str]]:
    """The rows of every table, in order; the reliability of codes joins the row of its code."""
    rows: list[dict[str, str]] = []
    section, document, heads = "", "", []
    for line in page.splitlines():
        if line.startswith("## "):
            section, heads = line[3:], []
            document = next((page for start, page in PAGES.items() if section.startswith(start)), "codes.md")
        elif link := re.match(r"Documented in \[[^]]*\]\(([^)]*)\)", line):
            document = link[1]
        elif line.startswith("|") and not line.startswith("| ---"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if not heads:
                heads = cells
                continue
            row = {"name": cells[0].strip("`"), "kind": heads[0], "page": document}
            row |= {FIELDS[head]: cell for head, cell in zip(heads[1:], cells[1:], strict=True)}
            row["page"] = row["page"].partition("](")[2].rstrip(")") or row["page"]
            known = next((r for r in rows if (r["name"], r["kind"]) == (row["name"], row["kind"])), None)
            if section == "Reliability of codes" and known is not None:
                known["reliability"] = row["reliability"]
            else:
                rows.append(row)
        elif not line:
            heads = heads if line.startswith("|") else []
    return rows


def main() -> int:
    """Write the file, or compare it."""
    text = json.dumps(entries(PAGE.read_text()), indent=1, ensure_ascii=False) + "\n"
    if "--check" in sys.argv[1:]:
        if TEXTS.read_text() == text:
            return 0
        print(f"{TEXTS.relative_to(ROOT)}: run python tools/explanations.py")
        return 1
    TEXTS.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
