"""What the commands share: options, protection of inputs from being overwritten, and showing and saving a result."""

from __future__ import annotations

import functools
import os
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, get_args

import click

from strati.core import options as core_options
from strati.core.display import visible
from strati.core.errors import BadInputError, StratiError
from strati.core.files import check_table, check_writable, export_table
from strati.core.plugins import require
from strati.core.results import Result

if TYPE_CHECKING:
    from torch import nn

    from strati.io.data_files import Data

F = TypeVar("F", bound=Callable[..., Any])

NEXT = "next: "
"""Begin of the last line of a summary, the command to run next."""


GROUPS = {
    "Input": "data inputs targets layers base steps activation split_qkv conv rows initial model",
    "Output": "json_ html plot export exported form answer align sparsify figures columns sort wide quiet debug force",
    "Large models": "out folder workers engine address estimate device retry",
}
"""Groups of options in the help of a command, by parameter name; all others are "What to compute"."""

TITLES = ("Input", "What to compute", "Output", "Large models")


def _title(parameter: click.Parameter) -> str:
    if isinstance(parameter, click.Argument):
        return "Input"
    if "--help" in parameter.opts or ("--out" in parameter.opts and parameter.required):
        return "Output"
    return next((title for title, names in GROUPS.items() if parameter.name in names.split()), TITLES[1])


class Command(click.Command):
    """A command whose help lists its options in groups."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the groups in the order Input, What to compute, Output, Large models; no bounds of numbers."""
        groups: dict[str, list[tuple[str, str]]] = {title: [] for title in TITLES}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                text = re.sub(r";? ?[-\d.]*<?=?x[<>]=?[-\d.]+(?=\])", "", record[1]).replace("  []", "")
                groups[_title(parameter)].append((record[0], text))
        for title, records in groups.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


POSITIVE = click.FloatRange(0, min_open=True)
PROBABILITY = click.FloatRange(0, 1, min_open=True, max_open=True)


def option(
    names: str, text: str, kind: Any = None, of: type[Any] | None = None, **more: Any
) -> Callable[[F], F]:
    """Add an option to a command.

    Args:
        names: Its spellings, click's name of the parameter if it is another one (in lower case), and the word that
            stands for the value (in capitals): ``--format form NAME``.
        text: Its help.
        kind: The type of the value, or its choices. An option without word, type and choices is a flag.
        of: The config whose field has the default.
        **more: Further arguments of ``click.option``.
    """
    declared = [word for word in names.split() if word.startswith("-") or word.islower()]
    metavar = next((word for word in names.split() if word not in declared), None)
    if isinstance(kind, Sequence):
        kind = click.Choice(kind)
    elif kind is None and metavar is None and "callback" not in more:
        more.setdefault("is_flag", True)
    elif metavar is None:
        metavar = "N" if isinstance(kind, click.types.IntParamType) else "X"
    if of is not None:
        field = next((word for word in declared if not word.startswith("-")), declared[0].lstrip("-"))
        more["default"] = core_options.default(of, field.replace("-", "_"))
    if more.get("default") not in (None, True, ""):
        more.setdefault("show_default", True)
    return click.option(*declared, type=kind, metavar=metavar, help=text, **more)


def options(*decorators: Callable[[Any], Any]) -> Callable[[F], F]:
    """One decorator that adds several options, in the order in which the help lists them."""

    def decorate(function: F) -> F:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return decorate


@dataclass(frozen=True)
class Output:
    """Where a result goes."""

    json: str | None = None
    html: str | None = None
    quiet: bool = False
    plot: str | None = None
    export: str | None = None

    @property
    def speaks(self) -> bool:
        """Whether the command prints text to standard output."""
        return not self.quiet and self.json != "-"

    def check(self) -> None:
        """Refuse output paths that cannot be written, before any work is done.

        Raises:
            BadInputError: Nothing can be written there, or a picture is not PNG, SVG or PDF.
        """
        if self.html == "-":
            raise BadInputError("-", "only JSON goes to standard output; give the page the name of a file")
        if self.plot is not None and not self.plot.lower().endswith((".png", ".svg", ".pdf")):
            raise BadInputError(self.plot, "a picture is a .png, .svg or .pdf file")
        for path in (self.json, self.html, self.plot):
            if path not in (None, "-"):
                check_writable(path)
        if self.export is not None:
            check_table(self.export)


def output_options(function: F) -> F:
    """Add ``--json``, ``--html``, ``--plot``, ``--quiet`` and ``--debug``; the command receives one ``output``."""

    @options(
        option("--json json_ FILE", "Write the result as JSON ('-' for stdout)."),
        option("--html FILE", "Write one self-contained interactive page."),
        option("--plot FILE", "Draw the result as a picture (.png, .svg or .pdf)."),
        option("--quiet -q", "Print nothing except errors."),
        option("--debug", "", expose_value=False, hidden=True),
    )
    @functools.wraps(function)
    def wrapped(
        *args: Any, json_: str | None, html: str | None, plot: str | None, quiet: bool, **others: Any
    ) -> Any:
        output = Output(json_, html, quiet, plot, others.pop("export", None))
        output.check()
        guard_outputs(click.get_current_context())
        return function(*args, output=output, **others)

    return wrapped  # type: ignore[return-value]


