r"""Damage that the values of a tensor show: NaN, holes, wild entries, copies, a scale unlike that of the other blocks.

:func:`summarise` reads a tensor once, in chunks that stay in the processor's cache, and keeps a few numbers. All tests
run on these summaries. No spectrum is computed, so a check takes as long as reading the file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import log, prod
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.core.display import natural
from strati.spectra.tails import WILD_GAP

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.core.results import FloatArray

CHUNK = 1 << 17
"""Entries read at once: half a megabyte of float32, which stays in the second-level cache."""
HOLE_BYTES = 4096
"""The shortest run of equal values that is a hole: one page of memory."""

_MOST_WILD = 8
_WILD_GAP_OF_VECTORS = (
    1e5  # biases of unused units are far smaller than others; flipped bits are larger still
)
_LEVEL = 1e-9  # expected number of runs in a sound tensor below which a run is a hole
_FACTOR = log(2.0)  # a scale that differs by less is never odd
_FACTOR_AT_ENDS = log(2.5)
_RANGES = 10.0  # Whisper: the last of four norms is 4 times larger, 7 times the range of the others
# Spread of log scales between neighbouring blocks: a prior of this size and these degrees of freedom.
_PRIOR_SPREAD, _PRIOR_FREEDOM = 0.05, 4
_ODD_LEVEL = 1e-3  # chance of any false alarm in a network, under normal residuals

_SCALE_NAME = re.compile(r"(?:^|[._/])(?:weight|gamma|scale)(?::0)?$")
_BIAS_NAME = re.compile(r"bias[^./]*(?:[./]weight)?(?::0)?$")  # tables of position biases begin as zeros
_SAME_AT_START = re.compile(r"A_log$")  # Mamba's decay rates begin alike in every block
_FIRST_NUMBER = re.compile(r"(?:^|(?<=[./]))[0-9]{1,6}(?=[./])")


@dataclass(frozen=True)
class Finding:
    """One piece of damage or one code that was asked for; ``layer`` is ``None`` where it is about the file."""

    layer: str | None
    code: str
    text: str


@dataclass(frozen=True)
class EqualRun:
    """Consecutive entries of one value, at least :data:`HOLE_BYTES` long.

    Attributes:
        start: The first entry.
        stop: One behind the last entry.
        value: The value of all of them.
        share: Of the entries elsewhere that have this value, in the row where they are most frequent.
        rows: The rows that it fills exactly; ``None`` where it begins or ends inside a row.
    """

    start: int
    stop: int
    value: float
    share: float
    rows: tuple[int, int] | None


@dataclass(frozen=True)
class TensorSummary:
    """What one pass over a tensor keeps.

    Attributes:
        name: Its name.
        shape: Its shape.
        dtype: Its dtype in the file.
        not_finite: Number of entries that are NaN or infinite.
        low: The smallest finite entry.
        high: The largest finite entry.
        squares: Sum of squares of the finite entries.
        runs: Runs of equal values of a page or more, where not all entries are equal.
        wild: Number of entries, at most eight, that are far larger than all others.
        exact: The entries are stored as they are, not as codes of a quantisation.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    not_finite: int
    low: float
    high: float
    squares: float
    runs: tuple[EqualRun, ...] = ()
    wild: int = 0
    exact: bool = True

    @property
    def size(self) -> int:
        """Number of entries."""
        return prod(self.shape)

    @property
    def vector(self) -> bool:
        """Whether at most one side is longer than 1."""
        return self.size == max(self.shape, default=1)

    @property
    def constant(self) -> bool:
        """Whether all entries are equal and there are two or more."""
        return self.size > 1 and not self.not_finite and self.low == self.high

    @property
    def scale(self) -> float:
        """Root mean square of the finite entries."""
        return float(np.sqrt(self.squares / max(self.size - self.not_finite, 1)))

    @property
    def norm_weight(self) -> bool:
        """Whether it multiplies its inputs entry by entry: the weight of a normalisation."""
        return self.vector and bool(_SCALE_NAME.search(self.name))


