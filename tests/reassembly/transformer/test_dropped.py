"""Transformers dropped and put back: real networks where they are cached, random ones for everything that must
hold of any."""

import json

import numpy as np
import pytest
from command import run_strati

import strati
from strati.core.errors import BadInputError, StratiError
from strati.reassembly.transformer.blueprint import blueprint_of
from strati.reassembly.transformer.identify import correspond, identify
from strati.reassembly.transformer.pieces import canonical, stored
from strati.reassembly.transformer.shuffle import shuffle_transformer
from strati.reassembly.transformer.solve import solve_transformer
from strati_reproductions.dropped_transformer.measure import measured, prior_of
from strati_reproductions.dropped_transformer.scoring import score
from strati_reproductions.zoo.fetch import cache

ZOO = {"stories15m": "stories15m-0.1.0", "minilm": "minilm-0.1.0", "minilm-tuned": "minilm-tuned-1.0.0"}


def zoo(name):
    place = cache() / "zoo" / ZOO[name]
    if not place.is_dir():
        pytest.skip(f"{name} is not cached; python -m strati_reproductions.zoo {name} fetches it")
    return place


def command(*words):
    return run_strati("reassemble", *words)


def llama(blocks=3, width=16, seed=0):
    rng = np.random.default_rng(seed)
    shapes = {
        "self_attn.q_proj": (width, width), "self_attn.k_proj": (width // 2, width),
        "self_attn.v_proj": (width // 2, width),
        "self_attn.o_proj": (width, width), "mlp.gate_proj": (40, width), "mlp.up_proj": (40, width),
        "mlp.down_proj": (width, 40), "input_layernorm": (width,), "post_attention_layernorm": (width,),
    }  # fmt: skip
    state = {
        f"model.layers.{k}.{name}.weight": rng.normal(size=shape).astype("f4")
        * (0.2 if len(shape) == 2 else 1)
        for k in range(blocks)
        for name, shape in shapes.items()
    }
    state["model.embed_tokens.weight"] = rng.normal(size=(50, width)).astype("f4")
    state["model.norm.weight"] = np.ones(width, "f4")
    state["lm_head.weight"] = rng.normal(size=(50, width)).astype("f4")
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": width, "intermediate_size": 40,
        "num_hidden_layers": blocks, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 50,
        "rope_theta": 1e4, "tie_word_embeddings": False, "max_position_embeddings": 64, "hidden_act": "silu",
    }  # fmt: skip
    return state, config


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stories15m", "minilm"])
def test_every_matrix_in_place_without_data_and_with_a_prior_of_other_networks_only(name):
    """Leave-one-network-out: nothing that was measured on the network (or its fine-tune) is used."""
    family = {"minilm", "minilm-tuned"} if name.startswith("minilm") else {name}
    prior = prior_of(m for k, m in measured().items() if k not in family)
    for seed in (1, 2):
        dropped = shuffle_transformer(zoo(name), seed=seed)
        found = solve_transformer(dropped.pieces, None, None, strati.configs.ReassembleConfig(), prior=prior)
        result = score(found.blocks, found.vectors, dropped.answer, dropped.pieces.arrays)
        assert result.all_matrices and result.forward and result.tau == 1.0
        assert found.exact is None and found.loss is None


def test_shuffled_weights_are_not_put_in_order_with_confidence():
    """Fresh initialisations have no order to find: their margins must say so."""
    state, config = llama(blocks=6, width=32)
    dropped = shuffle_transformer(state, network=config)
    found = strati.reassemble(dropped)
    assert len(found.uncertain) > len(dropped.pieces.arrays) // 3


def test_json_has_the_fields_and_the_answer_file_the_same(tmp_path):
    place = zoo("stories15m")
    done = command(
        "--drop", place, "--out", tmp_path / "p", "--seed", 4, "--answer", tmp_path / "a.json", "-q"
    )
    assert done.returncode == 0, done.stderr
    truth = json.loads((tmp_path / "a.json").read_text())
    done = command(tmp_path / "p", "--json", "-", "--out", tmp_path / "net")
    found = json.loads(done.stdout)
    for field in ("blocks", "vectors", "embedding", "head", "pairs", "order", "exact", "loss", "uncertain"):
        assert field in found
    assert set(found["blocks"][0]) == {"q", "k", "v", "out", "gate", "up", "down"}
    assert set(found["pairs"][0]) == {"a", "b", "right_by", "margin"}
    assert {"method", "margin", "direction_by"} <= set(found["order"])
    assert found["blocks"] == truth["blocks"] and found["embedding"] == truth["embedding"] == found["head"]
    assert found["exact"] is None and found["loss"] is None
    original, rebuilt = strati.open(place), strati.open(tmp_path / "net")
    for tensor in original.tensors:
        if "layernorm" not in tensor.name:
            assert np.array_equal(original.read(tensor.name), rebuilt.read(tensor.name)), tensor.name


@pytest.mark.slow
def test_reassembled_stories_generate_text(tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    dropped = shuffle_transformer(zoo("stories15m"), seed=5)
    model = transformers.AutoModelForCausalLM.from_pretrained(zoo("stories15m"))
    start = torch.tensor([[1, 9038, 2501, 263, 931]])
    tokens = model.generate(start, max_new_tokens=120, do_sample=False)[0].numpy()
    found = strati.reassemble(dropped, tokens, seconds=60)
    found.save(tmp_path / "net")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "net")
    text = again.generate(start, max_new_tokens=12, do_sample=False)[0].numpy()
    assert np.array_equal(
        text, tokens[: len(text)]
    )  # "Once upon a time, there was a little girl named Lily. She"
    right = score(found.blocks, found.vectors, dropped.answer, dropped.pieces.arrays)
    assert right.all_matrices and found.exact is None and found.loss < 1.5


def test_drop_is_seeded_and_names_are_gone(tmp_path):
    state, config = llama()
    one, two = (
        shuffle_transformer(state, network=config, seed=1),
        shuffle_transformer(state, network=config, seed=1),
    )
    other = shuffle_transformer(state, network=config, seed=2)
    assert one.answer["blocks"] == two.answer["blocks"] != other.answer["blocks"]
    shuffle_transformer(state, tmp_path / "p", network=config)
    names = [
        tensor.name for file in (tmp_path / "p").glob("*.safetensors") for tensor in strati.open(file).tensors
    ]
    assert len(names) == len(state) and not any("layers" in name for name in names)


def test_fused_matrices_are_cut_and_joined():
    shapes = {
        f"h.{k}.{m}.weight": s
        for k in (0, 1)
        for m, s in {
            "attn.c_attn": (8, 24),
            "attn.c_proj": (8, 8),
            "mlp.c_fc": (8, 32),
            "mlp.c_proj": (32, 8),
        }.items()
    }
    blueprint = blueprint_of(shapes, {"model_type": "gpt2", "n_head": 2})
    slot = blueprint.slot("qkv")
    values = np.random.default_rng(0).normal(size=(8, 24))
    parts = canonical(values, slot, blueprint)
    assert {role: part.shape for role, part in parts.items()} == {"q": (8, 8), "k": (8, 8), "v": (8, 8)}
    assert np.array_equal(parts["k"], values[:, 8:16].T)
    assert np.array_equal(stored(parts, slot, blueprint), values)


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda f: sorted(f.glob("piece_*"))[3].unlink(), "missing piece"),
        (
            lambda f: (f / "piece_99.safetensors").write_bytes((f / "piece_05.safetensors").read_bytes()),
            "piece",
        ),
        (lambda f: (f / "config.json").write_text("{"), "cannot be read as JSON"),
        (lambda f: np.savez(f / "piece_30.npz", piece=np.ones((7, 7), "f4")), "fits no place"),
        (lambda f: _spoil(f / "piece_05.safetensors"), "NaN"),
    ],
)
def test_bad_pieces_are_one_line(tmp_path, damage, why):
    state, config = llama()
    shuffle_transformer(state, tmp_path / "p", network=config)
    damage(tmp_path / "p")
    done = command(tmp_path / "p", "--out", tmp_path / "net", "--json", tmp_path / "r.json")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("strati: error: ") and done.stderr.count("\n") == 1 and why in done.stderr
    assert not (tmp_path / "net").exists() and not (tmp_path / "r.json").exists()


