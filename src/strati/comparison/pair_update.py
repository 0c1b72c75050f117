"""The update between two versions of a layer, brought to one order first: in this process, or in a resumable store.

:func:`updates` computes updates on threads; with a folder each finished one is kept there, so that the same call goes
on after a stop. Both give the same numbers: every pair has a random stream of its own and one BLAS thread.

Low-rank updates (adapters) are compared by their factors: with orthonormal bases ``Q`` and ``P`` of what several
updates write and read, :math:`Q^T s B A P` has the same norms, singular values and inner products as ``s B A``, at the
size of the ranks.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from math import sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from threadpoolctl import threadpool_limits

from strati.comparison.merging import Interference, Mixture, interference, mixture
from strati.comparison.results import LayerUpdate, RoundingError
from strati.comparison.unit_alignment import Renumbering
from strati.comparison.update import Intruder, Update, agreement, relative_change, update_between
from strati.comparison.update_rank import (
    RankTest,
    UpdateKind,
    effective_dtype,
    is_conversion,
    quantised_variance,
    rounding_variance,
)
from strati.core.results import Flag, jsonable
from strati.core.rng import stream
from strati.io.adapters.lora import resolution
from strati.io.align import Aligned, align, rescaled
from strati.jobs.engine import Load, Outcome, Unit, in_thread, in_threads
from strati.jobs.store import Finished, Run, run_cached, unit_key
from strati.spectra.layerwise import weights_identity

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.core.results import FloatArray
    from strati.io.adapters.lora import AdapterUpdate
    from strati.io.layers import Layer

    Matrix = NDArray[Any]
    Factors = Sequence[Matrix]

STORE = "updates.sqlite"
"""The store's file in the folder of a resumable comparison."""

LAYOUT = 11
"""Changes whenever what is kept of a pair, or how it is computed, does."""

WORSE = 1.25
"""A quantised layer whose error is more than this many times the predicted one is named.

``tools/calibrate_rounding.py``: to the nearest code layers reach 1.01, rounded down they begin at 1.95.
"""

WORSE_COMPENSATED = 1.75
"""The same where the scheme may have moved weights to make up for the rounding of others, as GPTQ does.

``tools/calibrate_rounding.py``: GPTQ's layers reach 1.45 on stories15M and its inputs, 1.24 on made ones.
"""

OUTSIDE = 5e-3
"""Share of the entries of a float8 conversion that may lie outside the cell of their code: clipped ones."""

_COMPENSATED = frozenset({"gptq", "compressed-tensors"})


@dataclass(frozen=True)
class PairUpdate:
    """The update between two versions of a layer.

    Attributes:
        numbers: Its numbers.
        removed: Of a projection, a sketch of the direction that was removed.
        folded: The norm whose weights one network keeps in this layer.
    """

    numbers: LayerUpdate
    removed: tuple[float, ...] | None = None
    folded: str | None = None


@dataclass(frozen=True)
class PairedRow:
    """The versions of one layer, in the networks' order.

    Attributes:
        versions: The layer in every network.
        widths: Widths of an attention head to try.
        units: How the last version numbers its units, where that is not as the first does.
        gains: Norm weights that one network may have multiplied into this layer: name, values, which network has them.
        series: The versions are checkpoints of one run, not updates of the first.
    """

    versions: tuple[Layer, ...]
    widths: tuple[int, ...]
    units: Renumbering | None = None
    gains: tuple[tuple[str, tuple[float, ...], int], ...] = ()
    series: bool = False

    @property
    def name(self) -> str:
        """The layer's name in the first network."""
        return self.versions[0].name