seed_option = option("--seed", "Random seed.", click.IntRange(0), default=0)
layers_option = option(
    "--layers PATTERN",
    "Select layers by name, role or block: 'fc*', 'role:mlp.*', 'block:3-7'. Prefix with '!' to exclude. Repeatable.",
    multiple=True,
    callback=lambda _context, _parameter, patterns: patterns or None,
)
calibration_option = option(
    "--calibration DATA",
    "Data for the input covariances of data-aware edits.  [default: a quarter of --data]",
)
rows_option = option("--rows", "Use only the first N rows of DATA.  [default: all]", click.IntRange(2))
workers_option = option(
    "--workers --jobs -j workers N",
    "Number of parallel workers (0 = one per CPU).  [default: chosen by the size of the work]",
    click.IntRange(0),
)
retry_option = option("--retry", "Try again what failed in an earlier run.")
export_option = option("--export FILE", "Write the whole table as .csv or .parquet.")
"""The table goes to ``Output.export``."""
estimate_option = option("--estimate", "Estimate time and memory, then exit.")
device_option = option("--device DEVICE", "Compute on this torch device (cpu, cuda, cuda:1, mps).")
conv_option = option(
    "--conv",
    "Convolutions: pool the k x k slices, or flatten to one matrix.",
    ("pool", "flatten"),
    default="pool",
)


def data_options(*, required: bool) -> Callable[[F], F]:
    """Add ``--data``, ``--inputs`` and ``--targets``."""
    what = "Data: .npz (x, optional y), .npy, CSV, .txt for language models, or a folder of images by class."
    return options(
        option("--data DATA", what, required=required),
        option("--inputs NAME", "Array or columns of DATA with the inputs.  [default: x]"),
        option("--targets NAME", "Array or column of DATA with the targets.  [default: y]"),
    )


def activation_option(default: str | None = "relu") -> Callable[[F], F]:
    """Add ``--activation``; with the default ``None`` the command learns whether it was given."""
    from strati.io.to_module import ActivationName

    text = "Activation function of a bare MLP (not stored in checkpoints).  [default: relu]"
    return option("--activation", text, get_args(ActivationName), default=default, show_default=False)


def work_options(*, required: bool = False) -> Callable[[F], F]:
    """Add ``--out``, ``--engine``, ``--address`` and ``--workers`` (``--jobs``, ``-j``) of commands that can resume."""
    where = "With --out: work in processes on this machine, or on a Ray cluster."
    return options(
        option(
            "--out DIR", "Save progress in DIR so that an interrupted run can be resumed.", required=required
        ),
        option("--engine", where, ("local", "ray"), default="local"),
        option("--address HOST:PORT", "With --engine ray: an existing cluster.  [default: start one]"),
        workers_option,
    )


def named_data(data: str | None, inputs: str | None, targets: str | None) -> Any:
    """The path of the data, or their arrays if ``--inputs`` or ``--targets`` name them."""
    if inputs is None and targets is None:
        return data
    from strati.io.data_files import read_data

    if data is None:
        raise BadInputError("--inputs, --targets", "name arrays of --data, which is missing")
    arrays = read_data(data, inputs=inputs, target=targets)
    return arrays.x if arrays.y is None else (arrays.x, arrays.y)


class Problem(NamedTuple):
    """A network, the name of a loss, and data as the functions of the landscape take them."""

    network: nn.Module
    loss: str
    data: Any


@dataclass(frozen=True)
class Source:
    """The network and the data that a command names."""

    model: str
    data: str
    inputs: str | None
    targets: str | None
    activation: Any

    def __str__(self) -> str:
        """The words of the command line."""
        named = (("inputs", self.inputs), ("targets", self.targets))
        words = "".join(f" --{name} {array}" for name, array in named if array is not None)
        return f"{self.model} --data {self.data}{words}"

    def read(self) -> tuple[nn.Module, Data]:
        """Open the network and read its data."""
        from strati.io.to_module import as_module

        network = as_module(self.model, activation=self.activation)
        return network, self.arrays(network)

    def arrays(self, network: nn.Module, path: str | None = None) -> Data:
        """Read the data, or another file like them; text goes through the model's tokenizer."""
        from strati.io.data_files import Data, read_data, read_path

        path = path or self.data
        if Path(path).suffix.lower() == ".txt":
            return Data(read_path(Path(path), network), None)
        return read_data(path, inputs=self.inputs, target=self.targets)

    def problem(self, loss: str | None, rows: int | None) -> Problem:
        """The network and its data; the loss is :func:`default_loss` unless it is given."""
        network, arrays = self.read()
        loss = loss or default_loss(network, arrays)
        return Problem(network, loss, labelled(arrays, loss, rows))


