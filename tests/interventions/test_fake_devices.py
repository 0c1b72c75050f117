"""Interventions and batches on another device: on fake CUDA tensors, which refuse any mix of devices."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fake_cuda import fake_cuda
from torch import nn

from strati.evaluate.batches import Batch
from strati.evaluate.models import call, device_of
from strati.interventions.targets import Change, changed, find_targets


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).requires_grad_(False)


def test_the_fake_device_refuses_a_mix():
    with fake_cuda() as gpu, pytest.raises(RuntimeError, match="device"):
        gpu.module(network())(torch.zeros(5, 3))


def test_models_run_on_batches_where_they_are():
    with fake_cuda() as gpu:
        model = gpu.module(network())
        batch = Batch({"input": gpu.tensor(torch.zeros(5, 3))}, gpu.tensor(torch.arange(5)))
        assert call(model, batch.x).device == device_of(model) == torch.device("cuda", 0)
        assert call(model, batch.x).shape == (5, 2)


def test_an_intervention_changes_a_layer_where_it_is():
    """On the meta device: torch without CUDA cannot copy between fake CUDA tensors."""
    model = network().to("meta")
    target = find_targets(model)[0]
    change = Change("rerandomise", 0, np.zeros((4, 3), np.float32), np.zeros(4, np.float32), "zero")
    with changed(model, target, change):
        assert model[0].weight.is_meta
        assert call(model, torch.zeros(5, 3, device="meta")).is_meta
    assert model[0].weight.is_meta
