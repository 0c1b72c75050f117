"""Cost of data-aware edits, as ratios measured in one run, best of three in processor time.

    python benchmarks/bench_compression.py [--quick]

The covariance pass of a small transformer beside its bare forward pass; whitened truncation of one layer beside
``numpy.linalg.svd`` of the same matrix; GPTQ of one layer beside that of gptqmodel, where it is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Callable

import numpy as np
import torch
from threadpoolctl import threadpool_limits
from transformers import LlamaConfig, LlamaForCausalLM

from strati.interventions.edits import InputDirections
from strati.interventions.input_covariance import InputCovariance, input_covariances
from strati.interventions.quantise_prune import gptq, sparsegpt
from strati.interventions.tasks import forward


def seconds(work: Callable[[], object], repeats: int = 3) -> float:
    """The least processor time of some calls."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return min(times)


def main() -> None:
    """Print the ratios."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a smaller layer")
    side = 512 if parser.parse_args().quick else 2048
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=288, intermediate_size=768, num_hidden_layers=6, num_attention_heads=6, vocab_size=8000
    )
    model = LlamaForCausalLM(config).eval()
    ids = torch.randint(0, 8000, (16, 128))
    for threads in dict.fromkeys((torch.get_num_threads(), 1)):
        torch.set_num_threads(threads)
        with torch.no_grad():
            bare = seconds(lambda: forward(model, ids))
            recorded = seconds(lambda: input_covariances(model, [ids]))
        ratio = f"{recorded / bare:.2f}  ({bare:.2f} s, {threads} threads, limit 1.6)"
        print(f"covariance pass / bare forward pass: {ratio}")
    threadpool_limits(1)  # threads that wait for each other would count as processor time
    rng = np.random.default_rng(0)
    w, x = rng.standard_normal((side, side)), rng.standard_normal((side, 2 * side))
    covariance = InputCovariance("layer", x @ x.T / x.shape[1], x.shape[1])
    svd = seconds(lambda: np.linalg.svd(w), 1)
    truncation = seconds(lambda: InputDirections(w, covariance).keep(slice(0, side // 4)), 1)
    print(
        f"whitened truncation / numpy.linalg.svd, {side} x {side}: {truncation / svd:.2f}  ({svd:.1f} s, limit 2.5)"
    )
    few = w[:256]
    for name, edit in (
        ("gptq 4 bits", lambda: gptq(few, covariance.matrix, 4, 128)),
        ("sparsegpt 50 %", lambda: sparsegpt(few, covariance.matrix, 0.5)),
    ):
        print(f"{name} of 256 x {side} / numpy.linalg.svd of {side} x {side}: {seconds(edit, 1) / svd:.2f}")
    if importlib.util.find_spec("gptqmodel") is None:
        print("gptqmodel is not installed; run in the environment of make oracles-test to compare with it")
        return
    ours, theirs = beside_gptqmodel(min(side, 1024))
    print(f"gptq / gptqmodel, one layer, processor time: {ours / theirs:.2f}  ({theirs:.1f} s, limit 1.2)")


def beside_gptqmodel(side: int) -> tuple[float, float]:
    """Processor time of GPTQ of one layer to 4 bits, groups of 128: ours, and gptqmodel's from its Hessian on."""
    from gptqmodel import QuantizeConfig
    from gptqmodel.quantization.gptq import GPTQ

    layer = torch.nn.Linear(side, side, bias=False)
    inputs = torch.randn(1, 2 * side, side)
    config = QuantizeConfig(bits=4, group_size=128, sym=True, desc_act=False)

    def theirs() -> float:
        reference = GPTQ(layer, config)
        reference.quantizer.configure(perchannel=True)
        reference.add_batch(inputs, layer(inputs))
        return seconds(lambda: reference.quantize(blocksize=128), 1)

    weight, rows = layer.weight.detach().numpy(), inputs[0].double().numpy()
    covariance = rows.T @ rows / len(rows)
    ours = seconds(lambda: gptq(weight, covariance, 4, 128, True), 2)
    return ours, min(theirs() for _ in range(2))


if __name__ == "__main__":
    main()
