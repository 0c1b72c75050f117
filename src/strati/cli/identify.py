"""``strati identify``: the layer of a network that a stray tensor is, or the blocks of two networks matched."""

from __future__ import annotations

import click

from strati.cli.common import Command, Output, emit, output_options, show


@click.command("identify", cls=Command)
@click.argument("piece")
@click.argument("model")
@output_options
def command(piece: str, model: str, output: Output) -> None:
    """Find which layer of MODEL (or of a fine-tune of it) the tensor in the file PIECE is.

    If PIECE is a whole network, its blocks are matched with those of MODEL.

    \b
    Example:
      strati identify stray.safetensors stories15M/
    """
    identify_piece(piece, model, output)


def identify_piece(piece: str, model: str, output: Output) -> None:
    """Identify one tensor, or match blocks where the piece is a network; then name the next command."""
    from strati.io.network import open as open_network
    from strati.reassembly.transformer.identify import Identified, correspond, identify

    network = open_network(piece)
    answer = identify(network, model) if len(network.tensors) == 1 else correspond(network, model)
    emit(answer, output)
    if not output.quiet and output.json != "-":
        if isinstance(answer, Identified):
            show(f"next: strati scan {model} --layers '{answer.candidates[0].name}'")
        else:
            show(f"next: strati compare {piece} {model}")
