"""What the papers claim, one line each, and whether it holds here: decided from the rows of the reproductions.

A claim names the reproduction that tests it and a rule that reads its rows, by their keys and typed facts and never by
their text. The rule writes the verdict into the table on top of the docs' page, so that a new run can change it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Rows = Sequence[Mapping[str, Any]]
Outcome = bool | Literal["partly"] | None
"""What a rule reads from the rows; ``None`` where they do not decide."""

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
        otherwise: The same where it did not or only in part; ``rely`` again where that is empty.
        entry: The reproduction that tests it; ``None`` where nothing here can.
        rule: Whether it holds, from the reproduction's rows.
    """

    paper: str
    says: str
    rely: str
    entry: str | None = None
    rule: Callable[[Rows], Outcome] = lambda rows: None
    otherwise: str = ""

    def advice(self, verdict: str) -> str:
        """The line for a reader, given the verdict."""
        return self.otherwise or self.rely if verdict in ("not held", "partly held") else self.rely

    def verdict(self, rows: Rows | None) -> str:
        """``held``, ``partly held``, ``not held``, ``not run`` (no full run is stored) or ``not testable here``.

        Examples:
            >>> CLAIMS[1].verdict([{"key": "share-well-trained", "facts": {}, "ours": 0.17}])
            'held'
            >>> CLAIMS[1].verdict(None)
            'not run'
        """
        if self.entry is None:
            return "not testable here"
        outcome = None if rows is None else self.rule(rows)
        if outcome == "partly":
            return "partly held"
        return "not run" if outcome is None else "held" if outcome else "not held"


def _rows_of(rows: Rows, key: str, **facts: object) -> list[Mapping[str, Any]]:
    """The rows of a key whose facts have these values."""
    return [
        row
        for row in rows
        if row.get("key") == key and all(row["facts"].get(name) == value for name, value in facts.items())
    ]


def _all_ours(rows: Rows, key: str, test: Callable[[float], bool], **facts: object) -> bool | None:
    """Whether our number passes a test in all rows of a key; ``None`` where there is no such row."""
    numbers = [row["ours"] for row in _rows_of(rows, key, **facts) if isinstance(row["ours"], int | float)]
    return all(test(float(number)) for number in numbers) if numbers else None


def _one(rows: Rows, key: str) -> float | None:
    numbers = [row["ours"] for row in _rows_of(rows, key) if isinstance(row["ours"], int | float)]
    return float(numbers[0]) if numbers else None


def _within_the_papers_share(rows: Rows) -> Outcome:
    """Whether 1 to 6 % of every network's eigenvalues are quasi-null; in part where that holds of some layers."""
    measured = _rows_of(rows, "quasi-null-share")
    if not measured:
        return None
    shares = [float(row["ours"] if row["ours"] is not None else row["paper_network"]) for row in measured]
    if all(1 <= share <= 6 for share in shares):
        return True
    return "partly" if any(row["facts"]["most"] >= 1 for row in measured) else False


def _mostly(rows: Rows, key: str) -> Outcome:
    """Whether what a row counts holds in all cases; in part where it holds in more than half of them."""
    counts = [(row["facts"]["count"], row["facts"]["of"]) for row in _rows_of(rows, key)]
    if not counts:
        return None
    if all(count == of for count, of in counts):
        return True
    return "partly" if all(2 * count > of for count, of in counts) else False


def _only_the_first_loses_much(rows: Rows) -> bool | None:
    """Whether the first layer alone is not robust: the paper's word for it is critical, but it gives no bounds."""
    layers = [row["facts"] for row in _rows_of(rows, "accuracy-after", intervention="reinitialise")]
    return all((f["class"] == "robust") != (f["layer"] == "fc1") for f in layers) if layers else None


def _spectra_stay(rows: Rows) -> bool | None:
    """Whether alpha and the spectra move by less than 0.5 at every weight decay up to 10."""
    answers = [
        _all_ours(rows, key, lambda v: v < 0.5, decay=decay)
        for decay in (0.1, 1.0, 10.0)
        for key in ("alpha-change", "spectral-distance")
    ]
    return None if None in answers else all(answers)


def _mlp_is_smaller(rows: Rows, metric: str) -> bool | None:
    """Whether MLP layers have the smaller value beyond chance in every network."""
    tests = [row["facts"] for row in _rows_of(rows, "mlp-against-attention", metric=metric)]
    return all(f["smaller"] and f["pvalue"] < _LEVEL for f in tests) if tests else None


def _larger_is_smaller(rows: Rows, key: str) -> bool | None:
    """Whether the larger network's value is smaller in attention and in MLP layers, beyond chance."""
    tests = [row["facts"] for row in _rows_of(rows, key)]
    return all(f["effect"] < 0 and f["pvalue"] < _LEVEL for f in tests) if tests else None


