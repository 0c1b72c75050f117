"""A module seen as a function of one flat vector of parameters, and the losses on it.

Here live the flat view (:class:`FlatModel`), the behavioural loss of section 2.2.1 of
degeneracy-in-the-loss-landscape (mean squared distance or KL divergence to the network as it is), the
training loss, and their exact second derivatives on networks small enough. Sampling is in ``hmc``
and ``sgld``, what follows from the second derivatives in closed form is in ``gauss_newton``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, vmap
from torch.nn import functional

from strati.core.errors import BadInputError, NotFiniteError, UnsupportedError
from strati.evaluate.batches import NO_LABEL, as_batches
from strati.evaluate.batches import as_tensor as as_tensor
from strati.evaluate.models import Inputs as Inputs
from strati.evaluate.models import attention_in_batches, output_tensor
from strati.io.layers import as_patterns, select_names

Potential = Callable[[Tensor], Tensor]
"""A differentiable function of a flat tensor with a scalar value."""


class LossName(StrEnum):
    """Losses known by name."""

    MSE = "mse"
    CROSS_ENTROPY = "cross_entropy"
    BEHAVIOURAL_MSE = "behavioural-mse"
    BEHAVIOURAL_KL = "behavioural-kl"

    @property
    def behavioural(self) -> bool:
        """Whether the network's own outputs are the targets."""
        return self in (LossName.BEHAVIOURAL_MSE, LossName.BEHAVIOURAL_KL)

    @property
    def squared(self) -> bool:
        """Whether it is a squared error, not one of probabilities."""
        return self in (LossName.BEHAVIOURAL_MSE, LossName.MSE)


Loss = str | Callable[[Tensor, Tensor], Tensor]
"""A :class:`LossName`, or a function of (output, target) giving the mean over the data."""


class FlatModel:
    """A module as a function of a flat vector holding all its parameters, or those of some layers.

    The module itself is never written to. Parameters that are tied are counted once. In training mode
    (dropout, running statistics) a copy in evaluation mode is used instead.

    Args:
        model: Any module.
        layers: Patterns as :mod:`strati.io.layers` has them (``"fc1"`` means ``fc1.weight`` and ``fc1.bias``);
            the rest stays fixed. ``None`` means all that require gradients.
        dtype: Compute in this type, e.g. ``torch.float64``; ``None`` keeps the module's own, or single precision
            for one in half precision.

    Attributes:
        theta: The module's own parameters, flat.
        names: The parameters' names in the order of ``theta``.
        shapes: Their shapes.

    Raises:
        BadInputError: A name matches nothing, there is nothing to vary, or a weight is not finite.

    Examples:
        >>> flat = FlatModel(nn.Linear(2, 3), layers=["bias"])
        >>> flat.size, tuple(flat(torch.zeros(3), torch.ones(5, 2)).shape)
        (3, (5, 3))
    """

    def __init__(
        self, model: nn.Module, *, layers: str | Sequence[str] | None = None, dtype: torch.dtype | None = None
    ) -> None:
        # The copy shares its tensors: only the mode is its own.
        shared = {id(t): t for t in (*model.parameters(), *model.buffers())}
        self.module = copy.deepcopy(model, shared).eval() if model.training else model
        parameters = dict(self.module.named_parameters())
        varied = _choose(parameters, layers)
        self.names = tuple(varied)
        self.shapes = tuple(tuple(p.shape) for p in varied.values())
        self.sizes = tuple(p.numel() for p in varied.values())
        own_dtype = next(iter(varied.values())).dtype
        self.dtype = dtype or (torch.float32 if own_dtype.itemsize < 4 else own_dtype)
        with torch.no_grad():
            self.theta = torch.cat([p.detach().reshape(-1).to(self.dtype) for p in varied.values()])
            others = {k: v for k, v in parameters.items() if k not in varied} | dict(
                self.module.named_buffers()
            )
            self.fixed = {k: self.cast(v.detach()) for k, v in others.items()}
        if not bool(torch.isfinite(self.theta).all()):
            raise NotFiniteError("model", "has weights that are not finite; repair the checkpoint first")

    @property
    def size(self) -> int:
        """Number of parameters that vary."""
        return int(self.theta.numel())

    def split(self, theta: Tensor) -> dict[str, Tensor]:
        """The named parameters held in a flat vector, as views."""
        parts = torch.split(theta, list(self.sizes))
        return {n: p.reshape(s) for n, p, s in zip(self.names, parts, self.shapes, strict=True)}

    def __call__(self, theta: Tensor, x: Inputs) -> Tensor:
        """The network's output at parameters ``theta``; differentiable, and batched by ``torch.func.vmap``."""
        weights = self.fixed | self.split(theta)
        with attention_in_batches():
            if isinstance(x, Mapping):
                return output_tensor(functional_call(self.module, weights, (), dict(x)))
            return output_tensor(functional_call(self.module, weights, (x,)))

    def inputs(self, x: Any) -> Inputs:
        """Inputs as tensors of this model's type; integers (tokens) stay integers."""
        if isinstance(x, Mapping):
            return {str(k): self.cast(torch.as_tensor(v)) for k, v in x.items()}
        return self.cast(as_tensor(x, "x"))

    def cast(self, value: Tensor) -> Tensor:
        """On the model's device; real numbers in its type, whole ones as they are."""
        return value.to(self.theta.device, self.dtype if value.is_floating_point() else None)


