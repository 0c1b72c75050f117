"""Print the tables of docs/compression.md: plain and data-aware edits, even spread and plans, on unseen data.

    python tools/compression_table.py shakespeare
    python tools/compression_table.py stories15m --plans
    python tools/compression_table.py stories15m --tokens --figure docs/images/calibration_tokens.png
    python tools/compression_table.py smollm2 --only truncate parameters=0.8 --only quantise bits=3,group=32

Calibration rows, rows to plan on and rows to judge by are different. Every layer of a row of the first table gets the
same setting. ``sequential`` computes each layer's covariance on the network already changed, as ``strati apply`` does.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from scipy import stats
from torch import nn

import strati
from strati.evaluate.batches import read_path
from strati.interventions.compress.plan import plan
from strati.interventions.evaluator import Evaluator, Measurement
from strati.interventions.input_covariance import CalibrationInputs, SequentialInputs
from strati.interventions.kinds import make, read_setting
from strati.interventions.study import study
from strati.interventions.targets import find_targets, put_values
from strati.interventions.tasks import StudyData, make_task, standard_error
from strati.io.to_module import as_module

EDITS = (
    *(("truncate", f"parameters={share}", ("", "metric=inputs")) for share in (0.9, 0.8, 0.6)),
    *(
        ("quantise", f"bits={bits},group=32", ("", "method=hqq", "method=awq", "method=gptq"))
        for bits in (4, 3, 2)
    ),
    *(("prune", f"share={share}", ("", "method=wanda", "method=sparsegpt")) for share in (0.5, 0.7)),
    ("prune", "pattern=2:4", ("", "method=wanda", "method=sparsegpt")),
)
PLANS = (
    (
        "truncate",
        {"parameters": (0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)},
        "metric=inputs",
        ("parameters=0.8", "parameters=0.6"),
    ),
    ("quantise", {"bits": (2, 3, 4, 5), "group": 32}, "method=gptq", ("bits=3.6", "bits=3.1")),
    (
        "prune",
        {"share": (0.3, 0.4, 0.5, 0.6, 0.7, 0.8)},
        "method=sparsegpt",
        ("parameters=0.5", "parameters=0.3"),
    ),
)
TOKENS = (512, 2048, 8192, 32_768)


@dataclass(frozen=True)
class Network:
    """A network with three sets of data that do not overlap."""

    model: nn.Module
    layers: tuple[str, ...]
    calibration: StudyData
    plan: StudyData
    test: StudyData
    batch: int


def shakespeare() -> Network:
    """The embedded transformer on The Tempest, which it was not trained on."""
    home = strati.embedded.path("shakespeare")
    model = as_module(home).float().eval()
    ids = np.asarray(read_path(strati.embedded.path("tempest.txt"), model)).reshape(-1)
    rows = ids[: len(ids) // 128 * 128].reshape(-1, 128)
    rows = rows[np.random.default_rng(0).permutation(len(rows))]
    return _text(model, rows, (160, 100, 300))


def stories15m(length: int = 32) -> Network:
    """stories15M on sequences sampled from it at temperature 1: 1024 to calibrate, 60 to plan, 120 to judge by."""
    from strati_reproductions import zoo

    model = as_module(zoo.path("stories15m")).float().eval()
    counts = (1024, 60, 120)
    path = Path(tempfile.gettempdir()) / f"strati-stories-{sum(counts)}x{length}.npy"
    if not path.is_file():
        torch.manual_seed(0)
        start = torch.ones((sum(counts), 1), dtype=torch.long)
        options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "pad_token_id": 0}
        drawn = model.generate(start, max_length=length, min_length=length, **options)
        np.save(path, drawn.numpy())
    return _text(model, np.load(path), counts)


def smollm2() -> Network:
    """SmolLM2-135M on windows of WikiText."""
    from strati_reproductions import zoo
    from strati_reproductions.datasets import wikitext_tokens

    path = zoo.path("smollm2")
    model = as_module(path).float().eval()
    rows = np.asarray(wikitext_tokens(path, 24 * 512)).reshape(24, 512)
    return _text(model, rows[np.random.default_rng(0).permutation(24)], (16, 0, 8), batch=2)


def _text(model: nn.Module, rows: np.ndarray, counts: tuple[int, int, int], batch: int = 20) -> Network:
    parts = np.split(rows, np.cumsum(counts))[:3]
    vocabulary = int(model.config.vocab_size)
    calibration, planning, test = (StudyData("tokens", vocabulary, p[:0], None, p, None) for p in parts)
    calibration = replace(calibration, x=calibration.x_test)
    return Network(model, ("model.layers.*",), calibration, planning, test, batch)


def resnet20() -> Network:
    """ResNet-20 on CIFAR-10's test images."""
    from strati_reproductions.acting.subjects import resnet20 as images

    case = images(Path(tempfile.gettempdir()), False, 0)
    parts = [
        replace(case.test, x_test=case.test.x_test[i:j], y_test=case.test.y_test[i:j])
        for i, j in ((0, 400), (400, 3400))
    ]
    calibration = replace(parts[0], x=parts[0].x_test, y=None)
    few = replace(case.plan, x_test=case.plan.x_test[:400], y_test=case.plan.y_test[:400])
    return Network(case.model, ("*",), calibration, few, parts[1], 100)


NETWORKS = {"shakespeare": shakespeare, "stories15m": stories15m, "resnet20": resnet20, "smollm2": smollm2}


