"""``strati plan``: choose what to truncate, quantise, prune or drop, layer by layer, from measured costs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from strati.cli import common, interrupts
from strati.cli.study import performance_option
from strati.core.display import NextCommand, command_path
from strati.core.errors import BadInputError
from strati.jobs.progress import progress

_ACTIONS = ("truncate", "quantise", "prune", "drop", "drop-experts", "merge-experts", "adapt")
_FORMATS = (
    *("peft", "llama.cpp", "llm-compressor", "gptqmodel", "auto-round", "modelopt", "compressed-tensors"),
    *("torchao", "csv", "json"),
)


@click.command("plan", cls=common.Command)
@click.argument("source", metavar="MODEL|STUDY")
@common.option(
    "--budget NAME=VALUE",
    "What to keep: parameters=0.8, bits=4.0 or rank=16; or loss=+2%: the smallest within that loss.",
    required=True,
)
@common.option(
    "--action", "What is done to the layers. [default: quantise for bits, else truncate]", _ACTIONS
)
@common.option(
    "--unit",
    "Prune whole attention heads or MLP neurons, the same share in every layer.",
    ("head", "neuron"),
)
@common.data_options(required=False)
@common.rows_option
@common.calibration_option
@common.activation_option(None)
@performance_option
@common.layers_option
@common.option("--model MODEL", "The network, if the study does not record where it is.")
@common.option("--out folder DIR", "Directory for the study of MODEL. [default: in strati's cache]")
@common.option(
    "--combinations",
    "Random layer combinations to measure, to check that single-layer losses add up. [default: 8]",
    click.IntRange(0),
)
@common.option(
    "--screen",
    "Measure only the settings that this score cannot decide (a plan from MODEL).",
    ("fisher",),
)
@common.option("--confidence", "Coverage of the intervals. [default: 0.95]", float)
@common.option("--seed", "Random seed. [default: 0]", click.IntRange(0))
@common.option("--export exported FILE", "Write the plan for another tool; see --format.")
@common.option("--format form", "Format of --export.", _FORMATS, default="csv")
@common.output_options
def command(
    source: str,
    budget: str,
    model: str | None,
    data: str | None,
    folder: str | None,
    exported: str | None,
    form: str,
    output: common.Output,
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

    if exported is not None:
        check_writable(exported)
    set_options = {name: value for name, value in options.items() if value is not None}
    stored = is_study_folder(source)
    if stored:
        measured: Any = load_study(source)
        network = _network_of(measured)
        common.guard_outputs(click.get_current_context(), also=[network])
        for name in ("inputs", "targets", "activation", "performance", "calibration", "rows"):
            if name in set_options:
                raise BadInputError(f"--{name}", "is for a model; the study has its own")
    else:
        measured, network = source, source
        common.guard_outputs(click.get_current_context(), also=[source, data, set_options.get("calibration")])
    with progress("plan", None, quiet=output.quiet) as tick:
        result = plan(measured, budget=budget, model=model, data=data, out=folder, tick=tick, **set_options)
    if exported is not None:
        result.export(exported, format=form)  # type: ignore[arg-type]
    common.emit(result, output)
    if output.speaks:
        common.show(NextCommand(_next(result, output, model or network)))


def _network_of(measured: Any) -> str | None:
    """Where the network of a stored study is, if that is recorded."""
    return next((origin.path for origin in measured.origin.networks.values() if origin.path), None)


def _next(result: Any, output: common.Output, network: str | None) -> tuple[str, ...]:
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
