"""``strati check``: exit with 3 when a network is damaged, or shows one of the codes."""

from __future__ import annotations

import click

from strati.cli.common import (
    Command,
    Output,
    emit,
    layers_option,
    output_options,
    seed_option,
    workers_option,
)
from strati.comparison.check import CheckConfig
from strati.jobs.progress import progress

FOUND = 3
"""The exit code of a check that found what it looked for."""


@click.command("check", cls=Command)
@click.argument("model", required=False)
@click.option("--base", metavar="MODEL", help="Compare with this network: needed for kinds of update.")
@click.option(
    "--fail-on",
    multiple=True,
    metavar="CODES",
    help="Codes that fail (--list shows all), with commas; repeatable. Default: the codes of damage and, with "
    "--base, every change but conversions.",
)
@click.option("--spectra", is_flag=True, help="Compute spectra too; report their codes and rank-collapse.")
@click.option("--list", "listed", is_flag=True, help="List the codes and exit; needs no model.")
@layers_option
@workers_option
@seed_option
@output_options
@click.pass_context
def command(
    context: click.Context,
    model: str | None,
    base: str | None,
    fail_on: tuple[str, ...],
    spectra: bool,
    listed: bool,
    layers: tuple[str, ...],
    workers: int | None,
    seed: int,
    output: Output,
) -> None:
    """Find damage in MODEL and exit with 3: NaN, missing tensors, holes, wild entries, unfaithful conversions.

    Every floating-point tensor is read once; nothing else is computed unless you ask for it. One line per finding.
    With --base the network is compared as well, and every change but a conversion or rounding fails.

    \b
    Example:
      strati check model.safetensors
      strati check model.gguf --base model/
      strati check tuned/ --base base/ --fail-on dense
    """
    from strati.cli.common import show
    from strati.comparison.check import check
    from strati.comparison.check_codes import CODES
    from strati.core.files import write_atomic
    from strati.core.options import default
    from strati.io.network import open as open_network
    from strati.report.page import build_page
    from strati.spectra.scan import scan

    if listed:
        for code, meaning in CODES.items():
            show(f"{code}: {meaning}")
        return
    if model is None:
        raise click.UsageError("give a model, or --list for the codes")
    config = CheckConfig(
        fail_on=fail_on or default(CheckConfig, "fail_on"),
        spectra=spectra,
        layers=layers,
        seed=seed,
        workers=workers,
    )
    with progress("check", None, quiet=output.quiet) as tick:
        result = check(model, base, config=config, tick=tick)
    if output.html is not None:
        evidence = result.evidence or (scan(open_network(model), eigenvalues=True),)
        write_atomic(output.html, build_page([item.to_dict() for item in evidence]))
    emit(result, Output(output.json, None, output.quiet))
    if not result.passed:
        context.exit(FOUND)
