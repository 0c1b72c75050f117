"""One matrix and everything its eigenvalues say: :func:`spectrum` gives a :class:`Spectrum`.

Here the parts meet: eigenvalues, tail, bulk, ranks, quasi-null directions, phase, and the warnings that
tell a reader which of these numbers mean something. Nothing is computed here that another module owns.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

from strati.core.display import as_html
from strati.core.options import resolve
from strati.core.results import Flag, Tick, jsonable, silent
from strati.spectra import flags, ranks
from strati.spectra.bulk import Bulk
from strati.spectra.eigenvalues import Eigenvalues
from strati.spectra.eigenvalues import eigenvalues as _eigenvalues
from strati.spectra.entries import EntrySizes, EntryTail
from strati.spectra.noise_model import (
    NoiseModel,
    equal_slices,
    noise_entries,
    noise_model,
    slice_variances,
)
from strati.spectra.noise_statistics import Neighbours, is_sparse
from strati.spectra.phases import Phase, PhaseVerdict, collapsed, decide, universality_exponent
from strati.spectra.state import LayerState, decide_state
from strati.spectra.tail import Tail, fit_tail
from strati.spectra.violations import describe

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.core.results import FloatArray
    from strati.spectra.alternatives import Goodness

    Matrices = NDArray[Any] | Iterable[NDArray[Any]] | Callable[[], Iterator[NDArray[Any]]]
    from strati.core.option_types import SpectrumOptions

_EQUAL = 1e-3  # singular values within this share of each other are one value
_NO_EXPONENT = 1000.0  # noise of 50257 x 768 has an alpha of about 50; beyond this the tail is a point


@dataclass(frozen=True, repr=False)
class Spectrum:
    """The spectrum of one matrix, or of matrices of one shape pooled.

    Attributes:
        found: The eigenvalues with shape and dtype.
        tail: The power-law tail, ``None`` if there was nothing to fit.
        noise: The random part with its Marchenko-Pastur bulk, ``None`` likewise.
        verdict: The phase with its reason.
        gap: The widest gap.
        entries: The tail of the entries' distribution.
        quasi_null: Number of quasi-null eigenvalues.
        warnings: What a reader must know.
        goodness: The bootstrap's verdict on the tail, if it was asked for.
    """

    found: Eigenvalues = field(repr=False)
    tail: Tail | None
    noise: NoiseModel | None
    verdict: PhaseVerdict | None
    gap: ranks.Gap
    entries: EntryTail
    quasi_null: int | None
    warnings: tuple[Flag, ...]
    goodness: Goodness | None = None

    @property
    def eigenvalues(self) -> FloatArray:
        """Eigenvalues of ``W.T @ W``, ascending; empty if the weights are not finite."""
        return self.found.values

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
        return decide_state((flag.code for flag in self.warnings), self.verdict, self.eigenvalues.size)

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
        """Its shape, its phase and the numbers that are looked at first; ``metrics()`` has all of them."""
        metrics = self._metrics
        names = ("alpha", "stable_rank", "spectral_norm", "spikes", "quasi_null")
        numbers = [f"{name} {metrics[name]:.4g}" for name in names if metrics.get(name) is not None]
        phase = [] if self.phase is None else [str(self.phase)]
        codes = [f"warnings: {', '.join(flag.code for flag in self.warnings)}"] if self.warnings else []
        shape = f"{self.found.rows} x {self.found.columns}"
        return f"Spectrum({'; '.join([shape, str(self.state), *phase, *numbers, *codes])})"

    def _repr_html_(self) -> str:
        rows = [(name, value) for name, value in self._metrics.items() if not isinstance(value, dict)]
        rows += [("warning", flag.text) for flag in self.warnings]
        cells = "".join(f"<tr><th>{as_html(name)}</th><td>{as_html(value)}</td></tr>" for name, value in rows)
        return f"<table>{cells}</table>"

    def plot(self, **options: Any) -> Any:
        """Draw the eigenvalue density with bulk, tail, edges and spikes, and the scree plot."""
        from strati.report.plots.spectra import plot_spectrum

        return plot_spectrum(self, **options)


@dataclass(frozen=True)
class SpectrumConfig:
    """Options of :func:`spectrum`.

    Attributes:
        level: Chance that the largest eigenvalue of pure noise passes for a spike.
        bootstrap: Samples of the tail's goodness-of-fit test; 0 leaves it out.
        seed: Seed of the bootstrap.
        device: Solve on this torch device (``"cuda"``), in float64; by default with LAPACK.
    """

    level: float = 0.01
    bootstrap: int = 0
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
    """The spectrum of a matrix and what it says.

    Args:
        W: A matrix; several of one shape (their eigenvalues are pooled, as for the slices of a
            convolution); or a function that yields them one at a time, each time it is called.
        dtype: The dtype the weights came in, if the array was converted since.
        config: Options; keywords of the same names win.
        tick: Called when the eigenvalues are there (``"eigenvalues"``), and at the end (``"fits"``).
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
    source = _source(W)
    sizes, neighbours = EntrySizes(), Neighbours()

    def look(matrix: NDArray[Any]) -> None:
        sizes.add(matrix)
        neighbours.add(matrix)

    eigenvalues = _eigenvalues(source(), dtype, look=look, device=settings.device)
    tick("eigenvalues")
    entries = sizes.tail()
    if eigenvalues.values.size == 0 or eigenvalues.values[-1] == 0:
        gap, warnings = ranks.Gap(0.0, 0, 0), flags.of_eigenvalues(eigenvalues)
        return Spectrum(eigenvalues, None, None, None, gap, entries, None, warnings)
    variances = slice_variances(eigenvalues, level=settings.level)
    fit = _fit_tail(eigenvalues, ranks.widest_gap(equal_slices(eigenvalues, variances)))
    model = None
    if fit.fitted:
        correlated = neighbours.correlated(eigenvalues)
        model = noise_model(
            source,
            eigenvalues,
            variances=variances,
            level=settings.level,
            heavy=entries.heavy,
            correlated=correlated,
        )
    noise_tail = noise_entries(source, model, entries) if entries.heavy and model is not None else entries
    verdict = _verdict(eigenvalues, fit, model, noise_tail)
    goodness = None
    if settings.bootstrap and fit.tail is not None:
        from strati.spectra.alternatives import judge_tail

        goodness = judge_tail(fit.live, fit.tail, samples=settings.bootstrap, seed=settings.seed)
    warnings = _warnings(eigenvalues, fit, model, verdict, noise_tail)
    warnings += flags.of_entries(sizes.wild())
    if fit.gap.collapsed and model is not None and model.bulk.spikes and is_sparse(source):
        warnings += flags.of_sparse(model.bulk.spikes)
    nulls = None if model is None else model.quasi_null
    tick("fits")
    return Spectrum(
        eigenvalues,
        fit.tail,
        model,
        verdict,
        fit.gap,
        noise_tail,
        max(nulls or 0, fit.gap.below) if fit.gap.collapsed else nulls,
        warnings,
        goodness,
    )


