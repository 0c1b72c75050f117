"""The changes of one layer that a plan asks for: from interventions and settings to new values.

Every change of a layer is made from the same intact values and, where chance is involved, from a stream of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from strati.comparison.update import damp_intruders
from strati.core.errors import BadInputError
from strati.interventions import data_aware_edits, edits
from strati.interventions.kinds import BLOCK_KINDS, HIDDEN, KINDS, Intervention, Pairs, Point, run_length
from strati.interventions.targets import Change, Target, as_matrix, from_matrix

if TYPE_CHECKING:
    from strati.interventions.input_covariance import InputCovariance

Values = tuple[NDArray[Any], NDArray[Any] | None]
Others = Mapping[str, Mapping[str, NDArray[Any]]]
"""Tensors of other networks, for ``swap``, ``adapt`` and ``damp-intruders``, by :func:`source_key`."""


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
        self._directions: edits.Directions | None = None
        self._update: edits.Directions | None = None

    @property
    def directions(self) -> edits.Directions:
        """The layer's singular directions, computed when first asked for."""
        if self._directions is None:
            self._directions = edits.Directions(self.matrix)
        return self._directions

    @cached_property
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
    def input_directions(self) -> edits.Directions:
        """The layer's output directions by their power on the calibration data."""
        return data_aware_edits.InputDirections(self.matrix, self.covariance)

    def truncation(self, setting: Mapping[str, Any]) -> tuple[edits.Directions, int]:
        """The directions that a setting of ``truncate`` ranks, and how many of them it keeps."""
        values = dict(setting)
        by_inputs = values.pop("metric", None) == "inputs"
        directions = self.input_directions if by_inputs else self.directions
        return directions, edits.truncate_rank(directions, **values)

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
                self._update = edits.Directions(self.matrix.astype(np.float64) - base)
            return base + edits.truncate(self._update, **values)
        plain: dict[str, Callable[[], NDArray[Any]]] = {
            "truncate": lambda: edits.keep_rank(*self.truncation(values)),
            "remove-small": lambda: edits.remove_small(self.directions, **values),
            "remove-large": lambda: edits.remove_large(self.directions, **values),
            "remove-quasi-null": lambda: edits.remove_quasi_null(self.directions),
            "signal-only": lambda: edits.signal_part(self.matrix),
            "noise-only": lambda: edits.noise_part(self.matrix),
            "quantise": lambda: self._by_method(edits.quantise, values),
            "prune": lambda: self._by_method(edits.prune, values),
            "zero": lambda: np.zeros_like(self.matrix),
            "scale": lambda: self.matrix.astype(np.float64) * values["factor"],
        }
        if name in plain:
            return plain[name]()
        assert rng is not None
        if name == "permute-entries":
            return edits.permute_entries(self.matrix, rng)
        if name == "noise":
            return edits.add_noise(self.matrix, values["size"], rng)
        raise BadInputError(name, "is not a change to a weight")

    def _by_method(self, plain: Callable[..., NDArray[Any]], values: dict[str, Any]) -> NDArray[Any]:
        """The weight quantised or pruned by a published method, or plainly where none is given."""
        method = values.pop("method", None)
        if "unit" in values:
            return data_aware_edits.prune_units(self.matrix, self.covariance, **values)
        if method is None:
            return plain(self.matrix, **values)
        if method == "hqq":
            return data_aware_edits.hqq(self.matrix, **values)
        edit: Callable[..., NDArray[Any]] = getattr(data_aware_edits, method)
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
