"""Griffe extension of the docs build: roles such as ``:func:`` in docstrings are shown as plain code."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:func|class|data|mod|meth|attr|exc):(?=`)")


class PlainRoles(griffe.Extension):
    """Remove the roles of other documentation tools."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of one object."""
        if obj.docstring is not None:
            obj.docstring.value = _ROLE.sub("", obj.docstring.value).replace("`~", "`")
