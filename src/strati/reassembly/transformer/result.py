"""What the reassembly of a transformer returns: every piece's place, how sure it is, and the rebuilt network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from strati.types import Flag, Result

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from numpy.typing import NDArray
    from rich.console import RenderableType

    from strati.reassembly.transformer.matrices import MatrixPairing
    from strati.reassembly.transformer.pieces import TransformerPieces


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

    verb: ClassVar[str] = "reassemble"

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

    def place_of(self) -> dict[str, int]:
        """Tensor name to piece number: the whole network."""
        found: dict[str, int] = {}
        blueprint = self.pieces.blueprint
        for number, (matrices, vectors) in enumerate(zip(self.blocks, self.vectors, strict=True)):
            for slot in blueprint.block:
                found[slot.name.format(number)] = (matrices if slot.matrix else vectors)[slot.role]
        whole = {**self.others, "embedding": self.embedding, "head": self.head}
        for slot in blueprint.whole:
            piece = whole.get(slot.role)
            if piece is not None:
                found[slot.name] = piece
        return found

    def tensors(self) -> dict[str, NDArray[np.floating]]:
        """The rebuilt network: tensor name to values."""
        return {name: self.pieces.arrays[number] for name, number in self.place_of().items()}

    def save(self, path: str | Path) -> None:
        """Write the rebuilt network: a Hugging Face directory, or a file ending in ``.safetensors``."""
        from strati.reassembly.transformer.rebuild import save

        save(self, Path(path))

    def payload(self) -> dict[str, Any]:
        """The fields of INTERFACE.md, then what else there is to know."""
        return {
            "blocks": self.blocks,
            "vectors": self.vectors,
            "embedding": self.embedding,
            "head": self.head,
            "pairs": self.pairs,
            "order": self.order,
            "exact": self.exact,
            "loss": self.loss,
            "uncertain": self.uncertain,
            "others": self.others,
            "network": {
                "blocks": len(self.blocks),
                "width": self.pieces.blueprint.width,
                "heads": self.pieces.blueprint.heads,
                "pieces": len(self.pieces.arrays),
                "roles_told": bool(self.pieces.told),
            },
            "seconds": self.seconds,
            "warnings": self.warnings,
        }

    def frame(self) -> pd.DataFrame:
        """One line per block: its matrices' pieces."""
        import pandas as pd

        return pd.DataFrame([dict(block) for block in self.blocks])

    def summary(self) -> RenderableType:
        """Counts, margins, and the pieces of each block."""
        from rich.text import Text

        blueprint = self.pieces.blueprint
        matrices = sum(len(block) for block in self.blocks)
        margin = self.order["margin"]
        exact = {None: "", True: ", outputs exact", False: ", outputs NOT exact"}[self.exact]
        lines = [
            f"{len(self.pieces.arrays)} pieces, {matrices} of them matrices of {len(self.blocks)} blocks of width "
            f"{blueprint.width}, {blueprint.heads} heads{exact}",
            f"order     {self.order['method']}, least sure neighbours "
            + ("-" if margin is None else f"{margin:.1f} nats"),
            f"direction by {self.order['direction_by']} ({self.order['direction_margin']:.1f} nats)",
            f"loss      {self.loss:.4f}" if self.loss is not None else "loss      no data given",
            f"uncertain {len(self.uncertain)} pieces"
            + (f": {_some(self.uncertain)}" if self.uncertain else ""),
            "seconds   " + ", ".join(f"{name} {value:.1f}" for name, value in self.seconds.items()),
        ]
        for number, block in enumerate(self.blocks):
            lines.append(
                f"block {number:3d} " + "  ".join(f"{role} {piece}" for role, piece in block.items())
            )
        return Text("\n".join(lines + [f"warning   {flag.text}" for flag in self.warnings]))


def _some(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers[:12])) + (", ..." if len(numbers) > 12 else "")
