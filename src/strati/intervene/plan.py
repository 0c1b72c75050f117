"""``strati.plan``: which setting each layer should get so that a budget is met at the least measured loss.

Costs come from a study's rows, the choice from ``acting.choose``, the prediction and its interval from
``acting.predict``. The same budget spread evenly stands beside it, measured as well.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from strati.errors import BadInputError, require
from strati.intervene.acting.budget import ACTIONS, Budget, read_budget, target_size
from strati.intervene.acting.curves import KEEP, CostScale, Curve, read_curves, scale_of
from strati.intervene.study import Study, load_study
from strati.options import resolve
from strati.types import Result, Tick, silent

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import RenderableType

    from strati.intervene.acting.candidates import Candidates
    from strati.intervene.acting.predict import Bench, Combination, Prediction
    from strati.intervene.acting.workshop import Workshop

Format = Literal["peft", "llama.cpp", "csv", "json"]


@dataclass(frozen=True)
class PlanConfig:
    """How a plan is made.

    Args:
        action: What is done to layers: ``truncate``, ``quantise``, ``prune``, ``drop`` or ``adapt``.
        layers: Patterns of the layers that may be changed (:mod:`strati.network.select`).
        combinations: Random combinations that are measured to see how costs add up.
        uniform: Draws of the even spread, where it takes chance to meet the budget.
        level: Confidence level of the intervals.
        seed: Random seed.
    """

    action: str = "truncate"
    layers: tuple[str, ...] = ("*",)
    combinations: int = 8
    uniform: int = 5
    level: float = 0.95
    seed: int = 0

    def check(self) -> None:
        """Refuse values that make no plan.

        Raises:
            BadInputError: There is one.
        """
        if self.action not in ACTIONS:
            raise BadInputError(self.action, f"no such action; there are {', '.join(ACTIONS)}")
        if self.combinations < 0 or self.uniform < 1:
            raise BadInputError("combinations", "has to be at least 0, uniform at least 1")
        if not 0.5 <= self.level < 1.0:
            raise BadInputError("level", f"is a confidence level from 0.5 to below 1, not {self.level!r}")


@dataclass(frozen=True)
class PlannedLayer:
    """One line of a plan: what is done to a layer, what that saves, what it costs."""

    name: str
    choice: str
    saves: float
    cost: float
    cost_ci: tuple[float, float]
    kind: str
    rows: int
    cols: int


@dataclass(frozen=True)
class Plan(Result):
    """One setting per layer that meets a budget, with what it is predicted to do."""

    verb: ClassVar[str] = "plan"

    action: str
    budget: str
    layers: tuple[PlannedLayer, ...]
    predicted: Mapping[str, Any]
    uniform: Mapping[str, Any]
    additivity: Mapping[str, Any]
    performance: Mapping[str, Any]
    size: Mapping[str, Any]
    networks: tuple[Mapping[str, Any], ...]
    verdict: str
    quantity: str
    exact: bool
    frontier: tuple[Mapping[str, Any], ...] = ()
    curves: tuple[Mapping[str, Any], ...] = ()
    study: Study | None = field(default=None, repr=False, compare=False)

    @property
    def choices(self) -> dict[str, str]:
        """Layer -> choice, of the layers that are changed."""
        return {layer.name: layer.choice for layer in self.layers if layer.choice != KEEP}

    def payload(self) -> dict[str, Any]:
        """Everything but the study itself, of which the place and the data's hash are kept."""
        names = (
            *("action", "budget", "layers", "predicted", "uniform", "additivity", "performance", "size"),
            *("networks", "verdict", "quantity", "exact", "frontier", "curves"),
        )
        origin = self.study.origin if self.study is not None else {}
        store = (
            None if self.study is None or self.study.store is None else str(Path(self.study.store).resolve())
        )
        about = {"store": store, "data": origin.get("data"), "name": self.study.name if self.study else None}
        return {name: getattr(self, name) for name in names} | {"study": about}

    def frame(self) -> pd.DataFrame:
        """One line per layer; of ``adapt`` with what was measured, or that it is a guess."""
        import pandas as pd

        rows = [
            {
                "name": layer.name,
                "choice": layer.choice,
                "saves": layer.saves,
                "cost": layer.cost,
                "cost_low": layer.cost_ci[0],
                "cost_high": layer.cost_ci[1],
            }
            for layer in self.layers
        ]
        found = pd.DataFrame(rows)
        return found.assign(quantity=self.quantity) if self.quantity != "measured" else found

    def summary(self) -> RenderableType:
        """The layers, the prediction, the even spread beside it, and what to think of it."""
        from strati.intervene.acting.show import plan_summary

        return plan_summary(self)

    def export(self, path: str | Path, *, format: Format = "json") -> None:
        """Write the plan for another tool: PEFT's patterns, llama.cpp's tensor types, CSV, or its own JSON.

        Raises:
            BadInputError: The plan's action has no such form, or the file cannot be written.
        """
        from strati.intervene.acting.exports import export

        export(self, path, format)


