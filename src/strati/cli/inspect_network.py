"""``strati inspect``: the layers of a network, their roles and shapes; no maths."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import click

from strati.cli import common


@click.command("inspect", cls=common.Command)
@click.argument("model")
@common.layers_option
@common.option("--split-qkv", "Split fused query-key-value matrices into three layers.")
@common.conv_option
@common.option("--all show_all", "List biases, norms and all other tensors, too.")
@common.output_options
def command(model: str, show_all: bool, output: common.Output, **options: Any) -> None:
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

    common.emit(replace(inspect(model, **options), show_all=show_all), output)
