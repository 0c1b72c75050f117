"""Make ``packed.npz``: small layers packed and unpacked by the schemes' own packages, for ``test_quantised``.

Run by hand where auto-gptq 0.7.1 and autoawq 0.2.9 are unpacked (their packages do not import with today's
transformers, so that the two files that pack are loaded by themselves):

    python tests/io/oracle/make_packed.py FOLDER_WITH_auto_gptq FOLDER_WITH_awq
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from torch import nn

GROUP = 32


def load(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def gptq(module: ModuleType, bits: int, shuffled: bool) -> dict[str, np.ndarray]:
    torch.manual_seed(bits)
    inputs, outputs = 96, 64
    linear = nn.Linear(inputs, outputs, bias=False).float()
    where = torch.arange(inputs) // GROUP
    if shuffled:
        where = where[torch.randperm(inputs)]
    top = 2**bits - 1
    scales, zeros = torch.zeros(outputs, 3), torch.zeros(outputs, 3)
    for group in range(3):
        part = linear.weight.data[:, where == group]
        low, high = part.min(1).values.clamp(max=0), part.max(1).values.clamp(min=0)
        scales[:, group] = (high - low) / top
        zeros[:, group] = torch.round(-low / scales[:, group]).clamp(1, top)
    layer = module.QuantLinear(bits, GROUP, inputs, outputs, False, weight_dtype=torch.float32)
    layer.pack(linear, scales, zeros, where.to(torch.int32))
    with torch.no_grad():
        weight = layer(torch.eye(inputs)).T
    kept = {name: getattr(layer, name).numpy() for name in ("qweight", "qzeros", "scales", "g_idx")}
    return kept | {"weight": weight.numpy()}


def awq(module: ModuleType) -> dict[str, np.ndarray]:
    draw = torch.Generator().manual_seed(4)
    inputs, outputs = 96, 64

    def packed(rows: int) -> torch.Tensor:
        return torch.randint(-(2**31), 2**31 - 1, (rows, outputs // 8), generator=draw, dtype=torch.int32)

    qweight, qzeros = packed(inputs), packed(inputs // GROUP)
    scales = torch.rand(inputs // GROUP, outputs, generator=draw) * 0.01 + 0.001
    weight = module.dequantize_gemm(qweight, qzeros, scales, 4, GROUP).T
    return {
        "qweight": qweight.numpy(),
        "qzeros": qzeros.numpy(),
        "scales": scales.numpy(),
        "weight": weight.contiguous().numpy(),
    }


def main() -> None:
    quantised_linear = load(Path(sys.argv[1]) / "nn_modules/qlinear/qlinear_cuda.py", "qlinear_cuda")
    packing = load(Path(sys.argv[2]) / "utils/packing_utils.py", "packing_utils")
    layers = {f"gptq{bits}": gptq(quantised_linear, bits, False) for bits in (2, 3, 4, 8)}
    layers |= {"gptq4-act": gptq(quantised_linear, 4, True), "awq": awq(packing)}
    arrays = {f"{layer}.{name}": array for layer, kept in layers.items() for name, array in kept.items()}
    np.savez_compressed(Path(__file__).parent / "packed.npz", **arrays)


if __name__ == "__main__":
    main()
