"""Errors that say what is wrong, why, and what to do.

The base class is :class:`StratiError`: *what* it concerns (a file, a tensor, an option) and *why* the work cannot
continue, ending in what to do. The command line prints it as one line and exits with code 2. A failed fit is not an
error: it is ``None`` with a reason.
"""

from __future__ import annotations

from strati.core.display import printable


class StratiError(Exception):
    """A wrong call or a bad input.

    Args:
        what: The cause: a path, a tensor's name, an option.
        why: What is wrong with it and what to do.

    Examples:
        >>> print(StratiError("model.bin", "empty file"))
        model.bin: empty file
    """

    def __init__(self, what: object, why: str) -> None:
        self.what = printable(str(what))
        self.why = printable(why, limit=600)
        super().__init__(f"{self.what}: {self.why}")

    def __reduce__(self) -> tuple[type[StratiError], tuple[str, str]]:
        """Pickle between processes."""
        return type(self), (self.what, self.why)


class BadInputError(StratiError):
    """A file, an array or an option that cannot be used."""


class NotFiniteError(BadInputError):
    """Weights, or the loss at them, are NaN or infinite."""


class IncompleteError(BadInputError):
    """A shard lacks tensors that its index lists; ``names`` has them."""

    names: tuple[str, ...] = ()


class UnsupportedError(BadInputError):
    """Something well-formed that strati does not handle."""


class MissingExtraError(StratiError):
    """An optional dependency is missing."""


class StoppedError(StratiError):
    """The user stopped the work; finished units are stored.

    ``what`` says how much is done, ``why`` how to resume.
    """