def _removal_changes_nothing(rows: Rows) -> bool | None:
    intact, changed = _one(rows, "loss-intact"), _one(rows, "loss-without-quasi-null")
    return None if intact is None or changed is None else abs(changed - intact) < 0.01


def _alpha_predicts_nothing(rows: Rows, *, vit: bool) -> bool | None:
    """Whether the mean correlation of alpha over layers is below 0.2, in vision transformers or in the others."""
    chosen = [
        row["ours"]
        for row in _rows_of(rows, "mean-correlation", metric="alpha", statistic="Spearman")
        if str(row["facts"]["network"]).startswith("vit-") == vit
    ]
    return all(abs(float(rho)) < 0.2 for rho in chosen) if chosen else None


def _sparser_than(rows: Rows, other: str) -> bool | None:
    """Whether the interaction basis needs fewer edges than another one on every network."""
    edges: dict[str, dict[str, float]] = {}
    for row in _rows_of(rows, "edges"):
        edges.setdefault(row["facts"]["network"], {})[row["facts"]["basis"]] = float(row["ours"])
    return all(bases["interaction"] < bases[other] for bases in edges.values()) if edges else None


def _behavioural_is_no_lower(rows: Rows) -> bool | None:
    training, behavioural = _one(rows, "lambda-training"), _one(rows, "lambda-behavioural")
    return None if training is None or behavioural is None else behavioural >= training - 0.05


def _complete(rows: Rows, key: str, **facts: object) -> bool | None:
    """Whether what a row counts holds in all cases, and there is a case."""
    counts = [row["facts"] for row in _rows_of(rows, key, **facts)]
    return all(f["count"] == f["of"] > 0 for f in counts) if counts else None


def _all_agree(rows: Rows, key: str) -> bool | None:
    answers = [row["agrees"] for row in _rows_of(rows, key) if row.get("agrees")]
    return all(answer == "yes" for answer in answers) if answers else None


def _changes_with_the_scale(rows: Rows) -> bool | None:
    """Whether the coefficients at the smallest and the largest scale are the paper's, and surely differ."""
    ends = [row for row in _rows_of(rows, "lambda-at-scale") if row["paper"] is not None]
    if len(ends) != 2:
        return None
    apart = abs(ends[0]["ours"] - ends[1]["ours"])
    return apart > 5 * math.hypot(*(row["error"] for row in ends)) and all(r["agrees"] == "yes" for r in ends)


def _only_decay_generalises(rows: Rows) -> bool | None:
    """Whether every run with weight decay generalises and the one without is wrong more often than right."""
    with_decay = _complete(rows, "runs-that-generalise")
    without = [row["facts"]["accuracy"] for row in _rows_of(rows, "accuracy-without-decay")]
    return None if with_decay is None or not without else with_decay and without[0] < 0.5


def _coefficient_falls(rows: Rows) -> bool | None:
    """Whether the learning coefficient ends below its peak by more than five errors, in every run with weight decay."""
    runs = [row["facts"] for row in _rows_of(rows, "peak-and-end", decay=True)]
    if not runs or not all("peak" in f for f in runs):
        return None
    return all(f["peak"] - f["end"] > 5 * math.hypot(f["peak_error"], f["end_error"]) for f in runs)


def _stages_in_order(rows: Rows) -> bool | None:
    """Whether all stages appear, none before the one that it is said to follow."""
    stages = sorted((row["facts"] for row in _rows_of(rows, "stage")), key=lambda f: f["stage"])
    if not stages:
        return None
    steps = [f["step"] for f in stages]
    return None not in steps and steps == sorted(steps)


def _pairs_are_separated(rows: Rows) -> bool | None:
    matched, rest = _one(rows, "pairs-least"), _one(rows, "non-pairs-greatest")
    return None if matched is None or rest is None else matched > rest


def _both_tables_agree(rows: Rows) -> bool | None:
    answers = [_all_agree(rows, f"table-{number}") for number in (2, 3)]
    return None if None in answers else all(answers)


_LEVEL = 0.05