@dataclass(frozen=True)
class Objective:
    """A loss over data as a function of the flat parameters.

    Attributes:
        flat: The network.
        x: Inputs.
        target: Labels, or the network's own outputs for a behavioural loss.
        loss: Of (output, target), the mean over the data.
        count: ``n``: the number of terms that the loss is the mean of (see :func:`objective`).
        name: Which of the known losses, ``None`` for a function of the caller's.
    """

    flat: FlatModel
    x: Inputs
    target: Tensor
    loss: Callable[[Tensor, Tensor], Tensor]
    count: int
    name: LossName | None

    def __call__(self, theta: Tensor) -> Tensor:
        """The loss at ``theta`` over all data."""
        return self.loss(self.flat(theta, self.x), self.target)

    def batch(self, rows: Tensor) -> Potential:
        """The loss over some of the data only."""
        x = {k: v[rows] for k, v in self.x.items()} if isinstance(self.x, Mapping) else self.x[rows]
        target = self.target[rows]
        return lambda theta: self.loss(self.flat(theta, x), target)

    @property
    def behavioural(self) -> bool:
        """Whether the network's own outputs are the targets, so that it stands at the least loss there is."""
        return self.name is not None and self.name.behavioural

    def part(self, rows: slice) -> Objective:
        """The same loss over consecutive rows of the data."""
        x = {k: v[rows] for k, v in self.x.items()} if isinstance(self.x, Mapping) else self.x[rows]
        return replace(self, x=x, target=self.target[rows])

    @property
    def rows(self) -> int:
        """Number of inputs."""
        return _rows(self.x)

    @property
    def outputs(self) -> int:
        """Numbers that the network puts out over all data."""
        with torch.no_grad():
            output = self.flat(self.flat.theta, self.part(slice(0, 1)).x)
        return self.rows * output.numel()


