"""No mix of devices: kernels of counts and bases on fake cuda tensors, which refuse to meet those of another device.

No GPU is needed: torch's fake tensors carry a device and shapes, but no numbers.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from strati.landscape.chain import Chain, ChainStage, as_chain
from strati.landscape.counts.gram import fold
from strati.landscape.counts.jacobians import backward, output_directions
from strati.landscape.counts.ranks import Factor, nudged
from strati.landscape.counts.survey import gated_forward, twin_of
from strati.landscape.probes import Probes
from strati.landscape.recorder import Site, recording


def cuda(mode: FakeTensorMode, *shape: int) -> Tensor:
    return FakeTensor(mode, torch.empty(shape, dtype=torch.float64, device="meta"), torch.device("cuda"))


def on_cuda(mode: FakeTensorMode, model: nn.Module) -> nn.Module:
    """A module whose parameters are fake tensors on a fake device."""
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            delattr(module, name)
            setattr(module, name, cuda(mode, *p.shape))
    return model


def test_fake_tensors_refuse_a_mix() -> None:
    """The test of the test: a tensor on the CPU may not meet one on the fake device."""
    with FakeTensorMode() as mode, pytest.raises(RuntimeError, match="device"):
        cuda(mode, 3, 3) + torch.ones(3, 3, dtype=torch.float64)


def test_a_factor_is_brought_up_to_date_on_its_device() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        rows = cuda(mode, 50, 4)
        factor = Factor(4, whole=True, like=rows)
        factor.add(rows)
        factor._error += (rows - rows).square().sum(0)
        matrix = factor.matrix
        assert matrix.device.type == "cuda" and matrix.shape == (4, 4)
        assert factor.gram().device.type == factor.noise.device.type == "cuda"


def test_jacobians_of_a_chain_stay_on_its_device() -> None:
    widths, relu = (5, 6, 3), as_chain(nn.Sequential(nn.Linear(1, 1), nn.ReLU())).stages[0].activation
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        stages = tuple(
            ChainStage(str(k), cuda(mode, b, a), cuda(mode, b), relu)
            for k, (a, b) in enumerate(pairwise(widths))
        )
        chain = Chain(stages)
        activations, preactivations = chain.forward(cuda(mode, 7, 5))
        slopes = chain.slopes(preactivations)
        for most in (64, 2):  # all outputs, and random probes of them
            first = output_directions(slopes[-1], torch.Generator().manual_seed(0), most)
            for _, jacobian in backward(chain, slopes, first):
                assert jacobian.device.type == "cuda"
        assert fold(activations[1], True).device.type == "cuda"
        twin = twin_of(chain, 0)
        near, inclines = gated_forward(twin, nudged(activations[0], torch.Generator()), slopes)
        assert {t.device.type for t in (*near, *inclines)} == {"cuda"}


def test_probes_are_drawn_on_the_networks_device() -> None:
    """The vectors, and the product with the target: autograd's own engine needs a real device to run on."""
    real = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        model = on_cuda(mode, real)
        seen: list[Tensor] = []

        def visit(site: Site, tensor: Tensor) -> Tensor:
            seen.append(tensor)
            return tensor

        with recording(model, [Site("0", "input"), Site("0")], visit):
            target = model(cuda(mode, 7, 5))
        assert [t.device.type for t in seen] == ["cuda", "cuda"]
        for probes in (Probes(2, most=8), Probes(2, most=1), Probes(2, most=1, law="normal")):
            vectors = list(probes.of(target, "test"))
            assert len(vectors) == (3 if probes.most == 8 else 2)
            assert {(v * target).device.type for v in vectors} == {"cuda"}
