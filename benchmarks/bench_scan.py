"""How long a scan takes beside bare linear algebra and beside weightwatcher, as ratios measured in one run.

    python benchmarks/bench_scan.py [--oracle PYTHON] [--repeat N]

Three checkpoints of random weights: GPT-2 small's shapes (12 blocks of width 768 and the 50257 x 768 embedding), a
784-5x512-10 fully connected network, and matrices of 2,048 and 2,560 columns. One BLAS thread each, CPU time, best of
several. The limit is the sum of ``eigvalsh(W.T @ W)`` in float64 over the same matrices. ``--oracle`` names a Python
that has weightwatcher 0.7.7; without one those ratios are left out.
"""

from __future__ import annotations

import os

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"

import argparse  # noqa: E402
import itertools  # noqa: E402
import json  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable  # noqa: E402
from pathlib import Path  # noqa: E402

import numpy as np  # noqa: E402
from safetensors.numpy import load_file, save_file  # noqa: E402

ORACLE = Path(__file__).resolve().parents[1] / ".venv-oracles" / "bin" / "python"
_WATCH = """
import contextlib, io, json, logging, sys, time, warnings
warnings.simplefilter("ignore")
import torch, weightwatcher
from safetensors.torch import load_file
torch.set_num_threads(1)
logging.disable(logging.CRITICAL)
layers = []
for name, W in load_file(sys.argv[1]).items():
    if W.ndim == 2:
        layer = torch.nn.Linear(W.shape[1], W.shape[0], bias=False)
        layer.weight.data = W
        layers.append(layer)
model = torch.nn.Sequential(*layers)
times = []
for _ in range(int(sys.argv[2])):
    start = time.process_time()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        details = weightwatcher.WeightWatcher(model=model).analyze(**json.loads(sys.argv[3]))
    times.append(time.process_time() - start)
print(json.dumps({"seconds": min(times), "layers": len(details), "alpha": [float(a) for a in details["alpha"]]}))
"""


def gpt2(rng: np.random.Generator) -> dict[str, np.ndarray]:
    tensors = {
        "wte.weight": rng.normal(scale=0.02, size=(50257, 768)),
        "wpe.weight": rng.normal(size=(1024, 768)),
    }
    for block in range(12):
        for name, shape in (
            ("attn.c_attn", (768, 2304)),
            ("attn.c_proj", (768, 768)),
            ("mlp.c_fc", (768, 3072)),
            ("mlp.c_proj", (3072, 768)),
        ):
            tensors[f"h.{block}.{name}.weight"] = rng.normal(scale=0.02, size=shape)
    return {name: W.astype(np.float32) for name, W in tensors.items()}


def fcn(rng: np.random.Generator) -> dict[str, np.ndarray]:
    sides = [784, 512, 512, 512, 512, 512, 10]
    return {
        f"{2 * i}.weight": rng.uniform(-1, 1, size=(b, a)).astype(np.float32) / np.float32(np.sqrt(a))
        for i, (a, b) in enumerate(itertools.pairwise(sides))
    }


def wide(rng: np.random.Generator) -> dict[str, np.ndarray]:
    shapes = {"q.weight": (2048, 2048), "up.weight": (5632, 2048), "out.weight": (2560, 2560)}
    return {name: rng.normal(scale=0.02, size=shape).astype(np.float32) for name, shape in shapes.items()}


def best(work: Callable[[], object], repeat: int) -> float:
    times = []
    for _ in range(repeat):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return min(times)


def limit(path: Path) -> None:
    for W in load_file(path).values():
        tall = (W if W.shape[0] >= W.shape[1] else W.T).astype(np.float64)
        np.linalg.eigvalsh(tall.T @ tall)


def watch(python: Path, path: Path, repeat: int, **options: object) -> dict[str, object]:
    command = [str(python), "-c", _WATCH, str(path), str(repeat), json.dumps(options)]
    found: dict[str, object] = json.loads(
        subprocess.run(command, check=True, capture_output=True, text=True).stdout
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--oracle", type=Path, default=ORACLE)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--only", help="only the checkpoints whose name contains this")
    parser.add_argument("--json", type=Path, help="also write the ratios here")
    options = parser.parse_args()
    import strati

    results = {}
    cases = (("FCN 784-5x512-10", fcn), ("GPT-2 small shapes", gpt2), ("2,048 columns and more", wide))
    for name, make in cases:
        if options.only is not None and options.only not in name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.safetensors"
            save_file(make(np.random.default_rng(0)), path)
            # Interleaved, so that a slow moment of the machine touches both.
            bare, ours = float("inf"), float("inf")
            for _ in range(options.repeat):
                bare = min(bare, best(lambda path=path: limit(path), 1))
                ours = min(ours, best(lambda path=path: strati.scan(path, workers=1).to_dict(), 1))
            row = {"limit_seconds": bare, "scan_seconds": ours, "scan_over_limit": ours / bare}
            print(
                f"{name}: limit {bare:.3f} s, strati scan {ours:.3f} s = {ours / bare:.2f} x the limit",
                flush=True,
            )
            if options.oracle.exists():
                for label, extra in (("analyze", {}), ("analyze(mp_fit=True)", {"mp_fit": True})):
                    found = watch(options.oracle, path, 2 if name.startswith("FCN") else 1, **extra)
                    seconds = float(found["seconds"])  # type: ignore[arg-type]
                    row[f"{label} over scan"] = seconds / ours
                    print(
                        f"  weightwatcher {label}: {seconds:.2f} s = {seconds / bare:.1f} x the limit, "
                        f"{seconds / ours:.1f} x strati ({found['layers']} matrices)",
                        flush=True,
                    )
                    if label == "analyze":
                        alphas = np.sort(strati.scan(path, workers=1).table["alpha"].to_numpy(dtype=float))
                        theirs = np.sort(np.array(found["alpha"]))
                        if len(theirs) == len(alphas):
                            print(
                                f"  alphas differ by at most {np.max(np.abs(alphas / theirs - 1)):.1e}, relative"
                            )
            results[name] = row
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    if not options.oracle.exists():
        print("weightwatcher not measured: give a Python that has it with --oracle", file=sys.stderr)


if __name__ == "__main__":
    main()
