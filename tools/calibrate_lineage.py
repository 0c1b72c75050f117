"""Error rates of ``lineage``, as ``docs/lineage.md`` states them.

    python tools/calibrate_lineage.py [--pairs 100] [--steps 300] [--seed 0]

Networks of several shapes are trained independently on the digits, all of one shape at once. Of disjoint pairs the
share of p-values at or below 1, 5 and 10 % is printed, for the test as it is and for the null of random permutations
alone, which networks trained on one task do not meet.
"""

from __future__ import annotations

import argparse
from itertools import pairwise

import numpy as np
import torch
from sklearn.datasets import load_digits

import strati
from strati.comparison.hidden_units import chains
from strati.comparison.independence import compare_chains, log_tail, pooled_pvalue

SHAPES = ((64, 32, 10), (64, 128, 10), (64, 64, 64, 10), (64, 16, 16, 16, 10), (64, 48, 48, 10))
LEVELS = (0.01, 0.05, 0.1)


def trained(many: int, widths: tuple[int, ...], steps: int, seed: int) -> list[dict[str, np.ndarray]]:
    """Networks with ReLU and biases, trained by Adam on batches that they share."""
    digits = load_digits()
    inputs, classes = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
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


def main() -> None:
    """Print a row for every shape."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    pooled: list[float] = []
    for shape in SHAPES:
        networks = trained(2 * chosen.pairs, shape, chosen.steps, chosen.seed)
        units = [chains(strati.open(network))[0] for network in networks]
        compared = [compare_chains(a, b) for a, b in zip(units[::2], units[1::2], strict=True)]
        pvalues = np.array([pooled_pvalue(blocks) for blocks in compared])
        plain = np.exp(
            [log_tail([(b.units, b.among) for b in bs], sum(b.agreeing for b in bs)) for bs in compared]
        )
        pooled += pvalues.tolist()
        shares, naive = ([float((p <= level).mean()) for level in LEVELS] for p in (pvalues, plain))
        print(f"{shape}: {chosen.pairs} pairs, P(p <= {LEVELS}) = {shares}, random permutations {naive}")
    shares = [float((np.array(pooled) <= level).mean()) for level in LEVELS]
    print(f"all: {len(pooled)} pairs, P(p <= {LEVELS}) = {shares}, smallest {min(pooled):.2g}")


if __name__ == "__main__":
    main()
