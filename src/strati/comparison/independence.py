r"""A test of "trained independently" (Zhu, Ahmed, Kuditipudi and Liang 2025, 2502.12292).

Units of two networks are matched once by their incoming and once by their outgoing weights, which share no number.
The matching from the front uses the layers up to a unit, the matching from the back those behind it. If the networks
were trained independently, one matching is a uniformly random injection to the other: the number ``K`` of units on
which both agree is the number of fixed points of a random permutation,

.. math:: P(K \ge k) = \sum_{m \ge k} (-1)^{m-k} \binom{m-1}{k-1} S_m, \qquad
          S_m = \binom{n}{m} \frac{(h-m)!}{h!}

for ``n`` units matched into ``h``. Networks trained on one task may hold units alike in both, so agreements are also
compared with those among the units of each network itself (a one-sided exact test of two proportions), and the larger
p-value counts.

A child keeps its parent's numbering unless someone changed it. So the matching is also compared with the identity,
whose null holds exactly, whatever the task: units start exchangeable. Of the two p-values the smaller, doubled, counts.

Units stand in chains of layers: the two halves of a transformer's MLP, the heads of its attention, the layers of a
plain network. Both ends of a chain keep their order: pixels, classes, the residual stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from scipy.optimize import linear_sum_assignment
from scipy.special import gammaln, logsumexp

from strati.core.rng import stream
from strati.io.roles import Role

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.core.results import FloatArray, IntArray
    from strati.io.layers import Layer
    from strati.io.network import Network

    Weights = NDArray[np.float32]

SMALLEST = 1e-300
"""P-values below it are given as it."""

_SAMPLE = 512  # units of one network that are matched, where nothing depends on the rest
_SCREENED = 64  # units of each block in a first look
_SKETCHED = 64  # numbers that stand for the weights of a unit
_LOOKS = 4  # blocks of each network that are sketched, or whose spectra are compared
_TERMS = 60
_PER_AGREEMENT = 2
"""Agreements come in groups, since similar units compete: so many count as one (``tools/calibrate_lineage.py``)."""
CHAIN = (Role.LINEAR, Role.HEAD, Role.CONV)
"""Roles of layers in plain chains."""
CHANNELS_LAST = frozenset({"keras", "h5", "flax"})
"""Formats in which a flattened map holds all channels of a place together."""
_FEW = 1  # agreements that are no evidence, so that a network's own units need not be looked at


@dataclass(frozen=True)
class Agreement:
    """What the units between two layers of A and two of B say.

    Attributes:
        a: Name of the units in A.
        b: Name in B.
        units: How many were matched.
        among: Into how many.
        agreeing: Units on which both matchings agree.
        in_place: Units that the matching leaves where they are.
        own: Agreements among the units of A itself and of B itself; ``None`` where not looked at.
    """

    a: str
    b: str
    units: int
    among: int
    agreeing: int
    in_place: int
    own: tuple[int, int] | None

    @property
    def share(self) -> float:
        """Agreeing units, or units in place where that is more, as a share."""
        return max(self.agreeing, self.in_place) / self.units

    @cached_property
    def pvalue(self) -> float:
        """Of this block alone."""
        return pooled_pvalue([self])


def pooled_pvalue(blocks: Sequence[Agreement]) -> float:
    """The p-value of independence from all blocks.

    Examples:
        >>> one = Agreement("0", "0", 64, 64, 0, 1, None)
        >>> pooled_pvalue([one]), pooled_pvalue([Agreement("0", "0", 64, 64, 64, 64, (2, 1))]) < 1e-60
        (1.0, True)
    """
    sizes = [(block.units, block.among) for block in blocks]
    matched = sum(block.agreeing for block in blocks)
    log_match = log_tail(sizes, matched)
    blocks_with_own = [block for block in blocks if block.own is not None]
    if blocks_with_own:
        units = sum(block.units for block in blocks_with_own)
        inside = sum(sum(block.own) for block in blocks_with_own if block.own is not None)
        counts = sum(block.agreeing for block in blocks_with_own), units, inside, 2 * units
        log_match = max(log_match, _log_proportions(*(count / _PER_AGREEMENT for count in counts)))
    log_order = log_tail(sizes, sum(block.in_place for block in blocks))
    return float(max(min(2 * np.exp(min(log_match, log_order)), 1.0), SMALLEST))


def log_tail(sizes: Sequence[tuple[int, int]], count: int) -> float:
    """Log-probability of ``count`` agreements or more in independent random injections of ``n`` into ``h``.

    Exact up to a few times the expected number, and beyond it the bound ``rate^count / count!``.

    Examples:
        >>> round(float(np.exp(log_tail([(3, 3)], 3))), 6), round(float(np.exp(log_tail([(50, 50)], 1))), 6)
        (0.166667, 0.632121)
    """
    rate = sum(n / h for n, h in sizes)
    if count <= 0 or not sizes:
        return 0.0
    longest = int(3 * rate) + _TERMS
    if count > longest:
        return float(min(0.0, count * np.log(rate) - gammaln(count + 1)))
    probability = np.ones(1)
    for n, h in sizes:
        probability = np.convolve(probability, _agreement_probabilities(n, h, longest))[: longest + 1]
    beyond = np.exp(min(0.0, (longest + 1) * np.log(rate) - gammaln(longest + 2)))
    tail = float(probability[count:].sum() + (beyond if sum(n for n, _ in sizes) > longest else 0.0))
    return float(np.log(np.clip(tail, 1e-308, 1.0)))


def _agreement_probabilities(n: int, h: int, longest: int) -> FloatArray:
    """P(K = k) for k = 0, 1, ...: inclusion and exclusion over the subsets that agree."""
    m = np.arange(n + 1)
    moments = gammaln(n + 1) - gammaln(m + 1) - gammaln(n - m + 1) + gammaln(h - m + 1) - gammaln(h + 1)
    chances = []
    for k in range(min(n, longest) + 1):
        j = np.arange(min(n - k, _TERMS) + 1)
        ratios = gammaln(k + j + 1) - gammaln(k + 1) - gammaln(j + 1) + moments[k + j] - moments[k]
        chances.append(np.exp(moments[k]) * max(float(((-1.0) ** j * np.exp(ratios)).sum()), 0.0))
    return np.array(chances)


def _log_proportions(first: float, of_first: float, second: float, of_second: float) -> float:
    """Log of the one-sided exact p-value (Fisher) of the first share against the second; counts may be halves."""
    total, everything = first + second, of_first + of_second
    k = np.arange(first, min(of_first, total) + 1e-9)

    def log_choose(n: float, m: FloatArray | float) -> FloatArray:
        return np.asarray(gammaln(n + 1) - gammaln(np.asarray(m) + 1) - gammaln(n - np.asarray(m) + 1))

    logs = log_choose(of_first, k) + log_choose(of_second, total - k) - log_choose(everything, total)
    return float(min(0.0, logsumexp(logs)))


def compare_chains(first: UnitChain, second: UnitChain) -> list[Agreement]:
    """Match the units of two chains from the front and from the back.

    Args:
        first: A's; as many layers as the other, with ends of one width.
        second: B's.
    """
    a, b = first.weights, second.weights
    count = len(a) - 1
    sample = _SAMPLE if count == 1 else None
    front = _matchings(a, b, sample, "front")
    back = _matchings(_reversed(a), _reversed(b), sample, "back")[::-1]
    blocks = []
    for n in range(count):
        widths = a[n][0].shape[1], b[n][0].shape[1]
        picked = _picked(widths[0], sample)
        units, among = min(picked.size, widths[1]), max(widths)
        if picked.size > widths[1]:
            among = picked.size
        agreeing = int(np.count_nonzero((front[n].partner == back[n].partner) & (front[n].partner >= 0)))
        in_place = 0
        if a[n][0].shape == b[n][0].shape:
            straight = (
                front[n]
                if n == 0 or front[n - 1].unmoved
                else _match(_rows(a[n]), _rows(b[n]), picked, "front")
            )
            in_place = int(np.count_nonzero(straight.partner == picked))
        agreements_within = None
        if agreeing > _FEW:
            agreements_within = own_agreements(first, n, sample), own_agreements(second, n, sample)
        blocks.append(
            Agreement(first.names[n], second.names[n], units, among, agreeing, in_place, agreements_within)
        )
    return blocks


@dataclass(frozen=True)
class _Matching:
    """For each unit of A that was picked, B's partner (-1 for none) and the sign of their cosine."""

    partner: IntArray
    sign: NDArray[np.float32]

    @property
    def unmoved(self) -> bool:
        return bool((self.partner == np.arange(self.partner.size)).all() and (self.sign > 0).all())


