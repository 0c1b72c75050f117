"""The codes of :func:`strati.check`, limits on numbers, and what a check found."""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from strati.comparison.damage import Finding
from strati.comparison.update_rank import UpdateKind
from strati.core.display import printable
from strati.core.errors import BadInputError
from strati.core.options import nearest
from strati.core.results import Result

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import RenderableType

    from strati.schemas.json_types import CheckFields

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
        if not self.exceeded(number):
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

    def payload(self) -> CheckFields:
        """What was looked for and found."""
        return {
            "model": self.model,
            "base": self.base,
            "fail_on": self.fail_on,
            "fail_if": self.fail_if,
            "tensors": self.tensors,
            "checked": self.checked,
            "found": self.found,
            "passed": self.passed,
        }

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
