"""What the papers claim, one line each, and whether it holds here: decided from the rows of the reproductions.

A claim names the reproduction that tests it and a rule that reads its rows. The rule, not a hand, writes "held" or
"not held" into the table on top of the docs' page, so that a new run can change it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Rows = Sequence[Mapping[str, Any]]

ROBUST = "robust-and-critical-layers"
SPECTRA = "top-down-eigenspectra"
DEGENERACY = "degeneracy-in-the-loss-landscape"
DROPPED = "dropped-neural-net"
GROKKING, STAGES, ASKED = "Nanda et al. 2023", "Hoogland et al. 2024", "asked here"
"""Not of the four papers: what people follow runs for."""


@dataclass(frozen=True)
class Claim:
    """A statement of a paper.

    Attributes:
        paper: Its short name.
        says: The statement.
        rely: What a reader may do with it where it held here.
        otherwise: The same where it did not; ``rely`` again where that is empty.
        entry: The reproduction that tests it; ``None`` where nothing here can.
        rule: From its rows, whether it holds; ``None`` where they do not say.
    """

    paper: str
    says: str
    rely: str
    entry: str | None = None
    rule: Callable[[Rows], bool | None] = lambda rows: None
    otherwise: str = ""

    def advice(self, verdict: str) -> str:
        """The line for a reader, given the verdict."""
        return self.otherwise or self.rely if verdict == "not held" else self.rely

    def verdict(self, rows: Rows | None) -> str:
        """``held``, ``not held``, ``not run`` (no full run is stored) or ``not testable here``.

        Examples:
            >>> CLAIMS[1].verdict([{"what": "share with alpha in [2, 6]", "ours": 0.17}])
            'held'
            >>> CLAIMS[1].verdict(None)
            'not run'
        """
        if self.entry is None:
            return "not testable here"
        found = None if rows is None else self.rule(rows)
        return "not run" if found is None else "held" if found else "not held"


def numbers(rows: Rows, start: str, end: str = "", field: str = "ours") -> list[float]:
    """The numbers of the rows whose name begins and ends so.

    Examples:
        >>> numbers([{"what": "alpha of FC1", "ours": 4.8}, {"what": "beta", "ours": 1}], "alpha")
        [4.8]
    """
    found = [row[field] for row in rows if row["what"].startswith(start) and row["what"].endswith(end)]
    return [float(v) for v in found if isinstance(v, int | float)]


def _all(rows: Rows, start: str, end: str, test: Callable[[float], bool]) -> bool | None:
    found = numbers(rows, start, end)
    return all(test(v) for v in found) if found else None


def _only_the_first_loses_much(rows: Rows) -> bool | None:
    """Whether the first layer alone is not robust: the paper's word for it is critical, but it gives no bounds."""
    mark = "figure 2: accuracy after reinitialise of FC"
    classes = {row["what"][len(mark)]: row["note"] for row in rows if row["what"].startswith(mark)}
    if not classes:
        return None
    return all(note.startswith("robust") != (layer == "1") for layer, note in classes.items())


def _spectra_stay(rows: Rows) -> bool | None:
    """Whether alpha and the spectra move by less than 0.5 at every weight decay up to 10."""
    found = [
        _all(rows, f"weight decay {decay}:", what, lambda v: v < 0.5)
        for decay in ("0.1", "1", "10")
        for what in (": median change of alpha", ": median distance of spectra (log-eigenvalue)")
    ]
    return None if None in found else all(found)


def _answers(rows: Rows, part: str) -> bool | None:
    """Whether all rows that ask this answer yes."""
    found = [row["ours"] for row in rows if part in row["what"]]
    return all(value == "yes" for value in found) if found else None


def _removal_changes_nothing(rows: Rows) -> bool | None:
    intact, changed = numbers(rows, "loss, intact"), numbers(rows, "loss without the quasi-null")
    return abs(changed[0] - intact[0]) < 0.01 if intact and changed else None


