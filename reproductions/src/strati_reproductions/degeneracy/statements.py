"""Section 4, section 6.2 and appendix A of degeneracy-in-the-loss-landscape as experiments.

``sparsity-and-freedom``: for every direction that low-dimensional activations or synchronised neurons leave free, at
least one interaction can be set to zero. ``basis-invariance``: the interaction basis does not depend on the coordinates
of a layer, and makes deep linear networks diagonal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from strati.core.results import Tick, silent
from strati.core.rng import derive, stream
from strati.landscape.basis.basis import interaction_basis
from strati.landscape.basis.graph import interaction_graph
from strati.landscape.basis.sparsify import Sparsified, sparsify
from strati.landscape.counts.degeneracy import degeneracy
from strati_reproductions.pictures import COLOURS, OURS, THEORY, drawn, panels, save
from strati_reproductions.registry import Reproduction, Row

if TYPE_CHECKING:
    from strati.core.results import FloatArray

FREEDOM = {
    "zeros": "every point is a network: weights that sparsifying sets to zero against directions that its activations "
    "(and neurons that fire together) leave free. On or above the line there is a zero for every free direction."
}
BASIS = {
    "invariance": "how far the coordinates of the data in the interaction basis move when a layer is written in other "
    "coordinates R f, against the condition number of R: rounding alone, growing with it.",
    "appendix-a": "squared edges between the layers of a deep linear network, neuron by neuron (top) and in its "
    "interaction basis (bottom): only the diagonal is left.",
}


@dataclass(frozen=True)
class Case:
    """One network: what is free, and what became zero."""

    activations: int
    synchrony: int
    zeros: int
    change: float
    reported: bool


def sparsity_and_freedom(*, quick: bool, seed: int, folder: Path, tick: Tick = silent) -> Reproduction:
    """Section 4: zeros after sparsifying against freedom, on random networks and on real ones."""
    networks = 20 if quick else 100
    low = [_case(seed, number, together=False) for number in range(networks)]
    tick("low-dimensional activations")
    both = [_case(seed, number, together=True) for number in range(networks)]
    tick("synchronised neurons")
    rows = [
        _held("zeros-low-dimensional",
              "4: a zero for every direction that low-dimensional activations leave free", low, synchrony=False),
        _held("zeros-low-dimensional-synchrony", "4: the same where neurons fire together too", both, synchrony=False),
        _held("zeros-all",
              "4: a zero for every direction of activations and synchrony, in a checkpoint", both, synchrony=True),
        Row("4: largest change of an output on the data, as a share", "none", max(c.change for c in (*low, *both)),
            "rounding in double precision", seeds=2 * networks),
    ]  # fmt: skip
    rows += _real(quick, tick)
    figures = drawn(
        _draw_zeros, {"low-dimensional activations": low, "and neurons that fire together": both}, folder
    )
    title = "Sparsity from freedom (section 4)"
    return Reproduction("sparsity-and-freedom", title, tuple(rows), figures, captions=FREEDOM)


def _case(seed: int, number: int, *, together: bool) -> Case:
    """A ReLU network 8-6-5-3 on inputs of random rank; ``together`` makes some neurons fire on all data."""
    rng = stream(seed, "freedom", number, together)
    rank = int(rng.integers(2, 8))
    x = rng.normal(size=(200, rank)) @ rng.normal(size=(rank, 8))
    torch.manual_seed(derive(seed, "freedom net", number) % 2**31)
    net = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    if together:
        with torch.no_grad():
            for place in (0, 2):
                layer: Any = net[place]
                always_on = rng.permutation(layer.out_features)[: int(rng.integers(2, 4))]
                layer.bias[torch.from_numpy(always_on)] = 100.0  # above the largest preactivation: always on
    count = degeneracy(net, torch.from_numpy(x), exact=False)
    done = sparsify(net, x)
    neurons = sum(layer.outputs for layer in count.layers[:-1])
    return Case(
        sum(layer.free_from_activations for layer in count.layers),
        sum(layer.free_from_synchrony for layer in count.layers)
        - neurons,  # scales of single neurons are generic
        done.zeros_after - done.zeros_before,
        done.change,
        any(layer.blocks_reported for layer in done.layers),
    )


def _held(key: str, what: str, cases: Sequence[Case], *, synchrony: bool) -> Row:
    expected = [c.activations + (max(0, c.synchrony) if synchrony else 0) for c in cases]
    enough = sum(c.zeros >= w for c, w in zip(cases, expected, strict=True))
    short = [w - c.zeros for c, w in zip(cases, expected, strict=True) if c.zeros < w]
    left = sum(c.reported for c in cases)
    note = f"{np.mean([c.zeros for c in cases]):.1f} zeros for {np.mean(expected):.1f} free directions on average"
    if short:
        note += (
            f"; short by {np.mean(short):.1f} in the others: eq. 28 holds only where a recombination keeps every gate "
            f"({left} networks have blocks that no checkpoint can hold)"
        )
    facts = {"count": enough, "of": len(cases)}
    return Row(what, "always", f"{enough} of {len(cases)}", note, seeds=len(cases), key=key, facts=facts)


def _real(quick: bool, tick: Tick) -> list[Row]:
    """The embedded MLP, a residual CNN and a language model: zeros for their outputs on some data."""
    from strati import embedded
    from strati.io.to_module import as_module
    from strati_reproductions import zoo
    from strati_reproductions.datasets import external_data, sample_stories

    rows = []
    with np.load(embedded.path("digits.npz")) as file:
        digits = file["x"]
    rows.append(
        _zeros(
            "digits MLP", sparsify(embedded.path("digits-mlp.safetensors"), digits), f"{len(digits)} digits"
        )
    )
    tick("digits MLP")
    from strati_reproductions.trained.networks import open_resnet

    model = open_resnet(external_data("resnet20-cifar10", "resnet20-12fca82f.th"))
    with np.load(zoo.path("cifar10")) as file:
        images = np.moveaxis(file["x_test"][: 20 if quick else 100], -1, 1) / np.float32(255)
    mean, std = (
        np.array(v, np.float32)[:, None, None] for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    )
    rows.append(
        _zeros("ResNet-20", sparsify(model, (images - mean) / std), f"{len(images)} images of CIFAR-10")
    )
    tick("ResNet-20")
    language: Any = as_module(zoo.path("stories15m"))
    tokens = sample_stories(language, 4 if quick else 8, 32, 0)
    sparsified = sparsify(language, tokens, layers=["*mlp*"])
    rows.append(
        _zeros("stories15M, MLPs", sparsified, f"{tokens.numel()} tokens: fewer than the layers are wide")
    )
    tick("stories15M")
    return rows


def _zeros(name: str, sparsified: Sparsified, inputs: str) -> Row:
    weights = sum(layer.weights for layer in sparsified.layers)
    note = f"{inputs}; {sparsified.zeros_before:,} zero before; outputs move by {sparsified.change:.1e} of the largest"
    return Row(
        f"4: {name}: weights zero after sparsifying", None, f"{sparsified.zeros_after:,} of {weights:,}", note
    )


def basis_invariance(*, quick: bool, seed: int, folder: Path, tick: Tick = silent) -> Reproduction:
    """Section 6.2: other coordinates, the same basis. Appendix A: deep linear networks are diagonal."""
    networks = 5 if quick else 20
    conditions = (1.0, 10.0, 100.0, 1000.0)
    errors = {c: [_moved(seed, number, c) for number in range(networks)] for c in conditions}
    tick("invariance")
    rows = [
        Row(f"6.2 coordinates after f -> R f, condition number {c:g}: largest relative change",
            "unchanged", float(max(changes)), "rounding in double precision", seeds=networks, key="invariance")
        for c, changes in errors.items()
    ]  # fmt: skip
    linear = [_linear(seed, number) for number in range(networks)]
    tick("deep linear networks")
    worst = [max(changes[k] for changes in linear) for k in range(3)]
    names = ("largest edge off the diagonal, over the largest on it", "largest |f_hat of a layer - f_hat of the next|",
             "largest relative gap of Lambda to the squared singular values of the whole map")  # fmt: skip
    rows += [
        Row(f"appendix A, deep linear 6-8-7-5-4: {name}", "none", worst[k],
            "rounding in double precision; signs aside", seeds=networks, key="diagonal")
        for k, name in enumerate(names)
    ]  # fmt: skip
    figures = drawn(_draw_basis, errors, seed, folder)
    title = "The interaction basis: invariance (section 6.2) and deep linear networks (appendix A)"
    return Reproduction("basis-invariance", title, tuple(rows), figures, captions=BASIS)


def _moved(seed: int, number: int, condition: float) -> float:
    """How far the data's coordinates move when a hidden layer is written in other coordinates."""
    rng = stream(seed, "invariance", number, condition)
    torch.manual_seed(derive(seed, "invariance net", number) % 2**31)
    first, second = nn.Linear(5, 6).double(), nn.Linear(6, 4).double()
    left, _ = np.linalg.qr(rng.normal(size=(6, 6)))
    right, _ = np.linalg.qr(rng.normal(size=(6, 6)))
    change = left * np.logspace(0, np.log10(condition), 6) @ right
    turn, back = nn.Linear(6, 6, bias=False).double(), nn.Linear(6, 4).double()
    with torch.no_grad():
        turn.weight.copy_(torch.from_numpy(change))
        back.weight.copy_(second.weight @ torch.linalg.inv(turn.weight))
        back.bias.copy_(second.bias)
    x = rng.normal(size=(300, 5))
    plain = interaction_basis(nn.Sequential(first, nn.Tanh(), second), x)
    turned = interaction_basis(nn.Sequential(first, nn.Tanh(), turn, back), x)
    hidden = np.tanh(x @ first.weight.detach().numpy().T + first.bias.detach().numpy())
    before, after = plain.layers[1].forward(hidden), turned.layers[2].forward(hidden @ change.T)
    if before.shape != after.shape:
        return float("inf")
    signs = np.sign((before * after).sum(axis=0))
    return float(np.abs(before - signs * after).max() / np.abs(before).max())


