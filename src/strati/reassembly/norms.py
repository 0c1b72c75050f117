"""Which norm piece belongs to which block, where blocks have a norm before them.

A norm's weights are taken into the input projection that wears it (:mod:`strati.reassembly.normalise`). Before
anything is known, every input projection wears the mean of all norms: after training they differ little from each
other, so that pairs and order can be found nearly right. Then the effect of each norm in each place is predicted by
one forward and one backward pass, the error regressed on it, and each proposal judged by its true error, as for the
output projections (:mod:`strati.reassembly.joint`). One more norm than blocks, or a single one, stands before the last
layer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from strati.reassembly.assignment import assign
from strati.reassembly.passes import run
from strati.reassembly.regression import RIDGES, ridge
from strati.reassembly.wardrobe import MEAN, Wardrobe, dressed

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.reassembly.passes import Floats, Ints, Parts


def dress(parts: Parts, ins: Ints, outs: Ints, x: Floats, y: Floats) -> tuple[Parts, float]:
    """One step of assigning norms to the blocks of a chain: the best of many reassignments and single exchanges.

    Returns:
        The parts with the norms worn as found, and the mean squared error.
    """
    wardrobe = parts.wardrobe
    best, chosen = parts.mse(ins, outs, x, y), parts
    if wardrobe is None or parts.norm is None:
        return chosen, best
    output, effects = _effects(parts, wardrobe, ins, outs, x)
    error = (y - output).T.reshape(-1)
    now = wardrobe.worn[ins]
    if wardrobe.last is not None:
        now = np.append(now, wardrobe.last)
    centred = effects - effects.mean(axis=2, keepdims=True) - effects.mean(axis=1, keepdims=True)
    centred += effects.mean(axis=(1, 2), keepdims=True)
    here = _weights(now, effects.shape[2])
    changes = ridge(centred.reshape(len(error), -1), error, RIDGES)
    proposals = [assign(here + reach * c.reshape(here.shape)) for c in changes for reach in (1.0, 2.0, 4.0)]
    if not (now == MEAN).any():
        proposals += _exchanges(effects, now, error)
    for proposal in {p.tobytes(): p for p in proposals}.values():
        trial = dressed(parts, _worn_by(wardrobe, ins, proposal))
        mse = trial.mse(ins, outs, x, y)
        if mse < best:
            best, chosen = mse, trial
    return chosen, best


def _worn_by(wardrobe: Wardrobe, ins: Ints, norms: Ints) -> Wardrobe:
    """The input projections of a chain wear these norms, all others the mean."""
    worn = np.full(len(wardrobe.worn), MEAN)
    worn[ins] = norms[: len(ins)]
    return replace(wardrobe, worn=worn, last=int(norms[-1]) if wardrobe.last is not None else None)


def _effects(
    parts: Parts, wardrobe: Wardrobe, ins: Ints, outs: Ints, x: Floats
) -> tuple[Floats, NDArray[np.float32]]:
    """The output, and the first-order effect of each norm in each place: (outputs * rows, places, norms)."""
    passed = run(parts, ins, outs, x)
    rows, outputs = passed.output.shape
    places = len(ins) + (wardrobe.last is not None)
    effects = np.empty((outputs, rows, places, len(wardrobe.weights)), dtype=np.float32)
    for k, (i, j) in enumerate(zip(ins, outs, strict=True)):
        read = parts.enter(passed.streams[k])
        slope = parts.act.slope(read @ parts.A[i].T + parts.a[i])
        for q in range(outputs):
            back = ((passed.adjoint[k + 1][q] @ parts.B[j]) * slope) @ wardrobe.A[i]
            effects[q, :, k] = (back * read) @ wardrobe.weights.T + back @ wardrobe.biases.T
    if wardrobe.last is not None:
        read = parts.leave(passed.streams[-1])
        for q in range(outputs):
            effects[q, :, -1] = (read * wardrobe.L[q]) @ wardrobe.weights.T + wardrobe.L[
                q
            ] @ wardrobe.biases.T
    return passed.output, effects.reshape(outputs * rows, places, -1)


def _weights(now: Ints, norms: int) -> NDArray[np.float64]:
    """Who wears what, places x norms; those without a norm of their own share the rest."""
    here = np.zeros((len(now), norms))
    left = np.setdiff1d(np.arange(norms), now)
    for place, norm in enumerate(now):
        if norm == MEAN:
            here[place, left] = 1 / max(len(left), 1)
        else:
            here[place, norm] = 1
    return here


def _exchanges(effects: Floats, now: Ints, error: Floats, count: int = 8) -> list[Ints]:
    """The exchanges of two places' norms with the least predicted error."""
    worn = effects[:, :, now]
    own = np.einsum("xss->xs", worn)
    first, second = np.triu_indices(len(now), 1)
    change = worn[:, first, second] + worn[:, second, first] - own[:, first] - own[:, second]
    predicted = np.einsum("xp,xp->p", change, change) - 2 * (error @ change)
    found = []
    for c in np.argsort(predicted, kind="stable")[:count]:
        exchanged = now.copy()
        exchanged[[first[c], second[c]]] = exchanged[[second[c], first[c]]]
        found.append(exchanged)
    return found
