"""Hold the limits of learning coefficients against cases whose value is known, and print how often they cover.

``--half held-out`` runs the cases that no rule of the extrapolation has seen; ``development`` and ``final`` are the two
halves that it was made and first checked on. A limit covers where the known value lies within two stated errors; a case
without a limit must hold the known value in its certain range. ``--keep FILE`` keeps finished runs, so that an
interrupted calibration goes on; ``--each`` prints every run.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from strati.landscape.llc.config import LLCConfig
from strati_reproductions.llc_cases.battery import battery
from strati_reproductions.llc_cases.held_out import held_out
from strati_reproductions.llc_cases.known_cases import KnownCase

GOAL = 0.90


def main() -> None:
    """Run the chosen cases, then print a line per kind and the coverage."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--half", choices=("development", "final", "held-out"), default="held-out")
    parser.add_argument("--seeds", type=int, default=1, help="random seeds per case")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--kind", default="", help="only kinds whose name holds this text")
    parser.add_argument("--each", action="store_true", help="print every run")
    parser.add_argument("--keep", type=Path, help="finished runs, one JSON object per line")
    options = parser.parse_args()
    chosen = [
        case for case in (*battery(), *held_out()) if options.kind in case.kind and case.half == options.half
    ]
    done = read(options.keep)
    rows = []
    for case in chosen:
        for seed in range(options.first_seed, options.first_seed + options.seeds):
            row = done.get((case.name, seed))
            if row is None:
                row = run(case, seed)
                if options.keep is not None:
                    with options.keep.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(row) + "\n")
            rows.append(row)
            print(line(row), file=sys.stdout if options.each else sys.stderr, flush=True)
    report(rows)


def run(case: KnownCase, seed: int) -> dict[str, Any]:
    """One case at default settings."""
    began = time.process_time()
    result = case.run(LLCConfig(seed=seed))
    return {
        "name": case.name,
        "kind": case.kind,
        "value": float(case.value),
        "seed": seed,
        "limit": result.asymptotic,
        "stderr": result.asymptotic_stderr,
        "low": result.asymptotic_low,
        "high": result.asymptotic_high,
        "reason": result.reason,
        "seconds": time.process_time() - began,
    }


def covers(row: dict[str, Any]) -> bool:
    """Whether the known value lies within two stated errors of the limit."""
    return row["limit"] is not None and abs(row["limit"] - row["value"]) <= 2 * row["stderr"] + 1e-9


def line(row: dict[str, Any]) -> str:
    """One run."""
    value = row["value"]
    if row["limit"] is None:
        shown = f"none ({row['reason']})"
    elif row["stderr"] == 0.0:
        shown = f"{row['limit']:.4f} exact"
    else:
        z = (row["limit"] - value) / row["stderr"]
        shown = f"{row['limit']:.4f} +- {row['stderr']:.4f}, z {z:+.2f}"
    bounds = " .. ".join("?" if b is None else f"{b:g}" for b in (row["low"], row["high"]))
    return f"{row['name']}, seed {row['seed']}: known {value:.4f}; {shown}; range {bounds}; {row['seconds']:.0f} s"


def report(rows: Sequence[dict[str, Any]]) -> None:
    """The coverage by kind and in all, and how often there is a limit."""
    width = max(len(row["kind"]) for row in rows)
    print(f"{'kind':{width}}  runs  limits given  of these exact  within two errors")
    for kind in dict.fromkeys(row["kind"] for row in rows):
        print(f"{kind:{width}}  " + _counts([row for row in rows if row["kind"] == kind]))
    print(f"{'all':{width}}  " + _counts(rows))
    given = [row for row in rows if row["limit"] is not None]
    sampled = [row for row in given if row["stderr"] > 0]
    for what, some in (("of all limits", given), ("of the extrapolated ones", sampled)):
        if some:
            share = sum(map(covers, some)) / len(some)
            print(f"within two stated errors, {what}: {share:.0%} (goal {GOAL:.0%})")
    print(f"share of runs that get a limit: {len(given) / len(rows):.0%}")
    known = [row for row in rows if row["low"] is not None and row["high"] is not None]
    outside = sum(not row["low"] - 1e-9 <= row["value"] <= row["high"] + 1e-9 for row in known)
    print(f"certain ranges: {len(known)}; known value outside: {outside}")


def _counts(rows: Sequence[dict[str, Any]]) -> str:
    given = [row for row in rows if row["limit"] is not None]
    exact = sum(row["stderr"] == 0.0 for row in given)
    return f"{len(rows):4}  {len(given):12}  {exact:14}  {sum(map(covers, given)):17}"


def read(path: Path | None) -> dict[tuple[str, int], dict[str, Any]]:
    """Finished runs by case and seed."""
    if path is None or not path.exists():
        return {}
    rows = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]
    return {(row["name"], row["seed"]): row for row in rows}


if __name__ == "__main__":
    main()
