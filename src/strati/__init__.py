"""strati analyses trained neural networks layer by layer.

It measures what each layer is (``scan``, ``spectrum``, ``compare``, ``check``), whether the network needs it
(``study``, ``audit``), what can be removed (``plan``, ``apply``), how many parameters are used (``degeneracy``,
``llc``) and in which order shuffled layers belong (``reassemble``).

Names are imported when they are first used (``__init__.pyi`` lists them), so ``import strati`` is fast and torch is
loaded only by the functions that need it. Without torch these functions exist and name the extra to install when
called. ``from strati import *`` leaves out ``open``, which would hide the builtin.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import lazy_loader

from strati._version import __version__ as __version__

_load, _, _names = lazy_loader.attach_stub(__name__, __file__)
_EXTRA_OF_MODULE = {"torch": "torch", "graspologic_native": "torch"}

__all__ = ["__version__", *(name for name in _names if name != "open")]


def __getattr__(name: str) -> Any:
    if name not in _names:
        return _intervention(name)
    try:
        return _load(name)
    except ImportError as error:
        module = (error.name or "").split(".")[0]
        if module not in _EXTRA_OF_MODULE:
            raise
        return _missing_extra(name, module)


def __dir__() -> list[str]:
    return sorted([*__all__, "open"])


def _intervention(name: str) -> Any:
    """Resolve modules of the package, then ``strati.truncate`` and its kin, which live in ``strati.interventions``."""
    if not name.startswith("_"):
        if find_spec(f"{__name__}.{name}") is not None:  # `from strati import plugins` must not import torch
            return import_module(f"{__name__}.{name}")
        from strati import interventions

        if name in interventions.__all__:
            return getattr(interventions, name)
    raise AttributeError(f"module 'strati' has no attribute {name!r}")


def _missing_extra(name: str, module: str) -> Any:
    """Return a function that stands in for one whose extra is not installed."""
    extra = f"strati[{_EXTRA_OF_MODULE[module]}]"

    def unavailable(*_: Any, **__: Any) -> Any:
        from strati.core.errors import MissingExtraError

        raise MissingExtraError(f"strati.{name}", f"needs {module}; install it with: pip install '{extra}'")

    unavailable.__name__ = unavailable.__qualname__ = name
    unavailable.__doc__ = f"Not available: needs the extra '{extra}'."
    return unavailable
