"""Bayesian influence on the embedded digits: does it find wrong labels, and does it predict retraining?

    .venv/bin/python benchmarks/bench_influence.py [labels] [retraining] [memory]

``labels``: a network is trained on 200 digits of which every tenth has a wrong label. Rows are ranked by self-influence
``Var(l_i)``, by their loss and by the norm of their gradient, at the end of training and early in it; the table holds
the area under the curve. ``retraining``: networks are trained on random halves of 200 digits, and the loss on other
rows is compared with the sum of influences of the rows that were left out (linear datamodelling score: the rank
correlation over halves, averaged over queries), beside the sum of inner products of gradients. ``memory``: the peak
memory of susceptibilities to a million rows, above that of the data, at two numbers of draws, each in its own process.
"""

from __future__ import annotations

import subprocess
import sys
import time

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import nn
from torch.nn import functional

import strati
from strati.landscape.objective import FlatModel

SEED = 0
SAMPLING = {"seed": SEED, "chains": 8, "draws": 100}


def digits(rows: int, start: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of the embedded digits in a random order."""
    arrays = np.load(strati.embedded.path("digits.npz"))
    order = np.random.default_rng(SEED).permutation(len(arrays["x"]))[start : start + rows]
    return torch.tensor(arrays["x"][order], dtype=torch.float32), torch.tensor(arrays["y"][order]).long()


def trained(x: torch.Tensor, y: torch.Tensor, steps: int, seed: int = SEED) -> nn.Module:
    """A network of 64-16-10 units after so many steps of Adam over all rows."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(x.shape[1], 16), nn.ReLU(), nn.Linear(16, 10))
    optimiser = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=1e-4)
    for _ in range(steps):
        optimiser.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimiser.step()
    return model.eval()


def row_gradients(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Gradient of each row's loss in all parameters, ``(rows, parameters)``."""
    flat = FlatModel(model)

    def loss(theta: torch.Tensor, row: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(flat(theta, row[None]), label[None])

    return torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(flat.theta, x, y)


def area(scores: np.ndarray, wrong: np.ndarray) -> float:
    """Chance that a row with a wrong label has a larger score than one with a right label."""
    high, low = scores[wrong], scores[~wrong]
    return float(((high[:, None] > low) + 0.5 * (high[:, None] == low)).mean())


def wrong_labels(rows: int = 200, seed: int = SEED) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    """Digits of which every tenth has a wrong label, and which these are."""
    x, y = digits(rows)
    rng = np.random.default_rng(seed)
    wrong = np.zeros(rows, dtype=bool)
    wrong[rng.choice(rows, rows // 10, replace=False)] = True
    shift = torch.tensor(rng.integers(1, 10, rows))
    return x, torch.where(torch.tensor(wrong), (y + shift) % 10, y), wrong


def labels() -> None:
    """Print the areas under the curve."""
    x, y, wrong = wrong_labels()
    print(f"{len(x)} digits, {wrong.sum()} wrong labels: area under the curve")
    print(
        f"{'steps':>5} {'loss':>8} {'self-influence':>15} {'loss of row':>12} {'gradient norm':>14} {'CPU s':>6}"
    )
    for steps in (50, 200, 1000):
        model = trained(x, y, steps)
        began = time.process_time()
        result = strati.influence(model, "cross_entropy", (x, y), **SAMPLING)
        seconds = time.process_time() - began
        with torch.no_grad():
            losses = functional.cross_entropy(model(x), y, reduction="none").numpy()
        norms = row_gradients(model, x, y).norm(dim=1).numpy()
        own = np.nan_to_num(np.diag(result.values))
        areas = [area(scores, wrong) for scores in (own, losses, norms)]
        print(
            f"{steps:>5} {losses.mean():>8.3f} {areas[0]:>15.3f} {areas[1]:>12.3f} {areas[2]:>14.3f} {seconds:>6.0f}",
            flush=True,
        )


def retraining(
    rows: int = 200, queries: int = 40, halves: int = 40, repeats: int = 3, steps: int = 300
) -> None:
    """Print linear datamodelling scores."""
    (x, y), (u, v) = digits(rows), digits(queries, start=rows)
    rng = np.random.default_rng(SEED)
    members = np.array([rng.permutation(rows) < rows // 2 for _ in range(halves)])
    losses = np.zeros((halves, queries))
    for number, half in enumerate(members):
        for repeat in range(repeats):
            model = trained(x[half], y[half], steps, seed=repeat)
            with torch.no_grad():
                losses[number] += functional.cross_entropy(model(u), v, reduction="none").numpy() / repeats
    scores: dict[str, list[np.ndarray]] = {"Bayesian influence": [], "inner product of gradients": []}
    for repeat in range(repeats):
        model = trained(x, y, steps, seed=repeat)
        result = strati.influence(model, "cross_entropy", (x, y), queries=(u, v), **SAMPLING)
        scores["Bayesian influence"].append(np.nan_to_num(result.values))
        products = row_gradients(model, u, v) @ row_gradients(model, x, y).T
        scores["inner product of gradients"].append(products.numpy())
    print(f"{halves} networks x {repeats} seeds, each on half of {rows} digits: linear datamodelling score")
    for name, matrices in scores.items():
        predicted = (
            -members.astype(float) @ np.mean(matrices, axis=0).T
        )  # a row that helps lowers the loss where it was kept
        ranks = np.array([spearmanr(predicted[:, q], losses[:, q]).statistic for q in range(queries)])
        error = ranks.std(ddof=1) / np.sqrt(queries)
        print(f"{name:>28}: {ranks.mean():.3f} +- {error:.3f}")


MEMORY = """
import resource, sys, warnings
warnings.simplefilter("ignore")
import torch, strati
torch.manual_seed(0)
rows, draws = 1_000_000, int(sys.argv[1])
model, x = torch.nn.Linear(2, 1), torch.randn(rows, 2)
settings = {"sampler": "sgld", "batch": 100_000, "chains": 4, "nbeta": 100.0, "gamma": 1.0, "max_rhat": 1e9}
strati.influence(model, "behavioural-mse", x[:1000], kind="susceptibility", **settings | {"batch": 100, "draws": 8})
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
strati.influence(model, "behavioural-mse", x, kind="susceptibility", draws=draws, **settings)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20)
"""


def memory() -> None:
    """Print the peak memory of susceptibilities to a million rows."""
    for draws in (400, 1200):
        command = [sys.executable, "-c", MEMORY, str(draws)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        print(f"a million rows, 4 chains of {draws} steps: {float(done.stdout):.2f} GB above the data")


if __name__ == "__main__":
    for name in sys.argv[1:] or ["labels", "retraining", "memory"]:
        {"labels": labels, "retraining": retraining, "memory": memory}[name]()