def measured(
    network: Network, action: str, choices: dict[str, str], *, sequential: bool = False
) -> Measurement:
    """The network with a setting for every layer, on the test data."""
    model = copy.deepcopy(network.model)
    inputs = (SequentialInputs if sequential else CalibrationInputs)(
        model, network.calibration.calibration_batches()
    )
    task = make_task(network.test, "loss", network.batch)
    evaluator = Evaluator("model", model, task=task, calibration=inputs)
    changes = []
    for layer, choice in choices.items():
        change = evaluator.change(action, layer, choice)
        changes.append((evaluator.target(layer), change))
        if sequential:
            put_values(model, *changes[-1])
    for target, change in changes:
        put_values(model, target, change)
    return evaluator.now()


def loss_of(network: Network, action: str, choices: dict[str, str], *, sequential: bool = False) -> str:
    """The loss on the test data with a setting for every layer."""
    return f"{measured(network, action, choices, sequential=sequential).performance:.3f}"


def gain(better: Measurement, worse: Measurement) -> str:
    """How much less the first loses, compared example by example, with a 95 % interval."""
    difference = worse.groups - better.groups
    half = stats.t.ppf(0.975, len(difference) - 1) * standard_error(difference)
    return f"{difference.mean():.3f} ± {half:.3f}"


def everywhere(network: Network, setting: str) -> dict[str, str]:
    """One setting for every layer."""
    return dict.fromkeys((t.name for t in find_targets(network.model, network.layers)), setting)


def edits_table(network: Network, only: list[list[str]]) -> Iterator[tuple[str, ...]]:
    """Plain and data-aware edits, the same setting in every layer."""
    yield ("edit", "intact covariance", "sequential")
    yield ("none", loss_of(network, "truncate", {}), "")
    for action, setting, variants in EDITS:
        if only and [action, setting] not in only:
            continue
        for variant in variants:
            choices = everywhere(network, ",".join(filter(None, (setting, variant))))
            aware = variant not in ("", "method=hqq")
            after = loss_of(network, action, choices, sequential=True) if aware else ""
            yield (f"{action} {choices[next(iter(choices))]}", loss_of(network, action, choices), after)


def plans_table(network: Network, only: list[list[str]]) -> Iterator[tuple[str, ...]]:
    """Plans of plain and of data-aware edits, judged on data that neither covariances nor plan saw."""
    heads = ("budget", "plan, plain", "even, aware", "plan, aware", "gain over even", "gain over plain")
    yield heads
    for action, settings, aware, budgets in PLANS:
        budgets = [budget for budget in budgets if not only or [action, budget] in only]
        rows: dict[str, list[Measurement]] = {budget: [] for budget in budgets}
        for extra in ({}, read_setting(aware)) if budgets else ():
            rows_of_study = study(
                network.model,
                data=network.plan,
                calibration=network.calibration.x,
                interventions=make(action, settings | extra),
                performance="loss",
                layers=network.layers,
                batch=network.batch,
                spectral=False,
                activations=False,
            )
            for budget in budgets:
                made = plan(rows_of_study, budget=budget, action=action, combinations=4)
                if extra:
                    even = dict(made.uniform["layers"])
                    rows[budget].append(measured(network, action, even, sequential=True))
                rows[budget].append(measured(network, action, made.choices, sequential=bool(extra)))
        for budget, (plain, even, planned) in rows.items():
            losses = (f"{m.performance:.3f}" for m in (plain, even, planned))
            yield (f"{action} {budget}", *losses, gain(planned, even), gain(planned, plain))


def tokens_table(network: Network, only: list[list[str]]) -> Iterator[tuple[str, ...]]:
    """Loss against the number of calibration tokens."""
    settings = (
        ("truncate", "parameters=0.6,metric=inputs"),
        ("quantise", "bits=3,group=32,method=gptq"),
        ("prune", "share=0.7,method=sparsegpt"),
    )
    settings = tuple(pair for pair in settings if not only or list(pair) in only)
    yield ("calibration tokens", *(f"{a} {s}" for a, s in settings))
    length = network.calibration.x.shape[1]
    for tokens in TOKENS:
        fewer = replace(
            network, calibration=replace(network.calibration, x=network.calibration.x[: tokens // length])
        )
        losses = [loss_of(fewer, a, everywhere(network, s), sequential=True) for a, s in settings]
        yield (str(len(fewer.calibration.x) * length), *losses)


def draw(rows: list[tuple[str, ...]], path: str) -> None:
    """The table of calibration tokens as a figure."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    heads, tokens = rows[0], [int(row[0]) for row in rows[1:]]
    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for place, name in enumerate(heads[1:], start=1):
        axes.plot(tokens, [float(row[place]) for row in rows[1:]], marker="o", label=name)
    axes.set(xscale="log", xlabel=heads[0], ylabel="loss on unseen data (nats)")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Print one table as Markdown."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("network", choices=NETWORKS)
    parser.add_argument("--plans", action="store_true", help="plans instead of the even spread")
    parser.add_argument("--tokens", action="store_true", help="loss against calibration tokens")
    parser.add_argument("--only", nargs=2, action="append", default=[], metavar=("ACTION", "SETTING"))
    parser.add_argument("--rows", type=int, metavar="N", help="use only N calibration rows")
    parser.add_argument("--figure", metavar="FILE.png", help="draw the table of --tokens")
    options = parser.parse_args()
    table = plans_table if options.plans else tokens_table if options.tokens else edits_table
    start = time.perf_counter()
    rows = []
    network = NETWORKS[options.network]()
    calibration = replace(network.calibration, x=network.calibration.x[: options.rows])
    for cells in table(replace(network, calibration=calibration), options.only):
        print(f"| {' | '.join(cells)} |", flush=True)
        if not rows:
            print("|" + " --- |" * len(cells), flush=True)
        rows.append(cells)
    if options.figure:
        draw(rows, options.figure)
    print(f"\n{time.perf_counter() - start:.0f} seconds")


if __name__ == "__main__":
    main()
