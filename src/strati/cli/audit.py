"""``strati audit``: which metrics of a study to trust."""

from __future__ import annotations

from pathlib import Path

import click

from strati.cli.common import Command, Output, emit, output_options, seed_option, show
from strati.core.options import default
from strati.interventions.audit.audit import AuditConfig, audit


@click.command("audit", cls=Command)
@click.argument("folder", metavar="DIR")
@click.option(
    "--robust",
    default=default(AuditConfig, "robust"),
    show_default=True,
    help="A layer is robust if it keeps at least this share of performance.",
)
@click.option(
    "--critical",
    default=default(AuditConfig, "critical"),
    show_default=True,
    help="A layer is critical if it keeps at most this share of performance.",
)
@click.option(
    "--resamples",
    type=click.IntRange(1),
    default=default(AuditConfig, "resamples"),
    show_default=True,
    help="Number of permutations used for intervals and recommendations.",
)
@click.option("--figures", metavar="DIR", help="Draw performance against each metric into this folder.")
@click.option("--verbose", is_flag=True, help="Also print one sentence per metric.")
@seed_option
@output_options
def command(
    folder: str,
    robust: float,
    critical: float,
    resamples: int,
    figures: str | None,
    verbose: bool,
    seed: int,
    output: Output,
) -> None:
    """Audit the study in DIR: correlations with performance, robust and critical layers, a verdict per metric.

    \b
    Example:
      strati study fcn-digits --out digits
      strati audit digits --json audit.json
    """
    result = audit(folder, robust=robust, critical=critical, resamples=resamples, seed=seed)
    if figures is not None:
        from strati.report.plots.study import draw_all

        draw_all(result.study, Path(figures))
    emit(result, output)
    if not output.quiet and output.json != "-":
        from strati.interventions.audit.summary import audit_sentences

        for sentence in audit_sentences(result) if verbose else ():
            show(sentence)
        show(f"next: strati report {folder} -o report.html")
