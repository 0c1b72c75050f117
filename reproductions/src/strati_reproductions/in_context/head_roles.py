"""``reproduce head-roles``: what the heads of ``in-context`` do, from their weights and from susceptibilities.

The roles are those that the attention shows (previous token, induction, other). Two questions are asked of other
measurements. Is the head that attends to the previous token also the one with the largest previous-token share by
``strati scan --heads``, which sees the weights alone? Do heads with a role differ from the others in their
susceptibilities (Baker et al. 2025) to text whose second half repeats the first, against the same text without
repetition?

The contrast of a head is the difference of its susceptibilities to both kinds of rows over their sum. The rule was
fixed before the run: heads with a role are separated if all their contrasts lie on one side of all others, by more
than two errors. The contrasts' errors count those of both susceptibilities as independent.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from strati.core.files import write_atomic
from strati.core.results import Tick
from strati.landscape.influence.influence import influence
from strati.spectra.scan import scan
from strati_reproductions.checkpointed_training import save, step_of
from strati_reproductions.in_context.model import ROTARY_BASE
from strati_reproductions.in_context.refined import head_kinds
from strati_reproductions.in_context.stages import (
    FULL,
    GAMMA,
    QUICK,
    Size,
    load_into,
    measure,
    split_text,
    train,
)
from strati_reproductions.pictures import drawn, panels
from strati_reproductions.pictures import save as save_figure
from strati_reproductions.registry import Reproduction, Row
from strati_reproductions.rows import Fact

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strati_reproductions.in_context.model import AttentionOnly

_GROUPS = ("repeated text", "unrepeated text")
_CHAINS = 4


@dataclass(frozen=True)
class Susceptibility:
    """A head's susceptibilities to repeated and unrepeated text, with their errors."""

    repeated: float
    repeated_error: float
    unrepeated: float
    unrepeated_error: float

    @property
    def contrast(self) -> tuple[float, float]:
        """The difference over the sum, and its error.

        Examples:
            >>> contrast, error = Susceptibility(3.0, 0.1, 1.0, 0.1).contrast
            >>> round(contrast, 3), round(error, 4)
            (0.5, 0.0395)
        """
        total = self.repeated + self.unrepeated
        slopes = 2 * self.unrepeated / total**2, 2 * self.repeated / total**2
        error = np.hypot(slopes[0] * self.repeated_error, slopes[1] * self.unrepeated_error)
        return (self.repeated - self.unrepeated) / total, float(error)


def head_roles(*, quick: bool, seed: int, folder: Path, tick: Tick) -> Reproduction:
    """Compare the heads' roles by their attention with those by weights and by susceptibilities."""
    size, draws = (QUICK, 100) if quick else (FULL, 600)
    home = folder.parent / "in-context"
    model, paths = train(size, seed, home, tick)
    _, held_out = split_text(size, home)
    load_into(model, paths[-1])
    kinds = head_kinds(measure(model, held_out, size, step_of(paths[-1])))
    attention = previous_token_attention(model, held_out)
    weights = previous_token_weights(model, folder / "model")
    tick("weights")
    heads = _susceptibilities(model, held_out, size, draws, seed)
    rows = [
        *_weight_rows(attention, weights, kinds),
        *_susceptibility_rows(heads, kinds),
    ]
    captions = {
        "heads": "left: share of attention to the previous token, measured on held-out text against that from the "
        "weights alone, one mark per head. Right: contrast of the susceptibilities to repeated and unrepeated text, "
        "with two errors."
    }
    figures = drawn(_draw, attention, weights, heads, kinds, folder)
    title = "Roles of attention heads from weights and from susceptibilities (Baker et al. 2025)"
    return Reproduction("head-roles", title, tuple(rows), figures, captions=captions)


@torch.no_grad()
def previous_token_attention(model: AttentionOnly, held_out: NDArray[np.int64]) -> dict[str, float]:
    """The mean attention of every head to the previous token, on text."""
    scores = {}
    for layer, pattern in enumerate(model.attention(torch.from_numpy(held_out[:, :-1]))):
        for head, share in enumerate(pattern.diagonal(-1, -2, -1).mean((0, 2)).tolist()):
            scores[f"{layer}.{head}"] = float(share)
    return scores


