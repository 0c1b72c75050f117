"""No mix of devices: kernels of counts and bases on fake cuda tensors, which refuse to meet those of another device.

No GPU is needed: torch's fake tensors carry a device and shapes, but no numbers.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from strati.evaluate.hooks import Site, capture
from strati.landscape.counts.ranks import Factor, fold, perturb
from strati.landscape.jacobians import Probes
from strati.landscape.mlp.sequential import Chain, ChainStage, as_chain
from strati.landscape.mlp.statistics_pass import backward, gated_forward, output_directions, perturbed_copy


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
        twin = perturbed_copy(chain, 0)
        near, inclines = gated_forward(twin, perturb(activations[0], torch.Generator()), slopes)
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

        with capture(model, [Site("0", "input"), Site("0")], visit):
            target = model(cuda(mode, 7, 5))
        assert [t.device.type for t in seen] == ["cuda", "cuda"]
        for probes in (Probes(2, most=8), Probes(2, most=1), Probes(2, most=1, law="normal")):
            vectors = list(probes.of(target, "test"))
            assert len(vectors) == (3 if probes.most == 8 else 2)
            assert {(v * target).device.type for v in vectors} == {"cuda"}


def item(tensor: Tensor, key: object) -> Tensor:
    """``tensor[key]`` by operations that fake tensors have: Python's own indexing asks for a real device first."""
    keys = list(key) if isinstance(key, tuple) else [key]
    if Ellipsis in keys:
        at = keys.index(Ellipsis)
        missing = tensor.ndim - sum(k is not None and k is not Ellipsis for k in keys)
        keys[at : at + 1] = [slice(None)] * missing
    axis = 0
    for one in keys:
        if one is None:
            tensor = tensor.unsqueeze(axis)
        elif isinstance(one, int):
            tensor = tensor.select(axis, one)
            continue
        else:
            assert isinstance(one, slice)
            start, stop, _ = one.indices(tensor.shape[axis])
            tensor = tensor.narrow(axis, start, stop - start)
        axis += 1
    return tensor


def test_a_langevin_step_stays_on_the_models_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pull, noise and push; the gradient is given, for autograd's own engine needs a real device to run on."""
    from strati.landscape.llc.sgld import SGLDKernel

    monkeypatch.setattr(FakeTensor, "__getitem__", item, raising=False)
    for scaled in (False, True):
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            steps = SGLDKernel.__new__(SGLDKernel)
            steps.theta, steps.scale = cuda(mode, 6), cuda(mode, 6) if scaled else None
            steps.step, steps.gamma, steps.nbeta, steps.rotation, steps.noise = 0.1, 1.0, 10.0, None, 0.1
            steps.gradient = lambda offset, batch: (offset.sum(1), 2 * offset)  # type: ignore[method-assign]
            offset = cuda(mode, 3, 6)
            value, heating = steps.advance(offset, (cuda(mode, 4, 2), cuda(mode, 4)), torch.Generator())
            assert {t.device.type for t in (offset, value, heating)} == {"cuda"}
            assert steps._normal(torch.Generator()).device.type == "cuda"


def test_a_leapfrog_trajectory_stays_on_the_models_device(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from strati.landscape.llc.hmc import Adaptation, HMCKernel, Replicas
    from strati.landscape.llc.posterior import Dense

    monkeypatch.setattr(FakeTensor, "__getitem__", item, raising=False)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        turn = Dense(cuda(mode, 5, 5))
        target = SimpleNamespace(
            theta=cuda(mode, 5),
            size=5,
            quadratic=(),
            gamma=1.0,
            rotate=turn.rotate,
            unrotate=turn.unrotate,
            evaluate=lambda offset: ((offset**2).sum(-1), 2 * offset),
        )
        plan = SimpleNamespace(chains=4, leapfrog=8, exchange=False, seed=0)
        walk = HMCKernel(target, plan)  # type: ignore[arg-type]
        drawn = walk.uniform
        # How many steps a trajectory takes is a number that a fake tensor does not have.
        walk.uniform = lambda *shape: 0.4 if shape == (1,) else drawn(*shape)  # type: ignore[method-assign,return-value]
        start = cuda(mode, 2, 4, 5)
        state = Replicas(start, *target.evaluate(start))
        tuning = Adaptation(cuda(mode, 2), cuda(mode, 2, 5))
        for wide in (False, True):
            state, chance = walk.trajectory(state, cuda(mode, 2), tuning, wide=wide)
            assert {t.device.type for t in (*state, chance)} == {"cuda"}
