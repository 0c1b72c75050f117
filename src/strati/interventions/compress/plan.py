"""``strati.plan``: which setting each layer should get so that a budget is met at the least measured loss.

Costs come from the rows of a study, the choice from ``budget.choose``, the prediction and its interval from
``predict``. Uniform allocation of the same budget stands beside it, measured as well.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Unpack

import numpy as np

from strati.core.errors import BadInputError
from strati.core.options import resolve
from strati.core.plugins import require
from strati.core.results import Result, Tick, silent
from strati.core.rng import stream
from strati.interventions.compress.budget import ACTIONS, Budget, read_budget, target_size
from strati.interventions.compress.costs import KEEP, Curve, Quantity, read_curves, scale_of
from strati.interventions.compress.predict import PlanOutcome, outcome_of
from strati.interventions.kinds import EXPERT_KINDS
from strati.interventions.study import Study, load_study
from strati.interventions.study_config import STORE, CostScale
from strati.io.layers import as_patterns

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import RenderableType

    from strati.core.option_types import PlanOptions
    from strati.interventions.compress.candidates import Candidates
    from strati.interventions.compress.predict import (
        Additivity,
        Combination,
        CombinationEvaluator,
        Prediction,
    )
    from strati.interventions.evaluator import Evaluator


Format = Literal[
    "peft",
    "llama.cpp",
    "llm-compressor",
    "gptqmodel",
    "auto-round",
    "modelopt",
    "compressed-tensors",
    "torchao",
    "csv",
    "json",
]


@dataclass(frozen=True)
class PlanConfig:
    """How a plan is made.

    Args:
        action: What is done to layers: ``truncate``, ``quantise``, ``prune``, ``drop``, ``drop-experts``,
            ``merge-experts`` or ``adapt``. ``None``: ``quantise`` for a budget of bits, else ``truncate``, or else the
            first of these that the study has.
        layers: Patterns of the layers that may be changed (:mod:`strati.io.layers`). Default: all.
        combinations: Random combinations that are measured to see how costs add up.
        uniform: Draws of the even spread, where it takes chance to meet the budget.
        confidence: Coverage of the intervals.
        seed: Random seed.
        screen: Of a plan from a model: ``"fisher"`` measures only the settings that the Fisher score cannot decide.
        performance: Of a plan from a model: the measure of performance (``accuracy``, ``loss``, ``perplexity``).
        inputs: Of a plan from a model: the array or columns of a data file that hold the inputs.
        targets: Of a plan from a model: the array or column of a data file that holds the labels.
        activation: Of a plan from a model: the activation function of a bare MLP.
        unit: ``"head"`` or ``"neuron"`` prunes whole attention heads or MLP neurons, the same share in every layer.
        rows: Of a plan from a model: use only the first rows of the data.
        calibration: Of a plan from a model: data for the input covariances; default a quarter of the data, which is
            then not used for measuring.
    """

    action: str | None = None
    layers: str | Sequence[str] | None = None
    combinations: int = 8
    uniform: int = 5
    confidence: float = 0.95
    seed: int = 0
    screen: str | None = None
    performance: str | None = None
    inputs: str | None = None
    targets: str | None = None
    activation: str = "relu"
    unit: str | None = None
    rows: int | None = None
    calibration: Any = None

    @property
    def patterns(self) -> tuple[str, ...]:
        """The patterns of ``layers``."""
        return as_patterns(self.layers) or ("*",)

    def check(self) -> None:
        """Refuse values that make no plan.

        Raises:
            BadInputError: There is one.
        """
        if self.action is not None and self.action not in ACTIONS:
            raise BadInputError(self.action, f"no such action; there are {', '.join(ACTIONS)}")
        if self.combinations < 0 or self.uniform < 1:
            raise BadInputError("combinations", "has to be at least 0, uniform at least 1")
        if self.unit not in (None, "head", "neuron"):
            raise BadInputError("unit", f"is head or neuron, not {self.unit!r}")
        if self.unit is not None and self.action not in (None, "prune"):
            raise BadInputError("unit", f"is for the action prune, not {self.action}")
        if self.screen not in (None, "fisher"):
            raise BadInputError("screen", f"no score {self.screen!r} to screen by; there is fisher")
        if not 0.5 <= self.confidence < 1.0:
            why = f"is the coverage of an interval, from 0.5 to below 1, not {self.confidence!r}"
            raise BadInputError("confidence", why)


@dataclass(frozen=True)
class PlannedLayer:
    """One line of a plan: what is done to a layer, what that saves, what it costs."""

    name: str
    choice: str
    saves: float
    cost: float
    cost_ci: tuple[float, float] | None
    kind: str
    rows: int
    cols: int


@dataclass(frozen=True)
class Plan(Result):
    """One setting per layer that meets a budget, with what it is predicted to do."""

    verb: ClassVar[str] = "plan"
    computed: ClassVar[Mapping[str, str]] = {
        "verdict": "verdict",
        "study": "study_place",
        "warnings": "warnings",
    }

    action: str
    budget: str
    layers: tuple[PlannedLayer, ...]
    predicted: Mapping[str, Any]
    uniform: Mapping[str, Any]
    additivity: Mapping[str, Any]
    performance: Mapping[str, Any]
    size: Mapping[str, Any]
    networks: tuple[Mapping[str, Any], ...]
    outcome: PlanOutcome
    quantity: Quantity
    exact: bool
    frontier: tuple[Mapping[str, Any], ...] = ()
    curves: tuple[Mapping[str, Any], ...] = ()
    screen: Mapping[str, Any] | None = None
    study: Study | None = field(default=None, repr=False, compare=False)

    @property
    def study_place(self) -> dict[str, Any]:
        """Where the study is, and its data's hash, as in the JSON form."""
        study = self.study
        if study is None:
            return {"store": None, "data": None, "name": None}
        store = None if study.store is None else str(Path(study.store).resolve())
        return {"store": store, "data": dataclasses.asdict(study.origin.data), "name": study.name}

    @property
    def warnings(self) -> list[dict[str, str]]:
        """The warnings of the study: layers and experts that it left alone, and covariances of few tokens."""
        return [] if self.study is None else self.study.warnings

    @property
    def choices(self) -> dict[str, str]:
        """Layer -> choice, of the layers that are changed."""
        return {layer.name: layer.choice for layer in self.layers if layer.choice != KEEP}

    @property
    def verdict(self) -> str:
        """How the plan compares with uniform allocation, in words."""
        from strati.interventions.compress.summary import verdict_of

        return verdict_of(self)

    def frame(self) -> pd.DataFrame:
        """One line per layer; of ``adapt`` with what was measured, or that it is a guess."""
        import pandas as pd

        rows = [
            {
                "name": layer.name,
                "choice": layer.choice,
                "saves": layer.saves,
                "cost": layer.cost,
                "cost_low": None if layer.cost_ci is None else layer.cost_ci[0],
                "cost_high": None if layer.cost_ci is None else layer.cost_ci[1],
            }
            for layer in self.layers
        ]
        layers = pd.DataFrame(rows)
        plain = self.quantity is Quantity.MEASURED
        return layers if plain else layers.assign(quantity=str(self.quantity))

    def summary(self) -> RenderableType:
        """The layers, the prediction, the even spread beside it, and what to think of it."""
        from strati.interventions.compress.summary import plan_summary

        return plan_summary(self)

    def export(self, path: str | Path, *, format: Format = "json") -> None:
        """Write the plan for another tool.

        ``llm-compressor`` recipe, ``gptqmodel`` dynamic config, ``auto-round`` layer config, ``modelopt`` config,
        ``compressed-tensors`` quantization config, ``torchao`` config, ``peft`` rank patterns, ``llama.cpp`` tensor
        types, ``csv``, or the plan's own ``json``.

        Raises:
            BadInputError: The plan's action has no such form, or the file cannot be written.
        """
        from strati.interventions.compress.exports import export

        export(self, path, format)