def objective(
    model: nn.Module,
    loss: Loss,
    data: Any,
    *,
    layers: str | Sequence[str] | None = None,
    dtype: torch.dtype | None = None,
) -> Objective:
    """A module, a loss and data as one function of the flat parameters.

    The named losses: ``mse`` is the mean over data of the squared norm of the error (no 1/2, no division
    by the number of outputs), ``cross_entropy`` is in nats per label, ``behavioural-mse`` is eq. 6,
    ``mean_x ||f_theta(x) - f_theta*(x)||^2``, and ``behavioural-kl`` is ``mean_x KL(p_theta*(x) || p_theta(x))``.

    One rule for ``n``: it is the number of terms that the loss is the mean of, so that ``n L`` is a sum over the data.
    Losses of probabilities have one term per prediction (per token, for sequences), squared errors and functions of the
    caller's one per row.

    Args:
        model: Any module.
        loss: A name, or a function of (output, target) giving the mean over the data.
        data: ``(x, y)``, ``x`` alone for a behavioural loss, or an iterable of such batches (a DataLoader). For the
            cross-entropy of a language model token ids alone are enough: the targets are the next tokens.
        layers: Vary only these (see :class:`FlatModel`).
        dtype: Compute in this type.

    Raises:
        BadInputError: The data do not fit the model or the loss, or the loss is not finite as things are.

    Examples:
        >>> value = objective(nn.Linear(2, 1), "behavioural-mse", torch.ones(4, 2))
        >>> float(value(value.flat.theta)), value.count
        (0.0, 4)
    """
    name = _loss_name(loss)
    flat = FlatModel(model, layers=layers, dtype=dtype)
    x, y = collect(data, model)
    x = flat.inputs(x)
    with torch.no_grad():
        output = run(flat, flat.theta, x)
    if name is not None and name.behavioural:
        target = output
    elif y is None and (following := next_tokens(name, x, output)) is not None:
        target = following
    elif y is None:
        raise BadInputError("data", f"has no targets y, which the loss {loss} needs; give (x, y)")
    else:
        target = as_tensor(y, "y")
        target = flat.cast(target)
        if target.shape[:1] != torch.Size([_rows(x)]):
            raise BadInputError(
                "data",
                f"{_rows(x)} inputs but {tuple(target.shape)[:1]} targets; give one target for each input",
            )
        if name is LossName.MSE and target.shape != output.shape:
            if target.numel() != output.numel():
                raise BadInputError(
                    "data", f"targets {tuple(target.shape)} do not fit outputs {tuple(output.shape)}"
                )
            target = target.reshape(output.shape).to(flat.dtype)
    function = _LOSSES[name] if name is not None else cast("Callable[[Tensor, Tensor], Tensor]", loss)
    terms = _terms(name, output, x)
    if name is LossName.CROSS_ENTROPY and not target.is_floating_point():
        terms = max(1, terms - int((target == NO_LABEL).sum()))
    result = Objective(flat, x, target, function, terms, name)
    check_finite(result, flat.theta, "loss")
    return result


def next_tokens(name: LossName | None, x: Inputs, output: Tensor) -> Tensor | None:
    """The next token at every place of sequences that a language model predicts; ``None`` where it predicts none."""
    tokens = x.get("input_ids") if isinstance(x, Mapping) else x
    if name is not LossName.CROSS_ENTROPY or tokens is None or tokens.is_floating_point() or tokens.ndim != 2:
        return None
    if output.ndim != 3 or output.shape[:2] != tokens.shape or int(tokens.max()) >= output.shape[-1]:
        return None
    following = functional.pad(tokens[:, 1:], (0, 1), value=NO_LABEL)
    mask = x.get("attention_mask") if isinstance(x, Mapping) else None
    if mask is not None:
        following = following.masked_fill(functional.pad(mask[:, 1:], (0, 1)) == 0, NO_LABEL)
    return following


def behavioural_loss(model: nn.Module, x: Any, *, kind: str = "mse") -> Objective:
    """The behavioural loss of eq. 6 (``kind="mse"``) or its KL form (``kind="kl"``).

    Examples:
        >>> loss = behavioural_loss(nn.Linear(1, 1, bias=False), torch.tensor([[1.0], [2.0]]))
        >>> round(float(loss(loss.flat.theta + 1)), 6)  # mean of 1 and 4
        2.5
    """
    return objective(model, f"behavioural-{kind}", x)


