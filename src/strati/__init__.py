"""strati: stratigraphy for neural networks.

What each layer is (``scan``, ``spectrum``, ``compare``), whether the network needs it (``study``,
``audit``), how much of it is degenerate (``degeneracy``, ``llc``, ``interaction_basis``), and where it
belongs (``reassemble``). Names are imported when first used, so ``import strati`` costs nothing and
torch is loaded only by the functions that need it; without torch they are still here, and say which
extra to install when called. ``from strati import *`` leaves out ``open``, which would hide Python's own.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from strati._version import __version__

_HOME = {
    # a network
    "open": "strati.network.open",
    "Network": "strati.network.open",
    "Layer": "strati.network.layers",
    "inspect": "strati.network.inspect",
    "Inspection": "strati.network.inspect",
    "InspectConfig": "strati.network.inspect",
    "as_module": "strati.network.module",
    "ModuleConfig": "strati.network.module",
    # spectra
    "spectrum": "strati.spectra.spectrum",
    "Spectrum": "strati.spectra.spectrum",
    "SpectrumConfig": "strati.spectra.spectrum",
    "scan": "strati.spectra.scan",
    "Scan": "strati.spectra.scan",
    "ScanConfig": "strati.spectra.scan",
    "compare": "strati.spectra.comparing.compare",
    "Comparison": "strati.spectra.comparing.results",
    "CompareConfig": "strati.spectra.comparing.compare",
    "check": "strati.spectra.comparing.check",
    "Check": "strati.spectra.comparing.check",
    "CheckConfig": "strati.spectra.comparing.check",
    # interventions (torch)
    "study": "strati.intervene.study",
    "Study": "strati.intervene.study",
    "load_study": "strati.intervene.study",
    "StudyConfig": "strati.intervene.planning.config",
    "audit": "strati.intervene.judging.audit",
    "Audit": "strati.intervene.judging.audit",
    "AuditConfig": "strati.intervene.judging.audit",
    # interventions as settings, and networks changed in memory (torch)
    "truncate": "strati.intervene.planning.settings",
    "signal_only": "strati.intervene.planning.settings",
    "noise_only": "strati.intervene.planning.settings",
    "remove_quasi_null": "strati.intervene.planning.settings",
    "remove_small": "strati.intervene.planning.settings",
    "remove_large": "strati.intervene.planning.settings",
    "quantise": "strati.intervene.planning.settings",
    "prune": "strati.intervene.planning.settings",
    "zero": "strati.intervene.planning.settings",
    "shuffle": "strati.intervene.planning.settings",
    "drop": "strati.intervene.planning.settings",
    "swap": "strati.intervene.planning.settings",
    "adapt": "strati.intervene.planning.settings",
    "scale": "strati.intervene.planning.settings",
    "noise": "strati.intervene.planning.settings",
    "reinitialise": "strati.intervene.planning.settings",
    "rerandomise": "strati.intervene.planning.settings",
    "intervention": "strati.intervene.planning.settings",
    "Intervention": "strati.intervene.planning.settings",
    "truncated": "strati.intervene.measuring.in_memory",
    "quantised": "strati.intervene.measuring.in_memory",
    "pruned": "strati.intervene.measuring.in_memory",
    "scaled": "strati.intervene.measuring.in_memory",
    "zeroed": "strati.intervene.measuring.in_memory",
    "swapped": "strati.intervene.measuring.in_memory",
    "dropped": "strati.intervene.measuring.in_memory",
    "intervened": "strati.intervene.measuring.in_memory",
    # acting on what was measured (torch)
    "plan": "strati.intervene.plan",
    "Plan": "strati.intervene.plan",
    "PlanConfig": "strati.intervene.plan",
    "apply": "strati.intervene.apply",
    "Applied": "strati.intervene.apply",
    "ApplyConfig": "strati.intervene.apply",
    "load_factored": "strati.intervene.acting.factored",
    # the loss landscape (torch)
    "llc": "strati.landscape.sampling.llc",
    "learning_coefficient": "strati.landscape.sampling.llc",
    "LearningCoefficient": "strati.landscape.sampling.llc",
    "LLCConfig": "strati.landscape.sampling.config",
    "effective_parameters": "strati.landscape.sampling.scales",
    "EffectiveParameters": "strati.landscape.sampling.scales",
    "degeneracy": "strati.landscape.counts.count",
    "Degeneracy": "strati.landscape.counts.count",
    "interaction_basis": "strati.landscape.interactions.basis",
    "InteractionBasis": "strati.landscape.interactions.basis_result",
    "interaction_graph": "strati.landscape.interactions.graph",
    "InteractionGraph": "strati.landscape.interactions.graph",
    "modules": "strati.landscape.interactions.modules",
    "Modules": "strati.landscape.interactions.modules",
    "interaction_surface": "strati.landscape.interactions.surface",
    "InteractionSurface": "strati.landscape.interactions.surface",
    "module_parameters": "strati.landscape.interactions.surface",
    "ModuleParameters": "strati.landscape.interactions.surface",
    "constrained_loss": "strati.landscape.interactions.constrained",
    "ConstrainedLoss": "strati.landscape.interactions.constrained",
    "sparsify": "strati.landscape.interactions.sparsify",
    "Sparsified": "strati.landscape.interactions.sparsify",
    "DegeneracyConfig": "strati.landscape.counts.result",
    "BasisConfig": "strati.landscape.interactions.basis",
    "GraphConfig": "strati.landscape.interactions.graph",
    "ModulesConfig": "strati.landscape.interactions.modules",
    "SurfaceConfig": "strati.landscape.interactions.surface",
    "ModuleParametersConfig": "strati.landscape.interactions.surface",
    "ConstrainedConfig": "strati.landscape.interactions.constrained",
    "SparsifyConfig": "strati.landscape.interactions.sparsify",
    # a run over time
    "track": "strati.tracking.track",
    "Track": "strati.tracking.track",
    "TrackConfig": "strati.tracking.config",
    "Tracker": "strati.tracking.tracker",
    # reassembly
    "reassemble": "strati.reassembly.reassemble",
    "Reassembly": "strati.reassembly.result",
    "ReassembleConfig": "strati.reassembly.config",
    # papers and pages
    "reproduce": "strati.papers.registry",
    "Reproduction": "strati.papers.registry",
    "ReproduceConfig": "strati.papers.registry",
    "write_report": "strati.report.page",
    # errors
    "StratiError": "strati.errors",
    "BadInputError": "strati.errors",
    "UnsupportedError": "strati.errors",
    "MissingExtraError": "strati.errors",
}
_EXTRAS = {"torch": "torch", "graspologic_native": "torch"}
"""What an import may lack, and the extra that brings it."""

__all__ = ["__version__", *(name for name in _HOME if name != "open")]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'strati' has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_HOME[name]), name)
    except ImportError as error:
        missing = (error.name or "").split(".")[0]
        if missing not in _EXTRAS:
            raise
        return _absent(name, missing)


def __dir__() -> list[str]:
    return sorted([*__all__, "open"])


def _absent(name: str, missing: str) -> Any:
    """What stands for a function whose extra is not installed: calling it says which one."""

    def absent(*_: Any, **__: Any) -> Any:
        from strati.errors import MissingExtraError

        raise MissingExtraError(
            f"strati.{name}", f"needs {missing}; install it with: pip install 'strati[{_EXTRAS[missing]}]'"
        )

    absent.__name__ = absent.__qualname__ = name
    absent.__doc__ = f"Not available: needs the extra 'strati[{_EXTRAS[missing]}]'."
    return absent


if TYPE_CHECKING:  # what type checkers see; at run time the names above are imported when first used
    from strati.errors import BadInputError as BadInputError
    from strati.errors import MissingExtraError as MissingExtraError
    from strati.errors import StratiError as StratiError
    from strati.errors import UnsupportedError as UnsupportedError
    from strati.intervene.acting.factored import load_factored as load_factored
    from strati.intervene.apply import Applied as Applied
    from strati.intervene.apply import ApplyConfig as ApplyConfig
    from strati.intervene.apply import apply as apply
    from strati.intervene.judging.audit import Audit as Audit
    from strati.intervene.judging.audit import AuditConfig as AuditConfig
    from strati.intervene.judging.audit import audit as audit
    from strati.intervene.measuring.in_memory import dropped as dropped
    from strati.intervene.measuring.in_memory import intervened as intervened
    from strati.intervene.measuring.in_memory import pruned as pruned
    from strati.intervene.measuring.in_memory import quantised as quantised
    from strati.intervene.measuring.in_memory import scaled as scaled
    from strati.intervene.measuring.in_memory import swapped as swapped
    from strati.intervene.measuring.in_memory import truncated as truncated
    from strati.intervene.measuring.in_memory import zeroed as zeroed
    from strati.intervene.plan import Plan as Plan
    from strati.intervene.plan import PlanConfig as PlanConfig
    from strati.intervene.plan import plan as plan
    from strati.intervene.planning.config import StudyConfig as StudyConfig
    from strati.intervene.planning.settings import Intervention as Intervention
    from strati.intervene.planning.settings import adapt as adapt
    from strati.intervene.planning.settings import drop as drop
    from strati.intervene.planning.settings import intervention as intervention
    from strati.intervene.planning.settings import noise as noise
    from strati.intervene.planning.settings import noise_only as noise_only
    from strati.intervene.planning.settings import prune as prune
    from strati.intervene.planning.settings import quantise as quantise
    from strati.intervene.planning.settings import reinitialise as reinitialise
    from strati.intervene.planning.settings import remove_large as remove_large
    from strati.intervene.planning.settings import remove_quasi_null as remove_quasi_null
    from strati.intervene.planning.settings import remove_small as remove_small
    from strati.intervene.planning.settings import rerandomise as rerandomise
    from strati.intervene.planning.settings import scale as scale
    from strati.intervene.planning.settings import shuffle as shuffle
    from strati.intervene.planning.settings import signal_only as signal_only
    from strati.intervene.planning.settings import swap as swap
    from strati.intervene.planning.settings import truncate as truncate
    from strati.intervene.planning.settings import zero as zero
    from strati.intervene.study import Study as Study
    from strati.intervene.study import load_study as load_study
    from strati.intervene.study import study as study
    from strati.landscape.counts.count import Degeneracy as Degeneracy
    from strati.landscape.counts.count import degeneracy as degeneracy
    from strati.landscape.counts.result import DegeneracyConfig as DegeneracyConfig
    from strati.landscape.interactions.basis import BasisConfig as BasisConfig
    from strati.landscape.interactions.basis import interaction_basis as interaction_basis
    from strati.landscape.interactions.basis_result import InteractionBasis as InteractionBasis
    from strati.landscape.interactions.constrained import ConstrainedConfig as ConstrainedConfig
    from strati.landscape.interactions.constrained import ConstrainedLoss as ConstrainedLoss
    from strati.landscape.interactions.constrained import constrained_loss as constrained_loss
    from strati.landscape.interactions.graph import GraphConfig as GraphConfig
    from strati.landscape.interactions.graph import InteractionGraph as InteractionGraph
    from strati.landscape.interactions.graph import interaction_graph as interaction_graph
    from strati.landscape.interactions.modules import Modules as Modules
    from strati.landscape.interactions.modules import ModulesConfig as ModulesConfig
    from strati.landscape.interactions.modules import modules as modules
    from strati.landscape.interactions.sparsify import Sparsified as Sparsified
    from strati.landscape.interactions.sparsify import SparsifyConfig as SparsifyConfig
    from strati.landscape.interactions.sparsify import sparsify as sparsify
    from strati.landscape.interactions.surface import InteractionSurface as InteractionSurface
    from strati.landscape.interactions.surface import ModuleParameters as ModuleParameters
    from strati.landscape.interactions.surface import ModuleParametersConfig as ModuleParametersConfig
    from strati.landscape.interactions.surface import SurfaceConfig as SurfaceConfig
    from strati.landscape.interactions.surface import interaction_surface as interaction_surface
    from strati.landscape.interactions.surface import module_parameters as module_parameters
    from strati.landscape.sampling.config import LLCConfig as LLCConfig
    from strati.landscape.sampling.llc import LearningCoefficient as LearningCoefficient
    from strati.landscape.sampling.llc import learning_coefficient as learning_coefficient
    from strati.landscape.sampling.llc import llc as llc
    from strati.landscape.sampling.scales import EffectiveParameters as EffectiveParameters
    from strati.landscape.sampling.scales import effective_parameters as effective_parameters
    from strati.network.inspect import InspectConfig as InspectConfig
    from strati.network.inspect import Inspection as Inspection
    from strati.network.inspect import inspect as inspect
    from strati.network.layers import Layer as Layer
    from strati.network.module import ModuleConfig as ModuleConfig
    from strati.network.module import as_module as as_module
    from strati.network.open import Network as Network
    from strati.network.open import open as open
    from strati.papers.registry import ReproduceConfig as ReproduceConfig
    from strati.papers.registry import Reproduction as Reproduction
    from strati.papers.registry import reproduce as reproduce
    from strati.reassembly.config import ReassembleConfig as ReassembleConfig
    from strati.reassembly.reassemble import reassemble as reassemble
    from strati.reassembly.result import Reassembly as Reassembly
    from strati.report.page import write_report as write_report
    from strati.spectra.comparing.check import Check as Check
    from strati.spectra.comparing.check import CheckConfig as CheckConfig
    from strati.spectra.comparing.check import check as check
    from strati.spectra.comparing.compare import CompareConfig as CompareConfig
    from strati.spectra.comparing.compare import compare as compare
    from strati.spectra.comparing.results import Comparison as Comparison
    from strati.spectra.scan import Scan as Scan
    from strati.spectra.scan import ScanConfig as ScanConfig
    from strati.spectra.scan import scan as scan
    from strati.spectra.spectrum import Spectrum as Spectrum
    from strati.spectra.spectrum import SpectrumConfig as SpectrumConfig
    from strati.spectra.spectrum import spectrum as spectrum
    from strati.tracking.config import TrackConfig as TrackConfig
    from strati.tracking.track import Track as Track
    from strati.tracking.track import track as track
    from strati.tracking.tracker import Tracker as Tracker
