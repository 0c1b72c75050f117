"""Cost of one product with a curvature matrix, in gradients, for networks of 0.1 to 20 million parameters.

    python benchmarks/bench_curvature.py [--quick]

For each network and matrix: CPU seconds of one gradient of the mean loss, CPU seconds of one product over that (graph
kept, as where the data fit into one graph; and in a block of eight with the graph built anew, as where they do not),
and the bytes that the graph of a product saves over those that the graph of a gradient saves beside the parameters.
One thread, median of five, measured in one run.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn

from strati.landscape.curvature_products import CurvatureMatrix, Products
from strati.landscape.objective import Objective, objective

REPEATS = 5
BLOCK = 8


def mlp(*widths: int) -> nn.Module:
    layers: list[nn.Module] = []
    for width, following in pairwise(widths):
        layers += [nn.Linear(width, following), nn.GELU()]
    return nn.Sequential(*layers[:-1])


def networks(quick: bool) -> dict[str, Objective]:
    """Objectives by name, smallest first."""
    torch.manual_seed(0)

    def classified(model: nn.Module, rows: int, *shape: int) -> Objective:
        return objective(model, "cross_entropy", (torch.randn(rows, *shape), torch.arange(rows) % 10))

    conv = nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Conv2d(64, 128, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(128 * 64, 10)),
    )
    problems = {
        "MLP": classified(mlp(64, 256, 256, 64, 10), 256, 64),
        "convolutions": classified(conv, 8, 3, 32, 32),
        "transformer": language_model(),
    }
    if not quick:
        problems["wide MLP"] = classified(mlp(784, 2048, 1536, 512, 10), 256, 784)
        problems["widest MLP"] = classified(mlp(1024, 4096, 3072, 1024, 10), 256, 1024)
    return problems


def language_model() -> Objective:
    """The embedded transformer on 1,024 characters."""
    from strati import embedded
    from strati.io.to_module import as_module

    model = as_module(embedded.path("shakespeare"))
    return objective(model, "cross_entropy", torch.randint(0, 60, (8, 128)))


def seconds(compute: Callable[[], object]) -> float:
    compute()
    times = []
    for _ in range(REPEATS):
        start = time.process_time()
        compute()
        times.append(time.process_time() - start)
    return float(np.median(times))


def saved_by_gradient(mean: Objective) -> int:
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    leaf = mean.flat.theta.clone().requires_grad_(True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = mean(leaf)
    del loss
    return sum(size for size in sizes.values() if size != leaf.nbytes)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    torch.set_num_threads(1)
    for name, mean in networks(parser.parse_args().quick).items():
        leaf = mean.flat.theta.clone().requires_grad_(True)
        gradient = seconds(lambda leaf=leaf, mean=mean: torch.autograd.grad(mean(leaf), leaf))  # type: ignore[misc]
        print(f"{name}, {mean.flat.size / 1e6:.2f} M parameters: one gradient {gradient:.3f} s")
        for kind in (CurvatureMatrix.HESSIAN, CurvatureMatrix.GAUSS_NEWTON):
            products = Products(mean, kind, graph_bytes=1 << 40)
            vectors = torch.randn(mean.flat.size, BLOCK)
            kept = seconds(lambda p=products, v=vectors: p(v[:, 0])) / gradient  # type: ignore[misc]

            def block(p: Products = products, v: Tensor = vectors) -> Tensor:
                p._graph = None
                return p.block(v)

            anew = seconds(block) / gradient / BLOCK
            memory = products._saved_bytes(mean) / saved_by_gradient(mean)
            print(
                f"  {kind}: one product {kept:.2f} gradients, in a block of {BLOCK} without a kept graph {anew:.2f}; "
                f"memory {memory:.2f} of one gradient"
            )


if __name__ == "__main__":
    main()
