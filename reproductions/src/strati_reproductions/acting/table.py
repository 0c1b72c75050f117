"""Plans of data-aware edits against the even spread and against plans of plain edits, on data that none of them saw."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
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
from strati.interventions.input_covariance import CalibrationInputs
from strati.interventions.kinds import quantise, truncate
from strati.interventions.study import Study, study
from strati.interventions.tasks import Measurement, make_task, standard_error
from strati_reproductions.acting.subjects import CASES, ActingCase
from strati_reproductions.registry import Reproduction, Row

SHARES = (0.25, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
BITS = (2, 3, 4, 5, 6)
CELLS = (
    *(("truncate", f"parameters={share}") for share in (0.9, 0.8, 0.6)),
    # 4, 3 and 2.5 bits; scales and zero points of groups of 32 add 0.6.
    *(("quantise", f"bits={bits}") for bits in (4.625, 3.6, 3.1)),
)
NETWORKS = ("fcn-mnist", "resnet20", "stories15m")
"""Networks of a full run. MiniLM, which revision 1 had as well, is left out to save processor time."""
QUICK = ("fcn-mnist", "resnet20")


@dataclass(frozen=True)
class Comparison:
    """The loss of another choice on unseen data, and how much better the plan is, example by example."""

    loss: float
    gain: float
    error: float

    @property
    def verdict(self) -> str:
        """Whether the plan is better or worse beyond the 95 % interval of the difference."""
        half = float(stats.norm.ppf(0.975)) * self.error
        return "better" if self.gain > half else "worse" if self.gain < -half else "no difference"

    def __str__(self) -> str:
        return f"{self.loss:.4f}, gain {self.gain:.4f} +- {1.96 * self.error:.4f}: {self.verdict}"


@dataclass(frozen=True)
class Cell:
    """One budget of one network: the loss of the plan of data-aware edits on unseen data, and two comparisons."""

    plan: float
    even: Comparison
    plain: Comparison
    predicted: float
    low: float
    high: float

    def row(self, what: str) -> Row:
        """The cell as a line of the table."""
        inside = "inside" if self.low <= self.plan <= self.high else "outside"
        note = f"even spread {self.even}; plan of plain edits {self.plain}"
        note += f"; predicted {self.predicted:.4f} ({inside})"
        facts: dict[str, float | str | bool | None] = {
            "even": self.even.verdict,
            "even_loss": self.even.loss,
            "plain": self.plain.verdict,
            "plain_loss": self.plain.loss,
        }
        return Row(what, None, round(self.plan, 4), note, key="cell", facts=facts)


def acting(*, quick: bool, seed: int, folder: Path, tick: Tick) -> Reproduction:
    """Study three networks (quick: the two of images, with fewer), plan six budgets each, judge on unseen data.

    Truncations are whitened by the input covariances and weights are quantised by GPTQ. The same budgets are planned
    with plain truncation and rounding to nearest as well.
    """
    require("torch", "torch", "acting on networks")
    rows: list[Row] = []
    warnings: list[Flag] = []
    cells: list[Cell] = []
    for name in QUICK if quick else NETWORKS:
        try:
            case, plain = studied(name, folder, quick, seed, tick)
            _, aware = studied(name, folder, quick, seed, tick, aware=True)
        except StratiError as error:
            warnings.append(Flag("left-out", f"{name}: {error}"))
            continue
        rows.append(Row(f"{case.name}: intact loss", None, round(whole(case, plain), 4), case.size))
        for action, budget in CELLS:
            cell = kept_cell(
                folder_of(folder, quick, seed) / f"{name}-cells", case, plain, aware, action, budget, seed
            )
            cells.append(cell)
            rows.append(cell.row(f"{case.name}, {action} to {budget}"))
            tick(f"{case.name} {action} {budget}")
    if not cells:
        raise BadInputError("acting", "none of the networks is available")
    for against, field in (("the even spread", "even"), ("the plan of plain edits", "plain")):
        verdicts = [getattr(cell, field).verdict for cell in cells]
        for verdict in ("better", "worse"):
            what = f"cells in which the plan is {verdict} than {against} beyond its interval"
            rows.append(Row(what, None, f"{verdicts.count(verdict)} of {len(cells)}"))
    title = "Plan against even spread and against plans of plain edits: loss on data that no plan saw"
    return Reproduction("acting", title, tuple(rows), (), tuple(warnings))


def folder_of(folder: Path, quick: bool, seed: int) -> Path:
    """Where the work of one size and seed lies."""
    return folder / f"{'quick' if quick else 'full'}-seed-{seed}"


def kept_cell(
    kept: Path, case: ActingCase, plain: Study, aware: Study, action: str, budget: str, seed: int
) -> Cell:
    """One cell, computed once: interrupted, the table goes on where it stopped."""
    path = kept / f"{action}-{budget}.json"
    about = {"strati": __version__, "size": case.size, "shares": list(SHARES), "bits": list(BITS)}
    if path.is_file():
        known = json.loads(path.read_text("utf-8"))
        if known["about"] == about:
            even, former = (Comparison(**known["cell"].pop(field)) for field in ("even", "plain"))
            return Cell(even=even, plain=former, **known["cell"])
    options: dict[str, Any] = {"budget": budget, "action": action, "seed": seed, "layers": case.layers}
    cell = judge(
        case,
        plan(plain, combinations=4, **options),
        plan(aware, combinations=4, **options),
        aware,
        seed,
    )
    kept.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps({"about": about, "cell": asdict(cell)}).encode())
    return cell


def studied(
    name: str, folder: Path, quick: bool, seed: int, tick: Tick, *, aware: bool = False
) -> tuple[ActingCase, Study]:
    """A network and the study of its layers, truncated and rounded, with data-aware edits or plain ones; resumable."""
    home = folder_of(folder, quick, seed)
    home.mkdir(parents=True, exist_ok=True)
    case = CASES[name](home, quick, seed)
    plain: list[Any] = [truncate(parameters=SHARES), quantise(bits=BITS, group=32)]
    data_aware: list[Any] = [
        truncate(parameters=SHARES, metric="inputs"),
        quantise(bits=BITS, group=32, method="gptq"),
    ]
    found = study(
        case.model,
        data=case.plan,
        calibration=case.calibration if aware else None,
        performance="loss",
        batch=case.batch,
        interventions=data_aware if aware else plain,
        layers=case.layers,
        seed=seed,
        activations=False,
        spectral=False,
        out=home / (f"{name}-aware" if aware else name),
        tick=tick,
    )
    return case, found


def evaluator_of(case: ActingCase, found: Study) -> Evaluator:
    """The network with the data that no plan has seen, and with the covariances of the intact network."""
    task = make_task(case.test, "loss", case.batch)
    blocks = {name: target for name, target in found.origin.layers.items() if target.composite}
    inputs = None
    if case.calibration is not None:
        batches = replace(case.plan, x=case.calibration).calibration_batches()
        inputs = CalibrationInputs(case.model, batches)
    return Evaluator(case.name, case.model, task=task, calibration=inputs, composites=blocks)


def whole(case: ActingCase, found: Study) -> float:
    """The intact network's loss on the unseen data."""
    return evaluator_of(case, found).now().performance


