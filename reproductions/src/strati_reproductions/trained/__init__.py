"""Small networks that a study trains itself: ``network.source`` is ``mlp`` (or ``fcn``), ``resnet`` or ``transformer``.

strati finds this module through the entry points ``strati.networks`` and calls ``read_training``.
"""

from __future__ import annotations

from strati_reproductions.trained.spec import read_training

__all__ = ["read_training"]
