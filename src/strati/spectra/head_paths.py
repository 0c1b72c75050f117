r"""What leads into and out of a head: embedding, unembedding and positions, and the scores that follow from them.

The copying score follows the path from the embedding through OV to the unembedding (Elhage et al. 2021). The positional
score says which earlier position a head attends to by positions alone, learned or rotary (Su et al. 2021).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.io.roles import Role, place_of

if TYPE_CHECKING:
    from strati.core.results import FloatArray
    from strati.io.layers import Layer
    from strati.io.network import Network
    from strati.spectra.heads import AttentionBlock, HeadMatrix

_POSITIONS = 256  # of an embedding of positions that are looked at
_OFFSETS = 8  # distances between two positions that are looked at
_TOKENS = (
    4096  # of an embedding, evenly spaced, whose mean is the content that rotary positions are applied to
)
_SELF_TOKENS = 256  # of those, the tokens whose attention to themselves is averaged
_INPUT_NORM = re.compile(r"norm|ln_|\bln", re.IGNORECASE)
_OTHER_NORM = re.compile(
    r"post|ffn|mlp|ln_?2|norm_?2|after|feedforward|final|[qk]_(layer)?norm", re.IGNORECASE
)
_ROTARY = re.compile("rope|rotary", re.IGNORECASE)
_ROTARY_MODELS = frozenset(
    {"llama", "mistral", "mixtral", "qwen2", "qwen3", "gemma", "gpt_neox", "gptj", "phi"}
)
_NEIGHBOURS = frozenset({"gptj", "codegen", "cohere", "glm"})  # entries 2i and 2i + 1 form a pair


class Paths:
    """What leads into and out of the residual stream: embedding, head and positions of a network."""

    def __init__(self, network: Network) -> None:
        self._network = network
        layers = network.layers()
        tables = [layer for layer in layers if layer.role is Role.EMBEDDING and layer.count == 1]
        positions = [layer for layer in tables if re.search("pos|wpe", layer.name, re.IGNORECASE)]
        tokens = [layer for layer in tables if layer not in positions and "type" not in layer.name]
        heads = [layer for layer in layers if layer.role is Role.HEAD and layer.count == 1]
        self._embedding = max(tokens, key=lambda layer: layer.shape[0], default=None)
        same = [x for x in heads if self._embedding is not None and x.shape == self._embedding.shape]
        self._head = same[0] if same else self._embedding
        self._positions = positions[0] if positions else None
        self._through: FloatArray | None = None
        config = network.config or {}
        named = any(_ROTARY.search(key) for key in config) or any("rotary" in t.name for t in network.tensors)
        self.rotary = self._positions is None and (named or config.get("model_type") in _ROTARY_MODELS)

    def copying(self, output: FloatArray, values: FloatArray) -> tuple[float | None, float | None]:
        """The copying score of ``output.T @ values`` and its p-values under random orientations of the outputs."""
        embedding, head = self._embedding, self._head
        if (
            embedding is None
            or head is None
            or embedding.shape[1] != values.shape[1]
            or head.shape[1] != output.shape[1]
        ):
            return None, None
        if self._through is None:
            table, rows = (np.asarray(next(x.matrices()), dtype=np.float32) for x in (embedding, head))
            self._through = np.asarray(table.T @ rows, dtype=np.float64)
        path = values @ self._through
        eigenvalues = np.linalg.eigvals(path @ output.T)
        size = float(np.abs(eigenvalues).sum())
        if size == 0:
            return None, None
        spread = float(np.linalg.norm(upper_triangle(output) @ path)) / np.sqrt(output.shape[1])
        return float(eigenvalues.real.sum()) / size, _two_sided(float(np.sum(path * output)) / spread)

    def positional(
        self, matrix: HeadMatrix, query: FloatArray, key: FloatArray
    ) -> tuple[float | None, int | None]:
        """The distance to which positions alone send most attention, and its mean share."""
        if self.rotary and not matrix.attention.cross:
            return self._rotary_share(matrix, query, key)
        if self._positions is None or {self._positions.shape[1], query.shape[1]} != {key.shape[1]}:
            return None, None
        table = np.asarray(next(self._positions.matrices())[:_POSITIONS], dtype=np.float64)
        table = _normalised(table, centred=True)
        logits = (table @ query.T) @ (table @ key.T).T / np.sqrt(query.shape[0])
        logits[np.triu_indices(len(table), 1)] = -np.inf
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        offsets = range(min(_OFFSETS, len(table) - 1))
        shares = [float(np.diagonal(weights, -offset)[_OFFSETS:].mean()) for offset in offsets]
        return (max(shares), int(np.argmax(shares))) if shares else (None, None)

    def _rotary_share(
        self, matrix: HeadMatrix, query: FloatArray, key: FloatArray
    ) -> tuple[float | None, int | None]:
        r"""The same under rotary positions, from the logits averaged over independent tokens.

        At distance :math:`d > 0` their mean is :math:`\bar q^\top R(d)\,\bar k / \sqrt{w}`, with the mean query and key
        of all tokens; at distance 0 both belong to one token.
        """
        tokens = self._tokens(matrix.attention)
        if tokens is None or {tokens.shape[1], query.shape[1]} != {key.shape[1]}:
            return None, None
        shared = matrix.head * matrix.attention.groups // matrix.attention.heads
        width = len(query)
        shifts = (
            self._bias(matrix.attention.query, matrix.head, width),
            self._bias(matrix.attention.key, shared, width),
        )
        mean_query, mean_key = (
            factor @ tokens.mean(axis=0) + shift for factor, shift in zip((query, key), shifts, strict=True)
        )
        logits = rotary_logits(mean_query, mean_key, _POSITIONS, self._network.config or {})
        sample = tokens[:: max(1, len(tokens) // _SELF_TOKENS)]
        same = (sample @ query.T + shifts[0]) * (sample @ key.T + shifts[1])
        logits[0] = same.sum(axis=1).mean() / np.sqrt(width)
        shares = np.exp(logits - logits.max())
        shares /= shares.sum()
        offset = int(np.argmax(shares[:_OFFSETS]))
        return float(shares[offset]), offset

    def _tokens(self, attention: AttentionBlock) -> FloatArray | None:
        """Tokens as the attention reads them: rows of the embedding through the norm before it."""
        if self._embedding is None:
            return None
        gain, shift = self._input_norm(attention)
        table = next(self._embedding.matrices())
        rows = np.asarray(table[:: max(1, len(table) // _TOKENS)], dtype=np.float64)
        return _normalised(rows, centred=shift is not None) * gain + (0.0 if shift is None else shift)

    def _input_norm(self, attention: AttentionBlock) -> tuple[FloatArray | float, FloatArray | None]:
        """Gain and shift of the norm before the attention; 1 and ``None`` where no name says which it is."""
        names, width = self._network.names, attention.query.shape[1]
        norms = [
            tensor.name
            for tensor in self._network.tensors
            if tensor.shape == (width,)
            and names.blocks[tensor.name] == attention.block
            and tensor.name.endswith("weight")
            and place_of(names.label(tensor.name)).tower == attention.tower
            and _INPUT_NORM.search(tensor.name)
            and not _OTHER_NORM.search(tensor.name)
        ]
        if len(norms) != 1:
            return 1.0, None
        gain = self._vector(norms[0])
        if str((self._network.config or {}).get("model_type")).startswith("gemma"):
            gain = gain + 1  # stored as the difference from 1
        bias = norms[0].removesuffix("weight") + "bias"
        return gain, self._vector(bias) if bias in names.shapes else None

    def _bias(self, layer: Layer, head: int, width: int) -> FloatArray | float:
        """The part of a projection's bias that belongs to a head; 0 where there is none or it is fused with others."""
        name = layer.tensor.removesuffix("weight") + "bias"
        shapes = self._network.names.shapes
        if layer.name != layer.tensor or shapes.get(name) != (layer.shape[0],):
            return 0.0
        return np.asarray(self._vector(name).reshape(-1, width)[head])

    def _vector(self, name: str) -> FloatArray:
        return np.asarray(self._network.read(name), dtype=np.float64)


