r"""What the interventions do to one layer: from a setting to new values.

The edits of a matrix are numpy functions: outputs first, a kernel's taps with its inputs, computed in float64. Spectral
ones share one decomposition (:class:`Directions`), so that twenty ranks cost little more than one. Every change of a
layer is made from the same intact values and, where chance is involved, from a stream of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from strati.comparison.update import damp_intruders
from strati.core.errors import BadInputError
from strati.interventions import quantise_prune
from strati.interventions.kinds import BLOCK_KINDS, HIDDEN, KINDS, Intervention, Pairs, Point, run_length
from strati.interventions.targets import Change, Target, as_matrix, from_matrix

if TYPE_CHECKING:
    from strati.core.results import FloatArray
    from strati.interventions.input_covariance import InputCovariance

Values = tuple[NDArray[Any], NDArray[Any] | None]
Others = Mapping[str, Mapping[str, NDArray[Any]]]
"""Tensors of other networks, for ``swap``, ``adapt`` and ``damp-intruders``, by :func:`source_key`."""
_RIDGE = 1e-10
"""Of the mean input's power: decides between truncations that are equally good for a singular covariance."""


class Directions:
    r"""The singular directions of a matrix, strongest first, computed once.

    From the eigenvectors of the smaller Gram matrix in double precision: with :math:`P_k` the projection on some of
    them, :math:`W P_k` (or :math:`P_k W`) is what those directions carry.

    Examples:
        >>> directions = Directions(np.diag([3.0, 2.0, 1.0]))
        >>> directions.keep(slice(0, 1)).round(6).tolist()
        [[3.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    """

    def __init__(self, matrix: NDArray[Any]) -> None:
        self.matrix = np.asarray(matrix, dtype=np.float64)
        if not np.isfinite(self.matrix).all():
            raise BadInputError("weight", "holds values that are not finite; no singular directions")

    @cached_property
    def _decomposed(self) -> tuple[FloatArray, FloatArray]:
        w = self.matrix
        gram = w.T @ w if w.shape[0] >= w.shape[1] else w @ w.T
        values, vectors = np.linalg.eigh(gram)
        return np.maximum(values[::-1], 0.0), vectors[:, ::-1]

    @property
    def count(self) -> int:
        """How many there are: the smaller side."""
        return int(min(self.matrix.shape))

    @property
    def energies(self) -> FloatArray:
        """Squared singular values, descending."""
        return self._decomposed[0]

    def keep(self, which: slice) -> FloatArray:
        """The part of the matrix that some directions carry."""
        first, second = self.factors(which)
        product: FloatArray = first @ second
        return product

    def factors(self, which: slice) -> tuple[FloatArray, FloatArray]:
        """That part as a product of two matrices, (rows, k) and (k, cols)."""
        directions = self._decomposed[1][:, which]
        if self.matrix.shape[0] >= self.matrix.shape[1]:
            return self.matrix @ directions, directions.T
        return directions, directions.T @ self.matrix


class InputDirections(Directions):
    r"""Output directions of a layer, ordered by the power that they carry on the calibration data.

    With :math:`U_k` the leading eigenvectors of :math:`W C W^T`, :math:`W' = U_k U_k^T W` minimises
    :math:`\|(W - W') X\|_F` over all matrices of rank k: :math:`W' C^{1/2}` is the truncated singular value
    decomposition of :math:`W C^{1/2}` (Eckart and Young). No inverse of C appears, so C may be singular. Of an
    embedding, whose tokens occur with different frequencies, the rows are weighted by them.

    References:
        Wang et al. 2024, SVD-LLM: truncation-aware singular value decomposition.

    Examples:
        >>> from strati.interventions.input_covariance import InputCovariance
        >>> rarely_used = InputCovariance("fc", np.diag([0.01, 1.0]), 100)
        >>> InputDirections(np.diag([3.0, 2.0]), rarely_used).keep(slice(0, 1)).round(6).tolist()
        [[0.0, 0.0], [0.0, 2.0]]
    """

    def __init__(self, matrix: NDArray[Any], covariance: InputCovariance) -> None:
        super().__init__(matrix)
        weights = covariance.row_weights
        self._scale = np.ones(len(self.matrix)) if weights is None else np.sqrt(weights)
        self._decomposed = self._decompose(covariance.matrix)  # the covariance itself is not held

    def _decompose(self, c: FloatArray) -> tuple[FloatArray, FloatArray]:
        c = c + _RIDGE * (np.trace(c) / len(c) or 1.0) * np.eye(len(c))
        w = self._scale[:, None] * self.matrix
        basis = None
        if w.shape[0] > w.shape[1]:
            basis, w = np.linalg.qr(w)
        values, vectors = np.linalg.eigh(w @ c @ w.T)
        vectors = vectors if basis is None else basis @ vectors
        return np.maximum(values[::-1], 0.0), vectors[:, ::-1]

    def factors(self, which: slice) -> tuple[FloatArray, FloatArray]:
        """The part that some directions carry, as a product of two matrices, (rows, k) and (k, cols)."""
        directions = self._decomposed[1][:, which]
        return directions / self._scale[:, None], (directions * self._scale[:, None]).T @ self.matrix


