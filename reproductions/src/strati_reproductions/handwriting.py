"""Handwritten digits as tensors: the small embedded set, and MNIST. Several papers' entries train on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from strati import embedded
from strati_reproductions import zoo

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Digits:
    """Images as rows of pixels with their labels, to train on and to test on."""

    x: torch.Tensor
    y: torch.Tensor
    x_test: torch.Tensor
    y_test: torch.Tensor


def digits() -> Digits:
    """The embedded digits."""
    import torch

    with np.load(embedded.path("digits.npz")) as file:
        return Digits(*(torch.from_numpy(file[k]) for k in ("x", "y", "x_test", "y_test")))


def mnist() -> Digits:
    """MNIST, pixels between 0 and 1."""
    import torch

    with np.load(zoo.path("mnist")) as file:
        x, x_test = (
            torch.from_numpy(file[k].reshape(len(file[k]), -1) / np.float32(255))
            for k in ("x_train", "x_test")
        )
        return Digits(x, torch.from_numpy(file["y_train"]), x_test, torch.from_numpy(file["y_test"]))
