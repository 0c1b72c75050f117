"""``strati identify``: the layer of a network that a stray tensor is, or the blocks of two networks matched."""

from __future__ import annotations

import click

from strati.cli import common


@click.command("identify", cls=common.Command)
@click.argument("piece")
@click.argument("model")
@common.output_options
def command(piece: str, model: str, output: common.Output) -> None:
    """Find which layer of MODEL (or of a fine-tune of it) the tensor in the file PIECE is.

    If PIECE is a whole network, its blocks are matched with those of MODEL.

    \b
    Example:
      strati identify stray.safetensors stories15M/
    """
    from strati.io.network import open as open_network
    from strati.reassembly.transformer.identify import correspond, identify

    network = open_network(piece)
    if len(network.tensors) == 1:
        identified = identify(network, model)
        best = identified.candidates[0].name
        common.emit(identified, output, f"strati scan {model} --layers '{best}'")
    else:
        common.emit(correspond(network, model), output, f"strati compare {piece} {model}")
