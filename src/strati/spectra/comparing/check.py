"""A network held against a list of codes, for continuous integration: what was found, and whether it passes.

The codes are those of ``warnings`` (of a scan, of the file, and, with a base, of the comparison) and, with a base,
the kinds of update: ``untouched``, ``rounding``, ``low-rank``, ``dense``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from strati.errors import BadInputError
from strati.network.adapters.merge import is_adapter
from strati.network.open import Network, Openable
from strati.network.open import open as open_network
from strati.network.select import as_patterns, select
from strati.options import nearest, resolve
from strati.spectra.comparing.compare import CompareConfig, compare
from strati.spectra.comparing.update_rank import UpdateKind
from strati.spectra.scan import Scanned, scan
from strati.text import printable
from strati.types import Flag, Result, Tick, silent

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import RenderableType

    from strati.spectra.comparing.results import Comparison

CODES = {
    "not-finite": "some weights are NaN or infinite",
    "out-of-range": "squares of the weights leave float64's range",
    "constant": "all weights of a layer are equal",
    "empty": "a matrix without entries",
    "zero-rows": "whole rows or columns are zero",
    "noise-like": "the spectrum cannot be told from that of random weights",
    "structured-noise": "the noise is not independent: an assumption of the tests fails",
    "heavy-entries": "entries with a heavy tail: an assumption of the tests fails",
    "null-in-noise": "a null direction inside noise",
    "orthogonal": "all singular values are equal",
    "no-bulk": "no Marchenko-Pastur bulk",
    "no-tail": "no power-law tail",
    "short-tail": "too few eigenvalues in the tail",
    "gradual-tail": "a tail without a clear start: alpha's error may be too small",
    "few-eigenvalues": "too few eigenvalues for a fit",
    "spikes-capped": "more spikes than are counted",
    "coarse-dtype": "the dtype hides small singular values",
    "quantised": "the weights were dequantised",
    "rounding-floor": "a number lies at the floor that rounding puts under the spectrum",
    "adapter-scale-unknown": "no file says how an adapter's updates are scaled",
    "dora-without-base": "DoRA's updates without their base",
    "adapter-changed-base": "an adapter whose initialisation changed the base's weights",
    "adapter-not-read": "a model holds adapters of a kind that is not read",
    "left-aside": "a checkpoint holds more than the network",
    "wrong-ending": "a file's ending does not match its content",
    "no-matrices": "a network without any weight matrix",
    "stale-shard": "a shard that the index does not list",
    "unlisted-tensors": "a shard holds tensors that the index does not list",
    "lambda-layer": "a Keras Lambda layer, whose code is not run",
    "shapes-differ": "a layer has another shape than in the base",
    "unmatched-layers": "a layer has no partner in the base",
    "vocabulary-resized": "the vocabulary has another size than the base's",
    "rounded-worse": "quantisation left a larger error than its step predicts",
    "untouched": "a layer that is the base's, bit for bit; an adapter that was never trained",
    "rounding": "a layer that is the base's up to rounding",
    "low-rank": "a layer that a low-rank update changed",
    "dense": "a layer that changed in all directions",
}
"""Every code that ``fail_on`` takes, and what it says of a layer or file."""

_KINDS = frozenset(UpdateKind)
_OF_BASE = _KINDS | {"shapes-differ", "unmatched-layers", "vocabulary-resized", "rounded-worse"}
_OF_MODEL = frozenset(CODES) - (_OF_BASE - {"untouched"})


@dataclass(frozen=True)
class CheckConfig:
    """Options of a check.

    Attributes:
        fail_on: The codes that let a network fail: a list, or text with commas between them.
        layers: Patterns over names, roles and blocks; empty for all layers.
        seed: Random seed of the simulated rounding noise.
        workers: Layers analysed at once; 0 for one per processor.
    """

    fail_on: str | Sequence[str] = ("not-finite", "out-of-range", "constant")
    layers: str | Sequence[str] | None = None
    seed: int = 0
    workers: int = 0

    def __post_init__(self) -> None:
        """Refuse unknown codes before any work is done."""
        as_patterns(self.layers)
        if self.workers < 0:
            raise BadInputError("workers", "must be 0 (one per processor) or more")
        if not self.codes():
            raise BadInputError("fail-on", f"names no code; there are {', '.join(CODES)}")
        for code in self.codes():
            if code not in CODES:
                raise BadInputError("fail-on", f"no code {code!r}; {nearest(code, CODES)}")

    def codes(self) -> tuple[str, ...]:
        """The codes one by one."""
        given = [self.fail_on] if isinstance(self.fail_on, str) else list(self.fail_on)
        listed = [code.strip() for text in given for code in str(text).split(",")]
        return tuple(dict.fromkeys(code for code in listed if code))


@dataclass(frozen=True)
class Finding:
    """One thing that was looked for and found; ``layer`` is ``None`` where it is about the file."""

    layer: str | None
    code: str
    text: str


@dataclass(frozen=True)
class Check(Result):
    """What a check found.

    Attributes:
        model: The network that was checked.
        base: What it was compared with, if anything.
        fail_on: What was looked for.
        checked: How many layers were looked at.
        found: What was found, in the network's order.
        evidence: The comparison behind it, for a page.
    """

    verb: ClassVar[str] = "check"

    model: str
    base: str | None
    fail_on: tuple[str, ...]
    checked: int
    found: tuple[Finding, ...]
    evidence: tuple[Result, ...] = field(default=(), repr=False)

    @property
    def passed(self) -> bool:
        """Whether nothing was found."""
        return not self.found

    def payload(self) -> dict[str, Any]:
        """What was looked for and found."""
        return {
            "model": self.model,
            "base": self.base,
            "fail_on": self.fail_on,
            "checked": self.checked,
            "found": self.found,
            "passed": self.passed,
        }

    def frame(self) -> pd.DataFrame:
        """One row per finding."""
        import pandas as pd

        return pd.DataFrame([vars(item) for item in self.found], columns=["layer", "code", "text"])

    def summary(self) -> RenderableType:
        """One line per finding, then whether it passes."""
        from rich.text import Text

        lines = []
        for item in self.found:
            where = self.model if item.layer is None else item.layer
            lines.append(f"{printable(where, 120)}: {item.code}: {printable(item.text, 300)}")
        verdict = "passed" if self.passed else f"FAILED: {len(self.found)} found"
        lines.append(f"{verdict}; looked for {', '.join(self.fail_on)} in {self.checked} layers")
        return Text("\n".join(lines))


def check(
    model: Openable,
    base: Openable | None = None,
    *,
    config: CheckConfig | None = None,
    tick: Tick = silent,
    **options: Any,
) -> Check:
    """Look for codes in a network, alone or against its base.

    Args:
        model: The network, whatever names it.
        base: What it was made from; needed for kinds of update.
        config: Options; or give them by name.
        tick: Called after each layer of each network.
        **options: Fields of :class:`CheckConfig`; ``jobs`` is an alias of ``workers``.

    Raises:
        BadInputError: An unknown code, or one that needs a base where none is given.

    Examples:
        >>> import numpy as np
        >>> found = check({"fc.weight": np.full((4, 3), 0.5, np.float32)}, fail_on="constant")
        >>> found.passed, [(x.layer, x.code) for x in found.found]
        (False, [('fc.weight', 'constant')])
    """
    chosen = resolve(CheckConfig, config, options, of=check)
    wanted = chosen.codes()
    needs_base = [code for code in wanted if code in _OF_BASE - _OF_MODEL]
    if base is None and needs_base:
        raise BadInputError("check", f"{needs_base[0]} is told against a base; give `base` as well")
    network = open_network(model)
    result: Comparison | None = None
    found: list[Finding] = []
    if base is not None:
        asked = CompareConfig(
            layers=chosen.layers, seed=chosen.seed, workers=chosen.workers, eigenvalues=True
        )
        result = compare(open_network(base), network, config=asked, tick=tick)
        found += _against_base(result, wanted)
    if _OF_MODEL & set(wanted):
        found += _alone(network, chosen, tick)
    checked = len(result.layers) if result is not None else len(select(network.layers(), chosen.layers))
    return Check(
        model=str(network.path),
        base=str(open_network(base).path) if base is not None else None,
        fail_on=wanted,
        checked=checked,
        found=tuple(dict.fromkeys(found)),
        evidence=(result,) if result is not None else (),
    )


def _against_base(result: Comparison, wanted: Sequence[str]) -> Iterator[Finding]:
    for layer in result.layers:
        name = layer.partner[-1]
        if layer.update_kind in wanted:
            yield Finding(name, str(layer.update_kind), _kind_text(layer.update_kind, layer.update_rank))
        for flag in layer.warnings:
            if flag.code in wanted and flag.code in _OF_BASE:
                yield Finding(name, flag.code, flag.text)
    if "unmatched-layers" in wanted:
        for lost in result.unmatched:
            where = "the base" if lost.network == 0 else "the model"
            yield Finding(lost.name, "unmatched-layers", f"only {where} has it")


def _kind_text(kind: str | None, rank: int | None) -> str:
    if kind == UpdateKind.UNTOUCHED:
        return "the same as in the base, bit for bit"
    if kind == UpdateKind.ROUNDING:
        return "the same as in the base up to rounding"
    return f"differs from the base in {rank} direction{'s' if rank != 1 else ''} beyond rounding"


def _alone(network: Network, chosen: CheckConfig, tick: Tick) -> Iterator[Finding]:
    wanted = chosen.codes()
    for flag in network.warnings:
        if flag.code in wanted:
            yield Finding(None, flag.code, flag.text)
    names = {layer.name for layer in select(network.layers(), chosen.layers)}
    if not names and is_adapter(network):
        return
    for item in scan(network, layers=chosen.layers, workers=chosen.workers, tick=tick):
        if item.layer.name in names:
            for flag in _flags(item):
                if flag.code in wanted:
                    yield Finding(item.layer.name, flag.code, flag.text)


def _flags(item: Scanned) -> tuple[Flag, ...]:
    return tuple(item.row()["warnings"])
