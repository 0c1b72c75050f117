"""LyCORIS itself against what strati reads of its files: LoCon, LoHa and LoKr of linear and convolutional layers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import strati
from strati.io.adapters.merge import merged

modules = pytest.importorskip("lycoris.modules")
torch = pytest.importorskip("torch")

pytestmark = pytest.mark.oracle


@pytest.mark.parametrize("tucker", [False, True])
@pytest.mark.parametrize("algorithm", ["LoConModule", "LohaModule", "LokrModule"])
def test_lycoris_merges_to_the_same_weights(algorithm: str, tucker: bool, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    torch.manual_seed(0)
    layers = {"blocks.0.up": torch.nn.Linear(24, 32), "blocks.1.kernel": torch.nn.Conv2d(8, 12, 3)}
    tensors, expected = {}, {}
    for name, layer in layers.items():
        key = f"lycoris_{name.replace('.', '_')}"
        module = getattr(modules, algorithm)(key, layer, 1.0, 4, 3, use_tucker=tucker)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.normal_(0, 0.3)
        if (
            algorithm == "LohaModule"
        ):  # its get_diff_weight applies the scale twice; the forward pass uses this
            diff = module.get_weight(layer.weight.shape)
        else:
            diff, _ = module.get_diff_weight(1.0)
        expected[f"{name}.weight"] = (layer.weight + diff.reshape(layer.weight.shape)).detach().numpy()
        tensors |= {f"{key}.{part}": value.contiguous() for part, value in module.state_dict().items()}
    save_file(tensors, tmp_path / "adapter.safetensors")
    plain = {f"{name}.weight": layer.weight.detach().numpy() for name, layer in layers.items()}
    adapter = strati.open(tmp_path / "adapter.safetensors")
    assert {update.name for update in adapter.contents.adapters.values()} == set(expected)
    both = merged(strati.open(plain), adapter)
    for name, weight in expected.items():
        assert np.abs(weight - plain[name]).max() > 1e-3
        np.testing.assert_allclose(both.read(name), weight, atol=2e-6)
