"""``reproduce small-singular-values``: do the smallest singular values of a language model matter?

Staats et al. (2410.17770) find that the singular values of trained transformers leave random matrix theory at both
ends: removing the smallest ones costs more than removing as many from the bulk, and their singular vectors overlap with
the activations. Here every decile of the singular directions is removed, from all matrices of the blocks at once and
from attention and MLP matrices separately, and the loss is measured on the same windows of text. The overlap of a
direction is the mean square of the layer's inputs along it, relative to their mean over all directions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from strati.core.files import write_atomic
from strati.core.results import Tick
from strati.io.llama_gguf import llama_from_gguf
from strati.io.to_module import as_module
from strati_reproductions import zoo
from strati_reproductions.datasets import sample_stories, wikitext_tokens
from strati_reproductions.pictures import COLOURS, drawn, legend_below, panels, save
from strati_reproductions.registry import Reproduction, Row
from strati_reproductions.rows import Fact

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

DECILES = 10
GROUPS = {"all matrices": "", "attention": "self_attn", "MLP": "mlp"}
"""Groups of matrices, and what the names of their matrices contain."""
_BULK = slice(3, 7)  # the middle deciles, with which the last one, the smallest values, is compared


@dataclass(frozen=True)
class Case:
    """A language model and the windows of tokens on which it is measured."""

    name: str
    model: Any
    windows: Tensor
    note: str


def small_singular_values(*, quick: bool, seed: int, folder: Path, tick: Tick) -> Reproduction:
    """Remove every decile of the singular values, and measure the loss and the overlap with the inputs."""
    cases: tuple[Callable[[bool, int], Case], ...] = (stories15m,) if quick else (stories15m, smollm2)
    rows: list[Row] = []
    measurements: dict[str, dict[str, Any]] = {}
    for make in cases:
        file = folder / f"{make.__name__}-{'quick' if quick else 'full'}-{seed}.json"
        if not file.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            write_atomic(file, json.dumps(measure(make(quick, seed), tick)) + "\n")
        measured = json.loads(file.read_text())
        measurements[measured["name"]] = measured
        rows += [*_loss_rows(measured), *_overlap_rows(measured)]
    title = "Do the smallest singular values of a language model matter?"
    captions = {
        "deciles": "left: rise of the loss without one decile of the singular values of all matrices. Right: mean "
        "square of the inputs along the directions of the decile, the median over matrices; 1 is the mean over all "
        "directions. Decile 1 holds the largest values, decile 10 the smallest. The claim is that both curves rise "
        "again at the right end."
    }
    figures = drawn(_draw, measurements, folder)
    return Reproduction("small-singular-values", title, tuple(rows), figures, captions=captions)


def stories15m(quick: bool, seed: int) -> Case:
    """stories15M on sequences sampled from it: only five stories of its training data are available."""
    model = as_module(zoo.path("stories15m")).eval()
    count, length = (8, 32) if quick else (64, 128)
    note = f"{count} sequences of {length} tokens sampled from the network itself"
    return Case("stories15M", model, sample_stories(model, count, length, seed), note)


def smollm2(quick: bool, seed: int) -> Case:
    """SmolLM2-135M-Instruct on WikiText; its weights are stored in 4 bits."""
    path = zoo.path("smollm2")
    windows = torch.from_numpy(wikitext_tokens(path, 512)).reshape(8, 64)
    note = (
        "8 windows of 64 tokens of WikiText; 4-bit weights, whose rounding noise covers the smallest values"
    )
    return Case("SmolLM2", llama_from_gguf(path).eval(), windows, note)


@torch.no_grad()
def measure(case: Case, tick: Tick) -> dict[str, Any]:
    """Losses of every window without each decile, for each group, and overlaps of each matrix by decile."""
    matrices = {n: m for n, m in case.model.named_modules() if isinstance(m, nn.Linear) and "layers." in n}
    directions, energies = {}, {}
    for name, module in matrices.items():
        _, values, directions[name] = torch.linalg.svd(module.weight.float(), full_matrices=False)
        squares = values.double().square().numpy()
        energies[name] = [float(part.sum() / squares.sum()) for part in deciles(squares)]
        tick(f"{case.name}: {name}")
    intact, relative = _recorded(case, matrices, directions)
    losses: dict[str, list[list[float]]] = {}
    for group, part in GROUPS.items():
        in_group = [name for name in matrices if part in name]
        losses[group] = []
        for decile in range(DECILES):
            with without_decile(matrices, directions, in_group, decile):
                losses[group].append(window_losses(case).tolist())
            tick(f"{case.name}: {group}, decile {decile + 1}")
    overlaps = {name: [float(part.mean()) for part in deciles(values)] for name, values in relative.items()}
    return {
        "name": case.name,
        "note": case.note,
        "intact": intact.tolist(),
        "losses": losses,
        "overlaps": overlaps,
        "energies": energies,
    }


def deciles(values: NDArray[Any]) -> list[NDArray[Any]]:
    """Ten parts of almost the same length, in order."""
    return np.array_split(values, DECILES)


@contextmanager
def without_decile(
    matrices: dict[str, nn.Linear], directions: dict[str, Tensor], chosen: Sequence[str], decile: int
) -> Iterator[None]:
    """The network without one decile of the singular directions of the chosen matrices."""
    intact = {name: matrices[name].weight.data for name in chosen}
    try:
        for name in chosen:
            rows = deciles(np.arange(len(directions[name])))[decile]
            part = directions[name][rows]
            matrices[name].weight.data = intact[name] - (intact[name] @ part.T) @ part
        yield
    finally:
        for name in chosen:
            matrices[name].weight.data = intact[name]


@torch.no_grad()
def window_losses(case: Case) -> Floats:
    """The mean loss per token of every window."""
    losses = []
    for window in case.windows.split(8 if case.windows.shape[1] <= 128 else 1):
        logits = case.model(window).logits[:, :-1]
        each = functional.cross_entropy(logits.transpose(1, 2), window[:, 1:], reduction="none")
        losses.append(each.mean(1).double())
    return torch.cat(losses).numpy()


def _recorded(
    case: Case, matrices: dict[str, nn.Linear], directions: dict[str, Tensor]
) -> tuple[Floats, dict[str, Floats]]:
    """The intact losses, and for every matrix the mean square of its inputs along each singular direction.

    Relative to the mean over all directions of the input space, so that directions without a preference have 1.
    """
    along: dict[str, Tensor] = {}
    total: dict[str, float] = {}

    def hook(name: str) -> Callable[..., None]:
        def record(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            x = inputs[0].flatten(0, -2).float()
            squares = (x @ directions[name].T).square().sum(0).double()
            along[name] = along.get(name, 0.0) + squares
            total[name] = total.get(name, 0.0) + float(x.square().sum())

        return record

    handles = [module.register_forward_pre_hook(hook(name)) for name, module in matrices.items()]
    try:
        losses = window_losses(case)
    finally:
        for handle in handles:
            handle.remove()
    relative = {n: (along[n] / total[n] * matrices[n].in_features).numpy() for n in matrices}
    return losses, relative


def _loss_rows(measured: dict[str, Any]) -> list[Row]:
    intact = np.array(measured["intact"])
    count = len(intact)
    rows = [
        Row(f"{measured['name']}: loss, intact", None, float(intact.mean()), measured["note"],
            error=float(intact.std(ddof=1) / count**0.5), seeds=count)
    ]  # fmt: skip
    for group, losses in measured["losses"].items():
        rises = np.array(losses) - intact  # (deciles, windows)
        means, errors = rises.mean(1), rises.std(1, ddof=1) / count**0.5
        difference = rises[-1] - rises[_BULK].mean(0)
        gap, error = float(difference.mean()), float(difference.std(ddof=1) / count**0.5)
        place = int((means > means[-1]).sum()) + 1
        facts: dict[str, Fact] = {"network": measured["name"], "group": group, "gap": gap, "error": error}
        rows.append(
            Row(f"{measured['name']}, {group}: rise without the smallest decile less that without a middle one",
                "above 0", gap, f"the smallest decile is number {place} of 10 in importance", error=error,
                seeds=count, key="smallest-against-bulk", facts=facts | {"place": place})
        )  # fmt: skip
        energy = np.mean([v for name, v in measured["energies"].items() if GROUPS[group] in name], axis=0)
        relative = means / energy
        rows.append(
            Row(f"{measured['name']}, {group}: rise for the squared weights removed, smallest decile over middle ones",
                None, float(relative[-1] / relative[_BULK].mean()),
                f"the smallest decile holds {energy[-1]:.2%} of the squared weights, a middle one "
                f"{energy[_BULK].mean():.1%}", seeds=count)
        )  # fmt: skip
        rows += [
            Row(f"{measured['name']}, {group}: rise of the loss without decile {d + 1}", None, float(means[d]),
                error=float(errors[d]), seeds=count)
            for d in range(DECILES)
        ]  # fmt: skip
    return rows


def _overlap_rows(measured: dict[str, Any]) -> list[Row]:
    from scipy.stats import wilcoxon

    rows = []
    for group, part in GROUPS.items():
        table = np.array([v for name, v in measured["overlaps"].items() if part in name])
        if not len(table):
            continue
        difference = np.log(table[:, -1]) - np.log(table[:, _BULK]).mean(1)
        pvalue = float(wilcoxon(difference).pvalue)
        factor = float(np.exp(np.median(difference)))
        numbers = ", ".join(f"{v:.2f}" for v in np.median(table, axis=0))
        note = (
            f"Wilcoxon p = {pvalue:.2g} over {len(table)} matrices, {int((difference > 0).sum())} above 1; overlap by "
            f"decile {numbers}"
        )
        facts: dict[str, Fact] = {
            "network": measured["name"],
            "group": group,
            "factor": factor,
            "pvalue": pvalue,
        }
        what = f"{measured['name']}, {group}: overlap with the inputs, smallest decile over middle ones"
        rows.append(Row(what, "above 1", factor, note, seeds=len(table), key="smallest-overlap", facts=facts))
    return rows


def _draw(measurements: dict[str, dict[str, Any]], folder: Path) -> tuple[str, ...]:
    figure, (left, right) = panels(2, title="Deciles of the singular values", size=(4.6, 3.4))
    places = np.arange(1, DECILES + 1)
    for (name, measured), colour in zip(measurements.items(), COLOURS, strict=False):
        intact = np.array(measured["intact"])
        rises = np.array(measured["losses"]["all matrices"]) - intact
        errors = 2 * rises.std(1, ddof=1) / len(intact) ** 0.5
        left.errorbar(places, rises.mean(1), errors, fmt="o-", ms=4, color=colour, label=name)
        overlaps = np.median(list(measured["overlaps"].values()), axis=0)
        right.plot(places, overlaps, "o-", ms=4, color=colour, label=name)
    left.set(xlabel="decile", ylabel="rise of the loss, nats")
    left.set_yscale("symlog", linthresh=0.01)
    right.set(xlabel="decile", ylabel="overlap with the inputs")
    right.set_yscale("log")
    legend_below(figure, (left, right))
    return save(figure, folder, "deciles")
