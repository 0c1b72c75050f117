"""``strati``: the commands, imported when called, and the one place where errors become exit codes.

0: done. 3: ``check`` found a failure. 2: bad usage or bad input, with one line on standard error. 1: a fault of strati
itself. 130: Ctrl-C.
"""

from __future__ import annotations

import os
import sys

from strati.cli import interrupts

if __name__ == "__main__" or os.path.basename(sys.argv[0] if sys.argv else "") in ("strati", "strati.exe"):  # noqa: PTH119
    interrupts.leave_at_once()  # before anything else: importing takes a moment

import importlib
import io
from pathlib import Path
from typing import NoReturn

import click

from strati._version import __version__
from strati.cli.common import FORCE
from strati.core import plugins
from strati.core.display import printable
from strati.core.errors import MissingExtraError, StoppedError, StratiError
from strati.core.options import nearest

COMMANDS = {
    "inspect": "List the layers of a network: roles, shapes, sizes.",
    "scan": "Find out which layers look learned, random or broken.",
    "compare": "Compare the layers of two or more networks.",
    "lineage": "Find out whether networks are related, how, and as a tree.",
    "check": "Fail (exit 3) if any layer triggers the given warnings. For CI.",
    "study": "Measure how much each layer matters by changing it (truncate, quantise, prune, drop).",
    "audit": "Test which weight metrics predicted the damage measured by a study.",
    "plan": "Pick ranks, bits or pruning per layer that fit a budget at the lowest measured loss.",
    "apply": "Apply a plan: write the compressed model and measure it.",
    "llc": "Estimate the local learning coefficient, with its error.",
    "influence": "Find which rows of data and which parts of a network influence one another.",
    "curvature": "Find the top eigenvalues, trace and spectrum of the loss's curvature.",
    "degeneracy": "Count the parameters that a network really uses on given data.",
    "basis": "Find the directions in each layer that affect the output, and whether they form modules.",
    "track": "Measure every checkpoint of a training run and detect change points.",
    "shuffle": "Take a network apart into unlabelled pieces.",
    "reassemble": "Recover the order of shuffled, unlabelled layers.",
    "identify": "Find which layer of a network a stray tensor is.",
    "explain": "Say what a code, state, phase, metric or column means, and what to do.",
    "report": "Combine results into one self-contained HTML report.",
    "demo": "Run a demo on a bundled network and write a report.",
}
REPRODUCE = "reproduce", "Re-run an experiment from a paper and compare (package strati-reproductions)."
"""A command of another package (strati-reproductions); without that package it says what to install."""


_FORCE = click.Option(
    ["--force"],
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=lambda context, _, value: context.meta.__setitem__(FORCE, value),
    help="Allow an output to overwrite an existing model file.",
)


_MODULES = {"inspect": "inspect_network"}  # a module must not have the name of one of the standard library


class CommandGroup(click.Group):
    """A group that imports a command's module only when the command is called."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Keep the words for eager options."""
        ctx.meta[_WORDS] = tuple(args)
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The commands in the order in which a new user needs them, then those of other packages."""
        return list(dict.fromkeys([*COMMANDS, REPRODUCE[0], *plugins.names(plugins.COMMANDS)]))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command, or name the nearest one."""
        name = args[0] if args else ""
        if name not in COMMANDS and not name.startswith("-") and name not in self.list_commands(ctx):
            ctx.fail(f"no command {name!r}; {nearest(name.lower(), self.list_commands(ctx))}")
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Import the command's module, or the command of another package."""
        command: click.Command | None
        if name in COMMANDS:
            command = importlib.import_module(f"strati.cli.{_MODULES.get(name, name)}").command
        else:
            command = plugins.load(plugins.COMMANDS, name)
        if command is None:
            return _reproduce if name == REPRODUCE[0] else None
        if not any("--force" in parameter.opts for parameter in command.params):
            command.params.append(_FORCE)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing them."""
        others = dict.fromkeys(plugins.names(plugins.COMMANDS), "Of another package.")
        with formatter.section("Commands"):
            formatter.write_dl(list({**COMMANDS, **others, **dict([REPRODUCE])}.items()))


@click.command(REPRODUCE[0], context_settings={"ignore_unknown_options": True})
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def _reproduce(words: tuple[str, ...]) -> NoReturn:
    """Compare a paper's table or figure with ours. Needs the package strati-reproductions."""
    raise MissingExtraError(REPRODUCE[0], plugins.REPRODUCTIONS)


