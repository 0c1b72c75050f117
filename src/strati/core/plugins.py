"""Other installed packages: optional dependencies, and plugins that extend strati, found through entry points.

A package names its objects in its ``pyproject.toml``; docs/guides/extend.md shows one of each group. Entry points are
read only for names that strati itself does not have, so they cost nothing otherwise.
"""

from __future__ import annotations

import importlib
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any

from strati.core.errors import BadInputError, MissingExtraError

COMMANDS = "strati.commands"
"""Commands of ``strati``: a ``click.Command``."""
SPECS = "strati.specs"
"""Studies by name: a path of a TOML file, a mapping of the same form, or a function that returns either."""
FORMATS = "strati.formats"
"""File formats: a function from a path to tensors by name, or ``None`` where the file has another format."""
INTERVENTIONS = "strati.interventions"
"""Interventions of ``study``: a function ``(weight, rng) -> weight``."""
METRICS = "strati.metrics"
"""Metrics of ``study``: a function ``matrix -> number`` or ``(intact, changed) -> number``."""
NETWORKS = "strati.networks"
"""Networks that ``study`` trains itself, by ``network.source``: a module with ``read_training``."""
DATASETS = "strati.datasets"
"""Data sets by name for ``study``: a function that returns the path of the file."""

REPRODUCTIONS = (
    "needs the package strati-reproductions; install it with: pip install strati-reproductions "
    "(in a checkout: pip install ./reproductions)"
)
"""The message for names of strati-reproductions if that package is not installed."""


def names(group: str) -> tuple[str, ...]:
    """The names that installed packages add to a group.

    Examples:
        >>> names("strati.no-such-group")
        ()
    """
    return tuple(sorted({entry.name for entry in entry_points(group=group)}))


def load(group: str, name: str) -> Any:
    """The object that a package added to a group under a name; ``None`` where there is none.

    Raises:
        BadInputError: The package that adds it cannot be imported.
    """
    for entry in entry_points(group=group, name=name):
        return _load(entry)
    return None


def load_all(group: str) -> dict[str, Any]:
    """All objects of a group by name."""
    return {name: load(group, name) for name in names(group)}


def require(module: str, extra: str, needed_for: str) -> ModuleType:
    """Import an optional dependency, or name the extra that installs it.

    Args:
        module: The module to import, e.g. ``"h5py"``.
        extra: strati's extra that installs it, e.g. ``"keras"``.
        needed_for: What the user was trying to do, e.g. ``"reading Keras files"``.

    Returns:
        The imported module.

    Raises:
        MissingExtraError: The module is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        if error.name is not None and error.name.split(".")[0] != module.split(".")[0]:
            raise
        raise MissingExtraError(
            needed_for, f"needs {module}; install it with: pip install 'strati[{extra}]'"
        ) from None


def _load(entry: EntryPoint) -> Any:
    try:
        return entry.load()
    except Exception as error:  # another package may fail in any way
        package = entry.dist.name if entry.dist is not None else entry.value
        raise BadInputError(
            f"{entry.group} {entry.name}",
            f"the package {package} cannot be loaded: {type(error).__name__}: {error}",
        ) from error
