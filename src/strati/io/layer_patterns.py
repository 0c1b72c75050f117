"""Which layers are meant: patterns over names, roles and blocks, one rule for ``layers=`` and ``--layers``.

A pattern is one of

- a shell pattern (``*``, ``?``, ``[...]``), matched against the layer's, the tensor's and the module's name:
  ``fc1`` is ``fc1.weight``, ``h.*.mlp.c_fc`` is that layer of every block;
- ``role:PATTERN``, matched against the role: ``role:mlp.*``;
- ``block:3``, ``block:3-7`` or ``block:0,3-7``: the blocks of these numbers;
- any of these behind a ``!``: leave those out.

Layers that match any pattern are taken, less those that a ``!`` leaves out; where every pattern has a ``!``, the rest
of the network is taken. A pattern that matches nothing is an error, so that a misspelt one is not silently ignored.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Protocol, TypeVar

from strati.core.errors import BadInputError
from strati.io.roles import Role, blocks, role_of


class Selectable(Protocol):
    """Anything with a name, the name of its tensor, a role and a block; :class:`~strati.io.layers.Layer` is."""

    @property
    def name(self) -> str:
        """The layer's name."""

    @property
    def tensor(self) -> str:
        """The tensor that it is, or is part of."""

    @property
    def role(self) -> Role:
        """What it does."""

    @property
    def block(self) -> int | None:
        """The block it belongs to."""


L = TypeVar("L", bound=Selectable)


def select(layers: Sequence[L], patterns: str | Iterable[str] | None) -> tuple[L, ...]:
    """The layers that the patterns mean, in their own order; all of them where there is no pattern.

    Args:
        layers: What there is to choose from.
        patterns: One pattern or several, as the module's docstring has them.

    Raises:
        BadInputError: A pattern matches nothing (the nearest layers are named), or nothing is left.

    Examples:
        >>> import numpy as np, strati
        >>> net = strati.open({f"h.{i}.{n}.weight": np.eye(2) for i in range(3) for n in ("attn.q_proj", "mlp.fc1")})
        >>> [layer.name for layer in select(net.layers(), ["role:mlp.*", "!block:1-2"])]
        ['h.0.mlp.fc1.weight']
        >>> select(net.layers(), "h.0.mlp.fc2")
        Traceback (most recent call last):
        strati.core.errors.BadInputError: h.0.mlp.fc2: matches no layer; nearest: h.0.mlp.fc1, ...
    """
    wanted = as_patterns(patterns)
    if not wanted:
        return tuple(layers)
    only_left_out = all(pattern.startswith("!") for pattern in wanted)
    taken = set(range(len(layers))) if only_left_out else set()
    left_out: set[int] = set()
    for pattern in wanted:
        found = _matching(layers, pattern.removeprefix("!"), pattern)
        if pattern.startswith("!"):
            left_out |= found
        else:
            taken |= found
    if not taken - left_out:
        raise BadInputError(", ".join(wanted), f"leaves none of the {len(layers)} layers; drop a '!' pattern")
    return tuple(layer for index, layer in enumerate(layers) if index in taken - left_out)


def select_names(
    names: Iterable[str], patterns: str | Iterable[str] | None, *, whole_blocks: bool = False
) -> tuple[str, ...]:
    """Like :func:`select` for bare names of tensors or modules; roles and blocks are told from the names.

    Args:
        names: What there is to choose from.
        patterns: As in :func:`select`.
        whole_blocks: Names may be those of blocks themselves (``h.3``), not only of what lies in them.

    Examples:
        >>> select_names(["fc1", "fc2", "fc3"], "!fc2")
        ('fc1', 'fc3')
        >>> select_names(["h.0", "h.1", "h.2"], "block:1-2", whole_blocks=True)
        ('h.1', 'h.2')
    """
    listed = list(names)
    inside = {name: f"{name.partition(':')[0]}.any.weight" if whole_blocks else name for name in listed}
    found = blocks(inside.values())
    number = {name: found[inside[name]] for name in listed}
    return tuple(
        item.name
        for item in select([_Bare(n, n, role_of(n, number[n]), number[n]) for n in listed], patterns)
    )


