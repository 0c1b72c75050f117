"""``strati check``: exit with 3 when a layer shows one of the codes."""

from __future__ import annotations

import click

from strati.cli.common import Output, emit, layers_option, output_options, seed_option, workers_option
from strati.run.progress import progress
from strati.spectra.comparing.check import CheckConfig

FOUND = 3
"""The exit code of a check that found what it looked for."""


@click.command("check")
@click.argument("model")
@click.option("--base", metavar="MODEL", help="Compare with this network: needed for kinds of update.")
@click.option(
    "--fail-on",
    multiple=True,
    metavar="CODES",
    help="Codes of warnings or update kinds (dense, low-rank, ...), with commas; repeatable. "
    "Default: not-finite, out-of-range, constant.",
)
@click.option("--list", "listed", is_flag=True, help="List the codes and exit.")
@layers_option
@workers_option(CheckConfig)
@seed_option
@output_options
@click.pass_context
def command(
    context: click.Context,
    model: str,
    base: str | None,
    fail_on: tuple[str, ...],
    listed: bool,
    layers: tuple[str, ...],
    workers: int,
    seed: int,
    output: Output,
) -> None:
    """Fail (exit code 3) when a layer of MODEL shows one of the codes: for continuous integration.

    One line per finding. Without --base the codes are those of a scan's warnings; with it also the kinds of update
    (untouched, rounding, low-rank, dense) and what could not be compared.

    \b
    Example:
      strati check model.safetensors --fail-on not-finite,constant,noise-like
      strati check tuned/ --base base/ --fail-on dense
    """
    from strati.cli.common import show
    from strati.network.open import open as open_network
    from strati.options import default
    from strati.report.page import build_page
    from strati.run.files import write_atomic
    from strati.spectra.comparing.check import CODES, check
    from strati.spectra.scan import scan

    if listed:
        for code, meaning in CODES.items():
            show(f"{code}: {meaning}")
        return
    config = CheckConfig(
        fail_on=fail_on or default(CheckConfig, "fail_on"), layers=layers, seed=seed, workers=workers
    )
    network = open_network(model)
    other = open_network(base) if base is not None else None
    total = len(network.layers()) * (2 if other is not None else 1) + (len(other.layers()) if other else 0)
    with progress("check", total, quiet=output.quiet) as tick:
        result = check(network, other, config=config, tick=tick)
    if output.html is not None:
        evidence = result.evidence or (scan(network, eigenvalues=True),)
        write_atomic(output.html, build_page([item.to_dict() for item in evidence]))
    emit(result, Output(output.json, None, output.quiet))
    if not result.passed:
        context.exit(FOUND)
