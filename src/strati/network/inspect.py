"""What a network is made of, without the maths: the result behind ``strati inspect``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from strati.network.contents import Skipped
from strati.network.open import Conv, Network
from strati.network.open import open as open_network
from strati.network.select import select
from strati.options import resolve
from strati.tables import Column, table
from strati.text import printable
from strati.types import Flag, Result, Tick, silent

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import RenderableType

    from strati.network.adapters.lora import AdapterUpdate
    from strati.network.layers import Layer
    from strati.network.open import Openable


@dataclass(frozen=True)
class Inspection(Result):
    """The layers of a network, and the tensors that are none.

    Attributes:
        network: Path, format, number of parameters (ties once) and of tensors.
        layers: One row per layer, as in ``scan`` without the numbers.
        skipped: Every other tensor with its reason.
        warnings: What a user must know about the file.
    """

    verb: ClassVar[str] = "inspect"

    network: dict[str, Any]
    layers: tuple[dict[str, Any], ...]
    skipped: tuple[Skipped, ...]
    warnings: tuple[Flag, ...] = ()

    def payload(self) -> dict[str, Any]:
        """Network, layers, skipped, warnings."""
        return {
            "network": self.network,
            "layers": self.layers,
            "skipped": self.skipped,
            "warnings": self.warnings,
        }

    def frame(self) -> pd.DataFrame:
        """One row per layer."""
        import pandas as pd

        columns = ["name", "role", "block", "kind", "rows", "cols", "aspect", "parameters", "dtype", "view"]
        table = pd.DataFrame(list(self.layers), columns=columns)
        return table.assign(block=table["block"].astype("Int64"))

    def summary(self) -> RenderableType:
        """A table of the layers, then the skipped tensors by reason."""
        from rich.console import Group
        from rich.text import Text

        columns = (
            Column("layer", keep=True),
            Column("role"),
            Column("block", right=True, gives=2),
            Column("shape", right=True),
            Column("dtype", gives=1),
            Column("parameters", right=True, gives=3),
            Column("view", gives=4),
        )
        rows = []
        for row in self.layers:
            times = f"{row['matrices']} x " if row["matrices"] > 1 else ""
            shape = f"{times}{row['rows']}x{row['cols']}"
            block = "" if row["block"] is None else row["block"]
            rows.append(
                (row["name"], row["role"], block, shape, row["dtype"], row["parameters"], row["view"])
            )
        lines = [Text(f"warning: {printable(flag.text, 300)}", style="yellow") for flag in self.warnings]
        shown = table(columns, rows, title=self._headline(), notes=self._skipped_lines())
        return Group(*lines, shown)

    def _headline(self) -> str:
        net = self.network
        head = f"{printable(Path(str(net['path'])).name)}: {net['format']}, {net['tensors']:,} tensors"
        return f"{head}, {net['parameters']:,} parameters, {len(self.layers):,} layers"

    def _skipped_lines(self) -> list[str]:
        groups: dict[str, list[str]] = {}
        for item in self.skipped:
            groups.setdefault(printable(item.reason, 200), []).append(printable(item.name, 60))
        return [
            f"skipped {len(names):,}: {reason}: {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"
            for reason, names in sorted(groups.items(), key=lambda group: -len(group[1]))
        ]


@dataclass(frozen=True)
class InspectConfig:
    """Options of :func:`inspect`.

    Attributes:
        layers: Patterns of the layers to list (:mod:`strati.network.select`); all by default.
        split_qkv: Show fused query-key-value matrices as three layers.
        conv: ``"pool"`` the k x k slices of a convolution, or ``"flatten"`` it to one matrix.
    """

    layers: str | Sequence[str] | None = None
    split_qkv: bool = False
    conv: Conv = "pool"


def inspect(
    net: Openable, *, config: InspectConfig | None = None, tick: Tick = silent, **options: Any
) -> Inspection:
    """List the layers of a network and what would be skipped; no weight is analysed.

    Args:
        net: Whatever names a network (:func:`strati.open`).
        config: Options; or give them by name.
        tick: Called after each layer with its name.
        **options: Fields of :class:`InspectConfig`; they win over ``config``.

    Returns:
        The layers as rows, and the skipped tensors with their reasons.

    Raises:
        StratiError: The network cannot be read, or a pattern in ``layers`` matches nothing.

    Examples:
        >>> import numpy as np
        >>> tensors = {"h.0.attn.c_attn.weight": np.eye(4, 12), "h.0.attn.c_attn.bias": np.zeros(12)}
        >>> row = inspect(tensors).layers[0]
        >>> row["role"], row["rows"], row["cols"], row["view"]
        ('attention.qkv', 12, 4, 'transposed (stored inputs x outputs)')
    """
    chosen = resolve(InspectConfig, config, options, of=inspect)
    network = open_network(net)
    layers = select(network.layers(split_qkv=chosen.split_qkv, conv=chosen.conv), chosen.layers)
    skipped = network.skipped(split_qkv=chosen.split_qkv, conv=chosen.conv)
    rows = []
    for layer in layers:
        rows.append(_row(layer))
        tick(layer.name)
    return Inspection(summary_of(network), tuple(rows), skipped, network.warnings)


def summary_of(network: Network) -> dict[str, Any]:
    """The ``network`` part of a result's JSON: path, format, parameters, tensors."""
    return {
        "path": str(network.path),
        "format": network.format,
        "parameters": network.parameters,
        "tensors": len(network.tensors) + len(network.contents.unread),
    }


def _row(layer: Layer) -> dict[str, Any]:
    rows, cols = layer.shape
    flags = [Flag("quantised", f"stored as {layer.dtype}; the values are what is left of the original")]
    return {
        "name": layer.name,
        "role": layer.role.value,
        "block": layer.block,
        "kind": layer.kind,
        "rows": rows,
        "cols": cols,
        "aspect": max(rows, cols) / min(rows, cols),
        "parameters": layer.parameters,
        "matrices": layer.count,
        "dtype": layer.dtype,
        "view": layer.view,
        **({} if layer.expert is None else {"expert": layer.expert}),
        **({} if layer.adapter is None else {"adapter": adapter_fields(layer.adapter)}),
        **({} if layer.quantisation is None else {"quantisation": vars(layer.quantisation)}),
        "warnings": flags if layer.quantised else [],
    }


def adapter_fields(update: AdapterUpdate) -> dict[str, Any]:
    """The ``adapter`` field of a layer's JSON: rank, directions used, scale.

    An adapter that was never trained (``B = 0``) uses none.
    """
    return {"rank": update.rank, "used_rank": update.used_rank(), "scale": update.scale}
