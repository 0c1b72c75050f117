"""Do modules come apart where there are some, and only there? Networks of known making, seeds not tuned on.

Run: ``python benchmarks/bench_modules.py`` (some minutes; ``--quick`` fewer seeds). Two disjoint halves, hidden by
mixing every layer's activations: how often exactly two modules are found and how often one holds directions of both
halves. And networks of one piece: how often they are left whole.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

import torch
from torch import nn

import strati

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "landscape"))
from halves import SHAPES, dense, mixed, true_halves, two_halves

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
                    found = strati.modules(graph, cutoff)
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
                left += len(strati.modules(graph, cutoff).modules) == 1
                total += 1
    print(f"random networks of one piece: left whole in {left} of {total}")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--quick", action="store_true")
    count = 2 if options.parse_args().quick else 8
    torch.set_num_threads(1)
    start = time.process_time()
    halves(range(9000, 9000 + count), product=True)
    whole(range(9000, 9000 + count))
    halves(range(9000, 9000 + count // 2), product=False)
    print(f"{time.process_time() - start:.0f} CPU s")


if __name__ == "__main__":
    main()
