"""Small networks on 1,000 MNIST images, trained for millions of steps and stored on the way. Needs torch.

The recipe is that of Prakash and Martin (2506.04434, table 3): 784-200-200-10, ReLU, PyTorch's default initial values
times 8, mean squared error against one-hot targets, AdamW, batches of 200. Three choices save time and leave the
recipe as it is: pixels that are 0 in all 1,000 images have a gradient of exactly 0 and are left out of the products,
arithmetic is in single precision (the paper uses double), and the products are numpy's, whose OpenBLAS is faster than
PyTorch's library on the processors of some makers (set ``OPENBLAS_CORETYPE`` where it does not detect AVX-512).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from strati.core.results import Tick, silent
from strati.core.rng import derive, stream
from strati_reproductions.datasets import Digits

WIDTH, CLASSES = 200, 10
NAMES = ("FC1", "FC2", "FC3", "bias1", "bias2", "bias3")
"""The arrays of a snapshot: weights (inputs by outputs), then biases."""
Floats = NDArray[np.float32]
_SAVE_EVERY = 60.0  # seconds of the processor between two saves


@dataclass(frozen=True)
class Recipe:
    """How one network is trained.

    Attributes:
        seed: Of the images, the initial values and the order of the batches.
        steps: The last step.
        scale: Factor of the initial values.
        decay: Weight decay of AdamW.
        rate: Learning rate.
        images: Training images, the same number of each class.
        batch: Images of a step.
        every: Steps between two snapshots after the first ``every`` steps.
    """

    seed: int
    steps: int
    scale: float = 8.0
    decay: float = 0.0
    rate: float = 5e-4
    images: int = 1000
    batch: int = 200
    every: int = 10_000

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        return f"scale-{self.scale:g}-decay-{self.decay:g}-rate-{self.rate:g}-images-{self.images}-seed-{self.seed}"

    def early(self) -> frozenset[int]:
        """Steps at which a snapshot is stored before the first multiple of ``every``."""
        return frozenset(np.geomspace(self.images / self.batch, self.every, 30).round().astype(int).tolist())


class LongRun:
    """One training that continues from its folder, with the processor time that it took.

    A snapshot (0.7 MB) is stored at step 0, at steps that grow geometrically up to ``recipe.every``, and at every
    multiple of it.
    """

    def __init__(self, recipe: Recipe, digits: Digits, folder: Path) -> None:
        self.recipe = recipe
        self.folder = folder / recipe.name
        rows = _balanced(digits.y.numpy(), recipe.images, recipe.seed)
        pixels = digits.x.numpy()[rows]
        self._live = (pixels != 0).any(0)
        self._x = np.ascontiguousarray(pixels[:, self._live])
        self.labels = digits.y.numpy()[rows]
        self._targets = np.eye(CLASSES, dtype=np.float32)[self.labels]
        self.images = pixels
        first, *others = _initial(pixels.shape[1], recipe)
        self._dead = first[~self._live]
        arrays = [first[self._live], *others]
        self._flat = torch.from_numpy(np.concatenate([array.ravel() for array in arrays]))
        self._flat.grad = torch.zeros_like(self._flat)
        self._parameters = _views(self._flat.numpy(), arrays)
        self._gradients = _views(self._flat.grad.numpy(), arrays)
        self._optimiser = torch.optim.AdamW(
            [self._flat], lr=recipe.rate, weight_decay=recipe.decay, fused=True
        )
        self._hidden, self._deeper = np.empty((2, recipe.batch, WIDTH), np.float32)
        self._slope = np.empty((recipe.batch, WIDTH), np.float32)
        self.step, self.seconds = 0, 0.0
        self._load()

    def advance(self, last: int, tick: Tick = silent) -> None:
        """Train up to step ``last``, or the recipe's last one, and store the state."""
        self.folder.mkdir(parents=True, exist_ok=True)
        early, every = self.recipe.early(), self.recipe.every
        began = time.process_time()
        # second moments of unused weights shrink to denormal numbers, which are slow
        torch.set_flush_denormal(True)
        try:
            for batch in self._batches(min(last, self.recipe.steps)):
                self._update(self._x[batch], self._targets[batch])
                self.step += 1
                if self.step % every == 0 or self.step in early:
                    self._snapshot()
                    if time.process_time() - began > _SAVE_EVERY:
                        began = self._save(began)
                        tick(f"{self.recipe.name}: step {self.step}")
        finally:
            torch.set_flush_denormal(False)
        self._save(began)

    def network(self) -> dict[str, Floats]:
        """The present arrays by name, with the pixels that no image uses."""
        first = np.empty((len(self._live), WIDTH), np.float32)
        first[self._live] = self._parameters[0]
        first[~self._live] = self._dead * (1 - self.recipe.rate * self.recipe.decay) ** self.step
        return dict(zip(NAMES, [first, *self._parameters[1:]], strict=True))

    def snapshots(self) -> dict[int, Path]:
        """The stored networks by step."""
        return {int(file.stem): file for file in sorted(self.folder.glob("[0-9]*.npz"))}

    def _snapshot(self) -> None:
        _write(self.folder / f"{self.step:08d}.npz", self.network())

    def _batches(self, last: int) -> Iterator[NDArray[np.int64]]:
        """The rows of every step from the present one on; the order of an epoch depends on its number alone."""
        per_epoch = self.recipe.images // self.recipe.batch
        generator = torch.Generator()
        while self.step < last:
            epoch, place = divmod(self.step, per_epoch)
            generator.manual_seed(derive(self.recipe.seed, "anti-grokking", "order", epoch))
            order = torch.randperm(self.recipe.images, generator=generator).split(self.recipe.batch)
            for rows in order[place : min(per_epoch, place + last - self.step)]:
                yield rows.numpy()

    def _update(self, x: Floats, targets: Floats) -> None:
        """One step of AdamW, with the gradients of the mean squared error written out."""
        w1, w2, w3, b1, b2, b3 = self._parameters
        g1, g2, g3, c1, c2, c3 = self._gradients
        hidden = _relu(x, w1, b1, self._hidden)
        deeper = _relu(hidden, w2, b2, self._deeper)
        slope = (deeper @ w3 + b3 - targets) * np.float32(2 / targets.size)
        np.matmul(deeper.T, slope, out=g3)
        np.sum(slope, 0, out=c3)
        slope = np.matmul(slope, w3.T, out=self._slope)
        slope *= deeper > 0
        np.matmul(hidden.T, slope, out=g2)
        np.sum(slope, 0, out=c2)
        slope = np.matmul(slope, w2.T, out=self._deeper)
        slope *= hidden > 0
        np.matmul(x.T, slope, out=g1)
        np.sum(slope, 0, out=c1)
        self._optimiser.step()

    def _save(self, began: float) -> float:
        now = time.process_time()
        self.seconds += now - began
        state: dict[str, Any] = {"step": self.step, "seconds": self.seconds, "parameters": self._flat}
        part = self.folder / "state.part"
        torch.save(state | {"optimiser": self._optimiser.state_dict()}, part)
        part.replace(self.folder / "state.pt")
        return now

    def _load(self) -> None:
        file = self.folder / "state.pt"
        if not file.is_file():
            self.folder.mkdir(parents=True, exist_ok=True)
            self._snapshot()
            return
        state = torch.load(file, weights_only=True)
        self.step, self.seconds = int(state["step"]), float(state["seconds"])
        with torch.no_grad():
            self._flat.copy_(state["parameters"])
        self._optimiser.load_state_dict(state["optimiser"])


