"""``strati study``: change every layer of a network and measure what that does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from strati.cli import common, interrupts
from strati.core.errors import BadInputError, StoppedError
from strati.jobs.progress import progress

_WITH_SETTINGS = {
    "truncate": "rank=2,4,8; 'standard' for the usual ones. With data: metric=inputs.",
    "quantise": "bits=4,3,2; 'standard' for the usual ones. With data: method=gptq or awq; without: hqq.",
    "prune": "share=0.5,0.9; 'standard' for the usual ones. With data: method=sparsegpt or wanda.",
    "reorder": "run=2,3.",
    "repeat": "times=2.",
    "parallel": "run=2,3.",
    "drop-experts": "count=1,2.",
    "merge-experts": "count=1,2.",
}
_WITHOUT = {
    "reinitialise": "Put each layer's initial values back (needs --initial).",
    "rerandomise": "Draw each layer anew from its initial distribution.",
}

TEMPLATE = Path(__file__).with_name("study_template.toml")
"""The commented spec that ``--template`` prints."""


performance_option = common.option(
    "--performance",
    "Measure of performance.  [default: perplexity for tokens, else accuracy]",
    ("accuracy", "loss", "perplexity"),
)

_intervention_options = common.options(
    *(
        common.option(f"--{name} SETTINGS", f"Settings of {name}, such as {example}")
        for name, example in _WITH_SETTINGS.items()
    ),
    common.option(
        "--drop [run=N]",
        "Replace each residual block, or each run of N neighbouring ones, by the identity.",
        is_flag=False,
        flag_value="run=1",
    ),
    *(common.option(f"--{name}", text) for name, text in _WITHOUT.items()),
)


def _print_template(context: click.Context, _: click.Parameter, requested: bool) -> None:
    if requested and not context.resilient_parsing:
        click.echo(TEMPLATE.read_text(encoding="utf-8"), nl=False)
        context.exit()


@click.command("study", cls=common.Command)
@click.argument("source", metavar="MODEL|SPEC")
@common.data_options(required=False)
@common.rows_option
@common.calibration_option
@common.activation_option(None)
@performance_option
@_intervention_options
@common.option("--initial INIT", "The network's initial weights, for --reinitialise.")
@common.layers_option
@common.option(
    "--metrics NAMES",
    "Sensitivity scores with passes of their own: fisher_gradient, kl_direct, aumann_shapley, higgs, "
    "hessian_trace or all. [default: fisher_gradient]",
    callback=lambda _c, _p, names: names and tuple(name.strip() for name in names.split(",")),
)
@common.option("--htsr", "Record also what scan --htsr adds: traps, erg_gap, Hill and FARMS exponents.")
@common.work_options()
@common.export_option
@common.option("--draws", "Draws of interventions with chance in them. [default: 1]", click.IntRange(1))
@common.option("--seed", "Random seed. [default: 0, or the spec's]", click.IntRange(0))
@common.option(
    "--init TEXT", "Distribution to re-randomise from (pytorch, gpt2, vit, timm, kaiming, normal, moments)."
)
@common.retry_option
@common.option(
    "--template",
    "Print a commented TOML spec, then exit.",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_template,
)
@common.estimate_option
@common.output_options
def command(
    source: str,
    out: str | None,
    engine: str,
    workers: int | None,
    address: str | None,
    retry: bool,
    estimate: bool,
    output: common.Output,
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

        common.emit(estimate_study(call, workers=workers or 0), replace(output, export=None))
        return
    resume = interrupts.resume_command()
    try:
        from strati.interventions.study import study

        with progress("study", None, quiet=output.quiet, resume=resume) as tick:
            result = study(call, out=out, tick=tick, **where)
    except KeyboardInterrupt:  # before the study had begun, or while its store was being opened
        raise StoppedError("stopped, 0 done in this run", f"resume with {resume}") from None
    common.emit(result, output)


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
        common.guard_outputs(
            context, also=[source, data, arguments.get("initial"), arguments.get("calibration")]
        )
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
    common.guard_outputs(context, also=[path for path in (*read, *others) if isinstance(path, str)])
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
