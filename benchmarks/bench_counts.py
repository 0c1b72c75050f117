"""Counts of free directions: time for the width and data asked for, growth in both, and how often they are right.

Run: ``python benchmarks/bench_counts.py`` (``--quick`` leaves the largest sizes out). Times are CPU seconds, best of
the repetitions; ratios are of one run.
"""

from __future__ import annotations

import argparse
import sys
import time
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn

import strati

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "landscape" / "counts"))
from degenerate_nets import exact_free, mlp, random_network
from precise import precise_free
from test_networks import CASES

FRESH = 80_000
"""First seed of the networks held against many digits: none that a threshold was chosen on."""
ACTIVATIONS = (nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.ReLU)


def network(width: int, depth: int = 5, inputs: int = 784, outputs: int = 10) -> nn.Module:
    torch.manual_seed(0)
    parts: list[nn.Module] = []
    for a, b in pairwise([inputs, *[width] * depth, outputs]):
        parts += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*parts[:-1])


def timed(width: int, data: int, repeats: int) -> tuple[float, float, int]:
    """CPU seconds, wall seconds and the structural count, best of some repetitions."""
    model, x = network(width), torch.randn(data, 784, generator=torch.Generator().manual_seed(1))
    best = (float("inf"), float("inf"), 0)
    for _ in range(repeats):
        cpu, wall = time.process_time(), time.perf_counter()
        result = strati.degeneracy(model, x, exact=False)
        best = min(
            best,
            (time.process_time() - cpu, time.perf_counter() - wall, result.free - result.free_from_few_data),
        )
    return best


def accuracy(networks: int) -> None:
    right = over = missing = total = 0
    for seed in range(networks):
        model, x, _ = random_network(seed)
        count, truth = strati.degeneracy(model, x, exact=False).free, exact_free(model, x)
        right, over = right + (count == truth), over + (count > truth)
        missing, total = missing + truth - count, total + truth
    print(f"structure alone against the exact rank on {networks} random networks:")
    print(f"  right {100 * right / networks:.1f} %, above the exact count {over}, "
          f"free directions found {100 * (1 - missing / total):.2f} %")  # fmt: skip


def other_networks(seeds: int) -> None:
    """Skips, convolutions, norms and attention: what structure finds of what is free."""
    print(f"networks that are no chains, {seeds} seeds each: share of the free directions found by structure")
    for name, (make, shape, _) in CASES.items():
        shares, over, open_ = [], 0, 0
        for seed in range(seeds):
            torch.manual_seed(seed)
            model = make().double().eval()
            x = torch.randn(120, *shape, dtype=torch.float64)
            result = strati.degeneracy(model, x)
            shares.append(result.structural_free / max(1, result.free_at_most))
            over += result.structural_free > result.free_at_most
            open_ += result.method != "exact"
        print(
            f"  {name:14s} {100 * min(shares):.0f} to {100 * max(shares):.0f} %, above {over}, rank open {open_}"
        )


def against_many_digits(seeds: int) -> None:
    """Narrow smooth networks, and networks with one input scaled by 1e5 to 1e8, against 60-digit arithmetic."""
    print(f"against 60-digit arithmetic, {seeds} seeds each (tanh, sigmoid, GELU, SiLU, ReLU in turn):")
    widths = {"1-4-1": [1, 4, 1], "1-6-1": [1, 6, 1], "1-3-3-1": [1, 3, 3, 1], "2-4-2": [2, 4, 2]}
    cases = {name: (shape, 0.0) for name, shape in widths.items()}
    cases |= {f"3-4-2, one input times 1e{power:g}": ([3, 4, 2], power) for power in (5.0, 6.0, 7.0, 8.0)}
    for name, (shape, power) in cases.items():
        exact = wrong = above = inside = 0
        for seed in range(FRESH, FRESH + seeds):
            act = ACTIVATIONS[seed % len(ACTIVATIONS)]
            model = mlp(shape, bias=True, act=act, seed=seed)
            x = torch.randn(24, shape[0], generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            x[:, 0] *= 10.0**power
            result, truth = strati.degeneracy(model, x), precise_free(model, x, act)
            exact += result.method == "exact"
            wrong += result.method == "exact" and result.free != truth
            above += max(result.structural_free, strati.degeneracy(model, x, exact=False).free) > truth
            inside += result.structural_free <= truth <= (result.free_at_most or 0)
        print(
            f"  {name:30s} called exact {exact}, of them wrong {wrong}; lower bound above the truth {above}; "
            f"truth inside the range {inside}",
            flush=True,
        )


def deep(data: int = 1_000) -> None:
    torch.manual_seed(0)
    model, x = network(200, depth=7), torch.randn(data, 784)
    cpu, wall = time.process_time(), time.perf_counter()
    strati.degeneracy(model, x)
    print(
        f"7 x 200 on {data:,} data: {time.process_time() - cpu:.1f} CPU s, {time.perf_counter() - wall:.1f} s wall"
    )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--quick", action="store_true")
    options.add_argument(
        "--digits", action="store_true", help="Only hold counts against 60-digit arithmetic."
    )
    chosen = options.parse_args()
    quick = chosen.quick
    repeats = 1 if quick else 2
    against_many_digits(5 if quick else 15)
    if chosen.digits:
        return
    accuracy(100 if quick else 300)
    other_networks(3 if quick else 10)
    deep()
    print("FCN 784-5x width-10, structural counts; CPU s / wall s")
    widths = (64, 128, 256) if quick else (64, 128, 256, 512)
    data = 2_000 if quick else 10_000
    before = None
    for width in widths:
        cpu, wall, free = timed(width, data, repeats)
        growth = "" if before is None else f"  x{cpu / before:.2f} for twice the width"
        print(
            f"  width {width:4d}, {data:6,} data: {cpu:7.2f} / {wall:6.2f}  free in layers {free:,}{growth}"
        )
        before = cpu
    before = None
    for n in (1_000, 2_000, 4_000) if quick else (2_500, 5_000, 10_000):
        cpu, wall, _ = timed(widths[-1], n, repeats)
        growth = "" if before is None else f"  x{cpu / before:.2f} for twice the data"
        print(f"  width {widths[-1]:4d}, {n:6,} data: {cpu:7.2f} / {wall:6.2f}{growth}")
        before = cpu


if __name__ == "__main__":
    main()
