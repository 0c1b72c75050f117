"""The loss of every row of data (or token, or group of rows) at many parameters at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap
from torch.nn import functional

from strati.core.errors import BadInputError
from strati.evaluate.batches import NO_LABEL
from strati.landscape.llc.loss_structure import batchable
from strati.landscape.llc.parts import data_groups
from strati.landscape.objective import LossName, Objective

_NUMBERS_PER_PASS = 16_000_000  # of the widest activation


class RowLosses:
    """Losses of rows as a function of offsets from the given parameters, less those at the given parameters.

    A row of sequences has one term per prediction, and its loss is their mean. Every other row has one term.

    Args:
        objective: A network, a loss and data.
        by: ``"row"``, or ``"token"`` for one column per prediction.
        groups: One label per row: one column per group, the mean of its rows.

    Attributes:
        labels: Names of the columns: row numbers, ``row.position`` of tokens, or names of groups.
        baseline: Losses of the terms at the given parameters.

    Raises:
        BadInputError: The loss is not a mean over rows, or cannot be computed for one row.

    Examples:
        >>> from strati.landscape.objective import objective
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> model.weight.data.fill_(1.0)
        tensor([[1.]])
        >>> losses = RowLosses(objective(model, "mse", (torch.tensor([[1.0], [2.0]]), torch.zeros(2, 1))))
        >>> losses.columns(losses.terms(torch.ones(1, 1))).tolist()  # 2^2 - 1 and 4^2 - 2^2
        [[3.0, 12.0]]
    """

    def __init__(self, objective: Objective, *, by: str = "row", groups: Any = None) -> None:
        self.objective = objective
        self._batched = batchable(objective, objective.flat.theta)
        self._chunk = objective.rows
        with torch.no_grad():
            try:
                baseline = self._of(objective, objective.flat.theta)
            except (RuntimeError, ValueError, TypeError, IndexError) as error:
                reason = str(error).splitlines()[0]
                raise BadInputError("loss", f"cannot be computed for a single row ({reason})") from error
        rows, self.positions = baseline.shape
        self.labelled = _labelled(objective, baseline)
        self.baseline = baseline.reshape(-1).double()
        widest = max(max(shape) if shape else 1 for shape in objective.flat.shapes)
        self._chunk = max(1, min(rows, _NUMBERS_PER_PASS // (8 * widest * self.positions)))
        self._check_mean()
        if groups is not None and by == "token":
            raise BadInputError("groups", "label rows; leave out by='token'")
        self._groups: tuple[Tensor, ...] | None = None
        self.by_token = by == "token"
        self.labels: tuple[int | str, ...] = tuple(range(rows))
        if groups is not None:
            members = dict(data_groups(groups, rows))
            self.labels, self._groups = tuple(members), tuple(members.values())
        elif self.by_token:
            places = self.labelled.nonzero()[:, 0].tolist()
            self.labels = tuple(f"{k // self.positions}.{k % self.positions}" for k in places)

    @property
    def count(self) -> int:
        """Number of terms that have a target."""
        return int(self.labelled.sum())

    def terms(self, offsets: Tensor) -> Tensor:
        """``l(theta* + offset) - l(theta*)`` of every term, ``(chains, terms)``; 0 where there is no target."""
        flat = self.objective.flat
        points = flat.theta + offsets.to(flat.theta)
        losses: list[Tensor] = []
        with torch.no_grad():
            for start in range(0, self.objective.rows, self._chunk):
                part = self.objective.part(slice(start, start + self._chunk))
                losses.append(self._at_all(part, points))
        values = torch.cat(losses, dim=1).reshape(len(points), -1).double() - self.baseline
        return values * self.labelled

    def columns(self, terms: Tensor) -> Tensor:
        """The losses of rows, tokens or groups out of those of the terms, ``(chains, columns)``."""
        if self.by_token:
            return terms[:, self.labelled]
        counts = self.labelled.reshape(-1, self.positions).sum(1).clamp(min=1)
        rows = terms.reshape(len(terms), -1, self.positions).sum(2) / counts
        if self._groups is None:
            return rows
        return torch.stack([rows[:, members.to(rows.device)].mean(1) for members in self._groups], dim=1)

    def mean(self, terms: Tensor) -> Tensor:
        """``L - L*`` of every chain, ``(chains, 1)``."""
        return terms.sum(1, keepdim=True) / self.count

    def _at_all(self, part: Objective, points: Tensor) -> Tensor:
        """``(chains, rows, positions)``."""
        if not self._batched:
            return torch.stack([self._of(part, point) for point in points])
        widest = max(max(shape) if shape else 1 for shape in part.flat.shapes)
        together = max(1, _NUMBERS_PER_PASS // (part.rows * self.positions * widest))
        run = vmap(lambda point: self._of(part, point))
        return torch.cat([run(chunk) for chunk in torch.split(points, together)])

    def _of(self, part: Objective, theta: Tensor) -> Tensor:
        """``(rows, positions)``."""
        output, target = part.flat(theta, part.x), part.target
        rows = output.shape[0]
        if part.name is None:
            return _row_by_row(part.loss, output, target)[:, None]
        if part.name.squared:
            return ((output - target) ** 2).reshape(rows, -1).sum(1, keepdim=True)
        if part.name is LossName.BEHAVIOURAL_KL:
            p, q = torch.log_softmax(target, dim=-1), torch.log_softmax(output, dim=-1)
            return (p.exp() * (p - q)).sum(dim=-1).reshape(rows, -1)
        predictions = output.reshape(-1, output.shape[-1])
        labels = (
            target.reshape(predictions.shape) if target.is_floating_point() else target.reshape(-1).long()
        )
        return functional.cross_entropy(predictions, labels, reduction="none").reshape(rows, -1)

    def _check_mean(self) -> None:
        total = float(self.objective(self.objective.flat.theta).detach())
        mean = float((self.baseline * self.labelled).sum()) / max(1, self.count)
        if abs(mean - total) > 1e-3 * max(abs(total), abs(mean), 1e-6):
            raise BadInputError(
                "loss",
                f"is {total:.4g} over all data but {mean:.4g} as the mean over rows; it must be that mean",
            )


def _labelled(objective: Objective, losses: Tensor) -> Tensor:
    """Which terms have a target."""
    target = objective.target
    if objective.name is LossName.CROSS_ENTROPY and not target.is_floating_point():
        return (target != NO_LABEL).reshape(-1)
    return torch.ones(losses.numel(), dtype=torch.bool, device=losses.device)


def _row_by_row(loss: Callable[[Tensor, Tensor], Tensor], output: Tensor, target: Tensor) -> Tensor:
    """A loss that is a mean over rows, of each row alone."""
    try:
        return vmap(lambda o, t: loss(o[None], t[None]).reshape(()))(output, target)
    except RuntimeError:  # vmap cannot trace it
        return torch.stack([loss(o[None], t[None]).reshape(()) for o, t in zip(output, target, strict=True)])
