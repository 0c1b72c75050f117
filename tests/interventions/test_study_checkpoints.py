"""Studies of networks that come from files: perceptrons, residual networks, language models, transformers' folders."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import strati
from strati.core.errors import BadInputError
from strati.interventions.study import study
from strati_reproductions.trained.networks import CifarResNet


@pytest.mark.parametrize(
    "names", [("layers.0", "layers.2"), ("net.0", "net.1"), ("a.b.fc", "a.c.fc"), ("b.x", "a.x")]
)
def test_perceptrons_with_dotted_names_run(names: tuple[str, str], tmp_path: Path) -> None:
    from safetensors.torch import save_file

    torch.manual_seed(0)
    linears = nn.Linear(64, 12), nn.Linear(12, 10)
    tensors = {f"{n}.{k}": v for n, m in zip(names, linears, strict=True) for k, v in m.state_dict().items()}
    save_file(tensors, tmp_path / "mlp.safetensors")
    found = study(
        {"network": {"path": str(tmp_path / "mlp.safetensors")}, "data": {"name": "digits", "test": 50}}
    )
    assert found.done == found.units == 4


def test_tokens_in_one_dimension_are_cut_into_windows(tmp_path: Path) -> None:
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=50, n_positions=32)
    model = transformers.GPT2LMHeadModel(config).eval()
    model.save_pretrained(tmp_path / "gpt")
    tokens = np.random.default_rng(0).integers(0, 50, 100)
    np.save(tmp_path / "flat.npy", tokens)
    np.save(tmp_path / "rows.npy", tokens[:96].reshape(6, 16))
    spec = {
        "network": {"source": "transformers", "path": str(tmp_path / "gpt")},
        "measure": {"performance": "perplexity"},
        "interventions": {"layers": ["*.mlp.*"]},
        "metrics": {"spectral": False, "activations": False},
    }
    one, two = (
        study(spec | {"data": {"path": str(tmp_path / name), "context": 16}}).frame()["performance"]
        for name in ("flat.npy", "rows.npy")
    )
    assert one.equals(two) and one.min() > 10, "an untrained network guesses among 50"
    quick: dict[str, Any] = {"layers": "*.mlp.*", "spectral": False, "activations": False}
    here = study(model, data=torch.from_numpy(tokens), context=16, **quick)
    assert here.performance["name"] == "perplexity"
    assert here.frame()["intact_performance"][0] == pytest.approx(one[0])
    with pytest.raises(BadInputError, match="less than one window of 128"):
        study(spec | {"data": {"path": str(tmp_path / "flat.npy")}})
    with pytest.raises(BadInputError, match="have no labels of their own"):
        study(model, data=(tokens, tokens), **quick)
    with pytest.raises(BadInputError, match="no next token"):
        study(model, data=tokens[:, None], **quick)


def test_convolutions_have_the_alpha_of_scan(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 24, 3), nn.ReLU(), nn.Conv2d(24, 24, 3), nn.Flatten(), nn.Linear(24 * 16, 3)
    )
    x = torch.randn(6, 3, 8, 8)
    table = study(model, data=(x, model(x).argmax(1)), interventions="rerandomise").frame()
    scanned = strati.scan(model.state_dict()).frame().set_index("name")
    for layer in ("0", "2", "4"):
        row = table[(table["layer"] == layer) & (table["intervention"] == "intact")].iloc[0]
        for name in ("alpha", "stable_rank", "spectral_norm", "frobenius_norm", "mp_soft_rank"):
            want = scanned.loc[f"{layer}.weight"][name]
            assert (pd.isna(row[name]) and pd.isna(want)) or row[name] == pytest.approx(want, rel=1e-5), name


def test_a_residual_network_and_a_language_model_are_trained_here(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "i.npz", x=rng.integers(0, 255, (40, 8, 8, 3), np.uint8), y=rng.integers(0, 3, 40))
    (tmp_path / "t.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    common = {"train": {"epochs": 2, "batch": 16}, "metrics": {"spectral": False}}
    nets = {
        "i.npz": ({"source": "resnet", "depth": 8, "width": 4}, "accuracy", 8),
        "t.txt": ({"source": "transformer", "width": 16, "depth": 1, "heads": 2}, "perplexity", 9),
    }
    for name, (network, performance, layers) in nets.items():
        spec = common | {"network": network, "measure": {"performance": performance}}
        found = study(spec | {"data": {"path": str(tmp_path / name), "context": 16}})
        assert found.done == found.units == 3 * layers
        assert found.frame()["activation_disagreement"].notna().all()


def test_a_transformers_directory_as_it_is(tmp_path: Path) -> None:
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=50, n_positions=32)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt")
    np.save(tmp_path / "tokens.npy", np.random.default_rng(0).integers(0, 50, (6, 12)))
    spec = {
        "network": {"source": "transformers", "path": str(tmp_path / "gpt")},
        "data": {"path": str(tmp_path / "tokens.npy")},
        "measure": {"performance": "perplexity", "batch": 4},
        "interventions": {"layers": ["*.attn.*", "*.mlp.*"]},
    }
    found = study(spec)
    table = found.frame()
    assert found.done == found.units == 8 * 2  # no initial values: intact and one draw of eight layers
    assert found.performance["chance"] == 50
    assert table["initialiser"].str.startswith("gpt2: N(0").sum() == 8
    np.save(tmp_path / "tokens.npy", np.full((6, 12), 77))
    with pytest.raises(BadInputError, match="do not fit the network"):
        study(spec)


@pytest.mark.parametrize(
    ("kind", "performance", "scheme"),
    [
        ("LlamaForCausalLM", "loss", "normal"),
        ("BertForSequenceClassification", "accuracy", "normal"),
        ("ViTForImageClassification", "accuracy", "vit"),
        ("ResNetForImageClassification", "loss", "kaiming_fan_out"),
    ],
)
def test_every_architecture_of_transformers_runs_from_its_directory(
    kind: str, performance: str, scheme: str, tmp_path: Path
) -> None:
    """The paper's ResNet-34, ViT-B/16 and GPT-2 are such directories; re-initialising has a second one."""
    import transformers

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    options: dict[str, Any] = {
        "LlamaForCausalLM": sizes | {"vocab_size": 30},
        "BertForSequenceClassification": sizes | {"vocab_size": 30, "num_labels": 3},
        "ViTForImageClassification": sizes | {"image_size": 16, "patch_size": 8, "num_labels": 3},
        "ResNetForImageClassification": {
            "embedding_size": 4,
            "hidden_sizes": [4, 8],
            "depths": [1, 1],
            "layer_type": "basic",
            "num_labels": 3,
        },
    }
    model = getattr(transformers, kind)
    for seed, name in enumerate(("first", "trained")):
        torch.manual_seed(seed)
        model(model.config_class(**options[kind])).save_pretrained(tmp_path / name)
    rng = np.random.default_rng(0)
    if kind in ("ViTForImageClassification", "ResNetForImageClassification"):
        x: Any = rng.integers(0, 255, (9, 16, 16, 3), np.uint8)
    else:
        x = rng.integers(0, 30, (9, 8))
    labels = {} if kind == "LlamaForCausalLM" else {"y": rng.integers(0, 3, 9)}
    np.savez(tmp_path / "data.npz", x=x, **labels)
    spec = {
        "network": {
            "source": "transformers",
            "path": str(tmp_path / "trained"),
            "initial": str(tmp_path / "first"),
        },
        "data": {"path": str(tmp_path / "data.npz")},
        "measure": {"performance": performance, "batch": 4},
        "metrics": {"spectral": False},
    }
    found = study(spec)
    table = found.frame()
    layers = table["layer"].nunique()
    assert layers >= 6 and found.done == found.units == 3 * layers
    changed = table[table["intervention"] != "intact"]
    assert changed["activation_disagreement"].notna().all() and (changed["distance"] > 0).all()
    drawn = set(table[table["intervention"] == "rerandomise"]["initialiser"].str.split(":").str[0])
    assert drawn == {scheme}