def truncate_rank(
    directions: Directions,
    *,
    rank: int | None = None,
    energy: float | None = None,
    parameters: float | None = None,
) -> int:
    """How many directions a setting of ``truncate`` keeps.

    Examples:
        >>> directions = Directions(np.diag([2.0, 1.0, 1.0]))
        >>> [truncate_rank(directions, rank=9), truncate_rank(directions, energy=0.6)]
        [3, 1]
        >>> truncate_rank(Directions(np.ones((30, 60))), parameters=0.5)
        10
    """
    if rank is not None:
        return min(rank, directions.count)
    if parameters is not None:
        rows, cols = directions.matrix.shape
        return rank_of_share(rows, cols, parameters)
    assert energy is not None
    total = np.cumsum(directions.energies)
    if total[-1] <= 0:
        return 0
    # Sums of squares carry rounding: a share reached to 12 digits is reached.
    return int(min(np.searchsorted(total, energy * total[-1] * (1 - 1e-12)) + 1, directions.count))


def rank_of_share(rows: int, cols: int, share: float) -> int:
    """The largest rank whose two factors have at most ``share`` of the parameters; full rank at a share of 1."""
    if share >= 1.0:
        return min(rows, cols)
    return min(int(share * rows * cols / (rows + cols) + 1e-9), rows, cols)


def truncated_parameters(rows: int, cols: int, rank: int) -> int:
    """What a layer of rank ``rank`` counts: ``min(k (rows + cols), rows cols)`` parameters.

    Examples:
        >>> truncated_parameters(100, 50, 10), truncated_parameters(100, 50, 40)
        (1500, 5000)
    """
    return min(rank * (rows + cols), rows * cols)


def truncate(directions: Directions, **setting: Any) -> FloatArray:
    """The leading directions a setting keeps; the matrix itself where it keeps all."""
    return keep_rank(directions, truncate_rank(directions, **setting))


def keep_rank(directions: Directions, rank: int) -> FloatArray:
    """The leading directions; the matrix itself where all of them are kept."""
    return directions.matrix.copy() if rank >= directions.count else directions.keep(slice(0, rank))


def remove_small(directions: Directions, k: int) -> FloatArray:
    """The matrix without its ``k`` weakest directions."""
    return directions.keep(slice(0, max(directions.count - k, 0)))


def remove_large(directions: Directions, k: int) -> FloatArray:
    """The matrix without its ``k`` strongest directions."""
    return directions.matrix - directions.keep(slice(0, min(k, directions.count)))


def signal_part(matrix: NDArray[Any]) -> FloatArray:
    """What lies above the Tracy-Widom edge of the random bulk (:mod:`strati.spectra.noise_model`)."""
    from strati.spectra.noise_model import split

    return split(matrix).signal


def noise_part(matrix: NDArray[Any]) -> FloatArray:
    """What lies below it."""
    from strati.spectra.noise_model import split

    return split(matrix).noise


def remove_quasi_null(directions: Directions) -> FloatArray:
    """The matrix without the directions that ``scan`` counts as quasi-null."""
    from strati.spectra.spectrum import spectrum

    count = int(spectrum(directions.matrix).metrics()["quasi_null"] or 0)
    return remove_small(directions, count) if count else directions.matrix.copy()


def permute_entries(matrix: NDArray[Any], rng: np.random.Generator) -> FloatArray:
    """The same entries in random places."""
    w = np.asarray(matrix, dtype=np.float64)
    return rng.permutation(w.reshape(-1)).reshape(w.shape)


