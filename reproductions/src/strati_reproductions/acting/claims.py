"""What others claim about acting on layers, measured here: LASER, ShortGPT, and ranks by stable rank.

The claims were made on large networks; ours are small ones that can be had. A claim that fails here is not refuted
there, but a metric that does not help here has not earned trust either.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from strati._version import __version__
from strati.core.errors import BadInputError, StratiError
from strati.core.files import write_atomic
from strati.core.plugins import require
from strati.core.results import Flag, Tick
from strati.interventions.compress.plan import plan
from strati.interventions.kinds import drop
from strati.interventions.study import Study, study
from strati.interventions.targets import as_matrix, find_targets, values_of
from strati.interventions.tasks import Measurement, StudyData, standard_error
from strati.spectra.spectrum import spectrum
from strati_reproductions import zoo
from strati_reproductions.acting.subjects import ActingCase
from strati_reproductions.acting.table import evaluator_of, folder_of, studied
from strati_reproductions.registry import Reproduction, Row


def claims(*, quick: bool, seed: int, folder: Path, tick: Tick) -> Reproduction:
    """Run all three; quick: the fully connected network and stories15M only, on fewer sequences."""
    require("torch", "torch", "acting on networks")
    home = folder.parent / "acting"  # the studies of the table serve here too
    kept = folder_of(folder, quick, seed)
    rows: list[Row] = []
    warnings: list[Flag] = []
    for name in ("fcn-mnist", "stories15m") if quick else ("fcn-mnist", "resnet20", "stories15m", "minilm"):
        try:
            rows += _of_network(name, home, kept, quick, seed, tick)
        except StratiError as error:
            warnings.append(Flag("left-out", f"{name}: {error}"))
    if not quick:
        try:
            rows += kept_rows(
                kept / "smollm2-short-gpt.json",
                lambda: short_gpt("SmolLM2-135M", _smollm2(kept / "smollm2-drop", seed, tick)),
            )
        except StratiError as error:
            warnings.append(Flag("left-out", f"smollm2: {error}"))
    if not rows:
        raise BadInputError("acting-claims", "none of the networks is available")
    title = "Claims about acting on layers, measured on small real networks"
    return Reproduction("acting-claims", title, tuple(rows), (), tuple(warnings))


def _of_network(name: str, home: Path, kept: Path, quick: bool, seed: int, tick: Tick) -> list[Row]:
    """The claims on one network, each computed once: interrupted, the command goes on where it stopped."""
    case, found = studied(name, home, quick, seed, tick)
    parts: dict[str, Callable[[], list[Row]]] = {
        "laser": lambda: laser(case, found),
        "ranks": lambda: rank_by_stable_rank(case, found, seed),
    }
    if case.blocks:
        parts["short-gpt"] = lambda: short_gpt(case.name, _dropped(case, kept / f"{name}-drop", seed, tick))
    rows: list[Row] = []
    for part, make in parts.items():
        rows += kept_rows(kept / f"{name}-{part}.json", make, size=case.size)
        tick(f"{case.name} {part}")
    return rows


def kept_rows(path: Path, make: Callable[[], list[Row]], **about: Any) -> list[Row]:
    """Rows from a file, or made and kept there; a file of another version or size is not used."""
    about |= {"strati": __version__}
    if path.is_file():
        known = json.loads(path.read_text("utf-8"))
        if known["about"] == about:
            return [Row(**row) for row in known["rows"]]
    rows = make()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps({"about": about, "rows": [asdict(row) for row in rows]}))
    return rows


def laser(case: ActingCase, found: Study) -> list[Row]:
    """Does truncating one layer ever lower the loss? On the study's data, and again on unseen data."""
    rows = [r for r in found.rows if r["intervention"] == "truncate" and r["status"] == "done"]
    intact = {r["layer"]: np.asarray(r["groups"]) for r in found.rows if r["intervention"] == "intact"}
    better: list[tuple[float, Mapping[str, Any]]] = []
    level = 0.05 / max(len(rows), 1)
    for row in rows:
        lost = np.asarray(row["groups"]) - intact[row["layer"]]
        error = standard_error(lost)
        if error and lost.mean() / error < stats.norm.ppf(level):
            better.append((float(lost.mean()), row))
    note = f"one-sided, corrected for {len(rows)} settings"
    first = Row(
        f"LASER, {case.name}: settings that lower the loss", "some, by up to 20-30 points", len(better), note
    )
    if not better:
        return [first]
    gain, row = min(better, key=lambda pair: pair[0])
    evaluator = evaluator_of(case, found)
    before, after = evaluator.now(), evaluator.measure("truncate", {row["layer"]: row["setting"]})
    what = f"LASER, {case.name}: loss of the best, {row['layer']} {row['setting']}, on unseen data"
    return [
        first,
        Row(what, "lower", round(after.performance - before.performance, 5), f"{gain:.5f} where found"),
    ]


