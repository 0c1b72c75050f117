"""``strati study``: every layer re-initialised and re-randomised, and what that does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import click

from strati.cli import interrupts
from strati.cli.common import Output, emit, estimate_option, output_options, workers_option
from strati.cli.guard import guard_outputs
from strati.errors import BadInputError, StoppedError
from strati.intervene.planning.config import StudyConfig
from strati.run.files import check_table, export_table
from strati.run.progress import progress


@click.command("study")
@click.argument("spec")
@click.option(
    "--out",
    "folder",
    required=True,
    metavar="DIR",
    help="Folder of the store; a stopped study resumes there. Not touched with --estimate.",
)
@click.option("--export", metavar="FILE", help="Write the rows, sorted by key, as .csv or .parquet.")
@click.option("--seed", type=click.IntRange(0), help="Random seed; default: the spec's.")
@click.option(
    "--init",
    "scheme",
    help="Distribution to re-randomise from (pytorch, gpt2, vit, timm, kaiming, normal, moments).",
)
@click.option(
    "--engine",
    type=click.Choice(["local", "ray"]),
    default="local",
    show_default=True,
    help="Run on this machine or on a Ray cluster.",
)
@workers_option(StudyConfig)
@click.option(
    "--address", metavar="HOST:PORT", help="An existing Ray cluster; without it, one is started here."
)
@click.option("--retry", is_flag=True, help="Try again what failed in an earlier run.")
@estimate_option
@output_options
def command(
    spec: str,
    folder: str,
    export: str | None,
    seed: int | None,
    scheme: str | None,
    engine: str,
    workers: int | None,
    address: str | None,
    retry: bool,
    estimate: bool,
    output: Output,
) -> None:
    """Run the intervention study SPEC: a TOML file, or the name of a built-in one (fcn-digits).

    Each layer is re-initialised and re-randomised, one at a time; performance and every metric are recorded.
    Interrupted? Run the same command again to resume.

    \b
    Example:
      strati study fcn-digits --out digits
      strati study fcn-digits --out digits --estimate
      strati study fcn-digits --out digits --export rows.csv --workers 2
    """
    from strati.errors import require
    from strati.intervene.planning.spec import SCHEMES, read_spec

    if export is not None:
        check_table(export)
    if scheme is not None and scheme not in SCHEMES:
        raise BadInputError(f"--init {scheme}", f"no such distribution; there are {', '.join(SCHEMES)}")
    wanted = read_spec(spec)
    others = (one.source for one in wanted.interventions.settings if isinstance(one.source, str))
    read = (wanted.network.path, wanted.network.initial, wanted.data.path, *others)
    guard_outputs(click.get_current_context(), also=read)
    if seed is not None:
        wanted = replace(wanted, seed=seed)
    if scheme is not None:
        wanted = replace(wanted, interventions=replace(wanted.interventions, init=scheme))
    require("torch", "torch", "an intervention study")
    if engine == "local" and address is not None:
        raise BadInputError("--address", "is the address of a Ray cluster; add --engine ray")
    if estimate:
        from strati.intervene.cost import estimate_study

        emit(estimate_study(wanted, workers=workers or 0), output)
        return
    resume = interrupts.resume_command()
    try:
        from strati.intervene.study import study

        with progress(f"study {wanted.name}", None, quiet=output.quiet) as tick:
            where: dict[str, Any] = {"engine": engine, "workers": workers, "address": address}
            result = study(wanted, out=folder, tick=tick, retry=retry, resume=resume, **where)
    except KeyboardInterrupt:  # before the study had begun, or while its store was being opened
        raise StoppedError("stopped, 0 done in this run", f"resume with {resume}") from None
    if export is not None:
        export_table(result.frame(), export)
    emit(result, output)
