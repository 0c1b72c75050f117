"""A call of :func:`strati.study`: its options, its measure of performance, and the record of its networks and data."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from strati.core import plugins
from strati.core.errors import BadInputError
from strati.core.options import Rule, nearest
from strati.core.results import Tick, silent
from strati.interventions.kinds import (
    STANDARD,
    Point,
    as_interventions,
    identity,
    reads_inputs,
    run_length,
    suits,
    unit_of,
)
from strati.interventions.targets import Target, target_of
from strati.io.layers import as_patterns
from strati.jobs.store import Run

STORE = "study.sqlite"
DATA = "data.npz"
FORMAT = 4
"""Raised when the meaning of a row changes or a column is added, so that old rows are not mixed with new ones."""

EXPERT_TOKENS = "few-expert-tokens"
"""Warning code: an expert of a mixture saw fewer calibration tokens than it has inputs, and is left alone."""
FEW_TOKENS = "few-tokens"
"""Warning code: a layer saw fewer calibration tokens than it has inputs, so its covariance is singular."""

SCHEMES = ("auto", "pytorch", "gpt2", "vit", "timm", "kaiming", "normal", "moments")
LOSS_SCORES = ("fisher_gradient", "kl_direct", "aumann_shapley", "higgs", "hessian_trace")
"""Sensitivity scores that need passes of their own."""
FREE_SCORES = ("snr", "sqnr", "kurtosis", "outlier_ratio", "angular_distance", "block_influence", "reap")
"""Sensitivity scores that come with the measurements and are recorded always."""

OPTION_RULES = {
    "draws": Rule(int, low=1, high=1_000_000),
    "init": Rule(str, choices=SCHEMES),
    "layers": Rule(str, each=True),
    "spectral": Rule(bool),
    "htsr": Rule(bool),
    "activations": Rule(bool),
    "degeneracy": Rule(bool),
    "learning_coefficient": Rule(bool),
    "metrics": Rule(str, each=True),
    "samples": Rule(int, low=2, high=1_000_000),
    "seed": Rule(int, low=0),
    "performance": Rule(str),
    "chance": Rule(float),
    "batch": Rule(int, low=1, high=1_000_000),
    "context": Rule(int, low=2, high=1_000_000),
    "rows": Rule(int, low=1),
    "workers": Rule(int, low=0),
}
"""What the options of a study may be, in a call as in a spec."""

SECTIONS = ("network", "data", "train", "measure", "interventions", "metrics")
"""The sections of a TOML spec."""

HIGHER = frozenset({"accuracy", "auc", "bleu", "f1", "precision", "r2", "recall", "reward", "rouge"})
"""Measures of performance known by name of which more is better."""

LOWER = frozenset(
    {"bpc", "cer", "cross_entropy", "error", "fid", "kl", "loss", "mae", "mse", "nll", "perplexity"}
    | {"rmse", "wer"}
)
"""Measures of performance known by name of which less is better."""


UNIT = HIGHER - {"bleu", "r2", "reward", "rouge"}
"""Measures between 0 and 1, of which more is better."""

_STEEPEST = 50.0
"""Largest distance on the link scale: exp(50) is beyond any performance."""
_LEAST_SHARE = 1e-3
"""A loss is not predicted below this share of the intact one."""


@dataclass(frozen=True)
class StudyConfig:
    """What each layer goes through, what is recorded, and where the work runs.

    Args:
        interventions: What is done to each layer: ``strati.truncate(rank=[1, 4])`` and the like, names of those that
            need no settings, functions ``(weight, rng) -> weight`` of your own. Default: truncate, quantise, prune, and
            drop where the network has residual blocks.
        draws: Draws of every intervention that has chance in it.
        init: Distribution to re-randomise from; ``"auto"`` is the one the network's class implies.
        layers: Patterns of the layers to change (:mod:`strati.io.layers`). Default: all.
        spectral: Record every number of the layer's spectrum.
        htsr: Record also the numbers that ``scan --htsr`` adds: traps, ``erg_gap``, Hill and FARMS exponents and more.
        activations: Record how the layer's outputs differ from the intact ones (needs data).
        degeneracy: Record what ``degeneracy`` counts (needs data).
        learning_coefficient: Record the learning coefficient of the trained network when only the layer's weights vary,
            for every edit of the layer (needs data; seconds per layer).
        metrics: Sensitivity scores of edits that need passes of their own: ``"fisher_gradient"`` (the default),
            ``"kl_direct"``, ``"aumann_shapley"``, ``"higgs"``, ``"hessian_trace"``, or ``"all"`` (they need data; the
            last four cost as much as the measurements themselves). Scores that cost nothing are always recorded.
        samples: Rows of data for ``degeneracy`` and ``learning_coefficient``.
        plugins: Metrics of yours, by name: ``matrix -> number`` or ``(intact, changed) -> number``.
        seed: Random seed.
        performance: Name of the measure of performance. With ``data``: ``"accuracy"`` (the default), ``"loss"`` or
            ``"perplexity"``. With ``evaluate``: any name; without one, the function's own.
        higher_is_better: Whether more performance is better. Needed with ``evaluate`` unless the measure's name is a
            known one (``accuracy``, ``loss``, ``perplexity``, ``mse``, ``f1``, ...).
        chance: Performance of random guessing, where it is known.
        batch: Rows of data per batch.
        context: Token ids in one dimension are cut into windows of this length.
        rows: Use only the first rows of the data. Default: all.
        inputs: The array of an ``.npz`` file or the columns of a CSV file that hold the inputs.
        targets: The array or column that holds the labels.
        activation: Activation function of a bare MLP, which a checkpoint does not store.
        calibration: Data for the input covariances of data-aware edits (``metric="inputs"``, ``method="gptq"``, ...).
            Default: a random quarter of the data, which is then not used for measuring.
        initial: The initial module or its tensors by name, for ``reinitialise`` (for modules by name: one each).
        workers: Processes; with one, ``local`` works in this process; 0 for one per processor. ``None`` is 0 for a
            spec, whose networks are files, and 1 for networks in memory, of which every process would hold a copy.
        retry: Try again what failed in an earlier run.
    """

    interventions: tuple[Any, ...] = STANDARD
    draws: int = 1
    init: str = "auto"
    layers: str | Sequence[str] | None = None
    spectral: bool = True
    htsr: bool = False
    activations: bool = True
    degeneracy: bool = False
    learning_coefficient: bool = False
    metrics: str | Sequence[str] = ("fisher_gradient",)
    samples: int = 256
    plugins: Mapping[str, Callable[..., float]] = field(default_factory=dict)
    seed: int = 0
    performance: str | None = None
    higher_is_better: bool | None = None
    chance: float | None = None
    batch: int = 1000
    context: int = 128
    rows: int | None = None
    inputs: str | None = None
    targets: str | None = None
    activation: str = "relu"
    calibration: Any = field(default=None, compare=False)
    initial: Any = field(default=None, compare=False)
    workers: int | None = None
    retry: bool = False

    def __post_init__(self) -> None:
        """Make lists of single names and patterns."""
        object.__setattr__(self, "layers", as_patterns(self.layers) or ("*",))
        object.__setattr__(self, "metrics", sensitivity_scores(self.metrics))
        object.__setattr__(self, "interventions", as_interventions(self.interventions))

    @property
    def patterns(self) -> tuple[str, ...]:
        """The patterns of ``layers``."""
        return as_patterns(self.layers)

    def check(self) -> None:
        """Refuse values that no study can have.

        Raises:
            BadInputError: There is one.
        """
        for name, rule in OPTION_RULES.items():
            value = getattr(self, name)
            why = None if value is None or value == () else rule.wrong(value)
            if why is not None:
                raise BadInputError(name, why)

    def points(self, target: Target, initial: bool) -> list[Point]:
        """What a layer or block goes through; re-initialising needs initial values, a run of blocks as many blocks."""
        points = [Point("intact")]
        for intervention in self.interventions:
            unit = target.kind if target.composite else "layer"
            if unit_of(intervention.name) != unit or (intervention.name == "reinitialise" and not initial):
                continue
            for setting in intervention.settings:
                fits = run_length(intervention.name, dict(setting)) <= max(len(target.members), 1)
                if fits and suits(setting, target.type):
                    points += [
                        Point(intervention.name, setting, draw)
                        for draw in range(intervention.times(self.draws))
                    ]
        return points

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the interventions."""
        return tuple(intervention.name for intervention in self.interventions)

    @property
    def data_aware(self) -> bool:
        """Whether some setting needs the input covariances of layers."""
        return any(
            reads_inputs(setting) for intervention in self.interventions for setting in intervention.settings
        )

    def settings(self) -> dict[str, Any]:
        """The fields that rows depend on, as plain values; a part of every unit's key."""
        names = ("draws", "init", "layers", "spectral", "htsr", "activations", "degeneracy")
        more = ("learning_coefficient", "metrics", "samples", "seed", "performance", "chance", "batch")
        plain_fields = {name: getattr(self, name) for name in (*names, *more)}
        return plain_fields | {"plugins": sorted(self.plugins), "interventions": identity(self.interventions)}

    def run(
        self, tick: Tick = silent, engine: str = "local", address: str | None = None, *, workers: int = 1
    ) -> Run:
        """Where and how the units run; ``workers`` is the number of processes if the config leaves it open."""
        return Run(engine, workers if self.workers is None else self.workers, address, self.retry, tick)

    def direction(self, evaluate: Callable[..., float]) -> tuple[str, bool]:
        """The name of what ``evaluate`` returns, and whether more of it is better.

        Raises:
            BadInputError: Neither the name nor ``higher_is_better`` says which.

        Examples:
            >>> StudyConfig(performance="perplexity").direction(lambda model: 1.0)
            ('perplexity', False)
            >>> StudyConfig().direction(lambda model: 1.0)
            Traceback (most recent call last):
            strati.core.errors.BadInputError: evaluate: say whether more is better: higher_is_better=True or False
        """
        function_name = getattr(evaluate, "__name__", "")
        name = self.performance or (function_name if function_name.isidentifier() else "performance")
        key = name.lower().replace("-", "_")
        named_direction = True if key in HIGHER else False if key in LOWER else None
        if self.higher_is_better is None and named_direction is None:
            raise BadInputError("evaluate", "say whether more is better: higher_is_better=True or False")
        if named_direction is not None and self.higher_is_better not in (None, named_direction):
            word = "more" if named_direction else "less"
            why = f"contradicts the measure's name {name!r}, of which {word} is better; rename it with performance="
            raise BadInputError("higher_is_better", why)
        return name, bool(named_direction if self.higher_is_better is None else self.higher_is_better)


