"""Which piece has which role: told, or by shape, or, where shapes do not tell, by the weights.

A matrix as wide as high may read the stream (q, k, v) or write it (out): on its stream side its Gram matrix is
like those of
the matrices whose side is known (up, gate, down, the embedding). q and k share their heads' rows, v and out
theirs, so that
units tell k from v; q from k is left to norms and, with data, to the loss. Vectors of one length are told apart by what
is known of their size: norm weights lie around one, biases around nought.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from strati.reassembly.transformer.role_table import Roles
from strati.reassembly.transformer.untold import guess_roles

if TYPE_CHECKING:
    from strati.reassembly.transformer.calibration import Prior
    from strati.reassembly.transformer.pieces import TransformerPieces


def find_roles(pieces: TransformerPieces, prior: Prior) -> Roles:
    """The role of every piece."""
    blueprint = pieces.blueprint
    open_ = [n for n in pieces.arrays if n not in pieces.told]
    if open_:
        return guess_roles(pieces, prior)
    block = {slot.role: pieces.candidates[slot.role] for slot in blueprint.block}
    whole = {slot.role: pieces.candidates[slot.role][0] for slot in blueprint.whole}
    return Roles(block, whole)
