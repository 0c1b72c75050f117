"""Degeneracy counts on real networks: the embedded one, an FCN over its training on MNIST, a transformer.

The paper gives no numbers for any network; its claim that is put to the test is that training leaves
fewer effective parameters than there are (section 3), and our question is whether their number falls
while a network trains. The loss scale is a fixed share of the variance of the outputs, so that growing
logits alone change nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strati.papers.registry import Reproduction, Row
from strati.rng import derive
from strati.types import Tick

if TYPE_CHECKING:
    import torch
    from torch import nn

    from strati.landscape.count import Degeneracy

SHARE = 1e-3
"""The loss scale: this share of the variance of the outputs."""


def real_networks(*, quick: bool, seed: int, folder: Path, tick: Tick) -> Reproduction:
    """Counts on the embedded network, on FCN 5x512 at points of its training, and on stories15M."""
    rows = [*_embedded(tick)]
    series = list(_training(quick, seed, tick))
    for label, accuracy, count, at_scale in series:
        rows.append(_row(f"FCN 5x512 on MNIST, {label}", count, f"test accuracy {accuracy:.2f} %", at_scale))
    rows.append(_trend(series))
    rows += _transformer(quick, seed, tick)
    figure = _draw(series, folder)
    return Reproduction(
        "degeneracy-real",
        "Parameters used on the data: structural counts on real networks",
        tuple(rows),
        (figure,),
    )


def _embedded(tick: Tick) -> Iterator[Row]:
    import numpy as np

    from strati import embedded
    from strati.network.module import as_module

    x = np.load(embedded.path("digits.npz"))["x"]
    for state, name in (("initial", "digits-mlp-init.safetensors"), ("trained", "digits-mlp.safetensors")):
        model = as_module(embedded.path(name))  # type: ignore[arg-type]
        count, at_scale = _count(model, x)
        yield _row(f"digits MLP, {state}", count, f"{len(x):,} digits", at_scale)
        tick(f"digits {state}")


def _training(quick: bool, seed: int, tick: Tick) -> Iterator[tuple[str, float, Degeneracy, int]]:
    """An FCN 5x512 (Adam, 1e-3, batches of 256) at its start, during and after training."""
    import numpy as np
    import torch

    from strati.papers import zoo

    with np.load(zoo.path("mnist")) as data:
        x, y = (torch.tensor(data[k]) for k in ("x_train", "y_train"))
        x_test, y_test = (torch.tensor(data[k]) for k in ("x_test", "y_test"))
    x, x_test = (v.reshape(len(v), -1).float() / 255 for v in (x, x_test))
    probe = x_test[: 2_000 if quick else 10_000]
    model = _fcn(derive(seed, "fcn"))
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
    epochs = 2 if quick else 10
    per_epoch = -(-len(x) // 256)
    stops = {0: "initial", 50: "50 steps", per_epoch: "1 epoch", epochs * per_epoch: f"{epochs} epochs"}
    generator = torch.Generator().manual_seed(derive(seed, "batches"))
    for step in range(epochs * per_epoch + 1):
        if step in stops:
            with torch.no_grad():
                accuracy = 100 * float((model(x_test).argmax(1) == y_test).double().mean())
            yield stops[step], accuracy, *_count(model, probe)
            tick(f"FCN {stops[step]}")
        if step % per_epoch == 0:
            order = torch.randperm(len(x), generator=generator)
        part = order[(step % per_epoch) * 256 : (step % per_epoch + 1) * 256]
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(model(x[part]), y[part].long()).backward()  # type: ignore[no-untyped-call]
        optimiser.step()


def _fcn(seed: int) -> nn.Module:
    import torch
    from torch import nn

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        hidden = [part for _ in range(4) for part in (nn.Linear(512, 512), nn.ReLU())]
        return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), *hidden, nn.Linear(512, 10))


def _transformer(quick: bool, seed: int, tick: Tick) -> Iterator[Row]:
    """stories15M on stories it tells itself, so that no data from elsewhere are needed."""
    from strati.network.module import as_module
    from strati.papers import zoo

    model = as_module(zoo.path("stories15m"))
    tokens = _tell(model, 8 if quick else 32, 64, derive(seed, "stories"))
    count, at_scale = _count(model, tokens)
    yield _row(
        "stories15M (LLaMA, 6 layers)", count, f"{tokens.numel():,} tokens of its own stories", at_scale
    )
    heads = sum(layer.free_from_synchrony for layer in count.layers)
    yield Row(
        "stories15M, free between values and outputs of heads",
        "6 x 6 x 48^2 = 82,944",
        f"{heads:,}",
        "d_head^2 a head",
    )
    together = sum(layer.synchronised_blocks for layer in count.layers)
    yield Row(
        "stories15M, heads with the same attention pattern", None, float(together), "exactly, on all tokens"
    )
    tick("stories15M")


def _tell(model: Any, stories: int, length: int, seed: int) -> torch.Tensor:
    import torch

    generator = torch.Generator().manual_seed(seed)
    tokens = torch.ones(stories, 1, dtype=torch.long)
    with torch.no_grad():
        while tokens.shape[1] < length:
            chances = torch.softmax(model(tokens).logits[:, -1], dim=-1)
            tokens = torch.cat([tokens, torch.multinomial(chances, 1, generator=generator)], dim=1)
    return tokens


def _count(model: nn.Module, x: Any) -> tuple[Degeneracy, int]:
    """The structural count, and the parameters used at the loss scale by layers, whatever the number of data."""
    import torch

    from strati.landscape.count import degeneracy

    inputs = torch.as_tensor(x)
    with torch.no_grad():
        output = model(inputs[:256])
    values = (
        (output if isinstance(output, torch.Tensor) else output.logits)
        .double()
        .reshape(len(inputs[:256]), -1)
    )
    epsilon = SHARE * float((values - values.mean(dim=0)).square().sum(dim=1).mean())
    result = degeneracy(model, inputs, epsilon=epsilon, exact=False)
    used = sum(c.parameters - c.at_epsilon.free for c in result.layers if c.at_epsilon is not None)
    return result, used


def _by_layers(count: Degeneracy) -> int:
    return sum(c.parameters - c.free for c in count.layers)


def _row(what: str, count: Degeneracy, note: str, at_scale: int) -> Row:
    analysed = sum(c.parameters for c in count.layers)
    dead = sum(c.dead for c in count.layers)
    blocks = sum(c.synchronised_blocks for c in count.layers)
    ours = f"{_by_layers(count):,} of {analysed:,}"
    return Row(
        what, None, ours,
        f"{note}; {at_scale:,} at {SHARE:g} of the output variance; {dead} dead neurons, {blocks} synchronised blocks",
    )  # fmt: skip


def _trend(series: list[tuple[str, float, Degeneracy, int]]) -> Row:
    exact = [_by_layers(count) for _, _, count, _ in series]
    scaled = [used for _, _, _, used in series]
    words = [f"by structure x{exact[-1] / exact[0]:.3f}", f"at the loss scale x{scaled[-1] / scaled[0]:.3f}"]
    verdict = "falls" if scaled[-1] < scaled[0] else "does not fall"
    return Row(
        "FCN 5x512: does the number of used parameters fall from start to end?",
        None,
        verdict,
        ", ".join(words),
    )


def _draw(series: list[tuple[str, float, Degeneracy, int]], folder: Path) -> str:
    """Used share of every layer at every point of the training."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, at_scale in zip(panels, (False, True), strict=True):
        for label, _, count, _ in series:
            free = [
                c.at_epsilon.free if at_scale and c.at_epsilon is not None else c.free for c in count.layers
            ]
            shares = [1 - f / c.parameters for f, c in zip(free, count.layers, strict=True)]
            axes.plot(range(1, len(shares) + 1), shares, "o-", label=label)
        axes.set_xlabel("layer")
        axes.set_title(
            f"at {SHARE:g} of the output variance" if at_scale else "to first order, any scale", fontsize=9
        )
    panels[0].set_ylabel("share of the layer's parameters used")
    panels[0].legend(frameon=False, fontsize=8)
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / "used-over-training.png"
    figure.savefig(target, dpi=120)
    return str(target)
