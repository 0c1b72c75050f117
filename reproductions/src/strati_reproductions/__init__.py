"""Each paper's tables and figures, compared with our numbers, and the networks and data that they need.

Functions that serve one paper only are importable from here: :func:`reproduce`; the interaction surface of modules and
their parameters with it held fixed (degeneracy-in-the-loss-landscape, section 5); the ranking of dropped-neural-net.
Names are imported when first used.
"""

from __future__ import annotations

import importlib
from typing import Any

_MODULE_OF = {
    "ENTRIES": "registry",
    "ReproduceConfig": "registry",
    "Reproduction": "rows",
    "Row": "rows",
    "reproduce": "registry",
    "ConstrainedConfig": "degeneracy.constrained",
    "ConstrainedLoss": "degeneracy.constrained",
    "constrained_loss": "degeneracy.constrained",
    "InteractionSurface": "degeneracy.surface",
    "ModuleParameters": "degeneracy.surface",
    "ModuleParametersConfig": "degeneracy.surface",
    "SurfaceConfig": "degeneracy.surface",
    "edge_ablation_curve": "degeneracy.edge_ablation",
    "interaction_surface": "degeneracy.surface",
    "module_parameters": "degeneracy.surface",
    "bradley_terry": "dropped_net.ranking",
}

__all__ = list(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
