"""Learning coefficients: against known values, and against devinterp 1.3.2 with the same gradients.

    python benchmarks/bench_llc.py [--quick] [--only truth|devinterp|overhead|memory]

Prints the truth table (limit for large nbeta beside the exact value), then, for networks under 10,000 parameters,
error and CPU time per gradient beside devinterp's (run from .venv-oracles, best of three step sizes, full batch,
same loss, nbeta and gamma), then the cost of an SGLD step over a bare forward and backward pass, and the memory
it adds. Ratios are of one run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import nn

from strati.landscape.behaviour import behavioural_loss
from strati.landscape.sampling.known import deep_linear, regular
from strati.landscape.sampling.llc import LLCConfig, llc
from strati.landscape.sampling.noise import Noise
from strati.landscape.sampling.sgld import Steps
from strati.papers.degeneracy.learning_coefficients import truth_table

ORACLE = Path(__file__).resolve().parents[1] / ".venv-oracles" / "bin" / "python"

SCRIPT = """
import json, sys, time, warnings
warnings.simplefilter("ignore")
import torch
torch.set_num_threads(1)
from torch import nn
from devinterp.optim.sgld import SGLD
from devinterp.slt.sampler import estimate_learning_coeff_with_summary
case = torch.load(sys.argv[1])
layers = []
for w in case["weights"]:
    layer = nn.Linear(w.shape[1], w.shape[0], bias=False)
    layer.weight.data = w.clone()
    layers.append(layer)
model, x, y = nn.Sequential(*layers), case["x"], case["y"]
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=len(x))
out = []
for lr in case["rates"]:
    start = time.process_time()
    found = estimate_learning_coeff_with_summary(
        model, data, evaluate=lambda m, d: ((m(d[0]) - d[1]) ** 2).sum() / len(d[0]), sampling_method=SGLD,
        optimizer_kwargs={"lr": lr, "nbeta": case["nbeta"], "localization": case["gamma"]},
        num_chains=case["chains"], num_draws=case["draws"], num_burnin_steps=0, init_loss=case["init"],
        verbose=False, seed=0)
    mean = float(found["llc/mean"])
    out.append({"rate": lr, "llc": mean if mean == mean and abs(mean) < 1e300 else None,
                "seconds": time.process_time() - start})
print("RESULT" + json.dumps(out))
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", choices=["truth", "devinterp", "overhead", "memory"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.only in (None, "truth"):
        truth(options.quick)
    if options.only in (None, "devinterp"):
        against_devinterp(options.quick)
    if options.only in (None, "overhead"):
        overhead()
    if options.only in (None, "memory"):
        memory()


def truth(quick: bool) -> None:
    print("truth table: exact, limit for large nbeta, relative error")
    table = truth_table(quick=quick, seed=0, folder=Path("out"))
    for row in table.rows:
        exact = "" if row.theory is None else f"{row.theory:8.4f}"
        ours = "none" if row.ours is None else f"{row.ours:8.4f}"
        print(f"  {row.what:58s} {exact:8s} {ours:8s}  {row.note}")


def linear_case(
    widths: tuple[int, ...], rank: int, rows: int = 500
) -> tuple[nn.Sequential, torch.Tensor, float]:
    generator = torch.Generator().manual_seed(sum(widths) + rank)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layer = nn.Linear(inputs, outputs, bias=False)
        left, right = (
            torch.randn(outputs, rank, generator=generator),
            torch.randn(rank, inputs, generator=generator),
        )
        layer.weight.data = left @ right / max(1.0, (rank * inputs) ** 0.5)
        layers.append(layer)
    x = torch.randn(rows, widths[0], generator=generator)
    truth = deep_linear(widths, rank) if len(widths) > 2 else regular(widths[0] * widths[1])
    return nn.Sequential(*layers), x, float(truth.value)


def against_devinterp(quick: bool) -> None:
    if not ORACLE.exists():
        print("devinterp: .venv-oracles is absent, comparison left out")
        return
    print("devinterp 1.3.2 (best of three step sizes) beside strati: nbeta = n / ln n, gamma = 1, full batch")
    cases = [((4, 2), 2), ((5, 3, 5), 1), ((5, 3, 5), 0)]
    for widths, rank in cases[:2] if quick else cases:
        model, x, exact = linear_case(widths, rank)
        with torch.no_grad():
            y = model(x)
        start = time.process_time()
        ours = llc(model, "mse", (x, y), config=LLCConfig())
        seconds = time.process_time() - start
        per_gradient = seconds / ours.traces.gradients
        theirs = devinterp(model, x, y, ours.nbeta, draws=200 if quick else 400)
        best = min((abs(t["llc"] - exact) for t in theirs if t["llc"] is not None), default=float("nan"))
        their_cost = float(np.mean([t["seconds"] for t in theirs])) / (4 * (200 if quick else 400))
        name = "-".join(map(str, widths))
        values = ", ".join("none" if t["llc"] is None else f"{t['llc']:.3g}" for t in theirs)
        print(
            f"  {name} rank {rank}: exact {exact:g}; "
            f"strati limit {shown(ours.asymptotic)}, at nbeta {shown(ours.estimate)};"
        )
        print(
            f"    devinterp {values}; error {abs((ours.asymptotic or np.nan) - exact):.3g} against its best {best:.3g}"
        )
        print(
            f"    CPU per gradient {1e6 * per_gradient:.1f} us against {1e6 * their_cost:.1f} us: "
            f"{per_gradient / their_cost:.3f} of devinterp's ({ours.traces.gradients} gradients, {seconds:.1f} s)"
        )


