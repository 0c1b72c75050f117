"""``strati inspect``: the layers of a network, their roles and shapes; no maths."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import click

from strati.cli.common import Command, Output, emit, layers_option, output_options


@click.command("inspect", cls=Command)
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
@click.option("--all", "show_all", is_flag=True, help="List biases, norms and all other tensors, too.")
@output_options
def command(
    model: str,
    layers: tuple[str, ...],
    split_qkv: bool,
    conv: Literal["pool", "flatten"],
    show_all: bool,
    output: Output,
) -> None:
    """List the layers of MODEL: roles, shapes, totals by role and block, and what is skipped and why.

    MODEL is a .safetensors file, a Hugging Face directory, a torch file (.pt, .pth, .bin), .npz, .onnx, .gguf or Keras
    .h5 (the format is detected automatically; the file is never executed), or [ORG/]NAME[@REVISION] in the local
    Hugging Face cache. Nothing is downloaded.

    \b
    Example:
      strati inspect model.safetensors
      strati inspect gpt2/ --split-qkv --layers 'role:attention.*' --json -
    """
    from strati.io.inspection import inspect

    inspection = inspect(model, layers=layers, split_qkv=split_qkv, conv=conv)
    emit(replace(inspection, show_all=show_all), output)