def _linear(seed: int, number: int) -> tuple[float, float, float]:
    net, x = _deep_linear(seed, number)
    basis = interaction_basis(net, x)
    edges = interaction_graph(basis).edges
    aside = max(float((e - np.diag(np.diag(e))).max() / np.diag(e).max()) for e in edges)
    rows, coordinates = x, []
    for layer, stage in zip(basis.layers, [None, *net], strict=True):
        if stage is not None:
            rows = rows @ stage.weight.detach().numpy().T
        coordinates.append(layer.forward(rows))
    apart = max(
        float(np.abs(np.abs(a) - np.abs(b)).max() / np.abs(a).max()) for a, b in pairwise(coordinates)
    )
    centred = x - x.mean(axis=0)
    outputs = centred
    for stage in net:
        outputs = outputs @ stage.weight.detach().numpy().T
    exact = np.linalg.svd(outputs / np.sqrt(len(x)), compute_uv=False) ** 2
    gap = max(
        float(np.abs(layer.eigenvalues / exact[: layer.directions] - 1).max()) for layer in basis.layers[:-1]
    )
    return aside, apart, gap


def _deep_linear(seed: int, number: int) -> tuple[Any, FloatArray]:
    torch.manual_seed(derive(seed, "deep linear net", number) % 2**31)
    widths = (6, 8, 7, 5, 4)
    net = nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in pairwise(widths))).double()
    return net, stream(seed, "deep linear data", number).normal(size=(200, 6))


