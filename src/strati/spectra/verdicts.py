"""What can be said of a layer: its phase, its state, and the warnings about its numbers.

========================  ====================================================================
phase
========================  ====================================================================
random-like               nothing beyond the Tracy-Widom edge
bleeding-out              a few eigenvalues beyond it, still next to the bulk
bulk+spikes               a good Marchenko-Pastur bulk and eigenvalues set apart from it
bulk-decay                a bulk that decays into a tail (entries with ``mu`` just above 4)
heavy-tailed              no bulk edge, a power-law tail (entries with ``mu`` below 4)
rank-collapse             a gap of many decades with a sizeable share of directions below it
========================  ====================================================================

The order of questions: has the rank collapsed; do the entries have a power-law tail with ``mu < 4``, or does the
spectrum grow one out of a bulk that is not Marchenko-Pastur; do the entries have a weaker power-law tail; does
the law fit the bulk; how far beyond its edge do eigenvalues lie. Confusion matrix on draws of generative models:
``strati reproduce phases``.

========================  ====================================================================
state
========================  ====================================================================
learned                   the weights differ from independent random ones, in their spectrum or in their sizes
random-like               enough eigenvalues to tell, and random weights explain them all
too-small                 too few eigenvalues to tell the one from the other
broken                    something is wrong: see :data:`WRONG`
========================  ====================================================================

Decisions are made on numbers and codes; the sentences are made last, at the end of this module.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.core.results import Flag
from strati.spectra.noise_structure import Departure, Violation
from strati.spectra.tails import FEWEST, WILD_GAP

if TYPE_CHECKING:
    from strati.core.results import FloatArray
    from strati.spectra.eigenvalues import Eigenvalues, Gap
    from strati.spectra.noise_model import NoiseModel
    from strati.spectra.tails import EntryTail, Tail

SET_APART = 1.4
"""A spike is set apart from the bulk beyond this multiple of the bulk's upper edge."""

GOOD_FIT = 0.02
"""KS distance up to which a bulk counts as Marchenko-Pastur though a large matrix of pure noise would fit better."""

ENOUGH = 50
"""Eigenvalues from which a spectrum that noise explains says that there is nothing but noise.

With 49 or fewer, layers of trained networks whose signal is spread over all directions (heads, narrow convolutions)
pass as noise: 10 of them among the 11 networks that ``docs/scan.md`` lists.
"""

WRONG = ("not-finite", "out-of-range", "empty", "constant", "wild-entry", "zero-rows", "rank-collapse")
"""What makes a layer ``broken``, the most serious first: codes of warnings, and the phase of that name."""

USUAL_IN_EMBEDDINGS = frozenset({"zero-rows", "rank-collapse"})
"""What is not wrong in an embedding: rows of padding and unused tokens, and sinusoidal positions.

Nor is it in a head whose unused rows explain it: that has the code ``unused-rows``.
"""

_LARGEST_MU = 5.2  # pure power laws with a larger exponent leave no trace in spectra of these sizes
_TAIL_SHARE, _TAIL_REACH, _TAIL_ALPHA = 0.03, 2.0, 6.0
_SHORT = 20  # eigenvalues in the tail below which its fit is unreliable
_MOST_LISTED = 20  # rows that a note names
_COARSE = 0.01  # singular values over the largest that the dtype does not resolve


class Phase(StrEnum):
    """Phases in the order in which training runs through them; rank collapse stands apart."""

    RANDOM_LIKE = "random-like"
    BLEEDING_OUT = "bleeding-out"
    BULK_SPIKES = "bulk+spikes"
    BULK_DECAY = "bulk-decay"
    HEAVY_TAILED = "heavy-tailed"
    RANK_COLLAPSE = "rank-collapse"


class Cause(StrEnum):
    """What decided the phase."""

    GAP = "gap"
    ENTRIES = "entries"
    TAIL_BEYOND_EDGE = "tail-beyond-edge"
    NOTHING_BEYOND_EDGE = "nothing-beyond-edge"
    NEAR_EDGE = "near-edge"
    SPIKES = "spikes"
    NO_BULK = "no-bulk"
    PRODUCT = "product"


