"""Parameters that act at all, beside curvlinops 3.0.1: the rank of the Gauss-Newton matrix of the behavioural loss.

    python benchmarks/bench_curvlinops.py [--quick]

strati counts it exactly (``strati.degeneracy(..., exact=True)``); curvlinops gives the matrix as products, here made
dense column by column and its eigenvalues counted beyond rounding (run from .venv-oracles, ``make oracles``). Printed
for fully connected networks of growing size: both counts, CPU seconds of both and their ratio, measured in one run,
median of three. Both compute in double precision with one thread.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import nn

import strati

ORACLE = Path(__file__).resolve().parents[1] / ".venv-oracles" / "bin" / "python"
ROWS = 200
REPEATS = 3

SCRIPT = """
import json, sys, time, warnings
warnings.simplefilter("ignore")
import numpy as np, torch
torch.set_num_threads(1)
from torch import nn
from curvlinops import GGNLinearOperator
case = torch.load(sys.argv[1])
layers = []
for k, (a, b) in enumerate(zip(case["widths"], case["widths"][1:])):
    layers += ([nn.Tanh()] if k else []) + [nn.Linear(a, b)]
model = nn.Sequential(*layers).double()
model.load_state_dict(case["state"])
x, parameters = case["x"], list(model.parameters())
data = [(x, model(x).detach())]
out = []
for _ in range(case["repeats"]):
    start = time.process_time()
    operator = GGNLinearOperator(model, nn.MSELoss(reduction="sum"), parameters, data, check_deterministic=False)
    matrix = (operator @ torch.eye(operator.shape[1], dtype=torch.float64)).detach().numpy()
    values = np.linalg.eigvalsh((matrix + matrix.T) / 2)
    rank = int((values > values[-1] * len(values) * np.finfo(float).eps).sum())
    out.append((time.process_time() - start, rank))
print("RESULT" + json.dumps(out))
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    torch.set_num_threads(1)
    widths = [(6, 8, 4), (8, 16, 4), (8, 24, 16, 4)][: 2 if parser.parse_args().quick else 3]
    print(f"rank of the Gauss-Newton matrix on {ROWS} rows, tanh networks with a doubled neuron")
    for shape in widths:
        compared(shape)


def compared(widths: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for k, (a, b) in enumerate(pairwise(widths)):
        layers += ([nn.Tanh()] if k else []) + [nn.Linear(a, b)]
    model = nn.Sequential(*layers).double()
    first = model[0]
    assert isinstance(first, nn.Linear)
    with torch.no_grad():  # two neurons that do the same leave directions free
        first.weight[1], first.bias[1] = first.weight[0], first.bias[0]
    x = torch.randn(ROWS, widths[0], dtype=torch.float64)
    ours = []
    for _ in range(REPEATS):
        start = time.process_time()
        found = strati.degeneracy(model, x, exact=True)
        ours.append((time.process_time() - start, found.effective))
    size = sum(p.numel() for p in model.parameters())
    seconds = float(np.median([s for s, _ in ours]))
    text = f"  {'-'.join(map(str, widths))}, {size} parameters: strati {ours[0][1]} used, {seconds:.2f} s"
    if not ORACLE.exists():
        print(f"{text}; curvlinops: .venv-oracles is absent, comparison left out")
        return
    theirs = curvlinops(widths, model, x)
    spent = float(np.median([s for s, _ in theirs]))
    print(
        f"{text}; curvlinops {theirs[0][1]}, {spent:.2f} s; CPU of strati over that of curvlinops {seconds / spent:.2f}"
    )


def curvlinops(widths: tuple[int, ...], model: nn.Module, x: torch.Tensor) -> list[tuple[float, int]]:
    with tempfile.TemporaryDirectory() as folder:
        case = Path(folder) / "case.pt"
        torch.save({"widths": widths, "state": model.state_dict(), "x": x, "repeats": REPEATS}, case)
        command = [str(ORACLE), "-c", SCRIPT, str(case)]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env={"OMP_NUM_THREADS": "1"}
        )
    line = next((text for text in done.stdout.splitlines() if text.startswith("RESULT")), None)
    if line is None:
        raise SystemExit(f"curvlinops failed: {done.stderr.strip().splitlines()[-1:]}")
    return [(float(seconds), int(rank)) for seconds, rank in json.loads(line.removeprefix("RESULT"))]


if __name__ == "__main__":
    main()
