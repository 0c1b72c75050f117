"""``strati llc``: the local learning coefficient of a network on given data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from strati.cli import common
from strati.cli.landscape import loss_option, sampling_options
from strati.landscape.llc.config import LLCConfig

if TYPE_CHECKING:
    from strati.landscape.llc.estimate import LearningCoefficient


@click.command("llc", cls=common.Command)
@common.source_options
@loss_option
@common.rows_option
@common.option("--per-layer", "One coefficient for each layer, the others fixed.")
@sampling_options
@common.layers_option
@common.device_option
@common.seed_option
@common.output_options
def command(
    source: common.Source,
    loss: str | None,
    rows: int | None,
    per_layer: bool,
    layers: tuple[str, ...] | None,
    output: common.Output,
    **sampling: Any,
) -> None:
    """Estimate the local learning coefficient of MODEL on DATA, with its error.

    The amount of work depends on the problem alone and goes on until the chains have mixed, up to a limit;
    --seconds sets a time budget instead. For a language model token ids are enough: the targets are the
    next tokens.

    \b
    Example:
      strati llc model.safetensors --data train.npz
      strati llc model.safetensors --data train.npz --seconds 60 --json llc.json
      strati llc gpt2/ --data tokens.npy --gamma 1000
    """
    from strati.landscape.llc.estimate import LearningCoefficient

    config = LLCConfig(**sampling)
    problem = source.problem(loss, rows)
    coefficient = common.sample_llc(problem, output, config=config, layers=layers, per_layer=per_layer)
    single = isinstance(coefficient, LearningCoefficient)
    common.emit(coefficient, output, next_command(coefficient, source, problem.loss) if single else None)


def next_command(coefficient: LearningCoefficient, source: common.Source, loss: str) -> str:
    """What to run next: a longer run, the same question without targets, or the count."""
    from strati.landscape.llc.estimate import NoEstimate

    if coefficient.estimate is not None:
        return f"strati degeneracy {source}"
    if coefficient.missing is NoEstimate.OFF_MINIMUM and not loss.startswith("behavioural"):
        return f"strati llc {source} --loss behavioural-{'kl' if loss == 'cross_entropy' else 'mse'}"
    if coefficient.missing in (NoEstimate.TOO_SHORT, NoEstimate.NOT_MIXED, NoEstimate.DRIFTING):
        return f"strati llc {source} --draws {4 * max(coefficient.draws, 50)}"
    return f"strati llc {source} --gamma {10 * coefficient.gamma:.3g}"
