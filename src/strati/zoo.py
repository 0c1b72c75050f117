"""``python -m strati.zoo NAME``: the networks of ``strati_reproductions.zoo``, where that package is installed."""

from __future__ import annotations

import runpy
import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from strati.core.plugins import REPRODUCTIONS

_ZOO = "strati_reproductions.zoo"


def __getattr__(name: str) -> Any:
    if name.startswith("__") or find_spec(_ZOO.partition(".")[0]) is None:
        raise AttributeError(f"strati.zoo.{name}: {REPRODUCTIONS}")
    return getattr(import_module(_ZOO), name)


if __name__ == "__main__":
    if find_spec(_ZOO.partition(".")[0]) is None:
        print(f"strati: error: zoo: {REPRODUCTIONS}", file=sys.stderr)
        sys.exit(2)
    runpy.run_module(_ZOO, run_name="__main__", alter_sys=True)