def sensitivity_scores(names: str | Sequence[str] | None) -> tuple[str, ...]:
    """The scores that a study is asked to compute: those named, or ``"all"``.

    Raises:
        BadInputError: There is no score of that name.

    Examples:
        >>> sensitivity_scores(["higgs", "snr"]), len(sensitivity_scores("all"))
        (('higgs',), 5)
    """
    listed = (names,) if isinstance(names, str) else tuple(names or ())
    for name in listed:
        if name not in (*LOSS_SCORES, *FREE_SCORES, "all"):
            raise BadInputError(
                "metrics", f"no score {name!r}; {nearest(str(name), (*LOSS_SCORES, *FREE_SCORES, 'all'))}"
            )
    return LOSS_SCORES if "all" in listed else tuple(name for name in LOSS_SCORES if name in listed)


@dataclass(frozen=True)
class StudyCall:
    """The arguments of a call of :func:`strati.study`, and the study's name."""

    name: str
    model: Any
    data: Any
    config: StudyConfig

    @property
    def trains(self) -> bool:
        """Whether the model stands for networks that are trained first (``study_spec.TrainedNetworks``)."""
        return hasattr(self.model, "untrained")


def builtin_names() -> tuple[str, ...]:
    """The studies that installed packages know by name."""
    return plugins.names(plugins.SPECS)


