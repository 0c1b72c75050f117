"""The papers' claims, one line each, with a rule that decides from the rows of a reproduction whether each holds here.

The verdict goes into the table of the docs' page and to the top of the paper's own page, so a new run can change it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from strati_reproductions.claim_rules import (
    Outcome,
    Rows,
    all_agree,
    all_ours,
    alpha_predicts_nothing,
    behavioural_is_no_lower,
    both_tables_agree,
    changes_with_the_scale,
    coefficient_falls,
    coefficient_follows_size,
    coefficient_predicts_best,
    comes_first,
    complete,
    generalising_is_lower,
    grid_reaches_the_table,
    induction_is_lower,
    larger_is_smaller,
    layers_follow_their_coefficient,
    mlp_is_smaller,
    mostly,
    one_variant_is_exact,
    only_decay_generalises,
    only_the_first_loses_much,
    pairs_are_separated,
    previous_token_head_is_found,
    removal_changes_nothing,
    smallest_cost_more,
    smallest_overlap_more,
    sparser_than,
    spectra_stay,
    stages_in_order,
    susceptibilities_separate,
    within_the_papers_share,
)


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
        if verdict is Verdict.NOT_TESTED:
            return "No stored run decides this."
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


CLAIMS: tuple[Claim, ...] = (
    Claim("fcn-mnist", "Alpha does not predict the accuracy when a layer is re-initialised or re-randomised (figure 2)",
          "Do not judge a layer by its alpha.",
          lambda r: all_ours(r, "mean-correlation", lambda v: abs(v) < 0.2, metric="alpha", statistic="Spearman")),
    Claim("alpha-of-random-layers", "Untrained layers can have the alpha of a well-trained one (figure 2, left)",
          "Read alpha together with the warning `noise-like`.",
          lambda r: all_ours(r, "share-well-trained", lambda v: v > 0.01)),
    Claim("fcn-mnist", "When layers are re-initialised, only the first one is critical (figure 2)",
          "This depends on the training: with Adam the second layer matters as well. By strati's bounds the first "
          "layer is between robust and critical.", only_the_first_loses_much),
    Claim("fcn-mnist", "Activation disagreement correlates with accuracy (figure 4)",
          "If you have data, activation disagreement is a better guide than any metric of the weights alone.",
          lambda r: all_ours(r, "mean-correlation", lambda v: v < -0.5, metric="activation_disagreement",
                              statistic="Spearman")),
    Claim("fcn-mnist", "No other metric of the weights alone predicts the accuracy (figure 3)",
          "The metrics of figure 3 do not tell which layers the network needs.",
          lambda r: all_ours(r, "mean-correlation", lambda v: abs(v) < 0.2, figure="figure 3",
                              statistic="Spearman")),
    Claim("fcn-mnist-grid", "Networks with the paper's test accuracy have the paper's alphas (table 1)",
          "One of the trainings of the grid gives all numbers of table 1 within two standard errors.",
          grid_reaches_the_table,
          "The table says how close the closest training of the grid comes, and with what errors. With few networks of "
          "each training the errors are large, so that a difference within two of them is weak evidence."),
    Claim("pretrained", "Alpha predicts nothing in pretrained networks (tables 2, 3, figures 5, 6)",
          "The paper's networks are not available here; this holds on the pretrained networks that are.",
          lambda r: alpha_predicts_nothing(r, vit=False)),
    Claim("pretrained", "Alpha predicts nothing in a ViT (table 2, figures 5 and 9)",
          "This was tested on a small ViT that was trained here on CIFAR-10; one trained on ImageNet is not available.",
          lambda r: alpha_predicts_nothing(r, vit=True)),
    Claim("roles", "The spectra of a language model are heavy-tailed, with no clean edge of the bulk (section 3.1)",
          "This holds for GPT-2's own attention output projections, the only matrices of it that are available.",
          lambda r: mostly(r, "gpt2-heavy-tailed"),
          "Most of GPT-2's own attention output projections are heavy-tailed; those of the last blocks have a bulk "
          "with spikes. Its other matrices are not available."),
    Claim("quasi-null", "1 to 6 % of a language model's eigenvalues are quasi-null (section 3.1)",
          "This holds in every network measured.", within_the_papers_share,
          "Single layers of GPT-2's own attention outputs have this share, and their mean lies just below it. GPT-2's "
          "MLP layers, which the paper's figure shows, are not available. Other networks differ: measure yours."),
    Claim("vision-and-language", "Vision models have no quasi-null eigenvalues",
          "Still measure your own network.",
          lambda r: all_ours(r, "quasi-null-share", lambda v: v < 0.5, kind="vision"),
          "Some vision networks have as many as language models: measure yours."),
    Claim("remove-quasi-null", "Quasi-null directions can be removed without an effect (section 3.1)",
          "Removing them from stories15M does not change its loss.", removal_changes_nothing,
          "On stories15M removing them raises the loss, by more than removing as many directions from the bulk does: "
          "measure before you remove them."),
    Claim("roles", "MLP layers have the heavier tail (section 3.2, figure 4)",
          "This holds in every network measured.", lambda r: mlp_is_smaller(r, "alpha"),
          "The direction differs between networks: compare the layers of your own."),
    Claim("roles", "The bulk of MLP layers is tighter (section 3.2, figure 4)",
          "This is a property of the shape and not of training: random matrices of the same shapes differ as much.",
          lambda r: mlp_is_smaller(r, "width")),
    Claim("fine-tuning", "Fine-tuning changes spectra negligibly (section 3.3)",
          "Spectra do not show what a fine-tune changed: use `strati compare`, which looks at the updates.",
          lambda r: all_ours(r, "alpha-change", lambda v: v < 0.5)),
    Claim("same-token", "A language model that is taught one word under strong regularisation has no collapsed layer "
          "(section 3.3)",
          "This holds up to a weight decay of 100 on stories15M.",
          lambda r: all_ours(r, "layers-collapsed", lambda v: v == 0),
          "This holds only up to a certain weight decay, which the table gives."),
    Claim("same-token", "Such a fine-tuning changes spectra almost negligibly (section 3.3, figures 5, 6)",
          "Up to a weight decay of 10, spectra do not show that a model was taught to say one word. A weight decay of "
          "100 shrinks the eigenvalues and hardly changes alpha.", spectra_stay,
          "This holds only under mild regularisation; strong weight decay changes the spectra."),
    Claim("rank-collapse", "Strong regularisation does not collapse a layer (section 3.3)",
          "This holds up to a weight decay of 10 on the embedded network.",
          lambda r: all_ours(r, "layers-collapsed", lambda v: v == 0),
          "A weight decay of 10 collapses a layer of the embedded network, and the network then loses accuracy; a "
          "weight decay of 1 does not."),
    Claim("small-and-large", "A larger model's spectra are more stable across layers (section 3.4)",
          "This holds for the pair tested.", lambda r: larger_is_smaller(r, "neighbour-distance"),
          "It depends on the kind of layer and on the pair. The paper's larger network is not available."),
    Claim("small-and-large", "A larger model's eigenvalues are somewhat smaller (section 3.4)",
          "This holds for the pair tested.", lambda r: larger_is_smaller(r, "median-eigenvalue"),
          "In the pair tested the larger model has the larger eigenvalues. The paper's larger network is not "
          "available."),
    Claim("degeneracy-landscape", "The behavioural loss has no lower learning coefficient than the training loss "
          "(2.2.1)", "This holds in the case tested.", behavioural_is_no_lower),
    Claim("degeneracy-toys", "The learning coefficient depends on the loss scale (2.2.2)",
          "State the scale at which a number of effective parameters was measured.", changes_with_the_scale),
    Claim("degeneracy-toys", "Free directions that interact give fewer degrees of freedom: the cross of figure 1 has "
          "one", "Counting flat directions of the Hessian overstates the freedom.",
          lambda r: all_agree(r, "cross-freedom")),
    Claim("degeneracy-toys", "The information criterion needs 2 lambda in place of the number of parameters (2.1)",
          "With the parameter count the criterion overstates the cost of a model that does not use all parameters.",
          lambda r: all_agree(r, "criterion-growth")),
    Claim("sparsity-and-freedom", "For every direction that low-dimensional activations leave free, a weight can be 0 "
          "(section 4)", "`strati basis --sparsify` writes such a checkpoint.",
          lambda r: complete(r, "zeros-low-dimensional")),
    Claim("sparsity-and-freedom", "For every direction that synchronised neurons leave free, a weight can be 0 "
          "(section 4)", "`strati basis --sparsify` writes such a checkpoint.",
          lambda r: complete(r, "zeros-all"),
          "This works only where recombining the neurons keeps every gate; a checkpoint cannot express the others."),
    Claim("basis-invariance", "The interaction basis does not depend on a layer's coordinates (section 6.2)",
          "This holds to rounding.", lambda r: all_ours(r, "invariance", lambda v: v < 1e-8)),
    Claim("basis-invariance", "The interaction basis makes deep linear networks diagonal (appendix A)",
          "This holds to rounding.", lambda r: all_ours(r, "diagonal", lambda v: v < 1e-8)),
    Claim("degeneracy-landscape", "Weight decay removes the weights in directions that the data never use (3.1.1)",
          "This holds with plain gradient descent and with AdamW.",
          lambda r: all_ours(r, "null-share", lambda v: v < 0.05, decay=0.01)),
    Claim("modules-section-5", "Free directions of disjoint modules add up (5.2.1)", "This holds exactly.",
          lambda r: complete(r, "free-add-up")),
    Claim("modules-section-5", "Effective parameters of connected modules add up with the link held fixed (eq. 31)",
          "This holds in every case tested.", lambda r: complete(r, "link-held-fixed"),
          "The sum is an upper bound: one module can compensate for what the other does to the link."),
    Claim("interaction-basis", "The interaction basis makes networks sparser than the neuron basis does (section 4)",
          "This holds on all four networks tested.", lambda r: sparser_than(r, "neuron"),
          "This depends on the network: compare bases on yours."),
    Claim("interaction-basis", "The interaction basis makes networks sparser than principal components do (section 4)",
          "This holds on all four networks tested.", lambda r: sparser_than(r, "pca"),
          "This holds in small networks; in a transformer's residual stream principal components need as few edges."),
    Claim("dropped-net-tables", "The diagonal of W_out W_in tells which projections belong together (section 3)",
          "This works for networks whose training produced a negative diagonal; others need other signals.",
          pairs_are_separated),
    Claim("dropped-net-tables", "Exchanging neighbours from the delta-norm or Frobenius order restores the network "
          "(tables 2, 3)", "The network is restored, and all numbers of both tables agree to the last digit.",
          both_tables_agree,
          "The network is restored; the counts of the tables differ."),
    Claim("dropped-net-table-1", "The numbers of the repair from the Bradley-Terry order (table 1)",
          "One reading of the text gives all numbers of the table.", one_variant_is_exact,
          "The starting order has the paper's error and the repair restores the network, but no reading of the text "
          "that was tried gives the paper's counts of exchanges."),
    Claim("dropped-net-tables", "Half of the neurons are active (appendix B, figure 8)",
          "This holds on the raw inputs; on the inputs that a block receives it is a fifth.",
          lambda r: all_ours(r, "activation-probability", lambda v: abs(v - 0.5) < 0.05, inputs="the raw inputs")),
    Claim("dropped-net-study", "Training alone produces a negative diagonal (appendix A)",
          "With small batches and long training the trace of every block is negative.",
          lambda r: all_ours(r, "trace-mean", lambda v: v < -1, epochs=200, target="pred", decay=0)),
    Claim("grokking", "Modular addition generalises long after the training pairs are memorised, with weight decay and "
          "not without", "This holds within the steps tried.", only_decay_generalises),
    Claim("grokking", "The learning coefficient of modular addition falls as the network generalises",
          "The coefficient falls in every run. When it starts to fall depends on gamma, so it is no early warning of "
          "generalisation.", coefficient_falls,
          "It does not fall in every run.", by_paper=False),
    Claim("grokking-levels", "At the end the learning coefficient is lower in a run that generalises than in one that "
          "memorises", "This holds for one run each, at one gamma that was fixed beforehand.",
          generalising_is_lower,
          "At one gamma that was fixed beforehand, the run that generalises does not end below the one that memorises "
          "(one run each).", by_paper=False),
    Claim("grokking", "Spectra change before the test loss of modular addition falls",
          "They change as early as the training loss: they show that something was learned, not that it generalises.",
          lambda r: complete(r, "order", first="spectra", second="test-loss"), by_paper=False),
    Claim("in-context", "Bigrams, n-grams, previous-token heads and induction heads appear one after the other",
          "This holds in the run tested. Half of its training windows are repeated random tokens; the paper's data are "
          "text alone. The recipe was chosen after shorter trials in which no induction head formed.",
          stages_in_order,
          "Not all stages appeared in this order; the table says which did."),
    Claim("refined-coefficients", "Induction heads have lower learning coefficients than other heads of their layer",
          "This holds in the run tested.", induction_is_lower,
          "In the run tested they do not have the lower coefficients; the table has those of every head."),
    Claim("head-roles", "The weights alone tell which head attends to the previous token",
          "Use `positional` of `strati scan --heads`; this was tested on one small network with rotary positions.",
          previous_token_head_is_found,
          "In the run tested `positional` of `strati scan --heads` points to another head.", by_paper=False),
    Claim("head-roles", "Susceptibilities separate previous-token and induction heads from the others",
          "This holds in the run tested, for repeated against unrepeated text.", susceptibilities_separate,
          "In the run tested their contrasts between repeated and unrepeated text overlap with those of other heads "
          "within the errors, so they do not identify the heads of the induction circuit. The paper uses principal "
          "components over many kinds of tokens."),
    Claim("anti-grokking", "Alpha below 2 comes before every fall of the test accuracy",
          "The table says how many steps before, and how often alpha is below 2 without a fall.",
          lambda r: comes_first(r, "alpha"), "Some falls came without this sign; the table has the steps."),
    Claim("anti-grokking", "A correlation trap comes before every fall of the test accuracy",
          "The table says how many steps before, and how often there is a trap without a fall.",
          lambda r: comes_first(r, "trap"), "Some falls came without this sign; the table has the steps."),
    Claim("compressibility", "The learning coefficient and the compressibility of networks are closely correlated",
          "Networks with a larger learning coefficient need more bits and a larger rank.",
          coefficient_follows_size,
          "On the networks trained here the correlation is weak for every edit, plain or data-aware (some intervals "
          "just exclude 0), and none is shown within a training: late in training the coefficient falls while the bits "
          "still rise. The paper's networks are language models, which are not available. The rule of this verdict (a "
          "rank correlation of 0.8 somewhere for `in part`) was set after the results were seen."),
    Claim("compressibility", "The learning coefficient predicts the compressed size of unseen networks better than the "
          "number and size of their weights do", "Use it where you can afford to sample it.",
          coefficient_predicts_best,
          "Number and size of the weights, which cost nothing, predict as well or better in at least one case.",
          by_paper=False),
    Claim("compressibility", "A layer's own learning coefficient says how much the layer can be compressed",
          "It can order the layers of a plan.", layers_follow_their_coefficient,
          "Per weight, a layer's coefficient rises with the bits and the rank that it needs, but so does the inverse "
          "of its number of weights, and three layers of nine networks are too few for the audit to recommend it. "
          "Measure the cost of compressing a layer instead (`strati study`). The rule of this verdict was set after "
          "the results were seen.", by_paper=False),
    Claim("small-singular-values", "Removing the smallest singular values costs more than removing as many of the bulk",
          "Do not truncate by the size of singular values alone.", smallest_cost_more,
          "In at least one network they cost no more than values of the bulk."),
    Claim("small-singular-values", "The smallest singular directions overlap with the inputs more than the bulk's do",
          "The network uses these directions.", smallest_overlap_more,
          "In at least one network the inputs are no larger along the smallest singular directions than along others."),
)  # fmt: skip
"""In the order of the pages."""
