"""Networks in memory: a module or a state dict scans as its saved file does, number for number."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import strati
from strati.io.inspection import inspect


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.deep = nn.Conv2d(8, 8, 3, groups=8)
        self.lstm = nn.LSTM(8, 6, bidirectional=True)
        self.attention = nn.MultiheadAttention(8, 2)
        self.token = nn.Embedding(11, 8)
        self.fc = nn.Linear(8, 5)


def tied() -> nn.Module:
    model = nn.ModuleDict(
        {"wte": nn.Embedding(40, 16), "body": nn.Linear(16, 16), "lm_head": nn.Linear(16, 40)}
    )
    model["lm_head"].weight = model["wte"].weight
    return model


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=24, vocab_size=50, n_positions=16))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=50))


def peft(model: nn.Module, *targets: str) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(
        model, LoraConfig(r=3, target_modules=list(targets), fan_in_fan_out="c_attn" in targets)
    )


MODELS = {
    "mlp": lambda: nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 7)),
    "half": lambda: nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 7)).half(),
    "bfloat16": lambda: nn.Linear(30, 20).bfloat16(),
    "double": lambda: nn.Linear(30, 20).double(),
    "kinds": Convolutional,
    "tied": tied,
    "gpt2": gpt2,
    "llama": llama,
    "parallel": lambda: nn.DataParallel(nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4))),
    "parametrized": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 5)),
}


@pytest.fixture(params=MODELS)
def model(request):
    torch.manual_seed(0)
    return MODELS[request.param]()


def numbers(scan) -> dict[str, dict]:
    plain = json.loads(scan.to_json())
    words = ("role", "kind", "view")  # a module may know better what a layer is; no number may differ
    return {row["name"]: {k: v for k, v in row.items() if k not in words} for row in plain["layers"]}


def test_a_module_scans_as_its_saved_file(model, tmp_path):
    file = tmp_path / "saved.pt"
    torch.save(model.state_dict(), file)
    saved, held = strati.scan(file), strati.scan(model)
    assert numbers(held) == numbers(saved)
    assert (held.parameters, held.tensors) == (saved.parameters, saved.tensors)
    assert [s.name for s in held.skipped] == [s.name for s in saved.skipped]


def test_a_state_dict_scans_as_its_saved_file(model, tmp_path):
    file = tmp_path / "saved.pt"
    torch.save(model.state_dict(), file)
    saved = strati.scan(file)
    assert numbers(strati.scan(model.state_dict())) == numbers(saved)
    assert strati.scan(model.state_dict()).frame().equals(saved.frame())


def test_a_module_scans_as_its_safetensors(tmp_path):
    from safetensors.torch import save_file

    torch.manual_seed(1)
    model = MODELS["mlp"]()
    save_file(model.state_dict(), tmp_path / "m.safetensors")
    assert numbers(strati.scan(model)) == numbers(strati.scan(tmp_path / "m.safetensors"))


def test_a_directory_and_the_model_loaded_from_it(tmp_path):
    torch.manual_seed(2)
    model = gpt2()
    model.save_pretrained(tmp_path)
    assert numbers(strati.scan(tmp_path, split_qkv=True)).keys() == {
        name for name in numbers(strati.scan(model, split_qkv=True)) if name != "lm_head.weight"
    }
    assert strati.open(model).config["model_type"] == "gpt2"


def test_a_peft_model_opens_as_its_saved_adapter(tmp_path):
    torch.manual_seed(5)
    model = peft(llama(), "q_proj", "down_proj")
    for name, value in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(value)
    model.save_pretrained(tmp_path)
    saved, held = numbers(strati.scan(tmp_path)), numbers(strati.scan(model))
    assert len(saved) == 4
    assert {name: held[name] for name in saved} == saved


def test_numpy_state_dict():
    generator = np.random.default_rng(0)
    arrays = {"fc.weight": generator.normal(size=(30, 20)), "fc.bias": np.zeros(30)}
    torch_dict = {name: torch.from_numpy(array) for name, array in arrays.items()}
    assert strati.scan(arrays).frame().equals(strati.scan(torch_dict).frame())


def test_conv1d_is_turned_because_it_is_one():
    from transformers.pytorch_utils import Conv1D

    odd = nn.ModuleDict({"anything": Conv1D(6, 4), "c_attn": nn.Linear(9, 3), "c_proj": nn.Linear(4, 4)})
    rows = {row["name"]: row for row in inspect(odd).layers}
    assert (rows["anything.weight"]["rows"], rows["anything.weight"]["cols"]) == (6, 4)
    assert "transposed" in rows["anything.weight"]["view"]
    # a Linear of GPT-2's names and shapes is stored outputs first, and a module says so
    assert rows["c_attn.weight"]["view"] == rows["c_proj.weight"]["view"] == "as stored"


def test_types_are_known_whatever_the_names():
    model = nn.ModuleDict(
        {"a": nn.Embedding(5, 3), "b": nn.Conv1d(4, 4, 20), "c": nn.LSTM(4, 3), "d": nn.Bilinear(2, 3, 4)}
    )
    rows = {row["name"]: row for row in inspect(model).layers}
    assert rows["a.weight"]["role"] == "embedding"
    assert (rows["b.weight"]["kind"], rows["b.weight"]["matrices"]) == ("conv", 20)
    assert rows["c.weight_ih_l0"]["kind"] == rows["c.weight_hh_l0"]["kind"] == "lstm"
    assert [name for name in rows if name.startswith("d.")] == [f"d.weight[{i}]" for i in range(4)]


def test_roles_inside_a_peft_model():
    rows = {row["name"]: row for row in inspect(peft(gpt2(), "c_attn")).layers}
    inner = rows["base_model.model.transformer.h.0.attn.c_attn.base_layer.weight"]
    assert inner["role"] == "attention.qkv"
    assert "transposed" in inner["view"]


def test_tied_parameters_count_once():
    net = strati.open(tied())
    assert net.ties == {"lm_head.weight": "wte.weight"}
    assert net.parameters == 40 * 16 + 16 * 16 + 16 + 40
    equal = {"a": torch.ones(3, 3), "b": torch.ones(3, 3)}  # equal, but two tensors
    assert strati.open(equal).parameters == 18
    shared = np.ones((4, 4))
    assert strati.open({"a": shared, "b": shared, "c": shared[:2]}).parameters == 16


def test_checkpoint_dicts_are_searched_for_the_network():
    net = strati.open(
        {"model": {"fc.weight": torch.eye(3)}, "optimizer": {"state": {0: {"m": torch.eye(3)}}}}
    )
    assert [t.name for t in net.tensors] == ["fc.weight"]
    assert [flag.code for flag in net.warnings] == ["left-aside"]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: nn.Linear(3, 4, device="meta"), "weight: is on the meta device"),
        (lambda: nn.Sequential(nn.LazyLinear(4)), "0.weight: is a lazy parameter"),
        (lambda: {"w": torch.empty(3, 3, device="meta")}, "w: is on the meta device"),
        (lambda: nn.ReLU(), "ReLU: has no parameters"),
        (lambda: {"note": "hello"}, "state dict: holds no tensors"),
        (lambda: torch.eye(3), "is one array.*strati.spectrum"),
        (lambda: np.eye(3), "is one array.*strati.spectrum"),
    ],
)
def test_what_has_no_values_is_refused_in_one_line(make, says):
    with pytest.raises(strati.StratiError, match=says) as caught:
        strati.open(make())
    assert "\n" not in str(caught.value)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_tensors_that_cannot_be_read_are_skipped_with_a_reason():
    quantised = torch.quantize_per_tensor(torch.eye(3), 0.1, 0, torch.qint8)
    net = strati.open({"fc.weight": torch.eye(3), "sparse": torch.eye(3).to_sparse(), "q": quantised})
    reasons = {item.name: item.reason for item in net.skipped()}
    assert "sparse" in reasons["sparse"]
    assert "quantised" in reasons["q"]


def test_strides_views_and_gradients_do_not_matter(tmp_path):
    torch.manual_seed(3)
    weight = torch.randn(40, 30)
    views = {
        "a": weight,
        "b": weight.T.contiguous().T,  # another layout of the same numbers
        "c": nn.Parameter(weight.clone()),
        "d": torch.randn(40, 60)[:, ::2].copy_(weight),
    }
    net = strati.open(views)
    for name in views:
        np.testing.assert_array_equal(net.read(name), weight.numpy())
        with pytest.raises(ValueError, match="read-only"):
            net.read(name)[0, 0] = 1
    weight[0, 0] += 1  # the network reads the memory, not a copy; the user's tensors stay writable
    assert net.read("a")[0, 0] == weight[0, 0]


def test_the_model_is_left_as_it_was():
    model = gpt2().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    strati.scan(model)
    assert model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_network_in_memory_travels_as_its_values():
    net = strati.open(MODELS["bfloat16"]())
    again = pickle.loads(pickle.dumps(net.layers()[0]))
    np.testing.assert_array_equal(next(again.matrices()), next(net.layers()[0].matrices()))


def test_an_open_network_is_returned_as_it_is():
    net = strati.open({"w": np.eye(3)})
    assert strati.open(net) is net
    model = nn.Linear(2, 3)
    assert strati.open(model).module is model


def test_compare_takes_modules_and_files(tmp_path):
    torch.manual_seed(4)
    base, tuned = MODELS["mlp"](), MODELS["mlp"]()
    torch.save(tuned.state_dict(), tmp_path / "tuned.pt")
    held = strati.compare(base, tuned).frame()
    assert held.equals(strati.compare(base, tmp_path / "tuned.pt").frame())
    assert held.equals(strati.compare(base.state_dict(), tuned).frame())


# -- the Hugging Face cache ------------------------------------------------------------------------------


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path):
    """A cache of one model as huggingface_hub lays it out, in a process of its own (it reads its place at import)."""
    root = tmp_path / "hub"
    home = root / "models--acme--tiny"
    snapshot = home / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (home / "blobs").mkdir()
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(COMMIT)
    (home / "refs" / "v1").write_text(COMMIT)
    gpt2().save_pretrained(tmp_path / "saved")
    for file in ("config.json", "model.safetensors"):
        shutil.copy(tmp_path / "saved" / file, home / "blobs" / file.replace(".", ""))
        (snapshot / file).symlink_to(Path("../../blobs") / file.replace(".", ""))
    empty = root / "models--acme--empty"
    (empty / "snapshots" / COMMIT).mkdir(parents=True)
    (empty / "refs").mkdir()
    (empty / "refs" / "main").write_text(COMMIT)
    (empty / "snapshots" / COMMIT / "config.json").write_text("{}")
    return root


def in_process(code: str, cache: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    import os

    environment = os.environ | {"HF_HUB_CACHE": str(cache)}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=cwd, capture_output=True, text=True, timeout=120
    )


def test_models_in_the_cache_open_by_their_names(cache, tmp_path):
    code = (
        "import strati, sys\n"
        f"for name in ('acme/tiny', 'acme/tiny@main', 'acme/tiny@v1', 'acme/tiny@{COMMIT}'):\n"
        "    print(strati.open(name).parameters)\n"
        "for name in ('acme/tiny@v2', 'acme/ghost', 'acme/empty', 'acme/ghost.safetensors'):\n"
        "    try: strati.open(name)\n"
        "    except strati.StratiError as error: print(error)\n"
        "print('torch' in sys.modules)\n"
    )
    done = in_process(code, cache, tmp_path)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert lines[:4] == [str(strati.open(gpt2()).parameters)] * 4
    assert "hf download acme/tiny --revision v2" in lines[4]
    assert "hf download acme/ghost" in lines[5]
    assert "without its weights" in lines[6]
    assert "hf download acme/empty" in lines[6]
    assert "no such file" in lines[7]
    assert "hf download" not in lines[7]
    assert lines[8] == "False"


def test_a_path_comes_before_the_cache(cache, tmp_path):
    (tmp_path / "acme").mkdir()
    np.savez(tmp_path / "acme" / "tiny", w=np.eye(3))
    (tmp_path / "acme" / "tiny.npz").rename(tmp_path / "acme" / "tiny")
    done = in_process("import strati; print(strati.open('acme/tiny').format)", cache, tmp_path)
    assert done.stdout.strip() == "npz", done.stderr


def test_a_name_without_its_organisation_is_found_in_the_cache(cache, tmp_path):
    """As ``strati scan gpt2``: the model's own folder first, then any organisation; two of them are an error."""
    shutil.copytree(cache / "models--acme--tiny", cache / "models--plain", symlinks=True)
    for owner in ("one", "two"):
        shutil.copytree(cache / "models--acme--tiny", cache / f"models--{owner}--twice", symlinks=True)
    code = (
        "import strati\n"
        "for name in ('tiny', 'tiny@v1', 'plain', 'twice', 'ghost'):\n"
        "    try: print(strati.open(name).parameters)\n"
        "    except strati.StratiError as error: print(error)\n"
    )
    lines = in_process(code, cache, tmp_path).stdout.splitlines()
    assert lines[:3] == [str(strati.open(gpt2()).parameters)] * 3
    assert "one/twice, two/twice" in lines[3] and "hf download ghost" in lines[4]
