r"""The loss along the straight line between two networks, before and after their units are put in one order.

:math:`L(t) = L((1-t)\,\theta_A + t\,\theta_B)`. The barrier is the largest :math:`L(t) - (1-t) L(0) - t L(1)` (Frankle,
Dziugaite, Roy and Carbin 2020); between networks that differ only by the order of their units it vanishes once they
are aligned (Ainsworth, Hayase and Srinivasa 2023).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.comparison.results import LossLine, LossPath
from strati.core.errors import BadInputError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from strati.core.results import FloatArray
    from strati.io.network import Openable


def loss_path(
    first: Openable, last: Openable, data: Any, *, points: int = 11, activation: str | None = None
) -> LossPath:
    """Measure the loss at equal steps between two networks of one architecture.

    Args:
        first: A network that can be run (:func:`strati.as_module`).
        last: Another one, with the same parameters.
        data: Inputs and targets.
        points: Positions, both ends included.
        activation: Of bare multilayer perceptrons; by default ReLU.

    Raises:
        BadInputError: The parameters differ in name or shape, or the data have no targets.

    Examples:
        >>> from strati import embedded
        >>> nets = [embedded.path(f"digits-mlp{kind}.safetensors") for kind in ("-init", "")]
        >>> line = loss_path(*nets, embedded.path("digits.npz"), points=3)
        >>> line.loss_name, line.stored.loss[0] > line.stored.loss[2], line.aligned
        ('cross_entropy', True, None)
    """
    import torch

    from strati.evaluate.batches import as_batches
    from strati.io.network import open as open_network
    from strati.io.to_module import as_module

    if points < 3:
        raise BadInputError("points", "needs 3 or more: both ends and something between them")
    module_options: dict[str, Any] = {} if activation is None else {"activation": activation}
    models = [as_module(net, **module_options) for net in (first, last)]
    states = [dict(model.state_dict()) for model in models]
    shapes = [{name: tuple(v.shape) for name, v in state.items()} for state in states]
    if shapes[0] != shapes[1]:
        odd = next(n for n in {**shapes[0], **shapes[1]} if shapes[0].get(n) != shapes[1].get(n))
        raise BadInputError(
            "path", f"{odd} differs in shape or is in one network only; give one architecture"
        )
    batches = as_batches(data, models[0])
    if batches.first().y is None:
        raise BadInputError("data", "has no targets, which the loss along the path needs")
    positions = np.linspace(0.0, 1.0, points)
    renumbered = _renumbered_state(open_network(models[0]), open_network(models[1]), states[1], activation)
    original = {name: value.clone() for name, value in states[0].items()}
    lines: list[LossLine] = []
    name = ""
    try:
        for end in (states[1], renumbered):
            if end is None:
                continue
            end = {key: value.clone() for key, value in end.items()}
            rows = []
            for t in positions:
                models[0].load_state_dict(
                    {
                        key: torch.lerp(value, end[key].to(value.dtype), float(t))
                        if value.is_floating_point()
                        else value
                        for key, value in original.items()
                    }
                )
                each, name = _losses(models[0], batches)
                rows.append(each)
            lines.append(_line(np.stack(rows), positions))
    finally:
        models[0].load_state_dict(original)
    stored, *aligned = lines
    return LossPath(
        name, int(rows[0].size), tuple(positions.tolist()), stored, aligned[0] if aligned else None
    )


def _line(losses: FloatArray, positions: FloatArray) -> LossLine:
    """Losses by position and row."""
    many = losses.shape[1]
    root = np.sqrt(max(many, 1))
    excess = losses - (1 - positions)[:, None] * losses[0] - positions[:, None] * losses[-1]
    place = int(excess.mean(axis=1).argmax())
    spread = excess[place].std(ddof=1) / root if many > 1 else 0.0
    errors = losses.std(axis=1, ddof=1) / root if many > 1 else np.zeros(len(losses))
    return LossLine(
        tuple(losses.mean(axis=1).tolist()),
        tuple(errors.tolist()),
        float(excess[place].mean()),
        float(spread),
        float(positions[place]),
    )


def _losses(model: nn.Module, batches: Any) -> tuple[FloatArray, str]:
    """The loss of every row, and its name."""
    import torch

    from strati.evaluate.models import output_tensor
    from strati.tracking.measure import per_row

    losses: list[Tensor] = []
    name = ""
    with torch.no_grad():
        for batch in batches:
            name = "mse" if batch.y.is_floating_point() else "cross_entropy"
            outputs = output_tensor(model(**batch.x) if isinstance(batch.x, Mapping) else model(batch.x))
            losses.append(per_row(outputs, batch.y, name))
    return np.asarray(torch.cat(losses).double().cpu().numpy(), np.float64), name


def _renumbered_state(
    first: Any, last: Any, state: Mapping[str, Tensor], activation: str | None
) -> dict[str, Tensor] | None:
    """The last network's parameters in the first one's numbering; ``None`` where the numberings agree."""
    import torch

    from strati.comparison.compare import matched_layers
    from strati.comparison.unit_alignment import unit_order
    from strati.interventions.compress.rewrite_checkpoint import renumbered_tensors

    order = unit_order(first, last, matched_layers(first, last), activation)
    changed = renumbered_tensors(last, order)
    if not changed:
        return None
    new = {name: torch.as_tensor(np.ascontiguousarray(array)) for name, array in changed.items()}
    return {name: new.get(name, value) for name, value in state.items()}