def _picked(units: int, sample: int | None) -> IntArray:
    many = units if sample is None else min(units, sample)
    return np.linspace(0, units - 1, many).astype(np.int64)


def _reversed(weights: Sequence[Sequence[Weights]]) -> list[tuple[Weights, ...]]:
    return [tuple(part.transpose(0, 2, 1) for part in layer) for layer in reversed(weights)]


def _rows(layer: Sequence[Weights]) -> list[NDArray[np.float32]]:
    """Each part's rows as vectors of unit length."""
    flat = [part.transpose(1, 0, 2).reshape(part.shape[1], -1) for part in layer]
    # Brought to size first: squares of huge or tiny weights leave float32's range.
    tops = [np.abs(part).max(axis=1, keepdims=True, initial=0) for part in flat]
    flat = [
        np.asarray(part / np.where(top > 0, top, 1), np.float32) for part, top in zip(flat, tops, strict=True)
    ]
    norms = [np.linalg.norm(part, axis=1, keepdims=True) for part in flat]
    return [
        np.asarray(part / np.where(norm > 0, norm, 1), np.float32)
        for part, norm in zip(flat, norms, strict=True)
    ]


def _matchings(
    a: Sequence[Sequence[Weights]], b: Sequence[Sequence[Weights]], sample: int | None, side: str
) -> list[_Matching]:
    """From the front: each layer's units by its rows, its columns in the order that the layers before gave."""
    matchings: list[_Matching] = []
    for ours, theirs in zip(a[:-1], b[:-1], strict=True):
        if matchings:
            theirs = [_reordered(part, matchings[-1]) for part in theirs]
        matchings.append(_match(_rows(ours), _rows(theirs), _picked(ours[0].shape[1], sample), side))
    return matchings


