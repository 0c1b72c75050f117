"""The papers' own questions over time: quasi-null eigenvalues, 100 checkpoints, effective parameters by scale."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.core.results import Tick
from strati.core.rng import derive
from strati_reproductions.checkpointed_training import Training, spaced, step_of, trained
from strati_reproductions.handwriting import digits, mnist
from strati_reproductions.registry import Reproduction, Row
from strati_reproductions.step_pictures import over_steps

if TYPE_CHECKING:
    import torch
    from torch import nn

    from strati.tracking.track import Track


def quasi_null_training(*, quick: bool, seed: int, folder: Path, tick: Tick) -> Reproduction:
    """Train a Llama on Shakespeare and count the eigenvalues below the random bulk at every checkpoint."""
    from strati.tracking.track import track
    from strati_reproductions.dropped_transformer.training import Trainee, causal_batches, initial

    trainee = Trainee("llama", 2, 128, 0.1, seed) if quick else Trainee("llama", 4, 256, 0.1, seed)
    steps, count = (200, 9) if quick else (2000, 24)
    model = initial(trainee)

    def loss(network: nn.Module, step: int) -> torch.Tensor:
        batch = next(causal_batches(derive(seed, "batch", step)))
        found: torch.Tensor = network(**batch).loss
        return found

    name = f"{trainee.name}-{steps}"
    plan = Training(steps, spaced(steps, count), rate=1e-3, decay=trainee.decay, warmup=20, clip=1.0)
    paths = trained(folder / name, model, loss, plan, tick=tick)
    found = track(paths, out=folder / f"followed-{name}", what="spectra", seed=seed, tick=tick)
    shares = _shares(found, {n: min(p.shape) for n, p in model.named_parameters() if p.ndim == 2})
    rows = [
        Row(
            f"quasi-null eigenvalues, {kind}: at step 0 / at the end",
            "none in noise / 1 to 6 % in trained transformers",
            f"{values[0]:.2%} / {values[-1]:.2%}",
            f"largest {max(values):.2%} at step {found.steps[int(np.argmax(values))]:.0f}; {_trend(values)}",
        )
        for kind, values in shares.items()
    ]
    rows.append(_size(model, f"{steps} steps of AdamW, decay {trainee.decay:g}, {len(paths)} checkpoints"))
    picture = over_steps(
        folder,
        "quasi-null-training",
        [
            {
                "title": "quasi-null share",
                "lines": [(kind, found.steps, values) for kind, values in shares.items()],
            }
        ],
        title="quasi-null eigenvalues over a transformer's training",
    )
    title = "Quasi-null eigenvalues over a transformer's training"
    see = "Share of eigenvalues too small for the bulk at each checkpoint, one line per kind of matrix."
    return Reproduction(
        "quasi-null-training", title, tuple(rows), picture, captions={"quasi-null-training": see}
    )


def fcn_checkpoints(*, quick: bool, seed: int, folder: Path, tick: Tick) -> Reproduction:
    """100 checkpoints of a fully connected network on MNIST (quick: 20 on the digits), followed by their spectra."""
    from strati.tracking.track import track

    count = 20 if quick else 100
    name, paths = mlp_run(folder, seed=seed, quick=quick, count=count, batch=64, tick=tick)
    found = track(paths, out=folder / f"followed-{name}", what="spectra", seed=seed, tick=tick)
    rows = []
    for layer in dict.fromkeys(s.layer for s in found.curves):
        for what in ("stable_rank", "spikes", "alpha"):
            curve = next(s for s in found.curves if s.layer == layer and s.what == what)
            known = [v for v in curve.values if v is not None]
            changes = [c for c in found.breaks if c["layer"] == layer and c["what"] == what]
            shown = "; ".join(
                f"step {c['step']:.0f} [{c['low']:.0f}, {c['high']:.0f}], p {c['pvalue']:.1g}"
                for c in changes
            )
            ends = f"from {known[0]:.3g} to {known[-1]:.3g}" if known else "undefined"
            rows.append(Row(f"{layer}: changes of {what}", None, shown or "none", ends))
    rows += _phase_rows(paths, every=1 if quick else 4)
    note = f"{count} wanted, evenly in the logarithm of the step: the first fall together; {len(found.failed)} failed"
    rows.append(Row("checkpoints followed", None, float(len(paths)), note))
    kept = [s for s in found.curves if s.what in ("stable_rank", "spikes")]
    picture = over_steps(
        folder,
        f"fcn-checkpoints-{name}",
        [
            {"title": what, "lines": [(s.layer, found.steps, s.values) for s in kept if s.what == what]}
            for what in ("stable_rank", "spikes")
        ],
        title="spectra of a fully connected network over training",
    )
    title = "Spectra of 100 checkpoints of an FCN"
    see = (
        "Above the stable rank of every layer over the steps of training, "
        "below how many eigenvalues lie beyond the edge."
    )
    return Reproduction("fcn-checkpoints", title, tuple(rows), picture, captions={"fcn-checkpoints": see})


def _phase_rows(paths: tuple[Path, ...], every: int) -> list[Row]:
    """The phases of each layer in the order in which they first appear, and the last one."""
    from strati.spectra.scan import scan

    seen: dict[str, dict[str, int]] = {}
    last: dict[str, str] = {}
    some = sorted({*paths[::every], paths[-1]}, key=step_of)
    for path in some:
        for layer in scan(path).to_dict()["layers"]:
            phase = layer["phase"] or "unknown"
            seen.setdefault(layer["name"], {}).setdefault(phase, step_of(path))
            last[layer["name"]] = phase
    claim = "random-like, bleeding-out, bulk+spikes, bulk-decay, heavy-tailed"
    return [
        Row(
            f"{name}: phases in the order of their first step",
            claim,
            ", ".join(f"{phase} ({step})" for phase, step in phases.items()),
            f"{last[name]} at the end; {len(some)} checkpoints looked at",
        )
        for name, phases in seen.items()
    ]


def effective_parameters_over_training(*, quick: bool, seed: int, folder: Path, tick: Tick) -> Reproduction:
    """``N_eff(eps)`` of a small network on three of the digits, at several checkpoints and scales."""
    import torch

    from strati.tracking.track import track

    x, y = _few_components(3)  # a larger network has valleys too narrow to be sampled at most scales
    torch.manual_seed(derive(seed, "scales"))
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3))

    def loss(network: nn.Module, step: int) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(network(x), y)

    steps, count = (300, 3) if quick else (3000, 10)
    paths = trained(
        folder / f"3-4-3-steps-{steps}",
        model,
        loss,
        Training(steps, spaced(steps, count), rate=1e-2),
        tick=tick,
    )
    scales = (1e-4, 1e-2, 1.0) if quick else (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
    found = track(
        paths,
        data=x[:60],
        model=model,
        out=folder / f"followed-3-4-3-{steps}",
        what="scales",
        scales=scales,
        seed=seed,
        tick=tick,
    )
    table = {s.what: s for s in found.curves}
    rows = []
    total = sum(p.numel() for p in model.parameters())
    for place, path in enumerate(paths):
        values = [table[f"effective_parameters[{scale:g}]"].values[place] for scale in scales]
        known = [v for v in values if v is not None]
        shown = ", ".join("-" if v is None else f"{v:.1f}" for v in values)
        note = f"of {total} parameters; {_with_scale(known, len(values))}"
        names = ", ".join(f"{scale:g}" for scale in scales)
        rows.append(Row(f"step {step_of(path)}: N_eff at eps {names}", "falls with eps", shown, note))
    lines = [
        (f"{scale:g}", found.steps, table[f"effective_parameters[{scale:g}]"].values) for scale in scales
    ]
    picture = over_steps(
        folder,
        f"effective-parameters-{steps}",
        [{"title": "N_eff(eps)", "lines": lines}],
        title="effective parameters over training, by loss scale",
    )
    title = "Effective parameters over training: N_eff(eps)"
    see = "Effective parameters at each checkpoint, one line per loss scale; a line further down is a larger scale."
    return Reproduction(
        "effective-parameters-over-training",
        title,
        tuple(rows),
        picture,
        captions={"effective-parameters": see},
    )


def _with_scale(known: list[float], scales: int) -> str:
    """Whether the effective parameters fall with the scale, as far as they are known."""
    refused = f"refused at {scales - len(known)} of {scales} scales, where chains do not mix"
    if len(known) < 2:
        return refused
    course = "falls" if known[-1] < known[0] else "rises"
    return f"{course} with the scale" + (f"; {refused}" if len(known) < scales else "")


def mlp_run(
    folder: Path, *, seed: int, quick: bool, count: int, batch: int, tick: Tick
) -> tuple[str, tuple[Path, ...]]:
    """A fully connected network on the digits (quick) or MNIST, resumable: a name and its checkpoints."""
    import torch

    data = digits() if quick else mnist()
    widths = (64, 96, 64, 10) if quick else (784, 512, 512, 512, 10)
    torch.manual_seed(seed)
    parts: list[nn.Module] = []
    for a, b in pairwise(widths):
        parts += [torch.nn.Linear(a, b), torch.nn.ReLU()]
    model = torch.nn.Sequential(*parts[:-1])
    last = (40 if quick else 8) * (len(data.y) // batch)

    def loss(network: nn.Module, step: int) -> torch.Tensor:
        chance = torch.Generator().manual_seed(derive(seed, "mlp", batch, step))
        picked = torch.randint(len(data.y), (batch,), generator=chance)
        return torch.nn.functional.cross_entropy(network(data.x[picked]), data.y[picked])

    name = f"{'digits' if quick else 'mnist'}-batch-{batch}-{count}"
    plan = Training(last, spaced(last, count), rate=1e-3)
    return name, trained(folder / name, model, loss, plan, tick=tick)


def _shares(found: Track, sizes: dict[str, int]) -> dict[str, list[float]]:
    """Quasi-null eigenvalues over all, by kind of layer."""
    kinds = {"attention": ("_proj",), "MLP": ("mlp",), "embeddings": ("embed", "lm_head")}
    curves = {s.layer: s.values for s in found.curves if s.what == "quasi_null" and s.layer in sizes}
    shares = {}
    for kind, words in kinds.items():
        own = [
            n for n in curves if n and any(w in n for w in words) and (kind != "attention" or "mlp" not in n)
        ]
        total = sum(sizes[n] for n in own)
        if total:
            shares[kind] = [sum(curves[n][k] or 0.0 for n in own) / total for k in range(len(found.steps))]
    return shares


def _trend(values: list[float]) -> str:
    if max(values) == min(values):
        return "does not change"
    return "rises" if values[-1] > values[0] else "falls" if values[-1] < values[0] else "comes and goes"


def _size(model: Any, note: str) -> Row:
    return Row("parameters", None, float(sum(p.numel() for p in model.parameters())), note)


def _few_components(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Three of the digits, by their first principal components of unit size."""
    import torch

    data = digits()
    chosen = data.y < 3
    x = data.x[chosen].float()
    x = x - x.mean(0)
    u, _, _ = torch.linalg.svd(x, full_matrices=False)
    return u[:, :count] * len(x) ** 0.5, data.y[chosen].long()
