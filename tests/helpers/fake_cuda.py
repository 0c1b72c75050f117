"""CUDA without a GPU: tensors of torch's ``FakeTensorMode`` on a fake ``cuda`` device, which refuse any mix of devices.

They have shapes, types and a device but no values, so what runs on them proves where tensors are made and moved, and
nothing about numbers. Branches on values cannot run on them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode


class FakeCuda:
    """Makes fake ``cuda`` tensors and modules of ordinary ones; its mode has to be on while they are used."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)

    def tensor(self, value: Tensor) -> Tensor:
        """The same shape and type on the fake device."""
        return FakeTensor(self.mode, value.detach().to("meta"), torch.device("cuda"))

    def module(self, model: nn.Module) -> Any:
        """A copy of a module with its parameters and buffers on the fake device."""
        held = {id(t): t for t in (*model.parameters(), *model.buffers())}
        made = copy.deepcopy(model, dict(held))
        for module in made.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is not None:
                    fake = nn.Parameter(self.tensor(parameter), requires_grad=parameter.requires_grad)
                    module._parameters[name] = fake
            for name, buffer in list(module._buffers.items()):
                if buffer is not None:
                    module._buffers[name] = self.tensor(buffer)
        return made


@contextmanager
def fake_cuda() -> Iterator[FakeCuda]:
    """A fake GPU for the length of a ``with``."""
    here = FakeCuda()
    with here.mode:
        yield here
