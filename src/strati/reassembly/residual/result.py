"""What a reassembly returns: the permutation, how far it can be trusted, and the rebuilt network."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from strati.core.results import Flag, Result

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import NDArray
    from rich.console import RenderableType

    from strati.reassembly.residual.order import Round
    from strati.reassembly.residual.pairing import Pairing
    from strati.reassembly.residual.pieces import Piece, PieceSet
    from strati.reassembly.residual.unique import Uniqueness
    from strati.schemas.json_types import ReassembleFields

_WIDTH = 79
"""Longest line of a summary."""


@dataclass(frozen=True)
class Stage:
    """A stop on the way: for each place, the final position of the block that stood there then."""

    stage: str
    order: tuple[int, ...]
    mse: float


@dataclass(frozen=True)
class Reassembly(Result):
    """A network put back together.

    ``ins`` and ``outs`` index the candidates of ``pieces``, block by block; ``permutation`` gives piece numbers.
    ``exact`` means that ``mse`` is below 1e-10 of ``variance``, the variance of the outputs to reproduce.
    ``solve_seconds`` is the time to find the answer, ``check_seconds`` that of the errors on all rows after it.
    ``unique`` says which other arrangements fit the data as well; ``None`` where the answer is not exact.
    ``searched`` says that pairing and order had to be searched together with the data.
    """

    verb: ClassVar[str] = "reassemble"

    pieces: PieceSet
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    activation: str
    mse: float
    variance: float
    exact: bool
    unique: Uniqueness | None
    pairing: Pairing
    searched: bool
    seed_method: str
    seed_mse: float
    rounds: tuple[Round, ...]
    stages: tuple[Stage, ...]
    load_seconds: float
    solve_seconds: float
    check_seconds: float
    warnings: tuple[Flag, ...] = ()
    norms: tuple[int, ...] = ()

    def placed(self) -> list[tuple[str, Piece]]:
        """Name and piece of every layer in network order; each norm stands before what it feeds."""
        norms = [self.pieces.norms[n] for n in self.norms]
        of_blocks = norms[: len(self.ins)] if len(norms) >= max(len(self.ins), 2) else []
        layers: list[tuple[str, Piece]] = []
        for k, (i, j) in enumerate(zip(self.ins, self.outs, strict=True)):
            layers += [(f"blocks.{k}.norm", norm) for norm in of_blocks[k : k + 1]]
            layers += [(f"blocks.{k}.inp", self.pieces.inner[i]), (f"blocks.{k}.out", self.pieces.outer[j])]
        layers += [("norm", norm) for norm in norms[len(of_blocks) :]]
        return [*layers, ("last", self.pieces.last)]

    @property
    def permutation(self) -> tuple[int, ...]:
        """Piece numbers in network order: in, out, in, out, ..., last; each block's norm before it, if it has one."""
        return tuple(piece.number for _, piece in self.placed())

    def tensors(self) -> dict[str, NDArray[np.float32]]:
        """The rebuilt network by name: ``blocks.K.inp``, ``blocks.K.out`` and ``last``, weights and biases."""
        named = {f"{name}.weight": piece.weight for name, piece in self.placed()}
        return named | {f"{name}.bias": piece.bias for name, piece in self.placed()}

    def save(self, path: str | Path) -> None:
        """Write the rebuilt network as safetensors, blocks in order; whole or not at all."""
        from safetensors.numpy import save

        from strati.core.files import write_atomic

        about = {
            "architecture": "residual blocks x + out(act(inp(x))), then last"
            + (", norms before what they feed" if self.norms else ""),
            "activation": self.activation,
            "permutation": ",".join(map(str, self.permutation)),
            "exact": str(self.exact).lower(),
        }
        write_atomic(path, save(self.tensors(), metadata=about))

    def payload(self) -> ReassembleFields:
        """Permutation, error, separation of the pairs, and the way there."""
        return {
            "permutation": self.permutation,
            "mse": self.mse,
            "exact": self.exact,
            "relative_mse": self.mse / self.variance if self.variance > 0 else None,
            "network": {
                "blocks": self.pieces.blocks,
                "width": self.pieces.width,
                "hidden": self.pieces.hidden,
                "outputs": len(self.pieces.last.weight),
                "activation": self.activation,
                "roles_from_shape": not self.pieces.square,
                "norms": len(self.pieces.norms),
            },
            "pairing": self.pairing,
            "unique": None if self.unique is None else not self.unique.exchanges,
            "precision": None if self.unique is None else self.unique.precision,
            "least_margin": None if self.unique is None else self.unique.least_margin,
            "interchangeable": [] if self.unique is None else self.unique.exchanges,
            "joint_search": self.searched,
            "seed_order": {"method": self.seed_method, "mse": self.seed_mse},
            "rounds": self.rounds,
            "seconds": {"load": self.load_seconds, "solve": self.solve_seconds, "check": self.check_seconds},
            "score_matrix": self.pairing.matrix,
            "in_pieces": [p.number for p in self.pieces.inner],
            "out_pieces": [p.number for p in self.pieces.outer],
            "progression": self.stages,
            "warnings": self.warnings,
        }

    def frame(self) -> pd.DataFrame:
        """One line per block: its two pieces and how well they fit by their weights."""
        import pandas as pd

        return pd.DataFrame(self._rows(), columns=["block", "in", "out", "score"])

    def summary(self) -> RenderableType:
        """Whether the network is solved, the error, the pieces of each block, and the permutation."""
        from rich.console import Group
        from rich.text import Text

        from strati.core.display import Column, Table

        columns = tuple(Column(name, right=True, keep=True) for name in ("block", "in", "out", "pair score"))
        rows = tuple((k, i, j, f"{score:.2f}") for k, i, j, score in self._rows())
        return Group(Text("\n".join(self._head())), Table(columns, rows), Text("\n".join(self._tail())))

    def plot(self, **options: Any) -> Any:
        """Score matrix before and after matching, and the progression of the order."""
        from strati.report.plots.reassembly import draw

        return draw(self, **options)

    def _rows(self) -> list[tuple[int, int, int, float]]:
        """Block, its two pieces, and how well they fit by their weights."""
        pairs = enumerate(zip(self.ins, self.outs, strict=True))
        inner, outer = self.pieces.inner, self.pieces.outer
        return [
            (k, inner[i].number, outer[j].number, float(self.pairing.matrix[i, j])) for k, (i, j) in pairs
        ]

    def _head(self) -> list[str]:
        count, relative = (
            len(self.permutation),
            self.mse / self.variance if self.variance > 0 else float("nan"),
        )
        if not self.exact:
            answer = f"Not exact: the best order leaves {relative:.2g} of the variance of the outputs."
        elif self.unique is not None and self.unique.exchanges:
            answer = f"All {count} pieces placed exactly, in one of several orders that fit the outputs."
        else:
            answer = f"All {count} pieces placed: the network reproduces its outputs exactly."
        pairs = "separated" if self.pairing.separated else "not separated"
        moves = sum(r.swaps for r in self.rounds)
        return [
            answer,
            f"mean squared error {self.mse:.2g}, {relative:.2g} of the variance of the outputs",
            f"pairs by {self.pairing.score} score ({pairs})"
            + (", searched with the data" if self.searched else ""),
            f"order by {self.seed_method} seed, then {moves} moves in {len(self.rounds)} rounds",
            f"time {self.load_seconds:.2f} s to load, {self.solve_seconds:.2f} s to solve, "
            f"{self.check_seconds:.2f} s to check",
        ]

    def _tail(self) -> list[str]:
        permutation = textwrap.wrap("permutation " + ", ".join(map(str, self.permutation)), _WIDTH)
        warnings = [line for flag in self.warnings for line in textwrap.wrap(f"warning: {flag.text}", _WIDTH)]
        return permutation + warnings