def source_options(function: F) -> F:
    """Add MODEL, the data and the activation; the command receives one ``source``."""

    @click.argument("model", type=click.Path())
    @data_options(required=True)
    @activation_option()
    @functools.wraps(function)
    def wrapped(
        model: str, data: str, inputs: str | None, targets: str | None, activation: Any, **others: Any
    ) -> Any:
        return function(source=Source(model, data, inputs, targets, activation), **others)

    return wrapped  # type: ignore[return-value]


def labelled(arrays: Data, loss: str, rows: int | None = None) -> Any:
    """The first rows of data, with their targets if the loss needs them."""
    if arrays.y is None or loss.startswith("behavioural"):
        return arrays.x[:rows]
    return arrays.x[:rows], arrays.y[:rows]


def default_loss(network: nn.Module, data: Data) -> str:
    """The training loss where the data have targets or are tokens, else the behavioural one."""
    from strati.evaluate.models import predicts_next

    if predicts_next(network):
        return "cross_entropy"
    if data.y is None:
        return "behavioural-mse"
    integral = data.y.ndim == 1 and bool((data.y == data.y.round()).all()) and bool((data.y >= 0).all())
    return "cross_entropy" if integral else "mse"


def sample_llc(problem: Problem, output: Output, **settings: Any) -> Any:
    """The learning coefficient, with a progress bar; the summary says why there is none."""
    from strati.jobs.progress import progress
    from strati.landscape.llc.estimate import NoEstimateWarning
    from strati.landscape.llc.llc import llc

    with progress("sampling", None, quiet=output.quiet) as tick, warnings.catch_warnings():
        warnings.simplefilter("ignore", NoEstimateWarning)
        return llc(*problem, tick=tick, **settings)


_WIDE, _WIDEST = "strati.wide", 4000


def table_options(function: F) -> F:
    """Add ``--columns``, ``--sort`` and ``--wide``; the verb receives ``table``, a :class:`TableOptions`."""

    @options(
        option("--columns NAMES", "Columns of the table: names of JSON fields, by commas, or 'all'."),
        option("--sort NAME", "Sort by this column; '-NAME' puts the largest first."),
        option("--wide", "Show every column, however wide the terminal."),
    )
    @functools.wraps(function)
    def wrapped(*args: Any, columns: str | None, sort: str | None, wide: bool, **others: Any) -> Any:
        from strati.core.display import TableOptions

        names = tuple(name.strip() for name in (columns or "").split(",") if name.strip())
        click.get_current_context().meta[_WIDE] = wide
        return function(*args, table=TableOptions(names, sort), **others)

    return wrapped  # type: ignore[return-value]


def emit(result: Result, output: Output, following: str | None = None) -> None:
    """Print the summary and the ``following`` command; write the JSON, report, plot and table that were requested."""
    if output.export is not None:
        export_table(result.frame(), output.export)
    if output.json == "-":
        print(result.to_json())
    elif output.json is not None:
        result.to_json(output.json)
    if output.html is not None:
        from strati.report.page import write_report

        write_report(result, output.html)
    if output.plot is not None:
        _draw(result, output.plot)
    if output.speaks:
        written = [path for path in (output.json, output.html, output.plot) if path is not None]
        show(result.summary(), notes=[f"wrote {path}" for path in written])
        if following is not None:
            show(f"{NEXT}{following}")


def _draw(result: Result, path: str) -> None:
    require("matplotlib", "plot", "--plot").use("Agg")
    figure = result.plot()
    getattr(figure, "figure", figure).savefig(path, dpi=150, bbox_inches="tight")


def screen_width() -> int:
    """Columns of the output: ``COLUMNS`` if set, else the terminal's, else 160, so that a pipe gets whole tables.

    With ``--wide`` as many as any table needs.
    """
    context = click.get_current_context(silent=True)
    if context is not None and context.meta.get(_WIDE):
        return _WIDEST
    return max(shutil.get_terminal_size((160 if not sys.stdout.isatty() else 80, 24)).columns, 40)


