"""Data that are not tables: text as token numbers, and folders of images by class, read one at a time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.core.errors import BadInputError, require
from strati.io.checkpoint_file import MappedFile

if TYPE_CHECKING:
    from numpy.typing import NDArray

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
