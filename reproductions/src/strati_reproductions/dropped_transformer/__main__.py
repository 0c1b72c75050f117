"""``python -m strati_reproductions.dropped_transformer FOLDER``: the table of the networks that are trained already.

``strati reproduce dropped-transformer`` trains the others first.
"""

from __future__ import annotations

import sys
from pathlib import Path

from strati.core.results import silent
from strati_reproductions.dropped_transformer.table import at_hand


def main(folder: str = "out/reproduce/dropped-transformer") -> None:
    """Print what was found, a line each."""
    for row in at_hand(seed=0, folder=Path(folder), tick=silent).rows:
        print(f"{row.what}: {row.ours}" + (f" ({row.note})" if row.note else ""))


if __name__ == "__main__":
    main(*sys.argv[1:2])