def check_finite(potential: Potential, theta: Tensor, what: str) -> float:
    """The value at ``theta``, or an error if it is not a finite scalar.

    Raises:
        BadInputError: The value is not a scalar or not finite.
    """
    with torch.no_grad():
        try:
            value = potential(theta)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            reason = str(error).splitlines()[0]
            raise BadInputError(what, f"cannot be computed at the given parameters ({reason})") from error
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise BadInputError(what, "must be a scalar tensor: the mean over the data")
    if not bool(torch.isfinite(value).all()):
        raise NotFiniteError(
            what, "is not finite at the given parameters; there is no minimum to look around"
        )
    return float(value)


def run(flat: FlatModel, theta: Tensor, x: Inputs) -> Tensor:
    """Call the network, turning a misfit of data and model into one clear line.

    Raises:
        BadInputError: The model cannot be called with these inputs.
    """
    try:
        return flat(theta, x)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        shape = {k: tuple(v.shape) for k, v in x.items()} if isinstance(x, Mapping) else tuple(x.shape)
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise BadInputError("data", f"inputs of shape {shape} do not fit the model ({reason})") from error


def exact_hessian(potential: Potential, theta: Tensor) -> Tensor:
    """The Hessian by exact automatic differentiation, ``(d, d)``; for thousands of parameters at most.

    Examples:
        >>> exact_hessian(lambda w: (w**2).sum() + w[0] * w[1], torch.zeros(2)).tolist()
        [[2.0, 1.0], [1.0, 2.0]]
    """
    # Reverse over reverse: forward mode would script torch's decompositions, slowly and with a warning.
    slope = grad(lambda t: potential(t).reshape(()))
    matrix: Tensor = jacrev(slope, chunk_size=256)(theta.detach()).detach()
    return (matrix + matrix.T) / 2


