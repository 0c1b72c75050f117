"""A residual network trained, shuffled into pieces and written beside its answers: ``reassemble --make``. Needs torch.

The network learns a random smooth function of Gaussian inputs; then every linear layer becomes an unlabelled piece,
and the network's outputs are recorded.
"""

from __future__ import annotations

import io
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from strati.core.errors import BadInputError
from strati.core.files import write_atomic
from strati.core.plugins import require
from strati.core.results import Result, Tick, silent
from strati.core.rng import derive, stream

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import NDArray
    from rich.console import RenderableType

    Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Recipe:
    """Sizes and training of a network: AdamW on the mean squared error, from PyTorch's default initial weights."""

    blocks: int = 12
    width: int = 24
    hidden: int = 48
    outputs: int = 1
    epochs: int = 30
    rows: int = 4000
    lr: float = 1e-3
    weight_decay: float = 0.0
    activation: str = "relu"
    batch: int = 128
    seed: int = 0


@dataclass(frozen=True)
class Made(Result):
    """The pieces, data and answer that :func:`make` wrote."""

    verb: ClassVar[str] = "reassemble-make"

    folder: str
    recipe: Recipe
    loss: float
    permutation: tuple[int, ...]

    def frame(self) -> pd.DataFrame:
        """The recipe, one line."""
        import pandas as pd

        return pd.DataFrame([asdict(self.recipe) | {"loss": self.loss}])

    def summary(self) -> RenderableType:
        """What was written where."""
        from rich.text import Text

        r = self.recipe
        return Text(
            f"Wrote {len(self.permutation)} pieces, data.csv and answer.json to {self.folder}.\n"
            f"The network has {r.blocks} blocks of width {r.width}, hidden {r.hidden}, {r.activation}; "
            f"training error {self.loss:.2g}."
        )


def make(folder: Path, recipe: Recipe, *, tick: Tick = silent) -> Made:
    """Train a network and write its shuffled layers: ``piece_N.npz``, ``data.csv``, ``answer.json``.

    Raises:
        BadInputError: The folder exists and is not empty, or cannot be made.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadInputError(folder, "exists and is not an empty folder; choose another")
    layers, columns, loss = _train(recipe, tick)
    order = stream(recipe.seed, "reassembly", "drop").permutation(len(layers))
    permutation = tuple(int(k) for k in np.argsort(order))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInputError(folder, f"cannot be made ({error.strerror})") from None
    for number, k in enumerate(order):
        buffer = io.BytesIO()
        np.savez(buffer, weight=layers[k][0], bias=layers[k][1])
        write_atomic(folder / f"piece_{number}.npz", buffer.getvalue())
    rows = zip(*(column.tolist() for column in columns.values()), strict=True)
    lines = [",".join(columns), *(",".join(f"{v:.9g}" for v in row) for row in rows)]
    write_atomic(folder / "data.csv", "\n".join(lines) + "\n")
    answer = {"permutation": permutation, "recipe": asdict(recipe), "loss": loss}
    write_atomic(folder / "answer.json", json.dumps(answer) + "\n")
    return Made(str(folder), recipe, loss, permutation)


def _train(
    recipe: Recipe, tick: Tick
) -> tuple[list[tuple[Floats, Floats]], dict[str, NDArray[np.float32]], float]:
    """Weights and biases in network order, the columns of the data file, and the training error."""
    torch = require("torch", "torch", "training a network")
    nn = torch.nn
    rng = stream(recipe.seed, "reassembly", "data")
    x = rng.standard_normal((recipe.rows, recipe.width)).astype(np.float32)
    y = teacher(x, recipe.outputs, rng)
    inputs, targets = torch.from_numpy(x), torch.from_numpy(y)
    activation = torch_activation(recipe.activation)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(recipe.seed, "reassembly", "train"))
        inner = [nn.Linear(recipe.width, recipe.hidden) for _ in range(recipe.blocks)]
        outer = [nn.Linear(recipe.hidden, recipe.width) for _ in range(recipe.blocks)]
        last = nn.Linear(recipe.width, recipe.outputs)

        def forward(z: Any) -> Any:
            for first, second in zip(inner, outer, strict=True):
                z = z + second(activation(first(z)))
            return last(z)

        network = nn.ModuleList([*inner, *outer, last])
        optimiser = torch.optim.AdamW(network.parameters(), lr=recipe.lr, weight_decay=recipe.weight_decay)
        for epoch in range(recipe.epochs):
            for rows in torch.randperm(recipe.rows).split(recipe.batch):
                optimiser.zero_grad()
                nn.functional.mse_loss(forward(inputs[rows]), targets[rows]).backward()
                optimiser.step()
            tick(f"epoch {epoch + 1}")
        with torch.no_grad():
            outputs = forward(inputs)
            loss = float(nn.functional.mse_loss(outputs, targets))
    suffixes = [""] if recipe.outputs == 1 else [f"_{q}" for q in range(recipe.outputs)]
    columns = {f"measurement_{c}": x[:, c] for c in range(recipe.width)}
    for name, values in (("pred", outputs.numpy()), ("true", y)):
        columns |= {f"{name}{suffix}": values[:, q] for q, suffix in enumerate(suffixes)}
    in_order = [layer for block in zip(inner, outer, strict=True) for layer in block]
    layers = [(one.weight.detach().numpy(), one.bias.detach().numpy()) for one in (*in_order, last)]
    return layers, columns, loss


def teacher(x: Floats, outputs: int, rng: np.random.Generator) -> Floats:
    """Targets of unit variance: a random smooth function of the inputs."""
    width = x.shape[1]
    first = rng.standard_normal((width, 64)) / np.sqrt(width)
    y = np.tanh(x @ first * 1.5) @ rng.standard_normal((64, outputs)) / 8
    return np.asarray((y - y.mean(axis=0)) / y.std(axis=0), dtype=np.float32)


def torch_activation(name: str) -> Any:
    """The activation of that name as a function of torch tensors."""
    import torch

    functional = torch.nn.functional
    functions = {
        "relu": functional.relu,
        "gelu": functional.gelu,
        "gelu-tanh": lambda z: functional.gelu(z, approximate="tanh"),
        "tanh": torch.tanh,
        "silu": functional.silu,
    }
    if name not in functions:
        raise BadInputError(name, f"no such activation; there are: {', '.join(functions)}")
    return functions[name]