def devinterp(model: nn.Sequential, x: torch.Tensor, y: torch.Tensor, nbeta: float, draws: int) -> list[dict]:
    with tempfile.TemporaryDirectory() as folder:
        case = Path(folder) / "case.pt"
        torch.save(
            {
                "weights": [layer.weight.detach().clone() for layer in model],
                "x": x,
                "y": y,
                "nbeta": nbeta,
                "gamma": 1.0,
                "chains": 4,
                "draws": draws,
                "init": 0.0,
                "rates": [1e-5, 1e-4, 1e-3],
            },
            case,
        )
        done = subprocess.run([ORACLE, "-c", SCRIPT, case], capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    if not lines:
        raise SystemExit(f"devinterp failed: {done.stderr.strip().splitlines()[-1:]}")
    return json.loads(lines[0].removeprefix("RESULT"))


def overhead() -> None:
    """One chain of SGLD against a bare forward and backward pass of the same network and batch."""
    print(
        "SGLD, one chain, batch 256: CPU of a step over a bare forward+backward (median of 15, in turns; best of them)"
    )
    for width in (64, 512, 1024):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
        )
        x = torch.randn(512, 64)
        loss = behavioural_loss(model, x)
        steps = Steps(loss, LLCConfig(sampler="sgld", step=1e-7), 100.0)
        batch, target = x[:256], loss.target[:256]
        noise = Noise(0)
        offset = torch.zeros(1, loss.flat.size)

        def bare(model=model, batch=batch, target=target) -> None:
            model.zero_grad()
            (((model(batch) - target) ** 2).sum() / 256).backward()

        def step(steps=steps, offset=offset, batch=batch, target=target, noise=noise) -> None:
            steps.advance(offset, (batch, target), noise)

        rounds = [(timed(step), timed(bare)) for _ in range(15)]  # in turns: a noisy moment hits both
        typical = float(np.median([a / b for a, b in rounds]))
        best = min(a for a, _ in rounds) / min(b for _, b in rounds)
        print(f"  {loss.flat.size} parameters: {typical:.2f} times ({best:.2f})")


MEMORY = """
import resource, sys, torch
torch.set_num_threads(1)
from torch import nn
from strati.landscape.behaviour import behavioural_loss
from strati.landscape.sampling.noise import Noise
from strati.landscape.sampling.config import LLCConfig
from strati.landscape.sampling.sgld import Steps
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 7000), nn.ReLU(), nn.Linear(7000, 7000), nn.ReLU(), nn.Linear(7000, 10))
x = torch.randn(16, 64)
y = model(x).detach()
(((model(x) - y) ** 2).sum() / 16).backward()
if sys.argv[1] == "sgld":
    model.zero_grad(set_to_none=True)
    loss = behavioural_loss(model, x)
    steps = Steps(loss, LLCConfig(sampler="sgld", step=1e-9), 100.0)
    offset = torch.zeros(1, loss.flat.size)
    for _ in range(3):
        steps.advance(offset, (x, y), Noise(0))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, sum(p.numel() for p in model.parameters()) * 4)
"""


def memory() -> None:
    """Peak memory with one SGLD chain over that of a bare forward and backward pass, in fresh processes."""
    peaks = {}
    for kind in ("bare", "sgld"):
        done = subprocess.run(
            [sys.executable, "-c", MEMORY, kind], capture_output=True, text=True, check=True
        )
        peaks[kind], weights = (int(v) for v in done.stdout.split())
    extra = (peaks["sgld"] - peaks["bare"]) / weights
    print(
        f"SGLD, one chain: peak memory {extra:.2f} times the weights above a bare pass ({weights / 1e6:.0f} MB)"
    )


def timed(function, repeats: int = 40) -> float:
    start = time.process_time()
    for _ in range(repeats):
        function()
    return time.process_time() - start


def shown(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"


if __name__ == "__main__":
    main()