def test_a_residual_checkpoint(tmp_path: Path) -> None:
    torch.manual_seed(0)
    torch.save(
        {"state_dict": {f"module.{k}": v for k, v in CifarResNet(8, 4).state_dict().items()}},
        tmp_path / "r.th",
    )
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "i.npz", x=rng.integers(0, 255, (12, 16, 16, 3), np.uint8), y=rng.integers(0, 10, 12))
    spec = {
        "network": {"source": "resnet", "path": str(tmp_path / "r.th")},
        "data": {"path": str(tmp_path / "i.npz"), "mean": [0.4, 0.4, 0.4], "std": [0.2, 0.2, 0.2]},
        "metrics": {"spectral": False},
    }
    assert study(spec).done == 8 * 2
    with pytest.raises(BadInputError, match="2 numbers for 3 channels"):
        study(spec | {"data": spec["data"] | {"mean": [0.1, 0.2]}})


def test_half_precision_is_computed_in_single() -> None:
    """One rule for all torch verbs: float data and a half-precision module go together."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    half = copy.deepcopy(net).to(torch.bfloat16)
    x = torch.randn(32, 6)
    data = (x, net(x).argmax(1))
    single = copy.deepcopy(half).float()
    found, same = (strati.study(m, data=data, draws=1).frame() for m in (half, single))
    np.testing.assert_array_equal(found["performance"], same["performance"])
    assert next(half.parameters()).dtype == torch.bfloat16  # the caller's own is untouched