def gauss_newton_matrix(flat: FlatModel, x: Any, *, kind: str = "mse", theta: Tensor | None = None) -> Tensor:
    """The Hessian of the behavioural loss at its minimum, without second derivatives.

    ``2/n sum_x J^T J`` for the squared error (eq. 10 with the factor 2 it lost), and
    ``1/n sum_x J^T (diag(p) - p p^T) J`` for the KL divergence, ``J`` the Jacobian of the output.

    Args:
        flat: The network.
        x: Inputs.
        kind: ``"mse"`` or ``"kl"`` (also right for the cross-entropy of a network that fits its labels).
        theta: Where; the network's own parameters by default.

    Returns:
        A symmetric ``(d, d)`` matrix.

    Examples:
        >>> flat = FlatModel(nn.Linear(1, 1, bias=False))
        >>> gauss_newton_matrix(flat, torch.tensor([[1.0], [2.0]])).tolist()  # 2 mean(x^2)
        [[5.0]]
    """
    if kind not in ("mse", "kl"):
        raise UnsupportedError(kind, "no such behavioural loss; there are: mse, kl")
    where = flat.theta if theta is None else theta
    inputs = flat.inputs(x)
    total = where.new_zeros(flat.size, flat.size)
    rows = _rows(inputs)
    with torch.no_grad():
        run(flat, where, inputs)
    chunk = max(1, 20_000_000 // max(1, flat.size * 16))
    samples = 0
    for start in range(0, rows, chunk):
        part = slice(start, start + chunk)
        piece = {k: v[part] for k, v in inputs.items()} if isinstance(inputs, Mapping) else inputs[part]
        jacobian, positions = metric_jacobian(flat, where, piece, kind=kind)
        total += jacobian.T @ jacobian
        samples += positions
    scale = 2.0 / rows if kind == "mse" else 1.0 / samples
    return scale * (total + total.T) / 2


def collect(data: Any, model: nn.Module | None = None) -> tuple[Any, Any]:
    """Inputs and targets out of whatever names data (:func:`strati.evaluate.batches.as_batches`), read whole.

    Raises:
        BadInputError: There are no data, or they do not fit into memory.
    """
    batch = as_batches(data, model).whole("the loss as one function of the parameters")
    return batch.x, batch.y


def metric_jacobian(flat: FlatModel, theta: Tensor, x: Inputs, *, kind: str = "mse") -> tuple[Tensor, int]:
    """``J`` with ``J^T J`` the sum over data of the Gauss-Newton matrix, and how many distributions that holds.

    Args:
        flat: The network.
        theta: Where.
        x: Inputs, few enough for ``(rows x outputs, d)`` numbers.
        kind: ``"mse"`` or ``"kl"``.

    Examples:
        >>> flat = FlatModel(nn.Linear(1, 2, bias=False))
        >>> metric_jacobian(flat, flat.theta, torch.tensor([[3.0]]))[0].tolist()
        [[3.0, 0.0], [0.0, 3.0]]
    """

    def single(t: Tensor, row: Any) -> Tensor:
        lifted = {k: v[None] for k, v in row.items()} if isinstance(row, dict) else row[None]
        out = flat(t, lifted)[0]
        return out.reshape(-1, out.shape[-1]) if out.ndim else out.reshape(1, 1)

    plain = dict(x) if isinstance(x, Mapping) else x
    jacobian = vmap(jacrev(single), in_dims=(None, 0))(theta, plain).detach()  # (rows, positions, outputs, d)
    rows, positions, outputs, size = jacobian.shape
    if kind == "kl":
        p = torch.softmax(vmap(single, in_dims=(None, 0))(theta, plain), dim=-1)[..., None]
        jacobian = (jacobian - (p * jacobian).sum(dim=2, keepdim=True)) * p.sqrt()
    return jacobian.reshape(rows * positions * outputs, size), rows * positions


def _choose(own: dict[str, nn.Parameter], layers: str | Sequence[str] | None) -> dict[str, nn.Parameter]:
    usable = {k: p for k, p in own.items() if p.is_floating_point()}
    if layers is None:
        varied = {k: p for k, p in usable.items() if p.requires_grad} or usable
    else:
        # A module's name stands for everything below it.
        within = [
            f"{w}.*" if any(k.startswith(f"{w.lstrip('!')}.") for k in usable) else w
            for w in as_patterns(layers)
        ]
        varied = {k: usable[k] for k in select_names(usable, within)}
    if not varied:
        raise BadInputError("model", "has no parameters to vary")
    return varied


def _terms(name: LossName | None, output: Tensor, x: Inputs) -> int:
    """How many terms the loss is the mean of."""
    if name is None or name.squared:
        return _rows(x)
    return max(1, output.numel() // output.shape[-1])


def _rows(x: Inputs) -> int:
    first = next(iter(x.values())) if isinstance(x, Mapping) else x
    return int(first.shape[0])


def _loss_name(loss: Loss) -> LossName | None:
    if not isinstance(loss, str):
        if not callable(loss):
            raise BadInputError("loss", f"must be callable or one of: {', '.join(LossName)}")
        return None
    key = loss.replace("_", "-").replace("behavioral", "behavioural")
    key = {"cross-entropy": "cross_entropy", "behavioural": "behavioural-mse"}.get(key, key)
    if key not in set(LossName):
        raise BadInputError(loss, f"no such loss; there are: {', '.join(LossName)}")
    return LossName(key)


def _squared(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).sum() / output.shape[0]


def _cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    predictions = output.reshape(-1, output.shape[-1])
    if target.is_floating_point():
        return functional.cross_entropy(predictions, target.reshape(predictions.shape))
    return functional.cross_entropy(predictions, target.reshape(-1).long())


def _divergence(output: Tensor, target: Tensor) -> Tensor:
    """Mean over distributions of ``KL(softmax(target) || softmax(output))``."""
    p, q = torch.log_softmax(target, dim=-1), torch.log_softmax(output, dim=-1)
    return (p.exp() * (p - q)).sum(dim=-1).mean()


_LOSSES: dict[LossName, Callable[[Tensor, Tensor], Tensor]] = {
    LossName.MSE: _squared,
    LossName.BEHAVIOURAL_MSE: _squared,
    LossName.CROSS_ENTROPY: _cross_entropy,
    LossName.BEHAVIOURAL_KL: _divergence,
}
