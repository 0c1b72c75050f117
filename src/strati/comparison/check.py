"""Damage in a network, for continuous integration: what was found, and whether the network passes.

By default every floating-point tensor is read once (:mod:`~strati.comparison.damage`), and names and shapes
are compared with what should be there (:mod:`~strati.comparison.expected_tensors`). Spectra are computed where a code
or a limit asks for them. With a base, the codes of the comparison are added: the kinds of update (``untouched``,
``rounding``, ``low-rank``, ``dense``, ``undecided``) and ``moved-vectors``.
"""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

import numpy as np

from strati.comparison.compare import CompareConfig, compare
from strati.comparison.damage import Finding, TensorSummary, damage, duplicates, odd_ones, summarise
from strati.comparison.expected_tensors import Expectation, expectation, is_known_buffer
from strati.comparison.matching import bare_names
from strati.comparison.update_rank import UpdateKind
from strati.comparison.vectors import norm_offset
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

    from strati.comparison.results import Comparison
    from strati.core.option_types import CheckOptions


INTEGRITY = (
    *("not-finite", "constant", "missing-tensors", "unexpected-tensors", "odd-one-out", "hole"),
    *("wild-entry", "duplicate-tensors", "stale-shard", "size-mismatch"),
)
"""The codes of damage, which fail by default."""

OF_SPECTRA = (
    *("rank-collapse", "out-of-range", "empty", "zero-rows", "noise-like", "structured-noise"),
    *("heavy-entries", "null-in-noise", "orthogonal", "no-bulk", "no-tail", "short-tail", "gradual-tail"),
    *("few-eigenvalues", "spikes-capped", "coarse-dtype", "quantised", "rounding-floor"),
)
"""Codes that need spectra."""

OF_FILE = (
    *("adapter-scale-unknown", "dora-without-base", "adapter-changed-base", "adapter-not-read"),
    *("left-aside", "wrong-ending", "no-matrices", "unlisted-tensors", "lambda-layer"),
)
"""Codes of files."""

CHANGES = (
    *(UpdateKind.LOW_RANK, UpdateKind.DENSE, UpdateKind.UNDECIDED, "moved-vectors", "shapes-differ"),
    *("unmatched-layers", "vocabulary-resized", "rounded-worse"),
)
"""Codes that fail by default where there is a base: changes that are no conversion."""

OF_BASE = (UpdateKind.UNTOUCHED, UpdateKind.ROUNDING, *CHANGES)
"""Codes that need a base; an adapter that was never trained is ``untouched`` without one."""

CODES = tuple(map(str, (*INTEGRITY, *OF_SPECTRA, *OF_FILE, *OF_BASE)))
"""Every code that ``fail_on`` takes; docs/codes.md says what each means."""

OVER_LIMIT = "over-limit"
"""The code of a number beyond a limit that was asked for."""

NUMBERS_OF_BASE = (
    *("relative_change", "update_rank", "update_stable_rank", "subspace_overlap", "spectral_distance"),
    "agreement",
)
NUMBERS_OF_SPECTRA = (
    *("alpha", "stable_rank", "hard_rank", "entropy", "frobenius_norm", "spectral_norm", "spikes"),
    *("quasi_null", "mp_sigma", "mp_soft_rank", "tail_size"),
)
_SIGNS = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}
_LIMIT = re.compile(
    r"\s*([a-z_ ]+?)\s*(>=|<=|>|<)\s*([-+]?[0-9.]+(?:e[-+]?[0-9]+)?)\s*(%?)\s*", re.IGNORECASE
)
_MOST_LINES = 10


