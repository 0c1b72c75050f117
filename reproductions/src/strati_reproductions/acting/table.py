"""Plans against the even spread on data they did not see: four networks, three budgets of parameters, three of bits."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from strati._version import __version__
from strati.core.errors import BadInputError, StratiError
from strati.core.files import write_atomic
from strati.core.plugins import require
from strati.core.results import Flag, Tick
from strati.interventions.compress.costs import scale_of
from strati.interventions.compress.plan import Plan, plan
from strati.interventions.evaluator import Evaluator
from strati.interventions.kinds import quantise, truncate
from strati.interventions.study import Study, study
from strati.interventions.tasks import make_task, standard_error
from strati_reproductions.acting.subjects import CASES, ActingCase
from strati_reproductions.registry import Reproduction, Row

SHARES = (0.25, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
BITS = (2, 3, 4, 5, 6)
CELLS = (
    *(("truncate", f"parameters={share}") for share in (0.9, 0.8, 0.6)),
    # 4, 3 and 2.5 bits; scales and zero points of groups of 32 add 0.6.
    *(("quantise", f"bits={bits}") for bits in (4.625, 3.6, 3.1)),
)
QUICK = ("fcn-mnist", "resnet20")


@dataclass(frozen=True)
class Cell:
    """One budget of one network: losses on unseen data, and how much better the plan is."""

    plan: float
    uniform: float
    gain: float
    error: float
    predicted: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """Whether the plan is better or worse than the even spread beyond the 95 % interval of their difference."""
        half = float(stats.norm.ppf(0.975)) * self.error
        return "better" if self.gain > half else "worse" if self.gain < -half else "no difference"

    def row(self, what: str) -> Row:
        """The cell as a line of the table."""
        inside = "inside" if self.low <= self.plan <= self.high else "outside"
        note = f"gain {self.gain:.4f} +- {1.96 * self.error:.4f}: {self.verdict}"
        note += f"; predicted {self.predicted:.4f} ({inside})"
        return Row(what, None, f"{self.plan:.4f} against {self.uniform:.4f}", note)


def acting(*, quick: bool, seed: int, folder: Path, tick: Tick) -> Reproduction:
    """Study four networks (quick: the two of images, with fewer), plan six budgets each, judge on unseen data."""
    require("torch", "torch", "acting on networks")
    rows: list[Row] = []
    warnings: list[Flag] = []
    verdicts: list[str] = []
    for name in QUICK if quick else CASES:
        try:
            case, found = studied(name, folder, quick, seed, tick)
        except StratiError as error:
            warnings.append(Flag("left-out", f"{name}: {error}"))
            continue
        rows.append(Row(f"{case.name}: intact loss", None, round(whole(case, found), 4), case.size))
        for action, budget in CELLS:
            cell = kept_cell(
                folder_of(folder, quick, seed) / f"{name}-cells", case, found, action, budget, seed
            )
            verdicts.append(cell.verdict)
            rows.append(cell.row(f"{case.name}, {action} to {budget}"))
            tick(f"{case.name} {action} {budget}")
    if not verdicts:
        raise BadInputError("acting", "none of the networks is available")
    better, worse = verdicts.count("better"), verdicts.count("worse")
    rows.append(
        Row("cells in which the plan is better beyond its interval", None, f"{better} of {len(verdicts)}")
    )
    rows.append(
        Row("cells in which the plan is worse beyond its interval", None, f"{worse} of {len(verdicts)}")
    )
    title = "Plan against even spread: loss on data that the plan did not see"
    return Reproduction("acting", title, tuple(rows), (), tuple(warnings))


def folder_of(folder: Path, quick: bool, seed: int) -> Path:
    """Where the work of one size and seed lies."""
    return folder / f"{'quick' if quick else 'full'}-seed-{seed}"


def kept_cell(kept: Path, case: ActingCase, found: Study, action: str, budget: str, seed: int) -> Cell:
    """One cell, computed once: interrupted, the table goes on where it stopped."""
    path = kept / f"{action}-{budget}.json"
    about = {"strati": __version__, "size": case.size, "shares": list(SHARES), "bits": list(BITS)}
    if path.is_file():
        known = json.loads(path.read_text("utf-8"))
        if known["about"] == about:
            return Cell(**known["cell"])
    made = plan(found, budget=budget, action=action, seed=seed, layers=case.layers, combinations=4)
    cell = judge(case, made, found, seed)
    kept.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps({"about": about, "cell": asdict(cell)}).encode())
    return cell


def studied(name: str, folder: Path, quick: bool, seed: int, tick: Tick) -> tuple[ActingCase, Study]:
    """A network and the study of its layers, truncated and rounded; resumable."""
    home = folder_of(folder, quick, seed)
    home.mkdir(parents=True, exist_ok=True)
    case = CASES[name](home, quick, seed)
    kinds: list[Any] = [truncate(parameters=SHARES), quantise(bits=BITS, group=32)]
    found = study(
        case.model,
        data=case.plan,
        performance="loss",
        batch=case.batch,
        interventions=kinds,
        layers=case.layers,
        seed=seed,
        activations=False,
        spectral=False,
        out=home / name,
        tick=tick,
    )
    return case, found


def evaluator_of(case: ActingCase, found: Study) -> Evaluator:
    """The network with the data that no plan has seen."""
    task = make_task(case.test, "loss", case.batch)
    blocks = {name: target for name, target in found.origin.layers.items() if target.composite}
    return Evaluator(case.name, case.model, task=task, composites=blocks)


def whole(case: ActingCase, found: Study) -> float:
    """The intact network's loss on the unseen data."""
    return evaluator_of(case, found).now().performance


def judge(case: ActingCase, made: Plan, found: Study, seed: int) -> Cell:
    """Plan and even spread on the unseen data, compared example by example."""
    from strati.interventions.compress.budget import read_budget
    from strati.interventions.compress.candidates import Candidates
    from strati.interventions.compress.costs import read_curves

    evaluator = evaluator_of(case, found)
    unit = made.size["unit"]
    curves = read_curves(found, made.action, unit, layers=case.layers)
    rng = np.random.default_rng(seed)
    candidates = Candidates(curves, scale_of(found), read_budget(made.budget, made.action), unit, rng)
    spreads = [
        {c.layer: c.options[o].choice for c, o in zip(curves, options, strict=True)}
        for options in candidates.uniform(5)
    ]
    planned = evaluator.measure(made.action, {layer.name: layer.choice for layer in made.layers})
    even = [evaluator.measure(made.action, choices) for choices in spreads]
    assert planned.groups is not None
    groups = np.mean([e.groups for e in even if e.groups is not None], axis=0)
    error = standard_error(groups - planned.groups) or 0.0
    uniform = float(np.mean([e.performance for e in even]))
    guess = made.predicted
    return Cell(
        planned.performance, uniform, uniform - planned.performance, error, guess["performance"], guess["low"],
        guess["high"],
    )  # fmt: skip
