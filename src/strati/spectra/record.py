"""A spectrum as plain values and back, to the last bit: what a store keeps and what travels between machines."""

from __future__ import annotations

import base64
import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.core.results import Flag, jsonable
from strati.spectra.bulk import Bulk
from strati.spectra.eigenvalues import Eigenvalues, pooled
from strati.spectra.entries import EntryTail
from strati.spectra.noise_model import NoiseModel
from strati.spectra.phases import Phase, PhaseVerdict
from strati.spectra.ranks import Gap
from strati.spectra.spectrum import Spectrum
from strati.spectra.tail import Tail
from strati.spectra.violations import Departure, Violation

if TYPE_CHECKING:
    from strati.core.results import FloatArray

LAYOUT = 4
"""Version of the record: what a store of another version holds is not mixed with this one's."""


def to_record(spectrum: Spectrum) -> dict[str, Any]:
    """Everything that a spectrum holds, as JSON's plain values.

    Examples:
        >>> from strati.spectra.spectrum import spectrum
        >>> sp = spectrum(np.random.default_rng(0).normal(size=(60, 40)))
        >>> from_record(to_record(sp)).to_json() == sp.to_json()
        True
    """
    found = spectrum.found
    record: dict[str, Any] = {
        "found": {
            "parts": [_packed(part) for part in found.parts],
            **{name: getattr(found, name) for name in _KEPT},
        },
        "goodness": spectrum.goodness,
    }
    for name in ("tail", "noise", "verdict", "gap", "entries", "quasi_null", "warnings"):
        record[name] = getattr(spectrum, name)
    plain: dict[str, Any] = jsonable(record)
    return plain


def from_record(record: dict[str, Any]) -> Spectrum:
    """The spectrum that a record was made of."""
    from strati.spectra.alternatives import Goodness

    kept = dict(record["found"])
    parts = tuple(_unpacked(text) for text in kept.pop("parts"))
    kept |= {"empty": tuple(kept["empty"]), "extents": tuple(kept["extents"])}
    found = Eigenvalues(values=pooled(parts, kept["problem"]), parts=parts, **kept)
    verdict = record["verdict"]
    entries = record["entries"] | {"mu": _number(record["entries"]["mu"])}
    return Spectrum(
        found=found,
        tail=_made(Tail, record["tail"]),
        noise=_noise(record["noise"]),
        verdict=None if verdict is None else PhaseVerdict(**(verdict | {"phase": Phase(verdict["phase"])})),
        gap=Gap(**record["gap"]),
        entries=EntryTail(**entries),
        quasi_null=record["quasi_null"],
        warnings=tuple(Flag(**flag) for flag in record["warnings"]),
        goodness=_made(Goodness, record["goodness"]),
    )


_KEPT = tuple(
    field.name for field in dataclasses.fields(Eigenvalues) if field.name not in ("values", "parts")
)


def _made(kind: Any, fields: dict[str, Any] | None) -> Any:
    return None if fields is None else kind(**fields)


def _noise(fields: dict[str, Any] | None) -> NoiseModel | None:
    if fields is None:
        return None
    violations = tuple(
        Departure(**(item | {"violation": Violation(item["violation"])})) for item in fields["violations"]
    )
    variances = tuple(fields["slice_variances"])
    return NoiseModel(
        **(fields | {"bulk": Bulk(**fields["bulk"]), "violations": violations, "slice_variances": variances})
    )


def _number(value: float | None) -> float:
    return float("nan") if value is None else value


def _packed(values: FloatArray) -> str:
    return base64.b64encode(np.ascontiguousarray(values, dtype="<f8").tobytes()).decode("ascii")


def _unpacked(text: str) -> FloatArray:
    return np.frombuffer(base64.b64decode(text), dtype="<f8").astype(np.float64)
