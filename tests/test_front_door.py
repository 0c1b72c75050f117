"""One front door: every public function takes every kind of network and of data, or refuses it in one line."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import strati
from strati.landscape.objective import objective

torch.manual_seed(0)
MLP = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).double()
X = torch.randn(24, 4, dtype=torch.float64)
Y = MLP(X).argmax(1)
SAMPLED = {"chains": 2, "draws": 10, "sampler": "sgld", "nbeta": 5.0}


def entered(manager: Any) -> nn.Module:
    with manager as model:
        assert isinstance(model, nn.Module)
        return model


@pytest.fixture(scope="module")
def planned() -> strati.Plan:
    found = strati.study(MLP, data=(X, Y), interventions=[strati.truncate(rank=[1, 2])])
    return strati.plan(found, budget="parameters=0.95", action="truncate", combinations=0)


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "as_module": strati.as_module,
    "check": lambda m: strati.check(m, m),
    "compare": lambda m: strati.compare(m, m),
    "degeneracy": lambda m: strati.degeneracy(m, X),
    "effective_parameters": lambda m: strati.effective_parameters(m, X, scales=[0.1], **SAMPLED),
    "inspect": strati.inspect,
    "interaction_basis": lambda m: strati.interaction_basis(m, X),
    "llc": lambda m: strati.llc(m, "behavioural-mse", X, **SAMPLED),
    "scan": strati.scan,
    "sparsify": lambda m: strati.sparsify(m, X),
    "study": lambda m: strati.study(m, data=(X, Y), interventions=[strati.zero()]),
    "swap": lambda m: strati.study(MLP, data=(X, Y), interventions=[strati.swap(m)]),
    "swapped": lambda m: entered(strati.swapped(copy.deepcopy(MLP), m)),
    "track": lambda m: strati.track([m, m], steps=[0, 1], data=(X, Y), what="loss"),
    "track model": lambda m: strati.track([MLP.state_dict()], data=(X, Y), what="loss", model=m),
    "truncated": lambda m: entered(strati.truncated(m, {"0": 2})),
}


def networks(folder: Path) -> dict[str, Any]:
    save_file(MLP.state_dict(), folder / "net.safetensors")
    return {
        "path": str(folder / "net.safetensors"),
        "Path": folder / "net.safetensors",
        "Network": strati.open(folder / "net.safetensors"),
        "Network of a module": strati.open(MLP),
        "numpy": {name: value.numpy() for name, value in MLP.state_dict().items()},
        "torch": MLP.state_dict(),
        "module": copy.deepcopy(MLP),
    }


@pytest.mark.filterwarnings("ignore:no learning coefficient")  # the chains are short
@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_takes_every_kind_of_network(name: str, tmp_path: Path) -> None:
    """And what comes out does not depend on the kind."""
    told = {}
    kinds = networks(tmp_path)
    if name in ("llc", "effective_parameters"):  # sampling takes its time
        kinds = {kind: kinds[kind] for kind in ("path", "numpy", "module")}
    for kind, network in kinds.items():
        found = FUNCTIONS[name](network)
        told[kind] = found.to_dict() if hasattr(found, "to_dict") else None
    if name in ("degeneracy", "llc", "effective_parameters", "interaction_basis", "sparsify"):
        first = [told["module"].get(key) for key in ("free", "estimate", "scales", "layers")]
        for kind in told:
            assert [told[kind].get(key) for key in ("free", "estimate", "scales", "layers")] == first, kind


NO_NETWORKS: dict[str, tuple[Callable[[], Any], str]] = {
    "number": (lambda: 3, "is not a network"),
    "class": (lambda: nn.Linear, "is not a network"),
    "array": (lambda: np.eye(3), "is one array, not a network"),
    "nothing": (dict, "holds no tensors"),
    "no parameters": (nn.Sequential, "has no parameters"),
    "meta": (lambda: nn.Linear(4, 3, device="meta"), "is on the meta device"),
    "lazy": (lambda: nn.LazyLinear(3), "is a lazy parameter"),
    "no file": (lambda: "gone.safetensors", "no such file"),
    "not in the cache": (lambda: "org/gone-for-good", "org/gone-for-good"),
}


@pytest.mark.parametrize("kind", NO_NETWORKS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_no_network_is_refused_in_one_line(name: str, kind: str) -> None:
    make, why = NO_NETWORKS[kind]
    with pytest.raises(strati.BadInputError) as caught:
        FUNCTIONS[name](make())
    assert why in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["Network", "numpy", "torch", "module", "path"])
def test_a_plan_is_applied_to_every_kind_of_network(kind: str, planned: strati.Plan, tmp_path: Path) -> None:
    given = networks(tmp_path)[kind]
    made = strati.apply(planned, given, out=tmp_path / "out")
    assert made.parameters_after < made.parameters_before and made.measured["performance"] is not None


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, place: int) -> tuple[torch.Tensor, int]:
        return X[place], int(Y[place])


class Batches:
    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        yield X[:10], Y[:10]
        yield X[10:], Y[10:]


WITH_DATA: dict[str, Callable[[Any], Any]] = {
    "apply": lambda d: None,
    "degeneracy": lambda d: strati.degeneracy(MLP, d).free,
    "interaction_basis": lambda d: len(strati.interaction_basis(MLP, d).layers),
    "llc": lambda d: objective(MLP, "cross_entropy", d)(torch.zeros(43, dtype=torch.float64)).item(),
    "sparsify": lambda d: strati.sparsify(MLP, d).zeros_after,
    "study": lambda d: (
        strati.study(MLP, data=d, interventions=[strati.zero()]).frame()["performance"].tolist()
    ),
    "track": lambda d: strati.track([MLP], data=d, what="loss").series["value"].tolist(),
}


@pytest.mark.parametrize("name", WITH_DATA)
def test_every_function_takes_every_kind_of_data(name: str, planned: strati.Plan, tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", x=X.numpy(), y=Y.numpy())
    kinds = {
        "arrays": (X.numpy(), Y.numpy()),
        "tensors": (X, Y),
        "dict": {"x": X, "y": Y},
        "loader": DataLoader(TensorDataset(X, Y), batch_size=7),
        "batches": Batches(),
        "list of batches": list(Batches()),
        "dataset": Rows(),
        "path": tmp_path / "data.npz",
    }
    call = WITH_DATA[name]
    if name == "apply":
        places = iter(range(100))
        call = lambda d: strati.apply(planned, MLP, out=tmp_path / f"o{next(places)}", data=d).measured  # noqa: E731
    found = {kind: call(data) for kind, data in kinds.items()}
    for kind, value in found.items():
        assert value == pytest.approx(found["tensors"], rel=1e-6, abs=1e-9), kind


@pytest.mark.parametrize("name", [name for name in WITH_DATA if name != "apply"])
def test_what_is_no_data_is_refused_in_one_line(name: str) -> None:
    bad: dict[str, Any] = {
        "number": 3,
        "object": object(),
        "words": ["a", "b"],
        "read once": iter(Batches()),
        "no file": "gone.npz",
        "empty": (np.zeros((0, 4)), np.zeros(0, int)),
        "other width": (torch.ones(4, 5, dtype=torch.float64), torch.zeros(4).long()),
        "not finite": (torch.full((4, 4), torch.nan), torch.zeros(4).long()),
        "too few targets": (X, Y[:3]),
    }
    for kind, data in bad.items():
        with pytest.raises(strati.BadInputError) as caught:
            WITH_DATA[name](data)
        assert "\n" not in str(caught.value), kind


@pytest.fixture(scope="module")
def language() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 20, "n_positions": 16}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    torch.manual_seed(0)
    model: nn.Module = transformers.GPT2LMHeadModel(config).eval()
    return model


def test_labels_mean_what_they_mean_to_transformers(language: nn.Module) -> None:
    """The loss of a batch with labels, some of them masked, and with padding, is the model's own."""
    tokens = torch.randint(1, 20, (4, 8), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens.clone()}
    batch["labels"][0, :3] = -100
    with torch.no_grad():
        own = float(language(**batch).loss)
        alone = float(language(tokens, labels=tokens).loss)
    loss = objective(language, "cross_entropy", batch)
    assert float(loss(loss.flat.theta)) == pytest.approx(own, rel=1e-5)
    assert loss.count == int((batch["labels"][:, 1:] != -100).sum())
    study = strati.study(language, data=batch, layers=["*c_fc*"], interventions=[strati.zero()])
    assert study.frame()["intact_performance"].iloc[0] == pytest.approx(np.exp(own), rel=1e-5)
    study = strati.study(language, data=tokens, layers=["*c_fc*"], interventions=[strati.zero()])
    assert study.frame()["intact_performance"].iloc[0] == pytest.approx(np.exp(alone), rel=1e-5)