def updates(
    rows: Sequence[PairedRow],
    *,
    seed: int,
    merge: bool,
    workers: int | None,
    out: str | Path | None = None,
    run: Run | None = None,
) -> list[PairUpdate]:
    """The step from the first to the last version of every layer.

    Args:
        rows: The layers.
        seed: Of the simulated rounding noise.
        merge: Also estimate the last version as a mixture of the others.
        workers: Pairs worked on at once in this process; 0 for one per processor.
        out: A folder that keeps every finished pair.
        run: With a folder, where the work is done.
    """
    if out is None:
        with threadpool_limits(limits=1):  # threads of BLAS would fight each other, and change the last bits
            return in_threads(partial(_of_row, seed=seed, merge=merge), rows, workers or os.cpu_count() or 1)
    return _stored(rows, seed, merge, Path(out), run or Run())


def _of_row(row: PairedRow, *, seed: int, merge: bool) -> PairUpdate:
    versions = [reader() for reader in _readers(row)]
    return pair_update(versions, _facts(row, seed, merge))


def changes_from_first(versions: Sequence[Layer]) -> tuple[float | None, ...]:
    """How far each version of a layer lies from the first, relative to that one's norm."""
    readers = _readers(PairedRow(tuple(versions), ()))
    if readers[0].factored:
        factors = [reader().matrices for reader in readers]
        same = len({(left.shape[0], right.shape[1]) for left, right, _ in factors}) == 1
        small = reduced(factors) if same else []
        return (
            tuple(relative_change(small[0], matrix) for matrix in small) if same else (None,) * len(versions)
        )
    first = whole(readers[0]().matrices)
    return tuple(relative_change(first, whole(reader().matrices)) for reader in readers)


def _readers(row: PairedRow) -> list[VersionReader]:
    factored = _factored(row)
    return [VersionReader(layer, factored) for layer in row.versions]


def _factored(row: PairedRow) -> bool:
    """Whether all versions are low-rank updates, which are compared by their factors."""
    return all(layer.adapter is not None for layer in row.versions)


def _stored(rows: Sequence[PairedRow], seed: int, merge: bool, folder: Path, run: Run) -> list[PairUpdate]:
    files: dict[int, Any] = {}
    units = []
    for row in rows:
        facts = _facts(row, seed, merge)
        weights = [weights_identity(layer, files) for layer in row.versions]
        views = [layer.view for layer in row.versions]
        key = unit_key({"facts": facts, "weights": weights, "views": views, "layout": LAYOUT})
        readers = {str(n): reader for n, reader in enumerate(_readers(row))}
        units.append(Unit(key, row.name, "", facts, readers))
    values = run_cached(folder / STORE, units, _work, _keep, run, holds="updates", layout=LAYOUT)
    return [_from_record(value) for value in values]


@dataclass(frozen=True)
class LayerVersion:
    """A layer of one network, read.

    Attributes:
        matrices: Its matrices; of an adapter's update its factors and its scale.
        variance: Of a quantised layer, the variance of the rounding error of every entry.
    """

    matrices: list[Matrix]
    variance: Matrix | None = None

    @property
    def error(self) -> float:
        """Mean square of the rounding error; 0 where the layer is not quantised."""
        return 0.0 if self.variance is None else float(self.variance.mean(dtype=np.float64))

    def __call__(self) -> LayerVersion:
        """Itself: what a reader of values in memory gives."""
        return self


@dataclass(frozen=True)
class VersionReader:
    """Reads a layer wherever it is called, of an adapter the whole update or its factors; values in memory travel."""

    layer: Layer = field(repr=False)
    factored: bool = False

    def __call__(self) -> LayerVersion:
        """The layer's matrices."""
        layer = self.layer
        if self.factored and layer.adapter is not None:
            return LayerVersion(scaled_factors(layer.adapter))
        read = layer.network.contents.rounding
        variance = None
        if layer.quantisation is not None and read is not None:
            variance = read(layer.tensor, layer.cut.index)
        if variance is not None:
            parts = layer.cut.matrices if layer.cut.index is None else layer.cut.of_part
            variance = whole(list(parts(variance)))
        return LayerVersion(list(layer.matrices()), variance)

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        if self.layer.network.in_memory:
            version = self()
            return LayerVersion, ([np.ascontiguousarray(m) for m in version.matrices], version.variance)
        return VersionReader, (self.layer, self.factored)


