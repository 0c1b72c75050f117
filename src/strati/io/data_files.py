"""Data files: CSV with a header, ``.npz``, ``.npy``, text through a tokenizer, and folders of images, read strictly.

The format is detected from the content, not from the extension. Every defect has its own message: a ragged row, a word
among numbers, a missing value, a repeated column, other separators, an empty file. CSV is read by numpy, not by pandas,
which takes half a second to import and shifts columns silently on rows with one field too many.
"""

from __future__ import annotations

import csv
import fnmatch
import io
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.core.display import printable
from strati.core.errors import BadInputError, UnsupportedError
from strati.core.plugins import require
from strati.io.checkpoint_file import MappedFile
from strati.io.formats import numpy_file as npz

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from strati.core.results import FloatArray
    from strati.io.checkpoint_file import Tensor


TARGETS = ("y", "target", "targets", "label", "labels", "true", "pred", "prediction", "predictions")
"""Column names (also with a number behind: ``y_0``, ``pred1``) that are taken for outputs, not inputs."""

_DATA_NAME = re.compile(
    r"(?:(?:train|test|val|valid|validation)_)?"
    r"(?:x|y|inputs?|targets?|labels?|tokens?|input_ids|attention_mask|token_ids|images?|features?)"
    r"(?:_?(?:train|test|val|valid|validation))?",
    re.IGNORECASE,
)
"""Names of arrays of data: ``x``, ``y_test``, ``train_labels``."""

LARGEST = 1e100
"""Values beyond are refused: Gram matrices hold sums of their squares, and products of those."""

_NUMBERS = b"0123456789+-.eE,\n\r "
_LONGEST = 8 << 20  # bytes of a line: a hundred thousand columns of full precision fit
_FOREIGN = {
    b"version https://git-lfs": "is a Git-LFS pointer, not the data; fetch the file with: git lfs pull",
    b"PAR1": "is a Parquet file; save it as CSV or .npz",
    b"\x1f\x8b": "is gzip-compressed; unpack it first",
    b"\x89HDF": "is an HDF5 file; save the arrays as .npz",
}


@dataclass(frozen=True)
class DataTable:
    """Named columns of numbers. ``values`` is (rows, columns), finite."""

    columns: tuple[str, ...]
    values: FloatArray


@dataclass(frozen=True)
class Data:
    """Inputs ``x`` (rows first), outputs ``y`` if the file has any, and the names of the input columns.

    Arrays keep the type they are stored in (CSV: float64); ``y`` of a CSV has one dimension when it is one
    column, else two. ``columns`` is empty for unnamed arrays.
    """

    x: NDArray[Any]
    y: NDArray[Any] | None
    columns: tuple[str, ...] = ()


def refuse_as_model(path: Path, tensors: Sequence[Tensor]) -> None:
    """Refuse a numpy file that holds data (inputs and targets, or token ids) where a model is expected.

    Raises:
        BadInputError: Every array has the name of data, or there is one unnamed array and it holds integers.
    """
    names = [tensor.name for tensor in tensors]
    if names and all(_DATA_NAME.fullmatch(name) for name in names):
        listed = ", ".join(map(printable, names[:4]))
        raise BadInputError(
            path, f"holds data ({listed}), not a model; give the model first and this as its data"
        )
    if names == [path.stem] and tensors[0].dtype.startswith(("int", "uint")):
        raise BadInputError(
            path, "holds integers such as token ids, not a model; give the model first and this as its data"
        )


