"""What opening costs: strati beside the usual loader of each format, on the same file, in one run.

    python benchmarks/bench_open.py

Each row opens a file and sums every weight once. Times are CPU seconds, best of several; memory is the growth of
anonymous memory (``RssAnon``) in a fresh process, as a share of the file's size. The last column is the time that
finding the layers takes on top, which a loader does not do.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

ROUNDS = 3

STRATI = """
net = strati.open(path)
total = sum(float(np.sum(net.read(t.name), dtype=np.float64)) for t in net.tensors)
"""
LAYERS = """
net = strati.open(path)
total = len(net.layers())
"""
OPENED = """
net = strati.open(path)
total = len(net.tensors)
"""
LOADERS = {
    "safetensors": """
tensors = load_file(path)
total = sum(float(np.sum(a, dtype=np.float64)) for a in tensors.values())
""",
    "torch": """
tensors = torch.load(path, weights_only=True)
total = sum(float(a.sum(dtype=torch.float64)) for a in tensors.values())
""",
    "npz": """
with np.load(path) as tensors:
    total = sum(float(np.sum(tensors[k], dtype=np.float64)) for k in tensors.files)
""",
    "onnx": """
tensors = [numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer]
total = sum(float(np.sum(a, dtype=np.float64)) for a in tensors)
""",
}
IMPORTS = {
    "strati": "import strati, strati.io.network, ml_dtypes",
    "safetensors": "from safetensors.numpy import load_file",
    "torch": "import torch; torch.set_num_threads(1)",
    "npz": "",
    "onnx": "import onnx; from onnx import numpy_helper",
}


def measure(body: str, imports: str, path: Path) -> tuple[float, int, float]:
    """CPU seconds (best of several, in one process), anonymous memory in bytes, and the sum as a check."""
    program = f"""
import time, json, sys, numpy as np
{imports}
def anonymous():
    return 1024 * int(open('/proc/self/status').read().split('RssAnon:')[1].split()[0])
path = {str(path)!r}
before = anonymous()
times = []
for _ in range({ROUNDS}):
    start = time.process_time()
    {body.strip().replace(chr(10), chr(10) + "    ")}
    times.append(time.process_time() - start)
    grown = anonymous() - before
print(json.dumps([min(times), grown, total]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    seconds, grown, total = json.loads(done.stdout)
    return seconds, grown, total


def weights(count: int, side: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        f"layers.{i}.mlp.up_proj.weight": rng.standard_normal((side, side), np.float32) for i in range(count)
    }


def write(folder: Path, kind: str, tensors: dict[str, np.ndarray]) -> Path:
    path = folder / f"model.{kind}"
    if kind == "safetensors":
        from safetensors.numpy import save_file

        save_file(tensors, path)
    elif kind == "torch":
        import torch

        torch.save({name: torch.from_numpy(array) for name, array in tensors.items()}, path)
    elif kind == "npz":
        with path.open("wb") as file:
            np.savez(file, **tensors)
    else:
        from onnx import helper, numpy_helper, save

        parts = [numpy_helper.from_array(array, name) for name, array in tensors.items()]
        save(helper.make_model(helper.make_graph([], "g", [], [], initializer=parts)), path)
    return path


def main() -> None:
    print(
        f"{'format':12} {'file':>22} {'strati':>9} {'loader':>9} {'ratio':>7}   anonymous memory / file   layers"
    )
    for count, side in ((24, 2048), (10_000, 8)):
        tensors = weights(count, side)
        for kind, loader in LOADERS.items():
            with tempfile.TemporaryDirectory() as folder:
                path = write(Path(folder), kind, tensors)
                ours, ours_memory, ours_total = measure(STRATI, IMPORTS["strati"], path)
                theirs, their_memory, their_total = measure(loader, IMPORTS[kind], path)
                assert abs(ours_total - their_total) <= 1e-3 * max(1.0, abs(their_total))
                layers = (
                    measure(LAYERS, IMPORTS["strati"], path)[0] - measure(OPENED, IMPORTS["strati"], path)[0]
                )
                size = path.stat().st_size
                print(
                    f"{kind:12} {count:>7} x {side:>4}^2 {size / 1e6:>4.0f} MB {ours:>8.3f}s {theirs:>8.3f}s"
                    f" {ours / theirs:>6.2f}x   {ours_memory / size:>6.2f} (loader {their_memory / size:.2f})"
                    f"   {layers:.3f}s"
                )


if __name__ == "__main__":
    main()
