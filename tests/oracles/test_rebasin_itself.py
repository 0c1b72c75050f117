"""Weight matching of the package rebasin (Git Re-Basin, 2209.04836) against the order of units that strati finds."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import strati

rebasin = pytest.importorskip("rebasin")
torch = pytest.importorskip("torch")

pytestmark = pytest.mark.oracle
WIDTH = 48


def network(seed: int, steps: int) -> Any:
    """A multilayer perceptron without biases, trained on the embedded digits."""
    torch.manual_seed(seed)
    with np.load(strati.embedded.path("digits.npz")) as arrays:
        x, y = torch.tensor(arrays["x"], dtype=torch.float32), torch.tensor(arrays["y"], dtype=torch.int64)
    sizes = (x.shape[1], WIDTH, WIDTH, 10)
    layers = [torch.nn.Linear(a, b, bias=False) for a, b in pairwise(sizes)]
    net = torch.nn.Sequential(layers[0], torch.nn.ReLU(), layers[1], torch.nn.ReLU(), layers[2])
    optimiser = torch.optim.Adam(net.parameters(), 3e-3)
    for _ in range(steps):
        rows = torch.randint(len(x), (64,))
        loss = torch.nn.functional.cross_entropy(net(x[rows]), y[rows])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return net


def weights(net: Any) -> list[np.ndarray]:
    return [parameter.detach().double().numpy().copy() for parameter in net.parameters()]


def distance(a: list[np.ndarray], b: list[np.ndarray]) -> float:
    return float(np.sqrt(sum(np.square(x - y).sum() for x, y in zip(a, b, strict=True))))


def by_strati(first: Any, last: Any) -> list[np.ndarray]:
    from strati.comparison.compare import matched_layers
    from strati.comparison.unit_alignment import unit_order

    networks = [strati.open(net) for net in (first, last)]
    pairs = matched_layers(*networks)
    order = unit_order(*networks, pairs, "gelu", least=1.0)  # as rebasin does: no scales, no signs
    return [
        order.layers[b.name].apply(next(b.matrices())) if b.name in order.layers else next(b.matrices())
        for _, b in pairs
    ]


def by_rebasin(first: Any, last: Any) -> list[np.ndarray]:
    descent = rebasin.PermutationCoordinateDescent(first, last, torch.randn(1, 64))
    descent.rebasin()
    return weights(last)


def test_both_undo_a_planted_permutation() -> None:
    net, other = network(0, 200), network(0, 0)
    rng = np.random.default_rng(0)
    p, q = rng.permutation(WIDTH), rng.permutation(WIDTH)
    w = weights(net)
    with torch.no_grad():
        for parameter, moved in zip(other.parameters(), (w[0][p], w[1][q][:, p], w[2][:, q]), strict=True):
            parameter.copy_(torch.tensor(moved))
    assert distance(w, by_strati(net, other)) == 0
    assert distance(w, by_rebasin(net, other)) == 0


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_independent_networks_come_as_close(seed: int) -> None:
    """Both are local optima of one assignment problem: strati leaves at most 2 % more distance than rebasin."""
    first, last = network(0, 300), network(seed, 300)
    w, stored = weights(first), weights(last)
    ours = distance(w, by_strati(first, last))
    theirs = distance(w, by_rebasin(first, last))
    assert theirs < distance(w, stored)
    assert ours < 1.02 * theirs
    print(f"stored {distance(w, stored):.3f}, strati {ours:.3f}, rebasin {theirs:.3f}")
