"""Small networks on 1,000 MNIST images, trained for millions of steps and measured on the way. Needs torch.

The recipe is that of Prakash and Martin (2506.04434, table 3): 784-200-200-10, ReLU, PyTorch's default initial values
times 8, mean squared error against one-hot targets, AdamW, batches of 200. Two differences change no result and save
two thirds of the time: pixels that are 0 in all 1,000 images have a gradient of exactly 0 and are left out of the
products, and arithmetic is in single precision (the paper uses double). AdamW keeps the training loss near 1e-3, far
above the rounding error: over the first 40,000 steps the two precisions give the same accuracies within 0.3 points.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from strati.core.results import Tick, silent
from strati.core.rng import derive, stream
from strati.spectra.bulk import fit_bulk
from strati.spectra.tail import fit_tail
from strati_reproductions.handwriting import Digits

WIDTH, CLASSES = 200, 10
LAYERS = ("FC1", "FC2")
"""The layers whose spectra are followed: the third has 10 singular values, too few for a tail."""
_PERMUTATIONS, _LEVEL = 5, 0.001
_SAVE_EVERY = 60.0  # seconds of the processor between two saves
_KEPT = 10  # one of so many measured networks is kept as a file, for other measurements


@dataclass(frozen=True)
class Recipe:
    """How one network is trained.

    Attributes:
        seed: Of the images, the initial values and the order of the batches.
        steps: The last step.
        scale: Factor of the initial values.
        decay: Weight decay of AdamW.
        rate: Learning rate.
        images: Training images, as many of each class.
        batch: Images of a step.
        every: Steps between two measurements after the first ``every`` steps.
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
        """The name of the run's file."""
        return f"scale-{self.scale:g}-decay-{self.decay:g}-rate-{self.rate:g}-images-{self.images}-seed-{self.seed}"

    def early(self) -> frozenset[int]:
        """Steps at which the network is measured before the first multiple of ``every``."""
        return frozenset(np.geomspace(self.images / self.batch, self.every, 30).round().astype(int).tolist())


@dataclass(frozen=True)
class Measurement:
    """A network at one step. ``traps`` counts eigenvalues of the permuted matrix beyond the edge of pure noise."""

    step: int
    train_loss: float
    train_accuracy: float
    test_accuracy: float
    norm: float
    alpha_1: float
    alpha_2: float
    traps_1: float
    traps_2: float
    trap_size_1: float
    trap_size_2: float


