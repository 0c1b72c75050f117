r"""Extract a PEFT adapter from the difference of two networks.

The update :math:`B - A` of every weight matrix is cut to its leading singular directions, which become the factors of a
LoRA of scale 1: :math:`U_k S_k^{1/2}` and :math:`S_k^{1/2} V_k^T`. By default a layer gets as many directions as lie
beyond noise: those beyond rounding where the update has low rank, otherwise those beyond the random bulk of the update.
Embeddings, norms and other tensors that changed are stored whole (``modules_to_save``), and so are biases.
"""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.comparison.compare import compare
from strati.comparison.matching import bare_names
from strati.comparison.update_rank import UpdateKind
from strati.core.errors import BadInputError
from strati.io.network import Network, Openable
from strati.io.network import open as open_network
from strati.io.roles import Role
from strati.spectra.spectrum import spectrum

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati.io.layers import Layer

_PREFIX = "base_model.model."


@dataclass(frozen=True)
class ExtractedLayer:
    """One layer of an extracted adapter.

    Attributes:
        name: The layer.
        rank: Directions that the adapter has for it.
        explained: Share of the squared norm of the update that they hold.
        residual: Norm of what they leave out, relative to the norm of the base's layer.
    """

    name: str
    rank: int
    explained: float
    residual: float


@dataclass(frozen=True)
class ExtractedAdapter:
    """An adapter that was written.

    Attributes:
        path: Its folder.
        layers: Layers with an update, in the network's order; rank 0 where no direction lies beyond noise.
        saved: Tensors that are stored whole.
        parameters: Number of values in the adapter.
    """

    path: str
    layers: tuple[ExtractedLayer, ...]
    saved: tuple[str, ...]
    parameters: int

    def text(self) -> str:
        """What was written, in one sentence."""
        ranks = [layer.rank for layer in self.layers if layer.rank]
        if not ranks:
            return f"wrote {self.path}: no direction lies beyond noise; {len(self.saved)} tensors are stored whole"
        between = f"rank {min(ranks)}" if min(ranks) == max(ranks) else f"ranks {min(ranks)} to {max(ranks)}"
        least = min(layer.explained for layer in self.layers)
        return (
            f"wrote {self.path}: an adapter of {between} on {len(ranks)} layers with {self.parameters:,} values, "
            f"which holds at least {least:.0%} of each update; {len(self.saved)} tensors are stored whole"
        )


def extract_adapter(
    base: Openable,
    tuned: Openable,
    out: str | Path,
    *,
    rank: int | Mapping[str, int] | None = None,
    seed: int = 0,
) -> ExtractedAdapter:
    """Write the difference of two networks as a PEFT adapter of the first.

    Args:
        base: The network that the adapter belongs to.
        tuned: Its fine-tune, with the same tensors.
        out: A new folder.
        rank: The rank of every layer, or of each by name (others get none); by default as many directions as lie beyond
            noise.
        seed: Of the simulated rounding noise.

    Raises:
        BadInputError: The folder exists, a rank is negative, or the networks have no tensors in common.

    Examples:
        >>> import tempfile
        >>> rng = np.random.default_rng(0)
        >>> base = {"fc.weight": rng.normal(size=(40, 30)).astype(np.float32)}
        >>> step = rng.normal(size=(40, 2)) @ rng.normal(size=(2, 30))
        >>> tuned = {"fc.weight": base["fc.weight"] + step.astype(np.float32)}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     adapter = extract_adapter(base, tuned, f"{folder}/adapter")
        >>> [(layer.name, layer.rank, round(layer.explained, 6)) for layer in adapter.layers]
        [('fc.weight', 2, 1.0)]
    """
    place = Path(out)
    if place.exists():
        raise BadInputError(place, "exists already; give a new path")
    ranks = list(rank.values()) if isinstance(rank, Mapping) else [] if rank is None else [rank]
    if any(requested_rank < 0 for requested_rank in ranks):
        raise BadInputError("rank", "must be 0 or more")
    first, last = open_network(base), open_network(tuned)
    partners = _partners(first, last)
    by_noise = {} if rank is not None else _ranks_beyond_noise(first, last, seed)
    tensors: dict[str, NDArray[Any]] = {}
    layers: list[ExtractedLayer] = []
    saved: dict[str, NDArray[Any]] = {}
    by_tensor = {layer.tensor: layer for layer in first.layers()}
    for name, partner in partners.items():
        before, after = first.read(name), last.read(partner)
        if np.array_equal(before, after):
            continue
        layer = by_tensor.get(name)
        if (
            layer is None
            or layer.role is Role.EMBEDDING
            or before.ndim not in (2, 4)
            or name not in by_tensor
        ):
            saved[name] = after
            continue
        layer_rank = by_noise.get(name, 0) if rank is None else _given_rank(rank, layer)
        factors, extracted = _low_rank(layer.name, before, after, layer_rank, turned=_turned(layer))
        layers.append(extracted)
        if factors is not None:
            module = name.removesuffix(".weight")
            tensors[f"{_PREFIX}{module}.lora_B.weight"], tensors[f"{_PREFIX}{module}.lora_A.weight"] = factors
    targets = {layer.name.removesuffix(".weight"): layer.rank for layer in layers if layer.rank}
    for name, values in saved.items():
        module = name.rpartition(".")[0]
        inner = f"{module}.base_layer.bias" if module in targets and name.endswith(".bias") else name
        tensors[_PREFIX + inner] = values
    turned = any(_turned(by_tensor[f"{module}.weight"]) for module in targets)
    config = _config(first, targets, list(saved), turned=turned)
    _write(place, tensors, config)
    return ExtractedAdapter(str(place), tuple(layers), tuple(saved), sum(t.size for t in tensors.values()))


