"""Results made small: spectra as ranked float32, everything deflated and in base64.

The layout, undone by ``static/unpack.js``: four bytes with the length of the JSON, the JSON, then the words
of all spectra. A spectrum in the JSON is ``{"$spectrum": [start, kept, size, scale]}``: from word ``start``
on, ``kept`` differences of the bits of ``eigenvalue / scale`` as float32, and, unless all were kept, ``kept``
differences of their ranks; those in between follow in equal ratios. Bits of positive float32 grow with the
value, so the differences are small, and the bytes are stored by significance, which deflates best.
"""

from __future__ import annotations

import base64
import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from strati.core.results import FloatArray, IntArray

MOST_KEPT = 1024
"""Eigenvalues stored of one spectrum at most."""

_ALL_KEPT = 400_000
_LEAST_KEPT = 128
_WHOLE = 16


def pack(document: Mapping[str, Any]) -> str:
    """A JSON document as text that the page unpacks; any list named ``...eigenvalues`` becomes a spectrum.

    Floats are rounded to seven significant digits: a page shows four.

    Examples:
        >>> len(pack({"results": []})) < 60
        True
    """
    spectra = _count_spectra(document)
    budget = max(_LEAST_KEPT, min(MOST_KEPT, _ALL_KEPT // max(1, spectra)))
    words: list[IntArray] = []
    slim = _slim(document, None, {}, words, budget)
    text = json.dumps(slim, allow_nan=False, separators=(",", ":")).encode()
    flat = np.concatenate(words).astype("<u4") if words else np.zeros(0, "<u4")
    planes = flat.view(np.uint8).reshape(-1, 4).T.tobytes()
    return base64.b64encode(zlib.compress(struct.pack("<I", len(text)) + text + planes, 9)).decode()


def kept_ranks(values: FloatArray, most: int, marks: Sequence[float] = ()) -> IntArray:
    """Ranks of the eigenvalues that stand for all of them: quantiles that keep edges, spikes and tails.

    An eighth of the budget goes to the largest, a sixteenth to the smallest and as much around each mark
    (an edge, ``xmin``). The rest is spread evenly over the ranks between one mark and the next, the same
    number for each stretch, so that a tail of few eigenvalues is not thinned like a bulk of many.

    Args:
        values: Ascending.
        most: How many may be kept.
        marks: Values whose surroundings are kept whole.

    Examples:
        >>> kept_ranks(np.arange(1.0, 9.0), 8).tolist()
        [0, 1, 2, 3, 4, 5, 6, 7]
    """
    size = len(values)
    if size <= most:
        return np.arange(size)
    near = max(2, most // 16)
    indices = [np.arange(near), np.arange(size - 2 * near, size)]
    places = [int(np.searchsorted(values, mark)) for mark in sorted(marks)[:4]]
    indices += [np.arange(max(0, at - near // 2), min(size, at + near // 2)) for at in places]
    stretches = [(low, high) for low, high in pairwise(sorted({0, *places, size})) if high > low]
    remaining = most - len(np.unique(np.concatenate(indices)))
    for place, (low, high) in enumerate(sorted(stretches, key=lambda s: s[1] - s[0])):
        share = min(remaining // (len(stretches) - place), high - low)
        indices.append(np.linspace(low, high - 1, share).round().astype(np.int64))
        remaining -= share
    return np.unique(np.concatenate(indices))


def _slim(value: Any, name: str | None, owner: Mapping[str, Any], words: list[IntArray], budget: int) -> Any:
    if isinstance(value, float):
        return _round(value)
    if isinstance(value, Mapping):
        return {key: _slim(item, key, value, words, budget) for key, item in value.items()}
    if not isinstance(value, list | tuple):
        return value
    if name is not None and name.endswith("eigenvalues") and _is_spectrum(value):
        marks = [owner.get(key) for key in ("mp_lambda_minus", "mp_lambda_plus", "xmin")]
        return _pack_spectrum(value, [m for m in marks if isinstance(m, int | float)], words, budget)
    return [_slim(item, name, owner, words, budget) for item in value]


def _pack_spectrum(
    value: Sequence[float], marks: list[float], words: list[IntArray], budget: int
) -> dict[str, Any]:
    values = np.sort(np.maximum(np.asarray(value, dtype=np.float64), 0.0))
    scale = float(values[-1]) or 1.0
    ranks = kept_ranks(values, budget, marks)
    bits = (values[ranks] / scale).astype(np.float32).view(np.uint32).astype(np.int64)
    start = sum(len(part) for part in words)
    words.append(np.diff(bits, prepend=0))
    if len(ranks) < len(values):
        words.append(np.diff(ranks, prepend=0))
    return {"$spectrum": [start, len(ranks), len(values), scale]}


def _is_spectrum(value: Sequence[Any]) -> bool:
    return len(value) >= _WHOLE and all(isinstance(v, int | float) for v in value)


def _count_spectra(value: Any) -> int:
    if isinstance(value, Mapping):
        here = sum(
            1 if _is_spectrum(v) else sum(isinstance(w, list | tuple) for w in v)
            for k, v in value.items()
            if k.endswith("eigenvalues") and isinstance(v, list | tuple)
        )
        return here + sum(_count_spectra(v) for k, v in value.items() if not k.endswith("eigenvalues"))
    if isinstance(value, list | tuple):
        return sum(_count_spectra(v) for v in value if isinstance(v, Mapping | list | tuple))
    return 0


def _round(value: float) -> float | int:
    rounded = float(f"{value:.7g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e7 else rounded