def _no_pretrained_alpha(rows: Rows, of: str = "", but: str | None = None) -> bool | None:
    """Whether the mean correlation of alpha over layers is below 0.2, in the networks named so and not so."""
    end = ": alpha, mean Spearman over layers"
    found = [
        row["ours"]
        for row in rows
        if row["what"].endswith(end) and of in row["what"] and (but is None or but not in row["what"])
    ]
    return all(abs(float(rho)) < 0.2 for rho in found) if found else None


def _sparser_than(rows: Rows, other: str) -> bool | None:
    """Whether the interaction basis needs fewer edges than another one on every network."""
    edges: dict[str, dict[str, float]] = {}
    for row in rows:
        if row["what"].endswith(": edges for 99 % of the interaction"):
            network, kind = row["what"].removesuffix(": edges for 99 % of the interaction").rsplit(", ", 1)
            edges.setdefault(network, {})[kind] = float(row["ours"])
    return all(found["interaction"] < found[other] for found in edges.values()) if edges else None


def _behavioural_is_no_lower(rows: Rows) -> bool | None:
    training = numbers(rows, "2.2.1 lambda of the training loss")
    behavioural = numbers(rows, "2.2.1 lambda of the behavioural loss", "loss")
    return behavioural[0] >= training[0] - 0.05 if training and behavioural else None


def _every(rows: Rows, start: str) -> bool | None:
    """Whether rows such as "50 of 50" are all complete."""
    found = [
        row["ours"].split(" of ")
        for row in rows
        if row["what"].startswith(start) and " of " in str(row["ours"])
    ]
    return all(a == b for a, b in found) if found else None


def _all_agree(rows: Rows, start: str) -> bool | None:
    found = [row["agrees"] for row in rows if row["what"].startswith(start) and row.get("agrees")]
    return all(value == "yes" for value in found) if found else None


def _changes_with_the_scale(rows: Rows) -> bool | None:
    """Whether the coefficients at the smallest and the largest scale are the paper's, and surely differ."""
    ends = [row for row in rows if row["what"].startswith("2.2.2 lambda(") and row["paper"] is not None]
    if len(ends) != 2:
        return None
    apart = abs(ends[0]["ours"] - ends[1]["ours"])
    return apart > 5 * math.hypot(*(row["error"] for row in ends)) and all(r["agrees"] == "yes" for r in ends)


def _only_decay_generalises(rows: Rows) -> bool | None:
    """Whether every run with weight decay generalises and the one without is wrong more often than right."""
    with_decay = [row["ours"] for row in rows if row["what"] == "runs with weight decay that generalise"]
    without = [row["ours"] for row in rows if row["what"].startswith("test accuracy without weight decay")]
    return with_decay[0] == "all" and float(without[0].rstrip("%")) < 50 if with_decay and without else None


def _in_every_seed(rows: Rows, start: str) -> bool | None:
    """Whether a row such as "5 of 5 seeds" says all of them."""
    found = [
        row["ours"].removesuffix(" seeds").split(" of ") for row in rows if row["what"].startswith(start)
    ]
    return all(a == b != "0" for a, b in found) if found else None


_LEVEL = re.compile(r"(\S+) \+- (\S+) at step")


def _coefficient_falls(rows: Rows) -> bool | None:
    """Whether the learning coefficient ends below its peak by more than five errors, in every run with weight decay."""
    found = [
        [(float(value), float(error)) for value, error in _LEVEL.findall(row["ours"])]
        for row in rows
        if row["what"].startswith("seed ") and row["what"].endswith("at its peak and at the end")
    ]
    if not found or not all(len(levels) == 2 for levels in found):
        return None
    return all(peak[0] - end[0] > 5 * math.hypot(peak[1], end[1]) for peak, end in found)


