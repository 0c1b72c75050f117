"""The interaction basis put to use: modular addition, MLPs on digits and on MNIST, a small language model.

degeneracy-in-the-loss-landscape conjectures that the basis makes networks sparser and easier to read; it gives no
numbers. What is measured: the share of edges that carries 99 % of the interaction, the directions of a layer
needed to keep the outputs, and modules against what shuffled edges give, in each basis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from strati.core.results import Tick
from strati.core.rng import derive
from strati_reproductions.pictures import drawn, save
from strati_reproductions.registry import Reproduction, Row

if TYPE_CHECKING:
    import torch
    from torch import nn

    from strati.core.results import FloatArray
    from strati.landscape.basis.ablation import BasisComparison as Comparison

_STEPS = 4000
KEEP = 0.95
"""Directions are counted that keep this share of the outputs' variance."""


def interaction_basis_study(*, quick: bool, seed: int, folder: Path, tick: Tick) -> Reproduction:
    """Sparsity, ablation and modules in four bases, on four networks (``quick``: three, the small ones smaller)."""
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    figures: list[str] = []
    studies = [("modular addition", _modular_addition), ("digits MLP", _digits)]
    if not quick:
        studies.append(("MNIST MLP", _mnist))
    for name, study in studies:
        measured, lines = study(quick, seed, folder)
        rows += lines
        rows += _compared(name, measured, seed)
        figures += drawn(_draw, name, measured, folder)
        tick(name)
    measured, lines = _transformer(quick, seed)
    rows += [*lines, *_compared("stories15M", measured, seed)]
    figures += drawn(_draw, "stories15M", measured, folder)
    tick("stories15M")
    title = "The interaction basis on real networks"
    return Reproduction("interaction-basis", title, tuple(rows), tuple(figures), captions=_captions())


def _captions() -> dict[str, str]:
    sentences = {
        "strengths": "squared edges sorted by size, one line per basis: the steeper it falls, the sparser the network "
        "is in that basis.",
        "ablation": "share of the outputs that is lost when only the strongest directions of a layer are kept: "
        "the lower line needs fewer directions.",
        "graph": "the strongest edges between the layers' directions in the interaction basis, modules in colours.",
    }
    names = ("modular-addition", "digits-MLP", "MNIST-MLP", "stories15M")
    return {
        f"{name}-{kind}": f"{name.replace('-', ' ')}: {text}"
        for name in names
        for kind, text in sentences.items()
    }


def _compared(name: str, comparison: Comparison, seed: int) -> Iterator[Row]:
    from strati.landscape.basis.modules import modules

    table = comparison.sparsity()
    needed = comparison.needed(KEEP)
    for graph in comparison.graphs:
        kind = graph.basis.kind
        mine = table[table["basis"] == kind]
        edges = mine["for_99%"] * mine["edges"]
        shares = ", ".join(f"{share:.3f}" for share in mine["for_99%"])
        yield Row(
            f"{name}, {kind}: edges for 99 % of the interaction",
            None,
            float(edges.sum()),
            f"share of all edges, layer by layer: {shares}",
            key="edges",
            facts={"network": name, "basis": str(kind)},
        )
        yield Row(
            f"{name}, {kind}: directions of {comparison.ablation[0].layer} for {KEEP:.0%} of the outputs",
            None,
            needed[kind],
        )
        parts = modules(graph, seed=seed)
        chance = "-" if parts.shuffled is None else f"{parts.shuffled:.3f}"
        yield Row(
            f"{name}, {kind}: modules",
            None,
            len(parts.modules),
            f"quality {parts.quality:.3f}, by chance {chance}",
        )


def _digits(quick: bool, seed: int, folder: Path) -> tuple[Comparison, list[Row]]:
    from strati import embedded
    from strati.io.to_module import as_module
    from strati.landscape.basis.ablation import compare_bases

    images = np.load(embedded.path("digits.npz"))
    net = as_module(embedded.path("digits-mlp.safetensors"))
    comparison = compare_bases(net, images["x_test"], labels=images["y_test"])
    return comparison, [_accuracies("digits MLP", comparison), *_edges_needed(comparison, images["y_test"])]


