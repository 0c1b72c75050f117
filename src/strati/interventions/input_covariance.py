r"""Second moments of the inputs of layers, :math:`C = \frac1n \sum_t x_t x_t^T`, from one recorded forward pass.

Data-aware truncation, GPTQ, AWQ, Wanda and SparseGPT need nothing else of the data, because
:math:`\|(W - W') X\|_F^2 = n\,\mathrm{tr}\,(W - W')\, C\, (W - W')^T`. Products are computed in the precision of the
activations on chunks of rows (only one triangle, by symmetry) and summed in double precision. Layers that read the same
tensor, such as queries, keys and values, share one product.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from scipy.linalg import blas
from torch import Tensor, nn

from strati.core.errors import BadInputError
from strati.interventions.cached_forward import ActivationCache
from strati.interventions.kinds import UNIT_READERS
from strati.interventions.targets import Target, find_targets, tied_names
from strati.interventions.tasks import IGNORED, forward
from strati.interventions.unit_removal import head_count

if TYPE_CHECKING:
    from strati.core.results import FloatArray

FEW_TOKENS = "few-tokens"
"""Warning code: a layer saw fewer calibration tokens than it has inputs, so its covariance is singular."""

MAX_BYTES = 1_000_000_000
"""Covariances that are accumulated in one pass; beyond, further passes are made."""

_CHUNK_ROWS = 4096
_MOST_PATCHES = 16_384
"""Patches of one batch that a convolution counts, evenly spread: neighbouring pixels say nearly the same."""
_GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0


@dataclass(frozen=True)
class InputCovariance:
    """Second moments of what a layer reads.

    Attributes:
        layer: The layer's name.
        matrix: Mean of ``x x^T`` over tokens (rows, pixels), inputs by inputs, as the columns of the layer's matrix.
        tokens: How many there were.
        row_weights: Of an embedding: the share of each token, with every token counted once more than it occurred, so
            that tokens which did not occur keep a weight. ``None`` for all other layers.
        heads: Of the layer behind an attention: how many heads (of grouped queries: key/value heads) it reads.
    """

    layer: str
    matrix: FloatArray
    tokens: int
    row_weights: FloatArray | None = None
    heads: int | None = None

    @property
    def warnings(self) -> tuple[str, ...]:
        """``few-tokens`` where there were fewer tokens than inputs; an embedding has one weight per token."""
        few = self.row_weights is None and self.tokens < len(self.matrix)
        return (FEW_TOKENS,) if few else ()

    def require_tokens(self) -> InputCovariance:
        """The same covariance.

        Raises:
            BadInputError: The layer was never reached, or what it read was not finite.
        """
        if self.tokens == 0:
            raise BadInputError(
                self.layer, "no calibration data reached this layer; give other calibration data"
            )
        if not np.isfinite(self.matrix).all():
            raise BadInputError(self.layer, "its inputs on the calibration data are not finite")
        return self


class InputMoments:
    """Adds up the second moments of one layer's inputs, batch by batch.

    Examples:
        >>> net = nn.Linear(2, 1)
        >>> moments = InputMoments(net, Target("fc", "linear", "linear", (1, 2), True))
        >>> moments.add(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        >>> moments.covariance().matrix.tolist()
        [[5.0, 7.0], [7.0, 10.0]]
    """

    def __init__(self, module: Any, target: Target, heads: int | None = None) -> None:
        self.target, self.module, self.heads = target, module, heads
        self._diagonal = target.kind == "embedding"
        self._side = (
            target.shape[0] if target.kind in ("embedding", "conv1d") else math.prod(target.shape[1:])
        )
        self._sum = np.zeros(self._side if self._diagonal else (self._side, self._side))
        self.tokens = 0

    @property
    def geometry(self) -> tuple[Any, ...]:
        """Layers of one geometry that read the same tensor have the same moments."""
        if self.target.kind != "conv":
            return (self._diagonal, self._side)
        m = self.module
        return ("conv", m.in_channels, m.kernel_size, m.stride, m.padding, m.dilation, m.padding_mode)

    def add(self, inputs: Tensor, real: Tensor | None = None) -> None:
        """Add a batch of what goes into the layer; ``real`` marks the tokens that are not padding."""
        self.add_product(*self.product(inputs, real))

    def add_product(self, product: FloatArray, tokens: int) -> None:
        """Add what :meth:`product` gave."""
        self._sum += product
        self.tokens += tokens

    def product(self, inputs: Tensor, real: Tensor | None = None) -> tuple[FloatArray, int]:
        """The sum of ``x x^T`` over a batch (its upper triangle), and how many tokens it has."""
        inputs = inputs.detach()
        if real is not None and inputs.shape[: real.ndim] == real.shape:
            inputs = inputs[real]
        if self._diagonal:
            ids = inputs.reshape(-1).cpu().numpy()
            return np.bincount(ids, minlength=self._side).astype(np.float64), len(ids)
        rows = patches(self.module, inputs) if self.target.kind == "conv" else inputs.reshape(-1, self._side)
        total = np.zeros((self._side, self._side))
        for start in range(0, len(rows), _CHUNK_ROWS):
            chunk = rows[start : start + _CHUNK_ROWS]
            chunk = chunk if chunk.dtype in (torch.float32, torch.float64) else chunk.float()
            array = np.ascontiguousarray(chunk.cpu().numpy())
            rank_k_update = blas.dsyrk if array.dtype == np.float64 else blas.ssyrk
            total += rank_k_update(1.0, array.T)
        return total, len(rows)

    def covariance(self) -> InputCovariance:
        """The mean over all tokens added."""
        name = self.target.name
        if self._diagonal:
            weights = (self._sum + 1.0) / (self._sum.sum() + self._side)
            return InputCovariance(name, np.eye(self.target.shape[1]), self.tokens, weights)
        upper = self._sum / max(self.tokens, 1)
        matrix = np.triu(upper) + np.triu(upper, 1).T
        return InputCovariance(name, matrix, self.tokens, heads=self.heads)


def patches(module: Any, inputs: Tensor) -> Tensor:
    """What a convolution multiplies its kernel with: one row per patch, evenly spread where there are very many.

    Raises:
        BadInputError: A grouped convolution, whose groups read different inputs.

    Examples:
        >>> conv = nn.Conv2d(1, 1, 2)
        >>> patches(conv, torch.arange(9.0).view(1, 1, 3, 3)).tolist()[0]
        [0.0, 1.0, 3.0, 4.0]
    """
    if module.groups != 1:
        raise BadInputError(
            "convolution", "is grouped, so its groups read different inputs; use the plain edit"
        )
    dims = len(module.kernel_size)
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    x = nn.functional.pad(inputs, module._reversed_padding_repeated_twice, mode=mode)
    geometry = zip(module.kernel_size, module.stride, module.dilation, strict=True)
    for i, (size, stride, dilation) in enumerate(geometry):
        x = x.unfold(2 + i, (size - 1) * dilation + 1, stride)[..., ::dilation]
    x = x.movedim(1, 1 + dims)  # batch, places, channels, taps
    places = x.shape[: 1 + dims]
    total = math.prod(places)
    count = min(total, _MOST_PATCHES)
    picked = np.arange(total) if count == total else np.floor(np.arange(count) * _GOLDEN % 1.0 * total)
    index = tuple(torch.from_numpy(i) for i in np.unravel_index(picked.astype(np.int64), places))
    return x[index].reshape(count, -1)


def input_covariances(
    model: nn.Module,
    batches: Iterable[Tensor],
    targets: Sequence[Target] | None = None,
) -> dict[str, InputCovariance]:
    """The input covariance of every layer, from one forward pass over the calibration data.

    A tied embedding has the covariance of the layer that shares its weight, because the outputs of the network depend
    on that one. A layer that no data reach has 0 tokens.

    Args:
        model: The network.
        batches: Calibration inputs; they are read once.
        targets: The layers. Default: all that :func:`~strati.interventions.targets.find_targets` gives.

    Examples:
        >>> net = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1))
        >>> x = torch.randn(50, 3)
        >>> found = input_covariances(net, [x])
        >>> bool(np.allclose(found["0"].matrix, (x.T @ x).numpy() / 50, atol=1e-5)), found["2"].tokens
        (True, 50)
    """
    targets = find_targets(model) if targets is None else targets
    moments = _moments(model, targets)
    latest: list[Any] = [None, None]  # the tensor read last, and its products by geometry
    real: list[Tensor | None] = [None]

    def hook(name: str) -> Any:
        def record(_module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
            inputs = args[0] if args else next(iter(options.values()))
            layer_moments = moments[name]
            identity = (inputs, None if inputs.is_inference() else inputs._version)
            if latest[0] is None or latest[0][0] is not inputs or latest[0][1] != identity[1]:
                latest[:] = [identity, {}]
            if layer_moments.geometry not in latest[1]:
                latest[1][layer_moments.geometry] = layer_moments.product(inputs, real[0])
            layer_moments.add_product(*latest[1][layer_moments.geometry])

        return record

    with ExitStack() as stack, torch.no_grad():
        for name, layer_moments in moments.items():
            handle = layer_moments.module.register_forward_pre_hook(hook(name), with_kwargs=True)
            stack.callback(handle.remove)
        for batch in batches:
            real[0] = _real_tokens(batch)
            forward(model, batch)
            latest[:] = [None, None]
    return {name: layer_moments.covariance() for name, layer_moments in moments.items()}


def _real_tokens(batch: Tensor) -> Tensor | None:
    padded = not batch.is_floating_point() and bool((batch == IGNORED).any())
    return batch != IGNORED if padded else None


def _moments(model: nn.Module, targets: Sequence[Target]) -> dict[str, InputMoments]:
    sharing = {first: other for other, first in tied_names(model).items()}
    moments = {}
    for target in targets:
        if target.kind == "block":
            continue
        module: Any = model.get_submodule(target.name)
        if target.kind == "embedding" and target.name in sharing:
            module = model.get_submodule(sharing[target.name])
            kind = "embedding" if isinstance(module, nn.Embedding) else "linear"
            target = Target(target.name, kind, target.type, target.shape, target.bias)
        heads = head_count(model) if target.type == UNIT_READERS["head"] else None
        moments[target.name] = InputMoments(module, target, heads)
    return moments


class CalibrationInputs:
    """The input covariances of a network, computed when first needed, as many in one pass as memory allows."""

    def __init__(
        self, model: nn.Module, batches: Sequence[Tensor], targets: Sequence[Target] | None = None
    ) -> None:
        self.model, self.batches = model, batches
        self._targets = tuple(t for t in targets or find_targets(model) if t.kind != "block")
        self._known: Mapping[str, InputCovariance] = {}

    def of(self, layer: str) -> InputCovariance:
        """The covariance of one layer; layers are best asked for in the network's order.

        Raises:
            BadInputError: No calibration data reach the layer.
        """
        if layer not in self._known:
            place = next(i for i, t in enumerate(self._targets) if t.name == layer)
            self._known = {}  # free the last ones first: both together may not fit
            self._known = input_covariances(self.model, self.batches, self._fitting(place))
        return self._known[layer].require_tokens()

    def _fitting(self, place: int) -> tuple[Target, ...]:
        size = 0
        for end, target in enumerate(self._targets[place:], start=place):
            size += 8 * (target.shape[-1] if target.kind == "embedding" else target.fan_in) ** 2
            if size > MAX_BYTES and end > place:
                return self._targets[place:end]
        return self._targets[place:]


class SequentialInputs(CalibrationInputs):
    """The input covariances of a network that changes between calls, recorded layer by layer on the network as it is.

    What ran before the layer recorded last is replayed, so all layers together cost a few forward passes.
    """

    def __init__(self, model: nn.Module, batches: Sequence[Tensor]) -> None:
        super().__init__(model, batches)
        self._tapes = ActivationCache()

    def of(self, layer: str) -> InputCovariance:
        """The covariance of one layer; layers are to be changed and asked for in the network's order.

        Raises:
            BadInputError: No calibration data reach the layer.
        """
        target = next(t for t in self._targets if t.name == layer)
        ((_, moments),) = _moments(self.model, [target]).items()
        if moments.module is not self.model.get_submodule(layer):  # the tied layer lies behind all others
            return input_covariances(self.model, self.batches, [target])[layer].require_tokens()
        with torch.inference_mode():
            for number, batch in enumerate(self.batches):
                tape = self._tapes.record(self.model, layer, number, partial(forward, self.model, batch))
                if tape.input is not None:
                    moments.add(tape.input, _real_tokens(batch))
        return moments.covariance().require_tokens()
