"""Fewer non-zero weights, the same outputs on the data: section 4 of degeneracy-in-the-loss-landscape.

Layer by layer from the input on:

1. *Pivot.* Neurons whose activations are linear combinations of others (rank-revealing QR of the activations,
   the constant first) have their outgoing columns folded into the others' and the bias, and set to zero.
2. *Blocks.* Neurons of the next layer that fire on exactly the same data may be recombined among each other.
   Eq. 28 holds only if the recombination keeps every gate on the data; such changes are made and written, the
   others are reported.
3. *Rows.* A neuron nobody reads any more needs no incoming weights.

Plain chains are rewritten here, in one go; networks that branch layer by layer in ``sparsify_modules``.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

import numpy as np
import torch
from torch import nn

from strati.core.errors import BadInputError, UnsupportedError
from strati.core.options import resolve
from strati.core.results import Flag, Result, Tick, silent
from strati.evaluate.models import device_of
from strati.io.layers import select_names
from strati.io.to_module import as_module
from strati.landscape.basis.linear_maps import LinearMap, Seen
from strati.landscape.basis.probe_moments import as_data
from strati.landscape.mlp.sequential import Chain, ChainStage, as_chain

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
    try:
        chain = as_chain(model)
    except UnsupportedError:
        return _of_module(model, data, settings, tick)
    return _of_chain(chain, data, settings, tick)


def _of_module(model: nn.Module, x: ArrayLike, chosen: SparsifyConfig, tick: Tick) -> Sparsified:
    """Any network: its layers one by one, each by what it reads on the data."""
    from strati.landscape.basis.sparsify_modules import moved, outputs_of, rewrite

    place = device_of(model, chosen.device)
    data = as_data(x, model).to(place)
    work, twin, skipped = rewrite(model, data, chosen.tolerance, chosen.layers, tick)
    old = model.state_dict()
    tensors = {name: value.to(old[name]) for name, value in twin.state_dict().items()}
    if any(not bool(torch.isfinite(v).all()) for v in tensors.values() if v.is_floating_point()):
        raise UnsupportedError("network", "its dependent activations are too ill-conditioned to be folded")
    rounded = copy.deepcopy(twin)  # the weights as they are stored, run in double precision
    rounded.load_state_dict(
        {name: value.to(twin.state_dict()[name].dtype) for name, value in tensors.items()}
    )
    exact = copy.deepcopy(model).eval().double().to(data.device)
    change = moved(rounded, data, outputs_of(exact, data))
    layers = tuple(
        SparsifiedLayer(w.name, w.map.size, w.before, w.map.zeros(), w.dependent, *w.blocks, w.unread)
        for w in work
    )
    kind = next(p.dtype for p in model.parameters() if p.is_floating_point())
    flags = [*_flags(layers, change, kind)]
    if skipped:
        names = ", ".join(f"{name} ({why})" for name, why in skipped[:4])
        flags.append(Flag("left-alone", f"{len(skipped)} layers are not rewritten: {names}"))
    return Sparsified(
        layers, {n: _as_numpy(v.cpu()) for n, v in tensors.items()}, change, len(data), tuple(flags)
    )


def _of_chain(chain: Chain, x: ArrayLike, chosen: SparsifyConfig, tick: Tick) -> Sparsified:
    data = as_data(x)
    device = device_of(None, chosen.device) or chain.stages[0].weight.device
    data = data.to(device)
    exact = chain.to(torch.float64, device)
    rows: FloatArray = exact.rows(data).cpu().numpy()
    work = [LinearMap(stage, device) for stage in exact.stages]
    before = [stage.zeros() for stage in work]
    selected = set(select_names([stage.name for stage in work], chosen.layers))
    open_ones = [stage.name in selected for stage in work]
    dependent: list[int] = []
    blocks: list[tuple[tuple[int, ...], tuple[int, ...], int]] = []
    for k, stage in enumerate(work):
        dependent.append(stage.pivot(Seen(rows), chosen.tolerance) if open_ones[k] else 0)
        both = (
            k + 1 < len(work) and open_ones[k] and open_ones[k + 1]
        )  # a recombination changes the reader too
        blocks.append(stage.recombine(rows, work[k + 1]) if both else ((), (), 0))
        rows = stage.forward(rows)
        tick(stage.name)
    unread = [0] * len(work)
    for k in range(len(work) - 2, -1, -1):
        if open_ones[k]:
            unread[k] = work[k].silence(work[k + 1])
    tensors, change = _finish(chain, work, data)
    layers = tuple(
        SparsifiedLayer(stage.name, stage.size, before[k], stage.zeros(), dependent[k], *blocks[k], unread[k])
        for k, stage in enumerate(work)
    )
    kind = chain.stages[0].weight.dtype
    return Sparsified(layers, tensors, change, len(data), _flags(layers, change, kind))


def _finish(chain: Chain, work: list[LinearMap], data: torch.Tensor) -> tuple[dict[str, NDArray[Any]], float]:
    """The new tensors in their old types, and what that does to the outputs."""
    tensors: dict[str, NDArray[Any]] = {}
    stages = []
    for old, new in zip(chain.stages, work, strict=True):
        weight = torch.from_numpy(new.weight).to(old.weight.dtype)
        tensors[_key(old.name, "weight")] = _as_numpy(weight)
        bias = None
        if new.bias is not None and old.bias is not None:
            bias = torch.from_numpy(new.bias).to(old.bias.dtype)
            tensors[_key(old.name, "bias")] = _as_numpy(bias)
        stages.append(ChainStage(old.name, weight, bias, old.activation))
    if any(not np.isfinite(value).all() for value in tensors.values()):
        raise UnsupportedError("network", "its dependent activations are too ill-conditioned to be folded")
    with torch.no_grad():
        before = chain.to(torch.float64, data.device).forward(data)[0][-1]
        after = Chain(tuple(stages)).to(torch.float64, data.device).forward(data)[0][-1]
    size = float(before.abs().max())
    return tensors, float((before - after).abs().max()) / (size if size > 0 else 1.0)


def _key(name: str, kind: str) -> str:
    return f"{name}.{kind}" if name else kind


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