def plan(
    study: Study | str | Path,
    *,
    budget: Any,
    model: Any = None,
    data: Any = None,
    tick: Tick = silent,
    config: PlanConfig | None = None,
    **options: Any,
) -> Plan:
    """Choose a setting for every layer: the least measured loss within a budget.

    Args:
        study: A study with the action among its interventions, or its folder.
        budget: ``"parameters=0.8"`` (share of the layers' parameters), ``"bits=4.0"`` (mean bits), ``"rank=16"`` (mean
            rank), ``"loss=+2%"`` (the smallest network whose loss rises by at most 2 %).
        model: The network, where the study does not know it.
        data: Data to measure combinations on, instead of the study's own.
        tick: Called after each combination measured.
        config: All options in one :class:`PlanConfig`.
        **options: Fields of :class:`PlanConfig` by name.

    Returns:
        The plan; ``plan.choices`` is what it does.

    Raises:
        BadInputError: A budget that cannot be met, a study without that intervention, a network that has changed.

    Examples:
        >>> import torch, strati
        >>> _ = torch.manual_seed(0)
        >>> net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
        >>> x = torch.randn(200, 8)
        >>> found = strati.study(net, data=(x, net(x).argmax(1)), performance="loss", spectral=False,
        ...                      interventions=strati.truncate(rank=[1, 2, 3]))
        >>> p = plan(found, budget="parameters=0.7", action="truncate", combinations=2)
        >>> p.size["planned"] <= 0.7 * p.size["full"]
        True
    """
    require("torch", "torch", "making a plan")
    from strati.intervene.acting.workshop import open_workshops

    config = resolve(PlanConfig, config, options, of=plan)
    config.check()
    wanted = read_budget(budget, config.action)
    measured = study if isinstance(study, Study) else load_study(study)
    workshops = open_workshops(measured, model=model, data=data)
    kind = wanted.kind if wanted.kind != "loss" else ACTIONS[config.action][0]
    quantity = UPDATE if config.action == "adapt" else "measured"
    if config.action == "adapt" and not any(r["intervention"] == "adapt" for r in measured.rows):
        from strati.intervene.acting.gradients import gradient_curves

        if wanted.kind == "loss":
            why = "the gradient's spectrum says nothing about the loss; plan a rank, or study adapt with the base"
            raise BadInputError(wanted.text, why)
        curves = gradient_curves(workshops, config.layers)
        return _plan(curves, wanted, kind, config, measured, [], (GUESS, _hashes(measured, workshops)), tick)
    ranks = workshops[0].energy_rank if workshops else None
    curves = read_curves(measured, config.action, kind, layers=config.layers, energy_rank=ranks)
    about = quantity, _hashes(measured, workshops)
    return _plan(curves, wanted, kind, config, measured, workshops, about, tick)


GUESS = "guess: share of the gradient's energy beyond the rank; no fine-tuned network was measured"
_NOTHING = {"performance": None, "low": None, "high": None, "measured": None}
"""What a plan that measured nothing predicts."""
UPDATE = "measured: what truncating the update since the base network to the rank loses"


def _hashes(study: Study, workshops: Sequence[Workshop]) -> tuple[Mapping[str, Any], ...]:
    """The networks a plan is for: those on the bench, else those the study remembers."""
    if workshops:
        return tuple({"name": w.subject.name, "hash": w.digest()} for w in workshops)
    known = study.origin.get("networks", {})
    return tuple(
        {"name": n, "hash": x["hash"]} for n, x in known.items() if isinstance(x, Mapping) and "hash" in x
    )


