"""top-down-eigenspectra's experiments, on networks trained or fine-tuned here.

Rank collapse under strong regularisation (section 3.3), a language model that learns to say one word (section 3.3),
quasi-null directions taken out (section 3.1 says they do no work), and spectra over training at several batch sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from strati import embedded, zoo
from strati.papers.beside import beside
from strati.papers.eigenspectra.figures import Shown, bars, lines, spectra_grid
from strati.papers.handwriting import digits
from strati.papers.pictures import drawn
from strati.papers.registry import Reproduction, Row
from strati.spectra.comparing.compare import compare
from strati.spectra.comparing.results import Comparison
from strati.spectra.spectrum import spectrum
from strati.types import Tick
from strati.zoo.llama2c import Tokenizer

if TYPE_CHECKING:
    import torch


def rank_collapse(*, quick: bool, seed: int, folder: Path, tick: Tick) -> Reproduction:
    """Fine-tune the embedded network with ever stronger weight decay: does any layer collapse?"""
    rows = []
    spectra: list[list[Shown]] = []
    folder.mkdir(parents=True, exist_ok=True)
    start = embedded.path("digits-mlp.safetensors")
    for decay in (0.0, 0.01, 0.1, 1.0, 10.0):
        model = _mlp(start)
        _train(model, epochs=30 if quick else 150, batch=64, rate=1e-3, decay=decay, seed=seed)
        path = folder / f"decay-{decay:g}.safetensors"
        _save(model, path)
        result = compare(start, path)
        phases = ", ".join(f"{layer.metrics['phase'][1]}" for layer in result.layers)
        ranks = ", ".join(f"{layer.metrics['stable_rank'][1]:.1f}" for layer in result.layers)
        hard = ", ".join(f"{layer.metrics['hard_rank'][1]}" for layer in result.layers)
        collapsed = sum(layer.metrics["phase"][1] == "rank-collapse" for layer in result.layers)
        note = f"accuracy {_accuracy(model):.1%}; phases {phases}; stable ranks {ranks}; hard ranks {hard}"
        expected = "none" if decay else None
        rows.append(Row(f"weight decay {decay:g}: layers collapsed", expected, float(collapsed), note))
        spectra.append(
            [Shown(f"{layer.name}, decay {decay:g}", layer.eigenvalues[1]) for layer in result.layers]
        )
        tick(f"decay {decay:g}")
    title = "Rank collapse by strong regularisation (section 3.3)"
    figures = drawn(spectra_grid, spectra, folder, "rank-collapse", title)
    return Reproduction("rank-collapse", title, tuple(rows), figures)


def same_token(*, quick: bool, seed: int, folder: Path, tick: Tick) -> Reproduction:
    """Fine-tune stories15M to say always the same word: does anything in the spectra show it?"""
    import torch

    home = zoo.path("stories15m")
    tokenizer = Tokenizer(home / "tokenizer.bin")
    stories = _stories(tokenizer)
    model = _llama(home)
    before = _loss(model, stories)
    word = tokenizer.encode("stone")[-1]
    torch.manual_seed(seed)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1)
    model.train()
    steps = 10 if quick else 40
    for step in range(steps):
        ids = stories[step % len(stories)]
        loss = torch.nn.functional.cross_entropy(model(ids).logits[0], torch.full((ids.shape[1],), word))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        tick(f"step {step}")
    model.eval()
    with torch.no_grad():
        said = float(
            np.mean([float((model(s).logits[0].argmax(-1) == word).double().mean()) for s in stories])
        )
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder / "always-one-word")
    result = compare(home, folder / "always-one-word", jobs=2, tick=tick)
    rows = (
        Row("positions at which the tuned network says the word", "always", said, f"{steps} steps of AdamW"),
        Row("loss on the stories, before / after", None, f"{before:.3f} / {_loss(model, stories):.3f}"),
        *_spectral_rows(result),
    )
    title = "A language model taught to say one word (section 3.3)"
    some = result.layers[:: max(1, len(result.layers) // 5)][:5]
    grid = [[Shown(_last(layer.name), layer.eigenvalues[k]) for layer in some] for k in (0, 1)]
    figures = drawn(spectra_grid, grid, folder, "same-token", f"{title}: before (top) and after (bottom)")
    return Reproduction("same-token", title, rows, figures)


def remove_quasi_null(*, quick: bool, seed: int, folder: Path, tick: Tick) -> Reproduction:
    """Take the quasi-null directions out of stories15M and measure the loss.

    The control takes out as many directions per matrix from the lower end of the bulk, just above the quasi-null ones.
    """
    home = zoo.path("stories15m")
    stories = _stories(Tokenizer(home / "tokenizer.bin"))
    intact = _loss(_llama(home), stories)
    removed, total, changed = 0, 0, {}
    for what in ("quasi-null", "bulk"):
        model = _llama(home)
        removed = total = 0
        for name, weight in _matrices(model):
            values = weight.detach().double().numpy()
            found = spectrum(values.astype(np.float32))
            count = found.metrics()["quasi_null"] or 0
            _remove(weight, values, count, skip=0 if what == "quasi-null" else count)
            removed += count
            total += min(values.shape)
            tick(f"{what} {name}")
        changed[what] = _loss(model, stories)
    rows = (
        Row("directions taken out", "1 to 6 %", f"{removed} of {total} ({removed / total:.2%})"),
        Row("loss, intact", None, intact),
        Row("loss without the quasi-null directions", "no measurable effect", changed["quasi-null"]),
        Row("loss without as many from the bulk's lower end", None, changed["bulk"], "control"),
    )
    title = "Do quasi-null directions do any work? (section 3.1)"
    losses = {
        "intact": intact,
        "without quasi-null": changed["quasi-null"],
        "without bulk's end": changed["bulk"],
    }
    return Reproduction("remove-quasi-null", title, rows, drawn(_draw_losses, losses, folder, title))


def _draw_losses(losses: dict[str, float], folder: Path, title: str) -> tuple[str, ...]:
    return bars(losses, folder, "remove-quasi-null", title=title, label="loss per token")


def training_series(*, quick: bool, seed: int, folder: Path, tick: Tick) -> Reproduction:
    """Stable rank, hard rank, sigma, quasi-null share and signal share over training, at several batch sizes.

    24 checkpoints each of the embedded architecture (quick) or of an FCN 784-512-512-512-10 on MNIST.
    """
    from strati.papers.development.spectra_over_time import mlp_run

    rows = []
    ranks: dict[str, dict[str, Sequence[float | None]]] = {}
    for batch in (16, 64, 256):
        _, paths = mlp_run(folder, seed=seed, quick=quick, count=24, batch=batch, tick=tick)
        result = compare(*paths, series=True, jobs=2, tick=tick)
        assert result.series is not None
        ranks[f"batch {batch}"] = {layer.name: layer.stable_rank for layer in result.series.layers}
        for layer, compared in zip(result.series.layers, result.layers, strict=True):
            edges = compared.metrics["mp_lambda_plus"]
            signal = [_signal_share(v, edge) for v, edge in zip(compared.eigenvalues, edges, strict=True)]
            left = layer.leaves_random_like
            when = result.series.labels[left] if left is not None else "never"
            numbers = {
                "stable rank": (layer.stable_rank[0], layer.stable_rank[-1]),
                "hard rank": (layer.hard_rank[0], layer.hard_rank[-1]),
                "sigma": (layer.mp_sigma[0], layer.mp_sigma[-1]),
                "quasi-null": (layer.quasi_null[0], layer.quasi_null[-1]),
                "signal share": (signal[0], signal[-1]),
            }
            note = "; ".join(f"{k} {_short(a)} to {_short(b)}" for k, (a, b) in numbers.items())
            rows.append(Row(f"batch {batch}, {layer.name}: leaves random-like at", None, when, note))
    title = "Spectra over training, 24 checkpoints, three batch sizes"
    return Reproduction("training-series", title, tuple(rows), drawn(_draw_ranks, ranks, folder, title))


def _draw_ranks(
    ranks: dict[str, dict[str, Sequence[float | None]]], folder: Path, title: str
) -> tuple[str, ...]:
    return lines(ranks, folder, "training-series", title=title, label="stable rank")


def _mlp(path: Path) -> torch.nn.Module:
    from strati.network.module import as_module

    return as_module(path)


def _train(model: torch.nn.Module, *, epochs: int, batch: int, rate: float, decay: float, seed: int) -> None:
    import torch

    data = digits()
    optimiser = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=decay)
    chance = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for picked in torch.randperm(len(data.y), generator=chance).split(batch):
            optimiser.zero_grad()
            torch.nn.functional.cross_entropy(model(data.x[picked]), data.y[picked]).backward()
            optimiser.step()


def _save(model: torch.nn.Module, path: Path) -> None:
    from safetensors.numpy import save_file

    save_file({k: v.detach().numpy().copy() for k, v in model.state_dict().items()}, path)


def _accuracy(model: torch.nn.Module) -> float:
    data = digits()
    return float((model(data.x_test).argmax(1) == data.y_test).double().mean())


def _llama(home: Path) -> Any:
    from strati.network.module import as_module

    return as_module(home).eval()


def _stories(tokenizer: Tokenizer) -> list[torch.Tensor]:
    import torch

    text = beside("tinystories", "tinystories_sample.txt").read_text()
    parts = [s.strip() for s in text.split("<|endoftext|>") if s.strip()]
    return [torch.tensor([tokenizer.encode(s)[:256]]) for s in parts]


def _loss(model: Any, stories: list[torch.Tensor]) -> float:
    """Mean loss per token over all stories."""
    import torch

    with torch.no_grad():
        losses = [float(model(s, labels=s).loss) * (s.shape[1] - 1) for s in stories]
    return sum(losses) / sum(s.shape[1] - 1 for s in stories)


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


def _spectral_rows(result: Comparison) -> tuple[Row, ...]:
    def median(values: list[float | None]) -> float:
        return float(np.median([v for v in values if v is not None]))

    layers = result.layers
    changed = sum(layer.metrics["phase"][0] != layer.metrics["phase"][1] for layer in layers)
    alphas = [abs(b - a) for a, b in (layer.metrics["alpha"] for layer in layers) if a and b]
    return (
        Row("median relative change of a layer, %", None, 100 * median([x.relative_change for x in layers])),
        Row(
            "median distance of spectra (log-eigenvalue)",
            "barely noticeable",
            median([x.spectral_distance for x in layers]),
        ),
        Row("median change of alpha", "barely noticeable", float(np.median(alphas))),
        Row("median stable rank of the updates", None, median([x.update_stable_rank for x in layers])),
        Row("layers whose phase changed", "none", f"{changed} of {len(layers)}"),
    )


def _signal_share(eigenvalues: np.ndarray[Any, Any], edge: float | None) -> float | None:
    """Share of the squared weights in the directions above the bulk edge: of ``W = W_rand + Delta_sig``."""
    return None if edge is None else float(eigenvalues[eigenvalues > edge].sum() / eigenvalues.sum())


def _last(name: str) -> str:
    return ".".join(name.split(".")[-3:])


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
