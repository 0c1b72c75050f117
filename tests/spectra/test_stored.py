"""Quantised layers and adapters in a scan: the floor, what lies at it, and spectra by the core."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import strati


def rounded(weight: np.ndarray, bits: int) -> dict[str, torch.Tensor]:
    scale = np.abs(weight).max(axis=1, keepdims=True) / (2 ** (bits - 1) - 1)
    codes = np.round(weight / scale).astype(np.int8)
    return {
        "fc.weight": torch.from_numpy(codes),
        "fc.weight_scale": torch.from_numpy(scale.astype(np.float32)),
    }


def row_of(tensors: dict[str, torch.Tensor], folder: Path) -> dict:
    save_file(tensors, folder / "model.safetensors")
    (row,) = strati.scan(folder / "model.safetensors").to_dict()["layers"]
    return row


def test_a_weight_of_low_rank_lies_at_the_floor_once_rounded(tmp_path):
    """Rank 5 becomes full rank by rounding: what is left beyond the five directions is the floor's."""
    rng = np.random.default_rng(0)
    weight = (rng.normal(size=(128, 5)) @ rng.normal(size=(5, 96))).astype(np.float32)
    row = row_of(rounded(weight, 4), tmp_path)
    assert row["quantisation"]["scheme"] == "int8" and row["quantisation"]["bits"] == 8
    assert row["hard_rank"] == 96
    flag = next(w for w in row["warnings"] if w["code"] == "rounding-floor")
    assert "hard_rank" in flag["text"] and "mp_sigma" in flag["text"]


def test_fine_rounding_of_noise_is_above_the_floor(tmp_path):
    weight = np.random.default_rng(1).normal(size=(128, 64)).astype(np.float32)
    row = row_of(rounded(weight, 8), tmp_path)
    assert "rounding-floor" not in {w["code"] for w in row["warnings"]}
    assert 0 < row["quantisation"]["noise_floor"] < row["mp_lambda_minus"]


def test_an_adapter_is_scanned_by_its_core():
    rng = np.random.default_rng(2)
    state = {
        "base_model.model.fc.lora_A.weight": rng.normal(size=(6, 50)).astype(np.float32),
        "base_model.model.fc.lora_B.weight": rng.normal(size=(70, 6)).astype(np.float32),
    }
    (row,) = strati.scan(state).to_dict()["layers"]
    product = state["base_model.model.fc.lora_B.weight"] @ state["base_model.model.fc.lora_A.weight"]
    singular = np.linalg.svd(product.astype(np.float64), compute_uv=False)
    assert (row["rows"], row["cols"], row["parameters"]) == (70, 50, 6 * 120)
    assert row["adapter"] == {"rank": 6, "used_rank": 6, "scale": None}
    assert row["spectral_norm"] == pytest.approx(singular[0], rel=1e-6)
    assert row["frobenius_norm"] == pytest.approx(np.linalg.norm(product), rel=1e-6)
    assert row["hard_rank"] == 6


def test_a_fresh_adapter_is_untouched():
    state = {
        "fc.lora_A.weight": np.ones((4, 20), np.float32),
        "fc.lora_B.weight": np.zeros((30, 4), np.float32),
    }
    (row,) = strati.scan(state).to_dict()["layers"]
    assert "untouched" in {w["code"] for w in row["warnings"]}
    assert row["adapter"]["used_rank"] == 0