@dataclass(frozen=True)
class PhaseVerdict:
    """A phase and what decided it.

    Attributes:
        phase: The phase.
        cause: What decided it; :func:`phase_reason` says it in words.
        noise: The Marchenko-Pastur law alone explains the spectrum, its smallest eigenvalues included.
    """

    phase: Phase
    cause: Cause
    noise: bool = False


def decide_phase(
    model: NoiseModel | None, gap: Gap, entries: EntryTail, tail: Tail | None
) -> PhaseVerdict | None:
    """Decide the phase of a spectrum.

    Args:
        model: The random part; ``None`` if there are too few eigenvalues for one.
        gap: The widest gap.
        entries: The tail of the entries.
        tail: The tail of the spectrum, if one was fitted.
    """
    if gap.collapsed:
        return PhaseVerdict(Phase.RANK_COLLAPSE, Cause.GAP)
    if model is None:
        return None
    if entries.heavy and entries.mu < 4:
        return PhaseVerdict(Phase.HEAVY_TAILED, Cause.ENTRIES)
    bulk = model.bulk
    # A bulk that the structure explains fits, too.
    fits = bulk.ks_distance <= max(bulk.noise_limit, GOOD_FIT) or bool(model.structure)
    steep = tail is not None and tail.alpha < _TAIL_ALPHA
    if not fits and _share_beyond(model) >= _TAIL_SHARE and _reach(model) >= _TAIL_REACH and steep:
        return PhaseVerdict(Phase.HEAVY_TAILED, Cause.TAIL_BEYOND_EDGE)
    if entries.heavy and (entries.mu < _LARGEST_MU or not entries.pure):
        return PhaseVerdict(Phase.BULK_DECAY, Cause.ENTRIES)
    if bulk.spikes == 0:
        plain = bulk.ks_distance <= bulk.noise_limit and not model.quasi_null and not model.structure
        return PhaseVerdict(Phase.RANDOM_LIKE, Cause.NOTHING_BEYOND_EDGE, noise=plain)
    if fits and _reach(model) <= SET_APART:
        return PhaseVerdict(Phase.BLEEDING_OUT, Cause.NEAR_EDGE)
    return (
        PhaseVerdict(Phase.BULK_SPIKES, Cause.SPIKES)
        if fits
        else PhaseVerdict(Phase.BULK_DECAY, Cause.NO_BULK)
    )


def _reach(model: NoiseModel) -> float:
    """The largest eigenvalue over the end of the bulk of such noise."""
    return model.largest / (model.bulk.lambda_plus * model.widening)


def _share_beyond(model: NoiseModel) -> float:
    return model.bulk.spikes / (model.bulk.size + model.bulk.spikes)


def universality_exponent(alpha: float) -> float:
    r"""The exponent :math:`\mu` of the class of heavy-tailed matrices that a tail's ``alpha`` belongs to.

    ``mu = 2 (alpha - 1)`` up to 2; between 2 and 4 the finite-size relation is roughly linear,
    ``alpha = 3 mu - 4``, by simulation; beyond, 4.

    Examples:
        >>> universality_exponent(1.75), universality_exponent(5.0)
        (1.5, 3.0)
    """
    return 2 * (alpha - 1) if alpha <= 2 else min((alpha + 4) / 3, 4.0)


class LayerState(StrEnum):
    """What can be said of a layer as a whole."""

    LEARNED = "learned"
    RANDOM_LIKE = "random-like"
    TOO_SMALL = "too-small"
    BROKEN = "broken"


def faults(codes: Iterable[str], phase: Phase | None, *, embedding: bool = False) -> tuple[str, ...]:
    """What is wrong with a layer, the most serious first.

    Args:
        codes: The codes of its warnings.
        phase: Its phase.
        embedding: It is a table of vectors, in which empty rows and a low rank are usual.

    Examples:
        >>> faults(["short-tail", "zero-rows", "not-finite"], None)
        ('not-finite', 'zero-rows')
        >>> faults(["zero-rows"], None, embedding=True), faults(["zero-rows", "unused-rows"], None)
        ((), ())
    """
    present = {*codes, str(phase)}
    usual = USUAL_IN_EMBEDDINGS if embedding or "unused-rows" in present else frozenset[str]()
    return tuple(code for code in WRONG if code in present and code not in usual)


