"""Time and peak anonymous memory of a scan of large layers, beside their largest matrix in float64.

    python benchmarks/bench_memory.py --block [--quick]   # one block of a 7B model, bfloat16
    python benchmarks/bench_memory.py [--gigabytes 2.2]   # a file of float32 layers

``--block``: q and out 4096 x 4096, k and v 1024 x 4096, gate and up 11008 x 4096, down 4096 x 11008; with ``--quick``
one layer of each shape; then what whole models cost at the rate that was measured. Otherwise two
layers of 4096 x 4096 and the rest 8192 x 2048. The file is written without being held, scanned in a fresh process, and
that process's ``RssAnon`` (mapped file pages do not count) is sampled every 2 ms. What the interpreter holds after
importing strati and scanning a small file is its own. Linux only.
"""

from __future__ import annotations

import argparse
import json
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np

_SCAN = """
import sys, threading, time
from pathlib import Path
import strati

def anonymous():
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024

strati.scan(sys.argv[1], workers=int(sys.argv[3])).to_dict()
base, peak, done = anonymous(), 0, False

def watch():
    global peak
    while not done:
        peak = max(peak, anonymous())
        time.sleep(0.002)

thread = threading.Thread(target=watch)
thread.start()
start = time.perf_counter()
cpu = time.process_time()
scan = strati.scan(sys.argv[2], workers=int(sys.argv[3]))
cpu = time.process_time() - cpu
done = True
thread.join()
print(base, peak, len(scan.layers), time.perf_counter() - start, cpu)
"""


BLOCK = {
    "self_attn.q_proj": (4096, 4096),
    "self_attn.k_proj": (1024, 4096),
    "self_attn.v_proj": (1024, 4096),
    "self_attn.o_proj": (4096, 4096),
    "mlp.gate_proj": (11008, 4096),
    "mlp.up_proj": (11008, 4096),
    "mlp.down_proj": (4096, 11008),
}


_70B = [(8192, 8192)] * 2 + [(1024, 8192)] * 2 + [(28672, 8192)] * 3
MODELS = {
    "7B (32 blocks, vocabulary of 32,000)": [*BLOCK.values()] * 32 + [(32000, 4096)] * 2,
    "70B (80 blocks, vocabulary of 32,000)": _70B * 80 + [(32000, 8192)] * 2,
}


def operations(shape: tuple[int, int]) -> float:
    """Of a Gram matrix and its eigenvalues."""
    n, m = float(max(shape)), float(min(shape))
    return n * m**2 + 4 / 3 * m**3


def print_costs(rate: float) -> None:
    """What whole models cost at a measured rate of operations per second of processor time."""
    print(f"{rate / 1e9:.1f} billion operations per second and core; at that rate")
    for name, shapes in MODELS.items():
        each = [operations(shape) / rate for shape in shapes]
        times = [max(sum(each) / cores, max(each)) for cores in (2, 32, 256)]
        told = ", ".join(f"{t / 3600:.1f} h" if t >= 3600 else f"{t / 60:.1f} min" for t in times)
        memory = 16 * min(max(shapes, key=operations)) ** 2 / 1e9
        print(f"{name}: {told} on 2, 32 and 256 cores; {memory:.2f} GB of memory per core at work")


def write(path: Path, shapes: dict[str, tuple[int, int]], dtype: str = "F32") -> None:
    """A safetensors file of noise, written row block by row block."""
    header, offset = {}, 0
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "BF16" else np.float32)
    for name, (rows, columns) in shapes.items():
        size = kind.itemsize * rows * columns
        header[name] = {"dtype": dtype, "shape": [rows, columns], "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    rng = np.random.default_rng(0)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for rows, columns in shapes.values():
            for start in range(0, rows, 1024):
                part = rng.standard_normal((min(1024, rows - start), columns), dtype=np.float32)
                file.write((0.02 * part).astype(kind).tobytes())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=2.2)
    parser.add_argument("--block", action="store_true", help="one block of a 7B model")
    parser.add_argument("--quick", action="store_true", help="of the block, one layer of each shape")
    parser.add_argument("--workers", type=int, default=0)
    options = parser.parse_args()
    shapes: dict[str, tuple[int, int]] = {}
    total, number = 0, 0
    if options.block:
        few = ("self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj")
        kept = {name: shape for name, shape in BLOCK.items() if not options.quick or name in few}
        shapes = {f"model.layers.0.{name}.weight": shape for name, shape in kept.items()}
    while not options.block and total < options.gigabytes * 1e9:
        shape = (4096, 4096) if number < 2 else (8192, 2048)
        shapes[f"model.layers.{number}.mlp.up_proj.weight"] = shape
        total += 4 * shape[0] * shape[1]
        number += 1
    largest = 8 * max(rows * columns for rows, columns in shapes.values())
    with tempfile.TemporaryDirectory() as folder:
        small, large = Path(folder) / "small.safetensors", Path(folder) / "large.safetensors"
        write(small, {"fc.weight": (64, 48)})
        write(large, shapes, "BF16" if options.block else "F32")
        size = large.stat().st_size
        command = [sys.executable, "-c", _SCAN, str(small), str(large), str(options.workers)]
        words = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()
    base, peak, layers, seconds, cpu = int(words[0]), int(words[1]), int(words[2]), *map(float, words[3:])
    print(
        f"file {size / 1e9:.2f} GB, {layers} matrices, largest {largest / 1e6:.0f} MB in float64, {seconds:.0f} s "
        f"({cpu:.0f} s of processor time)"
    )
    print(f"peak RssAnon {peak / 1e6:.0f} MB, of which the interpreter's own {base / 1e6:.0f} MB")
    print(
        f"above the interpreter: {(peak - base) / 1e6:.0f} MB = {(peak - base) / largest:.2f} x the largest matrix"
    )
    if options.block:
        print_costs(sum(map(operations, shapes.values())) / cpu)


if __name__ == "__main__":
    main()