def _partners(first: Network, last: Network) -> dict[str, str]:
    """Floating-point tensors of one name and shape."""
    sides = []
    for network in (first, last):
        names = [tensor.name for tensor in network.tensors if tensor.floating]
        sides.append(dict(zip(bare_names(names), names, strict=True)))
    partners = {
        name: sides[1][bare]
        for bare, name in sides[0].items()
        if bare in sides[1] and first[name].shape == last[sides[1][bare]].shape
    }
    if not partners:
        raise BadInputError(last.path, f"has no tensor in common with {first.path}: no adapter of it")
    return partners


def _ranks_beyond_noise(first: Network, last: Network, seed: int) -> dict[str, int]:
    comparison = compare(first, last, seed=seed)
    ranks = {}
    by_name = {layer.name: layer for layer in first.layers()}
    for layer in comparison.layers:
        if layer.update_kind == UpdateKind.LOW_RANK:
            ranks[by_name[layer.name].tensor] = layer.update_rank or 0
        elif layer.update_kind in (UpdateKind.DENSE, UpdateKind.UNDECIDED) and layer.aligned is None:
            tensor, other = by_name[layer.name].tensor, layer.partner[-1]
            partner = next(x.tensor for x in last.layers() if x.name == other)
            step = last.read(partner).astype(np.float64) - first.read(tensor).astype(np.float64)
            ranks[tensor] = int(spectrum(step.reshape(step.shape[0], -1)).metrics()["spikes"] or 0)
    return ranks


def _given_rank(rank: int | Mapping[str, int], layer: Layer) -> int:
    if isinstance(rank, Mapping):
        return rank.get(layer.name, rank.get(layer.name.removesuffix(".weight"), 0))
    return rank


def _turned(layer: Layer) -> bool:
    """Whether the network stores a matrix with the inputs first, as GPT-2 does."""
    return (
        any(step == "transpose" for step, _ in layer.cut.steps)
        and len(layer.network[layer.tensor].shape) == 2
    )


def _low_rank(
    name: str, before: NDArray[Any], after: NDArray[Any], rank: int, *, turned: bool
) -> tuple[tuple[NDArray[Any], NDArray[Any]] | None, ExtractedLayer]:
    step = after.astype(np.float64) - before.astype(np.float64)
    flat = step.T if turned else step.reshape(step.shape[0], -1)
    left, singular, right = np.linalg.svd(flat, full_matrices=False)
    count = min(rank, int(np.count_nonzero(singular > 0)))
    energy, norm = np.square(singular), float(np.linalg.norm(before.astype(np.float64)))
    extracted = ExtractedLayer(
        name,
        count,
        float(energy[:count].sum() / energy.sum()),
        float(np.sqrt(energy[count:].sum())) / norm if norm > 0 else 0.0,
    )
    if count == 0:
        return None, extracted
    roots = np.sqrt(singular[:count])
    b = (left[:, :count] * roots).astype(np.float32)
    a = (roots[:, None] * right[:count]).astype(np.float32)
    if step.ndim == 4:
        return (b[:, :, None, None], a.reshape(count, *step.shape[1:])), extracted
    return (b, a), extracted


def _config(base: Network, targets: Mapping[str, int], saved: list[str], *, turned: bool) -> dict[str, Any]:
    common = Counter(targets.values()).most_common(1)[0][0] if targets else 1
    # A name is a pattern to PEFT: anchored, so that block 1 is not block 11.
    others = {f"^{re.escape(name)}$": rank for name, rank in targets.items() if rank != common}
    saved_modules = {name.rpartition(".")[0] for name in saved} - set(targets)
    biases = any(name.endswith(".bias") and name.rpartition(".")[0] in targets for name in saved)
    return {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": None if base.in_memory else str(base.path),
        "r": common,
        "lora_alpha": common,
        "lora_dropout": 0.0,
        "bias": "all" if biases else "none",
        "fan_in_fan_out": turned,
        "target_modules": sorted(targets),
        "rank_pattern": others,
        "alpha_pattern": others,
        "modules_to_save": sorted(saved_modules) or None,
        "inference_mode": True,
    }


def _write(place: Path, tensors: Mapping[str, NDArray[Any]], config: Mapping[str, Any]) -> None:
    from safetensors.numpy import save_file

    folder = Path(mkdtemp(prefix=f".{place.name}.", dir=place.resolve().parent))
    try:
        save_file(
            {name: np.ascontiguousarray(t) for name, t in tensors.items()},
            folder / "adapter_model.safetensors",
        )
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
        folder.chmod(0o755)
        folder.replace(place)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