def load_plan(path: str | Path) -> dict[str, Any]:
    """The JSON of a plan.

    Raises:
        BadInputError: It is not there, or no plan.
    """
    place = Path(path)
    try:
        found = json.loads(place.read_text("utf-8"))
    except OSError as error:
        raise BadInputError(path, f"cannot be read ({error.strerror or error})") from None
    except (ValueError, RecursionError):
        raise BadInputError(path, "is not JSON; give the JSON file of a plan") from None
    return check_plan(found, path)


def check_plan(found: Any, path: str | Path = "plan") -> dict[str, Any]:
    """The JSON of a plan, if it is one.

    Raises:
        BadInputError: It is not.
    """
    if not isinstance(found, dict) or found.get("schema") != "strati.plan/1":
        raise BadInputError(path, "is not a plan; give the JSON file of a plan")
    layers = found.get("layers")
    if not isinstance(layers, list) or not all(
        isinstance(x, dict) and {"name", "choice"} <= set(x) for x in layers
    ):
        raise BadInputError(path, "is a damaged plan: its layers have no names or choices")
    if found.get("action") not in ACTIONS:
        raise BadInputError(path, f"is a plan of an unknown action {found.get('action')!r}")
    return found


def _plan(
    curves: list[Curve],
    budget: Budget,
    kind: str,
    config: PlanConfig,
    study: Study,
    workshops: Sequence[Workshop],
    about: tuple[str, tuple[Mapping[str, Any], ...]],
    tick: Tick,
) -> Plan:
    from strati.intervene.acting.candidates import Candidates
    from strati.intervene.acting.predict import Bench, additivity, difference, observed, predict

    scale = scale_of(study)
    shapes = [c.shape for c in curves]
    bench = Bench(curves, config.action, scale, workshops)
    rng = np.random.default_rng(config.seed)
    candidates = Candidates(curves, scale, budget, kind, rng)
    if candidates.loss:
        candidates.meet_loss(bench.combination)
        spreads = [candidates.uniform_within_loss(bench.combination)]
    else:
        spreads = candidates.uniform(config.uniform)
    even = [bench.combination(o) for o in _ticked(spreads, tick, "uniform")]
    tried = [bench.combination(o) for o in _ticked(candidates.plans(), tick, "plan")]
    tried += [
        bench.combination(o) for o in _ticked(candidates.random(config.combinations), tick, "combination")
    ]
    tried += candidates.corrected(bench.combination, [*tried, *even])
    best, fell_back = candidates.best(tried, even)
    found = additivity([c for c in (*tried, *even) if c is not best] or tried)
    picked = [c.options[o] for c, o in zip(curves, best.options, strict=True)]
    intact = bench.intact_groups()
    guess = predict(picked, scale, found, intact, config.level)
    seen = observed(best, scale, intact, config.level)
    evens = [observed(c, scale, intact, config.level) for c in even]
    gain = difference(best, even, config.level)
    planned = sum(o.size for o in picked)
    guessed = about[0] == GUESS
    full = target_size(Budget(kind, 1.0), shapes) if kind != "rank" else float(len(curves))
    return Plan(
        action=config.action,
        budget=budget.text,
        layers=tuple(_line(c, o, config.level) for c, o in zip(curves, best.options, strict=True)),
        predicted=dict(_NOTHING) if guessed else _covering(guess, seen),
        uniform=_uniform(evens, even, bench) | (_NOTHING if guessed else {}) | {"gain": gain},
        additivity=_additivity([*tried, *even], found, scale),
        performance=dict(study.performance) | {"intact": scale.intact},
        size={"unit": kind, "planned": planned, "full": full, "budget": candidates.budget},
        networks=about[1],
        verdict="not measured: the ranks are a guess from the gradient's spectrum"
        if guessed
        else _size_verdict(candidates, best, even)
        if candidates.loss
        else _verdict(gain, best, fell_back, config.level),
        quantity=about[0],
        exact=candidates.exact,
        frontier=() if guessed else tuple(candidates.frontier(_metrics(study, curves))),
        curves=tuple(_points(c, o) for c, o in zip(curves, best.options, strict=True)),
        study=study,
    )


def _points(curve: Curve, chosen: int) -> dict[str, Any]:
    """A layer's curve for the page: every setting with its size and cost, and which one was chosen."""
    points = [{"choice": o.choice, "size": o.size, "cost": o.cost, "stderr": o.error} for o in curve.options]
    return {"layer": curve.layer, "choice": curve.options[chosen].choice, "points": points}