@dataclass(frozen=True)
class _TailFit:
    """The eigenvalues that are not null, and their tail.

    Attributes:
        gap: The widest gap.
        live: The eigenvalues that are not null.
        equal: They are one value.
        fitted: They can have a tail and a bulk.
        steep: The tail's exponent is too large to be one.
        tail: The tail.
    """

    gap: ranks.Gap
    live: FloatArray
    equal: bool
    fitted: bool
    steep: bool
    tail: Tail | None


def _fit_tail(eigenvalues: Eigenvalues, gap: ranks.Gap) -> _TailFit:
    zeros = int(np.searchsorted(eigenvalues.values, _floor(eigenvalues)))
    live = eigenvalues.values[max(zeros, gap.below if gap.collapsed else 0) :]
    equal = eigenvalues.problem == "" and _all_equal(live, eigenvalues)
    fitted = eigenvalues.problem == "" and not equal
    tail = fit_tail(live) if fitted else None
    steep = tail is not None and tail.alpha >= _NO_EXPONENT
    return _TailFit(gap, live, equal, fitted, steep, None if steep else tail)


def _verdict(
    eigenvalues: Eigenvalues, fit: _TailFit, model: NoiseModel | None, entries: EntryTail
) -> PhaseVerdict | None:
    if fit.gap.collapsed:
        return collapsed(fit.gap)
    return None if model is None else decide(model, eigenvalues, entries=entries, tail=fit.tail)


def _warnings(
    eigenvalues: Eigenvalues,
    fit: _TailFit,
    model: NoiseModel | None,
    verdict: PhaseVerdict | None,
    entries: EntryTail,
) -> tuple[Flag, ...]:
    of_eigenvalues = flags.of_eigenvalues(
        eigenvalues,
        fit.live,
        equal=fit.equal,
        steep=fit.steep,
        tail=fit.tail,
        bulk=None if model is None else model.bulk,
        noise=verdict is not None and (verdict.noise or verdict.phase == Phase.RANDOM_LIKE),
    )
    return of_eigenvalues + flags.of_noise(eigenvalues, model, verdict, entries)


def _source(W: Matrices) -> Callable[[], Iterator[NDArray[Any]]]:
    if hasattr(W, "detach"):  # a torch tensor or parameter, whether or not it wants a gradient
        W = _from_torch(W.detach().cpu())
    if callable(W):
        return W
    matrices = [np.asarray(W)] if isinstance(W, np.ndarray) or not isinstance(W, Iterable) else None
    if matrices is None:
        matrices = [np.asarray(m) for m in W]
        if matrices and all(m.ndim < 2 for m in matrices):  # a matrix given as a list of rows
            matrices = [np.asarray(matrices)]
    return lambda: iter(matrices)


