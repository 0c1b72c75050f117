"""Keep the tracked pictures small: `python tools/pictures.py` re-encodes every PNG under docs/ that a palette shrinks.

A picture is replaced only if 256 colours change no channel by more than a few levels on average, which the eye does not
see in plots, and only if it gets a tenth smaller. ``tests/test_release.py`` limits the size of all tracked files.
"""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image

DOCS = Path(__file__).resolve().parents[1] / "docs"
COLOURS = 256
VISIBLE = 1.5
"""Largest mean change of a channel, in levels of 255."""


def small(png: bytes) -> bytes:
    """The same picture with a palette where that is invisible and smaller, otherwise unchanged."""
    picture = Image.open(io.BytesIO(png))
    if picture.mode == "P":
        return png
    full = picture.convert("RGB")
    if picture.mode in ("RGBA", "LA") and np.asarray(picture.getchannel("A")).min() < 255:
        return png
    palette = full.quantize(COLOURS, dither=Image.Dither.NONE)
    change = np.abs(np.asarray(full, float) - np.asarray(palette.convert("RGB"), float)).mean()
    encoded = io.BytesIO()
    palette.save(encoded, "PNG", optimize=True)
    return encoded.getvalue() if change <= VISIBLE and encoded.tell() < 0.9 * len(png) else png


def main() -> None:
    """Re-encode the pictures in place and print what was saved."""
    saved = 0
    for path in sorted(DOCS.rglob("*.png")):
        before = path.read_bytes()
        after = small(before)
        if after != before:
            path.write_bytes(after)
            saved += len(before) - len(after)
    print(f"{saved / 1000:.0f} kB saved")


if __name__ == "__main__":
    main()
