"""One matrix and everything its eigenvalues say: :func:`spectrum` gives a :class:`Spectrum`.

Here the parts meet: eigenvalues, tail, bulk, ranks, quasi-null directions, phase, and the warnings that
tell a reader which of these numbers mean something. Nothing is computed here that another module owns.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.options import resolve
from strati.spectra import flags, ranks
from strati.spectra.bulk import Bulk, fit_random_part, noise_limit, without_nulls
from strati.spectra.eigenvalues import Eigenvalues
from strati.spectra.eigenvalues import eigenvalues as _eigenvalues
from strati.spectra.entries import EntrySizes, EntryTail
from strati.spectra.phases import Phase, PhaseVerdict, collapsed, decide, universality_exponent
from strati.spectra.quasi_null import quasi_null
from strati.spectra.structure import Neighbours, evened, examine, is_sparse
from strati.spectra.tail import Tail, fit_tail
from strati.text import as_html
from strati.types import Flag, Tick, jsonable, silent

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.spectra.alternatives import Goodness
    from strati.spectra.structure import Structure
    from strati.types import FloatArray

    Matrices = NDArray[Any] | Iterable[NDArray[Any]] | Callable[[], Iterator[NDArray[Any]]]

_FAR = 0.05  # share of spikes up to which a matrix is mostly noise
_MANY_NULLS = 0.1  # share of quasi-null directions from which the bulk is no longer fitted around them
_EQUAL = 1e-3  # singular values within this share of each other are one value
_NO_EXPONENT = 1000.0  # noise of 50257 x 768 has an alpha of about 50; beyond this the tail is a point


@dataclass(frozen=True, repr=False)
class Spectrum:
    """The spectrum of one matrix, or of matrices of one shape pooled.

    Attributes:
        found: The eigenvalues with shape and dtype.
        tail: The power-law tail, ``None`` if there was nothing to fit.
        bulk: The Marchenko-Pastur bulk, ``None`` likewise.
        verdict: The phase with its reason.
        gap: The widest gap.
        entries: The tail of the entries' distribution.
        quasi_null: Number of quasi-null eigenvalues.
        warnings: What a reader must know.
        goodness: The bootstrap's verdict on the tail, if it was asked for.
        structure: What the matrix shows beyond independent entries of one variance, if it shows it beyond chance.
    """

    found: Eigenvalues = field(repr=False)
    tail: Tail | None
    bulk: Bulk | None
    verdict: PhaseVerdict | None
    gap: ranks.Gap
    entries: EntryTail
    quasi_null: int | None
    warnings: tuple[Flag, ...]
    goodness: Goodness | None = None
    structure: Structure | None = None

    @property
    def eigenvalues(self) -> FloatArray:
        """Eigenvalues of ``W.T @ W``, ascending; empty if the weights are not finite."""
        return self.found.values

    @property
    def phase(self) -> Phase | None:
        """The phase of training, ``None`` if there is too little to tell."""
        return self.verdict.phase if self.verdict is not None else None

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
        known = self._metrics
        names = ("alpha", "stable_rank", "spectral_norm", "spikes", "quasi_null")
        told = [f"{name} {known[name]:.4g}" for name in names if known.get(name) is not None]
        phase = [] if self.phase is None else [str(self.phase)]
        codes = [f"warnings: {', '.join(flag.code for flag in self.warnings)}"] if self.warnings else []
        shape = f"{self.found.rows} x {self.found.columns}"
        return f"Spectrum({'; '.join([shape, *phase, *told, *codes])})"

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
    dtype: Any = None,
    *,
    config: SpectrumConfig | None = None,
    tick: Tick = silent,
    **options: Any,
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
    chosen = resolve(SpectrumConfig, config, options, of=spectrum)
    source = _source(W)
    sizes, neighbours = EntrySizes(), Neighbours()

    def look(matrix: NDArray[Any]) -> None:
        sizes.add(matrix)
        neighbours.add(matrix)

    found = _eigenvalues(source(), dtype, look=look, device=chosen.device)
    tick("eigenvalues")
    if found.problem in ("not-finite", "out-of-range") or found.values.size == 0 or found.values[-1] == 0:
        return Spectrum(
            found, None, None, None, ranks.Gap(0.0, 0, 0), sizes.tail(), None, flags.of_eigenvalues(found)
        )
    gap = ranks.widest_gap(found)
    live = found.values[
        max(int(np.searchsorted(found.values, _floor(found))), gap.below if gap.collapsed else 0) :
    ]
    equal = found.problem == "" and _all_equal(live, found)
    fitted = found.problem == "" and not equal
    tail = fit_tail(live) if fitted else None
    steep = tail is not None and tail.alpha >= _NO_EXPONENT
    if steep:
        tail = None
    bulk = fit_random_part(found, level=chosen.level) if fitted else None
    entries = sizes.tail()
    verdict, nulls, structure = None, None, None
    if bulk is not None:
        nulls = _quasi_null(found, bulk.sigma)
        if 0 < nulls < _MANY_NULLS * found.values.size and not gap.collapsed:
            bulk = without_nulls(found, bulk, nulls)
        doubt = bulk.spikes or nulls or neighbours.correlated(found)
        doubt = doubt or bulk.ks_distance > noise_limit(bulk.size, found.matrices)
        looked = examine(source, found, bulk, heavy=entries.heavy) if doubt and not gap.collapsed else None
        if looked is not None:
            bulk, structure = looked
            # However uneven the rows: what is zero to rounding is no part of any noise.
            narrow = bulk.sigma * float(np.sqrt(structure.narrowing))
            nulls = max(_quasi_null(found, narrow), min(nulls, ranks.unresolved(found)))
        if entries.heavy:
            entries = _of_the_noise(source, bulk, entries, structure)
    if gap.collapsed:
        verdict, nulls = collapsed(gap), max(nulls or 0, gap.below)
    elif bulk is not None:
        verdict = decide(
            bulk, found, entries=entries, tail=tail, structure=structure, nulls=nulls if nulls else 0
        )
    goodness = None
    if chosen.bootstrap and tail is not None:
        from strati.spectra.alternatives import judge_tail

        goodness = judge_tail(live, tail, samples=chosen.bootstrap, seed=chosen.seed)
    noise = verdict is not None and (verdict.noise or verdict.phase == Phase.RANDOM_LIKE)
    warnings = flags.of_eigenvalues(found, live, equal=equal, steep=steep, tail=tail, bulk=bulk, noise=noise)
    warnings += flags.of_noise(found, bulk, verdict, structure, entries, nulls)
    if gap.collapsed and bulk is not None and bulk.spikes and is_sparse(source):
        warnings += flags.of_sparse(bulk.spikes)
    tick("fits")
    return Spectrum(found, tail, bulk, verdict, gap, entries, nulls, warnings, goodness, structure)


def _source(W: Matrices) -> Callable[[], Iterator[NDArray[Any]]]:
    if hasattr(W, "detach"):  # a torch tensor or parameter, whether or not it wants a gradient
        W = _from_torch(W.detach().cpu())
    if callable(W):
        return W
    kept = [np.asarray(W)] if isinstance(W, np.ndarray) or not isinstance(W, Iterable) else None
    if kept is None:
        kept = [np.asarray(m) for m in W]
        if kept and all(m.ndim < 2 for m in kept):  # a matrix given as a list of rows
            kept = [np.asarray(kept)]
    return lambda: iter(kept)


def _from_torch(tensor: Any) -> NDArray[Any]:
    if str(tensor.dtype) != "torch.bfloat16":
        return np.asarray(tensor.numpy())
    import ml_dtypes

    return np.asarray(tensor.float().numpy().astype(ml_dtypes.bfloat16))


def _floor(found: Eigenvalues) -> float:
    """Eigenvalues up to this are zero: the rank's tolerance, and never less than what the Gram route resolves."""
    working = found.rows * float(np.finfo(np.float64).eps) * float(found.values[-1])
    return max(found.tolerance**2, working) if found.epsilon < 1e-5 else working


