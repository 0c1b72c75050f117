"""What a reassembly returns: the permutation, how far it can be trusted, and the rebuilt network."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from strati.types import Flag, Result

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import NDArray
    from rich.console import RenderableType

    from strati.reassembly.pairing import Pairing
    from strati.reassembly.pieces import PieceSet
    from strati.reassembly.repair import Round
    from strati.reassembly.unique import Uniqueness


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

    @property
    def permutation(self) -> tuple[int, ...]:
        """Piece numbers in network order: in, out, in, out, ..., last; each block's norm before it, if it has one."""
        numbers = []
        norms = [self.pieces.norms[n].number for n in self.norms]
        own = self.per_block
        for k, (i, j) in enumerate(zip(self.ins, self.outs, strict=True)):
            numbers += [norms[k]] if own else []
            numbers += [self.pieces.inner[i].number, self.pieces.outer[j].number]
        return (*numbers, *(norms[len(self.ins) :] if own else norms), self.pieces.last.number)

    @property
    def per_block(self) -> bool:
        """Whether every block has a norm before it."""
        return len(self.norms) >= max(len(self.ins), 2)

    def tensors(self) -> dict[str, NDArray[np.float32]]:
        """The rebuilt network by name: ``blocks.K.inp``, ``blocks.K.out`` and ``last``, weights and biases."""
        named: dict[str, NDArray[np.float32]] = {}
        for k, (i, j) in enumerate(zip(self.ins, self.outs, strict=True)):
            for side, piece in (("inp", self.pieces.inner[i]), ("out", self.pieces.outer[j])):
                named[f"blocks.{k}.{side}.weight"] = piece.weight
                named[f"blocks.{k}.{side}.bias"] = piece.bias
            if self.per_block:
                norm = self.pieces.norms[self.norms[k]]
                named[f"blocks.{k}.norm.weight"], named[f"blocks.{k}.norm.bias"] = norm.weight, norm.bias
        for n in self.norms[len(self.ins) :] if self.per_block else self.norms:
            norm = self.pieces.norms[n]
            named["norm.weight"], named["norm.bias"] = norm.weight, norm.bias
        named["last.weight"], named["last.bias"] = self.pieces.last.weight, self.pieces.last.bias
        return named

    def save(self, path: str | Path) -> None:
        """Write the rebuilt network as safetensors, blocks in order; whole or not at all."""
        from safetensors.numpy import save

        from strati.run.files import write_atomic

        about = {
            "architecture": "residual blocks x + out(act(inp(x))), then last"
            + (", norms before what they feed" if self.norms else ""),
            "activation": self.activation,
            "permutation": ",".join(map(str, self.permutation)),
            "exact": str(self.exact).lower(),
        }
        write_atomic(path, save(self.tensors(), metadata=about))

    def payload(self) -> dict[str, Any]:
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
            "pairing": {
                "score": self.pairing.score,
                "matched_min": self.pairing.matched_min,
                "unmatched_max": self.pairing.unmatched_max,
                "separated": self.pairing.separated,
            },
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

        rows = [
            (k, self.pieces.inner[i].number, self.pieces.outer[j].number, self.pairing.matrix[i, j])
            for k, (i, j) in enumerate(zip(self.ins, self.outs, strict=True))
        ]
        return pd.DataFrame(rows, columns=["block", "in", "out", "score"])

    def summary(self) -> RenderableType:
        """The permutation and how it was come by, in a few lines."""
        from rich.text import Text

        return Text("\n".join(self._lines()))

    def plot(self, **options: Any) -> Any:
        """Score matrix before and after matching, and the progression of the order."""
        from strati.report.plots.reassembly import draw

        return draw(self, **options)

    def _lines(self) -> list[str]:
        p = self.pairing
        told = "separated" if p.separated else "NOT separated"
        relative = self.mse / self.variance if self.variance > 0 else float("nan")
        network = self.pieces
        lines = [
            f"{network.blocks} blocks of width {network.width}, hidden {network.hidden}, {self.activation}, "
            f"{len(network.last.weight)} output(s)",
            f"pairing   {p.score}: matched >= {p.matched_min:.3f}, unmatched <= {p.unmatched_max:.3f} ({told})"
            + ("; pairs and order searched jointly with the data" if self.searched else ""),
            f"seed      {self.seed_method}: MSE {self.seed_mse:.6g}",
            f"rounds    {len(self.rounds)}, {sum(r.swaps for r in self.rounds)} moves",
            f"result    {'exact' if self.exact else 'NOT exact'}: MSE {self.mse:.3g}, "
            f"{relative:.2g} of the variance of the outputs",
            f"seconds   load {self.load_seconds:.2f}, solve {self.solve_seconds:.2f}, check on all rows "
            f"{self.check_seconds:.2f}",
            "permutation " + ",".join(map(str, self.permutation)),
        ]
        return lines + [f"warning   {flag.text}" for flag in self.warnings]
