"""``strati inspect``: the layers of a network, their roles and shapes; no maths."""

from __future__ import annotations

from typing import Literal

import click

from strati.cli.common import Output, emit, layers_option, output_options


@click.command("inspect")
@click.argument("model")
@layers_option
@click.option("--split-qkv", is_flag=True, help="Split fused query-key-value matrices into three layers.")
@click.option(
    "--conv",
    type=click.Choice(["pool", "flatten"]),
    default="pool",
    show_default=True,
    help="Convolutions: pool the k x k slices, or flatten to one matrix.",
)
@output_options
def command(
    model: str, layers: tuple[str, ...], split_qkv: bool, conv: Literal["pool", "flatten"], output: Output
) -> None:
    """List the layers of MODEL: roles, shapes, dtypes, and what would be skipped and why.

    MODEL is a .safetensors file, a Hugging Face directory, a torch file (.pt, .pth, .bin), .npz, .onnx,
    .gguf or Keras .h5, told apart by content, or ORG/NAME[@REVISION] in the local Hugging Face cache. No code from it
    is ever run, nothing is downloaded.

    \b
    Example:
      strati inspect model.safetensors
      strati inspect gpt2/ --split-qkv --layers 'role:attention.*' --json -
    """
    from strati.network.inspect import inspect

    emit(inspect(model, layers=layers, split_qkv=split_qkv, conv=conv), output)
