"""Degeneracy counts on real networks: the embedded one, an FCN over its training on MNIST, a transformer.

The paper gives no numbers for any network; its claim that is put to the test is that training leaves
fewer effective parameters than there are (section 3), and our question is whether their number falls
while a network trains. That depends on the loss scale, so two are taken: a share of the variance of the
outputs at the moment, under which growing logits alone change nothing, and the same share of the final
variance, a fixed loss scale for all of the training.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strati.core.results import Tick
from strati.core.rng import derive
from strati_reproductions.datasets import sample_stories
from strati_reproductions.pictures import COLOURS, drawn, panels, save
from strati_reproductions.registry import Reproduction, Row

if TYPE_CHECKING:
    import torch
    from torch import nn

    from strati.landscape.counts.degeneracy import Degeneracy

SHARE = 1e-3
"""The loss scale: this share of the variance of the outputs."""


@dataclass(frozen=True)
class TrainingPoint:
    """A moment of the training: the count at its own loss scale, and the parameters used at the final one's."""

    label: str
    accuracy: float
    count: Degeneracy
    fixed: int


def real_networks(*, quick: bool, seed: int, folder: Path, tick: Tick) -> Reproduction:
    """Counts on the embedded network, on FCN 5x512 at points of its training, and on stories15M."""
    rows = [*_embedded(tick)]
    series = _training(quick, seed, folder, tick)
    rows += [
        _row(f"FCN 5x512 on MNIST, {p.label}", p.count, f"test accuracy {p.accuracy:.2f} %", p.fixed)
        for p in series
    ]
    rows.append(trend(series))
    rows += _transformer(quick, seed, tick)
    figures = drawn(_draw, series, folder)
    captions = {
        "used-over-training": "share of each layer's parameters that are used, at moments of the training of a fully "
        "connected network: to first order (left) and at a loss scale (right). Does a line fall below the one before?"
    }
    title = "Parameters used on the data: structural counts on real networks"
    return Reproduction("degeneracy-real", title, tuple(rows), figures, captions=captions)


def _embedded(tick: Tick) -> Iterator[Row]:
    import numpy as np

    from strati import embedded
    from strati.io.to_module import as_module

    x = np.load(embedded.path("digits.npz"))["x"]
    for state, name in (("initial", "digits-mlp-init.safetensors"), ("trained", "digits-mlp.safetensors")):
        model = as_module(embedded.path(name))  # type: ignore[arg-type]
        yield _row(f"digits MLP, {state}", _count(model, x), f"{len(x):,} digits")
        tick(f"digits {state}")


def _training(quick: bool, seed: int, folder: Path, tick: Tick) -> list[TrainingPoint]:
    """An FCN 5x512 at its start, during and after training."""
    import numpy as np
    import torch

    from strati_reproductions import zoo

    with np.load(zoo.path("mnist")) as file:
        x, y = (torch.tensor(file[k]) for k in ("x_train", "y_train"))
        x_test, y_test = (torch.tensor(file[k]) for k in ("x_test", "y_test"))
    x, x_test = (v.reshape(len(v), -1).float() / 255 for v in (x, x_test))
    moments = snapshots((x, y.long()), 2 if quick else 10, seed, folder, tick)
    return points(moments, x_test[: 2_000 if quick else 10_000], (x_test, y_test), tick)


def points(
    moments: list[tuple[str, nn.Module]],
    probe: torch.Tensor,
    test: tuple[torch.Tensor, torch.Tensor],
    tick: Tick,
) -> list[TrainingPoint]:
    """Counts of a network at moments of its training, the last of which sets the fixed loss scale."""
    import torch

    final = scale_of(moments[-1][1], probe)
    counted = []
    for label, model in moments:
        with torch.no_grad():
            accuracy = 100 * float((model(test[0]).argmax(1) == test[1]).double().mean())
        counted.append(
            TrainingPoint(label, accuracy, _count(model, probe), _used(_count(model, probe, final)))
        )
        tick(f"FCN {label}")
    return counted


def snapshots(
    data: tuple[torch.Tensor, torch.Tensor],
    epochs: int,
    seed: int,
    folder: Path,
    tick: Tick,
    *,
    width: int = 512,
) -> list[tuple[str, nn.Module]]:
    """A network of five hidden layers at some moments of its training, from files where an earlier run left them."""
    from safetensors.torch import load_file, save

    from strati.core.files import write_atomic

    x, y = data
    per_epoch = -(-len(x) // 256)
    stops = {0: "initial", 50: "50 steps", per_epoch: "1 epoch", epochs * per_epoch: f"{epochs} epochs"}
    stops = {step: stops[step] for step in sorted(stops) if step <= epochs * per_epoch}
    files = {step: folder / f"fcn-{width}-{epochs}-{seed}-step-{step}.safetensors" for step in stops}
    models = {step: _fcn(derive(seed, "fcn"), x.shape[1], width) for step in stops}
    if all(file.is_file() for file in files.values()):
        for step, file in files.items():
            models[step].load_state_dict(load_file(file))
    else:
        folder.mkdir(parents=True, exist_ok=True)
        for step, model in _train(models[0], x, y, epochs, seed, set(stops), tick):
            models[step].load_state_dict(model.state_dict())
            write_atomic(files[step], save({k: v.contiguous() for k, v in model.state_dict().items()}))
    return [(stops[step], models[step]) for step in stops]


def _train(
    start: nn.Module, x: torch.Tensor, y: torch.Tensor, epochs: int, seed: int, stops: set[int], tick: Tick
) -> Iterator[tuple[int, nn.Module]]:
    """Train a copy with Adam (1e-3, batches of 256); the network at some steps."""
    import torch

    model = copy.deepcopy(start)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
    per_epoch = -(-len(x) // 256)
    generator = torch.Generator().manual_seed(derive(seed, "batches"))
    for step in range(epochs * per_epoch + 1):
        if step in stops:
            yield step, model
        if step % per_epoch == 0:
            order = torch.randperm(len(x), generator=generator)
            tick(f"step {step}")
        part = order[(step % per_epoch) * 256 : (step % per_epoch + 1) * 256]
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(model(x[part]), y[part]).backward()
        optimiser.step()


def _fcn(seed: int, inputs: int, width: int) -> nn.Module:
    import torch
    from torch import nn

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        hidden = [part for _ in range(4) for part in (nn.Linear(width, width), nn.ReLU())]
        return nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), *hidden, nn.Linear(width, 10))


