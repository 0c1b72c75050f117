"""Grams and eigenvalues on a torch device, in float64: what a GPU takes over from LAPACK."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.core.errors import BadInputError, require

if TYPE_CHECKING:
    from strati.core.results import FloatArray


def check(device: str) -> None:
    """Refuse a device that torch does not have, or on which it has no float64, before any work is done.

    Raises:
        BadInputError: There is no such device here.
        MissingExtraError: torch is not installed.

    Examples:
        >>> check("cpu")
    """
    _torch(device)


def add_gram(total: Any, part: FloatArray, device: str) -> Any:
    """``total + part.T @ part`` on the device; ``total`` is ``None`` to begin with."""
    torch = _torch(device)
    there = torch.tensor(np.ascontiguousarray(part), dtype=torch.float64, device=device)
    return there.T @ there if total is None else total.addmm_(there.T, there)


def eigenvalues(square: Any) -> FloatArray:
    """The eigenvalues of a symmetric tensor, ascending."""
    import torch

    values: FloatArray = torch.linalg.eigvalsh(square).cpu().numpy()
    return values


def singular_values(matrix: FloatArray, device: str) -> FloatArray:
    """The singular values of a matrix, descending."""
    torch = _torch(device)
    there = torch.tensor(np.ascontiguousarray(matrix), dtype=torch.float64, device=device)
    values: FloatArray = torch.linalg.svdvals(there).cpu().numpy()
    return values


@lru_cache(maxsize=8)
def _torch(device: str) -> Any:
    torch = require("torch", "torch", "solving on a torch device")
    try:
        torch.ones(1, dtype=torch.float64, device=device).sum().item()
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
        why = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
        raise BadInputError(
            f"device {device}", f"cannot compute in float64 here ({why}); leave it out to use the processor"
        ) from None
    return torch
