"""What a check costs: strati beside numpy's ``isfinite``, ``min`` and ``max`` on the same file, in one run.

    python benchmarks/bench_check.py [MEGABYTES]

Times are CPU seconds, the best of several rounds that alternate. The baseline loads the file with safetensors' numpy
loader.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

import strati

ROUNDS = 5


def baseline(path: Path) -> None:
    """Read a file and take ``isfinite``, ``min`` and ``max`` of every tensor."""
    for values in load_file(path).values():
        np.isfinite(values).all(), values.min(), values.max()


def seconds(run: Callable[[Path], object], path: Path) -> float:
    """CPU seconds of one call."""
    start = time.process_time()
    run(path)
    return time.process_time() - start


def make(path: Path, size: int, dtype: type) -> None:
    """Write a network of blocks with about ``size`` bytes."""
    rng = np.random.default_rng(0)
    width = 1024
    count = max(size // (width * width * np.dtype(dtype).itemsize), 4)
    save_file(
        {
            f"model.layers.{block}.self_attn.{part}_proj.weight": (
                0.02 * rng.standard_normal((width, width), dtype=np.float32)
            ).astype(dtype)
            for block in range(count // 4)
            for part in "qkvo"
        },
        path,
    )


def main() -> None:
    """Print one line per dtype."""
    size = int(sys.argv[1] if len(sys.argv) > 1 else 200) * 1_000_000
    with tempfile.TemporaryDirectory() as folder:
        for dtype in (np.float32, np.float64, np.float16, ml_dtypes.bfloat16):
            path = Path(folder) / "model.safetensors"
            make(path, size, dtype)
            rounds = [(seconds(baseline, path), seconds(strati.check, path)) for _ in range(ROUNDS)]
            numpy_best, own_best = (min(times) for times in zip(*rounds, strict=True))
            print(
                f"{np.dtype(dtype).name:9s} {path.stat().st_size / 1e6:5.0f} MB"
                f"  numpy {numpy_best:.3f} s  strati {own_best:.3f} s  ratio {own_best / numpy_best:.2f}"
            )


if __name__ == "__main__":
    main()