def _reordered(part: Weights, matching: _Matching) -> Weights:
    return np.where(matching.partner >= 0, part[:, :, matching.partner] * matching.sign, np.float32(0))


def _match(
    ours: Sequence[NDArray[np.float32]],
    theirs: Sequence[NDArray[np.float32]],
    picked: IntArray,
    side: str,
    *,
    others: bool = False,
) -> _Matching:
    """The assignment of largest total absolute cosine; with ``others`` no unit to itself.

    Units whose weights are all zero have no partner. Ties are broken at random, by another draw on
    each side: broken by number, they would look like agreement.
    """
    cosines = [our_part[picked] @ their_part.T for our_part, their_part in zip(ours, theirs, strict=True)]
    score = np.sum(np.abs(cosines), axis=0)
    if others:
        score[np.arange(picked.size), picked] = -len(cosines) * score.shape[1]
    usable = [np.all([np.any(part != 0, axis=1) for part in parts], axis=0) for parts in (ours, theirs)]
    rows = np.flatnonzero(usable[0][picked])
    columns = stream(0, "lineage", side).permutation(np.flatnonzero(usable[1]))
    partner = np.full(picked.size, -1, np.int64)
    if rows.size and columns.size:
        shuffled = score[np.ix_(rows, columns)]
        best = np.asarray(shuffled.argmax(axis=1), np.int64)
        if np.unique(best).size == best.size:
            partner[rows] = columns[best]
        else:
            assigned_rows, places = linear_sum_assignment(shuffled, maximize=True)
            partner[rows[assigned_rows]] = columns[places]
    largest = np.take_along_axis(cosines[0], np.maximum(partner, 0)[:, None], axis=1)[:, 0]
    return _Matching(partner, np.where(largest < 0, -1, 1).astype(np.float32))


