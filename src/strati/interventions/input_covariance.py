r"""Second moments of the inputs of layers, :math:`C = \frac1n \sum_t x_t x_t^T`, from one recorded forward pass.

Data-aware truncation, GPTQ, AWQ, Wanda and SparseGPT need nothing else of the data, because
:math:`\|(W - W') X\|_F^2 = n\,\mathrm{tr}\,(W - W')\, C\, (W - W')^T`. Products are computed in the precision of the
activations on chunks of rows (by symmetry little more than one triangle) and summed in double precision. Layers that
read the same tensor, such as queries, keys and values, share one product.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from strati.core.errors import BadInputError
from strati.interventions.cached_forward import ActivationCache
from strati.interventions.kinds import UNIT_READERS
from strati.interventions.study_config import FEW_TOKENS
from strati.interventions.targets import Target, find_targets, tied_names
from strati.interventions.tasks import IGNORED, forward
from strati.interventions.unit_removal import head_count
from strati.io.roles import expert_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.core.results import FloatArray

MAX_BYTES = 1_000_000_000
"""Covariances that one pass adds up, in a temporary file; beyond, further passes are made."""

_CHUNK_ROWS = 4096
_STRIPS, _LEAST_STRIP = 4, 256
"""Products are computed in horizontal strips from the diagonal on: four do five eighths of the work."""
_MOST_PATCHES = 16_384
"""Patches of one batch that a convolution counts, evenly spread: neighbouring pixels say nearly the same."""
_SCORE_DAMPING = 0.01
_OUTLIER = 5.0
"""OWL's M: an outlier is that many times the layer's mean."""
_GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0


class ExpertTokensError(BadInputError):
    """An expert of a mixture saw too few calibration tokens to be changed by them."""


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

    @property
    def frequencies(self) -> FloatArray | None:
        """Of an embedding: the share of each token as it occurred."""
        if self.row_weights is None:
            return None
        counts = self.row_weights * (self.tokens + len(self.row_weights)) - 1.0
        return np.maximum(counts, 0.0) / max(self.tokens, 1)

    def require_tokens(self) -> InputCovariance:
        """The same covariance.

        Raises:
            ExpertTokensError: It is that of an expert to which fewer tokens were routed than it has inputs.
            BadInputError: The layer was never reached, or what it read was not finite.
        """
        if self.warnings and expert_of(f"{self.layer}.weight") is not None:
            why = f"this expert saw {self.tokens} calibration tokens for its {len(self.matrix)} inputs"
            raise ExpertTokensError(self.layer, f"{why} and is left alone; give more calibration data")
        if self.tokens == 0:
            raise BadInputError(
                self.layer, "no calibration data reached this layer; give other calibration data"
            )
        if not np.isfinite(self.matrix).all():
            raise BadInputError(self.layer, "its inputs on the calibration data are not finite")
        return self


class InputScores:
    """The scores of a layer's changes that go by its inputs' second moments: those of Wanda, GPTQ, OWL and others.

    Args:
        weight: The layer's matrix.
        covariance: Of its inputs; ``None`` where it is not known, and then only the scores of weights are defined.

    Examples:
        >>> scores = InputScores(np.array([[1.0, 2.0]]), InputCovariance("fc", np.diag([1.0, 0.0]), 10))
        >>> scores.of(np.array([[1.0, 0.0]]))["activation_error"]  # the second input is never used
        0.0
    """

    def __init__(self, weight: FloatArray, covariance: InputCovariance | None) -> None:
        self._weight = np.asarray(weight, np.float64)
        self._covariance = covariance

    @cached_property
    def _curvature(self) -> FloatArray:
        """Twice the damped moments for the rows of an embedding, GPTQ's inverse diagonal for all other layers."""
        assert self._covariance is not None
        if self._covariance.frequencies is not None:
            h = self._covariance.frequencies
            return np.asarray(2 * h[:, None] + 2 * _SCORE_DAMPING * h.mean())
        h = self._covariance.matrix
        mean = float(np.diag(h).mean()) or 1.0
        damped = 2 * h + 2 * _SCORE_DAMPING * mean * np.eye(len(h))
        return 1.0 / np.diag(np.linalg.inv(damped))[None]

    def of(self, changed: NDArray[Any]) -> dict[str, float | None]:
        """The scores of a changed matrix."""
        w, d = self._weight, np.asarray(changed, np.float64) - self._weight
        centred = w - w.mean()
        variance, lost, size = float((centred**2).mean()), float((d**2).sum()), float((w**2).sum())
        scores = {
            "sqnr": 10 * math.log10(size / lost) if lost > 0 and size > 0 else None,
            "kurtosis": float((centred**4).mean()) / variance**2 - 3 if variance > 0 else None,
        }
        if self._covariance is None:
            return scores | dict.fromkeys(
                ("snr", "outlier_ratio", "activation_error", "wanda_score", "gptq_error")
            )
        weights = self._covariance.frequencies
        if weights is not None:
            error, power = (float((m**2).sum(1) @ weights) for m in (d, w))
            norms = np.sqrt(weights)[:, None]
        else:
            h = self._covariance.matrix
            error, power = (float(np.einsum("ij,ij->", m @ h, m)) for m in (d, w))
            norms = np.sqrt(np.maximum(np.diag(h), 0.0))[None]
        importance = np.abs(w) * norms
        total = float(importance.sum())
        return scores | {
            "snr": 10 * math.log10(power / error) if error > 0 and power > 0 else None,
            "outlier_ratio": 100.0 * float((importance > _OUTLIER * importance.mean()).mean()),
            "activation_error": math.sqrt(max(error, 0.0) / power) if power > 0 else None,
            "wanda_score": float((np.abs(d) * norms).sum()) / total if total > 0 else None,
            "gptq_error": float((d**2 * self._curvature).sum()),
        }


