"""The papers' claims, one line each, with a rule that decides from the rows of a reproduction whether each holds here.

A rule reads rows by their keys and typed facts, never by their text. Its verdict goes into the table of the docs'
page and to the top of the paper's own page, so a new run can change it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

Rows = Sequence[Mapping[str, Any]]
Outcome = bool | Literal["partly"] | None
"""What a rule reads from the rows; ``None`` where they do not decide."""


class Verdict(StrEnum):
    """Whether a claim holds in the full runs that are stored."""

    HELD = "held"
    IN_PART = "held in part"
    FAILED = "did not hold"
    NOT_TESTED = "not tested"


@dataclass(frozen=True)
class Claim:
    """A statement that a reproduction tests.

    Attributes:
        entry: The reproduction that tests it.
        says: The statement.
        means: What a reader can conclude where it held.
        rule: Whether it holds, from the reproduction's rows.
        otherwise: What a reader can conclude where it did not hold, or only in part; empty means ``means`` again.
        by_paper: False for a question that the paper does not ask and that is answered here.
    """

    entry: str
    says: str
    means: str
    rule: Callable[[Rows], Outcome]
    otherwise: str = ""
    by_paper: bool = True

    def meaning(self, verdict: Verdict) -> str:
        """What a reader can conclude, given the verdict."""
        if self.otherwise and verdict in (Verdict.FAILED, Verdict.IN_PART):
            return self.otherwise
        return self.means

    def verdict(self, rows: Rows | None) -> Verdict:
        """The verdict on these rows; ``not tested`` where there are none or they do not decide.

        Examples:
            >>> str(CLAIMS[1].verdict([{"key": "share-well-trained", "facts": {}, "ours": 0.17}]))
            'held'
            >>> str(CLAIMS[1].verdict(None))
            'not tested'
        """
        outcome = None if rows is None else self.rule(rows)
        if outcome is None:
            return Verdict.NOT_TESTED
        if outcome == "partly":
            return Verdict.IN_PART
        return Verdict.HELD if outcome else Verdict.FAILED


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
    correlations = [
        row["ours"]
        for row in _rows_of(rows, "mean-correlation", metric="alpha", statistic="Spearman")
        if str(row["facts"]["network"]).startswith("vit-") == vit
    ]
    return all(abs(float(rho)) < 0.2 for rho in correlations) if correlations else None


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
    pairs, others = _one(rows, "pairs-least"), _one(rows, "non-pairs-greatest")
    return None if pairs is None or others is None else pairs > others


def _both_tables_agree(rows: Rows) -> bool | None:
    answers = [_all_agree(rows, f"table-{number}") for number in (2, 3)]
    return None if None in answers else all(answers)


def _grid_reaches_the_table(rows: Rows) -> bool | None:
    closest = _rows_of(rows, "closest-training")
    return bool(closest[0]["facts"]["within"]) if closest else None


def _coefficient_follows_size(rows: Rows) -> Outcome:
    """Whether coefficient and size have rank correlations of 0.8; in part where some interval is above 0."""
    laws = [row["facts"] for row in _rows_of(rows, "law")]
    if not laws:
        return None
    if all(f["rho"] >= 0.8 for f in laws):
        return True
    return "partly" if any(f["low"] > 0 for f in laws) else False


def _coefficient_predicts_best(rows: Rows) -> Outcome:
    """Whether the coefficient explains more of left-out trainings than number and size of the weights do."""
    shares: dict[str, dict[tuple[str, float], float]] = {}
    for f in (row["facts"] for row in _rows_of(rows, "prediction")):
        shares.setdefault(f["predictor"], {})[f["edit"], f["tolerance"]] = f["share"]
    ours, others = (shares.get(name, {}) for name in ("lambda", "number and size of the weights"))
    better = [share > others[case] for case, share in ours.items() if case in others]
    return None if not better else True if all(better) else "partly" if any(better) else False


def _recommended(rows: Rows, metric: str) -> Outcome:
    """Whether the audit recommends a metric at every setting; in part where it does at some."""
    advice = [row["facts"]["recommendation"] for row in _rows_of(rows, "layer-audit", metric=metric)]
    if not advice:
        return None
    return True if set(advice) == {"use"} else "partly" if {"use", "use-with-care"} & set(advice) else False


def _comes_first(rows: Rows, signal: str) -> Outcome:
    """Whether a signal comes before every fall of the test accuracy; ``None`` where no accuracy fell."""
    facts = [row["facts"] for row in _rows_of(rows, "heralded", signal=signal)]
    if not facts or not facts[0]["of"]:
        return None
    return True if facts[0]["count"] == facts[0]["of"] else "partly" if facts[0]["count"] else False


_LEVEL = 0.05


CLAIMS: tuple[Claim, ...] = (
    Claim("fcn-mnist", "Alpha does not predict the accuracy when a layer is re-initialised or re-randomised (figure 2)",
          "Do not judge a layer by its alpha.",
          lambda r: _all_ours(r, "mean-correlation", lambda v: abs(v) < 0.2, metric="alpha", statistic="Spearman")),
    Claim("alpha-of-random-layers", "Untrained layers can have the alpha of a well-trained one (figure 2, left)",
          "Read alpha together with the warning `noise-like`.",
          lambda r: _all_ours(r, "share-well-trained", lambda v: v > 0.01)),
    Claim("fcn-mnist", "When layers are re-initialised, only the first one is critical (figure 2)",
          "This depends on the training: with Adam the second layer matters as well. By strati's bounds the first "
          "layer is between robust and critical.", _only_the_first_loses_much),
    Claim("fcn-mnist", "Activation disagreement correlates with accuracy (figure 4)",
          "If you have data, activation disagreement is a better guide than any metric of the weights alone.",
          lambda r: _all_ours(r, "mean-correlation", lambda v: v < -0.5, metric="activation_disagreement",
                              statistic="Spearman")),
    Claim("fcn-mnist", "No other metric of the weights alone predicts the accuracy (figure 3)",
          "The metrics of figure 3 do not tell which layers the network needs.",
          lambda r: _all_ours(r, "mean-correlation", lambda v: abs(v) < 0.2, figure="figure 3",
                              statistic="Spearman")),
    Claim("fcn-mnist-grid", "Networks with the paper's test accuracy have the paper's alphas (table 1)",
          "One of the trainings of the grid gives all numbers of table 1 within two standard errors.",
          _grid_reaches_the_table,
          "No training of the grid gives all numbers of table 1 within two standard errors; the table of the grid says "
          "how close the best one comes."),
    Claim("pretrained", "Alpha predicts nothing in pretrained networks (tables 2, 3, figures 5, 6)",
          "The paper's networks are not available here; this holds on the pretrained networks that are.",
          lambda r: _alpha_predicts_nothing(r, vit=False)),
    Claim("pretrained", "Alpha predicts nothing in a ViT (table 2, figures 5 and 9)",
          "This was tested on a small ViT that was trained here on CIFAR-10; one trained on ImageNet is not available.",
          lambda r: _alpha_predicts_nothing(r, vit=True)),
    Claim("roles", "The spectra of a language model are heavy-tailed, with no clean edge of the bulk (section 3.1)",
          "This holds for GPT-2's own attention output projections, the only matrices of it that are available.",
          lambda r: _mostly(r, "gpt2-heavy-tailed"),
          "Most of GPT-2's own attention output projections are heavy-tailed; those of the last blocks have a bulk "
          "with spikes. Its other matrices are not available."),
    Claim("quasi-null", "1 to 6 % of a language model's eigenvalues are quasi-null (section 3.1)",
          "This holds in every network measured.", _within_the_papers_share,
          "Single layers of GPT-2's own attention outputs have this share, and their mean lies just below it. GPT-2's "
          "MLP layers, which the paper's figure shows, are not available. Other networks differ: measure yours."),
    Claim("vision-and-language", "Vision models have no quasi-null eigenvalues",
          "Still measure your own network.",
          lambda r: _all_ours(r, "quasi-null-share", lambda v: v < 0.5, kind="vision"),
          "Some vision networks have as many as language models: measure yours."),
    Claim("remove-quasi-null", "Quasi-null directions can be removed without an effect (section 3.1)",
          "Removing them from stories15M does not change its loss.", _removal_changes_nothing,
          "On stories15M removing them raises the loss, by more than removing as many directions from the bulk does: "
          "measure before you remove them."),
    Claim("roles", "MLP layers have the heavier tail (section 3.2, figure 4)",
          "This holds in every network measured.", lambda r: _mlp_is_smaller(r, "alpha"),
          "The direction differs between networks: compare the layers of your own."),
    Claim("roles", "The bulk of MLP layers is tighter (section 3.2, figure 4)",
          "This is a property of the shape and not of training: random matrices of the same shapes differ as much.",
          lambda r: _mlp_is_smaller(r, "width")),
    Claim("fine-tuning", "Fine-tuning changes spectra negligibly (section 3.3)",
          "Spectra do not show what a fine-tune changed: use `strati compare`, which looks at the updates.",
          lambda r: _all_ours(r, "alpha-change", lambda v: v < 0.5)),
    Claim("same-token", "A language model that is taught one word under strong regularisation has no collapsed layer "
          "(section 3.3)",
          "This holds up to a weight decay of 100 on stories15M.",
          lambda r: _all_ours(r, "layers-collapsed", lambda v: v == 0),
          "This holds only up to a certain weight decay, which the table gives."),
    Claim("same-token", "Such a fine-tuning changes spectra almost negligibly (section 3.3, figures 5, 6)",
          "Up to a weight decay of 10, spectra do not show that a model was taught to say one word. A weight decay of "
          "100 shrinks the eigenvalues and hardly changes alpha.", _spectra_stay,
          "This holds only under mild regularisation; strong weight decay changes the spectra."),
    Claim("rank-collapse", "Strong regularisation does not collapse a layer (section 3.3)",
          "This holds up to a weight decay of 10 on the embedded network.",
          lambda r: _all_ours(r, "layers-collapsed", lambda v: v == 0),
          "A weight decay of 10 collapses a layer of the embedded network, and the network then loses accuracy; a "
          "weight decay of 1 does not."),
    Claim("small-and-large", "A larger model's spectra are more stable across layers (section 3.4)",
          "This holds for the pair tested.", lambda r: _larger_is_smaller(r, "neighbour-distance"),
          "It depends on the kind of layer and on the pair. The paper's larger network is not available."),
    Claim("small-and-large", "A larger model's eigenvalues are somewhat smaller (section 3.4)",
          "This holds for the pair tested.", lambda r: _larger_is_smaller(r, "median-eigenvalue"),
          "In the pair tested the larger model has the larger eigenvalues. The paper's larger network is not "
          "available."),
    Claim("degeneracy-landscape", "The behavioural loss has no lower learning coefficient than the training loss "
          "(2.2.1)", "This holds in the case tested.", _behavioural_is_no_lower),
    Claim("degeneracy-toys", "The learning coefficient depends on the loss scale (2.2.2)",
          "State the scale at which a number of effective parameters was measured.", _changes_with_the_scale),
    Claim("degeneracy-toys", "Free directions that interact give fewer degrees of freedom: the cross of figure 1 has "
          "one", "Counting flat directions of the Hessian overstates the freedom.",
          lambda r: _all_agree(r, "cross-freedom")),
    Claim("degeneracy-toys", "The information criterion needs 2 lambda in place of the number of parameters (2.1)",
          "With the parameter count the criterion overstates the cost of a model that does not use all parameters.",
          lambda r: _all_agree(r, "criterion-growth")),
    Claim("sparsity-and-freedom", "For every direction that low-dimensional activations leave free, a weight can be 0 "
          "(section 4)", "`strati basis --sparsify` writes such a checkpoint.",
          lambda r: _complete(r, "zeros-low-dimensional")),
    Claim("sparsity-and-freedom", "For every direction that synchronised neurons leave free, a weight can be 0 "
          "(section 4)", "`strati basis --sparsify` writes such a checkpoint.",
          lambda r: _complete(r, "zeros-all"),
          "This works only where recombining the neurons keeps every gate; a checkpoint cannot express the others."),
    Claim("basis-invariance", "The interaction basis does not depend on a layer's coordinates (section 6.2)",
          "This holds to rounding.", lambda r: _all_ours(r, "invariance", lambda v: v < 1e-8)),
    Claim("basis-invariance", "The interaction basis makes deep linear networks diagonal (appendix A)",
          "This holds to rounding.", lambda r: _all_ours(r, "diagonal", lambda v: v < 1e-8)),
    Claim("degeneracy-landscape", "Weight decay removes the weights in directions that the data never use (3.1.1)",
          "This holds with plain gradient descent and with AdamW.",
          lambda r: _all_ours(r, "null-share", lambda v: v < 0.05, decay=0.01)),
    Claim("modules-section-5", "Free directions of disjoint modules add up (5.2.1)", "This holds exactly.",
          lambda r: _complete(r, "free-add-up")),
    Claim("modules-section-5", "Effective parameters of connected modules add up with the link held fixed (eq. 31)",
          "This holds in every case tested.", lambda r: _complete(r, "link-held-fixed"),
          "The sum is an upper bound: one module can compensate for what the other does to the link."),
    Claim("interaction-basis", "The interaction basis makes networks sparser than the neuron basis does (section 4)",
          "This holds on all four networks tested.", lambda r: _sparser_than(r, "neuron"),
          "This depends on the network: compare bases on yours."),
    Claim("interaction-basis", "The interaction basis makes networks sparser than principal components do (section 4)",
          "This holds on all four networks tested.", lambda r: _sparser_than(r, "pca"),
          "This holds in small networks; in a transformer's residual stream principal components need as few edges."),
    Claim("dropped-net-tables", "The diagonal of W_out W_in tells which projections belong together (section 3)",
          "This works for networks whose training produced a negative diagonal; others need other signals.",
          _pairs_are_separated),
    Claim("dropped-net-tables", "Exchanging neighbours from the delta-norm or Frobenius order restores the network "
          "(tables 2, 3)", "The network is restored, and all numbers of both tables agree to the last digit.",
          _both_tables_agree,
          "The network is restored; the counts of the tables differ."),
    Claim("dropped-net-tables", "The numbers of the repair from the Bradley-Terry order (table 1)",
          "All numbers of the table agree.", lambda r: _all_agree(r, "table-1"),
          "The order is found; the paper's count of exchanges is not reached."),
    Claim("dropped-net-tables", "Half of the neurons are active (appendix B, figure 8)",
          "This holds on the raw inputs; on the inputs that a block receives it is a fifth.",
          lambda r: _all_ours(r, "activation-probability", lambda v: abs(v - 0.5) < 0.05, inputs="the raw inputs")),
    Claim("dropped-net-study", "Training alone produces a negative diagonal (appendix A)",
          "With small batches and long training the trace of every block is negative.",
          lambda r: _all_ours(r, "trace-mean", lambda v: v < -1, epochs=200, target="pred", decay=0)),
    Claim("grokking", "Modular addition generalises long after the training pairs are memorised, with weight decay and "
          "not without", "This holds within the steps tried.", _only_decay_generalises),
    Claim("grokking", "The learning coefficient of modular addition falls as the network generalises",
          "The coefficient falls in every run. When it starts to fall depends on gamma, so it is no early warning of "
          "generalisation.", _coefficient_falls,
          "It does not fall in every run.", by_paper=False),
    Claim("grokking", "Spectra change before the test loss of modular addition falls",
          "They change as early as the training loss: they show that something was learned, not that it generalises.",
          lambda r: _complete(r, "order", first="spectra", second="test-loss"), by_paper=False),
    Claim("in-context", "Bigrams, in-context learning, previous-token heads and induction heads appear one after the "
          "other", "This holds in the run tested.", _stages_in_order,
          "Not all stages appeared in this order; the table says which did."),
    Claim("anti-grokking", "Alpha below 2 comes before every fall of the test accuracy",
          "The table says how many steps before, and how often alpha is below 2 without a fall.",
          lambda r: _comes_first(r, "alpha"), "Some falls came without this sign; the table has the steps."),
    Claim("anti-grokking", "A correlation trap comes before every fall of the test accuracy",
          "The table says how many steps before, and how often there is a trap without a fall.",
          lambda r: _comes_first(r, "trap"), "Some falls came without this sign; the table has the steps."),
    Claim("compressibility", "The learning coefficient and the compressibility of networks are closely correlated",
          "Networks with a larger learning coefficient need more bits and a larger rank.",
          _coefficient_follows_size,
          "The correlation depends on the edit, the tolerance and the family of networks; the table has all of them."),
    Claim("compressibility", "The learning coefficient predicts the compressed size of unseen networks better than the "
          "number and size of their weights do", "Use it where you can afford to sample it.",
          _coefficient_predicts_best,
          "Number and size of the weights, which cost nothing, predict as well or better in at least one case.",
          by_paper=False),
    Claim("compressibility", "A layer's own learning coefficient says how much the layer can be compressed",
          "It can order the layers of a plan.", lambda r: _recommended(r, "learning_coefficient"),
          "Measure the cost of compressing a layer instead (`strati study`).", by_paper=False),
)  # fmt: skip
"""In the order of the pages."""