def read_data(
    path: str | Path, *, inputs: str | None = None, target: str | Sequence[str] | None = None
) -> Data:
    r"""Read inputs and, where there are any, outputs.

    Args:
        path: CSV with a header, ``.npz`` or ``.npy`` (inputs only).
        inputs: Columns (comma-separated names or patterns such as ``measurement_*``) or the array of an
            ``.npz``. Default: ``measurement_*`` if there are such columns, else every column that is not
            named like an output (:data:`TARGETS`); the array ``x``.
        target: Column or columns of the output, or the array. Several alternatives may be given, the first
            that is there is taken. Default: :data:`TARGETS` in that order, or no output at all.

    Raises:
        BadInputError: The file is broken, or a named column or array is not there.

    Examples:
        >>> import tempfile, pathlib
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder) / "d.csv"
        ...     _ = path.write_text("a,b,y\n1,2,3\n4,5,6\n")
        ...     data = read_data(path)
        >>> data.x.tolist(), data.y.tolist(), data.columns
        ([[1.0, 2.0], [4.0, 5.0]], [3.0, 6.0], ('a', 'b'))
    """
    source, arrays = _open(path)
    if not arrays:
        return _from_table(path, _parse(path, _text_of(source)), inputs, target)
    held = _arrays(source)
    if "" not in held:
        return _from_arrays(path, held, inputs, target)
    if inputs is not None or target is not None:
        raise BadInputError(
            path, "a .npy file holds one unnamed array; `inputs` and `target` need CSV or .npz"
        )
    return Data(_checked(path, "the array", held[""]), None)


def read_path(path: Path, model: Any = None) -> Any:
    """A data file or folder as arrays, or as a stream of rows; a text file through the model's tokenizer."""
    if path.is_dir():
        return read_images(path)
    if path.suffix.lower() == ".txt":
        config = getattr(model, "config", None)
        return read_text(path, getattr(config, "_name_or_path", None) or None)
    table = read_data(path)
    return table.x, table.y


def read_table(path: str | Path) -> DataTable:
    """Read a CSV file as named columns of numbers.

    Raises:
        BadInputError: The file is broken, or not CSV.
    """
    source, arrays = _open(path)
    if arrays:
        raise BadInputError(path, "holds arrays without column names; give CSV with a header")
    return _parse(path, _text_of(source))


def _open(path: str | Path) -> tuple[MappedFile, bool]:
    """The file, and whether it holds numpy arrays; anything that is neither these nor text is named."""
    source = MappedFile(path)
    head = source.head(64)
    for magic, why in _FOREIGN.items():
        if head.startswith(magic):
            raise BadInputError(path, why)
    return source, head.startswith((b"\x93NUMPY", b"PK\x03\x04", b"PK\x05\x06"))


# -- CSV ------------------------------------------------------------------------------------------------


def _text_of(source: MappedFile) -> bytes:
    """All of a file of lines. One without line ends would cost many times its size before it is refused."""
    for start in range(0, source.size - _LONGEST, _LONGEST):
        if b"\n" not in source.read(start, _LONGEST):
            raise BadInputError(
                source.path, f"has a line of over {_LONGEST >> 20} MB; no CSV, or its line ends are lost"
            )
    return source.head(source.size)


def _parse(path: str | Path, raw: bytes) -> DataTable:
    if not raw.strip():
        raise BadInputError(path, "empty file (only white space); expected CSV with a header, .npz or .npy")
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise BadInputError(path, "is UTF-16 text; save it as UTF-8 CSV")
    raw = raw.removeprefix(b"\xef\xbb\xbf")  # a byte-order mark would otherwise become part of the first name
    if b"\0" in raw[:65536]:
        raise BadInputError(
            path, "is a binary file of unknown kind; expected CSV with a header, .npz or .npy"
        )
    head, _, body = raw.partition(b"\n")
    columns = _header(path, head)
    if not body.strip():
        raise BadInputError(path, "has a header but no rows")
    lines = body.count(b"\n") + (not body.endswith(b"\n"))
    if not body.translate(None, _NUMBERS):
        try:
            values = np.loadtxt(io.BytesIO(body), delimiter=",", comments=None, ndmin=2)
        except ValueError:
            values = None  # some row is wrong: the slower reader below finds it
        if values is not None and values.shape == (lines, len(columns)) and bool(np.isfinite(values).all()):
            return DataTable(columns, values)
    return DataTable(columns, _careful(path, columns, body))


