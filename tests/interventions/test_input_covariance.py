"""Input covariances against explicit sums over tokens and patches."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from strati.core.errors import BadInputError
from strati.interventions import input_covariance
from strati.interventions.input_covariance import (
    FEW_TOKENS,
    CalibrationInputs,
    ExpertTokensError,
    input_covariances,
    patches,
)
from strati.interventions.tasks import IGNORED


def test_linear_layers_equal_explicit_second_moments() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    batches = [torch.randn(n, 5, dtype=torch.float64) for n in (4, 9, 1)]
    found = input_covariances(net, batches)
    x = torch.cat(batches)
    with torch.no_grad():
        hidden = net[1](net[0](x))
    for name, inputs in (("0", x), ("2", hidden)):
        np.testing.assert_allclose(found[name].matrix, (inputs.T @ inputs).numpy() / 14, rtol=1e-12)
        assert found[name].tokens == 14
        assert found[name].warnings == ()


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(3, 4, 3, stride=2, padding=1, bias=False),
        nn.Conv2d(3, 4, (3, 2), dilation=2, bias=False),
        nn.Conv2d(3, 4, 3, padding="same", padding_mode="circular", bias=False),
        nn.Conv1d(3, 4, 3, padding=2, bias=False),
        nn.Conv3d(3, 4, 2, bias=False),
    ],
)
def test_patches_times_kernel_are_the_convolution(conv: nn.Module) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, *[7] * (conv.weight.ndim - 2))
    rows = patches(conv, x)
    with torch.no_grad():
        direct = conv(x).movedim(1, -1).reshape(len(rows), -1)
        torch.testing.assert_close(rows @ conv.weight.reshape(4, -1).T, direct)


def test_many_patches_are_sampled_over_all_images_and_places() -> None:
    conv = nn.Conv2d(1, 1, 1)
    torch.manual_seed(0)
    x = torch.randn(64, 1, 40, 40)
    rows = patches(conv, x)
    assert len(rows) == 16_384
    # Mean square of 16,384 of 102,400 standard normal values: standard error 0.011, five of them allowed.
    assert abs(float((rows**2).mean()) - 1.0) < 0.055


def test_layers_that_read_one_tensor_share_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            left = self.a(x)
            if not self.training:
                x += 1.0  # the second layer reads the tensor changed in place
            return left.sum() + self.b(x)

    calls = []
    product = input_covariance.InputMoments.product
    monkeypatch.setattr(
        input_covariance.InputMoments, "product", lambda *args: calls.append(1) or product(*args)
    )
    x = torch.zeros(3, 4)
    shared = input_covariances(Two(), [x.clone()])
    assert len(calls) == 1
    assert np.array_equal(shared["a"].matrix, shared["b"].matrix)
    changed = input_covariances(Two().eval(), [x.clone()])
    assert changed["a"].matrix.sum() == 0.0
    assert changed["b"].matrix.sum() == 16.0


def test_padding_is_not_counted_and_embeddings_count_tokens() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 2))
    ids = torch.tensor([[1, 1, 2], [4, IGNORED, IGNORED]])
    found = input_covariances(net, [ids])
    rows = net[0].weight.detach()[[1, 1, 2, 4]]
    np.testing.assert_allclose(found["1"].matrix, (rows.T @ rows).numpy() / 4, rtol=1e-5)
    weights = found["0"].row_weights
    assert weights is not None
    np.testing.assert_allclose(weights, np.array([1, 3, 2, 1, 2]) / 9)
    assert found["1"].tokens == 4


def test_a_tied_embedding_has_the_covariance_of_the_head() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(6, 3), nn.Linear(3, 6, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(torch.tanh(self.embed(ids)))

    torch.manual_seed(0)
    net = Tied()
    ids = torch.randint(0, 6, (4, 5))
    hidden = torch.tanh(net.embed(ids)).reshape(-1, 3).detach()
    found = input_covariances(net, [ids])["embed"]
    np.testing.assert_allclose(found.matrix, (hidden.T @ hidden).numpy() / 20, rtol=1e-5)
    assert found.row_weights is None


def test_too_few_tokens_and_layers_never_reached_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first = x[:, 0] > 0
            return torch.cat([self.experts[0](x[first]), self.experts[1](x[~first])])

    x = torch.ones(12, 4)
    x[:2] *= -1
    inputs = CalibrationInputs(Routed(), [x])
    assert inputs.of("experts.0").tokens == 10
    for name, seen in (("experts.1", 2), ("experts.2", 0)):
        with pytest.raises(ExpertTokensError, match=rf"this expert saw {seen} calibration tokens for its 4"):
            inputs.of(name)
    few = CalibrationInputs(nn.Sequential(nn.Linear(4, 4)), [x[:2]]).of("0")
    assert few.warnings == (FEW_TOKENS,)
    with pytest.raises(BadInputError, match="0: no calibration data reached"):
        CalibrationInputs(nn.Sequential(nn.Linear(4, 4)), [x[:0]]).of("0")
    monkeypatch.setattr(input_covariance, "MAX_BYTES", 1)  # one layer per pass gives the same
    alone = CalibrationInputs(Routed(), [x])
    assert np.array_equal(alone.of("experts.0").matrix, inputs.of("experts.0").matrix)
    net = nn.Sequential(nn.Conv2d(4, 4, 3, groups=2), nn.Conv2d(4, 2, 1))
    grouped = CalibrationInputs(net, [torch.ones(5, 4, 5, 5)])
    with pytest.raises(BadInputError, match="0: is a grouped"):
        grouped.of("0")
    assert grouped.of("1").tokens == 9 * 5  # the layers around it keep their covariances


def _private_bytes() -> int:
    """Memory of this process that no file backs."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])


def _peak(work: Callable[[], object]) -> int:
    """The most memory that is used during a call, beyond what is used before it."""
    gc.collect()
    before, most, done = _private_bytes(), [0], threading.Event()

    def look() -> None:
        while not done.is_set():
            most[0] = max(most[0], _private_bytes())
            time.sleep(0.001)

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        work()
    finally:
        done.set()
        watcher.join()
    return most[0] - before


@pytest.mark.thorough
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_memory_is_that_of_two_covariances() -> None:
    """Ten covariances of 18 MB; the bound of two of them has 15 % more for rows of inputs and strips of products."""
    side = 1536
    net = nn.Sequential(*(nn.Linear(side, side) for _ in range(10)))
    batches = [torch.randn(128, side) for _ in range(2)]

    def forward() -> None:
        with torch.no_grad():
            for batch in batches:
                net(batch)

    inputs = CalibrationInputs(net, batches)
    forward()
    bare = _peak(forward)
    recorded = _peak(lambda: [inputs.of(str(i)).tokens for i in range(10)])
    assert recorded - bare < 2.3 * 8 * side**2, (recorded, bare)
    everything = _peak(lambda: input_covariances(net, batches))
    assert everything - bare > 8 * 8 * side**2  # what is measured is seen
