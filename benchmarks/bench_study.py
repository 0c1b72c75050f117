"""Studies: shared work against full forward passes and bare products; training together against one by one.

Run with: python benchmarks/bench_study.py [--quick]. CPU time on one thread; what is compared takes turns, network by
network, so that a noisy moment hits all of it; medians, all ratios from this run.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from strati.core.rng import stream
from strati.interventions.cached_forward import ActivationCache, measure_module
from strati.interventions.compress.apply import apply
from strati.interventions.edits import LayerEdits, make_change
from strati.interventions.evaluator import ChainProbe
from strati.interventions.kinds import prune, quantise, truncate
from strati.interventions.study_config import StudyConfig
from strati.interventions.study_spec import read_spec
from strati.interventions.targets import Change, Target, changed, find_targets, values_of
from strati.interventions.tasks import StudyData, make_task
from strati.landscape.mlp.sequential import as_chain
from strati_reproductions.trained.networks import MLP, Transformer, initialise
from strati_reproductions.trained.training import train

KINDS = ("reinitialise", *(f"rerandomise {draw}" for draw in range(4)))
WIDTHS = [784, 512, 512, 512, 512, 512, 10]


def medians(*works: Callable[[], object], repeats: int) -> list[float]:
    """Median CPU seconds of each, in turns."""
    found: list[list[float]] = [[] for _ in works]
    for _ in range(repeats):
        for work, times in zip(works, found, strict=True):
            start = time.process_time()
            work()
            times.append(time.process_time() - start)
    return [float(np.median(times)) for times in found]


def evaluation(networks: int, images: int, batch: int) -> None:
    rng = np.random.default_rng(0)
    data = StudyData(
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

    def shared(number: int) -> list[float]:
        probe = ChainProbe(as_chain(models[number]), task)
        found = [probe.performance]
        for target, changes in zip(targets, plans[number], strict=True):
            found += [m.performance for m in probe.measure(target, changes, activations=False)]
        return found

    @torch.inference_mode()
    def full(number: int) -> list[float]:
        model = models[number]
        found = [sum(task.add_up(task.output(model, x), y) for x, y in task.batches) / images]
        for target, changes in zip(targets, plans[number], strict=True):
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
        for _ in range(images // batch):
            for (x, w, out), count in zip(blocks, times, strict=True):
                for _ in range(count):
                    torch.mm(x, w, out=out)

    turns, same = {"shared": iter(range(networks)), "full": iter(range(networks))}, {}

    def turn(name: str, work: Callable[[int], list[float]]) -> None:
        number = next(turns[name])
        same[name, number] = work(number)

    fast, slow, least = medians(
        lambda: turn("shared", shared), lambda: turn("full", full), bare, repeats=networks
    )
    for number in range(networks):
        assert np.allclose(same["shared", number], same["full", number], atol=2.5 / images)
    what = f"all interventions ({len(KINDS)} changes a layer) of {networks} networks 784-5x512-10"
    print(f"{what} on {images} images, batch {batch}:")
    print(f"  a network: shared {fast:.2f} s, full passes {slow:.2f} s, bare products {least:.2f} s (CPU)")
    print(
        f"  full / shared = {slow / fast:.2f} (target 1.9), shared / bare = {fast / least:.2f} (target at most 1.25)",
        flush=True,
    )


def settings(images: int, batch: int, repeats: int) -> None:
    """All settings of each layer against the bare products that remain: the layer's own and all after it."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((images, 784)).astype(np.float32)
    data = StudyData("rows", 10, np.empty(0), None, x, rng.integers(0, 10, images))
    task = make_task(data, "loss", batch)
    model = MLP(WIDTHS).eval()
    initialise(model, 0, 0)
    targets = find_targets(model)
    kinds = [
        truncate(parameters=[0.2, 0.4, 0.6, 0.8]),
        quantise(bits=[2, 3, 4, 6, 8]),
        prune(share=[0.3, 0.5, 0.7]),
    ]
    plan = StudyConfig(interventions=kinds, spectral=False, activations=False)
    changes = [changes_of(model, target, plan) for target in targets]
    probe = ChainProbe(as_chain(model), task)
    count = len(changes[0])

    def shared() -> None:
        for target, some in zip(targets, changes, strict=True):
            probe.measure(target, some, activations=False)

    stages = probe.chain.stages
    kept = [[inputs[i] for inputs in probe._inputs] for i in range(len(stages))]
    outs = [torch.empty(count * batch, stage.outputs) for stage in stages]
    wide = [[x.repeat(count, 1) for x in some[:1]] for some in kept]

    @torch.inference_mode()
    def bare() -> None:
        for number in range(images // batch):
            for i, stage in enumerate(stages):
                for k in range(count):  # the changed layer: one product for every setting
                    x = kept[i][number]
                    torch.addmm(stage.bias, x, stage.weight.T, out=outs[i][k * batch : (k + 1) * batch])
                for _ in range(i):  # what follows an earlier layer: all settings in one product
                    torch.addmm(stage.bias, wide[i][0], stage.weight.T, out=outs[i])

    fast, least = medians(shared, bare, repeats=repeats)
    print(f"{count} settings of each layer of 784-5x512-10 on {images} images:")
    print(
        f"  shared {fast:.2f} s, bare products {least:.2f} s, shared / bare = {fast / least:.2f} (target at most 1.25)"
    )
    language(count, kinds, repeats)


def language(count: int, kinds: list[Any], repeats: int) -> None:
    """The same for a language model of stories15M's shape; attention counts as a product."""
    depth, width, heads, length, rows, words = 6, 288, 6, 64, 8, 4000
    rng = np.random.default_rng(0)
    data = StudyData("tokens", words, np.empty(0), None, rng.integers(0, words, (rows, length)), None)
    task = make_task(data, "loss", rows)
    model = Transformer(words, width, depth, heads, length).eval()
    plan = StudyConfig(interventions=kinds, spectral=False, activations=False)
    targets = [t for t in find_targets(model, ("blocks.*",)) if t.name.endswith(("q_proj", "up_proj"))]
    changes = [changes_of(model, target, plan) for target in targets]

    def shared() -> None:
        tapes = ActivationCache()
        for target, some in zip(targets, changes, strict=True):
            measure_module(model, task, target, some, activations=False, tapes=tapes)

    n = rows * length
    x, wide = torch.randn(n, width), torch.randn(n, 4 * width)
    q = torch.randn(rows, heads, length, width // heads)
    scaled = torch.nn.functional.scaled_dot_product_attention

    @torch.inference_mode()
    def bare() -> None:
        for target in targets:
            first = int(target.name.split(".")[1])
            for _ in range(count):
                for i in range(first, depth):
                    block = model.blocks[i]
                    if i > first or "q_proj" in target.name:
                        skipped = (block.k_proj, block.v_proj) if i == first else ()
                        for layer in (block.q_proj, block.k_proj, block.v_proj, block.o_proj):
                            if layer not in skipped:
                                torch.nn.functional.linear(x, layer.weight, layer.bias)
                        scaled(q, q, q, is_causal=True)
                    torch.nn.functional.linear(x, block.up_proj.weight, block.up_proj.bias)
                    torch.nn.functional.linear(wide, block.down_proj.weight, block.down_proj.bias)
                torch.nn.functional.linear(x, model.head.weight)

    hidden = torch.randn(rows, length, width)
    targets_of_first = task.batches[0][1]

    @torch.inference_mode()
    def plain() -> None:
        """What remains, run by hand with nothing of strati's: products, norms, activations, residuals and the loss."""
        for target in targets:
            first = int(target.name.split(".")[1])
            for _ in range(count):
                f = hidden
                for i in range(first, depth):
                    block: Any = model.blocks[i]
                    if i == first and "up_proj" in target.name:
                        f = f + block.down_proj(torch.nn.functional.gelu(block.up_proj(f)))
                    else:
                        f = block(f)
                task.each(model.head(model.norm(f)), targets_of_first)

    fast, least, whole = medians(shared, bare, plain, repeats=repeats)
    print(f"{count} settings of {len(targets)} layers of a decoder, {depth} blocks of {width}, {n} tokens:")
    print(
        f"  shared {fast:.2f} s, bare products {least:.2f} s, shared / bare = {fast / least:.2f} (target at most 1.25)"
    )
    print(
        f"  the remaining layers run by hand, with norms, activations and the loss, {whole:.2f} s: by hand / bare = "
        f"{whole / least:.2f}, shared / by hand = {fast / whole:.2f}",
        flush=True,
    )


def factored() -> None:
    """A forward pass before and after every layer of a decoder is written as two matrices."""
    depth, width, heads, length, rows, words = 6, 512, 8, 64, 8, 4000
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, words, (rows, length))
    model = Transformer(words, width, depth, heads, length).eval()
    for share in (0.6, 0.3):
        layers = [
            {"name": t.name, "choice": f"parameters={share}"} for t in find_targets(model, ("blocks.*",))
        ]
        performance = {"name": "loss", "chance": None, "higher_is_better": False}
        plan = {"action": "truncate", "layers": layers, "predicted": {}, "performance": performance}
        with tempfile.TemporaryDirectory() as home:
            found = apply(plan, model, out=Path(home) / "small", data=tokens, factored=True)
        before, after = found.seconds_before or 0.0, found.seconds_after or 0.0
        print(
            f"a decoder of {depth} blocks of {width}, its blocks factored to {share:.0%} of their parameters:"
        )
        print(
            f"  forward pass of {tokens.size} tokens {before:.3f} s before, {after:.3f} s after", flush=True
        )


def changes_of(model: torch.nn.Module, target: Target, plan: StudyConfig) -> list[Change]:
    layer = LayerEdits(target, values_of(model, target))
    known = {one.name: one for one in plan.interventions}
    points = plan.points(target, False)[1:]
    return [make_change(layer, known[p.intervention], p, np.random.default_rng(0), {}) for p in points]


def training(networks: int, images: int, batch: int, repeats: int) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((images, 784)).astype(np.float32), rng.integers(0, 10, images)
    data = StudyData("rows", 10, x, y, x[:1], y[:1])
    spec = read_spec("fcn-mnist-adam").model
    spec = replace(spec, training=replace(spec.training, epochs=1, batch=batch))
    together, single, plain, stacked, alone = medians(
        lambda: train(spec, data, range(networks)),
        lambda: [train(spec, data, [i]) for i in range(networks)],
        lambda: [plainly(torch.from_numpy(x), torch.from_numpy(y), batch) for _ in range(networks)],
        lambda: bare_training(networks, images, batch),
        lambda: [bare_training(1, images, batch) for _ in range(networks)],
        repeats=repeats,
    )
    print(f"training {networks} networks on {images} images, batch {batch}:")
    print(f"  together {together:.2f} s, an ordinary PyTorch loop, one after the other, {plain:.2f} s (CPU)")
    print(f"  ordinary / together = {plain / together:.2f} (target 1.3)")
    print(
        f"  strati's own one after the other {single:.2f} s, own / together = {single / together:.2f}; of the bare "
        f"products and updates {alone:.2f} s / {stacked:.2f} s = {alone / stacked:.2f}",
        flush=True,
    )


def plainly(x: torch.Tensor, y: torch.Tensor, batch: int) -> None:
    """One network trained as one would without strati."""
    model = MLP(WIDTHS)
    optimiser = torch.optim.Adam(model.parameters())
    order = torch.randperm(len(x))
    for start in range(0, len(x), batch):
        rows = order[start : start + batch]
        loss = torch.nn.functional.cross_entropy(model(x[rows]), y[rows])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()


def bare_training(networks: int, images: int, batch: int) -> None:
    """The arithmetic of training and nothing else: forward, both gradients, Adam's update of stacked networks."""
    shapes = list(pairwise(WIDTHS))
    rows = [torch.zeros(networks, batch, width) for width in WIDTHS]
    weights = [torch.zeros(networks, a, b) for a, b in shapes]
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    optimiser = torch.optim.Adam(weights, fused=True)
    for _ in range(images // batch):
        for i, weight in enumerate(weights):
            torch.bmm(rows[i], weight, out=rows[i + 1])
        for i, weight in reversed(list(enumerate(weights))):
            torch.bmm(rows[i].transpose(1, 2), rows[i + 1], out=weight.grad)
            if i:
                torch.bmm(rows[i + 1], weight.transpose(1, 2), out=rows[i])
        optimiser.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer networks and images")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    evaluation(2 if quick else 10, 2000 if quick else 10_000, 1000)
    settings(2000 if quick else 10_000, 1000, 3)
    factored()
    for batch in (32, 128):
        training(4 if quick else 10, 1280 if quick else 2560, batch, 2)


if __name__ == "__main__":
    main()
