"""Default budgets above 2,500 parameters, where the curvature is not known exactly, against one long run.

Two networks are trained on the embedded digits. For each seed: the estimate at the default budget, and how many of its
stated errors it lies from that of a run with 15 times the draws after 12 times the warm-up. ``--keep FILE`` keeps
finished runs, so that an interrupted calibration goes on.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from strati import embedded
from strati.core.rng import derive
from strati.landscape.llc.config import LLCConfig
from strati.landscape.llc.llc import llc

ROWS = 400
LONG = LLCConfig(draws=1500, warmup=720, seed=1000)
NETWORKS: dict[str, tuple[tuple[int, ...], type[nn.Module]]] = {
    "64-40-10 tanh": ((64, 40, 10), nn.Tanh),
    "64-48-16-10 ReLU": ((64, 48, 16, 10), nn.ReLU),
}


def main() -> None:
    """Run what is missing, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--keep", type=Path, help="finished runs, one JSON object per line")
    options = parser.parse_args()
    done = read(options.keep)
    print(f"behavioural loss (mse), first {ROWS} rows of the digits; gamma and nbeta by default")
    for name, (widths, activation) in NETWORKS.items():
        model, x = trained(widths, activation)
        runs: list[dict[str, Any]] = []
        for seed in (None, *range(options.seeds)):
            found = done.get((name, seed)) or run(name, seed, model, x)
            if (name, seed) not in done and options.keep is not None:
                with options.keep.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(found) + "\n")
            runs.append(found)
        show(name, sum(p.numel() for p in model.parameters()), runs)


def show(name: str, size: int, runs: Sequence[dict[str, Any]]) -> None:
    """One network: the long run, then those at the default budget."""
    long, *short = runs
    print(f"{name}, {size:,} parameters, gamma {long['gamma']:.4g}, nbeta {long['nbeta']:.4g}")
    print(f"  long run: {long['estimate']:.2f} +- {long['stderr']:.2f} (R-hat {long['rhat']:.3f})")
    inside = given = 0
    for row in short:
        if row["estimate"] is None:
            print(f"  seed {row['seed']}: no estimate ({row['reason']})")
            continue
        z = (row["estimate"] - long["estimate"]) / float(np.hypot(row["stderr"], long["stderr"]))
        given, inside = given + 1, inside + (abs(z) <= 2)
        print(f"  seed {row['seed']}: {row['estimate']:.2f} +- {row['stderr']:.2f}, {z:+.1f} errors off")
    print(f"  within two stated errors: {inside} of {given}; without an estimate: {len(short) - given}")


def run(name: str, seed: int | None, model: nn.Module, x: Tensor) -> dict[str, Any]:
    """One run: the long one where no seed is given."""
    began = time.process_time()
    result = llc(model, "behavioural-mse", x, config=LONG if seed is None else LLCConfig(seed=seed))
    fields = ("estimate", "stderr", "gamma", "nbeta", "rhat", "ess", "draws", "reason")
    kept = {field: getattr(result, field) for field in fields}
    return {"name": name, "seed": seed, "seconds": time.process_time() - began, **kept}


def trained(widths: Sequence[int], activation: type[nn.Module]) -> tuple[nn.Module, Tensor]:
    """A classifier of the digits, and the rows that its coefficient is measured on."""
    data = np.load(embedded.path("digits.npz"))
    x = torch.as_tensor(data["x"], dtype=torch.float32).reshape(len(data["x"]), -1)
    y = torch.as_tensor(data["y"], dtype=torch.long)
    torch.manual_seed(derive(0, *widths))
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), activation()]
    model = nn.Sequential(*layers[:-1])
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-2)
    for _ in range(400):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimiser.step()
    return model, x[:ROWS]


def read(path: Path | None) -> dict[tuple[str, int | None], dict[str, Any]]:
    """Finished runs by network and seed."""
    if path is None or not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {(row["name"], row["seed"]): row for row in rows}


if __name__ == "__main__":
    main()
