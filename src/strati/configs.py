"""Frozen dataclasses that hold the options of the public functions, one per function.

Every public function takes ``config=`` (one of these) and keywords of the same names, which win over it. A config is
useful where several calls share their options.

Examples:
    >>> from strati.configs import ScanConfig
    >>> ScanConfig(level=0.05).level
    0.05
"""

from typing import Any

import lazy_loader

_load, _, __all__ = lazy_loader.attach_stub("strati", __file__)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'strati.configs' has no attribute {name!r}")
    return _load(name)


def __dir__() -> list[str]:
    return list(__all__)
