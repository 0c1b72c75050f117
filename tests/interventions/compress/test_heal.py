"""Healing: a LoRA trained after compression lowers the loss on rows it did not see, and PEFT loads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import strati
from strati import interventions as iv
from strati.core.errors import BadInputError
from strati.interventions.compress.heal import Lora

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """A tiny Llama that counts, its data, and a plan that drops one of its blocks' worth of parameters."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    starts = np.random.default_rng(0).integers(0, 16, (48, 1))
    steps = np.random.default_rng(1).integers(1, 4, (48, 1))
    tokens = (starts + steps * np.arange(12)) % 16
    optimiser = torch.optim.Adam(model.parameters(), 3e-3)
    x = torch.from_numpy(tokens)
    for _ in range(80):
        optimiser.zero_grad()
        model(x, labels=x).loss.backward()
        optimiser.step()
    home = tmp_path_factory.mktemp("healed") / "model"
    model.eval().save_pretrained(home)
    measured = strati.study(
        home, data=tokens, spectral=False, interventions=iv.truncate(rank=[2, 4, 8]), layers="model.layers.*"
    )
    return home, tokens, strati.plan(measured, budget="rank=4", action="truncate", combinations=1)


def test_the_loss_on_held_out_rows_falls_and_peft_agrees(trained: Any, tmp_path: Path):
    home, tokens, plan = trained
    peft = pytest.importorskip("peft")
    written = strati.apply(plan, home, out=tmp_path / "small", heal=120)
    healed = written.healed
    assert healed is not None
    assert (healed["steps"], healed["rows"], healed["held_out"]) == (120, 36, 12)
    assert healed["low"] > 0 and healed["loss_after"] < 0.8 * healed["loss_before"]
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "small").eval()
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "small" / "adapter").eval()
    order = torch.randperm(48, generator=torch.Generator().manual_seed(0))
    x = torch.from_numpy(tokens)[order[:12]]
    with torch.no_grad():
        loss = float(adapted(x, labels=x).loss)
        with adapted.disable_adapter():
            before = float(adapted(x, labels=x).loss)
    assert loss == pytest.approx(healed["loss_after"], rel=1e-4)
    assert before == pytest.approx(healed["loss_before"], rel=1e-4)
    assert "Healed in 120 steps" in str(written)


def test_a_module_in_memory_comes_back_healed(trained: Any):
    _, tokens, plan = trained
    model = transformers.AutoModelForCausalLM.from_pretrained(trained[0])
    x = torch.from_numpy(tokens)
    with torch.no_grad():
        losses = [float(strati.apply(plan, model, heal=steps)(x, labels=x).loss) for steps in (0, 60)]
    assert losses[1] < losses[0]


def test_merging_gives_what_adding_to_outputs_gives():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3))
    lora = Lora(net, torch.Generator().manual_seed(0))
    for _, b in lora.factors.values():
        torch.nn.init.normal_(b)
    x = torch.randn(7, 5)
    with torch.no_grad(), lora.added():
        added = net(x)
    lora.merge()
    torch.testing.assert_close(net(x), added)


def test_healing_needs_rows_and_steps(trained: Any, tmp_path: Path):
    home, tokens, plan = trained
    with pytest.raises(BadInputError, match="at least 8 rows"):
        strati.apply(plan, home, out=tmp_path / "few", data=tokens[:4], heal=5)
    with pytest.raises(BadInputError, match="steps from 0"):
        strati.apply(plan, home, out=tmp_path / "few", heal=-1)
    assert not (tmp_path / "few").exists()
