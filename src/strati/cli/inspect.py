"""``strati inspect``: the layers of a network, their roles and shapes; no maths."""

from __future__ import annotations

from typing import Literal

import click

from strati.cli.common import Output, emit, output_options


@click.command("inspect")
@click.argument("model")
@click.option("--split-qkv", is_flag=True, help="Fused query-key-value matrices as three layers.")
@click.option(
    "--conv",
    type=click.Choice(["pool", "flatten"]),
    default="pool",
    show_default=True,
    help="Kernels as their slices, or as one flattened matrix.",
)
@output_options
def command(model: str, split_qkv: bool, conv: Literal["pool", "flatten"], output: Output) -> None:
    """List the layers of MODEL: roles, shapes, dtypes, and what would be skipped and why.

    MODEL is a .safetensors file, a Hugging Face directory, a torch file (.pt, .pth, .bin), .npz, .onnx,
    .gguf or Keras .h5, told apart by content. No code from it is ever run.

    \b
    Example:
      strati inspect model.safetensors
      strati inspect gpt2/ --split-qkv --json -
    """
    from strati.network.inspect import inspect

    emit(inspect(model, split_qkv=split_qkv, conv=conv), output)
