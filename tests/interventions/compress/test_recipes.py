"""Recipes for compression tools name every layer with its own bits; ``tests/oracles`` loads them in the tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import strati
from strati import interventions as iv
from strati.core.errors import BadInputError
from strati.interventions.compress.exports import FORMATS, RECIPES


@pytest.fixture(scope="module")
def plans() -> dict[str, Any]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 4))
    x = torch.randn(160, 32)
    measured = strati.study(
        net,
        data=(x.numpy(), net(x).argmax(1).numpy()),
        performance="loss",
        spectral=False,
        activations=False,
        interventions=[
            iv.quantise(bits=[2, 3, 4], group=16, method="gptq"),
            iv.prune(share=[0.3, 0.5, 0.7], method="wanda"),
        ],
    )
    budgets = {"quantise": "bits=5", "prune": "parameters=0.6"}
    return {a: strati.plan(measured, budget=b, action=a, combinations=1) for a, b in budgets.items()}


def _found(form: str, recipe: dict[str, Any]) -> dict[str, int]:
    """Layer -> bits, read from a recipe as its tool does."""
    if form in ("llm-compressor", "compressed-tensors"):
        if form == "llm-compressor":
            recipe = recipe["strati_stage"]["strati_modifiers"]["GPTQModifier"]
        groups = recipe["config_groups"].values()
        return {name: g["weights"]["num_bits"] for g in groups for name in g["targets"]}
    if form == "auto-round":
        return {n: c["bits"] for n, c in recipe["layer_config"].items() if c["bits"] < 16}
    if form == "modelopt":
        named = [q for q in recipe["quant_cfg"] if q["enable"]]
        return {q["quantizer_name"].removesuffix(".weight_quantizer"): q["cfg"]["num_bits"] for q in named}
    if form == "torchao":
        configs = recipe["_data"]["fqn_to_config"]
        return {n: int(c["_data"]["weight_dtype"]["_data"][3:]) for n, c in configs.items()}
    found = dict.fromkeys(("0", "2", "4"), recipe["bits"])
    for key, about in recipe["dynamic"].items():
        name = key[3:-1]
        found = {k: v for k, v in found.items() if k != name} | ({name: about["bits"]} if about else {})
    return found


@pytest.mark.parametrize("form", RECIPES)
def test_every_layer_has_its_own_bits(plans: dict[str, Any], form: str, tmp_path: Path) -> None:
    plan = plans["quantise"]
    plan.export(tmp_path / "recipe", format=form)
    text = (tmp_path / "recipe").read_text()
    recipe = json.loads(text.replace("-1:", '"-1":') if form == "modelopt" else text)
    assert _found(form, recipe) == {name: int(choice[5]) for name, choice in plan.choices.items()}
    assert form in FORMATS


def test_sparsity_is_for_llm_compressor_alone(plans: dict[str, Any], tmp_path: Path) -> None:
    plan = plans["prune"]
    plan.export(tmp_path / "recipe", format="llm-compressor")
    modifiers = json.loads((tmp_path / "recipe").read_text())["strati_stage"].values()
    shares = {
        n: m["WandaPruningModifier"]["sparsity"]
        for m in modifiers
        for n in m["WandaPruningModifier"]["targets"]
    }
    assert shares == {n: float(c.partition(",")[0].partition("=")[2]) for n, c in plan.choices.items()}
    with pytest.raises(BadInputError, match="gptqmodel: has bits, a plan of prune has none"):
        plan.export(tmp_path / "other", format="gptqmodel")
    assert not (tmp_path / "other").exists()
