"""Real data that lie beside the project and are not part of it: the puzzle, ResNet-20, TinyStories, WikiText."""

from __future__ import annotations

import os
from pathlib import Path

from strati.core.errors import BadInputError


def external_data(*parts: str) -> Path:
    """A file or folder of the data beside the project (``../shared/data``, or ``STRATI_DATA``).

    Raises:
        BadInputError: It is absent.
    """
    home = os.environ.get("STRATI_DATA")
    folder = Path(home) if home else Path(__file__).resolve().parents[4] / "shared" / "data"
    path = folder.joinpath(*parts)
    if not path.exists():
        raise BadInputError(
            "/".join(parts),
            "these data lie beside the project and are absent; set STRATI_DATA to their folder",
        )
    return path
