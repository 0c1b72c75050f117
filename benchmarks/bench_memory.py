"""Peak anonymous memory of a scan of a file of 2 GB or more, beside its largest matrix.

    python benchmarks/bench_memory.py [--gigabytes 2.2]

Writes a safetensors file of float32 layers (two of 4096 x 4096, the hardest case, the rest 8192 x 2048) without holding
it, scans it in a fresh process, and samples that process's ``RssAnon`` (mapped file pages do not count) every 2 ms.
What the interpreter holds after importing strati and scanning a small file is its own. Linux only.
"""

from __future__ import annotations

import argparse
import json
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

_SCAN = """
import sys, threading, time
from pathlib import Path
import strati

def anonymous():
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024

strati.scan(sys.argv[1], jobs=int(sys.argv[3])).to_dict()
base, peak, done = anonymous(), 0, False

def watch():
    global peak
    while not done:
        peak = max(peak, anonymous())
        time.sleep(0.002)

thread = threading.Thread(target=watch)
thread.start()
start = time.perf_counter()
scan = strati.scan(sys.argv[2], jobs=int(sys.argv[3]))
done = True
thread.join()
print(base, peak, len(scan.layers), time.perf_counter() - start)
"""


def write(path: Path, shapes: dict[str, tuple[int, int]]) -> None:
    """A safetensors file of noise, written row block by row block."""
    header, offset = {}, 0
    for name, (rows, columns) in shapes.items():
        size = 4 * rows * columns
        header[name] = {"dtype": "F32", "shape": [rows, columns], "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    rng = np.random.default_rng(0)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for rows, columns in shapes.values():
            for start in range(0, rows, 1024):
                file.write(
                    rng.standard_normal((min(1024, rows - start), columns), dtype=np.float32).tobytes()
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=2.2)
    parser.add_argument("--jobs", type=int, default=0)
    options = parser.parse_args()
    shapes: dict[str, tuple[int, int]] = {}
    total, number = 0, 0
    while total < options.gigabytes * 1e9:
        shape = (4096, 4096) if number < 2 else (8192, 2048)
        shapes[f"model.layers.{number}.mlp.up_proj.weight"] = shape
        total += 4 * shape[0] * shape[1]
        number += 1
    largest = 8 * max(rows * columns for rows, columns in shapes.values())
    with tempfile.TemporaryDirectory() as folder:
        small, large = Path(folder) / "small.safetensors", Path(folder) / "large.safetensors"
        write(small, {"fc.weight": (64, 48)})
        write(large, shapes)
        size = large.stat().st_size
        command = [sys.executable, "-c", _SCAN, str(small), str(large), str(options.jobs)]
        words = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()
    base, peak, layers, seconds = int(words[0]), int(words[1]), int(words[2]), float(words[3])
    print(
        f"file {size / 1e9:.2f} GB, {layers} matrices, largest {largest / 1e6:.0f} MB in float64, {seconds:.0f} s"
    )
    print(f"peak RssAnon {peak / 1e6:.0f} MB, of which the interpreter's own {base / 1e6:.0f} MB")
    print(
        f"above the interpreter: {(peak - base) / 1e6:.0f} MB = {(peak - base) / largest:.2f} x the largest matrix"
    )


if __name__ == "__main__":
    main()
