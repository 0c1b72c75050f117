"""Deciles of singular values: removed exactly, put back exactly, and overlaps that are 1 for isotropic inputs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from strati_reproductions.small_singular_values import deciles, without_decile


def test_removing_a_decile_sets_its_singular_values_to_zero() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(30, 40, bias=False)
    before = layer.weight.detach().clone()
    directions = {"a": torch.linalg.svd(before, full_matrices=False).Vh}
    values = torch.linalg.svdvals(before)
    for decile in range(10):
        with without_decile({"a": layer}, directions, ["a"], decile):
            left = torch.linalg.svdvals(layer.weight.detach())
        expected = np.delete(values.numpy(), deciles(np.arange(30))[decile])
        np.testing.assert_allclose(left[:-3], expected, rtol=1e-4)
        assert float(left[-3:].max()) == pytest.approx(0, abs=1e-5)
        assert torch.equal(layer.weight, before)


def test_weights_are_put_back_after_an_error() -> None:
    layer = nn.Linear(12, 12, bias=False)
    before = layer.weight.detach().clone()
    directions = {"a": torch.linalg.svd(before).Vh}
    with pytest.raises(RuntimeError), without_decile({"a": layer}, directions, ["a"], 0):
        raise RuntimeError
    assert torch.equal(layer.weight, before)
