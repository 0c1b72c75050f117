"""The pieces: a folder of unlabelled linear layers, read and told apart by their shapes.

What belongs to what is not decided here; only which pieces can be input projections, output projections
and the last layer. Everything wrong with the set of pieces is found here, before any work is done.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.core.errors import BadInputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from strati.reassembly.residual.network import Floats

ENDINGS = (".pth", ".pt", ".bin", ".safetensors", ".npz")


@dataclass(frozen=True)
class Piece:
    """One linear layer: its number, where it came from, weight (out, in) and bias (out).

    A norm is a piece with a weight of one dimension; ``biased`` says whether its file had a bias at all.
    """

    number: int
    name: str
    weight: NDArray[np.float32]
    bias: NDArray[np.float32]
    biased: bool = True

    @property
    def norm(self) -> bool:
        """Whether it is the weight of a norm, not a linear layer."""
        return self.weight.ndim == 1


@dataclass(frozen=True)
class PieceSet:
    """The pieces by the role their shape allows.

    Attributes:
        inner: Candidates for input projections, hidden x width, by number.
        outer: Candidates for output projections, width x hidden. The same pieces as ``inner`` when the
            hidden width equals the block width: shape does not tell the two apart then.
        last: The last layer, outputs x width.
        norms: Norms: one before each block, one before the last layer, or both; or none.
        centred: They are LayerNorms; otherwise RMSNorms.
    """

    inner: tuple[Piece, ...]
    outer: tuple[Piece, ...]
    last: Piece
    norms: tuple[Piece, ...] = ()
    centred: bool = True

    @property
    def square(self) -> bool:
        """Whether shape leaves open which pieces are input and which output projections."""
        return self.inner[0].weight.shape == self.outer[0].weight.shape

    @property
    def blocks(self) -> int:
        """Number of residual blocks."""
        return len(self.inner) // 2 if self.square else len(self.inner)

    @property
    def width(self) -> int:
        """Width of the residual stream."""
        return int(self.last.weight.shape[1])

    @property
    def hidden(self) -> int:
        """Hidden width of a block."""
        return int(self.inner[0].weight.shape[0])


def read_pieces(folder: str | Path) -> list[Piece]:
    """Read every piece of a folder (``.pth``, ``.pt``, ``.bin``, ``.safetensors``, ``.npz``).

    A piece's number is the last number in its file's name; where names have none, pieces are numbered in
    the order of their names. Files of other kinds are left alone.

    Raises:
        BadInputError: No folder, no pieces, a number twice or missing, or a file that is not one layer.
    """
    return [_read(number, file) for number, file in numbered(Path(folder), ENDINGS)]


def numbered(place: Path, endings: Sequence[str]) -> list[tuple[int, Path]]:
    """The files of pieces in a folder with their numbers, sorted by number.

    Raises:
        BadInputError: No folder, no pieces, a number twice or missing.
    """
    if not place.is_dir():
        raise BadInputError(place, "is not a folder of pieces" if place.exists() else "no such folder")
    files = sorted(f for f in place.iterdir() if f.suffix.lower() in endings and not f.name.startswith("."))
    if not files:
        raise BadInputError(place, f"holds no pieces; expected files ending in {', '.join(endings)}")
    return sorted(zip(_numbers(place, files), files, strict=True))


def as_pieces(pieces: object) -> list[Piece]:
    """Pieces from Python: a folder, a list, or a dict of number to piece.

    A piece is ``(weight, bias)``, a weight alone, or a mapping with ``weight`` and ``bias``; arrays of
    numpy or torch.

    Examples:
        >>> as_pieces([(np.ones((3, 2)), np.zeros(3))])[0].weight.shape
        (3, 2)
    """
    if isinstance(pieces, str | Path):
        return read_pieces(pieces)
    if isinstance(pieces, Mapping):
        items = [(_as_number(key), str(key), value) for key, value in pieces.items()]
        if any(number is None for number, _, _ in items):
            items = [(i, name, value) for i, (_, name, value) in enumerate(items)]
    elif isinstance(pieces, Iterable):
        items = [(i, f"piece {i}", value) for i, value in enumerate(pieces)]
    else:
        raise BadInputError(
            "pieces", f"a {type(pieces).__name__} is not a set of pieces; give a folder, list or dict"
        )
    if not items:
        raise BadInputError("pieces", "there are none")
    return [_from_value(number or 0, name, value) for number, name, value in items]


def assign_roles_by_shape(
    pieces: Sequence[Piece], *, width: int | None = None, where: object = "pieces"
) -> PieceSet:
    """Tell the pieces apart by shape: input projections, output projections, the last layer.

    With ``n`` blocks of width ``d`` and hidden width ``h`` there are ``n`` pieces of ``h x d``, ``n`` of
    ``d x h`` and one of ``o x d``.

    Args:
        pieces: All of them.
        width: Number of input columns of the data; decides where shapes alone allow two readings.
        where: What errors are about.

    Raises:
        BadInputError: A piece is missing, too many, or of a shape that fits no network. Equal pieces are allowed
            (a block used twice) where the counts come out.
    """
    pieces, norms = _norms_apart(pieces)
    shapes = Counter(p.weight.shape for p in pieces)
    readings = [r for r in _readings(shapes) if width is None or len(_readings(shapes)) == 1 or r[0] == width]
    if not readings:
        raise BadInputError(where, _why_not(pieces, shapes) + _twins(pieces))
    d, h, last_shape = readings[0]
    last = next(p for p in pieces if p.weight.shape == last_shape)
    return _with_norms(_with_last(pieces, last, (h, d)), norms, where)


def sort_all(
    pieces: Sequence[Piece], *, width: int, outputs: int, where: object = "pieces"
) -> list[PieceSet]:
    """All ways to tell the pieces apart: one, or, where the last layer has a block's shape, one per such piece.

    A network whose outputs are as many as its hidden neurons (or, where all pieces are square, as its width) has a last
    layer that shape does not tell from an input projection; only the data can.

    Raises:
        BadInputError: As :func:`assign_roles_by_shape`.
    """
    every = pieces
    pieces, norms = _norms_apart(every)
    shapes = Counter(p.weight.shape for p in pieces)
    inner, outer = (outputs, width), (width, outputs)
    only_these = len(pieces) > 2 and len(pieces) % 2 == 1 and set(shapes) == {inner, outer}
    if only_these and (inner == outer or shapes[inner] == shapes[outer] + 1):
        piece_sets = [_with_last(pieces, last, inner) for last in pieces if last.weight.shape == inner]
        return [_with_norms(piece_set, norms, where) for piece_set in piece_sets]
    return [assign_roles_by_shape(every, width=width, where=where)]


def _norms_apart(pieces: Sequence[Piece]) -> tuple[list[Piece], list[Piece]]:
    """Linear layers, and norms."""
    return [p for p in pieces if not p.norm], [p for p in pieces if p.norm]


def _with_norms(piece_set: PieceSet, norms: Sequence[Piece], where: object) -> PieceSet:
    """The set with its norms: as many as blocks, one more, or a single one."""
    if not norms:
        return piece_set
    odd = next((p for p in norms if len(p.weight) != piece_set.width), None)
    if odd is not None:
        raise BadInputError(
            where,
            f"{odd.name} is a vector of {len(odd.weight)}, the network is {piece_set.width} wide: no norm of it",
        )
    if len(norms) not in (1, piece_set.blocks, piece_set.blocks + 1):
        raise BadInputError(
            where,
            f"{len(norms)} norms for {piece_set.blocks} blocks: expected one before each block, one before the last "
            "layer, or both; a norm is missing or one too many",
        )
    # LayerNorm is the rule; RMSNorm has no bias, and its weights are tried where no norm has one
    return replace(piece_set, norms=tuple(norms), centred=any(p.biased for p in norms))


def _with_last(pieces: Sequence[Piece], last: Piece, shape: tuple[int, int]) -> PieceSet:
    """The set with a given last layer and input projections of a given shape."""
    inner, outer = (
        tuple(p for p in pieces if p is not last and p.weight.shape == side) for side in (shape, shape[::-1])
    )
    return PieceSet(inner, outer, last)


def _readings(shapes: Counter[tuple[int, ...]]) -> list[tuple[int, int, tuple[int, ...]]]:
    """Every (width, hidden, last layer's shape) that accounts for all pieces."""
    readings = []
    for last in [s for s, count in shapes.items() if count == 1]:
        counts = {s: c for s, c in shapes.items() if s != last}
        d = last[1]
        if len(counts) == 1:
            ((shape, count),) = counts.items()
            if shape == (d, d) and count % 2 == 0:
                readings.append((d, d, last))
        elif len(counts) == 2:
            (shape_a, count), (shape_b, other) = counts.items()
            if shape_a == shape_b[::-1] and count == other and d in shape_a:
                h = shape_a[0] if shape_a[1] == d else shape_a[1]
                readings.append((d, h, last))
    return readings


def _why_not(pieces: Sequence[Piece], shapes: Counter[tuple[int, ...]]) -> str:
    """The most likely thing wrong with a set of shapes that makes no network."""
    listed = ", ".join(f"{count} of {r}x{c}" for (r, c), count in shapes.most_common(6))
    if not pieces:
        return "there are norms only, and no linear layer"
    (rows, cols), count = shapes.most_common(1)[0]
    others = [p for p in pieces if p.weight.shape not in ((rows, cols), (cols, rows))]
    odd = next((p for p in others if p.weight.shape[1] not in (rows, cols)), None)
    if odd is not None:
        shape = "x".join(map(str, odd.weight.shape))
        return f"{odd.name} has the wrong shape {shape}; the pieces are {listed}"
    if not others:
        return f"no last layer (outputs x width) among the pieces: {listed}"
    if rows == cols:
        return f"an odd number of {rows}x{cols} pieces, or several last layers: {listed}"
    return (
        f"{count} pieces of {rows}x{cols} but {shapes[cols, rows]} of {cols}x{rows}, or several last layers: a piece "
        f"is missing or one too many; the pieces are {listed}"
    )


def _twins(pieces: Sequence[Piece]) -> str:
    """What to add to a message where a piece is there twice: likely the reason."""
    first_piece: dict[bytes, Piece] = {}
    for piece in pieces:
        key = str(piece.weight.shape).encode() + piece.weight.tobytes() + piece.bias.tobytes()
        if key in first_piece:
            return f"; {piece.name} is a duplicate of {first_piece[key].name}: remove one"
        first_piece[key] = piece
    return ""


def _numbers(folder: Path, files: Sequence[Path]) -> list[int]:
    numbers_or_none = [_as_number(file.stem) for file in files]
    if any(number is None for number in numbers_or_none):
        return list(range(len(files)))
    numbers = [number for number in numbers_or_none if number is not None]
    by_number: dict[int, Path] = {}
    for number, file in zip(numbers, files, strict=True):
        if number in by_number:
            raise BadInputError(folder, f"duplicate piece {number}: {by_number[number].name} and {file.name}")
        by_number[number] = file
    first = min(numbers) if min(numbers) in (0, 1) else 0
    missing = sorted(set(range(first, max(numbers) + 1)) - set(numbers))
    if missing and max(numbers) < 10 * len(numbers):
        listed = ", ".join(map(str, missing[:5])) + (", ..." if len(missing) > 5 else "")
        raise BadInputError(folder, f"missing piece {listed} (of {first} to {max(numbers)})")
    return numbers


def _as_number(name: object) -> int | None:
    if isinstance(name, int | np.integer):
        return int(name)
    digits = re.findall(r"\d+", str(name))
    return int(digits[-1]) if digits else None


def _read(number: int, file: Path) -> Piece:
    from strati.io.network import open as open_network

    network = open_network(file)
    arrays = {tensor.name: network.read(tensor.name) for tensor in network.tensors}
    return _from_arrays(number, file.name, file, arrays)


def _from_value(number: int, name: str, value: Any) -> Piece:
    if isinstance(value, Piece):
        return value
    if isinstance(value, Mapping):
        return _from_arrays(number, name, name, {str(k): _array(v) for k, v in value.items()})
    if isinstance(value, tuple | list) and len(value) == 2 and getattr(value[0], "ndim", 0) in (1, 2):
        return _from_arrays(number, name, name, {"weight": _array(value[0]), "bias": _array(value[1])})
    return _from_arrays(number, name, name, {"weight": _array(value)})


def _from_arrays(number: int, name: str, what: object, arrays: Mapping[str, NDArray[Any]]) -> Piece:
    matrices = [k for k, v in arrays.items() if v.ndim == 2]
    vectors = [k for k, v in arrays.items() if v.ndim == 1]
    if not matrices and len(vectors) == len(arrays) and len(vectors) in (1, 2):
        return _norm(number, name, what, arrays)
    if len(matrices) != 1 or len(vectors) > 1 or len(arrays) > 2:
        held = ", ".join(f"{k} {tuple(v.shape)}" for k, v in list(arrays.items())[:4]) or "nothing"
        raise BadInputError(what, f"is not one linear layer (a weight matrix and a bias): it holds {held}")
    weight = _numbers_only(what, "weight", arrays[matrices[0]])
    bias = _numbers_only(what, "bias", arrays[vectors[0]]) if vectors else np.zeros(len(weight), np.float32)
    if bias.shape != (len(weight),):
        raise BadInputError(what, f"its bias has {len(bias)} entries, its weight {len(weight)} rows")
    return Piece(number, name, weight, bias)


def _norm(number: int, name: str, what: object, arrays: Mapping[str, NDArray[Any]]) -> Piece:
    """A norm: a vector, or two of one length of which one is called a bias."""
    biases = [k for k in arrays if re.search(r"bias|beta|shift|offset", k.lower())]
    weights = [k for k in arrays if k not in biases]
    if len(weights) != 1 or (biases and arrays[biases[0]].shape != arrays[weights[0]].shape):
        held = ", ".join(f"{k} {tuple(v.shape)}" for k, v in arrays.items())
        raise BadInputError(
            what, f"is neither a linear layer nor a norm (weight and bias of one length): it holds {held}"
        )
    weight = _numbers_only(what, "weight", arrays[weights[0]])
    bias = _numbers_only(what, "bias", arrays[biases[0]]) if biases else np.zeros_like(weight)
    return Piece(number, name, weight, bias, bool(biases))


def _numbers_only(what: object, name: str, array: NDArray[Any]) -> NDArray[np.float32]:
    if array.dtype.kind in "cbOUS" or array.size == 0:
        raise BadInputError(
            what, f"its {name} is not a matrix of real numbers ({array.dtype}, shape {array.shape})"
        )
    plain = np.ascontiguousarray(array, dtype=np.float32)
    if not bool(np.isfinite(plain).all()):
        raise BadInputError(what, f"its {name} holds NaN or infinite values")
    return plain


def _array(value: Any) -> NDArray[Any]:
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    return np.asarray(value)


def by_likelihood(readings: Sequence[PieceSet], x: Floats, y: Floats, rows: int = 500) -> list[PieceSet]:
    """The readings, likeliest last layer first.

    Examples:
        >>> from strati.reassembly.residual.pieces import as_pieces, sort_all
        >>> rng = np.random.default_rng(0)
        >>> pieces = as_pieces([(rng.normal(size=s), np.zeros(s[0])) for s in [(5, 3), (3, 5), (5, 3)]])
        >>> x = rng.normal(size=(50, 3))
        >>> found = by_likelihood(sort_all(pieces, width=3, outputs=5), x, x @ pieces[2].weight.T)
        >>> found[0].last.name
        'piece 2'
    """
    step = max(1, len(x) // rows)
    inputs, outputs = x[::step].astype(np.float64), y[::step].astype(np.float64)
    return sorted(readings, key=lambda reading: _misfit(reading.last, inputs, outputs))


def _misfit(last: Piece, x: NDArray[np.float64], y: NDArray[np.float64]) -> tuple[bool, float]:
    weight, target = last.weight.astype(np.float64), y - last.bias.astype(np.float64)
    back = np.linalg.pinv(weight)
    size = float(np.square(target).mean()) or 1.0
    outside = float(np.square(target - target @ back.T @ weight.T).mean()) / size
    # the part of the input that the last layer sees, against the part of the stream that the outputs show
    visible_input, visible_stream = x @ weight.T @ back.T, target @ back.T
    alike = float((visible_input * visible_stream).sum()) / (
        float(np.linalg.norm(visible_input) * np.linalg.norm(visible_stream)) + 1e-300
    )
    return outside > 1e-8, -alike