@pytest.mark.filterwarnings("ignore:Could not find a config file")
def test_an_adapter_runs_merge_with_base(language: nn.Module, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    language.save_pretrained(tmp_path / "base")  # type: ignore[operator]
    settings = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    model = peft.get_peft_model(copy.deepcopy(language), settings).eval()
    for name, value in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(value, std=0.3)
    model.save_pretrained(tmp_path / "adapter")
    with pytest.raises(strati.BadInputError, match="does not say which network it belongs to"):
        strati.as_module(tmp_path / "adapter")
    model.peft_config["default"].base_model_name_or_path = "base"  # beside the adapter
    model.save_pretrained(tmp_path / "adapter")
    tokens = torch.arange(10)[None]
    with torch.no_grad():
        there = strati.as_module(tmp_path / "adapter")(tokens).logits
        torch.testing.assert_close(there, model(tokens).logits)
        with strati.swapped(copy.deepcopy(language), model) as other:
            torch.testing.assert_close(other(tokens).logits, model(tokens).logits)
    model.peft_config["default"].base_model_name_or_path = "org/gone"
    model.save_pretrained(tmp_path / "adapter")
    with pytest.raises(strati.BadInputError, match="its base cannot be opened"):
        strati.as_module(tmp_path / "adapter")


def test_a_tracker_takes_what_trains() -> None:
    with pytest.raises(strati.BadInputError, match=r"model: is a str; give the nn\.Module that is trained"):
        strati.Tracker("net.pt", log=print)  # type: ignore[arg-type]


def test_a_spec_names_a_network_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("huggingface_hub")
    from huggingface_hub import constants

    home = tmp_path / "hub" / "models--org--tiny"
    snapshot = home / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    save_file(MLP.state_dict(), snapshot / "model.safetensors")
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("a" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    np.savez(tmp_path / "data.npz", x=X.numpy(), y=Y.numpy())
    spec = {
        "network": {"source": "mlp", "path": "org/tiny"},
        "data": {"path": str(tmp_path / "data.npz")},
        "interventions": {"kinds": ["rerandomise"], "draws": 1},
        "metrics": {"degeneracy": False},
    }
    found = strati.study(spec)
    assert (found.done, found.frame()["intact_performance"].iloc[0]) == (4, 1.0)
    with pytest.raises(strati.BadInputError, match="fetch it with: hf download org/gone"):
        strati.study(spec | {"network": {"source": "mlp", "path": "org/gone"}})
