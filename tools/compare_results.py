"""Record the JSON of commands on the embedded networks, or compare two such recordings.

    .venv/bin/python tools/compare_results.py record DIR
    .venv/bin/python tools/compare_results.py diff BEFORE AFTER

A change of structure must leave every number as it was. ``diff`` lists fields that differ by more than rounding, and
fields that only one recording has. Times, paths and text are not compared.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from strati import embedded

SPEC = """name = "compress"
[network]
path = "{model}"
activation = "relu"
[data]
path = "{data}"
[interventions.truncate]
rank = [2, 8]
"""
IGNORED = {
    "schema",
    "strati",
    "seconds",
    "store",
    "path",
    "text",
    "sentence",
    "summary_text",
    "reason",
    "view",
}
TOLERANCE = 1e-6


def commands(folder: Path) -> dict[str, list[str]]:
    """Name and arguments of every command that is recorded."""
    model, initial, data = (
        str(embedded.path(name))
        for name in ("digits-mlp.safetensors", "digits-mlp-init.safetensors", "digits.npz")
    )
    spec = folder / "study.toml"
    spec.write_text(SPEC.format(model=model, data=data))
    small = folder / "small.npz"
    with np.load(data) as arrays:
        np.savez(small, x=arrays["x"][:200], y=arrays["y"][:200])
    pieces = str(folder / "pieces")
    return {
        "inspect": ["inspect", model],
        "scan": ["scan", model, "--eigenvalues", "--bootstrap", "20"],
        "scan-initial": ["scan", initial],
        "compare": ["compare", initial, model],
        "check": ["check", model],
        "study": ["study", str(spec), "--out", str(folder / "study"), "--workers", "1"],
        "plan": ["plan", str(folder / "study"), "--budget", "parameters=0.8"],
        "audit": ["audit", str(folder / "study")],
        "degeneracy": ["degeneracy", model, "--data", str(small), "--activation", "relu"],
        "basis": ["basis", model, "--data", str(small), "--activation", "relu"],
        "reassemble-make": ["reassemble", "--make", pieces, "--blocks", "4", "--seed", "0"],
        "reassemble": ["reassemble", pieces, f"{pieces}/data.csv", "--activation", "relu"],
    }


def record(folder: Path) -> None:
    """Run every command and keep its JSON in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, words in commands(folder).items():
        target = folder / f"{name}.json"
        done = subprocess.run(
            [sys.executable, "-m", "strati", *words, "--json", str(target), "--quiet"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        print(f"{name}: {'ok' if done.returncode == 0 else done.stderr.strip()[-200:]}")


def differences(before: Any, after: Any, place: str = "") -> Iterator[str]:
    """Places where two JSON values differ by more than rounding."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in [*before, *(key for key in after if key not in before)]:
            if key in IGNORED:
                continue
            if key not in after or key not in before:
                yield f"{place}.{key}: only {'before' if key in before else 'after'}"
            else:
                yield from differences(before[key], after[key], f"{place}.{key}")
    elif isinstance(before, list) and isinstance(after, list):
        if len(before) != len(after):
            yield f"{place}: {len(before)} entries before, {len(after)} after"
        for number, (first, second) in enumerate(zip(before, after, strict=False)):
            yield from differences(first, second, f"{place}[{number}]")
    elif isinstance(before, int | float) and isinstance(after, int | float):
        if not math.isclose(before, after, rel_tol=TOLERANCE, abs_tol=1e-9):
            yield f"{place}: {before} before, {after} after"
    elif before != after:
        yield f"{place}: {str(before)[:60]!r} before, {str(after)[:60]!r} after"


def diff(before: Path, after: Path) -> int:
    """Print the differences of two recordings; their number."""
    count = 0
    for path in sorted(before.glob("*.json")):
        if not (after / path.name).exists():
            print(f"{path.stem}: only before")
            count += 1
            continue
        for line in differences(json.loads(path.read_text()), json.loads((after / path.name).read_text())):
            print(f"{path.stem}{line}")
            count += 1
    print(f"{count} differences")
    return count


if __name__ == "__main__":
    if sys.argv[1:2] == ["record"] and len(sys.argv) == 3:
        record(Path(sys.argv[2]))
    elif sys.argv[1:2] == ["diff"] and len(sys.argv) == 4:
        raise SystemExit(min(diff(Path(sys.argv[2]), Path(sys.argv[3])), 1))
    else:
        raise SystemExit(__doc__)
