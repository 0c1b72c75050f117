"""The 5+1 phases of training, read off one layer's spectrum, with the evidence that decided.

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
the law fit the bulk; how far beyond its edge do eigenvalues lie. Confusion matrix on
draws of generative models: ``strati reproduce phases``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from strati.spectra.violations import describe

if TYPE_CHECKING:
    from strati.spectra.eigenvalues import Eigenvalues
    from strati.spectra.entries import EntryTail
    from strati.spectra.noise_model import NoiseModel
    from strati.spectra.ranks import Gap
    from strati.spectra.tail import Tail

SET_APART = 1.4
"""A spike is set apart from the bulk beyond this multiple of the bulk's upper edge."""

GOOD_FIT = 0.02
"""KS distance up to which a bulk counts as Marchenko-Pastur though a large matrix of pure noise would fit better."""

_LARGEST_MU = 5.2  # pure power laws with a larger exponent leave no trace in spectra of these sizes
_TAIL_SHARE, _TAIL_REACH, _TAIL_ALPHA = 0.03, 2.0, 6.0


class Phase(StrEnum):
    """Phases in the order in which training runs through them; rank collapse stands apart."""

    RANDOM_LIKE = "random-like"
    BLEEDING_OUT = "bleeding-out"
    BULK_SPIKES = "bulk+spikes"
    BULK_DECAY = "bulk-decay"
    HEAVY_TAILED = "heavy-tailed"
    RANK_COLLAPSE = "rank-collapse"


@dataclass(frozen=True)
class PhaseVerdict:
    """A phase and why.

    Attributes:
        phase: The phase.
        reason: One sentence.
        noise: The Marchenko-Pastur law alone explains the spectrum, its smallest eigenvalues included.
    """

    phase: Phase
    reason: str
    noise: bool = False


def collapsed(gap: Gap) -> PhaseVerdict:
    """The verdict on a spectrum with a gap of many decades."""
    share = gap.below / (gap.below + gap.above)
    return PhaseVerdict(
        Phase.RANK_COLLAPSE,
        f"{share:.0%} of the directions are no more than rounding of the weights' dtype"
        if gap.rounding
        else f"{share:.0%} of the directions lie below a gap of {gap.decades:.1f} decades",
    )


def decide(
    model: NoiseModel, eigenvalues: Eigenvalues, *, entries: EntryTail, tail: Tail | None = None
) -> PhaseVerdict:
    """Decide the phase of a spectrum whose rank has not collapsed.

    Args:
        model: The random part.
        eigenvalues: The eigenvalues.
        entries: The tail of the entries.
        tail: The tail of the spectrum, if one was fitted.
    """
    if entries.heavy and entries.mu < 4:
        return PhaseVerdict(
            Phase.HEAVY_TAILED, f"the entries have a power-law tail with mu = {entries.mu:.2f} < 4"
        )
    bulk, nulls = model.bulk, model.quasi_null
    limit = bulk.noise_limit
    broken = describe(model.structure, separator=", ")
    # A bulk that the structure explains fits, too.
    fits = bulk.ks_distance <= max(limit, GOOD_FIT) or bool(model.structure)
    reach = model.largest / (bulk.lambda_plus * model.widening)
    why = f"the bulk is not Marchenko-Pastur (KS {bulk.ks_distance:.3f}, noise stays below {limit:.3f})"
    share = bulk.spikes / (bulk.size + bulk.spikes)
    steep = tail is not None and tail.alpha < _TAIL_ALPHA
    if not fits and share >= _TAIL_SHARE and reach >= _TAIL_REACH and steep:
        return PhaseVerdict(
            Phase.HEAVY_TAILED,
            f"{why}; {share:.0%} lie beyond its edge, up to {reach:.3g} times, in a power-law tail",
        )
    if entries.heavy and (entries.mu < _LARGEST_MU or not entries.pure):
        return PhaseVerdict(
            Phase.BULK_DECAY, f"the entries have a power-law tail with mu = {entries.mu:.2f}, above 4"
        )
    if bulk.spikes == 0:
        law = bulk.ks_distance <= limit
        how = "and the Marchenko-Pastur law explains the bulk" if law else f"but {why}"
        if broken:
            how = f"of noise with this structure: {broken}"
        if nulls:
            how += f"; {nulls} quasi-null direction{'s' if nulls > 1 else ''} noise would not leave"
        return PhaseVerdict(
            Phase.RANDOM_LIKE,
            f"no eigenvalue lies beyond the {'edge' if broken else 'Tracy-Widom edge,'} {how}",
            noise=law and not nulls and not broken,
        )
    if fits and reach <= SET_APART:
        return PhaseVerdict(
            Phase.BLEEDING_OUT,
            f"{bulk.spikes} beyond the Tracy-Widom edge, none further than {reach:.2f} times the bulk's edge",
        )
    if fits:
        kind = f"a bulk of noise with structure ({broken})" if broken else "a Marchenko-Pastur bulk"
        return PhaseVerdict(
            Phase.BULK_SPIKES,
            f"{kind} and {bulk.spikes} beyond it, the largest at {reach:.3g} times its edge",
        )
    return PhaseVerdict(Phase.BULK_DECAY, f"{why} and decays into a tail of {bulk.spikes} beyond its edge")


def universality_exponent(alpha: float) -> float:
    r"""The exponent :math:`\mu` of the class of heavy-tailed matrices that a tail's ``alpha`` belongs to.

    ``mu = 2 (alpha - 1)`` up to 2; between 2 and 4 the finite-size relation is roughly linear,
    ``alpha = 3 mu - 4``, by simulation; beyond, 4.

    Examples:
        >>> universality_exponent(1.75), universality_exponent(5.0)
        (1.5, 3.0)
    """
    return 2 * (alpha - 1) if alpha <= 2 else min((alpha + 4) / 3, 4.0)
