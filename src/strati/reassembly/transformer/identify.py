"""Whose layer is this? A stray matrix found in a network or its fine-tune; blocks of two checkpoints matched."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from scipy.optimize import linear_sum_assignment

from strati.core.errors import BadInputError
from strati.core.results import Result
from strati.io.network import Network
from strati.io.network import open as open_network
from strati.reassembly.transformer.blueprint import blueprint_of
from strati.reassembly.transformer.shuffle import PieceSource, source_of

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import NDArray
    from rich.console import RenderableType

    from strati.io.network import Openable
    from strati.schemas.json_types import IdentifyFields


@dataclass(frozen=True)
class Candidate:
    """A place a stray tensor may come from; ``likeness`` is the cosine of all weights, ``None`` block: there once."""

    name: str
    role: str
    block: int | None
    likeness: float


@dataclass(frozen=True)
class Identified(Result):
    """The likeliest places of a stray tensor, best first; ``margin`` is the lead of the first over the second."""

    verb: ClassVar[str] = "identify"

    piece: str
    candidates: tuple[Candidate, ...]
    margin: float
    sure: bool

    def payload(self) -> IdentifyFields:
        """Block and role of the best, and the next ones."""
        best = self.candidates[0]
        return {
            "piece": self.piece,
            "role": best.role,
            "block": best.block,
            "name": best.name,
            "likeness": best.likeness,
            "margin": self.margin,
            "sure": self.sure,
            "candidates": self.candidates,
        }

    def frame(self) -> pd.DataFrame:
        """One line per candidate."""
        import pandas as pd

        return pd.DataFrame([vars(candidate) for candidate in self.candidates])

    def summary(self) -> RenderableType:
        """The place of the piece, its likeness, and the next best places."""
        from rich.console import Group
        from rich.text import Text

        from strati.core.display import Column, Table

        best = self.candidates[0]
        place = best.name if best.block is None else f"{best.role} of block {best.block}"
        verdict = (
            f"{self.piece} is {place}."
            if self.sure
            else f"{self.piece} is not clearly a layer of this network."
        )
        numbers = f"cosine {best.likeness:.3f}, {self.margin:.3f} above the next layer"
        columns = (
            Column("layer", keep=True),
            Column("role"),
            Column("block", right=True),
            Column("cosine", right=True),
        )
        rows = tuple((c.name, c.role, c.block, f"{c.likeness:.3f}") for c in self.candidates[:5])
        return Group(Text(verdict), Text(numbers), Table(columns, rows))


def identify(piece: str | Path | Network | NDArray[Any], model: Openable) -> Identified:
    """The block and role of a stray matrix or vector of a network, or of another fine-tune of it.

    Args:
        piece: A file with one tensor, the network opened from it, or an array.
        model: The network: whatever :func:`~strati.reassembly.transformer.shuffle.drop` takes.

    Raises:
        BadInputError: The file holds several tensors, or nothing in the network has its shape.
    """
    name, values = _named_tensor(piece)
    source = source_of(model)
    places = _places(source)
    flat = _unit(values)
    candidates = []
    for tensor, shape in source.shapes.items():
        if tuple(shape) == values.shape:
            role, block = places.get(tensor, (tensor, None))
            candidates.append(Candidate(tensor, role, block, float(flat @ _unit(source.read(tensor)))))
    if not candidates:
        sides = "x".join(map(str, values.shape))
        raise BadInputError(name, f"no tensor of {source.name} has its shape {sides}")
    candidates.sort(key=lambda candidate: -candidate.likeness)
    lead = candidates[0].likeness - (candidates[1].likeness if len(candidates) > 1 else 0.0)
    # unrelated matrices have a cosine of about 1 / sqrt(entries); norms are all alike: the best must be far nearer
    likeness = candidates[0].likeness
    if values.ndim > 1:
        sure = likeness > 0.5 or lead > 6 / float(np.sqrt(values.size))
    else:
        sure = likeness > 0.5 and lead > 1 - likeness
    return Identified(name, tuple(candidates[:8]), lead, bool(sure))


@dataclass(frozen=True)
class BlockMatch:
    """A block of one checkpoint, the block of the other that corresponds, their cosine, and its lead over the next."""

    block: int
    partner: int
    likeness: float
    margin: float


@dataclass(frozen=True)
class Correspondence(Result):
    """For each block of one checkpoint the block of the other that corresponds, and their likeness."""

    verb: ClassVar[str] = "correspond"

    correspond: tuple[BlockMatch, ...]

    @property
    def partners(self) -> tuple[int, ...]:
        """The block of the second network for each block of the first."""
        return tuple(match.partner for match in self.correspond)

    def frame(self) -> pd.DataFrame:
        """One line per block."""
        import pandas as pd

        return pd.DataFrame([vars(match) for match in self.correspond])

    def summary(self) -> RenderableType:
        """How many blocks correspond, and one line per block."""
        from rich.console import Group
        from rich.text import Text

        from strati.core.display import Column, Table

        in_order = all(match.block == match.partner for match in self.correspond)
        verdict = "All blocks correspond in order." if in_order else "The blocks correspond in another order."
        likeness, lead = (min(getattr(m, name) for m in self.correspond) for name in ("likeness", "margin"))
        numbers = f"least cosine of a pair of blocks {likeness:.3f}, least lead {lead:.3f}"
        columns = tuple(Column(name, right=True) for name in ("block", "partner", "cosine", "lead"))
        rows = tuple((m.block, m.partner, f"{m.likeness:.3f}", f"{m.margin:.3f}") for m in self.correspond)
        return Group(Text(verdict), Text(numbers), Table(columns, rows))


def correspond(first: Openable, second: Openable) -> Correspondence:
    """Match the blocks of two checkpoints of one architecture by the mean cosine of their matrices.

    Raises:
        BadInputError: Their blocks are not alike.
    """
    sources = [source_of(first), source_of(second)]
    plans = [blueprint_of(source.shapes, source.config, where=source.name) for source in sources]
    shapes = [{slot.role: slot.shape for slot in plan.block if slot.matrix} for plan in plans]
    if shapes[0] != shapes[1]:
        raise BadInputError(sources[1].name, f"its blocks differ in shape from those of {sources[0].name}")
    table = np.zeros((plans[0].blocks, plans[1].blocks))
    for role in shapes[0]:
        sides = []
        for source, plan in zip(sources, plans, strict=True):
            slot = plan.slot(role)
            assert slot is not None  # both have the same roles
            sides.append(np.stack([_unit(source.read(slot.name.format(k))) for k in range(plan.blocks)]))
        table += sides[0] @ sides[1].T / len(shapes[0])
    first_blocks, partners = linear_sum_assignment(table, maximize=True)
    best = table[first_blocks, partners]
    others = table.copy()
    others[first_blocks, partners] = -np.inf
    leads = best - others[first_blocks].max(axis=1) if table.shape[1] > 1 else best
    rows = zip(first_blocks.tolist(), partners.tolist(), best.tolist(), leads.tolist(), strict=True)
    return Correspondence(tuple(BlockMatch(*row) for row in rows))


def _named_tensor(piece: str | Path | Network | NDArray[Any]) -> tuple[str, NDArray[Any]]:
    network = open_network(piece) if isinstance(piece, str | Path) else piece
    if not isinstance(network, Network):
        return "piece", np.asarray(network)
    if len(network.tensors) != 1:
        raise BadInputError(network.path, f"holds {len(network.tensors)} tensors; a piece is one")
    return network.path.name, np.asarray(network.read(network.tensors[0].name))


def _places(source: PieceSource) -> dict[str, tuple[str, int | None]]:
    plan = blueprint_of(source.shapes, source.config, where=source.name)
    places: dict[str, tuple[str, int | None]] = {
        slot.name.format(k): (slot.role, k) for slot in plan.block for k in range(plan.blocks)
    }
    return places | {slot.name: (slot.role, None) for slot in plan.whole}


def _unit(values: NDArray[Any]) -> NDArray[np.float64]:
    flat = np.asarray(values, dtype=np.float64).reshape(-1)
    return np.asarray(flat / max(float(np.linalg.norm(flat)), 1e-300))