def _all_equal(live: FloatArray, found: Eigenvalues) -> bool:
    """Whether the singular values that are not null are one value, to rounding or to one part in a thousand."""
    if live.size < 3:
        return False
    low, high = float(np.sqrt(live[0])), float(np.sqrt(live[-1]))
    return high - low <= max(_EQUAL * high, 2 * found.resolution)


def _quasi_null(found: Eigenvalues, sigma: float) -> int:
    return sum(quasi_null(part, found.rows, found.columns, sigma) for part in found.parts)


def _of_the_noise(
    source: Callable[[], Iterator[NDArray[Any]]], bulk: Bulk, entries: EntryTail, structure: Structure | None
) -> EntryTail:
    """Whether the entries' tail is that of independent entries.

    A strong spike, rows of unequal size or a strong diagonal put large entries where they are; without them, or
    brought to one size, the entries must still have the tail.
    """
    light = EntryTail(False, float("nan"), entries.size)
    if structure is not None and structure.regular:
        return light
    few = 0 < bulk.spikes <= _FAR * (bulk.spikes + bulk.size)
    uneven = structure is not None and structure.sizes
    if not few and not uneven:
        return entries
    from strati.spectra.signal import split

    rest = EntrySizes()
    for matrix in source():
        part = split(matrix, edge=bulk.edge).noise if few else matrix
        rest.add(evened(part) if uneven else part)
    tail = rest.tail()
    return entries if tail.heavy else tail


def _measure(sp: Spectrum) -> dict[str, Any]:
    found, tail, bulk = sp.found, sp.tail, sp.bulk
    values = found.values
    largest = float(values[-1]) if values.size else 0.0
    known, live = values.size > 0, values.size > 0 and largest > 0
    alpha = tail.alpha if tail is not None else None
    coarse = found.rows * found.epsilon >= 1
    numbers: dict[str, Any] = {
        "hard_rank": (ranks.hard_rank(found) if not (coarse and live) else None) if known else None,
        "stable_rank": ranks.stable_rank(values) if live else None,
        "entropy": ranks.entropy(found) if live else None,
        "frobenius_norm": float(np.sqrt(values.sum())) if known else None,
        "spectral_norm": float(np.sqrt(largest)) if known else None,
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
        "phase": str(sp.phase) if sp.phase is not None else None,
        "phase_evidence": _evidence(sp, largest),
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


def _evidence(sp: Spectrum, largest: float) -> dict[str, Any] | None:
    bulk, verdict = sp.bulk, sp.verdict
    if verdict is None:
        return None
    return {
        "reason": verdict.reason,
        "largest_over_edge": largest / bulk.lambda_plus if bulk is not None else None,
        "tracy_widom_edge": bulk.edge if bulk is not None else None,
        "level": bulk.level if bulk is not None else None,
        "bulk_ks_noise_limit": noise_limit(bulk.size, sp.found.matrices) if bulk is not None else None,
        "gap_decades": sp.gap.decades,
        "share_below_gap": sp.gap.below / max(sp.found.values.size, 1),
        "entries_mu": sp.entries.mu if sp.entries.heavy else None,
        "edge_widening": sp.structure.widening if sp.structure is not None else None,
        "structure": list(sp.structure.broken) if sp.structure is not None else [],
    }
