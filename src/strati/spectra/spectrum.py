"""One matrix and everything its eigenvalues say: :func:`spectrum` gives a :class:`Spectrum`.

The pipeline: eigenvalues, tail, noise model, phase, warnings. Each step is a frozen value that the next one reads; the
numbers themselves are computed in the modules of the steps.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Unpack

import numpy as np

from strati.core.display import as_html
from strati.core.options import resolve
from strati.core.results import Flag, Tick, jsonable, silent
from strati.spectra import verdicts
from strati.spectra.eigenvalues import (
    Eigenvalues,
    Gap,
    entropy,
    hard_rank,
    matrix_source,
    stable_rank,
    widest_gap,
)
from strati.spectra.eigenvalues import eigenvalues as compute_eigenvalues
from strati.spectra.marchenko_pastur import Bulk
from strati.spectra.noise_model import (
    AdjacentCorrelation,
    NoiseModel,
    equal_slices,
    is_sparse,
    slice_variances,
)
from strati.spectra.noise_model import noise_entries as entries_of_noise
from strati.spectra.noise_model import noise_model as model_noise
from strati.spectra.tails import EntrySizes, EntryTail, Tail, fit_tail
from strati.spectra.verdicts import LayerState, Phase, PhaseVerdict

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.core.option_types import SpectrumOptions
    from strati.core.results import FloatArray
    from strati.spectra.eigenvalues import Matrices, Source
    from strati.spectra.htsr import HeavyTailMetrics
    from strati.spectra.tail_tests import Goodness

EQUAL = 1e-3
"""Singular values within this share of each other are one value."""

_NO_EXPONENT = 1000.0  # noise of 50257 x 768 has an alpha of about 50; beyond this the tail is a point


@dataclass(frozen=True, repr=False)
class Spectrum:
    """The spectrum of one matrix, or of matrices of one shape pooled.

    Attributes:
        pooled: The eigenvalues with shape and dtype.
        tail: The power-law tail, ``None`` if there was nothing to fit.
        noise: The random part with its Marchenko-Pastur bulk, ``None`` likewise.
        verdict: The phase and what decided it.
        gap: The widest gap.
        entries: The tail of the entries' distribution.
        quasi_null: Number of quasi-null eigenvalues.
        warnings: What a reader must know.
        goodness: Result of the bootstrap test of the tail, if one was run.
        heavy_tail: Further numbers of heavy-tailed self-regularisation, if they were asked for.
    """

    pooled: Eigenvalues = field(repr=False)
    tail: Tail | None
    noise: NoiseModel | None
    verdict: PhaseVerdict | None
    gap: Gap
    entries: EntryTail
    quasi_null: int | None
    warnings: tuple[Flag, ...]
    goodness: Goodness | None = None
    heavy_tail: HeavyTailMetrics | None = None

    @property
    def eigenvalues(self) -> FloatArray:
        """Eigenvalues of ``W.T @ W``, ascending; empty if the weights are not finite."""
        return self.pooled.values

    @property
    def bulk(self) -> Bulk | None:
        """The Marchenko-Pastur bulk; of slices of unequal variance that of their mean."""
        return None if self.noise is None else self.noise.bulk

    @property
    def phase(self) -> Phase | None:
        """The phase of training, ``None`` if there is too little to tell."""
        return self.verdict.phase if self.verdict is not None else None

    @property
    def state(self) -> LayerState:
        """``learned``, ``random-like``, ``too-small`` or ``broken``."""
        return verdicts.decide_state(
            (flag.code for flag in self.warnings), self.verdict, self.eigenvalues.size
        )

    @cached_property
    def _metrics(self) -> dict[str, Any]:
        return _measure(self)

    def metrics(self) -> dict[str, Any]:
        """Every number of a ``scan`` row, under the same name; ``None`` where it is not defined."""
        return dict(self._metrics)

    def to_dict(self) -> dict[str, Any]:
        """Metrics, warnings and eigenvalues as plain values; nothing in it is NaN or infinite."""
        plain: dict[str, Any] = jsonable(
            self._metrics | {"warnings": self.warnings, "eigenvalues": self.eigenvalues}
        )
        return plain

    def to_json(self) -> str:
        """:meth:`to_dict` as JSON text."""
        return json.dumps(self.to_dict(), allow_nan=False)

    def __repr__(self) -> str:
        """Shape, state, phase and the most used numbers; ``metrics()`` has all of them."""
        metrics = self._metrics
        names = ("alpha", "stable_rank", "spectral_norm", "spikes", "quasi_null")
        numbers = [f"{name} {metrics[name]:.4g}" for name in names if metrics.get(name) is not None]
        phase = [] if self.phase is None else [str(self.phase)]
        codes = [f"warnings: {', '.join(flag.code for flag in self.warnings)}"] if self.warnings else []
        shape = f"{self.pooled.rows} x {self.pooled.columns}"
        return f"Spectrum({'; '.join([shape, str(self.state), *phase, *numbers, *codes])})"

    def _repr_html_(self) -> str:
        rows = [(name, number) for name, number in self._metrics.items() if not isinstance(number, dict)]
        rows += [("warning", flag.text) for flag in self.warnings]
        cells = "".join(f"<tr><th>{as_html(name)}</th><td>{as_html(cell)}</td></tr>" for name, cell in rows)
        return f"<table>{cells}</table>"

    def plot(self, kind: Literal["density", "alpha"] = "density", **options: Any) -> Any:
        """Draw the eigenvalue density with bulk, tail, edges and spikes, or alpha over every start of the tail."""
        from strati.report.plots.spectra import plot_alpha, plot_spectrum

        return plot_alpha(self, **options) if kind == "alpha" else plot_spectrum(self, **options)


@dataclass(frozen=True)
class SpectrumConfig:
    """Options of :func:`spectrum`.

    Attributes:
        level: Chance that the largest eigenvalue of pure noise passes for a spike.
        bootstrap: Samples of the tail's goodness-of-fit test; 0 leaves it out.
        htsr: Compute the further numbers of heavy-tailed self-regularisation, see :mod:`strati.spectra.htsr`.
        seed: Seed of the bootstrap and of permutations.
        device: Solve on this torch device (``"cuda"``), in float64; by default with LAPACK.
    """

    level: float = 0.01
    bootstrap: int = 0
    htsr: bool = False
    seed: int = 0
    device: str | None = None


def spectrum(
    W: Matrices,
    *,
    dtype: Any = None,
    config: SpectrumConfig | None = None,
    tick: Tick = silent,
    **options: Unpack[SpectrumOptions],
) -> Spectrum:
    """Compute the spectrum of a matrix and what it says.

    Args:
        W: A matrix; several of one shape (their eigenvalues are pooled, as for the slices of a
            convolution); or a function that yields them one at a time, each time it is called.
        dtype: The dtype the weights came in, if the array was converted since.
        config: Options; keywords of the same names win.
        tick: Called when the eigenvalues are computed (``"eigenvalues"``), and at the end (``"fits"``).
        **options: Fields of :class:`SpectrumConfig`.

    Returns:
        The spectrum. Weights that are not finite, constant, or too few give ``None`` and a warning.

    Raises:
        BadInputError: ``W`` is not a real matrix.

    Examples:
        >>> W = np.random.default_rng(1).normal(size=(300, 200))
        >>> sp = spectrum(W)
        >>> str(sp.phase), sp.metrics()["hard_rank"], [w.code for w in sp.warnings]
        ('random-like', 200, ['noise-like'])
    """
    settings = resolve(SpectrumConfig, config, options, of=spectrum)
    source = matrix_source(W)
    sizes, neighbours = EntrySizes(), AdjacentCorrelation()

    def look(matrix: NDArray[Any]) -> None:
        sizes.add(matrix)
        neighbours.add(matrix)

    eigenvalues = compute_eigenvalues(source(), dtype, look=look, device=settings.device)
    tick("eigenvalues")
    if eigenvalues.values.size == 0 or eigenvalues.values[-1] == 0:
        warnings = verdicts.find_warnings(verdicts.SpectrumEvidence(eigenvalues))
        return Spectrum(eigenvalues, None, None, None, Gap(0.0, 0, 0), sizes.tail(), None, warnings)
    variances = slice_variances(eigenvalues, level=settings.level)
    gap = widest_gap(equal_slices(eigenvalues, variances))
    fit = _fit_tail(eigenvalues, gap)
    all_entries = sizes.tail()
    model = None
    if fit.possible:
        model = model_noise(
            source,
            eigenvalues,
            variances=variances,
            level=settings.level,
            heavy=all_entries.heavy,
            correlated=neighbours.significant(eigenvalues),
        )
    entries = all_entries if model is None else entries_of_noise(source, model, all_entries)
    verdict = verdicts.decide_phase(model, gap, entries, fit.tail)
    spiked = gap.collapsed and model is not None and model.bulk.spikes > 0
    warnings = verdicts.find_warnings(
        verdicts.SpectrumEvidence(
            eigenvalues,
            live=fit.live,
            equal=fit.equal,
            steep=fit.steep,
            tail=fit.tail,
            model=model,
            verdict=verdict,
            entries=entries,
            wild=sizes.wild(),
            sparse=spiked and is_sparse(source),
        )
    )
    nulls = None if model is None else model.quasi_null
    quasi_null = max(nulls or 0, gap.below) if gap.collapsed else nulls
    goodness = _test_tail(fit, settings)
    heavy_tail = _heavy_tail(source, eigenvalues, fit, settings)
    tick("fits")
    return Spectrum(
        eigenvalues, fit.tail, model, verdict, gap, entries, quasi_null, warnings, goodness, heavy_tail
    )


@dataclass(frozen=True)
class _TailFit:
    """The eigenvalues that are not null, and their tail.

    Attributes:
        live: The eigenvalues that are not null.
        equal: They are one value.
        possible: They can have a tail and a bulk.
        steep: The tail's exponent is too large to be one.
        tail: The tail.
    """

    live: FloatArray
    equal: bool
    possible: bool
    steep: bool
    tail: Tail | None


def _fit_tail(eigenvalues: Eigenvalues, gap: Gap) -> _TailFit:
    zeros = int(np.searchsorted(eigenvalues.values, _floor(eigenvalues)))
    live = eigenvalues.values[max(zeros, gap.below if gap.collapsed else 0) :]
    equal = eigenvalues.problem == "" and _all_equal(live, eigenvalues)
    possible = eigenvalues.problem == "" and not equal
    tail = fit_tail(live) if possible else None
    steep = tail is not None and tail.alpha >= _NO_EXPONENT
    return _TailFit(live, equal, possible, steep, None if steep else tail)


def _test_tail(fit: _TailFit, settings: SpectrumConfig) -> Goodness | None:
    if not settings.bootstrap or fit.tail is None:
        return None
    from strati.spectra.tail_tests import judge_tail

    return judge_tail(fit.live, fit.tail, samples=settings.bootstrap, seed=settings.seed)


def _heavy_tail(
    source: Source, eigenvalues: Eigenvalues, fit: _TailFit, settings: SpectrumConfig
) -> HeavyTailMetrics | None:
    if not settings.htsr:
        return None
    from strati.spectra.htsr import heavy_tail_metrics

    matrices = list(source())
    return heavy_tail_metrics(
        matrices, eigenvalues.values, fit.tail, level=settings.level, seed=settings.seed
    )


def _floor(eigenvalues: Eigenvalues) -> float:
    """Eigenvalues up to this are zero: the rank's tolerance, and never less than what the Gram matrix resolves."""
    working = eigenvalues.rows * float(np.finfo(np.float64).eps) * float(eigenvalues.values[-1])
    return max(eigenvalues.tolerance**2, working) if eigenvalues.epsilon < 1e-5 else working


