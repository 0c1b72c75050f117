"""What a reader must know about the numbers of one spectrum: codes that stay, and a sentence each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from strati.core.results import Flag
from strati.spectra.bulk import Bulk
from strati.spectra.entries import WILD_GAP
from strati.spectra.phases import Phase, PhaseVerdict
from strati.spectra.state import ENOUGH
from strati.spectra.tail import FEWEST, Tail
from strati.spectra.violations import Violation, describe

if TYPE_CHECKING:
    from strati.core.results import FloatArray
    from strati.spectra.eigenvalues import Eigenvalues
    from strati.spectra.entries import EntryTail
    from strati.spectra.noise_model import NoiseModel

_SHORT = 20  # eigenvalues in the tail below which its fit is shaky


def of_eigenvalues(
    eigenvalues: Eigenvalues,
    live: FloatArray | None = None,
    *,
    equal: bool = False,
    steep: bool = False,
    tail: Tail | None = None,
    bulk: Bulk | None = None,
    noise: bool = False,
) -> tuple[Flag, ...]:
    """The warnings about the eigenvalues and their fits, most serious first; ``noise``: noise explains the spectrum."""
    if eigenvalues.problem == "not-finite":
        return (Flag("not-finite", "some weights are NaN or infinite; nothing is computed"),)
    if eigenvalues.problem == "out-of-range":
        return (
            Flag("out-of-range", "the squares of the weights leave float64's range; rescale the weights"),
        )
    if eigenvalues.values.size == 0:
        return (Flag("empty", "the matrix has no entries"),)
    flags = []
    if eigenvalues.problem == "constant":
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
    elif eigenvalues.problem == "" and live is not None and live.size < ENOUGH:
        what = "no tail is fitted" if live.size < FEWEST else "fits are rough"
        flags.append(Flag("few-eigenvalues", f"only {live.size} eigenvalues are not null: {what}"))
    if any(eigenvalues.empty) and eigenvalues.values[-1] > 0:
        count = sum(eigenvalues.empty)
        which = "one row or column is" if count == 1 else f"{count} rows or columns are"
        flags.append(Flag("zero-rows", f"{which} zero throughout: dead, pruned or padded"))
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
    resolved = eigenvalues.rows * eigenvalues.epsilon
    if resolved > 0.01:
        flags.append(
            Flag(
                "coarse-dtype",
                f"the weights' dtype resolves singular values down to {resolved:.2g} of the "
                "largest at worst: hard_rank counts only those above",
            )
        )
    return tuple(flags)


def of_noise(
    eigenvalues: Eigenvalues, model: NoiseModel | None, verdict: PhaseVerdict | None, entries: EntryTail
) -> tuple[Flag, ...]:
    """The warnings about the random part."""
    if model is None:
        return ()
    bulk, nulls = model.bulk, model.quasi_null
    flags = []
    if verdict is not None and verdict.noise:
        if eigenvalues.values.size >= ENOUGH:
            text = "random weights explain the whole spectrum; alpha means nothing here"
            flags.append(Flag("noise-like", text))
    elif verdict is not None and verdict.phase == Phase.RANDOM_LIKE and nulls:
        flags.append(
            Flag(
                "null-in-noise",
                f"noise but for {nulls} quasi-null direction{'s' if nulls > 1 else ''}: alpha means nothing, the null "
                "directions do",
            )
        )
    if entries.heavy and bulk.spikes:
        flags.append(
            Flag(
                "heavy-entries",
                f"the entries have a power-law tail (mu = {entries.mu:.2f}): the level of the spikes does not hold, a "
                "few large entries may be among them",
            )
        )
    if model.violations:
        flags.append(Flag("structured-noise", _structure_text(model)))
    if bulk.ks_distance > 3 * bulk.noise_limit:
        flags.append(
            Flag(
                "no-bulk",
                f"no Marchenko-Pastur bulk (KS {bulk.ks_distance:.2f}): mp_sigma and the edges are rough",
            )
        )
    return tuple(flags)


def _structure_text(model: NoiseModel) -> str:
    counted = []
    if model.shows(Violation.SLICE_SIZES):
        counted.append("Spikes are counted slice by slice, each with its own variance")
    if model.structure:
        counted.append(
            "Spikes are counted beyond the edge of noise with this structure, "
            f"{model.widening:.2f} times further out"
        )
    return (
        f"{describe(model.violations)}: the noise law assumes independent entries of one variance. "
        f"{'. '.join(counted)}; alpha may come from it too"
    )


def of_entries(wild: int) -> tuple[Flag, ...]:
    """The warning about single weights far beyond all others."""
    if not wild:
        return ()
    which = "one weight is" if wild == 1 else f"{wild} weights are"
    return (Flag("wild-entry", f"{which} more than {WILD_GAP:.0f} times larger than all others"),)


def of_sparse(spikes: int) -> tuple[Flag, ...]:
    """The warning about spikes of a matrix that is mostly zeros and has lost directions for it."""
    return (
        Flag(
            "structured-noise",
            "most of the weights are zero: the noise law assumes independent entries of one variance, so the level of "
            f"the {spikes} spike{'s' if spikes > 1 else ''} does not hold",
        ),
    )