def rotary_logits(
    query: FloatArray, key: FloatArray, distances: int, config: Mapping[str, Any]
) -> FloatArray:
    r"""Attention logits of one query to one key that lies 0, 1, 2, ... positions before it, under rotary positions.

    Pairs of entries are turned by :math:`d\,\theta^{-2i/r}` (Su et al. 2021). Base, share of the entries that turn and
    which entries form pairs are those of the network's ``config.json``.

    Examples:
        >>> query = np.array([1.0, 0.0, 0.0, 1.0])
        >>> rotary_logits(query, query, 3, {"rope_theta": 100.0}).round(3).tolist()
        [1.0, 0.768, 0.282]
    """
    nested = config.get("rope_parameters")
    settings = {**config, **nested} if isinstance(nested, Mapping) else config
    width = len(query)
    base = _number(settings, "rope_theta", "rotary_emb_base", "rope.freq_base", default=10_000.0)
    share = _number(settings, "partial_rotary_factor", "rotary_pct", default=1.0)
    turned = int(min(width, _number(settings, "rotary_dim", "rope.dimension_count", default=width * share)))
    half = turned // 2
    turned = 2 * half
    if config.get("model_type") in _NEIGHBOURS or config.get("general.architecture") == "llama":
        pairs = [x[:turned:2] + 1j * x[1:turned:2] for x in (query, key)]
    else:
        pairs = [x[:half] + 1j * x[half:turned] for x in (query, key)]
    angles = np.outer(np.arange(distances), base ** (-np.arange(half) / max(half, 1)))
    moving = (np.exp(1j * angles) @ (pairs[0] * pairs[1].conj())).real
    return np.asarray((moving + query[turned:] @ key[turned:]) / np.sqrt(width))


def _number(settings: Mapping[str, Any], *names: str, default: float) -> float:
    """The first positive setting whose name ends with one of these; GGUF puts the architecture before it."""
    numbers = [v for k, v in settings.items() if k.endswith(names) and isinstance(v, int | float) and v > 0]
    return float(numbers[0]) if numbers else default


def _normalised(rows: FloatArray, *, centred: bool) -> FloatArray:
    """Rows with a root mean square of 1, with their mean removed first where ``centred``."""
    rows = rows - rows.mean(axis=1, keepdims=True) if centred else rows
    size = np.sqrt(np.mean(rows**2, axis=1, keepdims=True))
    return np.asarray(rows / np.maximum(size, np.finfo(float).tiny))


def _two_sided(deviate: float) -> float:
    from scipy.stats import norm

    return float(2 * norm.sf(abs(deviate)))


def upper_triangle(factor: FloatArray) -> FloatArray:
    """The triangular factor of a head's factor, with which the ``d x d`` product need not be formed."""
    return np.asarray(np.linalg.qr(factor.T, mode="r"))
