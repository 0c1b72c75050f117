"""``strati basis``: interaction basis, interaction graph and modules of a network on given data."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from strati.cli import common
from strati.core.files import check_writable
from strati.jobs.progress import progress

if TYPE_CHECKING:
    from torch import nn

    from strati.io.data_files import Data


@click.command("basis", cls=common.Command)
@common.source_options
@common.option(
    "--kind",
    "Basis: interaction, local, pca or neuron.",
    ("interaction", "local", "pca", "neuron"),
    default="interaction",
)
@common.option("--epsilon", "Cutoff on squared edges.  [default: 1e-3 of the strongest]", common.POSITIVE)
@common.option("--modules number", "Force exactly N modules.", click.IntRange(1))
@common.option("--no-centre centre", "Do not subtract mean activations.", flag_value=False, default=True)
@common.option(
    "--sites TEXT",
    "Where to read a network that is not an MLP: residual, mlp, or module names with commas "
    "(NAME:input for what goes in).",
)
@common.rows_option
@common.layers_option
@common.device_option
@common.option("--compare", "Compare with PCA and neuron bases.")
@common.option(
    "--sparsify FILE", "Write an equivalent checkpoint with more zero weights (same outputs on DATA)."
)
@common.seed_option
@common.output_options
def command(
    source: common.Source, rows: int | None, sparsify: str | None, output: common.Output, **options: Any
) -> None:
    """Interaction basis, interaction graph and modules of MODEL on DATA.

    MODEL is a checkpoint of a multilayer perceptron or a local Hugging Face directory (DATA are then token
    numbers); for other networks use strati.interaction_basis in Python.

    \b
    Example:
      strati basis model.safetensors --data data.npz
      strati basis model.safetensors --data data.npz --compare --html basis.html
      strati basis model.safetensors --data data.npz --sparsify sparse.safetensors
    """
    if sparsify is None:
        network, arrays = source.read()
        _survey(network, _first(arrays, rows), source, output, **options)
        return
    check_writable(sparsify)
    network, arrays = source.read()
    from strati.landscape.basis.sparsify import sparsify as make_sparse

    with progress("sparsify", None, quiet=output.quiet) as tick:
        sparse = make_sparse(
            network, _first(arrays, rows).x, layers=options["layers"], device=options["device"], tick=tick
        )
    sparse.save(sparsify)
    common.emit(sparse, output)
    if output.speaks:
        common.show(f"wrote {sparsify}")


def _survey(
    network: nn.Module,
    inputs: Data,
    source: common.Source,
    output: common.Output,
    *,
    epsilon: float | None,
    number: int | None,
    compare: bool,
    **options: Any,
) -> None:
    from strati.landscape.basis.ablation import compare_bases
    from strati.landscape.basis.basis import BasisConfig, interaction_basis
    from strati.landscape.basis.graph import interaction_graph
    from strati.landscape.basis.modules import modules

    sites = options["sites"] = _sites(options["sites"])
    with progress("basis", None, quiet=output.quiet) as tick:
        basis = interaction_basis(network, inputs.x, tick=tick, **options)
        graph = interaction_graph(basis, tick=tick)
        partition = modules(graph, epsilon=epsilon, number=number, seed=options["seed"], tick=tick)
    if compare:
        bases = compare_bases(network, inputs.x, labels=inputs.y, config=BasisConfig(sites=sites))
        partition = replace(partition, comparison=bases)
    common.emit(
        partition, output, f"strati degeneracy {source}" if compare else f"strati basis {source} --compare"
    )


def _sites(text: str | None) -> str | list[str] | None:
    if text is None or text in ("residual", "mlp"):
        return text
    return [name.strip() for name in text.split(",") if name.strip()]


def _first(data: Data, rows: int | None) -> Data:
    if rows is None:
        return data
    from strati.evaluate.batches import CONTEXT

    if data.x.ndim == 1:  # token numbers in one line: rows are windows of them
        return replace(data, x=data.x[: rows * CONTEXT])
    return replace(data, x=data.x[:rows], y=None if data.y is None else data.y[:rows])