def _spoil(file):
    from safetensors.numpy import load_file, save_file

    tensors = load_file(file)
    for values in tensors.values():
        values.reshape(-1)[0] = np.nan
    save_file(tensors, file)


def test_two_networks_mixed_are_refused(tmp_path):
    state, config = llama()
    dropped = shuffle_transformer(state, network=config)
    arrays = dict(dropped.pieces.arrays)
    other = shuffle_transformer(*llama(seed=9)[:1], network=config).pieces
    arrays[len(arrays)] = other.arrays[0]
    from dataclasses import replace

    with pytest.raises(BadInputError, match=r"needs|fits no place"):
        strati.reassemble(replace(dropped.pieces, arrays=arrays))


def test_what_is_no_transformer_is_refused(tmp_path):
    with pytest.raises(StratiError):
        shuffle_transformer({"fc.weight": np.ones((3, 2))}, network={"num_attention_heads": 2})
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    with pytest.raises(BadInputError, match="not an empty folder"):
        shuffle_transformer(llama()[0], tmp_path / "full", network=llama()[1])


def test_a_stray_matrix_of_a_fine_tune_is_recognised(tmp_path):
    tuned = strati.open(zoo("minilm-tuned"))
    name = "encoder.layer.4.attention.self.value.weight"
    np.savez(tmp_path / "stray.npz", piece=tuned.read(name))
    done = run_strati("identify", tmp_path / "stray.npz", zoo("minilm"), "--json", "-")
    found = json.loads(done.stdout)
    assert (found["block"], found["role"], found["sure"]) == (4, "v", True)
    noise = identify(np.random.default_rng(0).normal(size=(384, 384)), zoo("minilm"))
    assert not noise.sure