class InputMoments:
    """Adds up the second moments of one layer's inputs, batch by batch.

    Examples:
        >>> net = nn.Linear(2, 1)
        >>> moments = InputMoments(net, Target("fc", "linear", "linear", (1, 2), True))
        >>> moments.add(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        >>> moments.covariance().matrix.tolist()
        [[5.0, 7.0], [7.0, 10.0]]
    """

    def __init__(self, module: Any, target: Target, heads: int | None = None, *, spill: bool = False) -> None:
        self.target, self.module, self.heads = target, module, heads
        self._diagonal = target.kind == "embedding"
        self._side = (
            target.shape[0] if target.kind in ("embedding", "conv1d") else math.prod(target.shape[1:])
        )
        shape = (self._side,) if self._diagonal else (self._side, self._side)
        self._sum: NDArray[np.float64] = np.zeros(shape) if not spill else _in_file(shape)
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
        """The sum of ``x x^T`` over a batch, and how many tokens it has; below the diagonal it is not complete."""
        inputs = inputs.detach()
        if real is not None and inputs.shape[: real.ndim] == real.shape:
            inputs = inputs[real]
        if self._diagonal:
            ids = inputs.reshape(-1).cpu().numpy()
            return np.bincount(ids, minlength=self._side).astype(np.float64), len(ids)
        rows = patches(self.module, inputs) if self.target.kind == "conv" else inputs.reshape(-1, self._side)
        total = torch.zeros((self._side, self._side), dtype=torch.float64)
        step = max(_LEAST_STRIP, -(-self._side // _STRIPS))
        for start in range(0, len(rows), _CHUNK_ROWS):
            chunk = rows[start : start + _CHUNK_ROWS]
            chunk = chunk if chunk.dtype in (torch.float32, torch.float64) else chunk.float()
            for first in range(0, self._side, step):
                # Torch and not a BLAS of scipy's: two pools of threads would wait for each other on the same cores.
                strip = chunk[:, first : first + step].T @ chunk[:, first:]
                total[first : first + step, first:] += strip.cpu()
        return total.numpy(), len(rows)

    def covariance(self) -> InputCovariance:
        """The mean over all tokens added."""
        name = self.target.name
        if self._diagonal:
            weights = (self._sum + 1.0) / (self._sum.sum() + self._side)
            return InputCovariance(name, np.eye(self.target.shape[1]), self.tokens, weights)
        matrix = np.array(self._sum)
        matrix /= max(self.tokens, 1)
        for start in range(0, self._side, _LEAST_STRIP):  # mirrored in place, without a second matrix
            stop = start + _LEAST_STRIP
            corner = np.triu(matrix[start:stop, start:stop])
            matrix[start:stop, start:stop] = corner + np.triu(corner, 1).T
            matrix[stop:, start:stop] = matrix[start:stop, stop:].T
        return InputCovariance(name, matrix, self.tokens, heads=self.heads)


def _in_file(shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Zeros in a temporary file without a name, which the system removes with the array."""
    with TemporaryFile() as file:
        return np.memmap(file, np.float64, "w+", shape=shape)


def patches(module: Any, inputs: Tensor) -> Tensor:
    """What a convolution multiplies its kernel with: one row per patch, evenly spread where there are very many.

    Examples:
        >>> conv = nn.Conv2d(1, 1, 2)
        >>> patches(conv, torch.arange(9.0).view(1, 1, 3, 3)).tolist()[0]
        [0.0, 1.0, 3.0, 4.0]
    """
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
    return {name: moments.covariance() for name, moments in input_moments(model, batches, targets).items()}


def input_moments(
    model: nn.Module, batches: Iterable[Tensor], targets: Sequence[Target], *, spill: bool = False
) -> dict[str, InputMoments]:
    """The summed moments of what layers read, from one forward pass; with ``spill`` the sums are in temporary files."""
    moments = _moments(model, targets, spill)
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
    return moments


def _real_tokens(batch: Tensor) -> Tensor | None:
    padded = not batch.is_floating_point() and bool((batch == IGNORED).any())
    return batch != IGNORED if padded else None


def _moments(model: nn.Module, targets: Sequence[Target], spill: bool = False) -> dict[str, InputMoments]:
    sharing = {first: other for other, first in tied_names(model).items()}
    moments = {}
    for target in targets:
        if target.composite:
            continue
        module: Any = model.get_submodule(target.name)
        if target.kind == "conv" and module.groups != 1:
            continue
        if target.kind == "embedding" and target.name in sharing:
            module = model.get_submodule(sharing[target.name])
            kind = "embedding" if isinstance(module, nn.Embedding) else "linear"
            target = Target(target.name, kind, target.type, target.shape, target.bias)
        heads = head_count(model) if target.type == UNIT_READERS["head"] else None
        moments[target.name] = InputMoments(module, target, heads, spill=spill)
    return moments


class CalibrationInputs:
    """The input covariances of a network, computed when first needed.

    One pass adds up the moments of as many layers as fit into :data:`MAX_BYTES`, in a temporary file; in memory is only
    the covariance that was asked for last.
    """

    def __init__(
        self, model: nn.Module, batches: Sequence[Tensor], targets: Sequence[Target] | None = None
    ) -> None:
        self.model, self.batches = model, batches
        self._targets = tuple(t for t in targets or find_targets(model) if not t.composite)
        self._moments: Mapping[str, InputMoments] = {}
        self._latest: InputCovariance | None = None

    def of(self, layer: str) -> InputCovariance:
        """The covariance of one layer; layers are best asked for in the network's order.

        Raises:
            BadInputError: No calibration data reach the layer, or its inputs have no covariance.
        """
        if self._latest is None or self._latest.layer != layer:
            self._latest = None  # free the last one first: both together may not fit
            self._latest = self._record(layer).covariance()
        return self._latest.require_tokens()

    def _record(self, layer: str) -> InputMoments:
        if layer not in self._moments:
            place = next(i for i, t in enumerate(self._targets) if t.name == layer)
            require_covariance(self.model, self._targets[place])
            self._moments = {}
            self._moments = input_moments(self.model, self.batches, self._fitting(place), spill=True)
        return self._moments[layer]

    def _fitting(self, place: int) -> tuple[Target, ...]:
        size = 0
        for end, target in enumerate(self._targets[place:], start=place):
            size += 8 * (target.shape[-1] if target.kind == "embedding" else target.fan_in) ** 2
            if size > MAX_BYTES and end > place:
                return self._targets[place:end]
        return self._targets[place:]


def require_covariance(model: nn.Module, target: Target) -> None:
    """Refuse a layer whose inputs have no common covariance.

    Raises:
        BadInputError: It is a grouped convolution.
    """
    if target.kind == "conv" and int(getattr(model.get_submodule(target.name), "groups", 1)) != 1:
        why = "is a grouped convolution, whose groups read different inputs; use the plain edit"
        raise BadInputError(target.name, why)


class SequentialInputs(CalibrationInputs):
    """The input covariances of a network that changes between calls, recorded layer by layer on the network as it is.

    What ran before the layer recorded last is replayed, so all layers together cost a few forward passes. Layers are to
    be changed and asked for in the network's order.
    """

    def __init__(self, model: nn.Module, batches: Sequence[Tensor]) -> None:
        super().__init__(model, batches)
        self._tapes = ActivationCache()

    def _record(self, layer: str) -> InputMoments:
        target = next(t for t in self._targets if t.name == layer)
        require_covariance(self.model, target)
        ((_, moments),) = _moments(self.model, [target]).items()
        if moments.module is not self.model.get_submodule(layer):  # the tied layer lies behind all others
            return input_moments(self.model, self.batches, [target])[layer]
        with torch.inference_mode():
            for number, batch in enumerate(self.batches):
                tape = self._tapes.record(self.model, layer, number, partial(forward, self.model, batch))
                if tape.input is not None:
                    moments.add(tape.input, _real_tokens(batch))
        return moments
