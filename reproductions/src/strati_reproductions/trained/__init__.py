"""Small networks that a study trains itself: ``network.source`` is ``mlp`` (or ``fcn``), ``resnet`` or ``transformer``.

strati finds this module through the entry points ``strati.networks``.
"""

from __future__ import annotations

from strati_reproductions.trained.networks import build, initialise
from strati_reproductions.trained.training import train

__all__ = ["build", "initialise", "train"]