def decide_state(
    codes: Iterable[str], verdict: PhaseVerdict | None, eigenvalues: int, *, embedding: bool = False
) -> LayerState:
    """Decide the state of a layer.

    Args:
        codes: The codes of its warnings.
        verdict: Its phase; ``None`` if there was none to decide.
        eigenvalues: How many eigenvalues it has.
        embedding: It is a table of vectors.

    Examples:
        >>> noise = PhaseVerdict(Phase.RANDOM_LIKE, Cause.NOTHING_BEYOND_EDGE, noise=True)
        >>> [str(decide_state([], noise, count)) for count in (49, 50)]
        ['too-small', 'random-like']
        >>> str(decide_state([], PhaseVerdict(Phase.BULK_SPIKES, Cause.SPIKES), 12))
        'learned'
    """
    codes = set(codes)
    enough = eigenvalues >= ENOUGH
    if faults(codes, None if verdict is None else verdict.phase, embedding=embedding):
        return LayerState.BROKEN
    if verdict is None:
        return LayerState.RANDOM_LIKE if "orthogonal" in codes and enough else LayerState.TOO_SMALL
    if verdict.phase != Phase.RANDOM_LIKE:
        return LayerState.LEARNED
    if not enough:
        return LayerState.TOO_SMALL
    return LayerState.RANDOM_LIKE if verdict.noise else LayerState.LEARNED


@dataclass(frozen=True)
class SpectrumEvidence:
    """What the warnings about a spectrum depend on.

    Attributes:
        eigenvalues: The eigenvalues.
        live: Those that are not null; ``None`` if there are no values at all.
        equal: They are one value.
        steep: The tail's exponent is too large to be one.
        tail: The tail.
        model: The random part.
        verdict: The phase.
        entries: The tail of the entries.
        wild: Number of weights far beyond all others.
        sparse: The rank has collapsed, most weights are zero, and there are spikes.
    """

    eigenvalues: Eigenvalues
    live: FloatArray | None = None
    equal: bool = False
    steep: bool = False
    tail: Tail | None = None
    model: NoiseModel | None = None
    verdict: PhaseVerdict | None = None
    entries: EntryTail | None = None
    wild: int = 0
    sparse: bool = False


def find_warnings(evidence: SpectrumEvidence) -> tuple[Flag, ...]:
    """What a reader must know about the numbers of a spectrum, the most serious first."""
    eigenvalues = evidence.eigenvalues
    if eigenvalues.values.size == 0:
        return (_flag("empty" if eigenvalues.problem in ("", "constant") else eigenvalues.problem),)
    findings = [*_of_eigenvalues(evidence), *_of_fits(evidence), *_of_noise(evidence)]
    if evidence.wild:
        which = "one weight is" if evidence.wild == 1 else f"{evidence.wild} weights are"
        findings.append(_flag("wild-entry", which=which, gap=WILD_GAP))
    if evidence.sparse and evidence.model is not None:
        text = _TEXTS["sparse"].format(spikes=_count(evidence.model.bulk.spikes, "spike"))
        findings.append(Flag("structured-noise", text))
    return tuple(findings)


def unused_rows_flag(rows: Sequence[int], total: int) -> Flag:
    """The note that some rows of a token matrix are unused; it names the first of them."""
    listed = ", ".join(map(str, rows[:_MOST_LISTED])) + (", ..." if len(rows) > _MOST_LISTED else "")
    return _flag("unused-rows", which=f"{len(rows)} of the {total} rows ({listed}) are")


def _of_eigenvalues(evidence: SpectrumEvidence) -> Iterable[Flag]:
    eigenvalues, live = evidence.eigenvalues, evidence.live
    if eigenvalues.problem == "constant":
        yield _flag("constant")
    if evidence.equal and live is not None:
        yield _flag("orthogonal", count=live.size, value=float(np.sqrt(live[-1])))
    elif eigenvalues.problem == "" and live is not None and live.size < ENOUGH:
        consequence = "no tail is fitted" if live.size < FEWEST else "fits are rough"
        yield _flag("few-eigenvalues", count=live.size, consequence=consequence)
    if any(eigenvalues.empty) and eigenvalues.values[-1] > 0:
        count = sum(eigenvalues.empty)
        yield _flag(
            "zero-rows", which="one row or column is" if count == 1 else f"{count} rows or columns are"
        )