def test_blocks_of_two_checkpoints_correspond():
    assert correspond(zoo("minilm"), zoo("minilm-tuned")).partners == (0, 1, 2, 3, 4, 5)


def test_scales_moved_between_norms_and_readers_are_undone():
    """Each reader, row by row, points as with its own block's norm taken in; other networks stay as they are."""
    from strati.reassembly.transformer.matrices import normalise_pieces

    state, config = llama(blocks=6, width=32, seed=3)
    for name, values in state.items():  # norms of training are near one, not around zero
        if "layernorm" in name:
            state[name] = 1 + 0.1 * values
    for rescale in (True, False):
        dropped = shuffle_transformer(state, network=config, seed=1, rescale=rescale)
        pieces = dropped.pieces
        folding = normalise_pieces(pieces)
        found = folding.pieces
        assert bool(folding.norm_of) is rescale
        for block, vectors in zip(dropped.answer["blocks"], dropped.answer["vectors"], strict=True):
            for role, norm in (("q", "norm1.weight"), ("v", "norm1.weight"), ("up", "norm2.weight")):
                plain = np.asarray(pieces.arrays[block[role]], float)
                if rescale:
                    assert folding.norm_of[block[role]] == vectors[norm]
                else:
                    assert np.array_equal(found.arrays[block[role]], pieces.arrays[block[role]])
                    continue
                wanted = plain * np.asarray(pieces.arrays[vectors[norm]], float)
                got = np.asarray(found.arrays[block[role]], float)
                cosine = (
                    (wanted * got).sum(axis=1) / np.linalg.norm(wanted, axis=1) / np.linalg.norm(got, axis=1)
                )
                assert cosine.min() > 0.999


def test_permuted_and_rescaled_stories_are_put_back():
    known = measured()
    prior = prior_of(one for name, one in known.items() if name != "stories15m")
    dropped = shuffle_transformer(zoo("stories15m"), seed=2, permute=True, rescale=True)
    found = solve_transformer(dropped.pieces, None, None, strati.configs.ReassembleConfig(), prior=prior)
    right = score(found.blocks, found.vectors, dropped.answer, dropped.pieces.arrays)
    assert right.all_matrices and right.forward


def test_pieces_without_roles_get_those_that_their_shapes_allow(tmp_path):
    from safetensors.numpy import load_file, save_file

    state, config = llama(blocks=2)
    shuffle_transformer(state, tmp_path / "p", network=config)
    for file in sorted((tmp_path / "p").glob("piece_*")):
        ((role, values),) = load_file(file).items()
        if role == "down":  # the only matrices of 16 x 40
            save_file({"piece": values}, file)
    assert len(strati.reassemble(tmp_path / "p").blocks) == 2
    for file in sorted((tmp_path / "p").glob("piece_*")):
        save_file({"piece": next(iter(load_file(file).values()))}, file)
    with pytest.raises(BadInputError, match="does not give its role"):
        strati.reassemble(tmp_path / "p")


def test_recorded_outputs_turn_a_reversed_network_round():
    from dataclasses import replace

    from strati.reassembly.transformer.verify import answers, verified

    pytest.importorskip("transformers")
    state, config = llama(blocks=4, width=16, seed=3)
    dropped = shuffle_transformer(state, network=config, seed=3)
    alone = strati.reassemble(dropped)
    blocks, vectors = (tuple(dropped.answer[part]) for part in ("blocks", "vectors"))
    truth = replace(alone, blocks=blocks, vectors=vectors)
    tokens = np.random.default_rng(0).integers(0, 50, (4, 16))
    outputs = answers(truth, tokens, strati.configs.ReassembleConfig())
    back = replace(truth, blocks=blocks[::-1], vectors=vectors[::-1])
    found = verified(back, tokens, outputs, strati.configs.ReassembleConfig(seconds=60))
    assert found.exact is True and found.blocks == blocks and found.vectors == vectors


