"""Arrays into modules: every tensor by its name, nothing missing, nothing of another shape."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from strati.core.errors import BadInputError


def load_arrays(model: nn.Module, arrays: Mapping[str, Any], what: str | Path) -> None:
    """Fill a module with arrays by name.

    Args:
        model: The module; it is changed.
        arrays: Values by the names of its ``state_dict()``. Others are ignored.
        what: Where they come from, for messages.

    Raises:
        BadInputError: A tensor is missing or of another shape.

    Examples:
        >>> layer = nn.Linear(2, 1)
        >>> load_arrays(layer, {"weight": np.ones((1, 2)), "bias": np.zeros(1)}, "example")
        >>> layer(torch.ones(1, 2)).tolist()
        [[2.0]]
    """
    with torch.no_grad():
        for name, old in model.state_dict().items():
            if name not in arrays:
                if name.endswith("num_batches_tracked"):
                    continue
                raise BadInputError(what, f"the tensor {name} is missing")
            if tuple(arrays[name].shape) != tuple(old.shape):
                raise BadInputError(
                    what, f"{name} has shape {tuple(arrays[name].shape)}, not {tuple(old.shape)}"
                )
            old.copy_(torch.from_numpy(np.array(arrays[name])))
