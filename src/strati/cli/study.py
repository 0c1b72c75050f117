"""``strati study``: change every layer of a network and measure what that does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import click

from strati.cli import interrupts
from strati.cli.common import (
    Command,
    Output,
    activation_option,
    calibration_option,
    data_options,
    emit,
    estimate_option,
    export_option,
    guard_outputs,
    layers_option,
    output_options,
    retry_option,
    rows_option,
    work_options,
)
from strati.core.errors import BadInputError, StoppedError
from strati.core.files import check_table, export_table
from strati.jobs.progress import progress

F = TypeVar("F", bound=Callable[..., Any])

_WITH_SETTINGS = {
    "truncate": "rank=2,4,8",
    "quantise": "bits=4,3,2",
    "prune": "share=0.5,0.9",
    "reorder": "run=2,3",
    "repeat": "times=2",
    "parallel": "run=2,3",
    "drop-experts": "count=1,2",
    "merge-experts": "count=1,2",
}
_DATA_AWARE = {
    "truncate": "With data: metric=inputs.",
    "quantise": "With data: method=gptq or awq; without: hqq.",
    "prune": "With data: method=sparsegpt or wanda.",
}
_WITHOUT = {
    "reinitialise": "Put each layer's initial values back (needs --initial).",
    "rerandomise": "Draw each layer anew from its initial distribution.",
}

TEMPLATE = """\
# A study: every layer is changed in turn, and the network is measured on the data.
#   strati study study.toml --out measured
name = "study"
seed = 0

[network]
path = "model.safetensors"    # a checkpoint, or a Hugging Face directory (then also: source = "transformers")
# initial = "init.safetensors"  # the weights before training, for reinitialise
# activation = "relu"           # of a bare MLP, which a checkpoint does not store

[data]
path = "data.npz"             # arrays x and y; CSV, .npy tokens or .txt also work

[measure]
performance = "accuracy"      # or "loss", "perplexity"

[interventions]
# kinds = ["reinitialise", "rerandomise"]
# draws = 2                     # of interventions with chance in them
layers = ["*"]

[interventions.truncate]      # keep the leading singular directions
rank = [2, 4, 8, 16]
# metric = "inputs"             # those that matter most for the layer's outputs; quantise: method = "gptq"

[interventions.quantise]      # round to 2^bits levels
bits = [8, 4, 3, 2]

[interventions.prune]         # set the smallest entries to zero
share = [0.5, 0.7, 0.9]

