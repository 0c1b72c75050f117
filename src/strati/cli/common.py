"""What the commands share: options, protection of inputs from being overwritten, and showing and saving a result."""

from __future__ import annotations

import functools
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import click

from strati.core.display import visible
from strati.core.errors import BadInputError, StratiError
from strati.core.files import check_writable
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
    "Output": "json_ html plot export form answer align sparsify figures columns sort wide quiet debug force help",
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


def _record(parameter: click.Parameter, context: click.Context) -> tuple[str, str] | None:
    """The two columns of an option in the help, without click's names and bounds of number types."""
    record = parameter.get_help_record(context)
    if record is None:
        return None
    flags = record[0].replace("INTEGER RANGE", "N").replace("FLOAT RANGE", "X").replace("INTEGER", "N")
    text = re.sub(r";? ?x[<>]=?[-\d.]+(?=\])", "", record[1]).replace("  []", "")
    return flags.replace("FLOAT", "X"), text


class Command(click.Command):
    """A command whose help lists its options in groups."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the groups in the order Input, What to compute, Output, Large models."""
        groups: dict[str, list[tuple[str, str]]] = {title: [] for title in TITLES}
        for parameter in self.get_params(ctx):
            record = _record(parameter, ctx)
            if record is not None:
                groups[_title(parameter)].append(record)
        for title, records in groups.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


@dataclass(frozen=True)
class Output:
    """Where a result goes."""

    json: str | None = None
    html: str | None = None
    quiet: bool = False
    plot: str | None = None

    def check(self) -> None:
        """Refuse output paths that cannot be written, before any work is done."""
        if self.json is not None and self.json != "-":
            check_writable(self.json)
        if self.html is not None:
            check_page(self.html)
        if self.plot is not None:
            check_picture(self.plot)


def check_page(path: str) -> None:
    """Refuse the path of a page that cannot be written; ``-`` too, which would be a file of that name.

    Raises:
        BadInputError: Nothing can be written there.
    """
    if path == "-":
        raise BadInputError("-", "only JSON goes to standard output; give the page the name of a file")
    check_writable(path)


def check_picture(path: str) -> None:
    """Refuse the path of a picture that cannot be written or whose format is not PNG, SVG or PDF.

    Raises:
        BadInputError: The ending is another one, or nothing can be written there.
    """
    if not path.lower().endswith((".png", ".svg", ".pdf")):
        raise BadInputError(path, "a picture is a .png, .svg or .pdf file")
    check_writable(path)


def output_options(function: F) -> F:
    """Add ``--json``, ``--html``, ``--plot``, ``--quiet`` and ``--debug``; the command receives one ``output``."""

    @click.option("--json", "json_", metavar="FILE", help="Write the result as JSON ('-' for stdout).")
    @click.option("--html", metavar="FILE", help="Write one self-contained interactive page.")
    @click.option("--plot", metavar="FILE", help="Draw the result as a picture (.png, .svg or .pdf).")
    @click.option("--quiet", "-q", is_flag=True, help="Print nothing except errors.")
    @click.option("--debug", is_flag=True, expose_value=False, hidden=True)
    @functools.wraps(function)
    def wrapped(
        *args: Any, json_: str | None, html: str | None, plot: str | None, quiet: bool, **options: Any
    ) -> Any:
        output = Output(json_, html, quiet, plot)
        output.check()
        guard_outputs(click.get_current_context())
        return function(*args, output=output, **options)

    return wrapped  # type: ignore[return-value]


def seed_option(function: F) -> F:
    """Add ``--seed``."""
    return click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Random seed.")(
        function
    )


def layers_option(function: F) -> F:
    """Add ``--layers``, repeatable; the verb receives ``layers``, a tuple of patterns, to hand to ``layers=``."""
    return click.option(
        "--layers",
        multiple=True,
        metavar="PATTERN",
        help="Select layers by name, role or block: 'fc*', 'role:mlp.*', 'block:3-7'. Prefix with '!' to exclude. "
        "Repeatable.",
    )(function)


def data_options(*, required: bool) -> Callable[[F], F]:
    """Add ``--data``, ``--inputs`` and ``--targets``."""
    return _all(
        click.option(
            "--data",
            required=required,
            metavar="DATA",
            help="Data: .npz (x, optional y), .npy, CSV, .txt for language models, or a folder of images by class.",
        ),
        click.option(
            "--inputs", metavar="NAME", help="Array or columns of DATA with the inputs.  [default: x]"
        ),
        click.option(
            "--targets", metavar="NAME", help="Array or column of DATA with the targets.  [default: y]"
        ),
    )


def read_inputs(path: str, inputs: str | None, targets: str | None, network: nn.Module) -> Data:
    """Read a data file, its arrays by the given names; text goes through the model's tokenizer."""
    from strati.io.data_files import Data, read_data

    if Path(path).suffix.lower() == ".txt":
        from strati.evaluate.batches import read_path

        return Data(read_path(Path(path), network), None)
    return read_data(path, inputs=inputs, target=targets)


