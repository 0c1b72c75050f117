"""How often ``strati audit`` praises worthless metrics, and how often it finds a good one.

Simulated studies of 24 metrics, networks x layers, two interventions each. Three kinds of worthless metrics: ``noise``
has nothing to do with anything; ``layers`` has a random mean in each layer, as performance has, so that metric and
performance go together over the few layers of one study by chance; ``labels`` differs between the interventions, as
performance does, and within them it is noise, so that it must not get ``use``. ``rho 0.7``: one metric with that
correlation with performance over the points, among 23 of noise.

    python tools/calibrate_audit.py --studies 200 --keep studies.jsonl

prints the rates that docs/audit.md states. Every judged study is kept in the file:
interrupted, the same command goes on.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

import strati

SIZES = ((3, 4), (10, 6), (100, 6))
PRAISE = ("use", "use-with-care", "distinguish-only")
KINDS = ("noise", "layers", "labels", "rho")
METRICS = 24
WITHIN = 0.3
"""Spread of performance within a layer over that between layers; 1.0 is the other case that is printed."""


def simulated(
    networks: int, layers: int, kind: str, seed: int, *, within: float = WITHIN, draws: int = 1
) -> strati.Study:
    """A study whose metrics are worthless (``noise``, ``layers``), or of which the first has rho 0.7 (``rho``)."""
    rng = np.random.default_rng(seed)
    slots = [("reinitialise", 0), *(("rerandomise", draw) for draw in range(draws))]
    n, k, c = (a.ravel() for a in np.indices((networks, layers, len(slots))))
    z = rng.standard_normal(layers)[k] + within * rng.standard_normal(len(k))
    if kind == "labels":
        z = within * z + 3.0 * (c == 0)
    z = (z - z.mean()) / z.std()
    columns = [rng.standard_normal(len(k)) for _ in range(METRICS)]
    if kind == "layers":
        columns = [rng.standard_normal(layers)[k] + within * own for own in columns]
    if kind == "labels":
        columns = [3.0 * (c == 0) + own for own in columns]
    if kind == "rho":
        columns[0] = 0.7 * z + np.sqrt(1 - 0.7**2) * columns[0]
    performance = 0.1 + 0.85 / (
        1.0 + np.exp(-1.5 * z)
    )  # from chance to intact, some robust and some critical
    rows: list[dict[str, Any]] = []
    for i in range(len(k)):
        intervention, draw = slots[c[i]]
        row = {"network": f"n{n[i]}", "layer": f"fc{k[i]}", "type": "linear", "setting": None, "draw": draw}
        row |= {"intervention": intervention, "status": "done", "reason": None, "initialiser": "simulated"}
        row |= {"performance": float(performance[i]), "intact_performance": 0.95}
        rows.append(row | {f"metric{j:02d}": float(column[i]) for j, column in enumerate(columns)})
    measure = {"name": "accuracy", "chance": 0.1, "higher_is_better": True}
    return strati.Study(f"{kind} {networks} x {layers}", measure, tuple(rows), len(rows))


def judged(
    networks: int, layers: int, kind: str, seed: int, *, within: float = WITHIN, draws: int = 1
) -> dict[str, Any]:
    """One simulated study: is anything praised, does the first metric get "use", which intervals exclude zero."""
    found = strati.audit(simulated(networks, layers, kind, seed, within=within, draws=draws))
    first = next(v for v in found.verdicts if v.metric == "metric00" and v.intervention is None)
    rows = [row for row in found.metrics if row.layer is None and row.intervention is None]
    intervals = [row.spearman_ci for row in rows if row.spearman_ci is not None]
    return {
        "praised": any(
            v.recommendation in (("use",) if kind == "labels" else PRAISE) for v in found.verdicts
        ),
        "use": first.recommendation == "use",
        "intervals": len(intervals),
        "without_zero": sum(not low <= 0.0 <= high for low, high in intervals),
    }


def rates(
    networks: int,
    layers: int,
    kind: str,
    studies: int,
    *,
    within: float = WITHIN,
    draws: int = 1,
    keep: Path | None = None,
) -> dict[str, float]:
    """Shares of studies that praise anything, of intervals that exclude zero, of first metrics that get "use"."""
    done: dict[str, dict[str, Any]] = {}
    if keep is not None and keep.exists():
        done = {line["key"]: line for line in map(json.loads, keep.read_text().splitlines())}
    found = []
    for seed in range(studies):
        key = f"{networks}x{layers} {kind} within={within:g} draws={draws} seed={seed}"
        if key not in done:
            done[key] = {"key": key} | judged(networks, layers, kind, seed, within=within, draws=draws)
            if keep is not None:
                with keep.open("a") as file:
                    file.write(json.dumps(done[key]) + "\n")
        found.append(done[key])
    total = {
        what: sum(one[what] for one in found) for what in ("praised", "use", "without_zero", "intervals")
    }
    return {
        "praised": total["praised"] / studies,
        "use": total["use"] / studies,
        "interval": total["without_zero"] / max(total["intervals"], 1),
    }


def main() -> None:
    """Print the table of docs/audit.md."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--studies", type=int, default=200, help="Simulated studies per line.")
    parser.add_argument("--draws", type=int, default=2, help="Re-randomised draws of each layer.")
    parser.add_argument("--within", type=float, nargs="+", default=[0.3, 1.0], help="Spreads within layers.")
    parser.add_argument(
        "--sizes", nargs="+", default=[f"{n}x{k}" for n, k in SIZES], help="Networks x layers."
    )
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS, help="Kinds of metrics.")
    parser.add_argument("--keep", type=Path, help="File of judged studies; those in it are not judged again.")
    wanted = parser.parse_args()
    print(
        "| networks x layers | spread within layers | metrics | studies | studies that recommend any | "
        "intervals without zero | rho 0.7 gets `use` |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for networks, layers in (map(int, size.split("x")) for size in wanted.sizes):
        for within in wanted.within:
            for kind in wanted.kinds:
                found = rates(
                    networks,
                    layers,
                    kind,
                    wanted.studies,
                    within=within,
                    draws=wanted.draws,
                    keep=wanted.keep,
                )
                null = kind != "rho"
                cells = (
                    f"{networks} x {layers}",
                    f"{within:g}",
                    "rho 0.7 among noise" if not null else kind,
                    str(wanted.studies),
                    f"{100 * found['praised']:.1f} %" if null else "",
                    f"{100 * found['interval']:.1f} %" if null else "",
                    "" if null else f"{100 * found['use']:.0f} %",
                )
                print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
