"""Section 5's experiments: small, but on real networks and with their exceptions known exactly."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from strati_reproductions.degeneracy.bases import _purity, _train
from strati_reproductions.degeneracy.constrained import constrained_loss
from strati_reproductions.degeneracy.modular import (
    _concatenated,
    _inputs,
    _Joined,
    _module,
    _volume,
    section_five,
)


def test_section_five(tmp_path):
    ticks = []
    found = section_five(quick=True, seed=1, folder=tmp_path, tick=ticks.append)
    rows = {row.what: row for row in found.rows}
    assert len(ticks) == 4
    assert rows["disjoint modules: free directions add up (5.2.1)"].ours == "10 of 10"
    # V(w) = sqrt(eps)/w, counted in n = 100,000 draws: ln V is off by sqrt((1/V - 1)/n), at most 0.0315 here
    full = np.sqrt((1 / 1e-2 - 1) / 100_000)
    for row in (row for row in found.rows if "eq. 34" in row.what):
        volume = 1e-2 ** float(row.theory)
        error = (np.sqrt((1 / volume - 1) / 100_000) + float(row.theory) * full) / -np.log(1e-2)
        assert error < 0.014
        assert row.ours == pytest.approx(row.theory, abs=3.5 * error)
    # two links leave a disc in a square, pi/4 of what eq. 35 says: its ratio is 1 + ln(4/pi) / (2 ln r)
    for row in (row for row in found.rows if "eq. 35" in row.what):
        ratio = float(row.what.split(" links of ")[1].split()[0])
        exact = 1 + np.log(4 / np.pi) / (2 * np.log(ratio))
        volumes = np.pi / 4 / ratio**2, 1 / ratio**2
        error = sum(np.sqrt((1 / v - 1) / 100_000) for v in volumes) * exact / (2 * np.log(ratio))
        assert error < 0.03
        assert row.ours == pytest.approx(exact, abs=3.5 * error)


def test_the_two_directions_eq_31_misses_are_exactly_free():
    first, second = _module(0, 0, 1, outputs=3), _module(0, 0, 2, outputs=2, inputs=4)
    joint = _Joined(first, second)
    parameters = dict(joint.named_parameters())
    loss = constrained_loss(joint, _concatenated(_inputs(0, 0, 1), _inputs(0, 0, 2)))
    whole = torch.func.jacrev(lambda theta: loss.features(theta, loss.x))(loss.theta)
    jacobian = whole.reshape(-1, loss.theta.numel()).numpy()

    def direction(**parts):
        zero = {name: torch.zeros_like(value) for name, value in parameters.items()}
        zero |= {name.replace("__", "."): value for name, value in parts.items()}
        return np.concatenate([zero[name].detach().numpy().ravel() for name in parameters])

    node = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)
    shift = direction(first__2__bias=node, second__0__bias=-joint.link)
    scale = direction(
        first__2__weight=parameters["first.2.weight"] * node[:, None],
        first__2__bias=parameters["first.2.bias"] * node,
        second__0__weight=parameters["second.0.weight"],
        second__0__bias=parameters["second.0.bias"],
        second__1__weight=-parameters["second.1.weight"],
    )
    for free in (shift, scale):
        assert np.abs(free).max() > 0.1
        assert np.abs(jacobian @ free).max() < 1e-12


def test_volume_of_one_link_is_known():
    epsilon, weight = 1e-2, 0.5
    found = _volume([weight], epsilon, 100_000, seed=0)
    assert found == pytest.approx(epsilon**0.5 / weight, rel=0.02)


def test_purity_of_fourier_modes():
    t = np.arange(11)
    mode = np.cos(2 * np.pi * 3 * t / 11)
    assert _purity(np.concatenate([mode, 2 * mode])[None], 11)[0] == pytest.approx(1.0)
    noise = np.random.default_rng(0).normal(size=(200, 22))
    assert _purity(noise, 11).mean() < 0.6


@pytest.mark.long
def test_modular_addition_generalises(tmp_path):
    net, x, *_, accuracy, _ = _train(31, 128, 0, tmp_path)
    assert accuracy > 0.9
    again, *_ = _train(31, 128, 0, tmp_path)  # the second time the weights are there
    assert torch.equal(net(x), again(x))
