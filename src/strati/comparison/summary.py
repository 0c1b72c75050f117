"""A comparison in words: the answer first, then its numbers, then what a terminal shows of the layers.

A merged LoRA is claimed only where everything speaks for it: the layers that changed changed by updates of one and
the same rank (or of one for each role), and all else (other layers, embeddings, biases, norms) changed by no more than
rounding. A layer whose update lies below the dtype's step is evidence for nothing: where there is one, no LoRA is
claimed.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from strati.core.display import printable, without_shared_prefix

if TYPE_CHECKING:
    from rich.console import RenderableType

    from strati.comparison.results import ComparedLayer, Comparison, LossLine

_INCOMPLETE = 0.03  # of what the parents differ by; a merge of the parents leaves nothing beyond rounding
_UNRELATED = 1.5  # a parent as far away as the others leaves less than what they differ by
_LONGEST_ANSWER = 100

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


def lines(result: Comparison) -> list[str]:
    """The answer to "what changed, and where", then one line for each kind of number."""
    if result.series is not None:
        return _series_lines(result)
    parts = [mixture_text(result) if _is_merge(result) else answer(result)]
    changed = [layer for layer in result.layers if layer.relative_change]
    parts += [_path_text(result)]
    if result.related is False:
        parts += [_spectra_text(result)]
        return [part for part in parts if part]
    parts += [f"{_movement_text(result)} {_size_text(changed)}".strip()]
    parts += [_role_text(changed), _aligned_text(result), _rounding_text(result)]
    parts += [_directions_text(changed), _spectra_text(result), _stand_out_text(result)]
    return [part for part in parts if part]


def _is_merge(result: Comparison) -> bool:
    return any(layer.mixture is not None for layer in result.layers)


def answer(result: Comparison) -> str:
    """What kind of change this is as a whole: the first sentence of the summary."""
    judged = [layer for layer in result.layers if layer.update_kind is not None]
    kinds = Counter(layer.update_kind for layer in judged)
    if result.related is False:
        return "The networks are unrelated: no layer resembles its partner more than chance allows."
    if not judged:
        return "No layer of one network can be subtracted from its partner in the other."
    if any(layer.interference is not None for layer in result.layers):
        return interference_text(result)
    moved = result.movement
    vectors = moved.vectors_moved if moved is not None else 0
    if kinds["untouched"] == len(judged):
        if moved is None or moved.shared == 0:
            return f"The weights of all {len(judged)} layers are the same."
        if moved.moved == 0:
            other = " in one order" if any(layer.aligned for layer in result.layers) else ""
            return f"Nothing moved: all {moved.shared} shared tensors are identical{other}."
        return f"No layer changed, but {moved.moved} biases, norms or other tensors did."
    if set(kinds) <= {"untouched", "rounding"}:
        same = "The weights are the same up to rounding: one network is the other in another dtype."
        return same + (f" But {vectors} biases or norms changed by more." if vectors else "")
    return merged_lora(result) or _kinds_text(judged, kinds)


def _kinds_text(judged: list[ComparedLayer], kinds: Counter[str | None]) -> str:
    changed = {kind: n for kind, n in kinds.items() if kind not in ("untouched", "rounding")}
    total = sum(changed.values())
    if len(judged) == 1:
        many = "The one layer"
    else:
        many = f"All {total} layers" if total == len(judged) else f"{total} of {len(judged)} layers"
    if set(changed) == {"dense"}:
        return f"{many} changed in all directions (dense): this is not an adapter."
    if set(changed) == {"undecided"}:
        return (
            f"{many} changed, by less than the dtype resolves. "
            "Whether the updates are low-rank or dense is undecided."
        )
    counts = ", ".join(f"{n} {kind}" for kind, n in sorted(changed.items(), key=lambda x: -x[1]))
    text = f"{many} changed: {counts}."
    if "undecided" in changed:
        text += " Undecided: changed by less than the dtype resolves."
    return text


def merged_lora(result: Comparison) -> str:
    """The sentence "this fine-tune is a merged LoRA of rank 16 on q and v", or nothing."""
    changed = [layer for layer in result.layers if layer.update_kind not in ("untouched", "rounding", None)]
    if len(changed) < 2 or any(layer.update_kind != "low-rank" for layer in changed):
        return ""
    judged = [layer.update_kind is not None for layer in result.layers]
    vectors = result.movement.vectors_moved if result.movement is not None else 0
    if not all(judged) or vectors:
        return ""
    groups = _by_rank(changed)
    if not groups:
        return ""
    places = " and ".join(f"rank {rank} on {_where(group, result.layers)}" for rank, group in groups.items())
    text = f"This fine-tune is a merged LoRA of {places}."
    return text if len(text) <= _LONGEST_ANSWER else f"This fine-tune is a merged LoRA. It is of {places}."


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
        names = [printable(layer.name, 60) for layer in changed]
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
        f"{len(known)} layers: median cosine {cosine:.2f}; the directions they write overlap by {overlap:.2f} "
        f"(by chance {chance:.2f})."
    )


def mixture_text(result: Comparison) -> str:
    """The merge as a mixture: the median weights over the layers, and how well they explain it."""
    known = [x.mixture for x in result.layers if x.mixture is not None and x.mixture.weights[0] is not None]
    if not known:
        return "No layer shows how the merge was made: the parents do not differ, or their shapes do."
    weights_by_layer = np.array([m.weights for m in known], np.float64)
    weights, spread = np.median(weights_by_layer, axis=0), float(np.ptp(weights_by_layer, axis=0).max())
    residuals = [m.residual or 0.0 for m in known]
    terms = [f"{'-' if w < 0 else '+'} {abs(w):.3f} x network {n}" for n, w in enumerate(weights)]
    formula = " ".join(terms).removeprefix("+ ")
    same = "in every layer" if spread < 0.02 else f"in the median layer (weights vary by up to {spread:.2f})"
    typical = float(np.median(residuals))
    hidden = float(np.median([m.hidden or 0.0 for m in known]))
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


def _movement_text(result: Comparison) -> str:
    m = result.movement
    if m is None or m.shared == 0:
        return f"The networks share no tensor of the same name and shape; layers are matched by {result.matched_by}."
    if m.moved == 0:
        return ""
    names = ", ".join(printable(n, 60) for n in m.untouched[:3]) + (" ..." if len(m.untouched) > 3 else "")
    stayed = f"; untouched: {names}" if m.untouched else ""
    return f"{m.moved} of {m.shared} shared tensors moved{stayed}."


def _size_text(changed: list[ComparedLayer]) -> str:
    """Median, most and least over one and the same list of layers."""
    if not changed:
        return ""
    by_size = sorted(changed, key=lambda layer: -(layer.relative_change or 0.0))
    most, least = by_size[0], by_size[-1]
    names = printable(most.name, 60), printable(least.name, 60)
    if len(changed) == 1:
        return f"One layer moved: {names[0]} ({percent(most.relative_change)})."
    median = float(np.median([layer.relative_change or 0.0 for layer in changed]))
    return (
        f"Relative change of the {len(changed)} layers that moved: median {percent(median)}; "
        f"most: {names[0]} ({percent(most.relative_change)}); least: {names[1]} ({percent(least.relative_change)})."
    )


def percent(share: float | None) -> str:
    """A share in percent, three significant digits.

    Examples:
        >>> [percent(x) for x in (1.88254, 0.0123456, 1.5e-7, 0.0, None)]
        ['188%', '1.23%', '0.000015%', '0%', '-']
    """
    if share is None:
        return "-"
    digits = np.format_float_positional(100 * share, precision=3, fractional=False, trim="-")
    return f"{digits}%"


def _role_text(changed: list[ComparedLayer]) -> str:
    roles: dict[str, list[float]] = {}
    for layer in changed:
        roles.setdefault(layer.role, []).append(layer.relative_change or 0.0)
    if len(roles) < 2:
        return ""
    ranked = sorted(((float(np.median(v)), r) for r, v in roles.items()), reverse=True)
    return f"Median by role: {', '.join(f'{role} {percent(size)}' for size, role in ranked)}."


def _aligned_text(result: Comparison) -> str:
    """What the two networks store differently, and what was undone before the weights were subtracted."""
    ways = Counter(word for x in result.layers if x.aligned for word in x.aligned.split(", "))
    if not ways:
        return ""
    listed = ", ".join(f"{word} in {n} layer{'s' if n > 1 else ''}" for word, n in ways.most_common())
    extra = [f.text for x in result.layers for f in x.warnings if f.code == "vocabulary-resized"]
    return " ".join(
        [f"Undone before comparing: {listed}.", *(f"{text[:1].upper()}{text[1:]}." for text in extra[:1])]
    )


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
        listed = ", ".join(f"{printable(name, 60)} ({ratio:.2f})" for ratio, name in worse[:3])
        more = f" and {len(worse) - 3} more" if len(worse) > 3 else ""
        text += f" Rounded worse than predicted: {listed}{more}."
    return text


def _directions_text(changed: list[ComparedLayer]) -> str:
    ranks = [layer.update_stable_rank for layer in changed if layer.update_stable_rank is not None]
    overlaps = [layer.subspace_overlap for layer in changed if layer.subspace_overlap is not None]
    text = f"The updates have a median stable rank of {np.median(ranks):.1f}. " if ranks else ""
    if overlaps:
        chances = [layer.overlap_by_chance for layer in changed if layer.overlap_by_chance is not None]
        text += (
            f"The layers keep {np.median(overlaps):.0%} of their leading directions "
            f"(median; {np.median(chances):.0%} by chance; least {min(overlaps):.0%})."
        )
    return text.strip()


def _spectra_text(result: Comparison) -> str:
    distances = [layer.spectral_distance for layer in result.layers if layer.spectral_distance is not None]
    changed: Counter[str] = Counter()
    for layer in result.layers:
        states = layer.metrics.get("state", ())
        if len(states) > 1 and states[0] != states[-1]:
            changed[f"{_state(states[0])} to {_state(states[-1])}"] += 1
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
    listed = "; ".join(
        f"{printable(x.layer, 60)} ({percent(x.relative_change)}, expected {percent(x.expected)}, p {x.pvalue:.1g})"
        for x in unusual[:3]
    )
    return f"Layers that moved unlike the others of their role: {listed}."


def _series_lines(result: Comparison) -> list[str]:
    series = result.series
    assert series is not None
    parts = [f"{len(series.labels)} checkpoints, {len(series.layers)} layers."]
    for layer in series.layers:
        name, last = printable(layer.name, 60), layer.phase[-1]
        known = [phase for phase in layer.phase if phase is not None]
        if last is None:
            state = f"was last {known[-1]}; its last phase is not known" if known else "has no known phase"
        elif layer.leaves_random_like is None:
            state = "ends random-like"
        elif "random-like" not in known:
            state = "never is random-like"
        else:
            state = f"leaves random-like at {printable(series.labels[layer.leaves_random_like], 60)}"
        parts.append(f"{name} {state}.")
    more = [f"({len(parts) - 9} more layers in the table.)"] if len(parts) > 9 else []
    return [parts[0], " ".join([*parts[1:9], *more])]


def renderable(result: Comparison) -> RenderableType:
    """The sentences, the layers in a table, and the next command."""
    from rich.console import Group
    from rich.text import Text

    from strati.core.display import Column, NextCommand, table

    names = [name.removesuffix(".weight") for name in without_shared_prefix([x.name for x in result.layers])]
    cells: dict[Column, Callable[[ComparedLayer], str]] = {
        Column("changed", right=True, keep=True): lambda x: percent(x.relative_change),
        Column("update", keep=True): _update_cell,
        Column("same leading\ndirections", gives=1): _directions_cell,
        Column("state", gives=0, words=True): _state_cell,
    }
    if result.related is False:
        cells = dict(list(cells.items())[3:])
    others = without_shared_prefix([x.partner[-1] for x in result.layers])
    if [name.removesuffix(".weight") for name in others] != names:
        partners = dict(zip((x.name for x in result.layers), others, strict=True))
        cells[Column("partner", gives=2)] = lambda x: partners[x.name].removesuffix(".weight")
    if any(_note(x) for x in result.layers):
        cells[Column("note", gives=3, words=True)] = _note
    rows = [
        [name, *(cell(x) for cell in cells.values())] for name, x in zip(names, result.layers, strict=True)
    ]
    notes = []
    if result.unmatched:
        lost = [f"{printable(u.name, 60)} (network {u.network})" for u in result.unmatched[:6]]
        more = f", and {len(result.unmatched) - 6} more" if len(result.unmatched) > 6 else ""
        notes.append(f"without a partner: {', '.join(lost)}{more}")
    notes += [f"{flag.code}: {flag.text}" for flag in result.warnings]
    following = _next_command(result)
    return Group(
        *(Text(line) for line in result.lines()),
        table([Column("layer", keep=True), *cells], rows, notes=notes),
        *([NextCommand((following,))] if following else []),
    )


def _next_command(result: Comparison) -> str:
    """What to run after this; nothing where the networks are not files."""
    paths = [network.path for network in result.networks]
    if not all(Path(path).exists() for path in paths):
        return ""
    if result.related is False:
        return f"strati scan {shlex.quote(paths[-1])}"
    flag = "--series " if result.series is not None else "--merge " if _is_merge(result) else ""
    return f"strati compare {flag}{' '.join(map(shlex.quote, paths))} --html compare.html"


def _update_cell(layer: ComparedLayer) -> str:
    if layer.update_kind == "low-rank":
        return f"low-rank {layer.update_rank}"
    return layer.update_kind or "-"


def _directions_cell(layer: ComparedLayer) -> str:
    if layer.subspace_overlap is None or layer.overlap_by_chance is None:
        return "-"
    return f"{layer.subspace_overlap:.0%} (chance {layer.overlap_by_chance:.0%})"


def _state(state: Any) -> str:
    return "too small to tell" if state == "too-small" else "-" if state is None else str(state)


def _state_cell(layer: ComparedLayer) -> str:
    states = [_state(state) for state in layer.metrics.get("state", ())]
    if not states:
        return "-"
    return states[0] if states[0] == states[-1] else f"{states[0]} → {states[-1]}"


def _note(layer: ComparedLayer) -> str:
    """What was undone, how it was mixed or rounded, and the warnings that only the last network has."""
    parts = [layer.aligned] if layer.aligned else []
    if layer.mixture is not None and layer.mixture.weights[0] is not None:
        pairs = zip(layer.mixture.weights, layer.mixture.stderr, strict=True)
        parts.append(" ".join(f"{w:.3f}±{e:.2g}" for w, e in pairs if w is not None and e is not None))
    if layer.rounding is not None:
        parts.append(f"rounding {layer.rounding.ratio:.2f}")
    return " ".join([*parts, *layer.new_warnings])