def add_noise(matrix: NDArray[Any], size: float, rng: np.random.Generator) -> FloatArray:
    """Gaussian noise added, scaled so that its Frobenius norm is ``size`` times the matrix's."""
    w = np.asarray(matrix, dtype=np.float64)
    drawn = rng.standard_normal(w.shape)
    noisy: FloatArray = w + drawn * (size * np.linalg.norm(w) / np.linalg.norm(drawn))
    return noisy


def adapt(matrix: NDArray[Any], base: NDArray[Any], rank: int) -> FloatArray:
    """The base with only rank ``rank`` of the update: ``base + truncate(matrix - base)``."""
    start = np.asarray(base, dtype=np.float64)
    return start + truncate(Directions(np.asarray(matrix, dtype=np.float64) - start), rank=rank)


class LayerEdits:
    """The edits of one layer, sharing its singular directions.

    Examples:
        >>> target = Target("fc", "linear", "linear", (2, 3), False)
        >>> layer = LayerEdits(target, (np.diag([3.0, 1.0, 0.0])[:2].astype(np.float32), None))
        >>> layer.weight("truncate", {"rank": 1}).tolist()
        [[3.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    """

    def __init__(
        self, target: Target, values: Values, inputs: Callable[[str], InputCovariance] | None = None
    ) -> None:
        self.target = target
        self._inputs = inputs
        self.matrix = values[0] if target.composite else as_matrix(values[0], target.kind)
        self._directions: Directions | None = None
        self._update: Directions | None = None

    @property
    def directions(self) -> Directions:
        """The layer's singular directions, computed when first asked for."""
        if self._directions is None:
            self._directions = Directions(self.matrix)
        return self._directions

    @property
    def covariance(self) -> InputCovariance:
        """The second moments of the layer's inputs.

        Raises:
            BadInputError: There are no calibration data, or none of them reach the layer.
        """
        if self._inputs is None:
            raise BadInputError(
                self.target.name, "a data-aware edit needs calibration data; give calibration="
            )
        return self._inputs(self.target.name)

    @cached_property
    def input_directions(self) -> Directions:
        """The layer's output directions by their power on the calibration data."""
        return InputDirections(self.matrix, self.covariance)

    def truncation(self, setting: Mapping[str, Any]) -> tuple[Directions, int]:
        """The directions that a setting of ``truncate`` ranks, and how many of them it keeps."""
        values = dict(setting)
        by_inputs = values.pop("metric", None) == "inputs"
        directions = self.input_directions if by_inputs else self.directions
        return directions, truncate_rank(directions, **values)

    def weight(
        self,
        name: str,
        setting: Mapping[str, Any],
        rng: np.random.Generator | None = None,
        other: NDArray[Any] | None = None,
    ) -> NDArray[np.float32]:
        """The changed weight in the layer's own shape.

        Args:
            name: One of strati's interventions on weights.
            setting: Its values.
            rng: Where chance is involved.
            other: The other network's weight, for ``swap`` and ``adapt``.
        """
        return from_matrix(self._edit(name, setting, rng, other), self.target.kind, self.target.shape)

    def _edit(
        self,
        name: str,
        setting: Mapping[str, Any],
        rng: np.random.Generator | None,
        other: NDArray[Any] | None,
    ) -> NDArray[Any]:
        values = {key: value for key, value in setting.items() if key not in ("checkpoint", HIDDEN)}
        if name in ("swap", "adapt", "damp-intruders"):
            assert other is not None
            base = np.asarray(as_matrix(other, self.target.kind), dtype=np.float64)
            if name == "swap":
                return base
            if name == "damp-intruders":
                return damp_intruders(base, self.matrix, values["factor"])
            if self._update is None:
                self._update = Directions(self.matrix.astype(np.float64) - base)
            return base + truncate(self._update, **values)
        plain: dict[str, Callable[[], NDArray[Any]]] = {
            "truncate": lambda: keep_rank(*self.truncation(values)),
            "remove-small": lambda: remove_small(self.directions, **values),
            "remove-large": lambda: remove_large(self.directions, **values),
            "remove-quasi-null": lambda: remove_quasi_null(self.directions),
            "signal-only": lambda: signal_part(self.matrix),
            "noise-only": lambda: noise_part(self.matrix),
            "quantise": lambda: self._by_method(quantise_prune.quantise, values),
            "prune": lambda: self._by_method(quantise_prune.prune, values),
            "zero": lambda: np.zeros_like(self.matrix),
            "scale": lambda: self.matrix.astype(np.float64) * values["factor"],
        }
        if name in plain:
            return plain[name]()
        assert rng is not None
        if name == "permute-entries":
            return permute_entries(self.matrix, rng)
        if name == "noise":
            return add_noise(self.matrix, values["size"], rng)
        raise BadInputError(name, "is not a change to a weight")

    def _by_method(self, plain: Callable[..., NDArray[Any]], values: dict[str, Any]) -> NDArray[Any]:
        """The weight quantised or pruned by a published method, or plainly where none is given."""
        method = values.pop("method", None)
        if "unit" in values:
            return quantise_prune.prune_units(self.matrix, self.covariance, **values)
        if method is None:
            return plain(self.matrix, **values)
        if method == "hqq":
            return quantise_prune.hqq(self.matrix, **values)
        edit: Callable[..., NDArray[Any]] = getattr(quantise_prune, method)
        return edit(self.matrix, self.covariance.matrix, **values)


