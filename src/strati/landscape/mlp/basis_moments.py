"""Jacobian moments of feed-forward chains: everything the bases and edges of an MLP need, without autograd.

A chain is ``f_{l+1} = act_l(W_l f_l + b_l)`` with elementwise activations. With ``r_l = act_l'(p_l)`` (the
firing pattern of a ReLU) and ``B_l = mean_x r_l r_l^T``, the Jacobian moments to the next layer and the
squared edges are closed forms in ``B_l``; those to the output are products of masked matrices, batched.
Squared edges ``E_ji = mean_x (sum_a C_ja r_a(x) W'_ai)^2`` have the data only in ``B = sum_m b_m u_m u_m^T`` and are
``sum_m b_m ((C o u_m) W')_ji^2``. Other networks are in ``probe_moments``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from strati.core.results import Flag
from strati.core.rng import stream
from strati.landscape.basis.whitening import Moments, MomentStream, triangular
from strati.landscape.jacobians import MatrixEstimate, SplitHalfEstimate
from strati.landscape.mlp.sequential import IDENTITY, Chain, ChainStage

if TYPE_CHECKING:
    from strati.core.results import FloatArray

ROWS = 4096
"""Data rows per chunk."""
EXACT_OUTPUTS = 1024
"""Up to this many outputs the Jacobians are exact; above, random probes stand for the outputs."""
MOST_WORK = 2e12
"""And up to this many multiplications, about a minute on a core."""
_ELEMENTS = 8_000_000


class ChainBackend:
    """A chain with its data, ready to give moments, Jacobian moments and edges.

    Sites are the input, each hidden layer after its nonlinearity, and the output.

    Args:
        chain: The network, taken in double precision.
        x: Data, one row each.
        seed: Seed of the random probes.
        probes: Probes per datum where the output is wider than :data:`EXACT_OUTPUTS`.
        device: Where the network runs; where its weights are by default.
    """

    notes: tuple[Flag, ...] = ()

    def __init__(
        self,
        chain: Chain,
        x: torch.Tensor,
        *,
        seed: int = 0,
        probes: int = 256,
        device: torch.device | None = None,
    ) -> None:
        self.chain = chain.to(torch.float64, device)
        self.stages = self.chain.stages
        self.names = ("input", *(stage.name for stage in self.stages[:-1]), "output")
        self.widths = self.chain.widths
        self.frame: FloatArray | None = None
        self.count = len(x)
        self._device = self.stages[0].weight.device
        self._x = self.chain.rows(x.to(self._device))
        self._seed, self._probes = seed, probes
        self._gates: list[FloatArray] | None = None

    @property
    def inputs(self) -> torch.Tensor:
        """The data as rows that the first layer takes."""
        return self._x

    def moments(self, *, centre: bool) -> tuple[Moments, ...]:
        """Mean and second moment of the activations at every site; ``B_l`` are collected on the way."""
        streams = [MomentStream(centre=centre) for _ in self.widths]
        gates = [np.zeros((width, width)) for width in self.widths[1:]]
        for activations, slopes in self._sweep():
            for each, rows in zip(streams, activations, strict=True):
                each.add(rows.cpu().numpy())
            for gate, slope in zip(gates, slopes, strict=True):
                if slope is not None:
                    gate += (slope.T @ slope).cpu().numpy()
        self._gates = [gate / self.count for gate in gates]
        return tuple(each.finish() for each in streams)

    def to_next(self, site: int, colour: FloatArray, following: FloatArray) -> MatrixEstimate:
        """``mean_x J^T J`` in white coordinates, ``J`` from this site to the next one's basis.

        ``M_l = W^T [(C^T C) o B] W`` (o elementwise, ``C`` of the next site), exact for any elementwise
        activation.
        """
        gram = following.T @ following
        if not _linear(self.stages[site]):
            gram = gram * self._gate(site)
        return self._pull_back(site, colour, gram)

    def to_output(self, colours: Sequence[FloatArray]) -> tuple[MatrixEstimate, ...]:
        """``mean_x J^T J`` in white coordinates, ``J`` from each site (but the last) to the output."""
        grams = self._output_grams()
        return tuple(
            self._pull_back(site, colour, gram.value, gram.error)
            for site, (colour, gram) in enumerate(zip(colours, grams, strict=True))
        )

    def edges(self, site: int, following: FloatArray, inverse: FloatArray) -> MatrixEstimate:
        """``E_ji = mean_x (d fhat_j / d fhat_i)^2`` from this site's directions to the next one's."""
        into = self._weight(site) @ inverse
        if _linear(self.stages[site]):
            return MatrixEstimate((following @ into) ** 2)
        value, error = masked_edges(following, into, self._gate(site))
        return MatrixEstimate(value, error)

    def silent(self, site: int) -> FloatArray:
        """Weights of the next layer's neurons that never fire on the data."""
        rows: FloatArray = self._weight(site)
        return rows[:0] if _linear(self.stages[site]) else rows[np.diag(self._gate(site)) == 0]

    def activations(self, site: int) -> Iterator[FloatArray]:
        """The activations of a site, chunk by chunk."""
        for rows in torch.split(self._x, ROWS):
            yield self._from(0, site, rows).cpu().numpy()

    def outputs(self, site: int, rows: FloatArray, start: int = 0) -> FloatArray:
        """The network's outputs when the activations of a site are ``rows`` (``start`` plays no part here)."""
        result: FloatArray = self._from(site, len(self.stages), self._tensor(rows)).cpu().numpy()
        return result

    def onward(self, site: int, rows: FloatArray, start: int = 0) -> FloatArray:
        """The next site's activations when those of a site are ``rows`` (``start`` plays no part here)."""
        result: FloatArray = self._from(site, site + 1, self._tensor(rows)).cpu().numpy()
        return result

    def _tensor(self, array: FloatArray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)

    def _from(self, site: int, end: int, rows: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for stage in self.stages[site:end]:
                rows = stage.activation(stage.preactivations(rows))
        return rows

    def _sweep(self) -> Iterator[tuple[list[torch.Tensor], list[torch.Tensor | None]]]:
        for rows in torch.split(self._x, ROWS):
            with torch.no_grad():
                activations, before = self.chain.forward(rows)
            pairs = zip(self.stages, before, strict=True)
            slopes = [None if _linear(stage) else stage.activation.derivative(p) for stage, p in pairs]
            yield activations, slopes

    def _weight(self, site: int) -> FloatArray:
        weight: FloatArray = self.stages[site].weight.cpu().numpy()
        return weight

    def _gate(self, site: int) -> FloatArray:
        if self._gates is None:
            self.moments(centre=True)
        assert self._gates is not None
        return self._gates[site]

    def _pull_back(
        self, site: int, colour: FloatArray, gram: FloatArray, error: float = 0.0
    ) -> MatrixEstimate:
        white = self._weight(site) @ colour
        return MatrixEstimate(white.T @ gram @ white, error)

    def _output_grams(self) -> list[MatrixEstimate]:
        """``K_l = mean_x (dO/dp_l)^T (dO/dp_l)`` for every linear map."""
        top = len(self.stages) - 1
        jacobian = np.eye(self.widths[-1])
        grams: dict[int, MatrixEstimate] = {}
        while top >= 0 and _linear(self.stages[top]):
            grams[top] = MatrixEstimate(jacobian.T @ jacobian)
            jacobian = jacobian @ self._weight(top)
            top -= 1
        if top >= 0:  # the first nonlinear layer from above: closed form
            grams[top] = MatrixEstimate((jacobian.T @ jacobian) * self._gate(top))
        if top >= 1:
            if len(jacobian) > jacobian.shape[1]:  # the same J^T J from fewer rows
                jacobian = triangular(jacobian)
            grams |= self._masked_products(jacobian, top)
        return [grams[site] for site in range(len(self.stages))]

    def _masked_products(self, jacobian: FloatArray, top: int) -> dict[int, MatrixEstimate]:
        work = 4.0 * self.count * sum(self.widths[k + 1] * self.widths[k + 2] for k in range(top))
        exact = len(jacobian) <= EXACT_OUTPUTS and len(jacobian) * work <= MOST_WORK
        rows = len(jacobian) if exact else int(np.clip(MOST_WORK / work, 1, self._probes))
        batch = max(1, _ELEMENTS // (rows * max(self.widths)))
        if not exact:  # two halves at least, so that the error can be told
            batch = min(batch, -(-self.count // 4))
        sums = [SplitHalfEstimate() for _ in range(top)]
        seeds, turn = self._tensor(jacobian)[None], 0
        for _, slopes in self._sweep():
            for start in range(0, ROWS, batch):
                part = [None if s is None else s[start : start + batch] for s in slopes]
                if (first := part[top]) is None or not len(first):
                    break
                begin = seeds if exact else self._probe(len(first), rows, len(jacobian), turn) @ seeds
                product = begin * first[:, None, :]
                for site in range(top - 1, -1, -1):
                    product = product @ self.stages[site + 1].weight
                    if (slope := part[site]) is not None:
                        product = product * slope[:, None, :]
                    flat = product.reshape(-1, product.shape[-1])
                    sums[site].add(turn, (flat.T @ flat).cpu().numpy())
                turn += 1
        return {site: sums[site].result(self.count, exact=exact) for site in range(top)}

    def _probe(self, data: int, rows: int, outputs: int, turn: int) -> torch.Tensor:
        """Random signs over the outputs, fresh for every datum."""
        rng = stream(self._seed, "output probes", turn)
        signs = rng.integers(0, 2, (data, rows, outputs)) * 2.0 - 1.0
        return self._tensor(signs / np.sqrt(rows))


def _linear(stage: ChainStage) -> bool:
    return stage.activation is IDENTITY or stage.activation.name == "identity"


DOUBLE_WORK = 4e10
"""Up to this many multiplications edges are computed in double precision, above in single."""
_EDGE_ELEMENTS = 4_000_000


def masked_edges(following: FloatArray, into: FloatArray, gate: FloatArray) -> tuple[FloatArray, float]:
    """Squared edges through one elementwise nonlinearity.

    Args:
        following: ``C`` of the next layer (directions x neurons).
        into: ``W' = W C^-`` (neurons x directions of this layer).
        gate: ``B = mean_x r r^T`` (neurons x neurons).

    Returns:
        ``E`` (directions of the next layer x directions of this one), and its relative error: measured
        against double precision on a sample of rows where single precision was used, 0 otherwise.

    Examples:
        >>> rng = np.random.default_rng(0)
        >>> C, W, r = rng.normal(size=(3, 5)), rng.normal(size=(5, 2)), rng.integers(0, 2, (40, 5)) * 1.0
        >>> E, error = masked_edges(C, W, r.T @ r / 40)
        >>> bool(np.allclose(E, np.mean([(C * row @ W) ** 2 for row in r], axis=0)))
        True
    """
    weights, patterns = np.linalg.eigh(gate)
    keep = weights > 1e-15 * max(weights[-1], 0.0)
    scaled = patterns.T[keep] * np.sqrt(weights[keep])[:, None]
    work = float(len(scaled)) * following.size * into.shape[1]
    if work <= DOUBLE_WORK:
        return _sum(following, into, scaled, torch.float64), 0.0
    edges = _sum(following, into, scaled, torch.float32)
    sample = np.unique(np.linspace(0, len(following) - 1, 4).astype(int))
    exact = _sum(following[sample], into, scaled, torch.float64)
    size = float(np.linalg.norm(exact))
    return edges, float(np.linalg.norm(edges[sample] - exact)) / size if size > 0 else 0.0


def _sum(following: FloatArray, into: FloatArray, patterns: FloatArray, dtype: torch.dtype) -> FloatArray:
    c = torch.from_numpy(np.ascontiguousarray(following)).to(dtype)
    w = torch.from_numpy(np.ascontiguousarray(into)).to(dtype)
    u = torch.from_numpy(np.ascontiguousarray(patterns)).to(dtype)
    total = torch.zeros((len(c), w.shape[1]), dtype=torch.float64)
    batch = max(1, _EDGE_ELEMENTS // max(1, c.numel(), len(c) * w.shape[1]))
    for part in torch.split(u, batch):
        product = (c[None] * part[:, None, :]).reshape(-1, c.shape[1]) @ w
        total += product.square_().reshape(len(part), len(c), w.shape[1]).sum(0)
    result: FloatArray = total.numpy()
    return result