def _from_torch(tensor: Any) -> NDArray[Any]:
    if str(tensor.dtype) != "torch.bfloat16":
        return np.asarray(tensor.numpy())
    import ml_dtypes

    return np.asarray(tensor.float().numpy().astype(ml_dtypes.bfloat16))


def _floor(eigenvalues: Eigenvalues) -> float:
    """Eigenvalues up to this are zero: the rank's tolerance, and never less than what the Gram route resolves."""
    working = eigenvalues.rows * float(np.finfo(np.float64).eps) * float(eigenvalues.values[-1])
    return max(eigenvalues.tolerance**2, working) if eigenvalues.epsilon < 1e-5 else working


def _all_equal(live: FloatArray, eigenvalues: Eigenvalues) -> bool:
    """Whether the singular values that are not null are one value, to rounding or to one part in a thousand."""
    if live.size < 3:
        return False
    low, high = float(np.sqrt(live[0])), float(np.sqrt(live[-1]))
    return high - low <= max(_EQUAL * high, 2 * eigenvalues.resolution)


def _measure(sp: Spectrum) -> dict[str, Any]:
    eigenvalues, tail, bulk = sp.found, sp.tail, sp.bulk
    values = eigenvalues.values
    largest = float(values[-1]) if values.size else 0.0
    computed, live = values.size > 0, values.size > 0 and largest > 0
    alpha = tail.alpha if tail is not None else None
    coarse = eigenvalues.rows * eigenvalues.epsilon >= 1
    numbers: dict[str, Any] = {
        "hard_rank": (ranks.hard_rank(eigenvalues) if not (coarse and live) else None) if computed else None,
        "stable_rank": ranks.stable_rank(values) if live else None,
        "entropy": ranks.entropy(eigenvalues) if live else None,
        "frobenius_norm": float(np.sqrt(values.sum())) if computed else None,
        "spectral_norm": float(np.sqrt(largest)) if computed else None,
        "alpha": alpha,
        "alpha_stderr": tail.stderr if tail is not None else None,
        "xmin": tail.xmin if tail is not None else None,
        "ks_distance": tail.ks_distance if tail is not None else None,
        "tail_size": tail.size if tail is not None else None,
        "alpha_weighted": alpha * float(np.log10(largest)) if alpha is not None else None,
        "log_alpha_norm": _log_alpha_norm(values, alpha) if alpha is not None else None,
        "mu": _mu(sp),
    }
    if sp.goodness is not None:
        numbers["tail_pvalue"] = sp.goodness.pvalue
        numbers["tail_alternatives"] = sp.goodness.alternatives
    numbers |= {
        "mp_sigma": bulk.sigma if bulk is not None else None,
        "mp_lambda_minus": bulk.lambda_minus if bulk is not None else None,
        "mp_lambda_plus": bulk.lambda_plus if bulk is not None else None,
        "mp_soft_rank": bulk.lambda_plus / largest if bulk is not None else None,
        "mp_ks_distance": bulk.ks_distance if bulk is not None else None,
        "spikes": bulk.spikes if bulk is not None else None,
        "quasi_null": sp.quasi_null,
        "state": str(sp.state),
        "phase": str(sp.phase) if sp.phase is not None else None,
        "phase_evidence": _evidence(sp),
    }
    return numbers


def _log_alpha_norm(values: FloatArray, alpha: float) -> float:
    """``log10(sum(lambda^alpha))``, the powers taken relative to the largest so that none overflows."""
    logs = alpha * np.log10(values[values > 0])
    top = float(logs.max())
    return top + float(np.log10(np.sum(10.0 ** (logs - top))))


def _mu(sp: Spectrum) -> float | None:
    if sp.entries.heavy and sp.phase in (Phase.HEAVY_TAILED, Phase.BULK_DECAY):
        return sp.entries.mu
    if sp.tail is not None and sp.phase in (Phase.HEAVY_TAILED, Phase.BULK_DECAY):
        return universality_exponent(sp.tail.alpha)
    return None


def _evidence(sp: Spectrum) -> dict[str, Any] | None:
    model, verdict = sp.noise, sp.verdict
    if verdict is None:
        return None
    bulk = sp.bulk
    return {
        "reason": verdict.reason,
        "largest_over_edge": model.largest / model.bulk.lambda_plus if model is not None else None,
        "tracy_widom_edge": bulk.edge if bulk is not None else None,
        "level": bulk.level if bulk is not None else None,
        "bulk_ks_noise_limit": bulk.noise_limit if bulk is not None else None,
        "gap_decades": sp.gap.decades,
        "share_below_gap": sp.gap.below / max(sp.found.values.size, 1),
        "entries_mu": sp.entries.mu if sp.entries.heavy else None,
        "edge_widening": model.widening if model is not None and model.examined else None,
        "structure": [describe([item]) for item in model.violations] if model is not None else [],
    }
