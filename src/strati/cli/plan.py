"""``strati plan``: what to cut, round, drop or adapt, layer by layer, from measured interventions."""

from __future__ import annotations

from typing import Any

import click

from strati.cli.common import Output, emit, output_options
from strati.cli.guard import guard_outputs
from strati.run.progress import progress

_ACTIONS = ("truncate", "quantise", "prune", "drop", "adapt")
_FORMATS = ("peft", "llama.cpp", "csv", "json")


@click.command("plan")
@click.argument("study", metavar="STUDY")
@click.option("--action", type=click.Choice(_ACTIONS), help="What is done to the layers. [default: truncate]")
@click.option(
    "--budget",
    required=True,
    metavar="NAME=VALUE",
    help="parameters=0.8, bits=4.0, rank=16, or loss=+2% (then the smallest network within that loss).",
)
@click.option("--layers", multiple=True, metavar="PATTERN", help="Layers that may be changed; default: all.")
@click.option("--model", metavar="MODEL", help="The network, if the study does not record where it is.")
@click.option("--data", metavar="DATA", help="Data to measure combinations on; default: the study's own.")
@click.option("--combinations", type=click.IntRange(0), help="Random combinations to measure. [default: 8]")
@click.option("--seed", type=click.IntRange(0), help="Random seed. [default: 0]")
@click.option("--export", metavar="FILE", help="Write the plan for another tool; see --format.")
@click.option(
    "--format",
    "form",
    type=click.Choice(_FORMATS),
    default="csv",
    show_default=True,
    help="Format of --export.",
)
@output_options
def command(
    study: str,
    action: str | None,
    budget: str,
    layers: tuple[str, ...],
    model: str | None,
    data: str | None,
    combinations: int | None,
    seed: int | None,
    export: str | None,
    form: str,
    output: Output,
) -> None:
    """Plan an ACTION within a BUDGET from the study in STUDY (the --out folder of strati study).

    Chooses one measured setting per layer at the least measured loss, measures the result and the same budget spread
    evenly, and says whether the plan is better.

    \b
    Example:
      strati study compress.toml --out measured
      strati plan measured --action truncate --budget parameters=0.8 --json plan.json
      strati plan measured --action quantise --budget bits=4.0 --export types.sh --format llama.cpp
    """
    from strati.intervene.plan import plan
    from strati.intervene.study import load_study
    from strati.run.files import check_writable

    if export is not None:
        check_writable(export)
    measured = load_study(study)
    network = (measured.origin.get("spec") or {}).get("network", {}).get("path")
    guard_outputs(click.get_current_context(), also=[network])
    given = {"action": action, "combinations": combinations, "seed": seed, "layers": layers or None}
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    with progress("plan", None, quiet=output.quiet) as tick:
        result = plan(measured, budget=budget, model=model, data=data, tick=tick, **options)
    if export is not None:
        result.export(export, format=form)  # type: ignore[arg-type]
    emit(result, output)