def summarise(name: str, array: NDArray[Any], *, exact: bool = True) -> TensorSummary:
    """Read a tensor once and keep what the tests need.

    Args:
        name: Its name.
        array: Its values, of any real dtype; a memory map is read chunk by chunk.
        exact: Whether the values are stored as they are. Codes of a quantisation repeat values, so
            runs and gaps say nothing about them.

    Examples:
        >>> w = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
        >>> w[3, 4] = np.nan
        >>> w[10:40, :] = 0
        >>> summary = summarise("fc.weight", w)
        >>> summary.not_finite, [(run.start, run.stop) for run in summary.runs]
        (1, [(640, 2560)])
    """
    flat = array.reshape(-1)
    reader = _Reader(flat.dtype.itemsize)
    with np.errstate(all="ignore"):
        for start in range(0, flat.size, CHUNK):
            reader.add(start, _as_float(flat[start : start + CHUNK]), exact)
        summary = TensorSummary(
            name,
            tuple(array.shape),
            str(flat.dtype),
            reader.not_finite,
            reader.low,
            reader.high,
            reader.squares,
            exact=exact,
        )
        varied = flat.size > 1 and (reader.low != reader.high or reader.not_finite > 0)
        if not exact or not varied:
            return summary
        gap = _WILD_GAP_OF_VECTORS if summary.vector else WILD_GAP
        runs = reader.runs(flat, summary) if reader.blocks else ()
        return replace(summary, runs=runs, wild=reader.wild(flat, gap))


