from . import configs, embedded, interventions, schemas
from ._version import __version__ as __version__
from .comparison.check import Check, check
from .comparison.compare import compare
from .comparison.extract_adapter import extract_adapter
from .comparison.lineage import lineage
from .comparison.lineage_results import Lineage
from .comparison.results import Comparison
from .core.errors import BadInputError, MissingExtraError, StratiError, UnsupportedError
from .interventions.audit.audit import Audit, audit
from .interventions.compress.apply import Applied, apply
from .interventions.compress.factored import load_factored
from .interventions.compress.plan import Plan, plan
from .interventions.study import Study, load_study, study
from .interventions.study_config import StudyConfig
from .io.inspection import inspect
from .io.network import Network, open
from .io.to_module import as_module
from .landscape.basis.basis import interaction_basis
from .landscape.basis.graph import InteractionGraph, interaction_graph
from .landscape.basis.modules import Modules, modules
from .landscape.basis.result import InteractionBasis
from .landscape.basis.sparsify import sparsify
from .landscape.counts.degeneracy import Degeneracy, degeneracy
from .landscape.curvature import Curvature, curvature
from .landscape.influence.influence import influence
from .landscape.influence.result import Influence
from .landscape.llc.config import LLCConfig
from .landscape.llc.llc import LearningCoefficient, learning_coefficient, llc
from .landscape.llc.scales import EffectiveParameters, effective_parameters
from .reassembly.reassemble import reassemble
from .reassembly.residual.result import Reassembly
from .report.page import write_report
from .spectra.scan import Scan, scan
from .spectra.spectrum import Spectrum, spectrum
from .tracking.result import Track
from .tracking.track import Tracker, track

__all__ = [
    "Applied",
    "Audit",
    "BadInputError",
    "Check",
    "Comparison",
    "Curvature",
    "Degeneracy",
    "EffectiveParameters",
    "Influence",
    "InteractionBasis",
    "InteractionGraph",
    "LLCConfig",
    "LearningCoefficient",
    "Lineage",
    "MissingExtraError",
    "Modules",
    "Network",
    "Plan",
    "Reassembly",
    "Scan",
    "Spectrum",
    "StratiError",
    "Study",
    "StudyConfig",
    "Track",
    "Tracker",
    "UnsupportedError",
    "__version__",
    "apply",
    "as_module",
    "audit",
    "check",
    "compare",
    "configs",
    "curvature",
    "degeneracy",
    "effective_parameters",
    "embedded",
    "extract_adapter",
    "influence",
    "inspect",
    "interaction_basis",
    "interaction_graph",
    "interventions",
    "learning_coefficient",
    "lineage",
    "llc",
    "load_factored",
    "load_study",
    "modules",
    "open",
    "plan",
    "reassemble",
    "scan",
    "schemas",
    "sparsify",
    "spectrum",
    "study",
    "track",
    "write_report",
]
