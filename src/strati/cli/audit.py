"""``strati audit``: what the metrics of a study are worth."""

from __future__ import annotations

from pathlib import Path

import click

from strati.cli.common import Output, emit, output_options, seed_option


@click.command("audit")
@click.argument("folder", metavar="DIR")
@click.option(
    "--robust",
    default=0.9,
    show_default=True,
    help="Share of performance retained from which a layer is robust.",
)
@click.option(
    "--critical",
    default=0.5,
    show_default=True,
    help="Share of performance retained up to which it is critical.",
)
@click.option(
    "--resamples", type=click.IntRange(1), default=1000, show_default=True, help="Bootstrap resamples."
)
@click.option(
    "--plot", "figures", metavar="DIR", help="Draw performance against each metric into this folder."
)
@seed_option
@output_options
def command(
    folder: str,
    robust: float,
    critical: float,
    resamples: int,
    figures: str | None,
    seed: int,
    output: Output,
) -> None:
    """Audit the study in DIR: correlations with performance, robust and critical layers, a verdict per metric.

    \b
    Example:
      strati study fcn-digits --out digits
      strati audit digits --json audit.json
    """
    from strati.intervene.judging.audit import audit

    result = audit(folder, robust=robust, critical=critical, resamples=resamples, seed=seed)
    if figures is not None:
        from strati.report.plots.study import draw_all

        draw_all(result.study, Path(figures))
    emit(result, output)