CLAIMS: tuple[Claim, ...] = (
    Claim(ROBUST, "Alpha does not predict accuracy when a layer is re-initialised or re-randomised (figure 2)",
          "Yes: do not judge a layer by its alpha.", "fcn-mnist",
          lambda r: _all_ours(r, "mean-correlation", lambda v: abs(v) < 0.2, metric="alpha", statistic="Spearman")),
    Claim(ROBUST, "Untrained layers can have the alpha of a well-trained one (figure 2, left)",
          "Yes: read alpha beside the warning `noise-like`.", "alpha-of-random-layers",
          lambda r: _all_ours(r, "share-well-trained", lambda v: v > 0.01)),
    Claim(ROBUST, "Re-initialised, only the first layer is critical (figure 2)",
          "For such networks (between robust and critical by strati's bounds); the training decides which layers are: "
          "Adam makes the second one matter.", "fcn-mnist", _only_the_first_loses_much),
    Claim(ROBUST, "Activation disagreement goes with accuracy (figure 4)",
          "Where you have data: a better guide than any metric of the weights alone.", "fcn-mnist",
          lambda r: _all_ours(r, "mean-correlation", lambda v: v < -0.5, metric="activation_disagreement",
                              statistic="Spearman")),
    Claim(ROBUST, "No other metric of the weights alone predicts accuracy either (figure 3)",
          "Yes.", "fcn-mnist", lambda r: _all_ours(r, "mean-correlation", lambda v: abs(v) < 0.2, figure="figure 3",
                                                 statistic="Spearman")),
    Claim(ROBUST, "Alpha predicts nothing in pretrained networks (tables 2, 3, figures 5, 6)",
          "Yes, on the stand-ins that can be had here.", "pretrained",
          lambda r: _alpha_predicts_nothing(r, vit=False)),
    Claim(ROBUST, "The same in a ViT (table 2, figures 5 and 9)",
          "On a small one trained here on CIFAR-10; one on ImageNet cannot be had.", "pretrained",
          lambda r: _alpha_predicts_nothing(r, vit=True)),
    Claim(SPECTRA, "The spectra of a language model are heavy-tailed, with no clean edge of the bulk (section 3.1)",
          "Yes, on GPT-2's own attention output projections, the only matrices of it that are available.", "roles",
          lambda r: _mostly(r, "gpt2-heavy-tailed"),
          "Of GPT-2's own attention output projections, the only matrices of it that are available, most are; those of "
          "the last blocks have a bulk with spikes."),
    Claim(SPECTRA, "1 to 6 % of a language model's eigenvalues are quasi-null (section 3.1)",
          "Yes, in every network measured.", "quasi-null", _within_the_papers_share,
          "Single layers of GPT-2's own attention outputs have that share and their mean lies just below it; its MLP "
          "layers, which the paper's figure shows, are not available. Other networks differ: measure yours."),
    Claim(SPECTRA, "Vision models have no quasi-null eigenvalues",
          "It depends on the network: measure yours.", "vision-and-language",
          lambda r: _all_ours(r, "quasi-null-share", lambda v: v < 0.5, kind="vision")),
    Claim(SPECTRA, "Quasi-null directions can be taken out without harm (section 3.1)",
          "Yes, on stories15M.", "remove-quasi-null", _removal_changes_nothing,
          "Measure first: on stories15M it costs loss."),
    Claim(SPECTRA, "MLP layers have the heavier tail (section 3.2, figure 4)",
          "Compare layers of your own network: the direction is not universal.", "roles",
          lambda r: _mlp_is_smaller(r, "alpha")),
    Claim(SPECTRA, "The bulk of MLP layers is tighter (section 3.2, figure 4)",
          "It says nothing of training: random matrices as far from square are as much tighter.", "roles",
          lambda r: _mlp_is_smaller(r, "width")),
    Claim(SPECTRA, "Fine-tuning changes spectra negligibly (section 3.3)",
          "Spectra will not show you what a fine-tune did: compare the updates.", "fine-tuning",
          lambda r: _all_ours(r, "alpha-change", lambda v: v < 0.5)),
    Claim(SPECTRA, "A language model taught one word under strong regularisation has no collapsed layer (section 3.3)",
          "Yes, up to a weight decay of 100 on stories15M.", "same-token",
          lambda r: _all_ours(r, "layers-collapsed", lambda v: v == 0),
          "Only up to a point: see at which weight decay."),
    Claim(SPECTRA, "Such a fine-tuning changes spectra almost negligibly (section 3.3, figures 5, 6)",
          "Up to a weight decay of 10: spectra will not show you that a model was taught to say one word. One of 100 "
          "shrinks the eigenvalues and hardly moves alpha.", "same-token", _spectra_stay,
          "Only under mild regularisation; strong weight decay shows."),
    Claim(SPECTRA, "Strong regularisation does not collapse a layer (section 3.3)",
          "Yes, up to a weight decay of 10 on the embedded network.", "rank-collapse",
          lambda r: _all_ours(r, "layers-collapsed", lambda v: v == 0),
          "Only up to a point: see at which."),
    Claim(SPECTRA, "A larger model's spectra are more stable across layers (section 3.4)",
          "Yes, on the pair tested.", "small-and-large", lambda r: _larger_is_smaller(r, "neighbour-distance"),
          "Not for every kind of layer: compare your own two."),
    Claim(SPECTRA, "A larger model's eigenvalues are somewhat smaller (section 3.4)",
          "Yes, on the pair tested.", "small-and-large", lambda r: _larger_is_smaller(r, "median-eigenvalue"),
          "Not for every kind of layer: compare your own two."),
    Claim(DEGENERACY, "The behavioural loss has no lower learning coefficient than the training loss (2.2.1)",
          "Yes, in the case tested.", "degeneracy-landscape", _behavioural_is_no_lower),
    Claim(DEGENERACY, "The learning coefficient depends on the loss scale (2.2.2)",
          "Yes: say at which scale a number of effective parameters was measured.", "degeneracy-toys",
          _changes_with_the_scale),
    Claim(DEGENERACY, "Free directions that interact are worth less: the cross of figure 1 has one degree of freedom",
          "Yes: counting flat directions of the Hessian overstates freedom.", "degeneracy-toys",
          lambda r: _all_agree(r, "cross-freedom")),
    Claim(DEGENERACY, "The information criterion needs 2 lambda for the number of parameters (2.1)",
          "Yes: with the parameter count it overstates the cost of a model that does not use them all.",
          "degeneracy-toys", lambda r: _all_agree(r, "criterion-growth")),
    Claim(DEGENERACY, "For every direction that low-dimensional activations leave free a weight can be 0 (section 4)",
          "Yes: `strati basis --sparsify` writes such a checkpoint.", "sparsity-and-freedom",
          lambda r: _complete(r, "zeros-low-dimensional")),
    Claim(DEGENERACY, "The same for neurons that fire together (section 4)",
          "Yes.", "sparsity-and-freedom",
          lambda r: _complete(r, "zeros-all"),
          "Only where recombining them keeps every gate; a checkpoint cannot hold the rest."),
    Claim(DEGENERACY, "The interaction basis does not depend on a layer's coordinates (section 6.2)",
          "Yes, to rounding.", "basis-invariance", lambda r: _all_ours(r, "invariance", lambda v: v < 1e-8)),
    Claim(DEGENERACY, "It makes deep linear networks diagonal (appendix A)",
          "Yes, to rounding.", "basis-invariance", lambda r: _all_ours(r, "diagonal", lambda v: v < 1e-8)),
    Claim(DEGENERACY, "Weight decay empties directions that the data never see (3.1.1)",
          "With plain gradients and with AdamW.", "degeneracy-landscape",
          lambda r: _all_ours(r, "null-share", lambda v: v < 0.05, decay=0.01)),
    Claim(DEGENERACY, "Free directions of disjoint modules add up (5.2.1)", "Yes, exactly.", "modules-section-5",
          lambda r: _complete(r, "free-add-up")),
    Claim(DEGENERACY, "Effective parameters of joined modules add up with the link held fixed (eq. 31)",
          "Take it as an upper bound: a module can undo what the other does to the link.", "modules-section-5",
          lambda r: _complete(r, "link-held-fixed")),
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
          _both_tables_agree,
          "The network is put back; the counts of the tables differ."),
    Claim(DROPPED, "The numbers of the repair from the Bradley-Terry order (table 1)",
          "The order is solved; the paper's count of exchanges is not reached.", "dropped-net-tables",
          lambda r: _all_agree(r, "table-1")),
    Claim(DROPPED, "Half of the neurons are active (appendix B, figure 8)",
          "On the raw inputs; on the stream that a block meets it is a fifth.", "dropped-net-tables",
          lambda r: _all_ours(r, "activation-probability", lambda v: abs(v - 0.5) < 0.05, inputs="the raw inputs")),
    Claim(DROPPED, "Training by itself grows a negative diagonal (appendix A)",
          "Of every block's trace the sign, with small batches and long training.", "dropped-net-study",
          lambda r: _all_ours(r, "trace-mean", lambda v: v < -1, epochs=200, target="pred", decay=0)),
    Claim(GROKKING, "Modular addition generalises long after it is learned by heart, with weight decay and not without",
          "Yes, within the steps tried.", "grokking", _only_decay_generalises),
    Claim(ASKED, "The learning coefficient of modular addition falls as the network generalises",
          "That it falls, yes. When it begins to, and so whether that is before the test loss, depends on gamma: with "
          "a stronger localisation it falls from the first checkpoints on.", "grokking", _coefficient_falls,
          "Not in every run."),
    Claim(ASKED, "Spectra change before the test loss of modular addition falls",
          "They do, but as early as the training loss: they say that something was learned, not that it generalises.",
          "grokking", lambda r: _complete(r, "order", first="spectra", second="test-loss")),
    Claim(STAGES, "Bigrams, in-context learning, previous-token heads and induction heads appear one after the other",
          "Yes, in the run tested.", "in-context", _stages_in_order,
          "Look at which stages appeared: small models on little text need not go through all of them."),
)  # fmt: skip
"""In the order of the page."""
