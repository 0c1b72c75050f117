"""Reassembly: the solve against a plain adjacent-swap repair, the whole command, and growth with depth.

Run: ``python benchmarks/bench_reassemble.py [--quick]``. All ratios are measured in one run on one BLAS thread;
the public puzzle is used where it lies beside the project, a generated network otherwise.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")  # before numpy is imported

import numpy as np  # noqa: E402

from strati.io.data_files import read_data  # noqa: E402
from strati.reassembly.reassemble import reassemble  # noqa: E402
from strati.reassembly.residual.network import stack  # noqa: E402
from strati.reassembly.residual.order import Seed, seed_order  # noqa: E402
from strati.reassembly.residual.pairing import pair  # noqa: E402
from strati.reassembly.residual.pieces import assign_roles_by_shape, read_pieces  # noqa: E402
from strati_reproductions.dropped_net.open_questions import planted_network  # noqa: E402
from strati_reproductions.dropped_net.ranking import swap_repair  # noqa: E402

PUZZLE = Path(__file__).resolve().parents[2] / "shared" / "data" / "dropped-net"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument(
        "--quick", action="store_true", help="skip the slower plain repair and deep networks"
    )
    quick = arguments.parse_args().quick
    if PUZZLE.is_dir():
        against_plain_repair(quick)
        whole_command()
    else:
        print(f"the public puzzle is absent ({PUZZLE.name}): only growth is measured")
    growth((12, 24, 48) if quick else (12, 24, 48, 96, 192))


def against_plain_repair(quick: bool) -> None:
    data = read_data(PUZZLE / "historical_data.csv", target="pred")
    pieces = read_pieces(PUZZLE / "pieces")
    x, y = data.x.astype(np.float32), data.y.astype(np.float32)
    runs = [_cpu(lambda: reassemble(pieces, x, y)) for _ in range(9)]
    total = min(cpu for cpu, _ in runs)
    ours = min(cpu * run.solve_seconds / (run.solve_seconds + run.check_seconds) for cpu, run in runs)
    exact = all(run.exact for _, run in runs)
    print(
        f"solve, until an order without error on 500 rows: {ours:.3f} s CPU, exact {exact}; "
        f"with the errors on all {len(x):,} rows and the search for other orders {total:.3f} s"
    )
    parts = stack(assign_roles_by_shape(pieces), "relu")
    pairs = pair(parts)
    target = y[:1000, None]
    for seed in (Seed.FROBENIUS,) if quick else (Seed.FROBENIUS, Seed.DELTA_NORM):
        order = seed_order(parts, pairs.ins, pairs.outs, x[:1000], seed)
        chain = (pairs.ins[order], pairs.outs[order])
        plain, (_, rounds) = min(
            (
                _cpu(lambda chain=chain: swap_repair(parts, *chain, x[:1000], target))
                for _ in range(1 if quick else 2)
            ),
            key=lambda run: run[0],
        )
        end = rounds[-1].mse if rounds else float("nan")
        print(
            f"plain adjacent-swap repair, 1,000 rows, seed {seed}: {plain:.2f} s CPU, {len(rounds)} rounds, "
            f"MSE {end:.2g}; ours takes 1/{plain / ours:.0f} of it (target 1/40), with all errors 1/{plain / total:.0f}"
        )


def whole_command() -> None:
    words = [
        sys.executable,
        "-m",
        "strati.cli.main",
        "reassemble",
        PUZZLE / "pieces",
        PUZZLE / "historical_data.csv",
    ]
    walls, cpus = [], []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        wall = time.perf_counter()
        subprocess.run(list(map(str, words)), check=True, capture_output=True)
        walls.append(time.perf_counter() - wall)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpus.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    print(f"whole command, start to exit: {min(walls):.2f} s wall, {min(cpus):.2f} s CPU (best of 5)")


def growth(sizes: tuple[int, ...]) -> None:
    """The whole solve of planted networks (pairs told by the weights, seed near but not right) by depth."""
    seconds = []
    for blocks in sizes:
        pieces, x, y = planted_network(blocks)
        taken, found = _cpu(lambda p=pieces, x=x, y=y: reassemble(p, x, y))
        seconds.append(taken)
        rounds = len(found.rounds)
        print(
            f"{blocks:4d} blocks: {taken:7.2f} s CPU, exact {found.exact}, {rounds} rounds, joint {found.searched}"
        )
    exponent = np.polyfit(np.log(sizes), np.log(seconds), 1)[0]
    print(f"growth of the time with the number of blocks: exponent {exponent:.2f}")


def _cpu(work):
    began = time.process_time()
    result = work()
    return time.process_time() - began, result


if __name__ == "__main__":
    main()