def test_the_first_tokens_are_tried_before_all_of_them():
    """What a decoder answers to its first tokens does not depend on the rest; other networks are cut by rows."""
    from strati.reassembly.transformer.verify import _fewer

    torch = pytest.importorskip("torch")
    ids = {"input_ids": torch.zeros(8, 64, dtype=torch.long), "use_cache": False}
    wanted = np.arange(8 * 64 * 1000, dtype=np.float32).reshape(8, 64, 1000)
    inputs, few = _fewer(ids, wanted, True)
    assert tuple(inputs["input_ids"].shape) == (2, 12) and inputs["use_cache"] is False
    assert few.shape == (2, 12, 1000) and np.array_equal(few, wanted[:2, :12])
    inputs, few = _fewer(ids, wanted, False)
    assert tuple(inputs["input_ids"].shape) == (1, 64) and few.shape == (1, 64, 1000)
    assert _fewer(ids, wanted[..., :40], True) is None  # numbers are few enough
    images = {"pixel_values": torch.zeros(256, 1, 28, 28)}
    assert _fewer(images, np.zeros((256, 10), np.float32), False) is None


@pytest.mark.slow
def test_recorded_outputs_make_a_post_norm_network_exact():
    """A small BERT whose vectors are all in other blocks' places: its outputs bring every one of them home."""
    from dataclasses import replace

    from strati.reassembly.transformer.verify import answers, verified

    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2, vocab_size=40,
        max_position_embeddings=32, type_vocab_size=1,
    )  # fmt: skip
    model = transformers.BertForMaskedLM(config).eval()
    with torch.no_grad():
        for name, values in model.named_parameters():
            if values.ndim == 1:
                values.add_(0.1 * torch.randn_like(values))
            elif "layer" in name:
                values.mul_(3)
    tokens = np.random.default_rng(0).integers(0, 40, (8, 16))
    with torch.no_grad():
        outputs = model(input_ids=torch.tensor(tokens)).logits.numpy()
    dropped = shuffle_transformer(model, seed=3)
    alone = strati.reassemble(dropped)
    shuffled = tuple(
        {role: dropped.answer["vectors"][(k + 1) % 3][role] for role in dropped.answer["vectors"][0]}
        for k in range(3)
    )
    start = replace(
        alone, blocks=tuple(dropped.answer["blocks"]), vectors=shuffled, uncertain=tuple(range(60))
    )
    found = verified(start, tokens, outputs, strati.configs.ReassembleConfig(seconds=60))
    # softmax does not see a key's bias: those of two blocks may be exchanged, and no other vectors
    unfixed = dropped.pieces.blueprint.unfixed
    assert unfixed == {"k.bias"}
    after = score(found.blocks, found.vectors, dropped.answer, dropped.pieces.arrays, unfixed=unfixed)
    assert found.exact is True and found.uncertain == () and after.all_matrices
    assert after.vectors == after.of_vectors
    swapped = [dict(block) for block in dropped.answer["vectors"]]
    for role, right in (("k.bias", after.of_vectors), ("q.bias", after.of_vectors - 2)):
        swapped[0][role], swapped[1][role] = swapped[1][role], swapped[0][role]
        again = replace(start, vectors=tuple(swapped))
        told = score(start.blocks, swapped, dropped.answer, dropped.pieces.arrays, unfixed=unfixed)
        assert told.vectors == right
        change = np.abs(answers(again, tokens, strati.configs.ReassembleConfig()) - outputs).max()
        assert (change < 1e-4) == (role == "k.bias")


@pytest.mark.slow
def test_recorded_outputs_turn_a_reversed_vision_transformer_round():
    """transformers renames the parameters of a ViT when it loads them, so pieces are found by their values."""
    from dataclasses import replace

    from strati.reassembly.transformer.verify import answers, verified

    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2, image_size=8, patch_size=4,
        num_channels=1, num_labels=5,
    )  # fmt: skip
    model = transformers.ViTForImageClassification(config).eval()
    with torch.no_grad():
        for values in model.parameters():
            if values.ndim == 1:
                values.add_(0.1 * torch.randn_like(values))
            else:
                values.mul_(3)
    images = np.random.default_rng(0).normal(size=(16, 1, 8, 8)).astype("f4")
    with torch.no_grad():
        outputs = model(pixel_values=torch.tensor(images)).logits.numpy()
    dropped = shuffle_transformer(model, seed=3)
    blocks, vectors = (tuple(dropped.answer[part]) for part in ("blocks", "vectors"))
    truth = replace(strati.reassemble(dropped), blocks=blocks, vectors=vectors)
    settings = strati.configs.ReassembleConfig(seconds=60)
    assert np.allclose(answers(truth, images, settings), outputs, atol=1e-5)
    back = replace(truth, blocks=blocks[::-1], vectors=vectors[::-1])
    rebuilt = verified(back, images, outputs, settings)
    assert rebuilt.exact is True and rebuilt.blocks == blocks and rebuilt.vectors == vectors
