"""The summary of a comparison: the answer in words, the most important number, the table of layers.

A merged LoRA is claimed only where everything speaks for it: the layers that changed have updates of one and the same
rank (or of one rank for each role), and everything else (other layers, embeddings, biases, norms) changed by no more
than rounding. A layer whose update lies below the dtype's step is no evidence: where there is one, no LoRA is claimed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.comparison.matching import bare_names
from strati.core.display import printable
from strati.io.roles import place_of

if TYPE_CHECKING:
    from strati.comparison.results import ComparedLayer, Comparison, LossLine

_INCOMPLETE = 0.03  # of what the parents differ by; a merge of the parents leaves nothing beyond rounding
_UNRELATED = 1.5  # a parent as far away as the others leaves less than what they differ by
_LONGEST_ANSWER = 100
_NAMES = 3  # names that a sentence lists

_SHORT_ROLES = {
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


def lines(result: Comparison) -> list[str]:
    """Everything in words: the answer, then one line for each kind of number."""
    shown = result.series is not None or result.related is False
    return [*headline(result), *filter(None, [] if shown else [_spectra_text(result)])]


def headline(result: Comparison) -> list[str]:
    """The lines above the table: the answer, the most important number, and what a reader must know besides."""
    if result.series is not None:
        return _series_lines(result)
    answer_line = mixture_text(result) if is_merge(result) else answer(result)
    if result.related is False:
        return [line for line in (answer_line, _path_text(result), _spectra_text(result)) if line]
    notes = [_path_text(result), _interference_text(result), _pattern_text(result), _intruder_text(result)]
    notes += [_aligned_text(result), _rounding_text(result), _stand_out_text(result)]
    return [line for line in [answer_line, _size_text(result), *notes] if line]


def is_merge(result: Comparison) -> bool:
    """Whether the weights of parents were asked for."""
    return any(layer.mixture is not None for layer in result.layers)


def answer(result: Comparison) -> str:
    """The kind of the change as a whole, in at most 100 characters."""
    judged = [layer for layer in result.layers if layer.update_kind is not None]
    kinds = Counter(layer.update_kind for layer in judged)
    if result.related is False:
        return "The networks are unrelated: no layer resembles its partner more than chance allows."
    if not judged:
        return "No layer of one network can be subtracted from its partner in the other."
    if len(result.networks) == 2 and any(layer.interference is not None for layer in result.layers):
        return adapters_text(result)
    moved = result.movement
    vectors = moved.vectors_moved if moved is not None else 0
    if kinds["untouched"] == len(judged):
        if moved is None or moved.shared == 0:
            return f"The weights of all {len(judged)} layers are the same."
        if moved.moved == 0:
            other = " in one order" if any(layer.aligned for layer in result.layers) else ""
            return f"Nothing changed: all {moved.shared} shared tensors are identical{other}."
        return f"No layer changed, but {moved.moved} biases, norms or other tensors did."
    if set(kinds) <= {"untouched", "rounding"}:
        same = "The weights are the same up to rounding: one network is the other in another dtype."
        return same + (f" But {vectors} biases or norms changed by more." if vectors else "")
    if result.removed_direction:
        return f"One direction was projected out of {result.removed_direction} layers (abliteration); this is no LoRA."
    return merged_lora(result) or _kinds_text(judged, kinds)


def _kinds_text(judged: list[ComparedLayer], kinds: Counter[str | None]) -> str:
    changed = {kind: n for kind, n in kinds.items() if kind not in ("untouched", "rounding")}
    total = sum(changed.values())
    if len(judged) == 1:
        layers = "The one layer"
    else:
        layers = f"All {total} layers" if total == len(judged) else f"{total} of {len(judged)} layers"
    patterns = {layer.pattern for layer in judged if layer.update_kind in changed}
    if patterns == {"zeros"}:
        return f"{layers} were pruned: entries became zero."
    if patterns == {"grid"}:
        return f"{layers} were rounded to a grid: these are dequantised integers."
    if set(changed) == {"dense"}:
        return f"{layers} changed in all directions (dense): this is not an adapter."
    if set(changed) == {"undecided"}:
        return (
            f"{layers} changed, by less than the dtype resolves. "
            "Whether the updates are low-rank or dense is undecided."
        )
    counts = ", ".join(f"{n} {kind}" for kind, n in sorted(changed.items(), key=lambda x: -x[1]))
    text = f"{layers} changed: {counts}."
    if "undecided" in changed:
        text += " Undecided: changed by less than the dtype resolves."
    return text


def merged_lora(result: Comparison) -> str:
    """The sentence "this fine-tune is a merged LoRA of rank 16 on q and v", or nothing."""
    changed = [layer for layer in result.layers if layer.update_kind not in ("untouched", "rounding", None)]
    if len(changed) < 2 or any(layer.update_kind != "low-rank" for layer in changed):
        return ""
    vectors = result.movement.vectors_moved if result.movement is not None else 0
    if vectors or any(layer.update_kind is None for layer in result.layers):
        return ""
    groups = _by_rank(changed)
    if not groups:
        return ""
    places = " and ".join(f"rank {rank} on {_where(group, result.layers)}" for rank, group in groups.items())
    text = f"This fine-tune is a merged LoRA of {places}."
    return text if len(text) <= _LONGEST_ANSWER else f"This fine-tune is a merged LoRA. It is of {places}."


def _by_rank(changed: list[ComparedLayer]) -> dict[int, list[ComparedLayer]]:
    """The layers by their update's rank, the largest first; empty where no adapter has such ranks.

    One rank for all, or (``rank_pattern``) one for each role, of two layers or more: that a single layer's update has
    some rank is no evidence.
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
        return listed([layer.name for layer in changed], "layers")
    order = list(_SHORT_ROLES)
    words = [
        _SHORT_ROLES.get(r, r)
        for r in sorted(roles, key=lambda r: order.index(r) if r in order else len(order))
    ]
    text = words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
    every = [layer for layer in layers if layer.role in roles]
    return text if len(every) == len(changed) else f"{text} ({len(changed)} of {len(every)} such layers)"


