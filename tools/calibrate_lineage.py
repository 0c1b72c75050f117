"""Error rates of ``lineage`` on independently trained networks, as ``docs/lineage.md`` states them.

    python tools/calibrate_lineage.py [--pairs 100] [--steps 300] [--seed 0]

Networks of several shapes are trained independently on the digits and on Fashion-MNIST (14 x 14 pixels), all of one
shape at once; disjoint pairs of them are tested. The rows of the table are the shapes, with the share of p-values at or
below 1, 5 and 10 %, and with the same for the null of random permutations alone, which networks trained on one task do
not meet. The last column is the smallest one-sided binomial p-value of the three shares: a valid test keeps it above
0.001. The five SpliceAI networks, trained independently by their authors, give ten further pairs that overlap.
"""

from __future__ import annotations

import argparse
from itertools import combinations, pairwise

import numpy as np
import torch
from scipy.stats import binomtest
from sklearn.datasets import load_digits

import strati
from strati.comparison.independence import chains, compare_chains, log_tail, pooled_pvalue
from strati_reproductions.zoo.fetch import path as zoo_path

SHAPES = {
    "digits": ((64, 32, 10), (64, 128, 10), (64, 64, 64, 10), (64, 16, 16, 16, 10), (64, 48, 48, 10)),
    "fashion": ((196, 64, 10), (196, 64, 64, 10)),
}
LEVELS = (0.01, 0.05, 0.1)


def examples(task: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and classes of a task."""
    if task == "digits":
        digits = load_digits()
        return torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    with np.load(zoo_path("fashion-mnist")) as arrays:
        pixels = torch.tensor(arrays["x_train"][:20_000] / 255, dtype=torch.float32)
        classes = torch.tensor(arrays["y_train"][:20_000], dtype=torch.int64)
    return torch.nn.functional.avg_pool2d(pixels[:, None], 2).flatten(1), classes


def trained(
    task: str, many: int, widths: tuple[int, ...], steps: int, seed: int
) -> list[dict[str, np.ndarray]]:
    """Networks with ReLU and biases, trained by Adam on batches that they share."""
    inputs, classes = examples(task)
    generator = torch.Generator().manual_seed(seed)

    def uniform(rows: int, columns: int, bound: float) -> torch.Tensor:
        return ((2 * torch.rand(many, rows, columns, generator=generator) - 1) * bound).requires_grad_()

    layers = [(uniform(o, i, i**-0.5), uniform(o, 1, i**-0.5)) for i, o in pairwise(widths)]
    optimiser = torch.optim.Adam([tensor for layer in layers for tensor in layer], lr=3e-3)
    for _ in range(steps):
        rows = torch.randint(len(inputs), (64,), generator=generator)
        hidden = inputs[rows].T.expand(many, -1, -1)
        for n, (weight, bias) in enumerate(layers):
            hidden = torch.baddbmm(bias, weight, hidden)
            hidden = torch.relu(hidden) if n < len(layers) - 1 else hidden
        logits = hidden.transpose(1, 2).reshape(-1, widths[-1])
        loss = torch.nn.functional.cross_entropy(logits, classes[rows].repeat(many), reduction="sum")
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return [
        {f"{2 * n}.weight": weight[m].detach().numpy() for n, (weight, _) in enumerate(layers)}
        for m in range(many)
    ]


def row(name: str, pvalues: np.ndarray, plain: np.ndarray | None) -> str:
    """One line of the table."""
    counts = [int((pvalues <= level).sum()) for level in LEVELS]
    shares = [f"{100 * count / pvalues.size:.1f} %" for count in counts]
    naive = "" if plain is None else f"{100 * float((plain <= LEVELS[0]).mean()):.0f} %"
    tests = [
        float(binomtest(count, pvalues.size, level, alternative="greater").pvalue)
        for count, level in zip(counts, LEVELS, strict=True)
    ]
    return f"| {name} | {pvalues.size} | {' | '.join(shares)} | {naive} | {min(tests):.2g} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print("| networks | pairs | p <= 1 % | p <= 5 % | p <= 10 % | permutations alone, 1 % | binomial |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    pooled: list[float] = []
    for task, shapes in SHAPES.items():
        for shape in shapes:
            networks = trained(task, 2 * options.pairs, shape, options.steps, options.seed)
            units = [chains(strati.open(network))[0] for network in networks]
            compared = [compare_chains(a, b) for a, b in zip(units[::2], units[1::2], strict=True)]
            pvalues = np.array([pooled_pvalue(blocks) for blocks in compared])
            plain = np.exp(
                [log_tail([(b.units, b.among) for b in bs], sum(b.agreeing for b in bs)) for bs in compared]
            )
            pooled += pvalues.tolist()
            print(row(f"{task}, {'-'.join(map(str, shape))}", pvalues, plain), flush=True)
    print(row("all", np.array(pooled), None))
    splice = [strati.open(path) for path in sorted(zoo_path("spliceai").glob("*.h5"))]
    values = [strati.lineage(a, b).pairs[0].pvalue for a, b in combinations(splice, 2)]
    print(row("SpliceAI, every two", np.array([value for value in values if value is not None]), None))


if __name__ == "__main__":
    main()
