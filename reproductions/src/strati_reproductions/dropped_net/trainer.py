"""Train residual networks by many recipes, resumably, and take them apart into shuffled pieces. Needs torch.

The network learns a random smooth function of Gaussian inputs, or the outputs of given data. ``strati reassemble
--make`` trains the plain ones (:mod:`strati.reassembly.residual.make`); the initial values and batches are the same.
"""

from __future__ import annotations

import io
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.core.files import write_atomic
from strati.core.plugins import require
from strati.core.results import Tick, silent
from strati.core.rng import derive, stream
from strati.reassembly.residual import make
from strati.reassembly.residual.make import teacher, torch_activation

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float32]


_MOMENTUM = 0.9
"""Of plain gradient descent."""


@dataclass(frozen=True)
class Recipe(make.Recipe):
    """How a network is built and trained: on the mean squared error, from PyTorch's default initial weights.

    ``optimiser`` is ``adamw`` (decay apart from the gradient), ``adam`` (decay as part of the gradient, which Adam
    then rescales: far stronger for the same number) or ``sgd`` (momentum 0.9,
    gradients clipped to norm 1). ``norm`` puts a LayerNorm of its own
    before every block; ``bias=False`` leaves the biases of the blocks out.
    """

    optimiser: str = "adamw"
    norm: bool = False
    bias: bool = True


@dataclass(frozen=True)
class Trained:
    """A trained network taken apart: input and output projections in their true order, the last layer, data.

    ``norms`` are the weights and biases of the blocks' LayerNorms, one per block, or none.
    """

    inner: tuple[tuple[Floats, Floats], ...]
    outer: tuple[tuple[Floats, Floats], ...]
    last: tuple[Floats, Floats]
    x: Floats
    pred: Floats
    true: Floats
    loss: float
    norms: tuple[tuple[Floats, Floats], ...] = ()

    def pieces(self, seed: int = 0) -> tuple[list[tuple[Floats, Floats]], tuple[int, ...]]:
        """The layers shuffled, and the permutation that puts them back (in, out, ..., last; norm, in, out, ...)."""
        kinds = (self.norms, self.inner, self.outer) if self.norms else (self.inner, self.outer)
        ordered = [layer for block in zip(*kinds, strict=True) for layer in block] + [self.last]
        shuffle = stream(seed, "reassembly", "drop").permutation(len(ordered))
        place = np.argsort(shuffle)
        return [ordered[int(k)] for k in shuffle], tuple(int(k) for k in place)


