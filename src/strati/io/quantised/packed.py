"""One weight stored as codes and scales: what it is made of, and how to decode it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from strati.io.raw_checkpoint import Hint

if TYPE_CHECKING:
    from numpy.typing import NDArray

Get = Callable[[str], "NDArray[Any]"]
"""Gives one of a packed weight's tensors by its full name; of a stack of experts, one expert's part of it."""


@dataclass(frozen=True)
class Decoded:
    """The values of a quantised weight.

    Attributes:
        values: float32, in the weight's shape (of a stack: of one matrix).
        variance: Mean square of the error that rounding to these codes leaves in each entry: ``step^2 / 12``; of the
            values' shape, or one that numpy broadcasts to it.
    """

    values: NDArray[Any]
    variance: NDArray[Any]


@dataclass(frozen=True)
class Packed:
    """A weight that a file stores as several tensors.

    Attributes:
        name: The weight's name, as it was before it was quantised.
        shape: Its shape, ``(out, in)``, with a leading axis where experts are fused.
        scheme: Who stored it so: ``gptq``, ``awq``, ``bitsandbytes-nf4``, ``fp8``, ``compressed-tensors``, ...
        bits: Bits per entry, scales left out.
        group: Entries that share a scale along the inputs; ``None`` where a row or the whole tensor does.
        members: The tensors it is made of.
        decode: Makes values of them.
        stacked: Of more than two axes, its tensors have the leading ones too, so that one expert can be decoded alone.
        hint: What the scheme knows about its layout.
    """

    name: str
    shape: tuple[int, ...]
    scheme: str
    bits: int
    group: int | None
    members: tuple[str, ...]
    decode: Callable[[Get], Decoded]
    stacked: bool = True
    hint: Hint | None = None


def weight_settings(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What compressed-tensors' configuration says of weights, group by group.

    Examples:
        >>> weight_settings({"config_groups": {"group_0": {"weights": {"num_bits": 4}}, "group_1": None}})
        [{'num_bits': 4}]
    """
    groups = config.get("config_groups")
    told = (
        [g.get("weights") for g in groups.values() if isinstance(g, Mapping)]
        if isinstance(groups, Mapping)
        else []
    )
    return [weights for weights in told if isinstance(weights, Mapping)]


def configured_bits(config: Mapping[str, Any]) -> set[int]:
    """The numbers of bits that the configuration's groups name."""
    return {w["num_bits"] for w in weight_settings(config) if type(w.get("num_bits")) is int}


class SchemeMismatchError(Exception):
    """Tensors that look like a scheme's but do not fit together; the message says how."""