def plan(
    study: Any,
    *,
    budget: Any,
    model: Any = None,
    data: Any = None,
    out: str | Path | None = None,
    tick: Tick = silent,
    config: PlanConfig | None = None,
    **options: Unpack[PlanOptions],
) -> Plan:
    """Choose a setting for every layer: the least measured loss within a budget.

    Args:
        study: A study with the action among its interventions, or its folder. Or a network, with ``data``: the study
            is then made first.
        budget: ``"parameters=0.8"`` (share of the layers' parameters), ``"bits=4.0"`` (mean bits), ``"rank=16"`` (mean
            rank), ``"loss=+2%"`` (the smallest network whose loss rises by at most 2 %).
        model: The network, where the study does not know it.
        data: Data to measure combinations on, instead of the study's own.
        out: Of a plan from a network: the folder that its study is stored in and resumed from. Default: a folder of its
            own in strati's cache for a network from a file; for one in memory nothing is stored.
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
        >>> plan(net, data=(x, net(x).argmax(1)), budget="bits=4").action
        'quantise'
    """
    require("torch", "torch", "making a plan")
    from strati.interventions.compress.model_study import screened_study_of_model, study_of_model
    from strati.interventions.evaluator import open_evaluators

    config = resolve(PlanConfig, config, options, of=plan)
    action_name = None if config.action is None else config.action.replace("_", "-")
    config = dataclasses.replace(config, action=action_name)
    config.check()
    measured = study if isinstance(study, Study) else load_study(study) if is_study_folder(study) else None
    action = config.action or ("prune" if config.unit else default_action(budget, measured))
    config = dataclasses.replace(config, action=action)
    parsed_budget = read_budget(budget, action)
    screen = None
    if measured is not None and config.screen is not None:
        raise BadInputError("screen", "is for a plan from a model; this study has measured every setting")
    if measured is None and config.screen is not None:
        measured, screen = screened_study_of_model(study, data, parsed_budget, config, tick)
        model = data = None
    elif measured is None:
        measured = study_of_model(study, data, parsed_budget.kind, config, out, tick)
        model = data = None
    evaluators = open_evaluators(measured, model=model, data=data)
    kind = parsed_budget.kind if parsed_budget.kind != "loss" else ACTIONS[action][0]
    quantity = Quantity.UPDATE if action == "adapt" else Quantity.MEASURED
    if action == "adapt" and not any(r["intervention"] == "adapt" for r in measured.rows):
        from strati.interventions.compress.costs import gradient_curves

        if parsed_budget.kind == "loss":
            why = "the gradient's spectrum says nothing about the loss; plan a rank, or study adapt with the base"
            raise BadInputError(parsed_budget.text, why)
        curves = gradient_curves(evaluators, config.patterns)
        return _plan(
            curves,
            parsed_budget,
            kind,
            config,
            measured,
            [],
            (Quantity.GRADIENT, _hashes(measured, evaluators)),
            tick,
        )
    ranks = evaluators[0].energy_rank if evaluators else None
    curves = read_curves(measured, action, kind, layers=config.patterns, energy_rank=ranks, unit=config.unit)
    about = quantity, _hashes(measured, evaluators)
    made = _plan(curves, parsed_budget, kind, config, measured, evaluators, about, tick)
    return dataclasses.replace(made, screen=screen)


