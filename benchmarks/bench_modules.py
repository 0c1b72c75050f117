"""Do modules come apart where there are some, and only there? Networks of known making, seeds not tuned on.

Run: ``python benchmarks/bench_modules.py`` (some minutes; ``--quick`` fewer seeds). Two disjoint halves, hidden by
mixing every layer's activations: how often exactly two modules are found and how often one holds directions of both
halves. Networks of one piece: how often they are left whole. And graphs of known modules with edges between them, and
of none: how often the number is right (``--graphs``: these only).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from torch import nn

import strati

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))
from halves import SHAPES, agreement, as_graph, dense, mixed, planted, true_halves, two_halves

FRESH = 70_000
"""First seed of the graphs: none that a threshold was chosen on."""
CUTOFFS = (None, 1e-2, 1e-4, 1e-8)
ACTIVATIONS = (nn.ReLU, nn.Tanh, nn.GELU, nn.LeakyReLU)


def halves(seeds: range, *, product: bool) -> None:
    print(
        f"two hidden halves, {'product data' if product else 'independent draws'}; cutoff default, 1e-2, 1e-4, 1e-8:"
    )
    for activation in ACTIVATIONS if product else ACTIVATIONS[:2]:
        counts: dict[float | None, Counter[int]] = {cutoff: Counter() for cutoff in CUTOFFS}
        wrong = networks = 0
        for seed in seeds:
            for widths, other in SHAPES:
                condition = (10, 30, 100, 1000)[seed % 4]
                net, x, start = two_halves(
                    seed, widths, other, activation=activation, condition=condition, draws=16, product=product
                )
                graph = strati.interaction_graph(
                    strati.interaction_basis(net, x, ("interaction", "local")[seed % 2])
                )
                truth = true_halves(graph, start, widths[0])
                networks += 1
                for cutoff in CUTOFFS:
                    found = strati.modules(graph, epsilon=cutoff)
                    counts[cutoff][len(found.modules)] += 1
                    wrong += mixed(found, truth) > 0 and len(found.modules) > 1
        two = ", ".join(f"{counts[c][2]}" for c in CUTOFFS)
        most = max(max(c) for c in counts.values())
        print(
            f"  {activation.__name__:10s} exactly two in {two} of {networks}; most {most}; a module of both halves in "
            f"{wrong} of the partitions",
            flush=True,
        )


def whole(seeds: range) -> None:
    left = total = 0
    for seed in seeds:
        for widths in ((12, 12, 12, 12), (8, 16, 4), (20, 40, 10), (10, 30, 30, 10)):
            graph = dense(seed, widths, ACTIVATIONS[seed % 4])
            for cutoff in CUTOFFS:
                left += len(strati.modules(graph, epsilon=cutoff).modules) == 1
                total += 1
    print(f"random networks of one piece: left whole in {left} of {total}")


def graphs(seeds: int, only: str = "") -> None:
    """Planted modules with edges between them (found, and how well), and lognormal strengths without any."""
    cases = {
        "4 modules of 4, 20 % of the edges between them": ([4] * 4, 0.2),
        "4 modules of 6, 20 %": ([6] * 4, 0.2),
        "modules of 3 and 7, 5 %": ([3, 7], 0.05),
        "modules of 4 and 12, 5 %": ([4, 12], 0.05),
        "modules of 2 and 8, 5 %": ([2, 8], 0.05),
    }
    for name, (sizes, cross) in cases.items():
        if only not in name:
            continue
        right, agreements = 0, []
        for seed in range(FRESH, FRESH + seeds):
            edges, truth = planted(seed, sizes, cross)
            labels = np.concatenate([np.array(row) for row in strati.modules(as_graph(edges)).labels])
            right += labels.max() + 1 == len(sizes)
            agreements.append(agreement(np.maximum(labels, 0), truth))
        print(
            f"{name}: found in {right} of {seeds}, adjusted Rand index {min(agreements):.2f} to {max(agreements):.2f}",
            flush=True,
        )
    for sigma in (1.0, 3.0):
        if only not in f"lognormal strengths (sigma {sigma:g})":
            continue
        false = [
            seed
            for seed in range(FRESH, FRESH + 2 * seeds)
            if len(strati.modules(as_graph(lognormal(seed, sigma))).modules) > 1
        ]
        print(
            f"lognormal strengths (sigma {sigma:g}), no modules: {len(false)} of {2 * seeds} with more than one"
        )


def lognormal(seed: int, sigma: float) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    size = (6, 10, 16)[seed % 3]
    return [rng.lognormal(0, sigma, (size, size)) for _ in range(3)]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--quick", action="store_true")
    options.add_argument("--graphs", action="store_true", help="Only graphs of known making.")
    options.add_argument("--seeds", type=int, help="Graphs of each kind (twice as many without modules).")
    options.add_argument("--only", default="", help="Only graphs whose name holds this text.")
    chosen = options.parse_args()
    count = 2 if chosen.quick else 8
    torch.set_num_threads(1)
    start = time.process_time()
    graphs(chosen.seeds or (5 if chosen.quick else 20), chosen.only)
    if chosen.graphs:
        print(f"{time.process_time() - start:.0f} CPU s")
        return
    halves(range(9000, 9000 + count), product=True)
    whole(range(9000, 9000 + count))
    halves(range(9000, 9000 + count // 2), product=False)
    print(f"{time.process_time() - start:.0f} CPU s")


if __name__ == "__main__":
    main()