def previous_token_weights(model: AttentionOnly, folder: Path) -> dict[str, tuple[float, int]]:
    """The distance that positions favour by the weights of every head, and its share; ``strati scan`` reads a file."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"num_attention_heads": model.num_attention_heads, "rope_theta": ROTARY_BASE}
    write_atomic(folder / "config.json", json.dumps(settings) + "\n")
    save(model, folder / "model.safetensors")
    rows = scan(folder, heads=True).to_dict()["layers"]
    return {
        f"{row['block']}.{row['head']}": (row["positional"], row["positional_offset"])
        for row in rows
        if row["kind"] == "head.qk"
    }


def _susceptibilities(
    model: AttentionOnly, held_out: NDArray[np.int64], size: Size, draws: int, seed: int
) -> dict[str, Susceptibility | None]:
    """Of every head, to rows of text and to rows whose second half repeats the first."""
    half = size.context // 2
    repeated = np.concatenate([held_out[:, :half], held_out[:, : half + 1]], 1)
    rows = torch.from_numpy(np.concatenate([repeated, held_out]))
    labels = [_GROUPS[0]] * len(held_out) + [_GROUPS[1]] * len(held_out)
    estimate = influence(
        model,
        "cross_entropy",
        (rows[:, :-1], rows[:, 1:]),
        kind="susceptibility",
        parts="heads",
        groups=labels,
        nbeta=size.nbeta,
        gamma=GAMMA,
        chains=_CHAINS,
        draws=draws,
        batch=size.windows,
        sampler="sgld",
        seed=seed,
    )
    columns = [estimate.rows.index(group) for group in _GROUPS]
    heads: dict[str, Susceptibility | None] = {}
    for name, values, errors in zip(estimate.labels, estimate.values, estimate.stderr, strict=True):
        first, second = columns
        numbers = [values[first], errors[first], values[second], errors[second]]
        finite = bool(np.isfinite(numbers).all())
        heads[str(name).removeprefix("head ")] = Susceptibility(*map(float, numbers)) if finite else None
    return heads


def _weight_rows(
    attention: dict[str, float], weights: dict[str, tuple[float, int]], kinds: dict[str, str]
) -> list[Row]:
    rows = []
    for head, kind in kinds.items():
        share, distance = weights[head]
        note = f"attention on held-out text to the previous token {attention[head]:.2f}"
        what = f"head {head} ({kind}): distance that its weights favour, and its share"
        rows.append(Row(what, None, f"{distance}, {share:.2f}", note))
    by_weights = {head: share if distance == 1 else 0.0 for head, (share, distance) in weights.items()}
    first, second = (max(scores, key=lambda head: scores[head]) for scores in (attention, by_weights))
    facts: dict[str, Fact] = {"same": first == second, "attention": first, "weights": second}
    what = "head with the largest previous-token share by its weights is that with the largest by attention"
    note = f"{second} by weights ({by_weights[second]:.2f}), {first} by attention ({attention[first]:.2f})"
    ours = "yes" if first == second else "no"
    return [*rows, Row(what, None, ours, note, key="previous-by-weights", facts=facts)]


def _susceptibility_rows(heads: dict[str, Susceptibility | None], kinds: dict[str, str]) -> list[Row]:
    rows = []
    contrasts: dict[str, tuple[float, float]] = {}
    for head, kind in kinds.items():
        estimate = heads.get(head)
        what = f"head {head} ({kind}): contrast of susceptibilities to repeated and unrepeated text"
        if estimate is None:
            rows.append(Row(what, None, None, "refused: the chains have not mixed"))
            continue
        contrasts[head] = estimate.contrast
        note = (
            f"repeated {estimate.repeated:.3g} +- {estimate.repeated_error:.1g}, "
            f"unrepeated {estimate.unrepeated:.3g} +- {estimate.unrepeated_error:.1g}"
        )
        rows.append(Row(what, None, contrasts[head][0], note, error=contrasts[head][1]))
    return [*rows, separation(contrasts, kinds)]


def separation(contrasts: dict[str, tuple[float, float]], kinds: dict[str, str]) -> Row:
    """Whether heads with a role lie on one side of all others by more than two errors, and how often they do.

    Examples:
        >>> kinds = {"0.0": "previous token", "1.0": "induction", "1.1": "other"}
        >>> separation({"0.0": (0.5, 0.01), "1.0": (0.6, 0.01), "1.1": (0.1, 0.01)}, kinds).ours
        'yes'
        >>> separation({"0.0": (0.5, 0.01), "1.0": (0.0, 0.01), "1.1": (0.1, 0.01)}, kinds).ours
        'no'
    """
    with_role = [contrast for head, contrast in contrasts.items() if kinds[head] != "other"]
    others = [contrast for head, contrast in contrasts.items() if kinds[head] == "other"]
    what = "susceptibilities separate heads with a role from the others"
    facts: dict[str, Fact] = {"roles": len(with_role), "others": len(others), "separate": None}
    if not with_role or not others:
        return Row(what, "yes", "not tested", "one of the two sets is empty", key="separation", facts=facts)
    gaps = np.array([[a - b for b, _ in others] for a, _ in with_role])
    errors = np.array([[np.hypot(e, f) for _, f in others] for _, e in with_role])
    sides = [bool((sign * gaps > 2 * errors).all()) for sign in (1, -1)]
    above = float((gaps > 0).mean())
    facts |= {"separate": any(sides), "above": above}
    note = (
        f"{len(with_role)} heads with a role, {len(others)} others; {above:.0%} of the pairs have the larger "
    )
    note += "contrast at the head with a role"
    return Row(what, "yes", "yes" if any(sides) else "no", note, key="separation", facts=facts)


def _draw(
    attention: dict[str, float],
    weights: dict[str, tuple[float, int]],
    heads: dict[str, Susceptibility | None],
    kinds: dict[str, str],
    folder: Path,
) -> tuple[str, ...]:
    figure, axes = panels(2, columns=2, title="heads of the in-context model")
    left: Any = axes[0]
    for kind in dict.fromkeys(kinds.values()):
        of_kind = [head for head in kinds if kinds[head] == kind]
        shares = [weights[h][0] if weights[h][1] == 1 else 0.0 for h in of_kind]
        left.plot(shares, [attention[h] for h in of_kind], "o", label=kind)
        places = [place for place, head in enumerate(kinds) if head in of_kind and heads[head] is not None]
        contrasts = [estimate.contrast for h in of_kind if (estimate := heads[h]) is not None]
        axes[1].errorbar(
            places, [c for c, _ in contrasts], yerr=[2 * e for _, e in contrasts], fmt="o", label=kind
        )
    left.set_xlabel("previous-token share, weights")
    left.set_ylabel("attention to the previous token")
    left.legend(frameon=False)
    axes[1].set_xticks(range(len(kinds)), list(kinds))
    axes[1].set_xlabel("head")
    axes[1].set_ylabel("contrast of susceptibilities")
    return save_figure(figure, folder, "heads")
