"""Networks written by a plan: the same format, loadable, measured; the original untouched; nothing half-written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import strati
from strati import embedded
from strati.core.errors import BadInputError, UnsupportedError
from strati.interventions.compress.checkpoint_writer import open_network_of
from strati_reproductions.trained.networks import CifarResNet

SPEC: dict[str, Any] = {
    "measure": {"performance": "loss", "batch": 8},
    "metrics": {"spectral": False, "activations": False},
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama in bfloat16 with tied embeddings, a tokenizer file beside it, and its study."""
    import transformers

    home = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=2,
        vocab_size=60,
        max_position_embeddings=32,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(home / "model")
    (home / "model" / "tokenizer_config.json").write_text('{"note": "beside"}')
    np.save(home / "tokens.npy", np.random.default_rng(0).integers(3, 60, (10, 16)))
    spec = SPEC | {
        "network": {"source": "transformers", "path": str(home / "model")},
        "data": {"path": str(home / "tokens.npy")},
        "interventions": {
            "layers": ["model.layers.*"],
            "truncate": {"parameters": [0.3, 0.6, 0.9]},
            "quantise": {"bits": [2, 4]},
            "drop": {},
        },
    }
    strati.study(spec, out=home / "study")
    return home


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


@pytest.mark.parametrize(
    ("action", "budget"),
    [("truncate", "parameters=0.7"), ("quantise", "bits=3"), ("drop", "parameters=0.75")],
)
def test_a_directory_comes_out_as_it_went_in(llama: Path, tmp_path: Path, action: str, budget: str) -> None:
    import transformers

    before = bytes_of(llama / "model")
    plan = strati.plan(llama / "study", budget=budget, action=action, combinations=3)
    plan.to_json(tmp_path / "plan.json")
    found = strati.apply(tmp_path / "plan.json", llama / "model", out=tmp_path / "small")
    assert bytes_of(llama / "model") == before
    assert (tmp_path / "small" / "tokenizer_config.json").read_text() == '{"note": "beside"}'
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "small", local_files_only=True)
    assert next(model.parameters()).dtype == torch.bfloat16
    tokens = torch.from_numpy(np.load(llama / "tokens.npy"))
    with torch.no_grad():
        logits = model.float()(tokens).logits
    loss = nn.functional.cross_entropy(logits[:, :-1].reshape(-1, 60), tokens[:, 1:].reshape(-1))
    assert found.measured["performance"] == pytest.approx(float(loss), rel=2e-2)  # bfloat16 arithmetic
    assert found.predicted["low"] - 0.05 <= found.measured["performance"] <= found.predicted["high"] + 0.05
    if action == "drop":
        assert model.config.num_hidden_layers == 3 and found.bytes_after < found.bytes_before
    if action != "quantise":
        assert found.parameters_after < found.parameters_before
    out = json.loads(found.to_json())
    assert out["schema"] == "strati.apply/1" and {"written", "bytes_before", "measured"} <= set(out)


def test_factored_layers_load_and_compute_the_same(llama: Path, tmp_path: Path) -> None:
    plan = strati.plan(llama / "study", budget="parameters=0.5", action="truncate", combinations=0)
    dense = strati.apply(plan, llama / "model", out=tmp_path / "dense")
    found = strati.apply(plan, llama / "model", out=tmp_path / "pairs", factored=True)
    assert found.parameters_after == dense.parameters_after and found.bytes_after < found.bytes_before
    assert found.seconds_before is not None and found.seconds_after is not None
    made = strati.load_factored(tmp_path / "pairs")
    modules = json.loads((tmp_path / "pairs" / "strati-factored.json").read_text())["modules"]
    assert modules and sum(p.numel() for p in made.parameters()) == found.parameters_after
    first = next(iter(modules))
    assert made.get_submodule(first).first.weight.shape[0] == modules[first]["rank"]
    assert found.measured["performance"] == pytest.approx(dense.measured["performance"], rel=2e-2)


def digits_study(home: Path, ending: str) -> tuple[Path, Any]:
    path = home / f"net{ending}"
    tensors = load_file(embedded.path("digits-mlp.safetensors"))
    if ending == ".safetensors":
        save_file(tensors, path, metadata={"made": "here"})
    elif ending == ".npz":
        np.savez(path, **{k: v.numpy() for k, v in tensors.items()})
    else:
        torch.save({"state_dict": tensors, "epoch": 3}, path)
    spec = SPEC | {
        "network": {"source": "mlp", "path": str(path)},
        "data": {"name": "digits", "test": 200},
        "interventions": {"truncate": {"parameters": [0.4, 0.7]}},
    }
    return path, strati.study(spec, out=home / f"study{ending}")


