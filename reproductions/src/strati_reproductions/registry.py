"""The reproductions by name. Each is a function that is imported when it is called.

A reproduction takes ``(quick, seed, folder, tick)`` and returns a :class:`Reproduction`: rows that compare the paper's
number with the one measured here, with a note on any difference. It stores figures and resumable work in ``folder``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from strati.core.errors import BadInputError
from strati.core.options import resolve
from strati.core.results import Tick, silent
from strati_reproductions.rows import Reproduction, Row

__all__ = ["ENTRIES", "PAPERS", "Entry", "Reproduction", "Row", "reproduce"]


@dataclass(frozen=True)
class Entry:
    """One reproduction.

    Attributes:
        function: ``"module:function"`` below ``strati_reproductions``.
        paper: A key of :data:`PAPERS`.
        summary: What the function reproduces.
        revision: Raise it by hand when the experiment changes so that stored tables no longer describe it.
        needs: What a full run takes, where none is stored.
    """

    function: str
    paper: str
    summary: str
    revision: int = 1
    needs: str = ""


PAPERS: dict[str, str] = {
    "robust-and-critical-layers": "Robust and critical layers",
    "top-down-eigenspectra": "Top-down eigenspectra",
    "degeneracy-in-the-loss-landscape": "Degeneracy in the loss landscape",
    "dropped-neural-net": "I dropped a neural net",
    "grokking": "Grokking of modular addition (Nanda et al. 2023)",
    "superposition": "The toy model of superposition (Chen et al. 2023)",
    "in-context-learning": "Stages of in-context learning (Hoogland et al. 2024, Wang et al. 2024)",
    "anti-grokking": "Anti-grokking (Prakash and Martin 2025)",
    "compressibility": "Learning coefficient and compressibility (Urdshals et al. 2025)",
    "small-singular-values": "Small singular values (Staats et al. 2024)",
    "plans": "Compression plans, and published rules for them",
}
"""Titles of the papers; each has a page in the docs."""
_ROBUST = "robust-and-critical-layers"
_TOP_DOWN = "top-down-eigenspectra"
_DEGENERACY = "degeneracy-in-the-loss-landscape"
_DROPPED = "dropped-neural-net"

ENTRIES: dict[str, Entry] = {
    "alpha-of-random-layers": Entry(
        "robust_and_critical.alpha_random:alpha_of_random_layers",
        _ROBUST,
        "figure 2, left: 10,000 untrained layers, how many look well trained",
    ),
    "fcn-mnist": Entry(
        "robust_and_critical.fcn_mnist:fcn_mnist",
        _ROBUST,
        "table 1, figures 2, 3, 4, 7: 100 networks on MNIST, every layer re-initialised and re-randomised",
    ),
    "fcn-mnist-grid": Entry(
        "robust_and_critical.training_grid:fcn_mnist_grid",
        _ROBUST,
        "table 1: epochs, batch size and input scaling that give the paper's alphas and accuracy",
        needs="Nine trainings of ten epochs at 6 seconds of one core for every network and epoch: 18 minutes for two "
        "networks each, 90 for the ten that are planned. Every pair of networks is stored, so that a stopped run "
        "continues.",
    ),
    "pretrained": Entry(
        "robust_and_critical.pretrained:pretrained",
        _ROBUST,
        "tables 2, 3, figures 5, 6, 8-11: real pretrained networks, every layer re-randomised ten times",
    ),
    "phases": Entry(
        "eigenspectra.phases:phases",
        _TOP_DOWN,
        "the six phases on matrices whose phase is known: how often the phase is right",
    ),
    "quasi-null": Entry(
        "eigenspectra.spectra_real:quasi_null",
        _TOP_DOWN,
        "share of quasi-null eigenvalues in real transformers, GPT-2's attention outputs among them",
        revision=2,
    ),
    "roles": Entry(
        "eigenspectra.spectra_real:roles",
        _TOP_DOWN,
        "attention against MLP, figure 4 with a test; GPT-2's attention outputs over the depth",
        revision=2,
    ),
    "fine-tuning": Entry("eigenspectra.spectra_real:fine_tuning", _TOP_DOWN, "MiniLM against its fine-tune"),
    "five-trainings": Entry(
        "eigenspectra.spectra_real:five_trainings",
        _TOP_DOWN,
        "how much each metric varies between five trainings of one network",
    ),
    "vision-and-language": Entry(
        "eigenspectra.spectra_real:vision_and_language",
        _TOP_DOWN,
        "vision against language networks",
        revision=2,
    ),
    "rank-collapse": Entry(
        "eigenspectra.spectra_experiments:rank_collapse",
        _TOP_DOWN,
        "strong regularisation: does a layer collapse?",
    ),
    "same-token": Entry(
        "eigenspectra.single_token:same_token",
        _TOP_DOWN,
        "section 3.3, figures 5, 6: a language model fine-tuned to say one word",
    ),
    "remove-quasi-null": Entry(
        "eigenspectra.spectra_experiments:remove_quasi_null",
        _TOP_DOWN,
        "the loss after quasi-null directions are removed",
    ),
    "small-and-large": Entry(
        "eigenspectra.sizes:small_and_large",
        _TOP_DOWN,
        "section 3.4, figures 3, 4, 7, 8: is the larger model's spectrum more stable, are its eigenvalues smaller?",
        revision=2,
    ),
    "training-series": Entry(
        "eigenspectra.over_training:training_series",
        _TOP_DOWN,
        "spectra over training, three batch sizes",
    ),
    "degeneracy-real": Entry(
        "degeneracy.real_networks:real_networks",
        _DEGENERACY,
        "parameters used by real networks, before, during and after training",
    ),
    "interaction-basis": Entry(
        "degeneracy.bases:interaction_basis_study",
        _DEGENERACY,
        "sparsity, ablation and modules in four bases on three networks",
    ),
    "modules-section-5": Entry(
        "degeneracy.modular:section_five",
        _DEGENERACY,
        "free directions of modules, and the log law of links",
    ),
    "llc-truth-table": Entry(
        "degeneracy.learning_coefficients:truth_table",
        _DEGENERACY,
        "learning coefficients whose value is known, exact and sampled",
    ),
    "degeneracy-landscape": Entry(
        "degeneracy.learning_coefficients:studies",
        _DEGENERACY,
        "sections 2.2.1, 2.2.2, 3.1.1, 6.1: four statements tested on small networks",
    ),
    "degeneracy-toys": Entry(
        "degeneracy.toys:degeneracy_toys",
        _DEGENERACY,
        "sections 2.1, 2.2.2, figure 1: losses whose learning coefficient is known, and the information criterion",
    ),
    "sparsity-and-freedom": Entry(
        "degeneracy.statements:sparsity_and_freedom",
        _DEGENERACY,
        "section 4: zeros after sparsifying against free directions",
    ),
    "basis-invariance": Entry(
        "degeneracy.statements:basis_invariance",
        _DEGENERACY,
        "section 6.2, appendix A: the basis under changes of coordinates, and of deep linear networks",
    ),
    "dropped-net-tables": Entry(
        "dropped_net.puzzle:dropped_net_tables",
        _DROPPED,
        "tables 1, 2, 3, Bradley-Terry, near-commutativity and appendix B on the public puzzle",
    ),
    "dropped-net-table-1": Entry(
        "dropped_net.table_one:dropped_net_table_1",
        _DROPPED,
        "table 1 by every reading of the text: rows, target, start of the strengths, direction of the sweeps",
    ),
    "dropped-net-figures": Entry(
        "dropped_net.figures:dropped_net_figures", _DROPPED, "figures 2 to 9 of the public puzzle"
    ),
    "dropped-net-study": Entry(
        "dropped_net.open_questions:dropped_net_study",
        _DROPPED,
        "appendix A and the open questions on networks trained here: seeds, local minima, the negative diagonal, cost",
    ),
    "dropped-net-battery": Entry(
        "dropped_net.random_networks:dropped_net_battery",
        _DROPPED,
        "forty residual networks trained, shuffled and reassembled: how many are exact within 120 s",
    ),
    "acting": Entry(
        "acting.table:acting",
        "plans",
        "plans of data-aware edits against uniform allocation and plans of plain edits: three networks, six budgets",
        revision=2,
    ),
    "acting-claims": Entry(
        "acting.claims:claims",
        "plans",
        "claims of LASER, ShortGPT and rank selection, measured on the same networks",
        revision=2,
    ),
    "alpha-pruning": Entry(
        "acting.alpha_pruning:alpha_pruning",
        "plans",
        "sparsity of blocks by AlphaPruning and FARMS against the same share everywhere, on unseen data",
        revision=2,
    ),
    "grokking": Entry(
        "grokking.grokking:grokking",
        "grokking",
        "with and without weight decay: the order in which spectra, learning coefficient and test loss change",
    ),
    "grokking-levels": Entry(
        "grokking.grokking:grokking_levels",
        "grokking",
        "the learning coefficient of runs that generalise and of one that memorises, at one gamma",
        needs="A training of `grokking` and one without weight decay, and learning coefficients of 12 checkpoints "
        "each: about 15 minutes of the processor. A stopped run continues.",
    ),
    "anti-grokking": Entry(
        "anti_grokking.anti_grokking:anti_grokking",
        "anti-grokking",
        "MNIST for millions of steps: does alpha below 2 or a correlation trap come before the test accuracy falls",
        needs="17 million steps of five networks at 1.1 ms of one core (the quick run prints the time of a step): 5 "
        "hours. The papers report the fall of the test accuracy after a million steps, so three seeds need about an "
        "hour to reach it. A stopped run continues.",
    ),
    "compressibility": Entry(
        "compressibility.compressibility:compressibility",
        "compressibility",
        "learning coefficient against bits and rank at a loss tolerance: slope, prediction, and per layer",
    ),
    "small-singular-values": Entry(
        "small_singular_values:small_singular_values",
        "small-singular-values",
        "language models without one decile of their singular values; overlap of the deciles with the inputs",
    ),
    "superposition": Entry(
        "superposition.superposition:superposition",
        "superposition",
        "the toy model of superposition: polygons, plateaus and their learning coefficients",
    ),
    "in-context": Entry(
        "in_context.stages:in_context",
        "in-context-learning",
        "a two-layer attention-only transformer: which stages of in-context learning appear",
        revision=4,
    ),
    "refined-coefficients": Entry(
        "in_context.refined:refined_coefficients",
        "in-context-learning",
        "learning coefficients of single heads and of kinds of data, over the training of in-context",
    ),
    "head-roles": Entry(
        "in_context.head_roles:head_roles",
        "in-context-learning",
        "which head of in-context is a previous-token head by its weights, and whether susceptibilities separate heads",
    ),
    "quasi-null-training": Entry(
        "eigenspectra.over_training:quasi_null_training",
        _TOP_DOWN,
        "quasi-null eigenvalues over a transformer's training (an open question of the paper)",
    ),
    "fcn-checkpoints": Entry(
        "eigenspectra.over_training:fcn_checkpoints",
        _TOP_DOWN,
        "spectra of 100 checkpoints of a fully connected network, and where they change",
    ),
    "effective-parameters-over-training": Entry(
        "degeneracy.toys:effective_parameters_over_training",
        _DEGENERACY,
        "section 2.2.2: effective parameters N_eff(eps) over training",
    ),
    "dropped-transformer": Entry(
        "dropped_transformer.table:dropped_transformer",
        _DROPPED,
        "beyond the paper: transformers shuffled into unlabelled matrices and reassembled without data",
    ),
}
"""Name -> entry, in the order they are listed."""


@dataclass(frozen=True)
class ReproduceConfig:
    """Options of :func:`reproduce`.

    Attributes:
        quick: Fewer networks or draws: minutes instead of an hour.
        seed: Random seed.
        folder: Folder of figures and resumable work.
    """

    quick: bool = False
    seed: int = 0
    folder: str | Path = "out"


def reproduce(
    name: str, *, config: ReproduceConfig | None = None, tick: Tick = silent, **options: Any
) -> Reproduction:
    """Run one reproduction.

    Args:
        name: One of :data:`ENTRIES`.
        config: Options; keywords of the same names win.
        tick: Called after each unit of work.
        **options: Fields of :class:`ReproduceConfig`.

    Raises:
        BadInputError: There is no such reproduction or option.
    """
    settings = resolve(ReproduceConfig, config, options, of=reproduce)
    if name not in ENTRIES:
        raise BadInputError(name, f"no such reproduction; there are: {', '.join(ENTRIES)}")
    entry = ENTRIES[name]
    module, _, function = entry.function.partition(":")
    body: Callable[..., Reproduction] = getattr(
        importlib.import_module(f"strati_reproductions.{module}"), function
    )
    reproduction = body(
        quick=settings.quick, seed=settings.seed, folder=Path(settings.folder) / name, tick=tick
    )
    mode: Literal["quick", "full"] = "quick" if settings.quick else "full"
    return replace(reproduction, mode=mode, seed=settings.seed, revision=entry.revision)