@click.group(
    cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=lambda c, _, v: _version(c, v),
              help="Show the version. Add --verbose for details to paste into a bug report.")  # fmt: skip
@click.option("--verbose", is_flag=True, is_eager=True, expose_value=False, hidden=True)
@click.option("--debug", is_flag=True, expose_value=False, help="Show the traceback of an error.")
def strati() -> None:
    """Analyse a trained network layer by layer: spectra, layer importance, compression, learning coefficients.

    \b
    Example:
      strati scan model.safetensors
      strati scan model.safetensors --html page.html
    """


def _version(context: click.Context, requested: bool) -> None:
    if not requested or context.resilient_parsing:
        return
    if "--verbose" in context.meta.get(_WORDS, ()):
        from strati.cli.version import details

        click.echo(details())
    else:
        click.echo(f"strati {__version__}")
    context.exit()


_WORDS = "strati.words"
_COMPLETION = "_STRATI_COMPLETE"
"""The variable that click's shell completion sets."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    words = sys.argv[1:] if arguments is None else arguments
    for name in ("stdout", "stderr"):  # the caller may have closed them (`>&-`), which is no error
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - open to the end
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal that lacks a character is no reason to fail
        sys.stdout.reconfigure(errors="replace")
    if os.name == "nt":
        print("strati: error: Windows is not supported; use Linux, macOS or WSL", file=sys.stderr)
        sys.exit(2)
    # OpenMP threads that wait for each other sleep instead of spinning, which slows down a busy machine. torch reads
    # the variable when it is imported, and worker processes inherit it.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    debug = "--debug" in words or bool(os.environ.get("STRATI_DEBUG"))
    interrupts.raise_once()
    try:
        code = _run(words, debug)
    except KeyboardInterrupt:  # while the command line is parsed, or while the last output is written
        code = _stopped()
    interrupts.leave(code)
    sys.exit(code)


def _run(words: list[str], debug: bool) -> int:
    try:
        if _COMPLETION in os.environ:  # click completes the command line and exits
            strati.main(words, prog_name="strati")
        # Not click's `main`: it prints an empty line on a Ctrl-C while the command line is parsed.
        with strati.make_context("strati", list(words or ["--help"])) as context:
            code = strati.invoke(context)
        sys.stdout.flush()
        if isinstance(code, int):  # the argument of click's Context.exit
            return code
    except StoppedError as error:
        _say(f"strati: {error.what}; {error.why}")
        return 130
    except StratiError as error:
        if debug:
            raise
        _say(f"strati: error: {error.what}: {error.why}")
        return 2
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.exceptions.Abort:
        return _stopped()
    except click.ClickException as error:
        return _usage(error, words)
    except BrokenPipeError:
        # The reader of the pipe has gone away (`strati ... | head -1`), which is no error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if debug:
            raise
        if (
            isinstance(error, OSError) and error.strerror
        ):  # the system refuses: a full disk, a name too long, a lost mount
            where = printable(str(error.filename or "system"))
            _say(f"strati: error: {where}: {error.strerror}; check the path and the free space")
            return 2
        kind = type(error).__name__
        _say(
            f"strati: fault: {kind}: {printable(str(error), 300)} (a bug in strati; --debug shows the traceback)"
        )
        return 1
    return 0


def _stopped() -> int:
    _say(interrupts.line)
    return interrupts.CODE


def _usage(error: click.ClickException, words: list[str]) -> int:
    context = getattr(error, "ctx", None)
    what = " ".join(context.command_path.split()[1:]) if context is not None else ""
    if context is None:  # click loses it where an option lacks its argument
        what = next((word for word in words if word in COMMANDS), "")
    hint = f"; see: strati {what} --help" if what else "; see: strati --help"
    why = " ".join(error.format_message().split())  # click lists choices over several lines
    _say(f"strati: error: {what or 'usage'}: {printable(why, 400).rstrip('.')}{hint}")
    return 2


def _say(line: str) -> None:
    print(line.replace("\n", " "), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
