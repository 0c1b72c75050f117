"""One network as a comparison sees it: its layers taken apart as the other networks need it, with their spectra.

Where one network fuses query, key and value (or gate and up) and another keeps them apart, the fused ones are cut. A
head that is tied to the embedding stands for the stored head of another network.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from strati.comparison.matching import Unmatched
from strati.io.align import split_like, unfused
from strati.io.roles import Role
from strati.spectra.layerwise import spectra, stored_spectra
from strati.spectra.scan import Scanned
from strati.spectra.spectrum import Spectrum, SpectrumConfig

if TYPE_CHECKING:
    from pathlib import Path

    from strati.core.results import Flag, Tick
    from strati.io.layers import Layer
    from strati.io.network import Network
    from strati.jobs.driver import Run


@dataclass(frozen=True)
class Side:
    """A network, its layers as they are compared, and, once computed, the spectra of those that are asked for."""

    network: Network
    layers: tuple[Layer, ...]
    spectra: Mapping[str, Spectrum] = field(default_factory=dict)

    @cached_property
    def labels(self) -> list[str]:
        """Names that tell roles and places: the format's better ones where it knows some."""
        names = self.network.names
        return [
            names.label(layer.tensor)
            + layer.name.removeprefix(layer.tensor).replace("[", ".").replace("]", "")
            for layer in self.layers
        ]

    def warnings(self, layer: Layer) -> tuple[Flag, ...]:
        """What a scan says of the layer."""
        found: tuple[Flag, ...] = tuple(Scanned(layer, self.spectra[layer.name]).row()["warnings"])
        return found

    def table(self) -> list[dict[str, Any]]:
        """Role and metrics of every layer with a spectrum, counts also as shares of the eigenvalues."""
        rows = []
        for layer in self.layers:
            if layer.name in self.spectra:
                spectrum = self.spectra[layer.name]
                metrics = spectrum.metrics()
                count = spectrum.eigenvalues.size
                for name in ("spikes", "quasi_null"):
                    value = metrics.get(name)
                    metrics[f"{name}_share"] = value / count if isinstance(value, int) and count else None
                rows.append({"role": str(layer.role)} | metrics)
        return rows


def sides_of(networks: Sequence[Network]) -> list[Side]:
    """Every network with its layers cut as the others need them."""
    roles = [{layer.role for layer in network.layers()} for network in networks]
    split = any(Role.QKV in own for own in roles) and any(Role.QUERY in own for own in roles)
    apart = next((net for net, own in zip(networks, roles, strict=True) if Role.QUERY in own), None)
    gated = next((net for net, own in zip(networks, roles, strict=True) if Role.MLP_GATE in own), None)
    sides = []
    for network, own in zip(networks, roles, strict=True):
        layers = network.layers(split_qkv=split)
        if split and apart is not None and Role.QUERY not in own:
            layers = split_like(layers, apart.layers(), apart.names.heads()[0])
        if gated is not None and Role.MLP_GATE not in own:
            layers = unfused(layers, gated.layers())
        sides.append(Side(network, layers))
    return sides


def with_spectra(
    sides: Sequence[Side],
    wanted: Sequence[frozenset[str]] | None,
    *,
    workers: int | None,
    tick: Tick,
    out: str | Path | None,
    run: Run,
) -> list[Side]:
    """The sides with the spectra of the layers that are wanted (``None``: all), one network after another."""
    found = []
    for n, side in enumerate(sides):
        layers = [x for x in side.layers if wanted is None or x.name in wanted[n]]
        options = SpectrumConfig()
        if out is None:
            done = list(zip(layers, spectra(layers, options, workers=workers, tick=tick), strict=True))
        else:
            done = list(stored_spectra(layers, options, out=out, run=run))
        known = {layer.name: layer for layer, _ in done}
        found.append(
            replace(
                side,
                layers=tuple(known.get(layer.name, layer) for layer in side.layers),
                spectra={layer.name: spectrum for layer, spectrum in done},
            )
        )
    return found


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
) -> tuple[list[list[Layer]], tuple[Unmatched, ...]]:
    """A head stored in some networks beside the embedding that does its work in the others.

    Returns:
        Rows of layers to compare beyond those that were matched, and what still has no partner.
    """
    lost = {(u.network, u.name) for u in unmatched}
    row: list[Layer] = []
    stored: list[tuple[int, str]] = []
    for n, side in enumerate(sides):
        heads = [layer for layer in side.layers if layer.role is Role.HEAD]
        if len(heads) == 1 and (n, heads[0].name) in lost:
            row.append(heads[0])
            stored.append((n, heads[0].name))
        elif not heads and _tied(side.network):
            tables = [x for x in side.layers if x.role is Role.EMBEDDING]
            if len(tables) != 1:
                return [], tuple(unmatched)
            row.append(tables[0])
        else:
            return [], tuple(unmatched)
    if not stored or len({layer.shape[1] for layer in row}) > 1:
        return [], tuple(unmatched)
    return [row], tuple(u for u in unmatched if (u.network, u.name) not in stored)


def _tied(network: Network) -> bool:
    """Whether a network without a stored head uses its embedding for it."""
    config = network.config or {}
    if network.format == "gguf":  # llama.cpp leaves the output out exactly where it is tied
        return True
    roles = {network.names.by_role(name) for name in network.ties}
    return Role.HEAD in roles or config.get("tie_word_embeddings") is True
