"""JSON forms of results whose fields differ from their dataclass; ``tools/write_schemas.py`` reads them.

``Result.payload`` returns one of these, so that the type checker compares what is written with what the JSON Schema
promises. A result without an entry here writes the fields of its dataclass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from strati.core.results import Flag
    from strati.interventions.audit.audit import AuditConfig, MeanRow, MetricRow
    from strati.interventions.audit.orders import OrderRow
    from strati.interventions.audit.verdicts import Verdict
    from strati.io.roles import Role
    from strati.landscape.basis.modules import FoundModule
    from strati.landscape.basis.result import Kind
    from strati.reassembly.residual.pairing import Pairing
    from strati.spectra.verdicts import LayerState, Phase


class NetworkFields(TypedDict):
    path: str
    format: str
    parameters: int
    tensors: int


class LayerFields(TypedDict):
    """Identity of a layer, in ``inspect`` and ``scan``."""

    name: str
    role: Role
    block: int | None
    kind: str
    rows: int
    cols: int
    aspect: float | None
    parameters: int
    view: str
    warnings: Sequence[Flag]
    expert: NotRequired[int]
    adapter: NotRequired[Mapping[str, Any]]
    quantisation: NotRequired[Mapping[str, Any]]


class InspectedLayer(LayerFields):
    bytes: int
    matrices: int
    dtype: str


class ScannedLayer(LayerFields):
    hard_rank: int | None
    stable_rank: float | None
    entropy: float | None
    frobenius_norm: float | None
    spectral_norm: float | None
    alpha: float | None
    alpha_stderr: float | None
    xmin: float | None
    ks_distance: float | None
    tail_size: int | None
    alpha_weighted: float | None
    log_alpha_norm: float | None
    mu: float | None
    tail_pvalue: NotRequired[float | None]
    tail_alternatives: NotRequired[Mapping[str, TailAlternative] | None]
    mp_sigma: float | None
    mp_lambda_minus: float | None
    mp_lambda_plus: float | None
    mp_soft_rank: float | None
    mp_ks_distance: float | None
    spikes: int | None
    quasi_null: int | None
    state: LayerState
    phase: Phase | None
    phase_evidence: PhaseEvidence | None
    eigenvalues: NotRequired[Sequence[float]]
    traps: NotRequired[float | None]
    traps_stderr: NotRequired[float | None]
    trap_size: NotRequired[float | None]
    erg_size: NotRequired[int | None]
    erg_gap: NotRequired[int | None]
    alpha_hill: NotRequired[float | None]
    alpha_hill_stderr: NotRequired[float | None]
    alpha_farms: NotRequired[float | None]
    alpha_farms_stderr: NotRequired[float | None]
    tpl_alpha: NotRequired[float | None]
    tpl_cutoff: NotRequired[float | None]
    tpl_pvalue: NotRequired[float | None]
    localisation: NotRequired[float | None]
    localisation_pvalue: NotRequired[float | None]
    level_spacing: NotRequired[float | None]
    level_spacing_stderr: NotRequired[float | None]
    head: NotRequired[int]
    width: NotRequired[int]
    spikes_pvalue: NotRequired[float]
    ambiguous: NotRequired[Sequence[Sequence[int]]]
    copying: NotRequired[float | None]
    copying_pvalue: NotRequired[float | None]
    positional: NotRequired[float | None]
    positional_offset: NotRequired[int | None]


class TailAlternative(TypedDict):
    ratio: float | None
    pvalue: float | None
    parameters: Mapping[str, float | None]


class PhaseEvidence(TypedDict):
    reason: str
    largest_over_edge: float | None
    tracy_widom_edge: float | None
    level: float | None
    bulk_ks_noise_limit: float | None
    gap_decades: float | None
    share_below_gap: float | None
    entries_mu: float | None
    edge_widening: float | None
    structure: Sequence[str]


class Failure(TypedDict):
    reason: str
    count: int


class AuditFields(TypedDict):
    study: AuditedStudy
    metrics: Sequence[MetricRow]
    means: Sequence[MeanRow]
    orders: Sequence[OrderRow]
    failed: int
    layers: Sequence[Mapping[str, Any]]
    verdicts: Sequence[Verdict]
    performance: Mapping[str, Any]
    thresholds: AuditConfig
    points: Sequence[Mapping[str, Any]]


class AuditedStudy(TypedDict):
    name: str
    store: str | None
    units: int


class PartsFields(TypedDict):
    parts: Sequence[Mapping[str, Any]]
    warnings: Sequence[Flag]


ScaleFields = TypedDict(
    "ScaleFields",
    {
        "epsilon": float,
        "lambda": float | None,
        "stderr": float | None,
        "effective": float | None,
        "nbeta": float,
        "gauss_newton": float | None,
        "gap": float | None,
        "reason": str | None,
    },
)
"""One row of ``scales``; ``lambda`` is a keyword of Python."""


class ScalesFields(TypedDict):
    parameters: int
    gamma: float
    scales: Sequence[ScaleFields]


class BasisFields(TypedDict):
    kind: Kind
    centred: bool
    tolerance: float
    epsilon: float
    data: int
    seed: int
    layers: Sequence[BasisLayerFields]
    edges: Sequence[Mapping[str, Any]]
    modules: Sequence[FoundModule]
    warnings: Sequence[Flag]


class BasisLayerFields(TypedDict):
    name: str
    width: int
    activation_rank: int
    directions: int
    eigenvalues: NDArray[Any]
    ambiguous: Sequence[Sequence[int]]
    error: float | None
    round_trip: float | None


class GraphFields(BasisFields):
    edges_total: int
    sparsity: Sequence[Mapping[str, Any]]


class ModulesFields(GraphFields):
    unattached: Sequence[tuple[int, int]]
    modularity: Mapping[str, Any]
    ablation: NotRequired[Any]


class SparsifyFields(TypedDict):
    kind: str
    data: int
    weights: int
    zeros_before: int
    zeros_after: int
    output_change: float
    layers: Sequence[Mapping[str, Any]]
    edges: Sequence[Any]
    modules: Sequence[Any]
    warnings: Sequence[Flag]


class ReassembleFields(TypedDict):
    permutation: Sequence[int]
    mse: float
    exact: bool
    relative_mse: float | None
    network: Mapping[str, Any]
    pairing: Pairing
    unique: bool | None
    precision: float | None
    least_margin: float | None
    interchangeable: Sequence[Any]
    joint_search: bool
    seed_order: SeedOrderFields
    rounds: Sequence[Any]
    seconds: Mapping[str, float]
    score_matrix: NDArray[Any]
    in_pieces: Sequence[int]
    out_pieces: Sequence[int]
    progression: Sequence[Any]
    warnings: Sequence[Flag]


class SeedOrderFields(TypedDict):
    method: str
    mse: float


class IdentifyFields(TypedDict):
    piece: str
    role: str
    block: int | None
    name: str
    likeness: float
    margin: float
    sure: bool
    candidates: Sequence[Any]


class ShuffleFields(TypedDict):
    blocks: Sequence[Mapping[str, int]]
    vectors: Sequence[Mapping[str, int]]
    embedding: int | None
    head: int | None
    others: Mapping[str, int]
    drop: Mapping[str, Any]