def judge(case: ActingCase, plain: Plan, aware: Plan, found: Study, seed: int) -> Cell:
    """The plan of data-aware edits, the even spread of them and the plan of plain edits, on the unseen data."""
    from strati.interventions.compress.budget import read_budget
    from strati.interventions.compress.candidates import Candidates
    from strati.interventions.compress.costs import read_curves

    evaluator = evaluator_of(case, found)
    unit = aware.size["unit"]
    curves = read_curves(found, aware.action, unit, layers=case.layers)
    rng = np.random.default_rng(seed)
    candidates = Candidates(curves, scale_of(found), read_budget(aware.budget, aware.action), unit, rng)
    spreads = [
        {c.layer: c.options[o].choice for c, o in zip(curves, options, strict=True)}
        for options in candidates.uniform(5)
    ]
    planned = evaluator.measure(aware.action, aware.choices)
    even = [evaluator.measure(aware.action, choices) for choices in spreads]
    former = evaluator.measure(plain.action, plain.choices)
    guess = aware.predicted
    return Cell(
        planned.performance,
        compared(planned, even),
        compared(planned, [former]),
        guess["performance"],
        guess["low"],
        guess["high"],
    )


def compared(planned: Measurement, others: list[Measurement]) -> Comparison:
    """How much less the plan loses than others do on average."""
    assert planned.groups is not None
    groups = np.mean([other.groups for other in others if other.groups is not None], axis=0)
    loss = float(np.mean([other.performance for other in others]))
    return Comparison(loss, loss - planned.performance, standard_error(groups - planned.groups) or 0.0)