def _metrics(study: Study, curves: Sequence[Curve]) -> dict[str, dict[str, float]]:
    """The data-free metrics by which others spread a budget, where the study recorded them for every layer."""
    found: dict[str, dict[str, float]] = {}
    for name in ("alpha", "stable_rank"):
        known = {
            r["layer"]: float(r[name])
            for r in study.rows
            if r["intervention"] == "intact" and r.get(name) is not None
        }
        if all(c.layer in known for c in curves):
            found[name] = known
    return found


def _ticked(options: Sequence[tuple[int, ...]], tick: Tick, name: str) -> Any:
    for one in options:
        yield one
        tick(name)


def _line(curve: Curve, chosen: int, level: float) -> PlannedLayer:
    from scipy import stats

    option = curve.options[chosen]
    half = float(stats.norm.ppf(0.5 + level / 2)) * option.error
    return PlannedLayer(
        curve.layer,
        option.choice,
        curve.options[-1].size - option.size,
        option.cost,
        (option.cost - half, option.cost + half),
        curve.kind,
        curve.shape.rows,
        curve.shape.cols,
    )


def _covering(guess: Prediction, seen: Prediction) -> dict[str, Any]:
    """The prediction; where the plan itself was measured, the interval covers that measurement too."""
    low, high = guess.low, guess.high
    if seen.performance is not None and low is not None and high is not None:
        low, high = min(low, seen.performance), max(high, seen.performance)
    return {"performance": guess.performance, "low": low, "high": high, "measured": seen.performance}


def _uniform(evens: Sequence[Prediction], even: Sequence[Combination], bench: Bench) -> dict[str, Any]:
    """The mean over the draws of the even spread."""

    def mean(values: list[float | None]) -> float | None:
        known = [v for v in values if v is not None]
        return float(np.mean(known)) if len(known) == len(values) and known else None

    performance = mean([e.performance for e in evens])
    summed = float(np.mean([c.predicted for c in even]))
    choices = sorted({choice for c in even for choice in bench.choices(c.options).values()})
    return {
        "performance": performance if performance is not None else bench.scale.performance(summed),
        "low": mean([e.low for e in evens]),
        "high": mean([e.high for e in evens]),
        "draws": len(even),
        "choices": choices[:20],
    }


def _additivity(tried: Sequence[Combination], found: Any, scale: CostScale) -> dict[str, Any]:
    known = [c for c in tried if c.measured is not None and np.isfinite(c.measured)]
    pairs = [
        {"predicted": scale.performance(c.predicted), "measured": scale.performance(float(c.measured or 0.0))}
        for c in known
    ]
    return {
        "predicted": float(np.mean([p["predicted"] for p in pairs])) if pairs else None,
        "measured": float(np.mean([p["measured"] for p in pairs])) if pairs else None,
        "n": len(pairs),
        "ratio": found.ratio if found.n and found.relative else None,
        "combinations": pairs,
    }


def _size_verdict(candidates: Candidates, best: Combination, even: Sequence[Combination]) -> str:
    """Of a budget on the loss: which of the two is smaller."""

    def size(options: Sequence[int]) -> float:
        return float(sum(s[o] for s, o in zip(candidates.sizes, options, strict=True)))

    full = sum(float(s[-1]) for s in candidates.sizes)
    plan, spread = size(best.options) / full, size(even[0].options) / full
    if plan < spread:
        return (
            f"smaller than the even spread within the same loss: {plan:.1%} of the size against {spread:.1%}"
        )
    return f"NOT smaller than the even spread within the same loss ({plan:.1%} against {spread:.1%})"


def _verdict(gain: Mapping[str, float | None], best: Combination, fell_back: bool, level: float) -> str:
    if fell_back:
        how = "by added costs" if best.measured is None else "of all choices measured"
        return f"{how}, nothing is better than the even spread beyond its error: the plan is the even spread"
    if gain["gain"] is None:
        return "not measured against the even spread: the network or its data are not at hand"
    if gain["low"] is None:
        word = "better" if gain["gain"] > 0 else "not better"
        return f"{word} than the even spread, but the error of that is not known"
    if gain["low"] > 0:
        interval = f"{100 * level:g} % {gain['low']:.4g} to {gain['high']:.4g}"
        return f"better than the even spread by {gain['gain']:.4g} ({interval})"
    return "NOT better than the even spread beyond its error: spread the budget evenly"
