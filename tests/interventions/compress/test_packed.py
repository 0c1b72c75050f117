"""Packed integers: the layout of compressed-tensors, loaded by transformers, measured after loading."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import strati
from strati import interventions as iv
from strati.core.errors import BadInputError
from strati.interventions.compress.packed import pack, packed_layer
from strati.interventions.edits import LayerEdits
from strati.interventions.input_covariance import InputCovariance
from strati.interventions.quantise_prune import gptq, quantise
from strati.interventions.targets import Target

transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 10_000),
    st.sampled_from([2, 3, 4, 5, 8]),
    st.sampled_from([None, 8]),
    st.booleans(),
    st.sampled_from([None, "gptq"]),
)
def test_codes_stand_for_the_weights_of_the_edit(
    seed: int, bits: int, group: int | None, symmetric: bool, method: str | None
):
    rng = np.random.default_rng(seed)
    w, x = rng.standard_normal((6, 16)).astype(np.float32), rng.standard_normal((80, 16))
    covariance = InputCovariance("fc", x.T @ x / 80, 80)
    edits = LayerEdits(Target("fc", "linear", "linear", (6, 16), False), (w, None), lambda _: covariance)
    setting = {"bits": bits, "symmetric": symmetric, "method": method} | ({"group": group} if group else {})
    layer = packed_layer(edits, setting)
    assert layer is not None
    edit = quantise(w, bits, group, symmetric)
    if method == "gptq":
        edit = gptq(w, covariance.matrix, bits, group, symmetric)
    np.testing.assert_allclose(layer.values, edit, atol=1e-12)


def test_words_are_those_of_compressed_tensors():
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    rng = np.random.default_rng(0)
    for bits in (2, 4, 8):
        codes = rng.integers(0, 2**bits, (5, 37))
        signed = torch.from_numpy(codes - 2 ** (bits - 1)).to(torch.int8)
        np.testing.assert_array_equal(pack(codes, bits), pack_to_int32(signed, bits).numpy())
        np.testing.assert_array_equal(
            pack(codes.T, bits).T, pack_to_int32(signed, bits, packed_dim=0).numpy()
        )


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=True,
    )  # fmt: skip
    home = tmp_path_factory.mktemp("llama") / "model"
    transformers.LlamaForCausalLM(config).save_pretrained(home)
    return home, np.random.default_rng(0).integers(0, 64, (24, 16))


@pytest.mark.parametrize("symmetric", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_transformers_loads_what_apply_packs(llama: Any, symmetric: bool, tmp_path: Path):
    home, tokens = llama
    measured = strati.study(
        home,
        data=tokens,
        spectral=False,
        layers="model.layers.*",
        interventions=iv.quantise(bits=[2, 3, 4], group=32, symmetric=symmetric, method="gptq"),
    )
    plan = strati.plan(measured, budget="bits=4", action="quantise", combinations=2)
    assert len(set(plan.choices.values())) > 1
    plain = strati.apply(plan, home, out=tmp_path / "plain")
    packed = strati.apply(plan, home, out=tmp_path / "packed", packed=True)
    assert packed.bytes_after < 0.35 * packed.bytes_before
    assert packed.measured["performance"] == pytest.approx(plain.measured["performance"], abs=1e-5)
    x = torch.from_numpy(tokens)
    logits = [
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name).eval()(x).logits
        for name in ("plain", "packed")
    ]
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-5)
    config = json.loads((tmp_path / "packed" / "config.json").read_text())["quantization_config"]
    bits = {n: g["weights"]["num_bits"] for g in config["config_groups"].values() for n in g["targets"]}
    asked = {name: {2: 2, 3: 4, 4: 4}[int(choice[5])] for name, choice in plan.choices.items()}
    assert bits == asked
    network = strati.open(tmp_path / "packed")
    dense = strati.open(tmp_path / "plain")
    for name in plan.choices:
        np.testing.assert_allclose(network.read(f"{name}.weight"), dense.read(f"{name}.weight"), atol=1e-6)


def test_what_cannot_be_packed_is_refused(llama: Any, tmp_path: Path):
    home, _ = llama
    plan = {
        "schema": "strati.plan/1", "action": "quantise", "predicted": {}, "performance": {"name": "loss"},
        "layers": [{"name": "model.layers.0.mlp.up_proj", "choice": "bits=4,method=hqq"}],
    }  # fmt: skip
    with pytest.raises(BadInputError, match="hqq"):
        strati.apply(plan, home, out=tmp_path / "out", packed=True)
    with pytest.raises(BadInputError, match="action is truncate"):
        strati.apply(plan | {"action": "truncate"}, home, out=tmp_path / "out", packed=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(home)
    with pytest.raises(BadInputError, match="Hugging Face directory"):
        strati.apply(plan, model, out=tmp_path / "out", packed=True)
    assert not (tmp_path / "out").exists()