def _header(path: str | Path, head: bytes) -> tuple[str, ...]:
    try:
        text = head.decode("utf-8").rstrip("\r")
    except UnicodeDecodeError:
        raise BadInputError(path, "is not UTF-8 text; expected CSV with a header, .npz or .npy") from None
    columns = tuple(name.strip() for name in _fields(path, 1, text))
    for separator, name in ((";", "semicolons"), ("\t", "tabs"), ("|", "bars")):
        if len(columns) == 1 and separator in text:
            raise BadInputError(path, f"the columns are separated by {name}; save it with commas")
    if all(_is_number(name) for name in columns):
        raise BadInputError(
            path, "has no header: the first line is all numbers; name the columns in a first line"
        )
    empty = [str(i + 1) for i, name in enumerate(columns) if not name]
    if empty:
        raise BadInputError(path, f"column {', '.join(empty[:5])} of the header has no name")
    [(name, count)] = Counter(columns).most_common(1)
    if count > 1:
        raise BadInputError(path, f"column {name!r} is there more than once; rename or remove one")
    return columns


def _careful(path: str | Path, columns: tuple[str, ...], body: bytes) -> FloatArray:
    """Read row by row, so that an error names the line and the column of the first defect."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        broken = body[: error.start].count(b"\n") + 2
        raise BadInputError(path, f"line {broken} is not UTF-8 text; save the file as UTF-8") from None
    rows: list[list[float]] = []
    lines = text.rstrip("\r\n").split("\n")
    for number, line in enumerate(lines, start=2):
        cells = _fields(path, number, line.rstrip("\r"))
        if not cells or (len(cells) == 1 and not cells[0].strip() and len(columns) > 1):
            raise BadInputError(path, f"line {number} is empty; remove it")
        if len(cells) != len(columns):
            raise BadInputError(
                path, f"line {number} has {len(cells)} fields, the header has {len(columns)} (ragged row)"
            )
        rows.append([_number(path, number, name, cell) for name, cell in zip(columns, cells, strict=True)])
    return np.array(rows, dtype=np.float64)


def _fields(path: str | Path, line: int, text: str) -> list[str]:
    try:
        return next(csv.reader([text], strict=True), [])
    except csv.Error as error:
        raise BadInputError(path, f"line {line} is not CSV ({error})") from None


def _number(path: str | Path, line: int, column: str, cell: str) -> float:
    where = f"line {line}, column {column!r}"
    if not cell.strip():
        raise BadInputError(path, f"{where}: missing value (an empty field); fill it or drop the row")
    if not _is_number(cell):
        raise BadInputError(path, f"{where}: {cell.strip()!r} is not a number")
    number = float(cell)
    if not np.isfinite(number):
        raise BadInputError(path, f"{where}: {cell.strip()} is not a finite number; fill it or drop the row")
    return number


def _is_number(text: str) -> bool:
    # Python's float takes 1_000 and the digits of any script; CSV does not.
    if "_" in text or not text.isascii():
        return False
    try:
        float(text)
    except ValueError:
        return False
    return True


# -- which columns --------------------------------------------------------------------------------------


def _from_table(
    path: str | Path, table: DataTable, inputs: str | None, target: str | Sequence[str] | None
) -> Data:
    names = table.columns
    y_names = _target_columns(path, names, target)
    if inputs is not None:
        x_names = _select(path, names, inputs)
    else:
        x_names = [n for n in names if n.startswith("measurement_")] or [
            n for n in names if not _output_like(n)
        ]
        x_names = _by_number([n for n in x_names if n not in y_names])
    if not x_names:
        raise BadInputError(path, "no input columns are left beside the target; name them in `inputs`")
    both = sorted(set(x_names) & set(y_names))
    if both:
        raise BadInputError(path, f"column {both[0]!r} is named both as input and as target")
    where = {name: i for i, name in enumerate(names)}
    x = table.values[:, [where[n] for n in x_names]]
    y = table.values[:, [where[n] for n in y_names]] if y_names else None
    if y is not None and y.shape[1] == 1:
        y = y[:, 0]
    return Data(x, y, tuple(x_names))


def _target_columns(path: str | Path, names: Sequence[str], target: str | Sequence[str] | None) -> list[str]:
    if isinstance(target, str):
        return _select(path, names, target)
    for name in TARGETS if target is None else target:
        exact = [n for n in names if n.lower() == name.lower()]
        numbered = _by_number(
            [n for n in names if re.fullmatch(rf"{re.escape(name)}_?\d+", n, re.IGNORECASE)]
        )
        if exact or numbered:
            return exact or numbered
    if target is None:
        return []
    raise BadInputError(path, f"has no target column ({' or '.join(target)}); name it in `target`")


def _select(path: str | Path, names: Sequence[str], patterns: str) -> list[str]:
    selected: list[str] = []
    for pattern in (part.strip() for part in patterns.split(",")):
        matches = [n for n in names if n == pattern] or _by_number(fnmatch.filter(names, pattern))
        if not matches:
            raise BadInputError(path, f"no column {pattern!r}; there are: {_some(names)}")
        selected += [n for n in matches if n not in selected]
    return selected


def _output_like(name: str) -> bool:
    return re.sub(r"_?\d+$", "", name.lower()) in TARGETS


def _by_number(names: list[str]) -> list[str]:
    """Columns ``prefix1, prefix2, ...`` by their number, whatever their order; else as they are."""
    parts = [re.fullmatch(r"(.*?)(\d+)", n) for n in names]
    if len({p[1] for p in parts if p}) == 1 and all(parts):
        return sorted(names, key=lambda n: int(re.fullmatch(r".*?(\d+)", n)[1]))  # type: ignore[index]
    return names


def _some(names: Iterable[str], limit: int = 12) -> str:
    listed = list(names)
    return ", ".join(listed[:limit]) + (f", ... ({len(listed)} in all)" if len(listed) > limit else "")


# -- arrays ---------------------------------------------------------------------------------------------


def _from_arrays(
    path: str | Path, arrays: dict[str, NDArray[Any]], inputs: str | None, target: str | Sequence[str] | None
) -> Data:
    x_name = inputs or "x"
    if x_name not in arrays:
        raise BadInputError(path, f"has no array {x_name!r}; there are: {_some(arrays)}; name it in `inputs`")
    alternatives = (target,) if isinstance(target, str) else tuple(target or TARGETS)
    y_name = next((name for name in alternatives if name in arrays), None)
    if y_name is None and target is not None:
        raise BadInputError(
            path, f"has no array {' or '.join(alternatives)}; there are: {_some(arrays)}; name it in `target`"
        )
    x = _checked(path, x_name, arrays[x_name])
    y = None if y_name is None else _checked(path, y_name, arrays[y_name])
    if y is not None and len(x) != len(y):
        raise BadInputError(
            path, f"{x_name} has {len(x)} rows and {y_name} has {len(y)}; they must belong together"
        )
    return Data(x, y)


def _checked(path: str | Path, name: str, array: NDArray[Any]) -> NDArray[Any]:
    if array.dtype.kind not in "fiu":
        raise UnsupportedError(path, f"{name} holds {array.dtype}, not numbers")
    if array.ndim == 0 or array.size == 0:
        raise BadInputError(path, f"{name} is empty (shape {array.shape})")
    if array.dtype.kind == "f" and not bool(np.isfinite(array).all()):
        row = int(np.argwhere(~np.isfinite(array))[0][0])
        raise BadInputError(
            path, f"{name} holds NaN or infinite values (first in row {row}); fill or drop them"
        )
    return array


def _arrays(source: MappedFile) -> dict[str, NDArray[Any]]:
    """The arrays of an ``.npz``, or the one of an ``.npy`` under the name ``""``."""
    contents = npz.contents(source)
    if contents.unread and not contents.tensors:
        raise UnsupportedError(
            source.path, f"{contents.unread[0].name}: {contents.unread[0].reason}; save plain numbers"
        )
    single = source.head(6) == b"\x93NUMPY"
    # copies, so that nothing points into the file when its handle goes
    return {"" if single else t.name: np.array(contents.read(t.name)) for t in contents.tensors}


_IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp")


def read_text(path: str | Path, tokenizer: str | Path | None) -> NDArray[Any]:
    """The token numbers of a text file, in one line, by a model's own tokenizer.

    Args:
        path: A text in UTF-8.
        tokenizer: The model's folder (or its name in the local Hugging Face cache); nothing is downloaded.

    Raises:
        BadInputError: The file is not text, or there is no tokenizer.
    """
    raw = MappedFile(path)
    try:
        text = raw.head(raw.size).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInputError(path, f"is not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    if tokenizer is None:
        raise BadInputError(path, "is text, and the model has no tokenizer; give token numbers as .npy")
    transformers = require("transformers", "transformers", "reading text through a tokenizer")
    try:
        encoder = transformers.AutoTokenizer.from_pretrained(str(tokenizer), local_files_only=True)
    except (OSError, ValueError, ImportError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise BadInputError(
            path, f"is text, and {tokenizer} has no tokenizer ({reason}); give token numbers as .npy"
        ) from None
    return np.asarray(encoder(text, verbose=False)["input_ids"], dtype=np.int64)


def as_windows(tokens: NDArray[Any], context: int) -> NDArray[Any]:
    """Token numbers in one line, cut into windows; what does not fill the last one is left out.

    Raises:
        BadInputError: Fewer than one window, or windows of fewer than two tokens.

    Examples:
        >>> as_windows(np.arange(7), 3).tolist()
        [[0, 1, 2], [3, 4, 5]]
    """
    if context < 2:
        raise BadInputError("context", f"is {context}; a window needs two tokens or more")
    count = len(tokens) // context
    if count == 0:
        raise BadInputError(
            "data", f"has {len(tokens)} tokens, not one window of {context}; give more tokens"
        )
    return np.asarray(tokens[: count * context].reshape(count, context), dtype=np.int64)


class ImageFolder:
    """Images in folders, one folder per class, read one at a time: ``folder[i]`` is (pixels, class number).

    Pixels are float32 from 0 to 1, channels first. Classes are numbered in the order of their names.

    Attributes:
        classes: The names of the classes.
    """

    def __init__(self, path: Path) -> None:
        self.classes = tuple(
            sorted(p.name for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))
        )
        if not self.classes:
            raise BadInputError(path, "is a folder without folders; images lie in one folder per class")
        self._files = [
            (file, number)
            for number, name in enumerate(self.classes)
            for file in sorted((path / name).iterdir())
            if file.suffix.lower() in _IMAGES
        ]
        if not self._files:
            raise BadInputError(path, f"holds no images ({', '.join(_IMAGES)})")
        self._image = require("PIL.Image", "images", "reading images")
        self._shape: tuple[int, ...] | None = None

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[NDArray[np.float32], int]:
        """Pixels (channels, height, width) and class of one image.

        Raises:
            BadInputError: It cannot be read, or has another size than those before it.
        """
        file, number = self._files[index]
        try:
            with self._image.open(file) as picture:
                grey = picture.mode in ("1", "L", "I;16")
                pixels = np.asarray(picture.convert("L" if grey else "RGB"), dtype=np.float32) / 255
        except (OSError, ValueError, SyntaxError, self._image.DecompressionBombError) as error:
            raise BadInputError(file, f"is not a readable image ({type(error).__name__})") from None
        array = pixels[None] if pixels.ndim == 2 else np.moveaxis(pixels, -1, 0)
        self._shape = self._shape or array.shape
        if array.shape != self._shape:
            raise BadInputError(file, f"has shape {array.shape}, others {self._shape}; resize them alike")
        return np.ascontiguousarray(array), number


def read_images(path: str | Path) -> ImageFolder:
    """A folder of images by class, as a data set that reads one at a time.

    Raises:
        BadInputError: There are no folders, or no images in them.
    """
    return ImageFolder(Path(path))