def is_spec(source: Any, *, has_measure: bool) -> bool:
    """Whether a study's source is a spec; a path is one unless ``evaluate`` or ``data`` came with it."""
    if isinstance(source, Mapping):
        plain = all(isinstance(entry, Mapping | str | int | float) for entry in source.values())
        return plain and (not has_measure or (bool(source) and set(source) <= {"name", "seed", *SECTIONS}))
    if isinstance(source, str | os.PathLike):
        return not has_measure or Path(source).suffix.lower() == ".toml" or str(source) in builtin_names()
    return isinstance(source, StudyCall)


def override(call: StudyCall, config: StudyConfig, names: set[str]) -> StudyCall:
    """The call with the options that were given by name, or that ``config`` changed, in place of the spec's."""
    default = StudyConfig()
    changed = {}
    for option in fields(StudyConfig):
        value, usual = getattr(config, option.name), getattr(default, option.name)
        differs = value != usual if option.compare else value is not usual
        if option.name != "plugins" and (option.name in names or differs):
            changed[option.name] = value
    seeded = call.trains and "seed" in changed
    model = replace(call.model, seed=config.seed) if seeded else call.model
    return replace(call, model=model, config=replace(call.config, plugins=config.plugins, **changed))


@dataclass(frozen=True)
class CostScale:
    r"""How performances become costs that add up over layers, and back.

    A cost is what is lost: loss gained, accuracy gone, and for perplexity the rise of its logarithm. Intervals are
    formed on a *link* scale on which the measure has no bound, :math:`g(s) = \ln s` for a loss,
    :math:`g(s) = \ln\frac{s}{1-s}` for an accuracy, and transformed back, so that no end of an interval is a loss
    below zero or an accuracy above one.

    Attributes:
        name: The measure of performance.
        higher_is_better: Whether more of it is better.
        intact: The performance of the intact network.
        bounded: Whether the measure has the bounds that its name implies; a user's "loss" may lie below zero.
        examples: Examples that the performance is a mean over, where that is recorded.
        chance: The performance of guessing, where it is known.
    """

    name: str
    higher_is_better: bool
    intact: float
    bounded: bool = True
    examples: int | None = None
    chance: float | None = None

    def cost(self, performance: float) -> float:
        """What is lost against the intact network."""
        lost = self._score(performance) - self._score(self.intact)
        return -lost if self.higher_is_better else lost

    def performance(self, cost: float) -> float:
        """The performance at a cost, within the bounds of the measure."""
        score = self._score(self.intact) + (-cost if self.higher_is_better else cost)
        return self._performance(min(max(score, self._least), self._most))

    def attainable(self, cost: float) -> float:
        r"""A cost that a prediction may have: one below zero leaves the performance short of the best there is.

        At a distance :math:`d` of the intact score from the best one, the cost :math:`c < 0` becomes
        :math:`-d (1 - e^{c/d})`.

        Examples:
            >>> scale = CostScale("loss", False, 0.01)
            >>> scale.attainable(0.02), round(scale.performance(scale.attainable(-0.02)), 4)
            (0.02, 0.0014)
        """
        best = self._most if self.higher_is_better else self._least
        distance = abs(best - self._score(self.intact))
        if cost >= 0 or not math.isfinite(distance):
            return cost
        return distance * math.expm1(cost / distance) if distance > 0 else 0.0

    def allowed(self, share_or_amount: float, relative: bool) -> float:
        """The cost that a budget on the loss allows; a share is one of the intact (mean) loss."""
        return share_or_amount * abs(self._score(self.intact)) if relative else share_or_amount

    def sign(self) -> float:
        """Costs of scores: minus one where more is better."""
        return -1.0 if self.higher_is_better else 1.0

    def interval(
        self, cost: float, error: float, quantile: float, model: tuple[float, float] = (0.0, 0.0)
    ) -> tuple[float, float]:
        """The interval of the performance at a cost.

        Args:
            cost: The cost.
            error: Standard error of the score, from sampling examples.
            quantile: How many standard errors the interval extends to either side.
            model: Costs by which the true one may be less and more, for reasons other than sampling.

        Returns:
            The lower and the upper end, both within the measure's bounds and around ``performance(cost)``.

        Examples:
            >>> low, high = CostScale("loss", False, 0.01).interval(0.0, 0.02, 1.96)
            >>> 0.0 < low < 0.01 < high
            True
            >>> low, high = CostScale("accuracy", True, 1.0, examples=300).interval(0.0, 0.0, 1.96)
            >>> round(low, 3), high
            (0.984, 1.0)
        """
        centre = self.performance(cost)
        score = self._inside(self._score(centre))
        below, above = self._sampling(score, quantile * error, quantile)
        less, more = (
            self._inside(self._score(self.performance(c))) for c in (cost - model[0], cost + model[1])
        )
        low, high = sorted((less, more))
        down = math.hypot(below, self._link(score) - self._link(low))
        up = math.hypot(above, self._link(high) - self._link(score))
        ends = [
            self._unlink(self._link(score) + step) for step in (-min(down, _STEEPEST), min(up, _STEEPEST))
        ]
        if self.name == "perplexity":
            ends = [self._performance(end) for end in ends]
        return min(ends[0], centre), max(ends[1], centre)

    def _sampling(self, score: float, half: float, quantile: float) -> tuple[float, float]:
        """Distances on the link scale that correspond to the sampling error."""
        if (
            self._most == 1.0
        ):  # Wilson's interval, with the number of independent examples that the error implies
            spread = score * (1.0 - score)
            squared = max(quantile**2 / (self.examples or 64), half**2 / spread)
            squared = min(squared, quantile**2)  # no fewer than one example
            middle = (score + squared / 2) / (1 + squared)
            width = math.sqrt(spread * squared + squared**2 / 4) / (1 + squared)
            ends = max(middle - width, 1e-12), min(middle + width, 1 - 1e-12)
            at = self._link(score)
            return max(at - self._link(ends[0]), 0.0), max(self._link(ends[1]) - at, 0.0)
        if self._least == 0.0:
            return half / score, math.hypot(half / score, math.log1p(self._unseen(score, quantile) / score))
        return half, half

    def _unseen(self, score: float, quantile: float) -> float:
        """The loss that examples could add which a sample with next to no loss did not happen to contain.

        Where no example of :math:`n` fails, up to :math:`q^2/(n + q^2)` of new ones may (Wilson), each at the loss of a
        guess. That counts as far as the sample may hold no such example: by :math:`e^{-n s/c}` at a mean loss of
        :math:`s` and a guess's loss of :math:`c`.
        """
        if self.chance is None or self.examples is None:
            return 0.0
        guess = self._score(self.chance)
        share = quantile**2 / (self.examples + quantile**2)
        return share * guess * math.exp(-self.examples * score / guess) if guess > 0 else 0.0

    @property
    def _least(self) -> float:
        """The lower bound of scores."""
        bounded = self.name in UNIT or self.name in LOWER
        return 0.0 if self.bounded and bounded else -math.inf

    @property
    def _most(self) -> float:
        """The upper bound of scores."""
        return 1.0 if self.bounded and self.name in UNIT else math.inf

    def _inside(self, score: float) -> float:
        """A score strictly inside the bounds."""
        if self._most == 1.0:
            margin = 0.5 / (self.examples or 64)
            return min(max(score, margin), 1.0 - margin)
        if self._least == 0.0:
            return max(score, _LEAST_SHARE * self._score(self.intact), 1e-12)
        return score

    def _link(self, score: float) -> float:
        if self._most == 1.0:
            return math.log(score) - math.log1p(-score)
        return math.log(score) if self._least == 0.0 else score

    def _unlink(self, linked: float) -> float:
        if self._most == 1.0:
            return 1.0 / (1.0 + math.exp(-linked))
        return math.exp(linked) if self._least == 0.0 else linked

    def _score(self, performance: float) -> float:
        """What is additive: the logarithm of a perplexity, any other performance itself."""
        return math.log(performance) if self.name == "perplexity" else performance

    def _performance(self, score: float) -> float:
        return math.exp(min(score, 700.0)) if self.name == "perplexity" else score


