"""One network as a comparison sees it: its layers taken apart as the other networks need it, with their spectra.

Where one network fuses query, key and value (or gate and up) and another keeps them apart, the fused ones are cut. A
head that is tied to the embedding stands for the stored head of another network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from strati.network.align import unfused
from strati.network.roles import Role
from strati.spectra.comparing.matching import Unmatched
from strati.spectra.scan import Scan, Scanned, scan
from strati.spectra.spectrum import Spectrum, spectrum

if TYPE_CHECKING:
    from strati.network.layers import Layer
    from strati.network.open import Network
    from strati.types import Flag, Tick


@dataclass(frozen=True)
class Side:
    """A network, its layers as they are compared, and their spectra."""

    network: Network
    layers: tuple[Layer, ...]
    scan: Scan

    @cached_property
    def labels(self) -> list[str]:
        """Names that tell roles and places: the format's better ones where it knows some."""
        names = self.network.names
        return [
            names.label(layer.tensor)
            + layer.name.removeprefix(layer.tensor).replace("[", ".").replace("]", "")
            for layer in self.layers
        ]

    @cached_property
    def _scanned(self) -> dict[str, Scanned]:
        found = {item.layer.name: item for item in self.scan}
        for layer in self.layers:
            if layer.name not in found:  # cut here, unknown to the scan
                dtype = None if layer.quantised else layer.dtype
                found[layer.name] = Scanned(layer, spectrum(layer.matrices, dtype))
        return found

    def spectrum(self, layer: Layer) -> Spectrum:
        """A layer's spectrum."""
        return self._scanned[layer.name].spectrum

    def metrics(self, layer: Layer) -> dict[str, Any]:
        """Every number of a scan's row."""
        return self.spectrum(layer).metrics()

    def warnings(self, layer: Layer) -> tuple[Flag, ...]:
        """What a scan says of the layer."""
        found: tuple[Flag, ...] = tuple(self._scanned[layer.name].row()["warnings"])
        return found

    def row(self, layer: Layer) -> dict[str, object]:
        """Role and metrics, counts also as shares of the eigenvalues."""
        metrics = self.metrics(layer)
        count = self.spectrum(layer).eigenvalues.size
        for name in ("spikes", "quasi_null"):
            value = metrics.get(name)
            metrics[f"{name}_share"] = value / count if isinstance(value, int) and count else None
        return {"role": str(layer.role)} | metrics


def sides_of(networks: Sequence[Network], *, workers: int, tick: Tick) -> list[Side]:
    """Every network scanned, its layers cut as the others need them."""
    roles = [{layer.role for layer in network.layers()} for network in networks]
    split = any(Role.QKV in own for own in roles) and any(Role.QUERY in own for own in roles)
    gated = any(Role.MLP_GATE in own for own in roles)
    sides = []
    for network, own in zip(networks, roles, strict=True):
        layers = network.layers(split_qkv=split)
        if gated and Role.MLP_GATE not in own:
            layers = unfused(layers)
        sides.append(Side(network, layers, scan(network, split_qkv=split, jobs=workers, tick=tick)))
    return sides


def head_widths(network: Network, layer: Layer) -> list[int]:
    """Widths of an attention head that the network's settings allow for a layer; empty where they say nothing."""
    heads, groups, width = network.names.heads()
    if width:
        return [width]
    many = groups if layer.role is Role.KEY else heads
    rows = layer.shape[0] // 3 if layer.role is Role.QKV else layer.shape[0]
    return [rows // many] if many and rows % many == 0 else []


def tied_heads(
    sides: Sequence[Side], unmatched: Sequence[Unmatched]
) -> tuple[list[list[tuple[Side, Layer]]], tuple[Unmatched, ...]]:
    """A head stored in some networks beside the embedding that does its work in the others.

    Returns:
        Rows of layers to compare beyond those that were matched, and what still has no partner.
    """
    lost = {(u.network, u.name) for u in unmatched}
    row: list[tuple[Side, Layer]] = []
    stored: list[tuple[int, str]] = []
    for n, side in enumerate(sides):
        heads = [layer for layer in side.layers if layer.role is Role.HEAD]
        if len(heads) == 1 and (n, heads[0].name) in lost:
            row.append((side, heads[0]))
            stored.append((n, heads[0].name))
        elif not heads and _tied(side.network):
            tables = [x for x in side.layers if x.role is Role.EMBEDDING]
            if len(tables) != 1:
                return [], tuple(unmatched)
            row.append((side, tables[0]))
        else:
            return [], tuple(unmatched)
    if not stored or len({layer.shape[1] for _, layer in row}) > 1:
        return [], tuple(unmatched)
    return [row], tuple(u for u in unmatched if (u.network, u.name) not in stored)


def _tied(network: Network) -> bool:
    """Whether a network without a stored head uses its embedding for it."""
    config = network.config or {}
    if network.format == "gguf":  # llama.cpp leaves the output out exactly where it is tied
        return True
    roles = {network.names.by_role(name) for name in network.ties}
    return Role.HEAD in roles or config.get("tie_word_embeddings") is True
