"""How often ``strati audit`` praises worthless metrics, and how often it finds a good one.

Simulated studies of 24 metrics, networks x layers, two interventions each. Two kinds of worthless metrics: ``noise``
has nothing to do with anything; ``layers`` has a random mean in each layer, as performance has, so that metric and
performance go together over the few layers of one study by chance. ``rho 0.7``: one metric with that correlation with
performance over the points, among 23 of noise.

    python tools/calibrate_audit.py --studies 200

prints the rates that docs/audit.md states.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

import strati

SIZES = ((3, 4), (10, 6), (100, 6))
PRAISE = ("use", "use-with-care", "distinguish-only")
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
    z = (z - z.mean()) / z.std()
    columns = [rng.standard_normal(len(k)) for _ in range(METRICS)]
    if kind == "layers":
        columns = [rng.standard_normal(layers)[k] + within * own for own in columns]
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


def rates(
    networks: int, layers: int, kind: str, studies: int, *, within: float = WITHIN, draws: int = 1
) -> dict[str, float]:
    """Shares of studies that praise anything, of intervals that exclude zero, of first metrics that get "use"."""
    praised, use, out, intervals = 0, 0, 0, 0
    for seed in range(studies):
        found = strati.audit(simulated(networks, layers, kind, seed, within=within, draws=draws))
        praised += any(v.recommendation in PRAISE for v in found.verdicts)
        first = next(v for v in found.verdicts if v.metric == "metric00" and v.intervention is None)
        use += first.recommendation == "use"
        for row in found.metrics:
            if row.layer is None and row.intervention is None and row.spearman_ci is not None:
                intervals += 1
                out += not row.spearman_ci[0] <= 0.0 <= row.spearman_ci[1]
    return {"praised": praised / studies, "use": use / studies, "interval": out / max(intervals, 1)}


def main() -> None:
    """Print the table of docs/audit.md."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--studies", type=int, default=200, help="Simulated studies per line.")
    parser.add_argument("--draws", type=int, default=2, help="Re-randomised draws of each layer.")
    parser.add_argument("--within", type=float, nargs="+", default=[0.3, 1.0], help="Spreads within layers.")
    parser.add_argument(
        "--sizes", nargs="+", default=[f"{n}x{k}" for n, k in SIZES], help="Networks x layers."
    )
    wanted = parser.parse_args()
    print(
        "| networks x layers | spread within layers | metrics | studies that recommend any | "
        "intervals without zero | rho 0.7 gets `use` |"
    )
    print("| --- | --- | --- | --- | --- | --- |")
    for networks, layers in (map(int, size.split("x")) for size in wanted.sizes):
        for within in wanted.within:
            for kind in ("noise", "layers", "rho"):
                count = wanted.studies
                found = rates(networks, layers, kind, count, within=within, draws=wanted.draws)
                null = kind != "rho"
                cells = (
                    f"{networks} x {layers}",
                    f"{within:g}",
                    "rho 0.7 among noise" if not null else kind,
                    f"{100 * found['praised']:.1f} %" if null else "",
                    f"{100 * found['interval']:.1f} %" if null else "",
                    "" if null else f"{100 * found['use']:.0f} %",
                )
                print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