def _all_equal(live: FloatArray, eigenvalues: Eigenvalues) -> bool:
    """Whether the singular values that are not null are one value, to rounding or to one part in a thousand."""
    if live.size < 3:
        return False
    low, high = float(np.sqrt(live[0])), float(np.sqrt(live[-1]))
    return high - low <= max(EQUAL * high, 2 * float(eigenvalues.resolutions.max()))


_TAIL_FIELDS = {
    "alpha": "alpha",
    "alpha_stderr": "stderr",
    "xmin": "xmin",
    "ks_distance": "ks_distance",
    "tail_size": "size",
}
_BULK_FIELDS = {"mp_sigma": "sigma", "mp_lambda_minus": "lambda_minus", "mp_lambda_plus": "lambda_plus"}


def _measure(sp: Spectrum) -> dict[str, Any]:
    eigenvalues, tail, bulk, values = sp.pooled, sp.tail, sp.bulk, sp.eigenvalues
    computed = values.size > 0
    largest = float(values[-1]) if computed else 0.0
    live = largest > 0
    coarse = eigenvalues.rows * eigenvalues.epsilon >= 1
    numbers: dict[str, Any] = {
        "hard_rank": hard_rank(eigenvalues) if computed and not (coarse and live) else None,
        "stable_rank": stable_rank(values) if live else None,
        "entropy": entropy(eigenvalues) if live else None,
        "frobenius_norm": float(np.sqrt(values.sum())) if computed else None,
        "spectral_norm": float(np.sqrt(largest)) if computed else None,
    }
    numbers |= {name: getattr(tail, attribute, None) for name, attribute in _TAIL_FIELDS.items()}
    numbers |= {
        "alpha_weighted": tail.alpha * float(np.log10(largest)) if tail is not None else None,
        "log_alpha_norm": _log_alpha_norm(values, tail.alpha) if tail is not None else None,
        "mu": _mu(sp),
    }
    if sp.goodness is not None:
        numbers |= {"tail_pvalue": sp.goodness.pvalue, "tail_alternatives": sp.goodness.alternatives}
    if sp.heavy_tail is not None:
        numbers |= vars(sp.heavy_tail)
    numbers |= {name: getattr(bulk, attribute, None) for name, attribute in _BULK_FIELDS.items()}
    return numbers | {
        "mp_soft_rank": bulk.lambda_plus / largest if bulk is not None else None,
        "mp_ks_distance": bulk.ks_distance if bulk is not None else None,
        "spikes": bulk.spikes if bulk is not None else None,
        "quasi_null": sp.quasi_null,
        "state": str(sp.state),
        "phase": str(sp.phase) if sp.phase is not None else None,
        "phase_evidence": _phase_evidence(sp),
    }


