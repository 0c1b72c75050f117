"""From draws to the coefficient: its error, its limit, and whether there is a value at all.

Every estimate is recomputed from kept :class:`~strati.landscape.llc.traces.Traces` in milliseconds. How they are
drawn is in ``llc``.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias

import numpy as np

from strati.core.results import Flag, Result
from strati.landscape.llc import tuning
from strati.landscape.llc.config import FULL_DATA, LLCConfig
from strati.landscape.llc.extrapolate import Limit, consistent_rungs, extrapolate
from strati.landscape.llc.traces import Traces, control_variate_mean, ess, rhat, standard_error

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd
    from numpy.typing import NDArray
    from rich.console import RenderableType

    from strati.landscape.llc.sampling_plan import SamplingPlan


class NoEstimate(StrEnum):
    """Why there is no learning coefficient."""

    OFF_MINIMUM = "off-minimum"
    DIVERGED = "diverged"
    TOO_SHORT = "too-few-draws"
    STUCK = "stuck"
    NOT_MIXED = "not-mixed"
    DRIFTING = "drifting"
    ABOVE_HALF = "above-half"


HEADLINES = {
    NoEstimate.OFF_MINIMUM: "the loss falls nearby.",
    NoEstimate.DIVERGED: "the chains diverged.",
    NoEstimate.TOO_SHORT: "there are too few draws.",
    NoEstimate.STUCK: "the sampler is stuck.",
    NoEstimate.NOT_MIXED: "the chains have not mixed.",
    NoEstimate.DRIFTING: "the chains still drift.",
    NoEstimate.ABOVE_HALF: "the chains left the minimum.",
}
"""What the first line says for each reason."""


Settings: TypeAlias = "LLCConfig | SamplingPlan"
"""What holds ``max_rhat`` and ``seconds``."""


class NoEstimateWarning(UserWarning):
    """The chains allow no learning coefficient: ``estimate`` is ``None``."""


class Refusal(NamedTuple):
    """Why there is no value: a code, and a sentence that begins with the likeliest cause."""

    code: NoEstimate
    text: str


@dataclass(frozen=True)
class LearningCoefficient(Result):
    """A learning coefficient with its error, its limit and what the chains say about themselves.

    Attributes:
        estimate: ``nbeta (<L> - L*)`` at the stated temperature; ``None`` with a ``reason`` if the chains do not
            allow one.
        stderr: Monte Carlo standard error of ``estimate``.
        nbeta: Inverse temperature.
        gamma: Localisation.
        asymptotic: The limit for large ``nbeta``: exact where derivatives decide it (half the number of parameters
            where the Hessian has full rank), else extrapolated where the ladder shows how it is approached.
        asymptotic_stderr: Its error, with what is not known about the form of the approach; 0.0 where it is exact.
        asymptotic_low: The least limit that is possible, certain from the rank of the Hessian; ``None`` if not known.
        asymptotic_high: The largest, likewise.
        multiplicity: The likeliest multiplicity ``m``.
        rhat: Rank-normalised split R-hat of the loss.
        ess: Bulk effective sample size of the loss.
        chains: Number of chains.
        draws: Draws per chain.
        reason: Why a value is ``None``, or what was corrected.
        settings: What was sampled: ``sampler``, ``nbeta``, ``gamma``, ``chains``, ``draws``, ``warmup``, the budget
            of ``seconds`` if there was one, and the ``step`` of SGLD. Repeating with them gives the same result.
        warnings: What a reader must know: ``off-minimum``, ``not-smooth``.
        ladder: ``(nbeta, lambda, stderr)`` for every temperature sampled.
        plan: All that was decided before sampling.
        traces: All draws.
    """

    verb: ClassVar[str] = "llc"
    computed: ClassVar[Mapping[str, str]] = {"ladder": "ladder_rows", "traces": "thinned_traces"}

    estimate: float | None
    stderr: float | None
    nbeta: float
    gamma: float
    asymptotic: float | None
    asymptotic_stderr: float | None
    asymptotic_low: float | None
    asymptotic_high: float | None
    multiplicity: int | None
    rhat: float | None
    ess: float | None
    chains: int
    draws: int
    reason: str | None
    settings: Mapping[str, Any]
    warnings: tuple[Flag, ...]
    ladder: tuple[tuple[float, float, float], ...]
    traces: Traces = dataclasses.field(repr=False)
    plan: SamplingPlan | None = None

    @property
    def ladder_rows(self) -> list[dict[str, float | None]]:
        """``ladder`` as in the JSON form."""
        return [{"nbeta": n, "lambda": v, "stderr": e} for n, v, e in self.ladder]

    @property
    def thinned_traces(self) -> NDArray[Any]:
        """Some draws of ``nbeta (L - L*)``, as in the JSON form."""
        step = -(-self.draws // tuning.TRACE_POINTS)
        return np.round(self.traces.lambda_trace()[:, ::step], 6)

    def bic(self, loss: float, count: int) -> float | None:
        """The Bayesian information criterion with ``2 lambda`` for the number of parameters: ``2 n L + 2 lambda ln n``.

        For models whose parameters are not all used, where the count of parameters asks too much of the data
        (Watanabe 2013; degeneracy-in-the-loss-landscape, section 2.1). Smaller is better; differences between models
        of the same data are what counts. The limit is used where there is one, else the value at the temperature.

        Args:
            loss: ``L``: mean negative log-likelihood in nats at the parameters, such as the cross-entropy.
            count: ``n``: how many terms it is the mean of.

        Returns:
            ``None`` where the chains allow no coefficient.

        Examples:
            >>> import torch
            >>> from strati import learning_coefficient
            >>> cross = learning_coefficient(lambda w: (w[0] * w[1]) ** 2, torch.zeros(2))  # two parameters, lambda 1/2
            >>> round(cross.bic(0.5, 1000) - 1000, 1)                     # ln 1000 and not 2 ln 1000
            6.9
        """
        value = self.estimate if self.asymptotic is None else self.asymptotic
        return None if value is None else 2 * count * loss + 2 * value * math.log(count)

    def frame(self) -> pd.DataFrame:
        """One line per temperature."""
        import pandas as pd

        return pd.DataFrame(list(self.ladder), columns=["nbeta", "lambda", "stderr"])

    def summary(self) -> RenderableType:
        """The value with its settings, its interval and chains, the limit, and what a reader must know."""
        from rich.text import Text

        where = f"(nbeta {self.nbeta:.3g}, gamma {self.gamma:.3g})"
        r_hat, size = (_number(v, f) for v, f in ((self.rhat, ".2f"), (self.ess, ".0f")))
        if self.estimate is None or self.stderr is None:
            lines = [f"No learning coefficient {where}: {HEADLINES[self.missing or NoEstimate.NOT_MIXED]}"]
        else:
            low, high = (self.estimate + sign * 1.96 * self.stderr for sign in (-1, 1))
            limit = f"; limit for large nbeta: {self._limit()}" if self.asymptotic is not None else ""
            lines = [
                f"Learning coefficient {with_error(self.estimate, self.stderr)} {where}.",
                f"95 % interval {low:.3g} to {high:.3g}{limit}",
            ]
        sampler = self.settings["sampler"]
        lines.append(
            f"{self.chains} chains x {self.draws} draws ({sampler}), R-hat {r_hat}, effective sample size {size}"
        )
        lines += [self.reason] if self.reason else []
        lines += [flag.text for flag in self.warnings if flag.text != self.reason]
        return Text("\n".join(lines))

    @property
    def missing(self) -> NoEstimate | None:
        """Why ``estimate`` is ``None``, as a code."""
        codes = set(NoEstimate)
        return (
            next((NoEstimate(f.code) for f in self.warnings if f.code in codes), None)
            if self.estimate is None
            else None
        )

    def with_loss(self, name: str | None) -> LearningCoefficient:
        """The same with the name of the loss among its settings."""
        return dataclasses.replace(
            self, settings={**self.settings, "loss": None if name is None else str(name)}
        )

    def warn(self) -> LearningCoefficient:
        """Warn where there is no estimate; returns the result."""
        if self.estimate is None:
            warnings.warn(f"no learning coefficient: {self.reason}", NoEstimateWarning, stacklevel=3)
        return self

    def _limit(self) -> str:
        if self.asymptotic is not None and self.asymptotic_stderr == 0:
            return f"{self.asymptotic:.4g} (exact, from the rank of the Hessian)"
        text = with_error(self.asymptotic, self.asymptotic_stderr)
        if self.asymptotic_low is None or self.asymptotic_high is None:
            return text
        return f"{text}; certainly between {self.asymptotic_low:.4g} and {self.asymptotic_high:.4g}"

    def save_draws(self, path: str | Path) -> None:
        """Write the draws as netCDF, for ArviZ and for :func:`strati.landscape.llc.llc.load_traces`.

        Raises:
            MissingExtraError: arviz is not installed.
        """
        from strati.landscape.llc.traces import save_traces

        save_traces(self.traces, path)

    def plot(self, **options: Any) -> Any:
        """Traces, and the values over temperature with their limit."""
        from strati.report.plots.landscape import plot_llc

        return plot_llc(self, **options)


def estimate(traces: Traces, config: Settings | None = None) -> LearningCoefficient:
    """The cheap step: the coefficient, its error and its limit out of traces.

    Examples:
        >>> import torch
        >>> from strati.landscape.llc.llc import sample
        >>> settings = LLCConfig(chains=8, draws=100)
        >>> traces = sample(lambda w: (w**2).sum(), torch.zeros(1), settings)
        >>> estimate(traces).estimate == estimate(traces).estimate
        True
    """
    settings = config or traces.plan or LLCConfig()
    original = traces
    off, offset = _off_minimum(traces)
    traces = traces.lowered(offset)
    main = traces.lambda_trace()
    ladder = tuple((float(traces.nbeta[k]), *_rung(traces, k, settings)) for k in range(len(traces.nbeta)))
    value, error = control_variate_mean(traces, traces.main)
    refused = off is not None and offset == 0
    refusal = _refusal(traces, value, error, settings)
    if off is not None and refused:
        refusal = Refusal(NoEstimate.OFF_MINIMUM, off.text)
    limit, no_limit = (None, None) if refused else _limit(traces, ladder, refusal)
    low, high = (None, None) if refused or traces.around is None else traces.around.range
    remarks = [flag for flag in (off, _kinked(traces)) if flag is not None]
    if refusal is not None and not refused:
        remarks.insert(0, Flag(refusal.code, refusal.text))
    return LearningCoefficient(
        estimate=value if refusal is None else None,
        stderr=error if refusal is None else None,
        nbeta=float(traces.nbeta[traces.main]),
        gamma=traces.gamma,
        asymptotic=limit.value if limit else None,
        asymptotic_stderr=limit.stderr if limit else None,
        asymptotic_low=low,
        asymptotic_high=high,
        multiplicity=limit.multiplicity if limit else None,
        rhat=rhat(main),
        ess=ess(main),
        chains=traces.chains,
        draws=traces.draws,
        reason=refusal.text if refusal else no_limit or (remarks[0].text if remarks else None),
        settings={
            "sampler": str(traces.sampler),
            "nbeta": float(traces.nbeta[traces.main]),
            "gamma": traces.gamma,
            "chains": traces.chains,
            "draws": traces.draws,
            "warmup": traces.warmup,
            "seconds": settings.seconds,
            **({} if traces.step is None else {"step": traces.step}),
        },
        warnings=tuple(remarks),
        ladder=ladder,
        traces=original,
        plan=traces.plan,
    )


def _limit(
    traces: Traces, ladder: tuple[tuple[float, float, float], ...], refusal: Refusal | None
) -> tuple[Limit | None, str | None]:
    """The limit for large ``nbeta``, exact or extrapolated, or why there is none."""
    around = traces.around
    if around is not None and around.exact is not None:
        return Limit(around.exact, 0.0, 1), None
    if refusal is not None:
        return None, refusal.text
    if traces.main == len(ladder) - 1:
        return None, "one temperature was sampled, so there is no limit for large nbeta"
    usable = ladder[: consistent_rungs(traces)]
    hottest = float(traces.nbeta[0]) if traces.global_start else None
    limit = extrapolate(*np.array(usable, dtype=float).reshape(-1, 3).T, hottest=hottest)
    if not isinstance(limit, Limit):
        return None, limit.reason
    low, high = (None, None) if around is None else around.range
    least, most = 0.0 if low is None else low, math.inf if high is None else high
    slack = 2 * limit.stderr
    if not least - slack <= limit.value <= most + slack:
        bounds = f"{least:.4g} and {most:.4g}"
        return None, (
            f"the ladder points to {limit.value:.4g}, but the rank of the Hessian allows only values between {bounds}: "
            "the temperatures are not cold enough; a larger nbeta would help"
        )
    if limit.stderr > max(tuning.UNCERTAIN_LIMIT * limit.value, 0.05):
        return None, "the values over the ladder do not settle: no limit for large nbeta"
    return limit._replace(value=float(np.clip(limit.value, least, most))), None


def _off_minimum(traces: Traces) -> tuple[Flag | None, float]:
    """Whether a lower loss lies nearby, and by how much the values are lowered for it (0: they cannot be)."""
    around, nbeta = traces.around, float(traces.nbeta[traces.main])
    lowest = 0.0 if around is None else around.lower
    descent = 0.0 if traces.centre is None else -traces.centre
    if traces.sampler in FULL_DATA and np.isfinite(traces.excess[traces.main]).all():
        descent = max(descent, -float(traces.excess[traces.main].min()))
    if nbeta * max(lowest, descent) <= tuning.OFF_MINIMUM:
        return None, 0.0
    value = nbeta * (float(traces.excess[traces.main].mean()) + lowest)
    # Farther than draws of the posterior lie from the minimum, the given parameters have nothing to do with it.
    near = (
        nbeta * lowest <= max(2.0 * traces.parameters, 10.0)
        and nbeta * (descent - lowest) <= tuning.OFF_MINIMUM
    )
    held = math.inf if around is None or not around.minimum else around.localisation_bias(nbeta, traces.gamma)
    if near and held <= tuning.HELD_BACK * abs(value) + tuning.OFF_MINIMUM:
        text = (
            f"the parameters are not at the minimum: a loss lower by {lowest:.3g} lies nearby "
            f"(nbeta times that is {nbeta * lowest:.3g}); the values are corrected for it"
        )
        return Flag("off-minimum", text), lowest
    largest = max(lowest, descent)
    searched = around is not None and around.rank is not None
    if not searched and traces.centre is not None and nbeta * largest <= tuning.SMALL_CORRECTION * abs(value):
        text = (
            f"the parameters are not at the minimum: a loss lower by {largest:.3g} lies nearby "
            f"(nbeta times that is {nbeta * largest:.3g}); the values are corrected by that much, which may not be all"
        )
        return Flag("off-minimum", text), largest
    text = (
        f"{_first_cause(traces)}the parameters are not at a minimum of this loss: one lower by {largest:.3g} lies "
        f"nearby (nbeta times that is {nbeta * largest:.3g}); train further, or use a behavioural loss"
    )
    return Flag("off-minimum", text), 0.0


def _kinked(traces: Traces) -> Flag | None:
    if traces.around is None or traces.around.smooth:
        return None
    return Flag(
        "not-smooth",
        "the loss is not smooth (not three times differentiable) at these parameters: half the number of parameters is "
        "no upper bound there, and no range of the limit is certain",
    )


def unmixed(traces: Traces, settings: Settings) -> Refusal | None:
    """Why the draws do not represent the posterior, or ``None``: too few, stuck, diverged, not mixed, drifting."""
    main = traces.lambda_trace()
    if not np.isfinite(main).all():
        return Refusal(
            NoEstimate.DIVERGED,
            "the chains diverged: the loss became infinite; a smaller step or a larger gamma would help",
        )
    r_hat, size = rhat(main), ess(main)
    if settings.seconds is not None and (r_hat is None or traces.draws < tuning.FEWEST_TIMED):
        text = f"{settings.seconds:g} s sufficed for {traces.draws} draws of {traces.chains} chains; give more seconds"
        return Refusal(NoEstimate.TOO_SHORT, text)
    if r_hat is None or size is None:
        return Refusal(
            NoEstimate.TOO_SHORT, "too few draws to tell whether the chains mixed; give more draws"
        )
    if traces.acceptance[traces.main] < 0.1:
        share = 100 * float(traces.acceptance[traces.main])
        return Refusal(
            NoEstimate.STUCK,
            f"the sampler is stuck ({share:.1f} % of its moves accepted); a larger gamma or lower nbeta would help",
        )
    if r_hat > settings.max_rhat:
        return Refusal(
            NoEstimate.NOT_MIXED,
            f"the chains have not mixed (R-hat {r_hat:.3g} above {settings.max_rhat:g}); "
            "more draws or seconds, or a larger gamma, would help",
        )
    if drifting(traces, traces.main):
        return Refusal(
            NoEstimate.DRIFTING,
            "the chains are still on their way from where they started; more draws or seconds, or a larger gamma, "
            "would help",
        )
    if size < tuning.LEAST_ESS:
        text = f"the chains hold only {size:.0f} independent draws; more draws or seconds would help"
        return Refusal(NoEstimate.TOO_SHORT, text)
    return None


def _refusal(traces: Traces, value: float, error: float, settings: Settings) -> Refusal | None:
    """Why no value is given, or ``None``."""
    refusal = unmixed(traces, settings)
    if refusal is not None:
        return refusal
    smooth = traces.around is None or traces.around.smooth
    text_or_none = impossible(value, error, traces.parameters, smooth=smooth)
    if text_or_none is None:
        return None
    if value < 0:
        return Refusal(NoEstimate.OFF_MINIMUM, _first_cause(traces) + text_or_none)
    return Refusal(NoEstimate.ABOVE_HALF, text_or_none)


def _first_cause(traces: Traces) -> str:
    return "are these the training data? If so, " if traces.on_data else ""


def impossible(value: float, error: float, parameters: int, *, smooth: bool = True) -> str | None:
    """Why a sampled coefficient cannot be one, or ``None``: at a smooth minimum it lies between 0 and N/2."""
    if value < -3 * error:
        return (
            f"lower losses lie nearby (nbeta (<L> - L*) = {value:.4g}): the parameters are not at a minimum; "
            "train further, or use a behavioural loss"
        )
    if smooth and (value - 3 * error > tuning.ABOVE_HALF * parameters / 2 or error > 0.25 * parameters):
        return (
            f"the average {value:.4g} +- {error:.2g} cannot be that of {parameters} parameters (half of them at most): "
            "the chains left the minimum for places of higher loss; a larger gamma or more draws would help"
        )
    return None


def _rung(traces: Traces, index: int, settings: Settings) -> tuple[float, float]:
    """Value and error at one temperature, not a number where the chains do not allow one."""
    value, error = control_variate_mean(traces, index)
    smooth = traces.around is None or traces.around.smooth
    good = (
        mixed(traces, index, settings) and impossible(value, error, traces.parameters, smooth=smooth) is None
    )
    return (value, error) if good else (math.nan, math.nan)


def mixed(traces: Traces, index: int, settings: Settings) -> bool:
    """Whether the chains of one temperature move and agree."""
    r_hat = rhat(traces.lambda_trace(index))
    moving = float(traces.acceptance[index]) >= 0.1 and not drifting(traces, index)
    return moving and r_hat is not None and r_hat <= settings.max_rhat


def settled(traces: Traces, settings: Settings) -> bool:
    """Whether the temperature asked for needs no more draws, or more draws would not help chains that diverged."""
    main = traces.lambda_trace()
    if not np.isfinite(main).all() or float(traces.acceptance[traces.main]) < 0.1:
        return True
    return mixed(traces, traces.main, settings) and (ess(main) or 0.0) >= tuning.LEAST_ESS


def shows_limit(traces: Traces, settings: Settings) -> bool:
    """Whether the values of all temperatures together allow an extrapolation."""
    ladder = tuple((float(traces.nbeta[k]), *_rung(traces, k, settings)) for k in range(len(traces.nbeta)))
    return _limit(traces, ladder, None)[0] is not None


def drifting(traces: Traces, index: int) -> bool:
    """Whether loss or distance differ between the first and second half of the draws, beyond chance.

    Chains that start in one place agree with one another long before they have arrived: R-hat alone is blind to it.
    """
    half = traces.draws // 2
    if not np.isfinite(traces.excess[index]).all():
        return True
    for trace, share in ((traces.excess[index], 0.05), (traces.spread[index], 0.1)):
        first, second = trace[:, :half].mean(1), trace[:, half:].mean(1)
        change, size = second - first, abs(float(trace.mean()))
        error = float(change.std(ddof=1)) / math.sqrt(len(change))
        if (
            traces.chains < 8
        ):  # too few tell the error of their change badly; that of the mean, twice, stands in
            error = max(error, 2 * (standard_error(trace) or math.inf))
        if abs(float(change.mean())) > 4 * error + share * size:
            return True
    return False


def with_error(value: float | None, error: float | None) -> str:
    """A value and its error, both to the digit that the error leaves certain (two where it begins with a one).

    Examples:
        >>> with_error(12.8744, 0.4893), with_error(134.42, 1.93), with_error(0.49234, 0.0071)
        ('12.9 +- 0.5', '134.4 +- 1.9', '0.492 +- 0.007')
    """
    if value is None:
        return "none"
    if error is None or not error > 0:
        return f"{value:.3g}"
    leading = f"{error:.0e}"
    decimals = -int(leading[2:]) + (leading[0] == "1" or f"{error:.1e}"[0] == "1")
    return f"{value:,.{max(0, decimals)}f} +- {error:.{max(0, decimals)}f}"


def _number(value: float | None, form: str) -> str:
    return "undefined" if value is None else format(value, form)