@dataclass(frozen=True)
class CheckConfig:
    """Options of a check.

    Attributes:
        fail_on: The codes that let a network fail: a list, or text with commas between them. ``None`` for all codes of
            damage and, with a base but without ``fail_if``, every change that is no named conversion or rounding to
            another dtype.
        fail_if: Limits on numbers of layers, such as ``changed > 20%`` (with a base) or ``alpha > 8``; one text or
            several.
        spectra: Compute spectra as well, and report their codes and ``rank-collapse``.
        layers: Patterns over names, roles and blocks; empty for all tensors.
        seed: Random seed of the simulated rounding noise.
        workers: Layers analysed at once; 0 or ``None`` for one per processor.
    """

    fail_on: str | Sequence[str] | None = None
    fail_if: str | Sequence[str] | None = None
    spectra: bool = False
    layers: str | Sequence[str] | None = None
    seed: int = 0
    workers: int | None = None

    def __post_init__(self) -> None:
        """Refuse unknown codes and numbers before any work is done."""
        as_patterns(self.layers)
        self.limits()
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
            return (*INTEGRITY, *sorted(CHANGES)) if with_base and not self.fail_if else INTEGRITY
        texts = [self.fail_on] if isinstance(self.fail_on, str) else list(self.fail_on)
        words = [code.strip() for text in texts for code in str(text).split(",")]
        return tuple(dict.fromkeys(code for code in words if code))

    def limits(self) -> tuple[NumberLimit, ...]:
        """The limits on numbers."""
        texts = [self.fail_if] if isinstance(self.fail_if, str) else list(self.fail_if or ())
        return tuple(NumberLimit.parse(text) for text in texts)


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
    failing_codes, limits = settings.codes(with_base=base is not None), settings.limits()
    needs_base = [code for code in failing_codes if code in CHANGES or code == UpdateKind.ROUNDING]
    needs_base += [limit.name for limit in limits if limit.name in NUMBERS_OF_BASE]
    if base is None and needs_base:
        raise BadInputError("check", f"{needs_base[0]} is decided against a base; give `base` as well")
    try:
        network = open_network(model)
    except IncompleteError as error:
        text = "the index lists it, its shard lacks it"
        missing = tuple(Finding(name, "missing-tensors", text) for name in error.names)
        if "missing-tensors" not in failing_codes:
            raise
        return Check(str(model), None, failing_codes, 0, 0, 0, 0, len(missing), missing)
    explicit = settings.fail_on is not None
    scan_look = _look(network, settings, tick)
    findings = [f for f in scan_look.findings if not explicit or f.code in failing_codes]
    findings += [
        Finding(None, flag.code, flag.text)
        for flag in (network.warnings if "no-matrices" in failing_codes else network.contents.warnings)
        if flag.code in OF_FILE and flag.code in failing_codes
    ]
    comparison: Comparison | None = None
    if base is not None:
        compare_settings = CompareConfig(
            layers=settings.layers, seed=settings.seed, workers=settings.workers, eigenvalues=True
        )
        other = open_network(base)
        comparison = compare(other, network, config=compare_settings, tick=tick)
        findings += _against_base(comparison, failing_codes, limits)
        if not explicit and not limits:
            findings += _rounded_in_one_dtype(comparison, other, network)
        findings += [f for f in _vectors_of_one(other, network) if f.code in failing_codes]
    by_spectra = any(limit.name not in NUMBERS_OF_BASE for limit in limits)
    if settings.spectra or by_spectra or _needs_spectra(failing_codes, base):
        codes = frozenset(failing_codes if explicit else OF_SPECTRA if settings.spectra else ())
        findings += _spectral(network, settings, codes, tick)
    return Check(
        model=str(network.path),
        base=str(open_network(base).path) if base is not None else None,
        fail_on=failing_codes,
        tensors=len(network.tensors),
        checked=scan_look.checked,
        finite=scan_look.finite,
        layers=scan_look.matrices,
        expected_layers=scan_look.matrices + scan_look.expected.missing_matrices,
        found=tuple(dict.fromkeys(findings)),
        fail_if=tuple(limit.text for limit in limits),
        evidence=(comparison,) if comparison is not None else (),
    )