def _draw_zeros(cases: dict[str, list[Case]], folder: Path) -> tuple[str, ...]:
    figure, axes = panels(
        len(cases), title="Zeros after sparsifying against free directions", size=(4.0, 3.4)
    )
    for axis, (name, networks), colour in zip(axes, cases.items(), COLOURS, strict=False):
        free = [c.activations + max(0, c.synchrony) for c in networks]
        ends = [0, max(1, *free)]
        axis.plot(ends, ends, color=THEORY, label="one zero for each")
        axis.plot(free, [c.zeros for c in networks], "o", ms=4, color=colour, alpha=0.7, label="networks")
        axis.set(title=name, xlabel="free directions", ylabel="zeros won")
        axis.legend(frameon=False)
    return save(figure, folder, "zeros")


def _draw_basis(errors: dict[float, list[float]], seed: int, folder: Path) -> tuple[str, ...]:
    figure, (axis,) = panels(1, title="The basis in other coordinates", size=(5.0, 3.4))
    for condition, changes in errors.items():
        axis.loglog([condition] * len(changes), changes, "o", ms=4, color=OURS, alpha=0.6)
    axis.set(xlabel="condition number of R", ylabel="largest relative change")
    paths = save(figure, folder, "invariance")
    net, x = _deep_linear(seed, 0)
    graphs = [interaction_graph(interaction_basis(net, x, kind)) for kind in ("neuron", "interaction")]
    figure, axes = panels(
        8, columns=4, title="Appendix A: squared edges of a deep linear network", size=(2.2, 2.2)
    )
    for axis, (graph, site) in zip(axes, ((g, s) for g in graphs for s in range(4)), strict=True):
        axis.imshow(graph.normalised(site), cmap="cividis")
        axis.set_title(f"{graph.basis.kind}, layer {site + 1}")
    return (*paths, *save(figure, folder, "appendix-a"))
