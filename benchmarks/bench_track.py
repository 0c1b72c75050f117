"""What following a run costs: a Tracker inside a training loop, and the page of a long run.

    python benchmarks/bench_track.py [--only overhead|page|seconds]

``overhead``: wall and CPU time of the same training loop with a Tracker over that without, median of alternating
runs, for two networks. ``page``: size of the page of 500 checkpoints of 100 layers. ``seconds``: what a budget buys
on a GPT-2 of 140,000 parameters with 4 sequences, and where the time goes.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from itertools import pairwise
from pathlib import Path
from statistics import median

import numpy as np
import torch
from torch import nn

import strati


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=["overhead", "page", "seconds"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.only in (None, "overhead"):
        overhead()
    if options.only in (None, "page"):
        page()
    if options.only in (None, "seconds"):
        seconds()


def overhead(rounds: int = 5, steps: int = 600) -> None:
    """One loop with a Tracker and one without, in turns."""
    print(
        "Tracker(every=100), share 0.05: a training loop with it over the same without, median of 5 in turns"
    )
    for widths in ((64, 256, 256, 10), (784, 512, 512, 10)):
        loop(widths, 20, None)
        wall, cpu, done, skipped = [], [], 0, 0
        for _ in range(rounds):
            with tempfile.TemporaryDirectory() as folder:
                bare, (followed, tracker) = loop(widths, steps, None)[0], loop(widths, steps, folder)
                wall.append(followed[0] / bare[0])
                cpu.append(followed[1] / bare[1])
                done, skipped = tracker.done, tracker.skipped
        size = sum(a * b + b for a, b in pairwise(widths))
        print(
            f"  {size} parameters: CPU {median(cpu):.3f} ({min(cpu):.3f} to {max(cpu):.3f}), wall {median(wall):.3f} "
            f"({min(wall):.3f} to {max(wall):.3f}); {done} scans, {skipped} skipped"
        )


def loop(
    widths: tuple[int, ...], steps: int, folder: str | None
) -> tuple[tuple[float, float], strati.Tracker | None]:
    torch.manual_seed(0)
    parts: list[nn.Module] = []
    for a, b in pairwise(widths):
        parts += [nn.Linear(a, b), nn.ReLU()]
    model = nn.Sequential(*parts[:-1])
    x, y = torch.randn(128, widths[0]), torch.randint(10, (128,))
    optimiser = torch.optim.Adam(model.parameters())
    tracker = None if folder is None else strati.Tracker(model, every=100, out=folder)
    start, used = time.perf_counter(), time.process_time()
    for step in range(steps):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimiser.step()
        if tracker is not None:
            tracker.step(step)
    spent = time.perf_counter() - start, time.process_time() - used
    if tracker is not None:
        tracker.close()
    return spent, tracker


def run_of(checkpoints: int, layers: int) -> dict:
    """A made run of that size, as ``track`` gives it."""
    rng = np.random.default_rng(0)
    metrics = ("alpha", "stable_rank", "entropy", "spectral_norm", "frobenius_norm", "spikes", "quasi_null")
    names = [f"model.layers.{k // 4}.block.{k % 4}.weight" for k in range(layers)]
    series = [
        {
            "what": what,
            "layer": name,
            "values": [float(f"{v:.6g}") for v in np.cumsum(rng.normal(size=checkpoints)) + 50],
            "stderr": [None] * checkpoints,
        }
        for what in metrics
        for name in names
    ]
    llc = np.cumsum(rng.normal(size=checkpoints)) + 40
    series.append({"what": "llc", "layer": None, "values": llc.tolist(), "stderr": [0.5] * checkpoints})
    changes = [
        {"what": m, "layer": n, "step": 2000.0, "low": 1500.0, "high": 2500.0, "pvalue": 1e-3}
        for m in metrics[:3]
        for n in names
    ]
    spectra = [
        {"layer": n, "values": np.sort(rng.normal(0, 80, (checkpoints, 24)).round().astype(int), 1).tolist()}
        for n in names
    ]
    return {
        "schema": "strati.track/1",
        "strati": strati.__version__,
        "steps": [100.0 * k for k in range(checkpoints)],
        "series": series,
        "changes": changes,
        "settings": {},
        "failed": [],
        "warnings": [],
        "spectra": {"unit": 100, "ranks": [round(k / 23, 4) for k in range(24)], "layers": spectra},
    }


def page() -> None:
    from strati.report.page import build_page

    start = time.process_time()
    text = build_page([run_of(500, 100)])
    spent = time.process_time() - start
    size = len(text.encode()) / 1e6
    print(f"page of 500 checkpoints of 100 layers: {size:.1f} MB, made in {spent:.1f} s of CPU")


def seconds() -> None:
    import transformers

    from strati.landscape.llc.llc import llc

    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=4)
    model = transformers.GPT2LMHeadModel(config).eval()
    ids = torch.randint(256, (4, 64))
    size = sum(p.numel() for p in model.parameters())
    print(f"GPT-2 of {size} parameters, 4 sequences of 64 tokens, behavioural-kl")
    from strati.landscape.objective import objective

    function = objective(model, "behavioural-kl", ids)
    theta = function.flat.theta.clone().requires_grad_(True)
    start = time.process_time()
    for _ in range(10):
        torch.autograd.grad(function(theta), theta)
    gradient = (time.process_time() - start) / 10
    print(f"  one gradient over the data: {1e3 * gradient:.1f} ms of CPU")
    for budget in (5.0, 20.0):
        start = time.process_time()
        found = llc(model, "behavioural-kl", ids, seconds=budget)
        spent = time.process_time() - start
        used = found.traces.gradients
        shown = "none" if found.estimate is None else f"{found.estimate:.4g} +- {found.stderr:.2g}"
        print(
            f"  --seconds {budget:g}: {shown}, {spent:.0f} s of CPU, {used} gradients "
            f"({used * gradient / spent:.0%} of the time), R-hat {found.rhat}, reason {found.reason}"
        )
        with tempfile.TemporaryDirectory() as folder:
            state = {k: v.clone() for k, v in model.state_dict().items()}
            start = time.process_time()
            run = strati.track(
                [state, state],
                data=ids,
                model=model,
                what="llc",
                loss="behavioural-kl",
                seconds=budget,
                out=Path(folder),
            )
            spent = (time.process_time() - start) / 2
            level = next(s for s in run.curves if s.what == "llc")
            value, error = level.values[0], level.stderr[0]
            shown = "refused" if value is None else f"{value:.4g} +- {error:.2g}"
            draws = run.settings["draws"]
            print(
                f"  track --seconds {budget:g}: {shown}, {spent:.0f} s of CPU a checkpoint, {draws} draws a chain"
            )


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
