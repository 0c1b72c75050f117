"""What the way a layer is stored adds to its row: rounding and the floor under its spectrum, an adapter's rank.

Rounding to codes adds noise of a known size to a weight; eigenvalues below the largest that such noise has (the
*floor*) say nothing about the weights before they were rounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from strati.core.results import Flag
from strati.io.inspection import adapter_fields

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.io.layers import Layer
    from strati.spectra.spectrum import Spectrum


def matrices_of(layer: Layer) -> Iterator[NDArray[Any]]:
    """The layer's matrices; of an adapter the small core, which has the singular values of the whole update."""
    return layer.matrices() if layer.adapter is None else iter((layer.adapter.core(),))


def stored_fields(layer: Layer) -> dict[str, Any]:
    """``quantisation``, ``adapter`` and ``expert`` of a layer's row, where they apply."""
    fields: dict[str, Any] = {}
    if layer.expert is not None:
        fields["expert"] = layer.expert
    if layer.quantisation is not None:
        fields["quantisation"] = vars(layer.quantisation) | {"noise_floor": layer.noise_floor()}
    if layer.adapter is not None:
        fields["adapter"] = adapter_fields(layer.adapter)
    return fields


def stored_flags(layer: Layer, spectrum: Spectrum) -> tuple[Flag, ...]:
    """What a reader must know of numbers that lie at the floor, and of adapters that were never trained."""
    flags = []
    if layer.quantised:
        text = "the weights are dequantised: what is below the quantisation step is not theirs"
        flags.append(Flag("quantised", text))
    floor = layer.noise_floor()
    if floor is not None:
        at = _at_floor(spectrum, floor)
        if at:
            text = f"{', '.join(at)} may come from rounding alone, whose eigenvalues reach {floor:.3g}"
            flags.append(Flag("rounding-floor", text))
    if layer.adapter is not None and layer.adapter.used_rank() == 0:
        flags.append(Flag("untouched", "the update is zero: the adapter was not trained"))
    return tuple(flags)


def _at_floor(spectrum: Spectrum, floor: float) -> list[str]:
    """The numbers of a layer that rounding alone would give."""
    values, metrics = spectrum.eigenvalues, spectrum.metrics()
    found = []
    null = metrics.get("quasi_null") or 0
    if null and values[min(null, values.size) - 1] <= floor:
        found.append("quasi_null")
    rank = metrics.get("hard_rank") or 0
    if rank and values[values.size - rank] <= floor:
        found.append("hard_rank")
    edge = metrics.get("mp_lambda_plus")
    if edge is not None and edge <= floor:
        found.append("mp_sigma")
    return found
