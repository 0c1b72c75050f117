"""Make the texts of ``strati explain`` and of the report from docs/codes.md.

    python tools/explanations.py            # writes src/strati/explanations.json and the list in meanings.js
    python tools/explanations.py --check    # fails if they are not what docs/codes.md says

Every table of docs/codes.md is one kind of entry: its first heading is ``code``, ``state``, ``phase``, ``metric``,
``score`` or ``column``, the others are the fields below. A line ``Documented in [NAME](PAGE)`` names the page of a
section.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "codes.md"
TEXTS = ROOT / "src" / "strati" / "explanations.json"
SCRIPT = ROOT / "src" / "strati" / "report" / "static" / "meanings.js"
FIELDS = {
    "it says": "meaning",
    "it is": "meaning",
    "what to do": "action",
    "how reliable": "reliability",
    "short": "label",
    "name": "title",
    "kind": "family",
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
            known = next((r for r in rows if (r["name"], r["kind"]) == (row["name"], row["kind"])), None)
            if section == "Reliability of codes" and known is not None:
                known["reliability"] = row["reliability"]
            else:
                rows.append(row)
        elif not line:
            heads = heads if line.startswith("|") else []
    return rows


def script(rows: list[dict[str, str]], text: str) -> str:
    """The report's script with its list of metrics made anew."""
    lines = []
    for row in rows:
        if row["kind"] == "metric":
            family = {"tail": ", tail: true", "exact": ", exact: true"}.get(row["family"], "")
            quoted = {name: json.dumps(row[name], ensure_ascii=False) for name in ("name", "label", "title")}
            meaning, trust = (
                json.dumps(row[name].replace("`", ""), ensure_ascii=False)
                for name in ("meaning", "reliability")
            )
            lines.append(
                f"  {{ key: {quoted['name']}, label: {quoted['label']}, name: {quoted['title']}{family}, "
                f"meaning: {meaning}, trust: {trust} }},"
            )
    start = text.index("export const METRICS = [")
    end = text.index("];\n", start)
    return text[:start] + "export const METRICS = [\n" + "\n".join(lines) + "\n" + text[end:]


def main() -> int:
    """Write the two files, or compare them."""
    rows = entries(PAGE.read_text())
    made = {
        TEXTS: json.dumps(rows, indent=1, ensure_ascii=False) + "\n",
        SCRIPT: script(rows, SCRIPT.read_text()),
    }
    if "--check" in sys.argv[1:]:
        stale = [str(path.relative_to(ROOT)) for path, text in made.items() if path.read_text() != text]
        print("\n".join(f"{path}: run python tools/explanations.py" for path in stale))
        return 1 if stale else 0
    for path, text in made.items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