def as_patterns(patterns: str | Iterable[str] | None) -> tuple[str, ...]:
    """What users may pass as ``layers=``: nothing, one pattern, or several.

    Raises:
        BadInputError: Something else, or an empty pattern.

    Examples:
        >>> as_patterns(None), as_patterns("fc*"), as_patterns(["fc1", "!fc2"])
        ((), ('fc*',), ('fc1', '!fc2'))
    """
    if patterns is None:
        return ()
    try:
        listed = (patterns,) if isinstance(patterns, str) else tuple(patterns)
    except TypeError:
        raise BadInputError("layers", f"must be patterns, not a {type(patterns).__name__}") from None
    for pattern in listed:
        if not isinstance(pattern, str):
            raise BadInputError("layers", f"must be patterns (text), not a {type(pattern).__name__}")
        if not pattern.removeprefix("!").strip():
            raise BadInputError("layers", "has an empty pattern; give a layer's name, or '*' for all")
    return listed


def module_name(tensor: str) -> str:
    """The module that a tensor belongs to: its name without the last word, or itself where it has one word.

    Examples:
        >>> module_name("h.0.mlp.c_fc.weight"), module_name("dense/dense_1/kernel:0"), module_name("W1")
        ('h.0.mlp.c_fc', 'dense/dense_1', 'W1')
    """
    return re.sub(r"[./][^./]*$", "", tensor) or tensor


@dataclass(frozen=True)
class _Bare:
    name: str
    tensor: str
    role: Role
    block: int | None


def _matching(layers: Sequence[Selectable], pattern: str, written: str) -> set[int]:
    kind, colon, rest = pattern.partition(":")
    if colon and kind == "role":
        found = {i for i, layer in enumerate(layers) if fnmatchcase(str(layer.role), rest)}
        if not found:
            there = ", ".join(sorted({str(layer.role) for layer in layers}))
            raise BadInputError(written, f"no layer has this role; the roles here are: {there or 'none'}")
        return found
    if colon and kind == "block":
        return _in_blocks(layers, rest, written)
    found = {i for i, layer in enumerate(layers) if any(_fits(name, pattern) for name in _names(layer))}
    if not found:
        raise BadInputError(written, f"matches no layer; {_nearest(layers, pattern)}")
    return found


def _names(layer: Selectable) -> tuple[str, str, str]:
    return layer.name, layer.tensor, module_name(layer.tensor)


def _fits(name: str, pattern: str) -> bool:
    # A name may itself hold brackets ("c_attn.weight[q]"), which a shell pattern would read as a set of letters.
    return name == pattern or fnmatchcase(name, pattern)


def _in_blocks(layers: Sequence[Selectable], ranges: str, written: str) -> set[int]:
    wanted: set[int] = set()
    known = {layer.block for layer in layers if layer.block is not None}
    for part in ranges.split(","):
        ends = re.fullmatch(r"\s*([0-9]{1,8})\s*(?:-\s*([0-9]{1,8})\s*)?", part)
        if ends is None:
            raise BadInputError(written, "is not a range of blocks; write block:3, block:3-7 or block:0,3-7")
        first, last = int(ends[1]), int(ends[2] or ends[1])
        if first > last:
            raise BadInputError(written, f"runs backwards; write block:{last}-{first}")
        wanted |= {number for number in known if first <= number <= last}
    if not wanted:
        there = f"the blocks here are {min(known)} to {max(known)}" if known else "no layer here has a block"
        raise BadInputError(written, f"matches no layer; {there}")
    return {i for i, layer in enumerate(layers) if layer.block in wanted}


def _nearest(layers: Sequence[Selectable], pattern: str) -> str:
    """The layers whose names are nearest: those that contain its letters first, then by similarity."""
    names = list(dict.fromkeys(module_name(layer.tensor) for layer in layers))
    if not names:
        return "there are no layers"
    plain = re.sub(r"[*?\[\]!]", "", pattern)
    inside = [name for name in names if plain and plain.lower() in name.lower()]
    close = difflib.get_close_matches(plain, names, n=3, cutoff=0.3)
    listed = list(dict.fromkeys([*inside, *close]))[:3] or names[:3]
    hint = f"; write '*{plain}*' to match part of a name" if inside and "*" not in pattern else ""
    return f"nearest: {', '.join(listed)}{hint}"
