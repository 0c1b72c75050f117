"""``strati``: the verbs, loaded when called, and the one place where errors become exit codes.

0 done; 3 ``check`` found what it was told to look for; 2 bad usage or bad input, one line; 1 a fault of strati itself;
130 on Ctrl-C.
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

import click

from strati._version import __version__
from strati.cli.guard import FORCE
from strati.errors import StoppedError, StratiError
from strati.text import printable

VERBS = {
    "inspect": "List the layers of a network: roles, shapes, dtypes. No maths.",
    "scan": "Survey the spectrum of every weight matrix.",
    "compare": "Compare the layers of two or more networks.",
    "check": "For CI: exit with code 3 when a layer shows one of the given codes.",
    "study": "Change every layer and measure what the network loses.",
    "audit": "Find out which metrics of a study to trust.",
    "plan": "Choose what to cut, round, drop or adapt, layer by layer, from a study.",
    "apply": "Write the network that a plan makes, and measure it.",
    "degeneracy": "Count the parameters that a network really uses on given data.",
    "basis": "Find the interaction basis, the interaction graph and modules.",
    "track": "Follow a training run over its checkpoints, and find where it changes.",
    "reassemble": "Put the unlabelled layers of a network back in order.",
    "report": "Draw JSON results as one self-contained interactive page.",
    "reproduce": "Redo a paper's table or figure, the paper's number beside ours.",
    "demo": "Take the whole tour on an embedded network, ending in a report.",
}


_FORCE = click.Option(
    ["--force"],
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=lambda context, _, value: context.meta.__setitem__(FORCE, value),
    help="Overwrite an output file even if it is a network.",
)


class Verbs(click.Group):
    """A group that imports a verb's module only when the verb is called."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Keep the words, which an eager option may want to look at."""
        ctx.meta[_WORDS] = tuple(args)
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The verbs in the order of a first visit."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Import the verb's module."""
        if name not in VERBS:
            return None
        command: click.Command = importlib.import_module(f"strati.cli.{name}").command
        if not any("--force" in parameter.opts for parameter in command.params):
            command.params.append(_FORCE)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the verbs without importing them."""
        with formatter.section("Verbs"):
            formatter.write_dl(list(VERBS.items()))


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=lambda c, _, v: _version(c, v),
              help="Show the version; with --verbose, all that a bug report needs.")  # fmt: skip
@click.option("--verbose", is_flag=True, is_eager=True, expose_value=False, hidden=True)
def strati() -> None:
    """Stratigraphy for neural networks.

    What each layer is (spectra), whether the network needs it (interventions), how much of it is
    degenerate (loss landscape), where it belongs (reassembly), and how far you can trust each number.

    \b
    Example:
      strati scan model.safetensors
      strati scan model.safetensors --html page.html
    """


def _version(context: click.Context, asked: bool) -> None:
    if not asked or context.resilient_parsing:
        return
    if "--verbose" in context.meta.get(_WORDS, ()):
        from strati.cli.version import details

        click.echo(details())
    else:
        click.echo(f"strati {__version__}")
    context.exit()


_WORDS = "strati.words"
_COMPLETION = "_STRATI_COMPLETE"
"""The variable by which click's shell completion asks."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    words = sys.argv[1:] if arguments is None else arguments
    for name in ("stdout", "stderr"):  # closed by the caller (`>&-`): nobody listens, which is no error
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - open to the end
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal that lacks a character is no reason to fail
        sys.stdout.reconfigure(errors="replace")
    if os.name == "nt":
        print("strati: error: Windows is not supported; use Linux, macOS or WSL", file=sys.stderr)
        sys.exit(2)
    # Threads of OpenMP that wait for each other sleep: on a busy machine they would take the processor from those that
    # they wait for. Read when torch is imported; workers inherit it.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    debug = "--debug" in words or bool(os.environ.get("STRATI_DEBUG"))
    interrupts.raise_once()
    try:
        code = _run(words, debug)
    except KeyboardInterrupt:  # while its words were read, or after it, while its last words were written
        code = _stopped()
    if code == interrupts.CODE:
        interrupts.leave()
    interrupts.ignore()
    sys.exit(code)


def _run(words: list[str], debug: bool) -> int:
    try:
        if _COMPLETION in os.environ:  # the shell asks what could come next; click answers, and exits
            strati.main(words, prog_name="strati")
        # Not click's `main`: it answers a Ctrl-C that comes while the words are read with an empty line of its own.
        with strati.make_context("strati", list(words or ["--help"])) as context:
            code = strati.invoke(context)
        sys.stdout.flush()
        if isinstance(code, int):  # what a verb gave to click's Context.exit
            return code
    except StoppedError as error:
        _say(f"strati: {error.what}; {error.why}")
        return 130
    except StratiError as error:
        if interrupts.pressed():
            return _stopped()
        if debug:
            raise
        _say(f"strati: error: {error.what}: {error.why}")
        return 2
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.exceptions.Abort:
        return _stopped()
    except click.ClickException as error:
        return _usage(error)
    except BrokenPipeError:
        # The reader of a pipe went away (`strati ... | head -1`): nothing is wrong, nobody listens.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if interrupts.pressed():
            return _stopped()
        if debug:
            raise
        if (
            isinstance(error, OSError) and error.strerror
        ):  # the system's no: a full disk, a name too long, a lost mount
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
    _say(interrupts.last_words())
    return interrupts.CODE


def _usage(error: click.ClickException) -> int:
    context = getattr(error, "ctx", None)
    what = " ".join(context.command_path.split()[1:]) if context is not None else ""
    hint = f"; see: strati {what} --help" if what else "; see: strati --help"
    why = " ".join(error.format_message().split())  # click lists choices over several lines
    _say(f"strati: error: {what or 'usage'}: {printable(why, 400).rstrip('.')}{hint}")
    return 2


def _say(line: str) -> None:
    print(line.replace("\n", " "), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
