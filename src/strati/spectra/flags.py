"""What a reader must know about the numbers of one spectrum: codes that stay, and a sentence each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from strati.spectra.bulk import Bulk, noise_limit
from strati.spectra.phases import Phase, PhaseVerdict
from strati.spectra.tail import FEWEST, Tail
from strati.types import Flag

if TYPE_CHECKING:
    from strati.spectra.eigenvalues import Eigenvalues
    from strati.spectra.entries import EntryTail
    from strati.spectra.structure import Structure
    from strati.types import FloatArray

_FEW, _SHORT = 50, 20  # eigenvalues, and eigenvalues in the tail, below which a fit is shaky


def of_eigenvalues(
    found: Eigenvalues,
    live: FloatArray | None = None,
    *,
    equal: bool = False,
    steep: bool = False,
    tail: Tail | None = None,
    bulk: Bulk | None = None,
    noise: bool = False,
) -> tuple[Flag, ...]:
    """The warnings about the eigenvalues and their fits, most serious first; ``noise``: noise explains the spectrum."""
    if found.problem == "not-finite":
        return (Flag("not-finite", "some weights are NaN or infinite; nothing is computed"),)
    if found.problem == "out-of-range":
        return (
            Flag("out-of-range", "the squares of the weights leave float64's range; rescale the weights"),
        )
    if found.values.size == 0:
        return (Flag("empty", "the matrix has no entries"),)
    flags = []
    if found.problem == "constant":
        flags.append(Flag("constant", "all weights are equal; there is no spectrum to fit"))
    if equal and live is not None:
        value = float(np.sqrt(live[-1]))
        flags.append(
            Flag(
                "orthogonal",
                f"all {live.size} singular values are equal ({value:.4g}): an orthogonal matrix times a constant; "
                "there is no tail and no bulk to fit",
            )
        )
    elif found.problem == "" and live is not None and live.size < _FEW:
        what = "no tail is fitted" if live.size < FEWEST else "fits are rough"
        flags.append(Flag("few-eigenvalues", f"only {live.size} eigenvalues are not null: {what}"))
    if any(found.empty) and found.values[-1] > 0:
        sides = [f"{count} zero" for count in found.empty if count]
        flags.append(
            Flag(
                "zero-rows",
                f"{' and '.join(sides)} rows or columns (dead or pruned neurons): each costs a direction or a sample",
            )
        )
    if steep:
        flags.append(
            Flag("no-tail", "the largest eigenvalues are nearly equal: they have no tail, so no exponent")
        )
    if tail is not None and tail.size < _SHORT:
        flags.append(Flag("short-tail", f"only {tail.size} eigenvalues are in the tail: alpha is unreliable"))
    elif tail is not None and tail.gradual and not noise:
        flags.append(
            Flag(
                "gradual-tail",
                "the spectrum steepens gradually, its tail has no clear start: alpha is the slope at xmin, and further "
                "out the exponent may be larger than alpha_stderr says",
            )
        )
    if bulk is not None and bulk.capped:
        flags.append(
            Flag(
                "spikes-capped",
                "half of the eigenvalues or more lie beyond the bulk's edge: spikes stops counting at half, and the "
                "bulk is fitted to the rest",
            )
        )
    if found.rows * found.epsilon > 0.01:
        flags.append(
            Flag(
                "coarse-dtype",
                f"the weights' dtype resolves singular values down to {found.rows * found.epsilon:.2g} of the "
                "largest at worst: hard_rank counts only those above",
            )
        )
    return tuple(flags)


def of_noise(
    found: Eigenvalues,
    bulk: Bulk | None,
    verdict: PhaseVerdict | None,
    structure: Structure | None,
    entries: EntryTail,
    nulls: int | None,
) -> tuple[Flag, ...]:
    """The warnings about the random part."""
    flags = []
    if verdict is not None and verdict.noise:
        flags.append(
            Flag(
                "noise-like",
                "the Marchenko-Pastur law of random entries explains the spectrum: alpha means nothing",
            )
        )
    elif verdict is not None and verdict.phase == Phase.RANDOM_LIKE and nulls and bulk is not None:
        flags.append(
            Flag(
                "null-in-noise",
                f"noise but for {nulls} quasi-null direction{'s' if nulls > 1 else ''}: alpha means nothing, the null "
                "directions do",
            )
        )
    if entries.heavy and bulk is not None and bulk.spikes:
        flags.append(
            Flag(
                "heavy-entries",
                f"the entries have a power-law tail (mu = {entries.mu:.2f}): the level of the spikes does not hold, a "
                "few large entries may be among them",
            )
        )
    if structure is not None and structure.broken:
        flags.append(
            Flag(
                "structured-noise",
                f"{'; '.join(structure.broken)}: the noise law assumes independent entries of one variance. Spikes are "
                f"counted beyond the edge of noise with this structure, {structure.widening:.2f} times further out; "
                "alpha may come from it too",
            )
        )
    if bulk is not None and bulk.ks_distance > 3 * noise_limit(bulk.size, found.matrices):
        flags.append(
            Flag(
                "no-bulk",
                f"no Marchenko-Pastur bulk (KS {bulk.ks_distance:.2f}): mp_sigma and the edges are rough",
            )
        )
    return tuple(flags)


def of_sparse(spikes: int) -> tuple[Flag, ...]:
    """The warning about spikes of a matrix that is mostly zeros and has lost directions for it."""
    return (
        Flag(
            "structured-noise",
            "most of the weights are zero: the noise law assumes independent entries of one variance, so the level of "
            f"the {spikes} spike{'s' if spikes > 1 else ''} does not hold",
        ),
    )
