"""``strati.inspect``: the layers of a network with roles, shapes and sizes, without computing anything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Unpack, cast

from strati.core.display import Column, Table, byte_size, command_path, printable, table
from strati.core.options import resolve
from strati.core.results import Flag, Result, Tick, silent
from strati.io.checkpoint_file import Skipped
from strati.io.layers import select
from strati.io.network import Conv, Network
from strati.io.network import open as open_network

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import RenderableType

    from strati.core.option_types import InspectOptions
    from strati.io.checkpoint_file import Tensor
    from strati.io.layers import Layer
    from strati.io.network import Openable
    from strati.schemas.json_types import InspectedLayer, NetworkFields


@dataclass(frozen=True)
class Inspection(Result):
    """The layers of a network and its other tensors.

    Attributes:
        network: Path, format, number of parameters (ties once) and of tensors.
        layers: One row per layer, as in ``scan`` without the numbers.
        skipped: Every other tensor with its reason.
        warnings: Warnings about the file.
        others: Tensors that are no layers (biases, norms, ...): name, shape, dtype, parameters, bytes.
        show_all: The summary lists them.
    """

    verb: ClassVar[str] = "inspect"
    key_columns: ClassVar[tuple[str, ...]] = ("name", "role", "block", "rows", "cols", "parameters", "dtype")
    omitted: ClassVar[tuple[str, ...]] = ("show_all",)
    computed: ClassVar[tuple[str, ...]] = ("totals",)

    network: NetworkFields
    layers: tuple[InspectedLayer, ...]
    skipped: tuple[Skipped, ...]
    warnings: tuple[Flag, ...] = ()
    others: tuple[dict[str, Any], ...] = ()
    show_all: bool = False

    @property
    def totals(self) -> dict[str, Any]:
        """Bytes of all tensors, and matrices, parameters and bytes by role and by block (``null``: in no block)."""
        everything = (*self.layers, *self.others)
        return {
            "bytes": sum(row["bytes"] for row in everything),
            "roles": _totals(self.layers, "role"),
            "blocks": _totals(self.layers, "block"),
        }

    def frame(self) -> pd.DataFrame:
        """One row per layer."""
        import pandas as pd

        columns = ["name", "role", "block", "kind", "rows", "cols", "aspect", "parameters", "dtype", "view"]
        table = pd.DataFrame(list(self.layers), columns=columns)
        return table.assign(block=table["block"].astype("Int64"))

    def summary(self) -> RenderableType:
        """What the file is, its layers, totals by role and block, and the next command."""
        from rich.console import Group

        from strati.core.display import NextCommand, Paragraph

        lines: list[RenderableType] = [Paragraph(self._headline(), "bold"), Paragraph(self._counts())]
        lines += [Paragraph(f"warning: {printable(flag.text, 300)}", "yellow") for flag in self.warnings]
        if self.layers:
            lines.append(self._layer_table())
        lines += [Paragraph(text) for text in self._total_lines()]
        if self.show_all and self.others:
            lines.append(self._other_table())
        lines += [Paragraph(text, "dim") for text in self._skipped_lines()]
        path = str(self.network["path"])
        commands = ["strati explain role"]
        if Path(path).exists():
            commands.insert(0, f"strati scan {command_path(path)}")
        return Group(*lines, NextCommand(tuple(commands)))

    def _layer_table(self) -> Table:
        columns = (
            Column("layer", keep=True),
            Column("role", gives=2),
            Column("shape", right=True),
            Column("parameters", right=True),
            Column("share", right=True, gives=1),
            Column("view", gives=4),
        )
        total = max(int(self.network["parameters"]), 1)
        rows = []
        for row in self.layers:
            times = f"{row['matrices']} x " if row["matrices"] > 1 else ""
            shape = f"{times}{row['rows']} x {row['cols']}"
            share = f"{row['parameters'] / total:.0%}"
            name = row["name"].removesuffix(".weight")
            rows.append((name, row["role"], shape, row["parameters"], share, row["view"]))
        return table(columns, rows)

    def _other_table(self) -> Table:
        columns = (
            Column("tensor", keep=True),
            Column("shape", right=True),
            "dtype",
            Column("bytes", right=True),
        )
        rows = [
            (row["name"], " x ".join(map(str, row["shape"])) or "1", row["dtype"], row["bytes"])
            for row in self.others
        ]
        return table(columns, rows)

    def _headline(self) -> str:
        net = self.network
        dtypes = Counter[str]()
        for row in (*self.layers, *self.others):
            dtypes[row["dtype"]] += row["bytes"]
        most = (
            f", mostly {dtypes.most_common(1)[0][0]}"
            if len(dtypes) > 1
            else f", {next(iter(dtypes), 'empty')}"
        )
        size = byte_size(self.totals["bytes"])
        name = printable(Path(str(net["path"])).name, 40)
        return f"{name}: {net['format']}, {net['parameters']:,} parameters ({size}{most})."

    def _counts(self) -> str:
        matrices = len(self.layers)
        inside = sum(row["parameters"] for row in self.layers)
        share = inside / max(int(self.network["parameters"]), 1)
        counted = (
            f"{matrices:,} weight {'matrix' if matrices == 1 else 'matrices'} with {inside:,} parameters"
        )
        return f"{counted} ({min(share, 1.0):.0%}); {self.network['tensors']:,} tensors"

    def _total_lines(self) -> list[str]:
        totals = self.totals
        lines = []
        if len(totals["roles"]) > 1:
            parts = (
                f"{row['role']} {row['parameters']:,} ({byte_size(row['bytes'])})" for row in totals["roles"]
            )
            lines.append(f"by role: {', '.join(parts)}")
        if len(totals["blocks"]) > 1:
            lines.append(f"by block: {', '.join(_block_texts(totals['blocks']))}")
        return lines

    def _skipped_lines(self) -> list[str]:
        groups: dict[str, list[str]] = {}
        for tensor in self.skipped:
            groups.setdefault(printable(tensor.reason, 200), []).append(printable(tensor.name, 60))
        lines = [
            f"skipped {len(names):,}: {reason}: {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"
            for reason, names in sorted(groups.items(), key=lambda group: -len(group[1]))
        ]
        if self.others and not self.show_all:
            lines.append("biases, norms and other tensors, one by one: --all")
        return lines


def _totals(rows: Sequence[Mapping[str, Any]], by: str) -> list[dict[str, Any]]:
    groups: dict[Any, dict[str, Any]] = {}
    for row in rows:
        group = groups.setdefault(row[by], {by: row[by], "matrices": 0, "parameters": 0, "bytes": 0})
        group["matrices"] += row["matrices"]
        group["parameters"] += row["parameters"]
        group["bytes"] += row["bytes"]
    return list(groups.values())


def _block_texts(blocks: Sequence[dict[str, Any]]) -> list[str]:
    """Totals of blocks; neighbours of one size are named together."""
    numbered = sorted((row for row in blocks if row["block"] is not None), key=lambda row: row["block"])
    runs: list[list[dict[str, Any]]] = []
    for row in numbered:
        if runs and runs[-1][-1]["parameters"] == row["parameters"]:
            runs[-1].append(row)
        else:
            runs.append([row])
    texts = []
    for run in runs:
        first, last = run[0]["block"], run[-1]["block"]
        which = f"block {first}" if first == last else f"blocks {first} to {last}"
        each = "" if first == last else " each"
        texts.append(f"{which}: {run[0]['parameters']:,}{each} ({byte_size(run[0]['bytes'])})")
    for row in blocks:
        if row["block"] is None:
            texts.append(f"outside blocks: {row['parameters']:,} ({byte_size(row['bytes'])})")
    return texts


@dataclass(frozen=True)
class InspectConfig:
    """Options of :func:`inspect`.

    Attributes:
        layers: Patterns of the layers to list (:mod:`strati.io.layers`); all by default.
        split_qkv: Show fused query-key-value matrices as three layers.
        conv: ``"pool"`` the k x k slices of a convolution, or ``"flatten"`` it to one matrix.
    """

    layers: str | Sequence[str] | None = None
    split_qkv: bool = False
    conv: Conv = "pool"


def inspect(
    model: Openable,
    *,
    config: InspectConfig | None = None,
    tick: Tick = silent,
    **options: Unpack[InspectOptions],
) -> Inspection:
    """List the layers of a network and what would be skipped; no weight is analysed.

    Args:
        model: Whatever names a network (:func:`strati.open`).
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
        >>> str(row["role"]), row["rows"], row["cols"], row["view"]
        ('attention.qkv', 12, 4, 'transposed (stored inputs x outputs)')
    """
    settings = resolve(InspectConfig, config, options, of=inspect)
    network = open_network(model)
    layers = select(network.layers(split_qkv=settings.split_qkv, conv=settings.conv), settings.layers)
    skipped = network.skipped(split_qkv=settings.split_qkv, conv=settings.conv)
    stored = {tensor.name: tensor for tensor in network.tensors}
    rows = []
    for layer in layers:
        rows.append(_row(layer, stored.get(layer.tensor)))
        tick(layer.name)
    analysed = {layer.tensor for layer in network.layers(split_qkv=settings.split_qkv, conv=settings.conv)}
    others = tuple(
        {
            "name": tensor.name,
            "shape": list(tensor.shape),
            "dtype": tensor.dtype,
            "parameters": tensor.size,
            "bytes": tensor.nbytes,
        }
        for tensor in network.tensors
        if tensor.name not in analysed
    )
    return Inspection(summary_of(network), tuple(rows), skipped, network.warnings, others)


def summary_of(network: Network) -> NetworkFields:
    """The ``network`` part of a result's JSON: path, format, parameters, tensors."""
    return {
        "path": str(network.path),
        "format": network.format,
        "parameters": network.parameters,
        "tensors": len(network.tensors) + len(network.contents.unread),
    }


def _row(layer: Layer, stored: Tensor | None) -> InspectedLayer:
    sized = stored is not None and stored.size
    size = round(stored.nbytes * layer.parameters / stored.size) if sized and stored is not None else 0
    flags = [Flag("quantised", f"stored as {layer.dtype}; the values are what is left of the original")]
    row: Any = layer.identity_fields() | {
        "bytes": size,
        "matrices": layer.count,
        "dtype": layer.dtype,
        "view": layer.view,
        "warnings": flags if layer.quantised else [],
    }
    return cast("InspectedLayer", row | layer.storage_fields())
