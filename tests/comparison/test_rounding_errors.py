"""Errors of rounding beside what the step predicts, in GPTQ and AWQ: what was rounded worse is named, nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from tooling import tool

import strati
from strati.comparison import pair_update as pairs

GROUP, BITS = 32, 4
SHAPES = {"self_attn.q_proj": (64, 96), "mlp.up_proj": (128, 96), "mlp.down_proj": (96, 128)}
PLACES = np.array([0, 4, 1, 5, 2, 6, 3, 7])  # AWQ: where in its word each of eight outputs lies

Coded = tuple[np.ndarray, np.ndarray, np.ndarray]

calibration = tool("calibrate_rounding")


def rounded(weight: np.ndarray, *, inputs: np.ndarray | None = None, down: bool = False) -> Coded:
    return calibration.rounded(weight, BITS, GROUP, inputs=inputs, down=down)


def base(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        f"model.layers.{block}.{name}": rng.normal(scale=0.02, size=shape).astype(np.float32)
        for block in range(3)
        for name, shape in SHAPES.items()
    }


def words(codes: np.ndarray) -> np.ndarray:
    """Eight codes of the last axis to a word, lowest bits first."""
    eights = codes.reshape(*codes.shape[:-1], -1, 8).astype(np.uint64) << np.arange(0, 32, 4, dtype=np.uint64)
    return np.ascontiguousarray(eights.sum(axis=-1).astype(np.uint32).view(np.int32))


def as_gptq(coded: Coded) -> dict[str, np.ndarray]:
    codes, steps, zeros = coded
    return {
        "qweight": np.ascontiguousarray(words(codes).T),
        "qzeros": words(zeros.T - 1),
        "scales": np.ascontiguousarray(steps.T),
    }


def as_awq(coded: Coded) -> dict[str, np.ndarray]:
    codes, steps, zeros = coded

    def ordered(values: np.ndarray) -> np.ndarray:
        eights = values.reshape(len(values), -1, 8)
        return words(eights[..., np.argsort(PLACES)].reshape(values.shape))

    return {
        "qweight": ordered(codes.T),
        "qzeros": ordered(zeros.T),
        "scales": np.ascontiguousarray(steps.T),
    }


def checkpoint(folder: Path, method: str, coded: dict[str, Coded]) -> Path:
    folder.mkdir()
    pack = as_gptq if method == "gptq" else as_awq
    tensors = {f"{name}.{word}": array for name, c in coded.items() for word, array in pack(c).items()}
    save_file(tensors, folder / "model.safetensors")
    told = {"quant_method": method, "bits": BITS, "group_size": GROUP}
    (folder / "config.json").write_text(json.dumps({"quantization_config": told}))
    return folder


def plain(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {f"{name}.weight": weight for name, weight in weights.items()}


def named_worse(result: strati.Comparison) -> list[str]:
    return [x.name for x in result.layers if any(flag.code == "rounded-worse" for flag in x.warnings)]


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_a_layer_rounded_worse_is_named_and_no_other(tmp_path: Path, method: str) -> None:
    """Rounding down instead of to the nearest code doubles the error."""
    weights = base()
    bad = "model.layers.1.mlp.up_proj"
    coded = {name: rounded(w, down=name == bad) for name, w in weights.items()}
    result = strati.compare(plain(weights), checkpoint(tmp_path / "coded", method, coded))
    assert len(result.layers) == 9
    assert {x.aligned for x in result.layers} == {None}
    for layer in result.layers:
        assert layer.rounding is not None
        assert layer.rounding.ratio == pytest.approx(2 if layer.name == f"{bad}.weight" else 1, abs=0.12)
    assert named_worse(result) == [f"{bad}.weight"]
    assert f"Rounded worse than predicted: {bad}.weight" in result.text()


def test_what_gptq_moves_to_make_up_for_rounding_is_not_rounded_worse(tmp_path: Path) -> None:
    weights = base()
    rng = np.random.default_rng(1)
    coded = {}
    for name, weight in weights.items():
        columns = weight.shape[1]
        mixing = rng.normal(size=(columns, columns)) * np.arange(1, columns + 1) ** -0.5
        coded[name] = rounded(weight, inputs=rng.normal(size=(2000, columns)) @ mixing.T)
    result = strati.compare(plain(weights), checkpoint(tmp_path / "coded", "gptq", coded))
    ratios = [layer.rounding.ratio for layer in result.layers if layer.rounding is not None]
    assert min(ratios) > 1.1  # more than rounding to the nearest code leaves, by design
    assert named_worse(result) == []


@pytest.mark.parametrize("worse", [False, True])
def test_scales_that_awq_moved_between_layers_are_undone(tmp_path: Path, worse: bool) -> None:
    weights = base()
    rng = np.random.default_rng(2)
    coded = {}
    for name, weight in weights.items():
        rows, columns = (rng.uniform(0.5, 3, size=side) for side in weight.shape)
        scaled = weight * columns / (rows[:, None] if name.endswith("up_proj") else 1)
        coded[name] = rounded(scaled, down=worse and name == "model.layers.2.mlp.up_proj")
    result = strati.compare(plain(weights), checkpoint(tmp_path / "coded", "awq", coded))
    assert {x.aligned for x in result.layers} == {"channel-scales"}
    assert max(x.relative_change for x in result.layers) < (0.2 if worse else 0.13)
    assert named_worse(result) == (["model.layers.2.mlp.up_proj.weight"] if worse else [])


def test_the_bounds_lie_between_right_layers_and_wrong_ones() -> None:
    """The calibration on made weights, again: each bound a sixth away from what is right and from what is wrong."""
    found = [
        calibration.ratios(weight, inputs, bits, group)
        for _, cases in calibration.sources(seed=1, made=True)
        for weight, inputs in cases[:1]
        for bits, group in calibration.SETTINGS
    ]
    right, compensated, wrong = (
        [r["nearest"] for r in found],
        [r["gptq"] for r in found],
        [r["down"] for r in found],
    )
    assert max(right) * 7 / 6 < pairs.WORSE < min(wrong) * 6 / 7
    assert max(compensated) * 7 / 6 < pairs.WORSE_COMPENSATED < min(wrong)
