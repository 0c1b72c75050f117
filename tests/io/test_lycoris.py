"""Kohya and LyCORIS files, and PEFT's LoHa, LoKr and AdaLoRA: updates of the weights they belong to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from torch import nn

import strati
from strati.io.adapters.merge import merged, unwrapped

pytestmark = pytest.mark.filterwarnings("ignore")


class Small(nn.Module):
    """Two linear layers and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.conv = nn.Linear(24, 32), nn.Linear(32, 20), nn.Conv2d(4, 8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.fc1(x))


ALL = ["fc1", "fc2", "conv"]
CONFIGS = {
    "loha": peft.LoHaConfig(r=3, alpha=5, target_modules=ALL),
    "loha tucker": peft.LoHaConfig(r=3, alpha=5, target_modules=["conv"], use_effective_conv2d=True),
    "loha patterns": peft.LoHaConfig(
        r=8, target_modules=["fc1"], rank_pattern={"fc1": 2}, alpha_pattern={"fc1": 7}
    ),
    "lokr": peft.LoKrConfig(r=3, alpha=5, target_modules=ALL),
    "lokr both": peft.LoKrConfig(
        r=2, alpha=5, target_modules=ALL, decompose_both=True, use_effective_conv2d=True
    ),
    "adalora": peft.AdaLoraConfig(init_r=6, target_r=3, lora_alpha=11, target_modules=ALL[:2], total_step=10),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_peft_merges_to_the_same_weights(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    base = Small()
    plain = {key: value.clone().numpy() for key, value in base.state_dict().items()}
    model = peft.get_peft_model(base, CONFIGS[name])
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if any(word in key for word in ("lora_", "hada_", "lokr_")):
                parameter.normal_(0, 0.3)
    model.save_pretrained(tmp_path)
    adapter = strati.open(tmp_path)
    live = unwrapped(strati.open(model))
    in_memory = {
        tensor.name: live.read(tensor.name).copy() for tensor in live.tensors
    }  # merging changes the model
    expected = {key: value.numpy() for key, value in model.merge_and_unload().state_dict().items()}
    both = merged(strati.open(plain), adapter)
    assert adapter.warnings == ()
    for key, weight in expected.items():
        np.testing.assert_allclose(both.read(key), weight, atol=3e-7)
        np.testing.assert_allclose(in_memory[key], weight, atol=3e-7)
    changed = [layer for layer in strati.compare(plain, tmp_path).layers if layer.relative_change]
    assert {layer.name for layer in changed} == {
        f"{module}.weight" for module in CONFIGS[name].target_modules
    }
    for update in adapter.contents.adapters.values():
        matrix = update.product()
        assert np.linalg.matrix_rank(matrix, tol=1e-5 * np.linalg.norm(matrix, 2)) <= update.rank
        assert update.used_rank() <= update.rank


def kohya(rng: np.random.Generator, dtype: Any) -> dict[str, np.ndarray]:
    """A file as kohya's trainer writes it, for two modules of a text encoder."""
    tensors = {}
    for module, rows, columns in (("self_attn_q_proj", 16, 12), ("mlp_fc1", 40, 12)):
        name = f"lora_te_text_model_encoder_layers_3_{module}"
        tensors[f"{name}.lora_down.weight"] = rng.normal(size=(4, columns)).astype(dtype)
        tensors[f"{name}.lora_up.weight"] = rng.normal(size=(rows, 4)).astype(dtype)
        tensors[f"{name}.alpha"] = np.array(2.0, dtype)
    return tensors


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_kohya_file_is_an_update_of_its_base(dtype: Any, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tensors = kohya(rng, dtype)
    save_file(tensors, tmp_path / "style.safetensors")
    adapter = strati.open(tmp_path / "style.safetensors")
    place = "text_model.encoder.layers.3"
    assert [layer.name for layer in adapter.layers()] == [
        f"{place}.self_attn.q_proj.weight",
        f"{place}.mlp.fc1.weight",
    ]
    assert [(layer.shape, layer.block) for layer in adapter.layers()] == [((16, 12), 3), ((40, 12), 3)]
    base = {layer.name: rng.normal(size=layer.shape).astype(np.float32) for layer in adapter.layers()}
    both = merged(strati.open(base), adapter)
    for name, joined in zip(base, ("self_attn_q_proj", "mlp_fc1"), strict=True):
        key = f"lora_te_text_model_encoder_layers_3_{joined}"
        up, down = (tensors[f"{key}.lora_{end}.weight"].astype(np.float32) for end in ("up", "down"))
        np.testing.assert_allclose(both.read(name), base[name] + 0.5 * up @ down, rtol=1e-5, atol=1e-5)
    layers = {layer.name: layer for layer in strati.compare(base, tmp_path / "style.safetensors").layers}
    assert {(layer.update_kind, layer.update_rank) for layer in layers.values()} == {("low-rank", 4)}
    (scanned, *_) = strati.scan(tmp_path / "style.safetensors").to_dict()["layers"]
    assert scanned["adapter"] == {"rank": 4, "used_rank": 4, "scale": 0.5}


def test_a_file_of_another_base_is_refused(tmp_path: Path) -> None:
    save_file(kohya(np.random.default_rng(0), np.float32), tmp_path / "style.safetensors")
    with pytest.raises(strati.StratiError, match="belongs to another network"):
        strati.compare({"fc.weight": np.ones((16, 12), np.float32)}, tmp_path / "style.safetensors")


def test_a_tensor_named_alpha_is_no_adapter() -> None:
    network = strati.open({"act.alpha": np.ones(3, np.float32), "fc.weight": np.eye(9, dtype=np.float32)})
    assert not network.contents.adapters
    assert {tensor.name for tensor in network.tensors} == {"act.alpha", "fc.weight"}


@pytest.mark.parametrize(
    "missing", ["hada_w2_b", "lora_up.weight", "lokr_w2_a"], ids=["loha", "lora", "lokr"]
)
def test_a_missing_part_makes_no_update(missing: str) -> None:
    sets = {
        "hada": {f"hada_w{i}_{end}": (6, 2) if end == "a" else (2, 5) for i in (1, 2) for end in "ab"},
        "lora": {"lora_up.weight": (6, 2), "lora_down.weight": (2, 5)},
        "lokr": {"lokr_w1": (2, 2), "lokr_w2_a": (3, 2), "lokr_w2_b": (2, 5)},
    }
    shapes = dict(sets[missing.split("_")[0]])
    whole = strati.open({f"x.{word}": np.ones(shape, np.float32) for word, shape in shapes.items()})
    assert list(whole.contents.adapters) == ["x.weight"]
    del shapes[missing]
    part = strati.open({f"x.{word}": np.ones(shape, np.float32) for word, shape in shapes.items()})
    assert not part.contents.adapters


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.tuples(*[st.integers(1, 5)] * 4),
    rank=st.integers(1, 4),
    whole=st.tuples(st.booleans(), st.booleans()),
    seed=st.integers(0, 99),
)
def test_lokr_is_the_kronecker_product(
    sizes: tuple[int, int, int, int], rank: int, whole: tuple[bool, bool], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    tensors, sides = {}, []
    for n, stored in enumerate(whole):
        rows, columns = sizes[2 * n : 2 * n + 2]
        left, right = rng.normal(size=(rows, rank)), rng.normal(size=(rank, columns))
        sides.append(left @ right)
        if stored:
            tensors[f"x.lokr_w{n + 1}"] = (left @ right).astype(np.float32)
        else:
            tensors |= {
                f"x.lokr_w{n + 1}_a": left.astype(np.float32),
                f"x.lokr_w{n + 1}_b": right.astype(np.float32),
            }
    tensors["x.alpha"] = np.array(3 * rank, np.float32)
    update = strati.open(tensors).contents.adapters["x.weight"]
    scale = 1.0 if all(whole) else 3.0
    assert update.scale == pytest.approx(scale)
    np.testing.assert_allclose(update.product(), scale * np.kron(*sides), rtol=1e-4, atol=1e-4)
