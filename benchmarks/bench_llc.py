"""Learning coefficients: against known values, and against devinterp 2.0.1 with the same gradients.

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
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import nn

from strati.evaluate.models import output_tensor
from strati.landscape.llc.config import Sampler
from strati.landscape.llc.llc import LLCConfig, llc
from strati.landscape.llc.sampling_plan import SamplingPlan
from strati.landscape.llc.sgld import SGLDKernel
from strati.landscape.objective import objective
from strati_reproductions.degeneracy.learning_coefficients import truth_table
from strati_reproductions.llc_cases.known import deep_linear, regular

ORACLE = Path(__file__).resolve().parents[1] / ".venv-oracles" / "bin" / "python"

SCRIPT = """
import json, sys, time, warnings
warnings.simplefilter("ignore")
import torch
torch.set_num_threads(1)
from torch import nn
from datasets import Dataset
from devinterp.slt.llc import llc
case = torch.load(sys.argv[1])
layers = []
for w in case["weights"]:
    layer = nn.Linear(w.shape[1], w.shape[0], bias=False)
    layer.weight.data = w.clone()
    layers.append(layer)
model, x, y = nn.Sequential(*layers), case["x"], case["y"]
rows = Dataset.from_dict({"input_ids": [[k, k] for k in range(len(x))]}).with_format("torch")
loss = lambda m, ids: ((m(x[ids[:, 0]]) - y[ids[:, 0]]) ** 2).sum(1, keepdim=True)
out = []
for lr in case["rates"]:
    start = time.process_time()
    found = llc(
        model, rows, {}, lr=lr, n_beta=case["nbeta"], localization=case["gamma"], num_chains=case["chains"],
        num_draws=case["draws"], batch_size=len(x), num_init_loss_batches=1, loss_fn=loss, device="cpu")
    mean = float(found.llc_mean)
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
    print("devinterp 2.0.1 (best of three step sizes) beside strati: nbeta = n / ln n, gamma = 1, full batch")
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
        "SGLD, one chain: CPU of a step over a bare forward+backward (median of 15, in turns; best of them)"
    )
    for name, model, x, target, loss in overhead_cases():
        function = objective(model, loss, (x, target))
        steps = SGLDKernel(function, SamplingPlan(Sampler.SGLD, 100.0, 1.0, step=1e-7))
        noise, offset = torch.Generator().manual_seed(0), torch.zeros(1, function.flat.size)

        def bare(model=model, x=x, target=target, loss=function.loss) -> None:
            model.zero_grad()
            loss(output_tensor(model(x)), target).backward()

        def step(steps=steps, offset=offset, x=x, target=target, noise=noise) -> None:
            steps.advance(offset, (x, target), noise)

        repeats = max(3, int(0.4 / max(timed(bare, 2) / 2, 1e-4)))
        rounds = [(timed(step, repeats), timed(bare, repeats)) for _ in range(15)]  # a noisy moment hits both
        typical = float(np.median([a / b for a, b in rounds]))
        best = min(a for a, _ in rounds) / min(b for _, b in rounds)
        print(f"  {name}, {function.flat.size} parameters: {typical:.2f} times ({best:.2f})")


def overhead_cases() -> Iterator[tuple[str, nn.Module, torch.Tensor, torch.Tensor, str]]:
    """Multilayer perceptrons on 256 rows, and transformers on 8 windows of 128 tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel

    for width in (64, 512, 1024):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
        )
        x = torch.randn(256, 64)
        yield "MLP", model, x, model(x).detach(), "mse"
    for width, layers in ((96, 2), (256, 4)):
        torch.manual_seed(0)
        config = GPT2Config(vocab_size=512, n_positions=128, n_embd=width, n_layer=layers, n_head=4)
        ids = torch.randint(512, (8, 129))
        yield "GPT-2", GPT2LMHeadModel(config).eval(), ids[:, :-1], ids[:, 1:], "cross_entropy"


MEMORY = """
import resource, sys, torch
torch.set_num_threads(1)
from torch import nn
from strati.landscape.objective import behavioural_loss
from strati.landscape.llc.config import Sampler
from strati.landscape.llc.sampling_plan import SamplingPlan
from strati.landscape.llc.sgld import SGLDKernel
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 7000), nn.ReLU(), nn.Linear(7000, 7000), nn.ReLU(), nn.Linear(7000, 10))
x = torch.randn(16, 64)
y = model(x).detach()
(((model(x) - y) ** 2).sum() / 16).backward()
if sys.argv[1] == "sgld":
    model.zero_grad(set_to_none=True)
    loss = behavioural_loss(model, x)
    steps = SGLDKernel(loss, SamplingPlan(Sampler.SGLD, 100.0, 1.0, step=1e-9))
    offset = torch.zeros(1, loss.flat.size)
    for _ in range(3):
        steps.advance(offset, (x, y), torch.Generator().manual_seed(0))
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


def timed(function, repeats: int) -> float:
    start = time.process_time()
    for _ in range(repeats):
        function()
    return time.process_time() - start


def shown(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"


if __name__ == "__main__":
    main()
