"""What can go wrong, said so that a user knows what to do next.

One base class, :class:`StratiError`: *what* it is about (a file, a tensor, an option) and *why* it
cannot go on, ending in what to do. The command line prints it as one line and exits with 2.
A failed fit is not an error: it is a value of ``None`` with a reason beside it.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from strati.core.display import printable


class StratiError(Exception):
    """A wrong call or a bad input.

    Args:
        what: The thing at fault: a path, a tensor's name, an option.
        why: What is wrong with it and what to do about it.

    Examples:
        >>> print(StratiError("model.bin", "empty file"))
        model.bin: empty file
    """

    def __init__(self, what: object, why: str) -> None:
        self.what = printable(str(what))
        self.why = printable(why, limit=600)
        super().__init__(f"{self.what}: {self.why}")

    def __reduce__(self) -> tuple[type[StratiError], tuple[str, str]]:
        """Survive a trip between processes."""
        return type(self), (self.what, self.why)


class BadInputError(StratiError):
    """A file or an array that cannot be used, whatever the options."""


class NotFiniteError(BadInputError):
    """Weights, or the loss at them, are NaN or infinite."""


class IncompleteError(BadInputError):
    """A shard lacks tensors that its index lists; ``names`` has them."""

    names: tuple[str, ...] = ()


class UnsupportedError(BadInputError):
    """Something well-formed that strati does not handle."""


class MissingExtraError(StratiError):
    """An optional dependency is needed and absent."""


class StoppedError(StratiError):
    """Work stopped by the user; what was finished is kept.

    ``what`` says how far it got, ``why`` how to resume.
    """


def require(module: str, extra: str, needed_for: str) -> ModuleType:
    """Import an optional dependency, or say which extra brings it.

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
