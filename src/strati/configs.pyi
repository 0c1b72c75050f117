from .comparison.check import CheckConfig as CheckConfig
from .comparison.compare import CompareConfig as CompareConfig
from .comparison.lineage import LineageConfig as LineageConfig
from .interventions.audit.audit import AuditConfig as AuditConfig
from .interventions.compress.apply import ApplyConfig as ApplyConfig
from .interventions.compress.plan import PlanConfig as PlanConfig
from .interventions.study_config import StudyConfig as StudyConfig
from .io.inspection import InspectConfig as InspectConfig
from .io.to_module import ModuleConfig as ModuleConfig
from .landscape.basis.basis import BasisConfig as BasisConfig
from .landscape.basis.modules import ModulesConfig as ModulesConfig
from .landscape.basis.sparsify import SparsifyConfig as SparsifyConfig
from .landscape.counts.result import DegeneracyConfig as DegeneracyConfig
from .landscape.curvature import CurvatureConfig as CurvatureConfig
from .landscape.llc.config import LLCConfig as LLCConfig
from .reassembly.reassemble import ReassembleConfig as ReassembleConfig
from .spectra.scan import ScanConfig as ScanConfig
from .spectra.spectrum import SpectrumConfig as SpectrumConfig
from .tracking.config import TrackConfig as TrackConfig

__all__: list[str]