def show(renderable: Any, *, notes: Sequence[str] = ()) -> None:
    """Print to standard output, no line wider than :func:`screen_width`.

    Whatever a file's names hold, it is text: no markup of rich's, and nothing that a terminal would act upon.

    Args:
        renderable: What to print.
        notes: Lines below it, but above the next command, which stays last.
    """
    from rich.console import Console
    from rich.segment import Segment, Segments

    from strati.core.display import NextCommand

    console = Console(width=screen_width(), highlight=False, markup=False, emoji=False)

    def lines_of(part: Any) -> list[list[Segment]]:
        if isinstance(part, str) and part.startswith(NEXT):
            # A command stays on one line, so that it can be copied, with paths from the present folder.
            command = part.removeprefix(NEXT).replace(f"{Path.cwd()}{os.sep}", "")
            return [[Segment(NextCommand((command,)).line(console.width))]]
        drawn = console.render_str(part) if isinstance(part, str) else part
        return list(Segment.split_lines(console.render(drawn)))  # not cropped: a command stays whole

    def text_of(line: list[Segment]) -> str:
        return "".join(piece.text for piece in line)

    lines = lines_of(renderable)
    starts = [i for i, line in enumerate(lines) if text_of(line).startswith(NEXT)]
    place = starts[-1] if starts else len(lines)
    lines[place:place] = [line for note in notes for line in lines_of(note)]
    pieces = [
        piece if piece.control else Segment(visible(piece.text), piece.style)
        for line in lines
        for piece in [*line, Segment.line()]
    ]
    console.print(Segments(pieces), end="", soft_wrap=True)


FORCE = "strati.force"
OUTPUTS = frozenset(
    {
        *("--json", "--html", "--plot", "--export", "--out", "--output", "--sparsify", "--losses"),
        *("--make", "--answer", "--figures", "--align", "--extract"),
    }
)
"""Options of any verb that name what is written; arguments and every other option that is a path are inputs."""

_RESULTS = (".html", ".csv", ".parquet")
_STORE = ".sqlite"


def guard_outputs(context: click.Context, *, also: Iterable[str | None] = ()) -> None:
    """Refuse to write over an input, or, without ``--force``, over a file that opens as a network.

    Args:
        context: The command with its words read.
        also: Paths that are read though no word of the command names them, such as those in a spec.

    Raises:
        BadInputError: An output is one of the inputs, is given twice, belongs to the files of ``--out``, or is
            a network without ``--force``.
    """
    written = {parameter.name for parameter in context.command.params if is_output(parameter)}
    outputs = [Path(text) for name in written for text in _texts(context.params.get(name)) if text != "-"]
    words = [text for name, value in context.params.items() if name not in written for text in _texts(value)]
    named = [text for text in also if text is not None]
    inputs = [path for text in words + named if (path := _existing(text)) is not None]
    folders = [
        Path(text) for name in ("out", "folder") if name in written for text in _texts(context.params[name])
    ]
    force = bool(context.meta.get(FORCE) or context.params.get("force"))
    for number, output in enumerate(outputs):
        if output.absolute() in [other.absolute() for other in outputs[:number]]:
            raise BadInputError(output, "is given for two outputs; give each a name of its own")
        if any(_is_kept_in(output, folder) for folder in folders):
            raise BadInputError(output, "belongs to the files that --out keeps; choose another name")
        if _existing(str(output)) is None:
            continue
        if any(_is_part_of(output, source) for source in inputs):
            raise BadInputError(output, "is one of the inputs and is not overwritten; choose another name")
        if output.is_file() and not force and _is_network(output):
            raise BadInputError(output, "exists and is a network; choose another name, or add --force")


def is_output(parameter: click.Parameter) -> bool:
    """Whether a parameter of a verb names what is written."""
    return isinstance(parameter, click.Option) and any(word in OUTPUTS for word in parameter.opts)


def _texts(value: Any) -> list[str]:
    if isinstance(value, tuple | list):
        return [text for item in value for text in _texts(item)]
    return [os.fspath(value)] if isinstance(value, str | os.PathLike) and os.fspath(value) else []


def _existing(text: str) -> Path | None:
    path = Path(text)
    try:
        return path if path.exists() else None
    except (OSError, ValueError):
        return None


def _is_kept_in(output: Path, folder: Path) -> bool:
    """Whether a file belongs to the folder of a resumable run: its store, or a file of an earlier run."""
    if not output.absolute().is_relative_to(folder.absolute()) or output.absolute() == folder.absolute():
        return False
    return output.suffix.lower() == _STORE or (output.is_file() and _is_part_of(output, folder))


def _is_part_of(output: Path, source: Path) -> bool:
    """Whether an existing output is an input, or a file of an input folder that is no earlier result."""
    if output.samefile(source):
        return True
    if not output.is_file():
        return False
    if source.name.endswith(".index.json"):  # its shards are inputs too
        return output.parent.samefile(source.parent) and _is_network(output)
    inside = source.is_dir() and output.resolve().is_relative_to(source.resolve())
    return inside and output.suffix.lower() not in _RESULTS and not _is_result(output)


def _is_result(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(19).startswith(b'{"schema": "strati.')


def _is_network(path: Path) -> bool:
    from strati.io.network import open as open_network

    try:
        open_network(path)
    except StratiError:
        return False
    return True