def listed(names: Sequence[str], noun: str = "") -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - _NAMES} more {noun}".rstrip() if len(names) > _NAMES else ""
    return ", ".join(printable(name, 60) for name in names[:_NAMES]) + more


def adapters_text(result: Comparison) -> str:
    """Two adapters: whether they write the same directions."""
    pairs = [x.interference for x in result.layers if x.interference is not None]
    overlap, chance, cosine = (
        float(np.median([getattr(x, name) for x in pairs]))
        for name in ("written_overlap", "by_chance", "cosine")
    )
    return (
        f"{len(pairs)} layers: median cosine {cosine:.2f}; the directions they write overlap by {overlap:.2f} "
        f"(by chance {chance:.2f})."
    )


def _interference_text(result: Comparison) -> str:
    """Several updates of one base: which layers a merge would damage."""
    pairs = {x.name: x.interference for x in result.layers if x.interference is not None}
    if not pairs or len(result.networks) == 2:
        return ""
    cosines = [x.cosine for x in pairs.values()]
    conflicts = [x.sign_conflicts for x in pairs.values() if x.sign_conflicts is not None]
    opposed = [name for name, x in pairs.items() if x.opposed]
    numbers = f"Cosines of the updates: {min(cosines):.2f} to {max(cosines):.2f}"
    if conflicts:
        numbers += f"; sign conflicts {min(conflicts):.0%} to {max(conflicts):.0%} (50% by chance)"
    if opposed:
        return (
            f"A merge would damage {listed(opposed, 'layers')}: their updates oppose each other. {numbers}."
        )
    return f"No layer's updates oppose each other, so a merge would not cancel them. {numbers}."


def mixture_text(result: Comparison) -> str:
    """The merge as a mixture: the median weights over the layers, and how well they explain it."""
    mixtures = [
        x.mixture for x in result.layers if x.mixture is not None and x.mixture.weights[0] is not None
    ]
    if not mixtures:
        return "No layer shows how the merge was made: the parents do not differ, or their shapes do."
    weights_by_layer = np.array([m.weights for m in mixtures], np.float64)
    weights, spread = np.median(weights_by_layer, axis=0), float(np.ptp(weights_by_layer, axis=0).max())
    residuals = [m.residual or 0.0 for m in mixtures]
    terms = [f"{'-' if w < 0 else '+'} {abs(w):.3f} x network {n}" for n, w in enumerate(weights)]
    formula = " ".join(terms).removeprefix("+ ")
    same = "in every layer" if spread < 0.02 else f"in the median layer (weights vary by up to {spread:.2f})"
    typical = float(np.median(residuals))
    hidden = float(np.median([m.hidden or 0.0 for m in mixtures]))
    left = f"{typical:.0%} of what they differ by is left unexplained in the median layer"
    if typical > _UNRELATED:
        return f"The last network is not a mixture of the others: {left}."
    if typical > _INCOMPLETE:
        return f"The networks given do not explain the merge; is a parent missing? {left}; nearest: {formula} {same}."
    if hidden > _INCOMPLETE:
        return (
            f"The merge agrees with {formula} {same}. A further parent cannot be excluded: rounding hides "
            f"{hidden:.0%} of what the parents differ by."
        )
    most = f"At most {max(residuals):.2%} of what the parents differ by is left unexplained"
    return f"The merge is {formula} {same}. {most}."


