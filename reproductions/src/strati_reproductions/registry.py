"""The reproductions by name. Each is a function in a module of its own, imported when called.

A reproduction takes ``(quick, seed, folder, tick)`` and returns a :class:`Reproduction`: rows that compare the
paper's number with the one measured here, with a note on any difference. ``folder`` is where it may keep figures
and resumable work.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from strati.core.errors import BadInputError
from strati.core.options import resolve
from strati.core.results import Tick, silent
from strati_reproductions.rows import Reproduction, Row

__all__ = ["ENTRIES", "Entry", "Reproduction", "Row", "reproduce"]


@dataclass(frozen=True)
class Entry:
    """One thing that can be reproduced.

    Attributes:
        function: ``"module:function"`` below ``strati_reproductions``.
        paper: Short name of the paper.
        summary: What the function reproduces.
        revision: Raise it by hand when the experiment changes so that stored tables no longer describe it.
    """

    function: str
    paper: str
    summary: str
    revision: int = 1


_TOP_DOWN = "top-down-eigenspectra"

ENTRIES: dict[str, Entry] = {
    "alpha-of-random-layers": Entry(
        "robust_and_critical.alpha_random:alpha_of_random_layers",
        "robust-and-critical-layers",
        "figure 2, left: 10,000 untrained layers, how many look well trained",
    ),
    "fcn-mnist": Entry(
        "robust_and_critical.fcn_mnist:fcn_mnist",
        "robust-and-critical-layers",
        "table 1, figures 2, 3, 4, 7: 100 networks on MNIST, every layer re-initialised and re-randomised",
    ),
    "fcn-mnist-grid": Entry(
        "robust_and_critical.training_grid:fcn_mnist_grid",
        "robust-and-critical-layers",
        "table 1: epochs, batch size and input scaling that give the paper's alphas and accuracy",
    ),
    "pretrained": Entry(
        "robust_and_critical.pretrained:pretrained",
        "robust-and-critical-layers",
        "tables 2, 3, figures 5, 6, 8-11: real pretrained networks, every layer re-randomised ten times",
    ),
    "phases": Entry(
        "eigenspectra.phases:phases", _TOP_DOWN, "six phases on matrices of known making, share named right"
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
    "fine-tuning": Entry(
        "eigenspectra.spectra_real:fine_tuning", _TOP_DOWN, "MiniLM against its fine-tuned descendant"
    ),
    "five-trainings": Entry(
        "eigenspectra.spectra_real:five_trainings", _TOP_DOWN, "how much of each metric is chance"
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
        "section 3.3, figures 5, 6: a language model taught one word",
    ),
    "remove-quasi-null": Entry(
        "eigenspectra.spectra_experiments:remove_quasi_null", _TOP_DOWN, "quasi-null directions taken out"
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
        "degeneracy-in-the-loss-landscape",
        "parameters used by real networks, before, during and after training",
    ),
    "interaction-basis": Entry(
        "degeneracy.bases:interaction_basis_study",
        "degeneracy-in-the-loss-landscape",
        "sparsity, ablation and modules in four bases on three networks",
    ),
    "modules-section-5": Entry(
        "degeneracy.modular:section_five",
        "degeneracy-in-the-loss-landscape",
        "free directions of modules, and the log law of links",
    ),
    "llc-truth-table": Entry(
        "degeneracy.learning_coefficients:truth_table",
        "degeneracy-in-the-loss-landscape",
        "learning coefficients whose value is known, exact and sampled",
    ),
    "degeneracy-landscape": Entry(
        "degeneracy.learning_coefficients:studies",
        "degeneracy-in-the-loss-landscape",
        "sections 2.2.1, 2.2.2, 3.1.1, 6.1: four statements tested on small networks",
    ),
    "degeneracy-toys": Entry(
        "degeneracy.toys:degeneracy_toys",
        "degeneracy-in-the-loss-landscape",
        "2.2.2's c^2 w^2 + w^4, figure 1's cross, the information criterion with 2 lambda",
    ),
    "sparsity-and-freedom": Entry(
        "degeneracy.statements:sparsity_and_freedom",
        "degeneracy-in-the-loss-landscape",
        "section 4: zeros after sparsifying against free directions",
    ),
    "basis-invariance": Entry(
        "degeneracy.statements:basis_invariance",
        "degeneracy-in-the-loss-landscape",
        "section 6.2: other coordinates, the same basis; appendix A: deep linear networks are diagonal",
    ),
    "dropped-net-tables": Entry(
        "dropped_net.puzzle:dropped_net_tables",
        "dropped-neural-net",
        "tables 1, 2, 3, Bradley-Terry, near-commutativity and appendix B on the public puzzle",
    ),
    "dropped-net-figures": Entry(
        "dropped_net.figures:dropped_net_figures", "dropped-neural-net", "figures 2 to 9 of the public puzzle"
    ),
    "dropped-net-study": Entry(
        "dropped_net.open_questions:dropped_net_study",
        "dropped-neural-net",
        "appendix A and the open questions on networks trained here: seeds, local minima, the negative diagonal, cost",
    ),
    "dropped-net-battery": Entry(
        "dropped_net.random_networks:dropped_net_battery",
        "dropped-neural-net",
        "forty residual networks drawn by seed, trained, dropped and put back: how many are exact within 120 s",
    ),
    "acting": Entry(
        "acting.table:acting",
        "strati",
        "plans against the even spread on unseen data: four networks, truncate and quantise, three budgets each",
    ),
    "acting-claims": Entry(
        "acting.claims:claims",
        "strati",
        "what LASER, AlphaPruning, ShortGPT and rank choice claim, measured on the same networks",
    ),
    "grokking": Entry(
        "grokking.grokking:grokking",
        "development (Nanda et al. 2023)",
        "modular addition with weight decay and without: spectra, learning coefficient and test loss, in which order",
    ),
    "anti-grokking": Entry(
        "anti_grokking.anti_grokking:anti_grokking",
        "development (Prakash and Martin 2025)",
        "MNIST for millions of steps: does alpha below 2 or a correlation trap come before the test accuracy falls",
    ),
    "superposition": Entry(
        "superposition.superposition:superposition",
        "development (Chen et al. 2023)",
        "the toy model of superposition: polygons, plateaus and their learning coefficients",
    ),
    "in-context": Entry(
        "in_context.stages:in_context",
        "development (Hoogland et al. 2024)",
        "a two-layer attention-only transformer: which stages of in-context learning appear",
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
        "degeneracy-in-the-loss-landscape",
        "N_eff(eps) over training: does it fall or rise with the scale",
    ),
    "dropped-transformer": Entry(
        "dropped_transformer.table:dropped_transformer",
        "dropped-neural-net",
        "beyond the paper: transformers dropped into unlabelled matrices, put back without data",
    ),
}
"""Name -> entry, in the order they are listed."""


@dataclass(frozen=True)
class ReproduceConfig:
    """Options of :func:`reproduce`.

    Attributes:
        quick: Fewer networks or draws, minutes instead of an hour.
        seed: Random seed.
        folder: Where figures and resumable work are kept; created on demand.
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
    chosen = resolve(ReproduceConfig, config, options, of=reproduce)
    if name not in ENTRIES:
        raise BadInputError(name, f"no such reproduction; there are: {', '.join(ENTRIES)}")
    entry = ENTRIES[name]
    module, _, function = entry.function.partition(":")
    body: Callable[..., Reproduction] = getattr(
        importlib.import_module(f"strati_reproductions.{module}"), function
    )
    reproduction = body(quick=chosen.quick, seed=chosen.seed, folder=Path(chosen.folder) / name, tick=tick)
    return replace(
        reproduction,
        mode="quick" if chosen.quick else "full",
        seed=chosen.seed,
        revision=entry.revision,
    )
