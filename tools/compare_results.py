"""Record the JSON of every command on the embedded networks and the zoo, or compare two recordings.

    .venv/bin/python tools/compare_results.py record DIR [--only NAME...] [--no-zoo]
    .venv/bin/python tools/compare_results.py diff BEFORE AFTER

A change of structure must leave every number as it was. ``record`` runs the strati that Python imports, so
``PYTHONPATH`` chooses the version; a command that this version lacks is reported and not recorded. ``diff`` lists
fields that differ by more than rounding, and fields that only one recording has, each once with the number of places.
Times, paths and text are not compared.
"""

from __future__ import annotations

import argparse
import json
import math
import re
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
RESNET = Path(__file__).resolve().parents[2] / "shared" / "data" / "resnet20-cifar10" / "resnet20-12fca82f.th"
ZOO = ("minilm", "minilm-tuned", "mobilenetv2", "silero", "textgenrnn")
IGNORED = {
    *("schema", "strati", "seconds", "store", "path", "text", "sentence", "summary_text", "reason", "view"),
    *("data", "headline"),
}
TOLERANCE = 1e-6


def embedded_commands(folder: Path) -> dict[str, list[str]]:
    """Name and arguments of the commands on the embedded networks."""
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
    run = ["--data", str(small), "--activation", "relu"]
    fixed = ["--sampler", "hmc", "--chains", "4", "--draws", "60", "--nbeta", "50", "--gamma", "100"]
    sampled = ["--nbeta", "50", "--gamma", "100", "--chains", "2", "--draws", "40", "--activation", "relu"]
    return {
        "inspect": ["inspect", model],
        "scan": ["scan", model, "--eigenvalues", "--bootstrap", "20"],
        "scan-initial": ["scan", initial],
        "compare": ["compare", initial, model],
        "check": ["check", model],
        "check-base": ["check", model, "--base", initial],
        "lineage": ["lineage", initial, model],
        "study": ["study", str(spec), "--out", str(folder / "study"), "--workers", "1"],
        "plan": ["plan", str(folder / "study"), "--budget", "parameters=0.8"],
        "audit": ["audit", str(folder / "study")],
        "degeneracy": ["degeneracy", model, *run],
        "degeneracy-llc": ["degeneracy", model, *run, "--llc", *fixed],
        "llc": ["llc", model, *run, *fixed],
        "curvature": ["curvature", model, *run, "--top", "5"],
        "curvature-gauss-newton": ["curvature", model, *run, "--matrix", "gauss-newton", "--top", "5"],
        "basis": ["basis", model, *run],
        "track": [
            *(
                "track",
                initial,
                model,
                "--steps",
                "0,1000",
                "--data",
                str(small),
                "--what",
                "spectra,loss,llc",
            ),
            *(*sampled, "--out", str(folder / "track")),
        ],
        "reassemble-make": ["reassemble", "--make", pieces, "--blocks", "4", "--seed", "0"],
        "reassemble": ["reassemble", pieces, f"{pieces}/data.csv", "--activation", "relu"],
    }


def zoo_commands(folder: Path) -> dict[str, list[str]]:
    """Name and arguments of the commands on small real networks; the zoo fetches those that are not there."""
    places = {name: _zoo_path(name) for name in ZOO}
    networks = {
        "minilm": places["minilm"],
        "mobilenetv2": places["mobilenetv2"],
        "silero": places["silero"] / "silero.safetensors",
        "silero-onnx": places["silero"] / "silero.onnx",
        "textgenrnn": places["textgenrnn"],
    }
    if RESNET.exists():
        networks["resnet20"] = RESNET
    commands = {
        f"{verb}-{name}": [verb, str(place)]
        for name, place in networks.items()
        for verb in ("inspect", "scan", "check")
    }
    minilm, tuned = str(places["minilm"]), str(places["minilm-tuned"])
    return commands | {
        "compare-minilm": ["compare", minilm, tuned],
        "compare-silero-formats": ["compare", str(networks["silero"]), str(networks["silero-onnx"])],
        "lineage-minilm": ["lineage", minilm, tuned],
        "shuffle-minilm": [
            "reassemble",
            "--drop",
            minilm,
            "--out",
            str(folder / "minilm-pieces"),
            "--seed",
            "1",
        ],
        "reassemble-minilm": ["reassemble", str(folder / "minilm-pieces")],
        "identify-minilm": ["identify", tuned, minilm],
    }