def _log_alpha_norm(values: FloatArray, alpha: float) -> float:
    """``log10(sum(lambda^alpha))``, the powers taken relative to the largest so that none overflows."""
    logs = alpha * np.log10(values[values > 0])
    top = float(logs.max())
    return top + float(np.log10(np.sum(10.0 ** (logs - top))))


def _mu(sp: Spectrum) -> float | None:
    if sp.phase not in (Phase.HEAVY_TAILED, Phase.BULK_DECAY):
        return None
    if sp.entries.heavy:
        return sp.entries.mu
    return None if sp.tail is None else verdicts.universality_exponent(sp.tail.alpha)


def _phase_evidence(sp: Spectrum) -> dict[str, Any] | None:
    model, bulk = sp.noise, sp.bulk
    if sp.verdict is None:
        return None
    return {
        "reason": verdicts.phase_reason(sp.verdict, model, sp.gap, sp.entries),
        "largest_over_edge": model.largest / model.bulk.lambda_plus if model is not None else None,
        "tracy_widom_edge": getattr(bulk, "edge", None),
        "level": getattr(bulk, "level", None),
        "bulk_ks_noise_limit": getattr(bulk, "noise_limit", None),
        "gap_decades": sp.gap.decades,
        "share_below_gap": sp.gap.below / max(sp.eigenvalues.size, 1),
        "entries_mu": sp.entries.mu if sp.entries.heavy else None,
        "edge_widening": model.widening if model is not None and model.examined else None,
        "structure": [verdicts.describe([violation]) for violation in (model.violations if model else ())],
    }
