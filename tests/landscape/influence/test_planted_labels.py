"""Wrong labels planted into the embedded digits stand out by their self-influence."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

import strati

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))
from bench_influence import area, row_gradients, trained, wrong_labels


@pytest.mark.slow
def test_self_influence_finds_wrong_labels_as_well_as_loss_and_gradient():
    """12 of 120 labels are wrong and the network has fitted most of them; 0.9 is far above chance (0.5 +- 0.09)."""
    x, y, wrong = wrong_labels(120)
    model = trained(x, y, 200)
    result = strati.influence(model, "cross_entropy", (x, y), chains=8, draws=60, seed=0)
    with torch.no_grad():
        losses = functional.cross_entropy(model(x), y, reduction="none").numpy()
    norms = row_gradients(model, x, y).norm(dim=1).numpy()
    own = area(np.nan_to_num(np.diag(result.values)), wrong)
    assert own > 0.9
    assert own > max(area(losses, wrong), area(norms, wrong)) - 0.05
