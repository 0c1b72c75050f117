"""Sparsifying networks that are no plain chains: residual networks, CNNs, transformers.

What a linear layer or a convolution reads on the data is watched; inputs that are combinations of others are folded
into these, which changes no output of the layer on the data, whatever is around it. Where one layer's outputs go
through a ReLU straight into another, synchronised neurons are recombined; neurons nobody reads any more are silenced.
Which layer reads which is guessed from names and widths and believed only if the network, run with the new weights,
gives the same outputs; otherwise the step is taken back.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from strati.core.errors import BadInputError, UnsupportedError
from strati.evaluate.hooks import Site, capture
from strati.evaluate.models import output_tensor
from strati.io.layers import select_names
from strati.landscape.basis.linear_maps import LinearMap, Seen
from strati.landscape.mlp.sequential import RELU, ChainStage

if TYPE_CHECKING:
    from strati.core.results import FloatArray, Tick

BATCH = 64
"""Data per forward pass."""
SAME = 1e-9
"""Outputs, in double precision, that move by no more than this share of the largest are the same."""
MOST_VALUES = 50_000_000
"""Pairs whose activations on the data are more numbers than this are not searched for synchronised neurons."""


@dataclass
class RewrittenLayer:
    """One layer while it is rewritten.

    Attributes:
        name: Its name.
        module: The layer, in the copy that is written to.
        map: Its matrix, for a convolution on patches.
        seen: What it reads on the data.
        before: Zeros it had.
        dependent: Inputs expressed through others.
        blocks: Sizes of synchronised blocks written and reported, and zeros won.
        unread: Outputs that nobody reads any more.
    """

    name: str
    module: nn.Module
    map: LinearMap
    seen: Seen
    before: int
    dependent: int = 0
    blocks: tuple[tuple[int, ...], tuple[int, ...], int] = ((), (), 0)
    unread: int = 0

    @property
    def outputs(self) -> int:
        """Number of neurons or channels that come out."""
        return int(self.map.weight.shape[0])

    @property
    def channels(self) -> int:
        """Number of neurons or channels that go in."""
        return int(self.map.weight.shape[1]) // self._patch

    @property
    def _patch(self) -> int:
        size = self.module.kernel_size if isinstance(self.module, nn.Conv2d) else (1,)
        return int(np.prod(size))

    def unread_channels(self) -> FloatArray:
        """Which of its inputs it does not read."""
        silent: FloatArray = (
            (self.map.weight == 0).all(axis=0).reshape(self.channels, self._patch).all(axis=1)
        )
        return silent

    def rows(self, x: Tensor) -> FloatArray:
        """What it reads as rows: the last dimension, or the patches of images."""
        if isinstance(self.module, nn.Conv2d):
            conv: Any = self.module
            x = (
                functional.pad(x, conv._reversed_padding_repeated_twice)
                if isinstance(conv.padding, str)
                else x
            )
            padding = 0 if isinstance(conv.padding, str) else conv.padding
            patches = functional.unfold(x, conv.kernel_size, conv.dilation, padding, conv.stride)
            x = patches.transpose(1, 2)
        return x.reshape(-1, x.shape[-1]).double().cpu().numpy()

    def write(self) -> None:
        """Put the matrix into the layer."""
        weight = torch.from_numpy(self.map.weight)
        layer: Any = self.module
        with torch.no_grad():
            layer.weight.copy_(
                weight.T if type(layer).__name__ == "Conv1D" else weight.reshape(layer.weight.shape)
            )
            if self.map.bias is not None:
                layer.bias.copy_(torch.from_numpy(self.map.bias))


def rewrite(
    model: nn.Module,
    x: Tensor,
    tolerance: float,
    layers: str | Sequence[str] | None,
    tick: Tick,
) -> tuple[list[RewrittenLayer], nn.Module, list[tuple[str, str]]]:
    """Rewrite every layer of a network so that its outputs on the data stay.

    Args:
        model: The network; it is not changed.
        x: Data, rows first; whole numbers are tokens.
        tolerance: Second moments below this share of the largest count as zero.
        layers: Patterns of the layers to rewrite.
        tick: Called after each layer.

    Returns:
        The layers with what was done, the copy in double precision with the new weights, and what was left alone.

    Raises:
        UnsupportedError: There is no layer that can be rewritten.
        BadInputError: The data do not fit the network.
    """
    twin = copy.deepcopy(model).eval().double().to(x.device)
    rewritten, skipped = _layers(twin, layers)
    if not rewritten:
        raise UnsupportedError(
            type(model).__name__, "has no linear layer or convolution that can be rewritten"
        )
    expected = outputs_of(twin, x)
    ordered = _watch(twin, rewritten, x)
    if not ordered:
        raise UnsupportedError("model", "has no linear layer or convolution that is used on these data")
    pairs = list(_pairs(ordered))
    for (
        first,
        second,
    ) in pairs:  # a recombination changes what the second reads: it comes before that is folded
        if isinstance(first.module, nn.Conv2d) or isinstance(second.module, nn.Conv2d):
            continue
        _recombine(twin, first, second, x, expected, tolerance)
    for layer in ordered:
        layer.seen = Seen()
    ordered = _watch(twin, ordered, x)
    for layer in ordered:
        layer.dependent += layer.map.pivot(layer.seen, tolerance)
        layer.write()
        tick(layer.name)
    for first, second in reversed(pairs):
        _silence(twin, first, second, x, expected)
    return ordered, twin, skipped


def moved(model: nn.Module, x: Tensor, wanted: Tensor) -> float:
    """The largest change of an output on the data, as a share of the largest output."""
    size = float(wanted.abs().max())
    return float((outputs_of(model, x) - wanted).abs().max()) / (size if size > 0 else 1.0)


def outputs_of(model: nn.Module, x: Tensor) -> Tensor:
    """The network's outputs on the data, batch by batch."""
    kind = next(model.parameters()).dtype
    parts = []
    with torch.no_grad():
        for part in torch.split(x, BATCH):
            inputs = part.to(kind) if part.is_floating_point() else part
            try:
                parts.append(output_tensor(model(inputs)).double())
            except (RuntimeError, ValueError, TypeError, IndexError) as error:
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                raise BadInputError(
                    "data", f"inputs of shape {tuple(x.shape)} do not fit the model ({reason})"
                ) from error
    return torch.cat(parts)