def _path_text(result: Comparison) -> str:
    """The barrier on the straight line between the networks, as stored and aligned."""
    if result.path is None:
        return ""
    path = result.path

    def barrier(line: LossLine) -> str:
        return f"{line.barrier:.3g} ± {line.barrier_stderr:.2g}"

    text = (
        f"Barrier of the {path.loss_name.replace('_', '-')} on the straight line between them ({path.rows:,} rows): "
        f"{barrier(path.stored)} at {path.stored.barrier_at:.1f}"
    )
    if path.aligned is not None:
        text += f"; with their units in one order {barrier(path.aligned)}"
    return f"{text}. Loss at the ends: {path.stored.loss[0]:.3g} and {path.stored.loss[-1]:.3g}."


def _size_text(result: Comparison) -> str:
    """How many tensors differ, and the range and median of the relative changes of the layers that did."""
    movement = result.movement
    if movement is None or movement.shared == 0:
        shared = f"The networks share no tensor of the same name and shape; layers are matched by {result.matched_by}."
    elif movement.moved == 0:
        return ""
    else:
        shared = f"{movement.moved} of {movement.shared} shared tensors differ"
        few = len(movement.untouched) <= _NAMES
        shared += f" (all but {listed(movement.untouched)})." if movement.untouched and few else "."
    sizes = [layer.relative_change for layer in result.layers if layer.relative_change]
    if not sizes:
        return shared
    if len(sizes) == 1:
        name = next(layer.name for layer in result.layers if layer.relative_change)
        return f"{shared} One layer changed: {printable(name, 60)} by {percent(sizes[0])} of its norm."
    low, high = percent(min(sizes), 2), percent(max(sizes), 2)
    median = percent(float(np.median(sizes)), 2)
    return f"{shared} Relative change of {len(sizes)} layers: {low} to {high}, median {median}."


def _pattern_text(result: Comparison) -> str:
    """Changes that have a name: zeros, grids, few entries."""
    texts = []
    for pattern, sentence in (
        ("zeros", "{share} of the entries of {n} layers became zero (median)"),
        ("grid", "the entries of {n} layers lie on a grid: dequantised integers"),
        ("sparse", "only {share} of the entries of {n} layers changed (median)"),
    ):
        layers = [layer for layer in result.layers if layer.pattern == pattern]
        shares = [layer.pattern_share for layer in layers if layer.pattern_share is not None]
        if layers:
            share = percent(float(np.median(shares)), 2) if shares else ""
            texts.append(sentence.format(n=len(layers), share=share))
    text = "; ".join(texts)
    return f"{text[:1].upper()}{text[1:]}." if text else ""


def _intruder_text(result: Comparison) -> str:
    layers = [layer for layer in result.layers if layer.intruders]
    if not layers:
        return ""
    most = max(layers, key=lambda layer: len(layer.intruders))
    return (
        f"{len(layers)} layers have leading directions without a partner in the first network (intruder dimensions), "
        f"up to {len(most.intruders)} in {printable(most.name, 60)}."
    )


def _aligned_text(result: Comparison) -> str:
    """What the two networks store differently, and what was undone before the weights were subtracted."""
    ways = Counter(word for x in result.layers if x.aligned for word in x.aligned.split(", "))
    vectors = result.movement.vectors if result.movement is not None else ()
    of_vectors = Counter(v.aligned for v in vectors if v.aligned is not None and v.aligned not in ways)
    if not ways and not of_vectors:
        return ""
    parts = [f"{word} in {n} layer{'s' if n > 1 else ''}" for word, n in ways.most_common()]
    parts += [f"{word} in {n} vector{'s' if n > 1 else ''}" for word, n in of_vectors.most_common()]
    extra = [f.text for x in result.layers for f in x.warnings if f.code == "vocabulary-resized"]
    sentences = [f"Undone before comparing: {', '.join(parts)}."]
    return " ".join([*sentences, *(f"{text[:1].upper()}{text[1:]}." for text in extra[:1])])