def _edges_needed(comparison: Comparison, labels: FloatArray) -> Iterator[Row]:
    """How many edges between the first two layers suffice for the outputs when all others are removed."""
    from strati_reproductions.degeneracy.edge_ablation import edge_ablation_curve

    for graph in comparison.graphs:
        points = edge_ablation_curve(graph, 0, labels=labels)
        edges = min(point.kept for point in points if point.loss <= 1 - KEEP)
        accuracy = next(point.accuracy for point in points if point.kept == 256)
        yield Row(
            f"digits MLP, {graph.basis.kind}: edges {points[0].layer} kept for {KEEP:.0%} of the outputs",
            None,
            edges,
            f"of {points[-1].kept}; accuracy with 256 of them {accuracy:.3f}",
        )


def _accuracies(name: str, comparison: Comparison) -> Row:
    best = {p.kind: p.accuracy for p in comparison.ablation if p.kept == 8}
    note = ", ".join(f"{kind} {share:.3f}" for kind, share in best.items() if share is not None)
    return Row(f"{name}: accuracy with 8 directions of {comparison.ablation[0].layer}", None, note or None)


def _mnist(quick: bool, seed: int, folder: Path) -> tuple[Comparison, list[Row]]:
    """784-256-128-10 on MNIST, Adam, five epochs; read on 2,000 test images."""
    import torch
    from torch import nn

    from strati.landscape.basis.ablation import compare_bases
    from strati_reproductions import zoo

    with np.load(zoo.path("mnist")) as file:
        x, y = (torch.tensor(file[k]) for k in ("x_train", "y_train"))
        x_test, y_test = (torch.tensor(file[k]) for k in ("x_test", "y_test"))
    x, x_test = (v.reshape(len(v), -1).float() / 255 for v in (x, x_test))
    torch.manual_seed(derive(seed, "mnist mlp") % 2**31)
    net = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))

    def train() -> None:
        optimiser = torch.optim.Adam(net.parameters(), lr=1e-3)
        for _ in range(5):
            for part in torch.split(torch.randperm(len(x)), 128):
                optimiser.zero_grad()
                nn.functional.cross_entropy(net(x[part]), y[part].long()).backward()
                optimiser.step()

    _once(net, folder / f"mnist-mlp-{seed}.safetensors", train)
    with torch.no_grad():
        accuracy = float((net(x_test).argmax(dim=1) == y_test).double().mean())
    comparison = compare_bases(net, x_test[:2000], labels=y_test[:2000].numpy().astype(np.int64))
    trained = Row(
        "MNIST MLP 784-256-128-10: test accuracy", None, accuracy, "Adam 1e-3, batches of 128, 5 epochs"
    )
    return comparison, [trained, _accuracies("MNIST MLP", comparison)]


def _once(net: nn.Module, path: Path, train: Callable[[], None]) -> None:
    """Train a network, or take the weights that an earlier run left."""
    from safetensors.torch import load_file, save

    from strati.core.files import write_atomic

    if path.is_file():
        net.load_state_dict(load_file(path))
        return
    train()
    write_atomic(path, save({name: tensor.contiguous() for name, tensor in net.state_dict().items()}))


def _modular_addition(quick: bool, seed: int, folder: Path) -> tuple[Comparison, list[Row]]:
    """``a + b mod p`` by a ReLU MLP on one-hot pairs, trained with weight decay until it generalises."""
    from strati.landscape.basis.ablation import compare_bases

    prime, width = (31, 128) if quick else (59, 256)
    net, x, labels, accuracy, steps = _train(prime, width, derive(seed, "modular addition"), folder)
    comparison = compare_bases(net, x, labels=labels)
    rows = [
        Row(
            f"a + b mod {prime}: accuracy on pairs not trained on",
            None,
            accuracy,
            f"MLP {2 * prime}-{width}-{prime}, AdamW, weight decay 1, {steps} full-batch steps at most, 70 % of pairs",
        )
    ]
    for graph in comparison.graphs:
        layer = graph.basis.layers[0]
        top = layer.matrix[np.argsort(-layer.eigenvalues, kind="stable")[:20]]
        rows.append(
            Row(
                f"modular addition, {graph.basis.kind}: share of one frequency in the 20 first input directions",
                None,
                float(np.mean(_purity(top, prime))),
                "1 would be pure Fourier modes",
            )
        )
    return comparison, rows