def is_study_folder(source: Any) -> bool:
    """Whether something is the folder of a study."""
    return isinstance(source, str | os.PathLike) and (Path(source) / STORE).is_file()


def default_action(budget: Any, study: Study | None = None) -> str:
    """``quantise`` for a budget of bits, else ``truncate``, or else the first action that the study has.

    Examples:
        >>> default_action("bits=4"), default_action({"bits": 4}), default_action("loss=+2%")
        ('quantise', 'quantise', 'truncate')
    """
    kind = getattr(budget, "kind", None) or str(budget).partition("=")[0]
    if isinstance(budget, Mapping):
        kind = str(next(iter(budget), ""))
    usual = "quantise" if kind.strip() == "bits" else "truncate"
    measured = {row["intervention"] for row in study.rows} if study is not None else {usual}
    fitting = [a for a, budgets in ACTIONS.items() if a in measured and kind.strip() in budgets]
    return usual if usual in measured or not fitting else fitting[0]


_NOTHING = {"performance": None, "low": None, "high": None, "measured": None, "contradicted": False}
"""What a plan that measured nothing predicts."""


def _hashes(study: Study, evaluators: Sequence[Evaluator]) -> tuple[Mapping[str, Any], ...]:
    """The networks a plan is for: those that can be measured, else those the study recorded."""
    if evaluators:
        return tuple({"name": w.name, "hash": w.digest()} for w in evaluators)
    return tuple({"name": name, "hash": origin.hash} for name, origin in study.origin.networks.items())


