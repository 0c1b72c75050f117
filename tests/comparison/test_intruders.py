"""Intruder dimensions: leading directions of a fine-tune that its base does not have."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import strati
from strati.comparison.update import damp_intruders, update_between


def planted(seed: int, shape: tuple[int, int], size: float) -> tuple[np.ndarray, np.ndarray]:
    """A matrix, the same with one strong new direction."""
    rng = np.random.default_rng(seed)
    base = rng.normal(size=shape)
    left, right = (x / np.linalg.norm(x) for x in (rng.normal(size=shape[0]), rng.normal(size=shape[1])))
    return base, base + size * np.outer(left, right)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 999), shape=st.sampled_from([(80, 60), (60, 80), (100, 100)]))
def test_a_planted_direction_is_found_and_damped(seed: int, shape: tuple[int, int]) -> None:
    base, tuned = planted(seed, shape, 45.0)
    assert [intruder.number for intruder in update_between(base, tuned).intruders] == [1]
    u, s, v = np.linalg.svd(tuned, full_matrices=False)
    damped = damp_intruders(base, tuned, 0.25)
    np.testing.assert_allclose(damped, tuned - 0.75 * s[0] * np.outer(u[:, 0], v[0]), atol=1e-9)
    np.testing.assert_array_equal(damp_intruders(base, tuned, 1.0), tuned)


@pytest.mark.parametrize("size", [0.03, 0.1, 0.3, 0.6])
def test_random_updates_have_none(size: float) -> None:
    """50 Gaussian updates of each size: the bound allows no intruder."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        base = rng.normal(size=(48, 40)) @ np.diag(1 / np.arange(1, 41) ** 0.5)
        step = rng.normal(size=base.shape)
        step *= size * np.linalg.norm(base) / np.linalg.norm(step)
        assert update_between(base, base + step).intruders == ()


def test_the_intervention_restores_the_base_of_a_planted_direction() -> None:
    torch.manual_seed(0)
    base, tuned = planted(0, (60, 40), 45.0)
    models = []
    for weight in (base, tuned):
        model = torch.nn.Sequential(torch.nn.Linear(40, 60), torch.nn.Tanh(), torch.nn.Linear(60, 3))
        with torch.no_grad():
            model[0].weight.copy_(torch.tensor(weight))
        models.append(model)
    models[1][2].load_state_dict(models[0][2].state_dict())
    x = torch.randn(200, 40)
    study = strati.study(
        models[1],
        data=(x, models[0](x).argmax(1)),
        performance="loss",
        layers="0",
        interventions=strati.interventions.damp_intruders(models[0], factor=[0.0, 1.0]),
        spectral=False,
    )
    losses = {row["setting"]: row["performance"] for row in study.rows}
    intact = study.rows[0]["intact_performance"]
    assert losses["factor=1"] == pytest.approx(intact, rel=1e-5)
    assert losses["factor=0"] < intact
