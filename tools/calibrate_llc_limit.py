"""Hold the limits of learning coefficients against the battery of known cases, and print how often they cover.

``python tools/calibrate_llc_limit.py --half final`` runs the cases that were held out when the extrapolation was tuned;
``--half development`` the others. A limit covers where the known value lies within two stated errors; a case without a
limit must hold the known value in its certain range.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np

from strati.landscape.sampling.battery import KnownCase, battery
from strati.landscape.sampling.config import LLCConfig
from strati.landscape.sampling.estimation import LearningCoefficient

GOAL = 0.90


def main() -> None:
    """Run the chosen cases and print one line each, then the coverage."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--half", choices=("development", "final", "all"), default="all")
    parser.add_argument("--seeds", type=int, default=1, help="random seeds per case")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--kind", default="", help="only kinds whose name holds this text")
    parser.add_argument("--save", type=Path, help="append ladders to this file, one JSON object per line")
    options = parser.parse_args()
    chosen = [case for case in battery() if options.kind in case.kind and options.half in ("all", case.half)]
    given: list[float] = []
    exact = ranges = without = outside = 0
    for case in chosen:
        for seed in range(options.first_seed, options.first_seed + options.seeds):
            began = time.process_time()
            result = case.run(LLCConfig(seed=seed))
            print(line(case, seed, result, time.process_time() - began), flush=True)
            if options.save is not None:
                keep(options.save, case, seed, result)
            value = float(case.value)
            if result.asymptotic is not None and result.asymptotic_stderr == 0.0:
                exact += 1
                given.append(0.0 if abs(result.asymptotic - value) < 1e-9 else np.inf)
            elif result.asymptotic is not None and result.asymptotic_stderr is not None:
                given.append((result.asymptotic - value) / result.asymptotic_stderr)
            else:
                without += 1
            if result.asymptotic_low is not None and result.asymptotic_high is not None:
                ranges += 1
                outside += not result.asymptotic_low - 1e-9 <= value <= result.asymptotic_high + 1e-9
    report(np.array(given), exact, without, ranges, outside)


def line(case: KnownCase, seed: int, result: LearningCoefficient, seconds: float) -> str:
    """One case."""
    value = float(case.value)
    if result.asymptotic is None or result.asymptotic_stderr is None:
        shown = f"none ({result.reason})"
    elif result.asymptotic_stderr == 0.0:
        shown = f"{result.asymptotic:.4f} exact"
    else:
        z = (result.asymptotic - value) / result.asymptotic_stderr
        shown = f"{result.asymptotic:.4f} +- {result.asymptotic_stderr:.4f}, z {z:+.2f}"
    limits = (result.asymptotic_low, result.asymptotic_high)
    bounds = " .. ".join("?" if b is None else f"{b:g}" for b in limits)
    return f"{case.name}, seed {seed}: known {value:.4f}; {shown}; range {bounds}; {seconds:.0f} s"


def keep(path: Path, case: KnownCase, seed: int, result: LearningCoefficient) -> None:
    """Add the ladder to a file, for tuning without sampling again."""
    row = {
        "name": case.name,
        "kind": case.kind,
        "value": float(case.value),
        "seed": seed,
        "ladder": result.ladder,
        "hottest": float(result.traces.nbeta[0]) if result.traces.global_start else None,
        "range": [result.asymptotic_low, result.asymptotic_high],
        "exact": result.asymptotic_stderr == 0.0,
    }
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def report(z: np.ndarray, exact: int, without: int, ranges: int, outside: int) -> None:
    """The coverage, of all limits and of those that were extrapolated."""
    extrapolated = len(z) - exact
    inside = int((np.abs(z) <= 2).sum())
    print(f"{len(z)} limits given ({exact} exact, {extrapolated} extrapolated), {without} runs without")
    if len(z):
        print(
            f"within two stated errors: {inside} of {len(z)} ({100 * inside / len(z):.0f} %; goal {GOAL:.0%})"
        )
    if extrapolated:
        hits = inside - exact + int(np.isinf(z).sum())
        print(f"of the extrapolated ones: {hits} of {extrapolated} ({100 * hits / extrapolated:.0f} %)")
    print(f"certain ranges: {ranges}, known value outside in {outside}")


if __name__ == "__main__":
    main()