def _zoo_path(name: str) -> Path:
    listed = subprocess.run(
        [sys.executable, "-m", "strati.zoo", name], capture_output=True, text=True, check=True
    )
    return Path(listed.stdout.split()[-1])  # version 0.1.0 printed the name before the path


def record(folder: Path, only: list[str], *, zoo: bool) -> None:
    """Run the commands and keep the JSON of each in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    commands = embedded_commands(folder) | (zoo_commands(folder) if zoo else {})
    for name, words in commands.items():
        if only and name not in only:
            continue
        target = folder / f"{name}.json"
        completed = subprocess.run(
            [sys.executable, "-m", "strati.cli.main", *words, "--json", str(target), "--quiet"],
            capture_output=True,
            text=True,
            check=False,
        )
        failed = completed.returncode not in (0, 3)  # 3: check found something
        print(f"{name}: {completed.stderr.strip()[-200:] if failed else 'recorded'}", flush=True)


def differences(before: Any, after: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """Fields in which two JSON values differ by more than rounding: the field, and how it differs."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in [*before, *(key for key in after if key not in before)]:
            if key in IGNORED:
                continue
            if key not in after or key not in before:
                yield f"{place}.{key}", f"only {'before' if key in before else 'after'}"
            else:
                yield from differences(before[key], after[key], f"{place}.{key}")
    elif isinstance(before, list) and isinstance(after, list):
        if len(before) != len(after):
            yield place, f"{len(before)} entries before, {len(after)} after"
        for number, (first, second) in enumerate(zip(before, after, strict=False)):
            yield from differences(first, second, f"{place}[{number}]")
    elif _is_number(before) and _is_number(after):
        if not math.isclose(before, after, rel_tol=TOLERANCE, abs_tol=1e-9):
            yield place, f"{before} before, {after} after"
    elif before != after:
        yield place, f"{str(before)[:60]!r} before, {str(after)[:60]!r} after"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def diff(before: Path, after: Path) -> int:
    """Print the fields that differ in two recordings, with one example of each; their number."""
    count = 0
    names = sorted({path.stem for folder in (before, after) for path in folder.glob("*.json")})
    for name in names:
        files = before / f"{name}.json", after / f"{name}.json"
        if not all(file.exists() for file in files):
            print(f"{name}: only {'before' if files[0].exists() else 'after'}")
            continue
        fields: dict[str, list[str]] = {}
        for place, text in differences(*(json.loads(file.read_text()) for file in files)):
            fields.setdefault(re.sub(r"\[\d+\]", "[]", place), []).append(text)
        for field, texts in fields.items():
            times = f" ({len(texts)} places)" if len(texts) > 1 else ""
            print(f"{name}{field}{times}: {texts[0]}")
        count += len(fields)
    print(f"{count} fields differ")
    return count


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    tasks = parser.add_subparsers(dest="task", required=True)
    recording = tasks.add_parser("record")
    recording.add_argument("folder", type=Path)
    recording.add_argument("--only", nargs="+", default=[])
    recording.add_argument("--no-zoo", action="store_true")
    comparing = tasks.add_parser("diff")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    words = parser.parse_args()
    if words.task == "record":
        record(words.folder, words.only, zoo=not words.no_zoo)
        return 0
    return min(diff(words.before, words.after), 1)


if __name__ == "__main__":
    raise SystemExit(main())
