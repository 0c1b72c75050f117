"""Record what weightwatcher 0.7.7 says of the cases, in an environment that has it: python make_weightwatcher.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import weightwatcher

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from cases import CASES, make  # noqa: E402

FIELDS = ("alpha", "xmin", "D", "num_pl_spikes", "stable_rank", "entropy", "norm", "spectral_norm")


def analysed(name: str) -> dict[str, float]:
    """What weightwatcher says of one case."""
    W = make(name)
    layer = torch.nn.Linear(W.shape[1], W.shape[0], bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(W))
    details = weightwatcher.WeightWatcher(model=torch.nn.Sequential(layer)).analyze()
    return {
        field: float(details[field if field in details else f"matrix_{field}"].iloc[0]) for field in FIELDS
    }


def main() -> None:
    rows = {name: analysed(name) for name in CASES}
    # Its own threshold on eigenvalues is absolute: at this scale alpha comes out as -1.
    W = make("gaussian-300x100") * 1e-4
    layer = torch.nn.Linear(W.shape[1], W.shape[0], bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(W))
    small = weightwatcher.WeightWatcher(model=torch.nn.Sequential(layer)).analyze()
    record = {
        "weightwatcher": weightwatcher.__version__,
        "cases": rows,
        "scaled-by-1e-4": {"alpha": float(small["alpha"].iloc[0]), "warning": str(small["warning"].iloc[0])},
    }
    (HERE / "weightwatcher.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
