"""Take a network apart into numbered, unlabelled pieces, and keep the answer: a puzzle for ``strati reassemble``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from strati.core.errors import BadInputError
from strati.core.results import Result, Tick, silent
from strati.core.rng import stream
from strati.io.network import Network
from strati.io.network import open as open_network
from strati.reassembly.transformer.shuffle import check_places, shuffle_transformer, write_pieces

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import RenderableType

    from strati.io.network import Openable

_TENSOR = re.compile(r"(?:blocks\.(\d+)\.(norm|inp|out)|(norm|last))\.(weight|bias)")
_ORDER = ("norm", "inp", "out", "last")


@dataclass(frozen=True)
class ShuffledResidual(Result):
    """The layers of a residual network as numbered pieces in a folder.

    Attributes:
        folder: Where the pieces are.
        blocks: Number of residual blocks.
        permutation: Piece numbers in network order.
    """

    verb: ClassVar[str] = "shuffle"

    folder: Path
    blocks: int
    permutation: tuple[int, ...]

    def payload(self) -> dict[str, Any]:
        """The folder and the answer."""
        return {"folder": str(self.folder), "permutation": self.permutation}

    def frame(self) -> pd.DataFrame:
        """One line per place in the network."""
        import pandas as pd

        return pd.DataFrame({"piece": self.permutation})

    def summary(self) -> RenderableType:
        """How many pieces were written where."""
        from rich.text import Text

        return Text(
            f"Wrote {len(self.permutation)} unlabelled pieces of {self.blocks} residual blocks to {self.folder}."
        )


def shuffle(
    model: Openable,
    out: str | Path,
    *,
    answer: str | Path | None = None,
    permute: bool = False,
    rescale: bool = False,
    seed: int = 0,
    tick: Tick = silent,
) -> Result:
    """Write a network's tensors as numbered pieces without names.

    Args:
        model: A transformer (path, network, module, state dict), or a residual network as ``strati reassemble --out``
            writes it.
        out: An empty or new folder.
        answer: A file outside of ``out`` for the answer.
        permute: Also permute neurons and heads block by block (transformers).
        rescale: Also move scales and signs where the function does not change (transformers).
        seed: Random seed of the numbering and of the changes.
        tick: Called after each piece.

    Raises:
        BadInputError: The folder is not empty, or the answer would lie in it.
        UnsupportedError: The network is neither of the two kinds.
    """
    network = open_network(model) if isinstance(model, str | Path) else model
    if isinstance(network, Network) and all(_TENSOR.fullmatch(tensor.name) for tensor in network.tensors):
        if permute or rescale:
            raise BadInputError("shuffle", "permute and rescale are for transformers")
        return _shuffle_residual(network, Path(out), answer, seed, tick)
    return shuffle_transformer(
        network, out, answer=answer, permute=permute, rescale=rescale, seed=seed, tick=tick
    )


def _shuffle_residual(
    network: Network, folder: Path, answer: str | Path | None, seed: int, tick: Tick
) -> ShuffledResidual:
    check_places(folder, answer)
    layers: dict[tuple[float, int], dict[str, str]] = {}
    for tensor in network.tensors:
        match = _TENSOR.fullmatch(tensor.name)
        assert match is not None  # the caller has seen to it
        block, inner, outer, kind = match.groups()
        place = (float("inf") if block is None else int(block), _ORDER.index(inner or outer))
        layers.setdefault(place, {})[kind] = tensor.name
    order = stream(seed, "reassembly", "drop").permutation(len(layers))
    numbers = np.argsort(order).tolist()
    pieces = (
        (number, {kind: np.array(network.read(name)) for kind, name in layers[place].items()})
        for number, place in zip(numbers, sorted(layers), strict=True)
    )
    write_pieces(folder, len(layers), pieces, tick)
    blocks = len({block for block, _ in layers if block != float("inf")})
    shuffled = ShuffledResidual(folder, blocks, tuple(int(n) for n in numbers))
    if answer is not None:
        shuffled.to_json(answer)
    return shuffled
