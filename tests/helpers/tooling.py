"""The scripts of ``tools/`` as modules, so that tests can hold them to what they print."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

HOME = Path(__file__).resolve().parents[2]


def tool(name: str) -> ModuleType:
    """The script ``tools/NAME.py``."""
    spec = importlib.util.spec_from_file_location(name, HOME / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where its dataclasses look for themselves
    spec.loader.exec_module(module)
    return module