@pytest.mark.parametrize("ending", [".safetensors", ".npz", ".pt"])
def test_single_files(tmp_path: Path, ending: str) -> None:
    path, study = digits_study(tmp_path, ending)
    plan = strati.plan(study, budget="parameters=0.8", action="truncate", combinations=2)
    found = strati.apply(plan, path, out=tmp_path / "out")
    assert found.measured["performance"] == pytest.approx(plan.predicted["measured"], rel=1e-4)
    network = strati.open(tmp_path / "out" / path.name)
    before = strati.open(path)
    assert [t.name for t in network.tensors] == [t.name for t in before.tensors]
    assert [t.dtype for t in network.tensors] == [t.dtype for t in before.tensors]
    if ending == ".safetensors":
        assert b'"made":"here"' in (tmp_path / "out" / path.name).read_bytes()[:300].replace(b'": "', b'":"')
    if ending == ".pt":
        assert torch.load(tmp_path / "out" / path.name, weights_only=True)["epoch"] == 3
    pairs = strati.apply(plan, path, out=tmp_path / "pairs", factored=True)
    assert pairs.measured["performance"] == pytest.approx(found.measured["performance"], rel=1e-4)


@pytest.mark.parametrize("where", ["state_dict", "net", None])
def test_wrapped_names_and_boxes_of_a_torch_file_stay(tmp_path: Path, where: str | None) -> None:
    """Names behind ``module.`` and tables within tables: what was planned is what is written."""
    torch.manual_seed(0)
    model = CifarResNet(14, 4).eval()
    state = {f"module.{name}": value for name, value in model.state_dict().items()}
    torch.save(state if where is None else {"epoch": 3, where: state}, tmp_path / "r.th")
    rng = np.random.default_rng(0)
    pixels, labels = rng.integers(0, 256, (8, 3, 32, 32), np.uint8), rng.integers(0, 10, 8)
    np.savez(tmp_path / "d.npz", x=pixels, y=labels)
    spec = {
        "network": {"source": "resnet", "path": str(tmp_path / "r.th")},
        "data": {"path": str(tmp_path / "d.npz"), "test": 8},
        "measure": {"performance": "loss", "batch": 8},
        "metrics": {"spectral": False, "activations": False},
        "interventions": {"drop": {}, "truncate": {"rank": [1, 2]}},
    }
    study = strati.study(spec, out=tmp_path / "study")
    before = strati.open(tmp_path / "r.th")
    for action, budget in (("drop", "parameters=0.8"), ("truncate", "rank=1.5")):
        plan = strati.plan(study, budget=budget, action=action, combinations=0, layers=("layer*",))
        assert plan.choices
        found = strati.apply(plan, tmp_path / "r.th", out=tmp_path / action)
        assert found.measured["performance"] == pytest.approx(plan.predicted["measured"], rel=1e-5)
        written = torch.load(tmp_path / action / "r.th", weights_only=True)
        assert where is None or written["epoch"] == 3
        assert all(name.startswith("module.") for name in (written if where is None else written[where]))
        assert (len(strati.open(tmp_path / action / "r.th").tensors) < len(before.tensors)) == (
            action == "drop"
        )


