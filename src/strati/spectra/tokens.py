r"""Token rows that training left alone: tokens that never occur, padding, rows that are copies of each other.

A row of an embedding whose token never occurs keeps its random initial value, shrunk by weight decay. A row of the head
whose token never occurs is only ever pushed away from the hidden states, so all such rows become nearly equal (Land
and Bartolo, 2024, arXiv:2405.05417). Either way these rows are one vector plus noise. :func:`unused_rows` finds groups
of rows that differ by no more than noise of one size, and needs no list of tokens that are known to be unused.

A row belongs to a group if its squared distance from the group's mean is at most the ``1 - level / rows`` quantile of
:math:`\hat\sigma^2 (1 + 1/K)\,\chi^2_\nu / \nu`, where :math:`\hat\sigma^2` is the mean squared distance inside
the group of ``K`` rows and :math:`\nu` the effective number of columns. So a row that training left alone is missing
from its group with a probability of at most ``level``, over all rows together.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.core.errors import BadInputError
from strati.spectra.eigenvalues import eigenvalues, spacing, widest_gap
from strati.spectra.verdicts import USUAL_IN_EMBEDDINGS, faults, unused_rows_flag

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.core.results import FloatArray
    from strati.io.layers import Layer
    from strati.io.network import Network
    from strati.spectra.eigenvalues import Source
    from strati.spectra.spectrum import Spectrum

FEWEST_ROWS = 4
"""Rows from which a group counts: three rows that are close to each other are often tokens of one meaning."""

_WINDOW = 128  # rows of similar length that a row is compared with
_SEEDS = 48  # closest rows from which a group is grown
# Largest radius of a group whose rows differ by noise, over the distance of the other rows: of rows around zero, which
# are initial values, and of rows that training pushed to one place. With tokens that never occur (calibrate_tokens.py,
# seeds 0 to 2) unused tokens had at most 0.24 and 0.093; groups of used tokens, all off zero, had at least 0.115.
_APART, _PUSHED = 0.25, 0.1
_OFF_ZERO = 3.0  # standard errors of the mean from which a group does not lie around zero
_COPIES = 0.05  # the same for rows that are nearly equal but whose differences are not noise
_EDGE = 1.25  # largest eigenvalue of noise over the end of its bulk
_TOLERANCE = (
    1.5  # a row this many radii from the centre may belong to the group: noise differs from row to row
)
_ROUNDS = 16  # of adding rows to a group


@dataclass(frozen=True)
class RowGroup:
    """Rows that differ by no more than noise.

    Attributes:
        rows: Their numbers, ascending.
        length: The length of their mean.
        radius: Root mean square distance from it.
        others: Median distance of the other rows from it.
    """

    rows: tuple[int, ...]
    length: float
    radius: float
    others: float


def unused_rows(matrix: NDArray[Any], *, level: float = 0.01) -> tuple[RowGroup, ...]:
    r"""Groups of rows of a token matrix that training left alone, the largest first.

    Args:
        matrix: An embedding or a head, one row per token.
        level: Chance that a row of a group is missing from it, over all rows together.

    Returns:
        Groups of at least four rows; none if the rows are all used, or if more than half of them form one group (a
        matrix that was never trained).

    Examples:
        >>> rng = np.random.default_rng(0)
        >>> E = rng.normal(size=(60, 40))
        >>> E[50:] *= 0.1
        >>> [group.rows for group in unused_rows(E)] == [tuple(range(50, 60))]
        True
    """
    values = np.asarray(matrix, dtype=np.float64)
    if values.ndim != 2 or min(values.shape) < 2 or not np.isfinite(values).all():
        return ()
    groups = []
    empty = ~values.any(axis=1)
    if empty.any() and not empty.all():
        others = float(np.median(np.linalg.norm(values[~empty], axis=1)))
        groups.append(RowGroup(tuple(np.flatnonzero(empty).tolist()), 0.0, 0.0, others))
    used = np.flatnonzero(~empty)
    for group in _alike(values[used], level, spacing(np.asarray(matrix).dtype)):
        groups.append(replace(group, rows=tuple(used[list(group.rows)].tolist())))
    return tuple(sorted(groups, key=lambda group: -len(group.rows)))


@dataclass(frozen=True)
class UnderTrainedToken:
    """A token whose row training left alone.

    Attributes:
        layer: The embedding or head.
        id: The token's number, the row.
        token: Its text, if the model's folder has a tokenizer that says so.
        norm: The length of its row.
        group: How many rows of this matrix differ from it by no more than noise, itself included.
        radius: Root mean square distance of these rows from their mean.
        others: Median distance of the other rows from that mean.
    """

    layer: str
    id: int
    token: str | None
    norm: float
    group: int
    radius: float
    others: float


def under_trained_tokens(
    network: Network, layers: Iterable[Layer], *, level: float = 0.01
) -> tuple[UnderTrainedToken, ...]:
    """The tokens of a network's embedding and head that training left alone, by layer and number.

    Args:
        network: The network; its folder may hold the texts of the tokens.
        layers: The layers to look at; those without a row per token are passed over.
        level: Chance that such a token is missing from the list, for each matrix.
    """
    texts = _token_texts(network)
    tokens = []
    for layer in layers:
        if not layer.has_token_rows:
            continue
        (matrix,) = layer.matrices()
        for group in unused_rows(matrix, level=level):
            norms = np.linalg.norm(np.asarray(matrix[list(group.rows)], dtype=np.float64), axis=1)
            tokens += [
                UnderTrainedToken(
                    layer.name, row, texts.get(row), float(norm), len(group.rows), group.radius, group.others
                )
                for row, norm in zip(group.rows, norms, strict=True)
            ]
    order = {layer: place for place, layer in enumerate(dict.fromkeys(token.layer for token in tokens))}
    return tuple(sorted(tokens, key=lambda token: (order[token.layer], token.id)))


def _token_texts(network: Network) -> dict[int, str]:
    """The texts of tokens by number, from ``tokenizer.json`` beside the weights; none where there is no such file."""
    path = (
        network.path / "tokenizer.json" if network.path.is_dir() else network.path.parent / "tokenizer.json"
    )
    if network.in_memory or not path.is_file():
        return {}
    try:
        tokenizer = json.loads(path.read_text(encoding="utf-8"))
        vocabulary = tokenizer["model"]["vocab"]
        if isinstance(vocabulary, dict):
            texts = {number: text for text, number in vocabulary.items()}
        else:  # a unigram model lists texts with their scores
            texts = {number: entry[0] for number, entry in enumerate(vocabulary)}
        return texts | {entry["id"]: entry["content"] for entry in tokenizer.get("added_tokens") or ()}
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise BadInputError(path, f"is not a tokenizer that can be read ({error}); move it away") from error


def note_unused_rows(spectrum: Spectrum, source: Source) -> Spectrum:
    """Add the code ``unused-rows`` to a token matrix whose lack of rank comes from unused rows alone.

    Only a matrix that would count as broken is looked at. The note is added if the matrix without these rows has full
    rank, one row of each group kept.
    """
    causes = set(faults((flag.code for flag in spectrum.warnings), spectrum.phase))
    if not causes or not causes <= USUAL_IN_EMBEDDINGS:
        return spectrum
    (matrix,) = source()
    groups = unused_rows(matrix)
    repeated = [row for group in groups for row in group.rows[1 if group.length else 0 :]]
    if not repeated:
        return spectrum
    others = eigenvalues(np.delete(np.asarray(matrix), repeated, axis=0), dtype=matrix.dtype)
    if any(others.empty) or widest_gap(others).collapsed:
        return spectrum
    rows = sorted(row for group in groups for row in group.rows)
    return replace(spectrum, warnings=(*spectrum.warnings, unused_rows_flag(rows, len(matrix))))


def _alike(values: FloatArray, level: float, epsilon: float) -> Iterator[RowGroup]:
    squares = np.einsum("ij,ij->i", values, values)
    free = np.ones(len(values), dtype=bool)
    for seed in _closest(values, np.sqrt(squares)):
        group = _grow(values, squares, np.sort(seed), level, epsilon) if free[seed].all() else None
        if group is not None and free[list(group.rows)].all():
            free[list(group.rows)] = False
            yield group


def _closest(values: FloatArray, lengths: FloatArray) -> Iterator[NDArray[np.intp]]:
    """Rows with their nearest ones, the closest first; only rows of similar length are compared."""
    order = np.argsort(lengths)
    squares, window = lengths[order] ** 2, min(_WINDOW, len(values) - 1)
    if window < FEWEST_ROWS:
        return
    reach, nearest = np.empty(len(values)), np.empty((len(values), FEWEST_ROWS - 1), dtype=np.intp)
    for start in range(0, len(values), window):
        stop = min(start + window, len(values))
        first, last = max(start - window, 0), min(stop + window, len(values))
        products = values[order[start:stop]] @ values[order[first:last]].T
        distances = squares[start:stop, None] + squares[None, first:last] - 2 * products
        distances[np.arange(stop - start), np.arange(start, stop) - first] = np.inf
        closest = np.argpartition(distances, FEWEST_ROWS - 2, axis=1)[:, : FEWEST_ROWS - 1]
        nearest[start:stop] = closest + first
        reach[start:stop] = np.take_along_axis(distances, closest, axis=1).max(axis=1)
    for place in np.argsort(reach)[:_SEEDS]:
        yield order[np.r_[place, nearest[place]]]


def _grow(
    values: FloatArray, squares: FloatArray, members: NDArray[np.intp], level: float, epsilon: float
) -> RowGroup | None:
    """Add rows to a seed until no other row is within the noise of the group."""
    from scipy.stats import chi2

    exact = float(np.finfo(np.float64).eps)
    for _ in range(_ROUNDS):
        centre, count = values[members].mean(axis=0), len(members)
        variances = values[members].var(axis=0, ddof=1)
        total = float(variances.sum())
        # Columns of unequal noise (rounding is relative) count as fewer; a variance estimated from few rows has an
        # error of its own, which would count as inequality.
        unequal = float(np.sum(variances**2)) * (count - 1) / (count + 1)
        columns = min(total**2 / unequal, variances.size) if unequal > 0 else 1.0
        limit = total * max((1 + 1 / count) * chi2.isf(level / len(values), columns) / columns, _TOLERANCE**2)
        distances = squares - 2 * (values @ centre) + centre @ centre
        # Copies are at a distance of rounding: of the weights' dtype, or of this computation.
        rounding = max(epsilon**2, 4 * exact) * float(centre @ centre)
        inside = np.flatnonzero(distances <= limit + rounding)
        if np.array_equal(inside, members):
            break
        members = inside
        if not FEWEST_ROWS <= len(members) <= len(values) / 2:
            return None
    apart = np.ones(len(values), dtype=bool)
    apart[members] = False
    radius, others = float(np.sqrt(total)), float(np.sqrt(max(float(np.median(distances[apart])), 0.0)))
    off_zero = float(np.linalg.norm(centre)) > _OFF_ZERO * radius / np.sqrt(len(members))
    limit = _PUSHED if off_zero else _APART
    if radius > (limit if _is_noise(values[members] - centre, columns) else _COPIES) * others:
        return None
    return RowGroup(tuple(members.tolist()), float(np.linalg.norm(centre)), radius, others)


def _is_noise(residuals: FloatArray, columns: float) -> bool:
    """Whether residuals of a mean have no direction in common: their largest eigenvalue is that of noise."""
    count = len(residuals) - 1  # the mean takes one away
    wide = residuals if len(residuals) <= residuals.shape[1] else residuals.T
    largest, mean = np.linalg.eigvalsh(wide @ wide.T)[-1], np.square(residuals).sum() / count
    return bool(largest <= _EDGE * mean * (1 + np.sqrt(count / columns)) ** 2)