def _needs_spectra(codes: Sequence[str], base: Openable | None) -> bool:
    return bool(set(OF_SPECTRA) & set(codes)) or (base is None and UpdateKind.UNTOUCHED in codes)


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
    for tensor in network.tensors:
        small_float = tensor.dtype.startswith("float8_") and not tensor.quantised
        if (tensor.floating or small_float) and tensor.size and (names is None or tensor.name in names):
            exact = not tensor.quantised and not small_float
            if tensor.name in network.contents.adapters:
                summary = _of_update(network, tensor.name)
            else:
                summary = summarise(tensor.name, network.read(tensor.name), exact=exact)
            (buffers if is_known_buffer(tensor) else summaries).append(summary)
        tick(tensor.name)
    expected = expectation(network) if names is None else Expectation((), 0)

    def is_table(name: str) -> bool:
        return network.names.by_role(name) in (Role.EMBEDDING, Role.HEAD)

    findings = damage(summaries, table=is_table, zero_centred=bool(norm_offset(network)))
    # A causal mask holds minus infinity; NaN in running statistics is damage.
    findings += [f for f in damage(buffers) if f.code == "not-finite" and "mask" not in str(f.layer).lower()]
    if not is_adapter(network):
        plain = [summary for summary in summaries if summary.exact]
        damaged = {finding.layer for finding in findings}  # a hole or a wild entry changes the scale
        findings += odd_ones([summary for summary in plain if summary.name not in damaged])
        findings += duplicates(plain, network.read, network.contents.ties)
    findings += expected.findings
    order = {tensor.name: place for place, tensor in enumerate(network.tensors)}
    findings.sort(key=lambda finding: order.get(finding.layer or "", len(order)))
    finite = sum(not summary.not_finite for summary in (*summaries, *buffers))
    matrices = sum(not summary.vector for summary in summaries)
    return _Look(tuple(findings), len(summaries) + len(buffers), finite, matrices, expected)