class LongRun:
    """One training that continues from its file, with the measurements made so far and the processor time it took."""

    def __init__(self, recipe: Recipe, digits: Digits, folder: Path) -> None:
        self.recipe = recipe
        self._file = folder / f"{recipe.name}.pt"
        self._digits = digits
        chosen = _balanced(digits.y, recipe.images, recipe.seed)
        pixels = digits.x[chosen]
        self._live = (pixels != 0).any(0)
        self._x = pixels[:, self._live].contiguous()
        self._y = digits.y[chosen].long()
        self._targets = functional.one_hot(self._y, CLASSES).to(self._x.dtype)
        first, *others = _initial(pixels.shape[1], recipe)
        self._dead = first[~self._live]
        self._parameters = [first[self._live].contiguous(), *others]
        self._gradients = [torch.zeros_like(p) for p in self._parameters]
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        self._optimiser = torch.optim.AdamW(
            self._parameters, lr=recipe.rate, weight_decay=recipe.decay, fused=True
        )
        self._early = recipe.early()
        self.step, self.seconds = 0, 0.0
        self.measurements: list[Measurement] = []
        self._load()

    def advance(self, last: int, tick: Tick = silent) -> None:
        """Train up to step ``last``, or the recipe's last one, and keep the state."""
        began = time.process_time()
        for batch in self._batches(min(last, self.recipe.steps)):
            self._measure_if_due()
            now = time.process_time()
            if now - began > _SAVE_EVERY:
                self.seconds += now - began
                began = now
                self._save()
                tick(f"{self.recipe.name}: step {self.step}")
            self._update(self._x[batch], self._targets[batch])
            self.step += 1
        self._measure_if_due()
        self.seconds += time.process_time() - began
        self._save()

    def weights(self) -> tuple[Tensor, Tensor]:
        """The first two weight matrices, inputs by outputs, with the pixels that no image uses."""
        first = torch.empty(len(self._live), WIDTH)
        first[self._live] = self._parameters[0]
        first[~self._live] = self._dead * (1 - self.recipe.rate * self.recipe.decay) ** self.step
        return first, self._parameters[1]

    @torch.no_grad()
    def measure(self) -> Measurement:
        """Accuracies, norm, exponents and traps of the present weights."""
        first, second = self.weights()
        trained = self._forward(self._x, self._parameters[0])[-1]
        tested = self._forward(self._digits.x_test, first)[-1]
        spectra = [_spectrum(w.numpy(), self.recipe.seed, self.step) for w in (first, second)]
        squares = [float(p.double().square().sum()) for p in (first, *self._parameters[1:])]
        return Measurement(
            self.step,
            float((trained - self._targets).square().mean()),
            float((trained.argmax(1) == self._y).double().mean()),
            float((tested.argmax(1) == self._digits.y_test).double().mean()),
            sum(squares) ** 0.5,
            *(numbers[kind] for kind in range(3) for numbers in spectra),
        )

    def _measure_if_due(self) -> None:
        due = self.step % self.recipe.every == 0 or self.step in self._early
        if not due or (self.measurements and self.measurements[-1].step >= self.step):
            return
        self.measurements.append(self.measure())
        if self.step % (_KEPT * self.recipe.every) == 0:
            first, second = (w.numpy() for w in self.weights())
            self._file.parent.mkdir(parents=True, exist_ok=True)
            np.savez(self._file.with_name(f"{self.recipe.name}-{self.step:08d}.npz"), FC1=first, FC2=second)

    def _batches(self, last: int) -> Iterator[Tensor]:
        """The rows of every step from the present one on; the order of an epoch depends on its number alone."""
        per_epoch = self.recipe.images // self.recipe.batch
        generator = torch.Generator()
        while self.step < last:
            epoch, place = divmod(self.step, per_epoch)
            generator.manual_seed(derive(self.recipe.seed, "anti-grokking", "order", epoch))
            order = torch.randperm(self.recipe.images, generator=generator).split(self.recipe.batch)
            yield from order[place : min(per_epoch, place + last - self.step)]

    def _forward(self, x: Tensor, first: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        _, w2, w3, b1, b2, b3 = self._parameters
        hidden = torch.addmm(b1, x, first).relu_()
        deeper = torch.addmm(b2, hidden, w2).relu_()
        return hidden, deeper, torch.addmm(b3, deeper, w3)

    @torch.no_grad()
    def _update(self, x: Tensor, targets: Tensor) -> None:
        """One step of AdamW, the gradients of the mean squared error written out."""
        w1, w2, w3, *_ = self._parameters
        g1, g2, g3, c1, c2, c3 = self._gradients
        hidden, deeper, output = self._forward(x, w1)
        slope = (output - targets).mul_(2 / targets.numel())
        torch.mm(deeper.T, slope, out=g3)
        torch.sum(slope, 0, out=c3)
        slope = torch.mm(slope, w3.T).mul_(deeper > 0)
        torch.mm(hidden.T, slope, out=g2)
        torch.sum(slope, 0, out=c2)
        slope = torch.mm(slope, w2.T).mul_(hidden > 0)
        torch.mm(x.T, slope, out=g1)
        torch.sum(slope, 0, out=c1)
        self._optimiser.step()

    def _save(self) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        beside = self._file.with_suffix(".part")
        columns = {
            f.name: torch.tensor([getattr(m, f.name) for m in self.measurements], dtype=torch.float64)
            for f in fields(Measurement)
        }
        state: dict[str, Any] = {
            "step": self.step,
            "seconds": self.seconds,
            "parameters": self._parameters,
            "measurements": columns,
        }
        torch.save(state | {"optimiser": self._optimiser.state_dict()}, beside)
        beside.replace(self._file)

    def _load(self) -> None:
        if not self._file.is_file():
            return
        state = torch.load(self._file, weights_only=True)
        self.step, self.seconds = int(state["step"]), float(state["seconds"])
        with torch.no_grad():
            for parameter, stored in zip(self._parameters, state["parameters"], strict=True):
                parameter.copy_(stored)
        self._optimiser.load_state_dict(state["optimiser"])
        rows = zip(*(state["measurements"][f.name].tolist() for f in fields(Measurement)), strict=True)
        self.measurements = [Measurement(int(step), *numbers) for step, *numbers in rows]


def traps(weight: np.ndarray[Any, Any], rng: np.random.Generator) -> tuple[float, float]:
    """Correlation traps: eigenvalues of the element-wise permuted matrix beyond the Tracy-Widom edge.

    The bulk is fitted to the permuted matrix itself. Both numbers are medians over five permutations, so that chance
    alone gives a trap in fewer than 1 of 10^7 matrices.

    Returns:
        The number of traps, and the largest eigenvalue over the edge.

    Examples:
        >>> noise = np.random.default_rng(0).normal(size=(120, 60))
        >>> traps(noise, np.random.default_rng(1))[0]
        0.0
        >>> traps(noise + 0.5, np.random.default_rng(1))[0]
        1.0
    """
    rows, columns = max(weight.shape), min(weight.shape)
    counts, sizes = [], []
    for _ in range(_PERMUTATIONS):
        permuted = rng.permutation(weight.ravel()).reshape(weight.shape)
        eigenvalues = np.linalg.svd(permuted, compute_uv=False)[::-1].astype(float) ** 2
        bulk = fit_bulk(eigenvalues, rows, columns, level=_LEVEL)
        counts.append(float("nan") if bulk is None else float(bulk.spikes))
        sizes.append(float("nan") if bulk is None else float(eigenvalues[-1] / bulk.edge))
    return float(np.median(counts)), float(np.median(sizes))


def _spectrum(weight: np.ndarray[Any, Any], seed: int, step: int) -> tuple[float, float, float]:
    """Alpha, the number of traps and their size."""
    eigenvalues = np.linalg.svd(weight.astype(float), compute_uv=False)[::-1] ** 2
    tail = fit_tail(eigenvalues[eigenvalues > eigenvalues[-1] * 1e-12], error=False)
    alpha = float("nan") if tail is None else tail.alpha
    return alpha, *traps(weight, stream(seed, "anti-grokking", "traps", step, weight.shape))


def _balanced(labels: Tensor, count: int, seed: int) -> Tensor:
    """Rows of ``count`` images, the same number of each class."""
    rng = stream(seed, "anti-grokking", "images")
    each = count // CLASSES
    chosen = [rng.permutation(np.flatnonzero(labels.numpy() == c))[:each] for c in range(CLASSES)]
    return torch.from_numpy(np.concatenate(chosen))


def _initial(inputs: int, recipe: Recipe) -> list[Tensor]:
    """Weights (inputs by outputs), then biases: PyTorch's default for linear layers, times the recipe's factor."""
    widths = (inputs, WIDTH, WIDTH, CLASSES)
    weights, biases = [], []
    for layer, (fan_in, fan_out) in enumerate(pairwise(widths)):
        rng = stream(recipe.seed, "anti-grokking", "initial", layer)
        bound = recipe.scale / fan_in**0.5
        weights.append(torch.from_numpy(rng.uniform(-bound, bound, (fan_in, fan_out)).astype(np.float32)))
        biases.append(torch.from_numpy(rng.uniform(-bound, bound, fan_out).astype(np.float32)))
    return [*weights, *biases]