def own_agreements(chain: UnitChain, layer: int, sample: int | None) -> int:
    """Units whose nearest other unit of the same network by incoming weights is also that by outgoing ones."""
    sides = {"front": chain.weights[layer], "back": _outgoing(chain, layer)}
    picked = _picked(chain.weights[layer][0].shape[1], sample)
    by_front, by_back = (
        _match(_rows(weights), _rows(weights), picked, side, others=True).partner
        for side, weights in sides.items()
    )
    return int(np.count_nonzero((by_front == by_back) & (by_front >= 0)))


@dataclass(frozen=True)
class Sketch:
    """A few chains of a network, small enough to keep for many networks.

    Attributes:
        chains: Number of chains that the network has.
        names: Of the sketched ones.
        signatures: Of the sketched ones.
        sides: Of each, random projections of the units' incoming and of their outgoing weights, part by part.
        spectra: Eigenvalues of their weights.
        unit_norms: Norms of their units.
    """

    chains: int
    names: tuple[str, ...]
    signatures: tuple[tuple[object, ...], ...]
    sides: tuple[tuple[list[NDArray[np.float32]], ...], ...]
    spectra: tuple[list[FloatArray], ...]
    unit_norms: tuple[list[FloatArray], ...]


def spaced(count: int) -> list[int]:
    """Places of a few chains among many, first and last included."""
    return np.unique(np.linspace(0, count - 1, _LOOKS).astype(int)).tolist() if count else []


def sketch(network: Network) -> Sketch | None:
    """Read a few chains once; ``None`` where a network has none of two layers, whose units show their place alone."""
    every = chains(network)
    picked = [every[place] for place in spaced(len(every))]
    if not picked or any(len(chain.names) > 1 for chain in picked):
        return None
    return Sketch(
        len(every),
        tuple(chain.names[0] for chain in picked),
        tuple(chain.signature for chain in picked),
        tuple(
            tuple([_projected(part) for part in _rows(side)] for side in (chain.weights[0], _outgoing(chain)))
            for chain in picked
        ),
        tuple(chain.spectra() for chain in picked),
        tuple(chain.unit_norms() for chain in picked),
    )


def _outgoing(chain: UnitChain, layer: int = 0) -> tuple[Weights, ...]:
    return _reversed(chain.weights[layer : layer + 2])[0]


