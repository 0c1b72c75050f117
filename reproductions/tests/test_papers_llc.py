"""What the studies of learning coefficients state, on fewer networks than the command takes."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn

from strati.cli.main import strati
from strati.core.errors import UnsupportedError
from strati.core.results import silent
from strati.landscape.objective import behavioural_loss, exact_hessian
from strati_reproductions.degeneracy.learning_coefficients import (
    _behavioural_above_training,
    _factorised,
    _hidden_share,
    factorised_hessian,
)


def test_weight_decay_empties_directions_that_no_datum_has():
    """By plain gradients: what the data do not see only decays."""
    kept, emptied = (_hidden_share(1, "SGD", decay) for decay in (0.0, 0.01))
    assert emptied < 1e-5 < 0.05 < kept


@pytest.mark.slow
def test_behavioural_loss_has_no_lower_coefficient_than_the_training_loss():
    """Section 2.2.1."""
    training, behaviour, blind, seeing = (float(r.ours) for r in _behavioural_above_training(0, silent))
    assert behaviour > training - 0.05 and abs(training - 0.5) < 0.05
    assert abs(blind - 0.5) < 0.05 and abs(seeing - 2.0) < 0.05


def test_factorised_hessian_is_exact_for_one_linear_layer_and_one_datum():
    model = nn.Sequential(nn.Linear(3, 2)).double()
    x = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    loss = behavioural_loss(model, x)
    assert torch.allclose(factorised_hessian(model, x), exact_hessian(loss, loss.flat.theta), atol=1e-10)
    deep = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    loss = behavioural_loss(deep, x[:1])
    whole, blocks = exact_hessian(loss, loss.flat.theta), factorised_hessian(deep, x[:1])
    assert torch.allclose(whole[:16, :16], blocks[:16, :16], atol=1e-10)
    assert torch.allclose(whole[16:, 16:], blocks[16:, 16:], atol=1e-10)
    with pytest.raises(UnsupportedError):
        factorised_hessian(nn.Sequential(nn.ReLU()), x)


def test_factorised_hessian_is_worse_between_layers_than_within():
    whole, within, *_ = (float(r.ours) for r in _factorised(0, 1, silent))
    assert 0 < within < whole < 1


def test_sampling_at_the_command_line_looks_at_the_rows_asked_for(tmp_path):
    rng = np.random.default_rng(0)
    weights = {"0.weight": rng.normal(size=(3, 2)), "2.weight": rng.normal(size=(1, 3))}
    np.savez(tmp_path / "net.npz", **{k: v.astype(np.float32) for k, v in weights.items()})
    np.savez(tmp_path / "data.npz", x=rng.normal(size=(60, 2)).astype(np.float32))
    target = tmp_path / "found.json"
    words = ["degeneracy", str(tmp_path / "net.npz"), "--data", str(tmp_path / "data.npz"), "--llc"]
    done = CliRunner().invoke(strati, [*words, "--sample-rows", "40", "-q", "--json", str(target)])
    assert done.exit_code == 0, done.output
    found = json.loads(target.read_text())["llc"]
    assert abs(found["nbeta"] - 40 / np.log(40)) < 1e-9
    assert found["reason"] if found["estimate"] is None else 0 < found["estimate"] <= 4.5  # nine weights
