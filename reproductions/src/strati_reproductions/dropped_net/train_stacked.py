"""Train residual networks of one shape together: the four trainings of appendix A in a fraction of their time.

A block of 48/96 on a batch of 32 is too little work for a step's bookkeeping. Here the matrices of ``k`` networks are
one tensor, a block of all of them is two batched products, and gradients and Adam are written out. Initial values,
order of the data and updates are those of :func:`strati_reproductions.dropped_net.trainer.train`, whose networks come
out but for rounding. Needs torch.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.core.errors import BadInputError
from strati.core.files import write_atomic
from strati.core.results import Tick, silent
from strati.core.rng import derive
from strati_reproductions.dropped_net.trainer import Recipe, Trained

if TYPE_CHECKING:
    from torch import Tensor

    from strati.reassembly.residual.network import Floats

_FIRST, _SECOND, _SMALL = 0.9, 0.999, 1e-8
"""Adam's two rates of forgetting and what keeps its denominator from zero."""
LATE = 10
"""Ends of epochs at which the error is measured before each length: at a constant rate it jumps from epoch to epoch."""


@dataclass(frozen=True)
class Reached:
    """All networks after some epochs, and the mean squared errors of each at the ends of the last :data:`LATE`."""

    networks: list[Trained]
    errors: list[list[float]]