def _work(unit: Unit, load: Load) -> dict[str, Any]:
    with threadpool_limits(limits=1):
        versions = [load(str(n)) for n in range(len(unit.files))]
        plain: dict[str, Any] = jsonable(in_thread(partial(pair_update, versions, unit.config)))
        return plain


def _keep(outcome: Outcome) -> Finished:
    return Finished(outcome.unit.key, outcome.unit.name, outcome.value, outcome.reason)


def _from_record(record: dict[str, Any]) -> PairUpdate:
    fields = dict(record["numbers"])
    records: dict[str, Any] = {"rounding": RoundingError, "interference": Interference, "mixture": Mixture}
    for name, record_type in records.items():
        if fields[name] is not None:
            values = {k: tuple(v) if isinstance(v, list) else v for k, v in fields[name].items()}
            fields[name] = record_type(**values)
    fields["warnings"] = tuple(Flag(**flag) for flag in fields["warnings"])
    fields["intruders"] = tuple(Intruder(**intruder) for intruder in fields["intruders"])
    if fields["update_eigenvalues"] is not None:
        fields["update_eigenvalues"] = np.array(fields["update_eigenvalues"])
    removed = None if record["removed"] is None else tuple(record["removed"])
    return PairUpdate(LayerUpdate(**fields), removed, record["folded"])


def _facts(row: PairedRow, seed: int, merge: bool) -> dict[str, Any]:
    """All that the numbers depend on besides the weights; plain values, so that they travel and are hashed."""
    first = row.versions[0]
    return {
        "name": first.name,
        "role": str(first.role) if first.count == 1 else "",
        "widths": list(row.widths),
        "seed": seed,
        "merge": merge,
        "several": len(row.versions) > 2 and not merge and not row.series,
        "factored": _factored(row),
        "groups": [x.quantisation.group if x.quantisation is not None else None for x in row.versions],
        "schemes": [x.quantisation.scheme if x.quantisation is not None else None for x in row.versions],
        "units": None if row.units is None else asdict(row.units),
        "gains": [list(gain) for gain in row.gains],
        "dtypes": [x.dtype for x in row.versions],
        "bits": [x.quantisation.bits if x.quantisation is not None else None for x in row.versions],
    }


def pair_update(read: Sequence[LayerVersion], facts: Any) -> PairUpdate:
    """The step from the first to the last version of a layer.

    Args:
        read: The layer in every network.
        facts: Name, role, head widths, seed, schemes of quantisation, as plain values.
    """
    versions = [version.matrices for version in read]
    if facts["factored"]:
        return _between_adapters(versions, facts)
    if facts["units"] is not None:
        renumbering = Renumbering(**facts["units"])
        versions[-1] = [renumbering.apply(matrix) for matrix in versions[-1]]
    errors = [version.error for version in read]
    mixed = _mixture(versions, errors, facts) if facts["merge"] else None
    aligned = _aligned(versions[0], versions[-1], facts)
    if aligned is None:
        flag = _shapes_differ(versions[0][0].shape, versions[-1][0].shape)
        return PairUpdate(LayerUpdate(warnings=(flag,), mixture=mixed))
    if not all(np.isfinite(m.astype(np.float64, copy=False)).all() for m in (aligned.first, aligned.second)):
        return PairUpdate(LayerUpdate(warnings=(_NOT_FINITE,), mixture=mixed))
    noise = _quantisation_noise(aligned, read, facts)
    formats = [(facts["schemes"][n], facts["bits"][n], facts["groups"][n]) for n in (0, -1)]
    folded, aligned = _unfolded(aligned, facts["gains"])
    update = update_between(
        aligned.first,
        aligned.second,
        rng=stream(facts["seed"], "compare", facts["name"]),
        variance=noise,
        converted=formats[0] != formats[1] and _in_cells(aligned, noise, facts),
    )
    units = facts["units"] or {}
    rescaled_units = units.get("row_scales") or units.get("column_scales")
    if rescaled_units and update.rank.kind is UpdateKind.UNDECIDED and update.rank.rank == 0:
        # Undoing the scales of units rounds every weight again.
        update = replace(update, rank=replace(update.rank, kind=UpdateKind.ROUNDING))
    rounding = _rounding(aligned, errors[0] + errors[-1])
    schemes = {facts["schemes"][0], facts["schemes"][-1]}
    flags = _extra_rows(aligned, len(versions)) + _rounded_worse(rounding, bool(schemes & _COMPENSATED))
    numbers = replace(
        _of_update(update),
        agreement=agreement(aligned.first, aligned.second),
        aligned=", ".join(filter(None, ["units" if facts["units"] else None, aligned.how])) or None,
        rounding=rounding,
        mixture=mixed,
        interference=_between_updates(versions, facts) if facts["several"] else None,
        warnings=tuple(flags),
    )
    return PairUpdate(numbers, update.removed, folded)