def _of_update(network: Network, name: str) -> TensorSummary:
    """The factors of a low-rank update in one summary: only whether they are finite matters."""
    factors = [np.asarray(factor).reshape(-1) for factor in network.contents.adapters[name].factors()]
    summary = summarise(name, np.concatenate(factors), exact=False)
    return replace(summary, shape=(len(factors), summary.size // len(factors)))


def _spectral(
    network: Network, settings: CheckConfig, codes: frozenset[str], tick: Tick
) -> Iterator[Finding]:
    names = {layer.name for layer in select(network.layers(), settings.layers)}
    if not names and is_adapter(network):
        return
    for scanned in scan(network, layers=settings.layers, workers=settings.workers, tick=tick):
        name = scanned.layer.name
        if name not in names:
            continue
        for flag in scanned.row()["warnings"]:
            if flag.code in codes and flag.code not in INTEGRITY:
                yield Finding(name, flag.code, flag.text)
        if scanned.spectrum.phase == Phase.RANK_COLLAPSE and "rank-collapse" in codes:
            yield Finding(name, "rank-collapse", "almost all of its singular values vanish beside the others")
        for limit in settings.limits():
            finding = limit.finding(name, scanned.row())
            if finding is not None:
                yield finding


def _against_base(
    comparison: Comparison, failing_codes: Sequence[str], limits: Sequence[NumberLimit]
) -> Iterator[Finding]:
    kinds = set(UpdateKind) & set(failing_codes)
    if kinds & {UpdateKind.LOW_RANK, UpdateKind.DENSE}:
        kinds |= {UpdateKind.UNDECIDED}  # it changed, and may have changed in this way
    for layer in comparison.layers:
        name = layer.partner[-1]
        if layer.update_kind in kinds:
            yield Finding(name, str(layer.update_kind), _kind_text(layer.update_kind, layer.update_rank))
        for flag in layer.warnings:
            if flag.code in failing_codes and flag.code in OF_BASE:
                yield Finding(name, flag.code, flag.text)
        for limit in limits:
            finding = limit.finding(name, vars(layer)) if limit.name in NUMBERS_OF_BASE else None
            if finding is not None:
                yield finding
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
    before, after = ({layer.name: layer for layer in net.layers()} for net in (base, network))
    text = "changed by about one rounding step, although both files have one dtype"
    for layer in comparison.layers:
        a, b = before.get(layer.name), after.get(layer.partner[-1])
        if layer.update_kind != UpdateKind.ROUNDING or layer.aligned is not None or a is None or b is None:
            continue
        if a.dtype == b.dtype and not (a.quantised or b.quantised):
            yield Finding(layer.partner[-1], "rounding", text)


_KIND_TEXTS: dict[str | None, str] = {
    UpdateKind.UNTOUCHED: "the same as in the base, bit for bit",
    UpdateKind.ROUNDING: "the same as in the base up to rounding",
    UpdateKind.UNDECIDED: "changed by less than the dtype resolves: low-rank or dense cannot be decided",
}


def _kind_text(kind: str | None, rank: int | None) -> str:
    directions = f"differs from the base in {rank} direction{'s' if rank != 1 else ''} beyond rounding"
    return _KIND_TEXTS.get(kind, directions)


@dataclass(frozen=True)
class NumberLimit:
    """A condition on a number of a layer that lets a network fail.

    Examples:
        >>> limit = NumberLimit.parse("changed > 20%")
        >>> limit.name, limit.bound, limit.exceeded(0.25), limit.exceeded(None)
        ('relative_change', 0.2, True, False)
    """

    text: str
    name: str
    sign: str
    bound: float
    percent: bool = False

    @classmethod
    def parse(cls, text: str) -> NumberLimit:
        """Read a condition such as ``changed > 20%``.

        Raises:
            BadInputError: It is no condition, or there is no number of this name.
        """
        names = (*NUMBERS_OF_BASE, *NUMBERS_OF_SPECTRA)
        match = _LIMIT.fullmatch(text)
        if match is None or match[3].count(".") > 1:
            raise BadInputError("fail-if", f"cannot read {text!r}; write for example 'changed > 20%'")
        name = match[1].replace(" ", "_")
        name = "relative_change" if name == "changed" else name
        if name not in names:
            raise BadInputError("fail-if", f"no number {match[1]!r}; {nearest(name, ('changed', *names))}")
        percent = bool(match[4])
        return cls(text.strip(), name, match[2], float(match[3]) / (100 if percent else 1), percent)

    def exceeded(self, number: Any) -> bool:
        """Whether a number meets the condition; one that is not defined does not."""
        return isinstance(number, int | float) and bool(_SIGNS[self.sign](number, self.bound))

    def finding(self, layer: str, numbers: Mapping[str, Any]) -> Finding | None:
        """A layer's number beyond the limit."""
        number = numbers.get(self.name)
        if number is None or not self.exceeded(number):
            return None
        shown = f"{100 * number:.3g}%" if self.percent else f"{number:.4g}"
        return Finding(layer, OVER_LIMIT, f"{self.name} is {shown}; the limit is: {self.text}")


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
        fail_if: The limits on numbers that let it fail.
        evidence: The comparison behind it, for a page.
    """

    verb: ClassVar[str] = "check"
    omitted: ClassVar[tuple[str, ...]] = ("finite", "layers", "expected_layers", "evidence")
    computed: ClassVar[tuple[str, ...]] = ("passed",)

    model: str
    base: str | None
    fail_on: tuple[str, ...]
    tensors: int
    checked: int
    finite: int
    layers: int
    expected_layers: int
    found: tuple[Finding, ...]
    fail_if: tuple[str, ...] = ()
    evidence: tuple[Result, ...] = field(default=(), repr=False)

    @property
    def passed(self) -> bool:
        """Whether nothing was found that lets the network fail."""
        return not any(self._fails(finding) for finding in self.found)

    def _fails(self, finding: Finding) -> bool:
        changed = {"low-rank", "dense"} & set(self.fail_on)  # an undecided change may be either
        same_dtype = finding.code == "rounding" and "moved-vectors" in self.fail_on
        undecided = finding.code == "undecided" and bool(changed)
        return finding.code in (*self.fail_on, OVER_LIMIT) or undecided or same_dtype

    def frame(self) -> pd.DataFrame:
        """One row per finding."""
        import pandas as pd

        return pd.DataFrame([vars(finding) for finding in self.found], columns=["layer", "code", "text"])

    def answer(self) -> str:
        """The first line: how many tensors are sound, or the first finding that fails."""
        failures = [finding for finding in self.found if self._fails(finding)]
        counts = (
            f"{self.finite} of {self.checked} tensors finite,"
            f" {self.layers} of {self.expected_layers} expected layers present"
        )
        if failures:
            first = failures[0]
            where = printable("the file" if first.layer is None else first.layer, 50)
            more = f" and {len(failures) - 1} more" if len(failures) > 1 else ""
            return f"FAIL: {first.code} in {where}{more}. {counts}."
        if set(INTEGRITY) <= set(self.fail_on):
            return f"{counts}, no damage found{', no limit exceeded' if self.fail_if else ''}."
        tensors = f"{self.checked} tensor{'' if self.checked == 1 else 's'}"
        return f"PASS: {tensors}, none {_either(self.fail_on)}."

    def summary(self) -> RenderableType:
        """The answer, then one line per finding, then what to run next."""
        from rich.console import Group

        from strati.core.display import NextCommand, Paragraph, command_path

        lines, counts, notes = [self.answer()], Counter[str](), Counter[str]()
        for finding in self.found:
            if not self._fails(finding):
                notes[finding.code] += 1
                continue
            counts[finding.code] += 1
            if counts[finding.code] <= _MOST_LINES:
                where = printable(self.model if finding.layer is None else finding.layer, 120)
                lines.append(f"{where}: {finding.code}: {printable(finding.text, 300)}")
        lines += [
            f"{count - _MOST_LINES} more with {code}; --json - lists all"
            for code, count in counts.items()
            if count > _MOST_LINES
        ]
        if notes:
            many = f"{notes.total()} note{'s do' if notes.total() > 1 else ' does'}"
            by_code = ", ".join(f"{code} {count}" for code, count in notes.most_common())
            lines.append(f"{many} not fail the check ({by_code}); --json - lists all")
        commands: tuple[str, ...] = (f"strati explain {next(iter(counts), 'wild-entry')}",)
        if Path(self.model).exists():
            model = command_path(self.model)
            commands = (f"strati scan {model}", *commands)
            if self.base is not None:
                commands = (f"strati compare {command_path(self.base)} {model}", *commands)
        return Group(*(Paragraph(line) for line in lines), NextCommand(commands))

    def annotations(self) -> list[str]:
        """The findings as workflow commands of GitHub Actions: errors, and notices for what does not fail.

        Examples:
            >>> finding = Finding("0.weight", "not-finite", "1 of 6 entries are NaN or infinite")
            >>> Check("m.npz", None, ("not-finite",), 1, 1, 0, 1, 1, (finding,)).annotations()
            ['::error file=m.npz,title=not-finite::0.weight: 1 of 6 entries are NaN or infinite']
        """
        lines = []
        for finding in self.found:
            level = "error" if self._fails(finding) else "notice"
            text = finding.text if finding.layer is None else f"{finding.layer}: {finding.text}"
            place = _escaped(self.model).replace(":", "%3A").replace(",", "%2C")
            lines.append(f"::{level} file={place},title={finding.code}::{_escaped(text)}")
        return lines


def _either(codes: Sequence[str]) -> str:
    if len(codes) > 6:
        return f"with any of {len(codes)} codes"
    return codes[0] if len(codes) == 1 else f"{', '.join(codes[:-1])} or {codes[-1]}"


def _escaped(text: str) -> str:
    return printable(text, 300).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
