"""A network written again with its hidden units in another order."""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.core.errors import UnsupportedError
from strati.interventions.compress import rewrite_checkpoint as files

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.comparison.unit_alignment import Renumbering, UnitOrder
    from strati.io.layers import Layer
    from strati.io.network import Network


def write_renumbered(network: Network, order: UnitOrder | None, target: str | Path) -> None:
    """Write a network with its units renumbered, in the format it is stored in; nothing is left half-written.

    Args:
        network: A safetensors, torch or ``.npz`` file, or a directory of safetensors files.
        order: Renumberings of its layers and vectors; without any the network is written as it is.
        target: A new path.

    Raises:
        UnsupportedError: Its format is not written, or a layer is part of a fused tensor.
    """
    changed = {} if order is None else renumbered_tensors(network, order)
    rewrite = files.Rewrite({name: {name: values} for name, values in changed.items()}, lambda name: name)
    source, place = Path(network.path), Path(target)
    folder = Path(mkdtemp(prefix=f".{place.name}.", dir=place.parent))
    try:
        if source.is_dir():
            files.rewrite_directory(source, folder, rewrite)
            folder.chmod(0o755)
            folder.replace(place)
            return
        new = folder / place.name
        if network.format == "safetensors":
            files.rewrite_safetensors(source, new, rewrite)
        elif network.format == "npz":
            files.rewrite_npz(source, new, rewrite)
        elif network.format.startswith("torch"):
            files.rewrite_torch(source, new, rewrite, [t.name for t in network.tensors])
        else:
            raise UnsupportedError(
                source, f"is {network.format}; safetensors, torch and .npz files and directories are written"
            )
        new.replace(place)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def renumbered_tensors(network: Network, order: UnitOrder) -> dict[str, NDArray[Any]]:
    """The tensors that an order of units changes, as they are stored.

    Raises:
        UnsupportedError: A layer is part of a fused tensor.
    """
    changed = {}
    for layer in network.layers():
        if layer.name in order.layers:
            stored = network.read(layer.tensor)
            changed[layer.tensor] = _renumbered(layer, stored, order.layers[layer.name])
    for name, renumbering in order.vectors.items():
        changed[name] = renumbering.apply(network.read(name))
    return changed


def _renumbered(layer: Layer, stored: NDArray[Any], renumbering: Renumbering) -> NDArray[Any]:
    """The stored tensor renumbered; kernels keep their taps behind outputs and inputs."""
    matrices = list(layer.matrices())
    new = np.stack([renumbering.apply(matrix) for matrix in matrices], axis=-1)
    old = np.stack(matrices, axis=-1)
    for axes in ((0, 1), (1, 0), (-1, -2)):  # outputs and inputs: torch, Conv1D, channels last
        moved = np.moveaxis(stored, axes, (0, 1))
        if np.array_equal(moved.reshape(*moved.shape[:2], -1), old):
            return np.ascontiguousarray(np.moveaxis(new.reshape(moved.shape), (0, 1), axes))
    raise UnsupportedError(
        layer.name, f"is one part of {layer.tensor}; fused tensors are not renumbered in files"
    )
