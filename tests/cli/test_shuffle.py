"""``strati shuffle``, ``strati reassemble`` and ``strati identify``: a puzzle made, solved and queried."""

import json

import jsonschema
import numpy as np
import pytest
from click.testing import CliRunner
from command import strati
from safetensors.numpy import save_file

from strati.cli.main import strati as group
from strati.schemas import schema


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A two-block Llama with random weights as a Hugging Face directory."""
    rng = np.random.default_rng(0)
    shapes = {
        "self_attn.q_proj": (16, 16), "self_attn.k_proj": (8, 16), "self_attn.v_proj": (8, 16),
        "self_attn.o_proj": (16, 16), "mlp.gate_proj": (24, 16), "mlp.up_proj": (24, 16), "mlp.down_proj": (16, 24),
        "input_layernorm": (16,), "post_attention_layernorm": (16,),
    }  # fmt: skip
    tensors = {
        f"model.layers.{k}.{name}.weight": (0.1 * rng.normal(size=shape) + (len(shape) == 1)).astype("f4")
        for k in range(2)
        for name, shape in shapes.items()
    }
    tensors["model.embed_tokens.weight"] = rng.normal(size=(30, 16)).astype("f4")
    tensors["model.norm.weight"] = np.ones(16, "f4")
    folder = tmp_path_factory.mktemp("llama")
    save_file(tensors, folder / "model.safetensors")
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_attention_heads": 4,
        "num_key_value_heads": 2, "hidden_size": 16, "num_hidden_layers": 2, "rope_theta": 1e4,
        "tie_word_embeddings": True, "vocab_size": 30,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def answer_first(done):
    """Exit code 0, a short first sentence, no wide line, and a command to run at the end."""
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines[0].split(". ")[0]) <= 100
    assert max(map(len, lines)) <= 80
    assert lines[-1].startswith("next: strati ")
    return lines


@pytest.mark.parametrize("name", ["shuffle", "reassemble", "identify"])
def test_at_most_twelve_options(name):
    command = group.get_command(None, name)
    visible = [p for p in command.params if p.param_type_name == "option" and not p.hidden]
    assert len(visible) <= 11  # and --help
    done = CliRunner().invoke(group, [name, "--help"])
    assert done.exit_code == 0 and "Example:" in done.output


def test_shuffle_then_reassemble_then_identify(model, tmp_path):
    lines = answer_first(
        strati("shuffle", model, "--out", "p", "--answer", "a.json", "--seed", 3, cwd=tmp_path)
    )
    assert lines[0] == "Wrote 20 unlabelled pieces of 2 blocks to p."
    truth = json.loads((tmp_path / "a.json").read_text())
    assert truth["schema"].startswith("strati.shuffle") and len(truth["blocks"]) == 2
    answer_first(strati("reassemble", "p", "--json", "r.json", "--out", "net", cwd=tmp_path))
    assert {
        n for block in json.loads((tmp_path / "r.json").read_text())["blocks"] for n in block.values()
    } == {n for block in truth["blocks"] for n in block.values()}
    assert (tmp_path / "net" / "model.safetensors").is_file()
    piece = tmp_path / "p" / f"piece_{truth['blocks'][1]['up']:02d}.safetensors"
    (tmp_path / "m").symlink_to(model)
    lines = answer_first(strati("identify", piece, "m", "--json", "i.json", "--html", "i.html", cwd=tmp_path))
    assert "up of block 1" in lines[0]
    place = json.loads((tmp_path / "i.json").read_text())
    assert (place["schema"], place["block"], place["role"], place["sure"]) == (
        "strati.identify/1",
        1,
        "up",
        True,
    )
    for result in (truth, place):
        jsonschema.Draft202012Validator(schema(result["schema"])).validate(result)
    lines = answer_first(strati("identify", "m", "m", cwd=tmp_path))
    assert lines[0] == "All blocks correspond in order."


def test_old_spellings_do_the_same(model, tmp_path):
    strati("shuffle", model, "--out", "new", "--answer", "new.json", "--seed", 5, cwd=tmp_path, expect=0)
    strati(
        "reassemble",
        "--drop",
        model,
        "--out",
        "old",
        "--answer",
        "old.json",
        "--seed",
        5,
        cwd=tmp_path,
        expect=0,
    )
    new, old_spelling = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("new", "old"))
    assert new.pop("summary") != old_spelling.pop("summary")  # they name the folder
    assert new == old_spelling
    for file in (tmp_path / "new").iterdir():
        assert file.read_bytes() == (tmp_path / "old" / file.name).read_bytes()
    refused = strati("shuffle", model, "--out", "new", cwd=tmp_path)
    assert (
        refused.returncode == 2
        and "not an empty folder" in refused.stderr
        and refused.stderr.count("\n") == 1
    )


def test_norms_that_are_nearly_alike_are_not_told_apart_with_confidence(model, tmp_path):
    norm = 1 + 1e-3 * np.random.default_rng(1).normal(size=16)
    np.savez(tmp_path / "norm.npz", piece=norm.astype("f4"))
    done = strati("identify", tmp_path / "norm.npz", model, "--json", "-", expect=0)
    best = json.loads(done.stdout)
    assert best["name"] == "model.norm.weight" and best["sure"] is True
    np.savez(tmp_path / "stray.npz", piece=np.random.default_rng(2).uniform(0.5, 1.5, 16).astype("f4"))
    assert (
        json.loads(strati("identify", tmp_path / "stray.npz", model, "--json", "-").stdout)["sure"] is False
    )


def test_a_residual_network_is_shuffled_and_put_back(tmp_path):
    rng = np.random.default_rng(0)
    layers = {
        f"blocks.{k}.{side}": shape for k in range(3) for side, shape in (("inp", (8, 4)), ("out", (4, 8)))
    }
    tensors = {}
    for name, shape in {**layers, "last": (1, 4)}.items():
        tensors[f"{name}.weight"] = (rng.normal(size=shape) / 2).astype("f4")
        tensors[f"{name}.bias"] = (rng.normal(size=shape[0]) / 5).astype("f4")
    save_file(tensors, tmp_path / "net.safetensors")
    x = z = rng.normal(size=(300, 4)).astype("f4")
    for k in range(3):
        hidden = np.maximum(z @ tensors[f"blocks.{k}.inp.weight"].T + tensors[f"blocks.{k}.inp.bias"], 0)
        z = z + hidden @ tensors[f"blocks.{k}.out.weight"].T + tensors[f"blocks.{k}.out.bias"]
    np.savez(tmp_path / "data.npz", x=x, y=z @ tensors["last.weight"].T + tensors["last.bias"])
    lines = answer_first(
        strati("shuffle", "net.safetensors", "--out", "p", "--answer", "a.json", cwd=tmp_path)
    )
    assert lines[0] == "Wrote 7 unlabelled pieces of 3 residual blocks to p."
    lines = answer_first(strati("reassemble", "p", "data.npz", "--json", "r.json", cwd=tmp_path))
    assert lines[0] == "All 7 pieces placed: the network reproduces its outputs exactly."
    both = [json.loads((tmp_path / name).read_text())["permutation"] for name in ("a.json", "r.json")]
    assert both[0] == both[1]
    refused = strati("shuffle", "net.safetensors", "--out", "q", "--permute", cwd=tmp_path)
    assert refused.returncode == 2 and not (tmp_path / "q").exists()
