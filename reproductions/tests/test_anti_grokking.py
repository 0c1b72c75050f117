"""Long trainings: steps are those of AdamW on the whole network, stopping changes nothing, events are dated right."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from strati.core.results import silent
from strati_reproductions.anti_grokking.anti_grokking import (
    Events,
    Measurement,
    events,
    fall_step,
    first_step,
    measure_run,
    traps,
)
from strati_reproductions.anti_grokking.training import LongRun, Recipe
from strati_reproductions.datasets import Digits

RECIPE = Recipe(seed=3, steps=40, scale=2.0, decay=0.01, images=20, batch=10, every=10)


@pytest.fixture
def digits() -> Digits:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(60, 30, generator=generator)
    x[:, ::4] = 0.0  # pixels that no image uses
    y = torch.arange(60) % 10
    return Digits(x[:40], y[:40], x[40:], y[40:])


def test_steps_are_those_of_adamw_on_the_whole_network(digits: Digits, tmp_path: Path) -> None:
    run = LongRun(RECIPE, digits, tmp_path)
    model = nn.Sequential(nn.Linear(30, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10))
    initial = run.network()
    for number, linear in enumerate((model[0], model[2], model[4]), 1):
        linear.weight.data = torch.from_numpy(initial[f"FC{number}"].copy()).T
        linear.bias.data = torch.from_numpy(initial[f"bias{number}"].copy())
    optimiser = torch.optim.AdamW(model.parameters(), lr=RECIPE.rate, weight_decay=RECIPE.decay)
    for rows in islice(run._batches(2), 2):
        optimiser.zero_grad()
        targets = functional.one_hot(torch.from_numpy(run.labels[rows]), 10).float()
        functional.mse_loss(model(torch.from_numpy(run.images[rows])), targets).backward()
        optimiser.step()
    run.advance(2)
    trained = run.network()
    for number, linear in enumerate((model[0], model[2], model[4]), 1):
        weight, bias = linear.weight.detach().T.numpy(), linear.bias.detach().numpy()
        np.testing.assert_allclose(trained[f"FC{number}"], weight, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(trained[f"bias{number}"], bias, rtol=1e-5, atol=1e-6)


def test_a_stopped_run_continues_as_if_it_had_not_been(digits: Digits, tmp_path: Path) -> None:
    whole = LongRun(RECIPE, digits, tmp_path / "whole")
    whole.advance(40)
    for last in (7, 23, 40):
        parts = LongRun(RECIPE, digits, tmp_path / "parts")
        parts.advance(last)
        measure_run(parts, digits, silent)
    assert parts.step == whole.step == 40
    assert list(parts.snapshots()) == list(whole.snapshots())
    assert measure_run(parts, digits, silent).points == measure_run(whole, digits, silent).points
    for ours, theirs in zip(parts.network().values(), whole.network().values(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([(60, 40), (40, 60), (80, 80)]))
def test_noise_has_no_trap(seed: int, shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(seed)
    for entries in (rng.normal(size=shape), rng.uniform(-1, 1, size=shape).astype(np.float32)):
        assert traps(entries, rng)[0] == 0


@pytest.mark.parametrize("shape", [(120, 60), (60, 120)])
def test_a_shifted_mean_and_a_large_entry_are_traps(shape: tuple[int, int]) -> None:
    """A mean of m gives an eigenvalue of m^2 rows columns, an entry of size a one of a^2, in any order of entries."""
    rng = np.random.default_rng(0)
    noise = rng.normal(size=shape)
    count, size = traps(noise + 0.5, rng)
    edge = (120**0.5 + 60**0.5) ** 2
    assert count == 1 and size == pytest.approx(0.25 * 7200 / edge, rel=0.25)
    spiked = noise.copy()
    spiked.flat[:3] = 60.0
    assert traps(spiked, rng)[0] == 3


def _measured(
    accuracies: list[float], alphas: list[float] | None = None, counts: list[float] | None = None
) -> list[Measurement]:
    alphas, counts = alphas or [3.0] * len(accuracies), counts or [0.0] * len(accuracies)
    lines = enumerate(zip(accuracies, alphas, counts, strict=True))
    return [Measurement(10 * k, 0.0, 1.0, a, alpha, 9.0, n, 0.0, 1.0, 1.0) for k, (a, alpha, n) in lines]


def test_events_are_dated() -> None:
    accuracies = [0.9] * 40 + [0.7] * 20
    alphas = [3.0] * 20 + [1.5] + [3.0] * 5 + [1.9] * 34  # one value below 2 is no event
    counts = [0.0] * 58 + [1.0] * 2  # two are none either
    assert events(_measured(accuracies, alphas, counts)) == Events(fits=0, alpha=260, trap=None, fall=450)
    assert first_step(_measured([0.1] * 3), lambda m: m.test_accuracy < 0.2) == 0
    assert fall_step(_measured([0.1] * 5)) is None
