"""Fewer non-zero weights, the same outputs on the data: section 4 of degeneracy-in-the-loss-landscape.

Layer by layer from the input on:

1. *Pivot.* Neurons whose activations are linear combinations of others (rank-revealing QR of the activations,
   the constant first) have their outgoing columns folded into the others' and the bias, and set to zero.
2. *Blocks.* Neurons of the next layer that fire on exactly the same data may be recombined among each other.
   Eq. 28 holds only if the recombination keeps every gate on the data; such changes are made and written, the
   others are reported.
3. *Rows.* A neuron nobody reads any more needs no incoming weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import scipy.linalg
import torch
from torch import nn

from strati.errors import BadInputError, UnsupportedError
from strati.landscape.chain import Chain, ChainStage, as_chain
from strati.landscape.interactions.sites import as_data
from strati.network.select import select_names
from strati.options import resolve
from strati.types import Flag, Result, Tick, silent

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import ArrayLike, NDArray
    from rich.console import RenderableType

    from strati.types import BoolArray, FloatArray, IntArray

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

        from strati.run.files import write_atomic

        write_atomic(path, save({name: np.ascontiguousarray(value) for name, value in self.tensors.items()}))

    def payload(self) -> dict[str, Any]:
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
        from strati.landscape.interactions.basis_result import as_table

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
    model: nn.Module | str | Path,
    x: ArrayLike,
    *,
    config: SparsifyConfig | None = None,
    tick: Tick = silent,
    **options: Any,
) -> Sparsified:
    """Set weights to zero by the freedom that dependent activations and synchronised neurons leave.

    Args:
        model: A chain of linear layers and activations, or the path of such a checkpoint.
        x: Data, one row each; only on these the outputs are kept.
        config: Options; keywords of the same names win.
        tick: Called after each layer with its name.
        options: Fields of :class:`SparsifyConfig`.

    Raises:
        UnsupportedError: The network is not a chain.
        BadInputError: The data do not fit, or are not finite, or no such option.

    Examples:
        >>> _ = torch.manual_seed(0)
        >>> net = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2)).double()
        >>> x = torch.randn(100, 3, dtype=torch.float64) @ torch.randn(3, 6, dtype=torch.float64)
        >>> result = sparsify(net, x.numpy())                  # 3 of 6 inputs depend on the others
        >>> result.zeros_after >= 3 * 5, result.change < 1e-12
        (True, True)
    """
    chosen = resolve(SparsifyConfig, config, options, of=sparsify)
    if isinstance(model, str | Path):
        from strati.network.module import as_module

        model = as_module(model)
    chain = as_chain(model)
    data = as_data(x)
    device = torch.device(chosen.device or chain.stages[0].weight.device)
    data = data.to(device)
    exact = chain.to(torch.float64, device)
    rows: FloatArray = exact.rows(data).cpu().numpy()
    work = [_Work(stage, device) for stage in exact.stages]
    before = [stage.zeros() for stage in work]
    wanted = set(select_names([stage.name for stage in work], chosen.layers))
    open_ones = [stage.name in wanted for stage in work]
    dependent: list[int] = []
    blocks: list[tuple[tuple[int, ...], tuple[int, ...], int]] = []
    for k, stage in enumerate(work):
        dependent.append(stage.pivot(rows, chosen.tolerance) if open_ones[k] else 0)
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
    return Sparsified(layers, tensors, change, len(data), _flags(layers, change, chain))


class _Work:
    """One stage being rewritten, in double precision."""

    def __init__(self, stage: ChainStage, device: torch.device) -> None:
        self.name, self.activation, self.device = stage.name, stage.activation, device
        self.weight: FloatArray = stage.weight.cpu().numpy().copy()
        self.bias: FloatArray | None = None if stage.bias is None else stage.bias.cpu().numpy().copy()

    @property
    def size(self) -> int:
        return self.weight.size + (0 if self.bias is None else self.bias.size)

    def zeros(self) -> int:
        return int((self.weight == 0).sum()) + (0 if self.bias is None else int((self.bias == 0).sum()))

    def before(self, rows: FloatArray) -> FloatArray:
        return rows @ self.weight.T + (0.0 if self.bias is None else self.bias)

    def forward(self, rows: FloatArray) -> FloatArray:
        with torch.no_grad():
            given, weight = (torch.from_numpy(array).to(self.device) for array in (rows, self.weight))
            bias = 0.0 if self.bias is None else torch.from_numpy(self.bias).to(self.device)
            return np.asarray(self.activation(given @ weight.T + bias).cpu().numpy())

    def pivot(self, rows: FloatArray, tolerance: float) -> int:
        """Zero the columns of inputs that are combinations of others; how many."""
        keep, coefficients, constant = dependencies(rows, tolerance, with_constant=self.bias is not None)
        gone = np.setdiff1d(np.arange(rows.shape[1]), keep)
        if gone.size == 0:
            return 0
        moved = self.weight[:, gone]
        self.weight[:, keep] += moved @ coefficients
        if self.bias is not None:
            self.bias += moved @ constant
        self.weight[:, gone] = 0.0
        return int(gone.size)

    def recombine(self, rows: FloatArray, following: _Work) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        """Recombine synchronised blocks where that keeps every gate; sizes written, reported, zeros won."""
        if self.activation.slopes is None:
            return (), (), 0
        written, reported, won = [], [], 0
        linear = self.activation.slopes[0] == self.activation.slopes[1]
        p = self.before(rows)
        for block in _synchronised(p > 0, p, everything=linear):
            gain = self._eliminate(p, block, following, free=linear)
            if gain > 0:
                written.append(int(block.size))
                won += gain
            else:
                reported.append(int(block.size))
        return tuple(written), tuple(reported), won

    def silence(self, following: _Work) -> int:
        """Zero the rows of outputs that nobody reads; how many."""
        unread = (following.weight == 0).all(axis=0)
        self.weight[unread] = 0.0
        if self.bias is not None:
            self.bias[unread] = 0.0
        return int(unread.sum())

    def _eliminate(self, p: FloatArray, block: IntArray, following: _Work, *, free: bool) -> int:
        """Gaussian elimination among the rows of a block, each step only if it keeps all gates on the data.

        ``p_k -> p_k - c p_m`` with ``c = W_kj / W_mj`` zeroes ``W_kj``; the reader's column ``m`` takes on
        ``c`` times column ``k``.
        """
        gate = p[:, block] > 0
        start = self.zeros()
        used: set[int] = set()
        for m in block:
            live = np.flatnonzero(self.weight[m] != 0)
            live = live[~np.isin(live, list(used))]
            if live.size == 0:
                continue
            j = int(live[np.abs(self.weight[m, live]).argmax()])
            used.add(j)
            for place, k in enumerate(block):
                if k == m or self.weight[k, j] == 0:
                    continue
                c = self.weight[k, j] / self.weight[m, j]
                row = self.weight[k] - c * self.weight[m]
                row[j] = 0.0
                row[np.abs(row) <= 1e-14 * np.abs(self.weight[k]).max()] = 0.0
                new = p[:, k] - c * p[:, m]
                slack = 1e-9 * np.abs(p[:, k]).max()
                kept = free or bool(np.where(gate[:, place], new >= slack, new <= 0).all())
                if not kept or (row == 0).sum() <= (self.weight[k] == 0).sum() or abs(c) > 1e6:
                    continue
                self.weight[k], p[:, k] = row, new
                if self.bias is not None:
                    self.bias[k] -= c * self.bias[m]
                following.weight[:, m] += c * following.weight[:, k]
        return self.zeros() - start


def dependencies(
    rows: FloatArray, tolerance: float, *, with_constant: bool
) -> tuple[IntArray, FloatArray, FloatArray]:
    """Independent columns of ``rows``, and the others written through them.

    Rank-revealing QR (column pivoting); with a bias to fold into, the constant is one of the independent ones.

    Returns:
        Kept columns, ``coefficients`` (others x kept) and ``constant`` (others): ``f_j = coefficients f + constant``.

    Examples:
        >>> rows = np.random.default_rng(0).normal(size=(20, 2))
        >>> rows = np.column_stack([rows, 2 * rows[:, 0] + 5])
        >>> keep, coefficients, constant = dependencies(rows, 1e-12, with_constant=True)
        >>> keep.size, float(np.abs(rows[:, 2] - 2 * rows[:, 0] - 5).max()) < 1e-12
        (2, True)
    """
    mean = rows.mean(axis=0) if with_constant else np.zeros(rows.shape[1])
    centred = rows - mean
    scale = np.sqrt((centred**2).mean(axis=0))
    floor = np.sqrt(tolerance) * max(
        float(scale.max(initial=0.0)), 1e-4 * float(np.abs(mean).max(initial=0.0))
    )
    if floor == 0.0:
        kept: IntArray = np.zeros(0, dtype=np.int64)
        return kept, np.zeros((rows.shape[1], 0)), mean
    factor = np.linalg.qr(centred, mode="r") / np.sqrt(len(rows))
    _, upper, order = scipy.linalg.qr(factor, mode="economic", pivoting=True)
    rank = int((np.abs(np.diag(upper)) > floor).sum())
    kept, others = np.sort(order[:rank]).astype(np.int64), np.sort(order[rank:]).astype(np.int64)
    coefficients, *_ = np.linalg.lstsq(factor[:, kept], factor[:, others], rcond=None)
    return kept, coefficients.T, mean[others] - coefficients.T @ mean[kept]


def _synchronised(gates: BoolArray, p: FloatArray, *, everything: bool) -> list[IntArray]:
    """Blocks of two and more neurons with one firing pattern on the data; silent neurons are none."""
    if everything:
        return [np.arange(p.shape[1])] if p.shape[1] > 1 else []
    packed = np.packbits(gates, axis=0).T
    _, labels = np.unique(packed, axis=0, return_inverse=True)
    labels = labels.reshape(-1)
    alive = gates.any(axis=0)
    blocks = [np.flatnonzero((labels == k) & alive) for k in np.unique(labels)]
    return [block for block in blocks if block.size > 1]


def _finish(chain: Chain, work: list[_Work], data: torch.Tensor) -> tuple[dict[str, NDArray[Any]], float]:
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
        wanted = chain.to(torch.float64, data.device).forward(data)[0][-1]
        found = Chain(tuple(stages)).to(torch.float64, data.device).forward(data)[0][-1]
    size = float(wanted.abs().max())
    return tensors, float((wanted - found).abs().max()) / (size if size > 0 else 1.0)


def _key(name: str, kind: str) -> str:
    return f"{name}.{kind}" if name else kind


def _as_numpy(tensor: torch.Tensor) -> NDArray[Any]:
    if tensor.dtype == torch.bfloat16:
        return np.asarray(tensor.float().numpy())
    return np.asarray(tensor.numpy())


def _flags(layers: tuple[SparsifiedLayer, ...], change: float, chain: Chain) -> tuple[Flag, ...]:
    flags = []
    rounding = float(torch.finfo(chain.stages[0].weight.dtype).eps)
    if change > 1e3 * rounding:
        flags.append(Flag("outputs-moved", f"outputs on the data move by {change:.2g} of the largest"))
    reported = [size for layer in layers for size in layer.blocks_reported]
    if reported:
        text = f"{len(reported)} synchronised blocks (sizes {', '.join(map(str, sorted(reported, reverse=True)[:8]))})"
        flags.append(Flag("blocks-reported", f"{text} cannot be recombined in an ordinary checkpoint"))
    return tuple(flags)
