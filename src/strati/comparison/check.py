"""Damage in a network, for continuous integration: what was found, and whether the network passes.

By default every floating-point tensor is read once (:mod:`~strati.comparison.damage`), and names and shapes
are held against what should be there (:mod:`~strati.comparison.expected_tensors`). Spectra are computed where a code
asks for them. With a base, the codes of the comparison are added: the kinds of update (``untouched``, ``rounding``,
``low-rank``, ``dense``, ``undecided``) and ``moved-vectors``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Unpack

from strati.comparison.check_codes import CODES as CODES
from strati.comparison.check_codes import INTEGRITY as INTEGRITY
from strati.comparison.compare import CompareConfig, compare
from strati.comparison.damage import (
    Finding,
    TensorSummary,
    damage,
    duplicates,
    odd_ones,
    summarise,
)
from strati.comparison.expected_tensors import Expectation, expectation, is_known_buffer
from strati.comparison.matching import bare_names
from strati.comparison.update_rank import UpdateKind
from strati.core.display import printable
from strati.core.errors import BadInputError, IncompleteError
from strati.core.options import nearest, resolve
from strati.core.results import Result, Tick, silent
from strati.io.adapters.merge import is_adapter
from strati.io.layers import as_patterns, select
from strati.io.network import Network, Openable
from strati.io.network import open as open_network
from strati.io.roles import Role
from strati.spectra.scan import scan
from strati.spectra.verdicts import Phase

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import RenderableType

    from strati.comparison.results import ComparedLayer, Comparison
    from strati.core.option_types import CheckOptions
    from strati.schemas.json_types import CheckFields

_KINDS = frozenset(UpdateKind)
_OF_BASE = _KINDS | {
    "shapes-differ",
    "unmatched-layers",
    "vocabulary-resized",
    "rounded-worse",
    "moved-vectors",
}
_OF_MODEL = frozenset(CODES) - (_OF_BASE - {"untouched"})
_CHANGES = tuple(sorted(_OF_BASE - {"untouched", "rounding"}))
_OF_FILE = frozenset(
    {
        "adapter-scale-unknown",
        "dora-without-base",
        "adapter-changed-base",
        "adapter-not-read",
        "left-aside",
        "wrong-ending",
        "no-matrices",
        "unlisted-tensors",
        "lambda-layer",
    }
)
_OF_SPECTRA = _OF_MODEL - _OF_FILE - _OF_BASE - set(INTEGRITY)
_ZERO_CENTRED = ("gemma", "recurrent_gemma", "qwen3_next", "nemotron")
_MOST_LINES = 10


@dataclass(frozen=True)
class CheckConfig:
    """Options of a check.

    Attributes:
        fail_on: The codes that let a network fail: a list, or text with commas between them. ``None`` for all codes of
            damage and, with a base, every change that is no named conversion or rounding to another dtype.
        spectra: Compute spectra as well, and report their codes and ``rank-collapse``.
        layers: Patterns over names, roles and blocks; empty for all tensors.
        seed: Random seed of the simulated rounding noise.
        workers: Layers analysed at once; 0 or ``None`` for one per processor.
    """

    fail_on: str | Sequence[str] | None = None
    spectra: bool = False
    layers: str | Sequence[str] | None = None
    seed: int = 0
    workers: int | None = None

    def __post_init__(self) -> None:
        """Refuse unknown codes before any work is done."""
        as_patterns(self.layers)
        if self.workers is not None and self.workers < 0:
            raise BadInputError("workers", "must be 0 (one per processor) or more")
        if not self.codes():
            raise BadInputError("fail-on", f"names no code; there are {', '.join(CODES)}")
        for code in self.codes():
            if code not in CODES:
                raise BadInputError("fail-on", f"no code {code!r}; {nearest(code, CODES)}")

    def codes(self, *, with_base: bool = False) -> tuple[str, ...]:
        """The codes that fail, one by one."""
        if self.fail_on is None:
            return (*INTEGRITY, *_CHANGES) if with_base else INTEGRITY
        texts = [self.fail_on] if isinstance(self.fail_on, str) else list(self.fail_on)
        words = [code.strip() for text in texts for code in str(text).split(",")]
        return tuple(dict.fromkeys(code for code in words if code))


@dataclass(frozen=True)
class Check(Result):
    """What a check found.

    Attributes:
        model: The network that was checked.
        base: What it was compared with, if anything.
        fail_on: The codes that let it fail.
        tensors: Number of tensors in the network.
        checked: Number of floating-point tensors that were looked at.
        finite: How many of them are finite.
        layers: Number of weight matrices that are there.
        expected_layers: Number of weight matrices that should be there.
        found: What was found, in the network's order.
        evidence: The comparison behind it, for a page.
    """

    verb: ClassVar[str] = "check"

    model: str
    base: str | None
    fail_on: tuple[str, ...]
    tensors: int
    checked: int
    finite: int
    layers: int
    expected_layers: int
    found: tuple[Finding, ...]
    evidence: tuple[Result, ...] = field(default=(), repr=False)

    @property
    def passed(self) -> bool:
        """Whether nothing was found that lets the network fail."""
        return not any(self._fails(finding) for finding in self.found)

    def _fails(self, finding: Finding) -> bool:
        changed = {"low-rank", "dense"} & set(self.fail_on)  # an undecided change may be either
        same_dtype = finding.code == "rounding" and "moved-vectors" in self.fail_on
        return finding.code in self.fail_on or (finding.code == "undecided" and bool(changed)) or same_dtype

    def payload(self) -> CheckFields:
        """What was looked for and found."""
        return {
            "model": self.model,
            "base": self.base,
            "fail_on": self.fail_on,
            "tensors": self.tensors,
            "checked": self.checked,
            "found": self.found,
            "passed": self.passed,
        }

    def frame(self) -> pd.DataFrame:
        """One row per finding."""
        import pandas as pd

        return pd.DataFrame([vars(finding) for finding in self.found], columns=["layer", "code", "text"])

    def summary(self) -> RenderableType:
        """The answer, then one line per finding, then what to run next."""
        from rich.console import Group

        from strati.core.display import NextCommand, Paragraph, command_path

        failures = [finding for finding in self.found if self._fails(finding)]
        notes = [finding for finding in self.found if not self._fails(finding)]
        lines = [self._answer(failures)]
        lines += [
            f"{printable(self.model if finding.layer is None else finding.layer, 120)}: {finding.code}: "
            f"{printable(finding.text, 300)}"
            for finding in _first_of_each_code(failures)
        ]
        failed = Counter(finding.code for finding in failures)
        lines += [
            f"{count - _MOST_LINES} more with {code}; --json - lists all"
            for code, count in failed.items()
            if count > _MOST_LINES
        ]
        if notes:
            count = f"{len(notes)} note{'s do' if len(notes) > 1 else ' does'}"
            by_code = ", ".join(
                f"{code} {n}" for code, n in Counter(note.code for note in notes).most_common()
            )
            lines.append(f"{count} not fail the check ({by_code}); --json - lists all")
        explain = f"strati explain {failures[0].code if failures else 'wild-entry'}"
        commands: tuple[str, ...] = (explain,)
        if Path(self.model).exists():
            base = "" if self.base is None else f"{command_path(self.base)} "
            model = command_path(self.model)
            compare = (f"strati compare {base}{model}",) if base else ()
            commands = (*compare, f"strati scan {model}", explain)
        return Group(*(Paragraph(line) for line in lines), NextCommand(commands))

    def _answer(self, failures: Sequence[Finding]) -> str:
        counts = (
            f"{self.finite} of {self.checked} tensors finite,"
            f" {self.layers} of {self.expected_layers} expected layers present"
        )
        if failures:
            first = failures[0]
            where = printable("the file" if first.layer is None else first.layer, 50)
            more = f" and {len(failures) - 1} more" if len(failures) > 1 else ""
            return f"FAIL: {first.code} in {where}{more}. {counts[0].upper()}{counts[1:]}."
        if set(INTEGRITY) <= set(self.fail_on):
            return f"{counts}, no damage found."
        return f"PASS: {_counted(self.checked, 'tensor')}, none {_either(self.fail_on)}."


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _either(codes: Sequence[str]) -> str:
    if len(codes) > 6:
        return f"with any of {len(codes)} codes"
    return codes[0] if len(codes) == 1 else f"{', '.join(codes[:-1])} or {codes[-1]}"


def check(
    model: Openable,
    base: Openable | None = None,
    *,
    config: CheckConfig | None = None,
    tick: Tick = silent,
    **options: Unpack[CheckOptions],
) -> Check:
    """Look for damage in a network, alone or against its base.

    Args:
        model: The network, whatever names it.
        base: What it was made from; needed for kinds of update.
        config: Options; or give them by name.
        tick: Called after each tensor, and after each layer that is compared or scanned.
        **options: Fields of :class:`CheckConfig`; ``jobs`` is an alias of ``workers``.

    Raises:
        BadInputError: An unknown code, or one that needs a base where none is given.

    Examples:
        >>> import numpy as np
        >>> checked = check({"fc.weight": np.full((4, 3), 0.5, np.float32)})
        >>> checked.passed, [(finding.layer, finding.code) for finding in checked.found]
        (False, [('fc.weight', 'constant')])
    """
    settings = resolve(CheckConfig, config, options, of=check)
    failing_codes = settings.codes(with_base=base is not None)
    needs_base = [code for code in failing_codes if code in _OF_BASE - _OF_MODEL]
    if base is None and needs_base:
        raise BadInputError("check", f"{needs_base[0]} is decided against a base; give `base` as well")
    try:
        network = open_network(model)
    except IncompleteError as error:
        missing = [
            Finding(name, "missing-tensors", "the index lists it, its shard lacks it") for name in error.names
        ]
        if "missing-tensors" not in failing_codes:
            raise
        return Check(str(model), None, failing_codes, 0, 0, 0, 0, len(missing), tuple(missing))
    explicit = settings.fail_on is not None
    comparison: Comparison | None = None
    findings: list[Finding] = []
    looked = _look(network, settings, tick)
    findings += [finding for finding in looked.findings if not explicit or finding.code in failing_codes]
    findings += [
        Finding(None, flag.code, flag.text)
        for flag in (network.warnings if "no-matrices" in failing_codes else network.contents.warnings)
        if flag.code in _OF_FILE and flag.code in failing_codes
    ]
    if base is not None:
        compare_settings = CompareConfig(
            layers=settings.layers, seed=settings.seed, workers=settings.workers, eigenvalues=True
        )
        other = open_network(base)
        comparison = compare(other, network, config=compare_settings, tick=tick)
        findings += _against_base(comparison, failing_codes)
        if not explicit:
            findings += _rounded_in_one_dtype(comparison, other, network)
        findings += [finding for finding in _vectors_of_one(other, network) if finding.code in failing_codes]
    if settings.spectra or _OF_SPECTRA & set(failing_codes):
        codes = frozenset(failing_codes) if explicit else _OF_SPECTRA
        findings += _spectral(network, settings, codes, tick)
    return Check(
        model=str(network.path),
        base=str(open_network(base).path) if base is not None else None,
        fail_on=failing_codes,
        tensors=len(network.tensors),
        checked=looked.checked,
        finite=looked.finite,
        layers=looked.matrices,
        expected_layers=looked.matrices + looked.expected.missing_matrices,
        found=tuple(dict.fromkeys(findings)),
        evidence=(comparison,) if comparison is not None else (),
    )


@dataclass(frozen=True)
class _Look:
    """What one pass over the tensors gave."""

    findings: tuple[Finding, ...]
    checked: int
    finite: int
    matrices: int
    expected: Expectation


def _look(network: Network, settings: CheckConfig, tick: Tick) -> _Look:
    names = None
    if as_patterns(settings.layers):
        names = {layer.tensor for layer in select(network.layers(), settings.layers)}
    summaries: list[TensorSummary] = []
    buffers: list[TensorSummary] = []
    matrices = 0
    for tensor in network.tensors:
        small_float = tensor.dtype.startswith("float8_") and not tensor.quantised
        if (tensor.floating or small_float) and tensor.size and (names is None or tensor.name in names):
            buffer = is_known_buffer(tensor)
            exact = not tensor.quantised and not small_float
            if tensor.name in network.contents.adapters:
                summary = _of_update(network, tensor.name)
            else:
                summary = summarise(tensor.name, network.read(tensor.name), exact=exact)
            (buffers if buffer else summaries).append(summary)
            matrices += not buffer and not summary.vector
        tick(tensor.name)
    expected = expectation(network) if names is None else Expectation((), 0)
    kind = str((network.config or {}).get("model_type", ""))
    findings = [*damage(summaries, table=_is_table(network), zero_centred=kind.startswith(_ZERO_CENTRED))]
    # A causal mask holds minus infinity; NaN in running statistics is damage.
    findings += [f for f in damage(buffers) if f.code == "not-finite" and not _is_mask(network, f)]
    if not is_adapter(network):
        plain = [summary for summary in summaries if summary.exact]
        damaged = {finding.layer for finding in findings}  # a hole or a wild entry changes the scale
        findings += odd_ones([summary for summary in plain if summary.name not in damaged])
        findings += duplicates(plain, network.read, network.contents.ties)
    findings += expected.findings
    order = {tensor.name: place for place, tensor in enumerate(network.tensors)}
    findings.sort(key=lambda finding: order.get(finding.layer or "", len(order)))
    everything = [*summaries, *buffers]
    finite = sum(not summary.not_finite for summary in everything)
    return _Look(tuple(findings), len(everything), finite, matrices, expected)


def _of_update(network: Network, name: str) -> TensorSummary:
    """The factors of a low-rank update in one summary: only whether they are finite matters."""
    import numpy as np

    factors = [np.asarray(factor).reshape(-1) for factor in network.contents.adapters[name].factors()]
    summary = summarise(name, np.concatenate(factors), exact=False)
    return TensorSummary(**{**vars(summary), "shape": (len(factors), summary.size // len(factors))})


def _is_table(network: Network) -> Callable[[str], bool]:
    def table(name: str) -> bool:
        return network.names.by_role(name) in (Role.EMBEDDING, Role.HEAD)

    return table


def _is_mask(network: Network, finding: Finding) -> bool:
    return finding.layer is not None and "mask" in finding.layer.lower()


def _first_of_each_code(findings: Sequence[Finding]) -> Iterator[Finding]:
    """At most ten findings of each code."""
    counts: Counter[str] = Counter()
    for finding in findings:
        counts[finding.code] += 1
        if counts[finding.code] <= _MOST_LINES:
            yield finding


def _spectral(
    network: Network, settings: CheckConfig, codes: frozenset[str], tick: Tick
) -> Iterator[Finding]:
    names = {layer.name for layer in select(network.layers(), settings.layers)}
    if not names and is_adapter(network):
        return
    for scanned in scan(network, layers=settings.layers, workers=settings.workers, tick=tick):
        if scanned.layer.name not in names:
            continue
        for flag in scanned.row()["warnings"]:
            if flag.code in codes and flag.code not in INTEGRITY:
                yield Finding(scanned.layer.name, flag.code, flag.text)
        if scanned.spectrum.phase == Phase.RANK_COLLAPSE and "rank-collapse" in codes:
            text = "almost all of its singular values vanish beside the others"
            yield Finding(scanned.layer.name, "rank-collapse", text)


def _against_base(comparison: Comparison, failing_codes: Sequence[str]) -> Iterator[Finding]:
    kinds = _KINDS & set(failing_codes)
    if kinds & {UpdateKind.LOW_RANK, UpdateKind.DENSE}:
        kinds |= {UpdateKind.UNDECIDED}  # it changed, and may have changed in this way
    for layer in comparison.layers:
        name = layer.partner[-1]
        if layer.update_kind in kinds:
            yield Finding(name, str(layer.update_kind), _kind_text(layer.update_kind, layer.update_rank))
        for flag in layer.warnings:
            if flag.code in failing_codes and flag.code in _OF_BASE:
                yield Finding(name, flag.code, flag.text)
    if "moved-vectors" in failing_codes and comparison.movement is not None:
        for name in comparison.movement.moved_vectors:
            yield Finding(name, "moved-vectors", "differs from the base by more than rounding")
    if "unmatched-layers" in failing_codes:
        for lost in comparison.unmatched:
            where = "the base" if lost.network == 0 else "the model"
            yield Finding(lost.name, "unmatched-layers", f"only {where} has it")


def _vectors_of_one(base: Network, network: Network) -> Iterator[Finding]:
    """Vectors that only one of two networks has, where both use the same names for most of their tensors."""
    before, after = (
        dict(zip(bare_names([t.name for t in net.tensors]), net.tensors, strict=True))
        for net in (base, network)
    )
    if is_adapter(network) or 2 * len(before.keys() & after.keys()) <= max(len(before), len(after)):
        return
    for name, tensor in (*before.items(), *after.items()):
        vector = tensor.floating and tensor.size == max(tensor.shape, default=1)
        if not vector or is_known_buffer(tensor) or (name in before and name in after):
            continue
        if name in before:
            yield Finding(tensor.name, "missing-tensors", "only the base has it")
        else:
            yield Finding(tensor.name, "unexpected-tensors", "the base does not have it")


def _rounded_in_one_dtype(comparison: Comparison, base: Network, network: Network) -> Iterator[Finding]:
    """Layers that changed by rounding, although both files store them in one dtype and nothing was converted."""
    before = {layer.name: layer for layer in base.layers()}
    after = {layer.name: layer for layer in network.layers()}

    def same(layer: ComparedLayer) -> bool:
        a, b = before.get(layer.name), after.get(layer.partner[-1])
        return a is not None and b is not None and a.dtype == b.dtype and not (a.quantised or b.quantised)

    for layer in comparison.layers:
        if layer.update_kind == UpdateKind.ROUNDING and layer.aligned is None and same(layer):
            text = "changed by about one rounding step, although both files have one dtype"
            yield Finding(layer.partner[-1], "rounding", text)


def _kind_text(kind: str | None, rank: int | None) -> str:
    if kind == UpdateKind.UNTOUCHED:
        return "the same as in the base, bit for bit"
    if kind == UpdateKind.ROUNDING:
        return "the same as in the base up to rounding"
    if kind == UpdateKind.UNDECIDED:
        return "changed by less than the dtype resolves: low-rank or dense cannot be decided"
    return f"differs from the base in {rank} direction{'s' if rank != 1 else ''} beyond rounding"