@dataclass
class _Networks:
    """The parameters of ``k`` networks and Adam's two means of each, blocks first: (blocks, k, in, out)."""

    parameters: list[Tensor]
    means: list[Tensor]
    squares: list[Tensor]
    gradients: list[Tensor] = field(repr=False)

    @classmethod
    def start(cls, recipe: Recipe, count: int) -> _Networks:
        """The values that PyTorch's linear layers begin with, the same for every network."""
        import torch

        n, width, hidden = recipe.blocks, recipe.width, recipe.hidden
        inner = [torch.nn.Linear(width, hidden) for _ in range(n)]
        outer = [torch.nn.Linear(hidden, width) for _ in range(n)]
        last = torch.nn.Linear(width, recipe.outputs)

        def stacked(layers: list[Any]) -> list[Tensor]:
            weight = torch.stack([layer.weight.detach().T for layer in layers])[:, None]
            bias = torch.stack([layer.bias.detach() for layer in layers])[:, None, None]
            return [v.repeat(1, count, 1, 1) for v in (weight, bias)]

        values = [*stacked(inner), *stacked(outer), *stacked([last])]
        return cls(values, *([torch.zeros_like(v) for v in values] for _ in range(3)))

    def forward(self, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Of inputs (k, rows, width) the streams before each block and after the last, and the hidden values."""
        import torch

        first, inner_bias, second, outer_bias, _, _ = self.parameters
        streams, hiddens = [x], []
        for i in range(len(first)):
            hiddens.append(torch.baddbmm(inner_bias[i], streams[-1], first[i]).relu_())
            streams.append(torch.baddbmm(outer_bias[i], hiddens[-1], second[i]).add_(streams[-1]))
        return streams, hiddens

    def output(self, stream: Tensor) -> Tensor:
        """The answers from the last stream."""
        import torch

        return torch.baddbmm(self.parameters[5][0], stream, self.parameters[4][0])

    def step(self, x: Tensor, y: Tensor, number: int, rate: float, inside: Tensor, beside: Tensor) -> None:
        """One step of Adam on each network's mean squared error, its decay in the gradient or beside it."""
        import torch

        first, _, second, _, last, _ = self.parameters
        to_first, to_inner, to_second, to_outer, to_last, to_bias = self.gradients
        streams, hiddens = self.forward(x)
        slope = (self.output(streams[-1]) - y).mul_(2 / y[0].numel())
        torch.bmm(streams[-1].transpose(1, 2), slope, out=to_last[0])
        torch.sum(slope, dim=1, keepdim=True, out=to_bias[0])
        slope = torch.bmm(slope, last[0].transpose(1, 2))
        for i in range(len(first) - 1, -1, -1):
            torch.bmm(hiddens[i].transpose(1, 2), slope, out=to_second[i])
            torch.sum(slope, dim=1, keepdim=True, out=to_outer[i])
            below = torch.bmm(slope, second[i].transpose(1, 2)).mul_(hiddens[i] > 0)
            torch.bmm(streams[i].transpose(1, 2), below, out=to_first[i])
            torch.sum(below, dim=1, keepdim=True, out=to_inner[i])
            slope = torch.baddbmm(slope, below, first[i].transpose(1, 2))
        scale = rate / (1 - _FIRST**number)
        root = (1 - _SECOND**number) ** 0.5
        for value, mean, square, gradient in zip(
            self.parameters, self.means, self.squares, self.gradients, strict=True
        ):
            gradient.addcmul_(value, inside)
            value.mul_(1 - rate * beside)
            mean.lerp_(gradient, 1 - _FIRST)
            square.mul_(_SECOND).addcmul_(gradient, gradient, value=1 - _SECOND)
            value.addcdiv_(mean, square.sqrt().div_(root).add_(_SMALL), value=-scale)


def train_together(
    recipes: Sequence[Recipe],
    x: Floats,
    targets: Sequence[Floats],
    lengths: Sequence[int],
    *,
    keep: Path | None = None,
    tick: Tick = silent,
) -> dict[int, Reached]:
    """Train networks on the same inputs, each by its own recipe and towards its own targets; all, at every length.

    Args:
        recipes: Alike but for optimiser (``adam`` or ``adamw``), weight decay and epochs, which ``lengths`` replaces.
        x: Inputs, rows x width.
        targets: Of each network one value a row.
        lengths: Numbers of epochs after which the networks are wanted.
        keep: A file for the state of the training every ten epochs; an interrupted one goes on from it.
        tick: Called after each epoch.

    Raises:
        BadInputError: The recipes differ in more than that, or ask for what is not written out here.
    """
    import torch

    recipe = _common(recipes)
    rows = torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32))
    wanted = torch.from_numpy(np.stack(targets).astype(np.float32)).reshape(len(recipes), len(rows), -1)
    decay = torch.tensor([[r.weight_decay * (r.optimiser == o) for r in recipes] for o in ("adam", "adamw")])
    inside, beside = decay[:, :, None, None]
    alike = [replace(r, epochs=0) for r in recipes]
    state = _State(
        keep, f"{alike} {lengths} {zlib.crc32(rows.numpy().data)} {zlib.crc32(wanted.numpy().data)}"
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(derive(recipe.seed, "reassembly", "train"))
        networks = _Networks.start(recipe, len(recipes))
        number = state.resume(networks)
        for epoch in range(state.epoch, max(lengths)):
            for part in torch.randperm(len(rows)).split(recipe.batch):
                number += 1
                batch = rows[part].expand(len(recipes), -1, -1)
                networks.step(batch, wanted[:, part], number, recipe.lr, inside, beside)
            if any(0 <= length - (epoch + 1) < LATE for length in lengths):
                state.errors[epoch + 1] = _errors(networks, rows, wanted)
            if epoch + 1 in lengths:
                state.reached[epoch + 1] = [v.clone() for v in networks.parameters]
            if (epoch + 1) % 10 == 0 or epoch + 1 == max(lengths):
                state.save(epoch + 1, number, networks)
            tick(f"epoch {epoch + 1} of {max(lengths)}, {len(recipes)} networks together")
        return {
            length: Reached(
                _taken_apart(state.reached[length], rows, wanted),
                [
                    [state.errors[at][k] for at in sorted(state.errors) if 0 <= length - at < LATE]
                    for k in range(len(recipes))
                ],
            )
            for length in lengths
        }


@dataclass
class _State:
    """A training's state in a file, chance and the networks of the lengths it has behind it included."""

    path: Path | None
    about: str
    epoch: int = 0
    reached: dict[int, list[Tensor]] = field(default_factory=dict)
    errors: dict[int, list[float]] = field(default_factory=dict)

    def resume(self, networks: _Networks) -> int:
        """Put the kept state back, if there is one of this training; the number of steps it has behind it."""
        import torch

        if self.path is None or not self.path.is_file():
            return 0
        kept = torch.load(self.path, weights_only=True)
        if kept["about"] != self.about:
            return 0
        for name in ("parameters", "means", "squares"):
            for value, old in zip(getattr(networks, name), kept[name], strict=True):
                value.copy_(old)
        torch.set_rng_state(kept["chance"])
        self.epoch, self.reached, self.errors = kept["epoch"], kept["reached"], kept["errors"]
        return int(kept["steps"])

    def save(self, epoch: int, steps: int, networks: _Networks) -> None:
        """Write it, whole or not at all."""
        import torch

        if self.path is None:
            return
        buffer = io.BytesIO()
        held = {name: getattr(networks, name) for name in ("parameters", "means", "squares")}
        behind = {"reached": self.reached, "errors": self.errors, "chance": torch.get_rng_state()}
        torch.save({"about": self.about, "epoch": epoch, "steps": steps} | held | behind, buffer)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(self.path, buffer.getvalue())


def _common(recipes: Sequence[Recipe]) -> Recipe:
    """What the recipes share."""
    alike = {replace(r, optimiser="adam", weight_decay=0.0, epochs=0) for r in recipes}
    written = all(r.optimiser in ("adam", "adamw") for r in recipes)
    if len(alike) != 1 or not written or any(r.norm or not r.bias or r.activation != "relu" for r in recipes):
        raise BadInputError(
            "recipes",
            "differ in more than weight decay and adam or adamw, or are not of plain relu blocks with biases",
        )
    return alike.pop()


def _errors(networks: _Networks, x: Tensor, wanted: Tensor) -> list[float]:
    answers = networks.output(networks.forward(x.expand(len(wanted), -1, -1))[0][-1])
    found: list[float] = (answers - wanted).square().mean(dim=(1, 2)).tolist()
    return found


def _taken_apart(parameters: list[Tensor], x: Tensor, wanted: Tensor) -> list[Trained]:
    networks = _Networks(parameters, [], [], [])
    answers = networks.output(networks.forward(x.expand(len(wanted), -1, -1))[0][-1])
    found = []
    for k, (answer, want) in enumerate(zip(answers, wanted, strict=True)):
        layers = [
            tuple(
                (w.T.numpy().copy(), b[0].numpy().copy())
                for w, b in zip(weights[:, k], biases[:, k], strict=True)
            )
            for weights, biases in zip(parameters[::2], parameters[1::2], strict=True)
        ]
        loss = float((answer - want).square().mean())
        found.append(
            Trained(layers[0], layers[1], layers[2][0], x.numpy(), answer.numpy(), want.numpy(), loss)
        )
    return found