def forward(x: Floats, network: dict[str, Floats]) -> Floats:
    """The outputs of a stored network."""
    for number in (1, 2):
        x = _relu(x, network[f"FC{number}"], network[f"bias{number}"])
    return np.asarray(x @ network["FC3"] + network["bias3"])


def _relu(x: Floats, weight: Floats, bias: Floats, out: Floats | None = None) -> Floats:
    values = np.matmul(x, weight, out=out)
    values += bias
    return np.maximum(values, 0, out=values)


def _views(flat: Floats, arrays: list[Floats]) -> list[Floats]:
    """Consecutive parts of ``flat`` in the shapes of ``arrays``."""
    ends = np.cumsum([array.size for array in arrays])
    return [part.reshape(array.shape) for part, array in zip(np.split(flat, ends[:-1]), arrays, strict=True)]


def _write(file: Path, arrays: dict[str, Floats]) -> None:
    part = file.with_suffix(".part")
    with part.open("wb") as stream_:
        np.savez(stream_, **arrays)  # type: ignore[arg-type]
    part.replace(file)


def _balanced(labels: NDArray[Any], count: int, seed: int) -> NDArray[np.intp]:
    """Rows of ``count`` images, the same number of each class."""
    rng = stream(seed, "anti-grokking", "images")
    each = count // CLASSES
    return np.concatenate([rng.permutation(np.flatnonzero(labels == c))[:each] for c in range(CLASSES)])


def _initial(inputs: int, recipe: Recipe) -> list[Floats]:
    """Weights (inputs by outputs), then biases: PyTorch's default for linear layers, times the recipe's factor."""
    widths = (inputs, WIDTH, WIDTH, CLASSES)
    weights, biases = [], []
    for layer, (fan_in, fan_out) in enumerate(pairwise(widths)):
        rng = stream(recipe.seed, "anti-grokking", "initial", layer)
        bound = recipe.scale / fan_in**0.5
        weights.append(rng.uniform(-bound, bound, (fan_in, fan_out)).astype(np.float32))
        biases.append(rng.uniform(-bound, bound, fan_out).astype(np.float32))
    return [*weights, *biases]
