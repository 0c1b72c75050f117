"""Bases and edges of an MLP: CPU seconds, the gain over one backward pass per direction, growth in width and data.

Run: ``python benchmarks/bench_basis.py`` (about two minutes on one core; ``--quick`` for a smaller network).
The yardstick does what closed forms replace: one backward pass per output direction (basis) or per direction
of the next layer (edges), batched over the data, timed on a sample of the directions and scaled up.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch
from threadpoolctl import threadpool_limits
from torch import nn

import strati
from strati.landscape.mlp import basis_moments as edges_module

TARGETS = {"local basis": 1.0, "interaction basis": 20.0, "edges": 15.0}


def network(width: int) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(3):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def cpu(function, repeats: int = 3):
    best, result = float("inf"), None
    for _ in range(repeats):
        start = time.process_time()
        result = function()
        best = min(best, time.process_time() - start)
    return best, result


def backward_passes(net: nn.Module, x: torch.Tensor, sample: int = 8) -> tuple[float, float]:
    """CPU seconds of the basis and of the edges by one backward pass per direction, from a sample of them."""
    width = x.shape[1]
    start = time.process_time()
    for linear in range(3):
        rest = net[2 * linear :]
        f = net[: 2 * linear](x).detach().requires_grad_() if linear else x.clone().requires_grad_()
        out = rest(f)
        gram = torch.zeros(width, width)
        for k in range(sample):
            (g,) = torch.autograd.grad(out[:, k].sum(), f, retain_graph=True)
            gram += g.T @ g
    basis = (time.process_time() - start) * width / sample
    start = time.process_time()
    inverse = torch.randn(width, width)
    for linear in range(3):
        step = net[2 * linear : 2 * linear + 2]
        f = net[: 2 * linear](x).detach().requires_grad_() if linear else x.clone().requires_grad_()
        out = step(f)
        for k in range(sample):
            (g,) = torch.autograd.grad(out[:, k].sum(), f, retain_graph=True)
            ((g @ inverse) ** 2).mean(0)
    return basis, (time.process_time() - start) * width / sample


def measure(width: int, count: int, repeats: int = 3) -> dict[str, float]:
    net, x = network(width), torch.randn(count, width)
    local, _ = cpu(lambda: strati.interaction_basis(net, x, "local"), repeats)
    whole, basis = cpu(lambda: strati.interaction_basis(net, x), repeats)
    edges, _ = cpu(lambda: strati.interaction_graph(basis), repeats)
    return {"local basis": local, "interaction basis": whole, "edges": edges}


def single_precision(width: int, count: int) -> tuple[float, float]:
    basis = strati.interaction_basis(network(width), torch.randn(count, width), "local")
    limit, edges_module.DOUBLE_WORK = edges_module.DOUBLE_WORK, 0.0
    try:
        seconds, graph = cpu(lambda: strati.interaction_graph(basis))
    finally:
        edges_module.DOUBLE_WORK = limit
    return seconds, max(graph.errors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    width, count = (64, 1000) if quick else (256, 3000)
    found = measure(width, count)
    by_basis, by_edges = backward_passes(network(width), torch.randn(count, width))
    print(f"MLP of 3 layers, width {width}, {count} data, CPU seconds on one thread")
    for name, seconds in found.items():
        plain = by_edges if name == "edges" else by_basis
        print(
            f"  {name:<18} {seconds:8.3f} s   target {TARGETS[name]:4.0f} s   "
            f"{plain / seconds:6.1f} times less than backward passes ({plain:.1f} s)"
        )
    seconds, error = single_precision(width, count)
    print(f"  edges in single precision {seconds:.3f} s, relative error {error:.1e}")
    for what, sizes in (
        ("width", [(w, count) for w in (width // 4, width // 2, width)]),
        ("data", [(width, n) for n in (count // 3, count, 3 * count)]),
    ):
        rows = [measure(*size, repeats=1) for size in sizes]
        values = [size[0] if what == "width" else size[1] for size in sizes]
        print(f"growth in {what}: {values}")
        for name in found:
            times = [row[name] for row in rows]
            power = np.log(times[-1] / times[-2]) / np.log(values[-1] / values[-2])
            print(f"  {name:<18} {'  '.join(f'{t:8.3f}' for t in times)} s   last step: {what}^{power:.1f}")


if __name__ == "__main__":
    with threadpool_limits(1):
        main()