[metrics]
spectral = true               # the layer's spectrum, for strati audit
"""


performance_option = click.option(
    "--performance",
    type=click.Choice(["accuracy", "loss", "perplexity"]),
    help="Measure of performance.  [default: perplexity for tokens, else accuracy]",
)


def _intervention_options(function: F) -> F:
    for name, text in reversed(_WITHOUT.items()):
        function = click.option(f"--{name}", is_flag=True, help=text)(function)
    function = click.option(
        "--drop",
        metavar="[run=N]",
        is_flag=False,
        flag_value="run=1",
        help="Replace each residual block, or each run of N neighbouring ones, by the identity.",
    )(function)
    for name, example in reversed(_WITH_SETTINGS.items()):
        what = f"Settings of {name}, such as {example}"
        what += f"; 'standard' for the usual ones. {_DATA_AWARE[name]}" if name in _DATA_AWARE else "."
        function = click.option(f"--{name}", metavar="SETTINGS", help=what)(function)
    return function


def _print_template(context: click.Context, _: click.Parameter, requested: bool) -> None:
    if requested and not context.resilient_parsing:
        click.echo(TEMPLATE, nl=False)
        context.exit()


@click.command("study", cls=Command)
@click.argument("source", metavar="MODEL|SPEC")
@data_options(required=False)
@rows_option
@calibration_option
@activation_option(None)
@performance_option
@_intervention_options
@click.option("--initial", metavar="INIT", help="The network's initial weights, for --reinitialise.")
@layers_option
@click.option(
    "--metrics",
    metavar="NAMES",
    callback=lambda _c, _p, names: names and tuple(name.strip() for name in names.split(",")),
    help="Sensitivity scores with passes of their own: fisher_gradient, kl_direct, aumann_shapley, higgs, "
    "hessian_trace or all. [default: fisher_gradient]",
)
@click.option(
    "--htsr",
    is_flag=True,
    help="Record also what scan --htsr adds: traps, erg_gap, Hill and FARMS exponents.",
)
@work_options()
@export_option
@click.option(
    "--draws", type=click.IntRange(1), help="Draws of interventions with chance in them. [default: 1]"
)
@click.option("--seed", type=click.IntRange(0), help="Random seed. [default: 0, or the spec's]")
@click.option(
    "--init",
    help="Distribution to re-randomise from (pytorch, gpt2, vit, timm, kaiming, normal, moments).",
)
@retry_option
@click.option(
    "--template",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_template,
    help="Print a commented TOML spec, then exit.",
)
@estimate_option
@output_options
def command(
    source: str,
    out: str | None,
    export: str | None,
    engine: str,
    workers: int | None,
    address: str | None,
    retry: bool,
    estimate: bool,
    output: Output,
    **options: Any,
) -> None:
    """Change every layer of MODEL in turn and measure the network on DATA.

    Without interventions: truncate, quantise, prune, and drop where there are residual blocks. Instead of a model, SPEC
    is a TOML file (see --template) or the name of a built-in study. Interrupted? Run the same command again to resume.

    \b
    Example:
      strati study model.safetensors --data test.npz --out measured
      strati study model/ --data text.txt --truncate rank=2,4,8 --drop --out measured
      strati study fcn-digits --out digits --estimate
    """
    from strati.core.plugins import require

    if export is not None:
        check_table(export)
    if out is None:
        raise BadInputError("--out", "is missing: the directory for results")
    if engine == "local" and address is not None:
        raise BadInputError("--address", "is the address of a Ray cluster; add --engine ray")
    where: dict[str, Any] = {"engine": engine, "address": address, "retry": retry}
    where |= {} if workers is None else {"workers": workers}
    arguments = {name: value for name, value in options.items() if value not in (None, False, ())}
    call = _call(source, arguments)
    require("torch", "torch", "an intervention study")
    if estimate:
        from strati.interventions.study_cost import estimate_study

        emit(estimate_study(call, workers=workers or 0), output)
        return
    resume = interrupts.resume_command()
    try:
        from strati.interventions.study import study

        with progress("study", None, quiet=output.quiet, resume=resume) as tick:
            result = study(call, out=out, tick=tick, **where)
    except KeyboardInterrupt:  # before the study had begun, or while its store was being opened
        raise StoppedError("stopped, 0 done in this run", f"resume with {resume}") from None
    if export is not None:
        export_table(result.frame(), export)
    emit(result, output)


def _call(source: str, arguments: dict[str, Any]) -> Any:
    """The call that the command stands for: a model with data, or a spec, whose draws, layers and so on may be set."""
    from strati.interventions.study_config import SCHEMES, StudyCall, StudyConfig, builtin_names
    from strati.interventions.study_spec import read_spec

    context = click.get_current_context()
    if arguments.get("init", "auto") not in SCHEMES:
        why = f"no such distribution; there are {', '.join(SCHEMES)}"
        raise BadInputError(f"--init {arguments['init']}", why)
    data = arguments.pop("data", None)
    if data is not None:
        if source in builtin_names() or Path(source).suffix.lower() == ".toml":
            raise BadInputError("--data", "is for a model; a spec names its own data")
        guard_outputs(context, also=[source, data, arguments.get("initial"), arguments.get("calibration")])
        interventions = _interventions(arguments)
        if interventions:
            arguments["interventions"] = tuple(interventions)
        return StudyCall("study", source, data, StudyConfig(workers=1, **arguments))
    if Path(source).exists() and Path(source).suffix.lower() != ".toml":
        raise BadInputError(source, "a model needs data to be measured on: add --data DATA")
    call = read_spec(source)
    only = sorted(set(arguments) - {"seed", "draws", "layers", "init", "rows"})
    if only:
        raise BadInputError(f"--{only[0]}", "is for a model; a spec has its own settings")
    others = [intervention.source for intervention in call.config.interventions]
    read = [*(call.model.values() if isinstance(call.model, dict) else ()), call.data, call.config.initial]
    guard_outputs(context, also=[path for path in (*read, *others) if isinstance(path, str)])
    if call.trains and "seed" in arguments:
        call = replace(call, model=replace(call.model, seed=arguments["seed"]))
    return replace(call, config=replace(call.config, **arguments))


def _interventions(arguments: dict[str, Any]) -> list[Any]:
    """The interventions that were asked for, taken out of the options."""
    from strati.interventions.kinds import STANDARD_SETTINGS, make, parse_intervention

    interventions = []
    for name in (*_WITH_SETTINGS, "drop", *_WITHOUT):
        text = arguments.pop(name.replace("-", "_"), None)
        if text is None:
            continue
        if text == "run=1":  # a block alone needs no setting
            text = ""
        if text == "standard" and name in STANDARD_SETTINGS:
            interventions.append(make(name, STANDARD_SETTINGS[name]))
        else:
            interventions.append(parse_intervention(name, "" if text is True else text))
    if (
        any(intervention.name == "reinitialise" for intervention in interventions)
        and "initial" not in arguments
    ):
        raise BadInputError("--reinitialise", "needs the network's initial weights: add --initial INIT")
    return interventions