def performance_text(name: str, value: float | None, *, digits: int = 3) -> str:
    """A performance as people write it: a share as a percentage, anything else with three digits.

    Examples:
        >>> performance_text("accuracy", 0.98765), performance_text("loss", 0.031415), performance_text("loss", None)
        ('98.8 %', '0.0314', '-')
    """
    if value is None or not math.isfinite(value):
        return "-"
    return f"{100 * value:.1f} %" if name in UNIT else f"{value:.{digits}g}"


@dataclass(frozen=True)
class NetworkOrigin:
    """A network of a study: the hash of its weights, and where it is if it was read from a file."""

    hash: str
    path: str | None = None
    activation: str = "relu"


@dataclass(frozen=True)
class DataOrigin:
    """The data of a study: where they are if they were read from a file, their hash and the rows measured on."""

    source: str | None = None
    hash: str | None = None
    rows: int | None = None


@dataclass(frozen=True)
class StudyOrigin:
    """Where the networks and data of a study are, and what plans need to know of its layers.

    Attributes:
        layers: The layers and blocks that were changed, by name.
        networks: The networks by name.
        data: The data.
        batch: Rows of data per batch.
        context: Tokens per window.
        calibration: Calibration rows; ``None`` where no edit needs any.
        without_blocks: Blocks should have been dropped, but the network has none.
        stacked_experts: Layers of experts that edits of layers left alone, because one tensor holds all experts.
        others: Paths of the other networks of ``swap``, ``adapt`` and ``damp-intruders``.
        training: The sections of the spec by which the networks were trained for the study, if they were.
    """

    layers: Mapping[str, Target] = field(default_factory=dict)
    networks: Mapping[str, NetworkOrigin] = field(default_factory=dict)
    data: DataOrigin = field(default_factory=DataOrigin)
    batch: int = StudyConfig.batch
    context: int = StudyConfig.context
    calibration: int | None = None
    without_blocks: bool = False
    stacked_experts: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    training: Mapping[str, Any] | None = None

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> StudyOrigin:
        """Read ``dataclasses.asdict`` of an origin again, as a store holds it."""
        layers = {name: target_of(about) for name, about in plain["layers"].items()}
        networks = {name: NetworkOrigin(**about) for name, about in plain["networks"].items()}
        parts: dict[str, Any] = {"layers": layers, "networks": networks, "data": DataOrigin(**plain["data"])}
        parts |= {name: tuple(plain.get(name, ())) for name in ("others", "stacked_experts")}
        return cls(**{**plain, **parts})
