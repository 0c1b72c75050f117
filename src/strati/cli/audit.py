"""``strati audit``: which metrics of a study to trust."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from strati.cli import common
from strati.interventions.audit.audit import AuditConfig, audit


@click.command("audit", cls=common.Command)
@click.argument("folder", metavar="DIR")
@common.option(
    "--robust", "A layer is robust if it keeps at least this share of performance.", float, AuditConfig
)
@common.option(
    "--critical", "A layer is critical if it keeps at most this share of performance.", float, AuditConfig
)
@common.option(
    "--resamples",
    "Number of permutations used for intervals and recommendations.",
    click.IntRange(1),
    AuditConfig,
)
@common.option("--figures DIR", "Draw performance against each metric into this folder.")
@common.option("--verbose", "Also print one sentence per metric.")
@common.seed_option
@common.output_options
def command(folder: str, figures: str | None, verbose: bool, output: common.Output, **options: Any) -> None:
    """Audit the study in DIR: correlations with performance, robust and critical layers, a verdict per metric.

    \b
    Example:
      strati study fcn-digits --out digits
      strati audit digits --json audit.json
    """
    audited = audit(folder, **options)
    if figures is not None:
        from strati.report.plots.study import draw_all

        draw_all(audited.study, Path(figures))
    common.emit(audited, output)
    if output.speaks:
        from strati.interventions.audit.summary import audit_sentences

        for sentence in audit_sentences(audited) if verbose else ():
            common.show(sentence)
        common.show(f"next: strati report {folder} -o report.html")