def _as_float(part: NDArray[Any]) -> NDArray[Any]:
    if part.dtype in (np.float32, np.float64):
        return part
    if part.dtype.name == "bfloat16":  # four times faster than ml_dtypes' own conversion
        return (part.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return part.astype(np.float32)


class _Reader:
    """The running numbers of one pass."""

    def __init__(self, itemsize: int) -> None:
        self.not_finite, self.squares = 0, 0.0
        self.low, self.high = np.inf, -np.inf
        self.half = max(HOLE_BYTES // itemsize // 2, 2)  # a run of a page contains an aligned half of one
        self.least = HOLE_BYTES // itemsize - 1  # a page that is not aligned to entries cuts two of them
        self.blocks: list[NDArray[np.int64]] = []
        self._sample: list[NDArray[Any]] = []
        self._largest: list[tuple[float, int]] = []

    def add(self, start: int, part: NDArray[Any], exact: bool) -> None:
        low, high = float(part.min()), float(part.max())
        if exact:
            self._find_runs(start, part)
        if not (np.isfinite(low) and np.isfinite(high)):
            finite = part[np.isfinite(part)]
            self.not_finite += part.size - finite.size
            if not finite.size:
                return
            part, low, high = finite, float(finite.min()), float(finite.max())
        squares = float(np.dot(part, part))
        if not np.isfinite(squares):
            squares = float(np.sum(np.square(part, dtype=np.float64)))
        self.squares += squares
        self.low, self.high = min(self.low, low), max(self.high, high)
        self._sample.append(np.abs(part[:: max(part.size // 64, 1)]))
        self._largest.append((max(high, -low), start))

    def _find_runs(self, start: int, part: NDArray[Any]) -> None:
        count = part.size // self.half
        grid = part[: count * self.half].reshape(count, self.half)
        first = grid[:, 0]
        alike = np.flatnonzero(
            (first == grid[:, 1]) & (first == grid[:, self.half // 2]) & (first == grid[:, -1])
        )
        if alike.size:
            rows = grid[alike]
            full = alike[(rows == rows[:, :1]).all(axis=1)]
            if full.size:
                self.blocks.append(full + start // self.half)

    def runs(self, flat: NDArray[Any], summary: TensorSummary) -> tuple[EqualRun, ...]:
        blocks = np.concatenate(self.blocks)
        values = _as_float(flat[blocks * self.half])
        ends = np.flatnonzero((np.diff(blocks) > 1) | (values[1:] != values[:-1]))
        firsts, lasts = np.concatenate([[0], ends + 1]), np.concatenate([ends, [blocks.size - 1]])
        spans: list[tuple[int, int, float]] = []
        for first, last in zip(firsts, lasts, strict=True):
            value = float(values[first])
            start, stop = int(blocks[first]) * self.half, (int(blocks[last]) + 1) * self.half
            before = _as_float(flat[max(start - self.half, 0) : start])[::-1] != value
            behind = _as_float(flat[stop : stop + self.half]) != value
            start -= int(before.argmax()) if before.any() else before.size
            stop += int(behind.argmax()) if behind.any() else behind.size
            if stop - start >= self.least:
                spans.append((start, stop, value))
        return _shared(flat, summary, spans) if spans else ()

    def wild(self, flat: NDArray[Any], gap: float) -> int:
        largest = max(self._largest, default=(0.0, 0))[0]
        sample = np.concatenate(self._sample) if self._sample else np.zeros(1)
        if flat.size < 4 * _MOST_WILD or largest <= gap * float(np.median(sample)):
            return 0
        tops: list[FloatArray] = []
        for _, start in sorted(self._largest, reverse=True)[: _MOST_WILD + 1]:
            sizes = np.abs(_as_float(flat[start : start + CHUNK]))
            sizes = sizes[np.isfinite(sizes)]
            count = min(_MOST_WILD + 1, sizes.size)
            tops.append(np.partition(sizes, sizes.size - count)[sizes.size - count :].astype(np.float64))
        top = np.sort(np.concatenate(tops))[::-1][: _MOST_WILD + 1]
        gaps = np.flatnonzero((top[:-1] > gap * top[1:]) & (top[1:] > 0))
        return int(gaps[0]) + 1 if gaps.size else 0


def _shared(
    flat: NDArray[Any], summary: TensorSummary, spans: Sequence[tuple[int, int, float]]
) -> tuple[EqualRun, ...]:
    """Runs with the share that their value has in the rows without any run."""
    count = 1 if summary.vector else summary.shape[0]
    width = flat.size // count
    free = np.ones(count, bool)
    for start, stop, _ in spans:
        free[start // width : -(-stop // width)] = False
    shares: dict[float, float] = {}
    for value in {value for *_, value in spans}:
        if summary.vector:
            inside = sum(stop - start for start, stop, run_value in spans if run_value == value)
            many = sum(
                np.count_nonzero(_as_float(flat[i : i + CHUNK]) == value) for i in range(0, flat.size, CHUNK)
            )
            shares[value] = float(many - inside) / max(flat.size - inside, 1)
            continue
        rows = flat.reshape(count, width)
        step = max(CHUNK // width, 1)
        equal = [(_as_float(rows[i : i + step]) == value).mean(axis=1) for i in range(0, count, step)]
        elsewhere = np.concatenate(equal)[free]
        shares[value] = float(elsewhere.max()) if elsewhere.size else 0.0
    return tuple(
        EqualRun(
            start,
            stop,
            value,
            shares[value],
            None if summary.vector or start % width or stop % width else (start // width, stop // width),
        )
        for start, stop, value in spans
    )


def damage(
    summaries: Sequence[TensorSummary],
    *,
    table: Callable[[str], bool] = lambda name: False,
    zero_centred: bool = False,
) -> list[Finding]:
    """Damage inside single tensors: ``not-finite``, ``constant``, ``hole``, ``wild-entry``.

    Args:
        summaries: Of all tensors of a network.
        table: Whether a tensor is a table of embeddings or a head, where rows of unused tokens may be zero.
        zero_centred: The normalisations multiply by ``1 + weight``, so that zeros are no damage.
    """
    pruned = _has_pruned_rows(summaries)
    findings: list[Finding] = []
    for summary in summaries:
        if summary.not_finite:
            text = f"{summary.not_finite:,} of {summary.size:,} entries are NaN or infinite"
            findings.append(Finding(summary.name, "not-finite", text))
        zero_norm = summary.norm_weight and summary.low == 0 and not zero_centred
        zero_bias = summary.low == 0 and bool(_BIAS_NAME.search(summary.name))
        if summary.constant and (zero_norm if summary.vector else not zero_bias):
            findings.append(
                Finding(summary.name, "constant", f"all {summary.size:,} entries are {summary.low:.3g}")
            )
        holes = [run for run in summary.runs if _is_hole(summary, run, table, pruned)]
        if holes:
            longest = max(holes, key=lambda run: run.stop - run.start)
            count = f"{len(holes)} runs of equal values, the longest" if len(holes) > 1 else "a run"
            size, entry = longest.stop - longest.start, longest.value
            text = f"{count} of {size:,} entries equal to {entry:.3g} from entry {longest.start:,}"
            findings.append(Finding(summary.name, "hole", text))
        if summary.wild:
            gap = _WILD_GAP_OF_VECTORS if summary.vector else WILD_GAP
            many = "1 entry is" if summary.wild == 1 else f"{summary.wild} entries are"
            largest = max(summary.high, -summary.low)
            text = f"{many} more than {gap:,.0f} times larger than all others, up to {largest:.3g}"
            findings.append(Finding(summary.name, "wild-entry", text))
    return findings


def _has_pruned_rows(summaries: Iterable[TensorSummary]) -> bool:
    """Whether three or more matrices have whole rows of zeros: neurons or heads that were removed."""
    rows = [summary for summary in summaries if any(run.rows and run.value == 0 for run in summary.runs)]
    return len(rows) >= 3


def _is_hole(summary: TensorSummary, run: EqualRun, table: Callable[[str], bool], pruned: bool) -> bool:
    if (
        summary.vector
    ):  # biases and the norms of bfloat16 networks repeat values; only a norm without other zeros is clear
        return summary.norm_weight and run.value == 0 and run.share == 0
    length = run.stop - run.start
    if log(summary.size) + length * log(max(run.share, 1 / summary.size)) > log(_LEVEL):
        return False
    if run.rows is None or run.value != 0:
        return True
    several = sum(other.rows is not None for other in summary.runs) >= 3
    if pruned or several:
        return False
    at_end = run.rows[0] == 0 or run.rows[1] == summary.shape[0]
    return not ((at_end or run.rows[1] - run.rows[0] == 1) and table(summary.name))


def odd_ones(summaries: Sequence[TensorSummary]) -> list[Finding]:
    r"""Tensors whose scale is far from that of the same tensor in the other blocks.

    For the logarithm :math:`y_b` of the root mean square, the residual
    :math:`r_b = y_b - (y_{b-1} + y_{b+1})/2` is studentised by the residuals of the series without block :math:`b`,
    with a prior on their variance. The first and last block often differ in sound networks, and are odd only
    where the range of all others is small beside their distance.

    Examples:
        >>> w = np.ones(64, np.float32)
        >>> sums = [summarise(f"h.{b}.ln.weight", w * (3 if b == 2 else 1)) for b in range(6)]
        >>> [finding.layer for finding in odd_ones(sums)]
        ['h.2.ln.weight']
    """
    groups: dict[tuple[str, tuple[int, ...]], list[TensorSummary]] = {}
    for summary in summaries:
        sound = not summary.not_finite and not summary.wild and 0 < summary.squares < np.inf
        if sound and (summary.norm_weight or not (summary.vector or summary.constant)):
            groups.setdefault((_FIRST_NUMBER.sub("*", summary.name, count=1), summary.shape), []).append(
                summary
            )
    series = [
        sorted(group, key=lambda summary: natural(summary.name))
        for group in groups.values()
        if len(group) >= 4
    ]
    few: dict[tuple[int, ...], list[TensorSummary]] = {}
    for group in groups.values():
        if len(group) < 4 and group[0].norm_weight:
            few.setdefault(group[0].shape, []).extend(group)
    tests = max(sum(map(len, series)), 1)
    findings = []
    for group in series:
        findings += [
            _odd(group[b], ratio) for b, ratio in _stand_out([summary.scale for summary in group], tests)
        ]
    for group in few.values():
        if len(group) >= 4:
            scales = [summary.scale for summary in group]
            findings += [_odd(group[b], ratio) for b, ratio in _stand_out(scales, tests, ordered=False)]
    return findings


def _odd(summary: TensorSummary, ratio: float) -> Finding:
    way = f"{ratio:.3g} times larger" if ratio > 1 else f"{1 / ratio:.3g} times smaller"
    text = f"its root mean square of {summary.scale:.3g} is {way} than the other blocks predict"
    return Finding(summary.name, "odd-one-out", text)


def _stand_out(scales: Sequence[float], tests: int, *, ordered: bool = True) -> list[tuple[int, float]]:
    """Places of scales that stand out, and how many times larger than predicted each is."""
    from scipy.special import stdtr

    y = np.log(np.asarray(scales, np.float64))
    places = []
    for b in range(y.size):
        others = np.delete(y, b)
        nearest = float(np.clip(y[b], others.min(), others.max()))
        distance = abs(float(y[b]) - nearest)
        if distance > max(_FACTOR_AT_ENDS, _RANGES * float(np.ptp(others))):
            places.append((b, float(np.exp(y[b] - nearest))))
            continue
        if not ordered or b in (0, y.size - 1):
            continue
        residual = float(y[b] - (y[b - 1] + y[b + 1]) / 2)
        if abs(residual) < _FACTOR:
            continue
        other_residuals = others[1:-1] - (others[:-2] + others[2:]) / 2
        freedom = _PRIOR_FREEDOM + other_residuals.size
        spread = np.sqrt(
            (_PRIOR_FREEDOM * _PRIOR_SPREAD**2 + float(other_residuals @ other_residuals)) / freedom
        )
        if 2 * float(stdtr(freedom, -abs(residual) / spread)) * tests < _ODD_LEVEL:
            places.append((b, float(np.exp(residual))))
    return places


def duplicates(
    summaries: Sequence[TensorSummary], read: Callable[[str], NDArray[Any]], tied: Iterable[str] = ()
) -> list[Finding]:
    """Tensors that repeat another one byte for byte, where at least one of the two belongs to a block.

    Embeddings and heads may be tied, and a tensor that is the same in every block is a table or an initial value.

    Args:
        summaries: Of all tensors of a network.
        read: Reads a tensor; called only for tensors whose summaries agree.
        tied: Tensors that the file itself stores as another one.
    """
    skip = set(tied)
    groups: dict[tuple[object, ...], list[TensorSummary]] = {}
    blocks_of: dict[str, int] = {}
    for summary in summaries:
        template = _FIRST_NUMBER.sub("*", summary.name, count=1)
        blocks_of[template] = blocks_of.get(template, 0) + 1
        skipped = summary.name in skip or bool(_SAME_AT_START.search(summary.name))
        if not skipped and not summary.constant and summary.size >= 16 and not summary.not_finite:
            key = (summary.dtype, summary.shape, summary.low, summary.high, summary.squares)
            groups.setdefault(key, []).append(summary)
    findings = []
    for group in (group for group in groups.values() if len(group) > 1):
        template = _FIRST_NUMBER.sub("*", group[0].name, count=1)
        alike = {_FIRST_NUMBER.sub("*", summary.name, count=1) for summary in group}
        if len(group) >= 3 and alike == {template} and len(group) == blocks_of[template]:
            continue
        for position, summary in enumerate(group[1:], 1):
            for earlier in group[:position]:
                numbered = any(_FIRST_NUMBER.search(name) for name in (summary.name, earlier.name))
                if numbered and _same_bytes(read(earlier.name), read(summary.name)):
                    text = f"holds the same bytes as {earlier.name}"
                    findings.append(Finding(summary.name, "duplicate-tensors", text))
                    break
    return findings


def _same_bytes(a: NDArray[Any], b: NDArray[Any]) -> bool:
    x, y = a.reshape(-1), b.reshape(-1)
    return all(
        x[start : start + CHUNK].tobytes() == y[start : start + CHUNK].tobytes()
        for start in range(0, x.size, CHUNK)
    )
