"""Fault injection: every kind of damage is found in three architectures, and sound networks raise no alarm."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from command import run_strati
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

import strati
from strati import embedded
from strati.comparison.check import INTEGRITY
from strati.comparison.damage import CHUNK, summarise

Tensors = dict[str, NDArray[np.generic]]

NAMES = {
    "llama": {
        "block": "model.layers.{}.",
        "query": "self_attn.q_proj.weight",
        "matrix": "mlp.up_proj.weight",
        "norm": "input_layernorm.weight",
    },
    "gpt2": {
        "block": "transformer.h.{}.",
        "query": "attn.c_attn.weight",
        "matrix": "mlp.c_fc.weight",
        "norm": "ln_1.weight",
    },
    "bert": {
        "block": "encoder.layer.{}.",
        "query": "attention.self.query.weight",
        "matrix": "intermediate.dense.weight",
        "norm": "attention.output.LayerNorm.weight",
    },
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    import torch
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 5, "num_attention_heads": 4}
    models = {
        "llama": transformers.LlamaForCausalLM(
            transformers.LlamaConfig(vocab_size=200, num_key_value_heads=2, **sizes)
        ),
        "gpt2": transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=200, n_positions=64, n_embd=64, n_layer=5, n_head=4)
        ),
        "bert": transformers.BertModel(transformers.BertConfig(vocab_size=200, **sizes)),
    }
    root = tmp_path_factory.mktemp("networks")
    for name, model in models.items():
        model.save_pretrained(root / name)
    return {name: root / name for name in models}


@pytest.fixture(params=sorted(NAMES))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def name_of(kind: str, what: str, block: int) -> str:
    return NAMES[kind]["block"].format(block) + NAMES[kind][what]


def damaged(source: Path, target: Path, change: Callable[[Tensors], object]) -> Path:
    shutil.copytree(source, target)
    tensors: Tensors = {
        name: values.copy() for name, values in load_file(source / "model.safetensors").items()
    }
    change(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def codes(place: object) -> set[tuple[str | None, str]]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return {(finding.layer, finding.code) for finding in strati.check(place).found}  # type: ignore[arg-type]


def fill(name: str, start: int, count: int, entry: float) -> Callable[[Tensors], object]:
    def change(tensors: Tensors) -> None:
        tensors[name].reshape(-1)[start : start + count] = entry

    return change


def flip(name: str, place: int) -> Callable[[Tensors], object]:
    def change(tensors: Tensors) -> None:
        bits = tensors[name].reshape(-1).view(np.uint32)
        bits[place] ^= np.uint32(1 << 30)

    return change


def test_sound_networks_have_no_findings(folders: dict[str, Path], kind: str) -> None:
    checked = strati.check(folders[kind])
    assert (checked.found, checked.passed) == ((), True)
    assert checked.tensors == checked.checked == len(load_file(folders[kind] / "model.safetensors"))
    assert checked.finite == checked.checked
    assert checked.layers == checked.expected_layers > 20


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
@pytest.mark.parametrize("pruned", ["dense", "half", "rows", "heads"])
def test_conversions_and_pruned_networks_have_no_findings(
    folders: dict[str, Path], kind: str, dtype: type, pruned: str
) -> None:
    rng = np.random.default_rng(1)
    tensors = load_file(folders[kind] / "model.safetensors")
    for name, values in tensors.items():
        if values.ndim == 2 and (".h." in name or "layer" in name):
            if pruned == "half":
                values = values * (np.abs(values) > np.median(np.abs(values)))
            elif pruned == "rows":
                values = values * (rng.random((len(values), 1)) < 0.6)
            elif pruned == "heads" and (".1." in name or ".3." in name):
                values = values.copy()
                values[16:48] = 0
        tensors[name] = values.astype(dtype)
    assert codes(tensors) == set()


@pytest.mark.parametrize("block", [0, 2, 4])
def test_a_norm_of_nan_zeros_or_another_scale(
    folders: dict[str, Path], kind: str, block: int, tmp_path: Path
) -> None:
    name = name_of(kind, "norm", block)
    for number, (entry, code) in enumerate(
        [(np.nan, "not-finite"), (np.inf, "not-finite"), (0.0, "constant")]
    ):
        place = damaged(folders[kind], tmp_path / str(number), fill(name, 0, 64, entry))
        assert codes(place) == {(name, code)}
    place = damaged(folders[kind], tmp_path / "one", fill(name, 63, 1, np.nan))
    assert codes(place) == {(name, "not-finite")}
    for factor in (3.0, 1 / 3):
        scaled = {name: load_file(folders[kind] / "model.safetensors")[name] * np.float32(factor)}
        place = damaged(folders[kind], tmp_path / str(factor), lambda t, scaled=scaled: t.update(scaled))  # type: ignore[misc]
        assert codes(place) == {(name, "odd-one-out")}


def test_norms_plus_one_are_found_with_a_base(folders: dict[str, Path], kind: str, tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        for name in tensors:
            if name.endswith("weight") and ("norm" in name.lower() or ".ln_" in name):
                tensors[name] = tensors[name] + np.float32(1)

    place = damaged(folders[kind], tmp_path / "plus", change)
    assert codes(place) == set()
    found = strati.check(place, folders[kind], workers=1).found
    assert {finding.code for finding in found} == {"moved-vectors"}
    assert len(found) >= 10
    assert strati.check(folders[kind], folders[kind], workers=1).passed


def test_a_module_with_an_adapter_has_its_base_weights(folders: dict[str, Path]) -> None:
    peft = pytest.importorskip("peft")
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folders["llama"])
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    assert codes(peft.get_peft_model(model, config)) == set()


def test_a_vector_that_only_one_network_has() -> None:
    network = load_file(embedded.path("digits-mlp.safetensors"))
    fewer = {name: values for name, values in network.items() if name != "2.bias"}
    for model, base, code in ((fewer, network, "missing-tensors"), (network, fewer, "unexpected-tensors")):
        found = strati.check(model, base, workers=1).found
        assert [(finding.layer, finding.code) for finding in found] == [("2.bias", code)]


@pytest.mark.parametrize("block", [0, 3, 4])
def test_missing_tensors_and_blocks(folders: dict[str, Path], kind: str, block: int, tmp_path: Path) -> None:
    for what in ("query", "norm"):
        name = name_of(kind, what, block)
        place = damaged(folders[kind], tmp_path / what, lambda t, name=name: t.pop(name))  # type: ignore[misc]
        assert codes(place) == {(name, "missing-tensors")}
    prefix = NAMES[kind]["block"].format(block)

    def drop(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith(prefix)]:
            del tensors[name]

    place = damaged(folders[kind], tmp_path / "block", drop)
    checked = strati.check(place)
    assert [(f.layer, f.code) for f in checked.found] == [(prefix[:-1], "missing-tensors")]
    assert checked.layers < checked.expected_layers


@pytest.mark.parametrize("name", ["embed_tokens.weight", "norm.weight"])
def test_tensors_outside_of_the_blocks_are_expected(
    folders: dict[str, Path], name: str, tmp_path: Path
) -> None:
    place = damaged(folders["llama"], tmp_path / "x", lambda t: t.pop(f"model.{name}"))
    assert codes(place) == {(f"model.{name}", "missing-tensors")}


def test_a_network_of_two_blocks_is_held_against_its_config(folders: dict[str, Path], tmp_path: Path) -> None:
    def shorten(tensors: Tensors) -> None:
        for name in [name for name in tensors if any(f".layers.{b}." in name for b in (2, 3, 4))]:
            del tensors[name]

    place = damaged(folders["llama"], tmp_path / "two", shorten)
    config = json.loads((place / "config.json").read_text()) | {"num_hidden_layers": 2}
    (place / "config.json").write_text(json.dumps(config))
    assert codes(place) == set()
    (place / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    assert codes(place) == {("model.layers.1", "unexpected-tensors")}
    (place / "config.json").write_text(json.dumps(config))
    name = name_of("llama", "query", 1)
    again = damaged(place, tmp_path / "again", lambda t: t.pop(name))
    assert codes(again) == {(name, "missing-tensors")}
    norm = name_of("llama", "norm", 0)
    odd = damaged(place, tmp_path / "odd", lambda t: t.update({norm: t[norm] * np.float32(3)}))
    assert codes(odd) == {(norm, "odd-one-out")}


@pytest.mark.parametrize("extra", ["self_attn.old.weight", "stray"])
def test_unexpected_tensors(folders: dict[str, Path], extra: str, tmp_path: Path) -> None:
    name = f"model.layers.2.{extra}"
    noise = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
    assert codes(damaged(folders["llama"], tmp_path / "x", lambda t: t.update({name: noise}))) == {
        (name, "unexpected-tensors")
    }
    buffers = {f"model.layers.{b}.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32) for b in (1, 2)}
    assert codes(damaged(folders["llama"], tmp_path / "y", lambda t: t.update(buffers))) == set()


@pytest.mark.parametrize(("start", "count"), [(0, 1024), (4096, 2048), (1111, 1500), (8000, 2240)])
@pytest.mark.parametrize("entry", [0.0, 0.125])
def test_holes_aligned_or_not(
    folders: dict[str, Path], kind: str, start: int, count: int, entry: float, tmp_path: Path
) -> None:
    name = name_of(kind, "matrix", 1)
    assert codes(damaged(folders[kind], tmp_path / "x", fill(name, start, count, entry))) == {(name, "hole")}


def test_a_hole_across_chunks_and_in_halves() -> None:
    for dtype in (np.float32, np.float16, ml_dtypes.bfloat16, np.float64):
        values = np.random.default_rng(0).normal(size=(700, 400)).astype(dtype)
        count = 4096 // values.itemsize
        values.reshape(-1)[CHUNK - count // 2 - 3 : CHUNK + count // 2 - 3] = 0
        (run,) = summarise("w", values).runs
        assert (run.start, run.stop) == (CHUNK - count // 2 - 3, CHUNK + count // 2 - 3)
        assert [f.code for f in strati.check({"fc.weight": values}).found] == ["hole"]
        values = np.random.default_rng(0).normal(size=(700, 400)).astype(dtype)
        values.reshape(-1)[::5000] = 0
        assert strati.check({"fc.weight": values}).passed


def test_rows_of_unused_tokens_are_no_holes() -> None:
    table = np.random.default_rng(0).normal(size=(300, 64)).astype(np.float32)
    table[260:] = 0
    assert strati.check({"model.embed_tokens.weight": table}).passed
    assert not strati.check({"fc1.weight": table[:280].copy()}).passed


@pytest.mark.parametrize("place", [0, 777, -1])
def test_flipped_exponent_bits(folders: dict[str, Path], kind: str, place: int, tmp_path: Path) -> None:
    name = name_of(kind, "query", 3)
    ((layer, code),) = codes(damaged(folders[kind], tmp_path / "x", flip(name, place)))
    assert (layer, code) == (name, "wild-entry")


def test_duplicated_tensors(folders: dict[str, Path], kind: str, tmp_path: Path) -> None:
    a, b = name_of(kind, "query", 1), name_of(kind, "query", 3)
    assert codes(damaged(folders[kind], tmp_path / "x", lambda t: t.update({b: t[a].copy()}))) == {
        (b, "duplicate-tensors")
    }


def test_tied_embeddings_are_no_duplicates() -> None:
    table = np.random.default_rng(0).normal(size=(50, 16)).astype(np.float32)
    assert strati.check({"model.embed_tokens.weight": table, "lm_head.weight": table.copy()}).passed


def test_wrong_shapes(folders: dict[str, Path], kind: str, tmp_path: Path) -> None:
    name = name_of(kind, "matrix", 2)
    place = damaged(folders[kind], tmp_path / "x", lambda t: t.update({name: t[name][:-1].copy()}))
    assert codes(place) == {(name, "size-mismatch")}


@pytest.fixture
def shards(folders: dict[str, Path], tmp_path: Path) -> Path:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folders["llama"])
    model.save_pretrained(tmp_path / "shards", max_shard_size="400KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    return tmp_path / "shards"


def test_shards(shards: Path) -> None:
    assert codes(shards) == set()
    last = sorted(shards.glob("*.safetensors"))[-1]
    stale = shards / last.name.replace("-of-", "9-of-").replace("model-0", "model-")
    shutil.copy(last, stale)
    assert codes(shards) == {(None, "stale-shard")}
    stale.unlink()
    whole = last.read_bytes()
    tensors = load_file(last)
    lost = sorted(tensors)[-1]
    save_file({name: values for name, values in tensors.items() if name != lost}, last)
    assert codes(shards) == {(lost, "missing-tensors")}
    last.write_bytes(whole[:-100])
    done = run_strati("check", shards)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "truncated" in done.stderr
    last.unlink()
    done = run_strati("check", shards)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "missing" in done.stderr


def test_the_index_says_how_many_bytes_there_are(shards: Path) -> None:
    index = shards / "model.safetensors.index.json"
    table = json.loads(index.read_text())
    table["metadata"]["total_size"] += 12
    index.write_text(json.dumps(table))
    assert codes(shards) == {(None, "size-mismatch")}


def test_shards_beside_the_whole_file_are_stale(folders: dict[str, Path], shards: Path) -> None:
    shutil.copy(folders["llama"] / "model.safetensors", shards / "model.safetensors")
    assert codes(shards) == {(None, "stale-shard")}


def test_a_shard_alone_is_not_held_against_other_blocks(shards: Path) -> None:
    assert codes(sorted(shards.glob("*.safetensors"))[0]) == set()


def test_the_answer_and_the_exit_code(folders: dict[str, Path], tmp_path: Path) -> None:
    done = run_strati("check", folders["llama"])
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0] == (
        "48 of 48 tensors finite, 37 of 37 expected layers present, no damage found."
    )
    name = name_of("llama", "norm", 1)
    place = damaged(folders["llama"], tmp_path / "x", fill(name, 0, 64, np.nan))
    done = run_strati("check", place, "--json", tmp_path / "check.json")
    assert (done.returncode, done.stderr) == (3, "")
    answer = " ".join(done.stdout.split())
    assert answer.startswith(f"FAIL: not-finite in {name}. 47 of 48 tensors finite, 37 of 37 expected")
    fields = json.loads((tmp_path / "check.json").read_text())
    assert (fields["tensors"], fields["checked"], fields["passed"]) == (48, 48, False)
    assert fields["fail_on"] == list(INTEGRITY)


def test_spectra_are_computed_only_where_asked() -> None:
    rng = np.random.default_rng(0)
    thin = rng.normal(size=(80, 5)) @ rng.normal(size=(5, 80))
    network = {"fc.weight": (thin + 1e-9 * rng.normal(size=(80, 80)))}
    assert strati.check(network).found == ()
    checked = strati.check(network, spectra=True, workers=1)
    assert "rank-collapse" in {finding.code for finding in checked.found}
    assert checked.passed
    assert not strati.check(network, fail_on="rank-collapse", workers=1).passed


def test_sound_vectors_are_no_alarm() -> None:
    rng = np.random.default_rng(0)
    network: Tensors = {}
    for block in range(6):
        prefix = f"h.{block}."
        network[f"{prefix}attn.q_proj.weight"] = rng.normal(size=(64, 64)).astype(np.float32)
        network[f"{prefix}attn.q_proj.bias"] = np.zeros(64, np.float32)
        network[f"{prefix}ln.weight"] = np.ones(64, np.float32)
        network[f"{prefix}ln.bias"] = np.zeros(64, np.float32)
        network[f"{prefix}attn.bias"] = np.tril(np.ones((1, 1, 64, 64), np.float32))
        network[f"{prefix}attn.masked_bias"] = np.array(-np.inf, np.float32)
        network[f"{prefix}rotary_emb.inv_freq"] = np.geomspace(1, 1e-4, 32).astype(np.float32)
        network[f"{prefix}bn.num_batches_tracked"] = np.array(7, np.int64)
    assert codes(network) == set()


# Logarithms of the root mean squares of norms in blocks of stories15M, MiniLM and Whisper.
STORIES = [-0.04, 0.04, 0.17, 0.29, 0.43, 0.56]
MINILM = [-0.54, -0.52, -0.50, -0.52, -0.62, -0.58]
WHISPER = [0.76, 0.71, 0.91, 2.33]


@pytest.mark.parametrize("logs", [STORIES, MINILM, WHISPER])
def test_trained_norms_are_not_odd_until_one_is_scaled(logs: list[float]) -> None:
    names = [f"h.{block}.ln.weight" for block in range(len(logs))]
    network = {name: np.full(32, np.exp(y), np.float32) for name, y in zip(names, logs, strict=True)}
    assert codes(network) == set()
    if logs is not WHISPER:
        for name in names[1:-1]:
            for factor in (3, 1 / 3):
                assert codes(network | {name: network[name] * np.float32(factor)}) == {(name, "odd-one-out")}


def test_blocks_that_differ_by_design_are_no_alarm() -> None:
    rng = np.random.default_rng(0)

    def noise(*shape: int) -> NDArray[np.float32]:
        return rng.normal(size=shape).astype(np.float32)

    stage = {f"stages.2.layers.{b}.conv{i}.weight": noise(16, 64, 1, 1) for b in range(4) for i in range(3)}
    stage["stages.2.layers.0.conv0.weight"] = noise(16, 32, 1, 1)
    stage["stages.2.layers.0.shortcut.weight"] = noise(64, 32, 1, 1)
    tables = {f"blocks.{b}.attn.relative_position_bias_table": np.zeros((9, 4), np.float32) for b in range(3)}
    rates = np.log(np.arange(1.0, 17.0, dtype=np.float32)) * np.ones((8, 1), np.float32)
    mamba = {f"layers.{b}.mamba.A_log": rates.copy() for b in (0, 2)}
    dense_first = {"layers.0.mlp.up_proj.weight": noise(8, 8)} | {
        f"layers.{b}.mlp.experts.{e}.up_proj.weight": noise(8, 8) for b in range(1, 4) for e in range(3)
    }
    dense_first |= {f"layers.{b}.attn.{p}.weight": noise(8, 8) for b in range(4) for p in "qkvo"}
    for network in (stage, tables, mamba, dense_first):
        assert codes(network) == set()
    del dense_first["layers.0.attn.k.weight"]
    assert codes(dense_first) == {("layers.0.attn.k.weight", "missing-tensors")}


@pytest.mark.parametrize("name", ["digits-mlp.safetensors", "digits-mlp-init.safetensors"])
def test_the_embedded_networks_are_sound(name: str) -> None:
    assert codes(embedded.path(name)) == set()


def test_cached_networks_are_sound() -> None:
    cache = Path.home() / ".cache" / "strati" / "zoo"
    places = [p for p in cache.glob("[a-z]*/*") if p.suffix in (".pth", ".h5", ".pt")]
    places += [p.parent for p in cache.glob("[a-z]*/model.safetensors")]
    if not places:
        pytest.skip("no network in the cache")
    assert {str(place): codes(place) for place in places} == {str(place): set() for place in places}
