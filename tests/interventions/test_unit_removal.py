"""Heads and neurons removed by the input covariance: the optimum, and smaller networks that compute the same."""

from __future__ import annotations

import itertools
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
from strati.core.errors import BadInputError, UnsupportedError
from strati.interventions.input_covariance import InputCovariance
from strati.interventions.quantise_prune import output_error, prune_units
from strati.interventions.targets import find_targets
from strati.interventions.unit_removal import producers, remove_units, zero_units

transformers = pytest.importorskip("transformers")


def _case(seed: int, rows: int, cols: int, heads: int | None = None) -> tuple[Any, InputCovariance]:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((400, cols)) @ rng.standard_normal((cols, cols))
    return rng.standard_normal((rows, cols)), InputCovariance("fc", x.T @ x / 400, 400, heads=heads)


def _optimum(w: Any, c: Any, gone: tuple[int, ...]) -> float:
    """The least output error without some columns, by solving for the others."""
    kept = [j for j in range(w.shape[1]) if j not in gone]
    best = np.zeros_like(w)
    best[:, kept] = np.linalg.solve(c[np.ix_(kept, kept)], c[kept] @ w.T).T
    return output_error(w, best, c)


def test_the_other_columns_are_the_best_for_the_units_removed():
    w, covariance = _case(0, 5, 8)
    damped = covariance.matrix + 0.01 * np.trace(covariance.matrix) / 8 * np.eye(8)
    pruned = prune_units(w, covariance, 0.5)
    gone = zero_units(pruned, 8, 4)
    assert len(gone) == 4
    assert output_error(w, pruned, damped) == pytest.approx(_optimum(w, damped, gone), rel=1e-9)


def test_one_unit_is_the_best_of_all():
    for seed in range(5):
        w, covariance = _case(seed, 4, 6)
        damped = covariance.matrix + 0.01 * np.trace(covariance.matrix) / 6 * np.eye(6)
        (gone,) = zero_units(prune_units(w, covariance, 1 / 6), 6, 1)
        assert gone == min(range(6), key=lambda j: _optimum(w, damped, (j,)))


def test_several_units_are_close_to_the_best_of_all_subsets():
    """Greedy removal in rounds; the best of all 70 subsets is the bound, at most 1.5 times of it in these draws."""
    for seed in range(5):
        w, covariance = _case(seed, 4, 8)
        damped = covariance.matrix + 0.01 * np.trace(covariance.matrix) / 8 * np.eye(8)
        best = min(_optimum(w, damped, s) for s in itertools.combinations(range(8), 4))
        assert output_error(w, prune_units(w, covariance, 0.5), damped) <= 1.5 * best


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([0.25, 0.5, 0.75]))
def test_adjusting_the_others_never_loses_more_than_zeroing(seed: int, share: float):
    w, covariance = _case(seed, 3, 8, heads=4)
    damped = covariance.matrix + 0.01 * np.trace(covariance.matrix) / 8 * np.eye(8)
    for unit, count in (("neuron", 8), ("head", 4)):
        pruned = prune_units(w, covariance, share, unit)
        gone = zero_units(pruned, count, round(share * count))
        zeroed = w.reshape(3, count, -1).copy()
        zeroed[:, list(gone)] = 0.0
        assert len(gone) == round(share * count)
        assert output_error(w, pruned, damped) <= output_error(w, zeroed.reshape(w.shape), damped) * (
            1 + 1e-9
        )


def _llama(folder: Path, **options: Any) -> Path:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, head_dim=4, max_position_embeddings=32, **options,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("unit", "sizes"),
    [
        ("neuron", {"intermediate_size": 24}),
        pytest.param(
            "head",
            {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4},
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_the_smaller_network_loads_in_transformers_and_agrees(
    tmp_path: Path, unit: str, sizes: dict[str, int]
):
    home = _llama(tmp_path / "model", attention_bias=True, mlp_bias=True)
    tokens = np.random.default_rng(0).integers(0, 64, (24, 16))
    made = strati.plan(
        home, data=tokens, budget="parameters=0.5", action="prune", unit=unit, out=tmp_path / "study"
    )
    assert set(made.choices.values()) == {f"share=0.5,unit={unit}"}
    written = strati.apply(made, home, out=tmp_path / "small")
    config = json.loads((tmp_path / "small" / "config.json").read_text())
    assert {name: config[name] for name in sizes} == sizes
    small = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    assert written.parameters_after == sum(p.numel() for p in small.parameters())
    assert written.bytes_after < written.bytes_before
    intact = transformers.AutoModelForCausalLM.from_pretrained(home)
    with (
        iv.pruned(intact, made.choices, calibration=_calibration(made)) as masked,
        torch.no_grad(),
    ):
        x = torch.from_numpy(tokens)
        torch.testing.assert_close(small(x).logits, masked(x).logits, rtol=1e-4, atol=1e-5)
    assert written.measured["performance"] is not None


def _calibration(plan: Any) -> Any:
    from strati.interventions.evaluator import open_evaluators

    (evaluator,) = open_evaluators(plan.study)
    return torch.cat(list(evaluator.calibration.batches)).numpy()


def test_gpt2_loses_neurons_but_no_heads(tmp_path: Path):
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=4, n_positions=16)
    model = transformers.GPT2LMHeadModel(config).eval()
    targets = find_targets(model)
    readers = [t.name for t in targets if t.type == "mlp.out"]
    for name in readers:
        model.get_submodule(name).weight.data[[3, 7]] = 0.0  # Conv1D stores inputs first
    x = torch.randint(0, 50, (2, 8))
    with torch.no_grad():
        before = model(x).logits
        saved = remove_units(model, dict.fromkeys(readers, (3, 7)), "neuron", targets)
        torch.testing.assert_close(model(x).logits, before)
    assert saved == 2 * 2 * (16 + 16 + 1) and model.config.n_inner == 62
    attention = next(t for t in targets if t.type == "attention.out")
    with pytest.raises(UnsupportedError, match="fused"):
        producers(attention, "head", targets)


def test_layers_keep_the_same_number_where_a_config_has_one(tmp_path: Path):
    model = transformers.AutoModelForCausalLM.from_pretrained(_llama(tmp_path / "model"))
    targets = find_targets(model)
    reader = next(t.name for t in targets if t.type == "mlp.out")
    with pytest.raises(UnsupportedError, match=r"\[46, 48\] neurons"):
        remove_units(model, {reader: (0, 1)}, "neuron", targets)


def test_settings_that_make_no_sense():
    with pytest.raises(BadInputError, match="unit"):
        iv.prune(share=0.5, unit="head", method="wanda")
    with pytest.raises(BadInputError, match="unit"):
        strati.plan(
            torch.nn.Linear(2, 2), data=np.zeros((4, 2)), budget="bits=4", action="quantise", unit="head"
        )
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    x = np.random.default_rng(0).standard_normal((40, 4)).astype(np.float32)
    with pytest.raises(BadInputError, match="no layer that reads"):
        strati.study(net, data=(x, np.zeros(40, int)), interventions=iv.prune(share=0.5, unit="neuron"))