def _train(
    prime: int, width: int, seed: int, folder: Path
) -> tuple[nn.Module, torch.Tensor, FloatArray, float, int]:
    import torch
    from torch import nn

    torch.manual_seed(seed % 2**31)
    a, b = (
        grid.flatten() for grid in torch.meshgrid(torch.arange(prime), torch.arange(prime), indexing="ij")
    )
    rows = torch.arange(prime * prime)
    x = torch.zeros(prime * prime, 2 * prime)
    x[rows, a] = 1.0
    x[rows, prime + b] = 1.0
    y = (a + b) % prime
    order = torch.randperm(len(x))
    train, test = order[: int(0.7 * len(x))], order[int(0.7 * len(x)) :]
    net = nn.Sequential(nn.Linear(2 * prime, width), nn.ReLU(), nn.Linear(width, prime))

    def accuracy() -> float:
        with torch.no_grad():
            return float((net(x[test]).argmax(dim=1) == y[test]).double().mean())

    def grok() -> None:
        optimiser = torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=1.0)
        for step in range(_STEPS):
            if step % 200 == 0 and accuracy() >= 0.995:
                return
            optimiser.zero_grad()
            nn.functional.cross_entropy(net(x[train]), y[train]).backward()
            optimiser.step()

    _once(net, folder / f"modular-{prime}-{width}-{seed}.safetensors", grok)
    return net, x, y.numpy(), accuracy(), _STEPS


def _purity(directions: FloatArray, prime: int) -> FloatArray:
    """Per direction, the largest share of one frequency in its power, both summands together."""
    halves = directions[:, :prime], directions[:, prime:]
    power = sum(np.abs(np.fft.rfft(half, axis=1)[:, 1:]) ** 2 for half in halves)
    total = np.sum(power, axis=1)
    share: FloatArray = np.max(power, axis=1) / np.where(total > 0, total, 1.0)
    return share


def _transformer(quick: bool, seed: int) -> tuple[Comparison, list[Row]]:
    """stories15M read at the residual stream of three blocks, on stories it tells itself, in all four bases."""
    from strati.configs import BasisConfig
    from strati.io.to_module import as_module
    from strati.landscape.basis.ablation import compare_bases
    from strati_reproductions import zoo
    from strati_reproductions.datasets import sample_stories

    model = as_module(zoo.path("stories15m"))
    tokens = sample_stories(model, 10 if quick else 16, 32, derive(seed, "stories"))
    sites = [f"model.layers.{k}" for k in ((4, 5) if quick else (1, 3, 5))]
    config = BasisConfig(sites=sites, probes=8, batch=5 if quick else 8)
    comparison = compare_bases(model, tokens, layer=0, config=config)
    errors = comparison.graphs[0].basis.layers
    what = "stories15M, residual stream: relative error of the Jacobian moments"
    note = f"{tokens.numel()} tokens, 8 probes each; blocks {', '.join(sites)}"
    return comparison, [Row(what, None, float(max(layer.error for layer in errors)), note)]


def _draw(name: str, comparison: Comparison, folder: Path) -> tuple[str, ...]:
    from strati.landscape.basis.modules import modules
    from strati.report.plots.landscape import plot_ablation, plot_strengths

    stem = name.replace(" ", "-")
    figures = {
        f"{stem}-strengths": plot_strengths(comparison.graphs),
        f"{stem}-ablation": plot_ablation(comparison.ablation),
        f"{stem}-graph": modules(comparison.graphs[0]).plot(),
    }
    return tuple(path for place, figure in figures.items() for path in save(figure, folder, place))
