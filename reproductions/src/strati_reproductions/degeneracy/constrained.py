"""Constrained losses: what a module may change without another module noticing (eqs. 31 and 32).

``L_1,C(theta_1) = L_1(theta_1) + sum_i w_i^2 mean_x (v_i(theta_1*, x) - v_i(theta_1, x))^2``: the behavioural loss of a
part of a network, with the activations ``v_i`` that other parts read held in place. All ``w_i = 1`` is eq. 31 of
degeneracy-in-the-loss-landscape, ``w_i = eps^k_i`` its eq. 32. Here the part is named by layers; modules that were
found in a graph are in ``surface``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import jacrev, vmap

from strati.core.errors import BadInputError
from strati.core.options import resolve
from strati.core.results import Tick, silent
from strati.evaluate.batches import whole_inputs
from strati.evaluate.models import output_tensor
from strati.io.to_module import as_module
from strati.landscape.objective import FlatModel, run

if TYPE_CHECKING:
    from strati.core.results import FloatArray
    from strati.io.network import Openable

RANK = 1e-9
"""Singular values of the Jacobian below this share of the largest count as zero."""
_ELEMENTS = 20_000_000

Features = Callable[[Tensor, Tensor], Tensor]
"""Of the flat parameters and rows of data: ``(rows, features)``, own outputs first, then the nodes."""


@dataclass(frozen=True, repr=False)
class ConstrainedLoss:
    """Eqs. 31 and 32 as a function of the part's own parameters.

    Attributes:
        features: Own outputs and nodes at given parameters and data.
        theta: The part's parameters as they are: the minimum, where the loss is 0.
        x: Data.
        target: The features at ``theta``.
        outputs: How many of the features are own outputs (over all positions).
        weights: ``w_i`` of each feature; 1 for own outputs.

    Examples:
        >>> net = nn.Sequential(nn.Linear(2, 3, bias=False), nn.ReLU(), nn.Linear(3, 1, bias=False)).double()
        >>> x = torch.randn(50, 2, dtype=torch.float64)
        >>> free, held = (constrained_loss(net, x, layers="0", nodes=n) for n in ((), ("1",)))
        >>> free.rank() <= held.rank() <= free.theta.numel()
        True
        >>> float(held(held.theta))
        0.0
    """

    features: Features
    theta: Tensor
    x: Tensor
    target: Tensor
    outputs: int
    weights: Tensor

    def __repr__(self) -> str:
        """How large it is; the tensors are its attributes."""
        nodes = self.target.shape[1] - self.outputs
        counts = f"{self.theta.numel()} parameters, {len(self.x)} rows, {self.outputs} outputs, {nodes} nodes"
        return f"ConstrainedLoss({counts})"

    def __call__(self, theta: Tensor) -> Tensor:
        """The loss at ``theta``; differentiable, and fit for :func:`strati.learning_coefficient`."""
        change = (self.features(theta, self.x) - self.target) * self.weights
        return change.square().sum(dim=-1).mean()

    def without_nodes(self) -> ConstrainedLoss:
        """``L_1`` alone: nothing is held in place but the part's own outputs."""
        count = self.outputs

        def own(theta: Tensor, x: Tensor) -> Tensor:
            return self.features(theta, x)[:, :count]

        return ConstrainedLoss(own, self.theta, self.x, self.target[:, :count], count, self.weights[:count])

    def singular_values(self) -> FloatArray:
        """Of the Jacobian of all weighted features over the data; ``2/n`` times their squares are the Hessian's."""
        size = int(self.theta.numel())
        factor = np.zeros((0, size))
        rows = max(1, _ELEMENTS // max(1, size * self.target.shape[1]))
        for part in torch.split(self.x, rows):
            jacobian = vmap(jacrev(lambda t, row: self.features(t, row[None])[0]), (None, 0))(
                self.theta, part
            )
            scaled = (jacobian * self.weights[:, None]).reshape(-1, size).detach().cpu().double().numpy()
            factor = np.asarray(np.linalg.qr(np.vstack([factor, scaled]), mode="r"))
        return np.asarray(np.linalg.svd(factor, compute_uv=False))

    def rank(self) -> int:
        """``N_eff`` to first order, for a loss scale near 0: the rank of the Hessian, at most twice lambda."""
        values = self.singular_values()
        return int((values > RANK * values.max(initial=0.0)).sum()) if values.size else 0


@dataclass(frozen=True)
class ConstrainedConfig:
    """Options of :func:`constrained_loss`.

    Attributes:
        layers: The part's own parameters: patterns as ``--layers`` takes them; all by default.
        outputs: Which of the network's outputs are the part's own, by number; all by default, ``()`` for none.
        nodes: Activations held in place: ``"NAME:INDEX"`` for one output of a module, ``"NAME"`` for all of them.
        weights: ``w_i`` of the nodes, one for each entry of ``nodes``; 1 by default (eq. 31).
    """

    layers: str | Sequence[str] | None = None
    outputs: Sequence[int] | None = None
    nodes: Sequence[str] = ()
    weights: Sequence[float] | None = None

    def __post_init__(self) -> None:
        """Refuse weights that do not belong to nodes."""
        if self.weights is not None and len(self.weights) != len(self.nodes):
            raise BadInputError(
                "weights", f"are {len(self.weights)} for {len(self.nodes)} nodes; give one for each"
            )
        if self.weights is not None and not all(np.isfinite(w) and w >= 0 for w in self.weights):
            raise BadInputError(
                "weights", "must be zero or positive: how strongly a node acts on the other part"
            )


def constrained_loss(
    model: Openable,
    x: Any,
    *,
    config: ConstrainedConfig | None = None,
    tick: Tick = silent,
    **options: Any,
) -> ConstrainedLoss:
    """The behavioural loss of a part of a network, with what other parts read of it held in place.

    ``L_1,C(theta_1) = mean_x ||f(theta_1, x) - f(theta_1*, x)||^2 + sum_i w_i^2 mean_x (v_i(theta_1, x) -
    v_i(theta_1*, x))^2`` over the part's own outputs ``f`` and its nodes ``v_i``.
    Reference: degeneracy-in-the-loss-landscape, eqs. 31 (``w_i = 1``) and 32 (``w_i = eps^k_i``).

    Args:
        model: Whatever names a network; a module is not changed.
        x: Whatever names data: inputs, one row each.
        config: Options; keywords of the same names win.
        tick: Called when the loss is ready.
        options: Fields of :class:`ConstrainedConfig`.

    Raises:
        BadInputError: A layer, node or output that there is not, data that do not fit, or no such option.

    Examples:
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1)).double()
        >>> loss = constrained_loss(net, torch.ones(4, 2), layers="0", outputs=(), nodes=["0:1"], weights=[0.5])
        >>> round(float(loss(loss.theta + 1)), 6)                 # (0.5 * 3)^2: two weights and a bias moved by 1
        2.25
    """
    settings = resolve(ConstrainedConfig, config, options, of=constrained_loss)
    model = as_module(model)
    flat = FlatModel(model, layers=settings.layers)
    inputs = flat.cast(whole_inputs(x, model, of="a constrained loss"))
    places = [_place(flat.module, node) for node in settings.nodes]
    indices = None if settings.outputs is None else torch.tensor(list(settings.outputs), dtype=torch.long)

    def parts(theta: Tensor, rows: Tensor) -> list[Tensor]:
        output, recorded = _watched(flat, theta, rows, [place for place, _ in places])
        output = output.flatten(1)
        selected = [output if indices is None else output[:, indices.to(output.device)]]
        return [*selected, *(_entry(recorded[name], index) for name, index in places)]

    def features(theta: Tensor, rows: Tensor) -> Tensor:
        return torch.cat(parts(theta, rows), dim=1)

    with torch.no_grad():
        width = run(flat, flat.theta, inputs).flatten(1).shape[1]
        if indices is not None and indices.numel() and not bool(((indices >= 0) & (indices < width)).all()):
            raise BadInputError("outputs", f"the network has outputs 0 to {width - 1}")
        pieces = parts(flat.theta, inputs)
    strengths = [1.0] if settings.weights is None else [1.0, *settings.weights]
    strengths += [1.0] * (len(pieces) - len(strengths))
    weights = torch.cat([torch.full((p.shape[1],), w) for p, w in zip(pieces, strengths, strict=True)])
    target = torch.cat(pieces, dim=1)
    tick("constrained loss")
    return ConstrainedLoss(
        features, flat.theta, inputs, target, pieces[0].shape[1], weights.to(target.device, target.dtype)
    )


def _place(model: nn.Module, node: str) -> tuple[str, int | None]:
    """The module and the number of a node."""
    name, colon, index = node.rpartition(":")
    modules = dict(model.named_modules())
    if not colon:
        name, index = node, ""
    if name not in modules or (colon and not index.isdigit()):
        raise BadInputError(
            node,
            f"no such node; give NAME or NAME:INDEX, with a module of {', '.join(filter(None, modules))}",
        )
    return name, int(index) if index else None


def _watched(
    flat: FlatModel, theta: Tensor, rows: Tensor, names: Sequence[str]
) -> tuple[Tensor, dict[str, Tensor]]:
    """The output, and what some modules put out on the way."""
    recorded: dict[str, Tensor] = {}
    modules = dict(flat.module.named_modules())

    def keep(name: str) -> Any:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            recorded[name] = output_tensor(output)

        return hook

    handles = [modules[name].register_forward_hook(keep(name)) for name in dict.fromkeys(names)]
    try:
        return flat(theta, rows), recorded
    finally:
        for handle in handles:
            handle.remove()


def _entry(value: Tensor, index: int | None) -> Tensor:
    """One unit of a module's output over all positions, or all of it; ``(rows, numbers)``."""
    if index is None:
        return value.flatten(1)
    side = 1 if value.ndim == 4 else value.ndim - 1  # channels of images come first
    if index >= value.shape[side]:
        raise BadInputError(f"node {index}", f"its module has outputs 0 to {value.shape[side] - 1}")
    return value.select(side, index).flatten(1) if value.ndim > 2 else value[:, index : index + 1]
