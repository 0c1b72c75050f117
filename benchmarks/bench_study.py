"""Studies: shared work against full forward passes and bare products; training together against one by one.

Run with: python benchmarks/bench_study.py [--quick]. CPU time, best of several, all ratios from this run, one thread.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch

from strati.intervene.functional import ChainProbe
from strati.intervene.interventions import Change, changed, find_targets, values_of
from strati.intervene.networks import MLP, initialise
from strati.intervene.spec import read_spec
from strati.intervene.tasks import Data, make_task
from strati.intervene.training import train
from strati.landscape.chain import as_chain
from strati.rng import stream

KINDS = ("reinitialise", *(f"rerandomise {draw}" for draw in range(4)))
WIDTHS = [784, 512, 512, 512, 512, 512, 10]


def best(work: Callable[[], object], repeats: int) -> float:
    found = []
    for _ in range(repeats):
        start = time.process_time()
        work()
        found.append(time.process_time() - start)
    return min(found)


def evaluation(networks: int, images: int, batch: int, repeats: int) -> None:
    rng = np.random.default_rng(0)
    data = Data(
        "rows",
        10,
        np.empty(0),
        None,
        rng.standard_normal((images, 784)).astype(np.float32),
        rng.integers(0, 10, images),
    )
    task = make_task(data, "accuracy", batch)
    models = []
    for number in range(networks):
        model = MLP(WIDTHS).eval()
        initialise(model, 0, number)
        models.append(model)
    targets = find_targets(models[0])
    plans = [
        [
            [
                Change(
                    kind, 0, *model.scheme.draw(t, values_of(model, t), stream(0, kind, i, t.name))[:2], kind
                )
                for kind in KINDS
            ]
            for t in targets
        ]
        for i, model in enumerate(models)
    ]

    def shared() -> list[float]:
        found = []
        for model, plan in zip(models, plans, strict=True):
            probe = ChainProbe(as_chain(model), task)
            found.append(probe.performance)
            for target, changes in zip(targets, plan, strict=True):
                found += [m.performance for m in probe.measure(target, changes, activations=False)]
        return found

    @torch.inference_mode()
    def full() -> list[float]:
        found = []
        for model, plan in zip(models, plans, strict=True):
            found.append(sum(task.add_up(task.output(model, x), y) for x, y in task.batches) / images)
            for target, changes in zip(targets, plan, strict=True):
                for change in changes:
                    with changed(model, target, change):
                        total = sum(task.add_up(task.output(model, x), y) for x, y in task.batches)
                    found.append(total / images)
        return found

    sizes = list(pairwise(WIDTHS))
    blocks = [(torch.randn(batch, a), torch.randn(a, b), torch.empty(batch, b)) for a, b in sizes]
    times = [
        1 + len(KINDS) * (i + 1) for i in range(len(sizes))
    ]  # the intact pass, then changes of each layer so far

    def bare() -> None:
        for _ in range(networks * (images // batch)):
            for (x, w, out), count in zip(blocks, times, strict=True):
                for _ in range(count):
                    torch.mm(x, w, out=out)

    assert np.allclose(shared(), full(), atol=2.5 / images)
    fast, slow, least = best(shared, repeats), best(full, repeats), best(bare, repeats)
    what = f"all interventions ({len(KINDS)} changes a layer) of {networks} networks 784-5x512-10"
    print(f"{what} on {images} images, batch {batch}:")
    print(f"  shared {fast:.2f} s, full passes {slow:.2f} s, bare products {least:.2f} s (CPU)")
    print(
        f"  full / shared = {slow / fast:.2f} (target 1.9), shared / bare = {fast / least:.2f} (target at most 1.25)"
    )


def training(networks: int, images: int, batch: int, repeats: int) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((images, 784)).astype(np.float32), rng.integers(0, 10, images)
    data = Data("rows", 10, x, y, x[:1], y[:1])
    spec = read_spec("fcn-mnist")
    spec = replace(spec, train=replace(spec.train, epochs=1, batch=batch))
    together = best(lambda: train(spec, data, range(networks)), repeats)
    single = best(lambda: [train(spec, data, [i]) for i in range(networks)], repeats)
    print(f"training {networks} networks on {images} images, batch {batch}:")
    print(
        f"  together {together:.2f} s, one by one {single:.2f} s (CPU), ratio {single / together:.2f} (target 1.3)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer networks and images")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    evaluation(2 if quick else 10, 2000 if quick else 10_000, 1000, 2 if quick else 3)
    training(4 if quick else 10, 1280 if quick else 2560, 32, 2 if quick else 3)
    training(4 if quick else 10, 1280 if quick else 2560, 128, 2 if quick else 3)


if __name__ == "__main__":
    main()