def make_change(
    layer: LayerEdits,
    one: Intervention,
    point: Point,
    rng: np.random.Generator | None,
    others: Others,
) -> Change:
    """One change of a layer or block by any intervention but re-initialising and re-randomising.

    Raises:
        BadInputError: The user's function returned something else than a weight of the same shape.
    """
    target, setting = layer.target, dict(point.setting)
    if one.name in BLOCK_KINDS:
        names = target.members[: run_length(one.name, setting)]
        word = "identity" if one.name == "drop" else one.name
        return Change(one.name, 0, None, None, f"{word}: {', '.join(names)}", point.text, names)
    if one.name not in KINDS:
        weight = _own(one, layer, rng)
        return Change(one.name, point.draw, weight, None, "the user's function", point.text)
    if KINDS[one.name].source:
        tensors = others[source_key(one, point.setting)]
        weight = layer.weight(one.name, setting, rng, _tensor(tensors, f"{target.name}.weight", target.shape))
        bias = None
        if one.name == "swap" and target.bias:
            bias = _tensor(tensors, f"{target.name}.bias", None).astype(np.float32)
        return Change(one.name, point.draw, weight, bias, "the other network's values", point.text)
    weight = layer.weight(one.name, setting, rng)
    return Change(one.name, point.draw, weight, None, "trained values, changed", point.text)


def source_key(one: Intervention, setting: Pairs) -> str:
    """Under which name the other network of a setting is kept."""
    options = dict(setting)
    return str(options.get("checkpoint", options.get(HIDDEN, f"{one.name}:source")))


def tensors_of(source: Any) -> dict[str, NDArray[Any]]:
    """A network's tensors by name, whatever names the network; those of a PEFT model with its updates in them.

    Raises:
        BadInputError: It is no network, the file is broken, or an adapter's base is not there.
    """
    from strati.io.adapters.merge import carries_adapter, is_adapter, merge_with_base, unwrapped
    from strati.io.network import open as open_network

    network = open_network(source)
    if is_adapter(network):
        network = merge_with_base(network)
    elif carries_adapter(network):
        network = unwrapped(network)
    return {t.name: _readable(network.read(t.name)) for t in network.tensors if t.floating}


def _readable(values: NDArray[Any]) -> NDArray[Any]:
    """A copy of its own, of a type that numpy can compute with: half precision and smaller in single."""
    return np.array(values, np.float32) if values.dtype.itemsize < 4 else np.array(values)


def _tensor(tensors: Mapping[str, NDArray[Any]], name: str, shape: tuple[int, ...] | None) -> NDArray[Any]:
    tensor = tensors.get(name)
    if tensor is None or (shape is not None and tuple(tensor.shape) != shape):
        there = "does not have it" if tensor is None else f"has it as {tuple(tensor.shape)}"
        raise BadInputError(name, f"the other network {there}; swap needs the same shapes")
    return np.asarray(tensor)


def _own(
    intervention: Intervention, layer: LayerEdits, rng: np.random.Generator | None
) -> NDArray[np.float32]:
    shape = layer.target.shape
    try:
        edited = intervention.source(from_matrix(layer.matrix, layer.target.kind, shape).copy(), rng)
        weight = np.asarray(
            edited.detach().cpu().numpy() if hasattr(edited, "detach") else edited, dtype=np.float32
        )
    except Exception as error:  # the user's function: whatever it raises is this point's reason
        raise BadInputError(
            f"intervention {intervention.name}", f"raised {type(error).__name__}: {error}"
        ) from None
    if weight.shape != shape:
        raise BadInputError(
            f"intervention {intervention.name}", f"returned shape {weight.shape}, not {shape}"
        )
    return np.ascontiguousarray(weight)
