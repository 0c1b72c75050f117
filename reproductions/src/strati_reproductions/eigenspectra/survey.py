"""Scans of real networks as tables, GPT-2's own matrices among them.

Of OpenAI's GPT-2 small, which top-down-eigenspectra studies, a part is available: the attention output projections of
all 12 blocks, all norms and biases, and the position embedding. The other matrices (``c_attn``, ``mlp.c_fc``,
``mlp.c_proj``, the token embedding) are missing, and so is a network that runs. Statements about MLP layers and about
removing directions are tested on MiniLM, stories15M and SmolLM2 instead, whose weights the zoo fetches.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from strati.core.errors import BadInputError
from strati.core.results import Flag, Tick
from strati.core.rng import stream
from strati.io.network import open as open_network
from strati.spectra.scan import scan
from strati_reproductions.datasets import external_data

if TYPE_CHECKING:
    import pandas as pd

    from strati.core.results import FloatArray

LANGUAGE = ("minilm", "stories15m", "smollm2")
VISION = ("mobilenetv2", "efficientnet", "cifar-cnn", "mnist-cnn")
GPT2 = "GPT-2"
GPT2_ROLE = "attention.out"
GPT2_SCOPE = "the 12 attention output projections; GPT-2's other matrices are not available"

_LARGEST_SIDE = 4096  # of a random matrix that is drawn for comparison


def survey(path: Path, tick: Tick) -> pd.DataFrame:
    """Scan a network into a table with the shares of spikes and quasi-null eigenvalues and the width of each spectrum.

    ``width`` is the number of decades between the 5th and the 95th percentile of the eigenvalues; ``random_width`` is
    that of a Gaussian matrix of the same shape.
    """
    scanned = scan(open_network(path), jobs=2, tick=tick)
    table = scanned.frame()
    counts = np.array([scanned[name].eigenvalues.size for name in table["name"]])
    table["eigenvalue_count"] = counts
    for name in ("spikes", "quasi_null"):
        table[f"{name}_share"] = table[name].astype(float) / counts
    table["width"] = [_width(scanned[name].eigenvalues) for name in table["name"]]
    shapes = [(int(rows), int(cols)) for rows, cols in zip(table["rows"], table["cols"], strict=True)]
    random_widths = {shape: _random_width(shape) for shape in set(shapes) if max(shape) <= _LARGEST_SIDE}
    table["random_width"] = [random_widths.get(shape, float("nan")) for shape in shapes]
    return table


def gpt2_file() -> Path | Flag:
    """The available part of GPT-2, or a warning that it is absent."""
    try:
        return external_data("gpt2-part", "gpt2-attention-out.safetensors")
    except BadInputError as error:
        return Flag("gpt2-absent", f"rows of GPT-2's own matrices are left out: {error.why}")


def gpt2_survey(tick: Tick) -> tuple[pd.DataFrame | None, tuple[Flag, ...]]:
    """The survey of GPT-2's attention output projections in order of blocks; ``None`` and a warning where absent."""
    file = gpt2_file()
    if isinstance(file, Flag):
        return None, (file,)
    table = survey(file, tick)
    return table[table["role"] == GPT2_ROLE].sort_values("block"), ()


def _random_width(shape: tuple[int, int]) -> float:
    noise = stream(0, "width", *shape).normal(size=shape)
    return _width(np.linalg.svd(noise, compute_uv=False).astype(float) ** 2)


def _width(eigenvalues: FloatArray) -> float:
    low, high = np.quantile(eigenvalues, [0.05, 0.95])
    return float(np.log10(high / low)) if low > 0 else float("nan")
