"""Whose layer is this? A stray matrix found in a network or its fine-tune; blocks of two checkpoints matched."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from strati.errors import BadInputError
from strati.network.open import open as open_network
from strati.reassembly.assignment import assign
from strati.reassembly.transformer.blueprint import blueprint_of
from strati.reassembly.transformer.sources import PieceSource, source_of
from strati.types import Result

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import NDArray
    from rich.console import RenderableType


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

    verb: ClassVar[str] = "reassemble"

    piece: str
    candidates: tuple[Candidate, ...]
    margin: float
    sure: bool

    def payload(self) -> dict[str, Any]:
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

        return pd.DataFrame([vars(one) for one in self.candidates])

    def summary(self) -> RenderableType:
        """The best candidate in a line, the next ones below."""
        from rich.text import Text

        verdict = "is" if self.sure else "is NOT surely from this network; nearest:"
        lines = [f"{self.piece} {verdict} {_named(self.candidates[0])}, lead {self.margin:.3f}"]
        return Text("\n".join(lines + [f"  next {_named(one)}" for one in self.candidates[1:5]]))


def identify(piece: str | Path | NDArray[Any], model: object) -> Identified:
    """The block and role of a stray matrix or vector of a network, or of another fine-tune of it.

    Args:
        piece: A file with one tensor, or an array.
        model: The network: whatever :func:`~strati.reassembly.transformer.drop.drop` takes.

    Raises:
        BadInputError: The file holds several tensors, or nothing in the network has its shape.
    """
    name, values = _one(piece)
    source = source_of(model)
    places = _places(source)
    flat = _unit(values)
    found = []
    for tensor, shape in source.shapes.items():
        if tuple(shape) == values.shape:
            role, block = places.get(tensor, (tensor, None))
            found.append(Candidate(tensor, role, block, float(flat @ _unit(source.read(tensor)))))
    if not found:
        sides = "x".join(map(str, values.shape))
        raise BadInputError(name, f"no tensor of {source.name} has its shape {sides}")
    found.sort(key=lambda one: -one.likeness)
    lead = found[0].likeness - (found[1].likeness if len(found) > 1 else 0.0)
    # unrelated weights have a cosine of about 1 / sqrt(entries); vectors share their sign and need a clear lead
    chance = 6 / float(np.sqrt(values.size))
    return Identified(
        name, tuple(found[:8]), lead, bool(found[0].likeness > 0.5 or (values.ndim > 1 and lead > chance))
    )


@dataclass(frozen=True)
class Correspondence(Result):
    """For each block of one checkpoint the block of the other that corresponds, and their likeness."""

    verb: ClassVar[str] = "reassemble"

    partners: tuple[int, ...]
    likeness: tuple[float, ...]
    margins: tuple[float, ...]

    def payload(self) -> dict[str, Any]:
        """One entry per block of the first network."""
        rows = zip(self.partners, self.likeness, self.margins, strict=True)
        return {
            "correspond": [
                {"block": k, "partner": p, "likeness": s, "margin": m} for k, (p, s, m) in enumerate(rows)
            ]
        }

    def frame(self) -> pd.DataFrame:
        """One line per block."""
        import pandas as pd

        return pd.DataFrame(self.payload()["correspond"])

    def summary(self) -> RenderableType:
        """One line per block."""
        from rich.text import Text

        rows = self.payload()["correspond"]
        return Text(
            "\n".join(
                f"block {r['block']} - block {r['partner']}: likeness {r['likeness']:.3f}, lead {r['margin']:.3f}"
                for r in rows
            )
        )


def correspond(first: object, second: object) -> Correspondence:
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
    most = max(table.shape)
    square = np.full((most, most), -1.0)
    square[: len(table), : table.shape[1]] = table
    partners = assign(square)[: len(table)]
    rest = table.copy()
    inside = [k for k, p in enumerate(partners) if p < table.shape[1]]
    best = np.array([table[k, partners[k]] for k in inside])
    for k in inside:
        rest[k, partners[k]] = -np.inf
    leads = best - rest[inside].max(axis=1) if table.shape[1] > 1 else best
    return Correspondence(
        tuple(int(partners[k]) for k in inside), tuple(best.tolist()), tuple(leads.tolist())
    )


def _one(piece: str | Path | NDArray[Any]) -> tuple[str, NDArray[Any]]:
    if isinstance(piece, str | Path):
        network = open_network(piece)
        if len(network.tensors) != 1:
            raise BadInputError(piece, f"holds {len(network.tensors)} tensors; a piece is one")
        return Path(piece).name, np.asarray(network.read(network.tensors[0].name))
    return "piece", np.asarray(piece)


def _places(source: PieceSource) -> dict[str, tuple[str, int | None]]:
    plan = blueprint_of(source.shapes, source.config, where=source.name)
    found: dict[str, tuple[str, int | None]] = {
        slot.name.format(k): (slot.role, k) for slot in plan.block for k in range(plan.blocks)
    }
    return found | {slot.name: (slot.role, None) for slot in plan.whole}


def _unit(values: NDArray[Any]) -> NDArray[np.float64]:
    flat = np.asarray(values, dtype=np.float64).reshape(-1)
    return np.asarray(flat / max(float(np.linalg.norm(flat)), 1e-300))


def _named(one: Candidate) -> str:
    where = "" if one.block is None else f"block {one.block} "
    return f"{where}{one.role} ({one.name}), likeness {one.likeness:.3f}"
