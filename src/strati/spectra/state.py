"""The state of a layer in one word: what a reader wants to know before any number.

==============  ========================================================================================
learned         the weights differ from independent random ones: in their spectrum or in their sizes
random-like     enough eigenvalues to tell, and random weights explain them all
too-small       too few eigenvalues to tell the one from the other
broken          something is wrong: see :data:`WRONG`
==============  ========================================================================================
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from strati.spectra.phases import Phase, PhaseVerdict

if TYPE_CHECKING:
    from collections.abc import Iterable

ENOUGH = 50
"""Eigenvalues from which a spectrum that noise explains says that there is nothing but noise.

With 49 or fewer, layers of trained networks whose signal is spread over all directions (heads, narrow convolutions)
pass as noise: 10 of them among the 11 networks that ``docs/scan.md`` lists.
"""

WRONG = ("not-finite", "out-of-range", "empty", "constant", "wild-entry", "zero-rows", "rank-collapse")
"""What makes a layer ``broken``, the most serious first: codes of warnings, and the phase of that name."""

USUAL_IN_EMBEDDINGS = frozenset({"zero-rows", "rank-collapse"})
"""What is not wrong in an embedding: rows of padding and unused tokens, and sinusoidal positions."""


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
        >>> faults(["zero-rows"], None, embedding=True)
        ()
    """
    present = {*codes, str(phase)}
    usual = USUAL_IN_EMBEDDINGS if embedding else frozenset[str]()
    return tuple(code for code in WRONG if code in present and code not in usual)


def decide_state(
    codes: Iterable[str], verdict: PhaseVerdict | None, eigenvalues: int, *, embedding: bool = False
) -> LayerState:
    """The state of a layer.

    Args:
        codes: The codes of its warnings.
        verdict: Its phase; ``None`` if there was none to decide.
        eigenvalues: How many eigenvalues it has.
        embedding: It is a table of vectors.

    Examples:
        >>> noise = PhaseVerdict(Phase.RANDOM_LIKE, "", noise=True)
        >>> [str(decide_state([], noise, count)) for count in (49, 50)]
        ['too-small', 'random-like']
        >>> str(decide_state([], PhaseVerdict(Phase.BULK_SPIKES, ""), 12))
        'learned'
    """
    codes = set(codes)
    if faults(codes, None if verdict is None else verdict.phase, embedding=embedding):
        return LayerState.BROKEN
    if verdict is None:
        return (
            LayerState.RANDOM_LIKE
            if "orthogonal" in codes and eigenvalues >= ENOUGH
            else LayerState.TOO_SMALL
        )
    if verdict.phase != Phase.RANDOM_LIKE:
        return LayerState.LEARNED
    if eigenvalues < ENOUGH:
        return LayerState.TOO_SMALL
    return LayerState.RANDOM_LIKE if verdict.noise else LayerState.LEARNED
