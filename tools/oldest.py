"""Print the oldest versions that pyproject.toml allows, as constraints for pip: ``numpy>=2.0`` as ``numpy==2.0.*``.

    .venv/bin/python tools/oldest.py > oldest.txt

What the tests need beside it (``dev``) and torch, which is pinned elsewhere, keep their newest versions.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOWER = re.compile(r"([A-Za-z0-9_.-]+)>=([0-9.]+)")


def constraints() -> list[str]:
    """One line per requirement that has a lower bound."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(r for name, rs in extras.items() if name != "dev" for r in rs)]
    found = (LOWER.fullmatch(requirement) for requirement in wanted)
    return sorted({f"{m[1]}=={m[2]}.*" for m in found if m and m[1] != "torch"})


if __name__ == "__main__":
    print("\n".join(constraints()))