def _plan(
    curves: list[Curve],
    budget: Budget,
    kind: str,
    config: PlanConfig,
    study: Study,
    evaluators: Sequence[Evaluator],
    about: tuple[Quantity, tuple[Mapping[str, Any], ...]],
    tick: Tick,
) -> Plan:
    from strati.interventions.compress.candidates import Candidates, contiguous_runs
    from strati.interventions.compress.predict import (
        CombinationEvaluator,
        additivity,
        difference,
        observed,
        predict,
        selection_bias,
    )

    scale = scale_of(study)
    shapes = [c.shape for c in curves]
    action = str(config.action)
    # config.json has one number of experts, heads or neurons for all layers
    together = action in EXPERT_KINDS or config.unit is not None
    measuring = CombinationEvaluator(curves, action, scale, evaluators)
    rng = np.random.default_rng(config.seed)
    candidates = Candidates(curves, scale, budget, kind, rng)
    if candidates.loss:
        candidates.meet_loss(measuring.combination)
        spreads = [candidates.uniform_within_loss(measuring.combination)]
    else:
        spreads = candidates.uniform(0 if together else config.uniform)
    even = [measuring.combination(o) for o in _ticked(spreads, tick, "uniform")]
    plans = [] if together else [*candidates.plans(), *contiguous_runs(candidates, evaluators, action)]
    tried = [measuring.combination(o) for o in _ticked(plans, tick, "plan")] or list(even)
    if not together:
        randoms = _ticked(candidates.random(config.combinations), tick, "combination")
        tried += [measuring.combination(o) for o in randoms]
        tried += candidates.corrected(measuring.combination, [*tried, *even])
    best, fell_back = candidates.best(tried, even)
    scale = measuring.scale
    relation = additivity([c for c in (*tried, *even) if c is not best], best.predicted, best.error)
    picked = [c.options[o] for c, o in zip(curves, best.options, strict=True)]
    intact = measuring.intact_groups()
    by_adding = predict(picked, scale, relation, intact, config.confidence)
    pool = measuring.known if candidates.loss else even if fell_back else tried
    base = None if intact is None else scale.sign() * intact
    rng = stream(config.seed, "plan", "selection")
    optimism = selection_bias(best, pool, candidates.pick(pool), base, rng)
    measured = observed(best, scale, intact, config.confidence, optimism=optimism)
    evens = [observed(c, scale, intact, config.confidence) for c in even]
    gain = difference(best, even, config.confidence)
    planned = sum(o.size for o in picked)
    guessed = about[0] is Quantity.GRADIENT
    full = target_size(Budget(kind, 1.0), shapes) if kind != "rank" else float(len(curves))
    return Plan(
        action=action,
        budget=budget.text,
        layers=tuple(_line(c, o, config.confidence) for c, o in zip(curves, best.options, strict=True)),
        predicted=dict(_NOTHING) if guessed else _predicted(by_adding, measured, best, scale),
        uniform=_uniform(evens, even, measuring) | (_NOTHING if guessed else {}) | {"gain": gain},
        additivity=_additivity([*tried, *even], relation, scale),
        performance=dict(study.performance) | {"intact": scale.intact},
        size={
            "unit": kind,
            "planned": planned,
            "full": full,
            "budget": candidates.budget,
            "intact": sum(c.options[-1].size for c in curves),
        },
        networks=about[1],
        outcome=PlanOutcome.GUESS
        if guessed
        else _size_outcome(candidates, best, even)
        if candidates.loss
        else outcome_of(gain, fell_back),
        quantity=about[0],
        exact=candidates.exact,
        frontier=() if guessed else tuple(candidates.frontier(_metrics(study, curves))),
        curves=tuple(_points(c, o) for c, o in zip(curves, best.options, strict=True)),
        study=study,
    )


def _points(curve: Curve, index: int) -> dict[str, Any]:
    """A layer's curve for the page: every setting with its size and cost, and which one was chosen."""
    points = [{"choice": o.choice, "size": o.size, "cost": o.cost, "stderr": o.error} for o in curve.options]
    return {"layer": curve.layer, "choice": curve.options[index].choice, "points": points}


