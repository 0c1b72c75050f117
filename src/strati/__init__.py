"""strati: stratigraphy for neural networks.

What each layer is (``scan``, ``spectrum``, ``compare``), whether the network needs it (``study``,
``audit``), how much of it is degenerate (``degeneracy``, ``llc``, ``interaction_basis``), and where it
belongs (``reassemble``). Names are imported when first used, so ``import strati`` costs nothing and
torch is loaded only by the functions that need it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from strati._version import __version__

_HOME = {
    # a checkpoint
    "open": "strati.network.open",
    "Network": "strati.network.open",
    "Layer": "strati.network.layers",
    "inspect": "strati.network.inspect",
    "as_module": "strati.network.module",
    # spectra
    "spectrum": "strati.spectra.spectrum",
    "Spectrum": "strati.spectra.spectrum",
    "scan": "strati.spectra.scan",
    "compare": "strati.spectra.comparing.compare",
    # interventions (torch)
    "study": "strati.intervene.study",
    "Study": "strati.intervene.study",
    "StudyConfig": "strati.intervene.planning.config",
    "load_study": "strati.intervene.study",
    "audit": "strati.intervene.judging.audit",
    "Audit": "strati.intervene.judging.audit",
    "AuditConfig": "strati.intervene.judging.audit",
    # degeneracy (torch)
    "llc": "strati.landscape.sampling.llc",
    "learning_coefficient": "strati.landscape.sampling.llc",
    "effective_parameters": "strati.landscape.sampling.scales",
    "degeneracy": "strati.landscape.counts.count",
    "interaction_basis": "strati.landscape.interactions.basis",
    "interaction_graph": "strati.landscape.interactions.graph",
    "modules": "strati.landscape.interactions.modules",
    "sparsify": "strati.landscape.interactions.sparsify",
    # reassembly
    "reassemble": "strati.reassembly.reassemble",
    "ReassembleConfig": "strati.reassembly.config",
    # errors
    "StratiError": "strati.errors",
}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'strati' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


if TYPE_CHECKING:  # what type checkers see; at run time the names above are imported when first used
    from strati.errors import StratiError as StratiError
    from strati.intervene.judging.audit import Audit as Audit
    from strati.intervene.judging.audit import AuditConfig as AuditConfig
    from strati.intervene.judging.audit import audit as audit
    from strati.intervene.planning.config import StudyConfig as StudyConfig
    from strati.intervene.study import Study as Study
    from strati.intervene.study import load_study as load_study
    from strati.intervene.study import study as study
    from strati.landscape.counts.count import degeneracy as degeneracy
    from strati.landscape.interactions.basis import interaction_basis as interaction_basis
    from strati.landscape.interactions.graph import interaction_graph as interaction_graph
    from strati.landscape.interactions.modules import modules as modules
    from strati.landscape.interactions.sparsify import sparsify as sparsify
    from strati.landscape.sampling.llc import learning_coefficient as learning_coefficient
    from strati.landscape.sampling.llc import llc as llc
    from strati.landscape.sampling.scales import effective_parameters as effective_parameters
    from strati.network.inspect import inspect as inspect
    from strati.network.layers import Layer as Layer
    from strati.network.module import as_module as as_module
    from strati.network.open import Network as Network
    from strati.network.open import open as open
    from strati.reassembly.config import ReassembleConfig as ReassembleConfig
    from strati.reassembly.reassemble import reassemble as reassemble
    from strati.spectra.comparing.compare import compare as compare
    from strati.spectra.scan import scan as scan
    from strati.spectra.spectrum import Spectrum as Spectrum
    from strati.spectra.spectrum import spectrum as spectrum