def train(
    recipe: Recipe, *, x: Any = None, y: Any = None, keep: Path | None = None, tick: Tick = silent
) -> Trained:
    """Train a network on a random smooth function of Gaussian inputs, or on given ``x`` and ``y``.

    Args:
        recipe: Shapes and training.
        x: Inputs to use instead, rows x width.
        y: Targets to use instead, rows or rows x outputs.
        keep: A file for the state of the training every few epochs; training goes on from it, or, once it is
            finished, takes no time. One of fewer epochs goes on; one of more, of another recipe or of other data is
            started over.
        tick: Called after each epoch.
    """
    require("torch", "torch", "training a network")
    import torch

    rng = stream(recipe.seed, "reassembly", "data")
    if x is None:
        x = rng.standard_normal((recipe.rows, recipe.width)).astype(np.float32)
        y = teacher(x, recipe.outputs, rng)
    inputs = torch.as_tensor(np.ascontiguousarray(x, dtype=np.float32))
    targets = torch.as_tensor(np.ascontiguousarray(y, dtype=np.float32).reshape(len(inputs), -1))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(recipe.seed, "reassembly", "train"))
        bias = recipe.bias
        inner = [torch.nn.Linear(recipe.width, recipe.hidden, bias=bias) for _ in range(recipe.blocks)]
        outer = [torch.nn.Linear(recipe.hidden, recipe.width, bias=bias) for _ in range(recipe.blocks)]
        norms: list[Any] = [
            torch.nn.LayerNorm(recipe.width) if recipe.norm else torch.nn.Identity() for _ in inner
        ]
        last = torch.nn.Linear(recipe.width, recipe.outputs)
        act = torch_activation(recipe.activation)

        def forward(z: Any) -> Any:
            for norm, first, second in zip(norms, inner, outer, strict=True):
                z = z + second(act(first(norm(z))))
            return last(z)

        parameters = [p for layer in (*inner, *outer, *norms, last) for p in layer.parameters()]
        optimiser = _optimiser(recipe, parameters)
        how = replace(recipe, epochs=0)  # a longer training goes on from a shorter one
        checkpoint = _Kept(
            keep, f"{how} {zlib.crc32(inputs.numpy().data)} {zlib.crc32(targets.numpy().data)}", recipe.epochs
        )
        for epoch in range(checkpoint.resume(parameters, optimiser), recipe.epochs):
            for rows in torch.randperm(len(inputs)).split(recipe.batch):
                loss = torch.nn.functional.mse_loss(forward(inputs[rows]), targets[rows])
                optimiser.zero_grad()
                loss.backward()
                if recipe.optimiser == "sgd":  # deep networks of default weights begin with steep gradients
                    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
                optimiser.step()
            if (epoch + 1) % 10 == 0 or epoch + 1 == recipe.epochs:
                checkpoint.save(epoch + 1, parameters, optimiser)
            tick(f"epoch {epoch + 1}")
        with torch.no_grad():
            pred = forward(inputs)
            final = float(torch.nn.functional.mse_loss(pred, targets))
    return Trained(
        tuple(_layer(layer) for layer in inner),
        tuple(_layer(layer) for layer in outer),
        _layer(last),
        inputs.numpy(),
        pred.numpy(),
        targets.numpy(),
        final,
        tuple(_layer(layer) for layer in norms) if recipe.norm else (),
    )


def _optimiser(recipe: Recipe, parameters: list[Any]) -> Any:
    import torch

    if recipe.optimiser == "sgd":
        return torch.optim.SGD(parameters, lr=recipe.lr, momentum=_MOMENTUM, weight_decay=recipe.weight_decay)
    kind = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}[recipe.optimiser]
    return kind(parameters, lr=recipe.lr, weight_decay=recipe.weight_decay)


@dataclass(frozen=True)
class _Kept:
    """The state of a training in a file, so that an interrupted one goes on where it was, chance included."""

    path: Path | None
    about: str
    most: int

    def resume(self, parameters: list[Any], optimiser: Any) -> int:
        """Put the kept state back; the number of epochs it has behind it."""
        import torch

        if self.path is None or not self.path.is_file():
            return 0
        saved_state = torch.load(self.path, weights_only=True)
        if saved_state["about"] != self.about or int(saved_state["epoch"]) > self.most:
            return 0
        with torch.no_grad():
            for parameter, value in zip(parameters, saved_state["parameters"], strict=True):
                parameter.copy_(value)
        optimiser.load_state_dict(saved_state["optimiser"])
        torch.set_rng_state(saved_state["chance"])
        return int(saved_state["epoch"])

    def save(self, epoch: int, parameters: list[Any], optimiser: Any) -> None:
        """Write it, whole or not at all."""
        import torch

        if self.path is None:
            return
        buffer = io.BytesIO()
        state = {
            "about": self.about,
            "epoch": epoch,
            "parameters": [p.detach() for p in parameters],
            "optimiser": optimiser.state_dict(),
            "chance": torch.get_rng_state(),
        }
        torch.save(state, buffer)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(self.path, buffer.getvalue())


def _layer(layer: Any) -> tuple[Floats, Floats]:
    weight = layer.weight.detach().numpy().copy()
    bias = np.zeros(len(weight), np.float32) if layer.bias is None else layer.bias.detach().numpy().copy()
    return weight, bias
