"""What the reassembly of a transformer returns: every piece's place, how sure it is, and the rebuilt network."""

from __future__ import annotations

import json
import shutil
import tempfile
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from strati.core.errors import BadInputError
from strati.core.files import check_writable, write_atomic
from strati.core.results import Flag, Result

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import NDArray
    from rich.console import RenderableType

    from strati.reassembly.transformer.matrices import MatrixPairing
    from strati.reassembly.transformer.pieces import TransformerPieces

SURE_DIRECTION = 3.0
"""Nats from which the direction is called sure: odds of 20 to 1."""


@dataclass(frozen=True)
class TransformerReassembly(Result):
    """A transformer put back together.

    Attributes:
        pieces: What it was made of.
        blocks: The matrices of each block, slot to piece number, in network order.
        vectors: The biases and norm weights likewise.
        embedding: The embedding's piece, if there is one.
        head: The head's; the embedding's where both are one.
        others: Other pieces that are there once, by name.
        pairs: Which pieces were put together, by what, with which margin (nats).
        order: Method, margin of the least sure neighbours, and what told the direction.
        exact: With given outputs, whether they agree to rounding; ``None`` with a loss alone or without data.
        loss: With data, the loss (or the mean squared error to the given outputs).
        uncertain: Pieces whose place is not sure.
        seconds: Time spent by stage.
        warnings: What a reader must know.
    """

    verb: ClassVar[str] = "reassemble-transformer"
    omitted: ClassVar[tuple[str, ...]] = ("pieces",)
    computed: ClassVar[tuple[str, ...]] = ("network",)

    pieces: TransformerPieces
    blocks: tuple[Mapping[str, int], ...]
    vectors: tuple[Mapping[str, int], ...]
    embedding: int | None
    head: int | None
    others: Mapping[str, int]
    pairs: tuple[MatrixPairing, ...]
    order: Mapping[str, Any]
    exact: bool | None
    loss: float | None
    uncertain: tuple[int, ...]
    seconds: Mapping[str, float]
    warnings: tuple[Flag, ...] = ()

    @property
    def network(self) -> dict[str, Any]:
        """Its size, as in the JSON form."""
        return {
            "blocks": len(self.blocks),
            "width": self.pieces.blueprint.width,
            "heads": self.pieces.blueprint.heads,
            "pieces": len(self.pieces.arrays),
        }

    def place_of(self) -> dict[str, int]:
        """Tensor name to piece number: the whole network."""
        places: dict[str, int] = {}
        blueprint = self.pieces.blueprint
        for number, (matrices, vectors) in enumerate(zip(self.blocks, self.vectors, strict=True)):
            for slot in blueprint.block:
                places[slot.name.format(number)] = (matrices if slot.matrix else vectors)[slot.role]
        global_pieces = {**self.others, "embedding": self.embedding, "head": self.head}
        for slot in blueprint.whole:
            piece = global_pieces.get(slot.role)
            if piece is not None:
                places[slot.name] = piece
        return places

    def tensors(self) -> dict[str, NDArray[np.floating]]:
        """The rebuilt network: tensor name to values."""
        return {name: self.pieces.arrays[number] for name, number in self.place_of().items()}

    def save(self, path: str | Path) -> None:
        """Write the rebuilt network: a Hugging Face directory, or a file ending in ``.safetensors``."""
        _write_network(self, Path(path))

    def frame(self) -> pd.DataFrame:
        """One line per block: its matrices' pieces."""
        import pandas as pd

        return pd.DataFrame([dict(block) for block in self.blocks])

    def summary(self) -> RenderableType:
        """How many matrices are placed surely, the margins, and the pieces of each block."""
        from rich.console import Group
        from rich.text import Text

        from strati.core.display import Column, Table

        attention = ("q", "k", "v", "qkv", "out")
        rows = tuple(
            (
                number,
                "  ".join(f"{role} {piece}" for role, piece in block.items() if role in attention),
                "  ".join(f"{role} {piece}" for role, piece in block.items() if role not in attention),
            )
            for number, block in enumerate(self.blocks)
        )
        columns = (
            Column("block", right=True, keep=True),
            Column("attention", keep=True),
            Column("MLP", keep=True),
        )
        warnings = [line for flag in self.warnings for line in textwrap.wrap(f"warning: {flag.text}", 79)]
        lines = [line for text in self._head() for line in textwrap.wrap(text, 79)]
        return Group(Text("\n".join(lines)), Table(columns, rows), *(Text(line) for line in warnings))

    def _head(self) -> list[str]:
        matrices = {n for block in self.blocks for n in block.values()}
        vectors = set(self.pieces.arrays) - matrices
        open_matrices, open_vectors = (len(side & set(self.uncertain)) for side in (matrices, vectors))
        blocks = f"{len(matrices)} matrices of {len(self.blocks)} blocks"
        if self.exact:
            answer = f"All {blocks} placed: the outputs agree exactly."
        elif open_matrices:
            answer = f"Placed {len(matrices) - open_matrices} of {blocks} with certainty."
        else:
            sure = (
                "direction sure" if self.order["direction_margin"] >= SURE_DIRECTION else "direction not sure"
            )
            answer = f"All {blocks} placed; {sure}; {open_vectors} biases and norms uncertain."
        if self.uncertain and self.loss is None:
            answer += " Recorded outputs settle what is uncertain."
        margin = self.order["margin"]
        least = "no neighbours" if margin is None else f"least sure neighbours {margin:.1f} nats"
        lines = [answer]
        if self.loss is not None:
            lines.append(f"loss {self.loss:.4g}")
        lines.append(
            f"order: {least}; direction: {self.order['direction_margin']:.1f} nats, by {self.order['direction_by']}"
        )
        if self.uncertain:
            lines.append(f"uncertain pieces: {_shortened(self.uncertain)}")
        return lines


def _shortened(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers[:12])) + (f" and {len(numbers) - 12} more" if len(numbers) > 12 else "")


_OWN = ("config.json", "blueprint.json")
"""Files beside the pieces that are written anew; all other small files are the tokenizer's."""


def _write_network(answer: TransformerReassembly, path: Path) -> None:
    """Write the network; whole or not at all.

    Args:
        answer: The reassembly.
        path: A new or empty folder, or a file ending in ``.safetensors``.

    Raises:
        BadInputError: The folder is not empty, or nothing can be written there.
    """
    from safetensors.numpy import save as to_bytes
    from safetensors.numpy import save_file

    check_target(path)
    tensors = {name: np.ascontiguousarray(values) for name, values in answer.tensors().items()}
    if path.suffix == ".safetensors":
        write_atomic(path, to_bytes(tensors, metadata={"format": "pt"}))
        return
    with tempfile.TemporaryDirectory(dir=path.resolve().parent, prefix=f".{path.name}.") as scratch:
        made = Path(scratch) / "network"
        made.mkdir()
        save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
        write_atomic(made / "config.json", json.dumps(dict(answer.pieces.config), indent=1) + "\n")
        folder = answer.pieces.folder
        for file in sorted(folder.iterdir()) if folder is not None else []:
            if (
                file.suffix in (".json", ".txt", ".model", ".bin")
                and "piece" not in file.name
                and file.name not in _OWN
            ):
                shutil.copyfile(file, made / file.name)  # the tokenizer
        made.replace(path)


def check_target(path: Path) -> None:
    """Refuse a place that cannot take the network.

    Raises:
        BadInputError: It is a folder with something in it, or cannot be written.
    """
    if path.suffix == ".safetensors":
        check_writable(path)
    elif path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise BadInputError(path, "is not an empty folder; give a new one for the network")
    elif not path.exists():
        check_writable(path)