calibration_option: Callable[[F], F] = click.option(
    "--calibration",
    metavar="DATA",
    help="Data for the input covariances of data-aware edits.  [default: a quarter of --data]",
)
"""``--calibration``: what GPTQ, SparseGPT and truncation by inputs read."""


def activation_option(default: str | None = "relu") -> Callable[[F], F]:
    """Add ``--activation``; with the default ``None`` the command learns whether it was given."""
    from strati.io.to_module import ActivationName

    return click.option(
        "--activation",
        type=click.Choice(get_args(ActivationName)),
        default=default,
        help="Activation function of a bare MLP (not stored in checkpoints).  [default: relu]",
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


def rows_option(function: F) -> F:
    """Add ``--rows``; the command receives ``rows``, or ``None`` for all."""
    return click.option(
        "--rows",
        type=click.IntRange(2),
        metavar="N",
        help="Use only the first N rows of DATA.  [default: all]",
    )(function)


def work_options(*, required: bool = False) -> Callable[[F], F]:
    """Add ``--out``, ``--engine``, ``--address`` and ``--workers`` (``--jobs``, ``-j``) of commands that can resume."""
    where = "Save progress in DIR so that an interrupted run can be resumed."
    return _all(
        click.option("--out", required=required, metavar="DIR", help=where),
        click.option(
            "--engine",
            type=click.Choice(["local", "ray"]),
            default="local",
            show_default=True,
            help="With --out: work in processes on this machine, or on a Ray cluster.",
        ),
        click.option(
            "--address",
            metavar="HOST:PORT",
            help="With --engine ray: an existing cluster.  [default: start one]",
        ),
        workers_option,
    )


def workers_option(function: F) -> F:
    """Add ``--workers`` (``--jobs``, ``-j``); the command receives ``workers``, or ``None`` to choose."""
    return click.option(
        "--workers",
        "--jobs",
        "-j",
        "workers",
        type=click.IntRange(0),
        metavar="N",
        help="Number of parallel workers (0 = one per CPU).  [default: chosen by the size of the work]",
    )(function)


def retry_option(function: F) -> F:
    """Add ``--retry``."""
    return click.option("--retry", is_flag=True, help="Try again what failed in an earlier run.")(function)


def export_option(function: F) -> F:
    """Add ``--export``."""
    return click.option("--export", metavar="FILE", help="Write the whole table as .csv or .parquet.")(
        function
    )


def _all(*decorators: Callable[[Any], Any]) -> Callable[[F], F]:
    """One decorator that adds several options, in the order in which the help lists them."""

    def decorate(function: F) -> F:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return decorate


_WIDE, _WIDEST = "strati.wide", 4000


def table_options(function: F) -> F:
    """Add ``--columns``, ``--sort`` and ``--wide``; the verb receives ``table``, a :class:`TableOptions`."""

    @click.option(
        "--columns", metavar="NAMES", help="Columns of the table: names of JSON fields, by commas, or 'all'."
    )
    @click.option("--sort", metavar="NAME", help="Sort by this column; '-NAME' puts the largest first.")
    @click.option("--wide", is_flag=True, help="Show every column, however wide the terminal.")
    @functools.wraps(function)
    def wrapped(*args: Any, columns: str | None, sort: str | None, wide: bool, **options: Any) -> Any:
        from strati.core.display import TableOptions

        names = tuple(name.strip() for name in (columns or "").split(",") if name.strip())
        click.get_current_context().meta[_WIDE] = wide
        return function(*args, table=TableOptions(names, sort), **options)

    return wrapped  # type: ignore[return-value]


def estimate_option(function: F) -> F:
    """Add ``--estimate``; the verb receives ``estimate``."""
    return click.option("--estimate", is_flag=True, help="Estimate time and memory, then exit.")(function)


def device_option(function: F) -> F:
    """Add ``--device``; the verb receives ``device``, a text for torch, or ``None``: where the model is."""
    return click.option(
        "--device", metavar="DEVICE", help="Compute on this torch device (cpu, cuda, cuda:1, mps)."
    )(function)


def emit(result: Result, output: Output) -> None:
    """Print the summary and write the JSON, the report and the plot that the options request."""
    if output.json == "-":
        print(result.to_json())
    elif output.json is not None:
        result.to_json(output.json)
    if output.html is not None:
        from strati.report.page import write_report

        write_report(result, output.html)
    if output.plot is not None:
        _draw(result, output.plot)
    if not output.quiet and output.json != "-":
        written = [path for path in (output.json, output.html, output.plot) if path is not None]
        show(result.summary(), notes=[f"wrote {path}" for path in written])


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
        "--json",
        "--html",
        "--export",
        "--out",
        "--output",
        "--sparsify",
        "--losses",
        "--make",
        "--answer",
        "--plot",
        "--figures",
        "--align",
        "--extract",
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