def rank_by_stable_rank(case: ActingCase, found: Study, seed: int) -> list[Row]:
    """Ranks in proportion to the stable rank, the measured plan and the even spread, at 0.6 of the parameters."""
    made = plan(found, budget="parameters=0.6", action="truncate", layers=case.layers, seed=seed)
    metric = _metric(case, "stable_rank")
    weights = {layer.name: metric[layer.name] / min(layer.rows, layer.cols) for layer in made.layers}
    sizes = {layer.name: layer.rows * layer.cols for layer in made.layers}
    share = _proportional(weights, sizes, 0.6)
    evaluator = evaluator_of(case, found)
    chosen = {name: f"parameters={max(s, 1e-6):.6f}" if s < 1 else "keep" for name, s in share.items()}
    even = evaluator.measure("truncate", dict.fromkeys(sizes, "parameters=0.6"))
    ours = evaluator.measure("truncate", {layer.name: layer.choice for layer in made.layers})
    what = f"rank choice, {case.name}, 0.6 of parameters: loss"
    return [
        Row(
            f"{what}, ranks by stable rank",
            "below even",
            *against(evaluator.measure("truncate", chosen), even),
        ),
        Row(f"{what}, measured plan", None, *against(ours, even)),
        Row(f"{what}, even spread", None, round(even.performance, 4)),
    ]


def short_gpt(name: str, found: Study) -> list[Row]:
    """Which block is missed least, and does block influence tell?"""
    rows = [r for r in found.rows if r["intervention"] == "drop" and r["status"] == "done"]
    order = list(found.origin.layers)
    rows.sort(key=lambda r: order.index(r["layer"]))
    lost = np.array([r["performance"] - r["intact_performance"] for r in rows])
    influence = np.array([r["block_influence"] for r in rows])
    least = int(np.argmin(lost)) + 1
    third = len(rows) / 3
    inside = third < least <= 2 * third
    rho, p = stats.spearmanr(influence, lost)
    listed = (
        " ".join(f"{x:.3g}" for x in lost) if len(rows) <= 12 else f"{lost.min():.3g} to {lost.max():.3g}"
    )
    where = "in" if inside else "not in"
    return [
        Row(
            f"ShortGPT, {name}: the block missed least",
            "a middle or late one",
            f"{least} of {len(rows)}",
            f"{where} the middle third; loss gained: {listed}",
        ),
        Row(
            f"ShortGPT, {name}: Spearman of block influence and loss gained",
            "high",
            round(float(rho), 3),
            f"p = {p:.2g}, {len(rows)} blocks",
        ),
    ]


def _dropped(case: ActingCase, folder: Path, seed: int, tick: Tick) -> Study:
    return study(
        case.model, data=case.plan, performance="loss", batch=case.batch, interventions=drop(), layers=case.layers,
        seed=seed, spectral=False, out=folder, tick=tick,
    )  # fmt: skip


def _smollm2(folder: Path, seed: int, tick: Tick) -> Study:
    from strati.io.llama_gguf import llama_from_gguf
    from strati_reproductions.datasets import external_data

    path = zoo.path("smollm2")
    transformers = require("transformers", "transformers", "SmolLM2")
    require("gguf", "gguf", "SmolLM2")
    options = {"gguf_file": path.name, "local_files_only": True}
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, **options)
    text = external_data("wikitext", "test.txt").read_text("utf-8")[:12_000]
    tokens = np.asarray(tokenizer(text, verbose=False)["input_ids"], np.int32)[:512].reshape(4, 128)
    model = llama_from_gguf(path).eval()
    settings: Any = model.config
    data = StudyData("tokens", int(settings.vocab_size), tokens[:0], None, tokens, None)
    return study(
        model, data=data, performance="loss", batch=4, interventions=drop(), seed=seed, spectral=False,
        layers=("model.layers.*",), out=folder, tick=tick,
    )  # fmt: skip


def _metric(case: ActingCase, name: str) -> dict[str, float]:
    """A data-free metric of every layer; where it is not defined, the mean of the others."""
    found: dict[str, float | None] = {}
    for target in find_targets(case.model, case.layers):
        matrix = as_matrix(values_of(case.model, target)[0], target.kind)
        value = spectrum(matrix).metrics()[name]
        found[target.name] = None if value is None else float(value)
    known = [v for v in found.values() if v is not None]
    return {layer: float(np.mean(known)) if v is None else v for layer, v in found.items()}


def _proportional(weights: Mapping[str, float], sizes: Mapping[str, int], mean: float) -> dict[str, float]:
    """Shares in proportion to weights, at most 1, whose mean over parameters is ``mean``."""
    total = sum(sizes.values()) * mean
    low, high = 0.0, 1e6
    for _ in range(200):
        middle = 0.5 * (low + high)
        used = sum(min(1.0, middle * w) * sizes[n] for n, w in weights.items())
        low, high = (middle, high) if used < total else (low, middle)
    return {n: min(1.0, low * w) for n, w in weights.items()}


def against(one: Measurement, even: Measurement) -> tuple[float, str]:
    """The loss of a choice, and its gain over an even spread, compared example by example."""
    assert one.groups is not None and even.groups is not None
    gain = even.performance - one.performance
    half = 1.96 * (standard_error(even.groups - one.groups) or 0.0)
    word = "better" if gain > half else "worse" if gain < -half else "no difference"
    return round(one.performance, 4), f"gain over even {gain:.4f} +- {half:.4f}: {word}"
