"""``strati plan``: choose what to truncate, quantise, prune or drop, layer by layer, from measured costs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from strati.cli import interrupts
from strati.cli.common import (
    Command,
    Output,
    activation_option,
    calibration_option,
    data_options,
    emit,
    guard_outputs,
    layers_option,
    output_options,
    rows_option,
    show,
)
from strati.cli.study import performance_option
from strati.core.display import NextCommand, command_path
from strati.core.errors import BadInputError
from strati.jobs.progress import progress

_ACTIONS = ("truncate", "quantise", "prune", "drop", "drop-experts", "merge-experts", "adapt")
_FORMATS = (
    *("peft", "llama.cpp", "llm-compressor", "gptqmodel", "auto-round", "modelopt", "compressed-tensors"),
    *("torchao", "csv", "json"),
)


@click.command("plan", cls=Command)
@click.argument("source", metavar="MODEL|STUDY")
@click.option(
    "--budget",
    required=True,
    metavar="NAME=VALUE",
    help="What to keep: parameters=0.8, bits=4.0 or rank=16; or loss=+2%: the smallest within that loss.",
)
@click.option(
    "--action",
    type=click.Choice(_ACTIONS),
    help="What is done to the layers. [default: quantise for bits, else truncate]",
)
@click.option(
    "--unit",
    type=click.Choice(["head", "neuron"]),
    help="Prune whole attention heads or MLP neurons, the same share in every layer.",
)
@data_options(required=False)
@rows_option
@calibration_option
@activation_option(None)
@performance_option
@layers_option
@click.option("--model", metavar="MODEL", help="The network, if the study does not record where it is.")
@click.option(
    "--out", "folder", metavar="DIR", help="Directory for the study of MODEL. [default: in strati's cache]"
)
@click.option(
    "--combinations",
    type=click.IntRange(0),
    help="Random layer combinations to measure, to check that single-layer losses add up. [default: 8]",
)
@click.option(
    "--screen",
    type=click.Choice(["fisher"]),
    help="Measure only the settings that this score cannot decide (a plan from MODEL).",
)
@click.option("--confidence", type=float, help="Coverage of the intervals. [default: 0.95]")
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
    source: str,
    budget: str,
    model: str | None,
    data: str | None,
    folder: str | None,
    export: str | None,
    form: str,
    output: Output,
    **options: Any,
) -> None:
    """Choose a setting for every layer of MODEL within a BUDGET, at the least measured loss.

    Every setting is measured on DATA first (stored, so that the next plan is quick), or was measured by strati study:
    then give its --out folder. The plan is measured as well, beside uniform allocation of the same budget. From a
    MODEL, the edits are data-aware: truncation by inputs, GPTQ, SparseGPT.

    \b
    Example:
      strati plan model.safetensors --data test.npz --budget loss=+2% --json plan.json
      strati plan measured --action truncate --budget parameters=0.8 --json plan.json
      strati plan measured --budget bits=4.0 --export types.sh --format llama.cpp
    """
    from strati.core.files import check_writable
    from strati.interventions.compress.plan import is_study_folder, plan
    from strati.interventions.study import load_study

    if export is not None:
        check_writable(export)
    set_options = {name: value for name, value in options.items() if value not in (None, ())}
    stored = is_study_folder(source)
    if stored:
        measured: Any = load_study(source)
        network = _network_of(measured)
        guard_outputs(click.get_current_context(), also=[network])
        for name in ("inputs", "targets", "activation", "performance", "calibration", "rows"):
            if name in set_options:
                raise BadInputError(f"--{name}", "is for a model; the study has its own")
    else:
        measured, network = source, source
        guard_outputs(click.get_current_context(), also=[source, data, set_options.get("calibration")])
    with progress("plan", None, quiet=output.quiet) as tick:
        result = plan(measured, budget=budget, model=model, data=data, out=folder, tick=tick, **set_options)
    if export is not None:
        result.export(export, format=form)  # type: ignore[arg-type]
    emit(result, output)
    if not output.quiet and output.json != "-":
        show(NextCommand(_next(result, output, model or network)))


def _network_of(measured: Any) -> str | None:
    """Where the network of a stored study is, if that is recorded."""
    return next((origin.path for origin in measured.origin.networks.values() if origin.path), None)


def _next(result: Any, output: Output, network: str | None) -> tuple[str, ...]:
    """The next command, and a shorter one for a narrow terminal."""
    if output.json is not None:
        factored = " --factored" if result.action == "truncate" else ""
        return (
            f"strati apply {command_path(output.json)} {command_path(network or 'MODEL')} --out small{factored}",
        )
    again = f"{interrupts.resume_command()} --json plan.json".replace(f"{Path.cwd()}{os.sep}", "")
    store = result.study.store if result.study is not None else None
    if store is None:
        return (again,)
    folder = command_path(Path(store).parent)
    return again, f"strati plan {folder} --budget {result.budget} --action {result.action} --json plan.json"