def _projected(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    size = rows.shape[1]
    if size <= _SKETCHED:
        return rows
    probes = stream(0, "lineage sketch", str(size)).standard_normal((size, _SKETCHED), dtype=np.float32)
    projected = rows @ probes
    norms = np.linalg.norm(projected, axis=1, keepdims=True)
    return np.asarray(projected / np.where(norms > 0, norms, 1), np.float32)


def screen(first: Sketch, second: Sketch) -> list[Agreement] | None:
    """The agreements of a sample of units by their sketches; ``None`` where the networks are not built alike."""
    if first.chains != second.chains or first.signatures != second.signatures:
        return None
    blocks = []
    for n, (ours, theirs) in enumerate(zip(first.sides, second.sides, strict=True)):
        units, others = ours[0][0].shape[0], theirs[0][0].shape[0]
        picked = _picked(units, _SCREENED)
        front, back = (
            _match(a, b, picked, side) for a, b, side in zip(ours, theirs, ("front", "back"), strict=True)
        )
        agreeing = int(np.count_nonzero((front.partner == back.partner) & (front.partner >= 0)))
        in_place = int(np.count_nonzero(front.partner == picked)) if units == others else 0
        sizes = min(picked.size, others), max(others, picked.size)
        blocks.append(Agreement(first.names[n], second.names[n], *sizes, agreeing, in_place, None))
    return blocks


def screening_score(first: UnitChain, second: UnitChain) -> int:
    """Units of a sample whose nearest unit by incoming weights is also that by outgoing ones: a cheap first look."""
    a, b = first.weights, second.weights
    if len(a) > 2:  # the order of what the units write to is not known
        return 0
    picked = _picked(a[0][0].shape[1], _SCREENED)
    by_front, by_back = (
        np.sum([np.abs(x[picked] @ y.T) for x, y in zip(_rows(ours), _rows(theirs), strict=True)], axis=0)
        for ours, theirs in ((a[0], b[0]), (_outgoing(first), _outgoing(second)))
    )
    return int(np.count_nonzero(by_front.argmax(axis=1) == by_back.argmax(axis=1)))


@dataclass(frozen=True)
class UnitChain:
    """Layers one after another.

    Attributes:
        names: One for the units between each layer and the next.
        kind: ``mlp``, ``attention`` or ``chain``.
        layers: The layers that are read; ``mlp``: in, out, gate; ``attention``: q, k, v (or the fused one), out.
        heads: Of attention, the number of units.
    """

    names: tuple[str, ...]
    kind: str
    layers: tuple[Layer, ...]
    heads: int = 0

    @cached_property
    def signature(self) -> tuple[object, ...]:
        """What two chains must share to be compared: all sizes but the numbers of hidden units."""
        weights = self.weights
        ends = weights[0][0].shape[2], weights[-1][0].shape[1]
        positions = tuple(tuple(part.shape[0] for part in layer) for layer in weights)
        return self.kind, len(self.names), ends, positions

    def spectra(self) -> list[FloatArray]:
        """Eigenvalues of every weight's Gram matrix, which a change of basis leaves as they are."""
        flat = [
            np.concatenate(list(part.astype(np.float64)), axis=1) for layer in self.weights for part in layer
        ]
        grams = [m @ m.T if m.shape[0] <= m.shape[1] else m.T @ m for m in flat]
        return [np.asarray(np.linalg.eigvalsh(gram), np.float64) for gram in grams]

    def unit_norms(self) -> list[FloatArray]:
        """Norms of the incoming weights of every unit, which a change of basis leaves as they are."""
        return [np.linalg.norm(layer[0], axis=(0, 2)).astype(np.float64) for layer in self.weights[:-1]]

    @cached_property
    def weights(self) -> tuple[tuple[Weights, ...], ...]:
        """Of every layer its parts: positions by rows by columns, units one row (or column) each."""
        if self.kind == "mlp":
            first, last, *gate = (_read(layer) for layer in self.layers)
            return ((first, *gate), (last,))
        if self.kind == "attention":
            *ins, out = (_read(layer)[0] for layer in self.layers)
            rows = [part for matrix in ins for part in _by_head_rows(matrix, self.heads, fused=len(ins) == 1)]
            return (tuple(rows), (_by_head_columns(out, self.heads),))
        return tuple((part,) for part in self._of_chain())

    def _of_chain(self) -> Iterator[Weights]:
        units = 0
        for layer in self.layers:
            matrix = _read(layer)
            places = matrix.shape[2] // units if units else 1
            if places > 1:  # a flattened map: the places of a channel together, or all channels of a place
                rows = matrix.shape[1]
                last = layer.network.format in CHANNELS_LAST
                cut = matrix[0].reshape((rows, places, units) if last else (rows, units, places))
                matrix = np.ascontiguousarray(cut.transpose((1, 0, 2) if last else (2, 0, 1)))
            units = matrix.shape[1]
            yield matrix


def _read(layer: Layer) -> Weights:
    stacked = np.stack([np.asarray(m, np.float32) for m in layer.matrices()])
    return stacked if np.isfinite(stacked).all() else np.where(np.isfinite(stacked), stacked, np.float32(0))


def _by_head_rows(matrix: Weights, heads: int, *, fused: bool) -> list[Weights]:
    parts = np.split(matrix, 3) if fused else [matrix]
    return [part.reshape(heads, -1, part.shape[1]).transpose(1, 0, 2) for part in parts]


def _by_head_columns(matrix: Weights, heads: int) -> Weights:
    return matrix.reshape(matrix.shape[0], heads, -1).transpose(2, 0, 1)


def chains(network: Network) -> list[UnitChain]:
    """The chains of a network, in its order; attention only where a network has no other units."""
    blocks: dict[str, dict[Role, list[Layer]]] = {}
    usable = [layer for layer in network.layers() if layer.adapter is None]
    for layer in usable:
        if layer.block is not None and layer.count == 1:
            label = network.names.label(layer.name)
            head, _, _ = label.partition(f".{layer.block}.")
            expert = "" if layer.expert is None else f"[{layer.expert}]"
            blocks.setdefault(f"{head}.{layer.block}{expert}", {}).setdefault(layer.role, []).append(layer)
    units_of_network = [chain for name, roles in blocks.items() for chain in _mlp(name, roles)]
    if not units_of_network:
        units_of_network = list(_plain(usable))
    if not units_of_network:
        heads = network.names.heads()[0]
        units_of_network = [
            chain for name, roles in blocks.items() for chain in _attention(name, roles, heads)
        ]
    return units_of_network


def _mlp(name: str, roles: dict[Role, list[Layer]]) -> Iterator[UnitChain]:
    outs, ins, gates = (roles.get(role, []) for role in (Role.MLP_OUT, Role.MLP_IN, Role.MLP_GATE))
    if len(outs) != 1 or len(ins) != 1 or len(gates) > 1:
        return
    if ins[0].shape[0] == outs[0].shape[1] and all(gate.shape == ins[0].shape for gate in gates):
        yield UnitChain((name,), "mlp", (ins[0], outs[0], *gates))


def _attention(name: str, roles: dict[Role, list[Layer]], heads: int) -> Iterator[UnitChain]:
    fused, outs = roles.get(Role.QKV, []), roles.get(Role.ATTENTION_OUT, [])
    apart = [roles.get(role, []) for role in (Role.QUERY, Role.KEY, Role.VALUE)]
    if heads < 2 or len(outs) != 1 or outs[0].shape[1] % heads:
        return
    if len(fused) == 1 and fused[0].shape[0] % (3 * heads) == 0:
        yield UnitChain((name,), "attention", (fused[0], outs[0]), heads)
    elif all(len(part) == 1 for part in apart):
        # Key and value heads that several query heads share are no units of their own: queries alone are read.
        ins = [part[0] for part in apart if part[0].shape[0] == outs[0].shape[1]]
        if len(ins) > 1 or (ins and ins[0].role is Role.QUERY):
            yield UnitChain((name,), "attention", (*(ins if len(ins) == 3 else ins[:1]), outs[0]), heads)


def _plain(layers: Sequence[Layer]) -> Iterator[UnitChain]:
    run: list[Layer] = []
    for layer in layers:
        fits = layer.role in CHAIN and layer.kind in ("linear", "conv")
        if run and not (fits and follows(run[-1], layer)):
            yield from _closed(run)
            run = []
        if fits:
            run.append(layer)
    yield from _closed(run)


def _closed(run: Sequence[Layer]) -> Iterator[UnitChain]:
    if len(run) > 1:
        yield UnitChain(tuple(layer.name for layer in run[:-1]), "chain", tuple(run))


def follows(before: Layer, layer: Layer) -> bool:
    """Whether a layer can read the one before: as many columns as that has rows, or a map of them flattened."""
    units, columns = before.shape[0], layer.shape[1]
    return columns == units or (before.kind == "conv" and layer.kind == "linear" and columns % units == 0)