def _metrics(study: Study, curves: Sequence[Curve]) -> dict[str, dict[str, float]]:
    """The data-free metrics by which others spread a budget, where the study recorded them for every layer."""
    metrics: dict[str, dict[str, float]] = {}
    for name in ("alpha", "stable_rank"):
        layer_values = {
            r["layer"]: float(r[name])
            for r in study.rows
            if r["intervention"] == "intact" and r.get(name) is not None
        }
        if all(c.layer in layer_values for c in curves):
            metrics[name] = layer_values
    return metrics


def _ticked(options: Sequence[tuple[int, ...]], tick: Tick, name: str) -> Any:
    for option in options:
        yield option
        tick(name)


def _line(curve: Curve, index: int, confidence: float) -> PlannedLayer:
    from scipy import stats

    option = curve.options[index]
    half = None if option.error is None else float(stats.norm.ppf(0.5 + confidence / 2)) * option.error
    return PlannedLayer(
        curve.layer,
        option.choice,
        curve.options[-1].size - option.size,
        option.cost,
        None if half is None else (option.cost - half, option.cost + half),
        curve.kind,
        curve.shape.rows,
        curve.shape.cols,
    )


def _predicted(
    by_adding: Prediction, measured: Prediction, best: Combination, scale: CostScale
) -> dict[str, Any]:
    """The prediction from the plan's own measurement, or from added costs where it has none.

    Where an ``evaluate`` function returns one number, the sampling error is not defined, and there is no interval.
    ``contradicted`` says that the measurement lies outside the interval of the added costs.
    """
    if measured.performance is None:
        return {**vars(by_adding), "measured": None, "contradicted": False}
    value = scale.performance(float(best.measured or 0.0))
    ends = by_adding.low, by_adding.high
    contradicted = ends[0] is not None and ends[1] is not None and not ends[0] <= value <= ends[1]
    return {
        "performance": measured.performance,
        "low": measured.low,
        "high": measured.high,
        "measured": value,
        "contradicted": contradicted,
    }


def _uniform(
    evens: Sequence[Prediction], even: Sequence[Combination], measuring: CombinationEvaluator
) -> dict[str, Any]:
    """The mean over the draws of the even spread."""

    def mean(values: list[float | None]) -> float | None:
        numbers = [v for v in values if v is not None]
        return float(np.mean(numbers)) if len(numbers) == len(values) and numbers else None

    performance = mean([e.performance for e in evens])
    summed = float(np.mean([c.predicted for c in even]))
    choices = sorted({choice for c in even for choice in measuring.choices(c.options).values()})
    return {
        "performance": performance if performance is not None else measuring.scale.performance(summed),
        "low": mean([e.low for e in evens]),
        "high": mean([e.high for e in evens]),
        "draws": len(even),
        "choices": choices[:20],
        "size": float(np.mean([size_of(measuring.curves, c.options) for c in even])),
        "layers": measuring.choices(even[0].options),
    }


def _additivity(tried: Sequence[Combination], relation: Additivity, scale: CostScale) -> dict[str, Any]:
    measured_combinations = [c for c in tried if c.measured is not None and np.isfinite(c.measured)]
    pairs = [
        {"predicted": scale.performance(c.predicted), "measured": scale.performance(float(c.measured or 0.0))}
        for c in measured_combinations
    ]
    return {
        "predicted": float(np.mean([p["predicted"] for p in pairs])) if pairs else None,
        "measured": float(np.mean([p["measured"] for p in pairs])) if pairs else None,
        "n": len(pairs),
        "ratio": relation.ratio if relation.n and relation.relative else None,
        "combinations": pairs,
    }


def size_of(curves: Sequence[Curve], options: Sequence[int]) -> float:
    """The summed size of a choice."""
    return float(sum(c.options[o].size for c, o in zip(curves, options, strict=True)))


def _size_outcome(candidates: Candidates, best: Combination, even: Sequence[Combination]) -> PlanOutcome:
    """Of a budget on the loss: whether the plan is smaller than uniform allocation."""
    smaller = size_of(candidates.curves, best.options) < size_of(candidates.curves, even[0].options)
    return PlanOutcome.SMALLER if smaller else PlanOutcome.NOT_SMALLER