def _stages_in_order(rows: Rows) -> bool | None:
    """Whether all stages appear, none before the one that it is said to follow."""
    found = [row["ours"] for row in rows if row["what"].startswith("stage ")]
    if not found:
        return None
    steps = [float(text.removeprefix("step ")) for text in found if text.startswith("step ")]
    return len(steps) == len(found) and steps == sorted(steps)


def _larger_is(rows: Rows, part: str) -> bool | None:
    """Whether the larger network's value is smaller in attention and in MLP layers, beyond chance."""
    found = [row["note"] for row in rows if part in row["what"]]
    sure = [float(note.split("p = ")[1].split(",")[0]) < 0.05 for note in found]
    return all(n.startswith("smaller") for n in found) and all(sure) if found else None


def _pairs_are_separated(rows: Rows) -> bool | None:
    matched = numbers(rows, "diagonal dominance of pairs, least")
    rest = numbers(rows, "of what is not a pair, greatest")
    return matched[0] > rest[0] if matched and rest else None


CLAIMS: tuple[Claim, ...] = (
    Claim(ROBUST, "Alpha does not predict accuracy when a layer is re-initialised or re-randomised (figure 2)",
          "Yes: do not judge a layer by its alpha.", "fcn-mnist",
          lambda r: _all(r, "figure 2, right: alpha, mean Spearman", "", lambda v: abs(v) < 0.2)),
    Claim(ROBUST, "Untrained layers can have the alpha of a well-trained one (figure 2, left)",
          "Yes: read alpha beside the warning `noise-like`.", "alpha-of-random-layers",
          lambda r: _all(r, "share with alpha in [2, 6]", "", lambda v: v > 0.01)),
    Claim(ROBUST, "Re-initialised, only the first layer is critical (figure 2)",
          "For such networks (between robust and critical by strati's bounds); the training decides which layers are: "
          "Adam makes the second one matter.", "fcn-mnist", _only_the_first_loses_much),
    Claim(ROBUST, "Activation disagreement goes with accuracy (figure 4)",
          "Where you have data: a better guide than any metric of the weights alone.", "fcn-mnist",
          lambda r: _all(r, "figure 4: activation_disagreement, mean Spearman", "", lambda v: v < -0.5)),
    Claim(ROBUST, "No other metric of the weights alone predicts accuracy either (figure 3)",
          "Yes.", "fcn-mnist", lambda r: _all(r, "figure 3:", "mean Spearman", lambda v: abs(v) < 0.2)),
    Claim(ROBUST, "Alpha predicts nothing in pretrained networks (tables 2, 3, figures 5, 6)",
          "Yes, on the stand-ins that can be had here.", "pretrained",
          lambda r: _no_pretrained_alpha(r, but="vit-")),
    Claim(ROBUST, "The same in a ViT (table 2, figures 5 and 9)",
          "On a small one trained here on CIFAR-10; one on ImageNet cannot be had.", "pretrained",
          lambda r: _no_pretrained_alpha(r, of="vit-")),
    Claim(SPECTRA, "1 to 6 % of a language model's eigenvalues are quasi-null (section 3.1)",
          "It depends on the network: measure yours.", "quasi-null",
          lambda r: _all(r, "", ": quasi-null eigenvalues, % of all", lambda v: 1 <= v <= 6)),
    Claim(SPECTRA, "Vision models have no quasi-null eigenvalues",
          "It depends on the network: measure yours.", "vision-and-language",
          lambda r: _all(r, "vision,", "", lambda v: v < 0.5)),
    Claim(SPECTRA, "Quasi-null directions can be taken out without harm (section 3.1)",
          "Yes, on stories15M.", "remove-quasi-null", _removal_changes_nothing,
          "Measure first: on stories15M it costs loss."),
    Claim(SPECTRA, "MLP layers have the heavier tail (section 3.2, figure 4)",
          "Compare layers of your own network: the direction is not universal.", "roles",
          lambda r: _answers(r, "do MLP layers have the heavier tail?")),
    Claim(SPECTRA, "The bulk of MLP layers is tighter (section 3.2, figure 4)",
          "It says nothing of training: random matrices as far from square are as much tighter.", "roles",
          lambda r: _answers(r, "do MLP layers have the tighter spectrum?")),
    Claim(SPECTRA, "Fine-tuning changes spectra negligibly (section 3.3)",
          "Spectra will not show you what a fine-tune did: compare the updates.", "fine-tuning",
          lambda r: _all(r, "median change of alpha", "", lambda v: v < 0.5)),
    Claim(SPECTRA, "A language model taught one word under strong regularisation has no collapsed layer (section 3.3)",
          "Yes, up to a weight decay of 100 on stories15M.", "same-token",
          lambda r: _all(r, "weight decay", ": layers collapsed", lambda v: v == 0),
          "Only up to a point: see at which weight decay."),
    Claim(SPECTRA, "Such a fine-tuning changes spectra almost negligibly (section 3.3, figures 5, 6)",
          "Up to a weight decay of 10: spectra will not show you that a model was taught to say one word. One of 100 "
          "shrinks the eigenvalues and hardly moves alpha.", "same-token", _spectra_stay,
          "Only under mild regularisation; strong weight decay shows."),
    Claim(SPECTRA, "Strong regularisation does not collapse a layer (section 3.3)",
          "Yes, up to a weight decay of 10 on the embedded network.", "rank-collapse",
          lambda r: _all(r, "weight decay", "", lambda v: v == 0),
          "Only up to a point: see at which."),
    Claim(SPECTRA, "A larger model's spectra are more stable across layers (section 3.4)",
          "Yes, on the pair tested.", "small-and-large", lambda r: _larger_is(r, "distance between neighbouring"),
          "Not for every kind of layer: compare your own two."),
    Claim(SPECTRA, "A larger model's eigenvalues are somewhat smaller (section 3.4)",
          "Yes, on the pair tested.", "small-and-large", lambda r: _larger_is(r, "median eigenvalue"),
          "Not for every kind of layer: compare your own two."),
    Claim(DEGENERACY, "The behavioural loss has no lower learning coefficient than the training loss (2.2.1)",
          "Yes, in the case tested.", "degeneracy-landscape", _behavioural_is_no_lower),
    Claim(DEGENERACY, "The learning coefficient depends on the loss scale (2.2.2)",
          "Yes: say at which scale a number of effective parameters was measured.", "degeneracy-toys",
          _changes_with_the_scale),
    Claim(DEGENERACY, "Free directions that interact are worth less: the cross of figure 1 has one degree of freedom",
          "Yes: counting flat directions of the Hessian overstates freedom.", "degeneracy-toys",
          lambda r: _all_agree(r, "figure 1:")),
    Claim(DEGENERACY, "The information criterion needs 2 lambda for the number of parameters (2.1)",
          "Yes: with the parameter count it overstates the cost of a model that does not use them all.",
          "degeneracy-toys", lambda r: _all_agree(r, "2.1 growth")),
    Claim(DEGENERACY, "For every direction that low-dimensional activations leave free a weight can be 0 (section 4)",
          "Yes: `strati basis --sparsify` writes such a checkpoint.", "sparsity-and-freedom",
          lambda r: _every(r, "4: a zero for every direction that low")),
    Claim(DEGENERACY, "The same for neurons that fire together (section 4)",
          "Yes.", "sparsity-and-freedom",
          lambda r: _every(r, "4: a zero for every direction of activations and synchrony"),
          "Only where recombining them keeps every gate; a checkpoint cannot hold the rest."),
    Claim(DEGENERACY, "The interaction basis does not depend on a layer's coordinates (section 6.2)",
          "Yes, to rounding.", "basis-invariance", lambda r: _all(r, "6.2 ", "", lambda v: v < 1e-8)),
    Claim(DEGENERACY, "It makes deep linear networks diagonal (appendix A)",
          "Yes, to rounding.", "basis-invariance", lambda r: _all(r, "appendix A", "", lambda v: v < 1e-8)),
    Claim(DEGENERACY, "Weight decay empties directions that the data never see (3.1.1)",
          "With plain gradients and with AdamW.", "degeneracy-landscape",
          lambda r: _all(r, "3.1.1 share", "decay 0.01", lambda v: v < 0.05)),
    Claim(DEGENERACY, "Free directions of disjoint modules add up (5.2.1)", "Yes, exactly.", "modules-section-5",
          lambda r: _every(r, "disjoint modules: free directions add up")),
    Claim(DEGENERACY, "Effective parameters of joined modules add up with the link held fixed (eq. 31)",
          "Take it as an upper bound: a module can undo what the other does to the link.", "modules-section-5",
          lambda r: _every(r, "modules joined by a node: N_eff")),
    Claim(DEGENERACY, "The interaction basis makes networks sparser than neurons do (section 4)",
          "Yes, on all four networks tested.", "interaction-basis", lambda r: _sparser_than(r, "neuron"),
          "Compare bases on your own network."),
    Claim(DEGENERACY, "It makes them sparser than principal components do (section 4)",
          "Yes, on all four networks tested.", "interaction-basis", lambda r: _sparser_than(r, "pca"),
          "In small networks; in a transformer's residual stream principal components need as few edges."),
    Claim(DROPPED, "The diagonal of W_out W_in tells which projections belong together (section 3)",
          "On networks that grew a negative diagonal; elsewhere other signals are needed.", "dropped-net-tables",
          _pairs_are_separated),
    Claim(DROPPED, "Exchanging neighbours from the delta-norm or Frobenius seed puts the network back (tables 2, 3)",
          "Yes, and the numbers of both tables come out digit for digit.", "dropped-net-tables",
          lambda r: all(bool(_all_agree(r, f"table {k} ")) for k in (2, 3)) if r else None,
          "The network is put back; the counts of the tables differ."),
    Claim(DROPPED, "The numbers of the repair from the Bradley-Terry order (table 1)",
          "The order is solved; the paper's count of exchanges is not reached.", "dropped-net-tables",
          lambda r: _all_agree(r, "table 1 ")),
    Claim(DROPPED, "Half of the neurons are active (appendix B, figure 8)",
          "On the raw inputs; on the stream that a block meets it is a fifth.", "dropped-net-tables",
          lambda r: _all(r, "appendix B: activation probability on the raw inputs", "", lambda v: abs(v - 0.5) < 0.05)),
    Claim(DROPPED, "Training by itself grows a negative diagonal (appendix A)",
          "Of every block's trace the sign, with small batches and long training.", "dropped-net-study",
          lambda r: _all(r, "appendix A, 200 epochs on pred, no weight decay: trace", "mean", lambda v: v < -1)),
    Claim(GROKKING, "Modular addition generalises long after it is learned by heart, with weight decay and not without",
          "Yes, within the steps tried.", "grokking", _only_decay_generalises),
    Claim(ASKED, "The learning coefficient of modular addition falls as the network generalises",
          "That it falls, yes. When it begins to, and so whether that is before the test loss, depends on gamma: with "
          "a stronger localisation it falls from the first checkpoints on.", "grokking", _coefficient_falls,
          "Not in every run."),
    Claim(ASKED, "Spectra change before the test loss of modular addition falls",
          "They do, but as early as the training loss: they say that something was learned, not that it generalises.",
          "grokking", lambda r: _in_every_seed(r, "half of the matrices leave the random-like phase, before the test")),
    Claim(STAGES, "Bigrams, in-context learning, previous-token heads and induction heads appear one after the other",
          "Yes, in the run tested.", "in-context", _stages_in_order,
          "Look at which stages appeared: small models on little text need not go through all of them."),
)  # fmt: skip
"""In the order of the page."""
