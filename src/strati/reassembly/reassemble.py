"""``strati.reassemble``: recover the order of shuffled layers, of residual networks and of transformers."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

from strati.core.errors import BadInputError
from strati.core.options import resolve
from strati.core.results import Tick, silent

if TYPE_CHECKING:
    from strati.core.option_types import ReassembleOptions
    from strati.reassembly.residual.result import Reassembly
    from strati.reassembly.transformer.result import TransformerReassembly

_TARGETS = ("pred", "y", "target", "output")


@dataclass(frozen=True)
class ReassembleConfig:
    """How to put pieces back together.

    Attributes:
        activation: Of a residual network's blocks: ``relu``, ``gelu`` (erf), ``gelu-tanh``, ``tanh`` or ``silu``.
            A transformer's is in its ``config.json``.
        pairing: A score of :class:`~strati.reassembly.residual.pairing.Score`, ``"auto"`` (the paper's, then the
            combined one, then the data) or ``"joint"`` (the data at once). Residual networks only.
        seed_order: A seed of :class:`~strati.reassembly.residual.order.Seed`, or ``"auto"``. Residual networks only.
        seconds: Time limit of the search with data; a step that has begun is finished.
        tokens: Use only the first N tokens (rows of images) to verify a transformer.
        inputs: Input columns (names or patterns, comma-separated) or array of a data file.
        target: Columns or array with the network's recorded outputs.
        seed: Random seed.
    """

    activation: str = "relu"
    pairing: str = "auto"
    seed_order: str = "auto"
    seconds: float = 120.0
    tokens: int = 256
    inputs: str | None = None
    target: str | None = None
    seed: int = 0


def reassemble(
    pieces: object,
    x: Any = None,
    y: Any = None,
    *,
    config: ReassembleConfig | None = None,
    tick: Tick = silent,
    **options: Unpack[ReassembleOptions],
) -> Reassembly | TransformerReassembly:
    """Recover the order of the shuffled layers of a residual network or of a transformer.

    Args:
        pieces: A folder; for a residual network also a list or dict of ``(weight, bias)`` (numpy or torch);
            for a transformer also what :func:`strati.reassembly.transformer.shuffle.shuffle_transformer` returns.
        x: Inputs, rows x width, or the path of a data file (CSV, ``.npz``). A transformer needs none; token ids, a
            text file or images verify and repair the answer from the weights.
        y: The network's recorded outputs (its predictions, not the true targets), rows or rows x outputs.
        config: Options; keywords of the same names win (``activation="gelu"``).
        tick: Called after each step.
        options: Fields of :class:`~strati.reassembly.reassemble.ReassembleConfig`.

    Returns:
        The permutation of the pieces, whether it is exact, and which pieces could change places.

    Raises:
        BadInputError: The pieces make no network, or the data do not fit them.

    Reference:
        H. Park, "I Dropped a Neural Net" (2026), for pairing by diagonal dominance, seed orders and repair; the
        regressions are strati's own (docs/reassemble.md).

    Examples:
        >>> import numpy as np
        >>> rng = np.random.default_rng(0)
        >>> W = [(rng.normal(size=s) / 3, rng.normal(size=s[0]) / 9) for s in [(8, 4), (4, 8)] * 3 + [(1, 4)]]
        >>> x = z = rng.normal(size=(200, 4))
        >>> for k in (0, 2, 4):
        ...     z = z + np.maximum(z @ W[k][0].T + W[k][1], 0) @ W[k + 1][0].T + W[k + 1][1]
        >>> y = z @ W[6][0].T + W[6][1]
        >>> answer = reassemble([W[k] for k in (3, 2, 6, 5, 0, 1, 4)], x, y)
        >>> answer.exact, answer.permutation
        (True, (4, 5, 1, 0, 6, 3, 2))
    """
    settings = resolve(ReassembleConfig, config, options, of=reassemble)
    if is_transformer(pieces):
        return _transformer(pieces, x, y, settings, tick)
    return _residual(pieces, x, y, settings, tick)


def is_transformer(pieces: object) -> bool:
    """Whether these are the pieces of a transformer: a folder with a ``config.json``, or pieces in memory."""
    if isinstance(pieces, str | Path):
        return (Path(pieces) / "config.json").is_file()
    return hasattr(pieces, "blueprint")


def _transformer(pieces: Any, x: Any, y: Any, config: ReassembleConfig, tick: Tick) -> TransformerReassembly:
    from strati.reassembly.transformer.pieces import TransformerPieces, check, read_transformer
    from strati.reassembly.transformer.shuffle import ShuffledCheckpoint
    from strati.reassembly.transformer.solve import check_data, solve_transformer

    check_data(x)
    began = time.perf_counter()
    if isinstance(pieces, ShuffledCheckpoint):
        pieces = pieces.folder if pieces.pieces is None else pieces.pieces
    if isinstance(pieces, TransformerPieces):
        check(pieces)
        checked_pieces = pieces
    else:
        checked_pieces = read_transformer(pieces)
    loaded = time.perf_counter() - began
    return solve_transformer(checked_pieces, x, y, config, load_seconds=loaded, tick=tick)


def _residual(pieces: object, x: Any, y: Any, config: ReassembleConfig, tick: Tick) -> Reassembly:
    from strati.reassembly.residual.pieces import as_pieces
    from strati.reassembly.residual.solve import solve

    began = time.perf_counter()
    piece_list = as_pieces(pieces)
    if isinstance(x, str | Path):
        x, y = _from_file(x, y, config)
    if x is None or y is None:
        raise BadInputError("data", "a residual network needs inputs and the network's recorded outputs")
    where = pieces if isinstance(pieces, str | Path) else "pieces"
    loaded = time.perf_counter() - began
    return solve(piece_list, _array(x), _array(y), config, where=where, load_seconds=loaded, tick=tick)


def _from_file(path: str | Path, y: Any, config: ReassembleConfig) -> tuple[Any, Any]:
    from strati.io.data_files import read_data

    data = read_data(path, inputs=config.inputs, target=config.target or (_TARGETS if y is None else None))
    return data.x, data.y if y is None else y


def _array(values: Any) -> np.ndarray[Any, np.dtype[Any]]:
    if hasattr(values, "detach"):
        values = values.detach().cpu().numpy()
    return np.asarray(values)
