"""top-down-eigenspectra's experiments on small networks: rank collapse (3.3), removal of quasi-null directions (3.1).

The fine-tuning of a language model (3.3) is in ``single_token``, spectra over training in ``over_training``.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from strati import embedded
from strati.comparison.compare import compare
from strati.core.results import Tick
from strati.spectra.spectrum import spectrum
from strati_reproductions import zoo
from strati_reproductions.datasets import embedded_digits, story_loss, written_stories
from strati_reproductions.eigenspectra.figures import Shown, as_shown, bars, spectra_grid
from strati_reproductions.pictures import drawn
from strati_reproductions.registry import Reproduction, Row

if TYPE_CHECKING:
    import torch


def rank_collapse(*, quick: bool, seed: int, folder: Path, tick: Tick) -> Reproduction:
    """Fine-tune the embedded network with ever stronger weight decay: does any layer collapse?"""
    rows = []
    spectra: list[list[Shown]] = []
    folder.mkdir(parents=True, exist_ok=True)
    start = embedded.path("digits-mlp.safetensors")
    seeds = range(1 if quick else 3)
    for decay in (0.0, 0.01, 0.1, 1.0, 10.0):
        comparisons, accuracies = [], []
        for number in seeds:
            model = _mlp(start)
            _train(model, epochs=30 if quick else 150, batch=64, rate=1e-3, decay=decay, seed=seed + number)
            path = folder / f"decay-{decay:g}-{number}.safetensors"
            _save(model, path)
            comparisons.append(compare(start, path))
            accuracies.append(_accuracy(model))
            tick(f"decay {decay:g}, {number}")
        collapsed = [
            sum(x.metrics["phase"][1] == "rank-collapse" for x in comparison.layers)
            for comparison in comparisons
        ]
        first = comparisons[0].layers
        phases = ", ".join(f"{layer.metrics['phase'][1]}" for layer in first)
        ranks = ", ".join(f"{layer.metrics['stable_rank'][1]:.1f}" for layer in first)
        hard = ", ".join(f"{layer.metrics['hard_rank'][1]}" for layer in first)
        note = f"accuracy {np.mean(accuracies):.1%}; of one: phases {phases}; stable ranks {ranks}; hard ranks {hard}"
        rows.append(
            Row(
                f"weight decay {decay:g}: layers collapsed, of {len(first)}",
                "none" if decay else None,
                float(np.mean(collapsed)),
                note,
                error=float(np.std(collapsed, ddof=1) / len(seeds) ** 0.5) if len(seeds) > 1 else None,
                seeds=len(seeds),
                key="layers-collapsed",
                facts={"decay": float(decay)},
            )
        )
        spectra.append(
            [
                as_shown(
                    f"{layer.name}, decay {decay:g}",
                    layer.eigenvalues[1],
                    {name: values[1] for name, values in layer.metrics.items()},
                )
                for layer in first
            ]
        )
    title = "Rank collapse by strong regularisation (section 3.3)"
    figures = drawn(spectra_grid, spectra, folder, "rank-collapse", title)
    captions = {
        "rank-collapse": "the layers (columns) under ever stronger weight decay (rows): a collapsed layer would have "
        "eigenvalues at zero, far left of its bulk."
    }
    return Reproduction("rank-collapse", title, tuple(rows), figures, captions=captions)


def remove_quasi_null(*, quick: bool, seed: int, folder: Path, tick: Tick) -> Reproduction:
    """Remove the quasi-null directions of stories15M and measure the loss.

    The control removes as many directions per matrix from the lower end of the bulk.
    """
    home = zoo.path("stories15m")
    stories = written_stories(home)
    intact = story_loss(_llama(home), stories)
    removed, total, changed = 0, 0, {}
    for what in ("quasi-null", "bulk"):
        model = _llama(home)
        removed = total = 0
        for name, weight in _matrices(model):
            values = weight.detach().double().numpy()
            spectrum_of_weight = spectrum(values.astype(np.float32))
            count = spectrum_of_weight.metrics()["quasi_null"] or 0
            _remove(weight, values, count, skip=0 if what == "quasi-null" else count)
            removed += count
            total += min(values.shape)
            tick(f"{what} {name}")
        changed[what] = story_loss(model, stories)
    rows = (
        Row("directions removed", "1 to 6 %", f"{removed} of {total} ({removed / total:.2%})"),
        Row("loss, intact", None, intact, key="loss-intact"),
        Row(
            "loss without the quasi-null directions",
            "no measurable effect",
            changed["quasi-null"],
            key="loss-without-quasi-null",
        ),
        Row(
            "loss without as many directions from the lower end of the bulk", None, changed["bulk"], "control"
        ),
    )
    title = "The loss without quasi-null directions (section 3.1)"
    losses = {
        "intact": intact,
        "without quasi-null": changed["quasi-null"],
        "without the end of the bulk": changed["bulk"],
    }
    captions = {
        "remove-quasi-null": "loss of stories15M as it is, without its quasi-null directions, and without as many of "
        "the bulk's lower end. Bars of equal length would mean that they have no effect."
    }
    figures = drawn(_draw_losses, losses, folder, title)
    return Reproduction("remove-quasi-null", title, rows, figures, captions=captions)


def _draw_losses(losses: dict[str, float], folder: Path, title: str) -> tuple[str, ...]:
    return bars(losses, folder, "remove-quasi-null", title=title, label="loss per token")


def _mlp(path: Path) -> torch.nn.Module:
    from strati.io.to_module import as_module

    return as_module(path)


def _train(model: torch.nn.Module, *, epochs: int, batch: int, rate: float, decay: float, seed: int) -> None:
    import torch

    images = embedded_digits()
    optimiser = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=decay)
    chance = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for picked in torch.randperm(len(images.y), generator=chance).split(batch):
            optimiser.zero_grad()
            torch.nn.functional.cross_entropy(model(images.x[picked]), images.y[picked]).backward()
            optimiser.step()


def _save(model: torch.nn.Module, path: Path) -> None:
    from safetensors.numpy import save_file

    save_file({k: v.detach().numpy().copy() for k, v in model.state_dict().items()}, path)


def _accuracy(model: torch.nn.Module) -> float:
    images = embedded_digits()
    return float((model(images.x_test).argmax(1) == images.y_test).double().mean())


def _llama(home: Path) -> Any:
    from strati.io.to_module import as_module

    return as_module(home).eval()


def _matrices(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """Attention and MLP weights; not the embedding."""
    return [
        (n, p) for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n and "lm_head" not in n
    ]


def _remove(weight: torch.nn.Parameter, values: np.ndarray[Any, Any], count: int, skip: int) -> None:
    """Set ``count`` singular values to zero, counted from the smallest, after leaving ``skip`` of them alone."""
    import torch

    u, s, v = np.linalg.svd(values, full_matrices=False)
    end = len(s) - skip
    s[end - count : end] = 0.0
    weight.data.copy_(torch.from_numpy((u * s) @ v))