def _transformer(quick: bool, seed: int, tick: Tick) -> Iterator[Row]:
    """stories15M on stories it tells itself, so that no data from elsewhere are needed."""
    from strati.io.to_module import as_module
    from strati_reproductions import zoo

    model = as_module(zoo.path("stories15m"))
    tokens = sample_stories(model, 8 if quick else 32, 64, derive(seed, "stories"))
    count = _count(model, tokens)
    yield _row("stories15M (LLaMA, 6 layers)", count, f"{tokens.numel():,} tokens sampled from it")
    heads = sum(layer.free_from_synchrony for layer in count.layers)
    yield Row(
        "stories15M, free between the matrices of heads",
        None,
        float(heads),
        "d_head^2 a head between values and outputs, d_head between queries and keys, where only what commutes with "
        "the rotary positions is free: 6 x 6 x (48^2 + 48)",
        theory=84_672,
    )
    together = sum(layer.synchronised_blocks for layer in count.layers)
    near = sum(c.at_epsilon.synchronised_blocks or 0 for c in count.layers if c.at_epsilon is not None)
    what = "stories15M, blocks of heads with the same attention pattern"
    yield Row(what, None, float(together), "exactly, on all tokens")
    yield Row(
        f"{what} within eps",
        None,
        float(near),
        f"eps = {count.epsilon:.3g}, {SHARE:g} of the output variance",
    )
    tick("stories15M")


def scale_of(model: nn.Module, inputs: torch.Tensor) -> float:
    """The loss scale of a network: a share of the variance of its outputs over the data."""
    import torch

    with torch.no_grad():
        output = model(inputs[:256])
    values = (
        (output if isinstance(output, torch.Tensor) else output.logits)
        .double()
        .reshape(len(inputs[:256]), -1)
    )
    return SHARE * float((values - values.mean(dim=0)).square().sum(dim=1).mean())


def _count(model: nn.Module, x: Any, epsilon: float | None = None) -> Degeneracy:
    """The structural count, and that at a loss scale."""
    import torch

    from strati.landscape.counts.degeneracy import degeneracy

    inputs = torch.as_tensor(x)
    return degeneracy(model, inputs, epsilon=epsilon or scale_of(model, inputs), exact=False)


def _used(count: Degeneracy) -> int:
    """Parameters used at the loss scale by layers, for any number of data."""
    return sum(c.parameters - c.at_epsilon.free for c in count.layers if c.at_epsilon is not None)


def _by_layers(count: Degeneracy) -> int:
    return sum(c.parameters - c.free for c in count.layers)


def _row(what: str, count: Degeneracy, note: str, fixed: int | None = None) -> Row:
    analysed = sum(c.parameters for c in count.layers)
    dead = sum(c.dead for c in count.layers)
    blocks = sum(c.synchronised_blocks for c in count.layers)
    words = [note, f"{_used(count):,} at {SHARE:g} of its output variance"]
    if fixed is not None:
        words.append(f"{fixed:,} at that of the trained network")
    words.append(f"{dead} dead neurons, {blocks} synchronised blocks")
    return Row(what, None, f"{_by_layers(count):,} of {analysed:,}", "; ".join(words))


def trend(series: list[TrainingPoint]) -> Row:
    """Whether the number of used parameters falls from the first point to the last, in three senses."""
    first, last = series[0], series[-1]
    ratios = {
        "to first order": _by_layers(last.count) / _by_layers(first.count),
        "relative to the outputs": _used(last.count) / _used(first.count),
        "at a fixed loss scale": last.fixed / max(1, first.fixed),
    }
    falls = [r < 1 for r in ratios.values()]
    verdict = "yes" if all(falls) else "depends on the loss scale" if any(falls) else "no"
    words = ", ".join(f"{'falls' if r < 1 else 'rises'} {name} (x{r:.3g})" for name, r in ratios.items())
    return Row("FCN 5x512: does the number of used parameters fall from start to end?", None, verdict, words)


def _draw(series: list[TrainingPoint], folder: Path) -> tuple[str, ...]:
    """Used share of every layer at every point of the training."""
    figure, axes = panels(2, columns=2, size=(4.0, 3.0), sharey=True)
    for axis, at_scale in zip(axes, (False, True), strict=True):
        for point, colour in zip(series, COLOURS, strict=False):
            layers = point.count.layers
            free = [c.at_epsilon.free if at_scale and c.at_epsilon is not None else c.free for c in layers]
            shares = [1 - f / c.parameters for f, c in zip(free, layers, strict=True)]
            axis.plot(range(1, len(shares) + 1), shares, "o-", color=colour, label=point.label)
        title = f"at {SHARE:g} of the output variance" if at_scale else "to first order, any scale"
        axis.set(xlabel="layer", title=title)
    axes[0].set_ylabel("share of the layer's parameters used")
    axes[0].legend(frameon=False)
    return save(figure, folder, "used-over-training")