def _rounding_text(result: Comparison) -> str:
    """Quantised layers: how their error compares with what the step predicts, and which are worse."""
    ratios = [x.rounding.ratio for x in result.layers if x.rounding is not None]
    if not ratios:
        return ""
    worse = sorted(
        (
            (x.rounding.ratio, x.name)
            for x in result.layers
            if x.rounding and any(flag.code == "rounded-worse" for flag in x.warnings)
        ),
        reverse=True,
    )
    text = f"Rounding error against what the step predicts: median {np.median(ratios):.2f} times."
    if worse:
        text += (
            f" Rounded worse than predicted: {listed([f'{name} ({ratio:.2f})' for ratio, name in worse])}."
        )
    return text


def _spectra_text(result: Comparison) -> str:
    distances = [layer.spectral_distance for layer in result.layers if layer.spectral_distance is not None]
    changed: Counter[str] = Counter()
    for layer in result.layers:
        states = layer.metrics.get("state", ())
        if len(states) > 1 and states[0] != states[-1]:
            changed[f"{state_name(states[0])} to {state_name(states[-1])}"] += 1
    text = f"Spectra differ by {np.median(distances):.3g} in log-eigenvalue (median)" if distances else ""
    if changed:
        text += "; states changed in " + ", ".join(
            f"{n} layer{'s' if n > 1 else ''} ({what})" for what, n in changed.most_common(3)
        )
    elif text:
        text += "; no layer changed its state"
    return text + "." if text else ""


def _stand_out_text(result: Comparison) -> str:
    unusual = [x for x in result.stand_out if x.pvalue < 0.05]
    if not unusual:
        return ""
    texts = [
        f"{printable(x.layer, 60)} ({percent(x.relative_change)}, expected {percent(x.expected)}, p {x.pvalue:.1g})"
        for x in unusual[:_NAMES]
    ]
    return f"Layers that changed unlike the others of their role: {'; '.join(texts)}."


def _series_lines(result: Comparison) -> list[str]:
    series = result.series
    assert series is not None
    parts = [f"{len(series.labels)} checkpoints, {len(series.layers)} layers."]
    for layer in series.layers:
        name, last = printable(layer.name, 60), layer.phase[-1]
        phases = [phase for phase in layer.phase if phase is not None]
        if last is None:
            state = f"was last {phases[-1]}; its last phase is not known" if phases else "has no known phase"
        elif layer.leaves_random_like is None:
            state = "ends random-like"
        elif "random-like" not in phases:
            state = "never is random-like"
        else:
            state = f"leaves random-like at {printable(series.labels[layer.leaves_random_like], 60)}"
        parts.append(f"{name} {state}.")
    more = [f"({len(parts) - 9} more layers in the table.)"] if len(parts) > 9 else []
    return [parts[0], " ".join([*parts[1:9], *more])]


def percent(share: float | None, digits: int = 3) -> str:
    """A share in percent, to some significant digits.

    Examples:
        >>> [percent(x) for x in (1.88254, 0.0123456, 1.5e-7, 0.0, None)]
        ['188%', '1.23%', '0.000015%', '0%', '-']
    """
    if share is None:
        return "-"
    return f"{np.format_float_positional(100 * share, precision=digits, fractional=False, trim='-')}%"


def short_names(names: Sequence[str]) -> list[str]:
    """Names from the block number on, without wrappers and ``.weight``, where they stay different.

    Examples:
        >>> short_names(["bert.encoder.layer.0.output.dense.weight", "bert.pooler.dense.weight"])
        ['0.output.dense', 'pooler.dense']
    """
    bare = [name.removesuffix(".weight") for name in bare_names(names)]
    short = []
    for name in bare:
        number = place_of(name).number
        _, block, tail = name.partition(f".{number}.") if number is not None else ("", "", name)
        short.append(f"{block}{tail}".lstrip("."))
    return short if len(set(short)) == len(set(names)) else bare


def state_name(state: Any) -> str:
    """A layer's state in words."""
    return "too small" if state == "too-small" else "-" if state is None else str(state)