def _between_updates(versions: Sequence[Sequence[Matrix]], facts: Any) -> Interference | None:
    """Interference of the updates that lead from the first version to each of the others."""
    pairs = [_aligned(versions[0], later, facts) for later in versions[1:]]
    if any(pair is None or pair.extra is not None for pair in pairs):
        return None
    updates = [p.second.astype(np.float64) - p.first.astype(np.float64) for p in pairs if p is not None]
    if not all(np.isfinite(update).all() for update in updates):
        return None
    rows, columns = updates[0].shape
    worst = interference(updates, (rows, columns))
    return None if worst is None else replace(worst, networks=(worst.networks[0] + 1, worst.networks[1] + 1))


def _unfolded(aligned: Aligned, gains: Sequence[Any]) -> tuple[str | None, Aligned]:
    """Multiply a norm's weights into the version that does not hold them, where that halves the squared distance.

    A common factor of all weights is no evidence: the distance must also be half of what the best factor leaves.
    """
    stored = [aligned.first.astype(np.float64), aligned.second.astype(np.float64)]
    norm, unfolded = None, aligned
    best = float(np.square(stored[1] - stored[0]).sum()) / 2
    for name, gain, side in gains:
        versions = list(stored)
        versions[side] = stored[side] * np.asarray(gain)
        distance = float(np.square(versions[1] - versions[0]).sum())
        moving, fixed = stored[side], stored[1 - side]
        energy = float(np.vdot(moving, moving))
        scaled_distance = float(np.vdot(fixed, fixed)) - float(np.vdot(moving, fixed)) ** 2 / max(
            energy, np.finfo(np.float64).tiny
        )
        if distance < min(best, scaled_distance / 2):
            how = ", ".join(filter(None, [aligned.how, "folded-norm"]))
            scaled = versions[side].astype(np.float32)
            sides = {"second": scaled} if side else {"first": scaled}
            best, norm, unfolded = distance, name, replace(aligned, how=how, **sides)
    return norm, unfolded


def _of_update(update: Update) -> LayerUpdate:
    return LayerUpdate(
        relative_change=update.relative_change,
        update_stable_rank=update.stable_rank,
        update_rank=update.rank.rank,
        update_rank_pvalue=update.rank.pvalue,
        update_kind=str(update.rank.kind),
        subspace_overlap=update.subspace_overlap,
        overlap_by_chance=update.overlap_by_chance,
        subspace_directions=update.directions,
        update_eigenvalues=update.eigenvalues,
        intruders=update.intruders,
        pattern=None if update.pattern is None else str(update.pattern),
        pattern_share=update.pattern_share,
    )


