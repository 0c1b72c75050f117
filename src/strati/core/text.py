"""Names from strangers' files, made safe to show: one escape for terminals, one for HTML."""

from __future__ import annotations

import html
import re
import unicodedata

_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


def printable(text: str, limit: int = 160) -> str:
    r"""Escape what a terminal would act upon or hide, on one line, of bounded length.

    Control characters, bidirectional marks, zero-width characters and surrogates become ``\x..``,
    ``\u....`` or ``\U........`` escapes; what is longer than ``limit`` is cut in the middle.

    Examples:
        >>> printable("layer\x1b[31m\u202eevil")
        'layer\\x1b[31m\\u202eevil'
    """
    if len(text) > 4 * limit:
        text = text[: 2 * limit] + text[-2 * limit :]
    safe = "".join(_escape(c) if unicodedata.category(c) in _HIDDEN else c for c in text)
    if len(safe) > limit:
        keep = (limit - 3) // 2
        safe = f"{safe[:keep]}...{safe[-keep:]}"
    return safe


def visible(text: str) -> str:
    r"""Escape what a terminal would act upon or hide, whatever the length; line ends stay.

    Examples:
        >>> visible("one\x1b[31m\ntwo")
        'one\\x1b[31m\ntwo'
    """
    if text.isascii() and text.replace("\n", "").isprintable():
        return text
    return "".join(c if c == "\n" or unicodedata.category(c) not in _HIDDEN else _escape(c) for c in text)


def as_html(text: object) -> str:
    """Escape text for HTML, elements and attributes alike.

    Examples:
        >>> as_html("<b onclick='x'>")
        '&lt;b onclick=&#x27;x&#x27;&gt;'
    """
    return html.escape(printable(str(text), limit=2000), quote=True)


def _escape(character: str) -> str:
    code = ord(character)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def natural(text: str) -> tuple[tuple[int, int, str], ...]:
    """A key that sorts names as people do: numbers in them by their size.

    Examples:
        >>> sorted(["layer10", "layer2", "layer"], key=natural)
        ['layer', 'layer2', 'layer10']
    """
    pieces = re.split(r"([0-9]+)", text)
    return tuple((0, int(p), p) if p.isdecimal() else (1, 0, p) for p in pieces if p)
