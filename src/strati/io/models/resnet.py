"""Residual convolutional networks rebuilt from their tensors, named as torchvision, timm or the CIFAR ones name them.

``conv1, bn1, layer1 ... layerN, fc``: basic blocks (two 3x3 convolutions) or bottlenecks (1x1, 3x3, 1x1, the stride on
the 3x3 one), grouped or not, told from the shapes. The stem's kernel tells the rest: a 7x7 one has stride 2 and a max
pool behind it (ImageNet), a 3x3 one has neither (CIFAR). A shortcut that changes the shape is a 1x1 convolution
(``downsample`` or ``shortcut``), or, where it has no weights, every second pixel and zeros for the missing channels
(option A of He et al. 2016, section 3.3).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor, nn
from torch.nn import functional

from strati.core.errors import UnsupportedError

Shapes = Mapping[str, tuple[int, ...]]

_CONV = re.compile(r"layer([1-9])\.(\d{1,3})\.conv([123])\.weight")


def is_resnet(shapes: Shapes) -> bool:
    """Whether tensors of these names and shapes are a residual network of this kind."""
    stem = shapes.get("conv1.weight", ())
    return len(stem) == 4 and "bn1.weight" in shapes and "layer1.0.conv1.weight" in shapes


def resnet(shapes: Shapes) -> nn.Module:
    """The network that has tensors of these names and shapes, in evaluation mode, its weights at random.

    Raises:
        UnsupportedError: Some of the tensors belong to another kind of residual network.
    """
    model = ResNet(shapes).eval()
    own = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    foreign = sorted(name for name in shapes if name not in own and not name.endswith("num_batches_tracked"))
    if foreign:
        raise UnsupportedError(foreign[0], "is not of a plain residual network; build the nn.Module yourself")
    return model


class Block(nn.Module):
    """A residual block, basic or bottleneck: ``relu(body(x) + shortcut(x))``."""

    def __init__(self, name: str, shapes: Shapes, stride: int) -> None:
        super().__init__()
        kernels = [shapes[key] for i in (1, 2, 3) if (key := f"{name}.conv{i}.weight") in shapes]
        self.depth = len(kernels)
        strided = 2 if self.depth == 3 else 1
        width = int(kernels[0][1])
        for i, (outputs, inputs, side, _) in enumerate(kernels, 1):
            groups = width // inputs if inputs and width % inputs == 0 else 1
            step = stride if i == strided else 1
            conv = nn.Conv2d(width, outputs, side, step, side // 2, groups=groups, bias=False)
            self.add_module(f"conv{i}", conv)
            self.add_module(f"bn{i}", nn.BatchNorm2d(outputs))
            width = int(outputs)
        self.stride, self.extra = stride, width - int(kernels[0][1])
        self.shortcut_name = next(
            (word for word in ("downsample", "shortcut") if f"{name}.{word}.0.weight" in shapes), None
        )
        if self.shortcut_name is not None:
            outputs, inputs, side, _ = shapes[f"{name}.{self.shortcut_name}.0.weight"]
            projection = nn.Conv2d(inputs, outputs, side, stride, side // 2, bias=False)
            self.add_module(self.shortcut_name, nn.Sequential(projection, nn.BatchNorm2d(outputs)))

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        y = x
        for i in range(1, self.depth + 1):
            y = self.get_submodule(f"bn{i}")(self.get_submodule(f"conv{i}")(y))
            y = functional.relu(y) if i < self.depth else y
        return functional.relu(y + self._shortcut(x))

    def _shortcut(self, x: Tensor) -> Tensor:
        if self.shortcut_name is not None:
            projected: Tensor = self.get_submodule(self.shortcut_name)(x)
            return projected
        if self.stride == 1 and not self.extra:
            return x
        before = self.extra // 2
        return functional.pad(
            x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, before, self.extra - before)
        )


class ResNet(nn.Module):
    """A residual network that has tensors of the given names and shapes."""

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        outputs, inputs, side, _ = shapes["conv1.weight"]
        self.pooled = side >= 7
        self.conv1 = nn.Conv2d(
            inputs, outputs, side, 2 if self.pooled else 1, side // 2, bias="conv1.bias" in shapes
        )
        self.bn1 = nn.BatchNorm2d(outputs)
        blocks = sorted({(int(m[1]), int(m[2])) for name in shapes if (m := _CONV.fullmatch(name))})
        self.stages = [f"layer{stage}" for stage in sorted({stage for stage, _ in blocks})]
        for stage in self.stages:
            numbers = [number for place, number in blocks if f"layer{place}" == stage]
            made = [
                Block(f"{stage}.{n}", shapes, 2 if n == 0 and stage != self.stages[0] else 1) for n in numbers
            ]
            self.add_module(stage, nn.Sequential(*made))
        self.head = next((word for word in ("fc", "linear") if f"{word}.weight" in shapes), None)
        if self.head is not None:
            classes, width = shapes[f"{self.head}.weight"]
            self.add_module(self.head, nn.Linear(width, classes, bias=f"{self.head}.bias" in shapes))

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images (batch, channels, height, width); features where there is no classifier."""
        x = functional.relu(self.bn1(self.conv1(x)))
        x = functional.max_pool2d(x, 3, 2, 1) if self.pooled else x
        for stage in self.stages:
            x = self.get_submodule(stage)(x)
        features = x.mean(dim=(2, 3))
        found: Tensor = features if self.head is None else self.get_submodule(self.head)(features)
        return found