def _between_adapters(versions: Sequence[Factors], facts: Any) -> PairUpdate:
    """The update from the first to the last of several low-rank updates, by their factors."""
    shapes = [(left.shape[0], right.shape[1]) for left, right, _ in versions]
    if len(set(shapes)) > 1:
        return PairUpdate(LayerUpdate(warnings=(_shapes_differ(shapes[0], shapes[-1]),)))
    small = reduced(versions)
    if not all(np.isfinite(matrix).all() for matrix in small):
        return PairUpdate(LayerUpdate(warnings=(_NOT_FINITE,)))
    (rows, columns), first, last = shapes[0], small[0], small[-1]
    update = update_between(first, last)
    eps = max(resolution(left, right) for left, right, _ in (versions[0], versions[-1])) * sqrt(
        max(rows, columns)
    )
    least = eps * max(float(np.linalg.norm(m, 2)) for m in (first, last))
    rank = int(np.count_nonzero(np.sqrt(update.eigenvalues) > least))
    chance = update.directions * (1 / rows + 1 / columns) / 2
    update = replace(
        update,
        stable_rank=float(update.eigenvalues.sum() / update.eigenvalues[-1]) if rank else None,
        rank=_adapter_rank(versions, rank, min(rows, columns)),
        overlap_by_chance=None if update.overlap_by_chance is None else chance,
        intruders=(),
        pattern=None,
    )
    mixed = mixture(small[:-1], small[-1]) if facts["merge"] else None
    between = interference(small, (rows, columns), least=eps, signs=False)
    return PairUpdate(replace(_of_update(update), interference=between, mixture=mixed))


def scaled_factors(update: AdapterUpdate) -> list[Matrix]:
    """The factors ``B`` and ``A`` of an update, in the dtypes that they were stored in, and its scale."""
    left, right = update.factors()
    return [left, right, np.asarray(1.0 if update.scale is None else update.scale)]


def reduced(versions: Sequence[Factors]) -> list[FloatArray]:
    """The updates in the space that they span together.

    Examples:
        >>> rng = np.random.default_rng(0)
        >>> updates = [[rng.normal(size=(50, 3)), rng.normal(size=(3, 40)), np.asarray(s)] for s in (2.0, 0.5)]
        >>> a, b = reduced(updates)
        >>> product = 0.5 * updates[1][0] @ updates[1][1] - 2 * updates[0][0] @ updates[0][1]
        >>> a.shape, bool(np.isclose(np.linalg.norm(b - a), np.linalg.norm(product)))
        ((6, 6), True)
    """
    lefts = [left.astype(np.float64) for left, _, _ in versions]
    rights = [right.astype(np.float64) for _, right, _ in versions]
    outputs = np.linalg.qr(np.concatenate(lefts, axis=1))[0]
    inputs = np.linalg.qr(np.concatenate(rights, axis=0).T)[0]
    return [
        float(scale) * (outputs.T @ left) @ (right @ inputs)
        for left, right, (_, _, scale) in zip(lefts, rights, versions, strict=True)
    ]


