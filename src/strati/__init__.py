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
    # spectra
    "spectrum": "strati.spectra.spectrum",
    "Spectrum": "strati.spectra.spectrum",
    "scan": "strati.spectra.scan",
    "Scan": "strati.spectra.scan",
    "ScanConfig": "strati.spectra.scan",
    "compare": "strati.spectra.comparing.compare",
    "Comparison": "strati.spectra.comparing.results",
    "CompareConfig": "strati.spectra.comparing.compare",
    # interventions (torch)
    "study": "strati.intervene.study",
    "Study": "strati.intervene.study",
    "load_study": "strati.intervene.study",
    "StudyConfig": "strati.intervene.planning.config",
    "audit": "strati.intervene.judging.audit",
    "Audit": "strati.intervene.judging.audit",
    "AuditConfig": "strati.intervene.judging.audit",
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
    "sparsify": "strati.landscape.interactions.sparsify",
    "Sparsified": "strati.landscape.interactions.sparsify",
    # reassembly
    "reassemble": "strati.reassembly.reassemble",
    "Reassembly": "strati.reassembly.result",
    "ReassembleConfig": "strati.reassembly.config",
    # papers and pages
    "reproduce": "strati.papers.registry",
    "Reproduction": "strati.papers.registry",
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
    from strati.intervene.judging.audit import Audit as Audit
    from strati.intervene.judging.audit import AuditConfig as AuditConfig
    from strati.intervene.judging.audit import audit as audit
    from strati.intervene.planning.config import StudyConfig as StudyConfig
    from strati.intervene.study import Study as Study
    from strati.intervene.study import load_study as load_study
    from strati.intervene.study import study as study
    from strati.landscape.counts.count import Degeneracy as Degeneracy
    from strati.landscape.counts.count import degeneracy as degeneracy
    from strati.landscape.interactions.basis import interaction_basis as interaction_basis
    from strati.landscape.interactions.basis_result import InteractionBasis as InteractionBasis
    from strati.landscape.interactions.graph import InteractionGraph as InteractionGraph
    from strati.landscape.interactions.graph import interaction_graph as interaction_graph
    from strati.landscape.interactions.modules import Modules as Modules
    from strati.landscape.interactions.modules import modules as modules
    from strati.landscape.interactions.sparsify import Sparsified as Sparsified
    from strati.landscape.interactions.sparsify import sparsify as sparsify
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
    from strati.network.module import as_module as as_module
    from strati.network.open import Network as Network
    from strati.network.open import open as open
    from strati.papers.registry import Reproduction as Reproduction
    from strati.papers.registry import reproduce as reproduce
    from strati.reassembly.config import ReassembleConfig as ReassembleConfig
    from strati.reassembly.reassemble import reassemble as reassemble
    from strati.reassembly.result import Reassembly as Reassembly
    from strati.report.page import write_report as write_report
    from strati.spectra.comparing.compare import CompareConfig as CompareConfig
    from strati.spectra.comparing.compare import compare as compare
    from strati.spectra.comparing.results import Comparison as Comparison
    from strati.spectra.scan import Scan as Scan
    from strati.spectra.scan import ScanConfig as ScanConfig
    from strati.spectra.scan import scan as scan
    from strati.spectra.spectrum import Spectrum as Spectrum
    from strati.spectra.spectrum import spectrum as spectrum
