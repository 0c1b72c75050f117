"""Fewer non-zero weights, the same outputs on the data: section 4 of degeneracy-in-the-loss-landscape.

Layer by layer from the input on:

1. *Pivot.* Neurons whose activations are linear combinations of others (rank-revealing QR of the activations,
   the constant first) have their outgoing columns folded into the others' and the bias, and set to zero.
2. *Blocks.* Neurons of the next layer that fire on exactly the same data may be recombined among each other.
   Eq. 28 holds only if the recombination keeps every gate on the data; such changes are made and written, the
   others are reported.
3. *Rows.* A neuron nobody reads any more needs no incoming weights.

What a linear layer or a convolution reads on the data is watched, so that the first step changes no output of the
layer, whatever is around it. Which layer reads which is guessed from names and widths and believed only if the
network, run with the new weights, gives the same outputs; otherwise the step is taken back.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

import numpy as np
import torch
from torch import Tensor, nn

from strati.core.errors import BadInputError, UnsupportedError
from strati.core.options import resolve
from strati.core.results import Flag, Result, Tick, silent
from strati.evaluate.hooks import Site, capture
from strati.evaluate.models import device_of, output_tensor
from strati.io.layers import select_names
from strati.io.to_module import as_module
from strati.landscape.basis.linear_maps import DataStatistics, LinearMap
from strati.landscape.basis.probe_moments import as_data
from strati.landscape.counts.layer_statistics import patches
from strati.landscape.mlp.sequential import as_chain

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import ArrayLike, NDArray
    from rich.console import RenderableType

    from strati.core.option_types import SparsifyOptions
    from strati.core.results import FloatArray
    from strati.io.network import Openable
    from strati.schemas.json_types import SparsifyFields

TOLERANCE = 1e-12
"""Directions below this share of the largest second moment count as dependent."""
BATCH = 64
"""Data per forward pass."""
SAME = 1e-9
"""Outputs, in double precision, that move by no more than this share of the largest are the same."""
MOST_VALUES = 50_000_000
"""Pairs whose activations on the data are more numbers than this are not searched for synchronised neurons."""


@dataclass(frozen=True)
class SparsifiedLayer:
    """What was done to one linear map.

    Attributes:
        name: The layer.
        weights: Number of its weights and biases.
        zeros_before: Zero weights and biases before.
        zeros_after: And after.
        dependent: Inputs expressed through others: free directions of the activations used, per output.
        blocks_written: Sizes of synchronised blocks recombined in the checkpoint.
        blocks_reported: Sizes of synchronised blocks whose recombination would move a gate on the data.
        block_zeros: Zeros won by recombining blocks.
        unread: Outputs that nobody reads any more.
    """

    name: str
    weights: int
    zeros_before: int
    zeros_after: int
    dependent: int
    blocks_written: tuple[int, ...]
    blocks_reported: tuple[int, ...]
    block_zeros: int
    unread: int


@dataclass(frozen=True)
class Sparsified(Result):
    """A network with fewer non-zero weights and the same outputs on the data.

    Attributes:
        layers: What was done, layer by layer.
        tensors: Weights and biases by name, in the types they had: the new checkpoint.
        change: Largest change of an output on the data, as a share of the largest output.
        data: Number of data.
    """

    verb: ClassVar[str] = "sparsify"

    layers: tuple[SparsifiedLayer, ...]
    tensors: dict[str, NDArray[Any]]
    change: float
    data: int
    warnings: tuple[Flag, ...] = ()

    @property
    def zeros_before(self) -> int:
        """Zero weights and biases before."""
        return sum(layer.zeros_before for layer in self.layers)

    @property
    def zeros_after(self) -> int:
        """Zero weights and biases after."""
        return sum(layer.zeros_after for layer in self.layers)

    def save(self, path: str | Path) -> None:
        """Write the weights as an ordinary ``.safetensors`` checkpoint, whole or not at all."""
        from safetensors.numpy import save

        from strati.core.files import write_atomic

        write_atomic(path, save({name: np.ascontiguousarray(value) for name, value in self.tensors.items()}))

    def payload(self) -> SparsifyFields:
        """Counts per layer and what became of the outputs."""
        return {
            "kind": "sparsify",
            "data": self.data,
            "weights": sum(layer.weights for layer in self.layers),
            "zeros_before": self.zeros_before,
            "zeros_after": self.zeros_after,
            "output_change": self.change,
            "layers": [
                {"directions": layer.weights - layer.zeros_after, "eigenvalues": []} | vars(layer)
                for layer in self.layers
            ],
            "edges": [],
            "modules": [],
            "warnings": self.warnings,
        }

    def frame(self) -> pd.DataFrame:
        """One line per layer."""
        import pandas as pd

        return pd.DataFrame([vars(layer) for layer in self.layers])

    def summary(self) -> RenderableType:
        """A table of the layers, and the change of the outputs."""
        from strati.landscape.basis.result import as_table

        title = (
            f"zeros {self.zeros_before} -> {self.zeros_after} of {sum(layer.weights for layer in self.layers)}; "
            f"outputs on {self.data} data change by {self.change:.2g} of the largest"
        )
        return as_table(title, self.frame(), self.warnings)


@dataclass(frozen=True)
class SparsifyConfig:
    """Options of :func:`sparsify`.

    Attributes:
        tolerance: Second moments below this share of the largest count as zero.
        layers: Rewrite only these layers: patterns as ``--layers`` takes them.
        device: Where the network runs; where the model is by default. The elimination is done on the processor.
    """

    tolerance: float = TOLERANCE
    layers: str | Sequence[str] | None = None
    device: str | torch.device | None = None

    def __post_init__(self) -> None:
        """Refuse a tolerance that is none."""
        if not 0 < self.tolerance < 1:
            raise BadInputError("tolerance", "must be between 0 and 1")


def sparsify(
    model: Openable,
    data: ArrayLike,
    *,
    config: SparsifyConfig | None = None,
    tick: Tick = silent,
    **options: Unpack[SparsifyOptions],
) -> Sparsified:
    """Set weights to zero by the freedom that dependent activations and synchronised neurons leave.

    Args:
        model: A chain of linear layers and activations, any other network with linear layers or convolutions
            (residual networks, CNNs, transformers); whatever names it.
        data: Inputs, one row each (token numbers for a language model); only on these the outputs are kept.
        config: Options; keywords of the same names win.
        tick: Called after each layer with its name.
        options: Fields of :class:`SparsifyConfig`.

    Raises:
        UnsupportedError: The network has no layer that can be rewritten.
        BadInputError: The data do not fit, or are not finite, or no such option.

    Examples:
        >>> _ = torch.manual_seed(0)
        >>> net = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2)).double()
        >>> x = torch.randn(100, 3, dtype=torch.float64) @ torch.randn(3, 6, dtype=torch.float64)
        >>> result = sparsify(net, x.numpy())                  # 3 of 6 inputs depend on the others
        >>> result.zeros_after >= 3 * 5, result.change < 1e-12
        (True, True)
    """
    settings = resolve(SparsifyConfig, config, options, of=sparsify)
    model = as_module(model)
    rows = as_data(data, model).to(device_of(model, settings.device))
    with suppress(UnsupportedError):  # a plain chain takes images as rows
        rows = as_chain(model).rows(rows)
    work, twin, skipped = _rewrite(model, rows, settings, tick)
    old = model.state_dict()
    tensors = {name: value.to(old[name]) for name, value in twin.state_dict().items()}
    if any(not bool(torch.isfinite(v).all()) for v in tensors.values() if v.is_floating_point()):
        raise UnsupportedError("network", "its dependent activations are too ill-conditioned to be folded")
    twin.load_state_dict(tensors)  # the weights as they are stored, run in double precision
    change = _moved(twin, rows, _outputs_of(copy.deepcopy(model).eval().double().to(rows.device), rows))
    layers = tuple(
        SparsifiedLayer(w.name, w.map.size, w.before, w.map.zeros(), w.dependent, *w.blocks, w.unread)
        for w in work
    )
    kind = next(p.dtype for p in model.parameters() if p.is_floating_point())
    flags = [*_flags(layers, change, kind)]
    if skipped:
        names = ", ".join(f"{name} ({why})" for name, why in skipped[:4])
        flags.append(Flag("left-alone", f"{len(skipped)} layers are not rewritten: {names}"))
    stored = {w.place: w.name for w in work}  # where a checkpoint's name cannot be a module's
    arrays = {_stored_name(name, stored): _as_numpy(tensor.cpu()) for name, tensor in tensors.items()}
    return Sparsified(layers, arrays, change, len(rows), tuple(flags))


def _stored_name(name: str, layers: dict[str, str]) -> str:
    place, _, kind = name.rpartition(".")
    return f"{layers[place]}.{kind}" if layers.get(place) else name


def _as_numpy(tensor: torch.Tensor) -> NDArray[Any]:
    if tensor.dtype == torch.bfloat16:
        return np.asarray(tensor.float().numpy())
    return np.asarray(tensor.numpy())


def _flags(layers: tuple[SparsifiedLayer, ...], change: float, kind: torch.dtype) -> tuple[Flag, ...]:
    flags = []
    rounding = float(torch.finfo(kind).eps)
    if change > 1e3 * rounding:
        flags.append(Flag("outputs-moved", f"outputs on the data move by {change:.2g} of the largest"))
    reported = [size for layer in layers for size in layer.blocks_reported]
    if reported:
        text = f"{len(reported)} synchronised blocks (sizes {', '.join(map(str, sorted(reported, reverse=True)[:8]))})"
        flags.append(Flag("blocks-reported", f"{text} cannot be recombined in an ordinary checkpoint"))
    return tuple(flags)


@dataclass
class RewrittenLayer:
    """One layer while it is rewritten.

    Attributes:
        name: Its name in the checkpoint.
        place: Its name in the network.
        module: The layer, in the copy that is written to.
        map: Its matrix, for a convolution on patches.
        seen: What it reads on the data.
        before: Zeros it had.
        dependent: Inputs expressed through others.
        blocks: Sizes of synchronised blocks written and reported, and zeros won.
        unread: Outputs that nobody reads any more.
    """

    name: str
    place: str
    module: nn.Module
    map: LinearMap
    seen: DataStatistics
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
        x = patches(self.module, x)[0] if isinstance(self.module, nn.Conv2d) else x
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


def _rewrite(
    model: nn.Module, x: Tensor, settings: SparsifyConfig, tick: Tick
) -> tuple[list[RewrittenLayer], nn.Module, list[tuple[str, str]]]:
    """The layers with what was done, a copy in double precision with the new weights, and what was left alone."""
    twin = copy.deepcopy(model).eval().double().to(x.device)
    rewritten, skipped = _layers(twin, settings.layers)
    if not rewritten:
        raise UnsupportedError(
            type(model).__name__, "has no linear layer or convolution that can be rewritten"
        )
    expected = _outputs_of(twin, x)
    ordered = _watch(twin, rewritten, x)
    if not ordered:
        raise UnsupportedError("model", "has no linear layer or convolution that is used on these data")
    readers = {id(layer): list(_readers(layer, ordered)) for layer in ordered}
    for layer in ordered:  # a recombination changes what the reader reads: it comes before that is folded
        for reader in readers[id(layer)]:
            if _recombine(twin, layer, reader, x, expected, settings.tolerance):
                break
    for layer in ordered:
        layer.seen = DataStatistics()
    for layer in _watch(twin, ordered, x):
        layer.dependent += layer.map.pivot(layer.seen, settings.tolerance)
        layer.write()
        tick(layer.name)
    for layer in reversed(ordered):
        for reader in readers[id(layer)]:
            _silence(twin, layer, reader, x, expected)
    return ordered, twin, skipped


def _moved(model: nn.Module, x: Tensor, wanted: Tensor) -> float:
    """The largest change of an output on the data, as a share of the largest output."""
    size = float(wanted.abs().max())
    return float((_outputs_of(model, x) - wanted).abs().max()) / (size if size > 0 else 1.0)


def _outputs_of(model: nn.Module, x: Tensor) -> Tensor:
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
        bias = None if layer_module.bias is None else layer_module.bias.detach().cpu().numpy()
        map_ = LinearMap(weight.detach().cpu().numpy(), bias)
        stored_name = getattr(module, "checkpoint_name", name)
        usable.append(RewrittenLayer(stored_name, name, module, map_, DataStatistics(), map_.zeros()))
    selected = set(select_names([layer.name for layer in usable], patterns)) if usable else set()
    return [layer for layer in usable if layer.name in selected], skipped


def _watch(model: nn.Module, layers: list[RewrittenLayer], x: Tensor) -> list[RewrittenLayer]:
    """Pass the data through once; the layers that were used, in the order of their first use."""
    by_name = {layer.place: layer for layer in layers}
    order: dict[str, None] = {}

    def visit(place: Site, tensor: Tensor) -> Tensor:
        order[place.module] = None
        by_name[place.module].seen.add(by_name[place.module].rows(tensor.detach()))
        return tensor

    with capture(model, [Site(name, "input") for name in by_name], visit):
        _outputs_of(model, x)
    return [by_name[name] for name in order]


def _readers(first: RewrittenLayer, layers: list[RewrittenLayer]) -> Iterator[RewrittenLayer]:
    """Layers of the same block that may read what comes out of a layer: as wide, and called after it."""
    parent = first.place.rpartition(".")[0]
    for second in layers[layers.index(first) + 1 :]:
        if second.place.rpartition(".")[0] == parent and first.outputs == second.channels:
            yield second


def _recombine(
    model: nn.Module,
    first: RewrittenLayer,
    second: RewrittenLayer,
    x: Tensor,
    wanted: Tensor,
    tolerance: float,
) -> bool:
    """Recombine neurons of the first that fire together; whether the second reads them through a ReLU or directly."""
    is_image = any(isinstance(layer.module, nn.Conv2d) for layer in (first, second))
    if is_image or x.shape[0] * first.outputs > MOST_VALUES:
        return False
    into, out = _between(model, first, second, x)
    size = len(into) * (first.outputs + first.channels)
    if len(into) != len(out) or size > MOST_VALUES:
        return False
    slopes = _slopes(first.map.before(into), out)
    if slopes is None:
        return False
    originals = [copy.deepcopy(layer.map) for layer in (first, second)]
    dependent = first.map.pivot(DataStatistics(into), tolerance)
    blocks = first.map.recombine(into, second.map, linear=bool(np.isclose(*slopes)))
    for layer in (first, second):
        layer.write()
    if _moved(model, x, wanted) <= SAME:
        first.dependent, first.blocks = first.dependent + dependent, blocks
        return True
    for layer, old in zip((first, second), originals, strict=True):
        layer.map = old
        layer.write()
    return True


def _slopes(p: FloatArray, out: FloatArray) -> tuple[float, float] | None:
    """The slopes below and above zero of the piecewise linear function from ``p`` to ``out``, if there is one."""
    below, above = (
        float(np.median(out[side] / p[side])) if side.any() else usual
        for side, usual in ((p < 0, 0.0), (p > 0, 1.0))
    )
    fits = np.allclose(np.where(p > 0, above, below) * p, out, rtol=1e-9, atol=1e-12)
    return (below, above) if fits else None


def _between(
    model: nn.Module, first: RewrittenLayer, second: RewrittenLayer, x: Tensor
) -> tuple[FloatArray, FloatArray]:
    """What the first layer and what the second reads, on all data."""
    captured: dict[str, list[FloatArray]] = {first.place: [], second.place: []}
    layers = {first.place: first, second.place: second}

    def visit(place: Site, tensor: Tensor) -> Tensor:
        captured[place.module].append(layers[place.module].rows(tensor.detach()))
        return tensor

    with capture(model, [Site(name, "input") for name in captured], visit):
        _outputs_of(model, x)
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
    first.map.silence(unread)
    first.write()
    if _moved(model, x, wanted) <= SAME:
        first.unread = max(first.unread, int(unread.sum()))
        return
    first.map = old
    first.write()