def _adapter_rank(versions: Sequence[Factors], rank: int, size: int) -> RankTest:
    """Everything beyond rounding of the stored factors was trained; equal factors are the same update."""
    if rank:
        low = rank <= max(1, size // 2) and rank < size
        return RankTest(rank, 0.0, UpdateKind.LOW_RANK if low else UpdateKind.DENSE)
    pairs = list(zip(versions[0], versions[-1], strict=True))
    if all(np.array_equal(a, b) for a, b in pairs):
        return RankTest(0, None, UpdateKind.UNTOUCHED)
    converted = all(a.shape == b.shape and is_conversion(a, b) for a, b in pairs)
    return RankTest(0, 1.0, UpdateKind.ROUNDING if converted else UpdateKind.UNDECIDED)


_NOT_FINITE = Flag("not-finite", "NaN or infinite weights: no update is computed")


def _shapes_differ(first: tuple[int, ...], last: tuple[int, ...]) -> Flag:
    return Flag("shapes-differ", f"{first} against {last}: the weights cannot be subtracted")


def whole(matrices: Sequence[Matrix]) -> Matrix:
    """All matrices of a layer side by side: a conv's slices become one matrix."""
    return matrices[0] if len(matrices) == 1 else np.concatenate(matrices, axis=1)


def _aligned(first: Sequence[Matrix], second: Sequence[Matrix], facts: Any) -> Aligned | None:
    """The two versions in one order and scale; kernels only where they are stored alike."""
    if len(first) != len(second):
        return None
    alignment = align(whole(first), whole(second), facts["role"], facts["widths"])
    if alignment is None or alignment.how is not None or "awq" not in facts["schemes"]:
        return alignment
    return rescaled(alignment)  # AWQ moves scales of channels from one layer into the next before it rounds


def _quantisation_noise(aligned: Aligned, read: Sequence[LayerVersion], facts: Any) -> Any:
    """Variance per entry of the rounding that quantised versions carry beyond what their dtype shows."""
    noise: Any = 0.0
    for matrix, n in ((aligned.first, 0), (aligned.second, -1)):
        variance = read[n].variance
        if variance is None or effective_dtype(matrix).startswith("float8"):
            continue
        in_place = aligned.how is None and facts["units"] is None and variance.shape == matrix.shape
        noise = noise + (
            variance if in_place else quantised_variance(matrix, read[n].error, facts["groups"][n])
        )
    return noise


def _in_cells(aligned: Aligned, noise: Any, facts: Any) -> bool:
    """Whether a conversion to scaled float8, which rounds every entry to the nearest code, explains every entry.

    Other schemes choose codes that are not the nearest; of them nothing is asked.
    """
    to_float8 = [dtype.startswith("float8") for dtype in (facts["dtypes"][0], facts["dtypes"][-1])]
    if aligned.how is not None or to_float8[0] == to_float8[1] or not np.any(noise):
        return True
    plain = aligned.second if to_float8[0] else aligned.first
    half = np.sqrt(3 * np.asarray(noise, np.float64)) + np.sqrt(3 * rounding_variance(plain))
    step = np.abs(aligned.second.astype(np.float64) - aligned.first.astype(np.float64))
    return bool(np.mean(step > 1.001 * half) <= OUTSIDE)


def _rounding(aligned: Aligned, variance: float) -> RoundingError | None:
    if not variance > 0:
        return None
    step = aligned.second.astype(np.float64) - aligned.first.astype(np.float64)
    error, predicted = float(np.sqrt(np.square(step).mean())), float(np.sqrt(variance))
    return RoundingError(error, predicted, error / predicted)


def _rounded_worse(rounding: RoundingError | None, compensated: bool) -> list[Flag]:
    if rounding is None or rounding.ratio <= (WORSE_COMPENSATED if compensated else WORSE):
        return []
    text = f"the error is {rounding.ratio:.2f} times what rounding to the nearest code of its step leaves"
    return [Flag("rounded-worse", text)]


def _extra_rows(aligned: Aligned, networks: int) -> list[Flag]:
    if aligned.extra is None:
        return []
    which, start, stop = aligned.extra
    number = 0 if which == 0 else networks - 1
    rows = f"row {start}" if start == stop else f"rows {start} to {stop}"
    text = (
        f"only network {number} has {rows} ({stop - start + 1} tokens): the first {start} rows are compared"
    )
    return [Flag("vocabulary-resized", text)]


def _mixture(versions: Sequence[Sequence[Matrix]], errors: Sequence[float], facts: Any) -> Mixture:
    parents = [_aligned(versions[-1], parent, facts) for parent in versions[:-1]]
    usable = [p for p in parents if p is not None]
    nothing = Mixture((None,) * len(parents), (None,) * len(parents), None)
    if len(usable) < len(parents):
        return nothing
    rows = min(p.first.shape[0] for p in usable)
    target = usable[0].first[:rows]
    parent_matrices = [p.second[:rows] for p in usable]
    if not all(np.isfinite(m.astype(np.float64)).all() for m in (target, *parent_matrices)):
        return nothing
    noise: Any = 0.0
    for matrix, error, group in zip((*parent_matrices, target), errors, facts["groups"], strict=True):
        if error > 0:
            noise = noise + quantised_variance(matrix, error, group)
    return mixture(parent_matrices, target, variance=noise)