def _layers(
    model: nn.Module, patterns: str | Sequence[str] | None
) -> tuple[list[RewrittenLayer], list[tuple[str, str]]]:
    """The layers that can be rewritten, and those that are left alone with the reason."""
    uses: dict[int, int] = {}
    for module in model.modules():
        for p in module.parameters(recurse=False):
            uses[id(p)] = uses.get(id(p), 0) + 1
    usable, skipped = [], []
    for name, module in model.named_modules():
        layer_module: Any = module
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D":
            weight = layer_module.weight if isinstance(module, nn.Linear) else layer_module.weight.T
        elif isinstance(module, nn.Conv2d) and module.groups == 1 and module.padding_mode == "zeros":
            weight = module.weight.flatten(1)
        else:
            if isinstance(module, nn.modules.conv._ConvNd):
                skipped.append((name, "a grouped, padded or not two-dimensional convolution"))
            continue
        if uses[id(layer_module.weight)] > 1:
            skipped.append((name, "its weights are tied to another layer's"))
            continue
        bias = None if layer_module.bias is None else layer_module.bias.detach()
        stage = ChainStage(name, weight.detach(), bias, RELU)
        map_ = LinearMap(stage, weight.device)
        usable.append(RewrittenLayer(name, module, map_, Seen(), map_.zeros()))
    selected = set(select_names([layer.name for layer in usable], patterns)) if usable else set()
    return [layer for layer in usable if layer.name in selected], skipped


def _watch(model: nn.Module, layers: list[RewrittenLayer], x: Tensor) -> list[RewrittenLayer]:
    """Pass the data through once; the layers that were used, in the order of their first use."""
    by_name = {layer.name: layer for layer in layers}
    order: dict[str, None] = {}

    def visit(place: Site, tensor: Tensor) -> Tensor:
        order[place.module] = None
        by_name[place.module].seen.add(by_name[place.module].rows(tensor.detach()))
        return tensor

    with capture(model, [Site(name, "input") for name in by_name], visit):
        outputs_of(model, x)
    return [by_name[name] for name in order]


def _pairs(layers: list[RewrittenLayer]) -> Iterator[tuple[RewrittenLayer, RewrittenLayer]]:
    """Layers of one block whose outputs may be what the next reads: as wide, and called before it."""
    for place, second in enumerate(layers):
        parent = second.name.rpartition(".")[0]
        for first in layers[:place]:
            if first.name.rpartition(".")[0] == parent and first.outputs == second.channels:
                yield first, second


def _recombine(
    model: nn.Module,
    first: RewrittenLayer,
    second: RewrittenLayer,
    x: Tensor,
    wanted: Tensor,
    tolerance: float,
) -> None:
    """Recombine neurons of the first that fire together, if a ReLU leads straight from it into the second."""
    if x.shape[0] * first.outputs > MOST_VALUES:
        return
    into, out = _between(model, first, second, x)
    size = len(into) * (first.outputs + first.channels)
    if len(into) != len(out) or size > MOST_VALUES:
        return
    if not np.allclose(np.maximum(first.map.before(into), 0.0), out, rtol=1e-9, atol=1e-12):
        return
    originals = [copy.deepcopy(layer.map) for layer in (first, second)]
    dependent = first.map.pivot(first.seen, tolerance)
    blocks = first.map.recombine(into, second.map)
    for layer in (first, second):
        layer.write()
    if moved(model, x, wanted) <= SAME:
        first.dependent, first.blocks = first.dependent + dependent, blocks
        return
    for layer, old in zip((first, second), originals, strict=True):
        layer.map = old
        layer.write()


def _between(
    model: nn.Module, first: RewrittenLayer, second: RewrittenLayer, x: Tensor
) -> tuple[FloatArray, FloatArray]:
    """What the first layer and what the second reads, on all data."""
    captured: dict[str, list[FloatArray]] = {first.name: [], second.name: []}
    layers = {first.name: first, second.name: second}

    def visit(place: Site, tensor: Tensor) -> Tensor:
        captured[place.module].append(layers[place.module].rows(tensor.detach()))
        return tensor

    with capture(model, [Site(name, "input") for name in captured], visit):
        outputs_of(model, x)
    into, out = (np.concatenate(rows) if rows else np.zeros((0, 1)) for rows in captured.values())
    return into, out


def _silence(
    model: nn.Module, first: RewrittenLayer, second: RewrittenLayer, x: Tensor, wanted: Tensor
) -> None:
    """Zero the rows of the first that the second does not read, unless someone else does."""
    unread = np.asarray(second.unread_channels(), dtype=bool)
    old = copy.deepcopy(first.map)
    alive = unread & ((old.weight != 0).any(axis=1) | (False if old.bias is None else old.bias != 0))
    if not alive.any():
        return
    first.map.weight[unread] = 0.0
    if first.map.bias is not None:
        first.map.bias[unread] = 0.0
    first.write()
    if moved(model, x, wanted) <= SAME:
        first.unread = max(first.unread, int(unread.sum()))
        return
    first.map = old
    first.write()
