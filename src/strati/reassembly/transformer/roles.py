"""Which piece has which role: told, or by shape, or, where shapes do not tell, by the weights.

How the weights tell: :mod:`~strati.reassembly.transformer.untold` (matrices), ``asymmetry`` (which of two is which) and
``vector_roles``, beside it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from strati.reassembly.transformer.role_table import Roles
from strati.reassembly.transformer.untold import guess_roles

if TYPE_CHECKING:
    from strati.reassembly.transformer.calibration import Prior
    from strati.reassembly.transformer.fold import Folded


def find_roles(bare: Folded, prior: Prior) -> Roles:
    """The role of every piece."""
    pieces = bare.pieces
    blueprint = pieces.blueprint
    open_ = [n for n in pieces.arrays if n not in pieces.told]
    if open_:
        return guess_roles(bare, prior)
    block = {slot.role: pieces.candidates[slot.role] for slot in blueprint.block}
    whole = {slot.role: pieces.candidates[slot.role][0] for slot in blueprint.whole}
    return Roles(block, whole)