def _of_fits(evidence: SpectrumEvidence) -> Iterable[Flag]:
    tail, model, verdict = evidence.tail, evidence.model, evidence.verdict
    random = verdict is not None and (verdict.noise or verdict.phase == Phase.RANDOM_LIKE)
    if evidence.steep:
        yield _flag("no-tail")
    if tail is not None and tail.size < _SHORT:
        yield _flag("short-tail", count=tail.size)
    elif tail is not None and tail.gradual and not random:
        yield _flag("gradual-tail")
    if model is not None and model.bulk.capped:
        yield _flag("spikes-capped")
    resolved = evidence.eigenvalues.rows * evidence.eigenvalues.epsilon
    if resolved > _COARSE:
        yield _flag("coarse-dtype", resolved=resolved)


def _of_noise(evidence: SpectrumEvidence) -> Iterable[Flag]:
    model, verdict, entries = evidence.model, evidence.verdict, evidence.entries
    if model is None:
        return
    bulk, nulls = model.bulk, model.quasi_null
    if verdict is not None and verdict.noise:
        if evidence.eigenvalues.values.size >= ENOUGH:
            yield _flag("noise-like")
    elif verdict is not None and verdict.phase == Phase.RANDOM_LIKE and nulls:
        yield _flag("null-in-noise", directions=_count(nulls, "quasi-null direction"))
    if entries is not None and entries.heavy and bulk.spikes:
        yield _flag("heavy-entries", mu=entries.mu)
    if model.violations:
        yield _flag("structured-noise", violations=describe(model.violations), counted=_how_counted(model))
    if bulk.ks_distance > 3 * bulk.noise_limit:
        yield _flag("no-bulk", ks=bulk.ks_distance)


_TEXTS = {
    "not-finite": "some weights are NaN or infinite; nothing is computed",
    "out-of-range": "the squares of the weights leave float64's range; rescale the weights",
    "empty": "the matrix has no entries",
    "constant": "all weights are equal; there is no spectrum to fit",
    "orthogonal": "all {count} singular values are equal ({value:.4g}): an orthogonal matrix times a constant; "
    "there is no tail and no bulk to fit",
    "few-eigenvalues": "only {count} eigenvalues are not null: {consequence}",
    "zero-rows": "{which} zero throughout: dead, pruned or padded",
    "unused-rows": "{which} nearly equal or zero, as those of tokens that never occur; the other rows have full rank",
    "no-tail": "the largest eigenvalues are nearly equal: they have no tail, so no exponent",
    "short-tail": "only {count} eigenvalues are in the tail: alpha is unreliable",
    "gradual-tail": "the spectrum steepens gradually, its tail has no clear start: alpha is the slope at xmin, and "
    "further out the exponent may be larger than alpha_stderr says",
    "spikes-capped": "half of the eigenvalues or more lie beyond the bulk's edge: spikes stops counting at half, and "
    "the bulk is fitted to the rest",
    "coarse-dtype": "the weights' dtype resolves singular values down to {resolved:.2g} of the largest at worst: "
    "hard_rank counts only those above",
    "noise-like": "random weights explain the whole spectrum; alpha means nothing here",
    "null-in-noise": "noise but for {directions}: alpha means nothing, the null directions do",
    "heavy-entries": "the entries have a power-law tail (mu = {mu:.2f}): the level of the spikes does not hold, a few "
    "large entries may be among them",
    "structured-noise": "{violations}: the noise law assumes independent entries of one variance. {counted}; alpha may "
    "come from it too",
    "sparse": "most of the weights are zero: the noise law assumes independent entries of one variance, so the level "
    "of the {spikes} does not hold",
    "no-bulk": "no Marchenko-Pastur bulk (KS {ks:.2f}): mp_sigma and the edges are rough",
    "wild-entry": "{which} more than {gap:.0f} times larger than all others",
}


def _flag(code: str, **values: Any) -> Flag:
    return Flag(code, _TEXTS[code].format(**values))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number > 1 else ''}"