def test_a_block_without_a_number_and_a_plan_that_is_none(tmp_path: Path) -> None:
    torch.manual_seed(0)

    class Block(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + super().forward(x)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stack, self.head = nn.Sequential(), nn.Linear(4, 3)
            for name in ("first", "second"):
                self.stack.add_module(name, Block(nn.Linear(4, 4), nn.ReLU()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.stack(x))

    net, x = Net(), torch.randn(30, 4)
    study = strati.study(net, data=(x, net(x).argmax(1)), performance="loss", interventions="drop")
    plan = strati.plan(study, budget="parameters=0.5", action="drop", combinations=0)
    with pytest.raises(UnsupportedError, match="without a number"):
        strati.apply(plan, net, out=tmp_path / "out")
    with pytest.raises(BadInputError, match="is not a plan"):
        strati.apply({"layers": []}, net, out=tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_module_in_memory_is_written_as_safetensors(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))
    x = torch.randn(60, 3, 6, 6)
    y = net(x).argmax(1)
    before = {k: v.clone() for k, v in net.state_dict().items()}
    study = strati.study(
        net, data=(x, y), performance="loss", interventions=strati.truncate(rank=[1, 2, 3]), spectral=False
    )
    plan = strati.plan(study, budget="parameters=0.6", action="truncate", combinations=2)
    for factored in (False, True):
        found = strati.apply(plan, net, out=tmp_path / f"out{factored}", factored=factored)
        assert found.measured["performance"] == pytest.approx(plan.predicted["measured"], rel=1e-4)
        assert (tmp_path / f"out{factored}" / "model.safetensors").is_file()
    made = strati.load_factored(tmp_path / "outTrue", net)
    with strati.truncated(net, plan.choices), torch.no_grad():
        want = net(x)
    with torch.no_grad():
        assert torch.allclose(made(x), want, atol=1e-4)
    assert all(torch.equal(before[k], v) for k, v in net.state_dict().items())
    with pytest.raises(BadInputError, match="another network than the plan was made for"):
        strati.apply(
            plan, nn.Sequential(*[nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8, 4)]), out=tmp_path / "x"
        )


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """No file may grow beyond ``size`` bytes: the operating system fails the write, as it does on a full disk."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("factored", [False, True])
@pytest.mark.parametrize("ending", ["module", ".safetensors", ".npz", ".pt"])
def test_a_write_that_fails_leaves_nothing(tmp_path: Path, ending: str, factored: bool) -> None:
    """Every writer, stopped by the operating system: one line, the original and its folder as they were."""
    path, study = digits_study(tmp_path, ".safetensors" if ending == "module" else ending)
    plan = strati.plan(study, budget="parameters=0.6", action="truncate", combinations=0)
    model: Any = open_network_of(path, study) if ending == "module" else path
    before = path.read_bytes()
    there = sorted(p.name for p in tmp_path.iterdir())
    with file_size_limit(3000), pytest.raises(BadInputError, match="File too large") as caught:
        strati.apply(plan, model, out=tmp_path / "out", factored=factored)
    assert "\n" not in str(caught.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == there and path.read_bytes() == before
    for form in ("csv", "json", "peft"):
        with file_size_limit(20), pytest.raises(BadInputError, match="File too large"):
            plan.export(tmp_path / "plan", format=form)  # type: ignore[arg-type]
    assert sorted(p.name for p in tmp_path.iterdir()) == there
    # with room again the same call works, and the file is what the library itself reads
    strati.apply(plan, model, out=tmp_path / "out", factored=factored)
    if ending == "module":
        written = load_file(tmp_path / "out" / "model.safetensors")
        assert set(written) >= {n for n in load_file(path) if n.endswith("bias")}


def test_a_study_on_a_full_disk_resumes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 5))
    x = torch.randn(64, 16)
    data = x, net(x).argmax(1)
    options: dict[str, Any] = {"performance": "loss", "spectral": False}
    options |= {"interventions": strati.truncate(rank=list(range(1, 17))), "out": tmp_path / "s"}
    with (
        file_size_limit(40_000),
        pytest.raises(BadInputError, match="is the disk full\\? run the same command"),
    ):
        strati.study(net, data=data, **options)
    found = strati.study(net, data=data, **options)
    once = strati.study(net, data=data, **(options | {"out": None}))
    assert found.failed == 0
    assert [r["performance"] for r in found.rows] == [r["performance"] for r in once.rows]


def test_bad_places_and_full_disks(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = strati.plan(llama / "study", budget="bits=3", action="quantise", combinations=0)
    model = llama / "model"
    before = bytes_of(model)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("here")
    cases = [
        (model, "over the original"),
        (model / "inside", "over the original"),
        (tmp_path / "full", "not an empty folder"),
        (tmp_path / "no" / "where", "does not exist"),
    ]
    for out, word in cases:
        with pytest.raises(BadInputError, match=word):
            strati.apply(plan, model, out=out)
    import shutil

    real = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda p: real(p)._replace(free=10))
    with pytest.raises(BadInputError, match="not enough space"):
        strati.apply(plan, model, out=tmp_path / "out")
    monkeypatch.undo()

    with file_size_limit(4000), pytest.raises(BadInputError, match=r"File too large\); nothing was left"):
        strati.apply(plan, model, out=tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["full"]
    assert bytes_of(model) == before


def test_formats_that_cannot_be_written(tmp_path: Path) -> None:
    path, study = digits_study(tmp_path, ".safetensors")
    plan = strati.plan(study, budget="parameters=0.8", action="truncate", combinations=0)
    from strati.interventions.compress.rewrite_checkpoint import cast

    with pytest.raises(UnsupportedError, match="stored as I8"):
        cast(np.zeros(2), "I8", "w")
    with pytest.raises(BadInputError, match="no such file"):
        strati.apply(plan, tmp_path / "nowhere.safetensors", out=tmp_path / "o")
    with pytest.raises(BadInputError, match="is the original network's folder"):
        strati.apply(plan, path, out=tmp_path)
