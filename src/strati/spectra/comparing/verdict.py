"""What a comparison comes to in one sentence: a merged LoRA, a conversion, a merge of parents.

A merged LoRA is claimed only where everything speaks for it: the layers that changed changed by updates of one and
the same rank (or of one for each role), and all else (other layers, embeddings, biases, norms) changed by no more than
rounding.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from strati.spectra.comparing.results import ComparedLayer, Comparison

_UNEXPLAINED = 0.5  # unrelated networks leave all of a layer, merges of any kind but little

_SHORT = {
    "attention.q": "q",
    "attention.k": "k",
    "attention.v": "v",
    "attention.qkv": "the fused qkv",
    "attention.out": "the attention output",
    "mlp.in": "the MLP input",
    "mlp.gate": "the MLP gate",
    "mlp.out": "the MLP output",
    "embedding": "the embedding",
    "head": "the head",
}


def verdict_of(result: Comparison) -> str:
    """What kind of change this is as a whole; empty where nothing simple can be said."""
    judged = [layer for layer in result.layers if layer.update_kind is not None]
    kinds = Counter(layer.update_kind for layer in judged)
    if not judged:
        return ""
    if kinds["untouched"] == len(judged):
        named = result.movement is not None and result.movement.shared > 0
        return "" if named else f"The weights of all {len(judged)} layers are the same."
    if any(layer.interference is not None for layer in result.layers):
        return interference_text(result)
    if not kinds["dense"] and not kinds["low-rank"]:
        return "The weights are the same up to rounding: one network is the other in another dtype."
    lora = merged_lora(result)
    if lora:
        return lora
    told = ", ".join(f"{n} {kind}" for kind, n in kinds.most_common())
    return f"Updates of the {len(judged)} layers: {told}."


def merged_lora(result: Comparison) -> str:
    """The sentence "this fine-tune is a merged LoRA of rank 16 on q and v", or nothing."""
    changed = [layer for layer in result.layers if layer.update_kind in ("low-rank", "dense")]
    if len(changed) < 2 or any(layer.update_kind == "dense" for layer in changed):
        return ""
    judged = [layer.update_kind is not None for layer in result.layers]
    vectors = result.movement.vectors_moved if result.movement is not None else 0
    if not all(judged) or vectors:
        return ""
    groups = _by_rank(changed)
    places = [f"rank {rank} on {_where(group, result.layers)}" for rank, group in groups.items()]
    return f"This fine-tune is a merged LoRA of {' and '.join(places)}." if places else ""


def _by_rank(changed: list[ComparedLayer]) -> dict[int, list[ComparedLayer]]:
    """The layers by their update's rank, the largest first; empty where the ranks are none that an adapter has.

    One rank for all, or (``rank_pattern``) one for each role, of two layers or more: that a single layer's update has
    some rank says nothing.
    """
    groups: dict[int, list[ComparedLayer]] = {}
    for layer in changed:
        groups.setdefault(layer.update_rank or 0, []).append(layer)
    roles = Counter(layer.role for layer in changed)
    pairs = {(layer.role, layer.update_rank) for layer in changed}
    if len(groups) > 1 and (len(pairs) > len(roles) or min(roles.values()) < 2):
        return {}
    return dict(sorted(groups.items(), reverse=True))


def _where(changed: list[ComparedLayer], layers: tuple[ComparedLayer, ...]) -> str:
    roles = list(dict.fromkeys(layer.role for layer in changed))
    if set(roles) <= {"linear", "conv"}:
        names = [layer.name for layer in changed]
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more layers" if len(names) > 3 else "")
    order = list(_SHORT)
    words = [
        _SHORT.get(r, r) for r in sorted(roles, key=lambda r: order.index(r) if r in order else len(order))
    ]
    text = words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
    whole = [layer for layer in layers if layer.role in roles]
    return text if len(whole) == len(changed) else f"{text} ({len(changed)} of {len(whole)} such layers)"


def interference_text(result: Comparison) -> str:
    """Two adapters: whether they write the same directions."""
    known = [x.interference for x in result.layers if x.interference is not None]
    if not known:
        return ""
    overlap, chance, cosine = (
        float(np.median([getattr(x, name) for x in known]))
        for name in ("written_overlap", "by_chance", "cosine")
    )
    return (
        f"The adapters' updates of {len(known)} layers: median cosine {cosine:.2f}; the directions they write overlap "
        f"by {overlap:.2f} (median; {chance:.2f} by chance)."
    )


def mixture_text(result: Comparison) -> str:
    """The merge as a mixture: the median weights over the layers, and how well they explain it."""
    known = [x.mixture for x in result.layers if x.mixture is not None and x.mixture.weights[0] is not None]
    if not known:
        return "No layer tells how the merge was made: the parents do not differ, or their shapes do."
    table = np.array([m.weights for m in known], np.float64)
    weights, spread = np.median(table, axis=0), float(np.ptp(table, axis=0).max())
    residual = max(m.residual or 0.0 for m in known)
    typical = float(np.median([m.residual or 0.0 for m in known]))
    if typical > _UNEXPLAINED:
        left = f"{typical:.0%} of the median layer is left unexplained"
        return f"The last network is not a mixture of the others: {left}."
    terms = [f"{'-' if w < 0 else '+'} {abs(w):.3f} x network {n}" for n, w in enumerate(weights)]
    told = " ".join(terms).removeprefix("+ ")
    same = "in every layer" if spread < 0.02 else f"in the median layer (weights vary by up to {spread:.2f})"
    return f"The merge is {told} {same}; at most {residual:.2%} of a layer is left unexplained."