def _how_counted(model: NoiseModel) -> str:
    sentences = []
    if model.shows(Violation.SLICE_SIZES):
        sentences.append("Spikes are counted slice by slice, each with its own variance")
    if model.structure:
        edge = f"the edge of noise with this structure, {model.widening:.2f} times further out"
        sentences.append(f"Spikes are counted beyond {edge}")
    return ". ".join(sentences)


def describe(departures: Iterable[Departure], *, separator: str = "; ") -> str:
    """The violations in words.

    Examples:
        >>> describe([Departure(Violation.ROW_SIZES), Departure(Violation.ROW_CORRELATION, 0.2, 1)])
        'rows differ in size; neighbouring rows are correlated (r = 0.20)'
    """
    return separator.join(dict.fromkeys(map(_phrase, departures)))


_PHRASES = {
    Violation.SPARSE: "{amount:.0%} of the weights are zero",
    Violation.ROW_SIZES: "rows differ in size",
    Violation.COLUMN_SIZES: "columns differ in size",
    Violation.SLICE_SIZES: "the slices of the kernel differ in size (variances up to {amount:.3g} times apart)",
    Violation.REGULAR: "large weights are placed regularly, as on a diagonal",
    Violation.ROW_CORRELATION: "{which} are correlated (r = {amount:.2f})",
    Violation.COLUMN_CORRELATION: "{which} are correlated (r = {amount:.2f})",
}


def _phrase(departure: Departure) -> str:
    side = "rows" if departure.violation == Violation.ROW_CORRELATION else "columns"
    which = f"neighbouring {side}" if departure.lag == 1 else f"{side} {departure.lag} places apart"
    return _PHRASES[departure.violation].format(amount=departure.amount or 0.0, which=which)


def phase_reason(verdict: PhaseVerdict, model: NoiseModel | None, gap: Gap, entries: EntryTail) -> str:
    """What decided a phase, in words."""
    if verdict.cause == Cause.PRODUCT:
        beyond = "no singular value lies" if verdict.noise else "singular values lie"
        return f"{beyond} beyond those of a product of two random factors"
    if verdict.cause == Cause.GAP or model is None:
        share = f"{gap.below / (gap.below + gap.above):.0%} of the directions"
        if gap.rounding:
            return f"{share} are no more than rounding of the weights' dtype"
        return f"{share} lie below a gap of {gap.decades:.1f} decades"
    bulk, reach = model.bulk, _reach(model)
    structure = describe(model.structure, separator=", ")
    limit = bulk.noise_limit
    no_law = f"the bulk is not Marchenko-Pastur (KS {bulk.ks_distance:.3f}, noise stays below {limit:.3f})"
    match verdict.cause:
        case Cause.ENTRIES:
            border = " < 4" if verdict.phase == Phase.HEAVY_TAILED else ", above 4"
            return f"the entries have a power-law tail with mu = {entries.mu:.2f}{border}"
        case Cause.TAIL_BEYOND_EDGE:
            beyond = f"{_share_beyond(model):.0%} lie beyond its edge, up to {reach:.3g} times"
            return f"{no_law}; {beyond}, in a power-law tail"
        case Cause.NOTHING_BEYOND_EDGE:
            fits = bulk.ks_distance <= limit
            law = "and the Marchenko-Pastur law explains the bulk" if fits else f"but {no_law}"
            kind = (
                f"edge of noise with this structure: {structure}" if structure else f"Tracy-Widom edge, {law}"
            )
            nulls = f"; {_count(model.quasi_null, 'quasi-null direction')} noise would not leave"
            return f"no eigenvalue lies beyond the {kind}{nulls if model.quasi_null else ''}"
        case Cause.NEAR_EDGE:
            return f"{bulk.spikes} beyond the Tracy-Widom edge, none further than {reach:.2f} times the bulk's edge"
        case Cause.SPIKES:
            kind = f"a bulk of noise with structure ({structure})" if structure else "a Marchenko-Pastur bulk"
            return f"{kind} and {bulk.spikes} beyond it, the largest at {reach:.3g} times its edge"
        case _:
            return f"{no_law} and decays into a tail of {bulk.spikes} beyond its edge"
